//! The journal and its settings.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::task::JoinSet;

use super::allocator::{Allocator, AllocatorMode, AllocatorSettings};
use super::chain::{EVENTS_MAX, Tail};
use super::ids::json;
use super::name;
use super::probe::must_keep_a_journal;
use super::store::Objects;
use crate::backend::Migrate;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::journal::{
    AggregateOf, Append, Appended, Checkpoint, Journal, JournalCapabilities, JournalSettings, JournalStat,
    JournalSweep, Leadership, Page, Position, ReadBatch, RelayState, RelayStore, Stored,
};
use crate::ledger::Token;

/// The most concurrent requests of one call.
const AT_ONCE: usize = 16;
/// Above this many aggregates, those without a running append are removed from `turns`.
const TURNS_MAX: usize = 1000;
/// How far index times may run ahead of the clock.
const AHEAD_MAX_MS: u64 = 1500;
/// The format of the objects.
const FORMAT: u32 = 1;

/// Settings of a journal in an object store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ObjectSettings {
    /// The settings of every journal; at most 1000 events per append.
    pub journal: JournalSettings,
    /// Whether the journal is created if it is missing.
    pub migrate: Migrate,
    /// Where the next number comes from.
    pub allocator: AllocatorSettings,
    /// How long an append may take to commit before readers give it up. An append that was only
    /// slow tries again.
    pub grace: Duration,
    /// How long an append may use an id that it has claimed, by the store's clock. After that it
    /// claims the id again before it commits, and a sweep may remove the intent. All processes must
    /// use the same value.
    pub intent_max: Duration,
}

impl Default for ObjectSettings {
    fn default() -> Self {
        ObjectSettings {
            journal: JournalSettings::default(),
            migrate: Migrate::default(),
            allocator: AllocatorSettings::default(),
            grace: Duration::from_secs(5),
            intent_max: Duration::from_hours(1),
        }
    }
}

/// A journal in an object store. Clones share its state.
#[derive(Debug, Clone)]
pub struct ObjectJournal(Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    me: Weak<Inner>,
    pub(super) objects: Arc<dyn Objects>,
    pub(super) id: String,
    pub(super) settings: JournalSettings,
    pub(super) mode: AllocatorMode,
    pub(super) allocator: Option<Box<dyn Allocator>>,
    pub(super) grace: Duration,
    pub(super) intent_max: Duration,
    /// The ends of chains as last seen.
    pub(super) tails: Mutex<HashMap<AggregateOf, Tail>>,
    /// The last index time that this process drew. The next one is later, whatever the clock says.
    last_ms: Arc<AtomicU64>,
    /// Appends of this process to one aggregate take turns: racing each other would only waste
    /// requests.
    append_locks: Mutex<HashMap<AggregateOf, Weak<tokio::sync::Mutex<()>>>>,
    /// Notified when this process appends.
    pub(super) changed: Notify,
    /// The recent size of appends read; larger ones count more.
    link_bytes: AtomicUsize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Meta {
    journal: String,
    format: u32,
}

impl ObjectJournal {
    /// Opens the journal in a store, creating it if there is none. Each call tests the store, and
    /// refuses one that can create a name twice or does not list in order.
    pub async fn open(objects: Arc<dyn Objects>, settings: ObjectSettings) -> Result<Self> {
        let limit = EVENTS_MAX as usize;
        if !(1..=limit).contains(&settings.journal.events_max) {
            let asked = settings.journal.events_max;
            return Err(Error::Config(format!(
                "{asked} events in one append; an object store takes 1 to {limit}"
            )));
        }
        must_keep_a_journal(objects.as_ref()).await?;
        let id = identify(objects.as_ref(), settings.migrate).await?;
        let mode = settings.allocator.mode();
        let allocator = settings.allocator.open(&id).await?;
        let last_ms = last_ms_of(&id);
        let bytes_max = settings.journal.page_bytes_max;
        let inner = |me: &Weak<Inner>| Inner {
            me: Weak::clone(me),
            objects,
            id,
            settings: settings.journal,
            mode,
            allocator,
            grace: settings.grace,
            intent_max: settings.intent_max,
            tails: Mutex::default(),
            last_ms,
            append_locks: Mutex::default(),
            changed: Notify::new(),
            link_bytes: AtomicUsize::new(bytes_max / 4),
        };
        Ok(ObjectJournal(Arc::new_cyclic(inner)))
    }
}

/// All journals in this process with the same id share one counter.
fn last_ms_of(journal: &str) -> Arc<AtomicU64> {
    static LAST: LazyLock<Mutex<HashMap<String, Arc<AtomicU64>>>> = LazyLock::new(Mutex::default);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(last.entry(journal.to_owned()).or_default())
}

/// Reads the journal's id, or creates it once.
async fn identify(objects: &dyn Objects, migrate: Migrate) -> Result<String> {
    let made = Meta { journal: uuid::Uuid::new_v4().to_string(), format: FORMAT };
    for _ in 0..3 {
        if let Some(body) = objects.get(name::META).await? {
            let meta: Meta = serde_json::from_slice(&body).map_err(|e| {
                Error::Corrupt(format!("{} in {} cannot be parsed: {e}", name::META, objects.about()))
            })?;
            if meta.format != FORMAT {
                let problem =
                    format!("{} has format {}; this build reads {FORMAT}", objects.about(), meta.format);
                return Err(Error::Schema(problem));
            }
            return Ok(meta.journal);
        }
        if migrate == Migrate::Check {
            return Err(Error::Schema(format!("there is no journal in {}", objects.about())));
        }
        objects.create(name::META, json(&made)?).await?;
    }
    Err(Error::Unavailable {
        what: format!("{} does not keep what is written", objects.about()),
        source: None,
    })
}

impl Inner {
    /// Draws an index time: at least `ms`, and after the last one of this process. At thousands per
    /// second some repeat, since running ahead of the clock would make readers wait.
    pub(super) fn take_ms(&self, ms: u64) -> u64 {
        let next = |last: u64| if last < ms + AHEAD_MAX_MS { ms.max(last + 1) } else { ms };
        let before = self.last_ms.fetch_update(SeqCst, SeqCst, |last| Some(next(last).max(last)));
        next(before.unwrap_or_else(|last| last))
    }

    /// How many appends to read at once: fewer if they are large, so that they take about as much
    /// memory as a page.
    pub(super) fn at_once(&self) -> usize {
        (self.settings.page_bytes_max / self.link_bytes.load(SeqCst).max(1)).clamp(1, AT_ONCE)
    }

    pub(super) fn has_read(&self, bytes: usize) {
        let _ = self.link_bytes.fetch_update(SeqCst, SeqCst, |before| Some(bytes.max(before / 8 * 7)));
    }

    /// Waits for a turn to append to an aggregate.
    pub(super) async fn append_lock(&self, of: &AggregateOf) -> OwnedMutexGuard<()> {
        let append_lock = {
            let mut append_locks = self.append_locks.lock().unwrap_or_else(PoisonError::into_inner);
            if append_locks.len() > TURNS_MAX {
                append_locks.retain(|_, append_lock| append_lock.strong_count() > 0);
            }
            let known = append_locks.get(of).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let append_lock = Arc::default();
                append_locks.insert(of.clone(), Arc::downgrade(&append_lock));
                append_lock
            })
        };
        append_lock.lock_owned().await
    }

    /// Runs `work` for each item, several at a time; returns the results in order.
    pub(super) async fn each<I, T, W, F>(&self, items: Vec<I>, work: W) -> Result<Vec<T>>
    where
        I: Send + 'static,
        T: Send + 'static,
        W: Fn(Arc<Inner>, I) -> F,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let gone = || Error::Unavailable { what: "the journal was closed".into(), source: None };
        let me = self.me.upgrade().ok_or_else(gone)?;
        let mut answers: Vec<Option<T>> = Vec::with_capacity(items.len());
        let mut under_way: JoinSet<(usize, Result<T>)> = JoinSet::new();
        let mut items = items.into_iter().enumerate();
        loop {
            while under_way.len() < AT_ONCE
                && let Some((index, item)) = items.next()
            {
                answers.push(None);
                let work = work(Arc::clone(&me), item);
                under_way.spawn(async move { (index, work.await) });
            }
            match under_way.join_next().await {
                None => break,
                Some(Ok((index, answer))) => answers[index] = Some(answer?),
                Some(Err(e)) => return Err(Error::unavailable("a request ended early", e)),
            }
        }
        answers.into_iter().map(|answer| answer.ok_or_else(gone)).collect()
    }
}

