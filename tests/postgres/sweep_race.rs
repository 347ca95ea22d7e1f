//! Races of sweepers with everybody else. Several weeks go at once, under sweepers that are killed between any two steps, while
//! workers of every kind claim, settle, give back, open again and abandon what is in them, with and without an order and held bytes, in
//! transactions of every kind, prepared ones included; scopes begin, and somebody's long transaction comes and goes. The witness is a table of effects that knows nothing of the ledger's own: nothing is doubled,
//! nothing is lost, and nobody is told "too old" about what is open or was just done.
//!
//! A race is one week that goes. `HAPAX_RACES` says how many there are, `HAPAX_RACE_DATABASES` how many databases they are run in at the
//! same time, `HAPAX_RACE_LONGER` how much longer everybody pauses; `scripts/torture sweep` runs thousands. `HAPAX_TEST_SEED` repeats what everybody decides, if not when.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::postgres::{PgHarness, Random, Scratch, ask, child, pool_to, role, run, settings};
use hapax::backend::postgres::PgLedger;
use hapax::event::Record;
use hapax::ledger::{
    Claim, Claims as _, Grant, Intervention, LeaseSettings, Mode, OnDead, Operations as _, Order,
    OrderPolicy, Outcome, Settled, SweepSettings, Verdict,
};
use hapax::testing::{Harness as _, kit};
use sqlx::{AssertSqlSafe, PgPool};

const NAME: &str = "t62_sweepers_race_with_everybody";
const SWEEPERS: usize = 3;
const WORKERS: usize = 6;
/// Weeks that go at once.
const WEEKS: u64 = 3;
const RETENTION: Duration = Duration::from_secs(86_400);
/// Scopes that begin in one round, each while its week goes: they make weeks again.
const YOUNG_MAX: u64 = 4;
/// Rounds in one schema: its clock must not leave the century.
const ROUNDS_MAX: u64 = 150;
/// How long a round may take. An idle machine needs two seconds.
const ROUND_MAX: Duration = Duration::from_secs(300);
/// A line on stderr after so many races.
const REPORT_EVERY: u64 = 500;
/// The most databases: each may have as many prepared transactions as it has workers, and the server of the tests allows 20.
const DATABASES_MAX: u64 = 3;
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
    /// Claimed at most once, and its end was never recorded.
    Once,
}

const KINDS: [Kind; 11] = [
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
    Kind::Once,
];

/// Which of [`KINDS`] have an order: each in an aggregate of its own, so that none has to wait for another.
const ORDERED: [usize; 4] = [1, 4, 6, 8];
/// Which of them, waiting for a retry, have their bytes in held.
const WITH_BYTES: [usize; 2] = [1, 2];

/// What was answered about an id, and when.
#[derive(Debug, Default)]
struct Said {
    too_old: Vec<(Instant, Instant)>,
    first: Vec<(Instant, Instant)>,
    /// When the end of an at-most-once claim was committed.
    ended: Option<Instant>,
}

struct Stage {
    harness: PgHarness,
    ledger: PgLedger,
    ids: Vec<(Claim, Kind)>,
    /// What at-most-once claims were granted.
    once: Vec<(Claim, Grant)>,
    said: Mutex<HashMap<String, Said>>,
    stop: AtomicBool,
    claims: AtomicU64,
    young: AtomicU64,
}

fn sweeping() -> SweepSettings {
    SweepSettings { retention: RETENTION, batch_max: 3, dry_run: false }
}

fn leased() -> Mode {
    Mode::Lease(LeaseSettings { lease: kit::LEASE, attempts_max: 1000, alone: true })
}

async fn pause(random: &mut Random, ms: usize) {
    // Moves the two sides of the race against each other. On a busy machine a sweep takes longer between two
    // steps than any of these pauses, and what overlaps a step on a quiet one no longer does.
    let longer = number("HAPAX_RACE_LONGER", 1);
    tokio::time::sleep(Duration::from_millis(random.below(ms) as u64 * longer)).await;
}

