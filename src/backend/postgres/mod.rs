//! A ledger in PostgreSQL, 15 or newer.
//!
//! Claims and settlings are SQL functions in the ledger's own schema (`functions/`). So a batch is
//! one statement, and any language can claim in its own transaction. This module sends batches to
//! them and reads the answers. It only keeps state that it can read again: scope numbers, and which
//! weeks exist.

pub mod access;
pub mod cdc;
mod claim;
mod codes;
mod connect;
mod database;
mod epoch;
mod erase;
mod error;
mod executor;
mod held;
pub mod journal;
pub mod keys;
mod lone;
mod part;
mod processed;
mod read;
pub mod records;
mod schema;
mod settle;
mod skips;
mod sweep;
mod sweep_state;
mod transaction;
mod verify;
mod week;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgPool, Postgres};

pub use crate::backend::Migrate;
/// The driver that transactions and pools come from, in the version that hapax was built with.
pub use sqlx;

/// An open transaction, as transactional handlers receive it.
pub type PgTx = sqlx::PgTransaction<'static>;

pub use access::{PgAccess, PgAccessSettings};
pub use cdc::PgCdc;
pub(crate) use connect::open_pool;
pub use connect::pool_options;
pub use erase::PgEraser;
pub use journal::{PgJournal, PgJournalSettings};
pub use keys::{PgKeys, PgKeysSettings};
pub use processed::{PgProcessed, ProcessedColumns, ProcessedQuery, ProcessedRow};
pub use records::{PgModules, PgRecords, PgRecordsSettings, PgSnapshot, check_keys, refuse_bypass};
pub use schema::{ACCEPTS, VERSION, grants_sql, schema_sql};

use self::codes::{from_row, tenant_text};
use self::database::{BEGIN, Database, Decoded, Select, begin};
use self::executor::Executor;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{EventId, Scope, Tenant, Topic};
use crate::ledger::{
    Audit, Capabilities, Claim, Claims, ConsumerStore, Cursor, Due, Entry, Epoch, Extend, Filter, Finding,
    HeldQuery, Identity, Intervene, Intervened, Logged, Marker, MismatchRule, Operations, Outcome, Page,
    PreventedDays, PublishedDead, Settings, Settle, Settled, SkipBatch, Stat, SweepSettings, Swept, Week,
};
pub(in crate::backend) use error::translate;
pub(in crate::backend) use schema::check_name;

/// Whether a transaction pooler, which may switch servers between transactions, is in front of the
/// database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pooling {
    /// Detect it when the ledger is opened.
    #[default]
    Detect,
    /// Connections are sessions: prepared statements are kept.
    Session,
    /// Nothing outlives a transaction: every statement runs inside one and is prepared anew. Gives
    /// up: some speed.
    Transaction,
}

/// Settings of a PostgreSQL ledger.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PgSettings {
    /// Settings that all ledgers share.
    pub ledger: Settings,
    /// The schema that holds it.
    pub schema: String,
    /// Whether to create or update the schema.
    pub migrate: Migrate,
    /// The maximum number of connections.
    pub pool_max: u32,
    /// How long to wait for a connection.
    pub acquire_timeout: Duration,
    /// Whether a transaction pooler is in front.
    pub pooling: Pooling,
    /// Whether to refuse a server that cannot keep the guarantees (no fsync, asynchronous commit,
    /// read-only, too old). Set it to false only to inspect a ledger.
    pub refuse: bool,
    /// How long one sweep waits for other transactions that are older than the closing of a week.
    /// The next sweep continues with those still open. Claims wait for none of it.
    pub sweep_patience: Duration,
}

impl Default for PgSettings {
    fn default() -> Self {
        PgSettings {
            ledger: Settings::default(),
            schema: "hapax".into(),
            migrate: Migrate::Auto,
            pool_max: 50,
            acquire_timeout: Duration::from_secs(10),
            pooling: Pooling::Detect,
            refuse: true,
            sweep_patience: Duration::from_secs(30),
        }
    }
}

impl From<Settings> for PgSettings {
    fn from(ledger: Settings) -> Self {
        PgSettings { ledger, ..PgSettings::default() }
    }
}

/// A ledger in PostgreSQL. Clones share it.
#[derive(Debug, Clone)]
pub struct PgLedger(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    database: Database,
    settings: PgSettings,
    sql: Sql,
    owner: Option<i32>,
    /// Whether the server can limit how long a transaction takes (`transaction_timeout`).
    limits_transactions: bool,
    scopes: RwLock<HashMap<(Option<Tenant>, Scope), i32>>,
    weeks: RwLock<HashSet<Week>>,
    /// Whether this process takes leases. The weeks it makes then leave room for settling them.
    leases: AtomicBool,
    /// How many batches in a row had no repeat in them.
    clean: AtomicU32,
}

