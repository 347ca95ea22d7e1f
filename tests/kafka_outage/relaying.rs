//! The broker is killed (kill -9) under a relay and comes back: nobody is behind, nothing is missing, and the log has two lines about it.
#![cfg(all(feature = "testing", feature = "kafka"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hapax::bus::{Bus, TopicSettings};
use hapax::journal::{Append, Expected, Journal, MemoryJournal, Position};
use hapax::relay::{Relay, RelaySettings};
use hapax::testing::kafka::{connect, settings};
use hapax::testing::relay::{read_topic, witness};
use hapax::{Aggregate, Event, EventId, RelayName, Topic};

/// How long the broker is away.
fn away() -> Duration {
    let seconds = std::env::var("HAPAX_TEST_OUTAGE_S").ok().map(|text| text.parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(30))
}

async fn services(command: &'static str) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/services");
    let run = tokio::task::spawn_blocking(move || Command::new(script).args([command, "kafka"]).status());
    assert!(run.await.unwrap().expect("scripts/services runs").success(), "scripts/services {command} kafka");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_gone_for_a_while_leaves_nobody_behind() {
    let _broker = crate::BROKER.lock().await;
    let mut settings = settings();
    settings.publish_timeout = Duration::from_secs(4); // several tries while it is away
    let bus = Arc::new(connect(settings).await);
    let topic = Topic::new(format!("t-{}", uuid::Uuid::new_v4().simple())).unwrap();
    bus.create_topic(&topic, TopicSettings::new(3)).await.unwrap();
    let journal = Arc::new(MemoryJournal::default());
    let mut settings = RelaySettings::new(RelayName::new("main").unwrap(), topic.clone());
    settings.flush_timeout = Duration::from_secs(1);
    let relay = Relay::new(journal.clone(), bus.clone(), settings).unwrap();
    let handle = relay.handle();
    let running = tokio::spawn(relay.run());
    let (enough, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let writer = tokio::spawn({
        let (journal, enough, count) = (journal.clone(), enough.clone(), count.clone());
        async move {
            while !enough.load(Ordering::SeqCst) {
                for n in 0..10 {
                    let event = Event::new(EventId::now_v7()).payload("{}");
                    let aggregate = Aggregate::new(format!("a{n}")).unwrap();
                    let _ = journal.append(&Append::new(aggregate, Expected::Any, [event])).await.unwrap();
                }
                count.fetch_add(10, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    });
    let until = async |what: &str, is: &dyn Fn() -> bool| {
        let end = tokio::time::Instant::now() + Duration::from_secs(120);
        while !is() {
            assert!(tokio::time::Instant::now() < end, "never came: {what}: {:?}", handle.progress());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    until("it runs", &|| handle.progress().published > 500).await;
    services("kill").await;
    until("it is noticed", &|| handle.progress().outages >= 1).await;
    tokio::time::sleep(away()).await; // the outage itself
    let lag = handle.progress().lag;
    assert!(lag > away() / 2, "{lag:?}");
    services("up").await;
    until("it goes on", &|| handle.progress().lag < Duration::from_secs(1)).await;
    enough.store(true, Ordering::SeqCst);
    writer.await.unwrap();
    let all = count.load(Ordering::SeqCst);
    let is_all = || handle.progress().position == Position::of(all as u64) && handle.progress().behind == 0;
    until("everything", &is_all).await;
    handle.stop();
    let progress = running.await.unwrap().unwrap();
    // One that comes back may answer once and fail again while it is still loading.
    assert!(progress.behind == 0 && (1..=5).contains(&progress.outages), "{progress:?}");
    let found = witness(&read_topic(&*bus, &topic).await).unwrap_or_else(|problem| panic!("{problem}"));
    println!("{} events, {} repeats, the broker away for {:?}", found.events, found.repeats, away());
    assert_eq!(found.events, all);
    assert!(found.repeats as u64 <= (1 + progress.outages) * 200, "{} repeats", found.repeats);
}
