//! Reads JSON Lines from a file or from standard input.

use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;

use tokio::sync::mpsc;

use crate::failure::Failure;

/// How many lines to read ahead.
const AHEAD: usize = 1000;

/// A line and its number, or why reading ended.
pub type Line = Result<(u64, Vec<u8>), Failure>;

/// Reads the lines of a file, or of standard input if the path is missing or `-`. Skips blank
/// lines; a line of more than `max` bytes ends reading. Uses a separate thread, because standard
/// input may block for a long time.
pub fn read(path: Option<&Path>, max: usize) -> Result<mpsc::Receiver<Line>, Failure> {
    let source: Box<dyn Read + Send> = match path.filter(|path| path.as_os_str() != "-") {
        None => Box::new(std::io::stdin()),
        Some(path) => {
            let file = std::fs::File::open(path);
            Box::new(file.map_err(|e| Failure::input(format!("{} cannot be read: {e}", path.display())))?)
        }
    };
    let (send, lines) = mpsc::channel(AHEAD);
    std::thread::spawn(move || {
        let mut source = BufReader::new(source);
        for number in 1.. {
            let mut line = Vec::new();
            let read = (&mut source).take(max as u64 + 1).read_until(b'\n', &mut line);
            let line = match read {
                Ok(0) => return,
                Ok(_) if line.len() > max => Err(Failure::input(format!(
                    "line {number}: it has more than {max} bytes (--line-bytes-max)"
                ))),
                // A byte order mark is not part of the first line.
                Ok(_) => {
                    Ok((number, line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line).trim_ascii().to_vec()))
                }
                Err(error) => Err(Failure::input(format!("line {number}: it cannot be read: {error}"))),
            };
            let (last, blank) = (line.is_err(), matches!(&line, Ok((_, line)) if line.is_empty()));
            if (!blank && send.blocking_send(line).is_err()) || last {
                return;
            }
        }
    });
    Ok(lines)
}
