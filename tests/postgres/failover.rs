//! A PostgreSQL with a standby. A fail-over reaches the standby before it is promoted, or forgets what the primary had
//! acknowledged. The first must end nothing, the second is refused or warned of at the start.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::support::cluster::Cluster;
use crate::support::handlers::Insert;
use crate::support::postgres::{ask, pool_to, run, settings, until};
use crate::support::proxy::Proxy;
use hapax::backend::postgres::PgLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerHandle, Counts};
use hapax::guard::Run;
use hapax::ledger::{Finding, Level, Operations as _};
use hapax::{Error, Event, Result, Topic};
use sqlx::PgPool;
use tokio::task::JoinHandle;

const COUNT: usize = 20;

type Running = JoinHandle<Result<Counts>>;

/// A consumer behind an address that leads to one server and then to another.
struct Stage {
    bus: Arc<MemoryBus>,
    ledger: PgLedger,
    proxy: Proxy,
    published: Mutex<usize>,
}

impl Stage {
    async fn new(primary: &Cluster) -> Self {
        let proxy = Proxy::new(&primary.url()).await;
        let mut few = settings("hapax");
        few.pool_max = 4;
        let ledger = PgLedger::connect(&proxy.url(&primary.url()), few).await.unwrap();
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
        Stage { bus, ledger, proxy, published: Mutex::default() }
    }

    fn consumer(&self, scope: &str) -> Consumer<PgLedger> {
        let bus: Arc<dyn Bus> = self.bus.clone();
        let builder = Consumer::builder(bus, self.ledger.clone()).scope(scope).topic("orders");
        builder.with(|settings| settings.batch_max = 8).build().unwrap()
    }

    /// New connections lead to another server, and the open ones are gone.
    fn fail_over(&self, to: &Cluster) {
        self.proxy.lead_to(&to.url());
        self.proxy.cut();
    }

    async fn publish(&self) {
        let first = *self.published.lock().unwrap();
        let id = |n: usize| serde_json::json!({ "event_id": format!("event-{n}") }).to_string();
        let record = |n| Record { payload: Some(id(n).into()), ..Record::default() };
        let records: Vec<Record> = (first..first + COUNT).map(record).collect();
        for answer in self.bus.publish(&topic(), &records).await.unwrap() {
            answer.unwrap();
        }
        *self.published.lock().unwrap() += COUNT;
    }

    /// Waits until the consumer is through with all that was published.
    async fn all_through(&self, handle: &ConsumerHandle, running: &mut Running) {
        let published = *self.published.lock().unwrap() as u64;
        until("all through", async || {
            assert!(!running.is_finished(), "the consumer ended by itself: {:?}", (&mut *running).await);
            handle.progress().passed.values().sum::<u64>() == published
        })
        .await;
    }

