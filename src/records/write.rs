//! Records, what is written to them, and the events that writes append.

use uuid::Uuid;

use super::{ModuleSlug, Payload};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::id::{Aggregate, EventId, Json, Kind, RECORD_KINDS, Tenant, Visible, implied_kind};
use crate::journal::{Append, Appended, Expected, Placing};

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Its id within the tenant and the module.
    pub id: Uuid,
    /// The module it belongs to.
    pub module: ModuleSlug,
    /// Its version, which is the seq of its last event. Every write raises it.
    pub seq: u64,
    /// Its content.
    pub payload: Payload,
    /// When it was created, by the store's clock.
    pub created_at: Time,
    /// When it was last written, by the store's clock.
    pub updated_at: Time,
}

impl Record {
    /// A record of a store of your own, created and last written at these times.
    pub fn new(
        module: ModuleSlug,
        id: Uuid,
        seq: u64,
        payload: Payload,
        (created_at, updated_at): (Time, Time),
    ) -> Self {
        Record { id, module, seq, payload, created_at, updated_at }
    }
}

/// A record to create.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Create {
    /// Whose record: `None`, or a UUID; see [`tenant_id`].
    pub tenant: Option<Tenant>,
    /// The module.
    pub module: ModuleSlug,
    /// Its id.
    pub id: Uuid,
    /// Its content.
    pub payload: Payload,
}

impl Create {
    /// A record without a tenant, under a new UUIDv7.
    pub fn new(module: ModuleSlug, payload: Payload) -> Self {
        Create { tenant: None, module, id: Uuid::now_v7(), payload }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Tenant>) -> Self {
        self.tenant = tenant;
        self
    }

    /// Sets the id.
    #[must_use]
    pub fn id(mut self, id: Uuid) -> Self {
        self.id = id;
        self
    }
}

/// New content for a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Update {
    /// Whose record.
    pub tenant: Option<Tenant>,
    /// The module.
    pub module: ModuleSlug,
    /// Which record.
    pub id: Uuid,
    /// The seq that the caller has seen. Mandatory: without it two writers would overwrite each other.
    pub expected_seq: u64,
    /// The new content, which replaces the old one.
    pub payload: Payload,
}

impl Update {
    /// New content for a record that has this seq, of no tenant.
    pub fn new(module: ModuleSlug, id: Uuid, expected_seq: u64, payload: Payload) -> Self {
        Update { tenant: None, module, id, expected_seq, payload }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Tenant>) -> Self {
        self.tenant = tenant;
        self
    }
}

/// A record to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delete {
    /// Whose record.
    pub tenant: Option<Tenant>,
    /// The module.
    pub module: ModuleSlug,
    /// Which record.
    pub id: Uuid,
    /// The seq that the caller has seen.
    pub expected_seq: u64,
}

impl Delete {
    /// Deletes a record that has this seq, of no tenant.
    pub fn new(module: ModuleSlug, id: Uuid, expected_seq: u64) -> Self {
        Delete { tenant: None, module, id, expected_seq }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Tenant>) -> Self {
        self.tenant = tenant;
        self
    }
}

/// The UUID of a tenant: the nil UUID if there is none. A record's tenant is a UUID, in lower case and
/// with hyphens, so that one tenant has one name in records, keys and journal.
///
/// ```
/// use hapax::{Tenant, records::tenant_id};
/// let tenant = Tenant::new("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10")?;
/// assert_eq!(tenant_id(Some(&tenant))?.to_string(), tenant.as_str());
/// assert!(tenant_id(None)?.is_nil());
/// assert!(tenant_id(Some(&Tenant::new("acme")?)).is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
pub fn tenant_id(tenant: Option<&Tenant>) -> Result<Uuid> {
    let Some(tenant) = tenant else { return Ok(Uuid::nil()) };
    match Uuid::try_parse(tenant.as_str()) {
        Ok(id) if id.is_nil() => {
            Err(Error::invalid("tenant", "it is the nil UUID, which stands for no tenant; name none"))
        }
        Ok(id) if id.hyphenated().to_string() == tenant.as_str() => Ok(id),
        _ => Err(Error::invalid(
            "tenant",
            format!("it is {tenant}; a record's tenant is a UUID in lower case and with hyphens"),
        )),
    }
}

/// The aggregate of a record's events.
pub(crate) fn aggregate_of(module: &ModuleSlug, id: Uuid) -> Result<Aggregate> {
    Aggregate::new(format!("{module}/{id}"))
}

