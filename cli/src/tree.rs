//! The processes of the command: all descendants of a process, whatever groups and sessions they have made.
//!
//! On Linux, the guardian and this process are child subreapers: a process whose parent has ended becomes the child of
//! the nearest of them, and not of init. So every process of the command is below the guardian, or below us if the
//! guardian is gone. Elsewhere only the process group is reached.

#[cfg(any(target_os = "linux", target_os = "android"))]
use std::collections::HashSet;

#[cfg(any(target_os = "linux", target_os = "android"))]
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How many passes over the processes one `kill` makes at most.
#[cfg(any(target_os = "linux", target_os = "android"))]
const MOST_PASSES: usize = 1_000;

/// What a signal has met.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    /// The processes that were alive when they were looked for.
    pub(crate) alive: Vec<Pid>,
    /// Whether each of them refused the signal: they belong to another user.
    pub(crate) all_refuse: bool,
}

/// Which descendants of this process belong to the command.
#[derive(Debug)]
pub(crate) struct Tree {
    /// The guardian, whose group is that in which the command begins. It lives through every signal but SIGKILL.
    /// `None`: it is gone, and the id of the group may be that of another one by now.
    guardian: Option<Pid>,
    /// Not the command's, as are those below them: children that this process had before.
    others: Vec<Pid>,
}

impl Tree {
    /// What becomes a descendant of this process from now on.
    pub(crate) fn new(guardian: Pid, others: Vec<Pid>) -> Self {
        let guardian = Some(guardian);
        Self { guardian, others }
    }

    /// The guardian is gone. Where nobody adopts its children they are beyond reach, so they are killed.
    pub(crate) fn lose_guardian(&mut self) {
        let group = self.guardian.take();
        if !cfg!(any(target_os = "linux", target_os = "android")) {
            group.map(|group| killpg(group, Signal::SIGKILL));
        }
    }

    /// Sends a signal to every process: to those of the group at the same moment, then to the others. One that is forked
    /// meanwhile outside of the group may be missed.
    pub(crate) fn signal(&self, signal: Signal) {
        self.guardian.map(|group| killpg(group, signal));
        #[cfg(any(target_os = "linux", target_os = "android"))]
        self.visit(&mut |process| {
            if Some(process.group) != self.guardian {
                let _ = process.signal(signal);
            }
        });
    }

    /// Sends SIGKILL to every process but the guardian. What is forked meanwhile may be missed: repeat it until nobody is
    /// alive.
    pub(crate) fn kill(&self) -> Reached {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if linux::is_shown() {
            let mut reached = Reached::default();
            let mut known = HashSet::new();
            // Repeated at once while there are new processes. With a pause a process that forks could escape for ever.
            for _ in 0..MOST_PASSES {
                let mut is_new = false;
                reached.alive.clear();
                reached.all_refuse = true;
                self.visit(&mut |process| {
                    let refuses = process.signal(Signal::SIGKILL) == Err(Errno::EPERM);
                    reached.all_refuse &= refuses;
                    reached.alive.push(process.pid);
                    is_new |= known.insert(process.pid);
                });
                if !is_new {
                    break;
                }
            }
            return reached;
        }
        // The guardian ends with the others.
        self.guardian.map(|group| killpg(group, Signal::SIGKILL));
        Reached::default()
    }

    /// Visits those that are alive, each as soon as it is found.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn visit(&self, visit: &mut dyn FnMut(&linux::Process)) {
        linux::descendants(nix::unistd::getpid(), &self.others, &mut |process| {
            if Some(process.pid) != self.guardian {
                visit(process);
            }
        });
    }

    /// Whether nobody is alive, as far as one look can tell.
    pub(crate) fn looks_empty(&self) -> bool {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            let mut is_empty = true;
            self.visit(&mut |_| is_empty = false);
            is_empty
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        self.guardian.is_none()
    }
}

/// Whether processes below this one whose parents end become its children.
pub(crate) fn adopt_orphans(adopts: bool) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        let anyone = adopts.then(rustix::process::getpid);
        // Linux has it since 3.4.
        let _ = rustix::process::set_child_subreaper(anyone);
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = adopts;
}

