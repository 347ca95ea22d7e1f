//! What audit rows say of an erasure, and what follows from that: whether each topic has let go of everything that was
//! published before.
//!
//! A row `erase.begin` is written before anything is changed, and `erase.pass` after a pass. If a pass ended with
//! everything published, its row has the end of each partition of each topic. Once each partition begins at or after
//! that end, nothing from before the pass can be read again. Offsets decide, not times: a broker may keep records for
//! longer than the retention says.

use std::collections::BTreeSet;

use hapax::access::{Access, Actor, AuditNote, ListAudit};
use hapax::bus::{Bus, Partition};
use hapax::erase::Subject;
use hapax::{Scope, Time, Topic};

use super::work::{Counts, Settled};
use crate::failure::Failure;

const BEGIN: &str = "erase.begin";
const PASS: &str = "erase.pass";
const GONE: &str = "erase.gone";
const ENDS: &str = "ends of ";
/// The longest lists of ends that fit into a row.
const ENDS_CHARS_MAX: usize = 3500;

/// How far an erasure is.
#[derive(Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing of it is left in what hapax keeps, and nothing can bring it back.
    Gone,
    /// This topic still has it; others may too.
    InTopic(Topic),
    /// The relay or the read model has not passed the deletions.
    OnItsWay,
    /// A second read model, or a second index of a projection, is being filled, or was left behind.
    Rebuilding(String),
    /// Projections of these scopes were not opened.
    NotOpened(Vec<Scope>),
    /// Something is still there.
    Left,
}

impl State {
    /// For programs.
    pub fn word(&self) -> &'static str {
        match self {
            State::Gone => "gone",
            State::InTopic(_) => "in-topic",
            State::OnItsWay | State::Rebuilding(_) => "on-its-way",
            State::NotOpened(_) => "not-opened",
            State::Left => "left",
        }
    }

    /// For people.
    pub fn sentence(&self) -> String {
        match self {
            State::Gone => "It is physically gone from everything that hapax keeps".to_owned(),
            State::InTopic(topic) => format!(
                "Topic {topic} still has it: run the same command again after the topic's retention, which looks once more"
            ),
            State::OnItsWay => {
                "The relay or the read model has not passed the deletions yet: run the same command again \
                                when they have"
                    .to_owned()
            }
            State::Rebuilding(which) => format!(
                "A rebuild may still have it ({which}): run the same command again when no rebuild runs and none was left behind"
            ),
            State::NotOpened(scopes) => {
                let scopes: Vec<&str> = scopes.iter().map(Scope::as_str).collect();
                format!(
                    "A projection that was not opened may still have it ({}): run the same command again with --projection URL, or \
                     with --ended SCOPE if there is no such projection any more",
                    scopes.join(", ")
                )
            }
            State::Left => "It is not all gone: run the same command again".to_owned(),
        }
    }
}

/// The audit rows of one subject.
pub struct Trail<'t> {
    access: &'t dyn Access,
    target: String,
    actor: Actor,
}

impl<'t> Trail<'t> {
    pub fn new(access: &'t dyn Access, subject: &Subject, by: &str, reason: &str) -> Self {
        let reason = if reason.trim().is_empty() { "hapax erase" } else { reason };
        Trail { access, target: subject.to_string(), actor: Actor::new(by, reason) }
    }

    async fn note(&self, action: &str, details: &str) -> Result<(), Failure> {
        Ok(self.access.note(&AuditNote::new(&self.actor, action, &self.target).details(details)).await?)
    }

    /// Before anything is changed.
    pub async fn begin(&self, before: &Counts) -> Result<(), Failure> {
        self.note(BEGIN, &text(before)).await
    }

    /// After a pass.
    pub async fn end(
        &self,
        erased: &Counts,
        left: &Counts,
        settled: &Settled,
        topics: &[(Topic, Vec<(i64, i64)>)],
        unopened: &[Scope],
    ) -> Result<State, Failure> {
        let mut details = text(erased);
        let state = if left.total() > 0 {
            State::Left
        } else {
            match settled {
                Settled::Passing => State::OnItsWay,
                Settled::Rebuilding(which) => State::Rebuilding(which.clone()),
                Settled::Yes => {
                    let mut has_it = None;
                    for (topic, ranges) in topics {
                        if !self.is_removed(topic, ranges).await? {
                            details.push_str(&ends_text(topic, ranges, topics.len()));
                            has_it = has_it.or_else(|| Some(topic.clone()));
                        }
                    }
                    match has_it {
                        Some(topic) => State::InTopic(topic),
                        None if unopened.is_empty() => State::Gone,
                        None => State::NotOpened(unopened.to_vec()),
                    }
                }
            }
        };
        self.note(PASS, &details).await?;
        if state == State::Gone {
            self.note(GONE, "").await?;
        }
        Ok(state)
    }

