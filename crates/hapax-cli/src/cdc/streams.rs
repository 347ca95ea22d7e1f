//! Whether changes flow: a pulse is written, and must arrive in every partition of the topic.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax::analytics::{Input, Source, Uuid};
use hapax::backend::postgres::PgCdc;
use hapax::bus::{Bus, BusEvent, Partition, Received, Subscriber, Subscription};
use hapax::{Time, Topic};
use serde_json::Value;
use tokio::time::Instant;

use super::connect::{Connect, PAUSE};
use crate::failure::Failure;

/// How often the connector is asked how it is.
const LOOK: Duration = Duration::from_secs(1);
/// How long Connect may tell of a failure that is over.
const MENDED: Duration = Duration::from_secs(10);
/// How long the partitions of a new topic may take to have a leader.
const LEADER: Duration = Duration::from_secs(60);

/// Reads the topic from where it is now.
pub struct Watch {
    subscriber: Box<dyn Subscriber>,
    /// The name that the connector gives to its messages.
    prefix: String,
    partitions: i32,
    /// Where each partition ends before anything is asked for, until it has a pulse.
    open: BTreeMap<i32, i64>,
}

impl Watch {
    pub async fn new(bus: &dyn Bus, topic: &Topic, partitions: i32, prefix: &str) -> Result<Self, Failure> {
        let mut open = BTreeMap::new();
        for number in 0..partitions {
            open.insert(number, end_of(bus, &Partition { topic: topic.clone(), number }).await?);
        }
        // A group of its own: it commits nothing.
        let group = format!("hapax-cdc-{}", Uuid::now_v7());
        let subscriber = bus.subscribe(Subscription::new(group, [topic.clone()])?).await?;
        Ok(Watch { subscriber, prefix: prefix.to_owned(), partitions, open })
    }

    /// Waits until every partition has a pulse that was written from now on. `mended` is what the connector
    /// had failed with before it was started again: Connect tells of it for some moments more.
    pub async fn wait(
        mut self,
        cdc: &PgCdc,
        connect: &Connect,
        mended: Option<String>,
        within: Duration,
    ) -> Result<(), Failure> {
        let believed = Instant::now() + MENDED;
        let end = Instant::now() + within;
        let (mut since, mut looked): (Option<Time>, _) = (None, Instant::now());
        loop {
            if looked <= Instant::now() {
                looked = Instant::now() + LOOK;
                // Again and again: those that were written while a snapshot runs are part of it, and say nothing.
                let stamped = cdc.pulse(cdc.now().await?, self.partitions, Duration::ZERO).await?;
                since = since.or(stamped);
                let failure = connect.state().await?.and_then(|state| state.failure());
                let failure =
                    failure.filter(|failure| Instant::now() >= believed || mended.as_ref() != Some(failure));
                if let Some(failure) = failure {
                    self.leave().await;
                    return Err(Failure::dependency(
                        "unavailable",
                        format!("the connector has failed: {failure}"),
                    ));
                }
            }
            if let Ok(event) = tokio::time::timeout(PAUSE, self.subscriber.next()).await {
                match event {
                    Ok(event) => self.take(event, since).await?,
                    Err(error) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
                    Err(error) => return Err(error.into()),
                }
            }
            if self.open.is_empty() {
                self.leave().await;
                return Ok(());
            }
            if Instant::now() >= end {
                let missing: Vec<_> = self.open.keys().map(i32::to_string).collect();
                let message = format!(
                    "the connector is there, but no pulse has arrived in partition {} within {} s: a snapshot may be under way, or \
                     its keys are written in another way; see `hapax cdc status`",
                    missing.join(", "),
                    within.as_secs()
                );
                self.leave().await;
                return Err(Failure::dependency("unavailable", message));
            }
        }
    }

    async fn take(&mut self, event: BusEvent, since: Option<Time>) -> Result<(), Failure> {
        match event {
            BusEvent::Assigned(assignments) => {
                for assigned in assignments {
                    if let Some(end) = self.open.get(&assigned.partition.number) {
                        self.subscriber.seek(&assigned.partition, *end).await?;
                    }
                }
            }
            BusEvent::Revoked(assignments) => self.subscriber.release(&assignments).await?,
            BusEvent::Records(records) => {
                for received in &records {
                    let Ok(Input::Pulse(pulse) | Input::NextPulse { pulse, .. }) =
                        Source::Debezium.read(received, 1)
                    else {
                        continue;
                    };
                    let is_new = since.is_some_and(|since| pulse.at >= since);
                    if is_new && publisher(received).as_deref() == Some(&self.prefix) {
                        self.open.remove(&received.origin.partition);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    async fn leave(self) {
        let _ = self.subscriber.leave().await; // the group ends by itself, too
    }
}

/// Where a partition ends. One of a topic that was made just now may have no leader yet.
pub async fn end_of(bus: &dyn Bus, partition: &Partition) -> Result<i64, Failure> {
    let patience = Instant::now() + LEADER;
    loop {
        match bus.range(partition).await {
            Ok((_, end)) => return Ok(end),
            Err(error) if error.is_retryable() && Instant::now() < patience => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Who published a message of Debezium: another connector may publish to the same topic.
fn publisher(received: &Received) -> Option<String> {
    let value: Value = serde_json::from_slice(received.record.payload.as_deref()?).ok()?;
    let message = if value["op"].is_null() { &value["payload"] } else { &value };
    message["source"]["name"].as_str().map(str::to_owned)
}
