//! Selects entries of a ledger: all that match a filter, and of those the first in the order in which they may run.

use std::collections::BTreeMap;
use std::fmt;

use hapax::ledger::{Entry, Filter};
use hapax::{Aggregate, Error, EventId, Ledger, Scope, Tenant, Time};
use serde::{Deserialize, Serialize};

use crate::ledger::act::Target;
use crate::reasons::pattern;

/// How many entries to read at a time.
const PAGE: usize = 500;

/// Which of the entries that match a filter.
#[derive(Debug, Clone, Default)]
pub struct Part {
    /// Those whose reason has this pattern.
    pub pattern: Option<String>,
    /// Those after this place.
    pub after: Option<Place>,
}

/// The place of an entry in the order in which events may run: in a scope by aggregate and seq.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    tenant: Option<Tenant>,
    scope: Scope,
    order: Option<(Aggregate, u64)>,
    first_at: Time,
    id: EventId,
    time: Option<Time>,
}

/// A place as text. It names an event that whoever gets it may see.
#[derive(Serialize, Deserialize)]
struct Written(Option<String>, String, Option<(String, u64)>, i64, String, Option<i64>);

impl Place {
    pub fn of(entry: &Entry) -> Self {
        let Target { identity, time } = Target::of(entry);
        Place {
            tenant: identity.tenant,
            scope: identity.scope,
            order: entry.order.clone(),
            first_at: entry.first_at,
            id: identity.id,
            time,
        }
    }

    /// Reads what [`Display`](fmt::Display) has written.
    pub fn read(text: &str) -> hapax::Result<Self> {
        let bad = |_| Error::invalid("after", "send the `next` of an answer");
        let Written(tenant, scope, order, first_at, id, time) = serde_json::from_str(text).map_err(bad)?;
        let order = order.map(|(aggregate, seq)| Ok::<_, Error>((Aggregate::new(aggregate)?, seq)));
        Ok(Place {
            tenant: tenant.map(Tenant::new).transpose()?,
            scope: Scope::new(scope)?,
            order: order.transpose()?,
            first_at: Time::from_micros(first_at),
            id: EventId::new(id)?,
            time: time.map(Time::from_micros),
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = Written(
            self.tenant.as_ref().map(ToString::to_string),
            self.scope.to_string(),
            self.order.as_ref().map(|(aggregate, seq)| (aggregate.to_string(), *seq)),
            self.first_at.as_micros(),
            self.id.to_string(),
            self.time.map(Time::as_micros),
        );
        f.write_str(&serde_json::to_string(&written).map_err(|_| fmt::Error)?)
    }
}

/// Shows every entry that matches a filter, in key order and without its bytes. Whoever wants the first in
/// another order looks at all of them, and keeps as many as it needs.
pub async fn each_match(
    ledger: &dyn Ledger,
    filter: &Filter,
    mut look: impl FnMut(Entry),
) -> hapax::Result<()> {
    let mut after = None;
    loop {
        let page = ledger.list(filter, after.as_ref(), PAGE).await?;
        for mut entry in page.entries {
            entry.row.body = None;
            look(entry);
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// The first entries of a part, in the order in which they may run.
pub async fn first(
    ledger: &dyn Ledger,
    filter: &Filter,
    part: &Part,
    most: usize,
) -> hapax::Result<Vec<(Place, Entry)>> {
    let mut found = BTreeMap::new();
    each_match(ledger, filter, |entry| {
        let place = Place::of(&entry);
        let is_before = part.after.as_ref().is_some_and(|after| place <= *after);
        let of_pattern = |wanted: &String| pattern(entry.reason.as_deref()) == *wanted;
        if is_before || !part.pattern.as_ref().is_none_or(of_pattern) {
            return;
        }
        found.insert(place, entry);
        if found.len() > most {
            found.pop_last();
        }
    })
    .await?;
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        for (tenant, order, id, time) in [
            (None, None, "order-17", None),
            (
                Some("acme"),
                Some(("o\"1", u64::MAX)),
                "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10",
                Some(Time::default()),
            ),
        ] {
            let place = Place {
                tenant: tenant.map(|tenant| Tenant::new(tenant).unwrap()),
                scope: Scope::new("mailer").unwrap(),
                order: order.map(|(of, seq)| (Aggregate::new(of).unwrap(), seq)),
                first_at: Time::from_micros(1_700_000_000_000_001),
                id: EventId::new(id).unwrap(),
                time,
            };
            assert_eq!(Place::read(&place.to_string()).unwrap(), place);
        }
        for bad in ["", "x", "[]", "[null,\"\",null,0,\"a\",null]", "[null,\"s\",null,0,\"\",null]"] {
            assert!(Place::read(bad).is_err(), "{bad}");
        }
    }
}
