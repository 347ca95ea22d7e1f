//! Clauses 4 to 6: done with its order, runs are counted when they start, pauses are stored.

use std::time::Duration;

use super::Harness;
use super::kit::{
    ATTEMPTS_MAX, DAY, LEASE, PAST_LEASE, another, assert_near, claim, dead, done, expect, failed, first,
    is_fenced, latest, lease, lease_beside, named, one, open, ordered, retry, run, settle, settled, settling,
    sweep, there,
};
use crate::event::{Headers, Record};
use crate::ledger::{
    Claims, ConsumerStore, HeldQuery, Ledger, Mode, OnDead, Operations, OrderPolicy, Outcome, Settled, State,
    Verdict,
};

/// Being done and moving the order on is one step: whoever sees one sees the other.
pub async fn c4_done_and_last_seq_move_together(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    expect(&ledger, &latest(6), "wait").await;
    settled(&ledger, &five, &grant, done()).await;
    let late = latest(4);
    assert_eq!(one(&ledger, &late).await, Outcome::Stale { last: 5 });
    assert_eq!(there(&ledger, &late).await.state, State::Stale, "stale is recorded, never silent");
    expect(&ledger, &another(&five), "duplicate").await;
    run(&ledger, &latest(6)).await;
}

/// A transaction that is rolled back leaves nothing: no entry, no order, no count.
pub async fn c4_rolled_back_claims_leave_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    let policy = OrderPolicy::Latest;
    let claims = [
        claim("plain", Mode::Done),
        ordered("e5", Mode::Done, 5, policy, OnDead::Park),
        ordered("e6", Mode::Done, 6, policy, OnDead::Park),
    ];
    let outcomes = harness.in_transaction(&ledger, &claims, false).await.unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().is_claimed()), "{outcomes:?}");
    for claim in &claims {
        assert_eq!(ledger.get(&claim.identity, None).await.unwrap(), None);
        assert!(!harness.was_committed(&ledger, claim).await.unwrap());
    }
    let four = first(&ledger, &latest(4)).await;
    assert_eq!(four.attempt, 1);
    settled(&ledger, &latest(4), &four, done()).await;
    let again: Vec<_> = claims.iter().map(another).collect();
    let outcomes = harness.in_transaction(&ledger, &again, true).await.unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().is_claimed()), "{outcomes:?}");
    assert_eq!(one(&ledger, &latest(3)).await, Outcome::Stale { last: 6 });
}

/// A committed transaction is done, order and all, with the commit.
pub async fn c4_committed_claims_are_done(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claims =
        [claim("plain", Mode::Done), ordered("e5", Mode::Done, 5, OrderPolicy::Latest, OnDead::Park)];
    let outcomes = harness.in_transaction(&ledger, &claims, true).await.unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().is_claimed()), "{outcomes:?}");
    for claim in &claims {
        assert_eq!(there(&ledger, claim).await.state, State::Done);
        expect(&ledger, &another(claim), "duplicate").await;
    }
    assert_eq!(one(&ledger, &latest(2)).await, Outcome::Stale { last: 5 });
    let duplicates: Vec<_> = claims.iter().map(another).collect();
    for outcome in harness.in_transaction(&ledger, &duplicates, true).await.unwrap() {
        assert_eq!(outcome.unwrap().name(), "duplicate");
    }
}

/// Events that nobody wanted still move the order on, with the settling of the one before them.
pub async fn c4_unwanted_events_advance_with_the_settling(harness: &impl Harness) {
    let ledger = open(harness).await;
    let one_ = super::kit::strict(1);
    let grant = first(&ledger, &one_).await;
    let mut settle = settling(&one_, &grant, done());
    settle.advance_to = Some(4);
    assert!(!is_fenced(super::kit::settle_as(&ledger, &settle).await));
    run(&ledger, &super::kit::strict(5)).await;
    assert_eq!(one(&ledger, &super::kit::strict(3)).await, Outcome::Stale { last: 5 });
}

/// An event whose process dies with it each time uses up its runs and is dead: nobody had to catch anything.
pub async fn c5_lapsed_leases_count_and_end_dead(harness: &impl Harness) {
    let ledger = open(harness).await;
    let killer = claim("e", lease());
    for run in 1..=ATTEMPTS_MAX {
        let grant = first(&ledger, &another(&killer)).await;
        assert_eq!((grant.attempt, grant.suspect), (run, run > 1));
        harness.advance(PAST_LEASE).await;
    }
    match named(&ledger, &another(&killer), "dead").await {
        Outcome::Dead { attempts, .. } => assert_eq!(attempts, ATTEMPTS_MAX),
        outcome => panic!("{outcome:?}"),
    }
    let entry = there(&ledger, &killer).await;
    assert_eq!((entry.state, entry.attempts), (State::Dead, ATTEMPTS_MAX));
    assert!(entry.reason.is_some(), "it says why");
}

