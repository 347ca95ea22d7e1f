//! Records: JSON objects in named modules, written with their events in one transaction.
//!
//! A module is created once, with the rights of an owner ([`Modules::create_module`]; `hapax
//! modules create`). A record belongs to a tenant and a module. Each write of a record appends an
//! event to the journal in the same database, in the same transaction: aggregate `MODULE/ID`, kinds
//! `record.created`, `record.updated` and `record.deleted`. The seq of that event is the record's
//! version. It only rises, even when a deleted id is created again, so every read model can use it
//! as the version.
//!
//! Together with a [key](crate::keyed), a client's retry of a write gets the first answer: `PgKeys` and
//! `PgRecords`, or `SqliteKeys` and `SqliteRecords`, share one database, and `create_in`, `update_in`
//! and `delete_in` take the transaction that the key was begun in.
//!
//! This module has the names and the rules, which are pure: they check a write and make its event.
//! The stores have the transaction, the table and the journal, and nothing here calls a bus or a
//! ledger. The stores are [`PgRecords`](crate::backend::postgres::PgRecords) and
//! [`SqliteRecords`](crate::backend::sqlite::SqliteRecords).
#![cfg_attr(not(all(feature = "postgres", feature = "sqlite")), allow(rustdoc::broken_intra_doc_links))]

mod name;
mod payload;
mod slug;
#[cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code))] // for the stores
mod write;

use std::sync::Arc;

use async_trait::async_trait;
pub use uuid::Uuid;

pub use name::{Name, Scan};
pub(crate) use payload::plain_numbers;
pub use payload::{PAYLOAD_BYTES_MAX, Payload};
pub use slug::ModuleSlug;
pub(crate) use write::aggregate_of;
pub use write::{
    Create, Delete, KIND_PREFIX, Record, Update, check_event, check_kind, conflict_seqs, module_of,
    not_yours, tenant_id,
};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use write::{Found, Write, no_module};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;

/// How many records a list has by default.
pub const LIST_DEFAULT: usize = 100;
/// How many records a list may have.
pub const LIST_MAX: usize = 1000;
/// How many bytes a page of a list has: the record that reaches them is its last. So a page has less than
/// 9 MiB, as JSON too.
pub const LIST_BYTES_MAX: usize = 8 << 20;
/// How many bytes a record counts on a page, besides its content.
pub(crate) const RECORD_BYTES: usize = 256;

/// Which records to list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct List {
    /// Whose records.
    pub tenant: Option<Tenant>,
    /// The module.
    pub module: ModuleSlug,
    /// Only records with a greater id.
    pub after: Option<Uuid>,
    /// How many at most: 1 to [`LIST_MAX`]. There are fewer if they reach [`LIST_BYTES_MAX`].
    pub limit: usize,
}

impl List {
    /// The first [`LIST_DEFAULT`] records of a module, of no tenant.
    pub fn new(module: ModuleSlug) -> Self {
        List { tenant: None, module, after: None, limit: LIST_DEFAULT }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Tenant>) -> Self {
        self.tenant = tenant;
        self
    }

    /// Begins after an id.
    #[must_use]
    pub fn after(mut self, id: Option<Uuid>) -> Self {
        self.after = id;
        self
    }

    /// Sets how many records there are at most.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    #[cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code))]
    pub(crate) fn check(&self) -> Result<Uuid> {
        if !(1..=LIST_MAX).contains(&self.limit) {
            let problem = format!("it is {}; a list has 1 to {LIST_MAX} records", self.limit);
            return Err(Error::invalid("limit", problem));
        }
        tenant_id(self.tenant.as_ref())
    }
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// The records, by id.
    pub records: Vec<Record>,
    /// Where the next page begins, if there may be one: pass it as [`after`](List::after).
    pub next: Option<Uuid>,
}

impl Listed {
    /// A page, and whether there are more records after it.
    pub(crate) fn new(records: Vec<Record>, more: bool) -> Self {
        let next = records.last().filter(|_| more).map(|last| last.id);
        Listed { records, next }
    }
}

/// A page being filled, by the rule of the journal's pages: the record that reaches the limit of records
/// or bytes completes it.
#[derive(Debug)]
pub(crate) struct Filling {
    records: Vec<Record>,
    bytes: usize,
    limit: usize,
}

impl Filling {
    pub(crate) fn new(limit: usize) -> Self {
        Filling { records: Vec::new(), bytes: 0, limit }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.records.len() >= self.limit || self.bytes >= LIST_BYTES_MAX
    }

    pub(crate) fn add(&mut self, record: Record) {
        self.bytes += RECORD_BYTES + record.payload.as_str().len();
        self.records.push(record);
    }

    /// The page; `more`: there are records after it.
    pub(crate) fn done(self, more: bool) -> Listed {
        Listed::new(self.records, more)
    }
}

