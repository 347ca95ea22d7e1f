//! `hapax ledger import`: services that have a table of processed events move to hapax.

#![cfg(all(feature = "postgres", unix))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::consume::wait_until;
use crate::common::roles::Connection;
use crate::common::{Ran, hapax, run};

/// A PostgreSQL schema with the table of an old service, and a ledger in another.
struct Move {
    dir: tempfile::TempDir,
    url: String,
    old: String,
    ledger: String,
}

impl Move {
    fn new(sql: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env is set");
        let id = run(dir.path(), &["id", "make"]).code(0).out.trim().replace('-', "_");
        let place = Move { dir, url, old: format!("old_{id}"), ledger: format!("new_{id}") };
        place.sql(&format!("create schema {}; set search_path = {0}; {sql}", place.old));
        place.hapax(&["init"]).code(0);
        place
    }

    fn sql(&self, sql: &str) {
        Connection::to(&self.url).run(sql);
    }

    fn command(&self, args: &[&str]) -> Command {
        let schema = format!("ledger.schema={}", self.ledger);
        let all = [&["--ledger", &self.url, "--set", &schema, "ledger"], args].concat();
        hapax(self.dir.path(), &all)
    }

    fn hapax(&self, args: &[&str]) -> Ran {
        self.command(args).output().unwrap().into()
    }

    /// Imports into the scope `billing`.
    fn import(&self, table: &str, args: &[&str]) -> Ran {
        let from = format!("{}.{table}", self.old);
        self.hapax(&[&["import", "--json", "--from", &from, "--scope", "billing"], args].concat())
    }

    /// How many entries the ledger has in a state.
    fn count(&self, state: &str) -> u64 {
        let stat = self.hapax(&["stat", "--json"]).code(0).json();
        let counts = stat["counts"].as_array().unwrap().iter();
        counts.filter(|count| count["state"] == state).map(|count| count["count"].as_u64().unwrap()).sum()
    }

    fn token(&self, id: &str) -> i64 {
        let entry = self.hapax(&["show", "--json", "--scope", "billing", id]).code(0).json();
        assert_eq!(entry["state"], "done", "{entry}");
        entry["token"].as_i64().unwrap()
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        self.sql(&format!(
            "drop schema if exists {} cascade; drop schema if exists {} cascade",
            self.old, self.ledger
        ));
    }
}

/// `processed_events` of one consumer, by month.
const PROCESSED_EVENTS: &str = "
    create table processed_events (
        id uuid default gen_random_uuid(), event_id varchar(255) not null,
        processed_at timestamptz not null default now(), metadata jsonb
    ) partition by range (processed_at);
    create table processed_events_all partition of processed_events default;
";

/// A table of several consumers, whose identity includes the week.
const PROCESSED_KAFKA_EVENTS: &str = "
    create table processed_kafka_events (
        consumer_scope_id text, event_id text, week_start date, topic text, partition int, \"offset\" bigint,
        first_seen_at timestamptz default now(), primary key (consumer_scope_id, event_id, week_start)
    );
";

/// A registry with leases and failures, as text and as UUIDs.
const REGISTRY: &str = "
    create table processed_event_registry (
        handler text, event_id uuid, aggregate_id text, sequence_number bigint, status text, owner text,
        heartbeat_at timestamptz, primary key (handler, event_id)
    );
";

const UUID: &str = "0190d3a0-5b7e-7c3a-9f51";

