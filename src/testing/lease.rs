//! Clauses 1 to 3: one live lease, tokens, the ledger's time.

use std::time::Duration;

use super::Harness;
use super::kit::{
    LEASE, PAST_LEASE, another, assert_near, claim, dead, done, entry, expect, extend, first, is_fenced,
    lease, named, one, open, retry, run, settle, settled, there,
};
use crate::id::Owner;
use crate::ledger::{Claims, Mode, Outcome, Settings, Settled, State, Verdict};

/// While a lease lasts, everybody else gets `busy`; once it is settled, the outcome.
pub async fn c1_one_live_lease(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    assert_eq!(grant.attempt, 1);
    assert!(!grant.suspect);
    let other = open(harness).await;
    match one(&other, &another(&mine)).await {
        Outcome::Busy { until: Some(until), .. } => assert_eq!(until, grant.until),
        outcome => panic!("{outcome:?}"),
    }
    for mode in [lease(), Mode::Done, Mode::Once { track: None }] {
        expect(&other, &claim("e", mode), "busy").await;
    }
    settled(&ledger, &mine, &grant, done()).await;
    match named(&other, &another(&mine), "duplicate").await {
        Outcome::Duplicate(prior) => assert_eq!(prior.state, State::Done),
        outcome => panic!("{outcome:?}"),
    }
}

/// Of 64 tasks that claim one id at once, over several openings, one wins; the others are busy.
pub async fn c1_concurrent_claims_have_one_winner(harness: &impl Harness) {
    let openings = [open(harness).await, open(harness).await, open(harness).await, open(harness).await];
    for round in 0..4 {
        let mode = if round % 2 == 0 { lease() } else { Mode::Done };
        let tasks: Vec<_> = (0..64)
            .map(|n| {
                let ledger = openings[n % openings.len()].clone();
                let claim = claim(&format!("e{round}"), mode);
                tokio::spawn(async move { ledger.claim(&[claim]).await })
            })
            .collect();
        let mut winners = 0;
        for task in tasks {
            // Contention may be answered by an error that says nothing was changed; never by a second winner.
            match task.await.unwrap() {
                Ok(mut outcomes) => match outcomes.remove(0) {
                    Ok(Outcome::First(_)) => winners += 1,
                    Ok(Outcome::Busy { .. } | Outcome::Duplicate(_)) => {}
                    Err(error) if error.is_retryable() => {}
                    other => panic!("{other:?}"),
                },
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
        assert_eq!(winners, 1, "round {round}");
    }
}

/// Batches that overlap in any order block nobody for ever, and each id has one winner.
pub async fn c1_concurrent_batches_have_one_winner_each(harness: &impl Harness) {
    let ledger = open(harness).await;
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let ledger = ledger.clone();
            let mut claims: Vec<_> = (0..50).map(|n| claim(&format!("e{n}"), lease())).collect();
            claims.rotate_left(task * 7);
            if task % 2 == 0 {
                claims.reverse();
            }
            tokio::spawn(async move {
                loop {
                    match ledger.claim(&claims).await {
                        Ok(outcomes) => break outcomes.into_iter().filter(is_first).count(),
                        Err(error) => assert!(error.is_retryable(), "{error}"),
                    }
                }
            })
        })
        .collect();
    let mut winners = 0;
    for task in tasks {
        winners += task.await.unwrap();
    }
    assert_eq!(winners, 50);
}

fn is_first(outcome: &crate::Result<Outcome>) -> bool {
    matches!(outcome, Ok(Outcome::First(_)))
}

/// A token that is no longer the current one changes nothing, whatever it asks for, and the answer is `Fenced`.
pub async fn c2_stale_token_cannot_settle(harness: &impl Harness) {
    let ledger = open(harness).await;
    let zombie = claim("e", lease());
    let stale = first(&ledger, &zombie).await;
    harness.advance(PAST_LEASE).await;
    let holder = another(&zombie);
    let current = first(&ledger, &holder).await;
    assert!(current.token > stale.token);
    let before = there(&ledger, &holder).await;
    for verdict in [done(), retry(Duration::ZERO), dead(), Verdict::release()] {
        let answer = settle(&ledger, &zombie, &stale, verdict).await;
        assert_eq!(answer, Settled::Fenced { state: Some(State::Leased) });
    }
    assert_eq!(there(&ledger, &holder).await, before);
    settled(&ledger, &holder, &current, done()).await;
    assert_eq!(settle(&ledger, &zombie, &stale, dead()).await, Settled::Fenced { state: Some(State::Done) });
    assert_eq!(there(&ledger, &holder).await.state, State::Done);
    let nobody = claim("nobody", lease());
    assert_eq!(settle(&ledger, &nobody, &stale, done()).await, Settled::Fenced { state: None });
    assert_eq!(entry(&ledger, &nobody).await, None);
}

