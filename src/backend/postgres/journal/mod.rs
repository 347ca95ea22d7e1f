//! A journal in PostgreSQL, 15 or newer.
//!
//! An append is one call of a SQL function (`migrations/`): it locks the head of the aggregate,
//! checks, numbers and stores. The position is drawn inside the INSERT, so a transaction that has
//! drawn one holds a write lock on the journal's table. Positions are drawn in one order and
//! committed in another. `read` returns the part without holes; at a hole it looks for the
//! transactions that could still fill it, and readers wait for no others.
//!
//! Nothing here needs a session. An append sends one merged NOTIFY after its commit, never in it.
//! Readers listen on their own connection, and poll where a pooler is in front.

mod anchor;
mod append;
mod read;
mod relay;
mod schema;
mod sweep;
mod wake;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgPool, PgTransaction, Postgres};

pub use schema::{JOURNAL_ACCEPTS, JOURNAL_VERSION, journal_grants_sql, journal_schema_sql};

use super::database::{BEGIN, Database, Decoded, Select, begin};
use super::error::{missing, translate};
use super::schema::check_name;
use super::{Migrate, Pooling, connect, verify};
use crate::clock::Time;
use crate::crash_point::mutant;
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::journal::{
    Append, Appended, Checkpoint, Journal, JournalCapabilities, JournalSettings, JournalStat, JournalSweep,
    Leadership, Page, Position, ReadBatch, RelayState, RelayStore, Stored,
};
use crate::ledger::Token;

/// Settings of a PostgreSQL journal.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PgJournalSettings {
    /// Settings that all journals share.
    pub journal: JournalSettings,
    /// The schema that holds it, alone or beside a ledger.
    pub schema: String,
    /// Whether to create or update its tables.
    pub migrate: Migrate,
    /// The maximum number of connections; one more listens while a reader waits for events.
    pub pool_max: u32,
    /// How long to wait for a connection.
    pub acquire_timeout: Duration,
    /// Whether a transaction pooler is in front.
    pub pooling: Pooling,
    /// The longest interval at which a waiting reader polls. It notices the commit of an
    /// `append_in` with up to this delay, unless the caller calls [`wake`](PgJournal::wake).
    pub poll_max: Duration,
    /// Whether to refuse a server that cannot keep the guarantees (no fsync, asynchronous commit,
    /// read-only, too old). Set it to false only to inspect a journal.
    pub refuse: bool,
}

impl Default for PgJournalSettings {
    fn default() -> Self {
        PgJournalSettings {
            journal: JournalSettings::default(),
            schema: "hapax".into(),
            migrate: Migrate::Auto,
            pool_max: 20,
            acquire_timeout: Duration::from_secs(10),
            pooling: Pooling::Detect,
            poll_max: Duration::from_millis(100),
            refuse: true,
        }
    }
}

impl From<JournalSettings> for PgJournalSettings {
    fn from(journal: JournalSettings) -> Self {
        PgJournalSettings { journal, ..PgJournalSettings::default() }
    }
}

/// A journal in PostgreSQL. Clones share it.
///
/// ```no_run
/// use hapax::backend::postgres::{PgJournal, PgJournalSettings};
/// use hapax::journal::{Append, Expected};
/// use hapax::{Aggregate, Event, EventId};
///
/// # async fn order(url: &str) -> Result<(), Box<dyn std::error::Error>> {
/// let journal = PgJournal::connect(url, PgJournalSettings::default()).await?;
/// let event = Event::new(EventId::now_v7()).payload(r#"{"amount": 7}"#);
/// let append = Append::new(Aggregate::new("order-17")?, Expected::New, [event]);
/// let mut tx = journal.transaction().await?;
/// sqlx::query("insert into orders values (17, 7)").execute(&mut *tx).await?;
/// journal.append_in(&mut tx, &append).await?;
/// tx.commit().await?; // row and event
/// journal.wake(); // readers need not wait for their next poll
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PgJournal(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    database: Database,
    settings: PgJournalSettings,
    id: String,
    sql: Sql,
    horizon: read::Horizon,
    anchors: anchor::Anchors,
    wake: wake::Wake,
}

