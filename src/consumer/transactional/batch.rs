//! The worker for transactional batches: claims, handles and commits in one transaction, and splits
//! a batch that fails.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{BatchHandler, TransactionalLedger};
use crate::bus::Partition;
use crate::consumer::Passed;
use crate::consumer::arrival::{Arrival, Ending, Key};
use crate::consumer::claim::{ConsumerContext, away, is_contention};
use crate::consumer::handle::{Failed, Handled};
use crate::consumer::markers::Markers;
use crate::consumer::worker::{Suspects, Worker};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::guard::reason_of;
use crate::ledger::{Claim, Mode, Outcome};

/// Runs deliveries in batches, each batch in the transaction of its claims.
pub(in crate::consumer) struct TransactionalWorker<L, H> {
    pub(super) context: ConsumerContext,
    pub(super) ledger: L,
    handler: H,
    markers: Arc<Markers>,
}

impl<L, H> TransactionalWorker<L, H> {
    pub(in crate::consumer) fn new(context: ConsumerContext, ledger: L, handler: H) -> Self {
        TransactionalWorker { context, ledger, handler, markers: Arc::default() }
    }
}

/// How one try of a piece ended.
enum Attempted {
    /// Committed, with an answer for each delivery.
    Committed(Vec<Answer>),
    /// The handler failed, at this index of the piece if known. Undone.
    Failed(Failed, Option<usize>),
    /// Some queues are blocked, and later deliveries in them must not run yet. Undone.
    Blocked(Vec<Answer>),
    /// The process must stop, or a partition was lost. Undone.
    Cancelled,
    /// The ledger did not answer, or the transaction must be repeated. Undone.
    Again(Error),
}

/// The answer for one delivery within a transaction. It is acted on only after the transaction has
/// ended, so that a pool with one connection suffices.
enum Answer {
    Done,
    Unclaimed(Outcome),
    Refused(String),
    /// Its last run, alone or from the ledger, died with its process. It must run alone.
    Suspect,
}

impl Answer {
    /// Whether the deliveries after it in its queue must wait.
    fn blocks(&self, arrival: &Arrival) -> bool {
        match self {
            Answer::Suspect | Answer::Unclaimed(Outcome::Busy { .. } | Outcome::Wait { .. }) => true,
            // The ledger itself keeps the order within aggregates.
            Answer::Unclaimed(Outcome::RetryLater { .. }) => !matches!(arrival.key, Some(Key::Aggregate(..))),
            _ => false,
        }
    }
}

#[async_trait]
impl<L: TransactionalLedger, H: BatchHandler<L>> Worker for TransactionalWorker<L, H> {
    fn batch_max(&self) -> usize {
        self.context.settings.batch_max
    }

    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        self.one(arrival).await
    }

    async fn work(&self, queues: &mut [Vec<Arrival>]) -> Vec<Vec<Ending>> {
        if let [queue] = &mut *queues
            && queue.iter().any(|arrival| arrival.alone)
        {
            let mut endings = Vec::new();
            for arrival in queue {
                endings.push(self.one(arrival).await);
                if !matches!(endings.last(), Some(Ending::Passed(_))) {
                    break;
                }
            }
            return vec![endings];
        }
        let under_way = match self.markers.cover(&self.ledger, &self.context.settings, queues).await {
            Ok(under_way) => under_way,
            Err(error) => {
                let mut ending = each_away(error);
                return queues.iter().map(|_| vec![ending()]).collect();
            }
        };
        let mut batch = Batch::of(queues);
        self.bisect(queues, &mut batch).await;
        drop(under_way);
        batch.endings
    }

    async fn suspects(&self, partitions: &[Partition]) -> Result<Vec<Suspects>> {
        self.markers.unfinished(&self.ledger, &self.context.settings.scope, partitions).await
    }

    fn cleared(&self, partition: &Partition) {
        self.markers.cleared(partition);
    }

    async fn release(&self, partitions: &[(Partition, Option<i64>)]) {
        self.markers.clear(&self.ledger, &self.context.settings.scope, partitions).await;
    }
}

