//! Coalescing: single claims, settlings and extensions of concurrent tasks gather into batches by themselves.
//!
//! While one statement is under way the next batch collects; there is no timer, so a lone claim goes at once. Statements
//! run in tasks of their own, so a caller that is cancelled cancels nothing of its neighbours; an outcome that nobody
//! takes delivery of gives its claim back when it is dropped.
//!
//! A statement whose fate is unknown is issued again as it was: claims carry nonces, settlings tokens, so that is safe. If
//! it stays unknown the callers are told, and the nonces of their claims are remembered: the next claim on such an event
//! *is* the old one, so nobody finds himself busy with himself.
//!
//! An id that somebody's open transaction holds makes the statement that asks for it wait. From then on it is asked for alone, so that
//! its neighbours do not wait with it, until it is free.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::outage::Outage;
use super::queue::{BATCH_MAX, Queue};
use super::{Claim, Extend, Identity, Ledger, Mode, Nonce, Outcome, Settle, Settled, Verdict};
use crate::error::{Error, Result};

/// Pauses before a statement that failed for a passing reason is issued again. Short: whoever waits decides about more.
const REISSUE_PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];
/// How many claims in doubt are remembered; those beyond wait for their lease to lapse.
const DOUBTS_MAX: usize = 10_000;
/// How many of them for one event: any of its deliveries may be the one that won.
const DOUBTS_PER_EVENT_MAX: usize = 4;
/// How many ids that are held by open transactions are remembered.
const HELD_MAX: usize = 10_000;
/// How many statements at a time wait for such ids.
const HELD_RUNNERS_MAX: usize = 2;

/// Gathers single calls into batches of a ledger. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Inner>);

struct Inner {
    ledger: Arc<dyn Ledger>,
    claims: Queue<Claim, Delivered>,
    /// Claims of ids that open transactions hold.
    lone: Queue<Claim, Delivered>,
    settles: Queue<Settle, Settled>,
    extends: Queue<Extend, Settled>,
    looks: Queue<Identity, bool>,
    doubts: Doubts,
    held: Held,
    outage: Outage,
}

/// Claims whose fate is unknown, by identity.
#[derive(Default)]
struct Doubts {
    count: AtomicUsize,
    nonces: Mutex<HashMap<Identity, Vec<(Nonce, Mode)>>>,
}

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, Vec<(Nonce, Mode)>>> {
        self.nonces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a claim one that is in doubt, the oldest first, if there is one for the same purpose. True: it did.
    fn settle(&self, claim: &mut Claim) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut nonces = self.lock();
        let Some(doubted) = nonces.get_mut(&claim.identity) else { return false };
        let Some(at) = doubted.iter().position(|(_, mode)| *mode == claim.mode) else { return false };
        claim.nonce = doubted.remove(at).0;
        if doubted.is_empty() {
            nonces.remove(&claim.identity);
            self.count.store(nonces.len(), Ordering::Relaxed);
        }
        true
    }

    fn note(&self, claim: &Claim) {
        if !matches!(claim.mode, Mode::Lease(_) | Mode::Once { .. }) {
            return;
        }
        let mut nonces = self.lock();
        if nonces.len() >= DOUBTS_MAX && !nonces.contains_key(&claim.identity) {
            return;
        }
        let doubted = nonces.entry(claim.identity.clone()).or_default();
        if doubted.len() < DOUBTS_PER_EVENT_MAX {
            doubted.push((claim.nonce, claim.mode));
        }
        self.count.store(nonces.len(), Ordering::Relaxed);
    }
}

/// Ids that somebody's open transaction held when they were last asked for.
#[derive(Default)]
struct Held {
    count: AtomicUsize,
    ids: Mutex<HashSet<Identity>>,
}

