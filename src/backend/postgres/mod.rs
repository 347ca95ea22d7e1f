//! A ledger in PostgreSQL, 15 or newer.
//!
//! Claims and settlings are SQL functions in the ledger's own schema (`migrations/`). So a batch is
//! one statement, and any language can claim in its own transaction. This module sends batches to
//! them and reads the answers. It only keeps state that it can read again: scope numbers, and which
//! weeks exist.

mod begin;
mod claim;
mod connect;
mod epoch;
mod error;
mod held;
pub mod journal;
pub mod keys;
mod lone;
mod pace;
mod read;
mod schema;
mod settle;
mod sweep;
mod transaction;
mod verify;
mod week;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgPool};

pub use crate::backend::Migrate;
/// The driver that transactions and pools come from, in the version that hapax was built with.
pub use sqlx;

/// An open transaction, as transactional handlers receive it.
pub type PgTx = sqlx::PgTransaction<'static>;

pub use journal::{PgJournal, PgJournalSettings};
pub use keys::{PgKeys, PgKeysSettings};
pub use schema::{ACCEPTS, VERSION, grants_sql, schema_sql};

use self::begin::begin;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Scope, Tenant, Topic};
use crate::ledger::{
    Audit, Capabilities, Claim, Cursor, Due, Entry, Epoch, Extend, Filter, Finding, Identity, Intervene,
    Intervened, Ledger, Marker, Outcome, Page, PublishedDead, Settings, Settle, Settled, Share, Stat,
    SweepSettings, Swept, Week,
};
pub(in crate::backend) use error::{told, translate};
pub(in crate::backend) use schema::check_name;

use error::{Meaning, meaning};

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

/// Begins a transaction of hapax's own. Names in it resolve to PostgreSQL's built-ins, not to
/// objects that someone put into a schema of the session's search path. Functions that run in a
/// caller's transaction set their own search path.
pub(in crate::backend) const BEGIN: &str = "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp";

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
    pool: PgPool,
    settings: PgSettings,
    /// Whether every statement must run inside a transaction and must not be kept prepared.
    pooled: AtomicBool,
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
        let settings = settings.into();
        schema::check_name(&settings.schema)?;
        schema::prepare(&pool, &settings.schema, settings.migrate, settings.ledger.identity).await?;
        let pooled = match settings.pooling {
            Pooling::Session => false,
            Pooling::Transaction => true,
            Pooling::Detect => verify::is_pooled(&pool).await?,
        };
        let limits_transactions = verify::limits_transactions(&pool).await?;
        let sql = Sql::new(&settings.schema);
        let mut inner = Inner {
            pool,
            pooled: AtomicBool::new(pooled),
            sql,
            owner: None,
            limits_transactions,
            scopes: RwLock::default(),
            weeks: RwLock::default(),
            leases: AtomicBool::new(false),
            clean: AtomicU32::new(0),
            settings,
        };
        if let Some(owner) = &inner.settings.ledger.owner {
            let sql = format!("select {}.owner_number($1)", inner.settings.schema);
            let mut tx = inner.begin().await?;
            let number = sqlx::query_scalar(AssertSqlSafe(sql))
                .persistent(false)
                .bind(owner.as_str())
                .fetch_one(&mut *tx)
                .await
                .map_err(|e| translate("registering the owner's name", e))?;
            tx.commit().await.map_err(|e| translate("registering the owner's name", e))?;
            inner.owner = number;
        }
        if inner.settings.refuse {
            verify::enforce(verify::check(&inner).await?)?;
        }
        Ok(PgLedger(Arc::new(inner)))
    }

    /// The pool it uses.
    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    /// Begins a transaction on its pool, for your effects and claims. Use this rather than
    /// `pool().begin()`: if the caller is cancelled (a client hung up, a timeout), no open
    /// transaction remains in the pool.
    pub async fn transaction(&self) -> Result<PgTx> {
        begin(&self.0.pool, "BEGIN").await.map_err(|e| translate("beginning a transaction", e))
    }

    /// The schema that holds it.
    pub fn schema(&self) -> &str {
        &self.0.settings.schema
    }

    /// Sweeps, but stops after `steps` steps of each week's drop, as if killed there.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub async fn sweep_part(&self, terms: SweepSettings, steps: u32) -> Result<Swept> {
        sweep::sweep(&self.0, terms, steps).await
    }
}

impl Inner {
    fn pooled(&self) -> bool {
        self.pooled.load(Ordering::Relaxed)
    }

