//! Transactional consumers: claim and effect are one transaction, on PostgreSQL and on SQLite.
#![cfg(all(feature = "testing", feature = "postgres", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::handlers::Insert;
use crate::support::postgres as support;
use crate::support::proxy;
use crate::support::wait::until;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::postgres::{PgLedger, PgTx};
use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Partition, Record, TopicSettings};
use hapax::consumer::{
    Consumer, ConsumerBuilder, ConsumerHandle, Counts, Failed, Handled, TransactionalBatchHandler,
    TransactionalHandler,
};
use hapax::ledger::{
    Claim, Claims, ConsumerStore, Epoch, Extend, Filter, Marker, OnDead, Operations, OrderPolicy, Outcome,
    Settings, Settle, Settled, State, SweepSettings, Swept, TransactionalLedger,
};
use hapax::{Event, Result, Scope, Time, Topic};

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

#[allow(clippy::needless_pass_by_value)] // a json! at every call
fn record(key: Option<&str>, json: serde_json::Value) -> Record {
    Record {
        key: key.map(|key| key.to_owned().into()),
        payload: Some(json.to_string().into()),
        ..Record::default()
    }
}

async fn bus(records: &[Record]) -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
    for answer in bus.publish(&topic(), records).await.unwrap() {
        answer.unwrap();
    }
    bus
}

fn consumer<L: TransactionalLedger>(bus: &Arc<MemoryBus>, ledger: &L) -> ConsumerBuilder<L> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger.clone()).scope("billing").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(5);
        settings.backoff_max = Duration::from_millis(20);
        settings.held_interval = Duration::from_millis(20);
        settings.concurrency = 3;
        settings.batch_max = 64;
    })
}

/// Runs until so many deliveries are through, then drains.
async fn run<L: TransactionalLedger, A: 'static>(
    builder: ConsumerBuilder<L>,
    handler: impl TransactionalHandler<L::Transaction, A>,
    passed: u64,
) -> Counts {
    let consumer = builder.build().unwrap();
    finish(consumer.handle(), consumer.transactional(handler), passed).await
}

/// The same with a handler of batches.
async fn run_batches<L: TransactionalLedger, A: 'static>(
    builder: ConsumerBuilder<L>,
    handler: impl TransactionalBatchHandler<L::Transaction, A>,
    passed: u64,
) -> Counts {
    let consumer = builder.build().unwrap();
    finish(consumer.handle(), consumer.transactional_batch(handler), passed).await
}

async fn finish(
    handle: ConsumerHandle,
    consuming: impl Future<Output = Result<Counts>> + Send + 'static,
    passed: u64,
) -> Counts {
    let running = tokio::spawn(consuming);
    until("all through", || async {
        assert!(!running.is_finished(), "it ended by itself");
        handle.progress().passed.values().sum::<u64>() == passed
    })
    .await;
    handle.stop();
    running.await.unwrap().unwrap()
}

async fn pg() -> (PgLedger, String) {
    let ledger = support::ledger(8).await;
    let table = format!("effect_{}", uuid::Uuid::new_v4().simple());
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "create table {table} (id text, number bigint generated always as identity)"
    )))
    .execute(ledger.pool())
    .await
    .unwrap();
    (ledger, table)
}

async fn effects(ledger: &PgLedger, table: &str) -> Vec<String> {
    sqlx::query_scalar(sqlx::AssertSqlSafe(format!("select id from {table} order by number")))
        .fetch_all(ledger.pool())
        .await
        .unwrap()
}

/// Inserts the id of each event. One of them fails a few times first.
struct Flaky {
    insert: Insert,
    id: &'static str,
    failures: AtomicU32,
}

impl TransactionalHandler<PgTx> for Flaky {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let fails =
            || self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if *event.id.as_str() == *self.id && fails().is_ok() {
            return Err(Failed::retryable("not yet"));
        }
        self.insert.handle(tx, event).await
    }
}