/// Statements with the schema's name in them.
#[derive(Debug)]
struct Sql {
    append_one: Arc<str>,
    append: Arc<str>,
    read: Arc<str>,
    read_aggregate: Arc<str>,
    find: Arc<str>,
    head: Arc<str>,
    next: Arc<str>,
    horizon: Arc<str>,
    save: Arc<str>,
    wake: Arc<str>,
}

impl Sql {
    fn new(schema: &str) -> Self {
        let sql = |text: &str| -> Arc<str> { text.replace("{s}", schema).into() };
        let read =
            |from: &str| sql(&format!("select {}, true as same, true as alive from {from} j", read::COLUMNS));
        let paged = |from: &str, bytes_max: &str, same: &str, alive: &str| {
            sql(&read::paged(from, bytes_max, same, alive))
        };
        Sql {
            append_one: sql(
                "select * from {s}.journal_append_one($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
            ),
            append: sql(
                "select * from {s}.journal_append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)",
            ),
            read: paged(
                if mutant!("journal_orders_by_xid") {
                    "(select * from {s}.journal where position > $1 order by xmin::text::bigint, position limit $2)"
                } else {
                    "{s}.journal_read($1, $2)"
                },
                "$3",
                &anchor::is_same("$1", "$4"),
                &read::is_same_incarnation("$5", "$6"),
            ),
            read_aggregate: paged("{s}.journal_read_aggregate($1, $2, $3, $4)", "$5", "true", "true"),
            find: read("{s}.journal_find($1, $2)"),
            head: sql("select last from {s}.journal_head where tenant = $1 and aggregate = $2"),
            next: sql("select {s}.journal_next($1)"),
            horizon: sql(&format!(
                "select o_drawn, o_writers, {} as o_incarnation from {{s}}.journal_horizon()",
                read::INCARNATION
            )),
            save: sql(&format!(
                "update {{s}}.journal_relay set checkpoint = $3::text::json, saved_at = {{s}}.journal_now() \
                 where relay = $1 and token = $2 and $4::bigint <= {} and {}",
                anchor::DRAWN,
                anchor::is_same("$4", "$5"),
            )),
            // Losing a wake-up in a crash does no harm, so it does not wait for the disk.
            wake: sql(
                "select pg_catalog.set_config('synchronous_commit', 'off', true), pg_catalog.pg_notify($1, '')::text",
            ),
        }
    }
}

impl PgJournal {
    /// Connects by URL, as [`PgLedger::connect`](super::PgLedger::connect) does.
    pub async fn connect(url: &str, settings: impl Into<PgJournalSettings>) -> Result<Self> {
        let settings = settings.into();
        let pool =
            connect::open_pool("journal.url", url, settings.pool_max, settings.acquire_timeout).await?;
        PgJournal::with_pool(pool, settings).await
    }

    /// Uses a pool of your own, so that rows and events share connections and transactions.
    pub async fn with_pool(pool: PgPool, settings: impl Into<PgJournalSettings>) -> Result<Self> {
        super::error::reword_errors();
        let settings = settings.into();
        check_name(&settings.schema)?;
        let id = schema::prepare(&pool, &settings.schema, settings.migrate).await?;
        let database = Database::new(pool.clone(), settings.pooling).await?;
        if settings.refuse {
            let mut tx = begin(&pool, BEGIN).await.map_err(|e| fail("checking the server", e))?;
            verify::enforce(verify::check_server(&mut tx, database.pooled()).await?)?;
        }
        let inner = Inner {
            sql: Sql::new(&settings.schema),
            wake: wake::Wake::new(&settings.schema),
            horizon: read::Horizon::default(),
            anchors: anchor::Anchors::default(),
            database,
            settings,
            id,
        };
        Ok(PgJournal(Arc::new(inner)))
    }

    /// The pool it uses.
    pub fn pool(&self) -> &PgPool {
        self.0.database.pool()
    }

    /// Begins a transaction on its pool, for your effects and claims. Use this rather than
    /// `pool().begin()`: if the caller is cancelled (a client hung up, a timeout), no open
    /// transaction remains in the pool.
    pub async fn transaction(&self) -> Result<super::PgTx> {
        begin(self.pool(), "BEGIN").await.map_err(|e| fail("beginning a transaction", e))
    }

    /// The schema that holds it.
    pub fn schema(&self) -> &str {
        &self.0.settings.schema
    }

