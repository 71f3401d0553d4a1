//! Tests against a fake server on loopback that answers in Open-Meteo's format and fails on
//! request.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use serde_json::{Value, json};
use toolcrib::domain::fault::SideEffect;
use toolcrib::ports::fn_tool::BuiltinSource;
use toolcrib::{Code, Effect, Fault, Risk, Tool};

use super::super::{WeatherSettings, testing};
use super::tool;
use crate::builtin::weather::weather_codes;

/// Behavior of the fake server.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Behavior {
    Well,
    /// Returns this status for places.
    Lost(u16),
    /// Returns this status for the weather.
    Broken(u16),
    Garbage,
    HtmlWeather,
    /// Returns JSON of another form.
    OtherForm,
    NoTemperature,
    UnknownCode,
    Night,
    Hang,
    /// Sends the head of a response and never the body.
    HangInBody,
    Huge,
    Redirects,
}

struct FakeServer {
    behavior: Behavior,
    request_count: Arc<AtomicUsize>,
}

async fn fake_server(behavior: Behavior) -> (SocketAddr, Arc<AtomicUsize>) {
    let request_count = Arc::new(AtomicUsize::new(0));
    let state = Arc::new(FakeServer { behavior, request_count: Arc::clone(&request_count) });
    let app = Router::new()
        .route("/v1/search", get(search))
        .route("/v1/forecast", get(forecast))
        .with_state(state);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, request_count)
}

fn source(address: SocketAddr, timeout_ms: u64) -> Arc<BuiltinSource> {
    let url = format!("http://{address}/");
    let settings = WeatherSettings { geocoding_url: url.clone(), forecast_url: url, timeout_ms };
    testing::source(tool(settings).unwrap())
}

async fn query_weather(behavior: Behavior, query: &str) -> Result<Value, Fault> {
    let (address, _) = fake_server(behavior).await;
    testing::run(&source(address, 5_000), &json!({"query": query})).await
}

type Params = Query<HashMap<String, String>>;

async fn search(State(fake_server): State<Arc<FakeServer>>, Query(params): Params) -> Response {
    fake_server.request_count.fetch_add(1, Ordering::Relaxed);
    assert_eq!((params["language"].as_str(), params["format"].as_str()), ("en", "json"));
    match fake_server.behavior {
        Behavior::Lost(status) => return refusal(status),
        Behavior::Garbage => return "\u{1f}\u{8b} not json".into_response(),
        Behavior::Hang => tokio::time::sleep(Duration::from_secs(60)).await,
        Behavior::HangInBody => {
            let head = [(header::CONTENT_LENGTH, "1000")];
            let endless = axum::body::Body::from_stream(futures::stream::pending::<
                Result<String, std::io::Error>,
            >());
            return (head, endless).into_response();
        }
        Behavior::Huge => return " ".repeat(3 << 20).into_response(),
        Behavior::Redirects => {
            return Redirect::temporary("/v1/search?language=en&format=json").into_response();
        }
        _ => {}
    }
    let mut results = places(&params["name"]);
    results.truncate(params["count"].parse().unwrap());
    // Open-Meteo omits the field when it knows no place.
    match results.is_empty() {
        true => axum::Json(json!({"generationtime_ms": 0.45013428})).into_response(),
        false => axum::Json(json!({"results": results, "generationtime_ms": 0.8})).into_response(),
    }
}

fn refusal(status: u16) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    let body = json!({"error": true, "reason": "Parameter count must be between 1 and 100."});
    (status, axum::Json(body)).into_response()
}

fn place(
    id: u32,
    name: &str,
    coordinates: (f64, f64),
    country: (&str, &str),
    admin1: &str,
) -> Value {
    json!({
        "id": id, "name": name, "latitude": coordinates.0, "longitude": coordinates.1, "elevation": 49.0,
        "feature_code": "PPLC", "country_code": country.0, "admin1_id": 2038349,
        "timezone": "Asia/Shanghai", "population": 18960744, "country_id": 1814991,
        "country": country.1, "admin1": admin1
    })
}

fn places(name: &str) -> Vec<Value> {
    let us = ("US", "United States");
    match name {
        "Beijing" | "北京" => {
            vec![place(1816670, "Beijing", (39.9075, 116.39723), ("CN", "China"), "Beijing")]
        }
        "Paris" => vec![
            place(2988507, "Paris", (48.85341, 2.3488), ("FR", "France"), "Île-de-France Region"),
            place(4717560, "Paris", (33.66094, -95.55551), us, "Texas"),
        ],
        "Portland" => vec![
            place(4975802, "Portland", (43.65737, -70.2589), us, "Maine"),
            place(5746545, "Portland", (45.52345, -122.67621), us, "Oregon"),
        ],
        "São Paulo" => {
            vec![place(3448439, "São Paulo", (-23.5475, -46.63611), ("BR", "Brazil"), "São Paulo")]
        }
        _ => Vec::new(),
    }
}