    /// The server does not know a prepared statement, or already knows a new one: it changed under
    /// the connection. So a pooler that was not detected at start-up is in front.
    fn note_pooler(&self, error: &sqlx::Error) {
        let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
        if matches!(code.as_deref(), Some("26000" | "42P05")) && !self.pooled.swap(true, Ordering::Relaxed) {
            tracing::warn!(target: "hapax", "a transaction pooler is in front of PostgreSQL: statements are no longer kept");
        }
    }

    async fn begin(&self) -> Result<sqlx::PgTransaction<'static>> {
        begin(&self.pool, BEGIN).await.map_err(|e| translate("opening a transaction", e))
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
        let mut tries = 0;
        let number = loop {
            let mut tx = self.begin().await?;
            let got = match self.scope_in(&mut tx, identity).await {
                Ok((number, _)) => tx.commit().await.map(|()| number),
                Err(error) => Err(error),
            };
            match got {
                Ok(number) => break number,
                Err(error)
                    if tries < 5 && matches!(meaning(&error), Meaning::Serialization | Meaning::Doubt) =>
                {
                    tries += 1;
                }
                Err(error) => return Err(translate("registering a scope", error)),
            }
        };
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

    async fn scope_in(&self, tx: &mut sqlx::PgConnection, identity: &Identity) -> sqlx::Result<(i32, bool)> {
        let tenant = identity.tenant.as_ref().map_or("", Tenant::as_str);
        sqlx::query_as(AssertSqlSafe(Arc::clone(&self.sql.scope)))
            .persistent(!self.pooled())
            .bind(tenant)
            .bind(identity.scope.as_str())
            .fetch_one(tx)
            .await
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
        let ledger = &self.settings.ledger;
        let sql = format!(
            "select case when exists (select from {s}.dropped where week = $1 and scope_max >= $2) then null \
             else {s}.make_week($1, $3, $4, $5, $6) end",
            s = self.settings.schema
        );
        let mut tries = 0;
        loop {
            let mut tx = self.begin().await?;
            let made: sqlx::Result<Option<bool>> = sqlx::query_scalar(AssertSqlSafe(sql.clone()))
                .persistent(false)
                .bind(week.number())
                .bind(scope)
                .bind(i32::try_from(ledger.weeks_ahead.as_secs() / 86_400).unwrap_or(i32::MAX))
                .bind(i32::try_from(ledger.weeks_max).unwrap_or(i32::MAX))
                .bind(leased)
                .bind(tenant.map(Tenant::as_str))
                .fetch_one(&mut *tx)
                .await;
            let made = match made {
                Ok(made) => tx.commit().await.map(|()| made),
                Err(error) => Err(error),
            };
            match made {
                // Made or barred, claims on it can be answered. If the week is missing for a newer
                // scope, its claim finds out and clears this cache.
                Ok(_) => {
                    self.remember_week(week);
                    return Ok(());
                }
                Err(error) if meaning(&error) == Meaning::Data => {
                    let text =
                        error.as_database_error().map_or_else(String::new, |db| db.message().to_owned());
                    return Err(Error::invalid("event id", text));
                }
                Err(error)
                    if tries < 5 && matches!(meaning(&error), Meaning::Serialization | Meaning::Doubt) =>
                {
                    tries += 1;
                }
                Err(error) => return Err(translate("making a week", error)),
            }
        }
    }
}

#[async_trait]
impl Ledger for PgLedger {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        claim::claim(&self.0, claims).await
    }

    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        settle::settle(&self.0, settles).await
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

    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        read::list(&self.0, filter, after, limit).await
    }

    async fn due(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Due> {
        held::due(&self.0, scope, share, limit).await
    }

    async fn unpublished_dead(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Vec<Entry>> {
        held::unpublished_dead(&self.0, scope, share, limit).await
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

    async fn stat(&self) -> Result<Stat> {
        read::stat(&self.0).await
    }

    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        settle::intervene(&self.0, intervene).await
    }

    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        read::audit(&self.0, limit).await
    }

    async fn sweep(&self, terms: SweepSettings) -> Result<Swept> {
        sweep::sweep(&self.0, terms, u32::MAX).await
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

    async fn now(&self) -> Result<Time> {
        read::now(&self.0).await
    }

    async fn epoch(&self) -> Result<Epoch> {
        epoch::read(&self.0).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { backend: "postgres", durable: true, shared: true, transactional: true }
    }

    fn settings(&self) -> &Settings {
        &self.0.settings.ledger
    }

    fn parallel_batches(&self) -> usize {
        // Two running statements keep the server busy while the answers of a third are distributed
        // and its next claims gathered. More would only make batches smaller.
        3.min(self.0.pool.options().get_max_connections() as usize).max(1)
    }
}
