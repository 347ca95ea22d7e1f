//! Parallel keys within one partition: a handler that waits, and many keys, against one event at a
//! time.

use std::time::{Duration, Instant};

use hapax::backend::memory::MemoryLedger;
use hapax::bus::Record;
use hapax::consumer::Handled;
use hapax::guard::Run;
use hapax::{Event, EventId};
use rdkafka::Message;
use tokio::task::JoinSet;

use crate::harness::{Contestant, Fallible, Goal, Options, Report, interleave};
use crate::kafka::{Filled, bus, by_hand, consume, settings};
use crate::pg::{SCOPE, Schema, pool};

const KEYS: usize = 1000;
const WAIT: Duration = Duration::from_millis(5);
/// Concurrent handlers: a sensible choice for a thousand keys and a handler that only waits.
const CONCURRENCY: usize = 512;

fn record(n: usize) -> Record {
    let payload = serde_json::json!({ "event_id": EventId::now_v7().to_string(), "n": n });
    Record {
        key: Some(format!("key-{}", n % KEYS).into()),
        payload: Some(payload.to_string().into()),
        ..Record::default()
    }
}

/// The plainest loop: one event, its handler, the next event.
async fn one_at_a_time(from: &Filled, events: usize) -> Fallible<f64> {
    let consumer = by_hand(&from.topic)?;
    let mut began = None;
    for _ in 0..events {
        let message = tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await??;
        began.get_or_insert_with(Instant::now);
        serde_json::from_slice::<serde_json::Value>(message.payload().unwrap_or_default())?;
        tokio::time::sleep(WAIT).await;
    }
    Ok(events as f64 / began.ok_or("nothing was delivered")?.elapsed().as_secs_f64())
}

/// Many at once, in any order: what runs an event need not wait for another of its key.
async fn unordered(from: &Filled, events: usize) -> Fallible<f64> {
    let consumer = by_hand(&from.topic)?;
    let (mut began, mut running) = (None, JoinSet::new());
    for _ in 0..events {
        let message = tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await??;
        began.get_or_insert_with(Instant::now);
        let payload = message.payload().unwrap_or_default().to_vec();
        if running.len() >= CONCURRENCY {
            running.join_next().await.ok_or("nothing runs")???;
        }
        running.spawn(async move {
            serde_json::from_slice::<serde_json::Value>(&payload)?;
            tokio::time::sleep(WAIT).await;
            Ok::<(), serde_json::Error>(())
        });
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(events as f64 / began.ok_or("nothing was delivered")?.elapsed().as_secs_f64())
}

async fn waiting(_: &Event, _: &Run) -> Handled {
    tokio::time::sleep(WAIT).await;
    Ok(())
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let (events, few) = (options.events(40_000), options.events(400));
    let bus = bus().await?;
    let mut from = Filled::empty(&bus, "keys", 1).await?;
    from.publish(&bus, &(0..events).map(record).collect::<Vec<_>>()).await?;
    let settings = |concurrency: usize| {
        settings(SCOPE, &from.topic).map(|mut settings| {
            settings.concurrency = concurrency;
            settings
        })
    };
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, leased on PostgreSQL, {CONCURRENCY} at once"), || async {
                let on = pool(1).await?;
                let schema = Schema::fresh(&on).await?;
                let guard = schema.leasing_guard(8).await?;
                let ledger = guard.ledger().clone();
                let reached = consume(
                    bus.clone(),
                    ledger,
                    settings(CONCURRENCY)?,
                    |consumer| consumer.leased(waiting),
                    events,
                )
                .await?;
                drop(guard);
                schema.drop().await?;
                Ok(reached)
            }),
            Contestant::new(format!("hapax, leased in memory, {CONCURRENCY} at once"), || async {
                let ledger = MemoryLedger::default();
                consume(
                    bus.clone(),
                    ledger,
                    settings(CONCURRENCY)?,
                    |consumer| consumer.leased(waiting),
                    events,
                )
                .await
            }),
            Contestant::new("one at a time, by hand, no dedup", || one_at_a_time(&from, few)),
            Contestant::new(format!("{CONCURRENCY} at once, by hand, no order, no dedup"), || {
                unordered(&from, events)
            }),
        ],
    )
    .await?;
    from.delete().await?;
    Ok(Report {
        title: format!("keys: a handler that waits {WAIT:?}, {KEYS} keys in one partition"),
        unit: "events/s",
        goals: vec![
            Goal::at_least("PostgreSQL / one at a time", lines[0].median() / lines[2].median(), 80.0),
            Goal::at_least("memory / one at a time", lines[1].median() / lines[2].median(), 150.0),
        ],
        notes: vec![format!(
            "of the same without order and dedup: {:.2}× on PostgreSQL, {:.2}× in memory",
            lines[0].median() / lines[3].median(),
            lines[1].median() / lines[3].median()
        )],
        lines,
    })
}
