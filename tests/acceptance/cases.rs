//! The acceptance list (docs/acceptance.md) on real Kafka and PostgreSQL, with real processes that are killed with SIGKILL, and an
//! effect record that the ledger knows nothing of.
#![cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::cluster;
use crate::support::postgres as support;
use crate::support::store;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use crate::support::world::{World, event, numbered, play, signal, until, world};
use hapax::ledger::{Claims as _, Intervene, Intervention, Operations as _, State};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_1_what_is_published_again_takes_effect_once() {
    let world = world!("acceptance_1_what_is_published_again_takes_effect_once", 3);
    let records: Vec<_> = (0..300).map(|n| event(&format!("e-{n}"))).collect();
    world.publish(&records).await;
    let _workers: Vec<_> = (0..3).map(|_| world.spawn(&[])).collect();
    world.until_effects(100).await;
    // A publisher that lost its checkpoint begins anew; another one lost the second half of it.
    world.publish(&records).await;
    world.publish(&records[150..]).await;
    until("everything committed", || async { world.committed().await == 750 }).await;
    assert_eq!(world.until_effects(300).await, 0);
}

/// A worker dies at each of the four points, and writes documents over HTTP. In a store that dedups on the key each is written
/// once. In one that does not, what was sent before the death is written again, and nothing else is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_2_a_worker_killed_at_four_points_repeats_nothing_a_sink_can_tell() {
    let test = "acceptance_2_a_worker_killed_at_four_points_repeats_nothing_a_sink_can_tell";
    play!();
    let mut cases = tokio::task::JoinSet::new();
    for dedups in [true, false] {
        for point in
            ["consumer.after-claim", "test.before-apply", "test.after-apply", "consumer.before-settle"]
        {
            cases.spawn(killed_at(test, dedups, point));
        }
    }
    for case in cases.join_all().await {
        println!("{case}");
    }
}

