//! Parses and evaluates an expression in one pass.
//!
//! There is no syntax tree: each operator is applied as soon as its right side is known, so that
//! memory and stack are bounded by the nesting of the text, which is limited. Operands that are
//! short-circuited (`false && …`, the branch that `if` does not take) are parsed, but not
//! evaluated.

use super::MAX_LENGTH;
use super::functions;
use super::value::{self, Op, Value};

/// Maximum nesting of parentheses, signs and chains of powers.
const MAX_DEPTH: usize = 100;
/// Binding power of a leading sign or `!`: weaker than a power, stronger than a product.
const SIGN: u8 = 13;
/// Binding power of the word `not`: weaker than a comparison, as in Python.
const NOT: u8 = 5;
/// Binding power of the `!` after a value.
const FACTORIAL: u8 = 17;

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Value(Value),
    Name(String),
    Op(Op),
    /// `!`, before or after a value.
    Bang,
    Not,
    Open,
    Close,
    Comma,
    End,
}

impl Token {
    fn shown(&self) -> String {
        match self {
            Self::Value(value) => format!("\"{value}\""),
            Self::Name(name) => format!("\"{}\"", name.chars().take(40).collect::<String>()),
            Self::Op(op) => format!("\"{}\"", op.sign()),
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
pub fn run(text: &str) -> Result<Value, String> {
    if text.len() > MAX_LENGTH {
        let length = text.len();
        return Err(format!("it is {length} bytes long and at most {MAX_LENGTH} are calculated"));
    }
    if text.trim().is_empty() {
        return Err("it is empty: write something like 2*21".into());
    }
    let mut reader = Reader { tokens: tokens(text)?, next: 0, depth: 0 };
    let value = reader.expression(0, true)?;
    match reader.peek() {
        Token::End => Ok(value),
        Token::Close => Err(reader.at("there is a \")\" without its \"(\"")),
        Token::Comma => {
            Err(reader
                .at("there is a \",\" outside a function: write 1000 and 1.5, not 1,000 or 1,5"))
        }
        other => {
            let other = other.shown();
            Err(reader.at(format!("an operator is missing before {other}: write 2*pi, not 2pi")))
        }
    }
}

struct Reader {
    /// Tokens, each with the position of its first character, counted from 1.
    tokens: Vec<(Token, usize)>,
    next: usize,
    depth: usize,
}

impl Reader {
    fn peek(&self) -> &Token {
        self.tokens.get(self.next).map_or(&Token::End, |(token, _)| token)
    }

    fn take(&mut self) -> Token {
        let token = self.peek().clone();
        self.next += 1;
        token
    }

    /// Returns an error message with the position of the next token.
    fn at(&self, problem: impl std::fmt::Display) -> String {
        match self.tokens.get(self.next) {
            Some((_, place)) => format!("{problem} (at character {place})"),
            None => format!("{problem} (at the end)"),
        }
    }

    /// Parses operators that bind at least this strongly, and evaluates them if `live`.
    fn expression(&mut self, least: u8, live: bool) -> Result<Value, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.at(format!(
                "it nests deeper than {MAX_DEPTH} levels: calculate a part of it first"
            )));
        }
        let mut left = self.operand(live)?;
        loop {
            if *self.peek() == Token::Bang && FACTORIAL >= least {
                self.next += 1;
                if live {
                    left = functions::factorial(value::int(left, "a factorial")?)?;
                }
                continue;
            }
            let Token::Op(op) = *self.peek() else { break };
            let (binds_left, binds_right) = op.binds();
            if binds_left < least {
                break;
            }
            self.next += 1;
            let decided = match op {
                Op::And => live && !value::truth(left, "&&")?,
                Op::Or => live && value::truth(left, "||")?,
                _ => false,
            };
            let right = self.expression(binds_right, live && !decided)?;
            if live && !decided {
                left = value::apply(op, left, right)?;
            }
        }
        self.depth -= 1;
        Ok(left)
    }

    /// Parses one value, with any prefix operators.
    fn operand(&mut self, live: bool) -> Result<Value, String> {
        match self.take() {
            Token::Value(value) => Ok(value),
            Token::Op(Op::Subtract) => {
                let value = self.expression(SIGN, live)?;
                if live { value::negate(value) } else { Ok(value) }
            }
            Token::Op(Op::Add) => {
                let value = self.expression(SIGN, live)?;
                if live { value::float(value).map(|_| value) } else { Ok(value) }
            }
            Token::Bang => self.negation(SIGN, live),
            Token::Not => self.negation(NOT, live),
            Token::Open => {
                let value = self.expression(0, live)?;
                self.close()?;
                Ok(value)
            }
            Token::Name(name) => self.named(&name, live),
            other => {
                self.next -= 1;
                Err(self.at(format!("a number is missing before {}", other.shown())))
            }
        }
    }

    fn negation(&mut self, binds: u8, live: bool) -> Result<Value, String> {
        let value = self.expression(binds, live)?;
        if live { value::truth(value, "!").map(|truth| Value::Truth(!truth)) } else { Ok(value) }
    }

    fn close(&mut self) -> Result<(), String> {
        match self.peek() {
            Token::Close => {
                self.next += 1;
                Ok(())
            }
            Token::End => Err(self.at("a \")\" is missing")),
            other => {
                let other = other.shown();
                Err(self.at(format!("a \")\" or an operator is missing before {other}")))
            }
        }
    }

