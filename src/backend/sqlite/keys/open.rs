//! Transactions that the layer opens for its handlers. Each has a thread of its own, because its
//! statements block. The file has one writer, so a transaction has a time limit.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{Access, FILE, SqliteKeys, rows};
use crate::backend::sqlite::SqliteTransaction;
use crate::backend::sqlite::connect::{begin, commit, make_durable, open_file, patiently, roll_back, simple};
use crate::backend::sqlite::fault::Doing as _;
use crate::error::{Error, Result};
use crate::keyed::{Answer, Begin, Begun, IdempotencyKey, KeyLease};

type Job = Box<dyn FnOnce(&SqliteTransaction) + Send>;

enum Message {
    Run(Job),
    Commit { answer: Answer, undo: bool, done: oneshot::Sender<Result<()>> },
}

/// A request that runs in a transaction of its own. Dropping it rolls back.
pub(crate) struct SqliteOpenKey {
    jobs: Sender<Message>,
    limit: Arc<Limit>,
    pub(crate) lease: KeyLease,
}

/// When the statements of a transaction must end. SQLite asks it while a statement runs, so it also ends
/// one that begins too late: an interrupt would find no statement to end, and the next one would have the
/// file's only writer for as long as it likes.
#[derive(Debug)]
struct Limit {
    deadline: Instant,
    /// Nobody waits for the transaction any more.
    cancelled: AtomicBool,
    /// It is being committed, which is not interrupted.
    committing: AtomicBool,
}

/// After how many steps of its machine SQLite asks whether a statement may go on.
const STEPS: i32 = 1000;

impl Limit {
    fn is_over(&self) -> bool {
        let over = self.cancelled.load(Ordering::Acquire) || Instant::now() >= self.deadline;
        over && !self.committing.load(Ordering::Acquire)
    }
}

/// The keys that open transactions of this process have begun, of all its stores (a store is known by
/// its secret, however often its file is open). Nobody else can see their rows.
static OPEN: Mutex<BTreeSet<Name>> = Mutex::new(BTreeSet::new());

/// Store, tenant, key.
type Name = ([u8; 32], String, String);

fn open_keys() -> MutexGuard<'static, BTreeSet<Name>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a transaction of this process has begun the key, and has not ended.
pub(super) fn is_open(secret: &[u8; 32], tenant: &str, key: &IdempotencyKey) -> bool {
    open_keys().contains(&(*secret, tenant.to_owned(), key.as_str().to_owned()))
}

/// A key is open until this is dropped.
struct Opened(Name);

impl Opened {
    fn new(keys: &SqliteKeys, lease: &KeyLease) -> Self {
        let name = (keys.0.secret, lease.tenant_text().to_owned(), lease.key.as_str().to_owned());
        open_keys().insert(name.clone());
        Opened(name)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        open_keys().remove(&self.0);
    }
}

fn panicked() -> Error {
    Error::Refused {
        what: "the function that ran in the request's transaction panicked, and nothing of the transaction can be kept"
            .into(),
        source: None,
    }
}

fn too_late() -> Error {
    Error::Contended {
        what: "the request's transaction took longer than its limit and was rolled back: it holds the file's only \
               writer"
            .into(),
        source: None,
    }
}

impl SqliteKeys {
    /// Opens a transaction for a request and begins it there. It is rolled back unless it is committed
    /// within `begin.lease`.
    pub(crate) async fn open_key(&self, of: &Begin) -> Result<Result<SqliteOpenKey, Begun>> {
        of.check()?;
        if let Some(known) = self.peek(of).await? {
            return Ok(Err(known));
        }
        let deadline = Instant::now() + of.lease;
        // In turn within this process, without a thread that waits.
        let writer = Arc::clone(&self.0.writer).acquire_owned();
        let writer = tokio::time::timeout_at(deadline.into(), writer).await.map_err(|_| too_late())?;
        let writer = writer.map_err(|gone| Error::unavailable("waiting for the file's writer", gone))?;
        let limit = Arc::new(Limit {
            deadline,
            cancelled: AtomicBool::new(false),
            committing: AtomicBool::new(false),
        });
        let (keys, request, its_limit) = (self.clone(), of.clone(), Arc::clone(&limit));
        let (answer, begun) = oneshot::channel();
        let (jobs, receive) = channel();
        std::thread::Builder::new()
            .name("hapax-keys-request".into())
            .spawn(move || serve(&keys, &request, writer, &its_limit, &receive, answer))
            .map_err(|error| Error::unavailable("starting a thread for a request", error))?;
        match begun.await.map_err(|_| super::super::thread_gone())?? {
            Ok(lease) => Ok(Ok(SqliteOpenKey { jobs, limit, lease })),
            Err(other) => Ok(Err(other)),
        }
    }
}

