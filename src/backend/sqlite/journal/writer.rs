//! The single writer of the journal's file.

use std::sync::Arc;

use rusqlite::Connection;
use tokio::sync::watch;

use super::append;
use crate::backend::sqlite::connect::{begin, commit};
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::requests;
use crate::clock::{Clock, Time};
use crate::error::{Error, Result};
use crate::journal::{Append, Appended, JournalSettings};

/// One transaction's view of the journal.
pub(super) struct JournalTx<'c> {
    pub(super) conn: &'c Connection,
    /// The time at which the transaction got the write lock.
    pub(super) now: Time,
    /// The last position, once it was read.
    last: Option<u64>,
    journal: &'c str,
}

impl JournalTx<'_> {
    /// Appends. The inner error says what is wrong with the append.
    pub(super) fn append(&mut self, append: &Append, settings: &JournalSettings) -> Result<Result<Appended>> {
        if self.last.is_none() {
            let entered = append::enter(self.conn, self.journal).doing("appending")?;
            self.last = Some(entered.ok_or_else(|| Error::Corrupt("the journal has become another".into()))?);
        }
        let mut last = self.last.unwrap_or_default();
        let answer = append::append(self.conn, append, settings, self.now, &mut last);
        self.last = Some(last);
        answer
    }
}

/// Sends requests to the writer thread.
pub(super) type Requests = requests::Requests<Writer>;

pub(super) struct Writer {
    pub(super) conn: Connection,
    pub(super) clock: Arc<dyn Clock>,
    /// The last position that was committed.
    pub(super) committed: watch::Sender<u64>,
    /// The journal's id.
    pub(super) journal: Arc<str>,
}

impl requests::Kind for Writer {
    type Context<'c> = JournalTx<'c>;
}

impl requests::Writer for Writer {
    const THREAD: &'static str = "hapax-journal-write";
    const GROUP_MAX: usize = 256;

    fn conn(&self) -> &Connection {
        &self.conn
    }

    fn transact(&mut self, mut run: impl FnMut(&mut JournalTx<'_>) -> Result<()>) -> Result<()> {
        begin(&self.conn, "beginning a transaction of the journal")?;
        // Read the clock under the write lock, so that a later writer has a later time.
        let mut tx =
            JournalTx { conn: &self.conn, now: self.clock.now(), last: None, journal: &self.journal };
        run(&mut tx)?;
        let last = tx.last;
        crate::crash_point!("journal.commit.before");
        commit(&self.conn, "committing to the journal")?;
        crate::crash_point!("journal.commit.after");
        if let Some(last) = last {
            self.committed.send_if_modified(|known| std::mem::replace(known, last) != last);
        }
        Ok(())
    }
}
