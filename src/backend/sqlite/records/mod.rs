//! Records in an SQLite file, which is the file of their journal: a write commits the record and its
//! event together, and with a key the answer too. All tables are named `hapax_record…`.
//!
//! SQLite has no roles: the tenant is in every statement, and whoever can open the file can read it.
//! Triggers refuse every write whose event is not the last of the record's aggregate.

pub(super) mod rows;
mod schema;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use rusqlite::{Connection, TransactionBehavior};

use super::connect::{self, Access, immediate, patiently};
use super::fault::Doing;
use super::journal::{InTransaction, SqliteJournal};
use super::{Threads, answer, reader};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::records::{
    Create, Delete, List, Listed, Module, ModuleSlug, Modules, Name, OfTenant, Record, Records, Scan,
    Snapshot, Update, Uuid, Write, no_module, tenant_id, written,
};

/// Records in the file of a journal. Clones share its connections.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
/// use hapax::journal::{Journal, JournalSettings};
/// use hapax::records::{Create, ModuleSlug, Modules, Payload, Records};
/// # let dir = tempfile::tempdir().unwrap();
/// # let file = dir.path().join("orders.db");
/// let journal = SqliteJournal::open(&file, JournalSettings::default()).unwrap();
/// let records = SqliteRecords::open(&journal).unwrap();
/// let orders = ModuleSlug::new("orders").unwrap();
/// records.create_module(&orders).await.unwrap();
/// let order = Create::new(orders, Payload::new(r#"{"amount": 7}"#).unwrap());
/// assert_eq!(records.create(&order).await.unwrap().seq, 1);
/// assert_eq!(journal.stat().await.unwrap().events, 1);
/// # });
/// ```
#[derive(Clone)]
pub struct SqliteRecords(Arc<Inner>);

struct Inner {
    // Dropped before `_threads`, so that the thread ends before it is joined.
    read: reader::Questions,
    _threads: Threads,
    /// For writes in transactions of their own.
    write: Mutex<Connection>,
    journal: SqliteJournal,
}

impl fmt::Debug for SqliteRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteRecords").field("path", &self.0.journal.path()).finish_non_exhaustive()
    }
}

impl SqliteRecords {
    /// Opens the records in the file of a journal. Brings their tables up to date; several processes
    /// may do so at once.
    pub fn open(journal: &SqliteJournal) -> Result<Self> {
        let write = connect::open_file(journal.path(), Access::Write, "file of records")?;
        connect::make_durable(&write)?;
        schema::migrate(&write)?;
        let read = connect::open_file(journal.path(), Access::Write, "file of records")?;
        let failed = |error| Error::unavailable("starting the thread of the records", error);
        let (read, reading) = reader::start(read).map_err(failed)?;
        let inner = Inner {
            read,
            _threads: Threads(vec![reading]),
            write: Mutex::new(write),
            journal: journal.clone(),
        };
        Ok(SqliteRecords(Arc::new(inner)))
    }

    /// Opens records that are there with this build's schema. It never creates or migrates them.
    pub fn open_existing(journal: &SqliteJournal) -> Result<Self> {
        let found = connect::open_file(journal.path(), Access::Read, "file of records")?;
        if !patiently(|| schema::PART.is_current(&found))? {
            let path = journal.path().display();
            return Err(Error::Schema(if schema::PART.is_there(&found)? {
                format!(
                    "the records in {path} have an older schema, and migrate is `check`; open them once with `auto`"
                )
            } else {
                format!("there is no module in {path} yet; `hapax modules create SLUG` makes one")
            }));
        }
        drop(found);
        SqliteRecords::open(journal)
    }

    /// Whether there is this module in a file, which may have no records at all. Creates nothing.
    pub fn has_module(path: impl AsRef<Path>, module: &ModuleSlug) -> Result<bool> {
        let found = connect::open_file(path.as_ref(), Access::Read, "file of records")?;
        patiently(|| Ok(schema::PART.is_there(&found)? && rows::has_module(&found, module)?))
    }

    /// The journal that the writes are appended to.
    pub fn journal(&self) -> &SqliteJournal {
        &self.0.journal
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.0.journal.path()
    }

    /// Creates a record in the caller's transaction, on the caller's connection to the file. Its event
    /// is appended in it too.
    ///
    /// Begin the transaction with [`Immediate`](TransactionBehavior::Immediate) behaviour. A refusal
    /// ([`Conflict`](Error::Conflict), [`NotFound`](Error::NotFound), [`Invalid`](Error::Invalid)) has
    /// changed nothing, and the transaction may go on; after any other error, roll back.
    pub fn create_in(&self, tx: &impl InTransaction, create: &Create) -> Result<Record> {
        self.write_in(tx, Write::Create(create))
    }

