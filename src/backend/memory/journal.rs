//! A journal in the memory of this process, for tests and for programs that only need events within
//! one process.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::journal::{
    AggregateOf, Append, Appended, Checkpoint, Filling, Journal, JournalCapabilities, JournalSettings,
    JournalStat, JournalSweep, Leadership, Page, Placing, Position, ReadBatch, RelayState, RelayStore,
    Stored, is_behind, may_be_forgotten, must_be_drawn, must_be_last, swept_up_to,
};
use crate::ledger::Token;

/// A journal in memory. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryJournal(Arc<Inner>, JournalSettings);

#[derive(Debug)]
struct Inner {
    id: String,
    clock: Arc<dyn Clock>,
    store: Mutex<Store>,
    /// The last position, watched by waiting readers.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Store {
    events: BTreeMap<u64, Stored>,
    last: u64,
    aggregates: HashMap<AggregateOf, Held>,
    ids: HashMap<(Option<Tenant>, EventId), u64>,
    relays: BTreeMap<RelayName, RelayState>,
    token: i64,
}

/// An aggregate's last seq, and the positions of its events that were not swept, by seq.
#[derive(Debug, Default)]
struct Held {
    head: u64,
    positions: BTreeMap<u64, u64>,
}

impl Default for MemoryJournal {
    fn default() -> Self {
        MemoryJournal::new(JournalSettings::default())
    }
}

impl MemoryJournal {
    /// An empty journal on the machine's clock.
    pub fn new(settings: JournalSettings) -> Self {
        MemoryJournal::with_clock(settings, Arc::new(SystemClock))
    }

    /// An empty journal on a clock of your own.
    pub fn with_clock(settings: JournalSettings, clock: Arc<dyn Clock>) -> Self {
        let inner = Inner {
            id: uuid::Uuid::new_v4().to_string(),
            clock,
            store: Mutex::default(),
            last: watch::Sender::new(0),
        };
        MemoryJournal(Arc::new(inner), settings)
    }

    /// The same journal with other settings, as another process would open it.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn reopened(&self, settings: JournalSettings) -> Self {
        MemoryJournal(Arc::clone(&self.0), settings)
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn page<'s>(&self, events: impl Iterator<Item = &'s Stored>, limit: usize) -> Page {
        let mut page = Filling::new(limit, self.1.page_bytes_max);
        for stored in events {
            if page.is_full() {
                break;
            }
            page.take(stored.clone());
        }
        page.done()
    }

    pub(crate) fn append_now(&self, append: &Append) -> Result<Appended> {
        let ready = append.check(&self.1)?;
        let now = self.0.clock.now();
        let mut store = self.store();
        let of = append.of();
        let head = store.aggregates.get(&of).map_or(0, |held| held.head);
        let mut placed = ready.decide(head, &self.1, |index| {
            let id = (append.tenant.clone(), append.events[index].id.clone());
            let stored = store.events.get(store.ids.get(&id)?)?;
            Some((stored.seq, stored.position.clone(), stored.fingerprint))
        })?;
        for index in 0..placed.len() {
            if ready.same[index] != index {
                placed[index].position = placed[ready.same[index]].position.clone();
                continue;
            }
            if placed[index].placing != Placing::New {
                continue;
            }
            store.last += 1;
            let (number, seq) = (store.last, placed[index].seq);
            placed[index].position = Position::of(number);
            let mut event = append.events[index].clone();
            event.tenant.clone_from(&append.tenant);
            event.origin = None;
            store.ids.insert((append.tenant.clone(), event.id.clone()), number);
            let fingerprint = ready.fingerprints[index];
            let stored =
                Stored::new(Position::of(number), now, fingerprint, event, append.aggregate.clone(), seq);
            store.events.insert(number, stored);
            let numbered = store.aggregates.entry(of.clone()).or_default();
            numbered.head = seq;
            numbered.positions.insert(seq, number);
        }
        self.0.last.send_replace(store.last);
        Ok(Appended::new(placed))
    }
}

impl Store {
    fn relay(&mut self, relay: &RelayName, token: Token) -> Result<&mut RelayState> {
        let fenced = || Error::Fenced { what: format!("relay {relay} is led by someone else now") };
        self.relays.get_mut(relay).filter(|state| state.token == token).ok_or_else(fenced)
    }

    fn next_token(&mut self) -> Token {
        self.token += 1;
        Token(self.token)
    }
}

