//! A TCP proxy in front of PostgreSQL that loses what a test wants lost: the server's answer to a statement that it has
//! executed and committed, or a COMMIT on its way there. It cuts the connection, or goes silent and keeps it open.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::watch;

const PASS: u8 = 0;
const ANSWER: u8 = 1;
const COMMIT: u8 = 2;
const REFUSE: u8 = 3;
const COMMIT_ANSWER: u8 = 4;
const STALL: u8 = 5;

#[derive(Default)]
struct Plan {
    /// What to lose next; taken by the first connection it applies to.
    lose: AtomicU8,
    lost: AtomicUsize,
    cuts: watch::Sender<u64>,
    silence: Mutex<Option<Silence>>,
    /// The first message with this text is the last one that reaches the server.
    last: Mutex<Option<Vec<u8>>>,
    /// How many bytes clients have sent, and were sent.
    sent: AtomicUsize,
    answered: AtomicUsize,
    /// A text, and how many messages to the server had it.
    counted: Mutex<(Vec<u8>, usize)>,
}

/// Where a connection goes silent.
struct Silence {
    /// At the first message with this text.
    at: Vec<u8>,
    /// Whether the server still gets that message.
    passed: bool,
}

impl Plan {
    fn take(&self, what: u8) -> bool {
        let mine = self.lose.compare_exchange(what, PASS, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.lost.fetch_add(usize::from(mine), Ordering::SeqCst);
        mine
    }

    /// Whether a connection goes silent with this message; if so, whether the message is passed on.
    fn goes_silent(&self, message: &[u8]) -> Option<bool> {
        let mut silence = self.silence.lock().unwrap();
        let of = silence.as_ref()?;
        contains(message, &of.at).then(|| {
            self.lost.fetch_add(1, Ordering::SeqCst);
            silence.take().is_some_and(|of| of.passed)
        })
    }

    /// Whether this message is the last one to be passed on.
    fn is_last(&self, message: &[u8]) -> bool {
        let mut last = self.last.lock().unwrap();
        let is_last = last.as_ref().is_some_and(|text| contains(message, text));
        if is_last {
            *last = None;
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        is_last
    }

    fn count(&self, message: &[u8]) {
        let mut counted = self.counted.lock().unwrap();
        if !counted.0.is_empty() && contains(message, &counted.0) {
            counted.1 += 1;
        }
    }

    fn refuses(&self) -> bool {
        let refuses = self.lose.load(Ordering::SeqCst) == REFUSE;
        self.lost.fetch_add(usize::from(refuses), Ordering::SeqCst);
        refuses
    }
}

fn contains(message: &[u8], text: &[u8]) -> bool {
    message.windows(text.len()).any(|bytes| bytes == text)
}

/// The proxy. It runs as long as its runtime.
pub struct Proxy {
    address: SocketAddr,
    /// Where new connections lead.
    server: Arc<Mutex<String>>,
    plan: Arc<Plan>,
}

impl Proxy {
    /// In front of the server of a URL.
    pub async fn new(url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let proxy = Proxy { address, server: Arc::default(), plan: Arc::default() };
        proxy.lead_to(url);
        let (server, plan) = (Arc::clone(&proxy.server), Arc::clone(&proxy.plan));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if plan.refuses() {
                    continue; // accepted and closed: nobody is there
                }
                let address = server.lock().unwrap().clone();
                let Ok(server) = TcpStream::connect(address).await else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                tokio::spawn(carry(client, server, Arc::clone(&plan)));
            }
        });
        proxy
    }

    /// From now on, new connections lead to the server of this URL. Open ones stay where they are.
    pub fn lead_to(&self, url: &str) {
        let server =
            url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("user@host:port/db");
        server.clone_into(&mut self.server.lock().unwrap());
    }

    /// The same database through the proxy, in clear text so that messages can be told apart.
    pub fn url(&self, url: &str) -> String {
        let (before, rest) = url.split_once('@').expect("user@host");
        let database = rest.split_once('/').expect("a database").1;
        format!("{before}@{}/{database}?sslmode=disable", self.address)
    }

    /// Lose the answer to the next statement: the server has committed it, its client never learns.
    pub fn lose_answer(&self) {
        self.plan.lose.store(ANSWER, Ordering::SeqCst);
    }

    /// Lose the answer to the next statement with this text among its values, and from then on [`refuse`](Proxy::refuse).
    pub fn lose_answer_and_refuse(&self, text: &str) {
        *self.plan.last.lock().unwrap() = Some(text.into());
    }

    /// Lose the next COMMIT: its client cannot tell this from a lost answer, but the server never saw it.
    pub fn lose_commit(&self) {
        self.plan.lose.store(COMMIT, Ordering::SeqCst);
    }

    /// Lose the answer to the next COMMIT: the server has committed, its client never learns.
    pub fn lose_commit_answer(&self) {
        self.plan.lose.store(COMMIT_ANSWER, Ordering::SeqCst);
    }

    /// The next connection that sends this text goes silent: the server gets it, and whatever it answers is lost. The
    /// connection stays open.
    pub fn silence_after(&self, text: &str) {
        *self.plan.silence.lock().unwrap() = Some(Silence { at: text.into(), passed: true });
    }

    /// The next connection that sends this text goes silent: the server does not even get it.
    pub fn silence_before(&self, text: &str) {
        *self.plan.silence.lock().unwrap() = Some(Silence { at: text.into(), passed: false });
    }

    /// Keep what clients send until [`heal`](Proxy::heal): the server seems to be very slow.
    pub fn stall(&self) {
        self.plan.lose.store(STALL, Ordering::SeqCst);
    }

    /// Close every connection that speaks, and refuse new ones, until [`heal`](Proxy::heal).
    pub fn refuse(&self) {
        self.plan.lose.store(REFUSE, Ordering::SeqCst);
    }

    /// Close every connection now. The server goes on with what it does until it wants to answer.
    pub fn cut(&self) {
        self.plan.cuts.send_modify(|cuts| *cuts += 1);
    }

    pub fn heal(&self) {
        self.plan.lose.store(PASS, Ordering::SeqCst);
    }

    /// How many bytes were carried to the server, and back.
    pub fn carried(&self) -> (usize, usize) {
        (self.plan.sent.load(Ordering::SeqCst), self.plan.answered.load(Ordering::SeqCst))
    }

    /// From now on, count the messages to the server that have this text.
    pub fn count(&self, text: &str) {
        *self.plan.counted.lock().unwrap() = (text.into(), 0);
    }

    /// How many messages had the text of [`count`](Proxy::count).
    pub fn counted(&self) -> usize {
        self.plan.counted.lock().unwrap().1
    }

    /// How much was lost.
    pub fn lost(&self) -> usize {
        self.plan.lost.load(Ordering::SeqCst)
    }
}

