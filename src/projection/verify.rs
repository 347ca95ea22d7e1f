//! Compares a projection with its records.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::history::RECORDS;
use super::{Content, Document, History, Name, Projection, Reading, Version};
use crate::analytics::{Row, Sums};
use crate::clock::Time;
use crate::error::Result;
use crate::id::Tenant;
use crate::records::{OfTenant, Scan, aggregate_of};

/// The pause before looking again at records that differ.
const PAUSE: Duration = Duration::from_millis(200);
/// Up to so many records are looked up one by one; for more, their buckets are read.
const SINGLE_MAX: usize = 50;

/// How a projection differs from a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// It has nothing of a record.
    Missing {
        /// The version it should have.
        expected: Version,
    },
    /// It has an older version.
    Behind {
        /// The version it should have.
        expected: Version,
        /// The version it has.
        found: Version,
    },
    /// The same, and its consumer has not read so far: the change may be on its way.
    Late {
        /// The version it should have.
        expected: Version,
        /// The version it has; `None`: nothing.
        found: Option<Version>,
    },
    /// It has another content under the same version.
    Other {
        /// The version.
        version: Version,
    },
    /// It has a record, or a version of one, that was never written.
    Ghost {
        /// The version it has.
        found: Version,
    },
    /// Its document cannot be read, or its parts contradict each other.
    Unreadable {
        /// Why.
        reason: String,
    },
}

