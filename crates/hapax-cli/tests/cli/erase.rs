//! `hapax erase`: what was erased is in no file any more, and nothing brings it back.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::consume::{QUICK, Sample};
use crate::common::serve::{Answer, Server, request};
use crate::common::{Ran, hapax, run, run_with};

pub const ALICE: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
pub const BOB: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000b";
/// What only the payloads of each say.
pub const OF_ALICE: &str = "alice@wonderland.example";
pub const OF_BOB: &str = "bob@builder.example";

pub fn send(server: &Server, method: &str, path: &str, tenant: &str, key: &str, body: &Value) -> Answer {
    let headers = [("content-type", "application/json"), ("idempotency-key", key), ("hapax-tenant", tenant)];
    request(&server.address, method, path, &headers, body.to_string().as_bytes())
}

/// A record with a secret; its id.
pub fn create(server: &Server, module: &str, tenant: &str, key: &str, secret: &str) -> String {
    let path = format!("/v1/modules/{module}/records");
    let answer = send(server, "POST", &path, tenant, key, &json!({"payload": {"mail": secret, "n": 1}}));
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.json()["id"].as_str().unwrap().to_owned()
}

fn erase(dir: &Path, args: &[&str]) -> Ran {
    run(dir, &[&["erase", "--data", "d", "--wait", "60s"], args].concat())
}

/// The files below a directory that have these bytes.
fn with_bytes(dir: &Path, bytes: &str) -> Vec<String> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        let content = std::fs::read(&path).unwrap();
        if content.windows(bytes.len()).any(|window| window == bytes.as_bytes()) {
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found
}

pub fn place(report: &Value, name: &str) -> u64 {
    let places = report["places"].as_array().unwrap();
    let of = places.iter().find(|place| place["place"] == name);
    of.unwrap_or_else(|| panic!("no {name}: {report}"))["rows"].as_u64().unwrap()
}

/// Records of both, in every state; events of another kind; dead letters; answers. All of it is in the read model.
fn fill(dir: &Path) -> (Server, String) {
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d"]);
    let mut first = String::new();
    for (tenant, secret) in [(ALICE, OF_ALICE), (BOB, OF_BOB)] {
        let ids: Vec<String> =
            (0..4).map(|n| create(&server, "orders", tenant, &format!("{tenant}-{n}"), secret)).collect();
        let update = json!({"payload": {"mail": secret, "n": 2}, "expected_seq": 1});
        let path = format!("/v1/modules/orders/records/{}", ids[0]);
        assert_eq!(send(&server, "PUT", &path, tenant, &format!("{tenant}-u"), &update).status, 200);
        // A plain deletion leaves the content in the journal, and in the answer.
        let path = format!("/v1/modules/orders/records/{}?expected_seq=1", ids[1]);
        let gone = send(&server, "DELETE", &path, tenant, &format!("{tenant}-d"), &json!(null));
        assert!([200, 204].contains(&gone.status), "{gone:?}");
        if tenant == ALICE {
            first.clone_from(&ids[0]);
        }
        let event = format!("{{\"event_id\":\"mail-{secret}\",\"of\":\"{tenant}\",\"do\":\"{secret}\"}}\n");
        let event = event.replace(&format!("mail-{secret}"), &format!("mail-{tenant}"));
        let append = ["journal", "append", "--data", "d", "--tenant", tenant, "--aggregate", "mails", "-"];
        run_with(dir, &append, event.as_bytes()).code(0);
    }
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    // Everything is dead, with its bytes and a reason that quotes it.
    let command =
        Sample::Python.handler(dir, "raise Fatal('cannot send ' + str(request['event']['payload']))");
    let consume =
        ["consume", "--data", "d", "--topic", "events", "--scope", "mailer", "--exec", &command, "--json"];
    run(dir, &[&consume[..], &QUICK, &["--until-idle", "2"]].concat()).code(0);
    (server, first)
}

fn dead(dir: &Path, tenant: &str) -> usize {
    let listed = run(dir, &["dead", "ls", "--data", "d", "--tenant", tenant, "--json"]).code(0).json();
    listed["entries"].as_array().unwrap().len()
}

