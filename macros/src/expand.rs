//! The function as it comes out: the locks first, for which the arguments are only borrowed, then
//! the work, which takes them.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::VisitMut;
use syn::{ReturnType, Type, parse_quote};

use crate::function::Function;
use crate::key::Keys;
use crate::options::{Options, operand};
use crate::returns::{Lazy, Work, Wrap};

/// `locks`: as the attributes stand, the first is taken first.
pub(crate) fn expand(function: &Function, locks: &[Options]) -> syn::Result<TokenStream> {
    let body = body(function, locks)?;
    let Function {
        attributes,
        visibility,
        signature,
        inner_attributes,
        ..
    } = function;
    Ok(quote! {
        #(#attributes)*
        #visibility #signature {
            #(#inner_attributes)*
            #body
        }
    })
}

fn body(function: &Function, locks: &[Options]) -> syn::Result<TokenStream> {
    let signature = &function.signature;
    if let Some(constness) = &signature.constness {
        let say = "a `const fn` cannot wait for a lock";
        return Err(syn::Error::new(constness.span(), say));
    }
    if let Some(abi) = &signature.abi {
        let say = "`#[with_lock]` goes on functions of Rust's own ABI: lock within this one";
        return Err(syn::Error::new(abi.span(), say));
    }
    let returned = match &signature.output {
        ReturnType::Type(_, returned) => Some(&**returned),
        ReturnType::Default => None,
    };
    let lazy = returned.and_then(Lazy::of);
    let skip = locks.iter().find_map(|lock| lock.skip);
    let keeps = locks.iter().find_map(|lock| lock.keep_on_success);
    match (signature.asyncness, returned, lazy) {
        (Some(_), Some(returned), None) => Ok(in_async(function, returned, locks)),
        (None, Some(returned), Some(lazy)) => {
            if let (Work::Stream, Some(skip)) = (lazy.work, skip) {
                let say = "`skip` is for an `async fn`, or for a function that returns a future: a \
                           stream has no `Ok(None)`, and yields the error of a busy lock";
                return Err(syn::Error::new(skip, say));
            }
            if let (Work::Stream, Some(keeps)) = (lazy.work, keeps) {
                let say = "`keep_on_success` is for an `async fn`, or for a function that returns a \
                           future: a stream has no result of its own";
                return Err(syn::Error::new(keeps, say));
            }
            Ok(in_lazy(function, returned, &lazy, locks))
        }
        (Some(_), None, _) => {
            let value = match skip {
                Some(_) => "Option<()>",
                None => "()",
            };
            Err(syn::Error::new(
                signature.paren_token.span.close(),
                format!(
                    "this returns nothing, but must tell what goes wrong with the lock: return \
                     `Result<{value}, LockError>`, or a `Result` with an error of your own that is \
                     `From<LockError>`"
                ),
            ))
        }
        (Some(asyncness), Some(_), Some(lazy)) => Err(syn::Error::new(
            asyncness.span(),
            match lazy.work {
                Work::Stream => {
                    "this function would give the lock back before the stream that it returns is \
                     begun: leave out `async`, and `#[with_lock]` locks the stream"
                }
                Work::Future => {
                    "this function would give the lock back before the future that it returns is \
                     begun: leave out `async`, and `#[with_lock]` locks that future"
                }
            },
        )),
        (None, _, None) => Err(syn::Error::new(
            signature.fn_token.span(),
            "`#[with_lock]` goes on a function that is `async`, or whose return type says that it \
             is a stream (`impl Stream`, `Pin<Box<dyn Stream>>`, `BoxStream`) or a future: make it \
             `async fn`; an attribute that takes `async` away, as `#[tokio::main]`, goes below",
        )),
        (None, None, Some(_)) => unreachable!("what is lazy is returned"),
    }
}

