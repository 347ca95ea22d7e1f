//! The window: `seen` and `remember` in batches, against pipelined GET and SET with the same
//! client, and bytes per key.

use hapax::backend::redis::RedisWindow;
use hapax::ledger::Identity;
use hapax::window::{Sighting, Window as _, WindowSettings, key};
use hapax::{EventId, Scope};
use redis::aio::ConnectionManager;

use crate::harness::{
    Contestant, Fallible, Goal, Line, Missing, Options, Report, interleave, quantile, rate,
};

/// The number of records that the consumer gets at once.
const BATCH: usize = 500;
const TTL_S: u64 = 86_400;
/// The estimate of an earlier design.
const BYTES: f64 = 72.0;

fn url() -> Fallible<String> {
    ["HAPAX_BENCH_VALKEY_URL", "HAPAX_TEST_VALKEY_URL"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|url| !url.is_empty()))
        .ok_or_else(|| Missing("no Valkey: set HAPAX_BENCH_VALKEY_URL".into()).into())
}

fn sightings(scope: &Scope, count: usize) -> Vec<Sighting> {
    (0..count).map(|_| Identity::new(scope.clone(), EventId::now_v7()).into()).collect()
}

/// Checks and remembers, batch by batch.
async fn ours(window: &RedisWindow, server: &ConnectionManager, all: Vec<Sighting>) -> Fallible<f64> {
    let reached = rate(all.len(), async {
        for batch in all.chunks(BATCH) {
            if window.seen(batch).await?.contains(&true) {
                return Err("a new id was seen before".into());
            }
            window.remember(batch).await?;
        }
        Ok(())
    })
    .await?;
    forget(server, &all.iter().map(|one| key(&one.identity)).collect::<Vec<_>>()).await?;
    Ok(reached)
}

/// GET in a pipeline, SET EX in a pipeline.
async fn by_hand(server: &ConnectionManager, keys: Vec<String>) -> Fallible<f64> {
    let mut connection = server.clone();
    let reached = rate(keys.len(), async {
        for batch in keys.chunks(BATCH) {
            let (mut get, mut set) = (redis::pipe(), redis::pipe());
            for key in batch {
                get.cmd("GET").arg(key);
            }
            let known: Vec<Option<Vec<u8>>> = get.query_async(&mut connection).await?;
            if known.iter().any(Option::is_some) {
                return Err("a new id was known".into());
            }
            for key in batch {
                set.cmd("SET").arg(key).arg("1").arg("EX").arg(TTL_S).ignore();
            }
            set.query_async::<()>(&mut connection).await?;
        }
        Ok(())
    })
    .await?;
    forget(server, &keys).await?;
    Ok(reached)
}

async fn forget(server: &ConnectionManager, keys: &[String]) -> Fallible<()> {
    for batch in keys.chunks(BATCH) {
        redis::cmd("UNLINK").arg(batch).query_async::<()>(&mut server.clone()).await?;
    }
    Ok(())
}

async fn bytes(server: &ConnectionManager, keys: &[String]) -> Fallible<Vec<f64>> {
    let mut sizes = Vec::with_capacity(keys.len());
    for key in keys {
        let size: u64 = redis::cmd("MEMORY").arg("USAGE").arg(key).query_async(&mut server.clone()).await?;
        sizes.push(size as f64);
    }
    Ok(sizes)
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let url = url()?;
    let server = redis::Client::open(url.as_str())?.get_connection_manager().await;
    let server = server.map_err(|error| Missing(format!("the Valkey server does not answer: {error}")))?;
    let scope = Scope::new(format!("bench-{}", uuid::Uuid::new_v4().simple()))?;
    let window = RedisWindow::new(&url, WindowSettings::new("1"))?;
    let events = options.events(100_000);
    let hand_keys = |count: usize| -> Vec<String> {
        (0..count).map(|_| format!("bench:{}:{}", scope.as_str(), EventId::now_v7())).collect()
    };
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, {BATCH} a batch"), || {
                ours(&window, &server, sightings(&scope, events))
            }),
            Contestant::new(format!("GET and SET EX in pipelines of {BATCH}"), || {
                by_hand(&server, hand_keys(events))
            }),
        ],
    )
    .await?;
    // A scope of typical length: its name is part of every key.
    let short = Scope::new("bench-mailer")?;
    let sample = sightings(&short, 200);
    window.remember(&sample).await?;
    let keys: Vec<String> = sample.iter().map(|one| key(&one.identity)).collect();
    let sizes = bytes(&server, &keys).await?;
    forget(&server, &keys).await?;
    let median = quantile(&sizes, 0.5);
    Ok(vec![
        Report {
            title: "window: check and set".into(),
            unit: "events/s",
            goals: vec![Goal::at_least("hapax / by hand", lines[0].median() / lines[1].median(), 0.8)],
            lines,
            notes: Vec::new(),
        },
        Report {
            title: "window: memory".into(),
            unit: "bytes per key",
            lines: vec![Line::new("hapax, UUIDv7 ids, scope bench-mailer (MEMORY USAGE)", sizes)],
            goals: vec![Goal::at_most(format!("bytes / {BYTES}"), median / BYTES, 1.0)],
            notes: vec![format!("a key is {}", keys.first().map_or("", String::as_str))],
        },
    ])
}