/// A tenant, while the server runs: no file has a byte of it, the other tenant is as it was, and publishing everything
/// again brings nothing back.
#[test]
fn t336_what_was_erased_is_in_no_file_and_a_replay_does_not_bring_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (mut server, first) = fill(dir);
    let d = dir.join("d");
    assert!(with_bytes(&d, OF_ALICE).len() >= 4, "{:?}", with_bytes(&d, OF_ALICE));
    assert_eq!((dead(dir, ALICE), dead(dir, BOB)), (7, 7));
    let counted = erase(dir, &["--tenant", ALICE, "--dry-run", "--json"]).code(0).json();
    assert_eq!(
        counted,
        erase(dir, &["--tenant", ALICE, "--dry-run", "--json"]).code(0).json(),
        "it changes nothing"
    );
    for (name, rows) in
        [("records", 3), ("journal events", 6), ("answers of keys", 6), ("held events", 7), ("read model", 3)]
    {
        assert_eq!(place(&counted, name), rows, "{name}: {counted}");
    }
    assert_eq!(
        place(&counted, "bus records"),
        12,
        "as many again are on the topic of dead letters: {counted}"
    );
    let path = format!("/v1/modules/orders/records/{first}");
    assert_eq!(send(&server, "GET", &path, ALICE, "g", &json!(null)).status, 200);

    let report =
        erase(dir, &["--tenant", ALICE, "--yes", "--json", "--by", "dpo", "--reason", "request 4711"])
            .code(0)
            .json();
    assert_eq!(report["state"], "gone", "{report}");
    assert_eq!(place(&report, "records"), 3, "{report}");
    assert!(report["left"].as_array().unwrap().iter().all(|left| left["rows"] == 0), "{report}");
    assert_eq!(with_bytes(&d, OF_ALICE), Vec::<String>::new());
    assert!(with_bytes(&d, OF_BOB).len() >= 4);
    assert_eq!((dead(dir, ALICE), dead(dir, BOB)), (0, 7));
    // The keys are still taken: a late retry runs nothing. The other tenant's are answered as before.
    let again = |tenant: &str, secret: &str| {
        let body = json!({"payload": {"mail": secret, "n": 1}});
        send(&server, "POST", "/v1/modules/orders/records", tenant, &format!("{tenant}-2"), &body)
    };
    again(ALICE, OF_ALICE).problem(410, "answer-erased");
    assert_eq!(again(BOB, OF_BOB).is(200)["payload"]["mail"], OF_BOB);
    assert_eq!(send(&server, "GET", &path, ALICE, "g", &json!(null)).status, 404);
    // An event that is appended again under its id is a repeat, whatever it says.
    let event = format!("{{\"event_id\":\"mail-{ALICE}\",\"do\":\"other\"}}\n");
    let append =
        ["journal", "append", "--data", "d", "--tenant", ALICE, "--aggregate", "mails", "--json", "-"];
    let stdout = run_with(dir, &append, event.as_bytes()).code(0).out;
    assert!(stdout.contains("\"repeat\""), "{stdout}");
    let audit = run(dir, &["audit", "ls", "--data", "d", "--json"]).code(0).out;
    for said in ["erase.begin", "erase.pass", "erase.gone", "dpo", "request 4711"] {
        assert!(audit.contains(said), "{said}: {audit}");
    }
    // Everything is published again, and read again.
    assert!(server.stop().is_some());
    run(dir, &["relay", "rewind", "--data", "d", "--to", "0", "--yes"]).code(0);
    let server = Server::start(dir, &["--data", "d"]);
    let verified =
        run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s", "--json"]).code(0).json();
    assert_eq!((&verified["records"], &verified["differences"]), (&json!(3), &json!(0)), "{verified}");
    let status = run(dir, &["query", "status", "--data", "d", "--json"]).code(0).json();
    assert_eq!(status["rejected"], json!([]), "an erased event of a record can be read: {status}");
    let report = erase(dir, &["--tenant", ALICE, "--yes", "--json"]).code(0).json();
    assert_eq!((&report["rows"], &report["state"]), (&json!(0), &json!("gone")), "{report}");
    drop(server);
    assert_eq!(with_bytes(&d, OF_ALICE), Vec::<String>::new());
}

/// One record goes; its neighbour of the same tenant stays, with its events and its answer.
#[test]
fn one_record_is_erased_and_its_neighbours_stay() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let mut server = Server::start(dir, &["--data", "d"]);
    let id = create(&server, "orders", ALICE, "one", OF_ALICE);
    let other = create(&server, "orders", ALICE, "two", OF_BOB);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    let of = ["--tenant", ALICE, "--module", "orders", "--record", &id];
    let counted = erase(dir, &[&of[..], &["--dry-run", "--json"]].concat()).code(0).json();
    for name in ["records", "journal events", "answers of keys", "bus records", "read model"] {
        assert_eq!(place(&counted, name), 1, "{name}: {counted}");
    }
    let ran = erase(dir, &[&of[..], &["--yes"]].concat()).code(0).out;
    assert!(ran.contains("physically gone") && ran.contains("backups"), "{ran}");
    let gone = send(&server, "GET", &format!("/v1/modules/orders/records/{id}"), ALICE, "g", &json!(null));
    assert_eq!(gone.status, 404);
    let there =
        send(&server, "GET", &format!("/v1/modules/orders/records/{other}"), ALICE, "g", &json!(null));
    assert_eq!(there.is(200)["payload"]["mail"], OF_BOB);
    let body = json!({"payload": {"mail": OF_BOB, "n": 1}});
    assert_eq!(
        send(&server, "POST", "/v1/modules/orders/records", ALICE, "two", &body).is(200)["id"],
        json!(other)
    );
    let events = run(
        dir,
        &[
            "journal",
            "read",
            "--data",
            "d",
            "--json",
            "--tenant",
            ALICE,
            "--aggregate",
            &format!("orders/{id}"),
        ],
    );
    let kinds: Vec<String> = events
        .code(0)
        .out
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["kind"].to_string())
        .collect();
    assert_eq!(kinds, ["\"record.created\"", "\"record.deleted\""], "the history has no gap");
    assert!(server.stop().is_some());
    assert_eq!(with_bytes(&dir.join("d"), OF_ALICE), Vec::<String>::new());
    assert!(!with_bytes(&dir.join("d"), OF_BOB).is_empty());
    // The id may be used again, and its versions go on.
    let server = Server::start(dir, &["--data", "d"]);
    let anew = json!({"payload": {"mail": "new"}, "id": id});
    assert_eq!(send(&server, "POST", "/v1/modules/orders/records", ALICE, "three", &anew).is(201)["seq"], 3);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
}

