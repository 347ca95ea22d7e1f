//! The tables of a read model in ClickHouse: how they are made and recognised, and the probe of the tenant filter.

use uuid::Uuid;

use super::http::{Server, Statement};
use super::wire::{Answer, Rows};
use crate::analytics::SEQ_BITS;
use crate::error::{Error, Result};

/// The table of rows that answers questions.
pub(super) const RECORDS: &str = "data_records";
/// What the names of second tables of rows begin with; whoever fills one has a name of its own.
pub(super) const NEXT: &str = "data_records_next_";
/// How far each partition was applied.
pub(super) const SYNC: &str = "data_records_sync";
/// What could not be read.
pub(super) const REJECTED: &str = "data_records_rejected";
/// For BI tools: `records(tenant = …)`.
const VIEW: &str = "records";
/// Which text of the view this build makes. A view of an earlier one is replaced; one of a later build stays. The first
/// had no settings.
const VIEW_BUILD: u64 = 2;

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
    ("_lsn", "UInt64"),
];

/// Those that tables of earlier builds lack. They are for people who look, and a row without them has zeros, so they
/// are added to a table that is there.
const ADDED: &[&str] = &["_lsn"];

/// What a BI tool's profile must not change: with any of these a filter of the tool may hide the current version of a
/// record, and show one that it replaced.
const OF_VIEW: &str = "do_not_merge_across_partitions_select_final = 0, optimize_move_to_prewhere_if_final = 0, use_skip_indexes_if_final = 0";

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
pub(super) fn statements(database: &str, generation: Option<u16>) -> Vec<String> {
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
        table_of_rows(&format!("IF NOT EXISTS {database}.{RECORDS}"), generation, 1),
        view("CREATE VIEW IF NOT EXISTS", database),
    ]
}

/// What makes the view for BI tools.
fn view(create: &str, database: &str) -> String {
    format!(
        "{create} {database}.{VIEW} AS
SELECT module, record_id, payload, fields, numbers, created_at, updated_at, bitAnd(_version, {SEQ}) AS seq
FROM {database}.{RECORDS} FINAL WHERE tenant_id = {{tenant:UUID}}
SETTINGS {OF_VIEW}
COMMENT '{COMMENT}{VERSION}, build {VIEW_BUILD}'",
        SEQ = crate::analytics::SEQ_MAX
    )
}

/// What makes a table of rows. Its comment says which generation of the source it is for, and its how many-th
/// build it is: of two tables the one with the lower build was replaced by the other. Rows of another
/// generation are refused by the server itself, so a feed that wakes late adds none.
pub(super) fn table_of_rows(name: &str, generation: Option<u16>, build: u64) -> String {
    let mut columns: Vec<_> = COLUMNS.iter().map(|(name, kind)| format!("    {name} {kind}")).collect();
    let mut about = String::new();
    if let Some(generation) = generation {
        columns.push(format!(
            "    CONSTRAINT generation CHECK module = '' OR bitShiftRight(_version, {SEQ_BITS}) = {generation}"
        ));
        about = format!(", generation {generation}");
    }
    format!(
        "CREATE TABLE {name} (
{}
) ENGINE = ReplacingMergeTree(_version, _deleted) ORDER BY (tenant_id, module, record_id)
SETTINGS non_replicated_deduplication_window = 1000, {DURABLE}
COMMENT '{COMMENT}{VERSION}{about}, build {build}'",
        columns.join(",\n")
    )
}

/// What the comment of a table says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct About {
    version: u32,
    /// Which generation of the source its rows have; `None`: any.
    pub(super) generation: Option<u16>,
    pub(super) build: u64,
}

impl About {
    /// `None`: hapax did not make it.
    fn of(comment: &str) -> Option<Self> {
        let mut parts = comment.strip_prefix(COMMENT)?.split(", ");
        let mut about = About { version: parts.next()?.parse().ok()?, generation: None, build: 1 };
        for part in parts {
            match part.split_once(' ')? {
                ("generation", number) => about.generation = Some(number.parse().ok()?),
                ("build", number) => about.build = number.parse().ok()?,
                _ => return None,
            }
        }
        Some(about)
    }
}

/// A table that is there.
pub(super) struct Found {
    pub(super) name: String,
    pub(super) uuid: Uuid,
    engine: String,
    sorting_key: String,
    partition_key: String,
    comment: String,
}

impl Found {
    /// Whether it holds rows.
    pub(super) fn is_of_rows(&self) -> bool {
        self.name == RECORDS || self.name.starts_with(NEXT)
    }

