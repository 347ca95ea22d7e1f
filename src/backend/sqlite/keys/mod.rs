//! Keys of writes in an SQLite file: durable, and shared by the processes of one machine.
//!
//! Leased requests go to the single writer thread, which runs all waiting requests in one transaction.
//! The file may be the user's own, and may hold a ledger and a journal too (all tables are named
//! `hapax_keys…`). Then [`SqliteKeys::begin_in`] and [`SqliteKeys::finish_in`] make the key, the
//! user's rows and the answer one transaction. The file must not be on a network file system:
//! SQLite's locks do not work there.

#[cfg(feature = "axum")]
mod open;
mod rows;
mod schema;

#[cfg(feature = "axum")]
pub(crate) use open::SqliteOpenKey;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::Connection;

use super::connect::{self, Access, begin, commit, must_be_durable, patiently, roll_back};
use super::journal::InTransaction;
use super::requests::{self, Kind, Work};
use super::{Threads, answer, reader};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::keyed::{
    Answer, Begin, Begun, Decided, Ended, IdempotencyKey, KeyEntry, KeyLease, KeyStatus, KeySweep, Keys,
    KeysCapabilities, KeysInfo, ListKeys, Resolution, SweptKeys, check_lease, decide,
};

/// The most requests in one transaction.
const GROUP_MAX: usize = 256;

/// What the file is called in messages.
const FILE: &str = "file of keys";

/// Keys in an SQLite file. Clones share its connections; dropping the last clone closes them.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// use hapax::backend::sqlite::SqliteKeys;
/// use hapax::keyed::{Answer, Begin, Begun, IdempotencyKey, Keys, RequestParts, RequestFingerprint};
/// use rusqlite::{Connection, TransactionBehavior};
/// # let dir = tempfile::tempdir().unwrap();
/// # let file = dir.path().join("orders.db");
/// let keys = SqliteKeys::open(&file).unwrap();
/// let mut conn = Connection::open(&file).unwrap();
/// conn.execute("CREATE TABLE orders (id INTEGER)", []).unwrap();
///
/// let fingerprint = RequestFingerprint::of(keys.secret(), &RequestParts { method: "POST", target: "/orders", ..Default::default() });
/// let request = Begin::new(None, IdempotencyKey::now_v7(), fingerprint);
/// let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
/// if let Begun::First(lease) = keys.begin_in(&tx, &request).unwrap() {
///     tx.execute("INSERT INTO orders VALUES (17)", []).unwrap();
///     keys.finish_in(&tx, &lease, &Answer::new(201, "order 17")).unwrap();
///     tx.commit().unwrap(); // the key, the row and the answer
/// }
/// assert!(matches!(keys.begin(&request).await.unwrap(), Begun::Done(_)));
/// # });
/// ```
#[derive(Clone)]
pub struct SqliteKeys(Arc<Inner>);

struct Inner {
    // The senders are dropped before `_threads`, so that the threads end before they are joined.
    write: requests::Requests<Rows>,
    read: reader::Questions,
    _threads: Threads,
    clock: Arc<dyn Clock>,
    path: PathBuf,
    secret: [u8; 32],
    /// Who has the file's only writer among the transactions of this process.
    #[cfg(feature = "axum")]
    writer: Arc<tokio::sync::Semaphore>,
}

impl fmt::Debug for SqliteKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteKeys").field("path", &self.0.path).finish_non_exhaustive()
    }
}

/// One transaction's view of the keys.
struct KeysTx<'c> {
    conn: &'c Connection,
    /// The time at which the transaction got the write lock.
    now: Time,
}

enum Rows {}

impl Kind for Rows {
    type Context<'c> = KeysTx<'c>;
}

struct Writer {
    conn: Connection,
    clock: Arc<dyn Clock>,
}

impl Writer {
    fn serve(&self, requests: &Receiver<Box<dyn Work<Rows>>>) {
        while let Ok(first) = requests.recv() {
            requests::handle(requests::group(first, requests, GROUP_MAX), |group| {
                patiently(|| self.once(group).inspect_err(|_| roll_back(&self.conn)))
            });
        }
    }

    fn once(&self, group: &mut [Box<dyn Work<Rows>>]) -> Result<()> {
        begin(&self.conn, "beginning a transaction of the keys")?;
        // Read the clock under the write lock, so that a later writer has a later time.
        let mut tx = KeysTx { conn: &self.conn, now: self.clock.now() };
        for work in group {
            work.run(&mut tx)?;
        }
        commit(&self.conn, "committing keys")
    }
}

