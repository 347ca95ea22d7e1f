//! The Rust client against the real server: answers that get lost, and a server that is killed.

#![allow(missing_docs, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax::Event;
use hapax::client::{
    Claim, ClaimOutcome, ClaimRequest, Client, ClientSettings, Error, Placing, PreparedWrite,
};
use hapax::journal::Expected;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::common::run;
use crate::common::serve::{PATIENCE, Server};

/// Forwards to a server that may come back at another port, and loses an answer if it is asked to: the server has
/// done the work by then.
#[derive(Clone)]
struct Way {
    to: Arc<Mutex<String>>,
    lose: Arc<AtomicBool>,
    /// With the lost answer the way is closed.
    close: Arc<AtomicBool>,
    lost: Arc<AtomicUsize>,
    here: SocketAddr,
}

impl Way {
    async fn to(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = listener.local_addr().unwrap();
        let to = Arc::new(Mutex::new(server.address.clone()));
        let way = Way { to, lose: Arc::default(), close: Arc::default(), lost: Arc::default(), here };
        let accepting = way.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let way = accepting.clone();
                tokio::spawn(async move { way.carry(client).await });
            }
        });
        way
    }

    async fn carry(&self, mut client: TcpStream) {
        let to = self.to.lock().unwrap().clone();
        let Ok(mut server) = TcpStream::connect(to).await else { return };
        let (mut request, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
        loop {
            tokio::select! {
                read = client.read(&mut request) => match read {
                    Ok(bytes @ 1..) if server.write_all(&request[..bytes]).await.is_ok() => {}
                    _ => return,
                },
                read = server.read(&mut answer) => match read {
                    Ok(1..) if self.lose.swap(false, Ordering::SeqCst) => {
                        if self.close.swap(false, Ordering::SeqCst) {
                            "127.0.0.1:1".clone_into(&mut self.to.lock().unwrap());
                        }
                        self.lost.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                    Ok(bytes @ 1..) if client.write_all(&answer[..bytes]).await.is_ok() => {}
                    _ => return,
                },
            }
        }
    }

    /// The next answer gets lost.
    fn lose(&self) {
        self.lose.store(true, Ordering::SeqCst);
    }

    fn lost(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t195_the_client_and_the_real_server_write_once() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let (client, way, server) = writes_once("orders", || Server::start(dir.path(), &[])).await;
    claims_and_appends(&client, &way).await;
    a_dead_letter_has_its_content(&client, &server).await;
    t283_an_at_most_once_run_can_fail_whatever_it_was_claimed_with(&client, &server).await;
    t285_a_claim_without_an_answer_is_asked_for_again(&way).await;
    t286_a_claim_knows_its_end_by_the_callers_clock(&client).await;
    t287_no_reason_keeps_a_run_from_being_settled(&client, &server).await;
}

/// Journal, keys and records are in PostgreSQL, and the server has no right but those of the app.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[cfg(feature = "postgres")]
async fn t195_the_client_and_the_real_server_write_once_on_postgres() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    // It waits for its own connections.
    let made = tokio::task::spawn_blocking(move || crate::common::roles::Postgres::new(&path));
    let place = made.await.unwrap();
    let (client, way, _server) = writes_once(&place.slug, || place.start()).await;
    claims_and_appends(&client, &way).await;
}

/// Answers get lost and the server is killed; each write takes effect once.
async fn writes_once(slug: &str, start: impl Fn() -> Server) -> (Client, Way, Server) {
    let mut server = start();
    let way = Way::to(&server).await;
    let mut settings = ClientSettings::default();
    settings.deadline = PATIENCE;
    settings.backoff_base = Duration::from_millis(10);
    let client = Client::with_settings(&format!("http://{}", way.here), settings).unwrap();
    assert_eq!(client.info().await.unwrap().key_retention_s, 30 * 86_400);

    let orders = client.data(slug);
    let created = orders.create(json!({"amount": 7})).await.unwrap();
    assert_eq!((created.replayed, created.record.seq), (false, 1));
    let id = created.record.id;
    assert_eq!(orders.get(id).await.unwrap(), created.record);
    way.lose();
    let updated = orders.update(id, 1, json!({"amount": 8})).await.unwrap();
    assert_eq!((updated.replayed, updated.record.seq), (true, 2));
    let error = orders.update(id, 1, json!({"amount": 9})).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { expected: Some(1), actual: Some(2), .. }), "{error}");
    let error = client.data("invoices").create(json!({})).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error}");

    // The answer is lost, and the server dies before the client can ask again.
    let write = orders.prepare_create(json!({"amount": 1.50})).unwrap();
    let stored = serde_json::to_string(&write).unwrap();
    way.close.store(true, Ordering::SeqCst);
    way.lose();
    let sending = tokio::spawn({
        let (client, write) = (client.clone(), write.clone());
        async move { client.send(&write).await }
    });
    // Until the server has done it.
    let done = async {
        while way.lost() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, done).await.unwrap();
    server.signal("-KILL");
    server.ended();
    let server = start();
    way.to.lock().unwrap().clone_from(&server.address);
    let written = sending.await.unwrap().unwrap();
    assert!(written.replayed, "{written:?}");
    // The next process of the client sends what was stored.
    let again: PreparedWrite = serde_json::from_str(&stored).unwrap();
    assert_eq!(client.send(&again).await.unwrap().record, written.record);
    let deleted = orders.delete(id, 2).await.unwrap();
    assert_eq!(deleted.record.seq, 3);
    let page = orders.list(None, 10).await.unwrap();
    assert_eq!(page.records.iter().map(|record| record.id).collect::<Vec<_>>(), [written.record.id]);
    let events = server.get("/v1/journal/events?limit=100").is(200);
    let kinds: Vec<_> = events["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["record.created", "record.updated", "record.created", "record.deleted"], "{events}");
    (client, way, server)
}

