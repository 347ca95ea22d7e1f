//! Keyed writes: a client's retry never writes twice.
//!
//! A client sends a key with each write (`Idempotency-Key`), and the same key with every retry. The
//! first request runs; every later one gets the answer of the first.
//!
//! ```text
//! request ─▶ begin(tenant, key, fingerprint) ─┬─ First ──▶ run it ──▶ finish(answer)
//!                                             ├─ Done ──▶ the original answer
//!                                             ├─ Running ──▶ 409, or wait
//!                                             ├─ Mismatch ──▶ 422: the key belongs to another request
//!                                             ├─ OutcomeUnknown ──▶ 409: a person decides
//!                                             └─ Expired ──▶ 410: too old to know
//! ```
//!
//! [`Keys`] is the store: [`MemoryKeys`], and with their features `SqliteKeys` and `PgKeys`. Keys
//! have tables of their own, so that they are swept without touching what was written.
//!
//! | mode | promise | how |
//! |---|---|---|
//! | transactional | exactly once: the key, the writes and the answer commit together | `PgKeys::begin_in`, `SqliteKeys::begin_in`, or the SQL functions `key_begin` and `key_finish` in your own transaction |
//! | leased | one run at a time; after a crash [`AfterFailure`] decides whether it runs again | [`Keys::begin`] … [`Keys::finish`] |
//!
//! With the feature `axum`, `KeyedLayer` does all of this for the routes of an axum service.
//!
//! The rules (`decide.rs`) are pure: they get a row and the store's time. The contract uses names, and
//! nonces and tokens of the ledger; it asks no ledger, and a store may touch its own tables only. Of
//! all files here only the layer's `tx.rs` knows a database.
//!
//! ```
//! use hapax::keyed::{Answer, Begin, Begun, IdempotencyKey, Keys, MemoryKeys, RequestParts, RequestFingerprint};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let keys = MemoryKeys::default();
//! let request = RequestParts { method: "POST", target: "/orders", body: b"{}", ..Default::default() };
//! let fingerprint = RequestFingerprint::of(keys.secret(), &request);
//! let begin = Begin::new(None, IdempotencyKey::now_v7(), fingerprint.clone());
//! let Begun::First(lease) = keys.begin(&begin).await? else { panic!("a fresh key") };
//! keys.finish(&lease, &Answer::new(201, "order 17")).await?;
//! // The retry: the same key and request.
//! let retry = Begin::new(None, begin.key.clone(), fingerprint);
//! let Begun::Done(kept) = keys.begin(&retry).await? else { panic!("it is done") };
//! assert_eq!((kept.answer.status, &kept.answer.body[..]), (201, &b"order 17"[..]));
//! # Ok(()) }
//! ```

mod answer;
mod begin;
pub(crate) mod decide;
mod fingerprint;
mod key;
#[cfg(feature = "axum")]
mod layer;
mod state;
pub(crate) mod sweep;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use answer::{ANSWER_BYTES_MAX, Answer, KEPT_HEADERS};
pub(crate) use begin::check_lease;
pub use begin::{AfterFailure, Begin, Begun, Decided, Ended, Kept, KeyLease, Resolution};
#[cfg(feature = "axum")]
pub(crate) use begin::{LEASE_MAX, LEASE_MIN};
pub use fingerprint::{RequestFingerprint, RequestParts};
pub use key::{IdempotencyKey, KEY_CHARS_MAX};
#[cfg(all(feature = "axum", feature = "sqlite"))]
pub use layer::KeyedSqlite;
#[cfg(all(feature = "axum", feature = "postgres"))]
pub use layer::KeyedTx;
#[cfg(feature = "axum")]
pub use layer::{Caller, KeyedLayer, KeyedService, NotKept, TransactionalKeys};
pub use state::KeyState;
pub use sweep::{KeySweep, KeySweeper, RETENTION, SweptKeys};

pub use crate::backend::memory::keys::MemoryKeys;

use crate::clock::Time;
use crate::error::Result;
use crate::id::Tenant;
use crate::ledger::Token;

/// The codes of the problems that the layer answers with, besides those of [`Error`](crate::Error).
/// Each has a page in `docs/errors/`.
pub const PROBLEMS: [&str; 14] = [
    "key-missing",
    "key-invalid",
    "body-unreadable",
    "body-too-large",
    "key-mismatch",
    "key-running",
    "outcome-unknown",
    "key-expired",
    "answer-erased",
    "answer-too-large",
    "handler-failed",
    "handler-timeout",
    "transaction-in-use",
    "transaction-missing",
];