/// Stores records.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. A write and its event are one: both are committed or neither is. The record's seq is the event's
///    seq, and the event carries the record after the write.
/// 2. `update` and `delete` name the seq that the writer has seen. If the record has another one, the
///    answer is `Conflict` with both numbers; nothing is written, nothing is appended and no number is
///    used up. Of many writers with one seq, one wins.
/// 3. `create` under an id that exists is a `Conflict` with 0 and the record's seq. Of many creators of
///    one id, one wins.
/// 4. A deleted record is gone: reads do not show it, writes answer `NotFound`. If its id is
///    created again, its seq continues from its last one.
/// 5. Tenants never meet: an id, a module and a seq say nothing about the records of another tenant, and
///    one id in two tenants is two records.
/// 6. An unknown module is `NotFound`, and nothing is created.
/// 7. A list is ordered by the bytes of the id. A page ends with the record that reaches the limit or
///    [`LIST_BYTES_MAX`]. Following `next` shows every record that was there all the time once.
/// 8. A payload comes back as the same JSON value, its numbers digit for digit.
/// 9. Bad input (tenants, limits, ids) is refused with a sentence and changes nothing.
/// 10. Times are the store's own.
///
/// A write here is a transaction of its own. If its acknowledgement is lost
/// ([`Unavailable`](Error::Unavailable)), read the record, or use a [key](crate::keyed) and the `…_in`
/// functions of the store.
#[async_trait]
pub trait Records: Send + Sync {
    /// Creates a record.
    async fn create(&self, create: &Create) -> Result<Record>;

    /// Replaces the content of a record.
    async fn update(&self, update: &Update) -> Result<Record>;

    /// Deletes a record. Returns its last content, with the seq and the time of the deletion.
    async fn delete(&self, delete: &Delete) -> Result<Record>;

    /// A record, if there is one.
    async fn get(&self, tenant: Option<&Tenant>, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>>;

    /// Records in the order of their ids.
    async fn list(&self, which: &List) -> Result<Listed>;
}

/// A module, as an owner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Module {
    /// Its name.
    pub slug: ModuleSlug,
    /// How many records it has, of all tenants; `None` if this role may not count them.
    pub records: Option<u64>,
    /// What is wrong with its protection, a phrase each; empty if nothing is.
    pub problems: Vec<String>,
}

impl Module {
    #[cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code))]
    pub(crate) fn new(slug: ModuleSlug, records: Option<u64>, problems: Vec<String>) -> Self {
        Module { slug, records, problems }
    }
}

/// The PostgreSQL roles that work on records, other than their owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roles {
    /// Reads and writes, as the tenant that each transaction names.
    pub app: Option<String>,
    /// Counts records and sweeps keys of all tenants.
    pub maintenance: Option<String>,
}

/// Makes modules and looks after them, with the rights of their owner.
#[async_trait]
pub trait Modules: Send + Sync {
    /// Creates a module. False if it existed already; then nothing is changed. Many processes may
    /// call this at the same time.
    async fn create_module(&self, slug: &ModuleSlug) -> Result<bool>;

    /// All modules, by name.
    async fn modules(&self) -> Result<Vec<Module>>;

    /// The SQL that grants the roles of the app and of maintenance their rights, for the owner to run.
    async fn grants_sql(&self) -> Result<String>;
}

/// A record and whose it is: the nil UUID means no tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfTenant {
    /// Whose record.
    pub tenant: Uuid,
    /// The record.
    pub record: Record,
}

impl OfTenant {
    /// Its name.
    pub fn name(&self) -> Name {
        Name { tenant: self.tenant, module: self.record.module.clone(), id: self.record.id }
    }
}

/// Reads the records of all tenants: to fill a new read model, and to compare one with them.
///
/// Records are ordered by module, tenant and id. A page shows what is committed when it is read;
/// following the pages shows every record that existed all the time.
#[async_trait]
pub trait Snapshot: Send + Sync {
    /// The next records of a scan. Empty: there are no more.
    async fn snapshot(&self, scan: &Scan) -> Result<Vec<OfTenant>>;

    /// The next records that were deleted and do not exist now, each with the seq of its deletion,
    /// after a name in an order of the store's own. Empty: there are no more. Their old changes may
    /// be published again, and a model that does not know of the deletion would show them.
    async fn gone(&self, after: Option<&Name>, limit: usize) -> Result<Vec<(Name, u64)>>;

    /// The time by the clock of their journal, which pulses have too.
    async fn now(&self) -> Result<Time>;
}

#[async_trait]
impl<R: Records + ?Sized> Records for Arc<R> {
    async fn create(&self, create: &Create) -> Result<Record> {
        (**self).create(create).await
    }
    async fn update(&self, update: &Update) -> Result<Record> {
        (**self).update(update).await
    }
    async fn delete(&self, delete: &Delete) -> Result<Record> {
        (**self).delete(delete).await
    }
    async fn get(&self, tenant: Option<&Tenant>, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>> {
        (**self).get(tenant, module, id).await
    }
    async fn list(&self, which: &List) -> Result<Listed> {
        (**self).list(which).await
    }
}

/// A record after a write.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn written(write: Write<'_>, found: Option<Found>, seq: u64, at: Time) -> Result<Record> {
    let created_at = Write::created_at(found.as_ref(), at);
    let payload = match write {
        Write::Create(create) => create.payload.clone(),
        Write::Update(update) => update.payload.clone(),
        Write::Delete(_) => {
            let gone = || Error::Corrupt("a record was deleted that was not there".into());
            found.ok_or_else(gone)?.payload
        }
    };
    Ok(Record { id: write.id(), module: write.module().clone(), seq, payload, created_at, updated_at: at })
}
