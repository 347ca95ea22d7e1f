//! Claims in the caller's own transaction: exactly once, because claim and effect commit together.

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, PgTransaction};

use super::claim::{Ready, Unregistered, run};
use super::codes::from_row;
use super::database::begin;
use super::error::{Meaning, is_refusal, meaning, translate};
use super::executor::{Executor, Repeat, in_savepoint};
use super::{Inner, PgLedger, held, read, settle};
use crate::error::{Error, Result, Source};
use crate::id::{Scope, Tenant};
use crate::ledger::{Claim, Marker, Outcome, Settle, Settled, TransactionalLedger, Week};

/// How long a connection may take to answer before it counts as busy.
const PROBE_MAX: Duration = Duration::from_secs(1);

impl PgLedger {
    /// Claims events in your transaction. A claim is done when the transaction commits, and never
    /// happened if it rolls back. The signature enforces the rule: without an open transaction
    /// there is nothing to pass.
    ///
    /// The first claim of a new scope registers it. Until that transaction ends, other claims of
    /// the same scope wait for two seconds and then get [`Error::Contended`] for that claim alone.
    /// An id that another open transaction has locked is `Busy` after a short wait. Either way the
    /// transaction can go on, and a claim that changes nothing keeps no lock, so it blocks no other
    /// transaction. If the whole call fails with [`Error::WeekMissing`] or [`Error::Contended`],
    /// roll back the whole transaction and try again.
    pub async fn claim_in(
        &self,
        tx: &mut PgTransaction<'_>,
        claims: &[Claim],
    ) -> Result<Vec<Result<Outcome>>> {
        claim_in(&self.0, &mut *tx, claims, self).await
    }

    /// Settles claims in your transaction: recorded when it commits, with everything else it did.
    /// The token decides as always. If the whole call fails with [`Error::Contended`], retry the
    /// whole transaction.
    pub async fn settle_in(
        &self,
        tx: &mut PgTransaction<'_>,
        settles: &[Settle],
    ) -> Result<Vec<Result<Settled>>> {
        settle::settle(&self.0, &mut Executor::in_transaction(&self.0.database, &mut *tx), settles).await
    }

    /// Sets markers in your transaction; see [`set_markers`](crate::ConsumerStore::set_markers).
    pub async fn set_markers_in(
        &self,
        tx: &mut PgTransaction<'_>,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()> {
        held::set_markers_in(&self.0, &mut *tx, scope, markers).await
    }

    /// Whether a claim in a transaction whose COMMIT was never answered took effect. It makes the
    /// same claim again and rolls it back, so it waits for a transaction that is still open instead
    /// of reading past it. "Yes" is as durable as a COMMIT: it waits for a synchronous standby as one
    /// does.
    pub async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        let mut repeat = Repeat::in_doubt(80);
        loop {
            let mut tx = self.0.begin().await?;
            let outcome = self.claim_in(&mut tx, std::slice::from_ref(claim)).await;
            // Roll back whatever the outcome: a new claim must not stay.
            let undone = tx.rollback().await;
            let outcome = outcome.and_then(|mut outcomes| outcomes.pop().transpose());
            let unknown = match outcome {
                // The transaction in question still holds it, and will end. Unknown is not "no".
                Ok(Some(Outcome::Busy { until: None, .. })) => Error::Contended {
                    what: "resolving a doubt: the transaction in question is still open".into(),
                    source: None,
                },
                Ok(_) => {
                    undone.map_err(|e| translate("resolving a doubt", e))?;
                    break;
                }
                Err(error) => error,
            };
            if !unknown.is_retryable() || !repeat.again().await {
                return Err(unknown);
            }
        }
        // The transaction in question has ended, so this read sees its commit.
        let week = self.0.settings.ledger.check(claim)?;
        let mut tx = self.0.begin().await?;
        let found = read::find(&self.0, &mut tx, &claim.identity, week, true).await?;
        if found.is_none_or(|found| found.row.nonce != claim.nonce) {
            return Ok(false);
        }
        // A COMMIT whose session was ended while it waited for a standby can be seen, and a fail-over
        // would forget it. Locking the row has written to the log, so this COMMIT waits for that too.
        tx.commit().await.map_err(|e| translate("resolving a doubt", e))?;
        Ok(true)
    }
}

