//! The command line.

use std::ffi::OsString;
#[cfg(feature = "dashboard")]
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use lockstream::Lock;

use crate::check;
#[cfg(feature = "dashboard")]
use crate::dashboard;
use crate::duration::{self, times};
use crate::exit;
use crate::guardian;
use crate::hold;
use crate::launch;
use crate::lead;
use crate::messages::Messages;
use crate::pages;
use crate::run;
use crate::show;
use crate::signals;
use crate::store::Failure;
use crate::terminal;
use crate::tip;
use crate::url;
use crate::watch;

const TIMES: &str = times!();

const TIMES_AND_CODES: &str = concat!(
    times!(),
    "

Exit codes of run, lead, hold, renew and release:
  the command's own, or 128 + n if signal n ended it
  64   usage error
  69   the store cannot be reached, or refuses
  75   others held the lock for the whole wait (-E sets another code)
  76   the lease was lost, or could not be renewed in time, and the command was stopped
  124  the command was stopped because of --timeout
  126  the command cannot be run
  127  the command was not found"
);

/// Runs commands under distributed locks, and shows and frees locks.
///
/// The store is a Redis or Valkey server (redis://, rediss://, redis+cluster://, redis+sentinel://) or a PostgreSQL
/// database (postgres://). Its url comes from --url, --url-file or the environment variable LOCKSTREAM_URL.
#[derive(Debug, Parser)]
#[command(name = "lockstream", version, after_help = TIMES_AND_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<RunArgs>),
    Lead(LeadArgs),
    Hold(HoldArgs),
    Renew(RenewArgs),
    Release(ReleaseArgs),
    Inspect(InspectArgs),
    Ls(LsArgs),
    Watch(WatchArgs),
    Free(FreeArgs),
    Check(CheckArgs),
    #[cfg(feature = "dashboard")]
    Dashboard(DashboardArgs),
    Migrate(MigrateArgs),
    /// Write shell completions to standard output.
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual page to standard output, in roff. With a command, that command's.
    Man {
        /// Of which command.
        command: Option<String>,
    },
    /// Runs a command, and ends it when its standard input ends.
    #[command(hide = true)]
    Guardian(GuardianArgs),
    /// Becomes a command, once it is told to.
    #[command(hide = true)]
    Launch(LaunchArgs),
}

/// Where the store is, and how to speak of it.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// The url of the store. A password is refused here, since the list of processes shows it.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,

    /// A file with the url of the store.
    #[arg(long, value_name = "FILE", conflicts_with = "url")]
    pub(crate) url_file: Option<PathBuf>,

    /// The first part of every name in the store. All who share locks have the same. Default: that of the url, or lock.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,

    /// The name under which others see this process. Default: that of the url, or the name of the host.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    #[command(flatten)]
    connection: ConnectionArgs,

    /// Say nothing. The exit code tells what happened.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// Write lines of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl StoreArgs {
    pub(crate) fn messages(&self) -> Messages {
        Messages::new(self.quiet, self.json)
    }

    /// Whether there is a url, wherever it comes from.
    pub(crate) fn names_store(&self) -> bool {
        let variable = std::env::var_os(url::VARIABLE);
        self.url.is_some() || self.url_file.is_some() || variable.is_some_and(|it| !it.is_empty())
    }

    /// What is said beside the url, as options of the url.
    pub(crate) fn options(&self) -> Result<Vec<(&'static str, String)>, String> {
        self.connection.options()
    }
}

/// How to connect. Each of these can be said in the url as well.
#[derive(Args, Debug)]
#[command(next_help_heading = "Connection")]
struct ConnectionArgs {
    /// The authorities that sign the certificates of servers, in PEM. Default: those of the system.
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,

    /// The certificate that servers ask for, in PEM.
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,

    /// The key of that certificate, in PEM.
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,

    /// The name in the certificates of servers, if it is not the host of the url.
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,

    /// Trust whoever answers. Each run warns of it.
    #[arg(long)]
    danger_accept_invalid_certificates: bool,

    /// How long connecting may take. Default: 5s.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    connect_timeout: Option<Duration>,

    /// How long the store may take to answer. Default: 1s.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    response_timeout: Option<Duration>,

    /// The pooler of a PostgreSQL server, such as PgBouncer, for what needs no session. No password.
    #[arg(long, value_name = "URL")]
    pooled: Option<String>,
}

