//! Stores of API tokens pass the conformance suite; and what only a server, a file or a memory in front can show.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use hapax::access::{
    Access, Actor, ApiToken, AuditEntry, AuditNote, AuditSweep, Authentication, Authenticator, ListAudit,
    ListTokens, MemoryAccess, NewToken, Role, Rotation, SweptAudit, TokenEntry, TokenId, TokenState,
};
use hapax::backend::postgres::access::access_grants_sql;
use hapax::backend::postgres::{PgAccess, PgAccessSettings, Pooling};
use hapax::backend::sqlite::SqliteAccess;
use hapax::clock::ManualClock;
use hapax::testing::access::{AccessHarness, MemoryAccessHarness, all_rows, by, granted, said, writer};
use hapax::{Error, Result};
use sqlx::PgPool;

use crate::support::postgres::{
    advance_clock, ask, child, fresh_schema, pool, pool_to, role, run, stop_clock, until, url,
};
use crate::support::proxy::Proxy;

hapax::access_conformance!(memory, MemoryAccessHarness::new());
hapax::access_conformance!(sqlite, SqliteAccessHarness::new());
hapax::access_conformance!(postgres, PgAccessHarness::new().await);

/// A fresh file whose clock stands still until it is moved.
struct SqliteAccessHarness(tempfile::TempDir, ManualClock);

impl SqliteAccessHarness {
    fn new() -> Self {
        SqliteAccessHarness(tempfile::tempdir().unwrap(), ManualClock::new(hapax::testing::noon()))
    }
}

#[async_trait]
impl AccessHarness for SqliteAccessHarness {
    type Access = SqliteAccess;

    async fn open(&self) -> SqliteAccess {
        let file = self.0.path().join("server.db");
        SqliteAccess::open_with_clock(file, Arc::new(self.1.clone())).expect("the file opens")
    }

    async fn advance(&self, by: Duration) {
        self.1.advance(by);
    }
}

fn settings(schema: &str) -> PgAccessSettings {
    let mut settings = PgAccessSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings
}

/// A fresh schema whose clock stands still until it is moved.
struct PgAccessHarness {
    pool: PgPool,
    schema: String,
}

impl PgAccessHarness {
    async fn new() -> Self {
        let (pool, schema) = (pool(12).await, fresh_schema());
        PgAccess::with_pool(pool.clone(), settings(&schema)).await.expect("a fresh store");
        stop_clock(&pool, &schema, "access_now").await;
        PgAccessHarness { pool, schema }
    }
}

#[async_trait]
impl AccessHarness for PgAccessHarness {
    type Access = PgAccess;

    async fn open(&self) -> PgAccess {
        PgAccess::with_pool(self.pool.clone(), settings(&self.schema)).await.expect("the store opens")
    }

    async fn advance(&self, by: Duration) {
        advance_clock(&self.pool, &self.schema, by).await;
    }
}

async fn pg_access(connections: u32) -> PgAccess {
    PgAccess::with_pool(pool(connections).await, settings(&fresh_schema())).await.expect("a fresh store")
}

/// The answer to a COMMIT is lost: the caller holds the secret, and the store has it, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t182_a_lost_commit_of_a_token_leaves_no_secret_that_nobody_knows() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    let store = PgAccess::with_pool(direct, settings(&schema)).await.unwrap();
    let proxy = Proxy::new(&url()).await;
    let lossy = PgAccess::with_pool(pool_to(&proxy.url(&url()), 4).await, settings(&schema)).await.unwrap();
    let cut: [fn(&Proxy); 2] = [Proxy::lose_commit_answer, Proxy::lose_commit];
    for (n, lose) in cut.into_iter().enumerate() {
        let lost = proxy.lost();
        lose(&proxy);
        let token = writer(&lossy).await;
        granted(&store, &token).await;
        lose(&proxy);
        let next = ApiToken::with_secret(token.id().clone());
        lossy.rotate(&next, &Rotation::new(0), &by()).await.unwrap();
        granted(&store, &next).await;
        assert_eq!(said(&store, &token).await, Authentication::Unknown);
        lose(&proxy);
        lossy.revoke(token.id(), &by()).await.unwrap();
        assert_eq!(said(&store, &next).await, Authentication::Revoked);
        assert_eq!(proxy.lost() - lost, 3, "each was cut");
        assert_eq!(all_rows(&store).await.len(), 3 * (n + 1), "one row for each");
    }
}

