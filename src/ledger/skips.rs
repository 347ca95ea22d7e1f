//! Skipped deliveries: what is logged of them, and how many effects were not done twice.
//!
//! Both are written by a [`SkipLog`](super::SkipLog) in the background, never by a claim. The log
//! has a fixed number of *slots*, of which an identity has one, so that nothing that arrives makes it
//! grow: an identity that needs the slot of another replaces it, and the skips that are gone with it
//! are counted. [`plan`] decides; backends read the rows it needs, and write those it returns, in one
//! transaction that no other flush overlaps.

use std::collections::HashMap;
use std::time::Duration;

use super::{Identity, Outcome, State};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Origin};
use crate::exact::Decimal;
use crate::id::{EventId, Scope, Tenant};

/// How many of the first, and of the last, skips of an identity are kept.
pub const SKIPS_KEPT: usize = 3;
/// How long skips are kept.
pub const SKIPS_RETENTION: Duration = Duration::from_hours(7 * 24);
/// How long daily counts are kept.
pub const PREVENTED_RETENTION: Duration = Duration::from_hours(400 * 24);
/// How many identities have skips in the log at most.
pub const SKIP_SLOTS: i32 = SLOT_GROUPS * SLOTS_PER_GROUP;
/// The scopes of tenants share this many groups of slots, so that one of them crowds out few others.
const SLOT_GROUPS: i32 = 32;
const SLOTS_PER_GROUP: i32 = 2048;
/// How many rows of counts a day has at most, besides those of the others.
pub(crate) const ROWS_PER_DAY_MAX: usize = 1000;
/// The longest topic in the log; a longer one is cut off.
const TOPIC_BYTES_MAX: usize = 64;

/// Why a delivery was skipped for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SkipReason {
    /// It took effect before.
    Duplicate,
    /// The window knew that it took effect before.
    Window,
    /// It runs at most once, and was claimed before.
    Once,
    /// Its aggregate had moved past it.
    Stale,
    /// The ledger no longer knows what happened in its week.
    TooOld,
    /// Its id was used before for another event.
    Mismatch,
    /// It is a dead letter.
    Dead,
}

impl SkipReason {
    const ALL: [SkipReason; 7] = [
        SkipReason::Duplicate,
        SkipReason::Window,
        SkipReason::Once,
        SkipReason::Stale,
        SkipReason::TooOld,
        SkipReason::Mismatch,
        SkipReason::Dead,
    ];

    /// Its name; one of a bounded set.
    pub fn name(self) -> &'static str {
        match self {
            SkipReason::Duplicate => "duplicate",
            SkipReason::Window => "window",
            SkipReason::Once => "once",
            SkipReason::Stale => "stale",
            SkipReason::TooOld => "too_old",
            SkipReason::Mismatch => "mismatch",
            SkipReason::Dead => "dead",
        }
    }

    fn named(name: &str) -> Option<Self> {
        SkipReason::ALL.into_iter().find(|reason| reason.name() == name)
    }

    /// Why an outcome is a skip; `None` if the delivery runs, or may run later.
    pub fn of<G>(outcome: &Outcome<G>) -> Option<Self> {
        match outcome {
            Outcome::Duplicate(prior) if is_effect(prior.state) => Some(SkipReason::Duplicate),
            Outcome::Duplicate(_) => Some(SkipReason::Once),
            Outcome::Stale { .. } => Some(SkipReason::Stale),
            Outcome::TooOld { .. } => Some(SkipReason::TooOld),
            Outcome::Mismatch(_) => Some(SkipReason::Mismatch),
            Outcome::Dead { .. } => Some(SkipReason::Dead),
            Outcome::First(_)
            | Outcome::Busy { .. }
            | Outcome::RetryLater { .. }
            | Outcome::Wait { .. }
            | Outcome::Parked { .. } => None,
        }
    }
}

/// Whether an event in this state has taken effect.
fn is_effect(state: State) -> bool {
    matches!(state, State::Done | State::Finished)
}

