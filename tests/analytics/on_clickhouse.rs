//! What only ClickHouse can get wrong: merges, tokens, filters, states without transactions, and its own outages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax::Error;
use hapax::analytics::{
    Block, Field, Groups, ListPage, Measure, MemoryReadModel, ReadModel, Selection, Tally, Uuid, Version,
};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::testing::analytics::{
    all, apply, at, block, change, module, orders, partition, rejected, shown, tally, topic,
};

use crate::engine::{Database, Engine, rewriting};
use crate::support::this;

/// A value with something changed.
fn with<T>(mut of: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut of);
    of
}

fn field(pointer: &str) -> Field {
    Field::new(pointer).unwrap()
}

async fn count(model: &impl ReadModel, of: &Selection) -> u64 {
    model.tally(of, &Tally::default()).await.unwrap().groups[0].count
}

/// The same numbers of memory and of ClickHouse.
async fn same(memory: &MemoryReadModel, model: &ClickHouseReadModel, of: &Selection, what: &Tally) -> Groups {
    let (one, other) = (memory.tally(of, what).await.unwrap(), model.tally(of, what).await.unwrap());
    assert_eq!(one, other, "{of:?} {what:?}");
    one
}

/// Versions whose times lie months apart meet in one merge, and many months fit into one insert.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t09_versions_of_a_row_share_a_partition() {
    let database = Database::new();
    let model = database.model();
    let month = 31 * 86_400;
    for version in 1..=3_u64 {
        let updated_at = at(month * i64::try_from(version).unwrap());
        apply(&model, block([with(change(1, version, Some("{}")), |of| of.updated_at = updated_at)])).await;
    }
    assert_eq!(count(&model, &orders()).await, 1);
    database.sql("OPTIMIZE TABLE DB.data_records FINAL");
    assert_eq!(database.rows(), 1, "nothing keeps versions apart");
}

/// A table partitioned by the month of an id refuses a block of over a hundred months.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t60_a_block_of_many_months_is_one_insert() {
    let database = Database::new();
    let model = database.model();
    let changes = (0..150_i64).map(|n| {
        // A UUIDv7 of that month, and one of no time at all.
        let millis = u128::try_from(n * 31 * 86_400_000).unwrap();
        let id = if n % 2 == 0 { millis << 80 | 7 << 76 | 2 << 62 } else { u128::MAX - millis };
        with(change(id, 1, Some("{}")), |of| of.updated_at = at(n * 31 * 86_400))
    });
    apply(&model, block(changes)).await;
    assert_eq!(count(&model, &orders()).await, 150);
    let parts = format!(
        "SELECT uniqExact(partition_id) FROM system.parts WHERE database = '{}' AND table = 'data_records' AND active",
        database.name
    );
    assert_eq!(database.sql(&parts), "1");
}

