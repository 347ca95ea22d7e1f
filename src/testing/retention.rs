//! Clause 10 and sweeping: what is forgotten is never taken for new, and what is open is never forgotten.

use super::Harness;
use super::kit::{
    DAY, LEASE, PAST_LEASE, another, claim, days_go_by, dead, done, entry, expect, first, intervene, latest,
    lease, named, one, open, retry, run, settled, sweep, there, v7_at,
};
use crate::id::{Scope, Topic};
use crate::ledger::{
    Claim, Claims, ConsumerStore, Intervention, Ledger, Marker, Mode, Operations, Outcome, State,
    SweepSettings, Swept, Verdict, Week,
};

/// A claim on a UUIDv7 of the ledger's present.
async fn weekly(ledger: &impl Ledger, n: u8) -> Claim {
    let mut mine = claim("x", lease());
    mine.identity.id = v7_at(ledger.now().await.unwrap(), n);
    mine
}

/// The weeks that had entries: a ledger may make weeks ahead, and drops those too.
fn filled(swept: &Swept) -> Vec<(Week, u64)> {
    swept.weeks.iter().copied().filter(|(_, entries)| *entries > 0).collect()
}

/// An id of a dropped week is too old, in every mode, and never a first.
pub async fn c10_dropped_week_is_too_old(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (ran, never) = (weekly(&ledger, 1).await, weekly(&ledger, 2).await);
    let week = run(&ledger, &ran).await.week;
    harness.advance(DAY * 30).await;
    let swept = sweep(&ledger, DAY * 7).await;
    assert_eq!((filled(&swept), swept.held), (vec![(week, 1)], 0));
    let dropped = ledger.stat().await.unwrap().dropped;
    assert!(dropped.iter().any(|(dropped, _)| *dropped == week), "{dropped:?}");
    assert_eq!(entry(&ledger, &ran).await, None);
    for mode in [lease(), Mode::Done, Mode::Once { track: None }, super::kit::failed()] {
        for mine in [&ran, &never] {
            let outcome = one(&ledger, &Claim { mode, ..another(mine) }).await;
            assert_eq!(outcome, Outcome::TooOld { week });
            assert!(!outcome.may_acknowledge());
        }
    }
    let reopened = open(harness).await;
    expect(&reopened, &ran, "too_old").await;
    assert_eq!(entry(&ledger, &ran).await, None, "too old leaves nothing behind");
    run(&ledger, &weekly(&ledger, 3).await).await;
}

/// T35, by name.
pub async fn t35_an_id_of_a_dropped_week_is_too_old(harness: &impl Harness) {
    c10_dropped_week_is_too_old(harness).await;
}

/// A scope that began after the drop never saw the week: for it the id is new, and is remembered.
pub async fn c10_younger_scope_is_admitted(harness: &impl Harness) {
    let ledger = open(harness).await;
    let old = weekly(&ledger, 1).await;
    run(&ledger, &old).await;
    harness.advance(DAY * 30).await;
    sweep(&ledger, DAY * 7).await;
    harness.advance(LEASE).await;
    let mut young = another(&old);
    young.identity.scope = Scope::new("young").unwrap();
    run(&ledger, &young).await;
    expect(&ledger, &another(&young), "duplicate").await;
    expect(&ledger, &another(&old), "too_old").await; // the week is there again, and old scopes are still told
    let mut next = another(&old);
    next.identity.id = v7_at(ledger.now().await.unwrap().minus(DAY * 30), 9);
    expect(&ledger, &next, "too_old").await;
}