impl ConnectionArgs {
    fn options(&self) -> Result<Vec<(&'static str, String)>, String> {
        if self.pooled.as_deref().is_some_and(url::has_password) {
            return Err("a password in --pooled is visible in the list of processes: use the option pooled of the url, \
                 percent-encoded"
                .to_owned());
        }
        let file = |path: &PathBuf| {
            // The command may have another folder.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let is_text = |path: PathBuf| path.into_os_string().into_string();
            is_text(path).map_err(|path| format!("the path {path:?} is not UTF-8"))
        };
        let millis = |time: &Duration| format!("{}ms", time.as_millis());
        let danger = self.danger_accept_invalid_certificates;
        let all = [
            ("ca_file", self.ca_file.as_ref().map(file).transpose()?),
            ("cert_file", self.cert_file.as_ref().map(file).transpose()?),
            ("key_file", self.key_file.as_ref().map(file).transpose()?),
            ("server_name", self.server_name.clone()),
            (url::DANGER, danger.then(|| "true".to_owned())),
            ("connect_timeout", self.connect_timeout.as_ref().map(millis)),
            (
                "response_timeout",
                self.response_timeout.as_ref().map(millis),
            ),
            ("pooled", self.pooled.clone()),
        ];
        let said = all.into_iter();
        let said = said.filter_map(|(name, value)| Some((name, value?)));
        Ok(said.collect())
    }
}

/// Run a command while holding a lock.
///
/// Waits for the lock, runs the command in a process group of its own, and renews the lease until the command has ended.
/// If the lease cannot be renewed, the command is stopped before the lease is over: all its processes get SIGTERM at the
/// deadline less --kill-after, and SIGKILL at the deadline.
///
/// The command gets LOCKSTREAM_KEY and LOCKSTREAM_TOKEN, the fencing token. Of several keys it gets LOCKSTREAM_KEYS and
/// LOCKSTREAM_TOKENS instead: a line for each key. It gets LOCKSTREAM_URL only with --pass-url.
#[derive(Args, Debug)]
#[command(after_help = TIMES_AND_CODES, override_usage = "lockstream run [OPTIONS] <KEY>... -- <COMMAND>...")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) wait: WaitArgs,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    #[command(flatten)]
    pub(crate) mode: ModeArgs,

    /// Keep others out until this long after the start, even if the command ends earlier.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) keep_for: Option<Duration>,

    /// Keep others out only if the command has ended with 0. Otherwise the next may run at once.
    #[arg(long, requires = "keep_for")]
    pub(crate) keep_on_success: bool,

    /// Stop the command when it has run for so long. It gets SIGTERM, and after --kill-after SIGKILL; the exit code is 124.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) timeout: Option<Duration>,

    /// Give the url of the store to the command, as LOCKSTREAM_URL.
    #[arg(long)]
    pub(crate) pass_url: bool,

    /// What happens to the command when its lease is lost.
    #[arg(long, value_enum, default_value_t = OnLost::Term)]
    pub(crate) on_lost: OnLost,

    /// What to lock. Of several keys, all are held, or none. Keys that begin with a dash: lockstream run -- -KEY -- COMMAND.
    #[arg(value_name = "KEY")]
    pub(crate) keys: Vec<String>,

    /// Let /bin/sh run this, in place of a COMMAND behind --.
    #[arg(short = 'c', long = "command", value_name = "SCRIPT")]
    script: Option<OsString>,

    /// The command and its arguments.
    #[arg(
        last = true,
        required_unless_present = "script",
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

impl RunArgs {
    /// Finds the keys if they stand behind `--`, and the command if `-c` has it.
    pub(crate) fn place_keys(&mut self) -> Result<(), Failure> {
        if let Some(script) = self.script.take() {
            // So no command can follow, and what does are keys.
            if self.keys.is_empty() {
                self.keys = texts(std::mem::take(&mut self.command))?;
            }
            if self.keys.is_empty() {
                return Err(Failure::usage("no key: write KEY -c SCRIPT"));
            }
            if !self.command.is_empty() {
                return Err(Failure::usage(
                    "-c and a COMMAND behind -- exclude each other",
                ));
            }
            self.command = vec!["/bin/sh".into(), "-c".into(), script];
        }
        if self.keys.is_empty() {
            self.keys = keys_behind(&mut self.command)?;
        }
        Ok(())
    }
}

impl LeadArgs {
    /// The key, also if it stands behind `--`.
    pub(crate) fn take_key(&mut self) -> Result<String, Failure> {
        if let Some(key) = self.key.take() {
            return Ok(key);
        }
        match &mut *keys_behind(&mut self.command)? {
            [key] => Ok(std::mem::take(key)),
            _ => Err(Failure::usage("a leader has one key")),
        }
    }
}

