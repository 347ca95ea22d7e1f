//! The plainest HTTP client there is, so that the server is measured.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::Fallible;

/// A connection that is kept open, with one request at a time.
pub struct Wire {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Wire {
    /// Connects.
    pub async fn open(to: SocketAddr) -> Fallible<Self> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Wire { stream, answer: Vec::new() })
    }

    /// Sends JSON, under a key if there is one; returns the status and the body of the answer.
    pub async fn post(&mut self, path: &str, key: Option<&str>, body: &str) -> Fallible<(u16, &[u8])> {
        let key = key.map_or_else(String::new, |key| format!("idempotency-key: \"{key}\"\r\n"));
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{key}content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.ask(&[head.as_bytes(), body.as_bytes()].concat()).await
    }

    /// Reads; returns the status and the body of the answer.
    pub async fn get(&mut self, path: &str) -> Fallible<(u16, &[u8])> {
        self.ask(format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").as_bytes()).await
    }

    async fn ask(&mut self, request: &[u8]) -> Fallible<(u16, &[u8])> {
        self.stream.write_all(request).await?;
        self.answer.clear();
        let (mut head, mut length) = (None, 0);
        loop {
            if self.stream.read_buf(&mut self.answer).await? == 0 {
                return Err("the server closed the connection".into());
            }
            if head.is_none()
                && let Some(end) = self.answer.windows(4).position(|four| four == b"\r\n\r\n")
            {
                let text = std::str::from_utf8(&self.answer[..end])?.to_ascii_lowercase();
                let of = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
                length = of.ok_or("an answer without a length")?.parse()?;
                let status: u16 = text.split(' ').nth(1).ok_or("an answer without a status")?.parse()?;
                head = Some((status, end + 4));
            }
            if let Some((status, from)) = head
                && self.answer.len() >= from + length
            {
                return Ok((status, &self.answer[from..from + length]));
            }
        }
    }
}

/// Fails the bench unless the answer has this status.
pub fn expect(status: u16, answer: (u16, &[u8])) -> Fallible<&[u8]> {
    if answer.0 == status {
        return Ok(answer.1);
    }
    Err(format!("{} instead of {status}: {}", answer.0, String::from_utf8_lossy(answer.1)).into())
}
