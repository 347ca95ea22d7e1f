//! Claims in a ledger with many rows against claims in one with few.

use hapax::Guard;
use hapax::backend::postgres::PgLedger;

use crate::claims::each;
use crate::harness::{Contestant, Fallible, Goal, Options, Report, interleave};
use crate::pg::{Schema, execute, fill_week, ids, pool, this_week};

/// The number of weeks with rows: the current one and those before it.
const WEEKS: u64 = 5;

async fn ledger(schema: &Schema, rows: u64) -> Fallible<Guard<PgLedger>> {
    let on = pool(1).await?;
    let guard = schema.guard(4).await?;
    for back in 0..WEEKS {
        fill_week(&on, &schema.name, this_week() - back as i64, rows / WEEKS).await?;
    }
    execute(&on, "checkpoint").await?;
    Ok(guard)
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let on = pool(1).await?;
    let (few, many) = (options.held(50_000_000) / 50, options.held(50_000_000));
    let (small, large) = (Schema::fresh(&on).await?, Schema::fresh(&on).await?);
    let (with_few, with_many) = (ledger(&small, few).await?, ledger(&large, many).await?);
    let events = options.events(100_000);
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, per event, {many} rows held"), || each(&with_many, ids(events))),
            Contestant::new(format!("hapax, per event, {few} rows held"), || each(&with_few, ids(events))),
        ],
    )
    .await?;
    drop((with_few, with_many));
    small.drop().await?;
    large.drop().await?;
    let ratio = lines[0].median() / lines[1].median();
    Ok(Report {
        title: "claims with many rows held, PostgreSQL".into(),
        unit: "claims/s",
        goals: vec![Goal::at_least(format!("{many} rows / {few} rows"), ratio, 0.7)],
        lines,
        notes: vec![format!("rows lie in {WEEKS} weeks, the present one included; UUIDv7")],
    })
}
