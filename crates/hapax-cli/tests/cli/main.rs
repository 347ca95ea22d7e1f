//! The binary, as its users run it: each test starts `hapax` as a process.

mod common;

mod basics;
mod consume;
mod consume_http;
mod consume_kafka;
mod demo;
mod filter;
mod journal;
mod keys;
mod ledger;
mod letters;
mod messages;
mod modules;
mod newcomer;
mod query;
mod relay;
mod serve;
mod serve_access;
mod serve_api;
mod serve_claims;
mod serve_client;
mod serve_faults;
mod serve_front;
mod serve_keys;
mod serve_records;
mod serve_servers;
mod serve_tenants;
mod state;
mod texts;
mod token;
mod traces;