/// A deletion before its late update, a merge between them, and a merge that would clean up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t44_a_deleted_row_stays_deleted() {
    let database = Database::new();
    let model = database.model();
    apply(&model, block([change(1, 1, Some("{}")), change(2, 1, Some("{}"))])).await;
    apply(&model, block([change(1, 3, None)])).await;
    database.sql("OPTIMIZE TABLE DB.data_records FINAL");
    apply(&model, block([change(1, 2, Some(r#"{"late":1}"#))])).await;
    assert_eq!(shown(&model).await, [(2, 1, "{}".to_owned())]);
    database.sql("OPTIMIZE TABLE DB.data_records FINAL");
    assert_eq!(shown(&model).await, [(2, 1, "{}".to_owned())]);
    assert_eq!(database.rows(), 2, "the deleted row is kept, and nothing older than it");
    let cleanup = format!("OPTIMIZE TABLE {}.data_records FINAL CLEANUP", database.name);
    let (status, text) = database.post("", cleanup.as_bytes());
    assert_ne!(status, 200, "a cleanup would forget the deletion: {text}");
    assert_eq!(database.rows(), 2);
}

/// A repeated block is one insert; other content under the same offsets is not taken for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t50_the_same_block_is_one_insert_and_another_is_not_dropped() {
    let database = Database::new();
    let model = database.model();
    database.model().partitions().await.unwrap();
    database.sql("SYSTEM STOP MERGES DB.data_records");
    let mut first = Block::new(partition(0), 1, 0..3);
    first.changes = (1..=3).map(|id| change(id, 1, Some("{}"))).collect();
    for _ in 0..3 {
        apply(&model, first.clone()).await;
        apply(&database.model(), first.clone()).await; // also from another process
    }
    assert_eq!(database.rows(), 3, "rows are stored once");
    let mut other = Block::new(partition(0), 1, 0..3);
    other.changes = (4..=6).map(|id| change(id, 1, Some("{}"))).collect();
    apply(&model, other).await;
    assert_eq!(database.rows(), 6, "the same offsets of a topic that was made anew");
    // Rows that somebody deletes do not come back with their block, because the server knows its token still. So nobody
    // mends a table by reading the topic again: `verify` names what is missing, and a rebuild fills another table.
    database.sql("SYSTEM START MERGES DB.data_records"); // without them nothing is deleted either
    database.sql("ALTER TABLE DB.data_records DELETE WHERE module != '' SETTINGS mutations_sync = 2");
    apply(&model, first.clone()).await;
    assert_eq!(database.rows(), 0, "the same block is refused without a word");
    // A table that is made anew has nothing: the token names the table too.
    for table in ["data_records", "data_records_sync", "data_records_rejected", "records"] {
        database.sql(&format!("DROP TABLE DB.{table} SYNC"));
    }
    let error = model.apply(&[first.clone()]).await.unwrap_err();
    assert!(matches!(error, Error::Schema(_)), "{error:?}");
    model.expect(&topic(), 1).await.unwrap(); // it begins anew
    apply(&model, first).await;
    assert_eq!((database.rows(), shown(&model).await.len()), (3, 3));
}

/// A table of rows that is made anew begins anew: its partitions were never applied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t67_a_table_that_is_made_anew_begins_anew() {
    let database = Database::new();
    let model = database.model();
    let mut of = block([change(1, 1, Some("{}"))]);
    of.pulse = Some(at(9));
    apply(&model, of).await;
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), Some(at(9)));
    database.sql("DROP TABLE DB.data_records SYNC");
    assert!(matches!(model.last_sync_at(Uuid::nil()).await, Err(Error::Schema(_))));
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), None, "nothing is complete");
    assert!(model.partitions().await.unwrap().is_empty());
    assert_eq!(count(&model, &orders()).await, 0);
}

const DATABASE: &str = "HAPAX_TEST_CLICKHOUSE_DATABASE";

fn crashing() -> Block {
    let mut of = Block::new(partition(0), 1, 0..3);
    of.changes = vec![change(1, 1, Some("{}")), change(2, 1, None)];
    of.rejected = vec![(rejected(Some(Uuid::from_u128(1)), 0, 1), None)];
    of.pulse = Some(at(5));
    of
}

/// Whoever is told that a block is complete finds its rows, and its rejected change.
async fn sound(model: &ClickHouseReadModel) -> Result<bool, String> {
    let synced = model.last_sync_at(Uuid::nil()).await.unwrap();
    let offset = model.partitions().await.unwrap().first().and_then(|of| of.offset);
    if synced.is_none() && offset.is_none() {
        return Ok(false);
    }
    let rows = shown(model).await.len();
    let held = model.last_sync_at(Uuid::from_u128(1)).await.unwrap();
    if (rows, held) == (1, None) {
        Ok(true)
    } else {
        Err(format!("{synced:?} {offset:?}: {rows} rows, {held:?}"))
    }
}

/// A feed that is killed between any two steps of a block leaves what its repeat completes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t44_a_feed_killed_inside_a_block_repeats_it() {
    if let Ok(url) = std::env::var(DATABASE) {
        apply(&ClickHouseReadModel::open(&url).unwrap(), crashing()).await;
        return;
    }
    let run = |url: &str, point: &str, mutant: &str| {
        let mut child = this::test("t44_a_feed_killed_inside_a_block_repeats_it");
        child.env(DATABASE, url).env("HAPAX_CRASH_AT", point).env("HAPAX_MUTANT", mutant);
        child.output().unwrap().status.success()
    };
    for point in ["analytics.clickhouse.rejected:1", "analytics.clickhouse.rows:1"] {
        let database = Database::new();
        let model = database.model();
        assert!(!run(&database.url(), point, ""), "the child is killed at {point}");
        assert_eq!(sound(&model).await, Ok(false), "{point}");
        apply(&model, crashing()).await;
        assert_eq!(sound(&model).await, Ok(true), "{point}");
        assert_eq!((database.rows(), model.rejected(9).await.unwrap().len()), (2, 1), "{point}");
    }
    // The other order is not sound, and this test sees it.
    let database = Database::new();
    run(&database.url(), "analytics.clickhouse.rejected:1", "state before rows");
    assert!(sound(&database.model()).await.is_err(), "a state without its rows is noticed");
}

