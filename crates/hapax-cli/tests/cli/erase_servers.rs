//! `hapax erase` on PostgreSQL and ClickHouse, with a topic on Kafka, in the cache and in OpenSearch.

#![cfg(all(feature = "postgres", feature = "clickhouse", feature = "kafka"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::common::roles::{Connection, Postgres};
use crate::common::{run, run_with};
use crate::erase::{ALICE, BOB, OF_ALICE, OF_BOB, create, place, send};
use crate::query_clickhouse::Database;

/// How many rows of a read model have this in their payload, replaced versions too.
fn versions(database: &Database, secret: &str) -> u64 {
    database.ask(&format!(
        "SELECT count() FROM {}.data_records WHERE position(payload, '{secret}') > 0",
        database.name
    ))
}

/// How many rows of the schema's tables have this.
fn rows(place: &Postgres, secret: &str) -> usize {
    let server = place.admin_url.rsplit_once('/').unwrap().0;
    let mut owner = Connection::to(&format!("{server}/hapax_test_records"));
    let like = format!("%{secret}%");
    let of =
        |table: &str, text: &str| format!("select from {}.{table} where {text} like '{like}'", place.schema);
    owner.rows(&of("journal", "convert_from(payload, 'UTF8')"))
        + owner.rows(&of("keys", "convert_from(body, 'UTF8')"))
        + owner.rows(&format!("select from module_{}.records where payload::text like '{like}'", place.slug))
}

fn set(of: &str) -> [String; 2] {
    ["--set".to_owned(), of.to_owned()]
}

fn texts(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// Records in PostgreSQL, a read model in ClickHouse: by the owner, since an app may not change events. A version that
/// a feed inserts again is hidden by the deletion, and goes with the next run.
#[test]
fn t337_an_old_version_that_is_inserted_again_stays_hidden_and_goes_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (postgres, database) = (Postgres::new(dir), Database::new(dir));
    let model = set(&database.set());
    let server = postgres.start_with(
        &[&texts(&model)[..], &["--set", &format!("keys.maintenance_url={}", postgres.keeper_url)]].concat(),
    );
    // No merge removes what the command is to remove.
    let no_merge = "MODIFY SETTING max_bytes_to_merge_at_max_space_in_pool = 1";
    database.run(&format!("ALTER TABLE {}.data_records {no_merge}", database.name));
    let id = create(&server, &postgres.slug, ALICE, "one", OF_ALICE);
    let update = json!({"payload": {"mail": OF_ALICE, "n": 2}, "expected_seq": 1});
    let path = format!("/v1/modules/{}/records/{id}", postgres.slug);
    assert_eq!(send(&server, "PUT", &path, ALICE, "two", &update).status, 200);
    create(&server, &postgres.slug, BOB, "one", OF_BOB);
    let as_owner = |command: &[&str], more: &[&str]| {
        run(dir, &[command, &postgres.as_owner()[..], &texts(&model), more].concat())
    };
    let append = |what: &str| {
        let of = ["journal", "append", "--tenant", ALICE, "--aggregate", "mails", "--json", "-"];
        let event = format!("{{\"event_id\":\"mail\",\"do\":\"{what}\"}}\n");
        run_with(dir, &[&of[..], &postgres.as_owner()].concat(), event.as_bytes()).code(0).out
    };
    assert!(append(OF_ALICE).contains("\"new\""));
    as_owner(&["verify", "analytics", "--wait", "60s"], &[]).code(0);
    assert!(rows(&postgres, OF_ALICE) >= 5 && versions(&database, OF_ALICE) >= 1);
    // The app may not, and is told who may.
    let as_app = [
        &["erase", "--tenant", ALICE, "--yes"],
        &postgres.as_app()[..],
        &texts(&model),
        &["--set", "journal.migrate=check"],
    ]
    .concat();
    let refused = run(dir, &as_app);
    assert!(
        refused.code.is_some_and(|code| code > 1) && refused.err.contains("privilege"),
        "{}",
        refused.err
    );
    let erase = |more: &[&str]| as_owner(&["erase", "--tenant", ALICE, "--wait", "60s", "--json"], more);
    let counted = erase(&["--dry-run"]).code(0).json();
    // The app has deleted the record before it was refused.
    assert!(place(&counted, "journal events") == 3 && place(&counted, "answers of keys") == 2, "{counted}");
    let report = erase(&["--yes"]).code(0).json();
    assert_eq!(report["state"], "gone", "{report}");
    assert!(append("other").contains("\"repeat\""), "an erased id is a repeat");
    assert_eq!((rows(&postgres, OF_ALICE), versions(&database, OF_ALICE)), (0, 0));
    assert!(rows(&postgres, OF_BOB) >= 3 && versions(&database, OF_BOB) == 1);
    let kept = send(
        &server,
        "POST",
        &format!("/v1/modules/{}/records", postgres.slug),
        ALICE,
        "one",
        &json!({"payload": {"mail": OF_ALICE, "n": 1}}),
    );
    kept.problem(410, "answer-erased");

    // As a feed would that had read it before.
    database.run(&format!(
        "INSERT INTO {}.data_records (tenant_id, module, record_id, payload, _version, _deleted) VALUES
         ('{ALICE}', '{}', '{id}', '{{\"mail\":\"{OF_ALICE}\"}}', {}, 0)",
        database.name,
        postgres.slug,
        (1_u64 << 48) + 2
    ));
    let query = ["query", "records", "--module", &postgres.slug, "--tenant", ALICE, "--count", "--json"];
    let asked = as_owner(&query, &[]).code(0).out;
    assert!(!asked.contains("\"count\":1"), "{asked}");
    assert_eq!(versions(&database, OF_ALICE), 1);
    let report = erase(&["--yes"]).code(0).json();
    assert_eq!((place(&report, "read model"), &report["state"]), (1, &json!("gone")), "{report}");
    assert_eq!(versions(&database, OF_ALICE), 0);
    as_owner(&["verify", "analytics", "--wait", "60s"], &[]).code(0);
}

