//! Which life of the ledger the database holds.

use sqlx::AssertSqlSafe;

use super::Inner;
use super::error::translate;
use crate::error::Result;
use crate::ledger::Epoch;

/// What every role may know, each for what it notices: the ledger's own id (another ledger), the table that holds it (one that
/// was loaded from a dump has new tables), the database (one that was made from a template is another), and when the server
/// started (a plain copy of its files is put back while it is down). A restart by itself loses nothing; a miss is cheap.
const PLAIN: &str = "m.ledger_id::text, '{s}.meta'::regclass::oid::text, \
     (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())::text, \
     pg_catalog.pg_postmaster_start_time()::text";

/// What a server may keep to itself: the cluster, and the timeline, which a promotion and a recovery to a point in time change.
/// The timeline is that of the log written now: the control file's is older until the first checkpoint after a promotion.
const GUARDED: &str = "(select system_identifier from pg_catalog.pg_control_system())::text, \
     case when not pg_catalog.pg_is_in_recovery() \
          then substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) end";

const ALLOWED: &str = "select pg_catalog.bool_and(pg_catalog.has_function_privilege(f, 'execute')) \
     from pg_catalog.unnest(array['pg_catalog.pg_control_system()', 'pg_catalog.pg_walfile_name(pg_lsn)', \
     'pg_catalog.pg_current_wal_lsn()']) f";

pub(super) async fn read(inner: &Inner) -> Result<Epoch> {
    let what = "reading the ledger's epoch";
    let mut tx = inner.begin().await?;
    // A function that may not be called fails its statement even where it is not reached.
    let allowed: bool = sqlx::query_scalar(ALLOWED)
        .persistent(!inner.pooled())
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(what, e))?;
    let s = &inner.settings.schema;
    let guarded = if allowed { GUARDED } else { "null" };
    let parts: Vec<Option<String>> = sqlx::query_scalar(AssertSqlSafe(format!(
        "select array[{}, {guarded}] from {s}.meta m",
        PLAIN.replace("{s}", s)
    )))
    .persistent(!inner.pooled())
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(what, e))?;
    Ok(Epoch::of(parts.into_iter().map(Option::unwrap_or_default)))
}
