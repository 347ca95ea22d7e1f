//! A read model in ClickHouse: every version is a row, and the highest counts (`ReplacingMergeTree`, read with
//! FINAL).
//!
//! A block is applied in an order that a crash between any two steps leaves sound:
//!
//! ```text
//! rejected changes ─▶ rows (one insert per block, with a token) ─▶ the partition's place and pulse
//! ```
//!
//! Until the last step no caller knows of the block, and repeating the first two changes nothing:
//! rows of equal version are one row, and a repeated insert is dropped by its token. The other way round, a
//! pulse could speak of rows that are lost. See `sync` for states that arrive late.

mod ask;
mod erase;
mod fault;
mod http;
mod index;
mod scan;
mod schema;
mod second;
mod sync;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex as Lock, PoisonError};

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;

use self::http::Server;
use self::index::{INDEX_BYTES_MAX, Index};
use self::sync::{Rejections, States, WriteSeq};
use self::wire::Rows;
use crate::analytics::{
    Block, Change, Groups, ListPage, PartitionSync, Pieces, ReadModel, Rejected, RejectedEntry, Row, Second,
    Selection, Tally, Uuid, Version,
};
use crate::bus::Partition;
use crate::clock::Time;
use crate::erase::Subject;
use crate::error::{Error, Result};
use crate::id::Topic;
use crate::records::{Listed, ModuleSlug, Payload, Scan};

/// What an answer without FINAL may count wrongly.
const APPROXIMATE: &str = "versions that were replaced or deleted count until ClickHouse has merged them";

/// A read model in ClickHouse. Clones share its connections.
///
/// It connects with the first call. Then it makes the tables that are missing, checks those that are there,
/// and tries whether the server honours the filter of tenants.
///
/// It belongs to the table of rows that it was first asked about. If another table takes that name, what is
/// applied fails until [`expect`](ReadModel::expect) begins with the new one. Two feeds need two of these: one
/// that is shared would let the second feed go on where the first has begun anew.
#[derive(Clone)]
pub struct ClickHouseReadModel(Arc<Inner>);

struct Inner {
    server: Server,
    /// Whether missing tables are made.
    make: bool,
    /// Which generation of the source the tables are made for; `None`: any.
    generation: Option<u16>,
    /// Whether the tables were checked.
    ready: Mutex<bool>,
    /// The table of rows that is fed.
    fed: Lock<Option<Uuid>>,
    /// The last state that was written to each partition, or will be.
    write_seqs: Lock<BTreeMap<Partition, WriteSeq>>,
}

impl fmt::Debug for ClickHouseReadModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClickHouseReadModel").field("server", &self.0.server).finish_non_exhaustive()
    }
}

impl ClickHouseReadModel {
    /// The read model that a URL names: `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE`, or `clickhouses://` for
    /// TLS. Without them the port is 8123 (8443), the user `default` and the database `analytics`. Connects
    /// to nothing yet.
    pub fn open(url: &str) -> Result<Self> {
        Ok(ClickHouseReadModel::new(Server::of(url)?, true, None))
    }

    /// The same, and a table of rows that it makes takes rows of this generation only.
    pub fn open_for(url: &str, generation: u16) -> Result<Self> {
        Ok(ClickHouseReadModel::new(Server::of(url)?, true, Some(generation)))
    }

    /// One that is there: it makes no tables.
    pub fn open_existing(url: &str) -> Result<Self> {
        Ok(ClickHouseReadModel::new(Server::of(url)?, false, None))
    }

    fn new(server: Server, make: bool, generation: Option<u16>) -> Self {
        ClickHouseReadModel(Arc::new(Inner {
            server,
            make,
            generation,
            ready: Mutex::default(),
            fed: Lock::default(),
            write_seqs: Lock::default(),
        }))
    }

    /// Makes and checks the tables, if that was not done yet.
    async fn ready(&self) -> Result<&Server> {
        let mut ready = self.0.ready.lock().await;
        if !*ready {
            schema::prepare(&self.0.server, self.0.make, self.0.generation).await?;
            *ready = true;
        }
        Ok(&self.0.server)
    }

    /// The same, and which table of rows is there now: another one may have taken its name.
    async fn current(&self) -> Result<(&Server, Uuid)> {
        let server = self.ready().await?;
        let table = schema::of_rows(server).await;
        Ok((server, self.noting(table).await?.uuid))
    }

    /// After an error that says that a table is gone or another: the next call looks again.
    async fn noting<T>(&self, done: Result<T>) -> Result<T> {
        if matches!(done, Err(Error::Schema(_))) {
            *self.0.ready.lock().await = false;
        }
        done
    }

