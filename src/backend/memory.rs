//! A ledger in the memory of this process, for tests and for programs that only need to deduplicate
//! within one process.
//!
//! It keeps the whole contract except durability: its content ends with the process.

pub(crate) mod access;
pub(crate) mod analytics;
pub(crate) mod journal;
pub(crate) mod keys;
mod operations;
pub(crate) mod projection;
mod skips;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::{Clock, SystemClock, Time};
use crate::error::Result;
use crate::event::Record;
use crate::id::{Aggregate, EventId, Scope, Tenant, Topic};
use crate::ledger::transition::{Head, Row};
use crate::ledger::{
    Audit, Capabilities, Claim, Claims, ConsumerStore, Due, Entry, Epoch, Extend, HeldQuery, Identity,
    Intervene, Key, Marker, Outcome, PublishedDead, Rows, Settings, Settle, Settled, State, SweepSettings,
    SweepState, Swept, Token, Week, claim_rows, extend_rows, may_sweep, runnable, settle_rows,
};

/// A ledger in memory. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryLedger {
    store: Arc<Mutex<Store>>,
    skips: Arc<Mutex<skips::Skips>>,
    settings: Settings,
}

#[derive(Debug, Clone)]
struct Store {
    epoch: Epoch,
    clock: Arc<dyn Clock>,
    scopes: Vec<(Option<Tenant>, Scope, Time)>,
    scope_numbers: HashMap<(Option<Tenant>, Scope), i32>,
    rows: BTreeMap<Key, Row>,
    /// Open entries whose week was dropped.
    kept: BTreeMap<Key, Row>,
    /// Keys of `rows` and `kept` whose bytes are held.
    held: BTreeSet<Key>,
    /// Dead entries that were published, each with the token it had then.
    copied: HashMap<Key, Token>,
    /// Until when dead events belong to whoever copies them out.
    reserved: HashMap<Key, Time>,
    /// Each marker with the time it was set.
    markers: BTreeMap<(Scope, Topic, i32), (Marker, Time)>,
    heads: HashMap<(i32, Aggregate), Head>,
    weeks: BTreeMap<Week, Time>,
    /// When each week was dropped, and the highest scope number at that time.
    dropped: BTreeMap<Week, (Time, i32)>,
    audit: Vec<Audit>,
    sweep_state: Option<SweepState>,
    token: i64,
}

impl Default for MemoryLedger {
    fn default() -> Self {
        MemoryLedger::new(Settings::default())
    }
}

impl MemoryLedger {
    /// An empty ledger on the machine's clock.
    pub fn new(settings: Settings) -> Self {
        MemoryLedger::with_clock(settings, Arc::new(SystemClock))
    }

    /// An empty ledger on a clock of your own.
    pub fn with_clock(settings: Settings, clock: Arc<dyn Clock>) -> Self {
        let store = Store {
            epoch: Epoch::of([uuid::Uuid::new_v4()]),
            clock,
            scopes: Vec::new(),
            scope_numbers: HashMap::new(),
            rows: BTreeMap::new(),
            kept: BTreeMap::new(),
            held: BTreeSet::new(),
            copied: HashMap::new(),
            reserved: HashMap::new(),
            markers: BTreeMap::new(),
            heads: HashMap::new(),
            weeks: BTreeMap::from([(Week::TIMELESS, Time::default())]),
            dropped: BTreeMap::new(),
            audit: Vec::new(),
            sweep_state: None,
            token: 0,
        };
        MemoryLedger { store: Arc::new(Mutex::new(store)), skips: Arc::default(), settings }
    }

    /// The same ledger with other settings, as another process would open it.
    #[must_use]
    pub fn with_settings(&self, settings: Settings) -> Self {
        MemoryLedger { store: Arc::clone(&self.store), skips: Arc::clone(&self.skips), settings }
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_skips(&self) -> MutexGuard<'_, skips::Skips> {
        self.skips.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a claim made in a transaction was committed, for callers whose commit was never
    /// acknowledged.
    pub fn was_committed(&self, claim: &Claim) -> Result<bool> {
        let week = self.settings.check(claim)?;
        let mut store = self.lock();
        let scope = (claim.identity.tenant.clone(), claim.identity.scope.clone());
        let Some(scope) = store.scope_numbers.get(&scope).copied() else { return Ok(false) };
        let row = store.row(&Key { week, scope, id: claim.identity.id.key().into_owned() })?;
        Ok(row.is_some_and(|row| row.nonce == claim.nonce))
    }

    /// Opens a transaction: its claims appear all at once when it commits, and not at all if it is
    /// dropped.
    ///
    /// It locks the whole ledger until then; no other process can be waiting for it.
    pub fn begin(&self) -> MemoryTransaction<'_> {
        let store = self.lock();
        let draft = store.clone();
        MemoryTransaction { store, draft, settings: &self.settings }
    }
}

