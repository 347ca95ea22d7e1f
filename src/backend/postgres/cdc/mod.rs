//! Change data capture: what PostgreSQL gives to Debezium, and the pulses among it.
//!
//! Modules are in the publication `hapax_records` from the transaction that made them, and the table
//! `record_pulse` joins them ([`PgCdc::prepare`]). A pulse is one transaction that stamps a row of that
//! table for each partition of the topic.
//!
//! A pulse says: whatever was acknowledged before its time lies before it in its partition. The time is
//! read before the pulse's transaction begins, so it is earlier than the transaction's commit. A write that
//! was acknowledged before that time had committed before it, so its commit comes first in the log. Debezium
//! reads transactions in the order of their commits and publishes in the order in which it reads; a key
//! stays in its partition, and the producer keeps the order within one. What a snapshot reads is not in
//! that order, so the pulses in a snapshot say nothing.
//!
//! Debezium may publish long after the commit, and the topic may have got more partitions by then: what lies
//! before a pulse may be in one that the pulse does not know. So whoever reads a pulse counts the partitions
//! afterwards, and passes by a pulse for fewer.

mod check;

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use super::codes::from_row;
use super::connect;
use super::database::{BEGIN, BEGIN_BRIEFLY, begin};
use super::error::translate;
use super::schema::check_name;
use crate::analytics::{PULSES, pulse_rows};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::records::Roles;

/// The publication of all modules and of the pulses.
pub const PUBLICATION: &str = "hapax_records";

const TABLES: &str = include_str!("cdc.sql");

/// A replication slot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slot {
    /// Whether somebody reads it now.
    pub active: bool,
    /// How many bytes of the log were written since what its reader has confirmed.
    pub lag_bytes: u64,
    /// Whether the server has removed log that the slot needs: then its reader can never go on.
    pub lost: bool,
    /// Whether standbys have it too.
    pub failover: bool,
}

/// How Debezium connects to the database of a URL. The password is not among it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Endpoint {
    /// The host.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The role.
    pub user: String,
    /// The database.
    pub database: String,
    /// The TLS mode, in the words of PostgreSQL.
    pub ssl_mode: &'static str,
}

impl Endpoint {
    /// Reads a URL. Other hosts are verified, unless the URL says otherwise. `name` is the setting that has
    /// the URL.
    pub fn of(name: &str, url: &str) -> Result<Self> {
        let bad = |reason: String| Error::Config(format!("{name} is not a PostgreSQL URL: {reason}"));
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(bad("it begins with no postgres://".into()));
        }
        let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| bad(error.to_string()))?;
        let is_local = matches!(options.get_host(), "localhost" | "127.0.0.1" | "::1");
        let says = url.contains("sslmode=") || url.contains("ssl-mode=");
        let ssl_mode = match options.get_ssl_mode() {
            _ if !says && !is_local => "verify-full",
            PgSslMode::Disable => "disable",
            PgSslMode::Allow => "allow",
            PgSslMode::Prefer => "prefer",
            PgSslMode::Require => "require",
            PgSslMode::VerifyCa => "verify-ca",
            PgSslMode::VerifyFull => "verify-full",
        };
        let user = options.get_username().to_owned();
        Ok(Endpoint {
            host: options.get_host().to_owned(),
            port: options.get_port(),
            database: options.get_database().unwrap_or(&user).to_owned(),
            user,
            ssl_mode,
        })
    }
}

/// The database side of change data capture. Clones share the connections.
#[derive(Debug, Clone)]
pub struct PgCdc {
    pool: PgPool,
    schema: String,
}

from_row! {
    struct SlotRow { active: bool, lag: i64, lost: bool, failover: bool }
}

impl PgCdc {
    /// Connects by URL. Makes nothing.
    pub async fn connect(url: &str, schema: &str, acquire_timeout: Duration) -> Result<Self> {
        check_name(schema)?;
        Ok(PgCdc::with_pool(connect::open_pool("journal.url", url, 2, acquire_timeout).await?, schema))
    }

    /// Uses a pool of your own. Makes nothing.
    pub fn with_pool(pool: PgPool, schema: &str) -> Self {
        PgCdc { pool, schema: schema.to_owned() }
    }

