//! The operator's page: three files in the binary, the same for every view.
//!
//! They are made from `ui/` by esbuild and committed (`ui/build.mjs`), so that nobody needs node to build
//! hapax. They hold no data: what the page shows it asks for, as its visitor.

use std::fmt::Write as _;
use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue,
    IF_NONE_MATCH, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{Response as HttpResponse, StatusCode};
use axum::response::Response;
use axum::routing::get;
use sha2::{Digest as _, Sha256};

use super::app::Shared;

/// The paths of the views; all of them are the same document.
const VIEWS: [&str; 6] = ["/", "/event", "/dead", "/aggregates", "/retention", "/doctor"];
const SCRIPT: &str = "/page.js";
const STYLE: &str = "/page.css";

/// What the browser may do with the page: run its script, use its style, ask its own server. Nothing inline,
/// nothing from elsewhere, in nobody's frame; text never becomes markup (trusted types).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// A file of the page.
struct Asset {
    text: &'static str,
    kind: &'static str,
    tag: LazyLock<HeaderValue>,
}

macro_rules! asset {
    ($file:literal, $kind:literal) => {
        Asset {
            text: include_str!(concat!("page/", $file)),
            kind: concat!($kind, "; charset=utf-8"),
            tag: LazyLock::new(|| tag(include_str!(concat!("page/", $file)))),
        }
    };
}

static DOCUMENT: Asset = asset!("index.html", "text/html");
static PAGE_JS: Asset = asset!("page.js", "text/javascript");
static PAGE_CSS: Asset = asset!("page.css", "text/css");

/// Whether a route is a file of the page, which is for everybody: it has no data.
pub fn is_page(route: &str) -> bool {
    VIEWS.contains(&route) || route == SCRIPT || route == STYLE
}

pub fn routes() -> Router<Shared> {
    let mut router = Router::new()
        .route(SCRIPT, get(|headers: HeaderMap| async move { PAGE_JS.answer(&headers) }))
        .route(STYLE, get(|headers: HeaderMap| async move { PAGE_CSS.answer(&headers) }));
    for view in VIEWS {
        router = router.route(view, get(|headers: HeaderMap| async move { DOCUMENT.answer(&headers) }));
    }
    router
}

fn tag(text: &str) -> HeaderValue {
    let hash = Sha256::digest(text.as_bytes());
    let hex = hash.iter().take(16).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}"); // writing to a String cannot fail
        hex
    });
    HeaderValue::from_str(&format!("\"{hex}\"")).unwrap_or(HeaderValue::from_static("\"page\""))
}

impl Asset {
    fn answer(&self, headers: &HeaderMap) -> Response {
        let known = headers.get_all(IF_NONE_MATCH).iter().any(|value| {
            let given = value.as_bytes();
            // A proxy that compresses makes a tag a weak one; there may be several.
            given == b"*" || given.windows(self.tag.len()).any(|part| part == self.tag.as_bytes())
        });
        let mut response: Response =
            HttpResponse::new(if known { Body::empty() } else { Body::from(self.text) });
        if known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let fixed: [(HeaderName, &'static str); 7] = [
            (CONTENT_TYPE, self.kind),
            (CONTENT_SECURITY_POLICY, POLICY),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (X_FRAME_OPTIONS, "DENY"),
            (REFERRER_POLICY, "no-referrer"),
            // It may be kept, and is asked about each time: the script must be the binary's.
            (CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        ];
        let all = response.headers_mut();
        for (name, value) in fixed {
            all.insert(name, HeaderValue::from_static(value));
        }
        all.insert(ETAG, self.tag.clone());
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_known_is_not_sent_again() {
        let mut headers = HeaderMap::new();
        assert_eq!(DOCUMENT.answer(&headers).status(), 200);
        headers.insert(IF_NONE_MATCH, PAGE_JS.tag.clone());
        assert_eq!(DOCUMENT.answer(&headers).status(), 200, "the tag is another file's");
        let weak = format!("\"x\", W/{}", DOCUMENT.tag.to_str().unwrap());
        headers.insert(IF_NONE_MATCH, HeaderValue::from_str(&weak).unwrap());
        let answer = DOCUMENT.answer(&headers);
        assert_eq!(answer.status(), 304);
        assert!(answer.headers().contains_key(CONTENT_SECURITY_POLICY));
    }

    #[test]
    fn the_page_has_no_inline_script_and_names_no_other_host() {
        assert_eq!(DOCUMENT.text.matches("<script").count(), 1);
        assert!(DOCUMENT.text.contains("<script type=\"module\" src=\"/page.js\"></script>"));
        assert!(!DOCUMENT.text.contains("<style") && !DOCUMENT.text.contains(" style="));
        for text in [DOCUMENT.text, PAGE_CSS.text] {
            assert!(!text.contains("http://") && !text.contains("https://"), "{text}");
        }
        assert!(!PAGE_JS.text.contains("eval(") && !PAGE_JS.text.contains("new Function"));
    }
}
