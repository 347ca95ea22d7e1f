//! Order within an aggregate: latest, strict, parked behind the dead, redriven in order.

use std::time::Duration;

use super::Harness;
use super::kit::{
    LEASE, PAST_LEASE, another, claim, dead, done, entry, expect, failed, fingerprint, first, intervene,
    is_fenced, latest, lease, one, open, ordered, retry, run, settle, settled, strict, strict_from, there,
};
use crate::error::Error;
use crate::id::Aggregate;
use crate::ledger::{
    Baseline, Claim, Claims, Intervention, MismatchRule, Mode, OnDead, Operations, Order, OrderPolicy,
    Outcome, Settings, State,
};

const GAP: Duration = Duration::from_mins(1);

/// Never backwards: at or below the last is stale, gaps are fine, other aggregates are apart.
pub async fn order_latest_never_goes_back(harness: &impl Harness) {
    let ledger = open(harness).await;
    run(&ledger, &latest(3)).await;
    run(&ledger, &latest(7)).await;
    for seq in [0, 1, 6] {
        let outcome = one(&ledger, &latest(seq)).await;
        assert_eq!(outcome, Outcome::Stale { last: 7 });
        assert!(outcome.may_acknowledge());
    }
    let mut twin = latest(7);
    twin.identity = super::kit::identity("another id under the same number");
    assert_eq!(one(&ledger, &twin).await, Outcome::Stale { last: 7 });
    for other in ["Order-17", "order-17 ", "order-1"] {
        let mut mine = latest(1);
        mine.identity = super::kit::identity(other);
        mine.order.as_mut().unwrap().aggregate = Aggregate::new(other).unwrap();
        run(&ledger, &mine).await;
    }
    assert_eq!(one(&ledger, &another(&latest(1))).await, Outcome::Stale { last: 7 }, "stale stays stale");
}

/// A batch of ordered events comes to what the same events come to one after the other, whatever shortcut it takes: all next
/// in line, one behind, one that was done, a gap.
pub async fn order_a_batch_is_as_one_by_one(harness: &impl Harness) {
    let ledger = open(harness).await;
    let of = |policy: fn(u64) -> Claim, aggregate: &str, seq: u64, id: &str| {
        let mut mine = policy(seq);
        mine.identity = super::kit::identity(&format!("{aggregate} {id}"));
        mine.mode = Mode::Done;
        mine.order.as_mut().unwrap().aggregate = Aggregate::new(aggregate).unwrap();
        another(&mine)
    };
    let names = async |batch: &[Claim]| -> Vec<&'static str> {
        ledger.claim(batch).await.unwrap().into_iter().map(|outcome| outcome.unwrap().name()).collect()
    };
    for (policy, late) in [(latest as fn(u64) -> Claim, "claimed"), (strict, "wait")] {
        let (a, b) = (format!("a {late}"), format!("b {late}"));
        let next =
            [of(policy, &a, 1, "1"), of(policy, &a, 2, "2"), of(policy, &b, 1, "1"), of(policy, &a, 3, "3")];
        assert_eq!(names(&next).await, ["claimed"; 4]);
        assert_eq!(
            names(&next).await,
            ["claimed"; 4],
            "the same claims again: nobody knows they were answered"
        );
        let behind = [of(policy, &a, 4, "4"), of(policy, &a, 3, "another 3"), of(policy, &b, 2, "2")];
        assert_eq!(names(&behind).await, ["claimed", "stale", "claimed"]);
        let known = [of(policy, &a, 5, "5"), of(policy, &a, 1, "1"), of(policy, &b, 3, "3")];
        assert_eq!(names(&known).await, ["claimed", "duplicate", "claimed"]);
        let back = [of(policy, &b, 5, "5"), of(policy, &b, 4, "4")];
        let answers = names(&back).await;
        assert_eq!(answers[0], late);
        assert_eq!(answers[1], if late == "claimed" { "stale" } else { "claimed" });
        let again = [of(policy, &a, 6, "6"), of(policy, &a, 7, "7"), of(policy, &a, 8, "8")];
        assert_eq!(names(&again).await, ["claimed"; 3]);
    }
}

