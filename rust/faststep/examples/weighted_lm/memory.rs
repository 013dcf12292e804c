//! The memory of the process.
use std::{fmt, fs};

use mlx_rs::{
    error::Exception,
    memory::{active_memory, cache_memory},
};
use serde::Serialize;

const MIB: f64 = 1024.0 * 1024.0;

/// Bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Bytes in MLX's arrays.
    pub active: usize,
    /// Bytes in MLX's cache.
    pub cache: usize,
    /// Resident bytes of the process; 0 on systems without Linux's /proc.
    pub process: usize,
}

impl Memory {
    /// Read the current values.
    pub fn now() -> Result<Self, Exception> {
        Ok(Self {
            active: active_memory()?,
            cache: cache_memory()?,
            process: process().unwrap_or_default(),
        })
    }
}

// proc_pid_status(5)
fn process() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[allow(clippy::cast_precision_loss)] // shown to a tenth of a MiB
        let [active, cache, process] =
            [self.active, self.cache, self.process].map(|bytes| bytes as f64 / MIB);
        write!(
            f,
            "active {active:.1} MiB, cache {cache:.1} MiB, process {process:.1} MiB"
        )
    }
}
