//! Servers, and records whose events are published.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::opensearch::{MissingAlias, SearchProjection, SearchSettings};
use hapax::backend::redis::{CacheProjection, CacheSettings};
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::bus::{Bus, EmbeddedBus, TopicSettings};
use hapax::journal::{Journal as _, JournalSettings};
use hapax::projection::{History, Name, Projection, Verified, verify};
use hapax::records::{Create, Delete, ModuleSlug, Modules as _, Payload, Records as _, Update, Uuid};
use hapax::relay::Relay;
use hapax::{Tenant, Topic};

use crate::support::valkey;
use crate::support::wait::until_so;

/// The retention in these tests.
pub const DAY: Duration = Duration::from_hours(24);

/// Where the engine is. A missing one is a failure, never a skip.
pub fn opensearch() -> String {
    std::env::var("HAPAX_TEST_OPENSEARCH_URL").expect(
        "HAPAX_TEST_OPENSEARCH_URL is not set: run `scripts/test`, or `scripts/services up opensearch valkey` and `eval \"$(scripts/services env)\"`",
    )
}

pub fn search_settings() -> SearchSettings {
    let mut settings = SearchSettings::default();
    settings.replicas = 0;
    settings.timeout = Duration::from_secs(60);
    settings
}

pub async fn search(alias: &str) -> SearchProjection {
    let url = format!("{}/{alias}", opensearch());
    SearchProjection::connect(&url, search_settings(), MissingAlias::Create)
        .await
        .expect("the engine answers")
}

pub async fn cache(prefix: &str) -> CacheProjection {
    let mut settings = CacheSettings::default();
    prefix.clone_into(&mut settings.prefix);
    CacheProjection::connect(&valkey::url(), settings, DAY).await.expect("the server answers")
}

/// A request of the test's own. Its status and its body.
pub async fn ask(method: &str, path: &str, body: Option<&str>) -> (u16, serde_json::Value) {
    let (method, path, body) = (method.to_owned(), path.to_owned(), body.map(str::to_owned));
    let asked = tokio::task::spawn_blocking(move || curl(&method, &path, body.as_deref()));
    asked.await.expect("an answer")
}

/// By curl: what the projection's own client would also get wrong must not hide here.
fn curl(method: &str, path: &str, body: Option<&str>) -> (u16, serde_json::Value) {
    let mut command = std::process::Command::new("curl");
    command.args([
        "-sS",
        "-m",
        "60",
        "-X",
        method,
        "-w",
        "\n%{http_code}",
        "-H",
        "content-type: application/json",
    ]);
    if let Some(body) = body {
        command.args(["--data-binary", body]);
    }
    let out = command.arg(format!("{}/{path}", opensearch())).output().expect("curl runs");
    let text = String::from_utf8(out.stdout).expect("text");
    let (body, status) = text.rsplit_once('\n').expect("a status");
    (status.parse().expect("a status"), serde_json::from_str(body).unwrap_or_default())
}

/// Removes what a test has made.
pub fn remove_indices(alias: &str) {
    let (_, found) = curl("GET", &format!("{alias}-*/_alias?allow_no_indices=true"), None);
    for index in found.as_object().into_iter().flatten().map(|(index, _)| index) {
        curl("DELETE", index, None);
    }
}

pub fn topic() -> Topic {
    Topic::new("records").unwrap()
}

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

/// Records in a file, and a bus in another.
pub struct RecordSource {
    pub dir: tempfile::TempDir,
    pub journal: SqliteJournal,
    pub records: SqliteRecords,
    pub bus: Arc<EmbeddedBus>,
    /// A record of no tenant that has seq 2.
    second: std::sync::Mutex<Option<Uuid>>,
}

impl RecordSource {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let journal = SqliteJournal::open(dir.path().join("journal.db"), JournalSettings::default()).unwrap();
        let records = SqliteRecords::open(&journal).unwrap();
        records.create_module(&orders()).await.unwrap();
        let bus = Arc::new(RecordSource::bus(dir.path()));
        bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
        RecordSource { dir, journal, records, bus, second: std::sync::Mutex::default() }
    }

    pub fn bus(dir: &Path) -> EmbeddedBus {
        EmbeddedBus::open(dir.join("bus.db")).unwrap()
    }

    /// Writes records of two tenants: created, updated, deleted and created again. Returns how many events there are.
    pub async fn write(&self, records: u128) -> u64 {
        let tenants = [None, Some(Tenant::new(Uuid::from_u128(7).to_string()).unwrap())];
        let payload = |n: u128, seq: u64| Payload::new(format!(r#"{{"n":{n},"seq":{seq}}}"#)).unwrap();
        let mut events = 0;
        for n in 1..=records {
            let (tenant, id) = (tenants[(n % 2) as usize].clone(), Uuid::now_v7());
            let create = Create::new(orders(), payload(n, 1)).tenant(tenant.clone()).id(id);
            self.records.create(&create).await.unwrap();
            let update = Update::new(orders(), id, 1, payload(n, 2)).tenant(tenant.clone());
            self.records.update(&update).await.unwrap();
            events += 2;
            if n == 2 {
                *self.second.lock().unwrap() = Some(id);
            }
            if n.is_multiple_of(3) {
                self.records.delete(&Delete::new(orders(), id, 2).tenant(tenant.clone())).await.unwrap();
                events += 1;
            }
            if n.is_multiple_of(6) {
                self.records.create(&create).await.unwrap();
                events += 1;
            }
        }
        events
    }

    /// Updates one record once more. Returns its name.
    pub async fn update_one(&self) -> Name {
        self.update_with(Payload::new("{}").unwrap()).await
    }

    /// The same, with a payload.
    pub async fn update_with(&self, payload: Payload) -> Name {
        let id = self.second.lock().unwrap().take().expect("a record with seq 2");
        self.records.update(&Update::new(orders(), id, 2, payload)).await.unwrap();
        Name { tenant: Uuid::nil(), module: orders(), id }
    }

    /// Publishes everything, as a relay of this name does.
    pub async fn relay(&self, name: &str) {
        self.relay_to(name, Arc::clone(&self.bus) as Arc<dyn Bus>).await;
    }

    /// The same, to the bus as somebody else has opened it.
    pub async fn relay_to(&self, name: &str, bus: Arc<dyn Bus>) {
        let relay =
            Relay::builder(Arc::new(self.journal.clone()), bus).name(name).topic("records").build().unwrap();
        let (handle, last) = (relay.handle(), self.journal.stat().await.unwrap().last.unwrap());
        let running = tokio::spawn(relay.run());
        until_so("everything is published", || handle.progress().position >= last).await;
        handle.stop();
        running.await.unwrap().unwrap();
    }

    /// The history without an archive.
    pub async fn history(&self) -> History<'_> {
        History::open(&self.journal, &self.records, None, 1).await.unwrap()
    }

    /// The last change of every record, and all that came before.
    pub async fn changes(&self) -> Vec<hapax::projection::Change> {
        let (mut history, mut changes) = (self.history().await, Vec::new());
        while let Some(more) = history.next().await.unwrap() {
            changes.extend(more);
        }
        changes
    }

    /// Compares a projection with the records.
    pub async fn verify(&self, projection: &dyn Projection) -> Verified {
        verify(projection, &self.history().await, Duration::ZERO).await.unwrap()
    }
}
