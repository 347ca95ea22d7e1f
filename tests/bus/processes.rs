//! Three processes of a group share an embedded bus. One is killed, one is stopped for longer than its session and goes
//! on: in the end every partition is in the hands of one living member, no commit has gone backwards, and every record
//! that is not below a commit is still delivered.
#![cfg(all(feature = "testing", feature = "sqlite", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hapax::bus::{Assignment, Bus, BusEvent, EmbeddedBus, Partition, Record, Subscription, TopicSettings};
use hapax::{Error, Topic};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

const PARTITIONS: i32 = 6;
const ROLE: &str = "HAPAX_TEST_BUS_FILE";
/// Longer than a busy machine stands still.
const SESSION: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_mins(2);
const GROUP: &str = "group";

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn say(line: &str) {
    println!("bus-child {line}");
    std::io::stdout().flush().unwrap();
}

/// A child: a member that says what it hears, and commits what it was delivered. The lines go to the parent.
async fn member(file: &Path) {
    let bus = EmbeddedBus::open(file).unwrap();
    let mut subscription = Subscription::new(GROUP, [topic()]).unwrap();
    subscription.session_timeout = SESSION;
    let mut member = bus.subscribe(subscription).await.unwrap();
    let mut held: BTreeMap<Partition, Assignment> = BTreeMap::new();
    let name = |assigned: &Assignment| format!("{} {}", assigned.partition.number, assigned.epoch);
    loop {
        match member.next().await.unwrap() {
            BusEvent::Assigned(given) => {
                for assigned in given {
                    say(&format!("given {}", name(&assigned)));
                    held.insert(assigned.partition.clone(), assigned);
                }
            }
            BusEvent::Revoked(revoked) => {
                for assigned in &revoked {
                    say(&format!("back {}", name(assigned)));
                    held.remove(&assigned.partition);
                }
                member.release(&revoked).await.unwrap();
            }
            BusEvent::Removed { partition, offsets } => {
                say(&format!("removed {} {offsets:?}", partition.number));
            }
            BusEvent::Lost(lost) => {
                for assigned in &lost {
                    say(&format!("lost {}", name(assigned)));
                    held.remove(&assigned.partition);
                }
            }
            BusEvent::Records(records) => {
                let mut ends = BTreeMap::new();
                for received in records {
                    let number = received.origin.partition;
                    say(&format!("record {number} {}", received.origin.offset));
                    let partition = Partition { topic: topic(), number };
                    ends.insert(number, (held[&partition].clone(), received.origin.offset + 1));
                }
                let ends: Vec<_> = ends.into_values().collect();
                for ((assigned, end), answer) in ends.iter().zip(member.commit(&ends).await.unwrap()) {
                    match answer {
                        Ok(()) => say(&format!("commit {} {end}", assigned.partition.number)),
                        Err(Error::Fenced { .. }) => say(&format!("fenced {}", name(assigned))),
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
    }
}

/// What the parent heard of its children.
#[derive(Default)]
struct Story {
    /// By child: what it believes to hold.
    holds: BTreeMap<usize, BTreeSet<i32>>,
    lost: BTreeMap<usize, usize>,
    /// By partition: the offsets that were delivered to someone.
    delivered: BTreeMap<i32, BTreeSet<i64>>,
}

impl Story {
    fn take(&mut self, child: usize, line: &str) {
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let numbers: Vec<i64> = words.map(|word| word.parse().unwrap()).collect();
        let partition = numbers[0] as i32;
        let holds = self.holds.entry(child).or_default();
        match what {
            "given" => assert!(holds.insert(partition)),
            "back" => assert!(holds.remove(&partition)),
            "lost" => {
                assert!(holds.remove(&partition));
                *self.lost.entry(child).or_default() += 1;
            }
            "record" => {
                self.delivered.entry(partition).or_default().insert(numbers[1]);
            }
            "commit" | "fenced" => {}
            other => panic!("child {child} says {other}"),
        }
    }
}

/// The parent's view of the stage.
struct Stage {
    bus: EmbeddedBus,
    file: PathBuf,
    say: mpsc::UnboundedSender<(usize, String)>,
    lines: mpsc::UnboundedReceiver<(usize, String)>,
    story: Story,
    /// The highest commit seen of each partition.
    committed: BTreeMap<i32, i64>,
    published: usize,
    _dir: tempfile::TempDir,
}

impl Stage {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("bus.db");
        let bus = EmbeddedBus::open(&file).unwrap();
        bus.create_topic(&topic(), TopicSettings::new(PARTITIONS)).await.unwrap();
        let (say, lines) = mpsc::unbounded_channel();
        let (story, committed) = (Story::default(), BTreeMap::new());
        Stage { bus, file, say, lines, story, committed, published: 0, _dir: dir }
    }

    fn spawn(&self, child: usize) -> Child {
        let mut process = Command::from(crate::support::this::test("a_group_survives_a_kill_and_a_stop"))
            .env(ROLE, &self.file)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let say = self.say.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                // The test harness prints beside it, also on the same line.
                if let Some((_, line)) = line.split_once("bus-child ") {
                    let _ = say.send((child, line.to_owned()));
                }
            }
        });
        process
    }

    /// Publishes a little, hears a little, and looks at the commits, until something is so.
    async fn until(&mut self, what: &str, so: impl Fn(&Story) -> bool) {
        let started = tokio::time::Instant::now();
        while !so(&self.story) {
            assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} for: {what}; {:?}", self.story.holds);
            if self.published < 3000 {
                let records: Vec<_> = (0..PARTITIONS).map(|_| Record::default()).collect();
                for answer in self.bus.publish(&topic(), &records).await.unwrap() {
                    answer.unwrap();
                    self.published += 1;
                }
            }
            if let Ok(Some((child, line))) =
                tokio::time::timeout(Duration::from_millis(20), self.lines.recv()).await
            {
                self.story.take(child, &line);
            }
            while let Ok((child, line)) = self.lines.try_recv() {
                self.story.take(child, &line);
            }
            self.look().await;
        }
    }

    /// No commit goes backwards.
    async fn look(&mut self) {
        for number in 0..PARTITIONS {
            let partition = Partition { topic: topic(), number };
            let now = self.bus.committed(GROUP, &partition).await.unwrap().unwrap_or(0);
            let before = self.committed.insert(number, now).unwrap_or(0);
            assert!(now >= before, "the commit of {partition} went from {before} to {now}");
        }
    }
}

