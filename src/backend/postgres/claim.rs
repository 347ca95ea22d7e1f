//! Sends claims: sorts them, merges repeats, calls the SQL function, splits a batch that met a lock
//! or a bad row, and resolves doubt by sending the same claims again.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, Postgres};

use super::begin::begin;
use super::error::{Meaning, meaning, translate};
use super::held::Bodies;
use super::{Inner, lone, read};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Owner;
use crate::ledger::{
    Baseline, Claim, Grant, Metadata, Mode, OnDead, OrderPolicy, Outcome, Prior, Token, Week,
};

/// How often a statement is sent again after a conflict or a broken connection.
const TRIES_MAX: u32 = 12;
/// How many parts a batch is split into when something in it is locked or bad.
const SPLIT: usize = 8;

/// After this many batches without a repeat, the next is expected to have none either. A wrong
/// guess costs a second INSERT and leaves dead rows, so it must be rare.
const CLEAN_MIN: u32 = 8;
/// If a batch has more claims of one id than this, they run one by one.
const REPEATS_MAX: usize = 4;
/// Below this many claims, guessing saves nothing.
const FRESH_MIN: usize = 64;

/// Where a statement runs.
pub(super) enum Target<'c> {
    /// In a transaction of its own.
    Own,
    /// In the caller's transaction, inside a savepoint.
    Caller(&'c mut PgConnection),
}

/// A claim with its scope number, week and key looked up.
pub(super) struct Ready<'a> {
    pub claim: &'a Claim,
    /// Its place in the caller's list.
    pub index: usize,
    pub scope: i32,
    pub week: Week,
    pub key: Cow<'a, [u8]>,
}

impl Ready<'_> {
    fn place(&self) -> (i32, &[u8], Week) {
        (self.scope, &self.key, self.week)
    }

    /// What all claims of one statement must share.
    fn terms(&self) -> (Mode, bool, Option<(OrderPolicy, OnDead)>) {
        let order = self.claim.order.as_ref().map(|order| (order.policy, order.on_dead));
        (self.claim.mode, self.claim.hold, order)
    }
}

/// One row of an answer.
pub(super) type Answer = (
    i32,
    i32,
    Option<i64>,
    Option<i64>,
    Option<i32>,
    Option<String>,
    Option<String>,
    Option<i64>,
    Option<bool>,
    Option<bool>,
);

/// Claims in transactions of their own.
pub(super) async fn claim(inner: &Inner, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
    let mut outcomes: Vec<Option<Result<Outcome>>> = Vec::with_capacity(claims.len());
    let mut ready: Vec<Ready<'_>> = Vec::with_capacity(claims.len());
    let mut stuck: Vec<&Claim> = Vec::new();
    for (index, claim) in claims.iter().enumerate() {
        let of_scope = |other: &&Claim| {
            other.identity.scope == claim.identity.scope && other.identity.tenant == claim.identity.tenant
        };
        // If another open transaction is registering a scope, wait for it once, not once per claim.
        let looked = match stuck.iter().find(|other| of_scope(other)) {
            Some(_) => Err(Error::Contended {
                what: "its scope is being registered by an open transaction".into(),
                source: None,
            }),
            None => look_up(inner, claim, index, ready.last()).await,
        };
        match looked {
            Ok(one) => {
                ready.push(one);
                outcomes.push(None);
            }
            // The error concerns this claim alone: its week cannot be made, or its scope cannot be
            // registered now.
            Err(error @ (Error::Invalid { .. } | Error::Contended { .. })) => {
                if matches!(error, Error::Contended { .. }) && inner.known_scope(&claim.identity).is_none() {
                    stuck.push(claim);
                }
                outcomes.push(Some(Err(error)));
            }
            Err(error) => return Err(error),
        }
    }
    run(inner, &mut Target::Own, ready, &mut outcomes).await?;
    Ok(finish(outcomes))
}

fn finish(outcomes: Vec<Option<Result<Outcome>>>) -> Vec<Result<Outcome>> {
    let missing = || Err(Error::Corrupt("a claim without an answer".into()));
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
}

