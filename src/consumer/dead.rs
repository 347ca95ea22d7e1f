//! The dead-letter outlet: copies dead events from the ledger to their dead-letter topics.
//!
//! An event is recorded as dead first, published second and marked as published third: a crash in
//! between copies it again, and a zombie copies nothing that is not dead. A member reserves what it
//! copies, so that a group copies each once: it publishes to all topics at the same time, begins
//! nothing once the reservation is over, marks what is published until the ledger has it, and ends
//! that before it stops. Whatever could not be copied stays reserved for a while, comes last
//! afterwards, and so hides no other.
//!
//! A reservation can end while its member still waits for the bus or cannot reach the ledger. The
//! member therefore remembers what it has under way and does not begin that again. Another member
//! may: only a reservation that outlasts the outage keeps it from copying such a letter once more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::claim::ConsumerContext;
use super::pipeline::task_failed;
use crate::bus::{Received, Record};
use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, Result};
use crate::event::Headers;
use crate::id::Topic;
use crate::ledger::{Entry, HeldQuery, PublishedDead};

/// The most dead letters per batch.
const LIMIT: usize = 200;
/// How many batches may be under way, so that a topic that does not answer delays the others little.
const BATCHES_MAX: usize = 4;
/// The pauses while the ledger cannot be told what was published: from the first to the longest.
const MARK_PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// The dead letters that this member has reserved and not yet marked or given up. It is locked while
/// the ledger is asked for more: an answer from before a mark is never compared with the set after it.
type UnderWay = Arc<Mutex<BTreeSet<PublishedDead>>>;

/// How a copy ended. If a task panicked, the consumer ends: that letter is copied by whoever is next.
type Copied = std::result::Result<Result<()>, JoinError>;

/// Copies dead letters, separately from everything else, since the bus may be unavailable while the
/// ledger is not.
pub(super) struct DeadLetterOutlet {
    context: ConsumerContext,
    next: Instant,
    copying: JoinSet<Copied>,
    under_way: UnderWay,
    /// Set while some dead letters could not be copied: when all of those were tried again.
    failing_until: Option<Instant>,
}

impl DeadLetterOutlet {
    pub(super) fn new(context: ConsumerContext) -> Self {
        DeadLetterOutlet {
            context,
            next: Instant::now(),
            copying: JoinSet::new(),
            under_way: UnderWay::default(),
            failing_until: None,
        }
    }

    pub(super) fn next_wake(&self) -> Instant {
        self.next
    }

    /// Starts to copy the next batch, if it is time.
    pub(super) fn start(&mut self, now: Instant) {
        let settings = &self.context.settings;
        if now < self.next || settings.dead_topic.as_deref() == Some("") {
            return;
        }
        self.next = now + settings.held_interval;
        if self.copying.len() < BATCHES_MAX {
            self.copying.spawn(copy(self.context.clone(), Arc::clone(&self.under_way)));
        }
    }

    /// The result of the next batch that ends, or `None` if none is under way.
    pub(super) async fn copied(&mut self) -> Option<Copied> {
        self.copying.join_next().await.map(std::result::Result::flatten)
    }

    /// Waits until all batches that are under way have ended. Notes an error if one panicked.
    pub(super) async fn finish(&mut self, finished: &mut Result<()>) {
        while let Some(copied) = self.copied().await {
            if let Err(panic) = copied
                && finished.is_ok()
            {
                *finished = Err(task_failed(panic));
            }
        }
    }

