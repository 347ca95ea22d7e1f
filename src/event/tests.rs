use proptest::prelude::*;

use super::*;

fn of(payload: impl AsRef<[u8]>) -> Fingerprint {
    Fingerprint::of(None, None, None, payload.as_ref())
}

#[test]
fn t72_a_key_that_is_there_twice_counts_twice() {
    let twice = of(r#"{"amount": 1, "b": 0, "amount": 2}"#);
    assert_ne!(twice, of(r#"{"amount": 2, "b": 0}"#), "which of the two counts is the reader's choice");
    assert_ne!(twice, of(r#"{"amount": 3, "b": 0, "amount": 2}"#));
    assert_ne!(twice, of(r#"{"amount": 2, "b": 0, "amount": 1}"#));
    assert_eq!(twice, of(r#"{"b":0,"amount":1,"amount":2}"#));
}

#[test]
fn white_space_key_order_and_escapes_do_not_matter() {
    let wanted = of(r#"{"a":[1,{"b":"é\n"}],"c":null}"#);
    for same in [
        " {\n\"c\" : null , \"a\":[ 1 ,{ \"b\" :\"\\u00e9\\u000A\"} ] }\t",
        r#"{"\u0063":null,"a":[1,{"b":"é\n"}]}"#,
    ] {
        assert_eq!(of(same), wanted, "{same}");
    }
    for other in [
        r#"{"a":[{"b":"é\n"},1],"c":null}"#,
        r#"{"a":[1,{"b":"é"}],"c":null}"#,
        r#"{"a":[1,{"b":"é\n"}]}"#,
        r#"{"a":["1",{"b":"é\n"}],"c":null}"#,
    ] {
        assert_ne!(of(other), wanted, "{other}");
    }
}

#[test]
fn numbers_count_as_they_are_written() {
    let numbers = [
        "1",
        "1.0",
        "1e0",
        "-0",
        "0",
        "9007199254740993",
        "9007199254740992",
        "123456789012345678901234567890",
        "1e400",
    ];
    for (n, a) in numbers.iter().enumerate() {
        for b in &numbers[n + 1..] {
            assert_ne!(of(format!("[{a}]")), of(format!("[{b}]")), "{a} {b}");
        }
    }
}

#[test]
fn what_is_not_json_counts_as_its_bytes() {
    for (a, b) in [("a b", "a  b"), ("{\"a\":1", "{\"a\": 1"), ("", " "), ("{} {}", "{}{}")] {
        assert_ne!(of(a), of(b));
    }
    assert_ne!(of([0xff]), of([0xfe]));
    assert_ne!(of("\"1\""), of("1"));
}

#[test]
fn deep_json_counts_as_its_bytes_and_overflows_no_stack() {
    let nested = |depth: usize, inner: &str| format!("{}{inner}{}", "[".repeat(depth), "]".repeat(depth));
    assert_eq!(of(nested(100, "1")), of(nested(100, " 1 ")));
    assert_ne!(of(nested(200, "1")), of(nested(200, " 1 ")), "deeper than 128: bytes");
    let brackets_in_strings = format!("[\"{}\\\"{}\", 1]", "[".repeat(200), "{".repeat(200));
    assert_eq!(of(&brackets_in_strings), of(brackets_in_strings.replace(", 1", ",1")));
    for depth in [1000, 100_000] {
        let _ = of(nested(depth, "1"));
        let _ = of("[".repeat(depth));
        let _ = of("{\"a\":".repeat(depth));
        let _ = of(format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth)));
    }
}

#[test]
fn every_part_counts_and_parts_do_not_run_together() {
    let kind = |text: &str| Kind::new(text).unwrap();
    let aggregate = |text: &str| Aggregate::new(text).unwrap();
    let all = [
        Fingerprint::of(None, None, None, b"x"),
        Fingerprint::of(Some(&kind("x")), None, None, b""),
        Fingerprint::of(None, Some(&aggregate("x")), None, b""),
        Fingerprint::of(Some(&kind("ab")), Some(&aggregate("c")), None, b""),
        Fingerprint::of(Some(&kind("a")), Some(&aggregate("bc")), None, b""),
        Fingerprint::of(None, None, Some(0), b""),
        Fingerprint::of(None, None, Some(1), b""),
        Fingerprint::of(None, None, None, b""),
    ];
    let distinct: std::collections::HashSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
}

#[test]
fn time_headers_and_origin_are_no_part_of_it() {
    let event = Event::new(EventId::new("e").unwrap()).payload("{}");
    let other = event
        .clone()
        .time(Time::from_micros(1))
        .tenant(Tenant::new("t").unwrap())
        .origin(Origin::new(Topic::new("t").unwrap(), 1, 2));
    assert_eq!(event.fingerprint(), other.fingerprint());
}

#[test]
fn traceparent_is_read_and_printed() {
    let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert_eq!(TraceContext::parse(text.as_bytes()).unwrap().to_string(), text);
    for bad in [
        "",
        "00",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    ] {
        assert!(TraceContext::parse(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(TraceContext::parse(b"\xff").is_err());
    let newer = format!("cc{}-what-comes-later", &text[2..]);
    assert!(TraceContext::parse(newer.as_bytes()).is_ok(), "a newer version may have more");
}

#[test]
fn a_broken_traceparent_does_not_break_the_event() {
    let headers: Headers = [("ce_id", "e"), ("traceparent", "nonsense")]
        .map(|(name, value)| (name, value.as_bytes().to_vec()))
        .into_iter()
        .collect();
    let event = Event::from_record(&IdChain::default(), headers, "{}", None).unwrap();
    assert_eq!((event.trace, event.id), (None, EventId::new("e").unwrap()));
}

#[test]
fn headers_may_repeat_and_the_first_counts() {
    let headers: Headers = [("a", "1"), ("a", "2"), ("A", "3")]
        .map(|(name, value)| (name, value.as_bytes().to_vec()))
        .into_iter()
        .collect();
    assert_eq!(headers.get("a"), Some(&b"1"[..]));
    assert_eq!(headers.get("A"), Some(&b"3"[..]));
    assert_eq!(headers.iter().count(), 3);
}

/// Any JSON, small enough to be printed in two ways.
fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        "\\PC{0,8}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::vec(("\\PC{0,4}", inner), 0..4)
                .prop_map(|pairs| serde_json::Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn printing_does_not_change_it(value in json()) {
        prop_assert_eq!(of(value.to_string()), of(serde_json::to_string_pretty(&value).unwrap()));
    }

    #[test]
    fn other_json_is_another(a in json(), b in json()) {
        prop_assert_eq!(of(a.to_string()) == of(b.to_string()), a == b);
    }

    #[test]
    fn no_bytes_make_it_panic(payload: Vec<u8>) {
        let _ = of(payload);
    }
}
