//! Which keys of a cluster need a subscription to their grants, and at which node.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use super::request::Request;
use super::session::NodeId;

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
    /// Grants may have been missed since the first confirmation.
    is_doubtful: bool,
    /// Whether a ticket was entered since the last clean-up.
    is_used: bool,
    /// Requests that are sent when the subscription is confirmed.
    pending: Vec<Request>,
}

/// An order for a node.
pub(super) struct Order {
    pub(super) key: Arc<str>,
    /// The number of the subscription that is wanted, if one is.
    pub(super) number: Option<u64>,
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

    /// A new connection to the node has no subscriptions, so each is asked for again. Returns the keys that were
    /// confirmed before: their grants may have been missed.
    pub(super) fn renew(&mut self, node: NodeId) -> HashSet<Arc<str>> {
        let mut doubtful = HashSet::new();
        let mut here = VecDeque::new();
        for (key, subscription) in self.keys.iter_mut().filter(|(_, it)| it.node == node) {
            here.push_back(key.clone());
            if std::mem::take(&mut subscription.is_doubtful) {
                doubtful.insert(key.clone());
            }
        }
        self.changed.insert(node, here);
        doubtful
    }

    /// The connection with the subscriptions at the node has ended.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.changed.remove(&node);
        for subscription in self.keys.values_mut().filter(|it| it.node == node) {
            subscription.is_doubtful |= std::mem::take(&mut subscription.is_confirmed);
            self.last += 1;
            subscription.number = self.last;
        }
    }

    /// No connection for subscriptions could be made at the node. Forgets those that were never confirmed, so that
    /// their keys are attempted again. Returns what waited.
    pub(super) fn take_pending(&mut self, node: NodeId) -> Vec<Request> {
        let mut pending = Vec::new();
        self.keys.retain(|_, it| {
            if it.node == node {
                pending.append(&mut it.pending);
            }
            it.node != node || it.is_doubtful
        });
        pending
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::contract::{Op, Owner, SubmittedOp};
    use crate::store::redis::request::RequestKind;

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
        subscriptions.lost(0);
        assert!(!subscriptions.is_heard("k", number));
        assert!(subscriptions.renew(0).contains("k"), "grants were missed");
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

    #[test]
    fn unconfirmed_subscriptions_are_forgotten_if_no_connection_can_be_made() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.enter(0, request("old"));
        let order = subscriptions.next_order(0).unwrap();
        subscriptions.told(&order, true);
        subscriptions.enter(0, request("new"));
        subscriptions.lost(0);
        assert_eq!(subscriptions.take_pending(0).len(), 1);
        assert!(subscriptions.contains("old") && !subscriptions.contains("new"));
        let doubtful = subscriptions.renew(0);
        assert_eq!(doubtful.len(), 1);
    }
}
