//! Logs one line when a server becomes unavailable and one when it is back, however many calls fail
//! in between.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::error::{Error, Result};

/// Whether a server is unavailable, as of the last call.
#[derive(Debug)]
pub(crate) struct Outage {
    what: &'static str,
    since: Mutex<Option<Instant>>,
}

impl Default for Outage {
    fn default() -> Self {
        Outage::of("the ledger")
    }
}

impl Outage {
    pub(crate) fn of(what: &'static str) -> Self {
        Outage { what, since: Mutex::new(None) }
    }

    /// Records how a statement ended.
    pub(super) fn note<T>(&self, result: &Result<T>) {
        match result {
            Err(error @ Error::Unavailable { .. }) => self.began(error),
            // Any other error is still an answer.
            _ => self.ended(),
        }
    }

    /// A call failed.
    pub(crate) fn began(&self, error: &Error) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.is_none() {
            *since = Some(Instant::now());
            drop(since);
            tracing::warn!(target: "hapax", error = %error.chain(), "{} is away", self.what);
        }
    }

    /// A call was answered.
    pub(crate) fn ended(&self) {
        let began = self.since.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(began) = began {
            tracing::info!(target: "hapax", seconds = began.elapsed().as_secs_f64(), "{} is back", self.what);
        }
    }
}
