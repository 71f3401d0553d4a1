//! `weather.query`: the current weather at a place named in plain words, from Open-Meteo.
//!
//! Each call sends two HTTP requests: one to find the place, one for its weather. If either fails,
//! the call fails and names the service: there is no cached, guessed or invented weather. The first
//! call creates the HTTP client, because loading certificates takes a while.

mod openmeteo;
mod place_query;
#[cfg(test)]
mod tests;
mod weather_codes;
use std::sync::Arc;
use std::time::{Duration, Instant};

use openmeteo::{GeocodedPlace, OpenMeteoClient, WeatherRequestContext};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toolcrib::{Code, Effect, Fault, FnTool, Risk, ToolContext};

use super::{BuiltinSetupError, WeatherSettings};
use crate::builtin::weather::place_query::PlaceQuery;

const DESCRIPTION: &str = "Tells the current weather at a place named in plain words, for example \
\"Beijing\", \"weather in Paris, France\" or \"北京天气\": sky, temperature in °C, humidity, wind. \
Current conditions only, no forecast. Add the country or state where a name is ambiguous.";

/// The place to query.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Args")]
pub struct WeatherQueryArgs {
    /// The place, alone or in a sentence: "Beijing", "weather in Paris, France", "天气 上海".
    #[schemars(length(min = 1, max = 500))]
    pub query: String,
}

/// The current weather.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Answer")]
pub struct CurrentWeather {
    /// The sky in words, for example "Sunny", "Overcast" or "Light rain".
    pub weather: String,
    /// Air temperature 2 m above ground, in °C.
    pub temperature: f64,
    /// Apparent temperature, in °C.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feels_like: Option<f64>,
    /// Relative humidity, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub humidity: Option<f64>,
    /// Wind speed 10 m above ground, in km/h.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wind_speed_kmh: Option<f64>,
    /// The place that was found. Check that it is the intended one.
    pub place: String,
    /// The state, province or region of the place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// The country of the place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub country: Option<String>,
    pub latitude: f64,
    pub longitude: f64,
    /// Time of the observation, in the place's local time.
    pub observed_at: String,
    /// Time zone of the place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timezone: Option<String>,
    pub units: WeatherUnits,
    /// Limitation of the result, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The units of the numbers.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Units")]
pub struct WeatherUnits {
    pub temperature: String,
    pub humidity: String,
    pub wind_speed: String,
}

/// Creates the tool.
pub fn tool(settings: WeatherSettings) -> Result<FnTool, BuiltinSetupError> {
    let timeout_ms = settings.timeout_ms.max(1);
    // Slightly less than the call's timeout, so that the fault names the service that did not
    // answer.
    let budget = Duration::from_millis((timeout_ms - timeout_ms / 10).max(1));
    let service = Arc::new(OpenMeteoClient::new(&settings.geocoding_url, &settings.forecast_url)?);
    let function = move |args: WeatherQueryArgs, context: ToolContext| {
        let service = Arc::clone(&service);
        let (deadline, traceparent) = (Instant::now() + budget, context.traceparent);
        async move {
            query(&service, &args.query, &WeatherRequestContext { deadline, traceparent }).await
        }
    };
    Ok(FnTool::with_context("weather.query", DESCRIPTION, function)
        .effect(Effect::Read)
        .risk(Risk::Low)
        .timeout_ms(timeout_ms)
        // One attempt may take the whole time of the call; the tool itself stops a longer request.
        .attempt_timeout_ms(timeout_ms))
}

async fn query(
    service: &OpenMeteoClient,
    query: &str,
    context: &WeatherRequestContext,
) -> Result<CurrentWeather, Fault> {
    let place_query =
        crate::builtin::weather::place_query::parse_place_query(query).ok_or_else(|| {
            invalid_query_fault(
                "no place is named in the query: name one, for example \"weather in Beijing\"",
            )
        })?;
    let found = find_place(service, &place_query, context).await?;
    let mut answer = service.current(found, context).await?;
    if place_query.asks_other_time {
        answer.note = Some("this is the current weather: other times are not supported".into());
    }
    Ok(answer)
}

/// Finds the place, first by its whole name, then by a part of it.
async fn find_place(
    service: &OpenMeteoClient,
    place_query: &PlaceQuery,
    context: &WeatherRequestContext,
) -> Result<GeocodedPlace, Fault> {
    let mut exact_match = service.search(&place_query.name, 1, context).await?.into_iter().next();
    let part = place_query.split_region();
    let fits = |found: &GeocodedPlace| match &part {
        Some(part) if part.has_explicit_region => found.is_in(&part.regions),
        _ => true,
    };
    if let Some(found) = exact_match.take_if(|found| fits(found)) {
        return Ok(found);
    }
    if let Some(part) = &part {
        let mut places = service.search(&part.name, 10, context).await?;
        if let Some(n) = places.iter().position(|found| found.is_in(&part.regions)) {
            return Ok(places.swap_remove(n));
        }
        // "Paris, Somewhere": the name is certain and the region was only a hint. Without a comma
        // nothing marks the end of the name, so there the region must match.
        if part.has_explicit_region && !places.is_empty() {
            return Ok(places.swap_remove(0));
        }
    }
    exact_match.ok_or_else(|| {
        invalid_query_fault(format!(
            "no place \"{}\" is known: check the spelling, or name a larger place nearby",
            place_query.name
        ))
    })
}

fn invalid_query_fault(message: impl Into<String>) -> Fault {
    Fault::new(Code::ValidationError, message).without_side_effect()
}
