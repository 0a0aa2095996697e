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
        let tests = root.join("tests");
        let file = tests.join(format!("{target}.rs"));
        let text = match target {
            "lib" => sources(&root.join("src")),
            _ if file.is_file() => fs::read_to_string(file).unwrap(),
            target => sources(&tests.join(target)),
        };
        assert!(is_test(&text, name), "no test `{quoted}`");
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

/// Each complaint has a link to where it was made, and tests of ours that replay it.
#[test]
fn every_bug_of_others_is_replayed() {
    const PAGE: &str = include_str!("../docs/bugs-of-others.md");
    let mut complaints = 0;
    for section in PAGE.split("\n## ").skip(1) {
        let (title, text) = section.split_once('\n').expect("a title has a text");
        let (_, number) = title
            .split_once(':')
            .map_or(title, |it| it.0)
            .rsplit_once(' ')
            .expect("a number");
        assert!(
            text.contains(&format!("[{number}](https://github.com/")),
            "{title}: no link"
        );
        let (_, tests) = text
            .split_once("\n**Tests.** ")
            .expect("the tests come last");
        assert!(named_tests(tests) > 0, "{title}: no test");
        complaints += 1;
    }
    assert!(complaints >= 21, "{complaints}");
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
    const SOURCE: &str = include_str!("../src/observe/metrics.rs");
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

/// Each feature is checked by itself where changes are, and the table of the crate says what it brings.
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
    let table = read("src/lib.rs");
    for name in &names {
        let row = format!("//! | `{name}` |");
        assert!(table.contains(&row), "src/lib.rs: {name}");
    }
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

/// The value of the first such line of a manifest, without its quotes.
fn value<'a>(manifest: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = manifest.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
    Some(value.trim_matches('"'))
}

/// The oldest Rust, which the manifests of what is published say, stands on the pages as well.
#[test]
fn the_oldest_rust_is_the_same_everywhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
    let oldest = read("Cargo.toml");
    let oldest = value(&oldest, "rust-version").expect("a version");
    for manifest in ["cli/Cargo.toml", "macros/Cargo.toml"] {
        assert_eq!(value(&read(manifest), "rust-version"), Some(oldest));
    }
    let readme = read("README.md");
    assert!(readme.contains(&format!("badge/rust-{oldest}%2B-")));
    assert!(readme.contains(&format!("\nRust {oldest} or newer.")));
    assert!(read("CONTRIBUTING.md").contains(&format!("Rust {oldest} is the oldest")));
}

/// How each example is started: of the examples of the crate by their names and features, of the others by their
/// manifests and programs.
fn examples(root: &Path) -> Vec<(String, Vec<String>)> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let features = |name: &str| -> Vec<String> {
        let mut sections = manifest.split("\n[[example]]\n").skip(1);
        let named = sections.find(|section| value(section, "name") == Some(name));
        let required = named.and_then(|section| value(section, "required-features"));
        let required = required.unwrap_or_default().trim_matches(['[', ']']);
        required
            .split(", ")
            .map(|feature| feature.trim_matches('"').to_owned())
            .filter(|feature| !feature.is_empty() && feature != "redis")
            .collect()
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("examples")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if let Ok(own) = fs::read_to_string(path.join("Cargo.toml")) {
            let package = value(&own, "name").unwrap();
            let start = if manifest.contains(&format!("exclude = [\"examples/{stem}\"]")) {
                format!("--manifest-path examples/{stem}/Cargo.toml")
            } else {
                format!("-p {package}")
            };
            let mut programs: Vec<_> = own
                .split("\n[[bin]]\n")
                .skip(1)
                .map(|section| format!("{start} --bin {}", value(section, "name").unwrap()))
                .collect();
            if programs.is_empty() {
                programs.push(start);
            }
            found.extend(programs.into_iter().map(|start| (start, Vec::new())));
        } else if path.extension().is_some_and(|it| it == "rs") || path.join("main.rs").exists() {
            found.push((format!("--example {stem}"), features(&stem)));
        }
    }
    found
}

