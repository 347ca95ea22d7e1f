//! Held events: due ones return to the pipeline, dead ones are copied to the dead-letter topic.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::claim::ConsumerContext;
use crate::bus::{Received, Record};
use crate::clock::{Clock as _, Time};
use crate::error::{Error, Result};
use crate::event::{Headers, Origin};
use crate::id::Topic;
use crate::ledger::{Due, Entry, Identity, Share, Token};

/// The most entries per look.
const LIMIT: usize = 200;

/// Where a look starts. After a full page of entries that this process can do nothing about comes
/// the next page, and after the last page the first. So however many there are, they do not hide
/// the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    since: Option<Time>,
    /// How many entries with exactly that time were looked at.
    skip: usize,
}

impl Place {
    /// The place after the entries of a look, if the page is full.
    fn behind(entries: &[Entry], share: &Share, limit: usize) -> Self {
        let Some(last) = entries.last().filter(|_| share.is_full(entries, limit)) else {
            return Place::default();
        };
        let before = if share.since == Some(last.at) { share.skip } else { 0 };
        let skip = entries.iter().filter(|entry| entry.at == last.at).count();
        Place { since: Some(last.at), skip: before + skip }
    }
}

/// Finds due events within a share, and where the next page starts. Other members look for theirs.
pub(super) async fn look(
    context: ConsumerContext,
    mut share: Share,
    room: usize,
    place: Place,
) -> Result<(Due, Place)> {
    (share.since, share.skip) = (place.since, place.skip);
    let limit = LIMIT.min(room);
    let due = context.ledger.due(&context.settings.scope, &share, limit).await?;
    let next = Place::behind(&due.entries, &share, limit);
    Ok((due, next))
}

/// A death: the event and its token.
pub(super) type Death = (Identity, Token);

/// Whose dead letters a round copies: those of one topic that could not be copied before, or those
/// of all other topics. So a topic that is unavailable or refuses them does not block the others.
pub(super) type Whose = Option<Topic>;

/// When the next round of copying is due, and where it starts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) at: Instant,
    pub(super) is_under_way: bool,
    pub(super) place: Place,
}

impl Round {
    pub(super) fn new(at: Instant) -> Self {
        Round { at, is_under_way: false, place: Place::default() }
    }
}

/// The result of a round of copying.
pub(super) struct Outlet {
    pub(super) whose: Whose,
    /// Where the next one starts.
    pub(super) next: Place,
    /// The topics of which some dead letters could not be copied.
    pub(super) unwell: BTreeSet<Topic>,
    /// Whether everything that could be copied was.
    pub(super) copied: Result<()>,
    /// Dead letters that the bus accepts in no form. They are skipped for a while, so that they do
    /// not block others.
    pub(super) refused: Vec<Death>,
}

/// Copies dead events to their dead-letter topics, one batch per topic. An event is recorded as
/// dead first, published second and marked as copied third: a crash in between copies it again, and
/// a zombie copies nothing that is not dead. One that cannot be published does not affect the
/// others.
pub(super) async fn copy_dead(
    context: ConsumerContext,
    share: Share,
    whose: Whose,
    place: Place,
    passed_over: Arc<HashSet<Death>>,
) -> Outlet {
    let bytes_max = Some((context.settings.in_flight_bytes_max / 4).max(1));
    let share = Share { since: place.since, skip: place.skip, bytes_max, ..share };
    let mut outlet = Outlet {
        whose,
        next: Place::default(),
        unwell: BTreeSet::new(),
        copied: Ok(()),
        refused: Vec::new(),
    };
    outlet.copied = copy_out(&context, &share, &passed_over, &mut outlet).await;
    outlet
}

async fn copy_out(
    context: &ConsumerContext,
    share: &Share,
    passed_over: &HashSet<Death>,
    outlet: &mut Outlet,
) -> Result<()> {
    let dead = context.ledger.unpublished_dead(&context.settings.scope, share, LIMIT).await?;
    outlet.next = Place::behind(&dead, share, LIMIT);
    let mut by_topic: BTreeMap<Topic, Vec<Entry>> = BTreeMap::new();
    for entry in dead {
        if entry.origin.is_none() && outlet.whose.is_some() {
            continue; // it belongs to no topic
        }
        if passed_over.contains(&death(&entry)) {
            outlet.note(&entry);
            continue;
        }
        let from = entry.origin.as_ref().map(|origin| &origin.topic).or(context.settings.topics.first());
        match from.and_then(|topic| context.settings.dead_topic_of(topic)) {
            Some(topic) => by_topic.entry(topic).or_default().push(entry),
            None => outlet.refuse(&entry),
        }
    }
    let mut failed = None;
    for (topic, entries) in by_topic {
        let whole = publish(context, &topic, entries, dead_record).await?;
        // Usually too large, because the record grew on its way here.
        let (unfit, other): (Vec<_>, Vec<_>) =
            whole.into_iter().partition(|(_, error)| matches!(error, Error::Invalid { .. }));
        let unfit = unfit.into_iter().map(|(entry, _)| entry).collect();
        for (entry, error) in publish(context, &topic, unfit, bare_record).await?.into_iter().chain(other) {
            if error.is_retryable() {
                outlet.note(&entry);
            } else {
                outlet.refuse(&entry);
            }
            failed = Some(error);
        }
    }
    failed.map_or(Ok(()), Err)
}

impl Outlet {
    /// Notes that an entry was not copied.
    fn note(&mut self, entry: &Entry) {
        self.unwell.extend(entry.origin.as_ref().map(|origin| origin.topic.clone()));
    }

