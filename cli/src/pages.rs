//! What is made from the parser: shell completions and manual pages.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Arguments;
use crate::exit;
use crate::messages::write_line;

/// Writes the completions of a shell.
pub(crate) fn completions(shell: Shell) -> u8 {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "lockstream", &mut text);
    write(&text)
}

/// Writes the manual page of the program, or of one of its commands.
pub(crate) fn man(command: Option<&str>) -> u8 {
    let mut page = Arguments::command();
    page.build();
    if let Some(name) = command {
        let Some(found) = page.find_subcommand(name).filter(|it| !it.is_hide_set()) else {
            write_line(&format!("lockstream: no such command: {name}"));
            return exit::USAGE;
        };
        page = found.clone();
    }
    let mut text = Vec::new();
    Man::new(page)
        .render(&mut text)
        .expect("a vector takes everything");
    write(&text)
}

fn write(text: &[u8]) -> u8 {
    let written = std::io::stdout().lock().write_all(text);
    // A reader that has gone wants no more.
    written.map_or(exit::of_signal(nix::libc::SIGPIPE), |()| 0)
}
