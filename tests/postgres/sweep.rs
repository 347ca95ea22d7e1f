//! A week on its way out: whoever works on it meanwhile, however long their transaction lasts, sees one truth.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::time::{Duration, Instant};

use crate::support::postgres::{PgHarness, ask, pool, run, until};
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Claims as _, ConsumerStore as _, Mode, Operations as _, SweepSettings, Swept};
use hapax::testing::{Harness as _, kit};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::task::JoinHandle;

const RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// A ledger with an old week: what is in it was last touched 30 days ago.
struct Stage {
    harness: PgHarness,
    ledger: PgLedger,
    /// Leased 30 days ago, and lapsed.
    leased: Claim,
    grant: hapax::ledger::Grant,
    /// Its retry is due.
    due: Claim,
    done: Claim,
    /// Never claimed.
    never: Claim,
}

impl Stage {
    async fn new() -> Self {
        Stage::on(PgHarness::new().await).await
    }

    async fn on(harness: PgHarness) -> Self {
        let ledger = kit::open(&harness).await;
        let now = ledger.now().await.unwrap();
        let claim = |n| kit::claim(&kit::v7_at(now, n).to_string(), kit::lease());
        let (leased, due, done, never) = (claim(1), claim(2), claim(3), claim(4));
        kit::run(&ledger, &done).await;
        let grant = kit::first(&ledger, &leased).await;
        let other = kit::first(&ledger, &due).await;
        kit::settled(&ledger, &due, &other, kit::retry(Duration::from_secs(1))).await;
        harness.advance(30 * kit::DAY).await;
        Stage { harness, ledger, leased, grant, due, done, never }
    }

    fn sweep_beside(&self) -> JoinHandle<hapax::Result<Swept>> {
        let ledger = self.ledger.clone();
        tokio::spawn(async move {
            ledger.sweep(SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false }).await
        })
    }

    async fn is_under_way(&self) -> bool {
        let s = &self.harness.schema;
        ask(&self.harness.pool, format!("select exists (select from {s}.dropped)")).await
    }

    /// Whether the week is gone.
    async fn is_gone(&self) -> bool {
        let s = &self.harness.schema;
        let gone = format!("select exists (select from {s}.dropped where phase is null)");
        ask(&self.harness.pool, gone).await
    }

    /// Sweeps until the week is gone.
    async fn finish(&self) {
        // A drop waits for every transaction of the database, those of other test programs too: longer than `until` does.
        let end = Instant::now() + Duration::from_secs(300);
        loop {
            kit::sweep(&self.ledger, RETENTION).await;
            if self.is_gone().await {
                return;
            }
            assert!(Instant::now() < end, "the week is never gone");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// T claims a due retry in a transaction that stays open while the week is swept: nobody else may have it.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_claim_in_an_open_transaction_is_not_granted_again_by_a_sweep() {
    let stage = Stage::new().await;
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let mine = Claim { mode: Mode::Done, ..kit::another(&stage.due) };
    let outcome =
        stage.ledger.claim_in(&mut tx, std::slice::from_ref(&mine)).await.unwrap().remove(0).unwrap();
    assert!(outcome.is_claimed());
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    let rival = kit::open(&stage.harness).await;
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let theirs = kit::one(&rival, &kit::another(&stage.due)).await;
        assert_eq!(theirs.name(), "busy", "a rival got it beside an open transaction: {theirs:?}");
        let theirs = kit::one(&rival, &kit::another(&stage.leased)).await;
        assert!(["claimed", "busy"].contains(&theirs.name()), "{theirs:?}"); // lapsed: whoever is first has it
    }
    tx.commit().await.unwrap();
    sweeping.await.unwrap().unwrap();
    assert!(stage.ledger.was_committed(&mine).await.unwrap(), "it was, and is asked where it is");
    stage.finish().await;
    kit::expect(&stage.ledger, &kit::another(&stage.due), "duplicate").await;
    kit::expect(&stage.ledger, &kit::another(&stage.done), "too_old").await;
    kit::expect(&stage.ledger, &kit::another(&stage.leased), "busy").await;
}

/// A lease that is committed while the sweep is under way is the only one.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_lease_taken_during_a_sweep_is_the_only_one() {
    let stage = Stage::new().await;
    let reader = reader(&stage.harness.pool, &stage.harness.schema).await;
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    let one = kit::another(&stage.due);
    let grant = kit::first(&stage.ledger, &one).await;
    let rival = kit::open(&stage.harness).await;
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    reader.rollback().await.unwrap();
    sweeping.await.unwrap().unwrap();
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    stage.finish().await;
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    kit::settled(&stage.ledger, &one, &grant, kit::done()).await;
    kit::expect(&rival, &kit::another(&stage.due), "duplicate").await;
}

