//! What `hapax serve` does with clients that hang up, do not read, send half a request, or come by
//! another name; and what its probes say meanwhile.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::run;
use crate::common::serve::{
    Answer, PATIENCE, Server, answered, connect, insist, refused, request, to_the_end,
};

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Holds the write lock of an embedded file, so that whoever writes to it waits.
fn lock(dir: &Path, file: &str) -> rusqlite::Connection {
    let held = rusqlite::Connection::open(dir.join("hapax-data").join(file)).unwrap();
    held.busy_timeout(PATIENCE).unwrap();
    held.execute_batch("begin immediate").unwrap();
    held
}

/// Sends a claim, and does not wait for its answer.
fn send_claim(address: &str, id: &str) -> TcpStream {
    let body = json!({"scope": "s", "id": id}).to_string();
    let mut stream = connect(address);
    let sent = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(sent.as_bytes()).unwrap();
    stream
}

/// Makes an admin's token.
fn token(dir: &Path, name: &str) -> String {
    run(dir, &["token", "create", "--name", name, "--role", "admin"]).code(0).out.trim().to_owned()
}

fn is_leased(server: &Server, id: &str) -> bool {
    server.get(&format!("/v1/processed?scope=s&id={id}")).json()["state"] == "leased"
}

fn operator(server: &Server, path: &str) -> Answer {
    insist(server.ready["admin_address"].as_str().unwrap(), "GET", path, &[], b"")
}

/// One connection after the other is taken by a client that asks and never reads.
#[test]
fn t230_a_client_that_does_not_read_loses_its_connection() {
    let dir = dir();
    let limits = ["--set", "serve.connections_max=3", "--set", "serve.request_timeout_ms=3000"];
    let server = Server::start(dir.path(), &[&limits[..], &["--admin-listen", "127.0.0.1:0"]].concat());
    let asks = format!("GET /openapi.json HTTP/1.1\r\nhost: {}\r\n\r\n", server.address).repeat(1200);
    let held: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = connect(&server.address);
            stream.write_all(asks.as_bytes()).unwrap();
            stream
        })
        .collect();
    wait_until("operators are served", || operator(&server, "/metrics").status == 200);
    let look = || insist(&server.address, "GET", "/v1/info", &[], b"").status;
    wait_until("the connections are free again", || look() == 200);
    // The clients are there still: the first was cut off in the middle. The others may find that they can
    // go on, now that somebody reads.
    let answers = |mut stream: TcpStream| {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes); // a reset is not a fault
        String::from_utf8_lossy(&bytes).matches("HTTP/1.1 200").count()
    };
    let answers: Vec<_> = held.into_iter().map(answers).collect();
    assert!(answers.iter().any(|count| *count < 1200), "no client was in the way: {answers:?}");
}

#[test]
fn t230_probes_and_operators_have_connections_of_their_own() {
    let dir = dir();
    let limits = ["--set", "serve.connections_max=2", "--set", "serve.request_timeout_ms=600000"];
    let server = Server::start(dir.path(), &[&limits[..], &["--admin-listen", "127.0.0.1:0"]].concat());
    let held: Vec<_> = (0..2).map(|_| connect(&server.address)).collect();
    // The server may not have accepted them yet.
    wait_until("the server is full", || server.get("/v1/info").status == 503);
    let reply = server.get("/v1/info");
    assert!(reply.problem(503, "overloaded").contains("serve.connections_max"));
    assert_eq!(reply.header("retry-after"), Some("1"));
    for _ in 0..200 {
        let answer = server.get("/healthz");
        answer.is(200);
        assert_eq!(answer.header("connection"), Some("close"), "the reserve is for everybody");
    }
    wait_until("it is ready", || server.get("/readyz").status == 200);
    assert_eq!(operator(&server, "/v1/stats").status, 200);
    drop(held);
    wait_until("there is room again", || server.get("/v1/info").status == 200);
}

fn in_flight(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("http_requests_in_flight "))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn t231_a_read_ends_with_its_connection_and_is_counted() {
    let dir = dir();
    // They wait for as long as a request may, so that all of them are there at once.
    let server = Server::start(dir.path(), &["--log", "info", "--set", "serve.request_timeout_ms=120000"]);
    let asks = format!("GET /v1/journal/events?wait_ms=30000 HTTP/1.1\r\nhost: {}\r\n\r\n", server.address);
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let mut stream = connect(&server.address);
            stream.write_all(asks.as_bytes()).unwrap();
            stream
        })
        .collect();
    wait_until("they wait", || in_flight(&server.get("/metrics").body) == Some(51));
    drop(waiting);
    let counted = "http_requests_total{method=\"GET\",route=\"/v1/journal/events\",status=\"499\"} 50";
    wait_until("they are counted", || server.get("/metrics").body.contains(counted));
    wait_until("nothing is left of them", || in_flight(&server.get("/metrics").body) == Some(1));
    let log = std::fs::read_to_string(dir.path().join("serve.err")).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("hung up")).count(), 50, "{log}");
}

