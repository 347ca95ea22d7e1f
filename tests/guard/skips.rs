//! The log of skips and the counts of prevented repeats: never in the way, never too high.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use hapax::backend::memory::MemoryLedger;
use hapax::exact::Field;
use hapax::keyed::{KeyedLayer, MemoryKeys};
use hapax::ledger::{
    Amount, Claim, Identity, Layer, LeaseSettings, Mode, OnDead, OrderPolicy, SKIPS_KEPT, SkipReason,
};
use hapax::{Aggregate, Event, EventId, Guard, Ledger, Operations, Outcome, Scope};
use tower::ServiceExt as _;

use crate::support::faulty::Faulty;

async fn sum<L: Ledger>(guard: &Guard<L>, layer: Layer) -> Amount {
    guard.skip_log().flush().await.unwrap();
    let mut sum = Amount::default();
    for row in guard.ledger().prevented(0).await.unwrap().prevented {
        if row.layer == layer {
            sum.add(row.amount);
        }
    }
    sum
}

async fn reasons(guard: &Guard<MemoryLedger>, id: &str) -> (u64, Vec<SkipReason>) {
    guard.skip_log().flush().await.unwrap();
    let logged = guard.ledger().skips(None, &[EventId::new(id).unwrap()]).await.unwrap();
    let count = logged.iter().map(|logged| logged.count).sum();
    (count, logged.iter().flat_map(|logged| logged.skips.iter().map(|skip| skip.reason)).collect())
}

async fn process(guard: &Guard<impl Ledger>, id: &str) {
    let _ = guard.process_if_new(id, || async { Ok::<_, String>(()) }).await.unwrap();
}

#[tokio::test]
async fn only_skips_of_effects_that_were_done_are_counted() {
    let guard = Guard::builder(MemoryLedger::default())
        .scope("billing")
        .order(OrderPolicy::Latest, OnDead::Park)
        .build()
        .unwrap();
    for _ in 0..3 {
        process(&guard, "done").await;
    }
    // Busy: it runs, and may yet fail.
    let Outcome::First(running) = guard.lease("running").await.unwrap() else { panic!() };
    assert!(matches!(guard.lease("running").await.unwrap(), Outcome::Busy { .. }));
    running.release().await.unwrap();
    // Recorded, and never run by this guard.
    for _ in 0..2 {
        let _ = guard.mark_processed("marked", None).await.unwrap();
    }
    // At most once, and its end was not reported: nobody knows whether it took effect.
    for _ in 0..2 {
        let _ = guard.try_claim("once").await.unwrap();
    }
    // Stale.
    for (id, seq) in [("second", 2), ("first", 1)] {
        let mut event = Event::new(EventId::new(id).unwrap());
        (event.aggregate, event.seq) = (Some(Aggregate::new("a").unwrap()), Some(seq));
        let _ = guard.process_if_new(&event, || async { Ok::<_, String>(()) }).await.unwrap();
    }
    // In the caller's transaction, which may be undone and repeated.
    let mut tx = guard.ledger().begin();
    assert!(matches!(guard.try_claim_in(&mut tx, "done").unwrap(), Outcome::Duplicate(_)));
    drop(tx);
    assert_eq!(sum(&guard, Layer::Claims).await.count, 2);
    assert_eq!(reasons(&guard, "done").await, (3, vec![SkipReason::Duplicate; 3]));
    assert_eq!(reasons(&guard, "running").await, (0, vec![]));
    assert_eq!(reasons(&guard, "once").await, (1, vec![SkipReason::Once]));
    assert_eq!(reasons(&guard, "first").await, (1, vec![SkipReason::Stale]));
}

/// A caller elsewhere repeats a claim under its nonce if the answer was lost: that is one delivery.
#[tokio::test]
async fn a_claim_that_is_repeated_over_the_network_counts_once() {
    let guard = Guard::builder(MemoryLedger::default()).scope("billing").build().unwrap();
    process(&guard, "e-1").await;
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new("e-1").unwrap());
    let settings = LeaseSettings { lease: Duration::from_secs(60), attempts_max: 5, alone: true };
    for _ in 0..2 {
        let claim = Claim::new(identity.clone(), Mode::Lease(settings));
        for _ in 0..3 {
            let outcome = guard.claim_remote(vec![claim.clone()]).await.pop().unwrap().unwrap();
            assert!(matches!(outcome, Outcome::Duplicate(_)));
        }
    }
    assert_eq!(sum(&guard, Layer::Claims).await.count, 2);
}

/// T360: a flush that was stored and not acknowledged is not repeated.
#[tokio::test(start_paused = true)] // the background flush waits for an idle runtime
async fn t360_a_flush_without_an_answer_is_not_counted_twice() {
    let ledger = Faulty::default();
    let guard = Guard::builder(ledger.clone()).scope("billing").build().unwrap();
    for _ in 0..5 {
        process(&guard, "e-1").await;
    }
    ledger.faults.skips_unheard.store(1, Ordering::SeqCst);
    assert!(guard.skip_log().flush().await.is_err());
    assert_eq!(sum(&guard, Layer::Claims).await.count, 4);
    process(&guard, "e-1").await;
    assert_eq!(sum(&guard, Layer::Claims).await.count, 5);
}

