//! Which requests go out next, which of them share a call, and how many calls are in flight.
//!
//! Pure, so that the simulator can run this code.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};

use foldhash::fast::FixedState;

/// Requests of one priority may share a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Priority {
    Renew,
    Change,
    Inspect,
}

impl Priority {
    /// The most urgent first: leases must survive whatever else is requested (G4).
    pub(crate) const ALL: [Self; 3] = [Self::Renew, Self::Change, Self::Inspect];
}

/// A request about one key.
pub(crate) trait Sendable {
    /// Changes of one line go one at a time: those of a key's exclusive owners, and those of each shared owner. The number
    /// is a hash that nobody can predict. Two lines with the same one only wait for each other.
    fn line(&self) -> u64;

    fn priority(&self) -> Priority;

    /// Only requests of one group share a call: those of one slot of a cluster.
    fn group(&self) -> u16;

    /// How many requests its call may have at most: 1 if it needs a call of its own.
    fn most(&self) -> usize;

    /// About how many bytes it adds to a call.
    fn size(&self) -> usize;
}

/// How much is sent before an answer has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Requests in a call. A longer script would block all other clients.
    pub(crate) requests: usize,
    /// Calls in flight.
    pub(crate) calls: usize,
    /// Bytes in flight.
    pub(crate) bytes: usize,
}

impl Limits {
    pub(crate) const USUAL: Self = Self {
        requests: 64,
        calls: 256,
        bytes: 1 << 20,
    };
}

/// The requests of one call.
#[derive(Debug)]
struct Call<R> {
    requests: Vec<R>,
    bytes: usize,
    /// The group, if these are renewals.
    renews: Option<u16>,
}

/// Keeps the order: the changes of one line go one at a time, in the order in which they came, even if one has to be
/// sent again (O2). Renewals and inspections do not wait.
#[derive(Debug)]
pub(crate) struct SendWindow<R: Sendable> {
    limits: Limits,
    /// What may be sent, by priority and group. None of them is empty.
    waiting: BTreeMap<(Priority, u16), VecDeque<R>>,
    /// The groups of each priority with waiting requests: they take turns.
    turns: [VecDeque<u16>; Priority::ALL.len()],
    /// The lines with a change that is waiting or in flight, and the changes that wait behind it.
    changing: HashMap<u64, VecDeque<R>, FixedState>,
    /// The oldest first: answers come in the order of the calls.
    in_flight: VecDeque<Call<R>>,
    /// Whether the last call renewed: then one of something else goes first, or renewals that never end would leave room
    /// for nothing else.
    has_renewed: bool,
    /// Whether the last other call changed something: then an inspection goes first, for the same reason.
    has_changed: bool,
}

