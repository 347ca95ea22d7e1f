//! `hapax ledger import`: what another table says was processed becomes `done` in the ledger.
//!
//! It reads the table by key and asks the ledger which ids it has, so a run that was killed is begun again
//! and does nothing twice. A second pass over the table records what came meanwhile, and asks the ledger
//! for every id once more.

use std::collections::BTreeMap;

use clap::Args;
use hapax::{Scope, Tenant};

use crate::token::ByArgs;

/// How many reasons and ids are shown.
#[cfg(feature = "postgres")]
const SHOWN_MAX: usize = 10;

#[derive(Debug, Args)]
#[cfg_attr(not(feature = "postgres"), allow(dead_code))]
pub struct ImportArgs {
    /// The table to read: its name in the ledger's own database, or postgres://…/DATABASE#TABLE
    #[arg(long, value_name = "TABLE|URL")]
    from: String,
    /// The scope that the events are recorded in
    #[arg(long)]
    scope: Scope,
    /// The tenant that the events are recorded for
    #[arg(long)]
    tenant: Option<Tenant>,
    /// What the table calls the scope, if it has a column of scopes [default: the same name]
    #[arg(long, value_name = "NAME")]
    from_scope: Option<String>,
    /// The column of ids [default: event_id]
    #[arg(long, value_name = "COLUMN")]
    id_column: Option<String>,
    /// The column of scopes [default: consumer_scope_id, handler or consumer, if there is one]
    #[arg(long, value_name = "COLUMN")]
    scope_column: Option<String>,
    /// The column of statuses [default: status or state, if there is one; without one every row is done]
    #[arg(long, value_name = "COLUMN")]
    status_column: Option<String>,
    /// A status that means that the event never runs again, instead of these; may be repeated
    #[arg(long, value_name = "STATUS", default_values = ["done", "stale", "skipped_stale"])]
    done_status: Vec<String>,
    /// The column of the event's time, if the ledger's identity includes it [default: week_start or event_time]
    #[arg(long, value_name = "COLUMN")]
    time_column: Option<String>,
    /// How many ids to read and record at a time
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = crate::cli::between(1u32, 1000))]
    page: u32,
    /// Say what would be recorded, change nothing
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

/// What became of the ids of a table.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "postgres"), allow(dead_code))]
struct Counts {
    /// All that were read.
    ids: u64,
    /// Recorded now; of a rehearsal: to be recorded.
    recorded: u64,
    /// Recorded before.
    known: u64,
    /// Not done there, by status.
    open: BTreeMap<String, u64>,
    /// No id that hapax takes: it would not be claimed either.
    refused: u64,
    /// Of a week that the ledger has dropped: it would not be claimed either.
    too_old: u64,
    /// Done there, and not in the ledger.
    missing: u64,
    /// The first of what was refused or is missing, with the reason.
    reasons: Vec<String>,
}

#[cfg(feature = "postgres")]
pub use with_postgres::import;

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
pub async fn import(
    _: &crate::cli::Global,
    _: &hapax::config::Config,
    _: std::sync::Arc<dyn hapax::Ledger>,
    _: &ImportArgs,
) -> Result<u8, crate::failure::Failure> {
    Err(crate::failure::Failure::not_built_in("PostgreSQL", "postgres"))
}

#[cfg(feature = "postgres")]
mod with_postgres {
    use std::io::IsTerminal as _;
    use std::sync::Arc;

    use hapax::backend::postgres::{PgProcessed, ProcessedColumns, ProcessedQuery, ProcessedRow};
    use hapax::config::{Config, hide_password};
    use hapax::ledger::{Claim, Identity, IdentityRule, Mode, State};
    use hapax::words::counted;
    use hapax::{EventId, Ledger, Outcome};
    use serde_json::json;

    use super::{Counts, ImportArgs, SHOWN_MAX};
    use crate::cli::Global;
    use crate::failure::{BROKEN_PROMISE, Failure};
    use crate::{print, who};

