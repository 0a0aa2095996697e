//! Certificates: which servers are trusted, what the client shows, and why a handshake failed.

use std::error::Error;
use std::io;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore,
    SignatureScheme,
};
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
    verify: Verify,
    /// In place of the host in the url.
    name: Option<ServerName<'static>>,
    connector: OnceCell<TlsConnector>,
}

/// How much of a server's certificate is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::store) enum Verify {
    /// Who signed it, and the name.
    #[default]
    Full,
    /// Who signed it.
    Chain,
    /// Whoever answers is trusted.
    Nothing,
}

impl Tls {
    /// Whether the user set anything.
    pub(in crate::store) fn is_set(&self) -> bool {
        self.has_roots()
            || self.client.is_some()
            || self.name.is_some()
            || self.verify != Verify::Full
    }

    /// Whether the authorities are given, in place of those of the system.
    pub(in crate::store) fn has_roots(&self) -> bool {
        self.roots.is_some()
    }

    /// Whether whoever answers is trusted.
    pub(in crate::store) fn accepts_anybody(&self) -> bool {
        self.verify == Verify::Nothing
    }

    /// With this much checked.
    pub(in crate::store) fn verifying(self, verify: Verify) -> Self {
        Self { verify, ..self }
    }

    /// How much is checked.
    #[cfg(all(test, feature = "postgres"))]
    pub(in crate::store) fn verify(&self) -> Verify {
        self.verify
    }

    /// For servers whose certificate has this name, whatever the host in the url.
    pub(in crate::store) fn naming(self, name: &str) -> Result<Self, String> {
        let name = server_name(name).ok_or("the server name cannot be in a certificate")?;
        Ok(Self {
            name: Some(name),
            ..self
        })
    }

    /// The name that the certificate of this host must have.
    pub(in crate::store) fn name_of(&self, host: &str) -> Option<ServerName<'static>> {
        self.name.clone().or_else(|| server_name(host))
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
        let provider = Arc::new(default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let algorithms = provider.signature_verification_algorithms;
        let roots = match (self.verify, &self.roots) {
            (Verify::Nothing, _) => None,
            (_, Some(roots)) => Some(roots.clone()),
            (_, None) => Some(tokio::task::spawn_blocking(system_roots).await??),
        };
        let checks = |roots| WebPkiServerVerifier::builder_with_provider(roots, provider).build();
        let verifier = roots.map(checks).transpose().map_err(io::Error::other)?;
        let config = match (self.verify, verifier) {
            (Verify::Full, Some(verifier)) => config.with_webpki_verifier(verifier),
            (_, verifier) => config
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Lenient {
                    verifier,
                    algorithms,
                })),
        };
        let config = match &self.client {
            Some(client) => config.with_client_cert_resolver(client.clone()),
            None => config.with_no_client_auth(),
        };
        Ok(Arc::new(config).into())
    }
}

/// Checks who signed the certificate, and no name; or, without a verifier, nothing but that the server has the key of
/// its certificate.
#[derive(Debug)]
struct Lenient {
    verifier: Option<Arc<WebPkiServerVerifier>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(verifier) = &self.verifier else {
            return Ok(ServerCertVerified::assertion());
        };
        // The name is checked last.
        match verifier.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
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
                "the server certificate is from an unknown authority: name it by ca_file in the url"
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
