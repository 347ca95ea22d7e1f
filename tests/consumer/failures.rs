//! What counts as a failure of a handler, and what a failure costs others.
#![cfg(all(feature = "testing", feature = "postgres", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::handlers::Insert;
use crate::support::postgres as support;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::backend::postgres::{Migrate, PgLedger, PgTx};
use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, Counts, Failed, Handled, TransactionalHandler};
use hapax::guard::Run;
use hapax::ledger::{
    Claims, Entry, Filter, IdentityRule, Intervene, Intervention, Ledger, Operations, Settings, State,
    TransactionalLedger, Week,
};
use hapax::{Event, Topic};
use sqlx::AssertSqlSafe;

fn record(id: &str) -> Record {
    let json = serde_json::json!({"event_id": id}).to_string();
    Record { payload: Some(json.into()), ..Record::default() }
}

fn records(count: usize) -> Vec<Record> {
    (0..count).map(|n| record(&format!("e-{n}"))).collect()
}

async fn bus(records: &[Record]) -> Arc<MemoryBus> {
    let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("orders").unwrap());
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    for answer in bus.publish(&topic, records).await.unwrap() {
        answer.unwrap();
    }
    bus
}

fn consumer<L: Ledger>(bus: &Arc<MemoryBus>, ledger: L) -> ConsumerBuilder<L> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger).scope("billing").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(5);
        settings.backoff_max = Duration::from_millis(20);
        settings.held_interval = Duration::from_millis(20);
        settings.attempts_max = 3;
    })
}

/// Runs until so many deliveries are through, then drains.
async fn run<L: Ledger, R>(
    builder: ConsumerBuilder<L>,
    consume: impl FnOnce(Consumer<L>) -> R,
    passed: u64,
) -> Counts
where
    R: Future<Output = hapax::Result<Counts>> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consume(consumer));
    support::until("all through", async || {
        assert!(!running.is_finished(), "it ended by itself");
        handle.progress().passed.values().sum::<u64>() == passed
    })
    .await;
    handle.stop();
    running.await.unwrap().unwrap()
}

async fn nothing(_: &Event, _: &Run) -> Handled {
    Ok(())
}

async fn dead(ledger: &impl Ledger) -> Vec<Entry> {
    let filter = Filter { states: vec![State::Dead], ..Filter::default() };
    ledger.list(&filter, None, 99).await.unwrap().entries
}

