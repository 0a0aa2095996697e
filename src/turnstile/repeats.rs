//! When an acquisition asks the store. Where no grants come, the policy of the first waiter names the pauses (W5), and a
//! notice that the key was freed shortens one (W7).

use std::mem;

use super::ids::EventCx;
use super::time::Point;
use super::wait_queue::WaiterId;

#[derive(Debug)]
pub(super) struct Repeats {
    /// When the store is asked (again).
    ask_at: Point,
    /// The waiter whose policy was asked for a pause and has not answered yet.
    asked: Option<WaiterId>,
    /// A notice came while the store was being asked.
    is_notified: bool,
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

    pub(super) fn ask_at(&self) -> Point {
        self.ask_at
    }

    pub(super) fn ask(&mut self, at: Point) {
        self.ask_at = at;
    }

    pub(super) fn ask_by(&mut self, latest: Point) {
        self.ask_at = self.ask_at.min(latest);
    }

    /// The connection is up again: asks at once. The policy is asked again, if its answer is needed.
    pub(super) fn restart(&mut self, now: Point) {
        self.asked = None;
        self.ask_at = now;
    }

    /// A notice came while the store was being asked: the answer may be older than the notice.
    pub(super) fn note_notice(&mut self) {
        self.is_notified = true;
    }

    /// Whether such a notice came since the last call.
    pub(super) fn take_notice(&mut self) -> bool {
        mem::take(&mut self.is_notified)
    }

    /// The key is busy. The rest of a pause that a notice has interrupted goes on. If there is none, returns true: the
    /// policy must name a pause, and the store is not asked before it has. `is_patient`: whether the first waiter is. One
    /// that asks once may have come meanwhile, and needs a question of its own.
    pub(super) fn needs_pause(&mut self, now: Point, is_patient: bool) -> bool {
        let pause_end = self.pause_end.take();
        let rest = pause_end.filter(|end| is_patient && *end > now);
        if rest.is_none() {
            self.moved = 0;
        }
        self.ask_at = rest.unwrap_or(Point::FOREVER);
        rest.is_none()
    }

    /// Returns whether the policy of this waiter must be asked, and was not yet.
    pub(super) fn ask_policy_of(&mut self, id: WaiterId) -> bool {
        self.asked.replace(id) != Some(id)
    }

    /// Returns whether an answer of this waiter's policy is awaited. No other answer of it counts.
    pub(super) fn take_answer_of(&mut self, id: WaiterId) -> bool {
        self.asked.take_if(|asked| *asked == id).is_some()
    }

    /// The policy's pause ends then. If a notice has moved the question before that, it stays moved.
    pub(super) fn pause_until(&mut self, end: Point) {
        *self.pause_end.as_mut().unwrap_or(&mut self.ask_at) = end;
    }

    /// A notice came: the store is asked before the pause is over. After the first notice this is at once. After others
    /// it is after a random time, which doubles with each. So registries that split the votes do not stay in step, and
    /// false notices cost little.
    pub(super) fn ask_early(&mut self, cx: &mut EventCx<'_>) {
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
