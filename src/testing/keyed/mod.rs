//! What every store of keys must pass. Cases are named after the clauses of the [`Keys`] contract (`k1_` … `k12_`).
//!
//! A store implements [`KeysHarness`] and is enrolled by one line; every case becomes a test of its own:
//!
//! ```text
//! hapax::keys_conformance!(memory, MemoryKeysHarness::new());
//! ```

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::ManualClock;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::keyed::{
    Answer, Begin, Begun, Decided, IdempotencyKey, KeyLease, Keys, MemoryKeys, RequestFingerprint,
    RequestParts,
};

mod cases;
pub mod forget;
pub mod mutants;
pub mod once;
pub mod state;

pub use cases::NAMES;

/// A fresh storage of one backend.
#[async_trait]
pub trait KeysHarness: Send + Sync {
    /// The store under test.
    type Keys: Keys + Clone;

    /// Opens the storage once more, as another process would.
    async fn open(&self) -> Self::Keys;

    /// Moves the store's own clock on.
    async fn advance(&self, by: Duration);

    /// Begins a request in a transaction of the store's database, stores the answer in it if it is the first and there is
    /// one, and commits or rolls back.
    async fn in_transaction(
        &self,
        keys: &Self::Keys,
        begin: &Begin,
        answer: Option<&Answer>,
        commit: bool,
    ) -> Result<Begun>;
}

/// A memory store on a clock of its own.
#[derive(Debug)]
pub struct MemoryKeysHarness(MemoryKeys, ManualClock);

impl MemoryKeysHarness {
    /// An empty one.
    #[allow(clippy::new_without_default)] // harnesses are made by `new`
    pub fn new() -> Self {
        let clock = ManualClock::new(super::noon());
        MemoryKeysHarness(MemoryKeys::with_clock(Arc::new(clock.clone())), clock)
    }
}

#[async_trait]
impl KeysHarness for MemoryKeysHarness {
    type Keys = MemoryKeys;

    async fn open(&self) -> MemoryKeys {
        self.0.clone()
    }

    async fn advance(&self, by: Duration) {
        self.1.advance(by);
    }

    async fn in_transaction(&self, _: &MemoryKeys, _: &Begin, _: Option<&Answer>, _: bool) -> Result<Begun> {
        Err(Error::Unsupported("memory has no transactions".into()))
    }
}

/// A request of no tenant, whose fingerprint follows from a body.
pub fn request(key: &str, body: &str) -> Begin {
    request_of(None, key, body)
}

/// A request of a tenant.
pub fn request_of(tenant: Option<&str>, key: &str, body: &str) -> Begin {
    let parts =
        RequestParts { method: "POST", target: "/orders", body: body.as_bytes(), ..RequestParts::default() };
    let tenant = tenant.map(|tenant| Tenant::new(tenant).expect("a valid tenant"));
    Begin::new(tenant, self::key(key), RequestFingerprint::of(&[7; 32], &parts))
}

/// A key.
pub fn key(text: &str) -> IdempotencyKey {
    IdempotencyKey::new(text).expect("a valid key")
}

/// A UUIDv7 key made so long before or after the store's present.
pub async fn v7(keys: &impl Keys, before: Duration, ahead: bool) -> String {
    let now = keys.info().await.expect("the clock").now;
    let at = if ahead { now.plus(before) } else { now.minus(before) };
    let mut uuid = *uuid::Uuid::new_v4().as_bytes();
    uuid[..6].copy_from_slice(&(at.as_micros() / 1000).to_be_bytes()[2..]);
    uuid[6] = 0x70 | (uuid[6] & 0x0f);
    uuid::Uuid::from_bytes(uuid).to_string()
}

/// Begins, which must be the first.
pub async fn first(keys: &impl Keys, begin: &Begin) -> KeyLease {
    match keys.begin(begin).await.expect("a request begins") {
        Begun::First(lease) => lease,
        other => panic!("{} should be the first, and is {other:?}", begin.key),
    }
}

/// Begins and finishes.
pub async fn done(keys: &impl Keys, begin: &Begin, body: &str) -> Answer {
    let answer = answer(body);
    let lease = first(keys, begin).await;
    keys.finish(&lease, &answer).await.expect("an answer is stored");
    answer
}

/// An answer with headers.
pub fn answer(body: &str) -> Answer {
    Answer::new(201, body.to_owned()).header("Location", "/orders/17").header("ETag", b"\"caf\xe9\"".to_vec())
}

/// Whoever decides about a held key.
pub fn person() -> Decided {
    Decided::new("ann", "the provider says so")
}

/// Any key's state as a word.
pub async fn word(keys: &impl Keys, begin: &Begin) -> &'static str {
    keys.get(begin.tenant.as_ref(), &begin.key).await.expect("a key can be looked for").word()
}

/// Begins under a fresh nonce, as a retry does.
pub async fn again(keys: &impl Keys, begin: &Begin) -> Begun {
    let retry = Begin { nonce: crate::ledger::Nonce::random(), ..begin.clone() };
    keys.begin(&retry).await.expect("a retry begins")
}

/// Whether two prints are equal only by fingerprint.
pub fn opaque(begin: &Begin, bytes: [u8; 16]) -> Begin {
    Begin { fingerprint: RequestFingerprint::opaque(Fingerprint(bytes)), ..begin.clone() }
}
