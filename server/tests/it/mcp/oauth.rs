//! Tokens of an issuer: who they open the door for, and what they do not open.

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};

use crate::support::mcp::Mcp;
use crate::support::{Server, until};

/// Keys that were made for this test and are used nowhere else.
const OURS: &str = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgX8VG8ObTcR0Z99VQ\
    dyxWgqaeHbZ5nrcUYol2hcIKbXChRANCAARpMXr0OW3cstqf6t/7IRvlEnBafSpx\
    TDbRhGrJMyxtQx95eSLKDoc7g3sc3phl1lYynZyeOVCY8J1Qam3K3XxA";
const THEIRS: &str = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgbqymbCPH9FOYOXxQ\
    K5iVnOKSrZ8p/kaksQguRiERJSChRANCAATn/6HyMqxluiZ+TQpp/VmWq89ZHdjP\
    M/pAGUY/Ka8FhvcjBTK6k77UhMVmfjEt8N3ZKGxG9spZJvJnwMcPmbR/";

const ISSUER: &str = "https://login.example.com";
const RESOURCE: &str = "https://crib.example.com/mcp";

fn published() -> Value {
    json!({ "keys": [{ "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "ours",
        "x": "aTF69Dlt3LLan-rf-yEb5RJwWn0qcUw20YRqyTMsbUM",
        "y": "H3l5IsoOhzuDexzemGXWVjKdnJ45UJjwnVBqbcrdfEA" }] })
}

