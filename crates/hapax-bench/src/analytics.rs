//! The read model in ClickHouse: rows per second against a bare client that inserts the same blocks, the delay from
//! a commit to an answer, FINAL against approximate answers, and how fast it is compared with its records.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax::analytics::{
    Analytics, Block, Change, Feed, FeedSettings, ReadModel, ReadToken, VerifySettings, Version, verify,
};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::bus::{Bus, Partition};
use hapax::journal::JournalSettings;
use hapax::records::{
    Create, ModuleSlug, Modules as _, Name, OfTenant, Payload, Record, Records as _, Scan, Snapshot,
};
use hapax::relay::Relay;
use hapax::{Origin, Time, Topic};
use uuid::Uuid;

use crate::harness::{
    Contestant, Fallible, Goal, Line, Missing, Options, Report, interleave, quantile, rate,
};
use crate::kafka::{Filled, bus};

/// Rows of a block, as a feed makes them.
const BLOCK: usize = 5_000;
const PARTITIONS: i32 = 4;
/// When the made records were written, in microseconds.
const AT: i64 = 1_700_000_000_000_000;

/// A database of a bench's own on ClickHouse.
struct Database {
    http: reqwest::Client,
    /// The server's address, as HTTP wants it.
    server: String,
    name: String,
    model: Arc<ClickHouseReadModel>,
}

impl Database {
    async fn new() -> Fallible<Self> {
        let url = ["HAPAX_BENCH_CLICKHOUSE_URL", "HAPAX_TEST_CLICKHOUSE_URL"]
            .iter()
            .find_map(|name| std::env::var(name).ok().filter(|url| !url.is_empty()))
            .ok_or_else(|| {
                Missing("no ClickHouse: set HAPAX_BENCH_CLICKHOUSE_URL to clickhouse://HOST:PORT".into())
            })?;
        let host = url.strip_prefix("clickhouse://").ok_or("the URL must begin with clickhouse://")?;
        let name = format!("bench_{}", Uuid::new_v4().simple());
        let model = Arc::new(ClickHouseReadModel::open_for(&format!("{url}/{name}"), 1)?);
        model.partitions().await.map_err(|error| Missing(error.chain()))?; // makes the tables
        let (http, server) = (reqwest::Client::new(), format!("http://{host}/"));
        Ok(Database { http, server, name, model })
    }

    /// The answer to a statement. `DB` in it is this database.
    async fn sql(&self, sql: &str) -> Fallible<String> {
        self.send(&sql.replace("DB.", &format!("{}.", self.name)), Vec::new()).await
    }

    async fn send(&self, sql: &str, rows: Vec<u8>) -> Fallible<String> {
        let request = if rows.is_empty() {
            self.http.post(&self.server).body(sql.to_owned())
        } else {
            let asked = [("query", sql), ("async_insert", "0")];
            self.http.post(reqwest::Url::parse_with_params(&self.server, asked)?).body(rows)
        };
        let answer = request.send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        if status.is_success() { Ok(text) } else { Err(format!("{status}: {text}").into()) }
    }

    async fn remove(self) -> Fallible<()> {
        self.sql(&format!("DROP DATABASE {} SYNC", self.name)).await.map(drop)
    }
}

fn orders() -> hapax::Result<ModuleSlug> {
    ModuleSlug::new("orders")
}

fn id(n: u64) -> Uuid {
    Uuid::from_u128(u128::from(n))
}