/// kill -9 before the commit of each change: the token and its audit row are both there, or neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t187_a_killed_change_leaves_neither_a_token_nor_a_row() {
    const TEST: &str = "t187_a_killed_change_leaves_neither_a_token_nor_a_row";
    async fn changes(store: &impl Access) {
        let token = writer(store).await;
        let next = ApiToken::with_secret(token.id().clone());
        store.rotate(&next, &Rotation::new(0), &by()).await.unwrap();
        store.revoke(token.id(), &by()).await.unwrap();
    }
    async fn check(store: &impl Access, hit: usize) {
        let rows = all_rows(store).await;
        assert_eq!(rows.len(), hit - 1, "{rows:?}");
        let tokens = store.list(&ListTokens::default()).await.unwrap();
        let found: Vec<_> = tokens.iter().map(|token| (token.rotations, token.state)).collect();
        assert_eq!(found, [&[][..], &[(0, TokenState::Live)], &[(1, TokenState::Live)]][hit - 1]);
    }
    if let Some((backend, place)) = role() {
        if backend == "sqlite" {
            changes(&SqliteAccess::open(place).unwrap()).await;
        } else {
            changes(&PgAccess::with_pool(pool(2).await, settings(&place)).await.unwrap()).await;
        }
        println!("survived");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for hit in 1..=3 {
        let (schema, file) = (fresh_schema(), dir.path().join(format!("{hit}.db")));
        for (backend, place) in [("postgres", schema.as_str()), ("sqlite", file.to_str().unwrap())] {
            let mut command = child(TEST, backend, place);
            command.env(hapax::testing::crash::VARIABLE, format!("access.commit:{hit}"));
            let status = command.status().await.unwrap();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        }
        check(&PgAccess::with_pool(pool(2).await, settings(&schema)).await.unwrap(), hit).await;
        check(&SqliteAccess::open(&file).unwrap(), hit).await;
    }
}

/// A sweep of the audit that was killed is finished by the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_of_the_audit_that_was_killed_is_finished_by_the_next() {
    const TEST: &str = "a_sweep_of_the_audit_that_was_killed_is_finished_by_the_next";
    let sweep = || {
        let mut sweep = AuditSweep::new(Duration::from_hours(24 * 30));
        sweep.batch_max = 10;
        sweep
    };
    if let Some((_, schema)) = role() {
        let store = PgAccess::with_pool(pool(2).await, settings(&schema)).await.unwrap();
        println!("survived: {:?}", store.sweep(&sweep()).await);
        return;
    }
    let harness = PgAccessHarness::new().await;
    let store = harness.open().await;
    for n in 0..25 {
        store.note(&AuditNote::new(&by(), "test", n.to_string())).await.unwrap();
    }
    harness.advance(Duration::from_hours(24 * 31)).await;
    let mut command = child(TEST, "sweeper", &harness.schema);
    command.env(hapax::testing::crash::VARIABLE, "access.sweep.commit:2");
    let status = command.status().await.unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    assert_eq!(all_rows(&store).await.len(), 15, "one batch was committed");
    until("the killed sweep is gone", async || !store.sweep(&sweep()).await.unwrap().skipped).await;
    assert_eq!(all_rows(&store).await.len(), 0);
}

/// Nothing in the database or the file is a secret, or a part of one.
#[tokio::test]
async fn a_dump_of_the_store_has_no_secret() {
    let store = pg_access(2).await;
    let token = writer(&store).await;
    let next = ApiToken::with_secret(token.id().clone());
    store.rotate(&next, &Rotation::new(0).overlap(Duration::from_secs(60)), &by()).await.unwrap();
    let (schema, mut dump) = (store.schema().to_owned(), String::new());
    for table in ["access_token", "access_audit", "access_meta"] {
        let sql = format!("select coalesce(string_agg(t::text, '\n'), '') from {schema}.{table} t");
        dump += &ask::<String>(store.pool(), sql).await;
    }
    assert!(dump.contains(token.id().as_str()));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("server.db");
    let sqlite = SqliteAccess::open(&file).unwrap();
    sqlite.create(&token, &NewToken::new("shop", Role::Read), &by()).await.unwrap();
    sqlite.rotate(&next, &Rotation::new(0).overlap(Duration::from_secs(60)), &by()).await.unwrap();
    drop(sqlite);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.extend(std::fs::read(dir.path().join("server.db-wal")).unwrap_or_default());
    assert!(bytes.windows(16).any(|window| window == token.id().as_str().as_bytes()));
    for secret in [&token, &next] {
        let secret = &secret.expose()[21..53];
        assert!(!dump.contains(secret) && !format!("{store:?} {token:?}").contains(secret));
        for part in [&secret[..8], &secret[24..]] {
            assert!(!bytes.windows(8).any(|window| window == part.as_bytes()));
        }
    }
}