async fn carry(client: TcpStream, server: TcpStream, plan: Arc<Plan>) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Whichever ends first takes the other with it: both halves close.
    let (mute, silent) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut cuts = plan.cuts.subscribe();
    tokio::select! {
        _ = cuts.changed() => {}
        () = requests(from_client, to_server, &plan, &mute, &silent) => {}
        () = answers(from_server, to_client, &plan, &mute, &silent) => {}
    }
}

async fn requests(
    mut client: tcp::OwnedReadHalf,
    mut server: tcp::OwnedWriteHalf,
    plan: &Plan,
    mute: &AtomicBool,
    silent: &AtomicBool,
) {
    let mut buffer = vec![0; 65536];
    while let Ok(count @ 1..) = client.read(&mut buffer).await {
        plan.sent.fetch_add(count, Ordering::SeqCst);
        plan.count(&buffer[..count]);
        while plan.lose.load(Ordering::SeqCst) == STALL {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if plan.refuses() {
            return;
        }
        if silent.load(Ordering::SeqCst) {
            continue; // until the client closes it
        }
        if let Some(passed) = plan.goes_silent(&buffer[..count]) {
            silent.store(true, Ordering::SeqCst);
            if passed && server.write_all(&buffer[..count]).await.is_err() {
                return;
            }
            continue;
        }
        if plan.is_last(&buffer[..count]) {
            mute.store(true, Ordering::SeqCst);
            plan.lose.store(REFUSE, Ordering::SeqCst);
        }
        let commits = contains(&buffer[..count], b"COMMIT\0");
        if commits && plan.take(COMMIT_ANSWER) {
            mute.store(true, Ordering::SeqCst);
        }
        if (commits && plan.take(COMMIT)) || server.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

async fn answers(
    mut server: tcp::OwnedReadHalf,
    mut client: tcp::OwnedWriteHalf,
    plan: &Plan,
    mute: &AtomicBool,
    silent: &AtomicBool,
) {
    let mut kept: Vec<u8> = Vec::new(); // of a statement whose answer will be lost
    let mut losing = false;
    loop {
        let mut head = [0; 5];
        if server.read_exact(&mut head).await.is_err() {
            if silent.load(Ordering::SeqCst) {
                std::future::pending::<()>().await; // the client does not learn that either
            }
            return;
        }
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let mut body = vec![0; length - 4];
        if server.read_exact(&mut body).await.is_err() {
            return;
        }
        plan.answered.fetch_add(head.len() + body.len(), Ordering::SeqCst);
        if silent.load(Ordering::SeqCst) {
            continue;
        }
        // CommandComplete comes before the commit of a statement on its own; ReadyForQuery comes after it.
        losing |= mute.load(Ordering::SeqCst) || (head[0] == b'C' && plan.take(ANSWER));
        if losing && head[0] == b'Z' {
            return;
        }
        kept.extend_from_slice(&head);
        kept.extend_from_slice(&body);
        if !losing && client.write_all(&std::mem::take(&mut kept)).await.is_err() {
            return;
        }
    }
}
