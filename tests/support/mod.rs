//! What tests of several areas share. Each program uses its part.
#![allow(dead_code, unused_imports, unused_macros)] // each program uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[cfg(all(feature = "testing", feature = "postgres"))]
pub mod cluster;
#[cfg(all(feature = "testing", feature = "s3"))]
pub mod fake_s3;
#[cfg(feature = "testing")]
pub mod faulty;
#[cfg(feature = "testing")]
pub mod gated;
#[cfg(all(feature = "testing", feature = "postgres"))]
pub mod handlers;
#[cfg(all(feature = "testing", feature = "s3"))]
pub mod objects;
pub mod port;
#[cfg(all(feature = "testing", feature = "postgres"))]
pub mod postgres;
#[cfg(all(feature = "testing", feature = "postgres"))]
pub mod proxy;
#[cfg(all(feature = "testing", feature = "kafka"))]
pub mod raw_kafka;
#[cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
pub mod store;
pub mod this;
#[cfg(all(feature = "testing", feature = "redis"))]
pub mod valkey;
pub mod wait;
#[cfg(all(feature = "testing", feature = "s3"))]
pub mod watched;
#[cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
pub mod world;
