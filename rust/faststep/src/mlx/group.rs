//! A group of processes of `mx.distributed`, which exchange arrays.
//!
//! Guarantee: it is the group that was given, and stays as long as this handle. Rationale: mlx-rs has none. Threads: whoever
//! may use the arrays.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr};

use mlx_rs::{
    error::{Exception, Result},
    Array,
};

use super::ffi::{
    check, faststep_group_free, faststep_group_init, faststep_group_is, faststep_group_new,
    faststep_group_rank, faststep_group_size, faststep_group_sum, faststep_group_sum_in_turn,
    faststep_group_sum_numbers, handle, made, owned,
};

/// A group of ranks.
#[derive(Debug)]
pub struct Group(*mut c_void);

impl Group {
    /// The group of all processes that were started together, as `mlx.launch` starts them.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn init() -> Result<Self> {
        let mut group = ptr::null_mut();
        // SAFETY: the pointer is written where there was no error.
        check(unsafe { faststep_group_init(&raw mut group) })?;
        Ok(Self(group))
    }

    /// Another handle to a group.
    ///
    /// # Safety
    /// `group` is a live `mlx::core::distributed::Group`.
    #[must_use]
    pub unsafe fn of(group: *const c_void) -> Self {
        // SAFETY: as above.
        Self(unsafe { faststep_group_new(group) })
    }

    /// The number of this process.
    #[must_use]
    pub fn rank(&self) -> usize {
        // SAFETY: made by `of`.
        usize::try_from(unsafe { faststep_group_rank(self.0) }).unwrap_or(0)
    }

    /// Return whether another one is the same group.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        // SAFETY: both made by `of`.
        unsafe { faststep_group_is(self.0, other.0) != 0 }
    }

    /// The number of processes.
    #[must_use]
    pub fn size(&self) -> usize {
        // SAFETY: made by `of`.
        usize::try_from(unsafe { faststep_group_size(self.0) }).unwrap_or(1)
    }

    /// The sum of an array over all ranks, lazily: every rank has to evaluate it, and all in the same order. On a CPU it is
    /// exchanged in messages of so many elements, if a number is given, the same on all ranks.
    ///
    /// # Errors
    /// When MLX refuses it.
    pub fn sum(&self, array: &Array, message: Option<usize>) -> Result<Array> {
        let mut sum = ptr::null_mut();
        // SAFETY: made by `of`; an array, and a pointer that is written where there was no error.
        unsafe {
            let message = message.unwrap_or(0);
            check(faststep_group_sum(
                self.0,
                handle(array),
                message,
                &raw mut sum,
            ))?;
            Ok(owned(sum))
        }
    }
}

impl Group {
    /// The sum of an array over all ranks as a loss function would compute it: on MLX's own stream for that.
    ///
    /// # Errors
    /// When MLX refuses it.
    pub fn sum_in_turn(&self, array: &Array) -> Result<Array> {
        // SAFETY: made by `of`; an array, and a pointer that is written where there was no error.
        let sum = made(|sum| unsafe { faststep_group_sum_in_turn(self.0, handle(array), sum) })?;
        sum.ok_or_else(|| Exception::custom("there is no sum"))
    }

    /// Sum numbers over all ranks, in their place, and wait for that; on a GPU not for what it computes meanwhile.
    ///
    /// # Errors
    /// When the back end cannot exchange them.
    pub fn sum_numbers(&self, numbers: &mut [f32]) -> Result<()> {
        // SAFETY: made by `of`; numbers that are written where there was no error, and how many.
        check(unsafe { faststep_group_sum_numbers(self.0, numbers.as_mut_ptr(), numbers.len()) })
    }

    pub(super) fn as_ptr(&self) -> *const c_void {
        self.0
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: made by `of`, freed once.
        unsafe { faststep_group_free(self.0) }
    }
}