async fn killed_at(test: &'static str, dedups: bool, point: &'static str) -> String {
    let world = World::new(test, 1).await;
    let store = store::Store::new(dedups).await;
    let records: Vec<_> = (0..40).map(|n| event(&format!("e-{n}"))).collect();
    world.publish(&records).await;
    let knobs = [("WORKER_MODE", "leased"), ("WORKER_HTTP", store.url()), ("WORKER_LEASE_MS", "6000")];
    let crash = format!("{point}:5");
    let mut doomed = world.spawn(&[&knobs[..], &[("HAPAX_CRASH_AT", crash.as_str())]].concat());
    assert_eq!(doomed.wait().await.unwrap().signal(), Some(9), "{point}: it was to die");
    let _heir = world.spawn(&knobs);
    until("everything committed", || async { world.committed().await == 40 }).await;
    assert_eq!(world.entries(State::Done).await.len(), 40);
    assert_eq!(world.entries(State::Dead).await.len(), 0, "bystanders do not die");
    let (documents, again, doubled) = (store.documents(), store.sent_again(), store.doubled());
    let message = format!(
        "{point}, a store that {}: {documents} documents of 40 events, {again} sent again, {doubled} written again",
        if dedups { "dedups" } else { "does not dedup" },
    );
    assert_eq!(documents, 40, "{message}");
    // The one that died after its document was written is sent again, for sure; of the others no more than were in flight.
    let surely = usize::from(["test.after-apply", "consumer.before-settle"].contains(&point));
    assert!((surely..=16).contains(&again), "{message}");
    assert_eq!(doubled, if dedups { 0 } else { again }, "{message}");
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_3_a_projection_killed_at_three_points_projects_once() {
    let test = "acceptance_3_a_projection_killed_at_three_points_projects_once";
    play!();
    let mut cases = tokio::task::JoinSet::new();
    for point in ["test.before-apply:7", "test.after-apply:7", "consumer.before-commit:1"] {
        cases.spawn(projection_killed_at(test, point));
    }
    cases.join_all().await;
}

async fn projection_killed_at(test: &'static str, point: &'static str) {
    let world = World::new(test, 1).await;
    let records: Vec<_> =
        (1..=60).map(|n| numbered(&format!("e-{n}"), &format!("doc-{}", n % 7), n)).collect();
    world.publish(&records).await;
    let mut doomed = world.spawn(&[("WORKER_ORDER", "latest"), ("HAPAX_CRASH_AT", point)]);
    assert!(!doomed.wait().await.unwrap().success(), "{point}: it was to die");
    let _heir = world.spawn(&[("WORKER_ORDER", "latest")]);
    assert_eq!(world.until_effects(60).await, 0, "{point}");
    until("everything committed", || async { world.committed().await == 60 }).await;
    let order = world.effect_order().await;
    for doc in 0..7 {
        let of: Vec<u64> = order.iter().map(|id| id[2..].parse().unwrap()).filter(|n| n % 7 == doc).collect();
        assert!(of.is_sorted(), "{point}: {of:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_4_shuffled_numbers_are_stale_or_in_order() {
    let world = world!("acceptance_4_shuffled_numbers_are_stale_or_in_order", 1);
    let mut random = support::Random::new();
    let mut records: Vec<_> = (1..=50).map(|n| numbered(&format!("e-{n:02}"), "order-1", n)).collect();
    random.shuffle(&mut records);
    world.publish(&records).await;
    let _worker = world.spawn(&[("WORKER_ORDER", "latest")]);
    until("everything committed", || async { world.committed().await == 50 }).await;
    let order = world.effect_order().await;
    assert!(order.is_sorted(), "never backwards: {order:?}");
    let stale = world.entries(State::Stale).await.len();
    println!("{} took effect in order, {stale} were stale", order.len());
    assert_eq!(order.len() + stale, 50, "each is one or the other, and recorded");
    assert_eq!(order.last().map(String::as_str), Some("e-50"));
}

/// Two groups of one scope: every event is delivered to both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_5_of_two_that_receive_the_same_event_one_claims_it() {
    let world = world!("acceptance_5_of_two_that_receive_the_same_event_one_claims_it", 2);
    let records: Vec<_> = (0..200).map(|n| event(&format!("e-{n}"))).collect();
    let _first =
        world.spawn(&[("WORKER_MODE", "leased"), ("WORKER_SINK", "plain"), ("WORKER_GROUP", "worker")]);
    let _second =
        world.spawn(&[("WORKER_MODE", "leased"), ("WORKER_SINK", "plain"), ("WORKER_GROUP", "other")]);
    world.publish(&records).await;
    assert_eq!(world.until_effects(200).await, 0, "not even with a sink that does not dedup");
    until("both are through", || async {
        let mut other = 0;
        for number in 0..2 {
            let partition = hapax::bus::Partition { topic: world.topic.clone(), number };
            other += hapax::bus::Bus::committed(&world.bus, "other", &partition).await.unwrap().unwrap_or(0);
        }
        world.committed().await == 200 && other == 200
    })
    .await;
    assert_eq!(world.until_effects(200).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_6_failures_are_retried_then_dead_and_a_person_brings_them_back() {
    let world = world!("acceptance_6_failures_are_retried_then_dead_and_a_person_brings_them_back", 1);
    world.publish(&[event("good-1"), event("poison-1"), event("fatal-1"), event("good-2")]).await;
    let worker = world.spawn(&[("WORKER_MODE", "leased")]);
    until("both dead", || async { world.entries(State::Dead).await.len() == 2 }).await;
    let mut dead = world.entries(State::Dead).await;
    dead.sort_by_key(|entry| entry.identity.id.to_string());
    assert_eq!((dead[0].attempts, dead[1].attempts), (1, 5), "fatal at once, poison after five runs");
    assert_eq!(world.until_effects(2).await, 0);
    // The dead-letter topic has a copy of each.
    let dead_topic = hapax::Topic::new(format!("{}.dead", world.topic.as_str())).unwrap();
    let partition = hapax::bus::Partition { topic: dead_topic, number: 0 };
    until("copies", || async {
        hapax::bus::Bus::range(&world.bus, &partition).await.is_ok_and(|(_, end)| end == 2)
    })
    .await;
    // Redriven while still broken: dead again, with a fresh count.
    let redrive = Intervene {
        identity: dead[1].identity.clone(),
        time: None,
        what: Intervention::Redrive,
        by: "operator".into(),
        reason: "thought it was mended".into(),
        dry_run: false,
        out_of_order: false,
        token: None,
    };
    world.ledger.intervene(&redrive).await.unwrap();
    until("dead again", || async {
        let entry = world.ledger.get(&dead[1].identity, None).await.unwrap().unwrap();
        entry.state == State::Dead && entry.token > dead[1].token && entry.attempts == 5
    })
    .await;
    signal(&worker, "TERM");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_7_aggregates_that_look_alike_do_not_meet() {
    let world = world!("acceptance_7_aggregates_that_look_alike_do_not_meet", 2);
    let alike = [
        "order 1",
        "order%201",
        "Order 1",
        "order 1 ",
        " order 1",
        "order/1",
        "order\u{a0}1",
        "o\u{308}rder",
        "\u{f6}rder",
    ];
    let records: Vec<_> =
        alike.iter().enumerate().map(|(n, aggregate)| numbered(&format!("e-{n}"), aggregate, 1)).collect();
    world.publish(&records).await;
    let _worker = world.spawn(&[("WORKER_ORDER", "latest")]);
    assert_eq!(world.until_effects(alike.len()).await, 0);
    assert!(world.entries(State::Stale).await.is_empty(), "none overtook another");
}

/// The ledger goes away (SIGKILL) and comes back, under each policy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_8_an_outage_of_the_ledger_is_explicit() {
    let test = "acceptance_8_an_outage_of_the_ledger_is_explicit";
    play!();
    let mut cases = tokio::task::JoinSet::new();
    for policy in ["pause", "fail_fast", "dead_letter"] {
        cases.spawn(outage(test, policy));
    }
    for case in cases.join_all().await {
        println!("{case}");
    }
}

async fn outage(test: &'static str, policy: &'static str) -> String {
    let mut server = cluster::Cluster::new().await;
    let world = World::on(test, 2, server.url()).await;
    let records: Vec<_> = (0..100).map(|n| event(&format!("e-{n}"))).collect();
    let mut worker = world.spawn(&[("WORKER_OUTAGE", policy)]);
    world.publish(&records[..50]).await;
    world.until_effects(50).await;
    until("committed", || async { world.committed().await == 50 }).await;
    server.kill();
    world.publish(&records[50..]).await;
    match policy {
        "fail_fast" => {
            let status = tokio::time::timeout(Duration::from_secs(120), worker.wait()).await;
            assert_eq!(status.expect("it ends").unwrap().code(), Some(3));
            server.start().await;
            worker = world.spawn(&[]); // whoever supervises it starts it again
        }
        "dead_letter" => {
            until("committed without a ledger", || async { world.committed().await == 100 }).await;
            server.start().await;
            let dead = hapax::Topic::new(format!("{}.dead", world.topic.as_str())).unwrap();
            let mut copies = 0;
            for number in 0..2 {
                let partition = hapax::bus::Partition { topic: dead.clone(), number };
                copies += hapax::bus::Bus::range(&world.bus, &partition).await.unwrap().1;
            }
            assert_eq!(copies, 50, "each of them is in the dead letters");
            assert_eq!(world.effect_counts().await.len(), 50);
            return format!("{policy}: 50 took effect, 50 in the dead letters");
        }
        _ => server.start().await,
    }
    assert_eq!(world.until_effects(100).await, 0, "{policy}");
    until("the offsets move again", || async { world.committed().await == 100 }).await;
    drop(worker);
    format!("{policy}: 100 of 100 took effect once")
}