async fn look_up<'a>(
    inner: &Inner,
    claim: &'a Claim,
    index: usize,
    last: Option<&Ready<'_>>,
) -> Result<Ready<'a>> {
    let week = inner.settings.ledger.check(claim)?;
    let identity = &claim.identity;
    let leased = matches!(claim.mode, Mode::Lease(_));
    if leased && !inner.leases.load(Relaxed) {
        inner.leases.store(true, Relaxed);
    }
    // Most batches have one scope, so reuse the number of the previous claim.
    let scope = match last.filter(|last| {
        last.claim.identity.scope == identity.scope && last.claim.identity.tenant == identity.tenant
    }) {
        Some(last) => {
            inner.ensure_week(week, last.scope, leased, identity.tenant.as_ref()).await?;
            last.scope
        }
        None => inner.place(identity, week, leased).await?,
    };
    Ok(Ready { claim, index, scope, week, key: identity.id.key() })
}

/// Runs claims in as few statements as their modes allow.
pub(super) async fn run(
    inner: &Inner,
    target: &mut Target<'_>,
    mut ready: Vec<Ready<'_>>,
    outcomes: &mut [Option<Result<Outcome>>],
) -> Result<()> {
    // One global order of locks: by key. The stable sort keeps repeats in the caller's order.
    ready.sort_by(|a, b| a.place().cmp(&b.place()));
    let mut each = Vec::new();
    // Repeats of one id go into later statements, which see what the earlier ones stored.
    let mut rounds: [Vec<(Mode, Vec<Ready<'_>>)>; REPEATS_MAX] = Default::default();
    let mut ready = ready.into_iter().peekable();
    while let Some(one) = ready.next() {
        let mut of_id = vec![one];
        while let Some(repeat) = ready.next_if(|next| next.place() == of_id[0].place()) {
            of_id.push(repeat);
        }
        let by_the_book = |one: &Ready<'_>| {
            one.claim.order.is_some() || matches!(one.claim.mode, Mode::Failed(_) | Mode::Refused)
        };
        if of_id.len() > REPEATS_MAX || of_id.iter().any(by_the_book) {
            each.extend(of_id);
            continue;
        }
        for (one, round) in of_id.into_iter().zip(&mut rounds) {
            match round.iter_mut().find(|(mode, _)| *mode == one.claim.mode) {
                Some((_, batch)) => batch.push(one),
                None => round.push((one.claim.mode, vec![one])),
            }
        }
    }
    for (_, batch) in rounds.into_iter().flatten() {
        split_run(inner, target, &batch, &inner.sql.claim_batch, outcomes).await?;
        // Claims whose bytes must be held are sent again, with their bytes.
        each.extend(batch.into_iter().filter(|one| outcomes[one.index].is_none()));
    }
    // Claims that depend on each other (ordered events, many repeats of one id) run in the caller's
    // order.
    each.sort_by_key(|one| one.index);
    for run in each.chunk_by(|a, b| a.terms() == b.terms()) {
        split_run(inner, target, run, &inner.sql.claim_each, outcomes).await?;
    }
    Ok(())
}

/// Runs a group. A part that meets a lock or a bad row is split until only the affected claim is
/// left.
async fn split_run(
    inner: &Inner,
    target: &mut Target<'_>,
    group: &[Ready<'_>],
    sql: &Arc<str>,
    outcomes: &mut [Option<Result<Outcome>>],
) -> Result<()> {
    let mut tries = 0;
    let mut parts = vec![0..group.len()];
    while let Some(part) = parts.pop() {
        let slice = &group[part.clone()];
        let error = match send(inner, target, slice, sql).await {
            Ok(answers) => {
                if slice.len() >= FRESH_MIN && Arc::ptr_eq(sql, &inner.sql.claim_batch) {
                    // Only row 0: every claim was the first of its id.
                    let clean =
                        if answers.len() == 1 { inner.clean.load(Relaxed).saturating_add(1) } else { 0 };
                    inner.clean.store(clean, Relaxed);
                }
                decode(inner, slice, answers, outcomes)?;
                continue;
            }
            Err(error) => error,
        };
        inner.note_pooler(&error);
        let kind = meaning(&error);
        match kind {
            Meaning::Locked if slice.len() == 1 => {
                outcomes[slice[0].index] = Some(Ok(Outcome::Busy { until: None, owner: None }));
            }
            Meaning::Data if slice.len() == 1 => {
                outcomes[slice[0].index] = Some(Err(translate("claiming", error)));
            }
            Meaning::Locked | Meaning::Data => split(&part, &mut parts),
            Meaning::NoWeek if matches!(target, Target::Caller(_)) => {
                inner.forget_weeks();
                return Err(Error::WeekMissing { monday: slice[0].week.to_string() });
            }
            Meaning::Serialization | Meaning::NoWeek | Meaning::Doubt
                if matches!(target, Target::Own) && tries < TRIES_MAX && !is_out_of_time(&error) =>
            {
                tries += 1;
                if kind == Meaning::NoWeek {
                    inner.forget_weeks();
                    for one in slice {
                        let leased = matches!(one.claim.mode, Mode::Lease(_));
                        let tenant = one.claim.identity.tenant.as_ref();
                        inner.ensure_week(one.week, one.scope, leased, tenant).await?;
                    }
                }
                // Gives other transactions time to end, or the server time to come back. The first
                // retry is immediate.
                tokio::time::sleep(Duration::from_millis(u64::from(tries - 1) * 10)).await;
                parts.push(part);
            }
            _ => return Err(translate("claiming", error)),
        }
    }
    Ok(())
}

/// Whether the pool gave no connection within its timeout, or is closed: that was waiting enough.
pub(super) fn is_out_of_time(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed)
}

pub(super) fn split(part: &Range<usize>, parts: &mut Vec<Range<usize>>) {
    let step = part.len().div_ceil(SPLIT).max(1);
    let starts: Vec<usize> = part.clone().step_by(step).collect();
    // In reverse, because the last part pushed runs first.
    parts.extend(starts.into_iter().rev().map(|start| start..(start + step).min(part.end)));
}

async fn send(
    inner: &Inner,
    target: &mut Target<'_>,
    slice: &[Ready<'_>],
    sql: &Arc<str>,
) -> sqlx::Result<Vec<Answer>> {
    let own = matches!(target, Target::Own);
    if let [one] = slice
        && own
        && Arc::ptr_eq(sql, &inner.sql.claim_batch)
        && !inner.pooled()
        && lone::is_plain(one)
    {
        crate::crash_point!("claim.sending");
        if let Some(answer) = lone::first(inner, one).await? {
            crate::crash_point!("claim.answered");
            return Ok(vec![answer]);
        }
    }
    let columns = Columns::of(slice);
    let fresh = slice.len() >= FRESH_MIN && inner.clean.load(Relaxed) >= CLEAN_MIN;
    let query = columns.query(inner, slice, sql, fresh, own);
    match target {
        Target::Own => {
            crate::crash_point!("claim.sending");
            let answers = if inner.pooled() {
                let mut tx = begin(&inner.pool, super::BEGIN).await?;
                let answers = query.fetch_all(&mut *tx).await?;
                tx.commit().await?;
                answers
            } else {
                query.fetch_all(&inner.pool).await?
            };
            crate::crash_point!("claim.answered");
            Ok(answers)
        }
        Target::Caller(connection) => {
            sqlx::raw_sql("savepoint hapax_claim").execute(&mut **connection).await?;
            let result = query.fetch_all(&mut **connection).await;
            let end = match &result {
                Ok(_) => "release savepoint hapax_claim",
                Err(_) => "rollback to savepoint hapax_claim; release savepoint hapax_claim",
            };
            sqlx::raw_sql(end).execute(&mut **connection).await?;
            result
        }
    }
}

/// Claims, column by column. A column that no claim uses is sent as NULL.
struct Columns<'a> {
    scopes: Vec<i32>,
    weeks: Vec<i16>,
    keys: Vec<&'a [u8]>,
    nonces: Vec<i64>,
    fingerprints: Option<Vec<Option<&'a [u8]>>>,
    topics: Option<Vec<Option<&'a str>>>,
    partitions: Option<Vec<Option<i32>>>,
    offsets: Option<Vec<Option<i64>>>,
    metadata: Option<Vec<Option<&'a str>>>,
    notes: Option<Vec<Option<&'a str>>>,
    aggregates: Option<Vec<Option<&'a str>>>,
    seqs: Option<Vec<Option<i64>>>,
    bodies: Bodies<'a>,
    distinct_weeks: Vec<i16>,
}

fn column<'a, T>(slice: &'a [Ready<'_>], value: impl Fn(&'a Claim) -> Option<T>) -> Option<Vec<Option<T>>> {
    slice
        .iter()
        .any(|one| value(one.claim).is_some())
        .then(|| slice.iter().map(|one| value(one.claim)).collect())
}

