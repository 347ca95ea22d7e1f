//! `hapax erase`: takes the data of a tenant or a record out of everything that hapax keeps.
//!
//! `places` opens the stores, `work` is one pass over them, `trail` is what audit rows remember between two runs: a
//! topic on Kafka may deliver old versions again until its retention has removed them, so a later run of the same
//! command looks once more, and only then says that everything is gone.

pub mod places;
mod projected;
pub mod trail;
mod work;

use std::time::Duration;

use clap::Args;
use hapax::erase::Subject;
use hapax::records::{ModuleSlug, Uuid};
use hapax::words::counted;
use hapax::{Error, Scope, Tenant, Topic};
use serde_json::{Value, json};

use self::places::{Named, Places};
use self::trail::{State, Trail};
use self::work::{Counts, Settled, Work};
use crate::cli::{Global, duration};
use crate::failure::{self, Failure};
use crate::print;

/// How many passes there are at most, if writers go on meanwhile.
const PASSES_MAX: u32 = 3;

/// Erase a tenant's or a record's data from everything that hapax keeps
///
/// Deletes records (a deletion is a version, and stays), takes the content out of the journal, of answers of keyed
/// writes, held events, dead letters, the embedded bus and read models, and says what is out of reach. It may be
/// killed and run again at any point. Run it once more after the topic's retention: it then says "physically gone".
#[derive(Debug, Args)]
#[command(
    override_usage = "hapax erase [--tenant T] [--module SLUG --record ID]\n       [--dry-run] [--yes] [--by WHO] [--json]",
    after_help = "Examples:\n  \
        hapax erase --tenant 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10 --dry-run\n  \
        hapax erase --tenant acme --by dpo@example.com --reason 'request 4711' --yes\n  \
        hapax erase --module orders --record 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c11 --yes"
)]
pub struct EraseArgs {
    /// Whose data; without a record everything of this tenant
    #[arg(long, value_name = "T", required_unless_present = "record")]
    tenant: Option<Tenant>,
    /// The module of the record
    #[arg(long, value_name = "SLUG", requires = "record")]
    module: Option<ModuleSlug>,
    /// Only this record
    #[arg(long, value_name = "ID", requires = "module")]
    record: Option<Uuid>,
    /// Count what there is, place by place; change nothing
    #[arg(long)]
    dry_run: bool,
    /// The person; stored with the audit row [default: $USER, else the uid]
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
    /// The reason; stored with the audit row
    #[arg(long, value_name = "R", default_value = "")]
    reason: String,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    /// How long to wait for the relay and the read model to pass the deletions, and for rebuilds to end
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
    wait: Duration,
    /// A projection besides those of projection.url; may be repeated
    #[arg(long, value_name = "URL")]
    projection: Vec<String>,
    /// The scope of a projection that is no more, so that nobody waits for it; may be repeated
    #[arg(long, value_name = "SCOPE")]
    ended: Vec<Scope>,
    /// A topic that was published to besides those of the configuration, as of an earlier generation; may be repeated
    #[arg(long)]
    topic: Vec<Topic>,
    /// Leave out stores that cannot erase, and name them among what is out of reach
    #[arg(long)]
    skip_unsupported: bool,
}

/// What a run has to say.
struct Report<'r> {
    subject: &'r Subject,
    dry_run: bool,
    erased: Counts,
    left: Counts,
    state: Option<State>,
    beyond: Vec<String>,
}

