//! What is held with its bytes: parked instead of waiting, due, refused, copied out, dropped and skipped; markers.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;

use super::Harness;
use super::kit::{
    DAY, LEASE, PAST_LEASE, another, claim, done, entry, expect, failed, first, intervene, intervening,
    is_fenced, latest, lease, lease_beside, one, open, run, settled, settling, strict, sweep, there, v7_at,
};
use crate::error::Error;
use crate::event::{Headers, Origin, Record};
use crate::id::{Scope, Tenant, Topic};
use crate::ledger::{
    Claim, Claims, ConsumerStore, Entry, Filter, HeldQuery, Identity, Intervention, Ledger, Marker,
    MismatchRule, Mode, Operations, Outcome, Settings, State, Verdict,
};

fn body(text: &'static str) -> Record {
    Record {
        payload: Some(text.into()),
        headers: Headers::from_iter(
            [("a", &b"1\0"[..]), ("", b""), ("a", b"2")].map(|(n, v)| (n, Bytes::from(v))),
        ),
        key: Some(Bytes::from_static(b"\xff\0key")),
        timestamp: Some(super::noon()),
    }
}

fn with(claim: Claim, text: &'static str) -> Claim {
    Claim { body: Some(body(text)), ..claim }
}

fn held(claim: Claim) -> Claim {
    Claim { hold: true, ..with(claim, "held") }
}

fn scope() -> Scope {
    claim("e", lease()).identity.scope
}

/// What is due, oldest first.
async fn due(ledger: &impl Ledger) -> Vec<String> {
    let mut due = ledger.due(&scope(), &HeldQuery::all(), 100).await.unwrap();
    assert!(due.entries.iter().all(|entry| entry.body.is_some()));
    assert_eq!(due.claimable, due.entries.len() as u64);
    due.entries.sort_by_key(|entry| entry.at);
    ids(&due.entries)
}

fn ids(entries: &[Entry]) -> Vec<String> {
    entries.iter().map(|entry| entry.identity.id.to_string()).collect()
}

/// A claim that ends dead keeps the bytes it brought: attempts used up by deaths, and by counted failures.
pub async fn c5_a_dead_claim_keeps_its_bytes(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (mine, text) in [(claim("alone", lease()), "alone"), (latest(1), "ordered")] {
        let mine = with(mine, text);
        for _ in 0..super::kit::ATTEMPTS_MAX {
            first(&ledger, &another(&mine)).await;
            assert_eq!(there(&ledger, &mine).await.body, None, "bytes of what runs are not stored");
            harness.advance(PAST_LEASE).await;
        }
        expect(&ledger, &another(&mine), "dead").await;
        assert_eq!(there(&ledger, &mine).await.body, Some(body(text)));
    }
    let mine = with(claim("failed", failed()), "failed");
    for _ in 1..super::kit::ATTEMPTS_MAX {
        expect(&ledger, &another(&mine), "retry_later").await;
        assert_eq!(there(&ledger, &mine).await.body, None, "it did not say hold");
    }
    expect(&ledger, &another(&mine), "dead").await;
    assert_eq!(there(&ledger, &mine).await.body, Some(body("failed")));
}

/// A held retry is due at its time, for all tenants of the scope, and no more than asked.
pub async fn c6_held_is_due_when_its_time_has_come(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut tenant = claim("tenant", failed());
    tenant.identity.tenant = Some(Tenant::new("acme").unwrap());
    for (n, mine) in [claim("b", failed()), tenant, claim("a", failed())].into_iter().enumerate() {
        let mine = if n == 2 { mine } else { held(mine) };
        expect(&ledger, &mine, "retry_later").await;
        harness.advance(Duration::from_secs(1)).await;
    }
    assert_eq!(due(&ledger).await, Vec::<String>::new());
    harness.advance(LEASE).await;
    assert_eq!(due(&ledger).await, ["b", "tenant"], "a was not held");
    let one = ledger.due(&scope(), &HeldQuery::all(), 1).await.unwrap();
    assert_eq!((one.entries.len(), one.claimable, one.held), (1, 2, 2));
    assert_eq!(one.entries[0].body, Some(body("held")));
    assert_eq!(ledger.due(&Scope::new("other").unwrap(), &HeldQuery::all(), 9).await.unwrap().held, 0);
}

