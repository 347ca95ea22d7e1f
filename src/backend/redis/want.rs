//! What a decision reads, and the request for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use redis::ScriptInvocation;

use super::codec::STAMP_BYTES;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Scope, Tenant};
use crate::ledger::{Claim, Identity, Key, Settings, Week};

/// (tenant, scope).
pub(super) type Names = (Option<Tenant>, Scope);

/// A scope: by its index among the requested names, or by its number.
#[derive(Debug, Clone, Copy)]
enum ScopeRef {
    Place(usize),
    Number(i32),
}

impl ScopeRef {
    fn arg(self) -> i64 {
        match self {
            ScopeRef::Place(place) => place as i64 + 1,
            ScopeRef::Number(number) => -i64::from(number),
        }
    }
}

/// What to read.
#[derive(Debug, Default)]
pub(super) struct Wants {
    scopes: Vec<Names>,
    places: HashMap<Names, usize>,
    weeks: BTreeSet<Week>,
    rows: Vec<(ScopeRef, Week, Vec<u8>)>,
    heads: Vec<(ScopeRef, Aggregate)>,
}

impl Wants {
    fn place(&mut self, identity: &Identity) -> ScopeRef {
        let names = (identity.tenant.clone(), identity.scope.clone());
        if let Some(place) = self.places.get(&names) {
            return ScopeRef::Place(*place);
        }
        self.scopes.push(names.clone());
        self.places.insert(names, self.scopes.len() - 1);
        ScopeRef::Place(self.scopes.len() - 1)
    }

    /// Adds the row of an identity, and the head of the row's aggregate.
    pub(super) fn identity(&mut self, identity: &Identity, week: Week) {
        let of = self.place(identity);
        self.weeks.insert(week);
        self.rows.push((of, week, identity.id.key().into_owned()));
    }

    /// What claims need. Skips invalid claims: they fail without a read.
    pub(super) fn claims(claims: &[Claim], settings: &Settings) -> Self {
        let mut wants = Wants::default();
        for claim in claims {
            let Ok(week) = settings.check(claim) else { continue };
            wants.identity(&claim.identity, week);
            if let Some(order) = &claim.order {
                let of = wants.place(&claim.identity);
                wants.heads.push((of, order.aggregate.clone()));
            }
        }
        wants
    }

    /// Rows by key.
    pub(super) fn keys<'k>(keys: impl IntoIterator<Item = &'k Key>) -> Self {
        let mut wants = Wants::default();
        for key in keys {
            wants.weeks.insert(key.week);
            wants.rows.push((ScopeRef::Number(key.scope), key.week, key.id.clone()));
        }
        wants
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Adds the arguments of the reading script.
    pub(super) fn put(&self, script: &mut ScriptInvocation<'_>) {
        script.arg(self.scopes.len());
        for (tenant, scope) in &self.scopes {
            script.arg(names_field(tenant.as_ref(), scope));
        }
        script.arg(self.weeks.len());
        for week in &self.weeks {
            script.arg(week.number());
        }
        script.arg(self.rows.len());
        for (of, week, id) in &self.rows {
            script.arg(of.arg()).arg(week.number()).arg(id.as_slice());
        }
        script.arg(self.heads.len());
        for (of, aggregate) in &self.heads {
            script.arg(of.arg()).arg(aggregate.as_str());
        }
    }

    /// Decodes the script's answer.
    pub(super) fn found(self, reply: Reply) -> Result<Found> {
        let (now, token, weeks_version, weeks_count, scopes_count, scopes, weeks, rows, heads) = reply;
        let whole = scopes.len() == self.scopes.len()
            && weeks.len() == 2 * self.weeks.len()
            && rows.len() == 3 * self.rows.len()
            && heads.len() == self.heads.len();
        if !whole {
            return Err(Error::Corrupt("the reading script answered something else".into()));
        }
        let numbers: Vec<Option<(i32, Time)>> =
            scopes.iter().map(|known| scope_value(known)).collect::<Result<_>>()?;
        let number = |of: ScopeRef| match of {
            ScopeRef::Place(place) => numbers[place].map(|(number, _)| number),
            ScopeRef::Number(number) => Some(number),
        };
        let mut found = Found {
            now: Time::from_micros(now),
            token,
            weeks_version,
            weeks_count,
            scopes_count,
            ..Found::default()
        };
        for (week, noted) in self.weeks.into_iter().zip(weeks.chunks_exact(2)) {
            let dropped = pair(&noted[1])?.map(|(_, barred)| barred as i32);
            found.weeks.insert(week, (!noted[0].is_empty(), dropped));
        }
        for ((of, week, id), stored) in self.rows.into_iter().zip(rows.chunks_exact(3)) {
            // An unknown scope has no rows.
            let Some(scope) = number(of) else { continue };
            let [place, row, head] = stored else { continue };
            let place = match place.as_slice() {
                b"w" => Some(Place::Week),
                b"k" => Some(Place::Kept),
                _ => None,
            };
            let row = place.map(|place| (place, row.clone()));
            found.rows.insert(Key { week, scope, id }, (row, head.clone()));
        }
        for ((of, aggregate), head) in self.heads.into_iter().zip(heads) {
            if let Some(scope) = number(of) {
                found.heads.push((scope, aggregate, head));
            }
        }
        found.scopes = self.scopes.into_iter().zip(numbers).collect();
        Ok(found)
    }
}

