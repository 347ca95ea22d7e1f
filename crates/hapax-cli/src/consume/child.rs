//! One child process: starts it, exchanges lines with it, watches it, and restarts it when it ends.

use std::collections::{HashMap, VecDeque};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hapax::consumer::{Failed, Handled};
use hapax::ledger::Identity;
use hapax::sink::protocol::{self, Line, Reply};
use hapax::words::span;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::exec::{CancelledRequest, ChildSlot, Common, Order, Request};

/// How long a child may run on after its input has ended; then it is killed.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// How long to keep reading the output of a child that has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// The pause before a child is restarted; it doubles.
const PAUSE_BASE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The command does not work if this many children in a row end without a reply and there never was
/// one. This is more than the usual number of attempts, so that an event that kills its handler is
/// dead before.
const MUTE_ENDS_MAX: u32 = 10;
/// A longer line is not a reply.
const LINE_BYTES_MAX: usize = 1024 * 1024;

type Orders = mpsc::UnboundedReceiver<Order>;

/// Ends the command if its supervisor panics: otherwise its place would stay taken, and requests
/// would wait for a child that nobody restarts.
struct OnPanic<'a>(&'a Common);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up("the supervisor of a handler panicked; this is a bug in hapax".to_owned());
        }
    }
}

/// Keeps one child running until its orders end.
pub(super) async fn supervise(
    command: String,
    mut orders: Orders,
    slot: Weak<ChildSlot>,
    common: Arc<Common>,
) {
    let _on_panic = OnPanic(&common);
    let mut waiting = VecDeque::new();
    let mut pause = PAUSE_BASE;
    let mut mute_ends = Some(0); // `None` after the first reply
    loop {
        let mut run = match ChildRun::start(&command, &slot, &common) {
            Ok(run) => run,
            Err(error) => return common.give_up(format!("--exec {command:?} cannot be started: {error}")),
        };
        for request in waiting.drain(..) {
            run.take(Order::Run(request));
        }
        let Some(status) = run.serve(&mut orders).await else { return };
        if run.replied {
            pause = PAUSE_BASE;
            common.replied.store(true, Ordering::Relaxed);
        }
        if common.replied.load(Ordering::Relaxed) {
            mute_ends = None;
        }
        mute_ends = mute_ends.map(|ends| ends + 1);
        let how = described(status);
        if let Some(ends) = mute_ends
            && is_unfit(status, ends, run.given)
        {
            let times = if ends == 1 { "at its start".to_owned() } else { format!("{ends} times") };
            return common
                .give_up(format!("--exec {command:?} does not work: it {how} {times} without one reply"));
        }
        drop(run);
        common.restarts.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(target: "hapax", "the handler {how}; it is started again in {}", span(pause));
        if !rest(pause, &mut orders, &mut waiting).await {
            return;
        }
        if let Some(slot) = slot.upgrade() {
            slot.takes(1);
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether not to restart a command that has never replied.
fn is_unfit(status: Option<ExitStatus>, ends: u32, given: bool) -> bool {
    // The shell's exit codes for "cannot be run" and "not found".
    let unknown = matches!(status.and_then(|status| status.code()), Some(126 | 127));
    unknown || (ends == 1 && !given) || ends >= MUTE_ENDS_MAX
}

/// Waits before the next start. Leased requests that arrive meanwhile fail uncounted and are
/// retried, because waiting would use up their time. At-most-once requests cannot be retried, so
/// they wait. Returns false if the orders have ended.
async fn rest(pause: Duration, orders: &mut Orders, waiting: &mut VecDeque<Request>) -> bool {
    let until = Instant::now() + pause;
    loop {
        tokio::select! {
            () = sleep_until(until) => return true,
            order = orders.recv() => match order {
                None => return false,
                Some(Order::Run(request)) if request.leased.is_some() => {
                    let left = until.saturating_duration_since(Instant::now());
                    let again = Failed::uncounted("the handler is being started again", left);
                    let _ = request.reply.send(Err(again)); // the caller may have stopped waiting
                }
                Some(Order::Run(request)) => waiting.push_back(request),
                Some(Order::Cancel(id, token, _)) => waiting.retain(|r| r.id != id || r.token != token),
            },
        }
    }
}

fn described(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "was killed".to_owned(), |status| format!("ended with {status}"))
}

/// When an event is tried again whose id another tenant's event has that runs now.
const SAME_ID_PAUSE: Duration = Duration::from_millis(100);

/// A caller that waits for a reply, and the identity it has leased.
struct Waits {
    reply: oneshot::Sender<Handled>,
    leased: Option<Identity>,
}

/// One run of the command.
struct ChildRun {
    child: Child,
    group: u32,
    write: Option<mpsc::UnboundedSender<String>>,
    lines: mpsc::Receiver<Option<Vec<u8>>>,
    in_flight: HashMap<(String, i64), Waits>,
    /// Cancelled, without a reaction from the child yet; each with its deadline.
    cancelled: HashMap<(String, i64), (Instant, CancelledRequest)>,
    given: bool,
    replied: bool,
    slot: Weak<ChildSlot>,
    common: Arc<Common>,
}

impl ChildRun {
    fn start(command: &str, slot: &Weak<ChildSlot>, common: &Arc<Common>) -> std::io::Result<Self> {
        let mut shell = shell(command);
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        let mut child = shell.spawn()?;
        let gone = || std::io::Error::other("it ended at once");
        let group = child.id().ok_or_else(gone)?;
        let (input, output) = (child.stdin.take().ok_or_else(gone)?, child.stdout.take().ok_or_else(gone)?);
        let (write, to_write) = mpsc::unbounded_channel();
        let (read, lines) = mpsc::channel(64);
        tokio::spawn(write_lines(input, to_write));
        tokio::spawn(read_lines(output, read));
        common.began(group);
        Ok(ChildRun {
            child,
            group,
            write: Some(write),
            lines,
            in_flight: HashMap::new(),
            cancelled: HashMap::new(),
            given: false,
            replied: false,
            slot: Weak::clone(slot),
            common: Arc::clone(common),
        })
    }

    /// Exchanges lines with the child until it ends (returns how; none if it was killed), or until
    /// the orders end (returns none).
    async fn serve(&mut self, orders: &mut Orders) -> Option<Option<ExitStatus>> {
        let mut status = None;
        let mut last_words: Option<Instant> = None;
        loop {
            let patience = self.cancelled.values().map(|(until, _)| *until).chain(last_words).min();
            tokio::select! {
                order = orders.recv(), if last_words.is_none() => {
                    let Some(order) = order else {
                        self.close().await;
                        return None;
                    };
                    self.take(order);
                }
                line = self.lines.recv() => match line {
                    Some(line) => self.answer(line),
                    None => break,
                },
                ended = self.child.wait(), if last_words.is_none() => {
                    self.takes(0);
                    status = ended.ok();
                    last_words = Some(Instant::now() + LAST_WORDS);
                }
                () = sleep_until(patience.unwrap_or_else(Instant::now)), if patience.is_some() => {
                    if last_words.is_none() {
                        let grace = span(self.common.cancel_grace);
                        eprintln!("hapax: the handler did not react to a cancel within {grace}; it is killed");
                    }
                    break;
                }
            }
        }
        self.takes(0);
        // Kill everything that it started as well.
        kill_group(self.group);
        if status.is_none() {
            let waited = timeout(CLOSE_GRACE, self.child.wait()).await;
            status = waited.ok().and_then(std::io::Result::ok);
        }
        let how = described(status);
        self.settle_death(&how);
        Some(status)
    }

    /// A request that was in flight alone is charged with the death of the child. Of several, any
    /// may be to blame, so none is charged.
    fn settle_death(&mut self, how: &str) {
        let in_hand = self.in_flight.len() + self.cancelled.len();
        for (_, Waits { reply, leased }) in self.in_flight.drain() {
            let failed = if in_hand == 1 || leased.is_none() {
                Failed::retryable(format!("the handler {how} before it answered"))
            } else {
                let reason =
                    format!("the handler {how} with {in_hand} events in hand; this one is run again alone");
                Failed::uncounted(reason, Duration::ZERO)
            };
            if let Some(leased) = leased {
                self.common.suspect(leased);
            }
            let _ = reply.send(Err(failed)); // the caller may have stopped waiting
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Run(request) => {
                self.given = true;
                let key = (request.id, request.token);
                // Claims of one batch share their token, so events of two tenants with one id look alike in a
                // reply. They are run one after the other.
                if self.in_flight.contains_key(&key) || self.cancelled.contains_key(&key) {
                    let again = Failed::uncounted("another tenant's event of this id runs", SAME_ID_PAUSE);
                    let _ = request.reply.send(Err(again)); // the caller may have stopped waiting
                    return;
                }
                let waits = Waits { reply: request.reply, leased: request.leased };
                self.in_flight.insert(key, waits);
                self.write(request.line);
            }
            Order::Cancel(id, token, cancelled) => {
                let line = protocol::cancel(&id, token);
                let key = (id, token);
                if self.in_flight.remove(&key).is_some() {
                    self.cancelled.insert(key, (Instant::now() + self.common.cancel_grace, cancelled));
                    self.report_health();
                    self.write(format!("{line}\n"));
                }
            }
        }
    }

    fn write(&self, line: String) {
        // A child that no longer reads is about to end; `live` notices that.
        let _ = self.write.as_ref().map(|write| write.send(line));
    }

    fn answer(&mut self, line: Option<Vec<u8>>) {
        let Some(line) = line else {
            return self.common.ignore(&format!("it has more than {LINE_BYTES_MAX} bytes"));
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        match Line::parse(&line) {
            Ok(Line::Reply(reply)) => self.reply(reply),
            Ok(Line::Concurrency(at_once)) => self.takes(at_once),
            Ok(_) => {}
            Err(reason) => self.common.ignore(&reason),
        }
    }

    fn reply(&mut self, reply: Reply) {
        let key = (reply.id, reply.token);
        if let Some(waits) = self.in_flight.remove(&key) {
            self.replied = true;
            if let Some(leased) = &waits.leased {
                self.common.clear_suspect(leased);
            }
            let _ = waits.reply.send(reply.handled); // the caller may have stopped waiting
        } else if self.cancelled.remove(&key).is_some() {
            self.report_health();
            self.common.ignore(&format!("event {:?} was cancelled before this reply", key.0));
        } else {
            self.common.ignore(&format!("nothing waits for event {:?} with token {}", key.0, key.1));
        }
    }

    /// Sets how many requests it takes at once.
    fn takes(&self, at_once: usize) {
        if let Some(slot) = self.slot.upgrade() {
            slot.takes(if slot.is_shared() { at_once } else { at_once.min(1) });
        }
    }

    fn report_health(&self) {
        if let Some(slot) = self.slot.upgrade() {
            slot.unwell.store(!self.cancelled.is_empty(), Ordering::Relaxed);
        }
    }

    /// Closes its input, gives it time to end, and then kills it.
    async fn close(&mut self) {
        self.write = None;
        let _ = timeout(CLOSE_GRACE, self.child.wait()).await;
        kill_group(self.group);
        let _ = timeout(CLOSE_GRACE, self.child.wait()).await;
    }
}

impl Drop for ChildRun {
    fn drop(&mut self) {
        self.cancelled.clear();
        self.report_health();
        self.common.ended(self.group);
    }
}

#[cfg(unix)]
fn shell(command: &str) -> Command {
    let mut shell = Command::new("/bin/sh");
    // A separate process group, so that it can be killed with everything it started, and Ctrl-C in
    // a terminal reaches only us.
    shell.arg("-c").arg(command).process_group(0);
    shell
}

#[cfg(not(unix))]
fn shell(command: &str) -> Command {
    let mut shell = Command::new("cmd");
    shell.arg("/C").arg(command);
    shell
}

#[cfg(unix)]
pub(super) fn kill_group(group: u32) {
    use rustix::process::{Pid, Signal, kill_process_group};
    if let Some(group) = i32::try_from(group).ok().and_then(Pid::from_raw) {
        // The group may be gone already.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(not(unix))]
pub(super) fn kill_group(_group: u32) {
    // Dropping a child kills it.
}

async fn write_lines(mut input: ChildStdin, mut lines: mpsc::UnboundedReceiver<String>) {
    while let Some(line) = lines.recv().await {
        if input.write_all(line.as_bytes()).await.is_err() {
            return; // the child is about to end, which is noticed elsewhere
        }
    }
}

/// Sends whole lines; `None` for a line that is too long.
async fn read_lines(output: ChildStdout, lines: mpsc::Sender<Option<Vec<u8>>>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let Ok(chunk) = output.fill_buf().await else { return };
        if chunk.is_empty() {
            return; // ignore an unterminated line
        }
        let end = memchr::memchr(b'\n', chunk);
        let taken = end.map_or(chunk.len(), |end| end + 1);
        too_long |= line.len() + taken > LINE_BYTES_MAX;
        if !too_long {
            line.extend_from_slice(&chunk[..taken]);
        }
        output.consume(taken);
        if end.is_some() {
            let whole = std::mem::take(&mut line);
            let whole = if std::mem::take(&mut too_long) { None } else { Some(whole) };
            if lines.send(whole).await.is_err() {
                return;
            }
        }
    }
}
