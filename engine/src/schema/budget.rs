//! Cost of compiled schemas: the budget of a request, and the patterns, which cost the most.
//!
//! A few bytes of a pattern can take megabytes and tens of milliseconds when compiled: `\PL{60}`
//! has 18,000 states. Memory and time grow together (about 12 ms per MiB), so that one number
//! bounds both: the bytes of compiled form that one request may cause.

use std::collections::HashMap;

use regex_automata::meta::Regex;

/// Maximum compiled bytes of all schemas of one request.
pub const REQUEST_BYTES: usize = 32 * 1024 * 1024;
/// Maximum compiled bytes of one form that a tool sends with an elicitation.
pub const FORM_BYTES: usize = 2 * 1024 * 1024;
/// Maximum memory for all compiled patterns of one schema together. The budget of the request may
/// allow less.
const PATTERN_BYTES: usize = 32 * 1024 * 1024;
/// Maximum memory for one compiled pattern.
const ONE_PATTERN_BYTES: usize = 4 * 1024 * 1024;
/// Charge for one subschema.
const SUBSCHEMA_BYTES: usize = 256;
/// Charge for one step of the analysis, which takes time but no memory.
const ANALYSIS_STEP_BYTES: usize = 16;
/// Charge for one Unicode class in a pattern, which is expanded before the size of the pattern is
/// known.
const UNICODE_CLASS_BYTES: usize = 8 * 1024;

/// The compiled bytes that one request may still cause.
#[derive(Debug)]
pub struct CompileBudget {
    limit: usize,
    left: usize,
}

impl CompileBudget {
    /// Creates a budget of this many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { limit: bytes, left: bytes }
    }

    /// Creates the budget of one request ([`REQUEST_BYTES`]).
    pub fn for_request() -> Self {
        Self::new(REQUEST_BYTES)
    }

    /// Creates a budget without a limit, for definitions that were accepted before. The limits of
    /// a single schema still apply.
    pub(super) fn unlimited() -> Self {
        Self::new(usize::MAX)
    }

    /// Returns the bytes charged so far.
    pub(super) fn charged(&self) -> usize {
        self.limit - self.left
    }

    /// Charges a cost. Returns an error if the budget does not cover it.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<(), BudgetExceeded> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.left = 0;
                Err(BudgetExceeded { limit: self.limit })
            }
        }
    }

    pub(super) fn charge_subschemas(&mut self, count: usize) -> Result<(), BudgetExceeded> {
        self.charge(count.saturating_mul(SUBSCHEMA_BYTES))
    }

    pub(super) fn charge_analysis(&mut self, steps: usize) -> Result<(), BudgetExceeded> {
        self.charge(steps.saturating_mul(ANALYSIS_STEP_BYTES))
    }
}

/// The budget of a request is used up.
#[derive(Debug, Clone, Copy)]
pub(super) struct BudgetExceeded {
    limit: usize,
}

impl BudgetExceeded {
    /// Returns the reason in words.
    pub(super) fn reason(self) -> String {
        let kib = self.limit / 1024;
        let size = if kib < 1024 { format!("{kib} KiB") } else { format!("{} MiB", kib / 1024) };
        format!(
            "the schemas of this request take more than {size} when compiled, from here on; use \
             simpler patterns (a repeated Unicode class such as \\p{{L}}{{60}} takes megabytes) or \
             send fewer tools at a time"
        )
    }
}

/// The compiled patterns of one schema, by their text. A pattern that does not compile within the
/// limits has the value `None`.
#[derive(Default)]
pub(super) struct CompiledPatterns {
    by_text: HashMap<String, Option<Regex>>,
    size_limit: usize,
}

impl CompiledPatterns {
    /// Creates the collection for a schema with this many patterns.
    pub(super) fn new(count: usize) -> Self {
        let size_limit = (PATTERN_BYTES / count.max(1)).min(ONE_PATTERN_BYTES);
        Self { by_text: HashMap::new(), size_limit }
    }

    /// Returns the maximum size of one pattern.
    pub(super) fn size_limit(&self) -> usize {
        self.size_limit
    }

    /// Compiles a pattern, unless the schema has it already, and charges its cost.
    pub(super) fn add(
        &mut self,
        text: &str,
        budget: &mut CompileBudget,
    ) -> Result<(), BudgetExceeded> {
        if self.by_text.contains_key(text) {
            return Ok(());
        }
        let classes = text.matches("\\p").count() + text.matches("\\P").count();
        budget.charge(classes.saturating_mul(UNICODE_CLASS_BYTES).saturating_add(text.len()))?;
        let compiled = compile_pattern(text, self.size_limit.min(budget.left));
        // A pattern that is too large was compiled up to the limit before it was given up.
        let cost = compiled.as_ref().map_or(self.size_limit, Regex::memory_usage);
        self.by_text.insert(text.to_owned(), compiled);
        budget.charge(cost)
    }

    /// Charges a pattern a second time, for `patternProperties`: the `jsonschema` crate compiles
    /// those patterns itself.
    pub(super) fn charge_again(
        &self,
        text: &str,
        budget: &mut CompileBudget,
    ) -> Result<(), BudgetExceeded> {
        let compiled = self.by_text.get(text).and_then(Option::as_ref);
        budget.charge(compiled.map_or(0, Regex::memory_usage))
    }

    /// Returns the compiled form, compiling a pattern that the analysis did not see.
    pub(super) fn get(&self, text: &str) -> Option<Regex> {
        match self.by_text.get(text) {
            Some(compiled) => compiled.clone(),
            None => compile_pattern(text, self.size_limit),
        }
    }
}

fn compile_pattern(text: &str, size_limit: usize) -> Option<Regex> {
    let translated = jsonschema_regex::to_rust_regex(text).ok()?;
    let config = Regex::config().nfa_size_limit(Some(size_limit));
    Regex::builder().configure(config).build(&translated).ok()
}
