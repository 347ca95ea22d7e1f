//! What an operator asks and does.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use async_trait::async_trait;

use super::MemoryLedger;
use crate::error::Result;
use crate::id::{EventId, Scope, Tenant};
use crate::ledger::transition::Row;
use crate::ledger::{
    Audit, Cursor, CursorParts, Filter, Finding, Identity, Intervene, Intervened, Key, LIST_BYTES_MAX, Level,
    Logged, Operations, Page, PreventedDays, Rows, SkipBatch, Stat, State, SweepSettings, Swept, Week,
    WeekSize, intervene_rows,
};

#[async_trait]
impl Operations for MemoryLedger {
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        let after = after.map(|cursor| CursorParts::decode(&cursor.0)).transpose()?;
        let after = match after {
            Some(parts) => {
                Some(Key { week: Week::from_number(parts.week)?, scope: parts.scope, id: parts.key })
            }
            None => None,
        };
        let store = self.lock();
        let now = store.now();
        let mut all: BTreeMap<&Key, &Row> = store.rows.iter().collect();
        all.extend(&store.kept);
        let mut entries = Vec::new();
        let mut next = None;
        let mut last = None;
        let mut bytes = 0;
        for (key, row) in all {
            if after.as_ref().is_some_and(|after| key <= after) {
                continue;
            }
            let entry = store.entry(key, row)?;
            if !filter.matches(&entry, row.is_overdue(now)) {
                continue;
            }
            if entries.len() == limit || bytes >= LIST_BYTES_MAX {
                next = last.map(|key: &Key| {
                    CursorParts { week: key.week.number(), scope: key.scope, key: key.id.clone() }.encode()
                });
                break;
            }
            bytes += entry.page_bytes();
            entries.push(entry);
            last = Some(key);
        }
        Ok(Page { entries, next })
    }

    async fn stat(&self) -> Result<Stat> {
        let store = self.lock();
        let now = store.now();
        let mut counts: BTreeMap<(i32, State), u64> = BTreeMap::new();
        let mut held: BTreeMap<i32, u64> = BTreeMap::new();
        let size = |week: &Week| {
            let entries = store.rows.keys().filter(|key| key.week == *week).count() as u64;
            WeekSize { week: *week, entries, bytes: None }
        };
        let week_sizes = store.weeks.keys().map(size).collect();
        for (key, row) in store.rows.iter().chain(&store.kept) {
            let state = if row.is_overdue(now) { State::Lost } else { row.state };
            *counts.entry((key.scope, state)).or_default() += 1;
            if row.body.is_some() {
                *held.entry(key.scope).or_default() += 1;
            }
        }
        let counts = counts.into_iter().map(|((number, state), count)| {
            let (tenant, scope, _) = &store.scopes[number as usize];
            (tenant.clone(), scope.clone(), state, count)
        });
        Ok(Stat {
            now,
            counts: counts.collect(),
            weeks: store.weeks.keys().copied().collect(),
            week_sizes,
            dropped: store.dropped.iter().map(|(week, (at, _))| (*week, *at)).collect(),
            held: held.values().sum(),
            held_by: held
                .into_iter()
                .map(|(number, count)| {
                    let (tenant, scope, _) = &store.scopes[number as usize];
                    (tenant.clone(), scope.clone(), count)
                })
                .collect(),
        })
    }

    async fn scopes(&self) -> Result<BTreeSet<Scope>> {
        Ok(self.lock().scopes.iter().map(|(_, scope, _)| scope.clone()).collect())
    }

    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        intervene_rows(&mut *self.lock(), intervene, &self.settings)
    }

    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        Ok(self.lock().audit.iter().rev().take(limit).cloned().collect())
    }

    async fn audit_of(&self, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
        let entries: HashSet<_> = entries.iter().collect();
        let store = self.lock();
        let of_them =
            store.audit.iter().rev().filter(|row| row.of.as_ref().is_some_and(|of| entries.contains(of)));
        Ok(of_them.take(limit).cloned().collect())
    }

    async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
        let mut store = self.lock();
        if settings.dry_run {
            return Ok(store.clone().sweep(settings));
        }
        self.lock_skips().sweep(store.now());
        Ok(store.sweep(settings))
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        Ok(vec![Finding {
            level: Level::Warning,
            check: "durability",
            message: "this ledger lives in memory: what it knows ends with the process".into(),
        }])
    }

    async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
        let now = self.lock().now();
        self.lock_skips().note(batch, now);
        Ok(())
    }

    async fn skips(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
        Ok(self.lock_skips().of(tenant, ids))
    }

    async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
        Ok(self.lock_skips().prevented(since_day))
    }
}