    /// Whether the topic has removed everything from before some pass that nothing was found after.
    async fn is_removed(&self, topic: &Topic, ranges: &[(i64, i64)]) -> Result<bool, Failure> {
        let mut which = ListAudit { action: Some("erase.".to_owned()), limit: 1000, ..ListAudit::default() };
        loop {
            let rows = self.access.audit(&which).await?;
            let Some(last) = rows.last() else { return Ok(false) };
            which.before = Some(last.number);
            for row in rows.iter().filter(|row| row.target == self.target) {
                if row.action == BEGIN {
                    return Ok(false);
                }
                let ends = ends_of(topic, &row.details);
                let passed = |ends: Vec<i64>| {
                    ends.len() == ranges.len()
                        && ends.iter().zip(ranges).all(|(end, (oldest, _))| oldest >= end)
                };
                if row.action == PASS && ends.is_some_and(passed) {
                    return Ok(true);
                }
            }
        }
    }
}

/// What was erased and is not gone yet, and when its last run was, newest first: the same command is to be run again.
pub async fn waiting(access: &dyn Access) -> Result<Vec<(String, Time)>, Failure> {
    let mut which = ListAudit { action: Some("erase.".to_owned()), limit: 1000, ..ListAudit::default() };
    let (mut known, mut waiting) = (BTreeSet::new(), Vec::new());
    loop {
        let rows = access.audit(&which).await?;
        let Some(last) = rows.last() else { return Ok(waiting) };
        which.before = Some(last.number);
        for row in rows {
            // The newest row of a subject decides.
            if known.insert(row.target.clone()) && row.action != GONE {
                waiting.push((row.target, row.at));
            }
        }
    }
}

/// The oldest offset and the end of each partition.
pub async fn ranges(bus: &dyn Bus, topic: &Topic) -> Result<Vec<(i64, i64)>, Failure> {
    let partitions = bus.topic(topic).await?.map_or(0, |info| info.partitions);
    let mut ranges = Vec::new();
    for number in 0..partitions {
        ranges.push(bus.range(&Partition { topic: topic.clone(), number }).await?);
    }
    Ok(ranges)
}

fn text(counts: &Counts) -> String {
    let parts: Vec<String> = counts
        .0
        .iter()
        .filter(|(_, rows)| *rows > 0)
        .map(|(place, rows)| format!("{place}: {rows}"))
        .collect();
    if parts.is_empty() { "nothing was left".to_owned() } else { parts.join(", ") }
}

/// Of so many lists in one row.
fn ends_text(topic: &Topic, ranges: &[(i64, i64)], lists: usize) -> String {
    let ends: Vec<String> = ranges.iter().map(|(_, end)| end.to_string()).collect();
    let text = format!("; {ENDS}{topic} {}", ends.join(","));
    if text.len() > ENDS_CHARS_MAX / lists.max(1) { String::new() } else { text }
}

