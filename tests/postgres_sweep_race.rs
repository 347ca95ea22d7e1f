//! Races of sweepers with everybody else. Several weeks go at once, under sweepers that are killed between any two steps, while
//! workers of every kind claim, settle, give back and abandon what is in them, in transactions of every kind, and somebody's long
//! transaction comes and goes. The witness is a table of effects that knows nothing of the ledger's own: nothing is doubled,
//! nothing is lost, and nobody is told "too old" about what is open or was just done.
//!
//! A race is one week that goes. `HAPAX_RACES` says how many there are; `scripts/torture sweep` runs thousands.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/postgres.rs"]
mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, LeaseSettings, Ledger as _, Mode, Outcome, Settled, SweepSettings};
use hapax::testing::{Harness as _, kit};
use sqlx::{AssertSqlSafe, PgPool};
use support::{PgHarness, Random, Scratch, ask, child, pool_to, role, run, settings};

const NAME: &str = "t62_sweepers_race_with_everybody";
const SWEEPERS: usize = 3;
const WORKERS: usize = 6;
/// Weeks that go at once.
const WEEKS: u64 = 3;
const RETENTION: Duration = Duration::from_secs(86_400);
/// Rounds in one schema: its clock must not leave the century.
const ROUNDS_MAX: u64 = 150;
/// Where a sweeper's process is killed.
const POINTS: [&str; 7] = [
    "sweep.closed",
    "sweep.listed",
    "sweep.waited",
    "sweep.moved",
    "sweep.waited_again",
    "sweep.detached",
    "sweep.dropped",
];

/// What an id was before its week went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Waiting for a retry that is due.
    Due,
    /// Leased by somebody who died.
    Lapsed,
    Done,
    Never,
}

const KINDS: [Kind; 10] = [
    Kind::Due,
    Kind::Due,
    Kind::Due,
    Kind::Lapsed,
    Kind::Lapsed,
    Kind::Done,
    Kind::Done,
    Kind::Never,
    Kind::Never,
    Kind::Never,
];

/// What was answered about an id, and when.
#[derive(Debug, Default)]
struct Said {
    too_old: Vec<(Instant, Instant)>,
    first: Vec<(Instant, Instant)>,
}

struct Stage {
    harness: PgHarness,
    ledger: PgLedger,
    ids: Vec<(Claim, Kind)>,
    said: Mutex<HashMap<String, Said>>,
    stop: AtomicBool,
    claims: AtomicU64,
}

fn terms() -> SweepSettings {
    SweepSettings { retention: RETENTION, batch_max: 3, dry_run: false }
}

fn leased() -> Mode {
    Mode::Lease(LeaseSettings { lease: kit::LEASE, attempts_max: 1000, alone: true })
}

async fn pause(random: &mut Random, ms: usize) {
    tokio::time::sleep(Duration::from_millis(random.below(ms) as u64)).await;
}

impl Stage {
    fn note(&self, id: &str, asked: Instant, outcome: &str) {
        self.claims.fetch_add(1, Ordering::Relaxed);
        let mut said = self.said.lock().unwrap();
        let said = said.entry(id.to_owned()).or_default();
        match outcome {
            "too_old" => said.too_old.push((asked, Instant::now())),
            "claimed" => said.first.push((asked, Instant::now())),
            _ => {}
        }
    }

    fn effect(&self, claim: &Claim) -> String {
        format!("insert into {}.effects values ('{}')", self.harness.schema, claim.identity.id)
    }

    /// One round of one worker. An error that changed nothing is nobody's concern; what it leaves open is.
    async fn work(&self, random: &mut Random) -> hapax::Result<()> {
        let claim = kit::another(&self.ids[random.below(self.ids.len())].0);
        let id = claim.identity.id.to_string();
        let asked = Instant::now();
        match random.below(10) {
            0..4 => self.in_transaction(&claim, random).await?,
            4..7 => {
                let claim = Claim { mode: leased(), ..claim };
                let outcome = self.ledger.claim(std::slice::from_ref(&claim)).await?.remove(0)?;
                self.note(&id, asked, outcome.name());
                if let Outcome::First(grant) = outcome {
                    pause(random, 20).await;
                    match random.below(10) {
                        0..2 => drop(
                            self.ledger
                                .settle(&[kit::settling(&claim, &grant, kit::retry(Duration::ZERO))])
                                .await?,
                        ),
                        2 => {} // its process died
                        3 => drop(kit::extend(&self.ledger, &claim, &grant, kit::LEASE).await),
                        _ => {
                            let mut tx = self.harness.pool.begin().await.expect("a transaction");
                            let settle = kit::settling(&claim, &grant, kit::done());
                            let settled = self.ledger.settle_in(&mut tx, &[settle]).await?.remove(0)?;
                            assert!(
                                matches!(settled, Settled::Ok { .. }),
                                "{id}: a live lease was fenced: {settled:?}"
                            );
                            sqlx::raw_sql(AssertSqlSafe(self.effect(&claim)))
                                .execute(&mut *tx)
                                .await
                                .expect("an effect");
                            pause(random, 20).await;
                            tx.commit().await.expect("a commit");
                        }
                    }
                }
            }
            7 => {
                let track = (random.below(2) == 0).then_some(kit::LEASE);
                let claim = Claim { mode: Mode::Once { track }, ..claim };
                let outcome = self.ledger.claim(std::slice::from_ref(&claim)).await?.remove(0)?;
                self.note(&id, asked, outcome.name());
                if outcome.is_claimed() {
                    run(&self.harness.pool, self.effect(&claim)).await;
                }
            }
            _ => self.by_function(&claim, random).await?,
        }
        Ok(())
    }