/// The answer of the reading script: time, last token, version and count of weeks, count of scopes;
/// then scopes, weeks, rows and heads in the order of the request.
pub(super) type Reply = (i64, i64, i64, usize, i32, Vec<Vec<u8>>, Vec<Vec<u8>>, Vec<Vec<u8>>, Vec<Vec<u8>>);

/// Where a row is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In its week's hash.
    Week,
    /// Among the rows that were open when their week was dropped.
    Kept,
}

/// A stored row and its place.
pub(super) type Stored = (Place, Vec<u8>);

/// What was read, at one moment.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub now: Time,
    pub token: i64,
    pub weeks_version: i64,
    pub weeks_count: usize,
    pub scopes_count: i32,
    pub scopes: Vec<(Names, Option<(i32, Time)>)>,
    /// Whether the week exists and, if it was dropped, the highest scope number at that time.
    pub weeks: BTreeMap<Week, (bool, Option<i32>)>,
    /// Stored rows, and the stored heads of their aggregates.
    pub rows: HashMap<Key, (Option<Stored>, Vec<u8>)>,
    pub heads: Vec<(i32, Aggregate, Vec<u8>)>,
}

/// Tenant and scope as a field name. Names contain no NUL, and an empty tenant means none.
pub(super) fn names_field(tenant: Option<&Tenant>, scope: &Scope) -> String {
    format!("{}\0{}", tenant.map_or("", Tenant::as_str), scope.as_str())
}

/// Parses a field name made by [`names_field`].
pub(super) fn names_of(field: &str) -> Result<Names> {
    let parse = || {
        let (tenant, scope) = field.split_once('\0')?;
        let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant).ok()?) };
        Some((tenant, Scope::new(scope).ok()?))
    };
    parse().ok_or_else(|| Error::Corrupt(format!("{field:?} is not a scope")))
}

/// Two numbers separated by a colon; `None` if nothing is stored.
pub(super) fn pair(stored: &[u8]) -> Result<Option<(i64, i64)>> {
    if stored.is_empty() {
        return Ok(None);
    }
    let parse = || {
        let (a, b) = std::str::from_utf8(stored).ok()?.split_once(':')?;
        Some((a.parse().ok()?, b.parse().ok()?))
    };
    let bad = || Error::Corrupt(format!("{:?} is not a pair of numbers", String::from_utf8_lossy(stored)));
    parse().map(Some).ok_or_else(bad)
}

/// A scope's number and when it began.
pub(super) fn scope_value(stored: &[u8]) -> Result<Option<(i32, Time)>> {
    Ok(pair(stored)?.map(|(number, began)| (number as i32, Time::from_micros(began))))
}

/// The stamp of a stored value; empty if nothing is stored.
pub(super) fn stamp(stored: &[u8]) -> Vec<u8> {
    stored[..stored.len().min(STAMP_BYTES)].to_vec()
}

/// The key of the hash of a week and scope, without the ledger's prefix.
pub(super) fn week_key(week: Week, scope: i32) -> String {
    format!(":w:{}:{scope}", week.number())
}

/// A row's field in the hash of kept rows, and its member in the indexes.
pub(super) fn member(key: &Key) -> Vec<u8> {
    [format!("{}:{}:", key.week.number(), key.scope).as_bytes(), &key.id].concat()
}

/// Parses a member into a key.
pub(super) fn member_key(member: &[u8]) -> Result<Key> {
    let parse = || {
        let mut parts = member.splitn(3, |byte| *byte == b':');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse::<i32>().ok();
        let (week, scope) = (number()?, number()?);
        let week = Week::from_number(i16::try_from(week).ok()?).ok()?;
        Some(Key { week, scope, id: parts.next()?.to_vec() })
    };
    parse().ok_or_else(|| Error::Corrupt("an index entry has no row".into()))
}
