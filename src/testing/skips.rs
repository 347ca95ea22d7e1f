//! The log of skips and the daily counts: what is added is there once, bounded, and swept.

use std::collections::HashSet;
use std::time::Duration;

use super::Harness;
use super::kit::{DAY, days_go_by, identity, open, sweep};
use crate::error::Error;
use crate::event::Origin;
use crate::exact::Decimal;
use crate::id::{EventId, Scope, Tenant, Topic};
use crate::ledger::{
    Amount, Claims as _, Identity, Layer, Ledger, Operations as _, SKIPS_KEPT, SkipBatch, SkipNote,
    SkipReason, Skipped, day_of,
};

/// A ledger without a log says so, and nothing else.
async fn is_unsupported(ledger: &impl Ledger) -> bool {
    if ledger.capabilities().skips {
        return false;
    }
    let refusals = [
        ledger.note_skips(&SkipBatch::default()).await.err(),
        ledger.skips(None, &[]).await.err(),
        ledger.prevented(0).await.err(),
    ];
    assert!(refusals.iter().all(|error| matches!(error, Some(Error::Unsupported(_)))), "{refusals:?}");
    true
}

fn skipped(identity: Identity, reason: SkipReason, offsets: std::ops::Range<i64>) -> Skipped {
    let topic = Topic::new("orders").unwrap();
    let note = |offset: i64| SkipNote {
        reason,
        age: Duration::from_millis(5),
        origin: Some(Origin::new(topic.clone(), 3, offset)),
    };
    Skipped { identity, count: (offsets.end - offsets.start) as u64, notes: offsets.map(note).collect() }
}

fn of_tenant(tenant: &str, id: &str) -> Identity {
    Identity { tenant: Some(Tenant::new(tenant).unwrap()), ..identity(id) }
}

fn batch(skipped: Vec<Skipped>) -> SkipBatch {
    SkipBatch { skipped, ..SkipBatch::default() }
}

/// The first and the last few skips of an identity are kept, all are counted, and tenants are kept apart.
pub async fn skips_keep_the_first_and_the_last_few(harness: &impl Harness) {
    let ledger = open(harness).await;
    if is_unsupported(&ledger).await {
        return;
    }
    let now = ledger.now().await.unwrap();
    let mine = identity("e-1");
    for offsets in [0..2, 2..3, 3..9] {
        let batch = batch(vec![skipped(mine.clone(), SkipReason::Duplicate, offsets)]);
        ledger.note_skips(&batch).await.unwrap();
    }
    let others = [
        skipped(of_tenant("acme", "e-1"), SkipReason::Stale, 0..1),
        skipped(identity("e-2"), SkipReason::TooOld, 0..1),
    ];
    ledger.note_skips(&batch(others.to_vec())).await.unwrap();
    let again = open(harness).await;
    let logged = again.skips(None, std::slice::from_ref(&mine.id)).await.unwrap();
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert_eq!((&logged[0].identity, logged[0].count), (&mine, 9));
    let offsets: Vec<_> = logged[0].skips.iter().filter_map(|skip| skip.origin.clone()).collect();
    let expected = [0, 1, 2, 6, 7, 8].map(|offset| ("orders".to_owned(), 3, offset));
    assert_eq!((offsets, expected.len()), (expected.to_vec(), 2 * SKIPS_KEPT));
    for skip in &logged[0].skips {
        assert_eq!(skip.reason, SkipReason::Duplicate);
        assert!(skip.at.since(now) < Duration::from_mins(10) && now.since(skip.at) < Duration::from_mins(10));
    }
    let acme = Tenant::new("acme").unwrap();
    let logged = ledger.skips(Some(&acme), &[mine.id.clone(), EventId::new("e-2").unwrap()]).await.unwrap();
    let found: Vec<_> = logged.iter().map(|logged| (&logged.identity, logged.skips[0].reason)).collect();
    assert_eq!(found, [(&of_tenant("acme", "e-1"), SkipReason::Stale)]);
}

