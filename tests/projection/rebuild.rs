//! Rebuilding from the journal and its archive, and comparing with them.

use std::time::Duration;

use hapax::Owner;
use hapax::backend::object::Directory;
use hapax::journal::{ArchiveSettings, Journal as _, JournalSweep, archive};
use hapax::projection::{
    Applied, Difference, History, MemoryProjection, Name, Projection as _, Version, rebuild, verify,
};
use hapax::records::Payload;
use hapax::testing::projection::{change, name};

use crate::support::valkey;
use crate::world::{World, cache};

/// What was swept and not archived is missing, and the rebuild says so before it shows anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t326_a_history_that_does_not_begin_at_1_is_refused() {
    let world = World::new().await;
    world.write(6).await;
    world.relay("main").await;
    let projection = MemoryProjection::default();
    projection.apply(&[change(1, 1, Some("{}"))]).await.unwrap();
    world.journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    let all: Vec<Name> =
        projection.scan(None).await.unwrap().found.into_iter().map(|(name, _)| name).collect();
    // A record that lives on has its later events only.
    let survivor = world.update_one().await;
    let mut history = History::open(&world.journal, None, 1).await.unwrap();
    let told = rebuild(&projection, &mut history).await.unwrap_err().to_string();
    assert!(
        told.contains(&survivor.to_string()) && told.contains("begin with seq 1") && told.contains("archive"),
        "{told}"
    );
    assert_eq!(all, [name(1)], "nothing was switched to");
    assert!(projection.documents(&[name(1)]).await.unwrap()[0].is_some());
}

/// The archive has what the journal has no more; what both have is read once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_and_the_journal_are_one_history() {
    let world = World::new().await;
    let events = world.write(12).await;
    world.relay("main").await;
    let store = Directory::open(world.dir.path().join("archive")).unwrap();
    let mut settings = ArchiveSettings::new(Duration::ZERO, Owner::new("test").unwrap()).unwrap();
    settings.sweep = false; // what both have
    archive(&world.journal, &store, &settings).await.unwrap();
    let later = world.write(2).await;
    let projection = MemoryProjection::default();
    projection.apply(&[change(99, 1, Some(r#"{"ghost":true}"#))]).await.unwrap();
    for swept in [false, true] {
        if swept {
            world.relay("main").await;
            settings.sweep = true;
            archive(&world.journal, &store, &settings).await.unwrap();
        }
        let mut history = History::open(&world.journal, Some(&store), 1).await.unwrap();
        let rebuilt = rebuild(&projection, &mut history).await.unwrap();
        assert_eq!(
            (rebuilt.changes, rebuilt.records, rebuilt.rejected),
            (events + later, 14, 0),
            "swept: {swept}"
        );
        let mut history = History::open(&world.journal, Some(&store), 1).await.unwrap();
        let verified = verify(&projection, &mut history, Duration::ZERO).await.unwrap();
        assert_eq!((verified.records, verified.differences.len()), (14, 0), "{verified:?}");
    }
}

/// Each kind of difference is found and named; what is equal is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verify_names_what_differs() {
    let world = World::new().await;
    world.write(8).await;
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let mut history = History::open(&world.journal, None, 1).await.unwrap();
    let mut changes = Vec::new();
    while let Some(more) = history.next().await.unwrap() {
        changes.extend(more);
    }
    let last = |n: usize| {
        let names: Vec<Name> = changes.iter().map(Name::of).fold(Vec::new(), |mut names, name| {
            if !names.contains(&name) {
                names.push(name);
            }
            names
        });
        changes.iter().rev().find(|change| Name::of(change) == names[n]).unwrap().clone()
    };
    let (missing, behind, other, newer) = (last(0), last(1), last(3), last(4));
    for change in &changes {
        let name = Name::of(change);
        let skipped =
            name == Name::of(&missing) || (name == Name::of(&behind) && change.version == behind.version);
        if !skipped {
            assert_eq!(projection.apply(std::slice::from_ref(change)).await.unwrap(), [Applied::Newer]);
        }
    }
    // One byte, by somebody who knows the key.
    let key = format!("{prefix}:{{{}}}:value", Name::of(&other));
    let mut connection = valkey::connection().await;
    let value: String = redis::cmd("GET").arg(&key).query_async(&mut connection).await.unwrap();
    let broken = value.replace("\"seq\":2}", "\"seq\":3}");
    assert_ne!(value, broken);
    let _: () = redis::cmd("SET").arg(&key).arg(broken).query_async(&mut connection).await.unwrap();
    let mut ahead = newer.clone();
    ahead.version = Version::new(1, newer.version.seq() + 5).unwrap();
    ahead.payload = Some(Payload::new("{}").unwrap());
    projection.apply(&[ahead.clone(), change(99, 1, Some("{}"))]).await.unwrap();
    let mut history = History::open(&world.journal, None, 1).await.unwrap();
    let verified = verify(&projection, &mut history, Duration::ZERO).await.unwrap();
    let expected = [
        (Name::of(&missing), Difference::Missing { expected: missing.version }),
        (
            Name::of(&behind),
            Difference::Behind {
                expected: behind.version,
                found: Version::new(1, behind.version.seq() - 1).unwrap(),
            },
        ),
        (Name::of(&other), Difference::Other { version: other.version }),
        (Name::of(&newer), Difference::Ghost { found: ahead.version }),
        (name(99), Difference::Ghost { found: Version::new(1, 1).unwrap() }),
    ];
    assert_eq!(verified.differences, expected.into_iter().collect());
    assert_eq!(verified.records, 8);
}
