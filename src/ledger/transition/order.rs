//! Order within an aggregate: how far it has come, and where an event stands in it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::clock::Time;
use crate::ledger::{Baseline, OnDead, Order, OrderPolicy, Token};

/// The head of an aggregate within a scope: how far its events have come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Head {
    /// The highest seq done.
    pub last: Option<u64>,
    /// The event that is running.
    pub lease: Option<HeadLease>,
    /// Seqs that must run before anything above them: they failed and will run again, they are
    /// parked behind `parked`, or they are dead and parked behind a lower dead one.
    pub retrying: BTreeSet<u64>,
    /// Nothing above this seq runs until this seq is resolved.
    pub parked: Option<u64>,
    /// Since when a seq has been missing.
    pub gap_at: Option<Time>,
}

/// The running event of an aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLease {
    /// Its seq.
    pub seq: u64,
    /// Its token.
    pub token: Token,
    /// When its lease ends.
    pub until: Time,
}

impl Head {
    pub(super) fn is_past(&self, seq: u64) -> bool {
        self.last.is_some_and(|last| seq <= last)
    }

    pub(super) fn holds(&self, seq: u64, token: Token) -> bool {
        self.lease.is_some_and(|lease| lease.seq == seq && lease.token == token)
    }

    /// Whether the head lets a held event be claimed: its turn has come, or it was overtaken and
    /// will be stale. In a strict order an earlier seq may still be missing.
    pub(crate) fn lets(&self, seq: u64, now: Time) -> bool {
        let in_the_way = |lease: &HeadLease| lease.until > now || lease.seq < seq;
        self.is_past(seq)
            || (self.parked.is_none_or(|parked| seq <= parked)
                && !self.lease.as_ref().is_some_and(in_the_way)
                && self.retrying.range(..seq).next().is_none())
    }

    /// Moves past `seq`, which will not run, unless something below it is still to come.
    pub(super) fn pass(&mut self, seq: u64) {
        self.retrying.remove(&seq);
        if self.parked != Some(seq) {
            return;
        }
        self.parked = None;
        let below = self.lease.is_some_and(|lease| lease.seq < seq)
            || self.retrying.first().is_some_and(|owed| *owed < seq);
        if !below {
            self.advance(seq);
        }
    }

    pub(super) fn advance(&mut self, seq: u64) {
        let last = self.last.map_or(seq, |last| last.max(seq));
        self.last = Some(last);
        self.lease = self.lease.filter(|lease| lease.seq != seq);
        // The order has moved past these; they can never run, so nothing may wait for them.
        self.retrying.retain(|owed| *owed > last);
        self.parked = self.parked.filter(|parked| *parked > last);
        self.gap_at = None;
    }

    /// Records that `seq` must run before anything above it.
    pub(super) fn must_run_first(&mut self, seq: u64) {
        if !self.is_past(seq) {
            self.retrying.insert(seq);
        }
    }

    /// Ends the lease of a run, unless another run has taken over.
    pub(super) fn end_lease(&mut self, seq: u64, token: Option<Token>) {
        self.lease = self.lease.filter(|lease| lease.seq != seq || Some(lease.token) != token);
    }

    /// Parks everything above `seq`. Of two seqs that park, the lower one counts and the higher one
    /// is owed.
    pub(super) fn park(&mut self, seq: u64) {
        if self.is_past(seq) {
            return;
        }
        self.retrying.remove(&seq);
        if let Some(other) = self.parked.filter(|parked| *parked != seq) {
            self.must_run_first(other.max(seq));
        }
        self.parked = Some(self.parked.map_or(seq, |parked| parked.min(seq)));
    }

    pub(super) fn die(&mut self, seq: u64, token: Option<Token>, on_dead: OnDead) {
        self.end_lease(seq, token);
        match on_dead {
            OnDead::Skip => self.advance(seq),
            OnDead::Park => self.park(seq),
        }
    }

    /// Fixes where a strict order begins, unless an event in it is done already. The first one seen
    /// is the lowest one known, even if it is only leased, owed or dead.
    pub(super) fn begin(&mut self, order: &Order) {
        let (None, OrderPolicy::Strict { baseline, .. }) = (self.last, order.policy) else { return };
        let first = match baseline {
            Baseline::From(first) => first,
            Baseline::FirstSeen => {
                let known = [self.lease.map(|lease| lease.seq), self.retrying.first().copied(), self.parked];
                known.into_iter().flatten().fold(order.seq, u64::min)
            }
        };
        if let Some(before) = first.checked_sub(1) {
            let gap_at = self.gap_at;
            self.advance(before);
            self.gap_at = gap_at;
        }
    }
}

pub(super) enum Place {
    Go,
    Stale(u64),
    Wait(u64),
    Parked(u64),
}

/// Where an event stands in its aggregate's order. May record a gap in `head`, or park the
/// aggregate behind one.
pub(super) fn place(head: &mut Head, order: &Order, now: Time) -> Place {
    head.begin(order);
    if let Some(last) = head.last.filter(|last| order.seq <= *last) {
        return Place::Stale(last);
    }
    if let Some(behind) = head.parked.filter(|parked| order.seq > *parked) {
        return Place::Parked(behind);
    }
    if let Some(lease) = head.lease
        && lease.seq != order.seq
        && (lease.until > now || lease.seq < order.seq)
    {
        return Place::Wait(lease.seq);
    }
    if let Some(lease) = head.lease.filter(|lease| lease.seq == order.seq && lease.until > now) {
        return Place::Wait(lease.seq); // another id with the same seq
    }
    if let Some(lower) = head.retrying.range(..order.seq).next() {
        return Place::Wait(*lower);
    }
    if let OrderPolicy::Strict { gap_timeout, .. } = order.policy {
        return gap(head, order.seq, gap_timeout, now);
    }
    Place::Go
}

fn gap(head: &mut Head, seq: u64, gap_timeout: Duration, now: Time) -> Place {
    let next = head.last.map_or(0, |last| last + 1);
    if seq == next {
        return Place::Go;
    }
    let since = *head.gap_at.get_or_insert(now);
    if now.since(since) >= gap_timeout {
        head.park(next);
        return Place::Parked(next);
    }
    Place::Wait(next)
}
