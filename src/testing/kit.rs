//! Small words the cases are written in.

use std::time::Duration;

use uuid::Uuid;

use super::Harness;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::{Aggregate, EventId, Scope};
use crate::ledger::{
    Baseline, Claim, Entry, Extend, FailureSettings, Grant, Identity, Intervene, Intervened, Intervention,
    LeaseSettings, Ledger, Metadata, Mode, Nonce, OnDead, Order, OrderPolicy, Outcome, Settings, Settle,
    Settled, SweepSettings, Swept, Verdict,
};

/// How long the leases of the cases last.
pub const LEASE: Duration = Duration::from_mins(1);
/// Longer than [`LEASE`].
pub const PAST_LEASE: Duration = Duration::from_secs(61);
/// A day.
pub const DAY: Duration = Duration::from_hours(24);
/// How many runs the cases allow.
pub const ATTEMPTS_MAX: u32 = 3;

/// A lease with the settings of the cases, alone.
pub fn lease() -> Mode {
    Mode::Lease(LeaseSettings { lease: LEASE, attempts_max: ATTEMPTS_MAX, alone: true })
}

/// A lease that runs beside others.
pub fn lease_beside() -> Mode {
    Mode::Lease(LeaseSettings { lease: LEASE, attempts_max: ATTEMPTS_MAX, alone: false })
}

/// A failure to be counted: pauses of 10 s, 20 s, dead at the third.
pub fn failed() -> Mode {
    Mode::Failed(FailureSettings {
        attempts_max: ATTEMPTS_MAX,
        backoff_base: Duration::from_secs(10),
        backoff_max: Duration::from_mins(5),
        jitter_permille: 1000,
    })
}

/// An identity in the scope of the cases.
pub fn identity(id: &str) -> Identity {
    Identity::new(Scope::new("orders").unwrap(), EventId::new(id).unwrap())
}

/// A claim on an id.
pub fn claim(id: &str, mode: Mode) -> Claim {
    Claim::new(identity(id), mode)
}

/// The claim of another delivery of the same event: everything but the nonce.
pub fn another(claim: &Claim) -> Claim {
    Claim { nonce: Nonce::random(), ..claim.clone() }
}

/// A UUIDv7 of a moment; `n` tells those of one moment apart.
pub fn v7_at(time: Time, n: u8) -> EventId {
    let millis = u64::try_from(time.as_micros() / 1000).unwrap();
    EventId::from(uuid::Builder::from_unix_timestamp_millis(millis, &[n; 10]).into_uuid())
}

/// Any other UUID.
pub fn v4() -> EventId {
    EventId::from(Uuid::new_v4())
}

/// A fingerprint made of one byte.
pub fn fingerprint(n: u8) -> Fingerprint {
    Fingerprint([n; 16])
}

/// A claim with a place in an order.
pub fn ordered(id: &str, mode: Mode, seq: u64, policy: OrderPolicy, on_dead: OnDead) -> Claim {
    let aggregate = Aggregate::new("order-17").unwrap();
    Claim { order: Some(Order { aggregate, seq, policy, on_dead }), ..claim(id, mode) }
}

/// A leasing claim on event `e<seq>` in `latest` order that parks behind the dead.
pub fn latest(seq: u64) -> Claim {
    ordered(&format!("e{seq}"), lease(), seq, OrderPolicy::Latest, OnDead::Park)
}

/// A leasing claim on event `e<seq>` in `strict` order from 1, with a gap timeout of a minute.
pub fn strict(seq: u64) -> Claim {
    strict_from(Baseline::From(1), seq)
}

/// A leasing claim on event `e<seq>` in `strict` order from a baseline.
pub fn strict_from(baseline: Baseline, seq: u64) -> Claim {
    let policy = OrderPolicy::Strict { baseline, gap_timeout: Duration::from_mins(1) };
    ordered(&format!("e{seq}"), lease(), seq, policy, OnDead::Park)
}

/// The harness opened with default settings.
pub async fn open<H: Harness>(harness: &H) -> H::Ledger {
    harness.open(Settings::default()).await
}

/// Claims one event.
pub async fn try_one(ledger: &impl Ledger, claim: &Claim) -> Result<Outcome> {
    let mut outcomes = ledger.claim(std::slice::from_ref(claim)).await.expect("the ledger is there");
    assert_eq!(outcomes.len(), 1, "one claim, one outcome");
    outcomes.remove(0)
}

/// Claims one valid event.
pub async fn one(ledger: &impl Ledger, claim: &Claim) -> Outcome {
    try_one(ledger, claim).await.expect("a valid claim")
}

/// Claims one event that must be granted.
pub async fn first(ledger: &impl Ledger, claim: &Claim) -> Grant {
    match one(ledger, claim).await {
        Outcome::First(grant) => grant,
        other => panic!("{} should be a first, and is {other:?}", claim.identity),
    }
}

/// Asserts the name of a claim's outcome ([`Outcome::name`]).
pub async fn expect(ledger: &impl Ledger, claim: &Claim, name: &str) {
    let _ = named(ledger, claim, name).await;
}

