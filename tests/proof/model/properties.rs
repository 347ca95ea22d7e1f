//! What must hold in every state, named after the clauses of the ledger's contract where there is one; and what must be
//! reachable, so that the rest is not true for want of trying.

use std::fmt::Write as _;

use hapax::ledger::State;
use stateright::{Model, Property};

use super::protocol::{Action, Promise, Protocol};
use super::world::{EVENTS, ModelState, Phase, Verdict, Worker};

pub fn of(protocol: &Protocol) -> Vec<Property<Protocol>> {
    let mut all = vec![
        Property::always("c1 one live lease", |protocol: &Protocol, world: &ModelState| {
            protocol.promise != Promise::Leased
                || (0..EVENTS).map(|event| live_leases(world, event)).sum::<usize>() <= 1
        }),
        Property::always("c2 a stale token settles nothing", |_, world: &ModelState| {
            !world.seen.settled_by_stale
        }),
        Property::always("c2 tokens only rise", |_, world: &ModelState| !world.seen.token_went_back),
        Property::always("c4 done moves the order with it", |_, world: &ModelState| {
            (0..EVENTS).all(|event| !is(world, event, State::Done) || world.head.last > Some(event as u64))
        }),
        Property::always("c7 the same claim again gets the same answer", |_, world: &ModelState| {
            !world.seen.doubt_changed
        }),
        Property::always("c10 a dropped week grants nothing", |_, world: &ModelState| {
            !world.seen.granted_after_drop
        }),
        Property::always("once: no effect happens twice", |_, world: &ModelState| {
            world.seen.effects.iter().all(|effects| *effects <= 1)
        }),
        Property::always("done means that it took effect", |_, world: &ModelState| {
            (0..EVENTS).all(|event| {
                !(is(world, event, State::Done) || is(world, event, State::Finished))
                    || world.seen.effects[event] > 0
            })
        }),
        Property::always("order: never backwards", |_, world: &ModelState| world.seen.done.is_sorted()),
        Property::always("order: nothing overtakes what has begun", |_, world: &ModelState| {
            let begun = is(world, 0, State::Leased) || is(world, 0, State::Retry);
            !(begun && is(world, 1, State::Done))
        }),
        Property::always("dead: only a redrive leaves it", |_, world: &ModelState| !world.seen.left_dead),
        Property::always("no loss: what is acknowledged is settled or listed", acknowledged_is_settled),
        Property::always("at most once: what did not run is listed", what_did_not_run_was_interrupted),
        Property::always("no dead end: without further faults all of it is settled", can_finish),
    ];
    let deaths = protocol.promise == Promise::Leased && protocol.crashes >= 2 && protocol.ticks >= 2;
    if deaths {
        all.push(Property::sometimes("an event that kills its process is dead", |_, world: &ModelState| {
            (0..EVENTS).any(|event| is(world, event, State::Dead))
        }));
        all.push(Property::sometimes("a redriven event is done", |_, world: &ModelState| {
            (0..EVENTS).any(|event| world.seen.redriven[event] && is(world, event, State::Done))
        }));
        all.push(Property::sometimes(
            "a sink that does not deduplicate would see it twice",
            |_, world: &ModelState| world.seen.sent.iter().any(|sent| *sent > 1),
        ));
        all.push(Property::sometimes(
            "somebody is about to settle a run that is over",
            |_, world: &ModelState| {
                world.workers.iter().any(|worker| {
                    matches!(worker, Worker::Running { event, token, effect: true, .. }
                    if world.row(*event).is_some_and(|row| row.state == State::Done && row.token != *token))
                })
            },
        ));
    }
    if protocol.sweep && protocol.promise != Promise::Transactional {
        all.push(Property::sometimes("an open row outlives its week", |_, world: &ModelState| {
            world.phase == Phase::Dropped && world.places.iter().any(|place| place.held.is_some())
        }));
    }
    all
}

fn is(world: &ModelState, event: usize, state: State) -> bool {
    world.row(event).is_some_and(|row| row.state == state)
}

fn live_leases(world: &ModelState, event: usize) -> usize {
    let holds = |worker: &&Worker| matches!(worker, Worker::Running { event: of, until, .. } if *of == event && *until > world.now);
    world.workers.iter().filter(holds).count()
}

fn acknowledged_is_settled(_: &Protocol, world: &ModelState) -> bool {
    (0..EVENTS).filter(|event| world.seen.acknowledged[*event]).all(|event| {
        world.seen.effects[event] > 0
            || world.row(event).map_or(world.phase == Phase::Dropped, |row| {
                matches!(
                    row.state,
                    State::Stale | State::Dead | State::Lost | State::Finished | State::Claimed
                )
            })
    })
}

/// A claim without an effect is somebody's who runs it or is in doubt, or it was interrupted.
fn what_did_not_run_was_interrupted(protocol: &Protocol, world: &ModelState) -> bool {
    protocol.promise != Promise::AtMostOnce
        || (0..EVENTS).filter(|event| is(world, *event, State::Claimed)).all(|event| {
            let cares = |worker: &Worker| match worker {
                Worker::Running { event: of, .. } | Worker::Doubt { event: of, .. } => *of == event,
                _ => false,
            };
            world.seen.effects[event] > 0 || world.seen.interrupted[event] || world.workers.iter().any(cares)
        })
}

/// Kills everybody, lets time pass, and delivers both events to one worker that works: whatever happened before, each ends
/// as done, stale, listed or too old. A dead one does so after a redrive.
///
/// While crashes are left, the world in which everybody was killed is one of the worlds to come, so it is asked there.
fn can_finish(protocol: &Protocol, world: &ModelState) -> bool {
    if world.left.crashes > 0 && world.workers.iter().any(|worker| *worker != Worker::Idle) {
        return true;
    }
    let mut world = world.clone();
    world.workers.fill(Worker::Idle);
    world.late.clear();
    for action in [Action::Move { event: 0 }, Action::Move { event: 1 }, Action::Drop] {
        let mut actions = Vec::new();
        protocol.actions(&world, &mut actions);
        if actions.contains(&action) {
            protocol.step(&mut world, action);
        }
    }
    for _ in 0..6 {
        world.now += 2;
        for event in 0..EVENTS {
            if is(&world, event, State::Dead) {
                protocol.redrive(&mut world, event);
            }
            protocol.step(&mut world, Action::Look { worker: 0, event });
            protocol.step(&mut world, Action::Claim { worker: 0, event });
            protocol.step(&mut world, Action::Effect { worker: 0 });
            protocol.step(&mut world, Action::Settle { worker: 0, verdict: Verdict::Done });
        }
    }
    (0..EVENTS).all(|event| match world.row(event) {
        None => world.phase == Phase::Dropped,
        Some(row) => {
            matches!(row.state, State::Done | State::Stale | State::Finished | State::Lost | State::Claimed)
        }
    })
}

/// A counterexample, step by step.
pub fn story(protocol: &Protocol, actions: &[Action]) -> String {
    let mut out = String::new();
    let Some(mut world) = protocol.init_states().pop() else { return out };
    for action in actions {
        protocol.step(&mut world, *action);
        let rows: Vec<_> =
            (0..EVENTS).map(|event| world.row(event).map(|row| (row.state, row.token.0))).collect();
        let _ = writeln!(out, "  t{} {action:?} -> rows {rows:?}, workers {:?}", world.now, world.workers);
    }
    out
}
