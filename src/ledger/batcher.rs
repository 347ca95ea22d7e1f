//! Gathers single claims, settle requests and extensions of concurrent tasks into batches.
//!
//! While one statement runs, the next batch collects. There is no timer, so a lone claim goes out
//! immediately. Statements run in tasks of their own, so a cancelled caller does not cancel its
//! neighbours; if a caller is gone, dropping its outcome releases the claim.
//!
//! A statement with an unknown result is issued again unchanged, which is safe because claims carry
//! nonces and settle requests carry tokens. If the result stays unknown, the callers get an error,
//! and the batcher remembers the nonces of their claims: the next claim on such an event *is* the
//! old one, so a caller is never blocked by its own earlier claim. A claim that was sent before and
//! meets an open transaction is not known to be busy either: that transaction may be its own first
//! try. It stays in doubt until an answer decides it.
//!
//! A statement that asks for an id held by another open transaction has to wait. From then on the
//! batcher claims that id alone until it is free, so that its neighbours do not wait with it.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::doubts::Doubts;
use super::outage::Outage;
use super::queue::{BATCH_MAX, Queue};
use super::{Claim, Claims, Extend, Identity, Mode, Outcome, Settle, Settled, Verdict};
use crate::error::{Error, Result};

/// Pauses before a statement with an unknown result is issued again. They are short: the caller
/// decides about longer ones. Contention is not retried here, because each ledger has done so.
const REISSUE_PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];
/// How many ids held by open transactions are remembered.
const HELD_MAX: usize = 10_000;
/// How many statements may wait for such ids at a time.
const HELD_RUNNERS_MAX: usize = 2;

/// Gathers single calls into batches of a ledger. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Inner>);

struct Inner {
    ledger: Arc<dyn Claims>,
    claims: Queue<Claim, Delivered>,
    /// Claims on ids that open transactions hold.
    lone: Queue<Claim, Delivered>,
    settles: Queue<Settle, Settled>,
    extends: Queue<Extend, Settled>,
    looks: Queue<Identity, bool>,
    doubts: Doubts,
    held: Held,
    outage: Outage,
}

/// Ids that another open transaction held when they were last claimed.
#[derive(Default)]
struct Held {
    count: AtomicUsize,
    ids: Mutex<HashSet<Identity>>,
}

impl Held {
    fn has(&self, identity: &Identity) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && self.lock().contains(identity)
    }

    /// Updates the set from an outcome.
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
                ids.clear(); // they will be found again
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

/// The claims of a batch. They stay in place; a [`ClaimRef`] refers to one.
struct Claimed {
    batcher: Batcher,
    claims: Vec<Claim>,
}

/// One claim of a batch.
#[derive(Clone)]
pub(crate) struct ClaimRef(Arc<Claimed>, usize);

impl ClaimRef {
    /// A claim that was not in a batch.
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

/// An outcome on its way to its caller. If it is dropped on the way, the claim is released.
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

/// An outcome that has not arrived yet.
pub(crate) struct Pending(oneshot::Receiver<Result<Delivered>>);

impl Pending {
    /// Waits for it. Safe to cancel.
    pub(crate) async fn answer(self) -> Result<(ClaimRef, Outcome)> {
        self.delivered().await?.take()
    }

