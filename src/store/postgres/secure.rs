//! What the socket becomes before user and password are spoken of: TLS, or plain text where that is allowed.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
#[cfg(feature = "tls-rustls")]
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
#[cfg(feature = "tls-rustls")]
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
#[cfg(feature = "tls-rustls")]
use tokio_util::either::Either;

use super::fault::{Address, Fault};
use super::socket::{Destination, Site, Socket};
#[cfg(feature = "tls-rustls")]
use crate::store::tls::{self, Tls};

/// How connections are secured. By default nothing is sent in plain text.
#[derive(Clone, Default)]
pub(super) struct Security {
    pub(super) plain: Plain,
    #[cfg(feature = "tls-rustls")]
    pub(super) is_direct: bool,
    #[cfg(feature = "tls-rustls")]
    pub(super) tls: Arc<Tls>,
}

/// Where plain text is allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Plain {
    #[default]
    Nowhere,
    /// Where nothing leaves this machine, if the server has no TLS.
    AtHome,
    /// Everywhere, and there is no TLS.
    Everywhere,
}

#[cfg(not(feature = "tls-rustls"))]
type Stream = Socket;
#[cfg(feature = "tls-rustls")]
type Stream = Either<Socket, Box<tokio_rustls::client::TlsStream<Socket>>>;

/// A stream that is as secure as it must be.
pub(super) type Secured = Channel<Stream>;

impl Security {
    /// Makes it so, for the server of that site, which listens at that destination.
    #[cfg(feature = "tls-rustls")]
    pub(super) async fn secure(
        &self,
        mut socket: Socket,
        site: &Site,
        destination: &Destination,
        address: &Address,
    ) -> Result<Secured, Fault> {
        if self.plain == Plain::Everywhere || destination.is_socket() {
            return Ok(Channel::plain(Either::Left(socket)));
        }
        let unreachable = |error: io::Error| Fault::unreachable(address, &error);
        if !self.is_direct {
            socket.write_all(&SSL_REQUEST).await.map_err(unreachable)?;
            let answer = socket.read_u8().await;
            match answer.map_err(|error| Fault::speechless(address, &error))? {
                b'S' => {}
                b'N' if self.plain == Plain::AtHome && destination.is_local() => {
                    return Ok(Channel::plain(Either::Left(socket)));
                }
                b'N' => return Err(Fault::without_tls(address, self.plain == Plain::Nowhere)),
                _ => return Err(Fault::stranger(address)),
            }
        }
        let name = self.tls.name_of(&site.name());
        let name = name.ok_or_else(|| {
            Fault::certificates("the host cannot be in a certificate: say server_name")
        })?;
        let mut connector = self.tls.connector().await.map_err(Fault::certificates)?;
        if self.is_direct {
            // Only with this name a server takes TLS from the first byte on.
            let mut config = (**connector.config()).clone();
            config.alpn_protocols = vec![b"postgresql".to_vec()];
            connector = Arc::new(config).into();
        }
        let stream = connector.connect(name, socket).await;
        let stream = stream.map_err(|error| match tls::rejection(&error) {
            Some(reason) => Fault::rejected(address, &error, reason),
            None => Fault::unreachable(
                address,
                &io::Error::new(error.kind(), format!("TLS handshake: {error}")),
            ),
        })?;
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let end_point = certificates.first().and_then(|it| end_point(it));
        Ok(Channel {
            stream: Either::Right(Box::new(stream)),
            end_point,
        })
    }

    #[cfg(not(feature = "tls-rustls"))]
    pub(super) async fn secure(
        &self,
        socket: Socket,
        _: &Site,
        destination: &Destination,
        address: &Address,
    ) -> Result<Secured, Fault> {
        match self.plain == Plain::Everywhere || destination.is_local() {
            true => Ok(Channel::plain(socket)),
            false => Err(Fault::without_tls(address, false)),
        }
    }
}

/// Asks whether the server has TLS.
#[cfg(feature = "tls-rustls")]
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

/// A stream, and what SCRAM binds a password's proof to.
pub(super) struct Channel<S> {
    stream: S,
    /// The hash of the server's certificate (`tls-server-end-point`, RFC 5929).
    end_point: Option<Vec<u8>>,
}

impl<S> Channel<S> {
    pub(super) fn plain(stream: S) -> Self {
        Self {
            stream,
            end_point: None,
        }
    }
}

/// For the client library: the stream is what it must be.
pub(super) struct AsItIs;

