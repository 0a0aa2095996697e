use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use futures::future::{BoxFuture, FusedFuture};

/// What the futures without work wrap. It is no public type: each of them is one of its own, made by [`operation`].
pub(crate) struct Operation<T> {
    /// `None` once it is done.
    future: Option<BoxFuture<'static, T>>,
}

impl<T> Operation<T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        let future = Some(future.boxed());
        Self { future }
    }
}

impl<T> Future for Operation<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let future = self.future.as_mut();
        let future = future.expect("an operation is not polled after it was done");
        let output = ready!(future.poll_unpin(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T> FusedFuture for Operation<T> {
    fn is_terminated(&self) -> bool {
        self.future.is_none()
    }
}

/// Makes a public future of its own of an [`Operation`]. The struct is written out, with its docs and `must_use`.
macro_rules! operation {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident(Operation<$output:ty>);
    ) => {
        $(#[$attribute])*
        pub struct $name($crate::base::operation::Operation<$output>);

        impl $name {
            pub(crate) fn new(future: impl Future<Output = $output> + Send + 'static) -> Self {
                Self($crate::base::operation::Operation::new(future))
            }
        }

        impl Future for $name {
            type Output = $output;

            fn poll(
                mut self: std::pin::Pin<&mut Self>,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<$output> {
                std::pin::Pin::new(&mut self.0).poll(cx)
            }
        }

        impl futures::future::FusedFuture for $name {
            fn is_terminated(&self) -> bool {
                futures::future::FusedFuture::is_terminated(&self.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let is_done = futures::future::FusedFuture::is_terminated(&self.0);
                f.debug_struct(stringify!($name))
                    .field("is_done", &is_done)
                    .finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use operation;
