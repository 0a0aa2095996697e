//! The key: a format string over the arguments, or an expression.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Expr, Ident, LitStr};

use crate::options::operand;

/// The longest key, in bytes.
const MAX_KEY: usize = 512;

pub(crate) enum Key {
    /// A string without holes, as it is.
    Text(LitStr),
    /// What `format!` gets, and the expressions that it shows by name.
    Format(LitStr, Vec<(Ident, Expr)>),
    /// Anything that is `AsRef<str>`.
    Expr(Expr),
}

impl Key {
    pub(crate) fn parse(value: Expr) -> syn::Result<Self> {
        match value {
            Expr::Lit(syn::ExprLit {
                lit: syn::Lit::Str(text),
                ..
            }) => Self::parse_text(&text),
            Expr::Lit(other) => Err(syn::Error::new_spanned(
                other,
                "a key is a string: write `key = \"order:{order.id}\"`",
            )),
            other => Ok(Self::Expr(other)),
        }
    }

    fn parse_text(literal: &LitStr) -> syn::Result<Self> {
        let parts = split(&literal.value()).map_err(|reason| error(literal, &reason))?;
        if let Some(reason) = fault(&parts) {
            return Err(error(literal, &format!("invalid key: {reason}")));
        }
        let mut holes = Vec::new();
        let mut template = String::new();
        for part in &parts {
            match part {
                Part::Text(text) => {
                    template.push_str(&text.replace('{', "{{").replace('}', "}}"));
                }
                Part::Hole { shown, spec } => {
                    let name = format_ident!("__lockstream_{}", holes.len());
                    template.push_str(&format!("{{{name}{spec}}}"));
                    holes.push((name, hole(literal, shown)?));
                }
            }
        }
        match &*parts {
            [Part::Text(text)] => Ok(Self::Text(LitStr::new(text, literal.span()))),
            _ => Ok(Self::Format(LitStr::new(&template, literal.span()), holes)),
        }
    }
}

impl quote::ToTokens for Key {
    /// An expression that is `AsRef<str>` and only borrows the arguments.
    fn to_tokens(&self, tokens: &mut TokenStream) {
        tokens.extend(match self {
            Self::Text(text) => quote!(#text),
            Self::Format(template, holes) => {
                let names = holes.iter().map(|(name, _)| name);
                let shown = holes.iter().map(|(_, shown)| shown);
                quote!(::std::format!(#template, #(#names = #shown),*))
            }
            Self::Expr(expr) => {
                let span = expr.span().resolved_at(Span::call_site());
                let expr = operand(expr);
                quote_spanned!(span => &#expr)
            }
        });
    }
}

/// What an attribute locks.
pub(crate) enum Keys {
    One(Key),
    /// Several as one.
    Each(Vec<Key>),
    /// As many as there are at run time: what has an `iter` over `AsRef<str>`.
    All(Expr),
}

impl Keys {
    /// The value of `keys`.
    pub(crate) fn parse(value: Expr) -> syn::Result<Self> {
        match value {
            Expr::Array(array) if array.elems.is_empty() => Err(syn::Error::new_spanned(
                array,
                "`keys` wants one key at least: `keys = [\"account:{from}\", \"account:{to}\"]`",
            )),
            Expr::Array(array) => {
                let keys = array.elems.into_iter().map(Key::parse);
                Ok(Self::Each(keys.collect::<syn::Result<_>>()?))
            }
            Expr::Lit(other) => Err(syn::Error::new_spanned(
                other,
                "`keys` takes several keys: `keys = [\"account:{from}\", \"account:{to}\"]`; write `key = …` for one",
            )),
            other => Ok(Self::All(other)),
        }
    }
}

/// A piece of the format string.
#[derive(Debug)]
enum Part {
    /// As it stands, its braces unescaped.
    Text(String),
    /// What it shows, and the colon and all after it.
    Hole { shown: String, spec: String },
}

fn split(value: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = value;
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        text.push_str(before);
        if let Some(after) = brace.strip_prefix("{{") {
            text.push('{');
            rest = after;
        } else if let Some(after) = brace.strip_prefix("}}") {
            text.push('}');
            rest = after;
        } else if brace.starts_with('}') {
            let upto = &value[..value.len() - brace.len() + 1];
            return Err(format!(
                "the `}}` that ends `{upto}` closes nothing: write `}}}}` for the character itself"
            ));
        } else {
            let inside = &brace[1..];
            let end = inside.find(['{', '}']).unwrap_or(inside.len());
            let Some(after) = inside[end..].strip_prefix('}') else {
                return Err(format!(
                    "the `{{` of `{{{}` is never closed: write `{{{{` for the character itself",
                    &inside[..end]
                ));
            };
            if !text.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut text)));
            }
            let (shown, spec) = inside[..end].split_at(spec_of(&inside[..end]));
            parts.push(Part::Hole {
                shown: shown.trim().to_owned(),
                spec: spec.trim_end().to_owned(),
            });
            rest = after;
        }
    }
    text.push_str(rest);
    if !text.is_empty() || parts.is_empty() {
        parts.push(Part::Text(text));
    }
    Ok(parts)
}

