//! Descriptions of the weather codes of the World Meteorological Organization (table 4677), as far
//! as forecasts use them. Pure.

/// Describes the sky for a weather code. Returns `None` if the code is unknown.
pub fn describe_weather_code(code: u8, is_day: bool) -> Option<&'static str> {
    Some(match code {
        0 if is_day => "Sunny",
        0 => "Clear sky",
        1 if is_day => "Mainly sunny",
        1 => "Mainly clear",
        2 => "Partly cloudy",
        3 => "Overcast",
        45 => "Fog",
        48 => "Freezing fog",
        51 => "Light drizzle",
        53 => "Drizzle",
        55 => "Heavy drizzle",
        56 => "Light freezing drizzle",
        57 => "Freezing drizzle",
        61 => "Light rain",
        63 => "Rain",
        65 => "Heavy rain",
        66 => "Light freezing rain",
        67 => "Freezing rain",
        71 => "Light snow",
        73 => "Snow",
        75 => "Heavy snow",
        77 => "Snow grains",
        80 => "Light rain showers",
        81 => "Rain showers",
        82 => "Violent rain showers",
        85 => "Light snow showers",
        86 => "Heavy snow showers",
        95 => "Thunderstorm",
        96 => "Thunderstorm with light hail",
        99 => "Thunderstorm with heavy hail",
        _ => return None,
    })
}
