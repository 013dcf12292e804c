//! Memory in use and held for reuse, by MLX and by the C library.
#![allow(unsafe_code)]

use mlx_rs::{
    error::Result,
    memory::{active_memory, memory_limit, peak_memory, set_memory_limit},
};

use super::{
    caller,
    ffi::{check, faststep_synchronize, faststep_synchronize_cpu, is_done},
};

/// The bytes in use; none where MLX does not say, which is no reason to leave a step half done.
pub(crate) fn active() -> usize {
    active_memory().unwrap_or(0)
}

/// The most bytes in use at once while the calling thread evaluates.
#[derive(Debug)]
pub(crate) struct Watch {
    peak: usize,   // the process's, before
    watches: bool, // the calling thread, too
}

impl Watch {
    /// Begin.
    pub fn begin() -> Self {
        Self {
            peak: peak_memory().unwrap_or(0),
            watches: caller::watch(),
        }
    }

    /// End, and return the bytes: the process's peak where that has risen. Otherwise more was in use at some earlier time, and
    /// it is the most that was in use where a task was handed to a CPU's worker; elsewhere the peak of that time.
    pub fn end(self) -> usize {
        let peak = peak_memory().unwrap_or(0);
        if self.watches && peak <= self.peak {
            caller::watched().min(peak)
        } else {
            peak
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.watches {
            caller::watched();
        }
    }
}

/// The most bytes that MLX is to have in use; none where it does not say.
pub(crate) fn limit() -> usize {
    memory_limit().unwrap_or(0)
}

/// The bytes that may still be allocated; none where MLX does not say.
pub(crate) fn free() -> usize {
    limit().saturating_sub(active())
}

/// Wait until the device has done all work, and has let go of its memory.
///
/// # Errors
/// Of anything that was under way: MLX tells each one once, and whoever reads what has failed later gets numbers.
pub(crate) fn synchronize() -> Result<()> {
    // SAFETY: takes nothing; MLX lets any thread wait.
    check(unsafe { faststep_synchronize() })
}

/// Free what MLX's allocator keeps for reuse.
pub fn clear_cache() {
    // SAFETY: takes nothing; MLX's allocator has its own lock.
    unsafe {
        mlx_sys::mlx_clear_cache();
    }
}

/// Ask the C library for the memory of what has been freed: glibc keeps it otherwise.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number, and may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// MLX's memory limit is no larger than this one, as long as it lives.
pub(crate) struct MemoryLimit {
    limit: usize,
    before: usize,
}

impl MemoryLimit {
    /// None where there is no limit to set. On a CPU all that is under way is waited for in its place: at its limit MLX waits for as
    /// many tasks as it has counted, and those that an error has kept it from handing over are counted for good.
    ///
    /// # Errors
    /// Of what is waited for: MLX tells each one once.
    pub fn to(limit: Option<usize>) -> Result<Option<Self>> {
        let Ok(now) = memory_limit() else {
            return Ok(None);
        };
        let Some(limit) = limit.filter(|&limit| limit < now) else {
            return Ok(None);
        };
        // SAFETY: takes nothing; MLX lets any thread wait.
        if is_done(unsafe { faststep_synchronize_cpu() })? {
            return Ok(None);
        }
        let before = set_memory_limit(limit).ok();
        Ok(before.map(|before| Self { limit, before }))
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        let Ok(now) = set_memory_limit(self.before) else {
            return;
        };
        if now != self.limit {
            let _ = set_memory_limit(now); // another thread's wish
        }
    }
}
