//! Whose things a name means, which weeks may be made, and whether the documents' SQL runs as it is written.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres::{Scratch, ask, fresh_schema, pool, pool_to, run, settings};
use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgLedger};
use hapax::journal::{Append, Expected, Journal as _, RelayStore as _};
use hapax::ledger::{Claim, Claims, Marker, Mode, Operations, Week};
use hapax::testing::kit::{self, DAY};
use hapax::{Aggregate, Event, EventId, Owner, RelayName, Tenant, Topic};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool};

/// What a server opens beside them.
mod server;

/// What a role that may create things in `public`, and nothing else, puts there: better matches for what the ledger's and the
/// journal's SQL calls. Each writes down who ran it.
const HOSTILE: &str = "
create table public.caught (what text, who text);
grant insert on public.caught to public;
create function public.catch(what text) returns void language sql volatile
  as $$ insert into public.caught values (what, current_user) $$;
create function public.nextval(text) returns bigint language plpgsql volatile
  as $$ begin perform public.catch('nextval'); return pg_catalog.nextval($1::regclass); end $$;
create function public.times(bigint, interval) returns interval language plpgsql volatile
  as $$ begin perform public.catch('*'); return $1::float8 operator(pg_catalog.*) $2; end $$;
create operator public.* (function = public.times, leftarg = bigint, rightarg = interval);
create function public.times(numeric, int) returns numeric language plpgsql volatile
  as $$ begin perform public.catch('* 2'); return $1 operator(pg_catalog.*) $2::numeric; end $$;
create operator public.* (function = public.times, leftarg = numeric, rightarg = int);
create function public.both(smallint, int) returns int language plpgsql volatile
  as $$ begin perform public.catch('&'); return $1::int operator(pg_catalog.&) $2; end $$;
create operator public.& (function = public.both, leftarg = smallint, rightarg = int);
create function public.array_remove(bigint[], bigint) returns bigint[] language plpgsql volatile
  as $$ begin perform public.catch('array_remove'); return pg_catalog.array_remove($1, $2); end $$;
create function public.array_fill(int, int[]) returns int[] language plpgsql volatile
  as $$ begin perform public.catch('array_fill'); return pg_catalog.array_fill($1, $2); end $$;
create function public.pg_advisory_xact_lock(int) returns void language plpgsql volatile
  as $$ begin perform public.catch('pg_advisory_xact_lock'); end $$;
create function public.format(text, smallint) returns text language plpgsql volatile
  as $$ begin perform public.catch('format'); return pg_catalog.format($1, variadic array[$2]); end $$;
create function public.unnest(bigint[]) returns setof bigint language plpgsql volatile
  as $$ begin perform public.catch('unnest'); return query select pg_catalog.unnest($1); end $$;
create function public.is_of(oid, regclass) returns boolean language plpgsql volatile
  as $$ begin perform public.catch('='); return $1 operator(pg_catalog.=) $2::oid; end $$;
create operator public.= (function = public.is_of, leftarg = oid, rightarg = regclass);
create function public.concat_ws(text, numeric, numeric, boolean, oid, oid) returns text language plpgsql volatile
  as $$ begin perform public.catch('concat_ws'); return pg_catalog.concat_ws($1, $2, $3, $4, $5, $6); end $$;
";

/// A database in which somebody has laid things in wait.
async fn mined() -> (Scratch, PgPool) {
    let scratch = Scratch::new().await;
    let mallory = format!("mallory_{}", scratch.name);
    scratch.admin(&format!("create role {mallory} login")).await;
    let admin = pool_to(&scratch.url(), 2).await;
    run(&admin, format!("grant create, usage on schema public to {mallory}")).await;
    let as_mallory = scratch.url().replacen("postgres@", &format!("{mallory}@"), 1);
    let low = pool_to(&as_mallory, 1).await;
    sqlx::raw_sql(HOSTILE).execute(&low).await.expect("a low role lays things in wait");
    low.close().await;
    (scratch, admin)
}

async fn caught(admin: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select distinct what || ' as ' || who from public.caught order by 1")
        .fetch_all(admin)
        .await
        .unwrap()
}

async fn nobody_was_caught(admin: &PgPool, when: &str) {
    let caught = caught(admin).await;
    assert!(caught.is_empty(), "{when}: somebody else's code ran: {caught:?}");
}

