//! What a difference means: loss, corruption, a ghost, or a change that is still on its way.

use std::fmt;

use crate::analytics::{Row, Version};
use crate::clock::Time;

/// How a read model differs from a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// It lacks a version that was written before `lastSyncAt`.
    Lost {
        /// The version it should have.
        expected: Version,
        /// The version it has; `None`: it does not show the record.
        found: Option<Version>,
    },
    /// It has different content under the same version.
    Corrupt {
        /// The version.
        version: Version,
    },
    /// It has a record that is not there, or not any more since before `lastSyncAt`.
    Ghost {
        /// The version it has.
        found: Version,
    },
    /// It has a version that was never written.
    Ahead {
        /// The version it should have.
        expected: Version,
        /// The version it has.
        found: Version,
    },
    /// It differed until the wait was over, and `lastSyncAt` did not pass the change: it may be on its way.
    Late {
        /// The version it should have; `None`: the record is not there any more.
        expected: Option<Version>,
        /// The version it has; `None`: it does not show the record.
        found: Option<Version>,
    },
}

impl Difference {
    /// One word.
    pub fn kind(&self) -> &'static str {
        match self {
            Difference::Lost { .. } => "loss",
            Difference::Corrupt { .. } => "corruption",
            Difference::Ghost { .. } => "ghost",
            Difference::Ahead { .. } => "ahead",
            Difference::Late { .. } => "late",
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seq = |version: &Version| Shown(*version);
        match self {
            Difference::Lost { expected, found: None } => {
                write!(f, "is missing; it should have {}", seq(expected))
            }
            Difference::Lost { expected, found: Some(found) } => {
                write!(f, "has {}; it should have {}", seq(found), seq(expected))
            }
            Difference::Corrupt { version } => write!(f, "has different content under {}", seq(version)),
            Difference::Ghost { found } => write!(f, "has {}, but the record does not exist", seq(found)),
            Difference::Ahead { expected, found } => {
                write!(f, "has {}, which was never written; it should have {}", seq(found), seq(expected))
            }
            Difference::Late { expected, found } => {
                match found {
                    Some(found) => write!(f, "has {}", seq(found))?,
                    None => f.write_str("is missing")?,
                }
                match expected {
                    Some(expected) => write!(f, "; {}", seq(expected))?,
                    None => f.write_str("; its deletion")?,
                }
                f.write_str(" may be on its way: lastSyncAt has not passed it")
            }
        }
    }
}

/// A version for people: a generation is rarely another than the first.
struct Shown(Version);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seq {}", self.0.seq())?;
        if self.0.generation() == 1 { Ok(()) } else { write!(f, " of generation {}", self.0.generation()) }
    }
}

/// How a record differed. Once `lastSyncAt` has passed its time, the model must have caught up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Note {
    /// After the source was read, by the source's clock.
    at: Time,
    expected: Option<Version>,
    found: Option<Version>,
    /// Whether the model got to what was seen before: it follows.
    pub(super) moves: bool,
}

/// One look at a record. `lastSyncAt` is read first, then the model, then the source, then its clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look<'r> {
    pub(super) last_sync_at: Option<Time>,
    pub(super) model: Option<&'r Row>,
    /// The record, and when it was written.
    pub(super) source: Option<(&'r Row, Time)>,
    pub(super) at: Time,
}

/// What a look says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Equal,
    Differs(Difference),
    /// Look again. If there is no time for that, it differs like this.
    Open(Note, Difference),
}

/// Judges a look, by what was noted in an earlier one.
pub(super) fn judge(look: Look<'_>, note: Option<&Note>) -> Verdict {
    let (expected, found) = (look.source.map(|(row, _)| row.version), look.model.map(|row| row.version));
    if let (Some((source, _)), Some(model)) = (look.source, look.model) {
        if model.version == source.version {
            let version = model.version;
            return if model.hash == source.hash {
                Verdict::Equal
            } else {
                Verdict::Differs(Difference::Corrupt { version })
            };
        }
        // The source was read after the model, so it has whatever the model got.
        if model.version > source.version {
            let (expected, found) = (source.version, model.version);
            return Verdict::Differs(Difference::Ahead { expected, found });
        }
    }
    let difference = match (expected, found) {
        (None, None) => return Verdict::Equal,
        (None, Some(found)) => Difference::Ghost { found },
        (Some(expected), found) => Difference::Lost { expected, found },
    };
    let fresh = Note { at: look.at, expected, found, moves: note.is_some_and(|note| note.moves) };
    let passed = |time| look.last_sync_at.is_some_and(|last| last > time);
    match note.filter(|note| passed(note.at)) {
        Some(note) if note.still(expected, found) => Verdict::Differs(difference),
        Some(_) => Verdict::Open(Note { moves: true, ..fresh }, late(expected, found)),
        None => {
            // A write carries a time before its commit, so that alone proves nothing while time is left.
            let old = look.source.is_some_and(|(_, written)| passed(written));
            let last = if old { difference } else { late(expected, found) };
            Verdict::Open(note.copied().unwrap_or(fresh), last)
        }
    }
}

