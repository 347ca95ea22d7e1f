//! Claims in the caller's own transaction, under every isolation level, and times under every time zone.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres::{
    PgHarness, Scratch, ask, child, ledger, pool_to, role, run, settings, until_waiting,
};
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Claims, IdentityRule, Mode, Outcome, Settings, State, Week};
use hapax::testing::{Harness as _, kit};
use hapax::{Error, Guard, Result, Time};
use sqlx::{AssertSqlSafe, PgTransaction};

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];

async fn begin(ledger: &PgLedger, level: &str) -> PgTransaction<'static> {
    let mut tx = ledger.pool().begin().await.unwrap();
    let sql = format!("set transaction isolation level {level}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
    // The snapshot of the stricter ones is taken here.
    sqlx::raw_sql("select 1").execute(&mut *tx).await.unwrap();
    tx
}

async fn claim_in(ledger: &PgLedger, tx: &mut PgTransaction<'_>, claim: &Claim) -> Result<Outcome> {
    ledger.claim_in(tx, std::slice::from_ref(claim)).await?.remove(0)
}

async fn effect(ledger: &PgLedger, tx: &mut PgTransaction<'_>, id: &str) {
    let sql = format!("insert into {}.effect values ($1)", ledger.schema());
    sqlx::query(AssertSqlSafe(sql)).bind(id).execute(&mut **tx).await.unwrap();
}

async fn stage() -> PgLedger {
    let ledger = ledger(8).await;
    run(ledger.pool(), format!("create table {}.effect (id text not null)", ledger.schema())).await;
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await;
    ledger
}

async fn effects(ledger: &PgLedger, id: &str) -> i64 {
    ask(ledger.pool(), format!("select count(*) from {}.effect where id = '{id}'", ledger.schema())).await
}

