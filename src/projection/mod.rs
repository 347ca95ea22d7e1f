//! Projections: the current version of every record in a search engine or a cache, kept by a consumer.
//!
//! ```text
//! record ─▶ event ─▶ journal ─▶ relay ─▶ topic ─▶ consumer (leased, order latest) ─▶ Projector ─▶ Projection
//!           seq                                   claim, retry, dead letters          by version
//! ```
//!
//! A consumer delivers at least once, so the same change arrives twice, late, or after a newer one.
//! Every change has a [`Version`], and a projection keeps the highest of each record, deletions
//! included: whatever the deliveries, it ends as if each event had come once and in order.
//!
//! A [`Projector`] is the handler that applies a batch and reports the outcome of each event.
//! [`rebuild()`] rebuilds a projection from the journal and its archive; [`verify()`] compares it with the
//! records.
//!
//! ```
//! use std::sync::Arc;
//! use hapax::Consumer;
//! use hapax::backend::memory::MemoryLedger;
//! use hapax::projection::{MemoryProjection, Projector, settings};
//! # use hapax::bus::{Bus, TopicSettings, memory::MemoryBus};
//! # use hapax::{Scope, Topic};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! # let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("events")?);
//! # bus.create_topic(&topic, TopicSettings::new(1)).await?;
//! let projection = Arc::new(MemoryProjection::default());
//! let settings = settings(Scope::new("search")?, topic);
//! let consumer = Consumer::builder(bus, MemoryLedger::default()).settings(settings).build()?;
//! # consumer.handle().stop();
//! consumer.leased_batch(Projector::new(projection, 1)?).await?;
//! # Ok(()) }
//! ```
//!
//! This room uses read models' changes, records, journals and consumers. It knows no database;
//! projections are in [`backend`](crate::backend).

mod event;
mod history;
mod projector;
mod reading;
mod rebuild;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use crate::analytics::{Change, Uuid, Version};
pub use crate::backend::memory::projection::MemoryProjection;
pub use crate::records::Name;
pub use event::change_of;
pub use history::History;
pub(crate) use projector::project;
pub use projector::{Broken, Projector, settings};
pub use reading::Reading;
pub use rebuild::{Rebuilt, rebuild};
pub use verify::{Difference, Verified, verify};

use crate::clock::Time;
use crate::error::Result;
use crate::ledger::Finding;
use crate::records::Payload;

/// A projection's copy of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Document {
    /// The highest version that was applied.
    pub version: Version,
    /// The record's content in that version.
    pub content: Content,
}

impl Document {
    /// A document.
    pub fn new(version: Version, content: Content) -> Self {
        Document { version, content }
    }

    /// A document that cannot be read, with its version if that can.
    pub fn unreadable(version: Option<Version>, reason: impl Into<String>) -> Self {
        let version = version.unwrap_or(Version::LOWEST);
        Document { version, content: Content::Unreadable { reason: reason.into() } }
    }
}

/// The content of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// The record.
    Present {
        /// Its payload.
        payload: Payload,
        /// When it was created.
        created_at: Time,
        /// When this version was written.
        updated_at: Time,
    },
    /// The record is deleted.
    Deleted,
    /// Only the version is left: a cache has let the content go.
    Expired,
    /// The stored value cannot be read, or its parts contradict each other.
    Unreadable {
        /// Why.
        reason: String,
    },
}

impl Content {
    /// The document that a change results in.
    pub fn of(change: &Change) -> Self {
        match &change.payload {
            Some(payload) => Content::Present {
                payload: payload.clone(),
                created_at: change.created_at,
                updated_at: change.updated_at,
            },
            None => Content::Deleted,
        }
    }
}

/// The outcome of one change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Applied {
    /// It is the record's highest version now.
    Newer,
    /// The projection already had that version or a higher one. Nothing was changed.
    Stale,
    /// The projection could not take it now, whatever the change is.
    Busy {
        /// Why.
        reason: String,
    },
    /// It failed, and may succeed next time.
    Failed {
        /// Why.
        reason: String,
    },
    /// The projection will never take it.
    Rejected {
        /// Why.
        reason: String,
    },
}

/// A part of what a projection has: records with their versions, in no order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Scanned {
    /// The records. One may be on two pages.
    pub found: Vec<(Name, Version)>,
    /// What is stored and belongs to no record, with the reason.
    pub foreign: Vec<(String, String)>,
    /// Where the next page begins; `None`: this is the last.
    pub next: Option<String>,
}

impl Scanned {
    /// A page.
    pub fn new(found: Vec<(Name, Version)>, next: Option<String>) -> Self {
        Scanned { found, next, foreign: Vec::new() }
    }

    /// With what belongs to no record.
    #[must_use]
    pub fn foreign(mut self, foreign: Vec<(String, String)>) -> Self {
        self.foreign = foreign;
        self
    }
}

