//! Reads files in a separate thread: large reads, cut at the last newline, and ids extracted while
//! the lines are still in cache.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use hapax::words::counted;
use hapax::{EventId, Time};
use memchr::{memchr, memchr_iter, memrchr};

use super::scan::Scan;
use crate::failure::Failure;

const READ_BYTES: usize = 256 * 1024;
/// How many blocks may wait; with the size of a block, this bounds memory.
const BLOCKS_MAX: usize = 48;

/// Whole lines of one file.
#[derive(Debug)]
pub struct Block {
    /// The file's name, for messages.
    pub name: Arc<str>,
    bytes: Vec<u8>,
    /// The lines.
    pub lines: Vec<Line>,
}

impl Block {
    /// A line's bytes, without its newline.
    pub fn bytes(&self, line: &Line) -> &[u8] {
        &self.bytes[line.start..line.end]
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// The location and content of a line.
#[derive(Debug)]
pub struct Line {
    start: usize,
    end: usize,
    /// Its number in its file, from 1.
    pub number: u64,
    /// Whether the line ends here; an overlong line comes in pieces.
    pub ends: bool,
    /// Its content.
    pub what: What,
}

/// The content of a line.
#[derive(Debug)]
pub enum What {
    /// An event.
    Event(EventId, Option<Time>),
    /// Not an event, and why.
    Broken(String),
    /// The rest of a line that was rejected for its length.
    Rest,
    /// Only white space.
    Blank,
}

/// Starts reading; `-` is standard input.
pub fn start(
    files: Vec<PathBuf>,
    scan: Scan,
    line_bytes_max: usize,
) -> Result<Receiver<Result<Block, Failure>>, Failure> {
    let (send, receive) = sync_channel(BLOCKS_MAX);
    std::thread::Builder::new()
        .name("reader".into())
        .spawn(move || {
            for path in files {
                let mut reader = Reader::new(&path, &scan, line_bytes_max);
                let ended = match open(&path) {
                    Ok(file) => reader.run(file, &send),
                    Err(failure) => Err(failure),
                };
                match ended {
                    Ok(true) => {}
                    Ok(false) => return, // the receiver is gone
                    Err(failure) => {
                        let _ = send.send(Err(failure)); // the receiver may be gone
                        return;
                    }
                }
            }
        })
        .map_err(|e| Failure::dependency("runtime", format!("no thread for reading: {e}")))?;
    Ok(receive)
}

fn open(path: &PathBuf) -> Result<Box<dyn Read>, Failure> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(std::io::stdin()));
    }
    match File::open(path) {
        Ok(file) => Ok(Box::new(file)),
        Err(e) => Err(Failure::config(format!("{} cannot be opened: {e}", path.display()))),
    }
}

struct Reader<'s> {
    name: Arc<str>,
    scan: &'s Scan,
    line_bytes_max: usize,
    lines: u64,
    /// Whether the current line was already reported as too long.
    skipping: bool,
}

impl<'s> Reader<'s> {
    fn new(path: &std::path::Path, scan: &'s Scan, line_bytes_max: usize) -> Self {
        let name = if path.as_os_str() == "-" { "stdin".into() } else { path.display().to_string() };
        Reader { name: name.into(), scan, line_bytes_max, lines: 0, skipping: false }
    }

    /// Reads to the end. Returns false if the receiver is gone.
    fn run(
        &mut self,
        mut file: Box<dyn Read>,
        send: &SyncSender<Result<Block, Failure>>,
    ) -> Result<bool, Failure> {
        let mut buffer = Vec::new();
        loop {
            let kept = buffer.len();
            buffer.resize(kept + READ_BYTES, 0);
            let read = match file.read(&mut buffer[kept..]) {
                Ok(read) => read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {
                    buffer.truncate(kept);
                    continue;
                }
                Err(e) => return Err(Failure::dependency("input", format!("{}: {e}", self.name))),
            };
            buffer.truncate(kept + read);
            let cut = if read == 0 {
                Some(buffer.len())
            } else if let Some(at) = memrchr(b'\n', &buffer[kept..]) {
                Some(kept + at + 1)
            } else if buffer.len() > self.line_bytes_max || self.skipping {
                Some(buffer.len())
            } else {
                None
            };
            if let Some(cut) = cut {
                let tail = buffer.split_off(cut);
                let bytes = std::mem::replace(&mut buffer, tail);
                if !bytes.is_empty() && send.send(Ok(self.block(bytes))).is_err() {
                    return Ok(false);
                }
            }
            if read == 0 {
                return Ok(true);
            }
        }
    }

    fn block(&mut self, bytes: Vec<u8>) -> Block {
        let mut lines = Vec::with_capacity(bytes.len() / 128);
        let mut start = 0;
        if self.skipping {
            let end = memchr(b'\n', &bytes);
            let stop = end.unwrap_or(bytes.len());
            lines.push(Line {
                start: 0,
                end: stop,
                number: self.lines,
                ends: end.is_some(),
                what: What::Rest,
            });
            start = end.map_or(bytes.len(), |end| end + 1);
            self.skipping = end.is_none();
        }
        let from = start;
        for end in memchr_iter(b'\n', &bytes[from..]).map(|at| from + at) {
            lines.push(self.line(&bytes, start, end));
            start = end + 1;
        }
        if start < bytes.len() {
            // No newline: the last line of the file, or an overlong one.
            let line = self.line(&bytes, start, bytes.len());
            self.skipping = bytes.len() - start > self.line_bytes_max;
            lines.push(Line { ends: !self.skipping, ..line });
        }
        Block { name: Arc::clone(&self.name), bytes, lines }
    }

    fn line(&mut self, bytes: &[u8], mut start: usize, end: usize) -> Line {
        self.lines += 1;
        let number = self.lines;
        if bytes[start..end].starts_with(b"\xef\xbb\xbf") {
            start += 3; // a byte order mark is not part of a line; concatenated files can have several
        }
        let text = &bytes[start..end];
        let what = if text.len() > self.line_bytes_max {
            let max = counted(self.line_bytes_max as u64, "byte", "bytes");
            What::Broken(format!("it is longer than {max}"))
        } else if text.iter().all(u8::is_ascii_whitespace) {
            What::Blank
        } else {
            match self.scan.line(text.strip_suffix(b"\r").unwrap_or(text)) {
                Ok((id, time)) => What::Event(id, time),
                Err(problem) => What::Broken(problem),
            }
        };
        Line { start, end, number, ends: true, what }
    }
}