/// How the deliveries of each queue ended.
struct Batch {
    endings: Vec<Vec<Ending>>,
    /// Queues whose next delivery must wait. Nothing more of them runs in this batch.
    blocked: Vec<bool>,
}

impl Batch {
    fn of(queues: &[Vec<Arrival>]) -> Self {
        let endings = queues.iter().map(|queue| Vec::with_capacity(queue.len())).collect();
        Batch { endings, blocked: vec![false; queues.len()] }
    }

    fn end(&mut self, queue: usize, ending: Ending) {
        if !self.blocked[queue] {
            self.blocked[queue] = !matches!(ending, Ending::Passed(_));
            self.endings[queue].push(ending);
        }
    }
}

/// Deliveries that are tried together: the queue of each, and its index in that.
type Piece = Vec<(usize, usize)>;

impl<L: TransactionalLedger, H: BatchHandler<L>> TransactionalWorker<L, H> {
    /// Tries everything at once, then parts of what failed. One bad event costs some retries and
    /// affects no other.
    async fn bisect(&self, queues: &mut [Vec<Arrival>], batch: &mut Batch) {
        let mut pieces = in_pieces(queues);
        while let Some(mut piece) = pieces.pop() {
            // Behind a delivery that must wait, nothing of its queue runs.
            piece.retain(|(queue, _)| !batch.blocked[*queue]);
            if piece.is_empty() {
                continue;
            }
            if let [(queue, at)] = piece[..]
                && queues[queue][at].is_held()
            {
                let ending = self.one(&mut queues[queue][at]).await;
                batch.end(queue, ending);
                continue;
            }
            match self.attempt(queues, &piece).await {
                Attempted::Committed(answers) => {
                    for (place, answer) in piece.into_iter().zip(answers) {
                        let ending = self.ending(&mut queues[place.0][place.1], answer).await;
                        batch.end(place.0, ending);
                    }
                }
                Attempted::Blocked(answers) => {
                    // Try again without the blocked deliveries and those behind them.
                    for (place, answer) in piece.iter().zip(answers) {
                        if answer.blocks(&queues[place.0][place.1]) && !batch.blocked[place.0] {
                            let before: Piece = piece
                                .iter()
                                .filter(|other| other.0 == place.0 && other.1 < place.1)
                                .copied()
                                .collect();
                            if before.is_empty() {
                                let ending = self.ending(&mut queues[place.0][place.1], answer).await;
                                batch.end(place.0, ending);
                            } else {
                                piece = keep_before(&piece, *place);
                                break;
                            }
                        }
                    }
                    pieces.push(piece);
                }
                Attempted::Failed(failed, _) if piece.len() == 1 => {
                    let (queue, at) = piece[0];
                    let ending = self.failed(&mut queues[queue][at], &failed).await;
                    batch.end(queue, ending);
                }
                Attempted::Failed(_, at) => {
                    // Split at the delivery that failed, if known, else in half.
                    let at = at.unwrap_or(piece.len() / 2);
                    let mut second = piece.split_off(at.max(usize::from(at == 0 && piece.len() == 1)));
                    if piece.is_empty() {
                        let rest = second.split_off(1);
                        pieces.push(rest);
                    }
                    pieces.push(second);
                    pieces.push(piece);
                }
                Attempted::Cancelled => {
                    for (queue, _) in piece {
                        batch.end(queue, Ending::Cancelled);
                    }
                }
                Attempted::Again(error) => {
                    let mut ending = each_away(error);
                    for (queue, at) in piece {
                        queues[queue][at].ran = true; // its commit may have landed without an answer
                        batch.end(queue, ending());
                    }
                }
            }
        }
    }

    async fn ending(&self, arrival: &mut Arrival, answer: Answer) -> Ending {
        match answer {
            Answer::Done => Ending::Passed(Passed::Done),
            Answer::Unclaimed(outcome) => {
                // Another open transaction has it. Claim it apart from now on, since claiming it
                // again waits for that transaction.
                arrival.apart |= matches!(outcome, Outcome::Busy { until: None, .. });
                self.context.unclaimed(outcome, arrival).await
            }
            Answer::Refused(reason) => self.context.refuse(arrival, &reason).await,
            Answer::Suspect => Ending::Alone,
        }
    }

