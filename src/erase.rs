//! Erasure: removes what hapax stores about a tenant or a record. What must stay keeps no content.
//!
//! | what | becomes |
//! |---|---|
//! | a record | deleted, by an ordinary write: the deletion has the next seq |
//! | an event in the journal | keeps its position, seq, id, kind and times; its payload and its headers are a marker |
//! | the answer to a keyed write | a `410 Gone`: the key is still taken, so a late retry runs nothing |
//! | an event that is held, or dead | dropped, by an ordinary intervention |
//! | an entry of a ledger | loses its metadata, its reason and its fingerprint |
//! | a record of the embedded bus | keeps its offset; its payload and its headers are a marker |
//! | a row of a read model | the deletion, and no older version |
//!
//! So histories stay gapless, and a relay, a consumer or a rebuild that reads them again gets the
//! same result. An erased event of a record reads as a deletion under its own version.
//!
//! An [`Eraser`] does this for one database, and may touch only hapax's own tables in it: never
//! your rows, nor another store. The records themselves are deleted through
//! [`Records`](crate::records::Records) first: an eraser never writes a record.

// Each backend uses some of it.
#![cfg_attr(not(all(feature = "postgres", feature = "sqlite")), allow(dead_code))]

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;

use crate::clock::Time;
use crate::error::Result;
use crate::event::Headers;
use crate::id::{Aggregate, EventId, Tenant};
use crate::records::{KIND_PREFIX, ModuleSlug, Name, Uuid, module_of};

/// The header that an erased event has, and no other.
pub const HEADER: &str = "hapax_erased";

/// The status of an answer that was erased.
pub(crate) const ANSWER_STATUS: u16 = 410;
/// The kept headers of an answer that was erased, as they are stored.
pub(crate) const ANSWER_HEADERS: &str = r#"[["content-type","application/problem+json"]]"#;
/// The body of an answer that was erased. It is how one is recognised.
pub(crate) const ANSWER_BODY: &str = concat!(
    r#"{"type":"https://github.com/hapax-rs/hapax/blob/main/docs/errors/answer-erased.md","#,
    r#""title":"The answer was erased","status":410,"code":"answer-erased","#,
    r#""detail":"the request with this key was answered; its answer was erased with the data of its tenant or record"}"#
);

/// The kind of a deletion of a record. Its event has no content to erase.
pub(crate) const DELETION: &str = "record.deleted";

/// What to erase: a tenant or a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Subject {
    /// Whose data; `None` is data without a tenant.
    pub tenant: Option<Tenant>,
    /// Only one record; `None`: everything of the tenant.
    pub record: Option<(ModuleSlug, Uuid)>,
    /// The ids of the record's events, as far as they are known: how a ledger finds its entries.
    pub events: Vec<EventId>,
}

impl Subject {
    /// Everything of a tenant.
    pub fn tenant(tenant: Tenant) -> Self {
        Subject { tenant: Some(tenant), record: None, events: Vec::new() }
    }

    /// One record.
    pub fn record(tenant: Option<Tenant>, module: ModuleSlug, id: Uuid) -> Self {
        Subject { tenant, record: Some((module, id)), events: Vec::new() }
    }

    /// The aggregate of the record.
    pub fn aggregate(&self) -> Result<Option<Aggregate>> {
        self.record.as_ref().map(|(module, id)| Aggregate::new(format!("{module}/{id}"))).transpose()
    }

    /// The tenant as databases store it: no tenant is the empty text.
    pub fn tenant_text(&self) -> &str {
        self.tenant.as_ref().map_or("", Tenant::as_str)
    }

    /// The tenant's UUID, which records have; `None` if it is none.
    pub fn tenant_id(&self) -> Option<Uuid> {
        crate::records::tenant_id(self.tenant.as_ref()).ok()
    }

    /// The text that shows that an answer or a payload is about the subject.
    pub(crate) fn mark(&self) -> String {
        match &self.record {
            Some((_, id)) => id.to_string(),
            None => self.tenant_text().to_owned(),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.tenant, &self.record) {
            (Some(tenant), None) => write!(f, "tenant {tenant}"),
            (Some(tenant), Some((module, id))) => write!(f, "record {module}/{id} of tenant {tenant}"),
            (None, Some((module, id))) => write!(f, "record {module}/{id}"),
            (None, None) => f.write_str("what has no tenant"),
        }
    }
}

