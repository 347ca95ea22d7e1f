//! Claims in the caller's own transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Transaction};

use super::connect::must_be_durable;
use super::fault::Doing;
use super::ledger_tx::{LedgerTx, Memo};
use super::{SqliteLedger, held, quick, schema, wait};
use crate::error::{Error, Result, Source};
use crate::id::Scope;
use crate::ledger::{
    Claim, Key, Marker, Outcome, Rows, Settle, Settled, Token, TransactionalLedger, settle_rows,
};

impl SqliteLedger {
    /// Claims events in the caller's transaction, on the caller's connection to the ledger's file.
    /// Claims and effects commit or roll back together.
    ///
    /// The effects must be in that file too. A connection whose main database is another file is
    /// refused ([`Error::Unsupported`]), because in WAL mode SQLite does not commit to two files
    /// atomically; so do not put the effects into an attached file. A connection whose
    /// `synchronous` is below FULL is refused as well.
    ///
    /// Begin the transaction with [`Immediate`](rusqlite::TransactionBehavior::Immediate)
    /// behaviour. A transaction that reads before it writes may find that another connection has
    /// written meanwhile: it gets [`Error::Contended`], and must be repeated as a whole. After any
    /// error, roll back.
    ///
    /// Use [`Mode::Done`](crate::ledger::Mode::Done). A claim that is rolled back counts no
    /// attempt, so an event that always fails comes back for ever unless you count its failures.
    ///
    /// ```
    /// use hapax::backend::sqlite::SqliteLedger;
    /// use hapax::ledger::{Claim, Identity, Mode, Settings};
    /// use hapax::{EventId, Scope};
    /// use rusqlite::{Connection, TransactionBehavior};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let file = dir.path().join("orders.db");
    /// let ledger = SqliteLedger::open(&file, Settings::default())?;
    /// let mut conn = Connection::open(&file)?;
    /// conn.execute("CREATE TABLE paid (id TEXT)", [])?;
    ///
    /// let identity = Identity::new(Scope::new("billing")?, EventId::new("order-17")?);
    /// let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    /// let outcomes = ledger.claim_in(&tx, &[Claim::new(identity, Mode::Done)])?;
    /// if outcomes[0].as_ref().is_ok_and(|outcome| outcome.is_claimed()) {
    ///     tx.execute("INSERT INTO paid VALUES ('order-17')", [])?;
    /// }
    /// tx.commit()?;
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "try_claim_in")]
    #[doc(alias = "tryClaimSameTx")]
    pub fn claim_in(&self, tx: &Transaction<'_>, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        self.claim_on(tx, claims)
    }

    fn claim_on(&self, tx: &Connection, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let token = self.enter(tx)?;
        let mut memo = Memo::default();
        let mut ledger_tx = LedgerTx::new(tx, &mut memo, &*self.0.clock);
        ledger_tx.one_token(token);
        let outcomes = quick::claim(&mut ledger_tx, claims, &self.0.settings)?;
        ledger_tx.finish()?;
        Ok(outcomes)
    }

    /// Settles claims in the caller's transaction, under the same rules as
    /// [`claim_in`](SqliteLedger::claim_in). The settling takes effect when that transaction
    /// commits.
    pub fn settle_in(&self, tx: &Transaction<'_>, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        self.settle_on(tx, settles)
    }

    fn settle_on(&self, tx: &Connection, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        self.enter(tx)?;
        let mut memo = Memo::default();
        let mut ledger_tx = LedgerTx::new(tx, &mut memo, &*self.0.clock);
        let answers = settle_rows(&mut ledger_tx, settles, &self.0.settings)?;
        ledger_tx.finish()?;
        Ok(answers)
    }

    /// Sets markers in the caller's transaction; see
    /// [`set_markers`](crate::ConsumerStore::set_markers).
    pub fn set_markers_in(&self, tx: &Transaction<'_>, scope: &Scope, markers: &[Marker]) -> Result<()> {
        self.enter(tx)?;
        held::set_markers(tx, scope, markers, self.0.clock.now())
    }

    /// Draws a token. As the first statement it takes the write lock, and it matches only this
    /// ledger's row.
    fn enter(&self, conn: &Connection) -> Result<Token> {
        must_be_durable(conn)?;
        let drawn = conn
            .prepare_cached("UPDATE main.hapax_meta SET token = token + 1 WHERE ledger = ?1 RETURNING token")
            .and_then(|mut statement| statement.query_row([&self.0.id], |row| row.get(0)).optional());
        match drawn {
            Ok(Some(token)) => Ok(Token(token)),
            Ok(None) => Err(self.elsewhere()),
            Err(error) => Err(if schema::is_there(conn)? {
                super::fault::meaning("claiming in the caller's transaction", error)
            } else {
                self.elsewhere()
            }),
        }
    }

    fn elsewhere(&self) -> Error {
        Error::Unsupported(format!(
            "this transaction's main database is not the ledger's file ({}), so claim and effect would not be committed \
             as one; open that file, and keep the effects in it",
            self.0.path.display()
        ))
    }

    /// Whether a claim made by [`claim_in`](SqliteLedger::claim_in) was committed, for a caller
    /// whose commit ended in doubt. Blocks until the current writer has finished.
    ///
    /// It looks while it holds the write lock, so the commit in question has either happened or
    /// never will. Without the lock it could look too early.
    pub fn was_committed(&self, claim: &Claim) -> Result<bool> {
        let (claim, settings) = (claim.clone(), self.0.settings.clone());
        wait(self.0.write.send(move |ledger_tx| {
            ledger_tx.undone(|ledger_tx| {
                let week = settings.check(&claim)?;
                let (scope, _) = ledger_tx.scope(claim.identity.tenant.as_ref(), &claim.identity.scope)?;
                let row = ledger_tx.row(&Key { week, scope, id: claim.identity.id.key().into_owned() })?;
                Ok(row.is_some_and(|row| row.nonce == claim.nonce))
            })
        }))
    }

    /// Limits the file's size in pages, to test a full disk.
    #[cfg(feature = "testing")]
    pub fn limit_pages(&self, pages: u32) -> Result<()> {
        wait(self.0.write.send(move |ledger_tx| {
            let sql = format!("PRAGMA main.max_page_count = {pages}");
            ledger_tx.conn.query_row(&sql, [], |_| Ok(())).doing("limiting the file")
        }))
    }
}

