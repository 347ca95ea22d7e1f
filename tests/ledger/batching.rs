//! Single calls that gather into batches: who waits for whom.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::error::Result;
use hapax::ledger::{
    Claim, Claims as _, Epoch, Extend, Identity, LeaseSettings, Marker, Mode, Settle, Settled, State,
    SweepSettings, Swept,
};
use hapax::{Error, EventId, Guard, Outcome, Scope, Time, Topic, ledger_over};
use tokio::sync::Semaphore;

/// A ledger in which one id is held by somebody's open transaction, and whose answers can be late.
#[derive(Clone)]
struct Slow {
    inner: MemoryLedger,
    shared: Arc<Shared>,
}

struct Shared {
    /// Whether `held` is held; a statement that asks for it waits for a permit first.
    held: AtomicBool,
    patience: Semaphore,
    /// The sizes of the batches that `held` was in.
    batches: Mutex<Vec<usize>>,
    /// How long an answer to a claim is under way, in milliseconds, and how many are.
    late_ms: AtomicU64,
    extended: AtomicU64,
    extends_fail: AtomicBool,
}

impl Slow {
    fn new() -> Self {
        let shared = Shared {
            held: AtomicBool::new(false),
            patience: Semaphore::new(0),
            batches: Mutex::default(),
            late_ms: AtomicU64::new(0),
            extended: AtomicU64::new(0),
            extends_fail: AtomicBool::new(false),
        };
        Slow { inner: MemoryLedger::default(), shared: Arc::new(shared) }
    }
}

ledger_over!(Slow {
    Claims {
        async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
            let is_held = |claim: &Claim| claim.identity.id.as_str() == "held";
            if self.shared.held.load(Ordering::SeqCst) && claims.iter().any(is_held) {
                self.shared.batches.lock().unwrap().push(claims.len());
                self.shared.patience.acquire().await.unwrap().forget();
                let others: Vec<Claim> = claims.iter().filter(|claim| !is_held(claim)).cloned().collect();
                let mut outcomes = self.inner.claim(&others).await?.into_iter();
                let busy = || Ok(Outcome::Busy { until: None, owner: None });
                let answer = |claim| if is_held(claim) { busy() } else { outcomes.next().unwrap() };
                return Ok(claims.iter().map(answer).collect());
            }
            let outcomes = self.inner.claim(claims).await;
            // An answer that comes late, if the test asks for one.
            tokio::time::sleep(Duration::from_millis(self.shared.late_ms.swap(0, Ordering::SeqCst))).await;
            outcomes
        }
        async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
            self.shared.extended.fetch_add(1, Ordering::SeqCst);
            if self.shared.extends_fail.load(Ordering::SeqCst) {
                return Err(Error::Unavailable { what: "a fault the test ordered".into(), source: None });
            }
            self.inner.extend(extends).await
        }
        async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
            self.inner.settle(settles).await
        }
        async fn now(&self) -> Result<Time> {
            self.inner.now().await
        }
        async fn epoch(&self) -> Result<Epoch> {
            self.inner.epoch().await
        }
    }
    ConsumerStore {
        async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
            self.inner.markers(scope, topic, partitions).await
        }
    }
    Operations {
        async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
            self.inner.sweep(settings).await
        }
    }
});

fn guard(ledger: &Slow) -> Guard<Slow> {
    Guard::builder(ledger.clone())
        .scope("orders")
        .lease(Duration::from_secs(5), Duration::from_secs(1))
        .build()
        .unwrap()
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), future).await.unwrap_or_else(|_| panic!("{what}"))
}

