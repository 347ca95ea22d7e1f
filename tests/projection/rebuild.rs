//! Rebuilding from the journal and its archive, and comparing with them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::Owner;
use hapax::backend::object::Directory;
use hapax::backend::redis::{CacheProjection, CacheSettings};
use hapax::journal::{ArchiveSettings, Journal as _, JournalSweep, archive};
use hapax::projection::{
    Applied, Change, Difference, History, MemoryProjection, Name, Projection as _, Version, rebuild, verify,
};
use hapax::records::Payload;
use hapax::testing::projection::{change, name, under};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::valkey;
use crate::world::{RecordSource, cache};

/// What was swept and not archived is missing, and the rebuild says so before it shows anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t326_a_history_that_does_not_begin_at_1_is_refused() {
    let world = RecordSource::new().await;
    world.write(6).await;
    world.relay("main").await;
    let projection = MemoryProjection::default();
    projection.apply(&[change(1, 1, Some("{}"))]).await.unwrap();
    world.journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    // A record that lives on has its later events only.
    let survivor = world.update_one().await;
    let mut history = world.history().await;
    let message = rebuild(&projection, &mut history).await.unwrap_err().to_string();
    assert!(
        message.contains(&survivor.to_string())
            && message.contains("beginning with seq 1")
            && message.contains("archive"),
        "{message}"
    );
    let all = projection.scan(None).await.unwrap().found;
    assert_eq!(all.len(), 1, "nothing was switched to: {all:?}");
    assert!(projection.documents(&[name(1)]).await.unwrap()[0].is_some());
}

/// The archive has what the journal has no more; what both have is read once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_and_the_journal_are_one_history() {
    let world = RecordSource::new().await;
    world.write(12).await;
    world.relay("main").await;
    let store = Directory::open(world.dir.path().join("archive")).unwrap();
    let mut settings = ArchiveSettings::new(Duration::ZERO, Owner::new("test").unwrap()).unwrap();
    settings.sweep = false; // what both have
    archive(&world.journal, &store, &settings).await.unwrap();
    world.write(2).await;
    let projection = MemoryProjection::default();
    projection.apply(&[change(99, 1, Some(r#"{"ghost":true}"#))]).await.unwrap();
    for swept in [false, true] {
        if swept {
            world.relay("main").await;
            settings.sweep = true;
            archive(&world.journal, &store, &settings).await.unwrap();
        }
        let mut history = History::open(&world.journal, &world.records, Some(&store), 1).await.unwrap();
        let rebuilt = rebuild(&projection, &mut history).await.unwrap();
        assert_eq!((rebuilt.changes, rebuilt.records, rebuilt.rejected), (14, 14, 0), "swept: {swept}");
        let verified = world.verify(&projection).await;
        assert_eq!((verified.records, verified.differences.len()), (12, 0), "two are deleted: {verified:?}");
    }
}

/// Each kind of difference is found and named; what is equal is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verify_names_what_differs() {
    let world = RecordSource::new().await;
    world.write(8).await;
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let changes = world.changes().await;
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
    let verified = world.verify(&projection).await;
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
    assert_eq!(verified.records, 7, "one is deleted");
}

/// Every event was swept, so no event shows a gap. Neither is an archive without its beginning a history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t350_a_history_without_whole_records_is_refused() {
    let world = RecordSource::new().await;
    world.write(6).await;
    let projection = MemoryProjection::default();
    projection.apply(&world.changes().await).await.unwrap();
    world.relay("main").await;
    world.journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    assert_eq!(world.changes().await.len(), 0, "nothing is left");
    let store = Directory::open(world.dir.path().join("archive")).unwrap();
    for archive_is_there in [false, true, true] {
        let archived: Option<&dyn hapax::backend::object::Objects> = archive_is_there.then_some(&store as _);
        let mut history = History::open(&world.journal, &world.records, archived, 1).await.unwrap();
        let message = rebuild(&projection, &mut history).await.unwrap_err().to_string();
        assert!(message.contains("and of 4 other records") && message.contains("every event"), "{message}");
        let verified = world.verify(&projection).await;
        assert!(verified.is_equal() && verified.records == 5, "the projection is as it was: {verified:?}");
        // For the third time: an archive that begins later.
        if archive_is_there {
            world.write(1).await;
            world.relay("main").await;
            let settings = ArchiveSettings::new(Duration::ZERO, Owner::new("test").unwrap()).unwrap();
            archive(&world.journal, &store, &settings).await.unwrap();
            let mut history = History::open(&world.journal, &world.records, archived, 1).await.unwrap();
            let message = rebuild(&projection, &mut history).await.unwrap_err().to_string();
            assert!(message.contains("and of 4 other records"), "{message}");
            break;
        }
    }
    // An empty projection is not equal to records whose events were swept.
    let verified = world.verify(&MemoryProjection::default()).await;
    assert_eq!(verified.differences.len(), 6, "{verified:?}");
}

/// A rebuild in place offers the last version of each record and no other: readers never see what was replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t352_a_rebuild_in_place_applies_last_versions_only() {
    let world = RecordSource::new().await;
    world.write(6).await;
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let mut history = world.history().await;
    history.survey().await.unwrap();
    let mut offered = Vec::new();
    while let Some(changes) = history.next().await.unwrap() {
        offered.extend(changes);
    }
    let names: std::collections::BTreeSet<Name> = offered.iter().map(Name::of).collect();
    assert_eq!((offered.len(), names.len()), (6, 6), "one of each");
    let all = world.changes().await;
    for one in &offered {
        let last = all.iter().rev().find(|change| Name::of(change) == Name::of(one)).unwrap();
        assert_eq!(one, last);
    }
    let rebuilt = rebuild(&projection, &mut world.history().await).await.unwrap();
    assert_eq!((rebuilt.changes, rebuilt.records), (6, 6));
    assert!(world.verify(&projection).await.is_equal());
}