#[async_trait]
impl Journal for MemoryJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        self.append_now(append)
    }

    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        let store = self.store();
        let of = AggregateOf { tenant: tenant.cloned(), aggregate: aggregate.clone() };
        let Some(held) = store.aggregates.get(&of) else { return Ok(Page::default()) };
        let events = held.positions.range(from..).filter_map(|(_, position)| store.events.get(position));
        Ok(self.page(events, limit))
    }

    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        let store = self.store();
        let from = after.number().saturating_add(1);
        let page = self.page(store.events.range(from..).map(|(_, stored)| stored), limit);
        let next = match page.events.last() {
            Some(last) if page.more => last.position.clone(),
            // Swept positions are empty, so a reader can move past them.
            _ if limit > 0 => after.clone().max(Position::of(store.last)),
            _ => after.clone(),
        };
        Ok(ReadBatch::new(page.events, next, false).more(page.more))
    }

    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        let store = self.store();
        let position = store.ids.get(&(tenant.cloned(), id.clone()));
        Ok(position.and_then(|position| store.events.get(position).cloned()))
    }

    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
        let of = AggregateOf { tenant: tenant.cloned(), aggregate: aggregate.clone() };
        Ok(self.store().aggregates.get(&of).map_or(0, |held| held.head))
    }

    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        let mut last = self.0.last.subscribe();
        let more = last.wait_for(|last| *last > after.number());
        let _ = tokio::time::timeout(at_most, more).await; // a timeout is as good as a wake-up
        Ok(())
    }

    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        let cutoff = self.0.clock.now().minus(settings.older_than);
        let mut store = self.store();
        let relays: Vec<_> = store.relays.values().cloned().collect();
        let Some(up_to) = swept_up_to(&relays) else { return Ok(0) };
        let may_go = |stored: &&Stored| stored.at < cutoff && !is_behind(&relays, stored);
        let going: Vec<Stored> = store
            .events
            .range(..=up_to.number())
            .map(|(_, stored)| stored)
            .filter(may_go)
            .take(settings.batch_max)
            .cloned()
            .collect();
        if !settings.dry_run {
            for stored in &going {
                store.remove(stored);
            }
        }
        Ok(going.len() as u64)
    }

    async fn stat(&self) -> Result<JournalStat> {
        let store = self.store();
        Ok(JournalStat {
            events: store.events.len() as u64,
            aggregates: store.aggregates.len() as u64,
            exact: true,
            oldest_at: store.events.values().next().map(|stored| stored.at),
            last: store.events.values().next_back().map(|stored| stored.position.clone()),
        })
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.clock.now())
    }

    async fn horizon(&self) -> Result<(Time, Position)> {
        let now = self.0.clock.now(); // before the position: see the contract
        Ok((now, Position::of(self.store().last)))
    }

    fn id(&self) -> &str {
        &self.0.id
    }

    fn capabilities(&self) -> JournalCapabilities {
        JournalCapabilities { backend: "memory", durable: false, shared: false, timed: false }
    }
}

#[async_trait]
impl RelayStore for MemoryJournal {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        let now = self.0.clock.now();
        let mut store = self.store();
        let before = store.relays.get(relay).cloned();
        if let Some(RelayState { owner: Some(by), until: Some(until), .. }) = &before
            && *until > now
        {
            return Ok(Leadership::Taken { by: by.clone(), until: *until });
        }
        let token = store.next_token();
        let checkpoint = before.as_ref().and_then(|state| state.checkpoint.clone());
        let saved_at = before.and_then(|state| state.saved_at);
        let state = RelayState::new(
            relay.clone(),
            Some(owner.clone()),
            Some(now.plus(lease)),
            token,
            checkpoint.clone(),
            saved_at,
        );
        store.relays.insert(relay.clone(), state);
        let checkpoint = checkpoint.unwrap_or_else(|| Checkpoint::start(&self.0.id));
        Ok(Leadership::Acquired { token, checkpoint })
    }

    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        let until = self.0.clock.now().plus(lease);
        self.store().relay(relay, token)?.until = Some(until);
        Ok(())
    }

    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.must_be_of(&self.0.id)?;
        let now = self.0.clock.now();
        let mut store = self.store();
        let last = store.last;
        let state = store.relay(relay, token)?;
        must_be_drawn(relay, &checkpoint.position, last)?;
        state.checkpoint = Some(checkpoint.clone());
        state.saved_at = Some(now);
        Ok(())
    }

    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        self.store().relay(relay, token)?.until = None;
        Ok(())
    }

    async fn relays(&self) -> Result<Vec<RelayState>> {
        Ok(self.store().relays.values().cloned().collect())
    }

    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        to.must_be_of(&self.0.id)?;
        let now = self.0.clock.now();
        let mut store = self.store();
        must_be_last(relay, if_token, store.relays.get(relay).map(|state| state.token))?;
        must_be_drawn(relay, &to.position, store.last)?;
        let token = store.next_token();
        let unknown = || RelayState::new(relay.clone(), None, None, token, None, None);
        let state = store.relays.entry(relay.clone()).or_insert_with(unknown);
        state.token = token;
        state.until = None;
        state.saved_at = Some(now);
        Ok(state.checkpoint.replace(to.clone()))
    }

    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        let now = self.0.clock.now();
        let mut store = self.store();
        let state = may_be_forgotten(relay, store.relays.get(relay).cloned(), now)?;
        store.relays.remove(relay);
        Ok(state)
    }

    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        let from = after.number().saturating_add(1);
        Ok(self.store().events.range(from..).take(limit as usize).count() as u64)
    }
}

impl Store {
    fn remove(&mut self, stored: &Stored) {
        let event = &stored.event;
        self.events.remove(&stored.position.number());
        self.ids.remove(&(event.tenant.clone(), event.id.clone()));
        if let Some(aggregate) = &event.aggregate {
            let of = AggregateOf { tenant: event.tenant.clone(), aggregate: aggregate.clone() };
            if let Some(held) = self.aggregates.get_mut(&of) {
                held.positions.remove(&stored.seq);
            }
        }
    }
}