async fn forecast(State(fake_server): State<Arc<FakeServer>>, Query(params): Params) -> Response {
    fake_server.request_count.fetch_add(1, Ordering::Relaxed);
    assert!(params["current"].contains("temperature_2m") && params["timezone"] == "auto");
    let mut answer = json!({
        "latitude": 39.875, "longitude": 116.375, "generationtime_ms": 0.0629425048828125,
        "utc_offset_seconds": 28800, "timezone": "Asia/Shanghai",
        "timezone_abbreviation": "GMT+8", "elevation": 47.0,
        "current_units": {
            "time": "iso8601", "interval": "seconds", "temperature_2m": "°C",
            "relative_humidity_2m": "%", "apparent_temperature": "°C",
            "weather_code": "wmo code", "wind_speed_10m": "km/h", "is_day": ""
        },
        "current": {
            "time": "2025-07-01T14:15", "interval": 900, "temperature_2m": 31.4,
            "relative_humidity_2m": 42, "apparent_temperature": 33.0, "weather_code": 0,
            "wind_speed_10m": 9.7, "is_day": 1
        }
    });
    match fake_server.behavior {
        Behavior::Broken(status) => return refusal(status),
        Behavior::HtmlWeather => return "<html><body>Bad gateway</body></html>".into_response(),
        Behavior::OtherForm => answer = json!({"current": [], "current_units": "none"}),
        Behavior::NoTemperature => answer["current"]["temperature_2m"] = Value::Null,
        Behavior::UnknownCode => answer["current"]["weather_code"] = json!(42),
        Behavior::Night => answer["current"]["is_day"] = json!(0),
        _ => {}
    }
    axum::Json(answer).into_response()
}

#[tokio::test]
async fn the_current_weather_of_a_place_is_returned() {
    for query in ["weather in Beijing", "北京天气", "What's the weather like in Beijing today?"]
    {
        let answer = query_weather(Behavior::Well, query).await.unwrap();
        let expected = json!({
            "weather": "Sunny", "temperature": 31.4, "feels_like": 33.0, "humidity": 42.0,
            "wind_speed_kmh": 9.7, "place": "Beijing", "region": "Beijing", "country": "China",
            "latitude": 39.9075, "longitude": 116.39723, "observed_at": "2025-07-01T14:15",
            "timezone": "Asia/Shanghai",
            "units": {"temperature": "°C", "humidity": "%", "wind_speed": "km/h"}
        });
        assert_eq!(answer, expected, "{query}");
    }
    let night = query_weather(Behavior::Night, "Beijing").await.unwrap();
    assert_eq!(night["weather"], json!("Clear sky"));
    let tomorrow = query_weather(Behavior::Well, "weather in Beijing tomorrow").await.unwrap();
    assert!(tomorrow["note"].as_str().unwrap().contains("the current weather"));
}

#[tokio::test]
async fn a_region_selects_among_places_of_one_name() {
    let table = [
        ("Paris", "Île-de-France Region"),
        ("weather for Paris, France", "Île-de-France Region"),
        ("weather in Paris, FR", "Île-de-France Region"),
        ("Paris, Texas", "Texas"),
        ("Paris, TX, USA", "Texas"),
        ("Paris Texas", "Texas"),
        ("Paris, Atlantis", "Île-de-France Region"),
        ("Portland", "Maine"),
        ("How warm is it in Portland Oregon?", "Oregon"),
        ("Portland, OR", "Oregon"),
        ("How warm is it in São Paulo right now", "São Paulo"),
    ];
    for (query, region) in table {
        let answer = query_weather(Behavior::Well, query).await.unwrap();
        assert_eq!(answer["region"], json!(region), "{query}");
    }
}

#[tokio::test]
async fn an_unknown_place_is_refused_with_its_name() {
    for (query, part) in [
        ("weather in Xyzzyville", "Xyzzyville"),
        ("Paris Atlantis", "Paris Atlantis"),
        ("Nowhere, France", "Nowhere, France"),
        ("weather", "name one"),
        ("", "name one"),
    ] {
        let fault = query_weather(Behavior::Well, query).await.unwrap_err();
        assert_eq!(
            (fault.code, fault.side_effect),
            (Code::ValidationError, SideEffect::None),
            "{query}"
        );
        assert!(fault.message.contains(part), "{query}: {fault}");
    }
}

