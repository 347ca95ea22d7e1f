//! API tokens and audit rows in the memory of this process.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::access::decide::{self, Change, Found, Row};
use crate::access::{
    Access, Actor, ApiToken, AuditEntry, AuditNote, AuditSweep, Authentication, ListAudit, ListTokens,
    NewToken, Rotation, SweptAudit, TokenEntry, TokenId, TokenState,
};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::Result;
use crate::ledger::SweepState;

/// A store of API tokens in memory. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryAccess(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Arc<dyn Clock>,
    store: Mutex<Store>,
}

#[derive(Debug, Default)]
struct Store {
    tokens: BTreeMap<TokenId, Row>,
    /// With the ids of their notes, oldest first.
    audit: Vec<(uuid::Uuid, AuditEntry)>,
    number: i64,
    sweep_state: Option<SweepState>,
}

impl Default for MemoryAccess {
    fn default() -> Self {
        MemoryAccess::with_clock(Arc::new(SystemClock))
    }
}

impl MemoryAccess {
    /// An empty store on a clock of your own.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        MemoryAccess(Arc::new(Inner { clock, store: Mutex::default() }))
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(
        &self,
        id: &TokenId,
        maker: Option<&TokenId>,
        by: &Actor,
        decide: impl FnOnce(Found<'_>, Time) -> Result<Change>,
    ) -> Result<TokenEntry> {
        let mut store = self.store();
        let now = self.0.clock.now();
        let maker = maker.and_then(|maker| store.tokens.get(maker));
        let change = decide(Found { row: store.tokens.get(id), maker }, now)?;
        let entry = change.row.entry(now);
        if let Some((action, details)) = change.note {
            store.add(&AuditNote::new(by, action, id.as_str()).details(details), now);
            store.tokens.insert(id.clone(), change.row);
        }
        Ok(entry)
    }
}

impl Store {
    fn add(&mut self, note: &AuditNote, at: Time) {
        if self.audit.iter().rev().any(|(id, _)| *id == note.id) {
            return;
        }
        self.number += 1;
        let note_id = note.id;
        let AuditNote { who, action, target, reason, details, .. } = note.clone();
        self.audit
            .push((note_id, AuditEntry { number: self.number, at, who, action, target, reason, details }));
    }
}

#[async_trait]
impl Access for MemoryAccess {
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        about.check()?;
        self.change(token.id(), about.made_by.as_ref(), by, |found, now| {
            decide::create(found, token, about, now)
        })
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        how.check()?;
        self.change(token.id(), None, by, |found, now| decide::rotate(found, token, how, now))
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        self.change(id, None, by, |found, now| decide::revoke(found, id, now))
    }

    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        let Ok(token) = ApiToken::parse(text) else { return Ok(Authentication::Malformed) };
        let mut store = self.store();
        let now = self.0.clock.now();
        let mut row = store.tokens.get_mut(token.id());
        let said = decide::authenticate(row.as_deref(), &token, now);
        if let (Authentication::Granted { .. }, Some(row)) = (&said, &mut row)
            && !row.is_use_noted(now)
        {
            row.last_used_at = Some(now);
        }
        Ok(said)
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        let now = self.0.clock.now();
        Ok(self.store().tokens.get(id).map(|row| row.entry(now)))
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        let now = self.0.clock.now();
        let after = which.after.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let store = self.store();
        let entries = store.tokens.range((after, Bound::Unbounded)).map(|(_, row)| row.entry(now));
        Ok(entries
            .filter(|entry| which.tenant.as_ref().is_none_or(|tenant| *tenant == entry.tenant))
            .filter(|entry| which.made_by.is_none() || entry.made_by == which.made_by)
            .filter(|entry| !which.live_only || entry.state == TokenState::Live)
            .take(which.limit())
            .collect())
    }

    async fn has_tokens(&self) -> Result<bool> {
        Ok(!self.store().tokens.is_empty())
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        let now = self.0.clock.now();
        self.store().add(note, now);
        Ok(())
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        let store = self.store();
        let entries = store.audit.iter().rev().map(|(_, entry)| entry);
        Ok(entries
            .filter(|entry| which.before.is_none_or(|before| entry.number < before))
            .filter(|entry| which.action.as_ref().is_none_or(|action| entry.action.starts_with(action)))
            .take(which.limit())
            .cloned()
            .collect())
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        settings.check()?;
        let mut store = self.store();
        let Some(plan) = settings.plan(store.sweep_state, self.0.clock.now()) else {
            return Ok(SweptAudit { skipped: true, ..SweptAudit::default() });
        };
        store.sweep_state = Some(plan.state);
        let before = store.audit.len();
        if let Some(horizon) = plan.horizon {
            store.audit.retain(|(_, entry)| entry.at >= horizon);
        }
        let rows = (before - store.audit.len()) as u64;
        Ok(SweptAudit { rows, skipped: false, paused_until: plan.state.paused_until })
    }

    fn backend(&self) -> &'static str {
        "memory"
    }
}
