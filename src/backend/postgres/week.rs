//! A week on its way out: *move, don't copy*.
//!
//! Each step is committed, and any number of sweepers may take them, killed between any two:
//!
//! 1. *Close* the week, for all scopes. Whoever sees that inserts nothing into it any more: an id that is nowhere is busy.
//! 2. *Wait* until every transaction that was open then has ended: those may not have seen it. What is nowhere now was never
//!    claimed, so from here on it is too old.
//! 3. *Move* what must outlive the week to `held`, deleted and inserted by one statement, until nothing is left: what is open,
//!    and what has ended within the retention. What is locked is moved when its transaction has ended.
//! 4. *Wait* once more: a snapshot of before a move would find the row in neither place when the partition is out.
//! 5. *Detach* the partition, concurrently, and *drop* it. It has a number in its name, so that no late statement hits a week
//!    that was made again.
//!
//! A row is in exactly one place at any moment, and lookups go to the week first and then to `held`. There is no way back
//! and none is needed: a week that is closed only ever loses what was settled longer ago than the retention.
//!
//! The wait is for transactions by their virtual ids (`pg_locks`, which every role can read), not for locks: a snapshot, or
//! a statement between its look at `dropped` and its INSERT, holds none. It is bounded ([`PgSettings::sweep_patience`]), says whom
//! it waits for, and goes on in the next sweep from the same list. Claims wait for none of this.
//!
//! [`PgSettings::sweep_patience`]: super::PgSettings::sweep_patience

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, PgConnection};

use super::Inner;
use super::error::translate;
use super::sweep::{Present, WHAT, execute, us};
use crate::error::{Error, Result};
use crate::ledger::{SweepSettings, Week};

/// States that must outlive their week.
const OPEN: &str = "('L', 'R', 'X', 'P')";
/// How often the end of something is looked for.
const POLL_MIN: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(250);
/// How long a detach that was cut short may hold the ledger's tables while it is finished: less than the server's default
/// `deadlock_timeout`, so that nobody who waits for it is made a victim.
const FINALIZE_MAX: &str = "400ms";
/// Every transaction of this database that is open now, but our own. A vacuum claims nothing.
const OPEN_NOW: &str = "select l.virtualtransaction from pg_locks l left join pg_stat_activity a on a.pid = l.pid \
     where l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.pid <> pg_backend_pid() \
     and coalesce(a.datid = (select oid from pg_database where datname = current_database()), true) \
     and a.backend_type is distinct from 'autovacuum worker'";

/// What went with a week.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gone {
    pub rows: u64,
    pub held: u64,
}

/// How far a drop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Not begun, or over.
    None,
    Closed,
    Moving,
    Moved,
    Empty,
}

/// A week on its way out, and how long this sweep may wait.
pub(super) struct Leaving<'a> {
    pub inner: &'a Inner,
    pub week: Week,
    /// The number in the partition's name.
    pub partition: i64,
    pub terms: SweepSettings,
    pub now: &'a Present,
    pub end: Instant,
}

