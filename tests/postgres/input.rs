//! Bad input changes nothing, weeks come on demand, and the SQL functions for other languages agree with Rust.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::time::Duration;

use crate::support::postgres::{PgHarness, Random, ask, ledger, run};
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claims, IdentityRule, Metadata, Mode, Operations, Settings, State, Week};
use hapax::testing::{Harness as _, kit};
use hapax::{Error, EventId, Guard, Time};
use sqlx::{AssertSqlSafe, PgPool};

/// Rows and relations of a schema: what "nothing was changed" means.
async fn everything(pool: &PgPool, schema: &str) -> (i64, i64) {
    let rows = ["entry", "held", "head", "scope", "owner", "touch", "dropped", "audit"]
        .map(|table| format!("(select count(*) from {schema}.{table})"))
        .join(" + ");
    let tables = format!("select count(*) from pg_class where relnamespace = '{schema}'::regnamespace");
    (ask(pool, format!("select {rows}")).await, ask(pool, tables).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_a_sentence_and_changes_nothing() {
    let ledger = ledger(4).await;
    let guard = Guard::builder(ledger.clone())
        .scope("bad-input")
        .with(|settings| settings.sweep = false)
        .build()
        .unwrap();
    let before = everything(ledger.pool(), ledger.schema()).await;
    let far = kit::v7_at(Time::parse("2090-06-01T00:00:00Z").unwrap(), 1).to_string();
    let long = "x".repeat(256);
    let ids =
        [("", "empty"), ("  \t", "blank"), (long.as_str(), "255"), ("a\0b", "NUL"), (far.as_str(), "2090")];
    for (id, says) in ids {
        for (call, result) in [
            ("lease", guard.lease(id).await.map(|outcome| outcome.name())),
            ("try_claim", guard.try_claim(id).await.map(|outcome| outcome.name())),
            ("mark_processed", guard.mark_processed(id, None).await.map(|outcome| outcome.name())),
            ("failed", guard.failed(id, "boom").await.map(|outcome| outcome.name())),
            ("try_claim_in", in_transaction(&guard, id).await),
        ] {
            let error = result.err().unwrap_or_else(|| panic!("{call} of {id:?} should be refused"));
            assert!(matches!(error, Error::Invalid { .. }), "{call}: {error:?}");
            assert!(error.to_string().contains(says), "{call}: {error} should say {says:?}");
        }
        println!("{:?}…: {}", id.chars().take(12).collect::<String>(), guard.lease(id).await.unwrap_err());
    }
    let big = format!("{{\"a\": \"{}\"}}", "x".repeat(10 * 1024 * 1024));
    for (json, says) in [(big.as_str(), "limit is 16384"), (r#"{"a": "b\u0000c"}"#, "NUL"), ("{", "not JSON")]
    {
        let error = match Metadata::new(json) {
            Err(error) => error,
            Ok(metadata) => guard.mark_processed("ok", metadata).await.map(drop).unwrap_err(),
        };
        println!("metadata: {error}");
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(says), "{error}");
    }
    assert_eq!(everything(ledger.pool(), ledger.schema()).await, before, "nothing was changed");
}

async fn in_transaction(guard: &Guard<PgLedger>, id: &str) -> hapax::Result<&'static str> {
    let mut tx = guard.ledger().pool().begin().await.unwrap();
    let outcome = guard.try_claim_in(&mut tx, id).await.map(|outcome| outcome.name());
    tx.commit().await.expect("the transaction is not spoiled");
    outcome
}

#[tokio::test(flavor = "multi_thread")]
async fn t11_late_and_future_weeks_are_made_on_demand() {
    let harness = PgHarness::new().await;
    let mut few = Settings::default();
    few.weeks_max = 5;
    let ledger = harness.open(few).await;
    let now = ledger.now().await.unwrap();
    let week = |n: i64| {
        now.plus(Duration::from_secs(52 * 604_800)).minus(Duration::from_secs((52 - n) as u64 * 604_800))
    };
    let (mut made, mut refused) = (0, 0);
    for n in -8_i64..=8 {
        let claim = kit::claim(&kit::v7_at(week(n), 1).to_string(), Mode::Done);
        // Last week, this one and the next four always; older ones up to the limit.
        if n <= 4 && (n >= -1 || made < 5) {
            let outcome = if n % 2 == 0 {
                kit::one(&ledger, &claim).await
            } else {
                harness
                    .in_transaction(&ledger, std::slice::from_ref(&claim), true)
                    .await
                    .unwrap()
                    .remove(0)
                    .unwrap()
            };
            assert!(outcome.is_claimed(), "week {n}: {}", outcome.name());
            made += 1;
        } else {
            kit::assert_invalid(kit::try_one(&ledger, &claim).await, "week");
            let in_tx =
                harness.in_transaction(&ledger, std::slice::from_ref(&claim), true).await.unwrap().remove(0);
            kit::assert_invalid(in_tx, "week");
            refused += 1;
        }
    }
    let stat = ledger.stat().await.unwrap();
    println!(
        "{made} weeks made on demand, {refused} refused; there are {} with the timeless one",
        stat.weeks.len()
    );
    assert_eq!(stat.weeks.len(), made + 1);
    // A neighbour of a refused one is not harmed.
    let far = kit::claim(&kit::v7_at(week(30), 1).to_string(), kit::lease());
    let outcomes = ledger.claim(&[kit::claim("neighbour", kit::lease()), far]).await.unwrap();
    assert!(outcomes[0].as_ref().unwrap().is_claimed() && outcomes[1].is_err());
}

/// An id of a dropped week in the caller's transaction is told so, instead of asking for a week that will never come.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_week_is_too_old_in_the_callers_transaction() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let claim = kit::claim(&kit::v7_at(ledger.now().await.unwrap(), 1).to_string(), Mode::Done);
    kit::expect(&ledger, &claim, "claimed").await;
    harness.advance(30 * kit::DAY).await;
    assert_eq!(kit::sweep(&ledger, 7 * kit::DAY).await.weeks.len(), 1);
    for ledger in [ledger, kit::open(&harness).await] {
        let again = kit::another(&claim);
        let outcome =
            harness.in_transaction(&ledger, std::slice::from_ref(&again), true).await.unwrap().remove(0);
        assert_eq!(outcome.unwrap().name(), "too_old");
    }
}

// --- SQL functions ---------------------------------------------------------------------------------------------------

fn random_id(random: &mut Random) -> String {
    const ODD: [char; 12] = ['a', 'Z', '0', '-', ' ', '\n', 'é', '日', '🦀', '\u{3000}', '\'', '\\'];
    match random.below(6) {
        0 => uuid::Uuid::new_v4().to_string(),
        1 => {
            kit::v7_at(Time::from_millis((random.number() % 4_200_000_000_000) as i64), random.number() as u8)
                .to_string()
        }
        // Nearly a UUID.
        2 => uuid::Uuid::new_v4().to_string().to_uppercase(),
        3 => uuid::Uuid::new_v4().simple().to_string(),
        // Text of 16 bytes, which must not be taken for one.
        4 => format!("{:016}", random.number() % 10_000_000_000_000_000),
        _ => (0..=random.below(20)).map(|_| ODD[random.below(ODD.len())]).collect(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_and_rust_agree_on_keys_and_weeks() {
    let ledger = ledger(2).await;
    let s = ledger.schema();
    let mut random = Random::new();
    let (mut agreed, mut refused) = (0, 0);
    for _ in 0..2000 {
        let text = random_id(&mut random);
        let sql: sqlx::Result<(Vec<u8>, i16, String)> = sqlx::query_as(AssertSqlSafe(format!(
            "select k, {s}.week_of_id(k), {s}.id_text(k) from {s}.id_key($1) k"
        )))
        .bind(&text)
        .fetch_one(ledger.pool())
        .await;
        match (EventId::new(&text), sql) {
            (Ok(id), Ok((key, week, back))) => {
                let routed = Week::route(IdentityRule::Id, &id, None).unwrap();
                assert_eq!((&*id.key(), routed.number()), (&key[..], week), "{text:?}");
                assert_eq!(back, text);
                agreed += 1;
            }
            (Err(_), Err(error)) => {
                assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("22023"), "{text:?}");
                refused += 1;
            }
            (rust, sql) => panic!("{text:?}: Rust says {rust:?}, SQL says {sql:?}"),
        }
        let us = (random.number() % 5_000_000_000_000_000) as i64 - 500_000_000_000_000;
        let week: i16 = ask(ledger.pool(), format!("select {s}.week_of({us})")).await;
        assert_eq!(week, Week::of(Time::from_micros(us)).number(), "{us}");
    }
    println!("2000 ids: {agreed} agree on key, week and back, {refused} are refused by both");
}

type InSql = (String, Option<i64>);

async fn claim_in_sql(pool: &mut sqlx::PgConnection, schema: &str, id: &str) -> sqlx::Result<InSql> {
    sqlx::query_as(AssertSqlSafe(format!("select outcome, token from {schema}.claim_in('orders', $1)")))
        .bind(id)
        .fetch_one(pool)
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_and_rust_claims_see_each_other() {
    let ledger = ledger(6).await;
    let (pool, s) = (ledger.pool().clone(), ledger.schema().to_owned());
    // By Rust, then by SQL; and the other way round.
    kit::run(&ledger, &kit::claim("rust-first", kit::lease())).await;
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(claim_in_sql(&mut tx, &s, "rust-first").await.unwrap().0, "duplicate");
    assert_eq!(claim_in_sql(&mut tx, &s, "sql-first").await.unwrap().0, "claimed");
    // Meanwhile: busy for Rust, and for another SQL caller, whose transaction lives on.
    kit::expect(&ledger, &kit::claim("sql-first", kit::lease()), "busy").await;
    let mut other = pool.begin().await.unwrap();
    assert_eq!(claim_in_sql(&mut other, &s, "sql-first").await.unwrap(), ("busy".into(), None));
    assert_eq!(claim_in_sql(&mut other, &s, "others").await.unwrap().0, "claimed");
    other.commit().await.expect("busy spoils nothing");
    tx.commit().await.unwrap();
    kit::expect(&ledger, &kit::claim("sql-first", kit::lease()), "duplicate").await;
    // Rolled back, it was never claimed.
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(claim_in_sql(&mut tx, &s, "given-back").await.unwrap().0, "claimed");
    tx.rollback().await.unwrap();
    kit::expect(&ledger, &kit::claim("given-back", Mode::Done), "claimed").await;
}

/// How a caller in another language finds out whether a COMMIT that was never answered took effect.
#[tokio::test(flavor = "multi_thread")]
async fn a_nonce_tells_sql_callers_whether_they_had_committed() {
    let ledger = ledger(2).await;
    let (pool, s) = (ledger.pool().clone(), ledger.schema().to_owned());
    let claim = async |commit: bool| -> InSql {
        let mut tx = pool.begin().await.unwrap();
        let sql = format!("select outcome, token from {s}.claim_in('orders', 'doubtful', p_nonce => 42)");
        let answer = sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&mut *tx).await.unwrap();
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        answer
    };
    let lost = claim(false).await;
    let first = claim(true).await;
    assert_eq!((lost.0.as_str(), first.0.as_str()), ("claimed", "claimed"));
    assert_ne!(lost.1, first.1, "the first try was rolled back: another token");
    assert_eq!(claim(false).await, first, "it was committed: the same token");
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_leases_are_settled_by_their_token_only() {
    let ledger = ledger(4).await;
    let (pool, s) = (ledger.pool().clone(), ledger.schema().to_owned());
    // A week of its own is made on the way.
    let id = kit::v7_at(ledger.now().await.unwrap(), 7).to_string();
    let lease = async || -> (String, i64, i32) {
        sqlx::query_as(AssertSqlSafe(format!(
            "select outcome, token, attempt from {s}.lease('orders', $1, 60)"
        )))
        .bind(&id)
        .fetch_one(&pool)
        .await
        .unwrap()
    };
    let settle = async |token: i64, how: &str| -> bool {
        ask(&pool, format!("select {s}.settle('orders', '{id}', {token}, '{how}')")).await
    };
    let (outcome, token, attempt) = lease().await;
    assert_eq!((outcome.as_str(), attempt), ("claimed", 1));
    let claim = kit::claim(&id, kit::lease());
    kit::expect(&ledger, &claim, "busy").await;
    assert!(!settle(token - 1, "done").await, "another token changes nothing");
    assert!(settle(token, "retry").await);
    let (outcome, second, attempt) = lease().await;
    assert_eq!((outcome.as_str(), attempt), ("claimed", 2));
    assert!(
        second > token
            && !settle(token, "done").await
            && settle(second, "done").await
            && settle(second, "done").await
    );
    assert_eq!(lease().await.0, "duplicate");
    assert_eq!(kit::there(&ledger, &claim).await.state, State::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_functions_refuse_bad_input_with_a_code() {
    let ledger = ledger(2).await;
    let (pool, s) = (ledger.pool(), ledger.schema());
    let before = everything(pool, s).await;
    let far = kit::v7_at(Time::parse("2090-06-01T00:00:00Z").unwrap(), 1);
    let cases = [
        ("22023", "claim_in('orders', '')".to_owned()),
        ("22023", "claim_in('orders', E'\\u3000 ')".to_owned()),
        ("22023", "claim_in('orders', repeat('x', 256))".to_owned()),
        ("22023", "claim_in(' ', 'a')".to_owned()),
        ("22023", "claim_in('orders', 'a', p_tenant => ' ')".to_owned()),
        ("22023", "claim_in('orders', 'a', p_metadata => to_jsonb(repeat('x', 20000)))".to_owned()),
        ("22023", "lease('orders', 'a', 0)".to_owned()),
        ("22023", format!("lease('orders', '{far}')")),
        ("55000", format!("claim_in('orders', '{far}')")),
        ("22023", "settle('orders', 'a', 1, 'maybe')".to_owned()),
    ];
    for (code, call) in cases {
        let error = sqlx::raw_sql(AssertSqlSafe(format!("select * from {s}.{call}"))).execute(pool).await;
        let error = error.expect_err(&call);
        let database = error.as_database_error().unwrap();
        println!("{call:.60}: {}", database.message());
        assert_eq!(database.code().as_deref(), Some(code), "{call}");
    }
    assert_eq!(everything(pool, s).await, before, "nothing was changed");
    run(pool, format!("select {s}.settle('orders', 'a', 1, 'done')")).await;
}