/// Of one aggregate one event runs at a time.
pub async fn order_one_event_of_an_aggregate_runs_at_a_time(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    for seq in [4, 6] {
        let outcome = one(&ledger, &latest(seq)).await;
        assert_eq!(outcome, Outcome::Wait { on: Some(5) });
        assert!(!outcome.may_acknowledge());
    }
    let mut twin = latest(5);
    twin.identity = super::kit::identity("twin");
    assert_eq!(one(&ledger, &twin).await, Outcome::Wait { on: Some(5) });
    expect(&ledger, &another(&five), "busy").await;
    settled(&ledger, &five, &grant, done()).await;
    run(&ledger, &latest(6)).await;
}

/// 10 waits for its retry: 11 waits for 10, and 10's retry is not stale.
pub async fn t23_a_higher_seq_waits_for_a_lower_retry(harness: &impl Harness) {
    let ledger = open(harness).await;
    let ten = latest(10);
    let grant = first(&ledger, &ten).await;
    settled(&ledger, &ten, &grant, retry(LEASE)).await;
    assert_eq!(one(&ledger, &latest(11)).await, Outcome::Wait { on: Some(10) });
    harness.advance(LEASE).await;
    assert_eq!(one(&ledger, &latest(11)).await, Outcome::Wait { on: Some(10) });
    run(&ledger, &another(&ten)).await;
    run(&ledger, &latest(11)).await;
    // The same where the failure was counted for a same-transaction run.
    expect(&ledger, &Claim { mode: failed(), ..latest(12) }, "retry_later").await;
    assert_eq!(one(&ledger, &latest(13)).await, Outcome::Wait { on: Some(12) });
    // And for one whose process died.
    harness.advance(LEASE).await;
    first(&ledger, &latest(12)).await;
    harness.advance(PAST_LEASE).await;
    assert_eq!(one(&ledger, &latest(13)).await, Outcome::Wait { on: Some(12) });
}

/// 5 does not start beside a running 6; when 6's lease has lapsed it does, and 6 can no longer settle.
pub async fn t23_a_lower_seq_waits_for_a_higher_lease(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (five, six) = (latest(5), latest(6));
    let stale = first(&ledger, &six).await;
    assert_eq!(one(&ledger, &five).await, Outcome::Wait { on: Some(6) });
    harness.advance(PAST_LEASE).await;
    let grant = first(&ledger, &five).await;
    assert!(is_fenced(settle(&ledger, &six, &stale, done()).await), "its aggregate was taken over");
    assert!(is_fenced(super::kit::extend(&ledger, &six, &stale, LEASE).await));
    assert_eq!(one(&ledger, &another(&six)).await, Outcome::Wait { on: Some(5) });
    settled(&ledger, &five, &grant, done()).await;
    assert_eq!(one(&ledger, &latest(7)).await, Outcome::Wait { on: Some(6) }, "6 is owed its run");
    run(&ledger, &another(&six)).await;
    run(&ledger, &latest(7)).await;
}

/// Strict: n+1 follows n; what is below the baseline is stale, what is above waits for the missing one.
pub async fn order_strict_admits_only_the_next(harness: &impl Harness) {
    let ledger = open(harness).await;
    assert_eq!(one(&ledger, &strict(0)).await, Outcome::Stale { last: 0 });
    assert_eq!(one(&ledger, &strict(2)).await, Outcome::Wait { on: Some(1) });
    run(&ledger, &strict(1)).await;
    assert_eq!(one(&ledger, &strict(3)).await, Outcome::Wait { on: Some(2) });
    run(&ledger, &strict(2)).await;
    run(&ledger, &strict(3)).await;
    expect(&ledger, &strict(1), "duplicate").await;
}

