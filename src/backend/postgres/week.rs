//! Drops a week: *move, don't copy*.
//!
//! Each step is committed. Any number of sweepers may take steps, and any may be killed between
//! two:
//!
//! 1. *Close* the week, for all scopes. A transaction that sees this inserts nothing into the week:
//!    an id that is nowhere is busy.
//! 2. *Wait* for every transaction that was open then, because it may not have seen the close. An
//!    id that is nowhere now was never claimed, so from here on it is too old.
//! 3. *Move* the rows that must outlive the week to `held`: open rows, and rows that ended within
//!    the retention. One statement deletes and inserts them, repeated until none is left. A locked
//!    row is moved when its transaction has ended.
//! 4. *Wait* again: a reader with a snapshot from before a move would find the row in neither place
//!    once the partition is detached. Then look again: a transaction that saw the week closed and no
//!    more may have ended a row since. Such rows are moved, and the wait is repeated.
//! 5. *Detach* the partition, concurrently, and *drop* it. Its name contains a number, so that no
//!    late statement hits a week that was made again.
//!
//! A row is in exactly one place at any moment, and lookups read the week first and then `held`. A
//! drop cannot be undone and need not be: a closed week only loses rows that were settled longer
//! ago than the retention.
//!
//! A sweep waits for transactions, by their virtual ids (`pg_locks`, which every role can read),
//! not for locks: a snapshot holds none, nor does a statement between its read of `dropped` and its
//! INSERT. The wait is bounded ([`PgSettings::sweep_patience`]), logs the transactions it waits
//! for, and continues in the next sweep with the same list. Claims wait for none of this.
//!
//! [`PgSettings::sweep_patience`]: super::PgSettings::sweep_patience

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, PgConnection};

use super::Inner;
use super::codes::{HELD, from_row, micros, open_states};
use super::error::translate;
use super::sweep::{Present, WHAT, execute};
use crate::error::{Error, Result};
use crate::ledger::{SweepSettings, Week};
use crate::words::counted;

/// How often to poll while waiting.
const POLL_MIN: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(250);
/// How long finishing an interrupted detach may lock the ledger's tables: less than the server's
/// default `deadlock_timeout`, so that no transaction waiting for it is aborted as a deadlock
/// victim.
const FINALIZE_MAX: &str = "400ms";
/// Every open transaction of this database except our own. A vacuum is left out because it claims
/// nothing.
const OPEN_NOW: &str = "select l.virtualtransaction from pg_locks l left join pg_stat_activity a on a.pid = l.pid \
     where l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.pid <> pg_backend_pid() \
     and coalesce(a.datid = (select oid from pg_database where datname = current_database()), true) \
     and a.backend_type is distinct from 'autovacuum worker'";

/// How many rows a dropped week had, and how many of them moved to `held`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gone {
    pub rows: u64,
    pub held: u64,
}

/// The phase of a drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed,
    Moving,
    Moved,
    Empty,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Closed, Phase::Moving, Phase::Moved, Phase::Empty];

    /// How it is stored.
    fn name(self) -> &'static str {
        match self {
            Phase::Closed => "closed",
            Phase::Moving => "moving",
            Phase::Moved => "moved",
            Phase::Empty => "empty",
        }
    }
}

