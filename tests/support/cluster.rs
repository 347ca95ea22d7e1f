//! A PostgreSQL of a test's own, by the binaries of the test server: for tests that kill it, or that change who may enter.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The server. It is killed, and its data goes, when this is dropped.
pub struct Cluster {
    dir: tempfile::TempDir,
    bin: PathBuf,
    /// Who runs it: PostgreSQL refuses to be root.
    user: (u32, u32),
    port: u16,
    server: Option<Child>,
}

impl Cluster {
    /// A fresh one, running.
    pub async fn new() -> Self {
        let pool = super::postgres::pool(1).await;
        let bin: String =
            super::postgres::ask(&pool, "select setting from pg_config() where name = 'BINDIR'").await;
        let data: String = super::postgres::ask(&pool, "show data_directory").await;
        let owner = std::fs::metadata(&data).expect("the test server is on this machine");
        let dir = tempfile::Builder::new().prefix("hapax-cluster").tempdir_in("/tmp").unwrap();
        let user = (owner.uid(), owner.gid());
        std::os::unix::fs::chown(dir.path(), Some(user.0), Some(user.1)).unwrap();
        let mut cluster = Cluster { dir, bin: bin.into(), user, port: 0, server: None };
        let made = cluster
            .command("initdb")
            .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"])
            .stdout(Stdio::null())
            .status()
            .expect("initdb runs");
        assert!(made.success(), "initdb: {made}");
        cluster.port = super::port::free();
        cluster.start().await;
        cluster
    }

    /// A hot standby of this server, made from a base backup: it streams, and answers reads.
    pub async fn standby(&self) -> Self {
        let dir = tempfile::Builder::new().prefix("hapax-standby").tempdir_in("/tmp").unwrap();
        std::os::unix::fs::chown(dir.path(), Some(self.user.0), Some(self.user.1)).unwrap();
        let mut standby = Cluster { dir, bin: self.bin.clone(), user: self.user, port: 0, server: None };
        let copied = standby
            .command("pg_basebackup")
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "postgres"])
            .args(["-X", "stream", "-c", "fast", "--no-sync"])
            .status()
            .expect("pg_basebackup runs");
        assert!(copied.success(), "pg_basebackup: {copied}");
        // By hand instead of `-R`: that writes options which the libpq that the server finds may be too old for.
        std::fs::write(standby.data().join("standby.signal"), "").unwrap();
        let primary = format!("\nprimary_conninfo = 'host=127.0.0.1 port={} user=postgres'\n", self.port);
        let mut settings =
            std::fs::File::options().append(true).open(standby.data().join("postgresql.auto.conf")).unwrap();
        std::io::Write::write_all(&mut settings, primary.as_bytes()).unwrap();
        standby.port = super::port::free();
        standby.start().await;
        standby
    }

    /// Where its files are.
    pub fn data(&self) -> PathBuf {
        self.dir.path().join("pg")
    }

    pub fn url(&self) -> String {
        self.url_as("postgres")
    }

    /// As somebody, by `user` or `user:password`.
    pub fn url_as(&self, who: &str) -> String {
        format!("postgres://{who}@127.0.0.1:{}/postgres", self.port)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.arg("-D").arg(self.data()).current_dir(self.dir.path()).stdin(Stdio::null());
        // The server's own libpq, by which a standby streams: the module does not know where it was unpacked, and would take
        // the system's, if there is one.
        command.env("LD_LIBRARY_PATH", self.bin.join("../lib"));
        // As root only: nobody else may become somebody else, or needs to.
        if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
            command.uid(self.user.0).gid(self.user.1);
        }
        command
    }

    /// Starts it, and waits until it answers. What a killed one left (a lock file, memory) may take a moment to go.
    pub async fn start(&mut self) {
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            if self.server.as_mut().is_none_or(|server| server.try_wait().unwrap().is_some()) {
                let log = std::fs::File::options()
                    .create(true)
                    .append(true)
                    .open(self.dir.path().join("log"))
                    .unwrap();
                let started = self
                    .command("postgres")
                    .args(["-p", &self.port.to_string()])
                    .args(["-c", "unix_socket_directories=", "-c", "listen_addresses=127.0.0.1"])
                    .stdout(Stdio::null())
                    .stderr(log)
                    .spawn();
                self.server = Some(started.expect("postgres runs"));
            }
            if <sqlx::PgConnection as sqlx::Connection>::connect(&self.url()).await.is_ok() {
                return;
            }
            assert!(Instant::now() < end, "the server does not come up: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// `kill -9` of the server and all its processes at once: a power failure, but for the disk's own cache.
    pub fn kill(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        let pid = server.id().to_string();
        let mut pids = children_of(&pid);
        pids.insert(0, pid);
        let _ = Command::new("kill").arg("-9").args(&pids).stderr(Stdio::null()).status();
        server.wait().expect("it is dead");
        let end = Instant::now() + Duration::from_secs(30);
        while pids.iter().any(|pid| is_alive(pid)) {
            assert!(Instant::now() < end, "a process of the server survives kill -9");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill();
    }
}

/// State and parent of a process.
fn stat(pid: &str) -> Option<(String, String)> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned);
    Some((fields.next()?, fields.next()?))
}

fn children_of(parent: &str) -> Vec<String> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|pid| stat(pid).is_some_and(|(_, ppid)| ppid == parent))
        .collect()
}

fn is_alive(pid: &str) -> bool {
    stat(pid).is_some_and(|(state, _)| state != "Z" && state != "X")
}
