//! Operations as the arguments of `ops_1`, and its answers.

use std::sync::Arc;
use std::time::Duration;

use futures::channel::oneshot;
use futures::future::join3;
use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Statement};

use crate::StoreError;
use crate::store::contract::{
    Holder, KEPT, KeyStatus, Mode, Op, Outcome, Owner, ServerTime, SubmittedOp,
};
use crate::store::send_window::{Priority, Sendable};
use crate::thread_end;
use crate::token::is_epoch;

/// One op on its way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) submitted: SubmittedOp,
    /// When the session took it.
    pub(super) since: Instant,
    /// Whether it was refused with its whole call, perhaps because of another request.
    pub(super) alone: bool,
    /// Whether the server has refused it once because it came too late (O5).
    pub(super) was_stale: bool,
    /// Whether it has ended a lease that a transaction is fenced by: the rest is done when that has ended.
    pub(super) has_ended: bool,
}

/// The answer to an inspection.
pub(super) type Look = oneshot::Sender<Result<KeyStatus, StoreError>>;

impl Request {
    pub(super) fn new(submitted: SubmittedOp) -> Self {
        Self {
            submitted,
            since: thread_end::now(),
            alone: false,
            was_stale: false,
            has_ended: false,
        }
    }

    /// Whether it asks for the lock, for a caller that may be gone when it is sent.
    pub(super) fn asks(&self) -> bool {
        matches!(
            self.submitted.op,
            Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } | Op::Adopt { .. }
        )
    }

    /// When its answer is no longer of use, if it is a renewal.
    pub(super) fn useful_until(&self) -> Option<Instant> {
        match self.submitted.op {
            Op::Renew { within, .. } => Some(self.since + within),
            _ => None,
        }
    }
}

impl Sendable for Request {
    type Line = (Arc<str>, u64);

    fn line(&self) -> Self::Line {
        let owner = self.submitted.op.owner();
        let sequence = match owner.mode {
            Mode::Exclusive => 0,
            Mode::Shared | Mode::Permits { .. } => owner.sequence,
        };
        (self.submitted.key.clone(), sequence)
    }

    fn priority(&self) -> Priority {
        match self.submitted.op {
            Op::Renew { .. } => Priority::Renew,
            _ => Priority::Change,
        }
    }

    fn group(&self) -> u16 {
        0
    }

    fn is_alone(&self) -> bool {
        self.alone
    }

    fn size(&self) -> usize {
        self.submitted.key.len() + 150
    }
}

/// What the calls of a session have in common.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) prefix: Arc<str>,
    pub(super) instance: Arc<str>,
    /// `SELECT … FROM …`, in the store's schema.
    pub(super) ops: Arc<str>,
    pub(super) notify: Arc<str>,
    pub(super) inspect: Arc<str>,
    /// What was granted and not told.
    pub(super) untold: Arc<str>,
    /// Sweeps, and answers whether there is nothing more to sweep, or another registry sweeps.
    pub(super) sweep: Arc<str>,
    /// What [`bounded`] begins with.
    pub(super) begin: Arc<str>,
    /// The same bounds for a session.
    pub(super) bounds: Arc<str>,
}

impl Names {
    /// `within`: the response time-out.
    pub(super) fn new(
        prefix: Arc<str>,
        instance: Arc<str>,
        schema: &str,
        within: Duration,
    ) -> Self {
        let schema = super::schema::quote(schema);
        let call = |function: &str| format!("SELECT * FROM {schema}.{function}").into();
        Self {
            prefix,
            instance,
            ops: call("ops_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"),
            notify: format!("SELECT {schema}.notify_1($1)").into(),
            inspect: call("inspect_1($1)"),
            untold: call("untold_1($1)"),
            sweep: call("sweep_1()"),
            begin: begin(within).into(),
            bounds: bounds(within, "SESSION").into(),
        }
    }

