//! Sends settlings and extensions. Both carry the token, so both can be sent again after any doubt.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use sqlx::AssertSqlSafe;

use super::codes::{from_row, micros, numbered};
use super::database::Select;
use super::error::{Meaning, translate};
use super::executor::{Batch, Executor, Locked};
use super::held::Bodies;
use super::{Inner, read};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Record;
use crate::id::EventId;
use crate::ledger::transition;
use crate::ledger::{
    Audit, Extend, Identity, Intervene, Intervened, Metadata, OnDead, Settle, Settled, State, Token, Verdict,
    Week,
};

numbered! {
    /// The kind of an answer.
    enum Kind {
        /// The token is not the current one; nothing was changed.
        Fenced = 0,
        /// Recorded, now or before.
        Recorded = 1,
    }
}

from_row! { "o_",
    /// One row of an answer.
    struct Answer {
        /// The place of its settling in the statement, from 1. 0: it applies to all of them.
        i: i32,
        kind: Kind,
        at: Option<i64>,
        state: Option<State>,
    }
}

impl Answer {
    fn settled(&self) -> Result<Settled> {
        match (self.kind, self.at) {
            (Kind::Fenced, _) => Ok(Settled::Fenced { state: self.state }),
            (Kind::Recorded, Some(at)) => Ok(Settled::Ok { at: Time::from_micros(at) }),
            (Kind::Recorded, None) => Err(Error::Corrupt("a settling without a time".into())),
        }
    }
}

struct Ready<'a> {
    index: usize,
    scope: i32,
    week: Week,
    key: Cow<'a, [u8]>,
    settle: &'a Settle,
}

/// Settles. A locked or bad row affects only itself.
pub(super) async fn settle(
    inner: &Inner,
    executor: &mut Executor<'_>,
    settles: &[Settle],
) -> Result<Vec<Result<Settled>>> {
    let mut answers: Vec<Option<Result<Settled>>> = Vec::with_capacity(settles.len());
    let (mut done, mut finished, mut each) = (Vec::new(), Vec::new(), Vec::new());
    for (index, settle) in settles.iter().enumerate() {
        if let Err(error) = inner.settings.ledger.check_settle(settle) {
            answers.push(Some(Err(error)));
            continue;
        }
        // Nothing was ever claimed in an unknown scope; this lookup does not register it.
        let scope = match executor.caller() {
            Some(caller) => read::scope_in(inner, caller, &settle.identity).await?,
            None => read::scope(inner, &settle.identity).await?,
        };
        let Some(scope) = scope else {
            answers.push(Some(Ok(Settled::Fenced { state: None })));
            continue;
        };
        answers.push(None);
        let one = Ready { index, scope, week: settle.week, key: settle.identity.id.key(), settle };
        match &settle.verdict {
            // In a caller's transaction each settling must release what it does not change.
            _ if !executor.is_own() || settle.order.is_some() => each.push(one),
            Verdict::Done { .. } => done.push(one),
            Verdict::Finished { .. } => finished.push(one),
            _ => each.push(one),
        }
    }
    let groups = [(done, State::Leased, State::Done), (finished, State::Claimed, State::Finished)];
    for (mut group, from, to) in groups {
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
        let (group, fast) = (&group, Some((from, to)));
        executor.run(&mut Settles { inner, fast, group, answers: &mut answers }).await?;
        each.extend(repeats);
    }
    executor.run(&mut Settles { inner, fast: None, group: &each, answers: &mut answers }).await?;
    let missing = || Err(Error::Corrupt("a settling without an answer".into()));
    Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect())
}

/// Settlings that share a statement.
struct Settles<'a, 'o> {
    inner: &'a Inner,
    /// `Some` for the fast UPDATE from one state to another.
    fast: Option<(State, State)>,
    group: &'a [Ready<'a>],
    /// By the settlings' places in the caller's list.
    answers: &'o mut [Option<Result<Settled>>],
}

impl Batch for Settles<'_, '_> {
    const LOCKED: Locked = Locked::IsSentAgain;

    type Answer = Answer;

    fn len(&self) -> usize {
        self.group.len()
    }

    async fn send(&self, executor: &mut Executor<'_>, part: Range<usize>) -> sqlx::Result<Vec<Answer>> {
        let columns = Columns::of(&self.group[part]);
        let query = match self.fast {
            Some((from, to)) => columns.fast(self.inner, from, to),
            None => columns.each(self.inner, executor.is_own()),
        };
        crate::crash_point!("settle.sending");
        let answers = executor.fetch_all(query).await?;
        crate::crash_point!("settle.answered");
        Ok(answers)
    }

    fn answered(&mut self, part: Range<usize>, answers: Vec<Answer>) -> Result<()> {
        let slice = &self.group[part];
        for answer in answers {
            let of = match answer.i as usize {
                0 => slice,
                i => slice.get(i - 1..i).unwrap_or_default(),
            };
            for one in of {
                self.answers[one.index] = Some(answer.settled());
            }
        }
        Ok(())
    }

