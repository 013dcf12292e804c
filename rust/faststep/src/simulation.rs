//! MLX's evaluation of a lazy graph, gone through without evaluating anything: what it would allocate, and when it would
//! free it.
//!
//! The C++ behind it (`native/plan.hpp`) reads the graph as MLX has it. It keeps handles to the graph's arrays as long
//! as the simulation lives, so that nothing of it must be evaluated meanwhile; it changes none of them.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void, CStr};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

/// What a buffer is for; 0 is what none of these are: activations and temporaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Use {
    /// Trainable parameters.
    Parameter = 1,
    /// The optimizer's state.
    State,
    /// Gradients, joined as the parameters are.
    Gradient,
    /// The model's other arrays: frozen parameters and buffers.
    Other,
    /// The batch.
    Batch,
    /// What the process holds beside this step.
    Elsewhere,
}

/// The number of uses.
const USES: usize = 7;

/// Bytes by [`Use`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes([usize; USES]);

impl Bytes {
    /// The bytes in that use.
    #[must_use]
    pub fn of(&self, usage: Use) -> usize {
        self.0[usage as usize]
    }
}

/// The device, as MLX's allocator describes it, in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Device {
    gpu: usize,
    active: usize,
    cached: usize,
    cache_limit: usize,
    memory_limit: usize,
    max_ops: usize,
    max_mega: usize,
}

impl Device {
    /// The default device, and how much memory it has where that is known.
    #[must_use]
    pub fn current() -> (Self, Option<usize>) {
        let mut device = Self::default();
        // SAFETY: the struct that it fills.
        let memory = unsafe { faststep_plan_device(&raw mut device) };
        (device, (memory > 0).then_some(memory))
    }

    /// Whether it is a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.gpu != 0
    }
}

extern "C" {
    fn faststep_plan_device(device: *mut Device) -> usize;
    fn faststep_plan_new(device: *const Device) -> *mut c_void;
    fn faststep_plan_delete(simulation: *mut c_void);
    fn faststep_plan_error(simulation: *mut c_void) -> *const c_char;
    fn faststep_plan_mark(
        simulation: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
        usage: u8,
    ) -> c_int;
    fn faststep_plan_begin(
        simulation: *mut c_void,
        given: *const *const c_void,
        givens: usize,
        roots: *const *const c_void,
        count: usize,
    ) -> c_int;
    fn faststep_plan_hold(
        simulation: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
        handles: c_int,
    ) -> c_int;
    fn faststep_plan_keep(
        simulation: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
    ) -> c_int;
    fn faststep_plan_evaluate(
        simulation: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
        done: *mut usize,
    ) -> c_int;
    fn faststep_plan_carry(
        simulation: *mut c_void,
        input: *const c_void,
        output: *const c_void,
    ) -> c_int;
    fn faststep_plan_wait(simulation: *mut c_void, done: usize);
    fn faststep_plan_reset_peak(simulation: *mut c_void);
    fn faststep_plan_read(simulation: *mut c_void, numbers: *mut usize);
}

/// What a simulation has come to.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// The most memory that was in use at once.
    pub peak: usize,
    /// What was in it.
    pub at_peak: Bytes,
    /// What is in use now.
    pub now: Bytes,
    /// Freed buffers that MLX keeps.
    pub cache: usize,
}

/// The evaluations of a step, one after another.
#[derive(Debug)]
pub struct Simulation(*mut c_void);

fn pointers<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Vec<*const c_void> {
    let arrays = arrays.into_iter();
    arrays
        .map(|array| array.as_ptr().ctx.cast_const())
        .collect()
}

