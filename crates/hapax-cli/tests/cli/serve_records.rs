//! Records over HTTP, on the embedded default and on PostgreSQL with roles of their own.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use serde_json::{Value, json};

#[cfg(feature = "postgres")]
use crate::common::roles::{Connection, Postgres};
use crate::common::run;
use crate::common::serve::{Answer, Server, request};

const A: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
const B: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000b";

/// A client of one tenant.
struct Client<'s> {
    server: &'s Server,
    slug: String,
    tenant: Option<&'s str>,
}

impl Client<'_> {
    fn send(&self, method: &str, rest: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let path = format!("/v1/modules/{}/records{rest}", self.slug);
        let mut all = vec![("content-type", "application/json")];
        all.extend(self.tenant.map(|tenant| ("hapax-tenant", tenant)));
        all.extend(headers);
        request(&self.server.address, method, &path, &all, body.as_bytes())
    }

    fn post(&self, key: &str, body: &Value) -> Answer {
        self.send("POST", "", &[("idempotency-key", key)], &body.to_string())
    }

    fn put(&self, key: &str, id: &str, body: &Value) -> Answer {
        self.send("PUT", &format!("/{id}"), &[("idempotency-key", key)], &body.to_string())
    }

    fn delete(&self, key: &str, id: &str, seq: u64) -> Answer {
        self.send("DELETE", &format!("/{id}?expected_seq={seq}"), &[("idempotency-key", key)], "")
    }

    fn get(&self, rest: &str) -> Answer {
        self.send("GET", rest, &[], "")
    }
}