fn flaky(table: &str, id: &'static str, failures: u32) -> Flaky {
    Flaky { insert: Insert::into(table), id, failures: AtomicU32::new(failures) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_effects_of_duplicates_happen_once() {
    let (ledger, table) = pg().await;
    let records: Vec<_> =
        (0..600).map(|n| record(None, serde_json::json!({"event_id": format!("e-{}", n % 200)}))).collect();
    let bus = bus(&records).await;
    let counts = run(consumer(&bus, &ledger), Insert::into(&table), 600).await;
    let effects = effects(&ledger, &table).await;
    assert_eq!((counts["done"], counts["duplicate"], effects.len()), (200, 400, 200));
}

/// A batch with one event fails as a whole.
struct Poisoned(Insert);
impl TransactionalBatchHandler<PgTx> for Poisoned {
    async fn handle(&self, tx: &mut PgTx, events: &[Event]) -> Handled {
        self.0.insert_all(tx, events).await?;
        let poison = events.iter().any(|event| *event.id.as_str() == *"e-77");
        if poison { Err(Failed::retryable("poison")) } else { Ok(()) }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_one_poison_event_costs_one_event_in_a_batch_handler() {
    let (ledger, table) = pg().await;
    let records: Vec<_> =
        (0..128).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}")}))).collect();
    let bus = bus(&records).await;
    let counts = run_batches(consumer(&bus, &ledger), Poisoned(Insert::into(&table)), 128).await;
    assert_eq!((counts["done"], counts["dead"]), (127, 1));
    let effects = effects(&ledger, &table).await;
    assert_eq!(effects.len(), 127);
    assert!(!effects.contains(&"e-77".to_owned()));
    let filter = Filter { states: vec![State::Dead], ..Filter::default() };
    let dead = ledger.list(&filter, None, 9).await.unwrap().entries.remove(0);
    assert_eq!((dead.attempts, dead.reason.as_deref()), (5, Some("poison")));
    assert_eq!(dead.row.body.unwrap().payload.as_deref().unwrap(), br#"{"event_id":"e-77"}"#);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_order_holds_in_batches_while_one_fails() {
    let (ledger, table) = pg().await;
    let mut records = Vec::new();
    for seq in 1..=40u64 {
        for aggregate in ["a", "b", "c"] {
            let id = format!("{aggregate}-{seq:02}");
            records.push(record(
                Some(aggregate),
                serde_json::json!({"event_id": id, "aggregate_id": aggregate, "seq": seq}),
            ));
        }
    }
    let bus = bus(&records).await;
    let counts =
        run(consumer(&bus, &ledger).order(OrderPolicy::Latest, OnDead::Park), flaky(&table, "b-10", 2), 120)
            .await;
    assert_eq!(counts["done"], 120);
    let effects = effects(&ledger, &table).await;
    for aggregate in ["a", "b", "c"] {
        let of: Vec<_> = effects.iter().filter(|id| id.starts_with(aggregate)).cloned().collect();
        let expected: Vec<_> = (1..=40).map(|seq| format!("{aggregate}-{seq:02}")).collect();
        assert_eq!(of, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_keys_without_numbers_keep_the_order_of_their_offsets() {
    let (ledger, table) = pg().await;
    let records: Vec<_> = (0..90)
        .map(|n| {
            record(
                Some(["x", "y", "z"][n % 3]),
                serde_json::json!({"event_id": format!("{}-{:02}", ["x", "y", "z"][n % 3], n)}),
            )
        })
        .collect();
    let bus = bus(&records).await;
    run(consumer(&bus, &ledger), flaky(&table, "y-31", 3), 90).await;
    let effects = effects(&ledger, &table).await;
    for key in ["x", "y", "z"] {
        let of: Vec<_> = effects.iter().filter(|id| id.starts_with(key)).cloned().collect();
        assert!(of.is_sorted() && of.len() == 30, "{of:?}");
    }
}

/// Offsets that were suspects when their process died run again in smaller batches, and one by one in the end; suspects that were
/// not run again yet run in whole batches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t84_postgres_suspects_are_narrowed_by_deaths() {
    for (batch, largest) in [(0, 20..=20), (64, 2..=4), (1, 1..=1), (15, 1..=1)] {
        let (ledger, _) = pg().await;
        let records: Vec<_> =
            (0..20).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n:02}")}))).collect();
        let bus = Arc::new(MemoryBus::default());
        bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
        let scope = Scope::new("billing").unwrap();
        let tried: Vec<i64> = if batch == 0 { Vec::new() } else { (0..10).collect() };
        let marker = Marker { tried: tried.clone(), batch, ..Marker::new(topic(), 0, 15) };
        ledger.set_markers(&scope, &[marker]).await.unwrap();
        for answer in bus.publish(&topic(), &records).await.unwrap() {
            answer.unwrap();
        }
        let batches = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&batches);
        run_batches(
            consumer(&bus, &ledger),
            move |_: &mut PgTx, events: &[Event]| {
                let offsets = events.iter().map(|event| event.origin.clone().unwrap().offset);
                log.lock().unwrap().push(offsets.collect::<Vec<_>>());
                async { Ok(()) }
            },
            20,
        )
        .await;
        let batches = batches.lock().unwrap().clone();
        let sizes = batches.iter().filter(|batch| batch.iter().any(|offset| *offset < 10)).map(Vec::len);
        assert!(largest.contains(&sizes.max().unwrap()), "of {batch}: {batches:?}");
        for batch in &batches {
            let of: Vec<_> = batch.iter().map(|offset| tried.contains(offset)).collect();
            assert!(of.iter().all(|one| *one == of[0]), "suspects beside others: {batch:?}");
        }
        let left = ledger.markers(&scope, &topic(), &[0]).await.unwrap();
        assert_eq!(left, [], "a stop clears that of a partition whose suspects are through");
    }
}

/// Of ten suspects that run one by one, some meet other transactions before their handler begins. They stay suspects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t402_contention_clears_no_suspect() {
    const CONFLICTS: u32 = 130; // a batch gives up after 20
    let (ledger, _) = pg().await;
    let s = ledger.schema();
    support::run(
        ledger.pool(),
        format!(
            "create sequence {s}.tries; \
             create function {s}.refuse() returns trigger language plpgsql as $$ begin \
               if nextval('{s}.tries') <= {CONFLICTS} then raise exception using errcode = '40001'; end if; return new; end $$; \
             create trigger refuse before insert on {s}.entry for each row execute function {s}.refuse()"
        ),
    )
    .await;
    let records: Vec<_> =
        (0..20).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n:02}")}))).collect();
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let marker = Marker { tried: (0..10).collect(), batch: 1, ..Marker::new(topic(), 0, 15) };
    ledger.set_markers(&Scope::new("billing").unwrap(), &[marker]).await.unwrap();
    for answer in bus.publish(&topic(), &records).await.unwrap() {
        answer.unwrap();
    }
    let batches = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&batches);
    run_batches(
        consumer(&bus, &ledger),
        move |_: &mut PgTx, events: &[Event]| {
            let offsets = events.iter().map(|event| event.origin.clone().unwrap().offset);
            log.lock().unwrap().push(offsets.collect::<Vec<_>>());
            async { Ok(()) }
        },
        20,
    )
    .await;
    let tries: i64 = support::ask(ledger.pool(), format!("select last_value from {s}.tries")).await;
    assert!(tries > i64::from(CONFLICTS), "{tries}");
    let batches = batches.lock().unwrap().clone();
    let suspects = batches.iter().filter(|batch| batch.iter().any(|offset| *offset < 10));
    assert!(suspects.clone().all(|batch| batch.len() == 1) && suspects.count() == 10, "{batches:?}");
}

/// Somebody died with offsets 0 to 5, and whoever came next is stopped at the third of them: what it did not get to stays suspect,
/// and runs alone with the one after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t22_suspects_that_had_no_turn_stay_suspect() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = SqliteLedger::open(dir.path().join("ledger.db"), Settings::default()).unwrap();
    let records: Vec<_> =
        (0..10).map(|n| record(Some("k"), serde_json::json!({"event_id": format!("e-{n}")}))).collect();
    let bus = bus(&records).await;
    let scope = Scope::new("billing").unwrap();
    let marker = |partition, first| Marker {
        tried: (first..=5).collect(),
        batch: 1,
        ..Marker::new(topic(), partition, 5)
    };
    let both: Vec<_> = (0..2).map(|partition| marker(partition, 0)).collect();
    ledger.set_markers(&scope, &both).await.unwrap();
    let (reached, mut third) = tokio::sync::mpsc::unbounded_channel();
    let first = consumer(&bus, &ledger).with(|settings| settings.drain = Duration::from_millis(10));
    let first = first.build().unwrap();
    let handle = first.handle();
    let running =
        tokio::spawn(first.transactional_batch(move |_: &mut SqliteTransaction, events: &[Event]| {
            let stays = events.iter().any(|event| event.id.to_string() == "e-2");
            if stays {
                reached.send(events[0].origin.clone().unwrap().partition).unwrap();
            }
            async move {
                if stays {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        }));
    let partition = third.recv().await.unwrap();
    handle.stop();
    running.await.unwrap().unwrap();
    let left = ledger.markers(&scope, &topic(), &[partition]).await.unwrap();
    assert_eq!(left, [marker(partition, 2)]);
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&sizes);
    run_batches(
        consumer(&bus, &ledger),
        move |_: &mut SqliteTransaction, events: &[Event]| {
            log.lock().unwrap().push((events.len(), events[0].id.to_string()));
            async { Ok(()) }
        },
        8,
    )
    .await;
    let sizes = sizes.lock().unwrap().clone();
    let alone = sizes.iter().filter(|(_, first)| first.as_str() < "e-6").map(|(len, _)| *len);
    assert_eq!(alone.collect::<Vec<_>>(), [1; 4], "{sizes:?}");
    assert_eq!(ledger.markers(&scope, &topic(), &[partition]).await.unwrap(), [], "all are through");
}

/// A pool of one connection never deadlocks, whatever the outcomes are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t13_postgres_a_pool_of_one_suffices() {
    let ledger = support::ledger(1).await;
    let mut records: Vec<_> =
        (0..50).map(|n| record(None, serde_json::json!({"event_id": format!("e-{}", n % 25)}))).collect();
    records.push(record(None, serde_json::json!({"no": "id"})));
    let bus = bus(&records).await;
    let flaky = Arc::new(AtomicU32::new(0));
    let counts = run(
        consumer(&bus, &ledger),
        move |_: &mut PgTx, event: &Event| {
            let fails = event.id.to_string() == "e-7" && flaky.fetch_add(1, Ordering::SeqCst) < 2;
            async move { if fails { Err(Failed::retryable("no")) } else { Ok(()) } }
        },
        51,
    )
    .await;
    assert_eq!((counts["done"], counts["refused"]), (25, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_effects_of_duplicates_happen_once_and_poison_is_dead() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = SqliteLedger::open(dir.path().join("app.db"), Settings::default()).unwrap();
    let effects = rusqlite::Connection::open(dir.path().join("app.db")).unwrap();
    effects.execute_batch("create table paid (id text)").unwrap();
    let records: Vec<_> =
        (0..100).map(|n| record(None, serde_json::json!({"event_id": format!("e-{}", n % 50)}))).collect();
    let bus = bus(&records).await;
    let counts = run(
        consumer(&bus, &ledger),
        async |tx: &mut SqliteTransaction, event: &Event| {
            tx.execute("insert into paid values (?1)", [event.id.to_string()])?;
            if event.id.to_string() == "e-9" { Err(Failed::fatal("poison")) } else { Ok(()) }
        },
        100,
    )
    .await;
    let paid: i64 = effects.query_row("select count(*) from paid", [], |row| row.get(0)).unwrap();
    assert_eq!((paid, counts["done"]), (49, 49), "{counts:?}");
    let committed = bus.committed("billing", &Partition { topic: topic(), number: 0 }).await.unwrap();
    assert!(committed.is_some());
}

/// COMMITs whose answer never comes, and COMMITs that never arrive, cut one after the other while the consumer works: no
/// event is lost, none takes effect twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t31_postgres_cut_commits_of_a_consumer_lose_and_double_nothing() {
    let direct = support::pool(4).await;
    let proxy = Arc::new(proxy::Proxy::new(&support::url()).await);
    let through = support::pool_to(&proxy.url(&support::url()), 4).await;
    let ledger = PgLedger::with_pool(through, support::settings(&support::fresh_schema())).await.unwrap();
    let table = format!("effect_{}", uuid::Uuid::new_v4().simple());
    support::run(&direct, format!("create table {table} (id text)")).await;
    let records: Vec<_> =
        (0..400).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}")}))).collect();
    let bus = bus(&records).await;
    let cutting = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move {
            for n in 0..40 {
                let before = proxy.lost();
                if n % 2 == 0 {
                    proxy.lose_commit();
                } else {
                    proxy.lose_answer();
                }
                while proxy.lost() == before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                tokio::time::sleep(Duration::from_millis(30)).await; // let something through
            }
        }
    });
    let builder = consumer(&bus, &ledger).with(|settings| settings.batch_max = 4);
    let counts = run(builder, Insert::into(&table), 400).await;
    cutting.abort();
    let cut = proxy.lost();
    let (ids, rows): (i64, i64) =
        sqlx::query_as(sqlx::AssertSqlSafe(format!("select count(distinct id), count(*) from {table}")))
            .fetch_one(&direct)
            .await
            .unwrap();
    println!("{cut} messages cut; {ids} of 400 took effect, {} of them twice; {counts:?}", rows - ids);
    assert!(cut >= 5, "{cut} cuts");
    assert_eq!((ids, rows), (400, 400));
}