    /// Replaces the content of a record in the caller's transaction; see
    /// [`create_in`](SqliteRecords::create_in).
    pub fn update_in(&self, tx: &impl InTransaction, update: &Update) -> Result<Record> {
        self.write_in(tx, Write::Update(update))
    }

    /// Deletes a record in the caller's transaction; see [`create_in`](SqliteRecords::create_in).
    pub fn delete_in(&self, tx: &impl InTransaction, delete: &Delete) -> Result<Record> {
        self.write_in(tx, Write::Delete(delete))
    }

    fn write_in(&self, tx: &impl InTransaction, write: Write<'_>) -> Result<Record> {
        let tenant = write.check()?;
        let conn = tx.connection();
        if !schema::PART.is_there(conn)? {
            return Err(Error::Unsupported(format!(
                "this transaction's main database is not the file of the records ({}), so the record and its event would not \
                 be committed as one; open that file",
                self.path().display()
            )));
        }
        if !rows::has_module(conn, write.module())? {
            return Err(no_module(write.module()));
        }
        let journal = &self.0.journal;
        let head = journal.head_in(conn, write.tenant(), &write.aggregate()?)?;
        let found = rows::find(conn, tenant, write)?;
        write.decide(found.as_ref(), head)?;
        let now = journal.clock().now();
        let appended = journal.append_in(tx, &write.append(head, found.as_ref(), now)?)?;
        let seq = write.appended(&appended, head)?;
        crate::crash_point!("records.appended");
        rows::store(conn, tenant, write, found.as_ref().map(|found| found.seq), seq, now)?;
        crate::crash_point!("records.stored");
        written(write, found, seq, now)
    }

    /// Runs a write in a transaction of its own, on a thread that may block.
    async fn alone<T: Send + 'static>(
        &self,
        run: impl Fn(&Self, &rusqlite::Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let records = self.clone();
        let work = move || {
            let mut conn = records.0.write.lock().unwrap_or_else(PoisonError::into_inner);
            patiently(|| {
                let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate);
                let tx = tx.doing("beginning a write of a record")?;
                let value = run(&records, &tx)?; // an error rolls back
                tx.commit().doing("committing a record")?;
                Ok(value)
            })
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| Err(Error::unavailable("a write of a record", error)))
    }
}

#[async_trait]
impl Records for SqliteRecords {
    async fn create(&self, create: &Create) -> Result<Record> {
        let create = create.clone();
        self.alone(move |records, tx| records.create_in(tx, &create)).await
    }

    async fn update(&self, update: &Update) -> Result<Record> {
        let update = update.clone();
        self.alone(move |records, tx| records.update_in(tx, &update)).await
    }

    async fn delete(&self, delete: &Delete) -> Result<Record> {
        let delete = delete.clone();
        self.alone(move |records, tx| records.delete_in(tx, &delete)).await
    }

    async fn get(&self, tenant: Option<&Tenant>, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>> {
        let (tenant, module) = (tenant_id(tenant)?, module.clone());
        answer(self.0.read.send(move |conn| {
            if !rows::has_module(conn, &module)? {
                return Err(no_module(&module));
            }
            rows::get(conn, tenant, &module, id)
        }))
        .await
    }

    async fn list(&self, which: &List) -> Result<Listed> {
        let (tenant, which) = (which.check()?, which.clone());
        answer(self.0.read.send(move |conn| {
            if !rows::has_module(conn, &which.module)? {
                return Err(no_module(&which.module));
            }
            rows::list(conn, tenant, &which)
        }))
        .await
    }
}

#[async_trait]
impl Snapshot for SqliteRecords {
    async fn snapshot(&self, scan: &Scan) -> Result<Vec<OfTenant>> {
        let scan = scan.clone();
        answer(self.0.read.send(move |conn| rows::snapshot(conn, &scan))).await
    }

    async fn gone(&self, after: Option<&Name>, limit: usize) -> Result<Vec<(Name, u64)>> {
        let after = after.cloned();
        answer(self.0.read.send(move |conn| rows::gone(conn, after.as_ref(), limit))).await
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.journal.clock().now())
    }
}

#[async_trait]
impl Modules for SqliteRecords {
    async fn create_module(&self, slug: &ModuleSlug) -> Result<bool> {
        let (records, slug) = (self.clone(), slug.clone());
        let work = move || {
            let conn = records.0.write.lock().unwrap_or_else(PoisonError::into_inner);
            let now = records.0.journal.clock().now();
            immediate(&conn, "making a module", || rows::create_module(&conn, &slug, now))
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| Err(Error::unavailable("making a module", error)))
    }

    async fn modules(&self) -> Result<Vec<Module>> {
        answer(self.0.read.send(rows::modules)).await
    }

    async fn grants_sql(&self) -> Result<String> {
        Err(Error::Unsupported("SQLite has no roles: who can open the file can read it".into()))
    }
}