/// `--` ends the options, so a key behind it may begin with a dash. The keys end at another `--`. Takes them out of
/// `command`, which then begins with the program: no program's name begins with a dash.
fn keys_behind(command: &mut Vec<OsString>) -> Result<Vec<String>, Failure> {
    let begins_with_dash = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
    if !command.first().is_some_and(begins_with_dash) {
        return Err(Failure::usage("no key: write KEY -- COMMAND"));
    }
    let end = command.iter().position(|word| word == "--");
    let Some(end) = end.filter(|end| (1..command.len() - 1).contains(end)) else {
        let first = command[0].display();
        let text = format!("a key that begins with a dash is written: -- {first} -- COMMAND");
        return Err(Failure::usage(text));
    };
    let behind = command.split_off(end + 1);
    command.pop();
    texts(std::mem::replace(command, behind))
}

/// Keys behind `--`.
fn texts(keys: Vec<OsString>) -> Result<Vec<String>, Failure> {
    let keys = keys.into_iter();
    keys.map(OsString::into_string)
        .collect::<Result<_, _>>()
        .map_err(|key| Failure::usage(format!("the key {key:?} is not valid UTF-8")))
}

/// How long to wait, and what it means if that was in vain.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct WaitArgs {
    /// Do not wait: exit at once if others hold the lock.
    #[arg(short, long, conflicts_with = "wait")]
    no_wait: bool,

    /// How long to wait for the lock, and for a store that is not there yet. Default: for ever, and for no store.
    #[arg(short, long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) wait: Option<Duration>,

    /// The exit code if others hold the lock.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = exit::BUSY)]
    pub(crate) busy_code: u8,
}

impl WaitArgs {
    /// How long others are waited for.
    pub(crate) fn within(&self) -> Duration {
        match self.no_wait {
            true => Duration::ZERO,
            false => self.wait.unwrap_or(Duration::MAX),
        }
    }
}

/// Who may hold the lock at the same time.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ModeArgs {
    /// Share the lock with others who ask for it with --shared.
    #[arg(short, long, conflicts_with = "permits")]
    shared: bool,

    /// Share the lock with nobody. This is the default.
    #[arg(short = 'x', long, conflicts_with_all = ["shared", "permits"])]
    exclusive: bool,

    /// Let at most N hold the lock at a time.
    #[arg(long, value_name = "N")]
    permits: Option<u32>,

    /// How many of the permits to take.
    #[arg(long, value_name = "N", requires = "permits")]
    weight: Option<u32>,
}

impl ModeArgs {
    pub(crate) fn set(self, lock: Lock) -> Lock {
        match self.permits {
            Some(limit) => lock.permits_of(limit, self.weight.unwrap_or(1)),
            None if self.shared => lock.shared(),
            None => lock,
        }
    }
}

/// How long a lease lasts, and how long the command may take to stop.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct LeaseArgs {
    /// How long a lease lasts unless it is renewed: after a crash others wait this long.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    pub(crate) ttl: Duration,

    /// How long the command has between SIGTERM and SIGKILL: at most a third of the ttl.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "5s")]
    pub(crate) kill_after: Duration,
}

impl LeaseArgs {
    /// A lease is renewed at every third of its ttl. With less time than that between the last renewal that can succeed
    /// and the end, a command would be stopped because one renewal was late.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.ttl < self.kill_after.saturating_mul(3) {
            return Err(Failure::usage(format!(
                "--ttl {:?} must be at least three times --kill-after {:?}",
                self.ttl, self.kill_after
            )));
        }
        Ok(())
    }
}

/// Run a command whenever this process is the leader.
///
/// Of all who lead the same key one runs its command at a time. When the command has ended, or the lead is lost, it stands
/// for election again, after a pause if the command has ended within ten seconds. A lost lead stops the command as with
/// run. SIGINT, SIGQUIT and SIGTERM end it: the exit code is then the command's.
#[derive(Args, Debug)]
#[command(after_help = TIMES_AND_CODES, override_usage = "lockstream lead [OPTIONS] <KEY> -- <COMMAND>...")]
pub(crate) struct LeadArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    /// Give the url of the store to the command, as LOCKSTREAM_URL.
    #[arg(long)]
    pub(crate) pass_url: bool,

    /// What to lead. A key that begins with a dash: lockstream lead -- -KEY -- COMMAND.
    #[arg(value_name = "KEY")]
    key: Option<String>,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Hold a lock over several commands.
