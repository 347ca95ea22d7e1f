//! Clause 14: how far a journal is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::task::JoinSet;

use super::JournalHarness;
use super::kit::{append, open, put, until, write};
use crate::clock::Time;
use crate::error::Error;
use crate::journal::{Expected, Journal, Position};

const WRITERS: usize = 4;
const HORIZONS: usize = 30;

/// Whether the journal can tell. One whose positions are times says in a sentence that it cannot.
async fn can_tell(journal: &impl Journal) -> bool {
    if !journal.capabilities().timed {
        return true;
    }
    let error = journal.horizon().await.expect_err("positions that are times have no horizon");
    assert!(matches!(error, Error::Unsupported(_)) && !error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains("positions are times"), "{error}");
    false
}

/// Nothing was acknowledged yet; the time is the journal's.
pub async fn j14_the_horizon_of_an_empty_journal_is_its_start<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    if !can_tell(&journal).await {
        return;
    }
    let before = journal.now().await.unwrap();
    let (time, position) = journal.horizon().await.unwrap();
    let after = journal.now().await.unwrap();
    assert!((before..=after).contains(&time), "{before} {time} {after}");
    assert_eq!(position, Position::START);
}

/// What is acknowledged lies at or below the next horizon, whoever asks; what was refused or a repeat does no harm.
pub async fn j14_what_is_acknowledged_is_within_the_horizon<H: JournalHarness>(harness: &H) {
    let (journal, other) = (open(harness).await, open(harness).await);
    if !can_tell(&journal).await {
        return;
    }
    let mut last = (Time::from_micros(i64::MIN), Position::START);
    for n in 0..10 {
        let id = format!("e-{n}");
        let append = append("one", Expected::Exact(n), &[&id]);
        let acknowledged = put(&journal, &append).await.placed.remove(0).position;
        let at = other.now().await.unwrap();
        for asked in [&journal, &other] {
            let horizon = asked.horizon().await.unwrap();
            assert!(horizon.0 >= at, "the clock goes on");
            assert!(horizon.1 >= acknowledged, "{acknowledged} is beyond {}", horizon.1);
            assert!(horizon.1 >= last.1, "{} is before {}", horizon.1, last.1);
            last = horizon;
        }
        write(&journal, &append).await; // a repeat
    }
}

/// Writers append while someone asks again and again: whatever was acknowledged before the time of a horizon lies at or below
/// its position. A horizon that reads the position first, and then the clock, speaks of appends that it has not seen.
pub async fn j14_a_horizon_holds_while_writers_run<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    if !can_tell(&journal).await {
        return;
    }
    let acknowledged: Arc<Mutex<Vec<(Time, Position)>>> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (journal, acknowledged, stop) =
            (open(harness).await, Arc::clone(&acknowledged), Arc::clone(&stop));
        writers.spawn(async move {
            for n in 0.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let id = format!("e-{writer}-{n}");
                let appended = put(&journal, &append(&format!("a-{writer}"), Expected::Any, &[&id])).await;
                let at = journal.now().await.unwrap();
                acknowledged.lock().unwrap().push((at, appended.placed[0].position.clone()));
                tokio::task::yield_now().await;
            }
        });
    }
    until("the writers have begun", || {
        let begun = acknowledged.lock().unwrap().len() >= WRITERS;
        async move { begun.then_some(()) }
    })
    .await;
    let mut horizons = Vec::with_capacity(HORIZONS);
    for _ in 0..HORIZONS {
        horizons.push(journal.horizon().await.unwrap());
        tokio::task::yield_now().await;
    }
    stop.store(true, Ordering::SeqCst);
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
    let acknowledged = acknowledged.lock().unwrap();
    for (time, position) in horizons {
        let missed = acknowledged.iter().find(|(at, lies)| *at < time && *lies > position);
        assert_eq!(missed, None, "the horizon {position} at {time}");
    }
}
