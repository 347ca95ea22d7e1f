//! The process that projects is killed before its write, after it, and before the offset is committed. The
//! next one leaves the projection as if nothing had happened.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteJournal, SqliteLedger, SqliteRecords};
use hapax::bus::Bus;
use hapax::consumer::{ConsumerHandle, Counts};
use hapax::journal::JournalSettings;
use hapax::ledger::{Filter, Operations as _, Settings, State};
use hapax::projection::{Difference, History, Projection, Projector, rebuild, settings};
use hapax::{Consumer, Scope};

use crate::ENGINE;
use crate::support::wait::until_so;
use crate::support::{this, valkey};
use crate::world::{RecordSource, cache, remove_indices, search, topic};

const DIR: &str = "HAPAX_TEST_PROJECTION_DIR";
const REBUILT: &str = "HAPAX_TEST_PROJECTION_REBUILT";
const TO: &str = "HAPAX_TEST_PROJECTION_TO";

/// `cache:PREFIX` or `search:ALIAS`.
async fn open(to: &str) -> Arc<dyn Projection> {
    match to.split_once(':').unwrap() {
        ("cache", prefix) => Arc::new(cache(prefix).await),
        (_, alias) => Arc::new(search(alias).await),
    }
}

/// A consumer on the files of a world.
async fn project(dir: &Path, to: &str, watch: impl FnOnce(ConsumerHandle)) -> Counts {
    let ledger = SqliteLedger::open(dir.join("ledger.db"), Settings::default()).unwrap();
    let mut settings = settings(Scope::new("projection").unwrap(), topic());
    settings.lease = Duration::from_secs(2);
    settings.heartbeat = Duration::from_millis(500);
    settings.session_timeout = Duration::from_secs(2);
    settings.commit_interval = Duration::from_millis(50);
    settings.backoff_base = Duration::from_millis(10);
    let bus = Arc::new(RecordSource::bus(dir)) as Arc<dyn Bus>;
    let consumer = Consumer::builder(bus, ledger).settings(settings).build().unwrap();
    watch(consumer.handle());
    consumer.leased_batch(Projector::new(open(to).await, 1).unwrap()).await.unwrap()
}

/// Stops a consumer once it has read everything and nothing is left to do.
fn stop_at_rest(handle: ConsumerHandle) {
    tokio::spawn(async move {
        until_so("nothing is left", || {
            let progress = handle.progress();
            progress.at_rest && progress.lag == Some(0) && progress.partitions == 2
        })
        .await;
        handle.stop();
    });
}

/// Not a test: the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_projects() {
    let (Ok(dir), Ok(to)) = (std::env::var(DIR), std::env::var(TO)) else { return };
    project(Path::new(&dir), &to, stop_at_rest).await;
}

/// Kills the process at a hit of a point and starts it again. Returns whether the kill came where it was meant to: at the
/// commit of something that was settled. The first commit may be that of where a partition begins, and one commit may be all.
async fn killed_at(point: &str, hit: u32, to: &str) -> bool {
    let world = RecordSource::new().await;
    world.write(6).await;
    world.relay("main").await;
    let status = tokio::task::spawn_blocking({
        let (dir, to, point) = (world.dir.path().to_owned(), to.to_owned(), point.to_owned());
        move || {
            let mut child = this::test("the_process_that_projects");
            child.env(DIR, dir).env(TO, to).env(hapax::testing::crash::VARIABLE, format!("{point}:{hit}"));
            child.status().unwrap()
        }
    });
    let killed = !status.await.unwrap().success();
    let projection = open(to).await;
    let ledger = SqliteLedger::open(world.dir.path().join("ledger.db"), Settings::default()).unwrap();
    let done = Filter { states: vec![State::Done], ..Filter::default() };
    let (settled, left) =
        (ledger.list(&done, None, 100).await.unwrap().entries.len(), world.verify(&*projection).await);
    let is_missing = |difference: &&Difference| matches!(difference, Difference::Missing { .. });
    let missing = left.differences.values().filter(is_missing).count();
    match point {
        "projection.before-write" => assert_eq!((settled, missing), (0, 5), "nothing is written yet"),
        "projection.after-write" => {
            assert!(settled == 0 && missing < 5, "written, and not settled: {left:?}");
        }
        _ => {}
    }
    drop(ledger);
    let counts = project(world.dir.path(), to, stop_at_rest).await;
    let verified = world.verify(&*projection).await;
    println!(
        "{to} killed at {point}: {settled} settled and {missing} of 5 records missing before, then {counts:?}"
    );
    assert_eq!((verified.records, verified.differences.len()), (5, 0), "{verified:?}");
    let ledger = SqliteLedger::open(world.dir.path().join("ledger.db"), Settings::default()).unwrap();
    let dead = Filter { states: vec![State::Dead, State::Leased, State::Retry], ..Filter::default() };
    assert_eq!(ledger.list(&dead, None, 100).await.unwrap().entries.len(), 0, "nothing is open");
    killed && (settled > 0 || point != "consumer.before-commit")
}

