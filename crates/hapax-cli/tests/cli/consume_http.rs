//! `hapax consume --http`: a sink that answers everything a sink may answer.

#![allow(missing_docs, clippy::unwrap_used)]

use crate::common;
use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::consume::{QUICK, count, entry, produce};
use crate::common::{Ran, run};
use serde_json::Value;

/// One request as the sink saw it.
#[derive(Debug, Clone)]
struct Seen {
    headers: HashMap<String, String>,
    body: Value,
}

/// Answers each event by its own list of answers, the last one for ever. An answer is what follows `HTTP/1.1 `, or `!` and bytes
/// as they are.
struct Server {
    url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    fn start(answers: &'static [(&'static str, &'static [&'static str])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/events", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let all = Arc::clone(&all);
                std::thread::spawn(move || serve(stream.unwrap(), answers, &all));
            }
        });
        Server { url, seen }
    }

    fn of(&self, id: &str) -> Vec<Seen> {
        self.seen.lock().unwrap().iter().filter(|seen| seen.body["id"] == id).cloned().collect()
    }
}

fn serve(stream: TcpStream, answers: &[(&str, &[&str])], all: &Mutex<Vec<Seen>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut headers = HashMap::new();
        let mut first = String::new();
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        assert!(first.starts_with("POST /events "), "{first}");
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let mut body = vec![0; headers["content-length"].parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let id = body["id"].as_str().unwrap().to_owned();
        let times = {
            let mut all = all.lock().unwrap();
            all.push(Seen { headers, body });
            all.iter().filter(|seen| seen.body["id"] == id.as_str()).count()
        };
        let list = answers.iter().find(|(of, _)| *of == id).map_or(&["200 OK"][..], |(_, list)| *list);
        let answer = list[(times - 1).min(list.len() - 1)];
        if let Some(bytes) = answer.strip_prefix('!') {
            stream.write_all(bytes.as_bytes()).unwrap();
            return;
        }
        let (head, body) = answer.split_once('|').unwrap_or((answer, ""));
        write!(stream, "HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    }
}

fn consume(dir: &Path, url: &str, more: &[&str]) -> Ran {
    let fixed =
        ["consume", "--topic", "orders", "--scope", "mailer", "--http", url, "--json", "--until-idle", "1"];
    run(dir, &[&fixed[..], &QUICK, more].concat())
}

/// Ten are more than the attempts an event has.
const BUSY: &[&str] = &[
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "409 Conflict",
    "200 OK",
];

#[test]
fn a_sink_may_answer_everything() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start(&[
        ("fine", &["204 No Content"]),
        ("busy", BUSY),
        ("mismatch", &["422 Unprocessable Content|another body under this key"]),
        ("bad", &["400 Bad Request"]),
        ("slow-down", &["429 Too Many Requests\r\nretry-after: 1", "200 OK"]),
        ("away", &["503 Service Unavailable", "500 Internal Server Error", "200 OK"]),
        ("noise", &["!\u{1}\u{2}this is not HTTP\r\n\r\n", "200 OK"]),
        ("closes", &["!", "200 OK"]),
        ("hidden", &["404 Not Found", "200 OK"]),
        ("moved", &["302 Found\r\nlocation: http://127.0.0.1:1/"]),
        ("says-retry", &["200 OK|{\"retry\": true, \"error\": \"not yet\"}", "200 OK|{\"status\": \"ok\"}"]),
        ("says-fatal", &["200 OK|{\"fatal\": true, \"error\": \"no such order\"}"]),
        ("says-other", &["200 OK|{\"id\": \"x\", \"done\": true}", "200 OK|{\"done\": true}"]),
    ]);
    let ids = [
        "fine",
        "busy",
        "mismatch",
        "bad",
        "slow-down",
        "away",
        "noise",
        "closes",
        "hidden",
        "moved",
        "says-retry",
        "says-fatal",
        "says-other",
    ];
    let lines = ids.iter().fold(String::new(), |text, id| text + &format!("{{\"event_id\":\"{id}\"}}\n"));
    produce(dir, &lines);
    let ran = consume(dir, &server.url, &[]).code(0);
    println!("{}", ran.out.trim());
    assert_eq!((count(&ran, "done"), count(&ran, "dead")), (9, 4), "{}", ran.out);
    let reason = |id: &str| entry(dir, id)["reason"].as_str().unwrap().to_owned();
    assert_eq!(
        reason("mismatch"),
        "the sink answered 422 Unprocessable Entity (another body under this key)"
    );
    assert_eq!(reason("says-fatal"), "no such order");
    assert!(reason("moved").contains("redirects are not followed"), "{}", reason("moved"));
    for (id, runs) in
        [("fine", 1), ("mismatch", 1), ("bad", 1), ("busy", 11), ("slow-down", 2), ("away", 3), ("moved", 5)]
    {
        assert_eq!(server.of(id).len(), runs, "{id}");
    }
    // Each attempt has the same key and a higher token.
    let away = server.of("away");
    let tokens: Vec<i64> = away.iter().map(|seen| seen.headers["hapax-token"].parse().unwrap()).collect();
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
    assert!(
        away.iter()
            .all(|seen| seen.headers["idempotency-key"] == "/mailer/away"
                && seen.body["key"] == "/mailer/away")
    );
    assert_eq!(away.iter().map(|seen| seen.body["attempt"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    let entry = entry(dir, "slow-down");
    let time = |key: &str| hapax::Time::parse(entry[key].as_str().unwrap()).unwrap();
    assert!(time("at").since(time("first_at")).as_millis() >= 1000, "Retry-After is kept: {entry}");
}

#[test]
fn tenant_trace_and_payload_travel_along() {
    let dir = tempfile::tempdir().unwrap();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let server = Server::start(&[]);
    let header = format!("traceparent={trace}");
    let more = ["--header", header.as_str(), "--header", "tenant_id=acme/1"];
    let args = [&["produce", "--topic", "orders", "--create", "1"][..], &more].concat();
    common::run_with(dir.path(), &args, b"{\"event_id\":\"e 1\",\"aggregate_id\":\"o\",\"seq\":7}\n").code(0);
    let ran = consume(dir.path(), &server.url, &[]).code(0);
    assert_eq!(count(&ran, "done"), 1, "{}", ran.out);
    let seen = server.of("e 1").pop().unwrap();
    assert_eq!(seen.headers["traceparent"], trace);
    assert_eq!(seen.headers["idempotency-key"], "acme%2F1/mailer/e%201");
    let body = &seen.body;
    assert_eq!(
        (&body["v"], &body["tenant"], &body["scope"]),
        (&1.into(), &"acme/1".into(), &"mailer".into())
    );
    let event = &body["event"];
    assert_eq!(
        (&event["aggregate"], &event["seq"], &event["topic"]),
        (&"o".into(), &7.into(), &"orders".into())
    );
    assert_eq!(event["payload"]["event_id"], "e 1");
    assert!(body["deadline"].as_str().unwrap().ends_with('Z') && body["timeout_ms"] == 30000);
}

#[test]
fn a_sink_that_is_not_there_costs_attempts_and_then_the_event_is_dead() {
    let dir = tempfile::tempdir().unwrap();
    produce(dir.path(), "{\"event_id\":\"a\"}\n");
    let ran =
        consume(dir.path(), "http://127.0.0.1:1/", &["--set", "consumer.mailer.max_attempts=2"]).code(0);
    assert_eq!(count(&ran, "dead"), 1, "{}", ran.out);
    assert_eq!(ran.err.matches("the sink gives no answer").count(), 1, "logged once: {}", ran.err);
    let entry = entry(dir.path(), "a");
    assert_eq!(entry["attempts"], 2);
    assert!(entry["reason"].as_str().unwrap().contains("the sink gave no answer"), "{entry}");
}

struct Handler(std::process::Child);

impl Drop for Handler {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The handler of the documents, as it is there, on a port of its own.
#[test]
fn the_handler_of_the_documents_takes_each_event() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/handlers.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, http) = page.split_once("## `--http`").unwrap();
    let (_, program) = http.split_once("```python\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();
    assert!(program.trim().lines().count() <= 10, "{program}");
    let port = common::port::free();
    assert!(program.contains("8000"), "{program}");
    let program = program.replace("8000", &port.to_string());
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let out = std::fs::File::create(dir.join("said")).unwrap();
    let python = std::process::Command::new("python3").args(["-c", &program]).stdout(out).spawn().unwrap();
    let _python = Handler(python);
    common::consume::wait_until("it listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    produce(dir, "{\"event_id\":\"e-1\",\"to\":\"ann\"}\n{\"event_id\":\"e-2\",\"to\":\"bob\"}\n");
    let ran = consume(dir, &format!("http://127.0.0.1:{port}/"), &[]).code(0);
    assert_eq!(count(&ran, "done"), 2, "{}", ran.out);
    let said = std::fs::read_to_string(dir.join("said")).unwrap();
    assert!(said.contains("ann") && said.contains("bob") && said.lines().count() == 2, "{said}");
}
