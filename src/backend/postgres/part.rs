//! The parts of a schema: ledger, journal, keys, records and API tokens. Each has its own version, and
//! is made or brought up to date in the same way, also by many processes at once.

use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use super::PgTx;
use super::codes::from_row;
use super::database::{BEGIN, Decoded, begin};
use super::error::refuse_read_only;
use super::schema::{LOCK_TIMEOUT, check_name};
use crate::backend::Migrate;
use crate::error::{Error, Result};

/// A part, and what messages call it.
pub(super) struct Part {
    /// With its article: `the keys`.
    pub name: &'static str,
    /// Without one, as in `there are no keys`.
    pub none: &'static str,
    /// Whether it is spoken of as they.
    pub is_plural: bool,
    /// What makes it or brings it up to date: `run …`.
    pub remedy: &'static str,
    /// The table of one row that has the version.
    pub meta: &'static str,
    /// The schema version that this build writes.
    pub version: i32,
    /// The oldest build, by schema version, that can still use what this build writes.
    pub accepts: i32,
    /// The step at index n brings the part's tables to version n + 1. A step that ran anywhere is never
    /// changed: a later version gets one of its own.
    pub steps: &'static [&'static [&'static str]],
    /// What is made again whenever the version rises, as it is today: functions and views, and what may
    /// be dropped and made at any time, such as policies. It comes after the steps.
    pub again: &'static [&'static str],
    /// Says what an error of the driver means.
    pub fail: fn(&str, sqlx::Error) -> Error,
}

from_row! {
    /// The version that a part stores.
    struct Found { version: i32, accepts: i32 }
}

/// The beginnings of lines that make again what exists already. What depends on it stays, and so do its
/// rights and its owner. The files say `create` only: in a new schema, what has such a name is somebody
/// else's, and an error.
const REPLACE: [(&str, &str); 2] = [
    ("\ncreate function ", "\ncreate or replace function "),
    ("\ncreate view ", "\ncreate or replace view "),
];

/// Gives the functions that were made in place of those that a step renamed the rights and the owner of
/// these. The renamed ones stay: a statement of another session may have found them already. A step's
/// comment tells them from functions of others, and only what this transaction made takes their place.
const REPLACED: &str = "
do $$
declare r record; g record;
begin
  for r in select n.oid::regprocedure as now, b.proacl, b.proowner
             from pg_proc b
             join pg_proc n on n.pronamespace = b.pronamespace
              and obj_description(b.oid, 'pg_proc') = 'hapax: ' || n.proname || ' before version {version}'
            where b.pronamespace = '{schema}'::regnamespace
              and n.xmin::text::bigint = pg_current_xact_id()::text::bigint % 4294967296 loop
    execute format('alter function %s owner to %I', r.now, pg_get_userbyid(r.proowner));
    if r.proacl is not null then
      execute format('revoke all on function %s from public', r.now);
      for g in select x.grantee, x.is_grantable from aclexplode(r.proacl) x loop
        execute format('grant execute on function %s to %s %s', r.now,
          case when g.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(g.grantee)) end,
          case when g.is_grantable then 'with grant option' end);
      end loop;
    end if;
  end loop;
end $$;
";

impl Part {
    /// The whole part as SQL, for a DBA to read and run. `facts` are further columns of its table of one
    /// row, and their texts.
    pub fn schema_sql(&self, schema: &str, facts: &[(&str, &str)]) -> Result<String> {
        check_name(schema)?;
        Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", self.steps_sql(schema, 0, facts)))
    }

    /// The steps from a version to the current one, for a transaction begun with [`BEGIN`].
    fn steps_sql(&self, schema: &str, from: usize, facts: &[(&str, &str)]) -> String {
        let Part { meta, version, accepts, .. } = self;
        let mut steps: String = self.steps.iter().skip(from).flat_map(|step| step.iter().copied()).collect();
        let mut again: String = self.again.iter().flat_map(|sql| ["\n", *sql]).collect();
        if from > 0 {
            again = REPLACE.iter().fold(again, |sql, (make, replace)| sql.replace(make, replace));
            again += &REPLACED.replace("{version}", &version.to_string());
        }
        steps += &again;
        let last = if from == 0 {
            let own = [("version", version.to_string()), ("accepts", accepts.to_string())];
            let more = facts.iter().map(|(name, text)| (*name, format!("'{text}'")));
            let (names, values): (Vec<_>, Vec<_>) = own.into_iter().chain(more).unzip();
            let (names, values) = (names.join(", "), values.join(", "));
            format!("\ninsert into {{schema}}.{meta} ({names}) values ({values});\n")
        } else {
            format!("\nupdate {{schema}}.{meta} set version = {version}, accepts = {accepts};\n")
        };
        (steps + &last)
            .replace("{schema_literal}", &format!("'{schema}'"))
            .replace("{schema}", schema)
            .replace("{lock_timeout}", LOCK_TIMEOUT)
    }