/// Someone whose snapshot is old: a dump, a report.
async fn reader(pool: &PgPool, s: &str) -> sqlx::PgTransaction<'static> {
    let mut tx = pool.begin().await.unwrap();
    sqlx::raw_sql("set transaction isolation level repeatable read").execute(&mut *tx).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("select from {s}.entry"))).execute(&mut *tx).await.unwrap();
    tx
}

/// The partition of the old week becomes invisible between a statement that locks a row and the one that updates it.
#[tokio::test(flavor = "multi_thread")]
async fn t64_an_update_that_reaches_no_row_is_no_success() {
    for what in ["claim", "settle"] {
        let stage = Stage::new().await;
        let s = &stage.harness.schema;
        // Whoever is called slow stops where the clock is read: between the lock and the write.
        run(
            &stage.harness.pool,
            format!(
                "create or replace function {s}.ledger_now() returns timestamptz language plpgsql volatile as $$ begin \
                   while current_setting('application_name') = 'slow {s}' and not pg_try_advisory_xact_lock_shared(hashtext('{s}')) loop \
                     perform pg_sleep(0.01); end loop; \
                   return (select at from {s}.test_clock); end $$"
            ),
        )
        .await;
        let mut gate = stage.harness.pool.begin().await.unwrap();
        sqlx::query(AssertSqlSafe(format!("select pg_advisory_xact_lock(hashtext('{s}'))")))
            .execute(&mut *gate)
            .await
            .unwrap();
        let slow = pool(1).await;
        run(&slow, format!("set application_name = 'slow {s}'")).await;
        let mine = if what == "claim" { &stage.due } else { &stage.leased };
        let (scope, id) = (mine.identity.scope.clone(), mine.identity.id.to_string());
        let sql = match what {
            "claim" => format!("select token from {s}.lease($1, $2) where outcome = 'claimed' and $3 > 0"),
            _ => format!("select $3 from {s}.settle($1, $2, $3, 'done') done where done"),
        };
        let token = stage.grant.token.0;
        let working = tokio::spawn(async move {
            sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql))
                .bind(scope.as_str())
                .bind(id)
                .bind(token)
                .fetch_optional(&slow)
                .await
        });
        until("it has locked the row", async || {
            ask(&stage.harness.pool, format!("select exists (select from pg_stat_activity where application_name = 'slow {s}' and wait_event = 'PgSleep')")).await
        })
        .await;
        let id = mine.identity.id.to_string();
        let free = format!(
            "select count(*) from (select from {s}.entry where id = {s}.id_key('{id}') for update skip locked) free"
        );
        assert_eq!(ask::<i64>(&stage.harness.pool, free).await, 0, "{what}: the row is locked");
        // An operator takes the partition out by hand, as no sweep would: it is invisible before the writer has ended.
        let week: String = ask(
            &stage.harness.pool,
            format!(
                "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid \
                 where i.inhparent = '{s}.entry'::regclass and c.relname <> 'entry_0' order by 1 limit 1"
            ),
        )
        .await;
        let by_hand = tokio::spawn({
            let (pool, sql) =
                (pool(1).await, format!("alter table {s}.entry detach partition {s}.{week} concurrently"));
            async move { run(&pool, sql).await }
        });
        until("the partition is invisible", async || {
            ask(&stage.harness.pool, format!("select exists (select from pg_inherits where inhparent = '{s}.entry'::regclass and inhdetachpending)")).await
        })
        .await;
        gate.rollback().await.unwrap();
        let answer = working.await.unwrap();
        by_hand.await.unwrap();
        // Nothing was stored, so nobody is told that it is theirs, or done: the caller must ask again.
        let error = answer.expect_err(what);
        let code = error.as_database_error().and_then(|error| error.code().map(String::from));
        assert_eq!(code.as_deref(), Some("40001"), "{what}: {error}");
    }
}

