//! What a consumer leaves behind when it stops, dies or loses its ledger, and how soon the next one is at full speed again.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::handlers::Insert;
use crate::support::postgres as support;
use crate::support::proxy;
use crate::support::wait::until;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax::backend::postgres::{PgLedger, PgTx};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{
    Consumer, ConsumerBuilder, Failed, Handled, TransactionalBatchHandler, TransactionalHandler,
};
use hapax::guard::Run;
use hapax::ledger::{ConsumerStore, Entry, Filter, Ledger, State};
use hapax::{Event, Scope, Topic};

/// Fails the first time, so that its event is held, and takes effect the second.
struct SecondTime {
    insert: Insert,
    runs: Arc<AtomicU32>,
    then: Then,
}

/// What the second run does besides its effect.
enum Then {
    Sleeps(Duration),
    /// It reads first: from there on its transaction may be a snapshot.
    ReadsAndSleeps(Duration),
    /// Its COMMIT is lost, or the answer to it.
    LosesCommit {
        proxy: Arc<proxy::Proxy>,
        answer: bool,
    },
}

impl SecondTime {
    fn new(table: &str, runs: &Arc<AtomicU32>, then: Then) -> Self {
        SecondTime { insert: Insert::into(table), runs: Arc::clone(runs), then }
    }
}

impl TransactionalHandler<PgTx> for SecondTime {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let run = self.runs.fetch_add(1, Ordering::SeqCst);
        if run == 0 {
            return Err(Failed::retry_after("not yet", Duration::from_millis(300)));
        }
        if let Then::Sleeps(time) | Then::ReadsAndSleeps(time) = self.then {
            if matches!(self.then, Then::ReadsAndSleeps(_)) {
                sqlx::query("select count(*) from pg_class").execute(&mut **tx).await?;
            }
            tokio::time::sleep(time).await;
        }
        self.insert.handle(tx, event).await?;
        match &self.then {
            Then::LosesCommit { proxy, answer: false } if run == 1 => proxy.lose_commit(),
            Then::LosesCommit { proxy, answer: true } if run == 1 => proxy.lose_commit_answer(),
            _ => {}
        }
        Ok(())
    }
}

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn event(id: &str) -> Record {
    Record { payload: Some(serde_json::json!({ "event_id": id }).to_string().into()), ..Record::default() }
}

async fn bus(partitions: i32, records: &[Record]) -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(partitions)).await.unwrap();
    publish(&bus, records).await;
    bus
}

async fn publish(bus: &MemoryBus, records: &[Record]) {
    for answer in bus.publish(&topic(), records).await.unwrap() {
        answer.unwrap();
    }
}

fn consumer<L: Ledger>(bus: &Arc<MemoryBus>, ledger: L) -> ConsumerBuilder<L> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger).scope("billing").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(50);
        settings.backoff_max = Duration::from_millis(50);
        settings.hold_max = Duration::from_millis(1);
        settings.held_interval = Duration::from_millis(20);
    })
}

async fn entries(ledger: &impl Ledger, state: State) -> Vec<Entry> {
    let filter = Filter { states: vec![state], ..Filter::default() };
    ledger.list(&filter, None, 1000).await.unwrap().entries
}

/// A ledger, a table of effects without any constraint, and a proxy in front of a second pool of the same.
async fn world() -> (PgLedger, PgLedger, Arc<proxy::Proxy>, String) {
    let direct = support::ledger(4).await;
    let table = format!("effect_{}", uuid::Uuid::new_v4().simple());
    support::run(direct.pool(), format!("create table {table} (id text)")).await;
    let proxy = Arc::new(proxy::Proxy::new(&support::url()).await);
    let through = sqlx::postgres::PgPoolOptions::new().max_connections(4);
    let through = through.acquire_timeout(Duration::from_secs(5)); // so that an outage is noticed soon
    let through = loop {
        match through.clone().connect(&proxy.url(&support::url())).await {
            Err(sqlx::Error::PoolTimedOut) => {} // nobody is away: the machine is busy
            connected => break connected.unwrap(),
        }
    };
    let through = PgLedger::with_pool(through, support::settings(direct.schema())).await.unwrap();
    (direct, through, proxy, table)
}