/// Which part of hapax kept an effect from being done twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Layer {
    /// Keyed writes: a request was answered with the first answer.
    Keys,
    /// The window in front of the ledger.
    Window,
    /// The ledger: a consumer or a guard skipped what was done.
    Claims,
}

impl Layer {
    /// Every layer, in the order of the path.
    pub const ALL: [Layer; 3] = [Layer::Keys, Layer::Window, Layer::Claims];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Layer::Keys => "keys",
            Layer::Window => "window",
            Layer::Claims => "claims",
        }
    }
}

/// How many, and how much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// How many.
    pub count: u64,
    /// How many of them had a value.
    pub valued: u64,
    /// The sum of their values.
    pub value: Decimal,
}

impl Amount {
    /// One, with its value if it has one.
    pub fn one(value: Option<Decimal>) -> Self {
        Amount { count: 1, valued: value.is_some().into(), value: value.unwrap_or_default() }
    }

    /// Adds another. A sum that does not fit stays as it was, and `valued` too.
    pub fn add(&mut self, other: Amount) {
        self.count = self.count.saturating_add(other.count);
        if let Some(sum) = self.value.plus(other.value) {
            self.value = sum;
            self.valued = self.valued.saturating_add(other.valued);
        }
    }
}

/// A scope of a tenant.
pub type ScopeOf = (Option<Tenant>, Scope);

/// What a process noted since its last flush.
#[derive(Debug, Clone, Default)]
pub struct SkipBatch {
    /// Skips, by identity.
    pub skipped: Vec<Skipped>,
    /// Effects that were not done twice. Without a scope: of so many scopes that they were not told apart.
    pub prevented: Vec<(Layer, Option<ScopeOf>, Amount)>,
    /// Skips that were not logged, because there were too many at once.
    pub unlogged: Vec<(Option<ScopeOf>, u64)>,
}

/// Skips of one identity.
#[derive(Debug, Clone)]
pub struct Skipped {
    /// The event and the scope.
    pub identity: Identity,
    /// How often it was skipped.
    pub count: u64,
    /// The first and the last few, in order.
    pub notes: Vec<SkipNote>,
}

/// One skip.
#[derive(Debug, Clone)]
pub struct SkipNote {
    /// Why.
    pub reason: SkipReason,
    /// How long ago, by the process's monotonic clock. The ledger's clock says when that was.
    pub age: Duration,
    /// The record that was skipped.
    pub origin: Option<Origin>,
}

/// What the log has of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// The event and the scope.
    pub identity: Identity,
    /// How often it was skipped. What is not in `skips` came between the first and the last few.
    pub count: u64,
    /// The first and the last few, in order.
    pub skips: Vec<LoggedSkip>,
}

/// One skip in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedSkip {
    /// When, by ledger time.
    pub at: Time,
    /// Why.
    pub reason: SkipReason,
    /// Topic (its first 64 bytes), partition and offset of the record.
    pub origin: Option<(String, i32, i64)>,
}

impl LoggedSkip {
    fn of(note: &SkipNote, now: Time) -> Self {
        let origin = note.origin.as_ref().map(|origin| {
            let topic = origin.topic.as_str();
            (topic[..topic.floor_char_boundary(TOPIC_BYTES_MAX)].to_owned(), origin.partition, origin.offset)
        });
        LoggedSkip { at: now.minus(note.age), reason: note.reason, origin }
    }
}

impl Logged {
    /// When it was last skipped.
    pub fn last_at(&self) -> Time {
        self.skips.iter().map(|skip| skip.at).max().unwrap_or_default()
    }

    /// Adds later skips of the same identity.
    fn extend(&mut self, count: u64, skips: impl IntoIterator<Item = LoggedSkip>) {
        self.count = self.count.saturating_add(count);
        self.skips.extend(skips);
        first_and_last(&mut self.skips);
    }

    /// The skips as they are stored.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres")), allow(dead_code))]
    pub(crate) fn text(&self) -> String {
        let skip = |skip: &LoggedSkip| {
            let (topic, partition, offset) = match &skip.origin {
                Some((topic, partition, offset)) => (Some(topic), Some(partition), Some(offset)),
                None => (None, None, None),
            };
            serde_json::json!([skip.at.as_micros(), skip.reason.name(), topic, partition, offset])
        };
        serde_json::Value::Array(self.skips.iter().map(skip).collect()).to_string()
    }

