//! The part of a ledger that guards effects.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Capabilities, Claim, Entry, Epoch, Extend, Identity, Outcome, Settings, Settle, Settled, State};
use crate::clock::Time;
use crate::error::Result;

/// Claims events, settles them and reads what became of them. [`Guard`](crate::Guard), the
/// consumer's workers and the sinks call it; it is all that an effect needs of a
/// [`Ledger`](super::Ledger), whose contract applies.
#[async_trait]
pub trait Claims: Send + Sync + 'static {
    /// Claims events in the order given, each with its own outcome. The outer error means that
    /// nothing is known about any of them; the same claims may be issued again.
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>>;

    /// Settles claims. May be issued again after an error.
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>>;

    /// Extends leases, each with its own answer.
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>>;

    /// Reads one entry.
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>>;

    /// Tells which of these took effect before (`done` or `finished`), in the order given. It only
    /// reads: another claimer may come first between this and a claim. For ledgers whose identity
    /// is the id alone.
    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let mut known = Vec::with_capacity(identities.len());
        for identity in identities {
            let entry = self.get(identity, None).await?;
            known.push(entry.is_some_and(|entry| matches!(entry.state, State::Done | State::Finished)));
        }
        Ok(known)
    }

    /// The ledger's current time.
    async fn now(&self) -> Result<Time>;

    /// Answers once the ledger could write: it asks whatever serves claims, and changes nothing. For
    /// probes.
    async fn probe(&self) -> Result<()> {
        self.now().await.map(drop)
    }

    /// The ledger's current epoch, read anew with every call. A ledger that was restored, copied,
    /// failed over or (where a restart may lose data) restarted has a new one.
    async fn epoch(&self) -> Result<Epoch>;

    /// What this backend can guarantee.
    fn capabilities(&self) -> Capabilities;

    /// The settings it was opened with.
    fn settings(&self) -> &Settings;

    /// How many batches may run at once.
    fn parallel_batches(&self) -> usize {
        1
    }
}

#[async_trait]
impl<L: Claims + ?Sized> Claims for Arc<L> {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        (**self).claim(claims).await
    }
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        (**self).settle(settles).await
    }
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        (**self).extend(extends).await
    }
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        (**self).get(identity, time).await
    }
    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        (**self).known(identities).await
    }
    async fn now(&self) -> Result<Time> {
        (**self).now().await
    }
    async fn probe(&self) -> Result<()> {
        (**self).probe().await
    }
    async fn epoch(&self) -> Result<Epoch> {
        (**self).epoch().await
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    fn settings(&self) -> &Settings {
        (**self).settings()
    }
    fn parallel_batches(&self) -> usize {
        (**self).parallel_batches()
    }
}
