//! A decision's snapshot: what was read, and what to write if nothing of it has changed.

use std::collections::{BTreeMap, HashMap};

use super::codec;
use super::held::marker_field;
use super::want::{Found, Names, Place, Wants, member, names_field, stamp, week_key};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Scope, Tenant};
use crate::ledger::transition::{Head, Row};
use crate::ledger::{Audit, Intervene, Key, Marker, Nonce, Rows, State, Token, Week};

/// A row, as read and as it will be written.
#[derive(Debug, Default)]
struct Slot {
    place: Option<Place>,
    stamp: Vec<u8>,
    before: Option<Row>,
    after: Option<Row>,
    changed: bool,
}

/// A head, as read and as it will be written.
#[derive(Debug, Default)]
struct HeadSlot {
    stamp: Vec<u8>,
    head: Option<Head>,
    changed: bool,
}

/// A week, as read and changed.
#[derive(Debug, Clone, Copy, Default)]
struct WeekSlot {
    made: bool,
    fresh: bool,
    touched: bool,
    dropped: Option<i32>,
}

/// A decision's view of the ledger at one moment.
#[derive(Debug, Default)]
pub(super) struct RedisSnapshot {
    now: Time,
    token: i64,
    weeks_version: i64,
    weeks_count: usize,
    scopes_count: i32,
    scopes: HashMap<Names, (i32, Time)>,
    new_scopes: Vec<(Names, i32)>,
    weeks: BTreeMap<Week, WeekSlot>,
    rows: HashMap<Key, Slot>,
    heads: HashMap<(i32, Aggregate), HeadSlot>,
    audit: Vec<String>,
    markers: Vec<(Scope, Marker)>,
    /// Dead letters that were published: their index entries move.
    copied: Vec<Key>,
    /// Whether the write voids earlier decisions of other callers.
    fenced: bool,
}

impl RedisSnapshot {
    pub(super) fn new(found: Found) -> Result<Self> {
        let mut snapshot = RedisSnapshot {
            now: found.now,
            token: found.token,
            weeks_version: found.weeks_version,
            weeks_count: found.weeks_count,
            scopes_count: found.scopes_count,
            ..RedisSnapshot::default()
        };
        snapshot.add(found)?;
        Ok(snapshot)
    }

    /// Adds rows read later for the same decision. Fails if weeks or scopes have changed since.
    /// Keeps rows that are already here.
    pub(super) fn add(&mut self, found: Found) -> Result<()> {
        if (found.weeks_version, found.scopes_count) != (self.weeks_version, self.scopes_count) {
            return Err(contended());
        }
        for (names, known) in found.scopes {
            if let Some(known) = known {
                self.scopes.insert(names, known);
            }
        }
        for (week, (made, dropped)) in found.weeks {
            self.weeks.entry(week).or_insert(WeekSlot { made, dropped, ..WeekSlot::default() });
        }
        for (scope, aggregate, stored) in found.heads {
            self.add_head(scope, aggregate, &stored)?;
        }
        for (key, (stored, head)) in found.rows {
            let mut slot = Slot::default();
            if let Some((place, stored)) = stored {
                let row = codec::row(&stored)?;
                if let Some((aggregate, _)) = &row.order {
                    self.add_head(key.scope, aggregate.clone(), &head)?;
                }
                slot = Slot { place: Some(place), stamp: stamp(&stored), before: Some(row.clone()), ..slot };
                slot.after = Some(row);
            }
            self.rows.entry(key).or_insert(slot);
        }
        Ok(())
    }

    fn add_head(&mut self, scope: i32, aggregate: Aggregate, stored: &[u8]) -> Result<()> {
        let head = if stored.is_empty() { None } else { Some(codec::head(stored)?) };
        let slot = HeadSlot { stamp: stamp(stored), head, changed: false };
        self.heads.entry((scope, aggregate)).or_insert(slot);
        Ok(())
    }

    fn week(&mut self, week: Week) -> Result<&mut WeekSlot> {
        self.weeks.get_mut(&week).ok_or_else(|| unread("a week"))
    }