/// A held event whose handler takes longer than a lease, and two members that both look for what is due: the lease is kept while
/// the handler runs, so one of them runs it, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t78_a_held_event_of_a_transactional_consumer_keeps_its_lease() {
    let (ledger, _, _, table) = world().await;
    let bus = bus(2, &[event("slow")]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let mut members = Vec::new();
    for _ in 0..2 {
        // It runs for longer than two leases.
        let handler = SecondTime::new(&table, &runs, Then::Sleeps(Duration::from_secs(17)));
        let consumer = consumer(&bus, ledger.clone())
            .with(|settings| {
                settings.lease = Duration::from_secs(8); // longer than a busy machine stands still
                settings.heartbeat = Duration::from_millis(500);
            })
            .build()
            .unwrap();
        let handle = consumer.handle();
        members.push((handle, tokio::spawn(consumer.transactional(handler))));
        // The second member joins when the event is held: a partition that moves would take the first failure with it.
        until("it failed, and is held", || async {
            !entries(&ledger, State::Retry).await.is_empty()
                || !entries(&ledger, State::Leased).await.is_empty()
        })
        .await;
    }
    until("it is settled", || async {
        !entries(&ledger, State::Done).await.is_empty() || !entries(&ledger, State::Dead).await.is_empty()
    })
    .await;
    for (handle, running) in members {
        handle.stop();
        running.await.unwrap().unwrap();
    }
    let done = entries(&ledger, State::Done).await;
    let effects: i64 = support::ask(ledger.pool(), format!("select count(*) from {table}")).await;
    assert_eq!((done.len(), effects), (1, 1));
    assert_eq!(done[0].attempts, 2, "one failed, one took effect; {} runs", runs.load(Ordering::SeqCst));
}

/// The COMMIT of a held event is lost on its way, or its answer is: no attempt is counted, and it takes effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t78_a_lost_commit_of_a_held_event_costs_no_attempt() {
    for answer in [false, true] {
        let (ledger, through, proxy, table) = world().await;
        let bus = bus(1, &[event("held")]).await;
        let handler =
            SecondTime::new(&table, &Arc::default(), Then::LosesCommit { proxy: Arc::clone(&proxy), answer });
        let consumer = consumer(&bus, through)
            .with(|settings| settings.lease = Duration::from_secs(20))
            .with(|settings| settings.heartbeat = Duration::from_secs(15))
            .build()
            .unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.transactional(handler));
        until("it is done", || async { !entries(&ledger, State::Done).await.is_empty() }).await;
        until("it is through", || async { handle.progress().passed.values().sum::<u64>() == 2 }).await;
        handle.stop();
        running.await.unwrap().unwrap();
        assert_eq!(proxy.lost(), 1, "a COMMIT was cut");
        let effects: i64 = support::ask(ledger.pool(), format!("select count(*) from {table}")).await;
        assert_eq!(effects, 1);
        assert_eq!(
            entries(&ledger, State::Done).await[0].attempts,
            2,
            "one failed; the outage counts nothing"
        );
    }
}

/// The ledger is so slow that a claim is answered after its lease has ended for its holder, and the consumer is told to stop
/// meanwhile: the lease goes back before the consumer ends, uncounted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t89_a_stop_leaves_no_lease_of_a_claim_that_was_answered_late() {
    let (ledger, through, proxy, _) = world().await;
    let bus = bus(1, &[]).await;
    let consumer = consumer(&bus, through)
        .with(|settings| {
            settings.lease = Duration::from_millis(500);
            settings.heartbeat = Duration::from_millis(100);
        })
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async {
        // If it runs at all, it still runs when the consumer is told to stop.
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(())
    }));
    until("it has its partition", || async { handle.progress().partitions == 1 }).await;
    proxy.stall();
    publish(&bus, &[event("late")]).await;
    until("it was received", || async { handle.progress().in_flight == 1 }).await;
    tokio::time::sleep(Duration::from_millis(700)).await; // longer than the lease
    handle.stop();
    tokio::time::sleep(Duration::from_millis(100)).await; // most of the time the stop is under way by then; it must do either way
    proxy.heal();
    running.await.unwrap().unwrap();
    assert!(entries(&ledger, State::Leased).await.is_empty(), "nothing is left in its hands");
    let retry = entries(&ledger, State::Retry).await;
    assert!(retry.iter().all(|entry| entry.attempts == 0), "it never ran: {retry:?}");
}

