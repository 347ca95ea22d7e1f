//! The processes that do the work, and that the demo kills. They use the library as any user would:
//! a relay, a transactional consumer, a leased one and the feed of a read model.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use clap::{Args, ValueEnum};
use hapax::analytics::{Feed, FeedSettings, ReadModel};
use hapax::backend::sqlite::{SqliteJournal, SqliteLedger, SqliteReadModel, SqliteTransaction};
use hapax::bus::{Bus, EmbeddedBus};
use hapax::consumer::{Consumer, Failed, Handled, LeasedHandler, Progress, TransactionalHandler};
use hapax::guard::Run;
use hapax::journal::JournalSettings;
use hapax::ledger::Settings;
use hapax::records::KIND_PREFIX;
use hapax::window::{MemoryWindow, Window, WindowSettings};
use hapax::{Event, Kind, Ledger, Relay, Topic, TransactionalLedger};
use serde::Deserialize;

use super::broken::{Break, Broken};
use super::by_arrival::ByArrival;
use super::carrier::{Carrier, Put};
use super::control::{Control, Counts, Message, Step, say};
use super::shop::GIFT;
use super::world::{BILLING, ORDERS, PARCELS, PAYMENTS, RELAY, SHIPPING, World};
use crate::failure::Failure;

/// How long a worker may be silent before others may take over its events.
pub const LEASE: Duration = Duration::from_secs(2);
/// The same for its partitions.
const SESSION: Duration = Duration::from_secs(3);
/// How often a worker reports its counts.
const REPORT: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub struct WorkerArgs {
    #[arg(value_enum)]
    role: Role,
    #[arg(long)]
    dir: std::path::PathBuf,
    #[arg(long = "break", value_enum)]
    broken: Option<Break>,
}

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Publishes the journal.
    Relay,
    /// Charges customers: transactional.
    Billing,
    /// Books parcels: leased.
    Shipping,
    /// Keeps the read model of the orders.
    Reading,
}

impl Role {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Role::Relay => "relay",
            Role::Billing => "billing",
            Role::Shipping => "shipping",
            Role::Reading => "reading",
        }
    }
}

/// What the events are about.
#[derive(Debug, Deserialize)]
struct Payload {
    order: u64,
    customer: String,
    cents: i64,
}

/// A gift card.
#[derive(Debug, Deserialize)]
struct Gift {
    gift: u64,
}

fn order_of(event: &Event) -> Result<Payload, Failed> {
    serde_json::from_slice(&event.payload).map_err(Failed::fatal)
}

pub async fn run(args: &WorkerArgs) -> Result<u8, Failure> {
    let world = World::at(&args.dir);
    let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(world.bus())?);
    let control = Arc::new(Control::default());
    if args.role == Role::Relay {
        return publish(&world, bus, &control).await;
    }
    if args.role == Role::Reading {
        return read(&world, bus, &control, args.broken).await;
    }
    let ledger = SqliteLedger::open(world.ledger(), Settings::default())?;
    match (args.role, args.broken) {
        (Role::Billing, None) => charge(bus, ledger, control).await,
        (Role::Billing, Some(what)) => charge(bus, Broken { inner: ledger, what }, control).await,
        (_, None) => ship(&world, bus, ledger, control).await,
        (_, Some(what)) => ship(&world, bus, Broken { inner: ledger, what }, control).await,
    }
}

/// Publishes what the shop appends, each kind of event to its topic.
async fn publish(world: &World, bus: Arc<dyn Bus>, control: &Arc<Control>) -> Result<u8, Failure> {
    let journal = Arc::new(SqliteJournal::open(world.journal(), JournalSettings::default())?);
    let (payments, parcels, orders) = (Topic::new(PAYMENTS)?, Topic::new(PARCELS)?, Topic::new(ORDERS)?);
    let relay = Relay::builder(journal, bus)
        .name(RELAY)
        .topic(PAYMENTS)
        .with(move |settings| {
            settings.lease = LEASE;
            settings.poll = Duration::from_millis(50);
            settings.route =
                Some(Arc::new(move |stored| match stored.event.kind.as_ref().map(Kind::as_str) {
                    Some(super::shop::SHIPPED) => parcels.clone(),
                    Some(kind) if kind.starts_with(KIND_PREFIX) => orders.clone(),
                    _ => payments.clone(),
                }));
        })
        .build()?;
    let handle = relay.handle();
    listen(control, move || handle.stop())?;
    relay.run().await?;
    Ok(0)
}

