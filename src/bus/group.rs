//! Who gets which partition. A pure function over what is, so that every bus with groups of its own decides alike.
//!
//! It is cooperative: a partition that can stay where it is stays. One that shall move is first revoked, and given to
//! another only once it is free.

/// A partition, as the plan sees it. Members are numbers.
#[derive(Debug, Clone)]
pub(super) struct Seat {
    /// In whose assignments it is.
    pub holder: Option<usize>,
    /// Whether it was asked back already.
    pub revoking: bool,
    /// Who may have it.
    pub eligible: Vec<usize>,
}

/// One change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A free partition goes to a member.
    Give {
        /// Which partition.
        seat: usize,
        /// To whom.
        to: usize,
    },
    /// A partition is asked back.
    Revoke {
        /// Which partition.
        seat: usize,
    },
}

/// What must change so that everything is in someone's assignments, and nobody has two more than another who may have them.
pub(super) fn plan(members: usize, seats: &[Seat]) -> Vec<Step> {
    let mut load = vec![0_usize; members];
    for seat in seats.iter().filter(|seat| !seat.revoking) {
        if let Some(holder) = seat.holder {
            load[holder] += 1;
        }
    }
    let mut steps = Vec::new();
    // What is asked back already will come to someone: counted, so that not more is asked back than is needed.
    for (at, seat) in seats.iter().enumerate().filter(|(_, seat)| seat.revoking || seat.holder.is_none()) {
        let Some(to) = seat.eligible.iter().copied().min_by_key(|m| (load[*m], *m)) else { continue };
        load[to] += 1;
        if seat.holder.is_none() {
            steps.push(Step::Give { seat: at, to });
        }
    }
    for (at, seat) in seats.iter().enumerate().rev().filter(|(_, seat)| !seat.revoking) {
        let Some(holder) = seat.holder else { continue };
        let Some(to) = seat.eligible.iter().copied().min_by_key(|m| (load[*m], *m)) else { continue };
        if load[holder] >= load[to] + 2 {
            load[holder] -= 1;
            load[to] += 1;
            steps.push(Step::Revoke { seat: at });
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(holder: Option<usize>, members: usize) -> Seat {
        Seat { holder, revoking: false, eligible: (0..members).collect() }
    }

    /// Carries a plan out, as members that give everything back would.
    fn settle(members: usize, seats: &mut [Seat]) -> usize {
        let mut moves = 0;
        loop {
            let steps = plan(members, seats);
            if steps.is_empty() {
                return moves;
            }
            for step in steps {
                match step {
                    Step::Give { seat, to } => seats[seat].holder = Some(to),
                    Step::Revoke { seat } => {
                        moves += 1;
                        seats[seat].holder = None;
                    }
                }
            }
        }
    }

    #[test]
    fn everything_is_spread_and_what_can_stay_stays() {
        for members in 1..6 {
            for partitions in 0..13 {
                let mut seats = vec![seat(None, members); partitions];
                assert_eq!(settle(members, &mut seats), 0, "free partitions are given, not moved");
                let before: Vec<_> = seats.iter().map(|s| s.holder).collect();
                // One more member: only what it gets moves.
                for seat in &mut seats {
                    seat.eligible.push(members);
                }
                let moves = settle(members + 1, &mut seats);
                let changed = seats.iter().zip(&before).filter(|(now, was)| now.holder != **was).count();
                assert_eq!(moves, changed);
                let has = |m| seats.iter().filter(|s| s.holder == Some(m)).count();
                assert_eq!(changed, has(members), "{members} members, {partitions} partitions");
                let (low, high) =
                    (0..=members).map(has).fold((usize::MAX, 0), |(l, h), n| (l.min(n), h.max(n)));
                assert!(high - low <= 1, "{members} members, {partitions} partitions: {low} to {high}");
            }
        }
    }

    #[test]
    fn what_is_asked_back_is_not_asked_back_twice() {
        let mut seats = vec![seat(Some(0), 2); 4];
        let steps = plan(2, &seats);
        assert_eq!(steps.len(), 2);
        for step in steps {
            let Step::Revoke { seat } = step else { panic!("{step:?}") };
            seats[seat].revoking = true;
        }
        assert_eq!(plan(2, &seats), []);
    }

    #[test]
    fn topics_go_to_those_who_want_them() {
        let only = |m| Seat { holder: None, revoking: false, eligible: vec![m] };
        let mut seats = vec![only(0), only(0), only(0), only(1)];
        assert_eq!(settle(2, &mut seats), 0);
        assert_eq!(seats.iter().map(|s| s.holder).collect::<Vec<_>>(), [Some(0), Some(0), Some(0), Some(1)]);
    }
}