/// What is settled while its week is on the way out is answered as a duplicate for as long as the retention says.
#[tokio::test(flavor = "multi_thread")]
async fn t65_what_was_settled_during_a_sweep_is_remembered() {
    let stage = Stage::new().await;
    let reader = reader(&stage.harness.pool, &stage.harness.schema).await;
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    tokio::time::sleep(Duration::from_millis(300)).await; // as far as it comes while the reader is there
    kit::settled(&stage.ledger, &stage.leased, &stage.grant, kit::done()).await;
    let due = kit::another(&stage.due);
    kit::run(&stage.ledger, &due).await;
    reader.rollback().await.unwrap();
    sweeping.await.unwrap().unwrap();
    stage.finish().await;
    for mine in [&stage.leased, &stage.due] {
        kit::expect(&stage.ledger, &kit::another(mine), "duplicate").await;
    }
    kit::expect(&stage.ledger, &kit::another(&stage.done), "too_old").await;
    kit::expect(&stage.ledger, &stage.never, "too_old").await;
    // And is forgotten when its own time has come.
    kit::days_go_by(&stage.harness, &stage.ledger, 8).await;
    kit::sweep(&stage.ledger, RETENTION).await;
    kit::expect(&stage.ledger, &kit::another(&stage.leased), "too_old").await;
}

impl Stage {
    /// Sweeps step by step until the week is in this phase.
    async fn until_phase(&self, phase: &str) {
        let s = &self.harness.schema;
        let settings = SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false };
        until("the drop is that far", async || {
            self.ledger.sweep_part(settings, 1).await.unwrap();
            ask(
                &self.harness.pool,
                format!("select exists (select from {s}.dropped where phase = '{phase}')"),
            )
            .await
        })
        .await;
    }
}

/// An id that was never claimed: new before the week is closed, then busy, then too old; never anything else in between.
#[tokio::test(flavor = "multi_thread")]
async fn t63_what_is_nowhere_is_busy_while_its_week_is_closed() {
    let stage = Stage::new().await;
    let s = stage.harness.schema.clone();
    for (phase, word) in
        [("closed", "busy"), ("moving", "too_old"), ("moved", "too_old"), ("empty", "too_old")]
    {
        stage.until_phase(phase).await;
        let id = stage.never.identity.id.to_string();
        for mode in [kit::lease(), Mode::Done, Mode::Once { track: Some(kit::LEASE) }, kit::failed()] {
            kit::expect(&stage.ledger, &Claim { mode, ..kit::another(&stage.never) }, word).await;
        }
        for function in ["claim_in", "lease"] {
            let sql = format!("select outcome from {s}.{function}('orders', '{id}')");
            assert_eq!(ask::<String>(&stage.harness.pool, sql).await, word, "{phase}");
        }
        let mut tx = stage.harness.pool.begin().await.unwrap();
        let mine = Claim { mode: Mode::Done, ..kit::another(&stage.never) };
        let outcome = stage.ledger.claim_in(&mut tx, &[mine]).await.unwrap().remove(0).unwrap();
        assert_eq!(outcome.name(), word, "{phase}");
        tx.rollback().await.unwrap();
        // A scope that begins now has never seen the week: it waits until the week is gone, and then it is new.
        kit::expect(&stage.ledger, &of_scope(&stage.never, &format!("young-{phase}")), "busy").await;
        // What is there is answered as ever, wherever it is.
        kit::expect(&stage.ledger, &kit::another(&stage.done), "duplicate").await;
        let ids = [stage.done.identity.clone(), stage.due.identity.clone()];
        assert_eq!(stage.ledger.known(&ids).await.unwrap(), [true, false], "{phase}");
        let grant = kit::first(&stage.ledger, &kit::another(&stage.due)).await;
        assert!(!kit::is_fenced(kit::extend(&stage.ledger, &stage.due, &grant, kit::LEASE).await));
        kit::expect(&stage.ledger, &kit::another(&stage.due), "busy").await;
        kit::settled(&stage.ledger, &stage.due, &grant, kit::retry(Duration::ZERO)).await;
    }
    stage.finish().await;
    // They began after the closing, and have waited.
    for young in ["young-closed", "young-moving", "young-moved", "young-empty", "younger"] {
        let claim = of_scope(&stage.never, young);
        kit::expect(&stage.ledger, &claim, "claimed").await;
    }
    kit::run(&stage.ledger, &kit::another(&stage.due)).await;
}

/// The claim of the same event in another scope.
fn of_scope(claim: &Claim, scope: &str) -> Claim {
    let mut claim = kit::another(claim);
    claim.identity.scope = hapax::Scope::new(scope).unwrap();
    claim
}