fn signed(key: &str, kid: &str, claims: &Value) -> String {
    let head = "-----BEGIN PRIVATE KEY-----";
    let pem = format!("{head}\n{key}\n{}\n", head.replace("BEGIN", "END"));
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some(kid.to_owned());
    let key = EncodingKey::from_ec_pem(pem.as_bytes()).unwrap();
    encode(&header, claims, &key).unwrap()
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn claims(change: impl FnOnce(&mut Value)) -> Value {
    let mut claims = json!({ "iss": ISSUER, "aud": RESOURCE, "exp": now() + 600, "sub": "ada",
        "toolcrib_project": "acme" });
    change(&mut claims);
    claims
}

async fn server() -> (Server, tempfile::TempDir) {
    server_for(None).await
}

async fn server_for(project: Option<&str>) -> (Server, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("jwks.json");
    std::fs::write(&file, published().to_string()).unwrap();
    let server = Server::with(|config| {
        config.auth.oauth = Some(toolcrib_server::config::OauthSettings {
            issuer: ISSUER.to_owned(),
            resource: RESOURCE.to_owned(),
            jwks_file: Some(file),
            default_project: project.map(str::to_owned),
            ..Default::default()
        });
    })
    .await;
    (server, directory)
}

#[tokio::test]
async fn a_client_without_a_token_is_told_where_to_get_one() {
    let (server, _keys) = server().await;
    let api = server.api();
    let nobody = Mcp::modern(&api).ask("tools/list", json!({})).await;
    assert_eq!(nobody.status, 401, "{}", nobody.text);
    let challenge = nobody.headers["www-authenticate"].to_str().unwrap();
    let place = "https://crib.example.com/.well-known/oauth-protected-resource/mcp";
    assert_eq!(challenge, format!("Bearer resource_metadata=\"{place}\""));
    for path in ["", "/mcp"] {
        let path = format!("/.well-known/oauth-protected-resource{path}");
        let known = api.get(&path).await.is(200);
        assert_eq!(known["resource"], RESOURCE);
        assert_eq!(known["authorization_servers"], json!([ISSUER]));
    }
    let plain = Server::start().await;
    let path = "/.well-known/oauth-protected-resource/mcp";
    plain.api().get(path).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_token_is_its_bearer_at_every_door() {
    let (server, _keys) = server().await;
    let admin = signed(OURS, "ours", &claims(|c| c["toolcrib_role"] = "admin".into()));
    let rule = json!({ "agent": "ada", "pattern": "calculation.*", "verdict": "allow" });
    server.with_key(&admin).put("/v1/rules", rule).await.is(200);
    let ada = server.with_key(&signed(OURS, "ours", &claims(|_| ())));
    let client = Mcp::modern(&ada);
    assert_eq!(client.names().await, ["calculation.eval", "call.result"]);
    let result = client.call("calculation.eval", json!({ "expression": "6*7" })).await.result();
    let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    assert_eq!(ada.call(id).await["agent"], "ada");
    let eve = claims(|c| c["toolcrib_project"] = "other".into());
    let eve = server.with_key(&signed(OURS, "ours", &eve));
    eve.get(&format!("/v1/tool_calls/{id}")).await.refused(404, "NOT_FOUND");
    ada.get("/v1/keys").await.refused(403, "PERMISSION_DENIED");
}

#[tokio::test]
async fn a_token_for_someone_else_opens_nothing() {
    let (server, _keys) = server().await;
    let refused = |what: &str, token: String| {
        let client = Mcp::modern(&server.with_key(&token));
        let what = what.to_owned();
        async move {
            let told = client.ask("tools/list", json!({})).await;
            assert_eq!(told.status, 401, "{what}: {}", told.text);
        }
    };
    let ours = |change: fn(&mut Value)| signed(OURS, "ours", &claims(change));
    refused("another server", ours(|c| c["aud"] = "https://other.example.com/mcp".into())).await;
    refused("nobody's", ours(|c| drop(c.as_object_mut().unwrap().remove("aud")))).await;
    refused("another issuer", ours(|c| c["iss"] = "https://evil.example".into())).await;
    refused("over", ours(|c| c["exp"] = (now() - 600).into())).await;
    refused("for ever", ours(|c| drop(c.as_object_mut().unwrap().remove("exp")))).await;
    refused("not yet", ours(|c| c["nbf"] = (now() + 600).into())).await;
    refused("no project", ours(|c| drop(c.as_object_mut().unwrap().remove("toolcrib_project"))))
        .await;
    refused("no such role", ours(|c| c["toolcrib_role"] = "king".into())).await;
    refused("a rule's star", ours(|c| c["sub"] = "*".into())).await;
    refused("another's key", signed(THEIRS, "ours", &claims(|_| ()))).await;
    refused("an unknown key", signed(THEIRS, "theirs", &claims(|_| ()))).await;
    let good = signed(OURS, "ours", &claims(|_| ()));
    let (head, rest) = good.split_once('.').unwrap();
    let (body, _) = rest.split_once('.').unwrap();
    refused("not signed", format!("{head}.{body}.")).await;
    // Signed with what everybody can read.
    let mut shared = Header::new(Algorithm::HS256);
    shared.kid = Some("ours".to_owned());
    let public = EncodingKey::from_secret(published().to_string().as_bytes());
    refused("a shared secret", encode(&shared, &claims(|_| ()), &public).unwrap()).await;
    let allowed = Mcp::modern(&server.with_key(&good)).ask("tools/list", json!({})).await;
    assert_eq!(allowed.status, 200);
}

#[tokio::test]
async fn a_session_that_goes_on_with_another_token_hears_of_changes() {
    let (server, _keys) = server().await;
    let admin = claims(|claims| claims["toolcrib_role"] = "admin".into());
    let admin = server.with_key(&signed(OURS, "ours", &admin));
    let rule = async |pattern: &str| {
        let rule = json!({ "agent": "ada", "pattern": pattern, "verdict": "allow" });
        admin.put("/v1/rules", rule).await.is(200);
    };
    // Within the leeway, and not for long.
    let ending = claims(|claims| claims["exp"] = (now() - 57).into());
    let ending = server.with_key(&signed(OURS, "ours", &ending));
    let session = Mcp::legacy(&ending).await;
    until("the token to be over", || async {
        (ending.get("/v1/tools").await.status == 401).then_some(())
    })
    .await;
    // What changes now is told to nobody.
    rule("calculation.*").await;
    let renewed = server.with_key(&signed(OURS, "ours", &claims(|_| ())));
    let session = session.calling_as(&renewed);
    let mut stream = session.session_stream().await;
    rule("weather.*").await;
    stream.until("notifications/tools/list_changed").await;
    assert!(session.names().await.contains(&"weather.query".to_owned()));
}

#[tokio::test]
async fn a_project_that_cannot_be_read_is_not_the_usual_one() {
    let (server, _keys) = server_for(Some("acme")).await;
    for (project, status) in [(None, 200), (Some(json!(7)), 401), (Some(json!(["acme"])), 401)] {
        let claims = claims(|claims| match &project {
            Some(project) => claims["toolcrib_project"] = project.clone(),
            None => drop(claims.as_object_mut().unwrap().remove("toolcrib_project")),
        });
        let client = Mcp::modern(&server.with_key(&signed(OURS, "ours", &claims)));
        let told = client.ask("tools/list", json!({})).await;
        assert_eq!(told.status, status, "{project:?}: {}", told.text);
    }
}
