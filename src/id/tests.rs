use std::collections::HashSet;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::event::{Headers, Origin};
use crate::ledger::Identity;

fn id(text: &str) -> EventId {
    EventId::new(text).unwrap()
}

#[test]
fn names_are_counted_in_characters() {
    for c in ["x", "ü", "🦀"] {
        assert!(EventId::new(c.repeat(255)).is_ok(), "255 × {c}");
        let error = EventId::new(c.repeat(256)).unwrap_err().to_string();
        assert!(error.contains("256") && error.contains("255"), "{error}");
        assert!(Scope::new(c.repeat(255)).is_ok());
        assert!(Scope::new(c.repeat(256)).is_err());
    }
}

#[test]
fn blank_and_nul_are_refused_with_a_sentence() {
    for (text, says) in [("", "empty"), (" ", "blank"), ("\t\n\u{a0}\u{3000}", "blank"), ("a\0b", "byte 1")] {
        for (what, error) in [
            ("event id", EventId::new(text).err()),
            ("scope", Scope::new(text).err()),
            ("tenant", Tenant::new(text).err()),
            ("kind", Kind::new(text).err()),
            ("topic", Topic::new(text).err()),
            ("owner", Owner::new(text).err()),
            ("aggregate", Aggregate::new(text).err()),
        ] {
            let error = error.unwrap().to_string();
            assert!(error.starts_with(what) && error.contains(says), "{error}");
        }
    }
}

#[test]
fn t88_any_other_text_is_an_id_and_prints_as_itself() {
    for (text, printed) in [
        ("DOM\\user-17", "DOM\\user-17"),
        ("e\u{301}te\u{301}", "e\u{301}te\u{301}"),
        ("🦀", "🦀"),
        ("it's \"x\"", "it's \"x\""),
        ("a\nb", "a\\nb"),
        ("\u{1b}[2J", "\\u{1b}[2J"),
        ("\u{202e}evil", "\\u{202e}evil"),
        (" x ", " x "),
    ] {
        assert_eq!(id(text).as_str(), text);
        // The stored text is the id: parsing it gives the same id.
        assert_eq!(id(text).to_string(), text);
        assert_eq!(id(text).to_string().parse::<EventId>().unwrap(), id(text));
        assert_eq!(Scope::new(text).unwrap().to_string(), text);
        // In messages and logs, nothing can hide.
        assert_eq!(Visible(text).to_string(), printed);
        assert_eq!(format!("{:?}", id(text)), format!("EventId({printed})"));
        assert_eq!(Identity::new(Scope::new("s").unwrap(), id(text)).to_string(), format!("s/{printed}"));
    }
}

#[test]
fn only_the_canonical_text_of_a_uuid_is_that_uuid() {
    let text = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
    assert_eq!(id(text).key().len(), 16);
    for other in [
        text.to_uppercase(),
        text.replace('-', ""),
        format!("{{{text}}}"),
        format!("urn:uuid:{text}"),
        text.replace("5b7e-", "5b7e_"),
        format!("{}g", &text[..35]),
    ] {
        assert_eq!(id(&other).as_uuid(), None, "{other}");
        assert_ne!(id(&other), id(text));
        assert_eq!(id(&other).as_str(), other);
    }
}

#[test]
fn a_text_of_sixteen_bytes_is_not_a_uuid() {
    let uuid = Uuid::from_bytes(*b"0123456789abcdef");
    let text = id("0123456789abcdef");
    assert_ne!(EventId::from(uuid).key(), text.key());
    assert_eq!(EventId::from_key(&text.key()).unwrap(), text);
    assert_eq!(EventId::from_key(uuid.as_bytes()).unwrap(), EventId::from(uuid));
}

#[test]
fn a_key_that_is_no_id_is_corrupt() {
    for key in [&b""[..], b" ", b"a\0b", b"\xff\xfe", &[b'x'; 256]] {
        assert_eq!(EventId::from_key(key).unwrap_err().code(), "corrupt", "{key:?}");
    }
}

#[test]
fn v7_time_is_read_and_nothing_else_is() {
    assert_eq!(id("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10").v7_millis(), Some(0x0190_d3a0_5b7e));
    assert_eq!(id("0190d3a0-5b7e-4c3a-9f51-2f6f1f3b7c10").v7_millis(), None, "version 4");
    assert_eq!(id("0190d3a0-5b7e-7c3a-cf51-2f6f1f3b7c10").v7_millis(), None, "another variant");
    assert_eq!(id("0190D3A0-5B7E-7C3A-9F51-2F6F1F3B7C10").v7_millis(), None, "a text");
}

#[test]
fn t08_v7_ids_rise_within_a_millisecond() {
    let one: Vec<_> = (0..10_000).map(|_| EventId::now_v7()).collect();
    assert!(one.is_sorted_by(|a, b| a < b));
    let threads: Vec<_> = (0..4)
        .map(|_| std::thread::spawn(|| (0..10_000).map(|_| EventId::now_v7()).collect::<Vec<_>>()))
        .collect();
    let mut all = HashSet::new();
    for thread in threads {
        let ids = thread.join().unwrap();
        assert!(ids.is_sorted_by(|a, b| a < b), "each thread sees rising ids");
        all.extend(ids);
    }
    assert_eq!(all.len(), 40_000);
    assert!(EventId::now_v7() > *all.iter().max().unwrap(), "what is made later is higher, whoever made it");
}

