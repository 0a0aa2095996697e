use std::time::Duration;

use super::clock::{MILLI, SECOND, True};
use super::rng::Rng;
use crate::base::{Mode, OnFinish};
use crate::store::send_window::Limits;

/// What a run is about. Most seeds mix; some keep to one kind of trouble, so that the bounds that
/// hold without the others can be checked there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    /// Nothing fails, and everything is quick: hand-overs have to be quick as well.
    Calm,
    /// Replies and pushes take seconds, and overtake each other.
    Slow,
    /// Connections break.
    Cuts,
    /// Processes crash, or stop for a while.
    Stops,
    /// Some registries get no pushes; the server refuses ops.
    Unhelped,
    /// All of these.
    Everything,
    /// And what is outside the promise: lost data, deleted locks, stepped clocks.
    Outside,
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Cut,
    Crash,
    Pause,
    Close,
    Restart {
        wipe: bool,
    },
    /// All is deleted, and no connection breaks.
    Flush,
    ScriptFlush,
    FenceLost,
    Step,
    Delete,
    Stranger,
}

#[derive(Clone, Debug)]
pub(super) struct Profile {
    pub(super) theme: Theme,
    pub(super) registries: usize,
    pub(super) keys: usize,
    pub(super) callers: usize,
    /// When the last caller has come and the last thing has gone wrong.
    pub(super) calm_at: True,
    pub(super) latency: (u64, u64),
    /// How often, per mille, a message takes up to `spike`.
    pub(super) spikes: u64,
    pub(super) spike: u64,
    /// How much longer replies take than pushes: they pass through one more task (O3).
    pub(super) reply_lag: u64,
    /// How late timers fire.
    pub(super) lateness: u64,
    pub(super) response_timeout: u64,
    pub(super) ttls: Vec<u64>,
    pub(super) holds: Vec<u64>,
    /// Ops that come together go together.
    pub(super) batches: bool,
    /// How many ops share a call, and how many calls are under way.
    pub(super) limits: Limits,
    /// Whether a reconnect can kill what the old connection still has on its way (O4).
    pub(super) kills: bool,
    /// Whether ops without a connection wait for one, or come back.
    pub(super) ops_wait: bool,
    /// How often, per mille: an op is refused, a connection has no pushes, a connection attempt
    /// fails, a granted waiter does not look, one in the queue is dropped.
    pub(super) refusals: u64,
    /// How often, per mille, what was won or granted does not count.
    pub(super) unconfirmed: u64,
    pub(super) pushless: u64,
    pub(super) failed_connects: u64,
    pub(super) sleepers: u64,
    pub(super) droppers: u64,
    /// How often, per mille, the session loses an op that the server has answered.
    pub(super) losses: u64,
    /// How often, per mille, a renewal falls behind what is sent after it: renewals have a queue of
    /// their own (O2).
    pub(super) stragglers: u64,
    /// How often, per mille: a caller's key stays in the store at the end, a held lease is
    /// extended, or detached.
    pub(super) keepers: u64,
    /// How.
    pub(super) at_ends: Vec<OnFinish>,
    pub(super) extensions: u64,
    /// How often, per mille, a holder sees its token.
    pub(super) seals: u64,
    pub(super) detached: u64,
    /// How often, per mille, a caller that is done comes again.
    pub(super) returns: u64,
    /// And how soon at most.
    pub(super) rests: Vec<u64>,
    pub(super) faults: Vec<(True, Fault)>,
    pub(super) local_passes: u32,
    pub(super) local_span: u64,
    pub(super) max_waiters: usize,
    /// How many tickets the server serves in one op (M4).
    pub(super) most_served: usize,
    /// What the callers of all keys ask for.
    pub(super) modes: Vec<Mode>,
}

const THEMES: [Theme; 7] = [
    Theme::Calm,
    Theme::Slow,
    Theme::Cuts,
    Theme::Stops,
    Theme::Unhelped,
    Theme::Everything,
    Theme::Outside,
];