/// A week that is being dropped, and how long this sweep may wait.
pub(super) struct Leaving<'a> {
    pub inner: &'a Inner,
    pub week: Week,
    /// The number in the partition's name.
    pub partition: i64,
    pub settings: SweepSettings,
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

    /// The condition for the row of `dropped` about exactly this partition.
    fn mine(&self) -> String {
        format!("week = {} and number = {}", self.week.number(), self.partition)
    }

    /// Takes up to `steps` steps. Returns `None` if the week is not gone after them, because the
    /// drop has to wait or another sweeper is working on it. The next sweep continues.
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

    /// Whether the drop has been going on for longer than another sweeper would wait.
    async fn is_overdue(&self) -> Result<bool> {
        let patience = micros(self.inner.settings.sweep_patience);
        let sql = format!(
            "select {s}.us({s}.ledger_now()) - {s}.us(at) > {patience} from {s}.dropped where {} and phase is not null",
            self.mine(),
            s = self.schema()
        );
        Ok(self.ask(&mut *self.inner.begin().await?, sql).await?.unwrap_or(false))
    }

    async fn step(&self) -> Result<Step> {
        match self.phase().await? {
            None => self.close().await,
            Some(Phase::Closed) => {
                if self.wait_out(Phase::Closed).await?.is_none() {
                    return Ok(Step::Later);
                }
                crate::crash_point!("sweep.waited");
                self.begin_moving().await
            }
            Some(Phase::Moving) => self.move_all().await,
            Some(Phase::Moved) => {
                let Some(waited) = self.wait_out(Phase::Moved).await? else { return Ok(Step::Later) };
                crate::crash_point!("sweep.waited_again");
                self.look_again(&waited).await
            }
            Some(Phase::Empty) => {
                if !self.detach().await? {
                    return Ok(Step::Later);
                }
                crate::crash_point!("sweep.detached");
                self.drop_table().await
            }
        }
    }

    /// The phase of the drop; `None` if it has not begun, or is over.
    async fn phase(&self) -> Result<Option<Phase>> {
        let sql = format!("select phase from {}.dropped where {}", self.schema(), self.mine());
        let stored: Option<Option<String>> = self.ask(&mut *self.inner.begin().await?, sql).await?;
        let Some(stored) = stored.flatten() else { return Ok(None) };
        let phase = Phase::ALL.into_iter().find(|phase| phase.name() == stored);
        phase.map(Some).ok_or_else(|| Error::Corrupt(format!("a week in phase {stored:?}")))
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

    /// Closes the week, unless it was written to since it was selected, or another sweeper was
    /// faster: this very partition may be gone, and the week made and dropped again.
    async fn close(&self) -> Result<Step> {
        let (s, week, partition) = (self.schema(), self.week.number(), self.partition);
        let closed = self
            .execute(format!(
                "insert into {s}.dropped as d (week, at, since, number, phase, scope_closed, scope_given) \
                 select {week}, n.now, n.now - {retention} * interval '1 microsecond', {partition}, '{closed}', \
                   (select max(c.number) from {s}.scope c), \
                   pg_sequence_last_value(pg_get_serial_sequence('{s}.scope', 'number')::regclass) \
                   from (select {now} as now offset 0) n \
                  where to_regclass('{table}') is not null and coalesce((select max(t.at) from {s}.touch t where t.week = {week}), '-infinity') \
                        < n.now - interval '1 hour' - {retention} * interval '1 microsecond' \
                 on conflict (week) do update set at = excluded.at, since = excluded.since, number = excluded.number, phase = excluded.phase, \
                   scope_closed = excluded.scope_closed, scope_given = excluded.scope_given, waits = null, held = 0, rows = 0 \
                  where d.phase is null and d.number is distinct from excluded.number",
                now = self.now,
                table = self.table(),
                closed = Phase::Closed.name(),
                retention = micros(self.settings.retention)
            ))
            .await?;
        crate::crash_point!("sweep.closed");
        Ok(if closed == 1 { Step::On } else { Step::Later })
    }

    /// Enters the next phase. If another sweeper was faster, it has done the same.
    async fn enter(&self, from: Phase, to: Phase, set: &str) -> Result<Step> {
        self.enter_if("true", from, to, set).await
    }

    async fn enter_if(&self, so: &str, from: Phase, to: Phase, set: &str) -> Result<Step> {
        let (s, from, to) = (self.schema(), from.name(), to.name());
        self.execute(format!(
            "update {s}.dropped set phase = '{to}', waits = null{set} where {} and phase = '{from}' and {so}",
            self.mine()
        ))
        .await?;
        Ok(Step::On)
    }

    /// Detaches next, unless there are rows to move again: a transaction that saw the week closed,
    /// and no later phase, ended an at-most-once claim, and committed after the last look. All of
    /// those have been waited for. Another sweeper may have gone back meanwhile: then its list is
    /// another one, and this sweeper has not waited for it.
    async fn look_again(&self, waited: &[String]) -> Result<Step> {
        let left = self.look(&self.stays()).await?.matching;
        let to = if left == 0 || crate::crash_point::mutant!("sweep looks once") {
            Phase::Empty
        } else {
            Phase::Moving
        };
        let so = format!("waits = {}", sql_array(waited));
        self.enter_if(&so, Phase::Moved, to, "").await
    }

    /// From here on, an id of this week that is nowhere is too old for every scope that existed
    /// when the week was closed, and for scopes that transactions open at that time registered and
    /// used. A scope registered later has not written to the week: its claims are busy until the
    /// week is gone, and may use it then. Except where a transaction whose snapshot is older than the
    /// close wrote for it: then it alone is barred too. If the week never had a row, no further scope
    /// is barred.
    async fn begin_moving(&self) -> Result<Step> {
        let (s, table) = (self.schema(), self.table());
        // Nothing has been moved yet, so every scope that wrote to the week has a row in it.
        let set = format!(
            ", at = {s}.ledger_now(), scope_max = case when exists (select from {table}) then \
             greatest(scope_max, scope_closed, (select max(e.scope) from {table} e where (e.scope > scope_given) is not true)) else scope_max end, \
             scopes_late = array(select e.scope from {table} e where e.scope > scope_given union select x from unnest(scopes_late) x)"
        );
        self.enter(Phase::Closed, Phase::Moving, &set).await
    }

    /// Waits until all transactions that were open when this phase began have ended, and returns
    /// their list. `None` if that takes longer than this sweep may.
    async fn wait_out(&self, phase: Phase) -> Result<Option<Vec<String>>> {
        let (s, mine, phase) = (self.schema(), self.mine(), phase.name());
        // The statement that makes the list sees the phase, so every transaction that is not on it
        // sees the phase too.
        self.execute(format!(
            "update {s}.dropped set waits = array({OPEN_NOW}) where {mine} and phase = '{phase}' and waits is null"
        ))
        .await?;
        crate::crash_point!("sweep.listed");
        let list = format!("select waits from {s}.dropped where {mine} and phase = '{phase}'");
        let list: Option<Option<Vec<String>>> = self.ask(&mut *self.inner.begin().await?, list).await?;
        // Without a list another sweeper has continued, and what follows changes nothing.
        let list = list.flatten().unwrap_or_default();
        if crate::crash_point::mutant!("sweep does not wait") {
            return Ok(Some(list));
        }
        let open = format!("select array(select w from unnest({}) w intersect {OPEN_NOW})", sql_array(&list));
        if !self.wait_for("transaction", &open).await? {
            return Ok(None);
        }
        // Transactions of the list that were prepared have no session, so they are listed only now.
        let prepared = "select gid from pg_prepared_xacts where database = current_database()";
        let gids: Vec<(String,)> = self.inner.fetch_all(WHAT, sqlx::query_as(prepared)).await?;
        let gids: Vec<String> = gids.into_iter().map(|(gid,)| gid).collect();
        let open = format!("select array({prepared} and gid = any ({}))", sql_array(&gids));
        let ended = gids.is_empty() || self.wait_for("prepared transaction", &open).await?;
        Ok(ended.then_some(list))
    }

    /// Polls until no transaction is left. Returns false if that takes longer than this sweep may.
    async fn wait_for(&self, what: &str, sql: &str) -> Result<bool> {
        let mut pause = POLL_MIN;
        loop {
            let left: Option<Vec<String>> = self.ask(&mut *self.inner.begin().await?, sql.to_owned()).await?;
            match left {
                Some(left) if !left.is_empty() => {
                    if Instant::now() >= self.end {
                        let which = left.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
                        tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: it waits for {} older than its closing to end ({which}); the next sweep goes on", counted(left.len() as u64, what, &format!("{what}s")));
                        return Ok(false);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(POLL_MAX);
                }
                _ => return Ok(true), // or another sweeper has continued
            }
        }
    }

    async fn move_all(&self) -> Result<Step> {
        let max = i64::from(self.settings.batch_max).min(i32::MAX.into());
        let mut pause = POLL_MIN;
        loop {
            let mut tx = self.inner.begin().await?;
            let moved = self.move_rows(&mut tx, max).await?;
            tx.commit().await.map_err(|e| translate(WHAT, e))?;
            crate::crash_point!("sweep.moved");
            if moved == max {
                continue;
            }
            let Looked { rows, matching: left } = self.look(&self.stays()).await?;
            if left == 0 {
                return self.enter(Phase::Moving, Phase::Moved, &format!(", rows = held + {rows}")).await;
            }
            if self.phase().await? != Some(Phase::Moving) {
                return Ok(Step::On); // another sweeper has continued
            }
            if Instant::now() >= self.end {
                tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: {left} of its rows are locked by open transactions; the next sweep goes on");
                return Ok(Step::Later);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// The condition for rows that must not go with the week: open rows, rows that ended so
    /// recently that a repeat must still be recognized, and rows with bytes in `held`, until those
    /// are deleted.
    fn stays(&self) -> String {
        let since = format!("(select since from {}.dropped where {})", self.schema(), self.mine());
        format!("({} or (flags & {HELD}) <> 0)", outlives(&since))
    }

    async fn move_rows(&self, tx: &mut PgConnection, max: i64) -> Result<i64> {
        let (s, week, partition) = (self.schema(), self.week.number(), self.partition);
        let sql = format!("select {s}.move_rows({week}::smallint, {partition}, {max}::int)");
        Ok(self.ask(tx, sql).await?.unwrap_or(0))
    }

    /// How many rows the partition has, and how many of them match a condition.
    async fn look(&self, so: &str) -> Result<Looked> {
        let sql = format!(
            "select count(*) as rows, count(*) filter (where {so}) as matching from {}",
            self.table()
        );
        self.inner.fetch_one(WHAT, sqlx::query_as(AssertSqlSafe(sql))).await
    }

    /// What a drop would remove. `None` if another sweeper has removed it meanwhile.
    pub async fn count(&self) -> Result<Option<Gone>> {
        let since = format!("{} - {} * interval '1 microsecond'", self.now, micros(self.settings.retention));
        match self.look(&outlives(&since)).await {
            Err(error) if is_anothers(&error) => Ok(None),
            looked => looked.map(|of| Some(Gone { rows: of.rows as u64, held: of.matching as u64 })),
        }
    }

    /// Detaches the partition without blocking others, or finishes an interrupted detach. Returns
    /// false if it is not detached yet.
    async fn detach(&self) -> Result<bool> {
        let (s, table) = (self.schema(), self.table());
        loop {
            let pending =
                format!("select inhdetachpending from pg_inherits where inhrelid = to_regclass('{table}')");
            match self.ask::<bool>(&mut *self.inner.begin().await?, pending).await? {
                None => return Ok(true),
                Some(false) => {
                    // This cannot run inside a transaction, so no setting can limit its time: it is
                    // cancelled instead.
                    // The comment tells it from that of another sweeper, also behind a pooler.
                    let mine = uuid::Uuid::new_v4().simple();
                    let sql =
                        format!("alter table {s}.entry detach partition {table} concurrently /* {mine} */");
                    let mut connection =
                        self.inner.database.pool().acquire().await.map_err(|e| translate(WHAT, e))?;
                    let detaching = execute(&mut connection, sql.clone());
                    tokio::pin!(detaching);
                    let mut end = self.end.max(Instant::now() + POLL_MAX);
                    loop {
                        tokio::select! {
                            done = &mut detaching => { done?; break; }
                            () = tokio::time::sleep_until(end.into()) => {
                                self.cancel(&sql).await?;
                                end = Instant::now() + POLL_MAX;
                            }
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

    /// Cancels a statement of this sweeper, unless it is committing and waits for a synchronous standby:
    /// PostgreSQL would answer that wait with success.
    async fn cancel(&self, sql: &str) -> Result<()> {
        let cancel = "select pg_cancel_backend(pid) from pg_stat_activity \
                      where query = $1 and state = 'active' and wait_event is distinct from 'SyncRep'";
        let query = sqlx::query(cancel).bind(sql);
        if self.inner.execute(WHAT, query).await? > 0 {
            tracing::warn!(target: "hapax", week = %self.week, "a week cannot be dropped yet: a transaction that reads the ledger is open; the next sweep goes on");
        }
        Ok(())
    }

    async fn drop_table(&self) -> Result<Step> {
        let (s, mine, table) = (self.schema(), self.mine(), self.table());
        let mut tx = self.inner.begin().await?;
        execute(&mut tx, "set local lock_timeout = '2s'".into()).await?;
        let mine_still = format!(
            "select true from {s}.dropped where {mine} and phase = '{empty}' for update",
            empty = Phase::Empty.name()
        );
        if self.ask::<bool>(&mut tx, mine_still).await?.is_none() {
            return Ok(Step::Later); // another sweeper has dropped it
        }
        let there = format!(
            "select not exists (select from pg_inherits where inhrelid = c.oid) from pg_class c where c.oid = to_regclass('{table}')"
        );
        match self.ask::<bool>(&mut tx, there).await? {
            Some(true) => {
                execute(&mut tx, format!("lock table {table}")).await?;
                // Nothing can have been written to it. Even if an exported snapshot survived the
                // waits, no open row is lost.
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

/// The condition for rows that outlive a week when those that ended since a time do.
fn outlives(since: &str) -> String {
    format!("(state in {} or at >= {since})", open_states())
}

from_row! {
    struct Looked { rows: i64, matching: i64 }
}

/// How a step ended.
enum Step {
    /// The next step may follow.
    On,
    /// The drop has to wait, or another sweeper is working on it.
    Later,
    Gone(Gone),
}

/// An array of texts, as SQL.
fn sql_array(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| format!("'{}'", text.replace('\'', "''"))).collect();
    format!("array[{}]::text[]", quoted.join(", "))
}

/// Whether an error means that another session is working on the week or blocks it: the table is
/// gone or being detached, this session lost a deadlock, or a wait took too long.
fn is_anothers(error: &Error) -> bool {
    let code = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<sqlx::Error>())
        .and_then(|error| error.as_database_error())
        .and_then(|error| error.code().map(std::borrow::Cow::into_owned));
    matches!(error, Error::Schema(_) | Error::Contended { .. })
        || matches!(code.as_deref(), Some("55000" | "42P01" | "XX000"))
}
