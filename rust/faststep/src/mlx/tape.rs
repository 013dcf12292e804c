//! The graph of a compiled trace, made over other inputs (`native/graph/tape.cpp`).
#![allow(unsafe_code)]

use std::{ffi::c_void, ops::Range, ptr};

use mlx_rs::{error::Result, stop_gradient, Array};

use super::ffi::{
    check, faststep_tape_build, faststep_tape_free, faststep_tape_new, faststep_tape_size, handles,
    is_done, owned, Handle,
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
        // others of their forms, which are never evaluated
        let inputs = inputs.iter().map(stop_gradient);
        let inputs = inputs.collect::<Result<Vec<Array>>>()?;
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
    /// Those in the range `known` are known to have the shapes and dtypes of the function's.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn build(
        &self,
        inputs: &[Handle],
        known: Range<usize>,
    ) -> Result<Option<Vec<Array>>> {
        // SAFETY: a tape, live arrays and their number, and room for as many outputs as it has, each of which is new.
        unsafe {
            let mut outputs = vec![ptr::null_mut(); faststep_tape_size(self.0)];
            let status = faststep_tape_build(
                self.0,
                inputs.as_ptr(),
                inputs.len(),
                known.start,
                known.end,
                outputs.as_mut_ptr(),
            );
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

#[cfg(test)]
mod tests {
    use mlx_rs::transforms::{compile::compile, eval, value_and_grad_with_argnums};

    use super::*;
    use crate::mlx::array;

    // several outputs of one kernel, a constant, an input that is not used, an output that is an input
    fn function(inputs: &[Array]) -> Result<Vec<Array>> {
        let sum = inputs[0].add(&inputs[1])?;
        let product = sum.multiply(Array::from_f32(3.0))?;
        let parts = product.split_equal(2, 0)?;
        let last = parts[0].subtract(&parts[1])?;
        Ok(vec![sum, product, last, inputs[1].clone()])
    }

    fn row(first: f32) -> Array {
        Array::from_slice(&[first, 2.0, 3.0, 5.0], &[4])
    }

    fn values(arrays: &[Array]) -> Result<Vec<Vec<f32>>> {
        eval(arrays)?;
        Ok(arrays.iter().map(|a| a.as_slice().to_vec()).collect())
    }

    #[test]
    fn a_graph_is_that_of_the_function_over_any_inputs() -> Result<()> {
        let mut compiled = compile(function, false);
        let given = [row(1.0), row(-1.0), row(0.0)];
        compiled(&given)?;
        let tape = Tape::of(&mut compiled, &given)?;
        let twice = row(7.0); // one array at two places
        for inputs in [given, [twice.clone(), twice, row(0.0)]] {
            let built = tape.build(&handles(&inputs), 0..0)?.unwrap_or_default();
            assert_eq!(values(&built)?, values(&function(&inputs)?)?);
            assert_eq!(array::id(&built[3]), array::id(&inputs[1]));
        }
        Ok(())
    }

    #[test]
    fn other_shapes_dtypes_and_numbers_of_inputs_have_none() -> Result<()> {
        let mut compiled = compile(function, false);
        let given = [row(1.0), row(-1.0), row(0.0)];
        compiled(&given)?;
        let tape = Tape::of(&mut compiled, &given)?;
        let whole = row(1.0).as_dtype(mlx_rs::Dtype::Int32)?;
        let long = Array::from_slice(&[1.0_f32; 6], &[6]);
        assert!(tape.build(&handles(&given[..2]), 0..0)?.is_none());
        for other in [whole, long] {
            let inputs = [other, row(1.0), row(0.0)];
            assert!(tape.build(&handles(&inputs), 1..3)?.is_none());
        }
        Ok(())
    }

    #[test]
    fn inside_of_a_transformation_tracers_have_none() -> Result<()> {
        let mut compiled = compile(function, false);
        let given = [row(1.0), row(-1.0), row(0.0)];
        compiled(&given)?;
        let tape = Tape::of(&mut compiled, &given)?;
        let tracer = |inputs: &[Array]| -> Result<Vec<Array>> {
            let traced = [inputs[0].clone(), row(1.0), row(0.0)];
            assert!(tape.build(&handles(&traced), 0..3)?.is_none());
            assert!(tape.build(&handles(&given), 0..3)?.is_some());
            Ok(vec![inputs[0].sum(None)?])
        };
        value_and_grad_with_argnums(tracer, &[0])(&[row(2.0)])?;
        Ok(())
    }
}
