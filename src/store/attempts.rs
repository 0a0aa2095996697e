//! Several ways to one end, such as the addresses of a host: the next one is tried when those before it fail, or take
//! long.
//!
//! A packet may be lost, or an address gone: so the next attempt begins soon while nothing has accepted a connection. Once
//! something has, it is at work, and a server that is slow must not get more work for that reason: the next attempt begins
//! much later, for a proxy that accepts a connection and forgets it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::unconstrained;
use tokio::time::Instant;

use crate::roaming::time::sleep_until;

/// How many set-ups of one connection go on at once.
const AT_ONCE: usize = 2;

/// How many attempts to connect there are at once, at most, each with all addresses.
pub(in crate::store) const ATTEMPTS: u32 = 3;

/// The next address of a host is tried when the one before it has not accepted the connection for so long.
const NEXT_ADDRESS: Duration = Duration::from_millis(250);

/// Those who set up one connection share it, and count what has been accepted.
#[derive(Clone)]
pub(in crate::store) struct SetUps {
    permits: Arc<Semaphore>,
    most: usize,
}

/// What begins when a server has accepted a connection, and ends when that is dropped, or ready for calls.
pub(in crate::store) type SetUp = OwnedSemaphorePermit;

impl Default for SetUps {
    fn default() -> Self {
        Self::at_most(AT_ONCE)
    }
}

impl SetUps {
    pub(in crate::store) fn at_most(most: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(most)),
            most,
        }
    }

    /// To be called when a connection was accepted, before anything is sent. Waits while there are too many.
    pub(in crate::store) async fn begin(&self) -> SetUp {
        let permit = self.permits.clone().acquire_owned().await;
        permit.expect("it is never closed")
    }

    fn count(&self) -> usize {
        self.most - self.permits.available_permits()
    }
}

/// When the next attempt begins beside those before it.
pub(in crate::store) struct Pace {
    set_ups: SetUps,
    /// After the one before it has begun, if nothing was accepted.
    early: Duration,
    /// If something was.
    late: Duration,
}

impl Pace {
    /// Always after the same time.
    pub(in crate::store) fn regular(pause: Duration) -> Self {
        Self {
            set_ups: SetUps::default(),
            early: pause,
            late: pause,
        }
    }

    /// Of different servers, any of which may answer.
    pub(in crate::store) fn of_servers(set_ups: &SetUps, early: Duration, late: Duration) -> Self {
        Self {
            set_ups: set_ups.clone(),
            early,
            late: up_to_more(late, late / 4),
        }
    }

    /// Of the addresses of a host, which has that much time.
    pub(in crate::store) fn of_addresses(set_ups: &SetUps, many: usize, within: Duration) -> Self {
        let many = u32::try_from(many).unwrap_or(u32::MAX).saturating_add(1);
        Self {
            set_ups: set_ups.clone(),
            early: NEXT_ADDRESS.min(within / many),
            // Before the next attempt, which would begin with the first address again.
            late: up_to_more(within * 3 / 8, within / 8),
        }
    }

    /// Of whole attempts, which have that much time. An answer may take longer than that.
    pub(in crate::store) fn of_attempts(
        set_ups: &SetUps,
        within: Duration,
        answer: Duration,
    ) -> Self {
        let early = (within / ATTEMPTS).max(answer.min(within / 2));
        Self {
            set_ups: set_ups.clone(),
            // The attempts of a fleet that lost its server at one moment do not come in waves.
            early: up_to_more(early, early / 4),
            late: up_to_more(within * 5 / 8, within / 4),
        }
    }

    /// The pause before the next attempt, as far as is known. `None`: there is none as long as all those go on.
    fn pause(&self) -> Option<Duration> {
        match self.set_ups.count() {
            0 => Some(self.early),
            count if count == self.set_ups.most => None,
            _ => Some(self.late),
        }
    }
}

fn up_to_more(least: Duration, more: Duration) -> Duration {
    least + more.mul_f64(rand::random())
}

/// Why no attempt has succeeded.
#[derive(Debug)]
pub(in crate::store) struct Failed<E> {
    /// Of those that have ended, in the order of their ends.
    pub(in crate::store) errors: Vec<E>,
    /// Whether the time was over before all had ended.
    pub(in crate::store) is_late: bool,
}

