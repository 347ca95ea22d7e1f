//! At most once, with the outcome reported: `cargo run --example at_most_once`.
use std::time::Duration;

use hapax::{Guard, Outcome, backend::memory::MemoryLedger};

#[tokio::main]
async fn main() -> hapax::Result<()> {
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
