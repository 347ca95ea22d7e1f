//! ClickHouse for tests: a database of its own for each, raw statements, and an engine that may be killed.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use async_trait::async_trait;
use hapax::analytics::Uuid;
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::testing::analytics::ReadModelHarness;
use tokio::sync::watch;

/// A fresh database on a server. It goes when this is dropped.
pub struct Database {
    pub server: String,
    pub name: String,
}

impl Database {
    pub fn new() -> Self {
        let url = std::env::var("HAPAX_TEST_CLICKHOUSE_URL").expect(
            "HAPAX_TEST_CLICKHOUSE_URL is not set: run scripts/services up, then eval \"$(scripts/services env)\"",
        );
        Database::on(url.strip_prefix("clickhouse://").expect("the URL of ClickHouse"))
    }

    pub fn on(server: &str) -> Self {
        Database { server: server.to_owned(), name: format!("hapax_test_{}", Uuid::now_v7().simple()) }
    }

    pub fn url(&self) -> String {
        self.url_as("")
    }

    /// `who` is empty, or `USER:PASSWORD@`.
    pub fn url_as(&self, who: &str) -> String {
        format!("clickhouse://{who}{}/{}", self.server, self.name)
    }

    pub fn model(&self) -> ClickHouseReadModel {
        ClickHouseReadModel::open(&self.url()).expect("a sound URL")
    }

    /// The answer to a statement in tab-separated lines; `DB` in it is this database.
    pub fn sql(&self, sql: &str) -> String {
        let (status, answer) = self.post("", sql.replace("DB.", &format!("{}.", self.name)).as_bytes());
        assert_eq!(status, 200, "{sql}: {answer}");
        answer.trim_end().to_owned()
    }

    /// Status and answer of a request.
    pub fn post(&self, query: &str, body: &[u8]) -> (u16, String) {
        let mut stream = std::net::TcpStream::connect(&self.server).expect("ClickHouse runs");
        write!(
            stream,
            "POST /?{query} HTTP/1.1\r\nHost: c\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
        .and_then(|()| stream.write_all(body))
        .expect("the request is sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, body.to_owned())
    }

    /// How many rows there are, replaced and deleted ones too.
    pub fn rows(&self) -> u64 {
        self.sql("SELECT count() FROM DB.data_records WHERE module != ''").parse().unwrap()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if std::net::TcpStream::connect(&self.server).is_ok() && !std::thread::panicking() {
            self.post("", format!("DROP DATABASE IF EXISTS {}", self.name).as_bytes());
        }
    }
}

#[async_trait]
impl ReadModelHarness for Database {
    type Model = ClickHouseReadModel;

    async fn open(&self) -> ClickHouseReadModel {
        self.model()
    }

    async fn open_for(&self, generation: u16) -> ClickHouseReadModel {
        ClickHouseReadModel::open_for(&self.url(), generation).expect("a sound URL")
    }
}

/// An engine of a test's own, to be killed.
pub struct Engine {
    dir: tempfile::TempDir,
    port: u16,
}

impl Engine {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("hapax-clickhouse").tempdir_in("/tmp").unwrap();
        // The servers' user must reach it.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let port = super::support::port::free();
        let engine = Engine { dir, port };
        engine.services("up");
        engine
    }

    pub fn database(&self) -> Database {
        Database::on(&format!("127.0.0.1:{}", self.port))
    }

    /// `scripts/services COMMAND clickhouse`, for this engine.
    pub fn services(&self, command: &str) {
        let mut run = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/services"));
        run.args([command, "clickhouse"]).env("HAPAX_SERVICES_DIR", self.dir.path());
        run.env("HAPAX_PORT_CLICKHOUSE", self.port.to_string());
        if let Ok(cache) = std::env::var("HAPAX_TEST_CACHE") {
            run.env("HAPAX_CACHE", cache);
        }
        let done = run.output().expect("scripts/services runs");
        assert!(done.status.success(), "services {command}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.services("down");
        }
    }
}

/// A way to a server on which the heads of requests are rewritten.
pub async fn rewriting(server: &str, from: &'static str, to: &'static str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    assert_eq!(from.len(), to.len());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = server.to_owned();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = tokio::net::TcpStream::connect(&server).await.expect("ClickHouse runs");
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut bytes = vec![0; 1 << 20];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    let mut piece = bytes[..count].to_vec();
                    for at in 0..count.saturating_sub(from.len()) {
                        if piece[at..].starts_with(from.as_bytes()) {
                            piece[at..at + to.len()].copy_from_slice(to.as_bytes());
                        }
                    }
                    if to_server.write_all(&piece).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A way to a server on which each request whose head has a text waits until a reader that counts its passes has made
/// one that began later.
pub async fn holding(server: &str, text: &'static str, passes: &watch::Sender<u64>) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (server, passes) = (server.to_owned(), passes.subscribe());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = tokio::net::TcpStream::connect(&server).await.expect("ClickHouse runs");
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let mut passes = passes.clone();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut bytes = vec![0; 1 << 20];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    if bytes[..count].windows(text.len()).any(|piece| piece == text.as_bytes()) {
                        let until = passes.borrow().saturating_add(2); // one may be under way
                        let _ = passes.wait_for(|passes| *passes >= until).await; // or it reads no more
                    }
                    if to_server.write_all(&bytes[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}