/// Keeps the read model of the orders: no ledger is asked, their versions decide.
async fn read(
    world: &World,
    bus: Arc<dyn Bus>,
    control: &Arc<Control>,
    broken: Option<Break>,
) -> Result<u8, Failure> {
    let model = SqliteReadModel::open(world.reads())?;
    let model: Arc<dyn ReadModel> = match broken {
        Some(Break::Version) => Arc::new(ByArrival::new(model)),
        _ => Arc::new(model),
    };
    let feed = Feed::new(bus, model, FeedSettings::new(Topic::new(ORDERS)?))?;
    let handle = feed.handle();
    listen(control, move || handle.stop())?;
    feed.run().await?;
    Ok(0)
}

fn listen(control: &Arc<Control>, stop: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    control.listen(stop).map_err(|e| Failure::dependency("runtime", format!("no thread to listen: {e}")))
}

fn consumer<L: Ledger>(
    bus: Arc<dyn Bus>,
    ledger: L,
    (scope, topic): (&str, &str),
    window: Option<Arc<dyn Window>>,
) -> Result<Consumer<L>, Failure> {
    let mut builder = Consumer::builder(bus, ledger).scope(scope).topic(topic).with(|settings| {
        settings.lease = LEASE;
        settings.heartbeat = LEASE / 4;
        settings.session_timeout = SESSION;
        settings.concurrency = 16;
        settings.batch_max = 50;
        settings.in_flight_max = 400;
        settings.commit_interval = Duration::from_millis(100);
        // Nothing here fails permanently: on a machine that hangs for seconds it is retried.
        settings.attempts_max = 1000;
        settings.backoff_base = Duration::from_millis(50);
        settings.backoff_max = Duration::from_millis(500);
        settings.drain = Duration::from_secs(3);
    });
    if let Some(window) = window {
        builder = builder.window(window);
    }
    Ok(builder.build()?)
}

/// Charges customers: the charge is a row in the ledger's own database, in the transaction of its
/// claim.
async fn charge<L>(bus: Arc<dyn Bus>, ledger: L, control: Arc<Control>) -> Result<u8, Failure>
where
    L: TransactionalLedger<Transaction = SqliteTransaction>,
{
    let consumer = consumer(bus, ledger, (BILLING, PAYMENTS), None)?;
    let handle = consumer.handle();
    let stopping = handle.clone();
    listen(&control, move || stopping.stop())?;
    let reports = report(Arc::clone(&control), move || handle.progress());
    consumer.transactional(Charge { control }).await?;
    reports.end().await;
    Ok(0)
}

struct Charge {
    control: Arc<Control>,
}

impl TransactionalHandler<SqliteTransaction> for Charge {
    async fn handle(&self, tx: &mut SqliteTransaction, event: &Event) -> Handled {
        let Payload { order, customer, cents } = order_of(event)?;
        tx.prepare_cached("INSERT INTO charges (order_number, customer, cents) VALUES (?1, ?2, ?3)")?
            .execute((order as i64, &customer, cents))?;
        // Killed here, in the middle of the transaction.
        self.control.hold(Step::BeforeEffect, &customer, order);
        Ok(())
    }
}

