//! `docs/face.txt` has the public face of all features, so that a change of it is seen in the diff. It is read from the
//! source: what is `pub`, which the lint `unreachable_pub` allows for nothing else. What is in macros is not seen: the impls of
//! the futures of `operation!` (`Future`, `FusedFuture`, `Debug`) and those of `IntoLock` for strings. Auto traits are in
//! `types.rs`.
//!
//! `LOCKSTREAM_FACE=overwrite cargo test --test face` writes it anew.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Block, Fields, ImplItem, Item, ItemImpl, TraitItem, Type, Visibility};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        // The contract of stores is behind a sealed trait, and macros.rs is what the attribute expands to.
        let is_none = matches!(
            &*name,
            "tests" | "sim" | "tests.rs" | "contract.rs" | "submitted.rs" | "macros.rs"
        );
        match path.is_dir() {
            _ if is_none => {}
            true => sources(&path, found),
            false => found.extend(name.ends_with(".rs").then(|| path.clone())),
        }
    }
}

/// Tokens nearly as people write them.
fn text(tokens: impl ToTokens) -> String {
    let text = tokens.to_token_stream().to_string();
    let spaces = [
        " ::", ":: ", " <", "< ", " >", "& ", " (", "( ", " )", " ,", " :", "# ", " [", "[ ", " ]",
        " ;", " !",
    ];
    let tight = spaces
        .iter()
        .fold(text, |text, it| text.replace(it, it.trim()));
    tight
        .replace(" { }", "")
        .replace("->(", "-> (")
        .replace("(mut self", "(self")
        .replace(",)", ")")
        .replace(",>", ">")
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    let hides = ["#[doc(hidden", "#[cfg(test", "#[cfg(all(test"];
    attributes
        .iter()
        .any(|it| hides.iter().any(|hidden| text(it).starts_with(hidden)))
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Takes away what is written for readers of the source.
struct Strip;

impl VisitMut for Strip {
    fn visit_attributes_mut(&mut self, attributes: &mut Vec<Attribute>) {
        attributes.retain(|it| match text(it) {
            it if it.contains(", doc =") || it.contains("docsrs") => false,
            it if it.starts_with("#[doc(hidden)") => true,
            it => ["cfg", "derive", "non_exhaustive"]
                .iter()
                .any(|kept| it[2..].starts_with(kept)),
        });
    }

    fn visit_block_mut(&mut self, block: &mut Block) {
        block.stmts.clear();
    }

    fn visit_item_mut(&mut self, item: &mut Item) {
        match item {
            Item::Struct(it) => match &mut it.fields {
                Fields::Named(it) => {
                    it.named = std::mem::take(&mut it.named)
                        .into_iter()
                        .filter(|it| is_public(&it.vis))
                        .collect();
                }
                Fields::Unnamed(all) if !all.unnamed.iter().any(|it| is_public(&it.vis)) => {
                    it.fields = Fields::Unit
                }
                _ => {}
            },
            Item::Trait(it) => it
                .items
                .retain(|it| !matches!(it, TraitItem::Fn(it) if is_hidden(&it.attrs))),
            // It makes a struct, and these impls of it.
            Item::Macro(it) if it.mac.path.is_ident("operation") => {
                *item = Item::Struct(syn::parse2(it.mac.tokens.clone()).expect("a struct"));
            }
            _ => {}
        }
        visit_mut::visit_item_mut(self, item);
    }
}

/// The items of a file, and those of the modules in it.
fn items(items: Vec<Item>, found: &mut Vec<Item>) {
    for mut item in items {
        Strip.visit_item_mut(&mut item);
        match item {
            Item::Mod(it) => self::items(it.content.map_or(Vec::new(), |(_, items)| items), found),
            item => found.push(item),
        }
    }
}

fn last_name(of: &Type) -> String {
    match of {
        Type::Path(it) => it
            .path
            .segments
            .last()
            .map_or(String::new(), |it| it.ident.to_string()),
        Type::Reference(it) => last_name(&it.elem),
        _ => String::new(),
    }
}

/// The lines of an impl: its head, and what is public in it.
fn implementation(it: &ItemImpl, types: &BTreeSet<String>, own: &BTreeSet<String>) -> Vec<String> {
    let mut head = it.clone();
    head.items.retain(|it| matches!(it, ImplItem::Type(_)));
    let (name, head) = (last_name(&it.self_ty), text(&head));
    let Some((_, path, _)) = &it.trait_ else {
        let line = |it: &ImplItem| match it {
            ImplItem::Fn(it) if is_public(&it.vis) && !is_hidden(&it.attrs) => Some(text(it)),
            ImplItem::Const(it) if is_public(&it.vis) => Some(text(it)),
            _ => None,
        };
        let lines = it.items.iter().filter_map(line);
        return lines.map(|it| format!("{name}: {head} {it}")).collect();
    };
    let of_trait = path
        .segments
        .last()
        .map(|it| it.ident.to_string())
        .unwrap_or_default();
    let concerns_nobody = ["Sealed", "Drop"].contains(&&*of_trait) || own.contains(&of_trait);
    let is_shown = types.contains(&of_trait) || types.contains(&name);
    let subject = if types.contains(&name) {
        name
    } else {
        of_trait
    };
    Vec::from_iter((is_shown && !concerns_nobody).then(|| format!("{subject}: {head}")))
}

#[test]
fn the_face_is_as_written_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut files, mut all, mut lines) = (Vec::new(), Vec::new(), BTreeSet::new());
    sources(&root.join("src"), &mut files);
    for file in files {
        let mut found = Vec::new();
        items(
            syn::parse_file(&fs::read_to_string(&file).unwrap())
                .unwrap()
                .items,
            &mut found,
        );
        // `lib.rs` says which modules have names for users.
        let module = file
            .strip_prefix(root.join("src"))
            .unwrap()
            .with_extension("");
        let module = module
            .to_str()
            .unwrap()
            .trim_end_matches("/mod")
            .replace("lib", "lockstream");
        let is_naming =
            ["lockstream", "future", "stream", "store", "tower", "verify"].contains(&&*module);
        let uses = found
            .iter()
            .filter(|it| matches!(it, Item::Use(it) if is_naming && is_public(&it.vis)));
        lines.extend(uses.map(|it| format!("{module}: {}", text(it))));
        all.append(&mut found);
    }
    let (mut types, mut own) = (BTreeSet::new(), BTreeSet::new());
    for item in &all {
        let (name, visibility, attributes) = match item {
            Item::Struct(it) => (&it.ident, &it.vis, &it.attrs),
            Item::Enum(it) => (&it.ident, &it.vis, &it.attrs),
            Item::Trait(it) => (&it.ident, &it.vis, &it.attrs),
            Item::Type(it) => (&it.ident, &it.vis, &it.attrs),
            Item::Fn(it) => (&it.sig.ident, &it.vis, &it.attrs),
            _ => continue,
        };
        if is_public(visibility) && !is_hidden(attributes) {
            types.insert(name.to_string());
            lines.insert(format!("{name}: {}", text(item)));
        } else if let Item::Trait(_) = item {
            own.insert(name.to_string());
        }
    }
    for item in &all {
        match item {
            Item::Impl(it) if !is_hidden(&it.attrs) => {
                lines.extend(implementation(it, &types, &own))
            }
            _ => {}
        }
    }
    let file = root.join("docs/face.txt");
    if std::env::var_os("LOCKSTREAM_FACE").is_some_and(|it| it == "overwrite") {
        fs::write(
            &file,
            lines.iter().map(|it| format!("{it}\n")).collect::<String>(),
        )
        .unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let written: BTreeSet<_> = written.lines().map(str::to_owned).collect();
    let gone = written.difference(&lines).map(|it| format!("- {it}"));
    let changes: Vec<_> = gone
        .chain(lines.difference(&written).map(|it| format!("+ {it}")))
        .collect();
    assert!(
        changes.is_empty(),
        "the face is not that of docs/face.txt:\n{}",
        changes.join("\n")
    );
}
