//! The ledger and the journal on PostgreSQL. `scripts/test` runs this program on PostgreSQL 18 and on 15.

#[path = "../support/mod.rs"]
mod support;

mod concurrency;
mod contract;
mod corners;
mod corners_more;
mod crash;
mod doubt;
mod failover;
mod first_try;
mod input;
mod isolation;
mod journal;
mod journal_outbox;
mod journal_standby;
mod killed;
mod letters;
mod locks;
mod names;
mod operations;
mod sweep;
mod sweep_race;
mod synchronous;
mod upgrade;
