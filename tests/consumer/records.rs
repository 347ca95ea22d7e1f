//! What becomes of a record on its way through the ledger and out to the dead letters: its bytes, and what is reported of it.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::faulty;
use crate::support::wait::until;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax::bus::memory::MemoryBus;
use hapax::bus::{
    Bus, BusEvent, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings,
};
use hapax::consumer::{Consumer, ConsumerBuilder, Failed, Handled, OutagePolicy};
use hapax::event::Origin;
use hapax::guard::Run;
use hapax::ledger::{Claims as _, ConsumerStore as _, HeldQuery, Operations as _};
use hapax::{Error, Event, Headers, Result, Topic};

fn topic(name: &str) -> Topic {
    Topic::new(name).unwrap()
}

fn record(id: &str, payload: Option<&'static str>) -> Record {
    Record {
        key: Some(id.to_owned().into()),
        payload: payload.map(Into::into),
        headers: Headers::from_iter([("idempotency_key", id.to_owned())]),
        ..Record::default()
    }
}

async fn bus(records: &[Record]) -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic("orders"), TopicSettings::new(1)).await.unwrap();
    for answer in bus.publish(&topic("orders"), records).await.unwrap() {
        answer.unwrap();
    }
    bus
}

fn consumer(bus: &Arc<MemoryBus>, ledger: &faulty::Faulty) -> ConsumerBuilder<faulty::Faulty> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger.clone()).scope("mailer").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(5);
        settings.backoff_max = Duration::from_millis(20);
        settings.hold_max = Duration::from_millis(1);
        settings.held_interval = Duration::from_millis(10);
    })
}

/// Runs until so many dead letters are there, and hands them out.
async fn dead_letters<R>(
    bus: &MemoryBus,
    builder: ConsumerBuilder<faulty::Faulty>,
    handler: impl Fn(Event) -> R + Send + Sync + 'static,
    count: i64,
) -> Vec<Record>
where
    R: Future<Output = Handled> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| handler(event.clone())));
    let dead = Partition { topic: topic("orders.dead"), number: 0 };
    until("the letters are there", async || bus.range(&dead).await.is_ok_and(|(_, end)| end == count)).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let mut reader =
        bus.subscribe(Subscription::new("reader", [topic("orders.dead")]).unwrap()).await.unwrap();
    let mut letters = Vec::new();
    while i64::try_from(letters.len()).unwrap() < count {
        if let BusEvent::Records(records) = reader.next().await.unwrap() {
            letters.extend(records.into_iter().map(|received| received.record));
        }
    }
    letters
}

fn header(record: &Record, name: &str) -> String {
    let value = record.headers.get(&format!("hapax-dead-{name}"));
    String::from_utf8(value.unwrap_or_else(|| panic!("no {name}")).to_vec()).unwrap()
}

/// A record without a payload is not one with an empty payload: held, delivered again, dead, and copied out.
#[tokio::test]
async fn a_tombstone_stays_a_tombstone() {
    let bus = bus(&[record("gone", None), record("empty", Some(""))]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let handler = move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        async { Err(Failed::retryable("no")) }
    };
    let mut letters = dead_letters(&bus, consumer(&bus, &faulty::Faulty::default()), handler, 2).await;
    letters.sort_by_key(|letter| letter.key.clone());
    let payloads: Vec<_> = letters.iter().map(|letter| letter.payload.as_deref()).collect();
    assert_eq!(payloads, [Some(&b""[..]), None]);
    assert_eq!(runs.load(Ordering::SeqCst), 10, "each ran five times");
}

/// What is copied because the ledger is away has all the headers of a dead letter.
#[tokio::test]
async fn what_was_never_claimed_is_reported_like_any_dead_letter() {
    let bus = bus(&[record("e", Some("{}"))]).await;
    let ledger = faulty::Faulty::default();
    ledger.faults.claims_lost.store(u32::MAX, Ordering::SeqCst);
    let builder = consumer(&bus, &ledger).with(|settings| settings.outage = OutagePolicy::DeadLetter);
    let letter = dead_letters(&bus, builder, |_| async { Ok(()) }, 1).await.remove(0);
    for name in ["reason", "scope", "topic", "partition", "offset"] {
        header(&letter, name);
    }
    assert_eq!((header(&letter, "code"), header(&letter, "attempts")), ("unavailable".into(), "0".into()));
    let (first, last) = (header(&letter, "first-at"), header(&letter, "last-at"));
    assert_eq!(first, last);
    assert!(hapax::Time::parse(&first).is_ok(), "{first}");
}