impl Difference {
    /// What it should have, if it has less.
    fn lacks(&self) -> Option<(Version, Option<Version>)> {
        match self {
            Difference::Missing { expected } => Some((*expected, None)),
            Difference::Behind { expected, found } => Some((*expected, Some(*found))),
            _ => None,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Missing { expected } => write!(f, "missing; it should have seq {}", expected.seq()),
            Difference::Behind { expected, found } => {
                write!(f, "has seq {}; it should have {}", found.seq(), expected.seq())
            }
            Difference::Late { expected, found } => {
                match found {
                    Some(found) => write!(f, "late: has seq {}", found.seq())?,
                    None => f.write_str("late: is missing")?,
                }
                write!(f, "; it should have {}, which its consumer has not read yet", expected.seq())
            }
            Difference::Other { version } => write!(f, "has different content under seq {}", version.seq()),
            Difference::Ghost { found } => write!(f, "has seq {}, which was never written", found.seq()),
            Difference::Unreadable { reason } => write!(f, "cannot be read: {reason}"),
        }
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Verified {
    /// How many records were compared.
    pub records: u64,
    /// What differs, by record.
    pub differences: BTreeMap<Name, Difference>,
    /// What the projection has that belongs to no record, with the reason.
    pub foreign: BTreeMap<String, String>,
    /// How many records changed so often that they were never seen equal. The projection has followed them.
    pub moving: u64,
    /// The sums of the records, as they were when they were read: with those of the projection, the receipt.
    pub source: Sums,
    /// The sums of the projection's documents of them. They may differ by changes that were in
    /// flight, and by what a cache has expired. Content that a cache has expired counts as the
    /// record's, if the version is the record's.
    pub projection: Sums,
}

impl Verified {
    /// Adds a record, and the projection's document of it.
    fn sum(&mut self, name: &Name, expected: &Document, found: Option<&Document>) {
        let of_record = row(name, expected.version, &expected.content);
        if let Some(found) = found {
            let is_same = found.content == Content::Expired && found.version == expected.version;
            let of_found = if is_same { of_record.clone() } else { row(name, found.version, &found.content) };
            if let Some(row) = &of_found {
                self.projection.add(row);
            }
        }
        if let Some(row) = &of_record {
            self.source.add(row);
        }
    }

    /// Takes what still differs after the last look.
    fn settle(&mut self, open: BTreeMap<Name, Option<Note>>) {
        for (name, note) in open {
            let Some(note) = note else { continue };
            if note.moves && note.difference.lacks().is_some() {
                self.moving += 1;
            } else {
                self.differences.insert(name, note.difference);
            }
        }
    }

    /// Looks once more at records that are missing or behind, when the consumer of the projection has read
    /// whatever was written before now, or `wait` is over. What it has not read by then is
    /// [late](Difference::Late), and not lost.
    pub async fn recheck(
        &mut self,
        projection: &dyn Projection,
        history: &History<'_>,
        reading: &Reading<'_>,
        wait: Duration,
    ) -> Result<()> {
        let mut open = BTreeMap::new();
        for (name, difference) in &self.differences {
            if let Some((expected, _)) = difference.lacks() {
                let difference = difference.clone();
                open.insert(name.clone(), Some(Note { expected: Some(expected), moves: false, difference }));
            }
        }
        if open.is_empty() {
            return Ok(());
        }
        let unread = reading.rest(history.journal, wait).await?;
        let judge = Judge { projection, history, now: history.records.now().await? };
        let looked = judge.look(open).await?;
        // Nothing fails from here on: who gets an error keeps what was found before.
        self.differences.retain(|_, difference| difference.lacks().is_none());
        self.settle(looked);
        for (name, difference) in &mut self.differences {
            if let Some((expected, found)) = difference.lacks()
                && unread.has(name)?
            {
                *difference = Difference::Late { expected, found };
            }
        }
        Ok(())
    }

    /// Whether nothing is wrong.
    pub fn is_equal(&self) -> bool {
        self.differences.is_empty() && self.foreign.is_empty()
    }
}

/// How a record differed.
struct Note {
    /// What the projection should have got to.
    expected: Option<Version>,
    /// Whether it got to what was expected before: it follows.
    moves: bool,
    difference: Difference,
}

/// Compares a projection with the records of a history, without stopping anything. Differences are
/// checked again until they are gone or `wait` is over. The records are the source, so events may
/// have been swept; for a deleted record, the journal has the last seq. Keeps the name of every
/// record in memory.
pub async fn verify(projection: &dyn Projection, history: &History<'_>, wait: Duration) -> Result<Verified> {
    let end = Instant::now() + wait;
    let judge = Judge { projection, history, now: history.records.now().await? };
    let mut verified = Verified::default();
    let mut open: BTreeMap<Name, Option<Note>> = BTreeMap::new();
    let mut live = HashSet::new();
    let mut scan = Scan::new(RECORDS);
    loop {
        let page = history.records.snapshot(&scan).await?;
        let Some(last) = page.last() else { break };
        scan.after = Some(last.name());
        let names: Vec<Name> = page.iter().map(OfTenant::name).collect();
        for (of, found) in page.iter().zip(projection.documents(&names).await?) {
            let expected = judge.expected(of)?;
            verified.sum(&of.name(), &expected, found.as_ref());
            if judge.difference(&of.name(), &expected, found).is_some() {
                open.insert(of.name(), None);
            }
        }
        live.extend(names);
    }
    verified.records = live.len() as u64;
    let mut after = None;
    loop {
        let page = projection.scan(after.as_deref()).await?;
        verified.foreign.extend(page.foreign);
        let unknown = page.found.into_iter().map(|(name, _)| name).filter(|name| !live.contains(name));
        open.extend(unknown.map(|name| (name, None)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        let is_last = Instant::now() >= end;
        open = judge.look(open).await?;
        if open.is_empty() || is_last {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    verified.settle(open);
    Ok(verified)
}

struct Judge<'j> {
    projection: &'j dyn Projection,
    history: &'j History<'j>,
    now: Time,
}

impl Judge<'_> {
    /// The document that the projection should have of a record that exists.
    fn expected(&self, of: &OfTenant) -> Result<Document> {
        let content = Content::Present {
            payload: of.record.payload.clone(),
            created_at: of.record.created_at,
            updated_at: of.record.updated_at,
        };
        Ok(Document::new(Version::new(self.history.generation, of.record.seq)?, content))
    }

    /// Looks at records again. Returns those that still differ. The projection is read first: whatever it
    /// has was in the source by then, so a version that the source does not have was never written.
    async fn look(&self, open: BTreeMap<Name, Option<Note>>) -> Result<BTreeMap<Name, Option<Note>>> {
        let names: Vec<Name> = open.keys().cloned().collect();
        let mut found = Vec::with_capacity(names.len());
        for names in names.chunks(RECORDS) {
            found.extend(self.projection.documents(names).await?);
        }
        let expected = self.records(&names).await?;
        let mut still = BTreeMap::new();
        for ((name, note), found) in open.into_iter().zip(found) {
            let has = found.as_ref().map(|document| document.version);
            let (wanted, difference) = match (expected.get(&name), found) {
                (Some(expected), found) => (Some(expected.version), self.difference(&name, expected, found)),
                (None, Some(found)) => self.deleted(&name, found).await?,
                (None, None) => (None, None),
            };
            let Some(difference) = difference else { continue };
            let got_there = note.as_ref().is_some_and(|note| note.expected.is_some() && has >= note.expected);
            let expected = match &note {
                Some(note) if !got_there => note.expected,
                _ => wanted,
            };
            let moves = got_there || note.is_some_and(|note| note.moves);
            still.insert(name, Some(Note { expected, moves, difference }));
        }
        Ok(still)
    }

    /// The documents of those records that exist.
    async fn records(&self, names: &[Name]) -> Result<BTreeMap<Name, Document>> {
        let records = self.history.records;
        let mut found = BTreeMap::new();
        if names.len() <= SINGLE_MAX {
            for name in names {
                let page = records.snapshot(&Scan::one(name)).await?;
                if let Some(of) = page.first().filter(|of| of.name() == *name) {
                    found.insert(name.clone(), self.expected(of)?);
                }
            }
            return Ok(found);
        }
        let wanted: HashSet<&Name> = names.iter().collect();
        let buckets = names.iter().map(|name| Scan::bucket(name.id)).collect();
        let mut scan = Scan::new(RECORDS).buckets(Some(buckets));
        loop {
            let page = records.snapshot(&scan).await?;
            let Some(last) = page.last() else { return Ok(found) };
            scan.after = Some(last.name());
            for of in page.iter().filter(|of| wanted.contains(&of.name())) {
                found.insert(of.name(), self.expected(of)?);
            }
        }
    }

    /// How the projection differs from a record that exists.
    fn difference(&self, name: &Name, expected: &Document, found: Option<Document>) -> Option<Difference> {
        let Some(document) = found else {
            let updated_at = match expected.content {
                Content::Present { updated_at, .. } => updated_at,
                _ => self.now,
            };
            let forgets = self.projection.forgets_after();
            let is_forgotten = forgets.is_some_and(|after| updated_at < self.now.minus(after));
            let missing = Difference::Missing { expected: expected.version };
            return Some(missing).filter(|_| !is_forgotten);
        };
        let (expected_version, found) = (expected.version, document.version);
        match (document.content, found.cmp(&expected_version)) {
            (Content::Unreadable { reason }, _) => Some(Difference::Unreadable { reason }),
            (_, Ordering::Less) => Some(Difference::Behind { expected: expected_version, found }),
            (_, Ordering::Greater) => Some(Difference::Ghost { found }),
            (content, Ordering::Equal) => {
                let other = Difference::Other { version: found };
                Some(other).filter(|_| !is_same(name, found, &expected.content, &content))
            }
        }
    }

    /// How the projection differs for a record that does not exist, and the version that it should
    /// have. The journal has no seq for a record that never existed.
    async fn deleted(
        &self,
        name: &Name,
        document: Document,
    ) -> Result<(Option<Version>, Option<Difference>)> {
        let tenant = tenant_of(name)?;
        let aggregate = aggregate_of(&name.module, name.id)?;
        let head = self.history.journal.head(tenant.as_ref(), &aggregate).await?;
        let expected = if head == 0 { None } else { Some(Version::new(self.history.generation, head)?) };
        let found = document.version;
        let difference = match document.content {
            Content::Unreadable { reason } => Some(Difference::Unreadable { reason }),
            content => match expected {
                Some(expected) if found < expected => Some(Difference::Behind { expected, found }),
                Some(expected) if found == expected => {
                    Some(Difference::Other { version: found }).filter(|_| content != Content::Deleted)
                }
                _ => Some(Difference::Ghost { found }),
            },
        };
        Ok((expected, difference))
    }
}

/// Whose a record is.
pub(super) fn tenant_of(name: &Name) -> Result<Option<Tenant>> {
    if name.tenant.is_nil() {
        return Ok(None);
    }
    Tenant::new(name.tenant.hyphenated().to_string()).map(Some)
}

/// Whether a content is what it should be. Payloads are compared as values: a database may keep the keys in
/// an order of its own and write numbers in another way.
fn is_same(name: &Name, version: Version, expected: &Content, found: &Content) -> bool {
    let hash = |content: &Content| row(name, version, content).map(|row| row.hash);
    *found == Content::Expired || hash(found).is_some_and(|found| hash(expected) == Some(found))
}

/// A record under a version as a row of a read model; `None` if it has no content.
fn row(name: &Name, version: Version, content: &Content) -> Option<Row> {
    match content {
        Content::Present { payload, created_at, updated_at } => {
            let times = (*created_at, *updated_at);
            Row::new(name.clone(), version, times, payload.as_str().as_bytes()).ok()
        }
        _ => None,
    }
}