/// Statements with the schema's name in them.
#[derive(Debug)]
struct Sql {
    claim_batch: Arc<str>,
    claim_each: Arc<str>,
    lone: Arc<str>,
    settle_done: Arc<str>,
    settle_each: Arc<str>,
    extend: Arc<str>,
    scope: Arc<str>,
    known: Arc<str>,
}

impl Sql {
    fn new(schema: &str) -> Self {
        let sql = |text: &str| -> Arc<str> { text.replace("{s}", schema).into() };
        Sql {
            claim_batch: sql(
                "select * from {s}.claim_batch($1, $2, $3, $4, $5, $6, $7, $8, $9::text[]::jsonb[], $10, \
                 $11::text::\"char\", $12, $13, $14, $15, $16, $17, $18, $19)",
            ),
            lone: sql(lone::SQL),
            claim_each: sql(
                "select * from {s}.claim_each($1, $2, $3, $4, $5, $6, $7, $8, $9::text[]::jsonb[], $10, $11, $12, \
                 $13::text::\"char\", $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, \
                 $26, $27, $28, $29, $30, $31, $32, $33)",
            ),
            settle_done: sql(
                "select * from {s}.settle_done($1, $2, $3, $4, $5::text[]::jsonb[], $6, $7::text::\"char\", \
                 $8::text::\"char\")",
            ),
            settle_each: sql(
                "select * from {s}.settle_each($1, $2, $3, $4, $5, $6, $7, $8, $9::text[]::jsonb[], $10, $11, $12, $13, \
                 $14, $15, $16, $17, $18, $19)",
            ),
            extend: sql("select * from {s}.extend_batch($1, $2, $3, $4, $5)"),
            scope: sql("select o_number, o_fresh from {s}.scope_number($1, $2)"),
            known: sql("select * from {s}.known($1, $2, $3)"),
        }
    }
}

impl PgLedger {
    /// Connects by URL (`postgres://user:password@host:port/database?sslmode=verify-full&sslrootcert=ca.pem`).
    ///
    /// Connections to other hosts use verified TLS, unless the URL sets `sslmode`.
    pub async fn connect(url: &str, settings: impl Into<PgSettings>) -> Result<Self> {
        let settings = settings.into();
        let pool = connect::open_pool("ledger.url", url, settings.pool_max, settings.acquire_timeout).await?;
        PgLedger::with_pool(pool, settings).await
    }

    /// Uses a pool of your own, so that claims and effects share connections and transactions.
    pub async fn with_pool(pool: PgPool, settings: impl Into<PgSettings>) -> Result<Self> {
        error::reword_errors();
        let settings = settings.into();
        schema::check_name(&settings.schema)?;
        schema::prepare(&pool, &settings.schema, settings.migrate, settings.ledger.identity).await?;
        let database = Database::new(pool.clone(), settings.pooling).await?;
        let limits_transactions = verify::limits_transactions(&pool).await?;
        let sql = Sql::new(&settings.schema);
        let mut inner = Inner {
            database,
            sql,
            owner: None,
            limits_transactions,
            scopes: RwLock::default(),
            weeks: RwLock::default(),
            leases: AtomicBool::new(false),
            clean: AtomicU32::new(0),
            settings,
        };
        if inner.settings.refuse {
            verify::enforce(verify::check(&inner).await?)?; // before anything is written
        }
        if let Some(owner) = &inner.settings.ledger.owner {
            let sql = format!("select {}.owner_number($1)", inner.settings.schema);
            let query = || sqlx::query_as(AssertSqlSafe(sql.clone())).bind(owner.as_str());
            let (number,) =
                Executor::new(&inner.database).run_one("registering the owner's name", query).await?;
            inner.owner = number;
        }
        Ok(PgLedger(Arc::new(inner)))
    }

    /// The pool it uses.
    pub fn pool(&self) -> &PgPool {
        self.0.database.pool()
    }

    /// Begins a transaction on its pool, for your effects and claims. Use this rather than
    /// `pool().begin()`: if the caller is cancelled (a client hung up, a timeout), no open
    /// transaction remains in the pool.
    pub async fn transaction(&self) -> Result<PgTx> {
        begin(self.pool(), "BEGIN").await.map_err(|e| translate("beginning a transaction", e))
    }

