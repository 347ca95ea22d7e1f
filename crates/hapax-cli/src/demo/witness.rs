//! The witness: compares what was sent with what took effect. It reads the effects themselves, the
//! charges, the carrier's documents and the rows of the read model, and asks neither the ledger nor the
//! workers.

use std::collections::BTreeMap;

use rusqlite::{Connection, OpenFlags};
use serde_json::Value;

use super::shop::{CONFIRMED, Order};
use super::world::{ORDERS, World};

/// One effect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// The customer of an order was charged this much.
    Charge { order: u64, customer: String, cents: i64 },
    /// The parcel of an order was booked for a customer.
    Parcel { order: u64, customer: String },
}

/// What the witness found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Findings {
    pub effects: u64,
    /// Effects that should be there and are not.
    pub lost: u64,
    /// Effects that are there more often than they should be.
    pub doubled: u64,
    /// Orders in the read model.
    pub rows: u64,
    /// Orders that are missing there, or not as they were left; and rows of no order.
    pub outdated: u64,
    /// One of each, in words.
    pub examples: Vec<String>,
}

/// Reads the effects of a demo.
pub struct Witness {
    ledger: Connection,
    carrier: Connection,
    reads: Connection,
}

impl Witness {
    pub fn new(world: &World) -> rusqlite::Result<Self> {
        let open = |file| -> rusqlite::Result<Connection> {
            let conn = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
            conn.busy_timeout(super::crew::PATIENCE)?;
            Ok(conn)
        };
        Ok(Witness {
            ledger: open(world.ledger())?,
            carrier: open(world.carrier())?,
            reads: open(world.reads())?,
        })
    }

    /// How many effects there are by now.
    pub fn count(&self) -> rusqlite::Result<u64> {
        let charges: i64 = self.ledger.query_row("SELECT count(*) FROM charges", [], |row| row.get(0))?;
        let parcels = "SELECT coalesce(sum(json_array_length(orders)), 0) FROM parcels";
        let parcels: i64 = self.carrier.query_row(parcels, [], |row| row.get(0))?;
        Ok((charges + parcels) as u64)
    }

    /// How many changes the read model has read, with repeats.
    pub fn changes_read(&self) -> rusqlite::Result<u64> {
        let read = "SELECT coalesce(sum(offset), 0) FROM hapax_read_partition";
        Ok(self.reads.query_row(read, [], |row| row.get::<_, i64>(0))? as u64)
    }

    /// The content of every row of the read model.
    fn rows(&self) -> rusqlite::Result<Vec<String>> {
        let mut rows = self
            .reads
            .prepare("SELECT payload FROM hapax_read_row WHERE module = ?1 AND payload IS NOT NULL")?;
        rows.query_map([ORDERS], |row| row.get(0))?.collect()
    }

    /// Whether the parcel of an order is booked.
    pub fn is_booked(&self, customer: &str, order: u64) -> rusqlite::Result<bool> {
        let found = "SELECT EXISTS (SELECT 1 FROM parcels, json_each(parcels.orders) \
                     WHERE parcels.customer = ?1 AND json_each.value = ?2)";
        self.carrier.query_row(found, (customer, order as i64), |row| row.get(0))
    }

    /// Whether an order is charged.
    pub fn is_charged(&self, order: u64) -> rusqlite::Result<bool> {
        let found = "SELECT EXISTS (SELECT 1 FROM charges WHERE order_number = ?1)";
        self.ledger.query_row(found, [order as i64], |row| row.get(0))
    }

    /// Every effect.
    fn effects(&self) -> rusqlite::Result<Vec<Effect>> {
        let mut charges = self.ledger.prepare("SELECT order_number, customer, cents FROM charges")?;
        let charges = charges.query_map([], |row| {
            Ok(Effect::Charge {
                order: row.get::<_, i64>(0)? as u64,
                customer: row.get(1)?,
                cents: row.get(2)?,
            })
        })?;
        let mut parcels = self
            .carrier
            .prepare("SELECT json_each.value, customer FROM parcels, json_each(parcels.orders)")?;
        let parcels = parcels.query_map([], |row| {
            Ok(Effect::Parcel { order: row.get::<_, i64>(0)? as u64, customer: row.get(1)? })
        })?;
        charges.chain(parcels).collect()
    }

    /// Compares the effects with what was sent.
    pub fn judge(&self, sent: &[Order]) -> rusqlite::Result<Findings> {
        let mut findings = compare(sent, self.effects()?);
        compare_rows(sent, &self.rows()?, &mut findings);
        Ok(findings)
    }
}

