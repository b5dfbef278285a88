//! Who is who, from /etc/passwd and /etc/group themselves: a static binary has no NSS. Read again when they change.

use crate::failure::{Failure, Outcome};
use crate::msgpack::Value;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

const FILE_BYTES_MAX: u64 = 1 << 20;
const GROUPS_MAX: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: Vec<u8>,
    pub uid: u32,
    pub gid: u32,
    pub home: Vec<u8>,
    pub shell: Vec<u8>,
    /// Every group it is in, its own one too.
    pub groups: Vec<u32>,
}

struct Group {
    name: Vec<u8>,
    gid: u32,
    members: Vec<u8>,
}

#[derive(Default)]
pub struct Users {
    users: Vec<User>,
    groups: Vec<Group>,
}

/// What tells a changed file: inode, size, change time.
type Stamp = [Option<(u64, u64, i64, i64)>; 2];

fn stamp() -> Stamp {
    ["/etc/passwd", "/etc/group"]
        .map(|path| std::fs::metadata(path).ok().map(|m| (m.ino(), m.size(), m.ctime(), m.ctime_nsec())))
}

/// The tables, re-read when the files have changed.
#[derive(Default)]
pub struct Cache {
    stamp: Stamp,
    users: Users,
}

impl Cache {
    pub fn get(&mut self) -> &Users {
        let now = stamp();
        if self.stamp != now {
            self.users = Users::load();
            self.stamp = now;
        }
        &self.users
    }
}

impl Users {
    pub fn load() -> Self {
        Self::parse(&slurp("/etc/passwd"), &slurp("/etc/group"))
    }

    pub fn parse(passwd: &[u8], group: &[u8]) -> Self {
        let groups: Vec<Group> = lines(group)
            .filter_map(|fields| {
                let gid = number(fields.get(2)?)?;
                Some(Group { name: fields[0].to_vec(), gid, members: fields.get(3).unwrap_or(&&b""[..]).to_vec() })
            })
            .collect();
        let users = lines(passwd)
            .filter_map(|fields| {
                let (uid, gid) = (number(fields.get(2)?)?, number(fields.get(3)?)?);
                let field = |n: usize, default: &str| match fields.get(n) {
                    Some(text) if !text.is_empty() => text.to_vec(),
                    _ => default.into(),
                };
                let mut user = User {
                    name: fields[0].to_vec(),
                    uid,
                    gid,
                    home: field(5, "/"),
                    shell: field(6, "/bin/sh"),
                    groups: vec![gid],
                };
                for group in &groups {
                    let member = group.members.split(|b| *b == b',').any(|name| name == fields[0]);
                    if member && group.gid != gid && user.groups.len() < GROUPS_MAX {
                        user.groups.push(group.gid);
                    }
                }
                Some(user)
            })
            .collect();
        Self { users, groups }
    }

    pub fn by_uid(&self, uid: u32) -> Option<&User> {
        self.users.iter().find(|user| user.uid == uid)
    }

    /// The user of a verb: a name, a number, or the default `user`.
    pub fn find(&self, wanted: &Value) -> Outcome<User> {
        let name = match wanted {
            Value::Nil => b"user",
            Value::Int(uid) => {
                let uid = u32::try_from(*uid).ok().filter(|uid| *uid != u32::MAX);
                return uid
                    .map(|uid| self.number(uid))
                    .ok_or_else(|| Failure::new("no_user", "a uid is 0 to 4294967294"));
            }
            Value::Bytes(name) => *name,
            _ => return Err(Failure::invalid("user is a name or a uid")),
        };
        if let Some(user) = self.users.iter().find(|user| user.name == name) {
            return Ok(user.clone());
        }
        match number(name).filter(|uid| *uid != u32::MAX) {
            Some(uid) => Ok(self.number(uid)),
            None => Err(Failure::new("no_user", format!("there is no user {}", String::from_utf8_lossy(name)))),
        }
    }

    fn number(&self, uid: u32) -> User {
        self.by_uid(uid).cloned().unwrap_or_else(|| User {
            name: uid.to_string().into_bytes(),
            uid,
            gid: uid,
            home: b"/".to_vec(),
            shell: b"/bin/sh".to_vec(),
            groups: vec![uid],
        })
    }

    /// A uid's name, or its digits.
    pub fn user_name(&self, uid: u32) -> Vec<u8> {
        self.by_uid(uid).map_or_else(|| uid.to_string().into_bytes(), |user| user.name.clone())
    }

    pub fn group_name(&self, gid: u32) -> Vec<u8> {
        let group = self.groups.iter().find(|group| group.gid == gid);
        group.map_or_else(|| gid.to_string().into_bytes(), |group| group.name.clone())
    }

    pub fn id_of_user(&self, name: &[u8]) -> Option<u32> {
        self.users.iter().find(|user| user.name == name).map(|user| user.uid)
    }

    pub fn id_of_group(&self, name: &[u8]) -> Option<u32> {
        self.groups.iter().find(|group| group.name == name).map(|group| group.gid)
    }
}

fn slurp(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    bytes
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    bytes
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty() && line[0] != b'#')
        .map(|line| line.split(|b| *b == b':').collect())
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::parse(
            b"root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:\n# no\nbroken\nweb:x:33:33:w:/var/www:/usr/sbin/nologin",
            b"root:x:0:\nuser:x:1000:\nsudo:x:27:user,web\nwww:x:33:web\n",
        )
    }

    #[test]
    fn names_numbers_and_the_default() {
        let users = users();
        let user = users.find(&Value::Nil).unwrap();
        assert_eq!((user.uid, &user.home[..], &user.shell[..]), (1000, &b"/home/user"[..], &b"/bin/sh"[..]));
        assert_eq!(user.groups, [1000, 27]);
        assert_eq!(users.find(&Value::Int(0)).unwrap().name, b"root");
        assert_eq!(users.find(&Value::Bytes(b"33")).unwrap().groups, [33, 27]);
        let stranger = users.find(&Value::Int(4242)).unwrap();
        assert_eq!((stranger.gid, &stranger.home[..]), (4242, &b"/"[..]));
    }

    #[test]
    fn unknown_and_impossible_users_are_refused() {
        for wanted in [Value::Bytes(b"nobody-here"), Value::Int(-1), Value::Int(i64::from(u32::MAX)), Value::Bool(true)]
        {
            assert!(users().find(&wanted).is_err(), "{wanted:?}");
        }
    }

    #[test]
    fn ids_get_names_or_digits() {
        assert_eq!(users().user_name(33), b"web");
        assert_eq!(users().group_name(27), b"sudo");
        assert_eq!(users().user_name(7), b"7");
        assert_eq!((users().id_of_user(b"web"), users().id_of_group(b"sudo")), (Some(33), Some(27)));
        assert_eq!((users().id_of_user(b"7"), users().id_of_group(b"web")), (None, None));
    }
}
