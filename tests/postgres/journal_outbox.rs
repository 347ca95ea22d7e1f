//! Rows and events in one transaction, whatever is lost on the way: the transactional outbox, a consumer that appends, answers that
//! never come, and appends from SQL.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::postgres::{ask, fresh_schema, pool, pool_to, run, until, url};
use crate::support::proxy::Proxy;
use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgLedger, PgTx, Pooling};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{Consumer, Failed, Handled, TransactionalHandler};
use hapax::id::Kind;
use hapax::journal::{Append, Appender, Expected, Journal, Placing, Position, Stored};
use hapax::{Aggregate, Error, Event, EventId, Topic};
use sqlx::AssertSqlSafe;

fn settings(schema: &str) -> PgJournalSettings {
    let mut settings = PgJournalSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings
}

fn append(aggregate: &str, expected: Expected, id: &str) -> Append {
    let event = Event::new(EventId::new(id).unwrap()).payload(format!("{{\"id\": \"{id}\"}}"));
    Append::new(Aggregate::new(aggregate).unwrap(), expected, [event])
}

async fn all(journal: &PgJournal) -> Vec<Stored> {
    let (mut after, mut all) = (Position::START, Vec::new());
    loop {
        let batch = journal.read(&after, 100).await.unwrap();
        if batch.events.is_empty() && !batch.at_hole {
            return all;
        }
        after = batch.next;
        all.extend(batch.events);
        journal.wait(&after, Duration::from_millis(if batch.at_hole { 100 } else { 0 })).await.unwrap();
    }
}

#[tokio::test]
async fn j1_row_and_event_are_committed_together_or_not_at_all() {
    let journal = PgJournal::with_pool(pool(4).await, settings(&fresh_schema())).await.unwrap();
    let s = journal.schema();
    run(journal.pool(), format!("create table {s}.orders (id text primary key)")).await;
    for n in 0..20 {
        let mut tx = journal.pool().begin().await.unwrap();
        let row = format!("insert into {s}.orders values ('order-{n}')");
        sqlx::query(AssertSqlSafe(row)).execute(&mut *tx).await.unwrap();
        let _ = journal
            .append_in(&mut tx, &append(&format!("order-{n}"), Expected::New, &format!("e-{n}")))
            .await
            .unwrap();
        // What is refused leaves the transaction as it is.
        let refused = journal.append_in(&mut tx, &append(&format!("order-{n}"), Expected::New, "no")).await;
        assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
        if n % 3 == 0 {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
        }
    }
    let rows: i64 = ask(journal.pool(), format!("select count(*) from {s}.orders")).await;
    assert_eq!((rows, all(&journal).await.len()), (13, 13));
}

/// Appends an event for each record. Some of its first runs fail, or lose their session.
struct Outbox {
    journal: PgJournal,
    runs: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl TransactionalHandler<PgTx> for Outbox {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let id = event.id.to_string();
        let nth = {
            let mut runs = self.runs.lock().unwrap();
            let nth = runs.entry(id.clone()).or_default();
            *nth += 1;
            *nth
        };
        let number: u64 = id[2..].parse().unwrap();
        // An id of its own each time: nothing but the transaction keeps it from being there twice.
        let append = append(&format!("a-{}", number % 8), Expected::Any, &format!("{id}/{nth}"));
        let _ = self.journal.append_in(tx, &append).await?;
        if nth == 1 && number % 10 == 3 {
            return Err(Failed::retryable("the handler failed after its append"));
        }
        if nth == 1 && number % 25 == 4 {
            sqlx::query("select pg_terminate_backend(pg_backend_pid())").execute(&mut **tx).await?;
        }
        Ok(())
    }
}

