//! The README's first program with Restate: Kafka to PostgreSQL, one row per event.
//!
//! The Restate server reads the topic and calls this service; see the commands beside it.
use restate_sdk::prelude::*;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct Order {
    event_id: String,
}

struct Billing(PgPool);

#[service]
impl Billing {
    #[handler]
    async fn paid(&self, ctx: Context<'_>, order: Json<Order>) -> HandlerResult<()> {
        let id = order.into_inner().event_id;
        // A step whose result was not journaled runs again, and a record that was sent twice is two
        // calls: the effect needs a key of its own.
        ctx.run(|| async {
            let insert = "insert into paid (id) values ($1) on conflict do nothing";
            sqlx::query(insert).bind(&id).execute(&self.0).await?;
            Ok(())
        })
        .await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect("postgres://localhost/app").await?;
    let endpoint = Endpoint::builder().bind(Billing(pool)).build();
    HttpServer::new(endpoint).listen_and_serve("0.0.0.0:9080".parse()?).await;
    Ok(())
}
