//! Operations as the arguments of `ops_1`, and its answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join3, try_join_all};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, Statement};

use crate::base::Mode;
use crate::base::holder::KEPT;
use crate::base::token::is_epoch;
use crate::store::contract::{Holder, KeyStatus, Occupant, Op, Outcome, Owner, ServerTime};
use crate::store::driver::{Reply, Request};

/// After so long an op is sent again that waits for the end of a transaction, and later less often: after an eighth of
/// the time that it has waited.
const AGAIN: Duration = Duration::from_millis(5);
const LONGEST_AGAIN: Duration = Duration::from_millis(500);

/// What the calls of a session have in common.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) prefix: Arc<str>,
    pub(super) instance: Arc<str>,
    /// As SQL has it.
    pub(super) schema: String,
    /// What [`Caller::bounded`] begins with.
    pub(super) begin: String,
    /// The same bounds for a session.
    pub(super) bounds: String,
}

impl Names {
    /// `within`: the response time-out.
    pub(super) fn new(
        prefix: Arc<str>,
        instance: Arc<str>,
        schema: &str,
        within: Duration,
    ) -> Self {
        Self {
            prefix,
            instance,
            schema: super::schema::quote(schema),
            begin: begin(within),
            bounds: format!("{}; {OWN}", bounds(within, "SESSION")),
        }
    }

    /// The same for transactions that only look. A notification has a commit of its own, which need not be on disk.
    pub(super) fn looking(&self) -> Self {
        let begin = &self.begin;
        Self {
            begin: format!(
                "{begin}; SET TRANSACTION READ ONLY; SET LOCAL synchronous_commit = off"
            ),
            ..self.clone()
        }
    }

    /// The statement that calls a function of the schema.
    pub(super) fn sql(&self, call: &str) -> String {
        format!("SELECT * FROM {}.{call}", self.schema)
    }

    pub(super) fn lock(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    fn owner(&self, owner: Owner) -> String {
        format!("{}:{}", self.instance, owner.sequence)
    }
}

/// Runs operations.
pub(super) const OPS: &str = "ops_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";

/// Sends the notices of a call.
pub(super) const NOTIFY: &str = "notify_1($1)";

/// What was granted to this line and not told.
pub(super) const UNTOLD: &str = "untold_1($1)";

/// Reads a lock, for the session with this line.
pub(super) const INSPECT: &str = "inspect_1($1, $2)";

/// The arguments of a call.
#[derive(Debug, Default)]
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
            ..Self::default()
        };
        for request in requests {
            call.add(names, request);
        }
        call
    }

    fn add(&mut self, names: &Names, request: &Request) {
        let Some(op) = request.op() else {
            return;
        };
        let (mut owner, mut more, mut place) = (op.owner(), String::new(), None);
        let can_wait = self.line != 0;
        let mut letter = op.letter();
        let ttl = match op {
            Op::Enter { ttl, score, .. } if can_wait => {
                place = *score;
                Some(ttl)
            }
            Op::Enter { ttl, .. } | Op::Listen { ttl, .. } if !can_wait => {
                letter = b'A';
                Some(ttl)
            }
            Op::Attempt { ttl, .. }
            | Op::Enter { ttl, .. }
            | Op::Listen { ttl, .. }
            | Op::Withdraw { ttl, .. }
            | Op::Renew { ttl, .. } => Some(ttl),
            Op::Keep { left, .. } => {
                more = format!("{}{KEPT}:{}", names.instance, owner.sequence);
                Some(left)
            }
            Op::Yield { new, ttl, .. } if request.has_ended => {
                (letter, owner) = (b'E', *new);
                Some(ttl)
            }
            Op::Yield { new, ttl, .. } => {
                more = names.owner(*new);
                Some(ttl)
            }
            Op::Adopt { from, ttl, .. } => {
                more = String::from(&**from);
                Some(ttl)
            }
            Op::Raise { epoch, .. } => {
                place = Some(*epoch);
                None
            }
            Op::Unlisten { .. }
            | Op::Release { .. }
            | Op::Verify { .. }
            | Op::Evict { .. }
            | Op::Serve { .. } => None,
        };
        self.letters.push(char::from(letter));
        self.names.push(names.lock(request.key()));
        self.owners.push(match op {
            Op::Evict { whose } => String::from(&**whose),
            _ => names.owner(owner),
        });
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

    pub(super) fn arguments(&self) -> [Argument<'_>; 10] {
        [
            (&self.is_durable, Type::BOOL),
            (&self.line, Type::INT8),
            (&self.of_use, Type::INT8),
            (&self.letters, Type::TEXT),
            (&self.names, Type::TEXT_ARRAY),
            (&self.owners, Type::TEXT_ARRAY),
            (&self.modes, Type::TEXT_ARRAY),
            (&self.ttls, Type::INT8_ARRAY),
            (&self.mores, Type::TEXT_ARRAY),
            (&self.places, Type::INT8_ARRAY),
        ]
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

/// What a session of ours needs, whatever the role's settings are. As we look for a server that is gone, it looks for us:
/// our tickets are taken for those of the living as long as the session is there.
const OWN: &str = "SET default_transaction_isolation = 'read committed'; SET idle_session_timeout = 0; \
                   SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 2; \
                   SET tcp_user_timeout = 11000";

/// Begins a transaction with these bounds.
pub(super) fn begin(within: Duration) -> String {
    let bounds = bounds(within, "LOCAL");
    format!("BEGIN ISOLATION LEVEL READ COMMITTED; {bounds}")
}

/// An argument of a query that is not prepared.
pub(super) type Argument<'a> = (&'a (dyn ToSql + Sync), Type);

/// What a connection sends statements with.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) client: Arc<Client>,
    /// The statements of the functions that are called often. Behind a pooler there are none, since each may come to
    /// another server process: they are sent with their whole text.
    prepared: Arc<HashMap<&'static str, Statement>>,
}

