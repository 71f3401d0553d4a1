//! Crashes and faults, on the real binary: killed under load, stopped with calls running, without
//! room on the disk, with its database locked, crowded, and with an operator beside it. What was
//! acknowledged must be there afterwards, and must have ended exactly once.

mod callbacks;
mod crowd;
mod disk;
mod inflight;
mod load;
mod locked;
mod operator;
mod provider;
mod repeated;
mod startup;
mod stopping;
mod waiting;

/// Numbers that look random and come again with the same seed (SplitMix64).
pub struct Dice(u64);

impl Dice {
    /// Dice with the seed from `TOOLCRIB_TEST_SEED`, or another one each time; it is printed.
    fn thrown() -> Self {
        let given = std::env::var("TOOLCRIB_TEST_SEED").ok().map(|seed| seed.parse().unwrap());
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = given.unwrap_or(now % 1_000_000_000);
        eprintln!("seed: TOOLCRIB_TEST_SEED={seed}");
        Self(seed)
    }

    /// Other dice, for another task.
    fn split(&mut self) -> Self {
        Self(self.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from this range.
    fn from(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }
}