impl Profile {
    pub(super) fn of(seed: u64, rng: &mut Rng) -> Self {
        let theme = THEMES[(seed % THEMES.len() as u64) as usize];
        let calm = theme == Theme::Calm;
        let all = matches!(theme, Theme::Everything | Theme::Outside);
        let calm_at = rng.pick(&[SECOND, 4 * SECOND, 12 * SECOND]);
        let ttl_base = rng.pick(&[10 * MILLI, 60 * MILLI, 300 * MILLI, SECOND, 4 * SECOND]);
        let mut ttls = vec![ttl_base, ttl_base, ttl_base * 3];
        if rng.chance(300) {
            ttls.push(30 * SECOND);
        }
        let slow = theme == Theme::Slow || (all && rng.chance(500));
        let latency = if slow {
            rng.pick(&[(MILLI, 20 * MILLI), (MILLI, ttl_base), (100, ttl_base * 2)])
        } else {
            rng.pick(&[(50, 300), (100, 2 * MILLI)])
        };
        let mut profile = Self {
            theme,
            registries: rng.between(1, 5) as usize,
            keys: rng.pick(&[1, 1, 1, 2, 3, 8]),
            callers: rng.between(4, 60) as usize,
            calm_at,
            latency,
            spikes: if slow { 60 } else { 0 },
            spike: rng.pick(&[ttl_base, ttl_base * 3, 2 * SECOND]),
            reply_lag: if calm {
                200
            } else {
                rng.pick(&[0, MILLI, 50 * MILLI, ttl_base])
            },
            lateness: rng.pick(&[0, MILLI, 5 * MILLI]),
            response_timeout: rng.pick(&[200 * MILLI, SECOND, 3 * SECOND]),
            ttls,
            holds: vec![100, MILLI, 5 * MILLI, ttl_base / 2, ttl_base * 2],
            batches: rng.chance(500),
            limits: rng.pick(&[
                Limits::USUAL,
                Limits {
                    requests: 64,
                    calls: 1,
                    bytes: usize::MAX,
                },
                Limits {
                    requests: 2,
                    calls: 2,
                    bytes: usize::MAX,
                },
                Limits {
                    requests: 1,
                    calls: usize::MAX,
                    bytes: usize::MAX,
                },
            ]),
            kills: rng.chance(700),
            ops_wait: rng.chance(500),
            refusals: 0,
            unconfirmed: 0,
            pushless: 0,
            failed_connects: 0,
            sleepers: rng.pick(&[0, 0, 50, 300]),
            droppers: rng.pick(&[0, 100, 400]),
            losses: 0,
            stragglers: rng.pick(&[0, 300]),
            keepers: rng.pick(&[0, 0, 50, 300]),
            at_ends: vec![
                OnFinish::LetExpire,
                OnFinish::KeepFor(Duration::from_micros(ttl_base / 2)),
                OnFinish::KeepFor(Duration::from_micros(ttl_base * 2)),
                OnFinish::KeepFor(Duration::from_micros(ttl_base * 5)),
            ],
            extensions: rng.pick(&[0, 100]),
            seals: rng.pick(&[0, 0, 60]),
            detached: rng.pick(&[0, 20, 200]),
            rests: vec![0, 50, 3 * MILLI, 40 * MILLI],
            returns: rng.pick(&[0, 500, 900, 990]),
            faults: Vec::new(),
            local_passes: rng.pick(&[0, 1, 16, 63]),
            local_span: rng.pick(&[0, 20 * MILLI, SECOND]),
            max_waiters: rng.pick(&[3, 1000, 1000]),
            most_served: rng.pick(&[1, 3, 64]),
            modes: Self::some_modes(rng),
        };
        if profile.response_timeout < 4 * profile.latency.1 && rng.chance(700) {
            // Mostly the time-out fits the net.
            profile.response_timeout = 8 * (profile.latency.1 + profile.reply_lag);
        }
        profile.choose_faults(rng);
        profile
    }

    pub(super) fn has_shared(&self) -> bool {
        self.modes.iter().any(|mode| *mode != Mode::Exclusive)
    }

    /// Half of the runs are about exclusive leases alone.
    fn some_modes(rng: &mut Rng) -> Vec<Mode> {
        let (exclusive, shared) = (Mode::Exclusive, Mode::Shared);
        let permits = |limit, weight| Mode::Permits { limit, weight };
        match rng.below(10) {
            0 | 1 => vec![exclusive, shared],
            2 => vec![exclusive, shared, shared, shared, shared],
            // A rolling change of the limit, in either direction.
            3 => vec![permits(3, 1), permits(3, 1), permits(2, 1), permits(6, 1)],
            4 => vec![permits(4, 1), permits(4, 2), permits(4, 4), permits(2, 2)],
            5 => {
                let weighty = [permits(2, 1), permits(5, 3), permits(100, 1)];
                [[exclusive, shared, shared].as_slice(), &weighty].concat()
            }
            _ => vec![exclusive],
        }
    }

    fn choose_faults(&mut self, rng: &mut Rng) {
        let theme = self.theme;
        let all = matches!(theme, Theme::Everything | Theme::Outside);
        if theme == Theme::Cuts || all {
            self.failed_connects = rng.pick(&[0, 300]);
            self.plan(rng, Fault::Cut, 8);
            self.plan(rng, Fault::Restart { wipe: false }, 2);
            self.plan(rng, Fault::ScriptFlush, 3);
        }
        if theme == Theme::Stops || all {
            self.plan(rng, Fault::Crash, 2);
            self.plan(rng, Fault::Pause, 6);
            self.plan(rng, Fault::Close, 1);
        }
        if theme == Theme::Unhelped || all {
            self.refusals = rng.pick(&[0, 50, 200]);
            self.losses = rng.pick(&[0, 0, 10, 100]);
            self.unconfirmed = rng.pick(&[0, 0, 100, 500]);
            self.pushless = rng.pick(&[0, 300, 1000]);
            self.plan(rng, Fault::ScriptFlush, 2);
            self.plan(rng, Fault::Stranger, 3);
            self.plan(rng, Fault::FenceLost, 2);
        }
        if theme == Theme::Unhelped {
            self.plan(rng, Fault::Cut, 2);
        }
        if theme == Theme::Outside {
            self.plan(rng, Fault::Restart { wipe: true }, 2);
            self.plan(rng, Fault::Flush, 2);
            self.plan(rng, Fault::Step, 3);
            self.plan(rng, Fault::Delete, 3);
        }
    }

    fn plan(&mut self, rng: &mut Rng, fault: Fault, most: u64) {
        for _ in 0..rng.between(0, most) {
            self.faults.push((rng.below(self.calm_at), fault));
        }
    }

    /// Whether two leases at once would be a fault of ours.
    pub(super) fn promised(&self) -> bool {
        self.theme != Theme::Outside
    }

    /// How long the shortest lease lasts by the clock of its holder (D1).
    pub(super) fn shortest_lease(&self) -> u64 {
        let shortest = self.ttls.iter().copied().min().unwrap_or(0);
        (shortest - shortest / 100).saturating_sub(2 * MILLI)
    }

    pub(super) fn longest_ttl(&self) -> u64 {
        let kept = self.at_ends.iter().filter_map(|it| match it {
            OnFinish::KeepFor(time) => Some(time.as_micros() as u64),
            OnFinish::Release | OnFinish::LetExpire => None,
        });
        let kept = kept.filter(|_| self.keepers > 0);
        self.ttls.iter().copied().chain(kept).max().unwrap_or(0)
    }
}
