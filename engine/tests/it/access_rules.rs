//! The access rules against a reference evaluator that is written another way: deny before allow,
//! no rule means no, and patterns match whole names.

use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::caller::AuthMethod;
use toolcrib::{Caller, Engine, Role};

const RULE_SETS: u64 = 1_000;
const CASES_PER_SET: u64 = 100;

/// Pseudorandom numbers that are reproducible from a seed (SplitMix64).
struct SeededRng(u64);

impl SeededRng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }

    /// Returns a text of few letters, so that patterns and names often meet.
    fn text(&mut self, letters: &[&str], longest: usize) -> String {
        (0..=self.below(longest)).map(|_| self.pick(letters)).collect()
    }
}

/// Returns true if a pattern matches a name, letter by letter with a table of all prefixes.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let mut reachable = vec![false; name.len() + 1];
    reachable[0] = true;
    for letter in pattern {
        let mut next = vec![false; name.len() + 1];
        for at in 0..=name.len() {
            next[at] = match letter {
                b'*' => reachable[..=at].contains(&true),
                letter => at > 0 && reachable[at - 1] && name[at - 1] == *letter,
            };
        }
        reachable = next;
    }
    reachable[name.len()]
}

/// An agent or `*`, a pattern, and a verdict.
type ShortRule = (String, String, RuleVerdict);

fn is_allowed(rules: &[ShortRule], agent: &str, tool: &str) -> bool {
    let verdicts: Vec<RuleVerdict> = rules
        .iter()
        .filter(|(of, _, _)| [agent, "*"].contains(&of.as_str()))
        .filter(|(_, pattern, _)| matches(pattern, tool))
        .map(|(_, _, verdict)| *verdict)
        .collect();
    verdicts.contains(&RuleVerdict::Allow) && !verdicts.contains(&RuleVerdict::Deny)
}

fn random_rules(rng: &mut SeededRng) -> Vec<ShortRule> {
    let rule = |rng: &mut SeededRng| {
        let agent = rng.pick(&["ada", "bob", "*"]).to_owned();
        let pattern = rng.text(&["a", "b", ".", "*", "*", "ab"], 5);
        let verdict = if rng.below(3) == 0 { RuleVerdict::Deny } else { RuleVerdict::Allow };
        (agent, pattern, verdict)
    };
    (0..rng.below(7)).map(|_| rule(rng)).collect()
}

#[tokio::test]
async fn decisions_equal_those_of_a_reference_evaluator() {
    let engine = Engine::builder().start().await.unwrap();
    let operator = Caller::local("p");
    let mut rng = SeededRng(20_261_118);
    let mut allowed = 0;
    for _ in 0..RULE_SETS {
        let rules = random_rules(&mut rng);
        let stored = rules.iter().enumerate().map(|(n, (agent, pattern, verdict))| {
            let short = AccessRule::short("p", agent, pattern, *verdict);
            AccessRule { id: format!("rule-{n}"), ..short }
        });
        let stored = stored.collect();
        engine.admin().replace_rules(&operator, "p", stored, "random").await.unwrap();
        for _ in 0..CASES_PER_SET {
            let (project, agent) = (rng.pick(&["p", "p", "q"]), rng.pick(&["ada", "bob", "eve"]));
            let tool = rng.text(&["a", "b", ".", "ab"], 6);
            let expected = project == "p" && is_allowed(&rules, agent, &tool);
            let caller = Caller::new(project, agent, Role::Agent, AuthMethod::Key);
            let decided = engine.registry().may_use_passthrough(&caller, &tool);
            assert_eq!(decided, expected, "{project} {agent} {tool} {rules:?}");
            allowed += u64::from(expected);
        }
    }
    // Both verdicts occur often enough to mean something.
    let cases = RULE_SETS * CASES_PER_SET;
    assert!((cases / 20..cases * 19 / 20).contains(&allowed), "{allowed} of {cases} allowed");
}
