//! What is published to a registry's channel.

use std::sync::Arc;
use std::time::Duration;

use super::keys::Names;
use crate::settings::TTL;
use crate::store::contract::{Grant, Owner};
use crate::token::is_epoch;

/// The format of grants that we understand; the one that `script.lua` writes.
const FORMAT: &str = "1";

/// What our own probe's message begins with; no number, so no format of a grant.
const PROBE: &str = "probe";

/// A message to our channel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    Granted {
        key: Arc<str>,
        grant: Grant,
    },
    /// A lock that we listened for is free.
    Freed {
        key: Arc<str>,
    },
    /// The nonce of a probe.
    Probe(&'a str),
}

/// What a notice begins with; no number, so no format of a grant.
const FREED: &str = "freed";

/// Reads a message: `1 <owner> <ttl in ms> <epoch> <server time> <key>`, `freed <key>`, or
/// `probe <nonce>`. `None` if it is in another format, for another instance, or no message of ours at all.
pub(super) fn read<'a>(names: &Names, payload: &'a [u8]) -> Option<Message<'a>> {
    let text = std::str::from_utf8(payload).ok()?;
    let fields = match text.split_once(' ')? {
        (PROBE, nonce) => return Some(Message::Probe(nonce)),
        (FREED, key) => return Some(Message::Freed { key: key.into() }),
        (FORMAT, fields) => fields,
        _ => return None,
    };
    // The key comes last, since it may hold spaces.
    let mut fields = fields.splitn(5, ' ');
    let (instance, sequence) = fields.next()?.rsplit_once(':')?;
    let owner = Owner(sequence.parse().ok()?);
    let ttl = Duration::from_millis(fields.next()?.parse().ok()?);
    let epoch = fields.next()?.parse().ok()?;
    let at = fields.next()?.parse().ok()?;
    let key = fields.next()?.into();
    let grant = Grant {
        owner,
        ttl,
        epoch,
        at,
    };
    // Else no ticket of ours asked for that, or no fence of ours said it.
    let is_ours = instance == names.instance() && ttl <= *TTL.end() && is_epoch(epoch);
    is_ours.then_some(Message::Granted { key, grant })
}

/// The message that a probe publishes.
pub(super) fn probe(nonce: &str) -> String {
    format!("{PROBE} {nonce}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names() -> Names {
        Names::new("lock".into(), "ab12".into())
    }

    #[test]
    fn a_grant_is_read_whatever_its_key() {
        let payload = b"1 ab12:7 30000 1795257942885244 1795257942885243 order 42: \"a\"";
        let Some(Message::Granted { key, grant }) = read(&names(), payload) else {
            panic!("not read")
        };
        assert_eq!(&*key, "order 42: \"a\"");
        assert_eq!(grant.owner, Owner(7));
        assert_eq!(grant.ttl, Duration::from_secs(30));
        assert_eq!(grant.epoch, 1_795_257_942_885_244);
        assert_eq!(grant.at, 1_795_257_942_885_243);
    }

    #[test]
    fn another_format_and_another_instance_are_not_ours() {
        assert_eq!(read(&names(), b"2 ab12:7 30000 1 1 k"), None);
        assert_eq!(read(&names(), b"1 ab13:7 30000 1 1 k"), None);
        assert_eq!(read(&names(), b"1 ab12:7 30000 1 1"), None);
        assert_eq!(read(&names(), b""), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&names(), &bytes);
        }

        #[test]
        fn a_grant_names_no_more_than_a_ticket_asks_for(ttl in prop_oneof![0..90_000_000_u64, any::<u64>()], epoch in prop_oneof![0..u64::MAX / 64, any::<u64>()], at in any::<u64>()) {
            let text = format!("1 ab12:7 {ttl} {epoch} {at} k");
            let fits = ttl <= 86_400_000 && epoch <= i64::MAX as u64 / 64;
            prop_assert_eq!(read(&names(), text.as_bytes()).is_some(), fits);
        }

        #[test]
        fn nothing_like_a_grant_panics(text in "(1|2|freed|probe)( (ab12|x)?:?[0-9a-f-]{0,25}){0,7}") {
            let _ = read(&names(), text.as_bytes());
        }
    }
}