/// A ledger that fails over under a running consumer may lack what its window knows: from then on the window is not believed.
#[tokio::test]
async fn t01_a_ledger_that_failed_over_is_not_contradicted_by_its_window() {
    use hapax::window::{MemoryWindow, Window, WindowSettings};
    let bus = bus(&[record("e", Some("{}"))]).await;
    let ledger = faulty::Faulty::default();
    let window = Arc::new(MemoryWindow::new(WindowSettings::new("1"), 10).unwrap());
    let builder = consumer(&bus, &ledger).window(Arc::clone(&window) as Arc<dyn Window>);
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    let passed = async |word: &str, count: u64| {
        until(word, async || handle.progress().passed.get(word) == Some(&count)).await;
    };
    let again = async || {
        bus.publish(&topic("orders"), &[record("e", Some("{}"))]).await.unwrap().remove(0).unwrap();
    };
    passed("done", 1).await;
    until("remembered", async || !window.is_empty()).await;
    again().await;
    passed("window", 1).await;
    ledger.faults.incarnations.fetch_add(1, Ordering::SeqCst);
    again().await;
    passed("duplicate", 1).await; // the ledger was asked
    handle.stop();
    let counts = running.await.unwrap().unwrap();
    assert_eq!((counts["done"], counts["window"], counts["duplicate"]), (1, 1, 1), "{counts:?}");
}

/// Three consumers of a group, all of which look for dead letters: each is copied by one of them, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_of_three_copies_each_dead_letter_once() {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic("orders"), TopicSettings::new(6)).await.unwrap();
    let ledger = faulty::Faulty::default();
    let mut running = Vec::new();
    for _ in 0..3 {
        let builder = consumer(&bus, &ledger).with(|settings| {
            settings.held_interval = Duration::from_millis(1);
            settings.dead_reserve = Duration::from_hours(1);
        });
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        running.push((
            handle,
            tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Err(Failed::fatal("no")) })),
        ));
    }
    until("two partitions each", async || running.iter().all(|(of, _)| of.progress().partitions == 2)).await;
    for n in 0..50 {
        let records: Vec<_> = (0..6).map(|m| record(&format!("e-{n}-{m}"), Some("{}"))).collect();
        for answer in bus.publish(&topic("orders"), &records).await.unwrap() {
            answer.unwrap();
        }
    }
    let scope = hapax::Scope::new("mailer").unwrap();
    let passed =
        async || running.iter().map(|(of, _)| of.progress().passed.values().sum::<u64>()).sum::<u64>();
    until("all dead and copied", async || {
        passed().await == 300
            && ledger.unpublished_dead(&scope, &HeldQuery::all(), 1, None).await.unwrap().is_empty()
    })
    .await;
    for (handle, running) in running {
        handle.stop();
        running.await.unwrap().unwrap();
    }
    let mut copies = 0;
    for number in 0..6 {
        copies += bus.range(&Partition { topic: topic("orders.dead"), number }).await.unwrap().1;
    }
    assert_eq!(copies, 300);
}

/// What waits in the ledger to be run, and can be at once.
fn held(id: &str, from: &str, partition: i32) -> hapax::ledger::Claim {
    use hapax::ledger::{Claim, FailureSettings, Identity, Mode};
    let settings = FailureSettings {
        attempts_max: 9,
        backoff_base: Duration::ZERO,
        backoff_max: Duration::ZERO,
        jitter_permille: 0,
    };
    let identity = Identity::new(hapax::Scope::new("mailer").unwrap(), hapax::EventId::new(id).unwrap());
    let mut claim = Claim::new(identity, Mode::Failed(settings));
    claim.hold = true;
    claim.body = Some(Record { headers: record(id, None).headers, ..Record::default() });
    claim.origin = Some(hapax::event::Origin::new(topic(from), partition, 0));
    claim
}