    pub(super) fn lock(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    fn owner(&self, owner: Owner) -> String {
        format!("{}:{}", self.instance, owner.sequence)
    }
}

/// The types of the arguments.
const TYPES: [Type; 10] = [
    Type::BOOL,
    Type::INT8,
    Type::INT8,
    Type::TEXT,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
];

/// The arguments of a call.
#[derive(Debug)]
pub(super) struct Call {
    is_durable: bool,
    line: i64,
    of_use: i64,
    letters: String,
    names: Vec<String>,
    owners: Vec<String>,
    modes: Vec<String>,
    ttls: Vec<Option<i64>>,
    mores: Vec<String>,
    places: Vec<Option<i64>>,
}

impl Call {
    /// The call for these requests, in their order. `line`: 0 if nothing can be heard, and nobody may wait for it (W5).
    /// `of_use`: the last time of the server at which the callers still wait for an answer (O5).
    pub(super) fn new(
        names: &Names,
        is_durable: bool,
        line: i64,
        of_use: ServerTime,
        requests: &[Request],
    ) -> Self {
        let mut call = Self {
            is_durable,
            line,
            of_use: i64::try_from(of_use).unwrap_or(i64::MAX),
            letters: String::new(),
            names: Vec::new(),
            owners: Vec::new(),
            modes: Vec::new(),
            ttls: Vec::new(),
            mores: Vec::new(),
            places: Vec::new(),
        };
        for request in requests {
            call.add(names, request);
        }
        call
    }

    fn add(&mut self, names: &Names, request: &Request) {
        let (mut owner, mut more, mut place) = (request.submitted.op.owner(), String::new(), None);
        let can_wait = self.line != 0;
        let (letter, ttl) = match &request.submitted.op {
            Op::Enter { ttl, score, .. } if can_wait => {
                place = *score;
                ('E', Some(ttl))
            }
            Op::Listen { ttl, .. } if can_wait => ('L', Some(ttl)),
            Op::Attempt { ttl, .. } | Op::Enter { ttl, .. } | Op::Listen { ttl, .. } => {
                ('A', Some(ttl))
            }
            Op::Withdraw { ttl, .. } => ('W', Some(ttl)),
            Op::Unlisten { .. } => ('U', None),
            Op::Release { .. } => ('R', None),
            Op::Keep { left, .. } => {
                more = format!("{}{KEPT}:{}", names.instance, owner.sequence);
                ('K', Some(left))
            }
            Op::Yield { new, ttl, .. } if request.has_ended => {
                owner = *new;
                ('E', Some(ttl))
            }
            Op::Yield { new, ttl, .. } => {
                more = names.owner(*new);
                ('Y', Some(ttl))
            }
            Op::Renew { ttl, .. } => ('N', Some(ttl)),
            Op::Adopt { from, ttl, .. } => {
                more = String::from(&**from);
                ('D', Some(ttl))
            }
            Op::Raise { epoch, .. } => {
                place = Some(*epoch);
                ('V', None)
            }
            Op::Serve { .. } => ('S', None),
        };
        self.letters.push(letter);
        self.names.push(names.lock(&request.submitted.key));
        self.owners.push(names.owner(owner));
        self.modes.push(match owner.mode {
            Mode::Exclusive => String::new(),
            Mode::Shared => READER.to_owned(),
            Mode::Permits { limit, weight } => format!("{weight}/{limit}"),
        });
        self.ttls.push(ttl.map(|ttl| micros(*ttl)));
        self.mores.push(more);
        self.places
            .push(place.and_then(|place| i64::try_from(place).ok()));
    }

    pub(super) fn arguments(&self) -> [&(dyn ToSql + Sync); 10] {
        [
            &self.is_durable,
            &self.line,
            &self.of_use,
            &self.letters,
            &self.names,
            &self.owners,
            &self.modes,
            &self.ttls,
            &self.mores,
            &self.places,
        ]
    }

