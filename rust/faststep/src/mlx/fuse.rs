//! Fused kernels that write their outputs over their inputs.
//!
//! MLX fuses an update into one kernel, but lets a kernel with several outputs take over no memory. The C++ behind this
//! (`native/graph/fuse.cpp`) rewrites those outputs of a lazy graph, each in place; they mean what they meant.
#![allow(unsafe_code)]

use mlx_rs::{error::Result, Array};

use super::ffi::{
    check, faststep_blocks, faststep_blocks_computed, faststep_fuse, faststep_fuse_casts,
    faststep_kinds, handles,
};

/// Let the fused kernels that compute these arrays cast their inputs themselves, where that makes them larger: where MLX has a
/// kernel of its own for it, because it would be too deep in theirs (`native/graph/casts.cpp`).
///
/// # Errors
/// When there is no memory for the graph.
pub(crate) fn casts<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let handles = handles(arrays);
    // SAFETY: as in `in_place`.
    check(unsafe { faststep_fuse_casts(handles.as_ptr(), handles.len()) })
}

/// Let the fused kernels of a graph that MLX has compiled be computed in blocks until they are in a library (`native/cpu/blocks`).
///
/// # Errors
/// When there is no memory for the graph.
pub(crate) fn in_blocks(arrays: &[Array]) -> Result<()> {
    let handles = handles(arrays);
    // SAFETY: as in `in_place`.
    check(unsafe { faststep_blocks(handles.as_ptr(), handles.len()) })
}

/// The number of kernels that the calling thread has had computed in blocks.
pub(crate) fn computed_in_blocks() -> usize {
    // SAFETY: no conditions.
    unsafe { faststep_blocks_computed() }
}

/// Let the fused kernels that compute these arrays take over the memory of inputs that nobody else holds when they run.
///
/// # Errors
/// When there is no memory for the graph.
pub(crate) fn in_place<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let handles = handles(arrays);
    // SAFETY: live arrays, which no other thread has yet, and their number.
    check(unsafe { faststep_fuse(handles.as_ptr(), handles.len()) })
}

/// Number the kernels that compute each of the arrays from those that are known: arrays of the same kernels share a number.
///
/// # Errors
/// When there is no memory to look at the graph.
pub(crate) fn kinds<'a>(
    arrays: &[&Array],
    known: impl IntoIterator<Item = &'a Array>,
) -> Result<Vec<usize>> {
    let (all, known) = (handles(arrays.iter().copied()), handles(known));
    let mut kinds = vec![0; all.len()];
    // SAFETY: live arrays and their numbers, and as many numbers to write to as there are arrays.
    let status = unsafe {
        faststep_kinds(
            all.as_ptr(),
            all.len(),
            known.as_ptr(),
            known.len(),
            kinds.as_mut_ptr(),
        )
    };
    check(status)?;
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use mlx_rs::{memory, transforms::compile::compile, transforms::eval, Dtype};

    use super::*;
    use crate::mlx::array;

    const SIZE: i32 = 1 << 20;
    const ORDERS: [[usize; 3]; 6] = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];

    // first moment, second moment and the weight computed from both: one kernel with three outputs
    fn update(inputs: &[Array]) -> Result<Vec<Array>> {
        let m = inputs[0].add(&inputs[1])?;
        let v = m.multiply(&inputs[2])?;
        let w = v.subtract(&inputs[0])?;
        Ok(vec![m, v, w])
    }

    /// One test at a time: MLX counts the memory of the whole process.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alone() -> MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inputs() -> Result<Vec<Array>> {
        let inputs =
            [1.0, 2.0, 3.0].map(|value| Array::full::<f32>(&[SIZE], Array::from_f32(value)));
        let inputs = inputs.into_iter().collect::<Result<Vec<_>>>()?;
        eval(&inputs)?;
        Ok(inputs)
    }

    fn lazy(given: &[Array]) -> Result<Vec<Array>> {
        let outputs = compile(update, false)(given)?;
        in_place(&outputs)?;
        Ok(outputs)
    }

    fn value(array: &Array) -> Result<f32> {
        Ok(array.max(None)?.item_exact())
    }

    #[test]
    fn outputs_mean_the_same_in_whatever_order_they_are_computed() -> Result<()> {
        let _alone = alone();
        for order in ORDERS {
            let outputs = lazy(&inputs()?)?;
            for at in order {
                eval([&outputs[at]])?;
                assert!((value(&outputs[at])? - [3.0, 9.0, 8.0][at]).abs() < 1e-6);
            }
            let outputs = lazy(&inputs()?)?;
            eval(order.map(|at| &outputs[at]))?;
            // through the arrays computed from them, some of which are shared
            let outputs = lazy(&inputs()?)?;
            let [a, b, c] = order.map(|at| &outputs[at]);
            let sum = a.sum(None)?.add(b.exp()?.add(c)?.max(None)?)?;
            eval([&sum, c, a, b])?;
            assert!((value(&outputs[2])? - 8.0).abs() < 1e-6);
        }
        Ok(())
    }

    // as an update in half precision ends: one operation more than MLX fuses
    fn deep(inputs: &[Array]) -> Result<Vec<Array>> {
        let scaled = inputs[0].multiply(&inputs[1])?;
        let mut x = scaled.as_dtype(Dtype::Bfloat16)?;
        for _ in 0..9 {
            x = x.add(&inputs[2])?;
        }
        Ok(vec![x])
    }

    #[test]
    fn casts_are_part_of_the_kernel_that_reads_them() -> Result<()> {
        let _alone = alone();
        let row: Vec<f32> = (0_i16..4096).map(|i| f32::from(i) / 512.0).collect();
        let row = Array::from_slice(&row, &[4096]).as_dtype(Dtype::Bfloat16)?;
        let given = [row.clone(), Array::from_f32(0.3), row];
        eval(&given)?;
        let mut traced = compile(deep, false);
        let wanted = traced(&given)?;
        let before = array::operations(&wanted[0]);
        for _ in 0..2 {
            let got = traced(&given)?;
            casts(&got)?;
            assert!(array::operations(&got[0]) < before);
            let same = got[0].eq(&wanted[0])?.all(None)?;
            assert!(same.item_exact::<bool>());
        }
        Ok(())
    }

    #[test]
    fn what_somebody_holds_keeps_its_value() -> Result<()> {
        let _alone = alone();
        for held in 0..3 {
            let given = inputs()?;
            let kept = given[held].clone();
            let outputs = lazy(&given)?;
            drop(given);
            eval(&outputs)?;
            assert!((value(&kept)? - [1.0, 2.0, 3.0][held]).abs() < 1e-6);
            assert!((value(&outputs[2])? - 8.0).abs() < 1e-6);
        }
        Ok(())
    }

    #[test]
    fn nothing_is_allocated() -> Result<()> {
        let _alone = alone();
        let outputs = lazy(&inputs()?)?;
        let before = memory::active_memory()?;
        memory::reset_peak_memory()?;
        eval(&outputs)?;
        assert!(memory::peak_memory()? < before + 4 * SIZE as usize);
        Ok(())
    }
}
