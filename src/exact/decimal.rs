//! Exact decimal numbers, for sums of money.

use std::fmt;

/// Digits after the point.
const SCALE: u32 = 9;
const ONE: i128 = 1_000_000_000;
/// Numbers are smaller than this: 28 digits before the point.
const LIMIT: i128 = 10_i128.pow(28 + SCALE);

/// A decimal number with up to 28 digits before the point and up to 9 after it. A JSON number that does
/// not fit is not a [`Decimal`]: it is never rounded.
///
/// ```
/// use hapax::exact::Decimal;
/// let sum = Decimal::parse("0.1").unwrap().plus(Decimal::parse("0.2").unwrap()).unwrap();
/// assert_eq!(sum.to_string(), "0.3");
/// assert_eq!(Decimal::parse("1.25e2"), Decimal::parse("125"));
/// assert_eq!(Decimal::parse("0.0000000001"), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Decimal(i128);

impl Decimal {
    /// From the text of a JSON number.
    pub fn parse(text: &str) -> Option<Self> {
        Decimal::parse_sum(text).filter(|number| number.0.abs() < LIMIT)
    }

    /// From the text of a sum, which may have more digits before the point than a number that is added.
    pub(crate) fn parse_sum(text: &str) -> Option<Self> {
        let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let (mantissa, exponent) = match text.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
            None => (text, 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let digits = format!("{whole}{fraction}");
        let digits = digits.trim_start_matches('0');
        let kept = digits.trim_end_matches('0');
        if kept.is_empty() {
            return Some(Decimal(0));
        }
        let zeros = i32::try_from(digits.len() - kept.len()).ok()?;
        // The number is `kept` × 10^shift, in units of the last digit that is stored.
        let shift = exponent.checked_sub(i32::try_from(fraction.len()).ok()?)?.checked_add(zeros)?;
        let power = u32::try_from(shift.checked_add(SCALE.cast_signed())?).ok()?;
        let value = kept.parse::<i128>().ok()?.checked_mul(10_i128.checked_pow(power)?)?;
        Some(Decimal(if negative { -value } else { value }))
    }

    /// From units of the last digit.
    #[cfg(feature = "clickhouse")]
    pub(crate) fn from_units(units: i128) -> Self {
        Decimal(units)
    }

    /// In units of the last digit.
    #[cfg(feature = "clickhouse")]
    pub(crate) fn units(self) -> i128 {
        self.0
    }

    /// The sum, unless it is beyond what 128 bits hold.
    pub fn plus(self, other: Decimal) -> Option<Self> {
        self.0.checked_add(other.0).map(Decimal)
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, value) = (if self.0 < 0 { "-" } else { "" }, self.0.unsigned_abs());
        let (whole, fraction) = (value / ONE.unsigned_abs(), value % ONE.unsigned_abs());
        if fraction == 0 {
            return write!(f, "{sign}{whole}");
        }
        let fraction = format!("{fraction:09}");
        write!(f, "{sign}{whole}.{}", fraction.trim_end_matches('0'))
    }
}

impl serde::Serialize for Decimal {
    /// As a JSON number with all its digits.
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let raw = serde_json::value::RawValue::from_string(self.to_string());
        raw.map_err(serde::ser::Error::custom)?.serialize(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_digits() {
        for (text, shown) in [
            ("0", "0"),
            ("-0.0", "0"),
            ("7", "7"),
            ("-7.50", "-7.5"),
            ("1e3", "1000"),
            ("1E-9", "0.000000001"),
            ("12345678901234567890.123456789", "12345678901234567890.123456789"),
            ("100e-2", "1"),
            ("0.0012e3", "1.2"),
            ("9999999999999999999999999999.999999999", "9999999999999999999999999999.999999999"),
            ("0e999", "0"),
        ] {
            assert_eq!(
                Decimal::parse(text).map(|number| number.to_string()).as_deref(),
                Some(shown),
                "{text}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_not_rounded() {
        for text in [
            "1e-10",
            "0.1234567891",
            "1e28",
            "-1e28",
            "1e999999999999",
            "1e-999999",
            "",
            "-",
            ".5",
            "x",
            "1x",
        ] {
            assert_eq!(Decimal::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sums_are_exact_and_ordered() {
        let number = |text: &str| Decimal::parse(text).unwrap();
        let mut sum = Decimal::default();
        for _ in 0..10_000 {
            sum = sum.plus(number("0.01")).unwrap();
        }
        assert_eq!(sum, number("100"));
        assert!(number("-2") < number("-1.5") && number("0.5") < number("2"));
        assert_eq!(Decimal(i128::MAX).plus(Decimal(1)), None);
        assert_eq!(serde_json::to_string(&number("10.50")).unwrap(), "10.5");
    }
}
