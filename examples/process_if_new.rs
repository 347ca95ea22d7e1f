//! The smallest guarded handler: `cargo run --example process_if_new`.
use hapax::{Guard, backend::memory::MemoryLedger};

#[tokio::main]
async fn main() -> hapax::Result<()> {
    let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
    for delivery in ["order-17-paid", "order-18-paid", "order-17-paid"] {
        let send = || async move {
            println!("{delivery}: sending the mail");
            Ok::<_, String>(())
        };
        let result = guard.process_if_new(delivery, send).await?;
        println!("{delivery}: {result}; may be acknowledged: {}", result.may_acknowledge());
    }
    Ok(())
}
