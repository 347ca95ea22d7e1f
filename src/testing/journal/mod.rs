//! What every journal must pass. Cases are named after the clauses of the [`Journal`] contract (`j1_` … `j14_`).
//!
//! A journal implements [`JournalHarness`] and is enrolled by one line; every case becomes a test of its own:
//!
//! ```text
//! hapax::journal_conformance!(memory, MemoryJournalHarness::new());
//! ```
//!
//! Each case has a storage of its own. No case moves a clock: leases are long where they shall last, and short where a case
//! waits for them to lapse.

use async_trait::async_trait;

use crate::journal::{Journal, JournalSettings, MemoryJournal};

mod cases;
mod kit;

pub mod append;
pub mod horizon;
pub mod identity;
pub mod input;
pub mod leadership;
pub mod model;
pub mod mutants;
pub mod page;
pub mod read;
pub mod sweep;

pub use cases::NAMES;
pub use kit::{DEADLINE, Follower, aggregate, append, event, put, tenant};

/// A fresh storage of one backend.
#[async_trait]
pub trait JournalHarness: Send + Sync {
    /// The journal under test.
    type Journal: Journal;

    /// Opens the storage once more, as another process would.
    async fn open(&self, settings: JournalSettings) -> Self::Journal;

    /// How many sequences of random commands the model goes through, unless `HAPAX_CASES` says; fewer where requests are slow.
    fn model_cases(&self) -> u64 {
        15
    }
}

/// A memory journal of its own.
#[derive(Debug, Default)]
pub struct MemoryJournalHarness(MemoryJournal);

impl MemoryJournalHarness {
    /// An empty one.
    pub fn new() -> Self {
        MemoryJournalHarness::default()
    }
}

#[async_trait]
impl JournalHarness for MemoryJournalHarness {
    type Journal = MemoryJournal;

    async fn open(&self, settings: JournalSettings) -> MemoryJournal {
        self.0.reopened(settings)
    }
}
