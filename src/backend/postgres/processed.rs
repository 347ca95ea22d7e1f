//! Reads the table in which a service keeps what it has processed, so that it can move to a ledger.
//!
//! Pages go by key, each in a statement of its own: no snapshot stays open, the table may be written to
//! meanwhile, and a reader that begins again needs nothing but the table. Rows of the same id are one.

use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::QueryAs;
use sqlx::{AssertSqlSafe, FromRow, PgPool, Postgres};

use super::connect::open_pool;
use super::database::begin;
use super::error::translate;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Visible;

/// The columns that are looked for if none is named.
const ID: [&str; 1] = ["event_id"];
const SCOPE: [&str; 3] = ["consumer_scope_id", "handler", "consumer"];
const STATUS: [&str; 2] = ["status", "state"];
const TIME: [&str; 2] = ["week_start", "event_time"];
/// A table with one of these has the rows of several tenants.
const TENANT: [&str; 2] = ["tenant_id", "tenant"];
/// What row security hides would look as if it had never been done: such a table is an error. Each statement has
/// a transaction of its own, so that a pooler does not matter.
const READ: &str = "BEGIN READ ONLY; SET LOCAL row_security = off";

/// Which columns of the table have what; those that are not named are looked for.
#[derive(Debug, Clone, Default)]
pub struct ProcessedColumns {
    /// The id of the event.
    pub id: Option<String>,
    /// Whose effect it was.
    pub scope: Option<String>,
    /// What became of it.
    pub status: Option<String>,
    /// The time of the event.
    pub time: Option<String>,
}

/// What to read.
#[derive(Debug, Clone)]
pub struct ProcessedQuery {
    /// The table, or view, as SQL names it.
    pub table: String,
    /// Its columns.
    pub columns: ProcessedColumns,
    /// Only the rows of this scope, if there is a column of scopes.
    pub scope: String,
    /// The statuses of events that will not run again, if there is a column of statuses.
    pub done: Vec<String>,
    /// Whether the time is part of the identity.
    pub with_time: bool,
}

/// An id of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessedRow {
    /// The id as text.
    pub id: String,
    /// The event's time, where it is part of the identity.
    pub time: Option<Time>,
    /// The status of an event that is not done.
    pub open: Option<String>,
    after: Option<String>,
}

/// A table of processed events in PostgreSQL.
#[derive(Debug)]
pub struct PgProcessed {
    pool: PgPool,
    table: String,
    id: Column,
    time: Option<Column>,
    scope: Option<(Column, String)>,
    status: Option<(Column, Vec<String>)>,
}

#[derive(Debug, Clone)]
struct Column {
    /// As SQL names it.
    name: String,
    kind: String,
}

type Selected = (String, Option<String>, Option<i64>, Option<String>);

impl PgProcessed {
    /// Connects, finds the table and its columns. Changes nothing.
    pub async fn open(url: &str, query: ProcessedQuery, acquire_timeout: Duration) -> Result<Self> {
        let pool = open_pool("--from", url, 2, acquire_timeout).await?;
        let shown = Visible(&query.table).to_string();
        let Some((oid, table)) = find(&pool, &query.table).await? else {
            return Err(Error::Config(format!(
                "--from: there is no table {shown} in that database that this role sees; write it as SQL does, with \
                 its schema if it is not on the search_path"
            )));
        };
        let rows: Vec<(String, String)> = sqlx::query_as(
            "select attname::text, format_type(atttypid, -1) from pg_attribute \
             where attrelid = $1::bigint::oid and attnum > 0 and not attisdropped order by attnum",
        )
        .bind(oid)
        .persistent(false)
        .fetch_all(&pool)
        .await
        .map_err(|e| translate("reading the columns of --from", e))?;
        let pick = |flag: &str, named: Option<&String>, usual: &[&str]| -> Result<Option<Column>> {
            let is = |name: &str| rows.iter().find(|(column, _)| column == name);
            let found = match named {
                Some(name) => Some(is(name.as_str()).ok_or_else(|| no_column(&shown, flag, name, &rows))?),
                None => usual.iter().find_map(|&name| is(name)),
            };
            Ok(found.map(|(name, kind)| Column { name: quoted(name), kind: kind.clone() }))
        };
        let columns = &query.columns;
        let id = pick("--id-column", columns.id.as_ref(), &ID)?
            .ok_or_else(|| no_column(&shown, "--id-column", ID[0], &rows))?;
        let scope = pick("--scope-column", columns.scope.as_ref(), &SCOPE)?;
        let status = pick("--status-column", columns.status.as_ref(), &STATUS)?;
        let time = pick("--time-column", columns.time.as_ref(), &TIME)?;
        if let Some(tenant) = pick("", None, &TENANT)? {
            return Err(Error::Config(format!(
                "{shown} has a column {}, so its ids may be those of several tenants: give a view of one tenant's rows, \
                 without that column",
                tenant.name.trim_start_matches("t.")
            )));
        }
        if query.with_time && time.is_none() {
            return Err(no_column(&shown, "--time-column", TIME[0], &rows));
        }
        Ok(PgProcessed {
            pool,
            table,
            id,
            time: time.filter(|_| query.with_time),
            scope: scope.map(|column| (column, query.scope)),
            status: status.map(|column| (column, query.done)),
        })
    }