/// A scope that begins while a week is closed waits until the week is gone, and uses it then. A scope that a transaction registered
/// before the closing, and used in that week, is as old as the week, whenever the transaction ends.
#[tokio::test(flavor = "multi_thread")]
async fn t91_a_scope_that_began_while_a_week_was_closed_may_use_it() {
    let stage = Stage::new().await;
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let inside = Claim { mode: Mode::Done, ..of_scope(&stage.never, "in a transaction") };
    let outcome = stage.ledger.claim_in(&mut tx, std::slice::from_ref(&inside)).await.unwrap().remove(0);
    assert!(outcome.unwrap().is_claimed());
    stage.until_phase("closed").await;
    kit::expect(&stage.ledger, &of_scope(&stage.never, "young"), "busy").await;
    tx.commit().await.unwrap();
    stage.finish().await;
    kit::expect(&stage.ledger, &of_scope(&stage.never, "young"), "claimed").await;
    kit::expect(&stage.ledger, &kit::another(&inside), "duplicate").await;
    kit::expect(&stage.ledger, &of_scope(&stage.done, "in a transaction"), "too_old").await;
}

/// A transaction that does not see the closing begins a scope and uses the week. Scopes that began just before it have never written to
/// the week: they are not barred with that one.
#[tokio::test(flavor = "multi_thread")]
async fn t406_a_late_scope_bars_no_scope_but_itself() {
    let stage = Stage::new().await;
    let s = stage.harness.schema.clone();
    let mut tx = reader(&stage.harness.pool, &s).await;
    stage.until_phase("closed").await;
    let young = of_scope(&stage.never, "young");
    kit::expect(&stage.ledger, &young, "busy").await;
    let late = Claim { mode: Mode::Done, ..of_scope(&stage.never, "late") };
    let outcome = stage.ledger.claim_in(&mut tx, std::slice::from_ref(&late)).await.unwrap().remove(0);
    assert!(outcome.unwrap().is_claimed(), "it does not see the closing");
    tx.commit().await.unwrap();
    stage.finish().await;
    kit::expect(&stage.ledger, &kit::another(&young), "claimed").await;
    kit::expect(&stage.ledger, &kit::another(&late), "duplicate").await;
    // Its own entry outlives the week, and nothing else of that week is new to it.
    for claim in [of_scope(&stage.done, "late"), Claim { mode: Mode::Done, ..of_scope(&stage.done, "late") }]
    {
        kit::expect(&stage.ledger, &claim, "too_old").await;
    }
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let claims = [Claim { mode: Mode::Done, ..of_scope(&stage.done, "late") }];
    let outcome = stage.ledger.claim_in(&mut tx, &claims).await.unwrap().remove(0).unwrap();
    assert_eq!(outcome.name(), "too_old");
}

/// What cannot be opened again while its week is closed fails by itself: the other settlings of its batch are recorded.
#[tokio::test(flavor = "multi_thread")]
async fn c8_a_release_in_a_closed_week_fails_no_neighbour() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let now = ledger.now().await.unwrap();
    let back = kit::claim(&kit::v7_at(now, 22).to_string(), Mode::Once { track: None });
    let given = kit::first(&ledger, &back).await;
    let stage = Stage::on(harness).await;
    stage.until_phase("closed").await;
    for n in [31, 32] {
        let present = kit::v7_at(stage.ledger.now().await.unwrap(), n).to_string();
        let other = kit::claim(&present, kit::lease());
        let grant = kit::first(&stage.ledger, &other).await;
        let settles = [
            kit::settling(&back, &given, hapax::ledger::Verdict::release()),
            kit::settling(&other, &grant, kit::retry(kit::LEASE)),
        ];
        let answers = if n == 31 {
            stage.ledger.settle(&settles).await.unwrap()
        } else {
            let mut tx = stage.harness.pool.begin().await.unwrap();
            let answers = stage.ledger.settle_in(&mut tx, &settles).await.unwrap();
            tx.commit().await.unwrap();
            answers
        };
        let refused = answers[0].as_ref().unwrap_err();
        assert!(refused.is_retryable(), "{refused:?}");
        assert!(matches!(answers[1], Ok(hapax::ledger::Settled::Ok { .. })), "{answers:?}");
        kit::expect(&stage.ledger, &kit::another(&other), "retry_later").await;
    }
    stage.finish().await;
    // It is still claimed, and was so for longer than the retention.
    kit::expect(&stage.ledger, &kit::another(&back), "too_old").await;
}

