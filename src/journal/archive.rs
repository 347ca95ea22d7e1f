//! Moves published events out of a journal into an object store.
//!
//! The archive follows the journal as a relay does, under a name of its own: it takes leadership,
//! reads from its checkpoint, writes a file, saves the checkpoint, and only then sweeps. A sweep
//! removes only events that every relay has passed, so no event is removed before it is in a file.
//! A file is named after its first event (its position and the time of its append) and created
//! once. If a run is killed before it saved its checkpoint, the next run finds the file, compares
//! it with the journal, and continues after the events that both have. No event is in two files,
//! unless an operator rewinds the archive's relay.
//!
//! A journal that was put back (a restore, a fail-over that lost its last commits) assigns
//! positions again, and files of the lost timeline may lie ahead of the checkpoint. Their events
//! are not in the journal, so they do not prevent anything from being archived. They stay in place:
//! two files may then begin at the same position and differ in the time.
//!
//! Each line of a file is an event in JSON: position, tenant, aggregate, seq, when it was appended,
//! id, fingerprint, time, kind, payload, headers, trace. Bytes that are not UTF-8 appear as
//! `{"base64": "…"}`.

use std::collections::VecDeque;
use std::time::Duration;

use super::record::StoredRecord;
use super::{Checkpoint, Journal, JournalSweep, Leadership, PAGE_BYTES_MAX, Position, Stored, swept_up_to};
use crate::backend::object::{Objects, must_keep_a_journal};
use crate::crash_point;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::ledger::Token;

/// How many events to read at a time when comparing with a file.
const PAGE: usize = 1000;

/// Which events are archived, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveSettings {
    /// Only events appended longer ago than this, by the journal's clock.
    pub older_than: Duration,
    /// The maximum number of events in one file.
    pub file_events_max: usize,
    /// The maximum number of bytes in one file, counting the event that reaches it. Archiving holds
    /// this much in memory, plus a page of the journal.
    pub file_bytes_max: usize,
    /// The relay name under which the archive follows the journal.
    pub relay: RelayName,
    /// The name of this process, for humans.
    pub owner: Owner,
    /// The lease of the leadership; every file renews it.
    pub lease: Duration,
    /// Whether to remove archived events from the journal.
    pub sweep: bool,
}

impl ArchiveSettings {
    /// Archives events older than this, 10,000 events or 16 MiB to a file, and removes them
    /// afterwards.
    pub fn new(older_than: Duration, owner: Owner) -> Result<Self> {
        Ok(ArchiveSettings {
            older_than,
            file_events_max: 10_000,
            file_bytes_max: PAGE_BYTES_MAX,
            relay: RelayName::new("archive")?,
            owner,
            lease: Duration::from_secs(60),
            sweep: true,
        })
    }
}

/// The result of an archiving run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Archived {
    /// Files written by this run.
    pub files: u64,
    /// Events in them.
    pub events: u64,
    /// Events removed from the journal.
    pub swept: u64,
}

/// Archives the events that every other relay has published and that are old enough. Any number of
/// processes may run it at any time; only one at a time does the work. `Fenced`: another process
/// has taken over; files written so far remain valid. `Refused`: the store lacks a required
/// capability.
pub async fn archive(
    journal: &dyn Journal,
    store: &dyn Objects,
    settings: &ArchiveSettings,
) -> Result<Archived> {
    must_keep_a_journal(store).await?;
    let mut archived = Archived::default();
    let (token, mut checkpoint) =
        match journal.acquire_leadership(&settings.relay, &settings.owner, settings.lease).await? {
            Leadership::Acquired { token, checkpoint } => (token, checkpoint),
            Leadership::Taken { by, until } => {
                let what = format!("{by} is archiving this journal (until {until})");
                return Err(Error::Contended { what, source: None });
            }
        };
    let done = fill(journal, store, settings, token, &mut checkpoint, &mut archived).await;
    let given_up = journal.release_leadership(&settings.relay, token).await;
    done?;
    given_up?;
    if settings.sweep {
        let sweep = JournalSweep::new(settings.older_than);
        loop {
            let swept = journal.sweep(&sweep).await?;
            archived.swept += swept;
            if swept == 0 {
                break;
            }
        }
    }
    Ok(archived)
}

async fn fill(
    journal: &dyn Journal,
    store: &dyn Objects,
    settings: &ArchiveSettings,
    token: Token,
    checkpoint: &mut Checkpoint,
    archived: &mut Archived,
) -> Result<()> {
    continue_behind(journal, store, settings, token, checkpoint).await?;
    let others: Vec<_> =
        journal.relays().await?.into_iter().filter(|relay| relay.relay != settings.relay).collect();
    let Some(up_to) = swept_up_to(&others) else { return Ok(()) }; // no relay publishes
    let cutoff = journal.now().await?.minus(settings.older_than);
    let is_ripe = |stored: &Stored| stored.at < cutoff && stored.position <= up_to;
    loop {
        let mut file = File::default();
        file.fill(journal, settings, &checkpoint.position, &is_ripe).await?;
        let (Some(name), Some(last)) = (file.name, file.last) else { return Ok(()) };
        if store.create(&name, file.lines.into()).await? {
            archived.files += 1;
            archived.events += file.events as u64;
        } else {
            // A former leader wrote it.
            let before = checkpoint.position.clone();
            continue_behind(journal, store, settings, token, checkpoint).await?;
            if checkpoint.position == before {
                return Err(Error::Corrupt(format!(
                    "{name} does not begin with the event that it is named by"
                )));
            }
            continue;
        }
        crash_point!("archive.written");
        save(journal, settings, token, checkpoint, last).await?;
        crash_point!("archive.saved");
    }
}

