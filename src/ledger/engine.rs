//! Runs the transition function over stored rows, for backends that read and write rows directly:
//! memory, SQLite, and Redis, which reads rows first and checks on writing that they are unchanged.

use std::collections::{HashMap, hash_map};

use super::transition::{self, Head, Row, Situation};
use super::{
    Claim, Extend, Identity, Intervene, Intervened, Nonce, Outcome, Settings, Settle, Settled, Token, Week,
};
use crate::clock::Time;
use crate::crash_point::mutant;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Scope, Tenant};

/// Where an entry is stored: the week, the number of its (tenant, scope), and the id's key bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub week: Week,
    pub scope: i32,
    pub id: Vec<u8>,
}

/// Storage to which one caller has exclusive access for the length of a transaction.
pub(crate) trait Rows {
    /// The current time.
    fn now(&self) -> Time;
    /// The number of (tenant, scope), which grows with each new one, and when it began. Registers
    /// it if needed.
    fn scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<(i32, Time)>;
    /// The number of (tenant, scope), if it is registered.
    fn known_scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<Option<i32>>;
    /// The next token.
    fn token(&mut self) -> Result<Token>;
    /// If the week was dropped, the highest scope number at that time.
    fn dropped(&mut self, week: Week) -> Result<Option<i32>>;
    /// Makes a missing week.
    fn make_week(&mut self, week: Week) -> Result<()>;
    /// How many weeks exist, and whether this one does.
    fn weeks(&mut self, week: Week) -> Result<(usize, bool)>;
    /// The row of a key, from its week or from those kept when their week was dropped.
    fn row(&mut self, key: &Key) -> Result<Option<Row>>;
    /// Stores a row where it was found, or else in its week.
    fn put(&mut self, key: &Key, row: &Row) -> Result<()>;
    /// Removes a row.
    fn delete(&mut self, key: &Key) -> Result<()>;
    /// The head of an aggregate.
    fn head(&mut self, scope: i32, aggregate: &Aggregate) -> Result<Option<Head>>;
    /// Stores the head of an aggregate.
    fn put_head(&mut self, scope: i32, aggregate: &Aggregate, head: &Head) -> Result<()>;
    /// Writes an audit row.
    fn audit(&mut self, intervene: &Intervene) -> Result<()>;
}

/// An error in one event's own data fails only that event; any other error fails the batch.
fn own_fault<T>(result: Result<T>) -> Result<Result<T>> {
    match result {
        Err(error @ Error::Invalid { .. }) => Ok(Err(error)),
        Err(error) => Err(error),
        Ok(value) => Ok(Ok(value)),
    }
}

/// Claims in order. One token serves the whole batch: together with the identity it is unique.
pub(crate) fn claim_rows(
    rows: &mut impl Rows,
    claims: &[Claim],
    settings: &Settings,
) -> Result<Vec<Result<Outcome>>> {
    let token = rows.token()?;
    claims.iter().map(|claim| own_fault(claim_row(rows, claim, token, settings))).collect()
}

fn claim_row(rows: &mut impl Rows, claim: &Claim, token: Token, settings: &Settings) -> Result<Outcome> {
    let week = settings.check(claim)?;
    let now = rows.now();
    let (count, made) = rows.weeks(week)?;
    let barred = rows.dropped(week)?; // scopes up to this number are older than the drop
    if !made && barred.is_none() {
        may_make(week, count, now, settings)?; // before anything is written, the scope included
    }
    let (scope, _) = rows.scope(claim.identity.tenant.as_ref(), &claim.identity.scope)?;
    let knows = |barred: &i32| scope <= *barred && !mutant!("claim without dropped weeks");
    let dropped = barred.filter(knows).map(|_| week);
    let key = Key { week, scope, id: claim.identity.id.key().into_owned() };
    let row = rows.row(&key)?;
    if !made && row.is_none() && dropped.is_none() {
        may_make(week, count, now, settings)?; // again, for a scope younger than the drop
    }
    let kept = transition::in_order_of(claim, row.as_ref());
    let claim = kept.as_ref().unwrap_or(claim);
    let head = match &claim.order {
        Some(order) => rows.head(scope, &order.aggregate)?,
        None => None,
    };
    let empty = Head::default();
    let situation = Situation {
        row: row.as_ref(),
        head: head.as_ref().unwrap_or(&empty),
        dropped,
        week,
        now,
        token,
        owner: settings.owner.as_ref(),
        mismatch: settings.mismatch,
    };
    let step = transition::claim(claim, situation);
    if let Some(row) = &step.row {
        if !made && dropped.is_none() {
            rows.make_week(week)?;
        }
        rows.put(&key, row)?;
    }
    if let (Some(head), Some(order)) = (&step.head, &claim.order) {
        rows.put_head(scope, &order.aggregate, head)?;
    }
    if step.reused {
        settings.reused.note();
    }
    Ok(step.answer)
}

/// Whether the ledger may make a missing week.
fn may_make(week: Week, count: usize, now: Time, settings: &Settings) -> Result<()> {
    week.may_be_made(now, settings.weeks_ahead)?;
    if count >= settings.weeks_max && !week.is_present(now) {
        let problem = format!(
            "its week ({week}) would be one more than the {} weeks besides the present ones that this ledger may hold",
            settings.weeks_max
        );
        return Err(Error::invalid("event id", problem));
    }
    Ok(())
}

