//! The guard on a ledger that fails: lost acknowledgements, outages, panics, callers that leave.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax::error::{Result, Source};
use hapax::guard::{DeadLetter, DeadLetters, ProcessingResult, RemoteEnd, RemoteRun};
use hapax::ledger::{Claim, Entry, Identity, LeaseSettings, Mode, State};
use hapax::{Claims, Error, EventId, Guard, Outcome, Scope};

use crate::support::faulty::{Faults, Faulty, one_of};
use crate::support::wait::until;

fn faulty() -> (Guard<Faulty>, Arc<Faults>) {
    let ledger = Faulty::default();
    let faults = Arc::clone(&ledger.faults);
    let guard =
        Guard::builder(ledger).scope("billing").backoff(Duration::ZERO, Duration::ZERO).build().unwrap();
    (guard, faults)
}

async fn entry(guard: &Guard<Faulty>, id: &str) -> Entry {
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new(id).unwrap());
    guard.ledger().get(&identity, None).await.unwrap().expect("an entry")
}

async fn succeed(guard: &Guard<Faulty>, id: &str) -> Result<ProcessingResult> {
    guard.process_if_new(id, || async { Ok::<_, String>(()) }).await
}

#[tokio::test]
async fn t27_a_failed_settle_is_not_a_failed_handler() {
    let (guard, faults) = faulty();
    faults.settles_lost.store(7, Ordering::SeqCst);
    assert_eq!(succeed(&guard, "e").await.unwrap(), ProcessingResult::Success);
    let entry = entry(&guard, "e").await;
    assert_eq!((entry.state, entry.attempts, entry.row.reason), (State::Done, 1, None));
}

#[tokio::test]
async fn t27_success_that_cannot_be_recorded_is_reported_and_never_dead() {
    let ledger = Faulty::default();
    ledger.faults.settles_lost.store(u32::MAX, Ordering::SeqCst);
    let guard = Guard::builder(ledger)
        .scope("billing")
        .attempts_max(1)
        .lease(Duration::from_secs(4), Duration::from_secs(1))
        .build()
        .unwrap();
    let answer = succeed(&guard, "e").await;
    assert!(matches!(answer, Err(Error::Unavailable { .. })), "{answer:?}");
    assert_eq!(entry(&guard, "e").await.state, State::Leased, "it lapses by itself");
}

#[tokio::test]
async fn a_caller_who_gives_up_on_settling_does_not_unsettle() {
    let (guard, faults) = faulty();
    let Outcome::First(lease) = guard.lease("e").await.unwrap() else { panic!() };
    faults.settles_lost.store(5, Ordering::SeqCst);
    assert!(tokio::time::timeout(Duration::from_millis(10), lease.done()).await.is_err());
    until("it is settled", async || guard.is_processed("e").await.unwrap()).await;
}

#[tokio::test]
async fn a_lost_acknowledgement_does_not_make_a_caller_busy_with_himself() {
    for unheard in 1..=7 {
        let (guard, faults) = faulty();
        faults.claims_unheard.store(unheard, Ordering::SeqCst);
        let mut errors = 0;
        let lease = loop {
            match guard.lease("e").await {
                Ok(Outcome::First(lease)) => break lease,
                Ok(other) => panic!("after {unheard} lost acknowledgements: {other:?}"),
                Err(error) => assert!(error.is_retryable()),
            }
            errors += 1;
        };
        assert_eq!(errors, unheard / 3, "two are made up for within one call");
        assert_eq!(lease.attempt(), 1);
        lease.done().await.unwrap();
    }
}

#[tokio::test]
async fn a_lost_acknowledgement_does_not_lose_an_at_most_once_event() {
    let (guard, faults) = faulty();
    faults.claims_unheard.store(4, Ordering::SeqCst);
    assert!(guard.try_claim("e").await.is_err());
    assert!(guard.try_claim("e").await.unwrap().is_claimed());
    assert!(!guard.try_claim("e").await.unwrap().is_claimed());
}

/// The client whose claim is in doubt repeats it itself; meanwhile nobody else may have been given it.
#[tokio::test]
async fn t164_a_claim_in_doubt_of_another_process_is_taken_over_by_nobody() {
    let (guard, faults) = faulty();
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new("e").unwrap());
    let settings = LeaseSettings { lease: Duration::from_secs(600), attempts_max: 5, alone: true };
    let claim = Claim::new(identity.clone(), Mode::Lease(settings));
    faults.claims_unheard.store(3, Ordering::SeqCst);
    let unheard = guard.claim_remote(vec![claim.clone()]).await.remove(0);
    assert!(unheard.is_err_and(|error| error.is_retryable()));
    let other = guard.claim_remote(vec![Claim::new(identity.clone(), Mode::Lease(settings))]).await.remove(0);
    assert!(matches!(other, Ok(Outcome::Busy { .. })), "{other:?}");
    let Ok(Outcome::First(grant)) = guard.claim_remote(vec![claim]).await.remove(0) else {
        panic!("its own")
    };
    assert_eq!(grant.attempt, 1);
    let run = RemoteRun { identity, time: None, token: grant.token };
    let done = guard.settle_remote(&run, RemoteEnd::Done { metadata: None }).await.unwrap();
    assert_eq!(done.state, State::Done);
}

