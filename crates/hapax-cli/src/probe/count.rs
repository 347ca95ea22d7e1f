//! How many effects there are, by the service's own account. It may lag behind the answers.

use std::time::Duration;

use hapax::words::counted;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::failure::Failure;
use crate::http::{Request, send};

/// Between two looks at the number.
const STEP: Duration = Duration::from_millis(20);
/// For how long a number is unchanged at least before it counts.
const STILL_MIN: Duration = Duration::from_millis(250);

/// Where effects are counted.
#[derive(Debug)]
pub struct Count {
    pub request: Request,
    /// Where in the answer the number is.
    pub at: String,
    /// How long one answer may take.
    pub timeout: Duration,
    /// How long an effect may take until it is counted.
    pub wait: Duration,
    /// For how long the number is unchanged before it counts; longer if it lags behind.
    pub still: Duration,
}

impl Count {
    pub fn new(request: Request, at: String, timeout: Duration, wait: Duration) -> Self {
        Count { request, at, timeout, wait, still: STILL_MIN }
    }

    /// The number now.
    async fn read(&self) -> Result<u64, Failure> {
        let answer = send(&self.request, self.timeout).await.map_err(super::checks::unreachable)?;
        let value: Option<Value> = serde_json::from_slice(&answer.body).ok();
        let found = value.as_ref().and_then(|value| value.pointer(&self.at));
        let number = found.and_then(|found| match found {
            Value::Array(list) => u64::try_from(list.len()).ok(),
            other => other.as_u64(),
        });
        number.ok_or_else(|| {
            let message = "--count is answered without a number or an array";
            Failure::input(format!("{message} (status {}, --count-at {:?})", answer.status, self.at))
        })
    }

    /// The number when it has come to rest. It is waited for until it is at least `least`, but not for
    /// longer than an effect may take to be counted.
    pub async fn at_rest(&self, least: u64) -> Result<u64, Failure> {
        let begun = Instant::now();
        let mut number = self.read().await?;
        let mut since = Instant::now();
        loop {
            let is_late = begun.elapsed() >= self.wait;
            if since.elapsed() >= self.still && (number >= least || is_late) {
                return Ok(number);
            }
            if begun.elapsed() >= self.wait + 4 * self.still {
                return Err(unusable(&format!("is still changing after {:?}", begun.elapsed())));
            }
            sleep(STEP).await;
            let next = self.read().await?;
            if next != number {
                (number, since) = (next, Instant::now());
            }
        }
    }

    /// Waits until the effect of a write is counted, and learns how long that takes.
    pub async fn follow(&mut self, sent: Instant, before: u64, writes: u64) -> Result<(), Failure> {
        loop {
            let number = self.read().await?;
            if number >= before.saturating_add(writes) {
                // Another effect of the same write may be counted as late as this one.
                self.still = self.still.max(sent.elapsed() * 2);
                return Ok(());
            }
            if sent.elapsed() >= self.wait {
                let rose = number.saturating_sub(before);
                return Err(unusable(&format!(
                    "rose by {rose} within {:?} after {} that succeeded (--count-wait gives it longer)",
                    self.wait,
                    counted(writes, "write", "writes")
                )));
            }
            sleep(STEP).await;
        }
    }

    /// The number after the first writes: each must have been counted once. What else was counted may
    /// be what somebody wrote before the probe.
    pub async fn agrees(&self, before: u64, writes: u64) -> Result<(), Failure> {
        let rose = self.at_rest(before.saturating_add(writes)).await?.saturating_sub(before);
        if rose == writes {
            return Ok(());
        }
        Err(unusable(&format!("rose by {rose} after {writes} writes with different keys")))
    }
}

fn unusable(message: &str) -> Failure {
    Failure::input(format!(
        "--count cannot be used: it {message}; it must rise by 1 with each write, and nobody else may write meanwhile"
    ))
}
