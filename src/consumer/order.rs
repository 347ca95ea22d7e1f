//! The key scheduler: one queue per key. Keys run in parallel, each strictly in order.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;

use tokio::time::Instant;

/// Queues by key. A key is *idle* (its head may be taken), *taken* (its head runs) or *delayed*
/// (its head failed and waits). An item without a key forms its own queue.
///
/// ```
/// use hapax::consumer::KeyQueues;
/// let mut queues = KeyQueues::default();
/// queues.push(Some("a"), 1);
/// queues.push(Some("a"), 2);
/// queues.push(Some("b"), 3);
/// let taken = queues.take(10, 1); // the heads of both keys
/// assert_eq!(taken.iter().map(|run| run.items[0]).collect::<Vec<_>>(), [1, 3]);
/// assert!(queues.take(10, 1).is_empty()); // 2 waits for 1
/// for run in taken {
///     queues.release(run.queue, Vec::new(), None); // done
/// }
/// assert_eq!(queues.take(10, 1)[0].items, [2]);
/// ```
#[derive(Debug)]
pub struct KeyQueues<K, T> {
    queues: HashMap<QueueId<K>, Queue<T>>,
    /// Queues whose head may be taken, in the order in which they became ready.
    ready: VecDeque<QueueId<K>>,
    delayed: BTreeSet<(Instant, u64)>,
    delayed_queues: HashMap<u64, QueueId<K>>,
    number: u64,
    len: usize,
}

/// A unit of ordering: a key, or a single item.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum QueueId<K> {
    /// All items of a key.
    Key(K),
    /// One item without a key.
    Own(u64),
}

/// Items of one queue, in order, taken to be run. The queue yields nothing else until they are
/// released.
#[derive(Debug)]
pub struct QueueRun<K, T> {
    /// The queue.
    pub queue: QueueId<K>,
    /// Its first items.
    pub items: Vec<T>,
}

#[derive(Debug)]
struct Queue<T> {
    items: VecDeque<T>,
    taken: bool,
    delay: Option<(Instant, u64)>,
    /// Whether an item was queued that may precede others. Else nothing in it is compared.
    ranked: bool,
}

impl<K, T> Default for KeyQueues<K, T> {
    fn default() -> Self {
        KeyQueues {
            queues: HashMap::new(),
            ready: VecDeque::new(),
            delayed: BTreeSet::new(),
            delayed_queues: HashMap::new(),
            number: 0,
            len: 0,
        }
    }
}

impl<K: Eq + Hash + Clone, T> KeyQueues<K, T> {
    /// Queues an item behind the others of its key. It precedes none of them, so none is looked at:
    /// a hot key may have very many.
    pub fn push(&mut self, key: Option<K>, item: T) {
        self.insert(key, item, |queue, _| queue.items.len());
    }

    /// Queues an item before the first of its key that it precedes (`precedes(item, other)`). If it
    /// becomes the head, it does not wait for a delayed one behind it. Items already taken are not
    /// affected; [`release_among`](Self::release_among) puts those behind it.
    pub fn push_before(&mut self, key: Option<K>, item: T, precedes: impl Fn(&T, &T) -> bool) {
        self.insert(key, item, |queue, item| {
            queue.ranked = true;
            queue.items.iter().position(|other| precedes(item, other)).unwrap_or(queue.items.len())
        });
    }

    fn insert(&mut self, key: Option<K>, item: T, place: impl FnOnce(&mut Queue<T>, &T) -> usize) {
        self.number += 1;
        let id = key.map_or(QueueId::Own(self.number), QueueId::Key);
        let queue = self.queues.entry(id.clone()).or_insert_with(|| Queue {
            items: VecDeque::new(),
            taken: false,
            delay: None,
            ranked: false,
        });
        let at = place(queue, &item);
        queue.items.insert(at, item);
        self.len += 1;
        if at > 0 || queue.taken {
            return;
        }
        let delay = queue.delay.take();
        if let Some(delay) = delay {
            self.delayed.remove(&delay);
            self.delayed_queues.remove(&delay.1);
        }
        if delay.is_some() || queue.items.len() == 1 {
            self.ready.push_back(id);
        }
    }

    /// Takes the heads of idle keys: at most `max` items in all, and at most `per_key` of one key.
    pub fn take(&mut self, max: usize, per_key: usize) -> Vec<QueueRun<K, T>> {
        self.wake();
        let (mut runs, mut left) = (Vec::new(), max);
        while left > 0 {
            let Some(id) = self.ready.pop_front() else { break };
            let Some(queue) = self.queues.get_mut(&id) else { continue };
            let count = per_key.min(left).min(queue.items.len());
            if count == 0 || queue.taken {
                continue;
            }
            queue.taken = true;
            left -= count;
            self.len -= count;
            runs.push(QueueRun { items: queue.items.drain(..count).collect(), queue: id });
        }
        runs
    }