/// After a restore, under the next generation: what the history has no more is in the cache no more. What somebody writes
/// under that generation meanwhile stays, and so does what was never a version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t463_a_rebuilt_cache_has_nothing_of_an_earlier_generation() {
    let world = RecordSource::new().await;
    world.write(6).await;
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let changes = world.changes().await;
    projection.apply(&changes).await.unwrap();
    // Written after the backup: two records that are not there any more, and a version of one that was undone.
    let is_second = |change: &&Change| change.payload.is_some() && change.version.seq() == 2;
    let mut again = changes.iter().find(is_second).unwrap().clone();
    again.version = Version::new(1, 7).unwrap();
    let undone = [change(98, 1, Some(r#"{"undone":1}"#)), change(99, 4, None), again];
    assert_eq!(projection.apply(&undone).await.unwrap(), vec![Applied::Newer; 3]);
    let foreign = format!("{prefix}:{{{}}}:version", name(97));
    let mut connection = valkey::connection().await;
    let _: () = redis::cmd("SET").arg(&foreign).arg("mine").query_async(&mut connection).await.unwrap();

    let history = async || History::open(&world.journal, &world.records, None, 2).await.unwrap();
    let rebuilt = rebuild(&projection, &mut history().await).await.unwrap();
    assert_eq!((rebuilt.records, rebuilt.removed), (6, 2), "{rebuilt:?}");
    assert_eq!(projection.documents(&[name(98), name(99)]).await.unwrap(), [None, None]);
    let kept: String = redis::cmd("GET").arg(&foreign).query_async(&mut connection).await.unwrap();
    assert_eq!(kept, "mine");
    let _: () = redis::cmd("DEL").arg(&foreign).query_async(&mut connection).await.unwrap();
    let verified = verify(&projection, &history().await, Duration::ZERO).await.unwrap();
    assert!(verified.is_equal() && verified.records == 5, "{verified:?}");
    // Nothing of its own generation is removed, also what no history has.
    let ahead = under(2, 1, &change(96, 1, Some("{}")));
    projection.apply(std::slice::from_ref(&ahead)).await.unwrap();
    assert_eq!(rebuild(&projection, &mut history().await).await.unwrap().removed, 0);
    assert!(projection.documents(&[name(96)]).await.unwrap()[0].is_some());
}

/// A port in front of the server. Before the first script that comes this way is passed on, a change is applied.
async fn before_a_script(projection: CacheProjection, change: Change) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let change = Arc::new(Mutex::new(Some(change)));
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let (projection, change) = (projection.clone(), Arc::clone(&change));
            tokio::spawn(async move {
                let mut server = TcpStream::connect(valkey::address()).await.unwrap();
                let ((mut asks, mut told), (mut answers, mut asked)) = (client.split(), server.split());
                let pass = async {
                    let mut bytes = vec![0; 65536];
                    while let Ok(count @ 1..) = asks.read(&mut bytes).await {
                        let is_script = bytes[..count].windows(7).any(|bytes| bytes == b"EVALSHA");
                        let change = change.lock().unwrap().take_if(|_| is_script);
                        if let Some(change) = change {
                            assert_eq!(projection.apply(&[change]).await.unwrap(), [Applied::Newer]);
                        }
                        asked.write_all(&bytes[..count]).await.unwrap();
                    }
                };
                tokio::select! {
                    _ = tokio::io::copy(&mut answers, &mut told) => {}
                    () = pass => {}
                }
            });
        }
    });
    url
}