/// The answer to a claim is lost and the ledger stays away, until a stop is under way: the consumer learns what became of the claim
/// and gives the lease back before it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t89_a_stop_leaves_no_lease_of_a_claim_in_doubt() {
    let (ledger, through, proxy, _) = world().await;
    let bus = bus(1, &[]).await;
    let consumer =
        consumer(&bus, through).with(|settings| settings.held_interval = Duration::from_secs(3600));
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("it has its partition", || async { handle.progress().partitions == 1 }).await;
    publish(&bus, &[event("first")]).await;
    until("the ledger knows its scope", || async { !entries(&ledger, State::Done).await.is_empty() }).await;
    proxy.lose_answer_and_refuse("doubtful");
    publish(&bus, &[event("doubtful")]).await;
    until("it was granted", || async { !entries(&ledger, State::Leased).await.is_empty() }).await;
    tokio::time::sleep(Duration::from_millis(2500)).await; // it was asked again, and given up
    handle.stop();
    tokio::time::sleep(Duration::from_millis(300)).await; // most of the time the stop is under way by then; it must do either way
    proxy.heal();
    running.await.unwrap().unwrap();
    assert!(entries(&ledger, State::Leased).await.is_empty(), "nothing is left in its hands");
    assert_eq!(entries(&ledger, State::Retry).await[0].attempts, 0, "it never ran");
}

/// 40,000 records in batches of 200, 8 at once, and the process is gone in the middle of it: what was under way runs again in whole
/// batches, not one by one. The second consumer is gone as well, with suspects under way; the third still has batches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t84_after_a_kill_the_rest_runs_in_whole_batches() {
    const COUNT: usize = 40_000;
    struct Counted {
        insert: Insert,
        calls: Arc<AtomicU32>,
    }
    impl TransactionalBatchHandler<PgTx> for Counted {
        async fn handle(&self, tx: &mut PgTx, events: &[Event]) -> Handled {
            self.calls.fetch_add(1, Ordering::SeqCst);
            self.insert.insert_all(tx, events).await
        }
    }
    let (ledger, _, _, table) = world().await;
    let records: Vec<_> = (0..COUNT)
        .map(|n| Record { key: Some(format!("k-{}", n % 1000).into()), ..event(&format!("e-{n}")) })
        .collect();
    let bus = bus(6, &records).await;
    let effects = || async {
        let sql = format!("select count(*) from {table}");
        usize::try_from(support::ask::<i64>(ledger.pool(), sql).await).unwrap()
    };
    let mut calls = Vec::new();
    for (life, more) in [COUNT / 4, 2_000, COUNT].into_iter().enumerate() {
        let called = Arc::new(AtomicU32::new(0));
        let handler = Counted { insert: Insert::into(&table), calls: Arc::clone(&called) };
        let builder = consumer(&bus, ledger.clone()).with(|settings| settings.concurrency = 8);
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        let began = std::time::Instant::now();
        let before = effects().await;
        let until_done = (before + more).min(COUNT);
        let running = tokio::spawn(consumer.transactional_batch(handler));
        until("enough of it", || async { effects().await >= until_done }).await;
        let done = effects().await - before;
        let took = began.elapsed();
        println!("life {life}: {done} in {took:?} with {} calls", called.load(Ordering::SeqCst));
        calls.push((done, called.load(Ordering::SeqCst) as usize));
        if until_done < COUNT {
            running.abort(); // it stops where it is: nothing is given back, nothing is cleared
            let _ = running.await;
        } else {
            handle.stop();
            running.await.unwrap().unwrap();
        }
    }
    let (rows, ids): (i64, i64) =
        sqlx::query_as(sqlx::AssertSqlSafe(format!("select count(*), count(distinct id) from {table}")))
            .fetch_one(ledger.pool())
            .await
            .unwrap();
    assert_eq!((rows, ids), (COUNT as i64, COUNT as i64));
    // At most 1,600 events were under way. What one process had died of comes in whole batches; what two had died of, in
    // pieces of 12; all the rest in batches that are as large as before. Batches are not always full, hence the 100.
    for (life, pieces) in [(0, 0), (1, 1600 / 100), (2, 1600 / 12)] {
        let (done, called) = calls[life];
        assert!(done > 0, "life {life} has done nothing");
        assert!(called <= done / 100 + pieces + 100, "life {life}: {called} calls for {done} events");
    }
    let markers =
        ledger.markers(&Scope::new("billing").unwrap(), &topic(), &[0, 1, 2, 3, 4, 5]).await.unwrap();
    assert_eq!(markers, [], "a clean stop leaves none");
}

