//! Conditions of access rules: CEL expressions over `args`, `caller`, `tool` and `now`.
//!
//! An expression is checked when its rule is written and evaluated many times, on arguments that
//! the operator does not control. The cost of an evaluation is therefore bounded by the form of the
//! expression: its size is limited, a comprehension iterates over a plain list, is not nested and
//! does not use `args` in its body, and larger arguments than the limits are not evaluated.

mod argument_schema;

use std::fmt;
use std::sync::{Arc, LazyLock};

use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, LiteralValue, SelectExpr, SourceInfo,
};
use cel::{Context, Env, IdedExpr, Value as CelValue};
use serde_json::Value;

use crate::domain::json::Json;

/// Maximum length of an expression.
pub(crate) const MAX_CONDITION_BYTES: usize = 2_048;
/// Maximum number of nodes of an expression's syntax tree, and of the body of a comprehension.
const MAX_NODES: usize = 400;
const MAX_BODY_NODES: usize = 80;
/// Maximum nesting of brackets, and of the syntax tree.
const MAX_BRACKETS: usize = 24;
const MAX_DEPTH: usize = 48;
/// Stack of the thread that parses. The parser recurses for every operator of an expression; the
/// pages of the stack that it does not use cost nothing.
const PARSER_STACK_BYTES: usize = 64 << 20;
/// Maximum number of comprehensions in an expression.
const MAX_COMPREHENSIONS: usize = 4;
/// Maximum size of a pattern of `matches`, as text and compiled.
const MAX_PATTERN_BYTES: usize = 256;
const MAX_COMPILED_PATTERN_BYTES: usize = 1 << 17;
/// Maximum size of arguments that conditions are evaluated on.
pub(crate) const MAX_CONDITION_ARGS_BYTES: usize = 1 << 16;
/// Maximum number of members of an object or list that a comprehension iterates over.
const MAX_ITERATIONS: usize = 1_000;

const VARIABLES: [&str; 4] = ["args", "caller", "tool", "now"];
const CALLER_FIELDS: [&str; 7] =
    ["project", "agent", "groups", "user", "session", "environment", "roles"];
const TOOL_FIELDS: [&str; 5] = ["name", "source", "effect", "risk", "tags"];
const FUNCTIONS: [&str; 29] = [
    "bool",
    "bytes",
    "contains",
    "double",
    "duration",
    "dyn",
    "endsWith",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
    "hasValue",
    "int",
    "matches",
    "orValue",
    "size",
    "startsWith",
    "string",
    "timestamp",
    "type",
    "uint",
    "value",
    "or",
];
const TYPES: [&str; 10] =
    ["bool", "bytes", "double", "duration", "int", "list", "map", "string", "timestamp", "uint"];

static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

/// A problem of an expression, with its position from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConditionError {
    pub(crate) message: String,
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl fmt::Display for ConditionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (line {}, column {})", self.message, self.line, self.column)
    }
}

/// One step from the arguments to a value in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathStep {
    Field(String),
    Item,
}

/// A use of `args`, with its position.
#[derive(Debug, Clone)]
pub(crate) struct ArgumentPath {
    pub(crate) steps: Vec<PathStep>,
    pub(crate) line: usize,
    pub(crate) column: usize,
}

/// A compiled condition.
#[derive(Debug)]
pub(crate) struct RuleCondition {
    expression: IdedExpr,
    /// The arguments that the expression uses.
    pub(crate) argument_paths: Vec<ArgumentPath>,
    /// The variables that the expression uses, in the order of [`VARIABLES`].
    uses: [bool; VARIABLES.len()],
    /// The fields of `caller` and `tool` that the expression selects, such as `caller.user`. They
    /// are set one by one: most expressions need one or two, and the objects cost more than the
    /// rest of an evaluation.
    fields: Vec<&'static str>,
    has_comprehension: bool,
}

/// The variables of one decision, as CEL values. Each is set when a condition first uses it.
pub(crate) struct ConditionVariables {
    context: Context<'static, 'static>,
    is_set: [bool; VARIABLES.len()],
    /// The fields of `caller` and `tool` that are set as variables of their own.
    fields: Vec<&'static str>,
    /// The longest list or object in the arguments.
    longest: usize,
    /// The reason why the arguments are not evaluated.
    refused: Option<String>,
}

