//! Keys in the memory of this process, for tests and for services that may forget them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::{Clock, SystemClock, Time};
use crate::error::Result;
use crate::id::Tenant;
use crate::keyed::decide::{self, Decision, Row};
use crate::keyed::{
    Answer, Begin, Begun, Decided, Ended, IdempotencyKey, KeyEntry, KeyLease, KeyStatus, KeySweep, Keys,
    KeysCapabilities, KeysInfo, ListKeys, Resolution, SweptKeys,
};
use crate::ledger::{SweepState, Token};

/// Keys in memory. Clones share them.
#[derive(Debug, Clone)]
pub struct MemoryKeys(Arc<Inner>);

struct Inner {
    clock: Arc<dyn Clock>,
    secret: [u8; 32],
    store: Mutex<Store>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MemoryKeys") // neither the secret nor anybody's answers
    }
}

type Name = (Option<Tenant>, IdempotencyKey);

#[derive(Debug, Default)]
struct Store {
    rows: BTreeMap<Name, Row>,
    token: i64,
    horizon: Option<Time>,
    sweep_state: Option<SweepState>,
}

impl Store {
    fn draw(&mut self) -> Token {
        self.token += 1;
        Token(self.token)
    }
}

impl Default for MemoryKeys {
    fn default() -> Self {
        MemoryKeys::with_clock(Arc::new(SystemClock))
    }
}

impl MemoryKeys {
    /// An empty store on a clock of your own.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        MemoryKeys(Arc::new(Inner { clock, secret: new_secret(), store: Mutex::default() }))
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, of: &KeyLease, change: impl FnOnce(&mut Row, Time) -> Result<()>) -> Result<()> {
        let mut store = self.store();
        let row = store.rows.get_mut(&(of.tenant.clone(), of.key.clone()));
        change(row.ok_or_else(|| decide::gone(of))?, self.0.clock.now())
    }
}

/// 32 random bytes.
pub(in crate::backend) fn new_secret() -> [u8; 32] {
    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    for _ in 0..4 {
        hash.update(uuid::Uuid::new_v4());
    }
    hash.finalize().into()
}

#[async_trait]
impl Keys for MemoryKeys {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        begin.check()?;
        let mut store = self.store();
        let now = self.0.clock.now();
        let name = (begin.tenant.clone(), begin.key.clone());
        let decision = decide::decide(store.rows.get(&name), begin, store.horizon, now);
        let token = match decision {
            Decision::Answer(outcome) => return Ok(outcome),
            Decision::Renew => {
                let Some(row) = store.rows.get_mut(&name) else { return Ok(Begun::Expired) };
                row.renew(begin, now);
                row.token
            }
            Decision::Insert | Decision::TakeOver => {
                let token = store.draw();
                let row = Row::taken_over(store.rows.get(&name), begin, token, now, true);
                store.rows.insert(name, row);
                token
            }
        };
        Ok(Begun::First(KeyLease { tenant: begin.tenant.clone(), key: begin.key.clone(), token }))
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        crate::keyed::check_lease(lease)?;
        self.change(of, |row, now| row.extend(of, lease, now))
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        answer.check()?;
        self.change(of, |row, now| row.finish(of, answer, now))
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        let token = self.store().draw();
        self.change(of, |row, now| row.release(of, ended, token, now))
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        let store = self.store();
        let row = store.rows.get(&(tenant.cloned(), key.clone()));
        Ok(row.map_or_else(|| decide::missing(key, store.horizon), |row| row.status(self.0.clock.now())))
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        who.check()?;
        if let Resolution::Answer(answer) = how {
            answer.check()?;
        }
        let mut store = self.store();
        let token = store.draw();
        let row = store.rows.get_mut(&(of.tenant.clone(), of.key.clone()));
        let row = row.ok_or_else(|| of.not_unknown("there is no such key"))?;
        row.resolve(of, how, who, token, self.0.clock.now())
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        let name = (tenant.cloned(), key.clone());
        let now = self.0.clock.now();
        Ok(self.store().rows.get(&name).map(|row| row.entry(name.0.clone(), name.1.clone(), now)))
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        let store = self.store();
        let now = self.0.clock.now();
        let after = which.after.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let rows = store.rows.range((after, Bound::Unbounded));
        Ok(rows
            .filter(|((tenant, _), _)| which.tenant.as_ref().is_none_or(|of| of == tenant))
            .filter(|(_, row)| !which.open_only || row.settled.is_none())
            .take(which.limit())
            .map(|((tenant, key), row)| row.entry(tenant.clone(), key.clone(), now))
            .collect())
    }

    async fn sweep(&self, settings: &KeySweep) -> Result<SweptKeys> {
        settings.check()?;
        let mut store = self.store();
        let Some(plan) = settings.plan(store.sweep_state, self.0.clock.now()) else {
            return Ok(SweptKeys { skipped: true, ..SweptKeys::default() });
        };
        if settings.dry_run {
            let old = |horizon| store.rows.values().filter(|row| row.is_old(horizon)).count();
            let keys = plan.horizon.map_or(0, old) as u64;
            return Ok(SweptKeys { keys, skipped: false, paused_until: plan.state.paused_until });
        }
        store.sweep_state = Some(plan.state);
        let before = store.rows.len();
        if let Some(horizon) = plan.horizon {
            store.horizon = store.horizon.max(Some(horizon));
            store.rows.retain(|_, row| !row.is_old(horizon));
        }
        let keys = (before - store.rows.len()) as u64;
        settings.forgot(keys);
        Ok(SweptKeys { keys, skipped: false, paused_until: plan.state.paused_until })
    }

    async fn info(&self) -> Result<KeysInfo> {
        let store = self.store();
        let swept_at = store.sweep_state.map(|state| state.swept_at);
        Ok(KeysInfo { now: self.0.clock.now(), horizon: store.horizon, swept_at })
    }

    fn secret(&self) -> &[u8; 32] {
        &self.0.secret
    }

    fn capabilities(&self) -> KeysCapabilities {
        KeysCapabilities { backend: "memory", durable: false, shared: false, transactional: false }
    }
}
