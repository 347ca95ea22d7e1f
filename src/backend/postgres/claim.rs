//! Sends claims: looks up scopes and weeks, sorts by key, and calls the SQL functions in as few
//! statements as modes, order and repeats allow. The [`Executor`] sends them.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sqlx::AssertSqlSafe;

use super::codes::{ALONE, TRACKED, from_row, micros, mode_letter, numbered};
use super::database::Select;
use super::error::{Meaning, translate};
use super::executor::{Batch, Executor, Locked};
use super::held::Bodies;
use super::{Inner, lone};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Owner;
use crate::ledger::{
    Baseline, Claim, Grant, Identity, Metadata, Mode, OnDead, OrderPolicy, Outcome, Prior, State, Token, Week,
};

/// After this many batches without a repeat, the next is expected to have none either. A wrong
/// guess costs a second INSERT and leaves dead rows, so it must be rare.
const CLEAN_MIN: u32 = 8;
/// If a batch has more claims of one id than this, they run one by one.
const REPEATS_MAX: usize = 4;
/// Below this many claims, guessing saves nothing.
const FRESH_MIN: usize = 64;

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

    /// Sorted by this, claims in one transaction lock the heads of aggregates in one order, then entries
    /// by key. Those of one aggregate, and those of one id, stay in the caller's order.
    fn locks(&self) -> (bool, &str, (i32, &[u8], Week), usize) {
        match &self.claim.order {
            Some(order) => (false, order.aggregate.as_str(), (self.scope, &[], Week::TIMELESS), self.index),
            None => (true, "", self.place(), self.index),
        }
    }

    fn is_lease(&self) -> bool {
        matches!(self.claim.mode, Mode::Lease(_))
    }

    /// What all claims of one statement must share.
    fn shared(&self) -> (Mode, bool, Option<(OrderPolicy, OnDead)>) {
        let order = self.claim.order.as_ref().map(|order| (order.policy, order.on_dead));
        (self.claim.mode, self.claim.hold, order)
    }
}

numbered! {
    /// The kind of an answer.
    pub(super) enum Kind {
        /// Its bytes would be held: it must be sent again, with them.
        NeedsBody = 0,
        First = 1,
        Duplicate = 2,
        Busy = 3,
        RetryLater = 4,
        Wait = 5,
        Stale = 6,
        Parked = 7,
        Dead = 8,
        Mismatch = 9,
        TooOld = 10,
    }
}

from_row! { "o_",
    /// One row of an answer.
    pub(super) struct Answer {
        /// The place of its claim in the statement, from 1. 0: it applies to all of them.
        pub i: i32,
        pub kind: Kind,
        pub token: Option<i64>,
        pub at: Option<i64>,
        pub attempts: Option<i32>,
        pub state: Option<State>,
        pub owner: Option<String>,
        pub seq: Option<i64>,
        pub suspect: Option<bool>,
        /// Whether the id was used before with other content.
        pub reused: Option<bool>,
    }
}

/// Claims in transactions of their own.
pub(super) async fn claim(inner: &Inner, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
    let mut outcomes: Vec<Option<Result<Outcome>>> = Vec::with_capacity(claims.len());
    let mut ready: Vec<Ready<'_>> = Vec::with_capacity(claims.len());
    let mut unregistered = Unregistered::default();
    for (index, claim) in claims.iter().enumerate() {
        let looked = if unregistered.has(claim) {
            Err(Unregistered::error())
        } else {
            look_up(inner, claim, index, ready.last()).await
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
                    unregistered.add(claim);
                }
                outcomes.push(Some(Err(error)));
            }
            Err(error) => return Err(error),
        }
    }
    run(inner, &mut Executor::new(&inner.database), ready, outcomes).await
}

/// Scopes that another open transaction is registering. A batch waits for each once, not once per
/// claim.
#[derive(Default)]
pub(super) struct Unregistered<'a>(Vec<&'a Identity>);

impl<'a> Unregistered<'a> {
    pub(super) fn has(&self, claim: &Claim) -> bool {
        self.0.iter().any(|identity| is_same_scope(identity, &claim.identity))
    }

