//! What tests of the server share: a server as a process, and a client that hides nothing.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Ran, hapax};

/// For ever, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A server that runs.
pub struct Server {
    pub child: Child,
    pub address: String,
    pub ready: Value,
    /// From the start of the process to its line.
    pub took: Duration,
    out: BufReader<ChildStdout>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts a server on a free port, and waits until it is ready.
    #[track_caller]
    pub fn start(dir: &Path, more: &[&str]) -> Self {
        Self::start_in(dir, more, &[])
    }

    /// The same, in an environment with these variables.
    #[track_caller]
    pub fn start_in(dir: &Path, more: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_at(dir, "127.0.0.1:0", more, env)
    }

    /// The same, where it shall listen.
    #[track_caller]
    pub fn start_at(dir: &Path, listen: &str, more: &[&str], env: &[(&str, &str)]) -> Self {
        let began = Instant::now();
        let args = [&["serve", "--listen", listen, "--json"], more].concat();
        let errors = std::fs::File::create(dir.join("serve.err")).unwrap();
        let mut child = hapax(dir, &args).envs(env.iter().copied()).stderr(errors).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let _ = child.wait();
            panic!("it did not start: {line}{}", std::fs::read_to_string(dir.join("serve.err")).unwrap())
        });
        let address = ready["address"].as_str().unwrap().to_owned();
        Server { child, address, ready, took: began.elapsed(), out }
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(&mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops it with SIGTERM; returns its exit code.
    #[track_caller]
    pub fn stop(&mut self) -> Option<i32> {
        self.signal("-TERM");
        self.ended()
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        request(&self.address, "GET", path, &[], b"")
    }

    /// Waits until it is ready; what it said then. A probe has two seconds, so a machine that stalls may take that
    /// back in the next moment.
    #[track_caller]
    pub fn until_ready(&self) -> Value {
        let began = Instant::now();
        loop {
            let said = self.get("/readyz");
            if said.status == 200 {
                return said.json();
            }
            assert!(began.elapsed() < PATIENCE, "it is never ready: {said:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, &[], body)
    }

    #[track_caller]
    pub fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        let headers = [&[("content-type", "application/json")], headers].concat();
        request(&self.address, "POST", path, &headers, body.to_string().as_bytes())
    }
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Checks the status, and gives the JSON.
    #[track_caller]
    pub fn is(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        self.json()
    }

    pub fn is_problem(&self) -> bool {
        self.header("content-type") == Some("application/problem+json")
    }

    /// Checks that it is a problem, whole and with a page; gives its detail.
    #[track_caller]
    pub fn problem(&self, status: u16, code: &str) -> String {
        let json = self.is(status);
        assert_eq!(json["code"], code, "{self:?}");
        assert_eq!(json["status"], status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/errors/{code}.md"));
        assert!(page.exists(), "{code} has no page");
        assert!(json["type"].as_str().unwrap().ends_with(&format!("/{code}.md")), "{self:?}");
        json["detail"].as_str().unwrap().to_owned()
    }
}

/// Sends a request on a connection of its own.
#[track_caller]
pub fn request(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    parse(&exchange(address, method, path, headers, body))
}

/// The same, to a server whose limit is short: it closes a connection on which a request comes too late, as it does on
/// a machine that stalls. Then it is sent again.
#[track_caller]
pub fn insist(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    answered(|| exchange(address, method, path, headers, body))
}

/// Tries until there is an answer, and not a connection that was closed before the request was there.
#[track_caller]
pub fn answered(mut ask: impl FnMut() -> Vec<u8>) -> Answer {
    let began = Instant::now();
    loop {
        let bytes = ask();
        if !bytes.is_empty() {
            return parse(&bytes);
        }
        assert!(began.elapsed() < PATIENCE, "no answer");
    }
}

/// The bytes of the answer to a request; none if the connection was closed without one.
fn exchange(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut stream = connect(address);
    let host = if headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        String::new()
    } else {
        format!("host: {address}\r\n")
    };
    let mut head = format!("{method} {path} HTTP/1.1\r\n{host}connection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    // A server that refuses a large request may close before it has read it all.
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
    to_the_end(&mut stream)
}

pub fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads one answer to the end of the connection.
#[track_caller]
pub fn answer(stream: &mut TcpStream) -> Answer {
    parse(&to_the_end(stream))
}

/// What comes on a connection until its end.
pub fn to_the_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes); // a reset after the answer is not a fault
    bytes
}

#[track_caller]
pub fn parse(bytes: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header = |line: &str| {
        let (name, value) = line.split_once(':').unwrap();
        (name.to_ascii_lowercase(), value.trim().to_owned())
    };
    Answer { status, headers: lines.map(header).collect(), body: body.to_owned() }
}

/// Runs `serve` where it must not start.
pub fn refused(dir: &Path, args: &[&str]) -> Ran {
    let mut child = hapax(dir, &[&["serve", "--json"], args].concat()).spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap().into()
}
