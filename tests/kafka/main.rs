//! The bus on Kafka: the contract, foreign producers, offsets, TLS.

#[path = "../support/mod.rs"]
mod support;

mod contract;
mod corners;
mod foreign;
mod offsets;
mod pausing;
mod tls;
