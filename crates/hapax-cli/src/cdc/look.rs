//! `hapax cdc status`, and what `hapax doctor` says about change data capture.

use hapax::Time;
use hapax::clock::{Clock as _, SystemClock};
use hapax::config::Config;
use hapax::ledger::{Finding, Level};
use serde_json::json;

use super::act::{connect, database, endpoint};
use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::{open, print};

pub async fn status(global: &Global, config: &Config) -> Result<u8, Failure> {
    let (connect, cdc) = (connect(config)?, database(config).await?);
    let (state, slot) = (connect.state().await?, cdc.slot(&config.cdc.slot).await?);
    // The table comes with `hapax cdc apply`.
    let pulse: Option<Time> = cdc.last_pulse().await.ok().flatten();
    let runs = state.as_ref().is_some_and(super::connect::State::runs);
    let gap = gap(global, config).await;
    let reads = slot.as_ref().is_some_and(|slot| slot.active && !slot.lost);
    let flows = runs && reads && gap.is_none();
    if global.json {
        let tasks = state.iter().flat_map(|state| &state.tasks);
        print::json(&json!({
            "connector": state.as_ref().map(|state| &state.connector),
            "tasks": tasks.map(|(state, trace)| json!({"state": state, "trace": trace})).collect::<Vec<_>>(),
            "slot": slot.as_ref().map(|slot| json!({
                "active": slot.active, "lag_bytes": slot.lag_bytes, "lost": slot.lost, "failover": slot.failover,
            })),
            "last_pulse": pulse.map(|pulse| pulse.to_string()),
            "gap": gap, "flows": flows,
        }))?;
    } else {
        let mut rows = Vec::new();
        let mut say = |what: String, state: String, more: String| rows.push([what, state, more]);
        let connector = format!("connector {}", config.cdc.connector);
        match &state {
            Some(state) => {
                say(connector, state.connector.to_lowercase(), String::new());
                for (number, (state, trace)) in state.tasks.iter().enumerate() {
                    say(format!("task {number}"), state.to_lowercase(), trace.clone().unwrap_or_default());
                }
            }
            None => say(connector, "missing".into(), "`hapax cdc apply` makes it".into()),
        }
        let name = format!("slot {}", config.cdc.slot);
        match &slot {
            Some(slot) => {
                let word = if slot.lost {
                    "lost"
                } else if slot.active {
                    "read"
                } else {
                    "not read"
                };
                let more = if slot.lost { ANEW.into() } else { format!("{} bytes behind", slot.lag_bytes) };
                say(name, word.into(), more);
            }
            // Debezium has streamed from it, so what was written since is in no topic.
            None if pulse.is_some() => say(name, "gone".into(), ANEW.into()),
            None => say(name, "missing".into(), "`hapax cdc apply` makes it".into()),
        }
        if let Some(gap) = gap {
            say("read model".into(), "incomplete".into(), gap);
        }
        let ago = |at: Time| format!("{} ms ago", (SystemClock.now().as_micros() - at.as_micros()) / 1000);
        say(
            "last pulse".into(),
            pulse.map_or("none".into(), |at| at.to_string()),
            pulse.map(ago).unwrap_or_default(),
        );
        print::table(["part", "state", ""], &rows)?;
    }
    Ok(if flows { 0 } else { failure::BROKEN_PROMISE })
}

/// What to do when changes are in no topic.
const ANEW: &str = "changes are missing: raise analytics.generation, name a new cdc.topic, run `hapax cdc remove --slot` and `hapax \
                    cdc apply --create PARTITIONS`, then `hapax analytics rebuild`";

/// Why the read model lacks changes of everybody, if it does: a slot that was made anew streams as if nothing had
/// happened, and only the pulses show it.
async fn gap(global: &Global, config: &Config) -> Option<String> {
    let model = open::existing_read_model(global, config).ok()?;
    let missing = hapax::analytics::missing(&*model, Some(&config.cdc.topic)).await.ok()?;
    missing.map(|rejected| rejected.reason)
}

/// What change data capture needs, for those who use it.
pub async fn findings(config: &Config) -> Result<Vec<Finding>, Failure> {
    let mut findings = database(config).await?.check(&config.cdc.slot, &endpoint(config)?.user).await?;
    if config.cdc.connect_url.is_some() {
        findings.push(of_version(connect(config)?.debezium().await?.as_deref()));
    }
    Ok(findings)
}

/// Debezium before 3.7 loses rows of a COPY that it is restarted in.
fn of_version(version: Option<&str>) -> Finding {
    let numbers = |version: &str| -> Option<(u32, u32)> {
        let mut parts = version.split('.');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    };
    let (level, message) = match version {
        None => (
            Level::Refusal,
            "this Kafka Connect has no Debezium for PostgreSQL: add it to plugin.path".to_owned(),
        ),
        Some(version) if numbers(version).is_some_and(|numbers| numbers >= (3, 7)) => {
            (Level::Fine, format!("Debezium {version}"))
        }
        Some(version) => {
            let text = format!(
                "Debezium {version} loses rows when it is restarted within a COPY: load modules with single writes, or use 3.7 or newer"
            );
            (Level::Warning, text)
        }
    };
    Finding { level, check: "debezium", message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t52_versions_that_lose_rows_of_a_copy_are_reported() {
        for (version, level) in [
            (Some("3.6.1.Final"), Level::Warning),
            (Some("2.7.4.Final"), Level::Warning),
            (Some("unknown"), Level::Warning),
            (Some("3.7.0.Final"), Level::Fine),
            (Some("3.10.0.Final"), Level::Fine),
            (Some("4.0.0.Alpha1"), Level::Fine),
            (None, Level::Refusal),
        ] {
            assert_eq!(of_version(version).level, level, "{version:?}");
        }
    }
}
