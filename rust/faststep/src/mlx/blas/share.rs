//! Work in chunks, shared with threads that sleep while there is none.
//!
//! Whoever has work takes its chunks one after the other, and so do the helpers that have time: a chunk belongs to who
//! first asks for it. The owner waits only for chunks that a helper has begun. On a busy machine a helper may be
//! kept from the processor in the midst of one; what that costs the owner is measured, and no work is shared for a
//! while after it, so that little is lost whatever else runs.
//!
//! A long job is one in which a helper stays (`units.rs`): while it finds nothing to do there, it helps with chunks.
use std::{
    collections::VecDeque,
    hint, mem, process,
    sync::{
        atomic::{AtomicU64, AtomicUsize, Ordering},
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Factor of a loss by sharing work: for so many times the lost time none is shared.
const REST: u32 = 50;
/// The time for which the owner polls the last chunks before it sleeps: less than waking up takes.
const LOOK: Duration = Duration::from_micros(20);
/// The time for which a helper polls for the next work before it sleeps: the products of one step follow each other
/// closely, and waking up takes as long as many a chunk.
const POLL: Duration = Duration::from_micros(200);

/// The function that computes a chunk, by its number.
pub type Chunk<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads that help with the chunks of others' work.
pub struct Helpers {
    process: u32,
    begin: Instant,
    rests: AtomicU64,     // until then, in nanoseconds after `begin`
    offers: AtomicUsize,  // made so far
    idle: AtomicUsize,    // helpers that look for work, or sleep
    waiting: AtomicUsize, // threads in a long job that look for work
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    asleep: usize,
}

impl Queue {
    /// The job that has waited longest of those that fit and have chunks left.
    fn first(&self, fits: impl Fn(&Job) -> bool) -> Option<Arc<Job>> {
        let left = |job: &&Arc<Job>| job.next.load(Ordering::Relaxed) < job.count && fits(job);
        self.jobs.iter().find(left).cloned()
    }
}

struct Job {
    chunk: &'static Chunk<'static>,
    count: usize,
    is_long: bool,
    next: AtomicUsize,
    done: AtomicUsize,
    owner: Thread,
}

impl Job {
    /// Take chunks as long as there are some; how many that were.
    fn work(&self) -> usize {
        let mut taken = 0;
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            if at >= self.count {
                return taken;
            }
            (self.chunk)(at);
            taken += 1;
            // Release: the chunk's writes are visible to a thread that reads `done`
            if self.done.fetch_add(1, Ordering::Release) + 1 == self.count {
                self.owner.unpark();
            }
        }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.count
    }

    fn wait(&self) {
        let begin = Instant::now();
        while !self.is_done() && begin.elapsed() < LOOK {
            hint::spin_loop();
        }
        while !self.is_done() {
            thread::park();
        }
    }
}

impl Helpers {
    /// Make the list, with no thread yet.
    pub fn new() -> &'static Self {
        Box::leak(Box::new(Self {
            process: process::id(),
            begin: Instant::now(),
            rests: AtomicU64::new(0),
            offers: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
            wake: Condvar::new(),
        }))
    }

    /// Start so many threads, or as many of them as the system gives.
    pub fn start(&'static self, count: usize) {
        for _ in 0..count {
            let thread = thread::Builder::new().name("faststep-blas".to_owned());
            self.idle.fetch_add(1, Ordering::Relaxed);
            if thread.spawn(|| self.help()).is_err() {
                self.idle.fetch_sub(1, Ordering::Relaxed);
                break;
            }
        }
    }

    /// Return whether they are threads of this process: those of a parent are not there after a fork.
    pub fn are_here(&self) -> bool {
        self.process == process::id()
    }

    /// Return whether work is shared by now, and there is somebody to share it with.
    pub fn are_rested(&self) -> bool {
        self.idle.load(Ordering::Relaxed) > 0 && self.has_rested()
    }

    /// Return whether work is shared by now with a thread that waits for it awake.
    pub fn are_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.has_rested()
    }

    fn has_rested(&self) -> bool {
        self.now() >= self.rests.load(Ordering::Relaxed)
    }

    /// Do all chunks; none is under way any more when this returns.
    pub fn share(&self, count: usize, chunk: &Chunk<'_>) {
        let begin = Instant::now();
        let (taken, worked) = self.finish(count, chunk, false);
        self.account(worked, begin.elapsed(), taken, count);
    }

    /// Do the same with a long job, for which nobody rests.
    pub fn share_long(&self, count: usize, chunk: &Chunk<'_>) {
        self.finish(count, chunk, true);
    }

    // the chunks that the owner has done itself, and the time of those
    #[allow(unsafe_code)]
    fn finish(&self, count: usize, chunk: &Chunk<'_>, is_long: bool) -> (usize, Duration) {
        // SAFETY: the helpers call it only before this returns.
        let chunk = unsafe { mem::transmute::<&Chunk<'_>, &'static Chunk<'static>>(chunk) };
        let job = Arc::new(Job {
            chunk,
            count,
            is_long,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            owner: thread::current(),
        });
        let begin = Instant::now();
        self.offer(&job);
        let taken = job.work();
        let worked = begin.elapsed();
        self.withdraw(&job);
        job.wait();
        (taken, worked)
    }

    /// Help with chunks until `is_over`, which has to be quick.
    pub fn help_until(&self, is_over: &dyn Fn() -> bool) {
        self.start_waiting();
        let mut seen = self.offers.load(Ordering::Relaxed).wrapping_sub(1); // of jobs before this there may be chunks left
        let mut begin = Instant::now();
        while !is_over() {
            let offers = self.offers.load(Ordering::Relaxed);
            if offers != seen {
                seen = offers;
                let job = self.queue().first(|job| !job.is_long);
                if let Some(job) = job {
                    self.stop_waiting();
                    job.work();
                    self.start_waiting();
                    begin = Instant::now();
                }
            } else if begin.elapsed() < LOOK {
                hint::spin_loop();
            } else {
                thread::yield_now(); // to whoever else wants this processor
            }
        }
        self.stop_waiting();
    }

    fn start_waiting(&self) {
        self.idle.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    fn stop_waiting(&self) {
        self.idle.fetch_sub(1, Ordering::Relaxed);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    fn offer(&self, job: &Arc<Job>) {
        let mut queue = self.queue();
        queue.jobs.push_back(job.clone());
        self.offers.fetch_add(1, Ordering::Relaxed);
        let wanted = queue.asleep.min(job.count - 1);
        drop(queue);
        for _ in 0..wanted {
            self.wake.notify_one();
        }
    }

    fn withdraw(&self, job: &Arc<Job>) {
        self.queue().jobs.retain(|other| !Arc::ptr_eq(other, job));
    }

    // Estimate of the time alone: the owner's mean time per chunk, times all chunks.
    #[allow(clippy::cast_precision_loss)] // numbers of chunks
    fn account(&self, worked: Duration, whole: Duration, taken: usize, count: usize) {
        let alone = worked.as_secs_f64() / taken.max(1) as f64 * count as f64;
        let lost = whole.as_secs_f64() - alone;
        if lost > 0.0 {
            let rest = Duration::from_secs_f64(lost) * REST;
            let until = self.now() + u64::try_from(rest.as_nanos()).unwrap_or(u64::MAX / 2);
            self.rests.fetch_max(until, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn help(&self) {
        loop {
            let job = self.next();
            self.idle.fetch_sub(1, Ordering::Relaxed);
            job.work();
            self.idle.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn next(&self) -> Arc<Job> {
        loop {
            let seen = self.offers.load(Ordering::Acquire);
            if let Some(job) = self.queue().first(|_| true) {
                return job;
            }
            let is_new = || self.offers.load(Ordering::Relaxed) != seen;
            let begin = Instant::now();
            // a machine that has lately kept a thread from its work has others to do it for
            let poll = if self.has_rested() {
                POLL
            } else {
                Duration::ZERO
            };
            while !is_new() && begin.elapsed() < poll {
                hint::spin_loop();
            }
            let mut queue = self.queue();
            // offers are counted by who has the lock: none is missed
            while !is_new() {
                queue.asleep += 1;
                queue = self
                    .wake
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                queue.asleep -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn helpers(count: usize) -> &'static Helpers {
        let helpers = Helpers::new();
        helpers.start(count);
        helpers
    }

    #[test]
    fn each_chunk_is_done_once_whoever_shares_work_at_the_same_time() {
        let helpers = helpers(3);
        let owner = || {
            for round in 0..200 {
                let done: Vec<_> = (0..=round % 9).map(|_| AtomicUsize::new(0)).collect();
                helpers.share(done.len(), &|at| {
                    done[at].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        };
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(owner);
            }
        });
    }

    // the helper that has started a chunk blocks until the owner has finished all others
    #[test]
    fn the_owner_does_what_no_helper_has_begun() {
        let helpers = helpers(1);
        let (helped, rest) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let owner = thread::current().id();
        let (begun, own) = (helped.clone(), rest.clone());
        let chunk = move |_| {
            if thread::current().id() != owner {
                begun.store(true, Ordering::Relaxed);
                while own.load(Ordering::Relaxed) < 7 {
                    thread::yield_now();
                }
                thread::sleep(Duration::from_millis(20));
                return;
            }
            while !begun.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            own.fetch_add(1, Ordering::Relaxed);
        };
        helpers.share(8, &chunk);
        assert!(helped.load(Ordering::Relaxed));
        assert_eq!(rest.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn what_was_lost_is_followed_by_a_rest_and_what_was_won_is_not() {
        let helpers = helpers(1);
        let ms = Duration::from_millis;
        helpers.account(ms(10), ms(11), 2, 4);
        assert!(helpers.are_rested());
        helpers.account(ms(1000), ms(100_000), 2, 4);
        assert!(!helpers.are_rested());
    }
}
