//! A separate consumer process: this binary again, configured by its environment.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::backend::postgres::{PgLedger, PgSettings, PgTx};
use hapax::consumer::{Consumer, ConsumerSettings, Handled, TransactionalBatchHandler};
use hapax::guard::Run;
use hapax::{Event, Scope, Topic};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;
use tokio::process::{Child, Command};

use crate::harness::Fallible;
use crate::kafka::bus;
use crate::pg::pool;

const ENV: &str = "HAPAX_BENCH_MEMBER";
/// Printed by a member when it is warm.
pub const WARM: &str = "warm";

/// The configuration of a member.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Member {
    /// Its topic.
    pub topic: String,
    /// Its group and its scope.
    pub group: String,
    /// How long its handler waits.
    pub wait_ms: u64,
    /// How many handlers run at once.
    pub concurrency: usize,
    /// Lease and session timeout.
    pub lease_s: u64,
    /// The schema of its ledger and of its `effect` table; none: a ledger in memory and no effects.
    pub schema: Option<String>,
    /// The number of events in a transactional batch; 0: leased, one by one.
    pub batch: usize,
    /// The number of events after which it reports that it is warm.
    pub warm_after: usize,
}

/// Inserts a batch with this statement.
struct Together(Arc<str>);

impl TransactionalBatchHandler<PgTx> for Together {
    async fn handle(&self, tx: &mut PgTx, events: &[Event]) -> Handled {
        let payloads: Vec<_> =
            events.iter().map(|event| String::from_utf8_lossy(&event.payload).into_owned()).collect();
        sqlx::query(AssertSqlSafe(Arc::clone(&self.0))).bind(payloads).execute(&mut **tx).await?;
        Ok(())
    }
}

impl Member {
    /// Starts a process, which is killed when dropped.
    pub fn start(&self) -> Fallible<Child> {
        Ok(Command::new(std::env::current_exe()?)
            .arg("member")
            .env(ENV, serde_json::to_string(self)?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?)
    }

    fn settings(&self) -> Fallible<ConsumerSettings> {
        let mut settings = ConsumerSettings::new(Scope::new(&self.group)?, vec![Topic::new(&self.topic)?]);
        settings.dead_topic = Some(String::new());
        settings.concurrency = self.concurrency;
        settings.batch_max = self.batch.max(1);
        settings.lease = Duration::from_secs(self.lease_s);
        settings.heartbeat = settings.lease / 3;
        settings.session_timeout = settings.lease;
        Ok(settings)
    }
}

/// Runs as a member until it is killed.
pub async fn run() -> Fallible<()> {
    let member: Member = serde_json::from_str(&std::env::var(ENV)?)?;
    let (wait, warm_after) = (Duration::from_millis(member.wait_ms), member.warm_after);
    let handled = Arc::new(AtomicUsize::new(0));
    let count = move || {
        if handled.fetch_add(1, Ordering::Relaxed) + 1 == warm_after {
            println!("{WARM}");
        }
    };
    let bus = bus().await?;
    let Some(schema) = &member.schema else {
        let consumer =
            Consumer::builder(bus, MemoryLedger::default()).settings(member.settings()?).build()?;
        let work = move |_: &Event, _: &Run| {
            count();
            async move {
                tokio::time::sleep(wait).await;
                Ok(())
            }
        };
        consumer.leased(work).await?;
        return Ok(());
    };
    let mut settings = PgSettings::default();
    settings.schema.clone_from(schema);
    let on = pool(8).await?;
    let ledger = PgLedger::with_pool(on.clone(), settings).await?;
    let consumer = Consumer::builder(bus, ledger).settings(member.settings()?).build()?;
    let insert: Arc<str> = format!(
        "insert into {schema}.effect (n, pid) values (($1::text::jsonb ->> 'n')::bigint, {})",
        std::process::id()
    )
    .into();
    if member.batch > 0 {
        let insert = format!(
            "insert into {schema}.effect (n, pid) select (p::jsonb ->> 'n')::bigint, {} from unnest($1::text[]) p",
            std::process::id()
        );
        consumer.transactional_batch(Together(insert.into())).await?;
        return Ok(());
    }
    let work = move |event: &Event, _: &Run| {
        count();
        let (on, insert) = (on.clone(), Arc::clone(&insert));
        let payload = String::from_utf8_lossy(&event.payload).into_owned();
        async move {
            tokio::time::sleep(wait).await;
            sqlx::query(AssertSqlSafe(insert)).bind(payload).execute(&on).await?;
            Handled::Ok(())
        }
    };
    consumer.leased(work).await?;
    Ok(())
}
