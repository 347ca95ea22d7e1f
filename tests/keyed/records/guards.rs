//! What protects the tables of records in PostgreSQL: the triggers, the roles, and how changes are noticed.

use std::time::Duration;

use hapax::Error;
use hapax::access::{Access as _, Actor, AuditNote, AuditSweep};
use hapax::backend::Migrate;
use hapax::backend::postgres::{PgAccess, PgAccessSettings, PgJournal, PgModules, PgRecords};
use hapax::records::{Create, List, Modules as _, Records as _, Roles, Update};
use hapax::testing::records::{RecordsHarness as _, create, payload, tenant};

use super::{
    APP, MAINTENANCE, OWNER, PgRecordsHarness, fresh_slug, pg_journal_settings, pool_of, raw,
    records_settings, tenant_is,
};
use crate::support::postgres::{ask, fresh_schema, run};

/// The seq is the version of every read model: nothing may be written past it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t146_no_write_gets_past_the_seq_and_the_journal() {
    let harness = PgRecordsHarness::new().await;
    let records = harness.open().await;
    let of = Some(tenant(0xa));
    let record = records.create(&create(&harness, r#"{"n":1}"#).tenant(of.clone())).await.unwrap();
    let table = format!("module_{}.records", harness.slug);
    let statement = tenant_is(0xa);
    for (role, pool) in [(OWNER, &harness.owner), (APP, &harness.app)] {
        for (sql, says) in [
            (format!("update {table} set payload = '{{}}'"), "raise its seq"),
            (format!("update {table} set seq = seq"), "raise its seq"),
            (format!("update {table} set seq = 0"), "raise its seq"),
            (format!("update {table} set seq = seq + 1"), "with its event"),
            (format!("update {table} set seq = 9, id = gen_random_uuid()"), "keeps its tenant"),
            (format!("delete from {table}"), "append it first"),
            (
                format!(
                    "insert into {table} values (gen_random_uuid(), '{}', '{{}}', 1, now(), now())",
                    tenant(0xa)
                ),
                "with its event",
            ),
        ] {
            let mut tx = pool.begin().await.unwrap();
            sqlx::raw_sql(sqlx::AssertSqlSafe(statement.clone())).execute(&mut *tx).await.unwrap();
            let refused = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone())).execute(&mut *tx).await;
            let refused = refused.expect_err(&sql).to_string();
            assert!(refused.contains(says), "{role}: {sql}: {refused}");
        }
    }
    assert_eq!(raw(&harness.owner, &[&format!("truncate {table}")]).await.unwrap_err(), "P0001");
    // A deleted id that comes back goes on, also by hand.
    let delete = hapax::records::Delete::new(harness.slug.clone(), record.id, 1).tenant(of.clone());
    assert_eq!(records.delete(&delete).await.unwrap().seq, 2);
    for seq in [1, 2, 3] {
        let again = format!(
            "insert into {table} values ('{}', '{}', '{{}}', {seq}, now(), now())",
            record.id,
            tenant(0xa)
        );
        assert_eq!(raw(&harness.app, &[&statement, &again]).await.unwrap_err(), "P0001", "seq {seq}");
    }
    assert_eq!(records.create(&create(&harness, "{}").id(record.id).tenant(of)).await.unwrap().seq, 3);
}