/// Twenty partitions, and handlers that do not end: what is in memory is bounded for all of them together, and the same for what comes
/// out of the ledger, in bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t79_one_budget_of_memory_for_the_whole_process() {
    let stuck = |started: &Arc<AtomicU32>| {
        let started = Arc::clone(started);
        move |_: &Event, _: &Run| {
            started.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<Handled>()
        }
    };
    let (ledger, ..) = world().await;
    let records: Vec<_> = (0..20_000).map(|n| event(&format!("e-{n}"))).collect();
    let crowd = bus(20, &records).await;
    let started = Arc::new(AtomicU32::new(0));
    let many = consumer(&crowd, ledger.clone()).with(|settings| {
        (settings.concurrency, settings.in_flight_max) = (8, 1000);
        settings.drain = Duration::from_millis(10);
    });
    let many = many.build().unwrap();
    let handle = many.handle();
    let running = tokio::spawn(many.leased(stuck(&started)));
    until("all of them pause", || async { handle.progress().paused == 20 }).await;
    let in_flight = handle.progress().in_flight;
    // What the bus brings at once may be more than there is room for.
    assert!((500..3000).contains(&in_flight), "{in_flight} in memory, where 1000 may be");
    handle.stop();
    running.await.unwrap().unwrap();

    // 30 events of 256 KiB are held, and 2 MiB may be in memory: half of it, four and the one that reaches it, for these.
    let (ledger, ..) = world().await;
    let padding = "x".repeat(256 << 10);
    let large = |n: usize| Record {
        payload: Some(serde_json::json!({"event_id": format!("e-{n}"), "pad": padding}).to_string().into()),
        ..Record::default()
    };
    let bus = bus(1, &(0..30).map(large).collect::<Vec<_>>()).await;
    let fails =
        consumer(&bus, ledger.clone()).with(|settings| settings.held_interval = Duration::from_secs(60));
    let fails = fails.build().unwrap();
    let handle = fails.handle();
    let running = tokio::spawn(fails.leased(|_: &Event, _: &Run| async {
        Err(Failed::retry_after("the sink is away", Duration::from_secs(2)))
    }));
    until("all are held", || async { handle.progress().passed.get("held") == Some(&30) }).await;
    handle.stop();
    running.await.unwrap().unwrap();
    let started = Arc::new(AtomicU32::new(0));
    let few = consumer(&bus, ledger.clone()).with(|settings| {
        (settings.concurrency, settings.in_flight_bytes_max) = (1000, 2 << 20);
        settings.drain = Duration::from_millis(10);
    });
    let few = few.build().unwrap();
    let handle = few.handle();
    let running = tokio::spawn(few.leased(stuck(&started)));
    until("some of them run", || async { started.load(Ordering::SeqCst) > 3 }).await;
    tokio::time::sleep(Duration::from_secs(1)).await; // whatever else would come
    assert_eq!(started.load(Ordering::SeqCst), 4);
    handle.stop();
    running.await.unwrap().unwrap();
}

