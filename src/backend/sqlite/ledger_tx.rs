//! One transaction's view of the ledger: rows for the shared engine, and a cache of facts that need
//! not be read twice.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Params, params};

use super::codec::{self, COLUMNS, HEAD, Names, READ, Stored};
use super::connect::simple;
use super::fault::Doing;
use super::schema;
use crate::clock::{Clock, Time};
use crate::error::{Error, Result};
use crate::id::{Aggregate, Scope, Tenant};
use crate::ledger::transition::{Head, Row};
use crate::ledger::{Audit, Intervene, Key, Rows, Token, Week};

/// Cached facts about the file other than rows. Numbers of scopes and names never change once
/// committed. Weeks do, so they are dropped from the cache when another connection has written.
#[derive(Debug, Default)]
pub(super) struct Memo {
    scopes: HashMap<(Option<Tenant>, Scope), (i32, Time)>,
    /// The scope of the last claim, which is mostly that of the next.
    last_scope: Option<(Option<Tenant>, Scope, (i32, Time))>,
    names: HashMap<Arc<str>, i64>,
    weeks: HashMap<Week, WeekMemo>,
    weeks_count: Option<usize>,
    version: Option<i64>,
}

/// How many scopes are cached, and how many names.
const NAMES_MAX: usize = 10_000;

/// Caches one more. Callers choose names: a flood of them must not fill the memory. What is forgotten costs a lookup.
fn remember<K: Eq + Hash, V>(known: &mut HashMap<K, V>, key: K, value: V) {
    if known.len() >= NAMES_MAX {
        known.clear();
    }
    known.insert(key, value);
}

/// Cached facts about a week.
#[derive(Debug, Clone, Copy)]
struct WeekMemo {
    made: bool,
    dropped: Option<i32>,
    /// When this transaction last changed the week.
    touched: Option<Time>,
}

impl Memo {
    /// Drops what another connection may have changed. Called at the start of a transaction, once
    /// it holds the lock.
    pub(super) fn refresh(&mut self, conn: &Connection) -> Result<()> {
        let version = conn
            .prepare_cached("PRAGMA main.data_version")
            .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
            .doing("beginning a transaction")?;
        if self.version != Some(version) {
            self.weeks.clear();
            self.weeks_count = None;
            self.version = Some(version);
        }
        Ok(())
    }
}

/// One transaction's view of the ledger.
pub(super) struct LedgerTx<'c> {
    pub(super) conn: &'c Connection,
    pub(super) memo: &'c mut Memo,
    clock: &'c dyn Clock,
    /// The token of the current batch: all its claims get the same one.
    batch: Option<Token>,
}

impl<'c> LedgerTx<'c> {
    pub(super) fn new(conn: &'c Connection, memo: &'c mut Memo, clock: &'c dyn Clock) -> Self {
        LedgerTx { conn, memo, clock, batch: None }
    }

    /// Uses this token from here on.
    pub(super) fn one_token(&mut self, token: Token) {
        self.batch = Some(token);
    }

    /// Draws a token per claim again.
    pub(super) fn fresh_tokens(&mut self) {
        self.batch = None;
    }

    fn week(&mut self, week: Week) -> Result<&mut WeekMemo> {
        if !self.memo.weeks.contains_key(&week) {
            let known = self
                .conn
                .prepare_cached(
                    "SELECT EXISTS (SELECT 1 FROM main.hapax_week WHERE week = ?1), \
                     (SELECT barred FROM main.hapax_dropped WHERE week = ?1)",
                )
                .and_then(|mut statement| {
                    statement.query_row([week.number()], |row| {
                        Ok(WeekMemo { made: row.get(0)?, dropped: row.get(1)?, touched: None })
                    })
                })
                .doing("looking for a week")?;
            self.memo.weeks.insert(week, known);
        }
        // It was inserted just above.
        self.memo.weeks.get_mut(&week).ok_or_else(|| Error::Corrupt("a week came and went".into()))
    }

    /// Whether the rows of this week can only be in its own table: the table exists and the week
    /// was never dropped.
    pub(super) fn is_plain(&mut self, week: Week) -> Result<bool> {
        let known = self.week(week)?;
        Ok(known.made && known.dropped.is_none())
    }

