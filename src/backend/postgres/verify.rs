//! Start-up checks: asks the server for what the guarantees depend on.

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Row as _};

use super::Inner;
use super::codes::from_row;
use super::error::translate;
use crate::error::{Error, Result};
use crate::ledger::{Finding, Level};
use crate::words::counted;

const WHAT: &str = "checking the server";

/// The oldest server whose behaviour the tests cover.
const OLDEST: i32 = 150_000;

/// The order in which two open connections are asked who serves them. It repeats no short pattern, so
/// that a pooler that deals its servers out in turn is noticed too.
const ASKED: [usize; 12] = [0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0];

/// Whether a transaction pooler is in front: a session keeps its backend, and shares it with no other.
///
/// One look at each connection is not enough. Beside other clients of the pooler, both may happen to be
/// served by different backends.
pub(super) async fn is_pooled(pool: &PgPool) -> Result<bool> {
    let options = pool.connect_options();
    let open = async || sqlx::PgConnection::connect_with(&options).await.map_err(|e| translate(WHAT, e));
    let mut connections = [open().await?, open().await?];
    let mut served_by: [Option<String>; 2] = [None, None];
    let mut pooled = false;
    for asked in ASKED {
        // Uses the simple protocol, because a pooler may not support prepared statements.
        let row = sqlx::raw_sql("select pg_backend_pid()::text")
            .fetch_one(&mut connections[asked])
            .await
            .map_err(|e| translate(WHAT, e))?;
        let backend = Some(row.get::<String, _>(0));
        let changed = served_by[asked].is_some() && served_by[asked] != backend;
        if changed || served_by[1 - asked] == backend {
            pooled = true;
            break;
        }
        served_by[asked] = backend;
    }
    for connection in connections {
        let _ = connection.close().await; // it only asked; a failed close does not matter
    }
    Ok(pooled)
}

/// Whether the server can limit how long a transaction takes.
pub(super) async fn limits_transactions(pool: &PgPool) -> Result<bool> {
    let row = sqlx::raw_sql("select (current_setting('server_version_num')::int >= 170000)::text")
        .fetch_one(pool)
        .await
        .map_err(|e| translate(WHAT, e))?;
    Ok(row.get::<String, _>(0) == "true")
}

/// Refuses a server that cannot keep the guarantees, and logs warnings.
pub(super) fn enforce(findings: Vec<Finding>) -> Result<()> {
    let mut refusals = Vec::new();
    for finding in findings {
        match finding.level {
            Level::Fine => {}
            Level::Warning => tracing::warn!(target: "hapax", check = finding.check, "{}", finding.message),
            Level::Refusal => refusals.push(finding.message),
        }
    }
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Error::Refused {
        what: format!("this server cannot keep the promise: {}", refusals.join("; ")),
        source: None,
    })
}

from_row! {
    /// What a server says of itself.
    struct Server {
        fsync: String, full_page_writes: String, synchronous_commit: String, number: i32,
        version: String, read_only: bool, async_standbys: i64,
    }
}

/// Checks the server's settings and state.
pub(super) async fn check_server(connection: &mut PgConnection, pooled: bool) -> Result<Vec<Finding>> {
    let server: Server = sqlx::query_as(
        "select current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes, \
         current_setting('synchronous_commit') as synchronous_commit, \
         current_setting('server_version_num')::int as number, current_setting('server_version') as version, \
         current_setting('transaction_read_only') = 'on' or pg_is_in_recovery() as read_only, \
         (select count(*) from pg_stat_replication r where sync_state = 'async' and not exists (\
         select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')) \
         as async_standbys",
    )
    .persistent(false)
    .fetch_one(connection)
    .await
    .map_err(|e| translate(WHAT, e))?;
    let mut findings = Vec::new();
    let mut find = |level, check, message: String| findings.push(Finding { level, check, message });
    for (check, value) in [("fsync", server.fsync), ("full_page_writes", server.full_page_writes)] {
        match value.as_str() {
            "on" => find(Level::Fine, check, format!("{check} is on")),
            _ => find(
                Level::Refusal,
                check,
                format!("{check} is {value}: a crash of the machine would lose what was acknowledged"),
            ),
        }
    }
    match server.synchronous_commit.as_str() {
        "off" => find(
            Level::Refusal,
            "synchronous_commit",
            "synchronous_commit is off: an acknowledged claim could be lost after its offset was committed"
                .into(),
        ),
        commit => find(Level::Fine, "synchronous_commit", format!("synchronous_commit is {commit}")),
    }
    let version = server.version;
    if server.number < OLDEST {
        find(
            Level::Refusal,
            "version",
            format!("the server is PostgreSQL {version}; hapax needs 15 or newer"),
        );
    } else {
        find(Level::Fine, "version", format!("PostgreSQL {version}"));
    }
    if server.read_only {
        find(
            Level::Refusal,
            "writable",
            "the database is read-only (a standby, or default_transaction_read_only)".into(),
        );
    } else {
        find(Level::Fine, "writable", "the database takes writes".into());
    }
    let standbys = server.async_standbys;
    if standbys > 0 {
        find(
            Level::Warning,
            "standbys",
            format!(
                "{}: a failover to one may forget the latest claims",
                counted(standbys as u64, "asynchronous standby", "asynchronous standbys")
            ),
        );
    } else {
        find(
            Level::Fine,
            "standbys",
            "no asynchronous standby is attached (or this role may not see them)".into(),
        );
    }
    if pooled {
        find(
            Level::Warning,
            "pooling",
            "a transaction pooler is in front: statements are prepared each time; sweep over a direct connection".into(),
        );
    } else {
        find(Level::Fine, "pooling", "connections are sessions".into());
    }
    Ok(findings)
}

pub(super) async fn check(inner: &Inner) -> Result<Vec<Finding>> {
    let mut findings = check_server(&mut *inner.begin().await?, inner.database.pooled()).await?;
    let s = &inner.settings.schema;
    let sql = format!("select count(*) from {s}.dropped where phase is not null");
    let (skipped,): (i64,) = inner.fetch_one(WHAT, sqlx::query_as(AssertSqlSafe(sql))).await?;
    if skipped > 0 {
        let message = format!(
            "{} being dropped; the next sweep goes on",
            counted(skipped as u64, "week is", "weeks are")
        );
        findings.push(Finding { level: Level::Warning, check: "sweep", message });
    }
    Ok(findings)
}
