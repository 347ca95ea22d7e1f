//! The journal in PostgreSQL: what only several transactions, or a server, can show.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::cluster;
use crate::support::postgres as support;
use std::time::{Duration, Instant};

use crate::support::postgres::{Random, ask, fresh_schema, pool, pool_to, run, until, until_waiting, url};
use async_trait::async_trait;
use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
use hapax::journal::{
    Append, Checkpoint, Expected, Journal, JournalSettings, JournalSweep, Leadership, Placing, Position,
    RelayStore as _, Stored,
};
use hapax::ledger::Token;
use hapax::testing::journal::JournalHarness;
use hapax::{Aggregate, Error, Event, EventId, Owner, RelayName, Tenant};
use sqlx::{Executor as _, PgPool};

fn settings(schema: &str) -> PgJournalSettings {
    let mut settings = PgJournalSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings
}

async fn journal_on(pool: PgPool) -> PgJournal {
    PgJournal::with_pool(pool, settings(&fresh_schema())).await.expect("a fresh journal")
}

async fn journal() -> PgJournal {
    journal_on(pool(12).await).await
}

struct PgJournalHarness {
    pool: PgPool,
    schema: String,
}

impl PgJournalHarness {
    async fn new() -> Self {
        PgJournalHarness { pool: pool(12).await, schema: fresh_schema() }
    }
}

#[async_trait]
impl JournalHarness for PgJournalHarness {
    type Journal = PgJournal;

    async fn open(&self, journal: JournalSettings) -> PgJournal {
        let mut all = settings(&self.schema);
        all.journal = journal;
        PgJournal::with_pool(self.pool.clone(), all).await.expect("the journal opens")
    }
}

hapax::journal_conformance!(postgres, PgJournalHarness::new().await);

fn event(id: &str) -> Event {
    Event::new(EventId::new(id).unwrap()).payload(format!("{{\"id\": \"{id}\"}}"))
}

fn append(aggregate: &str, expected: Expected, ids: &[&str]) -> Append {
    Append::new(Aggregate::new(aggregate).unwrap(), expected, ids.iter().map(|id| event(id)))
}

fn ids(events: &[Stored]) -> Vec<String> {
    events.iter().map(|stored| stored.event.id.to_string()).collect()
}

/// Reads on until there is nothing more to be had at once.
async fn follow(journal: &PgJournal, after: &mut Position) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let batch = journal.read(after, 7).await.unwrap();
        *after = batch.next;
        all.extend(ids(&batch.events));
        if batch.events.is_empty() {
            return all;
        }
    }
}

#[tokio::test]
async fn t40_a_slow_writer_is_never_skipped() {
    let journal = journal().await;
    let mut early = journal.pool().begin().await.unwrap();
    let drawn = journal.append_in(&mut early, &append("a", Expected::New, &["early"])).await.unwrap();
    let late = journal.append(&append("b", Expected::New, &["late"])).await.unwrap();
    assert!(late.placed[0].position > drawn.placed[0].position, "the first to draw is the second to commit");
    let mut after = Position::START;
    let batch = journal.read(&after, 10).await.unwrap();
    assert!(batch.events.is_empty() && batch.at_hole, "{batch:?}");
    assert_eq!(batch.next, after, "nobody has passed the hole");
    let waiting = tokio::spawn({
        let journal = journal.clone();
        async move { journal.wait(&Position::START, Duration::from_secs(60)).await }
    });
    early.commit().await.unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(follow(&journal, &mut after).await, ["early", "late"]);
}

/// Who began first may write last: what counts is the position, not the transaction's number.
#[tokio::test]
async fn t40_the_order_is_that_of_positions_not_of_transactions() {
    let journal = journal().await;
    let mut first = journal.pool().begin().await.unwrap();
    sqlx::query("select pg_current_xact_id()").execute(&mut *first).await.unwrap(); // its number is the lower one
    let _ = journal.append(&append("b", Expected::New, &["b"])).await.unwrap();
    let _ = journal.append_in(&mut first, &append("a", Expected::New, &["a"])).await.unwrap();
    first.commit().await.unwrap();
    let mut after = Position::START;
    for id in ["b", "a"] {
        let batch = journal.read(&after, 1).await.unwrap();
        let ids: Vec<_> = batch.events.iter().map(|stored| stored.event.id.to_string()).collect();
        assert_eq!(ids, [id]);
        after = batch.next;
    }
}

