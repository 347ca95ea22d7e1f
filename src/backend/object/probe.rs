//! Tests whether a store does what a journal depends on, instead of trusting it.
//!
//! Creating an object under a name must succeed only once. S3 has offered that since 2024 as
//! `If-None-Match: *`. A server that does not know the header accepts the second write: two appends
//! would get one number, and one of them would be lost. Listings must be in order, starting at any
//! name: otherwise a follower would get events twice, or never.

use bytes::Bytes;

use super::store::Objects;
use crate::error::{Error, Result};

/// The prefix of test objects. Their names are unique, they exist only during the test, and nothing
/// else reads them.
const PROBES: &str = "probe/";
/// Older objects are from tests that were killed: a test takes seconds.
const LEFT: std::time::Duration = std::time::Duration::from_hours(1);
/// How many of those are removed at a time.
const LEFT_MAX: usize = 100;

/// Tests a store, and refuses one that creates a name twice, does not keep what it created, or does
/// not list in order.
pub(crate) async fn must_keep_a_journal(objects: &dyn Objects) -> Result<()> {
    let prefix = format!("{PROBES}{}", uuid::Uuid::new_v4().simple());
    // Create the later name first, so that age does not yield the right order.
    let names = [format!("{prefix}.b"), format!("{prefix}.a")];
    let tried = async {
        let [later, earlier] = &names;
        create_twice(objects, later).await?;
        objects.put(earlier, Bytes::new()).await?;
        list_in_order(objects, &prefix, earlier, later).await
    };
    let tried = tried.await;
    for name in &names {
        let removed = objects.delete(name).await;
        if tried.is_ok() {
            removed?;
        }
    }
    tried?;
    remove_left(objects).await
}

async fn create_twice(objects: &dyn Objects, name: &str) -> Result<()> {
    let (first, second) = (Bytes::from_static(b"first"), Bytes::from_static(b"second"));
    // Ignore the answer: a client that retried may get an "exists" about its own object.
    objects.create(name, first.clone()).await?;
    let again = objects.create(name, second).await?;
    let found = match objects.get(name).await? {
        Some(kept) if kept == first && !again => return Ok(()),
        None => "an object that was just created is not there",
        Some(_) if again => "an object was created twice under one name",
        Some(_) => "it said that a name is taken, and wrote over the object all the same",
    };
    let needed = "It must create an object only if no object has its name, which on S3 is `If-None-Match: *`";
    Err(refused(objects, &format!("{found}. {needed}")))
}

async fn list_in_order(objects: &dyn Objects, prefix: &str, earlier: &str, later: &str) -> Result<()> {
    let first = objects.list(prefix, "", 1).await?;
    let rest = objects.list(prefix, earlier, 10).await?;
    if first.iter().map(|object| object.name.as_str()).eq([earlier])
        && rest.iter().map(|object| object.name.as_str()).eq([later])
    {
        return Ok(());
    }
    let needed =
        "it must list what was written in the order of names, from any name on (`start-after` on S3)";
    Err(refused(objects, needed))
}

fn refused(objects: &dyn Objects, reason: &str) -> Error {
    let what = format!("{} cannot keep a journal or an archive: {reason}", objects.about());
    Error::Refused { what, source: None }
}

/// Removes objects of tests that were killed.
async fn remove_left(objects: &dyn Objects) -> Result<()> {
    let listed = objects.list(PROBES, PROBES, LEFT_MAX).await?;
    if listed.is_empty() {
        return Ok(());
    }
    let old = objects.now().await?.low.minus(LEFT);
    for probe in listed.iter().filter(|probe| probe.at < old) {
        objects.delete(&probe.name).await?;
    }
    Ok(())
}