/// The role of a server can do its work, and cannot touch the audit.
#[tokio::test]
async fn a_servers_role_adds_audit_rows_and_changes_none() {
    let owner = pg_access(2).await;
    let schema = owner.schema().to_owned();
    let role = format!("server_{schema}");
    run(owner.pool(), format!("create role {role} login; {}", access_grants_sql(&schema, &role).unwrap()))
        .await;
    let options = (*owner.pool().connect_options()).clone().username(&role);
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    let mut check = settings(&schema);
    check.migrate = hapax::open::Migrate::Check;
    let store = PgAccess::with_pool(pool.clone(), check).await.unwrap();
    let token = writer(&store).await;
    granted(&store, &token).await;
    store.note(&AuditNote::new(&by(), "test", "x")).await.unwrap();
    assert_eq!(all_rows(&store).await.len(), 2);
    let denied = async |pool: &PgPool, sql: &str| {
        let sql = format!("{sql} {schema}.access_audit");
        let sql = if sql.starts_with("update") { format!("{sql} set who = 'nobody'") } else { sql };
        let failed = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(pool).await.expect_err("it is refused");
        failed.as_database_error().unwrap().code().unwrap().into_owned()
    };
    for change in ["update", "delete from", "truncate"] {
        assert_eq!(denied(&pool, change).await, "42501");
    }
    for change in ["update", "truncate"] {
        assert_eq!(denied(owner.pool(), change).await, "42501", "not even its owner changes a row");
    }
    assert_eq!(all_rows(&owner).await.len(), 2);
    pool.close().await;
    run(owner.pool(), format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn opening_tokens_is_safe_at_once_and_check_makes_nothing() {
    let (pool, schema) = (pool(8).await, fresh_schema());
    let mut check = settings(&schema);
    check.migrate = hapax::open::Migrate::Check;
    let missing = PgAccess::with_pool(pool.clone(), check).await;
    assert!(missing.is_err_and(|error| error.code() == "schema"));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (pool, schema) = (pool.clone(), schema.clone());
        tasks.spawn(async move { PgAccess::with_pool(pool, settings(&schema)).await.unwrap() });
        let (dir, file) = (tempfile::tempdir().unwrap(), "server.db");
        assert!(SqliteAccess::open_existing(dir.path().join(file)).is_err());
        assert!(!dir.path().join(file).exists());
        // Beside the keys of writes, in one file.
        hapax::backend::sqlite::SqliteKeys::open(dir.path().join(file)).unwrap();
        let refused = SqliteAccess::open_existing(dir.path().join(file)).unwrap_err();
        assert!(refused.to_string().contains("hapax token create"), "{refused}");
        SqliteAccess::open(dir.path().join(file)).unwrap();
        SqliteAccess::open_existing(dir.path().join(file)).unwrap();
    }
    assert_eq!(tasks.join_all().await.len(), 4);
    let refused = hapax::open::access("redis://127.0.0.1").await.unwrap_err();
    assert!(refused.code() == "unsupported" && refused.to_string().contains("revocation"), "{refused}");
    assert_eq!(hapax::open::access("memory:").await.unwrap().backend(), "memory");
}

/// Counts questions, and can be away.
#[derive(Debug, Default)]
struct Counted {
    store: MemoryAccess,
    asked: AtomicU64,
    away: AtomicBool,
    /// Answers about tokens that nobody knows do not come.
    stuck: AtomicBool,
}

#[async_trait]
impl Access for Counted {
    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.away.load(Ordering::SeqCst) {
            return Err(Error::unavailable("looking for a token", "the database is away"));
        }
        let said = self.store.authenticate(text).await?;
        if said == Authentication::Unknown && self.stuck.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Ok(said)
    }

    async fn has_tokens(&self) -> Result<bool> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.store.has_tokens().await
    }

    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        self.store.create(token, about, by).await
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        self.store.rotate(token, how, by).await
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        self.store.revoke(id, by).await
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        self.store.get(id).await
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        self.store.list(which).await
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        self.store.note(note).await
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        self.store.audit(which).await
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        self.store.sweep(settings).await
    }

    fn backend(&self) -> &'static str {
        "counted"
    }
}