/// The grants that docs/sql.md gives a relay are enough to relay, and a sweep needs one more.
#[tokio::test]
async fn a_role_with_the_documented_grants_relays_and_sweeps() {
    let (admin, schema, role) = (pool(2).await, fresh_schema(), fresh_schema());
    let owned = PgJournal::with_pool(admin.clone(), settings(&schema)).await.unwrap();
    let _ = owned.append(&append("a", Expected::New, &["a1", "a2"])).await.unwrap();
    let docs = include_str!("../../docs/sql.md");
    let from = docs.find("grant usage on schema hapax to relay;").expect("the relay's grants");
    let grants = docs[from..].split("```").next().unwrap();
    let here = |sql: &str| {
        let sql = sql.replace("schema hapax", &format!("schema {schema}"));
        sql.replace("hapax.", &format!("{schema}.")).replace("to relay", &format!("to {role}"))
    };
    run(&admin, format!("create role {role}")).await;
    for grant in here(grants).lines().filter(|line| !line.is_empty()) {
        run(&admin, grant.to_owned()).await;
    }
    let become_it = format!("set role {role}");
    let its = sqlx::postgres::PgPoolOptions::new().max_connections(2).after_connect(move |connection, _| {
        let become_it = become_it.clone();
        Box::pin(async move { connection.execute(sqlx::AssertSqlSafe(become_it)).await.map(|_| ()) })
    });
    let mut checked = settings(&schema);
    checked.migrate = hapax::config::Migrate::Check;
    let journal = PgJournal::with_pool(its.connect(&url()).await.unwrap(), checked).await.unwrap();
    let (name, by) = (RelayName::new("main").unwrap(), Owner::new("ada").unwrap());
    let answer = journal.acquire_leadership(&name, &by, Duration::from_secs(60)).await.unwrap();
    let Leadership::Acquired { token, mut checkpoint } = answer else { panic!("{answer:?}") };
    let batch = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!(batch.events.len(), 2);
    journal.wait(&batch.next, Duration::from_millis(1)).await.unwrap();
    checkpoint.position = batch.next;
    journal.save(&name, token, &checkpoint).await.unwrap();
    journal.renew_leadership(&name, token, Duration::from_secs(60)).await.unwrap();
    assert_eq!(
        journal.read_aggregate(None, &Aggregate::new("a").unwrap(), 1, 10).await.unwrap().events.len(),
        2
    );
    journal.rewind(&name, &checkpoint, Some(token)).await.unwrap();
    let all = JournalSweep::new(Duration::ZERO);
    let error = journal.sweep(&all).await.unwrap_err();
    assert!(error.chain().contains("permission denied"), "{}", error.chain());
    run(&admin, format!("grant delete on {schema}.journal to {role}")).await;
    assert_eq!(journal.sweep(&all).await.unwrap(), 2);
    journal.pool().close().await;
    run(&admin, format!("drop owned by {role}")).await;
    run(&admin, format!("drop role {role}")).await;
}

/// A journal with three published events, the relay that published them and the token it leads with.
async fn three_published() -> (PgJournal, RelayName, Token, Checkpoint) {
    let journal = journal().await;
    let _ = journal.append(&append("a", Expected::New, &["a1", "a2", "a3"])).await.unwrap();
    let (name, by) = (RelayName::new("main").unwrap(), Owner::new("ada").unwrap());
    let answer = journal.acquire_leadership(&name, &by, Duration::from_secs(60)).await.unwrap();
    let Leadership::Acquired { token, mut checkpoint } = answer else { panic!("{answer:?}") };
    checkpoint.position = Position::of(3);
    journal.save(&name, token, &checkpoint).await.unwrap();
    (journal, name, token, checkpoint)
}

/// A sweep that takes long, here because a row that it removes is locked, keeps the relay neither from its leadership nor
/// from its checkpoint. Only what would put a relay back waits for it.
#[tokio::test]
async fn t82_a_slow_sweep_costs_no_relay_its_leadership() {
    let (journal, name, token, checkpoint) = three_published().await;
    let s = journal.schema().to_owned();
    let mut foreign = journal.pool().begin().await.unwrap();
    foreign
        .execute(sqlx::AssertSqlSafe(format!("select from {s}.journal where position = 2 for update")))
        .await
        .unwrap();
    let sweeping = tokio::spawn({
        let journal = journal.clone();
        async move { journal.sweep(&JournalSweep::new(Duration::ZERO)).await }
    });
    until_waiting(journal.pool(), &format!("delete from {s}.journal")).await;
    let kept = async {
        journal.renew_leadership(&name, token, Duration::from_secs(60)).await?;
        journal.save(&name, token, &checkpoint).await
    };
    tokio::time::timeout(Duration::from_secs(120), kept)
        .await
        .expect("a sweep is in no relay's way")
        .unwrap();
    let rewinding = tokio::spawn({
        let (journal, name) = (journal.clone(), name.clone());
        async move { journal.rewind(&name, &Checkpoint::start(journal.id()), None).await }
    });
    until_waiting(journal.pool(), &format!("{s}.journal_relay where relay = $1 for update")).await;
    foreign.rollback().await.unwrap();
    assert_eq!(sweeping.await.unwrap().unwrap(), 3);
    assert_eq!(rewinding.await.unwrap().unwrap().unwrap().position, Position::of(3));
}

