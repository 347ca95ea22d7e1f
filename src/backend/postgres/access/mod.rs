//! API tokens and audit rows in PostgreSQL, 15 or newer, alone or beside keys, a journal and a ledger.
//!
//! A change locks the token's row, lets the shared rules decide, and writes the row and its audit row
//! in one transaction. If the answer to its COMMIT is lost, the same change is sent again: the rules
//! know it, and write nothing twice.

mod rows;
mod schema;
mod sweep;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _};

pub use schema::{
    ACCESS_ACCEPTS, ACCESS_VERSION, access_grants_sql, access_maintenance_grants_sql, access_schema_sql,
};

use super::database::{BEGIN_BRIEFLY, Database, begin};
use super::error::{Meaning, meaning, translate};
use super::executor::Repeat;
use super::schema::check_name;
use super::{BEGIN, Migrate, Pooling, connect, verify};
use crate::access::decide::{self, Change, Found};
use crate::access::{
    Access, Actor, ApiToken, AuditEntry, AuditNote, AuditSweep, Authentication, ListAudit, ListTokens,
    NewToken, Rotation, SweptAudit, TokenEntry, TokenId,
};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;

/// Settings of API tokens in PostgreSQL.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PgAccessSettings {
    /// The schema that holds them, alone or beside others.
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

impl Default for PgAccessSettings {
    fn default() -> Self {
        PgAccessSettings {
            schema: "hapax".into(),
            migrate: Migrate::Auto,
            pool_max: 4,
            acquire_timeout: Duration::from_secs(10),
            pooling: Pooling::Detect,
            refuse: true,
        }
    }
}

/// A store of API tokens in PostgreSQL. Clones share it.
#[derive(Debug, Clone)]
pub struct PgAccess(Arc<Inner>);

struct Inner {
    database: Database,
    schema: String,
    sql: rows::Sql,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgAccess").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl PgAccess {
    /// Connects by URL, as [`PgLedger::connect`](super::PgLedger::connect) does.
    pub async fn connect(url: &str, settings: PgAccessSettings) -> Result<Self> {
        let pool = connect::open_pool("keys.url", url, settings.pool_max, settings.acquire_timeout).await?;
        PgAccess::with_pool(pool, settings).await
    }

    /// Uses a pool of your own.
    pub async fn with_pool(pool: PgPool, settings: PgAccessSettings) -> Result<Self> {
        check_name(&settings.schema)?;
        schema::PART.prepare(&pool, &settings.schema, settings.migrate, &[]).await?;
        let database = Database::new(pool, settings.pooling).await?;
        if settings.refuse {
            let mut tx = begin(database.pool(), BEGIN).await.map_err(|e| fail("checking the server", e))?;
            verify::enforce(verify::check_server(&mut tx, database.pooled()).await?)?;
        }
        let sql = rows::Sql::new(&settings.schema);
        Ok(PgAccess(Arc::new(Inner { database, schema: settings.schema, sql })))
    }

    /// The pool it uses.
    pub fn pool(&self) -> &PgPool {
        self.0.pool()
    }

    /// The schema that holds them.
    pub fn schema(&self) -> &str {
        &self.0.schema
    }
}

type Statement = sqlx::query::Query<'static, Postgres, sqlx::postgres::PgArguments>;

/// A time in microseconds since 1970. Its names are PostgreSQL's own, whatever the search path.
fn us(at: &str) -> String {
    format!("(extract(epoch from {at}) operator(pg_catalog.*) 1000000::numeric)::bigint")
}

/// The error for the caller. `what` says what was being done.
fn fail(what: &str, error: sqlx::Error) -> Error {
    if let Some(message) = super::error::missing(&error) {
        return Error::Schema(format!(
            "{message} ({what}); are the tables of API tokens there? `hapax token create` makes them"
        ));
    }
    translate(what, error)
}

impl Inner {
    fn pool(&self) -> &PgPool {
        self.database.pool()
    }