/// What is held of a topic that a process does not consume is not for its handler, however long it waits, and neither are the
/// copies of its dead letters: it waits for whoever consumes that topic.
#[tokio::test]
async fn what_is_held_of_another_topic_waits_for_whoever_consumes_it() {
    let bus = bus(&[]).await;
    let ledger = faulty::Faulty::default();
    let mut dead = held("dead", "invoices", 0);
    dead.mode = hapax::ledger::Mode::Refused;
    ledger.claim(&[held("theirs", "invoices", 0), dead, held("mine", "orders", 0)]).await.unwrap();
    let scope = hapax::Scope::new("mailer").unwrap();
    for (name, id, left) in [("orders", "mine", 2), ("invoices", "theirs", 1)] {
        let bus: Arc<dyn Bus> = bus.clone();
        bus.create_topic(&topic("invoices"), TopicSettings::new(1)).await.ok();
        let builder = Consumer::builder(bus.clone(), ledger.clone()).scope("mailer").topic(name);
        let builder = builder.with(|settings| settings.held_interval = Duration::from_millis(5));
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        let (seen, mut ids) = tokio::sync::mpsc::unbounded_channel();
        let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
            seen.send(event.id.to_string()).unwrap();
            async { Ok(()) }
        }));
        // What is older than it in the ledger would have been taken up before it, or with it.
        assert_eq!(ids.recv().await.unwrap(), id);
        until("settled", async || handle.progress().passed.get("done") == Some(&1)).await;
        if name == "invoices" {
            let copied = Partition { topic: topic("invoices.dead"), number: 0 };
            until("copied", async || bus.range(&copied).await.is_ok_and(|(_, end)| end == 1)).await;
        }
        handle.stop();
        running.await.unwrap().unwrap();
        assert!(ids.recv().await.is_none(), "no other");
        assert_eq!(ledger.due(&scope, &HeldQuery::all(), 9).await.unwrap().held, left);
        let uncopied = ledger.unpublished_dead(&scope, &HeldQuery::all(), 9, None).await.unwrap().len();
        assert_eq!(uncopied, usize::from(name == "orders"));
    }
}

/// More than a page of held events that a process does not want: each stays held and is not recorded as done, they keep nothing
/// that is wanted from being found, and a process that wants them runs them.
#[tokio::test]
async fn what_is_held_and_not_wanted_waits_for_somebody_who_wants_it() {
    use hapax::consumer::Wants;
    use hapax::ledger::{Filter, State};
    const UNWANTED: u64 = 450;
    let bus = bus(&[]).await;
    let ledger = faulty::Faulty::default();
    let of_kind = |id: &str, kind: &str| {
        let mut claim = held(id, "orders", 0);
        let headers = [("idempotency_key", id.to_owned()), ("ce_type", kind.to_owned())];
        claim.body.as_mut().unwrap().headers = Headers::from_iter(headers);
        claim
    };
    // All of one moment, and behind them one that is wanted.
    let unwanted: Vec<_> = (0..UNWANTED).map(|n| of_kind(&format!("b-{n}"), "b")).collect();
    ledger.claim(&unwanted).await.unwrap();
    ledger.claim(&[of_kind("a", "a")]).await.unwrap();
    let scope = hapax::Scope::new("mailer").unwrap();
    for (kinds, runs, left) in [(&["a"][..], 1, UNWANTED), (&["a", "b"], UNWANTED, 0)] {
        let wants = Wants::Kinds(kinds.iter().map(|kind| hapax::id::Kind::new(*kind).unwrap()).collect());
        let consumer = consumer(&bus, &ledger).with(|settings| settings.wants = wants).build().unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
        let passed = |word: &str| handle.progress().passed.get(word).copied().unwrap_or_default();
        until("all run", async || passed("done") == runs && passed("left") == left).await;
        handle.stop();
        let counts = running.await.unwrap().unwrap();
        let counted = |word: &str| counts.get(word).copied().unwrap_or_default();
        assert_eq!((counted("done"), counted("left")), (runs, left), "each once: {counts:?}");
        assert_eq!(ledger.due(&scope, &HeldQuery::all(), 9).await.unwrap().held, left);
        let done = Filter { states: vec![State::Done], ..Filter::default() };
        let done = ledger.list(&done, None, 1000).await.unwrap().entries.len() as u64;
        assert_eq!(done, 1 + UNWANTED - left, "nothing is done that did not run");
    }
}