/// How much of a subject is in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// The place, for people: `journal`, `answers`.
    pub place: &'static str,
    /// How many of its rows have something to erase.
    pub rows: u64,
}

impl Found {
    /// So many rows in a place.
    pub fn new(place: &'static str, rows: u64) -> Self {
        Found { place, rows }
    }
}

/// Erases what one database has of a subject, besides records.
///
/// Every call may be repeated, even one that was killed half-way, with the same result.
#[async_trait]
pub trait Eraser: Send + Sync {
    /// How much there is, place by place. Changes nothing.
    async fn count(&self, of: &Subject) -> Result<Vec<Found>>;

    /// Erases it, and says how much there was. Events whose record is still there are erased too: delete
    /// records first.
    async fn erase(&self, of: &Subject) -> Result<Vec<Found>>;

    /// The records that the journal has ever had of a subject, with the seq of the last event of each.
    async fn heads(&self, of: &Subject) -> Result<Vec<(Name, u64)>>;

    /// Whether the database has ever had anything of the subject, as far as it still knows.
    async fn knows(&self, of: &Subject) -> Result<bool>;

    /// Takes what was erased out of the files too, as far as the database can. Returns what it cannot, a
    /// sentence each.
    async fn compact(&self) -> Result<Vec<String>>;
}

/// The payload of an erased event. That of a record's event names the record and the seq, so that
/// readers can continue.
pub(crate) fn payload(kind: Option<&str>, aggregate: &str, seq: u64, at: Time) -> String {
    let of_record = kind.is_some_and(|kind| kind.starts_with(KIND_PREFIX));
    match name(Uuid::nil(), aggregate).filter(|_| of_record) {
        Some(Name { module, id, .. }) => format!(
            r#"{{"id":"{id}","module":"{module}","seq":{seq},"created_at":"{at}","updated_at":"{at}","erased":true}}"#
        ),
        None => r#"{"erased":true}"#.to_owned(),
    }
}

/// The record that an aggregate is, if it has the form of one.
pub(crate) fn name(tenant: Uuid, aggregate: &str) -> Option<Name> {
    let module = module_of(&Aggregate::new(aggregate).ok()?)?;
    let id = Uuid::try_parse(aggregate.split_once('/')?.1).ok()?;
    Some(Name { tenant, module, id })
}

/// The tenant of records that a database stores as a text; `None`: one that has no records.
pub(crate) fn tenant_of(text: &str) -> Option<Uuid> {
    let tenant = if text.is_empty() { None } else { Some(Tenant::new(text).ok()?) };
    crate::records::tenant_id(tenant.as_ref()).ok()
}

/// The headers of an erased event.
pub(crate) fn headers() -> Headers {
    std::iter::once((HEADER, Bytes::from_static(b"true"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_erased_event_of_a_record_says_which_and_any_other_nothing() {
        let at = Time::from_millis(1);
        let aggregate = "orders/0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
        let said = payload(Some("record.created"), aggregate, 7, at);
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(
            (&said["module"], &said["seq"], &said["erased"]),
            (&"orders".into(), &7.into(), &true.into())
        );
        for (kind, aggregate) in
            [(Some("order.paid"), aggregate), (None, aggregate), (Some("record.created"), "x")]
        {
            assert_eq!(payload(kind, aggregate, 7, at), r#"{"erased":true}"#);
        }
    }

    #[test]
    fn the_answer_that_stands_for_an_erased_one_can_be_stored() {
        let body: serde_json::Value = serde_json::from_str(ANSWER_BODY).unwrap();
        assert_eq!((&body["status"], &body["code"]), (&ANSWER_STATUS.into(), &"answer-erased".into()));
        assert!(crate::keyed::PROBLEMS.contains(&"answer-erased"));
        let headers: Vec<(String, String)> = serde_json::from_str(ANSWER_HEADERS).unwrap();
        assert_eq!(headers[0].0, "content-type");
    }
}
