//! Certificates: whom we trust, who we are, and what is said when one of both is not believed.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::fault::Fault;

/// What a url cannot say of a connection over TLS. Shows nothing of it.
#[derive(Clone, Default)]
pub(super) struct Certificates {
    /// In PEM; none: whom the system trusts.
    roots: Vec<u8>,
    client: Option<Pem>,
}

/// A client's certificate and its key, as they were given.
#[derive(Clone)]
struct Pem {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl Certificates {
    pub(super) fn trust(&mut self, pem: &[u8]) {
        self.roots.extend_from_slice(pem);
        // Files may end without one, and the next begins a line.
        self.roots.push(b'\n');
    }

    pub(super) fn identify(&mut self, certificate: Vec<u8>, key: Vec<u8>) {
        self.client = Some(Pem { certificate, key });
    }

    /// What is wrong with the certificates is said here, and not at each connection.
    pub(super) fn read(&self, info: &ConnectionInfo) -> Result<Tls, Fault> {
        let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        if !is_tls {
            return Err(wrong("they need a rediss:// url"));
        }
        let roots = match &self.roots[..] {
            [] => None,
            roots => Some(read_roots(roots)?),
        };
        let client = self.client.as_ref().map(Pem::read).transpose()?;
        Ok(Tls {
            roots: roots.map(Arc::new),
            client: client.map(Arc::new),
        })
    }
}

/// How a connection over TLS is made. Shows nothing of it.
#[derive(Clone, Default)]
pub(super) struct Tls {
    /// `None`: whom the system trusts.
    roots: Option<Arc<RootCertStore>>,
    client: Option<Arc<Identity>>,
}

/// Who we are to those who ask.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

/// What makes one connection, to whichever address.
pub(super) struct Connector(TlsConnector);

impl Tls {
    /// Made for each connection: nothing is kept of the one before, so every certificate is looked at.
    pub(super) async fn connector(&self) -> RedisResult<Connector> {
        let roots = match &self.roots {
            Some(roots) => roots.clone(),
            // They lie in files.
            None => tokio::task::spawn_blocking(system_roots)
                .await
                .map_err(io::Error::other)??,
        };
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match self.client.as_deref() {
            Some(Identity { chain, key }) => config
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .map_err(io::Error::other)?,
            None => config.with_no_client_auth(),
        };
        Ok(Connector(Arc::new(config).into()))
    }
}

impl Connector {
    pub(super) async fn connect(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> RedisResult<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            let kind = ErrorKind::InvalidClientConfig;
            RedisError::from((kind, "No certificate can be for such a host name"))
        })?;
        Ok(self.0.connect(name, stream).await?)
    }
}

/// Whatever of them can be read: a system may hold one that nobody can.
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

/// A text without certificates would be a list of nobody.
fn read_roots(pem: &[u8]) -> Result<RootCertStore, Fault> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(pem, "root")? {
        store
            .add(certificate)
            .map_err(|error| wrong(format_args!("the root certificate: {error}")))?;
    }
    Ok(store)
}

impl Pem {
    fn read(&self) -> Result<Identity, Fault> {
        let chain = certificates(&self.certificate, "client")?;
        // Nothing of a key may show, so its error is not told.
        let key = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| wrong("there is no private key in PEM beside the client certificate"))?;
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider)
            .map_err(|error| wrong(format_args!("the client certificate and its key: {error}")))?;
        Ok(Identity { chain, key })
    }
}

fn certificates(pem: &[u8], whose: &str) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let found = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(format_args!("the {whose} certificate: {}", unread(&error))))?;
    if found.is_empty() {
        return Err(wrong(format_args!(
            "there is no {whose} certificate in PEM"
        )));
    }
    Ok(found)
}

/// What is wrong with a text in PEM. The error itself shows the line that it stopped at, which is all of the text where
/// line breaks were lost on the way; and who keeps certificate and key in one file shows the key with it.
fn unread(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::IllegalSectionStart { .. } => {
            "a line of its PEM begins a section and says more than that; are line breaks missing?"
        }
        pem::Error::MissingSectionEnd { .. } => {
            "a section of its PEM has no end; are line breaks missing?"
        }
        pem::Error::Base64Decode(_) => "its PEM is no base64",
        _ => "its PEM cannot be read",
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As a variable of the environment has them that lost its line breaks, or has them escaped.
    #[test]
    fn what_is_wrong_with_a_text_shows_nothing_of_a_key() {
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        let secret = key.lines().nth(1).unwrap();
        for broken in [
            key.replace('\n', " "),
            key.replace('\n', "\\n"),
            key.replace("-----END", ""),
            key.replace("PRIVATE KEY", "CERTIFICATE").replace('M', "M!"),
        ] {
            let error = certificates(broken.as_bytes(), "client").unwrap_err();
            let told = format!("{error} {error:?}");
            assert!(told.contains("the client certificate: "), "{told}");
            // In text, or as numbers.
            let numbers = format!("{:?}", &secret.as_bytes()[..8]);
            let numbers = numbers.trim_matches(['[', ']']);
            for part in [&secret[..8], numbers] {
                assert!(!told.contains(part), "{told}");
            }
        }
    }
}
