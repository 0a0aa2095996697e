use std::task::Waker;

/// First come first: few, as a rule one.
#[derive(Default)]
pub(super) struct Watchers {
    watching: Vec<Watcher>,
    /// How many have watched so far.
    watched: u64,
}

struct Watcher {
    number: u64,
    /// Whether it is told of a new deadline, too.
    of_deadlines: bool,
    /// `None` once it was woken: it watches again when it is polled.
    waker: Option<Waker>,
}

impl Watchers {
    /// The waker takes the place of the one that was given for this `watch` before, which is given back: it is to
    /// be dropped where no lock is held.
    pub(super) fn add(
        &mut self,
        watch: &mut Option<u64>,
        of_deadlines: bool,
        waker: Waker,
    ) -> Option<Waker> {
        let number = *watch.get_or_insert_with(|| {
            self.watched += 1;
            self.watched
        });
        match self.place_of(number) {
            Ok(at) => self.watching[at].waker.replace(waker),
            Err(at) => {
                let watcher = Watcher {
                    number,
                    of_deadlines,
                    waker: Some(waker),
                };
                self.watching.insert(at, watcher);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, watch: u64) -> Option<Waker> {
        let place = self.place_of(watch).ok()?;
        self.watching.remove(place).waker
    }

    pub(super) fn is_empty(&self) -> bool {
        self.watching.is_empty()
    }

    /// All of them, who watch no more.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Waker> + use<> {
        let watching = std::mem::take(&mut self.watching);
        watching.into_iter().filter_map(|watcher| watcher.waker)
    }

    /// Those who are told of a new deadline, too. They watch on.
    pub(super) fn of_deadlines(&mut self) -> impl Iterator<Item = Waker> {
        let all = self.watching.iter_mut();
        all.filter(|watcher| watcher.of_deadlines)
            .filter_map(|watcher| watcher.waker.take())
    }

    fn place_of(&self, watch: u64) -> Result<usize, usize> {
        self.watching
            .binary_search_by_key(&watch, |watcher| watcher.number)
    }
}