/// How the kinds of the events of records begin. Only a write of a record appends such events.
pub const KIND_PREFIX: &str = RECORD_KINDS;

/// Refuses a kind that is reserved for the events of records: for services that append what their clients
/// send. An event of that kind that no write appended would change the read models, and not the record.
///
/// ```
/// use hapax::{Kind, records::check_kind};
/// assert!(check_kind(&Kind::new("order.paid")?).is_ok());
/// assert!(check_kind(&Kind::new("record.deleted")?).is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
pub fn check_kind(kind: &Kind) -> Result<()> {
    if !kind.as_str().starts_with(KIND_PREFIX) {
        return Ok(());
    }
    let message = format!(
        "it is {}; kinds that begin with {KIND_PREFIX} are reserved for the events that writes of records append",
        Visible(kind.as_str())
    );
    Err(Error::invalid("kind", message))
}

/// Refuses an event that consumers would take for the event of a record: by its kind, or, if it has none, by
/// what a consumer reads as its kind (headers such as `ce_type`, members such as `event_type`). For services
/// that append what their clients send.
///
/// ```
/// use hapax::{Event, EventId, Kind, records::check_event};
/// let event = Event::new(EventId::new("e-1")?).payload(r#"{"event_type": "record.deleted"}"#);
/// assert!(check_event(&event).is_err());
/// assert!(check_event(&event.kind(Kind::new("order.paid")?)).is_ok()); // then nobody looks further
/// # Ok::<(), hapax::Error>(())
/// ```
pub fn check_event(event: &Event) -> Result<()> {
    if let Some(kind) = &event.kind {
        return check_kind(kind);
    }
    let implied = implied_kind(&event.headers, &mut Json::of(&event.payload));
    match implied.filter(|kind| kind.starts_with(KIND_PREFIX)) {
        None => Ok(()),
        Some(kind) => Err(Error::invalid(
            "kind",
            format!(
                "the event has none, and a header or a member of its payload says {}; kinds that begin with {KIND_PREFIX} are \
                 reserved for the events that writes of records append",
                Visible(&kind)
            ),
        )),
    }
}

/// The module that an aggregate belongs to, if it has the form of a record's: `MODULE/UUID`. Clients do not
/// append to such an aggregate if there is that module.
///
/// ```
/// use hapax::{Aggregate, records::module_of};
/// let aggregate = Aggregate::new("orders/0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10")?;
/// assert_eq!(module_of(&aggregate).unwrap().as_str(), "orders");
/// assert!(module_of(&Aggregate::new("orders/17")?).is_none());
/// # Ok::<(), hapax::Error>(())
/// ```
pub fn module_of(aggregate: &Aggregate) -> Option<ModuleSlug> {
    let (slug, id) = aggregate.as_str().split_once('/')?;
    let is_id = Uuid::try_parse(id).is_ok_and(|uuid| uuid.hyphenated().to_string() == id);
    is_id.then(|| ModuleSlug::new(slug).ok()).flatten()
}

/// The refusal of an append to the aggregate of a record.
///
/// ```
/// # let aggregate = hapax::Aggregate::new("orders/0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10")?;
/// assert_eq!(hapax::records::not_yours(&aggregate).code(), "invalid");
/// # Ok::<(), hapax::Error>(())
/// ```
pub fn not_yours(aggregate: &Aggregate) -> Error {
    let message = format!("{aggregate} is the aggregate of a record: only writes of the record append to it");
    Error::invalid("aggregate", message)
}

/// Both numbers of a conflict about a record's seq: the one that the writer expected, and the
/// record's.
pub fn conflict_seqs(error: &Error) -> Option<(u64, u64)> {
    let Error::Conflict { expected, actual } = error else { return None };
    let seq = |text: &str| text.strip_prefix("seq ")?.split(' ').next()?.parse().ok();
    Some((seq(expected)?, seq(actual)?))
}

pub(crate) fn conflict(expected: u64, actual: u64) -> Error {
    Error::Conflict { expected: format!("seq {expected}"), actual: format!("seq {actual}") }
}

pub(crate) fn no_module(module: &ModuleSlug) -> Error {
    Error::NotFound(format!("there is no module {module}; `hapax modules create {module}` makes it"))
}

pub(crate) fn no_record(module: &ModuleSlug, id: Uuid) -> Error {
    Error::NotFound(format!("there is no record {id} in module {module}"))
}

