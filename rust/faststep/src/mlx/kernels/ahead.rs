//! Modules that are compiled before MLX needs them, several at a time.
//!
//! MLX compiles one at a time, under a lock of its own. What it will need for a graph is asked for beforehand; by the time
//! that MLX comes to a module, it is compiled, or is being compiled, or MLX's own thread compiles it in place of waiting.
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

/// No more at a time: each takes some hundred megabytes.
const MOST: usize = 16;

/// Jobs by number, each of which is done once, by threads that end when there is nothing left to do.
pub struct Ahead<T: 'static> {
    state: Mutex<State<T>>,
    changed: Condvar,
    begin: fn(), // each thread with it, but for one that takes what is not begun
}

type Job<T> = Box<dyn FnOnce() -> T + Send>;

struct State<T> {
    queue: VecDeque<(u128, Job<T>)>,
    done: HashMap<u128, Option<Arc<T>>>, // of those begun; None: not yet
    workers: usize,
}

impl<T: Send + Sync + 'static> Ahead<T> {
    /// Nothing to do, by threads of which each begins with a function.
    pub fn new(begin: fn()) -> Self {
        Self {
            begin,
            state: Mutex::new(State {
                queue: VecDeque::new(),
                done: HashMap::new(),
                workers: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Have a job done, unless that number has been asked for.
    pub fn ask(&'static self, number: u128, job: impl FnOnce() -> T + Send + 'static) {
        let mut state = self.lock();
        let known = state.queue.iter().any(|(other, _)| *other == number);
        if known || state.done.contains_key(&number) {
            return;
        }
        state.queue.push_back((number, Box::new(job)));
        let most = thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MOST);
        if state.workers < most {
            let worker = thread::Builder::new().name("faststep-kernels".into());
            if worker.spawn(|| self.work()).is_ok() {
                state.workers += 1;
            }
        }
    }

    /// Result of the job of that number, where it has been asked for: done here where no thread has begun it.
    pub fn take(&self, number: u128) -> Option<Arc<T>> {
        let mut state = self.lock();
        if let Some(at) = state.queue.iter().position(|(other, _)| *other == number) {
            let (_, job) = state.queue.remove(at)?;
            drop(state);
            return Some(Arc::new(job()));
        }
        loop {
            match state.done.get(&number)? {
                Some(_) => return state.done.remove(&number).flatten(),
                None => {
                    state = self
                        .changed
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Return whether the job of that number has been done, with a result that is good or has been taken.
    pub fn has(&self, number: u128, is_good: impl Fn(&T) -> bool) -> bool {
        let state = self.lock();
        let waits = state.queue.iter().any(|(other, _)| *other == number);
        let done = state.done.get(&number);
        !waits && done.is_none_or(|done| done.as_deref().is_some_and(is_good))
    }

    /// Leave what nobody has begun, and wait for the rest.
    pub fn end(&self) {
        let mut state = self.lock();
        state.queue.clear();
        while state.workers > 0 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        (self.begin)();
        let mut state = self.lock();
        while let Some((number, job)) = state.queue.pop_front() {
            state.done.insert(number, None);
            drop(state);
            let done = Arc::new(job());
            state = self.lock();
            state.done.insert(number, Some(done));
            self.changed.notify_all();
        }
        state.workers -= 1;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::Ahead;
    use std::{
        cell::Cell,
        sync::{
            atomic::{AtomicUsize, Ordering},
            LazyLock,
        },
        thread,
    };

    thread_local! {
        static BEGUN: Cell<bool> = const { Cell::new(false) };
    }

    static RUN: AtomicUsize = AtomicUsize::new(0);
    static AHEAD: LazyLock<Ahead<u128>> = LazyLock::new(|| Ahead::new(|| BEGUN.set(true)));

    #[test]
    fn every_job_is_done_once() {
        for number in (0..100).chain(0..100) {
            AHEAD.ask(number, move || {
                RUN.fetch_add(1, Ordering::Relaxed);
                let is_own = thread::current().name() == Some("faststep-kernels");
                2 * number + u128::from(is_own != BEGUN.get())
            });
        }
        for number in (0..100).rev() {
            assert_eq!(AHEAD.take(number).as_deref(), Some(&(2 * number)));
        }
        assert_eq!(RUN.load(Ordering::Relaxed), 100);
        assert!(!BEGUN.get(), "only its own threads begin with it");
        assert_eq!(AHEAD.take(7), None, "it has been taken");
        assert_eq!(AHEAD.take(100), None, "it has not been asked for");
        AHEAD.ask(100, || 1);
        AHEAD.end();
        assert!(AHEAD.take(100).is_none_or(|done| *done == 1));
    }
}