/// An event serves one write: the one of its kind, in its transaction. Otherwise a write could take place
/// without an event, or under a seq that was used before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t200_only_an_event_of_the_same_transaction_and_kind_permits_a_write() {
    let harness = PgRecordsHarness::new().await;
    let (app, s) = (&harness.app, &harness.schema);
    let record = harness.open().await.create(&create(&harness, r#"{"n":1}"#)).await.unwrap();
    let table = format!("module_{}.records", harness.slug);
    let nobody = "select set_config('hapax.tenant', '00000000-0000-0000-0000-000000000000', true)";
    let append = |kind: &str| {
        format!(
            "select * from {s}.append_in('{}/{}', null, jsonb_build_array(jsonb_build_object('id', gen_random_uuid(), 'kind', '{kind}')))",
            harness.slug, record.id
        )
    };
    let head =
        format!("(select last from {s}.journal_head where aggregate = '{}/{}')", harness.slug, record.id);
    let update = format!("update {table} set payload = '{{}}', seq = {head}");
    let delete = format!("delete from {table}");
    let refused = async |statements: &[&str]| {
        let statements = [&[nobody][..], statements].concat();
        assert_eq!(raw(app, &statements).await.expect_err("it is refused"), "P0001", "{statements:?}");
    };
    // An event of an earlier transaction permits nothing, whatever its kind.
    for kind in ["order.paid", "record.created", "record.updated", "record.deleted"] {
        raw(app, &[&append(kind)]).await.unwrap();
        refused(&[&update]).await;
        refused(&[&delete]).await;
    }
    // Nor does one of another kind, or one that a savepoint took back.
    for (kind, write) in [
        ("order.paid", &update),
        ("record.created", &update),
        ("record.deleted", &update),
        ("order.paid", &delete),
        ("record.created", &delete),
        ("record.updated", &delete),
    ] {
        refused(&[&append(kind), write]).await;
    }
    let (updated, deleted) = (append("record.updated"), append("record.deleted"));
    refused(&["savepoint a", &updated, "rollback to a", &update]).await;
    refused(&[&updated, &append("order.paid"), &update]).await;
    refused(&[&updated, &format!("update {table} set seq = {head} - 1")]).await;
    refused(&[&updated, &format!("update {table} set seq = {head} + 1")]).await;
    // Its own event does, also under savepoints: once.
    let own = [nobody, "savepoint a", &updated, "savepoint b", &update, "release b", "release a"];
    raw(app, &own).await.unwrap();
    refused(&["savepoint a", &updated, "release a", &update, &update]).await;
    // Nobody else's, though it was committed after this transaction began to write.
    let mut open = app.begin().await.unwrap();
    sqlx::raw_sql("create temporary table begun (n int); insert into begun values (1)")
        .execute(&mut *open)
        .await
        .unwrap();
    raw(app, &[&updated]).await.unwrap();
    sqlx::raw_sql(nobody).execute(&mut *open).await.unwrap();
    let late = sqlx::raw_sql(sqlx::AssertSqlSafe(update.clone())).execute(&mut *open).await.unwrap_err();
    assert!(late.to_string().contains("with its event"), "{late}");
    drop(open);
    raw(app, &[nobody, "savepoint a", &deleted, "release a", &delete]).await.unwrap();
    assert_eq!(raw(app, &[nobody, &format!("select * from {table}")]).await.unwrap(), Vec::<String>::new());
}

/// A seq goes back if its aggregate's head does, and a head that is gone locks the aggregate up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t200_the_head_of_an_aggregate_only_rises() {
    let harness = PgRecordsHarness::new().await;
    let records = harness.open().await;
    let record = records.create(&create(&harness, "{}")).await.unwrap();
    let heads = format!("{}.journal_head", harness.schema);
    for pool in [&harness.app, &harness.owner] {
        for sql in [
            format!("update {heads} set last = 0"),
            format!("update {heads} set last = last"),
            format!("update {heads} set last = last + 7; update {heads} set last = last - 7"),
            format!("update {heads} set aggregate = aggregate || 'x', last = last + 1"),
            format!("delete from {heads}"),
            format!("update {heads} set last = last + 1; delete from {heads}"),
        ] {
            assert_eq!(raw(pool, &[&sql]).await.expect_err(&sql), "P0001", "{sql}");
        }
    }
    // One that somebody raised by hand is followed, and permits no write by itself.
    raw(&harness.app, &[&format!("update {heads} set last = 5")]).await.unwrap();
    let update = format!("update module_{}.records set seq = 5", harness.slug);
    let nobody = "select set_config('hapax.tenant', '00000000-0000-0000-0000-000000000000', true)";
    assert_eq!(raw(&harness.app, &[nobody, &update]).await.unwrap_err(), "P0001");
    let change = Update::new(harness.slug.clone(), record.id, 1, payload("{}"));
    assert_eq!(records.update(&change).await.unwrap().seq, 6);
}