/// One write, without what its kind needs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Write<'w> {
    Create(&'w Create),
    Update(&'w Update),
    Delete(&'w Delete),
}

/// A stored record, read under the lock of its aggregate.
#[derive(Debug)]
pub(crate) struct Found {
    pub seq: u64,
    pub payload: Payload,
    pub created_at: Time,
}

impl<'w> Write<'w> {
    pub(crate) fn tenant(self) -> Option<&'w Tenant> {
        match self {
            Write::Create(write) => write.tenant.as_ref(),
            Write::Update(write) => write.tenant.as_ref(),
            Write::Delete(write) => write.tenant.as_ref(),
        }
    }

    pub(crate) fn module(self) -> &'w ModuleSlug {
        match self {
            Write::Create(write) => &write.module,
            Write::Update(write) => &write.module,
            Write::Delete(write) => &write.module,
        }
    }

    pub(crate) fn id(self) -> Uuid {
        match self {
            Write::Create(write) => write.id,
            Write::Update(write) => write.id,
            Write::Delete(write) => write.id,
        }
    }

    pub(crate) fn aggregate(self) -> Result<Aggregate> {
        aggregate_of(self.module(), self.id())
    }

    /// Checks what needs no store.
    pub(crate) fn check(self) -> Result<Uuid> {
        if let Write::Create(create) = self
            && create.id.is_nil()
        {
            return Err(Error::invalid("id", "a record's id is a UUID other than the nil one"));
        }
        tenant_id(self.tenant())
    }

    /// Whether the write is allowed on the stored record, for an aggregate whose last seq is
    /// `head`. `None`: there is no such record.
    pub(crate) fn decide(self, found: Option<&Found>, head: u64) -> Result<()> {
        if let Some(found) = found.filter(|found| found.seq > head) {
            return Err(Error::Corrupt(format!(
                "record {} of module {} has seq {}, but its last event has seq {head}",
                self.id(),
                self.module(),
                found.seq
            )));
        }
        let expected = match self {
            Write::Create(_) => return found.map_or(Ok(()), |found| Err(conflict(0, found.seq))),
            Write::Update(update) => update.expected_seq,
            Write::Delete(delete) => delete.expected_seq,
        };
        let found = found.ok_or_else(|| no_record(self.module(), self.id()))?;
        if found.seq == expected { Ok(()) } else { Err(conflict(expected, found.seq)) }
    }

    /// When the record was created: now, unless it exists already.
    pub(crate) fn created_at(found: Option<&Found>, now: Time) -> Time {
        found.map_or(now, |found| found.created_at)
    }

    /// The event of the write at `now`, for an aggregate whose last seq is `head`. It has the record's
    /// times, so that a read model can show the record from this event alone.
    ///
    /// Its id is a new UUIDv7: an id that follows from the record could be appended by a stranger first,
    /// and two creators of one record would share it, so that the journal would call the second a repeat
    /// instead of a conflict.
    pub(crate) fn append(self, head: u64, found: Option<&Found>, now: Time) -> Result<Append> {
        let (aggregate, seq) = (self.aggregate()?, head + 1);
        let (kind, payload) = match self {
            Write::Create(write) => ("record.created", Some(&write.payload)),
            Write::Update(write) => ("record.updated", Some(&write.payload)),
            Write::Delete(_) => ("record.deleted", None),
        };
        let (id, module) = (self.id(), self.module());
        let created_at = Self::created_at(found, now);
        let about = format!(
            r#""id":"{id}","module":"{module}","seq":{seq},"created_at":"{created_at}","updated_at":"{now}""#
        );
        let body = match payload {
            Some(payload) => format!(r#"{{{about},"payload":{}}}"#, payload.as_str()),
            None => format!("{{{about}}}"),
        };
        let event =
            Event::new(EventId::new(Uuid::now_v7().to_string())?).kind(Kind::new(kind)?).payload(body);
        let append = Append::new(aggregate, Expected::Exact(head), [event]);
        Ok(match self.tenant() {
            Some(tenant) => append.tenant(tenant.clone()),
            None => append,
        })
    }

    /// The seq of the appended event. Only an event that this write appended may become the version of a
    /// record.
    pub(crate) fn appended(self, appended: &Appended, head: u64) -> Result<u64> {
        let placed = appended.placed.first();
        match placed {
            Some(placed) if placed.placing == Placing::New && placed.seq == head + 1 => Ok(placed.seq),
            _ => Err(Error::Mismatch {
                what: format!(
                    "the id of the event of {}/{} is in the journal already",
                    self.module(),
                    self.id()
                ),
            }),
        }
    }
}