/// Another serialiser: white space, escapes, the order of fields.
fn t282_a_record_in_other_bytes_is_the_same_record(client: &Client<'_>, first: &Answer) {
    for body in [r#"{ "payload" : { "n" : 1 } }"#, r#"{"payload":{"\u006e":1}}"#] {
        let again = client.send("POST", "", &[("idempotency-key", "k1")], body);
        assert_eq!((again.status, &again.body), (200, &first.body), "{body}");
    }
    let other = client.send("POST", "", &[("idempotency-key", "k1")], r#"{"payload":{"n":1.0}}"#);
    other.problem(422, "key-mismatch");
    assert_eq!(other.json()["fields"], json!(["/payload"]));
}

/// The life of a record, and every retry of it.
fn life(client: &Client<'_>) {
    let first = client.post("k1", &json!({"payload": {"n": 1}}));
    let record = first.is(201);
    let id = record["id"].as_str().unwrap().to_owned();
    assert_eq!(
        (&record["seq"], &record["module"], &record["payload"]),
        (&json!(1), &json!(client.slug), &json!({"n": 1}))
    );
    assert_eq!(first.header("etag"), Some("\"1\""));
    assert_eq!(first.header("location").unwrap(), format!("/v1/modules/{}/records/{id}", client.slug));
    assert!(first.header("idempotency-key-retention").is_some());
    let again = client.post("k1", &json!({"payload": {"n": 1}}));
    assert_eq!((again.status, &again.body), (200, &first.body), "the original");
    assert_eq!((again.header("idempotency-replayed"), again.header("etag")), (Some("true"), Some("\"1\"")));
    client.post("k1", &json!({"payload": {"n": 2}})).problem(422, "key-mismatch");
    t282_a_record_in_other_bytes_is_the_same_record(client, &first);
    assert_eq!(client.get(&format!("/{id}")).is(200), record);

    let updated = client.put("k2", &id, &json!({"payload": {"n": 2}, "expected_seq": 1}));
    assert_eq!((updated.is(200)["seq"].as_u64(), updated.header("etag")), (Some(2), Some("\"2\"")));
    let again = client.put("k2", &id, &json!({"payload": {"n": 2}, "expected_seq": 1}));
    assert_eq!((again.status, &again.body), (200, &updated.body), "the key is checked before the seq");
    let stale = client.put("k3", &id, &json!({"payload": {"n": 3}, "expected_seq": 1}));
    stale.problem(409, "conflict");
    assert_eq!((stale.json()["expected"].as_u64(), stale.json()["actual"].as_u64()), (Some(1), Some(2)));
    let on = |key: &str, etag: &str, body: &str| {
        client.send("PUT", &format!("/{id}"), &[("idempotency-key", key), ("if-match", etag)], body)
    };
    let mended = on("k3", "\"2\"", r#"{"payload":{"n":3},"expected_seq":2}"#);
    assert_eq!(mended.is(200)["seq"], 3, "a conflict is not kept: the key is free");
    assert_eq!(on("k4", "\"3\"", r#"{"payload":{"n":3}}"#).is(200)["seq"], 4);

    let gone = client.delete("k5", &id, 4);
    assert_eq!((gone.is(200)["seq"].as_u64(), &gone.json()["payload"]), (Some(5), &json!({"n": 3})));
    let again = client.delete("k5", &id, 4);
    assert_eq!((again.status, &again.body), (200, &gone.body));
    client.get(&format!("/{id}")).problem(404, "not-found");
    client.delete("k6", &id, 5).problem(404, "not-found");
    let first_again = client.post("k1", &json!({"payload": {"n": 1}}));
    assert_eq!((first_again.status, &first_again.body), (200, &first.body), "after a delete too");
    let back = client.post("k7", &json!({"payload": {"n": 9}, "id": id}));
    assert_eq!(back.is(201)["seq"], 6, "a deleted id goes on");
    client.post("k8", &json!({"payload": {}, "id": id})).problem(409, "conflict");
    client.delete("k9", &id, 6).is(200);
}

/// Pages of a list.
fn pages(client: &Client<'_>) {
    let ids: Vec<String> = (0..5)
        .map(|n| {
            client.post(&format!("p{n}"), &json!({"payload": {"n": n}})).is(201)["id"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = client.get(&format!("?limit=2{after}")).is(200);
        seen.extend(page["records"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ids, "ids grow with the time of creation, so that a list is in that order");
    for id in ids {
        assert_eq!(hapax::records::Uuid::try_parse(&id).unwrap().get_version_num(), 7, "{id}");
    }
}

/// Bad input: a sentence, and nothing is changed.
fn bad_input(client: &Client<'_>) {
    let id = A; // any UUID
    client.send("POST", "", &[], r#"{"payload":{}}"#).problem(400, "key-missing");
    client.send("POST", "", &[("idempotency-key", "a b")], r#"{"payload":{}}"#).problem(400, "key-invalid");
    client
        .send("PUT", &format!("/{id}"), &[("idempotency-key", "b0")], r#"{"payload":{}}"#)
        .problem(428, "precondition-required");
    client
        .send("DELETE", &format!("/{id}"), &[("idempotency-key", "b1")], "")
        .problem(428, "precondition-required");
    let deep = format!(r#"{{"payload":{}1{}}}"#, r#"{"a":"#.repeat(128), "}".repeat(128));
    let long = format!(r#"{{"payload":{{"a":{}}}}}"#, "1".repeat(65));
    for (n, (headers, rest, body, says)) in [
        (None, "", &*deep, "it nests 128 levels deep; the limit is 127"),
        (None, "", &*long, "a number has 65 characters; the limit is 64"),
        (None, "", r#"{"payload":{"a":1e999}}"#, "the number 1e999 is beyond what a double holds"),
        (None, "", r#"{"payload":[]}"#, "not a JSON object"),
        (None, "", r#"{"payload":{"a":1,"a":2}}"#, "twice"),
        (None, "", r#"{"payload":{"a":"\u0000"}}"#, "U+0000"),
        (None, "", r#"{"payload":{},"id":"17"}"#, "UUID"),
        (None, "", r#"{"payload":{},"id":"00000000-0000-0000-0000-000000000000"}"#, "nil"),
        (None, "/17", r#"{"payload":{},"expected_seq":1}"#, "UUID"),
        (Some(("if-match", "*")), "/ID", r#"{"payload":{}}"#, "ETag"),
        (Some(("if-match", "W/\"1\"")), "/ID", r#"{"payload":{}}"#, "ETag"),
        (Some(("if-match", "\"1\"")), "/ID", r#"{"payload":{},"expected_seq":2}"#, "If-Match says 1"),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("bad{n}");
        let headers: Vec<_> = [("idempotency-key", key.as_str())].into_iter().chain(headers).collect();
        let method = if rest.is_empty() { "POST" } else { "PUT" };
        let detail = client.send(method, &rest.replace("ID", id), &headers, body).problem(400, "invalid");
        assert!(detail.contains(says), "{body}: {detail}");
    }
    for body in [r#"{"payload":{},"more":1}"#, "{", r#"{"id":null}"#] {
        client
            .send("POST", "", &[("idempotency-key", &format!("j{}", body.len()))], body)
            .problem(400, "json-invalid");
    }
    for rest in ["?limit=0", "?limit=1001", "?after=17", "?limit=x", "/17"] {
        client.get(rest).problem(400, "invalid");
    }
    client.get(&format!("/{id}")).problem(404, "not-found");
    for (slug, status, code) in
        [("nowhere", 404, "not-found"), ("No-Where", 400, "invalid"), ("%3Bdrop", 400, "invalid")]
    {
        let other = Client { server: client.server, slug: slug.to_owned(), tenant: client.tenant };
        other.post(&format!("s-{slug}").replace('%', "_"), &json!({"payload": {}})).problem(status, code);
        other.get("").problem(status, code);
        other.get(&format!("/{id}")).problem(status, code);
    }
    for tenant in ["acme", "0190D3A0-5B7E-7C3A-9F51-00000000000A", "00000000-0000-0000-0000-000000000000"] {
        let other = Client { server: client.server, slug: client.slug.clone(), tenant: Some(tenant) };
        assert!(other.post("t", &json!({"payload": {}})).problem(400, "invalid").contains("UUID"));
        other.get("").problem(400, "invalid");
    }
    assert_eq!(client.get("").is(200)["records"], json!([]), "nothing was changed");
}

/// Every way of one tenant to the data of another.
fn tenants(server: &Server, slug: &str) {
    let of = |tenant| Client { server, slug: slug.to_owned(), tenant };
    let (a, b, nobody) = (of(Some(A)), of(Some(B)), of(None));
    let secret = a.post("shared-key", &json!({"payload": {"x": "secret-of-a"}}));
    let id = secret.is(201)["id"].as_str().unwrap().to_owned();
    let clean = |answer: Answer| {
        assert!(!answer.body.contains("secret-of-a"), "{answer:?}");
        assert!(answer.headers.iter().all(|(_, value)| !value.contains("secret-of-a")));
        answer
    };
    for other in [&b, &nobody] {
        // The same key and body: a request of its own, not the other's answer.
        let own = clean(other.post("shared-key", &json!({"payload": {"x": "mine"}})));
        assert_eq!((own.status, own.header("idempotency-replayed")), (201, None));
        clean(other.get(&format!("/{id}"))).problem(404, "not-found");
        clean(other.put("u", &id, &json!({"payload": {}, "expected_seq": 1}))).problem(404, "not-found");
        clean(other.delete("d", &id, 1)).problem(404, "not-found");
        let list = clean(other.get("")).is(200);
        assert_eq!(list["records"].as_array().unwrap().len(), 1);
        // The id is free for the other: no conflict tells that it is used.
        let same = clean(other.post("same-id", &json!({"payload": {"x": "mine"}, "id": id})));
        assert_eq!(same.is(201)["seq"], 1);
        clean(other.get(&format!("?after={}", "00000000-0000-0000-0000-000000000001"))).is(200);
    }
    let twice = request(
        &server.address,
        "GET",
        &format!("/v1/modules/{slug}/records"),
        &[("hapax-tenant", B), ("hapax-tenant", A)],
        b"",
    );
    clean(twice).problem(400, "invalid");
    assert_eq!(a.get(&format!("/{id}")).is(200)["payload"], json!({"x": "secret-of-a"}));
}

/// A hundred posts with one key from many connections; then the server is killed, and the key still answers.
fn parallel(server: &Server, slug: &str) -> Answer {
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let post = || {
            let client = Client { server, slug: slug.to_owned(), tenant: Some(A) };
            loop {
                let answer = client.post("one-of-100", &json!({"payload": {"n": 100}}));
                if answer.status < 300 {
                    return answer;
                }
                assert!(matches!(answer.status, 408 | 409 | 503 | 504), "{answer:?}"); // each may be sent again
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        };
        let threads: Vec<_> = (0..100).map(|_| scope.spawn(post)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    assert!(answers.iter().all(|answer| answer.body == answers[0].body));
    answers[0].clone()
}

fn everything(start: impl Fn() -> Server, slug: &str) {
    let mut server = start();
    bad_input(&Client { server: &server, slug: slug.to_owned(), tenant: None });
    life(&Client {
        server: &server,
        slug: slug.to_owned(),
        tenant: Some("0190d3a0-5b7e-7c3a-9f51-0000000000cc"),
    });
    pages(&Client {
        server: &server,
        slug: slug.to_owned(),
        tenant: Some("0190d3a0-5b7e-7c3a-9f51-0000000000dd"),
    });
    tenants(&server, slug);
    let first = parallel(&server, slug);
    server.signal("-KILL");
    server.ended();
    let server = start();
    let client = Client { server: &server, slug: slug.to_owned(), tenant: Some(A) };
    let again = client.post("one-of-100", &json!({"payload": {"n": 100}}));
    assert_eq!((again.status, &again.body), (200, &first.body), "after a kill");
    let all = client.get("?limit=1000").is(200);
    let hundred = |r: &&Value| r["payload"]["n"] == 100;
    assert_eq!(all["records"].as_array().unwrap().iter().filter(hundred).count(), 1);
}

#[test]
fn t151_records_over_http_on_the_embedded_default() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    // What the journal does about a reused id never reaches keys: a reused key is 422 all the same.
    everything(|| Server::start(dir, &["--set", "journal.mismatch=warn"]), "orders");
    // Each write is in the journal, under the record's aggregate.
    let events = run(dir, &["--json", "journal", "read", "--limit", "1000"]).code(0).out;
    let kinds = |kind: &str| events.lines().filter(|line| line.contains(kind)).count();
    assert!(
        kinds("record.created") >= 9 && kinds("record.updated") == 3 && kinds("record.deleted") == 2,
        "{events}"
    );
}

/// A request that was refused before anything was done is mended and sent again with its key.
fn mended(server: &Server, slug: &str, create_module: impl Fn(&str)) {
    let client = Client { server, slug: slug.to_owned(), tenant: Some(B) };
    let sent = |key: &str, media: &str| {
        let path = format!("/v1/modules/{slug}/records");
        let headers = [("content-type", media), ("idempotency-key", key), ("hapax-tenant", B)];
        request(&server.address, "POST", &path, &headers, br#"{"payload":{"n":1}}"#)
    };
    sent("media", "text/plain").problem(415, "media-type");
    let record = sent("media", "application/json").is(201);
    let id = format!("/{}", record["id"].as_str().unwrap());
    assert_eq!(sent("media", "application/json").status, 200, "and from then on it is kept");
    let on = |key: &str, etag: &str| {
        client.send("PUT", &id, &[("idempotency-key", key), ("if-match", etag)], r#"{"payload":{"n":2}}"#)
    };
    on("etag", "1").problem(400, "invalid");
    assert_eq!(on("etag", "\"1\"").is(200)["seq"], 2);
    assert_eq!(on("etag", "\"1\"").header("idempotency-replayed"), Some("true"));
    // Another If-Match is another write.
    on("etag", "\"2\"").problem(422, "key-mismatch");
    assert_eq!(client.get(&id).is(200)["seq"], 2);
    // A module that is made later; a record that is not there is an answer.
    let late = Client { server, slug: format!("{slug}_late"), tenant: Some(B) };
    let missing = "/0190d3a0-5b7e-7c3a-9f51-0000000000ee";
    late.post("late", &json!({"payload": {}})).problem(404, "not-found");
    late.put("put", &missing[1..], &json!({"payload": {}, "expected_seq": 1})).problem(404, "not-found");
    create_module(&late.slug);
    assert_eq!(late.post("late", &json!({"payload": {}})).is(201)["seq"], 1);
    for replayed in [None, Some("true")] {
        let gone = late.put("put", &missing[1..], &json!({"payload": {}, "expected_seq": 1}));
        gone.problem(404, "not-found");
        assert_eq!(gone.header("idempotency-replayed"), replayed, "a missing record is an answer");
    }
}

#[test]
fn t212_a_refused_request_is_mended_with_the_same_key() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &[]);
    mended(&server, "orders", |slug| {
        run(dir, &["modules", "create", slug]).code(0);
    });
}

#[test]
#[cfg(feature = "postgres")]
fn t212_a_refused_request_is_mended_with_the_same_key_on_postgres() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    mended(&place.start(), &place.slug, |slug| place.create_module(slug));
}

/// A hundred posts with one key at two servers of one database: one record.
#[test]
#[cfg(feature = "postgres")]
fn t100_a_hundred_posts_at_two_servers_make_one_record() {
    let (dir, other_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut place = Postgres::new(dir.path());
    let one = place.start();
    place.dir = other_dir.path().to_owned();
    let two = place.start();
    let servers = [&one, &two];
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let post = |n: usize| {
            let client = Client { server: servers[n % 2], slug: place.slug.clone(), tenant: Some(A) };
            move || loop {
                let answer = client.post("one-of-100", &json!({"payload": {"n": 100}}));
                if answer.status < 300 {
                    return answer;
                }
                assert!(matches!(answer.status, 408 | 409 | 503 | 504), "{answer:?}"); // each may be sent again
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        };
        let threads: Vec<_> = (0..100).map(|n| scope.spawn(post(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    assert!(answers.iter().all(|answer| answer.body == answers[0].body));
    let client = Client { server: &two, slug: place.slug.clone(), tenant: Some(A) };
    assert_eq!(client.get("").is(200)["records"].as_array().unwrap().len(), 1);
}

#[test]
fn records_that_this_server_cannot_have_are_501() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &["--journal", "dir:events"]);
    let client = Client { server: &server, slug: "orders".to_owned(), tenant: None };
    assert!(client.get("").problem(501, "unsupported").contains("SQLite or PostgreSQL"));
    client.post("k", &json!({"payload": {}})).problem(501, "unsupported");
}

#[test]
#[cfg(feature = "postgres")]
fn t152_records_over_http_on_postgres_with_its_roles() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    everything(|| place.start(), &place.slug);
    // A superuser is refused, unless that is accepted by name.
    let admin = place.app_url.replace(&place.app, "postgres");
    let args = ["--listen", "127.0.0.1:0", "--journal", &admin, "--set", place.schema_flag()];
    let refused = crate::common::serve::refused(dir.path(), &args).code(3);
    assert!(refused.err.contains("bypasses row security"), "{}", refused.err);
    let server = Server::start(
        dir.path(),
        &["--journal", &admin, "--set", place.schema_flag(), "--set", "records.accept_bypass=true"],
    );
    let client = Client { server: &server, slug: place.slug.clone(), tenant: Some(B) };
    let seen = client.get("?limit=1000").is(200);
    assert!(!seen.to_string().contains("secret-of-a"), "{seen}");
    let warned = std::fs::read_to_string(dir.path().join("serve.err")).unwrap();
    assert!(warned.contains("bypasses row security"), "{warned}");
}

/// Whoever bypasses row security sees the keys of all tenants, and their records once there is a module.
#[test]
#[cfg(feature = "postgres")]
fn t203_a_superuser_is_refused_on_an_empty_database_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let url = std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env is set");
    let schema = format!("t_{}", run(dir, &["id", "make"]).code(0).out.trim().replace('-', "_"));
    let (journal, keys) = (format!("journal.schema={schema}"), format!("keys.url={url}"));
    let ledger = format!("ledger.schema={schema}");
    // Records and keys, with a ledger too; and keys alone, beside an embedded journal.
    for place in [
        &["--journal", &url, "--set", &journal][..],
        &["--ledger", &url, "--set", &ledger, "--journal", &url, "--set", &journal],
        &["--set", &keys, "--set", &journal],
    ] {
        let args = [&["--listen", "127.0.0.1:0"][..], place].concat();
        let refused = crate::common::serve::refused(dir, &args).code(3);
        assert!(refused.err.contains("bypasses row security"), "{}", refused.err);
    }
    let made = format!("select from pg_namespace where nspname = '{schema}'");
    assert_eq!(Connection::to(&url).rows(&made), 0, "nothing was made with that role");
}

#[test]
#[cfg(feature = "postgres")]
fn t204_a_broken_module_is_503_and_the_others_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    let broken = format!("{}_b", place.slug);
    let create = ["modules", "create", &broken, "--app-role", &place.app];
    run(dir.path(), &[&place.as_owner()[..], &create].concat()).code(0);
    let force = |word: &str| format!("alter table module_{broken}.records {word} row level security");
    place.owner_runs(&force("no force"));
    let server = place.start();
    let of = |slug: &str| Client { server: &server, slug: slug.to_owned(), tenant: Some(A) };
    let (bad, good) = (of(&broken), of(&place.slug));
    let id = good.post("k", &json!({"payload": {}})).is(201)["id"].as_str().unwrap().to_owned();
    for answer in [
        bad.get(""),
        bad.get(&format!("/{id}")),
        bad.post("k", &json!({"payload": {}})),
        bad.put("k", &id, &json!({"payload": {}, "expected_seq": 1})),
        bad.delete("k", &id, 1),
    ] {
        let problem = answer.problem(503, "unavailable");
        assert!(problem.contains(&format!("module {broken} is not served")), "{problem}");
    }
    good.get(&format!("/{id}")).is(200);
    place.owner_runs(&force("force"));
    bad.post("k2", &json!({"payload": {}})).is(201);
}

/// A forged event would change every read model, and not the record.
#[test]
fn t201_kinds_of_records_are_appended_by_records_only() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &[]);
    let client = Client { server: &server, slug: "orders".to_owned(), tenant: None };
    let id = client.post("k", &json!({"payload": {}})).is(201)["id"].as_str().unwrap().to_owned();
    let append_to = |aggregate: &str, event: &Value| {
        let events = json!([{"id": "ok", "kind": "order.paid"}, event]);
        server.post("/v1/journal/append", &json!({"aggregate": aggregate, "events": events}))
    };
    let append = |kind: &str| append_to("order-17", &json!({"id": "forged", "kind": kind}));
    // Without a kind, a consumer reads it in a header or in the payload.
    for (name, value) in [("ce_type", "record.deleted"), ("eventType", "record.x"), ("event_type", "record.")]
    {
        let event = json!({"id": "forged", "headers": [{"name": name, "value": value}]});
        append_to("order-17", &event).problem(400, "invalid");
    }
    let structured = json!([{"name": "Content-Type", "value": "application/cloudevents+json"}]);
    append_to(
        "order-17",
        &json!({"id": "forged", "payload": {"type": "record.deleted"}, "headers": structured}),
    )
    .problem(400, "invalid");
    for member in ["event_type", "eventType"] {
        append_to("order-17", &json!({"id": "forged", "payload": {member: "record.deleted"}}))
            .problem(400, "invalid");
        let line = format!(r#"{{"eventId":"forged","{member}":"record.deleted"}}"#);
        let args = ["journal", "append", "--aggregate", "order-17"];
        let refused = crate::common::run_with(dir, &args, line.as_bytes()).code(4);
        assert!(refused.err.contains("reserved"), "{}", refused.err);
    }
    // The aggregates of records are theirs, whatever the kind.
    let problem = append_to(&format!("orders/{id}"), &json!({"id": "forged", "kind": "order.paid"}))
        .problem(400, "invalid");
    assert!(problem.contains("aggregate of a record"), "{problem}");
    let args = ["journal", "append", "--aggregate-at", "/a"];
    let line = format!(r#"{{"eventId":"forged","a":"orders/{id}"}}"#);
    let refused = crate::common::run_with(dir, &args, line.as_bytes()).code(4);
    assert!(refused.err.contains("aggregate of a record"), "{}", refused.err);
    let free = json!([{"id": "no-module", "kind": "order.paid"}]);
    server
        .post("/v1/journal/append", &json!({"aggregate": format!("customers/{id}"), "events": free}))
        .is(200);
    for kind in ["record.created", "record.updated", "record.deleted", "record."] {
        let problem = append(kind).problem(400, "invalid");
        assert!(problem.contains(kind) && problem.contains("reserved"), "{problem}");
        let (aggregate, line) = ("order-17", format!(r#"{{"eventId":"forged","kind":"{kind}"}}"#));
        for of in [["--kind", kind], ["--kind-at", "/kind"]] {
            let args = [&["journal", "append", "--aggregate", aggregate][..], &of].concat();
            let refused = crate::common::run_with(dir, &args, line.as_bytes()).code(4);
            assert!(refused.err.contains("reserved"), "{}", refused.err);
        }
    }
    let events = server.get("/v1/journal/events?limit=100").is(200);
    assert_eq!(events["events"].as_array().unwrap().len(), 2, "{events}");
    append("recorded").is(200);
}
