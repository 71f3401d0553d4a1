//! Parses and evaluates an expression in one pass.
//!
//! There is no syntax tree: each operator is applied as soon as its right side is known, so that
//! memory and stack are bounded by the nesting of the text, which is limited. Operands that are
//! short-circuited (`false && …`, the branch that `if` does not take) are parsed, but not
//! evaluated.

use super::value::{self, BinaryOperator, Value};
use super::{MAX_LENGTH, functions};

/// Maximum nesting of parentheses, signs and chains of powers.
const MAX_DEPTH: usize = 100;
/// Binding power of a leading sign or `!`: weaker than a power, stronger than a product.
const SIGN: u8 = 13;
/// Binding power of the word `not`: weaker than a comparison, as in Python.
const NOT: u8 = 5;
/// Binding power of the `!` after a value.
const FACTORIAL: u8 = 17;

#[derive(Debug, Clone, PartialEq)]
enum ExpressionToken {
    Value(Value),
    Name(String),
    Op(BinaryOperator),
    /// `!`, before or after a value.
    Bang,
    Not,
    Open,
    Close,
    Comma,
    End,
}

impl ExpressionToken {
    fn display(&self) -> String {
        match self {
            Self::Value(value) => format!("\"{value}\""),
            Self::Name(name) => format!("\"{}\"", name.chars().take(40).collect::<String>()),
            Self::Op(op) => format!("\"{}\"", op.symbol()),
            Self::Bang => "\"!\"".into(),
            Self::Not => "\"not\"".into(),
            Self::Open => "\"(\"".into(),
            Self::Close => "\")\"".into(),
            Self::Comma => "\",\"".into(),
            Self::End => "the end".into(),
        }
    }
}

/// Evaluates a complete text.
pub fn evaluate_text(text: &str) -> Result<Value, String> {
    if text.len() > MAX_LENGTH {
        let length = text.len();
        return Err(format!("it is {length} bytes long and at most {MAX_LENGTH} are calculated"));
    }
    if text.trim().is_empty() {
        return Err("it is empty: write something like 2*21".into());
    }
    let mut reader = ExpressionEvaluator { tokens: tokenize(text)?, next: 0, depth: 0 };
    let value = reader.expression(0, true)?;
    match reader.peek() {
        ExpressionToken::End => Ok(value),
        ExpressionToken::Close => Err(reader.error_at_token("there is a \")\" without its \"(\"")),
        ExpressionToken::Comma => Err(reader.error_at_token(
            "there is a \",\" outside a function: write 1000 and 1.5, not 1,000 or 1,5",
        )),
        other => {
            let other = other.display();
            Err(reader.error_at_token(format!(
                "an operator is missing before {other}: write 2*pi, not 2pi"
            )))
        }
    }
}

struct ExpressionEvaluator {
    /// Tokens, each with the position of its first character, counted from 1.
    tokens: Vec<(ExpressionToken, usize)>,
    next: usize,
    depth: usize,
}

impl ExpressionEvaluator {
    fn peek(&self) -> &ExpressionToken {
        self.tokens.get(self.next).map_or(&ExpressionToken::End, |(token, _)| token)
    }

    fn take(&mut self) -> ExpressionToken {
        let token = self.peek().clone();
        self.next += 1;
        token
    }

    /// Returns an error message with the position of the next token.
    fn error_at_token(&self, problem: impl std::fmt::Display) -> String {
        match self.tokens.get(self.next) {
            Some((_, position)) => format!("{problem} (at character {position})"),
            None => format!("{problem} (at the end)"),
        }
    }

