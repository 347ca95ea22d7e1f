//! What a projection shows.

use std::collections::BTreeMap;

use super::{ProjectionHarness, apply, change, document, name, shows};
use crate::projection::{Applied, Change, Name, Projection, Uuid, Version};
use crate::testing::analytics::module;

/// Newer and stale ones in one call, each with its own answer.
pub async fn p3_each_change_has_its_outcome(harness: &impl ProjectionHarness) {
    use Applied::{Newer, Stale};
    let projection = harness.open().await;
    apply(&projection, &[change(1, 5, Some("{}")), change(3, 5, None)]).await;
    let changes = [
        change(1, 4, Some(r#"{"late":true}"#)),
        change(2, 1, Some(r#"{"new":true}"#)),
        change(3, 6, Some(r#"{"back":true}"#)),
        change(1, 6, None),
        change(2, 1, Some(r#"{"new":true}"#)),
        change(4, 1, None),
    ];
    assert_eq!(apply(&projection, &changes).await, [Stale, Newer, Newer, Newer, Stale, Newer]);
    for at in [1, 2, 3, 5] {
        shows(&projection, &changes[at]).await;
    }
    assert_eq!(apply(&projection, &[]).await, []);
}

/// One id in several tenants and modules is several records.
pub async fn p4_tenants_modules_and_ids_never_meet(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let mut changes = Vec::new();
    for tenant in 0..3_u128 {
        for slug in ["orders", "order", "orders_2"] {
            for id in [1, 2] {
                let json = format!(r#"{{"of":"{tenant}/{slug}/{id}"}}"#);
                let one = change(id, 1, Some(&json));
                changes.push(Change { tenant: Uuid::from_u128(tenant), module: module(slug), ..one });
            }
        }
    }
    assert!(apply(&projection, &changes).await.iter().all(|applied| *applied == Applied::Newer));
    // A deletion of one of them is a deletion of that one.
    let gone = Change { payload: None, ..super::under(1, 2, &changes[4]) };
    apply(&projection, std::slice::from_ref(&gone)).await;
    changes[4] = gone;
    for change in &changes {
        shows(&projection, change).await;
    }
    let other = Name { tenant: Uuid::from_u128(9), ..name(1) };
    assert_eq!(document(&projection, &other).await, None);
}

/// Digit for digit, and whatever the names in it.
pub async fn p5_payloads_come_back_as_they_were(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let long = format!(r#"{{"text":"{}","short":1}}"#, "é".repeat(40_000));
    let deep = format!(r#"{{"a":{}1{}}}"#, r#"{"b":"#.repeat(60), "}".repeat(60));
    let payloads = [
        "{}",
        r#"{"n":12345678901234567890.1234567890,"e":-1.5E+20,"z":-0.0,"i":9007199254740993}"#,
        r#"{"":"empty","a.b":1,"a":{"b":2},".":3,"x..y":4," ":5,"deleted":false,"tenant":"other"}"#,
        r#"{"text":"\u0001\t\n\"\\ ü 𝄞 </script> ]]> \u2028","list":[1,[2,{"x":null}],[]],"t":true}"#,
        r#"{"payload":{"payload":"x"},"date":"2026-01-01","number":"1"}"#,
        // Another type under the same name: payloads of tenants have nothing in common.
        r#"{"date":{"year":2026},"number":[1,"x"],"text":17}"#,
        &long,
        &deep,
    ];
    let changes: Vec<Change> = (1..).zip(payloads).map(|(id, json)| change(id, 1, Some(json))).collect();
    let applied = apply(&projection, &changes).await;
    assert!(applied.iter().all(|applied| *applied == Applied::Newer), "{applied:?}");
    for change in &changes {
        shows(&projection, change).await;
    }
}

/// By another process.
pub async fn p6_what_was_applied_is_there_when_it_is_opened_again(harness: &impl ProjectionHarness) {
    let first = harness.open().await;
    let changes = [change(1, 2, Some(r#"{"a":1}"#)), change(2, 7, None)];
    apply(&first, &changes).await;
    drop(first);
    let again = harness.open().await;
    for change in &changes {
        shows(&again, change).await;
    }
    assert_eq!(apply(&again, &changes).await, [Applied::Stale, Applied::Stale]);
}

/// All records with their versions.
async fn scanned(projection: &impl Projection) -> BTreeMap<Name, Version> {
    let (mut found, mut after) = (BTreeMap::new(), None);
    loop {
        let page = projection.scan(after.as_deref()).await.expect("a page");
        found.extend(page.found);
        after = page.next;
        if after.is_none() {
            return found;
        }
    }
}

/// More than a page, and deleted ones too.
pub async fn p7_a_scan_shows_everything(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    assert_eq!(scanned(&projection).await, BTreeMap::new());
    let json = |id: u128| (!id.is_multiple_of(7)).then_some("{}");
    let changes: Vec<Change> = (1..=230).map(|id| change(id, 1 + (id % 3) as u64, json(id))).collect();
    apply(&projection, &changes).await;
    let expected: BTreeMap<_, _> = changes.iter().map(|one| (Name::of(one), one.version)).collect();
    assert_eq!(scanned(&projection).await, expected);
}

/// Nothing of a rebuild shows before its switch, if it has a place of its own, and what it does not
/// have is gone afterwards.
pub async fn p8_a_rebuild_shows_itself_when_it_is_switched_to(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let (old, ghost) = (change(1, 2, Some(r#"{"seq":2}"#)), change(9, 1, Some(r#"{"ghost":true}"#)));
    apply(&projection, &[old.clone(), ghost.clone()]).await;
    let rebuilding = projection.begin_rebuild().await.expect("a rebuild");
    let fresh = [change(1, 3, Some(r#"{"seq":3}"#)), change(1, 2, Some(r#"{"seq":2}"#)), change(2, 1, None)];
    let applied = rebuilding.apply(&fresh).await.expect("applied");
    assert_eq!(applied, [Applied::Newer, Applied::Stale, Applied::Newer]);
    if harness.rebuilds_apart() {
        shows(&projection, &old).await;
        assert_eq!(document(&projection, &name(2)).await, None);
    }
    rebuilding.switch().await.expect("a switch");
    for projection in [projection, harness.open().await] {
        shows(&projection, &fresh[0]).await;
        shows(&projection, &fresh[2]).await;
        if harness.rebuilds_apart() {
            assert_eq!(document(&projection, &name(9)).await, None, "it is not in the history");
        }
        let later = apply(&projection, &[change(1, 3, None)]).await;
        assert_eq!(later, [Applied::Stale], "versions go on");
    }
}

/// One that was killed before its switch leaves the projection as it was, and the next one works.
pub async fn p8_an_unfinished_rebuild_is_in_nobodys_way(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let shown = change(1, 5, Some(r#"{"seq":5}"#));
    apply(&projection, std::slice::from_ref(&shown)).await;
    let unfinished = projection.begin_rebuild().await.expect("a rebuild");
    unfinished.apply(&[change(1, 1, Some("{}")), change(2, 1, Some("{}"))]).await.expect("applied");
    drop(unfinished);
    shows(&harness.open().await, &shown).await;
    let second = projection.begin_rebuild().await.expect("a second rebuild");
    second.apply(std::slice::from_ref(&shown)).await.expect("applied");
    second.switch().await.expect("a switch");
    shows(&projection, &shown).await;
    if harness.rebuilds_apart() {
        assert_eq!(document(&projection, &name(2)).await, None, "of the unfinished one nothing is left");
    }
}

/// Whoever asks is told of a place of its own, from the beginning to the switch, and of nothing afterwards.
pub async fn p8_a_rebuild_is_unfinished_until_its_switch(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    apply(&projection, &[change(1, 1, Some("{}"))]).await;
    let unfinished = async || harness.open().await.unfinished().await.expect("an answer");
    assert_eq!(unfinished().await, None);
    let rebuilding = projection.begin_rebuild().await.expect("a rebuild");
    rebuilding.apply(&[change(1, 1, Some("{}"))]).await.expect("applied");
    assert_eq!(unfinished().await.is_some(), harness.rebuilds_apart(), "it is being filled");
    rebuilding.take_writes().await.expect("the writes");
    assert_eq!(unfinished().await.is_some(), harness.rebuilds_apart(), "it has the writes");
    rebuilding.switch().await.expect("a switch");
    assert_eq!(unfinished().await, None);
}

/// Readers have the old place while a rebuild has the writes, and the new one afterwards: neither has what was erased.
pub async fn p9_what_is_erased_is_served_no_more_whoever_has_the_writes(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let all = [change(1, 1, Some("{}")), change(2, 1, Some("{}")), change(3, 1, Some("{}"))];
    apply(&projection, &all).await;
    let erase = async |id| {
        let applied = projection.erase(&[change(id, 2, None)]).await.expect("erased");
        assert_eq!(applied, [Applied::Newer], "record {id}");
        shows(&projection, &change(id, 2, None)).await;
    };
    erase(1).await;
    let rebuilding = projection.begin_rebuild().await.expect("a rebuild");
    rebuilding.apply(&all).await.expect("applied");
    rebuilding.apply(&[change(1, 2, None)]).await.expect("applied");
    rebuilding.take_writes().await.expect("the writes");
    erase(2).await;
    let again = projection.erase(&[change(2, 2, None)]).await.expect("erased");
    assert_eq!(again, [Applied::Stale]);
    rebuilding.switch().await.expect("a switch");
    shows(&projection, &change(2, 2, None)).await;
    shows(&projection, &all[2]).await;
    erase(3).await;
}
