//! Requests to a thread that writes. What waits for it goes into one transaction: one flush to disk for all of it.

use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::sync::oneshot;

use super::thread_gone;
use crate::error::{Error, Result};

/// What the requests to one kind of thread work on.
pub(crate) trait Kind: 'static {
    /// One transaction's view of the file.
    type Context<'c>;
}

/// A request. It may be run several times, each time after the last was undone.
pub(crate) trait Work<K: Kind>: Send {
    fn run(&mut self, context: &mut K::Context<'_>) -> Result<()>;
    /// Answers with what the last run came to: `Ok` only once it is committed.
    fn answer(self: Box<Self>, committed: Result<()>);
}

/// Requests that share a transaction.
pub(crate) type Group<K> = Vec<Box<dyn Work<K>>>;

struct Task<T, F> {
    run: F,
    value: Option<T>,
    answer: oneshot::Sender<Result<T>>,
}

impl<K: Kind, T: Send, F: FnMut(&mut K::Context<'_>) -> Result<T> + Send> Work<K> for Task<T, F> {
    fn run(&mut self, context: &mut K::Context<'_>) -> Result<()> {
        self.value = Some((self.run)(context)?);
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Task { value, answer, .. } = *self;
        let _ = answer.send(committed.and_then(|()| value.ok_or_else(thread_gone))); // nobody may be waiting any more
    }
}

/// Sends requests to the thread that writes.
pub(crate) struct Requests<K: Kind>(Sender<Box<dyn Work<K>>>);

impl<K: Kind> Requests<K> {
    /// A way to the thread, and its end of it. The thread ends when its requests are dropped.
    pub(crate) fn new() -> (Self, Receiver<Box<dyn Work<K>>>) {
        let (send, receive) = channel();
        (Requests(send), receive)
    }

    /// Runs something in a transaction, perhaps with other requests; answered once it is committed. What it finds
    /// wrong with the request is part of its value: an error undoes the whole transaction.
    pub(crate) fn send<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut K::Context<'_>) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer, receiver) = oneshot::channel();
        // If the thread is gone the answer's sender is dropped with the request, and the receiver sees that.
        let _ = self.0.send(Box::new(Task { run, value: None, answer }));
        receiver
    }
}

/// A request and those that wait behind it, at most `max` together.
pub(crate) fn group<K: Kind>(
    first: Box<dyn Work<K>>,
    requests: &Receiver<Box<dyn Work<K>>>,
    max: usize,
) -> Group<K> {
    let mut group = vec![first];
    group.extend(requests.try_iter().take(max - 1));
    group
}

/// Runs a group in one transaction and answers each. One request's trouble is not its neighbours': if the group fails, each
/// goes again, alone.
pub(crate) fn handle<K: Kind>(
    mut group: Group<K>,
    mut transact: impl FnMut(&mut [Box<dyn Work<K>>]) -> Result<()>,
) {
    let error = match transact(&mut group) {
        Ok(()) => return group.into_iter().for_each(|work| work.answer(Ok(()))),
        Err(error) => error,
    };
    let alone = group.len() == 1;
    for mut work in group {
        let result = if alone || matches!(error, Error::Contended { .. }) {
            Err(error.copy())
        } else {
            transact(std::slice::from_mut(&mut work))
        };
        work.answer(result);
    }
}