/// What a projection has of a record is gone with it, and an event that is delivered again does not bring it back.
fn erased_from(to: &str, has: impl Fn(&str) -> bool) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]);
    create(&server, "orders", ALICE, "one", OF_ALICE);
    create(&server, "orders", BOB, "one", OF_BOB);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    drop(server); // its pulses would keep the topic from ever being idle
    let project = |scope: &str| {
        let args =
            ["project", "run", "--data", "d", "--to", to, "--create", "--until-idle", "1", "--scope", scope];
        run(dir, &args).code(0)
    };
    project("first");
    assert!(has(OF_ALICE) && has(OF_BOB), "both are there");
    let of = format!("projection.url={to}");
    let erase = |more: &[&str]| {
        let args = ["erase", "--data", "d", "--tenant", ALICE, "--json", "--set", &of];
        run(dir, &[&args[..], more].concat()).code(0).json()
    };
    assert_eq!(place(&erase(&["--dry-run"]), "projection"), 1);
    // The relay publishes the deletion.
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]);
    let report = erase(&["--yes", "--wait", "60s"]);
    assert_eq!((place(&report, "projection"), &report["state"]), (1, &json!("gone")), "{report}");
    drop(server);
    assert!(!has(OF_ALICE) && has(OF_BOB), "one is gone");
    project("second"); // everything that was published, from its beginning
    assert!(!has(OF_ALICE) && has(OF_BOB), "it stays gone");
    run(dir, &["project", "verify", "--data", "d", "--to", to]).code(0);
    let again = erase(&["--yes", "--wait", "60s"]);
    assert_eq!((place(&again, "projection"), &again["state"]), (0, &json!("gone")), "{again}");
}

/// A cache of the tests here, of a database that no other test uses.
#[cfg(feature = "redis")]
struct Cache {
    host: String,
    database: u8,
}

