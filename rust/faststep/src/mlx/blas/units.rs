//! Units of work, some of which wait for others, by several threads.
//!
//! A captured step is a list of tasks that one thread runs in their order. Many need not wait for the ones before them: the
//! gradient of a layer's weights and that of its input, projections of one input, an optimizer's updates. Whoever has
//! time takes the unit that most work comes behind, of those that wait for nothing any more.
//!
//! # Guarantee
//! A unit begins when all those are done that it waits for; each is run once. The owner runs all units that nobody else has
//! begun.
//!
//! # Rationale
//! The first run is by several threads, in an order as far from that of the list as can be: a capture is verified by it.
//! Then units are timed, by one thread, and stay with one where they are short. On a busy machine a thread may be kept
//! from the processor in the midst of a unit that others wait for: what is lost against one thread is measured, and one
//! alone runs them for a while after it.
use std::{
    cell::{Cell, RefCell},
    collections::BinaryHeap,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Mutex, MutexGuard, PoisonError,
    },
    time::{Duration, Instant},
};

use super::share::Helpers;

/// The runs that are timed, behind the first one.
const TIMED: usize = 3;
/// The seconds that units take by one thread, in the mean, at least; of shorter ones it takes too long to hand them over.
const LEAST: f64 = 5e-6;
/// The part of the time by one thread that several may take; what they take longer is lost.
const WORTH: f64 = 0.95;
/// One run of so many is by one thread: how long that takes may have changed.
const AGAIN: usize = 256;
/// A run behind a longer pause says nothing of several threads: they sleep, and all caches are cold.
const PAUSE: Duration = Duration::from_millis(2);
/// Factor of a loss by several threads: for so many times the lost time there is one.
const REST: u32 = 50;

/// Runs a unit, by its number; false: it has failed, and none behind it is to be run.
pub type Unit<'a> = dyn Fn(usize) -> bool + Sync + 'a;

/// Units, what they wait for, and how long they take.
#[derive(Debug, Default)]
pub struct Units {
    waits: Vec<usize>,       // for so many others, each
    behind: Vec<Vec<usize>>, // that wait for it
    seconds: RefCell<Vec<f64>>,
    order: RefCell<Vec<usize>>, // the more urgent, the higher
    runs: Cell<usize>,
    alone: Cell<Duration>, // of all, by one thread
    rests: Cell<Option<Instant>>,
    last: Cell<Option<Instant>>, // the end of the last run
}

/// A run by several threads.
struct Run<'a> {
    behind: &'a [Vec<usize>],
    unit: &'a Unit<'a>,
    order: &'a [usize],
    waits: Vec<AtomicUsize>,
    ready: Mutex<BinaryHeap<(usize, usize)>>,
    waiting: AtomicUsize, // of those that are ready
    left: AtomicUsize,
    has_failed: AtomicBool,
}

