//! Appends are checked here, sent as columns, and decided by the SQL function. A batch that meets a
//! lock is split, so that one aggregate in a long transaction does not hold the others back.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use sqlx::{AssertSqlSafe, PgTransaction};

use super::{Inner, fail};
use crate::backend::postgres::codes::{count, from_row, numbered, tenant_text};
use crate::backend::postgres::database::Select;
use crate::backend::postgres::error::Meaning;
use crate::backend::postgres::executor::{Batch, Executor, Locked};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Headers};
use crate::id::Kind;
use crate::journal::{Append, Appended, Expected, JournalSettings, Placed, Placing, Position, Ready};
use crate::ledger::MismatchRule;

/// How long an append waits for the lock of its aggregate.
const WAIT: &str = "2s";
/// How long an append waits in a batch, where it holds the others back.
const WAIT_AMONG_MANY: &str = "100ms";
/// The most events in one statement; an append is never split.
const EVENTS_MAX: usize = 1000;
/// The most payload bytes in one statement, except for a single append.
const BYTES_MAX: usize = 16 << 20;

numbered! {
    /// What became of an event.
    enum Decided {
        New = 1,
        Repeat = 2,
        /// Its id is in the journal with other content, and the rule is to keep that.
        Kept = 3,
        /// Refused: the aggregate is at another seq than the append expects.
        Conflict = 4,
        /// Refused: its id is in the journal with other content.
        Mismatch = 5,
        /// Refused: another seq is next than the event's own.
        WrongSeq = 6,
    }
}

from_row! { "o_",
    /// One row of an answer.
    struct Answer {
        /// The place of the event in the statement, from 1.
        event: i32,
        kind: Decided,
        seq: Option<i64>,
        position: Option<i64>,
    }
}

pub(super) async fn append_in(
    inner: &Inner,
    tx: &mut PgTransaction<'_>,
    append: &Append,
) -> Result<Appended> {
    let ready = [append.check(&inner.settings.journal)?];
    let columns = Columns::of(&ready, inner);
    let query = columns.query(inner, WAIT).persistent(!inner.database.pooled());
    let answers = query.fetch_all(&mut **tx).await.map_err(|e| fail("appending", e))?;
    let mut outcomes = outcomes(&inner.settings.journal, &ready, &answers);
    outcomes.pop().unwrap_or_else(|| Err(Error::Corrupt("an append without an answer".into())))
}

pub(super) async fn append_many(inner: &Arc<Inner>, appends: &[Append]) -> Vec<Result<Appended>> {
    let mut answers: Vec<Option<Result<Appended>>> = Vec::with_capacity(appends.len());
    let (mut ready, mut places) = (Vec::with_capacity(appends.len()), Vec::with_capacity(appends.len()));
    for (place, append) in appends.iter().enumerate() {
        match append.check(&inner.settings.journal) {
            Ok(one) => {
                answers.push(None);
                ready.push(one);
                places.push(place);
            }
            Err(error) => answers.push(Some(Err(error))),
        }
    }
    let mut executor = Executor::new(&inner.database);
    let (mut begin, mut failed) = (0, None);
    while begin < ready.len() && failed.is_none() {
        let batch = begin..begin + batch_length(&ready[begin..]);
        begin = batch.end;
        let (ready, places) = (&ready[batch.clone()], &places[batch]);
        let mut batch = Appends { inner, ready, places, answers: &mut answers };
        failed = executor.run(&mut batch).await.err();
    }
    if answers.iter().flatten().any(|answer| answer.as_ref().is_ok_and(|appended| !appended.is_repeat())) {
        super::wake::wake(inner);
    }
    // What follows a failure was not sent: an aggregate's appends keep their order.
    let error = failed.unwrap_or_else(|| Error::Corrupt("an append without an answer".into()));
    answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(error.copy()))).collect()
}

/// How many of the first appends go into one statement: as many as fit, as long as none repeats an
/// id of an earlier one.
fn batch_length(ready: &[Ready<'_>]) -> usize {
    let (mut ids, mut events, mut bytes) = (HashSet::new(), 0, 0);
    for (count, one) in ready.iter().enumerate() {
        let append = one.append;
        events += append.events.len();
        bytes += append.events.iter().map(|event| event.payload.len()).sum::<usize>();
        let known = append.events.iter().any(|event| ids.contains(&(append.tenant.as_ref(), &event.id)));
        if count > 0 && (known || events > EVENTS_MAX || bytes > BYTES_MAX) {
            return count;
        }
        ids.extend(append.events.iter().map(|event| (append.tenant.as_ref(), &event.id)));
    }
    ready.len()
}

/// Appends that share a statement. Two appends to one aggregate are never reordered.
struct Appends<'a, 'o> {
    inner: &'a Inner,
    ready: &'a [Ready<'a>],
    /// Their places in the caller's list, and so in `answers`.
    places: &'a [usize],
    answers: &'o mut [Option<Result<Appended>>],
}

