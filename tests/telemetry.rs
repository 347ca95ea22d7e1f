//! What is emitted is what `docs/telemetry.md` and the constants of `hapax::telemetry` say, under every prefix, also for
//! a recorder that is installed after the guard was made.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax::error::Source;
use hapax::guard::{DeadLetter, DeadLetters, GuardBuilder};
use hapax::ledger::{Intervene, Intervention};
use hapax::telemetry::{Kind, METRICS, SPANS};
use hapax::window::{MemoryWindow, OnOutage, OutageWindow, Window, WindowSettings};
use hapax::{Error, Event, EventId, Guard, Operations, Origin, Outcome, Topic};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, SharedString, Unit,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

#[path = "support/faulty.rs"]
mod faulty;
use faulty::Faulty;

/// Every increment, as kind, name and labels.
type Emitted = Arc<Mutex<BTreeSet<(&'static str, String, BTreeMap<String, String>)>>>;

#[derive(Clone, Default)]
struct Recorder(Emitted);

/// A metric that notes that it was touched.
struct Noted(&'static str, Key, Emitted);

impl Noted {
    fn note(&self) {
        let labels =
            self.1.labels().map(|label| (label.key().to_owned(), label.value().to_owned())).collect();
        self.2.lock().unwrap().insert((self.0, self.1.name().to_owned(), labels));
    }
}

impl CounterFn for Noted {
    fn increment(&self, _: u64) {
        self.note();
    }
    fn absolute(&self, _: u64) {
        self.note();
    }
}
impl GaugeFn for Noted {
    fn increment(&self, _: f64) {
        self.note();
    }
    fn decrement(&self, _: f64) {
        self.note();
    }
    fn set(&self, _: f64) {
        self.note();
    }
}
impl HistogramFn for Noted {
    fn record(&self, _: f64) {
        self.note();
    }
}

impl metrics::Recorder for Recorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Noted("counter", key.clone(), self.0.clone())))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Noted("gauge", key.clone(), self.0.clone())))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Noted("histogram", key.clone(), self.0.clone())))
    }
}

/// Fields with the values they had.
type Values = BTreeMap<String, BTreeSet<String>>;

/// Spans by name.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<BTreeMap<String, Values>>>);

struct Fields<'a>(&'a mut Values);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = format!("{value:?}").trim_matches('"').to_owned();
        self.0.entry(field.name().to_owned()).or_default().insert(text);
    }
}

impl<S> Layer<S> for Spans
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut spans = self.0.lock().unwrap();
        let fields = spans.entry(attributes.metadata().name().to_owned()).or_default();
        for field in attributes.metadata().fields() {
            fields.entry(field.name().to_owned()).or_default();
        }
        attributes.record(&mut Fields(fields));
    }
    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut spans = self.0.lock().unwrap();
        let name = context.span(id).unwrap().name().to_owned();
        values.record(&mut Fields(spans.entry(name).or_default()));
    }
}

struct Letters;

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, _: &DeadLetter) -> Result<(), Source> {
        Ok(())
    }
}

/// A window that is away.
#[derive(Debug)]
struct Away;

#[async_trait]
impl Window for Away {
    async fn seen(&self, _: &[hapax::window::Sighting]) -> hapax::Result<Vec<bool>> {
        Err(Error::unavailable("looking", "it is away"))
    }
    async fn remember(&self, _: &[hapax::window::Sighting]) -> hapax::Result<()> {
        Err(Error::unavailable("writing", "it is away"))
    }
    async fn check(&self, _: Option<Duration>) -> Vec<hapax::ledger::Finding> {
        Vec::new()
    }
}

async fn look_through_windows(prefix: Option<&str>) {
    let scope = hapax::Scope::new("billing").unwrap();
    let event = [hapax::ledger::Identity::new(scope, EventId::new("e").unwrap()).into()];
    let window = MemoryWindow::new(WindowSettings::new("1"), 10).unwrap();
    let window = OutageWindow::new(window, OnOutage::PassThrough).telemetry_prefix(prefix);
    assert_eq!(window.seen(&event).await.unwrap(), [false]);
    window.remember(&event).await.unwrap();
    assert_eq!(window.seen(&event).await.unwrap(), [true]);
    let away = OutageWindow::new(Away, OnOutage::PassThrough).telemetry_prefix(prefix);
    assert_eq!(away.seen(&event).await.unwrap(), [false]);
    away.remember(&event).await.unwrap();
}

