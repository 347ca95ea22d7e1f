//! A model-based test: the same random commands on a journal and on a plain list of what it should answer, every answer
//! compared. `HAPAX_SEED` repeats a run, `HAPAX_CASES` sets how many sequences it has.

mod spec;

use std::time::Duration;

use super::JournalHarness;
use super::kit::until;
use crate::error::Error;
use crate::event::Event;
use crate::id::{Aggregate, EventId, Kind, Owner, RelayName, Tenant};
use crate::journal::{
    AggregateOf, Append, Appended, Behind, Checkpoint, Expected, Journal, JournalSettings, JournalSweep,
    Leadership, Placing, Position, Stored,
};
use crate::ledger::{MismatchRule, Token};
use crate::testing::model::{Rng, cases, seed};
use spec::{Relay, Spec, Written};

const COMMANDS: usize = 40;
const BYTES_MAX: usize = 200;
const EVENTS_MAX: usize = 6;
/// Longer than any run.
const LEASE: Duration = Duration::from_hours(1);

/// Random commands are answered as the plain list says: appends with every kind of expectation, repeats, mismatches, tenants,
/// leads, saves, rewinds, sweeps and reads.
pub async fn model_random_commands_agree<H: JournalHarness>(harness: &H) {
    let (seed, cases) = (seed(), cases(harness.model_cases()));
    let settings = |mismatch| JournalSettings {
        mismatch,
        event_bytes_max: BYTES_MAX,
        events_max: EVENTS_MAX,
        ..JournalSettings::default()
    };
    let mut run = Run {
        refusing: harness.open(settings(MismatchRule::Error)).await,
        warning: harness.open(settings(MismatchRule::Warn)).await,
        spec: Spec::default(),
        rng: Rng::new(seed),
        sent: Vec::new(),
        log: Vec::new(),
        case: 0,
        began: 0,
        seed,
    };
    for case in 0..cases {
        run.case = case;
        run.began = run.spec.written.len();
        run.sent.clear();
        run.log.clear();
        for _ in 0..COMMANDS {
            run.command().await;
        }
        run.compare_all().await;
    }
}

struct Run<J> {
    /// The same journal, opened to refuse reused ids and opened to warn of them.
    refusing: J,
    warning: J,
    spec: Spec,
    rng: Rng,
    sent: Vec<Append>,
    log: Vec<String>,
    case: u64,
    /// How many were written before this sequence.
    began: usize,
    seed: u64,
}

impl<J: Journal> Run<J> {
    async fn command(&mut self) {
        match self.rng.below(100) {
            0..40 => {
                let append = self.any_append();
                self.append(vec![append], false).await;
            }
            40..50 if !self.sent.is_empty() => {
                let again = self.rng.pick(&self.sent);
                self.append(vec![again], false).await;
            }
            40..60 => {
                let appends = (0..=self.rng.below(4)).map(|_| self.any_append()).collect();
                self.append(appends, true).await;
            }
            60..65 => self.lead().await,
            65..78 => self.under_a_token().await,
            78..81 => self.rewind().await,
            81..86 => self.sweep().await,
            86..93 => self.compare_one().await,
            _ => self.compare_aggregate().await,
        }
    }

    fn same<T: std::fmt::Debug + PartialEq>(&self, what: &str, wanted: &T, found: &T) {
        assert!(
            wanted == found,
            "HAPAX_SEED={} in sequence {}, after\n  {}\n{what}\n should be {wanted:?}\n and is    {found:?}",
            self.seed,
            self.case,
            self.log.join("\n  ")
        );
    }

    fn any_of(&mut self) -> AggregateOf {
        let tenant = self.rng.pick(&[None, Some("acme"), Some("Acme")]);
        let aggregate = format!("{}/{}", self.case, self.rng.pick(&["a", "b", "c"]));
        AggregateOf {
            tenant: tenant.map(|tenant| Tenant::new(tenant).unwrap()),
            aggregate: Aggregate::new(aggregate).unwrap(),
        }
    }

