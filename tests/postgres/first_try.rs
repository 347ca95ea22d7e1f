//! A statement is sent again while the server is still running its first try, whose connection was lost. The second try meets the
//! locks of the first. Until the first has ended nobody knows what it did: whoever says "busy" and forgets loses an effect.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::sync::Arc;
use std::time::Duration;

use super::doubt::{Scene, effect, effects, scene};
use crate::support::postgres::{ask, run, until};
use hapax::backend::postgres::PgLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::Consumer;
use hapax::ledger::{Claims as _, State};
use hapax::testing::kit;
use hapax::{Error, Event, Guard, Headers, Outcome, Topic};

/// While it is shut, whoever has claimed waits for it at COMMIT: as slow as a disk or a synchronous standby can be.
struct Gate<'s> {
    scene: &'s Scene,
    connection: sqlx::pool::PoolConnection<sqlx::Postgres>,
    lock: String,
}

impl<'s> Gate<'s> {
    async fn shut(scene: &'s Scene) -> Self {
        Gate::of(scene, "entry").await
    }

    /// The gate of whoever inserts into a table.
    async fn of(scene: &'s Scene, table: &str) -> Self {
        let s = &scene.schema;
        let lock = format!("(4711, hashtext('{s}'))");
        run(
            &scene.direct,
            format!(
                "create or replace function {s}.wait() returns trigger language plpgsql as \
                 $$ begin perform pg_advisory_xact_lock_shared{lock}; return null; end $$; \
                 drop trigger if exists wait on {s}.{table}; \
                 create constraint trigger wait after insert on {s}.{table} deferrable initially deferred \
                 for each row execute function {s}.wait()"
            ),
        )
        .await;
        let mut connection = scene.direct.acquire().await.unwrap();
        let sql = sqlx::AssertSqlSafe(format!("select pg_advisory_lock{lock}"));
        sqlx::query(sql).execute(&mut *connection).await.unwrap();
        Gate { scene, connection, lock }
    }

    async fn open(mut self) {
        let sql = sqlx::AssertSqlSafe(format!("select pg_advisory_unlock{}", self.lock));
        sqlx::query(sql).execute(&mut *self.connection).await.unwrap();
    }

    /// A claim of this test waits for something of this kind.
    async fn until_waiting(&self, event: &str) {
        let s = &self.scene.schema;
        let sql = format!(
            "select count(*) from pg_stat_activity where wait_event = '{event}' and query like '%{s}.%'"
        );
        until(&format!("a claim waits: {event}"), async || {
            ask::<i64>(&self.scene.direct, sql.clone()).await > 0
        })
        .await;
    }

    /// The first try waits at COMMIT, and its connection is lost.
    async fn lose_first_try(&self) {
        self.until_waiting("advisory").await;
        self.scene.proxy.cut();
    }

    /// So many tries have waited for the first.
    async fn until_tries(&self, count: usize) {
        let s = &self.scene.schema;
        let sql = format!(
            "select pid::text || ' ' || query_start from pg_stat_activity \
             where wait_event = 'transactionid' and query like '%{s}.%'"
        );
        let mut seen = std::collections::HashSet::new();
        until(&format!("{count} tries have waited"), async || {
            let waiting: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql.clone()))
                .fetch_all(&self.scene.direct)
                .await
                .unwrap();
            seen.extend(waiting);
            seen.len() >= count
        })
        .await;
    }
}

async fn until_committed(scene: &Scene, count: i64) {
    let sql = format!("select count(*) from {}.entry", scene.schema);
    until("the first try is committed", async || ask::<i64>(&scene.direct, sql.clone()).await >= count).await;
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Once,
    Tracked,
    Leased,
}

const HOWS: [How; 3] = [How::Once, How::Tracked, How::Leased];

/// Claims as a caller does, and has an effect if it may. Returns the outcome.
async fn take(scene: &Scene, guard: &Guard<PgLedger>, how: How, id: &str) -> Result<&'static str, Error> {
    let done = async || effect(&scene.direct, &scene.schema, id).await.unwrap();
    Ok(match how {
        How::Once => match guard.try_claim(id).await? {
            Outcome::First(_) => {
                done().await;
                "claimed"
            }
            other => other.name(),
        },
        How::Tracked => match guard.try_claim_tracked(id, Duration::from_secs(60)).await? {
            Outcome::First(claimed) => {
                done().await;
                claimed.finished().await.unwrap();
                "claimed"
            }
            other => other.name(),
        },
        How::Leased => match guard.lease(id).await? {
            Outcome::First(lease) => {
                assert_eq!(lease.attempt(), 1);
                done().await;
                lease.done().await.unwrap();
                "claimed"
            }
            Outcome::Busy { until: Some(until), .. } => panic!("{id} is busy with itself until {until}"),
            other => other.name(),
        },
    })
}