impl Units {
    /// Units with the numbers of those that each waits for, all before it.
    pub fn new<'a>(before: impl ExactSizeIterator<Item = &'a [usize]>) -> Self {
        let mut units = Self {
            behind: vec![Vec::new(); before.len()],
            seconds: RefCell::new(vec![f64::INFINITY; before.len()]),
            ..Self::default()
        };
        for (unit, all) in (0..).zip(before) {
            units.waits.push(all.len());
            for &other in all {
                units.behind[other].push(unit);
            }
        }
        units
    }

    /// Run all units, in their order or by so many threads; whether none has failed.
    pub fn run(&self, helpers: Option<(&'static Helpers, usize)>, unit: &Unit<'_>) -> bool {
        let runs = self.runs.get();
        self.runs.set(runs + 1);
        if let (0, Some((helpers, threads))) = (runs, helpers) {
            let order: Vec<usize> = (0..self.waits.len()).collect();
            return Run::new(self, unit, &order).by_several(helpers, threads);
        }
        if runs <= TIMED {
            let is_good = self.run_timed(unit);
            if is_good && runs == TIMED {
                self.order_by_urgency();
            }
            return is_good;
        }
        let begin = Instant::now();
        let order = self.order.borrow();
        let rests =
            runs.is_multiple_of(AGAIN) || self.rests.get().is_some_and(|until| begin < until);
        let helpers = helpers.filter(|_| !order.is_empty() && !rests);
        let Some((helpers, threads)) = helpers else {
            let is_good = (0..self.waits.len()).all(unit);
            self.alone.set(begin.elapsed());
            self.last.set(Some(Instant::now()));
            return is_good;
        };
        let is_good = Run::new(self, unit, &order).by_several(helpers, threads);
        let now = Instant::now();
        let paused = self
            .last
            .replace(Some(now))
            .is_none_or(|last| begin - last > PAUSE);
        if paused {
            return is_good;
        }
        if let Some(lost) = (now - begin).checked_sub(self.alone.get().mul_f64(WORTH)) {
            self.rests.set(Some(now + lost * REST));
        }
        is_good
    }

    fn run_timed(&self, unit: &Unit<'_>) -> bool {
        let all = Instant::now();
        for (number, seconds) in self.seconds.borrow_mut().iter_mut().enumerate() {
            let begin = Instant::now();
            if !unit(number) {
                return false;
            }
            *seconds = seconds.min(begin.elapsed().as_secs_f64());
        }
        self.alone.set(all.elapsed());
        true
    }

    // The more urgent a unit, the longer the way from it to the end: Hu, Parallel Sequencing and Assembly Line Problems (1961).
    #[allow(clippy::cast_precision_loss)] // the number of units
    fn order_by_urgency(&self) {
        let seconds = self.seconds.borrow();
        if seconds.iter().sum::<f64>() < LEAST * seconds.len() as f64 {
            return;
        }
        let mut ways = vec![0.0; seconds.len()];
        for unit in (0..seconds.len()).rev() {
            let behind = self.behind[unit].iter().map(|&other| ways[other]);
            ways[unit] = seconds[unit] + behind.fold(0.0, f64::max);
        }
        let mut units: Vec<usize> = (0..seconds.len()).collect();
        units.sort_by(|&a, &b| ways[a].total_cmp(&ways[b]));
        let mut order = vec![0; units.len()];
        for (place, &unit) in units.iter().enumerate() {
            order[unit] = place;
        }
        *self.order.borrow_mut() = order;
    }
}

impl<'a> Run<'a> {
    fn new(units: &'a Units, unit: &'a Unit<'a>, order: &'a [usize]) -> Self {
        let free = (0..order.len()).filter(|&unit| units.waits[unit] == 0);
        let ready: BinaryHeap<_> = free.map(|unit| (order[unit], unit)).collect();
        Self {
            behind: &units.behind,
            unit,
            order,
            waits: units.waits.iter().copied().map(AtomicUsize::new).collect(),
            waiting: AtomicUsize::new(ready.len()),
            ready: Mutex::new(ready),
            left: AtomicUsize::new(order.len()),
            has_failed: AtomicBool::new(false),
        }
    }

    fn by_several(&self, helpers: &'static Helpers, threads: usize) -> bool {
        helpers.share_long(threads, &|_| self.take_part(helpers));
        !self.has_failed.load(Ordering::Relaxed)
    }

    fn take_part(&self, helpers: &Helpers) {
        let mut next = self.next();
        while !self.is_over() {
            let Some(unit) = next else {
                helpers.help_until(&|| self.waiting.load(Ordering::Relaxed) > 0 || self.is_over());
                next = self.next();
                continue;
            };
            if !(self.unit)(unit) {
                self.has_failed.store(true, Ordering::Relaxed);
            }
            next = self.done(unit);
        }
    }

    fn is_over(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0 || self.has_failed.load(Ordering::Relaxed)
    }

