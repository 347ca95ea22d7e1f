//! `hapax plan`: what it says of a ledger is what a ledger that is filled takes.

#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::json;

use crate::common::run;

#[test]
fn a_plan_says_what_a_load_needs_and_where_its_figures_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["plan", "--rate", "5000", "--retention", "7d", "--duplicates", "3%"];
    let text = run(dir.path(), &args).code(0).out;
    for part in [
        "4,850/s",
        "5,866,560,000 at most",
        "docs/benchmarks.md",
        "20,642/s by one process",
        "a quiet machine",
        "10 to 30 %",
        "medium load",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let plan = run(dir.path(), &[&args[..], &["--json"]].concat()).code(0).json();
    assert_eq!((&plan["rows_max"], &plan["weeks"]), (&json!(5_866_560_000.0), &json!(4)), "{plan}");
    assert_eq!(
        (&plan["connections_max"], &plan["measured"]["per_s"]),
        (&json!(100), &json!(20_642.0)),
        "{plan}"
    );
    for (bad, said) in [
        (&["--rate", "0"][..], "it must be 1 to 10000000"),
        (&["--rate", "5", "--duplicates", "3"], "%"),
        (&["--rate", "5", "--duplicates", "100%"], "less than 100%"),
        (&["--rate", "5", "--retention", "soon"], "for example 7d"),
        (&["--rate", "5", "--ledger", "memory:"], "without --ledger"),
        (&[], "--rate"),
    ] {
        let ran = run(dir.path(), &[&["plan"], bad].concat()).code(2);
        assert!(ran.err.contains(said), "{bad:?}: {}", ran.err);
    }
}

#[cfg(feature = "postgres")]
mod filled {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use hapax::backend::postgres::{PgLedger, PgSettings, PgTx};
    use hapax::bus::{Bus as _, MemoryBus, Record, TopicSettings};
    use hapax::consumer::{ConsumerHandle, Handled};
    use hapax::guard::Run;
    use hapax::ledger::{OnDead, OrderPolicy};
    use hapax::{Consumer, Event, EventId, Guard, Operations as _, Topic};

    use super::run;

    const EVENTS: usize = 20_000;

    /// A ledger in a schema of its own.
    async fn ledger(schema: &str) -> PgLedger {
        let mut settings = PgSettings::default();
        schema.clone_into(&mut settings.schema);
        let url = std::env::var("HAPAX_TEST_POSTGRES_URL").unwrap();
        PgLedger::connect(&url, settings).await.unwrap()
    }

    /// A ledger, filled as a user would, and removed again: bytes for each entry.
    async fn bytes(name: &str, fill: impl AsyncFnOnce(PgLedger)) -> f64 {
        let id = EventId::now_v7().to_string();
        let schema = format!("plan_{name}_{}", &id[id.len() - 12..]);
        let ledger = ledger(&schema).await;
        fill(ledger.clone()).await;
        let stat = ledger.stat().await.unwrap();
        let size = stat.week_sizes.iter().max_by_key(|size| size.entries).unwrap();
        assert!(size.entries >= EVENTS as u64, "{stat:?}");
        let sql = hapax::backend::postgres::sqlx::AssertSqlSafe(format!("drop schema {schema} cascade"));
        hapax::backend::postgres::sqlx::query(sql).execute(ledger.pool()).await.unwrap();
        size.bytes.unwrap() as f64 / size.entries as f64
    }

    fn planned(args: &[&str]) -> f64 {
        let dir = tempfile::tempdir().unwrap();
        let args = [&["plan", "--rate", "100", "--json"], args].concat();
        run(dir.path(), &args).code(0).json()["bytes_per_row"].as_f64().unwrap()
    }

    #[track_caller]
    fn assert_within(what: &str, planned: f64, real: f64) {
        eprintln!("{what}: planned {planned:.1}, real {real:.1}, {:.2}", planned / real);
        assert!(
            (0.8..=1.2).contains(&(planned / real)),
            "{what}: planned {planned:.1} bytes, real {real:.1}"
        );
    }

