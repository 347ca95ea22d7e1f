//! Keys of writes in PostgreSQL, 15 or newer.
//!
//! A request begins and ends by one call of a SQL function each (`functions/`): on its own for a
//! leased run, or in the caller's transaction, so that the key, the writes and the answer commit
//! together. A second request with the key finds the row of an open transaction locked, and answers
//! that it runs after a short wait. Nothing here needs a session.

#[cfg(feature = "axum")]
mod open;
mod schema;
mod seen;
mod sql;
mod sweep;
mod transaction;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _};

#[cfg(feature = "axum")]
pub(crate) use open::PgOpenKey;
pub use schema::{KEYS_ACCEPTS, KEYS_VERSION, keys_grants_sql, keys_schema_sql};
use sql::Sql;

use self::seen::Seen;
use super::database::{BEGIN_BRIEFLY, begin};
use super::error::{Meaning, meaning, shows_pooler, translate};
use super::executor::Repeat;
use super::schema::check_name;
use super::{BEGIN, Migrate, Pooling, connect, verify};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::keyed::{
    AfterFailure, Answer, Begin, Begun, Decided, Ended, IdempotencyKey, Kept, KeyEntry, KeyLease, KeyState,
    KeyStatus, KeySweep, Keys, KeysCapabilities, KeysInfo, ListKeys, Resolution, Resolved, SweptKeys,
    check_lease,
};
use crate::ledger::Token;

/// How long a request waits for an open transaction that holds its key.
const WAIT: &str = "100ms";
/// How long a connection may take to answer before it is used.
const SILENT: Duration = Duration::from_secs(5);
/// How often a request is begun again while its own first try, whose connection was lost, has it; and
/// the pause before each.
const UNDECIDED_MAX: u32 = 30;
const UNDECIDED_PAUSE: Duration = Duration::from_millis(20);

/// Settings of keys in PostgreSQL.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PgKeysSettings {
    /// The schema that holds them, alone or beside a ledger and a journal.
    pub schema: String,
    /// Whether to create or update their tables.
    pub migrate: Migrate,
    /// The maximum number of connections.
    pub pool_max: u32,
    /// How long to wait for a connection.
    pub acquire_timeout: Duration,
    /// Whether a transaction pooler is in front.
    pub pooling: Pooling,
    /// Whether to refuse a server that cannot keep the guarantees (no fsync, asynchronous commit,
    /// read-only, too old).
    pub refuse: bool,
}

impl Default for PgKeysSettings {
    fn default() -> Self {
        PgKeysSettings {
            schema: "hapax".into(),
            migrate: Migrate::Auto,
            pool_max: 20,
            acquire_timeout: Duration::from_secs(10),
            pooling: Pooling::Detect,
            refuse: true,
        }
    }
}

/// Keys in PostgreSQL. Clones share them.
///
/// ```no_run
/// use hapax::backend::postgres::{PgKeys, PgKeysSettings};
/// use hapax::keyed::{Answer, Begin, Begun};
///
/// # async fn order(url: &str, begin: Begin) -> Result<(), Box<dyn std::error::Error>> {
/// let keys = PgKeys::connect(url, PgKeysSettings::default()).await?;
/// let mut tx = keys.transaction().await?;
/// if let Begun::First(lease) = keys.begin_in(&mut tx, &begin).await? {
///     sqlx::query("insert into orders values (17, 7)").execute(&mut *tx).await?;
///     keys.finish_in(&mut tx, &lease, &Answer::new(201, "order 17")).await?;
///     tx.commit().await?; // the key, the row and the answer
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PgKeys(Arc<Inner>);

struct Inner {
    pool: PgPool,
    settings: PgKeysSettings,
    secret: [u8; 32],
    /// Whether every statement must run inside a transaction and must not be kept prepared.
    pooled: AtomicBool,
    /// Whether the server can limit how long a transaction takes.
    #[cfg_attr(not(feature = "axum"), allow(dead_code))]
    limits: bool,
    sql: Sql,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PgKeys").field("schema", &self.settings.schema).finish_non_exhaustive()
    }
}

impl PgKeys {
    /// Connects by URL, as [`PgLedger::connect`](super::PgLedger::connect) does.
    pub async fn connect(url: &str, settings: PgKeysSettings) -> Result<Self> {
        let pool = connect::open_pool("keys.url", url, settings.pool_max, settings.acquire_timeout).await?;
        PgKeys::with_pool(pool, settings).await
    }