    pub(super) async fn send(
        &self,
        client: &Client,
        names: &Names,
        prepared: Option<&Prepared>,
    ) -> Result<Vec<Row>, Error> {
        let arguments = self.arguments();
        match prepared {
            Some(prepared) => client.query(&prepared.ops, &arguments).await,
            None => {
                let typed: Vec<_> = arguments.into_iter().zip(TYPES).collect();
                bounded(client, names, &names.ops, &typed).await
            }
        }
    }
}

/// What holds for our statements, whatever the role's settings are. A statement is cancelled before its answer would be
/// given up, and a wait for somebody's lock before that: so neither costs the connection. Names are looked up where
/// nobody else can make any.
fn bounds(within: Duration, scope: &str) -> String {
    let millis = |time: Duration| time.as_millis().max(1);
    format!(
        "SET {scope} statement_timeout = {}; SET {scope} lock_timeout = {}; \
         SET {scope} idle_in_transaction_session_timeout = {}; SET {scope} search_path = pg_catalog",
        millis(within * 4 / 5),
        millis(within / 2),
        millis(within)
    )
}

/// Begins a transaction with these bounds.
pub(super) fn begin(within: Duration) -> String {
    let bounds = bounds(within, "LOCAL");
    format!("BEGIN ISOLATION LEVEL READ COMMITTED; {bounds}")
}

/// A query on a connection whose session may not be ours: a pooler gives each transaction another server process. So the
/// bounds are those of the transaction, and nothing of them stays. All of it is sent at once.
pub(super) async fn bounded(
    client: &Client,
    names: &Names,
    sql: &str,
    arguments: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, Error> {
    let (begun, rows, ended) = join3(
        client.batch_execute(&names.begin),
        client.query_typed(sql, arguments),
        client.batch_execute("COMMIT"),
    )
    .await;
    begun?;
    let rows = rows?;
    ended.map(|()| rows)
}

/// The statements of a connection. Behind a pooler there are none, since each may come to another server process: they are
/// sent with their whole text.
#[derive(Clone)]
pub(super) struct Prepared {
    ops: Statement,
    notify: Statement,
}

impl Prepared {
    pub(super) async fn new(client: &Client, names: &Names) -> Result<Self, Error> {
        Ok(Self {
            ops: client.prepare_typed(&names.ops, &TYPES).await?,
            notify: client
                .prepare_typed(&names.notify, &[Type::TEXT_ARRAY])
                .await?,
        })
    }
}

/// Sends the notices of a call.
pub(super) async fn notify(
    client: &Client,
    names: &Names,
    prepared: Option<&Prepared>,
    notices: &[String],
) -> Result<Vec<Row>, Error> {
    match prepared {
        Some(prepared) => client.query(&prepared.notify, &[&notices]).await,
        None => {
            let typed = [(&notices as &(dyn ToSql + Sync), Type::TEXT_ARRAY)];
            bounded(client, names, &names.notify, &typed).await
        }
    }
}

/// Asks for what was granted to this line and not told. `is_ours`: whether the session is proved to be ours.
pub(super) async fn untold(
    client: &Client,
    names: &Names,
    is_ours: bool,
    line: i64,
) -> Result<Vec<String>, Error> {
    let typed: [(&(dyn ToSql + Sync), Type); 1] = [(&line, Type::INT8)];
    let rows = match is_ours {
        true => client.query_typed(&names.untold, &typed).await?,
        false => bounded(client, names, &names.untold, &typed).await?,
    };
    rows.iter().map(|row| row.try_get(0)).collect()
}

fn micros(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_micros()).unwrap_or(i64::MAX)
}

/// The mode of a reader. That of an exclusive lock is empty, and in a notice `x`.
const READER: &str = "r";

pub(super) fn read_mode(mode: &str) -> Option<Mode> {
    Some(match mode {
        "" | "x" => Mode::Exclusive,
        READER => Mode::Shared,
        _ => {
            let (weight, limit) = mode.split_once('/')?;
            let (weight, limit) = (weight.parse().ok()?, limit.parse().ok()?);
            Mode::Permits { limit, weight }
        }
    })
}

/// What the server said to one request.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) at: ServerTime,
    pub(super) verdict: Verdict,
    /// Whether more tickets may fit (M4).
    pub(super) unserved: bool,
    /// A line, a time and a text each, for others.
    pub(super) notices: Vec<String>,
}

