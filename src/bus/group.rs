//! Decides which member gets which partition: a pure function of the current state, so that every
//! bus that manages groups itself decides alike.
//!
//! It is cooperative: a partition that can stay with its member stays. One that must move is
//! revoked first, and assigned to another member only once it is free.

/// A partition as the plan sees it. Members are indexes.
#[derive(Debug, Clone)]
pub(crate) struct PartitionSlot {
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
    Assign {
        /// The partition.
        slot: usize,
        /// The member.
        to: usize,
    },
    /// Revoke a partition.
    Revoke {
        /// The partition.
        slot: usize,
    },
}

/// The steps after which every partition is assigned, and no member has two more than another
/// eligible one.
pub(crate) fn plan(members: usize, slots: &[PartitionSlot]) -> Vec<Step> {
    let mut load = vec![0_usize; members];
    for slot in slots.iter().filter(|slot| !slot.revoking) {
        if let Some(holder) = slot.holder {
            load[holder] += 1;
        }
    }
    let mut steps = Vec::new();
    // Partitions that are being revoked will go to some member. Count them, so that no more are
    // revoked than needed.
    for (at, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.revoking || slot.holder.is_none()) {
        let Some(to) = slot.eligible.iter().copied().min_by_key(|m| (load[*m], *m)) else { continue };
        load[to] += 1;
        if slot.holder.is_none() {
            steps.push(Step::Assign { slot: at, to });
        }
    }
    for (at, slot) in slots.iter().enumerate().rev().filter(|(_, slot)| !slot.revoking) {
        let Some(holder) = slot.holder else { continue };
        let Some(to) = slot.eligible.iter().copied().min_by_key(|m| (load[*m], *m)) else { continue };
        if load[holder] >= load[to] + 2 {
            load[holder] -= 1;
            load[to] += 1;
            steps.push(Step::Revoke { slot: at });
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(holder: Option<usize>, members: usize) -> PartitionSlot {
        PartitionSlot { holder, revoking: false, eligible: (0..members).collect() }
    }

    /// Carries a plan out, as if every member released its partitions at once.
    fn settle(members: usize, slots: &mut [PartitionSlot]) -> usize {
        let mut moves = 0;
        loop {
            let steps = plan(members, slots);
            if steps.is_empty() {
                return moves;
            }
            for step in steps {
                match step {
                    Step::Assign { slot, to } => slots[slot].holder = Some(to),
                    Step::Revoke { slot } => {
                        moves += 1;
                        slots[slot].holder = None;
                    }
                }
            }
        }
    }

    #[test]
    fn everything_is_spread_and_what_can_stay_stays() {
        for members in 1..6 {
            for partitions in 0..13 {
                let mut slots = vec![slot(None, members); partitions];
                assert_eq!(settle(members, &mut slots), 0, "free partitions are given, not moved");
                let before: Vec<_> = slots.iter().map(|s| s.holder).collect();
                // One more member: only the partitions it gets move.
                for slot in &mut slots {
                    slot.eligible.push(members);
                }
                let moves = settle(members + 1, &mut slots);
                let changed = slots.iter().zip(&before).filter(|(now, was)| now.holder != **was).count();
                assert_eq!(moves, changed);
                let has = |m| slots.iter().filter(|s| s.holder == Some(m)).count();
                assert_eq!(changed, has(members), "{members} members, {partitions} partitions");
                let (low, high) =
                    (0..=members).map(has).fold((usize::MAX, 0), |(l, h), n| (l.min(n), h.max(n)));
                assert!(high - low <= 1, "{members} members, {partitions} partitions: {low} to {high}");
            }
        }
    }

    #[test]
    fn what_is_asked_back_is_not_asked_back_twice() {
        let mut slots = vec![slot(Some(0), 2); 4];
        let steps = plan(2, &slots);
        assert_eq!(steps.len(), 2);
        for step in steps {
            let Step::Revoke { slot } = step else { panic!("{step:?}") };
            slots[slot].revoking = true;
        }
        assert_eq!(plan(2, &slots), []);
    }

    #[test]
    fn topics_go_to_those_who_want_them() {
        let only = |m| PartitionSlot { holder: None, revoking: false, eligible: vec![m] };
        let mut slots = vec![only(0), only(0), only(0), only(1)];
        assert_eq!(settle(2, &mut slots), 0);
        assert_eq!(slots.iter().map(|s| s.holder).collect::<Vec<_>>(), [Some(0), Some(0), Some(0), Some(1)]);
    }
}
