//! The options of a store's url: what follows the `?`. Each is taken by name, and what nobody takes is refused.

use std::time::Duration;

use percent_encoding::percent_decode_str;

use super::contract::RegistryOptions;
#[cfg(feature = "tls-rustls")]
use super::tls::Tls;
use crate::base::limits::RESPONSE_TIMEOUT;

/// How long connecting may take, unless the url or the builder says otherwise.
pub(in crate::store) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What a url says beside where the server is, and as whom to connect.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct UrlSettings {
    pub(in crate::store) registry: RegistryOptions,
    pub(in crate::store) connect_timeout: Option<Duration>,
}

/// The options of a url that were not taken yet.
#[derive(Debug, Default)]
pub(in crate::store) struct UrlOptions {
    left: Vec<(String, String)>,
    /// The names that were asked for.
    known: Vec<String>,
}

impl UrlOptions {
    /// Reads what follows the `?`. An error shows no value: it may be a password.
    pub(in crate::store) fn parse(query: &str) -> Result<Self, String> {
        let mut left: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            // What stands alone may be a part of a password.
            let Some((name, value)) = pair.split_once('=') else {
                return Err("an option has no value: name=value".to_owned());
            };
            let name = decode(name)?;
            if !is_name(&name) {
                return Err("an option has a name with other characters than letters, digits, '_', '-' and '.' \
                     (percent-encode a ? or & of the password: %3F %26)"
                    .to_owned());
            }
            if left.iter().any(|(before, _)| *before == name) {
                return Err(format!("the option {name} is given twice"));
            }
            left.push((name, decode(value)?));
        }
        let known = Vec::new();
        Ok(Self { left, known })
    }

    /// The value of the option with one of these names, which mean the same.
    pub(in crate::store) fn take(&mut self, names: &[&str]) -> Result<Option<String>, String> {
        self.known.extend(names.iter().map(ToString::to_string));
        let mut found = self
            .left
            .extract_if(.., |(name, _)| names.contains(&&**name));
        let (first, second) = (found.next(), found.next());
        drop(found);
        match (first, second) {
            (Some((first, _)), Some((second, _))) => {
                Err(format!("the options {first} and {second} mean the same"))
            }
            (first, _) => Ok(first.map(|(_, value)| value)),
        }
    }

    /// Takes the option if it has this value.
    pub(in crate::store) fn take_if(&mut self, name: &str, value: &str) -> bool {
        let is_it =
            |(its_name, its_value): &mut (String, String)| its_name == name && its_value == value;
        self.left.extract_if(.., is_it).next().is_some()
    }

    /// The same for a time: a number of seconds, or `500ms`, `5s`, `2m`.
    pub(in crate::store) fn take_time(
        &mut self,
        names: &[&str],
    ) -> Result<Option<Duration>, String> {
        let Some(value) = self.take(names)? else {
            return Ok(None);
        };
        let time = read_time(&value).filter(|time| RESPONSE_TIMEOUT.contains(time));
        let name = names[0];
        let refused =
            || format!("{name} must be from 1ms to 24h, such as 5 (seconds), 5s or 500ms");
        time.ok_or_else(refused).map(Some)
    }

    /// The same for a switch: `true`, `yes`, `on` or `1`, and their contraries.
    pub(in crate::store) fn take_switch(&mut self, names: &[&str]) -> Result<Option<bool>, String> {
        let Some(value) = self.take(names)? else {
            return Ok(None);
        };
        match &*value.to_ascii_lowercase() {
            "true" | "yes" | "on" | "1" => Ok(Some(true)),
            "false" | "no" | "off" | "0" => Ok(Some(false)),
            _ => Err(format!("{} must be true or false", names[0])),
        }
    }

    /// What the url says whatever its kind.
    pub(in crate::store) fn take_settings(&mut self) -> Result<UrlSettings, String> {
        Ok(UrlSettings {
            registry: self.take_registry()?,
            connect_timeout: self.take_time(&["connect_timeout"])?,
        })
    }

    /// What the url says of the registry.
    pub(in crate::store) fn take_registry(&mut self) -> Result<RegistryOptions, String> {
        Ok(RegistryOptions {
            prefix: self.take(&["prefix"])?,
            name: self.take(&["name"])?,
            response_timeout: self.take_time(&["response_timeout"])?,
        })
    }

    /// What the url says of TLS: `ca_file`, `cert_file` and `key_file` in PEM, `server_name`, and
    /// `danger_accept_invalid_certificates`. Other names of the three files are those of other libraries.
    #[cfg(feature = "tls-rustls")]
    pub(in crate::store) fn take_tls(&mut self) -> Result<Tls, String> {
        let mut tls = Tls::default();
        if let Some(path) = self.take(CA_FILE)? {
            let trusting = tls.trusting(&read(CA_FILE[0], &path)?);
            tls = trusting.map_err(|reason| format!("{}={path:?}: {reason}", CA_FILE[0]))?;
        }
        match (self.take(CERT_FILE)?, self.take(KEY_FILE)?) {
            (Some(certificate), Some(key)) => {
                let certificate = read(CERT_FILE[0], &certificate)?;
                tls = tls.showing(&certificate, &read(KEY_FILE[0], &key)?)?;
            }
            (None, None) => {}
            _ => return Err("cert_file and key_file need each other".to_owned()),
        }
        if let Some(name) = self.take(&["server_name"])? {
            tls = tls.naming(&name)?;
        }
        if self.take_switch(&[DANGER])? == Some(true) {
            tls = tls.verifying(super::tls::Verify::Nothing);
        }
        Ok(tls)
    }

    /// Refuses what is left. `instead`: what to write in place of a name.
    pub(in crate::store) fn finish(
        self,
        instead: impl Fn(&str) -> Option<&'static str>,
    ) -> Result<(), String> {
        let Some((name, _)) = self.left.first() else {
            return Ok(());
        };
        Err(match instead(name) {
            Some(advice) => format!("the option {name} is not supported: {advice}"),
            None => {
                let meant = self.known.iter().find(|known| is_near(known, name));
                let meant = meant.map_or_else(String::new, |meant| format!("is {meant} meant? "));
                format!("unknown option {name} ({meant}docs/urls.md lists those that there are)")
            }
        })
    }
}