    /// Up to `limit` ids, ordered by key, after a row of an earlier page.
    pub async fn page(&self, after: Option<&ProcessedRow>, limit: u32) -> Result<Vec<ProcessedRow>> {
        let sql = self.page_sql(after.is_some());
        let mut query = sqlx::query_as(AssertSqlSafe(sql)).bind(i64::from(limit));
        if let Some((_, scope)) = &self.scope {
            query = query.bind(scope.as_str());
        }
        if let Some((_, done)) = &self.status {
            query = query.bind(done.as_slice());
        }
        if let Some(row) = after {
            query = query.bind(row.id.as_str());
            if self.time.is_some() {
                query = query.bind(row.after.as_deref());
            }
        }
        let rows: Vec<Selected> = self.read("reading --from", query).await?;
        let rows: Vec<_> = rows
            .into_iter()
            .map(|(id, after, ms, open)| ProcessedRow { id, time: ms.map(Time::from_millis), open, after })
            .collect();
        if after.is_some_and(|after| {
            rows.last().is_some_and(|last| last.id == after.id && last.after == after.after)
        }) {
            return Err(Error::Config(format!("--from: the ids of {} have no order", self.table)));
        }
        Ok(rows)
    }

    fn page_sql(&self, goes_on: bool) -> String {
        let mut number = 1;
        let mut next = || {
            number += 1;
            number
        };
        let (id, time) = (&self.id.name, self.time.as_ref().map(|time| &time.name));
        let mut wanted = vec![format!("{id} is not null")];
        if let Some((scope, _)) = &self.scope {
            wanted.push(format!("{}::text = ${}", scope.name, next()));
        }
        let open = self.status.as_ref().map_or_else(
            || "null::text".to_owned(),
            |(status, _)| {
                let status = &status.name;
                format!(
                    "case when bool_or({status}::text = any(${})) then null else coalesce(min({status}::text), 'null') end",
                    next()
                )
            },
        );
        if let Some(time) = &self.time {
            wanted.push(format!("isfinite({})", time.name));
        }
        if goes_on {
            let first = format!("${}::{}", next(), self.id.kind);
            wanted.push(match &self.time {
                Some(time) => format!("({id}, {}) > ({first}, ${}::{})", time.name, next(), time.kind),
                None => format!("{id} > {first}"),
            });
        }
        let keys = time.map_or_else(|| id.clone(), |time| format!("{id}, {time}"));
        let times = time.map_or_else(
            || "null::text, null::bigint".to_owned(),
            |time| format!("{time}::text, floor(extract(epoch from {time}) * 1000)::bigint"),
        );
        format!(
            "select {id}::text, {times}, {open} from {} as t where {} group by {keys} order by {keys} limit $1",
            self.table,
            wanted.join(" and ")
        )
    }

