//! Flags on the device that are counted without a wait: which batches were skipped, which updates missed.
use mlx_rs::{error::Result as MlxResult, Array};

/// Number of pending flags from which on the older ones are read.
const MAX_PENDING: usize = 256;

/// Lazy flags that have not been read yet, and the number of those read that were true.
#[derive(Debug)]
pub struct Flags {
    pending: Vec<Array>,
    most: usize, // pending
    count: usize,
    streak: usize, // number of the last flags read that were true in a row
    read: usize,
    first: Option<usize>, // place of the first one that was true
}

impl Default for Flags {
    fn default() -> Self {
        Self::of(0)
    }
}

impl Flags {
    /// Return flags with this count, none pending.
    #[must_use]
    pub fn of(count: usize) -> Self {
        Self {
            pending: Vec::new(),
            most: MAX_PENDING,
            count,
            streak: 0,
            read: 0,
            first: None,
        }
    }

    /// The same, read when so many are pending.
    #[must_use]
    pub fn read_at(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The length of the run of true flags among those read last.
    #[must_use]
    pub fn streak(&self) -> usize {
        self.streak
    }

    /// The place of the first flag that was true, among all that were read, from 0.
    #[must_use]
    pub fn first(&self) -> Option<usize> {
        self.first
    }

    /// The number of flags read so far that were true.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Add a bool scalar; when many are pending, the older half is read by `is_true`.
    ///
    /// # Errors
    /// Of `is_true`.
    pub fn push(
        &mut self,
        flag: Option<&Array>,
        is_true: &dyn Fn(&Array) -> MlxResult<bool>,
    ) -> MlxResult<()> {
        self.pending.extend(flag.cloned());
        if self.pending.len() < self.most {
            return Ok(());
        }
        self.read(self.most / 2, is_true) // the older half is long done
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
            let is_true = is_true(&flag)?;
            self.count += usize::from(is_true);
            self.first = self.first.or(is_true.then_some(self.read));
            self.read += 1;
            self.streak = if is_true { self.streak + 1 } else { 0 };
        }
        Ok(())
    }
}
