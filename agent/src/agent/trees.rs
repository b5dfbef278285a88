//! The verbs of `files2` in the loop: what of a request goes to a worker. The bytes in between flow as in `files`.

use super::{empty_map, Agent, Done, Opened};
use crate::attributes::{self, Attributes, AttributesSource};
use crate::failure::{Failure, Outcome};
use crate::files::{self, become_user};
use crate::glob::Glob;
use crate::msgpack::Value;
use crate::search::SearchSource;
use crate::stream::{Kind, Push};
use crate::tar_in::TarSink;
use crate::tar_out::TarSource;
use crate::transfer::Sink;
use crate::watch::WatchSource;

const EXCLUDES_MAX: usize = 100;

impl Agent {
    pub(super) fn tree(&mut self, id: u32, verb: &[u8], request: &Value) -> Outcome<Opened> {
        let user = self.credentials(request)?;
        let path = files::path(request.get("path"))?;
        let flag = |key: &str, default: bool| request.get(key).bool(default);
        match verb {
            b"tar_out" => {
                let exclude = globs(request.get("exclude"))?;
                Ok(self.open_source(id, user, Some(empty_map()), move || TarSource::open(&path, exclude)))
            }
            b"tar_in" => {
                let (parents, preserve_owner) = (flag("parents", true), flag("preserve_owner", false));
                let push = Push { user: user.clone(), ..Push::default() };
                self.submit(id, move || {
                    let sink = become_user(&user).and_then(|()| TarSink::open(&path, parents, preserve_owner));
                    Done::Opened(sink.map(|sink| Box::new(sink) as Box<dyn Sink>))
                });
                Ok(Opened::Stream(Kind::Push(push)))
            }
            b"search" => {
                // Compiled here: a request does not outlive this call.
                let search = SearchSource::new(&path, request)?;
                Ok(self.open_source(id, user, Some(empty_map()), move || search.begin()))
            }
            b"watch" => {
                let recursive = flag("recursive", true);
                Ok(self.open_source(id, user, None, move || WatchSource::open(&path, recursive)))
            }
            b"link" => {
                let target = request.get("target").bytes().ok_or_else(|| Failure::invalid("target is a path"))?;
                let (symbolic, overwrite) = (flag("symbolic", true), flag("overwrite", false));
                let target = target.to_vec();
                if target.is_empty() || !(symbolic || target.starts_with(b"/")) {
                    return Err(Failure::invalid(
                        "a link's target is a path, of another name of a file an absolute one",
                    ));
                }
                self.submit(id, move || {
                    let made = become_user(&user).and_then(|()| attributes::link(&path, &target, symbolic, overwrite));
                    Done::Answer(made.map(|()| empty_map()))
                });
                Ok(Opened::Stream(Kind::Job))
            }
            _ => {
                let wanted = Attributes::parse(request)?;
                let (follow, recursive) = (flag("follow", true), flag("recursive", false));
                Ok(self.open_source(id, user, None, move || AttributesSource::open(&path, wanted, follow, recursive)))
            }
        }
    }
}

fn globs(value: &Value) -> Outcome<Vec<Glob>> {
    let wrong = || Failure::invalid(format!("exclude is a list of at most {EXCLUDES_MAX} globs"));
    match value {
        Value::Nil => Ok(Vec::new()),
        Value::Array(items) if items.len() <= EXCLUDES_MAX => {
            items.iter().map(|item| item.bytes().ok_or_else(wrong).and_then(Glob::parse)).collect()
        }
        _ => Err(wrong()),
    }
}
