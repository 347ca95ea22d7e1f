//! `hapax doctor` on what a server writes to and reads from: journal, keys, records and the read model.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use hapax::Topic;
use hapax::analytics::{Block, ReadModel as _};
use hapax::backend::sqlite::SqliteReadModel;
use hapax::bus::Partition;
use serde_json::Value;

use crate::common::{Ran, port, run, run_with};

/// A ledger and a bus, so that nothing else is to be complained of.
fn prepared(dir: &Path) {
    run(dir, &["ledger", "init"]).code(0);
    run_with(dir, &["produce", "--topic", "orders", "--create", "1"], b"").code(0);
}

fn doctor(dir: &Path, more: &[&str]) -> Ran {
    run(dir, &[&["doctor", "--json"], more].concat())
}

/// The findings of a check, each with its level.
fn findings(ran: &Ran, check: &str) -> Vec<(String, String)> {
    let all = ran.json()["findings"].as_array().unwrap().clone();
    let text = |finding: &Value, of: &str| finding[of].as_str().unwrap().to_owned();
    let of_check = all.iter().filter(|finding| finding["check"] == check);
    of_check.map(|finding| (text(finding, "level"), text(finding, "message"))).collect()
}

#[track_caller]
fn says(ran: &Ran, check: &str, level: &str, parts: &[&str]) {
    let found = findings(ran, check);
    let is =
        |(of, message): &(String, String)| of == level && parts.iter().all(|part| message.contains(part));
    assert!(found.iter().any(is), "{check} {level} {parts:?}: {found:?}");
}

#[test]
fn doctor_looks_at_what_a_server_uses() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepared(dir);
    // What nobody has used yet is not a fault, and is not made.
    let before = doctor(dir, &[]).code(0);
    for check in ["journal", "keys", "records", "read model"] {
        says(&before, check, "fine", &["yet", "`hapax"]);
    }
    assert!(!dir.join("hapax-data/journal.db").exists() && !dir.join("hapax-data/reads.db").exists());
    run(dir, &["modules", "create", "orders"]).code(0);
    let made = doctor(dir, &[]).code(0);
    says(&made, "journal", "fine", &["takes writes", "sqlite"]);
    says(&made, "keys", "warning", &["there is no store of keys", "`hapax serve`"]);
    says(&made, "records", "fine", &["module orders is protected"]);
    run(dir, &["keys", "init"]).code(0);
    says(&doctor(dir, &[]).code(0), "keys", "fine", &["takes writes", "sqlite"]);
    // A read model of which nothing is known, and one that is in step.
    let model = SqliteReadModel::open(dir.join("hapax-data/reads.db")).unwrap();
    says(&doctor(dir, &[]).code(0), "read model", "warning", &["nothing is known", "`hapax serve`"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pulse = |seconds: u64| {
        runtime.block_on(async {
            let partition = Partition { topic: Topic::new("events").unwrap(), number: 0 };
            let mut block = Block::new(partition, 1, 0..1);
            block.pulse = Some(model.now().await.unwrap().plus(std::time::Duration::from_secs(seconds)));
            model.apply(&[block]).await.unwrap();
        });
    };
    pulse(0);
    // Whether that is long ago is up to the machine.
    let in_step = findings(&doctor(dir, &[]).code(0), "read model");
    assert!(in_step[0].1.contains("complete up to"), "{in_step:?}");
    pulse(3600);
    says(&doctor(dir, &[]).code(0), "read model", "fine", &["complete up to"]);
    // Somebody has removed what protects records.
    let file = rusqlite::Connection::open(dir.join("hapax-data/journal.db")).unwrap();
    let sql = "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = 'hapax_record' LIMIT 1";
    let trigger: String = file.query_row(sql, [], |row| row.get(0)).unwrap();
    file.execute_batch(&format!("DROP TRIGGER {trigger}")).unwrap();
    let refused = doctor(dir, &[]).code(1);
    says(&refused, "records", "refusal", &["module orders", &trigger, "docs/records.md"]);
    let table = run(dir, &["doctor"]).code(1);
    assert!(table.out.contains("refusal") && table.out.contains(&trigger), "{}", table.out);
    // What does not answer is told apart from what is wrong.
    let away = doctor(dir, &["--journal", "postgres://127.0.0.1:1/x"]).code(3);
    for check in ["journal", "keys", "records"] {
        says(&away, check, "unreachable", &[]);
    }
}

/// Each file that has payloads or answers is named once, and only if others can read it.
#[test]
#[cfg(unix)]
fn doctor_warns_of_files_that_everybody_can_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepared(dir);
    run(dir, &["modules", "create", "orders"]).code(0);
    let keys = ["--set", "keys.url=sqlite:hapax-data/keys.db"]; // in a file of their own
    run(dir, &[&["keys", "init"], &keys[..]].concat()).code(0);
    SqliteReadModel::open(dir.join("hapax-data/reads.db")).unwrap();
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let files = ["ledger.db", "journal.db", "keys.db", "reads.db", "bus.db"]
        .map(|file| dir.join("hapax-data").join(file));
    let warned = || {
        let mut found = findings(&doctor(dir, &keys).code(0), "permissions");
        found.retain(|(level, message)| {
            level == "warning" && message.contains("every user of this machine can read")
        });
        found
    };
    for path in [dir, &dir.join("hapax-data")] {
        mode(path, 0o755);
    }
    assert_eq!(warned(), []);
    for file in &files {
        mode(file, 0o644);
        let found = warned();
        assert_eq!(found.len(), 1, "{}: {found:?}", file.display());
        assert!(found[0].1.contains(file.file_name().unwrap().to_str().unwrap()), "{found:?}");
        mode(file, 0o600);
    }
    for file in &files {
        mode(file, 0o644);
    }
    assert_eq!(warned().len(), files.len());
    mode(&dir.join("hapax-data"), 0o700);
    assert_eq!(warned(), [], "nobody gets to them");
}

