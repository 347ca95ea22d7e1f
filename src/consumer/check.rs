//! Start-up checks of what a consumer's guarantee depends on.

use std::time::Duration;

use super::ConsumerSettings;
use crate::bus::Bus;
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::ledger::{Baseline, Finding, IdentityRule, Ledger, Level, OrderPolicy};
use crate::window::Window;
use crate::words::{counted, span};

/// The largest difference between this process's clock and the ledger's that is not worth a
/// warning.
const SKEW_MAX: Duration = Duration::from_secs(5);

/// Checks ledger, topics, window and clocks. The findings are for people; [`refuse`] fails on those
/// that make the guarantee impossible.
pub async fn check(
    bus: &dyn Bus,
    ledger: &dyn Ledger,
    window: Option<&dyn Window>,
    settings: &ConsumerSettings,
) -> Result<Vec<Finding>> {
    let mut findings = ledger.check().await?;
    findings.extend(clocks(ledger).await?);
    let mut partitions = 0;
    let mut redelivery = Some(Duration::ZERO);
    for topic in &settings.topics {
        let Some(info) = bus.topic(topic).await? else {
            findings.push(finding(
                Level::Refusal,
                "topic",
                format!(
                    "there is no topic {topic} on this bus ({}); create it first",
                    bus.capabilities().bus
                ),
            ));
            continue;
        };
        partitions += info.partitions;
        redelivery = redelivery.zip(info.retention).map(|(a, b)| a.max(b));
        findings.push(match info.retention {
            Some(retention) if retention <= settings.retention => {
                finding(Level::Fine, "retention", format!("{topic} keeps records for {}, the ledger for {}", span(retention), span(settings.retention)))
            }
            retention => {
                let kept = retention.map_or("for ever".to_owned(), |retention| format!("for {}", span(retention)));
                finding(
                    Level::Warning,
                    "retention",
                    format!("{topic} keeps records {kept}, the ledger only for {}: after that a redelivered event counts as new, unless its id contains a time (UUIDv7)", span(settings.retention)),
                )
            }
        });
        if info.compacted && matches!(settings.order, Some((OrderPolicy::Strict { .. }, _))) {
            findings.push(finding(Level::Refusal, "order", format!("{topic} is compacted, so numbers are missing in it for ever: a strict order would never move on; use latest")));
        }
        if let (Some(copies), Some(insync)) = (info.replication, info.min_insync)
            && (copies < 2 || insync < 2)
        {
            findings.push(finding(Level::Warning, "replication", format!("{topic} has {}, of which {insync} must have a record before it is acknowledged: the loss of one broker can lose records", counted(copies.unsigned_abs().into(), "copy", "copies"))));
        }
    }
    if usize::try_from(partitions).is_ok_and(|partitions| partitions > settings.concurrency) {
        findings.push(finding(
            Level::Warning,
            "concurrency",
            format!(
                "{}, but only {} at once (consumer.concurrency)",
                counted(partitions.unsigned_abs().into(), "partition", "partitions"),
                counted(settings.concurrency as u64, "handler", "handlers")
            ),
        ));
    }
    if settings.start == crate::bus::Start::Latest {
        findings.push(finding(Level::Warning, "start", "a group without committed offsets begins with what comes from now on: what was published before it first started is never delivered".to_owned()));
    }
    if let Some((OrderPolicy::Strict { baseline: Baseline::FirstSeen, .. }, _)) = settings.order {
        findings.push(finding(
            Level::Fine,
            "order",
            "a strict order begins with whatever seq comes first".to_owned(),
        ));
    }
    if window.is_some() && ledger.settings().identity == IdentityRule::IdAndTime {
        findings.push(finding(Level::Refusal, "window", "a window knows events by their ids alone, and this ledger's identity is id_and_time: it would hide an event that has a used id and another week; use one or the other".to_owned()));
    }
    if let Some(window) = window {
        findings.extend(window.check(redelivery).await);
    }
    Ok(findings)
}

/// Compares clocks. For people only: nothing depends on this process's clock.
async fn clocks(ledger: &dyn Ledger) -> Result<Vec<Finding>> {
    let there = ledger.now().await?;
    let here = SystemClock.now();
    let skew = here.since(there).max(there.since(here));
    if skew <= SKEW_MAX {
        return Ok(vec![finding(
            Level::Fine,
            "clock",
            format!("this process and the ledger differ by {skew:?}"),
        )]);
    }
    Ok(vec![finding(
        Level::Warning,
        "clock",
        format!(
            "this process's clock differs from the ledger's by {skew:?}; nothing is decided by it, but logs will be hard to read"
        ),
    )])
}

fn finding(level: Level, check: &'static str, message: String) -> Finding {
    Finding { level, check, message }
}

/// Logs warnings. Returns an error if a finding is a refusal.
pub fn refuse(findings: &[Finding]) -> Result<()> {
    for finding in findings {
        match finding.level {
            Level::Fine => tracing::debug!(target: "hapax", check = finding.check, "{}", finding.message),
            Level::Warning => tracing::warn!(target: "hapax", check = finding.check, "{}", finding.message),
            Level::Refusal => {}
        }
    }
    let refusals: Vec<_> = findings
        .iter()
        .filter(|finding| finding.level == Level::Refusal)
        .map(|finding| finding.message.as_str())
        .collect();
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Error::Config(refusals.join("; ")))
}
