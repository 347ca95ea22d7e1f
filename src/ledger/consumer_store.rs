//! The part of a ledger in which a consumer keeps what it cannot keep on the bus.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Due, Entry, Marker, PublishedDead, Share};
use crate::error::Result;
use crate::id::{Scope, Topic};

/// What a consumer stores besides its claims: events that are held until they are due, dead letters
/// on their way to the dead-letter topic, and markers of what was handed to transactional batches.
/// Only [`Consumer`](crate::Consumer) calls it. The contract of [`Ledger`](super::Ledger) applies.
#[async_trait]
pub trait ConsumerStore: Send + Sync + 'static {
    /// The held events of a scope, of all its tenants, that may be claimed now: those due for a
    /// retry, those whose lease lapsed while they ran, and parked ones whose turn has come (or that
    /// were overtaken, and will be stale). Oldest first; of an aggregate only the lowest; and only
    /// those of the share, so that events of other members do not fill the page. At most `limit`
    /// entries, ending with the one that reaches the share's `bytes_max`; only their bodies are
    /// read. It only reads; claim each with the order of its entry.
    async fn due(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Due>;

    /// The dead events of a scope, of all its tenants, that are held with their bytes, were not
    /// copied out yet and belong to the share. Oldest first, and bounded like [`due`](Self::due).
    async fn unpublished_dead(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Vec<Entry>>;

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
    async fn due(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Due> {
        (**self).due(scope, share, limit).await
    }
    async fn unpublished_dead(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Vec<Entry>> {
        (**self).unpublished_dead(scope, share, limit).await
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
