//! What stands in the brackets of `#[with_lock(…)]`.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, Ident, Lit, Path, Token, parse_quote, parse2};

use crate::duration;
use crate::key::{Key, Keys};

/// The greatest weight.
const MOST_WEIGHT: u32 = 64;

const NAMES: [&str; 19] = [
    "key",
    "keys",
    "registry",
    "ttl",
    "wait",
    "skip",
    "renewal",
    "max_renewals",
    "on_lost",
    "on_finish",
    "keep_for",
    "keep_on_success",
    "shared",
    "permits",
    "weight",
    "reentrant",
    "nested",
    "repeat",
    "crate",
];

/// Which lock, and how: one attribute's worth.
pub(crate) struct Options {
    pub(crate) keys: Keys,
    pub(crate) registry: Option<Expr>,
    /// Calls of the setters of `Lock`.
    pub(crate) setters: TokenStream,
    /// Where it is said that a busy lock is no error.
    pub(crate) skip: Option<Span>,
    /// Where it is said that the key is kept only if the body succeeds.
    pub(crate) keep_on_success: Option<Span>,
    /// Where the crate `lockstream` is to be found.
    pub(crate) home: Path,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut given = Given(Vec::new());
        while !input.is_empty() {
            given.push(Given::parse_one(input)?)?;
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        given.settle()
    }
}

/// The options as they were written, each at most once.
struct Given(Vec<(Ident, Option<Expr>)>);

impl Given {
    fn parse_one(input: ParseStream<'_>) -> syn::Result<(Ident, Option<Expr>)> {
        let name = if input.peek(Ident::peek_any) {
            input.call(Ident::parse_any)?
        } else {
            let say = "expected an option, as in `key = \"order:{order.id}\"`";
            return Err(input.error(say));
        };
        if !NAMES.iter().any(|known| name == known) {
            return Err(syn::Error::new(
                name.span(),
                format!(
                    "there is no option `{name}`; there are `{}`",
                    NAMES.join("`, `")
                ),
            ));
        }
        if !input.peek(Token![=]) {
            return Ok((name, None));
        }
        input.parse::<Token![=]>()?;
        if input.is_empty() || input.peek(Token![,]) {
            return Err(input.error(format!("`{name} =` wants a value")));
        }
        Ok((name, Some(ungroup(input.parse()?))))
    }

    fn push(&mut self, one: (Ident, Option<Expr>)) -> syn::Result<()> {
        if self.0.iter().any(|(name, _)| *name == one.0) {
            let say = format!("`{}` was said before: leave one out", one.0);
            return Err(syn::Error::new(one.0.span(), say));
        }
        self.0.push(one);
        Ok(())
    }

    /// Where the option is said.
    fn said(&self, name: &str) -> Option<Span> {
        let (given, _) = self.0.iter().find(|(given, _)| given == name)?;
        Some(given.span())
    }

    /// Refuses options that do not go together.
    fn agree(&self) -> syn::Result<()> {
        let (shared, permits) = (self.said("shared"), self.said("permits"));
        let keys = self.said("keys");
        let (reentrant, nested) = (self.said("reentrant"), self.said("nested"));
        let faults = [
            (
                self.said("key").and(keys),
                "a lock has a `key`, or several `keys`: leave one out",
            ),
            (
                keys.and(shared.or(permits)),
                "several `keys` are locked exclusively: `shared` and `permits` are for one `key`",
            ),
            (keys.and(reentrant), "`reentrant` is for one `key`"),
            (keys.and(nested), "`nested` is for one `key`"),
            (
                reentrant.and(nested),
                "`nested` is `reentrant`, and must find a lease: leave one out",
            ),
            (
                shared.and(permits),
                "a lock is `shared`, or it has `permits`: leave one out",
            ),
            (
                self.said("weight").filter(|_| permits.is_none()),
                "`weight` is how many of the permits this one takes: say how many there are, as in \
                 `permits = 8`",
            ),
            (
                shared.or(permits).and(reentrant),
                "`reentrant` is for exclusive locks only",
            ),
            (
                shared.or(permits).and(nested),
                "`nested` is for exclusive locks only",
            ),
            (
                self.said("on_finish").and(self.said("keep_for")),
                "`keep_for` says already what happens to the key at the end: leave out this one or \
                 `on_finish`",
            ),
            (
                self.said("keep_on_success")
                    .filter(|_| self.said("keep_for").is_none()),
                "`keep_on_success` is about a key that is kept: say for how long, as in \
                 `keep_for = \"59m\"`",
            ),
        ];
        for (at, say) in faults {
            if let Some(at) = at {
                return Err(syn::Error::new(at, say));
            }
        }
        Ok(())
    }

