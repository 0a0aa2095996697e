//! Where the url of the store comes from, and that its password stays secret.

use std::ffi::OsString;
use std::path::PathBuf;

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// The environment variable that has the url. The command does not get it.
pub(crate) const VARIABLE: &str = "LOCKSTREAM_URL";

/// The url, from the option, the file or the environment, in this order.
///
/// An error never shows a url.
pub(crate) fn find(
    option: Option<&str>,
    file: Option<&PathBuf>,
    variable: Option<OsString>,
) -> Result<String, String> {
    if let Some(url) = option {
        if has_password(url) {
            return Err(format!(
                "a password in --url is visible in the list of processes: use {VARIABLE} or --url-file"
            ));
        }
        return Ok(url.to_owned());
    }
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let url = text.trim();
        if url.is_empty() || url.lines().count() > 1 {
            return Err(format!("{} does not hold one url", path.display()));
        }
        return Ok(url.to_owned());
    }
    match variable.map(OsString::into_string) {
        Some(Ok(url)) if !url.trim().is_empty() => Ok(url.trim().to_owned()),
        Some(Err(_)) => Err(format!("{VARIABLE} is not UTF-8")),
        _ => Err(format!(
            "no store: set {VARIABLE}, or give --url or --url-file"
        )),
    }
}

/// Names all kinds of urls if this is of none. Each store itself knows its own only.
pub(crate) fn check_scheme(url: &str) -> Result<(), String> {
    let (scheme, rest) = url.split_once(':').unwrap_or_default();
    let scheme = scheme.to_ascii_lowercase();
    let (kind, _) = scheme.split_once('+').unwrap_or((&scheme, ""));
    let kinds = [
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "unix",
        "postgres",
        "postgresql",
    ];
    if kinds.contains(&kind) && rest.starts_with("//") {
        return Ok(());
    }
    let lack = match url.contains("://") {
        true => "",
        false => "it has no scheme; ",
    };
    Err(format!(
        "invalid url: {lack}expected redis://, rediss://, redis+cluster://, redis+sentinel://, unix:// or postgres:// at \
         its beginning"
    ))
}

/// The option that turns the verification of certificates off.
pub(crate) const DANGER: &str = "danger_accept_invalid_certificates";

/// The options of a url, decoded as far as they can be.
fn options(url: &str) -> impl Iterator<Item = (String, String)> {
    let (url, _) = url.split_once('#').unwrap_or((url, ""));
    let (_, query) = url.split_once('?').unwrap_or_default();
    query.split('&').map(name_and_value)
}

fn name_and_value(option: &str) -> (String, String) {
    let decode = |text| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let (name, value) = option.split_once('=').unwrap_or((option, ""));
    (decode(name), decode(value))
}

/// The value of an option of the url.
pub(crate) fn option(url: &str, name: &str) -> Option<String> {
    let found = options(url).find(|(it, _)| it == name);
    found.map(|(_, value)| value)
}

/// Whether the url, or an option that was added to it, trusts whoever answers.
pub(crate) fn is_unverified(url: &str) -> bool {
    let no = ["false", "no", "off", "0"];
    option(url, DANGER).is_some_and(|value| !no.contains(&&*value.to_ascii_lowercase()))
}

/// Adds what the command line says to the url.
pub(crate) fn with_options(url: String, added: &[(&str, String)]) -> Result<String, String> {
    let (mut url, fragment) = match url.split_once('#') {
        Some((url, fragment)) => (url.to_owned(), format!("#{fragment}")),
        None => (url, String::new()),
    };
    for (name, value) in added {
        if let Some(said) = option(&url, name) {
            if said != *value {
                let flag = name.replace('_', "-");
                return Err(format!("--{flag} and the option {name} of the url differ"));
            }
            continue;
        }
        let begin = if url.contains('?') { '&' } else { '?' };
        let value = utf8_percent_encode(value, NON_ALPHANUMERIC);
        url += &format!("{begin}{name}={value}");
    }
    Ok(url + &fragment)
}