    /// The address leads to a standby for a while, and then to the primary again. Connections to the standby stay open.
    async fn by_way_of(
        &self,
        standby: &Cluster,
        primary: &Cluster,
        handle: &ConsumerHandle,
        running: &mut Running,
    ) {
        let there = pool_to(&standby.url(), 1).await;
        let has = "select to_regclass('effect') is not null"; // it is made last
        until("the standby has the ledger", async || ask::<bool>(&there, has).await).await;
        // A claim, or the question whether the ledger takes claims: whichever came first.
        let asked =
            "select exists (select from pg_stat_activity where application_name = 'hapax' and query <> '')";
        self.fail_over(standby);
        self.publish().await;
        until("the standby was asked", async || ask::<bool>(&there, asked).await).await;
        self.proxy.lead_to(&primary.url());
        self.all_through(handle, running).await;
    }
}

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t440_a_standby_that_a_fail_over_reaches_first_ends_no_consumer() {
    let mut primary = Cluster::new().await;
    let standby = primary.standby().await;
    let stage = Stage::new(&primary).await;
    let here = pool_to(&primary.url(), 2).await;
    run(&here, "create table effect (id text)".into()).await;

    let consumer = stage.consumer("leased");
    let (handle, effects) = (consumer.handle(), Arc::new(Mutex::new(Vec::new())));
    let noted = Arc::clone(&effects);
    let mut running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
        noted.lock().unwrap().push(event.id.to_string());
        async { Ok(()) }
    }));
    stage.publish().await;
    stage.all_through(&handle, &mut running).await;
    stage.by_way_of(&standby, &primary, &handle, &mut running).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let effects = effects.lock().unwrap().clone();
    let different: BTreeSet<&String> = effects.iter().collect();
    assert_eq!((effects.len(), different.len()), (2 * COUNT, 2 * COUNT), "each took effect once");

    let consumer = stage.consumer("transactional");
    let handle = consumer.handle();
    let mut running = tokio::spawn(consumer.transactional(Insert::into("effect")));
    stage.all_through(&handle, &mut running).await;
    stage.by_way_of(&standby, &primary, &handle, &mut running).await;

    // The fail-over itself: the standby has everything, and is promoted after the address leads to it.
    let there = pool_to(&standby.url(), 2).await;
    let sum = "select count(*) from effect";
    until("the standby has it all", async || {
        ask::<i64>(&there, sum).await as usize == 3 * COUNT
            && ask::<bool>(&there, "select count(*) = 100 from hapax.entries where state = 'done'").await
    })
    .await;
    primary.kill();
    stage.fail_over(&standby);
    stage.publish().await;
    assert!(ask::<bool>(&there, "select pg_promote()").await);
    stage.all_through(&handle, &mut running).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let counted: (i64, i64) =
        sqlx::query_as("select count(*), count(distinct id) from effect").fetch_one(&there).await.unwrap();
    assert_eq!(counted, (4 * COUNT as i64, 4 * COUNT as i64), "each took effect once");
}

async fn level(ledger: &PgLedger, check: &str) -> Level {
    let findings = ledger.check().await.unwrap();
    println!("{findings:?}");
    let of = |finding: &&Finding| finding.check == check;
    findings.iter().find(of).expect("a finding").level
}

/// Has the server wait for these standbys.
async fn wait_for(pool: &PgPool, names: &str) {
    run(pool, format!("alter system set synchronous_standby_names = '{names}'")).await;
    run(pool, "select pg_reload_conf()".into()).await;
    let set = format!("select current_setting('synchronous_standby_names') = '{names}'");
    until("the server knows the names", async || ask::<bool>(pool, set.clone()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t441_commits_that_pass_by_a_synchronous_standby_are_refused_at_start() {
    let primary = Cluster::new().await;
    let here = pool_to(&primary.url(), 2).await;
    let session = |commit: &str| format!("{}?options=-c%20synchronous_commit={commit}", primary.url());
    let open = async |commit: &str| PgLedger::connect(&session(commit), settings("hapax")).await;
    for commit in ["on", "local", "remote_write"] {
        let alone = open(commit).await.unwrap();
        assert_eq!(
            level(&alone, "synchronous_commit").await,
            Level::Fine,
            "{commit} of a server without standbys"
        );
        assert_eq!(level(&alone, "standbys").await, Level::Fine);
    }
    wait_for(&here, "walreceiver").await; // nobody is there yet: a commit would wait
    let waits = open("on").await.unwrap();
    assert_eq!(level(&waits, "synchronous_commit").await, Level::Fine);
    assert_eq!(level(&waits, "standbys").await, Level::Warning, "nobody acknowledges");
    assert_eq!(level(&open("remote_write").await.unwrap(), "synchronous_commit").await, Level::Warning);
    let error = open("local").await.expect_err("commits do not wait for the standby");
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("synchronous_commit is local"), "{error}");

    let standby = primary.standby().await;
    until("the standby acknowledges", async || level(&waits, "standbys").await == Level::Fine).await;
    wait_for(&here, "").await;
    until("it does so no more", async || level(&waits, "standbys").await == Level::Warning).await;
    drop(standby);
}
