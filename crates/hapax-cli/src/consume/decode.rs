//! Flags for producers that use their own names for the parts of an event.

use clap::Args;
use hapax::consumer::{Decoder, Places};
use hapax::id::{IdChain, IdSource};

use crate::failure::Failure;

/// Each takes a JSON pointer into the payload (`/order/id`) or `header:NAME`; by default the usual
/// names are tried (docs/handlers.md).
#[derive(Debug, Args)]
#[allow(clippy::struct_field_names, reason = "they are named as their flags are")]
pub(super) struct PlaceArgs {
    /// Where the id is: a JSON pointer, header:NAME, `cloudevent` (its source and id), `sha256` (of
    /// the payload) or `offset` (catches redelivery only). Repeat to try several in order [default:
    /// header idempotency_key or eventId, cloudevent, then /eventId, /event_id]
    #[arg(long, value_name = "PLACE")]
    id_at: Vec<String>,
    /// Where the aggregate is, such as /order_id or header:order [default: /aggregate_id and
    /// similar]
    #[arg(long, value_name = "PLACE")]
    aggregate_at: Option<String>,
    /// Where the number within the aggregate is [default: /sequence_number, /seq and similar]
    #[arg(long, value_name = "PLACE")]
    seq_at: Option<String>,
    /// Where the kind is [default: header ce_type, /event_type and similar]
    #[arg(long, value_name = "PLACE")]
    kind_at: Option<String>,
    /// Where the tenant is [default: header tenant_id]
    #[arg(long, value_name = "PLACE")]
    tenant_at: Option<String>,
}

impl PlaceArgs {
    pub(super) fn apply(&self, decoder: &mut Decoder) -> Result<(), Failure> {
        if !self.id_at.is_empty() {
            let sources = self.id_at.iter().map(|text| match text.as_str() {
                "sha256" => IdSource::ContentHash,
                "offset" => IdSource::Offset,
                "cloudevent" => IdSource::CloudEvent,
                text => match text.strip_prefix("header:") {
                    Some(name) => IdSource::Header(name.to_owned()),
                    None => IdSource::Pointer(text.to_owned()),
                },
            });
            decoder.id = IdChain::new(sources).map_err(|e| Failure::config(format!("--id-at: {e}")))?;
        }
        for (flag, text, places) in [
            ("--aggregate-at", &self.aggregate_at, &mut decoder.aggregate),
            ("--seq-at", &self.seq_at, &mut decoder.seq),
            ("--kind-at", &self.kind_at, &mut decoder.kind),
            ("--tenant-at", &self.tenant_at, &mut decoder.tenant),
        ] {
            let Some(text) = text else { continue };
            *places = match text.strip_prefix("header:") {
                Some(name) if !name.is_empty() => Places::new(&[name], &[]),
                None if text.starts_with('/') => Places::new(&[], &[text]),
                _ => {
                    return Err(Failure::config(format!(
                        "{flag} {text:?} is neither /POINTER nor header:NAME"
                    )));
                }
            };
        }
        Ok(())
    }
}