/// The row of an identity and the head of its aggregate. Registers nothing.
fn load(rows: &mut impl Rows, identity: &Identity, week: Week) -> Result<Option<(Key, Row, Head)>> {
    let Some(scope) = rows.known_scope(identity.tenant.as_ref(), &identity.scope)? else { return Ok(None) };
    let key = Key { week, scope, id: identity.id.key().into_owned() };
    let Some(row) = rows.row(&key)? else { return Ok(None) };
    let head = match &row.order {
        Some((aggregate, _)) => rows.head(scope, aggregate)?.unwrap_or_default(),
        None => Head::default(),
    };
    Ok(Some((key, row, head)))
}

/// Stores the decision about an existing row.
fn store(
    rows: &mut impl Rows,
    key: &Key,
    before: &Row,
    row: Option<&Row>,
    head: Option<&Head>,
) -> Result<()> {
    if let Some(row) = row {
        rows.put(key, row)?;
    }
    if let (Some(head), Some((aggregate, _))) = (head, &before.order) {
        rows.put_head(key.scope, aggregate, head)?;
    }
    Ok(())
}

/// Settles in order.
pub(crate) fn settle_rows(
    rows: &mut impl Rows,
    settles: &[Settle],
    settings: &Settings,
) -> Result<Vec<Result<Settled>>> {
    settles.iter().map(|settle| own_fault(settle_row(rows, settle, settings))).collect()
}

fn settle_row(rows: &mut impl Rows, settle: &Settle, settings: &Settings) -> Result<Settled> {
    settings.check_settle(settle)?;
    let Some((key, row, head)) = load(rows, &settle.identity, settle.week)? else {
        return Ok(Settled::Fenced { state: None });
    };
    let unfenced = mutant!("settle without token").then(|| Settle { token: row.token, ..settle.clone() });
    let settle = unfenced.as_ref().unwrap_or(settle);
    let step = transition::settle(settle, Some(&row), &head, rows.now());
    store(rows, &key, &row, step.row.as_ref(), step.head.as_ref())?;
    Ok(step.answer)
}

/// Extends in order.
pub(crate) fn extend_rows(rows: &mut impl Rows, extends: &[Extend]) -> Result<Vec<Settled>> {
    let mut answers = Vec::with_capacity(extends.len());
    for extend in extends {
        let Some((key, row, head)) = load(rows, &extend.identity, extend.week)? else {
            answers.push(Settled::Fenced { state: None });
            continue;
        };
        let step = transition::extend(extend.token, extend.lease, Some(&row), &head, rows.now());
        store(rows, &key, &row, step.row.as_ref(), step.head.as_ref())?;
        answers.push(step.answer);
    }
    Ok(answers)
}

/// Intervenes and writes an audit row.
pub(crate) fn intervene_rows(
    rows: &mut impl Rows,
    intervene: &Intervene,
    settings: &Settings,
) -> Result<Intervened> {
    let week = Week::route(settings.identity, &intervene.identity.id, intervene.time)?;
    let missing = || Error::NotFound(format!("no entry for {}", intervene.identity));
    let (key, row, head) = load(rows, &intervene.identity, week)?.ok_or_else(missing)?;
    let token = if intervene.dry_run { row.token } else { rows.token()? };
    let (next, next_head) = transition::intervene(intervene, &row, &head, rows.now(), token)?;
    if !intervene.dry_run {
        store(rows, &key, &row, next.as_ref(), next_head.as_ref())?;
        if next.is_none() {
            rows.delete(&key)?;
        }
        rows.audit(intervene)?;
    }
    let entry = |row: Row| row.entry(intervene.identity.clone(), week);
    Ok(Intervened { before: entry(row), after: next.map(entry) })
}

/// Whether a sweep of the timeless week may delete a row at `cutoff`.
pub(crate) fn may_sweep(row: &Row, cutoff: Time) -> bool {
    !row.state.is_open() && row.at < cutoff
}

/// A held row that is due, with its scope and its place in the order; `T` is what the caller knows
/// it by.
pub(crate) type Waiting<T> = (T, i32, Option<(Aggregate, u64)>);

/// Selects from due held rows those that may be claimed (of an aggregate only the lowest) and that
/// `is_wanted` accepts. Returns at most `limit` of them in random order, and how many there are.
pub(crate) fn runnable<T>(
    waiting: Vec<Waiting<T>>,
    limit: usize,
    now: Time,
    is_wanted: impl Fn(&T) -> bool,
    mut head: impl FnMut(i32, &Aggregate) -> Result<Option<Head>>,
) -> Result<(Vec<T>, u64)> {
    // Many rows may wait behind one head, so each head is read once.
    let mut heads: HashMap<(i32, Aggregate), (Head, Option<u64>)> = HashMap::new();
    for (_, scope, order) in &waiting {
        let Some((aggregate, seq)) = order else { continue };
        let of = (*scope, aggregate.clone());
        let (head, lowest) = match heads.entry(of) {
            hash_map::Entry::Occupied(found) => found.into_mut(),
            hash_map::Entry::Vacant(place) => {
                place.insert((head(*scope, aggregate)?.unwrap_or_default(), None))
            }
        };
        if head.lets(*seq, now) {
            *lowest = Some(lowest.map_or(*seq, |lowest| lowest.min(*seq)));
        }
    }
    let runs = |scope: i32, order: &Option<(Aggregate, u64)>| {
        order.as_ref().is_none_or(|(aggregate, seq)| {
            heads.get(&(scope, aggregate.clone())).is_some_and(|(_, lowest)| *lowest == Some(*seq))
        })
    };
    let runnable = waiting.into_iter().filter(|(of, scope, order)| runs(*scope, order) && is_wanted(of));
    let mut runnable: Vec<T> = runnable.map(|(of, ..)| of).collect();
    let count = runnable.len() as u64;
    runnable.sort_by_cached_key(|_| Nonce::random().0);
    runnable.truncate(limit);
    Ok((runnable, count))
}