#[cfg(feature = "redis")]
impl Cache {
    fn new(database: u8) -> Self {
        let url = std::env::var("HAPAX_TEST_VALKEY_URL").expect("HAPAX_TEST_VALKEY_URL is not set");
        let cache = Cache { host: url.strip_prefix("redis://").unwrap().to_owned(), database };
        cache.ask("FLUSHDB");
        cache
    }

    fn to(&self) -> String {
        format!("cache:redis://{}/{}", self.host, self.database)
    }

    fn ask(&self, commands: &str) -> String {
        let mut stream = std::net::TcpStream::connect(&self.host).unwrap();
        write!(stream, "SELECT {}\r\n{commands}\r\nQUIT\r\n", self.database).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Whether any value has these bytes: every key is read.
    fn has(&self, bytes: &str) -> bool {
        let keys = self.ask("KEYS *");
        let keys: Vec<&str> = keys.lines().filter(|line| line.starts_with("hapax:")).collect();
        assert!(!keys.is_empty(), "the cache is filled");
        keys.iter().any(|key| self.ask(&format!("GET {key}")).contains(bytes))
    }
}

#[cfg(feature = "redis")]
impl Drop for Cache {
    fn drop(&mut self) {
        self.ask("FLUSHDB");
    }
}

/// An index of the tests here.
#[cfg(feature = "opensearch")]
struct Index {
    engine: String,
    alias: String,
}

#[cfg(feature = "opensearch")]
impl Index {
    fn new() -> Self {
        let engine = std::env::var("HAPAX_TEST_OPENSEARCH_URL").expect("scripts/services up opensearch");
        Index { engine, alias: format!("t_{}", hapax::records::Uuid::now_v7().simple()) }
    }

    fn to(&self) -> String {
        format!("opensearch:{}/{}", self.engine, self.alias)
    }

    fn ask(&self, method: &str, path: &str) -> String {
        let host = self.engine.strip_prefix("http://").unwrap();
        let answer = crate::common::serve::request(host, method, path, &[], b"");
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.body
    }

    /// Whether any document has these bytes, deleted ones too.
    fn has(&self, bytes: &str) -> bool {
        self.ask("POST", &format!("/{}/_refresh", self.alias));
        self.ask("GET", &format!("/{}-*/_search?size=100&version=true", self.alias)).contains(bytes)
    }
}

#[cfg(feature = "opensearch")]
impl Drop for Index {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let indices = self.ask("GET", &format!("/{}-*/_alias", self.alias));
        let indices: serde_json::Value = serde_json::from_str(&indices).unwrap();
        indices.as_object().unwrap().keys().for_each(|index| drop(self.ask("DELETE", &format!("/{index}"))));
    }
}

#[test]
#[cfg(feature = "redis")]
fn what_is_erased_is_gone_from_the_cache() {
    let cache = Cache::new(13);
    erased_from(&cache.to(), |bytes| cache.has(bytes));
}

#[test]
#[cfg(feature = "opensearch")]
fn what_is_erased_is_gone_from_opensearch() {
    let index = Index::new();
    erased_from(&index.to(), |bytes| index.has(bytes));
}

/// A record of each of two tenants, in these projections.
fn projected_to(dir: &Path, to: &[&str]) -> String {
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]);
    let id = create(&server, "orders", ALICE, "one", OF_ALICE);
    create(&server, "orders", BOB, "one", OF_BOB);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    drop(server); // its pulses would keep the topic from ever being idle
    for to in to {
        run(dir, &["project", "run", "--data", "d", "--to", to, "--create", "--until-idle", "1"]).code(0);
    }
    id
}

