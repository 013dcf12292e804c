//! Operations of a small step, computed by the calling thread in place of the CPU's worker.
//!
//! MLX wakes the worker for most of a small step's operations, which takes longer than to compute them. Here what enqueues
//! tasks calls functions of the package (`native/cpu/caller.cpp`), which run the tasks of one evaluation as they come.
//!
//! # Guarantee
//! The same operations in the same order, by the same code. Whatever is evaluated otherwise, by MLX or another step, goes to
//! the worker as before.
//!
//! # Limits
//! Where functions can be replaced (`rebind.rs`), without a GPU, and on streams that only one thread may use.
//! `FASTSTEP_CALLER=0` leaves all operations to the worker, and no step is captured (`replay.rs`).
#![allow(unsafe_code)]

use std::{
    env,
    ffi::{c_int, CStr},
    ptr,
    sync::{
        atomic::{AtomicU64, Ordering},
        OnceLock,
    },
    time::Instant,
};

use mlx_rs::error::Result;

use super::{
    ffi::{
        faststep_caller_begin, faststep_caller_end, faststep_caller_functions,
        faststep_caller_watch, faststep_caller_watched, is_done,
    },
    kernels::has_cuda,
    rebind::{loaded, Function, Imports, RebindError},
};

/// The scheduler's functions by which tasks are handed to a worker, and the one by which all get their allocator.
const NAMES: [&CStr; 4] = [
    c"_ZN3mlx4core9scheduler9Scheduler7enqueueENS0_6StreamESt8functionIFvvEE",
    c"_ZN3mlx4core9scheduler9Scheduler10wait_eventENS0_6StreamENS0_5EventESt8functionIFvRS4_EE",
    c"_ZN3mlx4core9scheduler9Scheduler12signal_eventENS0_6StreamENS0_5EventESt8functionIFvRS4_EE",
    c"_ZN3mlx4core9allocator9allocatorEv",
];

/// A step that takes more memory keeps the worker busy.
const MAX_BYTES: usize = 1 << 20;

/// Operations may take up to this share of an evaluation: the rest of it would not be shorter by more, beside a worker.
const MAX_SHARE: f64 = 0.35;

/// So many measurements in a row have to say so.
const MAX_SLOW: usize = 3;

/// How often it is measured.
const EVERY: usize = 64;

/// Whether the calling thread computes the evaluations of a part.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Caller {
    evaluations: usize,
    slow: usize,
}

impl Caller {
    /// Hand operations over, and compute them meanwhile where that is worth it. `bytes`: the memory that it takes.
    pub fn evaluate<T>(
        &mut self,
        bytes: Option<usize>,
        hand_over: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let is_small = bytes.is_some_and(|bytes| bytes <= MAX_BYTES);
        if !is_small || self.slow >= MAX_SLOW || !has_replaced() {
            return hand_over();
        }
        let measures = self.slow > 0 || self.evaluations.is_multiple_of(EVERY);
        // SAFETY: all that hands tasks to a worker calls the functions that this is for.
        if !is_done(unsafe { faststep_caller_begin(c_int::from(measures)) })? {
            return hand_over();
        }
        let started = Instant::now();
        let outcome = hand_over();
        let mut busy = 0.0;
        // SAFETY: room for a number.
        let whole = unsafe { faststep_caller_end(&raw mut busy) } != 0;
        if whole {
            self.evaluations += 1;
            if measures {
                let is_slow = busy > MAX_SHARE * started.elapsed().as_secs_f64();
                self.slow = if is_slow { self.slow + 1 } else { 0 };
            }
        }
        outcome
    }
}

/// Watch the memory in use while the calling thread hands tasks to a worker; false where that cannot be done.
pub(super) fn watch() -> bool {
    let can = has_replaced();
    if can {
        // SAFETY: takes nothing; what it writes belongs to the calling thread.
        unsafe { faststep_caller_watch() };
    }
    can
}

/// Watch it no more; the most bytes that have been in use at once.
pub(super) fn watched() -> usize {
    // SAFETY: as above.
    unsafe { faststep_caller_watched() }
}

/// Return whether the functions have been replaced in every library that is linked with libmlx.
pub(super) fn has_replaced() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    static REPLACED: AtomicU64 = AtomicU64::new(0); // when so many libraries had been loaded
    if !CAN.get_or_init(can_replace) {
        return false;
    }
    let now = loaded();
    if REPLACED.load(Ordering::Relaxed) != now {
        if replace().is_err() {
            return false;
        }
        REPLACED.store(now, Ordering::Relaxed);
    }
    true
}

fn can_replace() -> bool {
    let wanted = !has_cuda() && env::var_os("FASTSTEP_CALLER").is_none_or(|value| value != "0");
    let imports = Imports::of_mlx().ok().filter(|_| wanted);
    imports.is_some_and(|imports| NAMES.iter().all(|name| imports.have(name)))
}

fn replace() -> std::result::Result<(), RebindError> {
    let mut functions = [ptr::null_mut(); NAMES.len()];
    // SAFETY: room for as many; the first call comes before anything is replaced.
    unsafe { faststep_caller_functions(functions.as_mut_ptr()) };
    let replacement = |name: &CStr| {
        let at = NAMES.iter().position(|known| *known == name)?;
        Function::new(functions[at])
    };
    Imports::of_mlx_and_users()?.replace(replacement)?;
    Ok(())
}
