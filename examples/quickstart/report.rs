//! What came out, for a reader who has ten seconds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::ledger::Tally;
use crate::transfers::{OPENING, Transfers};
use crate::{ANSWER, INSTANCES, Place};

/// What one run did to the ledger.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// All balances together, in cents.
    total: i128,
    /// Accounts that have another balance than the file says, and by how much together.
    wrong: usize,
    off_by: i128,
    tally: Tally,
    time: Duration,
}

impl Outcome {
    pub(crate) fn new(
        transfers: &Transfers,
        balances: &BTreeMap<String, i64>,
        tally: Tally,
        time: Duration,
    ) -> Self {
        let off: Vec<i128> = transfers
            .expected
            .iter()
            .map(|(account, expected)| i128::from(balances[account]) - i128::from(*expected))
            .filter(|off| *off != 0)
            .collect();
        Self {
            total: balances.values().copied().map(i128::from).sum(),
            wrong: off.len(),
            off_by: off.iter().map(|off| off.abs()).sum(),
            tally,
            time,
        }
    }

    /// Whether every account has what the file says.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong == 0
    }
}

/// How far a run is: a bar on a terminal, else nothing until it is done. Clones are one bar.
#[derive(Clone)]
pub(crate) struct Bar {
    bar: ProgressBar,
    name: &'static str,
    tally: Arc<Mutex<Tally>>,
}

impl Bar {
    pub(crate) fn new(locks: bool, length: usize) -> Self {
        let name = if locks { "with locks" } else { "without locks" };
        let style = ProgressStyle::with_template("  {msg:14} {bar:40} {pos}/{len}")
            .expect("the template is right");
        let bar = ProgressBar::new(length as u64).with_style(style);
        Self {
            bar: bar.with_message(name),
            name,
            tally: Arc::default(),
        }
    }

    /// One transfer more.
    pub(crate) fn add(&self, tally: Tally) {
        self.tally.lock().expect("adding does not panic").add(tally);
        self.bar.inc(1);
    }

    pub(crate) fn tally(&self) -> Tally {
        *self.tally.lock().expect("adding does not panic")
    }

    pub(crate) fn done(&self, outcome: &Outcome) {
        self.bar.finish_and_clear();
        let verdict = match (outcome.is_right(), outcome.wrong) {
            (true, _) => "every balance is right".to_owned(),
            (false, 1) => "1 balance is WRONG".to_owned(),
            (false, wrong) => format!("{wrong} balances are WRONG"),
        };
        println!("  {:14} done, {verdict}", self.name);
    }
}

/// What is going to happen.
pub(crate) fn opening(transfers: &Transfers, place: &Place) {
    let (rows, accounts) = (transfers.rows.len(), transfers.expected.len());
    let who = match place {
        Place::Here => "registries in this process",
        Place::Processes(_) => "processes on the server in REDIS_URL",
    };
    println!("{rows} transfers between {accounts} accounts, by {INSTANCES} {who}.");
    println!(
        "Each reads two balances, waits {} ms for an answer, and writes both back.\n",
        ANSWER.as_millis()
    );
}

/// Both runs side by side.
pub(crate) fn closing(transfers: &Transfers, without: &Outcome, with: &Outcome) {
    let accounts = transfers.expected.len();
    let before = i128::from(OPENING) * accounts as i128;
    let row = |name: &str, of: &dyn Fn(&Outcome) -> String| {
        println!("  {name:30} {:>16} {:>16}", of(without), of(with));
    };
    println!("\n  {:30} {:>16} {:>16}", "", "without locks", "with locks");
    row("money before", &|_| money(before));
    row("money after", &|it| money(it.total));
    row("lost (-) or made up (+)", &|it| signed(it.total - before));
    row("wrong balances", &|it| {
        format!("{} of {accounts}", it.wrong)
    });
    row("off by, together", &|it| money(it.off_by));
    row("updates overwritten", &|it| it.tally.overlaps.to_string());
    let hand_overs = with.tally.hand_overs;
    println!(
        "  {:30} {:>16} {hand_overs:>16}",
        "hand-overs between instances", "-"
    );
    row("time", &|it| format!("{:.2} s", it.time.as_secs_f64()));
    println!();
    println!("{}", verdict(without, with));
}

fn verdict(without: &Outcome, with: &Outcome) -> &'static str {
    match (without.is_right(), with.is_right()) {
        (false, true) => {
            "Two at once on one account lose an update. Under its lock they take turns, and every cent is there."
        }
        (true, true) => {
            "No two transfers met on one account this time, so nothing was lost without locks either."
        }
        (_, false) => {
            "The ledger is WRONG although it was locked: this is a bug, please report it."
        }
    }
}

/// Cents as `1,234.56`.
fn money(cents: i128) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    let cents = cents.unsigned_abs();
    let whole = (cents / 100).to_string();
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}.{:02}", cents % 100)
}

fn signed(cents: i128) -> String {
    let plus = if cents > 0 { "+" } else { "" };
    format!("{plus}{}", money(cents))
}