/// Every function is pinned, or was parsed when it was made.
async fn nothing_is_loose(admin: &PgPool) {
    let loose: Vec<String> = sqlx::query_scalar(
        "select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'hapax'::regnamespace \
         and p.prosqlbody is null and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)",
    )
    .fetch_all(admin)
    .await
    .unwrap();
    assert_eq!(loose, Vec::<String>::new(), "functions that follow the caller's search_path");
}

async fn drop_mined(scratch: Scratch, admin: PgPool) {
    admin.close().await;
    let role = format!("mallory_{}", scratch.name);
    scratch.admin("drop database {db} with (force)").await;
    let server = pool(1).await;
    run(&server, format!("drop role {role}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t68_what_others_put_on_the_search_path_never_runs() {
    let (scratch, admin) = mined().await;
    // The mines work: this is what a careless statement meets.
    let mut tx = admin.begin().await.unwrap();
    sqlx::raw_sql("create sequence public.s; select nextval('public.s'), 1::bigint * interval '1 second'")
        .execute(&mut *tx)
        .await
        .unwrap();
    let caught: i64 =
        sqlx::query_scalar("select count(*) from public.caught").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(caught, 2);
    tx.rollback().await.unwrap();

    let pool = PgPoolOptions::new().max_connections(4).connect(&scratch.url()).await.unwrap();
    let ledger = PgLedger::with_pool(pool.clone(), settings("hapax")).await.unwrap();
    nobody_was_caught(&admin, "making the schema").await;
    everything(&ledger).await;
    nobody_was_caught(&admin, "the ledger").await;
    for sql in [
        "select outcome from hapax.claim_in('sql', 'a', p_owner => 'x', p_metadata => '{}')",
        "select outcome from hapax.claim_in('sql', 'a')",
        "select outcome from hapax.lease('sql', '0190a1b2-c3d4-7000-8000-000000000001')",
        "select hapax.settle('sql', 'c', token, 'retry', 5)::text from hapax.lease('sql', 'c')",
        "select hapax.make_week(hapax.week_of(extract(epoch from now() + interval '7 days')::bigint * 1000000::bigint), 28, 260)::text",
        "select count(*)::text from hapax.entries",
    ] {
        ask::<String>(&pool, sql).await;
        nobody_was_caught(&admin, sql).await;
    }
    let mut journal_settings = PgJournalSettings::default();
    "hapax".clone_into(&mut journal_settings.schema);
    let journal = PgJournal::with_pool(pool.clone(), journal_settings).await.unwrap();
    nobody_was_caught(&admin, "making the journal").await;
    every_append(&journal).await;
    ask::<String>(
        &pool,
        "select string_agg(o_placing, ',') from hapax.append_in('order-2', 0, '[{\"id\": \"x\", \"payload\": {\"a\": [1]}}]')",
    )
    .await;
    nobody_was_caught(&admin, "appending").await;
    every_relay(&journal).await;
    nobody_was_caught(&admin, "the relay's part of the journal").await;

    nothing_is_loose(&admin).await;
    pool.close().await;
    drop_mined(scratch, admin).await;
}

/// Every path through the ledger's SQL that the guard and the consumer use.
async fn everything(ledger: &PgLedger) {
    kit::run(ledger, &kit::claim("lone", kit::lease())).await;
    kit::first(ledger, &kit::claim("once", Mode::Once { track: Some(DAY) })).await;
    let mut v7 = kit::claim("x", kit::lease());
    v7.identity.id = kit::v7_at(ledger.now().await.unwrap().minus(DAY * 70), 1);
    kit::run(ledger, &v7).await;
    let batch: Vec<Claim> = (0..20).map(|n| kit::claim(&format!("batch-{n}"), kit::lease())).collect();
    for _ in 0..2 {
        assert!(ledger.claim(&batch).await.unwrap().iter().all(Result::is_ok));
    }
    for seq in 1..4 {
        kit::run(ledger, &kit::latest(seq)).await;
    }
    kit::expect(ledger, &kit::strict(9), "wait").await;
    kit::expect(ledger, &kit::claim("failed", kit::failed()), "retry_later").await;
    let retried = kit::claim("retried", kit::lease());
    let grant = kit::first(ledger, &retried).await;
    assert!(!kit::is_fenced(kit::extend(ledger, &retried, &grant, DAY).await));
    kit::settled(ledger, &retried, &grant, kit::retry(DAY)).await;
    let mut tx = ledger.pool().begin().await.unwrap();
    ledger.claim_in(&mut tx, &[kit::claim("in", Mode::Done), kit::latest(9)]).await.unwrap();
    let scope = retried.identity.scope.clone();
    ledger
        .set_markers_in(&mut tx, &scope, &[Marker::new(Topic::new("orders").unwrap(), 0, 7)])
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let settled = kit::claim("settled-in", kit::lease());
    let grant = kit::first(ledger, &settled).await;
    let mut tx = ledger.transaction().await.unwrap();
    let settles = [kit::settling(&settled, &grant, kit::done())];
    assert!(!kit::is_fenced(ledger.settle_in(&mut tx, &settles).await.unwrap().remove(0).unwrap()));
    tx.commit().await.unwrap();
    assert!(ledger.was_committed(&settled).await.unwrap());
    kit::there(ledger, &retried).await;
    ledger.known(std::slice::from_ref(&retried.identity)).await.unwrap();
    ledger.stat().await.unwrap();
    ledger.epoch().await.unwrap();
    ledger.make_ahead().await.unwrap();
    kit::sweep(ledger, DAY).await;
}

/// Appends, alone and as two.
async fn every_append(journal: &PgJournal) {
    let event = |id: &str| Event::new(EventId::new(id).unwrap());
    let append = |events: Vec<Event>| Append::new(Aggregate::new("order-1").unwrap(), Expected::Any, events);
    for events in [vec![event("one")], vec![event("two"), event("three")]] {
        assert_eq!(journal.append(&append(events.clone())).await.unwrap().placed.len(), events.len());
    }
    let mut tx = journal.transaction().await.unwrap();
    assert_eq!(journal.append_in(&mut tx, &append(vec![event("four")])).await.unwrap().placed.len(), 1);
    tx.commit().await.unwrap();
}

/// What a relay asks of a journal.
async fn every_relay(journal: &PgJournal) {
    let relay = RelayName::new("relay").unwrap();
    let owner = Owner::new("me").unwrap();
    journal.acquire_leadership(&relay, &owner, std::time::Duration::from_secs(9)).await.unwrap();
    journal.stat().await.unwrap();
    journal.relays().await.unwrap();
}

/// A table and a function in a session's own temporary schema, which comes first unless it is named last: what the owner's
/// rights do in `make_week` is not to be had that way either.
#[tokio::test(flavor = "multi_thread")]
async fn t68_a_low_role_cannot_lend_itself_the_owners_rights() {
    let (scratch, admin) = mined().await;
    PgLedger::with_pool(admin.clone(), settings("hapax")).await.unwrap();
    let low = format!("low_{}", scratch.name);
    scratch.admin(&format!("create role {low} login")).await;
    run(&admin, hapax::backend::postgres::grants_sql("hapax", &low).unwrap()).await;
    let session = pool_to(&scratch.url().replacen("postgres@", &format!("{low}@"), 1), 1).await;
    run(
        &session,
        "create temp table pg_inherits (inhrelid oid, inhparent oid, inhdetachpending boolean); \
         create temp table pg_class (oid oid, relname name); create temp table caught (who text); \
         create function pg_temp.least(int, int) returns int language plpgsql as $$ begin insert into caught values (current_user); return 0; end $$; \
         create function pg_temp.format(text, smallint) returns text language plpgsql as $$ begin insert into caught values (current_user); return 'x'; end $$; \
         create function pg_temp.hashtext(text) returns int language plpgsql as $$ begin insert into caught values (current_user); return 0; end $$"
            .into(),
    )
    .await;
    assert!(ask::<bool>(&session, "select hapax.make_week(1346, 28, 260)").await);
    assert!(
        !ask::<bool>(&session, "select hapax.make_week(1346, 28, 260)").await,
        "the true pg_inherits is asked"
    );
    assert_eq!(ask::<String>(&session, "select outcome from hapax.claim_in('s', 'x')").await, "claimed");
    assert_eq!(ask::<i64>(&session, "select count(*) from pg_temp.caught").await, 0);
    session.close().await;
    nobody_was_caught(&admin, "make_week").await;
    run(&admin, format!("drop owned by {low}")).await;
    drop_mined(scratch, admin).await;
    run(&pool(1).await, format!("drop role {low}")).await;
}

async fn ledger_with(weeks_max: usize, pool: PgPool) -> PgLedger {
    let mut all = settings(&fresh_schema());
    all.ledger.weeks_max = weeks_max;
    PgLedger::with_pool(pool, all).await.unwrap()
}

fn of_tenant(tenant: Option<&str>, id: EventId) -> Claim {
    let mut claim = kit::claim("x", kit::lease());
    claim.identity.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
    claim.identity.id = id;
    claim
}

/// A tenant whose ids are of all the past years uses up what it has of them; everybody's present weeks are made, and another
/// tenant's odd ones too.
#[tokio::test(flavor = "multi_thread")]
async fn t71_odd_ids_keep_out_neither_the_present_weeks_nor_other_tenants() {
    let ledger = ledger_with(30, pool(4).await).await;
    let now = ledger.now().await.unwrap();
    let ago = |weeks: u32| now.minus(DAY * 7 * weeks);
    let flood: Vec<Claim> = (10..60).map(|n| of_tenant(Some("mallory"), kit::v7_at(ago(n), 1))).collect();
    let outcomes = ledger.claim(&flood).await.unwrap();
    let (made, refused): (Vec<_>, Vec<_>) = outcomes.iter().partition(|outcome| outcome.is_ok());
    assert_eq!((made.len(), refused.len()), (30, 20));
    for tenant in [Some("mallory"), Some("acme"), None] {
        for (n, time) in [(2, ago(1)), (3, now), (4, now.plus(DAY * 7)), (5, now.plus(DAY * 14))] {
            let grant = kit::run(&ledger, &of_tenant(tenant, kit::v7_at(time, n))).await;
            assert_eq!(grant.week, Week::of(time), "{tenant:?}");
        }
    }
    // In a caller's transaction the same: made beside it, or refused.
    let mut tx = ledger.pool().begin().await.unwrap();
    let refused = of_tenant(Some("mallory"), kit::v7_at(ago(70), 6));
    kit::assert_invalid(ledger.claim_in(&mut tx, &[refused]).await.unwrap().remove(0), "30 weeks");
    tx.rollback().await.unwrap();
    for tenant in [Some("acme"), None] {
        kit::run(&ledger, &of_tenant(tenant, kit::v7_at(ago(100 + u32::from(tenant.is_some())), 7))).await;
    }
}

/// However many tenants flood it, the ledger holds a bounded number of weeks, and a newcomer gets some of the last.
#[tokio::test(flavor = "multi_thread")]
async fn t71_the_last_odd_weeks_are_shared_out() {
    let scratch = Scratch::new().await; // a thousand tables are not company for others
    let ledger = ledger_with(260, pool_to(&scratch.url(), 4).await).await;
    let s = ledger.schema().to_owned();
    let now = ledger.now().await.unwrap();
    // As if three tenants had used up 950: what matters is who made them, not that they have rows.
    let made = format!(
        "insert into {s}.odd_week select n, 'mallory-' || n % 3 from generate_series(1, 950) n; \
         do $$ begin for n in 1 .. 950 loop \
           execute format('create table {s}.entry_%s_1 (like {s}.entry); alter table {s}.entry attach partition {s}.entry_%s_1 for values from (%s) to (%s)', n, n, n, n + 1); \
           if n % 50 = 0 then commit; end if; end loop; end $$"
    );
    for part in made.split("; do ") {
        let sql = if part.starts_with("$$") { format!("do {part}") } else { part.to_owned() };
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(ledger.pool()).await.unwrap();
    }
    let last = Week::of(now).number();
    assert!(last > 960 + 60);
    let odd = |n: u32| kit::v7_at(now.minus(DAY * 7 * (u32::try_from(last).unwrap() - 960 - n)), 1);
    kit::assert_invalid(kit::try_one(&ledger, &of_tenant(Some("mallory-0"), odd(0))).await, "weeks");
    let mut got = 0;
    for n in 1..60 {
        got += u32::from(kit::try_one(&ledger, &of_tenant(Some("newcomer"), odd(n))).await.is_ok());
    }
    assert_eq!(got, 25, "half of what was left");
    kit::run(&ledger, &of_tenant(Some("latecomer"), odd(60))).await;
    kit::run(&ledger, &of_tenant(Some("mallory-1"), kit::v7_at(now, 9))).await;
    ledger.pool().close().await;
    scratch.drop_it().await;
}

/// The fenced and inline statements of docs/sql.md, in the order in which they stand there, in a database of their own.
#[tokio::test(flavor = "multi_thread")]
async fn t88_the_statements_of_the_sql_page_run_as_written() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/sql.md")).unwrap();
    let scratch = Scratch::new().await;
    let admin = pool_to(&scratch.url(), 2).await;
    PgLedger::with_pool(admin.clone(), settings("hapax")).await.unwrap();
    PgJournal::with_pool(admin.clone(), PgJournalSettings::default()).await.unwrap();
    hapax::backend::postgres::PgKeys::with_pool(
        admin.clone(),
        hapax::backend::postgres::PgKeysSettings::default(),
    )
    .await
    .unwrap();
    run(&admin, "create table orders (id text, amount int)".into()).await;
    let (app, relay) = (format!("app_{}", scratch.name), format!("relay_{}", scratch.name));
    for role in [&app, &relay] {
        scratch.admin(&format!("create role {role} login")).await;
    }
    run(&admin, format!("grant select, insert on orders to {app}")).await;
    let blocks: Vec<_> =
        page.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 8, "blocks of SQL on the page");
    let (grants, uses): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|sql| sql.starts_with("grant "));
    for sql in grants {
        let sql =
            sql.replace(" to app;", &format!(" to {app};")).replace(" to relay;", &format!(" to {relay};"));
        run(&admin, sql).await;
    }
    // What the grants on the page give is enough, and row security binds: the rest runs as that role.
    let service = pool_to(&scratch.url().replacen("postgres@", &format!("{app}@"), 1), 1).await;
    for (n, sql) in uses.iter().enumerate() {
        let sql = sql.replace("order-17-placed", &format!("order-17-placed-{n}"));
        sqlx::raw_sql(AssertSqlSafe(sql.clone()))
            .execute(&service)
            .await
            .unwrap_or_else(|e| panic!("{sql}\n{e}"));
    }
    // A client's retry of the page's request gets the answer, and no second row.
    let keyed = uses.iter().find(|sql| sql.contains("key_begin")).expect("a keyed write");
    let rows = || ask::<i64>(&service, "select count(*) from orders where id = 'order-17'");
    let before = rows().await;
    sqlx::raw_sql(AssertSqlSafe((*keyed).to_owned())).execute(&service).await.unwrap();
    assert_eq!(rows().await, before, "the same block again");
    let call = keyed.split("from ").nth(1).unwrap().split(';').next().unwrap();
    let answer = format!("select concat_ws(' ', outcome, status, convert_from(body, 'UTF8')) from {call}");
    assert_eq!(ask::<String>(&service, answer).await, "done 201 {\"id\": 17}");
    let mut inline = 0;
    for code in page.split('`').skip(1).step_by(2) {
        // A statement may go on in the page's next line.
        let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
        let sql = if code.starts_with("select ") {
            code
        } else if code.starts_with("hapax.claim_in(") {
            format!("select * from {code}")
        } else {
            continue;
        };
        assert!(!sql.contains("make_week(n"), "a number stands for itself: {sql}");
        inline += 1;
        sqlx::raw_sql(AssertSqlSafe(sql.clone()))
            .execute(&service)
            .await
            .unwrap_or_else(|e| panic!("{sql}\n{e}"));
    }
    assert!(inline >= 4, "{inline} statements within the text");
    // The week that the page's own error asks for, with the call that its message names: it books the week on the tenant.
    for (id, tenant) in [
        ("01700000-0000-7000-8000-000000000000", "null"),
        ("01800000-0000-7000-8000-000000000000", "'acme''s'"),
    ] {
        let missing: sqlx::Result<String> = sqlx::query_scalar(AssertSqlSafe(format!(
            "select outcome from hapax.claim_in('billing', '{id}', p_tenant => {tenant})"
        )))
        .fetch_one(&service)
        .await;
        let message = missing.unwrap_err().as_database_error().unwrap().message().to_owned();
        let call = message.split("call ").nth(1).unwrap().split(" in a transaction").next().unwrap();
        assert!(tenant == "null" || call.contains(&format!("p_tenant => {tenant}")), "{message}");
        assert!(ask::<bool>(&service, format!("select {call}")).await, "{message}");
    }
    service.close().await;
    admin.close().await;
    scratch.drop_it().await;
    let server = pool(1).await;
    run(&server, format!("drop role {app}; drop role {relay}")).await;
}