/// It stays held while it runs again, is due again when that run's lease lapses, and leaves when it is done.
pub async fn c6_a_held_one_stays_held_while_it_runs(harness: &impl Harness) {
    let ledger = open(harness).await;
    expect(&ledger, &held(claim("e", failed())), "retry_later").await;
    harness.advance(LEASE).await;
    first(&ledger, &claim("e", lease())).await;
    assert!(due(&ledger).await.is_empty());
    assert_eq!(ledger.due(&scope(), &HeldQuery::all(), 9).await.unwrap().held, 1);
    harness.advance(PAST_LEASE).await;
    assert_eq!(due(&ledger).await, ["e"]);
    run(&ledger, &claim("e", lease())).await;
    assert_eq!(ledger.due(&scope(), &HeldQuery::all(), 9).await.unwrap().held, 0);
    assert_eq!(there(&ledger, &claim("e", lease())).await.body, None);
}

/// What would wait is parked with its bytes, answers so again when redelivered, and runs in its turn.
pub async fn c6_hold_parks_what_would_wait(harness: &impl Harness) {
    let ledger = open(harness).await;
    let five = latest(5);
    let grant = first(&ledger, &five).await;
    for _ in 0..2 {
        for seq in [6, 7] {
            assert_eq!(one(&ledger, &held(latest(seq))).await, Outcome::Parked { behind: 5 });
            let parked = there(&ledger, &latest(seq)).await;
            assert_eq!((parked.state, parked.row.body), (State::Parked, Some(body("held"))));
        }
    }
    assert!(due(&ledger).await.is_empty());
    settled(&ledger, &five, &grant, done()).await;
    for id in ["e6", "e7"] {
        assert_eq!(due(&ledger).await, [id], "only the lowest");
        let seq = if id == "e6" { 6 } else { 7 };
        run(&ledger, &latest(seq)).await;
    }
    assert_eq!(ledger.due(&scope(), &HeldQuery::all(), 9).await.unwrap().held, 0);
}

/// A parked event whose aggregate has moved past it is due, so that its claim ends it as stale.
pub async fn c6_what_was_overtaken_is_due_and_stale(harness: &impl Harness) {
    let ledger = open(harness).await;
    let six = latest(6);
    let grant = first(&ledger, &six).await;
    assert_eq!(one(&ledger, &held(latest(5))).await, Outcome::Parked { behind: 6 });
    settled(&ledger, &six, &grant, done()).await;
    assert_eq!(due(&ledger).await, ["e5"]);
    assert_eq!(one(&ledger, &latest(5)).await, Outcome::Stale { last: 6 });
    assert_eq!(ledger.due(&scope(), &HeldQuery::all(), 9).await.unwrap().held, 0);
}

/// What cannot run is dead at once, with reason and bytes, and parks nobody; what is there already stays as it is.
pub async fn c5_refused_is_dead_beside_every_order(harness: &impl Harness) {
    let ledger = open(harness).await;
    let refused = with(Claim { mode: Mode::Refused, reason: Some("not JSON".into()), ..latest(5) }, "bad");
    for mine in [refused.clone(), refused.clone(), another(&refused)] {
        assert!(matches!(one(&ledger, &mine).await, Outcome::Dead { attempts: 0, .. }));
    }
    let found = there(&ledger, &refused).await;
    assert_eq!(
        (found.state, found.reason.as_deref(), found.body.clone()),
        (State::Dead, Some("not JSON"), Some(body("bad")))
    );
    run(&ledger, &latest(6)).await;
    let live = claim("live", lease());
    let grant = first(&ledger, &live).await;
    expect(&ledger, &Claim { mode: Mode::Refused, ..another(&live) }, "busy").await;
    settled(&ledger, &live, &grant, done()).await;
    expect(&ledger, &Claim { mode: Mode::Refused, ..another(&live) }, "duplicate").await;
    intervene(&ledger, &refused, Intervention::Redrive).await.unwrap();
    run(&ledger, &Claim { order: None, ..another(&latest(5)) }).await;
}