    pub(super) fn add(&mut self, claim: &'a Claim) {
        self.0.push(&claim.identity);
    }

    pub(super) fn error() -> Error {
        Error::Contended { what: "its scope is being registered by an open transaction".into(), source: None }
    }
}

fn is_same_scope(one: &Identity, other: &Identity) -> bool {
    one.scope == other.scope && one.tenant == other.tenant
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
    let scope = match last.filter(|last| is_same_scope(&last.claim.identity, identity)) {
        Some(last) => {
            inner.ensure_week(week, last.scope, leased, identity.tenant.as_ref()).await?;
            last.scope
        }
        None => inner.place(identity, week, leased).await?,
    };
    Ok(Ready { claim, index, scope, week, key: identity.id.key() })
}

/// Runs claims in as few statements as their modes allow. Returns all outcomes: those that are
/// there already, and those of the ready claims.
pub(super) async fn run(
    inner: &Inner,
    executor: &mut Executor<'_>,
    mut ready: Vec<Ready<'_>>,
    mut outcomes: Vec<Option<Result<Outcome>>>,
) -> Result<Vec<Result<Outcome>>> {
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
        let needs_state_machine = |one: &Ready<'_>| {
            one.claim.order.is_some() || matches!(one.claim.mode, Mode::Failed(_) | Mode::Refused)
        };
        if of_id.len() > REPEATS_MAX || of_id.iter().any(needs_state_machine) {
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
    for (_, group) in rounds.into_iter().flatten() {
        let statement = Statement::Batch;
        executor.run(&mut Claims { inner, statement, group: &group, outcomes: &mut outcomes }).await?;
        // Claims whose bytes must be held are sent again, with their bytes.
        each.extend(group.into_iter().filter(|one| outcomes[one.index].is_none()));
    }
    // Claims that depend on each other (ordered events, many repeats of one id) run in the caller's
    // order. In its transaction locks stay, so what does not depend on each other runs in one order.
    if executor.is_own() {
        each.sort_by_key(|one| one.index);
    } else {
        each.sort_by(|a, b| a.locks().cmp(&b.locks()));
    }
    for group in each.chunk_by(|a, b| a.shared() == b.shared()) {
        let statement = Statement::Each;
        executor.run(&mut Claims { inner, statement, group, outcomes: &mut outcomes }).await?;
    }
    let in_doubt = executor.is_in_doubt();
    let answer = |outcome| match outcome {
        // Its week is being dropped. It is not in it, but its own first try may yet put it there.
        Some(Ok(Outcome::Busy { until: None, .. })) if in_doubt => {
            let what = "claiming: the connection was lost, and the first attempt may still be running".into();
            Err(Error::Contended { what, source: None })
        }
        Some(outcome) => outcome,
        None => Err(Error::Corrupt("a claim without an answer".into())),
    };
    Ok(outcomes.into_iter().map(answer).collect())
}

/// Which SQL function decides claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Statement {
    /// `claim_batch`: one INSERT for ids that are new.
    Batch,
    /// `claim_each`: the full state machine for each, with order, failures and bytes.
    Each,
}

/// Claims that share a statement.
struct Claims<'a, 'o> {
    inner: &'a Inner,
    statement: Statement,
    group: &'a [Ready<'a>],
    /// By the claims' places in the caller's list.
    outcomes: &'o mut [Option<Result<Outcome>>],
}

impl Batch for Claims<'_, '_> {
    /// An id that is locked is busy.
    const LOCKED: Locked = Locked::IsAnswer;

    type Answer = Answer;

    fn len(&self) -> usize {
        self.group.len()
    }

