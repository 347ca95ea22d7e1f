//! The consumer: its pipeline on the memory bus and Kafka, on every ledger.

#[path = "../support/mod.rs"]
mod support;

mod bus;
mod dead_letters;
mod due;
mod failures;
mod handlers;
mod handover;
mod leased_batch;
mod mutants;
mod pipeline;
mod pulses;
mod records;
mod recovery;
mod transactional;
mod typed_batches;
mod window;
