//! The consumer's pipeline on memory: what each step does. The same promises on real servers are in `acceptance.rs` and `chaos.rs`.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::wait::until;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Partition, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, ConsumerHandle, Failed, Handled, Wants};
use hapax::guard::Run;
use hapax::id::Kind;
use hapax::ledger::{
    Baseline, Claims, ConsumerStore, Filter, HeldQuery, Intervene, Intervention, OnDead, Operations,
    OrderPolicy, State,
};
use hapax::{Event, Topic};

fn topic(name: &str) -> Topic {
    Topic::new(name).unwrap()
}

#[allow(clippy::needless_pass_by_value)] // a json! at every call
fn record(key: Option<&str>, json: serde_json::Value) -> Record {
    Record {
        key: key.map(|key| key.to_owned().into()),
        payload: Some(json.to_string().into()),
        ..Record::default()
    }
}

fn event(id: &str) -> Record {
    record(None, serde_json::json!({"event_id": id}))
}

fn numbered(id: &str, aggregate: &str, seq: u64) -> Record {
    record(
        Some(aggregate),
        serde_json::json!({"event_id": id, "aggregate_id": aggregate, "sequence_number": seq}),
    )
}

/// A bus and a ledger in memory.
struct InMemory {
    bus: Arc<MemoryBus>,
    ledger: Arc<MemoryLedger>,
}

impl InMemory {
    async fn new(partitions: i32) -> Self {
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic("orders"), TopicSettings::new(partitions)).await.unwrap();
        InMemory { bus, ledger: Arc::new(MemoryLedger::default()) }
    }

    async fn publish(&self, records: &[Record]) {
        for answer in self.bus.publish(&topic("orders"), records).await.unwrap() {
            answer.unwrap();
        }
    }

    fn consumer(&self) -> ConsumerBuilder<Arc<MemoryLedger>> {
        Consumer::builder(self.bus.clone(), Arc::clone(&self.ledger)).scope("mailer").topic("orders").with(
            |settings| {
                settings.backoff_base = Duration::from_millis(5);
                settings.backoff_max = Duration::from_millis(20);
                settings.held_interval = Duration::from_millis(10);
                settings.commit_interval = Duration::from_millis(5);
            },
        )
    }

    async fn states(&self) -> BTreeMap<String, State> {
        let page = self.ledger.list(&Filter::default(), None, 1000).await.unwrap();
        page.entries.into_iter().map(|entry| (entry.identity.id.to_string(), entry.state)).collect()
    }

    async fn committed(&self, number: i32) -> Option<i64> {
        let partition = Partition { topic: topic("orders"), number };
        self.bus.committed("mailer", &partition).await.unwrap()
    }
}

type Counts = hapax::consumer::Counts;

/// Runs a consumer until a state is reached, then drains it.
async fn run_until<F, R, C, D>(
    builder: ConsumerBuilder<Arc<MemoryLedger>>,
    handler: F,
    what: &str,
    mut is: C,
) -> Counts
where
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send + 'static,
    C: FnMut(ConsumerHandle) -> D,
    D: Future<Output = bool>,
{
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running =
        tokio::spawn(consumer.leased(move |event: &Event, run: &Run| handler(event.clone(), run.clone())));
    until(what, || is(handle.clone())).await;
    handle.stop();
    running.await.unwrap().unwrap()
}

fn passed(handle: &ConsumerHandle) -> u64 {
    handle.progress().passed.values().sum()
}

#[tokio::test]
async fn duplicates_take_effect_once_and_offsets_follow() {
    let memory = InMemory::new(2).await;
    let records: Vec<_> = (0..300).map(|n| event(&format!("e-{}", n % 100))).collect();
    memory.publish(&records).await;
    let ran = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&ran);
    let counts = run_until(
        memory.consumer(),
        move |_, _| {
            counter.fetch_add(1, Ordering::SeqCst);
            async { Ok(()) }
        },
        "all through",
        |handle| async move { passed(&handle) == 300 },
    )
    .await;
    assert_eq!((ran.load(Ordering::SeqCst), counts["done"], counts["duplicate"]), (100, 100, 200));
    let committed = memory.committed(0).await.unwrap() + memory.committed(1).await.unwrap();
    assert_eq!(committed, 300, "everything is committed at a stop");
}

