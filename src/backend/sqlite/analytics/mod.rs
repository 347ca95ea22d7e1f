//! A read model in an SQLite file: the current version of every record, for one machine.
//!
//! Each batch of blocks is one transaction, durable before the offsets are committed. Sums and groups
//! are computed from the payloads of the selected rows, one by one.

mod rows;
mod schema;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use rusqlite::Connection;

use super::connect::{self, Access, immediate};
use super::{Threads, answer, reader};
use crate::analytics::{
    Block, Groups, ListPage, PartitionSync, ReadModel, RejectedEntry, Row, Selection, Tally, Uuid, Version,
};
use crate::bus::Partition;
use crate::clock::{Clock, SystemClock, Time};
use crate::erase::Subject;
use crate::error::{Error, Result};
use crate::id::Topic;
use crate::records::{Listed, ModuleSlug, Scan};

const FILE: &str = "file of a read model";

/// A read model in an SQLite file. Clones share its connections.
#[derive(Clone)]
pub struct SqliteReadModel(Arc<Inner>);

struct Inner {
    // Dropped before `_threads`, so that the thread ends before it is joined.
    read: reader::Questions,
    _threads: Threads,
    write: Mutex<Connection>,
    clock: Arc<dyn Clock>,
    path: PathBuf,
}

impl fmt::Debug for SqliteReadModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteReadModel").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl SqliteReadModel {
    /// Opens the file, makes it if it is missing, and brings its tables up to date.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        SqliteReadModel::open_with_clock(path, Arc::new(SystemClock))
    }

    /// The same, and a file that has no rows yet takes rows of this generation only.
    pub fn open_for(path: impl AsRef<Path>, generation: u16) -> Result<Self> {
        let model = SqliteReadModel::open(path)?;
        {
            let conn = model.0.write.lock().unwrap_or_else(PoisonError::into_inner);
            if schema::generation(&conn)?.is_none() {
                immediate(&conn, "noting the generation of a read model", || {
                    schema::of_generation(&conn, generation)
                })?;
            }
        }
        Ok(model)
    }

    /// Opens a file that is there. It never makes one.
    pub fn open_existing(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = connect::open_file(path, Access::Read, FILE)?;
        if !schema::PART.is_there(&found)? {
            let message = format!("there is no read model in {}; `hapax serve` makes one", path.display());
            return Err(Error::Schema(message));
        }
        drop(found);
        SqliteReadModel::open(path)
    }

    /// Opens the file with a clock of your own.
    pub fn open_with_clock(path: impl AsRef<Path>, clock: Arc<dyn Clock>) -> Result<Self> {
        let path = path.as_ref();
        let write = connect::open_file(path, Access::Write, FILE)?;
        connect::must_hold_no_bus(&write, "read model")?;
        schema::PART.is_current(&write)?; // refuses an unknown schema before anything is changed
        connect::make_durable(&write)?;
        schema::PART.migrate(&write, &[("id", Uuid::new_v4().as_bytes())], || Ok(()))?;
        let read = connect::open_file(path, Access::Write, FILE)?;
        let failed = |error| Error::unavailable("starting the thread of a read model", error);
        let (read, reading) = reader::start(read).map_err(failed)?;
        Ok(SqliteReadModel(Arc::new(Inner {
            read,
            _threads: Threads(vec![reading]),
            write: Mutex::new(write),
            clock,
            path: path.to_owned(),
        })))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    async fn write<T: Send + 'static>(
        &self,
        what: &'static str,
        run: impl Fn(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.0);
        let work = move || {
            let conn = inner.write.lock().unwrap_or_else(PoisonError::into_inner);
            immediate(&conn, what, || run(&conn))
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| Err(Error::unavailable(what, error)))
    }
}

#[async_trait]
impl ReadModel for SqliteReadModel {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        let blocks = blocks.to_vec();
        self.write("applying changes to a read model", move |conn| {
            let generation = schema::generation(conn)?;
            for block in &blocks {
                block.must_be_of(generation)?;
                rows::apply(conn, block)?;
                crate::crash_point!("analytics.applied");
            }
            Ok(())
        })
        .await
    }

    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        let topic = topic.clone();
        let what = "noting the partitions of a topic";
        self.write(what, move |conn| rows::expect(conn, &topic, partitions)).await
    }

    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        let of = of.clone();
        answer(self.0.read.send(move |conn| rows::list(conn, &of, page))).await
    }

    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        what.check()?;
        let (of, what) = (of.clone(), what.clone());
        answer(self.0.read.send(move |conn| rows::tally(conn, &of, &what))).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        let scan = scan.clone();
        answer(self.0.read.send(move |conn| rows::scan(conn, &scan))).await
    }

    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        answer(self.0.read.send(move |conn| rows::last_sync_at(conn, tenant))).await
    }

    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        let module = module.clone();
        answer(self.0.read.send(move |conn| rows::version(conn, tenant, &module, id))).await
    }

    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        answer(self.0.read.send(rows::partitions)).await
    }

    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        answer(self.0.read.send(move |conn| rows::rejected(conn, limit))).await
    }

    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        let partition = partition.clone();
        let what = "giving a rejected change up";
        self.write(what, move |conn| rows::drop_rejected(conn, &partition, offset)).await
    }

    async fn id(&self) -> Result<Option<Uuid>> {
        answer(self.0.read.send(|conn| schema::id(conn).map(Some))).await
    }

    async fn generation(&self) -> Result<Option<u16>> {
        answer(self.0.read.send(schema::generation)).await
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.0.clock.now())
    }

    async fn erasable(&self, of: &Subject) -> Result<u64> {
        let of = of.clone();
        answer(self.0.read.send(move |conn| rows::erasable(conn, &of))).await
    }

    async fn erase(&self, of: &Subject) -> Result<u64> {
        let of = of.clone();
        // A row has one version, so the deletion has replaced the content already.
        self.write("erasing rejected changes", move |conn| rows::erase_rejected(conn, &of)).await
    }

    fn schema(&self) -> Vec<String> {
        schema::statements()
    }

    fn durable(&self) -> bool {
        true
    }
}
