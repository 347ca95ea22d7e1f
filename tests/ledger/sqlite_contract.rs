//! The SQLite ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "sqlite"))]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::sqlite::SqliteLedger;
use hapax::clock::ManualClock;
use hapax::ledger::{Claim, Marker, Outcome, Settings, Settle, Settled};
use hapax::testing::{Harness, noon};
use hapax::{Result, Scope};
use rusqlite::TransactionBehavior;

/// A fresh file and a clock that moves only when told to.
struct SqliteHarness {
    clock: ManualClock,
    dir: tempfile::TempDir,
}

impl SqliteHarness {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory for the test");
        SqliteHarness { clock: ManualClock::new(noon()), dir }
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("ledger.db")
    }
}

#[async_trait]
impl Harness for SqliteHarness {
    type Ledger = SqliteLedger;

    async fn open(&self, settings: Settings) -> SqliteLedger {
        SqliteLedger::open_with_clock(self.file(), settings, Arc::new(self.clock.clone()))
            .expect("the file opens")
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn in_transaction(
        &self,
        ledger: &SqliteLedger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>> {
        let mut connection = rusqlite::Connection::open(self.file()).expect("a connection");
        connection.busy_timeout(Duration::from_secs(120)).expect("a setting");
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("a transaction");
        let outcomes = ledger.claim_in(&tx, claims)?;
        if commit {
            tx.commit().expect("a commit");
        }
        Ok(outcomes)
    }

    async fn settle_in_transaction(
        &self,
        ledger: &SqliteLedger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>> {
        let mut connection = rusqlite::Connection::open(self.file()).expect("a connection");
        connection.busy_timeout(Duration::from_secs(120)).expect("a setting");
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("a transaction");
        let answers = ledger.settle_in(&tx, settles)?;
        ledger.set_markers_in(&tx, markers.0, markers.1)?;
        if commit {
            tx.commit().expect("a commit");
        }
        Ok(answers)
    }

    async fn was_committed(&self, ledger: &SqliteLedger, claim: &Claim) -> Result<bool> {
        ledger.was_committed(claim)
    }
}

hapax::conformance!(sqlite, SqliteHarness::new());
