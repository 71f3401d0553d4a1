//! Parses the MCP servers of a desktop client's configuration file.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{McpServerSettings, McpSettingsError, McpToolSettings};

const EFFECTS: &str = "read, idempotent or irreversible";
const RISKS: &str = "low, medium, high or critical";

/// Parses the servers of a desktop client's configuration, `{"mcpServers": {NAME: {…}}}`. Fields
/// that concern only the desktop client are ignored. An entry may also set Toolcrib's `pin`,
/// `effect` and `risk`; without `pin`, a server stays pinned if it already is.
pub fn parse_desktop_config(
    document: &Value,
    pinned: impl Fn(&str) -> bool,
) -> Result<Vec<McpServerSettings>, McpSettingsError> {
    let found = document.get("mcpServers").or_else(|| document.get("servers"));
    let Some(Value::Object(servers)) = found else {
        let reason = "must be an object of servers by their names";
        return Err(McpSettingsError { field: "mcpServers", why: reason.to_owned() });
    };
    let read = |(name, server): (&String, &Value)| {
        let settings = parse_desktop_server(name, server, &pinned)?;
        settings.check().map_err(|error| {
            let reason = format!("in \"{name}\": {}", error.why);
            McpSettingsError { field: error.field, why: reason }
        })?;
        Ok(settings)
    };
    servers.iter().map(read).collect()
}

fn parse_desktop_server(
    name: &str,
    server: &Value,
    pinned: impl Fn(&str) -> bool,
) -> Result<McpServerSettings, McpSettingsError> {
    let bad = |field: &'static str, kind: &str| {
        let reason = format!("of \"{name}\" must be {kind}");
        McpSettingsError { field, why: reason }
    };
    let Value::Object(server) = server else { return Err(bad("mcpServers", "an object")) };
    let text = |key: &'static str| match server.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(bad(key, "a text")),
    };
    let list = |key: &'static str| match server.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => {
            let words = list.iter().map(scalar_to_string).collect::<Option<Vec<String>>>();
            words.ok_or_else(|| bad(key, "a list of texts"))
        }
        Some(_) => Err(bad(key, "a list of texts")),
    };
    let words = |key: &'static str| match server.get(key) {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(Value::Object(map)) => {
            string_map(map).ok_or_else(|| bad(key, "an object of texts by their names"))
        }
        Some(_) => Err(bad(key, "an object of texts by their names")),
    };
    let off = server.get("disabled").and_then(Value::as_bool).unwrap_or(false);
    let kind = text("type")?.or(text("transport")?);
    // A disabled server is never connected to, so its transport does not matter.
    if !off && kind.is_some_and(|kind| kind.eq_ignore_ascii_case("sse")) {
        return Err(McpSettingsError {
            field: "type",
            why: format!(
                "of \"{name}\" is sse, the transport of 2024-11-05, which is not supported: give \
                 its URL for streamable HTTP, with the type http"
            ),
        });
    }
    if !off && !list("includeTools")?.is_empty() {
        let reason = format!(
            "of \"{name}\" cannot be imported: name the tools to switch off in excludeTools"
        );
        return Err(McpSettingsError { field: "includeTools", why: reason });
    }
    let switched_off = || McpToolSettings { enabled: Some(false), ..McpToolSettings::default() };
    let without = list("disabledTools")?.into_iter().chain(list("excludeTools")?);
    let (url, other_url) = (text("url")?, text("serverUrl")?);
    let server_name = sanitize_server_name(name);
    let pin = parse_optional(server, "pin").map_err(|()| bad("pin", "true or false"))?;
    Ok(McpServerSettings {
        name: server_name.clone(),
        enabled: !off,
        command: text("command")?,
        args: list("args")?,
        env: words("env")?,
        cwd: text("cwd")?,
        // If both are set, `url` is the address of the older SSE transport.
        url: text("httpUrl")?.or(url).or(other_url),
        headers: words("headers")?,
        pin: pin.unwrap_or_else(|| pinned(&server_name)),
        effect: parse_optional(server, "effect").map_err(|()| bad("effect", EFFECTS))?,
        risk: parse_optional(server, "risk").map_err(|()| bad("risk", RISKS))?,
        tools: without.map(|tool| (tool, switched_off())).collect(),
        ..McpServerSettings::default()
    })
}