/// The children of this process.
pub(crate) fn children() -> Vec<Pid> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        linux::children(nix::unistd::getpid())
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    Vec::new()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux {
    use std::fs;

    use nix::errno::Errno;
    use nix::sys::signal::{self, Signal};
    use nix::unistd::Pid;
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

    #[derive(Clone, Copy, Debug)]
    pub(super) struct Process {
        pub(super) pid: Pid,
        pub(super) parent: Pid,
        pub(super) group: Pid,
        /// In ticks of the clock since the machine has started. With the id it names a process for good.
        started: u64,
        is_alive: bool,
    }

    impl Process {
        fn read(pid: Pid) -> Option<Self> {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            Self::parse(pid, &stat)
        }

        pub(super) fn parse(pid: Pid, stat: &str) -> Option<Self> {
            // The name of the program may have spaces and parentheses in it.
            let (_, fields) = stat.rsplit_once(')')?;
            let fields: Vec<_> = fields.split_ascii_whitespace().collect();
            let id = |at: usize| Some(Pid::from_raw(fields.get(at)?.parse().ok()?));
            let threads: u32 = fields.get(17)?.parse().ok()?;
            // The first thread of a process may end before the others.
            let is_alive = !matches!(*fields.first()?, "Z" | "X") || threads > 1;
            Some(Self {
                pid,
                parent: id(1)?,
                group: id(2)?,
                started: fields.get(19)?.parse().ok()?,
                is_alive,
            })
        }

        /// Sends a signal to this process, and to none that has its id by now.
        pub(super) fn signal(&self, signal: Signal) -> Result<(), Errno> {
            let pid = rustix::process::Pid::from_raw(self.pid.as_raw());
            let handle = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
            let is_same = Self::read(self.pid).is_some_and(|it| it.started == self.started);
            if !is_same {
                return Ok(());
            }
            let number = rustix::process::Signal::from_named_raw(signal as i32);
            match (handle, number) {
                (Some(Ok(handle)), Some(number)) => pidfd_send_signal(handle, number)
                    .map_err(|error| Errno::from_raw(error.raw_os_error())),
                // Before Linux 5.3, and where a sandbox forbids it.
                _ => signal::kill(self.pid, signal),
            }
        }
    }

    /// Whether the system shows processes, as it does where `/proc` is mounted.
    pub(super) fn is_shown() -> bool {
        Process::read(nix::unistd::getpid()).is_some()
    }

    /// The children of a process. Each of its threads may have some.
    pub(super) fn children(parent: Pid) -> Vec<Pid> {
        let Ok(threads) = fs::read_dir(format!("/proc/{parent}/task")) else {
            return Vec::new();
        };
        let mut children = Vec::new();
        for thread in threads.flatten() {
            match fs::read_to_string(thread.path().join("children")) {
                Ok(pids) => {
                    let pids = pids.split_ascii_whitespace();
                    let pids = pids.filter_map(|pid| pid.parse().ok());
                    children.extend(pids.map(Pid::from_raw));
                }
                // The thread has ended, or the kernel was built without these lists.
                Err(_) if fs::exists("/proc/thread-self/children").is_ok_and(|it| it) => {}
                Err(_) => return search(parent),
            }
        }
        children
    }

    /// The children of a process, found among all processes.
    fn search(parent: Pid) -> Vec<Pid> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let all = pids.filter_map(|pid| Process::read(Pid::from_raw(pid)));
        let children = all.filter(|process| process.parent == parent);
        children.map(|process| process.pid).collect()
    }

    /// Visits the living processes below `parent`, but for `except` and what is below those: parents before their
    /// children, and each as soon as it is found, or it may have ended and left children by then.
    pub(super) fn descendants(parent: Pid, except: &[Pid], visit: &mut dyn FnMut(&Process)) {
        for pid in children(parent) {
            let process = Process::read(pid).filter(|_| !except.contains(&pid));
            if let Some(process) = process.filter(|process| process.parent == parent) {
                // A process that has ended has no children.
                if process.is_alive {
                    visit(&process);
                    descendants(pid, except, visit);
                }
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn parse(stat: &str) -> Option<Process> {
            Process::parse(Pid::from_raw(7), stat)
        }

        #[test]
        fn a_process_is_read_whatever_its_name_is() {
            let rest = "5 4 3 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 99 1";
            let process = parse(&format!("7 (a) b) S) S {rest}")).unwrap();
            let ids = (process.parent.as_raw(), process.group.as_raw());
            assert_eq!((ids, process.started), ((5, 4), 12_345));
            assert!(process.is_alive);
            assert!(!parse(&format!("7 (x) Z {rest}")).unwrap().is_alive);
            let of_threads = rest.replace("20 0 1 0", "20 0 2 0");
            assert!(parse(&format!("7 (x) Z {of_threads}")).unwrap().is_alive);
            assert!(parse("7 (x) S 5").is_none());
        }
    }
}
