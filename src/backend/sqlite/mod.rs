//! A ledger in an SQLite file: durable, and shared by the processes of one machine.
//!
//! A claim travels as follows. The caller's batch goes to the single writer thread, which runs all
//! waiting requests in one transaction (`BEGIN IMMEDIATE … COMMIT`, one flush to disk). A new id is
//! one INSERT; the shared engine decides everything else. Reads have their own thread and
//! connection. Each week has its own table, which a sweep drops whole.
//!
//! The file may be the user's own (all tables are named `hapax_…`). Then [`SqliteLedger::claim_in`]
//! makes claim and effect one transaction. The file must not be on a network file system: SQLite's
//! locks do not work there.

pub mod access;
pub mod analytics;
pub mod bus;
pub(crate) mod codec;
pub(crate) mod connect;
pub(crate) mod erase;
pub(crate) mod fault;
mod held;
pub mod journal;
pub mod keys;
mod ledger_tx;
mod part;
mod quick;
mod read;
pub(crate) mod reader;
pub mod records;
pub(crate) mod requests;
mod scan;
mod schema;
mod skips;
mod sweep;
mod transaction;
mod writer;

pub use access::SqliteAccess;
pub use analytics::SqliteReadModel;
pub use erase::SqliteEraser;
pub use journal::SqliteJournal;
pub use keys::SqliteKeys;
pub use read::readable_by_others;
pub use records::SqliteRecords;
pub use schema::schema_sql;
pub use transaction::SqliteTransaction;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;

use self::connect::Access;
use self::read::Listing;
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};
use crate::id::{EventId, Scope, Tenant, Topic};
use crate::ledger::{
    Audit, Capabilities, Claim, Claims, ConsumerStore, Cursor, CursorParts, Due, Entry, Epoch, Extend,
    Filter, Finding, HeldQuery, Identity, Intervene, Intervened, Logged, Marker, Operations, Outcome, Page,
    PreventedDays, PublishedDead, Settings, Settle, Settled, SkipBatch, Stat, SweepSettings, Swept, Week,
    extend_rows, intervene_rows, settle_rows,
};

/// A ledger in an SQLite file. Clones share its connections; dropping the last clone closes them.
#[derive(Clone)]
pub struct SqliteLedger(Arc<Inner>);

struct Inner {
    // The senders are dropped before `_threads`, so that the threads end before they are joined.
    write: writer::Requests,
    read: reader::Questions,
    _threads: Threads,
    clock: Arc<dyn Clock>,
    settings: Settings,
    path: PathBuf,
    access: Access,
    /// The id of the ledger in the file.
    id: String,
}

/// Joins the threads when dropped, so that the file is closed once the ledger is gone.
pub(crate) struct Threads(pub(crate) Vec<JoinHandle<()>>);

impl Drop for Threads {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            let _ = thread.join(); // the panic hook has reported a panic
        }
    }
}

impl fmt::Debug for SqliteLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteLedger").field("path", &self.0.path).finish_non_exhaustive()
    }
}

pub(crate) fn thread_gone() -> Error {
    // Not retryable: the thread never comes back.
    Error::Corrupt("the thread that serves the file has ended".into())
}

pub(crate) async fn answer<T>(receiver: oneshot::Receiver<Result<T>>) -> Result<T> {
    receiver.await.map_err(|_| thread_gone())?
}

/// Blocks the current thread until the answer arrives. Works inside and outside of a runtime.
fn wait<T>(receiver: oneshot::Receiver<Result<T>>) -> Result<T> {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut answer = pin!(answer(receiver));
    loop {
        if let Poll::Ready(result) = answer.as_mut().poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        std::thread::park();
    }
}

impl SqliteLedger {
    /// Opens a file, creating it if it is missing; its directory must exist. Brings the schema up
    /// to date; several processes may do so at once. Switches the file permanently to a write-ahead
    /// log.
    ///
    /// Blocks while another process changes the schema.
    pub fn open(path: impl AsRef<Path>, settings: Settings) -> Result<Self> {
        Self::open_with_clock(path, settings, Arc::new(SystemClock))
    }

