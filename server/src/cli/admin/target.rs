//! The target of an administrative command: a data directory or a server. Both respond in the form
//! of HTTP v1. Only the response to a new key differs: a data directory adds `first` and `allow`.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::registry::CreatedKey;
use toolcrib::{Caller, Engine};
use toolcrib_transport::auth::generate_secret;
use toolcrib_transport::http::{KeyBody, NewKeyBody};

use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::{CommandContext, StorageArgs};
use crate::config::Config;

pub enum AdminTarget {
    Local { engine: Engine, caller: Caller, config: Box<Config> },
    Remote { client: ApiClient },
}

impl AdminTarget {
    /// Opens the target for a change. Creates the data directory if it does not exist.
    pub async fn open_or_create(
        context: &CommandContext,
        storage: &StorageArgs,
    ) -> Result<Self, CommandFailure> {
        Self::open(context, storage, true).await
    }

    /// Opens a target that must exist: a mistyped directory must not become a new store.
    pub async fn open_existing(
        context: &CommandContext,
        storage: &StorageArgs,
    ) -> Result<Self, CommandFailure> {
        Self::open(context, storage, false).await
    }

    async fn open(
        context: &CommandContext,
        storage: &StorageArgs,
        make: bool,
    ) -> Result<Self, CommandFailure> {
        let has_server = context.global.server.is_some();
        context.check_one_target(storage)?;
        if has_server && !storage.is_set() {
            return Ok(Self::Remote { client: context.client()? });
        }
        let config = context.config(None, storage)?;
        let location = config.store_location()?;
        if !make && !location.may_exist() {
            let message = format!("there is nothing at {} yet", location.redacted());
            let hint = "name the directory with --data-dir DIR or --config FILE, a server with \
                        --server URL, or start the server once";
            return Err(CommandFailure::new(exit::FAILURE, "NOT_FOUND", message).hint(hint));
        }
        let engine = crate::bootstrap::open_admin_engine(&config).await?;
        let caller = Caller::local(context.project());
        Ok(Self::Local { engine, caller, config: Box::new(config) })
    }

    /// Creates a key from the body of `POST /v1/keys`.
    pub async fn create_key(&self, body: Value) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => {
                client.request_json(ApiRequest::post(&["v1", "keys"], body)).await
            }
            Self::Local { engine, caller, config } => {
                let first = !engine.registry().credentials().has_keys();
                let body: NewKeyBody = serde_json::from_value(body)
                    .map_err(|error| CommandFailure::usage(error.to_string()))?;
                let new = body.into_new_key(&caller.project, &config.auth.default_allow)?;
                let allow = new.allow.clone();
                let created = engine.admin().create_key(caller, new, generate_secret()).await?;
                let mut body = created_key_body(&created)?;
                body["allow"] = allow.into();
                body["first"] = first.into();
                Ok(body)
            }
        }
    }

    pub async fn rotate_key(&self, id: &str, overlap_s: u64) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => {
                let body = json!({ "overlap_s": overlap_s });
                client.request_json(ApiRequest::post(&["v1", "keys", id, "rotate"], body)).await
            }
            Self::Local { engine, caller, .. } => {
                let (overlap_ms, secret) = (overlap_s.saturating_mul(1_000), generate_secret());
                let rotated = engine.admin().rotate_key(caller, id, overlap_ms, secret).await?;
                created_key_body(&rotated)
            }
        }
    }

    pub async fn keys(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => client.request_json(ApiRequest::get(&["v1", "keys"])).await,
            Self::Local { engine, caller, .. } => {
                let now_ms = engine.registry().credentials().now_ms();
                let keys = engine.admin().keys(caller)?;
                let keys: Vec<KeyBody> = keys.iter().map(|key| KeyBody::new(key, now_ms)).collect();
                Ok(json!({ "keys": keys }))
            }
        }
    }

    pub async fn revoke_key(&self, id: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client } => client
                .request_json(ApiRequest::new(Method::DELETE, &["v1", "keys", id]))
                .await
                .map(|_| ()),
            Self::Local { engine, caller, .. } => Ok(engine.admin().revoke_key(caller, id).await?),
        }
    }
}

fn created_key_body(created: &CreatedKey) -> Result<Value, CommandFailure> {
    let body = KeyBody::new(&created.key, created.key.created_ms);
    let mut body = serde_json::to_value(body).map_err(anyhow::Error::from)?;
    body["key"] = created.secret.clone().into();
    Ok(body)
}