/// A retry that waited in memory while everything behind it went on, and its process dies with it: it is suspect, though no other
/// offset near it is under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t82_a_delayed_retry_is_suspect_when_its_process_dies() {
    let (ledger, ..) = world().await;
    let records: Vec<_> = (0..100).map(|n| event(&format!("e-{n}"))).collect();
    let bus = bus(1, &records).await;
    let scope = Scope::new("billing").unwrap();
    let mut seen = None;
    for life in 0..2 {
        let runs = Arc::new(AtomicU32::new(0));
        let (count, marked) = (Arc::clone(&runs), Arc::new(std::sync::Mutex::new(None)));
        let (of, scope, into) = (ledger.clone(), scope.clone(), Arc::clone(&marked));
        let one = consumer(&bus, ledger.clone()).with(|settings| {
            settings.hold_max = Duration::from_secs(60);
            settings.batch_max = 50;
        });
        let one = one.build().unwrap();
        let handle = one.handle();
        let running = tokio::spawn(one.transactional(move |_: &mut PgTx, event: &Event| {
            let first = event.id.as_str() == "e-0";
            let run = if first { count.fetch_add(1, Ordering::SeqCst) } else { 0 };
            let (ledger, scope, into) = (of.clone(), scope.clone(), Arc::clone(&into));
            async move {
                match (first, life, run) {
                    (true, 0, 0) => return Err(Failed::retry_after("not yet", Duration::from_secs(20))),
                    (true, 0, _) => std::future::pending().await, // it dies here
                    (true, ..) => {
                        let markers = ledger.markers(&scope, &topic(), &[0]).await.unwrap();
                        *into.lock().unwrap() = markers.into_iter().next();
                    }
                    _ => {}
                }
                Ok(())
            }
        }));
        if life == 0 {
            // First the others: what is in one batch with it would wait for it.
            until("all others are done", || async { entries(&ledger, State::Done).await.len() == 99 }).await;
            until("it is retried", || async { runs.load(Ordering::SeqCst) >= 2 }).await;
            running.abort();
            let _ = running.await;
        } else {
            until("all are done", || async { entries(&ledger, State::Done).await.len() == 100 }).await;
            handle.stop();
            running.await.unwrap().unwrap();
            seen = marked.lock().unwrap().clone();
        }
    }
    let marker = seen.expect("it ran in the second life");
    assert!(marker.tried.contains(&0), "it ran unnoted: {marker:?}");
}

/// A database whose transactions read from a snapshot by default. A held event runs longer than a heartbeat and reads first: its lease
/// is not extended under its transaction, which would fail it again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t78_a_held_event_takes_effect_where_transactions_are_snapshots() {
    let (direct, _, _, table) = world().await;
    let options: sqlx::postgres::PgConnectOptions = support::url().parse().unwrap();
    let options = options.options([("default_transaction_isolation", "repeatable read")]);
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
    let ledger = PgLedger::with_pool(pool, support::settings(direct.schema())).await.unwrap();
    let bus = bus(1, &[event("held")]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let handler = SecondTime::new(&table, &runs, Then::ReadsAndSleeps(Duration::from_secs(2)));
    let consumer = consumer(&bus, ledger)
        .with(|settings| {
            settings.lease = Duration::from_secs(30);
            settings.heartbeat = Duration::from_millis(200); // a run sleeps for longer
        })
        .build()
        .unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.transactional(handler));
    until("it is done", || async { !entries(&direct, State::Done).await.is_empty() }).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(entries(&direct, State::Done).await[0].attempts, 2, "one failed, one took effect");
    assert_eq!(runs.load(Ordering::SeqCst), 2, "nothing ran for nothing");
}

/// The ledger cannot be looked at for what is due any more, and that does not pass: the consumer ends and says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t82_held_events_that_can_never_be_looked_for_end_the_consumer() {
    let (ledger, ..) = world().await;
    let bus = bus(1, &[]).await;
    let consumer = consumer(&bus, ledger.clone()).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("it has its partition", || async { handle.progress().partitions == 1 }).await;
    support::run(ledger.pool(), format!("drop schema {} cascade", ledger.schema())).await;
    until("it ends", || async { running.is_finished() }).await;
    let error = running.await.unwrap().expect_err("its ledger is gone");
    assert!(!error.is_retryable(), "{error}");
}