/// Each point, until the kill came where it was meant to.
async fn killed_at_three_points(target: &str) {
    for point in ["projection.before-write", "projection.after-write", "consumer.before-commit"] {
        let mut hits =
            if point == "consumer.before-commit" { [1, 2, 3].repeat(7) } else { vec![1] }.into_iter();
        loop {
            let name = valkey::fresh_name();
            let hit = hits.next().unwrap_or_else(|| panic!("no process was killed at {point} in time"));
            let killed = killed_at(point, hit, &format!("{target}:{name}")).await;
            if target == "search" {
                remove_indices(&name);
            }
            if killed {
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_3_the_cache_is_written_by_a_process_killed_at_three_points() {
    killed_at_three_points("cache").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_3_the_search_engine_is_written_by_a_process_killed_at_three_points() {
    let _up = ENGINE.read().await;
    killed_at_three_points("search").await;
}

/// Not a test: the process that rebuilds and is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_rebuilds() {
    let (Ok(dir), Ok(to)) = (std::env::var(DIR), std::env::var(REBUILT)) else { return };
    rebuilt(Path::new(&dir), &to).await;
}

/// Rebuilds from the files of a world.
async fn rebuilt(dir: &Path, to: &str) {
    let journal = SqliteJournal::open_existing(dir.join("journal.db"), JournalSettings::default()).unwrap();
    let records = SqliteRecords::open_existing(&journal).unwrap();
    let mut history = History::open(&journal, &records, None, 1).await.unwrap();
    rebuild(&*open(to).await, &mut history).await.unwrap();
}

/// A rebuild is killed at a point, while a consumer writes what comes meanwhile. What it wrote and settled is there after the next
/// rebuild, and readers see what they saw until then.
async fn rebuild_killed_at(point: &str, to: &str) {
    let world = RecordSource::new().await;
    world.write(6).await;
    world.relay("main").await;
    project(world.dir.path(), to, stop_at_rest).await;
    let dir = world.dir.path().to_owned();
    let killed = |point: String, to: String, dir: std::path::PathBuf| {
        tokio::task::spawn_blocking(move || {
            let mut child = this::test("the_process_that_rebuilds");
            child.env(DIR, dir).env(REBUILT, to).env(hapax::testing::crash::VARIABLE, format!("{point}:1"));
            assert!(!child.status().unwrap().success(), "killed at {point}");
        })
    };
    killed(point.to_owned(), to.to_owned(), dir.clone()).await.unwrap();
    // Whatever is published from now on, a consumer writes it and settles it.
    world.write(3).await;
    world.update_one().await;
    world.relay("main").await;
    project(&dir, to, stop_at_rest).await;
    let projection = open(to).await;
    let left = world.verify(&*projection).await;
    let unswitched =
        to.starts_with("search:") && ["projection.after-take", "projection.before-switch"].contains(&point);
    let refused = projection.check().await.unwrap().iter().any(|found| found.check == "opensearch.rebuild");
    assert_eq!(refused, unswitched, "status tells");
    if !unswitched {
        assert!(left.is_equal(), "{point}: {left:?}");
    }
    // Killed once more, and again after that: it goes on.
    for point in ["projection.before-take", "projection.before-switch"] {
        killed(point.to_owned(), to.to_owned(), dir.clone()).await.unwrap();
    }
    rebuilt(&dir, to).await;
    let verified = world.verify(&*projection).await;
    assert!(verified.is_equal() && verified.records == 7, "{point}: {verified:?}");
    assert!(!projection.check().await.unwrap().iter().any(|found| found.check == "opensearch.rebuild"));
}

const POINTS: [&str; 4] = [
    "projection.before-take",
    "projection.after-take",
    "projection.before-switch",
    "projection.after-switch",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t351_a_rebuild_of_the_search_engine_that_is_killed_loses_nothing() {
    let _up = ENGINE.read().await;
    for point in POINTS {
        let name = valkey::fresh_name();
        rebuild_killed_at(point, &format!("search:{name}")).await;
        remove_indices(&name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t351_a_rebuild_of_the_cache_that_is_killed_loses_nothing() {
    for point in POINTS {
        rebuild_killed_at(point, &format!("cache:{}", valkey::fresh_name())).await;
    }
}
