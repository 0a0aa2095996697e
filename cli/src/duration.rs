//! Times on the command line: `30`, `0.5`, `500ms`, `1.5s`, `5m`, `1h30m`, `2d`.

use std::time::Duration;

/// What a TIME is, for the help of each command that takes one.
macro_rules! times {
    () => {
        "A TIME is a number of seconds, such as 30, 1.5 or .5, or numbers \
         with the units ms, s, m, h and d, such as 500ms or \
         1h30m. The longest is 36500d, which is 100 years."
    };
}
pub(crate) use times;

const EXPECTED: &str = "expected a time such as 30, 0.5, 500ms, 1.5s, 5m, 1h30m or 2d";

/// Moments that are so far away can still be computed with.
const LONGEST: Duration = Duration::from_secs(36_500 * 24 * 60 * 60);

const UNITS: [(&str, f64); 5] = [
    ("ms", 0.001),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 60.0 * 60.0),
    ("d", 24.0 * 60.0 * 60.0),
];

/// Reads a time.
pub(crate) fn parse(text: &str) -> Result<Duration, &'static str> {
    if text.is_empty() {
        return Err(EXPECTED);
    }
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    if text.chars().all(is_of_number) {
        return multiply(text, 1.0);
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let (number, after) =
            rest.split_at(rest.len() - rest.trim_start_matches(is_of_number).len());
        let end = after.find(is_of_number).unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let unit = UNITS.iter().find(|(name, _)| *name == unit);
        let (_, seconds) = unit.ok_or(EXPECTED)?;
        total = check(total.checked_add(multiply(number, *seconds)?))?;
        rest = after;
    }
    Ok(total)
}

/// So many units of so many seconds.
fn multiply(number: &str, seconds: f64) -> Result<Duration, &'static str> {
    let number: f64 = number.parse().map_err(|_| EXPECTED)?;
    check(Duration::try_from_secs_f64(number * seconds).ok())
}

fn check(time: Option<Duration>) -> Result<Duration, &'static str> {
    time.filter(|time| *time <= LONGEST)
        .ok_or("too long: the longest time is 36500d")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, millis) in [
            ("0", 0),
            ("30", 30_000),
            ("1.5", 1_500),
            ("0.25", 250),
            (".5", 500),
            ("2.", 2_000),
            ("500ms", 500),
            ("30s", 30_000),
            ("1.5s", 1_500),
            (".5m", 30_000),
            ("1h30m", 5_400_000),
            ("1h0.5m", 3_630_000),
            ("2d", 172_800_000),
            ("14999ms", 14_999),
            ("36500d", 3_153_600_000_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in [
            "", ".", "s", "-1", "5 s", "5x", "1h30", "5S", "1.2.3", "1.s.", "1e3", "inf", "NaN",
            "+1", "5µs",
        ] {
            assert_eq!(parse(text), Err(EXPECTED), "{text:?}");
        }
    }

    /// Seconds, whether their unit is written or not, and every other unit: 4294967296 was read and 4294967296s was not.
    #[test]
    fn one_rule_says_what_is_too_long() {
        for (longest, longer) in [
            ("3153600000", "3153600001"),
            ("3153600000s", "3153600000.5s"),
            ("3153600000000ms", "3153600000001ms"),
            ("52560000m", "52560001m"),
            ("876000h", "876000h1s"),
            ("36500d", "99999999999999999999999999999999d"),
            ("36499d24h", "36499d24h1ms"),
        ] {
            assert_eq!(parse(longest), Ok(LONGEST), "{longest}");
            let refused = parse(longer).unwrap_err();
            assert!(refused.starts_with("too long"), "{longer}: {refused}");
        }
    }
}
