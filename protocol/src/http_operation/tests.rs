//! Tests of the requests of HTTP operations and Jina tools, and of the redaction of secrets.

use serde_json::{Map, Value, json};

use super::*;
use crate::secrets::redaction::SecretRedactor;

fn lookup_secret(name: &str) -> Option<String> {
    match name {
        "TOKEN" => Some("tok en/1".to_owned()),
        "USER_NAME" => Some("ada".to_owned()),
        "PASSWORD" => Some("pass".to_owned()),
        _ => None,
    }
}

fn map(value: Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap()
}

fn build(operation: Value, args: Value) -> Result<OperationRequest, Fault> {
    let HttpToolSpec::Http(operation) =
        HttpToolSpec::from_options(&json!({ "http": operation })).unwrap()
    else {
        panic!()
    };
    operation.build_request(&map(args), SecretRedactor::default(), &lookup_secret)
}

fn url(operation: Value, args: Value) -> String {
    build(operation, args).unwrap().url.to_string()
}

#[test]
fn path_parameters_are_substituted_and_encoded() {
    let pets = json!({ "url": "https://a.b/v1/pets/{id}/x" });
    assert_eq!(url(pets.clone(), json!({ "id": 7 })), "https://a.b/v1/pets/7/x");
    assert_eq!(
        url(pets.clone(), json!({ "id": "a/b?c#d e" })),
        "https://a.b/v1/pets/a%2Fb%3Fc%23d%20e/x"
    );
    assert_eq!(url(pets.clone(), json!({ "id": [1, "2,3"] })), "https://a.b/v1/pets/1,2%2C3/x");
    for bad in [json!({}), json!({ "id": null }), json!({ "id": "" }), json!({ "id": ".." })] {
        let fault = build(pets.clone(), bad.clone()).unwrap_err();
        assert_eq!(fault.code, Code::BadRequest, "{bad}");
    }
    let adjacent = json!({ "url": "https://a.b/x/{one}{two}/y" });
    assert!(
        build(adjacent, json!({ "one": ".", "two": "." })).is_err(),
        "dot segments cannot be assembled from two arguments"
    );
}

#[test]
fn unlisted_arguments_go_into_the_query_or_the_body() {
    let get = json!({ "url": "https://a.b/s?fixed=1" });
    let request = url(get, json!({ "q": "a b&c", "n": 2, "none": null, "l": ["x", "y"] }));
    assert_eq!(request, "https://a.b/s?fixed=1&l=x&l=y&n=2&q=a+b%26c");
    let post = json!({ "method": "post", "url": "https://a.b/{id}" });
    let request = build(post, json!({ "id": 1, "x": [1], "none": null })).unwrap();
    assert_eq!((request.method.as_str(), request.url.path()), ("POST", "/1"));
    let (kind, bytes) = request.body.unwrap();
    assert_eq!(kind, "application/json");
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(body, json!({ "x": [1], "none": null }));
}

#[test]
fn parameters_go_where_the_definition_says() {
    let operation = json!({
        "url": "https://a.b/{pet-id}",
        "parameters": [
            { "name": "pet-id", "in": "path", "arg": "pet" },
            { "name": "tags", "in": "query", "explode": false },
            { "name": "pipe", "in": "query", "style": "pipeDelimited" },
            { "name": "filter", "in": "query", "style": "deepObject" },
            { "name": "where", "in": "query", "json": true },
            { "name": "X-Ids", "in": "header", "arg": "ids" },
            { "name": "session", "in": "cookie" },
        ],
        "headers": { "X-Always": "1" },
    });
    let args = json!({
        "pet": "p", "tags": ["a", "b"], "pipe": [1, 2], "filter": { "k": "v" },
        "where": { "a": 1 }, "ids": [1, 2], "session": "s;1", "stray": "not sent",
    });
    let request = build(operation, args).unwrap();
    assert_eq!(
        request.url.as_str(),
        "https://a.b/p?tags=a%2Cb&pipe=1%7C2&filter%5Bk%5D=v&where=%7B%22a%22%3A1%7D"
    );
    let expected = [("X-Always", "1"), ("X-Ids", "1,2"), ("cookie", "session=s%3B1")];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(request.headers, expected);
    assert!(request.body.is_none());
}

