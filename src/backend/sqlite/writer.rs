//! The one thread that writes. What waits for it goes into one transaction: one flush to disk for all of it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::connect::{begin, commit, patiently, roll_back};
use super::desk::{Desk, Memo};
use super::thread_gone;
use crate::clock::Clock;
use crate::error::{Error, Result};

/// The most requests in one transaction.
const GROUP_MAX: usize = 64;

/// A request to the writer. It may be run several times, each time after the last was undone.
trait Work: Send {
    fn run(&mut self, desk: &mut Desk<'_>) -> Result<()>;
    /// Answers with what the last run came to: `Ok` only once it is committed.
    fn answer(self: Box<Self>, committed: Result<()>);
}

struct Task<T, F> {
    run: F,
    value: Option<T>,
    answer: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnMut(&mut Desk<'_>) -> Result<T> + Send> Work for Task<T, F> {
    fn run(&mut self, desk: &mut Desk<'_>) -> Result<()> {
        self.value = Some((self.run)(desk)?);
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Task { value, answer, .. } = *self;
        let _ = answer.send(committed.and_then(|()| value.ok_or_else(thread_gone))); // nobody may be waiting any more
    }
}

/// Sends requests to the thread that writes.
pub(super) struct Requests(Sender<Box<dyn Work>>);

impl Requests {
    /// Runs something in a transaction, perhaps with other requests; answered once it is committed.
    pub(super) fn send<T: Send + 'static>(
        &self,
        run: impl FnMut(&mut Desk<'_>) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer, receiver) = oneshot::channel();
        // If the thread is gone the answer's sender is dropped with the request, and the receiver sees that.
        let _ = self.0.send(Box::new(Task { run, value: None, answer }));
        receiver
    }
}

/// Starts the thread. It ends when its requests are dropped.
pub(super) fn start(
    conn: Connection,
    clock: Arc<dyn Clock>,
) -> std::io::Result<(Requests, std::thread::JoinHandle<()>)> {
    let (send, receive) = channel();
    let mut writer = Writer { conn, memo: Memo::default(), clock };
    let thread = std::thread::Builder::new()
        .name("hapax-sqlite-write".into())
        .spawn(move || writer.serve(&receive))?;
    Ok((Requests(send), thread))
}

struct Writer {
    conn: Connection,
    memo: Memo,
    clock: Arc<dyn Clock>,
}

impl Writer {
    fn serve(&mut self, requests: &Receiver<Box<dyn Work>>) {
        while let Ok(first) = requests.recv() {
            let mut group = vec![first];
            group.extend(requests.try_iter().take(GROUP_MAX - 1));
            match self.transact(&mut group) {
                Ok(()) => group.into_iter().for_each(|work| work.answer(Ok(()))),
                Err(error) => self.answer_failed(group, &error),
            }
        }
    }

    /// One request's trouble is not its neighbours': each goes again, alone.
    fn answer_failed(&mut self, group: Vec<Box<dyn Work>>, error: &Error) {
        let alone = group.len() == 1;
        for mut work in group {
            let result = if alone || matches!(error, Error::Contended { .. }) {
                Err(error.copy())
            } else {
                self.transact(std::slice::from_mut(&mut work))
            };
            work.answer(result);
        }
    }

    fn transact(&mut self, group: &mut [Box<dyn Work>]) -> Result<()> {
        patiently(|| {
            let result = self.once(group);
            if result.is_err() {
                roll_back(&self.conn);
                self.memo = Memo::default(); // it may know what was just undone
            }
            result
        })
    }

    fn once(&mut self, group: &mut [Box<dyn Work>]) -> Result<()> {
        begin(&self.conn, "beginning a transaction")?;
        self.memo.refresh(&self.conn)?;
        let mut desk = Desk::new(&self.conn, &mut self.memo, &*self.clock);
        for work in group {
            work.run(&mut desk)?;
        }
        desk.finish()?;
        commit(&self.conn, "committing")
    }
}
