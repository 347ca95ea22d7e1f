//! One delivery on its way through the pipeline, and how it can end.

use std::ops::Deref;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Passed;
use crate::bus::{Assignment, Partition, Received};
use crate::error::Error;
use crate::event::{Event, Fingerprint, Record};
use crate::guard::Delivery;
use crate::id::{Aggregate, EventId, Tenant};
use crate::ledger::{Epoch, Identity, Metadata, Week};

/// The key that orders deliveries within this process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// An aggregate of a tenant. The ledger knows its order too.
    Aggregate(Option<Tenant>, Aggregate),
    /// The record's key, which the bus orders within one partition.
    Record(Partition, Bytes),
}

/// A delivery on its way through the pipeline.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // nearly all are events, which need no allocation of their own
pub enum Queued {
    /// An event.
    Event(Arrival),
    /// A record that no event could be decoded from. It becomes a dead letter.
    Undecodable(Box<Undecodable>),
}

/// What is known of any delivery.
#[derive(Debug, Clone)]
pub struct Delivered {
    pub(crate) received: Received,
    pub(crate) source: Source,
    pub(crate) key: Option<Key>,
    /// True when the partition was lost or the process must end.
    pub(crate) cancel: watch::Receiver<bool>,
    /// Covers its time from arrival until it is finished.
    pub(crate) span: tracing::Span,
}

/// A record that no event could be decoded from.
#[derive(Debug, Clone)]
pub struct Undecodable {
    pub(crate) delivered: Delivered,
    pub(crate) reason: String,
}

/// An event that was delivered.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Arrival {
    pub(crate) event: Event,
    pub(crate) delivered: Delivered,
    /// Its fingerprint, computed on first use because it is not free.
    pub(crate) print: OnceLock<Option<Fingerprint>>,
    /// The ledger's epoch when it arrived, before any claim. The window knows the event under it.
    pub(crate) epoch: Option<Epoch>,
    /// Since when it has waited for others of its aggregate.
    pub(crate) waits: Option<Instant>,
    /// Whether it was redriven out of order. It is then claimed without its place in the aggregate,
    /// but is otherwise unchanged.
    pub(crate) unordered: bool,
    /// Whether it runs with nothing beside it, so that it is to blame if the process dies.
    pub(crate) alone: bool,
    /// Whether it may have run in this process.
    pub(crate) ran: bool,
    /// If it is a suspect of a process that died: how many suspects run together, with nothing else
    /// beside them.
    pub(crate) suspects_max: Option<usize>,
    /// Whether it failed before, or was in another open transaction. It then runs outside of
    /// batches, since its neighbours would be undone, or wait, with it.
    pub(crate) apart: bool,
}

// Every delivery can be asked where it came from, whether or not it is an event.
impl Deref for Arrival {
    type Target = Delivered;
    fn deref(&self) -> &Delivered {
        &self.delivered
    }
}

impl Deref for Queued {
    type Target = Delivered;
    fn deref(&self) -> &Delivered {
        match self {
            Queued::Event(arrival) => &arrival.delivered,
            Queued::Undecodable(undecodable) => &undecodable.delivered,
        }
    }
}

impl Queued {
    /// The event, if it is one.
    pub(crate) fn arrival(&self) -> Option<&Arrival> {
        match self {
            Queued::Event(arrival) => Some(arrival),
            Queued::Undecodable(_) => None,
        }
    }

    /// Whether it may go before another delivery of its key. In a strict order the lower number runs
    /// first anyway. Otherwise a delivery from the ledger goes first, because later ones wait for it
    /// there.
    pub(crate) fn may_precede(&self, strict: bool) -> bool {
        strict || self.is_held()
    }

    /// Whether it goes before another delivery of its key.
    pub(crate) fn precedes(&self, other: &Queued, strict: bool) -> bool {
        let seq = |queued: &Queued| queued.arrival().and_then(|arrival| arrival.event.seq);
        self.may_precede(strict) && seq(self).is_some() && seq(self) < seq(other)
    }
}

