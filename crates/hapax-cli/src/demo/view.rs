//! What the demo shows: on a terminal a picture that is drawn again in place, elsewhere a line now
//! and then; at the end the counts.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::control::{Counts, Held};
use super::witness::Witness;
use super::worker::{LEASE, Role};
use crate::print::grouped;

/// How often the picture is drawn.
const DRAWN: Duration = Duration::from_millis(100);
/// How often a line is printed where there is no terminal.
const PRINTED: Duration = Duration::from_secs(3);
/// How many of the last events of the story are in the picture.
const NEWS: usize = 2;
/// How many lines the picture has.
const LINES: usize = 3 + 18 + NEWS;
/// How wide the bar is.
const BAR: u64 = 34;

/// The counts of the demo.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    pub events: u64,
    /// Gift cards, which are not orders.
    pub gifts: u64,
    /// Events that are in the journal.
    pub sent: u64,
    /// Events that clients sent again.
    pub retried: u64,
    /// Events that the relay published again.
    pub relayed_again: u64,
    /// Copies that the network delivered.
    pub copied: u64,
    /// Whether all events are on the bus, and all copies.
    pub all_published: bool,
    /// The last report of each worker.
    pub workers: BTreeMap<u32, Counts>,
    pub kills: u64,
    pub frozen: u64,
    /// Orders that a worker had begun when it was killed or frozen, and that have no effect yet.
    pub begun: Vec<(Role, Held)>,
    /// Such charges, and such parcels, that another worker has made since.
    pub charged_after: u64,
    pub booked_after: u64,
    /// Late writes that the carrier refused.
    pub fenced: u64,
    pub effects: u64,
    /// Changes of orders that were written.
    pub changes: u64,
    /// Changes that were published again.
    pub republished: u64,
    /// Changes that the read model has read, with repeats.
    pub changes_read: u64,
    /// What happened, and when.
    pub news: Vec<(Duration, String)>,
}

/// The counts that all parts of the demo share.
#[derive(Debug, Clone)]
pub struct Shared {
    shown: Arc<Mutex<Shown>>,
    began: Instant,
}

impl Shared {
    pub fn new(events: u64) -> Self {
        Shared { shown: Arc::new(Mutex::new(Shown { events, ..Shown::default() })), began: Instant::now() }
    }