#[test]
#[cfg(feature = "postgres")]
fn doctor_sees_what_was_changed_in_postgres() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    prepared(dir);
    let flags = place.serve();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let sound = doctor(dir, &flags).code(0);
    says(&sound, "journal", "fine", &["takes writes", "postgres"]);
    says(&sound, "keys", "fine", &["takes writes", "postgres"]);
    says(&sound, "roles", "fine", &["keys.url"]);
    says(&sound, "roles", "fine", &["keys.maintenance_url"]);
    says(&sound, "row security", "fine", &["keys"]);
    says(&sound, "records", "fine", &[&place.slug, "is protected"]);
    says(&sound, "read model", "fine", &["analytics.url is unset"]);
    // What one statement changes.
    let table = format!("module_{}.records", place.slug);
    place.owner_runs(&format!(
        "alter table {table} no force row level security; alter table {table} replica identity default; \
         alter table {table} disable trigger records_guard; alter publication hapax_records drop table {table}"
    ));
    let changed = doctor(dir, &flags).code(1);
    let problems = [
        "row security is not forced",
        "replica identity",
        "records_guard",
        "hapax_records",
        "docs/records.md",
    ];
    says(&changed, "records", "refusal", &problems);
    place.owner_runs(&format!("alter table {}.keys no force row level security", place.schema));
    says(&doctor(dir, &flags).code(1), "row security", "refusal", &["keys", "not forced"]);
    // A role that row security does not bind.
    let admin = place.owner_url.replace("hapax_test_owner", "postgres");
    let as_admin = ["--journal", &admin, "--set", place.schema_flag()];
    says(&doctor(dir, &as_admin).code(1), "roles", "refusal", &["bypasses row security", "another"]);
    let accepted = doctor(dir, &[&as_admin[..], &["--set", "records.accept_bypass=true"]].concat());
    says(&accepted, "roles", "warning", &["bypasses row security", "records.accept_bypass"]);
}

/// A Valkey of a test's own. It ends when this is dropped.
#[cfg(feature = "redis")]
struct Valkey {
    child: std::process::Child,
    port: u16,
    _dir: tempfile::TempDir,
}

#[cfg(feature = "redis")]
impl Valkey {
    /// Starts one with the binary of the server that is up.
    fn start(args: &[&str]) -> Self {
        let url = std::env::var("HAPAX_TEST_VALKEY_URL").unwrap();
        let info = Valkey::ask(url.strip_prefix("redis://").unwrap(), "INFO server").unwrap();
        let binary = info.lines().find_map(|line| line.strip_prefix("executable:")).unwrap().trim();
        let dir = tempfile::tempdir().unwrap();
        let port = port::free();
        let child = std::process::Command::new(binary)
            .args([
                "--bind",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--save",
                "",
                "--appendonly",
                "yes",
                "--dir",
            ])
            .arg(dir.path())
            .args(args)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let server = Valkey { child, port, _dir: dir };
        let address = format!("127.0.0.1:{port}");
        crate::common::consume::wait_until("Valkey answers", || {
            Valkey::ask(&address, "PING").is_ok_and(|answer| answer.contains("PONG"))
        });
        server
    }

    fn ask(address: &str, command: &str) -> std::io::Result<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(address)?;
        write!(stream, "{command}\r\nQUIT\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

#[cfg(feature = "redis")]
impl Drop for Valkey {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// A cache forgets versions before their time if its server evicts keys: the doctor refuses it, and says what to set.
#[test]
#[cfg(feature = "redis")]
fn t320_a_cache_that_evicts_is_refused_by_the_doctor() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepared(dir);
    let (evicts, keeps) = (Valkey::start(&["--maxmemory-policy", "allkeys-lru"]), Valkey::start(&[]));
    let of = |server: &Valkey| format!("projection.url=cache:redis://127.0.0.1:{}", server.port);
    let refused = run(dir, &["doctor", "--set", &of(&evicts)]).code(1);
    assert!(
        refused.out.contains("maxmemory-policy is allkeys-lru") && refused.out.contains("set noeviction"),
        "{}",
        refused.out
    );
    let fine = run(dir, &["doctor", "--set", &of(&keeps)]).code(0);
    assert!(fine.out.contains("maxmemory-policy is noeviction"), "{}", fine.out);
}
