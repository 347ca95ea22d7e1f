//! Every event takes effect once.
//!
//! Delivery is at least once: brokers redeliver, clients retry, processes die between an effect and its acknowledgement.
//! hapax makes each event **take effect once** all the same. A durable [ledger](ledger::Ledger) records what took effect,
//! and an event is claimed there before its effect is made, or in the same transaction.
//!
//! ```text
//!   your write ─▶ journal ─▶ relay ─▶ bus ─▶ consumer ─▶ claim ─▶ your handler ─▶ settle
//!                 append     publish          order       │                        │
//!                 numbers    in order         per key     └──────── ledger ────────┘
//!                                                  first: run it · done before: skip it
//!                                                  claimed elsewhere: wait · failed: retry later, or dead
//!
//!   your question ─▶ read model ◀─ feed ◀─ bus       a record counts once: the highest version of each is kept
//!                    search engine, cache ◀─ projector, a leased handler
//! ```
//!
//! Start with [`Consumer`] to consume topics, with [`Guard`] if you have a loop of your own, and with [`Journal`] and [`Relay`] to
//! publish what you write. [`keyed`] makes a client's retries harmless, [`records`] are written with
//! their events, [`analytics`] reads them, and [`projection`] keeps them in search engines and caches.
//! [`open`] turns URLs into backends.
//!
//! | feature | what it adds |
//! |---|---|
//! | (none) | ledger, window, journal, bus, keys, API tokens, read model and projection in memory; journals in a directory |
//! | `sqlite` | ledger, journal, the embedded bus, keys, records, API tokens and a read model in SQLite files |
//! | `postgres` | ledger, journal, keys, records and API tokens in PostgreSQL, with `claim_in`, `append_in` and `begin_in` for your own transactions; what Debezium reads |
//! | `redis` | ledger, window and cache in Redis or Valkey |
//! | `clickhouse` | a read model in ClickHouse |
//! | `opensearch` | the projection in OpenSearch |
//! | `kafka`, `kafka-tls` | the Kafka bus; with TLS and SASL |
//! | `http` | handlers over HTTP |
//! | `axum` | `Idempotency-Key` for the routes of an axum service: `keyed::KeyedLayer`; its `problem`s |
//! | `client` | a client of `hapax serve` that never writes twice: `client::Client` |
//! | `s3` | journals in an object store |
//! | `testing` | conformance suites, models, fault injection; never in production |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod crash_point;
mod secret;

// The names everything is made of.
pub mod clock;
pub mod error;
pub mod event;
pub mod exact;
pub mod id;

// The path of an event, in order. 0: written once, whatever a client repeats.
pub mod keyed;

pub mod records;

// The other end: a client of `hapax serve`.
#[cfg(feature = "client")]
pub mod client;

// 1: stored and numbered.
pub mod journal;

// 2: published.
pub mod relay;

// 3: carried.
pub mod bus;

// 4: consumed; filtered, claimed, settled.
pub mod consumer;

pub mod window;

pub mod guard;

pub mod ledger;

// 5: effects elsewhere.
pub mod sink;

// 6: read models, where every record counts once.
pub mod analytics;

pub mod projection;

// 7: forgotten, after the retention or because somebody asks for it.
pub mod sweep;

pub mod erase;

// What surrounds it.
pub mod access;
pub mod backend;
pub mod config;
pub mod open;
#[cfg(feature = "axum")]
pub mod problem;
pub mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
pub mod words;

pub use clock::Time;
pub use consumer::Consumer;
pub use error::{Error, Result};
pub use event::{Event, Fingerprint, Headers, Origin, TraceContext};
pub use guard::Guard;
pub use id::{Aggregate, EventId, Kind, Owner, RelayName, Scope, Tenant, Topic};
pub use journal::{Journal, JournalExt, RelayStore};
pub use ledger::{Claims, ConsumerStore, Ledger, Operations, Outcome, TransactionalLedger};
pub use relay::Relay;

/// The README's programs, compiled and run as they stand there.
#[cfg(all(doctest, feature = "postgres", feature = "axum"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
