//! Sends settlings and extensions. Both carry the token, so both can be sent again after any doubt.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgArguments;
use sqlx::query::QueryAs;
use sqlx::{AssertSqlSafe, Postgres};

use super::begin::begin;
use super::claim::{is_out_of_time, split};
use super::error::{Meaning, meaning, translate};
use super::held::Bodies;
use super::{Inner, read};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Record;
use crate::id::EventId;
use crate::ledger::transition;
use crate::ledger::{
    Extend, Identity, Intervene, Intervened, Metadata, OnDead, Settle, Settled, Token, Verdict, Week,
};

const TRIES_MAX: u32 = 12;

type Answer = (i32, i32, Option<i64>, Option<String>);
type Query<'q> = QueryAs<'q, Postgres, Answer, PgArguments>;

struct Ready<'a> {
    index: usize,
    scope: i32,
    week: Week,
    key: std::borrow::Cow<'a, [u8]>,
    settle: &'a Settle,
}

pub(super) async fn settle(inner: &Inner, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
    let mut answers: Vec<Option<Result<Settled>>> = Vec::with_capacity(settles.len());
    let mut done = Vec::new();
    let mut finished = Vec::new();
    let mut each = Vec::new();
    for (index, settle) in settles.iter().enumerate() {
        if let Err(error) = inner.settings.ledger.check_settle(settle) {
            answers.push(Some(Err(error)));
            continue;
        }
        // Nothing was ever claimed in an unknown scope; this lookup does not register it.
        let Some(scope) = read::scope(inner, &settle.identity).await? else {
            answers.push(Some(Ok(Settled::Fenced { state: None })));
            continue;
        };
        answers.push(None);
        let one = Ready { index, scope, week: settle.week, key: settle.identity.id.key(), settle };
        match &settle.verdict {
            Verdict::Done { .. } if settle.order.is_none() => done.push(one),
            Verdict::Finished { .. } if settle.order.is_none() => finished.push(one),
            _ => each.push(one),
        }
    }
    for (mut group, from, to) in [(done, "L", "D"), (finished, "C", "F")] {
        group.sort_by(|a, b| (a.scope, &a.key, a.week).cmp(&(b.scope, &b.key, b.week)));
        // An UPDATE changes a row once, so a settling that repeats another of the batch is sent
        // separately.
        let repeats: Vec<Ready<'_>> = {
            let mut last: Option<(i32, Vec<u8>)> = None;
            group
                .extract_if(.., |one| {
                    let key = (one.scope, one.key.to_vec());
                    let again = last.as_ref() == Some(&key);
                    last = Some(key);
                    again
                })
                .collect()
        };
        send_parts(inner, &group, &mut answers, |slice| Columns::of(slice, Some((from, to)))).await?;
        each.extend(repeats);
    }
    send_parts(inner, &each, &mut answers, |slice| Columns::of(slice, None)).await?;
    let missing = || Err(Error::Corrupt("a settling without an answer".into()));
    Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect())
}

fn body(settle: &Settle) -> Option<&Record> {
    match &settle.verdict {
        Verdict::Retry { body, .. } | Verdict::Dead { body, .. } => body.as_ref(),
        _ => None,
    }
}

/// Settles in the caller's transaction, one by one with the full state machine. A locked or bad row
/// affects only itself.
pub(super) async fn settle_in(
    inner: &Inner,
    connection: &mut sqlx::PgConnection,
    settles: &[Settle],
) -> Result<Vec<Result<Settled>>> {
    let fenced = || Ok(Settled::Fenced { state: None });
    let mut answers: Vec<Result<Settled>> = settles.iter().map(|_| fenced()).collect();
    let mut ready = Vec::with_capacity(settles.len());
    for (index, settle) in settles.iter().enumerate() {
        if let Err(error) = inner.settings.ledger.check_settle(settle) {
            answers[index] = Err(error);
            continue;
        }
        let scope = match inner.known_scope(&settle.identity) {
            Some(scope) => Some(scope),
            None => read::find_scope(inner, &mut *connection, &settle.identity).await?,
        };
        let Some(scope) = scope else { continue };
        ready.push(Ready { index, scope, week: settle.week, key: settle.identity.id.key(), settle });
    }
    let mut parts = vec![0..ready.len()];
    while let Some(part) = parts.pop().filter(|part| !part.is_empty()) {
        let slice = &ready[part.clone()];
        let savepoint = async |connection: &mut sqlx::PgConnection, sql: &'static str| {
            sqlx::raw_sql(sql).execute(connection).await.map_err(|e| translate("settling", e))
        };
        savepoint(&mut *connection, "savepoint hapax_settle").await?;
        let columns = Columns::of(slice, None);
        let result = columns.query(inner, false).fetch_all(&mut *connection).await;
        let end = match &result {
            Ok(_) => "release savepoint hapax_settle",
            Err(_) => "rollback to savepoint hapax_settle; release savepoint hapax_settle",
        };
        match result {
            Ok(rows) => {
                savepoint(&mut *connection, end).await?;
                for row in &rows {
                    if let Some(one) = slice.get(row.0 as usize - 1) {
                        answers[one.index] = settled(row);
                    }
                }
            }
            Err(error) if matches!(meaning(&error), Meaning::Locked | Meaning::Data) => {
                savepoint(&mut *connection, end).await?;
                if slice.len() > 1 {
                    split(&part, &mut parts);
                } else {
                    answers[slice[0].index] = Err(translate("settling", error));
                }
            }
            Err(error) => return Err(translate("settling", error)),
        }
    }
    Ok(answers)
}