    /// Parses a constant or a function call.
    fn named(&mut self, name: &str, live: bool) -> Result<Value, String> {
        if *self.peek() != Token::Open {
            if functions::exists(name) {
                return Err(self.at(format!("{name} needs its values in parentheses: {name}(2)")));
            }
            return functions::constant(name).ok_or_else(|| functions::unknown(name));
        }
        if !functions::exists(name) {
            return Err(functions::unknown(name));
        }
        self.next += 1;
        if name == "if" {
            return self.branches(live);
        }
        let mut args = Vec::new();
        if *self.peek() != Token::Close {
            args.push(self.expression(0, live)?);
            while *self.peek() == Token::Comma {
                self.next += 1;
                args.push(self.expression(0, live)?);
            }
        }
        self.close()?;
        if live { functions::call(name, &args) } else { Ok(Value::Int(0)) }
    }

    fn branches(&mut self, live: bool) -> Result<Value, String> {
        let condition = self.expression(0, live)?;
        let holds = live && value::truth(condition, "if")?;
        self.comma()?;
        let then = self.expression(0, live && holds)?;
        self.comma()?;
        let otherwise = self.expression(0, live && !holds)?;
        self.close()?;
        Ok(if holds { then } else { otherwise })
    }

    fn comma(&mut self) -> Result<(), String> {
        if *self.peek() != Token::Comma {
            return Err(self.at("if takes three values: if(condition, a, b)"));
        }
        self.next += 1;
        Ok(())
    }
}

fn tokens(text: &str) -> Result<Vec<(Token, usize)>, String> {
    let chars: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&first) = chars.get(at) {
        if first.is_whitespace() {
            at += 1;
            continue;
        }
        let rest = &chars[at..];
        let (token, length) = if first.is_ascii_digit() || first == '.' {
            number(rest)?
        } else if first.is_ascii_alphabetic() || first == '_' || first == 'π' {
            word(rest)
        } else {
            sign(rest).ok_or_else(|| strange(first, at + 1))?
        };
        tokens.push((token, at + 1));
        at += length;
    }
    Ok(tokens)
}

fn number(chars: &[char]) -> Result<(Token, usize), String> {
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
    let shown: String = text.chars().take(40).collect();
    let value = if whole {
        text.parse().ok().map(Value::Int).ok_or_else(|| {
            format!(
                "{shown} is over the largest whole number, 9223372036854775807: write it with a \
                 decimal point to calculate approximately"
            )
        })?
    } else {
        let number: f64 = text.parse().map_err(|_| format!("{shown} is not a number"))?;
        value::finite(number, shown)?
    };
    Ok((Token::Value(value), length))
}

fn word(chars: &[char]) -> (Token, usize) {
    let part = |c: &&char| c.is_ascii_alphanumeric() || **c == '_' || **c == 'π';
    let length = chars.iter().take_while(part).count();
    let word = chars[..length].iter().collect::<String>().to_ascii_lowercase();
    let token = match word.as_str() {
        "and" => Token::Op(Op::And),
        "or" => Token::Op(Op::Or),
        "not" => Token::Not,
        _ => Token::Name(word),
    };
    (token, length)
}

fn sign(chars: &[char]) -> Option<(Token, usize)> {
    let second = chars.get(1).copied().unwrap_or(' ');
    let op = |op, length| Some((Token::Op(op), length));
    match (chars.first()?, second) {
        ('*', '*') => op(Op::Power, 2),
        ('/', '/') => op(Op::FloorDivide, 2),
        ('=', '=') => op(Op::Equal, 2),
        ('!', '=') => op(Op::NotEqual, 2),
        ('<', '=') => op(Op::LessEqual, 2),
        ('>', '=') => op(Op::GreaterEqual, 2),
        ('&', '&') => op(Op::And, 2),
        ('|', '|') => op(Op::Or, 2),
        ('^', _) => op(Op::Power, 1),
        ('*' | '×' | '·', _) => op(Op::Multiply, 1),
        ('/' | '÷', _) => op(Op::Divide, 1),
        ('%', _) => op(Op::Modulo, 1),
        ('+', _) => op(Op::Add, 1),
        ('-' | '−', _) => op(Op::Subtract, 1),
        ('<', _) => op(Op::Less, 1),
        ('>', _) => op(Op::Greater, 1),
        ('≠', _) => op(Op::NotEqual, 1),
        ('≤', _) => op(Op::LessEqual, 1),
        ('≥', _) => op(Op::GreaterEqual, 1),
        ('!', _) => Some((Token::Bang, 1)),
        ('(', _) => Some((Token::Open, 1)),
        (')', _) => Some((Token::Close, 1)),
        (',', _) => Some((Token::Comma, 1)),
        _ => None,
    }
}

fn strange(what: char, place: usize) -> String {
    let advice = match what {
        '=' => "write == to compare; nothing can be assigned",
        '&' | '|' => "write && for and, || for or",
        '[' | ']' | '{' | '}' => "only ( and ) group",
        '"' | '\'' | '`' => "there are no texts in an expression",
        c if c.is_numeric() => "write numbers with the digits 0 to 9",
        _ => "an expression has numbers, operators and functions like sqrt(2)",
    };
    format!("\"{}\" cannot be read (at character {place}): {advice}", what.escape_debug())
}
