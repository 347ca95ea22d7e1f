//! Whether a store creates an object of a name once: everything rests on that, so it is tried and not believed.
//!
//! S3 has it since 2024 as `If-None-Match: *`. A server that does not know the header takes the second write of a name and says that all is
//! well; two appends would get one number, and one of them would be gone.

use bytes::Bytes;

use super::store::Objects;
use crate::error::{Error, Result};

/// What is tried lies here, under names that nobody has used before, for as long as it takes. Nobody else looks here.
const PROBES: &str = "probe/";
/// What is older was left by someone who was killed: a try takes seconds.
const LEFT: std::time::Duration = std::time::Duration::from_hours(1);
/// So many of those are removed at a time.
const LEFT_MAX: usize = 100;

/// Creates an object twice, and refuses a store that lets the second one through or does not keep the first.
pub(crate) async fn must_create_once(objects: &dyn Objects) -> Result<()> {
    let name = format!("{PROBES}{}", uuid::Uuid::new_v4().simple());
    let tried = create_twice(objects, &name).await;
    let removed = objects.delete(&name).await;
    tried?;
    removed?;
    remove_left(objects).await
}

async fn create_twice(objects: &dyn Objects, name: &str) -> Result<()> {
    let (first, second) = (Bytes::from_static(b"first"), Bytes::from_static(b"second"));
    // Its answer says nothing: a client that had to ask again may be told that its own object is there.
    objects.create(name, first.clone()).await?;
    let again = objects.create(name, second).await?;
    let kept = objects.get(name).await?;
    let found = match kept {
        Some(kept) if kept == first && !again => return Ok(()),
        None => "an object that was just created is not there",
        Some(_) if again => "an object was created twice under one name",
        Some(_) => "it said that a name is taken, and wrote over the object all the same",
    };
    Err(Error::Refused {
        what: format!(
            "{} cannot keep a journal or an archive: {found}. It must create an object only if there is none of its name, which on S3 is \
             `If-None-Match: *`",
            objects.about()
        ),
        source: None,
    })
}

/// Removes what was left by those who were killed here.
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