/// An event that is too old can still be recorded as dead, and is found.
pub async fn c10_refused_of_a_dropped_week_is_kept(harness: &impl Harness) {
    let ledger = open(harness).await;
    let start = ledger.now().await.unwrap();
    let of = |n| Claim::new(Identity::new(scope(), v7_at(start, n)), Mode::Done);
    expect(&ledger, &of(1), "claimed").await;
    harness.advance(DAY * 30).await;
    sweep(&ledger, DAY * 7).await;
    expect(&ledger, &of(2), "too_old").await;
    let refused = with(Claim { mode: Mode::Refused, reason: Some("too old".into()), ..of(2) }, "old");
    for mine in [refused.clone(), another(&refused), of(2)] {
        expect(&ledger, &mine, "dead").await;
    }
    assert_eq!(there(&ledger, &refused).await.body, Some(body("old")));
    assert_eq!(ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap().len(), 1);
}

/// An event is listed as unpublished once per death: not after it was marked under its token, and
/// again after it died again.
pub async fn c2_a_dead_event_is_published_once_per_death(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let mut stale = None;
    for _ in 0..2 {
        let grant = first(&ledger, &another(&mine)).await;
        let verdict = Verdict::Dead { reason: "poison".into(), body: Some(body("dead")) };
        settled(&ledger, &mine, &grant, verdict).await;
        let out = ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap();
        assert_eq!(out.len(), 1);
        assert_eq!(out[0].body, Some(body("dead")));
        let copied = (out[0].identity.clone(), out[0].week, out[0].token);
        if let Some(stale) = stale.replace(copied.clone()) {
            ledger.mark_dead_published(&[stale]).await.unwrap();
            assert_eq!(
                ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap().len(),
                1,
                "a stale token marks nothing"
            );
        }
        for _ in 0..2 {
            ledger.mark_dead_published(std::slice::from_ref(&copied)).await.unwrap();
            assert!(ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap().is_empty());
        }
        intervene(&ledger, &mine, Intervention::Redrive).await.unwrap();
    }
}

/// Settlings and markers of a transaction come with its commit, and not without it. Markers replace and remove.
pub async fn c4_settling_and_marking_in_a_transaction(harness: &impl Harness) {
    let ledger = open(harness).await;
    let topic = Topic::new("orders").unwrap();
    let marker = |partition, last| Marker::new(topic.clone(), partition, last);
    let mine = latest(1);
    let grant = first(&ledger, &mine).await;
    let settles = [settling(&mine, &grant, done()), settling(&claim("nobody", lease()), &grant, done())];
    let tried = Marker { tried: vec![3, 4, 900], batch: 200, ..marker(1, 1000) };
    let markers = [tried.clone(), marker(0, 0)];
    for commit in [false, true] {
        let answers =
            harness.settle_in_transaction(&ledger, &settles, (&scope(), &markers), commit).await.unwrap();
        let fenced: Vec<bool> = answers.into_iter().map(|answer| is_fenced(answer.unwrap())).collect();
        assert_eq!(fenced, [false, true]);
        let wanted = if commit { State::Done } else { State::Leased };
        assert_eq!(there(&ledger, &mine).await.state, wanted);
        let found = ledger.markers(&scope(), &topic, &[0, 1, 2]).await.unwrap();
        assert_eq!(found, if commit { vec![marker(0, 0), tried.clone()] } else { Vec::new() });
    }
    ledger.set_markers(&scope(), &[marker(1, 29), Marker::clear(topic.clone(), 0)]).await.unwrap();
    assert_eq!(ledger.markers(&scope(), &topic, &[0, 1]).await.unwrap(), [marker(1, 29)]);
    assert!(ledger.markers(&Scope::new("other").unwrap(), &topic, &[1]).await.unwrap().is_empty());
    run(&ledger, &latest(2)).await;
}

