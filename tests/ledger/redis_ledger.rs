//! The Redis ledger where it differs from the others: scripts, lost acknowledgements, late decisions, several connections.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::valkey as support;
use std::time::Duration;

use crate::support::valkey::RedisHarness;
use hapax::backend::redis::{RedisLedger, RedisSettings};
use hapax::config::Migrate;
use hapax::ledger::{Claim, Identity, IdentityRule, Level, Mode, Outcome, Settings, State, SweepSettings};
use hapax::open::{OpenSettings, ledger_with as open};
use hapax::testing::Harness;
use hapax::testing::kit::{
    another, claim, done, expect, first, lease, one, settled, settling, there, try_one,
};
use hapax::testing::proxy::{Cut, Proxy};
use hapax::{Claims, Error, EventId, Operations, Scope};

/// What only the writing script is sent.
const WRITE: &str = "\r\nset\r\n";

async fn connect() -> RedisLedger {
    let settings = support::settings(&support::fresh_name(), Settings::default());
    RedisLedger::connect(&support::url(), settings).await.unwrap()
}

/// A ledger behind a proxy that loses what it is told to.
async fn behind_proxy() -> (RedisLedger, Proxy) {
    let proxy = Proxy::start(support::address().parse().unwrap()).await.unwrap();
    let settings = support::settings(&support::fresh_name(), Settings::default());
    let ledger = RedisLedger::connect(&format!("redis://{}", proxy.address()), settings).await.unwrap();
    // The server has the scripts now, so the next answer is that of the script itself.
    first(&ledger, &claim("warm up", Mode::Done)).await;
    (ledger, proxy)
}

/// Cuts at the next write. The proxy also looks at the last bytes of what was sent before, so something else comes first.
async fn arm(ledger: &RedisLedger, proxy: &Proxy, cut: Cut) {
    for _ in 0..5 {
        ledger.now().await.unwrap();
    }
    proxy.arm(WRITE, cut);
}

/// Hole 31: the acknowledgement is lost, the claim is not; the same claim again has the same outcome.
#[tokio::test]
async fn t31_a_lost_acknowledgement_is_resolved_by_the_same_claim() {
    let (ledger, proxy) = behind_proxy().await;
    for mode in [lease(), Mode::Done, Mode::Once { track: None }] {
        for cut in [Cut::Answer, Cut::Request] {
            let mine = claim(&uuid::Uuid::new_v4().to_string(), mode);
            let cuts = proxy.cuts();
            arm(&ledger, &proxy, cut).await;
            let error = ledger.claim(std::slice::from_ref(&mine)).await.unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
            proxy.cut(cuts + 1).await;
            support::until("the connection is back", async || ledger.now().await.is_ok()).await;
            let applied = ledger.get(&mine.identity, None).await.unwrap();
            assert_eq!(applied.is_some(), cut == Cut::Answer);
            let grant = first(&ledger, &mine).await;
            assert!(
                applied.is_none_or(|entry| entry.token == grant.token),
                "the claim that was made, not another"
            );
            let other = one(&ledger, &another(&mine)).await;
            assert!(!other.is_claimed(), "{other:?}");
        }
    }
}

/// A settling whose acknowledgement is lost is settled; again is fine.
#[tokio::test]
async fn t31_a_lost_settling_is_settled_again() {
    let (ledger, proxy) = behind_proxy().await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    arm(&ledger, &proxy, Cut::Answer).await;
    let error = ledger.settle(&[settling(&mine, &grant, done())]).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    support::until("the connection is back", async || ledger.now().await.is_ok()).await;
    assert_eq!(there(&ledger, &mine).await.state, State::Done);
    settled(&ledger, &mine, &grant, done()).await;
    assert_eq!(there(&ledger, &mine).await.state, State::Done);
}

