//! A server as a process, and requests to it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::hapax;

/// For ever, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A server as a process.
pub struct Server {
    pub child: Child,
    pub ready: Value,
    pub port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    pub fn start(dir: &Path, more: &[&str]) -> Self {
        Server::start_with(dir, "127.0.0.1:0", more, &[])
    }

    pub fn start_with(dir: &Path, listen: &str, more: &[&str], env: &[(&str, &str)]) -> Self {
        Server::launch(dir, &[&["--listen", listen, "--without", "relay"], more].concat(), env)
    }

    /// One that also relays, and feeds the read model.
    pub fn start_whole(dir: &Path, more: &[&str]) -> Self {
        Server::launch(dir, &[&["--listen", "127.0.0.1:0"], more].concat(), &[])
    }

    fn launch(dir: &Path, more: &[&str], env: &[(&str, &str)]) -> Self {
        let args = [&["serve", "--json"], more].concat();
        let errors = std::fs::File::create(dir.join("serve.err")).unwrap();
        let mut child = hapax(dir, &args).envs(env.iter().copied()).stderr(errors).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            panic!("it did not start: {line}{}", std::fs::read_to_string(dir.join("serve.err")).unwrap())
        });
        let port = port(&ready["address"]);
        Server { child, ready, port }
    }

    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        ask(self.port, method, path, headers, body)
    }

    pub fn get(&self, path: &str, token: &str) -> Answer {
        self.ask("GET", path, &[("authorization", &format!("Bearer {token}"))], &Value::Null)
    }

    pub fn post(&self, path: &str, token: &str, body: &Value) -> Answer {
        self.ask("POST", path, &[("authorization", &format!("Bearer {token}"))], body)
    }
}

pub fn port(address: &Value) -> u16 {
    address.as_str().unwrap().rsplit_once(':').unwrap().1.parse().unwrap()
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub fn is(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        self.json()
    }

    /// It is a problem with this code; its detail.
    #[track_caller]
    pub fn problem(&self, status: u16, code: &str) -> String {
        let json = self.is(status);
        assert_eq!(json["code"], code, "{self:?}");
        json["detail"].as_str().unwrap().to_owned()
    }

    /// It is a 401 as RFC 6750 wants it; its detail.
    #[track_caller]
    pub fn unauthenticated(&self) -> String {
        assert!(self.head.contains("www-authenticate: Bearer realm=\"hapax\""), "{self:?}");
        self.problem(401, "unauthenticated")
    }
}

pub fn ask(port: u16, method: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    let body = if body.is_null() { String::new() } else { body.to_string() };
    if !body.is_empty() {
        head += "content-type: application/json\r\n";
    }
    raw(port, format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())
}

pub fn raw(port: u16, bytes: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(bytes); // a server that refuses may close before it has read it all
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer); // a reset after the answer is not a fault
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

#[track_caller]
pub fn until(what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < PATIENCE, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}
