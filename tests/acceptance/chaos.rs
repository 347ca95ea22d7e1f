//! Consumers through kills, stops, rebalances and outages: real processes, real Kafka, real PostgreSQL, and an effect record that the
//! ledger knows nothing of. In each: nothing lost, nothing doubled, order kept; the counts are printed.
#![cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::cluster;
use crate::support::world;
use std::future::Future;
use std::time::Duration;

use crate::support::world::{World, event, numbered, play, record, signal, until, world};
use hapax::Event;
use hapax::consumer::Failed;
use hapax::guard::Run;
use hapax::ledger::{ConsumerStore as _, HeldQuery, Intervene, Intervention, Operations as _, State};

/// An event that aborts its process reaches the dead letters, and its 63 neighbours take effect: in a transactional batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t22_an_event_that_aborts_the_process_is_dead_and_its_neighbours_are_not() {
    let world = world!("t22_an_event_that_aborts_the_process_is_dead_and_its_neighbours_are_not", 1);
    let mut records: Vec<_> = (0..63).map(|n| event(&format!("e-{n}"))).collect();
    records.insert(20, event("abort-1"));
    world.publish(&records).await;
    let deaths = keep_alive(&world, &[("WORKER_LEASE_MS", "900")], || async {
        world.entries(State::Dead).await.len() == 1 && world.effect_counts().await.len() == 63
    })
    .await;
    let dead = world.entries(State::Dead).await;
    println!(
        "63 took effect, the killer is dead after {} counted runs and {deaths} deaths",
        dead[0].attempts
    );
    assert_eq!(dead[0].identity.id.to_string(), "abort-1");
    assert_eq!(world.until_effects(63).await, 0);
    assert_eq!(dead[0].body.as_ref().unwrap().payload.as_deref().unwrap(), br#"{"event_id":"abort-1"}"#);
    // It was deaths alone that counted: five; and those that narrowed it down.
    assert!((5..=9).contains(&deaths), "{deaths}");
}

/// The same under leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t22_a_leased_event_that_aborts_the_process_is_dead_and_its_neighbours_are_not() {
    let world = world!("t22_a_leased_event_that_aborts_the_process_is_dead_and_its_neighbours_are_not", 1);
    let mut records: Vec<_> = (0..30).map(|n| event(&format!("e-{n}"))).collect();
    records.insert(7, event("abort-1"));
    world.publish(&records).await;
    let knobs = [("WORKER_MODE", "leased"), ("WORKER_LEASE_MS", "900")];
    let deaths = keep_alive(&world, &knobs, || async {
        world.entries(State::Dead).await.len() == 1 && world.effect_counts().await.len() == 30
    })
    .await;
    println!("30 took effect, the killer is dead after {deaths} deaths");
    assert_eq!(world.until_effects(30).await, 0, "the sink dedups on the key");
    assert_eq!(world.entries(State::Done).await.len(), 30);
}

/// Three members of a group, and 120 events that all die: each is copied to the dead letters once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_of_three_on_kafka_copies_each_dead_letter_once() {
    let world = world!("a_group_of_three_on_kafka_copies_each_dead_letter_once", 6);
    let mut members = Vec::new();
    for _ in 0..3 {
        let builder = world::builder(world.bus.clone(), world.ledger.clone(), world.topic.as_str());
        let consumer = builder
            .with(|settings| {
                // Nothing moves, and nobody copies what another one copies, however slow the machine is.
                settings.session_timeout = Duration::from_secs(60);
                settings.dead_reserve = Duration::from_hours(1);
            })
            .build()
            .unwrap();
        let handle = consumer.handle();
        let fail = |_: &Event, _: &Run| async { Err(Failed::fatal("no")) };
        members.push((handle, tokio::spawn(consumer.leased(fail))));
    }
    until("two partitions each", || async { members.iter().all(|(of, _)| of.progress().partitions == 2) })
        .await;
    world.publish(&(0..120).map(|n| event(&format!("e-{n}"))).collect::<Vec<_>>()).await;
    let scope = hapax::Scope::new("worker").unwrap();
    until("all dead and copied", || async {
        world.entries(State::Dead).await.len() == 120
            && world.ledger.unpublished_dead(&scope, &HeldQuery::all(), 1, None).await.unwrap().is_empty()
    })
    .await;
    for (handle, running) in members {
        handle.stop();
        running.await.unwrap().unwrap();
    }
    assert_eq!(world.copies().await, 120);
}