#[tokio::test]
async fn a_failing_event_is_retried_then_dead_with_its_bytes_and_a_copy() {
    let memory = InMemory::new(1).await;
    memory
        .publish(&[
            event("good-1"),
            record(Some("k"), serde_json::json!({"event_id": "bad", "x": "ü"})),
            event("good-2"),
        ])
        .await;
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let bus = memory.bus.clone();
    run_until(
        memory.consumer(),
        move |event, run| {
            let bad = event.id.to_string() == "bad";
            if bad {
                assert_eq!(counter.fetch_add(1, Ordering::SeqCst) + 1, run.attempt());
            }
            async move { if bad { Err(Failed::retryable("no such account")) } else { Ok(()) } }
        },
        "the dead letter is copied",
        |_| {
            let bus = bus.clone();
            async move {
                let dead = Partition { topic: topic("orders.dead"), number: 0 };
                bus.range(&dead).await.is_ok_and(|(_, end)| end == 1)
            }
        },
    )
    .await;
    assert_eq!(runs.load(Ordering::SeqCst), 5, "five runs");
    let states = memory.states().await;
    assert_eq!((states["good-1"], states["bad"], states["good-2"]), (State::Done, State::Dead, State::Done));
    assert_eq!(memory.committed(0).await, Some(3), "the commit point passed the dead one");
    let copy = read_all(&memory.bus, "orders.dead").await.remove(0);
    let header = |name: &str| String::from_utf8(copy.headers.get(name).unwrap().to_vec()).unwrap();
    assert_eq!(copy.payload.as_deref().unwrap(), "{\"event_id\":\"bad\",\"x\":\"ü\"}".as_bytes());
    assert_eq!(copy.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(header("hapax-dead-reason"), "no such account");
    assert_eq!((header("hapax-dead-attempts"), header("hapax-dead-offset")), ("5".into(), "1".into()));
    for name in ["code", "first-at", "last-at", "scope", "topic", "partition"] {
        header(&format!("hapax-dead-{name}"));
    }
}

async fn read_all(bus: &MemoryBus, name: &str) -> Vec<Record> {
    use hapax::bus::{BusEvent, Subscription};
    let mut reader = bus.subscribe(Subscription::new("reader", [topic(name)]).unwrap()).await.unwrap();
    loop {
        if let BusEvent::Records(records) = reader.next().await.unwrap() {
            return records.into_iter().map(|received| received.record).collect();
        }
    }
}

#[tokio::test]
async fn a_fatal_error_is_dead_at_once() {
    let memory = InMemory::new(1).await;
    memory.publish(&[event("bad")]).await;
    let counts = run_until(
        memory.consumer(),
        |_, _| async { Err(Failed::fatal("never")) },
        "through",
        |handle| async move { passed(&handle) == 1 },
    )
    .await;
    assert_eq!(counts["dead"], 1);
    let entry = memory.ledger.list(&Filter::default(), None, 9).await.unwrap().entries.remove(0);
    assert_eq!((entry.attempts, entry.reason.as_deref()), (1, Some("never")));
}

#[tokio::test]
async fn t30_what_cannot_be_decoded_is_a_dead_letter_and_stops_nobody() {
    let memory = InMemory::new(1).await;
    let garbage = Record { payload: Some(b"\x00\xffnope".to_vec().into()), ..Record::default() };
    memory.publish(&[garbage.clone(), event("good"), record(None, serde_json::json!({"no": "id"}))]).await;
    let counts = run_until(
        memory.consumer(),
        |_, _| async { Ok(()) },
        "through",
        |handle| async move { passed(&handle) == 3 },
    )
    .await;
    assert_eq!((counts["refused"], counts["done"]), (2, 1));
    let filter = Filter { states: vec![State::Dead], ..Filter::default() };
    let dead = memory.ledger.list(&filter, None, 9).await.unwrap().entries;
    assert_eq!(dead.len(), 2);
    let first = dead.iter().find(|entry| entry.identity.id.to_string() == "orders-0-0").unwrap();
    assert_eq!(first.body.as_ref().unwrap().payload, garbage.payload, "bytes untouched");
    assert!(first.reason.as_deref().unwrap().contains("no event id"));
}

#[tokio::test]
async fn one_key_runs_in_order_while_others_go_on() {
    let memory = InMemory::new(1).await;
    let mut records = Vec::new();
    for n in 0..50 {
        for key in ["a", "b", "c"] {
            records.push(record(Some(key), serde_json::json!({"event_id": format!("{key}-{n}")})));
        }
    }
    memory.publish(&records).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, flaky) = (Arc::clone(&seen), Arc::new(AtomicU32::new(0)));
    run_until(
        memory.consumer(),
        move |event, _| {
            let (log, flaky) = (Arc::clone(&log), Arc::clone(&flaky));
            async move {
                // One in the middle of a key fails twice: its successors wait for it.
                if event.id.to_string() == "b-10" && flaky.fetch_add(1, Ordering::SeqCst) < 2 {
                    return Err(Failed::retryable("not yet"));
                }
                log.lock().unwrap().push(event.id.to_string());
                Ok(())
            }
        },
        "through",
        |handle| async move { passed(&handle) == 150 },
    )
    .await;
    let seen = seen.lock().unwrap();
    for key in ["a", "b", "c"] {
        let of_key: Vec<_> = seen.iter().filter(|id| id.starts_with(key)).cloned().collect();
        let expected: Vec<_> = (0..50).map(|n| format!("{key}-{n}")).collect();
        assert_eq!(of_key, expected);
    }
}

