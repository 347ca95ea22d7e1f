//! Clauses 7 and 8: the same claim again, and batches in which each event stands for itself.

use std::time::Duration;

use super::Harness;
use super::kit::{
    LEASE, PAST_LEASE, another, assert_invalid, assert_near, claim, done, entry, expect, failed, fingerprint,
    first, is_fenced, latest, lease, metadata, one, open, retry, run, settle, settled, settling, there, v4,
};
use crate::ledger::{Claim, Claims, Identity, Mode, Operations, Outcome, Settings, State, Verdict};

/// A claim whose acknowledgement was lost is issued again, as often as it takes, and finds itself granted: never busy.
pub async fn c7_same_claim_again_is_first_again(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (id, mode) in [
        ("lease", lease()),
        ("done", Mode::Done),
        ("once", Mode::Once { track: None }),
        ("tracked", Mode::Once { track: Some(LEASE) }),
    ] {
        let mine = claim(id, mode);
        let grant = first(&ledger, &mine).await;
        for _ in 0..3 {
            let again = first(&open(harness).await, &mine).await;
            assert_eq!(
                (again.token, again.attempt, again.week),
                (grant.token, grant.attempt, grant.week),
                "{id}"
            );
            assert_near(harness, again.until, grant.until);
        }
        assert!(!one(&ledger, &another(&mine)).await.is_claimed(), "{id}: another nonce is another claimer");
        assert_eq!(there(&ledger, &mine).await.attempts, 1, "{id}: a repeat is not a run");
    }
}

/// The lease of a repeated claim begins anew: the claimer counts from its last sending.
pub async fn c7_a_repeated_lease_begins_anew(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    harness.advance(LEASE / 2).await;
    let again = first(&ledger, &mine).await;
    assert_eq!(again.token, grant.token);
    harness.advance(LEASE / 2 + Duration::from_secs(1)).await;
    expect(&ledger, &another(&mine), "busy").await;
    settled(&ledger, &mine, &grant, done()).await;
}

/// A claim repeated after somebody else took over is not granted.
pub async fn c7_a_repeat_after_a_takeover_is_busy(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    first(&ledger, &mine).await;
    harness.advance(PAST_LEASE).await;
    let other = another(&mine);
    let grant = first(&ledger, &other).await;
    expect(&ledger, &mine, "busy").await;
    settled(&ledger, &other, &grant, done()).await;
    expect(&ledger, &mine, "duplicate").await;
}

/// In an order, too: when another event of the aggregate has taken over, a late repeat must not run beside it.
pub async fn c7_a_repeat_after_its_aggregate_was_taken_over_waits(harness: &impl Harness) {
    let ledger = open(harness).await;
    let six = latest(6);
    let stale = first(&ledger, &six).await;
    harness.advance(PAST_LEASE).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    assert_eq!(one(&ledger, &six).await, Outcome::Wait { on: Some(5) });
    assert!(is_fenced(settle(&ledger, &six, &stale, done()).await));
    settled(&ledger, &five, &grant, done()).await;
    run(&ledger, &another(&six)).await;
}

/// A repeat in an order is granted with its order, and its settling moves it.
pub async fn c7_a_repeat_in_an_order_is_first_again(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = latest(5);
    let grant = first(&ledger, &mine).await;
    harness.advance(LEASE / 2).await;
    assert_eq!(first(&ledger, &mine).await.token, grant.token);
    harness.advance(LEASE / 2 + Duration::from_secs(1)).await;
    assert_eq!(
        one(&ledger, &latest(4)).await,
        Outcome::Wait { on: Some(5) },
        "the order's lease began anew too"
    );
    settled(&ledger, &mine, &grant, done()).await;
    assert_eq!(one(&ledger, &latest(4)).await, Outcome::Stale { last: 5 });
}