/// Goes on after a statement that failed.
struct Swallows(Insert);
impl TransactionalHandler<PgTx> for Swallows {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let _ = self.0.handle(tx, event).await;
        if event.id.to_string() == "e-7" {
            let _ = sqlx::query("select 1 / 0").execute(&mut **tx).await;
        }
        Ok(())
    }
}

/// A handler that ignores a failed statement: PostgreSQL answers its COMMIT by a rollback that is not an error. Nothing of it may
/// count as done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_an_error_that_a_handler_swallows_loses_nothing() {
    let (ledger, table) = pg().await;
    let records: Vec<_> =
        (0..40).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}")}))).collect();
    let bus = bus(&records).await;
    let counts = run(consumer(&bus, &ledger), Swallows(Insert::into(&table)), 40).await;
    assert_eq!((counts["done"], counts["dead"]), (39, 1));
    let effects = effects(&ledger, &table).await;
    assert_eq!(effects.len(), 39);
    assert!(!effects.contains(&"e-7".to_owned()));
}

/// The first claims of a scope, several in one transaction that is undone: the scope's number is gone with it, and must not be
/// remembered. (Entries under it would be nobody's, and their events run again elsewhere.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_scope_that_was_undone_is_not_remembered() {
    use hapax::ledger::{Claim, Identity, Mode};
    let ledger = support::ledger(3).await;
    let claim = |id: &str| {
        Claim::new(Identity::new(Scope::new("fresh").unwrap(), hapax::EventId::new(id).unwrap()), Mode::Done)
    };
    for _ in 0..2 {
        let mut tx = ledger.pool().begin().await.unwrap();
        for _ in 0..2 {
            let outcomes = ledger.claim_in(&mut tx, &[claim("a"), claim("b")]).await.unwrap();
            assert_eq!(outcomes.len(), 2);
        }
        tx.rollback().await.unwrap();
    }
    assert!(ledger.claim(&[claim("a")]).await.unwrap().remove(0).unwrap().is_claimed());
    let entries = ledger.list(&Filter::default(), None, 9).await.unwrap().entries;
    assert_eq!(entries.len(), 1, "it is listed, so its scope is there");
    // Another process has its own memory of scopes, and finds the same entry.
    let other =
        PgLedger::with_pool(support::pool(2).await, support::settings(ledger.schema())).await.unwrap();
    assert!(!other.claim(&[claim("a")]).await.unwrap().remove(0).unwrap().is_claimed());
}