/// A transaction on a [`MemoryLedger`].
#[derive(Debug)]
pub struct MemoryTransaction<'l> {
    store: MutexGuard<'l, Store>,
    draft: Store,
    settings: &'l Settings,
}

impl MemoryTransaction<'_> {
    /// Claims events in this transaction.
    pub fn claim(&mut self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        claim_rows(&mut self.draft, claims, self.settings)
    }

    /// Settles claims in this transaction.
    pub fn settle(&mut self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        settle_rows(&mut self.draft, settles, self.settings)
    }

    /// Sets markers in this transaction; see [`ConsumerStore::set_markers`].
    pub fn set_markers(&mut self, scope: &Scope, markers: &[Marker]) {
        self.draft.set_markers(scope, markers);
    }

    /// Commits the transaction.
    pub fn commit(mut self) {
        *self.store = self.draft;
    }
}

impl Rows for Store {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<(i32, Time)> {
        let key = (tenant.cloned(), scope.clone());
        if let Some(number) = self.scope_numbers.get(&key) {
            return Ok((*number, self.scopes[*number as usize].2));
        }
        let number = self.scopes.len() as i32;
        let now = self.now();
        self.scopes.push((key.0.clone(), key.1.clone(), now));
        self.scope_numbers.insert(key, number);
        Ok((number, now))
    }

    fn known_scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<Option<i32>> {
        Ok(self.scope_numbers.get(&(tenant.cloned(), scope.clone())).copied())
    }

    fn token(&mut self) -> Result<Token> {
        self.token += 1;
        Ok(Token(self.token))
    }

    fn dropped(&mut self, week: Week) -> Result<Option<i32>> {
        Ok(self.dropped.get(&week).map(|(_, barred)| *barred))
    }

    fn make_week(&mut self, week: Week) -> Result<()> {
        let now = self.now();
        self.weeks.insert(week, now);
        Ok(())
    }

    fn weeks(&mut self, week: Week) -> Result<(usize, bool)> {
        Ok((self.weeks.len(), self.weeks.contains_key(&week)))
    }

    fn row(&mut self, key: &Key) -> Result<Option<Row>> {
        Ok(self.rows.get(key).or_else(|| self.kept.get(key)).cloned())
    }

    fn put(&mut self, key: &Key, row: &Row) -> Result<()> {
        let now = self.now();
        if row.body.is_some() {
            self.held.insert(key.clone());
        } else {
            self.held.remove(key);
        }
        let gone = self.dropped.contains_key(&key.week) && !self.weeks.contains_key(&key.week);
        if gone || self.kept.contains_key(key) {
            self.kept.insert(key.clone(), row.clone());
            return Ok(());
        }
        self.weeks.insert(key.week, now);
        self.rows.insert(key.clone(), row.clone());
        Ok(())
    }

    fn delete(&mut self, key: &Key) -> Result<()> {
        self.rows.remove(key);
        self.kept.remove(key);
        self.held.remove(key);
        self.copied.remove(key);
        self.reserved.remove(key);
        Ok(())
    }

    fn head(&mut self, scope: i32, aggregate: &Aggregate) -> Result<Option<Head>> {
        Ok(self.heads.get(&(scope, aggregate.clone())).cloned())
    }

    fn put_head(&mut self, scope: i32, aggregate: &Aggregate, head: &Head) -> Result<()> {
        self.heads.insert((scope, aggregate.clone()), head.clone());
        Ok(())
    }

    fn audit(&mut self, intervene: &Intervene) -> Result<()> {
        let at = self.now();
        self.audit.push(Audit {
            at,
            by: intervene.by.clone(),
            what: intervene.what.name().to_owned(),
            identity: intervene.identity.to_string(),
            of: Some(intervene.identity.clone()),
            reason: intervene.reason.clone(),
        });
        Ok(())
    }
}

impl Store {
    fn entry(&self, key: &Key, row: &Row) -> Result<Entry> {
        let (tenant, scope, _) = &self.scopes[key.scope as usize];
        let id = EventId::from_key(&key.id)?;
        let identity = Identity { tenant: tenant.clone(), scope: scope.clone(), id };
        Ok(row.clone().entry(identity, key.week))
    }