    /// The table of rows that is fed; this one, if none is yet.
    fn fed(&self, now: Uuid) -> Uuid {
        *self.0.fed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(now)
    }

    /// From now on this table of rows is fed.
    fn feed(&self, model: Uuid) {
        *self.0.fed.lock().unwrap_or_else(PoisonError::into_inner) = Some(model);
    }

    fn write_seqs<T>(&self, with: impl FnOnce(&mut BTreeMap<Partition, WriteSeq>) -> T) -> T {
        with(&mut self.0.write_seqs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The write_seq of the next state of a partition, whose last known writer is this.
    fn next_write_seq(&self, of: &Partition, writer: u64) -> WriteSeq {
        self.write_seqs(|write_seqs| {
            let write_seq = write_seqs.entry(of.clone()).or_insert((writer + 1, 0));
            write_seq.1 += 1;
            *write_seq
        })
    }

    async fn apply_blocks(&self, blocks: &[Block]) -> Result<()> {
        let (server, model) = self.current().await?;
        if self.fed(model) != model {
            // The blocks go on where the old table was: the new one would lack everything before them.
            return Err(Error::Schema(format!(
                "table {} of ClickHouse at {} was recreated while a feed wrote to it; restart the feed, so that it starts from the beginning",
                server.records(),
                server.place()
            )));
        }
        let mut topics = sync::read(server, model).await?;
        let (mut rejections, mut states, mut inserts) =
            (Rejections::default(), States::default(), Vec::new());
        for block in blocks {
            let Partition { topic, number } = &block.partition;
            let of = topics.entry(topic.clone()).or_default();
            of.synced.expect(block.partitions.max(number.saturating_add(1)));
            let before = usize::try_from(*number).ok().and_then(|place| of.synced.pulses[place]);
            if let Some(at) = block.pulse {
                of.synced.pulse(*number, at);
            }
            let writer = of.places.get(number).map_or(0, |place| place.writer);
            let write_seq = self.next_write_seq(&block.partition, writer);
            for (rejected, pulse) in &block.rejected {
                rejections.add(model, &block.partition, write_seq, rejected, (*pulse).or(before));
            }
            let rows = encoded(&block.changes, |rejected| {
                rejections.add(model, &block.partition, write_seq, &rejected, before);
            });
            if !rows.is_empty() {
                inserts.push((token(model, block, &rows), rows));
            }
            states.partition(model, &block.partition, write_seq, block.end(), block.pulse);
            states.topic(model, topic, &of.synced);
        }
        if !rejections.is_empty() {
            rejections.insert(server).await?;
        }
        let mut states = Some(states);
        if crate::crash_point::mutant!("state before rows")
            && let Some(states) = states.take()
        {
            states.insert(server).await?;
        }
        crate::crash_point!("analytics.clickhouse.rejected");
        for (token, rows) in inserts {
            let statement = schema::insert_rows(server).set("insert_deduplication_token", token);
            server.insert("applying changes to a read model", statement, rows).await?;
            crate::crash_point!("analytics.clickhouse.rows");
        }
        crate::crash_point!("analytics.clickhouse.states");
        match states {
            Some(states) => states.insert(server).await,
            None => Ok(()),
        }
    }
}

/// Rows as they are inserted; what cannot be a row is rejected.
fn encoded(changes: &[Change], mut reject: impl FnMut(Rejected)) -> Vec<u8> {
    let mut rows = Rows::default();
    for change in changes {
        let Some(index) = change.payload.as_ref().map_or_else(|| Some(Index::default()), Index::of) else {
            reject(Rejected {
                tenant: Some(change.tenant),
                origin: change.origin.clone(),
                reason: format!(
                    "the names of the fields of {}/{} take more than {INDEX_BYTES_MAX} bytes in all",
                    change.module, change.id
                ),
                payload: change.payload.as_ref().map(|p| p.as_str().as_bytes().to_vec()).unwrap_or_default(),
            });
            continue;
        };
        let payload = change.payload.as_ref().map(Payload::as_str).unwrap_or_default();
        rows.uuid(change.tenant);
        rows.text(change.module.as_str());
        rows.text(&change.id.to_string());
        rows.text(payload);
        rows.count(index.fields.len());
        for (field, text) in &index.fields {
            rows.text(field);
            rows.text(text);
        }
        rows.count(index.numbers.len());
        for (field, number) in &index.numbers {
            rows.text(field);
            rows.i128(number.units());
        }
        rows.i64(change.created_at.as_micros());
        rows.i64(change.updated_at.as_micros());
        rows.u64(change.version.as_u64());
        rows.u8(u8::from(change.payload.is_none()));
        rows.u64(payload.len() as u64);
        rows.text(change.origin.topic.as_str());
        rows.i32(change.origin.partition);
        rows.i64(change.origin.offset);
        rows.u64(change.lsn);
    }
    rows.0
}

/// Names the block to the server, which drops a second insert of the same: of this table, this partition, these
/// offsets and this content. Without the content, other rows under the same offsets would be dropped too.
fn token(model: Uuid, block: &Block, rows: &[u8]) -> String {
    let mut hash = Sha256::new();
    let place = format!("{model}/{}/{:?}/", block.partition, block.offsets);
    hash.update(place.as_bytes());
    hash.update(rows);
    URL_SAFE_NO_PAD.encode(hash.finalize())
}

#[async_trait]
impl ReadModel for ClickHouseReadModel {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        let done = self.apply_blocks(blocks).await;
        self.noting(done).await
    }

    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        let (server, model) = self.current().await?;
        self.feed(model);
        let mut of = sync::read(server, model).await?.remove(topic).unwrap_or_default();
        of.synced.expect(partitions);
        let mut states = States::default();
        states.topic(model, topic, &of.synced);
        let done = states.insert(server).await;
        self.noting(done).await
    }

    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        let done = ask::list(self.ready().await?, of, page).await;
        self.noting(done).await
    }

    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        what.check()?;
        let done = ask::tally(self.ready().await?, of, what).await;
        self.noting(done).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        let done = scan::rows(self.ready().await?, scan).await;
        self.noting(done).await
    }

    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        let (server, model) = self.current().await?;
        let done = sync::last_sync_at(server, model, tenant).await;
        self.noting(done).await
    }

    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        let done = ask::version(self.ready().await?, tenant, module, id).await;
        self.noting(done).await
    }

    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        let (server, model) = self.current().await?;
        let done = sync::read(server, model).await;
        let topics = self.noting(done).await?;
        self.fed(model);
        // Whoever asks goes on from here: what others have under way is older from now on.
        self.write_seqs(|write_seqs| {
            for (topic, of) in &topics {
                for (number, _) in (0..).zip(&of.synced.pulses) {
                    let writer = of.places.get(&number).map_or(0, |place| place.writer);
                    let partition = Partition { topic: topic.clone(), number };
                    let write_seq = write_seqs.entry(partition).or_insert((writer + 1, 0));
                    // Somebody else may have the same number: who asked when nobody had written yet.
                    if write_seq.0 <= writer {
                        *write_seq = (writer + 1, 0);
                    }
                }
            }
        });
        Ok(sync::partitions(&topics))
    }

    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        let (server, model) = self.current().await?;
        let done = sync::rejected(server, model, limit).await;
        self.noting(done).await
    }

    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        let (server, model) = self.current().await?;
        let done = sync::drop_rejected(server, model, partition, offset).await;
        self.noting(done).await
    }

    async fn id(&self) -> Result<Option<Uuid>> {
        let (_, model) = self.current().await?;
        Ok(Some(model))
    }

    async fn generation(&self) -> Result<Option<u16>> {
        let server = self.ready().await?;
        let table = schema::of_rows(server).await;
        Ok(self.noting(table).await?.about(server)?.generation)
    }

    async fn second(&self, generation: u16, anew: bool) -> Result<Second> {
        let done = second::begin(self.ready().await?, generation, anew).await;
        self.noting(done).await
    }

    async fn unfinished(&self) -> Result<Option<String>> {
        let done = second::unfinished(self.ready().await?).await;
        self.noting(done).await
    }

    async fn now(&self) -> Result<Time> {
        ask::now(&self.0.server).await
    }

    async fn erasable(&self, of: &Subject) -> Result<u64> {
        let done = erase::count(self.ready().await?, of).await;
        self.noting(done).await
    }

    async fn erase(&self, of: &Subject) -> Result<u64> {
        let done = erase::erase(self.ready().await?, of).await;
        self.noting(done).await
    }

    async fn export_parquet(&self, of: &Selection, to: Pieces<'_>) -> Result<()> {
        let done = ask::parquet(self.ready().await?, of, to).await;
        self.noting(done).await
    }

    fn schema(&self) -> Vec<String> {
        schema::statements(self.0.server.database(), self.0.generation)
    }

    fn approximate(&self) -> Option<&'static str> {
        Some(APPROXIMATE)
    }

    fn durable(&self) -> bool {
        true
    }
}
