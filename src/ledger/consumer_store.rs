//! The part of a ledger in which a consumer keeps what it cannot keep on the bus.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{Due, Entry, HeldQuery, Marker, PublishedDead};
use crate::error::Result;
use crate::id::{Scope, Topic};

/// What a consumer stores besides its claims: events that are held until they are due, dead letters
/// on their way to the dead-letter topic, and markers of what was handed to transactional batches.
/// Only [`Consumer`](crate::Consumer) calls it. The contract of [`Ledger`](super::Ledger) applies.
#[async_trait]
pub trait ConsumerStore: Send + Sync + 'static {
    /// The held events of a scope, of all its tenants, that may be claimed now: those due for a
    /// retry, those whose lease lapsed while they ran, and parked ones whose turn has come (or that
    /// were overtaken, and will be stale). Of an aggregate only the lowest. In random order, so that
    /// members of a group that ask at the same time get different ones, and events that a member
    /// does not want hide no others. At most `limit` entries, ending with the one that reaches the
    /// query's `bytes_max`; only their bodies are read. It only reads: whoever claims an event
    /// first has it. Claim each with the order of its entry.
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due>;

    /// The dead events of a scope, of all its tenants, that are held with their bytes and were not
    /// copied out yet. Bounded like [`due`](Self::due). With `reserve` the caller alone gets these
    /// for so long, so that a group copies each once: others skip them, and get them later if they
    /// are still not copied out. Oldest first, and those that were reserved before come last.
    /// Without `reserve` it only reads, and skips nothing.
    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>>;

    /// Records that dead events were copied out. It does nothing if the entry has another token by
    /// now, so that an event that was redriven and died again is copied again. May be repeated.
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()>;

    /// Records which offsets the next batches of transactional claims will cover: one marker per
    /// scope, topic and partition, each replacing the previous one. An empty marker removes it.
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()>;

    /// The markers of these partitions, by partition.
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>>;
}

#[async_trait]
impl<L: ConsumerStore + ?Sized> ConsumerStore for Arc<L> {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        (**self).due(scope, query, limit).await
    }
    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        (**self).unpublished_dead(scope, query, limit, reserve).await
    }
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        (**self).mark_dead_published(entries).await
    }
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        (**self).set_markers(scope, markers).await
    }
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        (**self).markers(scope, topic, partitions).await
    }
}
