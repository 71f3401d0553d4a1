//! What an upstream says without having been asked: how far a call is, what has changed, and what
//! it wants to know before it goes on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::model::{
    ClientCapabilities, ClientConfig, ElicitRequest, ElicitRequestParams, ElicitResult,
    ElicitationAction, ElicitationCapability, FormElicitationCapability, Implementation,
    InputRequest, ProgressNotificationParam, ProgressToken, ProtocolVersion, RequestId,
    ResourceUpdatedNotificationParam, UrlElicitationCapability,
};
use rmcp::service::{InboundStreamOrigin, NotificationContext, RequestContext};
use rmcp::{ClientHandler, ErrorData, RoleClient};
use serde_json::Value;
use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use toolcrib::Progress;
use toolcrib::source::ProgressSink;

/// How long a question may come before we know ourselves that its call is under way.
const EARLY: Duration = Duration::from_secs(5);

/// What has changed at an upstream, beside its tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    Resources,
    Prompts,
    Resource(String),
}

/// A question of an upstream that waits for its answer.
pub struct Question {
    pub asked: Value,
    pub answer: oneshot::Sender<Value>,
}

/// What a call hears.
pub enum Heard {
    Question(Question),
    /// A question came that may be its own, and may be that of another call.
    Unclear,
}

/// One call that is under way.
struct UnderWay {
    progress: ProgressSink,
    heard: mpsc::UnboundedSender<Heard>,
    /// Whether it waits for an answer, and so cannot have asked anything else.
    asked: bool,
}

/// What keeps calls and questions apart.
#[derive(Default)]
struct Turns {
    /// Calls that are being sent.
    sending: usize,
    /// Questions whose call is not known yet.
    unclear: usize,
}

/// Listens to one connection.
pub struct Ears {
    calls: Mutex<HashMap<RequestId, UnderWay>>,
    tokens: Mutex<HashMap<ProgressToken, RequestId>>,
    turns: Mutex<Turns>,
    /// Something about which calls are under way is another.
    turned: Notify,
    /// The list of tools is another.
    pub tools_changed: Notify,
    pub news: broadcast::Sender<News>,
}

impl Ears {
    pub fn new(news: broadcast::Sender<News>) -> Arc<Self> {
        Arc::new(Self {
            calls: Mutex::default(),
            tokens: Mutex::default(),
            turns: Mutex::default(),
            turned: Notify::new(),
            tools_changed: Notify::new(),
            news,
        })
    }

    /// A call is under way; until what is given back is dropped.
    pub fn follow(
        self: &Arc<Self>,
        id: RequestId,
        token: ProgressToken,
        progress: ProgressSink,
    ) -> (Followed, mpsc::UnboundedReceiver<Heard>) {
        let (heard, hears) = mpsc::unbounded_channel();
        self.calls.lock().insert(id.clone(), UnderWay { progress, heard, asked: false });
        self.tokens.lock().insert(token.clone(), id.clone());
        self.turned.notify_waiters();
        (Followed { ears: self.clone(), id, token }, hears)
    }

    /// A call is about to be sent: until what is given back is dropped, nobody believes to know
    /// every call that is under way. While it is to be found out whose a question is, no call is
    /// sent: it would be one more that could have asked.
    pub async fn send(self: &Arc<Self>) -> Sending {
        loop {
            let turned = self.turned.notified();
            {
                let mut turns = self.turns.lock();
                if turns.unclear == 0 {
                    turns.sending += 1;
                    return Sending(self.clone());
                }
            }
            turned.await;
        }
    }

    /// Which call a question belongs to. None: that is not known yet.
    ///
    /// It is the one on whose stream it came. Where there are no streams, the protocol does not
    /// say: then it is the only one that can have asked. One that waits for an answer cannot; the
    /// others are waited for until one is left. Where as many have asked as there are, nobody can
    /// tell, and nobody is asked: it might be somebody else's question.
    fn asker(&self, origin: Option<&InboundStreamOrigin>) -> Option<Asker> {
        let mut calls = self.calls.lock();
        if let Some(InboundStreamOrigin::OutboundRequest(id)) = origin {
            let call = calls.get_mut(id)?;
            call.asked = true;
            return Some(Asker::Known(id.clone(), call.heard.clone()));
        }
        let unclear = {
            let turns = self.turns.lock();
            if turns.sending > 0 {
                return None;
            }
            turns.unclear
        };
        let all = calls.len();
        let able = calls.iter_mut().filter(|(_, call)| all == 1 || !call.asked);
        let mut able: Vec<_> = able.collect();
        match able.as_mut_slice() {
            [] if all == 0 => None,
            [(id, call)] => {
                call.asked = true;
                Some(Asker::Known((*id).clone(), call.heard.clone()))
            }
            several if unclear < several.len() => None,
            several => {
                for (_, call) in several {
                    let _ = call.heard.send(Heard::Unclear);
                }
                Some(Asker::Unknown)
            }
        }
    }

    async fn ask(&self, asked: Value, origin: Option<InboundStreamOrigin>) -> Option<Value> {
        let known = matches!(origin, Some(InboundStreamOrigin::OutboundRequest(_)));
        let unclear = (!known).then(|| Unclear::new(self));
        let finding = async {
            loop {
                let turned = self.turned.notified();
                if let Some(asker) = self.asker(origin.as_ref()) {
                    return asker;
                }
                // It may have come before we know ourselves that its call is under way.
                if known || self.calls.lock().is_empty() {
                    if tokio::time::timeout(EARLY, turned).await.is_err() {
                        return Asker::Unknown;
                    }
                } else {
                    turned.await;
                }
            }
        };
        let asker = finding.await;
        drop(unclear);
        let Asker::Known(id, heard) = asker else { return None };
        let (answer, answered) = oneshot::channel();
        heard.send(Heard::Question(Question { asked, answer })).ok()?;
        let answer = answered.await.ok();
        if let Some(call) = self.calls.lock().get_mut(&id) {
            call.asked = false;
        }
        self.turned.notify_waiters();
        answer
    }
}

