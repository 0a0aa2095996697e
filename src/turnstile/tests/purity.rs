//! The pure core names no runtime, no clock and no protocol, and has one place for its transitions.

use std::fs;
use std::path::{Path, PathBuf};

const FOREIGN: [&str; 4] = ["tokio", "Instant::now", "SystemTime", "redis"];

/// The lines of code of the pure core, and where each is.
fn code() -> Vec<(PathBuf, usize, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/turnstile");
    let folders = [
        folder.clone(),
        folder.join("machine"),
        folder.join("tenure"),
    ];
    let entries = folders.map(|folder| fs::read_dir(folder).expect("the sources are there"));
    let (mut code, mut looked_at) = (Vec::new(), 0);
    for entry in entries.into_iter().flatten() {
        let path = entry.expect("a file").path();
        if path.is_dir() {
            // The folder above, and the simulation and the tests, which are no part of it.
            let name = path.file_name().and_then(|name| name.to_str());
            assert!(
                matches!(name, Some("machine" | "tenure" | "sim" | "tests")),
                "{path:?} is not looked at"
            );
            continue;
        }
        looked_at += 1;
        let text = fs::read_to_string(&path).expect("a source is text");
        for (number, line) in text.lines().enumerate() {
            let line = line.split("//").next().unwrap_or_default();
            code.push((path.clone(), number + 1, line.to_owned()));
        }
    }
    assert!(looked_at > 12, "{looked_at} files are not the whole of it");
    code
}

#[test]
fn the_pure_core_names_no_runtime_no_clock_and_no_wire() {
    for (path, number, line) in code() {
        for word in FOREIGN {
            let named = line.to_lowercase().contains(&word.to_lowercase());
            assert!(!named, "{}:{number}: {word}", path.display());
        }
    }
}

/// The states are private to one file, but any file could make the key idle.
#[test]
fn one_file_assigns_the_state() {
    for (path, number, line) in code() {
        let assigns = line.contains("self.state = ");
        assert!(!assigns, "{}:{number}: {line}", path.display());
    }
}