#[tokio::test]
async fn acceptance_4_shuffled_numbers_never_go_backwards() {
    let memory = InMemory::new(1).await;
    let seqs = [3u64, 1, 5, 2, 4, 6, 6, 1];
    let records: Vec<_> =
        seqs.iter().enumerate().map(|(n, seq)| numbered(&format!("e-{n}"), "order-1", *seq)).collect();
    memory.publish(&records).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let counts = run_until(
        memory.consumer().order(OrderPolicy::Latest, OnDead::Skip),
        move |event, _| {
            log.lock().unwrap().push(event.seq.unwrap());
            async { Ok(()) }
        },
        "through",
        |handle| async move { passed(&handle) == 8 },
    )
    .await;
    assert_eq!(*seen.lock().unwrap(), [3, 5, 6]);
    assert_eq!(counts["stale"], 5);
}

#[tokio::test]
async fn strict_order_waits_for_what_is_missing_and_moves_past_what_is_unwanted() {
    let memory = InMemory::new(1).await;
    let mut records: Vec<_> =
        [2u64, 3, 1, 5, 4].iter().map(|seq| numbered(&format!("e-{seq}"), "order-1", *seq)).collect();
    for (record, kind) in records.iter_mut().zip(["a", "b", "a", "a", "a"]) {
        record.headers = [("ce_type".to_owned(), kind.as_bytes().to_vec())].into_iter().collect();
    }
    memory.publish(&records).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let policy = OrderPolicy::Strict { baseline: Baseline::From(1), gap_timeout: Duration::from_secs(60) };
    // One key is one queue here, so what is missing is behind: it is parked in the ledger to let the others come.
    run_until(
        memory.consumer().order(policy, OnDead::Park).with(|settings| {
            settings.hold_max = Duration::from_millis(20);
            settings.wants = Wants::Kinds(vec![Kind::new("a").unwrap()]);
        }),
        move |event, _| {
            log.lock().unwrap().push(event.seq.unwrap());
            async { Ok(()) }
        },
        "all done",
        |_| {
            let ledger = Arc::clone(&memory.ledger);
            async move {
                ledger
                    .list(&Filter { states: vec![State::Done], ..Filter::default() }, None, 9)
                    .await
                    .unwrap()
                    .entries
                    .len()
                    == 5
            }
        },
    )
    .await;
    assert_eq!(*seen.lock().unwrap(), [1, 2, 4, 5]);
    assert_eq!(memory.committed(0).await, Some(5));
}

/// A redriven event that the running consumer does not want stays held, and its strict order stays behind it, until somebody wants
/// it. (What was only parked behind it and is not wanted is moved past.)
#[tokio::test]
async fn what_is_redriven_waits_for_somebody_who_wants_it() {
    let memory = InMemory::new(1).await;
    let mut records: Vec<_> = (1..=4).map(|seq| numbered(&format!("e-{seq}"), "order-1", seq)).collect();
    for (record, kind) in records.iter_mut().zip(["b", "a", "c", "a"]) {
        record.headers = [("ce_type".to_owned(), kind.as_bytes().to_vec())].into_iter().collect();
    }
    memory.publish(&records).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let consumer = |kinds: &[&str]| {
        let policy =
            OrderPolicy::Strict { baseline: Baseline::From(1), gap_timeout: Duration::from_secs(60) };
        let wants = Wants::Kinds(kinds.iter().map(|kind| Kind::new(*kind).unwrap()).collect());
        memory.consumer().order(policy, OnDead::Park).with(|settings| settings.wants = wants)
    };
    let handler = |broken: bool| {
        let log = Arc::clone(&seen);
        move |event: Event, _| {
            if !broken {
                log.lock().unwrap().push(event.seq.unwrap());
            }
            async move { if broken { Err(Failed::fatal("broken")) } else { Ok(()) } }
        }
    };
    let through = |handle: ConsumerHandle| async move { passed(&handle) == 4 };
    run_until(consumer(&["a", "b"]), handler(true), "one dead, three parked", through).await;
    let dead = Filter { states: vec![State::Dead], ..Filter::default() };
    let redrive = Intervene {
        identity: memory.ledger.list(&dead, None, 9).await.unwrap().entries[0].identity.clone(),
        time: None,
        what: Intervention::Redrive,
        by: "test".into(),
        reason: "fixed".into(),
        dry_run: false,
        out_of_order: false,
        token: None,
    };
    memory.ledger.intervene(&redrive).await.unwrap();
    let left = |handle: ConsumerHandle| async move { handle.progress().passed.get("left") == Some(&1) };
    let counts = run_until(consumer(&["a"]), handler(false), "left", left).await;
    assert_eq!(counts, Counts::from([(hapax::consumer::Passed::Left, 1)]));
    let states = memory.states().await;
    assert_eq!((states["e-1"], states["e-2"]), (State::Retry, State::Parked));
    let done = |_| async { memory.states().await.values().all(|state| *state == State::Done) };
    run_until(consumer(&["a", "b"]), handler(false), "all done", done).await;
    assert_eq!(*seen.lock().unwrap(), [1, 2, 4]);
}