/// `modules ls` sees each protection that was taken away or weakened, and a service does not serve such a
/// module, until it is mended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::too_many_lines)] // a table of what can be taken away
async fn t147_a_module_whose_protection_was_changed_is_named_and_refused() {
    let harness = PgRecordsHarness::new().await;
    let t = format!("module_{}.records", harness.slug);
    let s = &harness.schema;
    let guard = |when: &str, of: &str| {
        format!(
            "drop trigger records_guard on {t}; create trigger records_guard before {of} on {t} for each row {when} \
             execute function {s}.record_guard(); alter table {t} enable always trigger records_guard"
        )
    };
    let function = async |name: &str| {
        ask::<String>(&harness.owner, format!("select pg_get_functiondef('{s}.{name}()'::regprocedure)"))
            .await
    };
    let (of_guard, of_tenant) = (function("record_guard").await, function("record_tenant").await);
    let replaced = |made: &str, what: &str, with: &str| {
        assert!(made.contains(what), "{made}");
        made.replacen(what, with, 1)
    };
    let records = harness.open().await;
    let record = records.create(&create(&harness, "{}")).await.unwrap();
    let of_all = format!("select tenant_id = {}.record_tenant()", harness.schema).replace("select ", "");
    for (away, back, says) in [
        (
            format!("alter table {t} no force row level security"),
            format!("alter table {t} force row level security"),
            "not forced",
        ),
        (
            format!("alter table {t} disable row level security"),
            format!("alter table {t} enable row level security"),
            "not forced",
        ),
        (
            format!("alter policy records_tenant on {t} using (true)"),
            format!("alter policy records_tenant on {t} using ({of_all})"),
            "policies",
        ),
        (
            format!("alter policy records_maintenance on {t} to public"),
            format!("alter policy records_maintenance on {t} to {OWNER}, {MAINTENANCE}"),
            "policies",
        ),
        (
            format!("alter policy records_maintenance on {t} to {OWNER}, {APP}"),
            format!("alter policy records_maintenance on {t} to {OWNER}, {MAINTENANCE}"),
            "policies",
        ),
        (
            format!("alter policy records_tenant on {t} to {APP}"),
            format!("alter policy records_tenant on {t} to public"),
            "policies",
        ),
        (format!("create policy more on {t} using (true)"), format!("drop policy more on {t}"), "policies"),
        (
            format!("alter table {t} disable trigger records_guard"),
            format!("alter table {t} enable always trigger records_guard"),
            "trigger",
        ),
        (
            format!("alter table {t} disable trigger records_no_truncate"),
            format!("alter table {t} enable always trigger records_no_truncate"),
            "trigger",
        ),
        (
            format!("alter table {t} enable trigger records_guard"), // not for a replication role
            format!("alter table {t} enable always trigger records_guard"),
            "trigger",
        ),
        (guard("when (new.seq > 100)", "update"), guard("", "insert or update or delete"), "trigger"),
        (guard("", "update of payload"), guard("", "insert or update or delete"), "trigger"),
        (
            replaced(&of_guard, "begin\n", "begin\n  return new;\n"),
            of_guard.clone(),
            "a function that guards records",
        ),
        (
            replaced(&of_tenant, "return case", "return '0190d3a0-5b7e-7c3a-9f51-00000000000a'; return case"),
            of_tenant.clone(),
            "a function that guards records",
        ),
        (
            format!("alter function {s}.record_guard() set search_path = pg_temp, pg_catalog"),
            format!("alter function {s}.record_guard() set search_path = pg_catalog, pg_temp"),
            "a function that guards records",
        ),
        (
            format!("alter table {s}.journal_head disable trigger journal_head_rises"),
            format!("alter table {s}.journal_head enable always trigger journal_head_rises"),
            "the journal's heads",
        ),
        (
            format!("alter table {t} replica identity default"),
            format!("alter table {t} replica identity full"),
            "replica identity",
        ),
        (
            format!("alter publication hapax_records drop table {t}"),
            format!("alter publication hapax_records add table {t}"),
            "publication",
        ),
        (
            format!("create unique index more on {t} (id)"),
            format!("drop index module_{}.more", harness.slug),
            "unique index",
        ),
    ] {
        run(&harness.owner, away.clone()).await;
        let modules = harness.modules().await;
        let found = modules.iter().find(|module| module.slug == harness.slug).unwrap();
        assert!(
            found.problems.len() == 1 && found.problems[0].contains(says),
            "{away}: {:?}",
            found.problems
        );
        let started = harness.open().await;
        let refused = started.get(None, &harness.slug, record.id).await.unwrap_err();
        let message = refused.to_string();
        assert!(matches!(refused, Error::Refused { .. }), "{message}");
        assert!(message.contains(says) && message.contains(harness.slug.as_str()), "{message}");
        let refused = started.create(&create(&harness, "{}")).await.unwrap_err();
        assert_eq!(refused.code(), "refused", "{away}: {refused}");
        run(&harness.owner, back).await;
        assert!(
            started.get(None, &harness.slug, record.id).await.unwrap().is_some(),
            "it was mended: {away}"
        );
    }
    let modules = harness.modules().await;
    assert!(modules.iter().all(|module| module.problems.is_empty()), "{modules:?}");
}