    /// How many rows have no id; and, where the time is part of the identity, how many have an id and no time.
    pub async fn unnamed(&self) -> Result<(u64, u64)> {
        let id = &self.id.name;
        let timeless = self.time.as_ref().map_or_else(
            || "false".to_owned(),
            |time| format!("{id} is not null and ({0} is null or not isfinite({0}))", time.name),
        );
        let scope = self.scope.as_ref().map(|(scope, _)| format!(" where {}::text = $1", scope.name));
        let sql = format!(
            "select count(*) filter (where {id} is null), count(*) filter (where {timeless}) from {} as t{}",
            self.table,
            scope.unwrap_or_default()
        );
        let mut query = sqlx::query_as(AssertSqlSafe(sql));
        if let Some((_, scope)) = &self.scope {
            query = query.bind(scope.as_str());
        }
        let counts: Vec<(i64, i64)> = self.read("reading --from", query).await?;
        let count = |count: i64| u64::try_from(count).unwrap_or_default();
        Ok(counts.first().map_or((0, 0), |&(nameless, timeless)| (count(nameless), count(timeless))))
    }

    /// Runs one statement.
    async fn read<'q, T>(&self, what: &str, query: QueryAs<'q, Postgres, T, PgArguments>) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        let mut tx = begin(&self.pool, READ).await.map_err(|e| self.unreadable(what, e))?;
        let rows = query.persistent(false).fetch_all(&mut *tx).await.map_err(|e| self.unreadable(what, e))?;
        tx.commit().await.map_err(|e| self.unreadable(what, e))?;
        Ok(rows)
    }

    /// Some of the scopes that the table has, if it has a column of scopes.
    pub async fn scopes(&self) -> Result<Option<Vec<String>>> {
        let Some((column, _)) = &self.scope else { return Ok(None) };
        let sql = format!(
            "select distinct {0}::text from {1} as t where {0} is not null order by 1 limit 10",
            column.name, self.table
        );
        let query = sqlx::query_as(AssertSqlSafe(sql));
        let rows: Vec<(String,)> = self.read("reading the scopes of --from", query).await?;
        Ok(Some(rows.into_iter().map(|(scope,)| scope).collect()))
    }

    /// A statement that the server refuses is a mistake in what it was pointed at.
    fn unreadable(&self, what: &str, error: sqlx::Error) -> Error {
        if let Some(refused) = error.as_database_error()
            && refused.code().is_some_and(|code| code.starts_with("42"))
        {
            let message = refused.message();
            return Error::Config(format!("--from {} cannot be read: {message}", self.table));
        }
        translate(what, error)
    }
}

/// The table's oid and its name with its schema.
async fn find(pool: &PgPool, table: &str) -> Result<Option<(i64, String)>> {
    let found = sqlx::query_as(
        "select c.oid::bigint, format('%I.%I', n.nspname, c.relname) from pg_class c \
         join pg_namespace n on n.oid = c.relnamespace \
         where c.oid = to_regclass($1) and c.relkind::text in ('r', 'p', 'v', 'm', 'f')",
    )
    .bind(table)
    .persistent(false)
    .fetch_optional(pool)
    .await;
    match found {
        // It is no name at all (42602), or one with too many parts (42601, 0A000).
        Err(sqlx::Error::Database(refused))
            if refused.code().is_some_and(|code| code.starts_with("42") || code == "0A000") =>
        {
            Ok(None)
        }
        found => found.map_err(|e| translate("looking for the table of --from", e)),
    }
}

fn no_column(table: &str, flag: &str, name: &str, rows: &[(String, String)]) -> Error {
    let has: Vec<_> = rows.iter().take(30).map(|(name, _)| Visible(name).to_string()).collect();
    Error::Config(format!(
        "{table} has no column {}: name one with {flag}; it has {}",
        Visible(name),
        has.join(", ")
    ))
}

/// With the table's alias: a bare name in ORDER BY would be that of a column of the answer, which is text,
/// and numbers sort otherwise.
fn quoted(name: &str) -> String {
    format!("t.\"{}\"", name.replace('"', "\"\""))
}
