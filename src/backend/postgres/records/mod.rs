//! Records in PostgreSQL, 15 or newer, in the database of their journal.
//!
//! Each module is a schema `module_SLUG` with one table, `records`, made by its owner
//! ([`PgModules`]). A write is three statements in one transaction: `record_begin` sets the tenant,
//! locks the head of the record's aggregate and reads the record; the journal appends the event;
//! `record_store` writes the record under the event's seq. Triggers refuse every other way to write.
//!
//! Row security is forced: a transaction sees the records of the tenant in `hapax.tenant`, and none if
//! that is unset. A role that bypasses row security is refused, and so is a module whose protection was
//! changed (the others are not).

mod check;
mod modules;
mod schema;
mod snapshot;

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgTransaction};

use check::Protection;
pub use check::{check_keys, refuse_bypass};
pub use modules::PgModules;
pub use schema::{RECORDS_ACCEPTS, RECORDS_VERSION, module_sql, records_grants_sql, records_schema_sql};
pub use snapshot::PgSnapshot;

use super::codes::{count, from_row};
use super::database::Database;
use super::error::{missing, translate};
use super::{Migrate, PgJournal, Pooling};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::records::{
    Create, Delete, Found, LIST_BYTES_MAX, List, Listed, ModuleSlug, Payload, Record, Records, Update, Uuid,
    Write, no_module, tenant_id, written,
};

/// Settings of records in PostgreSQL.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PgRecordsSettings {
    /// Whether to create or update what modules share. Modules themselves are made by [`PgModules`].
    pub migrate: Migrate,
    /// Whether a transaction pooler is in front.
    pub pooling: Pooling,
    /// Accepts a role that bypasses row security, for development. Gives up: tenants are kept apart by
    /// the statements of hapax alone, and nothing keeps them apart in SQL of your own.
    pub accept_bypass: bool,
}

impl Default for PgRecordsSettings {
    fn default() -> Self {
        PgRecordsSettings { migrate: Migrate::Check, pooling: Pooling::Detect, accept_bypass: false }
    }
}

/// Records in PostgreSQL, in the database and the schema of a journal. Clones share them.
///
/// ```no_run
/// use hapax::backend::postgres::{PgJournal, PgRecords, PgRecordsSettings};
/// use hapax::records::{Create, ModuleSlug, Payload};
///
/// # async fn order(journal: PgJournal) -> Result<(), Box<dyn std::error::Error>> {
/// let records = PgRecords::open(&journal, PgRecordsSettings::default()).await?;
/// let order = Create::new(ModuleSlug::new("orders")?, Payload::new(r#"{"amount": 7}"#)?);
/// let mut tx = journal.transaction().await?;
/// let record = records.create_in(&mut tx, &order).await?;
/// tx.commit().await?; // the record and its event
/// journal.wake();
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PgRecords(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    database: Database,
    journal: PgJournal,
    protection: Protection,
    sql: Sql,
}

/// Statements with the schema's name in them.
#[derive(Debug)]
struct Sql {
    begin: Arc<str>,
    store: Arc<str>,
    get: Arc<str>,
    list: Arc<str>,
}

const COLUMNS: &str = "o_id::text as o_id, o_seq, o_payload, o_created_us, o_updated_us";

impl Sql {
    fn new(schema: &str) -> Self {
        let sql = |text: &str| -> Arc<str> { text.replace("{s}", schema).into() };
        Sql {
            begin: sql("select * from {s}.record_begin($1, $2::text::uuid, $3::text::uuid)"),
            store: sql("select {s}.record_store($1, $2, $3::text::uuid, $4::text::uuid, $5, $6, $7, $8)"),
            get: sql(&format!("select {COLUMNS} from {{s}}.record_get($1, $2::text::uuid, $3::text::uuid)")),
            list: sql(&format!(
                "select {COLUMNS} from {{s}}.record_list($1, $2::text::uuid, $3::text::uuid, $4, $5)"
            )),
        }
    }
}

from_row! { "o_",
    /// What `record_begin` answers.
    struct Begun {
        known: bool,
        last: Option<i64>,
        seq: Option<i64>,
        payload: Option<String>,
        created_us: Option<i64>,
        now_us: Option<i64>,
    }
}