/// The values of the variables, computed when they are needed.
pub(crate) trait VariableSource {
    /// Returns the arguments; `None` while they are not known.
    fn args(&self) -> Option<&Json>;

    /// Returns the time, in Unix milliseconds.
    fn now_ms(&self) -> u64;

    /// Returns a field of `caller` or `tool`.
    fn field(&self, variable: &str, field: &str) -> Value;
}

impl Default for ConditionVariables {
    fn default() -> Self {
        let context = Context::with_env(ENVIRONMENT.clone());
        let (is_set, fields) = (Default::default(), Vec::new());
        Self { context, is_set, fields, longest: 0, refused: None }
    }
}

impl ConditionVariables {
    /// Sets the variables that a condition uses and that are not set yet.
    pub(crate) fn set(&mut self, condition: &RuleCondition, source: &dyn VariableSource) {
        for name in &condition.fields {
            let Some((variable, field)) = name.split_once('.') else { continue };
            if !self.fields.contains(name) {
                self.fields.push(name);
                self.add(name, to_cel(&source.field(variable, field), &mut 0));
            }
        }
        for (position, name) in VARIABLES.into_iter().enumerate() {
            if !condition.uses[position] || std::mem::replace(&mut self.is_set[position], true) {
                continue;
            }
            match name {
                "args" => self.set_args(source.args()),
                "caller" => self.set_all(name, &CALLER_FIELDS, source),
                "tool" => self.set_all(name, &TOOL_FIELDS, source),
                _ => {
                    let now_ms = i64::try_from(source.now_ms()).ok();
                    let now = now_ms.and_then(chrono::DateTime::from_timestamp_millis);
                    if let Some(now) = now {
                        self.add(name, CelValue::Timestamp(now.fixed_offset()));
                    }
                }
            }
        }
    }

    /// Sets a variable with all its fields.
    fn set_all(&mut self, name: &str, fields: &[&str], source: &dyn VariableSource) {
        let members = fields.iter().map(|field| {
            let value = to_cel(&source.field(name, field), &mut 0);
            ((*field).to_owned(), value)
        });
        let members: std::collections::HashMap<String, CelValue> = members.collect();
        self.add(name, CelValue::from(members));
    }

    fn add(&mut self, name: &str, value: CelValue) {
        self.context.add_variable_from_value(name, value);
    }

    fn set_args(&mut self, args: Option<&Json>) {
        let Some(args) = args else { return };
        let size = args.text().len();
        if size > MAX_CONDITION_ARGS_BYTES {
            self.refused = Some(format!(
                "the arguments have {size} bytes, and conditions are evaluated on at most \
                 {MAX_CONDITION_ARGS_BYTES}"
            ));
            return;
        }
        let value = to_cel(&args.to_value(), &mut self.longest);
        self.add("args", value);
    }
}

/// Converts JSON. An integer is an `int` whenever it fits, so that `args.n + 1` is defined.
fn to_cel(value: &Value, longest: &mut usize) -> CelValue {
    match value {
        Value::Null => CelValue::Null,
        Value::Bool(flag) => CelValue::Bool(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(signed), ..) => CelValue::Int(signed),
            (None, Some(unsigned), _) => CelValue::UInt(unsigned),
            (None, None, float) => CelValue::Float(float.unwrap_or(f64::NAN)),
        },
        Value::String(text) => CelValue::String(Arc::new(text.clone())),
        Value::Array(items) => {
            *longest = (*longest).max(items.len());
            let items: Vec<CelValue> = items.iter().map(|item| to_cel(item, longest)).collect();
            CelValue::List(Arc::new(items))
        }
        Value::Object(members) => {
            *longest = (*longest).max(members.len());
            let members = members.iter().map(|(key, value)| (key.clone(), to_cel(value, longest)));
            CelValue::from(members.collect::<std::collections::HashMap<String, CelValue>>())
        }
    }
}

