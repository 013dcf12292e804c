//! Many arrays joined by one task of the CPU, or by one kernel on CUDA, which sums their squares on its way.
//!
//! MLX joins arrays by a copy for each, and a gradient of a linear layer is the transpose of a product: a few hundred
//! small tasks or kernels a step, each of which costs more to start than to run. The C++ in `native` makes one of them.
#![allow(unsafe_code)]

use std::{ffi::c_int, ptr};

use mlx_rs::{error::Result, ops, Array};

use super::{
    blas,
    ffi::{
        check, faststep_checked, faststep_contiguous, faststep_is_cuda, faststep_join,
        faststep_norm, faststep_order, faststep_paced, faststep_pack, faststep_squares,
        faststep_straight, faststep_sum_of_squares, faststep_wait, handle, handles, is_done, made,
        owned,
    },
    kernels,
};

/// Largest number of tensors of one kernel: their pointers are its parameters, of which 4 KB are guaranteed.
pub const MAX_PARTS: usize = 448;
/// Kernels are compiled for these numbers of tensors, and called with fewer.
const SLOTS: [usize; 2] = [32, MAX_PARTS];

/// Return whether arrays are computed by CUDA unless told otherwise.
#[must_use]
pub fn is_cuda() -> bool {
    // SAFETY: asks MLX for its default device, which any thread may.
    unsafe { faststep_is_cuda() != 0 }
}

/// The gradient of a matrix as a product, where it is the transpose of one: what is computed then lies row after row. `alone`:
/// its buffer is its own, and memory for another such is worth it. On a CPU a sum of many products becomes one product, unless
/// `FASTSTEP_KERNELS` is 0.
///
/// # Errors
/// When MLX refuses the product.
pub(crate) fn straight(gradient: &Array, alone: bool) -> Result<Array> {
    let (alone, joins) = (c_int::from(alone), c_int::from(kernels::wanted()));
    // SAFETY: a live array, and the function of that name or none.
    let made = made(|straight| unsafe {
        faststep_straight(handle(gradient), blas::of_mlx(), alone, joins, straight)
    })?;
    Ok(made.unwrap_or_else(|| gradient.clone()))
}

/// Order a trace so that each gradient is computed as soon as that frees memory.
///
/// # Errors
/// When there is no memory.
pub(crate) fn order(gradients: &[Array]) -> Result<()> {
    let handles = handles(gradients);
    // SAFETY: live arrays, which no other thread has yet, and their number.
    check(unsafe { faststep_order(handles.as_ptr(), handles.len()) })
}

/// Return an array whose elements lie row after row (lazily), as `Array::contiguous` does.
///
/// # Errors
/// When MLX refuses.
pub fn contiguous(array: &Array) -> Result<Array> {
    // SAFETY: a live array.
    let made = made(|contiguous| unsafe { faststep_contiguous(handle(array), contiguous) })?;
    made.map_or_else(|| array.contiguous(), Ok)
}

/// Join arrays along their first axis (lazily).
///
/// # Errors
/// When they do not agree in all other axes.
pub(crate) fn join(parts: &[&Array]) -> Result<Array> {
    let handles = handles(parts.iter().copied());
    // SAFETY: live arrays and their number.
    let made = made(|joined| unsafe { faststep_join(handles.as_ptr(), handles.len(), joined) })?;
    made.map_or_else(|| ops::concatenate(parts, 0), Ok)
}

/// The same arrays (lazily), on a CPU behind all that has been handed to its worker: what they were joined from is free then,
/// and so are the parameters over which the update writes.
///
/// # Errors
/// When there is no memory.
pub(crate) fn wait(arrays: Vec<Array>) -> Result<Vec<Array>> {
    let handles = handles(&arrays);
    let mut waited = vec![ptr::null_mut(); arrays.len()];
    // SAFETY: live arrays and their number, and as much room; a function that is done has written new ones.
    unsafe {
        let done = faststep_wait(handles.as_ptr(), handles.len(), waited.as_mut_ptr());
        Ok(if is_done(done)? {
            waited.into_iter().map(|new| owned(new)).collect()
        } else {
            arrays
        })
    }
}

/// The same array (lazily), on a CPU when its worker is about done with what it is made of: what is large is not allocated while
/// the worker is behind.
///
/// # Errors
/// When there is no memory.
pub(crate) fn paced(array: &Array) -> Result<Array> {
    // SAFETY: a live array.
    let made = made(|paced| unsafe { faststep_paced(handle(array), paced) })?;
    Ok(made.unwrap_or_else(|| array.clone()))
}

/// The sum of the squares of arrays, a float32 scalar (lazily), where one task gives it: of float32, on a CPU.
///
/// # Errors
/// When there is no memory.
pub(crate) fn sum_of_squares(arrays: &[Array]) -> Result<Option<Array>> {
    let handles = handles(arrays);
    // SAFETY: live arrays and their number.
    made(|sum| unsafe { faststep_sum_of_squares(handles.as_ptr(), handles.len(), sum) })
}

