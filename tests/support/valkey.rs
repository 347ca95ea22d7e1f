//! A Valkey under test: the server that `HAPAX_TEST_VALKEY_URL` names, and a gate in front of it that can be shut.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::redis::{RedisLedger, RedisSettings};
use hapax::ledger::{Claim, Marker, Outcome, Settings, Settle, Settled};
use hapax::testing::{Harness, noon};
use hapax::{Result, Scope};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Where the server is. A missing one is a failure, never a skip.
pub fn url() -> String {
    std::env::var("HAPAX_TEST_VALKEY_URL").expect(
        "HAPAX_TEST_VALKEY_URL is not set: run `scripts/test`, or `scripts/services up` and `eval \"$(scripts/services env)\"`",
    )
}

/// Its host and port.
pub fn address() -> String {
    let url = url();
    let rest = url.split_once("://").expect("a URL").1;
    rest.split('/').next().expect("an address").rsplit('@').next().expect("an address").to_owned()
}

/// A connection of the test's own.
pub async fn connection() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(url()).expect("a URL");
    client.get_multiplexed_async_connection().await.expect("the test server answers")
}

pub use crate::support::wait::until;

/// A gate in front of the server: shut, it ends every connection and every new one.
pub struct Gate {
    address: SocketAddr,
    open: watch::Sender<bool>,
    turned_away: Arc<AtomicUsize>,
}

impl Gate {
    pub async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let gate = Gate {
            address: listener.local_addr().expect("an address"),
            open: watch::Sender::new(true),
            turned_away: Arc::default(),
        };
        let (open, turned_away) = (gate.open.subscribe(), Arc::clone(&gate.turned_away));
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                if !*open.borrow() {
                    turned_away.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
                let mut open = open.clone();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(address()).await.expect("the test server answers");
                    let _ = (client.set_nodelay(true), server.set_nodelay(true)); // only slower without
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = open.wait_for(|open| !open) => {}
                    }
                });
            }
        });
        gate
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    pub fn shut(&self) {
        self.open.send_replace(false);
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// How many it turned away.
    pub fn turned_away(&self) -> usize {
        self.turned_away.load(Ordering::SeqCst)
    }
}

/// A fresh ledger whose clock stands still until it is moved.
pub struct RedisHarness {
    pub name: String,
}

impl RedisHarness {
    pub async fn new() -> Self {
        let harness = RedisHarness { name: fresh_name() };
        let _: () = redis::cmd("SET")
            .arg(harness.clock())
            .arg(hapax::Time::as_micros(noon()))
            .query_async(&mut connection().await)
            .await
            .expect("the test server answers");
        harness
    }

    fn clock(&self) -> String {
        format!("hapax:{{{}}}:test_clock", self.name)
    }
}

/// A name nobody else uses.
pub fn fresh_name() -> String {
    format!("t_{}", uuid::Uuid::new_v4().simple())
}

/// Settings of a ledger.
pub fn settings(name: &str, ledger: Settings) -> RedisSettings {
    let mut settings = RedisSettings::default();
    settings.ledger = ledger;
    name.clone_into(&mut settings.name);
    settings
}

#[async_trait]
impl Harness for RedisHarness {
    type Ledger = RedisLedger;

    async fn open(&self, ledger: Settings) -> RedisLedger {
        RedisLedger::connect_on_test_clock(&url(), settings(&self.name, ledger))
            .await
            .expect("the ledger opens")
    }

    async fn advance(&self, by: Duration) {
        let _: i64 = redis::cmd("INCRBY")
            .arg(self.clock())
            .arg(by.as_micros() as i64)
            .query_async(&mut connection().await)
            .await
            .expect("the test server answers");
    }

