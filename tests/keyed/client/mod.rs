//! The client against a service that fails in every way that a network, a proxy and a server can.

mod analytics;
mod doubt;
mod service;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use hapax::client::{Client, ClientSettings, Error, PreparedWrite, Uuid};
use hapax::keyed::IdempotencyKey;
use hapax::testing::proxy::{Cut, Proxy};
use serde_json::json;

use service::{Foreign, Service, rows};

use crate::support::postgres::{child, role};

/// Patient as a whole, quick between attempts.
fn settings() -> ClientSettings {
    let mut settings = ClientSettings::default();
    settings.deadline = super::keyed_layer::PATIENCE;
    settings.backoff_base = Duration::from_millis(5);
    settings.backoff_max = Duration::from_millis(50);
    settings
}

fn client_of(address: SocketAddr, settings: ClientSettings) -> Client {
    Client::with_settings(&format!("http://{address}"), settings).unwrap()
}

/// The connection ends after the server has done the work, and before it has seen the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t190_a_lost_answer_is_asked_for_again_and_the_write_is_done_once() {
    let service = Service::start().await;
    let proxy = Proxy::start(service.address).await.unwrap();
    let client = client_of(proxy.address(), settings());
    let orders = client.data("orders");
    let mut cuts = 0;
    for (cut, replayed) in [(Cut::Answer, true), (Cut::Request, false)] {
        let before = service.rows();
        let mut lose = || {
            cuts += 1;
            proxy.arm("idempotency-key", cut);
        };
        lose();
        let created = orders.create(json!({"amount": 7})).await.unwrap();
        assert_eq!((created.replayed, created.record.seq), (replayed, 1), "{cut:?}");
        assert_eq!(service.rows(), before + 1, "{cut:?}");
        let id = created.record.id;
        lose();
        let updated = orders.update(id, 1, json!({"amount": 8})).await.unwrap();
        assert_eq!((updated.replayed, updated.record.seq), (replayed, 2), "{cut:?}");
        assert_eq!(orders.get(id).await.unwrap().payload, json!({"amount": 8}));
        lose();
        let deleted = orders.delete(id, 2).await.unwrap();
        assert_eq!((deleted.replayed, deleted.record.seq), (replayed, 3), "{cut:?}");
        assert_eq!(service.rows(), before, "{cut:?}");
        assert!(matches!(orders.get(id).await, Err(Error::NotFound(_))));
        orders.create(json!({})).await.unwrap();
        assert_eq!(proxy.cuts(), cuts, "each write met its cut");
    }
    for attempts in service.front.asked().chunk_by(|a, b| a.1 == b.1) {
        assert!(attempts.len() <= 2, "one repeat was enough");
    }
}

/// The process dies after its request was done and before it has the answer. The next one sends what was stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t191_a_prepared_write_that_was_stored_goes_on_after_a_crash() {
    let service = Service::start().await;
    let proxy = Proxy::start(service.address).await.unwrap();
    let client = client_of(proxy.address(), settings());
    let write = client.data("orders").prepare_create(json!({"b": 1.50, "a": "é"})).unwrap();
    let stored = serde_json::to_string(&write).unwrap();
    proxy.arm("idempotency-key", Cut::Answer);
    tokio::select! {
        biased;
        () = proxy.cut(1) => {} // the caller is gone: its future is dropped here
        done = client.send(&write) => panic!("{done:?}"),
    }
    drop((client, write));
    assert_eq!(service.rows(), 1);
    let write: PreparedWrite = serde_json::from_str(&stored).unwrap();
    let client = client_of(service.address, settings());
    for _ in 0..2 {
        let written = client.send_anywhere(&write).await.unwrap(); // the same server, reached another way
        assert!(written.replayed, "{written:?}");
        assert_eq!(written.record.payload, json!({"a": "é", "b": 1.5}));
    }
    assert_eq!(service.rows(), 1);
}

