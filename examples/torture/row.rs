//! The row of the servers' faults, on a thread of its own: some take a fail-over to be undone, and children are struck
//! meanwhile.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::deployments::{Servers, StoredLock};
use crate::log::now;
use crate::plan::{Kind, Stroke};

enum Order {
    Begin(Stroke),
    End(Stroke),
    Look,
}

/// What has come of an order.
pub(crate) enum News {
    /// A fault is over, at this moment.
    Ended(Stroke, u64),
    /// The locks that are in the store, if it can be asked, and how long the answer took.
    Looked(Option<Vec<StoredLock>>, Duration),
}

/// One order after the other is carried out.
pub(crate) struct Row {
    orders: Sender<Order>,
    news: Receiver<News>,
    /// Faults that are not over yet, and whether a look is not.
    faults: usize,
    looks: bool,
    thread: JoinHandle<Box<dyn Servers>>,
}

impl Row {
    pub(crate) fn of(mut servers: Box<dyn Servers>) -> Self {
        let (orders, inbox) = mpsc::channel();
        let (outbox, news) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut is_silent = false;
            for order in inbox {
                let told = match order {
                    Order::Begin(stroke) => {
                        is_silent = is_silencing(stroke.kind);
                        servers.begin(&stroke);
                        continue;
                    }
                    Order::End(stroke) => {
                        servers.end(&stroke);
                        is_silent = false;
                        News::Ended(stroke, now())
                    }
                    Order::Look => {
                        let begin = Instant::now();
                        let locks = (!is_silent).then(|| servers.locks());
                        News::Looked(locks, begin.elapsed())
                    }
                };
                // Whoever does not listen any more is about to join.
                let _ = outbox.send(told);
            }
            servers
        });
        Self {
            orders,
            news,
            faults: 0,
            looks: false,
            thread,
        }
    }

    pub(crate) fn begin(&mut self, stroke: Stroke) {
        self.faults += 1;
        self.order(Order::Begin(stroke));
    }

    pub(crate) fn end(&mut self, stroke: Stroke) {
        self.order(Order::End(stroke));
    }

    /// Unless one is under way.
    pub(crate) fn look(&mut self) {
        if !std::mem::replace(&mut self.looks, true) {
            self.order(Order::Look);
        }
    }

    pub(crate) fn news(&mut self) -> Option<News> {
        assert!(!self.thread.is_finished(), "the harness has given up");
        let news = self.news.try_recv().ok()?;
        match &news {
            News::Ended(..) => self.faults -= 1,
            News::Looked(..) => self.looks = false,
        }
        Some(news)
    }

    /// Whether no fault lasts.
    pub(crate) fn is_calm(&self) -> bool {
        self.faults == 0
    }

    /// When everything is carried out.
    pub(crate) fn join(self) -> Box<dyn Servers> {
        drop(self.orders);
        self.thread.join().expect("the harness has given up")
    }

    fn order(&self, order: Order) {
        // One that has panicked is found out when news are looked for.
        let _ = self.orders.send(order);
    }
}

/// Whether the parent cannot look into a server meanwhile.
fn is_silencing(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::ClientKill
            | Kind::ScriptFlush
            | Kind::FlushAll
            | Kind::BackendsEnd
            | Kind::Truncate
            | Kind::Sweep
    )
}
