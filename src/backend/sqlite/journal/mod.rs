//! A journal in an SQLite file: durable, and shared by the processes of one machine.
//!
//! Appends go to the single writer thread, which runs all waiting appends in one transaction and
//! answers them once it is flushed to disk. SQLite has one writer at a time, so positions become
//! visible in order and without holes. An append wakes waiters in its own process at once; for
//! appends of other processes they poll, backing off to 20 times a second.
//!
//! The file may be the user's own, and may hold a ledger too (all tables are named
//! `hapax_journal_…`). Then [`SqliteJournal::append_in`] makes business rows and events one
//! transaction: the transactional outbox. The file must not be on a network file system: SQLite's
//! locks do not work there.

mod append;
mod codec;
mod relay;
mod schema;
mod transaction;
mod writer;

pub(super) use append::{aggregate_number, tenant_number};
pub use schema::schema_sql;
pub use transaction::InTransaction;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;

use super::connect::{self, Access};
use super::{Threads, answer, reader, requests};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::journal::{
    Append, Appended, Checkpoint, Filling, Journal, JournalCapabilities, JournalSettings, JournalStat,
    JournalSweep, Leadership, Page, Position, ReadBatch, RelayState, RelayStore, Stored,
};
use crate::ledger::Token;

/// The pause between two looks for appends of other processes. It starts at the minimum and doubles
/// up to the maximum while there are none.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// What the file is called in messages.
const FILE: &str = "journal";

/// A journal in an SQLite file. Clones share its connections; dropping the last clone closes them.
#[derive(Clone)]
pub struct SqliteJournal(Arc<Inner>);

struct Inner {
    // The senders are dropped before `_threads`, so that the threads end before they are joined.
    write: writer::Requests,
    read: reader::Questions,
    _threads: Threads,
    clock: Arc<dyn Clock>,
    settings: JournalSettings,
    path: PathBuf,
    id: Arc<str>,
    /// The last position that this process committed, to wake waiters.
    last: watch::Sender<u64>,
}

impl fmt::Debug for SqliteJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteJournal").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl SqliteJournal {
    /// Opens a file, creating it if it is missing; its directory must exist. Brings the journal's
    /// schema up to date; several processes may do so at once. Switches the file permanently to a
    /// write-ahead log. A file without write permission is opened read-only: anything that would
    /// write returns [`Error::Refused`].
    ///
    /// Blocks while another process changes the schema.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// use hapax::backend::sqlite::SqliteJournal;
    /// use hapax::journal::{Append, Expected, Journal, JournalSettings};
    /// use hapax::{Aggregate, Event, EventId};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let file = dir.path().join("orders.db");
    /// let journal = SqliteJournal::open(&file, JournalSettings::default()).unwrap();
    /// let event = Event::new(EventId::new("order-17-paid").unwrap()).payload("7 EUR");
    /// let append = Append::new(Aggregate::new("order-17").unwrap(), Expected::New, [event]);
    /// assert_eq!(journal.append(&append).await.unwrap().last_seq(), 1);
    /// assert!(journal.append(&append).await.unwrap().is_repeat());
    /// # });
    /// ```
    pub fn open(path: impl AsRef<Path>, settings: JournalSettings) -> Result<Self> {
        Self::open_with_clock(path, settings, Arc::new(SystemClock))
    }

    /// Opens a file that holds a journal with this build's schema. It never creates or migrates
    /// one.
    pub fn open_existing(path: impl AsRef<Path>, settings: JournalSettings) -> Result<Self> {
        let path = path.as_ref();
        let found = connect::open_file(path, Access::Read, FILE)?;
        if connect::patiently(|| schema::current(&found))?.is_none() {
            return Err(Error::Schema(format!(
                "there is no journal in {}, or an older one, and migrate is `check`; open it once with `auto`",
                path.display()
            )));
        }
        drop(found);
        Self::open(path, settings)
    }

    /// Opens a file, with a clock of your own. All processes that share a file must agree on the
    /// time.
    pub fn open_with_clock(
        path: impl AsRef<Path>,
        settings: JournalSettings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let write = connect::open_file(path, Access::Write, FILE)?;
        // Refuse an unknown schema before anything is changed.
        let found = connect::patiently(|| schema::current(&write))?;
        let (id, access) = if write.is_readonly("main").unwrap_or(false) {
            let none =
                || Error::Schema("the file has no journal, or an older one, and cannot be written to".into());
            (found.ok_or_else(none)?, Access::Read)
        } else {
            connect::make_durable(&write)?;
            (schema::migrate(&write)?, Access::Write)
        };
        let read = connect::open_file(path, access, FILE)?;
        let last = watch::Sender::new(0);
        let failed = |error| Error::unavailable("starting the journal's threads", error);
        let id: Arc<str> = id.into();
        let writer = writer::Writer {
            conn: write,
            clock: Arc::clone(&clock),
            committed: last.clone(),
            journal: Arc::clone(&id),
        };
        let (write, writing) = requests::start(writer).map_err(failed)?;
        let (read, reading) = reader::start(read).map_err(failed)?;
        let threads = Threads(vec![writing, reading]);
        let path = path.to_owned();
        Ok(SqliteJournal(Arc::new(Inner { write, read, _threads: threads, clock, settings, path, id, last })))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether events come after a position, and the version of the file that was read. Does not
    /// look for events if the version is the one `seen` before.
    async fn look(&self, after: u64, seen: Option<i64>) -> Result<(bool, i64)> {
        let look = move |conn: &rusqlite::Connection| {
            let version = codec::version(conn)?;
            let more = seen != Some(version) && codec::last(conn)? > after;
            Ok((more, version))
        };
        answer(self.0.read.send(look)).await
    }
}

