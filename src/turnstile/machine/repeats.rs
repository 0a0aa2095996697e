//! How often the store is asked where no grants come: by the policy of the first waiter (W5), and earlier after a
//! notice that the key was freed (W7).

use std::mem;
use std::time::Duration;

use super::{Effect, KeyState, Turnstile};
use crate::turnstile::ids::EventCx;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::Refusal;
use crate::turnstile::wait_queue::WaiterId;

#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// The waiter whose policy was asked for a pause and has not answered yet.
    asked: Option<WaiterId>,
    /// A notice came while the store was being asked.
    notified: bool,
    /// When the policy's pause ends, if a notice has moved the next question before that.
    pause_end: Option<Point>,
    /// How many questions were moved since the policy was last asked.
    moved: u32,
}

impl Repeats {
    /// Whether a notice came while the store was being asked: the answer may be older.
    pub(super) fn take_notice(&mut self) -> bool {
        mem::take(&mut self.notified)
    }

    /// The policy is asked again, if its answer is needed.
    pub(super) fn forget_question(&mut self) {
        self.asked = None;
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    /// A store reports that a subscribed key is free. If no grants arrive, ask the store now and not after the pause
    /// (W7). If they do, the key is kept, and our ticket may be the first: ask for how long (M8).
    pub(crate) fn freed(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        if let KeyState::Acquiring(acquisition) = &mut self.state
            && !acquisition.adopts()
        {
            if self.in_flight.as_ref().is_some_and(|it| it.asks.is_some()) {
                acquisition.repeats.notified = true;
            } else if self.store_has_queue {
                acquisition.ask_at = cx.at();
            } else {
                self.ask_early(cx);
            }
        }
        self.schedule(cx);
    }

    /// The policy of a waiter has named its next pause. `None`: it has ended, and so the wait.
    pub(crate) fn on_pause(&mut self, cx: &mut EventCx<'_>, id: WaiterId, pause: Option<Duration>) {
        self.advance_time(cx);
        let now = cx.at();
        if let KeyState::Acquiring(acquisition) = &mut self.state
            && let Some(id) = acquisition.repeats.asked.take_if(|asked| *asked == id)
        {
            if let Some(pause) = pause {
                self.pause_until(now + pause);
            } else {
                if self.waiters.first_id() == Some(id)
                    && let Some((_, waiter)) = self.waiters.pop_first()
                {
                    let holding = self.holding(now);
                    self.refuse(waiter.caller, Refusal::Busy(holding));
                }
                self.ask_policy(now);
            }
        }
        self.schedule(cx);
    }

    /// The key is busy, and no grant will come. If a notice interrupted a pause, wait for the rest of that pause.
    /// Otherwise ask the policy for the next pause.
    pub(super) fn plan_repeat(&mut self, cx: &mut EventCx<'_>) {
        let now = cx.at();
        let KeyState::Acquiring(acquisition) = &mut self.state else {
            return;
        };
        let repeats = &mut acquisition.repeats;
        let notified = mem::take(&mut repeats.notified);
        let pause_end = repeats.pause_end.take().filter(|end| *end > now);
        // A waiter that asks once and came meanwhile needs a question of its own.
        let is_patient = self.waiters.first().is_some_and(|head| head.is_patient());
        if let Some(end) = pause_end.filter(|_| is_patient) {
            acquisition.ask_at = end;
        } else {
            repeats.moved = 0;
            // Not before the policy has answered.
            acquisition.ask_at = Point::FOREVER;
            self.ask_policy(now);
        }
        if notified && !self.store_has_queue {
            self.ask_early(cx);
        }
    }

    /// Asks the policy of the first waiter for a pause.
    fn ask_policy(&mut self, now: Point) {
        let head = self.waiters.first();
        let head = head.filter(|head| head.is_patient() && !self.store_has_queue);
        let (Some(head), Some(id)) = (head, self.waiters.first_id()) else {
            // A waiter that asks once arrived after the attempt was sent. It gets an attempt of its own.
            return self.pause_until(now);
        };
        let caller = head.caller.clone();
        if let KeyState::Acquiring(acquisition) = &mut self.state
            && acquisition.repeats.asked.replace(id) != Some(id)
        {
            self.effect(Effect::AskPolicy(caller, id));
        }
    }

    /// Sets the end of the policy's pause, or of the rest of it after a notice.
    fn pause_until(&mut self, end: Point) {
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            let pause_end = acquisition.repeats.pause_end.as_mut();
            *pause_end.unwrap_or(&mut acquisition.ask_at) = end;
        }
    }

    /// The store is asked before the pause is over. The first notice is followed at once. Later notices trigger a
    /// question after a random pause, which doubles each time. This separates registries that split the votes. It also
    /// limits the effect of false notices.
    fn ask_early(&mut self, cx: &mut EventCx<'_>) {
        let now = cx.at();
        if let KeyState::Acquiring(acquisition) = &mut self.state
            && acquisition.ask_at > now
            && acquisition.repeats.pause_end.is_none()
        {
            let repeats = &mut acquisition.repeats;
            let early = match repeats.moved.min(12) {
                0 => now,
                times => now + cx.ids.jitter(5 << times, 15 << times),
            };
            repeats.moved += 1;
            if early < acquisition.ask_at {
                repeats.pause_end = Some(acquisition.ask_at);
                acquisition.ask_at = early;
            }
        }
    }
}