/// A stale token extends nothing; nor does one whose run is settled.
pub async fn c2_stale_token_cannot_extend(harness: &impl Harness) {
    let ledger = open(harness).await;
    let zombie = claim("e", lease());
    let stale = first(&ledger, &zombie).await;
    harness.advance(PAST_LEASE).await;
    let holder = another(&zombie);
    let current = first(&ledger, &holder).await;
    let until = there(&ledger, &holder).await.at;
    assert!(is_fenced(extend(&ledger, &zombie, &stale, LEASE * 100).await));
    assert_eq!(there(&ledger, &holder).await.at, until);
    settled(&ledger, &holder, &current, done()).await;
    assert!(is_fenced(extend(&ledger, &holder, &current, LEASE).await));
    assert_eq!(
        extend(&ledger, &claim("nobody", lease()), &current, LEASE).await,
        Settled::Fenced { state: None }
    );
}

/// The token that settled may say the same again: that is how a lost acknowledgement is resolved.
pub async fn c2_settling_again_is_fine(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (id, verdict) in [("done", done()), ("retry", retry(LEASE)), ("dead", dead())] {
        let claim = claim(id, lease());
        let grant = first(&ledger, &claim).await;
        let at = settled(&ledger, &claim, &grant, verdict.clone()).await;
        let stored = there(&ledger, &claim).await;
        assert_eq!(settled(&ledger, &claim, &grant, verdict).await, at, "{id}");
        assert_eq!(there(&ledger, &claim).await, stored, "{id}");
    }
    let once = claim("once", Mode::Once { track: None });
    let grant = first(&ledger, &once).await;
    for verdict in [Verdict::Finished { metadata: None }, Verdict::Finished { metadata: None }] {
        settled(&ledger, &once, &grant, verdict).await;
    }
    assert_eq!(there(&ledger, &once).await.state, State::Finished);
}

/// What is settled stays so: the same token cannot settle it in another way.
pub async fn c2_settling_otherwise_is_fenced(harness: &impl Harness) {
    let ledger = open(harness).await;
    let verdicts = [done(), retry(LEASE), dead()];
    for (n, settling) in verdicts.iter().enumerate() {
        let claim = claim(&format!("e{n}"), lease());
        let grant = first(&ledger, &claim).await;
        settled(&ledger, &claim, &grant, settling.clone()).await;
        let stored = there(&ledger, &claim).await;
        for (m, other) in verdicts.iter().enumerate().filter(|(m, _)| *m != n) {
            assert!(is_fenced(settle(&ledger, &claim, &grant, other.clone()).await), "{n} then {m}");
        }
        assert_eq!(there(&ledger, &claim).await, stored);
    }
}

/// Two tasks of one owner: the one that lost the lease is fenced off, whatever its owner is called.
pub async fn c2_owner_is_not_a_token(harness: &impl Harness) {
    let settings = Settings { owner: Some(Owner::new("worker-1").unwrap()), ..Settings::default() };
    let ledger = harness.open(settings.clone()).await;
    let same_owner = harness.open(settings).await;
    let zombie = claim("e", lease());
    let stale = first(&ledger, &zombie).await;
    harness.advance(PAST_LEASE).await;
    let holder = another(&zombie);
    let current = first(&same_owner, &holder).await;
    assert!(is_fenced(settle(&ledger, &zombie, &stale, done()).await));
    assert!(is_fenced(extend(&ledger, &zombie, &stale, LEASE).await));
    settled(&same_owner, &holder, &current, retry(LEASE)).await;
    assert!(is_fenced(settle(&same_owner, &zombie, &stale, done()).await));
    let entry = there(&ledger, &holder).await;
    assert_eq!((entry.state, entry.row.owner.unwrap().as_str()), (State::Retry, "worker-1"));
}