    fn is_new_scope(&self, scope: i32) -> bool {
        scope > self.scopes_count
    }

    fn slot(&mut self, key: &Key) -> Result<&mut Slot> {
        if self.is_new_scope(key.scope) {
            // A new scope has no rows yet. The check of the scope count detects another writer that
            // creates it.
            return Ok(self.rows.entry(key.clone()).or_default());
        }
        self.rows.get_mut(key).ok_or_else(|| unread("a row"))
    }

    fn head_slot(&mut self, scope: i32, aggregate: &Aggregate) -> Result<&mut HeadSlot> {
        if self.is_new_scope(scope) {
            return Ok(self.heads.entry((scope, aggregate.clone())).or_default());
        }
        self.heads.get_mut(&(scope, aggregate.clone())).ok_or_else(|| unread("the head of an aggregate"))
    }

    /// Stores a row without touching its week.
    pub(super) fn put_quietly(&mut self, key: &Key, row: &Row) -> Result<()> {
        let made = self.week(key.week)?.made;
        let slot = self.slot(key)?;
        slot.place = slot.place.or(Some(if made { Place::Week } else { Place::Kept }));
        slot.after = Some(row.clone());
        slot.changed = true;
        Ok(())
    }

    /// The rows as they were read.
    pub(super) fn rows_read(self) -> impl Iterator<Item = (Key, Row)> {
        self.rows.into_iter().filter_map(|(key, slot)| Some((key, slot.before?)))
    }

    /// Marks a dead letter as published, if its token is unchanged.
    pub(super) fn mark_dead_published(&mut self, key: Key, token: Token) -> Result<()> {
        let row = self.row(&key)?;
        if row.is_some_and(|row| row.token == token && index_of(&row) == Some("out")) {
            self.copied.push(key);
        }
        Ok(())
    }

    /// Whether the claim with this nonce set one of the rows read.
    pub(super) fn has_nonce(&self, nonce: Nonce) -> bool {
        self.rows.values().any(|slot| slot.before.as_ref().is_some_and(|row| row.nonce == nonce))
    }

    /// The highest token.
    pub(super) fn last_token(&self) -> i64 {
        self.token
    }

    /// Voids all earlier decisions that are not written yet.
    pub(super) fn fence(&mut self) {
        self.fenced = true;
    }

    /// Sets markers.
    pub(super) fn set_markers(&mut self, scope: &Scope, markers: &[Marker]) {
        self.markers.extend(markers.iter().map(|marker| (scope.clone(), marker.clone())));
    }

    /// The arguments of the writing script; `None` if there is nothing to write.
    pub(super) fn writes(&self) -> Option<Vec<Vec<u8>>> {
        let mut acts = Args::default();
        for ((tenant, scope), number) in &self.new_scopes {
            acts.word("scope").text(names_field(tenant.as_ref(), scope));
            acts.text(format!("{number}:{}", self.now.as_micros()));
        }
        for (week, slot) in &self.weeks {
            if slot.fresh || slot.touched {
                acts.word(if slot.fresh { "week" } else { "touch" }).text(week.number().to_string());
            }
        }
        for (key, slot) in self.rows.iter().filter(|(_, slot)| slot.changed) {
            put_row(&mut acts, key, slot);
        }
        for ((scope, aggregate), slot) in self.heads.iter().filter(|(_, slot)| slot.changed) {
            if let Some(head) = &slot.head {
                acts.word("set").text(format!(":h:{scope}")).text(aggregate.as_str());
                acts.0.push(codec::pack_head(head));
            }
        }
        for key in &self.copied {
            acts.word("zrem").text(index_key("out", key.scope)).bytes(member(key));
            let at =
                self.rows.get(key).and_then(|slot| slot.after.as_ref()).map_or(0, |row| row.at.as_micros());
            acts.word("zadd").text(index_key("rest", key.scope)).text(at.to_string()).bytes(member(key));
        }
        for (scope, marker) in &self.markers {
            let field = marker_field(scope, &marker.topic, marker.partition);
            if marker.is_empty() {
                acts.word("del").word(":markers").text(field);
            } else {
                acts.word("note").word(":markers").text(field);
                acts.text(format!("{}:{}:{}", self.now.as_micros(), marker.last, marker.tried_text()));
            }
        }
        for line in &self.audit {
            acts.word("audit").text(line);
        }
        if self.fenced {
            acts.word("fence");
        }
        if acts.0.is_empty() {
            return None;
        }
        let mut args = Args::default();
        args.text(self.now.as_micros().to_string()).text(self.weeks_version.to_string());
        args.text(if self.new_scopes.is_empty() { String::new() } else { self.scopes_count.to_string() });
        args.text(self.token.to_string());
        self.put_checks(&mut args);
        args.0.append(&mut acts.0);
        Some(args.0)
    }

