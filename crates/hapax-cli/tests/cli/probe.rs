//! `hapax probe`: against the server, and against a service that does every write twice.

#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use crate::common::serve::Server;
use crate::common::{Ran, port, run};

fn verdicts(ran: &Ran) -> HashMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let report = ran.json();
    let checks = report["checks"].as_array().unwrap();
    checks.iter().map(|check| (text(&check["check"]), text(&check["verdict"]))).collect()
}

/// Our own server passes every check, with and without a count.
#[test]
fn the_server_passes_every_check() {
    let dir = tempfile::tempdir().unwrap();
    for module in ["orders", "invoices"] {
        run(dir.path(), &["modules", "create", module]).code(0);
    }
    let server = Server::start(dir.path(), &[]);
    let records = |module: &str| format!("http://{}/v1/modules/{module}/records", server.address);
    let (orders, invoices) = (records("orders"), records("invoices"));
    let count = format!("{orders}?limit=1000");
    let body = r#"{"payload": {"amount": 7}}"#;
    let args =
        ["probe", &orders, "--body", body, "--count", &count, "--count-at", "/records", "--other", &invoices];
    let ran = run(dir.path(), &[&args[..], &["--json"]].concat()).code(0);
    let report = ran.json();
    assert_eq!(
        (&report["doubles"], report["checks"].as_array().unwrap().len()),
        (&Value::Bool(false), 9),
        "{report}"
    );
    for (check, verdict) in verdicts(&ran) {
        assert_eq!(verdict, "ok", "{check}: {report}");
    }
    let said = run(dir.path(), &args).code(0).out;
    assert!(
        said.contains("No write took effect twice.\n") && said.contains("idempotency-replayed says so"),
        "{said}"
    );
    // Without a count the answers decide; what became of a lost answer is not known.
    let ran = run(dir.path(), &["probe", &orders, "--body", body, "--json"]).code(0);
    let verdicts = verdicts(&ran);
    assert_eq!(
        (verdicts["parallel"].as_str(), verdicts["hang-up at once"].as_str()),
        ("ok", "unknown"),
        "{verdicts:?}"
    );
}

/// How a service treats keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// It reads no key.
    Nothing,
    /// It looks for the key, works, and then stores it: two at once both work.
    Afterwards,
    /// It reads no key, and answers every write alike.
    NothingAndSaysOk,
    /// It reads no key, and answers with it.
    NothingAndEchoes,
    /// One effect for each key; every answer has a request's id.
    AndNames,
    /// The same, and it names no order.
    AndVaries,
    /// The same, and what it counts is seen later.
    AndCountsLate,
    /// The same, and it counts something else.
    AndCountsNothing,
    /// The same, and it counts each effect twice.
    AndCountsTwice,
    /// One effect for each key, and every other request with it is refused.
    AndRefuses(u16),
    /// One effect for each key, which must not be quoted.
    OnlyBare,
    /// One effect for each key, and the keys are in memory only.
    UntilItsEnd,
}

#[derive(Default)]
struct Service {
    effects: AtomicUsize,
    counted: AtomicUsize,
    requests: AtomicUsize,
    stored: Mutex<HashMap<String, usize>>,
    /// Of a service that is restarted: the file with which a command asks for that.
    restart: Mutex<Option<PathBuf>>,
}

/// A service as many are: it counts its effects at `GET /count`.
fn service(keeps: Keeps) -> String {
    restartable(keeps, None)
}

/// The same, with a file that means a restart while it is there: it answers 503, and forgets its keys.
fn restartable(keeps: Keeps, restart: Option<PathBuf>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let service = Arc::new(Service { restart: Mutex::new(restart), ..Service::default() });
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let service = service.clone();
            std::thread::spawn(move || answer(stream.unwrap(), keeps, &service));
        }
    });
    address
}

fn answer(mut stream: TcpStream, keeps: Keeps, service: &Arc<Service>) {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    let length = |text: &str| {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
        Some((head.to_owned(), body.len() >= length.parse::<usize>().unwrap()))
    };
    let head = loop {
        match length(&text) {
            Some((head, true)) => break head,
            None if text.starts_with("GET ") && text.ends_with("\r\n\r\n") => break text.clone(),
            _ => {}
        }
        match stream.read(&mut buffer) {
            Ok(bytes @ 1..) => text.push_str(&String::from_utf8_lossy(&buffer[..bytes])),
            _ => return, // half a request is none
        }
    };
    let key = head.lines().find_map(|line| line.strip_prefix("idempotency-key: "));
    let (status, location, body) = if head.starts_with("GET ") {
        (200, None, service.counted.load(Ordering::SeqCst).to_string())
    } else {
        service.write(keeps, key)
    };
    let location = location.map(|place| format!("location: {place}\r\n")).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{location}connection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all((head + &body).as_bytes());
}