/// What the client says with a failure is there to be looked at, and to be run again.
async fn a_dead_letter_has_its_content(client: &Client, server: &Server) {
    let payload = RawValue::from_string(r#"{"amount": 12345678901234567890.12}"#.to_owned()).unwrap();
    for id in ["of-the-request", "of-the-claim"] {
        let mut request = ClaimRequest::new("mailer", id).unwrap();
        if id == "of-the-request" {
            request = request.payload(&payload).unwrap();
        }
        let claim = claimed(client.claim(request).await.unwrap());
        let claim = if id == "of-the-claim" { claim.with_payload(&payload).unwrap() } else { claim };
        claim.dead("no such order").await.unwrap();
        let dead = server.get(&format!("/v1/dead?payload=true&id={id}")).is(200);
        assert_eq!(dead["entries"][0]["payload"], payload.get(), "{dead}");
    }
}

fn claimed(outcome: ClaimOutcome) -> Claim {
    let ClaimOutcome::Claimed(claim) = outcome else { panic!("{outcome:?}") };
    *claim
}

/// The server keeps no content of what never runs again, and refuses a failure that has some.
async fn t283_an_at_most_once_run_can_fail_whatever_it_was_claimed_with(client: &Client, server: &Server) {
    for id in ["lost-by-fail", "lost-by-dead"] {
        let request =
            ClaimRequest::new("mailer", id).unwrap().at_most_once().payload(json!({"n": 1})).unwrap();
        let claim = claimed(client.claim(request).await.unwrap());
        match id {
            "lost-by-fail" => claim.fail("no such order").await.unwrap(),
            _ => claim.with_payload(json!({"n": 2})).unwrap().dead("no such order").await.unwrap(),
        }
        let lost = server.get(&format!("/v1/lost?id={id}")).is(200);
        assert_eq!(lost["entries"][0]["reason"], "no such order", "{lost}");
    }
}

/// The answer is lost, and the caller gives up; later it asks with the same request.
async fn t285_a_claim_without_an_answer_is_asked_for_again(way: &Way) {
    let mut settings = ClientSettings::default();
    settings.deadline = PATIENCE;
    (settings.backoff_base, settings.backoff_max) = (Duration::from_hours(9999), Duration::from_hours(9999));
    let hasty = Client::with_settings(&format!("http://{}", way.here), settings).unwrap();
    way.lose();
    let failed = hasty.claim(ClaimRequest::new("mailer", "asked-twice").unwrap()).await.unwrap_err();
    assert!(failed.error().in_doubt(), "{failed}");
    let other = hasty.claim(ClaimRequest::new("mailer", "asked-twice").unwrap()).await.unwrap();
    assert!(matches!(other, ClaimOutcome::Busy { .. }), "the lost answer was a claim");
    let claim = claimed(hasty.claim(failed.into_request()).await.unwrap());
    assert_eq!(claim.attempt, 1, "its own run");
    claim.done().await.unwrap();
}

/// `until` is by the ledger's clock, which may be years away from this machine's.
async fn t286_a_claim_knows_its_end_by_the_callers_clock(client: &Client) {
    let lease = Duration::from_secs(600);
    let before = Instant::now();
    let request = ClaimRequest::new("mailer", "with-a-deadline").unwrap().lease(lease);
    let claim = claimed(client.claim(request).await.unwrap());
    let deadline = claim.deadline.unwrap();
    assert!(deadline >= before + lease && deadline <= Instant::now() + lease);
    let before = Instant::now();
    let extended = claim.extend(lease * 2).await.unwrap();
    assert!(extended.deadline >= before + lease * 2 && extended.deadline <= Instant::now() + lease * 2);
    claim.done().await.unwrap();
    let untracked = ClaimRequest::new("mailer", "without-a-lease").unwrap().at_most_once();
    assert_eq!(claimed(client.claim(untracked).await.unwrap()).deadline, None);
}

/// A reason is for people: what is wrong with it must not leave the event leased.
async fn t287_no_reason_keeps_a_run_from_being_settled(client: &Client, server: &Server) {
    let long = "é".repeat(1 << 20);
    for (id, reason, kept) in [
        ("long", long.as_str(), &*"é".repeat(2048)),
        ("blank", " \n", "no reason given"),
        ("none", "", "no reason given"),
    ] {
        let request = ClaimRequest::new("mailer", id).unwrap().payload(json!({"n": 1})).unwrap();
        let claim = claimed(client.claim(request).await.unwrap());
        claim.dead(reason).await.unwrap();
        let dead = server.get(&format!("/v1/dead?payload=true&id={id}")).is(200);
        assert_eq!(dead["entries"][0]["reason"], kept, "{id}");
        assert_eq!(dead["entries"][0]["payload"], r#"{"n":1}"#, "{id}");
    }
}

/// Twenty records of the largest size are more than one answer may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t207_the_client_reads_all_records_however_large_they_are() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let mut settings = ClientSettings::default();
    settings.deadline = PATIENCE;
    settings.attempt_timeout = PATIENCE;
    let client = Client::with_settings(&format!("http://{}", server.address), settings).unwrap();
    let (orders, large) = (client.data("orders"), "x".repeat(880_000));
    let mut made = Vec::new();
    for n in 0..20 {
        made.push(orders.create(json!({"n": n, "x": large})).await.unwrap().record.id);
    }
    made.sort();
    let (mut records, mut seen) = (orders.records().page_max(1000), Vec::new());
    while let Some(record) = records.next().await.unwrap() {
        seen.push(record.id);
    }
    assert_eq!(seen, made);
    let page = orders.list(None, 1000).await.unwrap();
    assert!(page.records.len() < 20 && page.next.is_some());
}

async fn claims_and_appends(client: &Client, way: &Way) {
    let of = |id: &str| ClaimRequest::new("mailer", id).unwrap();
    way.lose();
    let request = of("order-17-paid").lease(Duration::from_secs(600));
    let claim = claimed(client.claim(request).await.unwrap()); // the second attempt gets the run of the first
    assert_eq!(claim.attempt, 1);
    let other = client.claim(of("order-17-paid")).await.unwrap();
    assert!(matches!(other, ClaimOutcome::Busy { until: Some(_) }));
    assert!(claim.extend(Duration::from_secs(700)).await.unwrap().until > claim.until);
    way.lose();
    claim.done().await.unwrap();
    assert!(matches!(client.claim(of("order-17-paid")).await.unwrap(), ClaimOutcome::Duplicate));

    let late = claimed(client.claim(of("order-18-paid")).await.unwrap());
    late.release().await.unwrap();
    let next = claimed(client.claim(of("order-18-paid")).await.unwrap()); // it was given back
    let fenced = late.done().await.unwrap_err();
    assert!(matches!(fenced, Error::Fenced(_)) && !fenced.in_doubt(), "{fenced}");
    next.dead("no such order").await.unwrap();
    assert!(matches!(client.claim(of("order-18-paid")).await.unwrap(), ClaimOutcome::Dead));

    let paid = Event::of("order-19-paid").unwrap().payload(r#"{"amount": 7}"#);
    let raw = Event::of("order-19-raw").unwrap().payload(&b"\xff\x00"[..]);
    way.lose();
    let appended = client.append("order-19", Expected::New, &[paid.clone(), raw]).await.unwrap();
    assert_eq!((appended.last_seq, appended.events[0].placing), (2, Placing::Repeat), "{appended:?}");
    let error = client.append("order-19", Expected::Exact(7), &[Event::of("x").unwrap()]).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { expected: Some(7), actual: Some(2), .. }), "{error}");
    let error = client.append("order-19", Expected::Any, &[paid.payload("{}")]).await.unwrap_err();
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
}