/// Whether one name is the other with `-` for `_`, without them, or with one slip of the fingers.
fn is_near(one: &str, other: &str) -> bool {
    let letters = |name: &str| -> Vec<u8> {
        let bytes = name.bytes().filter(|byte| !b"_-.".contains(byte));
        bytes.map(|byte| byte.to_ascii_lowercase()).collect()
    };
    let (one, other) = (letters(one), letters(other));
    let equal = |(one, other): &(&u8, &u8)| one == other;
    let before = one.iter().zip(&other).take_while(equal).count();
    let (one, other) = (&one[before..], &other[before..]);
    let behind = one.iter().rev().zip(other.iter().rev());
    let behind = behind.take_while(equal).count();
    let (one, other) = (&one[..one.len() - behind], &other[..other.len() - behind]);
    match (one, other) {
        ([a, b], [c, d]) => (a, b) == (d, c),
        // Names of one or two letters are near to each other anyway.
        _ => one.len().max(other.len()) <= 1 && before + behind >= 3,
    }
}

/// Names of the file with the authorities that are trusted: ours, libpq's, redis-py's, sqlx's.
const CA_FILE: &[&str] = &[
    "ca_file",
    "sslrootcert",
    "ssl_ca_certs",
    "ssl-root-cert",
    "ssl-ca",
];
const CERT_FILE: &[&str] = &["cert_file", "sslcert", "ssl_certfile", "ssl-cert"];
const KEY_FILE: &[&str] = &["key_file", "sslkey", "ssl_keyfile", "ssl-key"];

/// The switch that turns the verification of servers off.
pub(in crate::store) const DANGER: &str = "danger_accept_invalid_certificates";

fn read(name: &str, path: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{name}={path:?}: {error}"))
}

fn decode(text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| "an option is not UTF-8".to_owned())?;
    Ok(decoded.into_owned())
}

fn is_name(name: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b"_-.".contains(&c);
    !name.is_empty() && name.bytes().all(is_plain)
}

fn read_time(text: &str) -> Option<Duration> {
    let units = [
        ("ms", 0.001),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("", 1.0),
    ];
    let (number, unit) = units
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let is_plain = number.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    let number: f64 = number.parse().ok().filter(|_| is_plain)?;
    Duration::try_from_secs_f64(number * unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_taken_once_and_the_rest_is_refused() {
        let mut options = UrlOptions::parse("db=1&&name=web%2D1&connect_timeout=2.5&x=").unwrap();
        assert_eq!(options.take(&["db"]), Ok(Some("1".to_owned())));
        assert_eq!(options.take(&["db"]), Ok(None));
        let registry = options.take_registry().unwrap();
        assert_eq!(registry.name.as_deref(), Some("web-1"));
        let time = options.take_time(&["connect_timeout"]);
        assert_eq!(time, Ok(Some(Duration::from_millis(2500))));
        let refused = options
            .finish(|name| (name == "x").then_some("write y"))
            .unwrap_err();
        assert_eq!(refused, "the option x is not supported: write y");
    }

    #[test]
    fn a_misspelt_option_is_refused_with_what_may_be_meant() {
        for (said, meant) in [
            ("connect-timeout", Some("connect_timeout")),
            ("connecttimeout", Some("connect_timeout")),
            ("Connect_Timeout", Some("connect_timeout")),
            ("conect_timeout", Some("connect_timeout")),
            ("connnect_timeout", Some("connect_timeout")),
            ("connect_timeput", Some("connect_timeout")),
            ("connect_tiemout", Some("connect_timeout")),
            ("prefi", Some("prefix")),
            ("timeout", None),
            ("nm", None),
            ("frobnicate", None),
            ("d", None),
        ] {
            let mut options = UrlOptions::parse(&format!("{said}=1")).unwrap();
            options.take(&["db"]).unwrap();
            options.take_settings().unwrap();
            let meant = meant.map_or_else(String::new, |meant| format!("is {meant} meant? "));
            let told =
                format!("unknown option {said} ({meant}docs/urls.md lists those that there are)");
            assert_eq!(options.finish(|_| None), Err(told));
        }
    }

    #[test]
    fn errors_show_no_value() {
        for query in [
            "w0rd@host/",
            "w0rd",
            "name=a&name=w0rd",
            "response_timeout=w0rd",
            "sw=w0rd",
            "%FF=w0rd",
            "other=w0rd",
        ] {
            let read = UrlOptions::parse(query).and_then(|mut options| {
                options.take_registry()?;
                options.take_switch(&["sw"])?;
                options.finish(|_| None)
            });
            let error = read.unwrap_err();
            assert!(!error.contains("w0rd"), "{error}");
        }
    }

    #[test]
    fn times_have_units() {
        for (text, millis) in [
            ("5", 5_000),
            ("0.5", 500),
            ("250ms", 250),
            ("3s", 3_000),
            ("2m", 120_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(
                read_time(text),
                Some(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for text in ["", "-1", "1e9", "s", "5 s", "inf", "NaN"] {
            assert_eq!(read_time(text), None, "{text}");
        }
    }
}