    async fn attempt(&self, queues: &[Vec<Arrival>], piece: &Piece) -> Attempted {
        for _ in 0..ATTEMPTS_MAX {
            match self.attempt_once(queues, piece).await {
                Attempted::Again(error) if is_contention(&error) => {
                    tracing::debug!(target: "hapax", error = %error.chain(), "retrying a batch");
                    tokio::time::sleep(PAUSE / 5).await;
                }
                other => return other,
            }
        }
        let what = format!("a batch gave up after {ATTEMPTS_MAX} lock conflicts");
        Attempted::Again(Error::Contended { what, source: None })
    }

    /// One transaction: claim, handle, commit.
    async fn attempt_once(&self, queues: &[Vec<Arrival>], piece: &Piece) -> Attempted {
        let mut claims = Vec::with_capacity(piece.len());
        let mut answers: Vec<Option<Answer>> = Vec::with_capacity(piece.len());
        for (queue, at) in piece {
            match self.claim(&queues[*queue][*at]) {
                Ok(claim) => {
                    claims.push(claim);
                    answers.push(None);
                }
                Err(reason) => answers.push(Some(Answer::Refused(reason))),
            }
        }
        if claims.is_empty() {
            return Attempted::Committed(answers.into_iter().flatten().collect());
        }
        let mut tx = match self.begin().await {
            Ok(tx) => tx,
            Err(error) => return Attempted::Again(error),
        };
        let outcomes = match self.ledger.claim_in(&mut tx, &claims).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                self.ledger.roll_back(tx).await;
                return Attempted::Again(error);
            }
        };
        let firsts = match self.sort(queues, piece, &mut answers, outcomes, &claims) {
            Ok(firsts) => firsts,
            Err(error) => {
                self.ledger.roll_back(tx).await;
                return Attempted::Again(error);
            }
        };
        let mut answers: Vec<Answer> =
            answers.into_iter().map(|answer| answer.unwrap_or(Answer::Done)).collect();
        let suspect = answers.iter().any(|answer| matches!(answer, Answer::Suspect));
        if suspect || overtakes(queues, piece, &answers) {
            self.ledger.roll_back(tx).await;
            return Attempted::Blocked(std::mem::take(&mut answers));
        }
        crate::crash_point!("consumer.after-claim");
        let handled = tokio::select! {
            handled = self.handle(&mut tx, &firsts.events) => Some(handled),
            () = cancelled(piece.iter().map(|place| &queues[place.0][place.1])) => None,
        };
        let Some(handled) = handled else {
            self.undo(tx, std::future::ready(())).await;
            return Attempted::Cancelled;
        };
        if let Err(failed) = handled {
            let transient = self.transient(&mut tx, &failed).await;
            self.undo(tx, cancelled(piece.iter().map(|place| &queues[place.0][place.1]))).await;
            if let Some(error) = transient {
                return Attempted::Again(error);
            }
            let at = failed.place().and_then(|at| firsts.places.get(at)).copied();
            return Attempted::Failed(failed, at);
        }
        crate::crash_point!("consumer.before-settle");
        match self.commit(tx, firsts.claim.as_ref()).await {
            Ok(Ok(())) => Attempted::Committed(answers),
            Ok(Err(failed)) => Attempted::Failed(failed, None),
            Err(error) => Attempted::Again(error),
        }
    }

    pub(super) async fn begin(&self) -> Result<L::Transaction> {
        let settings = &self.context.settings;
        self.ledger.begin(self.time_max(), settings.handler_timeout).await
    }

    /// Undoes a transaction. The server may be busy with one of its statements, and its claims
    /// block others until that ends, so this waits for it. If the process must end, it waits only
    /// briefly.
    pub(super) async fn undo(&self, tx: L::Transaction, cancelled: impl Future<Output = ()>) {
        let ledger = self.ledger.clone();
        let mut undoing = tokio::spawn(async move { ledger.roll_back(tx).await });
        let over = tokio::select! {
            _ = &mut undoing => true,
            () = cancelled => false,
            () = tokio::time::sleep(self.time_max()) => false,
        };
        if !over && tokio::time::timeout(UNDO_MAX, undoing).await.is_err() {
            tracing::warn!(target: "hapax", "a transaction is left to the server, which is busy with a statement of it");
        }
    }

    /// Separates the claims that are first from the rest.
    fn sort(
        &self,
        queues: &[Vec<Arrival>],
        piece: &Piece,
        answers: &mut [Option<Answer>],
        outcomes: Vec<Result<Outcome>>,
        claims: &[Claim],
    ) -> Result<FirstClaims> {
        let mut firsts = FirstClaims::default();
        let mut outcomes = outcomes.into_iter().zip(claims);
        for (index, (place, answer)) in piece.iter().zip(answers).enumerate() {
            if answer.is_some() {
                continue;
            }
            let Some((outcome, claim)) = outcomes.next() else { continue };
            self.context.core.saw(&tracing::Span::none(), outcome.as_ref().ok());
            match outcome {
                Ok(Outcome::First(grant)) if grant.suspect => *answer = Some(Answer::Suspect),
                Ok(Outcome::First(_)) => {
                    firsts.claim.get_or_insert_with(|| claim.clone());
                    // A strict order also steps past unwanted events.
                    let event = &queues[place.0][place.1].event;
                    if self.context.settings.wants.matches(event) {
                        firsts.events.push(event.clone());
                        firsts.places.push(index);
                    }
                    *answer = Some(Answer::Done);
                }
                Ok(outcome) => *answer = Some(Answer::Unclaimed(outcome)),
                Err(error @ Error::Invalid { .. }) => *answer = Some(Answer::Refused(error.to_string())),
                Err(error) => return Err(error),
            }
        }
        Ok(firsts)
    }

    /// The error, if it was not the handler's fault, so that it counts neither as an attempt nor as
    /// a failure. A broken connection is excused only if it is the transaction's own; any other is
    /// the handler's responsibility.
    pub(super) async fn transient(&self, tx: &mut L::Transaction, failed: &Failed) -> Option<Error> {
        let contention = failed.causes().any(|error| self.ledger.is_contention(error));
        let doubt = failed.causes().any(|error| self.ledger.is_doubt(error));
        let transient = contention || (doubt && self.ledger.is_lost(tx).await);
        let what = || format!("in a handler's transaction: {failed}");
        transient.then(|| Error::Contended { what: what(), source: None })
    }

    pub(super) async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled {
        if events.is_empty() {
            return Ok(());
        }
        let began = tokio::time::Instant::now();
        let limit = self.context.settings.handler_timeout;
        let mut handled = crate::consumer::handle::within(limit, self.handler.handle(tx, events)).await;
        if handled.is_ok() && !self.ledger.is_sound(tx).await? {
            // The server would answer its COMMIT as usual, but roll back.
            handled = Err(Failed::retryable(
                "a statement failed in the transaction, and the handler did not say so",
            ));
        }
        self.context.core.handled(began.elapsed(), handled.is_ok());
        handled
    }

    /// Commits, and resolves a doubt by issuing one of its claims again. An error means that it did
    /// not commit, or that this is unknown; the next claims will tell.
    async fn commit(&self, tx: L::Transaction, first: Option<&Claim>) -> Result<Handled> {
        let error = match self.ledger.commit(tx).await {
            Ok(committed) => return Ok(committed.map_err(Failed::retryable)),
            Err(error) => error,
        };
        let Some(first) = first else { return Err(error) };
        if self.ledger.was_committed(first).await? { Ok(Ok(())) } else { Err(error) }
    }

    fn claim(&self, arrival: &Arrival) -> Result<Claim, String> {
        let mut delivery = arrival.delivery();
        delivery.metadata = arrival.metadata(self.context.group_apart(), None);
        let mut claim = self.context.core.prepare(delivery, Mode::Done).map_err(|error| error.to_string())?;
        claim.hold = self.context.holds(arrival);
        Ok(claim)
    }

    /// The longest duration of a transaction, and of the lease of an event that runs in one alone.
    pub(super) fn time_max(&self) -> Duration {
        self.context.settings.handler_timeout + self.context.settings.lease
    }

    /// Counts a failed run in a separate transaction.
    async fn failed(&self, arrival: &mut Arrival, failed: &Failed) -> Ending {
        arrival.apart = true;
        let mut settings = self.context.failure_settings();
        if !failed.is_counted() {
            return Ending::Later(settings.pause(1).max(failed.after().unwrap_or_default()));
        }
        if failed.is_fatal() {
            settings.attempts_max = 1;
        }
        if let Some(after) = failed.after() {
            (settings.backoff_base, settings.backoff_max) = (after, after.max(settings.backoff_max));
            settings.jitter_permille = 1000;
        }
        let claim = self.context.core.prepare(arrival.delivery(), Mode::Failed(settings)).map(|mut claim| {
            claim.reason = Some(reason_of(failed));
            // The pause is known only once it is drawn, so keep the bytes from the start.
            claim.hold = arrival.may_be_held() && settings.backoff_max > self.context.settings.hold_max;
            claim
        });
        match async { self.context.core.claim_raw(claim?).await }.await {
            Ok(outcome) => self.context.ended(outcome, arrival).await,
            Err(error) => away(error),
        }
    }
}