    /// Uses a pool of your own, so that keys and rows share connections and transactions. Make it from
    /// [`pool_options`](super::pool_options): connections that do not answer are closed then.
    pub async fn with_pool(pool: PgPool, settings: PgKeysSettings) -> Result<Self> {
        check_name(&settings.schema)?;
        let secret = schema::prepare(&pool, &settings.schema, settings.migrate).await?;
        let pooled = match settings.pooling {
            Pooling::Session => false,
            Pooling::Transaction => true,
            Pooling::Detect => verify::is_pooled(&pool).await?,
        };
        if settings.refuse {
            let mut tx = begin(&pool, BEGIN).await.map_err(|e| fail("checking the server", e))?;
            verify::enforce(verify::check_server(&mut tx, pooled).await?)?;
        }
        let limits = verify::limits_transactions(&pool).await?;
        let sql = Sql::new(&settings.schema);
        let pooled = AtomicBool::new(pooled);
        Ok(PgKeys(Arc::new(Inner { pool, settings, secret, pooled, limits, sql })))
    }

    /// The pool it uses.
    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    /// The schema that holds them.
    pub fn schema(&self) -> &str {
        &self.0.settings.schema
    }

    /// Begins a transaction on its pool; see [`PgLedger::transaction`](super::PgLedger::transaction).
    pub async fn transaction(&self) -> Result<super::PgTx> {
        begin(&self.0.pool, "BEGIN").await.map_err(|e| fail("beginning a transaction", e))
    }
}

/// The error for the caller. `what` says what was being done.
fn fail(what: &str, error: sqlx::Error) -> Error {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    match code.as_deref() {
        Some("3F000" | "42P01" | "42883" | "42703") => Error::Schema(format!(
            "{} ({what}); are the keys' tables there? `hapax keys init` makes them, with the owner's role",
            error.as_database_error().map_or_else(String::new, |db| db.message().to_owned())
        )),
        Some("22023") => {
            Error::invalid("request", error.as_database_error().map_or("", |db| db.message()).to_owned())
        }
        // What a COMMIT would answer with a rollback that is not an error.
        Some("25P02") => Error::Refused {
            what: format!(
                "a statement of the transaction failed before, and nothing of it can be kept ({what})"
            ),
            source: Some(Box::new(error)),
        },
        _ => translate(what, error),
    }
}

/// What a statement returned.
struct Ran {
    rows: Vec<PgRow>,
    /// An earlier try's answer was lost.
    is_in_doubt: bool,
}

/// Whether a statement changed the row of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changed {
    Yes,
    No,
    /// Not now; an earlier try, whose answer was lost, may have.
    InDoubt,
}

type Statement<'q> = sqlx::query::Query<'q, Postgres, sqlx::postgres::PgArguments>;

