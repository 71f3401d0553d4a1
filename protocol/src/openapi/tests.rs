//! Tests of documents and the tools that they become.

use serde_json::{Value, json};

use super::*;

const PETS: &str = r##"
openapi: 3.0.3
info: {title: Pet Store, version: 1.0.0}
servers:
  - url: https://{region}.example.com/v1/
    variables: {region: {default: eu}}
security:
  - apiKey: []
paths:
  /pets/{petId}:
    parameters:
      - $ref: '#/components/parameters/PetId'
    get:
      operationId: getPet
      summary: One pet
      description: With everything that is known of it.
      parameters:
        - {name: fields, in: query, explode: false, schema: {type: array, items: {type: string}}}
        - {name: X-Trace, in: header, schema: {type: string}}
        - {name: Accept, in: header, schema: {type: string}}
      responses:
        200: {description: ok}
    put:
      operationId: pets.replace
      security: [{basic: []}]
      requestBody: {$ref: '#/components/requestBodies/Pet'}
    delete:
      security: [{bearer: []}, {}]
  /pets:
    post:
      operationId: createPet
      x-toolcrib-result: /data
      x-toolcrib-timeout-s: 2.5
      requestBody:
        required: true
        content:
          application/json: {schema: {$ref: '#/components/schemas/Pet'}}
    patch:
      x-toolcrib-effect: idempotent
      security: []
      requestBody:
        content:
          application/merge-patch+json: {schema: {type: object, additionalProperties: true}}
  /z:
    get:
      parameters: [{$ref: 'other.yaml#/X'}]
    post:
      operationId: getPet
    put:
      requestBody: {required: true, content: {multipart/form-data: {}}}
    trace: {}
components:
  parameters:
    PetId: {name: petId, in: path, required: true, schema: {type: integer}}
  requestBodies:
    Pet:
      required: true
      content:
        application/json:
          schema:
            type: object
            required: [petId]
            properties: {petId: {type: integer}, name: {type: string}}
  schemas:
    Pet:
      type: object
      required: [name]
      properties:
        id: {type: integer, readOnly: true}
        name: {type: string, example: Rex, nullable: true}
        weight: {type: number, minimum: 0, exclusiveMinimum: true}
        parent: {$ref: '#/components/schemas/Pet'}
        tags: {type: array}
  securitySchemes:
    apiKey: {type: apiKey, in: header, name: X-Key}
    basic: {type: http, scheme: basic}
    bearer: {type: http, scheme: bearer, x-toolcrib-env: PET_TOKEN}
"##;

fn pets() -> ImportReport {
    let document = crate::yaml::parse_large(PETS).unwrap();
    let selected = ImportOptions { prefix: Some("pets".into()), server: None };
    import(&document, "p", &selected, 30_000).unwrap()
}

fn tool(import: &ImportReport, name: &str) -> (ToolDefinition, Value) {
    let found = import.tools.iter().find(|tool| tool.definition.name == name);
    let found = found.unwrap_or_else(|| panic!("{name}: {:?}", import.skipped));
    let options = found.definition.binding.as_ref().unwrap().options.to_value();
    (found.definition.clone(), options["http"].clone())
}

#[test]
fn an_operation_becomes_a_tool_with_one_schema() {
    let import = pets();
    let (get, http) = tool(&import, "pets.getPet");
    assert_eq!(get.description, "One pet. With everything that is known of it.");
    assert_eq!((get.effect, get.executor), (Effect::Read, Executor::HTTP));
    assert_eq!(http["url"], "https://eu.example.com/v1/pets/{petId}");
    let expected = json!({
        "type": "object",
        "properties": {
            "petId": { "type": "integer" },
            "fields": { "type": "array", "items": { "type": "string" } },
            "X-Trace": { "type": "string" },
        },
        "required": ["petId"],
        "additionalProperties": false,
    });
    assert_eq!(get.input_schema.to_value(), expected, "Accept is not a parameter");
    assert_eq!(http["parameters"][1], json!({ "name": "fields", "in": "query", "explode": false }));
    let auth =
        json!([{ "type": "api_key", "in": "header", "name": "X-Key", "env": "PETS_API_KEY" }]);
    assert_eq!(http["auth"], auth);
}

