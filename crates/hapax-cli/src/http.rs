//! HTTP by hand, for commands that ask a server: a probe must hang up where it wants to, and see every byte of
//! an answer; the default build has no client.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::failure::Failure;

/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// An `http` URL.
#[derive(Debug, Clone)]
pub struct Target {
    /// Host and port, as in the `Host` header.
    authority: String,
    /// Path and query.
    pub path: String,
}

impl Target {
    /// Parses a URL.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let bad = |problem: &str| {
            Failure::config(format!("{text:?} {problem}; write it like http://127.0.0.1:8080/orders"))
        };
        if text.starts_with("https://") {
            return Err(bad(
                "is https, which this command does not speak: ask the service itself, behind its proxy",
            ));
        }
        let rest = text.strip_prefix("http://").ok_or_else(|| bad("is not an http URL"))?;
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let odd = |c: char| c.is_whitespace() || c.is_control();
        if authority.is_empty() || authority.contains('@') || text.contains(odd) || text.contains('#') {
            return Err(bad("has no host, or has a user, white space or a fragment"));
        }
        Ok(Target { authority: authority.to_owned(), path: path.to_owned() })
    }

    /// Where to connect to.
    fn address(&self) -> String {
        let has_port = self.authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if has_port { self.authority.clone() } else { format!("{}:80", self.authority) }
    }
}

/// A request to send.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub target: Target,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let Request { method, target, headers, body } = self;
        let mut lines = vec![
            format!("{method} {} HTTP/1.1", target.path),
            format!("host: {}", target.authority),
            "connection: close".to_owned(),
        ];
        lines.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
        if !body.is_empty() || method != "GET" {
            lines.push(format!("content-length: {}", body.len()));
        }
        let head = lines.join("\r\n") + "\r\n\r\n";
        [head.as_bytes(), body.as_bytes()].concat()
    }
}

/// Where to hang up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HangUp {
    /// In the middle of the body.
    InTheBody,
    /// After the request, without waiting for anything.
    AtOnce,
    /// When the answer begins: the work is done.
    AtTheAnswer,
}

/// What a service answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(named, _)| named == name).map(|(_, value)| value.as_str())
    }

    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Reads a whole answer; the connection has ended.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        parse(bytes)
    }
}

/// Sends a request, and reads its answer.
pub async fn send(request: &Request, timeout: Duration) -> Result<Answer, String> {
    let exchange = async {
        let mut stream =
            TcpStream::connect(request.target.address()).await.map_err(|error| error.to_string())?;
        stream.write_all(&request.bytes()).await.map_err(|error| error.to_string())?;
        let mut bytes = Vec::new();
        let mut limited = (&mut stream).take(ANSWER_BYTES_MAX as u64);
        limited.read_to_end(&mut bytes).await.map_err(|error| error.to_string())?;
        Answer::parse(&bytes)
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {timeout:?}")))
}

/// Sends a request, and hangs up.
pub async fn hang_up(request: &Request, place: HangUp, timeout: Duration) -> Result<(), String> {
    let exchange = async {
        let mut stream =
            TcpStream::connect(request.target.address()).await.map_err(|error| error.to_string())?;
        let bytes = request.bytes();
        let end = if place == HangUp::InTheBody { bytes.len() - request.body.len() / 2 } else { bytes.len() };
        stream.write_all(&bytes[..end]).await.map_err(|error| error.to_string())?;
        if place == HangUp::AtTheAnswer {
            stream.read_exact(&mut [0; 1]).await.map_err(|error| error.to_string())?;
        }
        Ok(()) // the stream is dropped: it is closed
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {timeout:?}")))
}

fn parse(bytes: &[u8]) -> Result<Answer, String> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").ok_or("the answer broke off")?;
    let head = String::from_utf8_lossy(&bytes[..end]);
    let mut lines = head.split("\r\n");
    let status =
        lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).ok_or("it is not HTTP")?;
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
    };
    let mut answer =
        Answer { status, headers: lines.filter_map(header).collect(), body: bytes[end + 4..].to_vec() };
    if answer.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        answer.body = unchunked(&answer.body).ok_or("the answer broke off")?;
    } else if let Some(length) =
        answer.header("content-length").and_then(|length| length.parse::<usize>().ok())
    {
        if answer.body.len() < length {
            return Err("the answer broke off".to_owned());
        }
        answer.body.truncate(length);
    }
    Ok(answer)
}

fn unchunked(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n")?;
        let size = std::str::from_utf8(&bytes[..end]).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        let from = end + 2;
        body.extend_from_slice(bytes.get(from..from.checked_add(size)?)?);
        bytes = bytes.get(from + size + 2..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_broken_ones_reported() {
        let chunked =
            b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
        assert_eq!(parse(chunked).unwrap().body, b"abcde");
        let plain = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nLocation: /1\r\n\r\nokmore").unwrap();
        assert_eq!((plain.body.as_slice(), plain.header("location")), (&b"ok"[..], Some("/1")));
        for broken in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        ] {
            assert!(parse(broken).is_err(), "{broken:?}");
        }
        assert!(parse(&chunked[..chunked.len() - 12]).is_err());
    }

    #[test]
    fn urls_that_cannot_be_probed_are_refused_with_a_sentence() {
        let target = Target::parse("http://h/a?b=1").unwrap();
        assert_eq!((target.address().as_str(), target.path.as_str()), ("h:80", "/a?b=1"));
        assert_eq!(Target::parse("http://[::1]:8080").unwrap().address(), "[::1]:8080");
        for url in ["", "h", "https://h", "http://", "http://u@h/", "http://h/a b", "http://h/#x"] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
    }
}