    /// Reads a stored row. A skip that this build does not know is left out.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres")), allow(dead_code))]
    pub(crate) fn stored(identity: Identity, count: i64, text: &str) -> Result<Self> {
        type Parts = (i64, String, Option<String>, Option<i32>, Option<i64>);
        let parts: Vec<Parts> = serde_json::from_str(text)
            .map_err(|_| Error::Corrupt(format!("the logged skips of {identity} are {text:?}")))?;
        let skip = |(at, reason, topic, partition, offset): Parts| {
            let origin = topic.and_then(|topic| Some((topic, partition?, offset?)));
            Some(LoggedSkip { at: Time::from_micros(at), reason: SkipReason::named(&reason)?, origin })
        };
        let skips = parts.into_iter().filter_map(skip).collect();
        Ok(Logged { identity, count: u64::try_from(count).unwrap_or(0), skips })
    }
}

/// Keeps the first and the last few.
pub(super) fn first_and_last<T>(all: &mut Vec<T>) {
    if all.len() > 2 * SKIPS_KEPT {
        all.drain(SKIPS_KEPT..all.len() - SKIPS_KEPT);
    }
}

/// A day's count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prevented {
    /// The day, as the number of days since 1970-01-01 (UTC, by ledger time).
    pub day: i32,
    /// Which part of hapax it was.
    pub layer: Layer,
    /// Whose effects; `None`: of scopes beyond the thousandth of that day.
    pub of: Option<ScopeOf>,
    /// How many, and how much of it.
    pub amount: Amount,
}

/// Daily counts of a ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreventedDays {
    /// Effects that were not done twice, by day, layer and scope.
    pub prevented: Vec<Prevented>,
    /// Skips that the log does not have, by day and scope: too many came at once, or another identity took
    /// their slot.
    pub unlogged: Vec<(i32, Option<ScopeOf>, u64)>,
}

/// The day of a time.
pub fn day_of(time: Time) -> i32 {
    i32::try_from(time.as_micros().div_euclid(86_400_000_000)).unwrap_or(i32::MAX)
}

/// A day as `2026-11-18`.
pub fn day_name(day: i32) -> String {
    let mut text = Time::from_micros(i64::from(day).saturating_mul(86_400_000_000)).to_string();
    text.truncate(10);
    text
}

/// The slot of an identity.
pub(crate) fn slot(identity: &Identity) -> i32 {
    let tenant = identity.tenant.as_ref().map_or("", Tenant::as_str);
    let hash = |payload: &[u8]| {
        let Fingerprint(bytes) = Fingerprint::of(None, None, None, payload);
        i32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])
    };
    let scope = format!("{tenant}\0{}", identity.scope.as_str());
    let group = hash(scope.as_bytes()) % SLOT_GROUPS;
    let whole = format!("{scope}\0{}", identity.id.as_str());
    group * SLOTS_PER_GROUP + hash(whole.as_bytes()) % SLOTS_PER_GROUP
}

/// What a row of counts is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Counted {
    /// `None`: skips that are not in the log.
    pub layer: Option<Layer>,
    pub of: Option<ScopeOf>,
}

const UNLOGGED: &str = "unlogged";

impl Counted {
    /// How it is stored: kind, tenant and scope. Names are never empty, so that empty means none.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres")), allow(dead_code))]
    pub(crate) fn texts(&self) -> (&'static str, &str, &str) {
        let kind = self.layer.map_or(UNLOGGED, Layer::name);
        let tenant = self.of.as_ref().and_then(|(tenant, _)| tenant.as_ref()).map_or("", Tenant::as_str);
        (kind, tenant, self.of.as_ref().map_or("", |(_, scope)| scope.as_str()))
    }

