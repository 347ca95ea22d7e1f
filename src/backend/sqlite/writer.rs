//! The single writer of the ledger's file.

use std::sync::Arc;

use rusqlite::Connection;

use super::connect::{begin, commit};
use super::ledger_tx::{LedgerTx, Memo};
use super::requests;
use crate::clock::Clock;
use crate::error::Result;

/// Sends requests to the writer thread.
pub(super) type Requests = requests::Requests<Writer>;

pub(super) struct Writer {
    conn: Connection,
    memo: Memo,
    clock: Arc<dyn Clock>,
}

impl Writer {
    pub(super) fn new(conn: Connection, clock: Arc<dyn Clock>) -> Self {
        Writer { conn, memo: Memo::default(), clock }
    }
}

impl requests::Kind for Writer {
    type Context<'c> = LedgerTx<'c>;
}

impl requests::Writer for Writer {
    const THREAD: &'static str = "hapax-sqlite-write";
    const GROUP_MAX: usize = 64;

    fn conn(&self) -> &Connection {
        &self.conn
    }

    fn transact(&mut self, mut run: impl FnMut(&mut LedgerTx<'_>) -> Result<()>) -> Result<()> {
        begin(&self.conn, "beginning a transaction")?;
        self.memo.refresh(&self.conn)?;
        let mut ledger_tx = LedgerTx::new(&self.conn, &mut self.memo, &*self.clock);
        run(&mut ledger_tx)?;
        ledger_tx.finish()?;
        commit(&self.conn, "committing")
    }

    fn rolled_back(&mut self) {
        self.memo = Memo::default(); // it may cache what was just rolled back
    }
}
