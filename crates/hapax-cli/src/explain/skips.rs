//! Steps of the log of skips, and what it does not have.

use std::time::Duration;

use hapax::ledger::{Logged, LoggedSkip, SKIPS_KEPT, SKIPS_RETENTION, SkipReason, day_of};
use hapax::words::counted;
use hapax::{Error, EventId, Ledger, Tenant};

use super::entries::Found;
use super::explanation::{Layer, Step};
use super::stores::Visibility;

/// What the log has, and how many skips of these scopes it dropped.
#[derive(Default)]
pub struct Skips {
    pub logged: Vec<Logged>,
    /// `None`: the ledger keeps no log.
    dropped: Option<u64>,
}

impl Skips {
    /// Asks about the events that are known, and about those that were found.
    pub async fn look(
        ledger: &dyn Ledger,
        tenant: Option<&Tenant>,
        known: &[EventId],
        found: &Found,
        visibility: &Visibility,
    ) -> hapax::Result<Self> {
        let mut ids = known.to_vec();
        ids.extend(found.seen.iter().map(|seen| seen.entry.identity.id.clone()));
        ids.sort();
        ids.dedup();
        let mut logged = match ledger.skips(tenant, &ids).await {
            Err(Error::Unsupported(_)) => return Ok(Skips::default()),
            logged => logged?,
        };
        logged.retain(|logged| visibility.sees(logged.identity.scope.as_str()));
        logged.sort_by(|a, b| a.identity.cmp(&b.identity));
        let since = ledger.now().await?.minus(SKIPS_RETENTION + Duration::from_hours(24));
        let days = ledger.prevented(day_of(since)).await?;
        let is_seen = |of: &Option<(Option<Tenant>, hapax::Scope)>| match of {
            Some((of, scope)) => of.as_ref() == tenant && visibility.sees(scope.as_str()),
            // Of scopes that were not told apart: perhaps of these. Who is bound to a tenant learns nothing of others.
            None => !visibility.is_bound,
        };
        let dropped = days.unlogged.iter().filter(|(_, of, _)| is_seen(of)).map(|(.., count)| count).sum();
        Ok(Skips { logged, dropped: Some(dropped) })
    }

    /// What is not recorded.
    pub fn unrecorded(&self) -> String {
        match self.dropped {
            None => "deliveries that were skipped, for this ledger keeps no log of them".to_owned(),
            Some(dropped) => {
                let dropped = match dropped {
                    0 => String::new(),
                    dropped => format!(
                        ", or that its log dropped ({} of this tenant's scopes lately)",
                        counted(dropped, "skip", "skips")
                    ),
                };
                format!("deliveries skipped more than 7 days ago or by SQL functions{dropped}")
            }
        }
    }
}

/// The steps of one log entry.
pub fn steps(logged: &Logged, seq: Option<u64>) -> Vec<Step> {
    let about = |step: Step| step.named(&logged.identity.scope).of(&logged.identity.id, seq);
    let mut steps: Vec<_> = logged.skips.iter().map(|skip| about(step(skip))).collect();
    let between = logged.count.saturating_sub(steps.len() as u64);
    if between > 0 {
        let what = format!("and skipped {} more between", counted(between, "time", "times"));
        steps.insert(SKIPS_KEPT.min(steps.len()), about(Step::new(Layer::Ledger, what)));
    }
    steps
}

fn step(skip: &LoggedSkip) -> Step {
    let what = match skip.reason {
        SkipReason::Duplicate => "skipped: it took effect before",
        SkipReason::Window => "skipped: the window knew that it took effect before",
        SkipReason::Once => "skipped: it runs at most once, and was claimed before",
        SkipReason::Stale => "skipped: its aggregate had moved past it",
        SkipReason::TooOld => "skipped: its week was dropped, so it is unknown whether it took effect",
        SkipReason::Mismatch => "skipped: its id was used before for another event",
        SkipReason::Dead => "skipped: it is a dead letter",
        _ => "skipped",
    };
    let (topic, partition, offset) = match &skip.origin {
        Some((topic, partition, offset)) => (Some(topic.as_str()), Some(*partition), Some(*offset)),
        None => (None, None, None),
    };
    Step::new(Layer::Ledger, what)
        .at(skip.at)
        .fact("skip", Some(skip.reason.name()))
        .fact("topic", topic)
        .fact("partition", partition)
        .fact("offset", offset)
}