/// Parses one of Toolcrib's own settings, if present.
fn parse_optional<T: DeserializeOwned>(
    server: &Map<String, Value>,
    key: &str,
) -> Result<Option<T>, ()> {
    match server.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => T::deserialize(value).map(Some).map_err(drop),
    }
}

fn scalar_to_string(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

fn string_map(map: &Map<String, Value>) -> Option<BTreeMap<String, String>> {
    map.iter().map(|(name, value)| Some((name.clone(), scalar_to_string(value)?))).collect()
}

/// Replaces each character that a tool name cannot contain with a dash. Desktop clients allow any
/// name.
fn sanitize_server_name(name: &str) -> String {
    let sanitize = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let name: String = name.trim().chars().map(sanitize).collect();
    name.trim_matches('-').to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;
    use toolcrib::domain::tool::Risk;

    use super::*;

    #[test]
    fn desktop_client_configurations_are_imported() {
        let document = json!({"globalShortcut": "x", "mcpServers": {
            "My Files!": {"command": "npx", "args": ["-y", "server", 8], "env": {"TOKEN": "t"},
                "alwaysAllow": ["read"], "type": "stdio"},
            "far": {"type": "http", "url": "https://far.example/mcp?key=s",
                "headers": {"Authorization": "Bearer ${FAR}"}, "disabled": true}}});
        let servers = parse_desktop_config(&document, |_| false).unwrap();
        let far = servers.iter().find(|server| server.name == "far").unwrap();
        assert!(!far.enabled && far.reads_environment());
        assert_eq!(far.display_address(), "https://far.example/mcp?…");
        let files = servers.iter().find(|server| server.name == "My-Files").unwrap();
        assert_eq!(files.args, ["-y", "server", "8"]);
        assert_eq!(files.check(), Ok(()));
        let near = json!({"mcpServers": {"near": {"command": "x", "pin": true, "risk": "high",
            "disabledTools": ["rm"], "excludeTools": ["mv"]}, "old": {"type": "sse",
            "url": "https://old.example/sse", "disabled": true}, "new": {"url": "https://new.example/sse",
            "httpUrl": "https://new.example/mcp"}}});
        let servers = parse_desktop_config(&near, |_| false).unwrap();
        let found = |name: &str| servers.iter().find(|server| server.name == name).unwrap();
        assert!(!found("old").enabled);
        assert_eq!(found("new").url.as_deref(), Some("https://new.example/mcp"));
        let near = found("near");
        assert!(near.pin && near.risk == Some(Risk::High) && near.tools.len() == 2);
        assert!(near.tools.values().all(|tool| tool.enabled == Some(false)));
        for (entry, field) in [
            (json!({"command": "x", "url": "https://x.example/mcp"}), "command"),
            (json!({"command": "x", "includeTools": ["read"]}), "includeTools"),
            (json!({"command": "x", "excludeTools": "rm"}), "excludeTools"),
            (json!({"command": "x", "pin": "yes"}), "pin"),
            (json!({"command": "x", "effect": "none"}), "effect"),
        ] {
            let document = json!({"mcpServers": {"fine": {"command": "x"}, "odd one": entry}});
            let error = parse_desktop_config(&document, |_| false).unwrap_err();
            assert_eq!(error.field, field);
            assert!(error.why.contains("\"odd one\""), "{}", error.why);
        }
        let error = parse_desktop_config(&json!({"mcpServers": {"x": {"command": 1}}}), |_| false)
            .unwrap_err();
        assert_eq!(error.field, "command");
        let old = json!({"mcpServers": {"x": {"type": "sse", "url": "https://x.example/sse"}}});
        let error = parse_desktop_config(&old, |_| false).unwrap_err();
        assert_eq!(error.field, "type");
        assert!(error.why.contains("streamable HTTP"), "{}", error.why);
    }
}