/// A ledger that cannot be asked for markers so many times, and says of one id that an open transaction has it.
#[derive(Clone)]
struct Unmarked {
    inner: SqliteLedger,
    lost: Arc<AtomicU32>,
    busy: Option<&'static str>,
    /// With how many others the busy id was asked for, each time.
    asked: Arc<Mutex<Vec<usize>>>,
}

hapax::ledger_over!(Unmarked {
    Claims {
        async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
            self.inner.claim(claims).await
        }
        async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
            self.inner.settle(settles).await
        }
        async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
            self.inner.extend(extends).await
        }
        async fn now(&self) -> Result<Time> {
            self.inner.now().await
        }
        async fn epoch(&self) -> Result<Epoch> {
            self.inner.epoch().await
        }
    }
    ConsumerStore {
        async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
            if self.lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
                return Err(hapax::Error::Unavailable { what: "a fault the test ordered".into(), source: None });
            }
            self.inner.markers(scope, topic, partitions).await
        }
    }
    Operations {
        async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
            self.inner.sweep(settings).await
        }
    }
});

#[async_trait::async_trait]
impl TransactionalLedger for Unmarked {
    type Transaction = SqliteTransaction;
    async fn begin(&self, time_max: Duration, statement_max: Duration) -> Result<SqliteTransaction> {
        TransactionalLedger::begin(&self.inner, time_max, statement_max).await
    }
    async fn claim_in(&self, tx: &mut SqliteTransaction, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        let is_busy = |claim: &Claim| Some(&*claim.identity.id.as_str()) == self.busy;
        let Some(at) = claims.iter().position(is_busy) else {
            return TransactionalLedger::claim_in(&self.inner, tx, claims).await;
        };
        self.asked.lock().unwrap().push(claims.len() - 1);
        let others: Vec<_> = claims.iter().filter(|claim| !is_busy(claim)).cloned().collect();
        let mut outcomes = TransactionalLedger::claim_in(&self.inner, tx, &others).await?;
        outcomes.insert(at, Ok(Outcome::Busy { until: None, owner: None }));
        Ok(outcomes)
    }
    async fn settle_in(&self, tx: &mut SqliteTransaction, all: &[Settle]) -> Result<Vec<Result<Settled>>> {
        TransactionalLedger::settle_in(&self.inner, tx, all).await
    }
    async fn set_markers_in(
        &self,
        tx: &mut SqliteTransaction,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()> {
        TransactionalLedger::set_markers_in(&self.inner, tx, scope, markers).await
    }
    async fn is_sound(&self, tx: &mut SqliteTransaction) -> Result<bool> {
        self.inner.is_sound(tx).await
    }
    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.inner.is_contention(error)
    }
    fn is_doubt(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.inner.is_doubt(error)
    }
    async fn is_lost(&self, tx: &mut SqliteTransaction) -> bool {
        self.inner.is_lost(tx).await
    }
    async fn commit(&self, tx: SqliteTransaction) -> Result<Result<(), hapax::error::Source>> {
        self.inner.commit(tx).await
    }
    async fn roll_back(&self, tx: SqliteTransaction) {
        self.inner.roll_back(tx).await;
    }
    async fn was_committed(&self, claim: &Claim) -> Result<bool> {
        TransactionalLedger::was_committed(&self.inner, claim).await
    }
}