/// An id that is known to be held is asked for alone: its neighbours neither share its statement nor wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn t86_a_held_id_is_asked_for_alone() {
    let ledger = Slow::new();
    let guard = guard(&ledger);
    ledger.shared.held.store(true, Ordering::SeqCst);
    ledger.shared.patience.add_permits(1);
    assert!(matches!(guard.lease("held").await.unwrap(), Outcome::Busy { until: None, .. }));

    // From here on whoever asks for it waits; the neighbours do not.
    let asks: Vec<_> = (0..100)
        .map(|_| {
            let guard = guard.clone();
            tokio::spawn(async move { guard.lease("held").await.unwrap().name() })
        })
        .collect();
    for wave in 0..20 {
        let neighbours: Vec<_> = (0..50)
            .map(|n| {
                let guard = guard.clone();
                tokio::spawn(async move {
                    guard.lease(format!("{wave}-{n}").as_str()).await.unwrap().is_claimed()
                })
            })
            .collect();
        for neighbour in neighbours {
            assert!(soon("a neighbour of a held id is answered", neighbour).await.unwrap());
        }
    }
    // Also a batch: it waits for the held one's answer, which is asked for beside the others.
    let batch = {
        let guard = guard.clone();
        tokio::spawn(async move { guard.lease_many(["m-1", "held", "m-2"]).await.unwrap() })
    };
    let there = |id: &str| {
        let identity = Identity::new(Scope::new("orders").unwrap(), EventId::new(id).unwrap());
        let ledger = ledger.inner.clone();
        async move { ledger.get(&identity, None).await.unwrap().is_some_and(|entry| entry.state == State::Leased) }
    };
    let both = async {
        while !(there("m-1").await && there("m-2").await) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    soon("the others of a batch are claimed", both).await;
    let sizes = ledger.shared.batches.lock().unwrap().clone();
    assert!(sizes.iter().all(|size| *size == 1), "the held id shared a statement: {sizes:?}");

    // When it is free again somebody gets it, and it goes with the others as before.
    ledger.shared.held.store(false, Ordering::SeqCst);
    ledger.shared.patience.add_permits(1000);
    for ask in asks {
        soon("everybody is answered", ask).await.unwrap();
    }
    assert_eq!(soon("the batch is answered", batch).await.unwrap().len(), 3);
    assert!(soon("it is free", guard.lease("held")).await.is_ok());
}

/// A batch waits for an id that is known to be held, and its caller leaves: what the ledger has granted to the others goes back.
#[tokio::test(start_paused = true)]
async fn t500_a_caller_that_leaves_while_its_batch_waits_for_a_held_id_strands_no_neighbour() {
    for mode in ["lease", "once"] {
        let ledger = Slow::new();
        let guard = guard(&ledger);
        ledger.shared.held.store(true, Ordering::SeqCst);
        ledger.shared.patience.add_permits(1);
        assert!(matches!(guard.lease("held").await.unwrap(), Outcome::Busy { until: None, .. }));

        let (theirs, batch) = (guard.clone(), ["m-1", "held", "m-2"]);
        let (caller, state) = if mode == "lease" {
            (tokio::spawn(async move { theirs.lease_many(batch).await.map(drop) }), State::Leased)
        } else {
            (tokio::spawn(async move { theirs.claim_many(batch).await.map(drop) }), State::Claimed)
        };
        // The clock is paused: this time passes when nothing but the held id is waited for.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for id in ["m-1", "m-2"] {
            let identity = Identity::new(Scope::new("orders").unwrap(), EventId::new(id).unwrap());
            assert_eq!(
                ledger.inner.get(&identity, None).await.unwrap().unwrap().state,
                state,
                "{mode}, {id}"
            );
        }
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());

        for id in ["m-1", "m-2"] {
            let again = async {
                loop {
                    match guard.lease(id).await.unwrap() {
                        Outcome::First(lease) => return lease.attempt(),
                        _ => tokio::time::sleep(Duration::from_millis(1)).await,
                    }
                }
            };
            assert_eq!(
                soon("a neighbour is given back", again).await,
                1,
                "{mode}, {id}: no attempt was counted"
            );
        }
    }
}

/// Claims under their callers' nonces: an id that is known to be held goes alone, and everybody's answer is in its place.
#[tokio::test]
async fn t502_a_remote_batch_asks_for_a_held_id_alone() {
    let ledger = Slow::new();
    let guard = guard(&ledger);
    let settings = LeaseSettings { lease: Duration::from_mins(10), attempts_max: 5, alone: true };
    let claim = |id: String| {
        let identity = Identity::new(Scope::new("orders").unwrap(), EventId::new(id).unwrap());
        Claim::new(identity, Mode::Lease(settings))
    };
    let at = 1500;
    let name = |n| if n == at { "held".to_owned() } else { format!("r-{n}") };
    let claims: Vec<_> = (0..2500).map(|n| claim(name(n))).collect();
    let tokens = async || -> Vec<Option<_>> {
        let outcomes = soon("a remote batch is answered", guard.claim_remote(claims.clone())).await;
        let token = |outcome: Result<Outcome>| match outcome.unwrap() {
            Outcome::First(grant) => Some(grant.token),
            outcome => {
                assert!(matches!(outcome, Outcome::Busy { until: None, .. }), "{}", outcome.name());
                None
            }
        };
        outcomes.into_iter().map(token).collect()
    };
    ledger.shared.held.store(true, Ordering::SeqCst);
    ledger.shared.patience.add_permits(1000);
    let first = tokens().await;
    let is_right = |(n, token): (usize, &Option<_>)| token.is_none() == (n == at);
    assert!(first.iter().enumerate().all(is_right), "each answer is in its claim's place");
    for _ in 0..3 {
        assert!(tokens().await == first, "a repeated request has the same tokens");
    }
    let sizes = ledger.shared.batches.lock().unwrap().clone();
    assert_eq!(sizes, [1000, 1, 1, 1], "once it is known to be held, it goes alone");

    // Free again, it is granted once it is asked for, and held again, it goes with the others at first.
    ledger.shared.held.store(false, Ordering::SeqCst);
    let free = tokens().await;
    assert!(free[at].is_some());
    assert!(free.iter().zip(&first).enumerate().all(|(n, (now, then))| n == at || now == then));
    ledger.shared.held.store(true, Ordering::SeqCst);
    tokens().await;
    assert_eq!(ledger.shared.batches.lock().unwrap().last(), Some(&1000), "it was not known to be held");
}

