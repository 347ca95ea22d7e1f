//! What can be claimed: an event, or just its id.

use crate::clock::Time;
use crate::error::Result;
use crate::event::{Event, Fingerprint, Origin, Record};
use crate::id::{Aggregate, EventId, Tenant};
use crate::ledger::Metadata;

/// One arrival of an event, from which a claim is made. Built from an [`Event`], or from an id
/// alone if nothing else is known.
///
/// ```
/// use hapax::guard::Delivery;
/// use hapax::{EventId, ledger::Metadata};
///
/// let delivery = Delivery::of(EventId::new("order-17-paid")?).metadata(Metadata::new(r#"{"region":"eu"}"#)?);
/// assert_eq!(delivery.id.as_str(), "order-17-paid");
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Delivery {
    /// Which event it is.
    pub id: EventId,
    /// Whose data it is; `None` means the guard's tenant.
    pub tenant: Option<Tenant>,
    /// The event's logical time.
    pub time: Option<Time>,
    /// Hash of the event's immutable part, to detect a reused id.
    pub fingerprint: Option<Fingerprint>,
    /// The record it came from.
    pub origin: Option<Origin>,
    /// Aggregate and seq; used only if the guard has an order.
    pub order: Option<(Aggregate, u64)>,
    /// JSON to store with the entry.
    pub metadata: Option<Metadata>,
    /// The event's bytes, stored with the entry if it dies.
    pub body: Option<Record>,
}

impl Delivery {
    /// A delivery with only an id.
    pub fn of(id: EventId) -> Self {
        Delivery {
            id,
            tenant: None,
            time: None,
            fingerprint: None,
            origin: None,
            order: None,
            metadata: None,
            body: None,
        }
    }

    /// Sets JSON to store with the entry.
    #[must_use]
    pub fn metadata(mut self, metadata: Metadata) -> Self {
        self.metadata = Some(metadata);
        self
    }

    /// Sets the event's logical time.
    #[must_use]
    pub fn time(mut self, time: Time) -> Self {
        self.time = Some(time);
        self
    }

    /// Sets the record it came from.
    #[must_use]
    pub fn origin(mut self, origin: Origin) -> Self {
        self.origin = Some(origin);
        self
    }
}

/// What a [`Guard`](crate::Guard) accepts: an event, an id, or a text that is validated as an id.
///
/// ```
/// use hapax::guard::Deliverable;
/// assert!("order-17-paid".delivery().is_ok());
/// assert!("   ".delivery().is_err());
/// ```
pub trait Deliverable {
    /// The delivery to claim, or an error if it is invalid.
    fn delivery(self) -> Result<Delivery>;
}

impl Deliverable for Delivery {
    fn delivery(self) -> Result<Delivery> {
        Ok(self)
    }
}

impl Deliverable for &Delivery {
    fn delivery(self) -> Result<Delivery> {
        Ok(self.clone())
    }
}

impl Deliverable for &Event {
    fn delivery(self) -> Result<Delivery> {
        let body = Record {
            payload: Some(self.payload.clone()).filter(|payload| !payload.is_empty()),
            headers: self.headers.clone(),
            key: None, // an event does not know its record's key
            timestamp: self.time,
        };
        Ok(Delivery { body: Some(body), ..Delivery::of_event(self, self.fingerprint_if_any()) })
    }
}

impl Delivery {
    /// A delivery of an event with a known fingerprint, without its bytes.
    pub(crate) fn of_event(event: &Event, fingerprint: Option<Fingerprint>) -> Self {
        Delivery {
            id: event.id.clone(),
            tenant: event.tenant.clone(),
            time: event.time,
            fingerprint,
            origin: event.origin.clone(),
            order: event.aggregate.clone().zip(event.seq),
            metadata: None,
            body: None,
        }
    }
}

impl Deliverable for EventId {
    fn delivery(self) -> Result<Delivery> {
        Ok(Delivery::of(self))
    }
}

impl Deliverable for &EventId {
    fn delivery(self) -> Result<Delivery> {
        Ok(Delivery::of(self.clone()))
    }
}

impl Deliverable for &str {
    fn delivery(self) -> Result<Delivery> {
        EventId::new(self).map(Delivery::of)
    }
}

impl Deliverable for &&str {
    fn delivery(self) -> Result<Delivery> {
        EventId::new(self).map(Delivery::of)
    }
}

impl Deliverable for String {
    fn delivery(self) -> Result<Delivery> {
        EventId::new(self).map(Delivery::of)
    }
}

impl Deliverable for &String {
    fn delivery(self) -> Result<Delivery> {
        EventId::new(self).map(Delivery::of)
    }
}
