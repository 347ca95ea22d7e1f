//! What protects records in an SQLite file from SQL by hand.

use hapax::journal::{Append, Expected, Journal as _};
use hapax::records::{Create, Delete, Modules as _, Records as _, Update};
use hapax::testing::records::{create, payload, tenant};
use hapax::{Aggregate, Event, Kind};
use rusqlite::Connection;

use super::SqliteRecordsHarness;

/// An event of a kind, appended past the records.
async fn append(harness: &SqliteRecordsHarness, created: &Create, kind: &str) {
    let event = Event::new(hapax::EventId::now_v7()).kind(Kind::new(kind).unwrap());
    let aggregate = Aggregate::new(format!("{}/{}", created.module, created.id)).unwrap();
    let append = Append::new(aggregate, Expected::Any, [event]).tenant(created.tenant.clone().unwrap());
    let _ = harness.records().journal().append(&append).await.unwrap();
}

/// Each statement is refused with these words, and changes nothing.
fn refused(file: &Connection, statements: &[(&str, &str)]) {
    let rows = "SELECT group_concat(hex(id) || seq || payload) FROM hapax_record";
    let before: Option<String> = file.query_row(rows, [], |row| row.get(0)).unwrap();
    for (sql, says) in statements {
        let refused = file.execute_batch(sql).expect_err(sql).to_string();
        assert!(refused.contains(says), "{sql}: {refused}");
    }
    let after: Option<String> = file.query_row(rows, [], |row| row.get(0)).unwrap();
    assert_eq!(before, after);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t202_no_write_by_hand_gets_past_the_journal_in_a_file() {
    let harness = SqliteRecordsHarness::new().await;
    let records = harness.records();
    let of = Some(tenant(0xa));
    let first = create(&harness, "{}").tenant(of.clone());
    records.create(&first).await.unwrap();
    for seq in 1..5 {
        let change = Update::new(first.module.clone(), first.id, seq, payload("{}")).tenant(of.clone());
        records.update(&change).await.unwrap();
    }
    let file = Connection::open(records.path()).unwrap();
    let copy = |seq: &str, how: &str| {
        format!(
            "INSERT {how} INTO hapax_record SELECT module, tenant, id, '{{\"by\":\"hand\"}}', {seq}, 0, 0 FROM hapax_record"
        )
    };
    for recursive in ["ON", "OFF"] {
        file.execute_batch(&format!("PRAGMA recursive_triggers = {recursive}")).unwrap();
        refused(
            &file,
            &[
                (&copy("1", "OR REPLACE"), "created once"),
                (&copy("5", "OR REPLACE"), "created once"),
                (&copy("6", "OR REPLACE"), "created once"),
                (&copy("5", "OR IGNORE"), "created once"),
                (
                    "INSERT INTO hapax_record VALUES ('x', zeroblob(16), randomblob(16), '{}', 1, 0, 0)",
                    "created once",
                ),
                ("UPDATE hapax_record SET payload = '{}'", "raise its seq"),
                ("UPDATE hapax_record SET seq = 6", "raise its seq"),
                ("UPDATE OR REPLACE hapax_record SET seq = 1", "raise its seq"),
                ("UPDATE hapax_record SET id = randomblob(16), seq = 6", "raise its seq"),
                ("DELETE FROM hapax_record", "record.deleted first"),
                ("UPDATE hapax_journal_aggregate SET head = 1", "only rises"),
                ("UPDATE hapax_journal_aggregate SET aggregate = 'x'", "only rises"),
                ("DELETE FROM hapax_journal_aggregate", "stays"),
                (
                    "INSERT OR REPLACE INTO hapax_journal_aggregate SELECT number, tenant, aggregate, 1 FROM hapax_journal_aggregate",
                    "one head",
                ),
                (
                    "INSERT OR REPLACE INTO hapax_journal_aggregate SELECT 99, tenant, aggregate, 1 FROM hapax_journal_aggregate",
                    "one head",
                ),
            ],
        );
    }
    // An event of another kind permits nothing.
    append(&harness, &first, "order.paid").await;
    append(&harness, &first, "record.created").await;
    refused(
        &file,
        &[
            ("UPDATE hapax_record SET seq = 7", "raise its seq"),
            ("DELETE FROM hapax_record", "record.deleted first"),
            (&copy("7", "OR REPLACE"), "created once"),
        ],
    );
    // A deleted record does not come back under a seq that was used.
    let gone = Delete::new(first.module.clone(), first.id, 5).tenant(of);
    let kept = "CREATE TEMP TABLE kept AS SELECT * FROM hapax_record";
    file.execute_batch(kept).unwrap();
    assert_eq!(records.delete(&gone).await.unwrap().seq, 8);
    for seq in [5, 7, 8, 9] {
        let back =
            format!("INSERT INTO hapax_record SELECT module, tenant, id, payload, {seq}, 0, 0 FROM kept");
        refused(&file, &[(&back, "created once")]);
    }
    assert_eq!(records.create(&first).await.unwrap().seq, 9);
}

/// `modules ls` looks at what the triggers do, not at their names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t206_a_trigger_that_was_changed_in_a_file_is_named() {
    let harness = SqliteRecordsHarness::new().await;
    let records = harness.records();
    let problems = async || records.modules().await.unwrap()[0].problems.clone();
    assert_eq!(problems().await, Vec::<String>::new());
    let file = Connection::open(records.path()).unwrap();
    for name in ["created", "updated", "deleted", "head_made", "head_rises", "head_stays"]
        .map(|of| format!("hapax_record_{of}"))
    {
        let made = "SELECT sql FROM sqlite_schema WHERE name = ?1";
        let made: String = file.query_row(made, [&name], |row| row.get(0)).unwrap();
        file.execute_batch(&format!("DROP TRIGGER {name}")).unwrap();
        assert_eq!(problems().await, [format!("the trigger {name} is missing")]);
        file.execute_batch(&made.replacen("WHEN ", "WHEN 0 AND ", 1)).unwrap();
        assert_eq!(problems().await, [format!("the trigger {name} was changed")]);
        file.execute_batch(&format!("DROP TRIGGER {name}; {made}")).unwrap();
        assert_eq!(problems().await, Vec::<String>::new());
    }
}
