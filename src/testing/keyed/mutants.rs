//! Deliberately broken stores of keys. Each makes one mistake, and the suite must notice.

use std::time::Duration;

use async_trait::async_trait;

use super::{KeysHarness, MemoryKeysHarness};
use crate::error::Result;
use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::keyed::{
    AfterFailure, Answer, Begin, Begun, Decided, Ended, IdempotencyKey, KeyEntry, KeyLease, KeyStatus,
    KeySweep, Keys, KeysCapabilities, KeysInfo, ListKeys, MemoryKeys, RequestFingerprint, Resolution,
    SweptKeys,
};
use crate::ledger::Nonce;

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeysMutant {
    /// Keys are unique over all tenants.
    TenantIgnored,
    /// Any request with the key gets the answer.
    FingerprintIgnored,
    /// An answer loses its headers.
    HeadersLost,
    /// Whoever finishes has the lease.
    FinishIgnoresTheToken,
    /// Whoever extends has the lease, also after it was released.
    ExtendIgnoresTheToken,
    /// A repeated begin is another request.
    NonceIgnored,
    /// What never ended runs again.
    HoldIgnored,
    /// What did nothing waits for its lease to end.
    ReleaseForgotten,
    /// A late copy of a begin gets the key once more.
    LateCopiesRun,
    /// What did nothing keeps the key for its request.
    UndoneBinds,
    /// A forgotten UUIDv7 key is new.
    HorizonIgnored,
    /// A sweep forgets nothing.
    SweepsNothing,
    /// A list shows the keys of all tenants.
    ListsAllTenants,
}

/// A store that makes one mistake.
#[derive(Debug, Clone)]
pub struct MutantKeys(MemoryKeys, KeysMutant);

impl MutantKeys {
    fn is(&self, mutant: KeysMutant) -> bool {
        self.1 == mutant
    }

    fn tenant<'t>(&self, tenant: Option<&'t Tenant>) -> Option<&'t Tenant> {
        tenant.filter(|_| !self.is(KeysMutant::TenantIgnored))
    }

    /// The lease as it is, whatever the caller's token says.
    async fn current(&self, of: &KeyLease) -> Result<KeyLease> {
        let entry = self.0.entry(of.tenant.as_ref(), &of.key).await?;
        Ok(KeyLease { token: entry.map_or(of.token, |entry| entry.token), ..of.clone() })
    }
}

#[async_trait]
impl Keys for MutantKeys {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        let mut begin = Begin { tenant: self.tenant(begin.tenant.as_ref()).cloned(), ..begin.clone() };
        match self.1 {
            KeysMutant::FingerprintIgnored => {
                begin.fingerprint = RequestFingerprint::opaque(Fingerprint([1; 16]));
            }
            KeysMutant::NonceIgnored => begin.nonce = Nonce::random(),
            KeysMutant::HoldIgnored => begin.after_failure = AfterFailure::Rerun,
            _ => {}
        }
        let outcome = self.0.begin(&begin).await?;
        if self.is(KeysMutant::LateCopiesRun)
            && matches!(outcome, Begun::Running { .. })
            && self.0.get(begin.tenant.as_ref(), &begin.key).await? == KeyStatus::Free
        {
            return self.0.begin(&Begin { nonce: Nonce::random(), ..begin }).await;
        }
        if outcome == Begun::Expired && self.is(KeysMutant::HorizonIgnored) {
            let key = IdempotencyKey::new(format!("again-{}", begin.key))?;
            return self.0.begin(&Begin { key, ..begin }).await;
        }
        Ok(outcome)
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        let current = self.current(of).await?;
        self.0.extend(if self.is(KeysMutant::ExtendIgnoresTheToken) { &current } else { of }, lease).await
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        let mut answer = answer.clone();
        if self.is(KeysMutant::HeadersLost) {
            answer.headers.clear();
        }
        let current = self.current(of).await?;
        self.0.finish(if self.is(KeysMutant::FinishIgnoresTheToken) { &current } else { of }, &answer).await
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        if self.is(KeysMutant::ReleaseForgotten) {
            return Ok(());
        }
        let ended = if self.is(KeysMutant::UndoneBinds) { Ended::Failed } else { ended };
        self.0.release(of, ended).await
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        self.0.get(self.tenant(tenant), key).await
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        self.0.resolve(of, how, who).await
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        self.0.entry(self.tenant(tenant), key).await
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        let mut which = which.clone();
        if self.is(KeysMutant::ListsAllTenants) {
            which.tenant = None;
        }
        self.0.list(&which).await
    }

    async fn sweep(&self, sweep: &KeySweep) -> Result<SweptKeys> {
        let dry_run = sweep.dry_run || self.is(KeysMutant::SweepsNothing);
        self.0.sweep(&KeySweep { dry_run, ..sweep.clone() }).await
    }

    async fn info(&self) -> Result<KeysInfo> {
        self.0.info().await
    }

    fn secret(&self) -> &[u8; 32] {
        self.0.secret()
    }

    fn capabilities(&self) -> KeysCapabilities {
        self.0.capabilities()
    }
}

/// A broken store on a clock of its own.
#[derive(Debug)]
pub struct MutantKeysHarness(MemoryKeysHarness, KeysMutant);

impl MutantKeysHarness {
    /// An empty one.
    pub fn new(mutant: KeysMutant) -> Self {
        MutantKeysHarness(MemoryKeysHarness::new(), mutant)
    }
}

#[async_trait]
impl KeysHarness for MutantKeysHarness {
    type Keys = MutantKeys;

    async fn open(&self) -> MutantKeys {
        MutantKeys(self.0.open().await, self.1)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }

    async fn in_transaction(
        &self,
        keys: &MutantKeys,
        begin: &Begin,
        answer: Option<&Answer>,
        commit: bool,
    ) -> Result<Begun> {
        self.0.in_transaction(&keys.0, begin, answer, commit).await
    }
}