fn late(expected: Option<Version>, found: Option<Version>) -> Difference {
    Difference::Late { expected, found }
}

impl Note {
    /// Whether the model has not got to what was noted. It does not show deletions, so a record that it does
    /// not show may have been deleted and written again.
    fn still(&self, expected: Option<Version>, found: Option<Version>) -> bool {
        match (self.expected, found) {
            (Some(noted), Some(found)) => found < noted,
            (Some(noted), None) => expected == Some(noted),
            (None, found) => found.is_some() && found == self.found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Name;

    fn row(seq: u64, payload: &str) -> Row {
        let name: Name = "00000000-0000-0000-0000-000000000000:orders:0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10"
            .parse()
            .unwrap();
        let times = (Time::from_millis(1), Time::from_millis(1));
        Row::new(name, Version::new(1, seq).unwrap(), times, payload.as_bytes()).unwrap()
    }

    /// A look at seqs: `synced` and `at` are seconds, and a record was written at second 1.
    fn look(synced: i64, model: Option<u64>, source: Option<u64>, at: i64, note: Option<&Note>) -> Verdict {
        let (model, source) = (model.map(|seq| row(seq, "{}")), source.map(|seq| row(seq, "{}")));
        let second = |second: i64| Time::from_millis(second * 1000);
        let look = Look {
            last_sync_at: (synced > 0).then(|| second(synced)),
            model: model.as_ref(),
            source: source.as_ref().map(|row| (row, second(1))),
            at: second(at),
        };
        judge(look, note)
    }

    fn open(verdict: Verdict) -> (Note, Difference) {
        let Verdict::Open(note, last) = verdict else { panic!("{verdict:?} is decided") };
        (note, last)
    }

    fn kind(verdict: Verdict) -> &'static str {
        let Verdict::Differs(difference) = verdict else { panic!("{verdict:?} does not differ") };
        difference.kind()
    }

    #[test]
    fn what_is_equal_or_impossible_is_decided_at_once() {
        assert_eq!(look(0, None, None, 5, None), Verdict::Equal);
        assert_eq!(look(0, Some(2), Some(2), 5, None), Verdict::Equal);
        assert_eq!(kind(look(0, Some(3), Some(2), 5, None)), "ahead");
        let (model, source, at) = (row(2, "{}"), row(2, r#"{"a":1}"#), Time::from_millis(1));
        let look = Look { last_sync_at: None, model: Some(&model), source: Some((&source, at)), at };
        assert_eq!(kind(judge(look, None)), "corruption");
    }

    /// A write that was seen at second 5 is lost if the model lacks it once `lastSyncAt` is past that.
    #[test]
    fn what_last_sync_at_has_passed_is_lost() {
        for model in [None, Some(1)] {
            let (note, _) = open(look(9, model, Some(2), 5, None));
            let (note, _) = open(look(5, model, Some(2), 6, Some(&note)));
            assert_eq!(kind(look(6, model, Some(2), 7, Some(&note))), "loss");
            assert_eq!(look(6, Some(2), Some(2), 7, Some(&note)), Verdict::Equal);
        }
        let (note, _) = open(look(9, Some(1), None, 5, None));
        assert_eq!(kind(look(6, Some(1), None, 7, Some(&note))), "ghost");
        assert_eq!(look(6, None, None, 7, Some(&note)), Verdict::Equal, "its deletion has arrived");
    }

    #[test]
    fn what_follows_is_in_motion() {
        let (note, _) = open(look(4, Some(1), Some(2), 5, None));
        let (note, _) = open(look(6, Some(2), Some(3), 7, Some(&note)));
        assert!(note.moves, "it has got to 2");
        assert_eq!(kind(look(8, Some(2), Some(4), 9, Some(&note))), "loss", "3 was seen at 7");
        // Deleted and created again: the model shows neither the old nor the new one for a while.
        let (note, _) = open(look(4, None, Some(2), 5, None));
        assert!(open(look(6, None, Some(4), 7, Some(&note))).0.moves);
        let (note, _) = open(look(4, Some(2), None, 5, None));
        assert!(open(look(6, Some(4), None, 7, Some(&note))).0.moves);
    }

    /// A model whose feed has stopped: the time of the write decides in the end.
    #[test]
    fn without_a_pulse_the_time_of_the_write_decides_in_the_end() {
        assert_eq!(open(look(3, None, Some(2), 5, None)).1.kind(), "loss");
        assert_eq!(open(look(1, None, Some(2), 5, None)).1.kind(), "late");
        assert_eq!(open(look(0, Some(1), Some(2), 5, None)).1.kind(), "late");
        assert_eq!(open(look(3, Some(1), None, 5, None)).1.kind(), "late");
    }
}
