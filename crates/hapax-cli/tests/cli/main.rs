//! The binary, as its users run it: each test starts `hapax` as a process.

mod common;

mod basics;
mod consume;
mod consume_http;
mod consume_kafka;
mod demo;
mod filter;
mod journal;
mod ledger;
mod letters;
mod newcomer;
mod relay;
mod state;
