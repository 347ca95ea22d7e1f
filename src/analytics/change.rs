//! One change of a record, as a topic carries it.

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::{Version, debezium};
use crate::bus::{Pulse, Received};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::{Tenant, Topic};
use crate::records::{KIND_PREFIX, ModuleSlug, Name, OfTenant, Payload, tenant_id};

/// A row for a read model: what a record is under one version.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// Whose record; the nil UUID means no tenant.
    pub tenant: Uuid,
    /// Its module.
    pub module: ModuleSlug,
    /// Its id.
    pub id: Uuid,
    /// Its version.
    pub version: Version,
    /// Its content; `None` if this version deletes it.
    pub payload: Option<Payload>,
    /// When the record was created.
    pub created_at: Time,
    /// When this version was written.
    pub updated_at: Time,
    /// Where this change was read. For people who look: it decides nothing.
    pub origin: Origin,
    /// Its position in PostgreSQL's log, from Debezium; 0 for other sources. For diagnosis only:
    /// nothing is decided by it, since positions in the log are not in the order of commits.
    pub lsn: u64,
}

impl Change {
    /// The current state of a record; `origin` is where it was read.
    pub fn of_record(of: OfTenant, generation: u16, origin: Origin) -> Result<Self> {
        let OfTenant { tenant, record } = of;
        Ok(Change {
            tenant,
            module: record.module,
            id: record.id,
            version: Version::new(generation, record.seq)?,
            payload: Some(record.payload),
            created_at: record.created_at,
            updated_at: record.updated_at,
            origin,
            lsn: 0,
        })
    }

    /// The deletion of a record under a version, without a message in a topic: `topic` is the one
    /// that carries the record's changes.
    pub fn deletion(name: Name, version: Version, at: Time, topic: Topic) -> Self {
        let Name { tenant, module, id } = name;
        let origin = Origin::new(topic, 0, -1);
        Change { tenant, module, id, version, payload: None, created_at: at, updated_at: at, origin, lsn: 0 }
    }
}

impl Name {
    /// The record that a change is about.
    pub fn of(change: &Change) -> Self {
        Name { tenant: change.tenant, module: change.module.clone(), id: change.id }
    }
}

/// Who publishes the topic that feeds a read model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Source {
    /// A relay, from the journal: the topic may carry other events too.
    #[default]
    Journal,
    /// Debezium, from PostgreSQL's log. Whatever cannot be read is rejected, since the topic carries
    /// nothing but changes and pulses.
    Debezium,
}

impl Source {
    /// Reads a record of such a topic, of a source that has this generation. The error says why it should
    /// be a change and is not.
    pub fn read(self, received: &Received, generation: u16) -> std::result::Result<Input, Box<Rejected>> {
        match self {
            Source::Journal => Input::of(received, generation),
            Source::Debezium => debezium::input(received, generation),
        }
    }
}

/// What a message in a topic means to a read model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Input {
    /// A change of a record.
    Change(Box<Change>),
    /// How far the topic is.
    Pulse(Pulse),
    /// The same, and the time of the pulse before it in the same partition. If that one never arrived,
    /// neither did the changes between them.
    NextPulse {
        /// The pulse.
        pulse: Pulse,
        /// The time of the pulse before it; `None` if it is the first of its row.
        last: Option<Time>,
    },
    /// A pulse that a snapshot read. It does not say up to when the topic is complete, only which
    /// pulse the first streamed one must follow.
    SnapshotPulse(Pulse),
    /// All records of a module were removed at once, without a version for any of them.
    Truncated(ModuleSlug),
    /// Another event, which does not concern a read model.
    Other,
}

/// A record of a topic that claims to be a change, and cannot be read as one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rejected {
    /// Whose it is, if that much can be read.
    pub tenant: Option<Uuid>,
    /// Where it is.
    pub origin: Origin,
    /// Why it cannot be read.
    pub reason: String,
    /// Its payload, as far as it could be read.
    pub payload: Vec<u8>,
}

