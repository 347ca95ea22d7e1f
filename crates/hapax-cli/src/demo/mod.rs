//! `hapax demo`: orders arrive with retries, duplicates and in any order, workers are killed and
//! frozen, and every effect happens once.
//!
//! ```text
//! clients ─▶ journal ─▶ relay ─▶ bus ─┬▶ billing:  charge, a row in the ledger's database (transactional)
//!  (retry)              (killed)  ▲   ├▶ shipping: parcel, a document of the carrier      (leased)
//!                            copies,  │            both: processes of this binary (killed, frozen)
//!                            shuffled └▶ reading:  each order as a row of a read model     (by version)
//! ```
//!
//! The charge commits with its claim: exactly once. The parcel is booked at least once, and takes
//! effect once because the carrier dedups on the key and refuses older tokens. Every order is a record
//! too, which is changed once. All changes are published again, the old ones after the new ones, and the
//! read model has each order once, as it is now. `story` is what happens, `crew` the processes, `worker`
//! what they run, `witness` who counts the effects and the rows.

mod broken;
mod by_arrival;
mod carrier;
mod chaos;
mod control;
mod crew;
mod page;
mod shop;
mod story;
mod view;
mod witness;
mod worker;
mod world;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax::backend::sqlite::SqliteLedger;
use hapax::bus::Bus;
use hapax::ledger::Settings;
use serde_json::json;
use tokio::sync::{mpsc, watch};

pub use self::worker::{WorkerArgs, run as run_worker};

use self::broken::Break;
use self::chaos::Visitors;
use self::crew::Crew;
use self::shop::{Order, Random, Recent};
use self::story::Story;
use self::view::{Shared, Shown, Shows, View};
use self::witness::{Findings, Witness};
use self::world::World;
use crate::cli::{Global, between};
use crate::failure::{BROKEN_PROMISE, Failure};
use crate::print::{self, grouped};
use crate::signal::Gate;

/// Watch orders take effect once, through retries, duplicates, kill -9 and a frozen worker
///
/// A shop takes 5,000 orders. Each order makes two events: charge the customer, and book a parcel
/// with a carrier. Clients send orders again, the network delivers events twice and in another
/// order, workers are killed in the middle of their work, and one is frozen until its lease is over
/// and then woken up. Each order is a record that is changed once, and a read model follows; all changes
/// are published again, the old ones after the new ones. At the end a witness, which does not trust the
/// ledger, counts the charges, the parcels and the rows of the read model. It needs no server, takes less
/// than a minute and leaves nothing behind.
///
/// Exit code 0: every order was charged once and shipped once, and is one row as it is now. 1: something
/// was lost, doubled or outdated.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax demo
  hapax demo --seed 7 --json        the same orders every time; one line of JSON at the end
  hapax demo --break claim          without the ledger's claims: customers are charged twice
  hapax demo --break token          without tokens: a worker that wakes up late erases a parcel
  hapax demo --break version        without versions: the read model shows orders as they were
  hapax demo --data shop            keep the files, and say how to look into them
  hapax demo --page                 watch it in a browser, and break things yourself; Ctrl-C finishes")]
pub struct DemoArgs {
    /// Repeat a run: the same orders, retries and copies. Chosen at random if not given
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How many events, two for each order
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = between::<u64>(200, 200_000))]
    events: u64,
    /// Break one of the checks, and see the witness notice. Exits with code 1
    #[arg(long = "break", value_enum, value_name = "CHECK")]
    broken: Option<Break>,
    /// Serve the operator's page of this demo, with buttons that kill, freeze and cut off; orders keep arriving until Ctrl-C
    #[arg(long)]
    page: bool,
    /// With --page: how long orders keep arriving after the story
    #[arg(long = "for", value_name = "TIME", requires = "page", value_parser = crate::cli::duration)]
    goes_on: Option<Duration>,
    /// With --page: the port on this machine; 0 picks a free one
    #[arg(long, value_name = "PORT", requires = "page", default_value_t = 0)]
    port: u16,
    /// Keep the files here, in a directory that is empty or does not exist
    #[arg(long, value_name = "DIR")]
    data: Option<String>,
    // All of it is embedded, in one directory.
    #[arg(long, hide = true)]
    ledger: Option<String>,
    #[arg(long, hide = true)]
    journal: Option<String>,
    #[arg(long, hide = true)]
    bus: Option<String>,
}

