//! Ctrl-C and SIGTERM: end at once, but not in the middle of a line.
//!
//! Nothing needs to be undone: every command is safe to kill at any moment (`filter` writes before
//! it records). The gate only keeps an orderly exit from cutting off an output line. Commands that
//! have something to finish (`consume`) take over the signals.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::failure::Failure;

/// How long a command may still run after a second signal.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Held while output is written.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<Mutex<()>>, Arc<Mutex<Option<mpsc::UnboundedSender<i32>>>>);

impl Gate {
    /// Prevents a signal from ending the process while the guard lives, for one second at most: a
    /// reader that never reads must not keep the process alive.
    pub fn hold(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on a signal no longer ends the process; it is sent to the returned channel as its
    /// exit code. After a second signal the process has three more seconds.
    pub fn take_signals(&self) -> mpsc::UnboundedReceiver<i32> {
        let (forward, signals) = mpsc::unbounded_channel();
        *self.1.lock().unwrap_or_else(PoisonError::into_inner) = Some(forward);
        signals
    }

    fn forward(&self, code: i32) -> bool {
        let forward = self.1.lock().unwrap_or_else(PoisonError::into_inner);
        forward.as_ref().is_some_and(|forward| forward.send(code).is_ok())
    }

    fn is_held(&self) -> bool {
        matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}

/// Ends the process with 130 or 143 when a signal arrives.
pub fn listen(runtime: &tokio::runtime::Runtime) -> Result<Gate, Failure> {
    let gate = Gate::default();
    let seen = gate.clone();
    let _context = runtime.enter();
    let mut signals = Signals::new()
        .map_err(|e| Failure::dependency("runtime", format!("cannot install signal handlers: {e}")))?;
    runtime.spawn(async move {
        let mut code = signals.wait().await;
        if seen.forward(code) {
            code = signals.wait().await;
            if seen.forward(code) {
                tokio::time::sleep(LAST_WORDS).await;
            }
        }
        for _ in 0..100 {
            if !seen.is_held() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        std::process::exit(code);
    });
    Ok(gate)
}

#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn wait(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Signals)
    }

    async fn wait(&mut self) -> i32 {
        // If the handler cannot be installed, the system's default remains.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        130
    }
}
