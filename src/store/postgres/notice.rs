//! What a registry is told by a notification.

use std::time::Duration;

use super::call::read_mode;
use crate::base::limits::TTL;
use crate::base::token::is_epoch;
use crate::store::contract::{Grant, Owner, StoreEvent};

/// Reads `1 <owner> <mode> <ttl> <epoch> <time> <key>`, with a `2` in front if more tickets may fit (M4), or `f <key>` for
/// a lock that is free. Times are in µs. Nothing if it is in another format, or for another registry.
pub(super) fn read(prefix: &str, instance: &str, payload: &str) -> Vec<StoreEvent> {
    parse(prefix, instance, payload).unwrap_or_default()
}

fn parse(prefix: &str, instance: &str, payload: &str) -> Option<Vec<StoreEvent>> {
    let own = |name: &str| Some(name.strip_prefix(prefix)?.strip_prefix(':')?.into());
    let (format, rest) = payload.split_once(' ')?;
    if format == "f" {
        return Some(vec![StoreEvent::Freed { key: own(rest)? }]);
    }
    // The key comes last, since it may hold spaces.
    let mut fields = rest.splitn(6, ' ');
    let (named, sequence) = fields.next()?.rsplit_once(':')?;
    let owner = Owner {
        mode: read_mode(fields.next()?)?,
        sequence: sequence.parse().ok()?,
    };
    let ttl = Duration::from_micros(fields.next()?.parse().ok()?);
    let epoch = fields.next()?.parse().ok()?;
    let at = fields.next()?.parse().ok()?;
    let key: std::sync::Arc<str> = own(fields.next()?)?;
    // Else no ticket of ours asked for that.
    if !["1", "2"].contains(&format) || named != instance || ttl > *TTL.end() || !is_epoch(epoch) {
        return None;
    }
    let grant = Grant {
        owner,
        ttl,
        epoch,
        at,
    };
    let mut events = vec![StoreEvent::Granted {
        key: key.clone(),
        grant,
    }];
    events.extend((format == "2").then_some(StoreEvent::Unserved { key, owner }));
    Some(events)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::Mode;

    #[test]
    fn a_grant_is_read_and_one_for_others_is_not() {
        let text = "2 web~1a:7 2/8 1500000 1795506102363745 1795506102363746 lock:two words";
        let events = read("lock", "web~1a", text);
        let [
            StoreEvent::Granted { key, grant },
            StoreEvent::Unserved { .. },
        ] = &events[..]
        else {
            panic!("{events:?}");
        };
        assert_eq!((&**key, grant.owner.sequence), ("two words", 7));
        assert_eq!(
            grant.owner.mode,
            Mode::Permits {
                limit: 8,
                weight: 2
            }
        );
        assert_eq!(
            (grant.ttl, grant.epoch),
            (Duration::from_millis(1500), 1_795_506_102_363_745)
        );
        assert!(
            read("lock", "web~1b", text).is_empty(),
            "another registry's"
        );
        assert!(read("jobs", "web~1a", text).is_empty(), "another prefix");
        let freed = read("lock", "a", "f lock:k");
        assert!(matches!(&freed[..], [StoreEvent::Freed { key }] if &**key == "k"));
        for other in [
            "",
            "1",
            "probe 1",
            "3 a:1 x 1 1 1 lock:k",
            "1 a:1 x 999999999999999 5 5 lock:k",
            "1 a:1 x 1 0 1 k",
        ] {
            assert!(read("lock", "a", other).is_empty(), "{other}");
        }
    }

    proptest! {
        #[test]
        fn nothing_like_a_notice_panics(text in "(1|2|f| |a:1|x|r|1/2|[0-9]{1,19}|lock:|\\PC){0,14}") {
            read("lock", "a", &text);
        }
    }
}