/// A look brings as many bytes as it may, and the entry that reaches them. The next one brings others: at random of what is
/// due, and in turn of what is dead and reserved.
pub async fn t79_what_is_held_comes_in_bounded_pages(harness: &impl Harness) {
    let ledger = open(harness).await;
    let body = Record { payload: Some(vec![7; 10_000].into()), ..Record::default() };
    for n in 0..6 {
        let due = held(claim(&format!("due-{n}"), failed()));
        expect(&ledger, &Claim { body: Some(body.clone()), ..due }, "retry_later").await;
        let dead = claim(&format!("dead-{n}"), Mode::Refused);
        expect(&ledger, &Claim { body: Some(body.clone()), ..dead }, "dead").await;
    }
    harness.advance(LEASE).await;
    assert_eq!(due(&ledger).await.len(), 6);
    let all_dead = ids(&ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap());
    assert_eq!(all_dead.len(), 6);
    for (bytes, count) in
        [(0, 0), (1, 1), (body.memory_bytes(), 1), (body.memory_bytes() + 1, 2), (1 << 30, 6)]
    {
        let query = HeldQuery { bytes_max: Some(bytes), ..HeldQuery::all() };
        let due = ledger.due(&scope(), &query, 9).await.unwrap();
        assert_eq!((due.entries.len(), due.held), (count, 12), "{bytes} bytes");
        assert!(count == 0 || due.claimable == 6);
        let dead = ledger.unpublished_dead(&scope(), &query, 9, None).await.unwrap();
        assert_eq!(ids(&dead), all_dead[..count]);
    }
    let query = HeldQuery { bytes_max: Some(1), ..HeldQuery::all() };
    let mut seen = BTreeSet::new();
    while seen.len() < 6 {
        seen.extend(ids(&ledger.due(&scope(), &query, 9).await.unwrap().entries));
    }
    for id in &all_dead {
        let dead = ledger.unpublished_dead(&scope(), &query, 9, Some(LEASE)).await.unwrap();
        assert_eq!(ids(&dead), std::slice::from_ref(id));
    }
}

/// Dead letters are copied oldest first, whoever's they are: one tenant's do not hide another's.
pub async fn t120_dead_letters_of_all_tenants_come_oldest_first(harness: &impl Harness) {
    let ledger = open(harness).await;
    let tenants = [Some("b"), None, Some("a")];
    let tenant = |name: Option<&str>| name.map(|name| Tenant::new(name).unwrap());
    // The tenants are numbered in this order, and their letters are mixed.
    let mut ids = Vec::new();
    for (n, name) in tenants.iter().cycle().enumerate().take(9) {
        let mut dead = with(claim(&format!("dead-{n}"), Mode::Refused), "dead");
        dead.identity.tenant = tenant(*name);
        expect(&ledger, &dead, "dead").await;
        ids.push(dead.identity.id.to_string());
        harness.advance(Duration::from_millis(1)).await;
    }
    let look = async |limit: usize, reserve: Option<Duration>| -> Vec<String> {
        let dead = ledger.unpublished_dead(&scope(), &HeldQuery::all(), limit, reserve).await.unwrap();
        dead.iter().map(|entry| entry.identity.id.to_string()).collect()
    };
    assert_eq!(look(9, None).await, ids);
    assert_eq!(look(2, None).await, ids[..2]);
    for id in &ids {
        assert_eq!(look(1, Some(LEASE)).await, std::slice::from_ref(id));
        harness.advance(Duration::from_millis(1)).await;
    }
    // Those that were reserved before come last, in turn.
    harness.advance(PAST_LEASE).await;
    let mut fresh = with(claim("fresh", Mode::Refused), "dead");
    fresh.identity.tenant = tenant(Some("c"));
    harness.advance(PAST_LEASE).await;
    expect(&ledger, &fresh, "dead").await;
    assert_eq!(look(3, Some(LEASE)).await, ids[..3], "free again for longer than the fresh one is dead");
    assert_eq!(look(7, Some(LEASE)).await, [&ids[3..], &["fresh".to_owned()]].concat());
}

