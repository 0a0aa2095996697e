//! Where the balances live: a file that all instances read and write, and that knows nothing of
//! locks.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Error;
use crate::transfers::{OPENING, Transfer, Transfers};

/// The bytes of one line: balance, how often it was written, and by which instance last.
const LINE: usize = 36;

/// A handle to the ledger; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    /// The line of each account.
    lines: Arc<BTreeMap<String, usize>>,
}

/// One account's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    balance: i64,
    writes: u64,
    /// `None` before the first write.
    by: Option<usize>,
}

/// What was seen while one transfer was applied.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// Balances that another instance or task had written since we read them, and that were
    /// overwritten all the same.
    pub(crate) overlaps: u64,
    /// Accounts that another instance had written last.
    pub(crate) hand_overs: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        self.overlaps += other.overlaps;
        self.hand_overs += other.hand_overs;
    }
}

impl Ledger {
    /// A new ledger in `folder`: every account with its opening balance.
    pub(crate) async fn create(folder: &Path, transfers: &Transfers) -> Result<Self, Error> {
        let ledger = Self::open(folder, transfers);
        let opening = Entry {
            balance: OPENING,
            writes: 0,
            by: None,
        };
        let lines = opening.to_line().repeat(ledger.lines.len());
        tokio::fs::write(&ledger.path, lines).await?;
        Ok(ledger)
    }

    /// The ledger that [`create`](Self::create) made there.
    pub(crate) fn open(folder: &Path, transfers: &Transfers) -> Self {
        let accounts = transfers.expected.keys().cloned().zip(0..);
        Self {
            path: folder.join("ledger"),
            lines: Arc::new(accounts.collect()),
        }
    }

    /// Reads both balances, waits for an answer, and writes both: what a race breaks.
    pub(crate) async fn apply(&self, transfer: &Transfer, instance: usize) -> Result<Tally, Error> {
        let from = self.read(&transfer.from).await?;
        let to = self.read(&transfer.to).await?;
        tokio::time::sleep(crate::ANSWER).await;
        let mut tally = Tally::default();
        for (account, entry, change) in [
            (&transfer.from, from, -transfer.amount),
            (&transfer.to, to, transfer.amount),
        ] {
            let new = Entry {
                balance: entry.balance.saturating_add(change),
                writes: entry.writes + 1,
                by: Some(instance),
            };
            tally.overlaps += u64::from(self.write(account, new).await? != entry);
            tally.hand_overs += u64::from(entry.by.is_some_and(|by| by != instance));
        }
        Ok(tally)
    }

    /// Every account's balance.
    pub(crate) async fn balances(&self) -> Result<BTreeMap<String, i64>, Error> {
        let mut balances = BTreeMap::new();
        for account in self.lines.keys() {
            balances.insert(account.clone(), self.read(account).await?.balance);
        }
        Ok(balances)
    }

    async fn read(&self, account: &str) -> Result<Entry, Error> {
        self.at(account, |file, _| read_entry(file)).await
    }

    /// Writes whatever there is now, and gives what it overwrote.
    async fn write(&self, account: &str, entry: Entry) -> Result<Entry, Error> {
        self.at(account, move |file, at| {
            let before = read_entry(file)?;
            file.seek(at)?;
            file.write_all(entry.to_line().as_bytes())?;
            Ok(before)
        })
        .await
    }

    async fn at<T: Send + 'static>(
        &self,
        account: &str,
        act: impl FnOnce(&mut File, SeekFrom) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let path = self.path.clone();
        let at = SeekFrom::Start((self.lines[account] * LINE) as u64);
        let acted = tokio::task::spawn_blocking(move || {
            let mut file = OpenOptions::new().read(true).write(true).open(path)?;
            file.seek(at)?;
            act(&mut file, at)
        });
        Ok(acted.await.expect("reading and writing do not panic")?)
    }
}

fn read_entry(file: &mut File) -> io::Result<Entry> {
    let mut line = [0; LINE];
    file.read_exact(&mut line)?;
    Entry::from_line(&line).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

impl Entry {
    /// Of fixed width, so that each account keeps its place.
    fn to_line(self) -> String {
        let by = self.by.map_or('-'.to_string(), |by| by.to_string());
        format!("{:+020} {:012} {by}\n", self.balance, self.writes)
    }

    fn from_line(line: &[u8]) -> Option<Self> {
        let mut words = str::from_utf8(line).ok()?.split_whitespace();
        Some(Self {
            balance: words.next()?.parse().ok()?,
            writes: words.next()?.parse().ok()?,
            by: words.next()?.parse().ok(),
        })
    }
}
