//! `hapax keys`: what became of a client's key, and a decision where nobody knows.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use hapax::Tenant;
use hapax::keyed::{
    AfterFailure, Answer, Begin, Begun, Ended, IdempotencyKey, KeyLease, Keys, RequestFingerprint,
    RequestParts,
};

use crate::common::{Ran, run};

const FILE: [&str; 2] = ["--keys", "sqlite:keys.db"];

fn keys(dir: &Path, args: &[&str]) -> Ran {
    run(dir, &[&["keys"], args, &FILE].concat())
}

/// A store of keys, as a service has it open.
struct Service(tokio::runtime::Runtime, Arc<dyn Keys>);

impl Service {
    fn open(dir: &Path) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let url = format!("sqlite:{}", dir.join("keys.db").display());
        let keys = runtime.block_on(hapax::open::keys(&url)).unwrap();
        Service(runtime, keys)
    }

    fn request(&self, tenant: Option<&str>, key: &str, rule: AfterFailure) -> Begin {
        let parts = RequestParts { method: "POST", target: "/orders", body: b"{}", ..Default::default() };
        let tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        let fingerprint = RequestFingerprint::of(self.1.secret(), &parts);
        let mut begin = Begin::new(tenant, IdempotencyKey::new(key).unwrap(), fingerprint);
        begin.after_failure = rule;
        begin
    }

    fn first(&self, begin: &Begin) -> KeyLease {
        match self.0.block_on(self.1.begin(begin)).unwrap() {
            Begun::First(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    fn done(&self, tenant: Option<&str>, key: &str, body: &str) {
        let lease = self.first(&self.request(tenant, key, AfterFailure::Rerun));
        let answer = Answer::new(201, body.to_owned()).header("location", "/orders/17");
        self.0.block_on(self.1.finish(&lease, &answer)).unwrap();
    }

    /// A request that failed, and nobody knows what it did.
    fn held(&self, tenant: Option<&str>, key: &str) {
        let lease = self.first(&self.request(tenant, key, AfterFailure::Hold));
        self.0.block_on(self.1.release(&lease, Ended::Failed)).unwrap();
    }
}

fn names(ran: &Ran) -> Vec<String> {
    let list = ran.json()["keys"].as_array().unwrap().clone();
    list.iter().map(|key| key["key"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn keys_are_listed_in_pages_and_shown_without_their_bodies() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let service = Service::open(dir);
    for key in ["k1", "k2", "k3"] {
        service.done(Some("acme/1"), key, "secret body");
    }
    service.held(Some("acme/1"), "k4");
    service.done(None, "k1", "other");
    let first = keys(dir, &["ls", "--json", "--limit", "2"]).code(0);
    assert_eq!(names(&first), ["k1", "k1"]);
    let mut all = names(&first);
    let mut next = first.json()["next"].as_str().map(str::to_owned);
    while let Some(after) = next {
        let page = keys(dir, &["ls", "--json", "--limit", "2", "--after", &after]).code(0);
        all.extend(names(&page));
        next = page.json()["next"].as_str().map(str::to_owned);
    }
    assert_eq!(all, ["k1", "k1", "k2", "k3", "k4"]);
    assert_eq!(names(&keys(dir, &["ls", "--json", "--tenant", "acme/1", "--open"]).code(0)), ["k4"]);
    let table = keys(dir, &["ls"]).code(0);
    assert!(table.out.contains("outcome-unknown") && table.out.contains("201"), "{}", table.out);
    assert!(keys(dir, &["ls", "--after", "nonsense"]).code(2).err.contains("not a cursor"));
    // The body may be private.
    let shown = keys(dir, &["show", "--tenant", "acme/1", "k1"]).code(0);
    assert!(shown.out.contains("/orders/17") && !shown.out.contains("secret body"), "{}", shown.out);
    let shown = keys(dir, &["show", "--json", "--tenant", "acme/1", "--body", "k1"]).code(0).json();
    assert_eq!(
        (&shown["state"], &shown["status"], &shown["body"]),
        (&"done".into(), &201.into(), &"secret body".into())
    );
    assert_eq!(shown["body_bytes"], 11);
    let missing = keys(dir, &["show", "nowhere"]).code(4);
    assert!(missing.err.contains("there is no key nowhere"), "{}", missing.err);
    assert!(keys(dir, &["show", "a b"]).code(2).err.contains("visible ASCII"));
}

#[test]
fn a_key_whose_outcome_is_unknown_is_decided_with_a_reason_and_consent() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let service = Service::open(dir);
    service.held(None, "paid");
    service.held(Some("acme"), "lost");
    service.done(None, "done", "17");
    let state =
        |args: &[&str]| keys(dir, &[&["show", "--json"], args].concat()).code(0).json()["state"].clone();
    // Without a decision, a reason or consent nothing is changed.
    let undecided = keys(dir, &["resolve", "paid", "--reason", "x"]).code(2);
    assert!(undecided.err.contains("give --rerun or --answer STATUS"), "{}", undecided.err);
    assert!(keys(dir, &["resolve", "paid", "--rerun"]).code(2).err.contains("--reason"));
    assert!(
        keys(dir, &["resolve", "paid", "--rerun", "--reason", " ", "--yes"]).code(2).err.contains("blank")
    );
    assert!(keys(dir, &["resolve", "paid", "--rerun", "--reason", "x"]).code(2).err.contains("--yes"));
    assert!(
        keys(dir, &["resolve", "paid", "--answer", "99", "--reason", "x", "--yes"])
            .code(2)
            .err
            .contains("99")
    );
    let dry = ["resolve", "paid", "--answer", "201", "--reason", "x", "--dry-run"];
    assert!(keys(dir, &dry).code(0).out.contains("would be decided"));
    let not = keys(dir, &["resolve", "done", "--rerun", "--reason", "x", "--yes"]).code(4);
    assert!(not.err.contains("is done, not outcome-unknown"), "{}", not.err);
    assert!(
        keys(dir, &["resolve", "lost", "--rerun", "--reason", "x", "--yes"]).code(4).err.contains("--tenant")
    );
    assert_eq!(state(&["paid"]), "outcome-unknown");
    // It happened.
    let answer = [
        "resolve",
        "paid",
        "--answer",
        "201",
        "--body",
        "{\"id\":17}",
        "--reason",
        "found in the bank",
        "--yes",
    ];
    keys(dir, &answer).code(0);
    let shown = keys(dir, &["show", "--json", "--body", "paid"]).code(0).json();
    assert_eq!((&shown["state"], &shown["body"]), (&"done".into(), &"{\"id\":17}".into()));
    assert_eq!((&shown["decided_by"], &shown["reason"]), (&"tester".into(), &"found in the bank".into()));
    assert!(keys(dir, &answer).code(4).err.contains("is done"));
    // It did not.
    let rerun = [
        "resolve",
        "--tenant",
        "acme",
        "lost",
        "--rerun",
        "--reason",
        "not in the bank",
        "--by",
        "ann",
        "--yes",
    ];
    assert_eq!(keys(dir, &[&rerun[..], &["--json"]].concat()).code(0).json()["decided_by"], "ann");
    service.first(&service.request(Some("acme"), "lost", AfterFailure::Hold));
    assert_eq!(state(&["--tenant", "acme", "lost"]), "running");
    // In a plain container nobody has a name.
    service.held(None, "nameless");
    let args =
        [&["keys", "resolve", "nameless", "--rerun", "--reason", "x", "--yes", "--json"], &FILE[..]].concat();
    let mut nobody = crate::common::hapax(dir, &args);
    let ran: Ran = nobody.env_remove("USER").env_remove("LOGNAME").output().unwrap().into();
    assert!(ran.code(0).json()["decided_by"].as_str().unwrap().starts_with("uid "));
}

/// A decision about a request is an admin action: recorded before it is done, and not for a dry run.
#[test]
fn a_decision_about_a_key_leaves_an_audit_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let set = ["--set", "keys.url=sqlite:keys.db"];
    let service = Service::open(dir);
    run(dir, &[&["token", "create", "--name", "first", "--role", "admin"], &set[..]].concat()).code(0);
    let rows = || {
        let list = [&["audit", "ls", "--action", "keys.", "--json"], &set[..]].concat();
        run(dir, &list).code(0).json()["audit"].as_array().unwrap().clone()
    };
    service.held(Some("acme"), "paid");
    let decide = [
        "resolve",
        "--tenant",
        "acme",
        "paid",
        "--answer",
        "201",
        "--reason",
        "found in the bank",
        "--by",
        "ann",
    ];
    keys(dir, &[&decide[..], &["--dry-run"]].concat()).code(0);
    assert!(rows().is_empty(), "a dry run decides nothing");
    keys(dir, &[&decide[..], &["--yes"]].concat()).code(0);
    let found = rows();
    assert_eq!(found.len(), 1, "{found:?}");
    let row = &found[0];
    assert_eq!((&row["action"], &row["who"]), (&"keys.resolve".into(), &"ann".into()), "{row}");
    assert_eq!(row["reason"], "found in the bank");
    assert!(row["target"].as_str().unwrap().contains("paid") && row.to_string().contains("201"), "{row}");
    // What is refused is not an action.
    keys(dir, &[&decide[..], &["--yes"]].concat()).code(4);
    assert_eq!(rows().len(), 1);
    // Where it cannot be recorded it is not done.
    service.held(None, "lost");
    let file = rusqlite::Connection::open(dir.join("keys.db")).unwrap();
    file.execute_batch("ALTER TABLE hapax_access_audit RENAME TO away").unwrap();
    let refused = keys(dir, &["resolve", "lost", "--rerun", "--reason", "x", "--yes"]);
    assert_ne!(refused.code, Some(0), "{}", refused.out);
    file.execute_batch("ALTER TABLE away RENAME TO hapax_access_audit").unwrap();
    assert_eq!(keys(dir, &["show", "lost", "--json"]).code(0).json()["state"], "outcome-unknown");
}

#[test]
fn a_sweep_says_what_it_did_and_a_dry_run_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let service = Service::open(dir);
    service.done(None, "young", "17");
    let dry = keys(dir, &["sweep", "--json", "--dry-run"]).code(0).json();
    assert_eq!((&dry["keys"], &dry["horizon"]), (&0.into(), &serde_json::Value::Null));
    let swept = keys(dir, &["sweep", "--json"]).code(0).json();
    assert!(swept["keys"] == 0 && swept["horizon"].is_string(), "{swept}");
    assert!(keys(dir, &["sweep"]).code(0).out.contains("forgot 0 keys"));
    assert!(keys(dir, &["sweep", "--retention", "1h"]).code(2).err.contains("at least 1d"));
    assert_eq!(names(&keys(dir, &["ls", "--json"]).code(0)), ["young"]);
}

#[test]
fn a_missing_store_is_a_sentence_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for command in
        [&["ls"][..], &["show", "k"], &["sweep"], &["resolve", "k", "--rerun", "--reason", "x", "--yes"]]
    {
        let ran = keys(dir, command).code(3);
        assert!(
            ran.err.contains("there is no store of keys")
                && ran.err.contains("`hapax keys --keys sqlite:keys.db init` makes one"),
            "{}",
            ran.err
        );
    }
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
    // A file that holds something else.
    std::fs::write(dir.join("keys.db"), "").unwrap();
    let ran = keys(dir, &["ls"]).code(3);
    assert!(
        ran.err.contains("there is no store of keys in") && ran.err.contains("keys.db init`"),
        "{}",
        ran.err
    );
    assert_eq!(std::fs::metadata(dir.join("keys.db")).unwrap().len(), 0);
    std::fs::remove_file(dir.join("keys.db")).unwrap();
    assert!(keys(dir, &["init"]).code(0).out.contains("ready"));
    assert_eq!(names(&keys(dir, &["ls", "--json"]).code(0)), Vec::<String>::new());
    assert!(run(dir, &["keys", "ls", "--keys", "memory:"]).code(2).err.contains("in memory"));
    assert!(
        run(dir, &["keys", "ls", "--keys", "redis://127.0.0.1"])
            .code(2)
            .err
            .contains("sqlite:FILE or postgres")
    );
}

/// Names from outside reach the terminal escaped.
#[test]
fn hostile_names_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let service = Service::open(dir);
    service.held(Some("evil\u{1b}[2J\ttenant"), "k\\\"<script>");
    for args in [&["ls"][..], &["show", "--tenant", "evil\u{1b}[2J\ttenant", "k\\\"<script>"]] {
        let ran = keys(dir, args).code(0);
        assert!(!ran.out.contains('\u{1b}') && ran.out.contains("\\u{1b}"), "{:?}", ran.out);
    }
    let gone = keys(dir, &["show", "--tenant", "evil\u{1b}[2J", "nowhere"]).code(4);
    assert!(!gone.err.contains('\u{1b}'), "{:?}", gone.err);
}