/// The ledger is away while partitions are given: nothing starts until it has said what is suspect, and then that alone runs alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_at_the_assignment_makes_nothing_suspect() {
    let dir = tempfile::tempdir().unwrap();
    let inner = SqliteLedger::open(dir.path().join("ledger.db"), Settings::default()).unwrap();
    let scope = Scope::new("billing").unwrap();
    // Somebody died with the first three of partition 0.
    let marker = Marker { tried: vec![0, 1, 2], batch: 3, ..Marker::new(topic(), 0, 2) };
    inner.set_markers(&scope, &[marker]).await.unwrap();
    let ledger = Unmarked { inner, lost: Arc::new(AtomicU32::new(4)), busy: None, asked: Arc::default() };
    let records: Vec<_> =
        (0..200).map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}")}))).collect();
    let bus = bus(&records).await;
    let batches = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&batches);
    let counts = run_batches(
        consumer(&bus, &ledger),
        move |_: &mut SqliteTransaction, events: &[Event]| {
            let places = events.iter().map(|event| event.origin.clone().unwrap());
            seen.lock()
                .unwrap()
                .push(places.map(|origin| (origin.partition, origin.offset)).collect::<Vec<_>>());
            async { Ok(()) }
        },
        200,
    )
    .await;
    assert_eq!(counts["done"], 200, "{counts:?}");
    assert_eq!(ledger.lost.load(Ordering::SeqCst), 0, "it was asked until it answered");
    let batches = batches.lock().unwrap();
    let alone: Vec<_> = batches.iter().filter(|batch| batch.len() == 1).map(|batch| batch[0]).collect();
    for suspect in [(0, 0), (0, 1), (0, 2)] {
        assert!(alone.contains(&suspect), "{suspect:?} ran beside others");
    }
    let largest = batches.iter().map(Vec::len).max().unwrap();
    assert!(largest > 1, "all 200 ran one by one");
}

