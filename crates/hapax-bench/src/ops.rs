//! The operations of a check-then-insert library: ours against its statements, with the same number
//! of tasks.

use std::sync::Arc;

use hapax::backend::postgres::PgLedger;
use hapax::guard::ProcessingResult;
use hapax::{EventId, Guard};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, PgPool};

use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, by_tasks, interleave};
use crate::pg::{Schema, ids, pool};
use crate::rivals::{self, CheckThenInsert, PerEvent};

/// Connections per side: that library's usual pool.
const CONNECTIONS: usize = 50;
/// Concurrent callers on both sides: many, and few, which leave little to gather.
const TASKS: [usize; 2] = [500, 32];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    IsProcessed,
    MarkProcessed,
    ProcessIfNew,
}

/// The library's statements for an operation.
#[derive(Debug, Clone)]
struct Statements {
    op: Op,
    check: Arc<str>,
    insert: Arc<str>,
    both: CheckThenInsert,
}

impl PerEvent for Statements {
    async fn run(&self, connection: &mut PgConnection, id: &EventId) -> sqlx::Result<()> {
        match self.op {
            Op::IsProcessed => {
                let _: bool = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.check)))
                    .bind(&*id.as_str())
                    .fetch_one(connection)
                    .await?;
                Ok(())
            }
            Op::MarkProcessed => sqlx::query(AssertSqlSafe(Arc::clone(&self.insert)))
                .bind(&*id.as_str())
                .bind(None::<&str>)
                .execute(connection)
                .await
                .map(drop),
            Op::ProcessIfNew => self.both.run(connection, id).await,
        }
    }
}

async fn ours(guard: &Guard<PgLedger>, op: Op, tasks: usize, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    by_tasks(tasks, ids, move |id| {
        let guard = guard.clone();
        async move {
            let fine = match op {
                Op::IsProcessed => guard.is_processed(&id).await?,
                Op::MarkProcessed => guard.mark_processed(&id, None).await?.is_claimed(),
                Op::ProcessIfNew => {
                    let result = guard.process_if_new(&id, || async { Ok::<(), String>(()) }).await?;
                    result == ProcessingResult::Success
                }
            };
            if fine {
                return Ok(());
            }
            Err(hapax::Error::Corrupt(format!("{op:?} of {id} came to the wrong answer")))
        }
    })
    .await
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let rivals_pool = pool(CONNECTIONS as u32).await?;
    let (mine, theirs) = (Schema::fresh(&rivals_pool).await?, Schema::fresh(&rivals_pool).await?);
    rivals::rival_table(&theirs, &rivals_pool).await?;
    let guard = mine.guard(CONNECTIONS as u32).await?;
    // Ids that both sides already know, for `is_processed`.
    let known = ids(options.events(10_000));
    rivals::per_call(&rivals_pool, TASKS[0], known.clone(), CheckThenInsert::new(&theirs)).await?;
    ours(&guard, Op::MarkProcessed, TASKS[0], known.clone()).await?;
    let mut reports = Vec::new();
    for op in [Op::IsProcessed, Op::MarkProcessed, Op::ProcessIfNew] {
        reports.push(compare(options, op, &guard, &rivals_pool, &theirs, &known).await?);
    }
    drop(guard);
    mine.drop().await?;
    theirs.drop().await?;
    Ok(reports)
}

async fn compare(
    options: &Options,
    op: Op,
    guard: &Guard<PgLedger>,
    rivals_pool: &PgPool,
    theirs: &Schema,
    known: &[EventId],
) -> Fallible<Report> {
    let name = match op {
        Op::IsProcessed => "is_processed",
        Op::MarkProcessed => "mark_processed",
        Op::ProcessIfNew => "process_if_new",
    };
    let rival = Statements {
        op,
        check: rivals::check_sql(&theirs.name),
        insert: rivals::insert_sql(&theirs.name),
        both: CheckThenInsert::new(theirs),
    };
    let next = || if op == Op::IsProcessed { known.to_vec() } else { ids(known.len()) };
    let (next, rival) = (&next, &rival);
    let contestants = TASKS.iter().flat_map(|&tasks| {
        [
            Contestant::new(format!("hapax, {tasks} tasks, {CONNECTIONS} connections"), move || {
                ours(guard, op, tasks, next())
            }),
            Contestant::new(
                format!("check-then-insert's statements, {tasks} tasks, {CONNECTIONS} connections"),
                move || rivals::per_call(rivals_pool, tasks, next(), rival.clone()),
            ),
        ]
    });
    let lines = interleave(options.rounds, contestants.collect()).await?;
    let goal = |(tasks, pair): (&usize, &[Line])| {
        let ratio = pair[0].median() / pair[1].median();
        Goal::at_least(format!("{name} / check-then-insert, {tasks} tasks"), ratio, 1.0)
    };
    Ok(Report {
        title: format!("{name} on PostgreSQL"),
        unit: "calls/s",
        goals: TASKS.iter().zip(lines.chunks(2)).map(goal).collect(),
        lines,
        notes: Vec::new(),
    })
}