impl Inner {
    fn pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed)
    }

    fn query(&self, sql: &Arc<str>) -> Statement<'static> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql))).persistent(!self.pooled())
    }

    /// Runs a statement that can be repeated, on its own; again if its answer was lost or others were
    /// in the way.
    async fn run(&self, what: &str, statement: impl Fn() -> Statement<'static>) -> Result<Vec<PgRow>> {
        self.run_seeing(&Seen::Nothing, what, statement).await
    }

    /// The same, for a statement that row security must let through.
    async fn run_seeing(
        &self,
        seen: &Seen,
        what: &str,
        statement: impl Fn() -> Statement<'static>,
    ) -> Result<Vec<PgRow>> {
        Ok(self.run_until(seen, what, statement, |_| true).await?.rows)
    }

    /// The same. If an answer was lost, the server may still be running the first try, and an answer
    /// about its locks decides nothing (`is_decided`): the statement is run again until the first
    /// try has ended.
    async fn run_until(
        &self,
        seen: &Seen,
        what: &str,
        statement: impl Fn() -> Statement<'static>,
        is_decided: impl Fn(&[PgRow]) -> bool,
    ) -> Result<Ran> {
        let (mut repeat, mut undecided, mut is_in_doubt) = (Repeat::statement(), 0, false);
        loop {
            let answer = if self.pooled() || *seen != Seen::Nothing {
                async {
                    // If this process stops in it, the server ends it: it has locked a key.
                    let mut tx = begin(&self.pool, BEGIN_BRIEFLY).await?;
                    seen.apply(&mut tx, self.pooled()).await?;
                    let rows = statement().fetch_all(&mut *tx).await?;
                    crate::crash_point!("keyed.statement.commit");
                    tx.commit().await.map(|()| rows)
                }
                .await
            } else {
                statement().fetch_all(&self.pool).await
            };
            let error = match answer {
                Ok(rows) if !is_in_doubt || is_decided(&rows) => return Ok(Ran { rows, is_in_doubt }),
                Ok(_) if undecided == UNDECIDED_MAX => {
                    let what =
                        format!("{what}: the connection was lost, and the first attempt is still running");
                    return Err(Error::Contended { what, source: None });
                }
                Ok(_) => {
                    undecided += 1;
                    tokio::time::sleep(UNDECIDED_PAUSE).await;
                    continue;
                }
                Err(error) => error,
            };
            is_in_doubt |= meaning(&error) == Meaning::Doubt;
            let again = matches!(meaning(&error), Meaning::Doubt | Meaning::Conflict);
            // A full pool is not a doubt: waiting again would only make it fuller.
            if !again || matches!(error, sqlx::Error::PoolTimedOut) || !repeat.again().await {
                return Err(fail(what, error));
            }
            self.note_pooler(&error);
        }
    }

    /// Notes what an error says of a pooler that is in front after all.
    fn note_pooler(&self, error: &sqlx::Error) {
        if shows_pooler(error) {
            self.pooled.store(true, Ordering::Relaxed);
        }
    }

    /// The error for the caller of a transaction that cannot be sent again here.
    fn noted(&self, what: &str, error: sqlx::Error) -> Error {
        self.note_pooler(&error);
        fail(what, error)
    }

    /// A statement that changes the row of a lease, or none: then it was lost, or an earlier try whose
    /// answer was lost has changed it. `bind` adds what comes after tenant, key and token.
    async fn change(
        &self,
        what: &str,
        sql: &Arc<str>,
        of: &KeyLease,
        bind: impl Fn(Statement<'static>) -> Statement<'static>,
    ) -> Result<Changed> {
        let sql: Arc<str> = format!("{sql} returning 1").into();
        let statement = || {
            let query = self.query(&sql).bind(of.tenant_text().to_owned()).bind(of.key.as_str().to_owned());
            bind(query.bind(of.token.0))
        };
        let ran = self.run_until(&Seen::tenant(of.tenant_text()), what, statement, |_| true).await?;
        Ok(match ran {
            Ran { rows, .. } if !rows.is_empty() => Changed::Yes,
            Ran { is_in_doubt: true, .. } => Changed::InDoubt,
            Ran { .. } => Changed::No,
        })
    }

    fn begin_statement(&self, begin: &Begin, wait: &str, leased: bool) -> Statement<'static> {
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX / 4);
        let hold = match begin.after_failure {
            AfterFailure::Rerun => Some(0),
            AfterFailure::Hold => None,
            AfterFailure::HoldFor(time) => Some(micros(time)),
        };
        self.query(&self.sql.begin)
            .bind(wait.to_owned())
            .bind(begin.tenant_text().to_owned())
            .bind(begin.key.as_str().to_owned())
            .bind(begin.fingerprint.whole.0.to_vec())
            .bind(begin.fingerprint.parts_text())
            .bind(begin.nonce.0)
            .bind(leased.then(|| micros(begin.lease)))
            .bind(hold)
    }

    fn finish_statement(&self, of: &KeyLease, answer: &Answer) -> Statement<'static> {
        self.query(&self.sql.finish)
            .bind(of.tenant_text().to_owned())
            .bind(of.key.as_str().to_owned())
            .bind(of.token.0)
            .bind(i32::from(answer.status))
            .bind(answer.headers_text())
            .bind(answer.body.to_vec())
    }
}

/// What `keys_begin` answered.
fn begun(begin: &Begin, row: &PgRow) -> Result<Begun> {
    let read = |e: sqlx::Error| fail("reading an answer about a key", e);
    let at = || row.try_get::<Option<i64>, _>(2).map(|at| at.map(Time::from_micros)).map_err(read);
    let time = || at().map(Option::unwrap_or_default);
    Ok(match row.try_get::<i32, _>(0).map_err(read)? {
        1 => Begun::First(KeyLease {
            tenant: begin.tenant.clone(),
            key: begin.key.clone(),
            token: Token(row.try_get(1).map_err(read)?),
        }),
        2 => Begun::Running { until: at()? },
        3 => {
            let parts: Option<String> = row.try_get(4).map_err(read)?;
            Begun::Done(Kept {
                answer: answer_of(row, 5)?,
                at: time()?,
                mine: row.try_get(3).map_err(read)?,
                parts: parts.unwrap_or_default(),
            })
        }
        4 => {
            let parts: Option<String> = row.try_get(4).map_err(read)?;
            Begun::Mismatch { differing: begin.fingerprint.differing(&parts.unwrap_or_default()) }
        }
        5 => Begun::Expired,
        6 => Begun::OutcomeUnknown { since: time()? },
        7 => Begun::Ahead { now: time()? },
        other => return Err(Error::Corrupt(format!("an answer of kind {other} about a key"))),
    })
}