/// Whether the url has a password: in its user part, as a parameter, or in a url that is a parameter, as that of a pooler.
/// When in doubt, it has.
pub(crate) fn has_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    // An `@` may also stand in a password that was not escaped, so the last one counts, wherever it is.
    let user = rest.rsplit_once('@').map_or("", |(user, _)| user);
    let in_user = user
        .split_once(':')
        .is_some_and(|(_, password)| !password.is_empty());
    // Whatever a `#` means to the store.
    let parts = rest.split(['?', '&', '#']);
    let in_query = parts.map(name_and_value).any(|(name, value)| {
        let is_one = name.to_ascii_lowercase().contains("pass") && !value.is_empty();
        is_one || value.contains("://") && has_password(&value)
    });
    in_user || in_query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_found() {
        for url in [
            "redis://:pw@h/",
            "redis://me:pw@h/",
            "rediss://me:p/w@h/",
            "redis+cluster://me:pw@a:1,b:2/",
            "redis+sentinel://h/service?sentinel_user=u&sentinel_password=pw",
            "redis+sentinel://h/service?sentinel%5Fpassword=pw",
            "unix:///run/redis.sock?user=me&pass=pw",
            "postgres://me:pw@h/db",
            "postgres://me@h/db?password=pw",
            "postgres://me@h/db#?password=pw",
            "redis://h/#password=pw",
            "postgres://me@h/db?pooled=postgres%3A%2F%2Fme%3Apw%40h%2Fdb",
            "postgres://me@h/db?name=a&pooled=postgres://h/db%3Fuser=me%26password=pw",
        ] {
            assert!(has_password(url), "{url}");
            let error = find(Some(url), None, None).unwrap_err();
            assert!(!error.contains("pw"), "{error}");
        }
    }

    #[test]
    fn urls_without_a_password_are_taken() {
        for url in [
            "redis://127.0.0.1:6379/0",
            "redis://me@h/",
            "redis://me:@h/",
            "redis+cluster://a:1,b:2/",
            "unix:///run/redis.sock?db=1",
            "postgres://me@h:5432/db?sslmode=disable",
            "postgres://me@h/db?pooled=postgres%3A%2F%2Fme%40pooler%3A6432%2Fdb",
        ] {
            assert_eq!(find(Some(url), None, None).as_deref(), Ok(url));
        }
    }

    #[test]
    fn options_are_added_and_found() {
        let add =
            |url: &str, value: &str| with_options(url.to_owned(), &[("ca_file", value.to_owned())]);
        for url in [
            "redis://h",
            "redis://h/?name=x",
            "redis+sentinel://h/s?prefix=a%26b",
        ] {
            let added = add(url, "/a b&c=%2F?#").unwrap();
            assert!(added.starts_with(url), "{added}");
            assert_eq!(option(&added, "ca_file").as_deref(), Some("/a b&c=%2F?#"));
            // The same again is no contradiction.
            assert_eq!(add(&added, "/a b&c=%2F?#"), Ok(added.clone()));
            let refused = add(&added, "/other").unwrap_err();
            assert_eq!(
                refused,
                "--ca-file and the option ca_file of the url differ"
            );
        }
        assert_eq!(
            add("redis://h#x", "a").as_deref(),
            Ok("redis://h?ca_file=a#x")
        );
        assert_eq!(
            option("redis+sentinel://h/s?prefix=a%26b", "prefix").as_deref(),
            Some("a&b")
        );
        assert!(is_unverified(
            "rediss://h?danger_accept_invalid_certificates=true"
        ));
        assert!(!is_unverified(
            "rediss://h?danger_accept_invalid_certificates=False"
        ));
    }

    #[test]
    fn the_option_goes_before_the_file_and_the_file_before_the_variable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("url");
        std::fs::write(&path, "redis://file/\n").unwrap();
        let variable = || Some(OsString::from("redis://variable/"));
        let found = find(Some("redis://option/"), Some(&path), variable());
        assert_eq!(found.as_deref(), Ok("redis://option/"));
        let found = find(None, Some(&path), variable());
        assert_eq!(found.as_deref(), Ok("redis://file/"));
        assert_eq!(
            find(None, None, variable()).as_deref(),
            Ok("redis://variable/")
        );
        assert!(
            find(None, None, None)
                .unwrap_err()
                .starts_with("no store: ")
        );
        std::fs::write(&path, "\n").unwrap();
        assert!(find(None, Some(&path), None).is_err());
    }
}
