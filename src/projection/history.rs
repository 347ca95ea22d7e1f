//! The whole history of records: an archive, then the journal.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::{Change, Name, change_of};
use crate::backend::object::Objects;
use crate::error::{Error, Result};
use crate::journal::{Journal, Position, Stored, archive_files, archive_read};

/// How many events to read from the journal at once.
const PAGE: usize = 500;
/// How long to wait for a writer that has not committed yet, before looking again.
const HOLE_PAUSE: Duration = Duration::from_millis(200);

/// Reads every change of every record from the beginning: archived files first, then the journal. An
/// event that is in both is read once.
///
/// The history of a record must begin with seq 1 and have no gap: what was swept and not archived is
/// missing, and a projection made without it would not be what the records are. Remembers the last
/// seq of each record, some 100 bytes each.
pub struct History<'j> {
    journal: &'j dyn Journal,
    archive: Option<&'j dyn Objects>,
    files: VecDeque<String>,
    position: Position,
    last: HashMap<Name, u64>,
    generation: u16,
}

impl<'j> History<'j> {
    /// The history of a journal and, if there is one, its archive.
    pub async fn open(
        journal: &'j dyn Journal,
        archive: Option<&'j dyn Objects>,
        generation: u16,
    ) -> Result<Self> {
        if journal.capabilities().timed {
            return Err(Error::Unsupported(
                "a journal in an object store has no records, so nothing can be projected from it".into(),
            ));
        }
        let files = match archive {
            Some(store) => archive_files(store, journal.id()).await?.into(),
            None => VecDeque::new(),
        };
        let (position, last) = (Position::START, HashMap::new());
        Ok(History { journal, archive, files, position, last, generation })
    }

    /// Up to where the journal was read.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// How many records it has seen.
    pub fn records(&self) -> usize {
        self.last.len()
    }

    /// The next changes, or `None` if there is nothing more at the moment. Call it again later to read
    /// what was appended since. A writer that has not committed is waited for.
    pub async fn next(&mut self) -> Result<Option<Vec<Change>>> {
        loop {
            let events = if let (Some(store), Some(file)) = (self.archive, self.files.pop_front()) {
                archive_read(store, &file).await?
            } else {
                let batch = self.journal.read(&self.position, PAGE).await?;
                self.position = batch.next;
                if batch.events.is_empty() && batch.at_hole {
                    self.journal.wait(&self.position, HOLE_PAUSE).await?;
                    continue;
                }
                if batch.events.is_empty() && !batch.more {
                    return Ok(None);
                }
                batch.events
            };
            let mut changes = Vec::with_capacity(events.len());
            for stored in &events {
                changes.extend(self.change(stored)?);
            }
            if !changes.is_empty() {
                return Ok(Some(changes));
            }
        }
    }

    /// The change of a stored event, unless it was read before or is no event of a record.
    fn change(&mut self, stored: &Stored) -> Result<Option<Change>> {
        let unreadable =
            |error: Error| Error::Corrupt(format!("the event at position {}: {error}", stored.position));
        let Some(change) = change_of(&stored.event, self.generation).map_err(unreadable)? else {
            return Ok(None);
        };
        let last = self.last.entry(Name::of(&change)).or_default();
        let seq = change.version.seq();
        if seq <= *last {
            return Ok(None);
        }
        if seq > *last + 1 {
            let (first, name) = (*last + 1, Name::of(&change));
            let lacks = if first == seq - 1 {
                format!("seq {first}")
            } else {
                format!("seqs {first} to {}", seq - 1)
            };
            let hint = if self.archive.is_some() {
                "neither the archive nor the journal has it"
            } else {
                "the journal does not have it; name the archive that does"
            };
            return Err(Error::NotFound(format!(
                "{lacks} of record {name}: {hint}. The history of a record must begin with seq 1"
            )));
        }
        *last = seq;
        Ok(Some(change))
    }
}
