//! Decides which member gets which partition: a pure function of the current state, so that every
//! bus that manages groups itself decides alike.
//!
//! It is cooperative: a partition that can stay with its member stays. One that must move is
//! revoked first, and assigned to another member only once it is free.

/// A partition as the plan sees it. Members are indexes.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    /// The member it is assigned to.
    pub holder: Option<usize>,
    /// Whether it is being revoked already.
    pub revoking: bool,
    /// The members that may have it.
    pub eligible: Vec<usize>,
}

/// One change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Assign a free partition to a member.
    Give {
        /// The partition.
        seat: usize,
        /// The member.
        to: usize,
    },
    /// Revoke a partition.
    Revoke {
        /// The partition.
        seat: usize,
    },
}

/// The steps after which every partition is assigned, and no member has two more than another
/// eligible one.
pub(crate) fn plan(members: usize, seats: &[Seat]) -> Vec<Step> {
    let mut load = vec![0_usize; members];
    for seat in seats.iter().filter(|seat| !seat.revoking) {
        if let Some(holder) = seat.holder {
            load[holder] += 1;
        }
    }
    let mut steps = Vec::new();
    // Partitions that are being revoked will go to some member. Count them, so that no more are
    // revoked than needed.
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

    /// Carries a plan out, as if every member released its partitions at once.
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
                // One more member: only the partitions it gets move.
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
