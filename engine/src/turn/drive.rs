//! Driving the loop: turn after turn over one conversation.

use serde_json::Value;

use super::act::Plan;
use super::ask::Request;
use super::before::Before;
use super::offer::Offer;
use super::{FinalAnswer, Happening, Next, RESULT_TOKENS, Talk, Terms, Watch, rules, unwatched};
use crate::bus::Topic;
use crate::caller::Caller;
use crate::engine::{Engine, measure};
use crate::fault::{Code, Error};
use crate::model::{Model, Prompt, Wanted};

/// How long the last request has after the time is over.
const GRACE_MS: u64 = 60_000;

/// How often who sleeps looks without having been woken.
const LOOK_AGAIN_MS: u64 = 2_000;

/// One conversation with a model. [`Engine::run`] is the whole of it; who keeps a conversation
/// between its parts calls [`Loop::ask`] and [`Loop::act`] in turns.
pub struct Loop<'a> {
    engine: &'a Engine,
    caller: &'a Caller,
    model: &'a dyn Model,
    terms: &'a Terms,
    watch: Watch<'a>,
    offer: Offer,
    /// The answer that is acted on next was there before.
    again: bool,
    /// Saying nothing is an answer, whatever is waited for.
    pub(crate) may_be_silent: bool,
}

impl Engine {
    /// One turn: the model is asked, and every call of its answer is executed. The calls' results
    /// are then in the conversation, unless what it called are the asker's own tools.
    ///
    /// A model that gives no answer, after its retries, is an error with the code
    /// `UPSTREAM_UNAVAILABLE`; the conversation is as it was, and the turn can be repeated.
    pub async fn run_turn(
        &self,
        caller: &Caller,
        model: &dyn Model,
        terms: &Terms,
        talk: &mut Talk,
    ) -> Result<Next, Error> {
        Loop::new(self, caller, model, terms, &unwatched)?.turn(talk).await
    }

    /// Turns until the model has answered, also at a limit, or calls a tool of the asker's own.
    /// Sleeps while there is nothing to do but to wait for late results. Answers with
    /// [`Next::Answered`] or [`Next::HandedBack`].
    ///
    /// ```
    /// use async_trait::async_trait;
    /// use toolcrib::model::{Listener, Model, Prompt, Reply, Silence, Wanted};
    /// use toolcrib::turn::{Next, Talk, Terms};
    /// use toolcrib::{Caller, Engine, FnTool};
    ///
    /// /// Calls a tool, and then says what came of it. A real one asks an endpoint.
    /// struct Adder;
    ///
    /// #[async_trait]
    /// impl Model for Adder {
    ///     async fn reply(&self, prompt: &Prompt, _: Listener<'_>) -> Result<Reply, Silence> {
    ///         let last = &prompt.messages[prompt.messages.len() - 1];
    ///         if last["role"] == "tool" {
    ///             let text = format!("It is {}.", last["content"].as_str().unwrap_or("?"));
    ///             return Ok(Reply { text, ..Reply::default() });
    ///         }
    ///         let (id, name) = ("call_0".to_owned(), "calc__add".to_owned());
    ///         let call = Wanted { id, name, arguments: r#"{"a":20,"b":22}"#.to_owned() };
    ///         Ok(Reply { calls: vec![call], ..Reply::default() })
    ///     }
    /// }
    ///
    /// #[derive(serde::Deserialize, schemars::JsonSchema)]
    /// struct Add { a: i64, b: i64 }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let add = FnTool::new("calc.add", "Adds two integers", |args: Add| async move {
    ///     Ok::<i64, String>(args.a + args.b)
    /// });
    /// let engine = Engine::builder().tool(add).start().await?;
    /// let mut talk = Talk::question("What is 20 + 22?");
    /// let terms = Terms::new("adder", "run_1");
    /// let next = engine.run(&Caller::local("default"), &Adder, &terms, &mut talk).await?;
    /// let Next::Answered(answer) = next else { panic!("{next:?}") };
    /// assert_eq!(answer.text, "It is 42.");
    /// # Ok(()) }
    /// ```
    pub async fn run(
        &self,
        caller: &Caller,
        model: &dyn Model,
        terms: &Terms,
        talk: &mut Talk,
    ) -> Result<Next, Error> {
        Loop::new(self, caller, model, terms, &unwatched)?.all(talk).await
    }
}

impl<'a> Loop<'a> {
    /// A loop of which `watch` is told what happens. Refused where the terms make no sense.
    pub fn new(
        engine: &'a Engine,
        caller: &'a Caller,
        model: &'a dyn Model,
        terms: &'a Terms,
        watch: Watch<'a>,
    ) -> Result<Self, Error> {
        require(caller)?;
        let offer = Offer::checked(engine, caller, terms)?;
        Ok(Self { engine, caller, model, terms, watch, offer, again: false, may_be_silent: false })
    }

