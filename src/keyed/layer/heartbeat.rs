//! Keeps the lease of a request from its beginning until its key is settled.

use std::pin::pin;
use std::sync::Arc;

use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::service::Shared;
use crate::error::Error;
use crate::keyed::KeyLease;

/// The heartbeat of one lease. It beats only while somebody waits in one of its methods.
pub(super) struct Heartbeat {
    layer: Arc<Shared>,
    lease: KeyLease,
    /// When the lease, or its last extension, was asked for.
    asked: Instant,
    /// The store has said that the lease is another's.
    fenced: bool,
}

impl Heartbeat {
    /// Keeps a lease that was asked for at `asked`.
    pub(super) fn start(layer: &Arc<Shared>, lease: &KeyLease, asked: Instant) -> Self {
        Heartbeat { layer: Arc::clone(layer), lease: lease.clone(), asked, fenced: false }
    }

    /// Extends the lease for as long as it can. Returns when it is lost, or may be: a margin before
    /// its end, so that what runs under it can still be stopped in time.
    pub(super) async fn lost(&mut self) {
        let whole = self.layer.settings.lease;
        while !self.fenced {
            sleep_until(self.asked + whole / 3).await;
            match extend(&self.layer, &self.lease, self.asked + whole * 2 / 3).await {
                Ok(extended) => self.asked = extended,
                Err(Lost::Fenced) => self.fenced = true,
                Err(Lost::Late) => return,
            }
        }
    }

    /// Keeps the lease while something is waited for that cannot be stopped. However late an extension
    /// is: until another run has the lease, it keeps others from running beside this one.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = self.until_fenced() => {}
        }
        work.await
    }

    async fn until_fenced(&mut self) {
        let whole = self.layer.settings.lease;
        let mut next = self.asked + whole / 3;
        while !self.fenced {
            sleep_until(next).await;
            let asked = Instant::now();
            // A call that hangs is given up, and asked again on another connection.
            match timeout(whole / 3, self.layer.keys.extend(&self.lease, whole)).await {
                Ok(Ok(())) => {
                    self.asked = asked;
                    next = asked + whole / 3;
                }
                Ok(Err(Error::Fenced { .. })) => self.fenced = true,
                Ok(Err(_)) | Err(_) => next = Instant::now() + whole / 12,
            }
        }
    }
}

/// Whether a lease was granted so late that it must be extended before anything runs under it.
pub(super) fn is_late(layer: &Shared, asked: Instant) -> bool {
    asked.elapsed() >= layer.settings.lease / 3
}

/// Why a lease was not extended.
#[derive(Debug)]
pub(super) enum Lost {
    /// Another run has it.
    Fenced,
    /// The time was over.
    Late,
}

/// Extends a lease before a point in time. Returns when the extension was asked for.
pub(super) async fn extend(layer: &Shared, lease: &KeyLease, before: Instant) -> Result<Instant, Lost> {
    let whole = layer.settings.lease;
    loop {
        let asked = Instant::now();
        if asked >= before {
            return Err(Lost::Late);
        }
        // A call that hangs must not keep the holder beyond its lease.
        match timeout_at(before, layer.keys.extend(lease, whole)).await {
            Ok(Ok(())) => return Ok(asked),
            Ok(Err(Error::Fenced { .. })) => return Err(Lost::Fenced),
            Ok(Err(_)) => sleep_until((asked + whole / 12).min(before)).await,
            Err(_) => return Err(Lost::Late),
        }
    }
}