/// Three members take what is held, whoever has its partition, and each event runs once. Some of it is of partitions that nobody has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_member_takes_what_is_due() {
    const EVENTS: u64 = 600;
    let bus = bus(&[]).await;
    let ledger = faulty::Faulty::default();
    let claims: Vec<_> = (0..EVENTS).map(|n| held(&format!("e-{n}"), "orders", (n % 7) as i32)).collect();
    ledger.claim(&claims).await.unwrap();
    let (seen, mut ids) = tokio::sync::mpsc::unbounded_channel();
    // Nobody finishes an event before everybody has one, so that one cannot do it all.
    let at_work = tokio::sync::watch::Sender::new(std::collections::BTreeSet::new());
    let mut running = Vec::new();
    for member in 0..3 {
        let consumer = consumer(&bus, &ledger).build().unwrap();
        let (handle, seen, at_work) = (consumer.handle(), seen.clone(), at_work.clone());
        running.push((
            handle,
            tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
                seen.send((member, event.id.to_string())).unwrap();
                at_work.send_modify(|members| {
                    members.insert(member);
                });
                let mut at_work = at_work.subscribe();
                async move {
                    at_work.wait_for(|members| members.len() == 3).await.unwrap();
                    Ok(())
                }
            })),
        ));
    }
    drop(seen);
    let done = |handle: &hapax::consumer::ConsumerHandle| handle.progress().passed.get("done").copied();
    let all = async || running.iter().filter_map(|(handle, _)| done(handle)).sum::<u64>() == EVENTS;
    until("all run", all).await;
    for (handle, running) in running {
        handle.stop();
        running.await.unwrap().unwrap();
    }
    let mut ran = Vec::new();
    let mut members = std::collections::BTreeSet::new();
    while let Some((member, id)) = ids.recv().await {
        ran.push(id);
        members.insert(member);
    }
    assert_eq!(ran.len() as u64, EVENTS);
    ran.sort();
    ran.dedup();
    assert_eq!((ran.len() as u64, members.len()), (EVENTS, 3), "each once, and everybody had some");
    let scope = hapax::Scope::new("mailer").unwrap();
    assert_eq!(ledger.due(&scope, &HeldQuery::all(), 9).await.unwrap().held, 0);
}

/// A bus that does not take some records: those whose key says so.
struct Choosy {
    inner: Arc<MemoryBus>,
    is_back: AtomicBool,
}

impl Choosy {
    fn objection(&self, record: &Record) -> Option<Error> {
        let what = "a fault the test ordered".to_owned();
        match record.key.as_deref()? {
            key if key.starts_with(b"refused") => Some(Error::Refused { what, source: None }),
            key if key.starts_with(b"away") && !self.is_back.load(Ordering::SeqCst) => {
                Some(Error::Unavailable { what, source: None })
            }
            _ => None,
        }
    }
}

#[async_trait::async_trait]
impl Bus for Choosy {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let mut answers = Vec::new();
        for record in records {
            answers.push(match self.objection(record) {
                Some(error) => Err(error),
                None => self.inner.publish(topic, std::slice::from_ref(record)).await?.remove(0),
            });
        }
        Ok(answers)
    }
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.inner.publish_to(partition, records).await
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        self.inner.subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.inner.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.inner.topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.inner.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.inner.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// Many dead letters that cannot be copied, because their topic refuses them or is away: one that is behind them is copied all the
/// same, of another topic and of the same; and they are when the topic is back.
#[tokio::test]
async fn dead_letters_that_cannot_be_copied_hide_no_other() {
    for (from, reason, count) in
        [("bad", "refused", 1300), ("orders", "refused", 1300), ("bad", "away", 450), ("orders", "away", 450)]
    {
        let inner = bus(&[]).await;
        inner.create_topic(&topic("bad"), TopicSettings::new(1)).await.unwrap();
        let ledger = faulty::Faulty::default();
        let dead = |id: &str, from: &str| {
            let mut claim = held(id, from, 0);
            claim.mode = hapax::ledger::Mode::Refused;
            claim.body.as_mut().unwrap().key = Some(id.to_owned().into());
            claim
        };
        let blocked: Vec<_> = (0..count).map(|n| dead(&format!("{reason}-{n}"), from)).collect();
        ledger.claim(&blocked).await.unwrap();
        ledger.claim(&[dead("fine", "orders")]).await.unwrap();
        let bus = Arc::new(Choosy { inner, is_back: AtomicBool::new(false) });
        let builder = Consumer::builder(bus.clone() as Arc<dyn Bus>, ledger.clone()).scope("mailer");
        let builder = builder.topic("bad").topic("orders");
        let consumer = builder.with(|settings| {
            settings.held_interval = Duration::from_millis(5);
            settings.dead_reserve = Duration::from_secs(1); // what is away is tried again soon
        });
        let consumer = consumer.build().unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
        let copies = async |from: &str| {
            let partition = Partition { topic: topic(&format!("{from}.dead")), number: 0 };
            bus.range(&partition).await.map_or(0, |(_, end)| end)
        };
        until(&format!("copied behind {reason} ones of {from}"), async || copies("orders").await == 1).await;
        if reason == "away" {
            bus.is_back.store(true, Ordering::SeqCst);
            let all = async || copies("orders").await + copies("bad").await;
            until("all copied", async || all().await == count + 1).await;
            let scope = hapax::Scope::new("mailer").unwrap();
            until("all noted", async || {
                ledger.unpublished_dead(&scope, &HeldQuery::all(), 1, None).await.unwrap().is_empty()
            })
            .await;
            assert_eq!(all().await, count + 1, "each once");
        }
        handle.stop();
        running.await.unwrap().unwrap();
    }
}