type First = Result<Result<KeyLease, Begun>>;

/// The thread of one transaction.
fn serve(
    keys: &SqliteKeys,
    request: &Begin,
    writer: OwnedSemaphorePermit,
    limit: &Arc<Limit>,
    jobs: &Receiver<Message>,
    answer: oneshot::Sender<First>,
) {
    let begun = || -> Result<(SqliteTransaction, Begun)> {
        let mut conn = open_file(&keys.0.path, Access::Write, FILE)?;
        make_durable(&conn)?;
        patiently(|| begin(&conn, "beginning a request"))?;
        let begun = rows::begin(&conn, request, keys.0.clock.now(), false)?;
        simple(&conn, "SAVEPOINT hapax_keyed", "beginning a request")?;
        let asked = Arc::clone(limit);
        conn.progress_handler(STEPS, Some(move || asked.is_over())).doing("limiting a request")?;
        Ok((SqliteTransaction::guarded(conn)?, begun))
    };
    // Dropped after the transaction: whoever does not find the key open finds what it has committed.
    let opened;
    let (tx, lease) = match begun() {
        Ok((tx, Begun::First(lease))) => (tx, lease),
        // The connection is closed with its transaction, and rolls it back.
        Ok((_, other)) => return drop(answer.send(Ok(Err(other)))),
        Err(error) => return drop(answer.send(Err(error))),
    };
    opened = Opened::new(keys, &lease);
    if answer.send(Ok(Ok(lease.clone()))).is_err() {
        return;
    }
    loop {
        let message = jobs.recv_timeout(limit.deadline.saturating_duration_since(Instant::now()));
        // If the handler's time is over, nothing is committed.
        if Instant::now() >= limit.deadline {
            return roll_back(&tx);
        }
        match message {
            Ok(Message::Run(job)) => job(&tx),
            Ok(Message::Commit { answer, undo, done }) => {
                limit.committing.store(true, Ordering::Release);
                let ended = end(keys, &tx, &lease, &answer, undo);
                if ended.is_err() {
                    roll_back(&tx);
                }
                drop((tx, opened, writer)); // the next request may begin before this one is answered
                let _ = done.send(ended); // the caller may be gone
                return;
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return roll_back(&tx),
        }
    }
}

fn end(
    keys: &SqliteKeys,
    tx: &SqliteTransaction,
    lease: &KeyLease,
    answer: &Answer,
    undo: bool,
) -> Result<()> {
    if tx.is_autocommit() {
        return Err(Error::Refused {
            what: "SQLite ended the request's transaction before (a full disk, OR ROLLBACK, a COMMIT that was refused, a \
                   function that panicked), and nothing of it can be kept"
                .into(),
            source: None,
        });
    }
    if undo {
        simple(tx, "ROLLBACK TO hapax_keyed", "undoing a request's work")?;
    }
    keys.finish_in(tx, lease, answer)?;
    crate::crash_point!("keyed.commit.before");
    tx.let_commit();
    commit(tx, "committing a request")?;
    crate::crash_point!("keyed.commit.after");
    Ok(())
}

impl Drop for SqliteOpenKey {
    /// Whoever drops it waits for nothing: a statement that still runs is of a handler that was
    /// cancelled, and would keep the file's writer.
    fn drop(&mut self) {
        self.limit.cancelled.store(true, Ordering::Release);
    }
}

impl SqliteOpenKey {
    /// Runs a function in the transaction, on its thread. One that has not begun when its caller stops
    /// waiting does not begin.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&SqliteTransaction) -> T + Send + 'static,
    ) -> Result<T> {
        let (answer, done) = oneshot::channel();
        let job: Job = Box::new(move |tx| {
            if answer.is_closed() {
                return;
            }
            // A panic is an error of its own: as the end of this thread it would look like a lack of time,
            // and be tried again for ever.
            let worked = catch_unwind(AssertUnwindSafe(|| work(tx))).map_err(|_| {
                roll_back(tx); // what it has done is half of something
                panicked()
            });
            let _ = answer.send(worked); // the caller may be gone
        });
        self.jobs.send(Message::Run(job)).map_err(|_| too_late())?;
        match tokio::time::timeout_at(self.limit.deadline.into(), done).await {
            Ok(Ok(worked)) => worked,
            Ok(Err(_)) | Err(_) => Err(too_late()),
        }
    }

    /// Stores the answer and commits. With `undo` the request's work is undone first, and only the
    /// answer stays.
    pub(crate) async fn commit(self, answer: &Answer, undo: bool) -> Result<()> {
        let (done, ended) = oneshot::channel();
        let message = Message::Commit { answer: answer.clone(), undo, done };
        self.jobs.send(message).map_err(|_| too_late())?;
        ended.await.map_err(|_| too_late())?
    }
}