impl Leaving<'_> {
    fn schema(&self) -> &str {
        &self.inner.settings.schema
    }

    fn table(&self) -> String {
        format!("{}.entry_{}_{}", self.schema(), self.week.number(), self.partition)
    }

    /// The row of `dropped` that is about this very partition.
    fn mine(&self) -> String {
        format!("week = {} and number = {}", self.week.number(), self.partition)
    }

    /// Takes up to this many steps; none if the week is not gone after them, because something has to be waited for or
    /// another sweeper is at it. Whatever is left to do, the next sweep does.
    pub async fn go_on(&self, steps: u32) -> Result<Option<Gone>> {
        for _ in 0..steps {
            match self.step().await {
                Ok(Step::On) => {}
                Ok(Step::Later) => return Ok(None),
                Ok(Step::Gone(gone)) => return Ok(Some(gone)),
                Err(error) if is_anothers(&error) => {
                    if self.is_overdue().await? {
                        tracing::warn!(target: "hapax", week = %self.week, error = %error.chain(), "a week cannot be dropped, and no sweeper gets on with it; the next sweep tries again");
                    } else {
                        tracing::debug!(target: "hapax", week = %self.week, error = %error.chain(), "another sweeper is at this week");
                    }
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Whether the drop has been under way for longer than another sweeper would wait for anybody.
    async fn is_overdue(&self) -> Result<bool> {
        let patience = i64::try_from(self.inner.settings.sweep_patience.as_micros()).unwrap_or(i64::MAX);
        let sql = format!(
            "select {s}.us({s}.ledger_now()) - {s}.us(at) > {patience} from {s}.dropped where {} and phase is not null",
            self.mine(),
            s = self.schema()
        );
        Ok(self.ask(&mut *self.inner.begin().await?, sql).await?.unwrap_or(false))
    }

    async fn step(&self) -> Result<Step> {
        match self.phase().await? {
            Phase::None => self.close().await,
            Phase::Closed => {
                if !self.is_waited_for("closed").await? {
                    return Ok(Step::Later);
                }
                crate::crash_point!("sweep.waited");
                self.begin_moving().await
            }
            Phase::Moving => self.move_all().await,
            Phase::Moved => {
                if !self.is_waited_for("moved").await? {
                    return Ok(Step::Later);
                }
                crate::crash_point!("sweep.waited_again");
                self.enter("moved", "phase = 'empty'").await
            }
            Phase::Empty => {
                if !self.detach().await? {
                    return Ok(Step::Later);
                }
                crate::crash_point!("sweep.detached");
                self.drop_table().await
            }
        }
    }

    async fn phase(&self) -> Result<Phase> {
        let sql = format!("select phase from {}.dropped where {}", self.schema(), self.mine());
        let phase: Option<Option<String>> = self.ask(&mut *self.inner.begin().await?, sql).await?;
        Ok(match phase.flatten().as_deref() {
            Some("closed") => Phase::Closed,
            Some("moving") => Phase::Moving,
            Some("moved") => Phase::Moved,
            Some("empty") => Phase::Empty,
            Some(other) => return Err(Error::Corrupt(format!("a week in phase {other}"))),
            None => Phase::None,
        })
    }

    async fn ask<T>(&self, connection: &mut PgConnection, sql: String) -> Result<Option<T>>
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(false)
            .fetch_optional(connection)
            .await
            .map_err(|e| translate(WHAT, e))
    }

    /// Runs one statement in a transaction of its own.
    async fn execute(&self, sql: String) -> Result<u64> {
        let mut tx = self.inner.begin().await?;
        let done = execute(&mut tx, sql).await?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        Ok(done)
    }

    /// Closes the week, unless someone has written to it since it was looked at, or another sweeper was faster: this very
    /// partition may be gone, and the week made and dropped once more.
    async fn close(&self) -> Result<Step> {
        let (s, week, partition) = (self.schema(), self.week.number(), self.partition);
        let closed = self
            .execute(format!(
                "insert into {s}.dropped as d (week, at, since, number, phase, scope_closed) \
                 select {week}, n.now, n.now - {retention} * interval '1 microsecond', {partition}, 'closed', \
                   (select max(c.number) from {s}.scope c) \
                   from (select {now} as now offset 0) n \
                  where to_regclass('{table}') is not null and coalesce((select max(t.at) from {s}.touch t where t.week = {week}), '-infinity') \
                        < n.now - interval '1 hour' - {retention} * interval '1 microsecond' \
                 on conflict (week) do update set at = excluded.at, since = excluded.since, number = excluded.number, phase = excluded.phase, \
                   scope_closed = excluded.scope_closed, waits = null, held = 0, rows = 0 \
                  where d.phase is null and d.number is distinct from excluded.number",
                now = self.now,
                table = self.table(),
                retention = us(self.terms)
            ))
            .await?;
        crate::crash_point!("sweep.closed");
        Ok(if closed == 1 { Step::On } else { Step::Later })
    }

    /// Goes from one phase to the next; whoever was faster has done the same.
    async fn enter(&self, from: &str, set: &str) -> Result<Step> {
        let s = self.schema();
        self.execute(format!(
            "update {s}.dropped set {set}, waits = null where {} and phase = '{from}'",
            self.mine()
        ))
        .await?;
        Ok(Step::On)
    }

    /// From here on, an id of this week that is nowhere is too old for every scope that there was when the week was closed, and
    /// for those that transactions which were open then have registered and used. Whoever came later has never written to the
    /// week: it is busy until the week is gone, and may use it then. A week that never had a row is nobody's loss.
    async fn begin_moving(&self) -> Result<Step> {
        let (s, table) = (self.schema(), self.table());
        // Nothing has been moved yet, so whoever has written to the week is in it.
        let set = format!(
            "phase = 'moving', at = {s}.ledger_now(), scope_max = case when exists (select from {table}) then \
             greatest(scope_max, scope_closed, (select max(e.scope) from {table} e)) else scope_max end"
        );
        self.enter("closed", &set).await
    }

    /// Whether all transactions have ended that were open when this phase began.
    async fn is_waited_for(&self, phase: &str) -> Result<bool> {
        if crate::crash_point::mutant!("sweep does not wait") {
            return Ok(true);
        }
        let (s, mine) = (self.schema(), self.mine());
        // The list is made by a statement that sees the phase, so that whoever is not on it sees it too.
        self.execute(format!(
            "update {s}.dropped set waits = array({OPEN_NOW}) where {mine} and phase = '{phase}' and waits is null"
        ))
        .await?;
        crate::crash_point!("sweep.listed");
        let open = format!(
            "select array(select w from unnest(d.waits) w intersect {OPEN_NOW}) from {s}.dropped d \
              where {mine} and phase = '{phase}'"
        );
        if !self.wait_for("transaction", &open).await? {
            return Ok(false);
        }
        // Those of them that were prepared have no session, and are listed only now.
        let prepared = "select gid from pg_prepared_xacts where database = current_database()";
        let listed: Vec<String> = sqlx::query_scalar(prepared)
            .persistent(false)
            .fetch_all(&mut *self.inner.begin().await?)
            .await
            .map_err(|e| translate(WHAT, e))?;
        if listed.is_empty() {
            return Ok(true);
        }
        let listed: Vec<String> = listed.iter().map(|gid| format!("'{}'", gid.replace('\'', "''"))).collect();
        let open = format!("select array({prepared} and gid = any (array[{}]))", listed.join(", "));
        self.wait_for("prepared transaction", &open).await
    }

    /// Asks again and again until nobody is left; false if that takes longer than this sweep may.
    async fn wait_for(&self, what: &str, sql: &str) -> Result<bool> {
        let mut pause = POLL_MIN;
        loop {
            let left: Option<Vec<String>> = self.ask(&mut *self.inner.begin().await?, sql.to_owned()).await?;
            match left {
                Some(left) if !left.is_empty() => {
                    if Instant::now() >= self.end {
                        let which = left.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
                        tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: it waits for the end of {} {what}(s) older than its closing ({which}); the next sweep goes on", left.len());
                        return Ok(false);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(POLL_MAX);
                }
                _ => return Ok(true), // or another sweeper has gone on
            }
        }
    }

    async fn move_all(&self) -> Result<Step> {
        let max = i64::from(self.terms.batch_max).min(i32::MAX.into());
        // What is open, what has ended so lately that a repeat is still to be answered for, and what has bytes in held.
        let stays = format!(
            "(state in {OPEN} or at >= (select since from {}.dropped where {}) or (flags & 4) <> 0)",
            self.schema(),
            self.mine()
        );
        let mut pause = POLL_MIN;
        loop {
            let mut tx = self.inner.begin().await?;
            let moved = self.move_rows(&mut tx, max).await?;
            tx.commit().await.map_err(|e| translate(WHAT, e))?;
            crate::crash_point!("sweep.moved");
            if moved == max {
                continue;
            }
            let (rows, left) = self.look(&stays).await?;
            if left == 0 {
                let set = format!("phase = 'moved', rows = held + {rows}");
                return self.enter("moving", &set).await;
            }
            if Instant::now() >= self.end {
                tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: {left} of its rows are locked by open transactions; the next sweep goes on");
                return Ok(Step::Later);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    async fn move_rows(&self, tx: &mut PgConnection, max: i64) -> Result<i64> {
        let (s, week, partition) = (self.schema(), self.week.number(), self.partition);
        let sql = format!("select {s}.move_rows({week}::smallint, {partition}, {max}::int)");
        Ok(self.ask(tx, sql).await?.unwrap_or(0))
    }

    /// Entries of the partition, and how many of them are so.
    async fn look(&self, so: &str) -> Result<(i64, i64)> {
        let sql = format!("select count(*), count(*) filter (where {so}) from {}", self.table());
        sqlx::query_as(AssertSqlSafe(sql))
            .persistent(false)
            .fetch_one(&mut *self.inner.begin().await?)
            .await
            .map_err(|e| translate(WHAT, e))
    }

    /// What would go.
    pub async fn count(&self) -> Result<Gone> {
        let (rows, open) = self.look(&format!("state in {OPEN}")).await?;
        Ok(Gone { rows: rows as u64, held: open as u64 })
    }

    /// Takes the partition out without making anybody wait; finishes what was begun. False: not yet.
    async fn detach(&self) -> Result<bool> {
        let (s, table) = (self.schema(), self.table());
        loop {
            let pending =
                format!("select inhdetachpending from pg_inherits where inhrelid = to_regclass('{table}')");
            match self.ask::<bool>(&mut *self.inner.begin().await?, pending).await? {
                None => return Ok(true),
                Some(false) => {
                    // Not possible inside a transaction, so its time cannot be limited by a setting: it is cancelled.
                    let sql = format!("alter table {s}.entry detach partition {table} concurrently");
                    let mut connection = self.inner.pool.acquire().await.map_err(|e| translate(WHAT, e))?;
                    let detaching = execute(&mut connection, sql.clone());
                    tokio::pin!(detaching);
                    tokio::select! {
                        done = &mut detaching => { done?; }
                        () = tokio::time::sleep_until(self.end.max(Instant::now() + POLL_MAX).into()) => {
                            self.cancel(&sql).await?;
                            detaching.await?;
                        }
                    }
                }
                Some(true) => {
                    let mut tx = self.inner.begin().await?;
                    execute(&mut tx, format!("set local statement_timeout = '{FINALIZE_MAX}'")).await?;
                    let sql = format!("alter table {s}.entry detach partition {table} finalize");
                    match execute(&mut tx, sql).await {
                        Ok(_) => tx.commit().await.map_err(|e| translate(WHAT, e))?,
                        Err(error) if !is_anothers(&error) || Instant::now() >= self.end => {
                            return Err(error);
                        }
                        Err(_) => {
                            drop(tx);
                            tokio::time::sleep(POLL_MAX).await;
                        }
                    }
                }
            }
        }
    }

    async fn cancel(&self, sql: &str) -> Result<()> {
        tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: a transaction that reads the ledger is open; the next sweep goes on");
        let cancel = "select count(pg_cancel_backend(pid)) from pg_stat_activity where query = $1 and state = 'active'";
        sqlx::query(cancel)
            .persistent(false)
            .bind(sql)
            .execute(&mut *self.inner.begin().await?)
            .await
            .map(drop)
            .map_err(|e| translate(WHAT, e))
    }

    async fn drop_table(&self) -> Result<Step> {
        let (s, mine, table) = (self.schema(), self.mine(), self.table());
        let mut tx = self.inner.begin().await?;
        execute(&mut tx, "set local lock_timeout = '2s'".into()).await?;
        let mine_still = format!("select true from {s}.dropped where {mine} and phase = 'empty' for update");
        if self.ask::<bool>(&mut tx, mine_still).await?.is_none() {
            return Ok(Step::Later); // another sweeper has dropped it
        }
        let there = format!(
            "select not exists (select from pg_inherits where inhrelid = c.oid) from pg_class c where c.oid = to_regclass('{table}')"
        );
        match self.ask::<bool>(&mut tx, there).await? {
            Some(true) => {
                execute(&mut tx, format!("lock table {table}")).await?;
                // Nobody can have written to it; should a snapshot that was handed on have survived the waits, nothing open is lost.
                let late = self.move_rows(&mut tx, i32::MAX.into()).await?;
                if late > 0 {
                    tracing::error!(target: "hapax", week = %self.week, late, "rows were written to a week that had been closed; they are kept");
                }
                execute(&mut tx, format!("drop table {table}")).await?;
            }
            Some(false) => return Ok(Step::Later),
            None => {} // gone already
        }
        let over =
            format!("update {s}.dropped set phase = null, waits = null where {mine} returning rows, held");
        let (rows, held): (i64, i64) = sqlx::query_as(AssertSqlSafe(over))
            .persistent(false)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        execute(&mut tx, format!("delete from {s}.touch where week = {}", self.week.number())).await?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        crate::crash_point!("sweep.dropped");
        Ok(Step::Gone(Gone { rows: rows as u64, held: held as u64 }))
    }
}

/// How a step ended.
enum Step {
    /// The next one may follow.
    On,
    /// Something has to be waited for, or another sweeper is at it.
    Later,
    Gone(Gone),
}

/// Whether an error says that someone else is at it, or in the way: the table is gone or is being detached, two met in a
/// deadlock that the other one survived, or a wait took too long.
fn is_anothers(error: &Error) -> bool {
    let code = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<sqlx::Error>())
        .and_then(|error| error.as_database_error())
        .and_then(|error| error.code().map(std::borrow::Cow::into_owned));
    matches!(error, Error::Schema(_) | Error::Contended { .. })
        || matches!(code.as_deref(), Some("55000" | "42P01" | "XX000"))
}