    /// Notes that the week changed; [`finish`](LedgerTx::finish) writes that once.
    pub(super) fn touch(&mut self, week: Week, now: Time) -> Result<()> {
        let known = self.week(week)?;
        known.touched = Some(known.touched.map_or(now, |touched| touched.max(now)));
        Ok(())
    }

    /// Writes the noted changes. Called before the commit, or before a caller's transaction goes
    /// on.
    pub(super) fn finish(&mut self) -> Result<()> {
        for (week, known) in &mut self.memo.weeks {
            let Some(touched) = known.touched.take().filter(|_| known.made) else { continue };
            self.conn
                .prepare_cached("UPDATE main.hapax_week SET touched = max(touched, ?2) WHERE week = ?1")
                .and_then(|mut statement| statement.execute([i64::from(week.number()), touched.as_micros()]))
                .doing("noting when a week was last written to")?;
        }
        Ok(())
    }

    fn new_scope(&self, tenant: Option<&Tenant>, scope: &Scope) -> Result<(i32, Time)> {
        let now = self.clock.now();
        let number = self
            .conn
            .execute(
                "INSERT INTO main.hapax_scope (tenant, scope, began) VALUES (?1, ?2, ?3)",
                params![tenant.map_or("", Tenant::as_str), scope.as_str(), now.as_micros()],
            )
            .map(|_| self.conn.last_insert_rowid())
            .doing("registering a scope")?;
        Ok((number as i32, now))
    }

    /// The number of a name. Registers the name if it is new.
    pub(super) fn name(&mut self, name: &str) -> Result<i64> {
        if let Some(number) = self.memo.names.get(name) {
            return Ok(*number);
        }
        let number = self
            .conn
            .prepare_cached("SELECT number FROM main.hapax_name WHERE name = ?1")
            .and_then(|mut statement| statement.query_row([name], |row| row.get(0)).optional())
            .doing("looking for a name")?;
        let number = match number {
            Some(number) => number,
            None => self
                .conn
                .prepare_cached("INSERT INTO main.hapax_name (name) VALUES (?1)")
                .and_then(|mut statement| statement.insert([name]))
                .doing("registering a name")?,
        };
        remember(&mut self.memo.names, name.into(), number);
        Ok(number)
    }

    /// The numbers of a row's names.
    pub(super) fn names(&mut self, row: &Row) -> Result<Names> {
        let owner = row.owner.as_ref().map(|owner| self.name(owner.as_str())).transpose()?;
        let topic = row.origin.as_ref().map(|origin| self.name(origin.topic.as_str())).transpose()?;
        Ok(Names { owner, topic })
    }

    /// Runs `run` and rolls back its changes, whatever it returns.
    pub(super) fn undone<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.finish()?;
        simple(self.conn, "SAVEPOINT hapax_undone", "marking what to undo")?;
        let result = run(self);
        // The cache may hold numbers and weeks that are about to be rolled back.
        *self.memo = Memo { version: self.memo.version, ..Memo::default() };
        simple(self.conn, "ROLLBACK TO hapax_undone", "undoing")?;
        simple(self.conn, "RELEASE hapax_undone", "undoing")?;
        result
    }

    fn write(&self, sql: &str, key: &Key, row: &Row, names: Names) -> Result<usize> {
        let run = || -> rusqlite::Result<usize> {
            let mut statement = self.conn.prepare_cached(sql)?;
            statement.raw_bind_parameter(1, key.scope)?;
            statement.raw_bind_parameter(2, key.id.as_slice())?;
            codec::bind_common(&mut statement, row, names)?;
            codec::bind_own(&mut statement, row)?;
            codec::bind_rest(&mut statement, row, names)?;
            if statement.parameter_count() > 22 {
                statement.raw_bind_parameter(23, key.week.number())?;
            }
            statement.raw_execute()
        };
        run().doing("writing an entry")
    }

    fn read(&self, sql: &str, key: impl Params) -> Result<Option<Row>> {
        self.conn
            .prepare_cached(sql)
            .and_then(|mut statement| statement.query_row(key, Stored::read).optional())
            .doing("reading an entry")?
            .map(Stored::row)
            .transpose()
    }
}

/// Parameters 3 to 22.
const VALUES: &str =
    "?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22";

/// The statement that inserts a new row unless its key exists.
pub(super) fn insert_sql(week: Week) -> String {
    format!(
        "INSERT INTO main.hapax_entry_{} (scope, id, {COLUMNS}) VALUES (?1, ?2, {VALUES}) ON CONFLICT DO NOTHING",
        week.number()
    )
}

