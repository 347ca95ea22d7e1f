//! The guard on a memory ledger: what a caller sees, mode by mode.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::clock::ManualClock;
use hapax::guard::{Delivery, Failure, GuardBuilder, ProcessingResult};
use hapax::ledger::{Identity, Metadata, OnDead, OrderPolicy, Settings, State};
use hapax::{Aggregate, Error, Event, EventId, Guard, Ledger, Operations, Outcome, Scope, Tenant, Time};

fn builder() -> GuardBuilder<MemoryLedger> {
    Guard::builder(MemoryLedger::default()).scope("billing")
}

/// A guard on a clock that moves only when told to.
fn timed() -> (GuardBuilder<MemoryLedger>, ManualClock) {
    let clock = ManualClock::new(Time::parse("2026-03-04T12:00:00Z").unwrap());
    let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone()));
    (Guard::builder(ledger).scope("billing"), clock)
}

fn identity(id: &str) -> Identity {
    Identity::new(Scope::new("billing").unwrap(), EventId::new(id).unwrap())
}

async fn entry<L: Ledger>(guard: &Guard<L>, id: &str) -> hapax::ledger::Entry {
    guard.ledger().get(&identity(id), None).await.unwrap().expect("an entry")
}

/// What a drop says arrives a moment later.
async fn entry_in<L: Ledger>(guard: &Guard<L>, id: &str, state: State) -> hapax::ledger::Entry {
    for _ in 0..30_000 {
        let entry = entry(guard, id).await;
        if entry.state == state {
            return entry;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("{id} is {:?}", entry(guard, id).await.state);
}

fn first<G: std::fmt::Debug>(outcome: Outcome<G>) -> G {
    match outcome {
        Outcome::First(grant) => grant,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_ten_concurrent_callers_run_the_handler_once() {
    let guard = builder().build().unwrap();
    for round in 0..20 {
        let runs = Arc::new(AtomicU32::new(0));
        let tasks: Vec<_> = (0..10)
            .map(|_| {
                let (guard, runs) = (guard.clone(), Arc::clone(&runs));
                tokio::spawn(async move {
                    let work = || async {
                        runs.fetch_add(1, Ordering::SeqCst);
                        // Long enough for the other tasks to meet its lease.
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        Ok::<_, String>(())
                    };
                    guard.process_if_new(&format!("event-{round}"), work).await.unwrap()
                })
            })
            .collect();
        let mut successes = 0;
        for task in tasks {
            match task.await.unwrap() {
                ProcessingResult::Success => successes += 1,
                ProcessingResult::Busy { until: Some(_) } | ProcessingResult::AlreadyProcessed => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((successes, runs.load(Ordering::SeqCst)), (1, 1));
    }
}

#[tokio::test]
async fn t12_guard_busy_is_not_done() {
    let guard = builder().build().unwrap();
    let lease = first(guard.lease("e").await.unwrap());
    let second = guard.lease("e").await.unwrap();
    assert!(matches!(second, Outcome::Busy { until: Some(_), .. }) && !second.may_acknowledge());
    assert!(!guard.is_processed("e").await.unwrap());
    lease.done().await.unwrap();
    let third = guard.lease("e").await.unwrap();
    assert!(matches!(&third, Outcome::Duplicate(prior) if prior.state == State::Done));
    assert!(third.may_acknowledge() && guard.is_processed("e").await.unwrap());
}

#[tokio::test]
async fn a_failing_event_is_retried_later_and_dead_after_five_runs() {
    let (builder, clock) = timed();
    let guard = builder.build().unwrap();
    for run in 1..=5 {
        let result = guard.process_if_new("e", || async { Err("no such account") }).await.unwrap();
        assert_eq!(result, ProcessingResult::Failed("no such account".into()), "run {run}");
        if run < 5 {
            // Hole 26: the pause is stored, and asking again does not shorten it.
            let again = guard.process_if_new("e", || async { Ok::<_, String>(()) }).await.unwrap();
            assert!(matches!(again, ProcessingResult::RetryLater { .. }), "{again:?}");
            clock.advance(Duration::from_mins(5));
        }
    }
    clock.advance(Duration::from_hours(24));
    let result = guard.process_if_new("e", || async { Ok::<_, String>(()) }).await.unwrap();
    assert_eq!(result, ProcessingResult::Dead);
    assert!(!result.may_acknowledge());
    // Hole 25: nothing but a redrive brings it back.
    assert!(matches!(guard.mark_processed("e", None).await.unwrap(), Outcome::Dead { attempts: 5, .. }));
}

#[tokio::test]
async fn t22_guard_an_event_that_kills_its_process_reaches_dead() {
    let (builder, clock) = timed();
    let guard = builder.build().unwrap();
    for run in 1..=5 {
        let lease = first(guard.lease("e").await.unwrap());
        assert_eq!((lease.attempt(), lease.suspect()), (run, run > 1));
        std::mem::forget(lease); // as a process that is killed
        clock.advance(Duration::from_secs(901));
    }
    assert!(matches!(guard.lease("e").await.unwrap(), Outcome::Dead { attempts: 5, .. }));
}

#[tokio::test]
async fn a_panic_in_the_handler_counts() {
    let (builder, clock) = timed();
    let guard = builder.attempts_max(2).build().unwrap();
    for state in [State::Retry, State::Dead] {
        let handler = guard.clone();
        let task = tokio::spawn(async move {
            let work = || async {
                assert!(std::hint::black_box(false), "a panic that the test wants");
                Ok::<_, String>(())
            };
            handler.process_if_new("e", work).await
        });
        assert!(task.await.unwrap_err().is_panic());
        entry_in(&guard, "e", state).await;
        clock.advance(Duration::from_mins(5));
    }
}

#[tokio::test]
async fn t20_guard_a_zombie_settles_nothing() {
    let (builder, clock) = timed();
    let guard = builder.build().unwrap();
    let zombie = first(guard.lease("e").await.unwrap());
    clock.advance(Duration::from_secs(901));
    let lease = first(guard.lease("e").await.unwrap()); // in the same process, under the same owner
    assert!(lease.token() > zombie.token());
    assert!(matches!(zombie.done().await, Err(Error::Fenced { .. })));
    assert!(!guard.is_processed("e").await.unwrap());
    lease.done().await.unwrap();
}

#[tokio::test]
async fn t21_losing_the_lease_cancels_the_handler() {
    struct Cancelled(Arc<AtomicU32>);
    impl Drop for Cancelled {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let (builder, clock) = timed();
    // So long that the first heartbeat comes after the other has taken over: one that came before would keep the lease.
    let guard = builder.lease(Duration::from_secs(60), Duration::from_secs(1)).build().unwrap();
    let dropped = Arc::new(AtomicU32::new(0));
    let mut lease = first(guard.lease("e").await.unwrap());
    let signal = lease.lost();
    clock.advance(Duration::from_secs(61)); // the ledger's clock jumps, and another takes over
    let other = first(guard.lease("e").await.unwrap());
    let witness = Cancelled(Arc::clone(&dropped));
    let lost = lease
        .run(async move {
            let _witness = witness;
            std::future::pending::<()>().await;
        })
        .await
        .unwrap_err();
    assert_eq!((lost.cause, dropped.load(Ordering::SeqCst)), ("fenced", 1));
    assert!(lease.is_lost());
    signal.await;
    drop(lease);
    other.done().await.unwrap(); // untouched by what the zombie left
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_keeps_the_lease_of_a_long_run() {
    let guard = builder().lease(Duration::from_secs(30), Duration::from_secs(4)).build().unwrap();
    let mut lease = first(guard.lease("e").await.unwrap());
    let before = lease.deadline();
    // The clock is paused: three lease times pass at once.
    lease.run(tokio::time::sleep(Duration::from_secs(90))).await.unwrap();
    assert!(lease.deadline() > before && !lease.is_lost());
    assert!(matches!(guard.lease("e").await.unwrap(), Outcome::Busy { .. }));
    lease.done().await.unwrap();
}

#[tokio::test]
async fn extending_by_hand_moves_the_deadline() {
    let guard = builder().build().unwrap();
    let mut lease = first(guard.lease("e").await.unwrap());
    let before = lease.deadline();
    tokio::time::sleep(Duration::from_millis(2)).await; // the clock must move, or the deadline would not
    lease.extend().await.unwrap();
    assert!(lease.deadline() > before);
    lease.release().await.unwrap();
    assert_eq!(first(guard.lease("e").await.unwrap()).attempt(), 1, "giving back does not count");
}

#[tokio::test]
async fn waiting_for_a_busy_event_ends_with_its_lease_or_with_the_limit() {
    let guard = builder().build().unwrap();
    let lease = first(guard.lease("e").await.unwrap());
    let limit = Duration::from_millis(100);
    let started = std::time::Instant::now();
    assert!(matches!(guard.lease_or_wait("e", limit).await.unwrap(), Outcome::Busy { .. }));
    assert!(started.elapsed() >= limit);
    let waiting = guard.clone();
    let task = tokio::spawn(async move { waiting.lease_or_wait("e", Duration::from_mins(1)).await });
    tokio::time::sleep(Duration::from_millis(50)).await; // most of the time it waits by then; the answer is the same either way
    lease.done().await.unwrap();
    assert!(matches!(task.await.unwrap().unwrap(), Outcome::Duplicate(_)));
}

#[tokio::test]
async fn marking_on_a_live_lease_writes_nothing() {
    let guard = builder().build().unwrap();
    let lease = first(guard.lease("e").await.unwrap());
    let metadata = Metadata::new(r#"{"by":"hand"}"#).unwrap();
    assert!(matches!(guard.mark_processed("e", metadata.clone()).await.unwrap(), Outcome::Busy { .. }));
    let untouched = entry(&guard, "e").await;
    assert_eq!((untouched.state, untouched.row.metadata), (State::Leased, None));
    lease.release().await.unwrap();
    assert!(guard.mark_processed("e", metadata.clone()).await.unwrap().is_claimed());
    assert_eq!(entry(&guard, "e").await.metadata, Some(metadata));
}

#[tokio::test]
async fn at_most_once_is_never_retried_and_its_end_is_listed() {
    let guard = builder().build().unwrap();
    let plain = first(guard.try_claim("plain").await.unwrap());
    drop(plain);
    assert!(matches!(guard.try_claim("plain").await.unwrap(), Outcome::Duplicate(_)));
    assert!(!guard.is_processed("plain").await.unwrap(), "nobody said so");

    let within = Duration::from_mins(1);
    first(guard.try_claim_tracked("good", within).await.unwrap()).finished().await.unwrap();
    assert!(guard.is_processed("good").await.unwrap());
    first(guard.try_claim_tracked("bad", within).await.unwrap()).lost("push failed").await.unwrap();
    assert_eq!(entry(&guard, "bad").await.reason.as_deref(), Some("push failed"));
    drop(first(guard.try_claim_tracked("silent", within).await.unwrap()));
    entry_in(&guard, "silent", State::Lost).await;
    assert!(matches!(guard.try_claim("silent").await.unwrap(), Outcome::Duplicate(_)));
}

#[tokio::test]
async fn a_batch_answers_each_and_a_bad_id_fails_alone() {
    let guard = builder().build().unwrap();
    let long = "x".repeat(256);
    let mut ids: Vec<String> = (0..2500).map(|n| format!("e{n}")).collect();
    ids[7] = " ".into();
    ids[8] = long;
    ids[2499] = "e0".into();
    let outcomes = guard.claim_many(&ids).await.unwrap();
    assert_eq!(outcomes.len(), 2500);
    assert!(matches!(outcomes[7], Err(Error::Invalid { .. })));
    assert!(matches!(&outcomes[8], Err(error) if error.to_string().contains("255")));
    assert!(matches!(outcomes[2499], Ok(Outcome::Duplicate(_))));
    let claimed = outcomes.iter().filter(|outcome| outcome.as_ref().is_ok_and(Outcome::is_claimed));
    assert_eq!(claimed.count(), 2497);
    let leases = guard.lease_many(["a", "b", "a"]).await.unwrap();
    assert!(matches!(leases[2], Ok(Outcome::Busy { .. })));
}

#[tokio::test]
async fn a_rolled_back_claim_leaves_nothing_and_failed_counts_it() {
    let ledger = MemoryLedger::default();
    let guard = Guard::builder(ledger.clone())
        .scope("billing")
        .attempts_max(2)
        .backoff(Duration::ZERO, Duration::ZERO)
        .build()
        .unwrap();
    for _ in 0..2 {
        assert!(guard.try_claim_in(&mut ledger.begin(), "e").unwrap().is_claimed());
    }
    assert!(matches!(guard.failed("e", "overdrawn").await.unwrap(), Outcome::RetryLater { attempts: 1, .. }));
    assert!(guard.try_claim_in(&mut ledger.begin(), "e").unwrap().is_claimed());
    assert!(matches!(guard.failed("e", "overdrawn").await.unwrap(), Outcome::Dead { attempts: 2, .. }));
    assert!(matches!(guard.try_claim_in(&mut ledger.begin(), "e").unwrap(), Outcome::Dead { .. }));
    let mut tx = ledger.begin();
    let outcomes = guard.try_claim_many_in(&mut tx, ["f", "f", "\0"]).unwrap();
    assert!(outcomes[0].as_ref().unwrap().is_claimed());
    assert!(!outcomes[1].as_ref().unwrap().is_claimed() && outcomes[2].is_err());
    tx.commit();
    assert!(guard.is_processed("f").await.unwrap());
}

#[tokio::test]
async fn scopes_and_tenants_are_explicit() {
    let guard = Guard::new(MemoryLedger::default());
    let error = guard.try_claim("e").await.unwrap_err();
    assert!(matches!(&error, Error::Config(text) if text.contains("in_scope")), "{error}");
    assert!(guard.is_processed("e").await.is_err() && guard.claim_many(["e"]).await.is_err());
    for blank in ["", " "] {
        let built = Guard::builder(MemoryLedger::default()).scope("good").scope(blank).build();
        assert!(matches!(built, Err(Error::Invalid { .. })), "never replaced by the default");
    }
    let billing = guard.in_scope(Scope::new("billing").unwrap());
    let mailer = guard.in_scope(Scope::new("mailer").unwrap());
    assert!(billing.try_claim("e").await.unwrap().is_claimed());
    assert!(mailer.try_claim("e").await.unwrap().is_claimed());
    let acme = billing.in_tenant(Tenant::new("acme").unwrap());
    assert!(acme.try_claim("e").await.unwrap().is_claimed());
    let theirs = Event::new(EventId::new("e").unwrap()).tenant(Tenant::new("evil").unwrap());
    assert!(matches!(acme.try_claim(&theirs).await, Err(Error::Invalid { what: "tenant", .. })));
    assert!(billing.try_claim(&theirs).await.unwrap().is_claimed(), "the event names its tenant");
}

#[tokio::test]
async fn every_operation_validates_the_id() {
    let guard = builder().build().unwrap();
    for bad in ["", "  ", "a\0b", &"x".repeat(256)] {
        assert!(guard.try_claim(bad).await.is_err());
        assert!(guard.lease(bad).await.is_err());
        assert!(guard.is_processed(bad).await.is_err());
        assert!(guard.mark_processed(bad, None).await.is_err());
        assert!(guard.failed(bad, "x").await.is_err());
        assert!(guard.process_if_new(bad, || async { Ok::<_, String>(()) }).await.is_err());
    }
    assert!(guard.ledger().stat().await.unwrap().counts.is_empty());
}

#[tokio::test]
async fn order_holds_where_it_was_asked_for() {
    let guard = builder().order(OrderPolicy::Latest, OnDead::Skip).build().unwrap();
    let event =
        |id: &str, seq| Event::new(EventId::new(id).unwrap()).seq(Aggregate::new("account-7").unwrap(), seq);
    let lease = first(guard.lease(&event("two", 2)).await.unwrap());
    assert!(matches!(guard.lease(&event("three", 3)).await.unwrap(), Outcome::Wait { .. }));
    lease.done().await.unwrap();
    let work = || async { Ok::<_, String>(()) };
    let late = guard.process_if_new(&event("one", 1), work).await.unwrap();
    assert_eq!((late.clone(), late.may_acknowledge()), (ProcessingResult::Stale, true));
    let plain = builder().build().unwrap();
    first(plain.lease(&event("two", 2)).await.unwrap()).done().await.unwrap();
    assert!(plain.lease(&event("one", 1)).await.unwrap().is_claimed(), "no order was asked for");
}

#[tokio::test]
async fn a_reused_id_is_a_mismatch_and_a_dead_event_keeps_its_bytes() {
    let guard = builder().attempts_max(1).build().unwrap();
    let event = |payload: &'static str| Event::new(EventId::new("e").unwrap()).payload(payload);
    let lease = first(guard.lease(&event("one")).await.unwrap());
    assert!(matches!(lease.fail_fatal("never").await.unwrap(), Failure::Dead { .. }));
    assert_eq!(entry(&guard, "e").await.row.body.unwrap().payload.unwrap(), "one");
    let work = || async { Ok::<_, String>(()) };
    assert_eq!(guard.process_if_new(&event("two"), work).await.unwrap(), ProcessingResult::Mismatch);
}

#[tokio::test]
async fn a_run_that_is_repeated_emits_the_same_ids() {
    let guard = builder().build().unwrap();
    let lease = first(guard.lease("e").await.unwrap());
    let ids = [lease.child_id(0), lease.child_id(1)];
    lease.release().await.unwrap();
    let lease = first(guard.lease("e").await.unwrap());
    assert_eq!(ids, [lease.child_id(0), lease.child_id(1)]);
    assert_ne!(ids[0], ids[1]);
    let other = guard.in_scope(Scope::new("mailer").unwrap());
    assert_ne!(first(other.lease("e").await.unwrap()).child_id(0), ids[0]);
}

#[tokio::test]
async fn switched_off_it_lets_everything_pass_but_same_transaction_claims() {
    let ledger = MemoryLedger::default();
    let guard = Guard::builder(ledger.clone()).scope("billing").enabled(false).build().unwrap();
    for _ in 0..2 {
        let work = || async { Ok::<_, String>(()) };
        assert_eq!(guard.process_if_new("e", work).await.unwrap(), ProcessingResult::Success);
        first(guard.try_claim("e").await.unwrap()).finished().await.unwrap();
        let mut lease = first(guard.lease("e").await.unwrap());
        lease.run(async {}).await.unwrap();
        lease.done().await.unwrap();
    }
    assert!(matches!(guard.try_claim_in(&mut ledger.begin(), "e"), Err(Error::Config(_))));
    assert!(matches!(guard.failed("e", "x").await, Err(Error::Config(_))));
    assert!(!guard.is_processed("e").await.unwrap());
    assert!(ledger.stat().await.unwrap().counts.is_empty());
}

#[tokio::test]
async fn impossible_settings_are_named() {
    let second = Duration::from_secs(1);
    let bad = [
        (builder().lease(second, second), "heartbeat is"),
        (builder().lease(second, Duration::ZERO), "heartbeat is"),
        (builder().with(|settings| settings.lease_margin = Some(settings.lease)), "lease_margin is"),
        (builder().retention(Duration::ZERO), "retention is"),
        (builder().attempts_max(0), "attempts_max is 0; it must be 1 to 32767"),
        (builder().attempts_max(32_768), "attempts_max is 32768"),
        (builder().with(|settings| settings.lease_margin = Some(Duration::MAX)), "lease_margin is"),
        (builder().backoff(second * 2, second), "backoff_base"),
        (builder().telemetry_prefix("a b"), "telemetry.prefix"),
    ];
    for (builder, key) in bad {
        match builder.build() {
            Err(Error::Config(text)) => assert!(text.contains(key), "{text}"),
            other => panic!("{key}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn the_sweeper_forgets_what_is_older_than_the_retention() {
    let (builder, clock) = timed();
    // Only the sweeper below: one that the guard starts by itself might sweep before the clock is moved, and take that for a leap.
    let build = builder.with(|settings| {
        settings.sweep = false;
        settings.sweep_interval = Duration::from_millis(40);
    });
    let guard = build.build().unwrap();
    assert!(guard.mark_processed("old", None).await.unwrap().is_claimed());
    clock.advance(Duration::from_hours(8 * 24));
    assert!(guard.mark_processed("new", None).await.unwrap().is_claimed());
    let sweeper = guard.spawn_sweeper();
    while guard.is_processed("old").await.unwrap() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sweeper.stop().await;
    assert!(guard.is_processed("new").await.unwrap());
    for forgotten in [0, 0, 0, 1] {
        clock.advance(Duration::from_hours(2 * 24));
        assert_eq!(guard.cleanup_old_events().await.unwrap(), forgotten);
    }
}

#[tokio::test]
async fn any_ledger_will_do() {
    let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
    let guard: Guard = Guard::builder(ledger).scope("billing").build().unwrap();
    let id = EventId::now_v7();
    assert!(guard.try_claim(&id).await.unwrap().is_claimed());
    assert!(!guard.try_claim(Delivery::of(id)).await.unwrap().is_claimed());
}

#[tokio::test]
async fn waiting_for_ever_is_no_panic() {
    let guard = Guard::builder(MemoryLedger::default()).scope("s").build().unwrap();
    let outcome = guard.lease_or_wait("e", Duration::MAX).await.unwrap();
    assert!(outcome.is_claimed());
    let other = guard.clone();
    let waiting = tokio::spawn(async move { other.lease_or_wait("e", Duration::MAX).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(50)).await; // most of the time it waits by then; the answer is the same either way
    let Outcome::First(lease) = outcome else { unreachable!() };
    lease.done().await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Outcome::Duplicate(_)));
}

#[tokio::test]
async fn t31_a_guard_says_whether_a_claim_was_committed() {
    let ledger = MemoryLedger::default();
    let guard = Guard::builder(ledger.clone()).scope("s").build().unwrap();
    for commit in [false, true] {
        let mut tx = ledger.begin();
        let outcome = guard.try_claim_in(&mut tx, "e").unwrap();
        let Outcome::First(claim) = outcome else { panic!("{outcome:?}") };
        assert_eq!(claim.key().id.to_string(), "e");
        assert!(claim.token().0 > 0);
        if commit {
            tx.commit();
        } else {
            drop(tx);
        }
        assert_eq!(guard.was_committed(&claim.clone()).unwrap(), commit);
    }
}