    /// Makes the table of pulses and publishes it, unless it is there, and lets the app's role stamp it and
    /// the role of maintenance read it. For the owner of the modules.
    pub async fn prepare(&self, roles: &Roles) -> Result<()> {
        const WHAT: &str = "making the table of pulses";
        check_name(&self.schema)?;
        let schema = &self.schema;
        let mut sql = TABLES.replace("{schema}", schema);
        for (role, rights) in [(&roles.app, "select, insert, update"), (&roles.maintenance, "select")] {
            if let Some(role) = role {
                check_name(role)?;
                // A String takes all.
                let _ = writeln!(
                    sql,
                    "grant usage on schema {schema} to {role};\ngrant {rights} on {schema}.{PULSES} to {role};"
                );
            }
        }
        let mut tx = begin(&self.pool, BEGIN).await.map_err(|e| translate(WHAT, e))?;
        tx.execute("set local lock_timeout = '10s'").await.map_err(|e| translate(WHAT, e))?;
        // As those who make modules: the publication is the database's.
        let lock = "select pg_advisory_xact_lock(hashtext('hapax.migrate.modules'))";
        tx.execute(sqlx::raw_sql(lock)).await.map_err(|e| translate(WHAT, e))?;
        tx.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))
    }

    /// The time of the database, for a pulse that is stamped afterwards.
    pub async fn now(&self) -> Result<Time> {
        const WHAT: &str = "asking for the time";
        let sql = "select (extract(epoch from clock_timestamp()) * 1000000)::bigint";
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await.map_err(|e| translate(WHAT, e))?;
        let now: i64 = sqlx::query_scalar(sql)
            .persistent(false)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        Ok(Time::from_micros(now))
    }

    /// Stamps a pulse of a time for each partition of a topic that has this many, in one transaction, and
    /// returns the time. If there is one from `unless_within` before it, nothing is written, and it is
    /// `None`.
    pub async fn pulse(&self, at: Time, partitions: i32, unless_within: Duration) -> Result<Option<Time>> {
        const WHAT: &str = "writing pulses";
        // All of them wait for each other in the same order. A time that is written is never earlier than
        // the one before it, whoever waited for whom.
        let sql = format!(
            "insert into {}.{PULSES} as p (partitions, n, at)
               select $1, r.n, timestamptz 'epoch' + $4::bigint * interval '1 microsecond' from unnest($2::int[]) as r(n)
             on conflict (partitions, n) do update set at = excluded.at
               where p.at < excluded.at - $3::bigint * interval '1 microsecond'
             returning (extract(epoch from p.at) * 1000000)::bigint",
            self.schema
        );
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await.map_err(|e| translate(WHAT, e))?;
        let stamped: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(false)
            .bind(partitions)
            .bind(pulse_rows(partitions))
            .bind(unless_within.as_micros() as i64)
            .bind(at.as_micros())
            .fetch_all(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        Ok(stamped.into_iter().min().map(Time::from_micros))
    }

    /// When pulses were stamped last.
    pub async fn last_pulse(&self) -> Result<Option<Time>> {
        const WHAT: &str = "reading pulses";
        let sql =
            format!("select (extract(epoch from max(at)) * 1000000)::bigint from {}.{PULSES}", self.schema);
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await.map_err(|e| translate(WHAT, e))?;
        let last: Option<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(false)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        Ok(last.map(Time::from_micros))
    }

    /// A replication slot of this database, if it is there.
    pub async fn slot(&self, name: &str) -> Result<Option<Slot>> {
        const WHAT: &str = "looking at a replication slot";
        // A server before 17 has no column `failover`; read as JSON it is null there.
        let sql = "select s.active, s.wal_status = 'lost' or s.restart_lsn is null as lost,
               greatest(0, pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end,
                 coalesce(s.confirmed_flush_lsn, s.restart_lsn, '0/0')))::bigint as lag,
               coalesce((to_jsonb(s) ->> 'failover')::boolean, false) as failover
             from pg_replication_slots s where s.slot_name = $1 and s.database = current_database()";
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await.map_err(|e| translate(WHAT, e))?;
        let found: Option<SlotRow> = sqlx::query_as(sql)
            .persistent(false)
            .bind(name)
            .fetch_optional(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        let slot = |row: SlotRow| Slot {
            active: row.active,
            lag_bytes: row.lag as u64,
            lost: row.lost,
            failover: row.failover,
        };
        Ok(found.map(slot))
    }

    /// Removes a replication slot that nobody reads. False if there is none.
    pub async fn drop_slot(&self, name: &str) -> Result<bool> {
        const WHAT: &str = "removing a replication slot";
        let sql = "select pg_drop_replication_slot(s.slot_name) from pg_replication_slots s
             where s.slot_name = $1 and s.database = current_database()";
        let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await.map_err(|e| translate(WHAT, e))?;
        let dropped = sqlx::query(sql)
            .persistent(false)
            .bind(name)
            .execute(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        Ok(dropped.rows_affected() > 0)
    }

    /// Whether slots of this server can be kept on standbys (17 or newer).
    pub async fn has_failover_slots(&self) -> Result<bool> {
        super::verify::limits_transactions(&self.pool).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_read_from_a_url_without_its_password() {
        let at = Endpoint::of("cdc.database_url", "postgres://keeper:s3cret@db.example:6432/app").unwrap();
        assert_eq!((&*at.host, at.port, &*at.user, &*at.database), ("db.example", 6432, "keeper", "app"));
        assert_eq!(at.ssl_mode, "verify-full", "another host is verified");
        assert!(!format!("{at:?}").contains("s3cret"));
        for (url, mode) in [
            ("postgres://a@localhost/app", "prefer"),
            ("postgres://a@db.example/app?sslmode=disable", "disable"),
            ("postgres://a@db.example/app?sslmode=require", "require"),
        ] {
            assert_eq!(Endpoint::of("journal.url", url).unwrap().ssl_mode, mode, "{url}");
        }
        let message = Endpoint::of("journal.url", "sqlite:x.db").unwrap_err().to_string();
        assert!(message.contains("journal.url"), "{message}");
    }
}
