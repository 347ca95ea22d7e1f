//! The bytes of a connection, and whether something of it is under way.
//!
//! A client that does not read keeps its answers here for as long as it likes. So a connection ends when
//! nothing could be written to it for the limit of a request.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// Whether a connection has a request, from its head to the last byte of its answer.
#[derive(Debug, Clone, Default)]
pub struct Activity(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Requests whose answers were not handed over for writing.
    requests: AtomicUsize,
    /// Whether bytes wait until the client reads.
    stalled: AtomicBool,
}

impl Activity {
    /// A request has arrived.
    pub fn begin(&self) -> Request {
        self.0.requests.fetch_add(1, Ordering::AcqRel);
        Request(self.clone())
    }

    /// Whether nothing would be lost if the connection ended now.
    pub fn is_idle(&self) -> bool {
        self.0.requests.load(Ordering::Acquire) == 0 && !self.0.stalled.load(Ordering::Acquire)
    }
}

/// A request that is under way as long as this lives.
#[derive(Debug)]
pub struct Request(Activity);

impl Drop for Request {
    fn drop(&mut self) {
        self.0.0.requests.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Request {
    /// The body of its answer, until whose end it is under way.
    pub fn until_sent(self, body: Body) -> Body {
        Body::new(Sent { body, _request: self })
    }
}

struct Sent {
    body: Body,
    _request: Request,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection whose client must read.
#[derive(Debug)]
pub struct Stream {
    tcp: TcpStream,
    activity: Activity,
    /// How long it may take until one byte can be written.
    stall_max: Duration,
    /// Runs while there is something to write and nothing could be written.
    stall: Option<Pin<Box<Sleep>>>,
}

impl Stream {
    pub fn new(tcp: TcpStream, stall_max: Duration, activity: Activity) -> Self {
        Stream { tcp, activity, stall_max, stall: None }
    }

    /// Turns a write that waits for too long into an error. The write was tried first, so a process that
    /// was stopped for a while blames nobody.
    fn bounded(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        self.activity.0.stalled.store(written.is_pending(), Ordering::Release);
        if written.is_ready() {
            self.stall = None;
            return written;
        }
        let limit = self.stall_max;
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        ready!(stall.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answers")))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write(context, bytes);
        self.bounded(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write_vectored(context, parts);
        self.bounded(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(context)
    }
}