fn order(id: &str) -> Order {
    let aggregate = hapax::Aggregate::new(format!("a-{id}")).expect("a name");
    Order { aggregate, seq: 1, policy: OrderPolicy::Latest, on_dead: OnDead::Park }
}

fn retry_with_bytes(after: Duration) -> Verdict {
    let body = Some(Record { payload: Some("bytes".into()), ..Record::default() });
    Verdict::Retry { after, counted: true, reason: None, body }
}

/// Whether a statement failed because others were in the way: nothing of its transaction stays.
fn is_others(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|e| e.code().map(std::borrow::Cow::into_owned));
    ["40001", "40P01", "55000", "55006", "55P03"].contains(&code.unwrap_or_default().as_str())
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
        match random.below(13) {
            12 => self.end_once(random).await?,
            0..4 => self.in_transaction(&claim, random).await?,
            4..7 => {
                let claim = Claim { mode: leased(), ..claim };
                let outcome = self.ledger.claim(std::slice::from_ref(&claim)).await?.remove(0)?;
                self.note(&id, asked, outcome.name());
                if let Outcome::First(grant) = outcome {
                    pause(random, 20).await;
                    match random.below(10) {
                        0 => {
                            let back = kit::settling(&claim, &grant, kit::retry(Duration::ZERO));
                            drop(self.ledger.settle(&[back]).await?);
                        }
                        1 => {
                            let held = kit::settling(&claim, &grant, retry_with_bytes(Duration::ZERO));
                            drop(self.ledger.settle(&[held]).await?);
                        }
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
                match outcome {
                    Outcome::First(grant) if claim.order.is_none() && random.below(2) == 0 => {
                        self.open_again(&claim, &grant).await;
                    }
                    outcome if outcome.is_claimed() => run(&self.harness.pool, self.effect(&claim)).await,
                    _ => {}
                }
            }
            8 => match kit::intervene(&self.ledger, &claim, Intervention::Retry).await {
                Err(error) if error.is_retryable() => return Err(error),
                _ => {} // mostly it does not fit
            },
            9 => self.begin_young(&claim, random).await?,
            _ => self.by_function(&claim, random).await?,
        }
        Ok(())
    }

    /// Records the end of an at-most-once claim in a transaction that stays open for a while.
    async fn end_once(&self, random: &mut Random) -> hapax::Result<()> {
        let (claim, grant) = &self.once[random.below(self.once.len())];
        let mut tx = self.harness.pool.begin().await.expect("a transaction");
        let settle = kit::settling(claim, grant, Verdict::Finished { metadata: None });
        let settled = self.ledger.settle_in(&mut tx, &[settle]).await?.remove(0)?;
        pause(random, 60).await;
        match tx.commit().await {
            Err(error) if is_others(&error) => return Ok(()),
            done => done.expect("a commit"),
        }
        // Fenced is whoever comes after the week has gone with the claim.
        if matches!(settled, Settled::Ok { .. }) {
            let mut said = self.said.lock().unwrap();
            said.entry(claim.identity.id.to_string()).or_default().ended.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// Gives an at-most-once claim back. While its week is being closed, that has to be tried again.
    async fn open_again(&self, claim: &Claim, grant: &Grant) {
        let end = Instant::now() + ROUND_MAX;
        loop {
            let back = kit::settling(claim, grant, Verdict::release());
            match self.ledger.settle(&[back]).await.and_then(|mut answers| answers.remove(0)) {
                Ok(settled) => {
                    let id = &claim.identity;
                    assert!(
                        matches!(settled, Settled::Ok { .. }),
                        "{id}: its holder was fenced: {settled:?}"
                    );
                    return;
                }
                Err(error) => assert!(error.is_retryable() && Instant::now() < end, "{error:?}"),
            }
        }
    }

    /// A scope that begins when its week is on the way out waits until the week is gone, and makes it again.
    async fn begin_young(&self, claim: &Claim, random: &mut Random) -> hapax::Result<()> {
        let (s, id) = (&self.harness.schema, &claim.identity.id);
        let drop_of = |so: &str| {
            format!(
                "select (select d.number from {s}.dropped d where d.week = {s}.week_of_id({s}.id_key('{id}')) {so})"
            )
        };
        let leaving: Option<i64> = ask(&self.harness.pool, drop_of("and d.phase is not null")).await;
        if leaving.is_none() || self.young.fetch_add(1, Ordering::Relaxed) >= YOUNG_MAX {
            return Ok(());
        }
        let mut young = Claim { mode: leased(), order: None, ..claim.clone() };
        young.identity.scope = hapax::Scope::new(format!("young-{}", random.number())).expect("a scope");
        let end = Instant::now() + ROUND_MAX;
        while !self.stop.load(Ordering::Relaxed) {
            let young = kit::another(&young);
            match self.ledger.claim(std::slice::from_ref(&young)).await.and_then(|mut all| all.remove(0)) {
                Ok(Outcome::First(_)) => return Ok(()), // abandoned, and so kept
                Ok(Outcome::Busy { until: None, .. }) => assert!(Instant::now() < end, "{id}: busy for ever"),
                Ok(other) => {
                    // Another young scope may have made the week again, and that one was dropped too: then it is too old.
                    let last: Option<i64> = ask(&self.harness.pool, drop_of("")).await;
                    let again = matches!(other, Outcome::TooOld { .. }) && last != leaving;
                    assert!(again, "{id}: a scope that began after the closing got {other:?}");
                    return Ok(());
                }
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
            pause(random, 5).await;
        }
        Ok(())
    }

    async fn in_transaction(&self, claim: &Claim, random: &mut Random) -> hapax::Result<()> {
        let claim = Claim { mode: Mode::Done, ..claim.clone() };
        let mut tx = self.harness.pool.begin().await.expect("a transaction");
        let level = ["", "", "", "", "repeatable read", "serializable"][random.below(6)];
        if !level.is_empty() {
            let old = format!("set transaction isolation level {level}; select 1");
            sqlx::raw_sql(AssertSqlSafe(old)).execute(&mut *tx).await.expect("an old snapshot");
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
            match sqlx::raw_sql(AssertSqlSafe(self.effect(&claim))).execute(&mut *tx).await {
                Err(error) if is_others(&error) => return Ok(()),
                done => drop(done.expect("an effect")),
            }
            pause(random, 60).await;
            if random.below(4) == 0 {
                tx.rollback().await.expect("a rollback");
                return Ok(());
            }
        }
        let committed = if random.below(4) == 0 {
            self.commit_prepared(tx, random).await
        } else {
            tx.commit().await.map(|()| true)
        };
        match committed {
            Err(error) if is_others(&error) => return Ok(()), // serializable
            Ok(false) => return Ok(()),
            done => drop(done.expect("a commit")),
        }
        self.note(&claim.identity.id.to_string(), asked, outcome.name());
        Ok(())
    }

    /// Prepares a transaction, which ends later, without the session that began it; false if it is rolled back.
    async fn commit_prepared(
        &self,
        mut tx: sqlx::PgTransaction<'_>,
        random: &mut Random,
    ) -> sqlx::Result<bool> {
        let gid = format!("{}_{}", self.harness.schema, random.number());
        sqlx::raw_sql(AssertSqlSafe(format!("prepare transaction '{gid}'"))).execute(&mut *tx).await?;
        tx.rollback().await?; // of nothing
        pause(random, 30).await;
        let commits = random.below(4) > 0;
        let how = if commits { "commit" } else { "rollback" };
        run(&self.harness.pool, format!("{how} prepared '{gid}'")).await;
        Ok(commits)
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
                assert!(is_others(&error), "{error}");
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
        self.once.clear();
        self.said.lock().unwrap().clear();
        self.young.store(0, Ordering::Relaxed);
        run(&self.harness.pool, format!("truncate {}.effects", self.harness.schema)).await;
        for week in 0..WEEKS {
            for (n, kind) in KINDS.into_iter().enumerate() {
                let id = kit::v7_at(now.minus(kit::DAY * 7 * week as u32), n as u8);
                let order = ORDERED.contains(&n).then(|| order(&id.to_string()));
                let claim = Claim { order, ..kit::claim(&id.to_string(), leased()) };
                if kind == Kind::Once {
                    let claim = Claim { mode: Mode::Once { track: None }, ..claim.clone() };
                    let grant = kit::first(&self.ledger, &claim).await;
                    self.once.push((claim, grant));
                } else if kind != Kind::Never {
                    let grant = kit::first(&self.ledger, &claim).await;
                    match kind {
                        Kind::Due => {
                            let after = Duration::from_secs(1);
                            let bytes = WITH_BYTES.contains(&n);
                            let verdict = if bytes { retry_with_bytes(after) } else { kit::retry(after) };
                            let _ = kit::settle(&self.ledger, &claim, &grant, verdict).await;
                        }
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
            // Granted, and given back or abandoned: then it is open, wherever its row is now.
            let granted = said.is_some_and(|said| !said.first.is_empty());
            let ended = said.and_then(|said| said.ended);
            match (kind, count, now.name()) {
                (Kind::Once, 0, "too_old") if ended.is_none() => {}
                (Kind::Never, 0, "claimed" | "retry_later") if granted => {}
                (Kind::Done, 0, "stale") if claim.order.is_some() => {}
                (Kind::Once, 0, "duplicate")
                | (Kind::Done, 0, "duplicate" | "too_old")
                | (Kind::Never, 0, "too_old" | "busy")
                | (Kind::Due | Kind::Lapsed, 0, "claimed" | "busy" | "retry_later")
                | (Kind::Due | Kind::Lapsed | Kind::Never, 1, "duplicate") => {}
                (_, 2.., _) | (Kind::Done | Kind::Once, 1, _) => fault("doubled"),
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
            let after_end =
                said.too_old.iter().any(|(asked, _)| said.ended.is_some_and(|ended| ended < *asked));
            if (open && !said.too_old.is_empty()) || after_first || before_first || after_end {
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
        if let Err(error) = ledger.sweep(sweeping()).await {
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

/// Time goes by for whoever was there, so that weeks go while they are worked on.
async fn touches_fade(stage: Arc<Stage>, mut random: Random) {
    while !stage.stop.load(Ordering::Relaxed) {
        run(&stage.harness.pool, format!("delete from {}.touch", stage.harness.schema)).await;
        pause(&mut random, 20).await;
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
        .stderr(std::process::Stdio::piped())
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
    workers.spawn(touches_fade(Arc::clone(stage), random.fork()));
    let spawn = || tokio::spawn(sweeper(url.to_owned(), stage.harness.schema.clone()));
    let mut sweepers: Vec<_> = (0..SWEEPERS).map(|_| spawn()).collect();
    let end = Instant::now() + ROUND_MAX;
    while stage.weeks_left().await > 0 {
        assert!(Instant::now() < end, "weeks are left after {ROUND_MAX:?}");
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
    let ended = killed.try_wait().unwrap();
    killed.start_kill().unwrap_or_default(); // it may have ended
    let output = killed.wait_with_output().await.unwrap();
    if let Some(status) = ended {
        // Killed at its point; whoever ended in any other way has found a fault.
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(status.signal(), Some(9), "a sweeper's process ended by itself ({status}): {said}");
        *kills += 1;
    }
    stage.judge().await
}

async fn stage(url: &str) -> Arc<Stage> {
    let harness = PgHarness::on(pool_to(url, 2 * WORKERS as u32 + 4).await).await;
    let schema = &harness.schema;
    run(&harness.pool, format!("create table {schema}.effects (id text not null)")).await;
    let ledger = kit::open(&harness).await;
    Arc::new(Stage {
        harness,
        ledger,
        ids: Vec::new(),
        once: Vec::new(),
        said: Mutex::default(),
        stop: AtomicBool::new(false),
        claims: AtomicU64::new(0),
        young: AtomicU64::new(0),
    })
}

async fn drop_schema(pool: &PgPool, schema: &str) {
    run(pool, format!("drop schema {schema} cascade")).await;
}

/// What the races of all databases have done together.
struct Tally {
    wanted: u64,
    begun: AtomicU64,
    done: AtomicU64,
    kills: AtomicU64,
    claims: AtomicU64,
    began: Instant,
}

impl Tally {
    /// Whether another round is wanted.
    fn begin(&self) -> bool {
        self.begun.fetch_add(WEEKS, Ordering::Relaxed) < self.wanted
    }

    fn end(&self, kills: u64) -> u64 {
        self.kills.fetch_add(kills, Ordering::Relaxed);
        let before = self.done.fetch_add(WEEKS, Ordering::Relaxed);
        if (before + WEEKS) / REPORT_EVERY > before / REPORT_EVERY {
            eprintln!("{}", self.line()); // a long run is watched on stderr
        }
        before + WEEKS
    }

    fn line(&self) -> String {
        let (done, took) = (self.done.load(Ordering::Relaxed), self.began.elapsed());
        format!(
            "{done} of {} races, {} sweepers killed, {:.0} s, {:.0} races a minute",
            self.wanted,
            self.kills.load(Ordering::Relaxed),
            took.as_secs_f64(),
            done as f64 * 60.0 / took.as_secs_f64().max(0.001)
        )
    }
}

/// Runs rounds in a database of its own, because a sweep waits for whoever is in the same one.
async fn lane(tally: Arc<Tally>, mut random: Random) {
    let scratch = Scratch::new().await;
    let url = scratch.url();
    let mut wanted = tally.begin();
    while wanted {
        let mut stage = stage(&url).await;
        for _ in 0..ROUNDS_MAX {
            let mut kills = 0;
            let faults = round(&mut stage, &mut random, &url, &mut kills).await;
            let done = tally.end(kills);
            assert!(faults.is_empty(), "after {done} races:\n{}", faults.join("\n"));
            wanted = tally.begin();
            if !wanted {
                break;
            }
        }
        tally.claims.fetch_add(stage.claims.load(Ordering::Relaxed), Ordering::Relaxed);
        drop_schema(&stage.harness.pool, &stage.harness.schema).await;
    }
    scratch.drop_it().await;
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| {
        value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value:?}"))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t62_sweepers_race_with_everybody() {
    if let Some((_, schema)) = role() {
        return sweeper(support::url(), schema).await;
    }
    let databases = number("HAPAX_RACE_DATABASES", 1).clamp(1, DATABASES_MAX);
    let mut random = Random::new();
    let tally = Arc::new(Tally {
        wanted: number("HAPAX_RACES", 18),
        begun: AtomicU64::new(0),
        done: AtomicU64::new(0),
        kills: AtomicU64::new(0),
        claims: AtomicU64::new(0),
        began: Instant::now(),
    });
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..databases {
        running.spawn(lane(Arc::clone(&tally), random.fork()));
    }
    while let Some(lane) = running.join_next().await {
        lane.expect("no fault");
    }
    let claims = tally.claims.load(Ordering::Relaxed);
    println!("{}, {claims} claims: nothing doubled, lost or wrongly too old", tally.line());
}

/// A sweep that does not wait for those who have not seen the closing: the race finds out what that leads to.
#[tokio::test]
async fn t63_the_race_catches_a_sweep_that_does_not_wait() {
    if role().is_some() {
        return;
    }
    let end = Instant::now() + Duration::from_secs(1500);
    let mut longer = 1;
    let faults = ["doubled", "would be doubled", "lost", "wrong answer", "wrong too_old", "impossible"];
    loop {
        let output = tokio::process::Command::from(crate::support::this::test(NAME))
            .env("HAPAX_MUTANT", "sweep does not wait")
            .env("HAPAX_RACES", "45")
            .env("HAPAX_RACE_LONGER", longer.to_string())
            .kill_on_drop(true)
            .output()
            .await
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            let is_fault = |line: &str| {
                faults.iter().any(|fault| line.starts_with(&format!("{fault}: ")))
                    || line.contains("a scope that began after the closing got")
            };
            assert!(said.lines().any(is_fault), "it failed for another reason: {said}");
            return;
        }
        assert!(Instant::now() < end, "the race does not notice that a sweep does not wait");
        longer = 16.min(longer * 2);
    }
}