fn upsert_sql(week: Week) -> String {
    format!(
        "INSERT INTO main.hapax_entry_{} (scope, id, {COLUMNS}) VALUES (?1, ?2, {VALUES}) \
         ON CONFLICT (scope, id) DO UPDATE SET ({COLUMNS}) = ({VALUES})",
        week.number()
    )
}

impl Rows for LedgerTx<'_> {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<(i32, Time)> {
        if let Some((last_tenant, last_scope, known)) = &self.memo.last_scope
            && last_scope == scope
            && last_tenant.as_ref() == tenant
        {
            return Ok(*known);
        }
        let key = (tenant.cloned(), scope.clone());
        if let Some(known) = self.memo.scopes.get(&key).copied() {
            self.memo.last_scope = Some((key.0, key.1, known));
            return Ok(known);
        }
        let known = match find_scope(self.conn, tenant, scope)? {
            Some(known) => known,
            None => self.new_scope(tenant, scope)?,
        };
        remember(&mut self.memo.scopes, key, known);
        Ok(known)
    }

    fn known_scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<Option<i32>> {
        if let Some((number, _)) = self.memo.scopes.get(&(tenant.cloned(), scope.clone())) {
            return Ok(Some(*number));
        }
        Ok(find_scope(self.conn, tenant, scope)?.map(|(number, _)| number))
    }

    fn token(&mut self) -> Result<Token> {
        if let Some(token) = self.batch {
            return Ok(token);
        }
        self.conn
            .prepare_cached("UPDATE main.hapax_meta SET token = token + 1 RETURNING token")
            .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
            .map(Token)
            .doing("drawing a token")
    }

    fn dropped(&mut self, week: Week) -> Result<Option<i32>> {
        Ok(self.week(week)?.dropped)
    }

    fn make_week(&mut self, week: Week) -> Result<()> {
        let now = self.now();
        schema::create_week(self.conn, week)?;
        self.conn
            .execute(
                "INSERT INTO main.hapax_week (week, touched) VALUES (?1, ?2)",
                [i64::from(week.number()), now.as_micros()],
            )
            .doing("making a week")?;
        self.memo.weeks_count = None;
        self.week(week)?.made = true;
        Ok(())
    }

    fn weeks(&mut self, week: Week) -> Result<(usize, bool)> {
        let made = self.week(week)?.made;
        let count = match self.memo.weeks_count {
            Some(count) => count,
            None => self
                .conn
                .query_row("SELECT count(*) FROM main.hapax_week", [], |row| row.get::<_, i64>(0))
                .doing("counting weeks")? as usize,
        };
        self.memo.weeks_count = Some(count);
        Ok((count, made))
    }

    fn row(&mut self, key: &Key) -> Result<Option<Row>> {
        let known = *self.week(key.week)?;
        let week = key.week.number();
        if known.made {
            let sql = format!("SELECT {READ} FROM main.hapax_entry_{week} WHERE scope = ?1 AND id = ?2");
            if let Some(row) = self.read(&sql, params![key.scope, key.id])? {
                return Ok(Some(row));
            }
        }
        if known.dropped.is_none() {
            return Ok(None);
        }
        let sql = format!("SELECT {READ} FROM main.hapax_kept WHERE week = ?1 AND scope = ?2 AND id = ?3");
        self.read(&sql, params![week, key.scope, key.id])
    }

    fn put(&mut self, key: &Key, row: &Row) -> Result<()> {
        let known = *self.week(key.week)?;
        let names = self.names(row)?;
        if known.dropped.is_some() {
            let sql = format!(
                "UPDATE main.hapax_kept SET ({COLUMNS}) = ({VALUES}) WHERE scope = ?1 AND id = ?2 AND week = ?23"
            );
            if self.write(&sql, key, row, names)? > 0 {
                return Ok(());
            }
        }
        if !known.made {
            // A stale or parked event of a dropped week. It goes to the kept rows; the week's table
            // is not created again.
            let sql = format!(
                "INSERT INTO main.hapax_kept (scope, id, {COLUMNS}, week) VALUES (?1, ?2, {VALUES}, ?23)"
            );
            self.write(&sql, key, row, names)?;
            return Ok(());
        }
        self.write(&upsert_sql(key.week), key, row, names)?;
        let now = self.now();
        self.touch(key.week, now)
    }

    fn delete(&mut self, key: &Key) -> Result<()> {
        let week = key.week.number();
        if self.week(key.week)?.made {
            let sql = format!("DELETE FROM main.hapax_entry_{week} WHERE scope = ?1 AND id = ?2");
            self.conn.execute(&sql, params![key.scope, key.id]).doing("removing an entry")?;
        }
        let sql = "DELETE FROM main.hapax_kept WHERE week = ?1 AND scope = ?2 AND id = ?3";
        // Does not touch the week: forgetting an entry must not keep the week alive.
        self.conn.execute(sql, params![week, key.scope, key.id]).doing("removing an entry")?;
        Ok(())
    }

    fn head(&mut self, scope: i32, aggregate: &Aggregate) -> Result<Option<Head>> {
        self.conn
            .prepare_cached(&format!(
                "SELECT {HEAD} FROM main.hapax_head WHERE scope = ?1 AND aggregate = ?2"
            ))
            .and_then(|mut statement| {
                statement.query_row(params![scope, aggregate.as_str()], codec::head).optional()
            })
            .doing("reading the head of an aggregate")
    }

    fn put_head(&mut self, scope: i32, aggregate: &Aggregate, head: &Head) -> Result<()> {
        let number = |seq: Option<u64>| seq.map(|seq| seq as i64);
        self.conn
            .prepare_cached(&format!(
                "INSERT INTO main.hapax_head (scope, aggregate, {HEAD}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) \
                 ON CONFLICT (scope, aggregate) DO UPDATE SET ({HEAD}) = (?3, ?4, ?5, ?6, ?7, ?8, ?9)"
            ))
            .and_then(|mut statement| {
                statement.execute(params![
                    scope,
                    aggregate.as_str(),
                    number(head.last),
                    number(head.lease.map(|lease| lease.seq)),
                    head.lease.map(|lease| lease.token.0),
                    head.lease.map(|lease| lease.until.as_micros()),
                    codec::pack_seqs(&head.retrying),
                    number(head.parked),
                    head.gap_at.map(Time::as_micros),
                ])
            })
            .doing("writing the head of an aggregate")?;
        Ok(())
    }

    fn audit(&mut self, intervene: &Intervene) -> Result<()> {
        self.conn
            .execute(
                "INSERT INTO main.hapax_audit (at, by, what, identity, why) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    self.now().as_micros(),
                    intervene.by,
                    intervene.what.name(),
                    Audit::name(&intervene.identity),
                    intervene.reason
                ],
            )
            .doing("writing an audit row")?;
        Ok(())
    }
}