    /// Adds the checks that everything read is unchanged.
    fn put_checks(&self, args: &mut Args) {
        let mut checks = Args::default();
        let mut count = 0;
        for (key, slot) in self.rows.iter().filter(|(key, _)| !self.is_new_scope(key.scope)) {
            let in_week = slot.stamp.is_empty() || slot.place == Some(Place::Week);
            let kept = self.weeks.get(&key.week).is_some_and(|week| week.dropped.is_some());
            if in_week {
                checks.text(week_key(key.week, key.scope)).bytes(key.id.clone()).bytes(slot.stamp.clone());
                count += 1;
            }
            if kept && (slot.stamp.is_empty() || slot.place == Some(Place::Kept)) {
                checks.word(":kept").bytes(member(key)).bytes(slot.stamp.clone());
                count += 1;
            }
        }
        for ((scope, aggregate), slot) in
            self.heads.iter().filter(|((scope, _), _)| !self.is_new_scope(*scope))
        {
            checks.text(format!(":h:{scope}")).text(aggregate.as_str()).bytes(slot.stamp.clone());
            count += 1;
        }
        args.text(count.to_string());
        args.0.append(&mut checks.0);
    }
}

/// Nothing was changed; a retry may succeed.
pub(super) fn contended() -> Error {
    Error::Contended { what: "gave up: too many conflicting writes".into(), source: None }
}

fn unread(what: &str) -> Error {
    Error::Corrupt(format!("a decision looked at {what} that was not read"))
}

/// Arguments of a script.
#[derive(Debug, Default)]
pub(super) struct Args(pub Vec<Vec<u8>>);

impl Args {
    pub(super) fn word(&mut self, word: &'static str) -> &mut Self {
        self.text(word)
    }

    pub(super) fn text(&mut self, text: impl AsRef<str>) -> &mut Self {
        self.bytes(text.as_ref().as_bytes().to_vec())
    }

    pub(super) fn bytes(&mut self, bytes: Vec<u8>) -> &mut Self {
        self.0.push(bytes);
        self
    }
}

/// The index that holds a held row: rows that can be claimed again, dead letters that are not
/// published yet, the rest.
pub(super) fn index_of(row: &Row) -> Option<&'static str> {
    row.body.as_ref()?;
    Some(match row.state {
        State::Leased | State::Retry | State::Parked => "due",
        State::Dead => "out",
        _ => "rest",
    })
}

/// The key of an index of held rows.
pub(super) fn index_key(index: &str, scope: i32) -> String {
    format!(":{index}:{scope}")
}

/// Whether this is an at-most-once claim whose end has not been reported.
pub(super) fn is_awaited(row: &Row) -> bool {
    row.state == State::Claimed && row.tracked
}

