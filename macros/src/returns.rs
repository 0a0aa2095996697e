//! What a function returns, as far as its signature shows: what runs under the lock.

use syn::punctuated::Punctuated;
use syn::{GenericArgument, Path, PathArguments, Token, Type, TypeParamBound};

/// What is not done when the function returns, but begins then.
pub(crate) struct Lazy {
    pub(crate) work: Work,
    pub(crate) wrap: Wrap,
    /// The items' type, or the output's, where the signature names it.
    pub(crate) outcome: Option<Type>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Future,
    Stream,
}

/// What the function returns it in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrap {
    /// `impl Stream`.
    Bare,
    /// `Box<dyn Stream + Unpin>`.
    Box,
    /// `Pin<Box<dyn Stream>>`, `BoxStream`.
    PinBox,
}

impl Lazy {
    pub(crate) fn of(returned: &Type) -> Option<Self> {
        match returned {
            Type::Group(group) => Self::of(&group.elem),
            Type::Paren(paren) => Self::of(&paren.elem),
            Type::ImplTrait(bounds) => Self::within(&bounds.bounds, Wrap::Bare),
            Type::Path(path) if path.qself.is_none() => Self::named(&path.path),
            _ => None,
        }
    }

    fn named(path: &Path) -> Option<Self> {
        let last = path.segments.last()?;
        let work = match &*last.ident.to_string() {
            "Pin" => return Self::of(inner(&last.arguments)?)?.pinned(),
            "Box" => {
                return match inner(&last.arguments)? {
                    Type::TraitObject(object) => Self::within(&object.bounds, Wrap::Box),
                    Type::ImplTrait(bounds) => Self::within(&bounds.bounds, Wrap::Box),
                    _ => None,
                };
            }
            "BoxStream" | "LocalBoxStream" => Work::Stream,
            "BoxFuture" | "LocalBoxFuture" => Work::Future,
            _ => return None,
        };
        Some(Self {
            work,
            wrap: Wrap::PinBox,
            outcome: inner(&last.arguments).cloned(),
        })
    }

    fn within(bounds: &Punctuated<TypeParamBound, Token![+]>, wrap: Wrap) -> Option<Self> {
        bounds.iter().find_map(|bound| {
            let TypeParamBound::Trait(bound) = bound else {
                return None;
            };
            let last = bound.path.segments.last()?;
            let work = match &*last.ident.to_string() {
                "Stream" | "TryStream" | "FusedStream" => Work::Stream,
                "Future" | "TryFuture" | "FusedFuture" => Work::Future,
                _ => return None,
            };
            Some(Self {
                work,
                wrap,
                outcome: yielded(&last.arguments),
            })
        })
    }

    fn pinned(self) -> Option<Self> {
        let wrap = match self.wrap {
            Wrap::Box => Wrap::PinBox,
            Wrap::Bare | Wrap::PinBox => return None,
        };
        Some(Self { wrap, ..self })
    }
}

/// The type that a type stands around: the last of its arguments.
fn inner(arguments: &PathArguments) -> Option<&Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else {
        return None;
    };
    arguments
        .args
        .iter()
        .rev()
        .find_map(|argument| match argument {
            GenericArgument::Type(ty) => Some(ty),
            _ => None,
        })
}

/// `T` of `Stream<Item = T>` or `Future<Output = T>`.
fn yielded(arguments: &PathArguments) -> Option<Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else {
        return None;
    };
    arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::AssocType(bound) if bound.ident == "Item" || bound.ident == "Output" => {
            Some(bound.ty.clone())
        }
        _ => None,
    })
}
