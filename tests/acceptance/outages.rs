//! Consumers while something is away: the window's Valkey, the ledger's PostgreSQL for longer than the group's session, and while
//! somebody recovers or sweeps. Real Kafka and PostgreSQL, and an effect record that the ledger knows nothing of.
#![cfg(all(
    feature = "testing",
    feature = "postgres",
    feature = "kafka",
    feature = "http",
    feature = "redis"
))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::cluster;
use crate::support::postgres as support;
use crate::support::valkey;
use crate::support::world;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::support::world::{World, event, play, record, until};
use hapax::backend::postgres::PgLedger;
use hapax::backend::redis::RedisWindow;
use hapax::bus::Record;
use hapax::consumer::{Consumer, ConsumerHandle};
use hapax::ledger::{Claims as _, Identity, Operations as _, State, SweepSettings};
use hapax::testing::kit;
use hapax::window::{OnOutage, OutageWindow, Sighting, Window, WindowSettings};
use hapax::{EventId, Scope};
use sqlx::AssertSqlSafe;

/// The counters of this process.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    fn installed() -> &'static Counters {
        static ALL: OnceLock<Counters> = OnceLock::new();
        ALL.get_or_init(|| {
            let counters = Counters::default();
            assert!(metrics::set_global_recorder(counters.clone()).is_ok(), "no other recorder");
            counters
        })
    }

    /// The value of a counter, which is named by its name and the values of its labels.
    fn get(&self, name: &str) -> u64 {
        self.0.lock().unwrap().get(name).map_or(0, |counter| counter.load(Ordering::SeqCst))
    }
}

impl metrics::Recorder for Counters {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<metrics::Unit>, _: metrics::SharedString) {}
    fn register_counter(&self, key: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Counter {
        let name = key.labels().fold(key.name().to_owned(), |name, label| name + " " + label.value());
        let mut all = self.0.lock().unwrap();
        metrics::Counter::from_arc(Arc::clone(all.entry(name).or_default()))
    }
    fn register_gauge(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Gauge {
        metrics::Gauge::noop()
    }
    fn register_histogram(&self, _: &metrics::Key, _: &metrics::Metadata<'_>) -> metrics::Histogram {
        metrics::Histogram::noop()
    }
}

/// Runs a consumer in this process, with effects in the world's record.
fn run(world: &World, consumer: Consumer<PgLedger>) -> (ConsumerHandle, Running) {
    let handle = consumer.handle();
    (handle, tokio::spawn(consumer.transactional(world::Effects { table: world.effects(), worker: 0 })))
}

type Running = tokio::task::JoinHandle<hapax::Result<hapax::consumer::Counts>>;

fn passed(handle: &ConsumerHandle) -> u64 {
    handle.progress().passed.values().sum()
}

fn events(range: std::ops::Range<usize>) -> Vec<Record> {
    let one =
        |n: usize| record(Some(&format!("k-{}", n % 8)), serde_json::json!({"event_id": format!("e-{n}")}));
    range.map(one).collect()
}

/// Valkey goes away under a running consumer, and comes back: under `pass_through` everything is asked of the ledger and counted,
/// under `pause` everything waits. Either way each event takes effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t02_a_consumer_goes_on_without_its_window_or_waits_for_it() {
    Counters::installed();
    tokio::join!(goes_on(), waits());
}

/// A consumer with a window behind a gate, which has 50 events behind it that the window remembers.
struct Windowed {
    world: World,
    gate: valkey::Gate,
    window: Arc<OutageWindow<RedisWindow>>,
    /// One that the window remembers.
    old: Sighting,
    handle: ConsumerHandle,
    running: Running,
}

impl Windowed {
    async fn new(policy: OnOutage, prefix: &'static str) -> Self {
        let world = World::new(prefix, 1).await;
        let gate = valkey::Gate::new().await;
        let inner = RedisWindow::new(&gate.url(), WindowSettings::new("1")).unwrap();
        let window = OutageWindow::new(inner, policy).telemetry_prefix(Some(prefix));
        let window = Arc::new(window.probe(Duration::from_millis(20), Duration::from_millis(100)));
        // The server is everybody's: the scope makes its keys ours.
        let scope = Scope::new(&world.schema).unwrap();
        let consumer = world::builder(world.bus.clone(), world.ledger.clone(), world.topic.as_str())
            .scope(scope.as_str())
            .window(window.clone())
            .build()
            .unwrap();
        let (handle, running) = run(&world, consumer);
        world.publish(&events(0..50)).await;
        let epoch = Some(world.ledger.epoch().await.unwrap());
        let known: Vec<Sighting> = (0..50)
            .map(|n| Identity::new(scope.clone(), EventId::new(format!("e-{n}")).unwrap()))
            .map(|identity| Sighting { epoch, ..identity.into() })
            .collect();
        until("the window remembers", || async {
            window.inner().seen(&known).await.unwrap().iter().all(|seen| *seen)
        })
        .await;
        world.publish(&events(0..50)).await;
        until("they are skipped", || async { passed(&handle) == 100 }).await;
        assert_eq!(handle.progress().passed["window"], 50);
        Windowed { old: known[0].clone(), world, gate, window, handle, running }
    }

