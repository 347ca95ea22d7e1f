//! The Redis ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::valkey as support;
use crate::support::valkey::RedisHarness;

hapax::conformance!(redis, RedisHarness::new().await);

/// A server that was restarted or told to forget its scripts is sent them again. (In this file, as it does so to everybody.)
#[tokio::test]
async fn forgotten_scripts_are_sent_again() {
    use hapax::testing::Harness;
    use hapax::testing::kit::{claim, lease, run};
    let ledger = RedisHarness::new().await.open(hapax::ledger::Settings::default()).await;
    for n in 0..20 {
        let () = ::redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut support::connection().await)
            .await
            .expect("the test server answers");
        run(&ledger, &claim(&format!("e{n}"), lease())).await;
    }
}