/// A file being built.
#[derive(Default)]
struct File {
    lines: Vec<u8>,
    events: usize,
    name: Option<String>,
    last: Option<Position>,
}

impl File {
    /// Adds the events after a position, a page at a time, until the file is full or no more events
    /// are ripe.
    async fn fill(
        &mut self,
        journal: &dyn Journal,
        settings: &ArchiveSettings,
        after: &Position,
        is_ripe: &(dyn Fn(&Stored) -> bool + Sync),
    ) -> Result<()> {
        let mut after = after.clone();
        loop {
            let batch = journal.read(&after, settings.file_events_max - self.events).await?;
            for stored in &batch.events {
                if !is_ripe(stored) {
                    return Ok(());
                }
                let line = serde_json::to_writer(&mut self.lines, &StoredRecord::new(stored));
                line.map_err(|e| Error::Corrupt(format!("not JSON: {e}")))?;
                self.lines.push(b'\n');
                self.events += 1;
                self.name.get_or_insert_with(|| file_name(journal.id(), stored));
                self.last = Some(stored.position.clone());
                if self.events >= settings.file_events_max || self.lines.len() >= settings.file_bytes_max {
                    return Ok(());
                }
            }
            if !batch.more {
                return Ok(());
            }
            after = batch.next;
        }
    }
}

async fn save(
    journal: &dyn Journal,
    settings: &ArchiveSettings,
    token: Token,
    checkpoint: &mut Checkpoint,
    position: Position,
) -> Result<()> {
    checkpoint.position = position;
    journal.save(&settings.relay, token, checkpoint).await?;
    journal.renew_leadership(&settings.relay, token, settings.lease).await
}

/// The directory of a journal's files.
fn directory(journal: &str) -> String {
    format!("archive/{journal}/")
}

/// The common prefix of files that begin at a position. Twenty digits and a name, so that files
/// sort by position. A position's name has only characters that are valid in an object's name.
fn beginning(journal: &str, position: &Position) -> String {
    let name = position.name().map(|name| format!("_{name}")).unwrap_or_default();
    format!("{}{:020}{name}", directory(journal), position.number())
}

/// Names a file after its first event alone: of two writers with different ranges from there, only
/// one can create it. The time distinguishes the event from one that had the same position in a
/// lost timeline.
fn file_name(journal: &str, first: &Stored) -> String {
    format!("{}.{}.jsonl", beginning(journal, &first.position), first.at.as_micros())
}

/// Skips files whose checkpoint was not saved because their writer was killed or lost leadership. A
/// file only says which events it has, so comparing them with the journal's own events decides up
/// to where everything is archived.
async fn continue_behind(
    journal: &dyn Journal,
    store: &dyn Objects,
    settings: &ArchiveSettings,
    token: Token,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let mut after = beginning(journal.id(), &checkpoint.position);
    let mut next = Next { events: VecDeque::new(), after: checkpoint.position.clone() };
    while let Some(listed) = store.list(&directory(journal.id()), &after, 1).await?.pop() {
        let Some(stored) = next.peek(journal).await? else { return Ok(()) };
        let here = beginning(journal.id(), &stored.position);
        if listed.name > here && !listed.name.starts_with(&format!("{here}.")) {
            return Ok(()); // this file, and every one after it, begins later
        }
        let file = archive_read(store, &listed.name).await?;
        let mut archived = None;
        while let Some(stored) = next.peek(journal).await? {
            let place = file.binary_search_by(|event| event.position.cmp(&stored.position));
            if place.ok().is_none_or(|place| file[place] != *stored) {
                break;
            }
            archived = next.events.pop_front().map(|stored| stored.position);
        }
        if let Some(position) = archived {
            save(journal, settings, token, checkpoint, position).await?;
        }
        if let Some(stored) = next.peek(journal).await?
            && file.last().is_some_and(|last| stored.position <= last.position)
        {
            tracing::warn!(
                target: "hapax",
                file = listed.name,
                from = %stored.position,
                "the archive has a file of another timeline: the journal was restored, and differs from this position on"
            );
        }
        after = listed.name;
    }
    Ok(())
}

/// Iterates over a journal's events after a position, a page at a time.
struct Next {
    events: VecDeque<Stored>,
    after: Position,
}

impl Next {
    async fn peek(&mut self, journal: &dyn Journal) -> Result<Option<&Stored>> {
        if self.events.is_empty() {
            let batch = journal.read(&self.after, PAGE).await?;
            self.after = batch.next;
            self.events = batch.events.into();
        }
        Ok(self.events.front())
    }
}

/// The files of a journal's archive, by position.
pub async fn archive_files(store: &dyn Objects, journal: &str) -> Result<Vec<String>> {
    let listed = store.list(&directory(journal), "", usize::MAX).await?;
    Ok(listed.into_iter().map(|object| object.name).collect())
}

/// The events of a file, as they were in the journal.
pub async fn archive_read(store: &dyn Objects, name: &str) -> Result<Vec<Stored>> {
    let Some(body) = store.get(name).await? else { return Err(Error::NotFound(name.to_owned())) };
    let mut events = Vec::new();
    for (number, line) in body.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
        let record: StoredRecord = serde_json::from_slice(line)
            .map_err(|e| Error::Corrupt(format!("line {} of {name} is not an event: {e}", number + 1)))?;
        events.push(record.stored()?);
    }
    Ok(events)
}
