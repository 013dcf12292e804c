//! A simulator of MLX's evaluation: what a lazy graph would allocate and free, and when, without evaluating anything.
//!
//! The C++ behind it (`native/simulator/simulator.hpp`) reads the graph as MLX has it. It keeps handles to the graph's arrays as long
//! as the simulation lives, so that nothing of it must be evaluated meanwhile; it changes none of them.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void, CStr};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

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
        let memory = unsafe { faststep_simulator_device(&raw mut device) };
        (device, (memory > 0).then_some(memory))
    }

    /// Whether it is a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.gpu != 0
    }
}

extern "C" {
    fn faststep_simulator_device(device: *mut Device) -> usize;
    fn faststep_simulator_new(device: *const Device) -> *mut c_void;
    fn faststep_simulator_delete(simulator: *mut c_void);
    fn faststep_simulator_error(simulator: *mut c_void) -> *const c_char;
    fn faststep_simulator_begin(
        simulator: *mut c_void,
        given: *const *const c_void,
        givens: usize,
        roots: *const *const c_void,
        count: usize,
    ) -> c_int;
    fn faststep_simulator_hold(
        simulator: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
        handles: c_int,
    ) -> c_int;
    fn faststep_simulator_keep(
        simulator: *mut c_void,
        slot: usize,
        arrays: *const *const c_void,
        count: usize,
    ) -> c_int;
    fn faststep_simulator_evaluate(
        simulator: *mut c_void,
        arrays: *const *const c_void,
        count: usize,
        done: *mut usize,
    ) -> c_int;
    fn faststep_simulator_carry(
        simulator: *mut c_void,
        input: *const c_void,
        output: *const c_void,
    ) -> c_int;
    fn faststep_simulator_wait(simulator: *mut c_void, done: usize);
    fn faststep_simulator_limit(simulator: *mut c_void, bytes: usize);
    fn faststep_simulator_read(simulator: *mut c_void, reading: *mut Reading);
}

/// What a simulation has come to, in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Reading {
    /// What is in use now.
    pub active: usize,
    /// The most that was in use at once since this was last asked.
    pub peak: usize,
    /// Freed buffers that MLX keeps.
    pub cache: usize,
}

/// What is held between evaluations.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Slot {
    /// What the last call returned.
    Returned,
    /// A window for an update that may fail.
    Window,
}

/// The evaluations of a step, one after another.
#[derive(Debug)]
pub struct Simulator(*mut c_void);

fn pointers<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Vec<*const c_void> {
    let arrays = arrays.into_iter();
    arrays
        .map(|array| array.as_ptr().ctx.cast_const())
        .collect()
}

impl Simulator {
    /// Begin on that device.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        // SAFETY: a live struct of the layout that C++ expects.
        Self(unsafe { faststep_simulator_new(device) })
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a live simulation, whose message ends with a NUL and stays until its next call.
        let message = unsafe { CStr::from_ptr(faststep_simulator_error(self.0)) };
        Err(Exception::custom(message.to_string_lossy()))
    }

    /// The graph of `roots` is built, from the values of `given` and from constants.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn begin(&mut self, given: &[&Array], roots: &[&Array]) -> Result<()> {
        let given = pointers(given.iter().copied());
        let roots = pointers(roots.iter().copied());
        // SAFETY: a live simulation and live arrays, as in all calls below.
        let code = unsafe {
            faststep_simulator_begin(
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
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_hold(self.0, all.as_ptr(), all.len(), 1) };
        self.check(code)
    }

    /// Let go of one handle to each array.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn release(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = pointers(arrays.iter().copied());
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_hold(self.0, all.as_ptr(), all.len(), -1) };
        self.check(code)
    }

    /// Hold the memory of arrays, and let go of what the slot held before.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn keep<'a>(
        &mut self,
        slot: Slot,
        arrays: impl IntoIterator<Item = &'a Array>,
    ) -> Result<()> {
        let all = pointers(arrays);
        // SAFETY: as in `begin`.
        let code =
            unsafe { faststep_simulator_keep(self.0, slot as usize, all.as_ptr(), all.len()) };
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
        // SAFETY: as in `begin`; one number is written.
        let code =
            unsafe { faststep_simulator_evaluate(self.0, all.as_ptr(), all.len(), &raw mut done) };
        self.check(code)?;
        Ok(done)
    }

    /// Put the value of `output` in the place of that of `input`.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn carry(&mut self, input: &Array, output: &Array) -> Result<()> {
        // SAFETY: as in `begin`.
        let code =
            unsafe { faststep_simulator_carry(self.0, input.as_ptr().ctx, output.as_ptr().ctx) };
        self.check(code)
    }

    /// Wait until an evaluation is done.
    pub fn wait(&mut self, done: usize) {
        // SAFETY: as in `begin`.
        unsafe { faststep_simulator_wait(self.0, done) }
    }

    /// Above so much memory, or MLX's limit where there is none, an evaluation waits for what it has handed over.
    pub fn limit(&mut self, limit: Option<usize>) {
        // SAFETY: as in `begin`.
        unsafe { faststep_simulator_limit(self.0, limit.unwrap_or(usize::MAX)) }
    }

    /// What it has come to since this was last asked.
    pub fn read(&mut self) -> Reading {
        let mut reading = Reading::default();
        // SAFETY: as in `begin`; the struct that it fills.
        unsafe { faststep_simulator_read(self.0, &raw mut reading) };
        reading
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used no more.
        unsafe { faststep_simulator_delete(self.0) }
    }
}