#[async_trait]
impl Journal for SqliteJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        let (append, settings) = (append.clone(), self.0.settings.clone());
        answer(self.0.write.send(move |tx| tx.append(&append, &settings))).await?
    }

    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        let (appends, settings) = (appends.to_vec(), self.0.settings.clone());
        answer(self.0.write.send(move |tx| appends.iter().map(|a| tx.append(a, &settings)).collect())).await
    }

    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        let (tenant, aggregate) = (tenant.cloned(), aggregate.clone());
        let page = Filling::new(limit, self.0.settings.page_bytes_max);
        let read = move |conn: &rusqlite::Connection| {
            codec::read_aggregate(conn, tenant.as_ref(), &aggregate, from, page)
        };
        answer(self.0.read.send(read)).await
    }

    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        let after = after.clone();
        let page = Filling::new(limit, self.0.settings.page_bytes_max);
        answer(self.0.read.send(move |conn| codec::read(conn, &after, page))).await
    }

    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        let (tenant, id) = (tenant.cloned(), id.clone());
        answer(self.0.read.send(move |conn| codec::find(conn, tenant.as_ref(), &id))).await
    }

    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
        let (tenant, aggregate) = (tenant.cloned(), aggregate.clone());
        answer(self.0.read.send(move |conn| codec::head(conn, tenant.as_ref(), &aggregate))).await
    }

    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        let started = Instant::now();
        let mut here = self.0.last.subscribe();
        let (mut seen, mut pause) = (None, PAUSE_MIN);
        loop {
            if *here.borrow_and_update() > after.number() {
                return Ok(());
            }
            let (more, version) = self.look(after.number(), seen).await?;
            let left = at_most.saturating_sub(started.elapsed());
            if more || left.is_zero() {
                return Ok(());
            }
            seen = Some(version);
            if let Ok(Err(_)) = tokio::time::timeout(pause.min(left), here.changed()).await {
                return Err(super::thread_gone());
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        let settings = settings.clone();
        if settings.dry_run {
            let now = self.0.clock.now();
            return answer(self.0.read.send(move |conn| relay::sweep(conn, &settings, now))).await;
        }
        answer(self.0.write.send(move |tx| relay::sweep(tx.conn, &settings, tx.now))).await
    }

    async fn stat(&self) -> Result<JournalStat> {
        answer(self.0.read.send(codec::stat)).await
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.clock.now())
    }

    async fn horizon(&self) -> Result<(Time, Position)> {
        let now = self.0.clock.now(); // before the position: see the contract
        // A read transaction that begins now sees every commit that was acknowledged before.
        let last = answer(self.0.read.send(codec::last)).await?;
        Ok((now, Position::of(last)))
    }

    async fn probe(&self) -> Result<()> {
        answer(self.0.write.send(|_| Ok(()))).await // an empty transaction, which costs no flush
    }

    fn id(&self) -> &str {
        &self.0.id
    }

    fn capabilities(&self) -> JournalCapabilities {
        JournalCapabilities { backend: "sqlite", durable: true, shared: true, timed: false }
    }
}

#[async_trait]
impl RelayStore for SqliteJournal {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        let (id, relay, owner) = (Arc::clone(&self.0.id), relay.clone(), owner.clone());
        let acquire = move |tx: &mut writer::JournalTx<'_>| {
            relay::acquire_leadership(tx.conn, &id, &relay, &owner, lease, tx.now)
        };
        answer(self.0.write.send(acquire)).await?
    }

    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        let relay = relay.clone();
        let keep = move |tx: &mut writer::JournalTx<'_>| {
            relay::keep(tx.conn, &relay, token, Some(tx.now.plus(lease)))
        };
        answer(self.0.write.send(keep)).await?
    }

    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.must_be_of(&self.0.id)?;
        let (relay, checkpoint) = (relay.clone(), checkpoint.clone());
        let save =
            move |tx: &mut writer::JournalTx<'_>| relay::save(tx.conn, &relay, token, &checkpoint, tx.now);
        answer(self.0.write.send(save)).await?
    }

    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        let relay = relay.clone();
        answer(self.0.write.send(move |tx| relay::keep(tx.conn, &relay, token, None))).await?
    }

    async fn relays(&self) -> Result<Vec<RelayState>> {
        answer(self.0.read.send(relay::relays)).await
    }

    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        to.must_be_of(&self.0.id)?;
        let (relay, to) = (relay.clone(), to.clone());
        answer(self.0.write.send(move |tx| relay::rewind(tx.conn, &relay, &to, if_token, tx.now))).await?
    }

    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        let relay = relay.clone();
        answer(self.0.write.send(move |tx| relay::forget(tx.conn, &relay, tx.now))).await?
    }

    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        let after = after.number();
        answer(self.0.read.send(move |conn| codec::count_after(conn, after, limit))).await
    }
}
