//! The story: orders arrive while workers are killed and one is frozen. Every step waits for a
//! state, not for a time.

use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteLedger, SqliteRecords};
use hapax::bus::{Bus, Partition};
use hapax::ledger::Identity;
use hapax::{Claims as _, Scope, Topic};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::chaos::Visitors;
use super::control::Step;
use super::crew::{Crew, PATIENCE, stuck};
use super::shop::{self, Order, Random, Recent};
use super::view::{Shared, Shown};
use super::witness::Witness;
use super::worker::{LEASE, Role};
use super::world::{BILLING, ORDERS, PARCELS, PARTITIONS, PAYMENTS, SHIPPING};
use crate::failure::Failure;
use crate::print::grouped;

/// How often to look whether a state is reached.
const LOOK: Duration = Duration::from_millis(20);

/// What happens while a share of the orders arrives.
#[derive(Debug, Clone, Copy)]
enum Act {
    Nothing,
    KillWorker(Role, Step),
    KillRelay,
    Freeze,
}

const ACTS: [Act; 9] = [
    Act::Nothing,
    Act::KillWorker(Role::Billing, Step::BeforeEffect),
    Act::KillWorker(Role::Shipping, Step::BeforeEffect),
    Act::KillRelay,
    Act::Freeze,
    Act::KillWorker(Role::Shipping, Step::AfterEffect),
    Act::KillWorker(Role::Billing, Step::BeforeEffect),
    Act::KillWorker(Role::Shipping, Step::BeforeEffect),
    Act::Nothing,
];

pub struct Story {
    pub records: Arc<SqliteRecords>,
    pub bus: Arc<dyn Bus>,
    pub ledger: SqliteLedger,
    pub shown: Shared,
    pub witness: Witness,
    /// All orders, in the order in which they arrive.
    pub orders: Vec<Order>,
    pub random: Random,
    /// The last records, for a storm.
    pub recent: Recent,
    /// What visitors of the page ask for, if there is one.
    pub page: Option<Visitors>,
}

fn away(error: &rusqlite::Error) -> Failure {
    Failure::dependency("unavailable", format!("the effects cannot be read: {error}"))
}

impl Story {
    /// Plays it to the end: all events were sent, published, copied, delivered and finished.
    /// Returns what was sent.
    pub async fn play(mut self, crew: &mut Crew) -> Result<Vec<Order>, Failure> {
        for role in [Role::Relay, Role::Billing, Role::Billing, Role::Shipping, Role::Shipping, Role::Reading]
        {
            crew.start(role)?;
        }
        let mut tasks = JoinSet::new();
        let events = 2 * self.orders.len() as u64;
        let random = Random(self.random.below(u64::MAX));
        let recent = self.recent.clone();
        tasks.spawn(shop::copy(Arc::clone(&self.bus), events, random, self.shown.clone(), recent));
        let random = Random(self.random.below(u64::MAX));
        tasks.spawn(shop::publish_again(Arc::clone(&self.bus), events, random, self.shown.clone()));

        // The last order is kept back: the frozen worker's customer makes it.
        let Some(mut last) = self.orders.pop() else { return Ok(Vec::new()) };
        let share = self.orders.len().div_ceil(ACTS.len());
        for (act, orders) in ACTS.into_iter().zip(self.orders.clone().chunks(share)) {
            match act {
                Act::Nothing => self.send(&mut tasks, orders),
                Act::KillWorker(role, step) => self.kill(crew, &mut tasks, orders, (role, step)).await?,
                Act::KillRelay => {
                    let published = self.shown.get(|shown| shown.effects);
                    self.send(&mut tasks, orders);
                    self.until(crew, &mut tasks, "for the relay to publish", move |shown| {
                        shown.effects > published
                    })
                    .await?;
                    crew.kill_relay().await?;
                    crew.start(Role::Relay)?;
                    self.shown.tell("killed the relay (kill -9); another one takes over".to_owned());
                }
                Act::Freeze => last.customer = self.freeze(crew, &mut tasks, orders, &last).await?,
            }
        }
        let mut sent = std::mem::take(&mut self.orders);
        sent.push(last);
        self.until(crew, &mut tasks, "for all events to be published", |shown| shown.all_published).await?;
        self.until(crew, &mut tasks, "for all changes to be published again", |shown| {
            shown.republished >= shown.events
        })
        .await?;
        self.shown.tell(format!(
            "published all {} changes of orders again, the old ones after the new ones",
            grouped(events)
        ));
        self.until_finished(crew, &mut tasks).await?;
        self.until_read(crew, &mut tasks).await?;
        self.go_on(crew, &mut tasks, &mut sent).await?;
        crew.end().await;
        Ok(sent)
    }

    /// Sends orders while the story goes on.
    pub(super) fn send(&mut self, tasks: &mut JoinSet<hapax::Result<()>>, orders: &[Order]) {
        let random = Random(self.random.below(u64::MAX));
        tasks.spawn(shop::send(Arc::clone(&self.records), orders.to_vec(), random, self.shown.clone()));
    }

