//! One claim at a time against a bare `INSERT … ON CONFLICT DO NOTHING` in its own transaction.

use std::sync::Arc;
use std::time::Instant;

use hapax::EventId;
use sqlx::AssertSqlSafe;

use crate::harness::{Fallible, Goal, Line, Options, Report, quantile};
use crate::pg::{Schema, pool};
use crate::rivals;

/// Runs the bench: the two alternate claim by claim, so that both see the same disk.
pub async fn run(options: &Options) -> Fallible<Report> {
    // In a task, as handlers run: on the runtime's main thread every answer would cost a thread
    // switch.
    let options = *options;
    tokio::spawn(async move { turns(&options).await }).await?
}

async fn turns(options: &Options) -> Fallible<Report> {
    let one = pool(1).await?;
    let (ours, theirs) = (Schema::fresh(&one).await?, Schema::fresh(&one).await?);
    rivals::bare_table(&theirs, &one).await?;
    let guard = ours.guard(1).await?;
    let sql: Arc<str> = format!(
        "insert into {}.bare (at, scope, id) values (clock_timestamp(), 1, $1) on conflict do nothing",
        theirs.name
    )
    .into();
    let mut medians = [Vec::new(), Vec::new()];
    for round in 0..=options.rounds {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..options.events(1000) {
            let (a, b) = (EventId::now_v7(), EventId::now_v7());
            let start = Instant::now();
            let claimed = guard.mark_processed(&a, None).await?.is_claimed();
            times[0].push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            sqlx::query(AssertSqlSafe(Arc::clone(&sql))).bind(&*b.key()).execute(&one).await?;
            times[1].push(start.elapsed().as_secs_f64() * 1e6);
            if !claimed {
                return Err("a new id was known".into());
            }
        }
        for (medians, times) in medians.iter_mut().zip(&times) {
            if round > 0 {
                medians.push(quantile(times, 0.5));
            }
        }
    }
    drop(guard);
    ours.drop().await?;
    theirs.drop().await?;
    let [subject, rival] = medians;
    let lines =
        vec![Line::new("hapax, a lone claim", subject), Line::new("bare INSERT … ON CONFLICT", rival)];
    let ratio = lines[0].median() / lines[1].median();
    Ok(Report {
        title: "a lone claim on PostgreSQL".into(),
        unit: "µs, median of each round",
        goals: vec![Goal::at_most("lone claim / bare INSERT", ratio, 1.12)],
        lines,
        notes: Vec::new(),
    })
}