/// Counts of many writers add up exactly, by layer, tenant and scope.
pub async fn prevented_counts_of_many_writers_add_up(harness: &impl Harness) {
    let ledger = open(harness).await;
    if is_unsupported(&ledger).await {
        return;
    }
    let of = |tenant: Option<&str>| {
        Some((tenant.map(|tenant| Tenant::new(tenant).unwrap()), Scope::new("mail").unwrap()))
    };
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let ledger = open(harness).await;
        let prevented = vec![
            (Layer::Claims, of(None), Amount { count: 2, valued: 1, value: Decimal::parse("0.1").unwrap() }),
            (Layer::Claims, of(Some("acme")), Amount::one(None)),
            (Layer::Keys, of(None), Amount::one(Decimal::parse("-3"))),
        ];
        all.spawn(async move {
            for _ in 0..10 {
                let batch = SkipBatch { prevented: prevented.clone(), ..SkipBatch::default() };
                ledger.note_skips(&batch).await.unwrap();
            }
        });
    }
    all.join_all().await;
    let today = day_of(ledger.now().await.unwrap());
    let days = ledger.prevented(today - 1).await.unwrap(); // midnight may have come
    let sum = |layer: Layer, tenant: Option<&str>| {
        let mut sum = Amount::default();
        let rows = days.prevented.iter().filter(|row| row.layer == layer && row.of == of(tenant));
        rows.for_each(|row| sum.add(row.amount));
        (sum.count, sum.valued, sum.value.to_string())
    };
    assert_eq!(sum(Layer::Claims, None), (80, 40, "4".to_owned()));
    assert_eq!(sum(Layer::Claims, Some("acme")), (40, 0, "0".to_owned()));
    assert_eq!(sum(Layer::Keys, None), (40, 40, "-120".to_owned()));
    assert!(ledger.prevented(today + 1).await.unwrap().prevented.is_empty());
}

/// However many identities are skipped, the log has a bounded number of rows; what it dropped is counted.
pub async fn skips_are_bounded_whatever_arrives(harness: &impl Harness) {
    const IDS: usize = 4000;
    let ledger = open(harness).await;
    if is_unsupported(&ledger).await {
        return;
    }
    let long = |n: usize| format!("{n:04}-{}", "\u{1F600}".repeat(240));
    let ids: Vec<_> = (0..IDS).map(|n| identity(&long(n))).collect();
    for some in ids.chunks(500) {
        let skipped = some.iter().map(|id| skipped(id.clone(), SkipReason::Duplicate, 0..1)).collect();
        ledger.note_skips(&batch(skipped)).await.unwrap();
    }
    let all: Vec<_> = ids.iter().map(|identity| identity.id.clone()).collect();
    let logged = ledger.skips(None, &all).await.unwrap();
    assert!(logged.len() <= 2048 && logged.len() > 1000, "{} rows of one scope", logged.len());
    let found: HashSet<_> = logged.iter().map(|logged| &logged.identity.id).collect();
    assert_eq!(found.len(), logged.len());
    let days = ledger.prevented(0).await.unwrap();
    let dropped: u64 = days.unlogged.iter().map(|(.., count)| count).sum();
    assert_eq!(dropped + logged.len() as u64, IDS as u64);
}

/// Skips go after seven days, counts after four hundred.
pub async fn skips_and_counts_are_swept(harness: &impl Harness) {
    let ledger = open(harness).await;
    if is_unsupported(&ledger).await {
        return;
    }
    let mine = identity("e-1");
    let of = Some((None, Scope::new("mail").unwrap()));
    let prevented = vec![(Layer::Window, of, Amount::one(None))];
    let skipped = vec![skipped(mine.clone(), SkipReason::Window, 0..1)];
    ledger.note_skips(&SkipBatch { skipped, prevented, ..SkipBatch::default() }).await.unwrap();
    days_go_by(harness, &ledger, 6).await;
    sweep(&ledger, DAY * 7).await;
    assert_eq!(ledger.skips(None, std::slice::from_ref(&mine.id)).await.unwrap().len(), 1);
    days_go_by(harness, &ledger, 2).await;
    sweep(&ledger, DAY * 7).await;
    assert!(ledger.skips(None, std::slice::from_ref(&mine.id)).await.unwrap().is_empty());
    assert_eq!(ledger.prevented(0).await.unwrap().prevented.len(), 1);
    harness.advance(DAY * 400).await;
    sweep(&ledger, DAY * 7).await;
    assert!(ledger.prevented(0).await.unwrap().prevented.is_empty());
}
