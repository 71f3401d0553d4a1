//! A stub that answers in the format of Open-Meteo.

use std::collections::HashMap;

use axum::extract::Query;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

/// Starts the stub. Returns its URL.
pub async fn stand_in() -> String {
    stand_in_with(|app| app).await
}

/// Starts the stub with a modified router.
pub async fn stand_in_with(wrap: impl FnOnce(Router) -> Router) -> String {
    let app = Router::new().route("/v1/search", get(search)).route("/v1/forecast", get(forecast));
    let app = wrap(app);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    format!("http://{address}")
}

async fn search(Query(query): Query<HashMap<String, String>>) -> Json<Value> {
    if query["name"] != "Beijing" {
        // Open-Meteo omits the field if it finds no location.
        return Json(json!({ "generationtime_ms": 0.45013428 }));
    }
    Json(json!({
        "results": [{
            "id": 1816670, "name": "Beijing", "latitude": 39.9075, "longitude": 116.39723,
            "elevation": 49.0, "feature_code": "PPLC", "country_code": "CN",
            "admin1_id": 2038349, "timezone": "Asia/Shanghai", "population": 18960744,
            "country_id": 1814991, "country": "China", "admin1": "Beijing"
        }],
        "generationtime_ms": 0.8
    }))
}

async fn forecast(Query(query): Query<HashMap<String, String>>) -> Json<Value> {
    assert_eq!((query["latitude"].as_str(), query["longitude"].as_str()), ("39.9075", "116.39723"));
    Json(json!({
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
    }))
}
