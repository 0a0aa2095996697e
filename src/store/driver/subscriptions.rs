//! Which keys need a subscription of their own to their grants, and at which node.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::backend::{Backend, Refusal, Trouble};
use super::change::Change;
use super::request::Request;
use super::session::{NodeId, Shared};

/// How many orders of a node may be unconfirmed at a time.
pub(super) const UNCONFIRMED: usize = 64;

/// How often keys that nobody waits for are unsubscribed.
pub(super) const CLEANUP: Duration = Duration::from_secs(1);

/// The subscriptions of one registry.
#[derive(Debug, Default)]
pub(super) struct Subscriptions {
    keys: HashMap<Arc<str>, Subscription>,
    /// By node: the keys whose subscription must change, and which the node was not told of yet.
    changed: HashMap<NodeId, VecDeque<Arc<str>>>,
    /// The number of the last subscription.
    last: u64,
}

#[derive(Debug, Default)]
struct Subscription {
    node: NodeId,
    /// Unlike that of an earlier subscription to the same key.
    number: u64,
    is_confirmed: bool,
    /// Whether an earlier connection had confirmed it.
    was_confirmed: bool,
    /// Whether a ticket was entered since the last clean-up.
    is_used: bool,
    /// Requests that are sent when the subscription is confirmed.
    pending: Vec<Request>,
}

impl Subscription {
    fn end(&mut self, last: &mut u64) {
        self.was_confirmed |= std::mem::take(&mut self.is_confirmed);
        *last += 1;
        self.number = *last;
    }
}

/// An order for a node.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) key: Arc<str>,
    /// The number of the subscription that is wanted, if one is.
    pub(crate) number: Option<u64>,
}

