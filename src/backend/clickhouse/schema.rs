//! The tables of a read model in ClickHouse: how they are made and recognised, and the probe of the tenant filter.

use uuid::Uuid;

use super::http::{Server, Statement};
use super::wire::{Answer, Rows};
use crate::error::{Error, Result};

/// The one table of rows. Every statement and every filter names it by this constant.
pub(super) const RECORDS: &str = "data_records";
/// How far each partition was applied.
pub(super) const SYNC: &str = "data_records_sync";
/// What could not be read.
pub(super) const REJECTED: &str = "data_records_rejected";
/// For BI tools: `records(tenant = …)`.
const VIEW: &str = "records";

/// The version of the tables that this build makes and reads.
const VERSION: u32 = 1;
const COMMENT: &str = "hapax read model, version ";

/// The columns of rows, with their types, in the order in which rows are inserted.
pub(super) const COLUMNS: &[(&str, &str)] = &[
    ("tenant_id", "UUID"),
    ("module", "LowCardinality(String)"),
    ("record_id", "String"),
    ("payload", "String"),
    ("fields", "Map(String, String)"),
    ("numbers", "Map(String, Decimal(38, 9))"),
    ("created_at", "DateTime64(6, 'UTC')"),
    ("updated_at", "DateTime64(6, 'UTC')"),
    ("_version", "UInt64"),
    ("_deleted", "UInt8"),
    ("_bytes", "UInt64"),
    ("_topic", "LowCardinality(String)"),
    ("_partition", "Int32"),
    ("_offset", "Int64"),
];

/// A crash of the machine must not leave the state of a partition without its rows.
const DURABLE: &str = "fsync_after_insert = 1, fsync_part_directory = 1, min_rows_to_fsync_after_merge = 1";

/// What makes the tables, for a database.
///
/// Rows: the highest `_version` counts; a row with `_deleted` stays, so that an older one does not come back.
/// There is no partition key: versions of one record must meet. A record's id is text because text is ordered as
/// its bytes are, which ClickHouse's UUIDs are not.
///
/// The other two are merged by the greatest (or least) value of each column, so that repeating an insert, or
/// inserting late, changes nothing. `model` is the UUID of the table of rows: one that is made anew begins anew.
pub(super) fn statements(database: &str) -> Vec<String> {
    let columns: Vec<_> = COLUMNS.iter().map(|(name, kind)| format!("    {name} {kind}")).collect();
    let columns = columns.join(",\n");
    vec![
        format!("CREATE DATABASE IF NOT EXISTS {database}"),
        format!(
            "CREATE TABLE IF NOT EXISTS {database}.{SYNC} (
    model UUID,
    topic String,
    number Int32 COMMENT 'the partition; -1: the topic',
    place SimpleAggregateFunction(max, Tuple(UInt64, UInt64, Int64)) COMMENT 'who wrote it, how often, the next offset',
    pulse SimpleAggregateFunction(max, Int64) COMMENT 'the last pulse, in microseconds; of a topic: complete up to',
    partitions SimpleAggregateFunction(max, Int32) COMMENT 'how many a topic has'
) ENGINE = AggregatingMergeTree ORDER BY (model, topic, number) SETTINGS {DURABLE}
COMMENT '{COMMENT}{VERSION}'"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {database}.{REJECTED} (
    model UUID,
    topic String,
    number Int32,
    offset Int64,
    tenant String COMMENT 'empty: unknown',
    rejected SimpleAggregateFunction(max, Tuple(UInt64, UInt64)),
    dropped SimpleAggregateFunction(max, Tuple(UInt64, UInt64)) COMMENT 'given up, if it is not less than rejected',
    holds_back SimpleAggregateFunction(min, Int64) COMMENT 'in microseconds',
    reason SimpleAggregateFunction(max, String),
    payload SimpleAggregateFunction(max, String)
) ENGINE = AggregatingMergeTree ORDER BY (model, topic, number, offset, tenant) SETTINGS {DURABLE}
COMMENT '{COMMENT}{VERSION}'"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {database}.{RECORDS} (
{columns}
) ENGINE = ReplacingMergeTree(_version, _deleted) ORDER BY (tenant_id, module, record_id)
SETTINGS non_replicated_deduplication_window = 1000, {DURABLE}
COMMENT '{COMMENT}{VERSION}'"
        ),
        format!(
            "CREATE VIEW IF NOT EXISTS {database}.{VIEW} AS
SELECT module, record_id, payload, fields, numbers, created_at, updated_at, bitAnd(_version, {SEQ}) AS seq
FROM {database}.{RECORDS} FINAL WHERE tenant_id = {{tenant:UUID}}
COMMENT '{COMMENT}{VERSION}'",
            SEQ = crate::analytics::SEQ_MAX
        ),
    ]
}