/// Returns the same error for every queue of a batch. It cannot be cloned, so all but the first
/// carry its text.
fn each_away(error: Error) -> impl FnMut() -> Ending {
    let contended = is_contention(&error);
    let (what, retryable) = (error.chain(), error.is_retryable());
    let mut error = Some(error);
    move || match error.take() {
        _ if contended => Ending::Contended(PAUSE),
        Some(error) => away(error),
        None if retryable => Ending::Unavailable(Error::Unavailable { what: what.clone(), source: None }),
        None => Ending::Later(PAUSE),
    }
}

/// How often to retry a batch that meets contention before others get their turn.
const ATTEMPTS_MAX: u32 = 20;
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// How long to wait for a rollback when the process must end.
const UNDO_MAX: Duration = Duration::from_secs(1);

/// The deliveries of a piece whose claims are first.
#[derive(Default)]
struct FirstClaims {
    events: Vec<Event>,
    /// The index of each in the piece.
    places: Vec<usize>,
    /// One of their claims, to issue again if the commit gets no answer.
    claim: Option<Claim>,
}

/// Splits queues into pieces to try together, the last piece first. Everything goes into one piece
/// except queues with a delivery that failed before or was held. Those follow, cut around that
/// delivery, so that a repeated failure costs its neighbours nothing.
fn in_pieces(queues: &[Vec<Arrival>]) -> Vec<Piece> {
    let mut together = Piece::new();
    let mut pieces = Vec::new();
    let apart = |arrival: &Arrival| arrival.apart || arrival.is_held();
    for (queue, arrivals) in queues.iter().enumerate() {
        if !arrivals.iter().any(apart) {
            together.extend((0..arrivals.len()).map(|at| (queue, at)));
            continue;
        }
        let mut at = 0;
        for piece in arrivals.chunk_by(|one, next| !apart(one) && !apart(next)) {
            pieces.push((at..at + piece.len()).map(|at| (queue, at)).collect());
            at += piece.len();
        }
    }
    pieces.insert(0, together);
    pieces.reverse();
    pieces
}

/// Completes when one of them is cancelled. Polls, since a batch covers few partitions and a stop
/// is not urgent.
async fn cancelled<'a>(arrivals: impl Iterator<Item = &'a Arrival> + Clone) {
    while !arrivals.clone().any(|arrival| arrival.is_cancelled()) {
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether a first claim is behind a delivery of its queue that must wait.
fn overtakes(queues: &[Vec<Arrival>], piece: &Piece, answers: &[Answer]) -> bool {
    let mut blocked = std::collections::HashSet::new();
    piece.iter().zip(answers).any(|(place, answer)| {
        if answer.blocks(&queues[place.0][place.1]) {
            blocked.insert(place.0);
        }
        matches!(answer, Answer::Done) && blocked.contains(&place.0)
    })
}

/// A piece without one place and those behind it in its queue.
fn keep_before(piece: &Piece, place: (usize, usize)) -> Piece {
    piece.iter().filter(|other| other.0 != place.0 || other.1 < place.1).copied().collect()
}