    /// Claims many at once, as a busy service does.
    async fn each(guard: &Guard<PgLedger>, ids: Vec<EventId>, leased: bool) {
        let mut tasks = tokio::task::JoinSet::new();
        let ids = Arc::new(ids);
        for first in 0..500 {
            let (guard, ids) = (guard.clone(), Arc::clone(&ids));
            tasks.spawn(async move {
                for id in ids.iter().skip(first).step_by(500).cloned() {
                    if leased {
                        let done =
                            guard.process_if_new(id, async || Ok::<_, std::io::Error>(())).await.unwrap();
                        assert!(matches!(done, hapax::guard::ProcessingResult::Success), "{done:?}");
                    } else {
                        assert!(guard.mark_processed(id, None).await.unwrap().is_claimed());
                    }
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
    }

    fn ids(count: usize) -> Vec<EventId> {
        (0..count).map(|_| EventId::now_v7()).collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_plan_is_within_a_fifth_of_claims_by_a_guard() {
        let guard = |ledger| Guard::builder(ledger).scope("twelve-chars").build().unwrap();
        let real = bytes("claims", async |ledger| each(&guard(ledger), ids(EVENTS), false).await).await;
        assert_within("claims", planned(&["--guard", "--mode", "at-most-once"]), real);
        let real = bytes("leases", async |ledger| each(&guard(ledger), ids(EVENTS), true).await).await;
        assert_within("leases", planned(&["--guard", "--mode", "leased"]), real);
        let long = |n: usize| EventId::new(format!("{n:07}-{}", "x".repeat(72))).unwrap();
        let texts = (0..EVENTS).map(|n| long(n * 7919 % EVENTS)).collect();
        let real = bytes("texts", async |ledger| each(&guard(ledger), texts, false).await).await;
        assert_within("texts", planned(&["--guard", "--mode", "at-most-once", "--id-bytes", "80"]), real);
    }

    async fn bus(ordered: bool) -> Arc<MemoryBus> {
        let (bus, topic) = (MemoryBus::default(), Topic::new("twelve-chars").unwrap());
        bus.create_topic(&topic, TopicSettings::new(4)).await.unwrap();
        let records: Vec<_> = ids(EVENTS)
            .into_iter()
            .enumerate()
            .map(|(n, id)| {
                let mut payload = serde_json::json!({"event_id": id.to_string(), "amount": n});
                if ordered {
                    payload["aggregate_id"] = format!("order-{:06}", n % 500).into();
                    payload["seq"] = (n / 500 + 1).into();
                }
                let key = ordered.then(|| format!("order-{:06}", n % 500).into_bytes().into());
                Record { key, payload: Some(payload.to_string().into_bytes().into()), ..Record::default() }
            })
            .collect();
        for answer in bus.publish(&topic, &records).await.unwrap() {
            answer.unwrap();
        }
        Arc::new(bus)
    }

    fn consumer(bus: Arc<MemoryBus>, ledger: PgLedger, ordered: bool) -> Consumer<PgLedger> {
        let builder = Consumer::builder(bus, ledger).scope("twelve-chars").topic("twelve-chars");
        let builder = if ordered { builder.order(OrderPolicy::Latest, OnDead::Skip) } else { builder };
        builder.build().unwrap()
    }

    /// Stops a consumer when it has seen everything.
    fn stop_at_the_end(handle: ConsumerHandle) {
        tokio::spawn(async move {
            let began = Instant::now();
            while handle.progress().passed.values().sum::<u64>() < EVENTS as u64 {
                assert!(began.elapsed() < Duration::from_secs(300), "{:?}", handle.progress());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            handle.stop();
        });
    }

    async fn nothing(_: &mut PgTx, _: &Event) -> Handled {
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_plan_is_within_a_fifth_of_a_consumer() {
        for ordered in [false, true] {
            let real = bytes("transactional", async |ledger| {
                let consumer = consumer(bus(ordered).await, ledger, ordered);
                stop_at_the_end(consumer.handle());
                consumer.transactional(nothing).await.unwrap();
            });
            let more: &[&str] = if ordered { &["--aggregate-bytes", "12"] } else { &[] };
            assert_within(&format!("transactional, ordered {ordered}"), planned(more), real.await);
        }
        let real = bytes("leased", async |ledger| {
            let consumer = consumer(bus(false).await, ledger, false);
            stop_at_the_end(consumer.handle());
            consumer.leased(async |_: &Event, _: &Run| -> Handled { Ok(()) }).await.unwrap();
        });
        assert_within("leased", planned(&["--mode", "leased"]), real.await);
    }
}