    /// Puts taken items back in front of the others of their queue, which stays taken.
    pub fn put_back(&mut self, id: &QueueId<K>, rest: Vec<T>) {
        let Some(queue) = self.queues.get_mut(id) else { return };
        self.len += rest.len();
        for item in rest.into_iter().rev() {
            queue.items.push_front(item);
        }
    }

    /// Releases a taken queue: `rest` goes to its front again, and none of it is taken before
    /// `until`.
    pub fn release(&mut self, id: QueueId<K>, rest: Vec<T>, until: Option<Instant>) {
        self.release_among(id, rest, until, |_, _| false);
    }

    /// The same, but items that [`push_before`](Self::push_before) queued meanwhile stay before those of
    /// `rest` that they precede (`precedes(queued, given)`). If one comes before all of `rest`, the queue
    /// is not delayed.
    pub fn release_among(
        &mut self,
        id: QueueId<K>,
        rest: Vec<T>,
        until: Option<Instant>,
        precedes: impl Fn(&T, &T) -> bool,
    ) {
        let Some(queue) = self.queues.get_mut(&id) else { return };
        queue.taken = false;
        self.len += rest.len();
        let mut first = 0; // index of the first of the rest
        for item in rest.into_iter().rev() {
            if queue.ranked {
                first = queue.items.iter().rposition(|queued| precedes(queued, &item)).map_or(0, |at| at + 1);
            }
            queue.items.insert(first, item);
        }
        if queue.items.is_empty() {
            self.queues.remove(&id);
            return;
        }
        if let Some(until) = until.filter(|_| first == 0) {
            self.number += 1;
            queue.delay = Some((until, self.number));
            self.delayed.insert((until, self.number));
            self.delayed_queues.insert(self.number, id);
        } else {
            self.ready.push_back(id);
        }
    }

    /// When the next delayed queue becomes ready.
    pub fn next_at(&self) -> Option<Instant> {
        self.delayed.first().map(|(at, _)| *at)
    }

