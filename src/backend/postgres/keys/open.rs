//! Transactions that the layer opens for its handlers.

use std::fmt::Write as _;

use sqlx::{AssertSqlSafe, Executor as _};

use super::transaction::begin_in;
use super::{PgKeys, fail};
use crate::backend::postgres::PgTx;
use crate::backend::postgres::database::begin;
use crate::backend::postgres::error::is_refusal;
use crate::error::Result;
use crate::keyed::{Answer, Begin, Begun, KeyLease};

/// How long a request waits for an open transaction that holds its key: hardly, since it would keep a
/// connection meanwhile. The layer asks again later.
const BRIEFLY: &str = "5ms";

impl PgKeys {
    /// Opens a transaction for a request and begins it there. The server ends the transaction if its
    /// client stalls in it for its lease.
    pub(crate) async fn open(&self, of: &Begin) -> Result<Result<PgOpenKey, Begun>> {
        of.check()?;
        let ms = of.lease.as_millis().clamp(1, i32::MAX as u128); // 0 would mean no limit
        let mut statement = format!("BEGIN; SET LOCAL idle_in_transaction_session_timeout = {ms}");
        if self.0.limits {
            let _ = write!(statement, "; SET LOCAL transaction_timeout = {ms}"); // cannot fail
        }
        let opened = begin(&self.0.pool, AssertSqlSafe(statement)).await;
        let mut tx = opened.map_err(|e| fail("opening a transaction for a request", e))?;
        match begin_in(&self.0, &mut tx, of, BRIEFLY).await? {
            Begun::First(lease) => {
                tx.execute("SAVEPOINT hapax_keyed").await.map_err(|e| fail("beginning a request", e))?;
                Ok(Ok(PgOpenKey { tx, lease, keys: self.clone(), begin: of.clone() }))
            }
            other => {
                tx.rollback().await.map_err(|e| fail("beginning a request", e))?;
                Ok(Err(other))
            }
        }
    }
}

/// A request that runs in a transaction of its own.
#[derive(Debug)]
pub(crate) struct PgOpenKey {
    /// The transaction, for the request's work.
    pub(crate) tx: PgTx,
    /// What the key was begun under.
    pub(crate) lease: KeyLease,
    keys: PgKeys,
    begin: Begin,
}

impl PgOpenKey {
    /// Stores the answer and commits. With `undo` the request's work is undone first, and only the
    /// answer stays. If the acknowledgement of the COMMIT is lost, the server is asked what became of
    /// it; false if nothing was committed.
    pub(crate) async fn commit(mut self, answer: &Answer, undo: bool) -> Result<bool> {
        if undo {
            let undone = self.tx.execute("ROLLBACK TO SAVEPOINT hapax_keyed").await;
            undone.map_err(|e| fail("undoing a request's work", e))?;
        }
        self.keys.finish_in(&mut self.tx, &self.lease, answer).await?;
        crate::crash_point!("keyed.commit.before");
        let committed = self.tx.commit().await;
        crate::crash_point!("keyed.commit.after");
        match committed {
            Ok(()) => Ok(true),
            // A deferred constraint: the server has rolled back.
            Err(error) if is_refusal(&error) => Err(fail("committing a request", error)),
            Err(_) => Ok(self.keys.was_committed(&self.begin).await?.is_some()),
        }
    }

    /// Undoes everything: the key was never begun.
    pub(crate) async fn roll_back(self) -> Result<()> {
        self.tx.rollback().await.map_err(|e| fail("undoing a request", e))
    }
}