fn ends_of(topic: &Topic, details: &str) -> Option<Vec<i64>> {
    let (_, ends) = details.split_once(&format!("; {ENDS}{topic} "))?;
    let ends = ends.split_once(';').map_or(ends, |(ends, _)| ends);
    ends.split(',').map(|end| end.parse().ok()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use hapax::access::MemoryAccess;

    use super::*;

    #[test]
    fn ends_are_read_as_they_were_written() {
        let topic = Topic::new("records").unwrap();
        let second = Topic::new("second").unwrap();
        let mut details = format!("journal events: 3{}", ends_text(&topic, &[(0, 7), (2, 9)], 2));
        details.push_str(&ends_text(&second, &[(0, 4)], 2));
        assert_eq!(ends_of(&topic, &details), Some(vec![7, 9]));
        assert_eq!(ends_of(&second, &details), Some(vec![4]));
        assert_eq!(ends_of(&Topic::new("others").unwrap(), &details), None);
        assert_eq!(ends_text(&topic, &vec![(0, i64::MAX); 1000], 1), "");
    }

    /// Gone is said when the topic begins after the end that an earlier pass has seen, and not before.
    #[tokio::test]
    async fn only_a_topic_that_has_removed_everything_lets_it_be_gone() {
        let access = MemoryAccess::default();
        let topic = Topic::new("records").unwrap();
        let subject = Subject::tenant(hapax::Tenant::new("t").unwrap());
        let trail = Trail::new(&access, &subject, "me", "");
        let (some, none) = (Counts(vec![("journal events".into(), 3)]), Counts::default());
        let end = async |found: &Counts, ranges: [(i64, i64); 2]| {
            trail.end(found, &none, &Settled::Yes, &[(topic.clone(), ranges.to_vec())], &[]).await.unwrap()
        };
        let in_topic = || State::InTopic(topic.clone());
        trail.begin(&some).await.unwrap();
        assert_eq!(end(&some, [(0, 2), (0, 2)]).await, in_topic());
        assert_eq!(end(&none, [(2, 5), (0, 2)]).await, in_topic(), "one partition still has it");
        // Something was found again: what was published until now counts.
        trail.begin(&some).await.unwrap();
        assert_eq!(end(&some, [(2, 5), (2, 3)]).await, in_topic());
        assert_eq!(end(&none, [(4, 9), (3, 3)]).await, in_topic());
        assert_eq!(end(&none, [(5, 9), (3, 3)]).await, State::Gone);
        // Another subject has passed nothing.
        let other = Subject::tenant(hapax::Tenant::new("u").unwrap());
        let other = Trail::new(&access, &other, "me", "");
        let topics = [(topic.clone(), vec![(5, 9), (3, 3)])];
        assert_eq!(other.end(&none, &none, &Settled::Yes, &topics, &[]).await.unwrap(), in_topic());
        assert_eq!(trail.end(&none, &none, &Settled::Passing, &[], &[]).await.unwrap(), State::OnItsWay);
        let rebuild = Settled::Rebuilding("table x".to_owned());
        let told = trail.end(&none, &none, &rebuild, &[], &[]).await.unwrap();
        assert_eq!((told.word(), told), ("on-its-way", State::Rebuilding("table x".to_owned())));
        assert_eq!(trail.end(&none, &some, &Settled::Yes, &[], &[]).await.unwrap(), State::Left);
    }

    /// What waits for another run is listed until it is gone, and again if something more is erased.
    #[tokio::test]
    async fn what_is_not_gone_is_listed() {
        let access = MemoryAccess::default();
        let none = Counts::default();
        let listed = async || -> Vec<String> {
            waiting(&access).await.unwrap().into_iter().map(|(target, _)| target).collect()
        };
        let subject = |name: &str| Subject::tenant(hapax::Tenant::new(name).unwrap());
        let (one, other) = (subject("one"), subject("other"));
        let (one, other) = (Trail::new(&access, &one, "me", ""), Trail::new(&access, &other, "me", ""));
        assert!(listed().await.is_empty());
        one.begin(&none).await.unwrap();
        other.begin(&none).await.unwrap();
        assert_eq!(listed().await, ["tenant other", "tenant one"], "also one that was killed");
        one.end(&none, &none, &Settled::Passing, &[], &[]).await.unwrap();
        other.end(&none, &none, &Settled::Yes, &[], &[]).await.unwrap();
        assert_eq!(listed().await, ["tenant one"]);
        one.end(&none, &none, &Settled::Yes, &[], &[]).await.unwrap();
        assert!(listed().await.is_empty());
        other.begin(&none).await.unwrap();
        assert_eq!(listed().await, ["tenant other"], "erased once more");
    }

    /// Of two topics both must have let go, each at its own time; the first that has not is named.
    #[tokio::test]
    async fn every_topic_must_have_removed_it() {
        let access = MemoryAccess::default();
        let [first, second] = ["first", "second"].map(|name| Topic::new(name).unwrap());
        let subject = Subject::tenant(hapax::Tenant::new("t").unwrap());
        let trail = Trail::new(&access, &subject, "me", "");
        let none = Counts::default();
        let end = async |one: (i64, i64), other: (i64, i64)| {
            let topics = [(first.clone(), vec![one]), (second.clone(), vec![other])];
            trail.end(&none, &none, &Settled::Yes, &topics, &[]).await.unwrap()
        };
        trail.begin(&none).await.unwrap();
        assert_eq!(end((0, 5), (0, 7)).await, State::InTopic(first.clone()));
        assert_eq!(end((5, 9), (0, 8)).await, State::InTopic(second.clone()));
        assert_eq!(end((5, 9), (6, 9)).await, State::InTopic(second.clone()));
        assert_eq!(end((5, 9), (7, 9)).await, State::Gone);
    }
}
