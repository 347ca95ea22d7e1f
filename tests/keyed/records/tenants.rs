//! What one tenant can learn about another, by every way that the app's role has; and what protects the
//! tables.

use std::time::Duration;

use hapax::Error;
use hapax::backend::Migrate;
use hapax::backend::postgres::{PgJournal, PgKeys, PgModules, PgRecords};
use hapax::keyed::{Begin, Begun, KeyStatus, KeySweep, Keys, ListKeys, RETENTION};
use hapax::records::{Create, Delete, Modules as _, Records as _, Roles, Update, Uuid};
use hapax::testing::keyed::{answer, key, request_of};
use hapax::testing::records::{RecordsHarness as _, create, payload, tenant};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use super::{
    APP, MAINTENANCE, OWNER, PgRecordsHarness, fresh_slug, pg_journal_settings, pg_keys, pg_records, pool_of,
    raw, records_settings, tenant_is,
};
use crate::support::postgres::{ask, fresh_schema, run, until, url};
use crate::support::proxy::Proxy;

const SECRET: &str = "the-secret-of-a";

/// A record and a key with an answer, both of tenant A, with the secret in them.
async fn of_a(harness: &PgRecordsHarness) -> (Create, Begin) {
    let records = harness.open().await;
    let record = create(harness, &format!(r#"{{"x":"{SECRET}"}}"#)).tenant(Some(tenant(0xa)));
    records.create(&record).await.unwrap();
    let keys = pg_keys(&harness.app, &harness.schema).await;
    let begin = request_of(Some(tenant(0xa).as_str()), "key-of-a", SECRET);
    let Begun::First(lease) = keys.begin(&begin).await.unwrap() else { panic!("a fresh key") };
    keys.finish(&lease, &answer(SECRET)).await.unwrap();
    (record, begin)
}

/// HOLES 4 to 6, with SQL of one's own on the app's connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t142_raw_sql_of_the_app_role_sees_no_row_of_another_tenant() {
    let harness = PgRecordsHarness::new().await;
    let (record, _) = of_a(&harness).await;
    let (schema, slug) = (&harness.schema, &harness.slug);
    let tables = [format!("module_{slug}.records"), format!("{schema}.keys")];
    let app = pool_of(APP, 1).await; // one session, so that settings of earlier transactions are there
    let own = format!("select * from {}", tables[0]);
    let shown = raw(&app, &[&tenant_is(0xa), &own]).await.unwrap();
    assert!(shown.len() == 1 && shown[0].contains(SECRET), "its own: {shown:?}");
    let statements = [
        "select 1".to_owned(),
        tenant_is(0xb),
        "select set_config('hapax.tenant', '', true)".to_owned(),
        "select set_config('hapax.tenant', '00000000-0000-0000-0000-000000000000', true)".to_owned(),
        format!("select set_config('hapax.tenant', '{}'' or true --', true)", tenant(0xa)),
        "select set_config('hapax.maintenance', 'on', true)".to_owned(),
    ];
    for statements in &statements {
        for table in &tables {
            let count = raw(&app, &[statements, &format!("select * from {table}")]).await.unwrap();
            assert!(count.is_empty(), "{statements} on {table}: {count:?}");
            let gone = raw(&app, &[statements, &format!("delete from {table}")]).await;
            assert!(
                gone.as_ref().is_ok_and(|rows| rows == &["0 rows"]) || gone == Err("42501".into()),
                "{gone:?}"
            );
        }
        let changed = format!("update module_{slug}.records set seq = seq + 1");
        assert_eq!(raw(&app, &[statements, &changed]).await.unwrap(), ["0 rows"], "{statements}");
        let changed = format!("update {schema}.keys set body = null");
        assert_eq!(raw(&app, &[statements, &changed]).await.unwrap(), ["0 rows"], "{statements}");
        let reads =
            format!("select * from {schema}.record_get('{slug}', '{}', '{}')", tenant(0xb), record.id);
        assert!(raw(&app, &[statements, &reads]).await.unwrap().is_empty());
    }
    // Nothing can be put into the other's data, nor moved there.
    for foreign in [
        format!(
            "insert into module_{slug}.records values (gen_random_uuid(), '{}', '{{}}', 1, now(), now())",
            tenant(0xa)
        ),
        format!(
            "insert into {schema}.keys (token, nonce, begun_at, until, held_until, tenant, key, fingerprint, parts) \
                 values (1, 1, now(), now(), now(), '{}', 'other', '', '[]')",
            tenant(0xa)
        ),
    ] {
        let refused = raw(&app, &[&tenant_is(0xb), &foreign]).await.unwrap_err();
        assert!(refused == "42501" || refused == "P0001", "{foreign}: {refused}");
    }
    for right in [
        format!("truncate module_{slug}.records"),
        format!("alter table module_{slug}.records no force row level security"),
        format!("drop policy records_tenant on module_{slug}.records"),
        format!("alter table module_{slug}.records disable trigger records_guard"),
        "set session_replication_role = replica".to_owned(),
        "set role postgres".to_owned(),
    ] {
        assert_eq!(raw(&app, &[&right]).await.unwrap_err(), "42501", "{right}");
    }
    let still = harness.open().await.get(Some(&tenant(0xa)), slug, record.id).await.unwrap().unwrap();
    assert_eq!(still.seq, 1);
}

/// A setting that a transaction made reads as the empty text in the next one of its session, not as null; and the keys
/// store no tenant as the empty text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t140_a_tenant_of_an_earlier_transaction_is_unset_again() {
    let harness = PgRecordsHarness::new().await;
    let records = harness.open().await;
    records.create(&create(&harness, r#"{"of":"nobody"}"#)).await.unwrap();
    let keys = pg_keys(&harness.app, &harness.schema).await;
    assert!(matches!(keys.begin(&request_of(None, "key", "{}")).await.unwrap(), Begun::First(_)));
    let app = pool_of(APP, 1).await;
    let tables = [format!("module_{}.records", harness.slug), format!("{}.keys", harness.schema)];
    for tenant in ["00000000-0000-0000-0000-000000000000", "x"] {
        let set = format!("select set_config('hapax.tenant', '{tenant}', true)");
        for table in &tables {
            let all = format!("select * from {table}");
            let seen = raw(&app, &[&set, &all]).await.unwrap().len();
            assert_eq!(seen, usize::from(tenant != "x"), "no tenant has a name of its own: {table}");
            assert!(raw(&app, &[&all]).await.unwrap().is_empty(), "unset sees nothing: {table}");
        }
    }
}

/// What a service and its database say to each other about a record does not depend on whether another tenant has one
/// of that id: the answers are the same, byte for byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t274_another_tenants_record_changes_nothing_that_can_be_seen() {
    let harness = PgRecordsHarness::new().await;
    let sound = harness.open().await;
    let proxy = Proxy::new(&url()).await;
    let options: PgConnectOptions = proxy.url(&url()).parse().unwrap();
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .connect_with(options.username(APP).database(super::DATABASE))
        .await
        .unwrap();
    let records = pg_records(&pool, &harness.schema).await;
    proxy.count(&format!("hapax_journal_{}", harness.schema)); // the channel that wakes readers after a write
    let (slug, umbrella) = (harness.slug.clone(), tenant(0xb));
    let owned = async || {
        let record = create(&harness, r#"{"n":1}"#).tenant(Some(tenant(0xa)));
        sound.create(&record).await.unwrap();
        record.id
    };
    // An id that nobody has, one that another tenant has, and one that the other has deleted.
    let deleted = async || {
        let id = owned().await;
        sound.delete(&Delete::new(slug.clone(), id, 1).tenant(Some(tenant(0xa)))).await.unwrap();
        id
    };
    let seen = async |id: Uuid| {
        let mut seen = Vec::new();
        for what in ["update", "delete", "create", "create again"] {
            until("the connection is idle", async || pool.num_idle() == 1).await;
            let (before, woken) = (proxy.carried(), proxy.counted());
            let said = match what {
                "update" => {
                    let update = Update::new(slug.clone(), id, 1, payload(r#"{"n":2}"#));
                    records.update(&update.tenant(Some(umbrella.clone()))).await
                }
                "delete" => {
                    records.delete(&Delete::new(slug.clone(), id, 1).tenant(Some(umbrella.clone()))).await
                }
                _ => {
                    records
                        .create(&create(&harness, r#"{"n":3}"#).id(id).tenant(Some(umbrella.clone())))
                        .await
                }
            };
            // A write wakes the journal's readers from a task of its own, a little later: that belongs to it.
            until("readers are woken", async || proxy.counted() == woken + usize::from(said.is_ok())).await;
            until("the connection is idle", async || pool.num_idle() == 1).await;
            let after = proxy.carried();
            // The event has the two times as texts, which are shorter where a fraction ends with zeros.
            let times = said.as_ref().map_or(0, |record| {
                record.created_at.to_string().len() + record.updated_at.to_string().len()
            });
            let said = said
                .map(|record| record.seq)
                .map_err(|error| (error.code(), error.to_string().replace(&id.to_string(), "ID")));
            seen.push((what, said, after.0 - before.0 - times, after.1 - before.1));
        }
        seen
    };
    seen(Uuid::now_v7()).await; // statements are prepared once
    // What tells one tenant of another is there each time. On a busy machine something else may come between once: a statement
    // that is sent again, a connection that is made anew.
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let nobodys = seen(Uuid::now_v7()).await;
        let codes: Vec<_> =
            nobodys.iter().map(|(_, said, ..)| said.clone().map_err(|(code, _)| code)).collect();
        assert_eq!(codes, [Err("not-found"), Err("not-found"), Ok(1), Err("conflict")]);
        rounds.push([nobodys, seen(owned().await).await, seen(deleted().await).await]);
    }
    for (other, what) in [(1, "has"), (2, "had")] {
        let same = rounds.iter().any(|round| round[other] == round[0]);
        assert!(same, "another tenant {what} it: {rounds:#?}");
    }
}

/// The functions for keys show a tenant what is its own, also if the transaction was told another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t143_keys_of_two_tenants_never_meet_and_leave_the_transactions_tenant_alone() {
    let harness = PgRecordsHarness::new().await;
    let (_, begin) = of_a(&harness).await;
    let keys = pg_keys(&harness.app, &harness.schema).await;
    // HOLES 4 and 5: the same key of another tenant is new, and its answer is its own.
    let other = request_of(Some(tenant(0xb).as_str()), "key-of-a", "mine");
    let Begun::First(lease) = keys.begin(&other).await.unwrap() else { panic!("it is new for the other") };
    keys.extend(&lease, Duration::from_secs(30)).await.unwrap();
    keys.finish(&lease, &answer("mine")).await.unwrap();
    let KeyStatus::Done(kept) = keys.get(Some(&tenant(0xb)), &key("key-of-a")).await.unwrap() else {
        panic!("it is done")
    };
    assert_eq!(kept.answer, answer("mine"));
    assert!(matches!(keys.get(None, &key("key-of-a")).await.unwrap(), KeyStatus::Unknown));
    let KeyStatus::Done(kept) = keys.get(Some(&tenant(0xa)), &begin.key).await.unwrap() else {
        panic!("a's")
    };
    assert_eq!(kept.answer, answer(SECRET));
    // In a transaction that is B's.
    let mut tx = keys.transaction().await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(tenant_is(0xb))).execute(&mut *tx).await.unwrap();
    let again = Begin::new(begin.tenant.clone(), begin.key.clone(), begin.fingerprint.clone());
    assert!(matches!(keys.begin_in(&mut tx, &again).await.unwrap(), Begun::Done(_)));
    let now: String =
        sqlx::query_scalar("select current_setting('hapax.tenant')").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(now, tenant(0xb).as_str());
}

/// Lists and sweeps of all tenants are for the role that may delete keys; the app's role is told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t144_maintenance_sees_the_keys_of_all_tenants_and_the_app_does_not() {
    let harness = PgRecordsHarness::new().await;
    let (_, begin) = of_a(&harness).await;
    let app = pg_keys(&harness.app, &harness.schema).await;
    assert!(matches!(app.begin(&request_of(None, "of-nobody", "{}")).await.unwrap(), Begun::First(_)));
    let refused = app.list(&ListKeys::default()).await.unwrap_err();
    assert!(refused.code() == "refused" && refused.to_string().contains("maintenance"), "{refused}");
    let mut own = ListKeys { tenant: Some(Some(tenant(0xa))), ..ListKeys::default() };
    assert_eq!(app.list(&own).await.unwrap().len(), 1);
    own.tenant = Some(Some(tenant(0xb)));
    assert_eq!(app.list(&own).await.unwrap(), []);
    assert_eq!(app.sweep(&KeySweep::new(RETENTION)).await.unwrap_err().code(), "refused");
    let clock = format!(
        "create or replace function {}.keys_now() returns timestamptz language sql volatile return clock_timestamp() + interval '31 days'",
        harness.schema
    );
    for role in [MAINTENANCE, OWNER] {
        let keys = pg_keys(&pool_of(role, 2).await, &harness.schema).await;
        assert_eq!(keys.list(&ListKeys::default()).await.unwrap().len(), 2, "{role}");
    }
    run(&harness.owner, clock).await;
    let keys = pg_keys(&pool_of(MAINTENANCE, 2).await, &harness.schema).await;
    let mut settings = KeySweep::new(RETENTION);
    settings.batch_max = 1;
    let swept = keys.sweep(&settings).await.unwrap();
    assert_eq!((swept.keys, swept.paused_until), (2, None), "one of each tenant");
    for (of, name) in [(begin.tenant.as_ref(), begin.key), (None, key("of-nobody"))] {
        assert!(matches!(keys.get(of, &name).await.unwrap(), KeyStatus::Unknown));
    }
    let records = pool_of(MAINTENANCE, 1).await;
    let all = format!("select * from module_{}.records", harness.slug);
    assert!(raw(&records, &[&all]).await.unwrap().is_empty(), "only if it says so");
    let says = "select set_config('hapax.maintenance', 'on', true)";
    assert_eq!(raw(&records, &[says, &all]).await.unwrap().len(), 1);
    let gone = format!("delete from module_{}.records", harness.slug);
    assert_eq!(raw(&records, &[says, &gone]).await.unwrap_err(), "42501");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t145_a_role_that_bypasses_row_security_is_refused() {
    let harness = PgRecordsHarness::new().await;
    let admin = pool_of("postgres", 2).await;
    let journal = PgJournal::with_pool(admin, pg_journal_settings(&harness.schema)).await.unwrap();
    let refused = PgRecords::open(&journal, records_settings()).await.unwrap_err();
    let message = refused.to_string();
    assert!(matches!(refused, Error::Refused { .. }) && message.contains("postgres"), "{message}");
    assert!(message.contains("accept_bypass") && message.contains("bypasses row security"), "{message}");
    let mut accepted = records_settings();
    accepted.accept_bypass = true;
    let records = PgRecords::open(&journal, accepted).await.unwrap();
    // The statements of hapax keep tenants apart all the same.
    let (record, _) = of_a(&harness).await;
    assert_eq!(records.get(Some(&tenant(0xb)), &harness.slug, record.id).await.unwrap(), None);
    assert_eq!(records.get(None, &harness.slug, record.id).await.unwrap(), None);
    let list = hapax::records::List::new(harness.slug.clone());
    assert!(records.list(&list).await.unwrap().records.is_empty());
}

/// Many processes make one module at once; a schema of somebody else is not taken over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modules_are_made_once_and_take_nothing_over() {
    let harness = PgRecordsHarness::new().await;
    let slug = fresh_slug();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (modules, slug) = (harness.owner_modules().await, slug.clone());
        tasks.spawn(async move { modules.create_module(&slug).await.unwrap() });
    }
    let made = tasks.join_all().await;
    assert_eq!(made.iter().filter(|made| **made).count(), 1, "{made:?}");
    let other = PgRecordsHarness::new().await;
    let taken = other.owner_modules().await.create_module(&slug).await.unwrap_err();
    assert_eq!(taken.code(), "conflict", "{taken}");
    let unread = other.open().await.get(None, &slug, hapax::records::Uuid::now_v7()).await.unwrap_err();
    assert_eq!(unread.code(), "not-found", "the module of another schema: {unread}");
    // A role that may not make modules makes none.
    let app = PgModules::with_pool(harness.app.clone(), &harness.schema, Roles::default(), Migrate::Check);
    let refused = app.await.unwrap().create_module(&fresh_slug()).await.unwrap_err();
    assert_eq!(refused.code(), "refused", "{refused}");
    let count: i64 =
        ask(&harness.owner, format!("select count(*) from {}.record_modules", harness.schema)).await;
    assert_eq!(count, 2);
}

/// Keys that an older build made get row security when they are opened, and stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t148_keys_of_version_1_are_migrated_and_still_found() {
    super::prepare_server().await;
    let (owner, schema) = (pool_of(OWNER, 4).await, fresh_schema());
    let step = std::fs::read_to_string("tests/data/landed/keys/0001_keys.sql").unwrap();
    run(&owner, step.replace("{schema}", &schema)).await;
    run(&owner, format!("insert into {schema}.keys_meta (version, accepts) values (1, 1)")).await;
    let fingerprint = "\\x0123456789abcdef0123456789abcdef";
    let old = format!("select token from {schema}.key_begin('old', '{fingerprint}', p_tenant => 'acme')");
    let token: i64 = ask(&owner, old).await;
    let done = format!("select {schema}.key_finish('old', {token}, 201, 'kept', p_tenant => 'acme')");
    assert!(ask::<bool>(&owner, done).await);
    let keys = PgKeys::with_pool(owner.clone(), crate::settings(&schema)).await.unwrap();
    let acme = hapax::Tenant::new("acme").unwrap();
    let KeyStatus::Done(kept) = keys.get(Some(&acme), &key("old")).await.unwrap() else {
        panic!("it is kept")
    };
    assert_eq!(&kept.answer.body[..], b"kept");
    assert_eq!(all_rows(&owner, &schema).await, 0, "unset sees nothing, the owner neither");
    assert_eq!(keys.list(&ListKeys::default()).await.unwrap().len(), 1);
    let again = format!("select outcome from {schema}.key_begin('old', '{fingerprint}', p_tenant => 'acme')");
    assert_eq!(ask::<String>(&owner, again.clone()).await, "done");
    let other = again.replace("acme", "other");
    assert_eq!(ask::<String>(&owner, other).await, "first");
}

