//! What does a server that speaks TLS show?

/// What a server that speaks TLS shows, in PEM, and from whom.
#[derive(Clone, Debug)]
pub struct Tls {
    pub certificate: String,
    pub key: String,
    /// Whose certificates it believes; `None`: it asks clients for none.
    pub clients: Option<String>,
}
