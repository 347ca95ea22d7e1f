//! Records on SQLite and PostgreSQL: the conformance suite, who sees what, and keyed writes of them.

mod files;
mod guards;
#[cfg(feature = "axum")]
mod keyed;
mod replication;
mod tenants;

use std::sync::Arc;

use async_trait::async_trait;
use hapax::backend::Migrate;
use hapax::backend::postgres::{
    PgJournal, PgJournalSettings, PgKeys, PgModules, PgRecords, PgRecordsSettings, Pooling,
};
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::journal::{Journal, JournalSettings};
use hapax::ledger::MismatchRule;
use hapax::records::{Create, Module, ModuleSlug, Modules, Record, Roles, Uuid};
use hapax::testing::records::RecordsHarness;
use rusqlite::{Connection, TransactionBehavior};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::postgres::{fresh_schema, run, url};

hapax::records_conformance!(sqlite, SqliteRecordsHarness::new().await);
hapax::records_conformance!(postgres, PgRecordsHarness::new().await);

/// Ids that are used twice are only warned about, so that the store of records must notice them itself.
fn journal_settings() -> JournalSettings {
    let mut settings = JournalSettings::default();
    settings.mismatch = MismatchRule::Warn;
    settings
}

fn fresh_slug() -> ModuleSlug {
    ModuleSlug::new(format!("s_{}", &Uuid::new_v4().simple().to_string()[..16])).unwrap()
}

/// A fresh file.
pub struct SqliteRecordsHarness(tempfile::TempDir, ModuleSlug);

impl SqliteRecordsHarness {
    pub async fn new() -> Self {
        let harness = SqliteRecordsHarness(tempfile::tempdir().unwrap(), fresh_slug());
        assert!(harness.make(&harness.1).await);
        harness
    }

    fn records(&self) -> SqliteRecords {
        sqlite_records(&self.0.path().join("records.db"))
    }
}

fn sqlite_records(file: &std::path::Path) -> SqliteRecords {
    SqliteRecords::open(&SqliteJournal::open(file, journal_settings()).unwrap()).unwrap()
}

#[async_trait]
impl RecordsHarness for SqliteRecordsHarness {
    type Records = SqliteRecords;

    async fn open(&self) -> SqliteRecords {
        self.records()
    }

    fn module(&self) -> ModuleSlug {
        self.1.clone()
    }

    async fn make(&self, slug: &ModuleSlug) -> bool {
        self.records().create_module(slug).await.unwrap()
    }

    async fn modules(&self) -> Vec<Module> {
        self.records().modules().await.unwrap()
    }

    async fn journal(&self) -> Arc<dyn Journal> {
        Arc::new(self.records().journal().clone())
    }

    async fn rolled_back(&self, records: &SqliteRecords, create: &Create) -> hapax::Result<Record> {
        let mut conn = Connection::open(records.path()).unwrap();
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        records.create_in(&tx, create)
    }
}

/// The database of all tests of records on one server, and its roles. None of them bypasses row security.
const DATABASE: &str = "hapax_test_records";
const OWNER: &str = "hapax_test_owner";
const APP: &str = "hapax_test_app";
const MAINTENANCE: &str = "hapax_test_maintenance";

/// Makes the database and the roles, once per server.
async fn prepare_server() {
    let admin = crate::support::postgres::pool(1).await;
    run(&admin, "select pg_advisory_lock(hashtext('hapax.test.records'))".to_owned()).await;
    for role in [OWNER, APP, MAINTENANCE] {
        let made = format!(
            "do $$ begin if not exists (select from pg_roles where rolname = '{role}') then create role {role} login; end if; end $$"
        );
        run(&admin, made).await;
    }
    let there = format!("select count(*) from pg_database where datname = '{DATABASE}'");
    if crate::support::postgres::ask::<i64>(&admin, there).await == 0 {
        run(&admin, format!("create database {DATABASE} owner {OWNER}")).await;
    }
    run(&admin, "select pg_advisory_unlock_all()".to_owned()).await;
    admin.close().await;
}

/// A pool for one of the roles.
async fn pool_of(role: &str, connections: u32) -> PgPool {
    let options: PgConnectOptions = url().parse().unwrap();
    let options = options.username(role).database(DATABASE);
    PgPoolOptions::new()
        .max_connections(connections)
        .connect_with(options)
        .await
        .expect("the role may connect")
}