/// A cache and an index: one that is not named is not forgotten, and each that is named is erased, looked at and explained.
#[test]
#[cfg(all(feature = "redis", feature = "opensearch"))]
fn t461_every_projection_is_erased_and_one_that_is_not_named_is_told() {
    let (cache, index) = (Cache::new(12), Index::new());
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let id = projected_to(dir, &[&cache.to(), &index.to()]);
    assert!(cache.has(OF_ALICE) && index.has(OF_ALICE));
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]); // it publishes the deletion
    let erase = |more: &[&str]| {
        let args = ["erase", "--data", "d", "--tenant", ALICE, "--yes", "--wait", "60s"];
        run(dir, &[&args[..], more].concat()).code(0)
    };
    let [one, both] =
        [index.to(), format!("{} {}", index.to(), cache.to())].map(|of| format!("projection.url={of}"));
    let report = erase(&["--set", &one, "--json"]).json();
    assert_eq!((&report["state"], place(&report, "projection")), (&json!("not-opened"), 1), "{report}");
    assert!(cache.has(OF_ALICE) && !index.has(OF_ALICE));
    let said = erase(&["--set", &one]).out;
    let scope = format!("projection_worker:cache:{}/12", cache.host);
    assert!(said.contains(&scope) && !said.contains("physically gone"), "{said}");
    let doctor = run(dir, &["doctor", "--data", "d", "--set", &both]).out;
    for said in [
        &format!("not gone yet: tenant {ALICE}"),
        "maxmemory-policy is noeviction",
        &format!("is an alias of {}", index.alias),
    ] {
        assert!(doctor.contains(said), "{said}: {doctor}");
    }
    let aggregate = format!("orders/{id}");
    let args =
        ["explain", "--tenant", ALICE, "--aggregate", &aggregate, "--data", "d", "--json", "--set", &both];
    let explained = run(dir, &args).code(0).json();
    let steps: Vec<_> =
        explained["steps"].as_array().unwrap().iter().filter(|step| step["layer"] == "projection").collect();
    assert!(steps.len() == 2 && steps[0]["name"] != steps[1]["name"], "{steps:?}");
    let stderr = run(dir, &["project", "status", "--data", "d", "--set", &both]).code(2).err;
    assert!(stderr.contains("say which with --to"), "{stderr}");

    // By a flag, as whoever projects with flags does; then there is nothing left.
    let report = erase(&["--projection", &index.to(), "--projection", &cache.to(), "--json"]).json();
    assert_eq!(report["state"], "gone", "{report}");
    assert!(!cache.has(OF_ALICE) && cache.has(OF_BOB) && index.has(OF_BOB));
    let report = erase(&["--set", &both, "--json"]).json();
    assert_eq!((&report["rows"], &report["state"]), (&json!(0), &json!("gone")), "{report}");
    // One that is no more is said to be so.
    let report = erase(&["--set", &one, "--ended", &scope, "--json"]).json();
    assert_eq!(report["state"], "gone", "{report}");
    assert!(report["out_of_reach"].to_string().contains(&scope), "{report}");
    drop(server);
}

/// What a restore has undone, and nobody knows any more; and a version of a record that is above every deletion of the
/// history.
fn ghosts_are_erased(to: &str, projection: &dyn hapax::projection::Projection, has: impl Fn(&str) -> bool) {
    use hapax::analytics::Change;
    use hapax::event::Origin;
    use hapax::records::{ModuleSlug, OfTenant, Payload, Record, Uuid};
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let id = projected_to(dir, &[to]);
    let (topic, at) = (hapax::Topic::new("events").unwrap(), hapax::Time::from_millis(1));
    let ghost = |tenant: &str, id: &str, seq, generation| {
        let secret = if tenant == ALICE { OF_ALICE } else { OF_BOB };
        let payload = Payload::new(format!(r#"{{"mail":"{secret}","is":"ghost"}}"#)).unwrap();
        let id = Uuid::try_parse(id).unwrap();
        let record = Record::new(ModuleSlug::new("orders").unwrap(), id, seq, payload, (at, at));
        let of = OfTenant { tenant: Uuid::try_parse(tenant).unwrap(), record };
        Change::of_record(of, generation, Origin::new(topic.clone(), 0, 0)).unwrap()
    };
    let unknown = "0190d3a0-5b7e-7c3a-9f51-0000000000ff";
    let ghosts = [ghost(ALICE, unknown, 3, 1), ghost(ALICE, &id, 1, 2), ghost(BOB, unknown, 3, 1)];
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(projection.apply(&ghosts)).unwrap();
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]); // it publishes the deletion
    let set = format!("projection.url={to}");
    let erase = |more: &[&str]| {
        let args = ["erase", "--data", "d", "--tenant", ALICE, "--json", "--wait", "60s", "--set", &set];
        run(dir, &[&args[..], more].concat()).code(0).json()
    };
    assert_eq!(place(&erase(&["--dry-run"]), "projection"), 2);
    let report = erase(&["--yes"]);
    assert_eq!((place(&report, "projection"), &report["state"]), (2, &json!("gone")), "{report}");
    assert!(!has(OF_ALICE) && has("ghost"), "those of another tenant stay");
    // It comes late once more, and is hidden by the deletion.
    runtime.block_on(projection.apply(&ghosts)).unwrap();
    assert!(!has(OF_ALICE));
    let report = erase(&["--yes"]);
    assert_eq!((&report["rows"], &report["state"]), (&json!(0), &json!("gone")), "{report}");
    // The same by name.
    let args = [
        "erase", "--data", "d", "--tenant", BOB, "--module", "orders", "--record", unknown, "--yes", "--set",
        &set,
    ];
    run(dir, &args).code(4); // of a record that no history has only the tenant can be erased
    drop(server);
}