    async fn delivered(self) -> Result<Delivered> {
        self.0.await.map_err(|_| gone())?
    }
}

impl Batcher {
    pub(crate) fn new(ledger: Arc<dyn Claims>) -> Self {
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

    pub(crate) fn ledger(&self) -> &Arc<dyn Claims> {
        &self.0.ledger
    }

    /// Claims one event. Not an `async fn`, so that the claim is moved only once: into the batch.
    pub(crate) fn claim(&self, mut claim: Claim) -> Result<Pending> {
        self.0.ledger.settings().check(&claim)?; // before it can spoil a batch
        self.0.doubts.ask(&mut claim);
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

    /// Claims events that already form a batch. Safe to cancel: outcomes are taken only once all are
    /// here, so a caller that leaves before drops them, and their claims are released.
    pub(crate) async fn claim_many(&self, claims: Vec<Claim>) -> Vec<Result<(ClaimRef, Outcome)>> {
        let count = claims.len();
        let mut all: Vec<Option<Result<Delivered>>> = (0..count).map(|_| None).collect();
        // Claims on held ids go alone, beside the others.
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
                Ok(pending) => pending.delivered().await,
                Err(error) => Err(error),
            });
        }
        all.into_iter().map(|answer| answer.unwrap_or_else(|| Err(gone()))?.take()).collect()
    }