/// Where a delivery came from.
#[derive(Debug, Clone)]
pub enum Source {
    /// From the bus, under this assignment of its partition.
    Bus(Assignment),
    /// From the ledger, where it was held under this identity, in this week.
    Held(Identity, Week),
}

impl Delivered {
    /// Whether it came from the ledger.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self.source, Source::Held(..))
    }

    /// Its approximate size in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.received.record.memory_bytes()
    }

    /// Its bytes, as stored with a held entry.
    pub(crate) fn body(&self) -> Record {
        self.received.record.clone()
    }

    /// The id for a record without a usable one, made of its location.
    pub(crate) fn place_id(&self) -> Result<EventId, Error> {
        if let Source::Held(identity, _) = &self.source {
            return Ok(identity.id.clone());
        }
        let origin = &self.received.origin;
        EventId::new(format!("{}-{}-{}", origin.topic.as_str(), origin.partition, origin.offset)).or_else(
            |_| {
                let namespace = EventId::new("hapax.place")?;
                let numbers = [origin.partition.to_string(), origin.offset.to_string()];
                Ok(EventId::derived(&namespace, [origin.topic.as_str(), &numbers[0], &numbers[1]]))
            },
        )
    }

    /// Whether it may wait in the ledger while the commit point moves past it. Not if only the bus
    /// orders it, because the ledger does not know that order.
    pub(crate) fn may_be_held(&self) -> bool {
        !matches!(self.key, Some(Key::Record(..)))
    }

    /// Whether it was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        *self.cancel.borrow()
    }

    /// Completes when it is cancelled.
    pub(crate) async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        if cancel.wait_for(|cancel| *cancel).await.is_err() {
            std::future::pending::<()>().await; // the sender is gone, so it can never be cancelled
        }
    }
}

impl Arrival {
    /// Its fingerprint, which tells it from another event with the same id. `None` if it has
    /// nothing to compare.
    pub(crate) fn fingerprint(&self) -> Option<Fingerprint> {
        *self.print.get_or_init(|| self.event.fingerprint_if_any())
    }

    /// The delivery to claim.
    pub(crate) fn delivery(&self) -> Delivery {
        let mut delivery = Delivery::of_event(&self.event, self.fingerprint());
        delivery.body = Some(self.body());
        if self.unordered {
            delivery.order = None;
        }
        delivery
    }

    /// The metadata to store with this run: what the entry has no column for. `group`: unless it is
    /// the scope's name.
    pub(crate) fn metadata(&self, group: Option<&str>, took: Option<Duration>) -> Option<Metadata> {
        let event = &self.event;
        let correlation = event
            .headers
            .get("correlation_id")
            .or_else(|| event.headers.get("ce_correlationid"))
            .and_then(|value| std::str::from_utf8(value).ok())
            .map(|text| text.chars().filter(|c| *c != '\0').take(255).collect::<String>())
            .or_else(|| event.trace.map(|trace| format!("{:032x}", trace.trace_id)));
        let mut said = serde_json::Map::new();
        let mut say = |key: &str, value: Option<serde_json::Value>| {
            value.and_then(|value| said.insert(key.to_owned(), value))
        };
        say("consumer_group", group.map(Into::into));
        say("correlation_id", correlation.map(Into::into));
        let millis = |took: Duration| u64::try_from(took.as_millis()).unwrap_or(u64::MAX).into();
        say("processing_time_ms", took.map(millis));
        if said.is_empty() {
            return None;
        }
        Metadata::try_from(serde_json::Value::Object(said)).ok()
    }
}

/// How one run of a delivery ended.
#[derive(Debug)]
pub enum Ending {
    /// It is finished here: the commit point may move past it.
    Passed(Passed),
    /// It stays in memory, and its key waits.
    Later(Duration),
    /// The same, because another transaction was in the way: nothing is known to have run.
    Contended(Duration),
    /// Its last run died with its process. It must run again, alone.
    Alone,
    /// It was cancelled before it ended, and was released.
    Cancelled,
    /// The ledger did not answer.
    Unavailable(Error),
    /// The consumer cannot continue.
    Stop(Error),
}