/// The body of an event of a record; see [`records`](crate::records).
#[derive(Deserialize)]
struct Body<'b> {
    id: String,
    module: String,
    seq: u64,
    created_at: String,
    updated_at: String,
    #[serde(borrow)]
    payload: Option<&'b RawValue>,
    /// Whether the content of the event was erased; see [`erase`](crate::erase).
    #[serde(default)]
    erased: bool,
}

impl Input {
    /// Reads a record that a relay published, of a source that has this generation. The error says why it
    /// should be a change and is not.
    pub fn of(received: &Received, generation: u16) -> std::result::Result<Self, Box<Rejected>> {
        let rejected = |tenant: Option<Uuid>, reason: String| {
            let payload = received.record.payload.as_deref().unwrap_or_default().to_vec();
            Box::new(Rejected { tenant, origin: received.origin.clone(), reason, payload })
        };
        match Pulse::of(&received.record) {
            Some(Ok(pulse)) => return Ok(Input::Pulse(pulse)),
            Some(Err(error)) => return Err(rejected(None, error.chain())),
            None => {}
        }
        let kind = header(received, "ce_type").ok().flatten();
        // What the bus could not read in full may have been a change.
        if received.unreadable.is_none() && !kind.is_some_and(|kind| kind.starts_with(KIND_PREFIX)) {
            return Ok(Input::Other);
        }
        let tenant = tenant(received);
        let known = tenant.as_ref().ok().copied();
        tenant
            .and_then(|tenant| change(received, kind, tenant, generation))
            .map(|change| Input::Change(Box::new(change)))
            .map_err(|error| rejected(known, error.chain()))
    }
}

fn header<'r>(received: &'r Received, name: &str) -> Result<Option<&'r str>> {
    let value = received.record.headers.get(name).map(std::str::from_utf8).transpose();
    value.map_err(|_| Error::invalid("record", format!("its header {name} is not UTF-8")))
}

fn tenant(received: &Received) -> Result<Uuid> {
    let tenant = header(received, "tenant_id")?.map(Tenant::new).transpose()?;
    tenant_id(tenant.as_ref())
}

fn change(received: &Received, kind: Option<&str>, tenant: Uuid, generation: u16) -> Result<Change> {
    if let Some(problem) = &received.unreadable {
        return Err(Error::invalid("record", problem.clone()));
    }
    let bad = |problem: String| Error::invalid("change", problem);
    let bytes = received.record.payload.as_deref().unwrap_or_default();
    let body: Body<'_> = serde_json::from_slice(bytes)
        .map_err(|error| bad(format!("it is not the event of a record ({error})")))?;
    let payload = match (kind, body.payload) {
        (Some("record.created" | "record.updated"), Some(payload)) => Some(Payload::new(payload.get())?),
        (Some("record.deleted"), None) => None,
        // Whatever the record was under this version, a deletion follows.
        (Some("record.created" | "record.updated"), None) if body.erased => None,
        (kind, payload) => {
            let (kind, has) =
                (kind.unwrap_or_default(), if payload.is_some() { "a payload" } else { "no payload" });
            return Err(bad(format!(
                "its kind is {kind} and it has {has}; record.created and record.updated have one, record.deleted has none"
            )));
        }
    };
    let id = Uuid::try_parse(&body.id).map_err(|_| bad("its id is not a UUID".into()))?;
    let module = ModuleSlug::new(&body.module)?;
    let (aggregate, numbered) =
        (header(received, "aggregate_id")?.unwrap_or_default(), header(received, "sequence_number")?);
    if aggregate != format!("{module}/{id}") || numbered != Some(&body.seq.to_string()) {
        return Err(bad(format!(
            "it is about {module}/{id} with seq {}, and its headers say {aggregate} with seq {}",
            body.seq,
            numbered.unwrap_or("none")
        )));
    }
    let updated_at = Time::parse(&body.updated_at)?;
    let by_clock =
        crate::crash_point::mutant!("version by wall time").then(|| (updated_at.as_micros() / 1000) as u64);
    Ok(Change {
        tenant,
        module,
        id,
        version: Version::new(generation, by_clock.unwrap_or(body.seq))?,
        payload,
        created_at: Time::parse(&body.created_at)?,
        updated_at,
        origin: received.origin.clone(),
        lsn: 0,
    })
}
