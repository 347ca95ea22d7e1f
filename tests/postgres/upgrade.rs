//! A schema that an earlier build made, brought up to date. What those builds ran is in `tests/data/landed`, as it was.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::fmt::Write as _;
use std::time::Duration;

use crate::support::postgres::{Scratch, ask, fresh_schema, pool, pool_to, run, settings, until};
use hapax::Tenant;
use hapax::backend::postgres::keys::{KEYS_VERSION, keys_schema_sql};
use hapax::backend::postgres::{self, PgKeys, PgKeysSettings, PgLedger, Pooling, access, journal, records};
use hapax::keyed::{Begin, Begun, IdempotencyKey, Keys as _, RequestFingerprint, RequestParts};
use hapax::ledger::{Claim, Claims as _};
use hapax::testing::kit;
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

macro_rules! landed {
    ($($file:literal),+) => { &[$(include_str!(concat!("../data/landed/", $file, ".sql"))),+] };
}

/// The ledgers of earlier builds: what they ran, and the version that they stored. One and the same version came in two forms.
const LEDGERS: [(&str, &[&str], i32); 3] = [
    (
        "version 1",
        landed!(
            "ledger_1/0001_ledger",
            "ledger_1/0002_claim",
            "ledger_1/0003_settle",
            "ledger_1/0004_languages"
        ),
        1,
    ),
    (
        "version 2",
        landed!(
            "ledger_1/0001_ledger",
            "ledger_1/0002_claim",
            "ledger_1/0003_settle",
            "ledger_1/0004_languages",
            "ledger_2/0005_skips"
        ),
        2,
    ),
    (
        "version 2 with late scopes",
        landed!(
            "ledger_2/0001_ledger",
            "ledger_2/0002_claim",
            "ledger_2/0003_settle",
            "ledger_1/0004_languages",
            "ledger_2/0005_skips"
        ),
        2,
    ),
];

const KEYS: [(&str, &[&str], i32); 3] = [
    ("version 1", landed!("keys/0001_keys"), 1),
    ("version 2", landed!("keys/0001_keys", "keys/0002_row_security"), 2),
    (
        "version 2 that knows clocks that are ahead",
        landed!("keys/0001_keys_ahead", "keys/0002_row_security"),
        2,
    ),
];

const RETENTION: Duration = Duration::from_secs(7 * 86_400);
/// Whom rights are granted to: a role that every server has.
const ROLE: &str = "pg_monitor";

/// Runs what an earlier build ran, as it did.
async fn make(pool: &PgPool, schema: &str, steps: &[&str], meta: &str) {
    let sql = format!("BEGIN; SET LOCAL search_path = pg_catalog, pg_temp;\n{}{meta};COMMIT", steps.concat());
    let sql = sql.replace("{schema_literal}", &format!("'{schema}'")).replace("{schema}", schema);
    run(pool, sql.replace("{lock_timeout}", "100ms")).await;
}

/// What is in a schema, one line each, without the weeks and whatever the order of columns.
async fn catalog(pool: &PgPool, schema: &str) -> Vec<String> {
    let rights = |acl: &str| {
        format!(
            "coalesce((select string_agg(case when x.grantee = 0 then 'public' else pg_get_userbyid(x.grantee)::text end || '=' \
             || x.privilege_type || x.is_grantable::text, ' ' order by x.grantee, x.privilege_type) from aclexplode({acl}) x), 'default')"
        )
    };
    let tables = format!(
        "(select * from pg_class where relnamespace = '{schema}'::regnamespace and relname !~ '^entry_[1-9]')"
    );
    let sql = format!(
        "select 'function ' || p.proname || ' ' || pg_get_functiondef(p.oid) || {} || pg_get_userbyid(p.proowner)
           from pg_proc p where p.pronamespace = '{schema}'::regnamespace
         union all select 'relation ' || c.relname || ' ' || c.relkind::text || ' ' || c.relrowsecurity::text || c.relforcerowsecurity::text || ' '
             || coalesce(c.reloptions::text, '') || ' ' || {} || case c.relkind when 'v' then pg_get_viewdef(c.oid) else '' end
           from {tables} c
         union all select 'column ' || c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || ' ' || a.attnotnull::text
             || ' ' || coalesce(pg_get_expr(d.adbin, d.adrelid), '') || ' ' || coalesce(a.attacl::text, '')
           from {tables} c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
           left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
         union all select 'index ' || pg_get_indexdef(i.indexrelid) from {tables} c join pg_index i on i.indexrelid = c.oid
         union all select 'constraint ' || c.relname || ' ' || n.conname || ' ' || pg_get_constraintdef(n.oid)
           from {tables} c join pg_constraint n on n.conrelid = c.oid
         union all select 'policy ' || to_jsonb(p)::text from pg_policies p where p.schemaname = '{schema}'
         order by 1",
        rights("p.proacl"),
        rights("c.relacl")
    );
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("set local search_path = pg_catalog, pg_temp").execute(&mut *tx).await.unwrap();
    let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&mut *tx).await.unwrap();
    assert!(lines.len() > 30, "{lines:?}");
    // What a step renamed stays for statements that have found it already.
    let today = lines.into_iter().filter(|line| !line.contains("_before_3("));
    today.map(|line| line.replace(schema, "hapax")).collect()
}

