//! What a journal needs from an object store: five operations and a clock.

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;

use crate::clock::Time;
use crate::error::Result;

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its full name.
    pub name: String,
    /// When it was written, by the store's clock: at this time or less than [`Objects::grain_ms`]
    /// later.
    pub at: Time,
}

/// The store's time, as precisely as it is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// The earliest it can be.
    pub low: Time,
    /// The latest it can be.
    pub high: Time,
    /// A value in between, for display. It does not go back.
    pub about: Time,
}

/// An object store.
///
/// # Contract
///
/// 1. [`create`](Objects::create) writes an object whole or not at all, and only if none of that
///    name exists: of concurrent callers one succeeds.
/// 2. What was written is visible to every `get` and `list` that begins afterwards (S3 since
///    December 2020).
/// 3. [`list`](Objects::list) is in the order of the names' bytes.
/// 4. An `Err` leaves open whether the write took place.
///
/// Opening a journal or an archive tests the first three, and refuses a store that fails.
#[async_trait]
pub trait Objects: fmt::Debug + Send + Sync + 'static {
    /// Writes an object under a new name; returns false if the name is taken.
    async fn create(&self, name: &str, body: Bytes) -> Result<bool>;

    /// Writes an object, replacing an existing one.
    async fn put(&self, name: &str, body: Bytes) -> Result<()>;

    /// An object's content.
    async fn get(&self, name: &str) -> Result<Option<Bytes>>;

    /// Objects whose names begin with `prefix` and sort after `after`, at most `limit` (up to 1000
    /// cost one request).
    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>>;

    /// Deletes an object. It is not an error if there is none.
    async fn delete(&self, name: &str) -> Result<()>;

    /// The store's clock.
    async fn now(&self) -> Result<Now>;

    /// The resolution of the times in a listing, in milliseconds.
    fn grain_ms(&self) -> u64;

    /// How far apart the clocks of the store's own machines may be, in milliseconds.
    fn skew_ms(&self) -> u64;

    /// Whether written objects survive a crash of the machine.
    fn durable(&self) -> bool;

    /// A description for people, without secrets.
    fn about(&self) -> String;
}