/// The end of an at-most-once claim that is told while its week goes is remembered for the retention, and is never written to a
/// partition of which everything was moved.
#[tokio::test(flavor = "multi_thread")]
async fn t65_the_end_of_an_at_most_once_claim_outlives_its_week() {
    for phase in ["closed", "moving", "moved", "empty"] {
        let harness = PgHarness::new().await;
        let ledger = kit::open(&harness).await;
        let now = ledger.now().await.unwrap();
        let once = |n| kit::claim(&kit::v7_at(now, n).to_string(), Mode::Once { track: None });
        let ends = [
            (once(21), hapax::ledger::Verdict::Finished { metadata: None }),
            (once(22), hapax::ledger::Verdict::Lost { reason: "crashed".into() }),
        ];
        let mut grants = Vec::new();
        for (claim, _) in &ends {
            grants.push(kit::first(&ledger, claim).await);
        }
        let stage = Stage::on(harness).await;
        stage.until_phase(phase).await;
        for ((claim, verdict), grant) in ends.iter().zip(&grants) {
            kit::settled(&stage.ledger, claim, grant, verdict.clone()).await;
        }
        let s = &stage.harness.schema;
        let left = format!("select count(*) from {s}.entry where week > 0 and state in ('F', 'O')");
        let left: i64 = ask(&stage.harness.pool, left).await;
        assert_eq!(left, if phase == "closed" { 2 } else { 0 }, "in a week that is {phase}");
        stage.finish().await;
        for (claim, _) in &ends {
            kit::expect(&stage.ledger, &kit::another(claim), "duplicate").await;
        }
    }
}

/// A transaction that saw its week closed, and no later phase, ends an at-most-once claim, and commits when the sweep has moved
/// everything else: the row is moved after all, before the partition is detached.
#[tokio::test(flavor = "multi_thread")]
async fn t65_the_end_of_an_at_most_once_claim_that_commits_late_outlives_its_week() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let now = ledger.now().await.unwrap();
    let once = kit::claim(&kit::v7_at(now, 21).to_string(), Mode::Once { track: None });
    let grant = kit::first(&ledger, &once).await;
    let stage = Stage::on(harness).await;
    let s = stage.harness.schema.clone();
    let listed = |phase: &str| {
        format!("select exists (select from {s}.dropped where phase = '{phase}' and waits is not null)")
    };

    let step = || {
        let ledger = stage.ledger.clone();
        let settings = SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false };
        tokio::spawn(async move { ledger.sweep_part(settings, 1).await })
    };

    stage.until_phase("closed").await;
    let reader = reader(&stage.harness.pool, &s).await;
    let waits = step();
    until("the sweep waits for the reader", async || ask(&stage.harness.pool, listed("closed")).await).await;
    // It began after the list was made, so this step does not wait for it.
    let mut late = stage.harness.pool.begin().await.unwrap();
    let verdict = hapax::ledger::Verdict::Finished { metadata: None };
    let settles = [kit::settling(&once, &grant, verdict)];
    let settled = stage.ledger.settle_in(&mut late, &settles).await.unwrap().remove(0).unwrap();
    assert!(matches!(settled, hapax::ledger::Settled::Ok { .. }), "{settled:?}");
    reader.rollback().await.unwrap();
    waits.await.unwrap().unwrap();
    stage.until_phase("moved").await;
    let waits = step();
    until("the sweep waits for the late one", async || ask(&stage.harness.pool, listed("moved")).await).await;
    late.commit().await.unwrap();
    waits.await.unwrap().unwrap();
    // Transactions of other tests in this database may hold the drop up.
    let phase = format!("select phase from {s}.dropped where phase is not null");
    let end = Instant::now() + Duration::from_secs(300);
    while ask::<String>(&stage.harness.pool, phase.clone()).await == "moved" {
        assert!(Instant::now() < end, "others are there for ever");
        step().await.unwrap().unwrap();
    }
    let phase: String = ask(&stage.harness.pool, phase).await;
    assert_eq!(phase, "moving", "what came late is moved first");
    stage.until_phase("empty").await;
    let left = format!("select count(*) from {s}.entry where week > 0 and state = 'F'");
    assert_eq!(ask::<i64>(&stage.harness.pool, left).await, 0, "a detached partition would hide it");
    kit::expect(&stage.ledger, &kit::another(&once), "duplicate").await;
    stage.finish().await;
    kit::expect(&stage.ledger, &kit::another(&once), "duplicate").await;
    let shown = format!("select state from {s}.entries where id = '{}'", once.identity.id);
    assert_eq!(ask::<String>(&stage.harness.pool, shown).await, "finished", "the view shows what was moved");
}

