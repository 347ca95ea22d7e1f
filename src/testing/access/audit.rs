//! Audit rows: added, listed, and forgotten after their retention.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use std::time::Duration;

use super::{AccessHarness, all_rows, by, writer};
use crate::access::{Access, Actor, ApiToken, AuditNote, AuditSweep, ListAudit, Rotation, SweptAudit};

const DAY: Duration = Duration::from_hours(24);

fn note(n: u32) -> AuditNote {
    AuditNote::new(&by(), "dead.redrive", format!("mailer/{n}")).details("one entry")
}

pub async fn a9_each_change_leaves_one_row(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = writer(&store).await;
    let next = ApiToken::with_secret(token.id().clone());
    let ops = Actor::new("ops", "rotation day");
    for _ in 0..2 {
        store.rotate(&next, &Rotation::new(0), &ops).await.expect("it is rotated");
    }
    for _ in 0..2 {
        store.revoke(token.id(), &Actor::new("ops", "")).await.expect("it is revoked");
    }
    let refused = store.rotate(&ApiToken::with_secret(token.id().clone()), &Rotation::new(1), &ops).await;
    assert!(refused.is_err());
    let rows = all_rows(&store).await;
    let seen: Vec<_> = rows.iter().rev().map(|row| (&*row.action, &*row.who, &*row.reason)).collect();
    assert_eq!(
        seen,
        [
            ("token.create", "tester", "because"),
            ("token.rotate", "ops", "rotation day"),
            ("token.revoke", "ops", "")
        ]
    );
    assert!(rows.iter().all(|row| row.target == token.id().as_str()));
    for secret in [&token, &next] {
        assert!(!format!("{rows:?}").contains(&secret.expose()[21..]), "a secret is nowhere");
    }
}

pub async fn a10_a_note_that_is_added_again_adds_nothing(harness: &impl AccessHarness) {
    let (store, other) = (harness.open().await, harness.open().await);
    let once = note(1);
    store.note(&once).await.expect("a row");
    harness.advance(DAY).await;
    other.note(&once).await.expect("it is there");
    other.note(&note(2)).await.expect("a row");
    let rows = all_rows(&store).await;
    assert_eq!(rows.iter().map(|row| &*row.target).collect::<Vec<_>>(), ["mailer/2", "mailer/1"]);
    assert_eq!(rows[0].at, rows[1].at.plus(DAY), "the first one stands");
    assert_eq!((&*rows[0].who, &*rows[0].details), ("tester", "one entry"));
}

pub async fn a10_rows_are_listed_in_pages(harness: &impl AccessHarness) {
    let store = harness.open().await;
    for n in 0..7 {
        store.note(&note(n)).await.expect("a row");
    }
    writer(&store).await;
    let (mut targets, mut before) = (Vec::new(), None);
    loop {
        let which = ListAudit { before, action: Some("dead.".to_owned()), limit: 3 };
        let page = store.audit(&which).await.expect("a page");
        assert!(page.len() <= 3 && targets.len() <= 8, "the pages do not end");
        targets.extend(page.iter().map(|row| row.target.clone()));
        match page.last() {
            Some(last) => before = Some(last.number),
            None => break,
        }
    }
    let wanted: Vec<_> = (0..7).rev().map(|n| format!("mailer/{n}")).collect();
    assert_eq!(targets, wanted);
    let none = ListAudit { action: Some("%".to_owned()), ..ListAudit::default() };
    assert!(store.audit(&none).await.expect("a page").is_empty(), "a prefix, no pattern");
    assert_eq!(all_rows(&store).await.len(), 8);
}

pub async fn a10_hostile_texts_are_stored(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let hostile =
        ["\0".repeat(5), "'; drop table access_audit; --".into(), "é\u{202e}\u{1b}[2J".repeat(100_000)];
    for text in &hostile {
        let note = AuditNote::new(&Actor::new(text, text), text, text).details(text);
        store.note(&note).await.expect("a row");
    }
    let rows = all_rows(&store).await;
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[1].who, hostile[1]);
    assert!(rows.iter().all(|row| row.details.chars().count() <= 4096 && row.action.chars().count() <= 64));
}

async fn sweep(store: &impl Access) -> SweptAudit {
    store.sweep(&AuditSweep::new(DAY * 30)).await.expect("a sweep")
}

pub async fn a11_only_what_is_older_than_the_retention_goes(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = writer(&store).await;
    sweep(&store).await;
    harness.advance(DAY * 10).await;
    store.note(&note(1)).await.expect("a row");
    sweep(&store).await;
    for _ in 0..2 {
        harness.advance(DAY * 10).await;
        assert_eq!(sweep(&store).await.rows, 0, "exactly the retention");
    }
    harness.advance(Duration::from_secs(1)).await;
    assert_eq!(sweep(&store).await.rows, 1);
    let rows = all_rows(&store).await;
    assert_eq!(rows.iter().map(|row| &*row.target).collect::<Vec<_>>(), ["mailer/1"]);
    let kept = store.get(token.id()).await.expect("an answer");
    assert!(kept.is_some(), "tokens stay");
    let refused = store.sweep(&AuditSweep::new(Duration::from_secs(60))).await;
    assert!(refused.is_err_and(|error| error.to_string().contains("at least 1 day")));
}

pub async fn a11_a_sweep_goes_in_batches(harness: &impl AccessHarness) {
    let store = harness.open().await;
    for n in 0..25 {
        store.note(&note(n)).await.expect("a row");
    }
    harness.advance(DAY * 31).await;
    store.note(&note(25)).await.expect("a row");
    let mut settings = AuditSweep::new(DAY * 30);
    settings.batch_max = 10;
    assert_eq!(store.sweep(&settings).await.expect("a sweep").rows, 25);
    assert_eq!(all_rows(&store).await.len(), 1);
}

pub async fn a11_one_of_many_sweepers_sweeps(harness: &impl AccessHarness) {
    let settings = AuditSweep::new(DAY * 30).unless_within(DAY / 2);
    let store = harness.open().await;
    assert!(!store.sweep(&settings).await.expect("a sweep").skipped);
    harness.advance(Duration::from_secs(60)).await;
    assert!(store.sweep(&settings).await.expect("a sweep").skipped, "it was done a minute ago");
    harness.advance(DAY).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (store, settings) = (harness.open().await, settings.clone());
        tasks.spawn(async move { u32::from(!store.sweep(&settings).await.expect("a sweep").skipped) });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<u32>(), 1);
}

pub async fn a11_a_leap_of_the_clock_forgets_nothing(harness: &impl AccessHarness) {
    let store = harness.open().await;
    store.note(&note(1)).await.expect("a row");
    sweep(&store).await;
    harness.advance(DAY * 365).await;
    let swept = sweep(&store).await;
    assert!(swept.rows == 0 && swept.paused_until.is_some(), "{swept:?}");
    assert_eq!(all_rows(&store).await.len(), 1);
}
