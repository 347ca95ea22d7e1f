//! The operations of a check-then-insert library: ours against its statements, with the same number
//! of tasks.

use std::sync::Arc;

use hapax::backend::postgres::PgLedger;
use hapax::guard::ProcessingResult;
use hapax::{EventId, Guard};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, PgPool};

use crate::harness::{Contestant, Fallible, Goal, Options, Report, by_tasks, interleave};
use crate::pg::{Schema, ids, pool};
use crate::rivals::{self, CheckThenInsert, PerEvent};

/// Connections per side: that library's usual pool.
const CONNECTIONS: usize = 50;
/// Concurrent callers on both sides.
const TASKS: usize = 500;

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

async fn ours(guard: &Guard<PgLedger>, op: Op, ids: Vec<EventId>) -> Fallible<f64> {
    let guard = guard.clone();
    by_tasks(TASKS, ids, move |id| {
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
    rivals::per_call(&rivals_pool, TASKS, known.clone(), CheckThenInsert::new(&theirs)).await?;
    ours(&guard, Op::MarkProcessed, known.clone()).await?;
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
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, {TASKS} tasks, {CONNECTIONS} connections"), || {
                ours(guard, op, next())
            }),
            Contestant::new(
                format!("check-then-insert's statements, {TASKS} tasks, {CONNECTIONS} connections"),
                || rivals::per_call(rivals_pool, TASKS, next(), rival.clone()),
            ),
        ],
    )
    .await?;
    let ratio = lines[0].median() / lines[1].median();
    Ok(Report {
        title: format!("{name} on PostgreSQL"),
        unit: "calls/s",
        goals: vec![Goal::at_least(format!("{name} / check-then-insert"), ratio, 1.0)],
        lines,
        notes: Vec::new(),
    })
}
