//! The subscriptions of one connection: what was asked for, and what came of it.
//!
//! Confirmations come in the order in which they were asked for, and the server says by name what it takes away. So
//! whatever was asked last of a channel is what holds when all of it is answered, and what is said before that tells
//! nothing: who left and wants to listen again need not wait for the one before it asks for the other.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct Channels {
    all: HashMap<String, Channel>,
}

/// A channel that the server has us subscribed to, or was asked about.
#[derive(Debug)]
struct Channel {
    key: Arc<str>,
    /// What is not answered, in order.
    asked: VecDeque<Wish>,
    is_heard: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Listen,
    Leave,
}

/// What follows from a word of the server's.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The key's grants are heard from now on.
    Heard(Arc<str>),
    /// They are not, as was asked last, or since what was asked was refused.
    Unheard(Arc<str>),
    /// They were heard, and nobody had asked for anything else.
    Taken(Arc<str>),
    /// Nothing, as something was asked since.
    Passed,
}

impl Channel {
    /// As it will be when all is answered.
    fn is_wanted(&self) -> bool {
        let last = self.asked.back();
        last.map_or(self.is_heard, |wish| *wish == Wish::Listen)
    }
}

impl Channels {
    pub(super) fn ask_to_listen(&mut self, channel: &str, key: &Arc<str>) {
        let channel = self.all.entry(channel.to_owned());
        let channel = channel.or_insert_with(|| Channel {
            key: key.clone(),
            asked: VecDeque::new(),
            is_heard: false,
        });
        channel.asked.push_back(Wish::Listen);
    }

    /// True: the server is to be asked, since we listen, or shall.
    pub(super) fn ask_to_leave(&mut self, channel: &str) -> bool {
        let channel = self.all.get_mut(channel);
        let Some(channel) = channel.filter(|channel| channel.is_wanted()) else {
            return false;
        };
        channel.asked.push_back(Wish::Leave);
        true
    }

    /// Whose grants come by it.
    pub(super) fn key(&self, channel: &str) -> Option<&Arc<str>> {
        self.all.get(channel).map(|channel| &channel.key)
    }

    /// The server said that we listen now, or that we do not. `None`: it cannot be.
    pub(super) fn told(&mut self, name: &str, said: Wish) -> Option<Told> {
        let channel = self.all.get_mut(name)?;
        let Some(wish) = channel.asked.pop_front() else {
            let key = channel.key.clone();
            let is_taken = said == Wish::Leave && channel.is_heard;
            return is_taken.then(|| {
                self.all.remove(name);
                Told::Taken(key)
            });
        };
        if wish != said {
            return None;
        }
        channel.is_heard = said == Wish::Listen;
        Some(self.sum_up(name))
    }

    /// The server refused what was asked; what it has confirmed since may have been told before this. `None`: it
    /// cannot be.
    pub(super) fn refused(&mut self, name: &str) -> Option<Told> {
        let channel = self.all.get_mut(name)?;
        let wish = channel.asked.pop_front()?;
        // Whoever has lost the slot lets nobody leave either; by then it has said that nobody listens.
        let can_be = wish == Wish::Listen || !channel.is_heard;
        can_be.then(|| self.sum_up(name))
    }