/// A failure reported twice under its nonce is counted once.
pub async fn c7_a_failure_is_counted_once_under_its_nonce(harness: &impl Harness) {
    let ledger = open(harness).await;
    let failure = claim("e", failed());
    let outcome = one(&ledger, &failure).await;
    for _ in 0..5 {
        assert_eq!(one(&ledger, &failure).await, outcome);
    }
    assert_eq!(there(&ledger, &failure).await.attempts, 1);
    expect(&ledger, &another(&failure), "retry_later").await;
    assert_eq!(there(&ledger, &failure).await.attempts, 2);
    let last = another(&failure);
    let outcome = one(&ledger, &last).await;
    assert_eq!(outcome.name(), "dead");
    assert_eq!(one(&ledger, &last).await, outcome);
}

/// Whoever claimed in a transaction of their own can ask whether it was committed.
pub async fn c7_was_committed(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (id, commit) in [("committed", true), ("rolled back", false)] {
        let mine = claim(id, Mode::Done);
        assert!(!harness.was_committed(&ledger, &mine).await.unwrap(), "{id}: not yet");
        let outcomes = harness.in_transaction(&ledger, std::slice::from_ref(&mine), commit).await.unwrap();
        assert!(outcomes[0].as_ref().unwrap().is_claimed());
        assert_eq!(harness.was_committed(&ledger, &mine).await.unwrap(), commit, "{id}");
        assert!(!harness.was_committed(&ledger, &another(&mine)).await.unwrap(), "{id}: by another's claim");
        // Or issue the same claim again: first in either case.
        let again = harness.in_transaction(&ledger, std::slice::from_ref(&mine), true).await.unwrap();
        assert!(again[0].as_ref().unwrap().is_claimed(), "{id}");
        assert!(harness.was_committed(&ledger, &mine).await.unwrap(), "{id}");
    }
}

/// Too much metadata, an impossible seq, a missing time: such a row is refused, and its neighbours are granted.
pub async fn c8_bad_row_harms_only_itself(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut big = claim("big", lease());
    big.metadata = Some(metadata(&format!("{{\"a\":\"{}\"}}", "x".repeat(20_000))));
    let mut seq = latest(1);
    seq.identity = super::kit::identity("seq");
    seq.order.as_mut().unwrap().seq = u64::MAX;
    let claims = [claim("a", lease()), big, claim("b", lease()), seq, claim("c", lease())];
    let outcomes = ledger.claim(&claims).await.unwrap();
    assert_eq!(outcomes.len(), 5);
    for (claim, outcome) in claims.iter().zip(outcomes) {
        match claim.identity.id.as_str().as_ref() {
            "big" => assert_invalid(outcome, "16384"),
            "seq" => assert_invalid(outcome, "larger"),
            id => assert!(outcome.unwrap().is_claimed(), "{id}"),
        }
    }
    assert_eq!(entry(&ledger, &claims[1]).await, None);
    assert_eq!(entry(&ledger, &claims[3]).await, None);
}

/// The same for settlings.
pub async fn c8_bad_settling_harms_only_itself(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claims = [claim("a", lease()), claim("b", lease()), claim("c", lease())];
    let mut settles = Vec::new();
    for claim in &claims {
        settles.push(settling(claim, &first(&ledger, claim).await, done()));
    }
    let big = metadata(&format!("{{\"a\":\"{}\"}}", "x".repeat(20_000)));
    settles[1].verdict = Verdict::Done { metadata: Some(big) };
    settles[2].token.0 += 1000;
    let mut answers = ledger.settle(&settles).await.unwrap();
    assert!(is_fenced(answers.remove(2).unwrap()));
    assert_invalid(answers.remove(1), "16384");
    assert!(!is_fenced(answers.remove(0).unwrap()));
    assert_eq!(there(&ledger, &claims[1]).await.state, State::Leased);
}

/// One id twice in a batch: the first one wins, the other gets the answer it would get if it came later.
pub async fn c8_same_id_twice_in_a_batch(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claims = [
        claim("lease", lease()),
        claim("lease", lease()),
        claim("done", Mode::Done),
        claim("done", Mode::Done),
        claim("lease", Mode::Done),
        claim("done", lease()),
    ];
    let names: Vec<_> =
        ledger.claim(&claims).await.unwrap().into_iter().map(|outcome| outcome.unwrap().name()).collect();
    assert_eq!(names, ["claimed", "busy", "claimed", "duplicate", "busy", "duplicate"]);
    let mine = claim("same", lease());
    let mut outcomes = ledger.claim(&[mine.clone(), mine]).await.unwrap().into_iter();
    match (outcomes.next().unwrap().unwrap(), outcomes.next().unwrap().unwrap()) {
        (Outcome::First(one), Outcome::First(two)) => {
            assert_eq!(one.token, two.token, "the same claim twice");
        }
        other => panic!("{other:?}"),
    }
}