    async fn in_transaction(&self, claim: &Claim, random: &mut Random) -> hapax::Result<()> {
        let claim = Claim { mode: Mode::Done, ..claim.clone() };
        let mut tx = self.harness.pool.begin().await.expect("a transaction");
        if random.below(3) == 0 {
            let old = "set transaction isolation level repeatable read; select 1";
            sqlx::raw_sql(old).execute(&mut *tx).await.expect("an old snapshot");
            pause(random, 60).await;
        }
        let asked = Instant::now();
        let outcome = match self.ledger.claim_in(&mut tx, std::slice::from_ref(&claim)).await {
            Ok(mut outcomes) => outcomes.remove(0)?,
            Err(error) => {
                tx.rollback().await.expect("a rollback");
                return Err(error);
            }
        };
        if outcome.is_claimed() {
            sqlx::raw_sql(AssertSqlSafe(self.effect(&claim))).execute(&mut *tx).await.expect("an effect");
            pause(random, 60).await;
            if random.below(4) == 0 {
                tx.rollback().await.expect("a rollback");
                return Ok(());
            }
        }
        tx.commit().await.expect("a commit");
        self.note(&claim.identity.id.to_string(), asked, outcome.name());
        Ok(())
    }

    /// As any language would do it.
    async fn by_function(&self, claim: &Claim, random: &mut Random) -> hapax::Result<()> {
        let (s, id, asked) = (&self.harness.schema, claim.identity.id.to_string(), Instant::now());
        let mut tx = self.harness.pool.begin().await.expect("a transaction");
        let how = if random.below(2) == 0 { "claim_in" } else { "lease" };
        let answer: Result<(String, Option<i64>), _> =
            sqlx::query_as(AssertSqlSafe(format!("select outcome, token from {s}.{how}('orders', $1)")))
                .bind(&id)
                .fetch_one(&mut *tx)
                .await;
        let (outcome, token) = match answer {
            Ok(answer) => answer,
            Err(error) => {
                let code = error.as_database_error().and_then(|e| e.code().map(std::borrow::Cow::into_owned));
                let code = code.unwrap_or_default();
                assert!(["40001", "40P01", "55000", "55006", "55P03"].contains(&code.as_str()), "{error}");
                return Ok(());
            }
        };
        if how == "lease" && outcome == "claimed" {
            tx.commit().await.expect("a commit");
            self.note(&id, asked, &outcome);
            pause(random, 20).await;
            tx = self.harness.pool.begin().await.expect("a transaction");
            let sql = format!("select {s}.settle('orders', $1, $2, 'done')");
            let settled: Result<bool, _> =
                sqlx::query_scalar(AssertSqlSafe(sql)).bind(&id).bind(token).fetch_one(&mut *tx).await;
            let Ok(settled) = settled else { return Ok(()) }; // abandoned
            assert!(settled, "{id}: a live lease was fenced");
        }
        if outcome == "claimed" {
            sqlx::raw_sql(AssertSqlSafe(self.effect(claim))).execute(&mut *tx).await.expect("an effect");
            pause(random, 30).await;
        }
        tx.commit().await.expect("a commit");
        if how != "lease" || outcome != "claimed" {
            self.note(&id, asked, &outcome);
        }
        Ok(())
    }

