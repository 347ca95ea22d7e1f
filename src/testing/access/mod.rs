//! What every store of API tokens must pass. Cases are named after the clauses of the [`Access`] contract
//! (`a1_` … `a12_`).
//!
//! A store implements [`AccessHarness`] and is enrolled by one line; every case becomes a test of its own:
//!
//! ```text
//! hapax::access_conformance!(memory, MemoryAccessHarness::new());
//! ```

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::access::{
    Access, Actor, ApiToken, AuditEntry, Authentication, Grant, ListAudit, MemoryAccess, NewToken, Role,
};
use crate::clock::ManualClock;

pub mod audit;
mod cases;
pub mod mutants;
pub mod tokens;

pub use cases::NAMES;

/// A fresh storage of one backend.
#[async_trait]
pub trait AccessHarness: Send + Sync {
    /// The store under test.
    type Access: Access + Clone;

    /// Opens the storage once more, as another process would.
    async fn open(&self) -> Self::Access;

    /// Moves the store's own clock on.
    async fn advance(&self, by: Duration);
}

/// A memory store on a clock of its own.
#[derive(Debug)]
pub struct MemoryAccessHarness(MemoryAccess, ManualClock);

impl MemoryAccessHarness {
    /// An empty one.
    #[allow(clippy::new_without_default)] // harnesses are made by `new`
    pub fn new() -> Self {
        let clock = ManualClock::new(super::noon());
        MemoryAccessHarness(MemoryAccess::with_clock(Arc::new(clock.clone())), clock)
    }
}

#[async_trait]
impl AccessHarness for MemoryAccessHarness {
    type Access = MemoryAccess;

    async fn open(&self) -> MemoryAccess {
        self.0.clone()
    }

    async fn advance(&self, by: Duration) {
        self.1.advance(by);
    }
}

/// Someone.
pub fn by() -> Actor {
    Actor::new("tester", "because")
}

/// Makes a token.
pub async fn created(store: &impl Access, about: &NewToken) -> ApiToken {
    let token = ApiToken::generate();
    store.create(&token, about, &by()).await.expect("a token is created");
    token
}

/// Makes a token that may write.
pub async fn writer(store: &impl Access) -> ApiToken {
    created(store, &NewToken::new("shop", Role::Write)).await
}

/// What a store says about a token.
pub async fn said(store: &impl Access, token: &ApiToken) -> Authentication {
    store.authenticate(token.expose()).await.expect("a token can be looked for")
}

/// What a token permits, which must be good.
pub async fn granted(store: &impl Access, token: &ApiToken) -> Grant {
    match said(store, token).await {
        Authentication::Granted { grant, .. } => grant,
        other => panic!("{token:?} should be good, and is {other:?}"),
    }
}

/// All audit rows, newest first.
pub async fn all_rows(store: &impl Access) -> Vec<AuditEntry> {
    store.audit(&ListAudit { limit: 1000, ..ListAudit::default() }).await.expect("audit rows can be listed")
}
