//! Keys in the caller's own transaction: exactly once.

use sqlx::{PgTransaction, Row as _};

use super::seen::Seen;
use super::{Inner, PgKeys, SILENT, WAIT, begun, fail};
use crate::backend::postgres::database::{BEGIN_BRIEFLY, begin_answered};
use crate::backend::postgres::executor::Repeat;
use crate::error::{Error, Result};
use crate::keyed::{Answer, Begin, Begun, KeyLease};

impl PgKeys {
    /// Begins a request in your transaction. If it is `First`, do the work in the transaction, store
    /// the answer with [`finish_in`](PgKeys::finish_in), and commit: the key, the work and the answer
    /// are one. A rollback leaves no trace. On any other outcome nothing was changed or locked.
    ///
    /// If the answer to the COMMIT is lost, [`was_committed`](PgKeys::was_committed) says what became
    /// of it.
    pub async fn begin_in(&self, tx: &mut PgTransaction<'_>, begin: &Begin) -> Result<Begun> {
        begin_in(&self.0, tx, begin, WAIT).await
    }

    /// Stores the answer in your transaction. `Fenced`: the transaction did not begin the request.
    pub async fn finish_in(&self, tx: &mut PgTransaction<'_>, of: &KeyLease, answer: &Answer) -> Result<()> {
        answer.check()?;
        let row = self.0.finish_statement(of, answer).fetch_one(&mut **tx).await;
        let row = row.map_err(|e| fail("storing an answer", e))?;
        if row.try_get(0).unwrap_or(false) { Ok(()) } else { Err(of.fenced()) }
    }

    /// Whether a request whose COMMIT was never answered took effect; its answer if so. It begins the
    /// same request (the same [`Begin`], with its nonce) again and rolls that back. An answer is as
    /// durable as a COMMIT: it waits for a synchronous standby as one does.
    pub async fn was_committed(&self, begin: &Begin) -> Result<Option<Answer>> {
        let mut repeat = Repeat::in_doubt(200);
        loop {
            let asked = async {
                // This waits for a transaction that is still open, instead of reading past it. It may have
                // inserted the key itself, so the server ends it if this process stops.
                let opened = begin_answered(&self.0.pool, BEGIN_BRIEFLY, SILENT).await;
                let mut tx = opened.map_err(|e| fail("resolving a doubt", e))?;
                let outcome = begin_in(&self.0, &mut tx, begin, WAIT).await?;
                crate::crash_point!("keyed.doubt.end");
                let ended = if matches!(&outcome, Begun::Done(kept) if kept.mine) {
                    // A COMMIT whose session was ended while it waited for a standby can be seen, and a
                    // fail-over would forget it. Locking the row writes to the log, so this COMMIT waits too.
                    let (inner, tenant) = (&self.0, Seen::tenant(begin.tenant_text()));
                    let seen = tenant.apply(&mut tx, inner.pooled()).await;
                    seen.map_err(|e| inner.noted("naming the tenant of a request", e))?;
                    let (of, key) = (begin.tenant_text().to_owned(), begin.key.as_str().to_owned());
                    let lock = inner.query(&inner.sql.lock).bind(of).bind(key);
                    lock.execute(&mut *tx).await.map_err(|e| inner.noted("resolving a doubt", e))?;
                    tx.commit().await
                } else {
                    tx.rollback().await
                };
                ended.map_err(|e| fail("resolving a doubt", e))?;
                Ok::<_, Error>(outcome)
            };
            match asked.await {
                Ok(Begun::Done(kept)) if kept.mine => return Ok(Some(kept.answer)),
                Ok(Begun::Running { until: None }) if repeat.again().await => {}
                Ok(Begun::Running { until: None }) => {
                    return Err(Error::Contended {
                        what: "resolving a doubt: the transaction in question is still open".into(),
                        source: None,
                    });
                }
                Ok(_) => return Ok(None),
                Err(error) if error.is_retryable() && repeat.again().await => {}
                Err(error) => return Err(error),
            }
        }
    }
}

pub(super) async fn begin_in(
    inner: &Inner,
    tx: &mut PgTransaction<'_>,
    begin: &Begin,
    wait: &str,
) -> Result<Begun> {
    begin.check()?;
    let row = inner.begin_statement(begin, wait, false).fetch_one(&mut **tx).await;
    begun(begin, &row.map_err(|e| inner.noted("beginning a request", e))?)
}
