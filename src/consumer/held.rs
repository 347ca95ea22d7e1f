//! What waits in the ledger: due events come back into the pipeline, dead ones are copied to the dead-letter topic.

use bytes::Bytes;

use super::claim::Desk;
use crate::bus::{Received, Record};
use crate::clock::Clock as _;
use crate::error::Result;
use crate::event::{Headers, Origin};
use crate::id::Topic;
use crate::ledger::{Due, Entry};

/// How many entries one look takes.
const LIMIT: usize = 200;

/// What one look came to: what is due, and whether all dead letters were copied. Neither waits for the other to succeed.
pub(super) struct Looked {
    pub(super) due: Result<Due>,
    pub(super) copied: Result<()>,
}

/// One look: copies dead letters, and says what is due.
pub(super) async fn look(desk: Desk, room: usize) -> Looked {
    let due = desk.ledger.due(&desk.settings.scope, LIMIT.min(room)).await;
    Looked { due, copied: copy_dead(&desk).await }
}

/// Copies dead events to their dead-letter topic. Each is marked dead first, published second, and noted as copied third: a crash
/// in between copies it again, a zombie copies nothing that is not dead. One that cannot be published harms no other.
async fn copy_dead(desk: &Desk) -> Result<()> {
    if desk.settings.dead_topic.as_deref() == Some("") {
        return Ok(());
    }
    let mut failed = None;
    let mut copied = Vec::new();
    for entry in &desk.ledger.outlet(&desk.settings.scope, LIMIT).await? {
        let from = entry.origin.as_ref().map(|origin| &origin.topic).or(desk.settings.topics.first());
        let Some(topic) = from.and_then(|topic| desk.settings.dead_topic_of(topic)) else { continue };
        match desk.bus.publish(&topic, &[dead_record(desk, entry)]).await.map(|mut answers| answers.pop()) {
            Ok(Some(Ok(_))) => copied.push((entry.identity.clone(), entry.week, entry.token)),
            Ok(Some(Err(error))) | Err(error) => failed = Some(error),
            Ok(None) => {}
        }
        crate::crash_point!("consumer.dead-published");
    }
    if !copied.is_empty() {
        desk.ledger.copied(&copied).await?;
    }
    failed.map_or(Ok(()), Err)
}

/// The copy of a dead event: its own bytes, key and headers, and what is known of its end.
fn dead_record(desk: &Desk, entry: &Entry) -> Record {
    let body = entry.body.clone().unwrap_or_default();
    let mut headers: Vec<(String, Bytes)> =
        body.headers.iter().map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value))).collect();
    let reason = entry.note.as_deref().unwrap_or("unknown").to_owned();
    let mut add = |name: &str, value: String| headers.push((format!("hapax-dead-{name}"), value.into()));
    add("reason", reason);
    add("code", if entry.attempts == 0 { "refused" } else { "failed" }.to_owned());
    add("attempts", entry.attempts.to_string());
    add("first-at", entry.first_at.to_string());
    add("last-at", entry.at.to_string());
    add("scope", desk.settings.scope.as_str().to_owned());
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

/// A copy of a record that could not even be claimed, because the ledger is away. Its times are those of this process, which
/// is the only one that knows of it.
pub(super) fn unclaimed_record(desk: &Desk, received: &Received, reason: &str) -> Record {
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
        ("scope", desk.settings.scope.as_str().to_owned()),
        ("topic", received.origin.topic.as_str().to_owned()),
        ("partition", received.origin.partition.to_string()),
        ("offset", received.origin.offset.to_string()),
    ] {
        headers.push((format!("hapax-dead-{name}"), value.into()));
    }
    Record { headers: headers.into_iter().collect(), ..received.record.clone() }
}

/// The record that a held entry was made of.
pub(super) fn received(entry: &Entry, fallback: &Topic) -> Option<Received> {
    let body = entry.body.clone()?;
    let origin = entry.origin.clone().unwrap_or_else(|| Origin::new(fallback.clone(), 0, -1));
    let record =
        Record { key: body.key, payload: body.payload, headers: body.headers, timestamp: body.timestamp };
    Some(Received { record, origin })
}
