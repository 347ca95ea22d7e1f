//! The statements of keyed writes, API tokens and records, which are not functions.

use std::time::Duration;

use hapax::Tenant;
use hapax::access::{
    Access as _, ApiToken, AuditNote, AuditSweep, Authentication, ListAudit, ListTokens, NewToken, Role,
    Rotation,
};
use hapax::backend::Migrate;
use hapax::backend::postgres::{
    PgAccess, PgAccessSettings, PgJournal, PgJournalSettings, PgKeys, PgKeysSettings, PgLedger, PgModules,
    PgRecords, PgRecordsSettings, PgSnapshot,
};
use hapax::keyed::{AfterFailure, Begun, Ended, KeySweep, Keys as _, ListKeys, Resolution};
use hapax::records::{
    Create, Delete, List, ModuleSlug, Modules as _, Payload, Records as _, Roles, Scan, Snapshot as _,
    Update, Uuid,
};
use hapax::testing::kit::DAY;
use hapax::testing::{access as tokens, keyed};
use sqlx::PgPool;

use super::{
    caught, drop_mined, every_append, every_relay, everything, mined, nobody_was_caught, nothing_is_loose,
};
use crate::support::postgres::{Scratch, ask, pool, pool_to, run, settings, until};

/// The same for keyed writes, API tokens and records, as the role that owns them, which row security binds.
#[tokio::test(flavor = "multi_thread")]
async fn t451_what_others_put_on_the_search_path_of_a_server_never_runs() {
    let (scratch, admin) = mined().await;
    let (owner, pool) = owner_of(&scratch, "\"$user\", public").await;
    everything_of_a_server(&pool, &admin).await;
    pool.close().await;
    drop_mined(scratch, admin).await;
    run(&self::pool(1).await, format!("drop role {owner}")).await;
}

/// A role whose search path names PostgreSQL's own schema last, so that `public` hides it, and in `public` is something under the
/// name of every built-in function and operator.
#[tokio::test(flavor = "multi_thread")]
async fn t452_a_search_path_that_hides_the_built_in_names_changes_nothing() {
    let (scratch, admin) = mined().await;
    let (owner, pool) = owner_of(&scratch, "public, pg_catalog").await;
    run(&admin, include_str!("shadows.sql").to_owned()).await;
    assert_eq!(ask::<i64>(&pool, "select 1::bigint + 1::bigint").await, 2);
    assert_eq!(caught(&admin).await, [format!("bigint + bigint as {owner}")], "the mines work");
    run(&admin, "truncate public.caught".to_owned()).await;
    everything_of_a_server(&pool, &admin).await;
    let journal = PgJournal::with_pool(pool.clone(), PgJournalSettings::default()).await.unwrap();
    every_append(&journal).await;
    every_relay(&journal).await;
    nobody_was_caught(&admin, "the journal").await;
    let ledger = PgLedger::with_pool(pool.clone(), settings("hapax")).await.unwrap();
    everything(&ledger).await;
    nobody_was_caught(&admin, "the ledger").await;
    pool.close().await;
    drop_mined(scratch, admin).await;
    run(&self::pool(1).await, format!("drop role {owner}")).await;
}

/// A role that may make schemas, and its search path.
async fn owner_of(scratch: &Scratch, search_path: &str) -> (String, PgPool) {
    let owner = format!("owner_{}", scratch.name);
    scratch.admin(&format!("create role {owner} login")).await;
    scratch.admin(&format!("grant create on database {{db}} to {owner}")).await;
    scratch.admin(&format!("alter role {owner} set search_path = {search_path}")).await;
    let pool = pool_to(&scratch.url().replacen("postgres@", &format!("{owner}@"), 1), 4).await;
    (owner, pool)
}