/// With `first_seen` the first one seen is the baseline, also if it is seq 0, fails, dies or is only leased.
pub async fn order_strict_from_first_seen(harness: &impl Harness) {
    let ledger = open(harness).await;
    let of = |aggregate: &str, seq: u64, mode: Mode| {
        let mut mine = strict_from(Baseline::FirstSeen, seq);
        mine.identity = super::kit::identity(&format!("{aggregate}-{seq}"));
        mine.mode = mode;
        mine.order.as_mut().unwrap().aggregate = Aggregate::new(aggregate).unwrap();
        mine
    };
    for first_ in [0, 7] {
        let name = format!("leased {first_}");
        let mine = of(&name, first_, lease());
        let grant = first(&ledger, &mine).await;
        assert_eq!(one(&ledger, &of(&name, first_ + 1, lease())).await, Outcome::Wait { on: Some(first_) });
        settled(&ledger, &mine, &grant, retry(Duration::ZERO)).await;
        assert_eq!(one(&ledger, &of(&name, first_ + 1, lease())).await, Outcome::Wait { on: Some(first_) });
        run(&ledger, &another(&mine)).await;
        run(&ledger, &of(&name, first_ + 1, lease())).await;

        let name = format!("failed {first_}");
        expect(&ledger, &of(&name, first_, failed()), "retry_later").await;
        assert_eq!(one(&ledger, &of(&name, first_ + 1, lease())).await, Outcome::Wait { on: Some(first_) });
        harness.advance(LEASE).await;
        run(&ledger, &of(&name, first_, lease())).await;
        run(&ledger, &of(&name, first_ + 1, lease())).await;

        let name = format!("dead {first_}");
        let mine = of(&name, first_, lease());
        let grant = first(&ledger, &mine).await;
        settled(&ledger, &mine, &grant, dead()).await;
        let next = of(&name, first_ + 1, lease());
        assert_eq!(one(&ledger, &next).await, Outcome::Parked { behind: first_ });
        intervene(&ledger, &mine, Intervention::Redrive).await.unwrap();
        run(&ledger, &another(&mine)).await;
        run(&ledger, &another(&next)).await;
    }
}

/// A claim waits for a gap until the gap timeout; then the aggregate is parked, not skipped, and the missing one frees it.
pub async fn order_strict_gap_parks_after_its_timeout(harness: &impl Harness) {
    let ledger = open(harness).await;
    run(&ledger, &strict(1)).await;
    assert_eq!(one(&ledger, &strict(4)).await, Outcome::Wait { on: Some(2) });
    harness.advance(GAP / 2).await;
    assert_eq!(one(&ledger, &strict(3)).await, Outcome::Wait { on: Some(2) });
    harness.advance(GAP / 2 + Duration::from_secs(1)).await;
    for seq in [4, 3, 5] {
        assert_eq!(one(&ledger, &strict(seq)).await, Outcome::Parked { behind: 2 });
        assert_eq!(there(&ledger, &strict(seq)).await.state, State::Parked);
    }
    run(&ledger, &strict(2)).await;
    assert_eq!(one(&ledger, &strict(4)).await, Outcome::Wait { on: Some(3) });
    for seq in [3, 4, 5] {
        run(&ledger, &strict(seq)).await;
    }
    // A new gap has its own time.
    assert_eq!(one(&ledger, &strict(7)).await, Outcome::Wait { on: Some(6) });
}

/// A dead one parks its successors; a redrive lets them go on, in order, and whoever comes new queues behind them.
pub async fn order_parked_successors_are_drained_in_order(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    settled(&ledger, &five, &grant, dead()).await;
    for seq in [6, 7] {
        let outcome = one(&ledger, &latest(seq)).await;
        assert_eq!(outcome, Outcome::Parked { behind: 5 });
        assert!(!outcome.may_acknowledge());
        assert_eq!(there(&ledger, &latest(seq)).await.state, State::Parked);
    }
    intervene(&ledger, &five, Intervention::Redrive).await.unwrap();
    assert_eq!(one(&ledger, &latest(6)).await, Outcome::Parked { behind: 5 }, "until it is done");
    run(&ledger, &another(&five)).await;
    for early in [7, 8] {
        assert_eq!(one(&ledger, &latest(early)).await, Outcome::Wait { on: Some(6) }, "{early} is after 6");
    }
    run(&ledger, &latest(6)).await;
    assert_eq!(one(&ledger, &latest(8)).await, Outcome::Wait { on: Some(7) });
    run(&ledger, &latest(7)).await;
    run(&ledger, &latest(8)).await;
}

/// What is lower than the dead one is not behind it.
pub async fn order_below_the_dead_one_goes_on(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    settled(&ledger, &five, &grant, dead()).await;
    run(&ledger, &latest(4)).await;
    assert_eq!(one(&ledger, &latest(6)).await, Outcome::Parked { behind: 5 });
}