    /// The same where the terms were checked before: tools that are gone are left out.
    pub(crate) fn lenient(
        engine: &'a Engine,
        caller: &'a Caller,
        model: &'a dyn Model,
        terms: &'a Terms,
        watch: Watch<'a>,
    ) -> Result<Self, Error> {
        require(caller)?;
        let offer = Offer::of(engine, caller, terms);
        Ok(Self { engine, caller, model, terms, watch, offer, again: false, may_be_silent: false })
    }

    /// Turns until there is an answer, or calls for the asker.
    pub async fn all(&mut self, talk: &mut Talk) -> Result<Next, Error> {
        loop {
            match self.turn(talk).await? {
                Next::GoesOn => {}
                Next::Sleeps => self.sleep(talk).await?,
                next => return Ok(next),
            }
        }
    }

    /// One turn.
    pub async fn turn(&mut self, talk: &mut Talk) -> Result<Next, Error> {
        self.ask(talk).await?;
        self.act(talk).await
    }

    /// Asks the model, unless it has answered and nobody acted on that yet. Late results that have
    /// come go with the question. The answer is then in [`super::Progress::reply`].
    pub async fn ask(&mut self, talk: &mut Talk) -> Result<(), Error> {
        if talk.progress.reply.is_some() {
            self.again = true;
            return Ok(());
        }
        self.renew_offer();
        self.take_late(talk).await?;
        let limits = &self.terms.limits;
        if talk.progress.closing.is_none()
            && let Some(closing) = rules::due(limits, &talk.progress)
        {
            talk.progress.closing = Some(closing);
            talk.messages.push(rules::closing_message(closing, limits));
        }
        let (step, last) = (talk.progress.steps + 1, talk.progress.closing.is_some());
        let prompt = self.prompt(talk, last);
        let clock = self.engine.inner.clock.as_ref();
        let began_ms = clock.now_ms();
        let grace_ms = if last { GRACE_MS } else { 0 };
        let left_ms = rules::left_ms(limits, &talk.progress);
        (self.watch)(Happening::Asking { step, last });
        let request = Request {
            model: self.model,
            prompt: &prompt,
            asking: &self.terms.asking,
            clock,
            step,
            until_ms: began_ms.saturating_add(left_ms.max(grace_ms)),
            may_be_empty: last || self.may_be_silent || !talk.progress.awaited.is_empty(),
            watch: self.watch,
        };
        let answer = request.answer().await;
        let progress = &mut talk.progress;
        progress.spent_ms += clock.now_ms().saturating_sub(began_ms);
        let reply = match answer {
            Ok(reply) => reply,
            // The time is over in the middle of a request: that is a limit, and no failure.
            Err(none) if none.out_of_time && !last => {
                progress.closing = Some(super::Closing::Time);
                talk.messages.push(rules::closing_message(super::Closing::Time, limits));
                return Box::pin(self.ask(talk)).await;
            }
            Err(none) => return Err(Error::from(none.silence.fault)),
        };
        let guess_of: usize = if reply.usage == Default::default() { size(&prompt) } else { 0 };
        progress.steps = step;
        let usage = rules::usage_or_guess(&reply, guess_of);
        measure::answered(self.model.counted_as(), &usage);
        progress.usage += usage;
        let reply = rules::with_usable_ids(reply, step, &progress.awaited);
        (self.watch)(Happening::Replied { step, reply: &reply });
        progress.reply = Some(reply);
        Ok(())
    }

    /// Executes what the answer calls. A step that is done again with the same key makes no call
    /// a second time.
    pub async fn act(&mut self, talk: &mut Talk) -> Result<Next, Error> {
        let Some(reply) = talk.progress.reply.clone() else { return Ok(Next::GoesOn) };
        if let Some(closing) = talk.progress.closing {
            return Ok(Next::Answered(self.close(talk, reply, closing)));
        }
        if reply.calls.is_empty() {
            talk.progress.reply = None;
            if !reply.text.is_empty() {
                talk.messages.push(rules::assistant_message(&reply, false));
            }
            if !talk.progress.awaited.is_empty() {
                return Ok(Next::Sleeps);
            }
            let (text, stopped, closing) = (reply.text, reply.stopped, None);
            return Ok(Next::Answered(FinalAnswer { text, stopped, closing }));
        }
        self.renew_offer();
        let began_ms = self.engine.now_ms();
        let most = self.engine.limits().max_batch_entries;
        let before = match std::mem::take(&mut self.again) {
            true => Before::of(self.engine, self.caller, self.terms, &talk.progress).await?,
            false => Before::default(),
        };
        let plan = Plan::of(&reply, &self.offer, self.terms, (&talk.progress, &before), most);
        let own = plan.own();
        // A copy, so that a failure half-way leaves the conversation as it was.
        let mut progress = talk.progress.clone();
        let watch = self.watch;
        let results =
            plan.carried_out(self.engine, self.caller, self.terms, &mut progress, watch).await?;
        (progress.reply, progress.canceled) = (None, false);
        progress.spent_ms += self.engine.now_ms().saturating_sub(began_ms);
        talk.progress = progress;
        talk.messages.push(rules::assistant_message(&reply, true));
        talk.messages.extend(results);
        Ok(if own.is_empty() { Next::GoesOn } else { Next::HandedBack(own) })
    }