/// Tokens grow from run to run and from row to row, however often the ledger is opened.
pub async fn c2_tokens_grow_across_reopening(harness: &impl Harness) {
    let mut last = None;
    for round in 0..3 {
        let ledger = open(harness).await;
        for id in ["a", "b"] {
            let claim = claim(id, lease());
            let token = first(&ledger, &claim).await.token;
            assert!(Some(token) > last, "round {round}: {token} after {last:?}");
            last = Some(token);
        }
        let fresh = first(&ledger, &claim(&format!("fresh-{round}"), lease())).await.token;
        assert!(Some(fresh) > last, "round {round}: a new row must not begin anew");
        last = Some(fresh);
        harness.advance(PAST_LEASE).await;
    }
}

/// A lease that has lapsed but that nobody took is still the holder's: its work is not thrown away.
pub async fn c2_a_late_settle_of_the_current_token_counts(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claim = claim("e", lease());
    let grant = first(&ledger, &claim).await;
    harness.advance(PAST_LEASE).await;
    settled(&ledger, &claim, &grant, done()).await;
    expect(&ledger, &another(&claim), "duplicate").await;
}

/// A lease ends by the ledger's clock: not before, and not later.
pub async fn c3_lease_lapses_by_ledger_time(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let now = ledger.now().await.unwrap();
    let grant = first(&ledger, &mine).await;
    assert_near(harness, grant.until, now.plus(LEASE));
    harness.advance(LEASE / 2).await;
    expect(&ledger, &another(&mine), "busy").await;
    harness.advance(LEASE / 2).await;
    let next = first(&ledger, &another(&mine)).await;
    assert!(next.suspect, "the last run ended with its process");
    assert!(next.token > grant.token);
}

/// Extending counts from the moment of extending.
pub async fn c3_extending_moves_the_end(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    for _ in 0..3 {
        harness.advance(LEASE / 2).await;
        let now = ledger.now().await.unwrap();
        match extend(&ledger, &mine, &grant, LEASE).await {
            Settled::Ok { at } => assert_near(harness, at, now.plus(LEASE)),
            fenced @ Settled::Fenced { .. } => panic!("{fenced:?}"),
        }
        expect(&ledger, &another(&mine), "busy").await;
    }
    harness.advance(PAST_LEASE).await;
    assert!(!is_fenced(extend(&ledger, &mine, &grant, LEASE).await), "nobody took it meanwhile");
    expect(&ledger, &another(&mine), "busy").await;
    harness.advance(PAST_LEASE).await;
    first(&ledger, &another(&mine)).await;
}

/// A client whose clock is ahead (here: an event's time is) takes no lease away.
pub async fn t19_a_skewed_client_clock_steals_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    for ahead in [PAST_LEASE, LEASE * 10_000] {
        let mut skewed = another(&mine);
        skewed.time = Some(ledger.now().await.unwrap().plus(ahead));
        expect(&ledger, &skewed, "busy").await;
    }
    settled(&ledger, &mine, &grant, done()).await;
}

/// The process is not the owner: a task that lost its lease cannot settle for its sibling.
pub async fn t20_a_zombie_task_of_the_same_owner_is_fenced(harness: &impl Harness) {
    c2_owner_is_not_a_token(harness).await;
}

/// No delivery leaves `dead`, and no late result does.
pub async fn t25_dead_is_terminal_for_deliveries(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    settled(&ledger, &mine, &grant, dead()).await;
    assert!(is_fenced(settle(&ledger, &mine, &grant, done()).await));
    harness.advance(LEASE * 1000).await;
    for mode in [lease(), Mode::Done, Mode::Once { track: None }, super::kit::failed()] {
        expect(&ledger, &claim("e", mode), "dead").await;
    }
    assert_eq!(there(&ledger, &mine).await.reason.as_deref(), Some("poison"));
}

/// One claim succeeds; the other is busy and may not acknowledge before the first is through.
pub async fn acceptance_5_two_receivers_one_claim(harness: &impl Harness) {
    let (one_, two) = (open(harness).await, open(harness).await);
    let mine = claim("e", lease());
    let grant = first(&one_, &mine).await;
    assert!(!named(&two, &another(&mine), "busy").await.may_acknowledge());
    settled(&one_, &mine, &grant, done()).await;
    assert!(one(&two, &another(&mine)).await.may_acknowledge());
    run(&two, &claim("another", lease())).await;
}