#[test]
fn t570_what_each_kind_of_table_says_is_done_runs_no_more() {
    let of = Move::new(&format!(
        "{PROCESSED_EVENTS} {PROCESSED_KAFKA_EVENTS} {REGISTRY}
         create table numbers (event_id bigint primary key);
         insert into numbers select n from generate_series(1, 400) n;
         insert into processed_events (event_id) select 'e-' || n from generate_series(1, 1200) n;
         insert into processed_events (event_id, processed_at) values ('e-7', '2024-01-01');
         insert into processed_kafka_events
           select s, 'k-' || n, w from generate_series(1, 700) n, unnest('{{billing,mailer}}'::text[]) s,
             unnest('{{2024-01-01,2024-01-08}}'::date[]) w;
         insert into processed_event_registry (handler, event_id, status)
           select 'pay', ('{UUID}-' || lpad(n::text, 12, '0'))::uuid,
             case when n <= 600 then 'done' when n <= 610 then 'skipped_stale' when n <= 630 then 'processing' else 'failed' end
           from generate_series(1, 650) n;"
    ));
    let dry = of.import("processed_events", &["--dry-run"]).code(0).json();
    assert_eq!((dry["ids"].as_u64(), dry["recorded"].as_u64()), (Some(1200), Some(1200)), "{dry}");
    assert_eq!(of.count("done"), 0);
    assert!(of.import("processed_events", &[]).code(2).err.contains("--yes"));
    let events = of.import("processed_events", &["--yes"]).code(0).json();
    assert_eq!(
        (events["recorded"].as_u64(), events["verified"].as_u64()),
        (Some(1200), Some(1200)),
        "{events}"
    );
    let kafka = of.import("processed_kafka_events", &["--yes", "--page", "99"]).code(0).json();
    assert_eq!((kafka["ids"].as_u64(), kafka["recorded"].as_u64()), (Some(700), Some(700)), "{kafka}");
    let registry = of.import("processed_event_registry", &["--yes", "--from-scope", "pay"]).code(0).json();
    assert_eq!(
        (registry["recorded"].as_u64(), registry["missing"].as_u64()),
        (Some(610), Some(0)),
        "{registry}"
    );
    assert_eq!(registry["left"], serde_json::json!({"processing": 20, "failed": 20}));
    // By number, not by text: page after page.
    let numbers = of.import("numbers", &["--yes", "--page", "7"]).code(0).json();
    assert_eq!(numbers["recorded"].as_u64(), Some(400), "{numbers}");
    assert_eq!(of.count("done"), 1200 + 700 + 610 + 400);
    let token = of.token("e-7");
    of.token(&format!("{UUID}-000000000610"));
    of.hapax(&["show", "--scope", "billing", &format!("{UUID}-000000000611")]).code(4);
    // Once more does nothing.
    let again = of.import("processed_events", &["--yes"]).code(0).json();
    assert_eq!((again["recorded"].as_u64(), again["known"].as_u64()), (Some(0), Some(1200)), "{again}");
    assert_eq!(of.token("e-7"), token);
}

#[test]
fn t571_an_import_that_was_killed_goes_on_and_does_nothing_twice() {
    let of = Move::new(&format!(
        "{PROCESSED_EVENTS}
         insert into processed_events (event_id) select 'e-' || lpad(n::text, 5, '0') from generate_series(1, 4000) n;"
    ));
    let from = format!("{}.processed_events", of.old);
    let args = ["import", "--from", &from, "--scope", "billing", "--yes", "--page", "2"];
    let mut running = of.command(&args).spawn().unwrap();
    wait_until("some are in", || of.count("done") >= 200);
    running.kill().unwrap();
    running.wait().unwrap();
    let before = of.count("done");
    assert!((200..4000).contains(&before), "{before}: it was not killed half-way");
    let token = of.token("e-00001");
    let rest = of.import("processed_events", &["--yes"]).code(0).json();
    assert_eq!(rest["verified"].as_u64(), Some(4000), "{rest}");
    // A page that was under way when it was killed may have been committed after the count.
    let recorded = rest["recorded"].as_u64().unwrap();
    assert!(recorded <= 4000 - before && recorded + before + 2 >= 4000, "{before}: {rest}");
    assert_eq!((of.count("done"), of.token("e-00001")), (4000, token));
}

#[test]
fn t572_an_import_beside_the_old_service_catches_up() {
    let of = Move::new(&format!(
        "{PROCESSED_EVENTS}
         insert into processed_events (event_id) select md5(n::text) from generate_series(1, 2000) n;"
    ));
    let stop = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let (mut old, mut written) = (Connection::to(&of.url), 0);
            while !stop.load(Ordering::SeqCst) {
                written += 1;
                old.run(&format!(
                    "insert into {}.processed_events (event_id) values (md5('late {written}'))",
                    of.old
                ));
            }
            written
        });
        let ran = of.import("processed_events", &["--yes", "--page", "50"]);
        stop.store(true, Ordering::SeqCst);
        let ran = ran.code(0).json();
        assert!(ran["ids"].as_u64().unwrap() >= 2000 && ran["missing"] == 0, "{ran}");
        writer.join().unwrap()
    });
    assert!(written > 0);
    let last = of.import("processed_events", &["--yes"]).code(0).json();
    assert_eq!(
        (last["verified"].as_u64(), last["appeared"].as_u64()),
        (Some(2000 + written), Some(0)),
        "{last}"
    );
    assert_eq!(of.count("done"), 2000 + written);
}

