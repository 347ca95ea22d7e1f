//! API tokens and audit rows in an SQLite file: durable, and shared by the processes of one machine.
//!
//! The file may be that of the keys, the journal or the ledger, or the user's own: all tables are named
//! `hapax_access…`. A token's change and its audit row are one transaction of the writer thread. It must
//! not be on a network file system: SQLite's locks do not work there.

mod rows;
mod schema;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::Connection;

use super::connect::{self, begin, commit, patiently};
use super::requests::{self, Kind};
use super::{Threads, answer, reader};
use crate::access::decide::{self, Change, Found};
use crate::access::{
    Access, Actor, ApiToken, AuditEntry, AuditNote, AuditSweep, Authentication, ListAudit, ListTokens,
    NewToken, Rotation, SweptAudit, TokenEntry, TokenId,
};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};

/// What the file is called in messages.
const FILE: &str = "file of API tokens";

/// A store of API tokens in an SQLite file. Clones share its connections; dropping the last clone
/// closes them.
#[derive(Clone)]
pub struct SqliteAccess(Arc<Inner>);

struct Inner {
    // The senders are dropped before `_threads`, so that the threads end before they are joined.
    write: requests::Requests<Writer>,
    read: reader::Questions,
    _threads: Threads,
    clock: Arc<dyn Clock>,
    path: PathBuf,
}

impl fmt::Debug for SqliteAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteAccess").field("path", &self.0.path).finish_non_exhaustive()
    }
}

struct Writer {
    conn: Connection,
    clock: Arc<dyn Clock>,
}

/// One transaction's view of the file.
struct AccessTx<'c> {
    conn: &'c Connection,
    /// The time at which the transaction got the write lock.
    now: Time,
}

impl Kind for Writer {
    type Context<'c> = AccessTx<'c>;
}

impl requests::Writer for Writer {
    const THREAD: &'static str = "hapax-access-write";
    const GROUP_MAX: usize = 64;

    fn conn(&self) -> &Connection {
        &self.conn
    }

    fn transact(&mut self, mut run: impl FnMut(&mut AccessTx<'_>) -> Result<()>) -> Result<()> {
        begin(&self.conn, "beginning a transaction of the API tokens")?;
        // Read the clock under the write lock, so that a later writer has a later time.
        run(&mut AccessTx { conn: &self.conn, now: self.clock.now() })?;
        crate::crash_point!("access.commit");
        commit(&self.conn, "committing API tokens")
    }
}

impl SqliteAccess {
    /// Opens a file, creating it if it is missing; its directory must exist. Brings the schema up to
    /// date; several processes may do so at once. Switches the file permanently to a write-ahead log.
    /// Blocks while another process changes the schema.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        SqliteAccess::open_with_clock(path, Arc::new(SystemClock))
    }

    /// Opens a file that holds API tokens with this build's schema. It never creates or migrates them.
    pub fn open_existing(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = connect::open_file(path, connect::Access::Read, FILE)?;
        if !patiently(|| schema::PART.is_current(&found))? {
            return Err(Error::Schema(format!(
                "there is no API token in {} yet; `hapax token create --name NAME` makes one",
                path.display()
            )));
        }
        drop(found);
        SqliteAccess::open(path)
    }

    /// Opens a file, with a clock of your own. All processes that share a file must agree on the time.
    pub fn open_with_clock(path: impl AsRef<Path>, clock: Arc<dyn Clock>) -> Result<Self> {
        let path = path.as_ref();
        let conn = connect::open_file(path, connect::Access::Write, FILE)?;
        patiently(|| schema::PART.is_current(&conn))?; // refuses an unknown schema before anything is changed
        connect::make_durable(&conn)?;
        schema::PART.migrate(&conn, &[], || Ok(()))?;
        let read = connect::open_file(path, connect::Access::Write, FILE)?;
        let failed = |error| Error::unavailable("starting the threads of the API tokens", error);
        let (write, writing) = requests::start(Writer { conn, clock: Arc::clone(&clock) }).map_err(failed)?;
        let (read, reading) = reader::start(read).map_err(failed)?;
        let threads = Threads(vec![writing, reading]);
        Ok(SqliteAccess(Arc::new(Inner { write, read, _threads: threads, clock, path: path.to_owned() })))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    async fn write<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut AccessTx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        answer(self.0.write.send(run)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Connection, Time) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let clock = Arc::clone(&self.0.clock);
        answer(self.0.read.send(move |conn| ask(conn, clock.now()))).await
    }

    async fn change(
        &self,
        id: &TokenId,
        maker: Option<TokenId>,
        by: &Actor,
        decide: impl Fn(Found<'_>, Time) -> Result<Change> + Send + 'static,
    ) -> Result<TokenEntry> {
        let (id, by) = (id.clone(), by.clone());
        self.write(move |tx| rows::change(tx.conn, &id, maker.as_ref(), &by, tx.now, &decide)).await?
    }
}

#[async_trait]
impl Access for SqliteAccess {
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        about.check()?;
        let (token, about) = (token.clone(), about.clone());
        let maker = about.made_by.clone();
        self.change(&token.id().clone(), maker, by, move |found, now| {
            decide::create(found, &token, &about, now)
        })
        .await
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        how.check()?;
        let (token, how) = (token.clone(), *how);
        self.change(&token.id().clone(), None, by, move |found, now| decide::rotate(found, &token, &how, now))
            .await
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        let of = id.clone();
        self.change(id, None, by, move |found, now| decide::revoke(found, &of, now)).await
    }

    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        let Ok(token) = ApiToken::parse(text) else { return Ok(Authentication::Malformed) };
        let id = token.id().clone();
        let (said, noted) = self
            .read(move |conn, now| {
                let row = rows::find(conn, token.id())?;
                let noted = row.as_ref().is_some_and(|row| row.is_use_noted(now));
                Ok((decide::authenticate(row.as_ref(), &token, now), noted))
            })
            .await?;
        if matches!(said, Authentication::Granted { .. }) && !noted {
            // Nobody waits for it, and a file that cannot be written to still authenticates.
            drop(self.0.write.send(move |tx| rows::note_use(tx.conn, &id, tx.now)));
        }
        Ok(said)
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        let id = id.clone();
        self.read(move |conn, now| Ok(rows::find(conn, &id)?.map(|row| row.entry(now)))).await
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        let which = which.clone();
        self.read(move |conn, now| rows::list(conn, &which, now)).await
    }

    async fn has_tokens(&self) -> Result<bool> {
        self.read(|conn, _| rows::has_tokens(conn)).await
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        let note = note.clone();
        self.write(move |tx| rows::add(tx.conn, &note, tx.now)).await
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        let which = which.clone();
        self.read(move |conn, _| rows::audit(conn, &which)).await
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        settings.check()?;
        let (begun, batch_max) = (settings.clone(), settings.batch_max);
        let (mut swept, horizon) = self.write(move |tx| rows::begin_sweep(tx.conn, &begun, tx.now)).await?;
        let Some(horizon) = horizon else { return Ok(swept) };
        loop {
            let gone = self.write(move |tx| rows::forget(tx.conn, horizon, batch_max)).await?;
            swept.rows += gone;
            if gone < batch_max as u64 {
                return Ok(swept);
            }
        }
    }

    fn backend(&self) -> &'static str {
        "sqlite"
    }
}
