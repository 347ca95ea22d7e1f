//! Gathers skips in memory and writes them once a second, in the background.
//!
//! A caller adds to maps under a lock and never waits for the ledger. What a second brings is
//! bounded: beyond that, skips are counted and not logged. A flush that fails is not repeated: it may have
//! taken effect, and counts of prevented repeats must never be too high. So what is lost (that, and the last
//! second of a process that is killed) makes those too low; the skips of a flush that fails are counted as not
//! logged with the next one.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::skips::{Amount, Layer, ScopeOf, SkipBatch, SkipNote, SkipReason, Skipped, first_and_last};
use super::{Identity, Ledger};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::exact::Field;

/// How often what was gathered is written.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a flush may take.
const FLUSH_MAX: Duration = Duration::from_secs(10);
/// How many identities are logged in a period at most.
const IDENTITIES_MAX: usize = 256;
/// How many scopes are counted apart in a period at most.
const SCOPES_MAX: usize = 256;
/// A larger payload is not searched for its value.
const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// A skipped delivery.
#[derive(Debug, Clone, Copy)]
pub struct Skip<'a> {
    /// The event and the scope.
    pub identity: &'a Identity,
    /// Why it was skipped.
    pub reason: SkipReason,
    /// The record.
    pub origin: Option<&'a Origin>,
    /// Its bytes, where its value may be.
    pub payload: Option<&'a [u8]>,
    /// Whose doing it is that the effect was not done twice; `None` if it was not done before, or if
    /// that is not certain.
    pub prevented: Option<Layer>,
}

/// Is told what was written, for metrics.
type Observer = Box<dyn Fn(&SkipBatch) + Send + Sync>;

/// Notes skipped deliveries, and counts effects that were not done twice, in the background. Clones
/// share it. A [`Guard`](crate::Guard) has one ([`skip_log`](crate::Guard::skip_log)).
#[derive(Clone)]
pub struct SkipLog(Arc<Inner>);

struct Inner {
    ledger: Arc<dyn Ledger>,
    value: Option<Field>,
    observer: Observer,
    /// The ledger cannot store it, or was told not to.
    off: AtomicBool,
    gathered: Mutex<Gathered>,
}

/// Why, when and which record.
type Note = (SkipReason, Instant, Option<Origin>);

#[derive(Default)]
struct Gathered {
    skipped: HashMap<Identity, (u64, Vec<Note>)>,
    prevented: HashMap<(Layer, Option<ScopeOf>), Amount>,
    unlogged: HashMap<Option<ScopeOf>, u64>,
    /// Whether a task will write it.
    is_awaited: bool,
}

impl fmt::Debug for SkipLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SkipLog").field("off", &self.0.off).finish_non_exhaustive()
    }
}

impl SkipLog {
    /// A log in this ledger. With `value`, the number there in a payload is summed. Without `on`, or
    /// if the ledger [cannot keep one](super::Capabilities::skips), it does nothing.
    pub fn new(ledger: Arc<dyn Ledger>, on: bool, value: Option<Field>) -> Self {
        SkipLog::observed(ledger, on, value, Box::new(|_| {}))
    }

    pub(crate) fn observed(
        ledger: Arc<dyn Ledger>,
        on: bool,
        value: Option<Field>,
        observer: Observer,
    ) -> Self {
        let off = AtomicBool::new(!(on && ledger.capabilities().skips));
        SkipLog(Arc::new(Inner { ledger, value, observer, off, gathered: Mutex::default() }))
    }

    /// Notes a skip. Never waits.
    pub fn note(&self, skip: Skip<'_>) {
        if self.0.off.load(Ordering::Relaxed) {
            return;
        }
        let amount = skip.prevented.map(|layer| (layer, self.0.value_in(skip.payload)));
        let mut gathered = self.0.lock();
        gathered.log(skip.identity, skip.reason, skip.origin);
        if let Some((layer, amount)) = amount {
            gathered.count(layer, (skip.identity.tenant.clone(), skip.identity.scope.clone()), amount);
        }
        self.wake(&mut gathered);
    }

    /// Counts an effect that was not done twice, of something that is not logged. Never waits.
    pub fn prevented(&self, layer: Layer, of: ScopeOf, payload: Option<&[u8]>) {
        if self.0.off.load(Ordering::Relaxed) {
            return;
        }
        let amount = self.0.value_in(payload);
        let mut gathered = self.0.lock();
        gathered.count(layer, of, amount);
        self.wake(&mut gathered);
    }

    /// Starts the task that writes, if none runs. Without a runtime it is left for the next note.
    fn wake(&self, gathered: &mut Gathered) {
        if gathered.is_awaited {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            gathered.is_awaited = true;
            let inner = Arc::downgrade(&self.0);
            runtime.spawn(write_on(Writing { inner, has_ended: false }));
        }
    }