fn in_async(function: &Function, returned: &Type, locks: &[Options]) -> TokenStream {
    let (names, made) = make(locks);
    let outcome = inferred(returned);
    let (refusals, refusal) = refusals(locks, Some(&outcome));
    let (taken, work) = (take(function), &function.body);
    // An async block knows what it returns as soon as something returns it, and `?` needs that.
    let mut run = quote! {
        async move {
            if let ::std::option::Option::Some(__never) = ::std::option::Option::<#outcome>::None {
                return __never;
            }
            #taken
            #work
        }
    };
    for ((name, lock), refused) in names.iter().zip(locks).zip(refusals).rev() {
        let home = &lock.home;
        let keep_if = keep_if(lock);
        run = quote!(#home::FutureLockExt::with_lock(#run, #name)#keep_if);
        run = quote!(#home::__macros::locked_future(#run, #refused));
    }
    quote!(#made #refusal #run.await)
}

fn in_lazy(function: &Function, returned: &Type, lazy: &Lazy, locks: &[Options]) -> TokenStream {
    let (names, made) = make(locks);
    let outcome = lazy.outcome.as_ref().map(inferred);
    let (refusals, refusal) = refusals(locks, outcome.as_ref());
    let (taken, work) = (take(function), &function.body);
    let (begin, ext, locked) = match lazy.work {
        Work::Future => (
            quote!(with_lease),
            quote!(FutureLockExt),
            quote!(locked_future),
        ),
        Work::Stream => (
            quote!(with_lease_stream),
            quote!(StreamLockExt),
            quote!(locked_stream),
        ),
    };
    // A boxed one is coerced where it is returned: its type must be known there.
    let begun = match lazy.wrap {
        Wrap::Bare => quote!(),
        Wrap::Box | Wrap::PinBox => {
            let returned = inferred(returned);
            quote!(-> #returned)
        }
    };
    let mut run = quote!(move |_| #begun { #taken #work });
    let all = names.iter().zip(locks).zip(refusals);
    for (at, ((name, lock), refused)) in all.enumerate().rev() {
        let home = &lock.home;
        run = if at + 1 == locks.len() {
            quote!(#home::Lock::#begin(&#name, #run))
        } else {
            quote!(#home::#ext::with_lock(#run, #name))
        };
        let keep_if = keep_if(lock);
        run = quote!(#home::__macros::#locked(#run #keep_if, #refused));
    }
    let run = match lazy.wrap {
        Wrap::Bare => run,
        Wrap::Box => quote!(::std::boxed::Box::new(#run)),
        Wrap::PinBox => quote!(::std::boxed::Box::pin(#run)),
    };
    quote!(#made #refusal #run)
}

/// The key is kept only for an `Ok`, if that was asked for.
fn keep_if(lock: &Options) -> TokenStream {
    match lock.keep_on_success {
        Some(_) => quote!(.keep_if(::std::result::Result::is_ok)),
        None => TokenStream::new(),
    }
}

/// What makes the function's outcome of each lock's error, with the statement that makes that, or a
/// compile error at the outcome's type.
fn refusals(locks: &[Options], outcome: Option<&Type>) -> (Vec<Ident>, TokenStream) {
    let home = &locks[0].home;
    let (refused, skipped) = (local("__refused"), local("__skipped"));
    let names = locks.iter().map(|lock| match lock.skip {
        Some(_) => skipped.clone(),
        None => refused.clone(),
    });
    let (pattern, make) = if locks.iter().any(|lock| lock.skip.is_some()) {
        (quote!([#refused, #skipped]), quote!(skipping))
    } else {
        (quote!(#refused), quote!(refusal))
    };
    let made = match outcome {
        Some(outcome) => {
            let span = outcome.span().resolved_at(Span::call_site());
            quote_spanned!(span => #home::__macros::#make::<#outcome>())
        }
        None => quote!(#home::__macros::#make()),
    };
    (names.collect(), quote!(let #pattern = #made;))
}

/// The locks in variables of their own, with the statements that make them.
fn make(locks: &[Options]) -> (Vec<Ident>, TokenStream) {
    let mut names = Vec::new();
    let mut made = TokenStream::new();
    for (at, lock) in locks.iter().enumerate() {
        let name = local(&format!("__lock_{at}"));
        let Options {
            keys,
            registry,
            setters,
            home,
            ..
        } = lock;
        let (method, function, keys) = match keys {
            Keys::One(key) => ("obtain_lock", local("obtain"), quote!(#key)),
            Keys::Each(keys) => {
                let keys = quote!([#(#home::__macros::one_key(#keys)),*]);
                ("obtain_locks", local("obtain_all"), keys)
            }
            Keys::All(keys) => {
                let span = keys.span().resolved_at(Span::call_site());
                let keys = operand(keys);
                let keys = quote_spanned!(span => #keys.iter());
                ("obtain_locks", local("obtain_all"), keys)
            }
        };
        let obtained = match registry {
            Some(registry) => {
                let span = registry.span().resolved_at(Span::call_site());
                let registry = operand(registry);
                let method = Ident::new(method, span);
                let obtain = quote_spanned!(span => .#method);
                quote! {{
                    use #home::__macros::Obtain as _;
                    #registry #obtain (#keys)
                }}
            }
            None => quote!(#home::__macros::#function(#keys)),
        };
        made.extend(quote!(let #name = #obtained;));
        if !setters.is_empty() {
            made.extend(quote!(let #name = #name #setters;));
        }
        names.push(name);
    }
    (names, made)
}

/// A variable that the function's own names cannot meet.
fn local(name: &str) -> Ident {
    Ident::new(name, Span::mixed_site())
}

/// Makes the work take the arguments that it names.
fn take(function: &Function) -> TokenStream {
    let taken = function.arguments_in_use();
    if taken.is_empty() {
        return TokenStream::new();
    }
    quote!(let _ = (#(&#taken,)*);)
}

/// The type, with `_` for each `impl Trait` in it.
fn inferred(ty: &Type) -> Type {
    struct Infer;

    impl VisitMut for Infer {
        fn visit_type_mut(&mut self, ty: &mut Type) {
            match ty {
                Type::ImplTrait(_) => *ty = parse_quote!(_),
                _ => syn::visit_mut::visit_type_mut(self, ty),
            }
        }
    }

    let mut ty = ty.clone();
    Infer.visit_type_mut(&mut ty);
    ty
}
