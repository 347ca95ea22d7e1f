//! An event of a record becomes a change.

use bytes::Bytes;

use crate::analytics::{Change, Input};
use crate::bus::{Received, Record};
use crate::error::{Error, Result};
use crate::event::{Event, Origin};
use crate::id::Topic;
use crate::records::KIND_PREFIX;

/// The change that an event of a record makes, under the generation of its source; `None` if it is
/// another event. Fails if it claims to be one and cannot be read.
pub fn change_of(event: &Event, generation: u16) -> Result<Option<Change>> {
    let Some(kind) = event.kind.as_ref().filter(|kind| kind.as_str().starts_with(KIND_PREFIX)) else {
        return Ok(None);
    };
    // As a relay publishes it: the event's own fields say what it is, whatever its headers say.
    let mut headers = vec![("ce_type".to_owned(), Bytes::from(kind.as_str().to_owned()))];
    if let Some(tenant) = &event.tenant {
        headers.push(("tenant_id".to_owned(), tenant.as_str().to_owned().into()));
    }
    if let (Some(aggregate), Some(seq)) = (&event.aggregate, event.seq) {
        headers.push(("aggregate_id".to_owned(), aggregate.as_str().to_owned().into()));
        headers.push(("sequence_number".to_owned(), seq.to_string().into()));
    }
    let record = Record {
        payload: Some(event.payload.clone()),
        headers: headers.into_iter().collect(),
        ..Record::default()
    };
    let origin = match &event.origin {
        Some(origin) => origin.clone(),
        None => Origin::new(Topic::new("journal")?, 0, 0),
    };
    match Input::of(&Received::new(record, origin), generation) {
        Ok(Input::Change(change)) => Ok(Some(*change)),
        Ok(_) => Ok(None),
        Err(rejected) => Err(Error::invalid("event", rejected.reason)),
    }
}
