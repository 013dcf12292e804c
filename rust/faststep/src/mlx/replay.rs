//! A part of a step as one CUDA graph, recorded once and launched again.
//!
//! What it reads and writes are static arrays, whose memory stays where it is. Nobody but a capture's owner may have a handle
//! to one, or to the results: a host that reads an array may move its memory. The C++ behind it (`native/cuda/replay`) belongs
//! to the thread whose stream it records.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr};

use mlx_rs::{error::Result, Array};

use super::ffi::{
    check, faststep_replay_copy, faststep_replay_free, faststep_replay_is_valid,
    faststep_replay_launch, faststep_replay_new, faststep_replay_record, handles,
};

pub(crate) use super::ffi::CaptureInfo;

/// A CUDA graph with its memory.
#[derive(Debug)]
pub(crate) struct Capture {
    graph: *mut c_void,
    /// What it consists of.
    pub info: CaptureInfo,
}

impl Capture {
    /// Record what `results` and the first of each pair are computed from, without computing anything. A replay leaves the
    /// value of the first in the memory of the second. So many bytes that are free are not used again at once.
    ///
    /// # Errors
    /// Why it cannot be captured.
    pub fn record(
        results: &[Array],
        carried: Vec<(Array, Array)>,
        retained: usize,
    ) -> Result<Self> {
        let results = handles(results);
        let (from, into): (Vec<_>, Vec<_>) = carried.into_iter().unzip();
        let mut graph = ptr::null_mut();
        // SAFETY: live arrays and the number of each list.
        check(unsafe {
            let (from, into) = (handles(&from), handles(&into));
            faststep_replay_new(
                results.as_ptr(),
                results.len(),
                from.as_ptr(),
                into.as_ptr(),
                from.len(),
                &raw mut graph,
            )
        })?;
        drop(from); // the capture is the only one to hold them
        let mut capture = Self {
            graph,
            info: CaptureInfo::default(),
        };
        // SAFETY: a capture, and room for what it consists of.
        check(unsafe { faststep_replay_record(graph, retained, &raw mut capture.info) })?;
        Ok(capture)
    }

    /// Whether the memory that the graph reads lies where it did.
    pub fn is_valid(&self) -> bool {
        // SAFETY: a capture.
        unsafe { faststep_replay_is_valid(self.graph) != 0 }
    }

    /// Copy the first of each pair, which is evaluated, into the second, which is static, and replay.
    ///
    /// # Errors
    /// Of the driver.
    pub fn launch(&self, copies: &[(Array, Array)]) -> Result<()> {
        let from = handles(copies.iter().map(|(from, _)| from));
        let into = handles(copies.iter().map(|(_, into)| into));
        // SAFETY: a capture, live arrays and their number.
        check(unsafe {
            faststep_replay_launch(self.graph, from.as_ptr(), into.as_ptr(), from.len())
        })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: made by `record`, freed once.
        unsafe { faststep_replay_free(self.graph) }
    }
}

/// Copy the first of each pair, which is evaluated, into the second, which is static.
///
/// # Errors
/// Of the driver.
pub(crate) fn copy(copies: &[(Array, Array)]) -> Result<()> {
    let from = handles(copies.iter().map(|(from, _)| from));
    let into = handles(copies.iter().map(|(_, into)| into));
    // SAFETY: live arrays and their number.
    check(unsafe { faststep_replay_copy(from.as_ptr(), into.as_ptr(), from.len()) })
}
