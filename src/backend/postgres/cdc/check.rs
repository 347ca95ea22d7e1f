//! What change data capture needs of a server, a publication, a slot and a role: each problem with its remedy.

use sqlx::AssertSqlSafe;

use super::{PUBLICATION, PgCdc, Slot};
use crate::analytics::PULSES;
use crate::backend::postgres::codes::from_row;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::error::translate;
use crate::error::Result;
use crate::ledger::{Finding, Level};

/// A slot that is further behind is worth a word.
const LAG_BYTES: u64 = 256 << 20;

const WHAT: &str = "checking change data capture";

/// `$1`: the publication. `$2`: the role that Debezium has, if it is known.
const STATE: &str = "
select current_setting('wal_level') as wal_level, current_setting('max_slot_wal_keep_size') as keep,
  current_setting('server_version_num')::int >= 170000 as newer,
  exists (select from pg_publication b where b.pubname = $1) as published,
  coalesce((select b.puballtables from pg_publication b where b.pubname = $1), false) as everything,
  coalesce((select b.pubinsert and b.pubupdate and b.pubdelete and b.pubtruncate from pg_publication b where b.pubname = $1), false) as whole,
  array(select t.schemaname || '.' || t.tablename from pg_publication_tables t
    where t.pubname = $1 and t.tablename <> '{pulses}'
      and not (t.schemaname ~ '^module_[a-z0-9_]+$' and t.tablename = 'records')
    order by 1) as foreign,
  array(select m.slug::text from {s}.record_modules m where not exists (select from pg_publication_tables t
    where t.pubname = $1 and t.schemaname = 'module_' || m.slug and t.tablename = 'records') order by 1) as missing,
  array(select m.slug::text from {s}.record_modules m join pg_namespace n on n.nspname = 'module_' || m.slug
    join pg_class c on c.relnamespace = n.oid and c.relname = 'records' where c.relreplident <> 'f' order by 1) as partial,
  to_regclass('{s}.{pulses}') is not null and exists (select from pg_publication_tables t
    where t.pubname = $1 and t.schemaname = '{s}' and t.tablename = '{pulses}') as pulses,
  (select r.rolsuper or r.rolreplication from pg_roles r where r.rolname = $2) as replicates,
  (select r.rolsuper or r.rolbypassrls or not exists (select from {s}.record_modules m where not exists (
      select from pg_policy p, unnest(p.polroles) o where p.polrelid = to_regclass('module_' || m.slug || '.records')
        and p.polname = 'records_maintenance' and pg_has_role(r.oid, o, 'USAGE')))
    from pg_roles r where r.rolname = $2) as sees";

from_row! {
    struct State {
        wal_level: String, keep: String, newer: bool, published: bool, everything: bool, whole: bool, foreign: Vec<String>,
        missing: Vec<String>, partial: Vec<String>, pulses: bool, replicates: Option<bool>, sees: Option<bool>,
    }
}

fn finding(level: Level, check: &'static str, message: impl Into<String>) -> Finding {
    Finding { level, check, message: message.into() }
}

impl PgCdc {
    /// What is right and wrong with the server, the publication and the slot. `user` is the role that
    /// Debezium connects with.
    pub async fn check(&self, slot: &str, user: &str) -> Result<Vec<Finding>> {
        let sql = STATE.replace("{s}", &self.schema).replace("{pulses}", PULSES);
        let mut tx = begin(&self.pool, BEGIN).await.map_err(|e| translate(WHAT, e))?;
        let modules: bool = sqlx::query_scalar("select to_regclass($1) is not null")
            .persistent(false)
            .bind(format!("{}.record_modules", self.schema))
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        if !modules {
            let message = "there are no modules yet: `hapax modules create SLUG` makes the first, and the publication with it";
            return Ok(vec![finding(Level::Refusal, "publication", message)]);
        }
        let state: State = sqlx::query_as(AssertSqlSafe(sql))
            .persistent(false)
            .bind(PUBLICATION)
            .bind(user)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        drop(tx);
        let mut findings = state.findings(user);
        findings.extend(of_slot(slot, self.slot(slot).await?.as_ref(), state.newer));
        Ok(findings)
    }
}

