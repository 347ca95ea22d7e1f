//! What arrives: orders in random order, clients that send them again, and a network that delivers
//! records twice.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax::analytics::Uuid;
use hapax::backend::sqlite::SqliteRecords;
use hapax::bus::{Bus, BusEvent, Record, Subscription};
use hapax::event::Headers;
use hapax::journal::{Append, Expected, Placing};
use hapax::records::{Create, ModuleSlug, Payload, Records, Update};
use hapax::{Event, EventId, Journal as _, Kind, Topic};
use serde_json::json;
use tokio::task::JoinSet;

use super::view::Shared;
use super::world::{ORDERS, PARCELS, PAYMENTS};

/// The kinds of events: an order is paid, then shipped.
pub const PAID: &str = "order.paid";
pub const SHIPPED: &str = "order.shipped";
/// What the record of an order says, first and last.
const TAKEN: &str = "taken";
pub const CONFIRMED: &str = "confirmed";
/// How many clients send at once.
const CLIENTS: usize = 16;
/// One order in this many is sent again.
const RETRIED: u64 = 5;
/// Marks a copy that the demo put on the bus.
const COPY: &str = "demo_copy";
/// How many records gather before their copies are shuffled and published.
const COPIES: usize = 100;
/// How many records a storm repeats, and how often each.
const RECENT: usize = 400;
const STORM: usize = 5;
/// If nothing comes for this long, fewer are enough.
const IDLE: Duration = Duration::from_millis(200);

/// A pseudo-random sequence (splitmix64): the same seed gives the same orders.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    pub number: u64,
    pub customer: String,
    pub cents: i64,
}

impl Order {
    /// Orders 1 to `count`, of some twenty per customer, shuffled.
    pub fn random(count: u64, random: &mut Random) -> Vec<Order> {
        let customers = (count / 20).max(8);
        let mut orders: Vec<_> = (1..=count)
            .map(|number| Order {
                number,
                customer: format!("customer-{}", 1 + random.below(customers)),
                cents: 100 + random.below(20_000) as i64,
            })
            .collect();
        random.shuffle(&mut orders);
        orders
    }

    /// One more order, of a customer who may have ordered before.
    pub fn next(number: u64, random: &mut Random) -> Order {
        let customer = format!("customer-{}", 1 + random.below(8));
        Order { number, customer, cents: 100 + random.below(20_000) as i64 }
    }

    /// The id of the event that books the parcel.
    pub fn shipped(&self) -> hapax::Result<EventId> {
        EventId::new(format!("order-{}-shipped", self.number))
    }

    /// The id of its record.
    fn id(&self) -> Uuid {
        Uuid::from_u64_pair(0, self.number)
    }

    /// The content of its record.
    pub fn content(&self, status: &str) -> serde_json::Value {
        json!({"order": self.number, "customer": self.customer, "cents": self.cents, "status": status})
    }

    /// Makes its record, or changes it: every order is taken, and then confirmed.
    async fn write(&self, records: &dyn Records, status: &str) -> hapax::Result<()> {
        let (module, payload) = (ModuleSlug::new(ORDERS)?, Payload::new(self.content(status).to_string())?);
        if status == TAKEN {
            records.create(&Create::new(module, payload).id(self.id())).await?;
        } else {
            records.update(&Update::new(module, self.id(), 1, payload)).await?;
        }
        Ok(())
    }

    /// What a client sends, the first time and every time: both events of the order, in one step.
    fn append(&self) -> hapax::Result<Append> {
        let event = |id: EventId, kind: &str| -> hapax::Result<Event> {
            let payload = json!({"order": self.number, "customer": self.customer, "cents": self.cents});
            Ok(Event::new(id).kind(Kind::new(kind)?).payload(payload.to_string()))
        };
        let paid = EventId::new(format!("order-{}-paid", self.number))?;
        Append::to(&self.customer, Expected::Any, [event(paid, PAID)?, event(self.shipped()?, SHIPPED)?])
    }
}

