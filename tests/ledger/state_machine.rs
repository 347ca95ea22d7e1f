//! `docs/state-machine.md` is what the transition function does, asked state by state and command by command.
//! `HAPAX_BLESS=1 cargo test --test ledger state_machine` writes it anew.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use hapax::ledger::transition::{self, Head, HeadLease, Row, Situation};
use hapax::ledger::{
    Baseline, Claim, FailureSettings, Identity, Intervene, Intervention, LeaseSettings, MismatchRule, Mode,
    Nonce, OnDead, Order, OrderPolicy, Outcome, Settle, Settled, State, Token, Verdict, Week,
};
use hapax::{Aggregate, EventId, Scope, Time};

const NOW: Time = Time::from_millis(1_772_625_600_000);
const TOKEN: Token = Token(7);
const FRESH: Token = Token(8);
const MINUTE: Duration = Duration::from_mins(1);

fn row(state: State, at: Time) -> Row {
    Row {
        state,
        token: TOKEN,
        nonce: Nonce(1),
        attempts: 1,
        first_at: NOW.minus(MINUTE * 60),
        at,
        owner: None,
        fingerprint: None,
        order: None,
        origin: None,
        metadata: None,
        reason: None,
        tracked: false,
        alone: true,
        suspect: false,
        unordered: false,
        body: None,
    }
}

/// Every state, in the shapes that are treated differently.
fn states() -> Vec<(&'static str, Option<Row>)> {
    let (later, past) = (NOW.plus(MINUTE), NOW.minus(MINUTE));
    vec![
        ("(none)", None),
        ("leased", Some(row(State::Leased, later))),
        ("leased, lapsed", Some(row(State::Leased, past))),
        ("leased, lapsed, runs used up", Some(Row { attempts: 3, ..row(State::Leased, past) })),
        ("retry, later", Some(row(State::Retry, later))),
        ("retry, due", Some(row(State::Retry, past))),
        ("done", Some(row(State::Done, past))),
        ("dead", Some(row(State::Dead, past))),
        ("parked", Some(row(State::Parked, past))),
        ("stale", Some(row(State::Stale, past))),
        ("claimed", Some(Row { tracked: true, ..row(State::Claimed, later) })),
        ("claimed, overdue", Some(Row { tracked: true, ..row(State::Claimed, past) })),
        ("finished", Some(row(State::Finished, past))),
        ("lost", Some(row(State::Lost, past))),
    ]
}

fn identity() -> Identity {
    Identity::new(Scope::new("s").unwrap(), EventId::new("e").unwrap())
}

fn modes() -> Vec<(&'static str, Mode)> {
    let failed = |attempts_max| {
        Mode::Failed(FailureSettings {
            attempts_max,
            backoff_base: MINUTE,
            backoff_max: MINUTE,
            jitter_permille: 1000,
        })
    };
    vec![
        ("lease", Mode::Lease(LeaseSettings { lease: MINUTE, attempts_max: 3, alone: true })),
        ("done", Mode::Done),
        ("once", Mode::Once { track: None }),
        ("failed", failed(9)),
        ("failed, the last time", failed(1)),
        ("refused", Mode::Refused),
    ]
}

fn situation<'a>(row: Option<&'a Row>, head: &'a Head) -> Situation<'a> {
    Situation {
        row,
        head,
        dropped: None,
        week: Week::TIMELESS,
        now: NOW,
        token: FRESH,
        owner: None,
        mismatch: MismatchRule::Error,
    }
}

fn table(out: &mut String, corner: &str, columns: &[&str], lines: Vec<(&str, Vec<String>)>) {
    let _ = writeln!(out, "| {corner} | {} |", columns.join(" | "));
    let _ = writeln!(out, "|---{}|", "|---".repeat(columns.len()));
    for (name, cells) in lines {
        let _ = writeln!(out, "| **{name}** | {} |", cells.join(" | "));
    }
    out.push('\n');
}

fn cell(answer: &str, before: Option<State>, after: Option<State>) -> String {
    match after {
        Some(after) if Some(after) != before => format!("{answer} → **{after}**"),
        Some(after) => format!("{answer} → {after} anew"),
        None => answer.to_owned(),
    }
}

fn claims(out: &mut String) {
    let head = Head::default();
    let lines = states().into_iter().map(|(name, row)| {
        let cells = modes().into_iter().map(|(_, mode)| {
            let step = transition::claim(&Claim::new(identity(), mode), situation(row.as_ref(), &head));
            let answer = match &step.answer {
                Outcome::First(grant) if grant.suspect => format!("first, suspect, run {}", grant.attempt),
                Outcome::First(grant) => format!("first, run {}", grant.attempt),
                Outcome::RetryLater { attempts, .. } => format!("retry later, {attempts} runs"),
                other => other.name().replace('_', " "),
            };
            cell(&answer, row.as_ref().map(|row| row.state), step.row.map(|row| row.state))
        });
        (name, cells.collect())
    });
    let columns: Vec<_> = modes().into_iter().map(|(name, _)| name).collect();
    table(out, "entry", &columns, lines.collect());
}