/// The clock leaps after a sweep has looked whether it did: nothing is old because of that.
#[tokio::test(flavor = "multi_thread")]
async fn t92_a_leap_during_a_sweep_makes_nothing_old() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let now = ledger.now().await.unwrap();
    let (of_week, timeless) =
        (kit::claim(&kit::v7_at(now, 1).to_string(), kit::lease()), kit::claim("timeless", kit::lease()));
    kit::run(&ledger, &of_week).await;
    kit::run(&ledger, &timeless).await;
    let scope = hapax::Scope::new("orders").unwrap();
    let topic = hapax::Topic::new("topic").unwrap();
    let marker = hapax::ledger::Marker::new(topic.clone(), 0, 7);
    ledger.set_markers(&scope, &[marker]).await.unwrap();
    kit::sweep(&ledger, RETENTION).await;
    let s = &harness.schema;
    // When the next sweep has noted that it begins, the clock leaps by years.
    run(
        &harness.pool,
        format!(
            "create function {s}.leap() returns trigger language plpgsql as $$ begin \
               update {s}.test_clock set at = at + interval '3 years'; return null; end $$; \
             create trigger leap after update on {s}.meta for each row execute function {s}.leap()"
        ),
    )
    .await;
    harness.advance(kit::DAY).await;
    let swept = kit::sweep(&ledger, RETENTION).await;
    assert!(ledger.now().await.unwrap().since(now) > 365 * kit::DAY, "it leapt");
    assert_eq!((swept.entries(), swept.weeks.len()), (0, 0), "{swept:?}");
    run(&harness.pool, format!("drop trigger leap on {s}.meta")).await;
    // The sweep after it notices the leap, and pauses.
    let swept = kit::sweep(&ledger, RETENTION).await;
    assert!(swept.paused_until.is_some() && swept.entries() == 0, "{swept:?}");
    for claim in [&of_week, &timeless] {
        kit::expect(&ledger, &kit::another(claim), "duplicate").await;
    }
    assert_eq!(ledger.markers(&scope, &topic, &[0]).await.unwrap().len(), 1);
}

/// A sweeper that stood still since it listed the weeks: the one it is about to close is gone, was made again and dropped again.
#[tokio::test(flavor = "multi_thread")]
async fn t62_a_sweeper_that_stood_still_closes_no_partition_that_is_gone() {
    let stage = Stage::new().await;
    let s = stage.harness.schema.clone();
    // Whoever is called slow stops where the weeks are listed.
    run(
        &stage.harness.pool,
        format!(
            "create or replace function {s}.ledger_now() returns timestamptz language plpgsql volatile as $$ begin \
               while current_setting('application_name') = 'slow {s}' and current_query() like '%union all select d.week%' \
                 and not pg_try_advisory_xact_lock_shared(hashtext('{s}')) loop perform pg_sleep(0.01); end loop; \
               return (select at from {s}.test_clock); end $$"
        ),
    )
    .await;
    let mut gate = stage.harness.pool.begin().await.unwrap();
    let lock = format!("select pg_advisory_xact_lock(hashtext('{s}'))");
    sqlx::query(AssertSqlSafe(lock)).execute(&mut *gate).await.unwrap();
    let one = sqlx::postgres::PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_secs(300))
        .connect(&support::url())
        .await
        .unwrap();
    run(&one, format!("set application_name = 'slow {s}'")).await;
    let slow = PgLedger::with_pool(one.clone(), support::settings(&s)).await.unwrap();
    let sweeping = tokio::spawn(async move {
        slow.sweep(SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false }).await
    });
    until("it lists the weeks", async || {
        ask(&stage.harness.pool, format!("select exists (select from pg_stat_activity where application_name = 'slow {s}' and wait_event = 'PgSleep')")).await
    })
    .await;
    // Its only connection is ours as soon as the weeks are listed: pools hand them out in the order in which they are asked for.
    let mut kept = Box::pin(one.acquire());
    assert!(tokio::time::timeout(Duration::ZERO, &mut kept).await.is_err(), "it waits in line");
    gate.rollback().await.unwrap();
    let kept = kept.await.unwrap();
    stage.finish().await;
    let young = of_scope(&stage.never, "young");
    kit::run(&stage.ledger, &young).await;
    // A sweep every few days, until the week is dropped once more.
    for _ in 0..12 {
        stage.harness.advance(3 * kit::DAY).await;
        kit::sweep(&stage.ledger, RETENTION).await;
    }
    kit::expect(&stage.ledger, &kit::another(&young), "too_old").await;
    drop(kept);
    sweeping.await.unwrap().unwrap();
    let closed = format!(
        "select count(*) from {s}.dropped where phase is not null and to_regclass(format('{s}.entry_%s_%s', week, number)) is null"
    );
    assert_eq!(ask::<i64>(&stage.harness.pool, closed).await, 0, "a partition that is gone was closed");
    kit::expect(&stage.ledger, &of_scope(&stage.never, "younger"), "claimed").await;
}