#[test]
fn derived_ids_follow_from_their_parts() {
    let (space, other) = (id("invoices"), id("orders"));
    let once = EventId::derived(&space, ["a", "b"]);
    assert_eq!(once, EventId::derived(&space, ["a", "b"]));
    for different in [
        EventId::derived(&space, ["ab"]),
        EventId::derived(&space, ["a", "b", ""]),
        EventId::derived(&space, ["", "ab"]),
        EventId::derived(&space, ["b", "a"]),
        EventId::derived(&other, ["a", "b"]),
        EventId::derived(&space, [""; 0]),
    ] {
        assert_ne!(once, different);
    }
    assert_eq!(once.as_uuid().unwrap().get_version_num(), 5);
}

fn origin() -> Origin {
    Origin::new(Topic::new("orders").unwrap(), 3, 17)
}

fn headers(pairs: &[(&str, &str)]) -> Headers {
    pairs.iter().map(|(name, value)| (*name, value.as_bytes().to_vec())).collect()
}

#[test]
fn the_default_chain_has_its_order() {
    let chain = IdChain::default();
    let payload = Bytes::from_static(br#"{"event_id": "p2", "eventId": 7}"#);
    let mut pairs = vec![("ce_id", "h3"), ("eventId", "h2"), ("idempotency_key", "h1")];
    for wanted in ["h1", "h2", "h3", "7"] {
        assert_eq!(chain.find(&headers(&pairs), &payload, Some(&origin())).unwrap(), id(wanted));
        pairs.pop();
    }
    let payload = Bytes::from_static(br#"{"event_id": "p2", "eventId": null}"#);
    assert_eq!(chain.find(&headers(&[]), &payload, None).unwrap(), id("p2"));
}

#[test]
fn no_id_is_an_error_and_never_the_offset_unless_asked() {
    for payload in ["", "{}", "not json", "[1]"] {
        let payload = Bytes::from_static(payload.as_bytes());
        let error = IdChain::default().find(&headers(&[]), &payload, Some(&origin())).unwrap_err();
        assert!(error.to_string().contains("idempotency_key"), "{error}");
        let chain = IdChain::new([IdSource::Offset]).unwrap();
        assert_eq!(chain.find(&headers(&[]), &payload, Some(&origin())).unwrap(), id("orders-3-17"));
        assert!(chain.find(&headers(&[]), &payload, None).is_err());
    }
}

#[test]
fn an_id_that_is_there_but_invalid_is_an_error() {
    let payload = Bytes::from_static(br#"{"eventId": "fine"}"#);
    for bad in ["", " ", "a\0b"] {
        assert!(IdChain::default().find(&headers(&[("ce_id", bad)]), &payload, None).is_err(), "{bad:?}");
    }
    let not_text: Headers = [("ce_id", vec![0xff])].into_iter().collect();
    assert!(IdChain::default().find(&not_text, &payload, None).is_err());
    for payload in [r#"{"eventId": {}}"#, r#"{"eventId": []}"#, r#"{"eventId": true}"#, r#"{"eventId": ""}"#]
    {
        let payload = Bytes::from_static(payload.as_bytes());
        assert!(IdChain::default().find(&headers(&[]), &payload, None).is_err(), "{payload:?}");
    }
}

#[test]
fn content_hash_is_of_the_bytes() {
    let chain = IdChain::new([IdSource::ContentHash]).unwrap();
    let of = |payload: &'static str| chain.find(&headers(&[]), &Bytes::from_static(payload.as_bytes()), None);
    assert_eq!(
        of("").unwrap(),
        id("sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    );
    assert_ne!(of("{ }").unwrap(), of("{}").unwrap());
}

#[test]
fn a_chain_needs_sensible_ways() {
    assert!(IdChain::new([]).is_err());
    assert!(IdChain::new([IdSource::Pointer("eventId".into())]).is_err());
    assert!(IdChain::new([IdSource::Header(String::new())]).is_err());
}

#[test]
fn acceptance_7_aggregate_ids_never_collide() {
    let alike = [
        "order",
        "Order",
        " order",
        "order ",
        "order%20",
        "order/1",
        "order%2F1",
        "órder",
        "o\u{301}rder",
        "order+",
    ];
    let keys: HashSet<_> = alike.iter().map(|text| Aggregate::new(text).unwrap().key()).collect();
    assert_eq!(keys.len(), alike.len());
}

proptest! {
    #[test]
    fn keys_are_injective_and_come_back(a in "\\PC{1,20}|[0-9a-f]{16}", b in "\\PC{1,20}|[0-9a-f]{16}") {
        prop_assume!(!a.trim().is_empty() && !b.trim().is_empty());
        let (x, y) = (id(&a), id(&b));
        prop_assert_eq!(EventId::from_key(&x.key()).unwrap(), x.clone());
        prop_assert_eq!(x.key() == y.key(), a == b);
        prop_assert_eq!(x == y, a == b);
    }

    #[test]
    fn uuid_keys_come_back(bytes: [u8; 16]) {
        let uuid = EventId::from(Uuid::from_bytes(bytes));
        prop_assert_eq!(EventId::from_key(&uuid.key()).unwrap(), uuid.clone());
        prop_assert_eq!(id(&uuid.as_str()), uuid);
    }

    #[test]
    fn aggregate_keys_are_injective(a in "[ -~ü%]{1,8}", b in "[ -~ü%]{1,8}") {
        prop_assume!(!a.trim().is_empty() && !b.trim().is_empty());
        let (x, y) = (Aggregate::new(&a).unwrap().key(), Aggregate::new(&b).unwrap().key());
        prop_assert_eq!(x == y, a == b);
        prop_assert!(x.bytes().all(|b| b.is_ascii_alphanumeric() || b"._~-%".contains(&b)));
    }

    #[test]
    fn no_text_makes_a_chain_panic(payload: Vec<u8>, header: Vec<u8>) {
        let headers: Headers = [("ce_id", header)].into_iter().collect();
        let _ = IdChain::default().find(&headers, &payload.into(), None);
    }
}
