//! Globs over file names, pure: `*` and `?` stay within one name, `**` does not, `[a-z]` and `[!a-z]` are classes.
//!
//! A pattern without `/` is about the last name of a path, one with it about the whole path below the top.

use crate::failure::{Failure, Outcome};

const PATTERN_BYTES_MAX: usize = 1024;

#[derive(Debug)]
enum Token {
    Byte(u8),
    Any,
    Star,
    DoubleStar,
    /// `**/`: nothing, or whole names that end in a slash.
    Directories,
    /// Ranges, and whether it is the others that match.
    Class(Vec<(u8, u8)>, bool),
}

#[derive(Debug)]
pub struct Glob {
    tokens: Vec<Token>,
    whole: bool,
}

impl Glob {
    pub fn parse(pattern: &[u8]) -> Outcome<Self> {
        if pattern.is_empty() || pattern.len() > PATTERN_BYTES_MAX {
            return Err(Failure::invalid(format!("a pattern has 1 to {PATTERN_BYTES_MAX} bytes")));
        }
        let pattern = pattern.strip_prefix(b"/").unwrap_or(pattern);
        let pattern = pattern.strip_suffix(b"/").unwrap_or(pattern);
        let (mut tokens, mut at) = (Vec::new(), 0);
        while let Some(&byte) = pattern.get(at) {
            at += 1;
            tokens.push(match byte {
                b'?' => Token::Any,
                b'*' if pattern.get(at) == Some(&b'*') => {
                    let begins_a_name = at == 1 || pattern[at - 2] == b'/';
                    at += 1;
                    if begins_a_name && pattern.get(at) == Some(&b'/') {
                        at += 1;
                        Token::Directories
                    } else {
                        Token::DoubleStar
                    }
                }
                b'*' => Token::Star,
                b'[' => match class(&pattern[at..]) {
                    Some((token, length)) => {
                        at += length;
                        token
                    }
                    None => Token::Byte(b'['),
                },
                b'\\' if at < pattern.len() => {
                    at += 1;
                    Token::Byte(pattern[at - 1])
                }
                other => Token::Byte(other),
            });
        }
        Ok(Self { tokens, whole: pattern.contains(&b'/') })
    }

    /// Whether it means `path`, which is relative to the top.
    pub fn matches(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
        self.run(if self.whole { path } else { name })
    }

    /// All tokens at once over the text: no pattern can make it slow.
    fn run(&self, text: &[u8]) -> bool {
        let end = self.tokens.len();
        let mut states = vec![false; end + 1];
        states[0] = true;
        let mut entered = states.clone();
        self.skip_stars(&mut states, &mut entered);
        for &byte in text {
            // `entered`: reached by this byte; `stayed`: a star that has taken it.
            let (mut entered, mut stayed) = (vec![false; end + 1], vec![false; end + 1]);
            for (at, token) in self.tokens.iter().enumerate().filter(|(at, _)| states[*at]) {
                match token {
                    Token::DoubleStar => stayed[at] = true,
                    Token::Directories => {
                        stayed[at] = true;
                        entered[at + 1] |= byte == b'/';
                    }
                    Token::Star => stayed[at] |= byte != b'/',
                    Token::Any => entered[at + 1] |= byte != b'/',
                    Token::Byte(wanted) => entered[at + 1] |= byte == *wanted,
                    Token::Class(ranges, others) => {
                        let within = ranges.iter().any(|(low, high)| (*low..=*high).contains(&byte));
                        entered[at + 1] |= byte != b'/' && within != *others;
                    }
                }
            }
            states = entered.iter().zip(&stayed).map(|(a, b)| *a || *b).collect();
            self.skip_stars(&mut states, &mut entered);
        }
        states[end]
    }

    /// A star may match nothing; `entered` are the places a byte has just led to.
    fn skip_stars(&self, states: &mut [bool], entered: &mut [bool]) {
        for (at, token) in self.tokens.iter().enumerate() {
            let nothing = match token {
                Token::Star | Token::DoubleStar => states[at],
                Token::Directories => entered[at],
                _ => false,
            };
            if nothing {
                (states[at + 1], entered[at + 1]) = (true, true);
            }
        }
    }
}

/// The class that follows a `[`, and its length; None when it is never closed.
fn class(pattern: &[u8]) -> Option<(Token, usize)> {
    let others = matches!(pattern.first(), Some(b'!' | b'^'));
    let (mut ranges, mut at) = (Vec::new(), usize::from(others));
    loop {
        let low = *pattern.get(at)?;
        if low == b']' && !ranges.is_empty() {
            return Some((Token::Class(ranges, others), at + 1));
        }
        let high = match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(high)) if *high != b']' => {
                at += 2;
                *high
            }
            _ => low,
        };
        ranges.push((low, high));
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_a_shell_means() {
        for (pattern, path, wanted) in [
            ("*.py", "a/b/x.py", true),
            ("*.py", "x.pyc", false),
            ("a/*.py", "a/x.py", true),
            ("a/*.py", "a/b/x.py", false),
            ("a/**/x.py", "a/b/c/x.py", true),
            ("a/**/x.py", "a/x.py", true),
            ("**/x.py", "x.py", true),
            ("**/x.py", "yx.py", false),
            ("a/**", "a/b/c", true),
            ("?.[ch]", "x.c", true),
            ("?.[!ch]", "x.c", false),
            ("[]]", "]", true),
            ("[a-c]x", "bx", true),
            ("[a", "[a", true),
            ("\\*", "*", true),
            ("\\*", "x", false),
            ("/a/", "a", true),
            (".git", "x/.git", true),
        ] {
            assert_eq!(Glob::parse(pattern.as_bytes()).unwrap().matches(path.as_bytes()), wanted, "{pattern} {path}");
        }
        assert!(Glob::parse(b"*\xff").unwrap().matches(b"a\xff"));
        assert!(Glob::parse(b"").is_err() && Glob::parse(&[b'a'; 2000]).is_err());
    }

    #[test]
    fn no_pattern_is_slow() {
        let pattern = "*a".repeat(300);
        assert!(!Glob::parse(pattern.as_bytes()).unwrap().matches(&[b'a'; 255]));
    }
}