    pub async fn import(
        global: &Global,
        config: &Config,
        ledger: Arc<dyn Ledger>,
        args: &ImportArgs,
    ) -> Result<u8, Failure> {
        let (url, table) = place(config, &args.from)?;
        let named = args.from_scope.clone().unwrap_or_else(|| args.scope.to_string());
        let query = ProcessedQuery {
            table,
            columns: ProcessedColumns {
                id: args.id_column.clone(),
                scope: args.scope_column.clone(),
                status: args.status_column.clone(),
                time: args.time_column.clone(),
            },
            scope: named.clone(),
            done: args.done_status.clone(),
            with_time: ledger.settings().identity == IdentityRule::IdAndTime,
        };
        let within = config.open_settings().acquire_timeout;
        let work =
            Work { global, ledger: &*ledger, table: PgProcessed::open(&url, query, within).await?, args };
        let (unnamed, timeless) = work.table.unnamed().await?;
        if work.table.page(None, 1).await?.is_empty() {
            work.nothing(&named).await?;
        }
        if args.dry_run {
            let mut counts = work.pass("looked at", false).await?;
            counts.refused += unnamed;
            counts.timeless(timeless);
            report(global, args, &counts, None)?;
            return Ok(0);
        }
        if !args.yes {
            let reason = format!("this records events as done in {}", args.scope);
            print::can_ask(&reason)?;
            let counts = work.pass("looked at", false).await?;
            let question = format!(
                "record {} of {} as done in {} of {}?",
                counted(counts.recorded, "event", "events"),
                print::escaped(&shown(&args.from)),
                args.scope,
                config.ledger_url_shown()
            );
            if !print::asked(&question)? {
                return Err(Failure::declined("nothing was recorded"));
            }
        }
        let details = format!("from {}, scope {}", shown(&args.from), args.scope);
        who::acts(config, &args.by, "ledger.import", &config.ledger_url_shown(), &details).await?;
        let first = work.pass("recorded", true).await?;
        let mut checked = work.pass("checked", true).await?;
        checked.refused += unnamed;
        checked.timeless(timeless);
        report(global, args, &checked, Some(&first))?;
        if checked.missing > 0 {
            let what = counted(checked.missing, "event is", "events are");
            let message =
                format!("{what} done in the table and not in the ledger; run the same command again");
            return Err(Failure::new(BROKEN_PROMISE, "import-incomplete", message));
        }
        Ok(0)
    }

    /// The database and the table that `--from` names.
    fn place(config: &Config, from: &str) -> Result<(String, String), Failure> {
        let is_postgres = |url: &str| url.starts_with("postgres://") || url.starts_with("postgresql://");
        if is_postgres(from) {
            return match from.rsplit_once('#') {
                Some((url, table)) if !table.is_empty() => Ok((url.to_owned(), table.to_owned())),
                _ => Err(Failure::config(
                    "--from names a database and no table: write postgres://…/DATABASE#TABLE",
                )),
            };
        }
        if from.contains("://") {
            return Err(Failure::config(
                "--from is a table in PostgreSQL: a name, or postgres://…/DATABASE#TABLE",
            ));
        }
        if !is_postgres(&config.ledger.url) {
            return Err(Failure::config(format!(
                "--from names a table in the ledger's database, and {} is not PostgreSQL; write postgres://…/DATABASE#TABLE",
                config.ledger_url_shown()
            )));
        }
        Ok((config.ledger.url.clone(), from.to_owned()))
    }

    fn shown(from: &str) -> String {
        if from.contains("://") { hide_password(from) } else { from.to_owned() }
    }