impl SqliteKeys {
    /// Opens a file, creating it if it is missing; its directory must exist. Brings the keys' schema
    /// up to date; several processes may do so at once. Switches the file permanently to a write-ahead
    /// log. Blocks while another process changes the schema.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        SqliteKeys::open_with_clock(path, Arc::new(SystemClock))
    }

    /// Opens a file that holds keys with this build's schema. It never creates or migrates them.
    pub fn open_existing(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = connect::open_file(path, Access::Read, FILE)?;
        if patiently(|| schema::current(&found))?.is_none() {
            let path = path.display();
            return Err(Error::Schema(if schema::PART.is_there(&found)? {
                format!("the keys in {path} have an older schema, and migrate is `check`")
            } else {
                format!("there is no store of keys in {path} yet")
            }));
        }
        drop(found);
        SqliteKeys::open(path)
    }

    /// Opens a file, with a clock of your own. All processes that share a file must agree on the time.
    pub fn open_with_clock(path: impl AsRef<Path>, clock: Arc<dyn Clock>) -> Result<Self> {
        let path = path.as_ref();
        let conn = connect::open_file(path, Access::Write, FILE)?;
        patiently(|| schema::current(&conn))?; // refuses an unknown schema before anything is changed
        connect::make_durable(&conn)?;
        let secret = schema::migrate(&conn)?;
        let read = connect::open_file(path, Access::Write, FILE)?;
        let failed = |error| Error::unavailable("starting the threads of the keys", error);
        let (write, receive) = requests::Requests::new();
        let writer = Writer { conn, clock: Arc::clone(&clock) };
        let writing = std::thread::Builder::new()
            .name("hapax-keys-write".into())
            .spawn(move || writer.serve(&receive))
            .map_err(failed)?;
        let (read, reading) = reader::start(read).map_err(failed)?;
        Ok(SqliteKeys(Arc::new(Inner {
            write,
            read,
            _threads: Threads(vec![writing, reading]),
            clock,
            path: path.to_owned(),
            secret,
            #[cfg(feature = "axum")]
            writer: Arc::new(tokio::sync::Semaphore::new(1)),
        })))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Begins a request in the caller's transaction, on the caller's connection to the file. If it is
    /// `First`, do the work in the transaction, store the answer with
    /// [`finish_in`](SqliteKeys::finish_in), and commit: the key, the work and the answer are one.
    ///
    /// Begin the transaction with [`Immediate`](rusqlite::TransactionBehavior::Immediate) behaviour,
    /// and keep the rows in the same file; another file is refused ([`Error::Unsupported`]).
    pub fn begin_in(&self, tx: &impl InTransaction, request: &Begin) -> Result<Begun> {
        request.check()?;
        let conn = self.connection(tx)?;
        rows::begin(conn, request, self.0.clock.now(), false)
    }

    /// Stores the answer in the caller's transaction. `Fenced`: the transaction did not begin the
    /// request.
    pub fn finish_in(&self, tx: &impl InTransaction, of: &KeyLease, answer: &Answer) -> Result<()> {
        answer.check()?;
        let (conn, now) = (self.connection(tx)?, self.0.clock.now());
        rows::change(conn, of, || decide::gone(of), |row| row.finish(of, answer, now))?
    }

    /// The connection of a transaction, if it can commit keys with other rows.
    fn connection<'t>(&self, tx: &'t impl InTransaction) -> Result<&'t Connection> {
        let conn = tx.connection();
        if conn.is_autocommit() {
            return Err(Error::Unsupported(
                "the transaction is over already, so the key and the rows would not be committed as one; begin another"
                    .into(),
            ));
        }
        must_be_durable(conn)?;
        if schema::current(conn)? == Some(self.0.secret) {
            return Ok(conn);
        }
        Err(Error::Unsupported(format!(
            "this transaction's main database is not the file of the keys ({}), so the key and the rows would not be \
             committed as one; open that file, and keep the rows in it",
            self.0.path.display()
        )))
    }

    /// The answer that the reader's connection can give: a replay does not wait for the file's
    /// only writer.
    async fn peek(&self, request: &Begin) -> Result<Option<Begun>> {
        let (request, clock) = (request.clone(), Arc::clone(&self.0.clock));
        answer(self.0.read.send(move |conn| rows::peek(conn, &request, clock.now()))).await
    }

    async fn write<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut KeysTx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        answer(self.0.write.send(run)).await
    }
}

