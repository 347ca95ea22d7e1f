//! What a leading relay waits for: new events, a hole to be filled, a journal or a bus that answers
//! again. No wait outlasts leadership.

use std::time::Duration;

use tokio::time::Instant;

use super::End;
use super::leading::Leading;
use super::publish::stopped_for;
use crate::error::{Error, Result};

impl Leading {
    /// Waits until there may be something to do.
    pub(super) async fn wait(&mut self, at_hole: bool) -> Result<(), End> {
        if at_hole {
            let after = self.position.clone();
            self.meter.hole(&after);
            let rest = self.backoff.at_hole();
            return self.pause(rest).await;
        }
        self.meter.no_hole();
        self.meter.oldest(None);
        self.meter.refresh();
        let rest = self.backoff.next_pause();
        if !rest.is_zero() {
            self.pause(rest).await?;
        }
        let mut at_most = self.settings.poll;
        if let Some(due) = self.waiters.next_at(&self.awaited, self.settings.batch_max) {
            at_most = at_most.min(due.saturating_duration_since(Instant::now()));
        }
        let began = Instant::now();
        let mut stop = self.stop.clone();
        let waited = tokio::select! {
            waited = self.journal.wait(&self.position, at_most) => waited,
            answered = self.awaited.next() => {
                self.last_answer = answered?;
                self.backoff.reset();
                return Ok(());
            }
            () = self.pulses.next(self.reads) => {
                // A read must tell whether the relay is that far. It is not to slow down the next
                // ones.
                self.backoff.reset();
                return Ok(());
            }
            end = self.leadership.lost() => return Err(end),
            _ = stop.wait_for(|stop| *stop) => return Err(End::Stopped),
        };
        if !at_most.is_zero() && began.elapsed() + Duration::from_millis(1) >= at_most {
            self.backoff.reset();
        }
        match waited {
            Err(error) if !error.is_retryable() => Err(End::from(error)),
            Err(_) => self.pause(self.settings.backoff_base).await,
            Ok(()) => Ok(()),
        }
    }

    /// Waits until the bus answers for an aggregate, or one that is behind is due.
    pub(super) async fn wait_for_room(&mut self) -> Result<(), End> {
        let mut stop = self.stop.clone();
        let due = self.waiters.next_at(&self.awaited, self.settings.batch_max);
        let due = due.unwrap_or_else(|| Instant::now() + self.settings.poll);
        tokio::select! {
            () = tokio::time::sleep_until(due.max(Instant::now() + Duration::from_millis(1))) => Ok(()),
            answered = self.awaited.next() => {
                self.last_answer = answered?;
                Ok(())
            }
            end = self.leadership.lost() => Err(end),
            _ = stop.wait_for(|stop| *stop) => Err(End::Stopped),
        }
    }

    /// Repeats a call to the journal until it answers, as long as leadership lasts.
    pub(super) async fn insist<'c, T, F>(&'c self, doing: &str, mut call: impl FnMut() -> F) -> Result<T, End>
    where
        F: Future<Output = Result<T>> + 'c,
    {
        let (mut attempts, mut stop) = (0, self.stop.clone());
        loop {
            let answer = tokio::select! {
                answer = call() => answer,
                end = self.leadership.lost() => return Err(end),
                () = stopped_for(&mut stop, self.settings.flush_timeout) => return Err(End::Stopped),
            };
            match answer {
                Err(error) if error.is_retryable() => self.try_again(doing, &error, &mut attempts).await?,
                other => return other.map_err(End::from),
            }
        }
    }

    pub(super) async fn try_again(&self, doing: &str, error: &Error, attempts: &mut u32) -> Result<(), End> {
        *attempts += 1;
        if *attempts == 1 {
            tracing::warn!(target: "hapax::relay", relay = %self.settings.name, doing, error = %error.chain(), "the journal does not answer; the relay tries again");
        }
        self.pause(self.settings.backoff(*attempts).min(Duration::from_secs(1))).await
    }

    pub(super) async fn pause(&self, pause: Duration) -> Result<(), End> {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            end = self.leadership.lost() => Err(end),
            _ = stop.wait_for(|stop| *stop) => Err(End::Stopped),
        }
    }
}
