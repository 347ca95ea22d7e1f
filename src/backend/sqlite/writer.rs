//! The single writer thread.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rusqlite::Connection;

use super::connect::{begin, commit, patiently, roll_back};
use super::ledger_tx::{LedgerTx, Memo};
use super::requests::{self, Kind, Work};
use crate::clock::Clock;
use crate::error::Result;

/// The most requests in one transaction.
const GROUP_MAX: usize = 64;

/// The requests to this thread work on the ledger's rows.
pub(super) enum Rows {}

impl Kind for Rows {
    type Context<'c> = LedgerTx<'c>;
}

/// Sends requests to the writer thread.
pub(super) type Requests = requests::Requests<Rows>;

/// Starts the thread. It ends when its requests are dropped.
pub(super) fn start(
    conn: Connection,
    clock: Arc<dyn Clock>,
) -> std::io::Result<(Requests, std::thread::JoinHandle<()>)> {
    let (send, receive) = Requests::new();
    let mut writer = Writer { conn, memo: Memo::default(), clock };
    let thread = std::thread::Builder::new()
        .name("hapax-sqlite-write".into())
        .spawn(move || writer.serve(&receive))?;
    Ok((send, thread))
}

struct Writer {
    conn: Connection,
    memo: Memo,
    clock: Arc<dyn Clock>,
}

impl Writer {
    fn serve(&mut self, requests: &Receiver<Box<dyn Work<Rows>>>) {
        while let Ok(first) = requests.recv() {
            requests::handle(requests::group(first, requests, GROUP_MAX), |group| self.transact(group));
        }
    }

    fn transact(&mut self, group: &mut [Box<dyn Work<Rows>>]) -> Result<()> {
        patiently(|| {
            let result = self.once(group);
            if result.is_err() {
                roll_back(&self.conn);
                self.memo = Memo::default(); // it may cache what was just rolled back
            }
            result
        })
    }

    fn once(&mut self, group: &mut [Box<dyn Work<Rows>>]) -> Result<()> {
        begin(&self.conn, "beginning a transaction")?;
        self.memo.refresh(&self.conn)?;
        let mut ledger_tx = LedgerTx::new(&self.conn, &mut self.memo, &*self.clock);
        for work in group {
            work.run(&mut ledger_tx)?;
        }
        ledger_tx.finish()?;
        commit(&self.conn, "committing")
    }
}