/// Whoever slept between deciding and writing decides anew: the server's time is checked where it is written.
#[tokio::test]
async fn t19_a_late_decision_is_not_written() {
    let harness = RedisHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    let mine = claim("e", Mode::Done);
    let mut transaction = ledger.begin();
    assert!(transaction.claim(std::slice::from_ref(&mine)).await.unwrap()[0].as_ref().unwrap().is_claimed());
    harness.advance(Duration::from_millis(1001)).await;
    let error = transaction.commit().await.unwrap_err();
    assert!(matches!(error, Error::Contended { .. }), "{error:?}");
    assert!(ledger.get(&mine.identity, None).await.unwrap().is_none());
    assert!(!ledger.was_committed(&mine).await.unwrap());
    expect(&ledger, &mine, "claimed").await;
}

/// Two decisions on the same entry: the second to be written is not.
#[tokio::test]
async fn c1_a_decision_on_what_has_changed_is_not_written() {
    let ledger = connect().await;
    let (mine, theirs) = (claim("e", Mode::Done), claim("e", Mode::Done));
    let mut transaction = ledger.begin();
    assert!(transaction.claim(std::slice::from_ref(&mine)).await.unwrap()[0].as_ref().unwrap().is_claimed());
    first(&ledger, &theirs).await;
    assert!(matches!(transaction.commit().await.unwrap_err(), Error::Contended { .. }));
    assert!(ledger.was_committed(&theirs).await.unwrap() && !ledger.was_committed(&mine).await.unwrap());
}

/// Several connections, as several processes have them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_connections_share_one_winner_each() {
    let name = support::fresh_name();
    let ids: Vec<EventId> = (0..40).map(|_| EventId::now_v7()).collect();
    let mut tasks = Vec::new();
    for _ in 0..6 {
        let settings = support::settings(&name, Settings::default());
        let (ledger, ids) = (RedisLedger::connect(&support::url(), settings).await.unwrap(), ids.clone());
        tasks.push(tokio::spawn(async move {
            let scope = Scope::new("orders").unwrap();
            let mut won = Vec::new();
            for batch in ids.chunks(8) {
                let claims: Vec<Claim> = batch
                    .iter()
                    .map(|id| Claim::new(Identity::new(scope.clone(), id.clone()), lease()))
                    .collect();
                for (claim, outcome) in claims.iter().zip(ledger.claim(&claims).await.unwrap()) {
                    if let Outcome::First(grant) = outcome.unwrap() {
                        won.push((claim.identity.id.clone(), grant.token));
                    }
                }
            }
            won
        }));
    }
    let mut won = Vec::new();
    for task in tasks {
        won.extend(task.await.unwrap());
    }
    won.sort();
    let winners: Vec<_> = won.into_iter().map(|(id, _)| id).collect();
    let mut ids = ids;
    ids.sort();
    assert_eq!(winners, ids, "each id has one winner");
}

/// One URL picks it; it lives on the server's clock.
#[tokio::test]
async fn a_url_opens_it() {
    let mut settings = OpenSettings::default();
    settings.schema = support::fresh_name();
    let ledger = open(&support::url(), &settings).await.unwrap();
    assert_eq!(ledger.capabilities().backend, "redis");
    let mine = claim("e", lease());
    let before = ledger.now().await.unwrap();
    let grant = first(&ledger, &mine).await;
    assert!(grant.until >= before.plus(Duration::from_secs(60)));
    settled(&ledger, &mine, &grant, done()).await;
    expect(&open(&support::url(), &settings).await.unwrap(), &another(&mine), "duplicate").await;
    let worst = ledger.check().await.unwrap().into_iter().map(|finding| finding.level).max();
    assert_eq!(worst, Some(Level::Fine), "the test server has appendfsync always and noeviction");
}