    /// The held rows of a scope, across all its tenants, that are in one of `states` and whose time
    /// is not after `now`, oldest first; and how many events the scope holds in total.
    fn held(&self, scope: &Scope, states: &[State], now: Time) -> (Vec<(&Key, &Row)>, u64) {
        let of_scope = self.held.iter().filter(|key| self.scopes[key.scope as usize].1 == *scope);
        let rows = of_scope.filter_map(|key| Some((key, self.rows.get(key).or_else(|| self.kept.get(key))?)));
        let all: Vec<_> = rows.collect();
        let count = all.len() as u64;
        let mut found: Vec<_> =
            all.into_iter().filter(|(_, row)| states.contains(&row.state) && row.at <= now).collect();
        found.sort_by_key(|(_, row)| row.at);
        (found, count)
    }

    fn set_markers(&mut self, scope: &Scope, markers: &[Marker]) {
        let now = self.now();
        for marker in markers {
            let key = (scope.clone(), marker.topic.clone(), marker.partition);
            if marker.is_empty() {
                self.markers.remove(&key);
            } else {
                self.markers.insert(key, (marker.clone(), now));
            }
        }
    }

    fn sweep(&mut self, settings: SweepSettings) -> Swept {
        let now = self.now();
        let state = SweepState::next(self.sweep_state, now, settings.retention);
        self.sweep_state = Some(state);
        let cutoff = now.minus(state.apply(settings).retention);
        let mut swept = Swept { paused_until: state.paused_until, ..Swept::default() };
        for row in self.rows.values_mut().chain(self.kept.values_mut()) {
            if row.is_overdue(now) {
                row.state = State::Lost;
                row.reason = Some("its end was never reported".into());
                swept.lost += 1;
            }
        }
        let timeless: Vec<Key> = self
            .rows
            .iter()
            .filter(|(key, row)| key.week.is_timeless() && may_sweep(row, cutoff))
            .map(|(key, _)| key.clone())
            .collect();
        swept.rows = timeless.len() as u64;
        for key in &timeless {
            self.rows.remove(key);
        }
        // Entries kept from a dropped week are removed one by one once they are settled; from then
        // on `dropped` answers for them.
        swept.rows += self.kept.extract_if(.., |_, row| may_sweep(row, cutoff)).count() as u64;
        let old: Vec<Week> = self
            .weeks
            .iter()
            .filter(|(week, touched)| !week.is_timeless() && **touched < cutoff && week.end() < cutoff)
            .map(|(week, _)| *week)
            .collect();
        for week in old {
            let rows: Vec<(Key, Row)> = self.rows.extract_if(.., |key, _| key.week == week).collect();
            let count = rows.len() as u64;
            // A week without rows forgets nothing: it bars no scope that was not barred before.
            let before = self.dropped.get(&week).map_or(-1, |(_, barred)| *barred);
            let barred = if rows.is_empty() { before } else { self.scopes.len() as i32 - 1 };
            let open: Vec<_> = rows.into_iter().filter(|(_, row)| row.state.is_open()).collect();
            swept.weeks.push((week, count - open.len() as u64));
            swept.held += open.len() as u64;
            self.kept.extend(open);
            self.weeks.remove(&week);
            self.dropped.insert(week, (now, barred));
        }
        let (rows, kept) = (&self.rows, &self.kept);
        let there = |key: &Key| rows.contains_key(key) || kept.contains_key(key);
        self.held.retain(there);
        self.copied.retain(|key, _| there(key));
        self.reserved.retain(|key, until| *until > now && there(key));
        self.markers.retain(|_, (_, at)| *at >= cutoff);
        swept
    }
}

#[async_trait]
impl Claims for MemoryLedger {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        claim_rows(&mut *self.lock(), claims, &self.settings)
    }

    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        settle_rows(&mut *self.lock(), settles, &self.settings)
    }

    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        Ok(extend_rows(&mut *self.lock(), extends)?.into_iter().map(Ok).collect())
    }

    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        let week = Week::route(self.settings.identity, &identity.id, time)?;
        let mut store = self.lock();
        let Some(scope) =
            store.scope_numbers.get(&(identity.tenant.clone(), identity.scope.clone())).copied()
        else {
            return Ok(None);
        };
        let key = Key { week, scope, id: identity.id.key().into_owned() };
        let row = store.row(&key)?;
        row.map(|row| store.entry(&key, &row)).transpose()
    }

    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let store = self.lock();
        let known = |identity: &Identity| {
            let week = Week::route(self.settings.identity, &identity.id, None)?;
            let names = (identity.tenant.clone(), identity.scope.clone());
            let Some(scope) = store.scope_numbers.get(&names).copied() else { return Ok(false) };
            let key = Key { week, scope, id: identity.id.key().into_owned() };
            let row = store.rows.get(&key).or_else(|| store.kept.get(&key));
            Ok(row.is_some_and(|row| matches!(row.state, State::Done | State::Finished)))
        };
        identities.iter().map(known).collect()
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.lock().now())
    }

    async fn epoch(&self) -> Result<Epoch> {
        Ok(self.lock().epoch)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { backend: "memory", durable: false, shared: false, transactional: true, skips: true }
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }
}

