//! The protocol as a model: every interleaving of a small world, decided by the production transition function.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod model;
