//! One delivery on its way through the pipeline, and how it can end.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Passed;
use crate::bus::{Assignment, Partition, Received};
use crate::error::Error;
use crate::event::{Event, Fingerprint};
use crate::guard::Delivery;
use crate::id::{Aggregate, EventId, Tenant};
use crate::ledger::{BODY_BYTES, Body, Epoch, Identity, Metadata, Week};

/// What orders deliveries within this process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// An aggregate of a tenant; the ledger knows its order too.
    Aggregate(Option<Tenant>, Aggregate),
    /// The record's key, as the bus orders it: within one partition.
    Record(Partition, Bytes),
}

/// A record on its way through the pipeline.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The event, or why there is none.
    pub(crate) event: Result<Event, String>,
    /// Its fingerprint, once somebody asked: it is not for free.
    pub(crate) print: OnceLock<Option<Fingerprint>>,
    /// The ledger's epoch when it arrived, before any claim: what the window knows it under.
    pub(crate) epoch: Option<Epoch>,
    pub(crate) received: Received,
    pub(crate) source: Source,
    pub(crate) key: Option<Key>,
    /// Since when it has waited for others of its aggregate.
    pub(crate) waits: Option<Instant>,
    /// Whether it was redriven out of order: it is claimed without its place in the aggregate, but stays what it is.
    pub(crate) unordered: bool,
    /// Whether it runs with no other beside it, so that a death of the process is its own.
    pub(crate) alone: bool,
    /// Whether it was among suspects that died with a process: how many of them run together, with nothing beside them.
    pub(crate) suspects_max: Option<usize>,
    /// Whether it failed before, or was in somebody's open transaction, so that it is tried without its neighbours of a batch: they
    /// would be undone, or wait, with it.
    pub(crate) apart: bool,
    /// Says true when the partition goes to someone else or the process must end.
    pub(crate) cancel: watch::Receiver<bool>,
    /// From its arrival until it is through.
    pub(crate) span: tracing::Span,
}

/// Where a delivery came from.
#[derive(Debug, Clone)]
pub enum Source {
    /// From the bus, under this gift of its partition.
    Bus(Assignment),
    /// From the ledger, where it was held under this identity, in this week.
    Held(Identity, Week),
}

impl Arrival {
    /// How much memory it takes, more or less.
    pub(crate) fn bytes(&self) -> usize {
        let record = &self.received.record;
        let headers: usize = record.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let of = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        of(&record.payload) + of(&record.key) + headers + BODY_BYTES
    }

    /// Its bytes, as they are held.
    pub(crate) fn body(&self) -> Body {
        let record = &self.received.record;
        Body {
            payload: record.payload.clone(),
            headers: record.headers.clone(),
            key: record.key.clone(),
            timestamp: record.timestamp,
        }
    }

    /// What tells it from another event under its id; none if there is nothing to tell.
    pub(crate) fn fingerprint(&self) -> Option<Fingerprint> {
        *self.print.get_or_init(|| self.event.as_ref().ok()?.fingerprint_if_any())
    }

    /// What the ledger is asked about. None: there is no event.
    pub(crate) fn delivery(&self) -> Option<Delivery> {
        let event = self.event.as_ref().ok()?;
        let mut delivery = Delivery::of_event(event, self.fingerprint());
        delivery.body = Some(self.body());
        if self.unordered {
            delivery.order = None;
        }
        Some(delivery)
    }

    /// The id under which a record is kept that has no usable one: where it lies.
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

    /// Whether it may wait in the ledger while its offset is passed: not if its order is only that of the bus, which the
    /// ledger does not know.
    pub(crate) fn may_be_held(&self) -> bool {
        !matches!(self.key, Some(Key::Record(..)))
    }

    /// Its number within its aggregate.
    pub(crate) fn seq(&self) -> Option<u64> {
        self.event.as_ref().ok().and_then(|event| event.seq)
    }

    /// Whether it goes before another one of its key. In a strict order what has the lower number runs first anyway; in any other
    /// what comes out of the ledger does, since what arrived meanwhile waits for it there.
    pub(crate) fn precedes(&self, other: &Arrival, strict: bool) -> bool {
        let may = strict || matches!(self.source, Source::Held(..));
        may && self.seq().is_some() && self.seq() < other.seq()
    }

    /// What the entry keeps of this run.
    pub(crate) fn metadata(&self, group: &str, took: Option<Duration>) -> Option<Metadata> {
        let event = self.event.as_ref().ok()?;
        let correlation = event
            .headers
            .get("correlation_id")
            .or_else(|| event.headers.get("ce_correlationid"))
            .and_then(|value| std::str::from_utf8(value).ok())
            .map(|text| text.chars().filter(|c| *c != '\0').take(255).collect::<String>())
            .or_else(|| event.trace.map(|trace| format!("{:032x}", trace.trace_id)));
        let json = serde_json::json!({
            "consumer_group": group,
            "partition": self.received.origin.partition,
            "offset": self.received.origin.offset,
            "correlation_id": correlation,
            "processing_time_ms": took.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        });
        Metadata::try_from(json).ok()
    }

    /// Whether it was told to stop.
    pub(crate) fn is_cancelled(&self) -> bool {
        *self.cancel.borrow()
    }

    /// Ends when it is told to stop.
    pub(crate) async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        if cancel.wait_for(|cancel| *cancel).await.is_err() {
            std::future::pending::<()>().await; // nobody is left who could say so
        }
    }
}

/// What became of a delivery in one go.
#[derive(Debug)]
pub enum Ending {
    /// Nothing more is to happen here: its offset may be passed.
    Passed(Passed),
    /// It stays in memory and its key waits.
    Later(Duration),
    /// Its last run ended with its process: it runs again alone.
    Alone,
    /// It was told to stop before it ended, and was given back.
    Cancelled,
    /// The ledger did not answer.
    Away(Error),
    /// The consumer cannot go on.
    Stop(Error),
}
