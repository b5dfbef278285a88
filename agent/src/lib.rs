//! The guest agent. A tour:
//!
//! - pure: `frame` (bytes to frames), `msgpack` (maps in frames), `failure` (the errors of the protocol);
//! - the loop: `agent` (one thread, one epoll), `out` (what is queued for the host), `channel` (the byte stream),
//!   `stream` (what one stream is doing), `worker` (threads for file calls, which can block);
//! - verbs: `exec` + `spawn`, `managed` + `log` + `pty`, `ports`, `files` + `transfer` (in workers), `connect`, `restore`, `metrics`;
//! - trees, in workers: `tar_out`, `tar_in` (`tar` is the format, pure), `search`, `watch`, `attributes`, over `walk` and `glob`;
//! - the machine: `init` (PID 1's duties), `devices` (which module is for what), `disks` (which is whose slot's), `cgroup`, `fsfreeze`, `network`, `nested`, `protect`, `volumes`, `users`,
//!   `sys` (system calls std lacks).
//!
//! The rules: nothing polls on a timer, everything has a bound, the exec path starts no thread, and nothing the
//! host sends can make it panic.

pub mod agent;
pub mod attributes;
pub mod cgroup;
pub mod channel;
pub mod connect;
pub mod devices;
pub mod disks;
pub mod exec;
pub mod failure;
pub mod files;
pub mod frame;
pub mod fsfreeze;
pub mod glob;
pub mod init;
pub mod log;
pub mod managed;
pub mod metrics;
pub mod msgpack;
pub mod nested;
pub mod network;
pub mod out;
pub mod ports;
pub mod protect;
pub mod pty;
pub mod quota;
pub mod restore;
pub mod search;
pub mod spawn;
pub mod stream;
pub mod sys;
pub mod tar;
pub mod tar_in;
pub mod tar_out;
pub mod transfer;
pub mod users;
pub mod volumes;
pub mod walk;
pub mod watch;
pub mod worker;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
