//! Watches a running consumer: signals, the progress line, and the end when nothing arrives.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use hapax::words::counted;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{ConsumerHandle, Ended, Pool};
use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::Failure;

/// How often to check progress.
const TICK: Duration = Duration::from_millis(100);
/// How often to redraw the line.
const SHOWN_EVERY: Duration = Duration::from_millis(500);
/// How often to write metrics.
const WRITTEN_EVERY: Duration = Duration::from_secs(5);
/// How long it must be quiet at least while the ends of the partitions are unknown or not reached: a
/// group assigns partitions, or a fetch is slow. Markers of transactions keep an end out of reach.
const BEHIND_MAX: Duration = Duration::from_secs(20);

pub(crate) struct Watch<'m> {
    metrics: Option<&'m Metrics>,
    written: Instant,
    handle: ConsumerHandle,
    until_idle: Option<Duration>,
    pool: Option<Arc<Pool>>,
    line: bool,
    shown: Instant,
    last: u64,
    last_change: Instant,
    /// When the ends of the partitions were last unknown or not reached.
    last_behind: Instant,
    /// Whether something was in memory or finished yet.
    worked: bool,
}

impl<'m> Watch<'m> {
    pub(crate) fn new(
        global: &Global,
        handle: ConsumerHandle,
        until_idle: Option<Duration>,
        pool: Option<Arc<Pool>>,
        metrics: Option<&'m Metrics>,
    ) -> Self {
        let line = std::io::stderr().is_terminal() && !global.json;
        let now = Instant::now();
        Watch {
            metrics,
            written: now,
            handle,
            until_idle,
            pool,
            line,
            shown: now,
            last: 0,
            last_change: now,
            last_behind: now,
            worked: false,
        }
    }

    /// Waits for the end. The first signal drains, a second one ends at once. Returns the counts
    /// and the exit code.
    pub(crate) async fn until_ended(
        mut self,
        mut running: JoinHandle<Ended>,
        mut signals: mpsc::UnboundedReceiver<i32>,
    ) -> (Result<hapax::consumer::Counts, Failure>, u8) {
        let mut code = 0;
        let mut broken = None;
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = loop {
            tokio::select! {
                ended = &mut running => break ended,
                Some(signal) = signals.recv() => {
                    let first = code == 0;
                    code = u8::try_from(signal).unwrap_or(1);
                    self.on_signal(first);
                }
                sentence = broken_of(self.pool.as_deref()), if broken.is_none() => {
                    broken = Some(sentence);
                    self.handle.stop_now();
                }
                _ = tick.tick() => self.look(),
            }
        };
        self.clear();
        let ended = match (ended, broken) {
            (_, Some(sentence)) => Err(Failure::config(sentence)),
            (Ok(ended), None) => ended.map_err(Failure::from),
            (Err(error), None) => {
                Err(Failure::new(1, "corrupt", format!("the consumer ended badly: {error}")))
            }
        };
        (ended, code)
    }

    fn on_signal(&mut self, first: bool) {
        self.clear();
        if first {
            eprintln!("hapax: draining; press Ctrl-C again to stop now");
            self.handle.stop();
            if let Some(pool) = &self.pool {
                pool.drain();
            }
        } else {
            self.handle.stop_now();
            if let Some(pool) = &self.pool {
                pool.kill();
            }
        }
    }

    fn look(&mut self) {
        let progress = self.handle.progress();
        let passed: u64 = progress.passed.values().sum();
        let now = Instant::now();
        // Progress may have released parked events: the consumer is idle only if the ledger was
        // checked since.
        let busy = progress.in_flight > 0 || (self.worked && !progress.at_rest);
        if passed != self.last || busy {
            self.worked = true;
            self.last = passed;
            self.last_change = now;
        }
        if progress.lag != Some(0) {
            self.last_behind = now;
        }
        let quiet = now.duration_since(self.last_change);
        let at_end = now.duration_since(self.last_behind);
        if self.until_idle.is_some_and(|idle| quiet.min(at_end) >= idle || quiet >= idle.max(BEHIND_MAX)) {
            self.handle.stop();
        }
        if let Some(metrics) = self.metrics.filter(|_| now.duration_since(self.written) >= WRITTEN_EVERY) {
            self.written = now;
            if let Err(failure) = metrics.write() {
                tracing::warn!(target: "hapax", "{}", failure.message());
            }
        }
        if self.line && now.duration_since(self.shown) >= SHOWN_EVERY {
            self.shown = now;
            let words: Vec<_> =
                progress.passed.iter().map(|(word, count)| format!("{word} {count}")).collect();
            let standing =
                if progress.paused > 0 { format!(", {} paused", progress.paused) } else { String::new() };
            eprint!(
                "\r\x1b[K{}{standing}, in flight {}, held {}; {}",
                counted(progress.partitions as u64, "partition", "partitions"),
                progress.in_flight,
                progress.held,
                words.join(", ")
            );
            let _ = std::io::stderr().flush(); // nothing is lost if nobody sees the line
        }
    }

    fn clear(&self) {
        if self.line {
            eprint!("\r\x1b[K");
        }
    }
}

/// Returns when the pool's command turns out not to work; never without a pool.
async fn broken_of(pool: Option<&Pool>) -> String {
    match pool {
        Some(pool) => pool.broken().await,
        None => std::future::pending().await,
    }
}