/// Each order must be one row, as it was left; there must be nothing else.
fn compare_rows(sent: &[Order], rows: &[String], findings: &mut Findings) {
    let mut shown: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for row in rows {
        let row: Value = serde_json::from_str(row).unwrap_or_default();
        shown.entry(row["order"].as_u64().unwrap_or(0)).or_default().push(row);
    }
    let mut example = None;
    for order in sent {
        let rows = shown.remove(&order.number).unwrap_or_default();
        if rows != [order.content(CONFIRMED)] {
            findings.outdated += 1;
            let text: Vec<_> = rows.iter().map(ToString::to_string).collect();
            let is = if text.is_empty() { "not in the read model".to_owned() } else { text.join(" and ") };
            example.get_or_insert(format!("order {} is {is}", order.number));
        }
    }
    findings.rows = rows.len() as u64;
    findings.outdated += shown.values().map(|rows| rows.len() as u64).sum::<u64>();
    findings.examples.extend(example);
}

/// Each order must have one charge of its amount and one parcel; there must be nothing else.
fn compare(sent: &[Order], effects: Vec<Effect>) -> Findings {
    // How often each effect is there, less how often it should be.
    let mut surplus: BTreeMap<Effect, i64> = BTreeMap::new();
    for Order { number, customer, cents } in sent {
        let (order, customer) = (*number, customer.clone());
        *surplus.entry(Effect::Charge { order, customer: customer.clone(), cents: *cents }).or_default() -= 1;
        *surplus.entry(Effect::Parcel { order, customer }).or_default() -= 1;
    }
    let mut findings = Findings { effects: effects.len() as u64, ..Findings::default() };
    for effect in effects {
        *surplus.entry(effect).or_default() += 1;
    }
    let lost = surplus.iter().find(|(_, surplus)| **surplus < 0).map(|(effect, _)| match effect {
        Effect::Charge { order, customer, .. } => format!("order {order} of {customer} was never charged"),
        Effect::Parcel { order, customer } => format!("order {order} of {customer} has no parcel"),
    });
    let doubled = surplus.iter().find(|(_, surplus)| **surplus > 0).map(|(effect, surplus)| match effect {
        Effect::Charge { order, customer, .. } => {
            format!("order {order} of {customer} was charged {} times", surplus + 1)
        }
        Effect::Parcel { order, customer } => {
            format!("order {order} of {customer} has {} parcels", surplus + 1)
        }
    });
    findings.lost =
        surplus.values().filter(|surplus| **surplus < 0).map(|surplus| surplus.unsigned_abs()).sum();
    findings.doubled =
        surplus.values().filter(|surplus| **surplus > 0).map(|surplus| surplus.unsigned_abs()).sum();
    findings.examples = lost.into_iter().chain(doubled).collect();
    findings
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use super::*;

    #[test]
    fn the_witness_counts_what_is_lost_and_what_is_doubled() {
        let order = |number| Order { number, customer: "c".into(), cents: 7 };
        let charge = |order, cents| Effect::Charge { order, customer: "c".into(), cents };
        let parcel = |order| Effect::Parcel { order, customer: "c".into() };
        let sent = [order(1), order(2)];
        let all = || vec![charge(1, 7), charge(2, 7), parcel(1), parcel(2)];
        let fine = compare(&sent, all());
        assert_eq!((fine.effects, fine.lost, fine.doubled, fine.examples.len()), (4, 0, 0, 0));
        let doubled = compare(&sent, [all(), vec![charge(2, 7), charge(2, 7)]].concat());
        assert_eq!((doubled.effects, doubled.lost, doubled.doubled), (6, 0, 2));
        assert_eq!(doubled.examples, ["order 2 of c was charged 3 times"]);
        let lost = compare(&sent, all().split_off(1));
        assert_eq!((lost.lost, lost.doubled), (1, 0));
        assert_eq!(lost.examples, ["order 1 of c was never charged"]);
        // A row for each order, as it was left.
        let rows = |statuses: &[&str]| {
            let mut found = Findings::default();
            let rows: Vec<_> = sent.iter().zip(statuses).map(|(of, is)| of.content(is).to_string()).collect();
            compare_rows(&sent, &rows, &mut found);
            (found.rows, found.outdated, found.examples)
        };
        assert_eq!(rows(&[CONFIRMED, CONFIRMED]), (2, 0, vec![]));
        assert_eq!(rows(&[CONFIRMED]), (1, 1, vec!["order 2 is not in the read model".to_owned()]));
        let (count, outdated, examples) = rows(&["taken", CONFIRMED]);
        assert!((count, outdated) == (2, 1) && examples[0].contains("\"status\":\"taken\""), "{examples:?}");
        // A wrong amount is not the effect that was ordered.
        let wrong = compare(&sent, vec![charge(1, 8), charge(2, 7), parcel(1), parcel(2)]);
        assert_eq!((wrong.lost, wrong.doubled), (1, 1));
    }
}
