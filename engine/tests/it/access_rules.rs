//! The access rules against a reference evaluator that is written another way: deny before allow,
//! no rule means no, and patterns match whole names.

use toolcrib::domain::access_rules::{AccessRule, RuleVerdict, decide};

const CASES: u64 = 100_000;

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

fn is_allowed(rules: &[AccessRule], project: &str, agent: &str, tool: &str) -> bool {
    let verdicts: Vec<RuleVerdict> = rules
        .iter()
        .filter(|rule| rule.project == project)
        .filter(|rule| [agent, "*"].contains(&rule.agent.as_str()))
        .filter(|rule| matches(&rule.pattern, tool))
        .map(|rule| rule.verdict)
        .collect();
    verdicts.contains(&RuleVerdict::Allow) && !verdicts.contains(&RuleVerdict::Deny)
}

#[test]
fn decisions_equal_those_of_a_reference_evaluator() {
    let mut rng = SeededRng(20_261_118);
    let mut allowed = 0;
    for case in 0..CASES {
        let rules: Vec<AccessRule> = (0..rng.below(7))
            .map(|_| AccessRule {
                project: rng.pick(&["p", "q"]).to_owned(),
                agent: rng.pick(&["ada", "bob", "*"]).to_owned(),
                pattern: rng.text(&["a", "b", ".", "*", "*", "ab"], 5),
                verdict: match rng.below(3) {
                    0 => RuleVerdict::Deny,
                    _ => RuleVerdict::Allow,
                },
            })
            .collect();
        let (project, agent) = (rng.pick(&["p", "q"]), rng.pick(&["ada", "bob", "eve"]));
        let tool = rng.text(&["a", "b", ".", "ab"], 6);
        let expected = is_allowed(&rules, project, agent, &tool);
        let decided = decide(rules.iter(), project, agent, &tool);
        assert_eq!(decided.is_allowed(), expected, "case {case}: {agent} {tool} {rules:?}");
        allowed += u64::from(expected);
    }
    // Both verdicts occur often enough to mean something.
    assert!((CASES / 20..CASES * 19 / 20).contains(&allowed), "{allowed} of {CASES} allowed");
}