/// A table that is there.
struct Found {
    name: String,
    uuid: Uuid,
    engine: String,
    sorting_key: String,
    partition_key: String,
    comment: String,
}

async fn found(server: &Server) -> Result<Vec<Found>> {
    let sql = "SELECT name, uuid, engine, sorting_key, partition_key, comment FROM system.tables
               WHERE database = {database:String} AND name IN {names:Array(String)} ORDER BY name";
    let names = format!("['{RECORDS}','{SYNC}','{REJECTED}','{VIEW}']");
    let statement = Statement::new(sql).bind("database", server.database()).bind("names", names);
    let answer = server.ask("looking for the tables of a read model", statement).await?;
    let (mut answer, mut all) = (Answer::new(&answer), Vec::new());
    while answer.more() {
        all.push(Found {
            name: answer.text()?.to_owned(),
            uuid: answer.uuid()?,
            engine: answer.text()?.to_owned(),
            sorting_key: answer.text()?.to_owned(),
            partition_key: answer.text()?.to_owned(),
            comment: answer.text()?.to_owned(),
        });
    }
    Ok(all)
}

/// Makes what is missing, if it may; then refuses what it does not know.
pub(super) async fn prepare(server: &Server, make: bool) -> Result<()> {
    let mut tables = found(server).await?;
    check(server, &tables)?; // before anything is changed
    if tables.len() < 4 {
        if !make {
            return Err(Error::Schema(format!(
                "there is no read model in database {} of ClickHouse at {}; `hapax serve` makes one",
                server.database(),
                server.place()
            )));
        }
        for sql in statements(server.database()) {
            server.ask("making the tables of a read model", Statement::new(sql)).await?;
        }
        tables = found(server).await?;
        check(server, &tables)?;
    }
    check_columns(server).await?;
    if tables.iter().any(|table| table.name == RECORDS && table.uuid.is_nil()) {
        let database = server.database();
        let told =
            format!("table {database}.{RECORDS} has no UUID: database {database} needs the engine Atomic");
        return Err(Error::Schema(told));
    }
    probe(server, make).await
}

/// The UUID of the table of rows, as it is now.
pub(super) async fn generation(server: &Server) -> Result<Uuid> {
    let tables = found(server).await?;
    let records = tables.iter().find(|table| table.name == RECORDS).map(|table| table.uuid);
    records.ok_or_else(|| {
        Error::Schema(format!(
            "table {}.{RECORDS} is gone from ClickHouse at {}",
            server.database(),
            server.place()
        ))
    })
}

fn check(server: &Server, tables: &[Found]) -> Result<()> {
    for table in tables {
        let name = format!("{}.{}", server.database(), table.name);
        let version = table.comment.strip_prefix(COMMENT).and_then(|version| version.parse::<u32>().ok());
        match version {
            Some(VERSION) => {}
            Some(other) => {
                return Err(Error::Schema(format!(
                    "table {name} has version {other}, and this build reads version {VERSION}. Use another hapax, or another \
                     database; nothing was changed"
                )));
            }
            None => {
                return Err(Error::Schema(format!(
                    "table {name} was not made by hapax (its comment does not say so). Name another database; nothing was changed"
                )));
            }
        }
        let sound = match table.name.as_str() {
            RECORDS => {
                table.engine.ends_with("ReplacingMergeTree")
                    && table.sorting_key == "tenant_id, module, record_id"
                    && table.partition_key.is_empty()
            }
            VIEW => table.engine == "View",
            _ => table.engine.ends_with("AggregatingMergeTree"),
        };
        if !sound {
            return Err(Error::Schema(format!(
                "table {name} has engine {}, sorting key ({}) and partition key ({}): it is not as hapax makes it, and would count \
                 wrongly; `hapax query schema` prints how it is made",
                table.engine, table.sorting_key, table.partition_key
            )));
        }
    }
    Ok(())
}

