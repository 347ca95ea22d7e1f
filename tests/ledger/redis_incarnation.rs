//! A Redis or Valkey that comes back empty or older, or that could. Each test has a server of its own.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::valkey as support;
use crate::support::valkey::Private;
use hapax::backend::redis::{Accept, RedisLedger};
use hapax::ledger::{Claim, Level, Mode, Settings};
use hapax::testing::kit::{another, claim, done, expect, first, lease, run, settled, settling};
use hapax::{Claims as _, Error, Operations as _};

async fn open(server: &Private) -> hapax::Result<RedisLedger> {
    RedisLedger::connect(&server.url(), support::settings("incarnation", Settings::default())).await
}

/// What a claim is answered; an error if the ledger gives none.
async fn ask(ledger: &RedisLedger, claim: &Claim) -> hapax::Result<hapax::ledger::Outcome> {
    ledger.claim(std::slice::from_ref(claim)).await?.remove(0)
}

/// Asks until the server is there again: the connection comes back by itself.
async fn answer(ledger: &RedisLedger, claim: &Claim) -> hapax::Result<hapax::ledger::Outcome> {
    let mut last = None;
    support::until("the server is there again", async || {
        let answer = ask(ledger, claim).await;
        let back = !matches!(answer, Err(Error::Unavailable { .. }));
        last = Some(answer);
        back
    })
    .await;
    last.expect("an answer")
}

fn is_conflict<T: std::fmt::Debug>(result: hapax::Result<T>, says: &str) {
    match result {
        Err(error @ Error::Conflict { .. }) => {
            assert!(error.to_string().contains(says), "{error}");
            assert!(!error.is_retryable());
        }
        other => panic!("it should be noticed, and is {other:?}"),
    }
}

/// Flushed under a running process: nothing is first again there, and nobody ever gets a token that somebody has.
#[tokio::test]
async fn t67_a_server_that_comes_back_empty_is_noticed() {
    let server = Private::start(&[]).await;
    let ledger = open(&server).await.unwrap();
    let (ran, held) = (claim("ran", lease()), claim("held", lease()));
    run(&ledger, &ran).await;
    let grant = first(&ledger, &held).await;
    let epoch = ledger.epoch().await.unwrap();
    server.command(&["FLUSHALL"]).await;
    is_conflict(ask(&ledger, &another(&ran)).await, "empty");
    is_conflict(ledger.settle(&[settling(&held, &grant, done())]).await, "empty");
    is_conflict(ledger.known(std::slice::from_ref(&ran.identity)).await, "empty");
    // Who opens it now has another ledger, which is empty; what the old one gave away is void there.
    let fresh = open(&server).await.unwrap();
    let again = first(&fresh, &another(&held)).await;
    assert!(again.token > grant.token, "{} after {}", again.token, grant.token);
    is_conflict(ledger.settle(&[settling(&held, &grant, done())]).await, "empty");
    settled(&fresh, &held, &again, done()).await;
    assert_ne!(fresh.epoch().await.unwrap(), epoch);
}

/// Restored from a backup that lacks what was acknowledged, also if somebody has worked on it since.
#[tokio::test]
async fn t67_a_server_that_comes_back_older_is_noticed() {
    for others_work_on_it in [false, true] {
        let mut server = Private::start(&[]).await;
        let ledger = open(&server).await.unwrap();
        run(&ledger, &claim("before", lease())).await;
        let backup = server.files();
        let (ran, held) = (claim("ran", lease()), claim("held", lease()));
        run(&ledger, &ran).await;
        let grant = first(&ledger, &held).await;
        server.kill();
        server.put_back(&backup);
        server.start_again().await;
        let mut highest = grant.token;
        if others_work_on_it {
            let other = open(&server).await.unwrap();
            for n in 0..50 {
                run(&other, &claim(&format!("other {n}"), lease())).await;
            }
            let theirs = first(&other, &another(&held)).await;
            assert!(theirs.token > grant.token, "{} after {}", theirs.token, grant.token);
            highest = theirs.token;
        }
        is_conflict(answer(&ledger, &another(&ran)).await, "older");
        is_conflict(ledger.settle(&[settling(&held, &grant, done())]).await, "older");
        let next = first(&open(&server).await.unwrap(), &claim("next", lease())).await;
        assert!(next.token > highest, "{} after {highest}", next.token);
    }
}