impl Caller {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client: Arc::new(client),
            prepared: Arc::default(),
        }
    }

    /// The same with prepared statements, in a session of ours.
    pub(super) async fn prepared(self, names: &Names) -> Result<Self, Error> {
        let ops = Call::default().arguments().map(|(_, of_type)| of_type);
        let functions: [(_, &[Type]); 3] = [
            (OPS, &ops),
            (NOTIFY, &[Type::TEXT_ARRAY]),
            (UNTOLD, &[Type::INT8]),
        ];
        let client = &self.client;
        // In one round trip.
        let prepared = try_join_all(functions.map(async |(function, types)| {
            let statement = client.prepare_typed(&names.sql(function), types).await?;
            Ok::<_, Error>((function, statement))
        }));
        let prepared: HashMap<_, _> = prepared.await?.into_iter().collect();
        Ok(Self {
            prepared: prepared.into(),
            ..self
        })
    }

    /// Calls a function of the schema.
    pub(super) async fn call(
        &self,
        names: &Names,
        function: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<Row>, Error> {
        let Some(statement) = self.prepared.get(function) else {
            return self.bounded(names, &names.sql(function), arguments).await;
        };
        let values: Vec<_> = arguments.iter().map(|(value, _)| *value).collect();
        self.client.query(statement, &values).await
    }

    /// A query on a connection whose session may not be ours: a pooler gives each transaction another server process. So
    /// the bounds are those of the transaction, and nothing of them stays. All of it is sent at once.
    pub(super) async fn bounded(
        &self,
        names: &Names,
        sql: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<Row>, Error> {
        let (begun, rows, ended) = join3(
            self.client.batch_execute(&names.begin),
            self.client.query_typed(sql, arguments),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        begun?;
        let rows = rows?;
        ended.map(|()| rows)
    }
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
pub(super) struct Said {
    pub(super) at: ServerTime,
    pub(super) reply: Reply,
    /// A line, a time and a text each, for others.
    pub(super) notices: Vec<String>,
}

/// Reads one row.
pub(super) fn read(row: &Row, request: &Request) -> Option<Said> {
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
    let done = |outcome| Reply::Done {
        at,
        outcome,
        unserved,
    };
    let gone = |held: bool| {
        let held = held || request.has_ended;
        done(Outcome::Gone { held })
    };
    let reply = match row.try_get(1).ok()? {
        "won" => done(Outcome::Won {
            epoch: epoch.filter(|epoch| is_epoch(*epoch))?,
        }),
        "busy" => done(Outcome::Busy {
            left: span(remaining),
            score,
            entered: is_new,
            holder: read_occupant(row)?,
        }),
        "not old" => done(Outcome::NotOld),
        "held" => gone(true),
        "not held" => gone(false),
        "renewed" => done(Outcome::Renewed),
        "raised" => done(Outcome::Raised {
            age: span(remaining),
        }),
        "lost" => done(Outcome::Lost),
        "stale" => Reply::Stale,
        // When a transaction has ended.
        "again" => Reply::Later((request.since.elapsed() / 8).clamp(AGAIN, LONGEST_AGAIN)),
        // Others who are gone were in its way (G3).
        "more" => Reply::Again,
        _ => return None,
    };
    Some(Said {
        at,
        reply,
        notices: notices.unwrap_or_default(),
    })
}

/// Who has a lock that is busy. After a crash it may be nobody.
fn read_occupant(row: &Row) -> Option<Option<Arc<Occupant>>> {
    let Some(owner) = row.try_get::<_, Option<&str>>(8).ok()? else {
        return Some(None);
    };
    let others: i64 = row.try_get(10).ok()?;
    Some(Some(Arc::new(Occupant {
        owner: owner.into(),
        mode: read_mode(row.try_get(9).ok()?)?,
        others: others.try_into().ok()?,
    })))
}

/// Reads the answer of [`INSPECT`].
pub(super) fn read_status(rows: &[Row]) -> Option<KeyStatus> {
    let mut status = KeyStatus::default();
    let (first, rows) = rows.split_first()?;
    let number = |index| first.try_get::<_, i64>(index).ok()?.try_into().ok();
    (status.tickets, status.taken) = (number(4)?, number(5)?);
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
