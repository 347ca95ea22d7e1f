//! A leased handler whose sink gets a key and a token: `cargo run --example lease`.
use hapax::{Guard, Outcome, backend::memory::MemoryLedger};

#[tokio::main]
async fn main() -> hapax::Result<()> {
    let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
    for _delivery in 0..3 {
        match guard.lease("order-17-paid").await? {
            Outcome::First(mut lease) => {
                println!("run {} of {}, token {}", lease.attempt(), lease.key(), lease.token());
                let busy = guard.lease("order-17-paid").await?;
                println!("meanwhile, for everybody else it is {}", busy.name());
                // Extends the lease while it runs; cancels the future if the lease is lost.
                match lease.run(async { Ok::<_, String>(()) }).await? {
                    Ok(()) => lease.done().await?,
                    Err(error) => println!("{:?}", lease.fail(error).await?),
                }
            }
            other => println!("{}; may be acknowledged: {}", other.name(), other.may_acknowledge()),
        }
    }
    Ok(())
}
