//! Sweeps, and what is remembered of what they forget.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use std::time::Duration;

use super::{KeysHarness, again, answer, done, first, person, request, v7, word};
use crate::keyed::{AfterFailure, Begin, Begun, Ended, KeyLease, KeySweep, Keys, Resolution, SweptKeys};

const DAY: Duration = Duration::from_hours(24);
const RETENTION: Duration = Duration::from_hours(30 * 24);

async fn sweep(keys: &impl Keys) -> SweptKeys {
    keys.sweep(&KeySweep::new(RETENTION)).await.expect("a sweep")
}

/// Days pass, each with its sweep, as in production; answers how many keys were forgotten.
async fn days<H: KeysHarness>(harness: &H, keys: &H::Keys, days: u32) -> u64 {
    let mut gone = 0;
    for _ in 0..days.div_ceil(10) {
        harness.advance(DAY * days.min(10)).await;
        let swept = sweep(keys).await;
        assert!(!swept.skipped && swept.paused_until.is_none(), "{swept:?}");
        gone += swept.keys;
    }
    gone
}

pub async fn k9_only_what_is_older_than_the_retention_goes(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    done(&keys, &request("old", "{}"), "17").await;
    assert_eq!(days(harness, &keys, 20).await, 0);
    let young = request("young", "{}");
    done(&keys, &young, "18").await;
    assert_eq!(days(harness, &keys, 10).await, 0, "exactly the retention");
    harness.advance(Duration::from_secs(60)).await;
    assert_eq!(sweep(&keys).await.keys, 1);
    assert_eq!(word(&keys, &request("old", "{}")).await, "unknown");
    match again(&keys, &young).await {
        Begun::Done(kept) => assert_eq!(kept.answer.body, "18"),
        other => panic!("{other:?}"),
    }
}

pub async fn k9_a_v7_key_that_was_forgotten_is_expired_never_new(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request(&v7(&keys, Duration::ZERO, false).await, "{}");
    done(&keys, &begin, "17").await;
    // Never seen, but as old: whether it was done cannot be known either.
    let unseen = request(&v7(&keys, Duration::ZERO, false).await, "{}");
    days(harness, &keys, 40).await;
    for begin in [&begin, &unseen] {
        assert_eq!(again(&keys, begin).await, Begun::Expired);
        assert_eq!(word(&keys, begin).await, "expired");
        assert_eq!(again(&harness.open().await, begin).await, Begun::Expired, "still");
        let inside = harness.in_transaction(&keys, begin, None, true).await;
        assert!(!keys.capabilities().transactional || inside.is_ok_and(|outcome| outcome == Begun::Expired));
    }
    let young = request(&v7(&keys, DAY * 2, false).await, "{}");
    first(&keys, &young).await;
}

pub async fn k9_other_keys_are_new_after_the_retention(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("order-17", "{}");
    done(&keys, &begin, "17").await;
    assert_eq!(days(harness, &keys, 40).await, 1);
    assert_eq!(word(&keys, &begin).await, "unknown");
    assert!(matches!(again(&keys, &begin).await, Begun::First(_)), "protection ends with the retention");
}

pub async fn k9_running_and_held_keys_stay(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let held = Begin { after_failure: AfterFailure::Hold, ..request("held", "{}") };
    let lease = first(&keys, &held).await;
    keys.release(&lease, Ended::Failed).await.unwrap();
    let failed = request("failed", "{}");
    let lease = first(&keys, &failed).await;
    keys.release(&lease, Ended::Failed).await.unwrap();
    let running = Begin { lease: DAY, ..request("running", "{}") };
    let lease = first(&keys, &running).await;
    for _ in 0..8 {
        harness.advance(DAY * 5).await;
        let Ok(()) = keys.extend(&lease, DAY).await else { panic!("it runs for long") };
        sweep(&keys).await;
    }
    assert_eq!(word(&keys, &running).await, "running");
    assert_eq!(word(&keys, &held).await, "outcome-unknown");
    assert_eq!(word(&keys, &failed).await, "unknown", "what nobody runs again does not stay for ever");
}

pub async fn k9_a_key_from_a_clock_that_is_ahead_is_never_new(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let near = request(&v7(&keys, Duration::from_hours(20), true).await, "{}");
    let far = request(&v7(&keys, DAY * 27, true).await, "{}");
    // One whose answer a person gave.
    let decided =
        Begin { after_failure: AfterFailure::Hold, ..request(&v7(&keys, DAY * 27, true).await, "{}") };
    let lease = first(&keys, &decided).await;
    keys.release(&lease, Ended::Failed).await.unwrap();
    let token = keys.entry(None, &decided.key).await.unwrap().unwrap().token;
    let held = KeyLease { token, ..lease };
    keys.resolve(&held, &Resolution::Answer(answer("17")), &person()).await.unwrap();
    done(&keys, &near, "17").await;
    done(&keys, &far, "17").await;
    // Settled longer ago than the retention, but its own time is not: it must not go, for it would be new.
    days(harness, &keys, 30).await;
    harness.advance(Duration::from_hours(10)).await;
    sweep(&keys).await;
    assert!(matches!(again(&keys, &near).await, Begun::Done(_)));
    days(harness, &keys, 2).await;
    assert_eq!(again(&keys, &near).await, Begun::Expired);
    days(harness, &keys, 20).await;
    for begin in [&far, &decided] {
        assert!(matches!(again(&keys, begin).await, Begun::Done(_)), "52 days of 57");
    }
    days(harness, &keys, 10).await;
    for begin in [&far, &decided] {
        assert_eq!(again(&keys, begin).await, Begun::Expired, "a key of far ahead");
    }
}