    /// Logs once that dead letters cannot be copied, and once that all of them can again.
    pub(super) fn on_copied(&mut self, copied: Copied) -> Result<()> {
        let now = Instant::now();
        match copied.map_err(task_failed)? {
            Err(error) => {
                if self.failing_until.is_none() {
                    tracing::warn!(target: "hapax", error = %error.chain(), "copying dead letters failed; they stay in the ledger; retrying");
                }
                self.failing_until = Some(now + 2 * self.context.settings.dead_reserve);
            }
            Ok(()) if self.failing_until.is_some_and(|until| now >= until) => {
                self.failing_until = None;
                tracing::info!(target: "hapax", "dead letters are copied again");
            }
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Copies a batch of dead events, one publish per topic, all topics at the same time: one that does
/// not answer would use up the time for which the others' letters are reserved. One that cannot be
/// published does not affect the others, and neither does one whose task panics: a copy that is cut
/// off may have been published, and is not marked. Returns an error if some could not.
async fn copy(context: ConsumerContext, under_way: UnderWay) -> Copied {
    let (mut topics, mut failed) = match start(&context, &under_way).await {
        Ok(started) => started,
        Err(error) => return Ok(Err(error)),
    };
    let mut panicked = None;
    while let Some(copied) = topics.join_next().await {
        match copied {
            Ok(copied) => failed = copied.err().or(failed),
            Err(panic) => {
                // Said at once: whoever stops does not wait for a topic that does not answer.
                tracing::error!(target: "hapax", error = %panic, "copying dead letters panicked; the consumer ends");
                panicked = Some(panic);
            }
        }
    }
    match panicked {
        Some(panic) => Err(panic),
        None => Ok(failed.map_or(Ok(()), Err)),
    }
}

/// Reserves a batch and starts to copy it, with a task per topic. Also returns an error if some of it
/// has no topic.
async fn start(
    context: &ConsumerContext,
    under_way: &UnderWay,
) -> Result<(JoinSet<Result<()>>, Option<Error>)> {
    let settings = &context.settings;
    let mut busy = under_way.lock().await;
    // Taken before the ledger is asked: its reservation begins later, so it ends later than ours.
    let reserved_until = Instant::now() + settings.dead_reserve;
    let mut failed = None;
    let mut by_topic: BTreeMap<Topic, Vec<Entry>> = BTreeMap::new();
    for entry in reserve(context).await? {
        if busy.contains(&key(&entry)) && !crate::crash_point::mutant!("copy what is under way") {
            continue;
        }
        let from = entry.origin.as_ref().map(|origin| &origin.topic).or(settings.topics.first());
        match from.and_then(|topic| settings.dead_topic_of(topic)) {
            Some(topic) => {
                busy.insert(key(&entry));
                by_topic.entry(topic).or_default().push(entry);
            }
            None => failed = Some(Error::Config("dead letters have no topic to be copied to".into())),
        }
    }
    drop(busy);
    let mut topics = JoinSet::new();
    for (topic, entries) in by_topic {
        let (context, under_way) = (context.clone(), Arc::clone(under_way));
        topics.spawn(async move {
            let keys: Vec<_> = entries.iter().map(key).collect();
            let copied = copy_to(context, topic, entries, reserved_until).await;
            let mut busy = under_way.lock().await;
            for key in &keys {
                busy.remove(key);
            }
            copied
        });
    }
    Ok((topics, failed))
}

/// Reserves the next dead events.
async fn reserve(context: &ConsumerContext) -> Result<Vec<Entry>> {
    let settings = &context.settings;
    let query = HeldQuery {
        topics: Some(settings.topics.iter().cloned().collect()),
        bytes_max: Some((settings.in_flight_bytes_max / (4 * BATCHES_MAX)).max(1)),
    };
    context.ledger.unpublished_dead(&settings.scope, &query, LIMIT, Some(settings.dead_reserve)).await
}

/// What names a dead letter: redriven and dead again, it is another.
fn key(entry: &Entry) -> PublishedDead {
    (entry.identity.clone(), entry.week, entry.row.token)
}

/// Copies dead events to one topic.
async fn copy_to(
    context: ConsumerContext,
    topic: Topic,
    entries: Vec<Entry>,
    reserved_until: Instant,
) -> Result<()> {
    let whole = publish(&context, &topic, entries, dead_record, reserved_until).await?;
    // Usually too large, because the record grew on its way here.
    let (unfit, other): (Vec<_>, Vec<_>) =
        whole.into_iter().partition(|(_, error)| matches!(error, Error::Invalid { .. }));
    let unfit = unfit.into_iter().map(|(entry, _)| entry).collect();
    let bare = publish(&context, &topic, unfit, bare_record, reserved_until).await?;
    bare.into_iter().chain(other).next().map_or(Ok(()), |(_, error)| Err(error))
}

/// Publishes entries and marks the acknowledged ones as copied. Returns the others, each with its
/// error.
async fn publish(
    context: &ConsumerContext,
    topic: &Topic,
    entries: Vec<Entry>,
    record: impl Fn(&ConsumerContext, &Entry) -> Record,
    reserved_until: Instant,
) -> Result<Vec<(Entry, Error)>> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    if Instant::now() >= reserved_until {
        // Another member may be copying them by now.
        let what = "copying dead letters: it took longer than dead_reserve until they could be published";
        return Err(Error::Contended { what: what.into(), source: None });
    }
    let records: Vec<_> = entries.iter().map(|entry| record(context, entry)).collect();
    if crate::crash_point::mutant!("dead letter marked before published") {
        mark(context, &entries.iter().map(key).collect::<Vec<_>>()).await?;
    }
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
            Ok(_) => copied.push(key(&entry)),
            Err(error) => uncopied.push((entry, error)),
        }
    }
    mark(context, &copied).await?;
    Ok(uncopied)
}

/// Marks dead events as copied. While the ledger is away it is told again: an unmarked one would be
/// copied once more.
async fn mark(context: &ConsumerContext, copied: &[PublishedDead]) -> Result<()> {
    let (mut pause, longest) = MARK_PAUSES;
    while !copied.is_empty() {
        match context.ledger.mark_dead_published(copied).await {
            Err(error) if error.is_retryable() => {
                tracing::debug!(target: "hapax", error = %error.chain(), "copied dead letters cannot be marked; retrying");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
            answer => return answer,
        }
    }
    Ok(())
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
    let about = whole.headers.iter().filter(|(name, _)| name.starts_with("hapax-dead-"));
    let short = |value: &[u8]| Bytes::copy_from_slice(&value[..value.len().min(BARE_BYTES_MAX)]);
    let mut headers: Vec<_> = about.map(|(name, value)| (name.to_owned(), short(value))).collect();
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
    let now = SystemClock.now().to_string();
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
