//! Handlers as users write them: plain functions, functions of a decoded payload, types with state, for every guarantee.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{
    AtMostOnceHandler, Counts, Failed, FromEvent, Handled, Json, LeasedHandler, TransactionalBatchHandler,
    TransactionalHandler,
};
use hapax::guard::Run;
use hapax::ledger::{Filter, Ledger, Operations, Settings, State};
use hapax::{Consumer, Event, Topic};

/// Three events, each delivered twice.
async fn bus(payloads: [&'static str; 3]) -> Arc<dyn Bus> {
    let bus = Arc::new(MemoryBus::default());
    let orders = Topic::new("orders").unwrap();
    bus.create_topic(&orders, TopicSettings::new(1)).await.unwrap();
    let record = |payload: &'static str| Record { payload: Some(payload.into()), ..Record::default() };
    let records: Vec<_> = payloads.into_iter().chain(payloads).map(record).collect();
    bus.publish(&orders, &records).await.unwrap();
    bus
}

const PAID: [&str; 3] = [
    r#"{"event_id": "a", "amount": 1}"#,
    r#"{"event_id": "b", "amount": 2}"#,
    r#"{"event_id": "c", "amount": 3}"#,
];

async fn consumer<L: Ledger>(payloads: [&'static str; 3], ledger: L) -> Consumer<L> {
    Consumer::builder(bus(payloads).await, ledger).scope("billing").topic("orders").build().unwrap()
}

/// Stops a consumer once all six deliveries are through.
fn stop_when_through<L: Ledger>(consumer: &Consumer<L>) {
    let handle = consumer.handle();
    tokio::spawn(async move {
        while handle.progress().passed.values().sum::<u64>() < 6 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        handle.stop();
    });
}

/// Every event took effect once, and its repeat did not.
fn assert_once(counts: &Counts) {
    assert_eq!((counts["done"], counts["duplicate"]), (3, 3), "{counts:?}");
}

#[derive(serde::Deserialize)]
struct Paid {
    amount: i64,
}

/// What a user of another format would write.
struct Text(String);

impl FromEvent for Text {
    fn from_event(event: &Event) -> Result<Self, Failed> {
        Ok(Text(String::from_utf8(event.payload.to_vec())?))
    }
}

fn database() -> (tempfile::TempDir, SqliteLedger) {
    let dir = tempfile::tempdir().unwrap();
    let ledger = SqliteLedger::open(dir.path().join("app.db"), Settings::default()).unwrap();
    let file = rusqlite::Connection::open(dir.path().join("app.db")).unwrap();
    file.execute("CREATE TABLE paid (id TEXT, amount INTEGER)", []).unwrap();
    (dir, ledger)
}

fn effects(dir: &tempfile::TempDir) -> Vec<(String, i64)> {
    let file = rusqlite::Connection::open(dir.path().join("app.db")).unwrap();
    let mut statement = file.prepare("SELECT id, amount FROM paid ORDER BY id").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.collect::<Result<_, _>>().unwrap()
}

fn all(amounts: [i64; 3]) -> Vec<(String, i64)> {
    ["a", "b", "c"].map(String::from).into_iter().zip(amounts).collect()
}

const INSERT: &str = "INSERT INTO paid VALUES (?1, ?2)";

async fn insert(tx: &mut SqliteTransaction, event: &Event) -> Handled {
    tokio::task::yield_now().await; // its future is one that waits
    tx.execute(INSERT, (event.id.as_str(), 0))?;
    Ok(())
}

async fn insert_amount(tx: &mut SqliteTransaction, event: &Event, Json(paid): Json<Paid>) -> Handled {
    tx.execute(INSERT, (event.id.as_str(), paid.amount))?;
    Ok(())
}

async fn insert_all(tx: &mut SqliteTransaction, events: &[Event]) -> Handled {
    for event in events {
        tx.execute(INSERT, (event.id.as_str(), 7))?;
    }
    Ok(())
}

struct Doubled(i64);

impl TransactionalHandler<SqliteTransaction> for Doubled {
    async fn handle(&self, tx: &mut SqliteTransaction, event: &Event) -> Handled {
        let Json(paid) = Json::<Paid>::from_event(event)?;
        tx.execute(INSERT, (event.id.as_str(), self.0 * paid.amount))?;
        Ok(())
    }
}

impl TransactionalBatchHandler<SqliteTransaction> for Doubled {
    async fn handle(&self, tx: &mut SqliteTransaction, events: &[Event]) -> Handled {
        for event in events {
            TransactionalHandler::handle(self, tx, event).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn transactional_handlers_come_as_functions_and_as_types() {
    macro_rules! check {
        ($run:ident, $handler:expr, $amounts:expr) => {{
            let (dir, ledger) = database();
            let consumer = consumer(PAID, ledger).await;
            stop_when_through(&consumer);
            assert_once(&consumer.$run($handler).await.unwrap());
            assert_eq!(effects(&dir), all($amounts));
        }};
    }
    check!(transactional, insert, [0, 0, 0]);
    check!(transactional, insert_amount, [1, 2, 3]);
    check!(transactional, Doubled(2), [2, 4, 6]);
    check!(
        transactional,
        async |tx: &mut SqliteTransaction, event: &Event| {
            tx.execute(INSERT, (event.id.as_str(), 9))?;
            Ok(())
        },
        [9, 9, 9]
    );
    check!(transactional_batch, insert_all, [7, 7, 7]);
    check!(transactional_batch, Doubled(3), [3, 6, 9]);
}

#[derive(Clone, Default)]
struct Mailer(Arc<Mutex<Vec<String>>>);

impl Mailer {
    fn sent(&self) -> Vec<String> {
        let mut sent = self.0.lock().unwrap().clone();
        sent.sort_unstable();
        sent
    }
}

impl LeasedHandler for Mailer {
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        assert_eq!(run.key().id, event.id);
        self.0.lock().unwrap().push(event.id.to_string());
        Ok(())
    }
}

impl AtMostOnceHandler for Mailer {
    async fn handle(&self, event: &Event) -> Handled {
        self.0.lock().unwrap().push(event.id.to_string());
        Ok(())
    }
}

async fn fine(_: &Event, run: &Run) -> Handled {
    assert_eq!(run.attempt(), 1);
    Ok(())
}

async fn fine_amount(_: &Event, _: &Run, paid: Json<Paid>) -> Handled {
    assert!((1..=3).contains(&paid.amount));
    Ok(())
}

#[tokio::test]
async fn leased_handlers_come_as_functions_and_as_types() {
    macro_rules! check {
        ($handler:expr) => {{
            let consumer = consumer(PAID, MemoryLedger::default()).await;
            stop_when_through(&consumer);
            assert_once(&consumer.leased($handler).await.unwrap());
        }};
    }
    check!(fine);
    check!(fine_amount);
    let mailer = Mailer::default();
    check!(mailer.clone());
    assert_eq!(mailer.sent(), ["a", "b", "c"]);
}

async fn note(_: &Event) -> Handled {
    Ok(())
}

async fn note_text(event: &Event, Text(text): Text) -> Handled {
    assert!(text.contains(&*event.id.as_str()));
    Ok(())
}

#[tokio::test]
async fn at_most_once_handlers_come_as_functions_and_as_types() {
    macro_rules! check {
        ($handler:expr) => {{
            let consumer = consumer(PAID, MemoryLedger::default()).await;
            stop_when_through(&consumer);
            let counts = consumer.at_most_once($handler).await.unwrap();
            assert_eq!(counts["duplicate"], 3, "{counts:?}");
        }};
    }
    check!(note);
    check!(note_text);
    let mailer = Mailer::default();
    check!(mailer.clone());
    assert_eq!(mailer.sent(), ["a", "b", "c"]);
}

#[tokio::test]
async fn a_payload_that_does_not_decode_is_a_dead_letter_after_one_attempt() {
    let odd = [PAID[0], r#"{"event_id": "b", "amount": "two"}"#, PAID[2]];
    let ledger = Arc::new(MemoryLedger::default());
    let consumer = consumer(odd, Arc::clone(&ledger)).await;
    stop_when_through(&consumer);
    let counts = consumer.leased(fine_amount).await.unwrap();
    assert_eq!(counts["done"], 2, "{counts:?}");
    let filter = Filter { states: vec![State::Dead], ..Filter::default() };
    let dead = ledger.list(&filter, None, 10).await.unwrap();
    let reason = dead.entries[0].reason.clone().unwrap();
    assert_eq!((dead.entries.len(), dead.entries[0].attempts), (1, 1));
    assert!(reason.contains("does not decode") && reason.contains("expected i64"), "{reason}");
}
