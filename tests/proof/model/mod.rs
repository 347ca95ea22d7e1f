//! Every interleaving of a few workers, two events of one aggregate, crashes, lapsed leases, lost answers, a sweep and a
//! redrive. What the ledger answers is decided by `ledger::transition`, the functions that run in production; the model
//! adds what surrounds them: processes that die or wake late, messages that arrive late, and a witness of effects.
//!
//! `HAPAX_MODEL=long cargo test --release --test proof` checks larger worlds.

mod broken;
mod ledger;
mod properties;
mod protocol;
mod world;

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use broken::Broken;
use protocol::{Promise, Protocol};

/// Checks all states of a world, prints how many there are, and returns the names of the properties that do not hold.
fn check(protocol: Protocol) -> Vec<&'static str> {
    let (began, name) = (Instant::now(), format!("{protocol:?}"));
    // One mistake is enough of a broken variant; a sound one is explored to its end.
    let until = match protocol.broken {
        Some(broken) => HasDiscoveries::AllOf([broken.caught_by()].into()),
        None => HasDiscoveries::AnyFailures,
    };
    let checker = protocol.checker().threads(2).finish_when(until).spawn_bfs().join();
    let mut failed = Vec::new();
    for (property, path) in checker.discoveries() {
        if checker.model().property(property).expectation == stateright::Expectation::Always {
            println!("{property}:\n{}", properties::story(checker.model(), &path.into_actions()));
            failed.push(property);
        }
    }
    for property in checker.model().properties() {
        let expected =
            property.expectation == stateright::Expectation::Sometimes && protocol.broken.is_none();
        if expected && checker.discovery(property.name).is_none() {
            println!("never seen: {}", property.name);
            failed.push(property.name);
        }
    }
    println!(
        "{name}: {} states, depth {}, {:.1?}",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed()
    );
    failed.sort_unstable();
    failed
}

fn holds(protocol: Protocol) {
    let failed = check(protocol);
    assert!(failed.is_empty(), "these do not hold: {failed:?}");
}

#[test]
fn transactional_effects_happen_once_in_order() {
    holds(Protocol::new(Promise::Transactional));
}

/// Without faults but the lapse of a lease; with them the worlds are too many for every run, and the broken variants
/// below look at some.
#[test]
fn leased_effects_happen_once_if_the_sink_deduplicates() {
    holds(Protocol { ticks: 1, crashes: 0, losses: 0, failures: 0, ..Protocol::new(Promise::Leased) });
}

#[test]
fn at_most_once_effects_never_happen_twice_and_none_is_lost_silently() {
    holds(Protocol::new(Promise::AtMostOnce));
}

/// The same with a week that is dropped meanwhile.
#[test]
fn a_sweep_forgets_nothing_that_is_open_and_grants_nothing_twice() {
    for promise in Promise::ALL {
        let few = Protocol { ticks: 1, crashes: 0, losses: 0, failures: 0, ..Protocol::new(promise) };
        holds(Protocol { sweep: true, redrives: 0, ..few });
    }
}

/// Larger worlds, for `HAPAX_MODEL=long`.
#[test]
fn three_workers_and_more_faults() {
    if std::env::var("HAPAX_MODEL").is_ok_and(|size| size == "long") {
        for promise in Promise::ALL {
            holds(Protocol::new(promise));
            holds(Protocol { workers: 3, crashes: 1, failures: 0, ..Protocol::new(promise) });
            holds(Protocol { sweep: true, failures: 0, ..Protocol::new(promise) });
        }
    } else {
        // The smallest of them, so that this fails too if the model does not know three workers.
        let few = Protocol { ticks: 1, crashes: 0, losses: 0, failures: 0, ..Protocol::new(Promise::Leased) };
        holds(Protocol { workers: 3, ..few });
    }
}

/// A property that no mistake breaks shows nothing: each of these must be caught, and by the property that names it.
#[test]
fn broken_variants_are_caught_by_name() {
    let mut missed = Vec::new();
    for broken in Broken::ALL {
        let failed = check(broken.world());
        if !failed.contains(&broken.caught_by()) {
            missed.push(format!("{broken:?}: {:?} instead of {:?}", failed, broken.caught_by()));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
