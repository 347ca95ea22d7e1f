//! PostgreSQL claims: the plain per-event API under many tasks, against what a user would write
//! instead.

use hapax::backend::postgres::PgLedger;
use hapax::{EventId, Guard};

use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave, is_new};
use crate::pg::{Schema, ids, pool};
use crate::rivals::{self, CheckThenInsert, Into};

/// Tasks that each claim one event after the other.
pub const TASKS: usize = 2000;

/// Claims per second through the plain per-event API.
pub async fn each(guard: &Guard<PgLedger>, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    // The tasks work through the ids in parallel, as they would through a topic.
    by_tasks(TASKS, ids, move |id| {
        let guard = guard.clone();
        async move { is_new(guard.mark_processed(id, None).await?.is_claimed()) }
    })
    .await
}

/// Claims per second through the batch API, two batches of 1000 at a time.
pub async fn many(guard: &Guard<PgLedger>, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    let batches: Vec<_> = ids.chunks(1000).map(<[_]>::to_vec).collect();
    let batch = ids.len() as f64 / batches.len() as f64;
    let reached = by_tasks(2, batches, move |batch| {
        let guard = guard.clone();
        async move {
            for outcome in guard.claim_many(&batch).await? {
                is_new(outcome?.is_claimed())?;
            }
            Ok(())
        }
    });
    Ok(reached.await? * batch)
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let two = pool(2).await?;
    let (ours, theirs) = (Schema::fresh(&two).await?, Schema::fresh(&two).await?);
    let doubled = Schema::fresh(&two).await?;
    rivals::rival_table(&theirs, &two).await?;
    rivals::doubled_table(&doubled, &two).await?;
    rivals::bare_table(&theirs, &two).await?;
    rivals::twin_table(&theirs, &two).await?;
    let guard = ours.guard(4).await?;
    let (events, few) = (options.events(100_000), options.events(10_000));
    let (rival, twice) = (CheckThenInsert::new(&theirs), CheckThenInsert::new(&doubled));
    let (rivals_pool, workers) = rivals::best_pool(&rival, few).await?;
    let batch = rivals::best_batch(&two, &theirs, events / 2).await?;
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, per event, {TASKS} tasks"), || each(&guard, ids(events))),
            Contestant::new("hapax, batches of 1000, two at a time", || many(&guard, ids(events))),
            Contestant::new(format!("check-then-insert per event, {workers} connections"), || {
                rivals::per_event(&rivals_pool, workers, ids(few), rival.clone())
            }),
            Contestant::new(format!("multi-row INSERT of the key alone, {batch} a batch"), || {
                rivals::multi_row(&two, &theirs, Into::Bare, batch, ids(events))
            }),
            Contestant::new(format!("multi-row INSERT of the ledger's row, {batch} a batch"), || {
                rivals::multi_row(&two, &theirs, Into::Twin, batch, ids(events))
            }),
            Contestant::new("COPY of the key alone, 5000 a batch (no dedup)", || {
                rivals::copy(&two, &theirs, 5000, ids(events))
            }),
            Contestant::new(
                format!("check-then-insert with its unique index twice, {workers} connections"),
                || rivals::per_event(&rivals_pool, workers, ids(few), twice.clone()),
            ),
        ],
    )
    .await?;
    drop(guard);
    ours.drop().await?;
    theirs.drop().await?;
    doubled.drop().await?;
    let over = |rival: usize| lines[0].median() / lines[rival].median();
    Ok(Report {
        title: "claims on PostgreSQL".into(),
        unit: "claims/s",
        goals: vec![
            Goal::at_least("per event / check-then-insert", over(2), 12.0),
            Goal::at_least("per event / multi-row INSERT of the key alone", over(3), 0.8),
            Goal::at_least("per event / multi-row INSERT of the ledger's row", over(4), 0.9),
            Goal::at_least("per event / batch API", over(1), 0.8),
        ],
        notes: vec![format!(
            "the second unique index costs check-then-insert {:.2}× of its speed",
            lines[6].median() / lines[2].median()
        )],
        lines,
    })
}