    async fn send(&self, executor: &mut Executor<'_>, part: Range<usize>) -> sqlx::Result<Vec<Answer>> {
        let (inner, slice) = (self.inner, &self.group[part]);
        let own = executor.is_own();
        crate::crash_point!("claim.sending");
        if let [one] = slice
            && own
            && self.statement == Statement::Batch
            && !inner.database.needs_transaction()
            && lone::is_plain(one)
        {
            let answers = lone::first(inner, one).await?;
            if !answers.is_empty() {
                crate::crash_point!("claim.answered");
                return Ok(answers);
            }
        }
        let fresh = slice.len() >= FRESH_MIN && inner.clean.load(Relaxed) >= CLEAN_MIN;
        let columns = Columns::of(slice);
        let query = match self.statement {
            Statement::Batch => columns.batch(inner, slice, fresh, own),
            Statement::Each => columns.each(inner, slice, own),
        };
        let answers = executor.fetch_all(query).await?;
        crate::crash_point!("claim.answered");
        Ok(answers)
    }

    /// Assigns the answers to their claims: row 0 applies to all, further rows are the exceptions.
    fn answered(&mut self, part: Range<usize>, answers: Vec<Answer>) -> Result<()> {
        let slice = &self.group[part];
        if slice.len() >= FRESH_MIN && self.statement == Statement::Batch {
            // Only row 0: every claim was the first of its id.
            let clean = if answers.len() == 1 { self.inner.clean.load(Relaxed).saturating_add(1) } else { 0 };
            self.inner.clean.store(clean, Relaxed);
        }
        for answer in answers {
            if answer.reused == Some(true) {
                self.inner.settings.ledger.reused.note();
            }
            let of = match usize::try_from(answer.i) {
                Ok(0) => slice,
                Ok(i) => slice.get(i - 1..i).unwrap_or_default(),
                Err(_) => &[],
            };
            if of.is_empty() {
                return Err(Error::Corrupt(format!("an answer for claim {} of {}", answer.i, slice.len())));
            }
            for one in of {
                self.outcomes[one.index] = answer.outcome(one.week).transpose();
            }
        }
        Ok(())
    }

    fn failed(&mut self, at: usize, meaning: Meaning, error: Error) {
        self.outcomes[self.group[at].index] = Some(match meaning {
            Meaning::Locked => Ok(Outcome::Busy { until: None, owner: None }),
            _ => Err(error),
        });
    }

    async fn week_missing(&self, part: Range<usize>, own: bool) -> Result<()> {
        self.inner.forget_weeks();
        for one in &self.group[part] {
            if !own {
                return Err(Error::WeekMissing { monday: one.week.to_string() });
            }
            let tenant = one.claim.identity.tenant.as_ref();
            self.inner.ensure_week(one.week, one.scope, one.is_lease(), tenant).await?;
        }
        Ok(())
    }

    fn error(&self, error: sqlx::Error) -> Error {
        translate("claiming", error)
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

    fn start(&self, sql: &Arc<str>) -> Select<'_, Answer> {
        sqlx::query_as(AssertSqlSafe(Arc::clone(sql)))
            .bind(&self.scopes)
            .bind(&self.weeks)
            .bind(&self.keys)
            .bind(&self.nonces)
            .bind(&self.fingerprints)
            .bind(&self.topics)
            .bind(&self.partitions)
            .bind(&self.offsets)
            .bind(&self.metadata)
    }

