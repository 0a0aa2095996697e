//! How often the store is asked where no grants come: by the policy of the first waiter (W5), and earlier after a
//! notice that the key was freed (W7).

use std::time::Duration;

use super::{Effect, Turnstile};
use crate::turnstile::acquisition::Acquisition;
use crate::turnstile::ids::EventCx;
use crate::turnstile::repeats::Repeats;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::Refusal;
use crate::turnstile::wait_queue::WaiterId;

impl<Caller: Clone> Turnstile<Caller> {
    fn repeats(&mut self) -> Option<&mut Repeats> {
        self.state.acquisition_mut().map(Acquisition::repeats)
    }

    /// A store reports that a subscribed key is free. If no grants arrive, ask the store now and not after the pause
    /// (W7). If they do, the key is kept, and our ticket may be the first: ask for how long (M8).
    pub(crate) fn freed(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        let acquisition = self.state.acquisition_mut();
        if let Some(acquisition) = acquisition.filter(|it| !it.adopts()) {
            let repeats = acquisition.repeats();
            if self.in_flight.as_ref().is_some_and(|it| it.asks.is_some()) {
                repeats.note_notice();
            } else if self.store_has_queue {
                repeats.ask(cx.at());
            } else {
                repeats.ask_early(cx);
            }
        }
        self.schedule(cx);
    }

    /// The policy of a waiter has named its next pause. `None`: it has ended, and so the wait.
    pub(crate) fn on_pause(&mut self, cx: &mut EventCx<'_>, id: WaiterId, pause: Option<Duration>) {
        self.advance_time(cx);
        let now = cx.at();
        if let Some(repeats) = self.repeats()
            && repeats.take_answer_of(id)
        {
            if let Some(pause) = pause {
                repeats.pause_until(now + pause);
            } else {
                if self.waiters.first_id() == Some(id)
                    && let Some((_, request)) = self.waiters.pop_first()
                {
                    let holding = self.holding(now);
                    self.refuse(request.caller, Refusal::Busy(holding));
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
        let is_patient = self.waiters.first().is_some_and(|first| first.is_patient());
        let Some(repeats) = self.repeats() else {
            return;
        };
        let is_notified = repeats.take_notice();
        if repeats.needs_pause(now, is_patient) {
            self.ask_policy(now);
        }
        if is_notified
            && !self.store_has_queue
            && let Some(repeats) = self.repeats()
        {
            repeats.ask_early(cx);
        }
    }

    /// Asks the policy of the first waiter for a pause.
    fn ask_policy(&mut self, now: Point) {
        let first = self.waiters.first();
        let first = first.filter(|first| first.is_patient() && !self.store_has_queue);
        let caller = first.map(|first| first.caller.clone());
        let id = self.waiters.first_id();
        let Some(repeats) = self.repeats() else {
            return;
        };
        let (Some(caller), Some(id)) = (caller, id) else {
            // A waiter that asks once arrived after the attempt was sent. It gets an attempt of its own.
            return repeats.pause_until(now);
        };
        if repeats.ask_policy_of(id) {
            self.effect(Effect::AskPolicy(caller, id));
        }
    }
}
