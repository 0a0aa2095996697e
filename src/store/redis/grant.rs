//! What is published to a registry's channel.

use std::sync::Arc;
use std::time::Duration;

use super::call::read_mode;
use super::keys::Names;
use crate::base::Mode;
use crate::base::limits::TTL;
use crate::base::token::is_epoch;
use crate::store::contract::{Grant, Owner, StoreEvent};

/// The formats of grants that we understand, as `script.lua` writes them: for an exclusive ticket, for a shared one,
/// and for a shared one behind which more may fit (M4).
const FORMATS: [&str; 3] = ["1", "2", "3"];

/// What our own probe's message begins with; no number, so no format of a grant.
const PROBE: &str = "probe";

/// A message to our channel.
#[derive(Debug)]
pub(super) enum Message<'a> {
    /// A grant, and perhaps that more may fit; or that a lock that we listened for is free.
    Events(Vec<StoreEvent>),
    /// The nonce of a probe.
    Probe(&'a str),
}

/// What a notice begins with; no number, so no format of a grant.
const FREED: &str = "freed";

/// Reads a message: `1 <owner> <ttl in ms> <epoch> <server time> <key>`, `2` or `3` with the mode after the ttl,
/// `freed <key>`, or `probe <nonce>`. `None` if it is in another format, for another instance, or no message of ours at all.
pub(super) fn read<'a>(names: &Names, payload: &'a [u8]) -> Option<Message<'a>> {
    let text = std::str::from_utf8(payload).ok()?;
    let (format, fields) = match text.split_once(' ')? {
        (PROBE, nonce) => return Some(Message::Probe(nonce)),
        (FREED, key) => {
            let key = key.into();
            return Some(Message::Events(vec![StoreEvent::Freed { key }]));
        }
        (format, fields) if FORMATS.contains(&format) => (format, fields),
        _ => return None,
    };
    let is_shared = format != FORMATS[0];
    // The key comes last, since it may hold spaces.
    let mut fields = fields.splitn(5 + usize::from(is_shared), ' ');
    let (instance, sequence) = fields.next()?.rsplit_once(':')?;
    let ttl = Duration::from_millis(fields.next()?.parse().ok()?);
    let owner = Owner {
        sequence: sequence.parse().ok()?,
        mode: match is_shared {
            true => read_mode(fields.next()?)?,
            false => Mode::Exclusive,
        },
    };
    let epoch = fields.next()?.parse().ok()?;
    let at = fields.next()?.parse().ok()?;
    let key: Arc<str> = fields.next()?.into();
    let grant = Grant {
        owner,
        ttl,
        epoch,
        at,
    };
    // Else no ticket of ours asked for that, or no fence of ours said it.
    let is_ours = instance == names.instance() && ttl <= *TTL.end() && is_epoch(epoch);
    let unserved = (format == FORMATS[2]).then(|| StoreEvent::Unserved {
        key: key.clone(),
        owner,
    });
    let granted = StoreEvent::Granted { key, grant };
    is_ours.then(|| Message::Events([granted].into_iter().chain(unserved).collect()))
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
        let Some(Message::Events(events)) = read(&names(), payload) else {
            panic!("not read")
        };
        let [StoreEvent::Granted { key, grant }] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(&**key, "order 42: \"a\"");
        assert_eq!(grant.owner, Owner::exclusive(7));
        assert_eq!(grant.ttl, Duration::from_secs(30));
        assert_eq!(grant.epoch, 1_795_257_942_885_244);
        assert_eq!(grant.at, 1_795_257_942_885_243);
    }

    #[test]
    fn another_format_and_another_instance_are_not_ours() {
        for other in [
            "2 ab12:7 30000 1 1 k",
            "1 ab13:7 30000 1 1 k",
            "1 ab12:7 30000 1 1",
            "",
        ] {
            assert!(read(&names(), other.as_bytes()).is_none(), "{other}");
        }
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