/// The engine is killed while blocks are inserted: nothing is lost, and nothing counts twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t49_an_engine_that_is_killed_loses_nothing_and_doubles_nothing() {
    let engine = Engine::new();
    let database = engine.database();
    let model = database.model();
    let stop = Arc::new(AtomicBool::new(false));
    let feeding = {
        let (model, stop) = (model.clone(), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut blocks = 0_i64;
            while !stop.load(Ordering::SeqCst) {
                let mut of = Block::new(partition(0), 1, blocks * 10..blocks * 10 + 10);
                // Of ten changes nine are new, and one changes a record of the block before.
                of.changes = (0..9)
                    .map(|n| change(u128::try_from(blocks * 10 + n + 1).unwrap(), 1, Some(r#"{"n":0.1}"#)))
                    .collect();
                if blocks > 0 {
                    let before = u128::try_from(blocks * 10 - 9).unwrap();
                    of.changes.push(change(before, 2, Some(r#"{"n":100}"#)));
                }
                of.pulse = Some(at(blocks + 1));
                loop {
                    match model.apply(std::slice::from_ref(&of)).await {
                        Ok(()) => break,
                        Err(error) if error.is_retryable() => {
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        Err(error) => panic!("{}", error.chain()),
                    }
                }
                blocks += 1;
            }
            blocks
        })
    };
    for _ in 0..2 {
        let seen =
            || async { model.partitions().await.ok().and_then(|all| all.first().and_then(|of| of.offset)) };
        let before = seen().await;
        crate::support::wait::until("blocks are applied", async || seen().await > before).await;
        let engine = &engine;
        tokio::task::block_in_place(|| {
            engine.services("kill");
            engine.services("up");
        });
    }
    let before = model.partitions().await.unwrap()[0].offset.unwrap();
    crate::support::wait::until("it goes on", async || {
        model.partitions().await.is_ok_and(|all| all[0].offset.is_some_and(|now| now > before))
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    let blocks = feeding.await.unwrap();
    let what = with(Tally::default(), |of| of.measures = vec![Measure::Sum(field("/n"))]);
    let found = tally(&model, &what).await.groups.remove(0);
    let (records, changed) = (9 * blocks, blocks - 1);
    assert_eq!(found.count, u64::try_from(records).unwrap(), "of {blocks} blocks");
    let tenths = records - changed;
    let sum = format!("{}.{}", tenths / 10 + 100 * changed, tenths % 10);
    let message = found.measures[0].value.unwrap().to_string();
    assert_eq!(message, sum.strip_suffix(".0").unwrap_or(&sum), "of {blocks} blocks");
    assert_eq!(model.partitions().await.unwrap()[0].offset, Some(blocks * 10));
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), Some(at(blocks)));
}

/// The filter of the table holds without the predicate, and a server that ignores it is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t57_the_filter_of_tenants_is_tried_before_it_is_relied_on() {
    let database = Database::new();
    let model = database.model();
    let of = |tenant: u128| with(change(1, 1, Some("{}")), |of| of.tenant = Uuid::from_u128(tenant));
    apply(&model, block([of(1), of(2)])).await;
    let filter = format!(
        "additional_table_filters={{%27{0}.data_records%27:%27tenant_id=toUUID(\\%27{1}\\%27)%27}}",
        database.name,
        Uuid::from_u128(1)
    );
    let all = format!("SELECT count() FROM {}.data_records FINAL", database.name);
    assert_eq!(database.post(&filter, all.as_bytes()), (200, "1\n".to_owned()), "without a predicate");
    assert_eq!(database.post("", all.as_bytes()), (200, "2\n".to_owned()));
    // On this way the setting gets lost.
    let server = database.url();
    let server = server.strip_prefix("clickhouse://").unwrap().split_once('/').unwrap().0;
    let way = rewriting(server, "additional_table_filters=", "log_comment=xxxxxxxxxxxx=").await;
    for open in [ClickHouseReadModel::open, ClickHouseReadModel::open_existing] {
        let model = open(&format!("clickhouse://{way}/{}", database.name)).unwrap();
        let error = model.tally(&orders(), &Tally::default()).await.unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported(error) if error.contains("additional_table_filters")),
            "{error:?}"
        );
    }
    // A sound way is not refused.
    let way = rewriting(server, "never in a request", "never in a request").await;
    let model = ClickHouseReadModel::open_existing(&format!("clickhouse://{way}/{}", database.name)).unwrap();
    assert_eq!(count(&model, &with(orders(), |of| of.tenant = Uuid::from_u128(2))).await, 1);
}

/// A skip index that somebody adds shows replaced versions under FINAL, unless the setting is pinned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t58_a_skip_index_brings_no_replaced_version_back() {
    let database = Database::new();
    let model = database.model();
    model.partitions().await.unwrap();
    database.sql("SYSTEM STOP MERGES DB.data_records");
    database.sql("ALTER TABLE DB.data_records ADD INDEX by_time updated_at TYPE minmax GRANULARITY 1");
    apply(&model, block([change(1, 5, Some("{}"))])).await;
    apply(&model, block([with(change(1, 6, Some("{}")), |of| of.updated_at = at(2))])).await;
    let of = with(orders(), |of| of.since = Some(at(4)));
    assert_eq!(count(&model, &of).await, 0, "the current version is older than that");
    assert_eq!(all(&model, &of, 10).await.len(), 0);
    // The trap is real: with the other settings the engine answers 1.
    let sql = format!(
        "SELECT count() FROM {}.data_records FINAL WHERE module = 'orders' AND updated_at >= toDateTime64(4, 6, 'UTC')",
        database.name
    );
    let asked =
        database.post("use_skip_indexes_if_final=1&use_skip_indexes_if_final_exact_mode=0", sql.as_bytes());
    assert_eq!(asked, (200, "1\n".to_owned()));
}

/// Without FINAL replaced and deleted versions count, and the answer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t59_an_approximate_answer_says_what_it_counts() {
    let database = Database::new();
    let model = database.model();
    model.partitions().await.unwrap();
    database.sql("SYSTEM STOP MERGES DB.data_records");
    for version in 1..=3 {
        apply(&model, block((1..=50).map(|id| change(id, version, Some("{}"))))).await;
    }
    apply(&model, block([change(1, 4, None)])).await;
    assert_eq!(count(&model, &orders()).await, 49);
    let fast = with(orders(), |of| of.approximate = true);
    assert_eq!(count(&model, &fast).await, 150, "every version that is not merged");
    assert!(model.approximate().unwrap().contains("replaced or deleted"));
    database.sql("SYSTEM START MERGES DB.data_records");
    database.sql("OPTIMIZE TABLE DB.data_records FINAL");
    assert_eq!(count(&model, &fast).await, 49, "and none that is");
}