    /// Kills a worker that is in the middle of an order, and starts another.
    async fn kill(
        &mut self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        orders: &[Order],
        (role, step): (Role, Step),
    ) -> Result<(), Failure> {
        crew.will_hold(role, step).await?;
        self.send(tasks, orders);
        let (victim, held) = crew.held(role).await?;
        crew.kill(victim).await?;
        crew.start(role)?;
        let order = held.order;
        if step == Step::BeforeEffect {
            self.shown.change(|shown| shown.begun.push((role, held)));
        }
        self.shown.tell(match (role, step) {
            (Role::Billing, _) => {
                format!("killed worker {victim} while it charged order {order}, before the commit")
            }
            (_, Step::BeforeEffect) => {
                format!("killed worker {victim} before it could book the parcel of order {order}")
            }
            (_, Step::AfterEffect) => {
                format!(
                    "killed worker {victim} after it booked the parcel of order {order}, before it said so"
                )
            }
        });
        Ok(())
    }

    /// Freezes a worker that is in the middle of an order for longer than its lease. Another one
    /// books that parcel, and the next one of the customer; then the frozen one wakes up, and writes
    /// what it was about to write. Returns the customer.
    async fn freeze(
        &mut self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        orders: &[Order],
        last: &Order,
    ) -> Result<String, Failure> {
        crew.will_hold(Role::Shipping, Step::BeforeEffect).await?;
        self.send(tasks, orders);
        let (victim, held) = crew.held(Role::Shipping).await?;
        crew.spared = Some(victim);
        crew.freeze(victim).await?;
        let since = Instant::now();
        self.shown.change(|shown| {
            shown.frozen += 1;
            shown.begun.push((Role::Shipping, held.clone()));
        });
        self.shown
            .tell(format!("froze worker {victim} before it could book the parcel of order {}", held.order));
        self.until_booked(crew, tasks, &held.customer, held.order).await?;
        self.shown.tell(format!("another worker booked it: the lease of worker {victim} ran out"));
        let next = Order { customer: held.customer.clone(), ..last.clone() };
        self.send(tasks, std::slice::from_ref(&next));
        self.until_booked(crew, tasks, &held.customer, next.number).await?;
        self.until_done(crew, tasks, &next).await?;
        // The lease is over by now, or nobody else could have booked it.
        tokio::time::sleep_until(since + LEASE).await;
        let (token, newest) = crew.thaw(victim).await?;
        crew.spared = None;
        self.shown.tell(match newest {
            Some(newest) => {
                self.shown.change(|shown| shown.fenced += 1);
                format!(
                    "worker {victim} woke up and wrote with token {token}; the carrier knew {newest}: refused"
                )
            }
            None => format!("worker {victim} woke up and overwrote what others had booked meanwhile"),
        });
        Ok(held.customer)
    }

    async fn until_booked(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        customer: &str,
        order: u64,
    ) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        while !self.witness.is_booked(customer, order).map_err(|e| away(&e))? {
            self.wait(crew, tasks, end, "for a parcel to be booked").await?;
        }
        Ok(())
    }

    /// Until the parcel of an order is done for the ledger too, so that no run books it again.
    async fn until_done(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        order: &Order,
    ) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        let parcel = [Identity::new(Scope::new(SHIPPING)?, order.shipped()?)];
        while self.ledger.known(&parcel).await? != [true] {
            self.wait(crew, tasks, end, "for a parcel to be done").await?;
        }
        Ok(())
    }

    async fn until(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        what: &str,
        is_so: impl Fn(&Shown) -> bool,
    ) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        while !self.shown.get(&is_so) {
            self.wait(crew, tasks, end, what).await?;
        }
        Ok(())
    }

    /// Until every record on the bus is finished, by both groups.
    pub(super) async fn until_finished(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
    ) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        for (group, topic) in [(BILLING, PAYMENTS), (SHIPPING, PARCELS)] {
            for number in 0..PARTITIONS {
                let partition = Partition { topic: Topic::new(topic)?, number };
                while self.bus.range(&partition).await?.1
                    > self.bus.committed(group, &partition).await?.unwrap_or(0)
                {
                    self.wait(crew, tasks, end, "for the last deliveries to be finished").await?;
                }
            }
        }
        Ok(())
    }

    /// Until the read model has applied every record of its topic.
    pub(super) async fn until_read(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
    ) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        let mut published = 0;
        for number in 0..PARTITIONS {
            published += self.bus.range(&Partition { topic: Topic::new(ORDERS)?, number }).await?.1;
        }
        while self.witness.changes_read().map_err(|e| away(&e))? < published.unsigned_abs() {
            self.wait(crew, tasks, end, "for the read model to follow").await?;
        }
        Ok(())
    }

    /// Waits a moment. Fails if something has failed meanwhile.
    pub(super) async fn wait(
        &self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        end: Instant,
        what: &str,
    ) -> Result<(), Failure> {
        self.serve_visitors(crew).await?;
        crew.check()?;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap_or_else(|e| Err(hapax::Error::unavailable("the demo", e)))?;
        }
        if Instant::now() >= end {
            return Err(stuck(what));
        }
        tokio::time::sleep(LOOK).await;
        Ok(())
    }
}