impl<'a> Columns<'a> {
    fn of(slice: &'a [Ready<'_>]) -> Self {
        let weeks: Vec<i16> = slice.iter().map(|one| one.week.number()).collect();
        let mut distinct_weeks = weeks.clone();
        distinct_weeks.sort_unstable();
        distinct_weeks.dedup();
        Columns {
            scopes: slice.iter().map(|one| one.scope).collect(),
            weeks,
            keys: slice.iter().map(|one| &*one.key).collect(),
            nonces: slice.iter().map(|one| one.claim.nonce.0).collect(),
            fingerprints: column(slice, |claim| claim.fingerprint.as_ref().map(|f| &f.0[..])),
            topics: column(slice, |claim| claim.origin.as_ref().map(|o| o.topic.as_str())),
            partitions: column(slice, |claim| claim.origin.as_ref().map(|o| o.partition)),
            offsets: column(slice, |claim| claim.origin.as_ref().map(|o| o.offset)),
            metadata: column(slice, |claim| claim.metadata.as_ref().map(Metadata::as_str)),
            notes: column(slice, |claim| claim.reason.as_deref()),
            aggregates: column(slice, |claim| claim.order.as_ref().map(|o| o.aggregate.as_str())),
            seqs: column(slice, |claim| claim.order.as_ref().map(|o| o.seq as i64)),
            bodies: Bodies::of(slice.iter().map(|one| one.claim.body.as_ref())),
            distinct_weeks,
        }
    }

    fn query<'q>(
        &'q self,
        inner: &Inner,
        slice: &[Ready<'_>],
        sql: &Arc<str>,
        fresh: bool,
        own: bool,
    ) -> sqlx::query::QueryAs<'q, Postgres, Answer, sqlx::postgres::PgArguments> {
        let terms = Terms::of(slice[0].claim);
        let check = inner.settings.ledger.mismatch == crate::ledger::MismatchRule::Error;
        let query = sqlx::query_as(AssertSqlSafe(Arc::clone(sql)))
            .persistent(!inner.pooled())
            .bind(&self.scopes)
            .bind(&self.weeks)
            .bind(&self.keys)
            .bind(&self.nonces)
            .bind(&self.fingerprints)
            .bind(&self.topics)
            .bind(&self.partitions)
            .bind(&self.offsets)
            .bind(&self.metadata);
        if Arc::ptr_eq(sql, &inner.sql.claim_batch) {
            return query
                .bind(&self.distinct_weeks)
                .bind(terms.mode)
                .bind(terms.lasting_us)
                .bind(terms.flags)
                .bind(terms.attempts_max)
                .bind(inner.owner)
                .bind(check)
                .bind(fresh)
                .bind(slice.iter().any(|one| one.claim.body.is_some()))
                .bind(!own);
        }
        let query = query
            .bind(&self.notes)
            .bind(&self.aggregates)
            .bind(&self.seqs)
            .bind(terms.mode)
            .bind(terms.lasting_us)
            .bind(terms.flags)
            .bind(terms.attempts_max)
            .bind(terms.base_us)
            .bind(terms.cap_us)
            .bind(terms.permille)
            .bind(inner.owner)
            .bind(check)
            .bind(terms.strict)
            .bind(terms.baseline)
            .bind(terms.gap_us)
            .bind(terms.skip)
            .bind(slice[0].claim.hold);
        self.bodies.bind(query).bind(!own)
    }
}