fn repeats(out: &mut String) {
    let head = Head::default();
    let lines = modes().into_iter().map(|(name, mode)| {
        let claim = Claim::new(identity(), mode);
        let first = transition::claim(&claim, situation(None, &head));
        let again = transition::claim(&claim, situation(first.row.as_ref(), &head));
        let words = |outcome: &Outcome| outcome.name().replace('_', " ");
        let stored = if again.row.is_some() { "the lease begins anew" } else { "nothing" };
        (name, vec![words(&first.answer), words(&again.answer), stored.to_owned()])
    });
    table(out, "claim", &["first time", "again, same nonce", "changes"], lines.collect());
}

fn verdicts() -> Vec<(&'static str, Verdict)> {
    let retry = |counted| Verdict::Retry { after: MINUTE, counted, reason: None, body: None };
    vec![
        ("done", Verdict::Done { metadata: None }),
        ("retry", retry(true)),
        ("given back", retry(false)),
        ("dead", Verdict::Dead { reason: "x".into(), body: None }),
        ("finished", Verdict::Finished { metadata: None }),
        ("lost", Verdict::Lost { reason: "x".into() }),
    ]
}

fn settled(answer: Settled) -> &'static str {
    if matches!(answer, Settled::Ok { .. }) { "ok" } else { "fenced" }
}

fn settles(out: &mut String, token: Token) {
    let head = Head::default();
    let lines = states().into_iter().map(|(name, row)| {
        let mut cells: Vec<_> = verdicts()
            .into_iter()
            .map(|(_, verdict)| {
                let settle = Settle {
                    identity: identity(),
                    week: Week::TIMELESS,
                    token,
                    verdict,
                    order: None,
                    advance_to: None,
                };
                let step = transition::settle(&settle, row.as_ref(), &head, NOW);
                cell(settled(step.answer), row.as_ref().map(|row| row.state), step.row.map(|row| row.state))
            })
            .collect();
        let step = transition::extend(token, MINUTE, row.as_ref(), &head, NOW);
        cells.push(cell(
            settled(step.answer),
            row.as_ref().map(|row| row.state),
            step.row.map(|row| row.state),
        ));
        (name, cells)
    });
    let lines: Vec<_> = lines.collect();
    if token != TOKEN {
        assert!(
            lines.iter().all(|(_, cells)| cells.iter().all(|cell| cell == "fenced")),
            "a stale token did something"
        );
        out.push_str("With any other token, every one of these is **fenced** and changes nothing.\n\n");
        return;
    }
    let mut columns: Vec<_> = verdicts().into_iter().map(|(name, _)| name).collect();
    columns.push("extend");
    table(out, "entry", &columns, lines);
}

fn intervening(what: Intervention) -> Intervene {
    Intervene {
        identity: identity(),
        time: None,
        what,
        by: "ada".into(),
        reason: "why".into(),
        out_of_order: false,
        token: None,
        dry_run: false,
    }
}

fn interventions(out: &mut String) {
    let all = Intervention::ALL;
    let parked = Head { parked: Some(4), ..Head::default() };
    let lines = states().into_iter().filter_map(|(name, row)| {
        let row = row?;
        let cells = all.into_iter().map(|what| {
            // Past what, only an order says.
            let ordered = (what == Intervention::Skip).then(|| (Aggregate::new("a").unwrap(), 5));
            let row = Row { order: ordered, ..row.clone() };
            match transition::intervene(&intervening(what), &row, &parked, NOW, FRESH) {
                Ok((Some(next), _)) => {
                    assert_eq!(next.token, FRESH, "an intervention fences");
                    format!("→ **{}**", next.state)
                }
                Ok((None, _)) => "gone".to_owned(),
                Err(_) => "refused".to_owned(),
            }
        });
        Some((name, cells.collect()))
    });
    table(out, "entry", &all.map(Intervention::name), lines.collect());
}