async fn claim_in(
    inner: &Inner,
    connection: &mut PgConnection,
    claims: &[Claim],
    ledger: &PgLedger,
) -> Result<Vec<Result<Outcome>>> {
    let mut outcomes: Vec<Option<Result<Outcome>>> = Vec::with_capacity(claims.len());
    let mut ready = Vec::with_capacity(claims.len());
    let mut unregistered = Unregistered::default();
    for (index, claim) in claims.iter().enumerate() {
        let week = match inner.settings.ledger.check(claim) {
            Ok(week) => week,
            Err(error) => {
                outcomes.push(Some(Err(error)));
                continue;
            }
        };
        if !inner.knows_week(week) {
            match has_week(inner, connection, claim, week).await {
                Ok(true) => {}
                // Making the week here would tie it to the caller's transaction. A task makes it
                // when a connection is free; the caller rolls back and tries again.
                Ok(false) => {
                    make_beside(ledger.clone(), claim.clone());
                    return Err(Error::WeekMissing { monday: week.to_string() });
                }
                Err(error @ Error::Invalid { .. }) => {
                    outcomes.push(Some(Err(error)));
                    continue;
                }
                Err(error) => return Err(error),
            }
        }
        let scope = match inner.known_scope(&claim.identity) {
            Some(scope) => Some(scope),
            None if unregistered.has(claim) => None,
            None => register_scope(inner, connection, claim).await?,
        };
        if let Some(scope) = scope {
            outcomes.push(None);
            ready.push(Ready { claim, index, scope, week, key: claim.identity.id.key() });
        } else {
            unregistered.add(claim);
            outcomes.push(Some(Err(Unregistered::error())));
        }
    }
    run(inner, &mut Executor::in_transaction(&inner.database, connection), ready, outcomes).await
}

/// The number of a claim's scope, registered in the caller's transaction if necessary. `None` if
/// another open transaction is registering it; the caller's transaction is not affected.
async fn register_scope(inner: &Inner, connection: &mut PgConnection, claim: &Claim) -> Result<Option<i32>> {
    let query = inner.scope_query(&claim.identity).persistent(!inner.database.pooled());
    let registered = match in_savepoint(connection, query).await {
        Ok(mut registered) => registered.pop(),
        Err(error) if meaning(&error) == Meaning::Locked => None,
        Err(error) => return Err(translate("registering a scope", error)),
    };
    // A scope that this transaction registered is gone if it rolls back.
    if let Some(scope) = registered.as_ref().filter(|scope| !scope.fresh) {
        inner.remember_scope(&claim.identity, scope.number);
    }
    Ok(registered.map(|scope| scope.number))
}

from_row! { "o_",
    /// What is known about a week.
    struct WeekState {
        there: bool,
        /// Whether it is being dropped.
        leaves: bool,
        /// It was dropped, and scopes up to this number may not use it again.
        barred: Option<i32>,
        /// Nor may these.
        late: Option<Vec<i32>>,
        /// Why it cannot be made.
        refused: Option<String>,
    }
}

/// Whether a claim can proceed without making its week: the week exists, or it was dropped and the
/// claim reports that. Returns false if the week must be made, and an error if it never can be.
async fn has_week(inner: &Inner, connection: &mut PgConnection, claim: &Claim, week: Week) -> Result<bool> {
    let (days_ahead, weeks_max) = inner.week_limits();
    let state: WeekState = sqlx::query_as(AssertSqlSafe(format!(
        "select o_there, o_leaves, o_barred, o_late, o_refused from {}.week_state($1, $2, $3, $4)",
        inner.settings.schema
    )))
    .persistent(false)
    .bind(i32::from(week.number()))
    .bind(days_ahead)
    .bind(weeks_max)
    .bind(claim.identity.tenant.as_ref().map(Tenant::as_str))
    .fetch_one(&mut *connection)
    .await
    .map_err(|e| translate("looking for a week", e))?;
    if state.leaves {
        return Ok(true); // it is being dropped, and the claim reports that
    }
    if state.there {
        inner.remember_week(week);
        return Ok(true);
    }
    if let Some(barred) = state.barred
        && let Some(scope) = read::scope_in(inner, connection, &claim.identity).await?
        && (scope <= barred || state.late.is_some_and(|late| late.contains(&scope)))
    {
        return Ok(true);
    }
    state.refused.map_or(Ok(false), |reason| Err(Error::invalid("event id", reason)))
}