/// More than a page of dead letters that became too large for the topic on their way there: each is copied without its payload,
/// and says so; the ledger has it; and those behind them are copied too.
#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_that_are_too_large_are_copied_bare_and_block_nobody() {
    use hapax::bus::embedded::{EmbeddedBus, EmbeddedSettings};
    const LARGE: usize = 230;
    let dir = tempfile::tempdir().unwrap();
    let mut settings = EmbeddedSettings::default();
    settings.record_bytes_max = 1100;
    let bus = Arc::new(
        EmbeddedBus::open_with(dir.path().join("bus.db"), settings, Arc::new(hapax::clock::SystemClock))
            .unwrap(),
    );
    bus.create_topic(&topic("orders"), TopicSettings::new(1)).await.unwrap();
    let large: &'static str = "x".repeat(1000).leak();
    let mut records: Vec<_> = (0..LARGE).map(|n| record(&format!("large-{n}"), Some(large))).collect();
    records.push(record("small", Some("{}")));
    for answer in bus.publish(&topic("orders"), &records).await.unwrap() {
        answer.unwrap();
    }
    let ledger = faulty::Faulty::default();
    let consumer = Consumer::builder(bus.clone() as Arc<dyn Bus>, ledger.clone())
        .scope("mailer")
        .topic("orders")
        .with(|settings| settings.held_interval = Duration::from_millis(10))
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Err(Failed::fatal("no")) }));
    let dead = Partition { topic: topic("orders.dead"), number: 0 };
    let all = i64::try_from(records.len()).unwrap();
    until("all copied", async || bus.range(&dead).await.is_ok_and(|(_, end)| end == all)).await;
    let scope = hapax::Scope::new("mailer").unwrap();
    until("all noted", async || {
        ledger.unpublished_dead(&scope, &HeldQuery::all(), 1, None).await.unwrap().is_empty()
    })
    .await;
    handle.stop();
    running.await.unwrap().unwrap();
    let mut reader =
        bus.subscribe(Subscription::new("reader", [topic("orders.dead")]).unwrap()).await.unwrap();
    let mut letters = Vec::new();
    while letters.len() < records.len() {
        if let BusEvent::Records(records) = reader.next().await.unwrap() {
            letters.extend(records.into_iter().map(|received| received.record));
        }
    }
    let bare: Vec<_> = letters.iter().filter(|letter| letter.payload.as_deref() == Some(b"")).collect();
    assert_eq!(bare.len(), LARGE);
    assert!(header(bare[0], "left-out").contains("1000 bytes"), "{}", header(bare[0], "left-out"));
    assert!(
        bare.iter()
            .any(|letter| header(letter, "id") == "large-0" && header(letter, "reason").contains("no"))
    );
    let entry =
        ledger.get(&hapax::ledger::Identity::new(scope, hapax::EventId::new("large-0").unwrap()), None).await;
    assert_eq!(entry.unwrap().unwrap().row.body.unwrap().payload.unwrap().len(), 1000);
}
