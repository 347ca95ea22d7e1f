//! What questions see.

use super::{ReadModelHarness, all, apply, at, block, change, module, orders, shown, tally, value};
use crate::analytics::{
    Change, Field, GROUPS_MAX, ListPage, Measure, ReadModel as _, Selection, Tally, Uuid,
};
use crate::records::LIST_BYTES_MAX;

fn field(pointer: &str) -> Field {
    Field::new(pointer).expect("a valid field")
}

/// One id in two tenants and two modules is four records.
pub async fn m4_tenants_and_modules_never_meet(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut changes = Vec::new();
    for tenant in 0..3_u128 {
        for slug in ["orders", "order", "orders_2"] {
            let json = format!(r#"{{"of":"{tenant}/{slug}","n":{}}}"#, tenant + 1);
            let one = change(7, 1 + u64::try_from(tenant).expect("small"), Some(&json));
            changes.push(Change { tenant: Uuid::from_u128(tenant), module: module(slug), ..one });
        }
    }
    // A deletion in one tenant, and a hostile payload in another.
    changes.push(Change { tenant: Uuid::from_u128(2), ..change(7, 9, None) });
    let hostile = r#"{"tenant":"00000000-0000-0000-0000-000000000000","of":"' OR 1=1 --","n":1e27}"#;
    changes.push(Change { tenant: Uuid::from_u128(3), ..change(8, 1, Some(hostile)) });
    apply(&model, block(changes)).await;
    let sum = Tally { measures: vec![Measure::Sum(field("/n"))], group_by: Some(field("/of")) };
    for tenant in 0..3_u128 {
        for slug in ["orders", "order", "orders_2"] {
            let of = Selection { tenant: Uuid::from_u128(tenant), module: module(slug), ..orders() };
            let gone = tenant == 2 && slug == "orders";
            let found = all(&model, &of, 10).await;
            assert_eq!(found.len(), usize::from(!gone), "{tenant} {slug}");
            let groups = model.tally(&of, &sum).await.expect("a tally").groups;
            assert_eq!(groups.len(), usize::from(!gone), "{tenant} {slug}");
            if let (Some(record), Some(group)) = (found.first(), groups.first()) {
                assert_eq!(value(&record.payload)["of"], format!("{tenant}/{slug}"));
                assert_eq!(group.measures[0].value.map(|v| v.to_string()), Some((tenant + 1).to_string()));
            }
        }
    }
    let version = model.version(Uuid::from_u128(1), &module("orders"), Uuid::from_u128(8)).await;
    assert_eq!(version.expect("none"), None, "the record of another tenant");
}

/// In the order of the bytes of ids, which is not that of every engine, page by page.
pub async fn m6_rows_are_ordered_and_paged(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let ids: Vec<u128> = (0..25).map(|n: u128| (n * 7919 % 25) << 64 | (n * 104_729 % 97) << 8 | n).collect();
    apply(&model, block(ids.iter().map(|&id| change(id + 1, 1, Some("{}"))))).await;
    apply(&model, block([change(ids[3] + 1, 2, None)])).await;
    let mut expected: Vec<u128> = ids.iter().map(|id| id + 1).filter(|id| *id != ids[3] + 1).collect();
    expected.sort_unstable();
    for limit in [1, 7, 24, 100] {
        let found: Vec<u128> =
            all(&model, &orders(), limit).await.iter().map(|record| record.id.as_u128()).collect();
        assert_eq!(found, expected, "in pages of {limit}");
    }
    let page = model.list(&orders(), ListPage::new(None, 24).expect("a limit")).await.expect("a page");
    assert_eq!(page.next, None, "nothing follows a page that has all");
}

/// A page ends with the row that reaches the limit of bytes.
pub async fn m6_a_page_of_large_rows_is_bounded(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let large = format!(r#"{{"text":"{}"}}"#, "x".repeat(800_000));
    for id in 1..=14 {
        apply(&model, block([change(id, 1, Some(&large))])).await;
    }
    let page = model.list(&orders(), ListPage::new(None, 100).expect("a limit")).await.expect("a page");
    assert_eq!(page.records.len(), LIST_BYTES_MAX.div_ceil(800_000 + 256 + 11));
    assert!(page.next.is_some());
    assert_eq!(all(&model, &orders(), 100).await.len(), 14);
}

/// Sums of decimals are exact. What is not a number that fits is counted apart.
pub async fn m7_sums_are_exact_and_what_is_no_number_is_left_out(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let amounts =
        ["0.1", "0.2", "-7.50", "12345678901234567890.123456789", "1e3", "\"9\"", "null", "true", "1e-30"];
    let changes =
        (1..).zip(amounts).map(|(id, amount)| change(id, 1, Some(&format!(r#"{{"a":{{"b":{amount}}}}}"#))));
    apply(&model, block(changes.chain([change(99, 1, Some("{}"))]))).await;
    let measures = vec![
        Measure::Sum(field("/a/b")),
        Measure::Min(field("/a/b")),
        Measure::Max(field("/a/b")),
        Measure::Sum(field("/missing")),
    ];
    let groups = tally(&model, &Tally { measures, group_by: None }).await;
    assert_eq!((groups.groups.len(), groups.more, groups.groups[0].count), (1, false, 10));
    let seen: Vec<_> =
        groups.groups[0].measures.iter().map(|m| (m.value.map(|v| v.to_string()), m.left_out)).collect();
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(
        seen,
        [
            (some("12345678901234568882.923456789"), 3),
            (some("-7.5"), 3),
            (some("12345678901234567890.123456789"), 3),
            (None, 0),
        ]
    );
}

/// The first groups are complete, and the answer says that there are more.
pub async fn m7_groups_are_ordered_and_complete(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let json = |n: usize| format!(r#"{{"g":"{:05}","n":1}}"#, n % (GROUPS_MAX + 5));
    let changes: Vec<_> =
        (0..2 * (GROUPS_MAX + 5)).map(|n| change(n as u128 + 1, 1, Some(&json(n)))).collect();
    apply(&model, block(changes)).await;
    let by = Tally { measures: vec![Measure::Sum(field("/n"))], group_by: Some(field("/g")) };
    let groups = tally(&model, &by).await;
    assert!(groups.more);
    assert_eq!(groups.groups.len(), GROUPS_MAX);
    for (n, group) in groups.groups.iter().enumerate() {
        assert_eq!((group.key.as_deref(), group.count), (Some(format!("\"{n:05}\"").as_str()), 2));
        assert_eq!(group.measures[0].value.map(|v| v.to_string()).as_deref(), Some("2"));
    }
    let other = Selection { module: module("other"), ..orders() };
    let changes = ["{}", r#"{"g":null}"#, r#"{"g":[1]}"#, r#"{"g":1}"#, r#"{"g":true}"#, r#"{"g":"1"}"#];
    let changes =
        (1..).zip(changes).map(|(id, json)| Change { module: module("other"), ..change(id, 1, Some(json)) });
    apply(&model, block(changes)).await;
    let by = Tally { measures: Vec::new(), group_by: Some(field("/g")) };
    let groups = model.tally(&other, &by).await.expect("a tally").groups;
    let seen: Vec<_> = groups.iter().map(|group| (group.key.as_deref(), group.count)).collect();
    assert_eq!(seen, [(None, 3), (Some("\"1\""), 1), (Some("1"), 1), (Some("true"), 1)]);
}

/// A record counts by the time of its current version.
pub async fn m8_since_looks_at_the_current_version(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let changes =
        [change(1, 5, Some("{}")), change(2, 5, Some("{}")), change(2, 9, Some("{}")), change(3, 9, None)];
    apply(&model, block(changes)).await;
    for (seconds, expected) in [(1, vec![1, 2]), (5, vec![1, 2]), (6, vec![2]), (9, vec![2]), (10, vec![])] {
        let of = Selection { since: Some(at(seconds)), ..orders() };
        let found: Vec<u128> = all(&model, &of, 10).await.iter().map(|record| record.id.as_u128()).collect();
        assert_eq!(found, expected, "since {seconds}");
        let count = model.tally(&of, &Tally::default()).await.expect("a tally").groups[0].count;
        assert_eq!(count, expected.len() as u64, "since {seconds}");
    }
}

/// Payloads and times come back as they were.
pub async fn m9_payloads_come_back_as_they_were(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let json = r#"{"n":12345678901234567890.10,"e":1.50e-7,"s":"é\u0007\"\\ \ud83d\ude00","o":{"z":[1,{"a":null}],"":true}}"#;
    let of = change(1, 3, Some(json));
    apply(&model, block([of.clone()])).await;
    let record = all(&model, &orders(), 1).await.remove(0);
    assert_eq!(value(&record.payload), value(of.payload.as_ref().expect("a payload")));
    assert!(record.payload.as_str().contains("12345678901234567890.10"), "{:?}", record.payload);
    assert_eq!((record.created_at, record.updated_at, record.seq), (of.created_at, of.updated_at, 3));
    assert_eq!(shown(&model).await.len(), 1);
}