/// Of two sweeps that find the same events each counts what it removed itself.
#[tokio::test]
async fn j11_two_sweeps_at_once_count_each_event_once() {
    let (journal, ..) = three_published().await;
    let s = journal.schema().to_owned();
    let mut foreign = journal.pool().begin().await.unwrap();
    let lock = format!("select from {s}.journal where position = 1 for update");
    foreign.execute(sqlx::AssertSqlSafe(lock)).await.unwrap();
    let sweeps = [(); 2].map(|()| {
        let journal = journal.clone();
        tokio::spawn(async move { journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap() })
    });
    until("both have found them", async || {
        let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like";
        ask::<i64>(journal.pool(), format!("{waiting} '%delete from {s}.journal%'")).await == 2
    })
    .await;
    foreign.rollback().await.unwrap();
    let mut swept = 0;
    for sweep in sweeps {
        swept += sweep.await.unwrap();
    }
    assert_eq!(swept, 3);
}

/// Steps a sweep until it stands still in its transaction, with the relays locked. False: it has ended before that was seen.
async fn stands_still(
    watching: &PgPool,
    schema: &str,
    sweeping: &mut (impl Future<Output = hapax::Result<u64>> + Unpin),
) -> bool {
    let is = async |state: &str, query: &str| {
        let sql = format!(
            "select count(*) from pg_stat_activity where state = '{state}' and pid <> pg_backend_pid() and query like '%{query}%'"
        );
        ask::<i64>(watching, sql).await > 0
    };
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        // A step at a time, and only when the server has done the one before.
        if is("idle in transaction", &format!("from {schema}.journal j cross join")).await {
            return true;
        }
        if !is("active", &format!("{schema}.")).await {
            let step = std::future::poll_fn(|context| {
                std::task::Poll::Ready(std::pin::Pin::new(&mut *sweeping).poll(context))
            });
            if step.await.is_ready() {
                return false;
            }
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    panic!("the sweep neither ends nor stands still");
}

/// A sweeper that is stopped in the middle (SIGSTOP, a machine that is paused) holds up nobody for long: the server ends its transaction.
#[tokio::test]
async fn t82_a_sweeper_that_stands_still_holds_nobody_up() {
    let watching = pool(1).await;
    let (journal, name, token, checkpoint, sweeping) = loop {
        let (journal, name, token, checkpoint) = three_published().await;
        let sweeping = {
            let journal = journal.clone();
            async move { journal.sweep(&JournalSweep::new(Duration::ZERO)).await }
        };
        let mut sweeping = Box::pin(sweeping);
        if stands_still(&watching, journal.schema(), &mut sweeping).await {
            break (journal, name, token, checkpoint, sweeping);
        }
        // The server answered between a look and a step, and the sweep went on: again, with other events.
    };
    let others = async {
        loop {
            let done = async {
                journal.renew_leadership(&name, token, Duration::from_secs(60)).await?;
                journal.rewind(&name, &checkpoint, None).await
            };
            match done.await {
                Err(error) if error.is_retryable() => tokio::time::sleep(Duration::from_millis(100)).await,
                done => break done,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), others)
        .await
        .expect("it holds nobody up for long")
        .unwrap();
    assert!(sweeping.await.is_err(), "its transaction is gone");
    assert_eq!(journal.read(&Position::START, 10).await.unwrap().events.len(), 3, "and nothing was removed");
}

/// Each mutant makes one of the scenarios fail; without one they pass.
#[test]
fn mutants_are_caught() {
    let runs = |scenario: &str, mutant: &str| {
        let mut command = crate::support::this::test(scenario);
        command.env("HAPAX_MUTANT", mutant);
        command.output().unwrap().status.success()
    };
    for (scenario, mutant) in [
        ("t40_a_slow_writer_is_never_skipped", "journal_skips_holes"),
        ("t40_the_order_is_that_of_positions_not_of_transactions", "journal_orders_by_xid"),
    ] {
        assert!(runs(scenario, "none"), "{scenario} holds");
        assert!(!runs(scenario, mutant), "{scenario} does not notice: {mutant}");
    }
}

#[tokio::test]
async fn t40_many_writers_with_transactions_of_every_length_lose_nothing_to_a_reader() {
    let journal = journal().await;
    let mut random = Random::new();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..8 {
        let (journal, mut random) = (journal.clone(), random.fork());
        writers.spawn(async move {
            let mut committed = 0;
            for n in 0..40 {
                let append = append(
                    &format!("a-{writer}"),
                    Expected::Any,
                    &[&format!("{writer}-{n}-x"), &format!("{writer}-{n}-y")],
                );
                let mut tx = journal.pool().begin().await.unwrap();
                let _ = journal.append_in(&mut tx, &append).await.unwrap();
                for _ in 0..random.below(6) {
                    tokio::task::yield_now().await;
                    sqlx::query("select 1").execute(&mut *tx).await.unwrap();
                }
                if random.below(4) == 0 {
                    tx.rollback().await.unwrap();
                } else {
                    tx.commit().await.unwrap();
                    committed += 2;
                }
            }
            committed
        });
    }
    let mut after = Position::START;
    let mut seen: Vec<Stored> = Vec::new();
    let (mut committed, mut holes) = (0, 0);
    loop {
        let batch = journal.read(&after, 50).await.unwrap();
        holes += usize::from(batch.at_hole);
        assert!(batch.events.iter().all(|stored| stored.position > after));
        after = batch.next.clone();
        let none = batch.events.is_empty();
        seen.extend(batch.events);
        while let Some(done) = writers.try_join_next() {
            committed += done.unwrap();
        }
        if none && !batch.at_hole && writers.is_empty() && seen.len() >= committed {
            break;
        }
    }
    println!("{committed} events committed, {} delivered, {holes} batches ended at a hole", seen.len());
    assert_eq!(seen.len(), committed);
    for writer in 0..8 {
        let aggregate = Aggregate::new(format!("a-{writer}")).unwrap();
        let seqs: Vec<u64> = seen
            .iter()
            .filter(|stored| stored.aggregate() == Some(&aggregate))
            .map(|stored| stored.seq)
            .collect();
        assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>(), "{aggregate}");
    }
}

#[tokio::test]
async fn j7_numbers_that_were_rolled_back_are_not_waited_for() {
    let journal = journal().await;
    let mut gone = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut gone, &append("a", Expected::New, &["gone"])).await.unwrap();
    let _ = journal.append(&append("b", Expected::New, &["there"])).await.unwrap();
    assert!(journal.read(&Position::START, 10).await.unwrap().at_hole);
    gone.rollback().await.unwrap();
    let batch = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!((ids(&batch.events), batch.at_hole), (vec!["there".to_owned()], false));
    assert_eq!(journal.head(None, &Aggregate::new("a").unwrap()).await.unwrap(), 0);
}