/// A lease is granted in full by the ledger and answered late: it is extended before anything starts, and its run goes on.
#[tokio::test(start_paused = true)]
async fn t85_a_lease_whose_answer_came_late_is_extended_before_it_runs() {
    let ledger = Slow::new();
    let guard = guard(&ledger);
    for (id, late_ms) in [("in time", 0), ("past the first heartbeat", 4000), ("past its end", 6000)] {
        ledger.shared.late_ms.store(late_ms, Ordering::SeqCst);
        let Outcome::First(mut lease) = guard.lease(id).await.unwrap() else { panic!("{id}: not the first") };
        assert!(!lease.is_lost(), "{id}");
        assert_eq!(lease.attempt(), 1);
        // The clock is paused: two lease times pass at once.
        let worked = lease.run(tokio::time::sleep(Duration::from_secs(12))).await;
        assert!(worked.is_ok(), "{id}: {worked:?}");
        lease.done().await.unwrap();
    }
    ledger.shared.late_ms.store(6000, Ordering::SeqCst);
    let leases = guard.lease_many(["a", "b", "c"]).await.unwrap();
    for lease in leases {
        let Outcome::First(lease) = lease.unwrap() else { panic!("not the first") };
        assert!(!lease.is_lost());
        lease.done().await.unwrap();
    }
}

/// One that cannot be extended is given back uncounted.
#[tokio::test(start_paused = true)]
async fn t85_a_late_lease_that_cannot_be_extended_costs_no_attempt() {
    let ledger = Slow::new();
    let guard = guard(&ledger);
    for _ in 0..10 {
        ledger.shared.late_ms.store(6000, Ordering::SeqCst);
        ledger.shared.extends_fail.store(true, Ordering::SeqCst);
        let answer = guard.lease("x").await;
        assert!(answer.as_ref().is_err_and(Error::is_retryable), "{answer:?}");
        tokio::time::sleep(Duration::from_millis(10)).await; // the lease goes back
    }
    ledger.shared.extends_fail.store(false, Ordering::SeqCst);
    let Outcome::First(lease) = guard.lease("x").await.unwrap() else { panic!("it was given back") };
    assert_eq!(lease.attempt(), 1, "no attempt was counted");
    // A caller that leaves while its lease is being extended costs none either.
    lease.release().await.unwrap();
    ledger.shared.late_ms.store(6000, Ordering::SeqCst);
    let gone = tokio::time::timeout(Duration::from_millis(5990), guard.lease("x")).await;
    assert!(gone.is_err());
    tokio::time::sleep(Duration::from_secs(1)).await; // the clock is paused: until the late answer was released
    let Outcome::First(lease) = guard.lease("x").await.unwrap() else { panic!("it was given back") };
    assert_eq!(lease.attempt(), 1);
    lease.done().await.unwrap();
}

/// Two runtimes share a guard, and one of them stands still in the middle of a statement: the other goes on.
#[test]
fn t72_a_runtime_that_stands_still_does_not_strand_another() {
    let ledger = Slow::new();
    let guard = guard(&ledger);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    // The first one's statement is under way, and nobody drives that runtime any more.
    ledger.shared.late_ms.store(1, Ordering::SeqCst);
    first.block_on(async {
        let guard = guard.clone();
        let asked =
            tokio::spawn(async move { guard.lease("first").await.map(|outcome| outcome.is_claimed()) });
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        drop(asked);
    });
    let second = std::thread::spawn(move || {
        runtime().block_on(async {
            let Outcome::First(lease) =
                soon("the second runtime is answered", guard.lease("second")).await.unwrap()
            else {
                panic!("not the first")
            };
            soon("and can settle", lease.done()).await.unwrap();
        });
    });
    second.join().expect("the second runtime goes on");
    drop(first);
}
