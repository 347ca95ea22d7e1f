//! Something that takes long to count: one task counts it at a time, for all who ask, whether or not they still wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax::Error;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a count stays fresh at least, unless [`Recent::with_period`] says otherwise.
pub const PERIOD: Duration = Duration::from_secs(2);
/// Counting may take at most this part of the time.
const COUNTING_PART: u32 = 10;
/// For how many counts a caller waits at most, if changes overtake them.
const TRIES: u32 = 3;

/// What was counted lately, and whether it is being counted.
#[derive(Debug)]
pub struct Recent<T> {
    state: watch::Sender<State<T>>,
    /// How long a count stays fresh, however quick it was.
    period: Duration,
}

#[derive(Debug)]
struct State<T> {
    /// Since when it is being counted.
    since: Option<Instant>,
    /// The last one that succeeded.
    last: Option<Arc<Count<T>>>,
    /// When the last one ended, how long it took, and why it failed; none while it is being counted.
    ended: Option<(Instant, Duration, Option<Arc<Error>>)>,
    /// How often what is counted was changed. A count that began before the last change does not count.
    changes: u64,
    /// How many counts have ended that a change had overtaken.
    overtaken: u64,
}

/// What was counted.
#[derive(Debug)]
pub struct Count<T> {
    pub value: T,
    pub took: Duration,
    began: Instant,
}

impl<T> Count<T> {
    /// How old it is.
    pub fn age(&self) -> Duration {
        self.began.elapsed()
    }
}

/// What is known of it now.
#[derive(Debug)]
pub enum Latest<T> {
    Counted(Arc<Count<T>>),
    /// It is being counted for the first time, for so long.
    Counting(Duration),
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Recent::with_period(PERIOD)
    }
}

impl<T> Recent<T> {
    /// Nothing was counted yet. A count that is quick stays fresh for this long.
    pub fn with_period(period: Duration) -> Self {
        Recent {
            state: watch::Sender::new(State {
                since: None,
                last: None,
                ended: None,
                changes: 0,
                overtaken: 0,
            }),
            period,
        }
    }

    /// What is counted was changed: nobody is told an earlier count. One that is under way is finished, so that no
    /// two run side by side, and not told either.
    fn forget(&self) {
        self.state.send_modify(|state| {
            state.changes += 1;
            (state.last, state.ended) = (None, None);
        });
    }

    fn is_used(&self) -> bool {
        self.state.borrow().since.is_some()
    }
}

impl<T> State<T> {
    /// A failure, however long it took, is told for as long as a quick count: a store that was away may be back.
    fn is_fresh(&self, period: Duration) -> bool {
        let keeps = |took: &Duration, failed: bool| {
            let counting = if failed { PERIOD } else { *took * COUNTING_PART };
            period.max(counting).mul_f64(0.9)
        };
        self.ended.as_ref().is_some_and(|(at, took, error)| at.elapsed() < keeps(took, error.is_some()))
    }
}

impl<T: Send + Sync + 'static> Recent<T> {
    /// A fresh count if there is one within `patience`, or else the last one. It goes on if the caller does not wait
    /// for it: whoever asks next gets it. It is dropped when the server stops.
    pub async fn get<F>(
        &self,
        patience: Duration,
        stopping: &watch::Receiver<bool>,
        count: impl Fn() -> F,
    ) -> Result<Latest<T>, Arc<Error>>
    where
        F: Future<Output = hapax::Result<T>> + Send + 'static,
    {
        let began = Instant::now();
        let mut tries = 0;
        loop {
            tries += 1;
            let overtaken = self.state.borrow().overtaken;
            if let Some(counting) = self.begins() {
                let (counted, mut stopping) = (count(), stopping.clone());
                tokio::spawn(async move {
                    let began = Instant::now();
                    tokio::select! {
                        counted = counted => counting.end(began, counted),
                        () = super::app::stopped(&mut stopping) => {}
                    }
                });
            }
            let mut seen = self.state.subscribe();
            let ends = seen.wait_for(|state| state.since.is_none());
            // Without an end in time the state is as it is now.
            let is_late = tokio::time::timeout_at(began + patience, ends).await.is_err();
            let state = self.state.borrow();
            let is_known = state.last.is_some() || state.ended.is_some();
            if state.overtaken != overtaken && !is_known && tries < TRIES && !is_late {
                continue; // what was waited for is told to nobody
            }
            if let Some((_, _, Some(error))) = state.ended.as_ref().filter(|_| state.since.is_none()) {
                return Err(Arc::clone(error));
            }
            return Ok(match &state.last {
                Some(count) => Latest::Counted(Arc::clone(count)),
                None => Latest::Counting(state.since.unwrap_or(began).elapsed()),
            });
        }
    }

    /// If the caller is the one who counts: nobody does, or did just now.
    fn begins(&self) -> Option<Counting<T>> {
        let mut changes = 0;
        let begins = self.state.send_if_modified(|state| {
            let begins = state.since.is_none() && !state.is_fresh(self.period);
            if begins {
                (state.since, state.ended, changes) = (Some(Instant::now()), None, state.changes);
            }
            begins
        });
        begins.then(|| Counting { state: self.state.clone(), changes })
    }
}