/// T422: the skips of a flush that fails are counted as not logged, and metrics count what was written.
#[tokio::test(start_paused = true)] // the background flush waits for an idle runtime
async fn t422_the_skips_of_a_flush_that_fails_are_counted_as_not_logged() {
    let ledger = Faulty::default();
    let guard = Guard::builder(ledger.clone()).scope("billing").build().unwrap();
    for _ in 0..5 {
        process(&guard, "e-1").await;
    }
    ledger.faults.skips_stalled.store(true, Ordering::SeqCst);
    assert!(guard.skip_log().flush().await.is_err(), "it takes too long");
    // Nor is it forgotten if whoever flushes gives up.
    process(&guard, "e-1").await;
    assert!(tokio::time::timeout(Duration::from_millis(1), guard.skip_log().flush()).await.is_err());
    ledger.faults.skips_stalled.store(false, Ordering::SeqCst);
    guard.skip_log().flush().await.unwrap();
    let days = guard.ledger().prevented(0).await.unwrap();
    let unlogged: u64 = days.unlogged.iter().map(|(.., count)| count).sum();
    assert_eq!((unlogged, days.prevented.len()), (5, 0), "{days:?}");
    process(&guard, "e-1").await;
    assert_eq!(sum(&guard, Layer::Claims).await.count, 1);
}

/// A ledger that never answers about skips is in nobody's way, and memory stays bounded.
#[tokio::test(start_paused = true)] // the background flush waits for an idle runtime
async fn claims_do_not_wait_for_the_log() {
    let ledger = Faulty::default();
    let guard = Guard::builder(ledger.clone()).scope("billing").build().unwrap();
    ledger.faults.skips_stalled.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        process(&guard, "the first").await;
    }
    let flush = tokio::spawn({
        let guard = guard.clone();
        async move { guard.skip_log().flush().await }
    });
    for n in 0..2000 {
        for _ in 0..2 {
            process(&guard, &format!("e-{n}")).await;
        }
    }
    flush.abort();
    ledger.faults.skips_stalled.store(false, Ordering::SeqCst);
    guard.skip_log().flush().await.unwrap();
    let days = guard.ledger().prevented(0).await.unwrap();
    let unlogged: u64 = days.unlogged.iter().map(|(.., count)| count).sum();
    assert!(unlogged > 1000, "{unlogged} of 2000 were too many at once");
    assert!(days.prevented.iter().map(|row| row.amount.count).sum::<u64>() <= 2001);
}

/// What is gathered is written without a call, within seconds, and again after a rest.
#[tokio::test]
async fn what_is_gathered_is_written_in_the_background() {
    let guard = Guard::builder(MemoryLedger::default()).scope("billing").build().unwrap();
    for round in 1..=2 {
        for _ in 0..=2 * SKIPS_KEPT {
            process(&guard, "e-1").await;
        }
        let at_least = round * 2 * SKIPS_KEPT as u64;
        for _ in 0..3000 {
            let days = guard.ledger().prevented(0).await.unwrap();
            if days.prevented.first().is_some_and(|row| row.amount.count >= at_least) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let days = guard.ledger().prevented(0).await.unwrap();
        assert!(days.prevented[0].amount.count >= at_least, "{days:?}");
        tokio::time::sleep(Duration::from_millis(1200)).await; // the task that writes has ended
    }
}

#[tokio::test]
async fn a_log_that_is_off_notes_nothing() {
    let guard = Guard::builder(MemoryLedger::default())
        .scope("billing")
        .with(|s| s.log_skips = false)
        .build()
        .unwrap();
    for _ in 0..3 {
        process(&guard, "e-1").await;
    }
    assert_eq!(sum(&guard, Layer::Claims).await.count, 0);
    assert_eq!(reasons(&guard, "e-1").await, (0, vec![]));
}

/// Replays of a success are counted with their value; those of a refusal took no effect before.
#[tokio::test]
async fn replays_of_keyed_writes_are_counted() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
    let guard = Guard::builder(ledger).with(|s| s.value = Field::new("/amount").ok()).build().unwrap();
    let layer = KeyedLayer::new(MemoryKeys::default())
        .count_replays(guard.skip_log().clone(), Scope::new("orders").unwrap());
    let order = |body: String| async move {
        if body.contains("bad") {
            (StatusCode::UNPROCESSABLE_ENTITY, "no")
        } else {
            (StatusCode::CREATED, "17")
        }
    };
    let app: axum::Router = axum::Router::new().route("/orders", post(order)).route_layer(layer);
    for (key, body) in [("k-1", r#"{"amount":19.99}"#), ("k-2", r#"{"amount":"bad"}"#)] {
        for _ in 0..3 {
            let request = Request::post("/orders").header("Idempotency-Key", format!("\"{key}\""));
            let response = app.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap();
            assert!([201, 422].contains(&response.status().as_u16()));
        }
    }
    let sum = sum(&guard, Layer::Keys).await;
    assert_eq!((sum.count, sum.valued, sum.value.to_string().as_str()), (2, 2, "39.98"));
}