/// The number of a tenant's scope and when it began, if it is registered.
pub(super) fn find_scope(
    conn: &Connection,
    tenant: Option<&Tenant>,
    scope: &Scope,
) -> Result<Option<(i32, Time)>> {
    conn.prepare_cached("SELECT number, began FROM main.hapax_scope WHERE tenant = ?1 AND scope = ?2")
        .and_then(|mut statement| {
            statement
                .query_row([tenant.map_or("", Tenant::as_str), scope.as_str()], |row| {
                    Ok((row.get(0)?, Time::from_micros(row.get(1)?)))
                })
                .optional()
        })
        .doing("looking for a scope")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn t546_a_flood_of_scopes_and_names_does_not_fill_the_memory() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(
            "CREATE TABLE hapax_scope (number INTEGER PRIMARY KEY, tenant, scope, began, UNIQUE (tenant, scope));
             CREATE TABLE hapax_name (number INTEGER PRIMARY KEY, name UNIQUE)",
        )
        .unwrap();
        let mut memo = Memo::default();
        let scope = |n: usize| Scope::new(format!("scope-{n}")).unwrap();
        let mut tx = LedgerTx::new(&conn, &mut memo, &SystemClock);
        let first = (tx.scope(None, &scope(0)).unwrap(), tx.name("name-0").unwrap());
        for n in 0..NAMES_MAX + 10 {
            tx.scope(None, &scope(n)).unwrap();
            tx.name(&format!("name-{n}")).unwrap();
        }
        assert!(tx.memo.scopes.len() <= NAMES_MAX && tx.memo.names.len() <= NAMES_MAX);
        let again = (tx.scope(None, &scope(0)).unwrap(), tx.name("name-0").unwrap());
        assert_eq!(again, first, "what was forgotten is found again");
    }
}