#[tokio::test]
async fn j7_a_writer_that_was_killed_is_not_waited_for() {
    let journal = journal().await;
    let mut killed = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut killed, &append("a", Expected::New, &["killed"])).await.unwrap();
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *killed).await.unwrap();
    let _ = journal.append(&append("b", Expected::New, &["there"])).await.unwrap();
    assert!(journal.read(&Position::START, 10).await.unwrap().at_hole);
    let _: bool = ask(journal.pool(), format!("select pg_terminate_backend({pid}, 60000)")).await;
    assert_eq!(follow(&journal, &mut Position::START.clone()).await, ["there"]);
}

#[tokio::test]
async fn j7_a_savepoint_that_was_rolled_back_is_no_hole_and_what_follows_it_in_its_transaction_is() {
    let journal = journal().await;
    let mut tx = journal.pool().begin().await.unwrap();
    sqlx::query("savepoint one").execute(&mut *tx).await.unwrap();
    let _ = journal.append_in(&mut tx, &append("a", Expected::New, &["undone"])).await.unwrap();
    sqlx::query("rollback to one").execute(&mut *tx).await.unwrap();
    let _ = journal.append(&append("b", Expected::New, &["b-1"])).await.unwrap();
    let mut after = Position::START;
    assert_eq!(follow(&journal, &mut after).await, ["b-1"], "its lock went with the savepoint");
    let _ = journal.append_in(&mut tx, &append("a", Expected::New, &["done"])).await.unwrap();
    let _ = journal.append(&append("b", Expected::Exact(1), &["b-2"])).await.unwrap();
    assert_eq!(follow(&journal, &mut after).await, [""; 0]);
    tx.commit().await.unwrap();
    assert_eq!(follow(&journal, &mut after).await, ["done", "b-2"]);
}