    /// Why it cannot be used, if it is not as hapax makes it.
    fn refusal(&self, database: &str) -> Option<String> {
        let (name, engine) = (format!("{database}.{}", self.name), self.engine.as_str());
        let hapax_makes = if self.is_of_rows() { "ReplacingMergeTree" } else { "AggregatingMergeTree" };
        if engine != hapax_makes && engine.ends_with(hapax_makes) {
            return Some(format!(
                "table {name} has engine {engine}, which has replicas: rows that are missing on one replica may be in lastSyncAt \
                 of another replica, so an answer would lack what it says it has; hapax needs {hapax_makes}, on one server"
            ));
        }
        let sound = match self.name.as_str() {
            _ if self.is_of_rows() => {
                engine == hapax_makes
                    && self.sorting_key == "tenant_id, module, record_id"
                    && self.partition_key.is_empty()
            }
            VIEW => engine == "View",
            _ => engine == hapax_makes,
        };
        (!sound).then(|| {
            format!(
                "table {name} has engine {engine}, sorting key ({}) and partition key ({}): it is not as hapax makes it, and would \
                 count wrongly; `hapax query schema` prints how it is made",
                self.sorting_key, self.partition_key
            )
        })
    }

    pub(super) fn about(&self, server: &Server) -> Result<About> {
        let name = format!("{}.{}", server.database(), self.name);
        match About::of(&self.comment) {
            Some(about) if about.version == VERSION => Ok(about),
            Some(About { version, .. }) => Err(Error::Schema(format!(
                "table {name} has version {version}, and this build reads version {VERSION}. Use another hapax, or another \
                 database; nothing was changed"
            ))),
            None => Err(Error::Schema(format!(
                "table {name} was not made by hapax (its comment does not say so). Name another database; nothing was changed"
            ))),
        }
    }
}