/// The same claim again gets the same answer about the run before.
pub async fn c7_a_repeat_is_as_suspect_as_the_first(harness: &impl Harness) {
    let ledger = open(harness).await;
    first(&ledger, &claim("e", lease_beside())).await;
    harness.advance(PAST_LEASE).await;
    let again = claim("e", lease());
    for _ in 0..2 {
        assert!(first(&ledger, &again).await.suspect);
    }
}

/// With `warn` a reused id is answered as the original, and counted whatever the answer.
pub async fn c9_warned_mismatches_are_counted(harness: &impl Harness) {
    let settings = Settings { mismatch: MismatchRule::Warn, ..Settings::default() };
    let ledger = harness.open(settings).await;
    let with =
        |n: u8, id: &str| Claim { fingerprint: Some(super::kit::fingerprint(n)), ..claim(id, lease()) };
    let grant = first(&ledger, &with(1, "e")).await;
    assert_eq!(ledger.settings().reused.take(), 0);
    expect(&ledger, &with(2, "e"), "busy").await;
    settled(&ledger, &with(1, "e"), &grant, done()).await;
    expect(&ledger, &with(1, "e"), "duplicate").await;
    expect(&ledger, &with(2, "e"), "duplicate").await;
    assert_eq!((ledger.settings().reused.take(), ledger.settings().reused.take()), (2, 0));
}

/// Settling, extending and intervening in an unknown scope finds nothing and leaves nothing.
pub async fn c2_an_unknown_scope_is_not_registered(harness: &impl Harness) {
    let ledger = open(harness).await;
    let start = ledger.now().await.unwrap();
    let of = |scope: &str, n| Claim::new(Identity::new(Scope::new(scope).unwrap(), v7_at(start, n)), lease());
    let grant = first(&ledger, &of("known", 1)).await;
    let unknown = of("unknown", 1);
    assert!(is_fenced(super::kit::settle(&ledger, &unknown, &grant, done()).await));
    assert!(is_fenced(super::kit::extend(&ledger, &unknown, &grant, LEASE).await));
    assert!(matches!(intervene(&ledger, &unknown, Intervention::Kill).await, Err(Error::NotFound(_))));
    settled(&ledger, &of("known", 1), &grant, done()).await;
    harness.advance(DAY * 30).await;
    sweep(&ledger, DAY * 7).await;
    expect(&ledger, &of("known", 2), "too_old").await;
    expect(&ledger, &unknown, "claimed").await; // its scope begins now, after the drop
}

/// A dropped one is lost with its bytes, and its aggregate goes on past it. Only the dead can be dropped.
pub async fn order_drop_goes_on_past_the_dead_one(harness: &impl Harness) {
    let ledger = open(harness).await;
    let one_ = strict(1);
    let grant = first(&ledger, &one_).await;
    assert!(intervene(&ledger, &one_, Intervention::Drop).await.is_err());
    let verdict = Verdict::Dead { reason: "poison".into(), body: Some(body("dead")) };
    settled(&ledger, &one_, &grant, verdict).await;
    assert_eq!(one(&ledger, &held(strict(2))).await, Outcome::Parked { behind: 1 });
    let mut dry = intervening(&one_, Intervention::Drop);
    dry.dry_run = true;
    assert_eq!(ledger.intervene(&dry).await.unwrap().after.unwrap().state, State::Lost);
    assert_eq!(one(&ledger, &held(strict(2))).await, Outcome::Parked { behind: 1 });
    intervene(&ledger, &one_, Intervention::Drop).await.unwrap();
    let lost = there(&ledger, &one_).await;
    assert_eq!((lost.state, lost.row.body), (State::Lost, None));
    assert!(lost.row.reason.unwrap().contains("ada"));
    assert_eq!(ledger.audit(9).await.unwrap()[0].what, "drop");
    assert_eq!(due(&ledger).await, ["e2"]);
    run(&ledger, &strict(2)).await;
    assert_eq!(ledger.due(&scope(), &HeldQuery::all(), 9).await.unwrap().held, 0);
}

