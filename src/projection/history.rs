//! The whole history of records: an archive, then the journal.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::{Change, Name, change_of};
use crate::backend::object::Objects;
use crate::error::{Error, Result};
use crate::journal::{Journal, Position, Stored, archive_files, archive_read};
use crate::records::{OfTenant, Scan, Snapshot};
use crate::words::counted;

/// How many events to read from the journal at once.
const PAGE: usize = 500;
/// How many records to read from their store at once.
pub(super) const RECORDS: usize = 200;
/// How long to wait for a writer that has not committed yet, before looking again.
const HOLE_PAUSE: Duration = Duration::from_millis(200);

/// Reads every change of every record from the beginning: archived files first, then the journal. An
/// event that is in both is read once.
///
/// The history of a record must begin with seq 1, have no gap, and reach what the record is: what was
/// swept and not archived is missing, and a projection made without it would not match the
/// records. A record of which everything was swept has no event that would show the gap, so the records
/// themselves are asked. Remembers two seqs of each record, some 200 bytes.
pub struct History<'j> {
    pub(super) journal: &'j dyn Journal,
    pub(super) records: &'j dyn Snapshot,
    archive: Option<&'j dyn Objects>,
    files: VecDeque<String>,
    position: Position,
    last: HashMap<Name, u64>,
    /// The seqs that a survey has seen.
    surveyed: HashMap<Name, u64>,
    pub(super) generation: u16,
}

impl<'j> History<'j> {
    /// The history of the records in a journal and, if there is one, its archive.
    pub async fn open(
        journal: &'j dyn Journal,
        records: &'j dyn Snapshot,
        archive: Option<&'j dyn Objects>,
        generation: u16,
    ) -> Result<Self> {
        if journal.capabilities().timed {
            return Err(Error::Unsupported(
                "a journal in an object store has no records, so nothing can be projected from it".into(),
            ));
        }
        let mut history = History {
            journal,
            records,
            archive,
            files: VecDeque::new(),
            position: Position::START,
            last: HashMap::new(),
            surveyed: HashMap::new(),
            generation,
        };
        history.rewind().await?;
        Ok(history)
    }

    /// Starts over.
    async fn rewind(&mut self) -> Result<()> {
        if let Some(store) = self.archive {
            self.files = archive_files(store, self.journal.id()).await?.into();
        }
        (self.position, self.last) = (Position::START, HashMap::new());
        Ok(())
    }

    /// Reads everything once, to see that nothing is missing and which version of each record is the last,
    /// and begins again. From then on [`next`](History::next) leaves out what was replaced by a later
    /// version already.
    pub async fn survey(&mut self) -> Result<()> {
        // What is a record now has its event in the journal, or had it there.
        let mut expected = HashMap::new();
        each_record(self.records, |of| _ = expected.insert(of.name(), of.record.seq)).await?;
        self.surveyed.clear();
        while self.next().await?.is_some() {}
        self.reaches(&expected)?;
        self.surveyed = std::mem::take(&mut self.last);
        self.rewind().await
    }

    /// Refuses a history that was read to its end and lacks what the survey has seen: it was swept
    /// meanwhile.
    pub(super) fn check(&self) -> Result<()> {
        self.reaches(&self.surveyed)
    }

    fn reaches(&self, expected: &HashMap<Name, u64>) -> Result<()> {
        let seen = |name: &Name| self.last.get(name).copied().unwrap_or_default();
        let lacking = || expected.iter().filter(|(name, seq)| seen(name) < **seq);
        let Some((name, seq)) = lacking().min() else { return Ok(()) };
        let (count, last) = (lacking().count(), seen(name));
        let others = match count - 1 {
            0 => String::new(),
            others => format!(" and of {}", counted(others as u64, "other record", "other records")),
        };
        let lacks = lacks(last + 1, *seq);
        Err(Error::NotFound(format!("{lacks} of record {name}{others}: {}", self.hint())))
    }

    fn hint(&self) -> &'static str {
        if self.archive.is_some() {
            "neither the archive nor the journal has it. The history must have every event of every record"
        } else {
            "the journal does not have it any more; name the archive that does. The history must have every event of every record"
        }
    }

    /// Up to where the journal was read.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// How many records it has seen.
    pub fn records(&self) -> usize {
        self.last.len()
    }

    /// The next changes (after a [survey](History::survey), of each record only the last that it has seen
    /// and later ones), or `None` if there is nothing more at the moment. Call it again later to read
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

    /// The change of a stored event, unless it was read before or is not an event of a record.
    fn change(&mut self, stored: &Stored) -> Result<Option<Change>> {
        let unreadable =
            |error: Error| Error::Corrupt(format!("the event at position {}: {error}", stored.position));
        let Some(change) = change_of(&stored.event, self.generation).map_err(unreadable)? else {
            return Ok(None);
        };
        let (name, seq) = (Name::of(&change), change.version.seq());
        let last = self.last.get(&name).copied().unwrap_or_default();
        if seq <= last {
            return Ok(None);
        }
        if seq > last + 1 {
            let (lacks, hint) = (lacks(last + 1, seq - 1), self.hint());
            return Err(Error::NotFound(format!("{lacks} of record {name}: {hint}, beginning with seq 1")));
        }
        let is_replaced = self.surveyed.get(&name).is_some_and(|surveyed| seq < *surveyed);
        self.last.insert(name, seq);
        Ok(Some(change).filter(|_| !is_replaced))
    }
}

fn lacks(first: u64, last: u64) -> String {
    if first == last { format!("seq {first}") } else { format!("seqs {first} to {last}") }
}

/// Every record, page by page.
pub(super) async fn each_record(records: &dyn Snapshot, mut with: impl FnMut(OfTenant)) -> Result<()> {
    let mut scan = Scan::new(RECORDS);
    loop {
        let page = records.snapshot(&scan).await?;
        let Some(last) = page.last() else { return Ok(()) };
        scan.after = Some(last.name());
        page.into_iter().for_each(&mut with);
    }
}
