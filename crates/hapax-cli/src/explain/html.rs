//! The report as one HTML file, to attach to an incident: no script, nothing from another host.

use std::fmt::Write as _;

use super::explanation::{Explanation, Layer, Row, Step, pause, stamp};
use crate::print;

const HEAD: &str = r#"<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
"#;

const STYLE: &str = "
:root { --text: #1c2128; --soft: #57606a; --line: #d0d7de; --back: #fff; --band: #f6f8fa;
  --key: #8250df; --journal: #0969da; --relay: #0a7d91; --ledger: #1a7f37; --record: #9a6700; --read: #bf3989;
  --projection: #6b7f1d; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117;
  --band: #151b23; --key: #ab7df8; --journal: #4493f8; --relay: #39c5cf; --ledger: #3fb950; --record: #d29922;
  --read: #db61a2; --projection: #a3b95a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 60rem; color: var(--text); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.35rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1rem; }
h1 small, .soft, dt { color: var(--soft); font-weight: normal; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
ol { margin: 1.5rem 0 0; padding: 0; list-style: none; border-left: 2px solid var(--line); }
li { position: relative; padding: .5rem 0 .5rem 1.25rem; overflow-wrap: anywhere; }
li.step::before { content: ''; position: absolute; left: -6px; top: 1rem; width: 10px; height: 10px;
  border-radius: 50%; background: var(--colour); }
li.gap { color: var(--soft); }
time, .soft { font-variant-numeric: tabular-nums; font-size: .85rem; }
.place { color: var(--colour); font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: .1rem 0 0; font-size: .85rem; }
dl div { display: flex; gap: .35rem; min-width: 0; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.key { --colour: var(--key); } .journal { --colour: var(--journal); } .relay { --colour: var(--relay); }
.ledger { --colour: var(--ledger); } .record { --colour: var(--record); } .read { --colour: var(--read); }
.projection { --colour: var(--projection); }
.note { padding: .5rem .75rem; background: var(--band); border: 1px solid var(--line); border-radius: 6px; }
";

/// The page. `reasons` says whether the history has reasons.
pub fn page(explanation: &Explanation, reasons: bool) -> String {
    let (kind, name) = explanation.of.parts();
    let name = plain(name);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n{HEAD}<title>{kind} {name}</title>\n<style>{STYLE}</style>\n</head>\n\
         <body>\n<h1><small>{kind}</small> <bdi>{name}</bdi></h1>\n"
    );
    // Writing to a String cannot fail.
    if let Some(tenant) = &explanation.tenant {
        let _ = writeln!(page, "<p class=\"soft\">tenant <bdi>{}</bdi></p>", plain(tenant));
    }
    let _ = writeln!(page, "<p class=\"soft\">asked at {}</p>\n<ol>", stamp(explanation.asked_at));
    for row in explanation.rows() {
        match row {
            Row::Gap(gap) => {
                let _ = writeln!(page, "<li class=\"gap\">… {} …</li>", pause(gap));
            }
            Row::Step(step) => write_step(&mut page, explanation, step),
        }
    }
    page.push_str("</ol>\n");
    if !explanation.scopes.is_empty() {
        page.push_str("<h2>Scopes</h2>\n");
        for queue in &explanation.scopes {
            let _ = writeln!(page, "<p><b><bdi>{}</bdi></b> {}</p>", plain(&queue.scope), plain(&queue.what));
        }
    }
    if !explanation.stores.is_empty() {
        page.push_str("<h2>Stores</h2>\n");
        for answer in &explanation.stores {
            let _ = writeln!(page, "<p><b>{}</b> <bdi>{}</bdi></p>", answer.store, plain(&answer.message));
        }
    }
    let _ = writeln!(page, "<h2>Not shown</h2>\n<p class=\"note\">{}</p>", plain(&explanation.not_recorded));
    page.push_str(if reasons {
        "<p class=\"note\">Payloads, the values of headers and the bodies of answers are left out. Reasons are shown as they were \
         written, without what looks like a password or a token: they may quote a payload.</p>\n"
    } else {
        "<p class=\"note\">Payloads, the values of headers, the bodies of answers and the reasons of failures and of operators are \
         left out.</p>\n"
    });
    page.push_str("</body>\n</html>\n");
    page
}

fn write_step(page: &mut String, explanation: &Explanation, step: &Step) {
    let class = class(step.layer);
    let _ = write!(page, "<li class=\"step {class}\">");
    match step.at {
        Some(at) => {
            let at = stamp(at);
            let _ = write!(page, "<time datetime=\"{at}\">{at}</time> ");
        }
        None => page.push_str("<span class=\"soft\">no time</span> "),
    }
    let _ = write!(page, "<span class=\"place\">{}", step.layer.name());
    if let Some(name) = &step.name {
        let _ = write!(page, " <bdi>{}</bdi>", plain(name));
    }
    page.push_str("</span> ");
    if let Some(seq) = step.seq.filter(|_| !explanation.is_of_one()) {
        let _ = write!(page, "<span class=\"soft\">seq {seq}</span> ");
    }
    let _ = write!(page, "<br>{}", plain(&step.what));
    let facts = explanation.facts(step).into_iter();
    let facts: Vec<_> = facts
        .map(|(name, value)| format!("<div><dt>{name}</dt><dd><bdi>{}</bdi></dd></div>", plain(&value)))
        .collect();
    if !facts.is_empty() {
        let _ = write!(page, "<dl>{}</dl>", facts.concat());
    }
    page.push_str("</li>\n");
}

/// The first word of a layer is its class.
fn class(layer: Layer) -> &'static str {
    layer.name().split(' ').next().unwrap_or_default()
}

/// Text that is nothing but text in HTML, with what cannot be seen made visible.
fn plain(text: &str) -> String {
    let text = print::escaped(text);
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => plain.push_str("&amp;"),
            '<' => plain.push_str("&lt;"),
            '>' => plain.push_str("&gt;"),
            '"' => plain.push_str("&quot;"),
            '\'' => plain.push_str("&#39;"),
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use hapax::Time;

    use super::super::explanation::Subject;
    use super::*;

    /// T535
    #[test]
    fn t535_every_layer_has_a_colour_in_light_and_in_dark() {
        for layer in Layer::ALL {
            let class = class(layer);
            assert!(STYLE.contains(&format!(".{class} {{ --colour: var(--{class}); }}")), "{class}");
            assert_eq!(STYLE.matches(&format!("--{class}: #")).count(), 2, "{class}");
        }
    }

    #[test]
    fn idle_gaps_are_folded_and_names_stay_text() {
        let step = |what: &str, at_s: i64| Step::new(Layer::Ledger, what).at(Time::from_millis(at_s * 1000));
        let explanation = Explanation {
            of: Subject::Event("</title><script>alert(1)</script>".into()),
            tenant: Some("\u{202e}\"'&".into()),
            asked_at: Time::default(),
            steps: vec![step("first seen", 0), step("done", 11_520).named("<b>")],
            scopes: Vec::new(),
            stores: Vec::new(),
            not_recorded: "Nothing.".into(),
        };
        let page = page(&explanation, false);
        assert!(page.contains("<li class=\"gap\">… 3 h 12 min …</li>"), "{page}");
        assert!(
            page.contains("&lt;script&gt;") && !page.contains("<script") && !page.contains("<b>"),
            "{page}"
        );
        assert!(page.contains("\\u{202e}&quot;&#39;&amp;"), "{page}");
    }
}
