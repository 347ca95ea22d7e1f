//! The pulses of change data capture: stamps in the database, which Debezium carries to every partition.

use std::sync::Arc;
use std::time::Duration;

use hapax::bus::Bus;

use super::app::Shared;

/// Stamps pulses until the server stops. A failure is logged when it begins and when it ends.
#[cfg(feature = "postgres")]
pub async fn stamp(app: Shared, bus: Arc<dyn Bus>, every: Duration) {
    let Some(cdc) = app.records.cdc(&app.config) else {
        return tracing::error!(target: "hapax", "records are not in PostgreSQL, so no pulses are written");
    };
    let topic = &app.config.cdc.topic;
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut fails = false;
    loop {
        tick.tick().await;
        // Partitions may be added; who reads a pulse counts them, too. Of several servers one stamps.
        let stamped = async {
            let missing = || {
                hapax::Error::NotFound(format!(
                    "topic {topic}; `hapax cdc apply --create PARTITIONS` makes it"
                ))
            };
            let now = cdc.now().await?;
            let info = bus.topic(topic).await?.ok_or_else(missing)?;
            cdc.pulse(now, info.partitions, every / 2).await
        };
        match stamped.await {
            Ok(_) if fails => {
                fails = false;
                tracing::info!(target: "hapax", "pulses are written again");
            }
            Ok(_) => {}
            Err(error) if fails => {
                tracing::debug!(target: "hapax", error = %error.chain(), "no pulse was written");
            }
            Err(error) => {
                fails = true;
                tracing::warn!(target: "hapax", error = %error.chain(), "no pulse was written, so lastSyncAt does not advance");
            }
        }
    }
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
pub async fn stamp(_: Shared, _: Arc<dyn Bus>, _: Duration) {}