    fn next(&self) -> Option<usize> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.pop(&mut self.ready())
    }

    // the next one, after this one is done
    fn done(&self, unit: usize) -> Option<usize> {
        // AcqRel: what it has written is visible to whoever runs a unit that has waited for it
        let is_free = |&&other: &&usize| self.waits[other].fetch_sub(1, Ordering::AcqRel) == 1;
        let behind = self.behind[unit].iter();
        let free: Vec<usize> = behind.filter(is_free).copied().collect();
        let next = if free.is_empty() && self.waiting.load(Ordering::Relaxed) == 0 {
            None
        } else {
            let mut ready = self.ready();
            ready.extend(free.iter().map(|&unit| (self.order[unit], unit)));
            self.waiting.store(ready.len(), Ordering::Relaxed);
            self.pop(&mut ready)
        };
        self.left.fetch_sub(1, Ordering::Release);
        next
    }

    fn pop(&self, ready: &mut BinaryHeap<(usize, usize)>) -> Option<usize> {
        let next = ready.pop();
        self.waiting.store(ready.len(), Ordering::Relaxed);
        next.map(|(_, unit)| unit)
    }

    fn ready(&self) -> MutexGuard<'_, BinaryHeap<(usize, usize)>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{hint, thread};

    use super::*;

    const COUNT: usize = 300;

    // each waits for some of the last ten before it
    fn before() -> Vec<Vec<usize>> {
        let waits = |unit: usize| (1..=10.min(unit)).map(move |back| unit - back);
        let some = |unit: usize| waits(unit).filter(move |other| (unit * other) % 7 == 3);
        (0..COUNT).map(|unit| some(unit).collect()).collect()
    }

    fn units(before: &[Vec<usize>]) -> Units {
        Units::new(before.iter().map(Vec::as_slice))
    }

    // that are run by several threads, however long they take
    fn shared(before: &[Vec<usize>]) -> Units {
        let units = units(before);
        units.runs.set(TIMED + 1);
        *units.order.borrow_mut() = (0..before.len()).collect();
        units
    }

    fn team() -> (&'static Helpers, usize) {
        let helpers = Helpers::new();
        helpers.start(3);
        (helpers, 4)
    }

    fn work() {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(20) {
            hint::spin_loop();
        }
    }

    #[test]
    fn each_is_run_once_and_behind_those_that_it_waits_for() {
        let before = before();
        let (units, team) = (shared(&before), team());
        for _ in 0..30 {
            units.rests.set(None);
            let done: Vec<_> = (0..COUNT).map(|_| AtomicUsize::new(0)).collect();
            let is_good = units.run(Some(team), &|unit| {
                let is_done = |&other: &usize| done[other].load(Ordering::Relaxed) == 1;
                let may_begin = before[unit].iter().all(is_done);
                work();
                may_begin && done[unit].fetch_add(1, Ordering::Relaxed) == 0
            });
            assert!(is_good);
            assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn none_is_run_behind_one_that_has_failed() {
        let chains: Vec<Vec<usize>> = (0..COUNT)
            .map(|unit| unit.checked_sub(2).into_iter().collect())
            .collect();
        let (units, team) = (shared(&chains), team());
        let behind = AtomicUsize::new(0);
        let is_good = units.run(Some(team), &|unit| {
            behind.fetch_add(usize::from(unit % 2 == 0 && unit > 100), Ordering::Relaxed);
            work();
            unit != 100
        });
        assert!(!is_good);
        assert_eq!(behind.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn short_ones_stay_with_one_thread() {
        let (units, team) = (units(&before()), team());
        let owner = thread::current().id();
        for run in 0..20 {
            let others = AtomicUsize::new(0);
            units.run(Some(team), &|_| {
                let is_other = run > 0 && thread::current().id() != owner;
                others.fetch_add(usize::from(is_other), Ordering::Relaxed);
                true
            });
            assert_eq!(others.load(Ordering::Relaxed), 0);
        }
    }
}