    /// The schema that holds it.
    pub fn schema(&self) -> &str {
        &self.0.settings.schema
    }

    /// Sweeps, but stops after `steps` steps of each week's drop, as if killed there.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub async fn sweep_part(&self, settings: SweepSettings, steps: u32) -> Result<Swept> {
        sweep::sweep(&self.0, settings, steps).await
    }
}

impl Inner {
    async fn begin(&self) -> Result<PgTx> {
        begin(self.database.pool(), BEGIN).await.map_err(|e| translate("opening a transaction", e))
    }

    /// Runs one query in a transaction of its own. `what` says what is being done.
    async fn fetch_all<T: Decoded>(&self, what: &str, query: Select<'_, T>) -> Result<Vec<T>> {
        let mut tx = self.begin().await?;
        query.persistent(false).fetch_all(&mut *tx).await.map_err(|e| translate(what, e))
    }

    /// The same, for a query that has exactly one row.
    async fn fetch_one<T: Decoded>(&self, what: &str, query: Select<'_, T>) -> Result<T> {
        let mut rows = self.fetch_all(what, query).await?;
        rows.pop().ok_or_else(|| Error::Corrupt(format!("{what}: the server returned no row")))
    }

    /// Runs one statement in a transaction of its own and commits it. Returns how many rows it
    /// changed.
    async fn execute(&self, what: &str, query: Query<'_, Postgres, PgArguments>) -> Result<u64> {
        let mut tx = self.begin().await?;
        let done = query.persistent(false).execute(&mut *tx).await.map_err(|e| translate(what, e))?;
        tx.commit().await.map_err(|e| translate(what, e))?;
        Ok(done.rows_affected())
    }

    fn checks_fingerprints(&self) -> bool {
        self.settings.ledger.mismatch == MismatchRule::Error
    }

    /// The number of (tenant, scope), if it is known to be committed.
    fn known_scope(&self, identity: &Identity) -> Option<i32> {
        let scopes = self.scopes.read().unwrap_or_else(PoisonError::into_inner);
        // A tuple key cannot be looked up by reference; cloning two Arcs is cheaper than hashing
        // twice.
        scopes.get(&(identity.tenant.clone(), identity.scope.clone())).copied()
    }

    fn remember_scope(&self, identity: &Identity, number: i32) {
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        if scopes.len() >= 100_000 {
            scopes.clear(); // scopes are few; a hostile flood of them must not fill memory
        }
        scopes.insert((identity.tenant.clone(), identity.scope.clone()), number);
    }

    /// The number of (tenant, scope), registered in a transaction of its own.
    async fn scope(&self, identity: &Identity) -> Result<i32> {
        if let Some(number) = self.known_scope(identity) {
            return Ok(number);
        }
        let query = || self.scope_query(identity);
        let number = Executor::new(&self.database).run_one("registering a scope", query).await?.number;
        self.remember_scope(identity, number);
        Ok(number)
    }

    /// The number of (tenant, scope); makes the week if it is missing. The week comes first, so
    /// that an invalid claim registers no scope.
    async fn place(&self, identity: &Identity, week: Week, leased: bool) -> Result<i32> {
        let known = read::scope(self, identity).await?;
        // A scope that does not exist yet is newer than every drop.
        self.ensure_week(week, known.unwrap_or(i32::MAX), leased, identity.tenant.as_ref()).await?;
        match known {
            Some(scope) => Ok(scope),
            None => self.scope(identity).await,
        }
    }