#[test]
#[cfg(feature = "redis")]
fn t462_what_no_history_has_is_erased_from_the_cache() {
    use hapax::backend::redis::{CacheProjection, CacheSettings};
    let cache = Cache::new(11);
    let url = cache.to();
    let connect = CacheProjection::connect(
        url.strip_prefix("cache:").unwrap(),
        CacheSettings::default(),
        Duration::from_secs(60),
    );
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let projection = runtime.block_on(connect).unwrap();
    ghosts_are_erased(&url, &projection, |bytes| cache.has(bytes));
}

/// Somebody has written over markers: of a record, and of what no history has. As texts they are above every version.
#[test]
#[cfg(feature = "redis")]
fn t462_what_is_damaged_in_the_cache_is_erased_too() {
    let cache = Cache::new(10);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let known = projected_to(dir, &[&cache.to()]);
    let unknown = ["a", "b", "c"].map(|end| format!("0190d3a0-5b7e-7c3a-9f51-00000000000{end}"));
    for (id, damage) in [
        (&known, "SET MARKER mine"),
        (&unknown[0], "SET MARKER mine"),
        (&unknown[1], "SET MARKER 99999999999999999999P"),
        (&unknown[2], "LPUSH MARKER mine"),
    ] {
        let key = |of: &str| format!("hapax:cache:{{{ALICE}:orders:{id}}}:{of}");
        let exists = cache.ask(&format!("EXISTS {}", key("value"))).contains(":1");
        assert_eq!(exists, id == &known, "the keys of a record are these");
        let commands = format!("DEL MARKER\r\n{damage}\r\nSET {} {OF_ALICE}", key("value"));
        cache.ask(&commands.replace("MARKER", &key("version")));
    }
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]); // it publishes the deletion
    let set = format!("projection.url={}", cache.to());
    let args = ["erase", "--data", "d", "--tenant", ALICE, "--yes", "--json", "--wait", "60s", "--set", &set];
    let report = run(dir, &args).code(0).json();
    assert_eq!((place(&report, "projection"), &report["state"]), (4, &json!("gone")), "{report}");
    assert!(!cache.has(OF_ALICE) && cache.has(OF_BOB));
    drop(server);
}

#[test]
#[cfg(feature = "opensearch")]
fn t462_what_no_history_has_is_erased_from_opensearch() {
    use hapax::backend::opensearch::{MissingAlias, SearchProjection, SearchSettings};
    let index = Index::new();
    let url = index.to();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let connect = SearchProjection::connect(
        url.strip_prefix("opensearch:").unwrap(),
        SearchSettings::default(),
        MissingAlias::Create,
    );
    let projection = runtime.block_on(connect).unwrap();
    ghosts_are_erased(&url, &projection, |bytes| index.has(bytes));
}