impl Batch for Appends<'_, '_> {
    /// A single append has waited for its lock for long enough.
    const LOCKED: Locked = Locked::Fails;

    type Answer = Answer;

    fn len(&self) -> usize {
        self.ready.len()
    }

    async fn send(&self, executor: &mut Executor<'_>, part: Range<usize>) -> sqlx::Result<Vec<Answer>> {
        let columns = Columns::of(&self.ready[part], self.inner);
        let wait = if columns.heads.len() > 1 { WAIT_AMONG_MANY } else { WAIT };
        crate::crash_point!("append.sending");
        let answers = executor.fetch_all(columns.query(self.inner, wait)).await?;
        crate::crash_point!("append.answered");
        Ok(answers)
    }

    fn answered(&mut self, part: Range<usize>, answers: Vec<Answer>) -> Result<()> {
        let outcomes = outcomes(&self.inner.settings.journal, &self.ready[part.clone()], &answers);
        for (place, outcome) in self.places[part].iter().zip(outcomes) {
            self.answers[*place] = Some(outcome);
        }
        Ok(())
    }

    fn failed(&mut self, at: usize, _: Meaning, error: Error) {
        self.answers[self.places[at]] = Some(Err(error));
    }

    fn error(&self, error: sqlx::Error) -> Error {
        fail("appending", error)
    }
}

/// Events, column by column. An event that occurs twice in an append is sent once.
struct Columns<'a> {
    /// Each aggregate once, ordered by bytes.
    heads: BTreeMap<(&'a str, &'a str), i32>,
    warn: bool,
    appends: Vec<i32>,
    slots: Vec<i32>,
    expected: Vec<Option<i64>>,
    tenants: Vec<&'a str>,
    aggregates: Vec<&'a str>,
    ids: Vec<std::borrow::Cow<'a, [u8]>>,
    fingerprints: Vec<&'a [u8]>,
    seqs: Vec<Option<i64>>,
    kinds: Vec<Option<&'a str>>,
    times: Vec<Option<i64>>,
    payloads: Vec<&'a [u8]>,
    names: Vec<Option<String>>,
    values: Vec<Option<String>>,
    traces: Vec<Option<String>>,
}

impl<'a> Columns<'a> {
    fn of(ready: &'a [Ready<'_>], inner: &Inner) -> Self {
        let head = |one: &Ready<'a>| (tenant_text(one.append.tenant.as_ref()), one.append.aggregate.as_str());
        let mut heads: BTreeMap<_, i32> = ready.iter().map(|one| (head(one), 0)).collect();
        for (slot, number) in heads.values_mut().zip(1..) {
            *slot = number;
        }
        let events =
            || ready.iter().zip(1..).flat_map(|(one, append)| firsts(one).map(move |at| (one, append, at)));
        let column = |value: &dyn Fn(&'a Event) -> Option<String>| {
            events().map(|(one, _, at)| value(&one.append.events[at])).collect::<Vec<_>>()
        };
        let each = || events().map(|(one, _, at)| &one.append.events[at]);
        Columns {
            warn: inner.settings.journal.mismatch == MismatchRule::Warn,
            appends: events().map(|(_, append, _)| append).collect(),
            slots: events().map(|(one, ..)| heads[&head(one)]).collect(),
            expected: events().map(|(one, ..)| expected(one.append.expected)).collect(),
            tenants: events().map(|(one, ..)| head(one).0).collect(),
            aggregates: events().map(|(one, ..)| head(one).1).collect(),
            ids: each().map(|event| event.id.key()).collect(),
            fingerprints: events().map(|(one, _, at)| &one.fingerprints[at].0[..]).collect(),
            seqs: each().map(|event| event.seq.map(count)).collect(),
            kinds: each().map(|event| event.kind.as_ref().map(Kind::as_str)).collect(),
            times: each().map(|event| event.time.map(Time::as_micros)).collect(),
            payloads: each().map(|event| &event.payload[..]).collect(),
            names: column(&|event| literal(&event.headers, |(name, _)| name.as_bytes())),
            values: column(&|event| literal(&event.headers, |(_, value)| value)),
            traces: column(&|event| event.trace.map(|trace| trace.to_string())),
            heads,
        }
    }

    fn query<'q>(&'q self, inner: &Inner, wait: &'q str) -> Select<'q, Answer> {
        if self.ids.len() == 1 {
            return sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.append_one)))
                .bind(wait)
                .bind(self.warn)
                .bind(self.expected[0])
                .bind(self.tenants[0])
                .bind(self.aggregates[0])
                .bind(&*self.ids[0])
                .bind(self.fingerprints[0])
                .bind(self.seqs[0])
                .bind(self.kinds[0])
                .bind(self.times[0])
                .bind(self.payloads[0])
                .bind(&self.names[0])
                .bind(&self.values[0])
                .bind(&self.traces[0]);
        }
        sqlx::query_as(AssertSqlSafe(Arc::clone(&inner.sql.append)))
            .bind(wait)
            .bind(self.warn)
            .bind(self.heads.keys().map(|head| head.0).collect::<Vec<_>>())
            .bind(self.heads.keys().map(|head| head.1).collect::<Vec<_>>())
            .bind(&self.appends)
            .bind(&self.slots)
            .bind(&self.expected)
            .bind(&self.tenants)
            .bind(&self.aggregates)
            .bind(self.ids.iter().map(|id| &**id).collect::<Vec<_>>())
            .bind(&self.fingerprints)
            .bind(&self.seqs)
            .bind(&self.kinds)
            .bind(&self.times)
            .bind(&self.payloads)
            .bind(&self.names)
            .bind(&self.values)
            .bind(&self.traces)
    }
}