async fn all_rows(pool: &PgPool, schema: &str) -> i64 {
    ask(pool, format!("select count(*) from {schema}.keys")).await
}

/// A write waits for another one of its record, and a read waits for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_waits_for_the_open_one_and_then_finds_its_seq() {
    let harness = PgRecordsHarness::new().await;
    let records = pg_records(&harness.app, &harness.schema).await;
    let record = records.create(&create(&harness, "{}")).await.unwrap();
    let change = Update::new(harness.slug.clone(), record.id, 1, payload(r#"{"n":2}"#));
    let mut open = records.journal().transaction().await.unwrap();
    records.update_in(&mut open, &change).await.unwrap();
    assert_eq!(records.get(None, &harness.slug, record.id).await.unwrap().unwrap().seq, 1);
    let view = harness.owner_view().await;
    let waiting = {
        let (records, change) = (records.clone(), change.clone());
        // On a slow machine a wait may end before anybody saw it: nothing was changed, and it may be repeated.
        tokio::spawn(async move {
            loop {
                match records.update(&change).await {
                    Err(error) if error.is_retryable() => {}
                    other => return other,
                }
            }
        })
    };
    crate::support::postgres::until_waiting(&view, "record_begin").await;
    open.commit().await.unwrap();
    let late = waiting.await.unwrap().unwrap_err();
    assert_eq!(hapax::records::conflict_seqs(&late), Some((1, 2)), "{late}");
}

impl PgRecordsHarness {
    /// Sees what other roles' statements wait for.
    async fn owner_view(&self) -> PgPool {
        pool_of("postgres", 1).await
    }
}
