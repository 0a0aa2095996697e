//! The pure core names no runtime, no clock and no protocol.

use std::fs;
use std::path::Path;

const FOREIGN: [&str; 4] = ["tokio", "Instant::now", "SystemTime", "redis"];

#[test]
fn the_pure_core_names_no_runtime_no_clock_and_no_wire() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/turnstile");
    let folders = [folder.clone(), folder.join("machine")];
    let entries = folders.map(|folder| fs::read_dir(folder).expect("the sources are there"));
    let mut looked_at = 0;
    for entry in entries.into_iter().flatten() {
        let path = entry.expect("a file").path();
        if path.is_dir() {
            // The folder above, and the simulation and the tests, which are no part of it.
            let name = path.file_name().and_then(|name| name.to_str());
            assert!(
                matches!(name, Some("machine" | "sim" | "tests")),
                "{path:?} is not looked at"
            );
            continue;
        }
        looked_at += 1;
        let text = fs::read_to_string(&path).expect("a source is text");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default().to_lowercase();
            for word in FOREIGN {
                let named = code.contains(&word.to_lowercase());
                assert!(!named, "{}:{}: {word}", path.display(), number + 1);
            }
        }
    }
    assert!(looked_at > 12, "{looked_at} files are not the whole of it");
}
