//! A nats-server for each test, and a NATS client that acts as a tool service or an agent.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::{self, Message};
use async_nats::{Client, HeaderMap, Request};
use futures::StreamExt;
use serde_json::{Value, json};
use tempfile::TempDir;
use toolcrib_protocol::utp::NatsConnection;
use toolcrib_protocol::utp::nats_connection::NatsEndpoint;
use toolcrib_sources::utp::host::ToolHost;

use super::process::free_port;
use super::{Server, soon, until};

/// A broker with its own directory. Dropping the value stops it.
pub struct Nats {
    dir: TempDir,
    port: u16,
    child: Option<Child>,
    max_payload: usize,
}

impl Nats {
    /// Starts a broker. Returns `None` if only quick tests run.
    pub async fn start() -> Option<Self> {
        Self::start_with(16 << 20).await
    }

    /// Starts a broker with this limit of message sizes.
    pub async fn start_with(max_payload: usize) -> Option<Self> {
        if std::env::var_os("TOOLCRIB_TEST_QUICK").is_some() {
            return None;
        }
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let mut nats = Self { dir, port, child: None, max_payload };
        nats.up().await;
        Some(nats)
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Sets the limit of message sizes for the next start.
    pub fn max_payload(&mut self, bytes: usize) {
        self.max_payload = bytes;
    }

    /// Starts the broker on the same directory.
    pub async fn up(&mut self) {
        let store = self.dir.path().join("jetstream");
        let file = self.dir.path().join("nats.conf");
        let text = format!(
            "listen: \"127.0.0.1:{}\"\nmax_payload: {}\njetstream {{ store_dir: {:?} }}\n",
            self.port, self.max_payload, store
        );
        std::fs::write(&file, text).unwrap();
        let log = std::fs::File::create(self.dir.path().join("nats.log")).unwrap();
        let child = Command::new("nats-server")
            .arg("-c")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("nats-server is missing: ./scripts/test installs it");
        self.child = Some(child);
        let address = format!("127.0.0.1:{}", self.port);
        until("nats-server", || async {
            tokio::net::TcpStream::connect(&address).await.ok().map(drop)
        })
        .await;
    }

    /// Kills the broker; its stored data stays.
    pub fn down(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a Toolcrib server that uses this broker.
    pub async fn server(&self) -> Server {
        let url = self.url();
        Server::with(|config| config.nats.url = Some(url)).await
    }

    pub async fn connect(&self, version: &str) -> NatsConnection {
        let (url, version) = (self.url(), version.to_owned());
        NatsConnection::connect(&NatsEndpoint { url, credentials: None, version }, "test")
            .await
            .unwrap()
    }

    /// Starts a tool host for a target; it ends with the guard.
    pub async fn host(&self, target: &str, make: impl FnOnce(ToolHost) -> ToolHost) -> HostGuard {
        self.host_version("v1r3", target, make).await
    }

    /// Starts a tool host of this protocol version.
    pub async fn host_version(
        &self,
        version: &str,
        target: &str,
        make: impl FnOnce(ToolHost) -> ToolHost,
    ) -> HostGuard {
        let host = make(ToolHost::with_connection(self.connect(version).await));
        let target = target.to_owned();
        let serving = tokio::spawn(async move {
            host.serve(&target, std::future::pending()).await.unwrap();
        });
        HostGuard(serving)
    }

    pub async fn peer(&self) -> NatsPeer {
        let client = async_nats::connect(self.url()).await.unwrap();
        NatsPeer { client }
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.down();
    }
}

pub struct HostGuard(tokio::task::JoinHandle<()>);

impl Drop for HostGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A NATS client that sends and receives single messages of the protocol.
#[derive(Clone)]
pub struct NatsPeer {
    pub client: Client,
}

/// A received message with its parsed payload.
pub struct ReceivedMessage {
    pub message: Message,
    pub payload: Value,
}

impl ReceivedMessage {
    pub fn header(&self, name: &str) -> String {
        let headers = self.message.headers.as_ref().unwrap();
        headers.get(name).map(|value| value.to_string()).unwrap_or_default()
    }

    pub async fn ack(&self) {
        self.message.ack().await.unwrap();
    }
}

impl NatsPeer {
    /// Waits for the next command of a target.
    pub async fn next(&self, target: &str) -> ReceivedMessage {
        self.next_on(&format!("cg.v1r3.*.*.cmd.tool.{target}.>"), &format!("hand_{target}")).await
    }

    /// Waits for the next message on a subject of the command stream.
    pub async fn next_on(&self, subject: &str, name: &str) -> ReceivedMessage {
        self.next_in("cg_cmd_v1r3", subject, name).await
    }

    /// Waits for the next message on a subject of this stream.
    pub async fn next_in(&self, stream: &str, subject: &str, name: &str) -> ReceivedMessage {
        let jetstream = jetstream::new(self.client.clone());
        let consumer = until("the stream of commands", || async {
            let stream = jetstream.get_stream(stream).await.ok()?;
            let config = pull::Config {
                durable_name: Some(name.to_owned()),
                filter_subject: subject.to_owned(),
                ..pull::Config::default()
            };
            stream.get_or_create_consumer(name, config).await.ok()
        })
        .await;
        let fetching = async {
            loop {
                let fetch = consumer.fetch().max_messages(1).expires(Duration::from_secs(5));
                // Retries if there is no message yet or the broker is down.
                match fetch.messages().await {
                    Ok(mut batch) => match batch.next().await {
                        Some(Ok(message)) => return message,
                        _ => tokio::time::sleep(Duration::from_millis(10)).await,
                    },
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        let message = soon(&format!("a message on {subject}"), fetching).await;
        let payload = serde_json::from_slice(&message.payload).unwrap();
        ReceivedMessage { message, payload }
    }

    /// Sends an RPC to the server, in project `default`.
    pub async fn request(&self, operation: &str, body: Value) -> Value {
        self.request_in("default", operation, body, &[]).await
    }

    pub async fn request_in(
        &self,
        project: &str,
        operation: &str,
        body: Value,
        headers: &[(&str, &str)],
    ) -> Value {
        self.request_raw(project, operation, body.to_string().into_bytes(), headers).await
    }

    pub async fn request_raw(
        &self,
        project: &str,
        operation: &str,
        body: Vec<u8>,
        headers: &[(&str, &str)],
    ) -> Value {
        let subject = format!("cg.v1r3.{project}.public.rpc.{operation}");
        let mut map = HeaderMap::new();
        headers.iter().for_each(|(name, value)| map.insert(*name, *value));
        let reply = until(&format!("an answer to {operation}"), || async {
            let request = Request::new().payload(body.clone().into()).headers(map.clone());
            // The NATS transport may not have started yet.
            self.client.send_request(subject.clone(), request).await.ok()
        })
        .await;
        serde_json::from_slice(&reply.payload).unwrap()
    }

    /// Publishes a command with any body.
    pub async fn command(&self, subject: &str, body: Vec<u8>) {
        let jetstream = jetstream::new(self.client.clone());
        // Retries until the stream exists and has stored the message.
        until(&format!("a stream for {subject}"), || async {
            let sent = jetstream.publish(subject.to_owned(), body.clone().into()).await.ok()?;
            sent.await.ok()
        })
        .await;
    }
}

/// Returns a result card for a command.
pub fn result_card(command: &Value, card_id: &str, status: &str, result: Value) -> Value {
    let error = match status {
        "success" => Value::Null,
        _ => json!({ "code": "upstream_unavailable", "message": "it did not work" }),
    };
    json!({
        "card_id": card_id,
        "type": "tool.result",
        "author_id": "tool.hand",
        "content": {
            "__type__": "ToolResultContent",
            "status": status,
            "after_execution": command["after_execution"],
            "result": result,
            "error": error,
        },
        "metadata": {
            "agent_turn_id": command["agent_turn_id"],
            "tool_call_id": command["tool_call_id"],
        },
    })
}

/// Returns the report of a result card.
pub fn report(command: &Value, card_id: &str, status: &str) -> Value {
    json!({
        "tool_call_id": command["tool_call_id"],
        "agent_turn_id": command["agent_turn_id"],
        "turn_epoch": command["turn_epoch"],
        "agent_id": command["agent_id"],
        "after_execution": command["after_execution"],
        "status": status,
        "tool_result_card_id": card_id,
        "step_id": command["step_id"],
    })
}

/// Returns the definition of a UTP tool that takes any arguments.
pub fn tool(name: &str, target: &str, more: Value) -> Value {
    let mut tool = json!({
        "tool_name": name,
        "target_subject": format!("cg.v1r3.{{project_id}}.{{channel_id}}.cmd.tool.{target}.run"),
        "after_execution": "suspend",
        "timeout_ms": 30_000,
    });
    for (key, value) in more.as_object().unwrap() {
        tool[key] = value.clone();
    }
    tool
}
