//! OAuth access tokens: validation, and the caller that a token authenticates.

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};
use toolcrib_server::config::OauthSettings;

use crate::support::mcp::Mcp;
use crate::support::{Server, until};

/// Keys that exist only for these tests.
const TRUSTED_KEY: &str = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgX8VG8ObTcR0Z99VQ\
    dyxWgqaeHbZ5nrcUYol2hcIKbXChRANCAARpMXr0OW3cstqf6t/7IRvlEnBafSpx\
    TDbRhGrJMyxtQx95eSLKDoc7g3sc3phl1lYynZyeOVCY8J1Qam3K3XxA";
const UNTRUSTED_KEY: &str = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgbqymbCPH9FOYOXxQ\
    K5iVnOKSrZ8p/kaksQguRiERJSChRANCAATn/6HyMqxluiZ+TQpp/VmWq89ZHdjP\
    M/pAGUY/Ka8FhvcjBTK6k77UhMVmfjEt8N3ZKGxG9spZJvJnwMcPmbR/";

const ISSUER: &str = "https://login.example.com";
const RESOURCE: &str = "https://crib.example.com/mcp";

fn jwks() -> Value {
    json!({ "keys": [{ "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "ours",
        "x": "aTF69Dlt3LLan-rf-yEb5RJwWn0qcUw20YRqyTMsbUM",
        "y": "H3l5IsoOhzuDexzemGXWVjKdnJ45UJjwnVBqbcrdfEA" }] })
}

