//! Coalesces single appends of concurrent tasks into batches.
//!
//! While one statement runs, the next batch gathers; there is no timer, so a lone append goes out
//! at once. Appends of an aggregate always use the same queue, so they run in the order of the
//! calls. A batch with an unknown outcome is sent again unchanged; appends that had taken effect
//! are answered as repeats.

use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Append, Appended, Journal};
use crate::error::Result;
use crate::ledger::{Outage, Queue, gone, in_batch};

/// Parallel queues: while one statement commits, the other batch gathers and is sent.
const WAYS: usize = 2;

/// Gathers single appends into batches of a journal. Cheap to clone.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::sync::Arc;
/// use hapax::journal::{Append, Appender, Expected, MemoryJournal};
/// use hapax::{Aggregate, Event, EventId};
/// let appender = Appender::new(Arc::new(MemoryJournal::default()));
/// let append = |id| Append::new(Aggregate::new("a").unwrap(), Expected::Any, [Event::new(EventId::new(id).unwrap())]);
/// let (one, two) = tokio::join!(appender.append(append("e-1")), appender.append(append("e-2")));
/// assert_eq!((one.unwrap().last_seq(), two.unwrap().last_seq()), (1, 2));
/// # });
/// ```
#[derive(Clone)]
pub struct Appender(Arc<Inner>);

struct Inner {
    journal: Arc<dyn Journal>,
    ways: [Queue<Append, Appended>; WAYS],
    hash: RandomState,
    outage: Outage,
}

impl Appender {
    /// Gathers appends for a journal.
    pub fn new(journal: Arc<dyn Journal>) -> Self {
        let ways = std::array::from_fn(|_| Queue::default());
        Appender(Arc::new(Inner {
            journal,
            ways,
            hash: RandomState::new(),
            outage: Outage::of("the journal"),
        }))
    }

    /// The journal.
    pub fn journal(&self) -> &Arc<dyn Journal> {
        &self.0.journal
    }

    /// Appends as [`Journal::append`] does, batched with concurrent appends. The append is already
    /// under way when this returns; dropping the future only discards the answer. `Unavailable`: it
    /// is unknown whether the append took effect; repeating the same append is safe.
    pub fn append(&self, append: Append) -> impl Future<Output = Result<Appended>> + Send + use<> {
        let way = (self.0.hash.hash_one((&append.tenant, &append.aggregate)) % WAYS as u64) as usize;
        let (send, receive) = oneshot::channel();
        if self.0.ways[way].push(append, send, 1) {
            tokio::spawn(self.clone().run(way));
        }
        async move { receive.await.map_err(|_| gone())? }
    }

    async fn run(self, way: usize) {
        let mut runner = self.0.ways[way].runner();
        while let Some((appends, answers)) = runner.next().await {
            let journal = &self.0.journal;
            let appended = in_batch(&self.0.outage, &appends, |batch| Box::pin(whole(journal, batch))).await;
            for (answer, appended) in answers.into_iter().zip(appended) {
                let _ = answer.send(appended);
            }
        }
    }
}

/// Sends a batch. If every append failed with a retryable error, the batch as a whole failed, so
/// that it is sent again in the same order.
async fn whole(journal: &Arc<dyn Journal>, batch: &[Append]) -> Result<Vec<Result<Appended>>> {
    let mut answers = journal.append_many(batch).await?;
    let passing = |answer: &Result<Appended>| answer.as_ref().is_err_and(crate::Error::is_retryable);
    if answers.iter().all(passing)
        && let Some(Err(error)) = answers.pop()
    {
        return Err(error);
    }
    Ok(answers)
}

impl std::fmt::Debug for Appender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Appender").field("journal", &self.0.journal.id()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::id::{Aggregate, EventId};
    use crate::journal::{Expected, MemoryJournal};

    fn append(aggregate: &str, id: &str, expected: Expected) -> Append {
        let event = Event::new(EventId::new(id).unwrap());
        Append::new(Aggregate::new(aggregate).unwrap(), expected, [event])
    }

    #[tokio::test]
    async fn an_aggregates_appends_keep_the_order_of_their_calls() {
        let appender = Appender::new(Arc::new(MemoryJournal::default()));
        let calls: Vec<_> = (0..200)
            .map(|n| {
                appender.append(append(&format!("a-{}", n % 4), &format!("e-{n}"), Expected::Exact(n / 4)))
            })
            .collect();
        for (n, call) in (0..).zip(calls) {
            assert_eq!(call.await.unwrap().last_seq(), n / 4 + 1);
        }
    }

    #[tokio::test]
    async fn a_refused_append_harms_no_other_and_a_dropped_call_is_made() {
        let appender = Appender::new(Arc::new(MemoryJournal::default()));
        drop(appender.append(append("a", "e-1", Expected::New)));
        let refused = appender.append(append("a", "e-2", Expected::New));
        let stored = appender.append(append("a", "e-3", Expected::Exact(1)));
        assert_eq!(refused.await.unwrap_err().code(), "conflict");
        assert_eq!(stored.await.unwrap().last_seq(), 2);
    }
}