/// A skip lets an aggregate go on past the missing one it is parked behind; one that is not parked is refused.
pub async fn order_skip_by_hand_goes_on_past_a_gap(harness: &impl Harness) {
    let ledger = open(harness).await;
    run(&ledger, &strict(1)).await;
    assert_eq!(one(&ledger, &held(strict(3))).await, Outcome::Parked { behind: 2 });
    assert!(intervene(&ledger, &strict(3), Intervention::Skip).await.is_err(), "2 may still come");
    harness.advance(PAST_LEASE).await;
    assert_eq!(due(&ledger).await, ["e3"], "so that somebody notices the timeout");
    assert_eq!(one(&ledger, &held(strict(3))).await, Outcome::Parked { behind: 2 });
    assert!(due(&ledger).await.is_empty());
    let before = there(&ledger, &strict(3)).await.token;
    let after = intervene(&ledger, &strict(3), Intervention::Skip).await.unwrap().after.unwrap();
    assert!(after.token > before && after.state == State::Parked);
    assert_eq!(due(&ledger).await, ["e3"]);
    run(&ledger, &strict(3)).await;
    assert_eq!(one(&ledger, &strict(2)).await, Outcome::Stale { last: 3 });
}

/// A redrive of what the order has passed is refused, or by permission runs without order, however it is claimed.
pub async fn order_out_of_order_by_permission(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut five = latest(5);
    five.order.as_mut().unwrap().on_dead = crate::ledger::OnDead::Skip;
    let grant = first(&ledger, &five).await;
    settled(&ledger, &five, &grant, super::kit::dead()).await;
    run(&ledger, &latest(6)).await;
    let mut redrive = intervening(&five, Intervention::Redrive);
    assert!(matches!(ledger.intervene(&redrive).await, Err(Error::Conflict { .. })));
    redrive.out_of_order = true;
    assert_eq!(ledger.intervene(&redrive).await.unwrap().after.unwrap().order, None);
    run(&ledger, &another(&five)).await;
    expect(&ledger, &another(&five), "duplicate").await;
    assert_eq!(entry(&ledger, &five).await.unwrap().order, None);
    assert_eq!(one(&ledger, &latest(4)).await, Outcome::Stale { last: 6 });
}

/// Filters by aggregate, topic and partition.
pub async fn listing_filters_by_aggregate_and_origin(harness: &impl Harness) {
    let ledger = open(harness).await;
    let topic = Topic::new("orders").unwrap();
    run(&ledger, &latest(1)).await;
    run(&ledger, &Claim { origin: Some(Origin::new(topic.clone(), 3, 7)), ..claim("o", lease()) }).await;
    let count = async |filter: Filter| ledger.list(&filter, None, 9).await.unwrap().entries.len();
    let aggregate = latest(1).order.map(|order| order.aggregate);
    let by = Filter::default;
    assert_eq!(count(Filter { aggregate, ..by() }).await, 1);
    assert_eq!(count(Filter { topic: Some(topic.clone()), ..by() }).await, 1);
    assert_eq!(count(Filter { topic: Some(Topic::new("x").unwrap()), ..by() }).await, 0);
    assert_eq!(count(Filter { topic: Some(topic.clone()), partition: Some(3), ..by() }).await, 1);
    assert_eq!(count(Filter { topic: Some(topic), partition: Some(4), ..by() }).await, 0);
}