fn of(tenant: Option<&Tenant>, aggregate: &Aggregate) -> AggregateOf {
    AggregateOf { tenant: tenant.cloned(), aggregate: aggregate.clone() }
}

#[async_trait]
impl Journal for ObjectJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        self.0.append(append).await
    }

    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        self.0.events_from(&of(tenant, aggregate), from, limit).await
    }

    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        self.0.read(after, limit).await
    }

    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        self.0.known(tenant, id).await
    }

    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
        Ok(self.0.tail(&of(tenant, aggregate)).await?.head())
    }

    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        self.0.wait(after, at_most).await
    }

    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        self.0.sweep(settings).await
    }

    async fn stat(&self) -> Result<JournalStat> {
        self.0.stat().await
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.objects.now().await?.about)
    }

    async fn horizon(&self) -> Result<(Time, Position)> {
        Err(Error::Unsupported(
            "a journal in an object store cannot say up to which position everything is acknowledged: its \
             positions are times, by clocks that may differ"
                .into(),
        ))
    }

    async fn probe(&self) -> Result<()> {
        self.0.objects.list("", "", 1).await.map(drop) // the clock is a guess between two answers
    }

    fn id(&self) -> &str {
        &self.0.id
    }

    fn capabilities(&self) -> JournalCapabilities {
        JournalCapabilities {
            backend: "object",
            durable: self.0.objects.durable(),
            shared: true,
            timed: true,
        }
    }
}

#[async_trait]
impl RelayStore for ObjectJournal {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        self.0.acquire_leadership(relay, owner, lease).await
    }

    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        self.0.renew_leadership(relay, token, lease).await
    }

    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        self.0.save(relay, token, checkpoint).await
    }

    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        self.0.release_leadership(relay, token).await
    }

    async fn relays(&self) -> Result<Vec<RelayState>> {
        self.0.relays().await
    }

    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        self.0.rewind(relay, to, if_token).await
    }

    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        self.0.forget_relay(relay).await
    }

    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        self.0.count_after(after, limit).await
    }
}