#[tokio::test]
async fn t24_a_dead_head_parks_its_successors_and_a_redrive_drains_them_in_order() {
    use hapax::ledger::{Intervene, Intervention};
    let memory = InMemory::new(1).await;
    let records: Vec<_> = (1..=4).map(|seq| numbered(&format!("e-{seq}"), "order-1", seq)).collect();
    memory.publish(&records).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let fixed = Arc::new(AtomicU32::new(0));
    let is_fixed = Arc::clone(&fixed);
    let consumer = memory.consumer().order(OrderPolicy::Latest, OnDead::Park).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
        let event = event.clone();
        let (log, fixed) = (Arc::clone(&log), is_fixed.load(Ordering::SeqCst));
        async move {
            if event.seq == Some(2) && fixed == 0 {
                return Err(Failed::fatal("broken"));
            }
            log.lock().unwrap().push(event.seq.unwrap());
            Ok(())
        }
    }));
    until("parked", || async { passed(&handle) == 4 }).await;
    let states = memory.states().await;
    assert_eq!((states["e-2"], states["e-3"], states["e-4"]), (State::Dead, State::Parked, State::Parked));
    until("committed past them", || async { memory.committed(0).await == Some(4) }).await;
    fixed.store(1, Ordering::SeqCst);
    let dead = memory
        .ledger
        .list(&Filter { states: vec![State::Dead], ..Filter::default() }, None, 9)
        .await
        .unwrap();
    let redrive = Intervene {
        identity: dead.entries[0].identity.clone(),
        time: None,
        what: Intervention::Redrive,
        by: "test".into(),
        reason: "fixed".into(),
        dry_run: false,
        out_of_order: false,
        token: None,
    };
    memory.ledger.intervene(&redrive).await.unwrap();
    memory.publish(&[numbered("e-5", "order-1", 5)]).await; // a new arrival queues behind
    until("all done", || async { seen.lock().unwrap().len() == 5 }).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3, 4, 5], "in order, each once");
}

#[tokio::test]
async fn at_most_once_is_never_retried_and_what_failed_is_listed() {
    let memory = InMemory::new(1).await;
    memory.publish(&[event("ok"), event("fails"), event("hangs"), event("fails")]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let consumer = memory
        .consumer()
        .with(|settings| settings.handler_timeout = Duration::from_millis(100))
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.at_most_once(move |event: &Event| {
        let event = event.clone();
        counter.fetch_add(1, Ordering::SeqCst);
        async move {
            match event.id.to_string().as_str() {
                "ok" => Ok(()),
                "fails" => Err(Failed::retryable("no")),
                _ => std::future::pending().await,
            }
        }
    }));
    until("through", || async { passed(&handle) == 4 }).await;
    handle.stop();
    let counts = running.await.unwrap().unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    assert_eq!((counts["finished"], counts["lost"], counts["duplicate"]), (1, 2, 1));
    let states = memory.states().await;
    assert_eq!((states["ok"], states["fails"], states["hangs"]), (State::Finished, State::Lost, State::Lost));
}

#[tokio::test]
async fn a_far_retry_waits_in_the_ledger_and_the_commit_point_passes() {
    let memory = InMemory::new(1).await;
    memory.publish(&[event("far"), event("near")]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let counts = run_until(
        memory.consumer().with(|settings| settings.hold_max = Duration::from_millis(30)),
        move |event, _| {
            let first = event.id.to_string() == "far" && counter.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                if first { Err(Failed::retry_after("later", Duration::from_millis(300))) } else { Ok(()) }
            }
        },
        "both done",
        |handle| async move { handle.progress().passed.get("done") == Some(&2) },
    )
    .await;
    assert_eq!((counts["held"], counts["done"]), (1, 2));
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    assert_eq!(memory.committed(0).await, Some(2));
}

