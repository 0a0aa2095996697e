//! Certificates: which servers are trusted, what the client shows, and why a handshake failed.

use std::error::Error;
use std::io;
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

/// How a store makes its connections over TLS: with one configuration, and with it the sessions that
/// a server resumes. What the user gave it is read at once, so that what is wrong with it is known
/// before anything connects.
#[derive(Clone, Default)]
pub(in crate::store) struct Tls {
    /// `None`: those of the system, read from its files at the first connection.
    roots: Option<Arc<RootCertStore>>,
    client: Option<Arc<SingleCertAndKey>>,
    connector: OnceCell<TlsConnector>,
}

impl Tls {
    /// Whether the user gave any.
    pub(in crate::store) fn has_certificates(&self) -> bool {
        self.roots.is_some() || self.client.is_some()
    }

    /// With these authorities, in PEM, and those that it was given before.
    pub(in crate::store) fn trusting(mut self, pem: &[u8]) -> Result<Self, String> {
        let mut roots = self
            .roots
            .map_or_else(RootCertStore::empty, Arc::unwrap_or_clone);
        for certificate in read_certificates(pem, "root")? {
            let added = roots.add(certificate);
            added.map_err(|error| format!("root certificate: {error}"))?;
        }
        self.roots = Some(Arc::new(roots));
        Ok(self)
    }

    /// With this certificate and key, in PEM.
    pub(in crate::store) fn showing(
        mut self,
        certificate: &[u8],
        key: &[u8],
    ) -> Result<Self, String> {
        let chain = read_certificates(certificate, "client")?;
        // The error itself might show a part of the key.
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| "no private key in PEM for the client certificate")?;
        let identity = CertifiedKey::from_der(chain, key, &default_provider())
            .map_err(|error| format!("client certificate and key: {error}"))?;
        self.client = Some(Arc::new(identity.into()));
        Ok(self)
    }

    /// Makes connections with these certificates. The roots of the system are read at the first call.
    pub(in crate::store) async fn connector(&self) -> io::Result<TlsConnector> {
        let connector = self.connector.get_or_try_init(|| self.make_connector());
        Ok(connector.await?.clone())
    }

    async fn make_connector(&self) -> io::Result<TlsConnector> {
        let roots = match &self.roots {
            Some(roots) => roots.clone(),
            None => tokio::task::spawn_blocking(system_roots).await??,
        };
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots);
        let config = match &self.client {
            Some(client) => config.with_client_cert_resolver(client.clone()),
            None => config.with_no_client_auth(),
        };
        Ok(Arc::new(config).into())
    }
}

/// The system's roots, without those that cannot be read.
fn system_roots() -> io::Result<Arc<RootCertStore>> {
    let mut found = rustls_native_certs::load_native_certs();
    if let Some(error) = found.errors.pop()
        && found.certs.is_empty()
    {
        return Err(io::Error::other(error));
    }
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(found.certs);
    Ok(Arc::new(store))
}

fn read_certificates(pem: &[u8], whose: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    // The error itself shows the line that it stopped at. Where line breaks were lost that is the
    // whole text, with the key of those who keep both in one file.
    let broken = |_| format!("{whose} certificate: broken PEM (are line breaks missing?)");
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(broken)?;
    if found.is_empty() {
        return Err(format!("no {whose} certificate in PEM"));
    }
    Ok(found)
}

/// The name of a host as certificates have it.
pub(in crate::store) fn server_name(host: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).ok()
}

/// Why client and server did not accept each other; `None` if something else went wrong. None of
/// these passes by itself.
pub(in crate::store) fn rejection(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let error = error.downcast_ref::<io::Error>()?.get_ref()?;
    Some(match error.downcast_ref::<rustls::Error>()? {
        rustls::Error::InvalidCertificate(reason) => match reason {
            CertificateError::UnknownIssuer => {
                "the server certificate is from an unknown authority"
            }
            // The verifier has no type of its own for this.
            CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
                "the server certificate is that of an authority"
            }
            _ => "the server certificate is not valid",
        },
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => "the server requires a client certificate",
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied => "the server rejected the client certificate",
            AlertDescription::ProtocolVersion => "no TLS version in common",
            _ => return None,
        },
        rustls::Error::PeerIncompatible(_) => "no TLS version or cipher in common",
        rustls::Error::InvalidMessage(_) => "the server does not speak TLS",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an environment variable has them that lost its line breaks, or has them escaped.
    #[test]
    fn an_error_about_a_text_shows_nothing_of_a_key() {
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        let secret = key.lines().nth(1).unwrap();
        for broken in [
            key.replace('\n', " "),
            key.replace('\n', "\\n"),
            key.replace("-----END", ""),
            key.replace("PRIVATE KEY", "CERTIFICATE").replace('M', "M!"),
        ] {
            let error = read_certificates(broken.as_bytes(), "client").unwrap_err();
            let told = format!("{error} {error:?}");
            assert!(told.contains("client certificate: "), "{told}");
            // In text, or as numbers.
            let numbers = format!("{:?}", &secret.as_bytes()[..8]);
            let numbers = numbers.trim_matches(['[', ']']);
            for part in [&secret[..8], numbers] {
                assert!(!told.contains(part), "{told}");
            }
        }
    }
}
