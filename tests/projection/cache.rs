//! What is special about the cache: values expire, versions do not, and readers fill it.

use std::time::Duration;

use hapax::backend::redis::{CacheProjection, CacheSettings};
use hapax::ledger::Level;
use hapax::projection::{Applied, Content, Projection as _, Uuid};
use hapax::records::Record;
use hapax::testing::projection::{change, name, shows, under};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::valkey;
use crate::support::wait::until;
use crate::world::{self, DAY};

/// The record of a change, as its store would return it.
async fn record(of: &hapax::projection::Change) -> Record {
    use hapax::analytics::{ListPage, MemoryReadModel, ReadModel as _};
    use hapax::testing::analytics::{apply, block, orders};
    let model = MemoryReadModel::default();
    apply(&model, block([of.clone()])).await;
    let page = ListPage::new(None, 1).unwrap();
    model.list(&orders(), page).await.unwrap().records.pop().unwrap()
}

async fn millis_left(key: &str) -> i64 {
    redis::cmd("PTTL").arg(key).query_async(&mut valkey::connection().await).await.unwrap()
}

/// The value goes, the version stays: an older event finds it, and a fill puts the value of that version back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t323_a_version_outlives_its_value() {
    let prefix = valkey::fresh_name();
    let mut settings = CacheSettings::default();
    settings.prefix.clone_from(&prefix);
    settings.value_ttl = Some(Duration::from_millis(300));
    let cache = CacheProjection::connect(&valkey::url(), settings, DAY).await.unwrap();
    let current = change(1, 5, Some(r#"{"seq":5}"#));
    cache.apply(std::slice::from_ref(&current)).await.unwrap();
    let marker = format!("{prefix}:{{{}}}:version", name(1));
    assert!(
        millis_left(&marker).await > i64::try_from(DAY.as_millis()).unwrap(),
        "at least as long as the retention"
    );
    until("the value is gone", async || {
        cache.get(&name(1)).await.unwrap().is_some_and(|document| document.content == Content::Expired)
    })
    .await;
    let late = change(1, 4, Some(r#"{"seq":4}"#));
    assert_eq!(cache.apply(std::slice::from_ref(&late)).await.unwrap(), [Applied::Stale]);
    assert!(!cache.fill(Uuid::nil(), &record(&late).await, 1).await.unwrap(), "it was read before the write");
    assert_eq!(cache.get(&name(1)).await.unwrap().unwrap().content, Content::Expired);
    assert!(cache.fill(Uuid::nil(), &record(&current).await, 1).await.unwrap());
    shows(&cache, &current).await;
}

/// A reader that was slow does not bring back what was deleted while it read, nor does a fill hide a newer value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t324_a_late_fill_changes_nothing() {
    let cache = world::cache(&valkey::fresh_name()).await;
    let read = record(&change(1, 1, Some(r#"{"seq":1}"#))).await;
    let gone = change(1, 2, None);
    cache.apply(std::slice::from_ref(&gone)).await.unwrap();
    assert!(!cache.fill(Uuid::nil(), &read, 1).await.unwrap());
    shows(&cache, &gone).await;
    // The same number as a deletion, of a source that lies.
    assert!(!cache.fill(Uuid::nil(), &record(&change(1, 2, Some("{}"))).await, 1).await.unwrap());
    shows(&cache, &gone).await;
    // A fill of what nobody has written yet is a version like any other.
    let (early, first) = (change(2, 3, Some(r#"{"seq":3}"#)), change(2, 1, Some(r#"{"seq":1}"#)));
    assert!(cache.fill(Uuid::nil(), &record(&early).await, 1).await.unwrap());
    assert_eq!(cache.apply(&[first]).await.unwrap(), [Applied::Stale]);
    shows(&cache, &early).await;
    assert_eq!(cache.apply(&[under(2, 1, &early)]).await.unwrap(), [Applied::Newer], "the next generation");
}

/// What somebody else has put under one key fails that record alone, and is left as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_type_fails_alone() {
    let prefix = valkey::fresh_name();
    let cache = world::cache(&prefix).await;
    let marker = format!("{prefix}:{{{}}}:version", name(1));
    let _: () =
        redis::cmd("RPUSH").arg(&marker).arg("x").query_async(&mut valkey::connection().await).await.unwrap();
    let applied = cache.apply(&[change(1, 1, Some("{}")), change(2, 1, Some("{}"))]).await.unwrap();
    assert!(matches!(&applied[0], Applied::Failed { reason } if reason.contains("WRONGTYPE")), "{applied:?}");
    assert_eq!(applied[1], Applied::Newer);
}

/// The first whole command in what a client has sent (`*COUNT`, then `$LENGTH` and a text each), and its length.
fn command(seen: &str) -> Option<(Vec<&str>, usize)> {
    let mut rest = seen;
    let mut line = || {
        let (line, after) = rest.split_once("\r\n")?;
        rest = after;
        Some(line)
    };
    let count: usize = line()?.strip_prefix('*')?.parse().ok()?;
    let mut parts = Vec::new();
    for _ in 0..count {
        line()?;
        parts.push(line()?);
    }
    Some((parts, seen.len() - rest.len()))
}

/// A server whose description of itself is made up.
async fn pretender(info: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut seen, mut bytes) = (String::new(), [0; 4096]);
                while let Ok(count @ 1..) = stream.read(&mut bytes).await {
                    seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
                    while let Some((parts, length)) = command(&seen) {
                        let answer = match parts[0] {
                            "INFO" => format!("${}\r\n{info}\r\n", info.len()),
                            _ => "+OK\r\n".to_owned(),
                        };
                        seen.drain(..length);
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    url
}

/// Refused when it is opened, with the sentence that says what to set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t320_a_server_that_evicts_is_refused() {
    let url =
        pretender("role:master\r\nmaxmemory_policy:allkeys-lru\r\naof_enabled:1\r\ncluster_enabled:0\r\n")
            .await;
    let message =
        CacheProjection::connect(&url, CacheSettings::default(), DAY).await.unwrap_err().to_string();
    assert!(message.contains("allkeys-lru") && message.contains("set noeviction"), "{message}");
    let unreachable =
        CacheProjection::connect("redis://127.0.0.1:1", CacheSettings::default(), DAY).await.unwrap_err();
    assert!(unreachable.is_retryable() && unreachable.to_string().contains("127.0.0.1:1"), "{unreachable}");
}

/// What the server acknowledges and may forget when the machine stops is done in the ledger, and nobody repeats it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t521_a_server_that_writes_to_disk_later_is_warned_of() {
    let server = valkey::Private::start(&[]).await;
    let cache = CacheProjection::connect(&server.url(), CacheSettings::default(), DAY).await.unwrap();
    let warnings = async || {
        let found = cache.check().await.unwrap().into_iter().filter(|finding| finding.level > Level::Fine);
        found.map(|finding| (finding.check, finding.level, finding.message)).collect::<Vec<_>>()
    };
    assert_eq!(warnings().await, [], "appendfsync is always");
    for (fsync, when) in [("everysec", "in the last second or two"), ("no", "since the system last wrote")] {
        server.command(&["CONFIG", "SET", "appendfsync", fsync]).await;
        let found = warnings().await;
        assert!(
            matches!(&found[..], [("cache.durability", Level::Warning, message)]
                if message.contains(&format!("appendfsync is {fsync}")) && message.contains(when) && message.contains("rebuild")),
            "{found:?}"
        );
    }
}
