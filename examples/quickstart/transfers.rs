//! What is to be done: a file of transfers, as a stream of rows.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::Path;

use async_stream::stream;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncBufRead, AsyncBufReadExt};

use crate::Error;

const HEADER: [&str; 4] = ["id", "from", "to", "amount"];

/// What each account begins with, in cents.
pub(crate) const OPENING: i64 = 100_000;

/// How many bad rows are told at once.
const TOLD: usize = 10;

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    id: String,
    pub(crate) from: String,
    pub(crate) to: String,
    /// In cents.
    pub(crate) amount: i64,
}

impl Transfer {
    /// Both accounts in the one order in which everybody locks them, so that no two transfers ever
    /// wait for each other.
    pub(crate) fn accounts_sorted(&self) -> [&str; 2] {
        let mut accounts = [&*self.from, &*self.to];
        accounts.sort_unstable();
        accounts
    }
}

/// A file's rows, all of them good.
#[derive(Debug)]
pub(crate) struct Transfers {
    pub(crate) rows: Vec<Transfer>,
    /// What each account must have in the end, whatever the order.
    pub(crate) expected: BTreeMap<String, i64>,
    /// The file as it was read, so that all processes read the same.
    pub(crate) bytes: Vec<u8>,
}

impl Transfers {
    /// Reads the whole file before anything is applied; a bad row is named by its line.
    pub(crate) async fn read(path: &Path) -> Result<Self, Error> {
        let file = |fault: String| Error::File {
            path: path.to_owned(),
            fault,
        };
        let bytes = tokio::fs::read(path)
            .await
            .map_err(|error| file(error.to_string()))?;
        Self::parse(bytes).await.map_err(file)
    }

    async fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for row in rows(&*bytes).collect::<Vec<_>>().await {
            match row {
                Ok(row) => good.push(row),
                Err(fault) => bad.push(fault),
            }
        }
        if !bad.is_empty() {
            let more = bad.len().saturating_sub(TOLD);
            bad.truncate(TOLD);
            if more > 0 {
                bad.push(format!("and {more} more"));
            }
            return Err(format!(
                "nothing was applied, because of\n  {}",
                bad.join("\n  ")
            ));
        }
        if good.is_empty() {
            return Err("it holds no transfers".to_owned());
        }
        let mut expected = BTreeMap::new();
        for row in &good {
            *expected.entry(row.from.clone()).or_insert(OPENING) -= row.amount;
            *expected.entry(row.to.clone()).or_insert(OPENING) += row.amount;
        }
        Ok(Self {
            rows: good,
            expected,
            bytes,
        })
    }

    /// The rows that are `instance`'s to apply.
    pub(crate) fn share(&self, instance: usize) -> Vec<Transfer> {
        let rows = self.rows.iter().skip(instance).step_by(crate::INSTANCES);
        rows.cloned().collect()
    }
}

/// The rows as they are read; an error names its line, and reading goes on after it.
fn rows(file: impl AsyncBufRead + Unpin) -> impl Stream<Item = Result<Transfer, String>> {
    stream! {
        let mut lines = file.lines();
        let mut number = 0;
        let mut headed = false;
        let mut check = Check::default();
        loop {
            number += 1;
            let line = match lines.next_line().await {
                Ok(Some(line)) => line,
                Ok(None) => return,
                Err(error) => {
                    yield Err(format!("line {number}: {error}"));
                    return;
                }
            };
            // Spreadsheets begin a file with a byte order mark.
            let line = line.trim_start_matches('\u{feff}').trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let columns: Vec<&str> = line.split(',').map(str::trim).collect();
            if !headed {
                headed = true;
                if columns != HEADER {
                    yield Err(format!("line {number}: the header must be {:?}", HEADER.join(",")));
                    return;
                }
                continue;
            }
            yield check
                .row(number, &columns)
                .map_err(|fault| format!("line {number}: {fault}"));
        }
    }
}

/// What makes a row good that it does not say by itself.
#[derive(Default)]
struct Check {
    /// Where each id was seen.
    ids: HashMap<String, u64>,
    /// So long as all amounts together fit, no balance can overflow.
    total: i64,
}

impl Check {
    fn row(&mut self, number: u64, columns: &[&str]) -> Result<Transfer, String> {
        let &[id, from, to, amount] = columns else {
            let header = HEADER.join(",");
            let count = columns.len();
            return Err(format!("it has {count} columns, and {header:?} has 4"));
        };
        for (name, value) in [("id", id), ("from", from), ("to", to)] {
            if let Some(fault) = name_fault(value) {
                return Err(format!("{name} {value:?} {fault}"));
            }
        }
        if from == to {
            return Err(format!("{from:?} pays itself"));
        }
        let amount = cents(amount)?;
        self.total = self
            .total
            .checked_add(amount)
            .filter(|total| *total <= i64::MAX - OPENING)
            .ok_or("with its amount all amounts together are more than a balance can hold")?;
        if let Some(line) = self.ids.insert(id.to_owned(), number) {
            return Err(format!("id {id:?} was seen in line {line}"));
        }
        Ok(Transfer {
            id: id.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            amount,
        })
    }
}

/// Why an id or an account cannot be called so; what is left can name a lock.
fn name_fault(name: &str) -> Option<&'static str> {
    let plain = |c: char| c.is_alphanumeric() || "-_.: ".contains(c);
    if name.is_empty() {
        Some("is empty")
    } else if name.len() > 64 {
        Some("is longer than 64 bytes")
    } else if !name.chars().all(plain) {
        Some("holds something besides letters, digits, space and -_.:")
    } else {
        None
    }
}

fn cents(amount: &str) -> Result<i64, String> {
    let digits = amount.strip_prefix('-').unwrap_or(amount);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("amount {amount:?} is not a whole number of cents"));
    }
    match amount.parse::<i64>() {
        Ok(cents) if cents > 0 => Ok(cents),
        Ok(0) => Err("amount is 0, which moves nothing".to_owned()),
        _ if amount.starts_with('-') => Err(format!("amount {amount} is negative")),
        _ => Err(format!("amount {amount} is more than a balance can hold")),
    }
}

/// A file of transfers; the same seed makes the same file.
pub(crate) fn generate(seed: u64) -> String {
    const NAMES: [&str; 12] = [
        "ada", "ben", "cleo", "dora", "emil", "finn", "gita", "hugo", "iris", "jan", "kim", "lena",
    ];
    const ROWS: usize = 400;
    let mut random = SplitMix(seed);
    let mut file = format!(
        "# {ROWS} made-up transfers between {} accounts, amounts in cents; made with a fixed seed:\n\
         # cargo run --example quickstart -- --generate {seed} > examples/data/transfers.csv\n\
         {}\n",
        NAMES.len(),
        HEADER.join(","),
    );
    for row in 1..=ROWS {
        let from = random.below(NAMES.len() as u64) as usize;
        let step = 1 + random.below(NAMES.len() as u64 - 1) as usize;
        let to = (from + step) % NAMES.len();
        let amount = 1 + random.below(20_000);
        writeln!(file, "t{row:03},{},{},{amount}", NAMES[from], NAMES[to])
            .expect("a string takes all that is written");
    }
    file
}

/// SplitMix64: enough for made-up data, and the same on every machine and in every release.
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
