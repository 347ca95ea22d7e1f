//! What visitors of the page do to the demo, and the orders that go on arriving for them.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax::Journal as _;
use hapax::journal::RelayStore as _;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::crew::{Crew, PATIENCE};
use super::shop::{Order, Random};
use super::story::Story;
use super::worker::{LEASE, Role};
use super::world::RELAY;
use crate::failure::Failure;
use crate::print::grouped;
use crate::serve::beside::{Asked, Chaos};

/// How long a worker is frozen: its lease, and that of its partitions, run out.
const FROZEN: Duration = Duration::from_secs(2 * LEASE.as_secs());
/// How long the ledger cannot be written to.
const CUT: Duration = Duration::from_secs(5);
/// Orders that arrive at once after the story, and how often.
const ORDERS: u64 = 10;
const EVERY: Duration = Duration::from_millis(500);
/// If so many events have no effect yet, no more orders are taken.
const UNFINISHED_MAX: u64 = 2_000;

/// The visitors of the page.
pub struct Visitors {
    asks: Mutex<mpsc::Receiver<Asked>>,
    random: Mutex<Random>,
    /// True once the demo is to finish.
    finish: watch::Receiver<bool>,
    /// How long orders go on arriving after the story; `None`: until the demo is to finish.
    goes_on: Option<Duration>,
    /// While this file is there, the label printer has no paper.
    no_paper: PathBuf,
}

impl Visitors {
    pub fn new(
        asks: mpsc::Receiver<Asked>,
        random: Random,
        finish: watch::Receiver<bool>,
        goes_on: Option<Duration>,
        no_paper: PathBuf,
    ) -> Self {
        Visitors { asks: Mutex::new(asks), random: Mutex::new(random), finish, goes_on, no_paper }
    }

    fn next(&self) -> Option<Asked> {
        self.asks.lock().unwrap_or_else(PoisonError::into_inner).try_recv().ok()
    }

    fn below(&self, end: usize) -> usize {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).below(end as u64) as usize
    }
}

impl Story {
    /// Does what visitors have asked for. Between two steps of the story, so that nobody is hit whom it needs.
    pub(super) async fn serve_visitors(&self, crew: &mut Crew) -> Result<(), Failure> {
        let Some(visitors) = &self.page else { return Ok(()) };
        while let Some((what, answer)) = visitors.next() {
            let done = self.chaos(visitors, crew, what).await?;
            if let Ok(said) = &done {
                self.shown.tell(format!("page: {said}"));
            }
            let _ = answer.send(done); // the visitor may have gone
        }
        Ok(())
    }

    /// Does one thing. An inner error says why nothing was done.
    async fn chaos(
        &self,
        visitors: &Visitors,
        crew: &mut Crew,
        what: Chaos,
    ) -> Result<Result<String, String>, Failure> {
        Ok(Ok(match what {
            Chaos::Kill => {
                let all = crew.idle(&[Role::Relay, Role::Billing, Role::Shipping, Role::Reading]);
                if all.is_empty() {
                    return Ok(Err("nobody can be killed just now; try again".to_owned()));
                }
                let (victim, role) = all[visitors.below(all.len())];
                crew.kill(victim).await?;
                let next = crew.start(role)?;
                format!("killed worker {victim} ({}, kill -9); worker {next} takes its place", role.name())
            }
            Chaos::Freeze => {
                let awake = crew.idle(&[Role::Shipping]);
                if awake.len() < 2 {
                    return Ok(Err(
                        "a worker is frozen already, and another one must stay awake; try again".to_owned()
                    ));
                }
                let (victim, _) = awake[visitors.below(awake.len())];
                crew.freeze_for(victim, FROZEN).await?;
                self.shown.change(|shown| shown.frozen += 1);
                format!(
                    "froze worker {victim} (shipping) for {} s; its lease has {} s",
                    FROZEN.as_secs(),
                    LEASE.as_secs()
                )
            }
            Chaos::Cut => match crew.cut(CUT).await {
                Ok(()) => {
                    format!("cut off the ledger's database: nobody can write to it for {} s", CUT.as_secs())
                }
                Err(_) => return Ok(Err("it is cut off already; try again".to_owned())),
            },
            Chaos::Storm => {
                let mut random = Random(visitors.below(usize::MAX) as u64);
                let count = self.recent.storm(&*self.bus, &mut random, &self.shown).await?;
                if count == 0 {
                    return Ok(Err("nothing has been published yet; try again".to_owned()));
                }
                format!("delivered {} copies of recent events, in any order", grouped(count as u64))
            }
        }))
    }

    /// With a page, orders go on arriving after the story, until its time is over or the demo is to finish. Ends
    /// when all of them are finished.
    pub(super) async fn go_on(
        &mut self,
        crew: &mut Crew,
        tasks: &mut JoinSet<hapax::Result<()>>,
        sent: &mut Vec<Order>,
    ) -> Result<(), Failure> {
        let Some(visitors) = &self.page else { return Ok(()) };
        let (finish, end) = (visitors.finish.clone(), visitors.goes_on.map(|time| Instant::now() + time));
        std::fs::remove_file(&visitors.no_paper).map_err(|e| {
            Failure::dependency("unavailable", format!("the demo's files cannot be changed: {e}"))
        })?;
        self.shown.tell(
            "the story is over; orders go on arriving, and the label printer has paper: redrive".to_owned(),
        );
        let mut next = Instant::now();
        while !*finish.borrow() && end.is_none_or(|end| Instant::now() < end) {
            let unfinished = self.shown.get(|shown| shown.events.saturating_sub(shown.effects));
            if Instant::now() >= next && unfinished < UNFINISHED_MAX {
                next = Instant::now() + EVERY;
                let first = sent.len() as u64 + 1;
                let orders: Vec<_> =
                    (first..first + ORDERS).map(|n| Order::next(n, &mut self.random)).collect();
                self.shown.change(|shown| shown.events += 2 * ORDERS);
                self.send(tasks, &orders);
                sent.extend(orders);
            }
            self.wait(crew, tasks, Instant::now() + PATIENCE, "for orders").await?;
        }
        self.shown.tell("no more orders: finishing".to_owned());
        let all = 2 * sent.len() as u64;
        let until = Instant::now() + PATIENCE;
        while self.shown.get(|shown| shown.sent < all || shown.changes < all) || !self.is_published().await? {
            self.wait(crew, tasks, until, "for all events to be published").await?;
        }
        self.until_finished(crew, tasks).await?;
        self.until_read(crew, tasks).await
    }

    /// Whether the relay has published the whole journal.
    async fn is_published(&self) -> Result<bool, Failure> {
        let journal = self.records.journal();
        let last = journal.stat().await?.last;
        let relays = journal.relays().await?;
        let relay = relays.into_iter().find(|relay| relay.relay.as_str() == RELAY);
        Ok(relay.and_then(|relay| relay.checkpoint).map(|checkpoint| checkpoint.position) == last)
    }
}