/// The index of the examples has each of them, in one row, with a command that starts it.
#[test]
fn every_example_is_in_the_index() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let index = fs::read_to_string(root.join("examples/README.md")).unwrap();
    let rows: Vec<_> = index
        .lines()
        .filter(|line| line.starts_with("| [`"))
        .collect();
    for row in &rows {
        let (_, link) = row.split_once("](").expect("a link");
        let (file, _) = link.split_once(')').expect("its end");
        assert!(root.join("examples").join(file).is_file(), "no {file}");
    }
    let examples = examples(root);
    assert!(examples.len() >= 14, "{examples:?}");
    for (start, features) in &examples {
        let starts = |row: &&&str| {
            let command = row.trim_end_matches(" |").trim_end_matches('`');
            let (_, command) = command.rsplit_once('`').expect("a command");
            format!("{command} ").contains(&format!(" {start} "))
        };
        let row = rows.iter().find(starts);
        let row = row.unwrap_or_else(|| panic!("examples/README.md: no row for `{start}`"));
        for feature in features {
            let given = [format!("--features {feature}"), "--all-features".to_owned()];
            assert!(
                given.iter().any(|it| row.contains(it)),
                "{start}: {feature}"
            );
        }
    }
    assert_eq!(rows.len(), examples.len(), "an example that is none");
}

/// What CONTRIBUTING.md names is there: files, and the variables that set a test.
#[test]
fn what_contributors_are_told_of_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let mut code: String = ["src", "tests"].map(|it| sources(&root.join(it))).concat();
    code.push_str(&fs::read_to_string(root.join("tests/run")).unwrap());
    let (mut files, mut variables) = (0, 0);
    for quoted in page.split('`').skip(1).step_by(2) {
        let folders = [
            "src/",
            "tests/",
            "docs/",
            "bench/",
            "examples/",
            ".ci/",
            ".github/",
            "./",
        ];
        let is_path = folders.iter().any(|it| quoted.starts_with(it)) && !quoted.contains(' ');
        if is_path {
            assert!(root.join(quoted).exists(), "there is no {quoted}");
            files += 1;
        }
        let (variable, _) = quoted.split_once('=').unwrap_or((quoted, ""));
        if variable.starts_with("LOCKSTREAM_") {
            assert!(code.contains(variable), "nothing reads {variable}");
            variables += 1;
        }
    }
    assert!(files > 20 && variables > 8, "{files}, {variables}");
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

/// The rules that a text cites: a letter and a digit, as a word or at the beginning of a test's name.
fn cited(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter_map(|word| {
        let rule = match word.split_once('_') {
            Some((rule, rest)) if !rest.is_empty() && rule.starts_with(char::is_lowercase) => rule,
            Some(_) => return None,
            None if word.starts_with(char::is_uppercase) => word,
            None => return None,
        };
        let mut chars = rule.chars();
        let (Some(letter), Some('1'..='9'), None) = (chars.next(), chars.next(), chars.next())
        else {
            return None;
        };
        "OSDWFKGIM"
            .contains(letter.to_ascii_uppercase())
            .then(|| rule.to_uppercase())
    })
}

/// The rules of the protocol, and what is written of each.
fn rules(page: &str) -> Vec<(&str, &str)> {
    let sections = page.split("\n### ").skip(1);
    sections
        .map(|section| section.split_once('\n').expect("a rule has a text"))
        .collect()
}

#[test]
fn a_citation_is_found_as_it_is_written() {
    let text = "O2, (W7): `S3` in fn d4_a_win; not X1, O10, OS, a2b, w1, D0, FO4O or 3D";
    assert!(cited(text).eq(["O2", "W7", "S3", "D4"]));
    let page = "# Title\n\n### K1\n\nText. `lib::a`\n\n### K2\n\nMore.";
    assert_eq!(
        rules(page),
        [("K1", "\nText. `lib::a`\n"), ("K2", "\nMore.")]
    );
}