    /// How many deliveries ended as done, as duplicates, and by the window.
    fn endings(&self) -> (u64, u64, u64) {
        let progress = self.handle.progress();
        let of = |word| progress.passed.get(word).copied().unwrap_or(0);
        (of("done"), of("duplicate"), of("window"))
    }

    async fn end(self) {
        assert_eq!(self.world.until_effects(100).await, 0);
        until("everything is committed", || self.world.is_through()).await;
        self.handle.stop();
        self.running.await.unwrap().unwrap();
    }
}

async fn goes_on() {
    let it = Windowed::new(OnOutage::PassThrough, "passes").await;
    it.gate.shut();
    it.world.publish(&events(0..100)).await;
    until("everything passes", || async { passed(&it.handle) == 200 }).await;
    assert_eq!(it.endings(), (100, 50, 50), "the ledger knows the old ones");
    let count = |name: &str| Counters::installed().get(name);
    let unfiltered = count("passes_dedup_window_checks_total unfiltered");
    until("what could not be remembered is counted", || async {
        count("passes_dedup_window_unremembered_total") == 50
    })
    .await;
    it.gate.open();
    until("it is back", || async { it.window.seen(std::slice::from_ref(&it.old)).await.unwrap() == [true] })
        .await;
    it.world.publish(&events(0..100)).await;
    until("everything is reported", || async { passed(&it.handle) == 300 }).await;
    println!(
        "pass_through: {unfiltered} unfiltered, 50 not remembered; (done, duplicate, window) {:?}",
        it.endings()
    );
    assert_eq!(unfiltered, 100);
    assert_eq!(it.endings(), (100, 100, 100), "it filters again what it had remembered");
    it.end().await;
}

async fn waits() {
    let it = Windowed::new(OnOutage::Pause, "waits").await;
    it.gate.shut();
    it.world.publish(&events(0..100)).await;
    until("it was asked in vain, again and again", || async { it.gate.turned_away() > 5 }).await;
    assert_eq!(passed(&it.handle), 100, "nothing passes");
    assert_eq!(it.handle.progress().partitions, 1, "and the partition stays");
    it.gate.open();
    until("everything is reported", || async { passed(&it.handle) == 200 }).await;
    println!("pause: (done, duplicate, window) {:?}", it.endings());
    assert_eq!(it.endings(), (100, 0, 100), "every old one was filtered");
    it.end().await;
}

/// The ledger is away for a minute, which is longer than the session timeout (45 s by default): the consumer pauses, stays in its group
/// with its partitions, and goes on when the ledger is back, without a rebalance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_membership_survives_an_outage_longer_than_the_session() {
    const AWAY: Duration = Duration::from_secs(60);
    let counters = Counters::installed();
    let mut server = cluster::Cluster::new().await;
    let world = World::on("the_membership_survives_an_outage_longer_than_the_session", 2, server.url()).await;
    // It gives up soon, so that the pipeline hears of the outage and not only its tasks.
    let mut settings = support::settings(&world.schema);
    settings.acquire_timeout = Duration::from_secs(5);
    let ledger = PgLedger::connect(&server.url(), settings).await.unwrap();
    let consumer = world::builder(world.bus.clone(), ledger, world.topic.as_str())
        .with(|settings| {
            settings.session_timeout = Duration::from_secs(45); // which a busy machine does not lose
            assert!(settings.session_timeout < AWAY);
            settings.in_flight_max = 50;
            settings.telemetry_prefix = Some("member".into());
        })
        .build()
        .unwrap();
    let (handle, running) = run(&world, consumer);
    world.publish(&events(0..100)).await;
    until("they are done and committed", || world.is_through()).await;
    let changes = || counters.get("member_consumer_rebalances_total worker");
    let before = changes();
    assert!(before > 0 && handle.progress().partitions == 2, "{before}");
    server.kill();
    world.publish(&events(100..600)).await;
    let (began, mut paused) = (Instant::now(), 0);
    while began.elapsed() < AWAY {
        assert_eq!((changes(), handle.progress().partitions), (before, 2), "after {:?}", began.elapsed());
        paused = paused.max(handle.progress().paused);
        tokio::time::sleep(Duration::from_millis(50)).await; // how long it lasts is what is tested
    }
    let away = counters.get("member_consumer_ledger_outages_total worker");
    server.start().await;
    let doubled = world.until_effects(600).await;
    until("the offsets move again", || world.is_through()).await;
    println!(
        "away for {:?}: noticed {away} times, {paused} partitions paused, {} rebalances; 600 of 600, {doubled} repeated",
        began.elapsed(),
        changes() - before
    );
    assert_eq!((changes(), doubled, paused), (before, 0, 2));
    assert!(away > 0, "the pipeline noticed");
    handle.stop();
    running.await.unwrap().unwrap();
}

