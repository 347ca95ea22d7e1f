//! Requests with one key in one process: one goes to the store, the others wait for its answer without
//! a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::keyed::{Answer, Begin, IdempotencyKey};

/// One request. Another request with the same key asks the store itself: only the store knows
/// which of them the key belongs to.
type Name = (Option<Tenant>, IdempotencyKey, Fingerprint);
/// The answer, once it is kept.
type Known = Option<Arc<Answer>>;

/// A request on its way.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    /// Where its answer will be.
    pub(super) answer: watch::Receiver<Known>,
    /// After that nobody waits for it: only the store knows how it ended.
    pub(super) until: Instant,
}

#[derive(Debug, Default, Clone)]
pub(super) struct Flights(Arc<Mutex<HashMap<Name, Flight>>>);

/// A request's part.
pub(super) enum Entered {
    /// It goes to the store.
    Leader(Leader),
    /// Another one does.
    Follower(Flight),
}

/// The request that goes to the store; when it is dropped, the others go on.
pub(super) struct Leader {
    flights: Flights,
    name: Name,
    answer: watch::Sender<Known>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Others wait for this request, if it goes to the store, for `patience` at most.
    pub(super) fn enter(&self, begin: &Begin, patience: Duration) -> Entered {
        let name = (begin.tenant.clone(), begin.key.clone(), begin.fingerprint.whole);
        let now = Instant::now();
        let mut flights = self.lock();
        if let Some(flight) = flights.get(&name).filter(|flight| now < flight.until) {
            return Entered::Follower(flight.clone());
        }
        let (answer, receiver) = watch::channel(None);
        flights.insert(name.clone(), Flight { answer: receiver, until: now + patience });
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
        let mut flights = self.flights.lock();
        // Another one may have taken its place.
        let own = self.answer.subscribe();
        if flights.get(&self.name).is_some_and(|flight| flight.answer.same_channel(&own)) {
            flights.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use crate::keyed::{RequestFingerprint, RequestParts};

    fn begin(key: &IdempotencyKey, body: &[u8]) -> Begin {
        let request = RequestParts { method: "POST", target: "/orders", body, ..Default::default() };
        Begin::new(None, key.clone(), RequestFingerprint::of(&[7; 32], &request))
    }

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A key may belong to a request that is done; only the store knows. So another request with the
    /// key answers nobody, and is answered by nobody, but the store.
    #[test]
    fn requests_wait_only_for_the_same_request() {
        let (flights, key) = (Flights::default(), IdempotencyKey::now_v7());
        let first = flights.enter(&begin(&key, b"one"), PATIENCE);
        assert!(matches!(first, Entered::Leader(_)));
        assert!(matches!(flights.enter(&begin(&key, b"one"), PATIENCE), Entered::Follower(_)));
        assert!(matches!(flights.enter(&begin(&key, b"two"), PATIENCE), Entered::Leader(_)));
        drop(first);
        assert!(matches!(flights.enter(&begin(&key, b"one"), PATIENCE), Entered::Leader(_)));
    }

    /// One that is on its way for too long is not waited for: the next one asks the store, and the
    /// late one takes nothing away when it ends.
    #[tokio::test(start_paused = true)]
    async fn t210_nobody_waits_for_ever_for_a_request_on_its_way() {
        let (flights, key) = (Flights::default(), IdempotencyKey::now_v7());
        let first = flights.enter(&begin(&key, b"one"), PATIENCE);
        assert!(matches!(first, Entered::Leader(_)));
        tokio::time::advance(PATIENCE).await;
        let second = flights.enter(&begin(&key, b"one"), PATIENCE);
        assert!(matches!(second, Entered::Leader(_)));
        drop(first);
        assert!(matches!(flights.enter(&begin(&key, b"one"), PATIENCE), Entered::Follower(_)));
        drop(second);
        assert!(matches!(flights.enter(&begin(&key, b"one"), PATIENCE), Entered::Leader(_)));
    }
}
