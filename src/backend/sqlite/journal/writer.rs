//! The single writer thread.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rusqlite::Connection;
use tokio::sync::watch;

use super::append;
use crate::backend::sqlite::connect::{begin, commit, patiently, roll_back};
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::requests::{self, Kind, Work};
use crate::clock::{Clock, Time};
use crate::error::{Error, Result};
use crate::journal::{Append, Appended, JournalSettings};

/// The most requests in one transaction.
const GROUP_MAX: usize = 256;

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

/// The requests to this thread work on the journal.
pub(super) enum Rows {}

impl Kind for Rows {
    type Context<'c> = JournalTx<'c>;
}

/// Sends requests to the writer thread.
pub(super) type Requests = requests::Requests<Rows>;

/// Starts the thread. It ends when its requests are dropped.
pub(super) fn start(
    conn: Connection,
    clock: Arc<dyn Clock>,
    committed: watch::Sender<u64>,
    journal: Arc<str>,
) -> std::io::Result<(Requests, std::thread::JoinHandle<()>)> {
    let (send, receive) = Requests::new();
    let writer = Writer { conn, clock, committed, journal };
    let thread = std::thread::Builder::new()
        .name("hapax-journal-write".into())
        .spawn(move || writer.serve(&receive))?;
    Ok((send, thread))
}

struct Writer {
    conn: Connection,
    clock: Arc<dyn Clock>,
    committed: watch::Sender<u64>,
    journal: Arc<str>,
}

impl Writer {
    fn serve(&self, requests: &Receiver<Box<dyn Work<Rows>>>) {
        while let Ok(first) = requests.recv() {
            requests::handle(requests::group(first, requests, GROUP_MAX), |group| self.transact(group));
        }
    }

    fn transact(&self, group: &mut [Box<dyn Work<Rows>>]) -> Result<()> {
        patiently(|| {
            let result = self.once(group);
            if result.is_err() {
                roll_back(&self.conn);
            }
            result
        })
    }

    fn once(&self, group: &mut [Box<dyn Work<Rows>>]) -> Result<()> {
        begin(&self.conn, "beginning a transaction of the journal")?;
        // Read the clock under the write lock, so that a later writer has a later time.
        let mut tx =
            JournalTx { conn: &self.conn, now: self.clock.now(), last: None, journal: &self.journal };
        for work in group {
            work.run(&mut tx)?;
        }
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
