use super::*;

#[test]
fn times_are_read_and_printed_in_utc() {
    for (text, printed) in [
        ("2026-03-01T23:30:00Z", "2026-03-01T23:30:00Z"),
        ("2026-03-02T00:30:00+01:00", "2026-03-01T23:30:00Z"),
        ("2026-03-01T23:30:00.123456Z", "2026-03-01T23:30:00.123456Z"),
    ] {
        assert_eq!(Time::parse(text).unwrap().to_string(), printed);
    }
    for bad in ["", "2026-03-01", "2026-03-01T23:30:00", "2026-13-01T00:00:00Z"] {
        let error = Time::parse(bad).unwrap_err().to_string();
        assert!(error.contains("RFC 3339"), "{error}");
    }
}

#[test]
fn arithmetic_saturates() {
    let end = Time::from_micros(i64::MAX);
    assert_eq!(end.plus(Duration::from_secs(1)), end);
    assert_eq!(end.plus(Duration::MAX), end);
    assert_eq!(Time::from_micros(i64::MIN).minus(Duration::MAX), Time::from_micros(i64::MIN));
    assert_eq!(Time::from_millis(i64::MAX), end);
    let early = Time::from_micros(5);
    assert_eq!(early.since(Time::from_micros(2)), Duration::from_micros(3));
    assert_eq!(early.since(Time::from_micros(9)), Duration::ZERO);
    assert_eq!(end.to_string(), format!("{}us", i64::MAX), "what no calendar has is printed all the same");
}

#[test]
fn a_manual_clock_moves_when_told_to_and_is_shared_by_its_clones() {
    let clock = ManualClock::new(Time::from_micros(10));
    let clone = clock.clone();
    assert_eq!(clone.now(), clone.now());
    clock.advance(Duration::from_micros(5));
    assert_eq!(clone.now(), Time::from_micros(15));
}

#[test]
fn the_systems_clock_is_in_this_century() {
    let now = SystemClock.now();
    assert!(now > Time::parse("2025-01-01T00:00:00Z").unwrap());
    assert!(now < Time::parse("2100-01-01T00:00:00Z").unwrap());
}
