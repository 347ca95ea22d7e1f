//! The description of the API: made from the routes, completed with what every route may answer.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::{OpenApi, ToSchema};

/// What is described besides the routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "hapax",
        description = "Every event takes effect once. Errors are problems (RFC 9457); decide by their `code`, never by a text. \
                       A request that failed for an unknown reason may be sent again as it was.",
    ),
    components(schemas(ProblemBody)),
    tags(
        (name = "claims", description = "Claim an event before its effect, settle it afterwards"),
        (name = "journal", description = "Append events and read them"),
        (name = "records", description = "Records of modules, written with their events under a key"),
        (name = "analytics", description = "Records as the read model has them, each counted once"),
        (name = "keys", description = "Keys of writes"),
        (name = "letters", description = "Dead, held, parked and lost events, for operators"),
        (name = "tokens", description = "API tokens and the audit, for operators"),
        (name = "server", description = "The server itself"),
        (name = "probes", description = "For orchestrators and collectors"),
    )
)]
pub struct Api;

/// A problem (RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
pub struct ProblemBody {
    /// The page that explains the code.
    #[schema(format = "uri")]
    r#type: String,
    /// What kind of problem it is.
    title: String,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// The stable code to decide by.
    #[schema(example = "conflict")]
    code: String,
    /// A sentence about this request.
    detail: String,
}

/// What every operation may answer.
const ALWAYS: [(&str, &str); 11] = [
    ("400", "The input is invalid: `invalid`"),
    ("401", "The token is missing or not valid: `unauthenticated`"),
    (
        "403",
        "The host, the origin or the caller's role is refused: `host-forbidden`, `origin-forbidden`, `forbidden`",
    ),
    ("408", "The request came too slowly; nothing was done: `request-timeout`"),
    ("413", "The body is too large: `body-too-large`"),
    (
        "431",
        "The head of the request is too large: `head-too-large`; beyond four times the limit without a body",
    ),
    ("429", "Too many requests: `rate-limited`"),
    ("500", "The server failed; its log says why"),
    ("501", "The backend cannot do this: `unsupported`, `not-built-in`"),
    ("503", "A database is unavailable or busy: `unavailable`, `contended`, `week-missing`, `overloaded`"),
    ("504", "It took too long; a write goes on: `handler-timeout`"),
];
/// What operations with a body may answer besides.
const WITH_BODY: [(&str, &str); 2] = [
    ("415", "The body is not JSON: `media-type`"),
    ("422", "The id or the key belongs to other content: `mismatch`, `key-mismatch`"),
];

/// The whole description as JSON.
pub fn document(api: &utoipa::openapi::OpenApi) -> Value {
    let mut document = serde_json::to_value(api).unwrap_or_default();
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    let token =
        json!({"type": "http", "scheme": "bearer", "description": "An API token (`hapax token create`)"});
    document["components"]["securitySchemes"] = json!({"token": token});
    // Or none, where a server has no tokens and listens on this machine only.
    document["security"] = json!([{"token": []}, {}]);
    let Some(paths) = document["paths"].as_object_mut() else { return document };
    for (path, item) in paths {
        if path == "/healthz" || path == "/readyz" {
            continue; // they ask nobody who calls, and say themselves what they answer
        }
        let Some(operations) = item.as_object_mut() else { continue };
        for operation in operations.values_mut().filter(|operation| operation["responses"].is_object()) {
            let with_body = operation["requestBody"].is_object();
            let more = WITH_BODY.iter().filter(|_| with_body);
            for (status, description) in ALWAYS.iter().chain(more) {
                if operation["responses"][status].is_null() {
                    operation["responses"][status] = json!({"description": description});
                }
            }
            if let Some(answers) = operation["responses"].as_object_mut() {
                let refusals = answers.iter_mut().filter(|(status, _)| status.as_str() >= "400");
                refusals.for_each(|(_, answer)| answer["content"] = problem_content());
            }
            let tenant = json!({
                "name": "Hapax-Tenant", "in": "header", "required": false,
                "description": "Whose data, where no credential says so",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            });
            match operation["parameters"].as_array_mut() {
                Some(parameters) => parameters.push(tenant),
                None => operation["parameters"] = json!([tenant]),
            }
        }
    }
    document
}

/// Whatever is refused is answered with a problem.
fn problem_content() -> Value {
    json!({"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemBody"}}})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    /// The description has one schema for a name: of two types with one name, one would be described as the
    /// other.
    #[test]
    fn every_described_type_has_a_name_of_its_own() {
        let mut named: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src/serve");
        for file in std::fs::read_dir(sources).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                continue; // the files of the page
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let mut described = false;
            for line in text.lines() {
                described |= line.starts_with("#[derive(") && line.contains("ToSchema");
                let name = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "));
                if let Some(name) = name.filter(|_| described) {
                    let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
                    named.entry(name.to_owned()).or_default().push(path.display().to_string());
                    described = false;
                }
            }
        }
        assert!(named.len() > 40, "the sources were read: {}", named.len());
        named.retain(|_, files| files.len() > 1);
        assert!(named.is_empty(), "{named:?}");
    }
}