/// What is open when its week goes is kept, with its state, its token and its right to be settled.
pub async fn c10_open_entries_survive_as_held(harness: &impl Harness) {
    let ledger = open(harness).await;
    let claims = [weekly(&ledger, 1).await, weekly(&ledger, 2).await, weekly(&ledger, 3).await];
    let week = Week::of(ledger.now().await.unwrap());
    let mut grants = Vec::new();
    for claim in &claims {
        grants.push(first(&ledger, claim).await);
    }
    settled(&ledger, &claims[1], &grants[1], retry(DAY * 60)).await;
    settled(&ledger, &claims[2], &grants[2], dead()).await;
    run(&ledger, &weekly(&ledger, 4).await).await;
    harness.advance(DAY * 30).await;
    let before = [
        there(&ledger, &claims[0]).await,
        there(&ledger, &claims[1]).await,
        there(&ledger, &claims[2]).await,
    ];
    let swept = sweep(&ledger, DAY * 7).await;
    // What is kept is not counted as gone.
    assert_eq!((filled(&swept), swept.held, swept.entries()), (vec![(week, 1)], 3, 1));
    for (claim, before) in claims.iter().zip(before) {
        assert_eq!(there(&ledger, claim).await, before);
    }
    expect(&ledger, &another(&claims[1]), "retry_later").await;
    expect(&ledger, &another(&claims[2]), "dead").await;
    let page = ledger.list(&crate::ledger::Filter::default(), None, 100).await.unwrap();
    assert_eq!(page.entries.len(), 3, "they are listed");
    let next = another(&claims[0]);
    let grant = first(&ledger, &next).await;
    assert!(grant.suspect && grant.token > grants[0].token);
    settled(&ledger, &next, &grant, done()).await;
    expect(&ledger, &another(&claims[0]), "duplicate").await;
    intervene(&ledger, &claims[2], Intervention::Redrive).await.unwrap();
    run(&ledger, &another(&claims[2])).await;
}

/// Once settled and old, what was kept goes too; its week still answers for it.
pub async fn c10_kept_entries_go_when_they_are_settled(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = weekly(&ledger, 1).await;
    first(&ledger, &mine).await;
    harness.advance(DAY * 30).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.held, 1);
    let next = another(&mine);
    run(&ledger, &next).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 0);
    days_go_by(harness, &ledger, 8).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 1);
    expect(&ledger, &another(&mine), "too_old").await;
}

/// In an order: at or below the last seq is stale even in a dropped week; above it is too old, and writes nothing.
pub async fn c10_order_is_decided_before_age(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut five = latest(5);
    five.identity.id = v7_at(ledger.now().await.unwrap(), 5);
    let (mut four, mut six) = (latest(4), latest(6));
    four.identity.id = v7_at(ledger.now().await.unwrap(), 4);
    six.identity.id = v7_at(ledger.now().await.unwrap(), 6);
    run(&ledger, &five).await;
    harness.advance(DAY * 30).await;
    sweep(&ledger, DAY * 7).await;
    for mine in [&four, &five] {
        assert_eq!(one(&ledger, &another(mine)).await, Outcome::Stale { last: 5 });
        assert_eq!(entry(&ledger, mine).await, None, "a dropped week takes no rows");
    }
    expect(&ledger, &six, "too_old").await;
    let blocker = latest(7); // timeless, so not too old
    let grant = first(&ledger, &blocker).await;
    expect(&ledger, &six, "too_old").await;
    settled(&ledger, &blocker, &grant, dead()).await;
    let mut eight = latest(8);
    eight.identity.id = v7_at(ledger.now().await.unwrap().minus(DAY * 30), 8);
    expect(&ledger, &eight, "too_old").await;
    assert_eq!(entry(&ledger, &eight).await, None);
}

/// Age counts from the week's newest settling: a week in use stays, however old its ids are.
pub async fn c10_a_week_in_use_stays(harness: &impl Harness) {
    let ledger = open(harness).await;
    let old = weekly(&ledger, 1).await;
    run(&ledger, &old).await;
    let late = weekly(&ledger, 2).await;
    harness.advance(DAY * 30).await;
    run(&ledger, &late).await;
    harness.advance(DAY * 3).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 0);
    expect(&ledger, &another(&old), "duplicate").await;
    days_go_by(harness, &ledger, 5).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 2);
    expect(&ledger, &another(&late), "too_old").await;
}

/// A leap of the clock is not age (clause 12). What was done just before it stays for a whole retention, through any number of
/// sweeps, and goes when that time is over.
pub async fn t72_a_leap_of_the_clock_forgets_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.paused_until, None);
    harness.advance(DAY).await;
    let mine = [weekly(&ledger, 1).await, claim("timeless", lease())];
    for mine in &mine {
        run(&ledger, mine).await;
    }
    harness.advance(DAY * 400).await;
    let rehearsal = SweepSettings { retention: DAY * 7, batch_max: 1000, dry_run: true };
    assert_eq!(ledger.sweep(rehearsal).await.unwrap().entries(), 0);
    let now = ledger.now().await.unwrap();
    let swept = sweep(&ledger, DAY * 7).await;
    assert_eq!((swept.entries(), swept.weeks.len()), (0, 0), "{swept:?}");
    let paused_until = swept.paused_until.expect("it says until when");
    super::kit::assert_near(harness, paused_until, now.plus(DAY * 7));
    for mine in &mine {
        expect(&ledger, &another(mine), "duplicate").await;
    }
    harness.advance(DAY * 6).await;
    assert_eq!(sweep(&open(harness).await, DAY * 7).await.paused_until, Some(paused_until), "it is stored");
    expect(&ledger, &another(&mine[0]), "duplicate").await;
    harness.advance(DAY + LEASE).await;
    let swept = sweep(&ledger, DAY * 7).await;
    assert_eq!((swept.entries(), swept.paused_until), (2, None), "{swept:?}");
    expect(&ledger, &another(&mine[0]), "too_old").await;
}