    /// Parses operators that bind at least this strongly, and evaluates them if `evaluates`.
    fn expression(&mut self, min_precedence: u8, evaluates: bool) -> Result<Value, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error_at_token(format!(
                "it nests deeper than {MAX_DEPTH} levels: calculate a part of it first"
            )));
        }
        let mut left = self.operand(evaluates)?;
        loop {
            if *self.peek() == ExpressionToken::Bang && FACTORIAL >= min_precedence {
                self.next += 1;
                if evaluates {
                    left = functions::factorial(value::to_integer(left, "a factorial")?)?;
                }
                continue;
            }
            let ExpressionToken::Op(op) = *self.peek() else { break };
            let (binds_left, binds_right) = op.binding_power();
            if binds_left < min_precedence {
                break;
            }
            self.next += 1;
            let decided = match op {
                BinaryOperator::And => evaluates && !value::to_bool(left, "&&")?,
                BinaryOperator::Or => evaluates && value::to_bool(left, "||")?,
                _ => false,
            };
            let right = self.expression(binds_right, evaluates && !decided)?;
            if evaluates && !decided {
                left = value::apply(op, left, right)?;
            }
        }
        self.depth -= 1;
        Ok(left)
    }

    /// Parses one value, with any prefix operators.
    fn operand(&mut self, evaluates: bool) -> Result<Value, String> {
        match self.take() {
            ExpressionToken::Value(value) => Ok(value),
            ExpressionToken::Op(BinaryOperator::Subtract) => {
                let value = self.expression(SIGN, evaluates)?;
                if evaluates { value::negate(value) } else { Ok(value) }
            }
            ExpressionToken::Op(BinaryOperator::Add) => {
                let value = self.expression(SIGN, evaluates)?;
                if evaluates { value::to_float(value).map(|_| value) } else { Ok(value) }
            }
            ExpressionToken::Bang => self.negation(SIGN, evaluates),
            ExpressionToken::Not => self.negation(NOT, evaluates),
            ExpressionToken::Open => {
                let value = self.expression(0, evaluates)?;
                self.expect_close()?;
                Ok(value)
            }
            ExpressionToken::Name(name) => self.constant_or_call(&name, evaluates),
            other => {
                self.next -= 1;
                Err(self.error_at_token(format!("a number is missing before {}", other.display())))
            }
        }
    }

    fn negation(&mut self, binds: u8, evaluates: bool) -> Result<Value, String> {
        let value = self.expression(binds, evaluates)?;
        if evaluates {
            value::to_bool(value, "!").map(|truth| Value::Bool(!truth))
        } else {
            Ok(value)
        }
    }

    fn expect_close(&mut self) -> Result<(), String> {
        match self.peek() {
            ExpressionToken::Close => {
                self.next += 1;
                Ok(())
            }
            ExpressionToken::End => Err(self.error_at_token("a \")\" is missing")),
            other => {
                let other = other.display();
                Err(self
                    .error_at_token(format!("a \")\" or an operator is missing before {other}")))
            }
        }
    }

    /// Parses a constant or a function call.
    fn constant_or_call(&mut self, name: &str, evaluates: bool) -> Result<Value, String> {
        if *self.peek() != ExpressionToken::Open {
            if functions::is_function(name) {
                return Err(self
                    .error_at_token(format!("{name} needs its values in parentheses: {name}(2)")));
            }
            return functions::constant(name).ok_or_else(|| functions::unknown_name_message(name));
        }
        if !functions::is_function(name) {
            return Err(functions::unknown_name_message(name));
        }
        self.next += 1;
        if name == "if" {
            return self.conditional(evaluates);
        }
        let mut args = Vec::new();
        if *self.peek() != ExpressionToken::Close {
            args.push(self.expression(0, evaluates)?);
            while *self.peek() == ExpressionToken::Comma {
                self.next += 1;
                args.push(self.expression(0, evaluates)?);
            }
        }
        self.expect_close()?;
        if evaluates { functions::call(name, &args) } else { Ok(Value::Int(0)) }
    }

    fn conditional(&mut self, evaluates: bool) -> Result<Value, String> {
        let condition = self.expression(0, evaluates)?;
        let holds = evaluates && value::to_bool(condition, "if")?;
        self.expect_comma()?;
        let then = self.expression(0, evaluates && holds)?;
        self.expect_comma()?;
        let otherwise = self.expression(0, evaluates && !holds)?;
        self.expect_close()?;
        Ok(if holds { then } else { otherwise })
    }

    fn expect_comma(&mut self) -> Result<(), String> {
        if *self.peek() != ExpressionToken::Comma {
            return Err(self.error_at_token("if takes three values: if(condition, a, b)"));
        }
        self.next += 1;
        Ok(())
    }
}

fn tokenize(text: &str) -> Result<Vec<(ExpressionToken, usize)>, String> {
    let chars: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut index = 0;
    while let Some(&first) = chars.get(index) {
        if first.is_whitespace() {
            index += 1;
            continue;
        }
        let rest = &chars[index..];
        let (token, length) = if first.is_ascii_digit() || first == '.' {
            scan_number(rest)?
        } else if first.is_ascii_alphabetic() || first == '_' || first == 'π' {
            scan_word(rest)
        } else {
            scan_operator(rest).ok_or_else(|| unexpected_character_message(first, index + 1))?
        };
        tokens.push((token, index + 1));
        index += length;
    }
    Ok(tokens)
}