impl RuleCondition {
    /// Parses and checks an expression.
    pub(crate) fn compile(source: &str) -> Result<Self, ConditionError> {
        let at_start = |message: String| ConditionError { message, line: 1, column: 1 };
        if source.len() > MAX_CONDITION_BYTES {
            let length = source.len();
            return Err(at_start(format!(
                "the expression has {length} bytes; at most {MAX_CONDITION_BYTES} are allowed"
            )));
        }
        if source.trim().is_empty() {
            return Err(at_start("the expression is empty".to_owned()));
        }
        if has_deep_brackets(source) {
            return Err(at_start(format!("brackets are nested deeper than {MAX_BRACKETS}")));
        }
        let on_thread = std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().stack_size(PARSER_STACK_BYTES);
            let parsing = builder.spawn_scoped(scope, || Self::parse(source));
            parsing.map(|parsing| parsing.join())
        });
        match on_thread {
            Ok(Ok(parsed)) => parsed,
            Ok(Err(_)) => Err(at_start("the expression cannot be parsed".to_owned())),
            Err(error) => Err(at_start(format!("the expression was not parsed: {error}"))),
        }
    }

    fn parse(source: &str) -> Result<Self, ConditionError> {
        let parsed = ENVIRONMENT.parser().parse_with_source_info(source).map_err(|errors| {
            let first = errors.errors.first();
            let (line, column) = first.map_or((1, 1), |error| error.pos);
            let message = first.map_or("it does not parse", |error| error.msg.as_str());
            ConditionError {
                message: message.chars().take(300).collect(),
                line: usize::try_from(line).unwrap_or(1).max(1),
                column: usize::try_from(column).unwrap_or(1).max(1),
            }
        });
        let (expression, positions) = parsed?;
        let mut check = ConditionCheck::new(&positions);
        check.visit(&expression, 0)?;
        let ConditionCheck { paths: argument_paths, uses, fields, comprehensions, .. } = check;
        let has_comprehension = comprehensions > 0;
        Ok(Self { expression, argument_paths, uses, fields, has_comprehension })
    }

    /// Returns true if the expression uses `args`.
    pub(crate) fn uses_args(&self) -> bool {
        self.uses[0]
    }

    /// Returns true if the expression uses `now`.
    pub(crate) fn uses_now(&self) -> bool {
        self.uses[VARIABLES.len() - 1]
    }

    /// Returns true if the expression uses `tool`.
    pub(crate) fn uses_tool(&self) -> bool {
        self.uses[2] || self.fields.iter().any(|field| field.starts_with("tool"))
    }

    /// Evaluates the condition. Its variables are set ([`ConditionVariables::set`]).
    ///
    /// # Errors
    ///
    /// Returns the reason if the evaluation fails, or if its value is not a boolean.
    pub(crate) fn evaluate(&self, variables: &ConditionVariables) -> Result<bool, String> {
        if let Some(reason) = variables.refused.as_ref().filter(|_| self.uses_args()) {
            return Err(reason.clone());
        }
        if self.has_comprehension && self.uses_args() && variables.longest > MAX_ITERATIONS {
            let longest = variables.longest;
            return Err(format!(
                "a list or object of the arguments has {longest} members, and a condition \
                 iterates over at most {MAX_ITERATIONS}"
            ));
        }
        match CelValue::resolve(&self.expression, &variables.context) {
            Ok(CelValue::Bool(value)) => Ok(value),
            Ok(other) => Err(format!("the value is of the type {}, not bool", other.type_of())),
            Err(error) => Err(error.to_string().chars().take(300).collect()),
        }
    }
}

/// Returns true if the brackets of an expression are nested too deep. Brackets in string literals
/// count too.
fn has_deep_brackets(source: &str) -> bool {
    let mut depth = 0_usize;
    source.chars().any(|c| {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_BRACKETS
    })
}

/// Walks over the syntax tree of an expression and checks it.
struct ConditionCheck<'a> {
    positions: &'a SourceInfo,
    nodes: usize,
    comprehensions: usize,
    /// Variable of the comprehension that is being visited.
    iteration_variable: Option<&'a str>,
    paths: Vec<ArgumentPath>,
    uses: [bool; VARIABLES.len()],
    fields: Vec<&'static str>,
}

impl<'a> ConditionCheck<'a> {
    fn new(positions: &'a SourceInfo) -> Self {
        Self {
            positions,
            nodes: 0,
            comprehensions: 0,
            iteration_variable: None,
            paths: Vec::new(),
            uses: Default::default(),
            fields: Vec::new(),
        }
    }

    fn position(&self, expression: &IdedExpr) -> (usize, usize) {
        let source = &self.positions.source;
        let offset = self.positions.offset_for(expression.id).map_or(0, |(start, _)| start);
        let before: String = source.chars().take(offset as usize).collect();
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        (before.matches('\n').count() + 1, column)
    }

    fn error(&self, at: &IdedExpr, message: impl Into<String>) -> ConditionError {
        let (line, column) = self.position(at);
        ConditionError { message: message.into(), line, column }
    }