/// A claim in a transaction that was prepared before the week was closed has no session: the drop waits for its end all the same.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_prepared_transaction_is_waited_for() {
    let scratch = support::Scratch::new().await;
    let pool = support::pool_to(&scratch.url(), 12).await;
    let stage = Stage::on(PgHarness::on(pool.clone()).await).await;
    let mut hasty = support::settings(&stage.harness.schema);
    hasty.sweep_patience = Duration::from_millis(200);
    let hasty = PgLedger::with_pool(pool.clone(), hasty).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let mine = Claim { mode: Mode::Done, ..kit::another(&stage.never) };
    let outcome = hasty.claim_in(&mut tx, std::slice::from_ref(&mine)).await.unwrap().remove(0).unwrap();
    assert!(outcome.is_claimed());
    let s = &stage.harness.schema;
    sqlx::raw_sql(AssertSqlSafe(format!("prepare transaction '{s}'"))).execute(&mut *tx).await.unwrap();
    tx.rollback().await.unwrap(); // of nothing: the session has no transaction any more
    for _ in 0..3 {
        assert_eq!(kit::sweep(&hasty, RETENTION).await.weeks, []);
        let phase: Option<String> = ask(&pool, format!("select phase from {s}.dropped")).await;
        assert_eq!(phase.as_deref(), Some("closed"), "it does not wait for a prepared transaction");
        kit::expect(&hasty, &kit::another(&mine), "busy").await;
    }
    run(&pool, format!("commit prepared '{s}'")).await;
    stage.finish().await;
    assert!(hasty.was_committed(&mine).await.unwrap());
    kit::expect(&hasty, &kit::another(&mine), "duplicate").await;
    pool.close().await;
    scratch.drop_it().await;
}

/// A transaction of somebody else in the same database that does not end: the drop is postponed, with a bound, and goes on from
/// where it was; claims do not notice. Whoever came later is not waited for.
#[tokio::test(flavor = "multi_thread")]
async fn t62_a_long_transaction_of_others_postpones_a_drop_and_stops_nobody() {
    let scratch = support::Scratch::new().await;
    let pool = support::pool_to(&scratch.url(), 12).await;
    let stage = Stage::on(PgHarness::on(pool.clone()).await).await;
    let mut hasty = support::settings(&stage.harness.schema);
    hasty.sweep_patience = Duration::from_millis(200);
    let hasty = PgLedger::with_pool(pool.clone(), hasty).await.unwrap();
    let mut long = pool.begin().await.unwrap(); // has touched nothing of ours, and might
    sqlx::raw_sql("set transaction isolation level repeatable read; select 1")
        .execute(&mut *long)
        .await
        .unwrap();
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(kit::sweep(&hasty, RETENTION).await.weeks, []);
        assert!(began.elapsed() < Duration::from_secs(100), "{:?}", began.elapsed());
        kit::expect(&hasty, &kit::another(&stage.done), "duplicate").await;
        kit::expect(&hasty, &kit::another(&stage.never), "busy").await;
        let fresh = kit::v7_at(hasty.now().await.unwrap(), 9).to_string();
        kit::run(&hasty, &kit::claim(&fresh, kit::lease())).await;
        stage.harness.advance(Duration::from_secs(1)).await;
    }
    // Another one that begins now has seen the closing; the first one's end is enough.
    let mut later = pool.begin().await.unwrap();
    sqlx::raw_sql("set transaction isolation level repeatable read; select 1")
        .execute(&mut *later)
        .await
        .unwrap();
    long.rollback().await.unwrap();
    let s = &stage.harness.schema;
    until("it does not wait for somebody who came later", async || {
        kit::sweep(&hasty, RETENTION).await; // which may give up soon, on a machine that stands still
        let phase: Option<String> = ask(&pool, format!("select phase from {s}.dropped")).await;
        phase.as_deref() != Some("closed")
    })
    .await;
    later.rollback().await.unwrap();
    stage.finish().await;
    kit::expect(&hasty, &kit::another(&stage.never), "too_old").await;
    pool.close().await;
    scratch.drop_it().await;
}