pub async fn run(global: &Global, args: &DemoArgs, gate: &Gate) -> Result<u8, Failure> {
    for (flag, given) in [("--ledger", &args.ledger), ("--journal", &args.journal), ("--bus", &args.bus)] {
        if given.is_some() {
            return Err(Failure::config(format!(
                "the demo makes its own ledger, journal and bus; leave out {flag} (--data DIR keeps the files)"
            )));
        }
    }
    let mut signals = gate.take_signals();
    let place = Place::make(args.data.as_deref().or(global.data.as_deref()))?;
    let seed = args.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() % 1_000_000);
    let shared = Shared::new(args.events / 2 * 2);
    let mut crew = Crew::new(place.world(), args.broken, shared.clone());
    let (finish, finishing) = watch::channel(false);
    let played = {
        let mut playing =
            std::pin::pin!(play(global, args, seed, place.world(), &mut crew, &shared, finishing));
        loop {
            tokio::select! {
                played = playing.as_mut() => break played.map(Ok),
                Some(signal) = signals.recv() => {
                    // With a page, the first one means: no more orders. The witness still judges.
                    if !args.page || finish.send_replace(true) {
                        break Ok(Err(signal));
                    }
                    shared.tell("finishing; press Ctrl-C again to stop now".to_owned());
                }
            }
        }
    };
    crew.kill_all().await;
    let kept = place.end()?;
    match played? {
        Ok(findings) => {
            shared.get(|shown| tell(global, args, seed, shown, &findings, shared.elapsed().as_secs_f64()))?;
            if let Some(dir) = kept.filter(|_| !global.json) {
                hints(&dir)?;
            }
            let kept_promise = findings.lost == 0 && findings.doubled == 0 && findings.outdated == 0;
            Ok(if kept_promise { 0 } else { BROKEN_PROMISE })
        }
        Err(signal) => Ok(u8::try_from(signal).unwrap_or(BROKEN_PROMISE)),
    }
}

/// Plays the story, and has the witness judge it.
async fn play(
    global: &Global,
    args: &DemoArgs,
    seed: u64,
    world: World,
    crew: &mut Crew,
    shared: &Shared,
    finish: watch::Receiver<bool>,
) -> Result<Findings, Failure> {
    let unread = |e| Failure::dependency("unavailable", format!("the effects cannot be read: {e}"));
    let (records, bus) = world.make().await?;
    let mut random = Random(seed);
    let orders = Order::random(args.events / 2, &mut random);
    let title = format!(
        "hapax demo, seed {seed}: {} orders, each to be charged once and shipped once",
        grouped(orders.len() as u64)
    );
    let (records, bus): (_, Arc<dyn Bus>) = (Arc::new(records), Arc::new(bus));
    let (mut beside, mut visitors) = (None, None);
    if args.page {
        let (asks, asked) = mpsc::channel(16);
        let server = page::start(global, &world, args.port, Arc::clone(&bus), shared.clone(), asks).await?;
        let url = format!("http://{}/", server.address);
        if global.json {
            print::json(&json!({"page": url}))?;
        } else {
            print::line(&format!("The page of this demo: {url} (Ctrl-C finishes the demo)"))?;
        }
        beside = Some(server);
        visitors = Some(Visitors::new(asked, Random(!seed), finish, args.goes_on, world.no_paper()));
        let failed = |e| Failure::dependency("unavailable", format!("the demo's files cannot be made: {e}"));
        std::fs::write(world.no_paper(), "").map_err(failed)?;
        shop::send_gifts(&records).await?;
        shared.change(|shown| shown.gifts = shop::GIFTS);
    }
    let shows = Shows::on_this_terminal(global.json);
    let view = View::start(shows, title, shared.clone(), Witness::new(&world).map_err(unread)?);
    let story = Story {
        records,
        bus,
        ledger: SqliteLedger::open_read_only(world.ledger(), Settings::default())?,
        shown: shared.clone(),
        witness: Witness::new(&world).map_err(unread)?,
        orders,
        random,
        recent: Recent::default(),
        page: visitors,
    };
    let sent = story.play(crew).await;
    view.end().await;
    if let Some(beside) = beside {
        beside.end().await;
    }
    let witness = Witness::new(&world).map_err(unread)?;
    witness.judge(&sent?).map_err(unread)
}

