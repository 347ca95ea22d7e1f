//! Transactions that the layer opens for its handlers.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor as _};
use tokio::time::timeout;

use super::seen::Seen;
use super::transaction::begin_in;
use super::{PgKeys, SILENT, fail};
use crate::backend::postgres::PgTx;
use crate::backend::postgres::database::begin_answered;
use crate::backend::postgres::error::is_refusal;
use crate::error::{Error, Result};
use crate::keyed::{Answer, Begin, Begun, KeyLease};

/// How long a request waits for an open transaction that holds its key: hardly, since it would keep a
/// connection meanwhile. The layer asks again later.
const BRIEFLY: &str = "5ms";
/// How long the server is asked what became of a COMMIT without an answer.
const DOUBT: Duration = Duration::from_secs(30);

impl PgKeys {
    /// Opens a transaction for a request and begins it there. The server ends the transaction if its
    /// client stalls in it for its lease, or one of its statements takes that long (before PostgreSQL 17
    /// it cannot limit them all together).
    pub(crate) async fn open(&self, of: &Begin) -> Result<Result<PgOpenKey, Begun>> {
        of.check()?;
        let ms = of.lease.as_millis().clamp(1, i32::MAX as u128); // 0 would mean no limit
        let mut statement = format!(
            "BEGIN; SET LOCAL idle_in_transaction_session_timeout = {ms}; SET LOCAL statement_timeout = {ms}"
        );
        if self.0.limits {
            let _ = write!(statement, "; SET LOCAL transaction_timeout = {ms}"); // cannot fail
        }
        let opened = begin_answered(&self.0.pool, AssertSqlSafe(statement), SILENT).await;
        let mut tx = opened.map_err(|e| fail("opening a transaction for a request", e))?;
        match begin_in(&self.0, &mut tx, of, BRIEFLY).await? {
            Begun::First(lease) => {
                if of.tenant.is_some() {
                    // For the handler's own statements; before the savepoint, so that it outlives an undo.
                    let set = Seen::tenant(of.tenant_text()).apply(&mut tx, self.0.pooled()).await;
                    set.map_err(|e| self.0.noted("naming the tenant of a request", e))?;
                }
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
    /// answer stays. If the acknowledgement of the COMMIT is lost, or does not come `within` this time,
    /// the server is asked what became of it; false if nothing was committed.
    ///
    /// Whatever gets no answer in time is dropped with its transaction, and its connection does not
    /// return to the pool unless it answers after all.
    pub(crate) async fn commit(self, answer: &Answer, undo: bool, within: Duration) -> Result<bool> {
        let PgOpenKey { mut tx, lease, keys, begin } = self;
        let stored = async {
            if undo {
                let undone = tx.execute("ROLLBACK TO SAVEPOINT hapax_keyed").await;
                undone.map_err(|e| fail("undoing a request's work", e))?;
            }
            keys.finish_in(&mut tx, &lease, answer).await
        };
        timeout(within, stored).await.map_err(|late| Error::unavailable("storing an answer", late))??;
        crate::crash_point!("keyed.commit.before");
        let committed = timeout(within, tx.commit()).await;
        crate::crash_point!("keyed.commit.after");
        match committed {
            Ok(Ok(())) => Ok(true),
            // A deferred constraint: the server has rolled back.
            Ok(Err(error)) if is_refusal(&error) => Err(fail("committing a request", error)),
            Ok(Err(_)) | Err(_) => {
                let asked = timeout(DOUBT, keys.was_committed(&begin)).await;
                let late = |late| Error::unavailable("asking what became of a COMMIT", late);
                Ok(asked.map_err(late)??.is_some())
            }
        }
    }

    /// Undoes everything: the key was never begun.
    pub(crate) async fn roll_back(self, within: Duration) -> Result<()> {
        let undone = timeout(within, self.tx.rollback()).await;
        let undone = undone.map_err(|late| Error::unavailable("undoing a request", late))?;
        undone.map_err(|e| fail("undoing a request", e))
    }
}
