//! Dead letters on their way to their topics, and back: nothing healthy copies one twice, and a redriven one keeps its bytes.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::gated::Gated;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::clock::ManualClock;
use hapax::consumer::{Consumer, ConsumerBuilder, Failed};
use hapax::guard::Run;
use hapax::id::{IdChain, IdSource};
use hapax::ledger::{
    Claims as _, ConsumerStore as _, Entry, HeldQuery, Identity, Intervene, Intervention, Operations as _,
    Settings, State,
};
use hapax::{Error, Event, EventId, Guard, Headers, Outcome, Scope, Time, Topic};

fn consumer(
    bus: Arc<dyn Bus>,
    ledger: &Arc<MemoryLedger>,
    topics: &[&str],
) -> ConsumerBuilder<Arc<MemoryLedger>> {
    let mut builder = Consumer::builder(bus, Arc::clone(ledger)).scope("mailer");
    for topic in topics {
        builder = builder.topic(*topic);
    }
    builder.with(|settings| {
        settings.held_interval = Duration::from_millis(5);
        // Nobody copies what another one copies, however slow the machine is.
        settings.dead_reserve = Duration::from_mins(10);
    })
}

/// Waits for a state, never for a time.
async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let end = tokio::time::Instant::now() + Duration::from_secs(120);
    while !is().await {
        assert!(tokio::time::Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn publish(bus: &dyn Bus, topic: &str, id: &str) {
    let record = Record {
        key: Some(id.to_owned().into()),
        payload: Some("{}".into()),
        headers: Headers::from_iter([("idempotency_key", id.to_owned())]),
        ..Record::default()
    };
    bus.publish(&Topic::new(topic).unwrap(), &[record]).await.unwrap().remove(0).unwrap();
}

async fn broken(_: &Event, _: &Run) -> Result<(), Failed> {
    Err(Failed::fatal("no"))
}

/// One event of each topic is dead before anybody copies, so that they are reserved together.
async fn die_together(bus: &Arc<Gated>, ledger: &Arc<MemoryLedger>, topics: &[&str]) {
    let first =
        consumer(bus.clone(), ledger, topics).with(|settings| settings.dead_topic = Some(String::new()));
    let first = first.build().unwrap();
    let handle = first.handle();
    let running = tokio::spawn(first.leased(broken));
    for topic in topics {
        publish(&**bus, topic, &format!("of-{topic}")).await;
    }
    until("all are dead", async || unpublished(ledger).await == topics.len()).await;
    handle.stop();
    running.await.unwrap().unwrap();
}

async fn unpublished(ledger: &MemoryLedger) -> usize {
    let scope = Scope::new("mailer").unwrap();
    ledger.unpublished_dead(&scope, &HeldQuery::all(), 99, None).await.unwrap().len()
}

/// Dead letters of several topics, none of which answers, are under way at the same time: no topic uses up the time for which the
/// letters of the next are reserved.
#[tokio::test]
async fn t117_dead_letters_of_several_slow_topics_do_not_wait_for_each_other() {
    let topics = ["a", "b", "c"];
    let bus = Gated::shut(&topics).await;
    let ledger = Arc::new(MemoryLedger::default());
    die_together(&bus, &ledger, &topics).await;

    let mut members = Vec::new();
    for _ in 0..2 {
        let member = consumer(bus.clone(), &ledger, &topics).build().unwrap();
        members.push((member.handle(), tokio::spawn(member.leased(broken))));
    }
    until("all topics are asked", async || bus.under_way() == topics.len()).await;
    bus.open();
    until("all are noted", async || unpublished(&ledger).await == 0).await;
    for (handle, running) in members {
        handle.stop();
        running.await.unwrap().unwrap();
    }
    for topic in topics {
        assert_eq!(bus.copies(topic).await, 1, "{topic}");
    }
}

/// A copy to one topic panics. That ends the consumer with an error, or its letters would never be copied and nobody would know; the
/// copies to the other topics are finished and marked first.
#[tokio::test]
async fn t501_a_panic_in_a_copy_ends_the_consumer_after_the_other_copies() {
    for stops in [false, true] {
        let topics = ["a", "b"];
        let bus = Gated::shut(&topics).await;
        bus.break_topic("a.dead");
        let ledger = Arc::new(MemoryLedger::default());
        die_together(&bus, &ledger, &topics).await;

        let member = consumer(bus.clone(), &ledger, &topics).build().unwrap();
        let handle = member.handle();
        let mut running = tokio::spawn(member.leased(broken));
        until("the copy of b is published", async || bus.under_way() == 1).await;
        if stops {
            handle.stop();
        }
        // Not a wait for a state: the longer it is, the surer is a copy that is cut off found out.
        let early = tokio::time::timeout(Duration::from_millis(100), &mut running).await;
        assert!(early.is_err(), "it ended while a copy was under way");
        bus.open();
        let ended = tokio::time::timeout(Duration::from_secs(20), running).await.expect("the consumer ends");
        let error = ended.unwrap().expect_err("the consumer ends with an error");
        assert!(matches!(error, Error::Corrupt(_)), "{error}");
        assert_eq!(unpublished(&ledger).await, 1, "the copy of b is marked, and that of a is not");
        assert_eq!((bus.copies("a").await, bus.copies("b").await), (0, 1));
    }
}

/// A stop waits for a copy that is under way, and for its mark: else the next member would copy it again. One that is not answered
/// holds up a stop no longer than the drain may take.
#[tokio::test]
async fn t119_a_stop_waits_for_a_copy_under_way_but_not_for_ever() {
    for answered in [true, false] {
        let bus = Gated::shut(&["orders"]).await;
        let ledger = Arc::new(MemoryLedger::default());
        let drain = if answered { Duration::from_secs(60) } else { Duration::from_millis(300) };
        let consumer = consumer(bus.clone(), &ledger, &["orders"])
            .with(move |settings| settings.drain = drain)
            .build()
            .unwrap();
        let handle = consumer.handle();
        let mut running =
            tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Err(Failed::fatal("no")) }));
        publish(&*bus, "orders", "e").await;
        until("it is being copied", async || bus.under_way() == 1).await;
        handle.stop();
        if answered {
            // Not a wait for a state: the longer it is, the surer is a stop that does not wait found out.
            let early = tokio::time::timeout(Duration::from_millis(500), &mut running).await;
            assert!(early.is_err(), "it ended while a copy was under way");
            bus.open();
        }
        running.await.unwrap().unwrap();
        assert_eq!(unpublished(&ledger).await, usize::from(!answered), "noted, if it was answered");
        assert_eq!(bus.copies("orders").await, 1);
    }
}