/// Restarts a worker whenever it dies, until a state is reached; says how often it died.
async fn keep_alive<F: Future<Output = bool>>(
    world: &World,
    knobs: &[(&str, &str)],
    mut is: impl FnMut() -> F,
) -> u32 {
    let mut deaths = 0;
    let mut worker = world.spawn(knobs);
    let end = tokio::time::Instant::now() + Duration::from_secs(180);
    while !is().await {
        assert!(tokio::time::Instant::now() < end, "never came, after {deaths} deaths");
        if worker.try_wait().unwrap().is_some() {
            deaths += 1;
            worker = world.spawn(knobs);
        }
        // How often the state and the worker are looked at; nothing wakes whoever waits for both.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    deaths
}

/// A stopped process (SIGSTOP) past its lease and its session: others do its work, and when it wakes up it settles nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t20_a_stopped_worker_settles_nothing_when_it_wakes_up() {
    let test = "t20_a_stopped_worker_settles_nothing_when_it_wakes_up";
    play!();
    let mut cases = tokio::task::JoinSet::new();
    for mode in ["leased", "transactional"] {
        cases.spawn(async move {
            let world = World::new(test, 2).await;
            let knobs = [("WORKER_MODE", mode), ("WORKER_LEASE_MS", "1500"), ("WORKER_SLOW_MS", "100")];
            let sleeper = world.spawn(&knobs);
            let records: Vec<_> = (0..100).map(|n| event(&format!("e-{n}"))).collect();
            world.publish(&records).await;
            until("it is at work", || async {
                !world.entries(State::Done).await.is_empty() || !world.entries(State::Leased).await.is_empty()
            })
            .await;
            signal(&sleeper, "STOP");
            let _other = world.spawn(&knobs);
            until("the other has done all", || async { world.effect_counts().await.len() == 100 }).await;
            signal(&sleeper, "CONT");
            until("everything committed", || async { world.committed().await == 100 }).await;
            let doubled = world.until_effects(100).await;
            println!("{mode}: 100 of 100, {doubled} repeated");
            assert_eq!(doubled, 0);
            assert_eq!(world.entries(State::Done).await.len(), 100);
        });
    }
    cases.join_all().await;
}

/// Three processes, restarted one after the other under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_under_load_loses_and_doubles_nothing() {
    let world = world!("a_rolling_restart_under_load_loses_and_doubles_nothing", 6);
    let mut workers: Vec<_> = (0..3).map(|_| world.spawn(&[("WORKER_ORDER", "latest")])).collect();
    let mut published = 0u64;
    let mut warm = 0;
    until("all three are at work", || {
        warm += 1;
        let record = event(&format!("warm-{warm}"));
        let world = &world;
        async move {
            world.publish(&[record]).await;
            world.workers().await == 3
        }
    })
    .await;
    for (round, worker) in workers.iter_mut().enumerate() {
        let records: Vec<_> = (0..200)
            .map(|_| {
                published += 1;
                let aggregate = published % 20;
                numbered(&format!("{aggregate}-{published:04}"), &format!("a-{aggregate}"), published)
            })
            .collect();
        world.publish(&records[..100]).await;
        let mut leaving = std::mem::replace(worker, world.spawn(&[("WORKER_ORDER", "latest")]));
        if round == 1 {
            signal(&leaving, "KILL");
        } else {
            signal(&leaving, "TERM");
        }
        world.publish(&records[100..]).await;
        let status =
            tokio::time::timeout(Duration::from_secs(120), leaving.wait()).await.expect("it ends").unwrap();
        assert_eq!(status.success(), round != 1);
    }
    let all = 600 + warm;
    assert_eq!(world.until_effects(all).await, 0);
    until("everything committed", || async { world.committed().await == i64::try_from(all).unwrap() }).await;
    let order = world.effect_order().await;
    for aggregate in 0..20 {
        let prefix = format!("{aggregate}-");
        let of: Vec<_> = order.iter().filter(|id| id.starts_with(&prefix)).collect();
        assert!(of.is_sorted() && of.len() == 30, "{of:?}");
    }
}

