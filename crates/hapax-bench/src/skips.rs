//! What the log of skips costs: claims of which all, or one in ten, are repeats, with the log and without.
//!
//! The log is written once a second, beside the claims. A round is therefore several seconds long, and ends with a
//! write that is timed too: nothing of it falls into the next contestant's round. A third contestant has no log either:
//! the ratio of the two without one is what this bench cannot tell apart.

use std::time::{Duration, Instant};

use hapax::backend::sqlite::SqliteLedger;
use hapax::ledger::Settings;
use hapax::{EventId, Guard, Ledger, Outcome};

use crate::claims::TASKS;
use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave, is_new};
use crate::pg::{Schema, ids, pool};

/// How long the claims of a round take, at least.
const ROUND: Duration = Duration::from_secs(5);
const ROUND_QUICK: Duration = Duration::from_millis(1500);

/// Which of the contestants has the log.
const LOGS: [bool; 3] = [true, false, false];

/// Runs the bench on PostgreSQL and on SQLite.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let one = pool(1).await?;
    let (mut schemas, mut guards) = (Vec::new(), Vec::new());
    for log in LOGS {
        let schema = Schema::fresh(&one).await?;
        guards.push(schema.logging_guard(8, log).await?);
        schemas.push(schema);
    }
    let mut reports = compare("PostgreSQL", &guards, options.events(50_000), options).await?;
    drop(guards);
    for schema in schemas {
        schema.drop().await?;
    }
    let folder = tempfile::tempdir_in(".")?;
    let mut guards = Vec::new();
    for (at, log) in LOGS.into_iter().enumerate() {
        let ledger = SqliteLedger::open(folder.path().join(format!("{at}.db")), Settings::default())?;
        let guard =
            Guard::builder(ledger).scope("bench").with(|settings| settings.log_skips = log).build()?;
        guards.push(guard);
    }
    reports.extend(compare("SQLite", &guards, options.events(50_000), options).await?);
    Ok(reports)
}

/// A known id, or a new one.
type Delivery = (EventId, bool);

async fn compare<L: Ledger>(
    backend: &str,
    guards: &[Guard<L>],
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
        let names = ["with the log of skips", "without", "without, once more"];
        let contestants = names.into_iter().zip(guards);
        let contestants = contestants
            .map(|(name, guard)| Contestant::new(name, move || claim(guard, deliveries, options.quick)));
        let lines = interleave(options.rounds, contestants.collect()).await?;
        let ratio = lines[0].median() / lines[1].median();
        let control = lines[2].median() / lines[1].median();
        reports.push(Report {
            title: format!("claims on {backend}, {what}"),
            unit: "claims/s",
            goals: vec![Goal::at_least("with the log / without", ratio, 0.97)],
            lines,
            notes: vec![format!("without, twice: {control:.2}×, a difference that means nothing")],
        });
    }
    Ok(reports)
}

/// Claims for the time of a round, then writes what is left of the log.
async fn claim<L: Ledger>(
    guard: &Guard<L>,
    deliveries: &(dyn Fn() -> Vec<Delivery> + Sync),
    is_quick: bool,
) -> Fallible<f64> {
    let round = if is_quick { ROUND_QUICK } else { ROUND };
    let (mut claims, mut spent) = (0, Duration::ZERO);
    while spent < round {
        let deliveries = deliveries();
        let count = deliveries.len();
        let guard = guard.clone();
        let start = Instant::now();
        by_tasks(TASKS, deliveries, move |(id, is_known)| {
            let guard = guard.clone();
            async move {
                match (guard.try_claim(&id).await?, is_known) {
                    (Outcome::First(_), false) | (Outcome::Duplicate(_), true) => Ok(()),
                    (other, _) => Err(hapax::Error::Corrupt(format!("a claim was {}", other.name()))),
                }
            }
        })
        .await?;
        spent += start.elapsed();
        claims += count;
    }
    let start = Instant::now();
    guard.skip_log().flush().await?;
    spent += start.elapsed();
    Ok(claims as f64 / spent.as_secs_f64())
}
