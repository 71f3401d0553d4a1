//! Crashes and faults of the real binary: kills under load, shutdown with running calls, a full
//! disk, a locked database, many connections, and commands of an operator beside a running server.
//! Every acknowledged call must be stored afterwards and must have ended exactly once.

mod clients;
mod connections;
mod disk;
mod inflight;
mod load;
mod locked;
mod operator;
mod repeated;
mod startup;
mod stopping;
mod waiting;
mod webhooks;

/// Pseudorandom numbers that are reproducible from a seed (SplitMix64).
pub struct SeededRng(u64);

impl SeededRng {
    /// Takes the seed from `TOOLCRIB_TEST_SEED`, or from the time, and prints it.
    fn from_env() -> Self {
        let from_env = std::env::var("TOOLCRIB_TEST_SEED").ok().map(|seed| seed.parse().unwrap());
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = from_env.unwrap_or(now % 1_000_000_000);
        eprintln!("seed: TOOLCRIB_TEST_SEED={seed}");
        Self(seed)
    }

    /// Returns an independent generator for another task.
    fn split(&mut self) -> Self {
        Self(self.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in this range.
    fn from(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }
}