impl Held {
    fn has(&self, identity: &Identity) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && self.lock().contains(identity)
    }

    /// Learns from an answer.
    fn note(&self, identity: &Identity, outcome: &Outcome) {
        let held = is_held(outcome);
        if !held && self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut ids = self.lock();
        if !held {
            ids.remove(identity);
        } else if !ids.contains(identity) {
            if ids.len() >= HELD_MAX {
                ids.clear(); // they are found out again
            }
            ids.insert(identity.clone());
        }
        self.count.store(ids.len(), Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<Identity>> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_held(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Busy { until: None, .. })
}

/// A batch that was claimed. Its claims stay where they are; whoever needs one looks at it here.
struct Claimed {
    batcher: Batcher,
    claims: Vec<Claim>,
}

/// One claim of a batch.
#[derive(Clone)]
pub(crate) struct ClaimRef(Arc<Claimed>, usize);

impl ClaimRef {
    /// A claim that never was in a batch.
    pub(crate) fn alone(batcher: &Batcher, claim: Claim) -> Self {
        ClaimRef(Arc::new(Claimed { batcher: batcher.clone(), claims: vec![claim] }), 0)
    }
}

impl Deref for ClaimRef {
    type Target = Claim;
    fn deref(&self) -> &Claim {
        &self.0.claims[self.1]
    }
}

/// An outcome on its way to its caller. Dropped on the way, it gives the claim back.
pub(crate) struct Delivered(Option<(ClaimRef, Outcome)>);

impl Delivered {
    fn take(mut self) -> Result<(ClaimRef, Outcome)> {
        self.0.take().ok_or_else(gone)
    }
}

impl Drop for Delivered {
    fn drop(&mut self) {
        if let Some((claim, Outcome::First(grant))) = self.0.take()
            && matches!(claim.mode, Mode::Lease(_) | Mode::Once { .. })
        {
            claim.0.batcher.settle_later(Settle {
                identity: claim.identity.clone(),
                week: grant.week,
                token: grant.token,
                verdict: Verdict::release(),
                order: claim.order.clone(),
                advance_to: None,
            });
        }
    }
}

/// An answer that is on its way.
pub(crate) struct Pending(oneshot::Receiver<Result<Delivered>>);

impl Pending {
    /// Waits for it. Safe to cancel.
    pub(crate) async fn answer(self) -> Result<(ClaimRef, Outcome)> {
        self.0.await.map_err(|_| gone())??.take()
    }
}

impl Batcher {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Batcher(Arc::new(Inner {
            ledger,
            claims: Queue::default(),
            lone: Queue::default(),
            settles: Queue::default(),
            extends: Queue::default(),
            looks: Queue::default(),
            doubts: Doubts::default(),
            held: Held::default(),
            outage: Outage::default(),
        }))
    }

    pub(crate) fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.0.ledger
    }

    /// Claims one event. Not a future, so that the claim is moved once: into the batch.
    pub(crate) fn claim(&self, mut claim: Claim) -> Result<Pending> {
        self.0.ledger.settings().check(&claim)?; // before it can spoil a batch
        self.0.doubts.settle(&mut claim);
        let (send, receive) = oneshot::channel();
        if self.0.held.has(&claim.identity) {
            if self.0.lone.push(claim, send, HELD_RUNNERS_MAX) {
                tokio::spawn(self.clone().run_lone());
            }
        } else if self.0.claims.push(claim, send, self.0.ledger.parallel_batches()) {
            tokio::spawn(self.clone().run_claims());
        }
        Ok(Pending(receive))
    }

    /// Claims events that are a batch already. Safe to cancel.
    pub(crate) async fn claim_many(&self, claims: Vec<Claim>) -> Vec<Result<(ClaimRef, Outcome)>> {
        let count = claims.len();
        let mut all: Vec<Option<Result<(ClaimRef, Outcome)>>> = (0..count).map(|_| None).collect();
        // Those that are held go by themselves, beside the others.
        let (mut lone, mut rest, mut places) =
            (Vec::new(), Vec::with_capacity(count), Vec::with_capacity(count));
        for (at, claim) in claims.into_iter().enumerate() {
            if self.0.held.has(&claim.identity) {
                lone.push((at, self.claim(claim)));
            } else {
                rest.push(claim);
                places.push(at);
            }
        }
        for (at, answer) in places.into_iter().zip(self.claim_batches(rest).await) {
            all[at] = Some(answer);
        }
        for (at, pending) in lone {
            all[at] = Some(match pending {
                Ok(pending) => pending.answer().await,
                Err(error) => Err(error),
            });
        }
        all.into_iter().map(|answer| answer.unwrap_or_else(|| Err(gone()))).collect()
    }

    async fn claim_batches(&self, claims: Vec<Claim>) -> Vec<Result<(ClaimRef, Outcome)>> {
        let count = claims.len();
        let batcher = self.clone();
        let run = tokio::spawn(async move {
            let mut all = Vec::with_capacity(count);
            let mut claims = claims.into_iter();
            loop {
                let mut batch: Vec<Claim> = claims.by_ref().take(BATCH_MAX).collect();
                if batch.is_empty() {
                    return all;
                }
                for claim in &mut batch {
                    batcher.0.doubts.settle(claim);
                }
                all.extend(batcher.claim_batch(batch).await);
            }
        });
        match run.await {
            Ok(all) => all.into_iter().map(|one| one.and_then(Delivered::take)).collect(),
            Err(_) => (0..count).map(|_| Err(gone())).collect(),
        }
    }

    /// Settles one claim. Safe to cancel: it is settled all the same.
    pub(crate) async fn settle(&self, settle: Settle) -> Result<Settled> {
        self.0.ledger.settings().check_settle(&settle)?;
        let (send, receive) = oneshot::channel();
        if self.0.settles.push(settle, send, self.0.ledger.parallel_batches()) {
            tokio::spawn(self.clone().run_settles());
        }
        receive.await.map_err(|_| gone())?
    }

    /// Settles when it can, telling nobody; for values that are dropped. Without a runtime the lease just lapses.
    pub(crate) fn settle_later(&self, settle: Settle) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (send, _) = oneshot::channel();
        if self.0.settles.push(settle, send, self.0.ledger.parallel_batches()) {
            runtime.spawn(self.clone().run_settles());
        }
    }

    /// Extends one lease.
    pub(crate) async fn extend(&self, extend: Extend) -> Result<Settled> {
        let (send, receive) = oneshot::channel();
        if self.0.extends.push(extend, send, 1) {
            tokio::spawn(self.clone().run_extends());
        }
        receive.await.map_err(|_| gone())?
    }

    /// Whether an event took effect before: a look, gathered like everything else.
    pub(crate) async fn known(&self, identity: Identity) -> Result<bool> {
        let (send, receive) = oneshot::channel();
        if self.0.looks.push(identity, send, self.0.ledger.parallel_batches()) {
            tokio::spawn(self.clone().run_looks());
        }
        receive.await.map_err(|_| gone())?
    }

    async fn run_looks(self) {
        let mut runner = self.0.looks.runner();
        while let Some((identities, answers)) = runner.take() {
            let ledger = &self.0.ledger;
            let known = in_batch(&self.0.outage, &identities, |batch| {
                Box::pin(async move { Ok(ledger.known(batch).await?.into_iter().map(Ok).collect()) })
            })
            .await;
            for (answer, known) in answers.into_iter().zip(known) {
                let _ = answer.send(known);
            }
        }
    }

    async fn run_claims(self) {
        let mut runner = self.0.claims.runner();
        while let Some((claims, answers)) = runner.take() {
            for (answer, delivered) in answers.into_iter().zip(self.claim_batch(claims).await) {
                let _ = answer.send(delivered);
            }
        }
    }

    /// Asks for ids that are held, one after the other; all who wait for an id that is still held learn it at once.
    async fn run_lone(self) {
        let mut runner = self.0.lone.runner();
        while let Some((claims, answers)) = runner.take() {
            let mut waiting: VecDeque<_> = claims.into_iter().zip(answers).collect();
            while let Some((claim, answer)) = waiting.pop_front() {
                let identity = claim.identity.clone();
                let Some(delivered) = self.claim_batch(vec![claim]).await.pop() else { continue };
                let outcome = delivered.as_ref().ok().and_then(|delivered| delivered.0.as_ref());
                let held =
                    outcome.filter(|(_, outcome)| is_held(outcome)).map(|(_, outcome)| outcome.clone());
                let _ = answer.send(delivered);
                let Some(held) = held else { continue };
                let (same, others): (Vec<_>, Vec<_>) =
                    waiting.into_iter().partition(|(claim, _)| claim.identity == identity);
                waiting = others.into();
                for (claim, answer) in same {
                    let claim = ClaimRef::alone(&self, claim);
                    let _ = answer.send(Ok(Delivered(Some((claim, held.clone())))));
                }
            }
        }
    }

    async fn claim_batch(&self, claims: Vec<Claim>) -> Vec<Result<Delivered>> {
        let mut outcomes = in_batch(&self.0.outage, &claims, |batch| self.0.ledger.claim(batch)).await;
        let mut claims = claims;
        for (claim, outcome) in claims.iter_mut().zip(&mut outcomes) {
            // Whoever is in the way may be another of the claims in doubt.
            while outcome.as_ref().is_ok_and(|outcome| !outcome.is_claimed()) && self.0.doubts.settle(claim) {
                *outcome = self.claim_alone(claim).await;
            }
            match outcome {
                Ok(outcome) => self.0.held.note(&claim.identity, outcome),
                Err(error) if error.is_retryable() => self.0.doubts.note(claim),
                Err(_) => {}
            }
        }
        let claimed = Arc::new(Claimed { batcher: self.clone(), claims });
        let deliver = |(at, outcome): (usize, Result<Outcome>)| {
            outcome.map(|outcome| Delivered(Some((ClaimRef(Arc::clone(&claimed), at), outcome))))
        };
        outcomes.into_iter().take(claimed.claims.len()).enumerate().map(deliver).collect()
    }

    async fn claim_alone(&self, claim: &Claim) -> Result<Outcome> {
        let one = std::slice::from_ref(claim);
        let mut answers = in_batch(&self.0.outage, one, |batch| self.0.ledger.claim(batch)).await;
        answers.pop().unwrap_or_else(|| Err(Error::Corrupt("a claim without an answer".into())))
    }

    async fn run_settles(self) {
        let mut runner = self.0.settles.runner();
        while let Some((settles, answers)) = runner.take() {
            let outcomes = in_batch(&self.0.outage, &settles, |batch| self.0.ledger.settle(batch)).await;
            for (answer, outcome) in answers.into_iter().zip(outcomes) {
                let _ = answer.send(outcome);
            }
        }
    }

    async fn run_extends(self) {
        let mut runner = self.0.extends.runner();
        while let Some((extends, answers)) = runner.take() {
            let outcomes = in_batch(&self.0.outage, &extends, |batch| self.0.ledger.extend(batch)).await;
            for (answer, outcome) in answers.into_iter().zip(outcomes) {
                let _ = answer.send(outcome);
            }
        }
    }
}