fn sign_token(key: &str, kid: &str, claims: &Value) -> String {
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

async fn start_server() -> (Server, tempfile::TempDir) {
    start_server_with_default(None).await
}

async fn start_server_with_default(project: Option<&str>) -> (Server, tempfile::TempDir) {
    start_server_with(|oauth| oauth.default_project = project.map(str::to_owned)).await
}

async fn start_server_with(change: impl FnOnce(&mut OauthSettings)) -> (Server, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("jwks.json");
    std::fs::write(&file, jwks().to_string()).unwrap();
    let server = Server::with(|config| {
        let mut oauth = OauthSettings {
            issuer: ISSUER.to_owned(),
            resource: RESOURCE.to_owned(),
            jwks_file: Some(file),
            ..Default::default()
        };
        change(&mut oauth);
        config.auth.oauth = Some(oauth);
    })
    .await;
    (server, directory)
}

#[tokio::test]
async fn a_request_without_a_token_gets_the_resource_metadata_url() {
    let (server, _keys) = start_server().await;
    let api = server.api();
    let anonymous = Mcp::modern(&api).ask("tools/list", json!({})).await;
    assert_eq!(anonymous.status, 401, "{}", anonymous.text);
    let challenge = anonymous.headers["www-authenticate"].to_str().unwrap();
    let metadata_url = "https://crib.example.com/.well-known/oauth-protected-resource/mcp";
    assert_eq!(challenge, format!("Bearer resource_metadata=\"{metadata_url}\""));
    for path in ["", "/mcp"] {
        let path = format!("/.well-known/oauth-protected-resource{path}");
        let metadata = api.get(&path).await.is(200);
        assert_eq!(metadata["resource"], RESOURCE);
        assert_eq!(metadata["authorization_servers"], json!([ISSUER]));
    }
    let plain = Server::start().await;
    let path = "/.well-known/oauth-protected-resource/mcp";
    plain.api().get(path).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_token_authenticates_its_subject_on_every_transport() {
    let (server, _keys) = start_server().await;
    let admin = sign_token(TRUSTED_KEY, "ours", &claims(|c| c["toolcrib_role"] = "admin".into()));
    let rule = json!({ "agent": "ada", "pattern": "calculation.*", "verdict": "allow" });
    server.with_key(&admin).put("/v1/rules", rule).await.is(200);
    let ada = server.with_key(&sign_token(TRUSTED_KEY, "ours", &claims(|_| ())));
    let client = Mcp::modern(&ada);
    assert_eq!(client.names().await, ["calculation__eval", "call__result", "result__read"]);
    let result = client.call("calculation.eval", json!({ "expression": "6*7" })).await.result();
    let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    assert_eq!(ada.call(id).await["agent"], "ada");
    let eve = claims(|c| c["toolcrib_project"] = "other".into());
    let eve = server.with_key(&sign_token(TRUSTED_KEY, "ours", &eve));
    eve.get(&format!("/v1/tool_calls/{id}")).await.refused(404, "NOT_FOUND");
    ada.get("/v1/keys").await.refused(403, "PERMISSION_DENIED");
}

#[tokio::test]
async fn claims_map_to_roles_and_attributes() {
    let (server, _keys) = start_server_with(|oauth| {
        oauth.roles_claim = Some("roles".to_owned());
        oauth.groups_claim = Some("groups".to_owned());
        oauth.user_claim = Some("email".to_owned());
        oauth.session_claim = Some("sid".to_owned());
        oauth.environment_claim = Some("env".to_owned());
        oauth.tools_claim = Some("tools".to_owned());
    })
    .await;
    let api = |change: &dyn Fn(&mut Value)| {
        server.with_key(&sign_token(TRUSTED_KEY, "ours", &claims(change)))
    };
    let admin = api(&|c| c["roles"] = json!(["admin"]));
    // Only a caller with all of these attributes matches.
    let rule = json!({ "verdict": "allow", "agents": ["ada"], "groups": ["eng"],
        "users": ["bob@example.com"], "sessions": ["s1"], "environments": ["test"] });
    admin.put("/v1/rules/all", rule).await.is(200);
    let full = |c: &mut Value| {
        c["groups"] = json!(["ops", "eng"]);
        c["email"] = json!("bob@example.com");
        (c["sid"], c["env"]) = (json!("s1"), json!("test"));
    };
    let names = async |api: &crate::support::Api| {
        let list = api.get("/v1/tools").await.is(200);
        let tools = list["tools"].as_array().unwrap().clone();
        tools.into_iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(names(&api(&full)).await.contains(&"calculation.eval".to_owned()));
    for claim in ["groups", "email", "sid", "env"] {
        let without = api(&|c| {
            full(c);
            c.as_object_mut().unwrap().remove(claim);
        });
        assert_eq!(names(&without).await, Vec::<String>::new(), "without {claim}");
    }
    let limited = api(&|c| {
        full(c);
        c["tools"] = json!("calculation.* weather.query");
    });
    let listed = names(&limited).await;
    assert!(listed.contains(&"calculation.eval".to_owned()), "{listed:?}");
    assert!(!listed.contains(&"database.query".to_owned()), "{listed:?}");
    let both = api(&|c| c["roles"] = json!("auditor agent"));
    both.get("/v1/keys").await.is(200);
    both.user("eve").get("/v1/tools").await.refused(403, "PERMISSION_DENIED");
    let wrong: [(&str, Value); 5] = [
        ("roles", json!(["king"])),
        ("roles", json!([])),
        ("groups", json!([1])),
        ("email", json!("two words")),
        ("tools", json!({ "a": 1 })),
    ];
    for (claim, value) in wrong {
        let refused = api(&|c| c[claim] = value.clone()).get("/v1/tools").await;
        refused.refused(401, "UNAUTHENTICATED");
    }
}

#[tokio::test]
async fn invalid_tokens_are_rejected() {
    let (server, _keys) = start_server().await;
    let assert_rejected = |case: &str, token: String| {
        let client = Mcp::modern(&server.with_key(&token));
        let case = case.to_owned();
        async move {
            let response = client.ask("tools/list", json!({})).await;
            assert_eq!(response.status, 401, "{case}: {}", response.text);
        }
    };
    let token_with = |change: fn(&mut Value)| sign_token(TRUSTED_KEY, "ours", &claims(change));
    assert_rejected(
        "another server",
        token_with(|c| c["aud"] = "https://other.example.com/mcp".into()),
    )
    .await;
    assert_rejected("no audience", token_with(|c| drop(c.as_object_mut().unwrap().remove("aud"))))
        .await;
    assert_rejected("another issuer", token_with(|c| c["iss"] = "https://evil.example".into()))
        .await;
    assert_rejected("expired", token_with(|c| c["exp"] = (now() - 600).into())).await;
    assert_rejected("no expiry", token_with(|c| drop(c.as_object_mut().unwrap().remove("exp"))))
        .await;
    assert_rejected("not valid yet", token_with(|c| c["nbf"] = (now() + 600).into())).await;
    assert_rejected(
        "no project",
        token_with(|c| drop(c.as_object_mut().unwrap().remove("toolcrib_project"))),
    )
    .await;
    assert_rejected("no such role", token_with(|c| c["toolcrib_role"] = "king".into())).await;
    assert_rejected("wildcard subject", token_with(|c| c["sub"] = "*".into())).await;
    assert_rejected("untrusted key", sign_token(UNTRUSTED_KEY, "ours", &claims(|_| ()))).await;
    assert_rejected("an unknown key", sign_token(UNTRUSTED_KEY, "theirs", &claims(|_| ()))).await;
    let good = sign_token(TRUSTED_KEY, "ours", &claims(|_| ()));
    let (head, rest) = good.split_once('.').unwrap();
    let (body, _) = rest.split_once('.').unwrap();
    assert_rejected("not signed", format!("{head}.{body}.")).await;
    // HS256 with the public key as the shared secret.
    let mut shared = Header::new(Algorithm::HS256);
    shared.kid = Some("ours".to_owned());
    let public = EncodingKey::from_secret(jwks().to_string().as_bytes());
    assert_rejected("a shared secret", encode(&shared, &claims(|_| ()), &public).unwrap()).await;
    let allowed = Mcp::modern(&server.with_key(&good)).ask("tools/list", json!({})).await;
    assert_eq!(allowed.status, 200);
}

#[tokio::test]
async fn a_session_with_a_renewed_token_is_notified_of_changes() {
    let (server, _keys) = start_server().await;
    let admin = claims(|claims| claims["toolcrib_role"] = "admin".into());
    let admin = server.with_key(&sign_token(TRUSTED_KEY, "ours", &admin));
    let rule = async |pattern: &str| {
        let rule = json!({ "agent": "ada", "pattern": pattern, "verdict": "allow" });
        admin.put("/v1/rules", rule).await.is(200);
    };
    // The token has expired but is within the leeway for three more seconds.
    let ending = claims(|claims| claims["exp"] = (now() - 57).into());
    let ending = server.with_key(&sign_token(TRUSTED_KEY, "ours", &ending));
    let session = Mcp::legacy(&ending).await;
    until("the token to be over", || async {
        (ending.get("/v1/tools").await.status == 401).then_some(())
    })
    .await;
    // The session has no valid token, so it gets no notification of this change.
    rule("calculation.*").await;
    let renewed = server.with_key(&sign_token(TRUSTED_KEY, "ours", &claims(|_| ())));
    let session = session.calling_as(&renewed);
    let mut stream = session.session_stream().await;
    rule("weather.*").await;
    stream.until("notifications/tools/list_changed").await;
    assert!(session.names().await.contains(&"weather__query".to_owned()));
}

#[tokio::test]
async fn an_invalid_project_claim_does_not_use_the_default_project() {
    let (server, _keys) = start_server_with_default(Some("acme")).await;
    for (project, status) in [(None, 200), (Some(json!(7)), 401), (Some(json!(["acme"])), 401)] {
        let claims = claims(|claims| match &project {
            Some(project) => claims["toolcrib_project"] = project.clone(),
            None => drop(claims.as_object_mut().unwrap().remove("toolcrib_project")),
        });
        let client = Mcp::modern(&server.with_key(&sign_token(TRUSTED_KEY, "ours", &claims)));
        let response = client.ask("tools/list", json!({})).await;
        assert_eq!(response.status, status, "{project:?}: {}", response.text);
    }
}
