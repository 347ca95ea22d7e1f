//! Relays in processes of their own, killed with SIGKILL at every step, stopped past their lease, rewound: on a real Kafka, from a
//! journal in PostgreSQL, in S3 or in a directory, with a witness that reads the topic by itself.
#![cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

#[cfg(feature = "s3")]
use crate::support::objects;
use crate::support::postgres as support;
use crate::support::world;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crate::support::world::{signal, until};
use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
use hapax::bus::kafka::KafkaBus;
use hapax::bus::{Bus, TopicSettings};
use hapax::journal::{Append, Checkpoint, Expected, Journal, Position};
use hapax::relay::{Relay, RelaySettings};
use hapax::testing::relay::{Witnessed, read_topic, witness};
use hapax::{Aggregate, Event, EventId, Kind, Owner, RelayName, Topic};
use tokio::process::Child;

const BATCH: usize = 25;

fn name() -> RelayName {
    RelayName::new("main").unwrap()
}

fn relay_settings(topic: &Topic) -> RelaySettings {
    let mut settings = RelaySettings::new(name(), topic.clone());
    settings.batch_max = BATCH;
    settings.lease = Duration::from_millis(1500);
    settings.backoff_base = Duration::from_millis(20);
    settings
}

/// A journal, by its URL or by its schema in PostgreSQL.
async fn open_journal(place: &str) -> Arc<dyn Journal> {
    #[cfg(feature = "s3")]
    if place.starts_with("s3:") {
        return Arc::new(objects::Place::of(place).open().await);
    }
    if place.contains(':') {
        let settings = hapax::open::OpenSettings::default();
        return hapax::open::journal_with(place, &settings).await.expect("the journal");
    }
    let schema = place;
    let mut settings = PgJournalSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    Arc::new(PgJournal::with_pool(support::pool(6).await, settings).await.expect("the journal"))
}