/// Killed again and again, each time a little later: the run that may end leaves nothing.
#[test]
fn a_run_that_was_killed_anywhere_is_run_again_and_ends_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let mut server = Server::start(dir, &["--data", "d"]);
    for n in 0..40 {
        create(&server, "orders", ALICE, &format!("a{n}"), OF_ALICE);
    }
    create(&server, "orders", BOB, "b", OF_BOB);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    assert!(server.stop().is_some());
    let (mut pause, mut killed) = (Duration::from_millis(20), 0);
    loop {
        let args = ["erase", "--data", "d", "--tenant", ALICE, "--yes"];
        let mut child = hapax(dir, &args).spawn().unwrap();
        let began = std::time::Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if began.elapsed() >= pause => break None,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if let Some(status) = ended {
            assert_eq!(status.code(), Some(0));
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
        pause = pause * 5 / 4 + Duration::from_millis(5);
    }
    assert!(killed > 2, "it was killed {killed} times");
    let report = erase(dir, &["--tenant", ALICE, "--yes", "--json"]).code(0).json();
    assert_eq!((&report["rows"], &report["state"]), (&json!(0), &json!("gone")), "{report}");
    assert_eq!(with_bytes(&dir.join("d"), OF_ALICE), Vec::<String>::new());
    let server = Server::start(dir, &["--data", "d"]);
    let verified =
        run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s", "--json"]).code(0).json();
    assert_eq!((&verified["records"], &verified["differences"]), (&json!(1), &json!(0)), "{verified}");
    drop(server);
}

#[test]
fn mistakes_get_a_sentence_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let outcome = erase(dir, &["--tenant", ALICE, "--yes"]).code(4).err;
    assert!(outcome.contains("there is nothing of tenant"), "{outcome}");
    assert!(!dir.join("d").exists(), "looking makes nothing");
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d"]);
    let id = create(&server, "orders", ALICE, "one", OF_ALICE);
    let of_record = |tenant: &str, module: &str, id: &str| {
        erase(dir, &["--tenant", tenant, "--module", module, "--record", id, "--yes"])
    };
    for ran in [
        erase(dir, &["--tenant", BOB, "--yes"]),
        of_record(BOB, "orders", &id),
        of_record(ALICE, "invoices", &id),
        of_record(ALICE, "orders", BOB),
    ] {
        let stderr = ran.code(4).err;
        assert!(stderr.contains("there is nothing of") && stderr.contains("nothing was changed"), "{stderr}");
    }
    let stderr = of_record("acme", "orders", &id).code(4).err;
    assert!(stderr.contains("a record's tenant is a UUID"), "{stderr}");
    let stderr = of_record(ALICE, "orders", "00000000-0000-0000-0000-000000000000").code(4).err;
    assert!(stderr.contains("nil UUID"), "{stderr}");
    for bad in [
        &["--yes"][..],
        &["--tenant", ALICE, "--module", "orders", "--yes"],
        &["--tenant", ALICE, "--record", &id, "--yes"],
        &["--tenant", ALICE, "--module", "orders", "--record", "17", "--yes"],
        &["--tenant", ALICE],
        &["--tenant", ALICE, "--yes", "--by", " "],
    ] {
        erase(dir, bad).code(2);
    }
    let outcome = erase(dir, &["--tenant", ALICE, "--yes", "--journal", "dir:objects"]);
    assert!(outcome.code.is_some_and(|code| code > 0), "{}", outcome.out);
    std::fs::create_dir_all(dir.join("objects")).unwrap();
    let outcome = erase(dir, &["--tenant", ALICE, "--yes", "--journal", "dir:objects"]).code(2).err;
    assert!(
        outcome.contains("object store cannot erase") && outcome.contains("--skip-unsupported"),
        "{outcome}"
    );
    assert_eq!(
        send(&server, "GET", &format!("/v1/modules/orders/records/{id}"), ALICE, "g", &json!(null)).status,
        200
    );
    let audit = run(dir, &["audit", "ls", "--data", "d", "--json"]).out;
    assert!(!audit.contains("erase."), "{audit}");
}