/// The acknowledgement is lost, and the same statement meets the locks of its own first try: that is not busy.
#[tokio::test]
async fn t401_a_remote_claim_that_meets_its_own_first_try_is_not_busy() {
    let (guard, faults) = faulty();
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new("e").unwrap());
    let settings = LeaseSettings { lease: Duration::from_secs(600), attempts_max: 5, alone: true };
    for mode in [Mode::Once { track: None }, Mode::Lease(settings)] {
        let mut claim = Claim::new(identity.clone(), mode);
        claim.identity.id = EventId::new(format!("{mode:?}")).unwrap();
        faults.claims_held.store(1, Ordering::SeqCst);
        let held = guard.claim_remote(vec![claim.clone()]).await.remove(0);
        assert!(matches!(held, Ok(Outcome::Busy { until: None, .. })), "sent once, and answered: {held:?}");
        faults.claims_held.store(1, Ordering::SeqCst);
        faults.claims_unheard.store(1, Ordering::SeqCst);
        let unknown = guard.claim_remote(vec![claim.clone()]).await.remove(0);
        assert!(matches!(unknown, Err(Error::Contended { .. })), "{unknown:?}");
        let own = guard.claim_remote(vec![claim]).await.remove(0);
        assert!(matches!(own, Ok(Outcome::First(_))), "{own:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn t39_a_failing_heartbeat_cancels_before_the_lease_ends() {
    let ledger = Faulty::default();
    let faults = Arc::clone(&ledger.faults);
    let guard = Guard::builder(ledger)
        .scope("billing")
        .lease(Duration::from_secs(6), Duration::from_millis(300))
        .build()
        .unwrap();
    faults.extends_lost.store(4, Ordering::SeqCst);
    let work = || async {
        // Work that outlasts the heartbeats that are lost.
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok::<_, String>(())
    };
    assert_eq!(guard.process_if_new("short outage", work).await.unwrap(), ProcessingResult::Success);

    faults.extends_lost.store(u32::MAX, Ordering::SeqCst);
    let started = tokio::time::Instant::now();
    let result =
        guard.process_if_new("long outage", std::future::pending::<Result<(), String>>).await.unwrap();
    assert_eq!(result, ProcessingResult::LeaseLost);
    assert!(!result.may_acknowledge());
    assert!(started.elapsed() < Duration::from_secs(6), "cancelled before the lease ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_leaves_strands_nothing() {
    let (guard, faults) = faulty();
    faults.claim_us.store(300, Ordering::SeqCst);
    for n in 0..600u64 {
        let leaving = guard.clone();
        let task = tokio::spawn(async move {
            match n % 3 {
                0 => drop(leaving.lease(format!("e{n}")).await),
                1 => drop(leaving.lease_many([format!("e{n}")]).await),
                _ => drop(leaving.lease_or_wait(format!("e{n}"), Duration::from_secs(1)).await),
            }
        });
        // Somewhere between before the claim is sent and after it was delivered.
        tokio::time::sleep(Duration::from_micros(n * 7919 % 3000)).await;
        task.abort();
    }
    faults.claim_us.store(0, Ordering::SeqCst);
    for n in 0..600 {
        // The lease is 900 s long: only what was given back can be had within this.
        let outcome = guard.lease_or_wait(format!("e{n}"), Duration::from_secs(60)).await.unwrap();
        assert!(outcome.is_claimed(), "e{n}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_ledger_that_panics_leaves_nobody_waiting() {
    let (guard, faults) = faulty();
    faults.panics.store(1, Ordering::SeqCst);
    faults.claim_us.store(20_000, Ordering::SeqCst);
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let guard = guard.clone();
            tokio::spawn(
                async move { guard.try_claim(format!("e{n}")).await.map(|outcome| outcome.is_claimed()) },
            )
        })
        .collect();
    let mut failed = 0;
    for task in tasks {
        let answer = tokio::time::timeout(Duration::from_secs(60), task).await.expect("an answer").unwrap();
        failed += u32::from(answer.is_err());
    }
    assert!(failed > 0);
    assert!(guard.try_claim("after").await.unwrap().is_claimed(), "and it works again");
}

#[test]
fn a_runtime_that_ends_leaves_nobody_waiting() {
    let (guard, faults) = faulty();
    faults.claim_us.store(50_000, Ordering::SeqCst);
    for n in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ending = guard.clone();
        runtime.block_on(async move {
            let claim = ending.try_claim(format!("e{n}"));
            assert!(tokio::time::timeout(Duration::from_millis(5), claim).await.is_err());
        });
        drop(runtime); // in the middle of the statement
    }
    faults.claim_us.store(0, Ordering::SeqCst);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let claim = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), guard.try_claim("after")).await.expect("an answer")
    });
    assert!(claim.unwrap().is_claimed());
}

