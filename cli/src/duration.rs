//! Times on the command line: `500ms`, `30s`, `5m`, `1h30m`, `2d`, or a number of seconds.

use std::time::Duration;

const EXPECTED: &str = "expected a time such as 500ms, 30s, 5m, 1h30m or 2d";

/// Reads a time.
pub(crate) fn parse(text: &str) -> Result<Duration, &'static str> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, after) = rest.split_at(digits);
        let letters = after.len()
            - after
                .trim_start_matches(|c: char| c.is_ascii_alphabetic())
                .len();
        let (unit, after) = after.split_at(letters);
        let number: u64 = number.parse().map_err(|_| EXPECTED)?;
        let unit = match unit {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(60 * 60),
            "d" => Duration::from_secs(24 * 60 * 60),
            _ => return Err(EXPECTED),
        };
        let part = u32::try_from(number)
            .ok()
            .and_then(|number| unit.checked_mul(number));
        total = part
            .and_then(|part| total.checked_add(part))
            .ok_or("too long")?;
        rest = after;
    }
    if text.is_empty() {
        Err(EXPECTED)
    } else {
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, millis) in [
            ("0", 0),
            ("30", 30_000),
            ("500ms", 500),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in [
            "",
            "s",
            "-1",
            "1.5s",
            "5 s",
            "5x",
            "1h30",
            "99999999999s",
            "5S",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