/// Writes a row and updates its indexes.
fn put_row(acts: &mut Args, key: &Key, slot: &Slot) {
    let before = slot.before.as_ref();
    if before.is_some_and(|row| row.body.is_some()) {
        for index in ["due", "out", "rest"] {
            acts.word("zrem").text(index_key(index, key.scope)).bytes(member(key));
        }
    }
    if before.is_some_and(is_awaited) {
        acts.word("zrem").word(":awaited").bytes(member(key));
    }
    let (hash, field) = match slot.place {
        Some(Place::Kept) => (":kept".to_owned(), member(key)),
        _ => (week_key(key.week, key.scope), key.id.clone()),
    };
    let Some(row) = &slot.after else {
        acts.word("del").text(hash).bytes(field);
        return;
    };
    acts.word("set").text(hash).bytes(field).bytes(codec::pack_row(row));
    let at = row.at.as_micros().to_string();
    if let Some(index) = index_of(row) {
        acts.word("zadd").text(index_key(index, key.scope)).text(&at).bytes(member(key));
    }
    if is_awaited(row) {
        acts.word("zadd").word(":awaited").text(&at).bytes(member(key));
    }
}

impl Rows for RedisSnapshot {
    fn now(&self) -> Time {
        self.now
    }

    fn scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<(i32, Time)> {
        let names = (tenant.cloned(), scope.clone());
        if let Some(known) = self.scopes.get(&names) {
            return Ok(*known);
        }
        let number = self.scopes_count + self.new_scopes.len() as i32 + 1;
        self.new_scopes.push((names.clone(), number));
        self.scopes.insert(names, (number, self.now));
        Ok((number, self.now))
    }

    fn known_scope(&mut self, tenant: Option<&Tenant>, scope: &Scope) -> Result<Option<i32>> {
        Ok(self.scopes.get(&(tenant.cloned(), scope.clone())).map(|(number, _)| *number))
    }

    /// The last token plus one. Two concurrent decisions may draw the same token, but never for the
    /// same entry or aggregate, since only one of them is written then. A decision that reads after
    /// a write draws a higher token.
    fn token(&mut self) -> Result<Token> {
        self.token += 1;
        Ok(Token(self.token))
    }

    fn dropped(&mut self, week: Week) -> Result<Option<i32>> {
        Ok(self.week(week)?.dropped)
    }

    fn make_week(&mut self, week: Week) -> Result<()> {
        let slot = self.week(week)?;
        slot.made = true;
        slot.fresh = true;
        self.weeks_count += 1;
        Ok(())
    }

    fn weeks(&mut self, week: Week) -> Result<(usize, bool)> {
        let made = self.week(week)?.made;
        Ok((self.weeks_count, made))
    }

    fn row(&mut self, key: &Key) -> Result<Option<Row>> {
        Ok(self.slot(key)?.after.clone())
    }

    fn put(&mut self, key: &Key, row: &Row) -> Result<()> {
        self.put_quietly(key, row)?;
        if self.slot(key)?.place == Some(Place::Week) {
            self.week(key.week)?.touched = true;
        }
        Ok(())
    }

    fn delete(&mut self, key: &Key) -> Result<()> {
        let slot = self.slot(key)?;
        slot.after = None;
        slot.changed = true;
        Ok(())
    }

    fn head(&mut self, scope: i32, aggregate: &Aggregate) -> Result<Option<Head>> {
        Ok(self.head_slot(scope, aggregate)?.head.clone())
    }

    fn put_head(&mut self, scope: i32, aggregate: &Aggregate, head: &Head) -> Result<()> {
        let slot = self.head_slot(scope, aggregate)?;
        slot.head = Some(head.clone());
        slot.changed = true;
        Ok(())
    }

    fn audit(&mut self, intervene: &Intervene) -> Result<()> {
        let line = serde_json::json!({
            "at": self.now.as_micros(),
            "by": intervene.by,
            "what": intervene.what.name(),
            "identity": Audit::name(&intervene.identity),
            "why": intervene.reason,
        });
        self.audit.push(line.to_string());
        Ok(())
    }
}

/// Wants the rows of identities.
pub(super) fn wants_of<'i>(
    identities: impl IntoIterator<Item = (&'i crate::ledger::Identity, Week)>,
) -> Wants {
    let mut wants = Wants::default();
    for (identity, week) in identities {
        wants.identity(identity, week);
    }
    wants
}