#[test]
fn bodies_can_be_json_form_or_text() {
    let encode = |body: Value, args: Value| {
        let operation = json!({ "method": "PUT", "url": "https://a.b/", "body": body });
        let (kind, bytes) = build(operation, args).unwrap().body.unwrap();
        (kind, String::from_utf8(bytes).unwrap())
    };
    let args = json!({ "a": 1, "b": "x y&z", "c": 2 });
    let (kind, text) = encode(json!({ "args": ["a", "b", "gone"] }), args.clone());
    assert_eq!((kind.as_str(), text.as_str()), ("application/json", r#"{"a":1,"b":"x y&z"}"#));
    let (kind, text) = encode(json!({ "args": ["a", "b"], "encoding": "form" }), args.clone());
    assert_eq!(kind, "application/x-www-form-urlencoded");
    assert_eq!(text, "a=1&b=x%20y%26z");
    let (kind, text) = encode(
        json!({ "arg": "b", "encoding": "text", "content_type": "text/markdown" }),
        args.clone(),
    );
    assert_eq!((kind.as_str(), text.as_str()), ("text/markdown", "x y&z"));
    assert_eq!(encode(json!({ "arg": "a" }), args).1, "1");
}

#[test]
fn credentials_come_from_the_environment_and_are_redacted() {
    let build_with_auth = |auth: Value| {
        let operation = json!({ "url": "https://a.b/", "auth": [auth] });
        build(operation, json!({}))
    };
    let request = build_with_auth(json!({ "type": "bearer", "env": "TOKEN" })).unwrap();
    assert_eq!(request.headers, [("authorization".to_owned(), "Bearer tok en/1".to_owned())]);
    assert_eq!(
        request.secrets.redact("got tok en/1 and tok%20en%2F1"),
        "got [secret] and [secret]"
    );
    let key =
        |location: &str| json!({ "type": "api_key", "in": location, "name": "k", "env": "TOKEN" });
    assert_eq!(build_with_auth(key("query")).unwrap().url.as_str(), "https://a.b/?k=tok+en%2F1");
    assert_eq!(build_with_auth(key("header")).unwrap().headers[0].0, "k");
    assert_eq!(build_with_auth(key("cookie")).unwrap().headers[0].1, "k=tok%20en%2F1");
    let basic = json!({
        "type": "basic", "username_env": "USER_NAME", "password_env": "PASSWORD",
    });
    assert_eq!(
        build_with_auth(basic).unwrap().basic_auth,
        Some(("ada".to_owned(), "pass".to_owned()))
    );
    let fault = build_with_auth(json!({ "type": "bearer", "env": "NOT_SET" })).unwrap_err();
    assert_eq!(fault.code, Code::Unauthenticated);
    assert!(fault.message.contains("NOT_SET"), "{fault}");
}

#[test]
fn invalid_definitions_are_refused_with_the_field() {
    for (http, word) in [
        (json!({}), "url"),
        (json!({ "url": "ftp://a.b" }), "url"),
        (json!({ "url": "https://{host}/x" }), "host"),
        (json!({ "url": "https://a@b/x" }), "host"),
        (json!({ "url": "https://a.b", "method": "FETCH" }), "method"),
        (json!({ "url": "https://a.b", "mehtod": "GET" }), "mehtod"),
        (json!({ "url": "https://a.b", "headers": { "Host": "c" } }), "Host"),
        (json!({ "url": "https://a.b", "headers": { "a b": "c" } }), "a b"),
        (json!({ "url": "https://a.b", "body": { "arg": "a", "args": ["b"] } }), "body"),
        (json!({ "url": "https://a.b", "response": { "pointer": "data" } }), "pointer"),
        (
            json!({ "url": "https://a.b",
                "parameters": [{ "name": "Transfer-Encoding", "in": "header" }] }),
            "Transfer-Encoding",
        ),
        (json!({ "url": "https://x.y", "timeout_s": -1 }), "timeout_s"),
        (json!({ "url": "https://x.y", "timeout_s": 0 }), "timeout_s"),
    ] {
        let reason = HttpToolSpec::from_options(&json!({ "http": http })).unwrap_err();
        assert!(reason.contains(word), "{word}: {reason}");
    }
}

#[test]
fn secrets_are_redacted_in_json_and_url_encoding() {
    let mut secrets = SecretRedactor::default();
    secrets.add("s3cr\"et/ü");
    secrets.add("123456");
    secrets.add("ab");
    let mut value = json!({
        "plain": "x s3cr\"et/ü y", "url": "k=s3cr%22et%2F%C3%BC", "low": "s3cr%22et%2f%c3%bc",
        "n": 123456, "list": ["ab", "cab", true], "key 123456": 1, "escaped": "s3cr\\\"et/ü",
    });
    assert!(secrets.redact_json(&mut value));
    let expected = json!({
        "plain": "x [secret] y", "url": "k=[secret]", "low": "[secret]",
        "n": "[secret]", "list": ["[secret]", "cab", true], "key [secret]": 1,
        "escaped": "[secret]",
    });
    assert_eq!(value, expected);
    assert!(!format!("{secrets:?}").contains("s3cr"));
    assert!(!SecretRedactor::default().redact_json(&mut json!({ "a": "b" })));
}

#[test]
fn secrets_are_redacted_in_every_common_encoding() {
    let mut secrets = SecretRedactor::default();
    secrets.add("Ab+c/D&e f\"ü😀");
    let spellings = [
        "Ab+c/D&e f\"ü😀",
        "Ab%2Bc%2FD%26e%20f%22%C3%BC%F0%9F%98%80",
        "Ab%2bc%2fD%26e%20f%22%c3%bc%f0%9f%98%80",
        "Ab%2Bc/D%26e%20f%22%C3%BC%F0%9F%98%80",
        "Ab%2Bc%2FD%26e+f%22%C3%BC%F0%9F%98%80",
        "Ab+c\\/D&e f\\\"ü😀",
        "Ab\\u002bc\\/D\\u0026e f\\\"\\u00fc\\ud83d\\ude00",
        "Ab\\u002Bc\\u002FD\\u0026e f\\u0022\\u00FC\\uD83D\\uDE00",
        "Ab+c/D&amp;e f&quot;ü😀",
        "Ab&#43;c&#x2F;D&#38;e f&#34;&#252;&#x1F600;",
        "QWIrYy9EJmUgZiLDvPCfmIA=",
        "QWIrYy9EJmUgZiLDvPCfmIA",
        "QWIrYy9EJmUgZiLDvPCfmIA%3D",
    ];
    for spelling in spellings {
        assert_eq!(secrets.redact(spelling), "[secret]", "{spelling}");
        assert_eq!(secrets.redact(&format!("<{spelling}> ")), "<[secret]> ", "{spelling}");
    }
    let twice = format!("{} and {}", spellings[1], spellings[8]);
    assert_eq!(secrets.redact(&twice), "[secret] and [secret]");
    for other in ["Ab+c/D&e f", "%", "\\", "&", "%4", "&amp;", "\\u00", "100 % + ü; &c;"] {
        assert_eq!(secrets.redact_if_present(other), None, "{other}");
    }
}

#[test]
fn secrets_in_both_base64_alphabets_are_redacted() {
    let mut secrets = SecretRedactor::default();
    secrets.add("k?~>key");
    for spelling in
        ["az9+PmtleQ==", "az9+PmtleQ", "az9-PmtleQ==", "az9-PmtleQ", "az9%2BPmtleQ%3D%3D"]
    {
        assert_eq!(secrets.redact(&format!("x={spelling};")), "x=[secret];", "{spelling}");
    }
    // A key that ends in padding itself is often shown without it.
    secrets.add("c2VjcmV0IQ==");
    assert_eq!(secrets.redact("key c2VjcmV0IQ,"), "key [secret],");
    // A text of nothing but escapes does not take exponential time.
    secrets.add(&"\\".repeat(64));
    assert_eq!(secrets.redact(&"\\".repeat(4_000)).len(), 4_000 / 128 * "[secret]".len() + 32);
}

fn jina_endpoints() -> jina::JinaEndpoints {
    let url = |text: &str| reqwest::Url::parse(text).unwrap();
    jina::JinaEndpoints { search: url("https://s.jina.ai"), reader: url("https://r.jina.ai") }
}

fn build_jina(options: Value, args: Value) -> Result<OperationRequest, Fault> {
    jina::build_request(
        &options,
        &jina_endpoints(),
        &map(args),
        SecretRedactor::default(),
        &lookup_secret,
    )
}

#[test]
fn jina_search_and_reader_requests_are_built() {
    let search = json!({ "jina": { "mode": "search" } });
    let request = build_jina(search.clone(), json!({ "query": "tool crib", "n": 3 })).unwrap();
    assert_eq!(request.url.as_str(), "https://s.jina.ai/search?n=3&q=tool+crib");
    assert_eq!(request.method, "GET");
    assert_eq!(
        request.headers,
        [("accept".to_owned(), "text/plain".to_owned())],
        "no key, no authorization header"
    );
    for empty in [json!({}), json!({ "q": " " }), json!({ "q": null }), json!({ "q": 0 })] {
        assert_eq!(build_jina(search.clone(), empty).unwrap_err().code, Code::BadRequest);
    }
    for mode in ["reader", "read", "crawl"] {
        let reader = json!({ "jina": { "mode": mode } });
        let request =
            build_jina(reader.clone(), json!({ "target_url": "https://x.y/a?b=c" })).unwrap();
        assert_eq!(request.url.as_str(), "https://r.jina.ai/https%3A%2F%2Fx.y%2Fa%3Fb%3Dc");
        assert_eq!(build_jina(reader, json!({})).unwrap_err().code, Code::BadRequest);
    }
    let templated = json!({ "jina": { "mode": "reader", "endpoint_template": "/v2/{url}/text" } });
    let request = build_jina(templated, json!({ "url": "a/b" })).unwrap();
    assert_eq!(request.url.as_str(), "https://r.jina.ai/v2/a%2Fb/text");
}

#[test]
fn the_jina_mode_is_explicit_or_derived_from_host_or_path() {
    let path = |options: Value, args: Value| build_jina(options, args).map(|r| r.url.to_string());
    let (q, u) = (json!({ "q": "x" }), json!({ "url": "x" }));
    let by_host = |url: &str| json!({ "jina": { "base_url": url } });
    assert_eq!(
        path(by_host("https://s.jina.ai"), q.clone()).unwrap(),
        "https://s.jina.ai/search?q=x"
    );
    assert_eq!(path(by_host("https://r.jina.ai/"), u.clone()).unwrap(), "https://r.jina.ai/x");
    let old = json!({ "openapi": { "path": "/search" } });
    assert_eq!(path(old, q.clone()).unwrap(), "https://s.jina.ai/search?q=x");
    for wrong in [
        json!({ "jina": {} }),
        json!({ "jina": { "base_url": "https://evil.example" } }),
        json!({ "jina": { "mode": "search", "base_url": "https://r.jina.ai" } }),
        json!({ "jina": { "mode": "search", "base_url": "https://s.jina.ai.evil.example" } }),
        json!({ "jina": { "mode": "reader", "base_url": "nonsense" } }),
    ] {
        assert_eq!(path(wrong.clone(), q.clone()).unwrap_err().code, Code::BadRequest, "{wrong}");
        assert!(jina::check_endpoint(&wrong, &jina_endpoints()).is_err(), "{wrong}");
    }
    assert!(HttpToolSpec::from_options(&json!({ "jina": { "mode": "dance" } })).is_err());
    assert!(HttpToolSpec::from_options(&json!({ "jina": [] })).is_err());
    let fault = build_jina(json!({}), q).unwrap_err();
    assert_eq!(fault.message, "missing options.jina/options.openapi config");
}

#[test]
fn jina_options_override_the_openapi_options() {
    let options = json!({
        "jina": {
            "mode": "search", "path": "find", "defaults": { "n": 1, "lang": "en" },
            "headers": { "X-A": "jina" }, "auth_env": "TOKEN", "accept": "application/json",
            "timeout_s": 0, "timeout": 4,
        },
        "openapi": {
            "headers": { "x-a": "old", "X-B": "old" }, "auth": { "env": "PASSWORD" },
            "timeout_s": 9, "method": "post",
        },
    });
    let request = build_jina(options, json!({ "q": "x", "n": 2 })).unwrap();
    assert_eq!(request.url.as_str(), "https://s.jina.ai/find");
    assert_eq!((request.method.as_str(), request.timeout_s), ("POST", Some(4.0)));
    let body: Value = serde_json::from_slice(&request.body.unwrap().1).unwrap();
    assert_eq!(body, json!({ "q": "x", "n": 2, "lang": "en" }));
    let expected = [
        ("X-B", "old"),
        ("X-A", "jina"),
        ("accept", "application/json"),
        ("authorization", "Bearer tok en/1"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(request.headers, expected);
    let old = json!({ "openapi": { "mode": "search", "auth": { "env": "PASSWORD" } } });
    let request = build_jina(old, json!({ "q": "x" })).unwrap();
    assert!(request.headers.contains(&("authorization".to_owned(), "Bearer pass".to_owned())));
    assert_eq!(request.timeout_s, None, "the server's default applies");
    let plain = json!({ "jina": { "mode": "search" }, "timeout": 3 });
    assert_eq!(build_jina(plain, json!({ "q": "x" })).unwrap().timeout_s, Some(3.0));
}
