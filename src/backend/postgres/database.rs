//! The server, as ledger and journal see it: a pool of connections, perhaps with a transaction
//! pooler in front. Runs single statements and begins transactions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::{Query, QueryAs};
use sqlx::{Connection as _, FromRow, PgPool, Postgres, SqlSafeStr};

use super::error::shows_pooler;
use super::{PgTx, Pooling, verify};
use crate::error::Result;

/// A statement whose answer has rows of `T`.
pub(super) type Select<'q, T> = QueryAs<'q, Postgres, T, PgArguments>;

/// What an answer's rows can be decoded into.
pub(super) trait Decoded: Send + Unpin + for<'r> FromRow<'r, PgRow> {}

impl<T: Send + Unpin + for<'r> FromRow<'r, PgRow>> Decoded for T {}

/// Begins a transaction of hapax's own. Names in it resolve to PostgreSQL's built-ins, not to
/// objects that someone put into a schema of the session's search path. Functions that run in a
/// caller's transaction set their own search path.
pub(in crate::backend) const BEGIN: &str = "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp";

/// The same, and the server ends the transaction if its client stalls in it.
pub(super) const BEGIN_BRIEFLY: &str = "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL idle_in_transaction_session_timeout = 5000";

/// Begins a transaction in its own task.
///
/// sqlx rolls back a transaction that is dropped, but not one whose `BEGIN` was cancelled before
/// the server answered: the connection returns to the pool with the transaction open. The next
/// statement that runs there without a transaction of its own is acknowledged and never committed.
/// A task is not cancelled with its caller: it receives the answer and drops the transaction, which
/// rolls it back.
pub(super) async fn begin(pool: &PgPool, statement: impl SqlSafeStr) -> sqlx::Result<PgTx> {
    let (pool, statement) = (pool.clone(), statement.into_sql_str());
    match tokio::spawn(async move { pool.begin_with(statement).await }).await {
        Ok(begun) => begun,
        Err(gone) => Err(sqlx::Error::Io(std::io::Error::other(gone))),
    }
}

/// The same, on a connection that has answered just before, `within` some time.
///
/// A `BEGIN` cannot be given up (see [`begin`]), so one that gets no answer keeps its place in the pool
/// until the network gives up. A question before it can: a connection that went silent is closed.
pub(super) async fn begin_answered(
    pool: &PgPool,
    statement: impl SqlSafeStr,
    within: Duration,
) -> sqlx::Result<PgTx> {
    let statement = statement.into_sql_str();
    let mut asked = Asked(Some(pool.acquire().await?));
    if let Some(connection) = &mut asked.0 {
        let silent = |_| sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer"));
        tokio::time::timeout(within, connection.ping()).await.map_err(silent)??;
    }
    let Some(connection) = asked.0.take() else { return Err(sqlx::Error::PoolClosed) };
    match tokio::spawn(sqlx::Transaction::begin(connection, Some(statement))).await {
        Ok(begun) => begun,
        Err(gone) => Err(sqlx::Error::Io(std::io::Error::other(gone))),
    }
}

/// A connection that was asked something. It is closed if its answer was not waited for, or was an error.
struct Asked(Option<sqlx::pool::PoolConnection<Postgres>>);

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.0 {
            connection.close_on_drop();
        }
    }
}

#[derive(Debug)]
pub(super) struct Database {
    pool: PgPool,
    /// Whether every statement must run inside a transaction and must not be kept prepared.
    pooled: AtomicBool,
    /// Whether the role's search path names PostgreSQL's own schema after another one, which then hides its names.
    hides_built_ins: bool,
}

impl Database {
    pub(super) async fn new(pool: PgPool, pooling: Pooling) -> Result<Self> {
        let pooled = match pooling {
            Pooling::Session => false,
            Pooling::Transaction => true,
            Pooling::Detect => verify::is_pooled(&pool).await?,
        };
        let hides_built_ins = !pooled && verify::hides_built_ins(&pool).await?;
        Ok(Database { pool, pooled: AtomicBool::new(pooled), hides_built_ins })
    }

    pub(super) fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub(super) fn pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed)
    }

    /// Whether a statement of hapax's own must run inside a transaction, which pins the search path.
    pub(super) fn needs_transaction(&self) -> bool {
        self.pooled() || self.hides_built_ins
    }

    /// Notes what an error says of a pooler that was not detected at start-up.
    pub(super) fn note_pooler(&self, error: &sqlx::Error) {
        if shows_pooler(error) && !self.pooled.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "hapax", "a transaction pooler is in front of PostgreSQL: statements are no longer kept");
        }
    }

    /// Runs one statement on its own.
    ///
    /// A client that stalls between two statements of a transaction keeps its locks, and no other
    /// could take over. So one statement is its own transaction. Where a pooler or the search path
    /// needs an explicit one, the server ends it if it is idle for too long.
    pub(super) async fn fetch_all<T: Decoded>(&self, query: Select<'_, T>) -> sqlx::Result<Vec<T>> {
        if !self.needs_transaction() {
            return query.fetch_all(&self.pool).await.inspect_err(|error| self.note_pooler(error));
        }
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await?;
        let rows = query.persistent(!self.pooled()).fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// Runs one statement on its own and returns how many rows it changed.
    pub(super) async fn execute(&self, query: Query<'_, Postgres, PgArguments>) -> sqlx::Result<u64> {
        if !self.needs_transaction() {
            let done = query.execute(&self.pool).await.inspect_err(|error| self.note_pooler(error))?;
            return Ok(done.rows_affected());
        }
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await?;
        let done = query.persistent(!self.pooled()).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(done.rows_affected())
    }

    /// Closes the connections that nobody uses. A server that went away has closed all of them, and
    /// each would fail one statement.
    pub(super) fn close_idle(&self) {
        while let Some(connection) = self.pool.try_acquire() {
            drop(connection.detach());
        }
    }
}
