//! Coalescing: single claims and settlings of concurrent tasks gather into batches by themselves.
//!
//! While one statement is under way the next batch collects; there is no timer, so a lone claim goes at once. Statements
//! run in tasks of their own, so a caller that is cancelled cancels nothing of its neighbours; an outcome that nobody
//! takes delivery of gives its claim back when it is dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use super::{Claim, Ledger, Mode, Outcome, Settle, Settled, Verdict};
use crate::error::{Error, Result};

/// The most events in one statement.
const BATCH_MAX: usize = 1000;

/// Gathers single calls into batches of a ledger. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Inner>);

struct Inner {
    ledger: Arc<dyn Ledger>,
    claims: Queue<Claim, Delivered>,
    settles: Queue<Settle, Settled>,
}

struct Queue<I, O>(Mutex<Waiting<I, O>>);

struct Waiting<I, O> {
    items: Vec<I>,
    answers: Vec<oneshot::Sender<Result<O>>>,
    running: usize,
}

impl<I, O> Default for Queue<I, O> {
    fn default() -> Self {
        Queue(Mutex::new(Waiting { items: Vec::new(), answers: Vec::new(), running: 0 }))
    }
}

type Batch<I, O> = (Vec<I>, Vec<oneshot::Sender<Result<O>>>);

impl<I, O> Queue<I, O> {
    /// Adds an item; true if a runner must be started for it.
    fn push(&self, item: I, answer: oneshot::Sender<Result<O>>, runners_max: usize) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.items.push(item);
        waiting.answers.push(answer);
        let start = waiting.running < runners_max;
        waiting.running += usize::from(start);
        start
    }

    /// The next batch; none ends the runner.
    fn take(&self) -> Option<Batch<I, O>> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.items.is_empty() {
            waiting.running -= 1;
            return None;
        }
        let rest = waiting.items.len().min(BATCH_MAX);
        let later = (waiting.items.split_off(rest), waiting.answers.split_off(rest));
        Some((
            std::mem::replace(&mut waiting.items, later.0),
            std::mem::replace(&mut waiting.answers, later.1),
        ))
    }
}

/// An outcome on its way to its caller. Dropped on the way, it gives the claim back.
struct Delivered {
    outcome: Option<Outcome>,
    back: Option<(Batcher, Settle)>,
}

impl Delivered {
    fn new(batcher: &Batcher, claim: &Claim, outcome: Outcome) -> Self {
        let back = match (&outcome, claim.mode) {
            (Outcome::First(grant), Mode::Lease(_) | Mode::Once { .. }) => Some((
                batcher.clone(),
                Settle {
                    identity: claim.identity.clone(),
                    week: grant.week,
                    token: grant.token,
                    verdict: Verdict::release(),
                    order: claim.order.clone(),
                    advance_to: None,
                },
            )),
            _ => None,
        };
        Delivered { outcome: Some(outcome), back }
    }

    fn take(mut self) -> Option<Outcome> {
        self.back = None;
        self.outcome.take()
    }
}

impl Drop for Delivered {
    fn drop(&mut self) {
        if let Some((batcher, settle)) = self.back.take() {
            batcher.settle_later(settle);
        }
    }
}

impl Batcher {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Batcher(Arc::new(Inner { ledger, claims: Queue::default(), settles: Queue::default() }))
    }

    pub(crate) fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.0.ledger
    }

    /// Claims one event. Safe to cancel.
    pub(crate) async fn claim(&self, claim: Claim) -> Result<Outcome> {
        self.0.ledger.settings().check(&claim)?; // before it can spoil a batch
        let (send, receive) = oneshot::channel();
        if self.0.claims.push(claim, send, self.0.ledger.parallel_batches()) {
            tokio::spawn(self.clone().run_claims());
        }
        match receive.await {
            Ok(Ok(delivered)) => delivered.take().ok_or_else(gone),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(gone()),
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

    async fn run_claims(self) {
        while let Some((claims, answers)) = self.0.claims.take() {
            let outcomes = in_batch(&claims, |batch| self.0.ledger.claim(batch)).await;
            for ((claim, answer), outcome) in claims.iter().zip(answers).zip(outcomes) {
                let _ = answer.send(outcome.map(|outcome| Delivered::new(&self, claim, outcome)));
            }
        }
    }

    async fn run_settles(self) {
        while let Some((settles, answers)) = self.0.settles.take() {
            let outcomes = in_batch(&settles, |batch| self.0.ledger.settle(batch)).await;
            for (answer, outcome) in answers.into_iter().zip(outcomes) {
                let _ = answer.send(outcome);
            }
        }
    }
}

fn gone() -> Error {
    Error::Unavailable {
        what: "the batch's task ended before it answered (runtime shut down?)".into(),
        source: None,
    }
}

type Running<'a, O> = Pin<Box<dyn Future<Output = Result<Vec<Result<O>>>> + Send + 'a>>;

/// Runs a batch; if its statement fails on somebody's data, everybody goes alone, so a bad row harms only itself.
async fn in_batch<'a, I, O>(items: &'a [I], run: impl Fn(&'a [I]) -> Running<'a, O>) -> Vec<Result<O>> {
    let error = match run(items).await {
        Ok(answers) => return answers,
        Err(error) => error,
    };
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