/// Payloads and pointers that try to be SQL are only themselves: every answer is that of memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_names_are_only_names() {
    let database = Database::new();
    let (model, memory) = (database.model(), MemoryReadModel::default());
    let names = [
        "a",
        "a'",
        "a\\",
        "a\\'",
        "') OR 1=1 --",
        "{tenant:UUID}",
        "{field0:String}",
        "a\tb\nc",
        "\u{8}\u{c}\r",
        "é😀",
        "a/b",
        "a~b",
        "",
        "%27",
        "&param_tenant=x",
        "?x=1#y",
        "\"",
        "`",
        "$$",
        "${x}",
        "NULL",
        "\\N",
    ];
    let mut changes = Vec::new();
    for (tenant, sign) in [(0, "1"), (1, "-1"), (2, "0.000000001")] {
        for (id, name) in (1..).zip(names) {
            let quoted = serde_json::to_string(name).unwrap();
            let json = format!(r#"{{{quoted}:{{{quoted}:{sign}{id}e-2}},"g":{quoted},"n":{sign}}}"#);
            let of = change(id, 1 + u64::try_from(tenant).unwrap(), Some(&json));
            changes.push(with(of, |of| of.tenant = Uuid::from_u128(tenant)));
        }
    }
    apply(&model, block(changes.clone())).await;
    apply(&memory, block(changes)).await;
    for tenant in 0..4_u128 {
        let of = with(orders(), |of| of.tenant = Uuid::from_u128(tenant));
        let listed = all(&model, &of, 7).await;
        assert_eq!(listed, all(&memory, &of, 7).await);
        assert_eq!(listed.len(), if tenant < 3 { names.len() } else { 0 });
        let by = with(Tally::default(), |of| {
            of.measures = vec![Measure::Sum(field("/n"))];
            of.group_by = Some(field("/g"));
        });
        same(&memory, &model, &of, &by).await;
        // One tenant stands for the others from here on.
        for name in names.iter().filter(|_| tenant == 1) {
            let pointer = format!("/{}", name.replace('~', "~0").replace('/', "~1"));
            let nested = field(&format!("{pointer}{pointer}"));
            let what = with(Tally::default(), |of| {
                of.measures = vec![Measure::Sum(nested.clone()), Measure::Max(field(&pointer))];
                of.group_by = Some(nested);
            });
            let found = same(&memory, &model, &of, &what).await;
            assert_eq!(found.groups.len(), 2, "{name:?} is found");
        }
    }
    let other = with(orders(), |of| of.module = module("order"));
    assert_eq!(count(&model, &other).await, 0);
}

