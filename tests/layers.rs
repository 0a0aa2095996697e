//! Each layer imports only those below it: see "Layers" in docs/architecture.md.

use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest. The files in `src` itself, which say what users import, are above all of them.
const LAYERS: [&str; 9] = [
    "base",
    "roaming",
    "store",
    "turnstile",
    "observe",
    "engine",
    "handle",
    "combinator",
    "tower",
];

/// For tests of streams. It knows nothing of the crate, and nothing of the crate knows it.
const ALONE: &str = "verify";

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if path.is_dir() {
            // What only tests are made of may use anything.
            if name != "tests" && name != "sim" {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// The code without its comments, and without the tests at its end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {");
    let lines = text[..end.unwrap_or(text.len())].lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// What a file at `module` in `src` names of the rest of the crate, by the first part of the path. `""`: the crate's root.
fn imports<'a>(code: &'a str, module: &[&str]) -> Vec<&'a str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let first = |rest: &'a str| rest.split(|c| !is_name(c)).next().unwrap();
    let of_root = code.match_indices("crate::").filter(|(at, _)| {
        let before = code[..*at].chars().next_back();
        !before.is_some_and(|it| is_name(it) || it == ':')
    });
    let mut found: Vec<_> = of_root
        .map(|(at, path)| first(&code[at + path.len()..]))
        .collect();
    let up = "super::".repeat(module.len());
    let of_super = code
        .match_indices(&up)
        .map(|(at, _)| first(&code[at + up.len()..]));
    found.extend(of_super);
    found
}

#[test]
fn a_layer_imports_only_those_below_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let (mut breaches, mut looked_at) = (Vec::new(), 0);
    for file in files {
        let relative = file.strip_prefix(&root).unwrap().with_extension("");
        let mut module: Vec<_> = relative.iter().map(|it| it.to_str().unwrap()).collect();
        if module.len() == 1 {
            continue;
        }
        let layer = module[0];
        module.retain(|it| *it != "mod");
        let own = LAYERS.iter().position(|it| *it == layer);
        assert!(
            own.is_some() || layer == ALONE,
            "src/{layer} is no layer: see LAYERS"
        );
        looked_at += 1;
        for import in imports(&code(&fs::read_to_string(&file).unwrap()), &module) {
            let other = LAYERS.iter().position(|it| *it == import);
            if import != layer && (other.is_none() || other > own) {
                breaches.push(format!("src/{}.rs: crate::{import}", relative.display()));
            }
        }
    }
    assert!(looked_at > 100, "{looked_at}");
    assert!(breaches.is_empty(), "not below:\n{}", breaches.join("\n"));
}

#[test]
fn imports_are_found() {
    let code = code(
        "// crate::no\nuse crate::base::{Mode, Token};\nuse crate::{\n    a};\nlet it = my_crate::b();\n\
        super::x(); super::super::root();\n#[cfg(test)]\nmod tests {\nuse crate::c;",
    );
    let found = imports(&code, &["handle", "lock"]);
    assert_eq!(found, ["base", "", "root"]);
}