/// Its aggregate is locked until someone decides. Others append as before, but nothing behind its position is given to readers
/// that follow the whole journal; reading one aggregate is not held back.
#[tokio::test]
async fn j7_a_prepared_transaction_left_behind_is_waited_for_and_then_delivered() {
    let mut cluster = cluster::Cluster::new().await;
    let admin = pool_to(&cluster.url(), 1).await;
    run(&admin, "alter system set max_prepared_transactions = 4".into()).await;
    drop(admin);
    cluster.kill();
    cluster.start().await;
    let journal = journal_on(pool_to(&cluster.url(), 6).await).await;
    let prepare = async |append: Append, name: &str| {
        let mut tx = journal.pool().begin().await.unwrap();
        let _ = journal.append_in(&mut tx, &append).await.unwrap();
        let after = append.aggregate.as_str().to_owned() + "-other";
        let _ =
            journal.append(&self::append(&after, Expected::Any, &[&format!("{name}-after")])).await.unwrap();
        // Seen while it is still a session's; it must be known again under its other name.
        assert!(journal.read(&Position::START, 10).await.unwrap().at_hole);
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("prepare transaction '{name}'")))
            .execute(&mut *tx)
            .await
            .unwrap();
        std::mem::forget(tx); // there is nothing to roll back in it
    };
    prepare(append("a", Expected::New, &["prepared"]), "one").await;
    for _ in 0..3 {
        let batch = journal.read(&Position::START, 10).await.unwrap();
        assert!(batch.events.is_empty() && batch.at_hole, "{batch:?}");
    }
    let other = Aggregate::new("a-other").unwrap();
    assert_eq!(journal.read_aggregate(None, &other, 1, 10).await.unwrap().events.len(), 1);
    let locked = journal.append(&append("a", Expected::Any, &["second"])).await;
    assert!(matches!(locked, Err(Error::Contended { .. })), "{locked:?}");
    run(journal.pool(), "commit prepared 'one'".into()).await;
    let mut after = Position::START;
    assert_eq!(follow(&journal, &mut after).await, ["prepared", "one-after"]);
    // And one that is rolled back, seen by a reader that starts when it is prepared already.
    prepare(append("b", Expected::New, &["never"]), "two").await;
    let fresh = PgJournal::with_pool(journal.pool().clone(), settings(journal.schema())).await.unwrap();
    assert_eq!(follow(&fresh, &mut after).await, [""; 0]);
    run(journal.pool(), "rollback prepared 'two'".into()).await;
    assert_eq!(follow(&fresh, &mut after).await, ["two-after"]);
}

