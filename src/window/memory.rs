//! A window in this process's memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::{Sighting, Window, WindowSettings};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::ledger::{Epoch, Finding, Identity, Level};

/// A window in memory, for one process. Its size is bounded: when it is full, the oldest entries
/// go. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryWindow {
    clock: Arc<dyn Clock>,
    settings: Arc<WindowSettings>,
    entries_max: usize,
    memory: Arc<Mutex<Memory>>,
}

/// All entries have the same time limit, so they expire in the order in which they were remembered.
#[derive(Debug, Default)]
struct Memory {
    entries: HashMap<Identity, Seen>,
    oldest: BTreeMap<u64, Identity>,
    rank: u64,
}

#[derive(Debug)]
struct Seen {
    rank: u64,
    until: Time,
    /// The configured epoch, and the ledger's.
    epoch: (Arc<str>, Option<Epoch>),
    fingerprint: Option<Fingerprint>,
}

impl MemoryWindow {
    /// The size of a window opened by URL: about 200 MB at most.
    pub const ENTRIES_MAX: usize = 1_000_000;

    /// An empty window of at most `entries_max` entries.
    pub fn new(settings: WindowSettings, entries_max: usize) -> Result<Self> {
        MemoryWindow::with_clock(settings, entries_max, Arc::new(SystemClock))
    }

    /// An empty window with your own clock.
    pub fn with_clock(settings: WindowSettings, entries_max: usize, clock: Arc<dyn Clock>) -> Result<Self> {
        settings.check()?;
        if entries_max == 0 {
            return Err(Error::Config("a window needs room for at least one entry".into()));
        }
        Ok(MemoryWindow { clock, settings: Arc::new(settings), entries_max, memory: Arc::default() })
    }

    /// The same memory, as seen under another epoch.
    #[must_use]
    pub fn in_epoch(&self, epoch: impl Into<String>) -> Self {
        let settings = WindowSettings { epoch: epoch.into(), ..(*self.settings).clone() };
        MemoryWindow { settings: Arc::new(settings), ..self.clone() }
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Whether it has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Removes expired entries, and the oldest ones that exceed the limit.
    fn trim(&mut self, now: Time, entries_max: usize) {
        while let Some((rank, identity)) = self.oldest.pop_first() {
            let keep = self.entries.len() <= entries_max
                && self.entries.get(&identity).is_some_and(|seen| seen.until > now);
            if keep {
                self.oldest.insert(rank, identity);
                return;
            }
            self.entries.remove(&identity);
        }
    }
}

#[async_trait]
impl Window for MemoryWindow {
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>> {
        let now = self.clock.now();
        let memory = self.lock();
        let seen = |sighting: &Sighting| {
            let same = |seen: &Seen| {
                seen.fingerprint.zip(sighting.fingerprint).is_none_or(|(before, now)| before == now)
            };
            let in_epoch =
                |seen: &Seen| *seen.epoch.0 == *self.settings.epoch && seen.epoch.1 == sighting.epoch;
            let known = memory.entries.get(&sighting.identity);
            known.is_some_and(|seen| seen.until > now && in_epoch(seen) && same(seen))
        };
        Ok(sightings.iter().map(seen).collect())
    }

    async fn remember(&self, sightings: &[Sighting]) -> Result<()> {
        let now = self.clock.now();
        let by_hand: Arc<str> = self.settings.epoch.as_str().into();
        let mut memory = self.lock();
        for Sighting { identity, fingerprint, epoch } in sightings {
            memory.rank += 1;
            let seen = Seen {
                rank: memory.rank,
                until: now.plus(self.settings.ttl),
                epoch: (Arc::clone(&by_hand), *epoch),
                fingerprint: *fingerprint,
            };
            let rank = seen.rank;
            if let Some(before) = memory.entries.insert(identity.clone(), seen) {
                memory.oldest.remove(&before.rank);
            }
            memory.oldest.insert(rank, identity.clone());
        }
        memory.trim(now, self.entries_max);
        Ok(())
    }

    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding> {
        let message = format!(
            "the window is in memory: it begins empty with each process and has room for {} events",
            self.entries_max
        );
        vec![
            Finding { level: Level::Fine, check: "window.memory", message },
            self.settings.check_redelivery(redelivery),
        ]
    }
}
