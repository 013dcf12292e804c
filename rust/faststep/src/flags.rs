//! Flags on the device that are counted without a wait: which batches were skipped, which updates missed.
use mlx_rs::{error::Result as MlxResult, Array};

/// So many may be pending before the older ones are read.
const MAX_PENDING: usize = 256;

/// Flags of which nobody has asked yet whether they are true, and the number of those that were.
#[derive(Debug, Default)]
pub struct Flags {
    pending: Vec<Array>,
    count: usize,
}

impl Flags {
    /// None pending, so many counted.
    #[must_use]
    pub fn of(count: usize) -> Self {
        Self {
            pending: Vec::new(),
            count,
        }
    }

    /// How many of those that have been read were true.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Add a bool scalar; now and then the older ones are read by `is_true`.
    ///
    /// # Errors
    /// Of `is_true`.
    pub fn push(
        &mut self,
        flag: Option<&Array>,
        is_true: &dyn Fn(&Array) -> MlxResult<bool>,
    ) -> MlxResult<()> {
        self.pending.extend(flag.cloned());
        if self.pending.len() < MAX_PENDING {
            return Ok(());
        }
        self.read(MAX_PENDING / 2, is_true) // the older half is long done
    }

    /// Read all but the last `keep` by `is_true`.
    ///
    /// # Errors
    /// Of `is_true`.
    pub fn read(
        &mut self,
        keep: usize,
        is_true: &dyn Fn(&Array) -> MlxResult<bool>,
    ) -> MlxResult<()> {
        let rest = self.pending.len().saturating_sub(keep);
        for flag in self.pending.drain(..rest) {
            self.count += usize::from(is_true(&flag)?);
        }
        Ok(())
    }
}
