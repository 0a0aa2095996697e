//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::duration;
use crate::exit;
use crate::guardian;
use crate::lead;
use crate::messages::Messages;
use crate::pages;
use crate::run;
use crate::show;
use crate::store::Failure;
use crate::terminal;
use crate::watch;

const EXIT_CODES: &str = "\
Exit codes of run and lead:
  the command's own, or 128 + n if signal n ended it
  64   usage error
  69   the store cannot be reached, or refuses
  75   others held the lock for the whole wait (-E sets another code)
  76   the lease was lost, or could not be renewed in time, and the command was stopped
  126  the command cannot be run
  127  the command was not found";

/// Runs commands under distributed locks, and shows and frees locks.
///
/// The store is a Redis or Valkey server (redis://, rediss://, redis+cluster://, redis+sentinel://) or a PostgreSQL
/// database (postgres://). Its url comes from --url, --url-file or the environment variable LOCKSTREAM_URL.
#[derive(Debug, Parser)]
#[command(name = "lockstream", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<RunArgs>),
    Lead(LeadArgs),
    Inspect(InspectArgs),
    Ls(LsArgs),
    Watch(WatchArgs),
    Free(FreeArgs),
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
    /// Ends the process group that it leads when its standard input ends.
    #[command(hide = true)]
    Guardian(GuardianArgs),
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

    /// The first part of every name in the store. All who share locks have the same.
    #[arg(long, value_name = "PREFIX", default_value = "lock")]
    pub(crate) prefix: String,

    /// The name under which others see this process. Default: the name of the host.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

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

    /// The name that was given, or as much of the host's as a name can hold.
    pub(crate) fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let host = nix::unistd::gethostname().unwrap_or_default();
            let is_plain = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
            let name: String = host
                .to_string_lossy()
                .chars()
                .filter(is_plain)
                .take(64)
                .collect();
            if name.is_empty() {
                "lockstream".to_owned()
            } else {
                name
            }
        })
    }
}

/// Run a command while holding a lock.
///
/// Waits for the lock, runs the command in a process group of its own, and renews the lease until the command has ended.
/// If the lease cannot be renewed, the command is stopped before the lease is over: it gets SIGTERM at the deadline less
/// --kill-after, and SIGKILL at the deadline.
///
/// The command gets LOCKSTREAM_KEY and LOCKSTREAM_TOKEN, the fencing token, and not LOCKSTREAM_URL.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Do not wait: exit at once if others hold the lock.
    #[arg(short, long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// How long to wait for the lock. Default: for ever.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) wait: Option<Duration>,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    /// Share the lock with others who ask for it with --shared.
    #[arg(long, conflicts_with = "permits")]
    pub(crate) shared: bool,

    /// Let at most N hold the lock at a time.
    #[arg(long, value_name = "N")]
    pub(crate) permits: Option<u32>,

    /// Keep others out until this long after the start, even if the command ends earlier.
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    pub(crate) keep_for: Option<Duration>,

    /// Keep others out only if the command has ended with 0. Otherwise the next may run at once.
    #[arg(long, requires = "keep_for")]
    pub(crate) keep_on_success: bool,

    /// The exit code if others hold the lock.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = exit::BUSY)]
    pub(crate) busy_code: u8,

    /// What happens to the command when its lease is lost.
    #[arg(long, value_enum, default_value_t = OnLost::Term)]
    pub(crate) on_lost: OnLost,

    /// What to lock. Of several keys, all are held, or none.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<String>,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// How long a lease lasts, and how long the command may take to stop.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct LeaseArgs {
    /// How long a lease lasts unless it is renewed: after a crash others wait this long.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    pub(crate) ttl: Duration,

    /// How long before the end of the lease the command gets SIGTERM: at most a third of the ttl.
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
#[command(after_help = EXIT_CODES)]
pub(crate) struct LeadArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    /// What to lead.
    #[arg(value_name = "KEY")]
    pub(crate) key: String,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
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
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// How often to look: at most ten times a second.
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "1s")]
    pub(crate) every: Duration,

    /// How the keys begin.
    #[arg(value_name = "KEYS", default_value = "", hide_default_value = true)]
    pub(crate) prefix_of_keys: String,
}

/// Take an exclusive lock from its holder.
///
/// The holder learns of it at its next renewal: until then two may work at once. Whoever waits is next.
#[derive(Args, Debug)]
pub(crate) struct FreeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Without this it only says from whom the lock would be taken.
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
    kill_after: u64,
}

/// Does what the command line says.
pub(crate) fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
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
        Command::Inspect(args) => in_runtime(args.store.messages(), show::inspect(args)),
        Command::Ls(args) => in_runtime(args.store.messages(), show::ls(args)),
        Command::Watch(args) => in_runtime(args.store.messages(), watch::watch(args)),
        Command::Free(args) => in_runtime(args.store.messages(), show::free(args)),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { command } => pages::man(command.as_deref()),
        Command::Guardian(args) => guardian::guard(Duration::from_millis(args.kill_after)),
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
        Err(error) => Err(Failure {
            code: exit::CANNOT_RUN,
            text: format!("no runtime: {error}"),
        }),
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