fn make_beside(ledger: PgLedger, claim: Claim) {
    tokio::spawn(async move {
        let made = async {
            let week = ledger.0.settings.ledger.check(&claim)?;
            ledger.0.place(&claim.identity, week, false).await
        };
        if let Err(error) = made.await {
            tracing::warn!(error = %error.chain(), "a week that a transaction needed could not be made");
        }
    });
}

#[async_trait::async_trait]
impl TransactionalLedger for PgLedger {
    type Transaction = PgTransaction<'static>;

    async fn begin(&self, time_max: Duration, statement_max: Duration) -> Result<PgTransaction<'static>> {
        let millis = |time: Duration| time.as_millis().clamp(1, i32::MAX as u128); // 0 would mean no limit
        let (ms, statement_ms) = (millis(time_max), millis(statement_max));
        // An abandoned handler leaves its statement running on the server, and a ROLLBACK waits for
        // it.
        let mut statement = format!(
            "BEGIN; SET LOCAL idle_in_transaction_session_timeout = {ms}; SET LOCAL statement_timeout = {statement_ms}"
        );
        // This also ends a transaction that keeps the server busy. Older servers can only end idle
        // ones.
        if self.0.limits_transactions {
            let _ = write!(statement, "; SET LOCAL transaction_timeout = {ms}");
        }
        let begun = begin(self.pool(), AssertSqlSafe(statement)).await;
        begun.map_err(|error| translate("beginning a transaction", error))
    }

    async fn claim_in(
        &self,
        tx: &mut PgTransaction<'static>,
        claims: &[Claim],
    ) -> Result<Vec<Result<Outcome>>> {
        PgLedger::claim_in(self, tx, claims).await
    }

    async fn settle_in(
        &self,
        tx: &mut PgTransaction<'static>,
        settles: &[Settle],
    ) -> Result<Vec<Result<Settled>>> {
        PgLedger::settle_in(self, tx, settles).await
    }

    async fn set_markers_in(
        &self,
        tx: &mut PgTransaction<'static>,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()> {
        PgLedger::set_markers_in(self, tx, scope, markers).await
    }

    async fn is_sound(&self, tx: &mut PgTransaction<'static>) -> Result<bool> {
        // Checks what COMMIT would check, while a failure can still be distinguished from an outage.
        match sqlx::raw_sql("SET CONSTRAINTS ALL IMMEDIATE").execute(&mut **tx).await {
            Ok(_) => Ok(true),
            // An aborted transaction rejects every statement, and answers COMMIT with a rollback
            // that is not an error.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("25P02") => Ok(false),
            Err(error) => Err(translate("looking at a transaction", error)),
        }
    }

    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        error
            .downcast_ref::<sqlx::Error>()
            .is_some_and(|error| matches!(meaning(error), Meaning::Conflict | Meaning::Locked))
    }

    fn is_doubt(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        error.downcast_ref::<sqlx::Error>().is_some_and(|error| meaning(error) == Meaning::Doubt)
    }

    async fn is_lost(&self, tx: &mut PgTransaction<'static>) -> bool {
        let probe = sqlx::raw_sql("select 1").execute(&mut **tx);
        // A connection that does not answer in time is busy, not lost.
        let probed = tokio::time::timeout(PROBE_MAX, probe).await;
        matches!(probed, Ok(Err(error)) if meaning(&error) == Meaning::Doubt)
    }

    async fn commit(&self, tx: PgTransaction<'static>) -> Result<Result<(), Source>> {
        match tx.commit().await {
            Ok(()) => Ok(Ok(())),
            Err(error) if is_refusal(&error) => Ok(Err(error.into())),
            Err(error) => Err(translate("committing", error)),
        }
    }

    async fn roll_back(&self, tx: PgTransaction<'static>) {
        // If this does not arrive, the server rolls back when the connection closes.
        let _ = tx.rollback().await;
    }

    async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        PgLedger::was_committed(self, claim).await
    }
}