    /// Opens a file that holds a ledger with this build's schema. It never creates or migrates one.
    pub fn open_existing(path: impl AsRef<Path>, settings: Settings) -> Result<Self> {
        let path = path.as_ref();
        let found = connect::open(path, Access::Read)?;
        if connect::patiently(|| schema::current(&found))?.is_none() {
            return Err(Error::Schema(format!(
                "there is no ledger in {}, or an older one, and migrate is `check`; run `hapax ledger init`",
                path.display()
            )));
        }
        drop(found);
        Self::open(path, settings)
    }

    /// Opens a file, with a clock of your own.
    pub fn open_with_clock(
        path: impl AsRef<Path>,
        settings: Settings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let write = connect::open(path, Access::Write)?;
        // A file without write permission is opened read-only.
        if write.is_readonly("main").unwrap_or(false) {
            drop(write);
            return Self::look_at(path, settings, clock);
        }
        // Refuse an unknown schema before anything is changed.
        let meta = connect::patiently(|| schema::Meta::read(&write))?;
        if let Some(meta) = meta {
            meta.must_accept_us()?;
            meta.must_follow(settings.identity)?;
        }
        connect::make_durable(&write)?;
        let meta = schema::migrate(&write, settings.identity)?;
        meta.must_follow(settings.identity)?; // another process may have created it meanwhile
        Self::start(path, write, Access::Write, meta.ledger, settings, clock)
    }

    /// Opens a file read-only: anything that would write returns [`Error::Refused`].
    pub fn open_read_only(path: impl AsRef<Path>, settings: Settings) -> Result<Self> {
        Self::look_at(path.as_ref(), settings, Arc::new(SystemClock))
    }

    fn look_at(path: &Path, settings: Settings, clock: Arc<dyn Clock>) -> Result<Self> {
        let write = connect::open(path, Access::Read)?;
        let meta = schema::must_be_current(&write)?;
        meta.must_follow(settings.identity)?;
        Self::start(path, write, Access::Read, meta.ledger, settings, clock)
    }

    fn start(
        path: &Path,
        write: rusqlite::Connection,
        access: Access,
        id: String,
        settings: Settings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let read = connect::open(path, access)?;
        let failed = |error| Error::unavailable("starting the ledger's threads", error);
        let (write, writing) =
            requests::start(writer::Writer::new(write, Arc::clone(&clock))).map_err(failed)?;
        let (read, reading) = reader::start(read).map_err(failed)?;
        let threads = Threads(vec![writing, reading]);
        let path = path.to_owned();
        Ok(SqliteLedger(Arc::new(Inner {
            write,
            read,
            _threads: threads,
            clock,
            settings,
            path,
            access,
            id,
        })))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }
}

#[async_trait]
impl Claims for SqliteLedger {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let (claims, settings) = (claims.to_vec(), self.0.settings.clone());
        answer(self.0.write.send(move |ledger_tx| quick::claim(ledger_tx, &claims, &settings))).await
    }

    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        let (settles, settings) = (settles.to_vec(), self.0.settings.clone());
        answer(self.0.write.send(move |ledger_tx| settle_rows(ledger_tx, &settles, &settings))).await
    }

    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        let extends = extends.to_vec();
        let answers = answer(self.0.write.send(move |ledger_tx| extend_rows(ledger_tx, &extends))).await?;
        Ok(answers.into_iter().map(Ok).collect())
    }

    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        let week = Week::route(self.0.settings.identity, &identity.id, time)?;
        let identity = identity.clone();
        answer(self.0.read.send(move |conn| read::get(conn, &identity, week))).await
    }

    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let identities = identities.to_vec();
        answer(self.0.read.send(move |conn| read::known(conn, &identities))).await
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.clock.now())
    }

    async fn probe(&self) -> Result<()> {
        answer(self.0.write.send(|_| Ok(()))).await // an empty transaction, which costs no flush
    }

    async fn epoch(&self) -> Result<Epoch> {
        let path = self.0.path.clone();
        answer(self.0.read.send(move |conn| read::epoch(conn, &path))).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { backend: "sqlite", durable: true, shared: true, transactional: true, skips: true }
    }

    fn settings(&self) -> &Settings {
        &self.0.settings
    }
}