    /// Whether anything can be taken now.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty() || self.next_at().is_some_and(|at| at <= Instant::now())
    }

    /// The number of queued items, not counting taken ones.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no items are queued.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops queued items for which `keep` returns false. Taken items are not affected.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let len = &mut self.len;
        self.queues.retain(|_, queue| {
            let before = queue.items.len();
            queue.items.retain(&mut keep);
            *len -= before - queue.items.len();
            queue.taken || !queue.items.is_empty()
        });
    }

    /// Changes queued items in place. Must not change their keys or their order.
    pub fn for_each(&mut self, change: impl FnMut(&mut T)) {
        self.queues.values_mut().flat_map(|queue| queue.items.iter_mut()).for_each(change);
    }

    fn wake(&mut self) {
        let now = Instant::now();
        while let Some((at, number)) = self.delayed.first().copied().filter(|(at, _)| *at <= now) {
            self.delayed.remove(&(at, number));
            let Some(id) = self.delayed_queues.remove(&number) else { continue };
            if let Some(queue) = self.queues.get_mut(&id).filter(|queue| queue.delay == Some((at, number))) {
                queue.delay = None;
                self.ready.push_back(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KeyQueues, QueueId};
    use proptest::prelude::*;
    use tokio::time::{Duration, Instant};

    #[tokio::test(start_paused = true)]
    async fn a_delayed_head_holds_back_its_key_and_no_other() {
        let mut queues = KeyQueues::default();
        queues.push(Some("a"), 1);
        queues.push(Some("a"), 2);
        queues.push(Some("b"), 3);
        let mut taken = queues.take(1, 1);
        let run = taken.remove(0);
        queues.release(run.queue, vec![1], Some(Instant::now() + Duration::from_secs(1)));
        assert_eq!(queues.take(9, 9)[0].items, [3]);
        assert!(queues.take(9, 9).is_empty());
        assert_eq!(queues.len(), 2);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(queues.take(9, 9)[0].items, [1, 2], "in order, after the pause");
    }

    #[tokio::test(start_paused = true)]
    async fn what_must_precede_does_whatever_became_of_the_others() {
        let mut queues = KeyQueues::default();
        let later = || Some(Instant::now() + Duration::from_secs(9));
        let before = |one: &i32, other: &i32| one < other;
        queues.push(Some("a"), 7);
        queues.push(Some("a"), 8);
        // While it is taken.
        let run = queues.take(9, 9).remove(0);
        queues.push_before(Some("a"), 3, before);
        queues.push(Some("a"), 9);
        queues.release_among(run.queue, run.items, later(), before);
        let run = queues.take(9, 1).remove(0);
        assert_eq!(run.items, [3], "at once");
        // While it is delayed.
        queues.release_among(run.queue, vec![], None, before);
        let run = queues.take(9, 1).remove(0);
        assert_eq!(run.items, [7]);
        queues.release_among(run.queue, run.items, later(), before);
        assert!(queues.take(9, 9).is_empty() && queues.next_at().is_some());
        queues.push_before(Some("a"), 4, before);
        assert!(queues.next_at().is_none());
        assert_eq!(queues.take(9, 9)[0].items, [4, 7, 8, 9]);
        assert!(queues.is_empty());
    }

    /// Whether one item goes before another: all of a strict order are compared, else what comes from
    /// the ledger.
    fn precedes(strict: bool) -> impl Fn(&(u32, bool), &(u32, bool)) -> bool + Copy {
        move |(seq, is_held), (other, _)| (strict || *is_held) && seq < other
    }

    /// A seq, and whether the item was held.
    type Item = (u32, bool);
    /// What is done, the key, the item, how many are taken, how many of a key.
    type Step = (u8, u8, Item, usize, usize);

    /// The same steps in a queue that compares every item and in one that compares only what may precede
    /// another. Both must run the same.
    async fn run_in_both(strict: bool, steps: Vec<Step>) {
        let precedes = precedes(strict);
        let (mut all, mut some) = (KeyQueues::default(), KeyQueues::default());
        let mut running: Vec<(QueueId<u8>, Vec<Item>)> = Vec::new();
        for (step, key, item, max, part) in steps {
            match step {
                0..3 => {
                    all.push_before(Some(key), item, precedes);
                    if strict || item.1 {
                        some.push_before(Some(key), item, precedes);
                    } else {
                        some.push(Some(key), item);
                    }
                }
                3 => {
                    let per_key = part.max(1);
                    let (of_all, of_some) = (all.take(max, per_key), some.take(max, per_key));
                    assert_eq!(of_all.len(), of_some.len());
                    for (one, other) in of_all.into_iter().zip(of_some) {
                        assert_eq!((&one.queue, &one.items), (&other.queue, &other.items));
                        running.push((one.queue, one.items));
                    }
                }
                4 => {
                    let Some((queue, items)) = running.pop() else { continue };
                    let rest = items[part.min(items.len())..].to_vec();
                    let until = item.1.then(|| Instant::now() + Duration::from_secs(1));
                    all.release_among(queue.clone(), rest.clone(), until, precedes);
                    some.release_among(queue, rest, until, precedes);
                }
                _ => {
                    tokio::time::advance(Duration::from_millis(400)).await;
                    let Some((queue, items)) = running.last_mut() else { continue };
                    let rest = items.split_off(part.min(items.len()));
                    all.put_back(queue, rest.clone());
                    some.put_back(queue, rest);
                }
            }
            assert_eq!((all.len(), all.next_at()), (some.len(), some.next_at()));
        }
    }

    proptest! {
        #[test]
        fn what_precedes_nothing_need_not_be_compared(
            strict: bool,
            steps in prop::collection::vec(
                (0..6_u8, 0..2_u8, (0..20_u32, prop::bool::weighted(0.3)), 1..8_usize, 0..5_usize), 0..80),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            runtime.unwrap().block_on(run_in_both(strict, steps));
        }
    }

    #[test]
    fn what_has_no_key_runs_beside_everything() {
        let mut queues = KeyQueues::<&str, i32>::default();
        queues.push(None, 1);
        queues.push(None, 2);
        assert_eq!(queues.take(9, 1).len(), 2);
    }

    #[test]
    fn retain_forgets_what_is_queued_and_keeps_what_is_taken() {
        let mut queues = KeyQueues::default();
        for n in 0..4 {
            queues.push(Some("a"), n);
        }
        let run = queues.take(1, 1).remove(0);
        queues.retain(|n| *n == 3);
        assert_eq!(queues.len(), 1);
        queues.release(run.queue, vec![], None);
        assert_eq!(queues.take(9, 9)[0].items, [3]);
        queues.release(QueueId::Key("a"), vec![], None);
        assert!(queues.is_empty() && !queues.has_ready());
    }
}
