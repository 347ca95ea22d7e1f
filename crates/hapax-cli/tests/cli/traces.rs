//! Traces as an OpenTelemetry collector gets them: a small one listens in the test.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_collect)]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::consume::{Sample, wait_until};
use crate::common::serve::Server;
use crate::common::{hapax, run_with};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Takes spans by OTLP over HTTP.
#[derive(Default)]
struct Collector {
    bodies: Mutex<Vec<Vec<u8>>>,
    /// How often somebody came while it was away.
    turned_away: AtomicUsize,
    away: AtomicBool,
}

impl Collector {
    /// Listens; returns its address, too.
    fn start() -> (Arc<Self>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let collector = Arc::new(Collector::default());
        let taken = Arc::clone(&collector);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, taken) = (stream.unwrap(), Arc::clone(&taken));
                std::thread::spawn(move || taken.serve(stream));
            }
        });
        (collector, url)
    }

    /// Serves a connection to its end.
    fn serve(&self, mut stream: TcpStream) {
        let mut bytes = Vec::new();
        while let Some((head, body)) = next_request(&mut stream, &mut bytes) {
            if self.away.load(Ordering::SeqCst) {
                self.turned_away.fetch_add(1, Ordering::SeqCst);
                return;
            }
            assert!(head.starts_with("post /v1/traces "), "{head}");
            assert!(head.contains("content-type: application/x-protobuf"), "{head}");
            self.bodies.lock().unwrap().push(body);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        }
    }

    fn spans(&self) -> Vec<Span> {
        self.bodies.lock().unwrap().iter().flat_map(|body| spans(body)).collect()
    }

    /// The span of this name, once it is here.
    #[track_caller]
    fn span(&self, name: &str) -> Span {
        wait_until(&format!("{name} has arrived"), || self.spans().iter().any(|span| span.name == name));
        self.spans().into_iter().find(|span| span.name == name).unwrap()
    }
}

/// The head of a request in lower case, and its body; none if the connection ends.
fn next_request(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<(String, Vec<u8>)> {
    let mut part = [0; 8192];
    loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
            if bytes.len() >= end + 4 + length {
                let body = bytes[end + 4..end + 4 + length].to_vec();
                bytes.drain(..end + 4 + length);
                return Some((head, body));
            }
        }
        match stream.read(&mut part) {
            Ok(count @ 1..) => bytes.extend_from_slice(&part[..count]),
            _ => return None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    name: String,
    trace: String,
    id: String,
    parent: String,
    /// The resource it belongs to, as it was sent.
    resource: Vec<u8>,
}

/// The fields of a protobuf message that have a length.
fn fields(mut bytes: &[u8]) -> Vec<(u64, &[u8])> {
    fn number(bytes: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        number
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = number(&mut bytes);
        let length = match tag & 7 {
            0 => {
                number(&mut bytes);
                continue;
            }
            1 => 8,
            2 => usize::try_from(number(&mut bytes)).unwrap(),
            5 => 4,
            other => panic!("no protobuf: {other}"),
        };
        let (value, rest) = bytes.split_at(length);
        if tag & 7 == 2 {
            found.push((tag >> 3, value));
        }
        bytes = rest;
    }
    found
}

fn only(message: &[u8], field: u64) -> impl Iterator<Item = &[u8]> {
    fields(message).into_iter().filter(move |(number, _)| *number == field).map(|(_, value)| value)
}

/// The spans in an `ExportTraceServiceRequest`.
fn spans(body: &[u8]) -> Vec<Span> {
    let mut all = Vec::new();
    for of_resource in only(body, 1) {
        let resource = only(of_resource, 1).next().unwrap_or_default();
        for span in only(of_resource, 2).flat_map(|of_scope| only(of_scope, 2)) {
            let bytes = |field| only(span, field).next().unwrap_or_default();
            let hex = |field| bytes(field).iter().map(|byte| format!("{byte:02x}")).collect();
            all.push(Span {
                name: String::from_utf8(bytes(5).to_vec()).unwrap(),
                trace: hex(1),
                id: hex(2),
                parent: hex(4),
                resource: resource.to_vec(),
            });
        }
    }
    all
}

fn traced(dir: &Path, url: &str, delay_ms: &str, more: &[&str]) -> Server {
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", url), ("OTEL_BSP_SCHEDULE_DELAY", delay_ms)];
    Server::start_in(dir, more, &env)
}

fn claim(server: &Server, id: &str) {
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str())];
    let answer = server.post_with("/v1/claims", &headers, &json!({"scope": "s", "id": id}));
    assert_eq!(answer.is(200)["outcome"], "claimed");
}

