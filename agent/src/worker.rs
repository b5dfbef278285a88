//! Threads for file calls, which can block; made when first needed and kept. Not on the path of an exec.

use crate::sys;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

const THREADS_MAX: usize = 4;
const STACK_BYTES: usize = 256 * 1024;

type Job<T> = Box<dyn FnOnce() -> T + Send>;

struct State<T> {
    jobs: VecDeque<(u64, Job<T>)>,
    done: Vec<(u64, T)>,
    idle: usize,
    threads: usize,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
    /// Readable when something is done.
    signal: OwnedFd,
}

pub struct Workers<T>(Arc<Shared<T>>);

impl<T: Send + 'static> Workers<T> {
    pub fn new() -> io::Result<Self> {
        let state = State { jobs: VecDeque::new(), done: Vec::new(), idle: 0, threads: 0 };
        Ok(Self(Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new(), signal: sys::eventfd()? })))
    }

    pub fn fd(&self) -> RawFd {
        self.0.signal.as_raw_fd()
    }

    /// Run `job` in a thread; what it answers comes out of `done` with `token`.
    pub fn submit(&self, token: u64, job: impl FnOnce() -> T + Send + 'static) {
        let mut state = self.0.lock();
        state.jobs.push_back((token, Box::new(job)));
        if state.jobs.len() > state.idle && state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || shared.work());
            if thread.is_ok() {
                state.threads += 1;
            } else if state.threads == 0 {
                // No memory for a thread: rather slow than never.
                drop(state);
                self.0.run_one();
                return;
            }
        }
        drop(state);
        self.0.wake.notify_one();
    }

    pub fn done(&self) -> Vec<(u64, T)> {
        let mut count = [0; 8];
        let _ = sys::read(self.fd(), &mut count);
        std::mem::take(&mut self.0.lock().done)
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut state = self.lock();
            state.idle += 1;
            while state.jobs.is_empty() {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.idle -= 1;
            drop(state);
            self.run_one();
        }
    }

    fn run_one(&self) {
        let next = self.lock().jobs.pop_front();
        if let Some((token, job)) = next {
            let answer = job();
            self.lock().done.push((token, answer));
            let _ = sys::write(self.signal.as_raw_fd(), &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_job_does_not_hold_up_the_next() {
        let workers = Workers::new().unwrap();
        let (reader, writer) = sys::pipe().unwrap();
        let fd = reader.as_raw_fd();
        workers.submit(1, move || sys::read(fd, &mut [0; 1]).unwrap());
        workers.submit(2, || 42);
        let epoll = sys::Epoll::new().unwrap();
        epoll.add(workers.fd(), sys::IN, 0).unwrap();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 1];
        epoll.wait(&mut events, -1);
        assert_eq!(workers.done(), [(2, 42)]);
        sys::write(writer.as_raw_fd(), b"x").unwrap();
        epoll.wait(&mut events, -1);
        assert_eq!(workers.done(), [(1, 1)]);
    }
}