/// The clock leaps again while sweeps are paused because of a leap (clause 12). What was done in between is not old.
pub async fn t400_a_second_leap_of_the_clock_forgets_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    sweep(&ledger, DAY * 7).await;
    harness.advance(DAY * 400).await;
    assert!(sweep(&ledger, DAY * 7).await.paused_until.is_some());
    harness.advance(DAY / 24).await;
    assert!(sweep(&ledger, DAY * 7).await.paused_until.is_some());
    let mine = [weekly(&ledger, 1).await, claim("timeless", lease())];
    for mine in &mine {
        run(&ledger, mine).await;
    }
    harness.advance(DAY * 400).await;
    let swept = sweep(&ledger, DAY * 7).await;
    assert_eq!((swept.entries(), swept.weeks.len()), (0, 0), "{swept:?}");
    let now = ledger.now().await.unwrap();
    let paused_until = swept.paused_until.expect("it says until when");
    assert!(paused_until.since(now) > DAY * 3, "{now}: {swept:?}");
    for mine in &mine {
        expect(&ledger, &another(mine), "duplicate").await;
    }
    harness.advance(DAY * 3).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 0);
    harness.advance(DAY).await;
    let swept = sweep(&ledger, DAY * 7).await;
    assert_eq!((swept.entries(), swept.paused_until), (2, None), "{swept:?}");
}

/// A dry run says what would go and changes nothing.
pub async fn sweep_dry_run_changes_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = weekly(&ledger, 1).await;
    run(&ledger, &mine).await;
    run(&ledger, &claim("timeless", lease())).await;
    harness.advance(DAY * 30).await;
    let settings = SweepSettings { retention: DAY * 7, batch_max: 1000, dry_run: true };
    assert_eq!(ledger.sweep(settings).await.unwrap().entries(), 2);
    expect(&ledger, &another(&mine), "duplicate").await;
    expect(&ledger, &claim("timeless", lease()), "duplicate").await;
    assert_eq!(sweep(&ledger, DAY * 7).await.entries(), 2);
}

/// Timeless entries go one by one, in bounded batches, by the time they were settled; open ones stay.
pub async fn sweep_keeps_open_entries(harness: &impl Harness) {
    let ledger = open(harness).await;
    for n in 0..25 {
        run(&ledger, &claim(&format!("old{n}"), lease())).await;
    }
    let open_ = [claim("leased", lease()), claim("retry", lease()), claim("dead", lease())];
    let mut grants = Vec::new();
    for claim in &open_ {
        grants.push(first(&ledger, claim).await);
    }
    settled(&ledger, &open_[1], &grants[1], retry(LEASE)).await;
    settled(&ledger, &open_[2], &grants[2], dead()).await;
    harness.advance(DAY * 5).await;
    run(&ledger, &claim("young", lease())).await;
    harness.advance(DAY * 3).await;
    let settings = SweepSettings { retention: DAY * 7, batch_max: 10, dry_run: false };
    assert_eq!(ledger.sweep(settings).await.unwrap().rows, 25, "all of them, ten at a time");
    assert_eq!(ledger.sweep(settings).await.unwrap().rows, 0);
    for (claim, state) in open_.iter().zip([State::Leased, State::Retry, State::Dead]) {
        assert_eq!(there(&ledger, claim).await.state, state);
    }
    expect(&ledger, &claim("young", lease()), "duplicate").await;
    // For timeless ids protection ends with the retention, and the docs say so.
    assert!(named(&ledger, &claim("old1", lease()), "claimed").await.is_claimed());
}