    /// Creates or updates the part so that this build can use it, or returns why it cannot.
    pub async fn prepare(
        &self,
        pool: &PgPool,
        schema: &str,
        migrate: Migrate,
        facts: &[(&str, &str)],
    ) -> Result<()> {
        let what = format!("preparing the schema of {}", self.name);
        let fail = |error| (self.fail)(&what, error);
        let mut tx = begin(pool, BEGIN).await.map_err(|e| (self.fail)("connecting to PostgreSQL", e))?;
        match self.found(&mut tx, schema).await? {
            Some(found) if found.version >= self.version => return self.must_accept_us(&found, schema),
            _ if migrate == Migrate::Auto => {}
            found => return Err(self.must_be_made(found.as_ref(), schema)),
        }
        let read_only = "select current_setting('transaction_read_only')";
        let read_only: String =
            sqlx::query_scalar(read_only).persistent(false).fetch_one(&mut *tx).await.map_err(fail)?;
        refuse_read_only(&read_only)?;
        lock(&mut tx, schema).await.map_err(fail)?;
        let from = match self.found(&mut tx, schema).await? {
            Some(found) if found.version >= self.version => return self.must_accept_us(&found, schema),
            Some(found) => {
                self.must_accept_us(&found, schema)?;
                usize::try_from(found.version).unwrap_or(0)
            }
            None => 0,
        };
        let sql = self.steps_sql(schema, from, facts);
        tx.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.map_err(fail)?;
        tx.commit().await.map_err(fail)
    }

    /// Whether the part is there, in whatever version.
    pub async fn is_there(&self, tx: &mut PgTx, schema: &str) -> Result<bool> {
        Ok(self.found(tx, schema).await?.is_some())
    }

    /// Reads columns of the part's row; `None` if the part is not there.
    pub async fn read<T: Decoded>(&self, tx: &mut PgTx, schema: &str, columns: &str) -> Result<Option<T>> {
        let what = format!("reading the schema version of {}", self.name);
        let sql = format!("select {columns} from {schema}.{}", self.meta);
        read_meta(tx, schema, self.meta, sql).await.map_err(|e| (self.fail)(&what, e))
    }

    /// The same, of a part that was just prepared.
    pub async fn read_prepared<T: Decoded>(&self, pool: &PgPool, schema: &str, columns: &str) -> Result<T> {
        let mut tx = begin(pool, BEGIN).await.map_err(|e| (self.fail)("connecting to PostgreSQL", e))?;
        let row = self.read(&mut tx, schema, columns).await?;
        row.ok_or_else(|| Error::Corrupt(format!("there is no row in {schema}.{}", self.meta)))
    }

    async fn found(&self, tx: &mut PgTx, schema: &str) -> Result<Option<Found>> {
        self.read(tx, schema, "version, accepts").await
    }

    fn must_accept_us(&self, found: &Found, schema: &str) -> Result<()> {
        if found.accepts <= self.version {
            return Ok(());
        }
        let (have, accept) = if self.is_plural { ("have", "accept") } else { ("has", "accepts") };
        Err(Error::Schema(format!(
            "{} in schema {schema} {have} version {} and {accept} builds from version {} on; this build knows version {}: \
             update it",
            self.name, found.version, found.accepts, self.version
        )))
    }

    fn must_be_made(&self, found: Option<&Found>, schema: &str) -> Error {
        let (are, have, them) = if self.is_plural { ("are", "have", "them") } else { ("is", "has", "it") };
        Error::Schema(match found {
            Some(found) => format!(
                "{} in schema {schema} {have} version {}, this build needs {}, and migrate is `check`; {}",
                self.name, found.version, self.version, self.remedy
            ),
            None => format!(
                "there {are} no {} in schema {schema} (or this role may not see {them}), and migrate is `check`; {}",
                self.none, self.remedy
            ),
        })
    }
}

/// Other processes that change the schema now wait here, and then find the work done.
pub(super) async fn lock(tx: &mut PgTx, schema: &str) -> sqlx::Result<()> {
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map(drop)
}

/// Reads a table of one row; `None` if there is no such table.
async fn read_meta<T: Decoded>(
    tx: &mut PgTx,
    schema: &str,
    table: &str,
    sql: String,
) -> sqlx::Result<Option<T>> {
    // Not `to_regclass`: it may answer from a cache that is older than the lock we waited for.
    let there = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = $1 and c.relname = $2)";
    let there: bool =
        sqlx::query_scalar(there).persistent(false).bind(schema).bind(table).fetch_one(&mut **tx).await?;
    if !there {
        return Ok(None);
    }
    sqlx::query_as(AssertSqlSafe(sql)).persistent(false).fetch_optional(&mut **tx).await
}