/// Claims until it is told something for good.
async fn insist(scene: &Scene, guard: &Guard<PgLedger>, how: How, id: &str) -> &'static str {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        match take(scene, guard, how, id).await {
            Ok("busy") => {}
            Ok(outcome) => return outcome,
            Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
        assert!(std::time::Instant::now() < end, "{id} is never decided");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Another process has nothing to do.
async fn nobody_else(scene: &Scene, how: How, id: &str) {
    let other = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    assert_eq!(take(scene, &other, how, id).await.unwrap(), "duplicate", "{how:?}");
    assert_eq!(effects(&scene.direct, &scene.schema, id).await, (1, 1), "{how:?}: effects");
}

/// The first try commits while the second one waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn t116_a_claim_that_meets_its_own_first_try_waits_for_it() {
    let scene = Arc::new(scene().await);
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    for how in HOWS {
        let id = format!("{how:?}");
        let gate = Gate::shut(&scene).await;
        let asking = tokio::spawn({
            let (scene, guard, id) = (Arc::clone(&scene), guard.clone(), id.clone());
            async move { insist(&scene, &guard, how, &id).await }
        });
        gate.lose_first_try().await;
        gate.until_tries(2).await;
        gate.open().await;
        assert_eq!(asking.await.unwrap(), "claimed", "{how:?}");
        nobody_else(&scene, how, &id).await;
    }
}

/// Whether a call ended before its first try did.
fn is_doubt(error: &Error) -> bool {
    matches!(error, Error::Contended { .. })
}

/// A whole batch is in doubt, and the first try holds all of its rows.
#[tokio::test(flavor = "multi_thread")]
async fn t116_a_batch_that_meets_its_own_first_try_waits_for_it() {
    let scene = scene().await;
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    let ids: Vec<String> = (0..100).map(|n| format!("many-{n}")).collect();
    let gate = Gate::shut(&scene).await;
    let asking = tokio::spawn({
        let (guard, ids) = (guard.clone(), ids.clone());
        async move {
            // A disk that stalls may hold up the first try for longer than a call lasts: then it is asked again.
            loop {
                match guard.claim_many(ids.clone()).await {
                    Err(error) if is_doubt(&error) => {}
                    Ok(all) if all.iter().any(|one| one.as_ref().is_err_and(is_doubt)) => {}
                    outcome => return outcome.unwrap(),
                }
            }
        }
    });
    gate.lose_first_try().await;
    gate.until_tries(2).await;
    gate.open().await;
    for (id, outcome) in ids.iter().zip(asking.await.unwrap()) {
        let outcome_name = outcome.as_ref().map_or("error", Outcome::name);
        assert_eq!(outcome_name, "claimed", "{id}: {outcome:?}");
    }
}

/// The first try outlasts the call. The caller is told an error, because nothing is known; however often it asks meanwhile, the claim
/// stays in doubt, and is granted when the first try has committed.
#[tokio::test(flavor = "multi_thread")]
async fn t116_a_claim_stays_in_doubt_until_its_first_try_has_ended() {
    let scene = Arc::new(scene().await);
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    for how in HOWS {
        let id = format!("{how:?}");
        let before: i64 = ask(&scene.direct, format!("select count(*) from {}.entry", scene.schema)).await;
        let gate = Gate::shut(&scene).await;
        let asking = tokio::spawn({
            let (scene, guard, id) = (Arc::clone(&scene), guard.clone(), id.clone());
            async move { take(&scene, &guard, how, &id).await }
        });
        gate.lose_first_try().await;
        let answer = asking.await.unwrap();
        assert!(
            matches!(answer, Err(Error::Contended { .. })),
            "{how:?}: {answer:?}, of which nothing is known"
        );
        for _ in 0..3 {
            let answer = take(&scene, &guard, how, &id).await;
            assert!(matches!(answer, Err(Error::Contended { .. })), "{how:?}: {answer:?}");
        }
        gate.open().await;
        until_committed(&scene, before + 1).await;
        assert_eq!(take(&scene, &guard, how, &id).await.unwrap(), "claimed", "{how:?}");
        nobody_else(&scene, how, &id).await;
    }
}