impl Subscriptions {
    pub(super) fn contains(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Returns a request if its key is subscribed to at `node`. Otherwise the request waits for that.
    pub(super) fn enter(&mut self, node: NodeId, mut request: Request) -> Option<Request> {
        let key = request.key();
        if self.keys.get(key).is_none_or(|it| it.node != node) {
            let elsewhere = self.keys.remove(key);
            for node in elsewhere.iter().map(|it| it.node).chain([node]) {
                self.changed.entry(node).or_default().push_back(key.clone());
            }
            self.last += 1;
            let here = Subscription {
                node,
                number: self.last,
                pending: elsewhere.map_or_else(Vec::new, |it| it.pending),
                ..Subscription::default()
            };
            self.keys.insert(key.clone(), here);
        }
        let subscription = self.keys.get_mut(key)?;
        subscription.is_used = true;
        if subscription.is_confirmed {
            request.heard = Some(subscription.number);
            return Some(request);
        }
        subscription.pending.push(request);
        None
    }

    /// Whether the key has been subscribed to without a gap since that subscription.
    pub(super) fn is_heard(&self, key: &str, number: u64) -> bool {
        let subscription = self.keys.get(key);
        subscription.is_some_and(|it| it.is_confirmed && it.number == number)
    }

    /// The nodes whose task has new orders.
    pub(super) fn nodes_with_orders(&self) -> impl Iterator<Item = NodeId> {
        let changed = self.changed.iter().filter(|(_, keys)| !keys.is_empty());
        changed.map(|(node, _)| *node)
    }

    /// The next order for a node. However often a key changed, its last order says what is wanted: an order is made
    /// when it is sent, and each change after that makes another.
    pub(super) fn next_order(&mut self, node: NodeId) -> Option<Order> {
        let key = self.changed.get_mut(&node)?.pop_front()?;
        let wanted = self.keys.get(&key).filter(|it| it.node == node);
        let number = wanted.map(|it| it.number);
        Some(Order { key, number })
    }

    /// The node has confirmed an order, or refused it. Returns what waited for that.
    pub(super) fn told(&mut self, order: &Order, is_followed: bool) -> Vec<Request> {
        let subscription = self.keys.get_mut(&order.key);
        let Some(subscription) = subscription.filter(|it| order.number == Some(it.number)) else {
            return Vec::new();
        };
        subscription.is_confirmed |= is_followed;
        let mut pending = std::mem::take(&mut subscription.pending);
        if is_followed {
            for request in &mut pending {
                request.heard = order.number;
                request.since = Instant::now();
            }
        } else if !subscription.is_confirmed {
            self.keys.remove(&order.key);
        }
        pending
    }

    /// A new connection to the node has no subscriptions, so each is asked for again.
    pub(super) fn renew(&mut self, node: NodeId) {
        let mut here = VecDeque::new();
        for (key, subscription) in self.keys.iter_mut().filter(|(_, it)| it.node == node) {
            subscription.end(&mut self.last);
            here.push_back(key.clone());
        }
        self.changed.insert(node, here);
    }

    /// The connection to the node has ended, or could not be made. Returns what waited for a subscription. Those that
    /// were never confirmed are forgotten, so that their keys are attempted again.
    pub(super) fn lost(&mut self, node: NodeId) -> Vec<Request> {
        self.changed.remove(&node);
        let mut pending = Vec::new();
        for subscription in self.keys.values_mut().filter(|it| it.node == node) {
            pending.append(&mut subscription.pending);
            subscription.end(&mut self.last);
        }
        self.keys
            .retain(|_, it| it.node != node || it.was_confirmed);
        pending
    }

    /// The node has ended the subscription to a key that it was not told to end. Returns whether it was in use.
    fn ended(&mut self, node: NodeId, key: &str) -> bool {
        let subscription = self.keys.get_mut(key).filter(|it| it.node == node);
        let Some(subscription) = subscription.filter(|it| it.is_confirmed) else {
            return false;
        };
        subscription.end(&mut self.last);
        if let Some((key, _)) = self.keys.get_key_value(key) {
            self.changed.entry(node).or_default().push_back(key.clone());
        }
        true
    }

    /// Nobody needs the node.
    pub(super) fn forget(&mut self, node: NodeId) {
        self.changed.remove(&node);
        self.keys.retain(|_, it| it.node != node);
    }

    /// Whether a request waits for a subscription at the node.
    pub(super) fn has_pending(&self, node: NodeId) -> bool {
        let mut here = self.keys.values().filter(|it| it.node == node);
        here.any(|it| !it.pending.is_empty())
    }

    /// Whether any key at the node needs a subscription.
    pub(super) fn is_wanted_at(&self, node: NodeId) -> bool {
        self.keys.values().any(|it| it.node == node)
    }

    /// The keys at the node without a new ticket since the last call.
    pub(super) fn unused_at(&mut self, node: NodeId) -> Vec<Arc<str>> {
        let here = self.keys.iter_mut().filter(|(_, it)| it.node == node);
        let unused = here.filter_map(|(key, it)| (!std::mem::take(&mut it.is_used)).then_some(key));
        unused.cloned().collect()
    }

    /// The key is not waited for any more, unless something is pending.
    pub(super) fn leave(&mut self, node: NodeId, key: &Arc<str>) {
        if let Some(subscription) = self.keys.get(key)
            && subscription.node == node
            && !subscription.is_used
            && subscription.pending.is_empty()
        {
            self.keys.remove(key);
            self.changed.entry(node).or_default().push_back(key.clone());
        }
    }
}

/// Subscriptions as the node's task changes them.
impl<B: Backend> Shared<B> {
    /// Some orders for the node, as many as are left.
    pub(super) fn next_orders(self: &Arc<Self>, id: NodeId, room: usize) -> Vec<Order> {
        self.change(|change| {
            if change.state.nodes[id].no_push.is_some() {
                return Vec::new();
            }
            let subscriptions = &mut change.state.subscriptions;
            let orders = std::iter::from_fn(|| subscriptions.next_order(id));
            orders.take(room).collect()
        })
    }

    /// The node has confirmed an order, or refused it. A node that has lost the slot refuses unsubscriptions, too;
    /// then no grants come from there any more.
    pub(super) fn told(self: &Arc<Self>, id: NodeId, order: &Order, told: Result<(), Refusal>) {
        if let Err(refusal) = &told
            && !refusal.error.is_retryable()
            && order.number.is_some()
        {
            let address = self.change(|change| {
                change.state.nodes[id].no_push = Some(refusal.text.clone());
                change.cannot_push(id);
                let slots = change.slots_of(id);
                change.state.unsettled.extend(&slots);
                change.settle();
                change.state.nodes[id].address.clone()
            });
            return self.warn_of_no_push(&address, &refusal.text);
        }
        self.change(|change| {
            for request in change.state.subscriptions.told(order, told.is_ok()) {
                match &told {
                    Ok(()) => change.hand_to(id, request),
                    Err(refusal) => change.on_refused(request, refusal.clone()),
                }
            }
        });
    }