/// The bus takes longer to answer than the letter is reserved, by the ledger's clock. The member that waits does not begin again with
/// it; what died later shows that it has asked the ledger since.
#[tokio::test]
async fn t250_a_member_does_not_copy_a_letter_again_that_it_still_has_under_way() {
    let bus = Gated::shut(&["a", "b"]).await;
    let clock = ManualClock::new(Time::parse("2026-01-02T03:04:05Z").unwrap());
    let ledger = Arc::new(MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone())));
    let reserve = Duration::from_mins(10);
    let consumer = consumer(bus.clone(), &ledger, &["a", "b"])
        .with(move |settings| settings.dead_reserve = reserve)
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Err(Failed::fatal("no")) }));
    publish(&*bus, "a", "first").await;
    until("the first is being copied", async || bus.under_way() == 1).await;
    clock.advance(2 * reserve);
    publish(&*bus, "b", "second").await;
    until("the second is in its topic", async || bus.copies("b").await > 0).await;
    bus.open();
    until("both are noted", async || unpublished(&ledger).await == 0).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!((bus.copies("a").await, bus.copies("b").await), (1, 1));
}

/// A record that could not be read is redriven, and can be read now; but another member runs its event under a lease. The record
/// waits in the ledger with its bytes until that member has settled the event: if it dies instead, those bytes are all there is.
#[tokio::test]
async fn t122_a_redriven_record_keeps_its_bytes_while_another_member_runs_it() {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&Topic::new("orders").unwrap(), TopicSettings::new(1)).await.unwrap();
    let ledger = Arc::new(MemoryLedger::default());
    let payload = bytes::Bytes::from_static(br#"{"number": "e-17"}"#);
    let record = Record { payload: Some(payload.clone()), ..Record::default() };
    bus.publish(&Topic::new("orders").unwrap(), &[record]).await.unwrap().remove(0).unwrap();
    let ran = Arc::new(Mutex::new(Vec::new()));
    let handler = || {
        let ran = Arc::clone(&ran);
        move |event: &Event, _: &Run| {
            ran.lock().unwrap().push((event.id.to_string(), event.payload.clone()));
            async { Ok(()) }
        }
    };
    let scope = Scope::new("mailer").unwrap();
    let entry = async |id: &str| -> Entry {
        let identity = Identity::new(scope.clone(), EventId::new(id).unwrap());
        ledger.get(&identity, None).await.unwrap().expect("an entry")
    };

    let blind = consumer(bus.clone(), &ledger, &["orders"]).build().unwrap();
    let handle = blind.handle();
    let running = tokio::spawn(blind.leased(handler()));
    until("refused", async || handle.progress().passed.get("refused") == Some(&1)).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let refused = entry("orders-0-0").await;
    assert_eq!(refused.state, State::Dead);

    let other = Guard::builder(Arc::clone(&ledger)).scope("mailer").build().unwrap();
    let Outcome::First(lease) = other.lease("e-17").await.unwrap() else { panic!("a first") };
    let redrive = Intervene {
        identity: refused.identity.clone(),
        time: None,
        what: Intervention::Redrive,
        by: "tester".to_owned(),
        reason: "the number is its id".to_owned(),
        out_of_order: false,
        token: None,
        dry_run: false,
    };
    ledger.intervene(&redrive).await.unwrap();
    let seeing = consumer(bus.clone(), &ledger, &["orders"])
        .with(|settings| settings.decoder.id = IdChain::new([IdSource::Pointer("/number".into())]).unwrap());
    let seeing = seeing.build().unwrap();
    let handle = seeing.handle();
    let running = tokio::spawn(seeing.leased(handler()));
    // Left more than once: it is still there after it was left.
    until("it is left to the other member, or lost", async || {
        handle.progress().passed.get("left").is_some_and(|left| *left > 2)
            || entry("orders-0-0").await.state == State::Done
    })
    .await;
    let waiting = entry("orders-0-0").await;
    assert_eq!(waiting.state, State::Retry, "settled while another member runs it");
    assert_eq!(waiting.body.as_ref().and_then(|body| body.payload.clone()), Some(payload.clone()));
    assert!(ran.lock().unwrap().is_empty(), "it ran beside the other member");

    lease.release().await.unwrap(); // the other member ends without having run it
    until("it ran", async || entry("e-17").await.state == State::Done).await;
    until("the record's own entry ends", async || entry("orders-0-0").await.state == State::Done).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(*ran.lock().unwrap(), [("e-17".to_owned(), payload)], "once, with its bytes");
}