#[tokio::test]
async fn two_members_share_partitions_and_hand_over_without_running_twice() {
    let memory = InMemory::new(4).await;
    let records: Vec<_> = (0..400)
        .map(|n| record(Some(&format!("k{}", n % 40)), serde_json::json!({"event_id": format!("e-{n}")})))
        .collect();
    memory.publish(&records[..200]).await;
    let ran = Arc::new(Mutex::new(BTreeMap::<String, u32>::new()));
    let start = || {
        let ran = Arc::clone(&ran);
        let consumer = memory.consumer().build().unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
            *ran.lock().unwrap().entry(event.id.to_string()).or_default() += 1;
            async { Ok(()) }
        }));
        (handle, running)
    };
    let (first, first_running) = start();
    until("first has all", || async { first.progress().partitions == 4 }).await;
    let (second, second_running) = start();
    until("shared", || async { first.progress().partitions == 2 && second.progress().partitions == 2 }).await;
    memory.publish(&records[200..]).await;
    until("all ran", || async { ran.lock().unwrap().len() == 400 }).await;
    first.stop();
    first_running.await.unwrap().unwrap();
    until("second has all", || async { second.progress().partitions == 4 }).await;
    second.stop();
    second_running.await.unwrap().unwrap();
    assert!(ran.lock().unwrap().values().all(|runs| *runs == 1));
    let mut committed = 0;
    for number in 0..4 {
        committed += memory.committed(number).await.unwrap_or(0);
    }
    assert_eq!(committed, 400);
}

#[tokio::test]
async fn wrong_settings_are_sentences() {
    let memory = InMemory::new(1).await;
    let problem_of = |builder: ConsumerBuilder<Arc<MemoryLedger>>| builder.build().err().unwrap().to_string();
    assert!(problem_of(memory.consumer().with(|s| s.concurrency = 0)).contains("consumer.concurrency is 0"));
    assert!(problem_of(memory.consumer().with(|s| s.heartbeat = s.lease)).contains("heartbeat"));
    assert!(
        problem_of(memory.consumer().with(|s| s.handler_timeout = Duration::ZERO))
            .contains("handler_timeout")
    );
    assert!(
        problem_of(memory.consumer().with(|s| s.dead_topic = Some("orders".into()))).contains("dead_topic")
    );
    assert!(problem_of(memory.consumer().scope("  ")).contains("blank"));
    assert!(
        problem_of(Consumer::builder(memory.bus.clone(), Arc::clone(&memory.ledger)).topic("orders"))
            .contains("scope")
    );
    let missing = Consumer::builder(memory.bus.clone(), Arc::clone(&memory.ledger))
        .scope("s")
        .topic("nowhere")
        .build()
        .unwrap();
    let error = missing.leased(|_: &Event, _: &Run| async { Ok(()) }).await.err().unwrap().to_string();
    assert!(error.contains("no topic nowhere"), "{error}");
}

#[tokio::test]
async fn a_stop_before_the_start_is_heard() {
    let memory = InMemory::new(1).await;
    let consumer = memory.consumer().build().unwrap();
    consumer.handle().stop();
    let running = consumer.leased(|_: &Event, _: &Run| async { Handled::Ok(()) });
    let ended = tokio::time::timeout(Duration::from_secs(120), running).await;
    assert!(ended.expect("it ends by itself").unwrap().is_empty());
}

/// An event that was redriven out of order is claimed without its number. It is the same event all the same: taken for
/// another one under a used id, it would be refused.
#[tokio::test]
async fn what_is_redriven_out_of_order_runs_as_itself() {
    let memory = InMemory::new(1).await;
    memory.publish(&[numbered("a-1", "a", 1), numbered("a-2", "a", 2)]).await;
    let builder = || memory.consumer().order(OrderPolicy::Latest, OnDead::Skip);
    run_until(
        builder(),
        |event, _| async move { if event.seq == Some(1) { Err(Failed::fatal("not yet")) } else { Ok(()) } },
        "both through",
        |handle| async move { passed(&handle) == 2 },
    )
    .await;
    let entries = memory.ledger.list(&Filter::default(), None, 9).await.unwrap().entries;
    let dead = entries.into_iter().find(|entry| entry.state == State::Dead).unwrap();
    let redrive = Intervene {
        identity: dead.identity,
        time: None,
        what: Intervention::Redrive,
        by: "tester".to_owned(),
        reason: "fixed".to_owned(),
        out_of_order: true,
        token: None,
        dry_run: false,
    };
    memory.ledger.intervene(&redrive).await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&seen);
    let counts = run_until(
        builder(),
        move |event, _| {
            all.lock().unwrap().push((event.aggregate.unwrap().to_string(), event.seq));
            async { Ok(()) }
        },
        "the redriven one is through",
        |handle| async move { passed(&handle) == 1 },
    )
    .await;
    assert_eq!(counts.get("done"), Some(&1), "{counts:?}");
    assert_eq!(*seen.lock().unwrap(), [("a".to_owned(), Some(1))], "the handler sees it as it is");
}

