//! Parses durations as people write them.

use std::time::Duration;

/// The longest duration accepted: a thousand days.
const MAX_DURATION: Duration = Duration::from_secs(86_400_000);

/// Parses `500ms`, `30s`, `5m`, `1h` or `2d`. A bare number is in seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("\"{text}\" is not a time such as 500ms, 30s, 5m, 1h or 2d");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds_each = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        _ => return Err(invalid()),
    };
    let count: f64 = number.parse().map_err(|_| invalid())?;
    let time = Duration::try_from_secs_f64(count * seconds_each).map_err(|_| invalid())?;
    if time > MAX_DURATION { Err(invalid()) } else { Ok(time) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        assert_eq!(parse_duration("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(parse_duration("30").unwrap(), Duration::from_secs(30));
        assert_eq!(parse_duration("1.5h").unwrap(), Duration::from_secs(5_400));
        for odd in ["", "s", "-1s", "1x", "1e9s", "..s", "99999999d", "1 s", "٣s", "NaN"] {
            assert!(parse_duration(odd).is_err(), "{odd:?}");
        }
    }
}
