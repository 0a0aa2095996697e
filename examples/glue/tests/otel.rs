//! What the example exports is what has happened.

use std::process::Command;

/// The value of a line `name : value` in what was printed of a span or a metric.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    let mut lines = text.lines().map(str::trim);
    let value = lines.find_map(|line| {
        let (found, value) = line.strip_prefix("->").unwrap_or(line).split_once(':')?;
        (found.trim() == name).then_some(value.trim())
    });
    value.unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
fn spans_and_metrics_come_out_of_opentelemetry() {
    let output = Command::new(env!("CARGO_BIN_EXE_otel")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let (spans, metrics) = printed
        .split_once("\nMetrics\n")
        .expect("both are exported");

    // Each is printed when it ends. Its name is the second: the first is the instrumentation's.
    let spans = spans.split("\nSpan #0\n").skip(1).map(|span| {
        let (_, span) = span.split_once("\n\n").expect("a scope, and the span");
        (field(span, "Name"), span)
    });
    let spans: Vec<(&str, &str)> = spans.collect();
    let named = |name: &str| -> Vec<&str> {
        let all = spans.iter().filter(|(found, _)| *found == name);
        all.map(|(_, span)| *span).collect()
    };
    assert_eq!(named("checkout").len(), 3, "{printed}");
    assert_eq!(named("charge").len(), 3, "{printed}");
    assert_eq!(named("lock").len(), 4, "one was lost: {printed}");
    // The lock's span stands between the caller's and that of its work, in one trace.
    for charge in named("charge") {
        let with_id = |id: &str| {
            let mut all = spans.iter().map(|(_, span)| *span);
            all.find(|span| field(span, "SpanId") == id)
                .unwrap_or_else(|| panic!("no span {id} in\n{printed}"))
        };
        let lock = with_id(field(charge, "ParentSpanId"));
        assert_eq!(field(lock, "Name"), "lock");
        assert!(field(lock, "key").contains("\"till\""), "{lock}");
        let checkout = with_id(field(lock, "ParentSpanId"));
        assert_eq!(field(checkout, "Name"), "checkout");
        assert_eq!(field(checkout, "TraceId"), field(charge, "TraceId"));
        assert_eq!(field(checkout, "order"), field(charge, "order"));
    }
    let mut tokens: Vec<&str> = named("lock")
        .iter()
        .map(|lock| field(lock, "token"))
        .collect();
    tokens.dedup();
    assert_eq!(tokens.len(), 4, "each has a token of its own: {printed}");

    let metric = |name: &str| {
        let mut all = metrics.split("\nMetric #").skip(1);
        let found = all.find(|metric| field(metric, "Name") == name);
        found.unwrap_or_else(|| panic!("no {name} in\n{metrics}"))
    };
    for (name, value) in [
        ("lockstream_acquired_total", "4"),
        ("lockstream_lost_total", "1"),
        ("lockstream_held", "0.0"),
        ("lockstream_waiting", "0.0"),
    ] {
        assert_eq!(field(metric(name), "Value"), value, "{name}");
        assert_eq!(field(metric(name), "prefix"), "shop", "{name}");
    }
    for name in ["lockstream_wait_seconds", "lockstream_hold_seconds"] {
        assert_eq!(field(metric(name), "Count"), "4");
        assert_eq!(field(metric(name), "Unit"), "s");
        assert!(metric(name).contains("0.025 to 0.1"), "{}", metric(name));
    }
    // All three are there in one poll, so the last one waits for all the 20 ms of the one before it.
    let longest: f64 = field(metric("lockstream_wait_seconds"), "Max")
        .parse()
        .unwrap();
    assert!(longest >= 0.02, "{longest}");
    assert!(!field(metric("lockstream_held"), "Description").is_empty());
}