/// A module whose protection was changed, or that is only a name, is refused; the others are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t204_a_broken_module_takes_no_other_with_it() {
    let harness = PgRecordsHarness::new().await;
    let (broken, stray) = (fresh_slug(), fresh_slug());
    assert!(harness.make(&broken).await);
    let bare = format!("alter table module_{broken}.records no force row level security");
    run(&harness.owner, bare).await;
    run(&harness.owner, format!("insert into {}.record_modules (slug) values ('{stray}')", harness.schema))
        .await;
    let records = harness.open().await;
    assert_eq!(records.create(&create(&harness, "{}")).await.unwrap().seq, 1);
    for slug in [&broken, &stray] {
        let errors = [
            records.create(&Create::new(slug.clone(), payload("{}"))).await.unwrap_err(),
            records.list(&List::new(slug.clone())).await.unwrap_err(),
            records.check_module(slug).await.unwrap_err(),
        ];
        for error in errors {
            assert!(error.code() == "refused" && error.to_string().contains(slug.as_str()), "{error}");
        }
    }
    // In a transaction of the caller too, which goes on and keeps its search path.
    let mut tx = records.journal().transaction().await.unwrap();
    sqlx::raw_sql("set local search_path = 'a b', public").execute(&mut *tx).await.unwrap();
    let refused = records.create_in(&mut tx, &Create::new(broken.clone(), payload("{}"))).await.unwrap_err();
    assert_eq!(refused.code(), "refused", "{refused}");
    let path: String = sqlx::query_scalar("show search_path").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(path, "\"a b\", public");
    records.create_in(&mut tx, &create(&harness, "{}")).await.unwrap();
    tx.commit().await.unwrap();
    let name = format!("insert into {}.record_modules (slug) values ('No-Module')", harness.schema);
    assert_eq!(raw(&harness.owner, &[&name]).await.unwrap_err(), "23514");
}