/// Sums at the edge of what a number may be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_at_the_edge_and_beyond_it_an_error() {
    let database = Database::new();
    let (model, memory) = (database.model(), MemoryReadModel::default());
    let large = "9999999999999999999999999999.999999999";
    let numbers =
        [large, large, "-1e-9", "1e-10", "10000000000000000000000000000", "-0.0", "0.5", "5e-1", "1E2"];
    let changes: Vec<_> =
        (1..).zip(numbers).map(|(id, n)| change(id, 1, Some(&format!(r#"{{"n":{n}}}"#)))).collect();
    apply(&model, block(changes.clone())).await;
    apply(&memory, block(changes)).await;
    let every = |n: Field| vec![Measure::Sum(n.clone()), Measure::Min(n.clone()), Measure::Max(n)];
    let what = with(Tally::default(), |of| of.measures = every(field("/n")));
    let found = same(&memory, &model, &orders(), &what).await.groups.remove(0);
    assert_eq!(found.measures[0].left_out, 2, "too large, and too small");
    same(&memory, &model, &orders(), &with(what.clone(), |of| of.group_by = Some(field("/n")))).await;
    // 2^127 units are reached by some twenty of the largest numbers.
    let many: Vec<_> = (100..140).map(|id| change(id, 1, Some(&format!(r#"{{"n":{large}}}"#)))).collect();
    apply(&model, block(many)).await;
    let error = model.tally(&orders(), &what).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid { problem, .. } if problem.contains("more digits")), "{error:?}");
}

/// What does not pass by itself is a sentence; what does pauses, and then goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_are_told_apart() {
    let database = Database::new();
    let of = block([change(1, 1, Some("{}"))]);
    let refused = async |model: hapax::Result<ClickHouseReadModel>| {
        let error = model.unwrap().apply(std::slice::from_ref(&of)).await.unwrap_err();
        (error.is_retryable(), error.code(), error.chain())
    };
    // Nobody there, or not the right one.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (again, _, text) =
        refused(ClickHouseReadModel::open(&format!("clickhouse://127.0.0.1:{port}/x"))).await;
    assert!(again && text.contains(&format!("127.0.0.1:{port} gives no answer")), "{text}");
    let (again, code, text) = refused(ClickHouseReadModel::open(&database.url_as("hapax:wr0ng@"))).await;
    assert!(!again && code == "refused" && text.contains("password is wrong"), "{text}");
    assert!(!text.contains("wr0ng"), "{text}");
    // No tables, and none are made by who only reads.
    let (again, code, text) = refused(ClickHouseReadModel::open_existing(&database.url())).await;
    assert!(!again && code == "schema" && text.contains("there is no read model in database"), "{text}");
    // A password with every sign is sent as it is.
    let named = ClickHouseReadModel::open(&database.url_as("hapax:s3cret%2F%26%3F@")).unwrap();
    apply(&named, of.clone()).await;
    // The disk is full: nothing is lost, and it goes on when there is room.
    let next = block([change(2, 1, Some("{}"))]);
    for table in ["data_records", "data_records_sync"] {
        let setting = "min_free_disk_bytes_to_perform_insert";
        database.sql(&format!("ALTER TABLE DB.{table} MODIFY SETTING {setting} = 1000000000000000"));
        let error = named.apply(std::slice::from_ref(&next)).await.unwrap_err();
        assert!(error.is_retryable() && error.chain().contains("its disk is full"), "{}", error.chain());
        database.sql(&format!("ALTER TABLE DB.{table} RESET SETTING {setting}"));
    }
    apply(&named, next).await;
    assert_eq!(shown(&named).await.len(), 2);
    // Somebody's own table, another version, other columns.
    for (change, part) in [
        ("MODIFY COMMENT 'mine'", "was not made by hapax"),
        ("MODIFY COMMENT 'hapax read model, version 2'", "has version 2"),
        ("MODIFY COMMENT 'hapax read model, version 1'", ""),
        ("DROP COLUMN numbers", "column numbers"),
    ] {
        database.sql(&format!("ALTER TABLE DB.data_records {change}"));
        if part.is_empty() {
            continue; // as it was
        }
        for open in [ClickHouseReadModel::open, ClickHouseReadModel::open_existing] {
            let (again, code, text) = refused(open(&database.url())).await;
            assert!(!again && code == "schema" && text.contains(part), "{text}");
        }
    }
}

/// A partitioned table would count versions apart, so it is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t09_a_partitioned_table_is_refused() {
    let database = Database::new();
    let model = database.model();
    for sql in model.schema() {
        let sql = if sql.contains(".data_records (") {
            sql.replace("SETTINGS non_", "PARTITION BY toYYYYMM(updated_at) SETTINGS non_")
        } else {
            sql
        };
        database.sql(&sql);
    }
    let error = model.partitions().await.unwrap_err();
    assert!(matches!(&error, Error::Schema(error) if error.contains("toYYYYMM(updated_at)")), "{error:?}");
}

/// The view for BI tools shows one tenant's current records, and takes its tenant as a parameter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_view_shows_one_tenant_and_current_versions() {
    let database = Database::new();
    let model = database.model();
    let of = |tenant: u128, id, version, n: Option<u64>| {
        let json = n.map(|n| format!(r#"{{"n":{n}.25}}"#));
        with(change(id, version, json.as_deref()), |of| of.tenant = Uuid::from_u128(tenant))
    };
    apply(&model, block([of(1, 1, 1, Some(1)), of(1, 2, 1, Some(2)), of(2, 1, 1, Some(4))])).await;
    apply(&model, block([of(1, 1, 2, Some(8)), of(1, 2, 2, None)])).await;
    let ask = |tenant: u128| {
        let tenant = Uuid::from_u128(tenant);
        database.sql(&format!(
            "SELECT count(), sum(numbers['/n']), max(seq) FROM DB.records(tenant = '{tenant}')"
        ))
    };
    assert_eq!((ask(1).as_str(), ask(2).as_str(), ask(3).as_str()), ("1\t8.25\t2", "1\t4.25\t1", "0\t0\t0"));
    let (status, text) = database.post("", format!("SELECT * FROM {}.records", database.name).as_bytes());
    assert_ne!(status, 200, "without a tenant: {text}");
}

/// A Parquet file has every current record of its tenant once, and one that cannot be written is an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parquet_file_has_every_record_once() {
    let database = Database::new();
    let model = database.model();
    let other = with(change(1, 1, Some("{}")), |of| of.tenant = Uuid::from_u128(9));
    apply(&model, block((1..=500).map(|id| change(id, 1, Some(r#"{"s":"é"}"#))).chain([other]))).await;
    apply(&model, block([change(1, 2, Some(r#"{"s":"new"}"#)), change(2, 2, None)])).await;
    let mut file = Vec::new();
    let mut keep = |piece: &[u8]| {
        file.extend_from_slice(piece);
        Ok(())
    };
    model.export_parquet(&orders(), &mut keep).await.unwrap();
    // The engine itself reads it back.
    database.sql("CREATE TABLE DB.back (id String, seq UInt64, payload String) ENGINE = Memory");
    let query = format!("query=INSERT%20INTO%20{}.back%20FORMAT%20Parquet", database.name);
    assert_eq!(database.post(&query, &file), (200, String::new()));
    let read = database
        .sql("SELECT count(), uniqExact(id), sum(seq), countIf(payload = '{\"s\":\"new\"}') FROM DB.back");
    assert_eq!(read, "499\t499\t500\t1");
    let mut full = |_: &[u8]| Err(std::io::Error::other("no space left"));
    let error = model.export_parquet(&orders(), &mut full).await.unwrap_err();
    assert!(error.chain().contains("no space left"), "{}", error.chain());
    let error =
        MemoryReadModel::default().export_parquet(&orders(), &mut |_: &[u8]| Ok(())).await.unwrap_err();
    assert!(matches!(&error, Error::Unsupported(error) if error.contains("ClickHouse")), "{error:?}");
}

/// A record whose names would take too much is rejected, alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_nothing_but_names_is_rejected_alone() {
    let database = Database::new();
    let model = database.model();
    let name = "x".repeat(120);
    let many: Vec<_> = (0..60_000).map(|n| format!(r#""{n}":1"#)).collect();
    let json = format!(r#"{{"{name}":{{"{name}":{{{}}}}}}}"#, many.join(","));
    let tenant = Uuid::from_u128(1);
    let mut of = block([with(change(1, 1, Some(&json)), |of| of.tenant = tenant), change(2, 1, Some("{}"))]);
    of.pulse = Some(at(9));
    apply(&model, of).await;
    assert_eq!(shown(&model).await.len(), 1, "the other one is there");
    assert_eq!(model.last_sync_at(tenant).await.unwrap(), None, "its tenant is held back");
    assert_eq!(model.last_sync_at(Uuid::nil()).await.unwrap(), Some(at(9)));
    let entry = model.rejected(9).await.unwrap().remove(0).rejected;
    assert!(entry.reason.contains("8388608 bytes") && entry.payload == json.as_bytes(), "{}", entry.reason);
}

/// A page whose rows are deleted meanwhile, and the version of what is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_and_pages_survive_merges() {
    let database = Database::new();
    let model = database.model();
    model.expect(&topic(), 2).await.unwrap();
    apply(&model, block((1..=30).map(|id| change(id, 1, Some("{}"))))).await;
    apply(&model, block((1..=29).map(|id| change(id, 2, None)))).await;
    database.sql("OPTIMIZE TABLE DB.data_records FINAL");
    let page = model.list(&orders(), ListPage::new(None, 5).unwrap()).await.unwrap();
    assert_eq!((page.records.len(), page.next), (1, None));
    let version = model.version(Uuid::nil(), &module("orders"), Uuid::from_u128(7)).await.unwrap();
    assert_eq!(version.map(Version::seq), Some(2));
    let numbers: Vec<_> = model.partitions().await.unwrap().iter().map(|of| of.partition.number).collect();
    assert_eq!(numbers, [0, 1]);
}

/// Sums and groups are computed from maps beside the payload. Changed there, a row is not what it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t353_changed_maps_of_clickhouse_are_named() {
    use hapax::records::Scan;
    let memory = MemoryReadModel::default();
    let of = change(1, 1, Some(r#"{"n":12.5,"kind":"a","deep":{"x":[1],"y":-3}}"#));
    apply(&memory, block([of.clone()])).await;
    let expected = memory.scan(&Scan::new(10)).await.unwrap();
    for damage in [
        "numbers = map('/n', toDecimal128(99, 9), '/deep/y', toDecimal128(-3, 9))",
        "numbers = map('/n', toDecimal128('12.5', 9))",
        "fields = mapUpdate(fields, map('/kind', 'b'))",
    ] {
        let database = Database::new();
        let model = database.model();
        apply(&model, block([of.clone()])).await;
        assert_eq!(model.scan(&Scan::new(10)).await.unwrap(), expected);
        let sql = format!(
            "ALTER TABLE DB.data_records UPDATE {damage} WHERE module != '' SETTINGS mutations_sync = 2"
        );
        database.sql(&sql);
        let found = model.scan(&Scan::new(10)).await.unwrap();
        assert_eq!((found[0].version, found.len()), (expected[0].version, 1));
        assert_ne!(found[0].hash, expected[0].hash, "{damage}");
    }
}
