//! The worker processes: started, instructed, killed and frozen.

use std::collections::{BTreeMap, VecDeque};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::broken::Break;
use super::control::{Held, Instruction, Message, Step};
use super::view::Shared;
use super::worker::Role;
use super::world::World;
use crate::failure::Failure;

/// How long anything that the demo waits for may take. Only a machine that hangs needs that long.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait for other writers before they can be kept out.
const CUT_WAITS: Duration = Duration::from_secs(10);
/// How long workers may take to end on request.
const END: Duration = Duration::from_secs(15);

struct Member {
    role: Role,
    child: Child,
    pid: Pid,
    stdin: Option<ChildStdin>,
    /// What a timer that wakes it must know.
    condition: Arc<Mutex<Condition>>,
}

/// How a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Condition {
    Awake,
    Frozen,
    /// Its id may be another's by now.
    Gone,
}

impl Member {
    fn is(&self) -> Condition {
        *self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn becomes(&self, condition: Condition) {
        *self.condition.lock().unwrap_or_else(PoisonError::into_inner) = condition;
    }
}

/// A worker's message; `None` when its output has ended.
type WorkerMessage = (u32, Option<Message>);

pub struct Crew {
    world: World,
    broken: Option<Break>,
    shown: Shared,
    members: BTreeMap<u32, Member>,
    last: u32,
    tell: mpsc::UnboundedSender<WorkerMessage>,
    messages: mpsc::UnboundedReceiver<WorkerMessage>,
    /// Who holds an event by now, in the order in which they said so.
    holders: VecDeque<(u32, Held)>,
    /// Whom the story needs: nobody else may touch this one.
    pub spared: Option<u32>,
}

fn failed(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::dependency("unavailable", format!("{what}: {error}"))
}

impl Crew {
    pub fn new(world: World, broken: Option<Break>, shown: Shared) -> Self {
        let (tell, messages) = mpsc::unbounded_channel();
        Crew {
            world,
            broken,
            shown,
            members: BTreeMap::new(),
            last: 0,
            tell,
            messages,
            holders: VecDeque::new(),
            spared: None,
        }
    }

