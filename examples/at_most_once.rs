//! At most once: with a consumer, and with a guard that reports the outcome.
//! `cargo run --example at_most_once`.
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::{Bus, Record, TopicSettings, memory::MemoryBus};
use hapax::consumer::{AtMostOnceHandler, Consumer, ConsumerHandle, Handled};
use hapax::{Event, Guard, Outcome, Topic};

/// Pushes to a phone. A push that fails is listed as lost and not repeated.
struct Push(ConsumerHandle);

impl AtMostOnceHandler for Push {
    async fn handle(&self, event: &Event) -> Handled {
        println!("{}: pushed by the consumer", event.id);
        self.0.stop();
        Ok(())
    }
}

#[tokio::main]
async fn main() -> hapax::Result<()> {
    let (bus, orders) = (Arc::new(MemoryBus::default()), Topic::new("orders")?);
    bus.create_topic(&orders, TopicSettings::new(1)).await?;
    let record = Record { payload: Some(r#"{"event_id": "order-16-paid"}"#.into()), ..Record::default() };
    bus.publish(&orders, &[record.clone(), record]).await?; // the same event, twice
    let consumer = Consumer::builder(bus, MemoryLedger::default()).scope("push").topic("orders").build()?;
    let push = Push(consumer.handle());
    consumer.at_most_once(push).await?; // or an `async fn(&Event) -> Handled`

    let guard = Guard::builder(MemoryLedger::default()).scope("push").build()?;
    for delivery in ["order-17-paid", "order-17-paid", "order-18-paid"] {
        match guard.try_claim_tracked(delivery, Duration::from_mins(1)).await? {
            Outcome::First(claimed) if delivery == "order-18-paid" => {
                println!("{delivery}: the push failed; it is listed as lost and not repeated");
                claimed.lost("the phone is off").await?;
            }
            Outcome::First(claimed) => {
                println!("{delivery}: pushed, token {}", claimed.token());
                claimed.finished().await?;
            }
            other => println!("{delivery}: {}", other.name()),
        }
    }
    Ok(())
}