/// What has ended and is opened again while its week goes is moved by whoever opens it.
#[tokio::test(flavor = "multi_thread")]
async fn t65_what_is_opened_again_outlives_its_week() {
    for phase in ["closed", "moving", "moved", "empty"] {
        let harness = PgHarness::new().await;
        let ledger = kit::open(&harness).await;
        let now = ledger.now().await.unwrap();
        let once = |n| kit::claim(&kit::v7_at(now, n).to_string(), Mode::Once { track: None });
        let (lost, back) = (once(21), once(22));
        let grant = kit::first(&ledger, &lost).await;
        let verdict = hapax::ledger::Verdict::Lost { reason: "crashed".into() };
        kit::settled(&ledger, &lost, &grant, verdict).await;
        let grant = kit::first(&ledger, &back).await;
        let stage = Stage::on(harness).await;
        stage.until_phase(phase).await;
        let retried = kit::intervene(&stage.ledger, &lost, hapax::ledger::Intervention::Retry).await;
        let given =
            stage.ledger.settle(&[kit::settling(&back, &grant, hapax::ledger::Verdict::release())]).await;
        if phase == "closed" {
            assert!(retried.unwrap_err().is_retryable(), "not while it is being closed");
            let refused = given.and_then(|mut all| all.remove(0)).unwrap_err();
            assert!(refused.is_retryable(), "{refused:?}");
            continue;
        }
        retried.unwrap();
        assert!(!kit::is_fenced(given.unwrap().remove(0).unwrap()));
        let twice: i64 = ask(
            &stage.harness.pool,
            format!(
                "select count(*) from {s}.entry join {s}.held using (week, scope, id)",
                s = stage.harness.schema
            ),
        )
        .await;
        assert_eq!(twice, 0, "in one place");
        stage.finish().await;
        for mine in [&lost, &back] {
            let again = Claim { mode: kit::lease(), ..kit::another(mine) };
            let grant = kit::first(&stage.ledger, &again).await;
            kit::settled(&stage.ledger, &again, &grant, kit::done()).await;
            kit::expect(&stage.ledger, &kit::another(mine), "duplicate").await;
        }
    }
}

/// The owner of a ledger that is not a superuser sees whom it has to wait for; and a pooler may stand in between.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_plain_owner_waits_for_others_too() {
    let scratch = support::Scratch::new().await;
    let role = format!("{}_o", &scratch.name[..20]);
    scratch.admin(&format!("create role {role} login; grant create on database {{db}} to {role}")).await;
    let as_role = support::pool_to(&scratch.url().replace("postgres@", &format!("{role}@")), 8).await;
    let stage = Stage::on(PgHarness::on(as_role.clone()).await).await;
    let other = support::pool_to(&scratch.url(), 2).await;
    let reader = reader(&other, &stage.harness.schema).await;
    let mut hasty = support::settings(&stage.harness.schema);
    hasty.sweep_patience = Duration::from_millis(200);
    let hasty = PgLedger::with_pool(as_role.clone(), hasty).await.unwrap();
    assert_eq!(kit::sweep(&hasty, RETENTION).await.weeks, []);
    kit::expect(&hasty, &kit::another(&stage.never), "busy").await;
    reader.rollback().await.unwrap();
    stage.finish().await;
    kit::expect(&hasty, &kit::another(&stage.never), "too_old").await;
    kit::expect(&hasty, &kit::another(&stage.due), "claimed").await;
    as_role.close().await;
    other.close().await;
    scratch.admin("drop database {db} with (force)").await;
    run(&pool(1).await, format!("drop role {role}")).await;
}

/// The pooler of the tests stands in front of PostgreSQL 18. On another server the same statements go to it directly.
#[tokio::test(flavor = "multi_thread")]
async fn a_week_is_dropped_through_a_transaction_pooler() {
    let pooler =
        std::env::var("HAPAX_TEST_PGBOUNCER_URL").expect("HAPAX_TEST_PGBOUNCER_URL: run scripts/test");
    let is_18 = std::env::var("HAPAX_TEST_POSTGRES_18_URL").is_ok_and(|url| url == support::url());
    let url = if is_18 { pooler } else { support::url() };
    let stage = Stage::new().await;
    let mut settings = support::settings(&stage.harness.schema);
    settings.pooling = hapax::backend::postgres::Pooling::Transaction;
    let through = PgLedger::connect(&url, settings).await.unwrap();
    until("the week is gone", async || {
        kit::sweep(&through, RETENTION).await;
        stage.is_gone().await
    })
    .await;
    kit::expect(&through, &kit::another(&stage.done), "too_old").await;
    kit::run(&through, &kit::another(&stage.due)).await;
}
