//! Several ways to one end, such as the addresses of a host: the next one is tried when those before it fail, or take
//! long.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::roaming::time::sleep_until;

/// Why no attempt has succeeded.
#[derive(Debug)]
pub(in crate::store) struct Failed<E> {
    /// Of those that have ended, in the order of their ends.
    pub(in crate::store) errors: Vec<E>,
    /// Whether the time was over before all had ended.
    pub(in crate::store) is_late: bool,
}

/// Begins one attempt after the other, and yields the first success. The next begins when one has failed, or after
/// `patience` beside those before it. At `until` all are given up.
pub(in crate::store) async fn first_success<T, E>(
    mut attempts: impl Iterator<Item = BoxFuture<'_, Result<T, E>>>,
    patience: Duration,
    until: Instant,
) -> Result<T, Failed<E>> {
    let mut running: Vec<BoxFuture<'_, Result<T, E>>> = Vec::new();
    let mut errors = Vec::new();
    loop {
        let next = attempts.next();
        if next.is_none() && running.is_empty() {
            return Err(Failed {
                errors,
                is_late: false,
            });
        }
        let pause = match next {
            Some(_) => (Instant::now() + patience).min(until),
            None => until,
        };
        running.extend(next);
        let mut pause = pin!(sleep_until(pause));
        let known = errors.len();
        // All are polled each time: their timers and sockets may have to move to another runtime.
        let success = poll_fn(|cx| {
            let mut at = 0;
            while at < running.len() {
                match running[at].poll_unpin(cx) {
                    Poll::Ready(Ok(success)) => return Poll::Ready(Some(success)),
                    Poll::Ready(Err(error)) => {
                        errors.push(error);
                        drop(running.remove(at));
                    }
                    Poll::Pending => at += 1,
                }
            }
            match errors.len() > known {
                true => Poll::Ready(None),
                false => pause.as_mut().poll(cx).map(|()| None),
            }
        });
        if let Some(success) = success.await {
            return Ok(success);
        }
        if Instant::now() >= until {
            let is_late = !running.is_empty();
            return Err(Failed { errors, is_late });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::sleep;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Attempts that take so long, and succeed or fail. Also notes when each began.
    async fn run(
        plan: &[(u64, Result<u32, u32>)],
        until: u64,
    ) -> (Result<u32, Failed<u32>>, Vec<u64>, u64) {
        let (start, begun) = (
            Instant::now(),
            std::sync::Mutex::new(RefCell::new(Vec::new())),
        );
        let since = || u64::try_from(start.elapsed().as_millis()).unwrap();
        let attempts = plan.iter().map(|(takes, result)| {
            begun.lock().unwrap().borrow_mut().push(since());
            let (takes, result) = (*takes, *result);
            async move {
                sleep(ms(takes)).await;
                result
            }
            .boxed()
        });
        let end = first_success(attempts, ms(100), start + ms(until)).await;
        let took = since();
        (end, begun.into_inner().unwrap().into_inner(), took)
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_begins_at_a_failure_or_beside_one_that_takes_long() {
        let (end, begun, took) = run(&[(20, Err(1)), (500, Err(2)), (30, Ok(3))], 1000).await;
        assert_eq!((end.unwrap(), begun, took), (3, vec![0, 20, 120], 150));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_first_one_may_still_be_the_best() {
        let (end, begun, took) = run(&[(150, Ok(1)), (500, Ok(2))], 1000).await;
        assert_eq!((end.unwrap(), begun, took), (1, vec![0, 100], 150));
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_fail_every_reason_is_told() {
        let (end, _, took) = run(&[(150, Err(1)), (10, Err(2))], 1000).await;
        let failed = end.unwrap_err();
        assert_eq!(
            (failed.errors, failed.is_late, took),
            (vec![2, 1], false, 150)
        );
        let (end, _, took) = run(&[], 1000).await;
        assert!(end.unwrap_err().errors.is_empty() && took == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_is_for_all_of_them() {
        let (end, begun, took) = run(&[(5000, Ok(1)), (10, Err(2)), (5000, Ok(3))], 300).await;
        let failed = end.unwrap_err();
        assert_eq!((failed.errors, failed.is_late), (vec![2], true));
        assert_eq!((begun, took), (vec![0, 100, 110], 300));
    }
}