/// Columns that somebody added are none of our business; ours must be there.
async fn check_columns(server: &Server) -> Result<()> {
    let sql =
        "SELECT name, type FROM system.columns WHERE database = {database:String} AND table = {table:String}";
    let statement = Statement::new(sql).bind("database", server.database()).bind("table", RECORDS);
    let answer = server.ask("reading the columns of a read model", statement).await?;
    let (mut answer, mut columns) = (Answer::new(&answer), Vec::new());
    while answer.more() {
        columns.push((answer.text()?, answer.text()?));
    }
    for wanted in COLUMNS {
        if !columns.contains(wanted) {
            let found =
                columns.iter().find(|(name, _)| *name == wanted.0).map_or("not there", |found| found.1);
            return Err(Error::Schema(format!(
                "column {} of table {}.{RECORDS} is {found}; it must be {}",
                wanted.0,
                server.database(),
                wanted.1
            )));
        }
    }
    Ok(())
}

/// The tenant of the row by which the filter is tried. Its module is empty, as no module's name is, and it is
/// marked as deleted: no question sees it.
const PROBE: Uuid = Uuid::max();

/// The filter of tenants, as a setting: it holds whatever the statement says.
pub(super) fn tenant_filter(server: &Server, tenant: Uuid) -> String {
    format!("{{'{}.{RECORDS}': 'tenant_id = toUUID(\\'{tenant}\\')'}}", server.database())
}

/// A server that ignores the filter of tenants is refused before it is asked anything.
async fn probe(server: &Server, make: bool) -> Result<()> {
    let what = "trying the filter of tenants";
    let seen = async |by: Uuid| -> Result<u64> {
        let sql = format!(
            "SELECT count() FROM {}.{RECORDS} WHERE tenant_id = {{tenant:UUID}} AND module = ''",
            server.database()
        );
        let statement = Statement::new(sql).bind("tenant", PROBE);
        let answer =
            server.ask(what, statement.set("additional_table_filters", tenant_filter(server, by))).await?;
        Answer::new(&answer).u64()
    };
    if make && seen(PROBE).await? == 0 {
        let mut row = Rows::default();
        row.uuid(PROBE);
        for _ in 0..3 {
            row.text(""); // module, id, payload
        }
        row.count(0);
        row.count(0);
        row.i64(0);
        row.i64(0);
        row.u64(1);
        row.u8(1);
        row.u64(0);
        row.text("");
        row.i32(0);
        row.i64(0);
        server.insert(what, insert(server, RECORDS), row.0).await?;
    }
    let (own, other) = (seen(PROBE).await?, seen(Uuid::nil()).await?);
    if own == 0 {
        return Err(Error::Schema(format!(
            "table {}.{RECORDS} lacks the row by which the filter of tenants is tried; `hapax serve` makes it",
            server.database()
        )));
    }
    if other != 0 {
        return Err(Error::Unsupported(format!(
            "ClickHouse at {} ignores the setting additional_table_filters for table {}.{RECORDS}: tenants would rely on one \
             filter only",
            server.place(),
            server.database()
        )));
    }
    Ok(())
}

/// The statement that inserts rows with all columns of a table.
pub(super) fn insert(server: &Server, table: &str) -> Statement {
    let columns: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
    let columns = if table == RECORDS { format!(" ({})", columns.join(", ")) } else { String::new() };
    Statement::new(format!("INSERT INTO {}.{table}{columns}", server.database()))
}