/// One that refers to nothing, which the database says only at the end of the transaction, is the handler's failure and not an
/// outage: it alone dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_deferred_constraint_fails_its_event_alone() {
    let ledger = support::ledger(8).await;
    let table = support::fresh_schema();
    support::run(ledger.pool(), format!("create table {table}_order (id text primary key)")).await;
    support::run(
        ledger.pool(),
        format!("create table {table} (id text references {table}_order deferrable initially deferred)"),
    )
    .await;
    support::run(
        ledger.pool(),
        format!("insert into {table}_order select 'e-' || n from generate_series(0, 31) n where n <> 7"),
    )
    .await;
    let bus = bus(&records(32)).await;
    let insert = Insert::into(&table);
    let counts = run(consumer(&bus, ledger.clone()), |consumer| consumer.transactional(insert), 32).await;
    assert_eq!((counts["done"], counts["dead"]), (31, 1), "{counts:?}");
    let rows: i64 = support::ask(ledger.pool(), format!("select count(*) from {table}")).await;
    assert_eq!(rows, 31);
    let dead = dead(&ledger).await.remove(0);
    assert_eq!((dead.identity.id.to_string().as_str(), dead.attempts), ("e-7", 3));
    assert!(dead.reason.as_deref().unwrap().contains("foreign key"), "{:?}", dead.reason);

    // Nobody looked before the commit: it says the same.
    let limit = Duration::from_secs(30);
    let mut tx = TransactionalLedger::begin(&ledger, limit, limit).await.unwrap();
    let insert = format!("insert into {table} values ('e-7')");
    sqlx::query(AssertSqlSafe(insert)).execute(&mut *tx).await.unwrap();
    let committed = TransactionalLedger::commit(&ledger, tx).await.unwrap();
    assert!(committed.unwrap_err().to_string().contains("foreign key"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_a_deferred_constraint_fails_its_event_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = SqliteLedger::open(dir.path().join("app.db"), Settings::default()).unwrap();
    let effects = rusqlite::Connection::open(dir.path().join("app.db")).unwrap();
    effects
        .execute_batch(
            "create table orders (id text primary key); \
             create table paid (id text references orders deferrable initially deferred)",
        )
        .unwrap();
    for n in (0..16).filter(|n| *n != 7) {
        effects.execute("insert into orders values (?1)", [format!("e-{n}")]).unwrap();
    }
    let bus = bus(&records(16)).await;
    let insert = async |tx: &mut SqliteTransaction, event: &Event| {
        tx.execute("insert into paid values (?1)", [event.id.to_string()])?;
        Handled::Ok(())
    };
    let counts = run(consumer(&bus, ledger.clone()), |consumer| consumer.transactional(insert), 16).await;
    assert_eq!((counts["done"], counts["dead"]), (15, 1), "{counts:?}");
    let paid: i64 = effects.query_row("select count(*) from paid", [], |row| row.get(0)).unwrap();
    assert_eq!(paid, 15);
    assert_eq!(dead(&ledger).await[0].attempts, 3);
}

/// Meets outages that are not the transaction's.
async fn meets_outages(tx: &mut PgTx, event: &Event) -> Handled {
    match event.id.to_string().as_str() {
        "e-3" => return Err(sqlx::Error::PoolTimedOut.into()),
        "e-5" => {
            let mut query = sqlx::QueryBuilder::<sqlx::Postgres>::new("select 1 where 1 in (");
            let mut list = query.separated(", ");
            for n in 0..70_000 {
                list.push_bind(n);
            }
            query.push(")").build().execute(&mut **tx).await?;
        }
        _ => {}
    }
    Ok(())
}

/// Errors that look like an outage but speak of something else than the transaction's connection: a second pool, a statement
/// that cannot even be sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_an_outage_of_the_handlers_own_is_counted() {
    let ledger = support::ledger(8).await;
    let bus = bus(&records(16)).await;
    let counts =
        run(consumer(&bus, ledger.clone()), |consumer| consumer.transactional(meets_outages), 16).await;
    assert_eq!((counts["done"], counts["dead"]), (14, 2), "{counts:?}");
    assert!(dead(&ledger).await.iter().all(|entry| entry.attempts == 3));
}

/// A statement that does not end, and that no other test has.
fn sleep_of(schema: &str) -> String {
    format!("select pg_sleep(600) /* {schema} */")
}

/// Sleeps in the transaction of one event.
struct Sleepy(String);

impl TransactionalHandler<PgTx> for Sleepy {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        if event.id.to_string() == "e-3" {
            sqlx::query(AssertSqlSafe(sleep_of(&self.0))).execute(&mut **tx).await?;
        }
        Ok(())
    }
}

/// A handler's statement that never ends holds up neither its own failure nor its neighbours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_handler_that_is_given_up_is_counted_soon() {
    let ledger = support::ledger(8).await;
    let bus = bus(&records(8)).await;
    let builder =
        consumer(&bus, ledger.clone()).with(|settings| settings.handler_timeout = Duration::from_millis(300));
    let sleepy = Sleepy(ledger.schema().to_owned());
    let counts = run(builder, |consumer| consumer.transactional(sleepy), 8).await;
    assert_eq!((counts["done"], counts["dead"]), (7, 1), "{counts:?}");
    let dead = dead(&ledger).await.remove(0);
    println!("{:?}", dead.reason);
    assert_eq!(dead.attempts, 3);
}

/// Nor does it hold up a stop: a transactional batch is undone at the drain's deadline, whatever the server is busy with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_stop_does_not_wait_for_a_statement() {
    let ledger = support::ledger(8).await;
    let bus = bus(&records(8)).await;
    let builder = consumer(&bus, ledger.clone()).with(|settings| {
        settings.handler_timeout = Duration::from_secs(90);
        settings.drain = Duration::from_millis(100);
    });
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.transactional(Sleepy(ledger.schema().to_owned())));
    support::until("it sleeps", async || {
        let sql = format!(
            "select count(*) from pg_stat_activity where query = '{}' and state = 'active'",
            sleep_of(ledger.schema())
        );
        support::ask::<i64>(ledger.pool(), sql).await > 0
    })
    .await;
    handle.stop();
    let ended = tokio::time::timeout(Duration::from_secs(120), running).await;
    ended.expect("it ends before the statement does").unwrap().unwrap();
    assert!(dead(&ledger).await.is_empty(), "no attempt was counted");
}

