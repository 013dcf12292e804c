//! Many arrays joined by one task of the CPU, or by one kernel on CUDA, which sums their squares on its way.
//!
//! MLX joins arrays by a copy for each, and a gradient of a linear layer is the transpose of a product: a few hundred
//! small tasks or kernels a step, each of which costs more to start than to run. The C++ in `native` makes one of them.
#![allow(unsafe_code)]

use std::ffi::c_void;

use mlx_rs::{
    error::{Exception, Result},
    ops, Array,
};

use super::array;

extern "C" {
    fn faststep_is_cuda() -> i32;
    fn faststep_straight(array: *const c_void) -> *mut c_void;
    fn faststep_order(gradients: *const *const c_void, count: usize) -> i32;
    fn faststep_contiguous(array: *const c_void) -> *mut c_void;
    fn faststep_join(parts: *const *const c_void, count: usize) -> *mut c_void;
    fn faststep_sum_of_squares(arrays: *const *const c_void, count: usize) -> *mut c_void;
    fn faststep_pack(
        parts: *const *const c_void,
        count: usize,
        slots: usize,
        flat: *mut *mut c_void,
        squares: *mut *mut c_void,
    ) -> i32;
}

/// So many tensors fit into one kernel: their pointers are its parameters, of which 4 KB are sure.
pub const MAX_PARTS: usize = 448;
/// Kernels are compiled for these numbers of tensors, and called with fewer.
const SLOTS: [usize; 2] = [32, MAX_PARTS];

/// Whether arrays are computed by CUDA unless told otherwise.
#[must_use]
pub fn is_cuda() -> bool {
    // SAFETY: asks MLX for its default device, which any thread may.
    unsafe { faststep_is_cuda() != 0 }
}

/// The gradient of a matrix as a product, where it is the transpose of one: what is computed then lies row after row.
pub(crate) fn straight(gradient: &Array) -> Array {
    // SAFETY: a live array.
    let made = unsafe { array::owned(faststep_straight(gradient.as_ptr().ctx)) };
    made.unwrap_or_else(|| gradient.clone())
}

/// Order a trace so that each gradient is computed as soon as that frees memory.
///
/// # Errors
/// When there is no memory.
pub(crate) fn order(gradients: &[Array]) -> Result<()> {
    let pointers = pointers(gradients);
    // SAFETY: live arrays, which no other thread has yet, and their number.
    if unsafe { faststep_order(pointers.as_ptr(), pointers.len()) } == 0 {
        return Ok(());
    }
    Err(Exception::custom("no memory for the order of a step"))
}

/// An array whose elements lie row after row (lazily), as `Array::contiguous` gives it.
///
/// # Errors
/// When MLX refuses.
pub fn contiguous(array: &Array) -> Result<Array> {
    // SAFETY: a live array.
    let made = unsafe { array::owned(faststep_contiguous(array.as_ptr().ctx)) };
    made.map_or_else(|| array.contiguous(), Ok)
}

/// Join arrays along their first axis (lazily).
///
/// # Errors
/// When they do not agree in all other axes.
pub(crate) fn join(parts: &[&Array]) -> Result<Array> {
    let pointers = pointers(parts.iter().copied());
    // SAFETY: live arrays and their number.
    let joined = unsafe { array::owned(faststep_join(pointers.as_ptr(), pointers.len())) };
    joined.map_or_else(|| ops::concatenate(parts, 0), Ok)
}

/// The sum of the squares of arrays, a float32 scalar (lazily), where one task gives it: of float32, on a CPU.
pub(crate) fn sum_of_squares(arrays: &[Array]) -> Option<Array> {
    let pointers = pointers(arrays);
    // SAFETY: live arrays and their number.
    unsafe { array::owned(faststep_sum_of_squares(pointers.as_ptr(), pointers.len())) }
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

fn pointers<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Vec<*const c_void> {
    let arrays = arrays.into_iter();
    arrays
        .map(|array| array.as_ptr().ctx.cast_const())
        .collect()
}

/// Join arrays by one kernel of CUDA, and sum their squares on its way.
///
/// # Errors
/// When MLX refuses the kernel.
pub(crate) fn join_on_cuda(parts: &[&Array]) -> Result<(Array, Array)> {
    let pointers = pointers(parts.iter().copied());
    let slots = SLOTS.into_iter().find(|&slots| slots >= parts.len());
    let slots = slots.unwrap_or(MAX_PARTS);
    let (mut flat, mut squares) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: live arrays and their number; the two results are written where 0 is returned.
    let failed = unsafe {
        faststep_pack(
            pointers.as_ptr(),
            pointers.len(),
            slots,
            &raw mut flat,
            &raw mut squares,
        )
    };
    if failed != 0 {
        return Err(Exception::custom(format!(
            "MLX refused to join {} gradients of shapes like {:?}",
            parts.len(),
            parts[0].shape()
        )));
    }
    // SAFETY: fresh arrays on the heap, which is what mlx-c's handles own.
    Ok(unsafe {
        (
            Array::from_ptr(mlx_sys::mlx_array { ctx: flat }),
            Array::from_ptr(mlx_sys::mlx_array { ctx: squares }),
        )
    })
}
