//! What is on the topic.

use std::time::{Duration, Instant};

use hapax::bus::{BusEvent, Partition, Received, Subscription};
use hapax::{Topic, open};
use serde_json::Value;

use crate::Deployment;

/// Every record of the topic, up to where it ends now.
pub fn records(world: &Deployment) -> Vec<Received> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(read(world))
}

async fn read(world: &Deployment) -> Vec<Received> {
    let topic = Topic::new(world.topic.clone()).unwrap();
    let bus = open::bus(&format!("kafka://{}", std::env::var("HAPAX_TEST_KAFKA").unwrap())).await.unwrap();
    let mut ends = Vec::new();
    for number in 0..crate::PARTITIONS {
        ends.push(bus.range(&Partition { topic: topic.clone(), number }).await.unwrap().1);
    }
    let group = format!("cdc-test-{}", hapax::analytics::Uuid::now_v7());
    let mut subscriber = bus.subscribe(Subscription::new(group, [topic]).unwrap()).await.unwrap();
    let (mut all, began) = (Vec::new(), Instant::now());
    while ends.iter().any(|end| *end > 0) {
        assert!(began.elapsed() < Duration::from_secs(120), "the topic ends at {ends:?}");
        if let Ok(BusEvent::Records(records)) = subscriber.next().await {
            for received in records {
                let end = &mut ends[received.origin.partition as usize];
                if received.origin.offset + 1 >= *end {
                    *end = 0;
                }
                all.push(received);
            }
        }
    }
    subscriber.leave().await.unwrap();
    all
}

/// The value of a record as JSON.
pub fn value(received: &Received) -> Value {
    serde_json::from_slice(received.record.payload.as_deref().unwrap_or(b"null")).unwrap()
}

/// Messages about one record.
pub fn about(records: &[Received], id: &str) -> Vec<Value> {
    let of = |value: &Value| value["after"]["id"] == id || value["before"]["id"] == id;
    records.iter().map(value).filter(of).collect()
}