/// What failed once is tried apart from then on: its neighbours are undone with it once and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_failure_that_comes_again_costs_its_neighbours_nothing() {
    let ledger = support::ledger(8).await;
    let bus = bus(&records(800)).await;
    let shared = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&shared);
    let builder = consumer(&bus, ledger.clone()).with(|settings| {
        settings.concurrency = 1;
        settings.batch_max = 8;
        settings.attempts_max = 9;
    });
    let handler = move |_: &mut PgTx, events: &[Event]| {
        let bad = events.iter().any(|event| event.id.to_string() == "e-7");
        if bad {
            log.lock().unwrap().push(events.len());
        }
        async move { if bad { Err(Failed::retryable("bad")) } else { Ok(()) } }
    };
    let counts = run(builder, |consumer| consumer.transactional_batch(handler), 800).await;
    assert_eq!((counts["done"], counts["dead"]), (799, 1));
    let sizes = shared.lock().unwrap().clone();
    let undone = sizes.iter().filter(|len| **len > 1).count();
    assert_eq!(sizes.iter().filter(|len| **len == 1).count(), 9, "{sizes:?}");
    assert!(undone <= 3, "only while it was looked for: {sizes:?}");
}

/// A sink that says "the same is in progress" uses up nothing.
#[tokio::test]
async fn what_is_in_progress_elsewhere_uses_up_no_attempt() {
    let ledger = Arc::new(MemoryLedger::default());
    let bus = bus(&records(1)).await;
    let asked = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&asked);
    let handler = move |_: &Event, run: &Run| {
        assert_eq!(run.attempt(), 1);
        let busy = counter.fetch_add(1, Ordering::SeqCst) < 10;
        async move { if busy { Err(Failed::in_progress("busy", Duration::ZERO)) } else { Ok(()) } }
    };
    let builder = consumer(&bus, Arc::clone(&ledger));
    let counts = run(builder, |consumer| consumer.leased(handler), 1).await;
    assert_eq!((counts.get("done"), asked.load(Ordering::SeqCst)), (Some(&1), 11), "{counts:?}");
}

fn by_time() -> Arc<MemoryLedger> {
    let mut settings = Settings::default();
    settings.identity = IdentityRule::IdAndTime;
    Arc::new(MemoryLedger::new(settings))
}

/// A record that has no time to be known by is a dead letter like any other, and one that is redriven dies again.
#[tokio::test]
async fn id_and_time_what_cannot_be_read_stops_nobody() {
    let ledger = by_time();
    let garbage = Record { payload: Some(b"\x00\xffnope".to_vec().into()), ..Record::default() };
    let json = r#"{"event_id": "good", "occurred_at": "2026-03-02T00:30:00Z"}"#;
    let good = Record { payload: Some(json.into()), ..Record::default() };
    let bus = bus(&[garbage, record("no-time"), good]).await;
    let counts = run(consumer(&bus, Arc::clone(&ledger)), |consumer| consumer.leased(nothing), 3).await;
    println!("{counts:?}");
    let before = dead(&*ledger).await;
    assert!(!before.is_empty() && before.iter().all(|entry| entry.week == Week::TIMELESS));
    let first = before.iter().find(|entry| entry.identity.id.to_string() == "orders-0-0").unwrap();
    let redrive = Intervene {
        identity: first.identity.clone(),
        time: Some(hapax::Time::from_micros(0)),
        what: Intervention::Redrive,
        by: "tester".to_owned(),
        reason: "again".to_owned(),
        out_of_order: false,
        token: None,
        dry_run: false,
    };
    ledger.intervene(&redrive).await.unwrap();
    let counts = run(consumer(&bus, Arc::clone(&ledger)), |consumer| consumer.leased(nothing), 1).await;
    assert_eq!(counts.get("refused"), Some(&1), "{counts:?}");
    assert_eq!(dead(&*ledger).await.len(), before.len());
}