#[tokio::test]
async fn j7_transactions_that_do_not_write_to_the_journal_stall_nobody() {
    let journal = journal().await;
    let elsewhere = pool_to(&support::url_of("template1"), 1).await;
    let mut other_database = elsewhere.begin().await.unwrap();
    sqlx::query("create temporary table x (n int)").execute(&mut *other_database).await.unwrap();
    let mut read_only = journal.pool().begin().await.unwrap();
    sqlx::query("set transaction isolation level repeatable read").execute(&mut *read_only).await.unwrap();
    let sql = format!("select count(*) from {}.journal", journal.schema());
    sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut *read_only).await.unwrap();
    let mut writes_elsewhere = journal.pool().begin().await.unwrap();
    sqlx::query("create temporary table y (n int)").execute(&mut *writes_elsewhere).await.unwrap();
    let mut gone = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut gone, &append("a", Expected::New, &["gone"])).await.unwrap();
    let _ = journal.append(&append("b", Expected::New, &["there"])).await.unwrap();
    gone.rollback().await.unwrap();
    let batch = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!((ids(&batch.events), batch.at_hole), (vec!["there".to_owned()], false));
    for tx in [read_only, writes_elsewhere, other_database] {
        tx.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn j7_reading_past_many_rolled_back_numbers_looks_for_writers_once() {
    let journal = journal().await;
    let s = journal.schema();
    // Every second number was rolled back, so to say.
    for n in 0..300 {
        let _ =
            journal.append(&append(&format!("a-{n}"), Expected::New, &[&format!("e-{n}")])).await.unwrap();
        let _: i64 = ask(journal.pool(), format!("select nextval('{s}.journal_position')")).await;
    }
    run(journal.pool(), format!("create table {s}.looks (n int)")).await;
    run(
        journal.pool(),
        format!(
            "alter function {s}.journal_horizon() rename to horizon_0; \
             create function {s}.journal_horizon(out o_drawn bigint, out o_writers text[]) language plpgsql as \
             $$ begin insert into {s}.looks values (1); select h.* into o_drawn, o_writers from {s}.horizon_0() h; end $$"
        ),
    )
    .await;
    let mut after = Position::START;
    assert_eq!(follow(&journal, &mut after).await.len(), 300);
    assert_eq!(follow(&journal, &mut Position::START.clone()).await.len(), 300, "and from the start again");
    let looks: i64 = ask(journal.pool(), format!("select count(*) from {s}.looks")).await;
    assert_eq!(looks, 1);
}

#[tokio::test]
async fn j1_a_hot_aggregate_does_not_hold_others_back() {
    let journal = journal().await;
    let mut hot = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut hot, &append("hot", Expected::New, &["hot-1"])).await.unwrap();
    // Single appends, and a batch of which one meets the hot one: the others are stored meanwhile.
    let _ = journal.append(&append("cold", Expected::New, &["cold-1"])).await.unwrap();
    let batch: Vec<_> = (0..20)
        .map(|n| append(if n == 7 { "hot" } else { "cold" }, Expected::Any, &[&format!("batch-{n}")]))
        .collect();
    let waiting = tokio::spawn({
        let journal = journal.clone();
        async move { journal.append_many(&batch).await.unwrap() }
    });
    until_waiting(journal.pool(), "journal_append").await;
    until("the others are stored", async || {
        journal.head(None, &Aggregate::new("cold").unwrap()).await.unwrap() >= 8
    })
    .await;
    hot.commit().await.unwrap();
    let answers = waiting.await.unwrap();
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    let cold = journal.read_aggregate(None, &Aggregate::new("cold").unwrap(), 2, 100).await.unwrap().events;
    let expected: Vec<_> = (0..20).filter(|n| *n != 7).map(|n| format!("batch-{n}")).collect();
    assert_eq!(ids(&cold), expected, "in the order of the batch");
}

#[tokio::test]
async fn j1_32_writers_on_8_aggregates_with_random_failures_number_without_a_gap() {
    let journal = journal_on(pool(32).await).await;
    let mut random = Random::new();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..32 {
        let (journal, mut random) = (journal.clone(), random.fork());
        writers.spawn(async move {
            let (mut stored, mut conflicts, mut undone, mut killed) = (0, 0, 0, 0);
            for n in 0..25 {
                let aggregate = format!("a-{}", random.below(8));
                let of = Aggregate::new(&aggregate).unwrap();
                let (x, y) = (format!("{writer}-{n}-x"), format!("{writer}-{n}-y"));
                let expected = match random.below(3) {
                    0 => Expected::Exact(journal.head(None, &of).await.unwrap()),
                    _ => Expected::Any,
                };
                let append = append(&aggregate, expected, &[x.as_str(), y.as_str()][..=random.below(2)]);
                let count = append.events.len();
                match random.below(5) {
                    0 => {
                        let mut tx = journal.pool().begin().await.unwrap();
                        undone += usize::from(journal.append_in(&mut tx, &append).await.is_ok());
                        tx.rollback().await.unwrap();
                    }
                    1 => {
                        let mut tx = journal.pool().begin().await.unwrap();
                        let pid: i32 =
                            sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *tx).await.unwrap();
                        let _ = journal.append_in(&mut tx, &append).await;
                        let _: bool =
                            ask(journal.pool(), format!("select pg_terminate_backend({pid}, 60000)")).await;
                        assert!(tx.commit().await.is_err());
                        killed += 1;
                    }
                    2 => {
                        let batch =
                            [append.clone(), self::append(&aggregate, Expected::Exact(999_999), &["no"])];
                        let answers = loop {
                            let answers = journal.append_many(&batch).await;
                            let contended = match &answers {
                                Ok(answers) => {
                                    answers.iter().any(|a| a.as_ref().is_err_and(Error::is_retryable))
                                }
                                Err(error) => error.is_retryable(),
                            };
                            if !contended {
                                break answers.unwrap();
                            }
                        };
                        assert!(matches!(answers[1], Err(Error::Conflict { .. })), "{answers:?}");
                        stored += if answers[0].is_ok() { count } else { 0 };
                        conflicts += 1;
                    }
                    // On a busy machine the others hold an aggregate for longer than an append waits. The same
                    // append again is stored once.
                    _ => loop {
                        match journal.append(&append).await {
                            Ok(_) => break stored += count,
                            Err(Error::Conflict { .. }) => break conflicts += 1,
                            Err(error) => assert!(error.is_retryable(), "{}", error.chain()),
                        }
                    },
                }
            }
            (stored, conflicts, undone, killed)
        });
    }
    let mut sum = (0, 0, 0, 0);
    while let Some(one) = writers.join_next().await {
        let one = one.unwrap();
        sum = (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2, sum.3 + one.3);
    }
    println!("{} stored, {} refused, {} rolled back, {} killed", sum.0, sum.1, sum.2, sum.3);
    let mut there = 0;
    for n in 0..8 {
        let of = Aggregate::new(format!("a-{n}")).unwrap();
        let events = journal.read_aggregate(None, &of, 1, 10_000).await.unwrap().events;
        let seqs: Vec<u64> = events.iter().map(|stored| stored.seq).collect();
        assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>(), "{of}");
        assert!(events.is_sorted_by_key(|stored| stored.position.clone()));
        assert_eq!(journal.head(None, &of).await.unwrap(), seqs.len() as u64);
        there += seqs.len();
    }
    assert_eq!(there, sum.0);
    assert_eq!(follow(&journal, &mut Position::START.clone()).await.len(), there);
}

