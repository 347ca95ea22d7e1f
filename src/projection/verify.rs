//! Compares a projection with the history of its records.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::{Change, Content, Document, History, Name, Projection, Version};
use crate::error::Result;

/// How many records to look up at once.
const BATCH: usize = 200;
/// The pause before looking again at records that differ.
const PAUSE: Duration = Duration::from_millis(200);

/// What a projection has wrong about a record.
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
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Missing { expected } => write!(f, "missing; it should have seq {}", expected.seq()),
            Difference::Behind { expected, found } => {
                write!(f, "has seq {}; it should have {}", found.seq(), expected.seq())
            }
            Difference::Other { version } => write!(f, "has another content under seq {}", version.seq()),
            Difference::Ghost { found } => write!(f, "has seq {}, which was never written", found.seq()),
        }
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Verified {
    /// How many records were compared, deleted ones included.
    pub records: u64,
    /// What differs, by record.
    pub differences: BTreeMap<Name, Difference>,
}

/// Compares a projection with the history of its records, without stopping anything: what differs is
/// looked at again, with what was written since, until it is equal or `wait` is over. Keeps the last
/// version of every record in memory.
pub async fn verify(
    projection: &dyn Projection,
    history: &mut History<'_>,
    wait: Duration,
) -> Result<Verified> {
    let mut expected = BTreeMap::new();
    read(history, &mut expected).await?;
    let end = Instant::now() + wait;
    let mut differing: Vec<Name> = expected.keys().cloned().collect();
    let mut ghosts = Vec::new();
    let mut after = None;
    loop {
        let page = projection.scan(after.as_deref()).await?;
        ghosts.extend(page.found.into_iter().filter(|(name, _)| !expected.contains_key(name)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        let mut differences = compare(projection, &expected, &differing).await?;
        // Written while this read: by now the history has it.
        let unknown = ghosts.iter().filter(|(name, _)| !expected.contains_key(name));
        differences.extend(unknown.map(|(name, found)| (name.clone(), Difference::Ghost { found: *found })));
        if differences.is_empty() || Instant::now() >= end {
            return Ok(Verified { records: expected.len() as u64, differences });
        }
        differing = differences.into_keys().collect();
        tokio::time::sleep(PAUSE).await;
        read(history, &mut expected).await?;
    }
}

/// Reads on to the end, and keeps the last change of each record.
async fn read(history: &mut History<'_>, expected: &mut BTreeMap<Name, Change>) -> Result<()> {
    while let Some(changes) = history.next().await? {
        expected.extend(changes.into_iter().map(|change| (Name::of(&change), change)));
    }
    Ok(())
}

async fn compare(
    projection: &dyn Projection,
    expected: &BTreeMap<Name, Change>,
    names: &[Name],
) -> Result<BTreeMap<Name, Difference>> {
    let mut differences = BTreeMap::new();
    let known: Vec<Name> = names.iter().filter(|name| expected.contains_key(name)).cloned().collect();
    for names in known.chunks(BATCH) {
        for (name, found) in names.iter().zip(projection.documents(names).await?) {
            let Some(change) = expected.get(name) else { continue };
            differences.extend(difference(change, found).map(|difference| (name.clone(), difference)));
        }
    }
    Ok(differences)
}

fn difference(change: &Change, found: Option<Document>) -> Option<Difference> {
    let expected = change.version;
    let Some(document) = found else { return Some(Difference::Missing { expected }) };
    let found = document.version;
    match found.cmp(&expected) {
        std::cmp::Ordering::Less => Some(Difference::Behind { expected, found }),
        // Newer than what was read: the history is read again.
        std::cmp::Ordering::Greater => Some(Difference::Ghost { found }),
        std::cmp::Ordering::Equal if is_same(change, &document.content) => None,
        std::cmp::Ordering::Equal => Some(Difference::Other { version: found }),
    }
}

/// Whether a content is what a change says. Payloads are compared as they were written.
fn is_same(change: &Change, content: &Content) -> bool {
    *content == Content::Expired && change.payload.is_some() || *content == Content::of(change)
}