async fn send_parts<'a, 'r>(
    inner: &Inner,
    group: &'r [Ready<'a>],
    answers: &mut [Option<Result<Settled>>],
    columns: impl Fn(&'r [Ready<'a>]) -> Columns<'r>,
) -> Result<()> {
    if group.is_empty() {
        return Ok(());
    }
    let mut tries = 0;
    let mut parts = vec![0..group.len()];
    while let Some(part) = parts.pop() {
        let slice = &group[part.clone()];
        let columns = columns(slice);
        crate::crash_point!("settle.sending");
        match run(inner, columns.query(inner, true)).await {
            Ok(rows) => {
                crate::crash_point!("settle.answered");
                for row in rows {
                    if row.0 == 0 {
                        for one in slice {
                            answers[one.index] = Some(settled(&row));
                        }
                    } else if let Some(one) = slice.get(row.0 as usize - 1) {
                        answers[one.index] = Some(settled(&row));
                    }
                }
            }
            Err(error) => match trouble(inner, &error, slice.len(), &mut tries) {
                Trouble::Split => split(&part, &mut parts),
                Trouble::Alone => answers[slice[0].index] = Some(Err(translate("settling", error))),
                Trouble::Again => {
                    pause(tries).await;
                    parts.insert(0, part);
                }
                Trouble::All => return Err(translate("settling", error)),
            },
        }
    }
    Ok(())
}

/// Runs a statement in a transaction of its own.
async fn run(inner: &Inner, query: Query<'_>) -> sqlx::Result<Vec<Answer>> {
    if inner.pooled() {
        let mut tx = begin(&inner.pool, super::BEGIN).await?;
        let rows = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        return Ok(rows);
    }
    query.fetch_all(&inner.pool).await
}

fn settled((_, kind, at, state): &Answer) -> Result<Settled> {
    if *kind == 1 {
        let at = at.ok_or_else(|| Error::Corrupt("a settling without a time".into()))?;
        return Ok(Settled::Ok { at: Time::from_micros(at) });
    }
    Ok(Settled::Fenced { state: state.as_deref().map(|state| read::state(Some(state))).transpose()? })
}

/// Settlings, column by column.
struct Columns<'a> {
    /// `Some` for the fast UPDATE from one state to another.
    fast: Option<(&'static str, &'static str)>,
    bodies: Bodies<'a>,
    scopes: Vec<i32>,
    weeks: Vec<i16>,
    keys: Vec<&'a [u8]>,
    tokens: Vec<i64>,
    states: Vec<&'static str>,
    after: Vec<i64>,
    counted: Vec<bool>,
    notes: Vec<Option<&'a str>>,
    metadata: Option<Vec<Option<&'a str>>>,
    aggregates: Vec<Option<&'a str>>,
    skip: Vec<bool>,
    advance: Vec<Option<i64>>,
    distinct_weeks: Vec<i16>,
}