    fn sum_up(&mut self, name: &str) -> Told {
        let channel = &self.all[name];
        let key = channel.key.clone();
        if !channel.asked.is_empty() {
            return Told::Passed;
        }
        if channel.is_heard {
            return Told::Heard(key);
        }
        self.all.remove(name);
        Told::Unheard(key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const NAME: &str = "{lock:k}:~grant:1";

    fn heard() -> Option<Told> {
        Some(Told::Heard("k".into()))
    }

    fn unheard() -> Option<Told> {
        Some(Told::Unheard("k".into()))
    }

    fn asked(wishes: &[Wish]) -> Channels {
        let mut channels = Channels::default();
        for wish in wishes {
            match wish {
                Wish::Listen => channels.ask_to_listen(NAME, &"k".into()),
                Wish::Leave => assert!(channels.ask_to_leave(NAME)),
            }
        }
        channels
    }

    #[test]
    fn what_was_asked_last_is_what_holds() {
        use Wish::{Leave, Listen};
        let cases: [(&[Wish], Told); 5] = [
            (&[Listen], Told::Heard("k".into())),
            (&[Listen, Listen], Told::Heard("k".into())),
            (&[Listen, Leave], Told::Unheard("k".into())),
            (&[Listen, Leave, Listen], Told::Heard("k".into())),
            (&[Listen, Leave, Listen, Leave], Told::Unheard("k".into())),
        ];
        for (wishes, last) in cases {
            let mut channels = asked(wishes);
            let told: Vec<_> = wishes
                .iter()
                .map(|wish| channels.told(NAME, *wish))
                .collect();
            let (end, begin) = told.split_last().unwrap();
            assert!(
                begin.iter().all(|told| *told == Some(Told::Passed)),
                "{wishes:?}: {begin:?}"
            );
            assert_eq!(end.as_ref(), Some(&last), "{wishes:?}");
            assert_eq!(channels.key(NAME).is_some(), *end == heard());
        }
    }

    #[test]
    fn one_that_is_refused_is_not_heard_but_by_what_was_confirmed_beside() {
        let mut channels = asked(&[Wish::Listen]);
        assert_eq!(channels.refused(NAME), unheard());
        assert_eq!(channels.refused(NAME), None, "nothing was asked");
        // Whichever of the two it was that was confirmed.
        let mut channels = asked(&[Wish::Listen; 2]);
        assert_eq!(channels.told(NAME, Wish::Listen), Some(Told::Passed));
        assert_eq!(channels.refused(NAME), heard());
        let mut channels = asked(&[Wish::Listen; 2]);
        assert_eq!(channels.refused(NAME), Some(Told::Passed));
        assert_eq!(channels.told(NAME, Wish::Listen), heard());
        // The slot has gone, and so has the subscription.
        let mut channels = asked(&[Wish::Listen, Wish::Leave]);
        assert_eq!(channels.refused(NAME), Some(Told::Passed));
        assert_eq!(channels.refused(NAME), unheard());
        let mut channels = asked(&[Wish::Listen, Wish::Leave]);
        channels.told(NAME, Wish::Listen);
        assert_eq!(channels.refused(NAME), None, "it was not said to have gone");
    }

    #[test]
    fn what_nobody_asked_for_is_told_or_cannot_be() {
        let mut channels = asked(&[Wish::Listen]);
        assert_eq!(channels.told(NAME, Wish::Leave), None);
        let mut channels = asked(&[Wish::Listen]);
        channels.told(NAME, Wish::Listen);
        assert_eq!(channels.told(NAME, Wish::Listen), None, "twice");
        assert_eq!(
            channels.told(NAME, Wish::Leave),
            Some(Told::Taken("k".into()))
        );
        assert_eq!(channels.told(NAME, Wish::Leave), None);
        assert!(!channels.ask_to_leave(NAME), "there is nothing to leave");
        assert!(asked(&[Wish::Listen]).ask_to_leave(NAME));
        assert!(!asked(&[Wish::Listen, Wish::Leave]).ask_to_leave(NAME));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Listen,
        Leave,
        /// The server does what it was asked first.
        Serve,
        /// All that it has said so far arrives at once.
        Read,
        /// Its slot goes.
        Lose,
        Gain,
    }

    /// A server and a connection to it, as the client library has it: whatever says that somebody listens or does not is
    /// taken for the answer to the oldest question.
    #[derive(Default)]
    struct World {
        has_slot: bool,
        has_us: bool,
        unserved: VecDeque<Wish>,
        /// `Err`: a refusal.
        unread: Vec<Result<Wish, ()>>,
        unanswered: VecDeque<Wish>,
        channels: Channels,
        believes: bool,
        is_broken: bool,
    }

    impl World {
        fn step(&mut self, step: Step) {
            match step {
                Step::Listen => {
                    self.channels.ask_to_listen(NAME, &"k".into());
                    self.ask(Wish::Listen);
                }
                Step::Leave if self.channels.ask_to_leave(NAME) => self.ask(Wish::Leave),
                Step::Leave => {}
                Step::Serve => {
                    if let Some(wish) = self.unserved.pop_front() {
                        self.unread.push(self.has_slot.then_some(wish).ok_or(()));
                        if self.has_slot {
                            self.has_us = wish == Wish::Listen;
                        }
                    }
                }
                Step::Read => self.is_broken |= self.read().is_none(),
                Step::Lose => {
                    self.has_slot = false;
                    if std::mem::take(&mut self.has_us) {
                        self.unread.push(Ok(Wish::Leave));
                    }
                }
                Step::Gain => self.has_slot = true,
            }
        }

        fn ask(&mut self, wish: Wish) {
            self.unserved.push_back(wish);
            self.unanswered.push_back(wish);
            self.believes = false;
        }

        /// As `Wires::hear` does.
        fn read(&mut self) -> Option<()> {
            let unread = std::mem::take(&mut self.unread);
            for said in unread.iter().flatten() {
                let told = self.channels.told(NAME, *said)?;
                self.learn(&told);
            }
            for said in unread {
                match (self.unanswered.pop_front(), said) {
                    (Some(wish), Ok(said)) if wish != said => return None,
                    (Some(_), Err(())) => {
                        let told = self.channels.refused(NAME)?;
                        self.learn(&told);
                    }
                    _ => {}
                }
            }
            Some(())
        }

        fn learn(&mut self, told: &Told) {
            match told {
                Told::Heard(_) => self.believes = true,
                Told::Unheard(_) | Told::Taken(_) => self.believes = false,
                Told::Passed => {}
            }
        }
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => Just(Step::Listen),
            3 => Just(Step::Leave),
            5 => Just(Step::Serve),
            4 => Just(Step::Read),
            1 => Just(Step::Lose),
            1 => Just(Step::Gain),
        ];
        vec(step, 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

        /// Nobody believes to hear who does not, but for what is on its way to tell so; and in the end we are listed
        /// where we want to be, and nowhere else.
        #[test]
        fn whatever_crosses_we_know_what_we_hear(steps in steps()) {
            let mut world = World { has_slot: true, ..World::default() };
            let is_calm = !steps.iter().any(|step| matches!(step, Step::Lose));
            let drain = steps.iter().flat_map(|_| [Step::Serve, Step::Read]);
            for step in steps.iter().copied().chain(drain) {
                world.step(step);
                if world.is_broken {
                    // The connection is made anew, and so is all of this.
                    prop_assert!(!is_calm, "without a cause");
                    return Ok(());
                }
                prop_assert!(!world.believes || world.has_us || !world.unread.is_empty());
            }
            prop_assert_eq!(world.believes, world.has_us);
            let is_known = world.channels.key(NAME).is_some();
            prop_assert_eq!(is_known, world.has_us);
        }
    }
}
