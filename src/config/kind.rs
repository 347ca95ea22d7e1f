//! What a setting's value may be.

use crate::id::NAME_CHARS_MAX;

/// The kind of value that a setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Any text.
    Text,
    /// A URL with one of these schemes, each with its form; empty means unset.
    Url(&'static [(&'static str, &'static str)]),
    /// URLs of these schemes, with spaces between them; empty means unset.
    Urls(&'static [(&'static str, &'static str)]),
    /// A name (1 to 255 characters, not blank, no NUL); blank means unset.
    Name,
    /// An SQL identifier of lower-case letters, digits and `_`.
    Identifier,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A whole number within these bounds, both included.
    Int {
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
    },
    /// `true` or `false` (also `1`, `0`, `yes`, `no`, `on`, `off`).
    Bool,
}

impl Kind {
    /// What is allowed, in words.
    pub fn range(self) -> String {
        match self {
            Kind::Text => "any text".to_owned(),
            Kind::Url(schemes) => {
                let forms: Vec<_> =
                    schemes.iter().map(|(_, form)| *form).filter(|form| !form.is_empty()).collect();
                match forms.split_last() {
                    Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
                    _ => forms.concat(),
                }
            }
            Kind::Urls(schemes) => {
                format!("{}; several with spaces between them", Kind::Url(schemes).range())
            }
            Kind::Name => format!("1 to {NAME_CHARS_MAX} characters, no NUL (blank: unset)"),
            Kind::Identifier => "1 to 63 of a-z, 0-9 and _, not beginning with a digit".to_owned(),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
            Kind::Int { min, max } => format!("a whole number from {min} to {max}"),
            Kind::Bool => "true or false".to_owned(),
        }
    }

    /// The URL probably meant by a value that is a file name.
    pub(super) fn url_of_file(self, text: &str) -> Option<String> {
        let Kind::Url(schemes) = self else { return None };
        let is_file = [".db", ".sqlite", ".sqlite3"].iter().any(|end| text.ends_with(end))
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'/'));
        let (scheme, _) = schemes.iter().find(|(_, form)| form.ends_with(":FILE")).filter(|_| is_file)?;
        Some(format!("{scheme}:{text}"))
    }

    /// The value in normal form, or `None` if it is not allowed. Two texts of one value (`yes`,
    /// `true`) agree.
    pub(super) fn normal(self, text: &str) -> Option<String> {
        match self {
            Kind::Text => (!text.contains('\0')).then(|| text.to_owned()),
            Kind::Url(schemes) => {
                let (scheme, rest) =
                    text.split_once(':').map_or((text, None), |(scheme, rest)| (scheme, Some(rest)));
                let form = schemes.iter().find(|(known, _)| *known == scheme).map(|(_, form)| *form);
                let fits = form.is_some_and(|form| match rest {
                    Some(rest) => !(names_file(form) && rest.trim_start_matches('/').is_empty()),
                    None => form == scheme,
                });
                (text.is_empty() || (fits && !text.contains('\0'))).then(|| text.to_owned())
            }
            Kind::Urls(schemes) => {
                let urls: Option<Vec<_>> =
                    text.split_whitespace().map(|url| Kind::Url(schemes).normal(url)).collect();
                urls.map(|urls| urls.join(" "))
            }
            Kind::Name => {
                if text.trim().is_empty() {
                    return Some(String::new());
                }
                (text.chars().count() <= NAME_CHARS_MAX && !text.contains('\0')).then(|| text.to_owned())
            }
            Kind::Identifier => {
                let plain = text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_'));
                let starts = text.bytes().next().is_some_and(|b| !b.is_ascii_digit());
                (plain && starts && text.len() <= 63).then(|| text.to_owned())
            }
            Kind::Choice(words) => words.iter().find(|word| **word == text).map(|word| (*word).to_owned()),
            Kind::Int { min, max } => {
                let number = text.trim().parse::<u64>().ok()?;
                (min..=max).contains(&number).then(|| number.to_string())
            }
            Kind::Bool => match text.trim().to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => Some("true".to_owned()),
                "false" | "0" | "no" | "off" => Some("false".to_owned()),
                _ => None,
            },
        }
    }
}

/// Whether a path must follow the scheme.
fn names_file(form: &str) -> bool {
    form.ends_with(":FILE") || form.ends_with(":PATH")
}