/// The answer in three columns: status, headers, body.
fn answer_of(row: &PgRow, at: usize) -> Result<Answer> {
    let read = |e: sqlx::Error| fail("reading a stored answer", e);
    let status: Option<i32> = row.try_get(at).map_err(read)?;
    let headers: Option<String> = row.try_get(at + 1).map_err(read)?;
    let body: Option<Vec<u8>> = row.try_get(at + 2).map_err(read)?;
    Answer::stored(
        status.unwrap_or_default().into(),
        headers.as_deref().unwrap_or("[]"),
        body.unwrap_or_default(),
    )
}

/// A key as it is listed.
fn entry(row: &PgRow) -> Result<KeyEntry> {
    let read = |e: sqlx::Error| fail("listing keys", e);
    let time =
        |at: usize| row.try_get::<Option<i64>, _>(at).map(|at| at.map(Time::from_micros)).map_err(read);
    let text = |at: usize| row.try_get::<Option<String>, _>(at).map(Option::unwrap_or_default).map_err(read);
    let tenant = text(0)?;
    let status: Option<i32> = row.try_get(6).map_err(read)?;
    let resolved = match time(7)? {
        Some(at) => Some(Resolved { at, by: text(8)?, reason: text(9)? }),
        None => None,
    };
    Ok(KeyEntry {
        tenant: if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) },
        key: IdempotencyKey::new(text(1)?)?,
        state: KeyState::try_from(text(2)?.as_str())?,
        token: Token(row.try_get(3).map_err(read)?),
        begun_at: time(4)?.unwrap_or_default(),
        settled_at: time(5)?,
        status: status.and_then(|status| u16::try_from(status).ok()),
        resolved,
    })
}

impl PgKeys {
    /// What is committed about a key.
    async fn committed(&self, tenant: &str, key: &IdempotencyKey) -> Result<KeyStatus> {
        let what = "looking for a key";
        let statement =
            || self.0.query(&self.0.sql.get).bind(tenant.to_owned()).bind(key.as_str().to_owned());
        let rows = self.0.run_seeing(&Seen::tenant(tenant), what, statement).await?;
        let Some(row) = rows.first() else {
            // The horizon is read after the row was not found: a sweep raises it before it deletes.
            return Ok(crate::keyed::decide::missing(key, self.info().await?.horizon));
        };
        let read = |e: sqlx::Error| fail(what, e);
        let time = |at: usize| {
            row.try_get::<Option<i64>, _>(at)
                .map(|at| Time::from_micros(at.unwrap_or_default()))
                .map_err(read)
        };
        let label: String = row.try_get(0).map_err(read)?;
        Ok(match KeyState::try_from(label.as_str())? {
            KeyState::Done => KeyStatus::Done(Kept {
                answer: answer_of(row, 4)?,
                at: time(3)?,
                mine: false,
                parts: row.try_get(7).map_err(read)?,
            }),
            KeyState::Running => KeyStatus::Running { until: Some(time(1)?) },
            KeyState::OutcomeUnknown => KeyStatus::OutcomeUnknown { since: time(2)? },
            KeyState::Free => KeyStatus::Free,
        })
    }
}