/// How far the aggregate of an event with seq 5 has come.
fn heads() -> Vec<(&'static str, Head)> {
    let (later, past) = (NOW.plus(MINUTE), NOW.minus(MINUTE));
    let lease = |seq, until| Head {
        last: Some(3),
        lease: Some(HeadLease { seq, token: TOKEN, until }),
        ..Head::default()
    };
    let at = |last| Head { last: Some(last), ..Head::default() };
    vec![
        ("new", Head::default()),
        ("last is 3", at(3)),
        ("last is 4", at(4)),
        ("last is 5", at(5)),
        ("4 is leased", lease(4, later)),
        ("4 is leased, lapsed", lease(4, past)),
        ("6 is leased", lease(6, later)),
        ("6 is leased, lapsed", lease(6, past)),
        ("4 is owed a run (retrying or parked)", Head { retrying: BTreeSet::from([4]), ..at(3) }),
        ("6 is owed a run", Head { retrying: BTreeSet::from([6]), ..at(4) }),
        ("4 is dead and parks", Head { parked: Some(4), ..at(3) }),
        ("5 itself was dead, redriven", Head { parked: Some(5), retrying: BTreeSet::from([5]), ..at(4) }),
        ("6 is dead and parks", Head { parked: Some(6), ..at(4) }),
        ("4 has been missing for two minutes", Head { gap_at: Some(NOW.minus(MINUTE * 2)), ..at(3) }),
    ]
}

fn order(out: &mut String) {
    let strict = |baseline| OrderPolicy::Strict { baseline, gap_timeout: MINUTE };
    let policies = [
        ("latest", OrderPolicy::Latest),
        ("strict from 1", strict(Baseline::From(1))),
        ("strict from first seen", strict(Baseline::FirstSeen)),
    ];
    let lines = heads().into_iter().map(|(name, head)| {
        let cells = policies.iter().map(|(_, policy)| {
            let aggregate = Aggregate::new("a").unwrap();
            let mut claim = Claim::new(identity(), modes()[0].1);
            claim.order = Some(Order { aggregate, seq: 5, policy: *policy, on_dead: OnDead::Park });
            let step = transition::claim(&claim, situation(None, &head));
            let held = Claim { hold: true, ..claim.clone() };
            let held = transition::claim(&held, situation(None, &head));
            match step.answer {
                Outcome::Wait { on: Some(on) } => assert_eq!(held.answer, Outcome::Parked { behind: on }),
                _ => assert_eq!(held, step),
            }
            match step.answer {
                Outcome::First(_) => "first".to_owned(),
                Outcome::Wait { on } => format!("wait for {}", on.map_or("?".into(), |on| on.to_string())),
                Outcome::Parked { behind } => format!("parked behind {behind}"),
                Outcome::Stale { last } => format!("stale, last is {last}"),
                other => other.name().to_owned(),
            }
        });
        (name, cells.collect())
    });
    table(out, "the aggregate", &policies.map(|(name, _)| name), lines.collect());
}

fn render() -> String {
    let mut out = String::from(
        "# The state machine\n\n\
         Generated from the transition function (`src/ledger/transition.rs`) by\n\
         `tests/ledger/state_machine.rs`; `HAPAX_BLESS=1 cargo test --test ledger state_machine` writes it\n\
         anew.\n\n\
         A cell reads: the answer, then the state the entry goes to. No arrow: nothing is changed. Runs are\n\
         limited to 3, and every run here goes alone, so that a lapsed lease counts.\n\n\
         ## Claims\n\nBy another claimer than the one who set the entry, without an order.\n\n",
    );
    claims(&mut out);
    out.push_str("The same claim again, under its nonce, has the same outcome:\n\n");
    repeats(&mut out);
    out.push_str(
        "Another fingerprint than the stored one is a mismatch in every state and changes nothing. No entry,\n\
         and a week that was dropped since the scope began: too old.\n\n",
    );
    out.push_str("## Settling and extending\n\nWith the entry's token.\n\n");
    settles(&mut out, TOKEN);
    settles(&mut out, FRESH);
    out.push_str("## Interventions\n\nEach draws a new token, so whoever held the entry is fenced, and leaves an audit row.\n\n");
    interventions(&mut out);
    out.push_str(
        "In an order that has moved past the event, redrive and retry are refused, unless they may run it\n\
         out of order: then it has none from there on. A dropped event's aggregate goes on past it; a skip is\n\
         for one that is parked behind a dead or missing seq, and goes on past that.\n\n",
    );
    out.push_str(
        "## Order\n\nA lease is claimed on the event with seq 5; the gap timeout is a minute. A claim that says\n\
         hold is parked instead of waiting.\n\n",
    );
    order(&mut out);
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

#[test]
fn the_document_is_what_the_function_does() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/state-machine.md");
    let wanted = render();
    if std::env::var_os("HAPAX_BLESS").is_some() {
        std::fs::write(path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == wanted, "{path} is out of date; HAPAX_BLESS=1 writes it anew. It should be:\n{wanted}");
}

#[test]
fn every_state_is_in_it() {
    for state in State::ALL {
        assert!(
            states().iter().any(|(_, row)| row.as_ref().is_some_and(|row| row.state == state)),
            "{state}"
        );
    }
}