/// The indexes of the events of an append that are sent.
fn firsts<'a>(one: &'a Ready<'_>) -> impl Iterator<Item = usize> + 'a {
    (0..one.same.len()).filter(|at| one.same[*at] == *at)
}

fn expected(expected: Expected) -> Option<i64> {
    match expected {
        Expected::Exact(seq) => Some(count(seq)),
        Expected::New => Some(0),
        Expected::Any => None,
    }
}

/// The names or values of the headers as a PostgreSQL array literal: nested arrays must have equal
/// lengths, texts need not.
fn literal<'a>(headers: &'a Headers, half: impl Fn((&'a str, &'a [u8])) -> &'a [u8]) -> Option<String> {
    if headers.is_empty() {
        return None;
    }
    let mut text = String::from("{");
    for (at, header) in headers.iter().enumerate() {
        text.push_str(if at == 0 { "\"\\\\x" } else { ",\"\\\\x" });
        for byte in half(header) {
            let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        }
        text.push('"');
    }
    text.push('}');
    Some(text)
}

/// The outcome of each append, in order.
fn outcomes(settings: &JournalSettings, ready: &[Ready<'_>], answers: &[Answer]) -> Vec<Result<Appended>> {
    let mut by_event: Vec<Option<&Answer>> = Vec::new();
    for answer in answers {
        let at = usize::try_from(answer.event).unwrap_or(0);
        if by_event.len() <= at {
            by_event.resize(at + 1, None);
        }
        by_event[at] = Some(answer);
    }
    let mut before = 0;
    let mut of = |one: &Ready<'_>| -> Result<Appended> {
        let sent: Vec<usize> = firsts(one).collect();
        let mine = before + 1..=before + sent.len();
        before += sent.len();
        let mut placed: Vec<Placed> = Vec::with_capacity(one.same.len());
        let found: Vec<Option<&Answer>> = mine.map(|at| by_event.get(at).copied().flatten()).collect();
        for (answer, at) in found.iter().zip(&sent) {
            if let Some(refused) = answer.and_then(|answer| answer.refusal(one.append, *at)) {
                return Err(refused);
            }
        }
        for (at, first) in one.same.iter().enumerate() {
            if *first != at {
                let original = placed[*first].clone();
                placed.push(Placed { placing: Placing::Repeat, ..original });
                continue;
            }
            let answer = sent.binary_search(&at).ok().and_then(|nth| found[nth]);
            let Some(&Answer { kind, seq: Some(seq), position: Some(position), .. }) = answer else {
                return Err(Error::Corrupt("an append without an answer".into()));
            };
            let placing = match kind {
                Decided::New => Placing::New,
                Decided::Repeat => Placing::Repeat,
                _ => Placing::Kept,
            };
            if placing == Placing::Kept {
                settings.kept(&one.append.events[at].id);
            }
            placed.push(Placed { seq: seq as u64, position: Position::of(position as u64), placing });
        }
        Ok(Appended::new(placed))
    };
    ready.iter().map(&mut of).collect()
}

impl Answer {
    /// The error, if the append was refused at this event.
    fn refusal(&self, append: &Append, at: usize) -> Option<Error> {
        let (event, seq) = (&append.events[at], self.seq.unwrap_or_default());
        match self.kind {
            Decided::New | Decided::Repeat | Decided::Kept => None,
            Decided::Conflict => {
                Some(Error::Conflict { expected: append.expected.to_string(), actual: format!("seq {seq}") })
            }
            Decided::Mismatch => Some(Error::Mismatch {
                what: format!(
                    "{} is in the journal with other content, as seq {seq} of its aggregate",
                    event.id
                ),
            }),
            Decided::WrongSeq => Some(Error::Conflict {
                expected: format!("seq {} for {}", event.seq.unwrap_or_default(), event.id),
                actual: format!("seq {seq} is next"),
            }),
        }
    }
}