#[async_trait]
impl ConsumerStore for SqliteLedger {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        let (scope, query, now) = (scope.clone(), query.clone(), self.0.clock.now());
        answer(self.0.read.send(move |conn| held::due(conn, &scope, &query, limit, now))).await
    }

    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        let (scope, query) = (scope.clone(), query.clone());
        let free = reserve.map(|_| self.0.clock.now());
        let look = self.0.read.send(move |conn| held::unpublished_dead(conn, &scope, &query, limit, free));
        let dead = answer(look).await?;
        match reserve {
            Some(reserve) if !dead.is_empty() => {
                answer(self.0.write.send(move |ledger_tx| held::reserve(ledger_tx, &dead, reserve))).await
            }
            _ => Ok(dead),
        }
    }

    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        let entries = entries.to_vec();
        answer(self.0.write.send(move |ledger_tx| held::mark_dead_published(ledger_tx, &entries))).await
    }

    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        let (scope, markers) = (scope.clone(), markers.to_vec());
        let now = self.0.clock.now();
        answer(self.0.write.send(move |ledger_tx| held::set_markers(ledger_tx.conn, &scope, &markers, now)))
            .await
    }

    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        let (scope, topic, partitions) = (scope.clone(), topic.clone(), partitions.to_vec());
        answer(self.0.read.send(move |conn| held::markers(conn, &scope, &topic, &partitions))).await
    }
}

#[async_trait]
impl Operations for SqliteLedger {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = after.map(|cursor| CursorParts::decode(&cursor.0)).transpose()?;
        let listing = Listing { filter: filter.clone(), after, limit, now: self.0.clock.now() };
        answer(self.0.read.send(move |conn| listing.page(conn))).await
    }

    async fn stat(&self) -> Result<Stat> {
        let now = self.0.clock.now();
        answer(self.0.read.send(move |conn| read::stat(conn, now))).await
    }

    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        answer(self.0.read.send(|conn| Ok(read::Scopes::read(conn)?.names()))).await
    }

    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        let (intervene, settings) = (intervene.clone(), self.0.settings.clone());
        let dry_run = intervene.dry_run;
        let run =
            move |ledger_tx: &mut ledger_tx::LedgerTx<'_>| intervene_rows(ledger_tx, &intervene, &settings);
        if dry_run {
            answer(self.0.write.send(move |ledger_tx| ledger_tx.undone(|ledger_tx| run(ledger_tx)))).await
        } else {
            answer(self.0.write.send(run)).await
        }
    }

    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        answer(self.0.read.send(move |conn| read::audit(conn, None, limit))).await
    }

    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        let names = entries.iter().map(Audit::name).collect::<Vec<_>>();
        answer(self.0.read.send(move |conn| read::audit(conn, Some(&names), limit))).await
    }

    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        let swept = sweep::sweep(self, settings).await?;
        if !settings.dry_run {
            let now = self.0.clock.now();
            answer(self.0.write.send(move |ledger_tx| skips::sweep(ledger_tx.conn, now))).await?;
        }
        Ok(swept)
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        match self.0.access {
            Access::Write => answer(self.0.write.send(|ledger_tx| read::check(ledger_tx.conn))).await,
            Access::Read => answer(self.0.read.send(read::check)).await,
        }
    }

    async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
        let (batch, now) = (batch.clone(), self.0.clock.now());
        answer(self.0.write.send(move |ledger_tx| skips::note(ledger_tx.conn, &batch, now))).await
    }

    async fn skips(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
        let (tenant, ids) = (tenant.cloned(), ids.to_vec());
        answer(self.0.read.send(move |conn| skips::of(conn, tenant.as_ref(), &ids))).await
    }

    async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
        answer(self.0.read.send(move |conn| skips::prevented(conn, since_day))).await
    }
}