    /// Fills weeks, and lets them become old.
    async fn fill(&mut self) {
        self.harness.advance(kit::DAY * 7 * WEEKS as u32).await; // past the weeks of the round before
        let now = self.ledger.now().await.unwrap();
        self.ids.clear();
        self.said.lock().unwrap().clear();
        run(&self.harness.pool, format!("truncate {}.effects", self.harness.schema)).await;
        for week in 0..WEEKS {
            for (n, kind) in KINDS.into_iter().enumerate() {
                let id = kit::v7_at(now.minus(kit::DAY * 7 * week as u32), n as u8);
                let claim = kit::claim(&id.to_string(), leased());
                if kind != Kind::Never {
                    let grant = kit::first(&self.ledger, &claim).await;
                    match kind {
                        Kind::Due => drop(
                            kit::settle(&self.ledger, &claim, &grant, kit::retry(Duration::from_secs(1)))
                                .await,
                        ),
                        Kind::Done => drop(kit::settle(&self.ledger, &claim, &grant, kit::done()).await),
                        _ => {}
                    }
                }
                self.ids.push((claim, kind));
            }
        }
        self.harness.advance(kit::DAY * 9).await;
        // The clock leaps from round to round, which is nobody's fault.
        let forget = format!("update {}.meta set swept_at = null, paused_until = null", self.harness.schema);
        run(&self.harness.pool, forget).await;
    }

    /// Partitions of weeks that are left, other than the one of the present.
    async fn weeks_left(&self) -> i64 {
        let s = &self.harness.schema;
        ask(&self.harness.pool, format!("select count(*) - 1 from pg_class where relname like 'entry\\__%' and relkind = 'r' and relnamespace = '{s}'::regnamespace")).await
    }

    /// What the witness says once everybody has gone home.
    async fn judge(&self) -> Vec<String> {
        let s = &self.harness.schema;
        let effects: HashMap<String, i64> =
            sqlx::query_as(AssertSqlSafe(format!("select id, count(*) from {s}.effects group by id")))
                .fetch_all(&self.harness.pool)
                .await
                .unwrap()
                .into_iter()
                .collect();
        let said = std::mem::take(&mut *self.said.lock().unwrap());
        let mut faults = Vec::new();
        for (claim, kind) in &self.ids {
            let id = claim.identity.id.to_string();
            let count = effects.get(&id).copied().unwrap_or(0);
            let said = said.get(&id);
            let now = kit::one(&self.ledger, &kit::another(claim)).await;
            let mut fault = |what: &str| {
                faults.push(format!("{what}: {kind:?} {id}: {count} effects, now {now:?}, {said:?}"));
            };
            match (kind, count, now.name()) {
                (Kind::Done, 0, "duplicate" | "too_old")
                | (Kind::Never, 0, "too_old" | "busy")
                | (Kind::Due | Kind::Lapsed, 0, "claimed" | "busy" | "retry_later")
                | (Kind::Due | Kind::Lapsed | Kind::Never, 1, "duplicate") => {}
                (_, 2.., _) | (Kind::Done, 1, _) => fault("doubled"),
                (_, 1, "claimed") => fault("would be doubled"),
                (_, 0, _) => fault("lost"),
                (_, 1, _) => fault("wrong answer"),
                _ => fault("impossible"),
            }
            let Some(said) = said else { continue };
            let open = matches!(kind, Kind::Due | Kind::Lapsed);
            let after_first =
                said.too_old.iter().any(|(asked, _)| said.first.iter().any(|(_, answered)| answered < asked));
            let before_first =
                said.first.iter().any(|(asked, _)| said.too_old.iter().any(|(_, answered)| answered < asked));
            if (open && !said.too_old.is_empty()) || after_first || before_first {
                fault("wrong too_old");
            }
        }
        faults
    }
}