    fn visit(&mut self, node: &'a IdedExpr, depth: usize) -> Result<(), ConditionError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES || depth > MAX_DEPTH {
            let message = format!(
                "the expression is too large: at most {MAX_NODES} parts, nested at most {MAX_DEPTH}"
            );
            return Err(self.error(node, message));
        }
        if let Some((root, steps)) = path_of(node) {
            return self.visit_path(node, root, steps);
        }
        match &node.expr {
            Expr::Ident(name) => self.visit_variable(node, name),
            Expr::Call(call) => self.visit_call(node, call, depth),
            Expr::Comprehension(comprehension) => {
                self.visit_comprehension(node, comprehension, depth)
            }
            Expr::Select(SelectExpr { operand, .. }) => self.visit(operand, depth + 1),
            Expr::List(list) => list.elements.iter().try_for_each(|e| self.visit(e, depth + 1)),
            Expr::Map(map) => map.entries.iter().try_for_each(|entry| match &entry.expr {
                EntryExpr::MapEntry(entry) => {
                    self.visit(&entry.key, depth + 1)?;
                    self.visit(&entry.value, depth + 1)
                }
                EntryExpr::StructField(field) => self.visit(&field.value, depth + 1),
            }),
            Expr::Struct(_) => Err(self.error(node, "there are no message types")),
            Expr::Literal(_) | Expr::Unspecified => Ok(()),
        }
    }

    fn visit_variable(&mut self, node: &IdedExpr, name: &str) -> Result<(), ConditionError> {
        if name.starts_with('@') || self.iteration_variable == Some(name) || TYPES.contains(&name) {
            return Ok(());
        }
        let Some(position) = VARIABLES.iter().position(|variable| *variable == name) else {
            let known = VARIABLES.join(", ");
            let message = format!("there is no variable \"{name}\"; the variables are {known}");
            return Err(self.error(node, message));
        };
        if name == "args" && self.iteration_variable.is_some() {
            let message = "args cannot be used inside of a comprehension: each element would be \
                           compared with all arguments";
            return Err(self.error(node, message));
        }
        self.uses[position] = true;
        Ok(())
    }

    fn visit_path(
        &mut self,
        node: &IdedExpr,
        root: &IdedExpr,
        steps: Vec<PathStep>,
    ) -> Result<(), ConditionError> {
        self.nodes += steps.len();
        let Expr::Ident(name) = &root.expr else { return Ok(()) };
        if let Some(field) = own_field(node, name) {
            self.fields.push(field);
            return Ok(());
        }
        self.visit_variable(root, name)?;
        if self.iteration_variable == Some(name.as_str()) {
            return Ok(());
        }
        let known: &[&str] = match name.as_str() {
            "caller" => &CALLER_FIELDS,
            "tool" => &TOOL_FIELDS,
            "args" => {
                let (line, column) = self.position(root);
                self.paths.push(ArgumentPath { steps, line, column });
                return Ok(());
            }
            _ => return Ok(()),
        };
        match steps.first() {
            Some(PathStep::Field(field)) if !known.contains(&field.as_str()) => {
                let fields = known.join(", ");
                let message = format!("{name} has no field \"{field}\"; it has {fields}");
                Err(self.error(node, message))
            }
            _ => Ok(()),
        }
    }

    fn visit_call(
        &mut self,
        node: &'a IdedExpr,
        call: &'a CallExpr,
        depth: usize,
    ) -> Result<(), ConditionError> {
        let name = call.func_name.as_str();
        let is_operator = !name.starts_with(|c: char| c.is_ascii_alphabetic());
        if !is_operator && !FUNCTIONS.contains(&name) {
            let similar = FUNCTIONS.iter().min_by_key(|f| strsim::levenshtein(f, name));
            let hint = similar.filter(|f| strsim::levenshtein(f, name) <= 2);
            let hint = hint.map_or_else(String::new, |f| format!("; did you mean \"{f}\"?"));
            return Err(self.error(node, format!("there is no function \"{name}\"{hint}")));
        }
        if name == "matches" {
            self.check_pattern(node, call)?;
        }
        if let Some(target) = &call.target {
            self.visit(target, depth + 1)?;
        }
        call.args.iter().try_for_each(|argument| self.visit(argument, depth + 1))
    }

    /// A pattern is compiled at each evaluation, so it is a literal of bounded size.
    fn check_pattern(&self, node: &IdedExpr, call: &CallExpr) -> Result<(), ConditionError> {
        let Some(Expr::Literal(LiteralValue::String(text))) = call.args.last().map(|a| &a.expr)
        else {
            return Err(self.error(node, "the pattern of matches must be a literal"));
        };
        let pattern = text.inner();
        if pattern.len() > MAX_PATTERN_BYTES {
            let message = format!("a pattern has at most {MAX_PATTERN_BYTES} bytes");
            return Err(self.error(node, message));
        }
        let built =
            regex::RegexBuilder::new(pattern).size_limit(MAX_COMPILED_PATTERN_BYTES).build();
        built.map(drop).map_err(|error| self.error(node, error.to_string()))
    }

    fn visit_comprehension(
        &mut self,
        node: &'a IdedExpr,
        comprehension: &'a ComprehensionExpr,
        depth: usize,
    ) -> Result<(), ConditionError> {
        self.comprehensions += 1;
        if self.iteration_variable.is_some() {
            return Err(self.error(node, "a comprehension cannot contain another one"));
        }
        if self.comprehensions > MAX_COMPREHENSIONS {
            let message = format!("at most {MAX_COMPREHENSIONS} comprehensions");
            return Err(self.error(node, message));
        }
        let variable = comprehension.iter_var.as_str();
        if VARIABLES.contains(&variable) || comprehension.iter_var2.is_some() {
            let message = format!("\"{variable}\" cannot be the variable of a comprehension");
            return Err(self.error(node, message));
        }
        let range = &comprehension.iter_range;
        let is_plain =
            matches!(range.expr, Expr::Ident(_) | Expr::List(_)) || path_of(range).is_some();
        if !is_plain {
            let message = "a comprehension iterates over a list of args, caller or tool, or over \
                           a literal list";
            return Err(self.error(range, message));
        }
        self.visit(range, depth + 1)?;
        let nodes = self.nodes;
        self.iteration_variable = Some(variable);
        for part in [
            &comprehension.accu_init,
            &comprehension.loop_cond,
            &comprehension.loop_step,
            &comprehension.result,
        ] {
            self.visit(part, depth + 1)?;
        }
        self.iteration_variable = None;
        if self.nodes - nodes > MAX_BODY_NODES {
            let message = format!("the body of a comprehension has at most {MAX_BODY_NODES} parts");
            return Err(self.error(node, message));
        }
        Ok(())
    }
}

