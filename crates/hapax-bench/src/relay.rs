//! The relay: events per second against a bare idempotent producer over the same rows, and the
//! delay from an event's commit until it is on the bus.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
use hapax::bus::kafka::{KafkaBus, KafkaSettings};
use hapax::bus::{Bus, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings};
use hapax::journal::{Append, Expected, Journal, Position};
use hapax::relay::{Relay, RelaySettings};
use hapax::{Aggregate, Event, EventId, Kind, Origin, RelayName, Topic};
use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::types::RDKafkaErrorCode;

use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, interleave, quantile, rate};
use crate::kafka::{Filled, brokers, bus, fresh};
use crate::pg::{Schema, pool};

const PARTITIONS: i32 = 4;
const AGGREGATES: usize = 1000;
const PER_SECOND: usize = 10_000;
/// The time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(120);

async fn journal(schema: &Schema) -> Fallible<Arc<PgJournal>> {
    let mut settings = PgJournalSettings::default();
    settings.schema.clone_from(&schema.name);
    settings.pooling = Pooling::Session;
    Ok(Arc::new(PgJournal::with_pool(pool(8).await?, settings).await?))
}

fn append(n: usize) -> hapax::Result<Append> {
    let event = Event::new(EventId::now_v7())
        .kind(Kind::new("order.changed")?)
        .payload(format!(r#"{{"n":{n},"note":"{n:0>180}"}}"#));
    Ok(Append::new(Aggregate::new(format!("order-{}", n % AGGREGATES))?, Expected::Any, [event]))
}

async fn append_all(journal: &PgJournal, appends: &[Append]) -> Fallible<()> {
    for some in appends.chunks(500) {
        for appended in journal.append_many(some).await? {
            let _ = appended?;
        }
    }
    Ok(())
}

/// What a user would write: read a page, send it with an idempotent producer, continue; at the end,
/// wait for the outstanding records. No checkpoint, no leadership, no order across failures.
async fn bare(journal: &PgJournal, bus: &KafkaBus, page: usize, events: usize) -> Fallible<f64> {
    // Creating and deleting the topic is not measured: it would bring all ratios closer to 1.
    let topic = Filled::empty(bus, "relay-bare", PARTITIONS).await?;
    let reached = rate(events, produced(journal, &topic.topic, page)).await?;
    topic.delete().await?;
    Ok(reached)
}

async fn produced(journal: &PgJournal, topic: &Topic, page: usize) -> Fallible<()> {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers()?)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .create()?;
    let mut after = Position::START;
    loop {
        let batch = journal.read(&after, page).await?;
        if batch.events.is_empty() {
            break;
        }
        for stored in &batch.events {
            let id = stored.event.id.as_str();
            let key = stored.aggregate().map_or("", |aggregate| aggregate.as_str());
            let headers =
                || OwnedHeaders::new().insert(Header { key: "eventId", value: Some(id.as_bytes()) });
            loop {
                let record = BaseRecord::to(topic.as_str()).key(key).payload(&stored.event.payload[..]);
                match producer.send(record.headers(headers())) {
                    Ok(()) => break,
                    Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                        producer.poll(Duration::from_millis(1));
                    }
                    Err((error, _)) => return Err(error.into()),
                }
            }
        }
        producer.poll(Duration::ZERO);
        after = batch.next;
    }
    Ok(producer.flush(LIMIT)?)
}