#[test]
fn a_body_is_merged_into_the_arguments_or_one_argument() {
    let import = pets();
    let (create, http) = tool(&import, "pets.createPet");
    let schema = create.input_schema.to_value();
    assert_eq!(schema["required"], json!(["name"]));
    let pet = "#/$defs/Pet";
    let expected = json!({
        "name": { "type": ["string", "null"] },
        "weight": { "type": "number", "exclusiveMinimum": 0 },
        "parent": { "$ref": pet },
        "tags": { "type": "array", "items": { "description": "anything" } },
    });
    assert_eq!(schema["properties"], expected, "read-only properties are not arguments");
    assert_eq!(schema["$defs"]["Pet"]["properties"]["parent"], json!({ "$ref": pet }));
    assert_eq!(http["body"]["args"], json!(["name", "parent", "tags", "weight"]));
    assert_eq!(
        (&http["timeout_s"], &http["response"]),
        (&json!(2.5), &json!({ "pointer": "/data" }))
    );
    assert_eq!(create.effect, Effect::Irreversible);
    let (replace, http) = tool(&import, "pets.pets.replace");
    assert_eq!(replace.effect, Effect::Idempotent);
    assert_eq!(http["body"]["arg"], "body", "petId is taken by the path");
    assert_eq!(replace.input_schema.to_value()["required"], json!(["petId", "body"]));
    let (patch, http) = tool(&import, "pets.patch_pets");
    assert_eq!(patch.effect, Effect::Idempotent, "x-toolcrib-effect");
    assert_eq!(http["body"]["content_type"], "application/merge-patch+json");
    assert_eq!(http["auth"], Value::Null);
}

#[test]
fn credentials_are_imported_as_environment_variable_names() {
    let import = pets();
    let envs = |name: &str| {
        import.tools.iter().find(|tool| tool.definition.name == name).unwrap().envs.clone()
    };
    assert_eq!(envs("pets.pets.replace"), ["PETS_BASIC_USERNAME", "PETS_BASIC_PASSWORD"]);
    assert_eq!(envs("pets.delete_pets_petId"), ["PET_TOKEN"]);
    let (delete, http) = tool(&import, "pets.delete_pets_petId");
    assert_eq!((delete.effect, &http["auth_optional"]), (Effect::Idempotent, &json!(true)));
    assert_eq!(delete.description, "DELETE /pets/{petId}");
}

#[test]
fn operations_that_cannot_be_imported_are_skipped_with_a_reason() {
    let skipped = pets().skipped;
    let reason = |operation: &str| {
        let found = skipped.iter().find(|skipped| skipped.operation == operation);
        found.unwrap_or_else(|| panic!("{operation}: {skipped:?}")).reason.clone()
    };
    assert!(reason("GET /z").contains("points outside the document"));
    assert!(reason("PUT /z").contains("neither JSON"));
    assert!(reason("TRACE /z").contains("TRACE"));
    assert_eq!(skipped.len(), 3, "{skipped:?}");
}

fn import_error(document: Value) -> String {
    import(&document, "p", &ImportOptions::default(), 1).unwrap_err()
}

#[test]
fn invalid_documents_are_refused() {
    assert!(import_error(json!([])).contains("mapping"));
    assert!(import_error(json!({ "swagger": "2.0" })).contains("Swagger 2"));
    assert!(import_error(json!({ "openapi": "4.0" })).contains("3.0 or 3.1"));
    assert!(import_error(json!({ "openapi": "3.1.0" })).contains("paths"));
    let many: serde_json::Map<_, _> =
        (0..=MAX_OPERATIONS).map(|n| (format!("/p{n}"), json!({ "get": {} }))).collect();
    let many = json!({
        "openapi": "3.1.0", "servers": [{ "url": "https://a.b" }], "paths": many,
    });
    assert!(import_error(many).contains("more than 500"));
}

#[test]
fn circular_references_terminate() {
    let document = json!({
        "openapi": "3.1.0",
        "servers": [{ "url": "https://a.b" }],
        "paths": {
            "/a": { "get": { "parameters": [{ "$ref": "#/components/parameters/A" }] } },
            "/b": { "$ref": "#/paths/~1b" },
            "/c": { "get": { "parameters": [{ "$ref": "#/nowhere" }] } },
            "/d/{id}": { "get": {} },
            "/e": { "servers": [{ "url": "/relative" }], "get": {} },
        },
        "components": { "parameters": { "A": { "$ref": "#/components/parameters/A" } } },
    });
    let import = import(&document, "p", &ImportOptions::default(), 1).unwrap();
    assert!(import.tools.is_empty());
    let reasons: Vec<&str> = import.skipped.iter().map(|s| s.reason.as_str()).collect();
    for (reason, word) in
        reasons.iter().zip(["circular", "circular", "nowhere", "{id}", "whole URL"])
    {
        assert!(reason.contains(word), "{word}: {reason}");
    }
}

#[test]
fn names_are_sanitized() {
    for (id, expected) in [
        ("listPets", "listPets"),
        ("pets/list all", "pets_list_all"),
        ("über.pets", "ber.pets"),
        ("a..b", "a.b"),
        ("_x_", "x"),
    ] {
        assert_eq!(sanitize_name(id), expected);
    }
    assert_eq!(sanitize_name("get_/pets/{petId}/toys"), "get_pets_petId_toys");
}