/// The parameters that all claims of a statement share.
#[derive(Default)]
pub(super) struct Terms {
    pub mode: &'static str,
    pub lasting_us: i64,
    pub flags: i16,
    attempts_max: i32,
    base_us: i64,
    cap_us: i64,
    permille: i32,
    strict: bool,
    baseline: Option<i64>,
    gap_us: i64,
    skip: bool,
}

fn us(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl Terms {
    pub fn of(claim: &Claim) -> Self {
        let mut terms = Terms::default();
        let attempts = |max: u32| i32::try_from(max).unwrap_or(i32::MAX);
        match claim.mode {
            Mode::Lease(lease) => {
                terms.mode = "L";
                terms.lasting_us = us(lease.lease);
                terms.flags = i16::from(lease.alone);
                terms.attempts_max = attempts(lease.attempts_max);
            }
            Mode::Once { track } => {
                terms.mode = "O";
                terms.lasting_us = us(track.unwrap_or_default());
                terms.flags = if track.is_some() { 2 } else { 0 };
            }
            Mode::Done => terms.mode = "D",
            Mode::Refused => terms.mode = "X",
            Mode::Failed(failure) => {
                terms.mode = "F";
                terms.attempts_max = attempts(failure.attempts_max);
                terms.base_us = us(failure.backoff_base);
                terms.cap_us = us(failure.backoff_max);
                terms.permille = i32::from(failure.jitter_permille);
            }
        }
        if let Some(order) = &claim.order {
            terms.skip = order.on_dead == OnDead::Skip;
            if let OrderPolicy::Strict { baseline, gap_timeout } = order.policy {
                terms.strict = true;
                terms.gap_us = us(gap_timeout);
                terms.baseline = match baseline {
                    Baseline::FirstSeen => None,
                    Baseline::From(seq) => Some(seq as i64),
                };
            }
        }
        terms
    }
}

/// Assigns the answers to their claims: row 0 applies to all, further rows are the exceptions.
fn decode(
    inner: &Inner,
    slice: &[Ready<'_>],
    answers: Vec<Answer>,
    outcomes: &mut [Option<Result<Outcome>>],
) -> Result<()> {
    for answer in answers {
        if answer.9 == Some(true) {
            inner.settings.ledger.reused.note();
        }
        if answer.0 == 0 {
            for one in slice {
                outcomes[one.index] = Some(outcome(one.week, &answer));
            }
            continue;
        }
        let one = usize::try_from(answer.0 - 1)
            .ok()
            .and_then(|at| slice.get(at))
            .ok_or_else(|| Error::Corrupt(format!("an answer for claim {} of {}", answer.0, slice.len())))?;
        outcomes[one.index] = (answer.1 != 0).then(|| outcome(one.week, &answer));
    }
    Ok(())
}

fn outcome(week: Week, answer: &Answer) -> Result<Outcome> {
    let (_, kind, token, at, attempts, state, owner, seq, suspect, _) = answer;
    let corrupt = |what: &str| Error::Corrupt(format!("an answer of kind {kind} without {what}"));
    let at = || at.map(Time::from_micros).ok_or_else(|| corrupt("a time"));
    let attempts = || attempts.map(|n| n as u32).ok_or_else(|| corrupt("attempts"));
    let seq = || seq.map(|n| n as u64).ok_or_else(|| corrupt("a seq"));
    let owner = || owner.as_deref().map(Owner::new).transpose();
    let prior = || -> Result<Prior> {
        Ok(Prior { state: read::state(state.as_deref())?, at: at()?, owner: owner()? })
    };
    Ok(match kind {
        1 => Outcome::First(Grant {
            token: Token(token.ok_or_else(|| corrupt("a token"))?),
            week,
            until: at()?,
            attempt: attempts()?,
            suspect: suspect.unwrap_or(false),
        }),
        2 => Outcome::Duplicate(prior()?),
        3 => Outcome::Busy { until: at().ok(), owner: owner()? }, // no time: its week is being dropped
        4 => Outcome::RetryLater { at: at()?, attempts: attempts()? },
        5 => Outcome::Wait { on: seq().ok() },
        6 => Outcome::Stale { last: seq()? },
        7 => Outcome::Parked { behind: seq()? },
        8 => Outcome::Dead { at: at()?, attempts: attempts()? },
        9 => Outcome::Mismatch(prior()?),
        10 => Outcome::TooOld { week },
        _ => return Err(Error::Corrupt(format!("an answer of unknown kind {kind}"))),
    })
}