/// The fields of `caller` and `tool`, as the names under which they are set.
const FIELD_NAMES: [&str; 12] = [
    "caller.project",
    "caller.agent",
    "caller.groups",
    "caller.user",
    "caller.session",
    "caller.environment",
    "caller.roles",
    "tool.name",
    "tool.source",
    "tool.effect",
    "tool.risk",
    "tool.tags",
];

/// Returns the name of the field if a node is its plain selection, such as `caller.user`. CEL looks
/// up the qualified name before it looks up the object. A presence test needs the object.
fn own_field(node: &IdedExpr, variable: &str) -> Option<&'static str> {
    let Expr::Select(SelectExpr { operand, field, test: false }) = &node.expr else { return None };
    let is_plain = matches!(&operand.expr, Expr::Ident(name) if name == variable);
    let is_it = |name: &&str| name.split_once('.') == Some((variable, field.as_str()));
    FIELD_NAMES.into_iter().find(is_it).filter(|_| is_plain)
}

/// Returns the root variable and the steps if a node is a chain of selections, such as
/// `args.items[0].name`.
fn path_of(node: &IdedExpr) -> Option<(&IdedExpr, Vec<PathStep>)> {
    let mut steps = Vec::new();
    let mut node = node;
    loop {
        match &node.expr {
            Expr::Ident(_) if !steps.is_empty() => {
                steps.reverse();
                return Some((node, steps));
            }
            Expr::Select(select) => {
                steps.push(PathStep::Field(select.field.clone()));
                node = &select.operand;
            }
            Expr::Call(call)
                if call.args.len() == 2
                    && matches!(call.func_name.as_str(), "_[_]" | "_?._" | "_[?_]") =>
            {
                match &call.args[1].expr {
                    Expr::Literal(LiteralValue::String(text)) => {
                        steps.push(PathStep::Field(text.inner().to_owned()));
                    }
                    Expr::Literal(_) => steps.push(PathStep::Item),
                    _ => return None,
                }
                node = &call.args[0];
            }
            _ => return None,
        }
    }
}

