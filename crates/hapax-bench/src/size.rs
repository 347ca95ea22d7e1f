//! Bytes on disk, WAL bytes and dead rows per event, against the table and indexes of a
//! check-then-insert library.

use sqlx::PgPool;

use crate::claims::each;
use crate::harness::{Fallible, Goal, Line, Options, Report};
use crate::lease::lease_done;
use crate::pg::{Schema, execute, ids, number, pool, this_week, week_table};
use crate::rivals::{self, CheckThenInsert};

/// The cost of an event.
#[derive(Debug, Clone, Copy)]
struct Cost {
    disk: f64,
    wal: f64,
    dead: f64,
}

async fn cost(
    on: &PgPool,
    table: &str,
    events: usize,
    work: impl Future<Output = Fallible<f64>>,
) -> Fallible<Cost> {
    // Begin right after a checkpoint, so that all contestants pay alike for full pages in the WAL.
    execute(on, "checkpoint").await?;
    let lsn = "select (pg_current_wal_insert_lsn() - '0/0')::bigint";
    let before = number(on, lsn).await?;
    work.await?;
    let wal = number(on, lsn).await? - before;
    let disk = number(on, format!("select pg_total_relation_size('{table}')")).await?;
    // Connections report their counters only after being idle for a while.
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    let dead = number(on, format!("select pg_stat_get_dead_tuples('{table}'::regclass)")).await?;
    let per = |value: i64| value as f64 / events as f64;
    Ok(Cost { disk: per(disk), wal: per(wal), dead: per(dead) })
}

/// Runs the bench. Each round repeats the measurement in fresh schemas.
pub async fn run(options: &Options) -> Fallible<Report> {
    let on = pool(2).await?;
    let events = options.events(100_000);
    let mut costs: [Vec<Cost>; 3] = Default::default();
    for _ in 0..options.rounds {
        for (at, costs) in costs.iter_mut().enumerate() {
            let schema = Schema::fresh(&on).await?;
            let found = match at {
                0 => {
                    let guard = schema.guard(4).await?;
                    let table = week_table(&on, &schema.name, this_week()).await?;
                    execute(&on, format!("alter table {table} set (autovacuum_enabled = off)")).await?;
                    cost(&on, &table, events, each(&guard, ids(events))).await?
                }
                1 => {
                    let guard = schema.leasing_guard(4).await?;
                    let table = week_table(&on, &schema.name, this_week()).await?;
                    execute(&on, format!("alter table {table} set (autovacuum_enabled = off)")).await?;
                    cost(&on, &table, events, lease_done(&guard, ids(events))).await?
                }
                _ => {
                    rivals::rival_table(&schema, &on).await?;
                    let many = pool(16).await?;
                    let table = format!("{}.processed_events", schema.name);
                    execute(&on, format!("alter table {table} set (autovacuum_enabled = off)")).await?;
                    let rival = CheckThenInsert::new(&schema);
                    cost(&on, &table, events, rivals::per_event(&many, 16, ids(events), rival)).await?
                }
            };
            costs.push(found);
            schema.drop().await?;
        }
    }
    let names = ["hapax, a claim", "hapax, lease + done", "check-then-insert"];
    let mut lines = Vec::new();
    for (name, costs) in names.iter().zip(&costs) {
        let line = |what: &str, of: fn(&Cost) -> f64| {
            Line::new(format!("{name}: {what}"), costs.iter().map(of).collect())
        };
        lines.push(line("bytes on disk", |cost| cost.disk));
        lines.push(line("WAL bytes", |cost| cost.wal));
        lines.push(line("dead rows", |cost| cost.dead));
    }
    let ratio = |a: usize, b: usize| lines[a].median() / lines[b].median();
    Ok(Report {
        title: "what an event costs, PostgreSQL".into(),
        unit: "per event",
        goals: vec![
            Goal::at_most("bytes on disk, claim / check-then-insert", ratio(0, 6), 0.6),
            Goal::at_most("bytes on disk, lease + done / check-then-insert", ratio(3, 6), 0.6),
        ],
        notes: vec![
            format!(
                "WAL: a claim {:.2}× and lease + done {:.2}× of check-then-insert's",
                ratio(1, 7),
                ratio(4, 7)
            ),
            format!("{events} events each, autovacuum off, UUIDv7; the ledger's claims by per-event calls"),
        ],
        lines,
    })
}