async fn waited(what: &str, is: impl Fn() -> bool) -> Fallible<()> {
    let end = Instant::now() + LIMIT;
    while !is() {
        if Instant::now() > end {
            return Err(format!("{what}: not within {LIMIT:?}").into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Runs a relay while `work` runs.
async fn beside<T>(
    journal: &Arc<PgJournal>,
    bus: Arc<dyn Bus>,
    topic: &Topic,
    batch_max: usize,
    work: impl AsyncFnOnce(hapax::relay::RelayHandle) -> Fallible<T>,
) -> Fallible<T> {
    let mut settings = RelaySettings::new(RelayName::new(fresh("relay"))?, topic.clone());
    settings.batch_max = batch_max;
    let relay = Relay::new(Arc::clone(journal) as Arc<dyn Journal>, bus, settings)?;
    let handle = relay.handle();
    let running = tokio::spawn(relay.run());
    let done = work(handle.clone()).await;
    handle.stop();
    running.await??;
    done
}

/// The relay's batch, if nobody sets it.
fn default_batch() -> Fallible<usize> {
    Ok(RelaySettings::new(RelayName::new("bench")?, Topic::new("bench")?).batch_max)
}

async fn relayed(
    journal: &Arc<PgJournal>,
    bus: &Arc<KafkaBus>,
    batch_max: usize,
    last: &Position,
    events: usize,
) -> Fallible<f64> {
    let topic = Filled::empty(bus, "relay", PARTITIONS).await?;
    let to = Arc::clone(bus) as Arc<dyn Bus>;
    let began = Instant::now();
    let took = beside(journal, to, &topic.topic, batch_max, async |watch| {
        waited("relaying", || watch.progress().position >= *last).await?;
        Ok(began.elapsed())
    })
    .await?;
    topic.delete().await?;
    Ok(events as f64 / took.as_secs_f64())
}

/// A bus that records when each event was acknowledged.
struct Timed {
    inner: Arc<KafkaBus>,
    at: Mutex<HashMap<Vec<u8>, Instant>>,
}

#[async_trait]
impl Bus for Timed {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> hapax::Result<Vec<hapax::Result<Origin>>> {
        let answers = self.inner.publish(topic, records).await?;
        let now = Instant::now();
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        for id in records.iter().filter_map(|record| record.headers.get("eventId")) {
            at.entry(id.to_vec()).or_insert(now);
        }
        drop(at);
        Ok(answers)
    }
    async fn publish_to(
        &self,
        partition: &Partition,
        records: &[Record],
    ) -> hapax::Result<Vec<hapax::Result<Origin>>> {
        self.inner.publish_to(partition, records).await
    }
    async fn subscribe(&self, subscription: Subscription) -> hapax::Result<Box<dyn Subscriber>> {
        self.inner.subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> hapax::Result<bool> {
        self.inner.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> hapax::Result<Option<TopicInfo>> {
        self.inner.topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> hapax::Result<(i64, i64)> {
        self.inner.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> hapax::Result<Option<i64>> {
        self.inner.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// Milliseconds from commit to acknowledgement of each event. `work` appends the events and returns
/// when each was committed.
async fn lags(
    bus: &Arc<KafkaBus>,
    work: impl AsyncFnOnce(&PgJournal, &Timed) -> Fallible<Vec<(EventId, Instant)>>,
) -> Fallible<Vec<f64>> {
    let schema = Schema::fresh(&pool(1).await?).await?;
    let journal = journal(&schema).await?;
    let topic = Filled::empty(bus, "relay-lag", PARTITIONS).await?;
    let timed = Arc::new(Timed { inner: Arc::clone(bus), at: Mutex::default() });
    let inner = Arc::clone(&timed) as Arc<dyn Bus>;
    let lags = beside(&journal, inner, &topic.topic, default_batch()?, async |watch| {
        waited("the lead", || watch.progress().leads).await?;
        let committed = work(&journal, &timed).await?;
        let count = || timed.at.lock().unwrap_or_else(PoisonError::into_inner).len();
        waited("the last events", || count() >= committed.len()).await?;
        let at = timed.at.lock().unwrap_or_else(PoisonError::into_inner);
        let lag = |(id, committed): &(EventId, Instant)| {
            at.get(id.as_str().as_bytes())
                .map(|at| at.saturating_duration_since(*committed).as_secs_f64() * 1e3)
        };
        Ok(committed.iter().filter_map(lag).collect())
    })
    .await?;
    topic.delete().await?;
    schema.drop().await?;
    Ok(lags)
}

/// Appends 100 events every 10 ms.
async fn steady(journal: &PgJournal, events: usize) -> Fallible<Vec<(EventId, Instant)>> {
    let every = Duration::from_millis(10);
    let each = PER_SECOND / 100;
    let mut committed = Vec::with_capacity(events);
    let mut next = Instant::now();
    let mut n = 0;
    while committed.len() < events {
        tokio::time::sleep(next.saturating_duration_since(Instant::now())).await;
        next += every;
        let appends = (0..each).map(|_| {
            n += 1;
            append(n)
        });
        let appends: Vec<_> = appends.collect::<hapax::Result<_>>()?;
        for appended in journal.append_many(&appends).await? {
            let _ = appended?;
        }
        let now = Instant::now();
        committed.extend(appends.into_iter().flat_map(|append| append.events).map(|event| (event.id, now)));
    }
    Ok(committed)
}

/// Appends one event, waits until it is on the bus, then appends the next.
async fn idle(journal: &PgJournal, timed: &Timed, events: usize) -> Fallible<Vec<(EventId, Instant)>> {
    let mut committed = Vec::with_capacity(events);
    for n in 0..events {
        let one = append(n)?;
        let id = one.events[0].id.clone();
        let _ = journal.append(&one).await?;
        committed.push((id, Instant::now()));
        let count = || timed.at.lock().unwrap_or_else(PoisonError::into_inner).len();
        waited("one event", || count() > n).await?;
        tokio::time::sleep(Duration::from_millis(20)).await; // let the relay become idle again
    }
    Ok(committed)
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let bus = bus().await?;
    // librdkafka's default.
    let slow = KafkaSettings::new(brokers()?).property("linger.ms", "5");
    let slow = Arc::new(KafkaBus::connect(slow).await?);
    Ok(vec![throughput(options, &bus, &slow).await?, latency(options, &bus, &slow).await?])
}

async fn throughput(options: &Options, bus: &Arc<KafkaBus>, slow: &Arc<KafkaBus>) -> Fallible<Report> {
    let events = options.events(50_000);
    let schema = Schema::fresh(&pool(1).await?).await?;
    let journal = journal(&schema).await?;
    let appends: Vec<_> = (0..events).map(append).collect::<hapax::Result<_>>()?;
    append_all(&journal, &appends).await?;
    let last = journal.stat().await?.last.ok_or("an empty journal")?;
    let (journal, last, batch) = (&journal, &last, default_batch()?);
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("bare idempotent producer, pages of {batch}"), || {
                bare(journal, bus, batch, events)
            }),
            Contestant::new("bare idempotent producer, pages of 2000", || bare(journal, bus, 2000, events)),
            Contestant::new("relay", || relayed(journal, bus, batch, last, events)),
            Contestant::new("relay, batch 2000", || relayed(journal, bus, 2000, last, events)),
            Contestant::new("relay, linger.ms=5", || relayed(journal, slow, batch, last, events)),
        ],
    )
    .await?;
    schema.drop().await?;
    // Compare each with the bare producer that reads pages of the same size.
    let ratio = |at: usize, bare: usize| lines[at].median() / lines[bare].median();
    let goals = vec![
        Goal::at_least("relay ÷ bare", ratio(2, 0), 0.75),
        Goal::at_least("relay, batch 2000 ÷ bare", ratio(3, 1), 0.7),
        Goal::at_least("relay, linger.ms=5 ÷ bare", ratio(4, 0), 0.7),
    ];
    Ok(Report {
        title: format!("Relay: {events} events of a PostgreSQL journal to Kafka"),
        unit: "events/s",
        lines,
        goals,
        notes: vec![
            "The bare producer waits for acknowledgements once, at the end, remembers nothing, and writes one header.".into(),
        ],
    })
}

async fn latency(options: &Options, bus: &Arc<KafkaBus>, slow: &Arc<KafkaBus>) -> Fallible<Report> {
    let (busy, alone) = (options.events(5 * PER_SECOND), options.events(300));
    let mut lines = Vec::new();
    for (name, bus) in [("as it comes", bus), ("linger.ms=5", slow)] {
        let at_rate = lags(bus, async |journal, _| steady(journal, busy).await).await?;
        let at_idle = lags(bus, async |journal, timed| idle(journal, timed, alone).await).await?;
        lines.push(Line::new(format!("{PER_SECOND} events/s, {name}"), at_rate));
        lines.push(Line::new(format!("idle, {name}"), at_idle));
    }
    let p99 = |at: usize| quantile(&lines[at].samples, 0.99);
    let goals = vec![
        Goal::at_most(format!("p99 at {PER_SECOND} events/s, ms"), p99(0), 50.0),
        Goal::at_most("p99 at idle, ms", p99(1), 10.0),
        Goal::at_most(format!("p99 at {PER_SECOND} events/s, linger.ms=5, ms"), p99(2), 50.0),
        Goal::at_most("p99 at idle, linger.ms=5, ms", p99(3), 10.0),
    ];
    Ok(Report {
        title: "Relay: from commit to acknowledgement".into(),
        unit: "ms",
        lines,
        goals,
        notes: vec!["Appended, relayed and acknowledged on one machine.".into()],
    })
}
