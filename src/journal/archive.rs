//! Published events, moved out of a journal into an object store for good.
//!
//! The archive follows the journal as a relay does, under a name of its own: it leads, reads on from its checkpoint, writes a file,
//! saves the checkpoint, and only then sweeps. A sweep takes only what every relay has passed, so nothing goes that is not in a file.
//! A file is named by the position of its first event and created once; killed before its checkpoint was saved, the next run finds
//! the file, reads how far it goes, and goes on from there. No event is in two files.
//!
//! Each line of a file is an event in JSON: position, tenant, aggregate, seq, when it was appended, id, fingerprint, time, kind, payload,
//! headers, trace. Bytes that are no UTF-8 stand as `{"base64": "…"}`.

use std::time::Duration;

use super::record::StoredRecord;
use super::{Checkpoint, Journal, JournalSweep, Lead, PAGE_BYTES_MAX, Position, Stored, swept_up_to};
use crate::backend::object::Objects;
use crate::crash_point;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::ledger::Token;

/// Which events are archived, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveTerms {
    /// Only those appended longer ago than this, by the journal's clock.
    pub older_than: Duration,
    /// The most events in one file.
    pub file_events_max: usize,
    /// The most bytes in one file, the event that reaches them included: so much is in memory, and a page of the journal.
    pub file_bytes_max: usize,
    /// The name the archive follows the journal under.
    pub relay: RelayName,
    /// Who does it, for humans.
    pub owner: Owner,
    /// How long the lead lasts; it is kept with every file.
    pub lease: Duration,
    /// Whether what is archived is removed from the journal.
    pub sweep: bool,
}

impl ArchiveTerms {
    /// Events older than this, ten thousand or 16 MiB to a file, removed afterwards.
    pub fn new(older_than: Duration, owner: Owner) -> Result<Self> {
        Ok(ArchiveTerms {
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

/// What an archiving run has done.
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

/// Archives what every other relay has published and is old enough. Run it as often as you like, by one or by many: one does it.
/// `Fenced`: another one has taken over; what was written stays and is right.
pub async fn archive(journal: &dyn Journal, store: &dyn Objects, terms: &ArchiveTerms) -> Result<Archived> {
    let mut archived = Archived::default();
    let (token, mut checkpoint) = match journal.lead(&terms.relay, &terms.owner, terms.lease).await? {
        Lead::Leads { token, checkpoint } => (token, checkpoint),
        Lead::Taken { by, until } => {
            let what = format!("{by} archives this journal already (until {until})");
            return Err(Error::Contended { what, source: None });
        }
    };
    let done = fill(journal, store, terms, token, &mut checkpoint, &mut archived).await;
    let given_up = journal.give_up_lead(&terms.relay, token).await;
    done?;
    given_up?;
    if terms.sweep {
        let sweep = JournalSweep::new(terms.older_than);
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
    terms: &ArchiveTerms,
    token: Token,
    checkpoint: &mut Checkpoint,
    archived: &mut Archived,
) -> Result<()> {
    continue_behind(journal, store, terms, token, checkpoint).await?;
    let others: Vec<_> =
        journal.relays().await?.into_iter().filter(|relay| relay.relay != terms.relay).collect();
    let Some(up_to) = swept_up_to(&others) else { return Ok(()) }; // nobody publishes
    let cutoff = journal.now().await?.minus(terms.older_than);
    let is_ripe = |stored: &Stored| stored.at < cutoff && stored.position <= up_to;
    loop {
        let mut file = File::default();
        file.fill(journal, terms, &checkpoint.position, &is_ripe).await?;
        let (Some(first), Some(last)) = (file.first, file.last) else { return Ok(()) };
        if store.create(&file_name(journal.id(), &first), file.lines.into()).await? {
            archived.files += 1;
            archived.events += file.events as u64;
        } else {
            continue_behind(journal, store, terms, token, checkpoint).await?; // someone wrote it who leads no more
            continue;
        }
        crash_point!("archive.written");
        save(journal, terms, token, checkpoint, last).await?;
        crash_point!("archive.saved");
    }
}

/// A file that is being made.
#[derive(Default)]
struct File {
    lines: Vec<u8>,
    events: usize,
    first: Option<Position>,
    last: Option<Position>,
}

impl File {
    /// Fills it with what follows a position, a page at a time, until it is full or nothing more is ripe.
    async fn fill(
        &mut self,
        journal: &dyn Journal,
        terms: &ArchiveTerms,
        after: &Position,
        is_ripe: &(dyn Fn(&Stored) -> bool + Sync),
    ) -> Result<()> {
        let mut after = after.clone();
        loop {
            let stretch = journal.read(&after, terms.file_events_max - self.events).await?;
            for stored in &stretch.events {
                if !is_ripe(stored) {
                    return Ok(());
                }
                let line = serde_json::to_writer(&mut self.lines, &StoredRecord::new(stored));
                line.map_err(|e| Error::Corrupt(format!("no JSON: {e}")))?;
                self.lines.push(b'\n');
                self.events += 1;
                self.first.get_or_insert_with(|| stored.position.clone());
                self.last = Some(stored.position.clone());
                if self.events >= terms.file_events_max || self.lines.len() >= terms.file_bytes_max {
                    return Ok(());
                }
            }
            if !stretch.more {
                return Ok(());
            }
            after = stretch.next;
        }
    }
}

async fn save(
    journal: &dyn Journal,
    terms: &ArchiveTerms,
    token: Token,
    checkpoint: &mut Checkpoint,
    position: Position,
) -> Result<()> {
    checkpoint.position = position;
    journal.save(&terms.relay, token, checkpoint).await?;
    journal.keep_lead(&terms.relay, token, terms.lease).await
}

/// Where the files of a journal lie.
fn directory(journal: &str) -> String {
    format!("archive/{journal}/")
}

/// Twenty digits and a name, so that files sort as their positions do; a name holds only what an object's may.
fn place(position: &Position) -> String {
    format!("{:020}{}", position.number(), position.name().map(|name| format!("_{name}")).unwrap_or_default())
}

/// A file is named by its first event alone: of two who would write different stretches from there, one can.
fn file_name(journal: &str, first: &Position) -> String {
    format!("{}{}.jsonl", directory(journal), place(first))
}

/// Goes on behind files whose checkpoint was not saved: whoever wrote them was killed, or has lost the lead.
async fn continue_behind(
    journal: &dyn Journal,
    store: &dyn Objects,
    terms: &ArchiveTerms,
    token: Token,
    checkpoint: &mut Checkpoint,
) -> Result<()> {
    let mut after = format!("{}{}", directory(journal.id()), place(&checkpoint.position));
    while let Some(listed) = store.list(&directory(journal.id()), &after, 1).await?.pop() {
        let events = archive_read(store, &listed.name).await?;
        if let Some(last) = events.last().filter(|last| last.position > checkpoint.position) {
            save(journal, terms, token, checkpoint, last.position.clone()).await?;
        }
        after = listed.name;
    }
    Ok(())
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
            .map_err(|e| Error::Corrupt(format!("line {} of {name} is no event: {e}", number + 1)))?;
        events.push(record.stored()?);
    }
    Ok(events)
}