/// What code, tests and pages cite is defined, and each rule has a test.
#[test]
fn every_rule_that_is_cited_is_defined_and_tested() {
    const PAGE: &str = include_str!("../docs/protocol.md");
    let rules = rules(PAGE);
    for (rule, text) in &rules {
        let own = text.split("\n## ").next().unwrap_or_default();
        assert!(named_tests(own) > 0, "{rule} names no test");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts: Vec<_> = ["src", "tests", "examples", "bench"]
        .map(|folder| sources(&root.join(folder)))
        .into();
    for page in fs::read_dir(root.join("docs")).unwrap() {
        let page = page.unwrap().path();
        if page.extension().is_some_and(|it| it == "md") {
            texts.push(fs::read_to_string(page).unwrap());
        }
    }
    texts.push(fs::read_to_string(root.join("src/store/redis/script.lua")).unwrap());
    // This file cites some that are none.
    let here = include_str!("pages.rs");
    let texts = texts.iter().map(|text| text.replace(here, ""));
    let mut count = 0;
    for rule in texts.flat_map(|text| cited(&text).collect::<Vec<_>>()) {
        assert!(
            rules.iter().any(|(defined, _)| *defined == rule),
            "{rule} is cited and not defined"
        );
        count += 1;
    }
    assert!(count > 300, "{count}");
}

/// The files that the page names are there.
#[test]
fn every_path_of_the_architecture_exists() {
    const PAGE: &str = include_str!("../docs/architecture.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let quoted = PAGE.split('`').skip(1).step_by(2);
    let mut count = 0;
    for path in quoted.filter(|quoted| quoted.starts_with("src/") || quoted.starts_with("tests/")) {
        assert!(root.join(path).exists(), "there is no {path}");
        count += 1;
    }
    assert!(count > 30, "{count}");
}

/// The table of files in the `mod.rs` of each folder names all of them.
#[test]
fn every_file_is_on_the_map_of_its_folder() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for folder in [
        "engine",
        "turnstile",
        "combinator",
        "store/memory",
        "store/quorum",
        "store/redis",
        "tower",
        "verify",
    ] {
        let map = fs::read_to_string(root.join(folder).join("mod.rs")).unwrap();
        for file in fs::read_dir(root.join(folder)).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let is_mapped = !name.contains('.') || ["mod.rs", "tests.rs"].contains(&&*name);
            let stem = name.strip_suffix(".rs").unwrap_or(&name);
            let is_mapped = is_mapped
                || [&*name, stem]
                    .iter()
                    .any(|it| map.contains(&format!("`{it}`")));
            assert!(is_mapped, "{folder}/mod.rs does not name `{name}`");
        }
    }
}

/// Nothing in a url is ignored, and every option that is taken is on the page.
#[test]
fn every_option_of_a_url_is_on_its_page() {
    const PAGE: &str = include_str!("../docs/urls.md");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = [
        "url.rs",
        "redis/endpoint.rs",
        "redis/options.rs",
        "postgres/options.rs",
        "redis/sentinel.rs",
        "postgres/address.rs",
    ];
    let read = |file: &&str| {
        let text = fs::read_to_string(root.join("src/store").join(file)).unwrap();
        text.split("mod tests").next().unwrap().to_owned()
    };
    let code: String = files.iter().map(read).collect();
    let mut options = 0;
    for begin in [
        "take(&[",
        "take_time(&[",
        "take_switch(&[",
        "_FILE: &[&str] = &[",
    ] {
        for list in code.split(begin).skip(1) {
            let list = list.split(']').next().unwrap();
            for name in list.split('"').skip(1).step_by(2) {
                assert!(
                    PAGE.contains(&format!("`{name}")),
                    "{name} is not on the page"
                );
                options += 1;
            }
        }
    }
    assert!(options > 20, "{options}");
}