/// Whose a question is.
enum Asker {
    Known(RequestId, mpsc::UnboundedSender<Heard>),
    Unknown,
}

/// A question whose call is not known yet.
struct Unclear<'a>(&'a Ears);

impl<'a> Unclear<'a> {
    fn new(ears: &'a Ears) -> Self {
        ears.turns.lock().unclear += 1;
        // Those that wait for the others hear that there is one more.
        ears.turned.notify_waiters();
        Self(ears)
    }
}

impl Drop for Unclear<'_> {
    fn drop(&mut self) {
        self.0.turns.lock().unclear -= 1;
        self.0.turned.notify_waiters();
    }
}

/// A call that is being sent.
pub struct Sending(Arc<Ears>);

impl Drop for Sending {
    fn drop(&mut self) {
        self.0.turns.lock().sending -= 1;
        self.0.turned.notify_waiters();
    }
}

/// A call that is listened for.
pub struct Followed {
    ears: Arc<Ears>,
    id: RequestId,
    token: ProgressToken,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.ears.calls.lock().remove(&self.id);
        self.ears.tokens.lock().remove(&self.token);
        self.ears.turned.notify_waiters();
    }
}

/// How far a call is, in our words.
pub(super) fn progressed(said: ProgressNotificationParam) -> Progress {
    let total = said.total.filter(|total| *total > 0.0);
    let percent = total.map(|total| (said.progress / total * 100.0).clamp(0.0, 100.0));
    let mut data = serde_json::Map::new();
    data.insert("progress".to_owned(), said.progress.into());
    if let Some(total) = said.total {
        data.insert("total".to_owned(), total.into());
    }
    Progress { percent, message: said.message, data: Some(Value::Object(data)) }
}

/// Who we say that we are: a client that can be asked, and that knows tasks.
pub fn introduction() -> ClientConfig {
    let elicitation = ElicitationCapability::new()
        .with_form(FormElicitationCapability::default())
        .with_url(UrlElicitationCapability::default());
    let mut capabilities = ClientCapabilities::builder().enable_tasks().build();
    capabilities.elicitation = Some(elicitation);
    let version = env!("CARGO_PKG_VERSION");
    let mut config = ClientConfig::new(capabilities, Implementation::new("toolcrib", version));
    config.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
    config
}

impl ClientHandler for Ears {
    fn get_info(&self) -> ClientConfig {
        introduction()
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        let origin = context.extensions.get::<InboundStreamOrigin>().cloned();
        let question = InputRequest::Elicitation(ElicitRequest::new(request));
        let asked = serde_json::to_value(question)
            .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
        let answer = tokio::select! {
            answer = self.ask(asked, origin) => answer,
            () = context.ct.cancelled() => None,
        };
        let answer = answer.and_then(|answer| serde_json::from_value(answer).ok());
        Ok(answer.unwrap_or_else(|| ElicitResult::new(ElicitationAction::Cancel)))
    }

    async fn on_progress(
        &self,
        params: ProgressNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let sink = {
            let id = self.tokens.lock().get(&params.progress_token).cloned();
            id.and_then(|id| self.calls.lock().get(&id).map(|call| call.progress.clone()))
        };
        let Some(sink) = sink else { return };
        sink(progressed(params));
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        self.tools_changed.notify_one();
    }

    async fn on_resource_list_changed(&self, _context: NotificationContext<RoleClient>) {
        // Nobody may be listening.
        let _ = self.news.send(News::Resources);
    }

    async fn on_prompt_list_changed(&self, _context: NotificationContext<RoleClient>) {
        let _ = self.news.send(News::Prompts);
    }

    async fn on_resource_updated(
        &self,
        params: ResourceUpdatedNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let _ = self.news.send(News::Resource(params.uri));
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, poll};
    use rmcp::model::NumberOrString;
    use serde_json::json;

    use super::*;

    fn followed(ears: &Arc<Ears>, n: i64) -> (Followed, mpsc::UnboundedReceiver<Heard>) {
        let id = NumberOrString::Number(n);
        ears.follow(id.clone(), ProgressToken(id), Arc::new(|_| {}))
    }

    #[tokio::test]
    async fn nothing_is_sent_until_it_is_known_whose_a_question_is() {
        let ears = Ears::new(broadcast::channel(1).0);
        let (rests, _) = followed(&ears, 1);
        let (_asks, mut hears) = followed(&ears, 2);
        let mut asking = Box::pin(ears.ask(json!("who?"), None));
        assert!(poll!(&mut asking).is_pending());
        let mut sending = Box::pin(ears.send());
        assert!(poll!(&mut sending).is_pending(), "it would be one more that could have asked");
        assert!(hears.try_recv().is_err(), "either of two may have asked");
        // One has its result, so it was the other.
        drop(rests);
        assert!(poll!(&mut asking).is_pending());
        let Ok(Heard::Question(question)) = hears.try_recv() else { panic!("it is its question") };
        assert!(sending.now_or_never().is_some(), "and calls are sent again");
        question.answer.send(json!("Ada")).unwrap();
        assert_eq!(asking.await, Some(json!("Ada")));
    }
}