/// An older copy is put in place while the server's process goes on: keys that somebody saved before, or those of another server
/// that it follows for a while.
#[tokio::test]
async fn t93_an_older_copy_under_the_same_process_is_noticed() {
    for how in ["keys", "replica", "replica, and others work on it"] {
        let server = Private::start(&[]).await;
        let ledger = open(&server).await.unwrap();
        let before = claim("before", lease());
        run(&ledger, &before).await;
        let behind = open(&server).await.unwrap(); // one that has not been told of what comes next
        let copy = Private::start(&[]).await;
        save(&server, &copy, how).await;
        let (ran, held) = (claim("ran", lease()), claim("held", lease()));
        run(&ledger, &ran).await;
        let grant = first(&ledger, &held).await;
        let epoch = ledger.epoch().await.unwrap();
        put_back(&server, &copy, how).await;
        let mut highest = grant.token;
        if how.ends_with("work on it") {
            for n in 0..50 {
                run(&behind, &claim(&format!("other {n}"), lease())).await;
            }
            highest = first(&behind, &another(&held)).await.token;
            assert!(highest > grant.token, "{highest} after {}", grant.token);
        }
        is_conflict(ask(&ledger, &another(&ran)).await, "older");
        is_conflict(ledger.settle(&[settling(&held, &grant, done())]).await, "older");
        assert_ne!(behind.epoch().await.unwrap(), epoch, "{how}");
        // Who misses nothing goes on, and gets no token that somebody has.
        expect(&behind, &another(&before), "duplicate").await;
        let next = first(&behind, &claim("next", lease())).await;
        assert!(next.token > highest, "{} after {highest}", next.token);
    }
}

/// Saves what a server has now: in another database of its own, or in another server.
async fn save(server: &Private, copy: &Private, how: &str) {
    if how == "keys" {
        let keys: Vec<String> = redis::from_redis_value(server.command(&["KEYS", "*"]).await).unwrap();
        for key in keys {
            server.command(&["COPY", &key, &key, "DB", "1"]).await;
        }
        return;
    }
    copy.command(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]).await;
    until_linked(copy).await;
    let size = server.command(&["DBSIZE"]).await;
    support::until("the copy is complete", async || copy.command(&["DBSIZE"]).await == size).await;
    copy.command(&["REPLICAOF", "NO", "ONE"]).await;
}

/// Puts it back in place.
async fn put_back(server: &Private, copy: &Private, how: &str) {
    if how == "keys" {
        server.command(&["SWAPDB", "0", "1"]).await;
        return;
    }
    server.command(&["REPLICAOF", "127.0.0.1", &copy.port().to_string()]).await;
    until_linked(server).await;
    server.command(&["REPLICAOF", "NO", "ONE"]).await;
}

async fn until_linked(replica: &Private) {
    support::until("the replica has what its primary has", async || {
        let info = format!("{:?}", replica.command(&["INFO", "replication"]).await);
        info.contains("master_link_status:up") && info.contains("master_sync_in_progress:0")
    })
    .await;
}

/// Killed and started again with all that it acknowledged: nobody needs to do anything.
#[tokio::test]
async fn t67_a_restart_that_lost_nothing_goes_on() {
    let mut server = Private::start(&[]).await;
    let ledger = open(&server).await.unwrap();
    let (ran, held) = (claim("ran", lease()), claim("held", lease()));
    run(&ledger, &ran).await;
    let grant = first(&ledger, &held).await;
    for _ in 0..3 {
        server.kill();
        server.start_again().await;
        assert_eq!(answer(&ledger, &another(&ran)).await.unwrap().name(), "duplicate");
        let next = first(&ledger, &claim(&uuid::Uuid::new_v4().to_string(), lease())).await;
        assert!(next.token > grant.token);
    }
    settled(&ledger, &held, &grant, done()).await;
    expect(&ledger, &another(&held), "duplicate").await;
}