/// The norm of gradients, the factor that brings it to at most the first limit, whether it is finite and the loss a number that is
/// at most the second one, and whether not: four scalars (lazily), where one task gives them: of float32, on a CPU.
///
/// # Errors
/// When there is no memory.
pub(crate) fn checked(
    gradients: &[Array],
    loss: &Array,
    limits: [f32; 2],
) -> Result<Option<[Array; 4]>> {
    let gradients = handles(gradients);
    let mut made = [ptr::null_mut(); 4];
    // SAFETY: live arrays and the number of the list, two limits, and room for four arrays; a function that is done has
    // written new ones.
    unsafe {
        let (list, count) = (gradients.as_ptr(), gradients.len());
        let limits = limits.as_ptr();
        let done = faststep_checked(list, count, handle(loss), limits, made.as_mut_ptr());
        Ok(is_done(done)?.then(|| made.map(|new| owned(new))))
    }
}

/// Sums of the squares of some vectors, up to [`MAX_PARTS`], where one kernel gives them: on CUDA.
///
/// # Errors
/// When MLX refuses the kernel.
pub(crate) fn squares(parts: &[&Array]) -> Result<Option<Array>> {
    if !is_cuda() || parts.len() < 2 {
        return Ok(None);
    }
    Ok(Some(join_on_cuda(parts)?.1))
}

/// Sums of the squares of one large array, where a kernel gives them that stores none of them: on CUDA.
///
/// # Errors
/// When MLX refuses the kernel.
pub(crate) fn squares_of(array: &Array) -> Result<Option<Array>> {
    // SAFETY: a live array.
    made(|squares| unsafe { faststep_squares(handle(array), squares) })
}

/// A norm from sums of squares, the factor that brings it to at most the first limit, and whether it is finite and the loss a
/// number that is at most the second one: three scalars (lazily), where one kernel gives them, on CUDA.
///
/// # Errors
/// When MLX refuses the kernel.
pub(crate) fn norm(
    squares: &[&Array],
    loss: &Array,
    limits: [f32; 2],
) -> Result<Option<[Array; 3]>> {
    let squares = handles(squares.iter().copied());
    let mut made = [ptr::null_mut(); 3];
    // SAFETY: live arrays and the number of the list, two limits, and room for three arrays; a function that is done has
    // written new ones.
    unsafe {
        let (list, count) = (squares.as_ptr(), squares.len());
        let done = faststep_norm(
            list,
            count,
            handle(loss),
            limits.as_ptr(),
            made.as_mut_ptr(),
        );
        Ok(is_done(done)?.then(|| made.map(|new| owned(new))))
    }
}

/// Join arrays by one kernel of CUDA, and sum their squares on its way.
///
/// # Errors
/// When MLX refuses the kernel.
pub(crate) fn join_on_cuda(parts: &[&Array]) -> Result<(Array, Array)> {
    let handles = handles(parts.iter().copied());
    let slots = SLOTS.into_iter().find(|&slots| slots >= parts.len());
    let slots = slots.unwrap_or(MAX_PARTS);
    let (mut flat, mut squares) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: live arrays and their number; the two results are new arrays where it has not failed.
    unsafe {
        let (parts, count) = (handles.as_ptr(), handles.len());
        check(faststep_pack(
            parts,
            count,
            slots,
            &raw mut flat,
            &raw mut squares,
        ))?;
        Ok((owned(flat), owned(squares)))
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::transforms::eval;

    use super::*;
    use crate::mlx::array;

    // parts of a join: one that is there, a sum, a transpose, and the sum again, by itself and twice as large
    fn parts(given: &Array) -> Result<Vec<Array>> {
        let sum = given.add(given)?;
        let turned = given.multiply(&sum)?.transpose()?;
        let more = join(&[&sum, &sum])?;
        Ok(vec![given.clone(), sum.clone(), turned, sum, more])
    }

    #[test]
    fn what_moves_to_its_place_keeps_its_value() -> Result<()> {
        let given = Array::arange::<_, f32>(None, 12, None)?.reshape(&[3, 4])?;
        let given = given.matmul(given.transpose()?)?;
        eval([&given])?;
        let wanted = parts(&given)?;
        let wanted = [ops::concatenate(&wanted, 0)?, wanted[1].clone()];
        eval(&wanted)?;
        let made = parts(&given)?;
        let joined = join(&made.iter().collect::<Vec<_>>())?;
        let doubled = joined.add(&joined)?;
        let held = made[1].clone();
        drop(made);
        array::eval_one_by_one([&joined, &doubled, &held])?;
        let pairs = [(&joined, &wanted[0]), (&held, &wanted[1])];
        for (got, wanted) in pairs {
            assert!(got.eq(wanted)?.all(None)?.item_exact::<bool>());
        }
        assert!(doubled
            .eq(wanted[0].add(&wanted[0])?)?
            .all(None)?
            .item_exact::<bool>());
        Ok(())
    }
}