    fn query(&self, sql: &Arc<str>) -> Statement {
        sqlx::query(AssertSqlSafe(Arc::clone(sql))).persistent(!self.database.pooled())
    }

    /// After an error: waits a moment if what failed can be sent again, because its answer was lost or
    /// others were in the way. The error otherwise.
    async fn pause(&self, what: &str, error: sqlx::Error, repeat: &mut Repeat) -> Result<()> {
        self.database.note_pooler(&error);
        let again = matches!(meaning(&error), Meaning::Doubt | Meaning::Conflict | Meaning::Unique);
        // A full pool is not a doubt: waiting again would only make it fuller.
        if !again || matches!(error, sqlx::Error::PoolTimedOut) || !repeat.again().await {
            return Err(fail(what, error));
        }
        Ok(())
    }

    /// Runs one statement on its own, which can be repeated.
    async fn rows(&self, what: &str, statement: impl Fn() -> Statement) -> Result<Vec<PgRow>> {
        let mut repeat = Repeat::statement();
        loop {
            let answer = if self.database.needs_transaction() {
                self.rows_in_transaction(statement()).await
            } else {
                statement().fetch_all(self.pool()).await
            };
            match answer {
                Ok(rows) => return Ok(rows),
                Err(error) => self.pause(what, error, &mut repeat).await?,
            }
        }
    }

    async fn rows_in_transaction(&self, statement: Statement) -> sqlx::Result<Vec<PgRow>> {
        let mut tx = begin(self.pool(), BEGIN_BRIEFLY).await?;
        let rows = statement.fetch_all(&mut *tx).await?;
        tx.commit().await.map(|()| rows)
    }