/// A decision of before a restart is not written after it.
#[tokio::test]
async fn t67_a_decision_of_another_incarnation_is_not_written() {
    let mut server = Private::start(&[]).await;
    let ledger = open(&server).await.unwrap();
    let mine = claim("mine", Mode::Done);
    run(&ledger, &claim("before", lease())).await;
    let mut transaction = ledger.begin();
    assert!(transaction.claim(std::slice::from_ref(&mine)).await.unwrap()[0].as_ref().unwrap().is_claimed());
    server.kill();
    server.start_again().await;
    support::until("the server is there again", async || ledger.now().await.is_ok()).await;
    assert!(matches!(transaction.commit().await.unwrap_err(), Error::Contended { .. }));
    assert!(!ledger.was_committed(&mine).await.unwrap());
}

/// What makes a server forget is refused at start, unless it is accepted by its name.
#[tokio::test]
async fn t67_a_server_that_may_forget_is_refused_unless_that_is_accepted() {
    let primary = Private::start(&[]).await;
    let port = primary.port().to_string();
    let replica = Private::start(&["--replicaof", "127.0.0.1", &port]).await;
    support::until("the replica is connected", async || {
        let info = format!("{:?}", primary.command(&["INFO", "replication"]).await);
        info.contains("connected_slaves:1")
    })
    .await;
    let volatile = Private::start(&["--appendonly", "no"]).await;
    let evicting = Private::start(&["--maxmemory-policy", "allkeys-lru"]).await;
    for (server, accept, check) in [
        (&volatile, Accept::NoAppendonly, "durability"),
        (&evicting, Accept::Eviction, "maxmemory_policy"),
        (&primary, Accept::Replicas, "replication"),
    ] {
        let error = open(server).await.unwrap_err();
        let by_name = format!("accept={}", accept.name());
        assert!(matches!(error, Error::Unsupported(_)) && error.to_string().contains(&by_name), "{error}");
        let url = format!("{}?{by_name}", server.url());
        let ledger =
            RedisLedger::connect(&url, support::settings("incarnation", Settings::default())).await.unwrap();
        let findings = ledger.check().await.unwrap();
        let found = findings.iter().find(|finding| finding.check == check).expect("it is still reported");
        assert_eq!(found.level, Level::Warning, "{}", found.message);
        let mut settings = support::settings("incarnation", Settings::default());
        settings.accept = vec![accept];
        RedisLedger::connect(&server.url(), settings).await.unwrap();
    }
    drop(replica);
}

/// "No" is the end of it: what may still be on its way is not written after somebody was told that it was not.
#[tokio::test]
async fn t72_a_claim_that_was_not_committed_never_will_be() {
    let settings = support::settings(&support::fresh_name(), Settings::default());
    let ledger = RedisLedger::connect(&support::url(), settings).await.unwrap();
    let mine = claim("mine", Mode::Done);
    let mut transaction = ledger.begin();
    assert!(transaction.claim(std::slice::from_ref(&mine)).await.unwrap()[0].as_ref().unwrap().is_claimed());
    // The COMMIT is on its way, and slower than the question.
    assert!(!ledger.was_committed(&mine).await.unwrap());
    assert!(matches!(transaction.commit().await.unwrap_err(), Error::Contended { .. }));
    assert!(!ledger.was_committed(&mine).await.unwrap());
    first(&ledger, &mine).await;
    assert!(ledger.was_committed(&mine).await.unwrap());
    expect(&ledger, &another(&mine), "duplicate").await;
}