/// The tables of a read model, with second tables of rows.
pub(super) async fn found(server: &Server) -> Result<Vec<Found>> {
    let sql = "SELECT name, uuid, engine, sorting_key, partition_key, comment FROM system.tables
               WHERE database = {database:String} AND (name IN {names:Array(String)} OR startsWith(name, {next:String}))
               ORDER BY name";
    let names = format!("['{RECORDS}','{SYNC}','{REJECTED}','{VIEW}']");
    let statement = Statement::new(sql).bind("database", server.database()).bind("names", names);
    let statement = statement.bind("next", NEXT);
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
pub(super) async fn prepare(server: &Server, make: bool, generation: Option<u16>) -> Result<()> {
    let mut tables = found(server).await?;
    check(server, &tables)?; // before anything is changed
    let of_rows = server.table();
    let is_whole = |tables: &[Found]| {
        [of_rows, SYNC, REJECTED, VIEW].iter().all(|name| tables.iter().any(|table| table.name == *name))
    };
    if !is_whole(&tables) {
        if of_rows != RECORDS {
            return Err(taken(server));
        }
        if !make {
            return Err(Error::Schema(format!(
                "there is no read model in database {} of ClickHouse at {}; `hapax serve` makes one",
                server.database(),
                server.place()
            )));
        }
        for sql in statements(server.database(), generation) {
            server.ask("making the tables of a read model", Statement::new(sql)).await?;
        }
        tables = found(server).await?;
        check(server, &tables)?;
    }
    check_columns(server, make).await?;
    let is_old =
        |table: &Found| table.name == VIEW && table.about(server).is_ok_and(|of| of.build < VIEW_BUILD);
    if make && tables.iter().any(is_old) {
        let sql = view("CREATE OR REPLACE VIEW", server.database());
        server.ask("replacing the view of an earlier hapax", Statement::new(sql)).await?;
    }
    if tables.iter().any(|table| table.name == of_rows && table.uuid.is_nil()) {
        let (database, records) = (server.database(), server.records());
        let message = format!("table {records} has no UUID: database {database} needs the engine Atomic");
        return Err(Error::Schema(message));
    }
    probe(server, make).await
}

/// A second table that is not there any more.
fn taken(server: &Server) -> Error {
    let message = format!("table {} is gone: another rebuild has taken it over", server.records());
    Error::Schema(message)
}

/// The table of rows, as it is now.
pub(super) async fn of_rows(server: &Server) -> Result<Found> {
    let mut tables = found(server).await?;
    match tables.iter().position(|table| table.name == server.table()) {
        Some(at) => Ok(tables.swap_remove(at)),
        None if server.table() != RECORDS => Err(taken(server)),
        None => Err(Error::Schema(format!(
            "table {} is gone from ClickHouse at {}",
            server.records(),
            server.place()
        ))),
    }
}

fn check(server: &Server, tables: &[Found]) -> Result<()> {
    for table in tables {
        table.about(server)?;
        if let Some(message) = table.refusal(server.database()) {
            return Err(Error::Schema(message));
        }
    }
    Ok(())
}

/// Columns that somebody added are none of our business; ours must be there.
async fn check_columns(server: &Server, make: bool) -> Result<()> {
    let sql =
        "SELECT name, type FROM system.columns WHERE database = {database:String} AND table = {table:String}";
    let statement = Statement::new(sql).bind("database", server.database()).bind("table", server.table());
    let answer = server.ask("reading the columns of a read model", statement).await?;
    let (mut answer, mut columns) = (Answer::new(&answer), Vec::new());
    while answer.more() {
        columns.push((answer.text()?, answer.text()?));
    }
    for wanted in COLUMNS {
        let (name, kind) = wanted;
        let is_missing = !columns.iter().any(|(found, _)| found == name);
        if is_missing && ADDED.contains(name) {
            if !make {
                return Err(Error::Schema(format!(
                    "table {} is of an earlier hapax, and lacks the column {name}; `hapax serve` adds it",
                    server.records()
                )));
            }
            let sql = format!("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {name} {kind}", server.records());
            server.ask("adding a column to a read model", Statement::new(sql)).await?;
        } else if !columns.contains(wanted) {
            let found =
                columns.iter().find(|(name, _)| *name == wanted.0).map_or("not there", |found| found.1);
            return Err(Error::Schema(format!(
                "column {} of table {} is {found}; it must be {}",
                wanted.0,
                server.records(),
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
    format!("{{'{}': 'tenant_id = toUUID(\\'{tenant}\\')'}}", server.records())
}

/// A server that ignores the filter of tenants is refused before it is asked anything.
async fn probe(server: &Server, make: bool) -> Result<()> {
    let what = "trying the filter of tenants";
    let seen = async |by: Uuid| -> Result<u64> {
        let sql = format!(
            "SELECT count() FROM {} WHERE tenant_id = {{tenant:UUID}} AND module = ''",
            server.records()
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
        row.u64(0);
        server.insert(what, insert_rows(server), row.0).await?;
    }
    let (own, other) = (seen(PROBE).await?, seen(Uuid::nil()).await?);
    if own == 0 {
        return Err(Error::Schema(format!(
            "table {} lacks the row by which the filter of tenants is tried; `hapax serve` makes it",
            server.records()
        )));
    }
    if other != 0 {
        return Err(Error::Unsupported(format!(
            "ClickHouse at {} ignores the setting additional_table_filters for table {}: tenants would rely on one filter \
             only",
            server.place(),
            server.records()
        )));
    }
    Ok(())
}

/// The statement that inserts into a table of states.
pub(super) fn insert(server: &Server, table: &str) -> Statement {
    Statement::new(format!("INSERT INTO {}.{table}", server.database()))
}

/// The statement that inserts rows; somebody may have added columns.
pub(super) fn insert_rows(server: &Server) -> Statement {
    let columns: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
    Statement::new(format!("INSERT INTO {} ({})", server.records(), columns.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever changes the text raises its number, so that views that are there are replaced.
    #[test]
    fn t466_the_text_of_the_view_has_a_number() {
        assert_eq!(VIEW_BUILD, 2);
        assert_eq!(
            view("CREATE VIEW", "d"),
            "CREATE VIEW d.records AS
SELECT module, record_id, payload, fields, numbers, created_at, updated_at, bitAnd(_version, 281474976710655) AS seq
FROM d.data_records FINAL WHERE tenant_id = {tenant:UUID}
SETTINGS do_not_merge_across_partitions_select_final = 0, optimize_move_to_prewhere_if_final = 0, use_skip_indexes_if_final = 0
COMMENT 'hapax read model, version 1, build 2'"
        );
    }

    /// The engine of our tests has no Keeper, so it can make no such table: the decision is tested without a server.
    #[test]
    fn t520_a_table_with_replicas_is_refused() {
        let refusal = |name: &str, engine: &str| {
            let is_of_rows = name == RECORDS || name.starts_with(NEXT);
            let sorting_key =
                if is_of_rows { "tenant_id, module, record_id" } else { "model, topic, number" };
            let found = Found {
                name: name.to_owned(),
                uuid: PROBE,
                engine: engine.to_owned(),
                sorting_key: sorting_key.to_owned(),
                partition_key: String::new(),
                comment: String::new(),
            };
            found.refusal("d")
        };
        let next = format!("{NEXT}1");
        for (name, engine) in [
            (RECORDS, "ReplacingMergeTree"),
            (next.as_str(), "ReplacingMergeTree"),
            (SYNC, "AggregatingMergeTree"),
            (REJECTED, "AggregatingMergeTree"),
        ] {
            assert_eq!(refusal(name, engine), None, "{name}");
            for replicas in ["Replicated", "Shared"] {
                let message = refusal(name, &format!("{replicas}{engine}")).unwrap_or_default();
                let said = format!("table d.{name} has engine {replicas}{engine}, which has replicas");
                assert!(message.starts_with(&said) && message.contains("another replica"), "{message:?}");
            }
            let message = refusal(name, "MergeTree").unwrap();
            assert!(message.contains("it is not as hapax makes it"), "{message}");
        }
        assert_eq!(refusal(VIEW, "View"), None);
    }

    #[test]
    fn a_comment_says_what_a_table_is_for() {
        let about = |version, generation, build| Some(About { version, generation, build });
        for (generation, build) in [(None, 1), (Some(7), 12)] {
            let sql = table_of_rows("x", generation, build);
            let comment = sql.split("COMMENT '").nth(1).and_then(|rest| rest.strip_suffix('\'')).unwrap();
            assert_eq!(About::of(comment), about(VERSION, generation, build), "{comment}");
        }
        assert_eq!(About::of("hapax read model, version 1"), about(1, None, 1));
        assert_eq!(About::of("hapax read model, version 9, build 3"), about(9, None, 3));
        for foreign in ["", "orders", "hapax read model, version x", "hapax read model, version 1, colour 3"]
        {
            assert_eq!(About::of(foreign), None, "{foreign}");
        }
    }
}
