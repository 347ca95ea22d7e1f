//! Steps of the pipeline done wrong on purpose: the scenarios here hold, and each mutant is caught by one of them.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Partition, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, Failed};
use hapax::guard::Run;
use hapax::ledger::{Intervene, Intervention, Operations as _};
use hapax::{Event, Topic};

const COMMIT_INTERVAL: Duration = Duration::from_millis(5);

async fn consumer(
    ids: &[String],
    key: Option<&'static str>,
) -> (Arc<MemoryBus>, ConsumerBuilder<MemoryLedger>) {
    consumer_on(MemoryLedger::default(), ids, key).await
}

async fn consumer_on(
    ledger: MemoryLedger,
    ids: &[String],
    key: Option<&'static str>,
) -> (Arc<MemoryBus>, ConsumerBuilder<MemoryLedger>) {
    let bus = Arc::new(MemoryBus::default());
    let topic = Topic::new("orders").unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    for id in ids {
        let payload = serde_json::json!({"event_id": id}).to_string();
        let record = Record { key: key.map(Into::into), payload: Some(payload.into()), ..Record::default() };
        bus.publish(&topic, &[record]).await.unwrap();
    }
    let builder = Consumer::builder(bus.clone(), ledger).scope("mailer").topic("orders");
    (bus, builder.with(|settings| settings.commit_interval = COMMIT_INTERVAL))
}

/// The first of ten never ends: whatever else is done, the group stays before it.
#[tokio::test(start_paused = true)]
async fn the_committed_offset_stays_before_what_is_unfinished() {
    let ids: Vec<_> = (0..10).map(|n| format!("e-{n}")).collect();
    let (bus, builder) = consumer(&ids, None).await;
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(async |event: &Event, _: &Run| {
        if event.id.to_string() == "e-0" { std::future::pending().await } else { Ok(()) }
    }));
    let partition = Partition { topic: Topic::new("orders").unwrap(), number: 0 };
    let stays = || async {
        let committed = bus.committed("mailer", &partition).await.unwrap();
        assert!(
            committed.is_none_or(|committed| committed == 0),
            "committed {committed:?} past an unfinished event"
        );
    };
    while handle.progress().passed.get("done") != Some(&9) {
        stays().await;
        tokio::task::yield_now().await;
    }
    // Time goes on only when nobody has anything to do: it has committed what it has many times by then.
    tokio::time::sleep(COMMIT_INTERVAL * 100).await;
    stays().await;
    handle.stop_now();
    running.await.unwrap().unwrap();
}

/// Fifty of one key, each slower than the next: they run in order all the same.
#[tokio::test]
async fn one_key_runs_in_order() {
    let ids: Vec<_> = (0..50).map(|n| format!("e-{n:02}")).collect();
    let (_, builder) = consumer(&ids, Some("k")).await;
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    consumer
        .leased(move |event: &Event, _: &Run| {
            let event = event.clone();
            let (log, handle) = (Arc::clone(&log), handle.clone());
            async move {
                let id = event.id.to_string();
                // The later an event, the shorter its handler: without an order the later ones would be first.
                tokio::time::sleep(Duration::from_millis(50 - id[2..].parse::<u64>()?)).await;
                let mut log = log.lock().unwrap();
                log.push(id);
                if log.len() == 50 {
                    handle.stop();
                }
                Ok(())
            }
        })
        .await
        .unwrap();
    assert_eq!(*seen.lock().unwrap(), ids);
}

/// A run that was taken away fails for good, and is no longer the one who may say so: the run after it succeeds, and no copy ever
/// says that the event is dead.
#[tokio::test]
async fn the_dead_letters_have_only_what_is_dead() {
    let ledger = MemoryLedger::default();
    let (bus, builder) = consumer_on(ledger.clone(), &["e-0".into()], None).await;
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(move |_: &Event, run: &Run| {
        let run = run.clone();
        let ledger = ledger.clone();
        async move { if take_away(&ledger, &run).await { Err(Failed::fatal("broken")) } else { Ok(()) } }
    }));
    while handle.progress().passed.get("done") != Some(&1) {
        tokio::task::yield_now().await;
    }
    handle.stop();
    running.await.unwrap().unwrap();
    let dead = Partition { topic: Topic::new("orders.dead").unwrap(), number: 0 };
    assert_eq!(bus.range(&dead).await.unwrap(), (0, 0), "a copy of what is not dead");
}

/// Takes the first run of an event away from under it, as an operator can; says whether it did.
async fn take_away(ledger: &MemoryLedger, run: &Run) -> bool {
    static TAKEN: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let first = !TAKEN.swap(true, std::sync::atomic::Ordering::SeqCst);
    if first {
        let release = Intervene {
            identity: run.key().clone(),
            time: None,
            what: Intervention::Release,
            by: "operator".into(),
            reason: "it hangs".into(),
            dry_run: false,
            out_of_order: false,
            token: None,
        };
        ledger.intervene(&release).await.unwrap();
    }
    first
}

/// Each mutant makes one of the scenarios fail; without one they pass.
#[test]
fn mutants_are_caught() {
    let runs = |scenario: &str, mutant: &str| {
        let mut command = crate::support::this::test(scenario);
        command.env("HAPAX_MUTANT", mutant);
        command.output().unwrap().status.success()
    };
    for (scenario, mutants) in [
        (
            "the_committed_offset_stays_before_what_is_unfinished",
            &["commit point past an unfinished event", "commit before settle"][..],
        ),
        ("one_key_runs_in_order", &["claim before order"]),
        ("the_dead_letters_have_only_what_is_dead", &["publish before mark"]),
        (
            "t250_a_member_does_not_copy_a_letter_again_that_it_still_has_under_way",
            &["copy what is under way"],
        ),
    ] {
        assert!(runs(scenario, "none"), "{scenario} holds");
        for mutant in mutants {
            assert!(!runs(scenario, mutant), "{scenario} does not notice: {mutant}");
        }
    }
}
