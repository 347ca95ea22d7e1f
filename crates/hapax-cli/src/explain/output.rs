//! The file of a report: written whole or not at all, and readable by its owner.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::print;

/// How many names to try for the part file.
const ATTEMPTS_MAX: u32 = 100;

/// A file that can be written to.
pub struct File {
    /// As it was given.
    given: String,
    /// Behind symbolic links.
    path: PathBuf,
}

impl File {
    /// Checks the place before anything is asked. What is there and is not a file is never replaced.
    pub fn new(given: &Path) -> Result<Self, Failure> {
        let shown = print::escaped(&given.display().to_string());
        let path = match given.canonicalize() {
            Ok(path) => path,
            Err(error) if error.kind() == io::ErrorKind::NotFound && given.symlink_metadata().is_err() => {
                given.to_owned()
            }
            Err(error) => return Err(Failure::config(format!("--html {shown}: {error}"))),
        };
        if path.metadata().is_ok_and(|about| !about.is_file()) {
            return Err(Failure::config(format!("--html {shown} is not a file; name one, or a new one")));
        }
        Ok(File { given: shown, path })
    }

    pub fn write(&self, page: &str) -> Result<(), Failure> {
        let failed =
            |error: io::Error| Failure::dependency("output", format!("--html {}: {error}", self.given));
        let (part, mut file) = self.part().map_err(failed)?;
        let written = file
            .write_all(page.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&part, &self.path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&part); // what matters is told
            failed(error)
        })
    }

    /// A new file beside it, which nobody else has.
    fn part(&self) -> io::Result<(PathBuf, std::fs::File)> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        for number in 0..ATTEMPTS_MAX {
            let mut part = self.path.clone().into_os_string();
            part.push(format!(".{}-{number}.part", std::process::id()));
            match options.open(&part) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => return other.map(|file| (part.into(), file)),
            }
        }
        Err(io::Error::from(io::ErrorKind::AlreadyExists))
    }
}
