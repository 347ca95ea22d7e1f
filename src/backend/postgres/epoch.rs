//! Reads the epoch: which incarnation of the ledger the database holds.

use sqlx::AssertSqlSafe;

use super::Inner;
use super::error::translate;
use crate::error::Result;
use crate::ledger::Epoch;

/// Parts that every role may read, and what each detects: the ledger's id (another ledger), its
/// table (a restore from a dump makes new tables), the database (a copy made from a template is
/// another one), and the server's start time (a plain copy of its files is restored while it is
/// down). A restart alone also changes the epoch although nothing was lost; that miss is cheap.
const PLAIN: &str = "m.ledger_id::text, '{s}.meta'::regclass::oid::text, \
     (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())::text, \
     pg_catalog.pg_postmaster_start_time()::text";

/// Parts that a server may restrict: the cluster, and the timeline, which changes on promotion and
/// on point-in-time recovery. The timeline is read from the WAL being written, because the control
/// file keeps the old one until the first checkpoint after a promotion.
const GUARDED: &str = "(select system_identifier from pg_catalog.pg_control_system())::text, \
     case when not pg_catalog.pg_is_in_recovery() \
          then substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) end";

const ALLOWED: &str = "select pg_catalog.bool_and(pg_catalog.has_function_privilege(f, 'execute')) \
     from pg_catalog.unnest(array['pg_catalog.pg_control_system()', 'pg_catalog.pg_walfile_name(pg_lsn)', \
     'pg_catalog.pg_current_wal_lsn()']) f";

pub(super) async fn read(inner: &Inner) -> Result<Epoch> {
    let what = "reading the ledger's epoch";
    let mut tx = inner.begin().await?;
    // A statement that names a function it may not call fails, even if it never reaches the call.
    let allowed: bool = sqlx::query_scalar(ALLOWED)
        .persistent(!inner.database.pooled())
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(what, e))?;
    let s = &inner.settings.schema;
    let guarded = if allowed { GUARDED } else { "null" };
    let parts: Vec<Option<String>> = sqlx::query_scalar(AssertSqlSafe(format!(
        "select array[{}, {guarded}] from {s}.meta m",
        PLAIN.replace("{s}", s)
    )))
    .persistent(!inner.database.pooled())
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(what, e))?;
    Ok(Epoch::of(parts.into_iter().map(Option::unwrap_or_default)))
}
