//! Begins transactions so that a cancelled caller leaves none open.

use sqlx::{PgPool, PgTransaction, SqlSafeStr};

/// Begins a transaction in its own task.
///
/// sqlx rolls back a transaction that is dropped, but not one whose `BEGIN` was cancelled before
/// the server answered: the connection returns to the pool with the transaction open. The next
/// statement that runs there without a transaction of its own is acknowledged and never committed.
/// A task is not cancelled with its caller: it receives the answer and drops the transaction, which
/// rolls it back.
pub(super) async fn begin(pool: &PgPool, statement: impl SqlSafeStr) -> sqlx::Result<PgTransaction<'static>> {
    let (pool, statement) = (pool.clone(), statement.into_sql_str());
    match tokio::spawn(async move { pool.begin_with(statement).await }).await {
        Ok(begun) => begun,
        Err(gone) => Err(sqlx::Error::Io(std::io::Error::other(gone))),
    }
}