impl<'a> Columns<'a> {
    fn of(slice: &'a [Ready<'_>], fast: Option<(&'static str, &'static str)>) -> Self {
        let metadata = |settle: &'a Settle| match &settle.verdict {
            Verdict::Done { metadata } | Verdict::Finished { metadata } => {
                metadata.as_ref().map(Metadata::as_str)
            }
            _ => None,
        };
        let weeks: Vec<i16> = slice.iter().map(|one| one.week.number()).collect();
        let mut distinct_weeks = weeks.clone();
        distinct_weeks.sort_unstable();
        distinct_weeks.dedup();
        Columns {
            fast,
            bodies: Bodies::of(slice.iter().map(|one| body(one.settle))),
            scopes: slice.iter().map(|one| one.scope).collect(),
            weeks,
            keys: slice.iter().map(|one| &*one.key).collect(),
            tokens: slice.iter().map(|one| one.settle.token.0).collect(),
            states: slice.iter().map(|one| read::letter(one.settle.verdict.state())).collect(),
            after: slice.iter().map(|one| after(one.settle)).collect(),
            counted: slice.iter().map(|one| counted(one.settle)).collect(),
            notes: slice.iter().map(|one| reason(one.settle)).collect(),
            metadata: slice
                .iter()
                .any(|one| metadata(one.settle).is_some())
                .then(|| slice.iter().map(|one| metadata(one.settle)).collect()),
            aggregates: slice
                .iter()
                .map(|one| one.settle.order.as_ref().map(|order| order.aggregate.as_str()))
                .collect(),
            skip: slice
                .iter()
                .map(|one| one.settle.order.as_ref().is_some_and(|order| order.on_dead == OnDead::Skip))
                .collect(),
            advance: slice.iter().map(|one| one.settle.advance_to.map(|seq| seq as i64)).collect(),
            distinct_weeks,
        }
    }

    /// `own`: in a transaction of its own, not in a caller's.
    fn query(&self, inner: &Inner, own: bool) -> Query<'_> {
        let start =
            |sql: &Arc<str>| sqlx::query_as(AssertSqlSafe(Arc::clone(sql))).persistent(!inner.pooled());
        if let Some((from, to)) = self.fast {
            return start(&inner.sql.settle_done)
                .bind(&self.scopes)
                .bind(&self.weeks)
                .bind(&self.keys)
                .bind(&self.tokens)
                .bind(&self.metadata)
                .bind(&self.distinct_weeks)
                .bind(from)
                .bind(to);
        }
        let query = start(&inner.sql.settle_each)
            .bind(&self.scopes)
            .bind(&self.weeks)
            .bind(&self.keys)
            .bind(&self.tokens)
            .bind(&self.states)
            .bind(&self.after)
            .bind(&self.counted)
            .bind(&self.notes)
            .bind(&self.metadata)
            .bind(&self.aggregates)
            .bind(&self.skip)
            .bind(&self.advance);
        self.bodies.bind(query).bind(!own)
    }
}

fn after(settle: &Settle) -> i64 {
    match &settle.verdict {
        Verdict::Retry { after, .. } => micros(*after),
        _ => 0,
    }
}

fn counted(settle: &Settle) -> bool {
    !matches!(settle.verdict, Verdict::Retry { counted: false, .. })
}

fn reason(settle: &Settle) -> Option<&str> {
    match &settle.verdict {
        Verdict::Retry { reason, .. } => reason.as_deref(),
        Verdict::Dead { reason, .. } | Verdict::Lost { reason } => Some(reason),
        _ => None,
    }
}

pub(super) async fn extend(inner: &Inner, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
    let mut scopes = Vec::with_capacity(extends.len());
    for extend in extends {
        // 0 stands for an unknown scope, which is not registered for this: no scope has that
        // number.
        scopes.push(read::scope(inner, &extend.identity).await?.unwrap_or(0));
    }
    // In key order, like every statement.
    let mut order: Vec<usize> = (0..extends.len()).collect();
    order.sort_by_key(|at| (scopes[*at], extends[*at].identity.id.key()));
    let fenced = || Ok(Settled::Fenced { state: None });
    let mut answers: Vec<Result<Settled>> = extends.iter().map(|_| fenced()).collect();
    let mut tries = 0;
    let mut parts = vec![0..order.len()];
    while let Some(part) = parts.pop() {
        let slice = &order[part.clone()];
        let keys: Vec<_> = slice.iter().map(|at| extends[*at].identity.id.key()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.extend)))
            .persistent(!inner.pooled())
            .bind(slice.iter().map(|at| scopes[*at]).collect::<Vec<i32>>())
            .bind(slice.iter().map(|at| extends[*at].week.number()).collect::<Vec<i16>>())
            .bind(&keys)
            .bind(slice.iter().map(|at| extends[*at].token.0).collect::<Vec<i64>>())
            .bind(slice.iter().map(|at| micros(extends[*at].lease)).collect::<Vec<i64>>());
        match run(inner, query).await {
            Ok(rows) => {
                for row in &rows {
                    if let Some(at) = slice.get(row.0 as usize - 1) {
                        answers[*at] = settled(row);
                    }
                }
            }
            Err(error) => match trouble(inner, &error, slice.len(), &mut tries) {
                Trouble::Split => split(&part, &mut parts),
                Trouble::Alone => answers[slice[0]] = Err(translate("extending a lease", error)),
                Trouble::Again => {
                    pause(tries).await;
                    parts.insert(0, part);
                }
                Trouble::All => return Err(translate("extending leases", error)),
            },
        }
    }
    Ok(answers)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// What to do about a statement that failed.
enum Trouble {
    /// Something in it is locked or bad: split it to find out which.
    Split,
    /// The error concerns this one alone.
    Alone,
    /// Send it again, after the others.
    Again,
    /// The error concerns all of them.
    All,
}