fn scan_number(chars: &[char]) -> Result<(ExpressionToken, usize), String> {
    let digits = |from: usize| chars[from..].iter().take_while(|c| c.is_ascii_digit()).count();
    let mut length = digits(0);
    let mut whole = true;
    if chars.get(length) == Some(&'.') {
        whole = false;
        length += 1 + digits(length + 1);
        if length == 1 {
            return Err("there is a \".\" that is not part of a number: write sqrt(2), not \
                        math.sqrt(2)"
                .into());
        }
    }
    if matches!(chars.get(length), Some('e' | 'E')) {
        let signed = usize::from(matches!(chars.get(length + 1), Some('+' | '-')));
        let start = (length + 1 + signed).min(chars.len());
        let exponent = digits(start);
        if exponent > 0 {
            whole = false;
            length = start + exponent;
        }
    }
    let text: String = chars[..length].iter().collect();
    let excerpt: String = text.chars().take(40).collect();
    let value = if whole {
        text.parse().ok().map(Value::Int).ok_or_else(|| {
            format!(
                "{excerpt} is over the largest whole number, 9223372036854775807: write it with a \
                 decimal point to calculate approximately"
            )
        })?
    } else {
        let number: f64 = text.parse().map_err(|_| format!("{excerpt} is not a number"))?;
        value::checked_float(number, excerpt)?
    };
    Ok((ExpressionToken::Value(value), length))
}

fn scan_word(chars: &[char]) -> (ExpressionToken, usize) {
    let part = |c: &&char| c.is_ascii_alphanumeric() || **c == '_' || **c == 'π';
    let length = chars.iter().take_while(part).count();
    let word = chars[..length].iter().collect::<String>().to_ascii_lowercase();
    let token = match word.as_str() {
        "and" => ExpressionToken::Op(BinaryOperator::And),
        "or" => ExpressionToken::Op(BinaryOperator::Or),
        "not" => ExpressionToken::Not,
        _ => ExpressionToken::Name(word),
    };
    (token, length)
}

fn scan_operator(chars: &[char]) -> Option<(ExpressionToken, usize)> {
    let second = chars.get(1).copied().unwrap_or(' ');
    let op = |op, length| Some((ExpressionToken::Op(op), length));
    match (chars.first()?, second) {
        ('*', '*') => op(BinaryOperator::Power, 2),
        ('/', '/') => op(BinaryOperator::FloorDivide, 2),
        ('=', '=') => op(BinaryOperator::Equal, 2),
        ('!', '=') => op(BinaryOperator::NotEqual, 2),
        ('<', '=') => op(BinaryOperator::LessEqual, 2),
        ('>', '=') => op(BinaryOperator::GreaterEqual, 2),
        ('&', '&') => op(BinaryOperator::And, 2),
        ('|', '|') => op(BinaryOperator::Or, 2),
        ('^', _) => op(BinaryOperator::Power, 1),
        ('*' | '×' | '·', _) => op(BinaryOperator::Multiply, 1),
        ('/' | '÷', _) => op(BinaryOperator::Divide, 1),
        ('%', _) => op(BinaryOperator::Modulo, 1),
        ('+', _) => op(BinaryOperator::Add, 1),
        ('-' | '−', _) => op(BinaryOperator::Subtract, 1),
        ('<', _) => op(BinaryOperator::Less, 1),
        ('>', _) => op(BinaryOperator::Greater, 1),
        ('≠', _) => op(BinaryOperator::NotEqual, 1),
        ('≤', _) => op(BinaryOperator::LessEqual, 1),
        ('≥', _) => op(BinaryOperator::GreaterEqual, 1),
        ('!', _) => Some((ExpressionToken::Bang, 1)),
        ('(', _) => Some((ExpressionToken::Open, 1)),
        (')', _) => Some((ExpressionToken::Close, 1)),
        (',', _) => Some((ExpressionToken::Comma, 1)),
        _ => None,
    }
}

fn unexpected_character_message(character: char, position: usize) -> String {
    let advice = match character {
        '=' => "write == to compare; nothing can be assigned",
        '&' | '|' => "write && for and, || for or",
        '[' | ']' | '{' | '}' => "only ( and ) group",
        '"' | '\'' | '`' => "there are no texts in an expression",
        c if c.is_numeric() => "write numbers with the digits 0 to 9",
        _ => "an expression has numbers, operators and functions like sqrt(2)",
    };
    format!("\"{}\" cannot be read (at character {position}): {advice}", character.escape_debug())
}