/// Appends `count` events each to aggregates a0, a1, …, taking turns.
async fn fill(journal: &dyn Journal, aggregates: usize, count: usize) {
    let mut appends = Vec::new();
    for _ in 0..count {
        for n in 0..aggregates {
            let event = Event::new(EventId::now_v7())
                .kind(Kind::new("counted").unwrap())
                .payload(format!(r#"{{"of": {n}}}"#));
            let aggregate = Aggregate::new(format!("a{n}")).unwrap();
            appends.push(Append::new(aggregate, Expected::Any, [event]));
        }
    }
    for some in appends.chunks(100) {
        for appended in journal.append_many(some).await.unwrap() {
            let _ = appended.unwrap();
        }
    }
}

/// What a test's processes share.
struct Scene {
    test: &'static str,
    /// Where the journal is.
    place: String,
    topic: Topic,
    bus: Arc<KafkaBus>,
    journal: Arc<dyn Journal>,
}

impl Scene {
    async fn new(test: &'static str) -> Self {
        Scene::at(test, support::fresh_schema()).await
    }

    async fn at(test: &'static str, place: String) -> Self {
        let topic = Topic::new(format!("t-{}", uuid::Uuid::new_v4().simple())).unwrap();
        let bus = world::bus().await;
        bus.create_topic(&topic, TopicSettings::new(3)).await.expect("a fresh topic");
        let journal = open_journal(&place).await;
        Scene { test, place, topic, bus, journal }
    }

    /// A relay process of this test binary. It ends by itself when it has come so far; 0: never.
    fn spawn(&self, owner: &str, events: u64, knobs: &[(&str, &str)]) -> Child {
        let mut command = support::child(self.test, "relay", &self.place);
        command
            .env("RELAY_TOPIC", self.topic.as_str())
            .env("RELAY_EVENTS", events.to_string())
            .env("RELAY_OWNER", owner);
        for (name, value) in knobs {
            command.env(name, value);
        }
        command.stderr(Stdio::inherit()).spawn().expect("a relay process")
    }

    async fn checkpoint(&self) -> Option<Checkpoint> {
        self.journal.relays().await.unwrap().into_iter().next().and_then(|state| state.checkpoint)
    }

    /// How many events the checkpoint has not passed.
    async fn left(&self) -> u64 {
        let position = self.checkpoint().await.map(|saved| saved.position).unwrap_or_default();
        self.journal.count_after(&position, 1_000_000).await.unwrap()
    }

    async fn leader(&self) -> Option<String> {
        let state = self.journal.relays().await.unwrap().into_iter().next()?;
        let now = self.journal.now().await.unwrap();
        state.owner.filter(|_| state.until.is_some_and(|until| until > now)).map(|owner| owner.to_string())
    }

    async fn witnessed(&self) -> Witnessed {
        let records = read_topic(&*self.bus, &self.topic).await;
        witness(&records).unwrap_or_else(|problem| panic!("{}: {problem}", self.test))
    }
}

/// Plays the relay if this process is one.
async fn played() -> bool {
    let Some((role, place)) = support::role() else { return false };
    assert_eq!(role, "relay");
    let topic = Topic::new(std::env::var("RELAY_TOPIC").unwrap()).unwrap();
    let events: u64 = std::env::var("RELAY_EVENTS").unwrap().parse().unwrap();
    let mut settings = relay_settings(&topic);
    settings.owner = Some(Owner::new(std::env::var("RELAY_OWNER").unwrap()).unwrap());
    if place.starts_with("s3:") {
        // Each step is several requests. A relay that loses leadership repeats a batch, too, which is not what these tests count.
        settings.lease = Duration::from_secs(6);
    }
    let journal = open_journal(&place).await;
    let relay = Relay::new(journal.clone(), world::bus().await, settings).unwrap();
    let handle = relay.handle();
    let stop = handle.clone();
    let until_done = async move {
        loop {
            let progress = handle.progress();
            let left = async |position: &Position| journal.count_after(position, 1).await.unwrap_or(1);
            if events > 0 && progress.leads && left(&progress.position).await == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (ran, ()) = tokio::join!(relay.run(), async {
        until_done.await;
        stop.stop();
    });
    ran.expect("the relay ends well");
    true
}

/// Dies at the n-th time it comes by a point, for n = 1, 2, … until a run is clean.
async fn killed_at(scene: &Scene, point: &'static str) {
    killed_with(scene, point, 50).await;
}

/// As [`killed_at`], with so many events of each of seven aggregates.
async fn killed_with(scene: &Scene, point: &'static str, count: usize) {
    fill(&*scene.journal, 7, count).await;
    let mut killed = 0;
    for n in 1.. {
        let crash = format!("{point}:{n}");
        let status = scene.spawn("doomed", 350, &[("HAPAX_CRASH_AT", &crash)]).wait().await.unwrap();
        if status.success() {
            break;
        }
        killed += 1;
        assert!(n < 100, "{point}: never a clean run");
    }
    let found = scene.witnessed().await;
    println!("{point}: killed {killed} times, {} events, {} repeats", found.events, found.repeats);
    assert!(killed >= 2, "{point}: it was to die");
    assert_eq!(found.events, 7 * count, "{point}: nothing is missing");
    assert!(found.repeats <= killed * BATCH, "{point}: {} repeats after {killed} kills", found.repeats);
    assert_eq!(scene.left().await, 0);
}

macro_rules! killed {
    ($($test:ident: $point:literal;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            if !played().await {
                killed_at(&Scene::new(stringify!($test)).await, $point).await;
            }
        }
    )*};
}

killed! {
    crash_before_publish: "relay.before_publish";
    crash_after_publish_before_ack: "relay.after_publish";
    crash_after_ack_before_checkpoint: "relay.after_ack";
    crash_during_checkpoint: "relay.during_checkpoint";
    crash_after_checkpoint: "relay.after_checkpoint";
}

/// The same from a journal in S3, where each step is several requests.
#[cfg(feature = "s3")]
mod s3 {
    use super::*;

    macro_rules! killed {
        ($($test:ident: $point:literal;)*) => {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                if !played().await {
                    let place = objects::Place::s3().word;
                    killed_with(&Scene::at(concat!("s3::", stringify!($test)), place).await, $point, 12).await;
                }
            }
        )*};
    }

    killed! {
        crash_before_publish: "relay.before_publish";
        crash_after_publish_before_ack: "relay.after_publish";
        crash_after_ack_before_checkpoint: "relay.after_ack";
        crash_during_checkpoint: "relay.during_checkpoint";
        crash_after_checkpoint: "relay.after_checkpoint";
    }
}

/// The same from a journal of files.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_after_ack_of_a_relay_of_a_directory() {
    if played().await {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = format!("dir:{}", folder.path().display());
    let scene = Scene::at("crash_after_ack_of_a_relay_of_a_directory", place).await;
    killed_at(&scene, "relay.after_ack").await;
}

/// A relay that checkpoints before it publishes loses what it was killed with: the witness notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_before_acknowledgement_would_be_noticed() {
    if played().await {
        return;
    }
    let scene = Scene::new("a_checkpoint_before_acknowledgement_would_be_noticed").await;
    fill(&*scene.journal, 7, 50).await;
    let mutant = ("HAPAX_MUTANT", "checkpoint before ack");
    let crash = [mutant, ("HAPAX_CRASH_AT", "relay.before_publish:3")];
    assert!(!scene.spawn("doomed", 350, &crash).wait().await.unwrap().success());
    assert!(scene.spawn("heir", 350, &[mutant]).wait().await.unwrap().success());
    let problem = witness(&read_topic(&*scene.bus, &scene.topic).await);
    assert!(problem.is_err() || problem.as_ref().is_ok_and(|found| found.events < 350), "{problem:?}");
}

