//! The start of the command: this program once more, which then becomes the command.
//!
//! Only so does the command get the signal mask and the dispositions that our caller has given to us. The guardian
//! starts this process with signals blocked, so that a signal for the group cannot end it before it is the command. The
//! process gets the command's standard input, output and error over a socket, which is its standard input until then.
//! If the command cannot be run, the error goes back over that socket, which otherwise closes.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigSet, Signal};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::args::LaunchArgs;
use crate::exit;
use crate::guardian::this_program;

/// Hands our standard input, output and error to the process at the other end, which then becomes the command.
pub(crate) fn go(launched: &UnixStream) -> io::Result<()> {
    let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
    let descriptors = [input.as_fd(), output.as_fd(), error.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let has_room = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(has_room, "space for three");
    sendmsg(
        launched,
        &[IoSlice::new(b".")],
        &mut control,
        SendFlags::empty(),
    )?;
    Ok(())
}

/// Why the command could not be run, if it could not. To be called when the process at the other end has ended.
pub(crate) fn failure(mut launched: &UnixStream) -> Option<io::Error> {
    let mut text = String::new();
    // If another process keeps the socket open, this is an error. `text` has what was written before.
    let _ = launched.read_to_string(&mut text);
    text.parse().ok().map(io::Error::from_raw_os_error)
}

/// Becomes the command.
pub(crate) fn launch(args: &LaunchArgs) -> u8 {
    if !args.own_id.is_empty() {
        return launch_with_id(args);
    }
    // A copy that is closed when the command is executed.
    let Ok(line) = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3) else {
        return exit::CANNOT_RUN;
    };
    let Some([input, output, error]) = receive(&line) else {
        // Nobody wants the command any more.
        return exit::CANNOT_RUN;
    };
    let moved = rustix::stdio::dup2_stdin(&input)
        .and_then(|()| rustix::stdio::dup2_stdout(&output))
        .and_then(|()| rustix::stdio::dup2_stderr(&error));
    drop((input, output, error));
    let failed = match moved {
        Ok(()) => {
            // What was sent to the command until now reaches it here.
            let _ = signals(&args.unblock).thread_unblock();
            exec(&args.command, args.ignore_pipe)
        }
        Err(error) => error.into(),
    };
    let code = failed.raw_os_error().unwrap_or(nix::libc::EINVAL);
    let _ = UnixStream::from(line).write_all(code.to_string().as_bytes());
    exit::CANNOT_RUN
}

/// The same with the id of this process in the environment, which a program can only give to the next one: itself.
fn launch_with_id(args: &LaunchArgs) -> u8 {
    let Ok(program) = this_program() else {
        return exit::CANNOT_RUN;
    };
    let id = std::process::id().to_string();
    let mut again = Command::new(program);
    again.arg0("lockstream").arg("launch");
    if args.ignore_pipe {
        again.arg("--ignore-pipe");
    }
    let numbers: Vec<_> = args.unblock.iter().map(i32::to_string).collect();
    let failed = again
        .arg(format!("--unblock={}", numbers.join(",")))
        .arg("--")
        .args(&args.command)
        .envs(args.own_id.iter().map(|name| (name, &id)))
        // What else systemd tells of our process. Without it the id counts.
        .env_remove("LISTEN_PIDFDID")
        .exec();
    let code = failed.raw_os_error().unwrap_or(nix::libc::EINVAL);
    let _ = rustix::io::write(io::stdin(), code.to_string().as_bytes());
    exit::CANNOT_RUN
}

fn receive(line: &OwnedFd) -> Option<[OwnedFd; 3]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0];
    let mut buffers = [IoSliceMut::new(&mut word)];
    recvmsg(line, &mut buffers, &mut control, RecvFlags::empty()).ok()?;
    let mut received = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            received.extend(descriptors);
        }
    }
    received.try_into().ok()
}

/// Returns only if it fails. A script without `#!` is run by the shell, as the C library does for all who ask it so.
fn exec(command: &[OsString], ignore_pipe: bool) -> io::Error {
    let (program, arguments) = command
        .split_first()
        .expect("the parser asks for a command");
    if !ignore_pipe {
        // This sets SIGPIPE to its default.
        return Command::new(program).args(arguments).exec();
    }
    // Rust has set SIGPIPE to be ignored, and this leaves it so.
    let c_string = |text: &OsString| CString::new(OsStr::as_bytes(text));
    let command: Result<Vec<_>, _> = command.iter().map(c_string).collect();
    match command {
        Ok(command) => match nix::unistd::execvp(&command[0], &command) {
            Err(error) => error.into(),
        },
        Err(error) => error.into(),
    }
}

/// The signals with these numbers.
fn signals(numbers: &[i32]) -> SigSet {
    let known = numbers
        .iter()
        .filter_map(|number| Signal::try_from(*number).ok());
    known.collect()
}