#[tokio::test]
async fn upstream_failures_become_faults() {
    let table = [
        (Behavior::Lost(500), true, "answered 500"),
        (Behavior::Lost(429), true, "answered 429"),
        (Behavior::Lost(404), false, "answered 404"),
        (Behavior::Lost(400), false, "Parameter count"),
        (Behavior::Broken(500), true, "answered 500"),
        (Behavior::Broken(503), true, "answered 503"),
        (Behavior::Broken(404), false, "answered 404"),
        (Behavior::Garbage, true, "cannot be read"),
        (Behavior::HtmlWeather, true, "cannot be read"),
        (Behavior::OtherForm, true, "cannot be read"),
        (Behavior::NoTemperature, true, "cannot be read"),
        (Behavior::UnknownCode, true, "weather code, 42"),
        (Behavior::Huge, false, "more than 1048576 bytes"),
        (Behavior::Redirects, true, "redirect"),
    ];
    for (behavior, retryable, part) in table {
        let fault = query_weather(behavior, "Beijing").await.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{behavior:?}: {fault}");
        assert_eq!(
            (fault.retryable, fault.side_effect),
            (retryable, SideEffect::None),
            "{behavior:?}"
        );
        assert!(fault.message.contains(part), "{behavior:?}: {fault}");
        assert!(fault.message.contains("127.0.0.1"), "{behavior:?}: {fault}");
    }
}

#[tokio::test]
async fn an_unreachable_or_slow_server_is_an_upstream_fault() {
    let closed_address = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let refused =
        testing::run(&source(closed_address, 5_000), &json!({"query": "Rome"})).await.unwrap_err();
    assert_eq!(refused.code, Code::UpstreamUnavailable, "{refused}");
    assert_eq!((refused.retryable, refused.side_effect), (true, SideEffect::None));
    for behavior in [Behavior::Hang, Behavior::HangInBody] {
        let (address, _) = fake_server(behavior).await;
        let started = Instant::now();
        let fault = testing::run(&source(address, 400), &json!({"query": "Rome"})).await;
        let fault = fault.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{behavior:?}: {fault}");
        assert!(fault.message.contains("no answer in time"), "{behavior:?}: {fault}");
        assert!(started.elapsed() < Duration::from_millis(1_500), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn no_request_is_sent_before_a_call() {
    let (address, request_count) = fake_server(Behavior::Well).await;
    let started = Instant::now();
    let source = source(address, 5_000);
    assert!(started.elapsed() < Duration::from_millis(20), "{:?}", started.elapsed());
    assert_eq!(request_count.load(Ordering::Relaxed), 0);
    testing::run(&source, &json!({"query": "Beijing"})).await.unwrap();
    assert_eq!(request_count.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn the_definition_is_complete_and_settings_are_checked() {
    let definition = tool(WeatherSettings::default()).unwrap().definition();
    assert_eq!(definition.name, "weather.query");
    assert_eq!((definition.effect, definition.risk), (Effect::Read, Risk::Low));
    assert_eq!(definition.timeout_ms, 5_000);
    assert_eq!(definition.input_schema.to_value()["required"], json!(["query"]));
    let output = definition.output_schema.unwrap().to_value();
    assert_eq!(output["properties"]["temperature"]["type"], json!("number"));
    for bad in ["", "api.open-meteo.com", "ftp://x"] {
        let settings = WeatherSettings { forecast_url: bad.into(), ..WeatherSettings::default() };
        let problem = tool(settings).err().unwrap().to_string();
        assert!(problem.contains("builtin.weather.forecast_url"), "{problem}");
    }
    let (address, _) = fake_server(Behavior::Well).await;
    let fault = testing::run(&source(address, 5_000), &json!({"place": "Rome"})).await.unwrap_err();
    assert!(fault.message.contains("place"), "{fault}");
}

#[test]
fn every_weather_code_has_a_description() {
    let described: Vec<u8> = (0..=255)
        .filter(|code| weather_codes::describe_weather_code(*code, true).is_some())
        .collect();
    assert_eq!(
        described,
        [
            0, 1, 2, 3, 45, 48, 51, 53, 55, 56, 57, 61, 63, 65, 66, 67, 71, 73, 75, 77, 80, 81, 82,
            85, 86, 95, 96, 99
        ]
    );
}