    fn batch(&self, inner: &Inner, slice: &[Ready<'_>], fresh: bool, own: bool) -> Select<'_, Answer> {
        let settings = ClaimSettings::of(slice[0].claim);
        self.start(&inner.sql.claim_batch)
            .bind(&self.distinct_weeks)
            .bind(settings.mode)
            .bind(settings.lasting_us)
            .bind(settings.flags)
            .bind(settings.attempts_max)
            .bind(inner.owner)
            .bind(inner.checks_fingerprints())
            .bind(fresh)
            .bind(slice.iter().any(|one| one.claim.body.is_some()))
            .bind(!own)
    }

    fn each(&self, inner: &Inner, slice: &[Ready<'_>], own: bool) -> Select<'_, Answer> {
        let settings = ClaimSettings::of(slice[0].claim);
        let query = self
            .start(&inner.sql.claim_each)
            .bind(&self.notes)
            .bind(&self.aggregates)
            .bind(&self.seqs)
            .bind(settings.mode)
            .bind(settings.lasting_us)
            .bind(settings.flags)
            .bind(settings.attempts_max)
            .bind(settings.base_us)
            .bind(settings.cap_us)
            .bind(settings.permille)
            .bind(inner.owner)
            .bind(inner.checks_fingerprints())
            .bind(settings.strict)
            .bind(settings.baseline)
            .bind(settings.gap_us)
            .bind(settings.skip)
            .bind(slice[0].claim.hold);
        self.bodies.bind(query).bind(!own)
    }
}

/// The parameters that all claims of a statement share.
#[derive(Default)]
pub(super) struct ClaimSettings {
    mode: &'static str,
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

impl ClaimSettings {
    pub fn of(claim: &Claim) -> Self {
        let mut settings = ClaimSettings { mode: mode_letter(claim.mode), ..ClaimSettings::default() };
        let attempts = |max: u32| i32::try_from(max).unwrap_or(i32::MAX);
        match claim.mode {
            Mode::Lease(lease) => {
                settings.lasting_us = micros(lease.lease);
                settings.flags = if lease.alone { ALONE } else { 0 };
                settings.attempts_max = attempts(lease.attempts_max);
            }
            Mode::Once { track } => {
                settings.lasting_us = micros(track.unwrap_or_default());
                settings.flags = if track.is_some() { TRACKED } else { 0 };
            }
            Mode::Done | Mode::Refused => {}
            Mode::Failed(failure) => {
                settings.attempts_max = attempts(failure.attempts_max);
                settings.base_us = micros(failure.backoff_base);
                settings.cap_us = micros(failure.backoff_max);
                settings.permille = i32::from(failure.jitter_permille);
            }
        }
        if let Some(order) = &claim.order {
            settings.skip = order.on_dead == OnDead::Skip;
            if let OrderPolicy::Strict { baseline, gap_timeout } = order.policy {
                settings.strict = true;
                settings.gap_us = micros(gap_timeout);
                settings.baseline = match baseline {
                    Baseline::FirstSeen => None,
                    Baseline::From(seq) => Some(seq as i64),
                };
            }
        }
        settings
    }
}

impl Answer {
    /// The outcome of a claim; `None` if it must be sent again with its bytes.
    fn outcome(&self, week: Week) -> Result<Option<Outcome>> {
        let corrupt = |what: &str| Error::Corrupt(format!("an answer {:?} without {what}", self.kind));
        let at = || self.at.map(Time::from_micros).ok_or_else(|| corrupt("a time"));
        let attempts = || self.attempts.map(|n| n as u32).ok_or_else(|| corrupt("attempts"));
        let seq = || self.seq.map(|n| n as u64).ok_or_else(|| corrupt("a seq"));
        let owner = || self.owner.as_deref().map(Owner::new).transpose();
        let prior = || -> Result<Prior> {
            Ok(Prior { state: self.state.ok_or_else(|| corrupt("a state"))?, at: at()?, owner: owner()? })
        };
        Ok(Some(match self.kind {
            Kind::NeedsBody => return Ok(None),
            Kind::First => Outcome::First(Grant {
                token: Token(self.token.ok_or_else(|| corrupt("a token"))?),
                week,
                until: at()?,
                attempt: attempts()?,
                suspect: self.suspect.unwrap_or(false),
            }),
            Kind::Duplicate => Outcome::Duplicate(prior()?),
            Kind::Busy => Outcome::Busy { until: at().ok(), owner: owner()? }, // no time: its week is being dropped
            Kind::RetryLater => Outcome::RetryLater { at: at()?, attempts: attempts()? },
            Kind::Wait => Outcome::Wait { on: seq().ok() },
            Kind::Stale => Outcome::Stale { last: seq()? },
            Kind::Parked => Outcome::Parked { behind: seq()? },
            Kind::Dead => Outcome::Dead { at: at()?, attempts: attempts()? },
            Kind::Mismatch => Outcome::Mismatch(prior()?),
            Kind::TooOld => Outcome::TooOld { week },
        }))
    }
}