/// What is due and what is dead of other topics is not for whoever asks, and does not fill the page.
pub async fn held_events_of_other_topics_are_left(harness: &impl Harness) {
    let ledger = open(harness).await;
    let origin = |topic: &str| Some(Origin::new(Topic::new(topic).unwrap(), 0, 7));
    let from = [
        ("theirs", origin("other")),
        ("mine", origin("orders")),
        ("elsewhere", origin("else")),
        ("nowhere", None),
    ];
    for (id, origin) in from {
        expect(&ledger, &Claim { origin: origin.clone(), ..held(claim(id, failed())) }, "retry_later").await;
        let dead = with(claim(&format!("{id}, dead"), Mode::Refused), "dead");
        expect(&ledger, &Claim { origin, ..dead }, "dead").await;
        harness.advance(Duration::from_secs(1)).await;
    }
    harness.advance(LEASE).await;
    let of = |topics: &[&str]| HeldQuery {
        topics: Some(topics.iter().map(|topic| Topic::new(*topic).unwrap()).collect()),
        ..HeldQuery::all()
    };
    for (query, found) in [
        (of(&["orders"]), &["mine", "nowhere"][..]),
        (of(&["orders", "unknown"]), &["mine", "nowhere"]),
        (of(&["orders", "other"]), &["theirs", "mine", "nowhere"]),
        (of(&[]), &["nowhere"]),
        (HeldQuery::all(), &["theirs", "mine", "elsewhere", "nowhere"]),
    ] {
        let count = found.len();
        let mut due = ledger.due(&scope(), &query, count).await.unwrap();
        due.entries.sort_by_key(|entry| entry.at);
        assert_eq!(
            (ids(&due.entries), due.claimable),
            (found.iter().map(|id| (*id).to_owned()).collect(), count as u64)
        );
        let dead = ledger.unpublished_dead(&scope(), &query, count, None).await.unwrap();
        assert_eq!(ids(&dead), found.iter().map(|id| format!("{id}, dead")).collect::<Vec<_>>());
    }
    let dead = ledger.unpublished_dead(&scope(), &of(&["orders"]), 9, Some(LEASE)).await.unwrap();
    assert_eq!(ids(&dead), ["mine, dead", "nowhere, dead"]);
}

/// A dead event is for one copier at a time: what is reserved nobody else gets, until the time is over; then it comes after those
/// that nobody had. What was copied is never for anyone.
pub async fn a_reserved_dead_event_is_for_one_copier(harness: &impl Harness) {
    let ledger = open(harness).await;
    for n in 0..4 {
        expect(&ledger, &with(claim(&format!("dead-{n}"), Mode::Refused), "dead"), "dead").await;
        harness.advance(Duration::from_secs(1)).await;
    }
    let take = async |limit: usize| {
        ledger.unpublished_dead(&scope(), &HeldQuery::all(), limit, Some(LEASE)).await.unwrap()
    };
    let copied = |entry: &Entry| (entry.identity.clone(), entry.week, entry.token);
    let first = take(2).await;
    assert_eq!(ids(&first), ["dead-0", "dead-1"]);
    assert_eq!(ids(&take(1).await), ["dead-2"]);
    ledger.mark_dead_published(&[copied(&first[0])]).await.unwrap();
    harness.advance(PAST_LEASE).await;
    let looked = ledger.unpublished_dead(&scope(), &HeldQuery::all(), 9, None).await.unwrap();
    assert_eq!(looked.len(), 3, "a look sees what is reserved");
    let again = take(9).await;
    assert_eq!(ids(&again)[0], "dead-3", "what nobody had comes first");
    assert_eq!(again.len(), 3);
    assert!(take(9).await.is_empty());
    // Many at once: each is for one of them.
    harness.advance(PAST_LEASE).await;
    let (one, two, three) = tokio::join!(take(9), take(9), take(9));
    let mut all: Vec<_> = [one, two, three].iter().flat_map(|taken| ids(taken)).collect();
    all.sort();
    assert_eq!(all, ["dead-1", "dead-2", "dead-3"]);
    ledger.mark_dead_published(&again.iter().map(copied).collect::<Vec<_>>()).await.unwrap();
    harness.advance(PAST_LEASE).await;
    assert!(take(9).await.is_empty());
}