///
/// Acquires the lock, writes one line to standard output, and ends. The line stands for the lease, which lasts for --ttl:
/// lockstream renew prolongs it, and lockstream release ends it. Whoever has the line and may use the store can take the
/// lease, so keep it secret.
///
/// With --foreground there is no such line: the lock is held, and its lease renewed, until a signal. Standard output
/// gets the key and the fencing token, with a tab between, when the lock is held.
#[derive(Args, Debug)]
#[command(after_help = TIMES_AND_CODES)]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) wait: WaitArgs,

    #[command(flatten)]
    pub(crate) mode: ModeArgs,

    /// How long the lease lasts unless it is renewed. Default: 10m, and 30s with --foreground.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) ttl: Option<Duration>,

    /// Write the line to this file, which nobody else may read.
    #[arg(long, value_name = "FILE", conflicts_with = "foreground")]
    pub(crate) lease_file: Option<PathBuf>,

    /// Hold the lock until INT, TERM, HUP or QUIT. The exit code is then 0.
    #[arg(long)]
    pub(crate) foreground: bool,

    /// Hold it until standard input ends, too.
    #[arg(long, requires = "foreground")]
    pub(crate) until_eof: bool,

    /// What to lock.
    #[arg(value_name = "KEY")]
    pub(crate) key: String,
}

/// Where the line of a lease is.
#[derive(Args, Debug)]
pub(crate) struct LineArgs {
    /// A file with the line.
    #[arg(long, value_name = "FILE", conflicts_with = "lease")]
    pub(crate) lease_file: Option<PathBuf>,

    /// The line, or - to read it from standard input. The list of processes shows arguments. Default: LOCKSTREAM_LEASE.
    #[arg(value_name = "LINE")]
    pub(crate) lease: Option<String>,
}

/// Prolong the lease that lockstream hold has left.
///
/// The lease lasts for --ttl from now on. Writes the line that stands for it now, to standard output or to the file of
/// --lease-file. The line before stands for nothing any more. If the lease is over, nothing is acquired, and if the line
/// cannot be written, nothing is freed: the exit code is then 76.
#[derive(Args, Debug)]
#[command(after_help = TIMES_AND_CODES)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// How long the lease lasts from now on. Default: 10m.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) ttl: Option<Duration>,

    #[command(flatten)]
    pub(crate) line: LineArgs,
}

/// End the lease that lockstream hold has left.
///
/// If the lease was over before, the exit code is 76.
#[derive(Args, Debug)]
#[command(after_help = TIMES_AND_CODES)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) line: LineArgs,
}

/// Show who holds a lock and who waits for it.
#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// The lock.
    #[arg(value_name = "KEY")]
    pub(crate) key: String,
}

/// List the locks that are held or waited for.
///
/// Each line has the key, its holders and how many wait, with tabs between.
#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// How the keys begin.
    #[arg(value_name = "KEYS", default_value = "", hide_default_value = true)]
    pub(crate) prefix_of_keys: String,
}

/// Show who holds what and who waits, as it changes.
///
/// On a terminal it is a table that is drawn again and again. Elsewhere, and with --json, each change is a line.
#[derive(Args, Debug)]
#[command(after_help = TIMES)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// How often to look: at most ten times a second. After a look that takes long the pause is longer.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "1s")]
    pub(crate) every: Duration,

    /// How the keys begin.
    #[arg(value_name = "KEYS", default_value = "", hide_default_value = true)]
    pub(crate) prefix_of_keys: String,
}

/// Say whether the store can be used, and what it is.
///
/// Connects to each server, and tells its version, how far away it is, whether it pushes or waiters poll, and which rights
/// are missing. Touches no lock, and makes nothing: a schema that is missing is an error. The exit code is 0 if locks can
/// be taken, and 69 if not. For a person, a start or a deploy: it connects anew each time.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
}

/// Make the schema of a PostgreSQL database.
///
/// Makes it if it is not there, as run and lead do. Other stores have none: then nothing is done.
#[derive(Args, Debug)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Write the SQL that makes the schema, for whoever may run it. Connects to nothing, and needs no url. One with
    /// lock_schema= names the schema.
    #[arg(long)]
    pub(crate) print: bool,
}