/// Asserts the name of a claim's outcome and hands it out.
pub async fn named(ledger: &impl Ledger, claim: &Claim, name: &str) -> Outcome {
    let outcome = one(ledger, claim).await;
    assert_eq!(outcome.name(), name, "{}: {outcome:?}", claim.identity);
    outcome
}

/// The settling of a claim.
pub fn settling(claim: &Claim, grant: &Grant, verdict: Verdict) -> Settle {
    Settle {
        identity: claim.identity.clone(),
        week: grant.week,
        token: grant.token,
        verdict,
        order: claim.order.clone(),
        advance_to: None,
    }
}

/// Settles one claim.
pub async fn settle(ledger: &impl Ledger, claim: &Claim, grant: &Grant, verdict: Verdict) -> Settled {
    settle_as(ledger, &settling(claim, grant, verdict)).await
}

/// Settles.
pub async fn settle_as(ledger: &impl Ledger, settle: &Settle) -> Settled {
    let mut answers = ledger.settle(std::slice::from_ref(settle)).await.expect("the ledger is there");
    assert_eq!(answers.len(), 1, "one settling, one answer");
    answers.remove(0).expect("a valid settling")
}

/// Settles one claim that must not be fenced.
pub async fn settled(ledger: &impl Ledger, claim: &Claim, grant: &Grant, verdict: Verdict) -> Time {
    match settle(ledger, claim, grant, verdict).await {
        Settled::Ok { at } => at,
        fenced @ Settled::Fenced { .. } => panic!("{} should settle, and is {fenced:?}", claim.identity),
    }
}

/// Claims, runs and settles an event as done.
pub async fn run(ledger: &impl Ledger, claim: &Claim) -> Grant {
    let grant = first(ledger, claim).await;
    settled(ledger, claim, &grant, done()).await;
    grant
}

/// Extends one lease.
pub async fn extend(ledger: &impl Ledger, claim: &Claim, grant: &Grant, lease: Duration) -> Settled {
    let extend = Extend { identity: claim.identity.clone(), week: grant.week, token: grant.token, lease };
    let mut answers = ledger.extend(&[extend]).await.expect("the ledger is there");
    assert_eq!(answers.len(), 1, "one extension, one answer");
    answers.remove(0).expect("an answer")
}

/// It took effect.
pub fn done() -> Verdict {
    Verdict::Done { metadata: None }
}

/// Again after a pause, counted.
pub fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, counted: true, reason: Some("boom".into()), body: None }
}

/// It failed for good.
pub fn dead() -> Verdict {
    Verdict::Dead { reason: "poison".into(), body: None }
}

/// Metadata.
pub fn metadata(json: &str) -> Metadata {
    Metadata::new(json).unwrap()
}

/// The entry of a claim.
pub async fn entry(ledger: &impl Ledger, claim: &Claim) -> Option<Entry> {
    ledger.get(&claim.identity, claim.time).await.expect("the ledger is there")
}

/// The entry of a claim, which must be there.
pub async fn there(ledger: &impl Ledger, claim: &Claim) -> Entry {
    entry(ledger, claim).await.unwrap_or_else(|| panic!("{} has no entry", claim.identity))
}

/// Whether a settling was fenced off.
pub fn is_fenced(settled: Settled) -> bool {
    matches!(settled, Settled::Fenced { .. })
}

/// Intervenes.
pub async fn intervene(ledger: &impl Ledger, claim: &Claim, what: Intervention) -> Result<Intervened> {
    ledger.intervene(&intervening(claim, what)).await
}

/// An intervention on a claim's entry.
pub fn intervening(claim: &Claim, what: Intervention) -> Intervene {
    Intervene {
        identity: claim.identity.clone(),
        time: claim.time,
        what,
        by: "ada".into(),
        reason: "a test".into(),
        out_of_order: false,
        token: None,
        dry_run: false,
    }
}

/// Sweeps with a retention.
pub async fn sweep(ledger: &impl Ledger, retention: Duration) -> Swept {
    ledger.sweep(SweepSettings { retention, batch_max: 1000, dry_run: false }).await.expect("a sweep")
}

/// Lets days go by in which the ledger is swept once a day, with a retention of a week, but not on the last one. None of
/// those sweeps forgets anything.
pub async fn days_go_by<H: Harness>(harness: &H, ledger: &H::Ledger, days: u32) {
    for day in 1..=days {
        harness.advance(DAY).await;
        if day < days {
            assert_eq!(sweep(ledger, DAY * 7).await.entries(), 0, "on day {day}");
        }
    }
}

/// Asserts that a result is [`Error::Invalid`] and says something.
pub fn assert_invalid<T: std::fmt::Debug>(result: Result<T>, says: &str) {
    match result {
        Err(error @ Error::Invalid { .. }) => {
            let text = error.to_string();
            assert!(text.contains(says), "{text:?} should say {says:?}");
        }
        other => panic!("should be invalid, and is {other:?}"),
    }
}

/// Asserts that two moments are the same, as far as a real clock allows.
pub fn assert_near<H: Harness>(harness: &H, left: Time, right: Time) {
    let apart = left.since(right).max(right.since(left));
    let allowed = if harness.exact_time() { Duration::ZERO } else { Duration::from_secs(30) };
    assert!(apart <= allowed, "{left} and {right} are {apart:?} apart");
}