/// The server is away after the first try, and the caller is told so. It asks again while the first try is still under way.
#[tokio::test(flavor = "multi_thread")]
async fn t116_an_outage_does_not_make_a_claim_forget_its_first_try() {
    let scene = Arc::new(scene().await);
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    for how in HOWS {
        let id = format!("{how:?}");
        let before: i64 = ask(&scene.direct, format!("select count(*) from {}.entry", scene.schema)).await;
        let gate = Gate::shut(&scene).await;
        let asking = tokio::spawn({
            let (scene, guard, id) = (Arc::clone(&scene), guard.clone(), id.clone());
            async move { take(&scene, &guard, how, &id).await }
        });
        gate.until_waiting("advisory").await;
        scene.proxy.refuse();
        scene.proxy.cut();
        let answer = asking.await.unwrap();
        assert!(matches!(answer, Err(Error::Unavailable { .. })), "{how:?}: {answer:?}");
        scene.proxy.heal();
        let answer = take(&scene, &guard, how, &id).await;
        assert!(matches!(answer, Ok("busy") | Err(Error::Contended { .. })), "{how:?}: {answer:?}");
        gate.open().await;
        until_committed(&scene, before + 1).await;
        assert_eq!(take(&scene, &guard, how, &id).await.unwrap(), "claimed", "{how:?}");
        nobody_else(&scene, how, &id).await;
    }
}

async fn bus(id: &str) -> Arc<dyn Bus> {
    let (bus, topic) = (MemoryBus::default(), Topic::new("orders").unwrap());
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let headers = Headers::from_iter([("idempotency_key", id.to_owned())]);
    let record = Record { payload: Some("{}".into()), headers, ..Record::default() };
    bus.publish(&topic, &[record]).await.unwrap().remove(0).unwrap();
    Arc::new(bus)
}

/// A consumer that runs at most once does run it.
#[tokio::test(flavor = "multi_thread")]
async fn t116_an_at_most_once_consumer_does_not_lose_what_it_claimed() {
    let scene = scene().await;
    let consumer = Consumer::builder(bus("e").await, scene.ledger.clone()).scope("orders").topic("orders");
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let gate = Gate::shut(&scene).await;
    let (pool, schema) = (scene.direct.clone(), scene.schema.clone());
    let running = tokio::spawn(consumer.at_most_once(move |event: &Event| {
        let event = event.clone();
        let (pool, schema) = (pool.clone(), schema.clone());
        async move {
            effect(&pool, &schema, &event.id.to_string()).await?;
            hapax::consumer::Handled::Ok(())
        }
    }));
    gate.lose_first_try().await;
    gate.until_tries(2).await;
    gate.open().await;
    until("it is through", async || !handle.progress().passed.is_empty()).await;
    handle.stop();
    let counts = running.await.unwrap().unwrap();
    assert_eq!(effects(&scene.direct, &scene.schema, "e").await, (1, 1), "{counts:?}");
}

/// A consumer that stops while a claim is in doubt gives it back when the first try has ended: nobody waits for its lease.
#[tokio::test(flavor = "multi_thread")]
async fn t116_a_stopping_consumer_gives_back_what_its_first_try_was_granted() {
    let scene = scene().await;
    let consumer = Consumer::builder(bus("e").await, scene.ledger.clone()).scope("orders").topic("orders");
    let consumer = consumer.with(|settings| settings.drain = Duration::from_mins(10)).build().unwrap();
    let handle = consumer.handle();
    let gate = Gate::shut(&scene).await;
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &hapax::guard::Run| async { Ok(()) }));
    gate.lose_first_try().await;
    gate.until_tries(2).await;
    handle.stop();
    gate.until_tries(25).await; // more than one call makes
    gate.open().await;
    running.await.unwrap().unwrap();
    let entry = scene.ledger.get(&kit::identity("e"), None).await.unwrap().expect("an entry");
    assert_eq!((entry.state, entry.attempts), (State::Retry, 0), "it is free again");
}

/// The same of a keyed request: it is not told that somebody else is running it, and its key is not left running by nobody.
#[tokio::test(flavor = "multi_thread")]
async fn t116_a_request_that_meets_its_own_first_try_waits_for_it() {
    use hapax::backend::postgres::{PgKeys, PgKeysSettings, Pooling};
    use hapax::keyed::{Begin, Begun, IdempotencyKey, Keys as _, RequestFingerprint, RequestParts};
    let scene = scene().await;
    let mut settings = PgKeysSettings::default();
    settings.schema.clone_from(&scene.schema);
    settings.pooling = Pooling::Session;
    let keys = PgKeys::with_pool(scene.ledger.pool().clone(), settings).await.unwrap();
    let request = RequestParts { method: "POST", target: "/", body: b"{}", ..Default::default() };
    let begin = Begin::new(None, IdempotencyKey::now_v7(), RequestFingerprint::of(keys.secret(), &request));
    let gate = Gate::of(&scene, "keys").await;
    let asking = tokio::spawn({
        let (keys, begin) = (keys.clone(), begin.clone());
        async move {
            loop {
                match keys.begin(&begin).await {
                    Err(error) if is_doubt(&error) => {}
                    outcome => return outcome,
                }
            }
        }
    });
    gate.lose_first_try().await;
    gate.until_tries(2).await;
    gate.open().await;
    let answer = asking.await.unwrap();
    assert!(matches!(answer, Ok(Begun::First(_))), "{answer:?}");
}