/// PostgreSQL killed with -9 and restarted under load, three times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t36_postgres_killed_under_load_loses_and_doubles_nothing() {
    let test = "t36_postgres_killed_under_load_loses_and_doubles_nothing";
    play!();
    let mut server = cluster::Cluster::new().await;
    let world = World::on(test, 3, server.url()).await;
    let workers = [world.spawn(&[]), world.spawn(&[("WORKER_MODE", "leased")])];
    for round in 0..3 {
        let records: Vec<_> = (0..200).map(|n| event(&format!("e-{round}-{n}"))).collect();
        world.publish(&records).await;
        until("some of it is done", || async { world.effect_counts().await.len() > round * 200 }).await;
        server.kill();
        server.start().await;
    }
    let doubled = world.until_effects(600).await;
    until("the offsets move again", || async { world.committed().await == 600 }).await;
    println!("600 of 600 after three kills of the ledger, {doubled} repeated");
    assert_eq!(doubled, 0);
    drop(workers);
}

/// A rebalance during a backoff does not shorten it, and seq 11 does not overtake seq 10 that is waiting for its retry elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t23_a_backoff_survives_a_rebalance_and_holds_back_its_successor() {
    let world = world!("t23_a_backoff_survives_a_rebalance_and_holds_back_its_successor", 1);
    let json = |id: &str, seq: u64| {
        record(Some("a"), serde_json::json!({"event_id": id, "aggregate_id": "a", "seq": seq}))
    };
    let knobs = [("WORKER_ORDER", "latest"), ("WORKER_MODE", "leased"), ("WORKER_BACKOFF_MS", "900")];
    let mut first = world.spawn(&knobs);
    world.publish(&[json("poison-10", 10)]).await;
    // Seen in one look: on a busy machine the retry may be running again a moment later.
    let due = std::sync::Mutex::new(None);
    until("in backoff", || async {
        let first = world.entries(State::Retry).await.first().map(|entry| entry.at);
        *due.lock().unwrap() = first;
        first.is_some()
    })
    .await;
    let due = due.into_inner().unwrap().unwrap();
    signal(&first, "KILL");
    first.wait().await.unwrap();
    world.publish(&[json("e-11", 11)]).await;
    let _second = world.spawn(&knobs);
    until("the head is dead", || async { !world.entries(State::Dead).await.is_empty() }).await;
    let dead = world.entries(State::Dead).await.remove(0);
    assert!(dead.at > due && dead.attempts == 5, "the stored time was kept, and the runs were counted on");
    until("its successor is parked", || async { world.entries(State::Parked).await.len() == 1 }).await;
    assert!(world.effect_counts().await.is_empty(), "nothing overtook it");
    // One command away from going on: past the dead one.
    let skip = Intervene {
        identity: world.entries(State::Parked).await[0].identity.clone(),
        time: None,
        what: Intervention::Skip,
        by: "operator".into(),
        reason: "10 is beyond repair".into(),
        dry_run: false,
        out_of_order: false,
        token: None,
    };
    world.ledger.intervene(&skip).await.unwrap();
    assert_eq!(world.until_effects(1).await, 0);
}