    /// Starts a process of this binary.
    pub fn start(&mut self, role: Role) -> Result<u32, Failure> {
        let cannot = |e| failed("a worker cannot be started", e);
        let program = std::env::current_exe().map_err(cannot)?;
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(self.world.log()).map_err(cannot)?;
        let mut command = Command::new(program);
        command.args(["demo-worker", role.name(), "--dir"]).arg(self.world.dir());
        if let Some(what) = self.broken {
            command.args(["--break", what.name()]);
        }
        // In a process group of its own: Ctrl-C is the demo's to handle.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().map_err(cannot)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let (Some(pid), Some(out)) = (pid, child.stdout.take()) else {
            return Err(failed("a worker cannot be started", "it has no id"));
        };
        self.last += 1;
        let number = self.last;
        let (tell, shown) = (self.tell.clone(), self.shown.clone());
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                match serde_json::from_str(&line) {
                    Ok(Message::Counts(counts)) => shown.change(|shown| {
                        shown.workers.insert(number, counts);
                    }),
                    Ok(said) => drop(tell.send((number, Some(said)))),
                    Err(_) => {}
                }
            }
            let _ = tell.send((number, None)); // nobody may be left to listen
        });
        let stdin = child.stdin.take();
        let condition = Arc::new(Mutex::new(Condition::Awake));
        self.members.insert(number, Member { role, child, pid, stdin, condition });
        Ok(number)
    }

    async fn tell(&mut self, number: u32, instruction: Instruction) -> Result<(), Failure> {
        let line = serde_json::to_string(&instruction).map_err(|e| failed("cannot instruct a worker", e))?;
        let stdin = self.members.get_mut(&number).and_then(|member| member.stdin.as_mut());
        if let Some(stdin) = stdin {
            let written = stdin.write_all(format!("{line}\n").as_bytes()).await;
            written.map_err(|e| self.ended(number, &e.to_string()))?;
        }
        Ok(())
    }

    fn of(&self, role: Role) -> Vec<u32> {
        self.members.iter().filter(|(_, member)| member.role == role).map(|(number, _)| *number).collect()
    }

    /// The next thing that a worker says.
    async fn next_message(&mut self, until: Instant, what: &str) -> Result<(u32, Message), Failure> {
        loop {
            match timeout_at(until, self.messages.recv()).await {
                Ok(Some((number, Some(said)))) => return Ok((number, said)),
                Ok(Some((number, None))) if self.members.contains_key(&number) => {
                    return Err(self.ended(number, "it ended by itself"));
                }
                Ok(Some(_)) => {} // one that was killed
                Ok(None) | Err(_) => return Err(stuck(what)),
            }
        }
    }

    /// A worker ended that should not have.
    fn ended(&self, number: u32, reason: &str) -> Failure {
        let log = std::fs::read_to_string(self.world.log()).unwrap_or_default();
        let last = log.lines().last().unwrap_or("it logged nothing");
        failed(&format!("worker {number} is gone ({reason})"), last)
    }

    /// Fails if a worker has ended that should not have.
    pub fn check(&mut self) -> Result<(), Failure> {
        let numbers: Vec<_> = self.members.keys().copied().collect();
        for number in numbers {
            let ended =
                self.members.get_mut(&number).and_then(|member| member.child.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(self.ended(number, &status.to_string()));
            }
        }
        Ok(())
    }

    /// Asks all workers of a role to hold their next event at a step, and waits until they will.
    pub async fn will_hold(&mut self, role: Role, step: Step) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        let mut asked = self.of(role);
        for number in asked.clone() {
            self.tell(number, Instruction::Hold(step)).await?;
        }
        self.holders.clear();
        while !asked.is_empty() {
            match self.next_message(until, "for a worker to listen").await? {
                (number, Message::WillHold) => asked.retain(|other| *other != number),
                // One that has not answered yet speaks of an earlier event, and was asked to go on.
                (number, Message::Holding(held)) if !asked.contains(&number) => {
                    self.holders.push_back((number, held));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until one of them holds an event; the others hold nothing.
    pub async fn held(&mut self, role: Role) -> Result<(u32, Held), Failure> {
        let until = Instant::now() + PATIENCE;
        let (holder, held) = loop {
            if let Some(first) = self.holders.pop_front() {
                break first;
            }
            if let (number, Message::Holding(held)) =
                self.next_message(until, "for a worker to begin an order").await?
            {
                break (number, held);
            }
        };
        for number in self.of(role).into_iter().filter(|number| *number != holder) {
            self.tell(number, Instruction::HoldNothing).await?;
            self.tell(number, Instruction::GoOn).await?; // it may hold one already
        }
        Ok((holder, held))
    }

    /// Kills a worker, as `kill -9` does.
    pub async fn kill(&mut self, number: u32) -> Result<Option<Role>, Failure> {
        let Some(mut member) = self.members.remove(&number) else { return Ok(None) };
        member.becomes(Condition::Gone);
        member.child.kill().await.map_err(|e| failed("a worker cannot be killed", e))?;
        self.shown.change(|shown| shown.kills += 1);
        Ok(Some(member.role))
    }

    /// Kills the relay, as `kill -9` does.
    pub async fn kill_relay(&mut self) -> Result<(), Failure> {
        for number in self.of(Role::Relay) {
            self.kill(number).await?;
        }
        Ok(())
    }

    /// Freezes a worker. A process that is frozen in the middle of a write to an SQLite file would
    /// lock that file for everybody, so the demo writes to all of them meanwhile.
    pub async fn freeze(&mut self, number: u32) -> Result<(), Failure> {
        let Some(member) = self.members.get(&number) else { return Ok(()) };
        let pid = member.pid;
        let files = [self.world.ledger(), self.world.bus(), self.world.carrier()];
        let frozen = tokio::task::spawn_blocking(move || {
            let mut writing = Vec::new();
            for file in files {
                let conn = rusqlite::Connection::open(file).map_err(std::io::Error::other)?;
                let begin = conn.busy_timeout(PATIENCE).and_then(|()| conn.execute_batch("BEGIN IMMEDIATE"));
                begin.map_err(std::io::Error::other)?;
                writing.push(conn); // closing it ends the transaction
            }
            kill_process(pid, Signal::STOP)?;
            // Until it is stopped. It is not reaped here.
            waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT)?;
            std::io::Result::Ok(())
        });
        frozen
            .await
            .unwrap_or_else(|e| Err(std::io::Error::other(e)))
            .map_err(|e| failed("a worker cannot be frozen", e))
    }

    /// Those of some roles that are awake, and that the story does not need.
    pub fn idle(&self, roles: &[Role]) -> Vec<(u32, Role)> {
        let free = |number: &u32, member: &Member| {
            roles.contains(&member.role) && member.is() == Condition::Awake && self.spared != Some(*number)
        };
        let members = self.members.iter().filter(|(number, member)| free(number, member));
        members.map(|(number, member)| (*number, member.role)).collect()
    }

    /// Freezes a worker for a while. A timer wakes it, whatever the story does meanwhile.
    pub async fn freeze_for(&mut self, number: u32, time: Duration) -> Result<(), Failure> {
        self.freeze(number).await?;
        let Some(member) = self.members.get(&number) else { return Ok(()) };
        member.becomes(Condition::Frozen);
        let (pid, condition) = (member.pid, Arc::clone(&member.condition));
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            let mut is = condition.lock().unwrap_or_else(PoisonError::into_inner);
            if *is == Condition::Frozen {
                let _ = kill_process(pid, Signal::CONT); // it has not been reaped, so the id is its own
                *is = Condition::Awake;
            }
        });
        Ok(())
    }

    /// Keeps everybody from writing to the ledger for a while. Returns when that has begun.
    pub async fn cut(&self, time: Duration) -> Result<(), Failure> {
        let file = self.world.ledger();
        let (begun, wait) = tokio::sync::oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let opened = rusqlite::Connection::open(file).and_then(|conn| {
                conn.busy_timeout(CUT_WAITS)?;
                conn.execute_batch("BEGIN IMMEDIATE")?;
                Ok(conn)
            });
            let is_held = opened.is_ok();
            let _ = begun.send(opened.as_ref().map(drop).map_err(ToString::to_string)); // or nobody waits
            if is_held {
                std::thread::sleep(time); // closing the file ends the transaction
            }
        });
        let cut = wait.await.unwrap_or_else(|e| Err(e.to_string()));
        cut.map_err(|e| failed("the database cannot be cut off", e))
    }

    /// Wakes a frozen worker, and waits until it has gone on with what it held. Returns its token,
    /// and the newer one for which the carrier refused it.
    pub async fn thaw(&mut self, number: u32) -> Result<(i64, Option<i64>), Failure> {
        let until = Instant::now() + PATIENCE;
        if let Some(member) = self.members.get(&number) {
            kill_process(member.pid, Signal::CONT).map_err(|e| failed("a worker cannot be woken", e))?;
        }
        self.tell(number, Instruction::GoOn).await?;
        loop {
            match self.next_message(until, "for the frozen worker to go on").await? {
                (other, Message::WentOn { token, newest }) if other == number => return Ok((token, newest)),
                _ => {}
            }
        }
    }

    /// Tells all workers to finish and end, and waits until they have. They end when their standard
    /// input does.
    pub async fn end(&mut self) {
        let until = Instant::now() + END;
        for member in self.members.values_mut() {
            member.stdin = None;
        }
        for member in self.members.values_mut() {
            let _ = timeout_at(until, member.child.wait()).await; // else it is killed
        }
        self.kill_all().await;
    }

    /// Kills all that are left.
    pub async fn kill_all(&mut self) {
        for member in self.members.values_mut() {
            member.becomes(Condition::Gone);
            let _ = member.child.kill().await; // it may have ended
        }
        self.members.clear();
    }
}

/// Something did not happen in time.
pub fn stuck(what: &str) -> Failure {
    failed(
        "the demo is stuck",
        format!("gave up waiting {what} after two minutes; is the machine very busy?"),
    )
}