/// Answers of the server, of proxies, of nobody: the code decides, whatever the status.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t192_codes_decide_about_a_retry_and_not_the_status() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    let passing = [
        Foreign::problem(409, "key-running"),
        Foreign::problem(503, "unavailable").after("0"),
        Foreign::problem(400, "contended"),
        Foreign::problem(429, "rate-limited"),
        Foreign::problem(504, "handler-timeout"),
        Foreign::problem(418, "a-code-of-next-year").after("0"),
        Foreign::html(502),
        Foreign::html(503).after("0"),
        Foreign::html(200),
        Foreign { status: 200, kind: "application/json", body: r#"{"id": "#.to_owned(), retry_after: None },
        Foreign { status: 500, kind: "application/problem+json", body: "{}".to_owned(), retry_after: None },
    ];
    let count = passing.len();
    service.front.say(passing);
    let created = orders.create(json!({})).await.unwrap();
    assert!(!created.replayed);
    let asked = service.front.asked();
    assert_eq!(asked.len(), count + 1);
    assert!(asked.iter().all(|(_, key)| key.is_some() && *key == asked[0].1), "one key on every attempt");
    assert_eq!(service.rows(), 1);

    for (answer, code) in [
        (Foreign::problem(503, "outcome-unknown").after("0"), "outcome-unknown"),
        (Foreign::problem(503, "conflict").after("0"), "conflict"),
        (Foreign::problem(503, "key-mismatch"), "key-mismatch"),
        (Foreign::problem(500, "key-expired"), "key-expired"),
        (Foreign::problem(503, "unauthenticated"), "unauthenticated"),
        (Foreign::problem(503, "a-code-of-next-year"), "a-code-of-next-year"),
    ] {
        service.front.say([answer]);
        let error = orders.create(json!({})).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(!error.is_retryable());
        assert_eq!(
            error.in_doubt(),
            matches!(code, "outcome-unknown" | "key-expired" | "key-mismatch"),
            "{error}"
        );
        assert_eq!(service.front.asked().len(), 1, "{code} is final");
    }
    // What repeats do not mend is repeated a few times, not for a minute.
    for answer in [Foreign::html(404), Foreign::html(302), Foreign::problem(500, "handler-failed")] {
        service.front.say(std::iter::repeat_n(answer, 5));
        let error = orders.create(json!({})).await.unwrap_err();
        assert!(error.in_doubt(), "{error}");
        assert_eq!((service.front.asked().len(), service.front.left()), (5, 0), "{error}");
    }
    assert_eq!(service.rows(), 1, "nothing else was written");
}

/// An answer after a doubt: the error still says that the write may have happened.
#[tokio::test]
async fn t193_a_refusal_after_a_lost_answer_does_not_end_the_doubt() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    service.front.say([Foreign::html(504), Foreign::problem(401, "unauthenticated")]);
    let error = orders.create(json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Denied(_)) && error.in_doubt(), "{error}");
    service.front.say([Foreign::problem(409, "contended"), Foreign::problem(401, "unauthenticated")]);
    let error = orders.create(json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Denied(_)) && !error.in_doubt(), "{error}");
    service.front.say([Foreign::html(504), Foreign::problem(409, "conflict")]);
    let error = orders.create(json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }) && !error.in_doubt(), "{error}");
}