/// Two dead events of one aggregate: the successors wait for both.
pub async fn order_two_dead_are_both_waited_for(harness: &impl Harness) {
    let ledger = open(harness).await;
    for seq in [7, 5] {
        let mine = latest(seq);
        let grant = first(&ledger, &mine).await;
        settled(&ledger, &mine, &grant, dead()).await;
    }
    assert_eq!(one(&ledger, &latest(8)).await, Outcome::Parked { behind: 5 });
    intervene(&ledger, &latest(5), Intervention::Redrive).await.unwrap();
    run(&ledger, &latest(5)).await;
    assert!(!one(&ledger, &latest(8)).await.is_claimed(), "7 is dead and not forgotten");
    intervene(&ledger, &latest(7), Intervention::Redrive).await.unwrap();
    run(&ledger, &latest(7)).await;
    run(&ledger, &latest(8)).await;
}

/// `skip`: the order goes on past the dead one, and a late redrive is refused with a sentence.
pub async fn order_skip_goes_on_and_refuses_a_late_redrive(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = ordered("e5", lease(), 5, OrderPolicy::Latest, OnDead::Skip);
    let grant = first(&ledger, &five).await;
    settled(&ledger, &five, &grant, dead()).await;
    run(&ledger, &latest(6)).await;
    match intervene(&ledger, &five, Intervention::Redrive).await {
        Err(Error::Conflict { expected, actual }) => {
            assert!(expected.contains('5') && actual.contains('6'), "{expected}; {actual}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(there(&ledger, &five).await.state, State::Dead, "refused, so nothing was changed");
    assert!(ledger.audit(10).await.unwrap().is_empty());
}

/// T24, by name.
pub async fn t24_strict_order_never_skips_and_redrive_drains_in_order(harness: &impl Harness) {
    let ledger = open(harness).await;
    assert_eq!(one(&ledger, &strict(2)).await, Outcome::Wait { on: Some(1) });
    let one_ = strict(1);
    let grant = first(&ledger, &one_).await;
    settled(&ledger, &one_, &grant, dead()).await;
    for seq in [3, 2] {
        assert_eq!(one(&ledger, &strict(seq)).await, Outcome::Parked { behind: 1 });
    }
    intervene(&ledger, &one_, Intervention::Redrive).await.unwrap();
    run(&ledger, &another(&one_)).await;
    assert_eq!(one(&ledger, &strict(3)).await, Outcome::Wait { on: Some(2) });
    run(&ledger, &strict(2)).await;
    run(&ledger, &strict(3)).await;
}

/// Forgetting the dead one frees its successors; forgetting a parked one lets those after it go on.
pub async fn order_forgetting_frees_the_successors(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    settled(&ledger, &five, &grant, dead()).await;
    for seq in [6, 7] {
        expect(&ledger, &latest(seq), "parked").await;
    }
    intervene(&ledger, &latest(6), Intervention::Forget).await.unwrap();
    intervene(&ledger, &five, Intervention::Forget).await.unwrap();
    run(&ledger, &latest(7)).await;
    assert_eq!(one(&ledger, &latest(5)).await, Outcome::Stale { last: 7 });
}

/// Forgetting an event does not turn its aggregate back: what it has gone past is stale, and it goes on as before.
pub async fn order_forgetting_leaves_the_order_where_it_is(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (one_, next) in [(strict(1), strict(2)), (latest(5), latest(6))] {
        run(&ledger, &one_).await;
        intervene(&ledger, &one_, Intervention::Forget).await.unwrap();
        assert_eq!(entry(&ledger, &one_).await, None);
        let last = one_.order.as_ref().map(|order| order.seq).unwrap();
        assert_eq!(one(&ledger, &another(&one_)).await, Outcome::Stale { last });
        run(&ledger, &next).await;
    }
    // One without an order is a first one.
    let plain = claim("plain", lease());
    run(&ledger, &plain).await;
    intervene(&ledger, &plain, Intervention::Forget).await.unwrap();
    run(&ledger, &another(&plain)).await;
}

/// A higher one that ran beside a lower one's failure does not block the aggregate for ever.
pub async fn order_what_became_stale_blocks_nobody(harness: &impl Harness) {
    let ledger = open(harness).await;
    let seven = latest(7);
    let grant = first(&ledger, &seven).await;
    expect(&ledger, &Claim { mode: failed(), ..latest(5) }, "retry_later").await;
    settled(&ledger, &seven, &grant, done()).await;
    harness.advance(LEASE).await;
    assert_eq!(one(&ledger, &latest(5)).await, Outcome::Stale { last: 7 });
    run(&ledger, &latest(8)).await;
}

/// Shuffled events: what is too late is stale and recorded; under `strict` nothing is skipped.
pub async fn acceptance_4_shuffled_events_leave_stale_ones_out(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut ran = Vec::new();
    for seq in [2, 1, 4, 3, 6, 5] {
        let mine = latest(seq);
        if let Outcome::First(grant) = one(&ledger, &mine).await {
            settled(&ledger, &mine, &grant, done()).await;
            ran.push(seq);
        } else {
            assert_eq!(there(&ledger, &mine).await.state, State::Stale);
        }
    }
    assert_eq!(ran, [2, 4, 6]);
    let mut queue = std::collections::VecDeque::from([2, 1, 4, 3, 6, 5]);
    let mut ran = Vec::new();
    while let Some(seq) = queue.pop_front() {
        let mut mine = strict(seq);
        mine.identity = super::kit::identity(&format!("strict {seq}"));
        mine.order.as_mut().unwrap().aggregate = Aggregate::new("strict").unwrap();
        match one(&ledger, &mine).await {
            Outcome::First(grant) => {
                settled(&ledger, &mine, &grant, done()).await;
                ran.push(seq);
            }
            Outcome::Wait { .. } => queue.push_back(seq),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ran, [1, 2, 3, 4, 5, 6]);
}

/// An id that is used again for something in another aggregate, where that is let pass, stays in the order of the original: its lease
/// that lapsed there is taken over there, and nothing waits for it for ever.
pub async fn t72_a_reused_id_stays_in_the_order_of_the_original(harness: &impl Harness) {
    let settings = Settings { mismatch: MismatchRule::Warn, ..Settings::default() };
    let ledger = harness.open(settings).await;
    for (n, order) in [Some(("elsewhere", 1)), Some(("order-17", 7)), None].into_iter().enumerate() {
        let seq = 10 * (n as u64 + 1);
        let original = Claim { fingerprint: Some(fingerprint(1)), ..latest(seq) };
        first(&ledger, &original).await;
        harness.advance(PAST_LEASE).await;
        let mut reused = Claim { fingerprint: Some(fingerprint(2)), ..another(&original) };
        reused.order = order.map(|(aggregate, seq)| Order {
            aggregate: Aggregate::new(aggregate).unwrap(),
            seq,
            policy: OrderPolicy::Latest,
            on_dead: OnDead::Park,
        });
        let grant = first(&ledger, &reused).await;
        expect(&ledger, &latest(seq + 1), "wait").await;
        settled(&ledger, &reused, &grant, done()).await;
        run(&ledger, &latest(seq + 1)).await;
    }
}

/// Concurrent claims on all events of an aggregate: one runs at a time, and none is lost.
pub async fn order_concurrent_claims_of_an_aggregate(harness: &impl Harness) {
    let ledger = open(harness).await;
    let tasks: Vec<_> = (1..=8)
        .map(|seq| {
            let ledger = ledger.clone();
            tokio::spawn(async move {
                loop {
                    let mine = strict(seq);
                    match ledger
                        .claim(std::slice::from_ref(&mine))
                        .await
                        .map(|mut outcomes| outcomes.remove(0))
                    {
                        Ok(Ok(Outcome::First(grant))) => {
                            settled(&ledger, &mine, &grant, done()).await;
                            return there(&ledger, &mine).await.token;
                        }
                        Ok(Ok(Outcome::Wait { .. } | Outcome::Busy { .. })) => tokio::task::yield_now().await,
                        Ok(Err(error)) | Err(error) => assert!(error.is_retryable(), "{error}"),
                        other => panic!("{other:?}"),
                    }
                }
            })
        })
        .collect();
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.push(task.await.unwrap());
    }
    assert!(tokens.is_sorted(), "they ran in order: {tokens:?}");
    run(&ledger, &claim("another", lease())).await;
}
