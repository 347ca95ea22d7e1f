//! What the log of skips costs: claims of which all, or one in ten, are repeats, with the log and without.

use hapax::backend::sqlite::SqliteLedger;
use hapax::ledger::Settings;
use hapax::{EventId, Guard, Ledger, Outcome};

use crate::claims::TASKS;
use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave, is_new};
use crate::pg::{Schema, ids, pool};

/// Runs the bench on PostgreSQL and on SQLite.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let one = pool(1).await?;
    let (with, without) = (Schema::fresh(&one).await?, Schema::fresh(&one).await?);
    let guards = [with.logging_guard(8, true).await?, without.logging_guard(8, false).await?];
    let mut reports = compare("PostgreSQL", &guards, options.events(50_000), options).await?;
    drop(guards);
    with.drop().await?;
    without.drop().await?;
    let folder = tempfile::tempdir_in(".")?;
    let open = |name: &str, log: bool| -> Fallible<Guard<SqliteLedger>> {
        let ledger = SqliteLedger::open(folder.path().join(name), Settings::default())?;
        Ok(Guard::builder(ledger).scope("bench").with(|settings| settings.log_skips = log).build()?)
    };
    let guards = [open("with.db", true)?, open("without.db", false)?];
    reports.extend(compare("SQLite", &guards, options.events(50_000), options).await?);
    Ok(reports)
}

/// A known id, or a new one.
type Delivery = (EventId, bool);

async fn compare<L: Ledger>(
    backend: &str,
    guards: &[Guard<L>; 2],
    events: usize,
    options: &Options,
) -> Fallible<Vec<Report>> {
    let known = ids(events);
    for guard in guards {
        let guard = guard.clone();
        let done = move |id: EventId| {
            let guard = guard.clone();
            async move { is_new(guard.mark_processed(id, None).await?.is_claimed()) }
        };
        by_tasks(TASKS, known.clone(), done).await?;
    }
    let all = || known.iter().map(|id| (id.clone(), true)).collect::<Vec<_>>();
    let some = || {
        let mut new = ids(events).into_iter();
        let delivery = |(at, id): (usize, &EventId)| match (at % 10, new.next()) {
            (1.., Some(new)) => (new, false),
            _ => (id.clone(), true),
        };
        known.iter().enumerate().map(delivery).collect::<Vec<_>>()
    };
    let mut reports = Vec::new();
    for (what, deliveries) in
        [("all are repeats", &all as &(dyn Fn() -> Vec<Delivery> + Sync)), ("one in ten is a repeat", &some)]
    {
        let lines = interleave(
            options.rounds,
            vec![
                Contestant::new("with the log of skips", || claim(&guards[0], deliveries())),
                Contestant::new("without", || claim(&guards[1], deliveries())),
            ],
        )
        .await?;
        let ratio = lines[0].median() / lines[1].median();
        reports.push(Report {
            title: format!("claims on {backend}, {what}"),
            unit: "claims/s",
            goals: vec![Goal::at_least("with the log / without", ratio, 0.97)],
            lines,
            notes: Vec::new(),
        });
    }
    Ok(reports)
}

async fn claim<L: Ledger>(guard: &Guard<L>, deliveries: Vec<Delivery>) -> Fallible<f64> {
    let guard = guard.clone();
    by_tasks(TASKS, deliveries, move |(id, is_known)| {
        let guard = guard.clone();
        async move {
            match (guard.try_claim(&id).await?, is_known) {
                (Outcome::First(_), false) | (Outcome::Duplicate(_), true) => Ok(()),
                (other, _) => Err(hapax::Error::Corrupt(format!("a claim was {}", other.name()))),
            }
        }
    })
    .await
}
