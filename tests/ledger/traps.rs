//! Traps of `docs/traps.md` and cases of `docs/acceptance.md` that are about the guard, not about one backend.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::clock::ManualClock;
use hapax::guard::ProcessingResult;
use hapax::ledger::{Settings, Token};
use hapax::{Claims, EventId, Guard, Operations, Outcome, Time};

const LEASE: Duration = Duration::from_secs(900);

fn guard() -> (Guard<MemoryLedger>, ManualClock) {
    let clock = ManualClock::new(Time::parse("2026-03-04T12:00:00Z").unwrap());
    let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone()));
    (Guard::builder(ledger).scope("billing").build().unwrap(), clock)
}

/// An outside store. What it checks decides what a repeat does to it.
#[derive(Default)]
struct Sink {
    dedups: bool,
    checks_token: bool,
    applied: Mutex<HashMap<String, (Token, u32)>>,
}

impl Sink {
    /// Applies an effect under our key and token; false if the sink refused it.
    fn apply(&self, key: &str, token: Token) -> bool {
        let mut applied = self.applied.lock().unwrap();
        let (last, times) = applied.entry(key.to_owned()).or_insert((token, 0));
        if self.checks_token && token < *last {
            return false;
        }
        *last = token;
        if !(self.dedups && *times > 0) {
            *times += 1;
        }
        true
    }

    fn times(&self, key: &str) -> u32 {
        self.applied.lock().unwrap()[key].1
    }
}

fn first<G: std::fmt::Debug>(outcome: Outcome<G>) -> G {
    match outcome {
        Outcome::First(granted) => granted,
        other => panic!("{other:?}"),
    }
}

/// A worker applies its effect and dies before `done`; the next one runs the event again. Only a sink that dedups on the
/// key has one effect then; the token only keeps a stale worker from writing last.
#[tokio::test]
async fn t32_a_foreign_sink_needs_the_key_and_the_token() {
    for (dedups, checks_token, effects) in
        [(false, false, 2), (false, true, 2), (true, false, 1), (true, true, 1)]
    {
        let (guard, clock) = guard();
        let sink = Sink { dedups, checks_token, ..Sink::default() };
        let dead = first(guard.lease("e").await.unwrap());
        let stale = dead.token();
        assert!(sink.apply("e", stale));
        std::mem::forget(dead); // killed: nothing of it runs any more
        clock.advance(LEASE + Duration::from_secs(1));
        let next = first(guard.lease("e").await.unwrap());
        assert!(next.suspect() && next.token() > stale);
        assert!(sink.apply("e", next.token()));
        next.done().await.unwrap();
        assert_eq!(sink.times("e"), effects, "dedups {dedups}, checks the token {checks_token}");
        // The first one was only paused, and writes once more.
        assert_eq!(sink.apply("e", stale), !checks_token, "a stale token is refused where it is checked");
        println!("dedups {dedups}, checks token {checks_token}: {effects} effects");
    }
}

/// Whoever meets a busy event may wait for it; and a worker that comes back late changes nothing.
#[tokio::test]
async fn t38_a_claim_can_wait_and_a_late_worker_overwrites_nothing() {
    let (guard, clock) = guard();
    let late = first(guard.lease("e").await.unwrap());
    clock.advance(LEASE + Duration::from_secs(1));
    let next = first(guard.lease("e").await.unwrap());
    let waiting = {
        let guard = guard.clone();
        tokio::spawn(async move { guard.lease_or_wait("e", Duration::from_secs(60)).await })
    };
    let newest = hapax::ledger::Metadata::new(r#"{"by":"next"}"#).unwrap();
    next.done_with(newest.clone()).await.unwrap();
    let outcome = waiting.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    let stale = hapax::ledger::Metadata::new(r#"{"by":"late"}"#).unwrap();
    assert!(matches!(late.done_with(stale).await, Err(hapax::Error::Fenced { .. })));
    let identity =
        hapax::ledger::Identity::new(hapax::Scope::new("billing").unwrap(), EventId::new("e").unwrap());
    let entry = guard.ledger().get(&identity, None).await.unwrap().unwrap();
    assert_eq!(entry.metadata, Some(newest));
}

/// A ledger that nobody thinks of does not grow for ever: the first use of a guard starts its sweeper. And looking at an
/// event, or meeting one that nobody claims, writes nothing.
#[tokio::test]
async fn t45_the_sweeper_is_on_by_default_and_looking_writes_nothing() {
    let clock = ManualClock::new(Time::parse("2026-03-04T12:00:00Z").unwrap());
    let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone()));
    let guard = Guard::builder(ledger.clone())
        .scope("billing")
        .with(|settings| settings.sweep_interval = Duration::from_millis(20))
        .build()
        .unwrap();
    assert!(!guard.is_processed("looked at").await.unwrap());
    assert!(ledger.stat().await.unwrap().counts.is_empty(), "looking writes nothing");
    assert!(guard.mark_processed("old", None).await.unwrap().is_claimed());
    clock.advance(Duration::from_secs(8 * 86_400));
    let gone = async {
        while guard.is_processed("old").await.unwrap() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("swept by itself");
}

/// Every event delivered three times, shuffled, to four workers: each takes effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acceptance_1_redelivered_events_take_effect_once() {
    const EVENTS: usize = 500;
    let guard = Guard::builder(MemoryLedger::default()).scope("billing").build().unwrap();
    let effects: Arc<Vec<AtomicU32>> = Arc::new((0..EVENTS).map(|_| AtomicU32::new(0)).collect());
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (guard, effects) = (guard.clone(), Arc::clone(&effects));
            tokio::spawn(async move {
                let mut repeats = 0;
                // Each worker goes through all of them three times, at a stride of its own.
                for n in 0..EVENTS * 3 {
                    let at = n * [1, 3, 7, 11][worker] % EVENTS;
                    let effects = Arc::clone(&effects);
                    let run = || async move {
                        effects[at].fetch_add(1, Ordering::SeqCst);
                        Ok::<_, String>(())
                    };
                    match guard.process_if_new(format!("event-{at}"), run).await.unwrap() {
                        ProcessingResult::Success => {}
                        ProcessingResult::AlreadyProcessed | ProcessingResult::Busy { .. } => repeats += 1,
                        other => panic!("{other}"),
                    }
                }
                repeats
            })
        })
        .collect();
    let mut repeats = 0;
    for worker in workers {
        repeats += worker.await.unwrap();
    }
    assert!(effects.iter().all(|count| count.load(Ordering::SeqCst) == 1));
    assert_eq!(repeats, EVENTS * 12 - EVENTS);
    println!("{EVENTS} events, {} deliveries, {EVENTS} effects, {repeats} repeats caught", EVENTS * 12);
}
