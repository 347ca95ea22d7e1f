//! Sinks: where effects go that are not in the ledger's database.
//!
//! An effect elsewhere is attempted at least once: a process can die after the effect and before
//! the ledger knows. Whether it *takes* effect once is therefore up to the sink, and every
//! [`Effect`] has what it needs for that: a **key** that is the same for every attempt of one
//! event, and a **token** that increases with every lease. [`protocol`] defines how handlers in any
//! language receive both; [`HttpSink`] (feature `http`) speaks it over HTTP.
//!
//! A sink uses what a handler gets: the event, its key and its token. It asks no ledger.

use std::fmt::Write as _;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Time;
use crate::consumer::Handled;
use crate::event::Event;
use crate::guard::Run;
use crate::id::Scope;
use crate::ledger::{Identity, Token};

#[cfg(feature = "http")]
mod http;
pub mod protocol;

#[cfg(feature = "http")]
pub use http::{HttpSettings, HttpSink};

/// One attempt to apply an event.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Effect {
    /// The scope: whose effect it is.
    pub scope: Scope,
    /// The event.
    pub event: Event,
    /// The lease it runs under, or `None` if it runs at most once.
    pub lease: Option<(Identity, Token)>,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// When the attempt times out, by this process's clock.
    pub deadline: Time,
    /// How long the attempt may take.
    pub timeout: Duration,
}

impl Effect {
    /// An attempt under a lease, as passed to [leased](crate::consumer::LeasedHandler) handlers.
    pub fn leased(event: Event, run: &Run, timeout: Duration) -> Self {
        Effect {
            scope: run.key().scope.clone(),
            lease: Some((run.key().clone(), run.token())),
            attempt: run.attempt(),
            ..Effect::at_most_once(run.key().scope.clone(), event, timeout)
        }
    }

    /// The only attempt of an event that runs at most once. It has neither key nor token.
    pub fn at_most_once(scope: Scope, event: Event, timeout: Duration) -> Self {
        use crate::clock::{Clock as _, SystemClock};
        Effect { scope, event, lease: None, attempt: 1, deadline: SystemClock.now().plus(timeout), timeout }
    }
}

/// The key of an identity as text: `tenant/scope/id`, each part percent-encoded, so that no two
/// identities share one. Without a tenant that part is empty, which no tenant's name is.
///
/// ```
/// use hapax::{EventId, Scope, ledger::Identity};
/// let mine = Identity::new(Scope::new("a/b").unwrap(), EventId::new("order 17").unwrap());
/// assert_eq!(hapax::sink::key(&mine), "/a%2Fb/order%2017");
/// ```
pub fn key(identity: &Identity) -> String {
    const PLAIN: percent_encoding::AsciiSet =
        percent_encoding::NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'~').remove(b'-');
    let mut key = String::new();
    let tenant = identity.tenant.as_ref().map_or("", |tenant| tenant.as_str());
    for (at, part) in [tenant, identity.scope.as_str(), &identity.id.as_str()].into_iter().enumerate() {
        let slash = if at == 0 { "" } else { "/" };
        // Writing to a String cannot fail.
        let _ = write!(key, "{slash}{}", percent_encoding::utf8_percent_encode(part, &PLAIN));
    }
    key
}

/// Applies events outside the ledger's database.
///
/// # Contract
///
/// 1. `apply` returns `Ok` only once the effect is as safe as the sink can make it.
/// 2. An error does not mean that nothing happened: the answer may have been lost. The same key
///    comes again, with a higher token.
/// 3. **Dedup on the key.** The sink stores the key with the effect, in one atomic step. A key it
///    has stored takes effect no second time and gets the same answer as the first time. This is
///    what makes the effect happen once.
/// 4. **Fence by the token.** The sink stores the highest token it has seen for whatever the event
///    writes (a row, a document) and refuses a lower one. This keeps a stale holder (a process that
///    was paused beyond its lease) from writing last. A token is a number, drawn from one sequence
///    that is never reset.
/// 5. A sink that does neither is attempted at least once, and its repeats are real: say so where
///    it is used.
/// 6. Dropping the future of `apply` is a request to stop, nothing more: what it started may still
///    happen.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// Applies one event.
    async fn apply(&self, effect: Effect) -> Handled;
}
