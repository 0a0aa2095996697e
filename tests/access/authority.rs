//! An authority of the test's own, and what it signs.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};

use crate::support::Tls;

/// Whoever trusts it believes what it signed.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { issuer, pem }
    }

    /// Good for these hosts, or for a client.
    pub(crate) fn sign(&self, hosts: &[&str]) -> Identity {
        self.sign_with(hosts, |_| {})
    }

    /// Was good until 2020.
    pub(crate) fn sign_expired(&self, hosts: &[&str]) -> Identity {
        self.sign_with(hosts, |params| {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 1);
        })
    }

    /// Will be good from 2999 on.
    pub(crate) fn sign_early(&self, hosts: &[&str]) -> Identity {
        self.sign_with(hosts, |params| {
            params.not_before = date_time_ymd(2999, 1, 1);
            params.not_after = date_time_ymd(3000, 1, 1);
        })
    }

    /// Signed by nobody else, and good for signing others: what a server should not show.
    pub(crate) fn for_itself(hosts: &[&str]) -> Identity {
        let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        let key = key.serialize_pem();
        Identity { certificate, key }
    }

    fn sign_with(&self, hosts: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, "somebody");
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        let key = key.serialize_pem();
        Identity { certificate, key }
    }
}

impl Identity {
    /// A server that shows it, and believes those clients.
    pub(crate) fn serving(&self, clients: Option<&Authority>) -> Tls {
        Tls {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            clients: clients.map(|authority| authority.pem.clone()),
        }
    }
}
