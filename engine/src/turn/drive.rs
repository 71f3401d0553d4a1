//! The driver of the agent loop: runs step after step over one conversation.

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

/// Extra time for the last request after the time limit.
const GRACE_MS: u64 = 60_000;

/// Polling interval while the loop waits for late results, in case a wake-up is missed.
const LOOK_AGAIN_MS: u64 = 2_000;

/// An agent loop over one conversation. [`Engine::run_agent_loop`] runs it as a whole; a program
/// that stores the conversation in between alternates [`AgentLoop::request_reply`] and
/// [`AgentLoop::execute_reply`].
pub struct Loop<'a> {
    engine: &'a Engine,
    caller: &'a Caller,
    model: &'a dyn Model,
    terms: &'a Terms,
    watch: Watch<'a>,
    offer: Offer,
    /// True if the pending reply existed before this loop requested one, so that its calls may
    /// already have been made.
    again: bool,
    /// True if an empty reply is acceptable even if no late results are pending.
    pub(crate) may_be_silent: bool,
}

impl Engine {
    /// Runs one step: sends a request to the model and executes every call of its reply. The
    /// results are then in the conversation, except those of caller tools.
    ///
    /// If the model gives no reply after its retries, this returns an error with the code
    /// `UPSTREAM_UNAVAILABLE`; the conversation is unchanged, and the step can be repeated.
    pub async fn run_turn(
        &self,
        caller: &Caller,
        model: &dyn Model,
        terms: &Terms,
        talk: &mut Talk,
    ) -> Result<Next, Error> {
        Loop::new(self, caller, model, terms, &unwatched)?.turn(talk).await
    }

    /// Runs steps until the model gives its final answer, also at a limit, or calls a caller tool.
    /// Waits while there is nothing to do before late results arrive. Returns
    /// [`StepOutcome::Answered`] or [`StepOutcome::CallerToolCalls`].
    ///
    /// ```
    /// use async_trait::async_trait;
    /// use toolcrib::model::{Listener, Model, Prompt, Reply, Silence, Wanted};
    /// use toolcrib::turn::{Next, Talk, Terms};
    /// use toolcrib::{Caller, Engine, FnTool};
    ///
    /// /// Calls a tool and then reports its result. A real model sends requests to an endpoint.
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
    /// Creates a loop that reports its events to `watch`. Refuses invalid options.
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

    /// Creates a loop with options that were validated before: tools that no longer exist are
    /// skipped.
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

    /// Runs steps until there is a final answer or a call of a caller tool.
    pub async fn all(&mut self, talk: &mut Talk) -> Result<Next, Error> {
        loop {
            match self.turn(talk).await? {
                Next::GoesOn => {}
                Next::Sleeps => self.sleep(talk).await?,
                next => return Ok(next),
            }
        }
    }

    /// Runs one step.
    pub async fn turn(&mut self, talk: &mut Talk) -> Result<Next, Error> {
        self.ask(talk).await?;
        self.act(talk).await
    }

    /// Sends a request to the model, unless a reply is already pending. Late results that have
    /// arrived are part of the request. The reply is then in [`super::RunProgress::pending_reply`].
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
            // The time limit passed during a request: that is a limit, not a failure.
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

    /// Executes the calls of the pending reply. A step repeated with the same idempotency prefix
    /// executes no call twice.
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
        // Work on a copy, so that a failure midway leaves the conversation unchanged.
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

    /// Answers the calls of the pending reply without executing anything. `told` returns the
    /// content of each answer and whether the call counts as made.
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

    /// Waits until a late result arrives, and adds it to the conversation.
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

    /// Adds late results that have arrived to the conversation and returns their number.
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

    /// Returns the final answer at a limit, whatever the reply to the last request contains.
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
        // A permanently forced tool choice would keep the model from ever giving a final answer.
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

    /// Refreshes the tool selection, because tools can change during a conversation.
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

/// Returns the size of a request's tools and messages as JSON text.
fn size(prompt: &Prompt) -> usize {
    let tools = serde_json::to_string(&prompt.tools).map_or(0, |text| text.len());
    tools + serde_json::to_string(&prompt.messages).map_or(0, |text| text.len())
}