/// An id that somebody's open transaction has is asked for again by itself: its neighbours of a batch would wait with it each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t85_an_id_that_is_known_to_be_busy_is_asked_for_without_its_neighbours() {
    let dir = tempfile::tempdir().unwrap();
    let inner = SqliteLedger::open(dir.path().join("ledger.db"), Settings::default()).unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let ledger = Unmarked { inner, lost: Arc::default(), busy: Some("e-7"), asked: Arc::clone(&asked) };
    let records = |range: std::ops::Range<usize>| -> Vec<_> {
        range.map(|n| record(None, serde_json::json!({"event_id": format!("e-{n}")}))).collect()
    };
    let bus = bus(&records(0..100)).await;
    let consumer = consumer(&bus, &ledger).with(|settings| {
        settings.concurrency = 1;
        settings.drain = Duration::from_millis(10);
    });
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let running =
        tokio::spawn(consumer.transactional_batch(async |_: &mut SqliteTransaction, _: &[Event]| Ok(())));
    let through = || handle.progress().passed.values().sum::<u64>();
    until("its neighbours", || async { through() == 99 }).await;
    let before = asked.lock().unwrap().len();
    for round in 1..=20 {
        for answer in bus.publish(&topic(), &records(100 * round..100 * (round + 1))).await.unwrap() {
            answer.unwrap();
        }
        until("the next hundred", || async { through() == 99 + 100 * round as u64 }).await;
    }
    until("it was asked for again", || async { asked.lock().unwrap().len() > before + 2 }).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let asked = asked.lock().unwrap();
    assert!(asked[before..].iter().all(|neighbours| *neighbours == 0), "{asked:?}");
}