/// A server remembers that a token is good. A revocation must end it all the same, within the time that is promised.
#[tokio::test]
async fn t180_a_revocation_takes_effect_within_the_memory() {
    let store = Arc::new(Counted::default());
    let memory = Duration::from_millis(400);
    let server = Authenticator::with_memory(store.clone(), memory);
    let token = writer(&store.store).await;
    let good =
        async || matches!(server.authenticate(token.expose()).await.unwrap(), Authentication::Granted { .. });
    // A slow machine may need longer than the memory for this; then it is asked again.
    for _ in 0..1000 {
        assert!(good().await);
    }
    let asked = store.asked.load(Ordering::SeqCst);
    assert!(asked < 200, "{asked} questions for 1000 requests");
    store.revoke(token.id(), &by()).await.unwrap();
    let revoked = std::time::Instant::now();
    loop {
        let asked = std::time::Instant::now();
        if !good().await {
            break;
        }
        // Whoever asks later than that is refused, however slow the machine is.
        assert!(asked.duration_since(revoked) < memory, "it is still good");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // What was asked before the revocation is not remembered for longer, however many ask.
    tokio::time::sleep(memory).await; // nothing shows when an answer is forgotten but time
    assert!(!good().await);
    assert_eq!(
        Authenticator::with_memory(store, Duration::from_secs(3600)).memory(),
        Duration::from_secs(10)
    );
}

/// An answer that was slow, and is old when it arrives, must not be remembered as if it were new.
#[tokio::test]
async fn what_is_remembered_ends_with_the_token_and_with_the_store() {
    let store = Arc::new(Counted::default());
    let server = Authenticator::with_memory(store.clone(), Duration::from_secs(10));
    let life = Duration::from_secs(3);
    let brief = loop {
        let brief = ApiToken::generate();
        store
            .create(&brief, &NewToken::new("brief", Role::Read).expires_in(Some(life)), &by())
            .await
            .unwrap();
        match server.authenticate(brief.expose()).await.unwrap() {
            Authentication::Granted { .. } => break brief,
            said => assert_eq!(said, Authentication::Expired), // the machine stood still: another one
        }
    };
    tokio::time::sleep(life).await; // until it expires, by the store's clock
    assert_eq!(server.authenticate(brief.expose()).await.unwrap(), Authentication::Expired, "not 10 s later");
    // Unknown is not remembered: it may be created in a moment.
    let late = ApiToken::generate();
    assert_eq!(server.authenticate(late.expose()).await.unwrap(), Authentication::Unknown);
    store.create(&late, &NewToken::new("late", Role::Read), &by()).await.unwrap();
    store.away.store(true, Ordering::SeqCst);
    let away = server.authenticate(late.expose()).await;
    assert!(away.is_err_and(|error| error.is_retryable()), "what is not known cannot be granted");
    let asked = store.asked.load(Ordering::SeqCst);
    assert_eq!(server.authenticate("hpx_nonsense").await.unwrap(), Authentication::Malformed);
    assert_eq!(store.asked.load(Ordering::SeqCst), asked, "nonsense costs no question");
}

/// The store has said no. What others remember must not say yes afterwards.
#[tokio::test]
async fn a_secret_that_was_refused_does_not_come_back() {
    let store = Arc::new(Counted::default());
    let server = Authenticator::with_memory(store.clone(), Duration::from_secs(4));
    let token = writer(&store.store).await;
    let good =
        async || matches!(server.authenticate(token.expose()).await.unwrap(), Authentication::Granted { .. });
    assert!(good().await);
    store.rotate(&ApiToken::with_secret(token.id().clone()), &Rotation::new(0), &by()).await.unwrap();
    let rotated = std::time::Instant::now();
    while good().await {
        assert!(rotated.elapsed() < Duration::from_secs(120), "it is still good");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..100 {
        assert!(!good().await);
    }
}

#[tokio::test]
async fn a_server_notices_the_first_token_and_then_stops_asking() {
    let store = Arc::new(Counted::default());
    let server = Authenticator::with_memory(store.clone(), Duration::from_millis(50));
    for _ in 0..100 {
        assert!(!server.has_tokens().await.unwrap());
    }
    writer(&store.store).await;
    let started = std::time::Instant::now();
    while !server.has_tokens().await.unwrap() {
        assert!(started.elapsed() < Duration::from_secs(120));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let asked = store.asked.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(60)).await; // longer than an answer is remembered
    assert!(server.has_tokens().await.unwrap());
    assert_eq!(store.asked.load(Ordering::SeqCst), asked);
}

/// Texts that a client could send as a token: an answer each, and never a grant.
#[tokio::test]
async fn t188_no_guess_is_told_more_than_unknown() {
    let store = pg_access(4).await;
    let live = writer(&store).await;
    let revoked = writer(&store).await;
    store.revoke(revoked.id(), &by()).await.unwrap();
    let expired = ApiToken::generate();
    let brief = NewToken::new("brief", Role::Admin).expires_in(Some(Duration::from_millis(1)));
    store.create(&expired, &brief, &by()).await.unwrap();
    until("it expires", async || said(&store, &expired).await == Authentication::Expired).await;
    let mut words = HashSet::new();
    for id in [live.id(), revoked.id(), expired.id(), ApiToken::generate().id()] {
        words.insert(said(&store, &ApiToken::with_secret(id.clone())).await.word());
    }
    assert_eq!(words, HashSet::from(["unknown"]));
}

/// Somebody tries tokens. Each costs the store a question, and everybody else waits behind them.
#[tokio::test]
async fn t246_guesses_are_bounded_and_keep_nobody_waiting() {
    let store = Arc::new(Counted::default());
    // Nothing is remembered: every good token costs a question too.
    let server = Arc::new(Authenticator::with_memory(store.clone(), Duration::ZERO));
    let (known, late) = (writer(&store.store).await, writer(&store.store).await);
    let say = async |token: &ApiToken| server.authenticate(token.expose()).await.unwrap();
    assert!(matches!(say(&known).await, Authentication::Granted { .. }));
    let (before, began) = (store.asked.load(Ordering::SeqCst), std::time::Instant::now());
    let mut throttled = 0;
    for _ in 0..2000 {
        match say(&ApiToken::generate()).await {
            Authentication::Unknown => {}
            Authentication::Throttled { wait } => {
                assert!(!wait.is_zero() && wait <= Duration::from_secs(1), "{wait:?}");
                throttled += 1;
            }
            said => panic!("{said:?}"),
        }
    }
    let asked = store.asked.load(Ordering::SeqCst) - before;
    let budget = 50 + 50 * (began.elapsed().as_secs() + 1);
    assert!(asked <= budget && asked + throttled == 2000, "{asked} of {budget}");
    assert!(matches!(say(&known).await, Authentication::Granted { .. }), "it is not one of them");
    // One that was not seen before waits for its turn.
    while matches!(say(&late).await, Authentication::Throttled { .. }) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(matches!(say(&late).await, Authentication::Granted { .. }));
    // The store takes its time about what it does not know, and many ask for it.
    store.stuck.store(true, Ordering::SeqCst);
    let mut guesses = tokio::task::JoinSet::new();
    let before = store.asked.load(Ordering::SeqCst);
    for _ in 0..50 {
        let server = Arc::clone(&server);
        guesses.spawn(async move { server.authenticate(ApiToken::generate().expose()).await });
    }
    while store.asked.load(Ordering::SeqCst) < before + 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for token in [&known, &late] {
        assert!(matches!(say(token).await, Authentication::Granted { .. }));
    }
    assert_eq!(store.asked.load(Ordering::SeqCst), before + 4, "two of the guesses are under way");
}