/// What the role of maintenance is for, and what it could do besides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t205_the_maintenance_role_sweeps_and_counts_and_does_no_more() {
    let harness = PgRecordsHarness::new().await;
    let s = &harness.schema;
    for of in [None, Some(tenant(0xa)), Some(tenant(0xb))] {
        harness.open().await.create(&create(&harness, "{}").tenant(of)).await.unwrap();
    }
    let count = async |role: &str| {
        let pool = pool_of(role, 2).await;
        let modules = PgModules::with_pool(pool, s, Roles::default(), Migrate::Check).await.unwrap();
        let modules = modules.modules().await.unwrap();
        let found = modules.into_iter().find(|module| module.slug == harness.slug).unwrap();
        assert!(found.problems.is_empty(), "{found:?}");
        found.records
    };
    assert_eq!((count(OWNER).await, count(MAINTENANCE).await, count(APP).await), (Some(3), Some(3), None));

    let keeper = pool_of(MAINTENANCE, 2).await;
    let settings = || {
        let mut settings = PgAccessSettings::default();
        settings.schema.clone_from(s);
        settings.migrate = Migrate::Check;
        settings
    };
    let app = PgAccess::with_pool(harness.app.clone(), settings()).await.unwrap();
    app.note(&AuditNote::new(&Actor::new("me", "why"), "test", "x")).await.unwrap();
    for sql in [
        format!(
            "insert into {s}.access_token (id, name, tenant, role, hash, rotations, created_at) values ('x', 'x', '', 'admin', 'x', 0, now())"
        ),
        format!("update {s}.access_token set role = 'admin'"),
        format!("select * from {s}.access_token"),
        format!("update {s}.access_meta set accepts = 99"),
        format!("delete from {s}.access_audit"),
        format!("update {s}.access_audit set who = 'nobody'"),
        format!("insert into {s}.record_modules (slug) values ('mine')"),
        format!("select * from {s}.journal"),
        format!(
            "insert into module_{}.records values (gen_random_uuid(), gen_random_uuid(), '{{}}', 1, now(), now())",
            harness.slug
        ),
    ] {
        assert_eq!(raw(&keeper, &[&sql]).await.expect_err(&sql), "42501", "{sql}");
    }
    // Not even the owner removes what was done today.
    assert_eq!(raw(&harness.owner, &[&format!("delete from {s}.access_audit")]).await.unwrap_err(), "42501");
    let store = PgAccess::with_pool(keeper, settings()).await.unwrap();
    // What it does itself leaves rows.
    store.note(&AuditNote::new(&Actor::new("keeper", "why"), "keys.sweep", "x")).await.unwrap();
    assert_eq!(store.sweep(&AuditSweep::new(Duration::from_hours(24))).await.unwrap().rows, 0);
    let later = format!(
        "create or replace function {s}.access_now() returns timestamptz language sql volatile return clock_timestamp() + interval '25 hours'"
    );
    run(&harness.owner, later).await;
    run(&harness.owner, format!("update {s}.access_meta set swept_at = null, paused_until = null")).await;
    assert_eq!(store.sweep(&AuditSweep::new(Duration::from_hours(24))).await.unwrap().rows, 2);
}

/// A role that row security does not bind is refused also where there is nothing to protect yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t203_a_role_that_bypasses_row_security_is_refused_before_there_is_a_module() {
    super::prepare_server().await;
    let (admin, schema) = (pool_of("postgres", 2).await, fresh_schema());
    let mut settings = pg_journal_settings(&schema);
    settings.migrate = Migrate::Auto;
    let journal = PgJournal::with_pool(admin, settings).await.unwrap();
    let refused = PgRecords::open(&journal, records_settings()).await.unwrap_err().to_string();
    assert!(refused.contains("bypasses row security"), "{refused}");
    let url = crate::support::postgres::url();
    let refuse = async |accepted| {
        hapax::backend::postgres::refuse_bypass("keys.url", &url, Duration::from_secs(30), accepted).await
    };
    let refused = refuse(false).await.unwrap_err().to_string();
    assert!(refused.contains("the role postgres bypasses row security"), "{refused}");
    refuse(true).await.unwrap();
}
