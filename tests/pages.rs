//! What the pages under `docs/` say of this crate's own names is so.

use std::fs;
use std::path::Path;

/// Every Rust file below a folder, one after the other.
fn sources(folder: &Path) -> String {
    let mut text = String::new();
    for entry in
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
    {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text.push_str(&sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
    text
}

/// Whether there is such a function, and it is a test: it has the attribute, or a list of cases names it.
fn is_test(sources: &str, name: &str) -> bool {
    let mut before = "";
    for line in sources.lines() {
        let line = line.trim();
        let declared = line.strip_prefix("pub(crate) ").unwrap_or(line);
        let declared = declared.strip_prefix("async ").unwrap_or(declared);
        let is_declared = declared
            .strip_prefix("fn ")
            .and_then(|rest| rest.strip_prefix(name))
            .is_some_and(|rest| rest.starts_with(['(', '<']));
        let has_attribute = before.starts_with("#[") && before.contains("test");
        if is_declared && has_attribute || line.strip_suffix(',') == Some(name) {
            return true;
        }
        if !line.starts_with("///") && !line.is_empty() {
            before = line;
        }
    }
    false
}

/// How many tests a text names, all of which are there.
fn named_tests(page: &str) -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut named = 0;
    for quoted in page.split('`').skip(1).step_by(2) {
        let Some((target, name)) = quoted.split_once("::").filter(|(_, name)| *name != "…")
        else {
            continue;
        };
        let folder = match target {
            "lib" => root.join("src"),
            target => root.join("tests").join(target),
        };
        assert!(is_test(&sources(&folder), name), "no test `{quoted}`");
        named += 1;
    }
    named
}

#[test]
fn every_test_that_the_guarantees_name_is_there() {
    let named = named_tests(include_str!("../docs/guarantees.md"));
    assert!(named > 100, "{named}");
}

/// Those of the formats that versions share, and of what they do about others.
#[test]
fn every_test_that_upgrading_names_is_there() {
    const PAGE: &str = include_str!("../docs/operations.md");
    let (_, after) = PAGE.split_once("\n## Upgrading\n").expect("the section");
    let section = after.split("\n## ").next().expect("its end");
    let named = named_tests(section);
    assert!(named > 10, "{named}");
}

/// Each cell of a fault shows by which test it is known.
#[test]
fn no_cell_of_the_guarantees_stands_alone() {
    const PAGE: &str = include_str!("../docs/guarantees.md");
    let mut rows = 0;
    for line in PAGE.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [fault, told @ ..] = &cells[..] else {
            continue;
        };
        if told.len() != 3 || *fault == "fault" || fault.starts_with("---") {
            continue;
        }
        for cell in told {
            assert!(*cell == "–" || cell.contains("::"), "{fault}: {cell}");
        }
        rows += 1;
    }
    assert!(rows > 30, "{rows}");
}

/// What the page on operations calls a metric is counted under that name, and none is left out.
#[test]
fn every_metric_is_on_the_page() {
    const PAGE: &str = include_str!("../docs/operations.md");
    const SOURCE: &str = include_str!("../src/metrics.rs");
    let names = |text: &'static str, quote: char| {
        let mut names: Vec<_> = text
            .split(quote)
            .filter(|word| word.starts_with("lockstream_"))
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let counted = names(SOURCE, '"');
    assert!(counted.len() > 10, "{counted:?}");
    assert_eq!(names(PAGE, '`'), counted);
}

/// Each feature is checked by itself where changes are, and the README says what it brings.
#[test]
fn every_feature_is_checked_alone_and_told_of() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    let manifest = read("Cargo.toml");
    let (_, features) = manifest.split_once("[features]\n").unwrap();
    let lines = features.lines().take_while(|line| !line.starts_with('['));
    let names: Vec<_> = lines
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| Some(line.split_once(" = ")?.0))
        .filter(|name| *name != "default")
        .collect();
    assert!(names.len() >= 9, "{names:?}");
    let readme = read("README.md");
    for name in &names {
        assert!(readme.contains(&format!("| `{name}` |")), "README: {name}");
    }
    // What is published has no such folder.
    if root.join(".ci").exists() {
        let run = read(".ci/run");
        let mut lines = run
            .lines()
            .filter_map(|line| line.strip_prefix("for feature in "));
        let line = lines.next().expect("the features are gone through");
        let mut checked: Vec<_> = line.trim_end_matches("; do").split(' ').collect();
        let mut names = names;
        checked.sort_unstable();
        names.sort_unstable();
        assert_eq!(checked, names);
    }
}

/// Whoever looks an error up finds its own words on the page.
#[test]
fn errors_are_quoted_as_they_are() {
    const PAGE: &str = include_str!("../docs/operations.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // A sentence may go over several lines of the source.
    let told: String = [
        "src/store",
        "tests/access",
        "tests/faults",
        "tests/replicas",
        "tests/sentinel",
    ]
    .map(|folder| sources(&root.join(folder)))
    .concat()
    .replace("\\\n", "")
    .split_whitespace()
    .collect::<Vec<_>>()
    .join(" ");
    let (_, section) = PAGE.split_once("## When it does not connect\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| \""));
    let mut quoted = 0;
    for row in rows {
        let (cell, _) = row.split_once(" | ").unwrap();
        for words in cell.split("\", \"").map(|words| words.trim_matches('"')) {
            assert!(told.contains(words), "nothing says {words:?}");
            quoted += 1;
        }
    }
    assert!(quoted >= 15, "{quoted}");
}