/// Takes letters after refusing some.
struct Letters {
    refuse: AtomicU32,
    taken: Mutex<Vec<DeadLetter>>,
}

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), Source> {
        if one_of(&self.refuse) {
            return Err("the topic is away".into());
        }
        self.taken.lock().unwrap().push(letter.clone());
        Ok(())
    }
}

#[tokio::test]
async fn a_dead_event_is_marked_first_and_sent_second() {
    let ledger = Faulty::default();
    let guard = Guard::builder(ledger)
        .scope("billing")
        .attempts_max(2)
        .backoff(Duration::ZERO, Duration::ZERO)
        .build()
        .unwrap();
    let letters = Letters { refuse: AtomicU32::new(1), taken: Mutex::default() };
    let fail = || async { Err::<(), _>("no such account") };
    let result = guard.process_with_dlq("e", fail, &letters).await.unwrap();
    assert_eq!(result, ProcessingResult::Failed("no such account".into()));
    let result = guard.process_with_dlq("e", fail, &letters).await.unwrap();
    assert_eq!(result, ProcessingResult::Dead, "dead, but not taken");
    assert_eq!(entry(&guard, "e").await.state, State::Dead);
    let result = guard.process_with_dlq("e", fail, &letters).await.unwrap();
    assert_eq!((result.clone(), result.may_acknowledge()), (ProcessingResult::DeadLettered, true));
    let taken = letters.taken.lock().unwrap();
    assert_eq!(taken.len(), 1);
    assert_eq!((taken[0].reason.as_str(), taken[0].attempts), ("no such account", 2));
}

#[tokio::test]
async fn retries_in_process_count_as_one_run() {
    let (guard, _) = faulty();
    let mut runs = 0;
    let result = guard
        .process_with_retry("e", 2, Duration::from_millis(1), || {
            runs += 1;
            async { Err::<(), _>("busy line") }
        })
        .await
        .unwrap();
    assert_eq!((result, runs), (ProcessingResult::Failed("busy line".into()), 3));
    assert_eq!(entry(&guard, "e").await.attempts, 1);
}

/// Two deliveries of one id in a batch whose acknowledgement is lost: the next claim must not find itself busy.
#[tokio::test]
async fn t31_two_deliveries_in_doubt_do_not_leave_anyone_busy_with_himself() {
    for modes in 0..2 {
        let (guard, faults) = faulty();
        faults.claims_unheard.store(3, Ordering::SeqCst);
        if modes == 0 {
            let both = guard.lease_many(["e", "e"]).await.unwrap();
            assert!(both.iter().all(Result::is_err), "{both:?}");
            // Looking at it in another way forgets nothing.
            assert!(!guard.try_claim("e").await.unwrap().is_claimed());
            let again = guard.lease("e").await.unwrap();
            assert!(matches!(again, Outcome::First(_)), "{again:?}");
        } else {
            let both = guard.claim_many(["e", "e"]).await.unwrap();
            assert!(both.iter().all(Result::is_err), "{both:?}");
            assert!(guard.try_claim("e").await.unwrap().is_claimed());
            assert!(!guard.try_claim("e").await.unwrap().is_claimed(), "but only once");
        }
    }
}

/// Whichever of the claims in doubt won, the next delivery finds it.
#[tokio::test]
async fn t31_every_claim_in_doubt_is_tried() {
    let (guard, faults) = faulty();
    faults.claims_unheard.store(3, Ordering::SeqCst);
    assert!(guard.lease_many(["e", "e"]).await.unwrap().iter().all(Result::is_err));
    // The winner stays in doubt: it is now behind the other one.
    faults.claims_unheard.store(3, Ordering::SeqCst);
    assert!(guard.lease("e").await.is_err());
    assert!(guard.lease("e").await.unwrap().is_claimed());
}

/// A claim is answered so late that its lease must be extended before anything starts, and that fails: the lease has gone back when
/// the caller hears of it, so that a process may end then.
#[tokio::test]
async fn t89_a_late_lease_that_cannot_be_extended_has_gone_back_when_its_caller_hears_of_it() {
    let ledger = Faulty::default();
    let faults = Arc::clone(&ledger.faults);
    let guard = Guard::builder(ledger)
        .scope("billing")
        .lease(Duration::from_secs(60), Duration::from_secs(20))
        .build()
        .unwrap();
    tokio::time::pause();
    faults.claim_us.store(50_000_000, Ordering::SeqCst);
    faults.settle_us.store(200_000, Ordering::SeqCst);
    faults.extends_lost.store(u32::MAX, Ordering::SeqCst);
    guard.lease("late").await.expect_err("it could not be extended");
    let entry = entry(&guard, "late").await;
    assert_eq!((entry.state, entry.attempts), (State::Retry, 0), "it is given back, uncounted");
}