    fn failed(&mut self, at: usize, _: Meaning, error: Error) {
        self.answers[self.group[at].index] = Some(Err(error));
    }

    fn error(&self, error: sqlx::Error) -> Error {
        translate("settling", error)
    }
}

/// Settlings, column by column.
struct Columns<'a> {
    bodies: Bodies<'a>,
    scopes: Vec<i32>,
    weeks: Vec<i16>,
    keys: Vec<&'a [u8]>,
    tokens: Vec<i64>,
    states: Vec<State>,
    after: Vec<i64>,
    counted: Vec<bool>,
    reasons: Vec<Option<&'a str>>,
    metadata: Option<Vec<Option<&'a str>>>,
    aggregates: Vec<Option<&'a str>>,
    skip: Vec<bool>,
    advance: Vec<Option<i64>>,
    distinct_weeks: Vec<i16>,
}

impl<'a> Columns<'a> {
    fn of(slice: &'a [Ready<'_>]) -> Self {
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
            bodies: Bodies::of(slice.iter().map(|one| body(one.settle))),
            scopes: slice.iter().map(|one| one.scope).collect(),
            weeks,
            keys: slice.iter().map(|one| &*one.key).collect(),
            tokens: slice.iter().map(|one| one.settle.token.0).collect(),
            states: slice.iter().map(|one| one.settle.verdict.state()).collect(),
            after: slice.iter().map(|one| after(one.settle)).collect(),
            counted: slice.iter().map(|one| counted(one.settle)).collect(),
            reasons: slice.iter().map(|one| reason(one.settle)).collect(),
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

    fn fast(&self, inner: &Inner, from: State, to: State) -> Select<'_, Answer> {
        sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.settle_done)))
            .bind(&self.scopes)
            .bind(&self.weeks)
            .bind(&self.keys)
            .bind(&self.tokens)
            .bind(&self.metadata)
            .bind(&self.distinct_weeks)
            .bind(from)
            .bind(to)
    }

    /// `own`: in a transaction of its own, not in a caller's.
    fn each(&self, inner: &Inner, own: bool) -> Select<'_, Answer> {
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.settle_each)))
            .bind(&self.scopes)
            .bind(&self.weeks)
            .bind(&self.keys)
            .bind(&self.tokens)
            .bind(&self.states)
            .bind(&self.after)
            .bind(&self.counted)
            .bind(&self.reasons)
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

fn body(settle: &Settle) -> Option<&Record> {
    match &settle.verdict {
        Verdict::Retry { body, .. } | Verdict::Dead { body, .. } => body.as_ref(),
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
    let answers = extends.iter().map(|_| Ok(Settled::Fenced { state: None })).collect();
    let mut batch = Extensions { inner, extends, scopes, order, answers };
    Executor::new(&inner.database).run(&mut batch).await?;
    Ok(batch.answers)
}

struct Extensions<'a> {
    inner: &'a Inner,
    extends: &'a [Extend],
    scopes: Vec<i32>,
    /// The places of the extensions, in the order in which they are sent.
    order: Vec<usize>,
    answers: Vec<Result<Settled>>,
}

impl Batch for Extensions<'_> {
    const LOCKED: Locked = Locked::IsSentAgain;

    type Answer = Answer;

    fn len(&self) -> usize {
        self.order.len()
    }

    async fn send(&self, executor: &mut Executor<'_>, part: Range<usize>) -> sqlx::Result<Vec<Answer>> {
        let slice = &self.order[part];
        let each = || slice.iter().map(|at| &self.extends[*at]);
        let keys: Vec<_> = each().map(|extend| extend.identity.id.key()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(&self.inner.sql.extend)))
            .bind(slice.iter().map(|at| self.scopes[*at]).collect::<Vec<i32>>())
            .bind(each().map(|extend| extend.week.number()).collect::<Vec<i16>>())
            .bind(&keys)
            .bind(each().map(|extend| extend.token.0).collect::<Vec<i64>>())
            .bind(each().map(|extend| micros(extend.lease)).collect::<Vec<i64>>());
        executor.fetch_all(query).await
    }

    fn answered(&mut self, part: Range<usize>, answers: Vec<Answer>) -> Result<()> {
        for answer in answers {
            if let Some(at) = self.order[part.clone()].get((answer.i as usize).wrapping_sub(1)) {
                self.answers[*at] = answer.settled();
            }
        }
        Ok(())
    }

    fn failed(&mut self, at: usize, _: Meaning, error: Error) {
        self.answers[self.order[at]] = Err(error);
    }

    fn error(&self, error: sqlx::Error) -> Error {
        translate("extending a lease", error)
    }
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
    let sql = format!("select {schema}.store($1, $2, $3, $4::text::\"char\", $5, $6, $7, $8, $9, $10)");
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(before.scope)
        .bind(week.number())
        .bind(&*EventId::key(&identity.id))
        .bind(next.as_ref().map(|row| row.state))
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
        .bind(Audit::name(identity))
        .bind(&intervene.reason)
        .execute(&mut **tx)
        .await
        .map(|_| ())
        .map_err(|e| translate("writing the audit row", e))
}