    /// Reads it; `None` if another build wrote a kind that this one does not know.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres")), allow(dead_code))]
    pub(crate) fn stored(kind: &str, tenant: &str, scope: &str) -> Result<Option<Self>> {
        let layer = match Layer::ALL.into_iter().find(|layer| layer.name() == kind) {
            None if kind != UNLOGGED => return Ok(None),
            layer => layer,
        };
        let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) };
        let of = if scope.is_empty() { None } else { Some((tenant, Scope::new(scope)?)) };
        Ok(Some(Counted { layer, of }))
    }
}

/// Rows to write.
pub(crate) struct Planned {
    pub slots: Vec<(i32, Logged)>,
    pub counts: Vec<(Counted, Amount)>,
}

/// The slots that a batch needs.
pub(crate) fn slots(batch: &SkipBatch) -> Vec<i32> {
    batch.skipped.iter().map(|skipped| slot(&skipped.identity)).collect()
}

/// Adds a batch to what is stored: the rows of its slots, and all counts of the day.
pub(crate) fn plan(
    batch: &SkipBatch,
    now: Time,
    mut stored: HashMap<i32, Logged>,
    mut counts: HashMap<Counted, Amount>,
) -> Planned {
    let mut changed = HashMap::new();
    let mut unlogged = batch.unlogged.clone();
    for skipped in &batch.skipped {
        let slot = slot(&skipped.identity);
        let skips = skipped.notes.iter().map(|note| LoggedSkip::of(note, now));
        let before = changed.remove(&slot).or_else(|| stored.remove(&slot));
        let fresh = || Logged { identity: skipped.identity.clone(), count: 0, skips: Vec::new() };
        let mut logged = match before {
            Some(logged) if logged.identity == skipped.identity => logged,
            Some(Logged { identity, count, .. }) => {
                unlogged.push((Some((identity.tenant, identity.scope)), count));
                fresh()
            }
            None => fresh(),
        };
        logged.extend(skipped.count, skips);
        changed.insert(slot, logged);
    }
    let prevented = batch.prevented.iter().map(|(layer, of, amount)| (Some(*layer), of.clone(), *amount));
    let unlogged = unlogged.into_iter().map(|(of, count)| (None, of, Amount { count, ..Amount::default() }));
    let mut raised = HashMap::new();
    for (layer, of, amount) in prevented.chain(unlogged) {
        let mut key = Counted { layer, of };
        if !counts.contains_key(&key) && counts.len() >= ROWS_PER_DAY_MAX {
            key.of = None;
        }
        let sum = counts.entry(key.clone()).or_default();
        sum.add(amount);
        raised.insert(key, *sum);
    }
    let mut slots: Vec<_> = changed.into_iter().collect();
    slots.sort_by_key(|(slot, _)| *slot);
    Planned { slots, counts: raised.into_iter().collect() }
}

/// Puts stored counts in order.
pub(crate) fn days(rows: impl IntoIterator<Item = (i32, Counted, Amount)>) -> PreventedDays {
    let mut days = PreventedDays::default();
    for (day, Counted { layer, of }, amount) in rows {
        match layer {
            Some(layer) => days.prevented.push(Prevented { day, layer, of, amount }),
            None => days.unlogged.push((day, of, amount.count)),
        }
    }
    days.prevented.sort_by(|a, b| (a.day, a.layer, &a.of).cmp(&(b.day, b.layer, &b.of)));
    days.unlogged.sort();
    days
}

/// Whether a logged identity is asked for.
pub(crate) fn is_of(identity: &Identity, tenant: Option<&Tenant>, ids: &[EventId]) -> bool {
    identity.tenant.as_ref() == tenant && ids.contains(&identity.id)
}