#[tokio::test]
async fn t45_what_nobody_wants_costs_no_ledger_write() {
    let memory = InMemory::new(1).await;
    let mut records: Vec<_> = (0..10).map(|n| event(&format!("e-{n}"))).collect();
    records[3].headers = [("ce_type".to_owned(), b"wanted".to_vec())].into_iter().collect();
    memory.publish(&records).await;
    let counts = run_until(
        memory.consumer().with(|settings| settings.wants = Wants::Kinds(vec![Kind::new("wanted").unwrap()])),
        |_, _| async { Ok(()) },
        "through",
        |handle| async move { passed(&handle) == 10 },
    )
    .await;
    assert_eq!((counts["unwanted"], counts["done"]), (9, 1));
    assert_eq!(memory.states().await.len(), 1, "one row, for the one that was wanted");
    assert_eq!(memory.committed(0).await, Some(10));
}

/// An id that is used again for something else is not what the window has seen: the ledger says what becomes of it.
#[tokio::test]
async fn t01_the_window_does_not_hide_a_reused_id() {
    use hapax::window::{MemoryWindow, Window, WindowSettings};
    let memory = InMemory::new(1).await;
    let window = Arc::new(MemoryWindow::new(WindowSettings::new("1"), 1000).unwrap());
    let paid = |amount: u32| record(None, serde_json::json!({"event_id": "e", "amount": amount}));
    memory.publish(&[paid(7)]).await;
    let run = |passed_: u64| {
        let builder = memory.consumer().window(Arc::clone(&window) as Arc<dyn Window>);
        run_until(
            builder,
            |_, _| async { Ok(()) },
            "through",
            move |handle| async move { passed(&handle) == passed_ },
        )
    };
    assert_eq!(run(1).await["done"], 1);
    until("remembered", || async { window.len() == 1 }).await;
    memory.publish(&[paid(7), paid(8)]).await;
    let counts = run(2).await;
    assert_eq!((counts.get("window"), counts.get("refused")), (Some(&1), Some(&1)), "{counts:?}");
}

/// The window is asked before the claim and told only after done: what failed is not in it, what is in it is skipped.
#[tokio::test]
async fn t01_the_window_is_read_before_the_claim_and_written_after_done() {
    use hapax::ledger::Identity;
    use hapax::window::{MemoryWindow, Window, WindowSettings};
    let memory = InMemory::new(1).await;
    let window = Arc::new(MemoryWindow::new(WindowSettings::new("epoch-1"), 1000).unwrap());
    let epoch = Some(memory.ledger.epoch().await.unwrap());
    let identity = |id: &str| {
        let identity = Identity::new(hapax::Scope::new("mailer").unwrap(), hapax::EventId::new(id).unwrap());
        hapax::window::Sighting { epoch, ..identity.into() }
    };
    window.remember(&[identity("seen-before")]).await.unwrap();
    memory.publish(&[event("seen-before"), event("good"), event("bad"), event("good")]).await;
    let counts =
        run_until(
            memory.consumer().window(Arc::clone(&window) as Arc<dyn Window>),
            |event, _| async move {
                if event.id.to_string() == "bad" { Err(Failed::fatal("no")) } else { Ok(()) }
            },
            "through",
            |handle| async move { passed(&handle) == 4 },
        )
        .await;
    assert_eq!((counts["window"], counts["done"], counts["dead"]), (1, 1, 1), "{counts:?}");
    until("remembered", || async { window.seen(&[identity("good")]).await.unwrap() == [true] }).await;
    assert_eq!(
        window.seen(&[identity("bad")]).await.unwrap(),
        [false],
        "what failed is not skipped next time"
    );
    // The window of another ledger, and one with another epoch by hand, is not believed.
    let restored = InMemory::new(1).await;
    for (memory, window) in [(&restored, (*window).clone()), (&memory, window.in_epoch("epoch-2"))] {
        memory.publish(&[event("seen-before")]).await;
        let counts = run_until(
            memory.consumer().window(Arc::new(window)),
            |_, _| async { Ok(()) },
            "through",
            |handle| async move { passed(&handle) == 1 },
        )
        .await;
        assert_eq!(counts["done"], 1);
    }
}

