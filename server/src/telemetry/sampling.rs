//! Decides which traces are recorded.

use toolcrib::domain::trace::SpanIds;

/// Samples traces. The decision depends on the trace id alone, so it is the same in every process
/// and after a restart. Services that use the same rule and ratio record the same traces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceSampler {
    /// Records a caller's trace when the caller records it.
    pub follow_parent: bool,
    /// Share of the other traces that is recorded.
    pub ratio: f64,
}

impl TraceSampler {
    /// Builds the sampler from the setting, or else from OpenTelemetry's variables.
    pub fn from_settings(
        ratio: Option<f64>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        if let Some(ratio) = ratio {
            return Ok(Self { follow_parent: true, ratio });
        }
        let Some(name) = variable("OTEL_TRACES_SAMPLER") else {
            return Ok(Self { follow_parent: true, ratio: 1.0 });
        };
        let (follow_parent, rule) = match name.trim().strip_prefix("parentbased_") {
            Some(rule) => (true, rule),
            None => (false, name.trim()),
        };
        let ratio = match rule {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => match variable("OTEL_TRACES_SAMPLER_ARG") {
                None => 1.0,
                Some(text) => {
                    let ratio = text.trim().parse().ok();
                    let ratio = ratio.filter(|ratio: &f64| (0.0..=1.0).contains(ratio));
                    ratio.ok_or("OTEL_TRACES_SAMPLER_ARG must be from 0 to 1")?
                }
            },
            _ => return Err(format!("OTEL_TRACES_SAMPLER: there is no sampler {name:?} here")),
        };
        Ok(Self { follow_parent, ratio })
    }

    /// Returns true if the spans of a call with these ids are recorded.
    pub fn is_sampled(&self, ids: &SpanIds) -> bool {
        if let Some(parent) = ids.parent.filter(|_| self.follow_parent) {
            return parent.is_sampled();
        }
        if self.ratio >= 1.0 {
            return true;
        }
        let id = u128::from_be_bytes(ids.trace_id()) as u64;
        // The rule of OpenTelemetry's SDKs: the lower half of the id compared with the ratio of
        // 2^63.
        ((id >> 1) as f64) < self.ratio * (1_u64 << 63) as f64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sampler(ratio: Option<f64>, variables: &[(&str, &str)]) -> Result<TraceSampler, String> {
        TraceSampler::from_settings(ratio, |requested| {
            let found = variables.iter().find(|(name, _)| *name == requested);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_setting_takes_precedence_over_environment_variables() {
        let always_off = [("OTEL_TRACES_SAMPLER", "always_off")];
        let set = TraceSampler { follow_parent: true, ratio: 0.5 };
        assert_eq!(sampler(Some(0.5), &always_off), Ok(set));
        assert_eq!(sampler(None, &always_off).unwrap().ratio, 0.0);
        assert_eq!(sampler(None, &[]), Ok(TraceSampler { follow_parent: true, ratio: 1.0 }));
        let ratio = [
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ];
        assert_eq!(sampler(None, &ratio), Ok(TraceSampler { follow_parent: true, ratio: 0.25 }));
        assert!(sampler(None, &[("OTEL_TRACES_SAMPLER", "jaeger_remote")]).is_err());
        let bad = [("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "7")];
        assert!(sampler(None, &bad).is_err());
    }
}