/// Books parcels with the carrier, under a lease: key and token go with each booking.
async fn ship<L: Ledger>(
    world: &World,
    bus: Arc<dyn Bus>,
    ledger: L,
    control: Arc<Control>,
) -> Result<u8, Failure> {
    let carrier = Carrier::open(&world.carrier()).map_err(|e| {
        Failure::dependency("unavailable", format!("the carrier's file cannot be opened: {e}"))
    })?;
    let window = MemoryWindow::new(WindowSettings::new("demo").ttl(WindowSettings::TTL_MAX), 100_000)?;
    let consumer = consumer(bus, ledger, (SHIPPING, PARCELS), Some(Arc::new(window)))?;
    let handle = consumer.handle();
    let stopping = handle.clone();
    listen(&control, move || stopping.stop())?;
    let reports = report(Arc::clone(&control), move || handle.progress());
    consumer.leased(Ship { control, carrier: Arc::new(carrier), no_paper: world.no_paper() }).await?;
    reports.end().await;
    Ok(0)
}

struct Ship {
    control: Arc<Control>,
    carrier: Arc<Carrier>,
    no_paper: PathBuf,
}

impl LeasedHandler for Ship {
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        if event.id.as_str().starts_with(GIFT) {
            return self.print(event);
        }
        let (order, token) = (order_of(event)?, run.token().0);
        let (control, carrier) = (Arc::clone(&self.control), Arc::clone(&self.carrier));
        // On a thread of its own: losing the lease cancels the handler, but not what is on its way.
        tokio::task::spawn_blocking(move || book(&control, &carrier, &order, token)).await?
    }
}

impl Ship {
    /// Prints a gift card. That fails permanently while the printer has no paper: somebody has to see to it, and
    /// to run the dead letters again.
    fn print(&self, event: &Event) -> Handled {
        let gift = serde_json::from_slice::<Gift>(&event.payload).map_err(Failed::fatal)?.gift;
        if self.no_paper.exists() {
            return Err(Failed::fatal(format!("the label printer has no paper for gift-card-{gift}")));
        }
        Ok(())
    }
}

/// Reads the customer's document, adds the parcel, and writes it back.
fn book(control: &Control, carrier: &Carrier, order: &Payload, token: i64) -> Handled {
    let Payload { order, customer, .. } = order;
    let mut booked = carrier.get(customer)?;
    if booked.contains(order) {
        control.found_in_carrier(); // the run before got this far, and no further
        return Ok(());
    }
    booked.push(*order);
    let held = control.hold(Step::BeforeEffect, customer, *order);
    let put = carrier.put(customer, &booked, token)?;
    let newest = match put {
        Put::Written => None,
        Put::Refused { newest } => Some(newest),
    };
    if held {
        say(&Message::WentOn { token, newest });
    }
    if let Some(newest) = newest {
        return Err(Failed::retryable(format!("the carrier has seen token {newest}; {token} is too old")));
    }
    control.hold(Step::AfterEffect, customer, *order);
    Ok(())
}

/// Reports counts until it is ended, and a last time then.
fn report(control: Arc<Control>, progress: impl Fn() -> Progress + Send + 'static) -> Reports {
    let (end, mut ended) = tokio::sync::watch::channel(false);
    let task = tokio::spawn(async move {
        let mut last = Counts::default();
        let (mut before, mut let_go) = (0u64, 0);
        loop {
            let over = tokio::time::timeout(REPORT, ended.wait_for(|over| *over)).await.is_ok();
            let progress = progress();
            let of = |label: &str| progress.passed.get(label).copied().unwrap_or(0);
            let known = progress.passed.values().sum::<u64>() + progress.in_flight as u64;
            // What is unfinished when a partition moves to another worker is delivered there again.
            let_go += before.saturating_sub(known);
            before = known;
            let counts = Counts {
                delivered: known + let_go,
                window: of("window"),
                ledger: of("duplicate"),
                in_carrier: control.in_carrier.load(Relaxed),
            };
            if counts != last {
                say(&Message::Counts(counts));
                last = counts;
            }
            if over {
                return;
            }
        }
    });
    Reports { end, task }
}

struct Reports {
    end: tokio::sync::watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Reports {
    async fn end(self) {
        self.end.send_replace(true);
        let _ = self.task.await; // the last report is for the view only
    }
}
