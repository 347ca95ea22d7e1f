//! The outbox: a business row and its event in one transaction, relayed to a bus, applied once by a
//! consumer.
//!
//! `cargo run --features sqlite --example outbox` needs no server: it uses an SQLite file and the
//! embedded bus. With `--all-features -- --postgres URL --kafka HOST:PORT` it uses those servers.
//! Its last line says how many events were written, published and applied.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteJournal, SqliteLedger, SqliteTransaction};
use hapax::bus::{Bus, EmbeddedBus, TopicSettings};
use hapax::consumer::{Consumer, Handled, TransactionalHandler};
use hapax::journal::{Append, Checkpoint, Expected, JournalSettings};
use hapax::ledger::Settings;
use hapax::ledger::TransactionalLedger;
use hapax::relay::Relay;
use hapax::{Event, EventId, Journal, Kind, RelayName, Topic};
use rusqlite::{Connection, TransactionBehavior};

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The number of orders. Every tenth fails after its event was appended: neither row nor event may
/// remain.
const ORDERS: i64 = 50;

fn fails(number: i64) -> bool {
    number % 10 == 0
}

/// The event of an order. Its id stays the same however often the request is made.
fn placed(number: i64) -> hapax::Result<Append> {
    let event = Event::new(EventId::new(format!("order-{number}-placed"))?)
        .kind(Kind::new("order.placed")?)
        .payload(format!(r#"{{"order":{number}}}"#));
    Append::to(format!("order-{number}"), Expected::New, [event])
}

const USAGE: &str = "\
Usage: outbox [--postgres URL --kafka HOST:PORT]

Writes orders and their events, relays the events, consumes them, and says how many were written, published and applied.
Without options it needs no server: an SQLite file and the embedded bus, in a directory that goes away again.

  --postgres URL     orders, journal and ledger in this database, in a schema of its own
  --kafka HOST:PORT  the bus, with a topic of its own
  --help             this text";

/// The command line.
enum Mode {
    Help,
    Embedded,
    Servers { postgres: String, kafka: String },
}

fn mode(mut arguments: impl Iterator<Item = String>) -> Result<Mode, String> {
    let (mut postgres, mut kafka) = (None, None);
    while let Some(argument) = arguments.next() {
        let value = match argument.as_str() {
            "--help" | "-h" => return Ok(Mode::Help),
            "--postgres" => &mut postgres,
            "--kafka" => &mut kafka,
            _ => {
                return Err(format!(
                    "{argument} is not known; there are --postgres URL, --kafka HOST:PORT and --help"
                ));
            }
        };
        *value = Some(arguments.next().ok_or_else(|| format!("{argument} needs a value"))?);
    }
    match (postgres, kafka) {
        (None, None) => Ok(Mode::Embedded),
        (Some(postgres), Some(kafka)) => Ok(Mode::Servers { postgres, kafka }),
        _ => Err("give both --postgres and --kafka, or neither".to_owned()),
    }
}

#[tokio::main]
async fn main() -> Fallible<ExitCode> {
    match mode(std::env::args().skip(1)) {
        Ok(Mode::Help) => println!("{USAGE}"),
        Ok(Mode::Embedded) => embedded(tempfile::tempdir()?.path()).await?,
        Ok(Mode::Servers { postgres, kafka }) => servers::run(&postgres, &kafka).await?,
        Err(problem) => {
            eprintln!("outbox: {problem}");
            return Ok(ExitCode::from(2));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs on SQLite and the embedded bus.
async fn embedded(dir: &Path) -> Fallible<()> {
    let shop = dir.join("shop.db");
    let journal = SqliteJournal::open(&shop, JournalSettings::default())?;
    let mut connection = Connection::open(&shop)?;
    connection.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)", [])?;
    let mut written = 0;
    for number in requests() {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let rows = tx.execute("INSERT OR IGNORE INTO orders VALUES (?1)", [number])?;
        let _ = journal.append_in(&tx, &placed(number)?)?;
        if fails(number) {
            tx.rollback()?;
        } else {
            tx.commit()?;
            written += rows as u64;
        }
    }

    let file = dir.join("applied.db");
    let ledger = SqliteLedger::open(&file, Settings::default())?;
    let applied = Connection::open(&file)?;
    applied.execute("CREATE TABLE applied (id TEXT)", [])?;
    let bus = Arc::new(EmbeddedBus::open(dir.join("bus.db"))?);
    let published = deliver(Arc::new(journal), bus, ledger, Applied, "orders", written).await?;
    let applied: i64 = applied.query_row("SELECT count(*) FROM applied", [], |row| row.get(0))?;
    tell(written, published, applied)
}

/// Stores which events were applied, in the transaction of their claim.
struct Applied;

impl TransactionalHandler<SqliteTransaction> for Applied {
    async fn handle(&self, tx: &mut SqliteTransaction, event: &Event) -> Handled {
        tx.execute("INSERT INTO applied VALUES (?1)", [event.id.as_str()])?;
        Ok(())
    }
}

/// The orders, and the first five once more, as repeated requests.
fn requests() -> impl Iterator<Item = i64> {
    (1..=ORDERS).chain(1..=5)
}

/// Relays everything twice (the second time from the start), consumes until all of it is processed,
/// and returns how many events were published.
async fn deliver<L: TransactionalLedger>(
    journal: Arc<dyn Journal>,
    bus: Arc<dyn Bus>,
    ledger: L,
    apply: impl TransactionalHandler<L::Transaction>,
    topic: &str,
    written: u64,
) -> Fallible<u64> {
    let topic = Topic::new(topic)?;
    bus.create_topic(&topic, TopicSettings::new(2)).await?;
    let consumer = Consumer::builder(bus.clone(), ledger).scope("shipping").topic(topic.as_str()).build()?;
    let handle = consumer.handle();
    let consuming = tokio::spawn(consumer.transactional(apply));

    let name = RelayName::new("outbox")?;
    let mut published = 0;
    for round in 0..2 {
        if round == 1 {
            // As an operator might who is not sure that everything has arrived.
            journal.rewind(&name, &Checkpoint::start(journal.id()), None).await?;
        }
        let relay =
            Relay::builder(journal.clone(), bus.clone()).name(name.as_str()).topic(topic.as_str()).build()?;
        let handle = relay.handle();
        let relaying = tokio::spawn(relay.run());
        until(|| handle.progress().published >= written).await;
        handle.stop();
        published += relaying.await??.published;
    }
    until(|| handle.progress().passed.values().sum::<u64>() >= published).await;
    handle.stop();
    consuming.await??;
    Ok(published / 2)
}

async fn until(mut is: impl FnMut() -> bool) {
    while !is() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn tell(written: u64, published: u64, applied: i64) -> Fallible<()> {
    println!("{written} written, {published} published (twice), {applied} applied");
    if written == published && i64::try_from(written)? == applied {
        return Ok(());
    }
    Err("these should be equal".into())
}

/// Runs on PostgreSQL and Kafka.
#[cfg(all(feature = "postgres", feature = "kafka"))]
mod servers {
    use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgLedger, PgSettings, PgTx};
    use hapax::bus::kafka::{KafkaBus, KafkaSettings};
    use sqlx::AssertSqlSafe;

    use super::{
        Arc, Event, Fallible, Handled, TransactionalHandler, deliver, fails, placed, requests, tell,
    };

    /// Stores which events were applied, in the transaction of their claim.
    struct Applied {
        insert: String,
    }

    impl TransactionalHandler<PgTx> for Applied {
        async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
            let row = sqlx::query(AssertSqlSafe(self.insert.clone())).bind(event.id.as_str());
            row.execute(&mut **tx).await?;
            Ok(())
        }
    }

    pub async fn run(postgres: &str, kafka: &str) -> Fallible<()> {
        // A separate schema and topic, so that it can run again and beside others.
        let name = format!("outbox_{}", std::process::id());
        let mut settings = PgJournalSettings::default();
        settings.schema.clone_from(&name);
        let journal = PgJournal::connect(postgres, settings).await?;
        let pool = journal.pool().clone();
        let made = format!(
            "create table {name}.orders (number bigint primary key); create table {name}.applied (id text)"
        );
        sqlx::raw_sql(AssertSqlSafe(made)).execute(&pool).await?;
        let mut written = 0;
        let insert = format!("insert into {name}.orders values ($1) on conflict do nothing");
        for number in requests() {
            let mut tx = pool.begin().await?;
            let row = sqlx::query(AssertSqlSafe(insert.clone())).bind(number);
            let rows = row.execute(&mut *tx).await?.rows_affected();
            let _ = journal.append_in(&mut tx, &placed(number)?).await?;
            if fails(number) {
                tx.rollback().await?;
            } else {
                tx.commit().await?;
                journal.wake();
                written += rows;
            }
        }

        let mut settings = PgSettings::default();
        settings.schema.clone_from(&name);
        let ledger = PgLedger::with_pool(pool.clone(), settings).await?;
        let apply = Applied { insert: format!("insert into {name}.applied values ($1)") };
        let bus = Arc::new(KafkaBus::connect(KafkaSettings::new(kafka)).await?);
        let published = deliver(Arc::new(journal), bus, ledger, apply, &name, written).await?;
        let count = sqlx::query_scalar(AssertSqlSafe(format!("select count(*) from {name}.applied")));
        let applied: i64 = count.fetch_one(&pool).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("drop schema {name} cascade"))).execute(&pool).await?;
        tell(written, published, applied)
    }
}

#[cfg(not(all(feature = "postgres", feature = "kafka")))]
mod servers {
    pub async fn run(_postgres: &str, _kafka: &str) -> super::Fallible<()> {
        Err("built without servers: add --features postgres,kafka".into())
    }
}
