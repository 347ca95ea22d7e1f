//! At most once: claimed, finished, lost, and never run again by itself.

use std::time::Duration;

use super::Harness;
use super::kit::{
    LEASE, PAST_LEASE, another, claim, dead, done, expect, first, intervene, is_fenced, latest, lease, named,
    one, open, run, settle, settled, there,
};
use crate::ledger::{Claim, Filter, Intervention, Mode, Operations, Outcome, State, Verdict};

const PLAIN: Mode = Mode::Once { track: None };
const TRACKED: Mode = Mode::Once { track: Some(LEASE) };

fn finished() -> Verdict {
    Verdict::Finished { metadata: None }
}

fn lost() -> Verdict {
    Verdict::Lost { reason: "crashed".into() }
}

/// A claim is the only one there will ever be, whether its end is reported or not, however late.
pub async fn once_is_never_twice(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (id, mode) in [("plain", PLAIN), ("tracked", TRACKED)] {
        let mine = claim(id, mode);
        first(&ledger, &mine).await;
        harness.advance(LEASE * 100).await;
        for mode in [PLAIN, TRACKED, lease(), Mode::Done, super::kit::failed()] {
            match named(&ledger, &claim(id, mode), "duplicate").await {
                Outcome::Duplicate(prior) => assert_eq!(prior.state, State::Claimed),
                outcome => panic!("{outcome:?}"),
            }
        }
    }
}

/// The end is reported under the token: finished, or lost with a reason; a stale or wrong report changes nothing.
pub async fn once_finishes_or_is_lost(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (good, bad) = (claim("good", TRACKED), claim("bad", TRACKED));
    let grants = [first(&ledger, &good).await, first(&ledger, &bad).await];
    assert!(there(&ledger, &good).await.tracked);
    assert!(
        is_fenced(settle(&ledger, &good, &grants[1], finished()).await) || grants[0].token == grants[1].token
    );
    settled(&ledger, &good, &grants[0], finished()).await;
    settled(&ledger, &bad, &grants[1], lost()).await;
    assert_eq!(there(&ledger, &good).await.state, State::Finished);
    let entry = there(&ledger, &bad).await;
    assert_eq!((entry.state, entry.reason.as_deref()), (State::Lost, Some("crashed")));
    assert!(is_fenced(settle(&ledger, &good, &grants[0], lost()).await));
    assert!(is_fenced(settle(&ledger, &bad, &grants[1], finished()).await));
    for mine in [&good, &bad] {
        expect(&ledger, &another(mine), "duplicate").await;
    }
    let leased = claim("leased", lease());
    let grant = first(&ledger, &leased).await;
    assert!(is_fenced(settle(&ledger, &leased, &grant, finished()).await), "a lease does not finish");
    let once = claim("once", PLAIN);
    let grant = first(&ledger, &once).await;
    for verdict in [done(), dead()] {
        assert!(is_fenced(settle(&ledger, &once, &grant, verdict).await), "a claim is neither done nor dead");
    }
}

/// The end of an event does not end the lease of a later one of its aggregate.
pub async fn t405_an_end_that_is_reported_late_ends_no_other_lease(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (verdict, seq) in [(finished(), 1), (lost(), 11)] {
        let once = Claim { mode: TRACKED, ..latest(seq) };
        let grant = first(&ledger, &once).await;
        let next = latest(seq + 1);
        let leased = first(&ledger, &next).await;
        settled(&ledger, &once, &grant, verdict).await;
        expect(&ledger, &latest(seq + 2), "wait").await;
        assert!(!is_fenced(super::kit::extend(&ledger, &next, &leased, LEASE).await));
        settled(&ledger, &next, &leased, done()).await;
        run(&ledger, &latest(seq + 2)).await;
    }
}

/// One whose end is overdue is listed and counted as lost before any sweep, and can still report late.
pub async fn once_overdue_is_listed_as_lost(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (tracked, plain) = (claim("tracked", TRACKED), claim("plain", PLAIN));
    let grant = first(&ledger, &tracked).await;
    first(&ledger, &plain).await;
    let filter = Filter { states: vec![State::Lost], ..Filter::default() };
    assert!(ledger.list(&filter, None, 10).await.unwrap().entries.is_empty());
    harness.advance(PAST_LEASE).await;
    let page = ledger.list(&filter, None, 10).await.unwrap();
    assert_eq!(page.entries.len(), 1);
    assert_eq!(page.entries[0].identity, tracked.identity);
    let counts = ledger.stat().await.unwrap().counts;
    assert!(counts.iter().any(|(_, _, state, count)| (*state, *count) == (State::Lost, 1)), "{counts:?}");
    assert!(counts.iter().any(|(_, _, state, count)| (*state, *count) == (State::Claimed, 1)), "{counts:?}");
    settled(&ledger, &tracked, &grant, finished()).await;
    assert!(ledger.list(&filter, None, 10).await.unwrap().entries.is_empty());
}

/// A person may run a lost one again.
pub async fn once_lost_can_be_retried_by_hand(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (reported, overdue) = (claim("reported", TRACKED), claim("overdue", TRACKED));
    let grant = first(&ledger, &reported).await;
    settled(&ledger, &reported, &grant, lost()).await;
    let stale = first(&ledger, &overdue).await;
    assert!(intervene(&ledger, &overdue, Intervention::Retry).await.is_err(), "it may still be running");
    harness.advance(PAST_LEASE).await;
    for mine in [&reported, &overdue] {
        intervene(&ledger, mine, Intervention::Retry).await.unwrap();
        first(&ledger, &another(mine)).await;
        expect(&ledger, &another(mine), "duplicate").await;
    }
    assert!(is_fenced(settle(&ledger, &overdue, &stale, finished()).await));
}

/// A claim that never reached its caller is given back; in an order that has moved on it is listed instead.
pub async fn once_given_back_is_claimable_or_listed(harness: &impl Harness) {
    let ledger = open(harness).await;
    let plain = claim("plain", PLAIN);
    let grant = first(&ledger, &plain).await;
    settled(&ledger, &plain, &grant, Verdict::release()).await;
    first(&ledger, &another(&plain)).await;
    let five = Claim { mode: PLAIN, ..latest(5) };
    let grant = first(&ledger, &five).await;
    for _ in 0..2 {
        settled(&ledger, &five, &grant, Verdict::release()).await; // and again: as settled
    }
    assert_eq!(there(&ledger, &five).await.state, State::Lost);
    assert_eq!(one(&ledger, &latest(4)).await, Outcome::Stale { last: 5 });
}

/// Busy is not done, and what never finished is listed.
pub async fn t12_busy_is_not_done_and_lost_claims_are_listed(harness: &impl Harness) {
    let ledger = open(harness).await;
    let leased = claim("leased", lease());
    first(&ledger, &leased).await;
    assert!(!named(&ledger, &another(&leased), "busy").await.may_acknowledge());
    harness.advance(PAST_LEASE + Duration::from_secs(1)).await;
    run(&ledger, &another(&leased)).await;
    assert!(named(&ledger, &another(&leased), "duplicate").await.may_acknowledge());
    once_overdue_is_listed_as_lost(harness).await;
}