    /// Ids are few, so that many are used again, mostly as they were.
    fn any_event(&mut self) -> Event {
        let used = (self.spec.written.len() - self.began) as u64;
        let name = format!("{}-{}", self.case, self.rng.below(used + 6));
        let event = Event::new(EventId::new(&name).unwrap());
        match self.rng.below(20) {
            0..2 => event.payload("another content"),
            2 => event.payload(format!("of {name}")).kind(Kind::new("another kind").unwrap()),
            3 if self.rng.chance(30) => event.payload(vec![7; BYTES_MAX + 1]),
            _ => event.payload(format!("of {name}")),
        }
    }

    fn any_append(&mut self) -> Append {
        let of = self.any_of();
        let head = self.spec.head(&of);
        let expected = match self.rng.below(10) {
            0..4 => Expected::Any,
            4..8 => Expected::Exact(head),
            8 => Expected::New,
            _ => Expected::Exact(self.rng.below(head + 3)),
        };
        let count = self.rng.pick(&[1, 1, 1, 2, 2, 3, 4]);
        let count = if self.rng.chance(3) { self.rng.pick(&[0, EVENTS_MAX + 1]) } else { count };
        let mut append = Append::new(of.aggregate, expected, (0..count).map(|_| self.any_event()));
        append.tenant = of.tenant;
        if self.rng.chance(10) && count > 0 {
            let wanted = head + self.rng.below(3);
            append.events[0].seq = Some(wanted.max(1));
        }
        if self.rng.chance(10) && count > 1 {
            append.events[count - 1] = append.events[0].clone();
        }
        append
    }

    async fn append(&mut self, appends: Vec<Append>, many: bool) {
        let warn = self.rng.chance(35);
        let journal = if warn { &self.warning } else { &self.refusing };
        let answers = if many {
            journal.append_many(&appends).await.expect("the journal is there")
        } else {
            vec![journal.append(&appends[0]).await]
        };
        self.same("the number of answers", &appends.len(), &answers.len());
        for (append, answer) in appends.into_iter().zip(answers) {
            self.log.push(format!("append (warn {warn}) {append:?}"));
            let wanted = self.spec.decide(&append, warn, (BYTES_MAX, EVENTS_MAX));
            match (wanted, answer) {
                (Ok(wanted), Ok(answer)) => self.appended(&append, &wanted, &answer),
                (Ok(wanted), Err(error)) => {
                    self.same("the append", &format!("{wanted:?}"), &error.to_string());
                }
                // An append that is refused for two reasons may get either as its answer.
                (Err("conflict"), Err(Error::Mismatch { .. })) if !warn && self.spec.reuses(&append) => {}
                (Err(code), answer) => {
                    let found = answer.map_err(|error| error.code());
                    self.same("the append", &Err(code), &found);
                }
            }
            self.sent.push(append);
        }
        let now = self.refusing.now().await.unwrap();
        self.spec.newest = self.spec.newest.max(now);
    }

    fn appended(&mut self, append: &Append, wanted: &[spec::Place], answer: &Appended) {
        self.same("the number of places", &wanted.len(), &answer.placed.len());
        for (n, ((seq, position, placing), placed)) in wanted.iter().zip(&answer.placed).enumerate() {
            self.same("seq and placing", &(*seq, *placing), &(placed.seq, placed.placing));
            let first = append.events.iter().position(|event| event.id == append.events[n].id).unwrap_or(n);
            let position = position.clone().unwrap_or_else(|| answer.placed[first].position.clone());
            self.same("the position", &position, &placed.position);
            if *placing == Placing::New {
                let last = self.spec.written.last().map_or(Position::START, |last| last.position.clone());
                let later = placed.position > last;
                self.same(&format!("that {} is later than {last}", placed.position), &true, &later);
                self.spec.store(&append.of(), &append.events[n], *seq, placed.position.clone());
            }
        }
    }

    fn any_relay(&mut self) -> RelayName {
        RelayName::new(self.rng.pick(&["main", "other"])).unwrap()
    }

