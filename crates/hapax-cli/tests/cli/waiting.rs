//! What waits, in aggregates and ledgers that are large: `hapax explain --aggregate`, `GET /v1/waiting`, and dead letters
//! by reason.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::ledger::{
    Claim, Identity, LeaseSettings, Mode, OnDead, Order, OrderPolicy, Outcome, Settle, Settled, Verdict,
};
use hapax::{Aggregate, EventId, Ledger, Scope};
use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::{run, run_with};
use crate::serve_access::process::Server;

/// More entries than are shown of an aggregate.
const DONE: u64 = 2_100;

fn id(seq: u64) -> String {
    format!("e-{seq:05}")
}

fn claim(aggregate: &str, seq: u64, mode: Mode) -> Claim {
    let identity = Identity::new(Scope::new("mailer").unwrap(), EventId::new(id(seq)).unwrap());
    let mut claim = Claim::new(identity, mode);
    let aggregate = Aggregate::new(aggregate).unwrap();
    claim.order = Some(Order { aggregate, seq, policy: OrderPolicy::Latest, on_dead: OnDead::Park });
    claim.hold = true;
    claim
}

fn lease() -> Mode {
    Mode::Lease(LeaseSettings { lease: Duration::from_secs(600), attempts_max: 5, alone: true })
}

/// Works on the ledger of a directory, as a library that shares its file.
fn on_ledger<F: Future>(dir: &Path, work: impl FnOnce(Arc<dyn Ledger>) -> F) -> F::Output {
    std::fs::create_dir_all(dir.join("hapax-data")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", dir.join("hapax-data/ledger.db").display());
        work(hapax::open::ledger(&url).await.unwrap()).await
    })
}

/// An aggregate of which many events are done, the next one is dead, and two wait behind it.
fn a_long_aggregate_that_waits(dir: &Path) {
    on_ledger(dir, |ledger| async move {
        let all: Vec<_> = (1..=DONE).map(|seq| claim("order-1", seq, Mode::Done)).collect();
        for claims in all.chunks(700) {
            for outcome in ledger.claim(claims).await.unwrap() {
                assert!(matches!(outcome.unwrap(), Outcome::First(_)));
            }
        }
        let head = claim("order-1", DONE + 1, lease());
        let Some(Ok(Outcome::First(grant))) = ledger.claim(std::slice::from_ref(&head)).await.unwrap().pop()
        else {
            panic!("it is the first")
        };
        let settle = Settle {
            identity: head.identity.clone(),
            week: grant.week,
            token: grant.token,
            verdict: Verdict::Dead { reason: "no such order".into(), body: None },
            order: head.order.clone(),
            advance_to: None,
        };
        let settled = ledger.settle(&[settle]).await.unwrap().pop().unwrap().unwrap();
        assert!(matches!(settled, Settled::Ok { .. }), "{settled:?}");
        for seq in [DONE + 2, DONE + 3] {
            let outcome = ledger.claim(&[claim("order-1", seq, lease())]).await.unwrap().pop().unwrap();
            assert_eq!(outcome.unwrap().name(), "parked");
        }
    });
}

const WHAT: &str = "done up to seq 2100; seq 2102, 2103 wait behind seq 2101, which is dead";

fn explain(dir: &Path) -> Value {
    run(dir, &["explain", "--aggregate", "order-1", "--json"]).code(0).json()
}

fn is_shown(life: &Value, seq: u64, what: &str) -> bool {
    let steps = life["steps"].as_array().unwrap();
    steps.iter().any(|step| step["event"] == id(seq) && step["what"].as_str().unwrap().starts_with(what))
}

/// T470: entries are listed by id. Of an aggregate with more than are shown, what waits was never looked at.
#[test]
fn t470_what_waits_in_a_long_aggregate_is_found_and_its_latest_entries_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    a_long_aggregate_that_waits(dir);
    let life = explain(dir);
    let queue = &life["scopes"][0];
    assert_eq!(queue["what"], WHAT, "{queue}");
    assert_eq!((&queue["head"], &queue["head_state"]), (&json!(DONE + 1), &json!("dead")), "{queue}");
    assert_eq!((&queue["done_up_to"], &queue["waiting"]), (&json!(DONE), &json!([DONE + 2, DONE + 3])));
    assert!(is_shown(&life, DONE, "done") && is_shown(&life, DONE + 1, "dead"), "the latest are shown");
    assert!(!is_shown(&life, 1, "done"), "the first of so many are not");
    let said = life["stores"].to_string();
    assert!(said.contains("of its settled entries only the latest"), "{said}");

    // The journal has all of its events, and those that it shows have their entries.
    let lines: String = (1..=DONE + 3).map(|seq| json!({"event_id": id(seq)}).to_string() + "\n").collect();
    run_with(dir, &["journal", "append", "--aggregate", "order-1"], lines.as_bytes()).code(0);
    let life = explain(dir);
    assert_eq!(life["scopes"][0]["what"], WHAT, "{}", life["scopes"]);
    let from = DONE + 3 - 499;
    for seq in [from, DONE] {
        assert!(is_shown(&life, seq, "appended") && is_shown(&life, seq, "done"), "seq {seq}");
    }
    assert!(is_shown(&life, DONE + 2, "parked"), "what waits is shown");
}

/// T470: the same over HTTP, where such an aggregate was left out without a word.
#[test]
fn t470_a_long_aggregate_is_among_those_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    a_long_aggregate_that_waits(dir);
    let server = Server::start_whole(dir, &[]);
    let waiting = || server.ask("GET", "/v1/waiting", &[], &Value::Null);
    wait_until("it was looked at", || waiting().status == 200);
    let answer = waiting().is(200);
    assert_eq!(answer["aggregates"].as_array().unwrap().len(), 1, "{answer}");
    let of = &answer["aggregates"][0];
    assert_eq!((&of["what"], &of["scope"]), (&json!(WHAT), &json!("mailer")), "{of}");
    assert_eq!((&of["head"], &of["done_up_to"]), (&json!(DONE + 1), &json!(DONE)), "{of}");
    assert_eq!((&of["waiting"], &answer["more"]), (&json!([DONE + 2, DONE + 3]), &json!(false)), "{of}");
}