    struct Work<'a> {
        global: &'a Global,
        ledger: &'a dyn Ledger,
        table: PgProcessed,
        args: &'a ImportArgs,
    }

    impl Work<'_> {
        /// An empty table is fine; one that has other scopes only is more likely a mistake in the name.
        async fn nothing(&self, named: &str) -> Result<(), Failure> {
            let Some(scopes) = self.table.scopes().await?.filter(|scopes| !scopes.is_empty()) else {
                return Ok(());
            };
            Err(Failure::config(format!(
                "the table has no row of scope {}; it has {}: name one with --from-scope",
                print::escaped(named),
                print::escaped(&scopes.join(", "))
            )))
        }

        /// Reads the whole table. With `records`, records what the ledger has not, and asks it again.
        async fn pass(&self, verb: &str, records: bool) -> Result<Counts, Failure> {
            let is_shown = std::io::stderr().is_terminal() && !self.global.json;
            let (mut counts, mut after) = (Counts::default(), None);
            loop {
                let rows = self.table.page(after.as_ref(), self.args.page).await?;
                counts.ids += rows.len() as u64;
                let events = self.done(&rows, &mut counts);
                self.page(&events, records, &mut counts).await?;
                if is_shown {
                    eprint!("\r{verb} {}", print::grouped(counts.ids));
                }
                let Some(last) = rows.into_iter().next_back() else { break };
                after = Some(last);
            }
            if is_shown {
                eprint!("\r\x1b[K");
            }
            Ok(counts)
        }

        /// The claims for what is done there.
        fn done(&self, rows: &[ProcessedRow], counts: &mut Counts) -> Vec<Claim> {
            let mut claims = Vec::with_capacity(rows.len());
            for row in rows {
                if let Some(status) = &row.open {
                    *counts.open.entry(status.clone()).or_default() += 1;
                    continue;
                }
                match EventId::new(&row.id) {
                    Ok(id) => {
                        let tenant = self.args.tenant.clone();
                        let identity = Identity { tenant, scope: self.args.scope.clone(), id };
                        let mut claim = Claim::new(identity, Mode::Done);
                        claim.time = row.time;
                        claims.push(claim);
                    }
                    Err(error) => {
                        counts.refused += 1;
                        counts.because(&row.id, &error.to_string());
                    }
                }
            }
            claims
        }

        async fn page(&self, claims: &[Claim], records: bool, counts: &mut Counts) -> Result<(), Failure> {
            if claims.is_empty() {
                return Ok(());
            }
            let known = self.known(claims).await?;
            let new = claims.iter().zip(known).filter(|(_, known)| !known).map(|(claim, _)| claim.clone());
            let new: Vec<_> = new.collect();
            counts.known += (claims.len() - new.len()) as u64;
            if !records || new.is_empty() {
                counts.recorded += new.len() as u64;
                return Ok(());
            }
            let mut answers = self.ledger.claim(&new).await?.into_iter();
            let there = self.known(&new).await?;
            for (claim, there) in new.iter().zip(there) {
                let id = &claim.identity.id.to_string();
                match (answers.next(), there) {
                    (Some(Ok(Outcome::First(_))), true) => counts.recorded += 1,
                    (_, true) => counts.known += 1, // somebody else was faster
                    (Some(Ok(Outcome::TooOld { .. })), false) => {
                        counts.too_old += 1;
                        counts.because(id, "too old");
                    }
                    (answer, false) => {
                        counts.missing += 1;
                        counts.because(
                            id,
                            &match answer {
                                Some(Ok(outcome)) => format!("the ledger says {}", outcome.name()),
                                Some(Err(error)) => error.to_string(),
                                None => "the ledger did not answer".to_owned(),
                            },
                        );
                    }
                }
            }
            Ok(())
        }

        /// Which of them the ledger has as processed.
        async fn known(&self, claims: &[Claim]) -> Result<Vec<bool>, Failure> {
            if self.ledger.settings().identity == IdentityRule::Id {
                let identities: Vec<_> = claims.iter().map(|claim| claim.identity.clone()).collect();
                return Ok(self.ledger.known(&identities).await?);
            }
            let mut known = Vec::with_capacity(claims.len());
            for claim in claims {
                let entry = self.ledger.get(&claim.identity, claim.time).await?;
                known.push(entry.is_some_and(|entry| matches!(entry.state, State::Done | State::Finished)));
            }
            Ok(known)
        }
    }

    impl Counts {
        /// Rows that have an id and no time, where the time is part of the identity. Their events have one, and
        /// would run.
        fn timeless(&mut self, rows: u64) {
            self.missing += rows;
            if rows > 0 {
                let rows = counted(rows, "row", "rows");
                self.because(
                    "no time",
                    &format!("{rows} have an id, and no time that could be part of the identity"),
                );
            }
        }

        fn because(&mut self, id: &str, reason: &str) {
            if self.reasons.len() < SHOWN_MAX {
                let id: String = id.chars().take(80).collect();
                self.reasons.push(format!("{}: {}", print::escaped(&id), print::escaped(reason)));
            }
        }
    }

    /// `counts` is of the last pass over the table, `first` of the one that recorded most.
    fn report(
        global: &Global,
        args: &ImportArgs,
        counts: &Counts,
        first: Option<&Counts>,
    ) -> Result<(), Failure> {
        let recorded = first.map_or(counts.recorded, |first| first.recorded + counts.recorded);
        let before = first.map_or(counts.known, |first| first.known);
        let later = first.map_or(0, |_| counts.recorded);
        let verified = first.map(|_| counts.known + counts.recorded);
        if global.json {
            return print::json(&json!({
                "dry_run": args.dry_run, "ids": counts.ids, "recorded": recorded, "known": before,
                "appeared": later, "verified": verified, "left": counts.open, "refused": counts.refused,
                "too_old": counts.too_old, "missing": counts.missing, "reasons": counts.reasons,
            }));
        }
        let verb = if args.dry_run { "would record" } else { "recorded" };
        print::line(&format!(
            "{} in the table: {verb} {} as done in {}; {} known before",
            counted(counts.ids, "id", "ids"),
            counted(recorded, "event", "events"),
            args.scope,
            before
        ))?;
        for (status, count) in counts.open.iter().take(SHOWN_MAX) {
            let status = print::escaped(status);
            print::line(&format!("left: {count} with status {status}; they run when they are delivered"))?;
        }
        if counts.refused > 0 {
            let rows = counted(counts.refused, "row has", "rows have");
            print::line(&format!(
                "refused: {rows} no id that hapax takes; a delivery of one is refused, too"
            ))?;
        }
        if counts.too_old > 0 {
            let ids = counted(counts.too_old, "id is", "ids are");
            print::line(&format!(
                "too old: {ids} of weeks that the ledger has dropped; a delivery is refused, too"
            ))?;
        }
        for reason in &counts.reasons {
            print::line(&format!("  {reason}"))?;
        }
        if let Some(verified) = verified {
            print::line(&format!(
                "verified: the ledger has {verified} of them as processed, {} not",
                counts.missing
            ))?;
        }
        match (first, later) {
            (None, _) => {}
            (Some(_), 0) => print::line("no event came while this ran")?,
            (Some(_), _) => print::line(&format!(
                "{} came while this ran; run it again after the old service has stopped",
                counted(later, "event", "events")
            ))?,
        }
        Ok(())
    }
}
