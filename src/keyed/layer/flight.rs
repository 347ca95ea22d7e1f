//! Requests with one key in one process: one goes to the store, the others wait for its answer without
//! a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::keyed::{Answer, Begin, IdempotencyKey};

/// One request. Another request with the same key asks the store by itself: only the store knows
/// which of them the key belongs to.
type Name = (Option<Tenant>, IdempotencyKey, Fingerprint);
/// The answer, once it is kept.
type Known = Option<Arc<Answer>>;

#[derive(Debug, Default, Clone)]
pub(super) struct Flights(Arc<Mutex<HashMap<Name, watch::Receiver<Known>>>>);

/// A request's part.
pub(super) enum Entered {
    /// It goes to the store.
    Leader(Leader),
    /// Another one does; this is where its answer will be.
    Follower(watch::Receiver<Known>),
}

/// The request that goes to the store; when it is dropped, the others go on.
pub(super) struct Leader {
    flights: Flights,
    name: Name,
    answer: watch::Sender<Known>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, watch::Receiver<Known>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, begin: &Begin) -> Entered {
        let name = (begin.tenant.clone(), begin.key.clone(), begin.print.fingerprint);
        let mut flights = self.lock();
        if let Some(answer) = flights.get(&name) {
            return Entered::Follower(answer.clone());
        }
        let (answer, receiver) = watch::channel(None);
        flights.insert(name.clone(), receiver);
        Entered::Leader(Leader { flights: self.clone(), name, answer })
    }
}

impl Leader {
    /// Gives the kept answer to those who wait.
    pub(super) fn done(&self, answer: Arc<Answer>) {
        self.answer.send_replace(Some(answer));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use crate::keyed::{RequestParts, RequestPrint};

    fn begin(key: &IdempotencyKey, body: &[u8]) -> Begin {
        let request = RequestParts { method: "POST", target: "/orders", body, ..Default::default() };
        Begin::new(None, key.clone(), RequestPrint::of(&[7; 32], &request))
    }

    /// A key may belong to a request that is done; only the store knows. So another request with the
    /// key answers nobody, and is answered by nobody, but the store.
    #[test]
    fn requests_wait_only_for_the_same_request() {
        let (flights, key) = (Flights::default(), IdempotencyKey::now_v7());
        let first = flights.enter(&begin(&key, b"one"));
        assert!(matches!(first, Entered::Leader(_)));
        assert!(matches!(flights.enter(&begin(&key, b"one")), Entered::Follower(_)));
        assert!(matches!(flights.enter(&begin(&key, b"two")), Entered::Leader(_)));
        drop(first);
        assert!(matches!(flights.enter(&begin(&key, b"one")), Entered::Leader(_)));
    }
}