/// A bystander's lapsed lease makes it suspect but costs it nothing; only a death while alone counts.
pub async fn c5_only_a_death_alone_counts(harness: &impl Harness) {
    let ledger = open(harness).await;
    let bystander = claim("e", lease_beside());
    for _ in 0..ATTEMPTS_MAX * 2 {
        let grant = first(&ledger, &another(&bystander)).await;
        assert_eq!(grant.attempt, 1);
        harness.advance(PAST_LEASE).await;
    }
    let alone = claim("e", lease());
    let grant = first(&ledger, &alone).await;
    assert!(grant.suspect);
    assert_eq!(grant.attempt, 1);
    harness.advance(PAST_LEASE).await;
    assert_eq!(first(&ledger, &another(&alone)).await.attempt, 2, "this death was its own");
}

/// A handler's errors and deaths of its process add up.
pub async fn c5_errors_and_deaths_add_up(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    settled(&ledger, &mine, &grant, retry(Duration::ZERO)).await;
    for attempt in 2..=ATTEMPTS_MAX {
        assert_eq!(first(&ledger, &another(&mine)).await.attempt, attempt);
        harness.advance(PAST_LEASE).await;
    }
    expect(&ledger, &another(&mine), "dead").await;
}

/// A killer in an order parks its aggregate like any dead one.
pub async fn c5_a_killer_parks_its_aggregate(harness: &impl Harness) {
    let ledger = open(harness).await;
    for _ in 0..ATTEMPTS_MAX {
        first(&ledger, &latest(1)).await;
        harness.advance(PAST_LEASE).await;
        expect(&ledger, &latest(2), "wait").await;
    }
    expect(&ledger, &latest(1), "dead").await;
    assert_eq!(one(&ledger, &latest(2)).await, Outcome::Parked { behind: 1 });
}

/// T22, by name.
pub async fn t22_an_event_that_kills_its_process_is_dead_lettered(harness: &impl Harness) {
    c5_lapsed_leases_count_and_end_dead(harness).await;
}

/// Failures of same-transaction runs are counted by themselves, with pauses, until the event is dead.
pub async fn c5_counted_failures_end_dead(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (attempt, pause) in [(1, 10), (2, 20)] {
        let mut failure = claim("e", failed());
        failure.reason = Some("boom".into());
        let now = ledger.now().await.unwrap();
        match one(&ledger, &failure).await {
            Outcome::RetryLater { at, attempts } => {
                assert_eq!(attempts, attempt);
                assert_near(harness, at, now.plus(Duration::from_secs(pause)));
            }
            outcome => panic!("{outcome:?}"),
        }
        assert_eq!(there(&ledger, &failure).await.reason.as_deref(), Some("boom"));
        expect(&ledger, &claim("e", Mode::Done), "retry_later").await;
        harness.advance(Duration::from_secs(pause)).await;
    }
    expect(&ledger, &claim("e", failed()), "dead").await;
    expect(&ledger, &claim("e", Mode::Done), "dead").await;
    run_done(&ledger, "other").await;
    expect(&ledger, &claim("other", failed()), "duplicate").await;
    first(&ledger, &claim("held", lease())).await;
    expect(&ledger, &claim("held", failed()), "busy").await;
}

async fn run_done(ledger: &impl Ledger, id: &str) {
    first(ledger, &claim(id, Mode::Done)).await;
}

/// A pause is kept by the ledger: another opening, another process, another mode does not shorten it.
pub async fn c6_backoff_is_stored(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    let now = ledger.now().await.unwrap();
    let due = settled(&ledger, &mine, &grant, retry(LEASE * 5)).await;
    assert_near(harness, due, now.plus(LEASE * 5));
    let reopened = open(harness).await;
    for mode in [lease(), Mode::Done, Mode::Once { track: None }] {
        assert_eq!(one(&reopened, &claim("e", mode)).await, Outcome::RetryLater { at: due, attempts: 1 });
    }
    harness.advance(LEASE * 4).await;
    expect(&reopened, &another(&mine), "retry_later").await;
    harness.advance(LEASE).await;
    let grant = first(&reopened, &another(&mine)).await;
    assert_eq!((grant.attempt, grant.suspect), (2, false));
}

/// Giving a lease back makes it claimable at once, costs no attempt, and keeps the entry.
pub async fn c6_release_is_retry_now_not_delete(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    let seen = there(&ledger, &mine).await.first_at;
    harness.advance(Duration::from_secs(1)).await;
    settled(&ledger, &mine, &grant, Verdict::release()).await;
    let entry = there(&ledger, &mine).await;
    assert_eq!((entry.state, entry.attempts, entry.first_at), (State::Retry, 0, seen));
    let next = first(&ledger, &another(&mine)).await;
    assert_eq!((next.attempt, next.suspect), (1, false));
    assert!(next.token > grant.token);
    assert!(is_fenced(settle(&ledger, &mine, &grant, done()).await));
}

