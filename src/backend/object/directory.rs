//! A directory as an object store: each object is a file. A write is acknowledged once the file and
//! its directory are synced.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use async_trait::async_trait;
use bytes::Bytes;

use super::store::{Listed, Now, Objects};
use crate::clock::{Clock, SystemClock, Time};
use crate::error::{Error, Result};

/// Where files are written before they get their names.
const UNNAMED: &str = "tmp";

/// A directory on this machine. Several processes may share it. Several machines should not, since
/// the machine's clock orders events.
#[derive(Debug, Clone)]
pub struct Directory {
    root: Arc<PathBuf>,
    clock: Arc<dyn Clock>,
}

impl Directory {
    /// Opens a directory, creating it if it is missing.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        let opened = make_directory(&root.join(UNNAMED)).and_then(|()| remove_leftovers(&root.join(UNNAMED)));
        opened.map_err(|e| failed("opening", &root.display().to_string(), e))?;
        Ok(Directory { root: Arc::new(root), clock: Arc::new(SystemClock) })
    }

    /// Runs file operations on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        doing: &'static str,
        name: &str,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let root = Arc::clone(&self.root);
        let done = tokio::task::spawn_blocking(move || work(&root)).await;
        let done = done.unwrap_or_else(|e| Err(io::Error::other(e)));
        done.map_err(|e| failed(doing, &self.root.join(name).display().to_string(), e))
    }
}

fn failed(doing: &str, name: &str, error: io::Error) -> Error {
    use io::ErrorKind as Kind;
    let what = format!("{doing} {name}");
    match error.kind() {
        Kind::PermissionDenied
        | Kind::ReadOnlyFilesystem
        | Kind::StorageFull
        | Kind::QuotaExceeded
        | Kind::NotADirectory
        | Kind::AlreadyExists => Error::Refused { what, source: Some(error.into()) },
        _ => Error::unavailable(what, error),
    }
}

/// Creates a directory and its parents, for their owner alone, and syncs the parent of each new one.
fn make_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_directory(above)?;
    let mut private = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut private, 0o700);
    match private.create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists || !path.is_dir() => Err(e),
        _ => sync_directory(above), // the second creator cannot rely on the first having synced
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes files of writers that were killed before they named them. No write takes a day.
fn remove_leftovers(unnamed: &Path) -> io::Result<()> {
    const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    for file in fs::read_dir(unnamed)? {
        let file = file?;
        let Ok(written) = file.metadata().and_then(|meta| meta.modified()) else { continue };
        if written.elapsed().is_ok_and(|age| age > DAY) {
            let _ = fs::remove_file(file.path()); // another process may have removed it
        }
    }
    Ok(())
}

/// Writes a temporary file and passes it to `name_it`.
fn write<T>(
    root: &Path,
    name: &str,
    body: &[u8],
    name_it: impl FnOnce(&Path, &Path) -> io::Result<T>,
) -> io::Result<T> {
    let unnamed = root.join(UNNAMED).join(uuid::Uuid::new_v4().simple().to_string());
    let to = root.join(name);
    let within = to.parent().unwrap_or(root).to_owned();
    make_directory(&within)?;
    let mut private = fs::OpenOptions::new();
    private.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut private, 0o600);
    let written = private.open(&unnamed).and_then(|mut file| {
        file.write_all(body)?;
        file.sync_all()
    });
    let named = written.and_then(|()| name_it(&unnamed, &to));
    let _ = fs::remove_file(&unnamed); // fails if it was renamed
    let named = named?;
    sync_directory(&within)?;
    Ok(named)
}

/// Collects up to `limit` names after `after`, in order. Does not open directories that sort before
/// it.
fn walk(
    root: &Path,
    within: &str,
    prefix: &str,
    after: &str,
    limit: usize,
    found: &mut Vec<Listed>,
) -> io::Result<()> {
    let mut names = Vec::new();
    let entries = match fs::read_dir(root.join(within)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let Ok(file) = entry.file_name().into_string() else { continue };
        let is_directory = entry.file_type()?.is_dir();
        let name = if is_directory { format!("{within}{file}/") } else { format!("{within}{file}") };
        let wanted = name.starts_with(prefix) || (is_directory && prefix.starts_with(&name));
        let before = name.as_str() <= after && !(is_directory && after.starts_with(&name));
        if wanted && !before && name != format!("{UNNAMED}/") {
            names.push(name);
        }
    }
    names.sort_unstable();
    for name in names {
        if found.len() >= limit {
            return Ok(());
        }
        if name.ends_with('/') {
            walk(root, &name, prefix, after, limit, found)?;
            continue;
        }
        match fs::metadata(root.join(&name)).and_then(|meta| meta.modified()) {
            Ok(written) => {
                let since = written.duration_since(UNIX_EPOCH).unwrap_or_default();
                let at = Time::from_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
                found.push(Listed { name, at });
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {} // removed meanwhile
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[async_trait]
impl Objects for Directory {
    async fn create(&self, name: &str, body: Bytes) -> Result<bool> {
        let file = name.to_owned();
        let link = |from: &Path, to: &Path| match fs::hard_link(from, to) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            linked => linked.map(|()| true),
        };
        self.blocking("creating", name, move |root| write(root, &file, &body, link)).await
    }

    async fn put(&self, name: &str, body: Bytes) -> Result<()> {
        let file = name.to_owned();
        let rename = |from: &Path, to: &Path| fs::rename(from, to);
        self.blocking("writing", name, move |root| write(root, &file, &body, rename)).await
    }

    async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        let file = name.to_owned();
        let read = move |root: &Path| match fs::read(root.join(file)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(|bytes| Some(bytes.into())),
        };
        self.blocking("reading", name, read).await
    }

    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>> {
        let (prefix, after) = (prefix.to_owned(), after.to_owned());
        let listed = move |root: &Path| {
            let within = prefix.rfind('/').map_or("", |at| &prefix[..=at]);
            let mut found = Vec::new();
            walk(root, within, &prefix, &after, limit, &mut found)?;
            Ok(found)
        };
        self.blocking("listing", "", listed).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let file = name.to_owned();
        let remove = move |root: &Path| match fs::remove_file(root.join(file)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
        self.blocking("removing", name, remove).await
    }

    async fn now(&self) -> Result<Now> {
        let now = self.clock.now();
        Ok(Now { low: now, high: now, about: now })
    }

    fn grain_ms(&self) -> u64 {
        10 // the kernel stamps files with the time of its last tick
    }

    fn skew_ms(&self) -> u64 {
        0
    }

    fn durable(&self) -> bool {
        true
    }

    fn about(&self) -> String {
        self.root.display().to_string()
    }
}