#[tokio::test]
async fn too_many_events_that_are_too_old_stop_the_consumer_with_a_sentence() {
    use hapax::clock::ManualClock;
    use hapax::ledger::{Settings, SweepSettings};
    let clock = ManualClock::new(hapax::Time::parse("2026-03-02T00:00:00Z").unwrap());
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic("orders"), TopicSettings::new(1)).await.unwrap();
    let ledger = Arc::new(MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone())));
    let memory = InMemory { bus, ledger };
    // Ids of a week that the scope has seen and that was dropped since (UUIDv7 of 2026-03-02).
    let ids: Vec<_> = (0..20).map(|n| format!("019cab7f-ec00-7000-8000-0000000000{n:02x}")).collect();
    memory.publish(&ids.iter().map(|id| event(id)).collect::<Vec<_>>()).await;
    run_until(
        memory.consumer(),
        |_, _| async { Ok(()) },
        "through",
        |handle| async move { passed(&handle) == 20 },
    )
    .await;
    clock.advance(Duration::from_hours(60 * 24));
    let settings = SweepSettings { retention: Duration::from_hours(24), batch_max: 1000, dry_run: false };
    // The consumer may have swept before; then the next sweep takes the sixty days for a leap of the clock.
    let mut dropped = 0;
    for _ in 0..2 {
        dropped += memory.ledger.sweep(settings).await.unwrap().weeks.len();
        clock.advance(Duration::from_hours(48));
    }
    assert_eq!(dropped, 1);
    let again = InMemory { bus: Arc::new(MemoryBus::default()), ledger: Arc::clone(&memory.ledger) };
    again.bus.create_topic(&topic("orders"), TopicSettings::new(1)).await.unwrap();
    again.publish(&ids.iter().map(|id| event(id)).collect::<Vec<_>>()).await;
    let consumer = again.consumer().with(|settings| settings.too_old_max = 10).build().unwrap();
    let ran = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&ran);
    let error = consumer
        .leased(move |_: &Event, _: &Run| {
            counter.fetch_add(1, Ordering::SeqCst);
            async { Ok(()) }
        })
        .await
        .unwrap_err();
    assert!(error.to_string().contains("too_old_max"), "{error}");
    assert_eq!(ran.load(Ordering::SeqCst), 0, "too old is never a first");
}

#[tokio::test]
async fn at_the_cap_of_held_events_partitions_pause() {
    let memory = InMemory::new(1).await;
    let records: Vec<_> = (1..=9).map(|seq| numbered(&format!("e-{seq}"), "order-1", seq)).collect();
    memory.publish(&records).await;
    let consumer = memory
        .consumer()
        .order(OrderPolicy::Latest, OnDead::Park)
        .with(|settings| settings.held_max = 3)
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(async |event: &Event, _: &Run| {
        if event.seq == Some(1) { Err(Failed::fatal("broken")) } else { Ok(()) }
    }));
    until("paused", || async { handle.progress().paused == 1 && handle.progress().held >= 3 }).await;
    handle.stop();
    running.await.unwrap().unwrap();
}

/// A handler that does not end by itself is given back at the deadline, uncounted; at most once, it is lost.
#[tokio::test]
async fn a_stop_gives_back_what_does_not_end_in_time() {
    for once in [false, true] {
        let memory = InMemory::new(1).await;
        memory.publish(&[event("endless")]).await;
        let consumer =
            memory.consumer().with(|settings| settings.drain = Duration::from_millis(50)).build().unwrap();
        let handle = consumer.handle();
        let begun = Arc::new(tokio::sync::Notify::new());
        let signal = Arc::clone(&begun);
        let running = if once {
            tokio::spawn(consumer.at_most_once(move |_: &Event| {
                signal.notify_one();
                std::future::pending()
            }))
        } else {
            tokio::spawn(consumer.leased(move |_: &Event, _: &Run| {
                signal.notify_one();
                std::future::pending()
            }))
        };
        begun.notified().await;
        handle.stop();
        running.await.unwrap().unwrap();
        let entry = memory.ledger.list(&Filter::default(), None, 9).await.unwrap().entries.remove(0);
        if once {
            assert_eq!(entry.state, State::Lost);
        } else {
            assert_eq!((entry.state, entry.attempts), (State::Retry, 0), "given back, not counted");
            assert_ne!(memory.committed(0).await, Some(1), "the offset is not passed");
        }
    }
}