/// One delivery that meets a ledger that is away, and takes effect when it is back.
async fn consume(prefix: Option<String>) {
    use hapax::bus::{Bus, BusEvent, Record as BusRecord, Subscription, TopicSettings, memory::MemoryBus};
    use hapax::consumer::{Consumer, Handled};
    let bus = Arc::new(MemoryBus::default());
    let orders = Topic::new("orders").unwrap();
    bus.create_topic(&orders, TopicSettings::new(1)).await.unwrap();
    let headers =
        [("eventId", "consumed"), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")];
    let record = BusRecord { headers: headers.into_iter().collect(), ..BusRecord::default() };
    // The group has begun, and retention is faster than it.
    let mut member = bus.subscribe(Subscription::new("billing", [orders.clone()]).unwrap()).await.unwrap();
    let BusEvent::Assigned(given) = member.next().await.unwrap() else { panic!("given first") };
    assert!(member.commit(&[(given[0].clone(), 0)]).await.unwrap()[0].is_ok());
    member.leave().await.unwrap();
    bus.publish(&orders, &[BusRecord::default(), record]).await.unwrap();
    bus.remove_below(&given[0].partition, 1).unwrap();
    let ledger = Faulty::default();
    ledger.faults.claims_lost.store(12, Ordering::SeqCst);
    let builder = Consumer::builder(bus, ledger).scope("billing").topic("orders");
    let consumer = builder.with(move |settings| settings.telemetry_prefix = prefix).build().unwrap();
    let handle = consumer.handle();
    let counts = consumer
        .leased(move |_: &Event, _: &hapax::guard::Run| {
            handle.stop();
            async { Handled::Ok(()) }
        })
        .await
        .unwrap();
    assert_eq!((counts["done"], counts["removed"]), (1, 1));
}

/// A relay that meets a hole, an outage, a refusal and a repeat, and ends.
async fn relay(prefix: Option<String>) {
    use hapax::bus::{Bus, TopicSettings, memory::MemoryBus};
    use hapax::journal::{Append, Expected, Journal as _, JournalSettings, MemoryJournal};
    use hapax::ledger::MismatchRule;
    use hapax::relay::{Relay, RelaySettings};
    use hapax::testing::relay::{FaultyBus, OddJournal, away};
    let bus = Arc::new(FaultyBus::new(Arc::new(MemoryBus::default())));
    let orders = Topic::new("orders").unwrap();
    bus.create_topic(&orders, TopicSettings::new(1)).await.unwrap();
    let mut warning = JournalSettings::default();
    warning.mismatch = MismatchRule::Warn;
    warning.telemetry_prefix.clone_from(&prefix);
    let warned = MemoryJournal::new(warning);
    for payload in ["one", "two"] {
        let event = Event::new(EventId::new("reused").unwrap()).payload(payload);
        let append = Append::new(hapax::Aggregate::new("a").unwrap(), Expected::Any, [event]);
        assert_eq!(warned.append(&append).await.unwrap().last_seq(), 1);
    }
    let journal = Arc::new(OddJournal::default());
    for n in 1..=4 {
        let event = Event::new(EventId::new(format!("e-{n}")).unwrap());
        let append = Append::new(hapax::Aggregate::new(format!("a-{n}")).unwrap(), Expected::New, [event]);
        let _ = journal.append(&append).await.unwrap();
    }
    journal.hide([4]);
    let mut records = 0;
    bus.fail(move |_| {
        records += 1;
        (records > 1 && records < 4).then(away)
    });
    let mut settings = RelaySettings::new(hapax::RelayName::new("main").unwrap(), orders);
    settings.telemetry_prefix = prefix;
    settings.flush_max = Some(1); // the first is acknowledged, then nothing is
    settings.backoff_base = Duration::from_millis(1);
    settings.pulse = Some(Duration::from_millis(1));
    let relay = Relay::new(journal.clone(), bus, settings).unwrap();
    let handle = relay.handle();
    let done = async {
        while handle.progress().holes == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        journal.show();
        while handle.progress().published < 4 || handle.progress().pulses == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (ran, ()) = tokio::join!(relay.run(), async {
        done.await;
        handle.stop();
    });
    let progress = ran.unwrap();
    assert!(progress.suppressed > 0 && progress.outages > 0, "{progress:?}");
}

/// A read model that is fed something that it cannot read.
async fn feed(prefix: Option<String>) {
    use hapax::analytics::{Feed, FeedSettings, MemoryReadModel};
    use hapax::bus::{Bus, Partition, Record as BusRecord, TopicSettings, memory::MemoryBus};
    let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("records").unwrap());
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let broken = BusRecord {
        payload: Some("{".into()),
        headers: [("ce_type", "record.updated")].into_iter().collect(),
        ..BusRecord::default()
    };
    bus.publish(&topic, &[broken]).await.unwrap();
    let partition = Partition { topic: topic.clone(), number: 0 };
    let mut settings = FeedSettings::new(topic);
    (settings.telemetry_prefix, settings.group) = (prefix, Some("reads".into()));
    let feed = Feed::new(bus.clone(), Arc::new(MemoryReadModel::default()), settings).unwrap();
    let handle = feed.handle();
    let (ran, ()) = tokio::join!(feed.run(), async {
        while bus.committed("reads", &partition).await.unwrap() != Some(1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        handle.stop();
    });
    assert_eq!(ran.unwrap().rejected, 1);
}

/// Does everything once.
async fn live(guard: Guard<Faulty>, unguarded: Guard<Faulty>) {
    let origin = Origin::new(Topic::new("orders").unwrap(), 3, 42);
    let event = Event::new(EventId::new("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10").unwrap()).origin(origin);
    assert!(guard.try_claim(&event).await.unwrap().is_claimed());
    assert!(!guard.try_claim(&event).await.unwrap().is_claimed());
    for payload in ["one", "two"] {
        let reused = Event::new(EventId::new("reused").unwrap()).payload(payload);
        let _ = guard.try_claim(&reused).await.unwrap();
    }
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let work = || async { Ok::<_, String>(()) };
    assert!(guard.process_if_new_with_trace("traced", trace, work).await.unwrap().may_acknowledge());
    let fail = || async { Err::<(), _>("no such account") };
    assert!(guard.process_with_dlq("dead", fail, &Letters).await.unwrap().may_acknowledge());

    let Outcome::First(mut lease) = guard.lease("lost").await.unwrap() else { panic!() };
    let release = Intervene {
        identity: lease.key().clone(),
        time: None,
        what: Intervention::Release,
        by: "test".into(),
        reason: "to lose it".into(),
        out_of_order: false,
        token: None,
        dry_run: false,
    };
    guard.ledger().intervene(&release).await.unwrap();
    lease.run(std::future::pending::<()>()).await.unwrap_err();

    // More repeats at once than are logged.
    for n in 0..300 {
        let id = format!("repeat-{n}");
        let _ = guard.mark_processed(id.as_str(), None).await.unwrap();
        assert!(matches!(guard.lease(id.as_str()).await.unwrap(), Outcome::Duplicate(_)));
    }
    guard.skip_log().flush().await.unwrap();

    guard.sweep().await.unwrap();
    guard.ledger().faults.sweeps_failing.store(1, Ordering::SeqCst);
    guard.sweep().await.unwrap_err();
    assert!(unguarded.try_claim("e").await.unwrap().is_claimed());
}

fn seen(prefix: Option<&str>) -> (Recorder, Spans) {
    let builder = || -> GuardBuilder<Faulty> {
        let mut settings = hapax::ledger::Settings::default();
        settings.mismatch = hapax::ledger::MismatchRule::Warn;
        let inner = hapax::backend::memory::MemoryLedger::new(settings);
        let builder = Guard::builder(Faulty { inner, ..Faulty::default() })
            .scope("billing")
            .attempts_max(1)
            .lease(Duration::from_secs(5), Duration::from_millis(10));
        match prefix {
            Some(prefix) => builder.telemetry_prefix(prefix),
            None => builder,
        }
    };
    let (guard, unguarded) = (builder().build().unwrap(), builder().enabled(false).build().unwrap());
    // Both are installed late, and for this thread only, which is where everything runs.
    let (recorder, spans) = (Recorder::default(), Spans::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let subscriber = tracing_subscriber::registry().with(spans.clone());
    tracing::subscriber::with_default(subscriber, || {
        metrics::with_local_recorder(&recorder, || {
            runtime.block_on(async {
                live(guard, unguarded).await;
                consume(prefix.map(str::to_owned)).await;
                relay(prefix.map(str::to_owned)).await;
                feed(prefix.map(str::to_owned)).await;
                look_through_windows(prefix).await;
            });
        });
    });
    (recorder, spans)
}

/// The cells of the table rows of the docs that begin with a name in backticks.
fn rows() -> Vec<Vec<String>> {
    let text = include_str!("../docs/telemetry.md");
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

fn words(cell: &str) -> BTreeSet<String> {
    cell.split_whitespace().map(|word| word.trim_matches('`').to_owned()).collect()
}

fn word(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

#[test]
fn metrics_are_those_of_the_table() {
    let documented: BTreeSet<(String, String, BTreeSet<String>)> = rows()
        .iter()
        .filter(|row| row.len() == 4)
        .map(|row| (row[1].clone(), word(&row[0]), words(&row[2])))
        .collect();
    let kind = |kind| match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    let constants = METRICS.iter().map(|metric| {
        let labels = metric.labels.iter().map(|&label| label.to_owned()).collect();
        (kind(metric.kind).to_owned(), metric.name.to_owned(), labels)
    });
    assert_eq!(constants.collect::<BTreeSet<_>>(), documented);

    for (prefix, before) in [(None, ""), (Some("im2be"), "im2be_")] {
        let (recorder, _) = seen(prefix);
        let emitted = recorder.0.lock().unwrap().clone();
        let shapes = emitted.iter().map(|(kind, name, labels)| {
            let name = name.strip_prefix(before).unwrap_or_else(|| panic!("{name} lacks the prefix"));
            ((*kind).to_owned(), name.to_owned(), labels.keys().cloned().collect())
        });
        assert_eq!(shapes.collect::<BTreeSet<_>>(), documented);
        for (_, name, labels) in &emitted {
            for (label, value) in
                labels.iter().filter(|(label, _)| !["consumer_scope_id", "relay"].contains(&label.as_str()))
            {
                let name = &name[before.len()..];
                let row = rows().into_iter().find(|row| word(&row[0]) == name && word(&row[1]) == *label);
                assert!(words(&row.unwrap()[2]).contains(value), "{name}{{{label}={value}}}");
            }
        }
        let claims = |outcome: &str| {
            emitted.iter().any(|(_, name, labels)| {
                *name == format!("{before}dedup_claims_total")
                    && labels["outcome"] == outcome
                    && labels["consumer_scope_id"] == "billing"
            })
        };
        assert!(claims("claimed") && claims("duplicate"));
        let checks = |result: &str| {
            let name = format!("{before}idempotent_consumer_checks_total");
            emitted.contains(&("counter", name, BTreeMap::from([("result".into(), result.into())])))
        };
        assert!(checks("new"));
    }
}

#[test]
fn spans_are_those_of_the_table() {
    let names: BTreeSet<&str> = SPANS.iter().map(|(name, _)| *name).collect();
    let documented: BTreeMap<String, BTreeSet<String>> = rows()
        .iter()
        .filter(|row| names.contains(word(&row[0]).as_str()))
        .map(|row| (word(&row[0]), words(&row[1])))
        .collect();
    let fields = |fields: &[&str]| fields.iter().map(|&field| field.to_owned()).collect();
    let constants = SPANS.iter().map(|(name, with)| ((*name).to_owned(), fields(with)));
    assert_eq!(constants.collect::<BTreeMap<_, _>>(), documented);

    let (_, spans) = seen(Some("im2be"));
    let spans = spans.0.lock().unwrap().clone();
    let shapes = spans.iter().map(|(name, fields)| (name.clone(), fields.keys().cloned().collect()));
    assert_eq!(shapes.collect::<BTreeMap<_, BTreeSet<_>>>(), documented);
    let has =
        |span: &str, field: &str, value: &str| assert!(spans[span][field].contains(value), "{spans:#?}");
    has("dedup.try_claim", "otel.name", "im2be.dedup.try_claim");
    has("dedup.try_claim", "consumer.scope_id", "billing");
    has("dedup.try_claim", "event.id", "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10");
    has("dedup.try_claim", "event.week_start", "2024-07-15");
    has("dedup.try_claim", "event.week_start", "timeless");
    has("dedup.try_claim", "kafka.topic", "orders");
    has("dedup.try_claim", "kafka.partition", "3");
    has("dedup.try_claim", "kafka.offset", "42");
    has("dedup.try_claim", "dedup.outcome", "claimed");
    has("dedup.try_claim", "dedup.outcome", "duplicate");
    has("dedup.process", "trace.parent", "4bf92f3577b34da6a3ce929d0e0e4736");
    let (_, spans) = seen(None);
    assert!(spans.0.lock().unwrap()["dedup.try_claim"]["otel.name"].is_empty());
}