/// What any caller does: the whole transaction again after a retryable error. Returns the errors it met.
async fn until_answered(ledger: &PgLedger, level: &str, claim: &Claim) -> (Outcome, Vec<Error>) {
    let mut errors = Vec::new();
    loop {
        let mut tx = begin(ledger, level).await;
        match claim_in(ledger, &mut tx, claim).await {
            Ok(outcome) => {
                if outcome.is_claimed() {
                    effect(ledger, &mut tx, &claim.identity.id.to_string()).await;
                }
                tx.commit().await.unwrap();
                return (outcome, errors);
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                tx.rollback().await.unwrap();
                errors.push(error);
                assert!(errors.len() < 20, "{errors:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t33_stricter_isolation_gets_a_retryable_error_then_a_duplicate() {
    let ledger = stage().await;
    for level in LEVELS {
        let id = format!("event-{}", level.replace(' ', "-"));
        let claim = kit::claim(&id, Mode::Done);
        // The loser's snapshot is older than the winner's commit.
        let mut loser = begin(&ledger, level).await;
        let (won, _) = until_answered(&ledger, level, &claim).await;
        assert!(won.is_claimed());
        let first_try = claim_in(&ledger, &mut loser, &kit::another(&claim)).await;
        let word = match &first_try {
            Ok(outcome) => outcome.name().to_owned(),
            Err(error) => {
                assert!(matches!(error, Error::Contended { .. }) && error.is_retryable(), "{error:?}");
                error.code().to_owned()
            }
        };
        loser.rollback().await.unwrap();
        let (again, errors) = until_answered(&ledger, level, &kit::another(&claim)).await;
        println!("{level}: first {word}, then {} after {} more errors", again.name(), errors.len());
        assert_eq!(word, if level == LEVELS[0] { "duplicate" } else { "contended" });
        assert_eq!(again.name(), "duplicate");
        assert_eq!(effects(&ledger, &id).await, 1);
        let entry = kit::there(&ledger, &claim).await;
        assert_eq!((entry.state, entry.attempts), (State::Done, 1), "a conflict is not an attempt");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_callers_of_every_isolation_level_take_effect_once() {
    let ledger = stage().await;
    for level in LEVELS {
        for n in 0..10 {
            let id = format!("race-{}-{n}", level.replace(' ', "-"));
            let racers: Vec<_> = (0..5)
                .map(|_| {
                    let (ledger, claim) = (ledger.clone(), kit::claim(&id, Mode::Done));
                    tokio::spawn(async move {
                        // Busy with an open transaction: a caller asks again.
                        loop {
                            let (outcome, _) = until_answered(&ledger, level, &claim).await;
                            if outcome.name() != "busy" {
                                return outcome.is_claimed();
                            }
                        }
                    })
                })
                .collect();
            let mut firsts = 0;
            for racer in racers {
                firsts += i64::from(racer.await.unwrap());
            }
            assert_eq!((firsts, effects(&ledger, &id).await), (1, 1), "{id}");
        }
    }
    println!("{} races of 5 callers, one effect each", 10 * LEVELS.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_gives_the_event_back_at_every_isolation_level() {
    let ledger = stage().await;
    for level in LEVELS {
        let id = format!("back-{}", level.replace(' ', "-"));
        let claim = kit::claim(&id, Mode::Done);
        let mut tx = begin(&ledger, level).await;
        assert!(claim_in(&ledger, &mut tx, &claim).await.unwrap().is_claimed());
        effect(&ledger, &mut tx, &id).await;
        tx.rollback().await.unwrap();
        assert!(!ledger.was_committed(&claim).await.unwrap());
        assert!(kit::entry(&ledger, &claim).await.is_none(), "nothing of it is left");
        let (again, _) = until_answered(&ledger, level, &claim).await;
        assert!(again.is_claimed(), "{level}");
        assert!(ledger.was_committed(&claim).await.unwrap());
        assert_eq!(effects(&ledger, &id).await, 1);
    }
}

/// An id in another's open transaction is busy, and the caller's transaction lives on.
#[tokio::test(flavor = "multi_thread")]
async fn the_callers_transaction_survives_a_busy_id() {
    let ledger = stage().await;
    for level in LEVELS {
        let suffix = level.replace(' ', "-");
        let (mine, held) = (
            kit::claim(&format!("mine-{suffix}"), Mode::Done),
            kit::claim(&format!("held-{suffix}"), Mode::Done),
        );
        let mut other = begin(&ledger, level).await;
        assert!(claim_in(&ledger, &mut other, &held).await.unwrap().is_claimed());
        let mut tx = begin(&ledger, level).await;
        effect(&ledger, &mut tx, &format!("before-{suffix}")).await;
        let outcomes = ledger.claim_in(&mut tx, &[kit::another(&held), mine.clone()]).await.unwrap();
        let names: Vec<&str> = outcomes.iter().map(|outcome| outcome.as_ref().unwrap().name()).collect();
        assert_eq!(names, ["busy", "claimed"], "{level}");
        effect(&ledger, &mut tx, &format!("after-{suffix}")).await;
        tx.commit().await.expect("the transaction is not spoiled");
        other.rollback().await.unwrap();
        for id in ["before", "after"] {
            assert_eq!(effects(&ledger, &format!("{id}-{suffix}")).await, 1);
        }
        kit::expect(&ledger, &kit::another(&mine), "duplicate").await;
        assert!(kit::entry(&ledger, &held).await.is_none());
    }
}

/// The guard's calls, with bad ids among good ones, and a savepoint of the caller's own around it.
#[tokio::test(flavor = "multi_thread")]
async fn the_guards_claims_live_and_die_with_the_callers_savepoint() {
    let ledger = stage().await;
    let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
    let mut tx = ledger.pool().begin().await.unwrap();
    let outcomes = guard.try_claim_many_in(&mut tx, ["kept", " ", "kept-too"]).await.unwrap();
    assert!(outcomes[0].as_ref().unwrap().is_claimed() && outcomes[2].as_ref().unwrap().is_claimed());
    assert!(matches!(outcomes[1], Err(Error::Invalid { .. })));
    let mut inner = sqlx::Acquire::begin(&mut tx).await.unwrap();
    assert!(guard.try_claim_in(&mut inner, "given-back").await.unwrap().is_claimed());
    inner.rollback().await.unwrap();
    tx.commit().await.unwrap();
    assert!(guard.is_processed("kept").await.unwrap() && guard.is_processed("kept-too").await.unwrap());
    assert!(!guard.is_processed("given-back").await.unwrap());
}

/// A leased row that is locked by a reader for update is busy, not an error, and not a wait without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_is_busy_after_a_short_wait() {
    let ledger = stage().await;
    let claim = kit::claim("locked", kit::lease());
    let grant = kit::first(&ledger, &claim).await;
    let mut tx = ledger.pool().begin().await.unwrap();
    let sql = format!("select from {}.entry where token = $1 for update", ledger.schema());
    sqlx::query(AssertSqlSafe(sql)).bind(grant.token.0).execute(&mut *tx).await.unwrap();
    kit::expect(&ledger, &kit::another(&claim), "busy").await;
    // A settle is not refused by it: it waits and tries again until the row is free.
    let settling = tokio::spawn({
        let (ledger, claim) = (ledger.clone(), claim.clone());
        async move { kit::settle(&ledger, &claim, &grant, kit::done()).await }
    });
    until_waiting(ledger.pool(), &format!("{}.settle_done", ledger.schema())).await;
    tx.rollback().await.unwrap();
    assert!(!kit::is_fenced(settling.await.unwrap()));
}

// --- time zones ------------------------------------------------------------------------------------------------------

/// Weeks of Sunday 23:30Z and Monday 00:30Z, by Rust and by SQL, for ids with a time inside and for times of events.
async fn weeks_are_utc(schema: &str, url: &str) {
    let pool = pool_to(url, 2).await;
    let ledger = PgLedger::with_pool(pool.clone(), settings(schema)).await.unwrap();
    let zone: String = ask(&pool, "select current_setting('TimeZone')").await;
    for (n, (time, monday)) in
        [("2026-03-01T23:30:00Z", "2026-02-23"), ("2026-03-02T00:30:00Z", "2026-03-02")]
            .into_iter()
            .enumerate()
    {
        let time = Time::parse(time).unwrap();
        let week = Week::of(time);
        assert_eq!(week.to_string(), monday, "TZ {:?}", std::env::var("TZ"));
        let id = kit::v7_at(time, n as u8 + 1);
        let (by_us, by_id, by_text): (i16, i16, i16) = sqlx::query_as(AssertSqlSafe(format!(
            "select {schema}.week_of($1), {schema}.week_of_id({schema}.id_key($2)), {schema}.week_of({schema}.us($3::timestamptz))"
        )))
        .bind(time.as_micros())
        .bind(id.to_string())
        .bind(time.to_string())
        .fetch_one(&pool)
        .await
        .unwrap();
        assert_eq!([by_us, by_id, by_text], [week.number(); 3], "server zone {zone}");
        let claim = kit::claim(&id.to_string(), Mode::Done);
        let outcome = kit::one(&ledger, &claim).await;
        assert!(["claimed", "duplicate"].contains(&outcome.name()), "{}", outcome.name());
        let stored: i16 = ask(&pool, format!("select week from {schema}.entries where id = '{id}'")).await;
        assert_eq!(stored, week.number(), "server zone {zone}");
        assert_eq!(kit::there(&ledger, &claim).await.week.to_string(), monday);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn weeks_begin_on_monday_in_utc_whatever_the_time_zones() {
    const NAME: &str = "weeks_begin_on_monday_in_utc_whatever_the_time_zones";
    if let Some((url, schema)) = role() {
        return weeks_are_utc(&schema, &url).await;
    }
    let scratch = Scratch::new().await;
    let mut zones = 0;
    for server in ["Asia/Tokyo", "America/New_York", "Pacific/Kiritimati", "UTC"] {
        scratch.admin(&format!("alter database {{db}} set timezone = '{server}'")).await;
        for process in ["Asia/Tokyo", "America/New_York"] {
            let status = child(NAME, &scratch.url(), "zones").env("TZ", process).status().await.unwrap();
            assert!(status.success(), "server {server}, process {process}");
            zones += 1;
        }
    }
    println!("{zones} pairs of time zones agree on where a week begins");
    scratch.drop_it().await;
}

/// Identity by id and time, for those who ask for it: the week of the event's time, in UTC.
#[tokio::test(flavor = "multi_thread")]
async fn id_and_time_are_two_identities_only_across_a_monday() {
    let harness = PgHarness::new().await;
    let mut rule = Settings::default();
    rule.identity = IdentityRule::IdAndTime;
    let ledger = harness.open(rule).await;
    let now = Week::of(ledger.now().await.unwrap()).start();
    let at = |time: Time| Claim { time: Some(time), ..kit::claim("one-id", Mode::Done) };
    let half_an_hour = std::time::Duration::from_secs(1800);
    kit::expect(&ledger, &at(now.minus(half_an_hour)), "claimed").await;
    kit::expect(&ledger, &at(now.minus(2 * half_an_hour)), "duplicate").await;
    kit::expect(&ledger, &at(now.plus(half_an_hour)), "claimed").await;
    kit::assert_invalid(kit::try_one(&ledger, &kit::claim("one-id", Mode::Done)).await, "id_and_time");
}

/// What a caller of the guard can ask when the answer to COMMIT never came.
#[tokio::test(flavor = "multi_thread")]
async fn t31_a_guard_says_whether_a_claim_was_committed() {
    let ledger = stage().await;
    let guard = hapax::Guard::builder(ledger.clone()).scope("billing").build().unwrap();
    for commit in [false, true] {
        let mut tx = ledger.pool().begin().await.unwrap();
        let outcome = guard.try_claim_in(&mut tx, "asked-about").await.unwrap();
        let hapax::Outcome::First(claim) = outcome else { panic!("{outcome:?}") };
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        assert_eq!(guard.was_committed(&claim).await.unwrap(), commit);
    }
}
