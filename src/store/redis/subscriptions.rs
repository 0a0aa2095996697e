//! Which keys of a cluster need their grants heard, and where.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use super::request::Request;
use super::session::NodeId;

/// The subscriptions of one registry.
#[derive(Debug, Default)]
pub(super) struct Subscriptions {
    keys: HashMap<Arc<str>, Subscription>,
    /// What each node is to be asked next.
    orders: HashMap<NodeId, VecDeque<Order>>,
    /// Counts the subscriptions.
    last: u64,
}

#[derive(Debug)]
struct Subscription {
    node: NodeId,
    /// Differs from that of an earlier subscription to the same key.
    number: u64,
    is_confirmed: bool,
    /// Grants may have been missed since it was confirmed first.
    is_doubtful: bool,
    /// Whether something was entered since the last look for keys that nobody waits for.
    is_used: bool,
    /// What goes to the node when the subscription is confirmed.
    pending: Vec<Request>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Subscribe(Arc<str>),
    Unsubscribe(Arc<str>),
}

impl Subscriptions {
    pub(super) fn contains(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Gives a request back if the grants of its key are heard at `node`; else it waits for that.
    pub(super) fn enter(&mut self, node: NodeId, mut request: Request) -> Option<Request> {
        let key = &request.job.key;
        if let Some(old) = self.keys.get(key)
            && old.node != node
        {
            let order = Order::Unsubscribe(key.clone());
            self.orders.entry(old.node).or_default().push_back(order);
            let moved = self.keys.remove(key).expect("it was just seen");
            self.subscribe(node, key.clone(), moved.pending);
        }
        if !self.keys.contains_key(key) {
            self.subscribe(node, key.clone(), Vec::new());
        }
        let subscription = self.keys.get_mut(key).expect("it was just added");
        subscription.is_used = true;
        if subscription.is_confirmed {
            request.heard = Some(subscription.number);
            return Some(request);
        }
        subscription.pending.push(request);
        None
    }

    /// Whether the grants of the key were heard all the time since that subscription.
    pub(super) fn is_heard(&self, key: &str, number: u64) -> bool {
        let subscription = self.keys.get(key);
        subscription.is_some_and(|it| it.is_confirmed && it.number == number)
    }

    fn subscribe(&mut self, node: NodeId, key: Arc<str>, pending: Vec<Request>) {
        let order = Order::Subscribe(key.clone());
        self.orders.entry(node).or_default().push_back(order);
        self.last += 1;
        let subscription = Subscription {
            node,
            number: self.last,
            is_confirmed: false,
            is_doubtful: false,
            is_used: true,
            pending,
        };
        self.keys.insert(key, subscription);
    }

    pub(super) fn next_order(&mut self, node: NodeId) -> Option<Order> {
        self.orders.get_mut(&node)?.pop_front()
    }

    /// The node confirmed a subscription: what may go now.
    pub(super) fn confirmed(&mut self, node: NodeId, key: &str) -> Vec<Request> {
        match self.keys.get_mut(key) {
            Some(subscription) if subscription.node == node => {
                subscription.is_confirmed = true;
                let mut pending = std::mem::take(&mut subscription.pending);
                for request in &mut pending {
                    request.heard = Some(subscription.number);
                    request.since = Instant::now();
                }
                pending
            }
            _ => Vec::new(),
        }
    }

    /// The node refused a subscription: what waited for it.
    pub(super) fn refused(&mut self, node: NodeId, key: &str) -> Vec<Request> {
        match self.keys.get(key) {
            Some(subscription) if subscription.node == node => {
                let refused = self.keys.remove(key).expect("it was just seen");
                refused.pending
            }
            _ => Vec::new(),
        }
    }

    /// A new connection to the node has no subscription yet: each is asked for again. Returns the
    /// keys that had been confirmed before, whose grants may have been missed.
    pub(super) fn renew(&mut self, node: NodeId) -> HashSet<Arc<str>> {
        let mut doubtful = HashSet::new();
        let mut orders = VecDeque::new();
        for (key, subscription) in &mut self.keys {
            if subscription.node == node {
                orders.push_back(Order::Subscribe(key.clone()));
                if std::mem::take(&mut subscription.is_doubtful) {
                    doubtful.insert(key.clone());
                }
            }
        }
        self.orders.insert(node, orders);
        doubtful
    }

    /// The connection that carried the subscriptions at the node has ended.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.orders.remove(&node);
        for subscription in self.keys.values_mut().filter(|it| it.node == node) {
            subscription.is_doubtful |= std::mem::take(&mut subscription.is_confirmed);
            self.last += 1;
            subscription.number = self.last;
        }
    }

    /// No connection could be made for the subscriptions at the node. Forgets those that never were,
    /// so that their keys are attempted again; returns what waited.
    pub(super) fn take_pending(&mut self, node: NodeId) -> Vec<Request> {
        self.orders.remove(&node);
        let is_here = |it: &Subscription| it.node == node;
        let mut pending = Vec::new();
        for subscription in self.keys.values_mut().filter(|it| is_here(it)) {
            pending.append(&mut subscription.pending);
        }
        self.keys
            .retain(|_, it| !is_here(it) || it.is_confirmed || it.is_doubtful);
        pending
    }

    /// Whether any key is to be heard at the node.
    pub(super) fn is_wanted_at(&self, node: NodeId) -> bool {
        self.keys
            .values()
            .any(|subscription| subscription.node == node)
    }

    pub(super) fn has_orders(&self, node: NodeId) -> bool {
        self.orders
            .get(&node)
            .is_some_and(|orders| !orders.is_empty())
    }

    /// The keys at the node into which nothing was entered since the last call.
    pub(super) fn unused_at(&mut self, node: NodeId) -> Vec<Arc<str>> {
        let here = self.keys.iter_mut().filter(|(_, it)| it.node == node);
        let unused = here.filter_map(|(key, it)| (!std::mem::take(&mut it.is_used)).then_some(key));
        unused.cloned().collect()
    }

    /// The key is not waited for any more, as far as nothing is pending.
    pub(super) fn leave(&mut self, node: NodeId, key: &Arc<str>) {
        if let Some(subscription) = self.keys.get(key)
            && subscription.node == node
            && !subscription.is_used
            && subscription.pending.is_empty()
        {
            self.keys.remove(key);
            let order = Order::Unsubscribe(key.clone());
            self.orders.entry(node).or_default().push_back(order);
        }
    }
}