/// Where the format spec begins: at the first colon that is no half of `::`.
fn spec_of(inside: &str) -> usize {
    let mut at = 0;
    while let Some(colon) = inside[at..].find(':') {
        at += colon;
        if !inside[at..].starts_with("::") {
            return at;
        }
        at += 2;
    }
    inside.len()
}

fn hole(literal: &LitStr, shown: &str) -> syn::Result<Expr> {
    if shown.is_empty() {
        return Err(error(
            literal,
            "a hole names what it shows: `{order.id}`, not `{}`",
        ));
    }
    if shown.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(error(
            literal,
            &format!("a hole names what it shows: `{{order.id}}`, not `{{{shown}}}`"),
        ));
    }
    match LitStr::new(shown, literal.span()).parse::<Expr>() {
        Ok(expr) if is_plain(&expr) => Ok(expr),
        _ => Err(error(
            literal,
            &format!(
                "`{{{shown}}}` is not for a hole, which takes an argument, its fields and its methods \
                 without arguments: write `key = format!(…)`"
            ),
        )),
    }
}

/// Arguments, constants, fields, and methods without arguments.
fn is_plain(expr: &Expr) -> bool {
    match expr {
        Expr::Path(path) => {
            let segments = &path.path.segments;
            path.qself.is_none() && segments.iter().all(|segment| segment.arguments.is_none())
        }
        Expr::Field(field) => is_plain(&field.base),
        Expr::MethodCall(call) => {
            call.args.is_empty() && call.turbofish.is_none() && is_plain(&call.receiver)
        }
        _ => false,
    }
}

/// Why no key that the format string can make names a lock, as far as that can be known: the same
/// reasons that the crate gives at run time.
fn fault(parts: &[Part]) -> Option<&'static str> {
    let texts = || {
        parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Hole { .. } => None,
        })
    };
    if let [Part::Text(text)] = parts
        && text.is_empty()
    {
        return Some("must not be empty");
    }
    if texts().map(String::len).sum::<usize>() > MAX_KEY {
        return Some("must be at most 512 bytes: lock a hash of it instead");
    }
    if texts().any(|text| text.chars().any(char::is_control)) {
        return Some("must not contain control characters");
    }
    let first = match parts.first() {
        Some(Part::Text(first)) => first,
        _ => "",
    };
    if first.starts_with('~') {
        return Some("must not begin with '~', which is reserved");
    }
    if texts().any(|text| text.contains(":~")) {
        return Some("must not contain ':~', which is reserved");
    }
    if first.contains('}') && !may_have_hash_tag(first, parts.len() > 1) {
        return Some("must not contain '}' without a hash tag '{…}' before it");
    }
    None
}

/// Whether the first `{` and the first `}` after it have something between them, if that is known.
fn may_have_hash_tag(text: &str, more: bool) -> bool {
    match text.split_once('{') {
        None => more,
        Some((_, rest)) => rest
            .split_once('}')
            .map_or(more, |(tag, _)| !tag.is_empty()),
    }
}

fn error(literal: &LitStr, reason: &str) -> syn::Error {
    syn::Error::new(literal.span(), reason)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use lockstream::{LockError, LockRegistry};

    use super::*;

    /// A text without holes is judged as the crate judges it when it is locked, and for the same
    /// reason. The prefix is the default's: another may bring a hash tag along.
    #[test]
    fn a_key_is_refused_as_at_run_time() {
        let long = "x".repeat(MAX_KEY + 1);
        let longest = &long[1..];
        let keys = [
            "a",
            "order:42",
            "ключ",
            "{a}b",
            "a{b}c}",
            "a{b",
            longest,
            "a~",
            "~",
            "~fence",
            "",
            "a\nb",
            "a:",
            "a:~queue1",
            "a:~",
            "billing:~fence",
            "a}",
            "{}a",
            "{}{a}",
            "}{a}",
            &long,
        ];
        let locks = LockRegistry::in_memory();
        let mut refused = 0;
        for key in keys {
            let looked = locks.obtain(key).inspect().now_or_never();
            let expected = match looked.expect("a memory store answers at once") {
                Ok(_) => None,
                Err(LockError::InvalidKey { reason, .. }) => Some(reason),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(fault(&[Part::Text(key.to_owned())]), expected, "{key}");
            refused += usize::from(expected.is_some());
        }
        assert_eq!(refused, 11);
    }

    /// What a hole may bring is not known.
    #[test]
    fn a_key_that_may_be_right_is_let_through() {
        for template in [
            "{a}", "{a}~b", "{a}}}", "a{{{a}}}", "a}}{b}", "{a}:{b}", "a:{b}",
        ] {
            let parts = split(template).unwrap();
            assert_eq!(fault(&parts), None, "{template}");
        }
        for template in [
            "~{a}",
            "{a}\n{b}",
            "{{}}{a}",
            "{a}:~queue1",
            ":~{b}",
            "{a}:~{b}",
        ] {
            let parts = split(template).unwrap();
            assert!(fault(&parts).is_some(), "{template}");
        }
    }

    #[test]
    fn the_spec_begins_at_the_first_lone_colon() {
        for (inside, shown) in [
            ("a", "a"),
            ("a:08", "a"),
            ("A::B:?", "A::B"),
            ("::a::b", "::a::b"),
            ("a::<", "a::<"),
        ] {
            assert_eq!(&inside[..spec_of(inside)], shown);
        }
    }
}