impl Begun {
    fn found(self) -> Result<Option<Found>> {
        let Begun { seq: Some(seq), payload: Some(payload), created_us: Some(at), .. } = self else {
            return Ok(None);
        };
        let payload = Payload::stored(&payload)?;
        Ok(Some(Found { seq: seq as u64, payload, created_at: Time::from_micros(at) }))
    }
}

from_row! { "o_",
    /// A record as it is read.
    struct Row { id: String, seq: i64, payload: Option<String>, created_us: i64, updated_us: i64 }
}

impl Row {
    fn record(self, module: &ModuleSlug) -> Result<Record> {
        let id =
            Uuid::try_parse(&self.id).map_err(|_| Error::Corrupt("a record's id is not a UUID".into()))?;
        let payload = self.payload.ok_or_else(|| Error::Corrupt("a record has no payload".into()))?;
        Ok(Record {
            id,
            module: module.clone(),
            seq: self.seq as u64,
            payload: Payload::stored(&payload)?,
            created_at: Time::from_micros(self.created_us),
            updated_at: Time::from_micros(self.updated_us),
        })
    }
}

/// The error for the caller. `what` says what was being done.
fn fail(what: &str, error: sqlx::Error) -> Error {
    match missing(&error) {
        Some(message) => Error::Schema(format!(
            "{message} ({what}); are there records in this schema? `hapax modules create SLUG` makes what they need"
        )),
        None => translate(what, error),
    }
}

impl PgRecords {
    /// Opens the records in the database and the schema of a journal, on its pool. Refuses a role that
    /// bypasses row security, also where there are no records yet. A module whose protection was changed
    /// is logged, and refused when it is used.
    pub async fn open(journal: &PgJournal, settings: PgRecordsSettings) -> Result<Self> {
        let pool = journal.pool();
        let bypassed = check::check_role(pool, settings.accept_bypass).await?;
        schema::PART.prepare(pool, journal.schema(), settings.migrate, &[]).await?;
        let protection = Protection::new(journal.schema(), bypassed);
        protection.check_all(pool).await?;
        let database = Database::new(pool.clone(), settings.pooling).await?;
        let sql = Sql::new(journal.schema());
        Ok(PgRecords(Arc::new(Inner { database, journal: journal.clone(), protection, sql })))
    }

    /// Whether records were ever made in the database and the schema of a journal, of whatever version.
    pub async fn are_there(journal: &PgJournal) -> Result<bool> {
        schema::is_there(journal.pool(), journal.schema()).await
    }

    /// Whether there is this module in the database and the schema of a journal, which may have no records
    /// at all.
    pub async fn has_module(journal: &PgJournal, module: &ModuleSlug) -> Result<bool> {
        schema::has_module(journal.pool(), journal.schema(), module).await
    }

    /// Whether a module is protected as it was made; [`Refused`](Error::Refused) says what is not. Every
    /// write and every read asks this too, and remembers a yes. For a module that does not exist it is Ok.
    pub async fn check_module(&self, module: &ModuleSlug) -> Result<()> {
        self.0.protection.check(self.0.journal.pool(), module).await
    }

    /// The journal that the writes are appended to.
    pub fn journal(&self) -> &PgJournal {
        &self.0.journal
    }

    /// Creates a record in your transaction, and appends its event in it. After the commit, call
    /// [`wake`](PgJournal::wake) of the journal.
    ///
    /// A refusal ([`Conflict`](Error::Conflict), [`NotFound`](Error::NotFound),
    /// [`Invalid`](Error::Invalid)) changes nothing and leaves the transaction as it is, but for its
    /// tenant: `hapax.tenant` is set for the rest of it. On [`Contended`](Error::Contended) roll back
    /// and try again.
    pub async fn create_in(&self, tx: &mut PgTransaction<'_>, create: &Create) -> Result<Record> {
        self.write_in(tx, Write::Create(create)).await
    }

    /// Replaces the content of a record in your transaction; see [`create_in`](PgRecords::create_in).
    pub async fn update_in(&self, tx: &mut PgTransaction<'_>, update: &Update) -> Result<Record> {
        self.write_in(tx, Write::Update(update)).await
    }

    /// Deletes a record in your transaction; see [`create_in`](PgRecords::create_in).
    pub async fn delete_in(&self, tx: &mut PgTransaction<'_>, delete: &Delete) -> Result<Record> {
        self.write_in(tx, Write::Delete(delete)).await
    }