#[tokio::test]
async fn bytes_in_flight_are_bounded() {
    let memory = InMemory::new(1).await;
    let big = "x".repeat(100_000);
    let records: Vec<_> = (0..30)
        .map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}"), "big": big})))
        .collect();
    let consumer = memory.consumer().with(|settings| settings.in_flight_bytes_max = 300_000).build().unwrap();
    let handle = consumer.handle();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let open = Arc::clone(&gate);
    let running = tokio::spawn(consumer.leased(move |_: &Event, _: &Run| {
        let gate = Arc::clone(&gate);
        async move {
            gate.acquire().await?.forget();
            Handled::Ok(())
        }
    }));
    for one in records.chunks(1) {
        memory.publish(one).await;
    }
    until("paused", || async { handle.progress().paused == 1 }).await;
    open.add_permits(1000);
    until("through", || async { passed(&handle) == 30 }).await;
    handle.stop();
    running.await.unwrap().unwrap();
}

/// A failed head holds back its own key, for as long as its attempts last, and nobody else's.
#[tokio::test]
async fn t41_a_failed_head_blocks_its_key_only_and_not_for_ever() {
    let memory = InMemory::new(1).await;
    let keyed = |key: &str, id: &str| record(Some(key), serde_json::json!({ "event_id": id }));
    memory.publish(&[keyed("a", "bad"), keyed("a", "after-bad"), keyed("b", "b-1"), keyed("b", "b-2")]).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let counts = run_until(
        memory.consumer(),
        move |event, _| {
            let id = event.id.to_string();
            log.lock().unwrap().push(id.clone());
            async move { if id == "bad" { Err(Failed::retryable("no")) } else { Ok(()) } }
        },
        "through",
        |handle| async move { passed(&handle) == 4 },
    )
    .await;
    assert_eq!((counts["done"], counts["dead"]), (3, 1));
    let seen = seen.lock().unwrap();
    let at = |id: &str| seen.iter().rposition(|seen| seen == id).unwrap();
    assert!(at("after-bad") > at("bad"), "behind the last try of its head");
    assert!(at("b-2") < at("bad"), "other keys do not wait for it");
}

/// One dead letter that the dead-letter topic does not take (there is none) keeps nobody else from being looked after.
#[tokio::test]
async fn dead_letters_that_cannot_be_copied_stop_nobody() {
    let memory = InMemory::new(1).await;
    memory.publish(&[event("bad"), event("far")]).await;
    let attempts = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&attempts);
    let counts = run_until(
        memory.consumer().with(|settings| {
            settings.dead_topic = Some("not a topic!".into());
            settings.hold_max = Duration::from_millis(20);
        }),
        move |event, _| {
            let first = event.id.to_string() == "far" && counter.fetch_add(1, Ordering::SeqCst) == 0;
            let bad = event.id.to_string() == "bad";
            async move {
                match (bad, first) {
                    (true, _) => Err(Failed::fatal("no")),
                    (_, true) => Err(Failed::retry_after("later", Duration::from_millis(100))),
                    _ => Ok(()),
                }
            }
        },
        "the held one is done",
        |handle| async move { handle.progress().passed.get("done") == Some(&1) },
    )
    .await;
    assert_eq!((counts["dead"], counts["held"], counts["done"]), (1, 1, 1));
    assert_eq!(
        memory
            .ledger
            .unpublished_dead(&hapax::Scope::new("mailer").unwrap(), &HeldQuery::all(), 9, None)
            .await
            .unwrap()
            .len(),
        1,
        "still to be copied"
    );
}

/// What comes out of the ledger runs before what arrived meanwhile and waits for it.
#[tokio::test]
async fn a_held_event_goes_before_the_successors_that_wait_for_it() {
    let memory = InMemory::new(1).await;
    memory.publish(&[numbered("e-1", "order-1", 1)]).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, attempts) = (Arc::clone(&seen), Arc::new(AtomicU32::new(0)));
    let consumer = memory
        .consumer()
        .order(OrderPolicy::Latest, OnDead::Park)
        .with(|settings| settings.hold_max = Duration::from_secs(5))
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running =
        tokio::spawn(
            consumer.leased(move |event: &Event, _: &Run| {
                let first = event.seq == Some(1) && attempts.fetch_add(1, Ordering::SeqCst) == 0;
                if !first {
                    log.lock().unwrap().push(event.seq.unwrap());
                }
                async move {
                    if first { Err(Failed::retry_after("later", Duration::from_secs(6))) } else { Ok(()) }
                }
            }),
        );
    until("held", || async { handle.progress().passed.get("held") == Some(&1) }).await;
    let records: Vec<_> = (2..=6).map(|seq| numbered(&format!("e-{seq}"), "order-1", seq)).collect();
    memory.publish(&records).await;
    let began = std::time::Instant::now();
    until("all done", || async { seen.lock().unwrap().len() == 6 }).await;
    println!("all six after {:?}", began.elapsed());
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3, 4, 5, 6]);
}