/// Asserts that two schemas have the same, and shows the first line that differs.
fn same(what: &str, is: &[String], expected: &[String]) {
    for line in is {
        assert!(expected.contains(line), "{what}: a fresh schema has no such {line}");
    }
    for line in expected {
        assert!(is.contains(line), "{what}: only a fresh schema has {line}");
    }
}

/// Who may do what: the grants of the service's role, and nobody else runs a function.
async fn grant(pool: &PgPool, schema: &str, sql: &str) {
    run(pool, format!("{sql}; revoke execute on all functions in schema {schema} from public")).await;
}

/// What happened under the earlier build.
struct Past {
    done: Claim,
    leased: Claim,
    retry: Claim,
    dead: Claim,
    /// In a week that is over.
    old: Claim,
}

impl Past {
    async fn new(pool: &PgPool, s: &str) -> Self {
        let now: i64 = ask(pool, format!("select {s}.us({s}.ledger_now())")).await;
        let then = hapax::Time::from_micros(now - 40 * 86_400_000_000);
        let claim = |id: String| kit::claim(&id, kit::lease());
        let new = || claim(Uuid::now_v7().to_string());
        let old = claim(kit::v7_at(then, 7).to_string());
        let past = Past { done: new(), leased: new(), retry: new(), dead: new(), old };
        for (mine, how) in [
            (&past.done, "done"),
            (&past.leased, ""),
            (&past.retry, "retry"),
            (&past.dead, "dead"),
            (&past.old, "done"),
        ] {
            let (id, nonce) = (&mine.identity.id, mine.nonce.0);
            let token: i64 =
                ask(pool, format!("select token from {s}.lease('orders', '{id}', 900, p_nonce => {nonce})"))
                    .await;
            if !how.is_empty() {
                let settle = format!("select {s}.settle('orders', '{id}', {token}, '{how}')");
                assert!(ask::<bool>(pool, settle).await, "{how}");
            }
        }
        let ago = "at = at - interval '40 days'";
        let week = format!("week = {s}.week_of_id({s}.id_key('{}'))", past.old.identity.id);
        run(
            pool,
            format!("update {s}.touch set {ago} where {week}; update {s}.entry set {ago} where {week}"),
        )
        .await;
        past
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t510_a_ledger_of_an_earlier_build_becomes_todays() {
    let scratch = Scratch::new().await; // a drop waits for every transaction of the database
    let pool = pool_to(&scratch.url(), 4).await;
    let fresh = fresh_schema();
    PgLedger::with_pool(pool.clone(), settings(&fresh)).await.unwrap();
    grant(&pool, &fresh, &postgres::grants_sql(&fresh, ROLE).unwrap()).await;
    let expected = catalog(&pool, &fresh).await;
    for (what, steps, version) in LEDGERS {
        let s = fresh_schema();
        let meta = format!("insert into {s}.meta (version, accepts, identity) values ({version}, 1, 'id')");
        make(&pool, &s, steps, &meta).await;
        let past = Past::new(&pool, &s).await;
        let mut rights = postgres::grants_sql(&s, ROLE).unwrap();
        if version == 1 {
            rights = rights.replace(&format!(", {s}.skip, {s}.prevented"), "");
        }
        let mine = |name: &str| format!("create function {s}.{name}() returns int language sql return 1;");
        run(&pool, format!("{}{}", mine("mine"), mine("mine_before"))).await;
        grant(&pool, &s, &rights).await;

        // Two processes at once.
        let (one, other) = (pool_to(&scratch.url(), 2).await, pool_to(&scratch.url(), 2).await);
        let (one, other) =
            tokio::join!(PgLedger::with_pool(one, settings(&s)), PgLedger::with_pool(other, settings(&s)));
        let (ledger, _) = (one.unwrap(), other.unwrap());
        let mine = format!(
            "select count(*)::int from pg_proc where pronamespace = '{s}'::regnamespace and proname ~ '^mine'"
        );
        assert_eq!(ask::<i32>(&pool, mine).await, 2, "functions of others are left alone");
        run(&pool, format!("drop function {s}.mine(), {s}.mine_before()")).await;
        let renamed = format!(
            "select count(*)::int from pg_proc where pronamespace = '{s}'::regnamespace and proname ~ '_before_3$'"
        );
        assert_eq!(ask::<i32>(&pool, renamed).await, 2, "statements that have found them go on");
        assert_eq!(ask::<i32>(&pool, format!("select version from {s}.meta")).await, postgres::VERSION);
        let functions = |lines: &[String]| -> Vec<String> {
            lines.iter().filter(|line| line.starts_with("function ")).cloned().collect()
        };
        same(what, &functions(&catalog(&pool, &s).await), &functions(&expected));
        run(&pool, postgres::grants_sql(&s, ROLE).unwrap()).await; // for tables that are new
        run(&pool, format!("revoke execute on all functions in schema {s} from public")).await;
        same(what, &catalog(&pool, &s).await, &expected);

        // What a process of the earlier build still asks.
        let asks = format!(
            "select o_there from (select o_there, o_leaves, o_barred, o_refused from {s}.week_state(1, 28, 260, null)) x"
        );
        assert!(!ask::<bool>(&pool, asks).await);

        kit::expect(&ledger, &kit::another(&past.done), "duplicate").await;
        kit::expect(&ledger, &kit::another(&past.leased), "busy").await;
        let grant = kit::first(&ledger, &past.leased).await; // under its own nonce
        kit::settled(&ledger, &past.leased, &grant, kit::done()).await;
        kit::run(&ledger, &kit::another(&past.retry)).await;
        kit::expect(&ledger, &kit::another(&past.dead), "dead").await;
        let new = || kit::claim(&Uuid::now_v7().to_string(), kit::lease());
        kit::run(&ledger, &new()).await;
        // A week that is missing is made on demand, in a caller's transaction it is reported.
        let now = ledger.now().await.unwrap().as_micros();
        let other_week = |days: i64, n| kit::v7_at(hapax::Time::from_micros(now + days * 86_400_000_000), n);
        kit::run(&ledger, &kit::claim(&other_week(-80, 1).to_string(), kit::lease())).await;
        let mine = kit::claim(&other_week(-60, 2).to_string(), hapax::ledger::Mode::Done);
        let mut made = false;
        loop {
            let mut tx = pool.begin().await.unwrap();
            match ledger.claim_in(&mut tx, std::slice::from_ref(&mine)).await {
                Ok(mut outcomes) => {
                    assert_eq!(outcomes.remove(0).unwrap().name(), "claimed");
                    tx.commit().await.unwrap();
                    break;
                }
                Err(error) => assert!(!std::mem::replace(&mut made, true), "{error}"),
            }
            tx.rollback().await.unwrap();
            let week =
                format!("select {s}.make_week({s}.week_of_id({s}.id_key('{}')), 28, 260)", mine.identity.id);
            ask::<bool>(&pool, week).await;
        }
        let gone =
            format!("select exists (select from {s}.dropped where phase is null and scope_max is not null)");
        until("the old week is gone", async || {
            kit::sweep(&ledger, RETENTION).await;
            ask(&pool, gone.clone()).await
        })
        .await;
        kit::expect(&ledger, &kit::another(&past.old), "too_old").await;
    }
    scratch.drop_it().await;
}

fn keys_settings(schema: &str) -> PgKeysSettings {
    let mut settings = PgKeysSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t511_keys_of_an_earlier_build_become_todays() {
    let pool = pool(4).await;
    let fresh = fresh_schema();
    PgKeys::with_pool(pool.clone(), keys_settings(&fresh)).await.unwrap();
    grant(&pool, &fresh, &postgres::keys::keys_grants_sql(&fresh, ROLE).unwrap()).await;
    let expected = catalog(&pool, &fresh).await;
    for (what, steps, version) in KEYS {
        let s = fresh_schema();
        let meta = format!("insert into {s}.keys_meta (version, accepts) values ({version}, {version})");
        make(&pool, &s, steps, &meta).await;
        let print = "\\x0123456789abcdef0123456789abcdef";
        let begin = format!("select token from {s}.key_begin('old', '{print}', p_tenant => 'acme')");
        let token: i64 = ask(&pool, begin).await;
        let finish = format!("select {s}.key_finish('old', {token}, 201, 'kept', p_tenant => 'acme')");
        assert!(ask::<bool>(&pool, finish).await);
        grant(&pool, &s, &postgres::keys::keys_grants_sql(&s, ROLE).unwrap()).await;

        let (one, other) = tokio::join!(
            PgKeys::with_pool(pool.clone(), keys_settings(&s)),
            PgKeys::with_pool(crate::support::postgres::pool(2).await, keys_settings(&s))
        );
        let (keys, _) = (one.unwrap(), other.unwrap());
        assert_eq!(ask::<i32>(&pool, format!("select version from {s}.keys_meta")).await, KEYS_VERSION);
        grant(&pool, &s, "").await; // functions that are new
        run(&pool, postgres::keys::keys_grants_sql(&s, ROLE).unwrap()).await;
        same(what, &catalog(&pool, &s).await, &expected);

        let acme = Tenant::new("acme").unwrap();
        let old = keys.get(Some(&acme), &IdempotencyKey::new("old").unwrap()).await.unwrap();
        assert!(format!("{old:?}").contains("201"), "{what}: its answer is there: {old:?}");
        // A clock that is ahead by ten days, and one by forty.
        let now: i64 =
            ask(&pool, format!("select (extract(epoch from {s}.keys_now()) * 1000000)::bigint")).await;
        for (days, kind) in [(10, "first"), (40, "ahead")] {
            let id = kit::v7_at(hapax::Time::from_micros(now + days * 86_400_000_000), 1).to_string();
            let request = RequestParts { method: "POST", target: "/", body: b"{}", ..Default::default() };
            let print = RequestFingerprint::of(keys.secret(), &request);
            let begin = Begin::new(None, IdempotencyKey::new(&id).unwrap(), print);
            let outcome = keys.begin(&begin).await.unwrap();
            assert_eq!(matches!(outcome, Begun::First(_)), kind == "first", "{what}: {outcome:?}");
            let Begun::First(lease) = outcome else { continue };
            let finish = format!("select {s}.keys_finish('', '{id}', {}, 201, '[]', '')", lease.token.0);
            assert!(ask::<bool>(&pool, finish).await);
            let aged =
                format!("select aged_from > now() + interval '9 days' from {s}.keys where key = '{id}'");
            assert!(ask::<bool>(&pool, aged).await, "{what}: it is kept until it is old");
        }
    }
}

/// FNV-1a.
fn sum(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn t512_sql_that_changes_is_another_version() {
    let mut differs = String::new();
    for (part, sql, version, of, expected) in [
        ("ledger", postgres::schema_sql("hapax"), postgres::VERSION, 3, 0x473e_b1ec_527b_3a17),
        ("keys", keys_schema_sql("hapax"), KEYS_VERSION, 3, 0x1290_ecf8_e6a7_4953),
        ("journal", journal::journal_schema_sql("hapax"), journal::JOURNAL_VERSION, 2, 0x90e2_769d_897a_d652),
        ("access", access::access_schema_sql("hapax"), access::ACCESS_VERSION, 1, 0xe3f4_d80e_ef30_3186),
        ("records", records::records_schema_sql("hapax"), records::RECORDS_VERSION, 1, 0x3243_5a83_faa7_01a5),
    ] {
        let is = sum(&sql.unwrap());
        if (version, is) != (of, expected) {
            let _ = writeln!(differs, "{part}: version {version}, sum {is:#x}"); // a String takes all
        }
    }
    assert!(
        differs.is_empty(),
        "a database that exists gets SQL only with a new version: raise it, add a step if a table changes, then write here\n{differs}"
    );
}
