//! `hapax stats`: what would have happened without hapax.

use std::collections::BTreeMap;

use clap::Args;
use hapax::ledger::{Amount, Prevented, PreventedDays, day_name, day_of};
use hapax::words::counted;
use hapax::{Scope, Tenant};
use serde_json::json;

use crate::cli::{Global, between};
use crate::failure::Failure;
use crate::print;

/// Show how many repeated effects were prevented, by day, layer and scope
///
/// It counts deliveries of events that had taken effect before, and keyed writes that got the first answer again.
/// Deliveries that are busy, stale or dead do not count, and nothing is counted twice. The last second of a process that
/// was killed is missing. With ledger.value (such as /amount) the values of what was prevented are summed.
#[derive(Debug, Args)]
#[command(after_help = "Example: hapax stats --days 7 --set ledger.value=/amount")]
pub struct StatsArgs {
    /// How many days to show, including today
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = between::<u16>(1, 400))]
    days: u16,
    /// Only this tenant
    #[arg(long)]
    tenant: Option<Tenant>,
    /// Only effects without a tenant
    #[arg(long, conflicts_with = "tenant")]
    no_tenant: bool,
    /// Only this scope
    #[arg(long)]
    scope: Option<Scope>,
}

impl StatsArgs {
    fn wants(&self, of: Option<&(Option<Tenant>, Scope)>) -> bool {
        match of {
            Some((tenant, scope)) => {
                self.tenant.as_ref().is_none_or(|wanted| tenant.as_ref() == Some(wanted))
                    && !(self.no_tenant && tenant.is_some())
                    && self.scope.as_ref().is_none_or(|wanted| wanted == scope)
            }
            None => self.tenant.is_none() && !self.no_tenant && self.scope.is_none(),
        }
    }
}

pub async fn run(global: &Global, args: &StatsArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let ledger = crate::ledger::open(global, &config).await?;
    let now = ledger.now().await?;
    let first = day_of(now) - i32::from(args.days) + 1;
    let PreventedDays { mut prevented, mut unlogged } = ledger.prevented(first).await?;
    prevented.retain(|row| args.wants(row.of.as_ref()));
    unlogged.retain(|(_, of, _)| args.wants(of.as_ref()));
    let (sum, by_layer) = sums(&prevented);
    let unlogged: u64 = unlogged.iter().map(|(.., count)| count).sum();
    if global.json {
        let rows = prevented.iter().map(|row| {
            json!({
                "day": day_name(row.day), "layer": row.layer.name(),
                "tenant": row.of.as_ref().and_then(|(tenant, _)| tenant.as_ref()).map(Tenant::as_str),
                "scope": row.of.as_ref().map(|(_, scope)| scope.as_str()),
                "count": row.amount.count, "valued": row.amount.valued, "value": row.amount.value.to_string(),
            })
        });
        print::json(&json!({
            "now": now.to_string(), "since": day_name(first), "count": sum.count, "valued": sum.valued,
            "value": sum.value.to_string(), "prevented": rows.collect::<Vec<_>>(), "unlogged_skips": unlogged,
        }))?;
        return Ok(0);
    }
    print::line(&format!(
        "{} since {} (UTC){}",
        counted(sum.count, "effect was not done twice", "effects were not done twice"),
        day_name(first),
        worth(&sum)
    ))?;
    for (layer, amount) in by_layer {
        print::line(&format!("  {layer}: {}{}", amount.count, worth(&amount)))?;
    }
    if !prevented.is_empty() {
        let rows: Vec<_> = prevented.iter().rev().map(row).collect();
        print::table(["day", "layer", "tenant", "scope", "count", "value"], &rows)?;
    }
    if unlogged > 0 {
        print::line(&format!(
            "{} not in the log that `hapax explain` shows: too many came at once, or later ones took their place",
            counted(unlogged, "skip is", "skips are")
        ))?;
    }
    print::line("Not counted: skips in a caller's own transaction, and repeats that a read model replaces.")?;
    Ok(0)
}

/// The sum of all, and of each layer.
pub fn sums(prevented: &[Prevented]) -> (Amount, BTreeMap<&'static str, Amount>) {
    let (mut sum, mut by_layer) = (Amount::default(), BTreeMap::<_, Amount>::new());
    for row in prevented {
        sum.add(row.amount);
        by_layer.entry(row.layer.name()).or_default().add(row.amount);
    }
    (sum, by_layer)
}

fn worth(amount: &Amount) -> String {
    match amount.valued {
        0 => String::new(),
        valued if valued == amount.count => format!(", worth {}", amount.value),
        valued => format!(", worth {} ({valued} of them have a value)", amount.value),
    }
}

fn row(row: &Prevented) -> [String; 6] {
    let (tenant, scope) = match &row.of {
        Some((tenant, scope)) => (tenant.as_ref().map_or("-", Tenant::as_str), scope.as_str()),
        None => ("-", "(scopes beyond the limit of that day)"),
    };
    let value = if row.amount.valued == 0 { "-".to_owned() } else { row.amount.value.to_string() };
    [
        day_name(row.day),
        row.layer.name().to_owned(),
        print::escaped(tenant),
        print::escaped(scope),
        row.amount.count.to_string(),
        value,
    ]
}
