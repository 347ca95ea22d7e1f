//! `hapax token` and `hapax audit`, as an operator types them.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use hapax::access::{Authentication, Role};

use crate::common::{Ran, hapax, run};

/// What a store says about a token, by the library.
fn said(dir: &Path, url: &str, token: &str) -> Authentication {
    let file = url.strip_prefix("sqlite:").map(|file| format!("sqlite:{}", dir.join(file).display()));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = hapax::open::access(&file.unwrap_or_else(|| url.to_owned())).await.unwrap();
        store.authenticate(token).await.unwrap()
    })
}

const EMBEDDED: &str = "sqlite:hapax-data/journal.db";

/// The one line of standard output, which is a token.
fn secret(ran: &Ran) -> String {
    let token = ran.out.strip_suffix('\n').unwrap();
    assert!(token.starts_with("hpx_") && token.len() == 59 && !token.contains('\n'), "{}", ran.out);
    assert!(!ran.err.contains(&token[21..]), "the secret is on standard output only: {}", ran.err);
    token.to_owned()
}

#[test]
fn a_token_is_made_listed_rotated_and_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let create =
        ["token", "create", "--name", "the shop", "--role", "admin", "--tenant", "acme", "--scope", "mailer"];
    let ran = run(dir, &[&create[..], &["--scope", "billing", "--expires", "90d"]].concat()).code(0);
    let token = secret(&ran);
    assert!(ran.err.contains("only now") && ran.err.contains(&token[4..20]), "{}", ran.err);
    let Authentication::Granted { grant, left } = said(dir, EMBEDDED, &token) else { panic!("it is good") };
    assert_eq!((grant.role, grant.tenant.unwrap().to_string()), (Role::Admin, "acme".to_owned()));
    let days = left.unwrap().as_secs() / 86_400;
    assert!((89..=90).contains(&days), "{days}");

    let listed = run(dir, &["token", "ls", "--json"]).code(0);
    assert!(!listed.out.contains(&token[21..]));
    let entry = listed.json()["tokens"][0].clone();
    assert_eq!(entry["scopes"], serde_json::json!(["billing", "mailer"]));
    assert_eq!((&entry["name"], &entry["state"]), (&"the shop".into(), &"live".into()));
    let table = run(dir, &["token", "ls"]).code(0).out;
    assert!(table.contains("billing mailer") && table.contains("acme"), "{table}");

    let ran = run(dir, &["token", "rotate", "the shop", "--overlap", "1h", "--reason", "yearly"]).code(0);
    let next = secret(&ran);
    assert_eq!(&next[..21], &token[..21], "the same id");
    for good in [&token, &next] {
        assert!(matches!(said(dir, EMBEDDED, good), Authentication::Granted { .. }));
    }
    let last = secret(&run(dir, &["token", "rotate", &token[4..20]]).code(0));
    assert_eq!(said(dir, EMBEDDED, &next), Authentication::Unknown);
    let ran = run(dir, &["token", "revoke", &token[4..20], "--json", "--reason", "found in a log"]).code(0);
    assert_eq!(ran.json()["state"], "revoked");
    assert_eq!(said(dir, EMBEDDED, &last), Authentication::Revoked);
    run(dir, &["token", "revoke", &token[4..20]]).code(0);
    assert_eq!(
        run(dir, &["token", "ls", "--live", "--json"]).code(0).json()["tokens"],
        serde_json::json!([])
    );
    let ran = run(dir, &["token", "rotate", &token[4..20]]).code(4);
    assert!(ran.out.is_empty() && ran.err.contains("revoked"), "{}", ran.err);

    let audit = run(dir, &["audit", "ls", "--json"]).code(0).json();
    let rows = audit["audit"].as_array().unwrap();
    let seen: Vec<_> =
        rows.iter().map(|row| (row["action"].as_str().unwrap(), row["reason"].as_str().unwrap())).collect();
    assert_eq!(
        seen,
        [
            ("token.revoke", "found in a log"),
            ("token.rotate", ""),
            ("token.rotate", "yearly"),
            ("token.create", "")
        ]
    );
    assert!(rows.iter().all(|row| row["who"] == "tester" && row["target"] == token[4..20]));
    let page =
        run(dir, &["audit", "ls", "--json", "--limit", "1", "--action", "token.rotate"]).code(0).json();
    let next = page["next_before"].as_i64().unwrap().to_string();
    let page = run(dir, &["audit", "ls", "--action", "token.rotate", "--before", &next]).code(0);
    assert!(page.out.contains("yearly") && !page.out.contains("found in a log"), "{}", page.out);
}