    /// Notes that an entry was not copied and should be skipped for a while.
    fn refuse(&mut self, entry: &Entry) {
        self.note(entry);
        self.refused.push(death(entry));
    }
}

fn death(entry: &Entry) -> Death {
    (entry.identity.clone(), entry.token)
}

/// Publishes entries and marks the acknowledged ones as copied. Returns the others, each with its
/// error.
async fn publish(
    context: &ConsumerContext,
    topic: &Topic,
    entries: Vec<Entry>,
    record: impl Fn(&ConsumerContext, &Entry) -> Record,
) -> Result<Vec<(Entry, Error)>> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    let records: Vec<_> = entries.iter().map(|entry| record(context, entry)).collect();
    let answers = match context.bus.publish(topic, &records).await {
        Ok(answers) => answers,
        // The whole call failed, so the same error applies to each.
        Err(error) => {
            let answer = |_| match &error {
                Error::Invalid { .. } => Err(Error::Corrupt(error.chain())), // the topic's, not a record's
                error if error.is_retryable() => {
                    Err(Error::Unavailable { what: error.chain(), source: None })
                }
                error => Err(Error::Refused { what: error.chain(), source: None }),
            };
            entries.iter().map(answer).collect()
        }
    };
    crate::crash_point!("consumer.dead-published");
    let mut copied = Vec::new();
    let mut uncopied = Vec::new();
    for (entry, answer) in entries.into_iter().zip(answers) {
        match answer {
            Ok(_) => copied.push((entry.identity, entry.week, entry.row.token)),
            Err(error) => uncopied.push((entry, error)),
        }
    }
    if !copied.is_empty() {
        context.ledger.mark_dead_published(&copied).await?;
    }
    Ok(uncopied)
}

/// A reduced copy of a dead event that the topic does not accept in full: why it died, and where
/// the rest is.
fn bare_record(context: &ConsumerContext, entry: &Entry) -> Record {
    let whole = dead_record(context, entry);
    let body = entry.body.clone().unwrap_or_default();
    let bytes: usize = body.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    let left_out = format!(
        "payload ({} bytes), headers ({bytes} bytes); the ledger has them",
        body.payload.as_ref().map_or(0, Bytes::len)
    );
    let told = whole.headers.iter().filter(|(name, _)| name.starts_with("hapax-dead-"));
    let short = |value: &[u8]| Bytes::copy_from_slice(&value[..value.len().min(BARE_BYTES_MAX)]);
    let mut headers: Vec<_> = told.map(|(name, value)| (name.to_owned(), short(value))).collect();
    headers.push(("hapax-dead-id".to_owned(), entry.identity.id.as_str().into_owned().into()));
    headers.push(("hapax-dead-left-out".to_owned(), left_out.into()));
    Record {
        key: whole.key.filter(|key| key.len() <= BARE_BYTES_MAX),
        payload: Some(Bytes::new()), // `None` would make it a tombstone
        headers: headers.into_iter().collect::<Headers>(),
        timestamp: whole.timestamp,
    }
}

/// How much of a key or header a reduced copy keeps.
const BARE_BYTES_MAX: usize = 512;

/// The copy of a dead event: its own bytes, key and headers, and why it died.
fn dead_record(context: &ConsumerContext, entry: &Entry) -> Record {
    let body = entry.body.clone().unwrap_or_default();
    let mut headers: Vec<(String, Bytes)> =
        body.headers.iter().map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value))).collect();
    let reason = entry.reason.as_deref().unwrap_or("unknown").to_owned();
    let mut add = |name: &str, value: String| headers.push((format!("hapax-dead-{name}"), value.into()));
    add("reason", reason);
    add("code", if entry.attempts == 0 { "refused" } else { "failed" }.to_owned());
    add("attempts", entry.attempts.to_string());
    add("first-at", entry.first_at.to_string());
    add("last-at", entry.at.to_string());
    add("scope", context.settings.scope.as_str().to_owned());
    if let Some(origin) = &entry.origin {
        add("topic", origin.topic.as_str().to_owned());
        add("partition", origin.partition.to_string());
        add("offset", origin.offset.to_string());
    }
    Record {
        key: body.key,
        payload: body.payload,
        headers: headers.into_iter().collect::<Headers>(),
        timestamp: body.timestamp,
    }
}

/// The copy of a record that could not be claimed because the ledger is unavailable. Its times come
/// from this process, the only one that knows of it.
pub(super) fn unclaimed_record(context: &ConsumerContext, received: &Received, reason: &str) -> Record {
    let mut headers: Vec<(String, Bytes)> = received
        .record
        .headers
        .iter()
        .map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value)))
        .collect();
    let now = crate::clock::SystemClock.now().to_string();
    for (name, value) in [
        ("reason", reason.to_owned()),
        ("code", "unavailable".to_owned()),
        ("attempts", "0".to_owned()),
        ("first-at", now.clone()),
        ("last-at", now),
        ("scope", context.settings.scope.as_str().to_owned()),
        ("topic", received.origin.topic.as_str().to_owned()),
        ("partition", received.origin.partition.to_string()),
        ("offset", received.origin.offset.to_string()),
    ] {
        headers.push((format!("hapax-dead-{name}"), value.into()));
    }
    Record { headers: headers.into_iter().collect(), ..received.record.clone() }
}

/// The record that a held entry was made from.
pub(super) fn received(entry: &Entry, fallback: &Topic) -> Option<Received> {
    let body = entry.body.clone()?;
    let origin = entry.origin.clone().unwrap_or_else(|| Origin::new(fallback.clone(), 0, -1));
    let record =
        Record { key: body.key, payload: body.payload, headers: body.headers, timestamp: body.timestamp };
    Some(Received::new(record, origin))
}