/// From when on skips and counts are kept.
pub(crate) fn horizons(now: Time) -> (Time, i32) {
    (now.minus(SKIPS_RETENTION), day_of(now.minus(PREVENTED_RETENTION)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(scope: &str, id: &str) -> Identity {
        Identity::new(Scope::new(scope).unwrap(), EventId::new(id).unwrap())
    }

    fn skipped(id: &str, count: u64) -> Skipped {
        let note = |n: u64| SkipNote {
            reason: SkipReason::Duplicate,
            age: Duration::from_secs(100 - n),
            origin: None,
        };
        let mut notes: Vec<_> = (0..count).map(note).collect();
        first_and_last(&mut notes);
        Skipped { identity: identity("mail", id), count, notes }
    }

    #[test]
    fn first_and_last_few_are_kept_and_all_are_counted() {
        let now = Time::from_micros(1_000_000_000_000);
        let batch =
            SkipBatch { skipped: vec![skipped("e-1", 4), skipped("e-1", 50)], ..SkipBatch::default() };
        let planned = plan(&batch, now, HashMap::new(), HashMap::new());
        let [(at, logged)] = &planned.slots[..] else { panic!("one row") };
        assert_eq!((*at, logged.count, logged.skips.len()), (slot(&logged.identity), 54, 2 * SKIPS_KEPT));
        assert_eq!(logged.skips[0].at, now.minus(Duration::from_secs(100)));
        assert_eq!(logged.last_at(), now.minus(Duration::from_secs(51)));
        let again = Logged::stored(logged.identity.clone(), 54, &logged.text()).unwrap();
        assert_eq!(again, *logged);
    }

    #[test]
    fn an_identity_that_needs_a_slot_replaces_another_which_is_counted() {
        let first = identity("mail", "e-0");
        let other =
            (1..1_000_000).map(|n| identity("mail", &format!("e-{n}"))).find(|one| slot(one) == slot(&first));
        let other = other.unwrap();
        let now = Time::from_micros(1);
        let stored = HashMap::from([(slot(&first), Logged { identity: first, count: 7, skips: Vec::new() })]);
        let batch = SkipBatch {
            skipped: vec![Skipped { identity: other.clone(), count: 1, notes: Vec::new() }],
            ..SkipBatch::default()
        };
        let planned = plan(&batch, now, stored, HashMap::new());
        assert_eq!(planned.slots[0].1.identity, other);
        let key = Counted { layer: None, of: Some((None, Scope::new("mail").unwrap())) };
        assert_eq!(planned.counts, [(key, Amount { count: 7, ..Amount::default() })]);
    }

    #[test]
    fn scopes_beyond_the_limit_of_a_day_are_counted_together() {
        let of = |n: usize| Some((Tenant::new(format!("t-{n}")).ok(), Scope::new("mail").unwrap()));
        let one = Amount::one(Decimal::parse("0.1"));
        let many = (0..ROWS_PER_DAY_MAX + 50).map(|n| (Layer::Claims, of(n), one)).collect();
        let batch = SkipBatch { prevented: many, ..SkipBatch::default() };
        let planned = plan(&batch, Time::from_micros(1), HashMap::new(), HashMap::new());
        assert_eq!(planned.counts.len(), ROWS_PER_DAY_MAX + 1);
        let others = planned.counts.iter().find(|(key, _)| key.of.is_none()).unwrap().1;
        assert_eq!((others.count, others.valued, others.value.to_string().as_str()), (50, 50, "5"));
    }

    #[test]
    fn slots_are_bounded_and_days_are_named() {
        for n in 0..10_000 {
            let slot = slot(&identity(&format!("s-{}", n % 77), &format!("e-{n}")));
            assert!((0..SKIP_SLOTS).contains(&slot));
        }
        assert_eq!(day_name(day_of(Time::parse("2026-11-18T23:59:59.999Z").unwrap())), "2026-11-18");
        assert_eq!(day_name(-1), "1969-12-31");
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        for reason in SkipReason::ALL {
            assert_eq!(SkipReason::named(reason.name()), Some(reason));
        }
        let of = Some((Tenant::new("acme").ok(), Scope::new("mail").unwrap()));
        for counted in [Counted { layer: Some(Layer::Keys), of }, Counted { layer: None, of: None }] {
            let (kind, tenant, scope) = counted.texts();
            assert_eq!(Counted::stored(kind, tenant, scope).unwrap(), Some(counted.clone()));
        }
        assert_eq!(Counted::stored("later", "", "").unwrap(), None);
    }
}