const MONTH: Duration = Duration::from_secs(30 * 86_400);

/// A schema whose clock is behind by as many days as a table says.
async fn days_behind(world: &World, days: u32) {
    let schema = &world.schema;
    let sql = format!(
        "create table if not exists {schema}.behind (days int); delete from {schema}.behind; \
         insert into {schema}.behind values ({days}); \
         create or replace function {schema}.ledger_now() returns timestamptz language sql volatile \
         as 'select clock_timestamp() - days * interval ''1 day'' from {schema}.behind'"
    );
    support::run(&world.pool, sql).await;
}

/// Events of a moment, whose ids say when that was.
fn events_at(time: hapax::Time, count: u8) -> Vec<Record> {
    (0..count).map(|n| event(&kit::v7_at(time, n).to_string())).collect()
}

/// PostgreSQL is killed with -9 while a restarted process goes through what a killed one left, and again inside a sweep under the
/// consumer. And an event from the week that the sweep dropped is a dead letter: nobody knows whether it took effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t36_postgres_killed_while_a_process_recovers_and_while_a_sweep_runs() {
    let test = "t36_postgres_killed_while_a_process_recovers_and_while_a_sweep_runs";
    play!();
    let mut server = cluster::Cluster::new().await;
    let world = World::on(test, 1, server.url()).await;
    days_behind(&world, 30).await;
    let then = world.ledger.now().await.unwrap();
    let old = events_at(then, 250); // several batches: the first one that is through is not the last
    world.publish(&old).await;
    let mut doomed = world.spawn(&[("HAPAX_CRASH_AT", "test.after-apply:40")]);
    assert!(!doomed.wait().await.unwrap().success(), "it was to die in the middle of a batch");
    let left = world.effect_counts().await.len();
    let heir = world.spawn(&[("WORKER_SLOW_MS", "20"), ("WORKER_LEASE_MS", "1500")]);
    until("it recovers", || async { world.effect_counts().await.len() > left + 3 }).await;
    server.kill();
    server.start().await;
    let recovered = world.effect_counts().await.len();
    assert!(recovered < 250, "it was killed on the way");
    assert_eq!(world.until_effects(250).await, 0);
    until("committed", || world.is_through()).await;
    println!("{left} before the process died, {recovered} before the server did, 250 of 250");

    // A month later the week goes: somebody reads, so that its end must be waited for.
    days_behind(&world, 0).await;
    let swept = "update {s}.meta set swept_at = {s}.ledger_now(), paused_until = null"; // every day of it
    support::run(&world.pool, swept.replace("{s}", &world.schema)).await;
    let mut reader = world.pool.begin().await.unwrap();
    let look = format!("set transaction isolation level repeatable read; select from {}.entry", world.schema);
    sqlx::raw_sql(AssertSqlSafe(look)).execute(&mut *reader).await.unwrap();
    let settings = || SweepSettings { retention: MONTH / 4, batch_max: 1000, dry_run: false };
    let sweeping = tokio::spawn({
        let (ledger, settings) = (world.ledger.clone(), settings());
        async move { ledger.sweep(settings).await }
    });
    let waits = format!("select exists (select from {}.dropped where waits <> '{{}}')", world.schema);
    until("the sweep waits for the reader", || support::ask(&world.pool, waits.clone())).await;
    world.publish(&events_at(then.plus(MONTH), 30)).await;
    until("it is at work", || async { world.effect_counts().await.len() > 250 }).await;
    server.kill();
    drop(reader);
    // Should the consumer's own sweep have been the one in the detach, this one was an onlooker.
    if let Err(error) = sweeping.await.unwrap() {
        assert!(error.is_retryable(), "{error:?}");
    }
    server.start().await;
    assert_eq!(world.until_effects(280).await, 0);
    until("committed", || world.is_through()).await;
    // The next sweep ends what the killed one began: this one, or that of the consumer, which sweeps too.
    let rows = format!("select count(*) from {}.entry", world.schema);
    until("the week is dropped", || async {
        world.ledger.sweep(settings()).await.unwrap();
        support::ask::<i64>(&world.pool, rows.clone()).await == 30
    })
    .await;

    world.publish(&old[..2]).await;
    until("they are dead letters", || async { world.copies().await == 2 }).await;
    until("and passed", || world.is_through()).await;
    let dead = world.entries(State::Dead).await;
    assert!(dead.iter().all(|entry| entry.reason.as_deref().unwrap().contains("was dropped")), "{dead:?}");
    println!(
        "280 of 280, 250 of them of a dropped week; 2 of it came again and are {} dead letters",
        dead.len()
    );
    assert_eq!((dead.len(), world.until_effects(280).await), (2, 0));
    drop(heir);
}