#[tokio::test]
async fn t29_a_failed_append_burns_no_number() {
    let journal = journal().await;
    let of = Aggregate::new("a").unwrap();
    for n in 0..10 {
        let refused = [
            append("a", Expected::Exact(n + 7), &["no"]),
            append("a", Expected::Exact(n + 7), &["no", "no-2"]),
            append("a", Expected::Any, &[&format!("fresh-{n}"), &format!("a-{n}")]),
        ];
        let mut tx = journal.pool().begin().await.unwrap();
        let undone = journal.append_in(&mut tx, &append("a", Expected::Exact(n), &["undone"])).await.unwrap();
        assert_eq!(undone.last_seq(), n + 1);
        tx.rollback().await.unwrap();
        let stored = journal.append(&append("a", Expected::Exact(n), &[&format!("a-{n}")])).await.unwrap();
        assert_eq!(stored.last_seq(), n + 1);
        for append in &refused[..2] {
            let conflict = journal.append(append).await.unwrap_err();
            assert!(matches!(conflict, Error::Conflict { .. }), "{conflict}");
        }
        let mut other = refused[2].clone();
        other.events[1] = other.events[1].clone().payload("something else");
        let mismatch = journal.append(&other).await.unwrap_err();
        assert!(matches!(mismatch, Error::Mismatch { .. }), "{mismatch}");
        assert_eq!(journal.head(None, &of).await.unwrap(), n + 1);
    }
}

#[tokio::test]
async fn j3_one_id_appended_to_two_aggregates_at_once_is_stored_once() {
    let journal = journal().await;
    let mut first = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut first, &append("a", Expected::New, &["x"])).await.unwrap();
    let second = tokio::spawn({
        let journal = journal.clone();
        async move { journal.append(&append("b", Expected::New, &["x"])).await }
    });
    let both = tokio::spawn({
        let journal = journal.clone();
        async move { journal.append(&append("c", Expected::New, &["y", "x"])).await }
    });
    until_waiting(journal.pool(), "journal_append").await;
    first.commit().await.unwrap();
    for refused in [second.await.unwrap(), both.await.unwrap()] {
        assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    }
    for empty in ["b", "c"] {
        assert_eq!(journal.head(None, &Aggregate::new(empty).unwrap()).await.unwrap(), 0);
    }
    let heads: i64 =
        ask(journal.pool(), format!("select count(*) from {}.journal_head", journal.schema())).await;
    assert_eq!(heads, 1, "a refused append leaves no head behind");
}

#[tokio::test]
async fn j12_what_cannot_be_opened_says_why() {
    let mut check = settings(&fresh_schema());
    check.migrate = hapax::backend::postgres::Migrate::Check;
    let missing = PgJournal::connect(&url(), check).await.unwrap_err();
    assert!(missing.to_string().contains("there is no journal in schema"), "{missing}");
    let nobody = url().replace("postgres@", "nobody:wrong@");
    let refused = PgJournal::connect(&nobody, settings("x")).await.unwrap_err();
    assert!(
        matches!(refused, Error::Unavailable { .. }) && refused.chain().contains("nobody"),
        "{}",
        refused.chain()
    );
    let reserved = PgJournal::connect(&url(), settings("select")).await.unwrap_err();
    assert!(matches!(reserved, Error::Config(_)), "{reserved}");
    let other = PgJournal::connect("mysql://x", settings("x")).await.unwrap_err();
    assert!(other.to_string().contains("journal.url"), "{other}");
    // Tables that are gone are told too, not called an outage.
    let journal = journal().await;
    run(journal.pool(), format!("drop schema {} cascade", journal.schema())).await;
    let gone = journal.append(&append("a", Expected::Any, &["x"])).await.unwrap_err();
    assert!(matches!(gone, Error::Schema(_)), "{gone}");
}

