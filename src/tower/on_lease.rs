use crate::handle::LeaseView;

/// What is done with the lease of a request before the inner service is called.
///
/// Closures have it, [`IgnoreLease`], which is the default of a [`LockLayer`](super::LockLayer), and
/// `LeaseInExtensions`.
pub trait OnLease<R> {
    /// The lease of this request is held.
    fn on_lease(&self, request: &mut R, lease: LeaseView);
}

/// The request does not see its lease.
#[derive(Clone, Copy, Debug, Default)]
pub struct IgnoreLease;

impl<R> OnLease<R> for IgnoreLease {
    fn on_lease(&self, _: &mut R, _: LeaseView) {}
}

impl<F, R> OnLease<R> for F
where
    F: Fn(&mut R, LeaseView),
{
    fn on_lease(&self, request: &mut R, lease: LeaseView) {
        self(request, lease);
    }
}

/// The request has its lease in its extensions; see
/// [`LockLayer::lease_in_extensions`](super::LockLayer::lease_in_extensions).
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaseInExtensions;

#[cfg(feature = "http")]
impl<B> OnLease<http::Request<B>> for LeaseInExtensions {
    fn on_lease(&self, request: &mut http::Request<B>, lease: LeaseView) {
        request.extensions_mut().insert(lease);
    }
}
