//! Dead letters by their reason: those that failed alike.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hapax::ledger::Entry;
use hapax::{Scope, Tenant, Time};

use crate::explain::masked;

/// How many groups are counted. Reasons that are all different are no groups.
const GROUPS_MAX: usize = 10_000;
/// How many ids name a group.
const IDS_MAX: usize = 3;

/// Dead letters of a scope that failed alike.
pub struct Group {
    pub tenant: Option<Tenant>,
    pub scope: Scope,
    /// The reason, with `#` for ids and long numbers, which differ.
    pub pattern: String,
    /// The reason of the latest one.
    pub reason: String,
    pub count: u64,
    pub first_at: Time,
    pub last_at: Time,
    /// Some of them, the latest first.
    pub ids: Vec<String>,
}

/// Dead letters by reason, counted one by one: however many there are, only their groups are in memory.
#[derive(Default)]
pub struct Groups {
    found: BTreeMap<(Option<Tenant>, Scope, String), Counted>,
    /// How many entries were looked at.
    pub looked: usize,
    /// Whether some are in no group, because there are too many groups.
    pub is_cut: bool,
}

struct Counted {
    count: u64,
    first_at: Time,
    reason: String,
    /// The latest first; never empty.
    latest: Vec<(Time, String)>,
}

impl Groups {
    pub fn add(&mut self, entry: &Entry) {
        self.looked += 1;
        let identity = &entry.identity;
        let key = (identity.tenant.clone(), identity.scope.clone(), pattern(entry.reason.as_deref()));
        if self.found.len() >= GROUPS_MAX && !self.found.contains_key(&key) {
            self.is_cut = true;
            return;
        }
        let new = || Counted { count: 0, first_at: entry.at, reason: String::new(), latest: Vec::new() };
        let group = self.found.entry(key).or_insert_with(new);
        group.count += 1;
        group.first_at = group.first_at.min(entry.at);
        let place = group.latest.partition_point(|(at, _)| *at >= entry.at);
        if place == 0 {
            group.reason = entry.reason.as_deref().map(masked).unwrap_or_default();
        }
        if place < IDS_MAX {
            group.latest.insert(place, (entry.at, identity.id.to_string()));
            group.latest.truncate(IDS_MAX);
        }
    }

    /// The groups, the largest first.
    pub fn sorted(self) -> Vec<Group> {
        let group = |((tenant, scope, pattern), of): ((Option<Tenant>, Scope, String), Counted)| Group {
            tenant,
            scope,
            pattern,
            reason: of.reason,
            count: of.count,
            first_at: of.first_at,
            last_at: of.latest.first().map_or(of.first_at, |(at, _)| *at),
            ids: of.latest.into_iter().map(|(_, id)| id).collect(),
        };
        let mut groups: Vec<_> = self.found.into_iter().map(group).collect();
        groups.sort_by_key(|group| Reverse((group.count, group.last_at)));
        groups
    }
}

/// A reason without secrets, and without what differs from event to event: words with digits become `#`, but not
/// numbers of up to three digits, such as the status of an answer.
pub fn pattern(reason: Option<&str>) -> String {
    let reason = masked(reason.unwrap_or("no reason was given"));
    let is_word = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    let (mut pattern, mut rest) = (String::new(), reason.as_str());
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_word(c) != is_word(first)).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        let has_digit = part.chars().any(|c| c.is_ascii_digit());
        let is_short_number = part.len() <= 3 && part.chars().all(|c| c.is_ascii_digit());
        pattern.push_str(if is_word(first) && has_digit && !is_short_number { "#" } else { part });
        rest = after;
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::pattern;

    #[test]
    fn reasons_that_differ_in_ids_are_one_pattern_and_statuses_are_not() {
        assert_eq!(pattern(Some("order-17-paid: HTTP 500")), "#: HTTP 500");
        assert_eq!(pattern(Some("order-18-paid: HTTP 500")), "#: HTTP 500");
        assert_ne!(pattern(Some("HTTP 404")), pattern(Some("HTTP 500")));
        assert_eq!(
            pattern(Some("card 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10 of é1 at 12345")),
            "card # of # at #"
        );
        assert_eq!(pattern(None), "no reason was given");
        assert_eq!(pattern(Some("")), "");
        assert_eq!(pattern(Some("401: Authorization: Bearer s3cret")), "401: Authorization: ***");
    }
}
