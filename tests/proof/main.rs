//! The protocol as a model, every interleaving of a small world decided by the production transition function; and the
//! pipeline with one step done wrong, which a test must notice.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "../support/mod.rs"]
mod support;

mod model;
#[cfg(all(feature = "testing", feature = "axum", feature = "postgres"))]
mod mutants;