    async fn in_transaction(
        &self,
        ledger: &RedisLedger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>> {
        loop {
            let mut transaction = ledger.begin();
            let outcomes = transaction.claim(claims).await?;
            if !commit {
                return Ok(outcomes);
            }
            match transaction.commit().await {
                Err(hapax::Error::Contended { .. }) => {} // all of it again, as its docs ask
                done => return done.map(|()| outcomes),
            }
        }
    }

    async fn settle_in_transaction(
        &self,
        ledger: &RedisLedger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>> {
        loop {
            let mut transaction = ledger.begin();
            let answers = transaction.settle(settles).await?;
            transaction.set_markers(markers.0, markers.1).await?;
            if !commit {
                return Ok(answers);
            }
            match transaction.commit().await {
                Err(hapax::Error::Contended { .. }) => {}
                done => return done.map(|()| answers),
            }
        }
    }

    async fn was_committed(&self, ledger: &RedisLedger, claim: &Claim) -> Result<bool> {
        ledger.was_committed(claim).await
    }
}

/// A server of the test's own, from the same binary, to be flushed, killed and started with other files. It ends with the test.
pub struct Private {
    child: std::process::Child,
    binary: String,
    pub dir: tempfile::TempDir,
    port: u16,
    args: Vec<String>,
}

impl Private {
    /// Starts one, with arguments behind `--appendonly yes --appendfsync always`.
    pub async fn start(args: &[&str]) -> Self {
        let info: String =
            redis::cmd("INFO").arg("server").query_async(&mut connection().await).await.expect("INFO");
        let binary = info.lines().find_map(|line| line.strip_prefix("executable:")).expect("its binary");
        // Another may take the port before the server does; then the next one is tried.
        for _ in 0..20 {
            let port = super::port::free();
            let dir = tempfile::tempdir().expect("a directory");
            let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
            let child = Private::spawn(binary, port, dir.path(), &args);
            let mut server = Private { child, binary: binary.to_owned(), dir, port, args };
            if server.answers().await {
                return server;
            }
        }
        panic!("no Valkey could be started from {binary}");
    }

    fn spawn(binary: &str, port: u16, dir: &std::path::Path, args: &[String]) -> std::process::Child {
        std::process::Command::new(binary)
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--dir"])
            .arg(dir)
            .args(["--daemonize", "no", "--save", "", "--appendonly", "yes", "--appendfsync", "always"])
            .args(args)
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("the server's binary runs")
    }

    /// Waits until it answers; false if it ended.
    async fn answers(&mut self) -> bool {
        let end = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            if self.child.try_wait().expect("a child").is_some() {
                return false;
            }
            let client = redis::Client::open(self.url()).expect("a URL");
            if let Ok(mut connection) = client.get_multiplexed_async_connection().await {
                let pong: redis::RedisResult<String> = redis::cmd("PING").query_async(&mut connection).await;
                if pong.is_ok() {
                    return true;
                }
            }
            assert!(std::time::Instant::now() < end, "the server does not answer within a minute");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// A command of the test's own.
    pub async fn command(&self, words: &[&str]) -> redis::Value {
        let client = redis::Client::open(self.url()).expect("a URL");
        let mut connection = client.get_multiplexed_async_connection().await.expect("the server answers");
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query_async(&mut connection).await.expect("the command is done")
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// Starts it once more, on the files that are there.
    pub async fn start_again(&mut self) {
        self.child = Private::spawn(&self.binary, self.port, self.dir.path(), &self.args);
        assert!(self.answers().await, "the server starts again");
    }

    /// What is in its directory, to be put back.
    pub fn files(&self) -> Vec<(std::path::PathBuf, Vec<u8>)> {
        let dir = self.dir.path().join("appendonlydir");
        let entries = std::fs::read_dir(dir).expect("its files").map(|entry| entry.expect("a file").path());
        entries.map(|path| (path.clone(), std::fs::read(path).expect("a file"))).collect()
    }

    /// Puts back what was there.
    pub fn put_back(&self, files: &[(std::path::PathBuf, Vec<u8>)]) {
        std::fs::remove_dir_all(self.dir.path().join("appendonlydir")).expect("its files");
        std::fs::create_dir(self.dir.path().join("appendonlydir")).expect("a directory");
        for (path, content) in files {
            std::fs::write(path, content).expect("a file");
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = (self.child.kill(), self.child.wait()); // it may have ended
    }
}
