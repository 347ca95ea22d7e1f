//! What a worker process and the demo say to each other: lines on the worker's standard input and
//! output.
//!
//! The demo can ask a worker to *hold* its next event: to pause at a named step and say so. A
//! worker that is killed or frozen while it holds is hit at that step, and not by luck.

use std::io::{BufRead as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// At which step of its next event a worker pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The event is claimed; its effect has not been made.
    BeforeEffect,
    /// The effect has been made; the ledger does not know yet.
    AfterEffect,
}

/// An instruction for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instruction {
    /// Hold the next event at this step.
    Hold(Step),
    /// Hold nothing.
    HoldNothing,
    /// Go on with what is held.
    GoOn,
}

/// What a worker says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// It will hold its next event.
    WillHold,
    /// It holds an event, and pauses.
    Holding(Held),
    /// It went on with what it held, and wrote to the carrier. `newest` is the token that the
    /// carrier refused it for.
    WentOn { token: i64, newest: Option<i64> },
    /// Its counts so far.
    Counts(Counts),
}

/// An event that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub customer: String,
    pub order: u64,
}

/// The counts of one worker process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Events that were delivered to it.
    pub delivered: u64,
    /// How many of them the window in its memory caught.
    pub window: u64,
    /// How many of them the ledger caught.
    pub ledger: u64,
    /// Runs that found their parcel booked already.
    pub in_carrier: u64,
}

/// What a worker holds, or will.
#[derive(Debug, Default)]
struct Hold {
    next_at: Option<Step>,
    holding: bool,
}

/// The worker's side.
#[derive(Debug, Default)]
pub struct Control {
    hold: Mutex<Hold>,
    went_on: Condvar,
    pub in_carrier: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a line. If nobody reads it, the demo is gone, and the end of standard input says so too.
pub fn say(said: &Message) {
    if let Ok(line) = serde_json::to_string(said) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

impl Control {
    /// Listens until standard input ends, which is how the demo (or its death) ends a worker.
    pub fn listen(self: &Arc<Self>, at_end: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let control = Arc::clone(self);
        std::thread::Builder::new().name("control".into()).spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(Instruction::Hold(step)) => {
                        lock(&control.hold).next_at = Some(step);
                        say(&Message::WillHold);
                    }
                    Ok(Instruction::HoldNothing) => lock(&control.hold).next_at = None,
                    Ok(Instruction::GoOn) => control.release(),
                    Err(_) => {}
                }
            }
            lock(&control.hold).next_at = None;
            control.release();
            at_end();
        })?;
        Ok(())
    }

    fn release(&self) {
        lock(&self.hold).holding = false;
        self.went_on.notify_all();
    }

    /// Pauses here if asked to; blocks the thread. Returns whether it did.
    pub fn hold(&self, step: Step, customer: &str, order: u64) -> bool {
        let mut hold = lock(&self.hold);
        if hold.next_at != Some(step) {
            return false;
        }
        (hold.next_at, hold.holding) = (None, true);
        say(&Message::Holding(Held { customer: customer.to_owned(), order }));
        drop(self.went_on.wait_while(hold, |hold| hold.holding).unwrap_or_else(PoisonError::into_inner));
        true
    }

    /// Counts a run that found its parcel booked already.
    pub fn found_in_carrier(&self) {
        self.in_carrier.fetch_add(1, Relaxed);
    }
}