    fn take(&mut self, name: &str) -> Option<(Ident, Option<Expr>)> {
        let at = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.remove(at))
    }

    /// The value of an option that has one.
    fn value(&mut self, name: &str) -> syn::Result<Option<Expr>> {
        match self.take(name) {
            None => Ok(None),
            Some((_, Some(value))) => Ok(Some(value)),
            Some((ident, None)) => Err(syn::Error::new(
                ident.span(),
                format!("`{name}` wants a value: `{name} = …`"),
            )),
        }
    }

    fn flag(&mut self, name: &str) -> syn::Result<bool> {
        match self.take(name) {
            None => Ok(false),
            Some((_, None)) => Ok(true),
            Some((_, Some(value))) => Err(syn::Error::new(
                value.span(),
                format!("`{name}` takes no value: it is there or not"),
            )),
        }
    }

    fn settle(mut self) -> syn::Result<Options> {
        let home = match self.value("crate")? {
            None => parse_quote!(::lockstream),
            Some(Expr::Path(path)) if path.qself.is_none() => path.path,
            Some(other) => {
                let say = "`crate` takes the path of the crate lockstream, as in `crate = ::locks`";
                return Err(syn::Error::new(other.span(), say));
            }
        };
        self.agree()?;
        let keys = match (self.value("key")?, self.value("keys")?) {
            (Some(key), _) => Keys::One(Key::parse(key)?),
            (None, Some(keys)) => Keys::parse(keys)?,
            (None, None) => {
                return Err(syn::Error::new(
                    Span::call_site(),
                    "`#[with_lock]` wants a key: `#[with_lock(key = \"order:{order.id}\")]`",
                ));
            }
        };
        let registry = self.value("registry")?;
        let skip = self.said("skip");
        self.flag("skip")?;
        let keep_on_success = self.said("keep_on_success");
        self.flag("keep_on_success")?;
        let setters = self.setters(&home)?;
        Ok(Options {
            keys,
            registry,
            setters,
            skip,
            keep_on_success,
            home,
        })
    }

    fn setters(&mut self, home: &Path) -> syn::Result<TokenStream> {
        let mut setters = TokenStream::new();
        if let Some(ttl) = self.value("ttl")? {
            let ttl = duration::ttl(&ttl)?;
            setters.extend(quote!(.ttl(#ttl)));
        }
        if let Some(wait) = self.value("wait")? {
            let wait = duration::wait(&wait)?;
            setters.extend(quote!(.wait(#wait)));
        }
        if let Some(renewal) = self.renewal(home)? {
            setters.extend(quote!(.renewal(#renewal)));
        }
        let choices: [(_, &[_], _); 2] = [
            (
                "on_lost",
                &[("stop", "Stop"), ("run_on", "RunOn")],
                "OnLost",
            ),
            (
                "on_finish",
                &[("release", "Release"), ("let_expire", "LetExpire")],
                "OnFinish",
            ),
        ];
        for (name, words, ty) in choices {
            if let Some(value) = self.value(name)? {
                let setter = Ident::new(name, Span::mixed_site());
                let ty = Ident::new(ty, Span::mixed_site());
                let value = choice(name, &value, words, |variant, span| {
                    let variant = Ident::new(variant, span);
                    quote_spanned!(span => #home::#ty::#variant)
                })?;
                setters.extend(quote!(.#setter(#value)));
            }
        }
        if let Some(time) = self.value("keep_for")? {
            let time = duration::keep_for(&time)?;
            setters.extend(quote!(.on_finish(#home::OnFinish::KeepFor(#time))));
        }
        if self.flag("shared")? {
            setters.extend(quote!(.shared()));
        }
        setters.extend(self.permits()?);
        if self.flag("reentrant")? {
            setters.extend(quote!(.reentrant()));
        }
        if self.flag("nested")? {
            setters.extend(quote!(.nested()));
        }
        if let Some(repeat) = self.value("repeat")? {
            setters.extend(quote!(.repeat(#repeat)));
        }
        Ok(setters)
    }

    fn permits(&mut self) -> syn::Result<TokenStream> {
        let Some(limit) = self.value("permits")? else {
            return Ok(TokenStream::new());
        };
        let known_limit = whole("permits", &limit, 4)?;
        if known_limit == Some(0) {
            let say = "`permits` must be at least 1";
            return Err(syn::Error::new(limit.span(), say));
        }
        let Some(weight) = self.value("weight")? else {
            return Ok(quote!(.permits(#limit)));
        };
        let most = known_limit.unwrap_or(MOST_WEIGHT).min(MOST_WEIGHT);
        match whole("weight", &weight, 2)? {
            Some(known) if !(1..=most).contains(&known) => {
                let say = "`weight` must be from 1 to 64, and within the `permits`";
                Err(syn::Error::new(weight.span(), say))
            }
            _ => Ok(quote!(.permits_of(#limit, #weight))),
        }
    }

    /// `max_renewals` bounds a watchdog, which it brings along.
    fn renewal(&mut self, home: &Path) -> syn::Result<Option<TokenStream>> {
        let renewal = self.value("renewal")?;
        let most = self.value("max_renewals")?;
        if let (Some(renewal), Some(most)) = (&renewal, &most)
            && text(renewal).is_some_and(|text| text == "off")
        {
            let say =
                "there are no renewals to count: leave out `max_renewals` or `renewal = \"off\"`";
            return Err(syn::Error::new(most.span(), say));
        }
        let renewal = renewal
            .map(|renewal| {
                let words = [("watchdog", "watchdog"), ("off", "off")];
                choice("renewal", &renewal, &words, |how, span| {
                    let how = Ident::new(how, span);
                    quote_spanned!(span => #home::Renewal::#how())
                })
            })
            .transpose()?;
        let Some(most) = most else {
            return Ok(renewal);
        };
        whole("max_renewals", &most, 360)?;
        let renewal = match renewal {
            Some(renewal) => operand(&parse2(renewal)?),
            None => quote!(#home::Renewal::watchdog()),
        };
        Ok(Some(quote!(#renewal.max_renewals(#most))))
    }
}

/// One of a few words, or an expression.
fn choice(
    name: &str,
    value: &Expr,
    words: &[(&str, &str)],
    write: impl FnOnce(&str, Span) -> TokenStream,
) -> syn::Result<TokenStream> {
    let Expr::Lit(literal) = value else {
        return Ok(quote!(#value));
    };
    let chosen = text(value).and_then(|text| words.iter().find(|(word, _)| *word == text));
    match chosen {
        Some((_, variant)) => {
            let span = literal.span().resolved_at(Span::mixed_site());
            Ok(write(variant, span))
        }
        None => {
            let words: Vec<_> = words
                .iter()
                .map(|(word, _)| format!("\"{word}\""))
                .collect();
            let say = format!("`{name}` is {}, or an expression", words.join(" or "));
            Err(syn::Error::new(literal.span(), say))
        }
    }
}

/// The number, if it is a literal.
fn whole(name: &str, value: &Expr, example: u32) -> syn::Result<Option<u32>> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Int(number),
            ..
        }) => number.base10_parse().map(Some),
        Expr::Lit(other) => Err(syn::Error::new(
            other.span(),
            format!("`{name}` is a whole number, as in `{name} = {example}`"),
        )),
        _ => Ok(None),
    }
}

fn text(value: &Expr) -> Option<String> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Some(text.value()),
        _ => None,
    }
}

/// The expression as it may stand before a `.`: in brackets where it needs them, and only there, for
/// brackets too many are a warning.
pub(crate) fn operand(expr: &Expr) -> TokenStream {
    match expr {
        Expr::Path(_)
        | Expr::Field(_)
        | Expr::Call(_)
        | Expr::MethodCall(_)
        | Expr::Index(_)
        | Expr::Macro(_)
        | Expr::Paren(_) => quote!(#expr),
        _ => quote!((#expr)),
    }
}

/// What a `macro_rules` variable brings comes in an invisible group.
fn ungroup(value: Expr) -> Expr {
    match value {
        Expr::Group(group) => ungroup(*group.expr),
        other => other,
    }
}