#[tokio::test]
async fn what_cannot_be_opened_says_why() {
    let name = support::fresh_name();
    let mut settings = support::settings(&name, Settings::default());
    settings.migrate = Migrate::Check;
    let error = RedisLedger::connect(&support::url(), settings).await.unwrap_err();
    assert!(matches!(error, Error::Schema(_)) && error.to_string().contains(&name), "{error}");
    let made: usize = redis::cmd("EXISTS")
        .arg(format!("hapax:{{{name}}}:meta"))
        .query_async(&mut support::connection().await)
        .await
        .unwrap();
    assert_eq!(made, 0, "looking makes nothing");

    RedisLedger::connect(&support::url(), support::settings(&name, Settings::default())).await.unwrap();
    let mut other = Settings::default();
    other.identity = IdentityRule::IdAndTime;
    let error = RedisLedger::connect(&support::url(), support::settings(&name, other)).await.unwrap_err();
    assert!(error.to_string().contains("id_and_time"), "{error}");

    let mut bad = RedisSettings::default();
    bad.name = "a}b".into();
    assert!(matches!(RedisLedger::connect(&support::url(), bad).await, Err(Error::Config(_))));
    let gate = support::Gate::new().await;
    gate.shut();
    let error = RedisLedger::connect(&gate.url(), RedisSettings::default()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    let error = RedisLedger::connect("redis://u:s3cret@[", RedisSettings::default()).await.unwrap_err();
    assert!(!error.chain().contains("s3cret"), "{}", error.chain());
}

/// TLS is not built in: a URL that asks for it is refused with a sentence, before anything is sent in the clear.
#[tokio::test]
async fn tls_is_refused_with_a_sentence() {
    for (url, instead) in
        [("rediss://u:s3cret@127.0.0.1:1", "redis://"), ("valkeys://127.0.0.1:1", "valkey://")]
    {
        let ledger = RedisLedger::connect(url, RedisSettings::default()).await.unwrap_err();
        let window = hapax::open::window(url, hapax::window::WindowSettings::new("1")).unwrap_err();
        for error in [ledger, window] {
            println!("{error}");
            assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("TLS") && text.contains(instead) && !text.contains("s3cret"), "{text}");
        }
    }
}

/// A bad claim alone asks the server nothing and is told what is wrong.
#[tokio::test]
async fn c8_a_batch_of_bad_claims_is_reported() {
    let ledger = connect().await;
    let mut mine = claim("e", lease());
    mine.reason = Some("a\0b".into());
    assert!(matches!(try_one(&ledger, &mine).await, Err(Error::Invalid { .. })));
}

/// What a done event costs, and that a sweep gives it back.
#[tokio::test]
async fn bytes_per_entry() {
    const EVENTS: usize = 2000;
    let harness = RedisHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    let scope = Scope::new("orders").unwrap();
    let claims: Vec<Claim> = (0..EVENTS)
        .map(|n| {
            let id = hapax::testing::kit::v7_at(
                hapax::testing::noon().plus(Duration::from_millis(n as u64)),
                n as u8,
            );
            Claim::new(Identity::new(scope.clone(), id), Mode::Done)
        })
        .collect();
    let began = std::time::Instant::now();
    for batch in claims.chunks(500) {
        assert!(
            ledger.claim(batch).await.unwrap().iter().all(|outcome| outcome.as_ref().unwrap().is_claimed())
        );
    }
    let took = began.elapsed();
    let mut connection = support::connection().await;
    let prefix = format!("hapax:{{{}}}", harness.name);
    let mut keys: Vec<String> = redis::cmd("KEYS")
        .arg(format!("{}*", prefix.replace('{', "\\{")))
        .query_async(&mut connection)
        .await
        .unwrap();
    keys.sort();
    let mut bytes = 0;
    for key in &keys {
        let used: usize = redis::cmd("MEMORY")
            .arg("USAGE")
            .arg(key)
            .arg("SAMPLES")
            .arg(0)
            .query_async(&mut connection)
            .await
            .unwrap();
        bytes += used;
    }
    println!(
        "{} bytes per done event; {:.0} claims/s in batches of 500 (debug build)",
        bytes / EVENTS,
        EVENTS as f64 / took.as_secs_f64()
    );
    assert!(bytes / EVENTS < 200, "{} bytes", bytes / EVENTS);
    harness.advance(Duration::from_secs(30 * 86_400)).await;
    let settings =
        SweepSettings { retention: Duration::from_secs(7 * 86_400), batch_max: 1000, dry_run: false };
    assert_eq!(ledger.sweep(settings).await.unwrap().entries(), EVENTS as u64);
    let left: Vec<String> = redis::cmd("KEYS")
        .arg(format!("{}:w:*", prefix.replace('{', "\\{")))
        .query_async(&mut connection)
        .await
        .unwrap();
    assert!(left.is_empty(), "{left:?}");
}
