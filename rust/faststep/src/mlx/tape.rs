//! The graph of a compiled trace, made over other inputs (`native/graph/tape.cpp`).
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr};

use mlx_rs::{error::Result, ops::zeros_like, Array};

use super::ffi::{
    check, faststep_tape_build, faststep_tape_free, faststep_tape_new, faststep_tape_size, handles,
    is_done, owned,
};

/// The operations from the inputs of a compiled function to its outputs.
#[derive(Debug)]
pub(crate) struct Tape(*mut c_void);

impl Tape {
    /// Write down a compiled function that has been called with arrays like `inputs`.
    ///
    /// # Errors
    /// Of the function.
    pub(crate) fn of(
        function: &mut dyn FnMut(&[Array]) -> Result<Vec<Array>>,
        inputs: &[Array],
    ) -> Result<Self> {
        // never evaluated
        let inputs = inputs
            .iter()
            .map(zeros_like)
            .collect::<Result<Vec<Array>>>()?;
        let outputs = function(&inputs)?;
        let (inputs, outputs) = (handles(&inputs), handles(&outputs));
        let mut tape = ptr::null_mut();
        // SAFETY: live arrays, and the number of each list.
        check(unsafe {
            faststep_tape_new(
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                &raw mut tape,
            )
        })?;
        Ok(Self(tape))
    }

    /// The outputs over other inputs; `None` where the function would be traced anew for them, or not be compiled.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn build(&self, inputs: &[Array]) -> Result<Option<Vec<Array>>> {
        let inputs = handles(inputs);
        // SAFETY: a tape, live arrays and their number, and room for as many outputs as it has, each of which is new.
        unsafe {
            let mut outputs = vec![ptr::null_mut(); faststep_tape_size(self.0)];
            let status =
                faststep_tape_build(self.0, inputs.as_ptr(), inputs.len(), outputs.as_mut_ptr());
            let done = is_done(status)?;
            Ok(done.then(|| outputs.into_iter().map(|array| owned(array)).collect()))
        }
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        // SAFETY: made by `of`, freed once.
        unsafe { faststep_tape_free(self.0) }
    }
}