#[test]
fn a_repeated_operation_id_names_only_the_first_operation() {
    let list_operation = |path: &str| json!({ "get": { "operationId": "list", "summary": path } });
    let document = json!({
        "openapi": "3.1.0", "info": { "title": "x" }, "servers": [{ "url": "https://x.y" }],
        "paths": { "/cats": list_operation("cats"), "/dogs": list_operation("dogs"), "/emus": list_operation("emus") },
    });
    let selected = ImportOptions { prefix: Some("zoo".into()), server: None };
    let import = import(&document, "p", &selected, 1_000).unwrap();
    let operations: Vec<(&str, &str)> = import
        .tools
        .iter()
        .map(|tool| (tool.definition.name.as_str(), tool.operation.as_str()))
        .collect();
    let expected =
        [("zoo.list", "GET /cats"), ("zoo.get_dogs", "GET /dogs"), ("zoo.get_emus", "GET /emus")];
    assert_eq!(operations, expected);
    assert!(import.skipped.is_empty());
}

#[test]
fn parameters_of_the_same_name_become_separate_arguments() {
    let parameter = |name: &str, location: &str| json!({ "name": name, "in": location, "required": location == "path", "schema": {} });
    let document = json!({
        "openapi": "3.1.0", "info": { "title": "t", "version": "1" },
        "servers": [{ "url": "https://api.example.com" }],
        "paths": { "/a/{id}": { "get": { "operationId": "a", "parameters": [
            parameter("query_id", "query"), parameter("id", "path"),
            parameter("id", "query"), parameter("id", "header"),
        ] } } },
    });
    let import = import(&document, "p", &ImportOptions::default(), 1_000).unwrap();
    let (definition, options) = tool(&import, "a");
    let names: Vec<String> = definition.input_schema.to_value()["properties"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    assert_eq!(names, ["header_id", "id", "query_id", "query_id_"]);
    let second = &options["parameters"][2];
    assert_eq!((&second["name"], &second["arg"]), (&json!("id"), &json!("query_id_")));
}

/// Imports a document with one operation, `POST /x`, that has this body.
fn with_body(version: &str, kind: &str, media: Value) -> ImportReport {
    let ro = json!({ "type": "object", "required": ["id", "at", "name"], "properties": {
        "id": { "type": "integer", "readOnly": true },
        "at": { "$ref": "#/components/schemas/Stamp" },
        "name": { "type": "string" },
    }});
    let document = json!({
        "openapi": version, "servers": [{ "url": "https://a.b" }],
        "paths": { "/x": { "post": { "operationId": "x", "requestBody": {
            "required": true, "content": { kind: media } } } } },
        "components": { "schemas": {
            "Ro": ro, "Stamp": { "type": "string", "readOnly": true },
        }},
    });
    import(&document, "p", &ImportOptions::default(), 30_000).unwrap()
}

fn argument_problems(definition: &ToolDefinition, args: Value) -> Vec<String> {
    let entry = toolcrib::registry::CatalogEntry::compile(definition.clone()).unwrap();
    entry.input_schema.problems(&args).iter().map(|problem| format!("{problem:?}")).collect()
}

#[test]
fn read_only_properties_are_not_required_in_a_request() {
    let reference = json!({ "$ref": "#/components/schemas/Ro" });
    let more = json!({ "type": "object", "required": ["id", "z"],
        "properties": { "z": { "type": "string" } } });
    for (schema, body) in [
        (json!({ "type": "array", "items": reference }), json!([{ "name": "n" }])),
        (json!({ "allOf": [reference, more] }), json!({ "name": "n", "z": "q" })),
        (
            json!({ "type": "object", "additionalProperties": reference }),
            json!({ "a": { "name": "n" } }),
        ),
    ] {
        let import = with_body("3.0.3", "application/json", json!({ "schema": schema }));
        let (definition, http) = tool(&import, "x");
        assert_eq!(http["body"]["arg"], "body");
        let problems = argument_problems(&definition, json!({ "body": body }));
        assert!(problems.is_empty(), "{schema}: {problems:?}");
        let mut without = body.clone();
        let lacks = match &mut without {
            Value::Array(items) => &mut items[0],
            Value::Object(fields) if fields.contains_key("a") => &mut fields["a"],
            other => other,
        };
        lacks.as_object_mut().unwrap().remove("name");
        assert!(!argument_problems(&definition, json!({ "body": without })).is_empty(), "{schema}");
    }
    // A schema that is composed of itself many times over terminates.
    let round = json!({ "$ref": "#/paths/~1x/post/requestBody/content/application~1json/schema" });
    let round = json!({ "allOf": vec![round; 20], "required": ["id"] });
    let import = with_body("3.0.3", "application/json", json!({ "schema": round }));
    assert_eq!(import.tools.len() + import.skipped.len(), 1);
    let import = with_body("3.0.3", "application/json", json!({ "schema": reference }));
    let (definition, http) = tool(&import, "x");
    assert_eq!(http["body"]["args"], json!(["name"]), "also when the property is a reference");
    assert!(argument_problems(&definition, json!({ "name": "n" })).is_empty());
}

#[test]
fn siblings_of_a_reference_apply_since_openapi_3_1() {
    let property = json!({ "$ref": "#/components/schemas/Ro", "description": "Which one",
        "required": ["z"] });
    let schema = json!({ "type": "object", "properties": { "one": property } });
    let import_property = |version: &str| {
        let import = with_body(version, "application/json", json!({ "schema": schema }));
        tool(&import, "x").0.input_schema.to_value()["properties"]["one"].clone()
    };
    let expected = json!({ "$ref": "#/$defs/Ro", "description": "Which one", "required": ["z"] });
    assert_eq!(import_property("3.1.0"), expected);
    assert_eq!(import_property("3.0.3"), json!({ "$ref": "#/$defs/Ro" }));
    // A body with constraints besides its reference stays one argument, with all constraints.
    let narrow = json!({ "$ref": "#/components/schemas/Ro", "required": ["z"] });
    let import = with_body("3.1.0", "application/json", json!({ "schema": narrow }));
    let (definition, http) = tool(&import, "x");
    assert_eq!(http["body"]["arg"], "body");
    assert!(!argument_problems(&definition, json!({ "body": { "name": "n" } })).is_empty());
    assert!(argument_problems(&definition, json!({ "body": { "name": "n", "z": 1 } })).is_empty());
    let described = json!({ "$ref": "#/components/schemas/Ro", "description": "It" });
    let import = with_body("3.1.0", "application/json", json!({ "schema": described }));
    assert_eq!(tool(&import, "x").1["body"]["args"], json!(["name"]));
}

#[test]
fn form_fields_are_encoded_as_the_document_states() {
    let kind = "application/x-www-form-urlencoded";
    let schema = json!({ "type": "object", "properties": {
        "amount": { "type": "integer" }, "metadata": { "type": "object" },
        "csv": { "type": "array", "items": { "type": "string" } },
        "many": { "type": "array", "items": { "type": "string" } },
        "raw": { "type": "object" },
    }});
    let encoding = json!({
        "metadata": { "style": "deepObject", "explode": true },
        "csv": { "explode": false },
        "raw": { "contentType": "application/json" },
    });
    let args = json!({ "amount": 1, "metadata": { "order": "7" }, "csv": ["a", "b"],
        "many": ["a", "b"], "raw": { "x": [1] } });
    let sent = |import: &ImportReport, args: &Value| {
        let options = tool(import, "x").0.binding.unwrap().options.to_value();
        let crate::http_operation::HttpToolSpec::Http(operation) =
            crate::http_operation::HttpToolSpec::from_options(&options).unwrap()
        else {
            panic!("{options}")
        };
        let request =
            operation.build_request(args.as_object().unwrap(), Default::default(), &|_| None);
        let (_, bytes) = request.unwrap().body.unwrap();
        let pairs: Vec<(String, String)> = reqwest::Url::parse("http://x/?")
            .map(|mut url| {
                url.set_query(Some(std::str::from_utf8(&bytes).unwrap()));
                url.query_pairs().into_owned().collect()
            })
            .unwrap();
        pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
    };
    let expected = r#"amount=1&csv=a,b&many=a&many=b&metadata[order]=7&raw={"x":[1]}"#;
    let media = json!({ "schema": schema, "encoding": encoding });
    assert_eq!(sent(&with_body("3.0.3", kind, media), &args), expected);
    // Also if the entire form is one argument.
    let open = json!({ "type": "object", "additionalProperties": true });
    let media = json!({ "schema": open, "encoding": encoding });
    assert_eq!(sent(&with_body("3.0.3", kind, media), &json!({ "body": args })), expected);
    let strange = json!({ "schema": schema, "encoding": { "csv": { "style": "matrix" } } });
    let reason = with_body("3.0.3", kind, strange).skipped[0].reason.clone();
    assert!(reason.contains("csv") && reason.contains("matrix"), "{reason}");
}

#[test]
fn the_timeout_is_at_least_the_documents_response_timeout() {
    for (seconds, expected) in [(2.5, 30_000), (75.0, 75_000)] {
        let document = json!({
            "openapi": "3.1.0", "servers": [{ "url": "https://a.b" }],
            "paths": { "/x": { "get": { "operationId": "x", "x-toolcrib-timeout-s": seconds } } },
        });
        let import = import(&document, "p", &ImportOptions::default(), 30_000).unwrap();
        assert_eq!(tool(&import, "x").0.timeout_ms, expected);
    }
}