    /// Somewhere in the journal, with something behind now and then.
    fn any_checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = Checkpoint::start(self.refusing.id());
        if self.spec.written.is_empty() {
            return checkpoint;
        }
        // Mostly late, so that sweeps have something to take.
        let written = &self.spec.written;
        let from = if self.rng.chance(70) { written.len() * 3 / 4 } else { 0 };
        checkpoint.position = self.rng.pick(&written[from..]).position;
        checkpoint.recent = vec![format!("recent of {}", self.case)];
        if self.rng.chance(30) {
            let Written { of, seq, position, .. } = self.rng.pick(written);
            checkpoint.behind.push(Behind {
                tenant: of.tenant.map(|tenant| tenant.as_str().to_owned()),
                aggregate: of.aggregate.as_str().to_owned(),
                next: seq,
                position,
                reason: "it was refused".to_owned(),
                poison: self.rng.chance(50),
                since: 7,
                attempts: 1,
                appended: 6,
            });
        }
        checkpoint
    }

    async fn lead(&mut self) {
        let name = self.any_relay();
        self.log.push(format!("lead {name}"));
        let answer =
            self.refusing.acquire_leadership(&name, &Owner::new("ada").unwrap(), LEASE).await.unwrap();
        let start = Checkpoint::start(self.refusing.id());
        let relay = self.spec.relays.entry(name).or_default();
        let highest = relay.tokens.iter().max().copied();
        match answer {
            Leadership::Acquired { token, checkpoint } => {
                let was = std::mem::replace(&mut relay.leads, true);
                relay.tokens.push(token);
                let wanted = relay.checkpoint.clone().unwrap_or(start);
                self.same("that someone led", &false, &was);
                self.same("the checkpoint", &wanted, &checkpoint);
                self.same("that the token is the highest", &true, &(Some(token) > highest));
            }
            Leadership::Taken { .. } => {
                let leads = relay.leads;
                self.same("that someone leads", &leads, &true);
            }
        }
    }

    /// Keeps, saves or gives up, under the current token or any other.
    async fn under_a_token(&mut self) {
        let name = self.any_relay();
        let relay = self.spec.relays.get(&name).cloned().unwrap_or_default();
        let token = match relay.tokens.last() {
            Some(token) if self.rng.chance(70) => *token,
            Some(_) if self.rng.chance(80) => self.rng.pick(&relay.tokens),
            _ => Token(self.rng.pick(&[0, 1_000_000_007])),
        };
        let current = relay.is_current(token);
        if current && !relay.leads {
            return; // given up: nobody promises anything of such a token until another leads
        }
        let wanted = if current { Ok(()) } else { Err("fenced") };
        let checkpoint = self.any_checkpoint();
        let way = self.rng.below(10);
        let (what, answer) = match way {
            0..6 => ("save", self.refusing.save(&name, token, &checkpoint).await),
            6..8 => ("keep", self.refusing.renew_leadership(&name, token, LEASE).await),
            _ => ("give up", self.refusing.release_leadership(&name, token).await),
        };
        self.log.push(format!("{what} {name} under {token:?}"));
        self.same(what, &wanted, &answer.map_err(|error| error.code()));
        if let Some(relay) = self.spec.relays.get_mut(&name).filter(|_| current) {
            match way {
                0..6 => relay.checkpoint = Some(checkpoint),
                6..8 => {}
                _ => relay.leads = false,
            }
        }
    }

    async fn rewind(&mut self) {
        let (name, to) = (self.any_relay(), self.any_checkpoint());
        self.log.push(format!("rewind {name} to {}", to.position));
        let was = self.refusing.rewind(&name, &to, None).await.unwrap();
        let token = self.state_of(&name).await.1;
        let relay: &mut Relay = self.spec.relays.entry(name).or_default();
        relay.leads = false;
        relay.tokens.push(token); // whoever led has another
        let wanted = relay.checkpoint.replace(to);
        self.same("the checkpoint that was", &wanted, &was);
    }

    async fn state_of(&self, name: &RelayName) -> (Option<Checkpoint>, Token) {
        let relays = self.refusing.relays().await.unwrap();
        let state = relays.into_iter().find(|state| state.relay == *name).expect("it is known");
        (state.checkpoint, state.token)
    }

    async fn sweep(&mut self) {
        let newest = self.spec.newest;
        let journal = &self.refusing;
        until("the clock to move on", async || (journal.now().await.unwrap() > newest).then_some(())).await;
        let young = self.rng.chance(20);
        let mut settings = JournalSweep::new(if young { LEASE } else { Duration::ZERO });
        settings.dry_run = self.rng.chance(30);
        let goes = if young { Vec::new() } else { self.spec.swept() };
        self.log.push(format!("sweep {settings:?}"));
        let swept = self.refusing.sweep(&settings).await.unwrap();
        self.same("swept", &(goes.len() as u64), &swept);
        if !settings.dry_run {
            for n in goes {
                self.spec.written[n].gone = true;
            }
        }
    }

    fn same_event(&self, what: &str, wanted: &Written, found: &Stored) {
        let wanted = (wanted.seq, &wanted.position, &wanted.event);
        self.same(what, &wanted, &(found.seq, &found.position, &found.event));
    }

    fn same_events(&self, what: &str, wanted: &[&Written], found: &[Stored]) {
        self.same(&format!("how many of {what}"), &wanted.len(), &found.len());
        for (wanted, found) in wanted.iter().zip(found) {
            self.same_event(what, wanted, found);
        }
    }

    /// By id, and what follows a place.
    async fn compare_one(&mut self) {
        let (of, event) = (self.any_of(), self.any_event());
        let found = self.warning.find(of.tenant.as_ref(), &event.id).await.unwrap();
        match (self.spec.find(&of, &event.id), found) {
            (Some(wanted), Some(found)) => self.same_event("the one found", wanted, &found),
            (wanted, found) => self.same("that it is found", &wanted.is_some(), &found.is_some()),
        }
        if self.spec.written.is_empty() {
            return;
        }
        let after = self.rng.pick(&self.spec.written).position;
        let limit = self.rng.pick(&[1, 3, 1000]);
        let there = self.spec.there();
        let wanted: Vec<_> = there.into_iter().filter(|written| written.position > after).collect();
        let counted = self.refusing.count_after(&after, limit as u64).await.unwrap();
        self.same("how many follow", &(wanted.len().min(limit) as u64), &counted);
        // A page may be shorter than was asked for, but not empty.
        let events = self.refusing.read(&after, limit).await.unwrap().events;
        let fits = events.len() <= wanted.len().min(limit) && events.is_empty() == wanted.is_empty();
        self.same(&format!("that {} of {} are fine", events.len(), wanted.len()), &true, &fits);
        self.same_events("what follows", &wanted[..events.len()], &events);
    }

    async fn compare_aggregate(&mut self) {
        let of = self.any_of();
        let (from, limit) = (self.rng.below(self.spec.head(&of) + 2), self.rng.pick(&[0, 1, 3, 1000]));
        self.compare_events_of(&of, from, limit).await;
    }

    async fn compare_events_of(&self, of: &AggregateOf, from: u64, limit: usize) {
        let head = self.refusing.head(of.tenant.as_ref(), &of.aggregate).await.unwrap();
        self.same(&format!("the head of {of}"), &self.spec.head(of), &head);
        let there = self.spec.there();
        let mut wanted: Vec<_> =
            there.into_iter().filter(|written| written.of == *of && written.seq >= from).collect();
        wanted.sort_by_key(|written| written.seq);
        wanted.truncate(limit);
        let found =
            self.warning.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, limit).await.unwrap().events;
        self.same_events(&format!("the events of {of}"), &wanted, &found);
    }

    /// Everything there is, by every way of reading.
    async fn compare_all(&self) {
        let mine = format!("{}/", self.case);
        for of in self.spec.heads.keys().filter(|of| of.aggregate.as_str().starts_with(&mine)) {
            self.compare_events_of(of, 0, 10_000).await;
        }
        let (mut found, mut after) = (Vec::new(), Position::START);
        loop {
            let batch = self.warning.read(&after, 7).await.unwrap();
            let ends = batch.next == after;
            (after, found) = (batch.next, [found, batch.events].concat());
            if ends {
                break;
            }
        }
        self.same_events("all that is followed", &self.spec.there(), &found);
        for (name, relay) in &self.spec.relays {
            let state = self.state_of(name).await;
            self.same(
                "the relay",
                &(relay.checkpoint.clone(), relay.tokens.last().copied()),
                &(state.0, Some(state.1)),
            );
        }
        let stat = self.refusing.stat().await.unwrap();
        if stat.exact {
            let wanted = (self.spec.there().len() as u64, self.spec.heads.len() as u64);
            self.same("the counts", &wanted, &(stat.events, stat.aggregates));
        }
    }
}