pub(crate) fn gone() -> Error {
    Error::Unavailable {
        what: "the batch's task ended before it answered (runtime shut down?)".into(),
        source: None,
    }
}

pub(crate) type Running<'a, O> = Pin<Box<dyn Future<Output = Result<Vec<Result<O>>>> + Send + 'a>>;

/// Runs a batch; if its statement fails on somebody's data, everybody goes alone, so a bad row harms only itself.
pub(crate) async fn in_batch<'a, I, O>(
    outage: &Outage,
    items: &'a [I],
    run: impl Fn(&'a [I]) -> Running<'a, O>,
) -> Vec<Result<O>> {
    let run = async |items| {
        let answer = run(items).await;
        outage.note(&answer);
        answer
    };
    let mut error = match run(items).await {
        Ok(answers) => return answers,
        Err(error) => error,
    };
    for pause in REISSUE_PAUSES {
        if !error.is_retryable() {
            break;
        }
        tokio::time::sleep(pause).await;
        error = match run(items).await {
            Ok(answers) => return answers,
            Err(error) => error,
        };
    }
    if error.is_retryable() || items.len() == 1 {
        return items.iter().map(|_| Err(error.copy())).collect();
    }
    let mut answers = Vec::with_capacity(items.len());
    for item in items {
        answers.push(match run(std::slice::from_ref(item)).await {
            Ok(mut one) if one.len() == 1 => one.remove(0),
            Ok(_) => Err(Error::Corrupt("a batch of one had another number of answers".into())),
            Err(error) => Err(error),
        });
    }
    answers
}