/// Gift cards to be shipped, which the demo cannot print at first: they become dead letters.
pub const GIFTS: u64 = 3;
/// How their ids begin.
pub const GIFT: &str = "gift-";

/// Sends the gift cards. They are not orders, so the witness ignores them.
pub async fn send_gifts(records: &SqliteRecords) -> hapax::Result<()> {
    for gift in 1..=GIFTS {
        let event = Event::new(EventId::new(format!("{GIFT}{gift}-shipped"))?).kind(Kind::new(SHIPPED)?);
        let event = event.payload(json!({"gift": gift}).to_string());
        let append = Append::to(format!("{GIFT}{gift}"), Expected::Any, [event])?;
        let _ = records.journal().append(&append).await?; // new in a new journal
    }
    Ok(())
}

/// The last records that the relay published, for a storm of duplicates.
#[derive(Debug, Clone, Default)]
pub struct Recent(Arc<Mutex<VecDeque<(Topic, Record)>>>);

impl Recent {
    fn add(&self, topic: &Topic, record: &Record) {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.push_back((topic.clone(), record.clone()));
        if recent.len() > RECENT {
            recent.pop_front();
        }
    }

    /// Delivers all of them again, several times and in any order. Returns how many that were.
    pub async fn storm(&self, bus: &dyn Bus, random: &mut Random, shown: &Shared) -> hapax::Result<usize> {
        let recent = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut copies: Vec<_> = (0..STORM).flat_map(|_| recent.iter().cloned()).collect();
        let count = copies.len();
        publish(bus, &mut copies, random, shown).await?;
        Ok(count)
    }
}

/// Sends orders to the journal, many clients at once. Some get no answer (so they believe) and send
/// again, later and in another order. Each order is a record too, written twice.
pub async fn send(
    records: Arc<SqliteRecords>,
    orders: Vec<Order>,
    mut random: Random,
    shown: Shared,
) -> hapax::Result<()> {
    let mut again: Vec<_> = orders.iter().filter(|_| random.below(RETRIED) == 0).cloned().collect();
    random.shuffle(&mut again);
    for (is_first, round) in [(true, orders), (false, again)] {
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            let mine: Vec<_> = round.iter().skip(client).step_by(CLIENTS).cloned().collect();
            let (records, shown) = (Arc::clone(&records), shown.clone());
            clients.spawn(async move {
                for order in mine {
                    if is_first {
                        order.write(&*records, TAKEN).await?;
                    }
                    let placed = records.journal().append(&order.append()?).await?.placed;
                    let new = placed.iter().filter(|placed| placed.placing == Placing::New).count() as u64;
                    shown.change(|shown| {
                        shown.sent += new;
                        shown.retried += placed.len() as u64 - new;
                    });
                    if is_first {
                        order.write(&*records, CONFIRMED).await?;
                        shown.change(|shown| shown.changes += 2);
                    }
                }
                hapax::Result::Ok(())
            });
        }
        while let Some(sent) = clients.join_next().await {
            sent.unwrap_or_else(|e| Err(hapax::Error::unavailable("a client", e)))?;
        }
    }
    Ok(())
}