#[async_trait]
impl ConsumerStore for MemoryLedger {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        let store = self.lock();
        let now = store.now();
        let (rows, held) = store.held(scope, &[State::Leased, State::Retry, State::Parked], now);
        let rows = rows.into_iter().map(|(key, row)| ((key, row), key.scope, row.order.clone())).collect();
        let head_of =
            |scope, aggregate: &Aggregate| Ok(store.heads.get(&(scope, aggregate.clone())).cloned());
        let matches = |(_, row): &(&Key, &Row)| query.matches(row.origin.as_ref());
        let (entries, claimable) = runnable(rows, limit, now, matches, head_of)?;
        let count =
            query.fill(entries.iter().map(|(_, row)| row.body.as_ref().map_or(0, Record::memory_bytes)));
        let entries =
            entries.iter().take(count).map(|(key, row)| store.entry(key, row)).collect::<Result<_>>()?;
        Ok(Due { entries, claimable, held })
    }

    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        let mut store = self.lock();
        let now = store.now();
        let (dead, _) = store.held(scope, &[State::Dead], now);
        let reserved = |key: &Key| store.reserved.get(key).copied();
        let mut new: Vec<_> = dead
            .into_iter()
            .filter(|(key, row)| store.copied.get(*key) != Some(&row.token))
            .filter(|(key, _)| reserve.is_none() || reserved(key).is_none_or(|until| until <= now))
            .filter(|(_, row)| query.matches(row.origin.as_ref()))
            .collect();
        new.sort_by_key(|(key, row)| reserved(key).unwrap_or(row.at));
        new.truncate(limit);
        new.truncate(
            query.fill(new.iter().map(|(_, row)| row.body.as_ref().map_or(0, Record::memory_bytes))),
        );
        let keys: Vec<Key> = new.iter().map(|(key, _)| (*key).clone()).collect();
        let entries = new.into_iter().map(|(key, row)| store.entry(key, row)).collect();
        if let Some(reserve) = reserve {
            store.reserved.extend(keys.into_iter().map(|key| (key, now.plus(reserve))));
        }
        entries
    }

    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        let mut store = self.lock();
        for (identity, week, token) in entries {
            let Some(scope) = store.known_scope(identity.tenant.as_ref(), &identity.scope)? else { continue };
            let key = Key { week: *week, scope, id: identity.id.key().into_owned() };
            if store.row(&key)?.is_some_and(|row| row.token == *token && row.state == State::Dead) {
                store.copied.insert(key, *token);
            }
        }
        Ok(())
    }

    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        self.lock().set_markers(scope, markers);
        Ok(())
    }

    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        let store = self.lock();
        let wanted: BTreeSet<i32> = partitions.iter().copied().collect();
        let marker =
            |partition: i32| Some(store.markers.get(&(scope.clone(), topic.clone(), partition))?.0.clone());
        Ok(wanted.into_iter().filter_map(marker).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_transaction_leaves_nothing() {
        let ledger = MemoryLedger::default();
        let identity = Identity::new(Scope::new("s").unwrap(), EventId::new("e").unwrap());
        let claim = Claim::new(identity, crate::ledger::Mode::Done);
        let mut tx = ledger.begin();
        assert!(tx.claim(std::slice::from_ref(&claim)).unwrap()[0].as_ref().unwrap().is_claimed());
        drop(tx);
        let mut tx = ledger.begin();
        assert!(tx.claim(std::slice::from_ref(&claim)).unwrap()[0].as_ref().unwrap().is_claimed());
        tx.commit();
        let mut tx = ledger.begin();
        let other = Claim { nonce: crate::ledger::Nonce::random(), ..claim };
        assert!(!tx.claim(&[other]).unwrap()[0].as_ref().unwrap().is_claimed());
    }
}