    pub fn change(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn get<T>(&self, get: impl FnOnce(&Shown) -> T) -> T {
        get(&self.shown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds to what happened.
    pub fn tell(&self, news: String) {
        let now = self.elapsed();
        self.change(|shown| shown.news.push((now, news)));
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

impl Shown {
    fn sum(&self, of: impl Fn(&Counts) -> u64) -> u64 {
        self.workers.values().map(of).sum()
    }

    pub fn deliveries(&self) -> u64 {
        self.sum(|counts| counts.delivered)
    }

    /// Deliveries of events that had been delivered before.
    pub fn duplicates(&self) -> u64 {
        self.deliveries().saturating_sub(self.events + self.gifts)
    }

    pub fn window(&self) -> u64 {
        self.sum(|counts| counts.window)
    }

    pub fn ledger(&self) -> u64 {
        self.sum(|counts| counts.ledger)
    }

    fn in_carrier(&self) -> u64 {
        self.sum(|counts| counts.in_carrier)
    }

    /// Deliveries that a worker neither finished nor skipped, because it died or froze, or was
    /// relieved of them.
    pub fn cut_short(&self) -> u64 {
        self.duplicates().saturating_sub(self.window() + self.ledger())
    }

    /// Changes that the read model had read before.
    fn changes_caught(&self) -> u64 {
        self.changes_read.saturating_sub(self.changes)
    }

    /// What went wrong, and what caught it.
    pub fn counts(&self) -> Vec<String> {
        let row = |count: u64, text: &str| format!("  {:>7}  {text}", grouped(count));
        let lease =
            format!("lease    of a dead or frozen worker ran out ({} s): another took over", LEASE.as_secs());
        let rows = [
            "What went wrong".to_owned(),
            row(self.retried, "events sent again by clients that saw no answer"),
            row(self.copied, "events delivered once more by the network, in another order"),
            row(self.relayed_again, "events published once more by a relay that took over"),
            row(self.republished, "changes of orders published again, old ones after new ones"),
            row(self.kills, "processes killed (kill -9) in the middle of their work"),
            row(self.frozen, "process frozen for longer than its lease, then woken up"),
            String::new(),
            "What caught it".to_owned(),
            row(self.retried, "journal  has that id already: stored once"),
            row(self.window(), "window   this worker did it a moment ago: skipped"),
            row(self.ledger(), "ledger   some worker did it before: skipped"),
            row(self.changes_caught(), "version  the read model has this one or a newer one: unchanged"),
            row(self.cut_short(), "bus      not finished by a dead or frozen worker: delivered again"),
            row(self.charged_after, "database charge cut off by a kill before COMMIT: rolled back, redone"),
            row(self.booked_after, &lease),
            row(self.in_carrier(), "carrier  booked by a worker killed before it could say so: found"),
            row(self.fenced, "token    of a worker that woke up too late to write: refused"),
        ];
        rows.into()
    }

    fn bar(&self) -> String {
        let done = (self.effects * BAR / self.events.max(1)).min(BAR) as usize;
        let bar = format!("{}{}", "#".repeat(done), ".".repeat(BAR as usize - done));
        format!("[{bar}] {} of {} effects", grouped(self.effects), grouped(self.events))
    }

    fn picture(&self, title: &str, elapsed: Duration) -> Vec<String> {
        let time = |time: Duration| format!("{:>5.1} s", time.as_secs_f64());
        let mut lines = vec![title.to_owned(), format!("{} {}", self.bar(), time(elapsed))];
        lines.extend(self.counts());
        lines.push(String::new());
        let news = self.news.iter().rev().take(NEWS).rev();
        lines.extend(news.map(|(at, news)| format!("{}  {news}", time(*at))));
        lines.resize(LINES, String::new());
        lines
    }
}

/// Counts the effects, and those that another worker had begun.
fn look(shared: &Shared, witness: &Witness) -> rusqlite::Result<()> {
    let (effects, changes_read) = (witness.count()?, witness.changes_read()?);
    shared.change(|shown| (shown.effects, shown.changes_read) = (effects, changes_read));
    for (role, held) in shared.get(|shown| shown.begun.clone()) {
        let made = match role {
            Role::Shipping => witness.is_booked(&held.customer, held.order)?,
            _ => witness.is_charged(held.order)?,
        };
        if made {
            shared.change(|shown| {
                shown.begun.retain(|begun| *begun != (role, held.clone()));
                shown.charged_after += u64::from(role == Role::Billing);
                shown.booked_after += u64::from(role == Role::Shipping);
            });
        }
    }
    Ok(())
}

/// Draws until it is ended.
pub struct View {
    over: tokio::sync::watch::Sender<bool>,
    drawing: JoinHandle<()>,
}

/// How the demo is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shows {
    Picture,
    Lines,
    Nothing,
}

impl Shows {
    /// On a terminal that has room for it, a picture.
    pub fn on_this_terminal(json: bool) -> Self {
        let err = std::io::stderr();
        match terminal_size::terminal_size_of(&err) {
            _ if json => Shows::Nothing,
            Some((width, height)) if err.is_terminal() && width.0 >= 80 && usize::from(height.0) > LINES => {
                Shows::Picture
            }
            _ => Shows::Lines,
        }
    }
}

impl View {
    /// Counts effects and shows everything, all the time.
    pub fn start(shows: Shows, title: String, shared: Shared, witness: Witness) -> Self {
        let (over, mut ended) = tokio::sync::watch::channel(false);
        let drawing = tokio::spawn(async move {
            let mut state = Drawing { drawn: 0, news_printed: 0, printed: Instant::now() };
            if shows == Shows::Lines {
                eprintln!("{title}");
            }
            loop {
                let over = tokio::time::timeout(DRAWN, ended.wait_for(|over| *over)).await.is_ok();
                let _ = look(&shared, &witness); // a busy file is read next time
                match shows {
                    Shows::Picture => state.draw(&shared, &title, over),
                    Shows::Lines => state.print(&shared, over),
                    Shows::Nothing => {}
                }
                if over {
                    return;
                }
            }
        });
        View { over, drawing }
    }

    pub async fn end(self) {
        self.over.send_replace(true);
        let _ = self.drawing.await; // it shows, and decides nothing
    }
}

struct Drawing {
    /// How many lines of the last picture are on the screen.
    drawn: usize,
    /// How much of the news was printed.
    news_printed: usize,
    printed: Instant,
}

impl Drawing {
    /// Draws over the last picture, or removes it.
    fn draw(&mut self, shared: &Shared, title: &str, remove: bool) {
        let lines = shared.get(|shown| shown.picture(title, shared.elapsed()));
        let mut out = String::new();
        if self.drawn > 0 {
            out = format!("\x1b[{}A\r\x1b[J", self.drawn);
        }
        self.drawn = 0;
        if !remove {
            for line in &lines {
                out.extend(line.chars().take(79));
                out.push('\n');
            }
            self.drawn = lines.len();
        }
        let mut err = std::io::stderr().lock();
        let _ = err.write_all(out.as_bytes()).and_then(|()| err.flush()); // it only shows
    }

    fn print(&mut self, shared: &Shared, over: bool) {
        let (news, progress) = shared.get(|shown| {
            let progress = format!(
                "{} of {} effects, {} duplicates caught, {} killed",
                grouped(shown.effects),
                grouped(shown.events),
                grouped(shown.retried + shown.window() + shown.ledger()),
                shown.kills
            );
            (shown.news[self.news_printed..].to_vec(), progress)
        });
        self.news_printed += news.len();
        for (at, news) in news {
            eprintln!("{:>5.1} s  {news}", at.as_secs_f64());
        }
        if over || self.printed.elapsed() >= PRINTED {
            self.printed = Instant::now();
            eprintln!("{:>5.1} s  {progress}", shared.elapsed().as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_fits_a_small_terminal() {
        let worker = Counts { delivered: 1_000_000, window: 100_000, ledger: 100_000, in_carrier: 100_000 };
        let many = 200_000;
        let shown = Shown {
            events: many,
            sent: many,
            retried: many,
            relayed_again: many,
            copied: many,
            workers: [(1, worker)].into(),
            effects: many,
            booked_after: many,
            charged_after: many,
            republished: many,
            changes_read: 2 * many,
            ..Shown::default()
        };
        let lines = shown.picture("title", Duration::from_secs(59));
        assert_eq!(lines.len(), LINES);
        for line in lines {
            assert!(line.chars().count() < 80, "{line}");
        }
    }
}