    /// The same without executing anything: each call is answered with what `told` says, and
    /// counted where it says that it was made.
    pub(crate) fn act_with(
        &self,
        talk: &mut Talk,
        mut told: impl FnMut(&Wanted) -> (String, bool),
    ) -> Next {
        let Some(reply) = talk.progress.reply.take() else { return Next::GoesOn };
        if let Some(closing) = talk.progress.closing {
            return Next::Answered(self.close(talk, reply, closing));
        }
        talk.messages.push(rules::assistant_message(&reply, true));
        if reply.calls.is_empty() {
            let (text, stopped, closing) = (reply.text, reply.stopped, None);
            return Next::Answered(FinalAnswer { text, stopped, closing });
        }
        for call in &reply.calls {
            let (content, made) = told(call);
            talk.progress.calls += u32::from(made);
            talk.messages.push(rules::tool_message(&call.id, &content));
        }
        Next::GoesOn
    }

    /// Waits until a late result has come, and puts it into the conversation.
    pub async fn sleep(&mut self, talk: &mut Talk) -> Result<(), Error> {
        let inner = &self.engine.inner;
        let topic =
            Topic::Run { project: self.caller.project.clone(), run_id: self.terms.run_id.clone() };
        let mut news = inner.bus.listen(topic);
        loop {
            if self.take_late(talk).await? > 0 || talk.progress.awaited.is_empty() {
                return Ok(());
            }
            if inner.stopping.is_cancelled() {
                let message = "the engine has been shut down";
                return Err(Error::refused(Code::Overloaded, message));
            }
            tokio::select! {
                () = news.woken() => {}
                () = inner.clock.sleep_until(inner.clock.now_ms() + LOOK_AGAIN_MS) => {}
                () = inner.stopping.cancelled() => {}
            }
        }
    }

    /// Puts late results that have come into the conversation. Answers with how many.
    pub async fn take_late(&self, talk: &mut Talk) -> Result<usize, Error> {
        let budget = self.terms.acting.result_tokens.unwrap_or(RESULT_TOKENS);
        let awaited = &talk.progress.awaited;
        let (ended, cost) = self.engine.late_contents(self.caller, awaited, budget).await?;
        talk.progress.usage += cost;
        let came = ended.len();
        for (call, content) in ended {
            let message = rules::late_message(&call, &content);
            (self.watch)(Happening::Late { call: &call, message: &message });
            talk.messages.push(message);
            talk.progress.awaited.retain(|other| other.tool_call_id != call.tool_call_id);
        }
        Ok(came)
    }

    /// The model's last word, whatever it made of the last request.
    fn close(
        &self,
        talk: &mut Talk,
        reply: crate::model::Reply,
        closing: super::Closing,
    ) -> FinalAnswer {
        talk.progress.reply = None;
        let said = !reply.text.trim().is_empty();
        let text = if said { reply.text } else { rules::stand_in(closing, &talk.progress) };
        let said = crate::model::Reply { text: text.clone(), ..Default::default() };
        talk.messages.push(rules::assistant_message(&said, false));
        FinalAnswer { text, stopped: reply.stopped, closing: Some(closing) }
    }

    fn prompt(&self, talk: &Talk, last: bool) -> Prompt {
        let mut settings = self.terms.settings.clone();
        let forced = settings.get("tool_choice").is_some_and(|choice| choice != "none");
        // A choice that is forced for ever would keep the model from ever answering.
        if last || (forced && talk.progress.steps > talk.progress.since.steps) {
            settings.remove("tool_choice");
        }
        let tools: Vec<Value> = if last { Vec::new() } else { self.offer.tools.clone() };
        if tools.is_empty() {
            settings.remove("tool_choice");
            settings.remove("parallel_tool_calls");
        }
        let (model, messages) = (self.terms.model.clone(), talk.messages.clone());
        Prompt { model, messages, tools, settings }
    }

    /// Tools come and go while a conversation lasts.
    fn renew_offer(&mut self) {
        if self.offer.version != self.engine.directory_version() {
            self.offer = Offer::of(self.engine, self.caller, self.terms);
        }
    }
}

fn require(caller: &Caller) -> Result<(), Error> {
    if caller.may_invoke() {
        return Ok(());
    }
    let message = format!("a key with the role {} has no runs", caller.role.as_str());
    Err(Error::refused(Code::PermissionDenied, message))
}

/// The size of a request, as text.
fn size(prompt: &Prompt) -> usize {
    let tools = serde_json::to_string(&prompt.tools).map_or(0, |text| text.len());
    tools + serde_json::to_string(&prompt.messages).map_or(0, |text| text.len())
}