    /// Appends in your transaction: the transactional outbox. The events appear when it commits,
    /// with everything else it did, and never existed if it rolls back. The signature enforces the
    /// rule: without an open transaction there is nothing to pass.
    ///
    /// A conflict, a mismatch and bad input change nothing and leave the transaction as it is. On
    /// [`Error::Contended`], roll back the whole transaction and try again. The aggregate is locked
    /// until the transaction ends, and readers of the journal wait at the positions it has drawn:
    /// keep it short. Transactions that append to several aggregates must all use one order, or
    /// they meet deadlocks (which are contention).
    pub async fn append_in(&self, tx: &mut PgTransaction<'_>, append: &Append) -> Result<Appended> {
        append::append_in(&self.0, tx, append).await
    }

    /// Wakes readers that wait for events: for callers of [`append_in`](PgJournal::append_in),
    /// after their commit. Returns at once; concurrent calls are merged into one. Without it,
    /// readers find the events a little later.
    pub fn wake(&self) {
        wake::wake(&self.0);
    }
}

impl Inner {
    fn pool(&self) -> &PgPool {
        self.database.pool()
    }

    /// Runs one statement on its own. `what` says what is being done.
    async fn fetch_all<T: Decoded>(&self, what: &str, query: Select<'_, T>) -> Result<Vec<T>> {
        self.database.fetch_all(query).await.map_err(|e| fail(what, e))
    }

    /// The same, for a statement that has at most one row.
    async fn fetch_first<T: Decoded>(&self, what: &str, query: Select<'_, T>) -> Result<Option<T>> {
        Ok(self.fetch_all(what, query).await?.into_iter().next())
    }

    /// Runs one statement on its own and returns how many rows it changed.
    async fn execute(&self, what: &str, query: Query<'_, Postgres, PgArguments>) -> Result<u64> {
        self.database.execute(query).await.map_err(|e| fail(what, e))
    }
}

/// The error for the caller. `what` says what was being done.
fn fail(what: &str, error: sqlx::Error) -> Error {
    match missing(&error) {
        Some(message) => Error::Schema(format!(
            "{message} ({what}); is there a journal in this schema? `hapax modules create SLUG` and `hapax journal append` make one, with the owner's role"
        )),
        None => translate(what, error),
    }
}

#[async_trait]
impl Journal for PgJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        let mut answers = append::append_many(&self.0, std::slice::from_ref(append)).await;
        answers.pop().unwrap_or_else(|| Err(Error::Corrupt("an append without an answer".into())))
    }

    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        Ok(append::append_many(&self.0, appends).await)
    }

    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        read::read_aggregate(&self.0, tenant, aggregate, from, limit).await
    }

    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        read::read(&self.0, after, limit).await
    }

    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        read::find(&self.0, tenant, id).await
    }

    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
        read::head(&self.0, tenant, aggregate).await
    }

    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        wake::wait(&self.0, after, at_most).await
    }

    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        sweep::sweep(&self.0, settings).await
    }

    async fn stat(&self) -> Result<JournalStat> {
        read::stat(&self.0).await
    }

    async fn now(&self) -> Result<Time> {
        read::now(&self.0).await
    }

    async fn horizon(&self) -> Result<(Time, Position)> {
        read::horizon(&self.0).await
    }

    async fn probe(&self) -> Result<()> {
        read::probe(&self.0).await
    }

    fn id(&self) -> &str {
        &self.0.id
    }

    fn capabilities(&self) -> JournalCapabilities {
        JournalCapabilities { backend: "postgres", durable: true, shared: true, timed: false }
    }
}

#[async_trait]
impl RelayStore for PgJournal {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        relay::acquire_leadership(&self.0, relay, owner, lease).await
    }

    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        relay::renew_leadership(&self.0, relay, token, lease).await
    }

    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        relay::save(&self.0, relay, token, checkpoint).await
    }

    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        relay::release_leadership(&self.0, relay, token).await
    }

    async fn relays(&self) -> Result<Vec<RelayState>> {
        relay::relays(&self.0).await
    }

    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        relay::rewind(&self.0, relay, to, if_token).await
    }

    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        relay::forget(&self.0, relay).await
    }

    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        read::count_after(&self.0, after, limit).await
    }
}
