//! The steps of a script as data, and the events that they expect.

use std::{
    fmt::{self, Debug, Display},
    panic::Location,
    time::Duration,
};

use futures::future::LocalBoxFuture;

/// One step of a script.
pub(super) struct Step<'a, T, E> {
    pub(super) name: String,
    pub(super) place: &'static Location<'static>,
    pub(super) expected: String,
    pub(super) action: Action<'a, T, E>,
}

/// What a step does.
pub(super) enum Action<'a, T, E> {
    /// Takes an item that the predicate accepts.
    Item(Predicate<'a, T>),
    /// Takes an error that the predicate accepts.
    Error(Predicate<'a, E>),
    /// Takes so many items.
    Items(usize),
    /// Lets time pass in which nothing may come.
    Quiet(Duration),
    /// Lets time pass.
    Await(Duration),
    /// Runs the closure.
    Run(LocalBoxFuture<'a, ()>),
    /// Drops the source.
    Cancel,
    /// Takes the end.
    Complete,
}

pub(super) type Predicate<'a, V> = Box<dyn FnOnce(&V) -> bool + 'a>;

impl<T, E> Action<'_, T, E> {
    /// How much time the step takes by its own account.
    pub(super) fn named_time(&self) -> Duration {
        match self {
            Self::Quiet(span) | Self::Await(span) => *span,
            _ => Duration::ZERO,
        }
    }
}

/// What a source can say.
pub(super) enum Event<T, E> {
    Item(T),
    Error(E),
    End,
}

impl<T, E> From<Option<Result<T, E>>> for Event<T, E> {
    fn from(polled: Option<Result<T, E>>) -> Self {
        match polled {
            Some(Ok(item)) => Self::Item(item),
            Some(Err(error)) => Self::Error(error),
            None => Self::End,
        }
    }
}

impl<T: Debug, E: Debug> Display for Event<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Item(item) => write!(f, "the item {item:?}"),
            Self::Error(error) => write!(f, "the error {error:?}"),
            Self::End => f.write_str("the stream ended"),
        }
    }
}

/// How an event is told in a failure. A pointer, so that `LastStep` asks no `Debug` of its items.
pub(super) type Tell<T, E> = fn(&Event<T, E>) -> String;