impl RuleCondition {
    /// Returns the problem of the first argument that a tool's input schema does not have.
    pub(crate) fn check_arguments(&self, tool: &str, schema: &Value) -> Option<ConditionError> {
        self.argument_paths.iter().find_map(|path| {
            let missing = argument_schema::find_missing(schema, &path.steps)?;
            let message = format!("the schema of \"{tool}\" has no argument \"{missing}\"");
            Some(ConditionError { message, line: path.line, column: path.column })
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    struct FixedVariables {
        args: Json,
        objects: Value,
    }

    impl VariableSource for FixedVariables {
        fn args(&self) -> Option<&Json> {
            Some(&self.args)
        }

        /// 2026-01-02 03:04:05 UTC, a Friday.
        fn now_ms(&self) -> u64 {
            1_767_323_045_000
        }

        fn field(&self, variable: &str, field: &str) -> Value {
            self.objects[variable][field].clone()
        }
    }

    fn evaluate_on(condition: &RuleCondition, args: &Value) -> Result<bool, String> {
        let caller = json!({"project": "p", "agent": "ada", "groups": ["ops"], "user": null,
            "session": null, "environment": "production", "roles": ["agent"]});
        let tool = json!({"name": "pay.send", "source": "client", "effect": "irreversible",
            "risk": "high", "tags": ["money"]});
        let objects = json!({"caller": caller, "tool": tool});
        let mut variables = ConditionVariables::default();
        variables.set(condition, &FixedVariables { args: Json::from_value(args), objects });
        condition.evaluate(&variables)
    }

    fn evaluate(source: &str, args: &Value) -> Result<bool, String> {
        let condition = RuleCondition::compile(source).map_err(|error| error.to_string());
        evaluate_on(&condition?, args)
    }

    #[test]
    fn conditions_see_the_arguments_the_caller_the_tool_and_the_time() {
        let args = json!({"amount": 250, "ratio": 0.5, "big": u64::MAX, "to": ["a@x.org", "b@y.org"],
            "nested": {"items": [{"name": "first"}]}, "none": null});
        for source in [
            "args.amount > 100",
            "args.amount + 1 == 251 && args.ratio < 1.0",
            "args.big > 1",
            "args.to.exists(a, a.endsWith('@y.org'))",
            "!args.to.all(a, a.endsWith('@y.org'))",
            "args.nested.items[0].name == 'first'",
            "args['amount'] == 250",
            "args.none == null",
            "has(args.amount) && !has(args.other)",
            "'ops' in caller.groups && caller.environment == 'production'",
            "caller.user == null",
            "tool.risk in ['high', 'critical'] && 'money' in tool.tags",
            "tool.name.matches('^pay[.]')",
            "now.getHours() == 3 && now.getDayOfWeek() == 5",
            "now > timestamp('2026-01-01T00:00:00Z')",
            "size(args.to) == 2",
            "caller['agent'] == 'ada' && has(caller.user) && size(caller) == 7",
            "caller.groups.exists(g, g == 'ops' && caller.agent == 'ada')",
            "caller.groups[0] == 'ops' && tool.tags[0] == 'money'",
            "args.?other.orValue(7) == 7",
        ] {
            assert_eq!(evaluate(source, &args), Ok(true), "{source}");
        }
        assert_eq!(evaluate("args.amount > 1000", &args), Ok(false));
        assert!(evaluate("args.missing > 1", &args).unwrap_err().contains("missing"));
        assert!(evaluate("args.amount", &args).unwrap_err().contains("not bool"));
        assert!(evaluate("args.to > 1", &args).is_err());
    }

    #[test]
    fn an_expression_is_refused_with_the_position_of_its_problem() {
        for (source, words, column) in [
            ("args.amount >", "", 14),
            ("true && argz.x == 1", "no variable \"argz\"", 9),
            ("caller.name == 'x'", "caller has no field \"name\"", 7),
            ("tool.kind == 'x'", "tool has no field \"kind\"", 5),
            ("args.x.lower() == 'x'", "no function \"lower\"", 13),
            ("args.x.matches(args.y)", "must be a literal", 15),
            ("args.x.matches('(')", "regex", 15),
        ] {
            let error = RuleCondition::compile(source).unwrap_err();
            assert!(error.message.contains(words), "{source}: {error}");
            assert_eq!((error.line, error.column), (1, column), "{source}: {error}");
        }
        let error = RuleCondition::compile("true &&\n  nope == 1").unwrap_err();
        assert_eq!((error.line, error.column), (2, 3), "{error}");
    }

    #[test]
    fn the_cost_of_an_expression_is_bounded_by_its_form() {
        let long = format!("args.x == '{}'", "x".repeat(MAX_CONDITION_BYTES));
        let wide = vec!["args.x == 1"; 150].join(" || ");
        let deep = format!("{}true{}", "(".repeat(500), ")".repeat(500));
        let negated = format!("{}true", "!".repeat(300));
        let nested = "args.a.all(x, args.b.exists(y, x == y))";
        let chained = "args.a.filter(x, x > 1).all(x, x > 2)";
        let uses_args = "args.a.all(x, x in args.b)";
        let over_sum = "(args.a + args.a).all(x, x > 1)";
        let shadowing = "args.a.all(args, args > 1)";
        let sum = format!("1{} > 0", " + 1".repeat(400));
        let chain = format!("{}true", "true ? false : ".repeat(100));
        let many = ["args.a.all(x, x > 1)"; 5].join(" && ");
        let pattern = format!("args.x.matches('{}')", "(a{99}){99}");
        for source in
            [&long, &wide, &deep, nested, chained, uses_args, over_sum, shadowing, &many, &pattern]
        {
            assert!(RuleCondition::compile(source).is_err(), "{source}");
        }
        // Compiling ends, with either result.
        for source in [&negated, &sum, &chain] {
            let _ = RuleCondition::compile(source);
        }
        let huge = json!({"a": "x".repeat(MAX_CONDITION_ARGS_BYTES)});
        assert!(evaluate("args.a == 'x'", &huge).unwrap_err().contains("at most"));
        assert_eq!(evaluate("caller.agent == 'ada'", &huge), Ok(true), "it needs no arguments");
        let list = json!({"a": vec![1; MAX_ITERATIONS + 1]});
        assert!(evaluate("args.a.all(x, x > 0)", &list).unwrap_err().contains("at most"));
    }

    #[test]
    fn the_costliest_accepted_expression_ends_soon() {
        let body = ["x.contains('aaaaaaaaab')"; 12].join(" || ");
        let source = vec![format!("!args.a.exists(x, {body})"); MAX_COMPREHENSIONS].join(" && ");
        let condition = RuleCondition::compile(&source).unwrap();
        let args = json!({"a": vec!["a".repeat(60); 950]});
        assert!(Json::from_value(&args).text().len() < MAX_CONDITION_ARGS_BYTES);
        let start = std::time::Instant::now();
        assert_eq!(evaluate_on(&condition, &args), Ok(true));
        let elapsed = start.elapsed();
        // About 50 ms without optimization.
        assert!(elapsed < std::time::Duration::from_secs(5), "{elapsed:?}");
    }

    #[test]
    fn arguments_that_a_schema_does_not_have_are_found() {
        let schema = json!({"type": "object", "properties": {
            "amount": {"type": "number"},
            "to": {"type": "object", "properties": {"name": {"type": "string"}}},
            "open": {"type": "object"},
            "list": {"type": "array", "items": {"properties": {"id": {}}}},
        }});
        let missing = |source: &str| {
            let condition = RuleCondition::compile(source).unwrap();
            condition.check_arguments("t", &schema).map(|error| (error.message, error.column))
        };
        for source in [
            "args.amount > 1",
            "args.to.name == 'x'",
            "args.open.any.thing == 1",
            "args.list[0].id == 1",
            "has(args.to)",
        ] {
            assert_eq!(missing(source), None, "{source}");
        }
        for (source, name) in [
            ("args.amuont > 1", "amuont"),
            ("args['amuont'] > 1", "amuont"),
            ("has(args.amuont)", "amuont"),
            ("args.to.title == 'x'", "title"),
            ("args.list[0].no == 1", "no"),
        ] {
            let (message, _) = missing(source).unwrap();
            assert!(message.contains(&format!("\"{name}\"")), "{source}: {message}");
        }
        let open = json!({"properties": {"a": {}}, "additionalProperties": true});
        let condition = RuleCondition::compile("args.b == 1").unwrap();
        assert!(condition.check_arguments("t", &open).is_none());
    }
}