/// Prints the counts and the verdict.
fn tell(
    global: &Global,
    args: &DemoArgs,
    seed: u64,
    shown: &Shown,
    findings: &Findings,
    seconds: f64,
) -> Result<(), Failure> {
    let Findings { effects, lost, doubled, rows, outdated, examples } = findings;
    let (deliveries, duplicates) = (shown.deliveries(), shown.duplicates());
    if global.json {
        return print::json(&json!({
            "events": shown.events, "deliveries": deliveries, "duplicates": duplicates, "kills": shown.kills,
            "effects": effects, "lost": lost, "doubled": doubled, "retries": shown.retried, "fenced": shown.fenced,
            "orders": shown.events / 2, "republished": shown.republished, "rows": rows, "outdated": outdated,
            "broken": args.broken.map(Break::name), "examples": examples, "seed": seed,
            "seconds": (seconds * 10.0).round() / 10.0,
        }));
    }
    for line in shown.counts() {
        print::line(&line)?;
    }
    let n = grouped;
    print::line(&format!(
        "\n{} events, {} deliveries ({} of them duplicates), {} kills:\neffects {}, lost {}, doubled {}.",
        n(shown.events),
        n(deliveries),
        n(duplicates),
        n(shown.kills),
        n(*effects),
        n(*lost),
        n(*doubled)
    ))?;
    print::line(&format!(
        "Read model: {} orders, {} rows, {} missing or outdated; {} changes were published again.",
        n(shown.events / 2),
        n(*rows),
        n(*outdated),
        n(shown.republished)
    ))?;
    print::line(
        "Counted by a witness that has its own list of what was sent and reads the\ncharges, the parcels and the rows themselves; it never asks the ledger.",
    )?;
    for example in examples {
        print::line(&format!("For example: {example}."))?;
    }
    if let Some(what) = args.broken {
        let name = what.name();
        print::line(&format!(
            "This was broken on purpose (--break {name}); without it nothing is lost,\ndoubled or outdated."
        ))?;
    }
    let again = args.broken.map_or(String::new(), |what| format!(" --break {}", what.name()));
    print::line(&format!("{seconds:.1} s. The same orders again: hapax demo --seed {seed}{again}"))
}

/// What to look at in the files.
fn hints(dir: &Path) -> Result<(), Failure> {
    let dir = crate::cli::quoted(&dir.display().to_string());
    print::line(&format!("\nThe files are in {dir}. Look into them:"))?;
    for command in [
        "ledger stat",
        "ledger ls --scope shipping --limit 5",
        "ledger show --scope billing order-1-paid",
        "journal read --limit 5",
        "relay status",
        "query records --module orders --limit 5",
        "doctor --topic parcels --scope shipping",
    ] {
        print::line(&format!("  hapax --data {dir} {command}"))?;
    }
    Ok(())
}

/// Where the files of a demo are: in a directory that is removed at the end, or in one to keep.
enum Place {
    Temporary(tempfile::TempDir),
    Kept(PathBuf),
}

impl Place {
    fn make(data: Option<&str>) -> Result<Self, Failure> {
        let Some(dir) = data.map(PathBuf::from) else {
            let made = tempfile::Builder::new().prefix("hapax-demo-").tempdir();
            return made.map(Place::Temporary).map_err(|e| {
                Failure::dependency(
                    "unavailable",
                    format!("no temporary directory can be made: {e}; give --data DIR"),
                )
            });
        };
        let cannot = |e| Failure::dependency("unavailable", format!("{} cannot be made: {e}", dir.display()));
        crate::open::make_private_directory(&dir).map_err(cannot)?;
        if std::fs::read_dir(&dir).map_err(cannot)?.next().is_some() {
            return Err(Failure::config(format!(
                "{} is not empty; name a directory that is empty or does not exist",
                dir.display()
            )));
        }
        Ok(Place::Kept(dir))
    }

    fn world(&self) -> World {
        match self {
            Place::Temporary(dir) => World::at(dir.path()),
            Place::Kept(dir) => World::at(dir),
        }
    }

    /// Removes the directory, or returns it.
    fn end(self) -> Result<Option<PathBuf>, Failure> {
        match self {
            Place::Kept(dir) => Ok(Some(dir)),
            Place::Temporary(dir) => {
                let path = dir.path().to_owned();
                dir.close().map(|()| None).map_err(|e| {
                    Failure::dependency("unavailable", format!("{} cannot be removed: {e}", path.display()))
                })
            }
        }
    }
}
