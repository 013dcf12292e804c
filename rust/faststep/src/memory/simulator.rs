//! A simulator of MLX's evaluation: what a lazy graph would allocate and free, and when, without evaluating anything.
//!
//! The C++ behind it (`native/simulator/simulator.hpp`) reads the graph as MLX has it. It keeps handles to the graph's
//! arrays as long as the simulation lives, so that nothing of it must be evaluated meanwhile; it changes none of them.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr, slice};

use mlx_rs::{error::Result, Array};

use crate::mlx::ffi::{
    check, faststep_simulator_begin, faststep_simulator_carry, faststep_simulator_delete,
    faststep_simulator_device, faststep_simulator_evaluate, faststep_simulator_hold,
    faststep_simulator_keep, faststep_simulator_limit, faststep_simulator_mark,
    faststep_simulator_new, faststep_simulator_read, faststep_simulator_record,
    faststep_simulator_recorded, faststep_simulator_wait, handle, handles,
};
pub(crate) use crate::mlx::ffi::{Device, Held, Kind, Reading};

impl Device {
    /// The default device, and how much memory it has where that is known.
    ///
    /// # Errors
    /// When MLX does not describe it.
    pub fn current() -> Result<(Self, Option<usize>)> {
        let (mut device, mut memory) = (Self::default(), 0);
        // SAFETY: the struct and the number that it fills.
        check(unsafe { faststep_simulator_device(&raw mut device, &raw mut memory) })?;
        Ok((device, (memory > 0).then_some(memory)))
    }

    /// Return whether it is a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.gpu != 0
    }
}

/// Arrays that are held between evaluations.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Slot {
    /// The outputs of the last call.
    Returned,
    /// A window for an update that may fail.
    Window,
}

/// The evaluations of a step, one after another.
#[derive(Debug)]
pub struct Simulator(*mut c_void);

impl Simulator {
    /// Begin on that device.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(device: &Device) -> Result<Self> {
        let mut simulator = ptr::null_mut();
        // SAFETY: a live struct, and the pointer that is written.
        check(unsafe { faststep_simulator_new(device, &raw mut simulator) })?;
        Ok(Self(simulator))
    }

    /// The graph of `roots` is built, from the values of `given` and from constants.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn begin(&mut self, given: &[&Array], roots: &[&Array]) -> Result<()> {
        let given = handles(given.iter().copied());
        let roots = handles(roots.iter().copied());
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
        check(code)
    }

    /// Hold one more handle to each array.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn hold(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = handles(arrays.iter().copied());
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_hold(self.0, all.as_ptr(), all.len(), 1) };
        check(code)
    }

    /// Let go of one handle to each array.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn release(&mut self, arrays: &[&Array]) -> Result<()> {
        let all = handles(arrays.iter().copied());
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_hold(self.0, all.as_ptr(), all.len(), -1) };
        check(code)
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
        let all = handles(arrays);
        // SAFETY: as in `begin`.
        let code =
            unsafe { faststep_simulator_keep(self.0, slot as usize, all.as_ptr(), all.len()) };
        check(code)
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

    /// The same, on a CPU each operation when the one before is done.
    ///
    /// # Errors
    /// When a primitive refuses its inputs.
    pub fn eval_one_by_one(&mut self, arrays: &[&Array]) -> Result<usize> {
        let done = self.evaluate(arrays, true)?;
        self.wait(done);
        Ok(done)
    }

    /// `async_eval` the arrays; gives what to wait for.
    ///
    /// # Errors
    /// When a primitive refuses its inputs.
    pub fn async_eval(&mut self, arrays: &[&Array]) -> Result<usize> {
        self.evaluate(arrays, false)
    }

    fn evaluate(&mut self, arrays: &[&Array], one_by_one: bool) -> Result<usize> {
        let all = handles(arrays.iter().copied());
        let mut done = 0;
        // SAFETY: as in `begin`; one number is written.
        check(unsafe {
            faststep_simulator_evaluate(
                self.0,
                all.as_ptr(),
                all.len(),
                one_by_one.into(),
                &raw mut done,
            )
        })?;
        Ok(done)
    }

    /// Put the value of `output` in the place of that of `input`.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn carry(&mut self, input: &Array, output: &Array) -> Result<()> {
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_carry(self.0, handle(input), handle(output)) };
        check(code)
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

    /// Return the active and peak bytes since the last reading.
    pub fn read(&mut self) -> Reading {
        let mut reading = Reading::default();
        // SAFETY: as in `begin`; the struct that it fills.
        unsafe { faststep_simulator_read(self.0, &raw mut reading) };
        reading
    }

    /// The memory of arrays is of one kind, that of the operations before them without a kind of another. What has a kind
    /// keeps it.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn mark<'a>(
        &mut self,
        own: Kind,
        before: Kind,
        arrays: impl IntoIterator<Item = &'a Array>,
    ) -> Result<()> {
        let all = handles(arrays);
        // SAFETY: as in `begin`.
        let code = unsafe { faststep_simulator_mark(self.0, own, before, all.as_ptr(), all.len()) };
        check(code)
    }

    /// From now on, write down what is in use while each operation runs; what was written down before is forgotten.
    pub fn record(&mut self) {
        // SAFETY: as in `begin`.
        unsafe { faststep_simulator_record(self.0) }
    }

    /// Return the recorded samples, in the order of evaluation.
    pub fn recorded(&self) -> Vec<Held> {
        let (mut held, mut count) = (ptr::null(), 0);
        // SAFETY: as in `begin`; a pointer and its number are written, and what is there is copied before another call.
        unsafe {
            faststep_simulator_recorded(self.0, &raw mut held, &raw mut count);
            if count == 0 {
                return Vec::new();
            }
            slice::from_raw_parts(held, count).to_vec()
        }
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used no more.
        unsafe { faststep_simulator_delete(self.0) }
    }
}
