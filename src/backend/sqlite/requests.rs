//! Requests to a writer thread. All waiting requests run in one transaction, with one flush to
//! disk.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::connect::{patiently, roll_back};
use super::thread_gone;
use crate::error::{Error, Result};

/// A kind of writer thread.
pub(crate) trait Kind: 'static {
    /// One transaction's view of the file, which requests work on.
    type Context<'c>;
}

/// A request. It may run several times, each time after the previous run was rolled back.
pub(crate) trait Work<K: Kind>: Send {
    fn run(&mut self, context: &mut K::Context<'_>) -> Result<()>;
    /// Answers with the result of the last run: `Ok` only once it is committed.
    fn answer(self: Box<Self>, committed: Result<()>);
}

/// Requests that share a transaction.
pub(crate) type Group<K> = Vec<Box<dyn Work<K>>>;

struct Task<T, F> {
    run: F,
    value: Option<T>,
    answer: oneshot::Sender<Result<T>>,
    /// It is not run if nobody waits for its answer any more.
    only_if_awaited: bool,
}

impl<K: Kind, T: Send, F: FnMut(&mut K::Context<'_>) -> Result<T> + Send> Work<K> for Task<T, F> {
    fn run(&mut self, context: &mut K::Context<'_>) -> Result<()> {
        self.value = None;
        if !(self.only_if_awaited && self.answer.is_closed()) {
            self.value = Some((self.run)(context)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Task { value, answer, .. } = *self;
        let _ = answer.send(committed.and_then(|()| value.ok_or_else(thread_gone))); // the caller may be gone
    }
}

/// Sends requests to the writer thread.
pub(crate) struct Requests<K: Kind>(Sender<Box<dyn Work<K>>>);

impl<K: Kind> Requests<K> {
    /// The sender, and the receiver for the thread. The thread ends when the sender is dropped.
    pub(crate) fn new() -> (Self, Receiver<Box<dyn Work<K>>>) {
        let (send, receive) = channel();
        (Requests(send), receive)
    }

    /// Runs `run` in a transaction, possibly with other requests, and answers once it is committed.
    /// If the request itself is at fault, `run` says so in its value; an error rolls back the whole
    /// transaction.
    pub(crate) fn send<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut K::Context<'_>) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        self.push(run, false)
    }

    /// The same for a request that grants something to its caller: it is dropped if the caller is gone
    /// before it runs, because nobody would give back what it was granted.
    pub(crate) fn send_if_awaited<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut K::Context<'_>) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        self.push(run, true)
    }

    fn push<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut K::Context<'_>) -> Result<T> + Send + 'static,
        only_if_awaited: bool,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer, receiver) = oneshot::channel();
        // If the thread has ended, the request is dropped with the answer's sender, and the
        // receiver notices.
        let _ = self.0.send(Box::new(Task { run, value: None, answer, only_if_awaited }));
        receiver
    }
}

/// Gathers a request and those waiting behind it, at most `max`.
pub(crate) fn group<K: Kind>(
    first: Box<dyn Work<K>>,
    requests: &Receiver<Box<dyn Work<K>>>,
    max: usize,
) -> Group<K> {
    let mut group = vec![first];
    group.extend(requests.try_iter().take(max - 1));
    group
}

/// Runs a group in one transaction and answers each request. If the group fails, each request runs
/// again alone, so that one does not fail its neighbours.
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

/// A writer that only runs requests.
pub(crate) trait Writer: Kind + Send {
    /// The name of its thread.
    const THREAD: &'static str;
    /// The most requests in one transaction.
    const GROUP_MAX: usize;

    fn conn(&self) -> &Connection;

    /// Begins a transaction, runs the requests in it and commits. An error rolls it back.
    fn transact(&mut self, run: impl FnMut(&mut Self::Context<'_>) -> Result<()>) -> Result<()>;

    /// The transaction was rolled back.
    fn rolled_back(&mut self) {}
}

/// Starts a writer's thread. It ends when its requests are dropped.
pub(crate) fn start<W: Writer>(mut writer: W) -> std::io::Result<(Requests<W>, JoinHandle<()>)> {
    let (send, receive) = Requests::new();
    let serve = move || {
        while let Ok(first) = receive.recv() {
            handle(group(first, &receive, W::GROUP_MAX), |group| {
                patiently(|| {
                    let run = |tx: &mut W::Context<'_>| group.iter_mut().try_for_each(|work| work.run(tx));
                    let done = writer.transact(run);
                    if done.is_err() {
                        roll_back(writer.conn());
                        writer.rolled_back();
                    }
                    done
                })
            });
        }
    };
    let thread = std::thread::Builder::new().name(W::THREAD.into()).spawn(serve)?;
    Ok((send, thread))
}
