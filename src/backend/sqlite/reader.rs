//! The single reader thread, on its own connection. Reader and writer never wait for each other.

use std::sync::mpsc::{Sender, channel};

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::connect::simple;
use crate::error::Result;

type Question = Box<dyn FnOnce(&Connection) + Send>;

/// Sends questions to the reader thread.
pub(crate) struct Questions(Sender<Question>);

impl Questions {
    /// Asks a question about one snapshot of the file.
    pub(crate) fn send<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer, receiver) = oneshot::channel();
        let question: Question = Box::new(move |conn| {
            if answer.is_closed() {
                return; // the caller has gone
            }
            let _ = answer.send(in_snapshot(conn, ask)); // the caller may have gone
        });
        let _ = self.0.send(question); // if the thread has ended, the receiver notices
        receiver
    }
}

fn in_snapshot<T>(conn: &Connection, ask: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
    simple(conn, "BEGIN", "reading")?;
    let result = ask(conn);
    super::connect::roll_back(conn);
    result
}

/// Starts the thread. It ends when its questions are dropped.
pub(crate) fn start(conn: Connection) -> std::io::Result<(Questions, std::thread::JoinHandle<()>)> {
    let (send, receive) = channel::<Question>();
    let thread = std::thread::Builder::new().name("hapax-sqlite-read".into()).spawn(move || {
        while let Ok(question) = receive.recv() {
            question(&conn);
        }
    })?;
    Ok((Questions(send), thread))
}