    async fn claim_batches(&self, claims: Vec<Claim>) -> Vec<Result<Delivered>> {
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
                    batcher.0.doubts.ask(claim);
                }
                all.extend(batcher.claim_batch(batch).await);
            }
        });
        run.await.unwrap_or_else(|_| (0..count).map(|_| Err(gone())).collect())
    }

    /// Claims under the nonces that the callers chose. A claim in doubt is theirs to repeat: it is
    /// not remembered here, so that no other claim takes it over. Whether a claim was sent by an
    /// earlier call, only they know.
    ///
    /// Claims on held ids go alone, and first: each may wait for a lock, and the leases of the others
    /// begin only after that.
    pub(crate) async fn claim_as_sent(&self, claims: &[Claim]) -> Vec<Result<Outcome>> {
        let count = claims.len();
        let mut all: Vec<Option<Result<Outcome>>> = (0..count).map(|_| None).collect();
        let (mut rest, mut places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        // One is enough to see that the ledger is away: each would wait as long.
        let mut away: Option<Error> = None;
        for (at, claim) in claims.iter().enumerate() {
            if self.0.held.has(&claim.identity) {
                all[at] = match &away {
                    Some(error) => Some(Err(error.copy())),
                    None => self.send_as_is(std::slice::from_ref(claim)).await.pop(),
                };
                if let Some(Err(error @ Error::Unavailable { .. })) = &all[at] {
                    away.get_or_insert_with(|| error.copy());
                }
            } else {
                rest.push(claim.clone());
                places.push(at);
            }
        }
        if let Some(error) = away {
            return all.into_iter().map(|answer| answer.unwrap_or_else(|| Err(error.copy()))).collect();
        }
        for (places, batch) in places.chunks(BATCH_MAX).zip(rest.chunks(BATCH_MAX)) {
            for (at, answer) in places.iter().zip(self.send_as_is(batch).await) {
                all[*at] = Some(answer);
            }
        }
        all.into_iter().map(|answer| answer.unwrap_or_else(|| Err(gone()))).collect()
    }

    /// Sends one batch of such claims.
    async fn send_as_is(&self, batch: &[Claim]) -> Vec<Result<Outcome>> {
        let was_reissued = AtomicBool::new(false);
        let mut outcomes = self.send(batch, &was_reissued).await;
        let was_reissued = was_reissued.into_inner();
        for (claim, outcome) in batch.iter().zip(&mut outcomes) {
            let Ok(answer) = outcome else { continue };
            self.0.held.note(&claim.identity, answer);
            if was_reissued && is_held(answer) {
                *outcome = Err(undecided());
            }
        }
        outcomes
    }

    /// Settles claims that already form a batch.
    pub(crate) async fn settle_many(&self, settles: &[Settle]) -> Vec<Result<Settled>> {
        let mut all = Vec::with_capacity(settles.len());
        for batch in settles.chunks(BATCH_MAX) {
            all.extend(in_batch(&self.0.outage, batch, |batch| self.0.ledger.settle(batch)).await);
        }
        all
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

    /// Settles in the background and reports nothing; for `Drop`. Without a runtime the lease
    /// simply lapses.
    pub(crate) fn settle_later(&self, settle: Settle) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (send, _) = oneshot::channel();
        if self.0.settles.push(settle, send, self.0.ledger.parallel_batches()) {
            runtime.spawn(self.clone().run_settles());
        }
    }

    /// Resolves every claim in doubt and releases those that were granted; retries while the ledger
    /// is unavailable. Called before shutdown, so that no lease is left without a holder. If it is
    /// cancelled, the remaining leases lapse.
    pub(crate) async fn release_doubtful(&self) {
        let mut doubtful = self.0.doubts.take();
        while let Some(claim) = doubtful.pop() {
            match self.claim_alone(&claim).await {
                Ok(Outcome::First(grant)) => {
                    let settle = Settle {
                        identity: claim.identity.clone(),
                        week: grant.week,
                        token: grant.token,
                        verdict: Verdict::release(),
                        order: claim.order.clone(),
                        advance_to: None,
                    };
                    if self.settle(settle).await.is_err_and(|error| error.is_retryable()) {
                        doubtful.push(claim);
                    }
                }
                Ok(outcome) if !is_held(&outcome) => {}
                Err(error) if !error.is_retryable() => {}
                Ok(_) | Err(_) => {
                    doubtful.push(claim);
                    tokio::time::sleep(REISSUE_PAUSES[0]).await;
                }
            }
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

    /// Whether an event took effect before; reads are batched too.
    pub(crate) async fn known(&self, identity: Identity) -> Result<bool> {
        let (send, receive) = oneshot::channel();
        if self.0.looks.push(identity, send, self.0.ledger.parallel_batches()) {
            tokio::spawn(self.clone().run_looks());
        }
        receive.await.map_err(|_| gone())?
    }

    async fn run_looks(self) {
        let mut runner = self.0.looks.runner();
        while let Some((identities, answers)) = runner.next().await {
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
        while let Some((claims, answers)) = runner.next().await {
            for (answer, delivered) in answers.into_iter().zip(self.claim_batch(claims).await) {
                let _ = answer.send(delivered);
            }
        }
    }

    /// Claims held ids one after the other. If an id is still held, all claims waiting for it get
    /// that answer at once.
    async fn run_lone(self) {
        let mut runner = self.0.lone.runner();
        while let Some((claims, answers)) = runner.next().await {
            let mut waiting: VecDeque<_> = claims.into_iter().zip(answers).collect();
            while let Some((claim, answer)) = waiting.pop_front() {
                let identity = claim.identity.clone();
                let Some(delivered) = self.claim_batch(vec![claim]).await.pop() else { continue };
                let is_still_held = match &delivered {
                    Ok(Delivered(answer)) => answer.as_ref().is_some_and(|(_, outcome)| is_held(outcome)),
                    Err(error) => matches!(error, Error::Contended { .. }) && self.0.held.has(&identity),
                };
                let _ = answer.send(delivered);
                if !is_still_held {
                    continue;
                }
                let (same, others): (Vec<_>, Vec<_>) =
                    waiting.into_iter().partition(|(claim, _)| claim.identity == identity);
                waiting = others.into();
                for (claim, answer) in same {
                    let _ = answer.send(self.still_held(claim));
                }
            }
        }
    }

    /// The answer to a claim that was not sent, because another one on its id met an open
    /// transaction.
    fn still_held(&self, claim: Claim) -> Result<Delivered> {
        if self.0.doubts.has(&claim) {
            self.0.doubts.note(&claim);
            return Err(undecided());
        }
        let held = Outcome::Busy { until: None, owner: None };
        Ok(Delivered(Some((ClaimRef::alone(self, claim), held))))
    }

    async fn claim_batch(&self, claims: Vec<Claim>) -> Vec<Result<Delivered>> {
        let was_reissued = AtomicBool::new(false);
        let mut outcomes = self.send(&claims, &was_reissued).await;
        let was_reissued = was_reissued.into_inner();
        let mut claims = claims;
        for (claim, outcome) in claims.iter_mut().zip(&mut outcomes) {
            self.resolve(claim, outcome, was_reissued).await;
        }
        let claimed = Arc::new(Claimed { batcher: self.clone(), claims });
        let deliver = |(at, outcome): (usize, Result<Outcome>)| {
            outcome.map(|outcome| Delivered(Some((ClaimRef(Arc::clone(&claimed), at), outcome))))
        };
        outcomes.into_iter().take(claimed.claims.len()).enumerate().map(deliver).collect()
    }

    /// Notes what an answer says about doubts and held ids. While one says that a claim is not first,
    /// asks for those in doubt on the same event: one of them may be what is in its way.
    async fn resolve(&self, claim: &mut Claim, outcome: &mut Result<Outcome>, was_reissued: bool) {
        let doubts = &self.0.doubts;
        let mut was_sent_before = was_reissued || doubts.has(claim);
        loop {
            match outcome {
                Err(error) if error.is_retryable() => return doubts.note(claim),
                Err(_) => return doubts.decided(claim),
                Ok(answer) => self.0.held.note(&claim.identity, answer),
            }
            if outcome.as_ref().is_ok_and(is_held) {
                if was_sent_before {
                    doubts.note(claim);
                    *outcome = Err(undecided());
                }
                return;
            }
            doubts.decided(claim);
            if outcome.as_ref().is_ok_and(Outcome::is_claimed) || !doubts.ask(claim) {
                return;
            }
            was_sent_before = true;
            *outcome = self.claim_alone(claim).await;
        }
    }

    /// Sends claims. Notes whether some were sent again after their result was unknown.
    async fn send(&self, claims: &[Claim], was_reissued: &AtomicBool) -> Vec<Result<Outcome>> {
        in_batch(&self.0.outage, claims, |batch| {
            Box::pin(async move {
                let answer = self.0.ledger.claim(batch).await;
                let is_unknown = answer.as_ref().is_err_and(Error::is_retryable);
                was_reissued.fetch_or(is_unknown, Ordering::Relaxed);
                answer
            })
        })
        .await
    }

    async fn claim_alone(&self, claim: &Claim) -> Result<Outcome> {
        let mut answers = self.send(std::slice::from_ref(claim), &AtomicBool::new(false)).await;
        answers.pop().unwrap_or_else(|| Err(Error::Corrupt("a claim without an answer".into())))
    }

    async fn run_settles(self) {
        let mut runner = self.0.settles.runner();
        while let Some((settles, answers)) = runner.next().await {
            let outcomes = in_batch(&self.0.outage, &settles, |batch| self.0.ledger.settle(batch)).await;
            for (answer, outcome) in answers.into_iter().zip(outcomes) {
                let _ = answer.send(outcome);
            }
        }
    }

    async fn run_extends(self) {
        let mut runner = self.0.extends.runner();
        while let Some((extends, answers)) = runner.next().await {
            let outcomes = in_batch(&self.0.outage, &extends, |batch| self.0.ledger.extend(batch)).await;
            for (answer, outcome) in answers.into_iter().zip(outcomes) {
                let _ = answer.send(outcome);
            }
        }
    }
}

/// The answer to a claim that was sent before and met an open transaction, which may be its own.
fn undecided() -> Error {
    Error::Contended {
        what: "claiming: the connection was lost before, and the first attempt may still be running".into(),
        source: None,
    }
}

pub(crate) fn gone() -> Error {
    Error::Unavailable {
        what: "the batch's task ended before it answered (runtime shut down?)".into(),
        source: None,
    }
}

pub(crate) type Running<'a, O> = Pin<Box<dyn Future<Output = Result<Vec<Result<O>>>> + Send + 'a>>;

/// Runs a batch. If its statement fails on the data of some item, each item runs alone, so that a
/// bad row fails only itself.
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
        if !matches!(error, Error::Unavailable { .. }) {
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
