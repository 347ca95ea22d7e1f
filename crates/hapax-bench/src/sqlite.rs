//! SQLite claims: the plain per-event API under many tasks, against hand-written prepared inserts.

use std::path::Path;
use std::time::Instant;

use hapax::backend::sqlite::SqliteLedger;
use hapax::ledger::Settings;
use hapax::{EventId, Guard};
use rusqlite::{Connection, params_from_iter};

use crate::claims::TASKS;
use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave, is_new};
use crate::pg::ids;

/// Rows per statement and transaction of the rival.
const BATCH: usize = 1000;

fn open(path: &Path) -> Fallible<Connection> {
    let connection = Connection::open(path)?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
         CREATE TABLE bare (scope INTEGER NOT NULL, id BLOB NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (scope, id))
           WITHOUT ROWID, STRICT;",
    )?;
    Ok(connection)
}

/// One prepared multi-row insert per transaction.
fn multi_row(connection: &Connection, ids: &[EventId]) -> Fallible<f64> {
    let start = Instant::now();
    for batch in ids.chunks(BATCH) {
        let values = vec!["(1, ?, 7)"; batch.len()].join(", ");
        let sql = format!("INSERT INTO bare (scope, id, at) VALUES {values} ON CONFLICT DO NOTHING");
        connection.prepare_cached(&sql)?.execute(params_from_iter(batch.iter().map(EventId::key)))?;
    }
    Ok(ids.len() as f64 / start.elapsed().as_secs_f64())
}

/// A commit per event.
fn one_by_one(connection: &Connection, ids: &[EventId]) -> Fallible<f64> {
    let start = Instant::now();
    let mut insert = connection
        .prepare_cached("INSERT INTO bare (scope, id, at) VALUES (1, ?1, 7) ON CONFLICT DO NOTHING")?;
    for id in ids {
        insert.execute([id.key()])?;
    }
    Ok(ids.len() as f64 / start.elapsed().as_secs_f64())
}

async fn each(guard: &Guard<SqliteLedger>, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    by_tasks(TASKS, ids, move |id| {
        let guard = guard.clone();
        async move { is_new(guard.mark_processed(id, None).await?.is_claimed()) }
    })
    .await
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let folder = tempfile::tempdir_in(".")?;
    let guard = Guard::builder(SqliteLedger::open(folder.path().join("ledger.db"), Settings::default())?)
        .scope("bench")
        .build()?;
    let batches = open(&folder.path().join("batches.db"))?;
    let singles = open(&folder.path().join("singles.db"))?;
    let (events, few) = (options.events(200_000), options.events(2000));
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, per event, {TASKS} tasks"), || each(&guard, ids(events))),
            Contestant::new(format!("one prepared {BATCH}-row INSERT per transaction"), || async {
                multi_row(&batches, &ids(events))
            }),
            Contestant::new("a commit per event", || async { one_by_one(&singles, &ids(few)) }),
        ],
    )
    .await?;
    let over = |rival: usize| lines[0].median() / lines[rival].median();
    Ok(Report {
        title: "claims on SQLite".into(),
        unit: "claims/s",
        goals: vec![
            Goal::at_least("per event / multi-row INSERT per transaction", over(1), 0.5),
            Goal::at_least("per event / a commit per event", over(2), 50.0),
        ],
        lines,
        notes: Vec::new(),
    })
}
