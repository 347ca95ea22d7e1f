//! A document store over HTTP in the test's own process: it outlives whoever writes to it. It dedups on `Idempotency-Key`, or
//! it does not; either way it notes what it was sent and what it wrote.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// The store. It serves as long as its runtime.
pub struct Store {
    url: String,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    dedups: bool,
    /// The tokens that each key was sent with, in the order of arrival.
    sent: BTreeMap<String, Vec<i64>>,
    /// How often the document of each key was written.
    written: BTreeMap<String, usize>,
}

impl Store {
    pub async fn new(dedups: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/documents", listener.local_addr().expect("an address"));
        let kept = Arc::new(Mutex::new(Kept { dedups, ..Kept::default() }));
        let all = Arc::clone(&kept);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, Arc::clone(&all)));
            }
        });
        Store { url, kept }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// How many documents there are.
    pub fn documents(&self) -> usize {
        self.kept.lock().unwrap().written.len()
    }

    /// How many of them were written more than once.
    pub fn doubled(&self) -> usize {
        self.kept.lock().unwrap().written.values().filter(|times| **times > 1).count()
    }

    /// How many keys were sent more than once. Each time with a higher token, or it panics.
    pub fn sent_again(&self) -> usize {
        let kept = self.kept.lock().unwrap();
        for (key, tokens) in &kept.sent {
            assert!(tokens.is_sorted_by(|a, b| a < b), "{key} came with the tokens {tokens:?}");
        }
        kept.sent.values().filter(|tokens| tokens.len() > 1).count()
    }
}

/// One connection: requests until the client goes, perhaps in the middle of one.
async fn serve(client: TcpStream, kept: Arc<Mutex<Kept>>) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    while let Some((key, token)) = request(&mut from).await {
        {
            // The key is kept with the document, in one step.
            let mut kept = kept.lock().unwrap();
            kept.sent.entry(key.clone()).or_default().push(token);
            let known = kept.written.contains_key(&key);
            if !(known && kept.dedups) {
                *kept.written.entry(key).or_default() += 1;
            }
        }
        if to.write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n").await.is_err() {
            return;
        }
    }
}

/// The next request's key and token; none if it did not come whole.
async fn request(from: &mut BufReader<tokio::net::tcp::OwnedReadHalf>) -> Option<(String, i64)> {
    let (mut key, mut token, mut length) = (None, None, 0);
    loop {
        let mut line = String::new();
        if from.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        let Some((name, value)) = line.trim_end().split_once(": ") else { continue };
        match name.to_ascii_lowercase().as_str() {
            "idempotency-key" => key = Some(value.to_owned()),
            "hapax-token" => token = value.parse().ok(),
            "content-length" => length = value.parse().expect("a length"),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).await.ok()?;
    Some((key.expect("every request has a key"), token.expect("every request has a token")))
}