/// Every path through the SQL of modules, keyed writes, API tokens and records.
async fn everything_of_a_server(pool: &PgPool, admin: &PgPool) {
    let modules = PgModules::with_pool(pool.clone(), "hapax", Roles::default(), Migrate::Auto).await.unwrap();
    let orders = ModuleSlug::new("orders").unwrap();
    assert!(modules.create_module(&orders).await.unwrap());
    nobody_was_caught(admin, "making modules").await;
    let keys = PgKeys::with_pool(pool.clone(), PgKeysSettings::default()).await.unwrap();
    every_key(&keys).await;
    nobody_was_caught(admin, "the keys").await;
    #[cfg(feature = "axum")]
    every_request(keys).await;
    nobody_was_caught(admin, "the layer").await;
    every_token(&PgAccess::with_pool(pool.clone(), PgAccessSettings::default()).await.unwrap()).await;
    nobody_was_caught(admin, "the API tokens").await;
    let journal = PgJournal::with_pool(pool.clone(), PgJournalSettings::default()).await.unwrap();
    every_record(&PgRecords::open(&journal, PgRecordsSettings::default()).await.unwrap(), &orders).await;
    nobody_was_caught(admin, "the records").await;
    assert_eq!(modules.modules().await.unwrap()[0].problems, Vec::<String>::new());
    modules.grants_sql().await.unwrap();
    let snapshot = PgSnapshot::with_pool(pool.clone(), "hapax").unwrap();
    assert_eq!(snapshot.snapshot(&Scan::new(9)).await.unwrap().len(), 1);
    assert_eq!(snapshot.gone(None, 9).await.unwrap().len(), 1);
    snapshot.now().await.unwrap();
    nobody_was_caught(admin, "modules and snapshots").await;
    nothing_is_loose(admin).await;
}

/// Every path through the SQL of keyed writes, but for the layer's.
async fn every_key(keys: &PgKeys) {
    let of = |tenant: Option<&str>, key: &str| keyed::request_of(tenant, key, "body");
    let held = |tenant: Option<&str>, key: &str| {
        let mut begin = of(tenant, key);
        (begin.lease, begin.after_failure) = (Duration::from_millis(1), AfterFailure::Hold);
        begin
    };
    let acme = Some("acme");
    for tenant in [None, acme] {
        let begin = of(tenant, "done");
        keyed::done(keys, &begin, "one").await;
        assert!(matches!(keyed::again(keys, &begin).await, Begun::Done(_)));
        let begin = of(tenant, "released");
        let lease = keyed::first(keys, &begin).await;
        keys.extend(&lease, DAY).await.unwrap();
        keys.release(&lease, Ended::Failed).await.unwrap();
        assert_eq!(keyed::word(keys, &begin).await, "free");
        let answer = Resolution::Answer(keyed::answer("two"));
        for (key, how) in [("rerun", Resolution::Rerun), ("answer", answer)] {
            let begin = held(tenant, key);
            let lease = keyed::first(keys, &begin).await;
            until("the lease ends", async || keyed::word(keys, &begin).await == "outcome-unknown").await;
            keys.resolve(&lease, &how, &keyed::person()).await.unwrap();
        }
        let begin = of(tenant, "in-a-transaction");
        // Your transaction has your search path.
        let mut tx = keys.transaction().await.unwrap();
        let Begun::First(lease) = keys.begin_in(&mut tx, &begin).await.unwrap() else { panic!("it is new") };
        assert_eq!(keyed::word(keys, &begin).await, "running");
        keys.finish_in(&mut tx, &lease, &keyed::answer("three")).await.unwrap();
        tx.commit().await.unwrap();
        assert!(keys.was_committed(&begin).await.unwrap().is_some());
        let uuid = keyed::v7(keys, DAY, false).await;
        keyed::done(keys, &of(tenant, &uuid), "four").await;
    }
    assert_eq!(keys.list(&ListKeys::default()).await.unwrap().len(), 12);
    assert_eq!(keys.list(&ListKeys { tenant: Some(None), ..ListKeys::default() }).await.unwrap().len(), 6);
    assert!(keys.entry(None, &keyed::key("done")).await.unwrap().is_some());
    for dry_run in [true, false] {
        let mut sweep = KeySweep::new(DAY * 30);
        sweep.dry_run = dry_run;
        keys.sweep(&sweep).await.unwrap();
    }
}

