//! What a journal needs of an object store: five verbs and a clock.

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;

use crate::clock::Time;
use crate::error::Result;

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its whole name.
    pub name: String,
    /// When it was written, by the store's clock; not before this, and less than [`Objects::grain_ms`] after it.
    pub at: Time,
}

/// What the store's clock shows: as exactly as it can be told from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// It is not earlier than this,
    pub low: Time,
    /// and not later.
    pub high: Time,
    /// In between: what is told to people. It does not go back.
    pub about: Time,
}

/// A place for objects.
///
/// # Contract
///
/// 1. [`create`](Objects::create) writes an object whole or not at all, and only if there is none of that name: of those who try at
///    the same time one succeeds.
/// 2. What was written is there for every `get` and every `list` that begins afterwards (S3 since December 2020).
/// 3. [`list`](Objects::list) is in the order of the names' bytes.
/// 4. An `Err` leaves open whether the write took place.
///
/// Who opens a journal, or archives one, tries the first three, and refuses a store that cannot do them.
#[async_trait]
pub trait Objects: fmt::Debug + Send + Sync + 'static {
    /// Writes an object of a new name; false if the name is taken.
    async fn create(&self, name: &str, body: Bytes) -> Result<bool>;

    /// Writes an object, whatever was there.
    async fn put(&self, name: &str, body: Bytes) -> Result<()>;

    /// An object's content.
    async fn get(&self, name: &str) -> Result<Option<Bytes>>;

    /// Objects whose names begin with `prefix` and come behind `after`, at most `limit` (up to 1000 cost one request).
    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>>;

    /// Removes an object; one that is not there is no error.
    async fn delete(&self, name: &str) -> Result<()>;

    /// The store's clock.
    async fn now(&self) -> Result<Now>;

    /// How coarse the times of a listing are, in milliseconds.
    fn grain_ms(&self) -> u64;

    /// How far the clocks of the store's own machines may be apart, in milliseconds.
    fn skew_ms(&self) -> u64;

    /// Whether what was written survives a crash of the machine.
    fn durable(&self) -> bool;

    /// What it is, for people; without secrets.
    fn about(&self) -> String;
}
