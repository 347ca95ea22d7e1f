//! Writes lines, and makes sure that they have left the process.

use std::fs::File;
use std::io::{self, Write};

use crate::failure::Failure;
use crate::signal::Gate;

const FLUSH_BYTES: usize = 256 * 1024;

/// Standard output with a buffer of whole lines.
pub struct Output {
    file: File,
    kind: Kind,
    buffer: Vec<u8>,
    gate: Gate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Regular,
    Pipe,
    Other,
}

impl Output {
    /// Takes over standard output.
    pub fn new(gate: &Gate) -> Result<Self, Failure> {
        let file = stdout_file().map_err(|e| Failure::output(&e))?;
        let kind = file.metadata().map_or(Kind::Other, |meta| kind(&meta));
        Ok(Output { file, kind, buffer: Vec::with_capacity(FLUSH_BYTES * 2), gate: gate.clone() })
    }

    /// Adds a line.
    pub fn line(&mut self, line: &[u8]) -> io::Result<()> {
        self.buffer.extend_from_slice(line);
        self.buffer.push(b'\n');
        if self.buffer.len() >= FLUSH_BYTES { self.flush() } else { Ok(()) }
    }

    /// Writes everything out, in whole lines.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let _held = self.gate.hold();
        self.file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Flushes, then makes as sure as possible that the lines outlive this process: syncs a file,
    /// or waits until the reader of a pipe has read them. If that reader has left, the error is a
    /// broken pipe.
    pub fn settle(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.kind {
            Kind::Regular => self.file.sync_data(),
            Kind::Pipe => taken(&self.file),
            Kind::Other => Ok(()),
        }
    }
}

#[cfg(unix)]
fn stdout_file() -> io::Result<File> {
    use std::os::fd::AsFd as _;
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

#[cfg(windows)]
fn stdout_file() -> io::Result<File> {
    use std::os::windows::io::AsHandle as _;
    Ok(File::from(io::stdout().as_handle().try_clone_to_owned()?))
}

#[cfg(unix)]
fn kind(meta: &std::fs::Metadata) -> Kind {
    use std::os::unix::fs::FileTypeExt as _;
    if meta.is_file() {
        Kind::Regular
    } else if meta.file_type().is_fifo() {
        Kind::Pipe
    } else {
        Kind::Other
    }
}

#[cfg(not(unix))]
fn kind(meta: &std::fs::Metadata) -> Kind {
    if meta.is_file() { Kind::Regular } else { Kind::Other }
}

/// Waits until the pipe is empty.
#[cfg(unix)]
fn taken(file: &File) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut pause_us = 20;
    loop {
        match rustix::io::ioctl_fionread(file) {
            Ok(0) | Err(_) => return Ok(()), // an error: this system cannot tell
            Ok(_) => {}
        }
        let mut watched = [PollFd::new(file, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let asked = poll(&mut watched, Some(&at_once));
        if asked.is_ok() && watched[0].revents().contains(PollFlags::ERR) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        std::thread::sleep(std::time::Duration::from_micros(pause_us));
        pause_us = (pause_us * 2).min(2000);
    }
}

#[cfg(not(unix))]
fn taken(_: &File) -> io::Result<()> {
    Ok(())
}
