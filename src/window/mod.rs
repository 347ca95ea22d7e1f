//! The window: a best-effort filter with a time limit in front of the ledger.
//!
//! The window is *read* before the claim, and an event it has [seen](Window::seen) is skipped
//! without asking the ledger. It is *written* only after the event is done
//! ([`remember`](Window::remember)), so a run that fails or dies is never skipped. It is never the
//! only guard: an event it does not know is claimed as usual, and what it knows is believed only
//! within one epoch of the ledger ([`Claims::epoch`](crate::Claims::epoch)). A ledger that was
//! restored or failed over has another epoch, so everything an older window remembers is a miss.
//! The caller names the epoch. A consumer does so automatically, and believes "seen" only if the
//! ledger, asked *after* the window, still has that epoch.
//!
//! ```
//! use hapax::window::{MemoryWindow, Window, WindowSettings};
//! use hapax::{EventId, Scope, ledger::Identity};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let window = MemoryWindow::new(WindowSettings::new("1"), 100_000)?;
//! let mine = [Identity::new(Scope::new("mailer")?, EventId::new("order-17-paid")?).into()];
//! assert_eq!(window.seen(&mine).await?, [false]);
//! window.remember(&mine).await?; // after it is done, never before
//! assert_eq!(window.seen(&mine).await?, [true]);
//! # Ok(()) }
//! ```
//!
//! A window uses names, the ledger's identities and telemetry. It never asks a ledger.

mod memory;
mod outage;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use memory::MemoryWindow;
pub use outage::{OnOutage, OutageWindow};

use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::ledger::{Epoch, Finding, Identity, Level};

/// An event as a window is asked about it, and as it remembers it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sighting {
    /// The event's identity.
    pub identity: Identity,
    /// The event's fingerprint, if known. An id that is reused for something else was not seen.
    pub fingerprint: Option<Fingerprint>,
    /// The ledger's epoch: its current one for a query; for an event that is done, the one *before*
    /// it was claimed.
    pub epoch: Option<Epoch>,
}

impl From<Identity> for Sighting {
    fn from(identity: Identity) -> Self {
        Sighting { identity, fingerprint: None, epoch: None }
    }
}

/// A best-effort filter with a time limit.
///
/// # Contract
///
/// 1. An identity is seen only if it was remembered under the same epoch (the ledger's, in the
///    [`Sighting`], and the window's own, in its settings), no longer ago than the time limit, and
///    with the same fingerprint, if both have one: the ledger decides what to do with a reused id.
/// 2. Two identities never share a key: tenant, scope and id are each part of it.
/// 3. Both calls take batches and cost one round trip each.
/// 4. It may forget at any time. Nothing may depend on its memory.
#[async_trait]
pub trait Window: fmt::Debug + Send + Sync + 'static {
    /// Which of these were done before, as far as the window knows, in the order given.
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>>;

    /// Remembers events that are done. Call it after the ledger has recorded them, never before.
    async fn remember(&self, sightings: &[Sighting]) -> Result<()>;

    /// Checks the window's settings. `redelivery` is how far back anything can be delivered again:
    /// the longest retention of the topics, or the age up to which dead letters are redriven.
    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding>;
}

#[async_trait]
impl<W: Window + ?Sized> Window for Arc<W> {
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>> {
        (**self).seen(sightings).await
    }
    async fn remember(&self, sightings: &[Sighting]) -> Result<()> {
        (**self).remember(sightings).await
    }
    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding> {
        (**self).check(redelivery).await
    }
}

/// Settings of a window.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WindowSettings {
    /// A manually set epoch: anything remembered under another one is a miss. For changes that no
    /// ledger notices, such as restored copies of its files.
    pub epoch: String,
    /// How long the window remembers.
    pub ttl: Duration,
}

impl WindowSettings {
    /// The shortest time limit.
    pub const TTL_MIN: Duration = Duration::from_secs(3600);
    /// The longest time limit.
    pub const TTL_MAX: Duration = Duration::from_secs(30 * 86_400);
    /// The longest epoch, in bytes. It is stored with every key.
    pub const EPOCH_BYTES_MAX: usize = 64;

    /// An epoch, with a time limit of one day.
    pub fn new(epoch: impl Into<String>) -> Self {
        WindowSettings { epoch: epoch.into(), ttl: Duration::from_secs(86_400) }
    }

    /// The same with another time limit.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        WindowSettings { ttl, ..self }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !(Self::TTL_MIN..=Self::TTL_MAX).contains(&self.ttl) {
            return Err(Error::Config(format!(
                "the window's time limit is {} s; it takes {} s (an hour) to {} s (30 days)",
                self.ttl.as_secs(),
                Self::TTL_MIN.as_secs(),
                Self::TTL_MAX.as_secs()
            )));
        }
        if self.epoch.is_empty() || self.epoch.len() > Self::EPOCH_BYTES_MAX {
            return Err(Error::Config(format!(
                "the window's epoch has {} bytes; it needs 1 to {}",
                self.epoch.len(),
                Self::EPOCH_BYTES_MAX
            )));
        }
        Ok(())
    }

    /// Warns if the window forgets before redelivery ends. The rest passes to the ledger, which is
    /// fine but worth knowing.
    pub(crate) fn check_redelivery(&self, redelivery: Option<Duration>) -> Finding {
        let hours = |time: Duration| time.as_secs().div_ceil(3600);
        let ttl = hours(self.ttl);
        match redelivery {
            Some(redelivery) if self.ttl < redelivery => Finding {
                level: Level::Warning,
                check: "window.ttl",
                message: format!(
                    "the window remembers {ttl} h, and events can be delivered again for {} h: older ones pass it and \
                     only the ledger stops them",
                    hours(redelivery)
                ),
            },
            _ => Finding {
                level: Level::Fine,
                check: "window.ttl",
                message: format!("the window remembers {ttl} h"),
            },
        }
    }
}

/// The key of an identity: `dedup:event:TENANT:SCOPE:ID`, each part percent-encoded, so that no two
/// identities share one. Without a tenant that part is empty, which no tenant's name is.
///
/// ```
/// use hapax::{EventId, Scope, Tenant, ledger::Identity};
/// let mut mine = Identity::new(Scope::new("a:b").unwrap(), EventId::new("7").unwrap());
/// assert_eq!(hapax::window::key(&mine), "dedup:event::a%3Ab:7");
/// mine.tenant = Some(Tenant::new("acme").unwrap());
/// assert_eq!(hapax::window::key(&mine), "dedup:event:acme:a%3Ab:7");
/// ```
pub fn key(identity: &Identity) -> String {
    use std::fmt::Write as _;
    const PLAIN: percent_encoding::AsciiSet =
        percent_encoding::NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'~').remove(b'-');
    let mut key = String::from("dedup:event");
    let tenant = identity.tenant.as_ref().map_or("", |tenant| tenant.as_str());
    for part in [tenant, identity.scope.as_str(), &identity.id.as_str()] {
        let _ = write!(key, ":{}", percent_encoding::utf8_percent_encode(part, &PLAIN)); // cannot fail
    }
    key
}