/// Reads what the relay publishes, and publishes every other event again: later, and in another
/// order. Goes on until all events were there.
pub async fn copy(
    bus: Arc<dyn Bus>,
    events: u64,
    mut random: Random,
    shown: Shared,
    recent: Recent,
) -> hapax::Result<()> {
    let topics = [Topic::new(PAYMENTS)?, Topic::new(PARCELS)?];
    let mut records = bus.subscribe(Subscription::new("copies", topics)?).await?;
    let mut seen = HashSet::new();
    let mut copies = Vec::new();
    let mut skip_next = None;
    loop {
        let all_seen = seen.len() as u64 >= events;
        if copies.len() >= COPIES || all_seen {
            publish(&*bus, &mut copies, &mut random, &shown).await?;
        }
        if all_seen {
            shown.change(|shown| shown.all_published = true);
            // The relay may publish some again; they are counted.
        }
        let Ok(next) = tokio::time::timeout(IDLE, records.next()).await else {
            publish(&*bus, &mut copies, &mut random, &shown).await?;
            continue;
        };
        let received = match next? {
            BusEvent::Records(received) => received,
            BusEvent::Revoked(partitions) => {
                records.release(&partitions).await?;
                continue;
            }
            _ => continue,
        };
        for received in received {
            let (topic, record) = (received.origin.topic, received.record);
            let id = record.headers.get("eventId").map(<[u8]>::to_vec).unwrap_or_default();
            if record.headers.get(COPY).is_some() || id.starts_with(GIFT.as_bytes()) {
                continue;
            }
            recent.add(&topic, &record);
            if !seen.insert(id) {
                shown.change(|shown| shown.relayed_again += 1);
                continue;
            }
            // One of two, chosen at random.
            let skip = skip_next.take().unwrap_or_else(|| {
                let skip = random.below(2) == 0;
                skip_next = Some(!skip);
                skip
            });
            if !skip {
                copies.push((topic, record));
            }
        }
    }
}

/// Reads the changes of all orders, and publishes them all again in another order. So an old change comes
/// after a newer one, as from a relay or a connector that has lost its place.
pub async fn publish_again(
    bus: Arc<dyn Bus>,
    changes: u64,
    mut random: Random,
    shown: Shared,
) -> hapax::Result<()> {
    let topic = Topic::new(ORDERS)?;
    let mut subscriber = bus.subscribe(Subscription::new("again", [topic.clone()])?).await?;
    let mut all = HashMap::new();
    while (all.len() as u64) < changes {
        match subscriber.next().await? {
            BusEvent::Records(received) => all.extend(received.into_iter().map(|received| {
                let id = received.record.headers.get("eventId").map(<[u8]>::to_vec).unwrap_or_default();
                (id, received.record)
            })),
            BusEvent::Revoked(partitions) => subscriber.release(&partitions).await?,
            _ => {}
        }
    }
    // In the order of their ids first: that of the map is not the seed's.
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    random.shuffle(&mut all);
    let all: Vec<_> = all.into_iter().map(|(_, record)| record).collect();
    for records in all.chunks(5 * COPIES) {
        for answer in bus.publish(&topic, records).await? {
            answer?;
        }
        shown.change(|shown| shown.republished += records.len() as u64);
    }
    Ok(())
}

async fn publish(
    bus: &dyn Bus,
    copies: &mut Vec<(Topic, Record)>,
    random: &mut Random,
    shown: &Shared,
) -> hapax::Result<()> {
    random.shuffle(copies);
    for name in [PAYMENTS, PARCELS] {
        let topic = Topic::new(name)?;
        let of_topic = copies.iter().filter(|(of, _)| *of == topic).map(|(_, record)| {
            let own = record.headers.iter().map(|(name, value)| (name.to_owned(), value.to_vec()));
            let headers: Headers = own.chain([(COPY.to_owned(), b"1".to_vec())]).collect();
            Record { headers, ..record.clone() }
        });
        let of_topic: Vec<_> = of_topic.collect();
        if of_topic.is_empty() {
            continue;
        }
        for answer in bus.publish(&topic, &of_topic).await? {
            answer?;
        }
        shown.change(|shown| shown.copied += of_topic.len() as u64);
    }
    copies.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_its_own_orders_and_the_same_ones_every_time() {
        let story = |seed| {
            let mut random = Random(seed);
            let orders = Order::random(100, &mut random);
            (orders, random.below(u64::MAX))
        };
        for seed in [0, 7, 8, u64::MAX] {
            assert_eq!(story(seed), story(seed), "seed {seed}");
            assert_ne!(story(seed).0, story(seed ^ 1).0, "seeds {seed} and {}", seed ^ 1);
        }
    }
}