/// The removal compares again in the step that removes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t463_what_is_written_between_the_look_and_the_removal_stays() {
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let old = [change(1, 5, Some("{}")), change(2, 5, Some("{}"))];
    projection.apply(&old).await.unwrap();
    let written = under(2, 1, &old[0]);
    let url = before_a_script(projection.clone(), written.clone()).await;
    let mut settings = CacheSettings::default();
    settings.prefix = prefix;
    let day = Duration::from_hours(24);
    let refilled = CacheProjection::connect(&url, settings, day).await.unwrap();
    let removed = refilled.begin_rebuild().await.unwrap().remove_older(2).await.unwrap();
    assert_eq!(removed, 1, "the other one");
    let left = projection.documents(&[name(1), name(2)]).await.unwrap();
    assert_eq!(left[0].as_ref().map(|document| document.version), Some(written.version));
    assert_eq!(left[1], None);
}

/// What cannot be read is named by itself, and nothing else is hidden by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t354_damaged_entries_of_the_cache_are_named_one_by_one() {
    let world = RecordSource::new().await;
    world.write(10).await;
    let prefix = valkey::fresh_name();
    let projection = cache(&prefix).await;
    let changes = world.changes().await;
    projection.apply(&changes).await.unwrap();
    assert!(world.verify(&projection).await.is_equal());
    let is_last = |one: &&hapax::projection::Change| {
        one.version.seq() == 2
            && !changes.iter().any(|c| Name::of(c) == Name::of(one) && c.version > one.version)
    };
    let names: Vec<Name> = changes.iter().filter(is_last).map(Name::of).collect();
    let key = |name: &Name, what: &str| format!("{prefix}:{{{name}}}:{what}");
    let mut connection = valkey::connection().await;
    let value: String =
        redis::cmd("GET").arg(key(&names[4], "value")).query_async(&mut connection).await.unwrap();
    let damages: [(&Name, &str, &[u8], &str); 6] = [
        (&names[0], "value", b"{\"version\":", "damaged"),
        (&names[1], "value", b"\xff\xfe", "damaged"),
        (&names[2], "version", b"17P", "its version is"),
        (&names[3], "version", b"00281474976710658123P", "its version is"),
        (&names[4], "value", value.replacen("\"seq\":2", "\"seq\":9", 1).leak().as_bytes(), "seq 9"),
        (&names[5], "version", b"00000281474976710658D", "deleted and has a value"),
    ];
    for (name, what, bytes, _) in &damages {
        let _: () =
            redis::cmd("SET").arg(key(name, what)).arg(*bytes).query_async(&mut connection).await.unwrap();
    }
    let foreign = format!("{prefix}:{{foo}}:version");
    let _: () = redis::cmd("SET").arg(&foreign).arg("x").query_async(&mut connection).await.unwrap();
    let verified = world.verify(&projection).await;
    assert_eq!(verified.differences.len(), damages.len(), "{verified:?}");
    for (name, _, _, expected) in &damages {
        let Difference::Unreadable { reason } = &verified.differences[*name] else { panic!("{verified:?}") };
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    assert_eq!(verified.foreign.keys().collect::<Vec<_>>(), [&foreign]);
}
