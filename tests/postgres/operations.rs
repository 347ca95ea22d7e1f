//! What an operator meets: migrations, roles, TLS, poolers, start-up checks, outages.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::postgres::{PgHarness, Scratch, ask, fresh_schema, pool, pool_to, run, settings, url};
use crate::support::proxy::Proxy;
use hapax::backend::postgres::{self, PgLedger, PgSettings, Pooling};
use hapax::config::Migrate;
use hapax::ledger::{Claims, Finding, Level, Mode, Operations, Outcome, SweepSettings};
use hapax::testing::{Harness as _, kit};
use hapax::{Error, Guard};
use sqlx::Connection as _;

fn finding<'f>(findings: &'f [Finding], check: &str) -> &'f Finding {
    findings.iter().find(|finding| finding.check == check).unwrap_or_else(|| panic!("no finding on {check}"))
}

fn refused<T>(result: Result<T, Error>, what: &str) -> Error {
    let error = result.err().unwrap_or_else(|| panic!("{what} should be refused"));
    println!("{what}: {}", error.chain());
    error
}

// --- the schema ------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn ten_start_at_once_on_an_empty_database() {
    let (pool, schema) = (pool(12).await, fresh_schema());
    let starts: Vec<_> =
        (0..10).map(|_| tokio::spawn(PgLedger::with_pool(pool.clone(), settings(&schema)))).collect();
    let mut won = 0;
    for start in starts {
        let ledger = start.await.unwrap().expect("a start beside nine others");
        won += usize::from(kit::one(&ledger, &kit::claim("one-event", Mode::Done)).await.is_claimed());
    }
    let versions: i64 = ask(&pool, format!("select count(*) from {schema}.meta")).await;
    println!("10 starts, {versions} schema, {won} winner");
    assert_eq!((versions, won), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn schema_names_that_need_quoting_are_refused() {
    let pool = pool(1).await;
    for name in ["", "Hapax", "7days", "a b", "a\"b", "a;drop schema public", "é", &"a".repeat(49)] {
        let error = refused(PgLedger::with_pool(pool.clone(), settings(name)).await, "a schema name");
        assert!(matches!(error, Error::Config(_)) && error.to_string().contains("ledger.schema"), "{error}");
        assert!(postgres::schema_sql(name).is_err() && postgres::grants_sql("hapax", name).is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_unless_it_accepts_this_build() {
    let (pool, schema) = (pool(2).await, fresh_schema());
    PgLedger::with_pool(pool.clone(), settings(&schema)).await.unwrap();
    let newer = postgres::VERSION + 1;
    run(&pool, format!("update {schema}.meta set version = {newer}, accepts = {newer}")).await;
    let error = refused(PgLedger::with_pool(pool.clone(), settings(&schema)).await, "a newer schema");
    assert!(matches!(error, Error::Schema(_)) && error.to_string().contains("update it"), "{error}");
    // A rolling update: the newer schema still takes the older build.
    run(&pool, format!("update {schema}.meta set accepts = {}", postgres::VERSION)).await;
    let ledger = PgLedger::with_pool(pool, settings(&schema)).await.expect("accepted");
    kit::run(&ledger, &kit::claim("one-event", kit::lease())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_check_creates_nothing() {
    let (pool, schema) = (pool(2).await, fresh_schema());
    let mut check = settings(&schema);
    check.migrate = Migrate::Check;
    let error = refused(PgLedger::with_pool(pool.clone(), check.clone()).await, "check on an empty database");
    assert!(matches!(error, Error::Schema(_)) && error.to_string().contains("hapax ledger init"), "{error}");
    assert!(!ask::<bool>(&pool, format!("select to_regnamespace('{schema}') is not null")).await);
    // A DBA runs what we print; then the check is content.
    run(&pool, postgres::schema_sql(&schema).unwrap()).await;
    let ledger = PgLedger::with_pool(pool, check).await.expect("the schema is there");
    kit::run(&ledger, &kit::claim("one-event", kit::lease())).await;
}

// --- roles -----------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn the_runtime_role_claims_and_makes_weeks_and_the_owner_sweeps() {
    let (admin, schema) = (pool(2).await, fresh_schema());
    let role = format!("{}_app", &schema[..20]);
    let owner = PgLedger::with_pool(admin.clone(), settings(&schema)).await.unwrap();
    run(&admin, format!("create role {role} login")).await;
    run(&admin, postgres::grants_sql(&schema, &role).unwrap()).await;
    let mut check = settings(&schema);
    check.migrate = Migrate::Check;
    let as_role = pool_to(&url().replace("postgres@", &format!("{role}@")), 2).await;
    let ledger = PgLedger::with_pool(as_role.clone(), check).await.expect("the runtime role needs no DDL");
    // A new scope, a new week, an order, a failure, a same-transaction claim: everything a service does.
    let now = ledger.now().await.unwrap();
    for weeks in 0..3 {
        kit::run(
            &ledger,
            &kit::claim(&kit::v7_at(now.minus(weeks * 7 * kit::DAY), 1).to_string(), kit::lease()),
        )
        .await;
    }
    kit::run(&ledger, &kit::latest(1)).await;
    kit::expect(&ledger, &kit::claim("failing", kit::failed()), "retry_later").await;
    let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
    let mut tx = as_role.begin().await.unwrap();
    assert!(guard.try_claim_in(&mut tx, "in-transaction").await.unwrap().is_claimed());
    tx.commit().await.unwrap();
    let once = guard.try_claim("at-most-once").await.unwrap();
    assert!(once.is_claimed());
    drop(once);
    assert!(ledger.check().await.unwrap().iter().all(|finding| finding.level != Level::Refusal));
    // What it may not.
    for sql in [
        "drop table {s}.entry_0",
        "alter table {s}.entry add column x int",
        "create table {s}.mine (x int)",
        "update {s}.meta set version = 99",
        "delete from {s}.dropped",
        "delete from {s}.audit",
        "drop schema {s} cascade",
    ] {
        let sql = sql.replace("{s}", &schema);
        let error = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone())).execute(&as_role).await.expect_err(&sql);
        assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("42501"), "{sql}");
    }
    let sweep =
        hapax::ledger::SweepSettings { retention: Duration::from_secs(1), batch_max: 100, dry_run: false };
    let before: i64 = ask(&admin, format!("select count(*) from {schema}.dropped")).await;
    // Bounded even by name: a week of the far future is not made.
    let far = sqlx::query(sqlx::AssertSqlSafe(format!(
        "select {schema}.make_week(5000::smallint, 100000, 100000)"
    )))
    .execute(&as_role)
    .await;
    assert!(far.is_err(), "the function has bounds of its own");
    println!("dropped before: {before}");
    owner.sweep(sweep).await.expect("the owner sweeps");
    run(&admin, format!("drop schema {schema} cascade; drop owned by {role}; drop role {role}")).await;
}

// --- TLS and poolers -------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn verified_tls_works_and_a_wrong_ca_or_host_is_refused() {
    let ca = std::env::var("HAPAX_TEST_PG_CA").expect("HAPAX_TEST_PG_CA: run scripts/test");
    // The service with TLS is PostgreSQL 18's, whichever server the rest of the suite runs against.
    let plain =
        std::env::var("HAPAX_TEST_POSTGRES_18_URL").expect("HAPAX_TEST_POSTGRES_18_URL: run scripts/test");
    let by_name = plain.replace("127.0.0.1", "localhost");
    let schema = fresh_schema();
    let mut quick = settings(&schema);
    quick.acquire_timeout = Duration::from_secs(60);
    let good =
        PgLedger::connect(&format!("{by_name}?sslmode=verify-full&sslrootcert={ca}"), quick.clone()).await;
    let ledger = good.expect("verified TLS");
    let encrypted: bool =
        ask(ledger.pool(), "select ssl from pg_stat_ssl where pid = pg_backend_pid()").await;
    assert!(encrypted);
    kit::run(&ledger, &kit::claim("over-tls", kit::lease())).await;
    let other = tempfile::NamedTempFile::new().unwrap();
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args(["-subj", "/CN=another CA", "-keyout", "/dev/null", "-out"])
        .arg(other.path())
        .output()
        .unwrap();
    assert!(made.status.success());
    let wrong_ca = format!("{by_name}?sslmode=verify-full&sslrootcert={}", other.path().display());
    // The same server under an address that its certificate does not name.
    let listener = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
    let elsewhere = listener.local_addr().unwrap();
    let server = plain.split('@').nth(1).and_then(|rest| rest.split('/').next()).unwrap().to_owned();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = tokio::net::TcpStream::connect(&server).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    let wrong_host = format!("postgres://postgres@{elsewhere}/postgres?sslmode=verify-full&sslrootcert={ca}");
    let began = Instant::now();
    let error = refused(PgLedger::connect(&wrong_ca, quick.clone()).await, "another CA");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(error.chain().contains("certificate"), "{}", error.chain());
    let error = refused(PgLedger::connect(&wrong_host, quick).await, "another host");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(error.chain().contains("certificate"), "{}", error.chain());
    assert!(began.elapsed() < Duration::from_secs(50), "refused, not timed out: {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_pooler_is_noticed_and_everything_works_through_it() {
    let url = std::env::var("HAPAX_TEST_PGBOUNCER_URL").expect("HAPAX_TEST_PGBOUNCER_URL: run scripts/test");
    let mut detect = PgSettings::default();
    detect.schema = fresh_schema();
    detect.pooling = Pooling::Detect;
    let ledger = PgLedger::connect(&url, detect).await.expect("a ledger through PgBouncer");
    let findings = ledger.check().await.unwrap();
    assert_eq!(finding(&findings, "pooling").level, Level::Warning);
    println!("{}", finding(&findings, "pooling").message);
    let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
    let tasks: Vec<_> = (0..60)
        .map(|n| {
            let guard = guard.clone();
            tokio::spawn(async move {
                let Outcome::First(mut lease) = guard.lease(format!("leased-{n}")).await.unwrap() else {
                    panic!("a first")
                };
                lease.extend().await.unwrap();
                lease.done().await.unwrap();
                let mut tx = guard.ledger().pool().begin().await.unwrap();
                let id = format!("in-transaction-{n}");
                assert!(guard.try_claim_in(&mut tx, &id).await.unwrap().is_claimed());
                assert!(!guard.try_claim_in(&mut tx, format!("leased-{n}")).await.unwrap().is_claimed());
                tx.commit().await.unwrap();
                assert!(guard.is_processed(&id).await.unwrap());
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let done: i64 = ask_simply(
        &ledger,
        &format!("select count(*) from {}.entries where state = 'done'", ledger.schema()),
    )
    .await;
    println!("{done} events done through PgBouncer");
    assert_eq!(done, 120);
    run(ledger.pool(), format!("drop schema {} cascade", ledger.schema())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_pooler_is_noticed_beside_its_other_clients() {
    let url = std::env::var("HAPAX_TEST_PGBOUNCER_URL").expect("HAPAX_TEST_PGBOUNCER_URL: run scripts/test");
    let busy: Vec<_> = (0..6)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let mut other = sqlx::PgConnection::connect(&url).await.unwrap();
                loop {
                    let _ = sqlx::raw_sql("select 1").execute(&mut other).await.unwrap();
                }
            })
        })
        .collect();
    let schema = fresh_schema();
    for n in 0..20 {
        let mut detect = settings(&schema);
        detect.pooling = Pooling::Detect;
        let ledger = PgLedger::connect(&url, detect).await.unwrap();
        let findings = ledger.check().await.unwrap();
        assert_eq!(finding(&findings, "pooling").level, Level::Warning, "start {n}: {findings:?}");
        if n == 19 {
            // Through the pooler: it may stand before another server than that of the other tests.
            run(ledger.pool(), format!("drop schema {schema} cascade")).await;
        }
        ledger.pool().close().await;
    }
    for other in busy {
        assert!(!other.is_finished(), "the other clients asked until the end");
        other.abort();
    }
}

/// Without a prepared statement, which PgBouncer may not know.
async fn ask_simply(ledger: &PgLedger, sql: &str) -> i64 {
    let row = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(ledger.pool()).await.unwrap();
    sqlx::Row::get(&row, 0)
}

// --- start-up checks -------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn t34_asynchronous_commit_is_refused_at_start() {
    let scratch = Scratch::new().await;
    let ledger = PgLedger::with_pool(pool_to(&scratch.url(), 1).await, settings("hapax")).await.unwrap();
    let findings = ledger.check().await.unwrap();
    for check in
        ["fsync", "full_page_writes", "synchronous_commit", "version", "writable", "standbys", "pooling"]
    {
        assert_eq!(finding(&findings, check).level, Level::Fine, "{findings:?}");
    }
    scratch.admin("alter database {db} set synchronous_commit = off").await;
    let opened = PgLedger::with_pool(pool_to(&scratch.url(), 2).await, settings("hapax")).await;
    let error = refused(opened, "asynchronous commit");
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains("synchronous_commit is off"), "{error}");
    // Switched off later, a check still tells.
    run(ledger.pool(), "set synchronous_commit = off".into()).await;
    let findings = ledger.check().await.unwrap();
    assert_eq!(finding(&findings, "synchronous_commit").level, Level::Refusal);
    // Weaker than local, but durable here.
    scratch.admin("alter database {db} set synchronous_commit = local").await;
    let ledger = PgLedger::with_pool(pool_to(&scratch.url(), 2).await, settings("hapax")).await.unwrap();
    assert_eq!(finding(&ledger.check().await.unwrap(), "synchronous_commit").level, Level::Fine);
    scratch.drop_it().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_database_is_refused_and_unchanged() {
    let scratch = Scratch::new().await;
    let writable = PgLedger::with_pool(pool_to(&scratch.url(), 2).await, settings("hapax")).await.unwrap();
    kit::run(&writable, &kit::claim("before", kit::lease())).await;
    let rows = "select (select count(*) from hapax.entry) + (select count(*) from hapax.scope)";
    let before: i64 = ask(writable.pool(), rows).await;
    scratch.admin("alter database {db} set default_transaction_read_only = on").await;
    let opened = PgLedger::with_pool(pool_to(&scratch.url(), 2).await, settings("hapax")).await;
    let error = refused(opened, "a read-only database");
    assert!(matches!(error, Error::Refused { .. }) && error.to_string().contains("read-only"), "{error:?}");
    // It becomes read-only under a ledger that is open (a failover to a standby): its one connection is told so. That passes.
    scratch.admin("alter database {db} reset default_transaction_read_only").await;
    let ledger = PgLedger::with_pool(pool_to(&scratch.url(), 1).await, settings("hapax")).await.unwrap();
    ledger.probe().await.unwrap();
    run(ledger.pool(), "set default_transaction_read_only = on".into()).await;
    let error = refused(ledger.probe().await, "a probe of a read-only database");
    assert!(
        matches!(error, Error::Unavailable { .. }) && error.to_string().contains("read-only"),
        "{error:?}"
    );
    let findings = ledger.check().await.unwrap();
    assert_eq!(finding(&findings, "writable").level, Level::Refusal);
    for (id, scope) in [("after", "orders"), ("after", "new-scope")] {
        let mut claim = kit::claim(id, kit::lease());
        claim.identity.scope = hapax::Scope::new(scope).unwrap();
        let error = refused(ledger.claim(&[claim]).await, "a claim on a read-only database");
        assert!(matches!(error, Error::Unavailable { .. }) && error.is_retryable(), "{error:?}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
    assert_eq!(ask::<i64>(writable.pool(), rows).await, before, "nothing was changed");
    scratch.drop_it().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_reached_is_a_sentence_soon() {
    let mut quick = settings(&fresh_schema());
    quick.acquire_timeout = Duration::from_secs(3);
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let other_port = format!("postgres://postgres@127.0.0.1:{free}/postgres");
    for (what, url) in [
        ("nobody listens", other_port),
        ("no such host", "postgres://postgres@no-such-host.invalid:5432/postgres?sslmode=disable".to_owned()),
        ("no such database", support::url_of("no_such_database")),
        ("no such role", url().replace("postgres@", "nobody_i_know@")),
    ] {
        let began = Instant::now();
        let error = refused(PgLedger::connect(&url, quick.clone()).await, what);
        let took = began.elapsed();
        assert!(matches!(error, Error::Unavailable { .. }), "{what}: {error:?}");
        assert!(!error.chain().contains("at line"), "{what}: {}", error.chain());
        assert!(error.chain().len() > 40, "{what}: a sentence with its cause, not {:?}", error.chain());
        assert!(took < Duration::from_mins(1), "{what} took {took:?}");
    }
    let error = refused(PgLedger::connect("mysql://root@localhost/x", quick).await, "another kind of URL");
    assert!(matches!(error, Error::Config(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_is_a_sentence_without_its_password() {
    let with_password = url().replace("postgres@", "no_such_role:open-sesame@");
    let error = refused(
        PgLedger::connect(&with_password, settings(&fresh_schema())).await,
        "a role that does not exist",
    );
    assert!(error.chain().contains("refused"), "{}", error.chain());
    assert!(!format!("{error:?} {}", error.chain()).contains("open-sesame"), "{error:?}");
}

// --- outages ---------------------------------------------------------------------------------------------------------

/// Collects log lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn about_the_ledger(&self) -> Vec<String> {
        let lines = self.0.lock().unwrap();
        lines.iter().filter(|line| line.contains("ledger")).cloned().collect()
    }
}

struct Visit(String);

impl tracing::field::Visit for Visit {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        use std::fmt::Write as _;
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
            && metadata.target().starts_with("hapax")
            && *metadata.level() <= tracing::Level::INFO
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut visit = Visit(event.metadata().level().to_string());
        event.record(&mut visit);
        self.0.lock().unwrap().push(visit.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn t42_an_outage_logs_two_lines_and_errors_are_known_by_sqlstate() {
    // One thread, so that the subscriber of this test hears every task of it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let lines = Lines::default();
    let _listening = tracing::subscriber::set_default(lines.clone());
    runtime.block_on(async {
        outage(&lines).await;
        known_by_sqlstate().await;
    });
}

/// A drop that cannot go on is logged, once no other sweeper can be at it any more.
#[test]
fn a_drop_that_does_not_get_on_is_reported() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let lines = Lines::default();
    let _listening = tracing::subscriber::set_default(lines.clone());
    runtime.block_on(async {
        let harness = PgHarness::new().await;
        let (ledger, s) = (kit::open(&harness).await, &harness.schema);
        let old = kit::v7_at(ledger.now().await.unwrap(), 1);
        kit::run(&ledger, &kit::claim(&old.to_string(), kit::lease())).await;
        harness.advance(30 * kit::DAY).await;
        let settings = SweepSettings { retention: 7 * kit::DAY, batch_max: 1000, dry_run: false };
        ledger.sweep_part(settings, 1).await.unwrap();
        let table =
            format!("select format('entry_%s_%s', week, number) from {s}.dropped where phase = 'closed'");
        let table: String = ask(&harness.pool, table).await;
        run(&harness.pool, format!("drop table {s}.{table}")).await; // by hand, as nobody should
        let warnings = |lines: &Lines| {
            lines.0.lock().unwrap().iter().filter(|line| line.contains("gets on with it")).count()
        };
        ledger.sweep(settings).await.unwrap();
        assert_eq!(warnings(&lines), 0, "another sweeper may be at it");
        harness.advance(Duration::from_secs(3600)).await; // longer than any sweeper waits
        ledger.sweep(settings).await.unwrap();
        assert_eq!(warnings(&lines), 1, "{:?}", lines.0.lock().unwrap());
    });
}

async fn outage(lines: &Lines) {
    let proxy = Proxy::new(&url()).await;
    let schema = fresh_schema();
    let pool = sqlx::postgres::PgPoolOptions::new()
        .max_connections(3)
        .acquire_timeout(Duration::from_secs(10)) // a refusal comes at once
        .connect(&proxy.url(&url()))
        .await
        .unwrap();
    let ledger = PgLedger::with_pool(pool, settings(&schema)).await.unwrap();
    // Without its sweeper, which would have something to say of its own.
    let guard =
        Guard::builder(ledger).scope("orders").with(|settings| settings.sweep = false).build().unwrap();
    assert!(guard.lease("before").await.unwrap().is_claimed());
    proxy.refuse();
    let calls: Vec<_> = (0..30)
        .map(|n| {
            let guard = guard.clone();
            tokio::spawn(async move { guard.lease(format!("during-{n}")).await.is_err() })
        })
        .collect();
    let mut errors = 0;
    for call in calls {
        errors += usize::from(call.await.unwrap());
    }
    proxy.heal();
    let mut after = guard.lease("after").await;
    while after.is_err() {
        after = guard.lease("after").await;
    }
    assert!(after.unwrap().is_claimed());
    assert!(guard.lease("later").await.unwrap().is_claimed());
    let logged = lines.about_the_ledger();
    println!("{errors} calls failed; the log says:\n  {}", logged.join("\n  "));
    assert_eq!(errors, 30);
    assert_eq!(logged.len(), 2, "one line when it begins, one when it ends");
    assert!(logged[0].starts_with("WARN") && logged[1].starts_with("INFO"), "{logged:?}");
}

/// The server raises errors with texts that lie about what they are; only their codes count.
async fn known_by_sqlstate() {
    let (pool, schema) = (pool(2).await, fresh_schema());
    let ledger = PgLedger::with_pool(pool.clone(), settings(&schema)).await.unwrap();
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await;
    let cases = [
        ("40001", "datenbank voll", "contended"),
        ("40P01", "verbinding verbroken", "contended"),
        ("25006", "could not serialize access", "unavailable"),
        ("53100", "deadlock detected", "refused"),
        ("42501", "lock timeout", "refused"),
        ("22P02", "could not serialize access", "invalid"),
        ("57P01", "duplicate key value", "unavailable"),
        ("42883", "could not connect to server", "schema"),
    ];
    for (state, text, code) in cases {
        run(
            &pool,
            format!(
                "create or replace function {schema}.ledger_now() returns timestamptz volatile \
                 language plpgsql as $$ begin raise exception '{text}' using errcode = '{state}'; end $$"
            ),
        )
        .await;
        let error = match ledger.claim(&[kit::claim("refused", kit::lease())]).await {
            Err(error) => error,
            Ok(mut outcomes) => outcomes.remove(0).expect_err("the server raised an error"),
        };
        println!("{state} {text:?} is {}", error.code());
        assert_eq!(error.code(), code, "{state}: {error:?}");
    }
    // Locked is not an error at all: someone has it.
    run(
        &pool,
        format!(
            "create or replace function {schema}.ledger_now() returns timestamptz volatile \
             language plpgsql as $$ begin raise exception 'disk full' using errcode = '55P03'; end $$"
        ),
    )
    .await;
    kit::expect(&ledger, &kit::claim("refused", kit::lease()), "busy").await;
    let rows: i64 = ask(&pool, format!("select count(*) from {schema}.entries where id = 'refused'")).await;
    assert_eq!(rows, 0, "none of these errors left a row");
}