/// A consumer whose handler appends in the transaction of its claim, while handlers fail, their sessions are killed, COMMITs and
/// answers to COMMIT are lost: each record yields one event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn j1_a_consumer_that_appends_in_its_transaction_yields_one_event_for_each_record() {
    const RECORDS: u64 = 200;
    let proxy = Arc::new(Proxy::new(&url()).await);
    let through = pool_to(&proxy.url(&url()), 6).await;
    let schema = fresh_schema();
    let ledger = PgLedger::with_pool(through.clone(), support::settings(&schema)).await.unwrap();
    let journal = PgJournal::with_pool(through, settings(&schema)).await.unwrap();
    let bus = Arc::new(MemoryBus::default());
    let topic = Topic::new("orders").unwrap();
    bus.create_topic(&topic, TopicSettings::new(2)).await.unwrap();
    // Each twice: at least once is what a bus promises.
    let record = |n: u64| Record {
        payload: Some(format!("{{\"event_id\": \"e-{}\"}}", n % RECORDS).into()),
        ..Record::default()
    };
    for answer in bus.publish(&topic, &(0..2 * RECORDS).map(record).collect::<Vec<_>>()).await.unwrap() {
        answer.unwrap();
    }
    let cutting = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move {
            for n in 0..20 {
                let before = proxy.lost();
                if n % 2 == 0 {
                    proxy.lose_commit();
                } else {
                    proxy.lose_answer();
                }
                while proxy.lost() == before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                tokio::time::sleep(Duration::from_millis(40)).await; // let something through
            }
        }
    });
    let dyn_bus: Arc<dyn Bus> = bus.clone();
    let builder =
        Consumer::builder(dyn_bus, ledger.clone()).scope("outbox").topic("orders").with(|settings| {
            settings.backoff_base = Duration::from_millis(5);
            settings.backoff_max = Duration::from_millis(20);
            settings.held_interval = Duration::from_millis(20);
            settings.concurrency = 3;
            settings.batch_max = 4;
        });
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let runs: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    let outbox = Outbox { journal: journal.clone(), runs: Arc::clone(&runs) };
    let running = tokio::spawn(consumer.transactional(outbox));
    until("all records are through", async || {
        assert!(!running.is_finished(), "it ended by itself");
        handle.progress().passed.values().sum::<u64>() == 2 * RECORDS
    })
    .await;
    cutting.abort();
    proxy.heal();
    handle.stop();
    running.await.unwrap().unwrap();
    let direct = PgJournal::with_pool(pool(2).await, settings(&schema)).await.unwrap();
    let events = all(&direct).await;
    let of = |stored: &Stored| stored.event.id.to_string().split_once('/').unwrap().0.to_owned();
    let inputs: HashSet<String> = events.iter().map(of).collect();
    let count: u32 = runs.lock().unwrap().values().sum();
    println!(
        "{} messages cut; {count} runs of the handler for {RECORDS} ids: {} events of {} ids",
        proxy.lost(),
        events.len(),
        inputs.len()
    );
    assert!(proxy.lost() >= 5, "{} cuts", proxy.lost());
    assert_eq!((events.len() as u64, inputs.len() as u64), (RECORDS, RECORDS));
}

