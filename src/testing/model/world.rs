//! The small world of the model: few events, so that commands collide, of every kind that is treated differently.

use std::time::Duration;

use super::rng::Rng;
use crate::clock::Time;
use crate::event::{Fingerprint, Headers, Record};
use crate::id::{Aggregate, EventId, Scope};
use crate::ledger::{
    Baseline, Claim, FailureSettings, Identity, LeaseSettings, Mode, Nonce, OnDead, Order, OrderPolicy,
    Verdict,
};

pub(super) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The events of one sequence. The timeless ones come first.
pub(super) struct World {
    scope: Scope,
    events: Vec<(EventId, Option<(&'static str, u64)>)>,
    timeless: u64,
}

impl World {
    pub(super) fn new(case: u64, now: Time) -> Self {
        let mut events = vec![(text("a"), None), (text("0123456789abcdef"), None)];
        for aggregate in ["parks", "skips", "strict", "seen"] {
            for seq in 0..4 {
                events.push((text(&format!("{aggregate}{seq}")), Some((aggregate, seq))));
            }
        }
        let timeless = events.len() as u64;
        for (n, days) in [(1, 0), (2, 16), (3, 16)] {
            // Ids of one sequence only, so that a week dropped before does not decide for the next.
            let time = now.minus(super::super::kit::DAY * days);
            events.push((super::super::kit::v7_at(time, n), None));
        }
        events.push((super::super::kit::v7_at(now, 4), Some(("parks", 2))));
        events.push((super::super::kit::v7_at(now.plus(secs(86_400 * 90)), 5), None)); // too far ahead
        World { scope: Scope::new(format!("case {case}")).unwrap(), events, timeless }
    }

    pub(super) fn len(&self) -> u64 {
        self.events.len() as u64
    }

    pub(super) fn timeless(&self) -> u64 {
        self.timeless
    }

    pub(super) fn identity(&self, event: u64) -> Identity {
        Identity::new(self.scope.clone(), self.events[event as usize].0.clone())
    }

    /// A claim on an event. Its order is a function of the event; its fingerprint is now and then another.
    pub(super) fn claim(&self, event: u64, mode: Mode, rng: &mut Rng) -> Claim {
        let mut claim = Claim::new(self.identity(event), mode);
        claim.nonce = Nonce(rng.next() as i64);
        claim.fingerprint =
            rng.pick(&[None, Some(1), Some(1), Some(1), Some(1), Some(2)]).map(|n| Fingerprint([n; 16]));
        claim.order = self.events[event as usize].1.map(|(aggregate, seq)| {
            let gap_timeout = secs(350);
            let (policy, on_dead) = match aggregate {
                "parks" => (OrderPolicy::Latest, OnDead::Park),
                "skips" => (OrderPolicy::Latest, OnDead::Skip),
                "strict" => (OrderPolicy::Strict { baseline: Baseline::From(1), gap_timeout }, OnDead::Park),
                _ => (OrderPolicy::Strict { baseline: Baseline::FirstSeen, gap_timeout }, OnDead::Park),
            };
            Order { aggregate: Aggregate::new(aggregate).unwrap(), seq, policy, on_dead }
        });
        claim.body = rng.chance(40).then(|| body(rng.chance(20)));
        claim.hold = claim.body.is_some() && rng.chance(50);
        claim
    }
}

/// Some bytes, or those of a tombstone.
fn body(tombstone: bool) -> Record {
    Record {
        payload: (!tombstone).then(|| "bytes".into()),
        headers: Headers::from_iter([("a", "1"), ("b", "2")]),
        key: Some("key".into()),
        timestamp: Some(Time::from_millis(1_772_625_600_000)),
    }
}

fn text(id: &str) -> EventId {
    EventId::new(id).unwrap()
}

/// Where a claim stands in its order, for the log.
pub(super) fn place(claim: &Claim) -> String {
    claim.order.as_ref().map(|order| format!("{} {}", order.aggregate, order.seq)).unwrap_or_default()
}

pub(super) fn leased(lease: Duration) -> Mode {
    Mode::Lease(LeaseSettings { lease, attempts_max: 3, alone: true })
}

pub(super) fn any_mode(rng: &mut Rng) -> Mode {
    match rng.below(11) {
        0..4 => leased(secs(rng.pick(&[50, 350, 1050]))),
        4..6 => Mode::Lease(LeaseSettings { lease: secs(350), attempts_max: 3, alone: false }),
        6 => Mode::Once { track: rng.pick(&[None, Some(secs(350))]) },
        7 | 8 => Mode::Done,
        9 => Mode::Refused,
        _ => Mode::Failed(FailureSettings {
            attempts_max: 3,
            backoff_base: secs(30),
            backoff_max: secs(300),
            jitter_permille: 1000,
        }),
    }
}

/// A verdict, mostly one that fits.
pub(super) fn any_verdict(mode: Mode, rng: &mut Rng) -> Verdict {
    let other = rng.chance(10);
    let roll = rng.below(10);
    if other || matches!(mode, Mode::Once { .. }) {
        return match roll {
            0..6 => Verdict::Finished { metadata: None },
            6..9 => Verdict::Lost { reason: "crashed".into() },
            _ => Verdict::release(),
        };
    }
    match roll {
        0..4 => Verdict::Done { metadata: None },
        4..8 => {
            let body = rng.chance(30).then(|| body(rng.chance(20)));
            let after = secs(rng.pick(&[0, 50, 350]));
            Verdict::Retry { after, counted: rng.chance(70), reason: Some("boom".into()), body }
        }
        _ => Verdict::Dead { reason: "poison".into(), body: None },
    }
}
