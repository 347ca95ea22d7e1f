//! Lease and done against two bare statements per event, in a fresh week and in a full one.

use hapax::backend::postgres::PgLedger;
use hapax::{EventId, Guard, Outcome};

use crate::claims::TASKS;
use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave};
use crate::pg::{Schema, execute, fill_week, ids, pool, this_week, v7_sql};
use crate::rivals::{self, InsertThenUpdate};

/// Leases in a batch that is made by hand.
const BATCH: usize = 1000;

/// Leases settled as done per second, through the plain per-event API.
pub async fn lease_done(guard: &Guard<PgLedger>, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    by_tasks(TASKS, ids, move |id| {
        let guard = guard.clone();
        async move {
            match guard.lease(id).await? {
                Outcome::First(lease) => lease.done().await,
                other => Err(hapax::Error::Corrupt(format!("a new id was {}", other.name()))),
            }
        }
    })
    .await
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    Ok(vec![round_of(options, 0).await?, round_of(options, options.held(1_000_000)).await?])
}

async fn round_of(options: &Options, held: u64) -> Fallible<Report> {
    let two = pool(2).await?;
    let theirs = Schema::fresh(&two).await?;
    rivals::bare_table(&theirs, &two).await?;
    let full = Schema::fresh(&two).await?;
    let guard = full.leasing_guard(4).await?;
    if held > 0 {
        fill_week(&two, &full.name, this_week(), held).await?;
        let id = v7_sql("extract(epoch from now()) * 1000 - 6e5 + i / 1e4");
        execute(
            &two,
            format!(
                "insert into {}.bare (at, scope, id) select now(), 1, {id} from generate_series(1, {held}) i",
                theirs.name
            ),
        )
        .await?;
    }
    let (events, few) = (options.events(50_000), options.events(10_000));
    let bare = InsertThenUpdate::new(&theirs);
    let (bares, workers) = rivals::best_pool(&bare, few).await?;
    let (guard, on) = (&guard, &two);
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, lease + done per event, {TASKS} tasks"), move || async move {
                if held > 0 {
                    return lease_done(guard, ids(events)).await;
                }
                // A week without statistics each time.
                let fresh = Schema::fresh(on).await?;
                let guard = fresh.leasing_guard(4).await?;
                let reached = lease_done(&guard, ids(events)).await?;
                drop(guard);
                fresh.drop().await?;
                Ok(reached)
            }),
            Contestant::new(format!("INSERT, then UPDATE per event, {workers} connections"), || {
                rivals::per_event(&bares, workers, ids(few), bare.clone())
            }),
            Contestant::new(format!("the same by hand in batches of {BATCH}, two at a time"), || {
                rivals::lease_batches(on, &theirs, BATCH, ids(events))
            }),
        ],
    )
    .await?;
    full.drop().await?;
    theirs.drop().await?;
    let ratio = lines[0].median() / lines[1].median();
    let by_hand = lines[0].median() / lines[2].median();
    let week = if held == 0 { "a fresh week".to_owned() } else { format!("a week of {held} rows") };
    Ok(Report {
        title: format!("lease + done on PostgreSQL, {week}"),
        unit: "events/s",
        goals: vec![
            Goal::at_least("lease + done / two bare statements", ratio, 15.0),
            Goal::at_least("lease + done / by hand in batches", by_hand, 0.7),
        ],
        lines,
        notes: Vec::new(),
    })
}
