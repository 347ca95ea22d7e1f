//! Chooses the next number of an aggregate.
//!
//! Whatever the allocator says, a writer takes a number by creating the object that has it. So two
//! writers never get the same number, and a number that was reserved but not used is the next one
//! again. An allocator saves the search for the end of a chain, and shows in a database which
//! append is about to take place.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;

use super::chain::Tail;
use super::journal::Inner;
use super::name::Slot;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::journal::AggregateOf;

/// Where the next number comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocatorMode {
    /// A row per aggregate in PostgreSQL. Gives up: appending while that database is unavailable.
    /// Costs two small statements per append.
    Postgres,
    /// The objects alone. Gives up nothing. A process that has not seen an aggregate yet must find
    /// the end of its chain, which costs a hint, a listing and an object.
    S3,
    /// The caller: every event must have a seq, and is refused if that is not the next one. Gives
    /// up: appending without knowing the head.
    Off,
}

impl FromStr for AllocatorMode {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "postgres" => Ok(AllocatorMode::Postgres),
            "s3" | "legacy" => Ok(AllocatorMode::S3),
            "off" => Ok(AllocatorMode::Off),
            _ => Err(Error::Config(format!(
                "{text:?} is not an allocator; use postgres, s3 (or legacy) or off"
            ))),
        }
    }
}

impl fmt::Display for AllocatorMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AllocatorMode::Postgres => "postgres",
            AllocatorMode::S3 => "s3",
            AllocatorMode::Off => "off",
        })
    }
}

/// Which allocator to use, and where it is.
#[derive(Clone)]
#[non_exhaustive]
pub struct AllocatorSettings {
    /// The mode. `None` means PostgreSQL if a database is given, else the objects alone.
    pub mode: Option<AllocatorMode>,
    /// The PostgreSQL schema of its table.
    pub schema: String,
    /// The prefix of this journal's rows.
    pub handler_prefix: String,
    /// The database's URL.
    pub postgres_url: Option<String>,
}

impl Default for AllocatorSettings {
    fn default() -> Self {
        AllocatorSettings {
            mode: None,
            schema: "spice_event_registry".to_owned(),
            handler_prefix: "write_side".to_owned(),
            postgres_url: None,
        }
    }
}

/// Omits the database's password.
impl fmt::Debug for AllocatorSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocatorSettings")
            .field("mode", &self.mode)
            .field("schema", &self.schema)
            .field("handler_prefix", &self.handler_prefix)
            .field("postgres_url", &self.postgres_url.as_deref().map(crate::secret::hide_password))
            .finish()
    }
}

impl AllocatorSettings {
    /// The effective mode.
    pub fn mode(&self) -> AllocatorMode {
        let named = if self.postgres_url.is_some() { AllocatorMode::Postgres } else { AllocatorMode::S3 };
        self.mode.unwrap_or(named)
    }

    /// Opens the allocator; `None` if the mode needs none.
    pub(super) async fn open(&self, journal: &str) -> Result<Option<Box<dyn Allocator>>> {
        if self.mode() != AllocatorMode::Postgres {
            return Ok(None);
        }
        let Some(url) = &self.postgres_url else {
            return Err(Error::Config(
                "the allocator of the journal is postgres, but no database is named; name one, or choose s3"
                    .into(),
            ));
        };
        open_postgres(url, self, journal).await.map(Some)
    }
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &AllocatorSettings, journal: &str) -> Result<Box<dyn Allocator>> {
    Ok(Box::new(super::allocator_postgres::PgAllocator::open(url, settings, journal).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the real one
async fn open_postgres(_: &str, _: &AllocatorSettings, _: &str) -> Result<Box<dyn Allocator>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

/// Numbers that an append is about to take.
#[cfg_attr(not(feature = "postgres"), allow(dead_code))] // only a database reads them
#[derive(Debug, Clone)]
pub(super) struct Reservation {
    /// The end of the chain that they follow.
    pub(super) after: Tail,
    /// How many numbers.
    pub(super) count: u64,
    /// The id of the first event.
    pub(super) id: String,
    pub(super) fingerprint: Fingerprint,
}

/// What an allocator knows of an aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// The end of the chain as last reported.
    pub(super) tail: Tail,
    /// Whether an append after it was announced.
    pub(super) pending: bool,
}

#[async_trait]
pub(super) trait Allocator: fmt::Debug + Send + Sync + 'static {
    /// What the allocator knows of an aggregate.
    async fn known(&self, of: &AggregateOf) -> Result<Option<Known>>;

    /// Announces an append, replacing an earlier announcement that was not carried out. Returns
    /// false if the chain is already longer.
    async fn reserve(&self, of: &AggregateOf, reservation: &Reservation) -> Result<bool>;

    /// Reports the new end of the chain and clears the announcement.
    async fn settle(&self, of: &AggregateOf, tail: Tail) -> Result<()>;
}

impl Inner {
    /// Where to start looking for the chain's end. If the object of an announced number exists,
    /// this completes the append in the allocator; if not, the number is the next one again.
    pub(super) async fn complete(&self, allocator: &dyn Allocator, of: &AggregateOf) -> Result<Option<Slot>> {
        let Some(known) = allocator.known(of).await? else { return Ok(None) };
        if known.pending
            && let Some(link) = self.link(of, known.tail.next).await?
        {
            allocator.settle(of, link.tail(known.tail.next)).await?;
            return Ok(Some(known.tail.next));
        }
        Ok(known.tail.last)
    }

    /// Reports a finished append to the allocator. If that fails, the next append completes it.
    pub(super) async fn settle(&self, of: &AggregateOf, tail: Tail) {
        if let Some(allocator) = &self.allocator
            && let Err(e) = allocator.settle(of, tail).await
        {
            tracing::warn!("could not tell the allocator about an append to {of}: {}", e.chain());
        }
    }
}