fn trouble(inner: &Inner, error: &sqlx::Error, count: usize, tries: &mut u32) -> Trouble {
    inner.note_pooler(error);
    let kind = meaning(error);
    match kind {
        Meaning::Locked | Meaning::Data if count > 1 => Trouble::Split,
        Meaning::Serialization | Meaning::Locked | Meaning::Doubt
            if *tries < TRIES_MAX && !is_out_of_time(error) =>
        {
            *tries += 1;
            Trouble::Again
        }
        Meaning::Data | Meaning::Locked => Trouble::Alone,
        _ => Trouble::All,
    }
}

/// Gives other transactions time to end. The first retry is immediate.
async fn pause(tries: u32) {
    tokio::time::sleep(Duration::from_millis(u64::from(tries.saturating_sub(1)) * 10)).await;
}

/// Intervenes in one transaction: locks the row, lets the transition function decide, and stores
/// the result.
pub(super) async fn intervene(inner: &Inner, intervene: &Intervene) -> Result<Intervened> {
    let what = "intervening";
    let schema = &inner.settings.schema;
    let week = Week::route(inner.settings.ledger.identity, &intervene.identity.id, intervene.time)?;
    let mut tx = inner.begin().await?;
    let missing = || Error::NotFound(format!("no entry for {}", intervene.identity));
    // Heads are locked before entries, here too. A read without a lock finds out which head.
    let looked = read::find(inner, &mut tx, &intervene.identity, week, false).await?.ok_or_else(missing)?;
    let head = read::head(inner, &mut tx, looked.scope, &looked.row).await?;
    let before = read::find(inner, &mut tx, &intervene.identity, week, true).await?.ok_or_else(missing)?;
    if before.row.order != looked.row.order {
        // The entry now belongs to another head than the locked one, and the decision must not be
        // stored there.
        tx.rollback().await.map_err(|e| translate(what, e))?;
        return Err(Error::Contended {
            what: format!("{what}: the entry's order has just changed"),
            source: None,
        });
    }
    // A function of the schema stores the row, so that `held` stays consistent.
    let now = read::now_in(inner, &mut tx).await?;
    let token: i64 = sqlx::query_scalar(AssertSqlSafe(format!("select nextval('{schema}.token')")))
        .persistent(false)
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(what, e))?;
    let decided = transition::intervene(intervene, &before.row, &head, now, Token(token));
    if intervene.dry_run || decided.is_err() {
        // Roll back now, not when the connection is used next, so that no other transaction meets
        // these locks.
        tx.rollback().await.map_err(|e| translate(what, e))?;
        let (next, _) = decided?;
        let entry = |row: transition::Row| row.entry(intervene.identity.clone(), week);
        return Ok(Intervened { before: entry(before.row), after: next.map(entry) });
    }
    let (next, next_head) = decided?;
    let identity = intervene.identity.clone();
    let answer = |row: &transition::Row| row.clone().entry(identity.clone(), week);
    let result = Intervened { before: answer(&before.row), after: next.as_ref().map(answer) };
    let letter = next.as_ref().map(|row| read::letter(row.state));
    let sql = format!("select {schema}.store($1, $2, $3, $4::text::\"char\", $5, $6, $7, $8, $9, $10)");
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(before.scope)
        .bind(week.number())
        .bind(&*EventId::key(&identity.id))
        .bind(letter)
        .bind(next.as_ref().map_or(0, |row| row.token.0))
        .bind(next.as_ref().map_or(0, |row| row.attempts as i32))
        .bind(next.as_ref().map_or(0, |row| row.at.as_micros()))
        .bind(next.as_ref().and_then(|row| row.reason.as_deref()))
        .bind(next.as_ref().is_some_and(|row| row.body.is_none()) && before.row.body.is_some())
        .bind(next.as_ref().is_some_and(|row| row.unordered))
        .execute(&mut *tx)
        .await
        .map_err(|e| translate(what, e))?;
    if let (Some(head), Some((aggregate, _))) = (next_head, &before.row.order) {
        read::put_head(inner, &mut tx, before.scope, aggregate, &head).await?;
    }
    audit(inner, &mut tx, intervene, &identity).await?;
    tx.commit().await.map_err(|e| translate(what, e))?;
    Ok(result)
}

async fn audit(
    inner: &Inner,
    tx: &mut sqlx::PgTransaction<'_>,
    intervene: &Intervene,
    identity: &Identity,
) -> Result<()> {
    let schema = &inner.settings.schema;
    let sql = format!(
        "insert into {schema}.audit (at, by, what, identity, why) values ({schema}.ledger_now(), $1, $2, $3, $4)"
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(&intervene.by)
        .bind(intervene.what.name())
        .bind(identity.to_string())
        .bind(&intervene.why)
        .execute(&mut **tx)
        .await
        .map(|_| ())
        .map_err(|e| translate("writing the audit row", e))
}
