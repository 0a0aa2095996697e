use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

/// How long a future may go without being woken before it counts as one that never is.
const NEVER: Duration = Duration::from_secs(20);

/// Where a future is dropped: after so many polls, each of which came when it was woken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) polls: usize,
    pub(crate) then: Then,
}

/// When after its last poll.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Then {
    AtOnce,
    After(Duration),
    /// Woken, and not looked at: what woke it was for it, and it will not take it.
    WhenWoken,
}

impl Cut {
    /// Drives a future up to the cut and drops it there; its output if it resolves before.
    pub(crate) async fn drive<F: Future>(self, future: F) -> Option<F::Output> {
        let mut future = Box::pin(future);
        let mut polls = 0;
        let driven = poll_fn(|cx| {
            if polls == self.polls {
                return Poll::Ready(None);
            }
            polls += 1;
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending if polls < self.polls => Poll::Pending,
                Poll::Pending if matches!(self.then, Then::WhenWoken) => Poll::Pending,
                Poll::Pending => Poll::Ready(None),
            }
        });
        let output = tokio::time::timeout(NEVER, driven).await.unwrap_or(None);
        if let Then::After(pause) = self.then
            && output.is_none()
        {
            tokio::time::sleep(pause).await;
        }
        output
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_is_polled_so_often_and_dropped() {
    let begin = tokio::time::Instant::now();
    let naps = || async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        begin.elapsed().as_millis()
    };
    for (polls, then, at) in [
        (0, Then::AtOnce, 0),
        (1, Then::AtOnce, 0),
        (1, Then::WhenWoken, 10),
        (2, Then::AtOnce, 20),
        (3, Then::After(Duration::from_millis(1)), 41),
    ] {
        assert_eq!(Cut { polls, then }.drive(naps()).await, None);
        assert_eq!(begin.elapsed().as_millis(), at);
    }
    let cut = Cut {
        polls: 4,
        then: Then::AtOnce,
    };
    assert_eq!(cut.drive(naps()).await, Some(71));
}