impl State {
    fn findings(&self, user: &str) -> Vec<Finding> {
        let mut found = Vec::new();
        let mut say = |level, check, message: String| found.push(finding(level, check, message));
        if self.wal_level == "logical" {
            say(Level::Fine, "wal_level", "wal_level is logical".into());
        } else {
            let text = format!(
                "wal_level is {}, and Debezium needs logical: set it in postgresql.conf and restart the server",
                self.wal_level
            );
            say(Level::Refusal, "wal_level", text);
        }
        let names = |names: &[String]| names.join(", ");
        let publication = if !self.published {
            "there is no publication hapax_records: `hapax modules create SLUG` makes it with the first module".into()
        } else if self.everything {
            "the publication hapax_records is FOR ALL TABLES, so keys, answers and tokens leave the database: drop it, and run \
             `hapax modules create` and `hapax cdc apply` again"
                .into()
        } else if !self.foreign.is_empty() {
            let foreign = names(&self.foreign);
            format!(
                "the publication hapax_records has tables that are not modules: ALTER PUBLICATION hapax_records DROP TABLE {foreign}"
            )
        } else if !self.missing.is_empty() {
            let missing = names(&self.missing);
            format!(
                "modules are not in the publication hapax_records, so their changes never leave: ALTER PUBLICATION hapax_records ADD \
                 TABLE module_SLUG.records for {missing}, raise analytics.generation and build the read model again"
            )
        } else if !self.whole {
            "the publication hapax_records leaves out inserts, updates, deletes or truncates: ALTER PUBLICATION hapax_records SET \
             (publish = 'insert, update, delete, truncate')"
                .into()
        } else {
            String::new()
        };
        if publication.is_empty() {
            say(Level::Fine, "publication", "hapax_records has every module, and nothing else".into());
        } else {
            say(Level::Refusal, "publication", publication);
        }
        if self.partial.is_empty() {
            say(Level::Fine, "replica identity", "that of every module is FULL".into());
        } else {
            let text = format!(
                "the replica identity is not FULL, so deletions come without their seq: ALTER TABLE module_SLUG.records REPLICA \
                 IDENTITY FULL for {}",
                names(&self.partial)
            );
            say(Level::Refusal, "replica identity", text);
        }
        if !self.pulses {
            let text = "there is no table of pulses in the publication, so lastSyncAt stays unknown: `hapax cdc apply` makes it";
            say(Level::Warning, "pulses", text.into());
        }
        let role = match (self.replicates, self.sees) {
            (None, _) => {
                Some(format!("there is no role {user} for Debezium: name another in cdc.database_url"))
            }
            (Some(false), _) => {
                Some(format!("the role {user} may not replicate: ALTER ROLE {user} REPLICATION"))
            }
            (_, Some(false) | None) => Some(format!(
                "row security hides records from the role {user}, so Debezium's snapshot would be empty: `hapax modules grants \
                 --maintenance-role {user}` prints the rights"
            )),
            _ => None,
        };
        if let Some(text) = role {
            say(Level::Refusal, "role", text);
        }
        if self.keep == "-1" {
            let text = "max_slot_wal_keep_size is not limited: while Debezium is down, the log grows until the disk is full. Set it, \
                        and watch the slot's lag: a slot that needs more than it is lost";
            say(Level::Warning, "max_slot_wal_keep_size", text.into());
        } else {
            let text = format!("{}: a slot that is further behind is lost", self.keep);
            say(Level::Fine, "max_slot_wal_keep_size", text);
        }
        found
    }
}