/// A sweeper; killed means that it and its connections are dropped in the middle of whatever they do.
async fn sweeper(url: String, schema: String) {
    let ledger = PgLedger::with_pool(pool_to(&url, 2).await, settings(&schema)).await.unwrap();
    loop {
        if let Err(error) = ledger.sweep(terms()).await {
            assert!(error.is_retryable(), "a sweep failed: {error:?}");
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Somebody's long transaction: a dump, a report.
async fn foreign(stage: Arc<Stage>, mut random: Random) {
    while !stage.stop.load(Ordering::Relaxed) {
        let mut tx = stage.harness.pool.begin().await.unwrap();
        sqlx::raw_sql("set transaction isolation level repeatable read").execute(&mut *tx).await.unwrap();
        let what = if random.below(2) == 0 {
            "select 1".into()
        } else {
            format!("select from {}.entry", stage.harness.schema)
        };
        sqlx::raw_sql(AssertSqlSafe(what)).execute(&mut *tx).await.unwrap();
        pause(&mut random, 150).await;
        tx.rollback().await.unwrap();
        pause(&mut random, 60).await;
    }
}

async fn round(stage: &mut Arc<Stage>, random: &mut Random, url: &str, kills: &mut u64) -> Vec<String> {
    let own = Arc::get_mut(stage).expect("everybody has gone home");
    own.fill().await;
    own.stop.store(false, Ordering::Relaxed);
    let stage = &*stage;
    let mut command = child(NAME, "sweeper", &stage.harness.schema);
    let point = format!("{}:{}", POINTS[random.below(POINTS.len())], 1 + random.below(3));
    let mut killed = command
        .env("HAPAX_CRASH_AT", &point)
        .env("HAPAX_TEST_POSTGRES_URL", url)
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..WORKERS {
        let (stage, mut random) = (Arc::clone(stage), random.fork());
        workers.spawn(async move {
            while !stage.stop.load(Ordering::Relaxed) {
                if let Err(error) = stage.work(&mut random).await {
                    assert!(error.is_retryable(), "{error:?}");
                }
            }
        });
    }
    workers.spawn(foreign(Arc::clone(stage), random.fork()));
    let spawn = || tokio::spawn(sweeper(url.to_owned(), stage.harness.schema.clone()));
    let mut sweepers: Vec<_> = (0..SWEEPERS).map(|_| spawn()).collect();
    let end = Instant::now() + Duration::from_secs(60);
    while stage.weeks_left().await > 0 {
        assert!(Instant::now() < end, "weeks are left after a minute");
        pause(random, 30).await;
        if random.below(8) == 0 {
            let n = random.below(SWEEPERS);
            sweepers[n].abort();
            *kills += 1;
            if let Err(error) = std::mem::replace(&mut sweepers[n], spawn()).await {
                assert!(error.is_cancelled(), "{error}");
            }
        }
    }
    pause(random, 30).await; // everything is gone, and work goes on
    stage.stop.store(true, Ordering::Relaxed);
    while let Some(worker) = workers.join_next().await {
        worker.expect("a worker");
    }
    for sweeper in sweepers {
        sweeper.abort();
        if let Err(error) = sweeper.await {
            assert!(error.is_cancelled(), "{error}");
        }
    }
    if killed.try_wait().unwrap().is_some_and(|status| !status.success()) {
        *kills += 1;
    }
    killed.kill().await.unwrap();
    stage.judge().await
}

async fn stage(url: &str) -> Arc<Stage> {
    let harness = PgHarness::on(pool_to(url, 2 * WORKERS as u32 + 4).await).await;
    let schema = &harness.schema;
    // Nobody leaves a touch, as if another had left one within the hour: weeks go while they are worked on.
    run(
        &harness.pool,
        format!(
            "create table {schema}.effects (id text not null); \
             create function {schema}.no_touch() returns trigger language plpgsql as 'begin return null; end'; \
             create trigger no_touch before insert on {schema}.touch for each row execute function {schema}.no_touch()"
        ),
    )
    .await;
    let ledger = kit::open(&harness).await;
    Arc::new(Stage {
        harness,
        ledger,
        ids: Vec::new(),
        said: Mutex::default(),
        stop: AtomicBool::new(false),
        claims: AtomicU64::new(0),
    })
}

async fn drop_schema(pool: &PgPool, schema: &str) {
    run(pool, format!("drop schema {schema} cascade")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t62_sweepers_race_with_everybody() {
    if let Some((_, schema)) = role() {
        return sweeper(support::url(), schema).await;
    }
    let races: u64 =
        std::env::var("HAPAX_RACES").map_or(18, |races| races.parse().expect("HAPAX_RACES is a number"));
    let mut random = Random::new();
    // A database of its own: a sweep waits for whoever is in the same one.
    let scratch = Scratch::new().await;
    let url = scratch.url();
    let (mut done, mut kills, mut claims, began) = (0, 0, 0, Instant::now());
    while done < races {
        let mut stage = stage(&url).await;
        for _ in 0..ROUNDS_MAX {
            let faults = round(&mut stage, &mut random, &url, &mut kills).await;
            done += WEEKS;
            assert!(faults.is_empty(), "after {done} races:\n{}", faults.join("\n"));
            if done % 300 == 0 {
                println!("{done} races, {kills} sweepers killed, {:?}", began.elapsed());
            }
            if done >= races {
                break;
            }
        }
        claims += stage.claims.load(Ordering::Relaxed);
        drop_schema(&stage.harness.pool, &stage.harness.schema).await;
    }
    println!(
        "{done} races, {claims} claims, {kills} sweepers killed: nothing doubled, lost or wrongly too old, in {:?}",
        began.elapsed()
    );
    scratch.drop_it().await;
}