#[test]
fn a_missing_store_is_a_sentence_and_looking_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for args in [&["token", "ls"][..], &["token", "revoke", "x"], &["token", "rotate", "x"], &["audit", "ls"]]
    {
        let ran = run(dir, &[args, &["--data", "d"]].concat()).code(3);
        assert!(ran.err.contains("there are no tokens at d/journal.db"), "{}", ran.err);
        assert!(ran.err.contains("`hapax --data d token create --name NAME` makes one"), "{}", ran.err);
    }
    assert!(std::fs::read_dir(dir).unwrap().next().is_none(), "looking makes nothing");
    // A journal without tokens is another thing.
    let mut events = hapax(dir, &["journal", "append", "--aggregate", "order-1"]);
    events.output().unwrap();
    let ran = run(dir, &["token", "ls"]).code(3);
    assert!(
        ran.err.starts_with("hapax: there is no API token in")
            && ran.err.contains("token create --name NAME"),
        "{}",
        ran.err
    );
    let ran = run(dir, &["token", "create", "--name", "x", "--set", "keys.url=memory:"]).code(2);
    assert!(ran.out.is_empty() && ran.err.contains("end with this command"), "{}", ran.err);
    let away = ["--set", "keys.url=postgres://127.0.0.1:1/x", "--set", "ledger.acquire_timeout_ms=500"];
    let ran = run(dir, &[&["token", "create", "--name", "x"], &away[..]].concat()).code(3);
    assert!(ran.out.is_empty(), "no secret for a token that is not there: {}", ran.out);
}

#[test]
fn mistakes_about_tokens_are_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let token = secret(&run(dir, &["token", "create", "--name", "shop"]).code(0));
    run(dir, &["token", "create", "--name", "shop"]).code(0);
    for (args, code, says) in [
        (&["token", "revoke", &token][..], 4, "whole token"),
        (&["token", "revoke", "shop"], 4, "2 live tokens"),
        (&["token", "revoke", "nobody"], 4, "`hapax token ls`"),
        (&["token", "create", "--name", " "], 4, "1 to 255 characters"),
        (&["token", "create", "--name", "x", "--role", "root"], 2, "read, write, admin"),
        (&["token", "create", "--name", "x", "--expires", "soon"], 2, "7d"),
        (&["token", "create", "--name", "x", "--tenant", ""], 2, "tenant"),
        (&["token", "create", "--role", "read"], 2, "--name"),
        (&["audit", "ls", "--limit", "0"], 2, "--limit"),
    ] {
        let ran = run(dir, args).code(code);
        assert!(ran.out.is_empty() && ran.err.contains(says), "{args:?}: {}", ran.err);
        assert!(!ran.err.contains(&token[21..]), "{}", ran.err);
    }
    let mut nobody = hapax(dir, &["token", "create", "--name", "x"]);
    let ran: Ran = nobody.env_remove("USER").env_remove("LOGNAME").output().unwrap().into();
    ran.code(0); // a plain container names nobody
    assert!(run(dir, &["token", "create", "--name", "x", "--by", " "]).code(2).err.contains("--by is blank"));
    let audit = run(dir, &["audit", "ls", "--json"]).code(0).out;
    let number =
        String::from_utf8(std::process::Command::new("id").arg("-u").output().unwrap().stdout).unwrap();
    assert!(audit.contains(&format!("\"uid {}\"", number.trim())), "{audit}");
    assert_eq!(run(dir, &["token", "ls", "--json"]).code(0).json()["tokens"].as_array().unwrap().len(), 3);
}

#[test]
fn a_generated_token_is_stored_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let one = secret(&run(dir, &["token", "generate"]).code(0));
    let two = run(dir, &["token", "generate", "--json"]).code(0).json();
    assert_ne!(two["token"], one);
    assert_eq!(two["id"].as_str().unwrap().len(), 16);
    assert!(std::fs::read_dir(dir).unwrap().next().is_none());
}

#[test]
fn tokens_live_in_postgresql_beside_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let url = std::env::var("HAPAX_TEST_POSTGRES_URL").expect("PostgreSQL is up");
    let schema = format!("cli_{}", hapax::EventId::now_v7().as_str().replace('-', ""));
    let place = ["--set", &format!("keys.url={url}"), "--set", &format!("journal.schema={schema}")];
    let ran = run(dir, &[&["token", "ls"], &place[..]].concat()).code(3);
    assert!(ran.err.contains("`hapax token create` makes them"), "{}", ran.err);
    let ran = run(dir, &[&["token", "create", "--name", "shop", "--json"], &place[..]].concat()).code(0);
    assert_eq!(ran.json()["role"], "write");
    let listed = run(dir, &[&["token", "ls", "--json"], &place[..]].concat()).code(0).json();
    assert_eq!(listed["tokens"][0]["id"], ran.json()["id"]);
    let audit = run(dir, &[&["audit", "ls", "--json"], &place[..]].concat()).code(0).json();
    assert_eq!(audit["audit"][0]["action"], "token.create");
}
