//! Certificates: whom we trust, who we are, and what is said when one of both is not believed.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, RedisError, TlsCertificates};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, RootCertStore};

use super::fault::Fault;

/// What a url cannot say of a connection over TLS. Shows nothing of it.
#[derive(Clone, Default)]
pub(super) struct Certificates {
    /// In PEM; none: whom the system trusts.
    roots: Vec<u8>,
    client: Option<ClientTlsConfig>,
}

impl Certificates {
    pub(super) fn trust(&mut self, pem: &[u8]) {
        self.roots.extend_from_slice(pem);
        // Files may end without one, and the next begins a line.
        self.roots.push(b'\n');
    }

    pub(super) fn identify(&mut self, certificate: Vec<u8>, key: Vec<u8>) {
        self.client = Some(ClientTlsConfig {
            client_cert: certificate,
            client_key: key,
        });
    }

    /// The client that connects so. What is wrong with the certificates is said here, and not at each connection.
    pub(super) fn apply(&self, info: &ConnectionInfo) -> Result<Client, Fault> {
        let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        if !is_tls {
            return Err(wrong("they need a rediss:// url"));
        }
        let root_cert = match &self.roots[..] {
            [] => None,
            roots => Some(checked_roots(roots)?),
        };
        if let Some(client) = &self.client {
            check_identity(client)?;
        }
        let certificates = TlsCertificates {
            client_tls: self.client.clone(),
            root_cert,
        };
        Client::build_with_tls(info.clone(), certificates).map_err(wrong)
    }
}

/// The client would take a text without certificates for a list of nobody.
fn checked_roots(pem: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(pem, "root")? {
        store
            .add(certificate)
            .map_err(|error| wrong(format_args!("the root certificate: {error}")))?;
    }
    Ok(pem.to_owned())
}

fn check_identity(client: &ClientTlsConfig) -> Result<(), Fault> {
    let chain = certificates(&client.client_cert, "client")?;
    // Nothing of a key may show, so its error is not told.
    let key = PrivateKeyDer::from_pem_slice(&client.client_key)
        .map_err(|_| wrong("there is no private key in PEM beside the client certificate"))?;
    let provider = rustls::crypto::ring::default_provider();
    CertifiedKey::from_der(chain, key, &provider)
        .map_err(|error| wrong(format_args!("the client certificate and its key: {error}")))?;
    Ok(())
}

fn certificates(pem: &[u8], whose: &str) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let found = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(format_args!("the {whose} certificate: {error}")))?;
    if found.is_empty() {
        return Err(wrong(format_args!(
            "there is no {whose} certificate in PEM"
        )));
    }
    Ok(found)
}

fn wrong(reason: impl fmt::Display) -> Fault {
    Fault::Certificates {
        reason: reason.to_string(),
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

/// Why two that reached each other do not believe each other; `None` if that is not what went wrong.
///
/// All of it lasts: no certificate gets better by asking again.
pub(super) fn disbelief(error: &RedisError) -> Option<&'static str> {
    // The client keeps what it was told in an `Arc`, which is an error itself.
    let error = error
        .source()?
        .downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    let error = error
        .downcast_ref::<io::Error>()?
        .get_ref()?
        .downcast_ref::<rustls::Error>()?;
    Some(match error {
        rustls::Error::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the server's certificate has expired"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the server's certificate is not valid yet"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "the server's certificate is for another host name"
            }
            CertificateError::UnknownIssuer => {
                "the server's certificate comes from nobody that is trusted here (see \
                 RedisStore::builder(url).root_certificate(pem))"
            }
            // What checks certificates gives no other type for it.
            CertificateError::Other(why) if why.to_string().contains("CaUsedAsEndEntity") => {
                "the server shows the certificate of an authority, as `openssl req -x509` makes \
                 them: sign one for the server with it"
            }
            _ => "the server's certificate is invalid",
        },
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => {
                "the server wants a client certificate (see \
                 RedisStore::builder(url).client_certificate(pem, key))"
            }
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied => {
                "the server does not believe our client certificate"
            }
            AlertDescription::ProtocolVersion => "the server and we have no TLS version in common",
            _ => return None,
        },
        rustls::Error::PeerIncompatible(_) => "the server and we have no way of TLS in common",
        rustls::Error::InvalidMessage(_) => "what answers there speaks no TLS",
        _ => return None,
    })
}