impl Service {
    fn write(self: &Arc<Self>, keeps: Keeps, key: Option<&str>) -> (u16, Option<String>, String) {
        let request = self.requests.fetch_add(1, Ordering::SeqCst);
        if self.restart.lock().unwrap().as_ref().is_some_and(|file| std::fs::remove_file(file).is_ok()) {
            if keeps == Keeps::UntilItsEnd {
                self.stored.lock().unwrap().clear();
            }
            return (503, None, "{}".to_owned());
        }
        if keeps == Keeps::OnlyBare && key.is_none_or(|key| key.contains('"')) {
            return (400, None, r#"{"error":"the key must be a UUID"}"#.to_owned());
        }
        let key = key.map(|key| key.replace('"', ""));
        let naive = [Keeps::Nothing, Keeps::NothingAndSaysOk, Keeps::NothingAndEchoes].contains(&keeps);
        let (number, is_new) = match &key {
            Some(key) if keeps == Keeps::Afterwards => {
                let known = self.stored.lock().unwrap().get(key).copied();
                let number = known.unwrap_or_else(|| self.work(keeps));
                self.stored.lock().unwrap().insert(key.clone(), number);
                (number, known.is_none())
            }
            Some(key) if !naive => {
                let mut stored = self.stored.lock().unwrap();
                let known = stored.get(key).copied();
                (*stored.entry(key.clone()).or_insert_with(|| self.work(keeps)), known.is_none())
            }
            _ => (self.work(keeps), true),
        };
        let place = Some(format!("/orders/{number}"));
        match keeps {
            Keeps::NothingAndSaysOk => (200, None, r#"{"ok":true}"#.to_owned()),
            Keeps::NothingAndEchoes => (201, None, format!(r#"{{"id":"{}"}}"#, key.unwrap_or_default())),
            Keeps::AndNames => (201, place, format!(r#"{{"request_id":{request}}}"#)),
            Keeps::AndVaries => (201, None, format!(r#"{{"request_id":{request}}}"#)),
            Keeps::AndRefuses(status) if !is_new => (status, None, "{}".to_owned()),
            _ => (200, None, format!(r#"{{"id":{number}}}"#)),
        }
    }

    /// An effect, and its number.
    fn work(self: &Arc<Self>, keeps: Keeps) -> usize {
        std::thread::sleep(Duration::from_millis(50));
        let count = match keeps {
            Keeps::AndCountsNothing => 0,
            Keeps::AndCountsTwice => 2,
            _ => 1,
        };
        let service = self.clone();
        let later = move || {
            std::thread::sleep(Duration::from_millis(if keeps == Keeps::AndCountsLate { 500 } else { 0 }));
            service.counted.fetch_add(count, Ordering::SeqCst);
        };
        if keeps == Keeps::AndCountsLate {
            drop(std::thread::spawn(later));
        } else {
            later();
        }
        self.effects.fetch_add(1, Ordering::SeqCst)
    }
}

#[test]
fn a_naive_service_is_found_to_double() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("http://{}/orders", service(Keeps::Nothing));
    let ran = run(dir.path(), &["probe", &url, "--body", r#"{"n":1}"#, "--json"]).code(1);
    let found = verdicts(&ran);
    for check in ["retry", "parallel", "hang-up at once", "bare key"] {
        assert_eq!(found[check], "doubles", "{check}: {}", ran.out);
    }
    assert_eq!(found["other body"], "differs", "{}", ran.out);
    let said = run(dir.path(), &["probe", &url]).code(1).out;
    assert!(said.contains("A retry can take effect twice."), "{said}");
    // It retries well, and doubles under load: the check of many at once finds it.
    let url = format!("http://{}/orders", service(Keeps::Afterwards));
    let ran = run(dir.path(), &["probe", &url, "--body", r#"{"n":1}"#, "--json"]).code(1);
    let found = verdicts(&ran);
    assert_eq!((found["retry"].as_str(), found["parallel"].as_str()), ("ok", "doubles"), "{}", ran.out);
    // Answers that are all alike show nothing; a count does.
    let address = service(Keeps::NothingAndSaysOk);
    let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
    let ran = run(dir.path(), &["probe", &url, "--json"]).code(0);
    assert_eq!(verdicts(&ran)["retry"], "unknown", "{}", ran.out);
    let ran = run(dir.path(), &["probe", &url, "--count", &count, "--json"]).code(1);
    let found = verdicts(&ran);
    for check in ["retry", "parallel", "hang-up at the answer"] {
        assert_eq!(found[check], "doubles", "{check}: {}", ran.out);
    }
}

#[test]
fn what_cannot_be_probed_is_refused_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    for (args, code, says) in [
        (&["https://h/"][..], 2, "https"),
        (&["h"], 2, "not an http URL"),
        (&["http://h", "--header", "x"], 2, "NAME: VALUE"),
        (&["http://h", "--header", "Idempotency-Key: 1"], 2, "makes the keys itself"),
        (&["http://h", "--method", "a b"], 2, "not a method"),
        (&["http://127.0.0.1:1/"], 3, "gives no answer"),
        (&["http://h", "--ledger", "x"], 2, "--ledger"),
    ] {
        let ran = run(dir.path(), &[&["probe"], args].concat()).code(code);
        assert!(ran.err.contains(says) && ran.err.lines().count() == 1, "{args:?}: {}", ran.err);
    }
    let server = Server::start(dir.path(), &[]);
    let url = format!("http://{}/v1/modules/orders/records", server.address);
    let ran = run(dir.path(), &["probe", &url]).code(4);
    assert!(ran.err.contains("answers 404 to a first request"), "{}", ran.err);
}

/// A count that does not follow the writes would make every service look well.
#[test]
fn a_count_that_does_not_follow_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (keeps, says) in
        [(Keeps::AndCountsNothing, "rose by 0"), (Keeps::AndCountsTwice, "rose by 4 after 2 writes")]
    {
        let address = service(keeps);
        let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
        let ran = run(dir.path(), &["probe", &url, "--count", &count, "--count-wait", "1s"]).code(4);
        assert!(ran.err.contains("--count cannot be used") && ran.err.contains(says), "{}", ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    }
}

/// What looks like a second effect, and is none.
#[test]
fn a_service_that_writes_once_is_not_said_to_double() {
    let dir = tempfile::tempdir().unwrap();
    let probe = |keeps: Keeps, counts: bool| {
        let address = service(keeps);
        let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
        let args = ["probe", &url, "--body", r#"{"n":1}"#, "--json", "--count", &count];
        let ran = run(dir.path(), &args[..if counts { 7 } else { 5 }]).code(0);
        (verdicts(&ran), ran.out)
    };
    // Each answer has an id of its request. Its place tells what it is about.
    let (found, said) = probe(Keeps::AndNames, false);
    for check in ["retry", "parallel", "hang-up in the body", "bare key"] {
        assert_eq!(found[check], "ok", "{check}: {said}");
    }
    assert!(said.contains("an answer about the first write"), "{said}");
    // Without a place nothing tells.
    let (found, said) = probe(Keeps::AndVaries, false);
    for check in ["retry", "parallel", "hang-up at once", "bare key"] {
        assert_eq!(found[check], "unknown", "{check}: {said}");
    }
    // An effect that is counted late is not that of the next check.
    let (found, said) = probe(Keeps::AndCountsLate, true);
    for check in
        ["retry", "parallel", "hang-up at once", "hang-up at the answer", "hang-up in the body", "bare key"]
    {
        assert_eq!(found[check], "ok", "{check}: {said}");
    }
}

/// Answers that are made from the key are the same for two effects.
#[test]
fn answers_that_repeat_the_key_show_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let address = service(Keeps::NothingAndEchoes);
    let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
    let ran = run(dir.path(), &["probe", &url, "--json"]).code(0);
    assert_eq!(verdicts(&ran)["retry"], "unknown", "{}", ran.out);
    let ran = run(dir.path(), &["probe", &url, "--count", &count, "--json"]).code(1);
    assert_eq!(verdicts(&ran)["retry"], "doubles", "{}", ran.out);
}

#[test]
fn a_retry_that_is_refused_is_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    for status in [409, 500] {
        let address = service(Keeps::AndRefuses(status));
        let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
        let ran = run(dir.path(), &["probe", &url, "--json"]).code(0);
        let found = verdicts(&ran);
        assert_eq!(
            (found["retry"].as_str(), found["hang-up at the answer"].as_str()),
            ("differs", "unknown"),
            "{}",
            ran.out
        );
        assert!(ran.out.contains(&format!("the retry is refused with {status}")), "{}", ran.out);
        let ran = run(dir.path(), &["probe", &url, "--count", &count, "--json"]).code(0);
        let found = verdicts(&ran);
        assert_eq!(
            (found["retry"].as_str(), found["hang-up at the answer"].as_str()),
            ("differs", "differs"),
            "{}",
            ran.out
        );
    }
}

#[test]
fn a_service_that_takes_only_bare_keys_is_probed_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("http://{}/orders", service(Keeps::OnlyBare));
    let ran = run(dir.path(), &["probe", &url, "--body", r#"{"n":1}"#, "--json"]).code(0);
    let found = verdicts(&ran);
    assert_eq!((found["retry"].as_str(), found["parallel"].as_str()), ("ok", "ok"), "{}", ran.out);
    assert_eq!(found["quoted key"], "differs", "{}", ran.out);
}

#[test]
fn a_probe_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("http://{}/orders", service(Keeps::Afterwards));
    let ran = run(dir.path(), &["probe", &url, "--within", "100ms"]).code(3);
    assert!(ran.err.contains("--within") && ran.err.lines().count() == 1, "{}", ran.err);
}

/// Every other check finds keys in memory well: they are forgotten when the process ends.
#[test]
fn keys_that_end_with_the_process_are_found_by_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("restart");
    let restart = format!("touch '{}'", file.display());
    // The kill may come before the service has read the request: then nothing was forgotten.
    for (keeps, counts, code, found_restart, found_kill) in [
        (Keeps::UntilItsEnd, false, 1, "doubles", &["unknown"][..]),
        (Keeps::UntilItsEnd, true, 1, "doubles", &["doubles", "ok"]),
        (Keeps::AndNames, true, 0, "ok", &["ok"]),
    ] {
        let address = restartable(keeps, Some(file.clone()));
        let (url, count) = (format!("http://{address}/orders"), format!("http://{address}/count"));
        let args = ["probe", &url, "--body", r#"{"n":1}"#, "--json", "--count", &count];
        let args = &args[..if counts { 7 } else { 5 }];
        let ran = run(dir.path(), args).code(0);
        assert_eq!(verdicts(&ran).get("restart"), None, "{}", ran.out);
        let ran = run(dir.path(), &[args, &["--restart", &restart]].concat()).code(code);
        let found = verdicts(&ran);
        assert_eq!(
            (found["retry"].as_str(), found["restart"].as_str()),
            ("ok", found_restart),
            "{}",
            ran.out
        );
        assert!(found_kill.contains(&found["kill"].as_str()), "{}", ran.out);
    }
    let url = format!("http://{}/orders", service(Keeps::AndNames));
    let ran = run(dir.path(), &["probe", &url, "--restart", "exit 7"]).code(4);
    assert!(ran.err.contains("--restart") && ran.err.contains('7'), "{}", ran.err);
}

/// Our own server, which is killed with SIGKILL and started again.
#[test]
fn the_server_knows_a_write_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    // One that nobody takes while the server is down.
    let listen = format!("127.0.0.1:{}", port::free());
    let mut server = Server::start_at(dir.path(), &listen, &[], &[]);
    let orders = format!("http://{}/v1/modules/orders/records", server.address);
    let (count, pid) = (format!("{orders}?limit=1000"), dir.path().join("pid"));
    std::fs::write(&pid, server.child.id().to_string()).unwrap();
    // A killed process has its port until it has really ended: gone, or a zombie without threads (the first one is
    // this test's child). As a service manager would, it starts again what ends without having been killed here.
    let restart = format!(
        "keep() {{
            for _ in 1 2 3 4 5 6 7 8 9 10; do
                '{}' serve --listen {} 2>>again.err &
                this=$!; echo $this > pid; wait $this; code=$?
                [ ! -e killed-$this ] || exit
                echo \"it ended by itself with $code\" >>again.err; sleep 1
            done
        }}
        cd '{}' && old=$(cat pid) && touch killed-$old && {{ kill -9 $old || :; }} &&
        while [ -e /proc/$old ] && {{
            ! grep -qs '^State:.*Z' /proc/$old/status || [ $(ls /proc/$old/task | wc -l) -gt 1 ]
        }}; do sleep 0.05; done &&
        {{ keep & }}",
        env!("CARGO_BIN_EXE_hapax"),
        server.address,
        dir.path().display(),
    );
    let ran = run(
        dir.path(),
        &[
            "probe",
            &orders,
            "--body",
            r#"{"payload": {"amount": 7}}"#,
            "--count",
            &count,
            "--count-at",
            "/records",
            "--restart",
            &restart,
            "--restart-wait",
            "2m",
            "--json",
        ],
    );
    // The last one that was started is nobody's child here.
    let last = std::fs::read_to_string(&pid).unwrap();
    std::fs::write(dir.path().join(format!("killed-{}", last.trim())), "").unwrap();
    let killed = std::process::Command::new("kill").args(["-9", last.trim()]).status().unwrap().success();
    assert_eq!(server.ended(), None, "the first one was killed");
    let said = std::fs::read_to_string(dir.path().join("again.err")).unwrap();
    // Not captured: it is worth seeing also where the test passes.
    std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()).unwrap();
    assert!(killed, "the last one ended by itself: {said}; the probe: {} {}", ran.out, ran.err);
    let found = verdicts(&ran.code(0));
    assert_eq!((found["restart"].as_str(), found["kill"].as_str()), ("ok", "ok"), "{found:?}");
}