impl Simulation {
    /// Begin on that device.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        // SAFETY: a live struct of the layout that C++ expects.
        Self(unsafe { faststep_plan_new(device) })
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a live simulation, whose message ends with a NUL and stays until its next call.
        let message = unsafe { CStr::from_ptr(faststep_plan_error(self.0)) };
        Err(Exception::custom(message.to_string_lossy()))
    }

    /// Say what arrays are for, from now on.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn mark(&mut self, arrays: &[Array], usage: Use) -> Result<()> {
        let all = pointers(arrays);
        // SAFETY: a live simulation and live arrays, as in all calls below.
        let code = unsafe { faststep_plan_mark(self.0, all.as_ptr(), all.len(), usage as u8) };
        self.check(code)
    }

    /// The graph of `roots` is built, from the values of `given` and from constants.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn begin(&mut self, given: &[&Array], roots: &[&Array]) -> Result<()> {
        let given = pointers(given.iter().copied());
        let roots = pointers(roots.iter().copied());
        // SAFETY: as in `mark`.
        let code = unsafe {
            faststep_plan_begin(
                self.0,
                given.as_ptr(),
                given.len(),
                roots.as_ptr(),
                roots.len(),
            )
        };
        self.check(code)
    }

    /// Hold one more handle to each array.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn hold(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = pointers(arrays.iter().copied());
        // SAFETY: as in `mark`.
        let code = unsafe { faststep_plan_hold(self.0, all.as_ptr(), all.len(), 1) };
        self.check(code)
    }

    /// Let go of one handle to each array.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn release(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = pointers(arrays.iter().copied());
        // SAFETY: as in `mark`.
        let code = unsafe { faststep_plan_hold(self.0, all.as_ptr(), all.len(), -1) };
        self.check(code)
    }

    /// Hold the memory of arrays, and let go of what was held so before.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn keep(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = pointers(arrays.iter().copied());
        // SAFETY: as in `mark`.
        let code = unsafe { faststep_plan_keep(self.0, all.as_ptr(), all.len()) };
        self.check(code)
    }

    /// `eval` the arrays.
    ///
    /// # Errors
    /// When a primitive refuses its inputs.
    pub fn eval(&mut self, arrays: &[&Array]) -> Result<()> {
        let done = self.async_eval(arrays)?;
        self.wait(done);
        Ok(())
    }

    /// `async_eval` the arrays; gives what to wait for.
    ///
    /// # Errors
    /// When a primitive refuses its inputs.
    pub fn async_eval(&mut self, arrays: &[&Array]) -> Result<usize> {
        let all = pointers(arrays.iter().copied());
        let mut done = 0;
        // SAFETY: as in `mark`; one number is written.
        let code =
            unsafe { faststep_plan_evaluate(self.0, all.as_ptr(), all.len(), &raw mut done) };
        self.check(code)?;
        Ok(done)
    }

    /// Put the value of `output` in the place of that of `input`.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn carry(&mut self, input: &Array, output: &Array) -> Result<()> {
        // SAFETY: as in `mark`.
        let code = unsafe { faststep_plan_carry(self.0, input.as_ptr().ctx, output.as_ptr().ctx) };
        self.check(code)
    }

    /// Wait until an evaluation is done.
    pub fn wait(&mut self, done: usize) {
        // SAFETY: as in `mark`.
        unsafe { faststep_plan_wait(self.0, done) }
    }

    /// Begin anew to look for a peak.
    pub fn reset_peak(&mut self) {
        // SAFETY: as in `mark`.
        unsafe { faststep_plan_reset_peak(self.0) }
    }

    /// What it has come to.
    #[must_use]
    pub fn read(&self) -> Reading {
        let mut numbers = [0; 2 + 2 * USES];
        // SAFETY: as in `mark`; so many numbers are written.
        unsafe { faststep_plan_read(self.0, numbers.as_mut_ptr()) };
        let bytes = |at: usize| std::array::from_fn(|usage| numbers[at + usage]);
        Reading {
            peak: numbers[0],
            cache: numbers[1],
            at_peak: Bytes(bytes(2)),
            now: Bytes(bytes(2 + USES)),
        }
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used no more.
        unsafe { faststep_plan_delete(self.0) }
    }
}