/// Requests through the layer, in transactions that have the search path of their handlers.
#[cfg(feature = "axum")]
#[allow(clippy::result_large_err, reason = "axum rejects with responses")]
async fn every_request(keys: PgKeys) {
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use hapax::keyed::{Caller, KeyedLayer, KeyedTx};
    use tower::ServiceExt as _;

    let handler = |mut tx: KeyedTx, body: String| async move {
        sqlx::query("select pg_catalog.pg_sleep(0)").execute(&mut **tx).await.unwrap();
        if body == "refuse" { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::CREATED }
    };
    let caller = |_: &axum::http::request::Parts| {
        Ok(Caller { tenant: Some(Tenant::new("acme").unwrap()), principal: None })
    };
    let layers = [
        KeyedLayer::new(keys.clone()).anonymous().transactional(),
        KeyedLayer::new(keys).caller(caller).transactional(),
    ];
    for layer in layers {
        let app = axum::Router::new().route("/orders", axum::routing::post(handler)).layer(layer);
        for body in ["make", "make", "refuse"] {
            let request = Request::post("/orders").header("Idempotency-Key", format!("layer-{body}"));
            let answer = app.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap();
            assert!(matches!(answer.status().as_u16(), 201 | 422), "{answer:?}");
        }
    }
}

/// Every path through the SQL of API tokens.
async fn every_token(access: &PgAccess) {
    assert!(!access.has_tokens().await.unwrap());
    let token = tokens::writer(access).await;
    let Authentication::Granted { .. } = tokens::said(access, &token).await else { panic!("it is good") };
    let about =
        NewToken::new("until tomorrow", Role::Read).expires_in(Some(DAY)).made_by(Some(token.id().clone()));
    tokens::created(access, &about).await;
    let next = ApiToken::with_secret(token.id().clone());
    access.rotate(&next, &Rotation::new(0).overlap(DAY), &tokens::by()).await.unwrap();
    assert_eq!(access.list(&ListTokens { live_only: true, ..ListTokens::default() }).await.unwrap().len(), 2);
    access.revoke(token.id(), &tokens::by()).await.unwrap();
    assert!(access.get(token.id()).await.unwrap().unwrap().revoked_at.is_some());
    access.note(&AuditNote::new(&tokens::by(), "dead.redrive", "x")).await.unwrap();
    let made = ListAudit { action: Some("token.".to_owned()), ..ListAudit::default() };
    assert_eq!((tokens::all_rows(access).await.len(), access.audit(&made).await.unwrap().len()), (5, 4));
    access.sweep(&AuditSweep::new(DAY)).await.unwrap();
}

/// Every path through the SQL of records; a record stays, and another one was deleted.
async fn every_record(records: &PgRecords, orders: &ModuleSlug) {
    let payload = |n: u32| Payload::new(format!("{{\"n\": {n}}}")).unwrap();
    let of = Some(Tenant::new(Uuid::from_u128(7).to_string()).unwrap());
    let create = || Create::new(orders.clone(), payload(1)).tenant(of.clone());
    // Your transaction has your search path.
    let mut tx = records.journal().transaction().await.unwrap();
    let kept = records.create_in(&mut tx, &create()).await.unwrap();
    tx.commit().await.unwrap();
    let gone = records.create(&create()).await.unwrap();
    let update = Update::new(orders.clone(), kept.id, kept.seq, payload(2)).tenant(of.clone());
    records.update(&update).await.unwrap();
    records.delete(&Delete::new(orders.clone(), gone.id, gone.seq).tenant(of.clone())).await.unwrap();
    assert_eq!(records.get(of.as_ref(), orders, kept.id).await.unwrap().unwrap().seq, 2);
    assert_eq!(records.get(of.as_ref(), orders, gone.id).await.unwrap(), None);
    assert_eq!(records.list(&List::new(orders.clone()).tenant(of)).await.unwrap().records.len(), 1);
}
