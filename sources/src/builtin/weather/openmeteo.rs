//! Client of Open-Meteo, or of a service with the same API.
//!
//! Every response is limited in size and time and parsed into exact types: a response that does not
//! match is an error, never a partial result.

use std::time::{Duration, Instant};

use reqwest::{Client, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use toolcrib::Fault;
use toolcrib::domain::trace::TraceParent;
use toolcrib_protocol::outbound::error_chain_without_url;

use super::super::BuiltinSetupError;
use super::{CurrentWeather, WeatherUnits};
use crate::builtin::weather::place_query::{self, normalize_name};
use crate::builtin::weather::weather_codes;

const MAX_BODY: usize = 1 << 20;
const CURRENT: &str = "temperature_2m,relative_humidity_2m,apparent_temperature,weather_code,\
wind_speed_10m,is_day";

/// Client of the geocoding and the forecast service.
pub struct OpenMeteoClient {
    geocoding: Url,
    forecast: Url,
    client: OnceCell<Client>,
}

/// Context of every request of one call.
pub struct WeatherRequestContext {
    pub deadline: Instant,
    /// The trace of the call, sent with each request so that the service can take part in it.
    pub traceparent: Option<TraceParent>,
}

/// A place that the geocoding service found.
#[derive(Debug, Clone, Deserialize)]
pub struct GeocodedPlace {
    name: String,
    latitude: f64,
    longitude: f64,
    country: Option<String>,
    country_code: Option<String>,
    admin1: Option<String>,
    admin2: Option<String>,
}

impl GeocodedPlace {
    /// Returns `true` if the place is in all of these countries or regions, given by name or
    /// abbreviation.
    pub fn is_in(&self, within: &[String]) -> bool {
        let names = [&self.country, &self.country_code, &self.admin1, &self.admin2];
        let names: Vec<String> =
            names.into_iter().flatten().map(|name| normalize_name(name)).collect();
        within.iter().all(|region| {
            let spellings =
                [normalize_name(region), normalize_name(place_query::expand_abbreviation(region))];
            spellings.iter().any(|spelling| names.contains(spelling))
        })
    }
}

#[derive(Deserialize)]
struct GeocodingResponse {
    #[serde(default)]
    results: Vec<GeocodedPlace>,
}

#[derive(Deserialize)]
struct ForecastResponse {
    timezone: Option<String>,
    current_units: CurrentUnits,
    current: CurrentConditions,
}

#[derive(Deserialize)]
struct CurrentUnits {
    temperature_2m: String,
    relative_humidity_2m: Option<String>,
    wind_speed_10m: Option<String>,
}

#[derive(Deserialize)]
struct CurrentConditions {
    time: String,
    temperature_2m: f64,
    relative_humidity_2m: Option<f64>,
    apparent_temperature: Option<f64>,
    weather_code: u8,
    wind_speed_10m: Option<f64>,
    is_day: Option<u8>,
}

/// Open-Meteo's error response.
#[derive(Deserialize)]
struct OpenMeteoErrorBody {
    reason: String,
}

impl OpenMeteoClient {
    /// Creates a client for these URLs, without sending a request.
    pub fn new(geocoding: &str, forecast: &str) -> Result<Self, BuiltinSetupError> {
        let url = |setting: &str, text: &str| {
            let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
            url.ok_or_else(|| {
                BuiltinSetupError(format!(
                    "builtin.weather.{setting}: \"{text}\" is not an http(s) address"
                ))
            })
        };
        Ok(Self {
            geocoding: url("geocoding_url", geocoding)?,
            forecast: url("forecast_url", forecast)?,
            client: OnceCell::new(),
        })
    }

    /// Returns the places with this name, the best known first.
    pub async fn search(
        &self,
        name: &str,
        count: u32,
        context: &WeatherRequestContext,
    ) -> Result<Vec<GeocodedPlace>, Fault> {
        let count = count.to_string();
        let query = [("name", name), ("count", &count), ("language", "en"), ("format", "json")];
        let url = build_url(&self.geocoding, "v1/search", &query);
        self.get::<GeocodingResponse>(url, context).await.map(|search| search.results)
    }

    /// Returns the current weather at a place.
    pub async fn current(
        &self,
        found: GeocodedPlace,
        context: &WeatherRequestContext,
    ) -> Result<CurrentWeather, Fault> {
        let (latitude, longitude) = (found.latitude.to_string(), found.longitude.to_string());
        let query = [
            ("latitude", latitude.as_str()),
            ("longitude", &longitude),
            ("current", CURRENT),
            ("timezone", "auto"),
        ];
        let url = build_url(&self.forecast, "v1/forecast", &query);
        let host = display_host(&url);
        let ForecastResponse { timezone, current_units, current } = self.get(url, context).await?;
        let is_day = current.is_day != Some(0);
        let Some(weather) = weather_codes::describe_weather_code(current.weather_code, is_day)
        else {
            let code = current.weather_code;
            return Err(Fault::unreachable(format!("{host} sent an unknown weather code, {code}")));
        };
        Ok(CurrentWeather {
            weather: weather.to_owned(),
            temperature: current.temperature_2m,
            feels_like: current.apparent_temperature,
            humidity: current.relative_humidity_2m,
            wind_speed_kmh: current.wind_speed_10m,
            place: found.name,
            region: found.admin1,
            country: found.country,
            latitude: found.latitude,
            longitude: found.longitude,
            observed_at: current.time,
            timezone,
            units: WeatherUnits {
                temperature: current_units.temperature_2m,
                humidity: current_units.relative_humidity_2m.unwrap_or_else(|| "%".into()),
                wind_speed: current_units.wind_speed_10m.unwrap_or_else(|| "km/h".into()),
            },
            note: None,
        })
    }

    async fn client(&self) -> Result<&Client, Fault> {
        let make = || async {
            let building = tokio::task::spawn_blocking(|| {
                // Without a proxy: proxy variables in the environment are meant for other programs.
                Client::builder()
                    .no_proxy()
                    .connect_timeout(Duration::from_secs(3))
                    .pool_max_idle_per_host(2)
                    .pool_idle_timeout(Duration::from_secs(30))
                    .redirect(reqwest::redirect::Policy::limited(3))
                    .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")))
                    .build()
            });
            let failed = |reason: String| Fault::unreachable(format!("no HTTP client: {reason}"));
            building
                .await
                .map_err(|error| failed(error.to_string()))?
                .map_err(|e| failed(e.to_string()))
        };
        self.client.get_or_try_init(make).await
    }

    async fn get<T: DeserializeOwned>(
        &self,
        url: Url,
        context: &WeatherRequestContext,
    ) -> Result<T, Fault> {
        let host = display_host(&url);
        let client = self.client().await?;
        let remaining = context.deadline.saturating_duration_since(Instant::now());
        let failed = |error: reqwest::Error| {
            let reason = if error.is_timeout() {
                "no answer in time".into()
            } else {
                error_chain_without_url(error)
            };
            Fault::unreachable(format!("{host} cannot be reached: {reason}"))
        };
        let mut request = client.get(url).timeout(remaining);
        if let Some(traceparent) = &context.traceparent {
            request = request.header("traceparent", traceparent.to_string());
        }
        let mut response = request.send().await.map_err(failed)?;
        let status = response.status();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_BODY {
                let message = format!("{host} sent more than {MAX_BODY} bytes");
                return Err(Fault::unreachable(message).retryable(false));
            }
        }
        if status != StatusCode::OK {
            return Err(status_fault(&host, status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| {
            Fault::unreachable(format!("the answer of {host} cannot be read: {error}"))
        })
    }
}

fn status_fault(host: &str, status: StatusCode, body: &[u8]) -> Fault {
    let reason = serde_json::from_slice::<OpenMeteoErrorBody>(body).map_or_else(
        |_| String::new(),
        |refusal| format!(": {}", refusal.reason.chars().take(200).collect::<String>()),
    );
    let passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    Fault::unreachable(format!("{host} answered {}{reason}", status.as_u16())).retryable(passing)
}

fn build_url(base: &Url, path: &str, query: &[(&str, &str)]) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/{path}", base.path().trim_end_matches('/')));
    url.query_pairs_mut().extend_pairs(query);
    url
}

/// Returns the host for messages, without the query, which is long, and without credentials.
fn display_host(url: &Url) -> String {
    let host = url.host_str().unwrap_or("the weather service");
    url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}
