//! A store that does not create an object of a name once cannot keep a journal, and is told from one that can when it is opened.
#![cfg(all(feature = "s3", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::time::Duration;

use crate::support::fake_s3::{Creates, FakeS3};
use crate::support::objects::{Place, append, follow};
use hapax::backend::object::{ObjectJournal, ObjectSettings, S3};
use hapax::journal::{ArchiveSettings, Expected, Journal, MemoryJournal, RelayStore as _, archive};
use hapax::{Error, Owner};

async fn open(server: &FakeS3) -> hapax::Result<ObjectJournal> {
    let store = S3::connect(server.settings()).await.unwrap();
    ObjectJournal::open(Arc::new(store), ObjectSettings::default()).await
}

#[tokio::test]
async fn t80_a_store_without_create_only_puts_or_order_is_refused() {
    let server = FakeS3::new(Creates::Once).await;
    let journal = open(&server).await.expect("what can do it is let in");
    assert_eq!(server.names(), ["meta"], "and nothing else is left there");
    let _ = journal.append(&append("a", Expected::New, &["a1", "a2"])).await.unwrap();
    assert_eq!(follow(&journal).await.len(), 2);

    for (creates, expected) in [
        (Creates::Always, "twice"),
        (Creates::Overwrites, "wrote over"),
        (Creates::Forgets, "not there"),
        (Creates::Refuses, "NotImplemented"),
        (Creates::OnceAndListsAll, "start-after"),
        (Creates::OnceAndListsBackwards, "order of names"),
    ] {
        let server = FakeS3::new(creates).await;
        let error = open(&server).await.map(drop).expect_err("it cannot keep a journal");
        assert!(matches!(error, Error::Refused { .. } | Error::Unsupported(_)), "{creates:?}: {error}");
        assert!(!error.is_retryable() && error.to_string().contains(expected), "{creates:?}: {error}");
        assert_eq!(
            server.names(),
            Vec::<String>::new(),
            "{creates:?}: nothing is left there, and no journal was made"
        );
    }
}

/// Of two archivists one writes a file, by the same means.
#[tokio::test]
async fn t80_an_archive_is_refused_there_too() {
    let server = FakeS3::new(Creates::Always).await;
    let store = S3::connect(server.settings()).await.unwrap();
    let settings = ArchiveSettings::new(Duration::ZERO, Owner::new("archivist").unwrap()).unwrap();
    let journal = MemoryJournal::default();
    let error = archive(&journal, &store, &settings).await.unwrap_err();
    assert_eq!(error.code(), "refused", "{error}");
    assert!(journal.relays().await.unwrap().is_empty(), "nothing has begun");
}

/// On the real server, and in a directory: who opens at the same time as others does not disturb them, and nothing is left.
#[tokio::test]
async fn t80_openers_at_once_do_not_disturb_each_other() {
    for place in [Place::s3(), Place::directory()] {
        let opening: Vec<_> = (0..8)
            .map(|_| {
                let place = place.clone();
                tokio::spawn(async move { place.open().await.id().to_owned() })
            })
            .collect();
        let mut ids = Vec::new();
        for opened in opening {
            ids.push(opened.await.unwrap());
        }
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        let left = place.objects().await.list("", "", 100).await.unwrap();
        assert_eq!(left.iter().map(|object| object.name.as_str()).collect::<Vec<_>>(), ["meta"]);
    }
}

/// What a killed one left is removed later, not while it may be in use.
#[tokio::test]
async fn t80_what_a_killed_opener_left_is_removed() {
    let place = Place::directory();
    let store = place.objects().await;
    for name in ["probe/old", "probe/new"] {
        assert!(store.create(name, "first".into()).await.unwrap());
    }
    let path = std::path::Path::new(place.word.strip_prefix("dir:").unwrap()).join("probe/old");
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    place.open().await;
    let left = store.list("probe/", "", 100).await.unwrap();
    assert_eq!(left.iter().map(|object| object.name.as_str()).collect::<Vec<_>>(), ["probe/new"]);
}
