//! A TCP proxy that loses acknowledgements: the server has done what it was asked, and its answer never arrives.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Where to cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Pass the message on, wait until the server has answered, swallow the answer and cut: it certainly was applied.
    Answer,
    /// Cut before the message is passed on: it certainly was not.
    Request,
}

/// The next message with these bytes is cut.
#[derive(Debug)]
struct Armed {
    bytes: Vec<u8>,
    cut: Cut,
    /// What the server's answer ends with; empty if any answer will do.
    end: Vec<u8>,
}

#[derive(Debug, Default)]
struct Shared {
    armed: Mutex<Option<Armed>>,
    cuts: watch::Sender<u64>,
}

/// A proxy on a port of its own in front of an upstream. Stops when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free loopback port and forwards to `upstream`.
    pub async fn start(upstream: SocketAddr) -> std::io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let accepting = tokio::spawn(accept(listener, upstream, Arc::clone(&shared)));
        Ok(Proxy { address, shared, accepting })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts the connection over whose next message has these bytes, once.
    pub fn arm(&self, bytes: impl Into<Vec<u8>>, cut: Cut) {
        *self.shared.lock() = Some(Armed { bytes: bytes.into(), cut, end: Vec::new() });
    }

    /// Like [`arm`](Proxy::arm) with [`Cut::Answer`], for servers that answer in pieces: cuts only when the answer has
    /// had `end` in it (for PostgreSQL, `ReadyForQuery` outside a transaction: `Z\0\0\0\x05I`).
    pub fn arm_until(&self, bytes: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) {
        *self.shared.lock() = Some(Armed { bytes: bytes.into(), cut: Cut::Answer, end: end.into() });
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> u64 {
        *self.shared.cuts.borrow()
    }

    /// Waits until so many connections were cut.
    pub async fn cut(&self, count: u64) {
        let mut cuts = self.shared.cuts.subscribe();
        let _ = cuts.wait_for(|cuts| *cuts >= count).await; // the sender lives as long as we do
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Armed>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Disarms and says how to cut, if the bytes are in what the client sent. `seen` is the end of what it sent before, so
    /// that a message in two packets is found.
    fn matches(&self, seen: &[u8]) -> Option<Armed> {
        let mut armed = self.lock();
        let found = armed.as_ref().is_some_and(|armed| contains(seen, &armed.bytes));
        if found { armed.take() } else { None }
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    !part.is_empty() && text.windows(part.len()).any(|window| window == part)
}

async fn accept(listener: TcpListener, upstream: SocketAddr, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            if let Ok(server) = TcpStream::connect(upstream).await {
                let _ = (client.set_nodelay(true), server.set_nodelay(true)); // only slower without
                forward(client, server, &shared).await;
            }
        });
    }
}

/// Forwards both ways until one side ends or the connection is cut; dropping the halves closes both sides.
async fn forward(client: TcpStream, server: TcpStream, shared: &Shared) {
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = server.into_split();
    let (cutting, cut) = watch::channel(None);
    let requests = requests(from_client, to_server, shared, cutting);
    let answers = async {
        let mut buffer = vec![0; 64 * 1024];
        let mut swallowed = Vec::new();
        loop {
            let read = from_server.read(&mut buffer).await.unwrap_or(0);
            if read == 0 {
                break;
            }
            if let Some(end) = cut.borrow().as_deref() {
                swallowed.extend_from_slice(&buffer[..read]);
                if end.is_empty() || contains(&swallowed, end) {
                    break; // the server has answered what is cut: the answer goes nowhere
                }
                continue;
            }
            if to_client.write_all(&buffer[..read]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        was_cut = requests => if !was_cut { return },
        () = answers => {}
    }
    if cut.borrow().is_some() {
        shared.cuts.send_modify(|cuts| *cuts += 1);
    }
}

/// Passes on what the client sends. True if it ended with a cut before passing on.
async fn requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    cutting: watch::Sender<Option<Vec<u8>>>,
) -> bool {
    const TAIL: usize = 256;
    let mut buffer = vec![0; 64 * 1024];
    let mut seen: Vec<u8> = Vec::new();
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        if read == 0 {
            return false;
        }
        seen.drain(..seen.len().saturating_sub(TAIL));
        seen.extend_from_slice(&buffer[..read]);
        if let Some(armed) = shared.matches(&seen) {
            let _ = cutting.send(Some(armed.end)); // the receiver is in the same task
            if armed.cut == Cut::Request {
                return true;
            }
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Upper-cases what it is sent, and remembers it.
    async fn server() -> (SocketAddr, watch::Receiver<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, received) = watch::channel(Vec::new());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut buffer = [0; 100];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    sender.send_modify(|all| all.extend_from_slice(&buffer[..read]));
                    let _ = stream.write_all(&buffer[..read].to_ascii_uppercase()).await;
                }
            }
        });
        (address, received)
    }

    async fn ask(stream: &mut TcpStream, text: &str) -> Option<String> {
        stream.write_all(text.as_bytes()).await.ok()?;
        let mut buffer = [0; 100];
        let read = stream.read(&mut buffer).await.unwrap_or(0);
        (read > 0).then(|| String::from_utf8_lossy(&buffer[..read]).into_owned())
    }

    #[tokio::test]
    async fn answers_pass_until_armed() {
        let (upstream, _) = server().await;
        let proxy = Proxy::start(upstream).await.unwrap();
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut client, "begin").await.as_deref(), Some("BEGIN"));
        proxy.arm("commit", Cut::Answer);
        assert_eq!(ask(&mut client, "insert").await.as_deref(), Some("INSERT"));
        assert_eq!(proxy.cuts(), 0);
    }

    #[tokio::test]
    async fn a_lost_answer_was_applied() {
        let (upstream, received) = server().await;
        let proxy = Proxy::start(upstream).await.unwrap();
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        proxy.arm("commit", Cut::Answer);
        assert_eq!(ask(&mut client, "commit").await, None);
        proxy.cut(1).await;
        assert_eq!(*received.borrow(), b"commit");
        // Once: the next connection is whole.
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        assert_eq!(ask(&mut client, "commit").await.as_deref(), Some("COMMIT"));
    }

    #[tokio::test]
    async fn a_request_cut_off_was_not_applied() {
        let (upstream, received) = server().await;
        let proxy = Proxy::start(upstream).await.unwrap();
        let mut client = TcpStream::connect(proxy.address()).await.unwrap();
        proxy.arm("commit", Cut::Request);
        assert_eq!(ask(&mut client, "com").await.as_deref(), Some("COM"));
        assert_eq!(ask(&mut client, "mit").await, None, "found across two packets");
        proxy.cut(1).await;
        assert_eq!(*received.borrow(), b"com");
    }
}