pub async fn run(global: &Global, args: &EraseArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let subject = match (&args.tenant, &args.module, args.record) {
        (_, Some(_), Some(id)) if id.is_nil() => {
            return Err(Failure::input("--record is the nil UUID, which no record has"));
        }
        (tenant, Some(module), Some(id)) => Subject::record(tenant.clone(), module.clone(), id),
        (Some(tenant), ..) => Subject::tenant(tenant.clone()),
        _ => return Err(Failure::config("name a tenant, or a module and a record")),
    };
    if subject.record.is_some() {
        hapax::records::tenant_id(subject.tenant.as_ref())?; // a record's tenant is a UUID
    }
    let by = crate::who::runs(args.by.as_deref())?;
    let named = Named {
        projections: &args.projection,
        ended: &args.ended,
        topics: &args.topic,
        skip: args.skip_unsupported,
    };
    let places = Places::open(global, &config, &named).await?;
    let work = Work { places: &places, config: &config, by: &by };
    let before = work.count(&subject).await?;
    // A record is known by its events. Something may mention the id of one that is not there, in another module.
    let known = work.knows(&subject).await? || subject.record.is_none() && before.total() > 0;
    if args.dry_run {
        must_be_known(known, &subject)?;
        let (left, state, beyond) = (Counts::default(), None, places.beyond.clone());
        show(global, &Report { subject: &subject, dry_run: true, erased: before, left, state, beyond })?;
        return Ok(0);
    }
    // Whoever was never here leaves no row either.
    must_be_known(known, &subject)?;
    if !args.yes {
        print::can_ask("this erases data for good")?;
        let rows = counted(before.total(), "row", "rows");
        if !print::asked(&format!("Erase {} ({rows})?", print::escaped(&subject.to_string())))? {
            return Err(Failure::declined("nothing was changed"));
        }
    }
    let access = Places::audit(&config).await?;
    let trail = Trail::new(&*access, &subject, &by, &args.reason);
    if before.total() > 0 {
        trail.begin(&before).await?;
    }
    let (mut erased, mut settled, mut left) = (Counts::default(), Settled::Passing, Counts::default());
    for _ in 0..PASSES_MAX {
        erased.add_all(&work.erase(&subject).await?);
        settled = work.settled(&subject, args.wait).await?;
        left = work.count(&subject).await?;
        if left.total() == 0 {
            break;
        }
    }
    let mut beyond = places.beyond.clone();
    beyond.extend(work.compact().await?);
    let mut ends = Vec::new();
    if let Some(bus) = places.bus.as_deref() {
        for topic in &places.topics {
            ends.push((topic.clone(), trail::ranges(bus, topic).await?));
        }
    }
    let state = trail.end(&erased, &left, &settled, &ends, &places.unopened).await?;
    let is_left = left.total() > 0;
    show(global, &Report { subject: &subject, dry_run: false, erased, left, state: Some(state), beyond })?;
    Ok(if is_left { failure::BROKEN_PROMISE } else { 0 })
}

fn must_be_known(known: bool, subject: &Subject) -> Result<(), Failure> {
    if known {
        return Ok(());
    }
    let message = format!(
        "there is nothing of {subject}, and never was as far as the stores know; nothing was changed"
    );
    Err(Error::NotFound(message).into())
}

fn show(global: &Global, report: &Report<'_>) -> Result<(), Failure> {
    let Report { subject, dry_run, erased, left, state, beyond } = report;
    if global.json {
        let places = |counts: &Counts| -> Vec<Value> {
            counts.0.iter().map(|(place, rows)| json!({"place": place, "rows": rows})).collect()
        };
        let (module, record) =
            subject.record.as_ref().map(|(module, id)| (module.as_str(), id.to_string())).unzip();
        return print::json(&json!({
            "tenant": subject.tenant.as_ref().map(Tenant::as_str), "module": module, "record": record,
            "dry_run": dry_run, "rows": erased.total(), "places": places(erased), "left": places(left),
            "state": state.as_ref().map(State::word), "out_of_reach": beyond,
        }));
    }
    let rows: Vec<[String; 2]> =
        erased.0.iter().map(|(place, rows)| [place.clone(), rows.to_string()]).collect();
    print::table(["place", if *dry_run { "to erase" } else { "erased" }], &rows)?;
    for (place, rows) in left.0.iter().filter(|(_, rows)| *rows > 0) {
        print::line(&format!(
            "still there: {rows} in {place}; something writes to it, stop that and run this again"
        ))?;
    }
    let of = print::escaped(&subject.to_string());
    let rows = counted(erased.total(), "row", "rows");
    match state {
        None => print::line(&format!("{of}: {rows} would be erased; nothing was changed"))?,
        Some(state) => print::line(&format!("{of}: {rows} erased. {}", state.sentence()))?,
    }
    print::line("out of reach:")?;
    beyond.iter().try_for_each(|place| print::line(&format!("  {}", print::escaped(place))))
}