    async fn write_in(&self, tx: &mut PgTransaction<'_>, write: Write<'_>) -> Result<Record> {
        let tenant = write.check()?;
        let (inner, what) = (&*self.0, "writing a record");
        let persistent = !inner.database.pooled();
        inner.protection.check_in(tx, write.module()).await?;
        let begun: Begun = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.begin)))
            .persistent(persistent)
            .bind(write.module().as_str())
            .bind(tenant.to_string())
            .bind(write.id().to_string())
            .fetch_one(&mut **tx)
            .await
            .map_err(|e| fail(what, e))?;
        if !begun.known {
            return Err(no_module(write.module()));
        }
        let head = begun.last.unwrap_or_default() as u64;
        let now = Time::from_micros(begun.now_us.unwrap_or_default());
        let found = begun.found()?;
        write.decide(found.as_ref(), head)?;
        let append = write.append(head, found.as_ref(), now)?;
        // Of two creators of a new record one is refused here, with the other's seq.
        let appended = inner.journal.append_in(tx, &append).await?;
        let seq = write.appended(&appended, head)?;
        crate::crash_point!("records.appended");
        let (kind, payload) = match write {
            Write::Create(create) => (1, Some(create.payload.as_str())),
            Write::Update(update) => (2, Some(update.payload.as_str())),
            Write::Delete(_) => (3, None),
        };
        sqlx::query(AssertSqlSafe(Arc::clone(&inner.sql.store)))
            .persistent(persistent)
            .bind(write.module().as_str())
            .bind(kind)
            .bind(tenant.to_string())
            .bind(write.id().to_string())
            .bind(payload)
            .bind(found.as_ref().map(|found| count(found.seq)))
            .bind(count(seq))
            .bind(now.as_micros())
            .execute(&mut **tx)
            .await
            .map_err(|e| fail(what, e))?;
        crate::crash_point!("records.stored");
        written(write, found, seq, now)
    }

    async fn alone(&self, write: Write<'_>) -> Result<Record> {
        let mut tx = self.0.journal.transaction().await?;
        let record = self.write_in(&mut tx, write).await?; // an error rolls back
        tx.commit().await.map_err(|e| fail("committing a record", e))?;
        self.0.journal.wake();
        Ok(record)
    }
}

/// The error of a read. Its module is named in the statement, so a table that is missing is the module's.
fn unread(module: &ModuleSlug, error: sqlx::Error) -> Error {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    match code.as_deref() {
        Some("42P01" | "3F000") => no_module(module),
        _ => fail("reading records", error),
    }
}

#[async_trait]
impl Records for PgRecords {
    async fn create(&self, create: &Create) -> Result<Record> {
        self.alone(Write::Create(create)).await
    }

    async fn update(&self, update: &Update) -> Result<Record> {
        self.alone(Write::Update(update)).await
    }

    async fn delete(&self, delete: &Delete) -> Result<Record> {
        self.alone(Write::Delete(delete)).await
    }

    async fn get(&self, tenant: Option<&Tenant>, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>> {
        let tenant = tenant_id(tenant)?;
        self.check_module(module).await?;
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&self.0.sql.get)))
            .bind(module.as_str())
            .bind(tenant.to_string())
            .bind(id.to_string());
        let found: Vec<Row> = self.0.database.fetch_all(query).await.map_err(|e| unread(module, e))?;
        found.into_iter().next().map(|row| row.record(module)).transpose()
    }

    async fn list(&self, which: &List) -> Result<Listed> {
        let tenant = which.check()?;
        self.check_module(&which.module).await?;
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&self.0.sql.list)))
            .bind(which.module.as_str())
            .bind(tenant.to_string())
            .bind(which.after.map(|id| id.to_string()))
            .bind(count(which.limit as u64))
            .bind(count(LIST_BYTES_MAX as u64));
        let mut found: Vec<Row> =
            self.0.database.fetch_all(query).await.map_err(|e| unread(&which.module, e))?;
        let more = found.pop_if(|last| last.payload.is_none()).is_some();
        let records = found.into_iter().map(|row| row.record(&which.module)).collect::<Result<_>>()?;
        Ok(Listed::new(records, more))
    }
}