#[test]
fn t573_hostile_ids_are_counted_and_hostile_names_get_a_sentence() {
    let of = Move::new(
        "create table \"odd \"\" table\" (\"the; id\" text, \"state\" int);
         insert into \"odd \"\" table\" values (null, 1), ('', 1), ('   ', 1), (repeat('x', 256), 1),
           (E'\\x1b[2J\\nFORGED', 1), ('it''s', 1), ('漢', 1), ('%', 1), ('open', null), ('wrong', 2);
         create table processed_events (event_id json);
         create table scoped (event_id text, handler text); insert into scoped values ('a', 'mailer');
         create table empty (event_id text, handler text);",
    );
    let odd = "\"odd \"\" table\"";
    let ran = of.import(odd, &["--yes", "--id-column", "the; id", "--done-status", "1"]).code(0).json();
    assert_eq!((ran["recorded"].as_u64(), ran["refused"].as_u64()), (Some(4), Some(4)), "{ran}");
    assert_eq!(ran["left"], serde_json::json!({"2": 1, "null": 1}), "{ran}");
    assert!(!ran["reasons"].to_string().contains("\\u001b"), "{ran}");
    of.token("it's");
    for (table, args, says) in [
        ("nothing", &[] as &[&str], "there is no table"),
        ("a.b.c.d", &[], "there is no table"),
        ("'", &[], "there is no table"),
        (odd, &[], "--id-column"),
        (odd, &["--id-column", "no\u{1b}"], "has no column no\\u{1b}"),
        ("processed_events", &[], "cannot be read"),
        ("scoped", &[], "it has mailer"),
    ] {
        let err = of.import(table, &[args, &["--yes"]].concat()).code(2).err;
        assert!(err.contains(says), "{table}: {err}");
    }
    of.import("empty", &["--yes"]).code(0);
    of.import("scoped", &["--yes", "--from-scope", "mailer"]).code(0);
    for (from, says) in [("redis://x", "a table in PostgreSQL"), ("postgres://127.0.0.1/x", "#TABLE")] {
        let ran = of.hapax(&["import", "--from", from, "--scope", "billing", "--yes"]).code(2);
        assert!(ran.err.contains(says), "{}", ran.err);
    }
}

/// What is hidden, and what is another tenant's, would look as if everything were imported.
#[test]
fn t575_rows_that_are_hidden_or_of_several_tenants_are_refused() {
    let of = Move::new(
        "create table t (event_id text); insert into t values ('e-1'); create table shared (tenant_id text, event_id text)",
    );
    let err = of.import("shared", &["--yes"]).code(2).err;
    assert!(err.contains("several tenants"), "{err}");
    let role = of.old.replacen("old_", "reader_", 1);
    of.sql(&format!(
        "create role {role} login; grant usage on schema {0} to {role}; grant select on {0}.t to {role};
         alter table {0}.t enable row level security; create policy hidden on {0}.t using (false)",
        of.old
    ));
    let from = format!("{}#{}.t", of.url.replacen("postgres@", &format!("{role}@"), 1), of.old);
    let ran = of.hapax(&["import", "--from", &from, "--scope", "billing", "--yes"]);
    of.sql(&format!("drop owned by {role}; drop role {role}"));
    assert!(ran.code(2).err.contains("row-level security"));
    assert_eq!(of.count("done"), 0);
}

/// What is open in the ledger is not marked as done behind the back of whoever has it.
#[test]
fn t574_what_the_ledger_cannot_take_is_said_and_fails() {
    let of = Move::new(
        "create table processed_events (event_id text primary key); insert into processed_events values ('a'), ('b');",
    );
    let dir = of.dir.path();
    run(dir, &["token", "create", "--role", "admin", "--name", "ada"]).code(0);
    of.import("processed_events", &["--yes", "--by", "ada", "--reason", "we move"]).code(0);
    let audit = run(dir, &["--json", "audit", "ls", "--action", "ledger.import"]).code(0).json();
    let row = &audit["audit"][0];
    assert_eq!((row["who"].as_str(), row["reason"].as_str()), (Some("ada"), Some("we move")), "{audit}");
    // An event that is dead in the ledger stays dead, and is not called processed.
    of.sql(&format!("insert into {}.processed_events values ('c')", of.old));
    dead(&of, "c");
    let ran = of.import("processed_events", &["--yes"]).code(1);
    let said = ran.json();
    assert_eq!((said["missing"].as_u64(), said["verified"].as_u64()), (Some(1), Some(2)), "{said}");
    assert!(said["reasons"][0].as_str().unwrap().contains("c: the ledger says dead"), "{said}");
}

fn dead(of: &Move, id: &str) {
    use hapax::backend::postgres::{PgLedger, PgSettings};
    let mut settings = PgSettings::default();
    settings.schema.clone_from(&of.ledger);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ledger = PgLedger::connect(&of.url, settings).await.unwrap();
        let guard = hapax::Guard::builder(ledger).scope("billing").attempts_max(1).build().unwrap();
        let outcome = guard.failed(id, "no such account").await.unwrap();
        assert!(matches!(outcome, hapax::Outcome::Dead { .. }), "{outcome:?}");
    });
}