/// What a store knows about a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyStatus {
    /// A request with it runs.
    Running {
        /// When its lease ends; `None` if an open transaction holds it.
        until: Option<Time>,
    },
    /// A request with it began and its outcome is unknown; it runs again only when a person or its
    /// time limit decides so.
    OutcomeUnknown {
        /// When it began.
        since: Time,
    },
    /// A request with it began, failed, and may run again.
    Free,
    /// It has an answer.
    Done(Kept),
    /// It is a UUIDv7 from before the last sweep's horizon: whatever it did was forgotten.
    Expired,
    /// No request with it was kept, and none runs.
    Unknown,
}

impl KeyStatus {
    /// A stable word for the status.
    pub fn word(&self) -> &'static str {
        match self {
            KeyStatus::Running { .. } => KeyState::Running.label(),
            KeyStatus::OutcomeUnknown { .. } => KeyState::OutcomeUnknown.label(),
            KeyStatus::Free => KeyState::Free.label(),
            KeyStatus::Done(_) => KeyState::Done.label(),
            KeyStatus::Expired => "expired",
            KeyStatus::Unknown => "unknown",
        }
    }
}

/// A key as listed, without its answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyEntry {
    /// Whose key.
    pub tenant: Option<Tenant>,
    /// The key.
    pub key: IdempotencyKey,
    /// Its state when it was listed.
    pub state: KeyState,
    /// The token of its last run, or of what ended that: a release, or a person's decision.
    pub token: Token,
    /// When that run began.
    pub begun_at: Time,
    /// When its answer was stored.
    pub settled_at: Option<Time>,
    /// The status of its answer.
    pub status: Option<u16>,
    /// The last decision of a person about it.
    pub resolved: Option<Resolved>,
}

/// A decision about a key whose outcome was unknown, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resolved {
    /// When, by the store's clock.
    pub at: Time,
    /// Who decided.
    pub by: String,
    /// Why.
    pub reason: String,
}

/// Which keys to list, in the order of tenant and key. A key that an open transaction has begun is not
/// among them yet.
#[derive(Debug, Clone, Default)]
pub struct ListKeys {
    /// Only those of this tenant (`Some(None)`: of no tenant); `None` lists all tenants'.
    pub tenant: Option<Option<Tenant>>,
    /// Only keys that have no answer.
    pub open_only: bool,
    /// Only keys after this one, for the next page.
    pub after: Option<(Option<Tenant>, IdempotencyKey)>,
    /// The most keys to return; 0 means 100.
    pub limit: usize,
}

impl ListKeys {
    pub(crate) fn limit(&self) -> usize {
        if self.limit == 0 { 100 } else { self.limit.min(10_000) }
    }

    /// The tenant as it is stored, where no tenant is the empty text.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn tenant_text(&self) -> Option<&str> {
        self.tenant.as_ref().map(|tenant| tenant.as_ref().map_or("", Tenant::as_str))
    }
}

/// What a store of keys can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeysCapabilities {
    /// The name of the backend: `memory`, `sqlite`, `postgres`.
    pub backend: &'static str,
    /// Whether answers survive a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
    /// Whether keys can commit with the caller's own writes.
    pub transactional: bool,
}

/// The store's clock and what its sweeps have forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeysInfo {
    /// The current time by the store's clock.
    pub now: Time,
    /// A UUIDv7 key from before this time that is not found is expired.
    pub horizon: Option<Time>,
    /// When the last sweep began.
    pub swept_at: Option<Time>,
}

