//! What a projection has of a subject, whoever wrote it.

use std::collections::{BTreeMap, BTreeSet};

use hapax::analytics::{Change, Version};
use hapax::erase::Subject;
use hapax::projection::{Applied, Content, Projection};
use hapax::records::Name;

use super::work::PAGE;
use crate::failure::Failure;

/// The records of the subject that a projection has content of, with its versions: those that the journal knows, and
/// whatever else it has under their names.
pub async fn with_content(
    projection: &dyn Projection,
    of: &Subject,
    heads: &BTreeMap<Name, u64>,
) -> Result<Vec<(Name, Version)>, Failure> {
    let mut names: BTreeSet<Name> = heads.keys().cloned().collect();
    match (of.tenant_id(), &of.record) {
        (Some(tenant), Some((module, id))) => {
            names.insert(Name { tenant, module: module.clone(), id: *id });
        }
        (Some(tenant), None) => {
            let mut after = None;
            loop {
                let page = projection.scan(after.as_deref()).await?;
                names.extend(
                    page.found.into_iter().map(|(name, _)| name).filter(|name| name.tenant == tenant),
                );
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
        }
        (None, _) => {} // records have tenants that are UUIDs
    }
    let (names, mut found) = (names.into_iter().collect::<Vec<_>>(), Vec::new());
    for names in names.chunks(PAGE) {
        for (name, document) in names.iter().zip(projection.documents(names).await?) {
            let Some(document) = document else { continue };
            // What cannot be read may be anything.
            if !matches!(document.content, Content::Deleted | Content::Expired) {
                found.push((name.clone(), document.version));
            }
        }
    }
    Ok(found)
}

/// Applies deletions, and fails if one is not taken.
pub async fn apply(projection: &dyn Projection, deletions: &[Change]) -> Result<(), Failure> {
    for changes in deletions.chunks(PAGE) {
        for applied in projection.erase(changes).await? {
            match applied {
                Applied::Busy { reason } | Applied::Failed { reason } | Applied::Rejected { reason } => {
                    let message = format!("{}: {reason}", projection.about());
                    return Err(Failure::dependency("unavailable", message));
                }
                _ => {}
            }
        }
    }
    Ok(())
}