    /// Changes a token and adds its audit row.
    async fn change(
        &self,
        what: &str,
        id: &TokenId,
        maker: Option<&TokenId>,
        by: &Actor,
        decide: impl Fn(Found<'_>, Time) -> Result<Change>,
    ) -> Result<TokenEntry> {
        let mut repeat = Repeat::statement();
        loop {
            match self.change_once(id, maker, by, &decide).await {
                Ok(changed) => return changed,
                Err(error) => self.pause(what, error, &mut repeat).await?,
            }
        }
    }

    /// The inner error says why nothing was written.
    async fn change_once(
        &self,
        id: &TokenId,
        maker: Option<&TokenId>,
        by: &Actor,
        decide: impl Fn(Found<'_>, Time) -> Result<Change>,
    ) -> sqlx::Result<Result<TokenEntry>> {
        let mut tx = begin(self.pool(), BEGIN_BRIEFLY).await?;
        // The maker is locked too: a revocation of it comes before, or finds what it made.
        let mut rows_found = Vec::with_capacity(2);
        for id in maker.into_iter().chain([id]) {
            let row =
                self.query(&self.sql.lock).bind(id.as_str().to_owned()).fetch_optional(&mut *tx).await?;
            match row.as_ref().map(rows::decode).transpose() {
                Ok(row) => rows_found.push(row.flatten()),
                Err(error) => return Ok(Err(error)),
            }
        }
        let found = rows_found.pop().flatten();
        let maker = rows_found.pop().flatten();
        let now = rows::now_in(&mut tx, self.query(&self.sql.now)).await?;
        let change = match decide(Found { row: found.as_ref(), maker: maker.as_ref() }, now) {
            Ok(change) => change,
            Err(error) => return Ok(Err(error)),
        };
        let entry = change.row.entry(now);
        let Some((action, details)) = change.note else { return Ok(Ok(entry)) };
        let sql = if found.is_some() { &self.sql.update } else { &self.sql.insert };
        let written = rows::bind(self.query(sql), &change.row).execute(&mut *tx).await?.rows_affected();
        if written != 1 {
            return Ok(Err(Error::Corrupt(format!("a token that was locked is gone: {id}"))));
        }
        let note = AuditNote::new(by, action, id.as_str()).details(details);
        rows::bind_note(self.query(&self.sql.note), &note).execute(&mut *tx).await?;
        crate::crash_point!("access.commit");
        tx.commit().await.map(|()| Ok(entry))
    }
}

#[async_trait]
impl Access for PgAccess {
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        about.check()?;
        let decide = |found: Found<'_>, now| decide::create(found, token, about, now);
        self.0.change("creating a token", token.id(), about.made_by.as_ref(), by, decide).await
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        how.check()?;
        let decide = |found: Found<'_>, now| decide::rotate(found, token, how, now);
        self.0.change("rotating a token", token.id(), None, by, decide).await
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        let decide = |found: Found<'_>, now| decide::revoke(found, id, now);
        self.0.change("revoking a token", id, None, by, decide).await
    }

    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        let Ok(token) = ApiToken::parse(text) else { return Ok(Authentication::Malformed) };
        let id = token.id().as_str();
        let rows =
            self.0.rows("looking for a token", || self.0.query(&self.0.sql.find).bind(id.to_owned())).await?;
        let row = rows.first().ok_or_else(|| Error::Corrupt("no answer about a token".into()))?;
        let (found, now) = (rows::decode(row)?, rows::now_of(row)?);
        let said = decide::authenticate(found.as_ref(), &token, now);
        if matches!(said, Authentication::Granted { .. }) && !found.is_some_and(|row| row.is_use_noted(now)) {
            let noted_us = i64::try_from(decide::USE_NOTED.as_micros()).unwrap_or(i64::MAX);
            let statement = self.0.query(&self.0.sql.used).bind(id.to_owned()).bind(noted_us);
            // A database that cannot be written to still authenticates.
            if let Err(error) = self.0.database.execute(statement).await {
                tracing::debug!(target: "hapax", %error, "the use of a token could not be noted");
            }
        }
        Ok(said)
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        let statement = || self.0.query(&self.0.sql.find).bind(id.as_str().to_owned());
        let rows = self.0.rows("looking for a token", statement).await?;
        let row = rows.first().ok_or_else(|| Error::Corrupt("no answer about a token".into()))?;
        let now = rows::now_of(row)?;
        Ok(rows::decode(row)?.map(|row| row.entry(now)))
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        let tenant = which.tenant.as_ref().map(|tenant| tenant.as_ref().map_or("", Tenant::as_str));
        let statement = || {
            self.0
                .query(&self.0.sql.list)
                .bind(tenant.map(str::to_owned))
                .bind(which.after.as_ref().map(|id| id.as_str().to_owned()))
                .bind(which.live_only)
                .bind(i64::try_from(which.limit()).unwrap_or(i64::MAX))
                .bind(which.made_by.as_ref().map(|id| id.as_str().to_owned()))
        };
        let mut entries = Vec::new();
        for row in &self.0.rows("listing tokens", statement).await? {
            let now = rows::now_of(row)?;
            entries.extend(rows::decode(row)?.map(|row| row.entry(now)));
        }
        Ok(entries)
    }

    async fn has_tokens(&self) -> Result<bool> {
        let what = "looking for tokens";
        let rows = self.0.rows(what, || self.0.query(&self.0.sql.any)).await?;
        let row = rows.first().ok_or_else(|| Error::Corrupt("no answer about tokens".into()))?;
        row.try_get(0).map_err(|e| fail(what, e))
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        let statement = || rows::bind_note(self.0.query(&self.0.sql.note), note);
        self.0.rows("adding an audit row", statement).await.map(drop)
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        let statement = || {
            self.0
                .query(&self.0.sql.audit)
                .bind(which.before)
                .bind(which.action.clone())
                .bind(i64::try_from(which.limit()).unwrap_or(i64::MAX))
        };
        self.0.rows("listing audit rows", statement).await?.iter().map(rows::decode_audit).collect()
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        sweep::sweep(&self.0, settings).await
    }

    fn backend(&self) -> &'static str {
        "postgres"
    }
}