    /// Writes what was gathered. For the end of a process; otherwise it is written within a second.
    pub async fn flush(&self) -> Result<()> {
        self.0.flush().await
    }
}

impl Gathered {
    fn log(&mut self, identity: &Identity, reason: SkipReason, origin: Option<&Origin>) {
        let note = |notes: &mut Vec<_>| {
            notes.push((reason, Instant::now(), origin.cloned()));
            first_and_last(notes);
        };
        if let Some((count, notes)) = self.skipped.get_mut(identity) {
            *count += 1;
            note(notes);
        } else if self.skipped.len() < IDENTITIES_MAX {
            let (count, notes) = self.skipped.entry(identity.clone()).or_default();
            *count = 1;
            note(notes);
        } else {
            self.not_logged(Some((identity.tenant.clone(), identity.scope.clone())), 1);
        }
    }

    fn not_logged(&mut self, mut of: Option<ScopeOf>, count: u64) {
        if self.unlogged.len() >= SCOPES_MAX && !self.unlogged.contains_key(&of) {
            of = None;
        }
        *self.unlogged.entry(of).or_default() += count;
    }

    fn count(&mut self, layer: Layer, of: ScopeOf, amount: Amount) {
        let mut key = (layer, Some(of));
        if self.prevented.len() >= SCOPES_MAX && !self.prevented.contains_key(&key) {
            key.1 = None;
        }
        self.prevented.entry(key).or_default().add(amount);
    }

    fn is_empty(&self) -> bool {
        self.skipped.is_empty() && self.prevented.is_empty() && self.unlogged.is_empty()
    }

    fn take(&mut self) -> SkipBatch {
        let now = Instant::now();
        let skipped = self.skipped.drain().map(|(identity, (count, notes))| {
            let note = |(reason, at, origin)| SkipNote { reason, age: now.duration_since(at), origin };
            Skipped { identity, count, notes: notes.into_iter().map(note).collect() }
        });
        SkipBatch {
            skipped: skipped.collect(),
            prevented: self.prevented.drain().map(|((layer, of), amount)| (layer, of, amount)).collect(),
            unlogged: self.unlogged.drain().collect(),
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn value_in(&self, payload: Option<&[u8]>) -> Amount {
        let payload = payload.filter(|payload| payload.len() <= PAYLOAD_BYTES_MAX);
        Amount::one(self.value.as_ref().zip(payload).and_then(|(value, payload)| value.number(payload)))
    }

    async fn flush(&self) -> Result<()> {
        let batch = {
            let mut gathered = self.lock();
            if gathered.is_empty() {
                return Ok(());
            }
            gathered.take()
        };
        // Also if whoever waits for it gives up: nobody knows then what was written.
        let mut lost = Lost { inner: self, batch: Some(batch) };
        let Some(batch) = &lost.batch else { return Ok(()) };
        let late = |late| Error::unavailable("logging skips", late);
        let noted = tokio::time::timeout(FLUSH_MAX, self.ledger.note_skips(batch)).await;
        noted.map_err(late).flatten()?;
        (self.observer)(batch);
        lost.batch = None;
        Ok(())
    }
}

/// A batch on its way. If it is dropped, its skips are counted as not logged with the next one.
struct Lost<'i> {
    inner: &'i Inner,
    batch: Option<SkipBatch>,
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        let Some(batch) = self.batch.take() else { return };
        let mut gathered = self.inner.lock();
        for Skipped { identity, count, .. } in batch.skipped {
            gathered.not_logged(Some((identity.tenant, identity.scope)), count);
        }
        for (of, count) in batch.unlogged {
            gathered.not_logged(of, count);
        }
    }
}

/// The task that writes. When it ends, also with its runtime, the next note starts another.
struct Writing {
    inner: Weak<Inner>,
    /// It has said itself that nobody writes any more.
    has_ended: bool,
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade().filter(|_| !self.has_ended) {
            inner.lock().is_awaited = false;
        }
    }
}

/// Writes until there is nothing more to write. It holds the ledger only while it writes.
async fn write_on(mut writing: Writing) {
    let mut failed = false;
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(inner) = writing.inner.upgrade() else { return };
        {
            let mut gathered = inner.lock();
            if gathered.is_empty() {
                gathered.is_awaited = false; // whoever notes something from now on starts another task
                writing.has_ended = true;
                return;
            }
        }
        match inner.flush().await {
            Ok(()) => failed = false,
            Err(error) if error.is_retryable() => {
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!(target: "hapax", error = %error.chain(), "skips could not be logged; those of now are not counted either");
                }
            }
            Err(error) => {
                inner.off.store(true, Ordering::Relaxed);
                tracing::warn!(target: "hapax", error = %error.chain(), "this ledger takes no skips; they are neither logged nor counted");
                return;
            }
        }
    }
}