impl<S: AsyncRead + AsyncWrite + Unpin> TlsConnect<Channel<S>> for AsItIs {
    type Stream = Channel<S>;
    type Error = io::Error;
    type Future = Ready<io::Result<Channel<S>>>;

    fn connect(self, stream: Channel<S>) -> Self::Future {
        ready(Ok(stream))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Channel<S> {
    fn channel_binding(&self) -> ChannelBinding {
        match &self.end_point {
            Some(hash) => ChannelBinding::tls_server_end_point(hash.clone()),
            None => ChannelBinding::none(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Channel<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Channel<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The hash of a certificate by the hash function of its signature. `None` if there is no such function, or one that not
/// all servers bind to: then nothing is bound, which `channel_binding=require` refuses.
#[cfg(feature = "tls-rustls")]
fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    use ring::digest::{SHA256, SHA384, SHA512, digest};
    use rustls::pki_types::alg_id;
    let by = [
        (alg_id::RSA_PKCS1_SHA256, &SHA256),
        (alg_id::RSA_PKCS1_SHA384, &SHA384),
        (alg_id::RSA_PKCS1_SHA512, &SHA512),
        (alg_id::ECDSA_SHA256, &SHA256),
        (alg_id::ECDSA_SHA384, &SHA384),
        (alg_id::ECDSA_SHA512, &SHA512),
    ];
    // A sequence of what is signed, the algorithm and the signature.
    let (all, _) = sequence(certificate)?;
    let (_, after_signed) = sequence(all)?;
    let (algorithm, _) = sequence(after_signed)?;
    let (_, hash) = by.iter().find(|(id, _)| id.as_ref() == algorithm)?;
    Some(digest(hash, certificate).as_ref().to_vec())
}

/// What is in the sequence that this begins with, in DER, and what follows it.
#[cfg(feature = "tls-rustls")]
fn sequence(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (0x30, rest) = der.split_first().map(|(tag, rest)| (*tag, rest))? else {
        return None;
    };
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match *first {
        short @ ..0x80 => (usize::from(short), rest),
        long => {
            let (bytes, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
            let length = bytes.iter().try_fold(0_usize, |length, byte| {
                length.checked_mul(256)?.checked_add(usize::from(*byte))
            });
            (length?, rest)
        }
    };
    rest.split_at_checked(length)
}

#[cfg(all(test, feature = "tls-rustls"))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hash_is_that_of_the_signature() {
        use rcgen::{
            CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384,
            PKCS_ED25519,
        };
        let hash_of = |algorithm| {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let made = CertificateParams::new(["localhost".to_owned()]).unwrap();
            let made = made.self_signed(&key).unwrap();
            (end_point(made.der()), made.der().to_vec())
        };
        let (hash, der) = hash_of(&PKCS_ECDSA_P256_SHA256);
        let sha256 = ring::digest::digest(&ring::digest::SHA256, &der);
        assert_eq!(hash.as_deref(), Some(sha256.as_ref()));
        let (hash, der) = hash_of(&PKCS_ECDSA_P384_SHA384);
        let sha384 = ring::digest::digest(&ring::digest::SHA384, &der);
        assert_eq!(hash.as_deref(), Some(sha384.as_ref()));
        // PostgreSQL itself cannot bind to such a certificate.
        assert_eq!(hash_of(&PKCS_ED25519).0, None);
    }

    /// As PostgreSQL 17 takes it: no request for TLS, and the name of its protocol.
    #[tokio::test]
    async fn direct_tls_begins_with_the_first_byte() {
        use crate::store::postgres::address::Endpoint;
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = made.signing_key.serialize_der().try_into().unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.into()], key)
            .unwrap();
        config.alpn_protocols = vec![b"postgresql".to_vec()];
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!(
            "postgres://h?hostaddr=127.0.0.1&port={port}&sslmode=require&sslnegotiation=direct"
        );
        let connecting = tokio::spawn(async move {
            let (mut endpoint, _) = Endpoint::parse(&url).unwrap();
            endpoint.secure().unwrap();
            endpoint.connect().await.map(drop)
        });
        let (socket, _) = listener.accept().await.unwrap();
        let stream = acceptor.accept(socket).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"postgresql"[..]));
        assert_eq!(stream.get_ref().1.server_name(), Some("h"));
        connecting.abort();
    }

    proptest! {
        #[test]
        fn nothing_like_a_certificate_panics(
            bytes in proptest::collection::vec(prop_oneof![Just(0x30_u8), Just(0x82), any::<u8>()], 0..40)
        ) {
            end_point(&bytes);
        }
    }
}
