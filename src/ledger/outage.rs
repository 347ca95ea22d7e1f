//! One line when the ledger goes away, one when it is back; nothing in between, however many calls fail.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::error::{Error, Result};

/// Whether the ledger is away, as far as the last call knows.
#[derive(Default)]
pub(super) struct Outage(Mutex<Option<Instant>>);

impl Outage {
    /// Takes note of how a statement ended.
    pub(super) fn note<T>(&self, result: &Result<T>) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Err(error @ Error::Unavailable { .. }) => {
                if since.is_none() {
                    *since = Some(Instant::now());
                    drop(since);
                    tracing::warn!(target: "hapax", error = %error.chain(), "the ledger is away");
                }
            }
            // Any other answer is an answer.
            _ => {
                if let Some(began) = since.take() {
                    drop(since);
                    tracing::info!(target: "hapax", seconds = began.elapsed().as_secs_f64(), "the ledger is back");
                }
            }
        }
    }
}