#[async_trait]
impl Keys for PgKeys {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        begin.check()?;
        let statement = || self.0.begin_statement(begin, WAIT, true);
        // Running, without an end: an open transaction has it, and that may be our own first try.
        let is_decided = |rows: &[PgRow]| {
            !rows
                .first()
                .map(|row| begun(begin, row))
                .is_some_and(|answer| matches!(answer, Ok(Begun::Running { until: None })))
        };
        let ran = self.0.run_until(&Seen::Nothing, "beginning a request", statement, is_decided).await?;
        let row = ran.rows.first().ok_or_else(|| Error::Corrupt("no answer about a key".into()))?;
        begun(begin, row)
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        check_lease(lease)?;
        let us = i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
        match self.0.change("extending a lease", &self.0.sql.extend, of, |query| query.bind(us)).await? {
            Changed::Yes => Ok(()),
            Changed::No | Changed::InDoubt => Err(of.fenced()),
        }
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        answer.check()?;
        let rows = self.0.run("storing an answer", || self.0.finish_statement(of, answer)).await?;
        let stored = rows.first().is_some_and(|row| row.try_get(0).unwrap_or(false));
        if stored { Ok(()) } else { Err(of.fenced()) }
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        let undone = ended == Ended::Undone;
        match self.0.change("releasing a key", &self.0.sql.release, of, |query| query.bind(undone)).await? {
            // In doubt: by whom the lease was ended is not known, and that it has ended is what was asked.
            Changed::Yes | Changed::InDoubt => Ok(()),
            Changed::No => Err(of.fenced()),
        }
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        let of = tenant.map_or("", Tenant::as_str);
        match self.committed(of, key).await? {
            KeyStatus::Unknown | KeyStatus::Free | KeyStatus::Expired => {}
            known => return Ok(known),
        }
        let what = "looking for the transaction of a key";
        let rows = self.0.run(what, || {
            self.0.query(&self.0.sql.is_open).bind(of.to_owned()).bind(key.as_str().to_owned())
        });
        let is_open = rows.await?.first().is_some_and(|row| row.try_get(0).unwrap_or(false));
        if is_open {
            return Ok(KeyStatus::Running { until: None });
        }
        // A server shows what a transaction has committed before it lets its locks go.
        self.committed(of, key).await
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        let what = "deciding about a key";
        who.check()?;
        let decided = |query: Statement<'static>| query.bind(who.by.clone()).bind(who.reason.clone());
        let changed = match how {
            Resolution::Rerun => self.0.change(what, &self.0.sql.rerun, of, decided).await?,
            Resolution::Answer(answer) => {
                answer.check()?;
                let answered = |query| {
                    let query = decided(query).bind(i32::from(answer.status)).bind(answer.headers_text());
                    query.bind(answer.body.to_vec())
                };
                self.0.change(what, &self.0.sql.answer, of, answered).await?
            }
        };
        if changed == Changed::Yes {
            return Ok(());
        }
        let found = self.entry(of.tenant.as_ref(), &of.key).await?;
        // Under another token, this very decision is that of the try whose answer was lost.
        let is_ours = |entry: &KeyEntry| {
            let decided = entry.resolved.as_ref();
            entry.token > of.token && decided.is_some_and(|by| by.by == who.by && by.reason == who.reason)
        };
        if changed == Changed::InDoubt && found.as_ref().is_some_and(is_ours) {
            return Ok(());
        }
        Err(of.not_unknown(&match found {
            Some(found) => format!("it is {} under token {}", found.state, found.token),
            None => "there is no such key".to_owned(),
        }))
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        let (of, name) = (tenant.map_or("", Tenant::as_str).to_owned(), key.as_str().to_owned());
        let statement = || self.0.query(&self.0.sql.entry).bind(of.clone()).bind(name.clone());
        let rows = self.0.run_seeing(&Seen::tenant(&of), "looking for a key", statement).await?;
        rows.first().map(entry).transpose()
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        let text = |tenant: &Option<Tenant>| tenant.as_ref().map_or("", Tenant::as_str).to_owned();
        let seen = Seen::by(&self.0, which.tenant_text()).await?;
        let rows = self
            .0
            .run_seeing(&seen, "listing keys", || {
                self.0
                    .query(&self.0.sql.list)
                    .bind(which.tenant_text().map(str::to_owned))
                    .bind(which.open_only)
                    .bind(which.after.as_ref().map(|(tenant, _)| text(tenant)))
                    .bind(which.after.as_ref().map(|(_, key)| key.as_str().to_owned()))
                    .bind(i64::try_from(which.limit()).unwrap_or(i64::MAX))
            })
            .await?;
        rows.iter().map(entry).collect()
    }

    async fn sweep(&self, settings: &KeySweep) -> Result<SweptKeys> {
        sweep::sweep(&self.0, settings).await
    }

    async fn info(&self) -> Result<KeysInfo> {
        let what = "reading the clock of the keys";
        let rows = self.0.run(what, || self.0.query(&self.0.sql.info)).await?;
        let row = rows.first().ok_or_else(|| Error::Corrupt("keys_meta is empty".into()))?;
        let time = |at: usize| row.try_get::<Option<i64>, _>(at).map_err(|e| fail(what, e));
        Ok(KeysInfo {
            now: Time::from_micros(time(0)?.unwrap_or_default()),
            horizon: time(1)?.map(Time::from_micros),
            swept_at: time(2)?.map(Time::from_micros),
        })
    }

    fn secret(&self) -> &[u8; 32] {
        &self.0.secret
    }

    fn capabilities(&self) -> KeysCapabilities {
        KeysCapabilities { backend: "postgres", durable: true, shared: true, transactional: true }
    }
}