/// One of two relays stands still past its lease, the other takes over; the first wakes up and moves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_relays_one_stopped_past_its_lease() {
    if played().await {
        return;
    }
    let scene = Scene::new("two_relays_one_stopped_past_its_lease").await;
    fill(&*scene.journal, 5, 200).await;
    let mut first = scene.spawn("first", 0, &[]);
    until("the first has begun", || async { scene.checkpoint().await.is_some() }).await;
    signal(&first, "STOP");
    let second = scene.spawn("second", 0, &[]);
    until("the second leads", || async { scene.leader().await.as_deref() == Some("second") }).await;
    fill(&*scene.journal, 5, 20).await;
    signal(&first, "CONT"); // in the middle of what it was doing
    until("everything is relayed", || async { scene.left().await == 0 }).await;
    let saved = scene.checkpoint().await;
    fill(&*scene.journal, 5, 20).await;
    until("that too", || async { scene.left().await == 0 }).await;
    assert_eq!(scene.leader().await.as_deref(), Some("second"), "the first is a candidate again");
    assert!(saved.unwrap().position < scene.checkpoint().await.unwrap().position);
    signal(&second, "KILL");
    until("the first takes over", || async { scene.leader().await.as_deref() == Some("first") }).await;
    fill(&*scene.journal, 5, 20).await;
    until("all of it", || async { scene.left().await == 0 }).await;
    first.kill().await.unwrap();
    let found = scene.witnessed().await;
    println!("{} events, {} repeats", found.events, found.repeats);
    assert_eq!(found.events, 5 * 260);
    assert!(found.repeats <= 2 * BATCH, "{} repeats after two takeovers", found.repeats);
}

/// Relay and consumer together: the checkpoint is rolled back, everything is published again, and takes effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_1_a_checkpoint_rolled_back_and_relayed_again_takes_effect_once() {
    let world = world::world!("acceptance_1_a_checkpoint_rolled_back_and_relayed_again_takes_effect_once", 3);
    let journal = open_journal(&world.schema).await;
    fill(&*journal, 10, 20).await;
    let relay = Relay::new(journal.clone(), world.bus.clone(), relay_settings(&world.topic)).unwrap();
    let handle = relay.handle();
    let running = tokio::spawn(relay.run());
    let _workers: Vec<_> = (0..2).map(|_| world.spawn(&[("WORKER_ORDER", "latest")])).collect();
    world.until_effects(50).await;
    for _ in 0..2 {
        let published = handle.progress().published;
        journal.rewind(&name(), &Checkpoint::start(journal.id()), None).await.unwrap();
        until("published again", || async { handle.progress().published >= published + 200 }).await;
    }
    let published = i64::try_from(handle.progress().published).unwrap();
    until("everything consumed", || async { world.committed().await >= published }).await;
    handle.stop();
    let progress = running.await.unwrap().unwrap();
    println!("{} records published of 200 events", progress.published);
    assert!(progress.published >= 600);
    assert_eq!(world.until_effects(200).await, 0);
    assert_eq!(world.effect_counts().await.len(), 200);
}

/// The largest event that a journal takes by default, under the longest names, goes to a topic as brokers make it by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_event_of_a_journal_is_published() {
    let bus = world::bus().await;
    let topic = Topic::new(format!("t-{}", uuid::Uuid::new_v4().simple())).unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.expect("a fresh topic");
    let journal = hapax::journal::MemoryJournal::default();
    let bytes = hapax::journal::JournalSettings::default().event_bytes_max;
    let longest = "🦀".repeat(255);
    let event = Event::new(EventId::new(&longest).unwrap())
        .kind(Kind::new(&longest).unwrap())
        .payload(vec![7; bytes]);
    let append = Append::new(Aggregate::new(&longest).unwrap(), Expected::New, [event])
        .tenant(hapax::Tenant::new(&longest).unwrap());
    let _ = journal.append(&append).await.unwrap();
    let relay =
        Relay::new(Arc::new(journal), bus.clone(), RelaySettings::new(name(), topic.clone())).unwrap();
    let handle = relay.handle();
    let through = async {
        until("it is published, or parked", || {
            let progress = handle.progress();
            async move { progress.published > 0 || progress.parked > 0 }
        })
        .await;
    };
    let (ran, ()) = tokio::join!(relay.run(), async {
        through.await;
        handle.stop();
    });
    let progress = ran.unwrap();
    assert_eq!((progress.published, progress.parked), (1, 0), "{progress:?}");
    let records = read_topic(&*bus, &topic).await;
    assert_eq!(records[0].record.payload.as_ref().map(bytes::Bytes::len), Some(bytes));
}
