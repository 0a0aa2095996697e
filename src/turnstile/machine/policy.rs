//! How often the store is asked where no grants come: by the policy of the first waiter (W5), and earlier after a
//! notice that the key was freed (W7).

use std::mem;
use std::time::Duration;

use super::Turnstile;
use super::acquisition::Acquisition;
use crate::turnstile::event_cx::{Effect, EventCx};
use crate::turnstile::time::Point;
use crate::turnstile::verdict::NotGranted;
use crate::turnstile::wait_queue::WaiterId;

#[derive(Clone, Debug)]
pub(super) struct Repeats {
    /// When the store is asked (again).
    pub(super) ask_at: Point,
    /// The waiter whose policy was asked for a pause and has not answered yet.
    pub(super) asked: Option<WaiterId>,
    /// A notice came while the store was being asked.
    pub(super) is_notified: bool,
    /// When the policy's pause ends, if a notice has moved the next question before that.
    pause_end: Option<Point>,
    /// How many questions were moved since the policy was last asked.
    moved: u32,
}

impl Repeats {
    pub(super) fn new(ask_at: Point) -> Self {
        Self {
            ask_at,
            asked: None,
            is_notified: false,
            pause_end: None,
            moved: 0,
        }
    }

    /// The key is busy. The rest of a pause that a notice has interrupted goes on. If there is none, returns true: the
    /// policy must name a pause, and the store is not asked before it has. `is_patient`: whether the first waiter is. One
    /// that asks once may have come meanwhile, and needs a question of its own.
    fn needs_pause(&mut self, now: Point, is_patient: bool) -> bool {
        let pause_end = self.pause_end.take();
        let rest = pause_end.filter(|end| is_patient && *end > now);
        if rest.is_none() {
            self.moved = 0;
        }
        self.ask_at = rest.unwrap_or(Point::FOREVER);
        rest.is_none()
    }

    /// The policy's pause ends then. If a notice has moved the question before that, it stays moved.
    fn pause_until(&mut self, end: Point) {
        *self.pause_end.as_mut().unwrap_or(&mut self.ask_at) = end;
    }

    /// A notice came: the store is asked before the pause is over. After the first notice this is at once. After others
    /// it is after a random time, which doubles with each. So registries that split the votes do not stay in step, and
    /// false notices cost little.
    fn ask_early<Caller>(&mut self, cx: &mut EventCx<'_, Caller>) {
        let now = cx.at();
        if self.ask_at <= now || self.pause_end.is_some() {
            return;
        }
        let early = match self.moved.min(12) {
            0 => now,
            times => now + cx.ids.jitter(5 << times, 15 << times),
        };
        self.moved += 1;
        if early < self.ask_at {
            self.pause_end = Some(mem::replace(&mut self.ask_at, early));
        }
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    fn repeats(&mut self) -> Option<&mut Repeats> {
        self.state.acquisition_mut().map(Acquisition::repeats)
    }

    /// A store reports that a subscribed key is free. If no grants arrive, ask the store now and not after the pause
    /// (W7). If they do, the key is kept, and our ticket may be the first: ask for how long (M8).
    pub(crate) fn freed(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.advance_time(cx);
        let acquisition = self.state.acquisition_mut();
        if let Some(acquisition) = acquisition.filter(|it| !it.adopts()) {
            let repeats = acquisition.repeats();
            if self.in_flight.as_ref().is_some_and(|it| it.asks.is_some()) {
                repeats.is_notified = true;
            } else if self.store_has_queue {
                repeats.ask_at = cx.at();
            } else {
                repeats.ask_early(cx);
            }
        }
        self.schedule(cx);
    }

    /// The policy of a waiter has named its next pause. `None`: it has ended, and so the wait.
    pub(crate) fn on_pause(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        pause: Option<Duration>,
    ) {
        self.advance_time(cx);
        let now = cx.at();
        if let Some(repeats) = self.repeats()
            && repeats.asked.take_if(|asked| *asked == id).is_some()
        {
            if let Some(pause) = pause {
                repeats.pause_until(now + pause);
            } else {
                if self.waiters.first_id() == Some(id)
                    && let Some((_, waiter)) = self.waiters.pop_first()
                {
                    let holding = self.holding(now);
                    cx.refuse(waiter.caller, NotGranted::Busy(holding));
                }
                self.ask_policy(cx);
            }
        }
        self.schedule(cx);
    }

    /// The key is busy, and no grant will come. If a notice interrupted a pause, wait for the rest of that pause.
    /// Otherwise ask the policy for the next pause.
    pub(super) fn plan_repeat(&mut self, cx: &mut EventCx<'_, Caller>) {
        let is_patient = self.waiters.first().is_some_and(|first| !first.asks_once);
        let Some(repeats) = self.repeats() else {
            return;
        };
        let is_notified = mem::take(&mut repeats.is_notified);
        if repeats.needs_pause(cx.at(), is_patient) {
            self.ask_policy(cx);
        }
        if is_notified
            && !self.store_has_queue
            && let Some(repeats) = self.repeats()
        {
            repeats.ask_early(cx);
        }
    }

    /// Asks the policy of the first waiter for a pause.
    fn ask_policy(&mut self, cx: &mut EventCx<'_, Caller>) {
        let first = self.waiters.first();
        let first = first.filter(|first| !first.asks_once && !self.store_has_queue);
        let caller = first.map(|first| first.caller.clone());
        let id = self.waiters.first_id();
        let Some(repeats) = self.repeats() else {
            return;
        };
        let (Some(caller), Some(id)) = (caller, id) else {
            // A waiter that asks once arrived after the attempt was sent. It gets an attempt of its own.
            return repeats.pause_until(cx.at());
        };
        if repeats.asked.replace(id) != Some(id) {
            cx.emit(Effect::AskPolicy(caller, id));
        }
    }
}
