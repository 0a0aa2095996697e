//! Durations: text as the crate `humantime` reads it, or an expression.

use std::ops::RangeInclusive;
use std::time::Duration;

use proc_macro2::TokenStream;
use quote::quote_spanned;
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, Lit};

/// The shortest and the longest ttl.
const TTL: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60);

/// The shortest and the longest time for which a key is kept.
const KEEP: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(366 * 24 * 60 * 60);

/// A wait without end.
const FOREVER: &str = "forever";

pub(crate) fn ttl(value: &Expr) -> syn::Result<TokenStream> {
    duration(value, |text| {
        if text == FOREVER {
            return Err(
                "a lease ends some time: for work of any length, leave out `ttl`, or say \
                        `renewal = \"watchdog\"`, which prolongs the lease while it runs"
                    .to_owned(),
            );
        }
        read_within(text, TTL, "a ttl goes from 10 ms to 24 h")
    })
}

pub(crate) fn keep_for(value: &Expr) -> syn::Result<TokenStream> {
    duration(value, |text| {
        read_within(text, KEEP, "a key is kept for 10 ms to a year")
    })
}

pub(crate) fn wait(value: &Expr) -> syn::Result<TokenStream> {
    duration(value, |text| match text {
        FOREVER => Ok(Duration::MAX),
        text => read(text, "\"500ms\" or \"forever\""),
    })
}

fn duration(
    value: &Expr,
    read: impl FnOnce(&str) -> Result<Duration, String>,
) -> syn::Result<TokenStream> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => {
            let read = read(&text.value()).map_err(|error| syn::Error::new(text.span(), error))?;
            let (secs, nanos) = (read.as_secs(), read.subsec_nanos());
            Ok(
                quote_spanned!(text.span().resolved_at(proc_macro2::Span::mixed_site()) =>
                ::std::time::Duration::new(#secs, #nanos)),
            )
        }
        Expr::Lit(other) => Err(syn::Error::new(
            other.span(),
            "a duration has a unit, as in \"10s\", or is an expression of type `Duration`",
        )),
        other => Ok(quote::quote!(#other)),
    }
}

fn read_within(
    text: &str,
    range: RangeInclusive<Duration>,
    bounds: &str,
) -> Result<Duration, String> {
    let time = read(text, "or \"500ms\"")?;
    if range.contains(&time) {
        Ok(time)
    } else {
        Err(bounds.to_owned())
    }
}

fn read(text: &str, examples: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| {
        format!("\"{text}\" is no duration ({error}): write \"10s\", \"1m 30s\", {examples}")
    })
}