#[test]
fn t231_writes_without_clients_are_bounded_and_counted() {
    let dir = dir();
    let limits = ["--set", "serve.connections_max=4", "--admin-listen", "127.0.0.1:0"];
    let server = Server::start(dir.path(), &limits);
    let held = lock(dir.path(), "ledger.db");
    let clients: Vec<_> = (0..4).map(|n| send_claim(&server.address, &format!("e-{n}"))).collect();
    wait_until("they run", || in_flight(&operator(&server, "/metrics").body) == Some(5));
    drop(clients);
    // Their connections are free, but what they asked for is not done.
    let claim = json!({"scope": "s", "id": "e-9"});
    wait_until("there is no room for more work", || {
        let refused = server.post("/v1/claims", &claim);
        refused.problem(503, "overloaded").contains("hung up")
    });
    assert_eq!(in_flight(&operator(&server, "/metrics").body), Some(5), "they run");
    assert_eq!(server.get("/healthz").status, 200);
    drop(held);
    for n in 0..4 {
        wait_until("it is claimed all the same", || is_leased(&server, &format!("e-{n}")));
    }
    let counted = "http_requests_total{method=\"POST\",route=\"/v1/claims\",status=\"200\"} 4";
    wait_until("they are counted", || operator(&server, "/metrics").body.contains(counted));
    assert_eq!(server.post("/v1/claims", &claim).is(200)["outcome"], "claimed");
}

/// A stop waits for what runs without a client, too.
#[test]
fn t231_a_stop_waits_for_writes_without_clients() {
    let dir = dir();
    let limits = ["--set", "serve.drain_ms=600000", "--set", "serve.connections_max=1"];
    let more = ["--admin-listen", "127.0.0.1:0", "--log", "info"];
    let mut server = Server::start(dir.path(), &[&limits[..], &more].concat());
    let held = lock(dir.path(), "ledger.db");
    let client = send_claim(&server.address, "e-1");
    wait_until("it runs", || in_flight(&operator(&server, "/metrics").body) == Some(2));
    drop(client);
    // Its connection is free, and its work is not.
    wait_until("the server knows that it hung up", || {
        server.get("/v1/info").problem(503, "overloaded").contains("hung up")
    });
    server.signal("-TERM");
    wait_until("it takes no more", || TcpStream::connect(&server.address).is_err());
    drop(held);
    assert_eq!(server.ended(), Some(143));
    let log = std::fs::read_to_string(dir.path().join("serve.err")).unwrap();
    assert!(log.contains("ended after its client hung up"), "{log}");
    let server = Server::start(dir.path(), &[]);
    assert!(is_leased(&server, "e-1"));
}

/// A route that looks at no body does not begin before it is here.
#[test]
fn t232_what_is_answered_with_408_is_never_done() {
    let dir = dir();
    let sets = ["--set", "serve.request_timeout_ms=3000"];
    let (secret, id) = (token(dir.path(), "a"), token(dir.path(), "b")[4..20].to_owned());
    let mut server = Server::start(dir.path(), &sets);
    // Whoever revokes a token now takes longer than the limit.
    let locked = lock(dir.path(), "journal.db");
    let head = format!(
        "DELETE /v1/tokens/{id} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {secret}\r\ncontent-length: 1\r\n\r\n",
        server.address
    );
    let answer = answered(|| {
        let mut stream = connect(&server.address);
        let _ = stream.write_all(head.as_bytes()); // it may be closed already, if this comes too late
        to_the_end(&mut stream)
    });
    let problem = answer.problem(408, "request-timeout");
    assert!(problem.contains("nothing was done"), "{problem}");
    drop(locked);
    assert_eq!(server.stop(), Some(143)); // after what runs has ended
    let listed = run(dir.path(), &["token", "ls", "--json"]).code(0).json();
    let is_live = |token: &&Value| token["id"] == id.as_str() && token["state"] == "live";
    assert_eq!(listed["tokens"].as_array().unwrap().iter().filter(is_live).count(), 1, "{listed}");
}

#[test]
fn t233_readiness_asks_the_writers() {
    let dir = dir();
    let server = Server::start(dir.path(), &["--set", "serve.request_timeout_ms=600000"]);
    let ready = server.until_ready()["checks"].clone();
    assert_eq!((&ready["ledger"], &ready["relay"]), (&json!("ok"), &json!("leads")), "{ready}");
    let files = [("ledger.db", &["ledger"][..]), ("journal.db", &["journal", "keys"]), ("bus.db", &["bus"])];
    for (file, names) in files {
        let held = lock(dir.path(), file);
        wait_until(&format!("{names:?} are named"), || {
            let answer = server.get("/readyz");
            answer.status == 503 && names.iter().all(|name| answer.json()["checks"][*name] != "ok")
        });
        server.get("/healthz").is(200);
        drop(held);
        wait_until("it is back", || server.get("/readyz").status == 200);
    }
}