/// A store of keys.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. At most one request of a (tenant, key) runs at a time, across tasks, processes and machines:
///    of concurrent `begin`s one is `First`.
/// 2. Keys are unique for each tenant. Equal keys of two tenants never meet, and one tenant learns
///    nothing of the other's.
/// 3. A key that belongs to another request (other fingerprint) is a `Mismatch`, whatever its state
///    but that of clause 8. It says which parts differ, and reveals nothing else of the stored
///    request or answer.
/// 4. A key with an answer is `Done` with the original answer, byte for byte, for the whole
///    retention.
/// 5. `finish`, `extend` and `release` carry the token. A stale token changes nothing and gets
///    `Fenced`. Finishing again with the token that finished is Ok and changes nothing. A release
///    and a person's decision also end the token, and the nonce of its `begin`: a late copy of that
///    call changes nothing, and gets the key's current state, or `Running`; never `First`.
/// 6. The same `begin` again, under its nonce, gets the same token while it runs, and its own answer
///    (`mine`) once it is done. So a lost acknowledgement is resolved by repeating the call.
/// 7. Leases end by the store's clock. After that, `rerun` makes the next `begin` `First` with a
///    higher token; under `hold` it is `OutcomeUnknown` until `resolve` or the time limit decides.
///    Who decided, and why, is stored in the same step.
/// 8. A run that ended without an answer is released: one that did nothing can run again at once,
///    one whose outcome is unknown follows `after_failure`. If no run of a key did anything, the
///    key is free: the next request may be another. A run that failed, or whose lease has ended,
///    binds the key to its request.
/// 9. A sweep removes keys that were settled longer ago than the retention, and no running or held
///    key. It stores up to which time it has removed keys (the horizon): a UUIDv7 key from before
///    the horizon that is not found is `Expired`, never `First`, whatever the store's clock says
///    later. So a UUIDv7 key from a clock that is ahead is kept until its own time is older than
///    the retention; one that is not found and whose time is more than 28 days ahead of the store's
///    is `Ahead`, and never begun. For other keys protection ends with the retention. The horizon
///    never goes back. A sweep has removed all of them when it returns, or did nothing (`skipped`),
///    or is an error; requests do not prevent it.
/// 10. `get`, `entry` and `list` change nothing.
/// 11. Bad input is refused with a sentence and changes nothing. The nil UUID is not a tenant.
/// 12. In a caller's transaction, a key and its answer appear with the commit and never existed after
///     a rollback. Meanwhile a second request gets `Running` after a short wait, and `get` never says
///     `Unknown`. A transaction that
///     commits without an answer leaves `OutcomeUnknown`, never a key that runs again. Where the
///     store has no transactions, this is `Unsupported`.
#[async_trait]
pub trait Keys: fmt::Debug + Send + Sync + 'static {
    /// Begins a request under its key, leased.
    async fn begin(&self, begin: &Begin) -> Result<Begun>;

    /// Extends a lease to `lease` from now. `Fenced`: it was lost.
    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()>;

    /// Stores the answer. `Fenced`: the lease was lost, and nothing was stored.
    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()>;

    /// Ends a run without an answer. `Fenced`: the lease was lost, and nothing was changed.
    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()>;

    /// What is known about a key. `Unknown` and `Free` are returned only if no open transaction has
    /// begun it: if that cannot be determined in time, this is
    /// [`Error::Contended`](crate::Error::Contended).
    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus>;

    /// Decides about a key whose outcome is unknown, for an operator. The token is that of
    /// [`entry`](Keys::entry). `Conflict`: its outcome is not, or no longer, unknown.
    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()>;

    /// One key as it is listed.
    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>>;

    /// Lists keys.
    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>>;

    /// Forgets old keys, in batches. If another sweep runs, it does nothing.
    async fn sweep(&self, sweep: &KeySweep) -> Result<SweptKeys>;

    /// The store's clock and what it has forgotten.
    async fn info(&self) -> Result<KeysInfo>;

    /// Answers once the store could begin a request: it asks whatever serves writes, and changes
    /// nothing. For probes.
    async fn probe(&self) -> Result<()> {
        self.info().await.map(drop)
    }

    /// The secret under which requests are hashed: made with the store, never shown.
    fn secret(&self) -> &[u8; 32];

    /// What this store can promise.
    fn capabilities(&self) -> KeysCapabilities;
}

#[async_trait]
impl<K: Keys + ?Sized> Keys for Arc<K> {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        (**self).begin(begin).await
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        (**self).extend(of, lease).await
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        (**self).finish(of, answer).await
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        (**self).release(of, ended).await
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        (**self).get(tenant, key).await
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        (**self).resolve(of, how, who).await
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        (**self).entry(tenant, key).await
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        (**self).list(which).await
    }

    async fn sweep(&self, sweep: &KeySweep) -> Result<SweptKeys> {
        (**self).sweep(sweep).await
    }

    async fn info(&self) -> Result<KeysInfo> {
        (**self).info().await
    }

    async fn probe(&self) -> Result<()> {
        (**self).probe().await
    }

    fn secret(&self) -> &[u8; 32] {
        (**self).secret()
    }

    fn capabilities(&self) -> KeysCapabilities {
        (**self).capabilities()
    }
}
