//! The function that the attribute stands on. Its body is not parsed: whatever rustc understands
//! may stand there.

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::parse::{Parse, ParseStream};
use syn::visit_mut::VisitMut;
use syn::{Attribute, FnArg, PatIdent, Signature, Token, Visibility, braced};

use crate::options::Options;

pub(crate) struct Function {
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) visibility: Visibility,
    pub(crate) signature: Signature,
    /// Attributes within the braces, `#![…]`.
    pub(crate) inner_attributes: Vec<Attribute>,
    pub(crate) body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attributes = input.call(Attribute::parse_outer)?;
        let visibility = input.parse()?;
        if input.fork().parse::<Signature>().is_err() {
            return Err(input.error(
                "`#[with_lock]` goes on a function: an `async` one, or one that returns a stream",
            ));
        }
        let signature: Signature = input.parse()?;
        if input.peek(Token![;]) {
            return Err(syn::Error::new(
                signature.ident.span(),
                "there is no body to run under the lock: `#[with_lock]` goes on the implementation",
            ));
        }
        let body;
        braced!(body in input);
        Ok(Self {
            attributes,
            visibility,
            signature,
            inner_attributes: body.call(Attribute::parse_inner)?,
            body: body.parse()?,
        })
    }
}

impl Function {
    /// What the other `#[with_lock]`s on this function say, which are taken off it. Left there, each
    /// would wrap what those above it wrote, and the last line would take its lock first.
    pub(crate) fn take_further_locks(&mut self) -> syn::Result<Vec<Options>> {
        let is_ours = |attribute: &Attribute| {
            let last = attribute.path().segments.last();
            last.is_some_and(|last| last.ident == "with_lock")
        };
        let (ours, others): (Vec<_>, Vec<_>) = self.attributes.drain(..).partition(is_ours);
        self.attributes = others;
        ours.iter().map(Attribute::parse_args).collect()
    }

    /// The arguments that the body names. It shall have them as a whole, as it would have without
    /// the lock: what an `async move` block or a closure names a field of, it takes that field of.
    pub(crate) fn arguments_in_use(&self) -> Vec<Ident> {
        let mut names = Names(Vec::new());
        for argument in &self.signature.inputs {
            match argument {
                FnArg::Receiver(receiver) => {
                    names.0.push(Ident::new("self", receiver.self_token.span))
                }
                FnArg::Typed(argument) => names.visit_pat_mut(&mut argument.pat.clone()),
            }
        }
        names.0.retain(|name| mentions(self.body.clone(), name));
        names.0
    }
}

struct Names(Vec<Ident>);

impl VisitMut for Names {
    fn visit_pat_ident_mut(&mut self, pattern: &mut PatIdent) {
        self.0.push(pattern.ident.clone());
        syn::visit_mut::visit_pat_ident_mut(self, pattern);
    }
}

fn mentions(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Group(group) => mentions(group.stream(), name),
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}
