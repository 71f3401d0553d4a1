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
enum Mood {
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

struct StandIn {
    mood: Mood,
    asked: Arc<AtomicUsize>,
}

async fn stand_in(mood: Mood) -> (SocketAddr, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let state = Arc::new(StandIn { mood, asked: Arc::clone(&asked) });
    let app = Router::new()
        .route("/v1/search", get(search))
        .route("/v1/forecast", get(forecast))
        .with_state(state);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, asked)
}

fn source(address: SocketAddr, timeout_ms: u64) -> Arc<BuiltinSource> {
    let url = format!("http://{address}/");
    let settings = WeatherSettings { geocoding_url: url.clone(), forecast_url: url, timeout_ms };
    testing::source(tool(settings).unwrap())
}

async fn ask(mood: Mood, query: &str) -> Result<Value, Fault> {
    let (address, _) = stand_in(mood).await;
    testing::run(&source(address, 5_000), &json!({"query": query})).await
}

type Params = Query<HashMap<String, String>>;

async fn search(State(stand_in): State<Arc<StandIn>>, Query(params): Params) -> Response {
    stand_in.asked.fetch_add(1, Ordering::Relaxed);
    assert_eq!((params["language"].as_str(), params["format"].as_str()), ("en", "json"));
    match stand_in.mood {
        Mood::Lost(status) => return refusal(status),
        Mood::Garbage => return "\u{1f}\u{8b} not json".into_response(),
        Mood::Hang => tokio::time::sleep(Duration::from_secs(60)).await,
        Mood::HangInBody => {
            let head = [(header::CONTENT_LENGTH, "1000")];
            let endless = axum::body::Body::from_stream(futures::stream::pending::<
                Result<String, std::io::Error>,
            >());
            return (head, endless).into_response();
        }
        Mood::Huge => return " ".repeat(3 << 20).into_response(),
        Mood::Redirects => {
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

fn place(id: u32, name: &str, at: (f64, f64), country: (&str, &str), admin1: &str) -> Value {
    json!({
        "id": id, "name": name, "latitude": at.0, "longitude": at.1, "elevation": 49.0,
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

async fn forecast(State(stand_in): State<Arc<StandIn>>, Query(params): Params) -> Response {
    stand_in.asked.fetch_add(1, Ordering::Relaxed);
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
    match stand_in.mood {
        Mood::Broken(status) => return refusal(status),
        Mood::HtmlWeather => return "<html><body>Bad gateway</body></html>".into_response(),
        Mood::OtherForm => answer = json!({"current": [], "current_units": "none"}),
        Mood::NoTemperature => answer["current"]["temperature_2m"] = Value::Null,
        Mood::UnknownCode => answer["current"]["weather_code"] = json!(42),
        Mood::Night => answer["current"]["is_day"] = json!(0),
        _ => {}
    }
    axum::Json(answer).into_response()
}

#[tokio::test]
async fn the_weather_of_a_place() {
    for query in ["weather in Beijing", "北京天气", "What's the weather like in Beijing today?"]
    {
        let answer = ask(Mood::Well, query).await.unwrap();
        let expected = json!({
            "weather": "Sunny", "temperature": 31.4, "feels_like": 33.0, "humidity": 42.0,
            "wind_speed_kmh": 9.7, "place": "Beijing", "region": "Beijing", "country": "China",
            "latitude": 39.9075, "longitude": 116.39723, "observed_at": "2025-07-01T14:15",
            "timezone": "Asia/Shanghai",
            "units": {"temperature": "°C", "humidity": "%", "wind_speed": "km/h"}
        });
        assert_eq!(answer, expected, "{query}");
    }
    let night = ask(Mood::Night, "Beijing").await.unwrap();
    assert_eq!(night["weather"], json!("Clear sky"));
    let tomorrow = ask(Mood::Well, "weather in Beijing tomorrow").await.unwrap();
    assert!(tomorrow["note"].as_str().unwrap().contains("now"));
}

#[tokio::test]
async fn which_of_the_places() {
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
        let answer = ask(Mood::Well, query).await.unwrap();
        assert_eq!(answer["region"], json!(region), "{query}");
    }
}

#[tokio::test]
async fn an_unknown_place_is_named() {
    for (query, part) in [
        ("weather in Xyzzyville", "Xyzzyville"),
        ("Paris Atlantis", "Paris Atlantis"),
        ("Nowhere, France", "Nowhere, France"),
        ("weather", "name one"),
        ("", "name one"),
    ] {
        let fault = ask(Mood::Well, query).await.unwrap_err();
        assert_eq!(
            (fault.code, fault.side_effect),
            (Code::ValidationError, SideEffect::None),
            "{query}"
        );
        assert!(fault.message.contains(part), "{query}: {fault}");
    }
}

#[tokio::test]
async fn no_answer_is_never_made_up() {
    let table = [
        (Mood::Lost(500), true, "answered 500"),
        (Mood::Lost(429), true, "answered 429"),
        (Mood::Lost(404), false, "answered 404"),
        (Mood::Lost(400), false, "Parameter count"),
        (Mood::Broken(500), true, "answered 500"),
        (Mood::Broken(503), true, "answered 503"),
        (Mood::Broken(404), false, "answered 404"),
        (Mood::Garbage, true, "cannot be read"),
        (Mood::HtmlWeather, true, "cannot be read"),
        (Mood::OtherForm, true, "cannot be read"),
        (Mood::NoTemperature, true, "cannot be read"),
        (Mood::UnknownCode, true, "weather code, 42"),
        (Mood::Huge, false, "more than 1048576 bytes"),
        (Mood::Redirects, true, "redirect"),
    ];
    for (mood, retryable, part) in table {
        let fault = ask(mood, "Beijing").await.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{mood:?}: {fault}");
        assert_eq!((fault.retryable, fault.side_effect), (retryable, SideEffect::None), "{mood:?}");
        assert!(fault.message.contains(part), "{mood:?}: {fault}");
        assert!(fault.message.contains("127.0.0.1"), "{mood:?}: {fault}");
    }
}

#[tokio::test]
async fn nobody_there_or_no_answer_in_time() {
    let gone = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let refused = testing::run(&source(gone, 5_000), &json!({"query": "Rome"})).await.unwrap_err();
    assert_eq!(refused.code, Code::UpstreamUnavailable, "{refused}");
    assert_eq!((refused.retryable, refused.side_effect), (true, SideEffect::None));
    for mood in [Mood::Hang, Mood::HangInBody] {
        let (address, _) = stand_in(mood).await;
        let begun = Instant::now();
        let fault = testing::run(&source(address, 400), &json!({"query": "Rome"})).await;
        let fault = fault.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{mood:?}: {fault}");
        assert!(fault.message.contains("no answer in time"), "{mood:?}: {fault}");
        assert!(begun.elapsed() < Duration::from_millis(1_500), "{:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn nothing_is_asked_before_a_call() {
    let (address, asked) = stand_in(Mood::Well).await;
    let begun = Instant::now();
    let source = source(address, 5_000);
    assert!(begun.elapsed() < Duration::from_millis(20), "{:?}", begun.elapsed());
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    testing::run(&source, &json!({"query": "Beijing"})).await.unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn definition_and_settings() {
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
    let (address, _) = stand_in(Mood::Well).await;
    let fault = testing::run(&source(address, 5_000), &json!({"place": "Rome"})).await.unwrap_err();
    assert!(fault.message.contains("place"), "{fault}");
}

#[test]
fn every_code_has_words() {
    let known: Vec<u8> = (0..=255)
        .filter(|code| weather_codes::describe_weather_code(*code, true).is_some())
        .collect();
    assert_eq!(
        known,
        [
            0, 1, 2, 3, 45, 48, 51, 53, 55, 56, 57, 61, 63, 65, 66, 67, 71, 73, 75, 77, 80, 81, 82,
            85, 86, 95, 96, 99
        ]
    );
}