/// A window does not know the time, so it would hide events that such a ledger tells apart.
#[tokio::test]
async fn id_and_time_with_a_window_is_refused() {
    use hapax::window::{MemoryWindow, Window, WindowSettings};
    let window: Arc<dyn Window> = Arc::new(MemoryWindow::new(WindowSettings::new("1"), 10).unwrap());
    let bus = bus(&[]).await;
    let consumer = consumer(&bus, by_time()).window(window).build().unwrap();
    let error = consumer.leased(nothing).await.unwrap_err();
    assert!(error.to_string().contains("id_and_time"), "{error}");
}

/// A database that is put back as it was before (here from a copy made with `TEMPLATE`) does not know what took effect since; the
/// window, which does, is not believed, and nobody has to tell it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t01_a_restored_ledger_is_not_contradicted_by_its_window() {
    use hapax::window::{MemoryWindow, Window, WindowSettings};
    let scratch = support::Scratch::new().await;
    let window = Arc::new(MemoryWindow::new(WindowSettings::new("1"), 1000).unwrap());
    let open = async || {
        let pool = support::pool_to(&scratch.url(), 4).await;
        PgLedger::with_pool(pool, support::settings("hapax")).await.unwrap()
    };
    // A run over all 20 events: how many were new to the ledger, and how many it was not asked about.
    let all = async |ledger: PgLedger| {
        let builder =
            consumer(&bus(&records(20)).await, ledger).window(Arc::clone(&window) as Arc<dyn Window>);
        let counts = run(builder, |consumer| consumer.leased(nothing), 20).await;
        (counts.get("done").copied(), counts.get("window").copied())
    };
    open().await.pool().close().await;
    scratch.admin("create database {db}_before template {db}").await;
    let ledger = open().await;
    let before = ledger.epoch().await.unwrap();
    assert_eq!(all(ledger.clone()).await, (Some(20), None));
    support::until("all remembered", async || window.len() == 20).await;
    assert_eq!(all(ledger.clone()).await, (None, Some(20)), "the window saves the ledger the question");
    ledger.pool().close().await;
    scratch.admin("drop database {db} with (force)").await;
    scratch.admin("create database {db} template {db}_before").await;
    let ledger = open().await;
    assert_ne!(ledger.epoch().await.unwrap(), before);
    assert_eq!(all(ledger.clone()).await, (Some(20), None), "every event took effect again");
    ledger.pool().close().await;
    scratch.admin("drop database {db}_before with (force)").await;
    scratch.drop_it().await;
}

/// Tables that were loaded from a dump, and a role that may not ask for the cluster's identity: both have an epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_an_epoch_needs_no_privileges_and_tells_a_reloaded_table() {
    let scratch = support::Scratch::new().await;
    let pool = support::pool_to(&scratch.url(), 4).await;
    let ledger = PgLedger::with_pool(pool.clone(), support::settings("hapax")).await.unwrap();
    let first = ledger.epoch().await.unwrap();
    support::run(&pool, "create table hapax.kept as table hapax.meta".to_owned()).await;
    support::run(&pool, "alter table hapax.meta rename to gone".to_owned()).await;
    support::run(&pool, "alter table hapax.kept rename to meta".to_owned()).await;
    let second = ledger.epoch().await.unwrap();
    assert_ne!(first, second, "the same row in another table");
    let role = support::fresh_schema();
    support::run(&pool, format!("create role {role}")).await;
    support::run(&pool, "revoke execute on function pg_control_system() from public".to_owned()).await;
    support::run(&pool, hapax::backend::postgres::grants_sql("hapax", &role).unwrap()).await;
    let become_it = format!("set role {role}");
    let options =
        sqlx::postgres::PgPoolOptions::new().max_connections(2).after_connect(move |connection, _| {
            let become_it = AssertSqlSafe(become_it.clone());
            Box::pin(async move { sqlx::raw_sql(become_it).execute(connection).await.map(drop) })
        });
    let mut settings = support::settings("hapax");
    settings.migrate = Migrate::Check;
    let plain = options.connect(&scratch.url()).await.unwrap();
    let plain = PgLedger::with_pool(plain, settings).await.unwrap();
    let third = plain.epoch().await.unwrap();
    assert_ne!(second, third, "it knows less");
    assert_eq!(plain.epoch().await.unwrap(), third);
    plain.pool().close().await;
    support::run(&pool, format!("drop owned by {role}")).await;
    support::run(&pool, format!("drop role {role}")).await;
    pool.close().await;
    scratch.drop_it().await;
}