fn json(n: u64) -> String {
    format!(r#"{{"amount":{n},"status":"s{}"}}"#, n % 10)
}

/// Record `n`, which is made when it is read.
fn made(n: u64) -> hapax::Result<OfTenant> {
    let at = Time::from_micros(AT);
    let record = Record::new(orders()?, id(n), 1, Payload::new(json(n))?, (at, at));
    Ok(OfTenant { tenant: Uuid::nil(), record })
}

/// A block of records that nobody had before.
fn block(from: u64, rows: usize) -> hapax::Result<Block> {
    let topic = Topic::new("bench")?;
    let partition = Partition { topic: topic.clone(), number: 0 };
    let end = from + rows as u64;
    let offsets = i64::try_from(from).unwrap_or_default()..i64::try_from(end).unwrap_or_default();
    let mut block = Block::new(partition, 1, offsets);
    let change = |n: u64| Change::of_record(made(n + 1)?, 1, Origin::new(topic.clone(), 0, n as i64));
    block.changes = (from..end).map(change).collect::<hapax::Result<_>>()?;
    Ok(block)
}

/// The rows of a block in ClickHouse's `RowBinary`, as somebody would write it who knows the fields of the payload.
fn rows(block: &Block) -> Vec<u8> {
    let mut out = Vec::with_capacity(block.changes.len() * 250);
    let text = |out: &mut Vec<u8>, text: &str| {
        debug_assert!(text.len() < 128);
        out.push(text.len() as u8);
        out.extend_from_slice(text.as_bytes());
    };
    for change in &block.changes {
        let (high, low) = change.tenant.as_u64_pair();
        out.extend(high.to_le_bytes());
        out.extend(low.to_le_bytes());
        text(&mut out, change.module.as_str());
        text(&mut out, &change.id.to_string());
        let payload = change.payload.as_ref().map(Payload::as_str).unwrap_or_default();
        text(&mut out, payload);
        let amount = change.id.as_u128();
        out.push(2);
        for (field, value) in [("/amount", amount.to_string()), ("/status", format!(r#""s{}""#, amount % 10))]
        {
            text(&mut out, field);
            text(&mut out, &value);
        }
        out.push(1);
        text(&mut out, "/amount");
        out.extend((amount as i128 * 1_000_000_000).to_le_bytes());
        out.extend(change.created_at.as_micros().to_le_bytes());
        out.extend(change.updated_at.as_micros().to_le_bytes());
        out.extend(change.version.as_u64().to_le_bytes());
        out.push(0);
        out.extend((payload.len() as u64).to_le_bytes());
        text(&mut out, change.origin.topic.as_str());
        out.extend(change.origin.partition.to_le_bytes());
        out.extend(change.origin.offset.to_le_bytes());
        out.extend(change.lsn.to_le_bytes());
    }
    out
}

/// Rows per second into ClickHouse.
async fn inserts(options: &Options) -> Fallible<Report> {
    let (own, blocks) = (Database::new().await?, options.events(40));
    let database = &own;
    let table = "CREATE TABLE DB.bare AS DB.data_records ENGINE = ReplacingMergeTree(_version, _deleted)
         ORDER BY (tenant_id, module, record_id) SETTINGS fsync_after_insert = 1, fsync_part_directory = 1,
         min_rows_to_fsync_after_merge = 1";
    database.sql(table).await?;
    // Each round has ids of its own: a repeated block would be dropped by its token.
    let next = &std::sync::atomic::AtomicU64::new(0);
    let fresh = move || -> hapax::Result<Vec<Block>> {
        let from = next.fetch_add((blocks * BLOCK) as u64, std::sync::atomic::Ordering::Relaxed);
        (0..blocks as u64).map(|n| block(from + n * BLOCK as u64, BLOCK)).collect()
    };
    let columns = "tenant_id, module, record_id, payload, fields, numbers, created_at, updated_at, _version, _deleted, _bytes, \
                   _topic, _partition, _offset, _lsn";
    let insert = &format!("INSERT INTO {}.bare ({columns}) FORMAT RowBinary", database.name);
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new("hapax: blocks applied to the read model", || async move {
                let all = fresh()?;
                rate(blocks * BLOCK, async {
                    for block in all {
                        database.model.apply(&[block]).await?;
                    }
                    Ok(())
                })
                .await
            }),
            Contestant::new("a bare client that inserts the same blocks", || async move {
                let all = fresh()?;
                rate(blocks * BLOCK, async {
                    for block in &all {
                        database.send(insert, rows(block)).await?;
                    }
                    Ok(())
                })
                .await
            }),
        ],
    )
    .await?;
    let ratio = lines[0].median() / lines[1].median();
    own.remove().await?;
    Ok(Report {
        title: format!("analytics: rows into ClickHouse, blocks of {BLOCK}"),
        unit: "rows/s",
        goals: vec![Goal::at_least("hapax / bare client", ratio, 0.8)],
        lines,
        notes: vec![
            "the bare client knows the fields of the payloads and keeps no place; both wait for the disk"
                .into(),
        ],
    })
}

/// From the commit of a record to an answer that has it: SQLite, relay, Kafka, feed, ClickHouse.
async fn lag(options: &Options) -> Fallible<Report> {
    let (dir, database, bus) = (tempfile::tempdir()?, Database::new().await?, bus().await?);
    let topic = Filled::empty(&bus, "analytics", PARTITIONS).await?;
    let journal = SqliteJournal::open(dir.path().join("journal.db"), JournalSettings::default())?;
    let records = SqliteRecords::open(&journal)?;
    records.create_module(&orders()?).await?;
    let on: Arc<dyn Bus> = bus.clone();
    let relay = Relay::builder(Arc::new(journal), Arc::clone(&on)).name("bench").topic(topic.topic.as_str());
    let relay = relay.with(|settings| settings.pulse = Some(Duration::from_secs(1))).build()?;
    let feed = Feed::new(on, database.model.clone(), FeedSettings::new(topic.topic.clone()))?;
    let stops = (relay.handle(), feed.handle());
    let running = (tokio::spawn(relay.run()), tokio::spawn(feed.run()));
    let analytics = Analytics::new(database.model.clone(), None)?;
    let mut samples = Vec::new();
    for n in 0..=(options.events(200) as u64) {
        let record = records.create(&Create::new(orders()?, Payload::new(json(n))?)).await?;
        let began = Instant::now();
        let token: ReadToken = format!("orders/{}@{}", record.id, record.seq).parse()?;
        let asked = analytics.records("orders")?.after(token).wait(Duration::from_secs(120));
        asked.tally().await?;
        if n > 0 {
            samples.push(began.elapsed().as_secs_f64() * 1000.0); // the first one joins the group
        }
    }
    stops.0.stop();
    stops.1.stop();
    running.0.await??;
    running.1.await??;
    topic.delete().await?;
    database.remove().await?;
    let (p50, p99) = (quantile(&samples, 0.5), quantile(&samples, 0.99));
    Ok(Report {
        title: "analytics: from a commit to an answer that has it".into(),
        unit: "ms",
        lines: vec![Line::new("p50", vec![p50]), Line::new("p99", vec![p99]), Line::new("each", samples)],
        goals: vec![Goal::at_most("p99 / 1 s", p99 / 1000.0, 1.0)],
        notes: vec![
            "one write at a time; records in SQLite, a topic on Kafka, blocks linger for 100 ms".into(),
        ],
    })
}

/// Fills a table by the server itself: records with seq 1, and a share of them once more with seq 2.
async fn fill(database: &Database, records: u64, updated: u64) -> Fallible<()> {
    const STEP: u64 = 500_000;
    for (seq, count) in [(1, records), (2, updated)] {
        let version = Version::new(1, seq)?.as_u64();
        let mut from = 0;
        while from < count {
            let rows = STEP.min(count - from);
            let sql = format!(
                "INSERT INTO DB.data_records SELECT toUUID('{}'), 'orders',
                   concat('00000000-0000-0000-0000-', leftPad(lower(hex(number + 1)), 12, '0')) AS id,
                   concat('{{\"amount\":', toString(number + 1), ',\"status\":\"s', toString((number + 1) % 10), '\"}}') AS json,
                   map('/amount', toString(number + 1), '/status', concat('\"s', toString((number + 1) % 10), '\"')),
                   map('/amount', toDecimal128(number + 1, 9)),
                   fromUnixTimestamp64Micro(toInt64({AT}), 'UTC'), fromUnixTimestamp64Micro(toInt64({AT}), 'UTC'),
                   {version}, 0, length(json), 'bench', 0, number, 0
                 FROM numbers({from}, {rows})",
                Uuid::nil()
            );
            database.sql(&sql).await?;
            from += rows;
        }
    }
    Ok(())
}

/// FINAL against approximate answers, while a fifth of the records has a replaced version.
async fn finals(options: &Options) -> Fallible<Report> {
    let (own, records) = (Database::new().await?, options.held(10_000_000));
    let database = &own;
    database.sql("SYSTEM STOP MERGES DB.data_records").await?;
    fill(database, records, records / 5).await?;
    let analytics = &Analytics::new(database.model.clone(), None)?;
    let ask = async |approximate: bool, sum: bool| -> Fallible<f64> {
        let mut query = analytics.records("orders")?;
        if approximate {
            query = query.approximate();
        }
        if sum {
            query = query.sum("/amount")?.group_by("/status")?;
        }
        let began = Instant::now();
        let answer = query.tally().await?;
        let took = began.elapsed().as_secs_f64() * 1000.0;
        let count: u64 = answer.value.groups.iter().map(|group| group.count).sum();
        let expected = if approximate { records + records / 5 } else { records };
        if count == expected {
            Ok(took)
        } else {
            Err(format!("{count} records instead of {expected}").into())
        }
    };
    let ask = &ask;
    let contestants =
        [("count", false), ("sum of a field, by another", true)].into_iter().flat_map(|(what, sum)| {
            [("FINAL", false), ("approximate", true)].map(|(how, approximate)| {
                Contestant::new(format!("{what}, {how}"), move || async move { ask(approximate, sum).await })
            })
        });
    let lines = interleave(options.rounds, contestants.collect()).await?;
    own.remove().await?;
    Ok(Report {
        title: format!(
            "analytics: FINAL against approximate, {records} records, a fifth of them updated, not merged"
        ),
        unit: "ms",
        goals: Vec::new(),
        lines,
        notes: vec!["an approximate answer counts the replaced versions too".into()],
    })
}

/// Records that are made when they are read.
struct Made(u64);

#[async_trait]
impl Snapshot for Made {
    async fn snapshot(&self, scan: &Scan) -> hapax::Result<Vec<OfTenant>> {
        let after = scan.after.as_ref().map_or(0, |name| name.id.as_u128() as u64);
        (after + 1..=self.0).take(scan.limit).map(made).collect()
    }

    async fn gone(&self, _: Option<&Name>, _: usize) -> hapax::Result<Vec<(Name, u64)>> {
        Ok(Vec::new())
    }

    async fn now(&self) -> hapax::Result<Time> {
        Ok(Time::from_micros(AT))
    }
}

/// Rows per second that are compared with their records.
async fn verifies(options: &Options) -> Fallible<Report> {
    let (own, records) = (Database::new().await?, options.held(1_000_000));
    let database = &own;
    fill(database, records, 0).await?;
    database.sql("OPTIMIZE TABLE DB.data_records FINAL").await?;
    let compare = || async move {
        rate(records as usize, async {
            let verified = verify(&*database.model, &Made(records), &VerifySettings::default()).await?;
            match verified.differences.len() {
                0 if verified.source == verified.model => Ok(()),
                count => Err(format!("{count} records differ").into()),
            }
        })
        .await
    };
    let lines = interleave(options.rounds, vec![Contestant::new("hapax verify analytics", compare)]).await?;
    own.remove().await?;
    Ok(Report {
        title: format!("analytics: verify, {records} rows"),
        unit: "rows/s",
        goals: vec![Goal::at_least("rows/s / 100,000", lines[0].median() / 100_000.0, 1.0)],
        lines,
        notes: vec!["the records are made when they are read, so this is the read model's side and the hashes of both".into()],
    })
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    Ok(vec![inserts(options).await?, lag(options).await?, finals(options).await?, verifies(options).await?])
}
