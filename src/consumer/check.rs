//! Start-up checks of what a consumer's guarantee depends on.

use std::time::Duration;

use super::ConsumerSettings;
use crate::bus::{Bus, Partition, Start, TopicInfo};
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::id::Topic;
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
    let mut not_begun = Vec::new();
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
        findings.extend(replication(topic, &info));
        findings.extend(elections(topic, &info));
        if settings.start == Start::Latest && !has_begun(bus, &settings.group(), topic, info.partitions).await
        {
            not_begun.push(topic.as_str());
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
    if !not_begun.is_empty() {
        let (group, topics) = (settings.group(), not_begun.join(", "));
        findings.push(finding(Level::Warning, "start", format!("the group {group} has committed nothing of {topics} yet, so it begins there with what comes from now on: what was published before is never delivered to it (start = latest)")));
    }
    if let Some((OrderPolicy::Strict { baseline: Baseline::FirstSeen, .. }, _)) = settings.order {
        findings.push(finding(
            Level::Fine,
            "order",
            "a strict order begins with the first seq that arrives".to_owned(),
        ));
    }
    if window.is_some() && ledger.settings().identity == IdentityRule::IdAndTime {
        findings.push(finding(Level::Refusal, "window", "a window knows events by their ids alone, and this ledger's identity is id_and_time: it would drop an event that reuses an id in another week; use one or the other".to_owned()));
    }
    if let Some(window) = window {
        findings.extend(window.check(redelivery).await);
    }
    Ok(findings)
}

/// A warning if the loss of one broker can lose records. Silent about a bus that has no replication.
fn replication(topic: &Topic, info: &TopicInfo) -> Option<Finding> {
    let (copies, insync) = info.replication.zip(info.min_insync)?;
    if copies >= 2 && insync >= 2 {
        return None;
    }
    let copies = counted(copies.unsigned_abs().into(), "copy", "copies");
    Some(finding(
        Level::Warning,
        "replication",
        format!(
            "{topic} has {copies}, of which {insync} must have a record before it is acknowledged: the loss of one broker can lose records"
        ),
    ))
}

/// A refusal if a leader may be elected that has not all acknowledged records.
fn elections(topic: &Topic, info: &TopicInfo) -> Option<Finding> {
    info.unclean_election.then(|| {
        let message = format!(
            "{topic} has unclean.leader.election.enable = true: a replica without the latest records may become its leader, \
             and what was acknowledged is lost; set it to false"
        );
        finding(Level::Refusal, "elections", message)
    })
}

/// Whether the group has committed an offset of this topic: it goes on there, wherever a new one
/// begins. Another topic's offsets do not count. Unknown means no: this is only about a warning.
async fn has_begun(bus: &dyn Bus, group: &str, topic: &Topic, partitions: i32) -> bool {
    for number in 0..partitions {
        let partition = Partition { topic: topic.clone(), number };
        if matches!(bus.committed(group, &partition).await, Ok(Some(_))) {
            return true;
        }
    }
    false
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::MemoryLedger;
    use crate::bus::memory::MemoryBus;
    use crate::bus::{BusEvent, Subscription, TopicSettings};
    use crate::id::Scope;

    /// What `check` says of the start.
    async fn said(bus: &MemoryBus, settings: &ConsumerSettings) -> Vec<String> {
        let findings = check(bus, &MemoryLedger::default(), None, settings).await.unwrap();
        findings
            .into_iter()
            .filter(|finding| finding.check == "start")
            .map(|finding| finding.message)
            .collect()
    }

    /// Commits an offset of a topic in the group.
    async fn begin(bus: &MemoryBus, topic: &Topic) {
        let mut member = bus.subscribe(Subscription::new("mailer", [topic.clone()]).unwrap()).await.unwrap();
        let Ok(BusEvent::Assigned(given)) = member.next().await else { panic!("assigned") };
        assert!(member.commit(&[(given[0].clone(), 0)]).await.unwrap()[0].is_ok());
        member.leave().await.unwrap();
    }

    /// Each topic begins for itself: a group that has read one for long still begins another at its end.
    #[tokio::test]
    async fn t75_the_topics_that_begin_at_their_end_are_named() {
        let bus = MemoryBus::default();
        let [orders, returns] = ["orders", "returns"].map(|name| Topic::new(name).unwrap());
        for topic in [&orders, &returns] {
            bus.create_topic(topic, TopicSettings::new(2)).await.unwrap();
        }
        let missing = Topic::new("missing").unwrap();
        let topics = vec![orders.clone(), returns.clone(), missing];
        let mut settings = ConsumerSettings::new(Scope::new("mailer").unwrap(), topics);
        assert!(said(&bus, &settings).await.is_empty(), "only a start at the end skips anything");
        settings.start = Start::Latest;
        let none = said(&bus, &settings).await;
        assert!(none.len() == 1 && none[0].contains("nothing of orders, returns yet"), "{none:?}");
        begin(&bus, &orders).await;
        let one = said(&bus, &settings).await;
        assert!(one.len() == 1 && one[0].contains("nothing of returns yet"), "{one:?}");
        begin(&bus, &returns).await;
        let both = said(&bus, &settings).await;
        assert!(both.is_empty(), "both have begun: {both:?}");
    }

    #[test]
    fn e_a_topic_with_few_copies_is_a_warning_in_words() {
        let topic = Topic::new("orders").unwrap();
        let said = |replication, min_insync| {
            let info = TopicInfo {
                partitions: 1,
                retention: None,
                compacted: false,
                replication,
                min_insync,
                unclean_election: false,
            };
            super::replication(&topic, &info).map(|finding| finding.message)
        };
        assert!(
            said(Some(1), Some(1)).is_some_and(|said| said.starts_with("orders has 1 copy, of which 1 "))
        );
        assert!(
            said(Some(3), Some(1)).is_some_and(|said| said.starts_with("orders has 3 copies, of which 1 "))
        );
        assert_eq!(said(Some(3), Some(2)), None);
        assert_eq!(said(None, None), None);
    }

    #[test]
    fn t456_a_topic_that_elects_unclean_leaders_is_refused_in_words() {
        let info = TopicInfo {
            partitions: 1,
            retention: None,
            compacted: false,
            replication: None,
            min_insync: None,
            unclean_election: true,
        };
        let said = super::elections(&Topic::new("orders").unwrap(), &info).expect("a refusal").message;
        assert!(said.contains("may become its leader, and what was acknowledged is lost"), "{said}");
        assert!(!said.contains("  "), "{said}");
    }
}