impl<R: Sendable> SendWindow<R> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: BTreeMap::new(),
            turns: Default::default(),
            changing: HashMap::default(),
            in_flight: VecDeque::new(),
            has_renewed: false,
            has_changed: false,
        }
    }

    pub(crate) fn add(&mut self, requests: impl IntoIterator<Item = R>) {
        for request in requests {
            if request.priority() == Priority::Change {
                match self.changing.entry(request.line()) {
                    Entry::Occupied(behind) => {
                        behind.into_mut().push_back(request);
                        continue;
                    }
                    Entry::Vacant(key) => key.insert(VecDeque::new()),
                };
            }
            self.beside(&request).push_back(request);
        }
    }

    /// Sends a request of an answered call again, before all others of its line.
    pub(crate) fn add_again(&mut self, request: R) {
        self.beside(&request).push_front(request);
    }

    /// The same after all that waits with its priority and group: what is in its way now may be gone then.
    pub(crate) fn add_behind(&mut self, request: R) {
        self.beside(&request).push_back(request);
    }

    /// The waiting requests with the same priority and group. The caller adds the request.
    fn beside(&mut self, request: &R) -> &mut VecDeque<R> {
        let (priority, group) = (request.priority(), request.group());
        self.waiting.entry((priority, group)).or_insert_with(|| {
            self.turns[priority as usize].push_back(group);
            VecDeque::new()
        })
    }

    /// A request of an answered call is finished: the next one of its line may go.
    pub(crate) fn finish(&mut self, request: &R) {
        if request.priority() == Priority::Change
            && let Entry::Occupied(mut behind) = self.changing.entry(request.line())
        {
            match behind.get_mut().pop_front() {
                Some(next) => self.beside(&next).push_back(next),
                None => drop(behind.remove()),
            }
        }
    }

    /// The requests of the next call, if one may go. They have one priority and group.
    pub(crate) fn next_call(&mut self) -> Option<(Priority, Vec<R>)> {
        let bytes: usize = self.in_flight.iter().map(|call| call.bytes).sum();
        if self.in_flight.len() >= self.limits.calls || bytes >= self.limits.bytes {
            return None;
        }
        let most = self.limits.requests;
        let is_full = |waiting: &VecDeque<R>| {
            let first = waiting.front().map_or(most, R::most);
            waiting.len() >= most.min(first)
        };
        let is_renewing = |group| self.in_flight.iter().any(|it| it.renews == Some(group));
        // Renewals have time: those that come while one is in flight share the next call.
        let may_send = |priority, group: &u16| {
            let waiting = &self.waiting[&(priority, *group)];
            priority != Priority::Renew || is_full(waiting) || !is_renewing(*group)
        };
        let mut priorities = Priority::ALL;
        if self.has_changed {
            priorities.swap(1, 2);
        }
        if self.has_renewed {
            priorities.rotate_left(1);
        }
        let (priority, turn) = priorities.into_iter().find_map(|priority| {
            let mut turns = self.turns[priority as usize].iter();
            let turn = turns.position(|group| may_send(priority, group))?;
            Some((priority, turn))
        })?;
        self.has_renewed = priority == Priority::Renew;
        if !self.has_renewed {
            self.has_changed = priority == Priority::Change;
        }
        let turns = &mut self.turns[priority as usize];
        let group = turns.remove(turn).expect("it was just found");
        let place = (priority, group);
        let waiting = self.waiting.get_mut(&place).expect("it has a turn");
        let mut most = most;
        let fits = |(index, request): &(usize, &R)| {
            most = most.min(request.most());
            *index < most
        };
        let count = waiting.iter().enumerate().take_while(fits).count();
        let requests = waiting.drain(..count).collect();
        match waiting.is_empty() {
            true => drop(self.waiting.remove(&place)),
            false => turns.push_back(group),
        }
        Some((priority, requests))
    }

    /// The call was sent.
    pub(crate) fn sent(&mut self, requests: Vec<R>) {
        let renewal = requests
            .first()
            .filter(|it| it.priority() == Priority::Renew);
        self.in_flight.push_back(Call {
            bytes: requests.iter().map(R::size).sum(),
            renews: renewal.map(R::group),
            requests,
        });
    }

    /// The oldest call is answered. Each of its requests must be finished or added again.
    pub(crate) fn answered(&mut self) -> Option<Vec<R>> {
        self.in_flight.pop_front().map(|call| call.requests)
    }

    /// Whether a call is in flight.
    pub(crate) fn is_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether a request waits to be sent.
    #[cfg(test)]
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// No more answers will come. Returns the requests in flight, the oldest first, and those that were not sent.
    pub(crate) fn abort(&mut self) -> (Vec<R>, Vec<R>) {
        let calls = std::mem::take(&mut self.in_flight).into_iter();
        let waiting = std::mem::take(&mut self.waiting).into_values();
        self.turns = Default::default();
        // On a new connection leases are renewed before anything else (O4).
        self.has_renewed = false;
        self.has_changed = false;
        let behind = std::mem::take(&mut self.changing).into_values();
        let unsent = waiting.chain(behind).flatten().collect();
        (calls.flat_map(|call| call.requests).collect(), unsent)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{DefaultHasher, Hash, Hasher};

    use super::*;

    /// The number of requests that go alone, and of those that go in twos.
    const ALONE: u64 = 99;
    const IN_TWOS: u64 = 98;

    /// Its key, priority, number and group.
    #[derive(Debug, PartialEq)]
    struct Request(String, Priority, u64, u16);

    impl Sendable for Request {
        fn line(&self) -> u64 {
            let mut hasher = DefaultHasher::new();
            self.0.hash(&mut hasher);
            hasher.finish()
        }

        fn priority(&self) -> Priority {
            self.1
        }

        fn group(&self) -> u16 {
            self.3
        }

        fn most(&self) -> usize {
            match self.2 {
                ALONE => 1,
                IN_TWOS => 2,
                _ => usize::MAX,
            }
        }

        fn size(&self) -> usize {
            100
        }
    }

    fn release(key: &str, number: u64) -> Request {
        Request(key.into(), Priority::Change, number, 0)
    }

    fn renew(key: &str) -> Request {
        Request(key.into(), Priority::Renew, 0, 0)
    }

    fn window() -> SendWindow<Request> {
        SendWindow::new(Limits {
            requests: 64,
            calls: 4,
            bytes: 1 << 20,
        })
    }

    fn numbers(requests: &[Request]) -> Vec<u64> {
        requests.iter().map(|request| request.2).collect()
    }

    fn send(window: &mut SendWindow<Request>) -> Option<Vec<u64>> {
        let (_, requests) = window.next_call()?;
        let sent = numbers(&requests);
        window.sent(requests);
        Some(sent)
    }

    fn finish_oldest(window: &mut SendWindow<Request>) {
        let requests = window.answered().unwrap();
        for request in &requests {
            window.finish(request);
        }
    }

    #[test]
    fn o2_changes_of_one_key_go_one_after_the_other() {
        let mut window = window();
        window.add([
            release("a", 1),
            release("a", 2),
            release("b", 3),
            release("a", 4),
        ]);
        assert_eq!(send(&mut window).unwrap(), [1, 3], "one request a key");
        assert!(window.next_call().is_none(), "the key has one in flight");

        // The request has to go again: it stays in front of the key's others.
        let mut requests = window.answered().unwrap();
        let finished = requests.pop().unwrap();
        window.finish(&finished);
        window.add_again(requests.pop().unwrap());
        for expected in [1, 2, 4] {
            assert_eq!(send(&mut window).unwrap(), [expected]);
            finish_oldest(&mut window);
        }
        assert!(!window.is_waiting());
    }

    #[test]
    fn a_request_that_must_go_alone_does_and_in_order() {
        for priority in [Priority::Renew, Priority::Change] {
            let mut window = window();
            let requests = [("a", 1), ("b", ALONE), ("c", ALONE), ("d", 4), ("e", 5)];
            window.add(requests.map(|(key, number)| Request(key.into(), priority, number, 0)));
            for expected in [&[1][..], &[ALONE], &[ALONE], &[4, 5]] {
                assert_eq!(send(&mut window).unwrap(), expected, "{priority:?}");
                window.answered().unwrap();
            }
            assert!(!window.is_waiting());
        }
    }

    #[test]
    fn a_call_has_no_more_requests_than_each_of_them_allows() {
        for priority in [Priority::Renew, Priority::Change] {
            let mut window = window();
            let twos = ["a", "b", "c", "d", "e"].map(|key| (key, IN_TWOS));
            let others = [("f", 1), ("g", 2), ("h", IN_TWOS), ("i", ALONE), ("j", 3)];
            let requests = twos.into_iter().chain(others);
            window.add(requests.map(|(key, number)| Request(key.into(), priority, number, 0)));
            const T: u64 = IN_TWOS;
            for expected in [&[T, T][..], &[T, T], &[T, 1], &[2, T], &[ALONE], &[3]] {
                assert_eq!(send(&mut window).unwrap(), expected, "{priority:?}");
                window.answered().unwrap();
            }
            assert!(!window.is_waiting());
        }
    }

    #[test]
    fn what_is_refused_goes_behind_the_others_and_in_front_of_its_line() {
        let mut window = window();
        window.add([("a", 1), ("b", 2)].map(|(key, number)| release(key, number)));
        assert_eq!(send(&mut window).unwrap(), [1, 2]);
        window.add([("c", 3), ("a", 4)].map(|(key, number)| release(key, number)));
        for request in window.answered().unwrap() {
            window.add_behind(request);
        }
        assert_eq!(send(&mut window).unwrap(), [3, 1, 2]);
        finish_oldest(&mut window);
        assert_eq!(send(&mut window).unwrap(), [4]);
    }

    #[test]
    fn renewals_go_first_and_whatever_their_keys_wait_for() {
        let mut window = window();
        window.add([release("a", 1), renew("a"), renew("b")]);
        let (priority, requests) = window.next_call().unwrap();
        assert_eq!((priority, requests.len()), (Priority::Renew, 2));
        window.sent(requests);
        assert_eq!(window.next_call().unwrap().0, Priority::Change);
    }

    #[test]
    fn renewals_that_come_while_one_is_in_flight_share_the_next_call() {
        let of = |number, group| Request(format!("k{number}"), Priority::Renew, number, group);
        let mut window = window();
        for number in 1..=3 {
            window.add([of(number, 0)]);
            let sent = send(&mut window);
            assert_eq!(sent.is_some(), number == 1, "{number}");
        }
        window.add([of(4, 7)]);
        assert_eq!(
            send(&mut window).unwrap(),
            [4],
            "another group does not wait"
        );
        window.answered().unwrap();
        assert_eq!(send(&mut window).unwrap(), [2, 3]);
        // A full call does not wait either.
        window.add((10..74).map(|number| of(number, 0)));
        assert_eq!(send(&mut window).unwrap().len(), 64);
        let (sent, unsent) = window.abort();
        assert_eq!((sent.len(), unsent.len()), (67, 0));
        window.add([of(80, 0)]);
        assert!(send(&mut window).is_some());
    }

    /// With one call in flight, as on a connection to PostgreSQL.
    #[test]
    fn renewals_that_never_end_leave_room_for_changes() {
        let mut window = SendWindow::<Request>::new(Limits {
            requests: 2,
            calls: 1,
            bytes: 1 << 20,
        });
        window.add((1..=4).map(|number| release(&format!("key {number}"), number)));
        let mut calls = Vec::new();
        for _ in 0..4 {
            window.add((0..4).map(|_| renew("r")));
            calls.push(send(&mut window).unwrap());
            finish_oldest(&mut window);
        }
        assert_eq!(calls, [[0, 0], [1, 2], [0, 0], [3, 4]]);
        assert_eq!(
            send(&mut window).unwrap(),
            [0, 0],
            "renewals wait for no more than that"
        );
        finish_oldest(&mut window);
        assert_eq!(send(&mut window).unwrap(), [0, 0]);
    }

    /// Where an inspection shares the connection with changes that never end, and with renewals.
    #[test]
    fn changes_that_never_end_leave_room_for_inspections() {
        let mut window = SendWindow::<Request>::new(Limits {
            requests: 1,
            calls: 1,
            bytes: 1 << 20,
        });
        window.add([Request("i".into(), Priority::Inspect, 7, 0)]);
        let mut calls = Vec::new();
        for number in 1..=4 {
            window.add([renew("r"), release(&format!("key {number}"), number)]);
            calls.extend(send(&mut window).unwrap());
            finish_oldest(&mut window);
        }
        assert_eq!(calls, [0, 1, 0, 7]);
    }

    #[test]
    fn g4_the_window_is_bounded_by_calls_and_by_bytes() {
        let mut window = window();
        for number in 0..4 {
            window.add([release(&format!("key {number}"), number)]);
            send(&mut window).expect("a lone request goes at once");
        }
        window.add((10..110).map(|number| release(&format!("key {number}"), number)));
        assert!(window.next_call().is_none());
        finish_oldest(&mut window);
        assert_eq!(send(&mut window).unwrap().len(), 64);

        let limits = Limits {
            requests: 2,
            calls: 100,
            bytes: 500,
        };
        let mut window = SendWindow::<Request>::new(limits);
        window.add((0..100).map(|number| release(&format!("key {number}"), number)));
        let calls = std::iter::from_fn(|| send(&mut window)).count();
        assert_eq!(calls, 3, "the last one may be over the limit");
        finish_oldest(&mut window);
        assert!(send(&mut window).is_some());
    }

    #[test]
    fn o2_a_call_holds_one_group_and_each_key_keeps_its_order() {
        let mut window = SendWindow::<Request>::new(Limits {
            requests: 3,
            calls: 9,
            bytes: 1 << 20,
        });
        let of = |key: &str, number, group| Request(key.into(), Priority::Change, number, group);
        window.add([
            of("a", 1, 1),
            of("b", 2, 2),
            of("a", 3, 1),
            of("c", 4, 1),
            of("b", 5, 2),
            of("d", 6, 1),
            of("e", 7, 1),
        ]);
        let sent: Vec<_> = std::iter::from_fn(|| send(&mut window)).collect();
        assert_eq!(sent, [vec![1, 4, 6], vec![2], vec![7]]);
        finish_oldest(&mut window);
        finish_oldest(&mut window);
        assert_eq!(send(&mut window).unwrap(), [3]);
        assert_eq!(send(&mut window).unwrap(), [5]);
    }

    #[test]
    fn an_abort_gives_everything_back_in_order() {
        let mut window = window();
        for number in 1..=2 {
            window.add([release(&format!("key {number}"), number)]);
            send(&mut window);
        }
        window.add([release("key 1", 3), release("key 3", 4)]);
        let (sent, unsent) = window.abort();
        assert_eq!(numbers(&sent), [1, 2]);
        assert_eq!(numbers(&unsent), [4, 3]);
        assert!(!window.is_waiting());
        assert!(!window.is_in_flight());
        window.add([release("key 1", 5)]);
        assert_eq!(send(&mut window).unwrap(), [5]);
    }

    #[test]
    fn o4_renewals_go_first_on_a_new_connection() {
        let mut window = window();
        window.add([renew("a")]);
        assert_eq!(window.next_call().unwrap().0, Priority::Renew);
        window.abort();
        window.add([release("b", 1), renew("a")]);
        assert_eq!(window.next_call().unwrap().0, Priority::Renew);
    }
}
