//! The results of a load run, and the computation of percentiles.
//!
//! Percentiles are nearest-rank over all recorded latencies: nothing is binned, interpolated or
//! discarded, so each figure is the latency of an actual call.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The results of many calls that one or more workers made one after the other.
///
/// Latencies cover the calls with the expected response. A failed call is counted in `errors` and
/// in nothing else, so that a server that fails fast does not look fast.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Calls with the expected response, per second of `elapsed_us`.
    pub calls_per_s: f64,
    /// Half of the calls took no longer than this, in microseconds.
    pub p50_us: u64,
    /// Nine of ten calls took no longer than this, in microseconds.
    pub p90_us: u64,
    /// Ninety-nine of a hundred calls took no longer than this, in microseconds.
    pub p99_us: u64,
    /// The longest call, in microseconds.
    pub max_us: u64,
    /// Number of calls with the expected response.
    pub count: u64,
    /// Number of calls with another response, or with none.
    pub errors: u64,
    /// Time from the first request to the last response, in microseconds.
    pub elapsed_us: u64,
}

impl Sample {
    /// Computes the figures from the latencies (in microseconds, in any order).
    #[must_use]
    pub fn from_latencies(mut latencies: Vec<u64>, errors: u64, elapsed: Duration) -> Self {
        latencies.sort_unstable();
        let seconds = elapsed.as_secs_f64();
        let calls_per_s = if seconds > 0.0 { latencies.len() as f64 / seconds } else { 0.0 };
        Self {
            calls_per_s,
            p50_us: percentile(&latencies, 50.0),
            p90_us: percentile(&latencies, 90.0),
            p99_us: percentile(&latencies, 99.0),
            max_us: latencies.last().copied().unwrap_or(0),
            count: latencies.len() as u64,
            errors,
            elapsed_us: micros(elapsed),
        }
    }
}

/// The results of several rounds that each send `n` calls at once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BurstSample {
    /// Number of calls that each round sends at once.
    pub n: usize,
    /// Time from the first request to the last result in the median round, in microseconds.
    pub median_us: u64,
    /// The same for the fastest round.
    pub min_us: u64,
    /// The same for the slowest round.
    pub max_us: u64,
    /// The same for every round, in the order in which they ran.
    pub rounds_us: Vec<u64>,
    /// Number of calls with the expected response, in all rounds.
    pub count: u64,
    /// Number of calls with another response or with none, in all rounds.
    pub errors: u64,
}

impl BurstSample {
    /// Computes the figures from the time of each round (in microseconds).
    #[must_use]
    pub fn from_rounds(n: usize, rounds_us: Vec<u64>, count: u64, errors: u64) -> Self {
        let mut sorted = rounds_us.clone();
        sorted.sort_unstable();
        Self {
            n,
            median_us: percentile(&sorted, 50.0),
            min_us: sorted.first().copied().unwrap_or(0),
            max_us: sorted.last().copied().unwrap_or(0),
            rounds_us,
            count,
            errors,
        }
    }
}

/// Returns the nearest-rank percentile of a list in ascending order: the smallest element that at
/// least `percent` percent of the elements do not exceed. Returns 0 for an empty list.
#[must_use]
pub fn percentile(sorted: &[u64], percent: f64) -> u64 {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    let index = rank.clamp(1, sorted.len().max(1)) - 1;
    sorted.get(index).copied().unwrap_or(0)
}

/// Returns the whole microseconds of a duration.
#[must_use]
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_nearest_rank() {
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 0.0), 1);
        assert_eq!(percentile(&hundred, 50.0), 50);
        assert_eq!(percentile(&hundred, 90.0), 90);
        assert_eq!(percentile(&hundred, 99.0), 99);
        assert_eq!(percentile(&hundred, 100.0), 100);
        assert_eq!(percentile(&[1, 2, 3], 50.0), 2);
        assert_eq!(percentile(&[1, 2, 3], 99.0), 3);
    }

    #[test]
    fn percentiles_of_empty_and_single_samples() {
        assert_eq!(percentile(&[], 50.0), 0);
        assert_eq!(percentile(&[7], 0.0), 7);
        assert_eq!(percentile(&[7], 50.0), 7);
        assert_eq!(percentile(&[7], 99.0), 7);
    }

    #[test]
    fn a_sample_sorts_latencies_and_counts_errors_apart() {
        let sample = Sample::from_latencies(vec![30, 10, 20, 40], 3, Duration::from_secs(2));
        assert_eq!(sample.p50_us, 20);
        assert_eq!(sample.max_us, 40);
        assert_eq!(sample.count, 4);
        assert_eq!(sample.errors, 3);
        assert!((sample.calls_per_s - 2.0).abs() < 1e-9);
        assert_eq!(sample.elapsed_us, 2_000_000);
    }

    #[test]
    fn empty_sample_is_all_zero() {
        let sample = Sample::from_latencies(Vec::new(), 0, Duration::ZERO);
        assert_eq!(sample, Sample::default());
    }

    #[test]
    fn a_burst_keeps_the_order_of_its_rounds() {
        let burst = BurstSample::from_rounds(100, vec![9, 1, 5], 300, 0);
        assert_eq!(burst.rounds_us, vec![9, 1, 5]);
        assert_eq!((burst.min_us, burst.median_us, burst.max_us), (1, 5, 9));
    }
}