/// Keeps the current version of every record for readers.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. Of all changes of a record the one with the highest version counts, whatever order they are
///    applied in, however often and by however many at once. An equal or lower version changes
///    nothing.
/// 2. A deletion is a version too. A deleted record shows no content, and its version stays, so that
///    an older change that arrives later does not bring it back.
/// 3. Each change has its own outcome, in order. One that cannot be applied does not affect its
///    neighbours. After an error instead of outcomes it is unknown what was applied, and the call
///    may be repeated.
/// 4. Records of two tenants, two modules or two ids never meet.
/// 5. A payload comes back as the same JSON value, its numbers digit for digit; versions come back
///    exactly, also above 2⁵³.
/// 6. What was applied is still there when the projection is opened again, and survives a restart
///    of its server where the projection is [durable](Projection::durable).
/// 7. A [scan](Projection::scan) shows every record that was there all the time, deleted ones too.
/// 8. A [rebuild](Projection::begin_rebuild) shows nothing before its [switch](Rebuilding::switch),
///    if it has a place of its own; afterwards the projection is what was applied to the rebuild,
///    and what was applied to the projection since the rebuild [took the
///    writes](Rebuilding::take_writes). Until then it is [unfinished](Projection::unfinished), even
///    if the process that ran it has died.
/// 9. Whatever readers are served, and whatever is served after a rebuild that has taken the writes, has
///    what was [erased](Projection::erase) no more.
#[async_trait]
pub trait Projection: Send + Sync + 'static {
    /// Applies changes, and reports the outcome of each, in order.
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>>;

    /// The documents of records, in order; `None` if there is none. A damaged one is
    /// [unreadable](Content::Unreadable), and the others can still be read.
    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>>;

    /// A page of all it has; `after` is `next` of the page before.
    async fn scan(&self, after: Option<&str>) -> Result<Scanned>;

    /// Begins a rebuild. An earlier one that was never switched to is removed.
    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>>;

    /// The places of rebuilds that run or were interrupted: each may have records that the place
    /// that serves readers no longer has. `None`: there is no such place.
    async fn unfinished(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Applies deletions to what is written and, while a rebuild has taken the writes, to what is read as well.
    async fn erase(&self, deletions: &[Change]) -> Result<Vec<Applied>> {
        self.apply(deletions).await
    }

    /// Checks what the contract depends on, as far as the server reports it.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// Refuses a generation whose versions it cannot hold.
    fn accepts(&self, _generation: u16) -> Result<()> {
        Ok(())
    }

    /// For how long after its last write it keeps a record that lives on; `None`: for ever.
    fn forgets_after(&self) -> Option<Duration> {
        None
    }

    /// Whether what was applied survives a restart of its server.
    fn durable(&self) -> bool;

    /// Describes it for people, without secrets.
    fn about(&self) -> String;
}

/// A projection that is being rebuilt.
#[async_trait]
pub trait Rebuilding: Send + Sync {
    /// Applies changes, as [`Projection::apply`] does.
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>>;

    /// Makes it the place that writes to the projection go to, in one step, while readers keep what they have:
    /// whatever is applied to the projection from now on is there after the switch. Not needed for a rebuild
    /// that changes are applied to where they belong.
    async fn take_writes(&self) -> Result<()> {
        Ok(())
    }

    /// Makes it the projection that is read and written, in one step.
    async fn switch(&self) -> Result<()>;

    /// Removes what has a lower generation than the rebuild's, which has no such record; returns how many records.
    /// What somebody writes meanwhile under this generation stays. Nothing to do for a place of its own.
    async fn remove_older(&self, _generation: u16) -> Result<u64> {
        Ok(0)
    }
}

/// A rebuild without a place of its own: versions decide, so changes are applied where they belong.
#[cfg(feature = "testing")]
pub(crate) struct InPlace<P>(pub(crate) P);

#[cfg(feature = "testing")]
#[async_trait]
impl<P: Projection> Rebuilding for InPlace<P> {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        self.0.apply(changes).await
    }
    async fn switch(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl<P: Projection + ?Sized> Projection for Arc<P> {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        (**self).apply(changes).await
    }
    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        (**self).documents(names).await
    }
    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        (**self).scan(after).await
    }
    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        (**self).begin_rebuild().await
    }
    async fn unfinished(&self) -> Result<Option<String>> {
        (**self).unfinished().await
    }
    async fn erase(&self, deletions: &[Change]) -> Result<Vec<Applied>> {
        (**self).erase(deletions).await
    }
    async fn check(&self) -> Result<Vec<Finding>> {
        (**self).check().await
    }
    fn accepts(&self, generation: u16) -> Result<()> {
        (**self).accepts(generation)
    }
    fn forgets_after(&self) -> Option<Duration> {
        (**self).forgets_after()
    }
    fn durable(&self) -> bool {
        (**self).durable()
    }
    fn about(&self) -> String {
        (**self).about()
    }
}