/// A transaction on the file that hapax opened for a handler. Effects go through its connection.
///
/// Only hapax commits it. SQLite ends a transaction by itself when the disk is full, when a statement is
/// interrupted, or when one says so (`OR ROLLBACK`, `RAISE(ROLLBACK)`), and commits each later statement
/// on its own: such a commit is refused, and so is a `COMMIT` of the handler.
#[derive(Debug)]
pub struct SqliteTransaction(pub(super) Connection, Arc<AtomicBool>);

impl SqliteTransaction {
    /// Guards a connection whose transaction has begun.
    pub(super) fn guarded(mut conn: Connection) -> Result<Self> {
        let may_commit = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&may_commit);
        conn.commit_hook(Some(move || !asked.load(Ordering::Acquire))).doing("guarding a transaction")?;
        Ok(SqliteTransaction(conn, may_commit))
    }

    /// Lets the next COMMIT pass. The handler must have ended.
    pub(super) fn let_commit(&self) {
        self.1.store(true, Ordering::Release);
    }
}

impl std::ops::Deref for SqliteTransaction {
    type Target = Connection;
    fn deref(&self) -> &Connection {
        &self.0
    }
}

/// Runs work that may wait for other writers or for the disk on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::unavailable("a transaction on the ledger's file", error)))
}

#[async_trait::async_trait]
impl TransactionalLedger for SqliteLedger {
    type Transaction = SqliteTransaction;

    /// Ignores both limits: SQLite cannot end the transaction of a stopped process, which locks the
    /// whole file. The handler's timeout enforces `time_max`.
    async fn begin(&self, _time_max: Duration, _statement_max: Duration) -> Result<SqliteTransaction> {
        let path = self.0.path.clone();
        blocking(move || {
            let conn = super::connect::open(&path, super::connect::Access::Write)?;
            super::connect::make_durable(&conn)?;
            conn.execute_batch("BEGIN IMMEDIATE").doing("beginning a transaction")?;
            SqliteTransaction::guarded(conn)
        })
        .await
    }

    async fn claim_in(&self, tx: &mut SqliteTransaction, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        self.claim_on(&tx.0, claims)
    }

    async fn settle_in(
        &self,
        tx: &mut SqliteTransaction,
        settles: &[Settle],
    ) -> Result<Vec<Result<Settled>>> {
        self.settle_on(&tx.0, settles)
    }

    async fn set_markers_in(
        &self,
        tx: &mut SqliteTransaction,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()> {
        self.enter(&tx.0)?;
        held::set_markers(&tx.0, scope, markers, self.0.clock.now())
    }

    async fn is_sound(&self, tx: &mut SqliteTransaction) -> Result<bool> {
        Ok(!tx.0.is_autocommit()) // a full disk, for one, makes SQLite roll back the whole transaction
    }

    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        let code = error.downcast_ref::<rusqlite::Error>().and_then(rusqlite::Error::sqlite_error_code);
        matches!(code, Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked))
    }

    fn is_doubt(&self, _: &(dyn std::error::Error + 'static)) -> bool {
        false // a file is never unreachable
    }

    async fn is_lost(&self, _: &mut SqliteTransaction) -> bool {
        false
    }

    async fn commit(&self, tx: SqliteTransaction) -> Result<Result<(), Source>> {
        tx.let_commit();
        blocking(move || match tx.0.execute_batch("COMMIT") {
            // A deferred foreign key failed. The transaction is still open; closing the connection
            // rolls it back.
            Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation) => {
                Ok(Err(error.into()))
            }
            answer => answer.doing("committing").map(Ok),
        })
        .await
    }

    async fn roll_back(&self, tx: SqliteTransaction) {
        drop(tx); // closing the connection rolls it back
    }

    async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        let (ledger, claim) = (self.clone(), claim.clone());
        blocking(move || SqliteLedger::was_committed(&ledger, &claim)).await
    }
}