/// Begins one attempt after the other, and yields the first success. The next begins when one has failed, or beside those
/// before it when `pace` says so. At `until` all are given up.
pub(in crate::store) async fn first_success<T, E>(
    mut attempts: impl Iterator<Item = BoxFuture<'_, Result<T, E>>>,
    pace: Pace,
    until: Instant,
) -> Result<T, Failed<E>> {
    let mut running: Vec<BoxFuture<'_, Result<T, E>>> = Vec::new();
    let mut errors = Vec::new();
    loop {
        let next = attempts.next();
        if next.is_none() && running.is_empty() {
            let is_late = false;
            return Err(Failed { errors, is_late });
        }
        let (began, may_follow) = (Instant::now(), next.is_some());
        let due = || match pace.pause() {
            Some(pause) if may_follow => (began + pause).min(until),
            _ => until,
        };
        running.extend(next);
        let mut pause = pin!(sleep_until(due()));
        let known = errors.len();
        // All are polled each time: their timers and sockets may have to move to another runtime. And one may have failed,
        // and another succeeded, while the process stood still.
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
            if errors.len() > known {
                return Poll::Ready(None);
            }
            loop {
                // An attempt whose server never stops sending must not keep the time from being looked at.
                ready!(unconstrained(pause.as_mut()).poll_unpin(cx));
                // Something may have been accepted since.
                if due() <= Instant::now() {
                    return Poll::Ready(None);
                }
                pause.as_mut().reset(due());
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

    use futures::FutureExt;
    use tokio::time::sleep;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// What an attempt does: it is connected after so long, and ends so long after its beginning.
    type Plan = (Option<u64>, u64, Result<u32, u32>);

    /// Attempts that are made by this plan. Also notes when each began.
    async fn run(plan: &[Plan], until: u64) -> (Result<u32, Failed<u32>>, Vec<u64>, u64) {
        let set_ups = SetUps::default();
        let pace = Pace {
            set_ups: set_ups.clone(),
            early: ms(100),
            late: ms(1000),
        };
        let (start, begun) = (
            Instant::now(),
            std::sync::Mutex::new(RefCell::new(Vec::new())),
        );
        let since = || u64::try_from(start.elapsed().as_millis()).unwrap();
        let attempts = plan.iter().map(|(connected, takes, result)| {
            begun.lock().unwrap().borrow_mut().push(since());
            let (ends, set_ups) = (Instant::now() + ms(*takes), &set_ups);
            async move {
                let mut set_up = None;
                if let Some(connected) = connected {
                    sleep(ms(*connected)).await;
                    set_up = Some(set_ups.begin().await);
                }
                tokio::time::sleep_until(ends).await;
                drop(set_up);
                *result
            }
            .boxed()
        });
        let end = first_success(attempts, pace, start + ms(until)).await;
        let took = since();
        (end, begun.into_inner().unwrap().into_inner(), took)
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_begins_at_a_failure_or_beside_one_that_takes_long() {
        let (end, begun, took) = run(
            &[(None, 20, Err(1)), (None, 500, Err(2)), (None, 30, Ok(3))],
            1000,
        )
        .await;
        assert_eq!((end.unwrap(), begun, took), (3, vec![0, 20, 120], 150));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_first_one_may_still_be_the_best() {
        let (end, begun, took) = run(&[(None, 150, Ok(1)), (None, 500, Ok(2))], 1000).await;
        assert_eq!((end.unwrap(), begun, took), (1, vec![0, 100], 150));
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_fail_every_reason_is_told() {
        let (end, _, took) = run(&[(None, 150, Err(1)), (None, 10, Err(2))], 1000).await;
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
        let (end, begun, took) = run(
            &[(None, 5000, Ok(1)), (None, 10, Err(2)), (None, 5000, Ok(3))],
            300,
        )
        .await;
        let failed = end.unwrap_err();
        assert_eq!((failed.errors, failed.is_late), (vec![2], true));
        assert_eq!((begun, took), (vec![0, 100, 110], 300));
    }

    /// A server that took long for each log-in got another set-up for every 250 ms, from each process.
    #[tokio::test(start_paused = true)]
    async fn g2_a_server_that_is_slow_gets_no_second_set_up_for_long() {
        let (end, begun, took) = run(&[(Some(5), 900, Ok(1)), (Some(5), 900, Ok(2))], 5000).await;
        assert_eq!((end.unwrap(), begun, took), (1, vec![0], 900));
    }

    /// A proxy may accept a connection and forget it.
    #[tokio::test(start_paused = true)]
    async fn g2_who_accepts_and_is_silent_does_not_keep_the_next_out() {
        let (end, begun, took) = run(&[(Some(5), 9000, Ok(1)), (Some(5), 50, Ok(2))], 5000).await;
        assert_eq!((end.unwrap(), begun, took), (2, vec![0, 1000], 1050));
    }

    #[tokio::test(start_paused = true)]
    async fn g2_an_address_that_does_not_accept_is_not_waited_for() {
        let gone = (Some(9000), 9000, Ok(1));
        let (end, begun, took) = run(&[gone, gone, (Some(5), 300, Ok(3))], 5000).await;
        assert_eq!((end.unwrap(), begun, took), (3, vec![0, 100, 200], 500));
    }

    /// What was lost is sent again, and then all are accepted at once.
    #[tokio::test(start_paused = true)]
    async fn g2_two_set_ups_go_on_at_once() {
        let third = (Some(50), 60, Ok(3));
        let plan = [
            (Some(240), 9000, Ok(1)),
            (Some(145), 9000, Ok(2)),
            third,
            third,
        ];
        let (end, begun, took) = run(&plan, 5000).await;
        assert!(end.unwrap_err().is_late && took == 5000);
        assert_eq!(begun, vec![0, 100, 200]);
    }

    #[test]
    fn g2_a_further_address_comes_before_a_further_attempt_and_both_in_time() {
        let (set_ups, within) = (SetUps::default(), Duration::from_secs(5));
        for answer in [1, 4, 60].map(Duration::from_secs).repeat(100) {
            let addresses = Pace::of_addresses(&set_ups, 2, within);
            let attempts = Pace::of_attempts(&set_ups, within, answer);
            assert_eq!(addresses.early, NEXT_ADDRESS);
            // Waited for so long, two are all that fit.
            let further = if answer < within / ATTEMPTS {
                ATTEMPTS - 1
            } else {
                1
            };
            assert!(attempts.early * further < within * 9 / 10);
            assert!(addresses.late >= within / 3 && addresses.late < attempts.late);
            assert!(attempts.late < within * 9 / 10);
        }
    }

    /// Its server sends without end, and uses up the task's budget at each poll.
    #[tokio::test]
    async fn an_attempt_that_never_rests_is_given_up_in_time() {
        let busy = async {
            loop {
                tokio::task::consume_budget().await;
            }
        };
        let attempts: [BoxFuture<'_, Result<(), ()>>; 1] = [busy.boxed()];
        let pace = Pace::regular(Duration::from_millis(1));
        let until = Instant::now() + Duration::from_millis(20);
        let ending = first_success(attempts.into_iter(), pace, until);
        let ended = tokio::time::timeout(Duration::from_secs(10), ending).await;
        assert!(ended.expect("it ends").unwrap_err().is_late);
    }

    /// One has failed and another succeeded while the process stood still, past the end of the time.
    #[tokio::test(start_paused = true)]
    async fn a_success_beside_a_failure_counts_however_late_it_is_seen() {
        let millis = Duration::from_millis;
        let began = Instant::now();
        let ends = move |ended: Result<(), ()>| async move {
            sleep_until(began + millis(10)).await;
            ended
        };
        let attempts = [ends(Err(())).boxed(), ends(Ok(())).boxed()];
        let pace = Pace::regular(millis(1));
        let running = first_success(attempts.into_iter(), pace, began + millis(15));
        let running = tokio::spawn(running);
        tokio::time::sleep(millis(5)).await;
        tokio::time::advance(millis(20)).await;
        assert!(running.await.unwrap().is_ok());
    }
}
