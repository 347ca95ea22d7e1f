//! Dropping a week with the ledger's sweep against deleting its rows, and the effect on concurrent
//! claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax::backend::postgres::PgLedger;
use hapax::ledger::SweepSettings;
use hapax::{EventId, Guard, Operations};
use sqlx::PgPool;

use crate::harness::{Fallible, Goal, Line, Options, Report, quantile};
use crate::pg::{Schema, execute, fill_week, pool, this_week, week_table};

/// Tasks that claim during the sweep.
const CLAIMERS: usize = 64;
/// How long to watch claims at least, with and without a sweep.
const WATCH: Duration = Duration::from_secs(3);

/// Tasks that claim until stopped; measures the time of each claim in milliseconds.
struct Load {
    stop: Arc<AtomicBool>,
    tasks: tokio::task::JoinSet<hapax::Result<Vec<f64>>>,
}

impl Load {
    fn start(guard: &Guard<PgLedger>) -> Self {
        let (stop, mut tasks) = (Arc::new(AtomicBool::new(false)), tokio::task::JoinSet::new());
        for _ in 0..CLAIMERS {
            let (guard, stop) = (guard.clone(), Arc::clone(&stop));
            tasks.spawn(async move {
                let mut took = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    let _ = guard.mark_processed(EventId::now_v7(), None).await?.is_claimed();
                    took.push(start.elapsed().as_secs_f64() * 1e3);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(took)
            });
        }
        Load { stop, tasks }
    }

    async fn stop(mut self) -> Fallible<Vec<f64>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        while let Some(took) = self.tasks.join_next().await {
            all.extend(took??);
        }
        Ok(all)
    }
}

/// The results of one round.
struct Round {
    sweep: f64,
    delete: f64,
    /// With the VACUUM that makes room again.
    vacuumed: f64,
    before: f64,
    meanwhile: f64,
}

async fn round(
    on: &PgPool,
    schema: &Schema,
    guard: &Guard<PgLedger>,
    week: i64,
    rows: u64,
) -> Fallible<Round> {
    let s = &schema.name;
    fill_week(on, s, week, rows).await?;
    let table = week_table(on, s, week).await?;
    execute(on, format!("vacuum (analyze) {table}")).await?;
    // The rival deletes the same rows from a table of its own.
    execute(on, format!("create table {s}.rival (like {table} including all)")).await?;
    execute(on, format!("insert into {s}.rival select * from {table}")).await?;
    execute(on, format!("vacuum (analyze) {s}.rival")).await?;
    execute(on, "checkpoint").await?;
    let start = Instant::now();
    execute(on, format!("delete from {s}.rival")).await?;
    let delete = start.elapsed().as_secs_f64();
    execute(on, format!("vacuum {s}.rival")).await?;
    let vacuumed = start.elapsed().as_secs_f64();
    execute(on, format!("drop table {s}.rival")).await?;
    // Pretend that the last write to the week is longer ago than the retention.
    execute(on, format!("delete from {s}.touch where week = {week}")).await?;
    execute(on, format!("insert into {s}.touch values ({week}, now() - interval '20 days')")).await?;
    execute(on, "checkpoint").await?;
    let settings =
        SweepSettings { retention: Duration::from_secs(7 * 86_400), batch_max: 10_000, dry_run: false };
    let load = Load::start(guard);
    tokio::time::sleep(WATCH).await;
    let before = quantile(&load.stop().await?, 0.99);
    let load = Load::start(guard);
    let start = Instant::now();
    let swept = guard.ledger().sweep(settings).await?;
    let sweep = start.elapsed().as_secs_f64();
    tokio::time::sleep(WATCH.saturating_sub(start.elapsed())).await;
    let meanwhile = quantile(&load.stop().await?, 0.99);
    if swept.weeks.len() != 1 {
        return Err(format!("the sweep dropped {} weeks instead of one", swept.weeks.len()).into());
    }
    Ok(Round { sweep, delete, vacuumed, before, meanwhile })
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let on = pool(2).await?;
    let schema = Schema::fresh(&on).await?;
    let guard = schema.guard(4).await?;
    let rows = options.held(10_000_000);
    let mut rounds = Vec::new();
    for number in 0..options.rounds {
        let week = this_week() - 10 - number as i64;
        rounds.push(round(&on, &schema, &guard, week, rows).await?);
    }
    drop(guard);
    schema.drop().await?;
    let line = |name: String, of: fn(&Round) -> f64| Line::new(name, rounds.iter().map(of).collect());
    let lines = vec![
        line(format!("sweep of a week of {rows} rows, s"), |round| round.sweep),
        line("DELETE of the same rows, and VACUUM, s".into(), |round| round.vacuumed),
        line(format!("p99 of claims, {CLAIMERS} tasks, no sweep, ms"), |round| round.before),
        line(format!("p99 of claims, {CLAIMERS} tasks, from the sweep's start on, ms"), |round| {
            round.meanwhile
        }),
        line("DELETE of the same rows without VACUUM, s".into(), |round| round.delete),
    ];
    Ok(Report {
        title: "dropping a week, PostgreSQL".into(),
        unit: "as said",
        goals: vec![
            Goal::at_least(
                "DELETE's and VACUUM's time / sweep's time",
                lines[1].median() / lines[0].median(),
                100.0,
            ),
            Goal::at_most("p99 of claims, with / without sweep", lines[3].median() / lines[2].median(), 2.0),
        ],
        notes: Vec::new(),
        lines,
    })
}