/// A schema of its own with keys, a journal and one module.
struct PgRecordsHarness {
    schema: String,
    slug: ModuleSlug,
    owner: PgPool,
    app: PgPool,
}

impl PgRecordsHarness {
    async fn new() -> Self {
        prepare_server().await;
        let harness = PgRecordsHarness {
            schema: fresh_schema(),
            slug: fresh_slug(),
            owner: pool_of(OWNER, 2).await,
            app: pool_of(APP, 8).await,
        };
        assert!(harness.make(&harness.slug).await);
        let grants = harness.owner_modules().await.grants_sql().await.unwrap();
        run(&harness.owner, grants).await;
        harness
    }

    async fn owner_modules(&self) -> PgModules {
        let roles = Roles { app: Some(APP.to_owned()), maintenance: Some(MAINTENANCE.to_owned()) };
        PgModules::with_pool(self.owner.clone(), &self.schema, roles, Migrate::Auto).await.unwrap()
    }
}

fn pg_journal_settings(schema: &str) -> PgJournalSettings {
    let mut settings = PgJournalSettings::from(journal_settings());
    schema.clone_into(&mut settings.schema);
    settings.migrate = Migrate::Check;
    settings.pooling = Pooling::Session;
    settings
}

fn records_settings() -> PgRecordsSettings {
    let mut settings = PgRecordsSettings::default();
    settings.pooling = Pooling::Session;
    settings
}

async fn pg_records(pool: &PgPool, schema: &str) -> PgRecords {
    let journal = PgJournal::with_pool(pool.clone(), pg_journal_settings(schema)).await.unwrap();
    PgRecords::open(&journal, records_settings()).await.expect("the app's role may open records")
}

async fn pg_keys(pool: &PgPool, schema: &str) -> PgKeys {
    let mut settings = crate::settings(schema);
    settings.migrate = Migrate::Check;
    PgKeys::with_pool(pool.clone(), settings).await.unwrap()
}

#[async_trait]
impl RecordsHarness for PgRecordsHarness {
    type Records = PgRecords;

    async fn open(&self) -> PgRecords {
        pg_records(&self.app, &self.schema).await
    }

    fn module(&self) -> ModuleSlug {
        self.slug.clone()
    }

    async fn make(&self, slug: &ModuleSlug) -> bool {
        self.owner_modules().await.create_module(slug).await.unwrap()
    }

    async fn modules(&self) -> Vec<Module> {
        self.owner_modules().await.modules().await.unwrap()
    }

    async fn journal(&self) -> Arc<dyn Journal> {
        Arc::new(PgJournal::with_pool(self.app.clone(), pg_journal_settings(&self.schema)).await.unwrap())
    }

    async fn rolled_back(&self, records: &PgRecords, create: &Create) -> hapax::Result<Record> {
        let mut tx = records.journal().transaction().await?;
        let record = records.create_in(&mut tx, create).await;
        tx.rollback().await.unwrap();
        record
    }
}

/// SQL that sets the transaction's tenant.
fn tenant_is(number: u128) -> String {
    format!("select set_config('hapax.tenant', '{}', true)", hapax::testing::records::tenant(number))
}

/// Runs statements in one transaction, as a role that somebody else's code has got hold of; the last one's
/// rows as JSON, or the code of its error.
async fn raw(pool: &PgPool, statements: &[&str]) -> Result<Vec<String>, String> {
    let code = |error: sqlx::Error| {
        let error = error.into_database_error().expect("the server's word");
        error.code().expect("a code").into_owned()
    };
    let mut tx = pool.begin().await.unwrap();
    let Some((last, before)) = statements.split_last() else { return Ok(Vec::new()) };
    for statement in before {
        sqlx::raw_sql(AssertSqlSafe((*statement).to_owned())).execute(&mut *tx).await.map_err(code)?;
    }
    let rows = if last.starts_with("select") {
        let json = format!("select to_jsonb(q)::text from ({last}) q");
        sqlx::query_scalar(AssertSqlSafe(json)).fetch_all(&mut *tx).await.map_err(code)?
    } else {
        let done = sqlx::raw_sql(AssertSqlSafe((*last).to_owned())).execute(&mut *tx).await.map_err(code)?;
        vec![format!("{} rows", done.rows_affected())]
    };
    tx.commit().await.unwrap();
    Ok(rows)
}
