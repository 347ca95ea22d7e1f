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
use crate::serve_access::process::{Answer, Server};

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

fn post(server: &Server, path: &str, body: &Value) -> Answer {
    server.ask("POST", path, &[], body)
}

/// Makes dead letters: of each its id, its reason, and whether its aggregate has moved past it.
async fn die(ledger: &dyn Ledger, letters: impl Iterator<Item = (String, String, bool)>) {
    let letters: Vec<_> = letters.collect();
    for letters in letters.chunks(700) {
        let claims: Vec<_> = letters
            .iter()
            .map(|(id, _, is_passed)| {
                let identity =
                    Identity::new(Scope::new("mailer").unwrap(), EventId::new(id.as_str()).unwrap());
                let mut claim = Claim::new(identity, lease());
                let aggregate = Aggregate::new(format!("of-{id}")).unwrap();
                let order = Order { aggregate, seq: 1, policy: OrderPolicy::Latest, on_dead: OnDead::Skip };
                claim.order = is_passed.then_some(order);
                claim
            })
            .collect();
        let mut settles = Vec::new();
        for ((claim, outcome), (_, reason, _)) in
            claims.iter().zip(ledger.claim(&claims).await.unwrap()).zip(letters)
        {
            let Outcome::First(grant) = outcome.unwrap() else { panic!("it is the first") };
            settles.push(Settle {
                identity: claim.identity.clone(),
                week: grant.week,
                token: grant.token,
                verdict: Verdict::Dead { reason: reason.as_str().into(), body: None },
                order: claim.order.clone(),
                advance_to: None,
            });
        }
        assert!(ledger.settle(&settles).await.unwrap().into_iter().all(|settled| settled.is_ok()));
        let next: Vec<_> = claims
            .iter()
            .filter_map(|claim| {
                let mut order = claim.order.clone()?;
                order.seq = 2;
                let id = EventId::new(format!("{}-next", claim.identity.id)).unwrap();
                let mut next = Claim::new(Identity::new(claim.identity.scope.clone(), id), Mode::Done);
                next.order = Some(order);
                Some(next)
            })
            .collect();
        for outcome in ledger.claim(&next).await.unwrap() {
            assert!(matches!(outcome.unwrap(), Outcome::First(_)));
        }
    }
}

/// T472: the first 20,000 dead letters were looked at, and the rest was in no group and in no preview.
#[test]
fn t472_a_reason_that_few_of_very_many_have_is_found() {
    const MANY: usize = 20_500;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    on_ledger(dir, |ledger| async move {
        let reason = |number: usize| if number < MANY { "no such order" } else { "card declined: HTTP 402" };
        let letters =
            (0..MANY + 2).map(|number| (format!("e-{number:05}"), reason(number).to_owned(), false));
        die(&*ledger, letters).await;
    });
    let server = Server::start_whole(dir, &[]);
    let groups = || server.ask("GET", "/v1/dead/groups", &[], &Value::Null);
    wait_until("they were looked through", || groups().status == 200);
    let answer = groups().is(200);
    assert_eq!((&answer["looked"], &answer["more"]), (&json!(MANY + 2), &json!(false)), "{answer}");
    let counts = |answer: &Value| -> Vec<_> {
        let groups = answer["groups"].as_array().unwrap();
        groups.iter().map(|group| (group["count"].clone(), group["pattern"].clone())).collect()
    };
    let known = vec![(json!(MANY), json!("no such order")), (json!(2), json!("card declined: HTTP 402"))];
    assert_eq!(counts(&answer), known);
    let few = json!({"scope": "mailer", "pattern": "card declined: HTTP 402"});
    let preview = post(&server, "/v1/dead/preview", &few).is(200);
    let ids: Vec<_> = preview["events"].as_array().unwrap().iter().map(|event| &event["id"]).collect();
    assert_eq!(
        (ids, &preview["next"]),
        (vec![&json!("e-20500"), &json!("e-20501")], &Value::Null),
        "{preview}"
    );
    // Of more than a preview shows, the next one has the rest.
    let mut body = json!({"scope": "mailer", "pattern": "no such order", "limit": 1000});
    let first = post(&server, "/v1/dead/preview", &body).is(200);
    assert_eq!((&first["more"], &first["events"][0]["id"]), (&json!(true), &json!("e-00000")));
    body["after"] = first["next"].clone();
    let second = post(&server, "/v1/dead/preview", &body).is(200);
    assert_eq!((&second["more"], &second["events"][0]["id"]), (&json!(true), &json!("e-01000")));
}

/// T473: what stays as it is was refused together with all that match, or was in front of the rest for ever.
#[test]
fn t473_all_that_match_are_redriven_past_what_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    on_ledger(dir, |ledger| async move {
        // Events without an aggregate come first.
        let letters = (0..7).map(|number| (format!("e-{number}"), "HTTP 500".to_owned(), number >= 2));
        die(&*ledger, letters.chain([("other".to_owned(), "HTTP 404".to_owned(), false)])).await;
    });
    let server = Server::start_whole(dir, &[]);
    let mut body =
        json!({"scope": "mailer", "all": true, "pattern": "HTTP 500", "limit": 3, "reason": "mended"});
    let (mut done, mut stayed) = (Vec::new(), Vec::new());
    for part in 1.. {
        let answer = post(&server, "/v1/dead/redrive", &body).is(200);
        for entry in answer["entries"].as_array().unwrap() {
            let id = entry["id"].as_str().unwrap().to_owned();
            if entry["problem"].is_null() { done.push(id) } else { stayed.push(id) }
        }
        assert_eq!(answer["more"], json!(part < 3), "{answer}");
        body["after"] = answer["next"].clone();
        if part == 3 {
            break;
        }
    }
    assert_eq!(body["after"], Value::Null);
    assert_eq!(
        (done, stayed),
        (vec!["e-0".into(), "e-1".into()], (2..7).map(|n| format!("e-{n}")).collect())
    );
    // One that is named and cannot be changed is a mistake still.
    let named = json!({"scope": "mailer", "ids": ["e-3"], "reason": "mended"});
    post(&server, "/v1/dead/redrive", &named).problem(409, "conflict");
    for bad in [
        json!({"scope": "mailer", "ids": ["e-3"], "pattern": "x", "reason": "r"}),
        json!({"scope": "mailer", "all": true, "after": "x", "reason": "r"}),
    ] {
        post(&server, "/v1/dead/redrive", &bad).problem(400, "invalid");
    }
}
