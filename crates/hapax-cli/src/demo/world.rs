//! The files of a demo, and what everything in them is called.

use std::path::{Path, PathBuf};

use hapax::Topic;
use hapax::backend::sqlite::{SqliteJournal, SqliteLedger, SqliteReadModel, SqliteRecords};
use hapax::bus::{Bus as _, EmbeddedBus, TopicSettings};
use hapax::journal::JournalSettings;
use hapax::ledger::Settings;
use hapax::records::{ModuleSlug, Modules as _};

use super::carrier::Carrier;
use crate::failure::Failure;

/// The topics.
pub const PAYMENTS: &str = "payments";
pub const PARCELS: &str = "parcels";
/// The module of the orders, and the topic of their changes.
pub const ORDERS: &str = "orders";
/// The scopes of the workers: whose effect it is.
pub const BILLING: &str = "billing";
pub const SHIPPING: &str = "shipping";
/// The relay.
pub const RELAY: &str = "shop";
/// Partitions of each topic.
pub const PARTITIONS: i32 = 4;

/// A directory with the files of a demo. Ledger, journal and bus have the names that the other
/// commands look for in `--data`.
#[derive(Debug, Clone)]
pub struct World(PathBuf);

impl World {
    pub fn at(dir: &Path) -> Self {
        World(dir.to_owned())
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// The ledger, and the charges: claim and charge are one transaction.
    pub fn ledger(&self) -> PathBuf {
        self.0.join("ledger.db")
    }

    pub fn journal(&self) -> PathBuf {
        self.0.join("journal.db")
    }

    pub fn bus(&self) -> PathBuf {
        self.0.join(hapax::open::EMBEDDED_FILE)
    }

    /// The carrier's own data.
    pub fn carrier(&self) -> PathBuf {
        self.0.join("carrier.db")
    }

    /// The read model of the orders.
    pub fn reads(&self) -> PathBuf {
        self.0.join("reads.db")
    }

    /// While this file is there, the label printer for gift cards has no paper.
    pub fn no_paper(&self) -> PathBuf {
        self.0.join("no-paper")
    }

    /// What the workers log.
    pub fn log(&self) -> PathBuf {
        self.0.join("workers.log")
    }

    /// Makes the files.
    pub async fn make(&self) -> Result<(SqliteRecords, EmbeddedBus), Failure> {
        let failed = |e: rusqlite::Error| {
            Failure::dependency("unavailable", format!("the demo's files cannot be made: {e}"))
        };
        drop(SqliteLedger::open(self.ledger(), Settings::default())?);
        // Nothing in this table keeps an order from being charged twice.
        rusqlite::Connection::open(self.ledger())
            .and_then(|conn| {
                conn.execute_batch(
                    "CREATE TABLE charges (order_number INTEGER NOT NULL, customer TEXT NOT NULL, cents INTEGER NOT NULL)",
                )
            })
            .map_err(failed)?;
        drop(Carrier::open(&self.carrier()).map_err(failed)?);
        let bus = EmbeddedBus::open(self.bus())?;
        drop(SqliteReadModel::open(self.reads())?);
        for topic in [PAYMENTS, PARCELS, ORDERS] {
            bus.create_topic(&Topic::new(topic)?, TopicSettings::new(PARTITIONS)).await?;
        }
        let records = SqliteRecords::open(&SqliteJournal::open(self.journal(), JournalSettings::default())?)?;
        records.create_module(&ModuleSlug::new(ORDERS)?).await?;
        Ok((records, bus))
    }
}