pub async fn k9_a_key_that_could_not_be_kept_is_not_begun(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request(&v7(&keys, DAY * 29, true).await, "{}");
    for _ in 0..2 {
        let now = keys.info().await.unwrap().now;
        let Begun::Ahead { now: said } = again(&keys, &begin).await else { panic!("it is 29 days ahead") };
        assert!(said >= now);
        assert_eq!(word(&keys, &begin).await, "unknown", "nothing was stored");
    }
    if keys.capabilities().transactional {
        let inside = harness.in_transaction(&keys, &begin, Some(&answer("17")), true).await;
        assert!(matches!(inside, Ok(Begun::Ahead { .. })), "{inside:?}");
        assert_eq!(word(&keys, &begin).await, "unknown");
    }
    // Its time comes closer.
    harness.advance(DAY * 2).await;
    done(&keys, &begin, "17").await;
}

pub async fn k9_a_sweep_goes_in_batches(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for n in 0..25 {
        done(&keys, &request(&format!("key-{n}"), "{}"), "17").await;
    }
    days(harness, &keys, 30).await;
    harness.advance(DAY).await;
    let mut settings = KeySweep::new(RETENTION);
    settings.batch_max = 10;
    assert_eq!(keys.sweep(&settings).await.unwrap().keys, 25);
    assert!(keys.list(&crate::keyed::ListKeys::default()).await.unwrap().is_empty());
}

pub async fn k9_one_of_many_sweepers_sweeps(harness: &impl KeysHarness) {
    let (one, two) = (harness.open().await, harness.open().await);
    let mut settings = KeySweep::new(RETENTION);
    settings.unless_since = Some(one.info().await.unwrap().now);
    assert!(!one.sweep(&settings).await.unwrap().skipped);
    harness.advance(Duration::from_secs(60)).await;
    assert!(two.sweep(&settings).await.unwrap().skipped, "it was done a minute ago");
    harness.advance(DAY).await;
    settings.unless_since = Some(one.info().await.unwrap().now);
    let mut tasks = tokio::task::JoinSet::new();
    for keys in [one.clone(), two, one, harness.open().await] {
        let settings = settings.clone();
        tasks.spawn(async move { keys.sweep(&settings).await.expect("a sweep") });
    }
    let mut swept = 0;
    while let Some(done) = tasks.join_next().await {
        swept += u32::from(!done.expect("no panic").skipped);
    }
    assert_eq!(swept, 1);
}

pub async fn k9_a_dry_run_counts_and_changes_nothing(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for n in 0..25 {
        done(&keys, &request(&format!("key-{n}"), "{}"), "17").await;
    }
    let failed = request("failed", "{}");
    let lease = first(&keys, &failed).await;
    keys.release(&lease, Ended::Failed).await.unwrap();
    days(harness, &keys, 30).await;
    harness.advance(DAY).await;
    let before = keys.info().await.unwrap();
    let settings = KeySweep { dry_run: true, batch_max: 10, ..KeySweep::new(RETENTION) };
    let swept = keys.sweep(&settings).await.unwrap();
    assert_eq!((swept.keys, swept.skipped), (26, false));
    assert_eq!(keys.list(&crate::keyed::ListKeys::default()).await.unwrap().len(), 26);
    let after = keys.info().await.unwrap();
    assert_eq!((after.horizon, after.swept_at), (before.horizon, before.swept_at));
    assert_eq!(sweep(&keys).await.keys, 26);
}

pub async fn k9_a_leap_of_the_clock_forgets_nothing(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    done(&keys, &begin, "17").await;
    sweep(&keys).await;
    harness.advance(DAY * 365).await;
    let swept = sweep(&keys).await;
    assert!(swept.keys == 0 && swept.paused_until.is_some(), "{swept:?}");
    assert!(matches!(again(&keys, &begin).await, Begun::Done(_)));
    assert!(keys.info().await.unwrap().horizon.is_some(), "that of the first sweep");
}

pub async fn k9_the_horizon_never_goes_back(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request(&v7(&keys, Duration::ZERO, false).await, "{}");
    done(&keys, &begin, "17").await;
    days(harness, &keys, 40).await;
    let horizon = keys.info().await.unwrap().horizon;
    // Someone sets a longer retention: what is forgotten stays forgotten.
    let swept = keys.sweep(&KeySweep::new(RETENTION * 3)).await.unwrap();
    assert!(!swept.skipped);
    assert_eq!(keys.info().await.unwrap().horizon, horizon);
    assert_eq!(again(&keys, &begin).await, Begun::Expired);
}
