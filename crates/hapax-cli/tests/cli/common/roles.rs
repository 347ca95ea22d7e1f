//! A PostgreSQL with the three roles of records, for tests of several areas.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use super::serve::Server;
use super::{Ran, run};

/// A database with the three roles, and one module.
pub struct Postgres {
    pub slug: String,
    pub app: String,
    pub owner_url: String,
    pub app_url: String,
    pub keeper_url: String,
    pub admin_url: String,
    pub schema: String,
    pub dir: std::path::PathBuf,
}

impl Postgres {
    /// Makes the roles and the database once per server, and a schema and a module of its own.
    pub fn new(dir: &Path) -> Self {
        let admin_url = std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env is set");
        let id = run(dir, &["id", "make"]).code(0).out.trim().replace('-', "_");
        let (database, owner, app, keeper) =
            ("hapax_test_records", "hapax_test_owner", "hapax_test_app", "hapax_test_maintenance");
        let url = |role: &str| {
            let rest = admin_url.split_once('@').unwrap().1;
            format!("postgres://{role}@{}/{database}", rest.rsplit_once('/').unwrap().0)
        };
        let place = Postgres {
            slug: format!("s_{}", &id[id.len() - 12..]),
            app: app.to_owned(),
            owner_url: url(owner),
            app_url: url(app),
            keeper_url: url(keeper),
            schema: format!("t_{id}"),
            dir: dir.to_owned(),
            admin_url,
        };
        place.prepare(&[owner, app, keeper], database);
        place.create_module(&place.slug);
        let grants = run(
            dir,
            &[&place.as_owner()[..], &["modules", "grants", "--app-role", app, "--maintenance-role", keeper]]
                .concat(),
        );
        place.owner_runs(&grants.code(0).out);
        place
    }

    /// Makes a module, with the rights of the roles.
    pub fn create_module(&self, slug: &str) {
        let make = [
            "modules",
            "create",
            slug,
            "--app-role",
            &self.app,
            "--maintenance-role",
            "hapax_test_maintenance",
        ];
        run(&self.dir, &[&self.as_owner()[..], &make].concat()).code(0);
    }

    fn prepare(&self, roles: &[&str], database: &str) {
        let mut admin = Connection::to(&self.admin_url);
        admin.run("select pg_advisory_lock(hashtext('hapax.test.records'))");
        for role in roles {
            admin.run(&format!(
                "do $$ begin if not exists (select from pg_roles where rolname = '{role}') then create role {role} login; end if; end $$"
            ));
        }
        if admin.rows(&format!("select from pg_database where datname = '{database}'")) == 0 {
            admin.run(&format!("create database {database} owner {}", roles[0]));
        }
    }

    pub fn owner_runs(&self, sql: &str) {
        Connection::to(&self.owner_url).run(sql);
    }

    pub fn as_owner(&self) -> [&str; 4] {
        ["--journal", &self.owner_url, "--set", self.schema_flag()]
    }

    pub fn as_keeper(&self) -> [&str; 4] {
        ["--journal", &self.keeper_url, "--set", self.schema_flag()]
    }

    pub fn as_app(&self) -> [&str; 4] {
        ["--journal", &self.app_url, "--set", self.schema_flag()]
    }

    pub fn schema_flag(&self) -> &'static str {
        // One per test: the flag outlives the command lines that borrow it.
        Box::leak(format!("journal.schema={}", self.schema).into_boxed_str())
    }

    /// Nobody writes to a table of the journal until this is dropped.
    pub fn lock(&self, table: &str) -> Connection {
        let mut owner = Connection::to(&self.owner_url);
        owner.run(&format!("begin; lock table {}.{table} in share mode", self.schema));
        owner
    }

    /// The flags of a server. The ledger and the bus are embedded.
    pub fn serve(&self) -> Vec<String> {
        let keeper = format!("keys.maintenance_url={}", self.keeper_url);
        let sets = [self.schema_flag(), &*keeper, "journal.migrate=check"];
        let sets = sets.into_iter().flat_map(|set| ["--set".to_owned(), set.to_owned()]);
        ["--journal".to_owned(), self.app_url.clone()].into_iter().chain(sets).collect()
    }

    pub fn start(&self) -> Server {
        self.start_in(&[])
    }

    /// A server with the rights of the app. The ledger and the bus are embedded.
    pub fn start_with(&self, more: &[&str]) -> Server {
        self.launch(more, &[])
    }

    /// The same as [`start`](Self::start), in an environment with these variables.
    pub fn start_in(&self, env: &[(&str, &str)]) -> Server {
        self.launch(&["--set", &format!("keys.maintenance_url={}", self.keeper_url)], env)
    }

    fn launch(&self, more: &[&str], env: &[(&str, &str)]) -> Server {
        let args = [&self.as_app()[..], &["--set", "journal.migrate=check"], more].concat();
        Server::start_in(&self.dir, &args, env)
    }

    /// The same, which must not start.
    pub fn refused(&self, more: &[&str]) -> Ran {
        let listen = ["--listen", "127.0.0.1:0", "--set", "journal.migrate=check"];
        super::serve::refused(&self.dir, &[&self.as_app()[..], &listen, more].concat()).code(3)
    }
}

/// One connection, for tests that wait for each statement.
pub struct Connection(tokio::runtime::Runtime, hapax::backend::postgres::sqlx::PgConnection);

impl Connection {
    pub fn to(url: &str) -> Self {
        use hapax::backend::postgres::sqlx::{Connection as _, PgConnection};
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(PgConnection::connect(url)).unwrap();
        Connection(runtime, connection)
    }

    pub fn run(&mut self, sql: &str) {
        use hapax::backend::postgres::sqlx::{AssertSqlSafe, raw_sql};
        let query = raw_sql(AssertSqlSafe(sql.to_owned()));
        self.0.block_on(query.execute(&mut self.1)).unwrap_or_else(|error| panic!("{error}: {sql}"));
    }

    pub fn rows(&mut self, sql: &str) -> usize {
        use hapax::backend::postgres::sqlx::{AssertSqlSafe, raw_sql};
        let query = raw_sql(AssertSqlSafe(sql.to_owned()));
        self.0.block_on(query.fetch_all(&mut self.1)).unwrap().len()
    }
}
