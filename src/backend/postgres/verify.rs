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
        let row = sqlx::raw_sql("select pg_catalog.pg_backend_pid()::text")
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
    let sql =
        "select (pg_catalog.current_setting('server_version_num')::int operator(pg_catalog.>=) 170000)::text";
    let row = sqlx::raw_sql(sql).fetch_one(pool).await.map_err(|e| translate(WHAT, e))?;
    Ok(row.get::<String, _>(0) == "true")
}

/// Whether the search path of a pool's sessions names PostgreSQL's own schema after another one.
pub(super) async fn hides_built_ins(pool: &PgPool) -> Result<bool> {
    let row = sqlx::raw_sql("select pg_catalog.current_setting('search_path')")
        .fetch_one(pool)
        .await
        .map_err(|e| translate(WHAT, e))?;
    let hides = names_it_late(&row.get::<String, _>(0));
    if hides {
        tracing::warn!(
            target: "hapax",
            "the search_path of this role names pg_catalog after another schema, which then hides PostgreSQL's own names: \
             each statement takes a transaction of its own"
        );
    }
    Ok(hides)
}

fn names_it_late(search_path: &str) -> bool {
    let mut names = search_path.split(',').map(|name| name.trim().trim_matches('"'));
    names.position(|name| name == "pg_catalog").is_some_and(|place| place > 0)
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
        version: String, read_only: bool, standby_names: String, sync_standbys: i64, async_standbys: i64,
        hidden_standbys: i64,
    }
}

impl Server {
    /// Whether a fail-over is meant to lose nothing.
    fn waits_for_standbys(&self) -> bool {
        !self.standby_names.trim().is_empty()
    }

    /// What an acknowledged commit survives.
    fn commits(&self) -> (Level, String) {
        match self.synchronous_commit.as_str() {
            "off" => (
                Level::Refusal,
                "synchronous_commit is off: an acknowledged claim could be lost after its offset was committed"
                    .into(),
            ),
            "local" if self.waits_for_standbys() => (
                Level::Refusal,
                "synchronous_commit is local: a fail-over to a synchronous standby (synchronous_standby_names) \
                 could forget acknowledged claims, because commits do not wait for it"
                    .into(),
            ),
            "remote_write" if self.waits_for_standbys() => (
                Level::Warning,
                "synchronous_commit is remote_write: a standby acknowledges what its disk does not have yet, so \
                 a crash of both machines could forget claims"
                    .into(),
            ),
            commit => (Level::Fine, format!("synchronous_commit is {commit}")),
        }
    }

    /// What a fail-over to a standby could forget.
    fn standbys(&self) -> (Level, String) {
        let lagging = counted(self.async_standbys as u64, "asynchronous standby", "asynchronous standbys");
        if self.waits_for_standbys() && self.sync_standbys > 0 {
            let sync = counted(self.sync_standbys as u64, "synchronous standby", "synchronous standbys");
            return (Level::Fine, format!("{sync}, {lagging}: fail over to a synchronous one only"));
        }
        if self.waits_for_standbys() && self.hidden_standbys == 0 {
            return (
                Level::Warning,
                "synchronous_standby_names is set and no synchronous standby is attached: commits wait until one is".into(),
            );
        }
        if self.async_standbys > 0 {
            return (Level::Warning, format!("{lagging}: a failover to one may forget the latest claims"));
        }
        (Level::Fine, "no asynchronous standby is attached (or this role may not see them)".into())
    }
}

/// Checks the server's settings and state.
pub(super) async fn check_server(connection: &mut PgConnection, pooled: bool) -> Result<Vec<Finding>> {
    let server: Server = sqlx::query_as(
        "select current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes, \
         current_setting('synchronous_commit') as synchronous_commit, \
         current_setting('server_version_num')::int as number, current_setting('server_version') as version, \
         current_setting('transaction_read_only') = 'on' or pg_is_in_recovery() as read_only, \
         current_setting('synchronous_standby_names') as standby_names, standby.* from (select \
         count(*) filter (where sync_state in ('sync', 'quorum')) as sync_standbys, \
         count(*) filter (where sync_state = 'async') as async_standbys, \
         count(*) filter (where sync_state is null) as hidden_standbys \
         from pg_stat_replication r where not exists (\
         select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')) as standby",
    )
    .persistent(false)
    .fetch_one(connection)
    .await
    .map_err(|e| translate(WHAT, e))?;
    let mut findings = Vec::new();
    let mut find = |level, check, message: String| findings.push(Finding { level, check, message });
    for (check, value) in [("fsync", &server.fsync), ("full_page_writes", &server.full_page_writes)] {
        match value.as_str() {
            "on" => find(Level::Fine, check, format!("{check} is on")),
            _ => find(
                Level::Refusal,
                check,
                format!("{check} is {value}: a crash of the machine would lose what was acknowledged"),
            ),
        }
    }
    let (level, message) = server.commits();
    find(level, "synchronous_commit", message);
    let (level, message) = server.standbys();
    find(level, "standbys", message);
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
    if pooled {
        find(
            Level::Warning,
            "pooling",
            "a transaction pooler is in front: statements are prepared each time".into(),
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