#[tokio::test]
async fn many_that_start_at_once_make_one_journal_also_beside_a_ledger() {
    let schema = fresh_schema();
    let mut starting = tokio::task::JoinSet::new();
    for n in 0..8 {
        let schema = schema.clone();
        starting.spawn(async move {
            let pool = pool(2).await;
            if n % 2 == 0 {
                let ledger =
                    hapax::backend::postgres::PgLedger::with_pool(pool.clone(), support::settings(&schema));
                ledger.await.unwrap();
            }
            PgJournal::with_pool(pool, settings(&schema)).await.unwrap().id().to_owned()
        });
    }
    let all: std::collections::HashSet<_> = starting.join_all().await.into_iter().collect();
    assert_eq!(all.len(), 1);
}

#[tokio::test]
async fn everything_works_behind_a_transaction_pooler() {
    let url = std::env::var("HAPAX_TEST_PGBOUNCER_URL").expect("scripts/services env sets it");
    let mut settings = settings(&fresh_schema());
    settings.pooling = Pooling::Detect;
    let journal = PgJournal::connect(&url, settings).await.unwrap();
    let mut tx = journal.pool().begin().await.unwrap();
    let _ = journal.append_in(&mut tx, &append("a", Expected::New, &["one", "two"])).await.unwrap();
    tx.commit().await.unwrap();
    let reader = journal.clone();
    let waiting = tokio::spawn(async move { reader.wait(&Position::of(2), Duration::from_secs(60)).await });
    for n in 0..20 {
        let _ = journal.append(&append("b", Expected::Exact(n), &[&format!("b-{n}")])).await.unwrap();
    }
    waiting.await.unwrap().unwrap();
    assert_eq!(follow(&journal, &mut Position::START.clone()).await.len(), 22);
}

#[tokio::test]
async fn a_waiting_reader_of_another_process_is_woken_at_once() {
    let journal = journal().await;
    let mut patient = settings(journal.schema());
    patient.poll_max = Duration::from_secs(600); // it will not look by itself
    let reader = PgJournal::with_pool(pool(2).await, patient).await.unwrap();
    let channel = format!("hapax_journal_{}", journal.schema());
    for n in 0..3 {
        let after = Position::of(n);
        let waiting = tokio::spawn({
            let reader = reader.clone();
            async move { reader.wait(&after, Duration::from_secs(300)).await }
        });
        until("it listens", async || {
            let sql =
                format!("select count(*) from pg_stat_activity where query like 'LISTEN \"{channel}\"%'");
            ask::<i64>(journal.pool(), sql).await > 0
        })
        .await;
        let began = Instant::now();
        if n == 2 {
            let mut tx = journal.pool().begin().await.unwrap();
            let _ = journal.append_in(&mut tx, &append("a", Expected::Any, &["in"])).await.unwrap();
            tx.commit().await.unwrap();
            journal.wake();
        } else {
            let _ = journal.append(&append("a", Expected::Any, &[&format!("e-{n}")])).await.unwrap();
        }
        waiting.await.unwrap().unwrap();
        assert!(began.elapsed() < Duration::from_secs(200), "woken, not timed out");
    }
}

#[tokio::test]
async fn j4_under_warn_the_original_is_kept() {
    let mut warn = settings(&fresh_schema());
    warn.journal.mismatch = hapax::ledger::MismatchRule::Warn;
    let journal = PgJournal::with_pool(pool(4).await, warn).await.unwrap();
    let original = journal.append(&append("a", Expected::New, &["x"])).await.unwrap();
    for other in [append("b", Expected::New, &["x"]), append("b", Expected::New, &["x", "y"])] {
        let kept = journal.append(&other).await.unwrap();
        assert_eq!(
            (kept.placed[0].placing, &kept.placed[0].position),
            (Placing::Kept, &original.placed[0].position)
        );
    }
    let tenant = Tenant::new("t").unwrap();
    let apart = journal.append(&append("a", Expected::New, &["x"]).tenant(tenant)).await.unwrap();
    assert_eq!(apart.placed[0].placing, Placing::New);
}
