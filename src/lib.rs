//! Every event takes effect once.
//!
//! At-least-once delivery is a fact of life. hapax makes each event **take effect once** all the same: a durable
//! [ledger](ledger::Ledger) records what took effect, and a [`Guard`] in front of your handler asks it first.
//!
//! ```text
//! delivery ──▶ Guard ── claim ──▶ ledger        first time? run it. Done before? skip it.
//!                │                  │           Held by someone? wait. Failed? later, or dead.
//!                ▼                  │
//!             your effect           │
//!                └── settle ────────┘           done · retry · dead, fenced by a token
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

mod crash_point;

pub mod backend;
pub mod clock;
pub mod config;
pub mod error;
pub mod event;
pub mod id;
pub mod telemetry;

pub mod bus;
pub mod consumer;
pub mod guard;
pub mod journal;
pub mod ledger;
pub mod open;
pub mod relay;
pub mod sink;
pub mod sweep;
#[cfg(feature = "testing")]
pub mod testing;
pub mod window;
pub mod words;

pub use clock::Time;
pub use consumer::Consumer;
pub use error::{Error, Result};
pub use event::{Event, Fingerprint, Headers, Origin, TraceContext};
pub use guard::Guard;
pub use id::{Aggregate, EventId, Kind, Owner, RelayName, Scope, Tenant, Topic};
pub use journal::{Journal, JournalExt};
pub use ledger::{Ledger, Outcome};
pub use relay::Relay;

/// The README's programs, compiled and run as they stand there.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