#[test]
fn a_request_continues_its_clients_trace() {
    let dir = tempfile::tempdir().unwrap();
    let (collector, url) = Collector::start();
    let server = traced(dir.path(), &url, "50", &[]);
    claim(&server, "e-1");
    let claimed = collector.span("dedup.try_claim");
    wait_until("its request is here", || collector.spans().iter().any(|span| span.id == claimed.parent));
    let asked = collector.spans().into_iter().find(|span| span.id == claimed.parent).unwrap();
    assert_eq!((asked.name.as_str(), asked.trace.as_str()), ("http.request", TRACE));
    assert_eq!((asked.parent.as_str(), claimed.trace.as_str()), (PARENT, TRACE));
    let name = b"\x0a\x0cservice.name\x12\x07\x0a\x05hapax";
    assert!(asked.resource.windows(name.len()).any(|part| part == name), "{:?}", asked.resource);
    // A request without a trace begins one.
    server.get("/v1/info").is(200);
    wait_until("it is here", || {
        collector.spans().iter().any(|span| span.name == "http.request" && span.parent.is_empty())
    });
}

#[test]
fn the_last_spans_are_sent_at_a_stop() {
    // A process that ends waits for two seconds. A machine that stands still for longer costs it its spans: then
    // once more.
    wait_until("they are sent", || {
        let dir = tempfile::tempdir().unwrap();
        let (collector, url) = Collector::start();
        let mut server = traced(dir.path(), &url, "3600000", &[]);
        claim(&server, "e-1");
        assert_eq!(server.stop(), Some(143));
        let has = |name: &str, parent: Option<&str>| {
            let is = |span: &Span| {
                span.name == name && span.trace == TRACE && parent.is_none_or(|parent| span.parent == parent)
            };
            collector.spans().iter().any(is)
        };
        let both = || has("dedup.try_claim", None) && has("http.request", Some(PARENT));
        let ended = Instant::now();
        while !both() && ended.elapsed().as_secs() < 10 {
            std::thread::sleep(Duration::from_millis(5)); // what was sent may still be read
        }
        both()
    });
}

#[test]
fn a_collector_that_is_away_is_in_nobodys_way() {
    let dir = tempfile::tempdir().unwrap();
    let (collector, url) = Collector::start();
    collector.away.store(true, Ordering::SeqCst);
    let server = traced(dir.path(), &url, "50", &[]);
    let mut count = 0;
    wait_until("spans were refused several times", || {
        count += 1;
        claim(&server, &format!("e-{count}"));
        collector.turned_away.load(Ordering::SeqCst) >= 5
    });
    let log = || std::fs::read_to_string(dir.path().join("serve.err")).unwrap();
    let lines = |says: &str| log().lines().filter(|line| line.contains(says)).count();
    wait_until("it is logged", || lines("traces cannot be sent") > 0);
    collector.away.store(false, Ordering::SeqCst);
    wait_until("the end is logged", || {
        count += 1;
        claim(&server, &format!("e-{count}"));
        lines("traces are sent again") > 0
    });
    assert_eq!((lines("traces cannot be sent"), lines("traces are sent again")), (1, 1), "{}", log());
}

#[test]
fn what_cannot_be_exported_to_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, value, says) in [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is \"zipkin\"; it can be otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "traces are sent as http/protobuf only"),
    ] {
        let mut command = hapax(dir.path(), &["serve", "--listen", "127.0.0.1:0"]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9").env(name, value);
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(says), "{stderr}");
    }
}

#[test]
fn a_delivery_continues_its_producers_trace() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (collector, url) = Collector::start();
    let header = format!("traceparent=00-{TRACE}-{PARENT}-01");
    let produce = ["produce", "--topic", "orders", "--create", "1", "--header", &header];
    run_with(dir, &produce, b"{\"eventId\":\"e-1\"}\n").code(0);
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let consume = ["consume", "--topic", "orders", "--scope", "mailer", "--exec", &command];
    let mut consumer = hapax(dir, &consume);
    consumer.env("OTEL_EXPORTER_OTLP_ENDPOINT", &url).env("OTEL_BSP_SCHEDULE_DELAY", "50");
    let mut consumer = consumer.spawn().unwrap();
    let delivered = collector.span("consumer.delivery");
    let _ = consumer.kill();
    let _ = consumer.wait();
    assert_eq!((delivered.trace.as_str(), delivered.parent.as_str()), (TRACE, PARENT));
}
