//! Requests with one key in one process: one goes to the store, the others wait for its answer without
//! a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::id::Tenant;
use crate::keyed::{Answer, Begin, IdempotencyKey, RequestPrint};

type Name = (Option<Tenant>, IdempotencyKey);
/// The answer, once it is kept.
type Known = Option<Arc<Answer>>;

#[derive(Debug, Default, Clone)]
pub(super) struct Flights(Arc<Mutex<HashMap<Name, Flight>>>);

#[derive(Debug)]
struct Flight {
    print: RequestPrint,
    answer: watch::Receiver<Known>,
}

/// A request's part.
pub(super) enum Entered {
    /// It goes to the store.
    Leader(Leader),
    /// Another one does, for the same request; this is where its answer will be.
    Follower(watch::Receiver<Known>),
    /// Another one does, for another request.
    Mismatch(Vec<String>),
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

    pub(super) fn enter(&self, begin: &Begin) -> Entered {
        let name = (begin.tenant.clone(), begin.key.clone());
        let mut flights = self.lock();
        if let Some(flight) = flights.get(&name) {
            if flight.print.fingerprint == begin.print.fingerprint {
                return Entered::Follower(flight.answer.clone());
            }
            return Entered::Mismatch(begin.print.differing(&flight.print.parts_text()));
        }
        let (answer, receiver) = watch::channel(None);
        flights.insert(name.clone(), Flight { print: begin.print.clone(), answer: receiver });
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
