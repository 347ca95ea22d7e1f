//! The name of a module.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::id::Visible;

/// The longest slug: `module_` and the slug name a schema, whose limit is 63 bytes.
const LENGTH_MAX: usize = 48;

/// The name of a module: `a-z`, then up to 47 of `a-z`, `0-9` and `_`. It becomes part of the name of
/// a schema, so nothing else is accepted, and nothing is folded or trimmed.
///
/// ```
/// use hapax::records::ModuleSlug;
/// assert_eq!(ModuleSlug::new("orders_2")?.as_str(), "orders_2");
/// assert!(ModuleSlug::new("Orders").is_err());
/// assert!(ModuleSlug::new("orders; drop table x").is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModuleSlug(Arc<str>);

impl ModuleSlug {
    /// A slug, if it is one.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
        let fits = text.len() <= LENGTH_MAX
            && text.as_bytes().first().is_some_and(u8::is_ascii_lowercase)
            && text.bytes().all(plain);
        if fits {
            return Ok(ModuleSlug(text.into()));
        }
        let shown: String = text.chars().take(LENGTH_MAX + 1).collect();
        let more = if shown.len() < text.len() { "…" } else { "" };
        Err(Error::invalid(
            "module",
            format!(
                "its name is \"{}{more}\"; it needs 1 to {LENGTH_MAX} characters a-z, 0-9 or _, beginning with a letter",
                Visible(&shown)
            ),
        ))
    }

    /// The slug.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ModuleSlug {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        ModuleSlug::new(text)
    }
}

impl fmt::Display for ModuleSlug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ModuleSlug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModuleSlug({})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_identifiers_are_slugs() {
        for good in ["a", "orders", "a1_", &"a".repeat(48)] {
            assert_eq!(ModuleSlug::new(good).unwrap().as_str(), good);
        }
        let long = "a".repeat(49);
        for bad in
            ["", "1a", "_a", "Orders", "a-b", "a.b", "a b", " a", "a\n", "é", "a\"", "a/../b", "%61", &long]
        {
            let error = ModuleSlug::new(bad).unwrap_err().to_string();
            assert!(error.contains("1 to 48"), "{bad:?}: {error}");
        }
        let hostile = ModuleSlug::new("x\u{1b}[2J").unwrap_err().to_string();
        assert!(!hostile.contains('\u{1b}'), "{hostile:?}");
        assert!(ModuleSlug::new("x".repeat(1 << 20)).unwrap_err().to_string().len() < 300);
    }
}