    /// Unsubscribes keys that nobody waits for. Returns false if no key is left.
    pub(super) fn clean_up_subscriptions(self: &Arc<Self>, id: NodeId) -> bool {
        let keys = self.change(|change| change.state.subscriptions.unused_at(id));
        let listener = self.config.listener.upgrade();
        let waits = |key: &Arc<str>| listener.as_ref().is_some_and(|it| it.waits(key));
        // Not under our lock: it asks the registry, which takes its own.
        let needless: Vec<_> = keys.into_iter().filter(|key| !waits(key)).collect();
        self.change(|change| {
            for key in &needless {
                change.state.subscriptions.leave(id, key);
            }
            change.state.subscriptions.is_wanted_at(id)
        })
    }
}

impl<B: Backend> Change<'_, B> {
    /// The node cannot push grants: its keys must be waited for without (W5).
    pub(super) fn cannot_push(&mut self, id: NodeId) {
        let node = &self.state.nodes[id];
        let reason = node.no_push.as_deref().unwrap_or_default();
        let trouble = Trouble::NoPush(reason);
        let error = self.shared.backend.error(&node.address, trouble);
        let pending = self.state.subscriptions.lost(id);
        self.state.subscriptions.forget(id);
        for request in pending {
            self.answer_unsent(request, error.clone());
        }
    }

    /// The node has ended a subscription by itself: the slot has moved. Grants may be missed from now on, so the ticket
    /// is entered again, wherever the slot is.
    pub(super) fn unsubscribed(&mut self, id: NodeId, key: Arc<str>) {
        if self.state.subscriptions.ended(id, &key) {
            self.effects.doubtful.insert(key);
            self.search();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::contract::{Op, Owner, SubmittedOp};
    use crate::store::driver::request::RequestKind;

    fn request(key: &str) -> Request {
        let op = Op::Enter {
            owner: Owner::exclusive(1),
            ttl: Duration::from_secs(30),
            score: None,
        };
        Request::new(RequestKind::Op(SubmittedOp::unattended(key, op)))
    }

    /// As if nobody waited for the key for two rounds of the clean-up.
    fn leave(subscriptions: &mut Subscriptions, key: &str) {
        subscriptions.unused_at(0);
        subscriptions.leave(0, &key.into());
    }

    #[test]
    fn a_request_waits_until_its_key_is_heard() {
        let mut subscriptions = Subscriptions::default();
        assert!(subscriptions.enter(0, request("k")).is_none());
        assert!(subscriptions.enter(0, request("k")).is_none());
        let order = subscriptions.next_order(0).unwrap();
        assert!(subscriptions.next_order(0).is_none(), "asked for once");
        let ready = subscriptions.told(&order, true);
        let number = order.number.unwrap();
        assert_eq!(ready.len(), 2);
        assert!(ready.iter().all(|request| request.heard == Some(number)));
        let next = subscriptions.enter(0, request("k")).unwrap();
        assert_eq!(next.heard, Some(number));
        assert!(subscriptions.is_heard("k", number));
        assert!(subscriptions.lost(0).is_empty());
        assert!(!subscriptions.is_heard("k", number));
        subscriptions.renew(0);
        let order = subscriptions.next_order(0).unwrap();
        assert_ne!(order.number, Some(number), "grants were missed");
    }

    #[test]
    fn a_key_that_moves_is_left_at_the_one_node_and_heard_at_the_other() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        let first = subscriptions.next_order(0).unwrap();
        subscriptions.enter(1, request("k"));
        assert_eq!(subscriptions.next_order(0).unwrap().number, None);
        assert!(subscriptions.told(&first, true).is_empty(), "not there");
        let second = subscriptions.next_order(1).unwrap();
        assert_eq!(subscriptions.told(&second, true).len(), 2);
        assert!(!subscriptions.is_wanted_at(0) && subscriptions.is_wanted_at(1));
    }

    /// The key was left and entered again while its subscription was in flight. The answer to that comes before the
    /// answer to the unsubscription. If it counted, a ticket would be entered whose grants do not arrive.
    #[test]
    fn the_answer_to_an_earlier_subscription_confirms_nothing() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        let first = subscriptions.next_order(0).unwrap();
        assert_eq!(subscriptions.told(&first, true).len(), 1);
        subscriptions.lost(0);
        subscriptions.renew(0);
        let earlier = subscriptions.next_order(0).unwrap();
        leave(&mut subscriptions, "k");
        assert_eq!(subscriptions.next_order(0).unwrap().number, None);
        assert!(subscriptions.enter(0, request("k")).is_none());
        assert!(subscriptions.told(&earlier, true).is_empty());
        let last = subscriptions.next_order(0).unwrap();
        assert_eq!(subscriptions.told(&last, true).len(), 1);
    }