/// Behind a dead head an aggregate is parked, and records that cannot be read lie between: all of them are dead letters, with their
/// bytes. When the head is redriven while new events arrive, everything runs in order, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t24_a_parked_aggregate_is_redriven_while_new_events_arrive() {
    let world = world!("t24_a_parked_aggregate_is_redriven_while_new_events_arrive", 1);
    let dir = tempfile::tempdir().unwrap();
    let mended = dir.path().join("mended");
    // So long that nobody sees the end of it: one that waited for what is queued behind it, until it is held, would wait for ever.
    let hold = ("WORKER_HOLD_MS", "600000");
    let _worker =
        world.spawn(&[("WORKER_ORDER", "latest"), ("WORKER_MENDED", mended.to_str().unwrap()), hold]);
    let one = |n: u64| numbered(&format!("{}-{n}", if n == 2 { "broken" } else { "e" }), "order-1", n);
    let mut records: Vec<_> = (1..=6).map(one).collect();
    let garbage = b"\x00\xff{nope";
    records.insert(4, record(Some("order-1"), serde_json::json!({"no": "id"})));
    records.insert(6, hapax::bus::Record { payload: Some(garbage[..].into()), ..one(0) });
    world.publish(&records).await;
    until("it is through with them", || world.is_through()).await;
    let (dead, parked) = (world.entries(State::Dead).await, world.entries(State::Parked).await);
    assert_eq!((dead.len(), parked.len()), (3, 4));
    assert!(
        dead.iter().any(|entry| entry.body.as_ref().unwrap().payload.as_deref() == Some(&garbage[..])),
        "as they came"
    );
    until("each has a copy", || async { world.copies().await == 3 }).await;

    std::fs::write(&mended, "").unwrap();
    let head = dead.iter().find(|entry| entry.identity.id.to_string() == "broken-2").unwrap();
    let redrive = Intervene {
        identity: head.identity.clone(),
        time: None,
        what: Intervention::Redrive,
        by: "operator".into(),
        reason: "mended".into(),
        dry_run: false,
        out_of_order: false,
        token: None,
    };
    for n in 7..=30 {
        world.publish(&[one(n)]).await;
        if n == 12 {
            world.ledger.intervene(&redrive).await.unwrap();
        }
    }
    assert_eq!(world.until_effects(30).await, 0);
    until("the offsets follow", || world.is_through()).await;
    let order: Vec<u64> =
        world.effect_order().await.iter().map(|id| id.rsplit_once('-').unwrap().1.parse().unwrap()).collect();
    assert_eq!(order, (1..=30).collect::<Vec<_>>(), "in order, each once");
    assert_eq!((world.entries(State::Parked).await.len(), world.entries(State::Dead).await.len()), (0, 2));
    println!("30 of 30 in order, 4 of them parked before; 2 that cannot be read are dead, 3 copies");
}

/// SIGTERM while handlers run: they finish, offsets are committed, nothing runs again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_drains_and_what_it_did_is_not_run_again() {
    let world = world!("a_stop_drains_and_what_it_did_is_not_run_again", 2);
    let records: Vec<_> = (0..200).map(|n| event(&format!("e-{n}"))).collect();
    world.publish(&records).await;
    // With a lease that no busy machine loses: what runs again under another one would take effect again.
    let lease = ("WORKER_LEASE_MS", "60000");
    let knobs = [("WORKER_MODE", "leased"), ("WORKER_SINK", "plain"), ("WORKER_SLOW_MS", "50"), lease];
    let mut worker = world.spawn(&knobs);
    until("it is at work", || async { world.effect_counts().await.len() > 10 }).await;
    signal(&worker, "TERM");
    let status =
        tokio::time::timeout(Duration::from_secs(120), worker.wait()).await.expect("it drains").unwrap();
    assert!(status.success());
    assert!(world.entries(State::Leased).await.is_empty(), "nothing is left in its hands");
    let _next = world.spawn(&knobs);
    assert_eq!(world.until_effects(200).await, 0, "not even with a sink that does not dedup");
}
