use super::*;

fn at(text: &str) -> Time {
    Time::parse(text).unwrap()
}

/// A UUIDv7 with this time.
fn v7(time: Time) -> EventId {
    let millis = u64::try_from(time.as_micros() / 1000).unwrap();
    EventId::from(uuid::Builder::from_unix_timestamp_millis(millis, &[7; 10]).into_uuid())
}

#[test]
fn weeks_begin_on_monday_at_midnight_in_utc() {
    for (time, monday) in [
        ("2026-03-01T23:30:00Z", "2026-02-23"),
        ("2026-03-01T23:59:59.999999Z", "2026-02-23"),
        ("2026-03-02T00:00:00Z", "2026-03-02"),
        ("2026-03-02T00:30:00Z", "2026-03-02"),
        ("2026-03-02T00:30:00+01:00", "2026-02-23"),
        ("2000-01-01T00:00:00Z", "1999-12-27"),
        ("2000-01-03T00:00:00Z", "2000-01-03"),
        ("2099-12-31T23:59:59.999999Z", "2099-12-28"),
    ] {
        assert_eq!(Week::of(at(time)).to_string(), monday, "{time}");
    }
}

#[test]
fn beyond_the_century_there_are_no_weeks() {
    for time in [
        "1999-12-31T23:59:59.999999Z",
        "2100-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z",
        "2999-01-01T00:00:00Z",
    ] {
        assert!(Week::of(at(time)).is_timeless(), "{time}");
    }
    for time in [i64::MIN, i64::MAX, -1] {
        assert!(Week::of(Time::from_micros(time)).is_timeless());
    }
    assert_eq!(Week::TIMELESS.to_string(), "timeless");
}

#[test]
fn every_week_has_its_number_and_comes_back() {
    let mut monday = Week::of(at("2000-01-01T00:00:00Z")).start();
    let mut number = 1;
    while monday < at("2100-01-01T00:00:00Z") {
        let week = Week::from_number(number).unwrap();
        assert_eq!((week.number(), week.start()), (number, monday));
        let days = if number == 1 { 5..7 } else { 0..4 }; // the bounds cut off parts of the first and the last week
        for day in days {
            assert_eq!(Week::of(monday.plus(Duration::from_secs(86_400 * day))), week);
        }
        monday = monday.plus(Duration::from_hours(168));
        number += 1;
    }
    assert_eq!(Week::from_number(0).unwrap(), Week::TIMELESS);
    assert!(Week::from_number(number).is_err());
    assert!(Week::from_number(-1).is_err());
}

#[test]
fn an_id_goes_where_its_own_time_says_whatever_the_delivery_says() {
    for (time, week) in [
        ("1999-06-01T00:00:00Z", "timeless"),
        ("2000-01-01T00:00:00Z", "1999-12-27"),
        ("2099-12-31T23:59:59Z", "2099-12-28"),
        ("2100-01-01T00:00:00Z", "timeless"),
    ] {
        for time_given in [None, Some(at("2026-03-02T00:30:00Z"))] {
            assert_eq!(Week::route(IdentityRule::Id, &v7(at(time)), time_given).unwrap().to_string(), week);
        }
    }
    for id in ["order-17", "0190d3a0-5b7e-4c3a-9f51-2f6f1f3b7c10", "0190D3A0-5B7E-7C3A-9F51-2F6F1F3B7C10"] {
        let id = EventId::new(id).unwrap();
        assert!(Week::route(IdentityRule::Id, &id, Some(at("2026-03-02T00:30:00Z"))).unwrap().is_timeless());
    }
}

#[test]
fn id_and_time_goes_by_the_time_and_needs_it() {
    let id = v7(at("2026-01-01T00:00:00Z"));
    let route = |time| Week::route(IdentityRule::IdAndTime, &id, time);
    assert_eq!(route(Some(at("2026-03-01T23:30:00Z"))).unwrap().to_string(), "2026-02-23");
    assert_eq!(route(Some(at("2026-03-02T00:30:00Z"))).unwrap().to_string(), "2026-03-02");
    assert!(route(None).unwrap_err().to_string().contains("missing"));
}

#[test]
fn weeks_are_made_so_far_ahead_and_no_further() {
    let (now, ahead) = (at("2026-03-04T12:00:00Z"), Duration::from_hours(672));
    for time in
        ["2001-01-01T00:00:00Z", "2026-03-04T12:00:00Z", "2026-04-01T12:00:00Z", "2026-04-05T23:00:00Z"]
    {
        assert!(Week::of(at(time)).may_be_made(now, ahead).is_ok(), "{time}");
    }
    for time in ["2026-04-06T00:00:00Z", "2090-01-01T00:00:00Z"] {
        let error = Week::of(at(time)).may_be_made(now, ahead).unwrap_err().to_string();
        assert!(error.contains("28 days"), "{error}");
    }
    assert!(Week::TIMELESS.may_be_made(now, Duration::ZERO).is_ok());
}