    #[test]
    fn a_key_that_is_entered_before_it_could_be_left_stays() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        let first = subscriptions.next_order(0).unwrap();
        subscriptions.told(&first, true);
        leave(&mut subscriptions, "k");
        subscriptions.enter(0, request("k"));
        for _ in 0..2 {
            assert!(subscriptions.next_order(0).unwrap().number.is_some());
        }
        assert!(subscriptions.next_order(0).is_none());
        assert_eq!(subscriptions.nodes_with_orders().count(), 0);
    }

    /// Its caller waits for an answer to the ticket itself.
    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_request_begins_when_its_key_is_heard() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        let order = subscriptions.next_order(0).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let [ready] = &subscriptions.told(&order, true)[..] else {
            panic!("it waits for nothing else");
        };
        assert_eq!(ready.since, Instant::now());
    }

    /// Nobody waited for it when it was looked at, and then somebody did, perhaps at another node.
    #[test]
    fn a_key_is_left_only_if_nobody_waits_for_it_there() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        leave(&mut subscriptions, "k");
        assert!(subscriptions.has_pending(0), "it is not confirmed yet");
        let order = subscriptions.next_order(0).unwrap();
        subscriptions.told(&order, true);
        subscriptions.unused_at(0);
        subscriptions.enter(0, request("k"));
        subscriptions.leave(0, &"k".into());
        assert!(subscriptions.contains("k"), "it is used again");
        subscriptions.enter(1, request("k"));
        let order = subscriptions.next_order(1).unwrap();
        subscriptions.told(&order, true);
        subscriptions.unused_at(1);
        subscriptions.leave(0, &"k".into());
        assert!(subscriptions.contains("k"), "it is heard there");
        subscriptions.leave(1, &"k".into());
        assert!(!subscriptions.contains("k"));
    }

    #[test]
    fn unconfirmed_subscriptions_are_forgotten_if_no_connection_can_be_made() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("old"));
        let order = subscriptions.next_order(0).unwrap();
        subscriptions.told(&order, true);
        subscriptions.enter(0, request("new"));
        assert!(subscriptions.has_pending(0) && !subscriptions.has_pending(1));
        assert_eq!(subscriptions.lost(0).len(), 1);
        assert!(subscriptions.contains("old") && !subscriptions.contains("new"));
        // However often it is lost.
        assert!(subscriptions.lost(0).is_empty());
        subscriptions.renew(0);
        assert_eq!(&*subscriptions.next_order(0).unwrap().key, "old");
        assert!(subscriptions.next_order(0).is_none());
        subscriptions.forget(0);
        assert!(!subscriptions.contains("old"));
    }

    /// The node's task may connect anew without a loss, if a request comes when its connection was to be closed.
    #[test]
    fn on_a_new_connection_no_key_is_heard_until_it_is_confirmed_again() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        let first = subscriptions.next_order(0).unwrap();
        subscriptions.told(&first, true);
        subscriptions.renew(0);
        assert!(!subscriptions.is_heard("k", first.number.unwrap()));
        assert!(subscriptions.enter(0, request("k")).is_none(), "it waits");
        let again = subscriptions.next_order(0).unwrap();
        assert_eq!(subscriptions.told(&again, false).len(), 1);
        assert!(!subscriptions.contains("k"), "it was refused");
    }

    /// As when its slot has moved away.
    #[test]
    fn a_subscription_that_the_node_has_ended_is_asked_for_again() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("k"));
        assert!(!subscriptions.ended(0, "k"), "it has not begun");
        let order = subscriptions.next_order(0).unwrap();
        subscriptions.told(&order, true);
        assert!(!subscriptions.ended(1, "k") && !subscriptions.ended(0, "other"));
        assert!(subscriptions.ended(0, "k"));
        assert!(!subscriptions.ended(0, "k"), "once");
        assert!(!subscriptions.is_heard("k", order.number.unwrap()));
        assert!(subscriptions.enter(0, request("k")).is_none(), "it waits");
        let order = subscriptions.next_order(0).unwrap();
        assert_eq!(subscriptions.told(&order, true).len(), 1);
    }
}