/// Serve a page that shows the locks of a store, live.
///
/// Who holds them, who waits, and who hands over to whom, twice a second while a page is open. It takes no lock and writes
/// nothing. It asks for no password, so it listens on this machine alone. It ends at a signal.
#[cfg(feature = "dashboard")]
#[derive(Args, Debug)]
#[command(after_help = TIMES)]
pub(crate) struct DashboardArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Where to listen: a port of this machine, or an address with a port. With port 0 the system picks one.
    #[arg(long, value_name = "ADDRESS", value_parser = address, default_value = "127.0.0.1:8080")]
    pub(crate) listen: SocketAddr,

    /// How often to look: at most ten times a second. After a look that takes long the pause is longer.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "500ms")]
    pub(crate) every: Duration,

    /// A name by which this server is reached, besides localhost and addresses. Others are refused.
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,

    /// Show tasks in memory that take turns, and no store.
    #[arg(long, conflicts_with_all = ["url", "url_file"])]
    pub(crate) demo: bool,
}

#[cfg(feature = "dashboard")]
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    let of_port = text
        .parse()
        .map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let expected = "expected a port, or an address such as 127.0.0.1:8080 or [::1]:8080";
    of_port.or_else(|_| text.parse()).map_err(|_| expected)
}

/// Take a lock from a holder.
///
/// An exclusive lock from whoever has it, or from --holder one of those who share it. The holder learns of it at its next renewal: until then two may work at once. Whoever waits is next.
#[derive(Args, Debug)]
pub(crate) struct FreeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// From whom: the name of a holder, or the whole of its owner as inspect shows it.
    #[arg(long, value_name = "NAME")]
    pub(crate) holder: Option<String>,

    /// Take it. Without this it only says from whom the lock would be taken.
    #[arg(long)]
    pub(crate) yes: bool,

    /// The lock.
    #[arg(value_name = "KEY")]
    pub(crate) key: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// It is stopped before the lease is over.
    Term,
    /// It runs on.
    RunOn,
}

#[derive(Args, Debug)]
pub(crate) struct GuardianArgs {
    /// In milliseconds.
    pub(crate) kill_after: u64,

    /// Whether SIGPIPE is ignored by the command.
    #[arg(long)]
    pub(crate) ignore_pipe: bool,

    /// Environment variables that are to have the id of the command's process.
    #[arg(long)]
    pub(crate) own_id: Vec<String>,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LaunchArgs {
    /// Whether SIGPIPE is ignored by the command.
    #[arg(long)]
    pub(crate) ignore_pipe: bool,

    /// Environment variables that are to have the id of this process.
    #[arg(long)]
    pub(crate) own_id: Vec<String>,

    /// Signals that the command does not block, by number.
    #[arg(long, value_delimiter = ',')]
    pub(crate) unblock: Vec<i32>,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

/// Does what the command line says.
pub(crate) fn main() -> ExitCode {
    signals::note_callers_mask();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(mut error) => {
            let line: Vec<_> = std::env::args_os().collect();
            tip::add(&mut error, &line);
            // The terminal may be gone, and help is no error.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let code = match arguments.command {
        Command::Run(args) => {
            let messages = args.store.messages();
            in_runtime(messages, run::run(*args))
        }
        Command::Lead(args) => in_runtime(args.store.messages(), lead::lead(args)),
        Command::Hold(args) => in_runtime(args.store.messages(), hold::hold(args)),
        Command::Renew(args) => in_runtime(args.store.messages(), hold::renew(args)),
        Command::Release(args) => in_runtime(args.store.messages(), hold::release(args)),
        Command::Inspect(args) => in_runtime(args.store.messages(), show::inspect(args)),
        Command::Ls(args) => in_runtime(args.store.messages(), show::ls(args)),
        Command::Watch(args) => in_runtime(args.store.messages(), watch::watch(args)),
        Command::Free(args) => in_runtime(args.store.messages(), show::free(args)),
        #[cfg(feature = "dashboard")]
        Command::Dashboard(args) => in_runtime(args.store.messages(), dashboard::dashboard(args)),
        Command::Check(args) => in_runtime(args.store.messages(), check::check(args)),
        Command::Migrate(args) => in_runtime(args.store.messages(), check::migrate(args)),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { command } => pages::man(command.as_deref()),
        Command::Guardian(args) => guardian::guard(&args),
        Command::Launch(args) => launch::launch(&args),
    };
    ExitCode::from(code)
}

/// Runs on this thread, whose signal mask the command inherits.
fn in_runtime(messages: Messages, work: impl Future<Output = Result<u8, Failure>>) -> u8 {
    terminal::block_ttou();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(work);
            // A resolver that hangs must not hold up the exit.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(Failure::new(
            exit::CANNOT_RUN,
            format!("no runtime: {error}"),
        )),
    };
    done.unwrap_or_else(|failure| {
        let fields = serde_json::json!({ "code": failure.code });
        messages.say("failed", failure.text, fields);
        failure.code
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_parser_is_well_formed() {
        Arguments::command().debug_assert();
    }
}
