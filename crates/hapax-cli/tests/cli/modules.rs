//! `hapax modules`, as an owner types it.

#![allow(missing_docs, clippy::unwrap_used)]

use crate::common::run;

#[test]
fn modules_are_made_once_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let missing = run(dir, &["modules", "ls"]).code(3);
    assert!(missing.err.contains("modules create SLUG"), "{}", missing.err);
    assert!(!dir.join("hapax-data").exists(), "looking makes nothing");
    let made = run(dir, &["modules", "create", "orders"]).code(0);
    assert!(made.out.contains("POST /v1/modules/orders/records"), "{}", made.out);
    let again = run(dir, &["modules", "create", "orders"]).code(0);
    assert!(again.out.contains("there already"), "{}", again.out);
    assert_eq!(run(dir, &["--json", "modules", "create", "bills"]).code(0).json()["made"], true);
    let audit = run(dir, &["audit", "ls", "--action", "modules.", "--json"]).code(0).json()["audit"].clone();
    assert_eq!((audit.as_array().unwrap().len(), &audit[0]["target"]), (3, &"bills".into()), "{audit}");
    assert_eq!(audit[0]["action"], "modules.create");
    let listed = run(dir, &["modules", "ls"]).code(0);
    let rows: Vec<_> =
        listed.out.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(rows, [["bills", "0", "protected"], ["orders", "0", "protected"]]);
    let json = run(dir, &["--json", "modules", "ls"]).code(0);
    assert!(json.out.lines().next().unwrap().contains(r#""module":"bills""#), "{}", json.out);
    let grants = run(dir, &["modules", "grants", "--app-role", "app"]).code(2);
    assert!(grants.err.contains("SQLite has no roles"), "{}", grants.err);
}

#[test]
fn bad_names_and_places_are_refused_with_a_sentence_and_make_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for slug in ["Orders", "1st", "a-b", "x; drop schema hapax", "../x", &"a".repeat(49), "é"] {
        let ran = run(dir, &["modules", "create", slug]).code(4);
        assert!(ran.err.contains("1 to 48 characters a-z"), "{slug}: {}", ran.err);
    }
    for (args, says) in [
        (&["--journal", "memory:", "modules", "create", "a"][..], "SQLite or PostgreSQL"),
        (&["--journal", "dir:x", "modules", "create", "a"], "SQLite or PostgreSQL"),
        (&["--set", "keys.url=sqlite:other.db", "modules", "create", "a"], "leave keys.url unset"),
        (&["modules", "grants"], "--app-role"),
        (&["--set", "records.accept_bypass=perhaps", "modules", "ls"], "true or false"),
    ] {
        let ran = run(dir, args).code(2);
        assert!(ran.err.contains(says), "{args:?}: {}", ran.err);
    }
    assert!(std::fs::read_dir(dir).unwrap().next().is_none(), "nothing was made");
}

/// The three roles of PostgreSQL, from the first command to the first request.
#[test]
#[cfg(feature = "postgres")]
fn the_owner_makes_modules_and_grants_the_app_its_rights() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    let sql =
        run(dir, &[&place.as_owner()[..], &["modules", "grants", "--app-role", &place.app]].concat()).code(0);
    assert!(
        sql.out.contains(&format!("grant select, insert, update, delete on module_{}", place.slug)),
        "{}",
        sql.out
    );
    let hostile =
        run(dir, &[&place.as_owner()[..], &["modules", "grants", "--app-role", "x; drop role y"]].concat());
    assert!(hostile.code(2).err.contains("cannot be used as a role"));
    let listed = run(dir, &[&place.as_owner()[..], &["--json", "modules", "ls"]].concat()).code(0).json();
    assert_eq!((listed["records"].as_u64(), listed["problems"].as_array().unwrap().len()), (Some(0), 0));
    // The keeper counts the records of all tenants, and the app does not.
    let as_keeper = run(dir, &[&place.as_keeper()[..], &["--json", "modules", "ls"]].concat()).code(0).json();
    assert_eq!(as_keeper["records"], 0, "{as_keeper}");
    let as_app = run(dir, &[&place.as_app()[..], &["--json", "modules", "ls"]].concat()).code(0).json();
    assert!(as_app["records"].is_null(), "{as_app}");
    place.owner_runs(&format!("alter table module_{}.records no force row level security", place.slug));
    let bad = run(dir, &[&place.as_owner()[..], &["modules", "ls"]].concat()).code(1);
    assert!(bad.out.contains("row security is not forced") && bad.err.contains("1 module is"), "{}", bad.err);
}

/// The roles and the tables are there, but nobody has run the grants: the server says which commands print them.
#[test]
#[cfg(feature = "postgres")]
fn t394_a_role_without_rights_is_told_which_commands_print_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    place.owner_runs(&format!("revoke all on schema {} from {}", place.schema, place.app));
    let refusal = place.refused(&[]).err;
    assert!(refusal.contains("hapax modules grants") && refusal.contains("hapax ledger grants"), "{refusal}");
    let of = |url: &str, role: &str| run(dir, &["ledger", "grants", "--ledger", url, "--app-role", role]);
    let sql = of("postgres://localhost/app", "app").code(0).out;
    assert!(sql.contains("grant usage on schema hapax to app;"), "{sql}");
    assert!(of("postgres://localhost/app", "app; drop").code(2).out.is_empty());
    assert!(of("sqlite:ledger.db", "app").code(2).err.contains("PostgreSQL"));
}

/// The roles are there, and nothing else: the app is told what the owner runs, and that is all that it takes.
#[test]
#[cfg(feature = "postgres")]
fn t543_the_first_start_with_roles_names_what_the_owner_runs() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut place = crate::common::roles::Postgres::new(dir);
    place.schema.push_str("_empty");
    place.slug.push_str("_too");
    let ledger = [
        "--ledger",
        &place.app_url,
        "--set",
        &format!("ledger.schema={}", place.schema),
        "--set",
        "ledger.migrate=check",
    ];
    let as_owner = |args: &[&str]| {
        let schema = format!("ledger.schema={}", place.schema);
        let journal = place.as_owner();
        run(dir, &[&journal[..], &["--ledger", &place.owner_url, "--set", &schema], args].concat())
            .code(0)
            .out
    };
    let roles = ["--app-role", &place.app, "--maintenance-role", "hapax_test_maintenance"];
    let refusal = place.refused(&ledger).err;
    let named = |refusal: &str, make: &str, grants: &str| {
        assert!(refusal.contains(make) && refusal.contains(grants), "{refusal}");
        assert!(!refusal.contains("`auto`") && refusal.contains("owner's role"), "{refusal}");
    };
    named(&refusal, "`hapax ledger init`", "`hapax ledger grants`");
    as_owner(&["ledger", "init"]);
    place.owner_runs(&as_owner(&["ledger", "grants", "--app-role", &place.app]));

    named(&place.refused(&ledger).err, "`hapax modules create SLUG`", "`hapax modules grants`");
    let check = ["--set", "journal.migrate=check", "keys", "--keys", &place.app_url, "ls"];
    let absent = run(dir, &[&place.as_app()[..], &check].concat()).err;
    assert!(absent.contains("keys init`") && !absent.contains("`auto`"), "{absent}");
    as_owner(&[&["modules", "create", &place.slug], &roles[..]].concat());
    place.owner_runs(&as_owner(&[&["modules", "grants"], &roles[..]].concat()));
    let server = place.start_with(&ledger);
    server.until_ready();
}
