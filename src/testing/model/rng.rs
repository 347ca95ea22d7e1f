//! A small generator whose whole state is a printable seed.

/// Splitmix64: enough for choosing commands, and the same on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True `percent` of the time.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize].clone()
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seed of a run: `HAPAX_SEED`, else any. It is printed.
pub(crate) fn seed() -> u64 {
    let seed = number("HAPAX_SEED").unwrap_or_else(|| crate::ledger::Nonce::random().0 as u64);
    println!("HAPAX_SEED={seed}");
    seed
}

/// How many sequences a run has: `HAPAX_CASES`, else as many as it says. It is printed.
pub(crate) fn cases(usual: u64) -> u64 {
    let cases = number("HAPAX_CASES").unwrap_or(usual);
    println!("HAPAX_CASES={cases}");
    cases
}