#[async_trait]
impl Keys for SqliteKeys {
    async fn begin(&self, request: &Begin) -> Result<Begun> {
        request.check()?;
        if let Some(known) = self.peek(request).await? {
            return Ok(known);
        }
        let request = request.clone();
        answer(self.0.write.send_if_awaited(move |tx| rows::begin(tx.conn, &request, tx.now, true))).await
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        check_lease(lease)?;
        let of = of.clone();
        self.write(move |tx| {
            let now = tx.now;
            rows::change(tx.conn, &of, || decide::gone(&of), |row| row.extend(&of, lease, now))
        })
        .await?
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        answer.check()?;
        let (of, answer) = (of.clone(), answer.clone());
        self.write(move |tx| {
            let now = tx.now;
            rows::change(tx.conn, &of, || decide::gone(&of), |row| row.finish(&of, &answer, now))
        })
        .await?
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        let of = of.clone();
        self.write(move |tx| {
            let (token, now) = (rows::draw(tx.conn)?, tx.now);
            rows::change(tx.conn, &of, || decide::gone(&of), |row| row.release(&of, ended, token, now))
        })
        .await?
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        let (tenant, key) = (tenant.map_or("", Tenant::as_str).to_owned(), key.clone());
        // Looked at before the row: what has ended by then is in the file.
        #[cfg(feature = "axum")]
        let is_open = open::is_open(&self.0.secret, &tenant, &key);
        #[cfg(not(feature = "axum"))]
        let is_open = false;
        let (of, name, now) = (tenant.clone(), key.clone(), self.0.clock.now());
        let status = answer(self.0.read.send(move |conn| rows::status(conn, &of, &name, now))).await?;
        match status {
            KeyStatus::Unknown | KeyStatus::Free if is_open => Ok(KeyStatus::Running { until: None }),
            // Another process may have begun it in a transaction that is open. Whoever has the write lock
            // knows that there is none.
            KeyStatus::Unknown | KeyStatus::Free => {
                self.write(move |tx| rows::status(tx.conn, &tenant, &key, tx.now)).await
            }
            known => Ok(known),
        }
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        let (tenant, key, now) = (tenant.cloned(), key.clone(), self.0.clock.now());
        answer(self.0.read.send(move |conn| rows::entry(conn, tenant, &key, now))).await
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        who.check()?;
        if let Resolution::Answer(answer) = how {
            answer.check()?;
        }
        let (of, how, who) = (of.clone(), how.clone(), who.clone());
        self.write(move |tx| {
            let (token, now) = (rows::draw(tx.conn)?, tx.now);
            let gone = || of.not_unknown("there is no such key");
            rows::change(tx.conn, &of, gone, |row| row.resolve(&of, &how, &who, token, now))
        })
        .await?
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        let (which, now) = (which.clone(), self.0.clock.now());
        answer(self.0.read.send(move |conn| rows::list(conn, &which, now))).await
    }

    async fn sweep(&self, settings: &KeySweep) -> Result<SweptKeys> {
        settings.check()?;
        if settings.dry_run {
            let (settings, now) = (settings.clone(), self.0.clock.now());
            return answer(self.0.read.send(move |conn| rows::would_forget(conn, &settings, now))).await;
        }
        let begun = settings.clone();
        let (mut swept, horizon) = self
            .write(move |tx| {
                let planned = rows::begin_sweep(tx.conn, &begun, tx.now)?;
                crate::crash_point!("keyed.sweep.commit");
                Ok(planned)
            })
            .await?;
        let Some(horizon) = horizon else { return Ok(swept) };
        loop {
            let batch = settings.clone();
            let forgotten = self.write(move |tx| {
                let gone = rows::forget(tx.conn, &batch, horizon)?;
                crate::crash_point!("keyed.sweep.commit");
                Ok(gone)
            });
            let gone = forgotten.await?;
            swept.keys += gone;
            settings.forgot(gone);
            if gone < settings.batch_max as u64 {
                return Ok(swept);
            }
        }
    }

    async fn info(&self) -> Result<KeysInfo> {
        let now = self.0.clock.now();
        answer(self.0.read.send(move |conn| rows::info(conn, now))).await
    }

    async fn probe(&self) -> Result<()> {
        self.write(|_| Ok(())).await // an empty transaction, which costs no flush
    }

    fn secret(&self) -> &[u8; 32] {
        &self.0.secret
    }

    fn capabilities(&self) -> KeysCapabilities {
        KeysCapabilities { backend: "sqlite", durable: true, shared: true, transactional: true }
    }
}