/// What waits or lies dead keeps its bytes, exactly, and none is none; what is done needs none.
pub async fn c6_held_bytes_are_kept_exactly(harness: &impl Harness) {
    let ledger = open(harness).await;
    let headers: Headers =
        [("k", &b"\xff\x00"[..]), ("k", &b""[..]), ("Ünï", &b"v"[..])].into_iter().collect();
    let full = Record {
        payload: Some(bytes::Bytes::from_static(b"\x00\xff\xfe not text")),
        headers,
        key: Some(bytes::Bytes::from_static(b"\x00 key \xff")),
        timestamp: Some(super::noon()),
    };
    let empty = Record { payload: Some(bytes::Bytes::new()), ..full.clone() };
    let tombstone = Record { payload: None, ..full.clone() };
    for (id, body) in [("e", full), ("empty", empty), ("tombstone", tombstone), ("bare", Record::default())] {
        let mine = claim(id, lease());
        let scope = mine.identity.scope.clone();
        let grant = first(&ledger, &mine).await;
        let verdict = Verdict::Retry { after: LEASE, counted: true, reason: None, body: Some(body.clone()) };
        settled(&ledger, &mine, &grant, verdict).await;
        assert_eq!(there(&ledger, &mine).await.body.as_ref(), Some(&body));
        assert!(ledger.stat().await.unwrap().held >= 1);
        harness.advance(LEASE).await;
        let due = ledger.due(&scope, &HeldQuery::all(), 10).await.unwrap();
        assert_eq!((due.entries.len(), due.entries[0].body.as_ref()), (1, Some(&body)));
        let next = another(&mine);
        let grant = first(&ledger, &next).await;
        assert_eq!(there(&ledger, &mine).await.body.as_ref(), Some(&body), "until it is done");
        settled(&ledger, &next, &grant, Verdict::Dead { reason: "poison".into(), body: None }).await;
        let dead = ledger.unpublished_dead(&scope, &HeldQuery::all(), 10, None).await.unwrap();
        assert_eq!(dead.last().and_then(|dead| dead.body.as_ref()), Some(&body));
        assert_eq!(there(&ledger, &mine).await.body, Some(body));
    }
    let other = claim("done", lease());
    run(&ledger, &other).await;
    assert_eq!(there(&ledger, &other).await.body, None);
}

/// What failed is in the ledger with its time; no bus has to bring it again for it to be claimable.
pub async fn t16_a_failed_event_stays_claimable_without_redelivery(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    settled(&ledger, &mine, &grant, retry(LEASE)).await;
    let outcome = named(&ledger, &another(&mine), "retry_later").await;
    assert!(!outcome.may_acknowledge());
    harness.advance(LEASE).await;
    let due = crate::ledger::Filter { states: vec![State::Retry], ..Default::default() };
    let page = ledger.list(&due, None, 10).await.unwrap();
    assert_eq!(page.entries.len(), 1);
    let found = crate::ledger::Claim::new(page.entries[0].identity.clone(), lease());
    run(&ledger, &found).await;
}

/// A backoff survives a restart; what is done and old is swept.
pub async fn t26_backoff_survives_a_restart_and_old_rows_are_swept(harness: &impl Harness) {
    let (failed, fine) = (claim("failed", lease()), claim("fine", lease()));
    let due = {
        let ledger = open(harness).await;
        run(&ledger, &fine).await;
        let grant = first(&ledger, &failed).await;
        settled(&ledger, &failed, &grant, retry(DAY * 10)).await
    };
    let ledger = open(harness).await;
    assert_eq!(one(&ledger, &another(&failed)).await, Outcome::RetryLater { at: due, attempts: 1 });
    harness.advance(DAY * 8).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 1);
    assert_eq!(one(&ledger, &another(&failed)).await, Outcome::RetryLater { at: due, attempts: 1 });
    assert_eq!(super::kit::entry(&ledger, &fine).await, None);
}

/// Failures back off as stored, runs are as many as configured, then it is dead; a redrive is recorded.
pub async fn acceptance_6_failures_back_off_then_die_then_redrive(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    for attempt in 1..=ATTEMPTS_MAX {
        let grant = first(&ledger, &mine).await;
        assert_eq!(grant.attempt, attempt);
        let verdict = if attempt == ATTEMPTS_MAX { dead() } else { retry(LEASE) };
        settled(&ledger, &mine, &grant, verdict).await;
        harness.advance(LEASE).await;
    }
    expect(&ledger, &another(&mine), "dead").await;
    let redrive = super::kit::intervening(&mine, crate::ledger::Intervention::Redrive);
    ledger.intervene(&redrive).await.unwrap();
    let audit = ledger.audit(10).await.unwrap();
    assert_eq!((audit[0].what.as_str(), audit[0].by.as_str()), ("redrive", "ada"));
    let next = another(&mine);
    let grant = first(&ledger, &next).await;
    assert_eq!(grant.attempt, 1, "attempts are reset");
    assert_eq!(
        settle(&ledger, &next, &grant, done()).await,
        Settled::Ok { at: there(&ledger, &next).await.at }
    );
}