fn signal(process: &Child, name: &str) {
    let id = process.id().expect("it runs").to_string();
    let status = std::process::Command::new("kill").args([name, &id]).status().unwrap();
    assert!(status.success(), "kill {name} {id}");
}

/// Waits until every thread of a process stands still: the signal is sent before it is obeyed.
fn until_stopped(process: &Child) {
    let started = std::time::Instant::now();
    let tasks = format!("/proc/{}/task", process.id().expect("it runs"));
    let stands = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    while !std::fs::read_dir(&tasks).unwrap().all(stands) {
        assert!(started.elapsed() < DEADLINE, "it does not stop");
        std::thread::yield_now();
    }
}

fn shared(story: &Story, by: &[usize]) -> bool {
    let all: Vec<i32> = by.iter().filter_map(|child| story.holds.get(child)).flatten().copied().collect();
    let different: BTreeSet<i32> = all.iter().copied().collect();
    let each = PARTITIONS as usize / by.len();
    all.len() == different.len()
        && different.len() == PARTITIONS as usize
        && by.iter().all(|child| story.holds.get(child).is_some_and(|held| held.len() == each))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_survives_a_kill_and_a_stop() {
    if let Ok(file) = std::env::var(ROLE) {
        return member(Path::new(&file)).await;
    }
    let mut stage = Stage::new().await;
    let mut killed = stage.spawn(0);
    let stopped = stage.spawn(1);
    let _steady = stage.spawn(2);
    stage.until("two each", |story| shared(story, &[0, 1, 2])).await;

    signal(&killed, "-KILL");
    killed.wait().await.unwrap();
    stage.story.holds.remove(&0);
    stage.until("three each", |story| shared(story, &[1, 2])).await;

    {
        // Stopped outside of a transaction: one that stands still with the file locked would hold up everybody.
        let lock = rusqlite::Connection::open(&stage.file).unwrap();
        lock.busy_timeout(Duration::from_secs(120)).unwrap();
        lock.execute_batch("BEGIN IMMEDIATE").unwrap();
        signal(&stopped, "-STOP");
        until_stopped(&stopped);
        lock.execute_batch("ROLLBACK").unwrap();
    }
    stage.until("everything in the hands of one", |story| story.holds[&2].len() == PARTITIONS as usize).await;
    signal(&stopped, "-CONT");
    stage.until("the stopped one to learn of it", |story| story.lost.get(&1) == Some(&3)).await;
    stage.until("three each again", |story| shared(story, &[1, 2])).await;

    // Nothing is lost: everything that was published was delivered to somebody, and everything is committed in the end.
    let mut ends = BTreeMap::new();
    for number in 0..PARTITIONS {
        ends.insert(number, stage.bus.range(&Partition { topic: topic(), number }).await.unwrap().1);
    }
    stage.published = usize::MAX; // no more of it
    let all = ends.clone();
    stage
        .until("everything to be delivered", move |story| {
            all.iter().all(|(number, end)| {
                story.delivered.get(number).is_some_and(|offsets| offsets.iter().copied().eq(0..*end))
            })
        })
        .await;
    let started = tokio::time::Instant::now();
    while stage.committed != ends {
        assert!(started.elapsed() < DEADLINE, "committed {:?} of {ends:?}", stage.committed);
        stage.look().await;
        tokio::task::yield_now().await;
    }
}