/// The server commits, its answer never comes: the same append again is answered with the original places.
#[tokio::test(flavor = "multi_thread")]
async fn t31_cut_answers_to_appends_lose_and_double_nothing() {
    const CUTS: u64 = 60;
    let proxy = Proxy::new(&url()).await;
    let schema = fresh_schema();
    let direct = PgJournal::with_pool(pool(4).await, settings(&schema)).await.unwrap();
    let through =
        PgJournal::with_pool(pool_to(&proxy.url(&url()), 3).await, settings(&schema)).await.unwrap();
    let appender = Appender::new(Arc::new(through.clone()));
    let _ = through.append(&append("warm-up", Expected::New, "warm-up")).await.unwrap();
    let mut repeats = 0;
    for n in 0..CUTS {
        let one = append("a", Expected::Exact(n), &format!("e-{n}"));
        proxy.lose_answer();
        let placed = match n % 2 {
            0 => through.append(&one).await,
            _ => appender.append(one.clone()).await,
        }
        .expect("doubt is resolved, not handed on")
        .placed;
        repeats += usize::from(placed[0].placing == Placing::Repeat);
        proxy.heal();
        let again = direct.append(&one).await.unwrap();
        assert_eq!((again.placed[0].placing, again.placed[0].seq), (Placing::Repeat, n + 1));
        assert_eq!(again.placed[0].position, placed[0].position);
    }
    // And a COMMIT of the caller's whose answer is lost: the same append again tells whether it took effect.
    for n in CUTS..CUTS + 20 {
        let one = append("a", Expected::Exact(n), &format!("e-{n}"));
        let mut tx = through.pool().begin().await.unwrap();
        let drawn = through.append_in(&mut tx, &one).await.unwrap();
        if n % 2 == 0 {
            proxy.lose_answer();
        } else {
            proxy.lose_commit();
        }
        assert!(tx.commit().await.is_err());
        proxy.heal();
        let again = direct.append(&one).await.unwrap();
        assert_eq!(again.placed[0].seq, n + 1);
        assert_ne!(again.placed[0], drawn.placed[0], "it is a repeat, or was drawn anew");
        if n % 2 == 0 {
            assert_eq!(
                (again.placed[0].placing, &again.placed[0].position),
                (Placing::Repeat, &drawn.placed[0].position)
            );
        } else {
            assert_eq!(again.placed[0].placing, Placing::New);
        }
    }
    println!(
        "{} messages cut, {repeats} appends answered as their own repeats; 0 lost, 0 doubled",
        proxy.lost()
    );
    let seqs: Vec<u64> = all(&direct).await.iter().skip(1).map(|stored| stored.seq).collect();
    assert_eq!(seqs, (1..=CUTS + 20).collect::<Vec<_>>());
    assert!(proxy.lost() as u64 >= CUTS / 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_of_many_tasks_share_statements_and_keep_their_order() {
    let journal = PgJournal::with_pool(pool(4).await, settings(&fresh_schema())).await.unwrap();
    let appender = Appender::new(Arc::new(journal.clone()));
    let calls: Vec<_> = (0..800)
        .map(|n| appender.append(append(&format!("a-{}", n % 8), Expected::Exact(n / 8), &format!("e-{n}"))))
        .collect();
    for (n, call) in (0..).zip(calls) {
        assert_eq!(call.await.unwrap().last_seq(), n / 8 + 1);
    }
    let transactions: i64 =
        ask(journal.pool(), format!("select count(distinct xmin::text) from {}.journal", journal.schema()))
            .await;
    println!("800 appends in {transactions} transactions");
    assert!(transactions < 80, "{transactions}");
    assert_eq!(all(&journal).await.len(), 800);
}

/// What SQL appends is what the library would have appended: the same event from both is a repeat.
#[tokio::test]
async fn events_appended_by_sql_and_by_the_library_are_the_same() {
    let journal = PgJournal::with_pool(pool(2).await, settings(&fresh_schema())).await.unwrap();
    let s = journal.schema();
    let payloads = [
        r#"{"b": 1, "a": [1, 2.50, "x\ny\u0001\u00e9\"\\/"], "\u00e4": {}, "aa": [], "Z": null, "": true}"#,
        r#""text with \u20ac and \ud83d\ude00""#,
        "-0.10",
        "[[], [[{}]], 10000000000000000000000000000001]",
        "null",
    ];
    for (n, payload) in payloads.iter().enumerate() {
        for kind in [None, Some("order.paid")] {
            for id in [
                format!("e-{n}-{}", kind.is_some()),
                format!("{:016}", n * 2 + usize::from(kind.is_some())),
                uuid::Uuid::new_v4().to_string(),
            ] {
                let sql = format!(
                    "select o_seq from {s}.append_in($1, null, jsonb_build_array(jsonb_build_object('id', $2::text, 'payload', \
                     $3::text::jsonb, 'kind', $4::text, 'headers', '{{\"x\": \"y\"}}'::jsonb)))"
                );
                let seq: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
                    .bind("order-17")
                    .bind(&id)
                    .bind(payload)
                    .bind(kind)
                    .fetch_one(journal.pool())
                    .await
                    .unwrap();
                let mut event = Event::new(EventId::new(&id).unwrap());
                event.kind = kind.map(|kind| Kind::new(kind).unwrap());
                let stored = journal.find(None, &event.id).await.unwrap().expect("it is found by its id");
                assert_eq!((stored.seq, stored.event.headers.get("x")), (seq as u64, Some(&b"y"[..])));
                // Its bytes as SQL wrote them, and as they were given.
                for bytes in [stored.event.payload.clone(), (*payload).into()] {
                    let event = event.clone().payload(bytes);
                    let again = Append::new(Aggregate::new("order-17").unwrap(), Expected::New, [event]);
                    let again = journal.append(&again).await.unwrap();
                    assert_eq!(
                        (again.placed[0].placing, again.placed[0].seq),
                        (Placing::Repeat, seq as u64),
                        "{payload}"
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn sql_says_what_is_wrong_by_its_code() {
    let journal = PgJournal::with_pool(pool(2).await, settings(&fresh_schema())).await.unwrap();
    let call = async |aggregate: &str, expected: Option<i64>, events: &str| {
        let sql = format!("select o_position from {}.append_in($1, $2, $3::text::jsonb)", journal.schema());
        let answer: Result<Vec<i64>, sqlx::Error> = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(aggregate)
            .bind(expected)
            .bind(events)
            .fetch_all(journal.pool())
            .await;
        answer.map_err(|error| {
            let database = error.into_database_error().unwrap();
            (database.code().unwrap().into_owned(), database.message().to_owned())
        })
    };
    assert_eq!(call("a", Some(0), r#"[{"id": "x"}, {"id": "y"}]"#).await, Ok(vec![1, 2]));
    for (aggregate, expected, events, code, says) in [
        ("a", Some(1), r#"[{"id": "z"}]"#, "JC001", "expected seq 1, found seq 2"),
        ("b", None, r#"[{"id": "x"}]"#, "JM001", "x is in the journal with other content, as seq 1"),
        ("b", None, "[]", "22023", "1 to 1000"),
        ("b", None, r#"[{"id": ""}]"#, "22023", "empty"),
        ("b", Some(-1), r#"[{"id": "z"}]"#, "22023", "expected"),
        (" ", None, r#"[{"id": "z"}]"#, "22023", "aggregate"),
        ("b", None, r#"[{"id": "z"}, {"id": "z"}]"#, "22023", "twice"),
        ("b", None, r#"[{"id": "z", "trace": "00-1"}]"#, "22023", "traceparent"),
        ("b", None, r#"[{"id": "z", "headers": 7}]"#, "22023", "headers"),
    ] {
        let (found, message) = call(aggregate, expected, events).await.unwrap_err();
        assert_eq!(found, code, "{message}");
        assert!(message.contains(says), "{message}");
    }
    assert_eq!(journal.stat().await.unwrap().events, 2, "and nothing was appended");
}
