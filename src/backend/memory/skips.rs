//! The log of skips, and daily counts, in memory.

use std::collections::HashMap;

use crate::clock::Time;
use crate::id::{EventId, Tenant};
use crate::ledger::{
    Amount, Counted, Logged, PreventedDays, SkipBatch, day_of, is_skip_of, plan_skips, prevented_days,
    skip_horizons, skip_slots,
};

#[derive(Debug, Default)]
pub(super) struct Skips {
    slots: HashMap<i32, Logged>,
    days: HashMap<i32, HashMap<Counted, Amount>>,
}

impl Skips {
    pub(super) fn note(&mut self, batch: &SkipBatch, now: Time) {
        let stored =
            skip_slots(batch).into_iter().filter_map(|slot| Some((slot, self.slots.get(&slot)?.clone())));
        let stored = stored.collect();
        let day = self.days.entry(day_of(now)).or_default();
        let planned = plan_skips(batch, now, stored, day.clone());
        day.extend(planned.counts);
        self.slots.extend(planned.slots);
    }

    pub(super) fn of(&self, tenant: Option<&Tenant>, ids: &[EventId]) -> Vec<Logged> {
        self.slots.values().filter(|logged| is_skip_of(&logged.identity, tenant, ids)).cloned().collect()
    }

    pub(super) fn prevented(&self, since_day: i32) -> PreventedDays {
        let days = self.days.iter().filter(|(day, _)| **day >= since_day);
        prevented_days(days.flat_map(|(day, counts)| {
            counts.iter().map(|(counted, amount)| (*day, counted.clone(), *amount))
        }))
    }

    pub(super) fn sweep(&mut self, now: Time) {
        let (skips_from, first_day) = skip_horizons(now);
        self.slots.retain(|_, logged| logged.last_at() >= skips_from);
        self.days.retain(|day, _| *day >= first_day);
    }
}