#[derive(Debug)]
pub(super) enum Verdict {
    Done(Outcome),
    /// It came too late (O5).
    Stale,
    /// It must be sent again when a transaction has ended.
    Again,
    /// It must be sent again at once: others who are gone were in its way (G3).
    More,
}

/// Reads one row. An error is the name of what is wrong with it.
pub(super) fn read(row: &Row, request: &Request) -> Option<Reply> {
    let number = |index| -> Option<Option<u64>> {
        let number = row.try_get::<_, Option<i64>>(index).ok()?;
        number.map_or(Some(None), |number| u64::try_from(number).ok().map(Some))
    };
    let span = |micros: Option<u64>| micros.map(Duration::from_micros);
    let (at, epoch, remaining, score) = (number(0)??, number(2)?, number(3)?, number(4)?);
    let flag = |index| {
        row.try_get::<_, Option<bool>>(index)
            .ok()
            .map(Option::unwrap_or_default)
    };
    let (is_new, unserved) = (flag(5)?, flag(6)?);
    let notices: Option<Vec<String>> = row.try_get(7).ok()?;
    let gone = |held: bool| Outcome::Gone {
        held: held || request.has_ended,
    };
    let verdict: &str = row.try_get(1).ok()?;
    let verdict = Verdict::Done(match verdict {
        "won" => Outcome::Won {
            epoch: epoch.filter(|epoch| is_epoch(*epoch))?,
        },
        "busy" => Outcome::Busy {
            left: span(remaining),
            score,
            entered: is_new,
        },
        "not old" => Outcome::NotOld,
        "held" => gone(true),
        "not held" => gone(false),
        "renewed" => Outcome::Renewed,
        "raised" => Outcome::Raised {
            age: span(remaining),
        },
        "lost" => Outcome::Lost,
        "stale" | "again" | "more" => {
            let verdict = match verdict {
                "stale" => Verdict::Stale,
                "again" => Verdict::Again,
                _ => Verdict::More,
            };
            let notices = notices.unwrap_or_default();
            return Some(Reply {
                at,
                verdict,
                unserved,
                notices,
            });
        }
        _ => return None,
    });
    Some(Reply {
        at,
        verdict,
        unserved,
        notices: notices.unwrap_or_default(),
    })
}

/// Inspects a lock: [`read_status`] reads the answer.
pub(super) async fn inspect(client: &Client, names: &Names, key: &str) -> Result<Vec<Row>, Error> {
    let name = names.lock(key);
    bounded(client, names, &names.inspect, &[(&name, Type::TEXT)]).await
}

pub(super) fn read_status(rows: &[Row]) -> Option<KeyStatus> {
    let mut status = KeyStatus::default();
    let (first, rows) = rows.split_first()?;
    status.tickets = first.try_get::<_, i64>(4).ok()?.try_into().ok()?;
    for row in rows {
        let (name, mode) = (row.try_get(0).ok()?, read_mode(row.try_get(1).ok()?)?);
        let at: i64 = row.try_get(3).ok()?;
        match row.try_get::<_, Option<i64>>(2).ok()? {
            Some(until) => status.holders.push(Holder {
                name,
                mode,
                left: Some(Duration::from_micros(
                    u64::try_from(until - at).unwrap_or(0),
                )),
            }),
            None => status.queue.push((name, mode)),
        }
    }
    Some(status)
}