/// A batch mixes every outcome, in the order given.
pub async fn c8_a_batch_has_an_outcome_each(harness: &impl Harness) {
    let ledger = open(harness).await;
    let retrying = claim("retrying", lease());
    let grant = first(&ledger, &retrying).await;
    settled(&ledger, &retrying, &grant, retry(LEASE)).await;
    first(&ledger, &claim("busy", lease())).await;
    run(&ledger, &claim("duplicate", lease())).await;
    let mut reused = claim("reused", lease());
    reused.fingerprint = Some(fingerprint(1));
    run(&ledger, &reused).await;
    reused.fingerprint = Some(fingerprint(2));
    let aggregate = [latest(2), latest(1), latest(3)];
    let mut claims: Vec<Claim> =
        ["busy", "duplicate", "retrying", "new"].map(|id| claim(id, lease())).into_iter().collect();
    claims.push(another(&reused));
    claims.extend(aggregate);
    let names: Vec<_> =
        ledger.claim(&claims).await.unwrap().into_iter().map(|outcome| outcome.unwrap().name()).collect();
    assert_eq!(names, ["busy", "duplicate", "retry_later", "claimed", "mismatch", "claimed", "wait", "wait"]);
}

/// Events of one aggregate that are done by their claim follow each other within one batch.
pub async fn c8_a_batch_of_one_aggregate_follows_its_order(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claims: Vec<_> =
        [1, 2, 4, 3, 5].map(|seq| Claim { mode: Mode::Done, ..super::kit::strict(seq) }).into();
    let names: Vec<_> =
        ledger.claim(&claims).await.unwrap().into_iter().map(|outcome| outcome.unwrap().name()).collect();
    assert_eq!(names, ["claimed", "claimed", "wait", "claimed", "wait"]);
}

/// No claims mean no work, and a thousand are one batch.
pub async fn c8_empty_and_large_batches(harness: &impl Harness) {
    let ledger = open(harness).await;
    assert!(ledger.claim(&[]).await.unwrap().is_empty());
    assert!(ledger.settle(&[]).await.unwrap().is_empty());
    assert!(ledger.extend(&[]).await.unwrap().is_empty());
    let scope = super::kit::identity("x").scope;
    let claims: Vec<_> = (0..1000).map(|_| Claim::new(Identity::new(scope.clone(), v4()), lease())).collect();
    let outcomes = ledger.claim(&claims).await.unwrap();
    let mut settles = Vec::new();
    for (claim, outcome) in claims.iter().zip(outcomes) {
        match outcome.unwrap() {
            Outcome::First(grant) => settles.push(settling(claim, &grant, done())),
            other => panic!("{other:?}"),
        }
    }
    assert!(ledger.settle(&settles).await.unwrap().into_iter().all(|answer| !is_fenced(answer.unwrap())));
    let counts = ledger.stat().await.unwrap().counts;
    assert_eq!(counts.len(), 1);
    assert_eq!((counts[0].2, counts[0].3), (State::Done, 1000));
}

/// Acting on what was read before somebody else acted changes nothing.
pub async fn t43_recovery_from_a_stale_read_changes_nothing(harness: &impl Harness) {
    let ledger = harness.open(Settings::default()).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    harness.advance(PAST_LEASE).await;
    let read = there(&ledger, &mine).await; // a recoverer sees a lapsed lease …
    let next = another(&mine);
    let current = first(&ledger, &next).await; // … and another is faster
    let mut stale = settling(&mine, &grant, retry(Duration::ZERO));
    stale.token = read.token;
    assert!(is_fenced(super::kit::settle_as(&ledger, &stale).await));
    settled(&ledger, &next, &current, done()).await;
    assert!(is_fenced(super::kit::settle_as(&ledger, &stale).await));
    assert_eq!(there(&ledger, &mine).await.state, State::Done);
}