/// Two servers on one journal: one leads, and both are ready.
#[test]
fn t233_readiness_tells_who_publishes() {
    let dir = dir();
    let relay = |server: &Server| server.get("/readyz").json()["checks"]["relay"].clone();
    let first = Server::start(dir.path(), &[]);
    wait_until("the first leads", || relay(&first) == "leads");
    let second = Server::start(dir.path(), &[]);
    wait_until("the second follows", || relay(&second) == "follows");
    wait_until("both are ready", || {
        [&first, &second].iter().all(|server| server.get("/readyz").status == 200)
    });
    // The topic goes away under the relay.
    let bus = rusqlite::Connection::open(dir.path().join("hapax-data/bus.db")).unwrap();
    bus.busy_timeout(PATIENCE).unwrap();
    bus.execute("delete from bus_topic", []).unwrap();
    wait_until("the bus is named", || {
        let answer = first.get("/readyz");
        answer.status == 503 && answer.json()["checks"]["bus"] == "not-found"
    });
}

#[test]
fn t234_probes_come_by_any_name() {
    let dir = dir();
    let server = Server::start(dir.path(), &[]);
    let by = |host: &str, path: &str| request(&server.address, "GET", path, &[("host", host)], b"");
    for host in ["10.1.2.3:7070", "pod-7.example"] {
        by(host, "/healthz").is(200);
        wait_until("it is ready", || by(host, "/readyz").status == 200);
        by(host, "/v1/info").problem(403, "host-forbidden");
        by(host, "/openapi.json").problem(403, "host-forbidden");
        by(host, "/healthz/").problem(403, "host-forbidden");
    }
}

#[test]
fn t235_a_server_on_all_addresses_answers_to_each_of_them() {
    let dir = dir();
    let bearer = format!("Bearer {}", token(dir.path(), "a"));
    let server = Server::start(dir.path(), &["--admin-listen", "0.0.0.0:0"]);
    let port = server.ready["admin_address"].as_str().unwrap().rsplit_once(':').unwrap().1.to_owned();
    let by = |address: &str, host: &str| {
        let headers = [("host", host), ("authorization", &bearer)];
        request(address, "GET", "/v1/stats", &headers, b"")
    };
    let (two, three) = (format!("127.0.0.2:{port}"), format!("127.0.0.3:{port}"));
    by(&two, &two).is(200);
    by(&three, &three).is(200);
    by(&two, &three).problem(403, "host-forbidden");
    by(&two, "evil.example").problem(403, "host-forbidden");
}

#[test]
fn t235_hosts_that_no_request_can_name_are_refused() {
    let dir = dir();
    for (hosts, says) in [
        ("api.example:7070", "has a port"),
        ("https://api.example", "has a scheme"),
        ("*.example", "has a wildcard"),
        ("*", "has a wildcard"),
        ("::1", "without its brackets"),
        ("[api.example]", "no IPv6 address"),
        ("api example", "is not a host name"),
        ("good.example,api.example/v1", "\"api.example/v1\""),
        ("a..b", "is not a host name"),
    ] {
        let ran = refused(dir.path(), &["--listen", "127.0.0.1:0", "--set", &format!("serve.hosts={hosts}")])
            .code(2);
        assert!(ran.err.contains(says) && ran.err.contains("serve.hosts"), "{hosts}: {}", ran.err);
    }
    let good = "serve.hosts=api.example, API_2.example,192.0.2.7,[2001:db8::7]";
    let server = Server::start(dir.path(), &["--set", good]);
    let by = |host: &str| request(&server.address, "GET", "/v1/info", &[("host", host)], b"").status;
    assert_eq!(
        [by("api_2.example:1"), by("192.0.2.7"), by("[2001:db8::7]:80"), by("192.0.2.8")],
        [200, 200, 200, 403]
    );
}

/// Half a head is not a request.
#[test]
fn t236_a_stop_does_not_wait_for_requests_that_have_not_arrived() {
    let dir = dir();
    let patient = ["--set", "serve.drain_ms=600000", "--set", "serve.request_timeout_ms=600000"];
    let mut server = Server::start(dir.path(), &patient);
    let mut half = connect(&server.address);
    half.write_all(b"GET /healthz HTT").unwrap();
    // One that was used before, and then half a head.
    let mut used = connect(&server.address);
    let asks = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", server.address);
    used.write_all(asks.as_bytes()).unwrap();
    let mut byte = [0];
    used.read_exact(&mut byte).unwrap();
    used.write_all(b"GET /hea").unwrap();
    wait_until("the server has them", || server.get("/healthz").status == 200);
    assert_eq!(server.stop(), Some(143));
}

#[test]
fn t236_a_delay_lets_others_learn_that_it_stops() {
    let dir = dir();
    let mut server = Server::start(dir.path(), &["--set", "serve.stop_delay_ms=600000"]);
    wait_until("it is ready", || server.get("/readyz").status == 200);
    server.signal("-TERM");
    wait_until("it says so", || server.get("/readyz").json()["checks"]["server"] == "stopping");
    assert_eq!(server.get("/readyz").status, 503);
    server.get("/healthz").is(200);
    assert_eq!(server.post("/v1/claims", &json!({"scope": "s", "id": "i"})).is(200)["outcome"], "claimed");
    server.signal("-TERM"); // now
    assert_eq!(server.ended(), Some(143));
}
