//! Numbers and durations in words, for messages that people read.

use std::time::Duration;

/// A number with its noun: `1 copy`, `2 copies`.
///
/// ```
/// use hapax::words::counted;
/// assert_eq!((counted(1, "copy", "copies"), counted(0, "copy", "copies")), ("1 copy".into(), "0 copies".into()));
/// ```
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A duration in the largest unit that is exact: `7 days`, `90 minutes`, `1 second`, `250 ms`.
///
/// ```
/// use hapax::words::span;
/// use std::time::Duration;
/// assert_eq!(span(Duration::from_secs(604_800)), "7 days");
/// assert_eq!(span(Duration::from_secs(5400)), "90 minutes");
/// assert_eq!(span(Duration::from_millis(1500)), "1500 ms");
/// ```
pub fn span(time: Duration) -> String {
    const UNITS: [(u128, &str, &str); 4] = [
        (86_400_000_000_000, "day", "days"),
        (3_600_000_000_000, "hour", "hours"),
        (60_000_000_000, "minute", "minutes"),
        (1_000_000_000, "second", "seconds"),
    ];
    let nanos = time.as_nanos();
    if nanos == 0 {
        return "no time".to_owned();
    }
    for (unit, one, many) in UNITS {
        if nanos.is_multiple_of(unit) {
            return counted(u64::try_from(nanos / unit).unwrap_or(u64::MAX), one, many);
        }
    }
    if nanos.is_multiple_of(1_000_000) {
        return format!("{} ms", nanos / 1_000_000);
    }
    format!("{time:?}")
}

/// Which of `known` the author of `name` probably meant: the nearest one if it is near enough, else
/// the only one that begins or ends with `name`.
///
/// ```
/// use hapax::words::nearest;
/// assert_eq!(nearest("ledger.ulr", ["ledger.url", "journal.url"]), Some("ledger.url"));
/// assert_eq!(nearest("colour", ["ledger.url", "journal.url"]), None);
/// assert_eq!(nearest("attempts_max", ["ledger.url", "retry.attempts_max"]), Some("retry.attempts_max"));
/// assert_eq!(nearest("url", ["ledger.url", "journal.url"]), None);
/// ```
pub fn nearest<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let near = name.chars().count().div_ceil(4).clamp(1, 3);
    let known: Vec<_> = known.into_iter().collect();
    let distances = known.iter().map(|known| (distance(name, known), *known));
    let nearest = distances.filter(|(distance, _)| *distance <= near).min_by_key(|(distance, _)| *distance);
    nearest.map(|(_, known)| known).or_else(|| {
        let mut of = known.into_iter().filter(|known| is_part(name, known));
        of.next().filter(|_| of.next().is_none())
    })
}

/// Whether a name is the first or the last part of another, in whole words.
fn is_part(name: &str, of: &str) -> bool {
    let parts = |c: char| matches!(c, '.' | '_' | '-');
    !name.is_empty()
        && (of.strip_prefix(name).is_some_and(|rest| rest.starts_with(parts))
            || of.strip_suffix(name).is_some_and(|rest| rest.ends_with(parts)))
}

/// The number of insertions, deletions, replacements and swaps of neighbours that turn one text
/// into the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, wanted) in [
            ("", "abc", 3),
            ("url", "url", 0),
            ("ulr", "url", 1),
            ("uri", "url", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!((distance(a, b), distance(b, a)), (wanted, wanted), "{a} {b}");
        }
    }
}