fn of_slot(name: &str, slot: Option<&Slot>, newer: bool) -> Vec<Finding> {
    let Some(slot) = slot else {
        let message =
            format!("there is no replication slot {name} yet: `hapax cdc apply` has Debezium make it");
        return vec![finding(Level::Warning, "slot", message)];
    };
    let lag = slot.lag_bytes >> 20;
    let first = if slot.lost {
        let message = format!(
            "the server removed log that the replication slot {name} needs, so changes are missing: raise analytics.generation, \
             name a new cdc.topic, run `hapax cdc remove --slot` and `hapax cdc apply`, and build the read model again (`hapax \
             analytics rebuild`)"
        );
        finding(Level::Refusal, "slot", message)
    } else if !slot.active {
        let message = format!(
            "nobody reads the replication slot {name}, which is {lag} MiB behind: see `hapax cdc status`"
        );
        finding(Level::Warning, "slot", message)
    } else if slot.lag_bytes > LAG_BYTES {
        finding(
            Level::Warning,
            "slot",
            format!("Debezium is {lag} MiB behind on the replication slot {name}"),
        )
    } else {
        finding(Level::Fine, "slot", format!("{name} is read, and {lag} MiB behind"))
    };
    let mut found = vec![first];
    if newer && !slot.failover {
        let message = format!(
            "the replication slot {name} is not kept on standbys, so a failover loses it: slot.failover = true, and \
             sync_replication_slots on the standby"
        );
        found.push(finding(Level::Warning, "slot", message));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State {
            wal_level: "logical".into(),
            keep: "1GB".into(),
            newer: true,
            published: true,
            everything: false,
            whole: true,
            foreign: vec![],
            missing: vec![],
            partial: vec![],
            pulses: true,
            replicates: Some(true),
            sees: Some(true),
        }
    }

    fn messages(state: &State) -> String {
        let bad = state.findings("cdc").into_iter().filter(|finding| finding.level != Level::Fine);
        bad.map(|finding| format!("{:?} {}: {}", finding.level, finding.check, finding.message))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn each_problem_is_reported_with_its_remedy() {
        assert_eq!(messages(&state()), "");
        let orders = || vec!["orders".to_owned()];
        for (state, expected) in [
            (State { wal_level: "replica".into(), ..state() }, "Refusal wal_level: wal_level is replica"),
            (State { published: false, ..state() }, "hapax modules create"),
            (State { everything: true, ..state() }, "keys, answers and tokens leave"),
            (State { foreign: vec!["hapax.keys".into()], ..state() }, "DROP TABLE hapax.keys"),
            (State { missing: orders(), ..state() }, "ADD TABLE module_SLUG.records for orders"),
            (State { whole: false, ..state() }, "insert, update, delete, truncate"),
            (State { partial: orders(), ..state() }, "REPLICA IDENTITY FULL for orders"),
            (State { pulses: false, ..state() }, "Warning pulses"),
            (State { replicates: None, sees: None, ..state() }, "no role cdc"),
            (State { replicates: Some(false), ..state() }, "ALTER ROLE cdc REPLICATION"),
            (State { sees: Some(false), ..state() }, "snapshot would be empty"),
            (State { keep: "-1".into(), ..state() }, "Warning max_slot_wal_keep_size"),
        ] {
            let text = messages(&state);
            assert!(text.contains(expected) && text.lines().count() == 1, "{expected}: {text}");
        }
    }

    #[test]
    fn a_slot_is_known_by_its_state() {
        let slot = Slot { active: true, lag_bytes: 0, lost: false, failover: true };
        let levels =
            |slot: Option<&Slot>| of_slot("s", slot, true).iter().map(|f| f.level).collect::<Vec<_>>();
        assert_eq!(levels(Some(&slot)), [Level::Fine]);
        assert_eq!(levels(None), [Level::Warning]);
        assert_eq!(levels(Some(&Slot { active: false, ..slot.clone() })), [Level::Warning]);
        assert_eq!(levels(Some(&Slot { lag_bytes: 1 << 30, ..slot.clone() })), [Level::Warning]);
        assert_eq!(levels(Some(&Slot { lost: true, ..slot.clone() })), [Level::Refusal]);
        assert_eq!(levels(Some(&Slot { failover: false, ..slot })), [Level::Fine, Level::Warning]);
    }
}