    /// Registers (tenant, scope), if necessary.
    fn scope_query<'q>(&self, identity: &'q Identity) -> Select<'q, Registered> {
        sqlx::query_as(AssertSqlSafe(Arc::clone(&self.sql.scope)))
            .bind(tenant_text(identity.tenant.as_ref()))
            .bind(identity.scope.as_str())
    }

    fn knows_week(&self, week: Week) -> bool {
        week.is_timeless() || self.weeks.read().unwrap_or_else(PoisonError::into_inner).contains(&week)
    }

    fn remember_week(&self, week: Week) {
        self.weeks.write().unwrap_or_else(PoisonError::into_inner).insert(week);
    }

    fn forget_weeks(&self) {
        self.weeks.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Makes the week of an entry, in its own transaction. Does nothing if the week was dropped and
    /// the scope is older than the drop; the claim then reports that.
    async fn ensure_week(&self, week: Week, scope: i32, leased: bool, tenant: Option<&Tenant>) -> Result<()> {
        if self.knows_week(week) {
            return Ok(());
        }
        let sql = format!(
            "select case when exists (select from {s}.dropped where week = $1 and (scope_max >= $2 or $2 = any (scopes_late))) then null \
             else {s}.make_week($1, $3, $4, $5, $6) end",
            s = self.settings.schema
        );
        let (days_ahead, weeks_max) = self.week_limits();
        let query = || {
            sqlx::query_as::<_, (Option<bool>,)>(AssertSqlSafe(sql.clone()))
                .bind(week.number())
                .bind(scope)
                .bind(days_ahead)
                .bind(weeks_max)
                .bind(leased)
                .bind(tenant.map(Tenant::as_str))
        };
        let made = Executor::new(&self.database).run_one("making a week", query).await;
        made.map_err(|error| match error {
            Error::Invalid { problem, .. } => Error::invalid("event id", problem),
            error => error,
        })?;
        // Made or barred, claims on it can be answered. If the week is missing for a newer scope,
        // its claim finds out and clears this cache.
        self.remember_week(week);
        Ok(())
    }

    /// How many days ahead a week may be made, and how many weeks there may be.
    fn week_limits(&self) -> (i32, i32) {
        let ledger = &self.settings.ledger;
        let days_ahead = i32::try_from(ledger.weeks_ahead.as_secs() / 86_400).unwrap_or(i32::MAX);
        (days_ahead, i32::try_from(ledger.weeks_max).unwrap_or(i32::MAX))
    }
}

from_row! { "o_",
    /// The number of a scope.
    struct Registered {
        number: i32,
        /// Whether this transaction registered it.
        fresh: bool,
    }
}

#[async_trait]
impl Claims for PgLedger {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        claim::claim(&self.0, claims).await
    }

    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        settle::settle(&self.0, &mut Executor::new(&self.0.database), settles).await
    }

    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        settle::extend(&self.0, extends).await
    }

    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        read::get(&self.0, identity, time).await
    }

    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        read::known(&self.0, identities).await
    }

    async fn now(&self) -> Result<Time> {
        read::now(&self.0).await
    }

    async fn probe(&self) -> Result<()> {
        read::probe(&self.0).await
    }

    async fn epoch(&self) -> Result<Epoch> {
        epoch::read(&self.0).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { backend: "postgres", durable: true, shared: true, transactional: true, skips: true }
    }

    fn settings(&self) -> &Settings {
        &self.0.settings.ledger
    }

    fn parallel_batches(&self) -> usize {
        // Two running statements keep the server busy while the answers of a third are distributed
        // and its next claims gathered. More would only make batches smaller.
        3.min(self.pool().options().get_max_connections() as usize).max(1)
    }
}

#[async_trait]
impl ConsumerStore for PgLedger {
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        held::due(&self.0, scope, query, limit).await
    }

    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        held::unpublished_dead(&self.0, scope, query, limit, reserve).await
    }

    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        held::mark_dead_published(&self.0, entries).await
    }

    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        held::set_markers(&self.0, scope, markers).await
    }

    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        held::markers(&self.0, scope, topic, partitions).await
    }
}

#[async_trait]
impl Operations for PgLedger {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        read::list(&self.0, filter, after, limit).await
    }

    async fn stat(&self) -> Result<Stat> {
        read::stat(&self.0).await
    }

    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        read::scopes(&self.0).await
    }

    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        settle::intervene(&self.0, intervene).await
    }

    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        read::audit(&self.0, None, limit).await
    }

    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        read::audit(&self.0, Some(entries), limit).await
    }

    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        let swept = sweep::sweep(&self.0, settings, u32::MAX).await?;
        if !settings.dry_run {
            skips::sweep(&self.0).await?;
        }
        Ok(swept)
    }

    async fn make_ahead(&self) -> Result<()> {
        let now = read::now(&self.0).await?;
        for ahead in [0, 7] {
            // A scope that does not exist yet is newer than every drop.
            let week = Week::of(now.plus(Duration::from_secs(ahead * 86_400)));
            self.0.ensure_week(week, i32::MAX, self.0.leases.load(Ordering::Relaxed), None).await?;
        }
        Ok(())
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        verify::check(&self.0).await
    }

    async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
        skips::note(&self.0, batch).await
    }

    async fn skips(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
        skips::of(&self.0, tenant, ids).await
    }

    async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
        skips::prevented(&self.0, since_day).await
    }
}