/// Whoever counts. When it ends, also by a panic, the next who asks begins again.
struct Counting<T> {
    state: watch::Sender<State<T>>,
    /// How many changes there were when it began.
    changes: u64,
}

impl<T> Counting<T> {
    fn end(&self, began: Instant, counted: hapax::Result<T>) {
        let took = began.elapsed();
        self.state.send_modify(|state| {
            if state.changes != self.changes {
                state.overtaken += 1;
                return;
            }
            let failed = match counted {
                Ok(value) => {
                    state.last = Some(Arc::new(Count { value, took, began }));
                    None
                }
                Err(error) => Some(Arc::new(error)),
            };
            state.ended = Some((Instant::now(), took, failed));
        });
    }
}

impl<T> Drop for Counting<T> {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.since = None);
    }
}

/// For how many questions the last answer is remembered.
const QUESTIONS_MAX: usize = 32;

/// What was found lately, by question: all who may see the same share one look. A quick one is not remembered.
#[derive(Debug)]
pub struct RecentBy<Q, T>(Mutex<BTreeMap<Q, Arc<Recent<T>>>>);

impl<Q, T> Default for RecentBy<Q, T> {
    fn default() -> Self {
        RecentBy(Mutex::default())
    }
}

impl<Q: Ord + Clone, T> RecentBy<Q, T> {
    pub fn of(&self, question: &Q) -> Arc<Recent<T>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= QUESTIONS_MAX && !known.contains_key(question) {
            known.retain(|_, recent| recent.is_used());
        }
        let new = || Arc::new(Recent::with_period(Duration::ZERO));
        Arc::clone(known.entry(question.clone()).or_insert_with(new))
    }

    /// Something was changed: whoever asks from now on gets what is found from now on.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().for_each(|recent| recent.forget());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn counted(latest: Result<Latest<u32>, Arc<Error>>) -> Option<u32> {
        match latest.unwrap() {
            Latest::Counted(count) => Some(count.value),
            Latest::Counting(_) => None,
        }
    }

    /// T420: a count that takes longer than anybody waits is finished, once, and not begun again by each who asks.
    #[tokio::test(start_paused = true)]
    async fn t420_a_long_count_is_made_once_for_all_who_ask() {
        let (_stop, stopping) = watch::channel(false);
        let (recent, begun, may_end) =
            (Recent::default(), Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
        let count = || {
            let (begun, may_end) = (Arc::clone(&begun), Arc::clone(&may_end));
            async move {
                let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                may_end.acquire().await.unwrap().forget();
                Ok(number)
            }
        };
        for asked in 1..=5 {
            assert_eq!(
                counted(recent.get(NOW, &stopping, count).await),
                None,
                "asked for the {asked}th time"
            );
        }
        // Nobody waits at all, and it goes on.
        drop(recent.get(NOW, &stopping, count));
        may_end.add_permits(1);
        assert_eq!(counted(recent.get(NOW, &stopping, count).await), Some(1));
        assert_eq!(begun.load(Ordering::SeqCst), 1);
        // It took 5 s: for 45 s nobody counts again. Then the last one is told while another is under way.
        tokio::time::sleep(Duration::from_secs(40)).await;
        assert_eq!(counted(recent.get(NOW, &stopping, count).await), Some(1));
        assert_eq!(begun.load(Ordering::SeqCst), 1);
        tokio::time::sleep(Duration::from_secs(10)).await;
        let Latest::Counted(last) = recent.get(NOW, &stopping, count).await.unwrap() else { panic!() };
        assert!(last.value == 1 && last.age() > Duration::from_secs(50), "{last:?}");
        assert_eq!(begun.load(Ordering::SeqCst), 2);
        may_end.add_permits(1);
        assert_eq!(counted(recent.get(NOW, &stopping, count).await), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_that_fails_or_panics_is_made_again() {
        let (_stop, stopping) = watch::channel(false);
        let recent = Recent::default();
        let fails = || async { Err(Error::NotFound("x".into())) };
        assert!(recent.get(NOW, &stopping, fails).await.is_err());
        assert!(recent.get(NOW, &stopping, || async { Ok(1) }).await.is_err(), "too soon");
        tokio::time::sleep(PERIOD).await;
        assert_eq!(counted(recent.get(NOW, &stopping, || async { panic!("as it does") }).await), None);
        assert_eq!(counted(recent.get(NOW, &stopping, || async { Ok(3) }).await), Some(3));
    }

    /// T474: looks do not pile up behind changes, and what was found before one is told to nobody.
    #[tokio::test(start_paused = true)]
    async fn t474_a_look_that_a_change_overtakes_is_finished_alone_and_not_told() {
        let (_stop, stopping) = watch::channel(false);
        let (by, begun, may_end) =
            (RecentBy::<&str, u32>::default(), Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
        let look = || {
            let (recent, begun, may_end) = (by.of(&"all"), Arc::clone(&begun), Arc::clone(&may_end));
            let stopping = stopping.clone();
            async move {
                let look = || {
                    let (begun, may_end) = (Arc::clone(&begun), Arc::clone(&may_end));
                    async move {
                        let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                        may_end.acquire().await.unwrap().forget();
                        Ok(number)
                    }
                };
                counted(recent.get(NOW, &stopping, look).await)
            }
        };
        assert_eq!(look().await, None, "under way");
        for _ in 0..5 {
            by.forget();
            assert_eq!(look().await, None);
        }
        assert_eq!(begun.load(Ordering::SeqCst), 1, "one at a time");
        may_end.add_permits(1);
        while by.of(&"all").is_used() {
            tokio::task::yield_now().await;
        }
        may_end.add_permits(1);
        assert_eq!(look().await, Some(2), "what the first one found is not told");
    }

    /// T538: who waits for a look that a change overtakes gets the next one, not a refusal. Where one change follows
    /// the other, nobody looks for ever.
    #[tokio::test(start_paused = true)]
    async fn t538_who_waits_for_a_look_that_is_overtaken_gets_the_next() {
        let (_stop, stopping) = watch::channel(false);
        let (recent, looked) = (Recent::with_period(Duration::ZERO), Arc::new(AtomicU32::new(0)));
        let look = || {
            let looked = Arc::clone(&looked);
            async move {
                tokio::time::sleep(NOW).await;
                Ok(looked.fetch_add(1, Ordering::SeqCst) + 1)
            }
        };
        let ask = || async { counted(recent.get(10 * NOW, &stopping, look).await) };
        let (first, second) = tokio::join!(ask(), async {
            tokio::time::sleep(NOW / 2).await;
            recent.forget();
            ask().await
        });
        assert_eq!((first, second), (Some(2), Some(2)));
        recent.forget();
        let changes = async {
            loop {
                recent.forget();
                tokio::time::sleep(NOW / 2).await;
            }
        };
        tokio::select! {
            found = ask() => assert_eq!(found, None),
            () = changes => {}
        }
        assert_eq!(looked.load(Ordering::SeqCst), 2 + TRIES);
    }

    /// T474: a store that was away for long is asked again soon.
    #[tokio::test(start_paused = true)]
    async fn t474_a_failure_that_took_long_is_not_told_for_long() {
        let (_stop, stopping) = watch::channel(false);
        let recent = Recent::with_period(Duration::ZERO);
        let fails = || async {
            tokio::time::sleep(60 * NOW).await;
            Err(Error::NotFound("x".into()))
        };
        assert!(recent.get(100 * NOW, &stopping, fails).await.is_err());
        tokio::time::sleep(PERIOD).await;
        assert_eq!(counted(recent.get(NOW, &stopping, || async { Ok(2) }).await), Some(2));
    }

    /// T471: what reads much is looked for once for all who ask, and again only after ten times as long as it took, or
    /// when it was changed here.
    #[tokio::test(start_paused = true)]
    async fn t471_a_long_look_is_shared_by_those_who_may_see_the_same() {
        let (_stop, stopping) = watch::channel(false);
        let (by, looked) = (RecentBy::<&str, u32>::default(), Arc::new(AtomicU32::new(0)));
        let look = |of| {
            let (recent, looked, stopping) = (by.of(&of), Arc::clone(&looked), stopping.clone());
            async move {
                let look = || {
                    let looked = Arc::clone(&looked);
                    async move {
                        tokio::time::sleep(NOW).await;
                        Ok(looked.fetch_add(1, Ordering::SeqCst) + 1)
                    }
                };
                counted(recent.get(2 * NOW, &stopping, look).await)
            }
        };
        assert_eq!(tokio::join!(look("acme"), look("acme"), look("acme")), (Some(1), Some(1), Some(1)));
        assert_eq!(look("all").await, Some(2), "what others may see is looked for apart");
        assert_eq!(look("acme").await, Some(1));
        tokio::time::sleep(10 * NOW).await;
        assert_eq!(look("acme").await, Some(3));
        by.forget();
        assert_eq!(look("acme").await, Some(4));
    }
}
