//! What a script can be run on: every stream, and every future.

use futures::stream::{self, LocalBoxStream, Stream, StreamExt};

/// What a [`StepVerifier`](super::StepVerifier) runs on: every [`Stream`] of `T`, and every
/// [`Future`] whose output is `T`.
///
/// A future is a source of one item and then the end. `M` says which of the two it is; it is always
/// inferred, and keeps the two implementations apart. The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a `Stream` nor a `Future` of `{T}`",
    label = "not a source of `{T}`",
    note = "`create` takes any item; `try_create` and `with_virtual_time` take items of type `Result<T, E>`"
)]
pub trait Source<'a, T, M>: sealed::Sealed<M, Event = T> + 'a {}

impl<'a, S: Stream + 'a> Source<'a, S::Item, sealed::AsStream> for S {}
impl<'a, F: Future + 'a> Source<'a, F::Output, sealed::AsFuture> for F {}

pub(super) mod sealed {
    use super::{LocalBoxStream, Stream, StreamExt, stream};

    #[derive(Debug)]
    pub enum AsStream {}

    #[derive(Debug)]
    pub enum AsFuture {}

    pub trait Sealed<M> {
        type Event;

        /// The events of the source, each as `read` sees it.
        fn into_events<'a, R>(
            self,
            read: impl FnMut(Self::Event) -> R + 'a,
        ) -> LocalBoxStream<'a, R>
        where
            Self: 'a;
    }

    impl<S: Stream> Sealed<AsStream> for S {
        type Event = S::Item;

        fn into_events<'a, R>(self, read: impl FnMut(S::Item) -> R + 'a) -> LocalBoxStream<'a, R>
        where
            Self: 'a,
        {
            self.map(read).boxed_local()
        }
    }

    impl<F: Future> Sealed<AsFuture> for F {
        type Event = F::Output;

        fn into_events<'a, R>(self, read: impl FnMut(F::Output) -> R + 'a) -> LocalBoxStream<'a, R>
        where
            Self: 'a,
        {
            stream::once(self).map(read).boxed_local()
        }
    }
}