/// The key is known, under another principal: the token was replaced between the attempts, and the write may be done.
#[tokio::test]
async fn t251_a_mismatch_that_may_be_the_callers_own_write_is_in_doubt() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    let mismatch = |more: &str| {
        let body =
            format!(r#"{{"code":"key-mismatch","detail":"the key belongs to another request"{more}}}"#);
        Foreign { body, ..Foreign::problem(422, "key-mismatch") }
    };
    for (answers, in_doubt) in [
        (vec![mismatch("")], true), // nothing is known to differ: it may be the same request
        (vec![mismatch(r#","fields":["/payload"]"#)], false),
        (vec![mismatch(r#","differs":["principal","body"]"#)], false),
        (vec![mismatch(r#","differs":["principal"]"#)], true),
        (vec![Foreign::html(504), mismatch("")], true),
        (vec![Foreign::html(504), mismatch(r#","fields":["/payload"]"#)], true),
        (vec![Foreign::problem(409, "contended"), mismatch(r#","fields":["/payload"]"#)], false),
    ] {
        service.front.say(answers);
        let error = orders.create(json!({})).await.unwrap_err();
        assert!(matches!(error, Error::KeyMismatch(_)) && !error.is_retryable(), "{error}");
        assert_eq!(error.in_doubt(), in_doubt, "{error}");
        assert_eq!(error.to_string().contains("with the same token (a rotated one is the same)"), in_doubt);
    }
    assert_eq!(service.rows(), 0);
}

/// Digits that no f64 has, and JSON that is deeper than a parser of values goes.
#[tokio::test]
async fn t252_what_is_read_can_be_written_again_to_the_digit() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    let (id, deep) = (Uuid::now_v7(), format!("{}{}", "[".repeat(300), "]".repeat(300)));
    let payload = format!(r#"{{"b":12345678901234567890.123456789,"a":1e400,"deep":{deep}}}"#);
    let body = format!(r#"{{"id":"{id}","module":"orders","seq":1,"payload":{payload},"new_field":[]}}"#);
    service.front.say([Foreign { status: 200, kind: "application/json", body, retry_after: None }]);
    let record = orders.get(id).await.unwrap();
    assert_eq!(record.payload.as_str(), payload);
    let write = orders.prepare_update(id, 1, &record.payload).unwrap();
    let stored: serde_json::Value = serde_json::to_value(&write).unwrap();
    assert_eq!(stored["body"], format!(r#"{{"payload":{payload},"expected_seq":1}}"#));
    for (body, text) in [(r#","payload":null"#, "null"), ("", "null")] {
        let body = format!(r#"{{"id":"{id}","module":"orders","seq":1{body}}}"#);
        service.front.say([Foreign { status: 200, kind: "application/json", body, retry_after: None }]);
        assert_eq!(orders.get(id).await.unwrap().payload.as_str(), text);
    }
}

/// Records that do not fit into one answer together, and one that does not fit alone.
#[tokio::test]
async fn t255_records_that_are_too_large_for_one_page_are_read_in_smaller_ones() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(orders.create(json!({"text": "x".repeat(400)})).await.unwrap().record.id);
    }
    ids.sort();
    let mut small = settings();
    small.answer_bytes_max = 1500;
    small.deadline = Duration::MAX; // no panic: it is just never over
    let orders = client_of(service.address, small).data("orders");
    let (mut records, mut listed) = (orders.records(), Vec::new());
    while let Some(record) = records.next().await.unwrap() {
        listed.push(record.id);
    }
    assert_eq!(listed, ids);
    service.front.asked();
    let error = orders.list(None, 8).await.unwrap_err();
    assert!(error.to_string().contains("more than 1500 bytes (answer_bytes_max)") && !error.in_doubt());
    assert_eq!(service.front.asked().len(), 1, "it would be as large the next time");
}

#[tokio::test]
async fn retry_after_is_waited_for_and_the_deadline_ends_it() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    service.front.say([Foreign::problem(503, "unavailable").after("1")]);
    orders.create(json!({})).await.unwrap();
    let asked = service.front.asked();
    assert!(asked[1].0 - asked[0].0 >= Duration::from_secs(1), "it came before it was asked for");
    // Nobody waits for what comes after the deadline.
    service.front.say([Foreign::problem(503, "unavailable").after("3000")]);
    let started = Instant::now();
    let error = orders.create(json!({})).await.unwrap_err();
    assert!(error.is_retryable() && error.in_doubt() && error.code() == "unavailable", "{error}");
    assert!(started.elapsed() < super::keyed_layer::PATIENCE);
    assert_eq!(service.front.asked().len(), 1);
}

/// A server that accepts and is silent; a port where nobody listens; a body that does not end.
#[tokio::test]
async fn everything_has_a_limit() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut short = settings();
    short.attempt_timeout = Duration::from_millis(100);
    short.deadline = Duration::from_secs(10);
    let orders = client_of(silent.local_addr().unwrap(), short).data("orders");
    let error = orders.create(json!({})).await.unwrap_err();
    let Error::Unavailable { attempts, in_doubt: true, .. } = error else { panic!("{error}") };
    assert!(attempts >= 2, "an attempt does not take all of the time");
    let mut once = settings();
    (once.backoff_base, once.backoff_max) = (Duration::from_hours(99), Duration::from_hours(99));
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    let error = client_of(nobody, once).data("orders").create(json!({})).await.unwrap_err();
    assert!(error.is_retryable() && !error.in_doubt(), "nobody has seen it: {error}");

    let service = Service::start().await;
    let mut small = settings();
    small.body_bytes_max = 1000;
    small.answer_bytes_max = 1000;
    let orders = client_of(service.address, small).data("orders");
    let error = orders.create(json!({"text": "x".repeat(1000)})).await.unwrap_err();
    assert!(error.to_string().contains("the limit is 1000"), "{error}");
    assert_eq!((service.front.asked().len(), service.rows()), (0, 0), "nothing was sent");
    let endless =
        Foreign { status: 200, kind: "application/json", body: "x".repeat(1001), retry_after: None };
    service.front.say(std::iter::repeat_n(endless, 5));
    let error = orders.create(json!({})).await.unwrap_err();
    assert!(error.to_string().contains("more than 1000 bytes") && error.in_doubt(), "{error}");
}

#[tokio::test]
async fn bad_input_is_refused_with_a_sentence_and_nothing_is_sent() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    for module in ["", "Orders", "../keys", "a/b", "1a", &"m".repeat(49)] {
        let data = client.data(module);
        assert!(matches!(data.create(json!({})).await, Err(Error::Invalid { .. })), "{module}");
        assert!(matches!(data.get(Uuid::nil()).await, Err(Error::Invalid { .. })), "{module}");
        assert!(matches!(data.list(None, 10).await, Err(Error::Invalid { .. })), "{module}");
    }
    let orders = client.data("orders");
    let not_json = std::collections::HashMap::from([((1, 2), 3)]);
    assert_eq!(orders.create(&not_json).await.unwrap_err().code(), "invalid");
    assert_eq!(orders.list(None, 1001).await.unwrap_err().code(), "invalid");
    // A key is known to the tenant it was made for.
    let write = orders.prepare_create(json!({})).unwrap();
    let other = client.clone().tenant(hapax::Tenant::new("acme").unwrap()).unwrap();
    let error = other.send(&write).await.unwrap_err();
    assert!(error.to_string().contains("prepared for no tenant"), "{error}");
    assert_eq!(service.front.asked().len(), 0);
}

#[derive(serde::Deserialize, PartialEq, Debug)]
struct Order {
    number: u32,
}

/// Conflicts with both numbers, reused keys with the fields that differ, records in pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_are_written_read_and_listed() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let orders = client.data("orders");
    let mut ids = Vec::new();
    for number in 0..7 {
        ids.push(orders.create(json!({ "number": number })).await.unwrap().record.id);
    }
    let id = Uuid::now_v7();
    assert_eq!(orders.create_as(id, json!({"number": 7})).await.unwrap().record.id, id);
    ids.push(id);
    ids.sort();
    let (mut records, mut listed) = (orders.records().page_max(3), Vec::new());
    while let Some(record) = records.next().await.unwrap() {
        listed.push(record.id);
    }
    assert_eq!(listed, ids);
    assert_eq!(orders.list(Some(ids[5]), 10).await.unwrap().records.len(), 2);

    assert_eq!(orders.get(id).await.unwrap().payload_as::<Order>().unwrap(), Order { number: 7 });
    assert!(orders.get(id).await.unwrap().payload_as::<Vec<u8>>().is_err());
    let error = orders.update(id, 5, json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { expected: Some(5), actual: Some(1), .. }), "{error}");
    assert!(matches!(orders.delete(Uuid::nil(), 1).await, Err(Error::NotFound(_))));

    let key = IdempotencyKey::new("form-17").unwrap();
    let prepare = |payload| orders.prepare_create(payload).unwrap().with_key(key.clone());
    let first = client.send(&prepare(json!({"a": 1}))).await.unwrap();
    let again = client.send(&prepare(json!({"a": 1}))).await.unwrap();
    assert_eq!((again.replayed, &again.record), (true, &first.record));
    let error = client.send(&prepare(json!({"a": 2}))).await.unwrap_err();
    let Error::KeyMismatch(problem) = &error else { panic!("{error}") };
    assert_eq!(problem.fields, ["/payload"], "{error}");
}

/// A hundred at once, of one prepared write: one row, and equal answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_senders_of_one_write_get_one_record() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let write = client.data("orders").prepare_create(json!({"amount": 7})).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let (client, write) = (client.clone(), write.clone());
        tasks.spawn(async move { client.send(&write).await.unwrap() });
    }
    let got = tasks.join_all().await;
    assert!(got.iter().all(|written| written.record == got[0].record));
    assert_eq!(got.iter().filter(|written| !written.replayed).count(), 1);
    assert_eq!(service.rows(), 1);
}

/// The server is killed between its commit and its answer, and started again: the client notices only a pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t194_a_server_killed_between_commit_and_answer_is_met_again() {
    const TEST: &str = "client::t194_a_server_killed_between_commit_and_answer_is_met_again";
    if let Some((_, place)) = role() {
        serve_for_ever(Path::new(&place)).await;
        return;
    }
    for (point, replayed) in [("keyed.commit.after", true), ("keyed.commit.before", false)] {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_str().unwrap();
        let mut dies = child(TEST, "server", place);
        let mut dies = dies.env(hapax::testing::crash::VARIABLE, format!("{point}:1")).spawn().unwrap();
        let client = client_of(forward(dir.path().join("port")).await, settings());
        let sending = tokio::spawn(async move { client.data("orders").create(json!({"amount": 7})).await });
        let status = dies.wait().await.unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{point}");
        let mut lives = child(TEST, "server", place).spawn().unwrap();
        let written = sending.await.unwrap().unwrap();
        assert_eq!(written.replayed, replayed, "{point}");
        assert_eq!(rows(&dir.path().join("shop.db")), 1, "{point}");
        lives.kill().await.unwrap();
    }
}

async fn serve_for_ever(dir: &Path) {
    let app = service::app(&dir.join("shop.db"), service::Front::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    std::fs::write(dir.join("port.new"), port.to_string()).unwrap();
    std::fs::rename(dir.join("port.new"), dir.join("port")).unwrap();
    axum::serve(listener, app).await.unwrap();
}

/// Listens on a port that stays, and forwards to the one that a file names.
async fn forward(port: std::path::PathBuf) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            let port = std::fs::read_to_string(&port).ok().and_then(|text| text.parse::<u16>().ok());
            tokio::spawn(async move {
                let Some(port) = port else { return };
                if let Ok(mut to) = tokio::net::TcpStream::connect(("127.0.0.1", port)).await {
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                }
            });
        }
    });
    address
}

/// Keys of prepared writes are UUIDv7, unique, and increasing for each thread.
#[test]
fn keys_of_prepared_writes_are_increasing() {
    let prepare = || {
        let orders = Client::new("http://127.0.0.1").unwrap().data("orders");
        (0..20_000).map(|_| orders.prepare_create(()).unwrap().key().clone()).collect::<Vec<_>>()
    };
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(prepare)).collect();
    let mut all = std::collections::HashSet::new();
    for keys in threads.into_iter().map(|thread| thread.join().unwrap()) {
        assert!(keys.is_sorted_by(|a, b| a < b && a.time() <= b.time() && a.time().is_some()));
        all.extend(keys);
    }
    assert_eq!(all.len(), 80_000);
}