/// Claims go on while weeks come and go, and none of them is granted twice.
pub async fn sweep_beside_claims_loses_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut old = Vec::new();
    for n in 0..4u8 {
        let mine = weekly(&ledger, n).await;
        run(&ledger, &mine).await;
        old.push(mine);
        harness.advance(DAY * 7).await;
    }
    harness.advance(DAY * 30).await;
    let now = ledger.now().await.unwrap();
    let sweeper = {
        let ledger = ledger.clone();
        tokio::spawn(async move { sweep(&ledger, DAY * 7).await })
    };
    let claimers: Vec<_> = (0..4)
        .map(|_| {
            let (ledger, old) = (ledger.clone(), old.clone());
            tokio::spawn(async move {
                let mut won = 0;
                for n in 0..25u8 {
                    let mut mine = claim("x", Mode::Done);
                    mine.identity.id = v7_at(now, n);
                    let late = another(&old[usize::from(n) % old.len()]);
                    // Contention is an error that changed nothing: issue the same claims again.
                    let outcomes = loop {
                        match ledger.claim(&[mine.clone(), late.clone()]).await {
                            Ok(outcomes) => break outcomes,
                            Err(error) => assert!(error.is_retryable(), "{error}"),
                        }
                    };
                    won += usize::from(outcomes[0].as_ref().unwrap().is_claimed());
                    let late = outcomes[1].as_ref().unwrap().name();
                    assert!(matches!(late, "duplicate" | "too_old"), "{late}");
                }
                won
            })
        })
        .collect();
    let mut won = 0;
    for claimer in claimers {
        won += claimer.await.unwrap();
    }
    assert_eq!(won, 25);
    assert_eq!(filled(&sweeper.await.unwrap()).len(), 4);
}

/// At-most-once claims whose end never came are marked by the sweep, before anything of them is forgotten.
pub async fn sweep_marks_what_is_lost(harness: &impl Harness) {
    let ledger = open(harness).await;
    let tracked = claim("tracked", Mode::Once { track: Some(LEASE) });
    let plain = claim("plain", Mode::Once { track: None });
    first(&ledger, &tracked).await;
    first(&ledger, &plain).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.lost, 0);
    harness.advance(PAST_LEASE).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.lost, 1);
    assert_eq!(sweep(&ledger, DAY * 7).await.lost, 0, "once");
    let entry = there(&ledger, &tracked).await;
    assert_eq!(entry.state, State::Lost);
    assert!(entry.reason.is_some());
    assert_eq!(there(&ledger, &plain).await.state, State::Claimed);
    let late = Verdict::Finished { metadata: None };
    let grant = crate::ledger::Grant {
        token: entry.token,
        week: entry.week,
        until: entry.at,
        attempt: 1,
        suspect: false,
    };
    let _ = super::kit::settle(&ledger, &tracked, &grant, late).await; // told either way, never an error
    days_go_by(harness, &ledger, 7).await;
    assert_eq!(sweep(&ledger, DAY * 7).await.rows, 2);
}

/// The markers of a scope that is no longer in use go when the retention is over. One that was set again within it stays, and a
/// dry run removes none.
pub async fn t84_markers_of_a_finished_scope_go_away(harness: &impl Harness) {
    let ledger = open(harness).await;
    let topic = Topic::new("orders").unwrap();
    let (finished, busy) = (Scope::new("finished").unwrap(), Scope::new("busy").unwrap());
    let marker = |partition, last| Marker::new(topic.clone(), partition, last);
    let found = async |scope: &Scope| ledger.markers(scope, &topic, &[0, 1]).await.unwrap();
    for scope in [&finished, &busy] {
        ledger.set_markers(scope, &[marker(0, 10), marker(1, 11)]).await.unwrap();
    }
    days_go_by(harness, &ledger, 5).await;
    ledger.set_markers(&busy, &[marker(1, 12)]).await.unwrap();
    sweep(&ledger, DAY * 7).await;
    assert_eq!(found(&finished).await, [marker(0, 10), marker(1, 11)], "within the retention all stay");
    days_go_by(harness, &ledger, 3).await;
    let rehearsal = SweepSettings { retention: DAY * 7, batch_max: 1000, dry_run: true };
    ledger.sweep(rehearsal).await.unwrap();
    assert_eq!(found(&finished).await.len(), 2, "a dry run changes nothing");
    sweep(&ledger, DAY * 7).await;
    assert_eq!(found(&finished).await, []);
    assert_eq!(found(&busy).await, [marker(1, 12)]);
}
