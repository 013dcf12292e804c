//! The output of one step, and the statistics of all.
use std::collections::BTreeMap;

use mlx_rs::Array;

use crate::{
    engine::{nonfinite::is_true, Seconds},
    error::{Error, Result},
    trace::{Outputs, TraceRecord},
};

/// Outputs of one step. The arrays are lazy: reading one waits for that step.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// The loss, a scalar in the dtype in which the loss function returned it; with a group, where there was an update, the mean over
    /// its window and all ranks, float32.
    pub loss: Array,
    /// The loss of this rank's batch.
    pub local_loss: Array,
    /// The other arrays that the loss function returned.
    pub aux: Vec<Array>,
    /// The global norm of the gradients before clipping, a float32 scalar; of a window's average where one was filled.
    /// `None` where there was no update, and where nothing needs it: with [`Nonfinite::Allow`](crate::Nonfinite::Allow)
    /// and without a norm to clip to.
    pub grad_norm: Option<Array>,
    skipped: Option<Array>,
    update: Update,
}

/// Update of parameters and optimizer state: known, or a flag.
#[derive(Clone, Debug)]
enum Update {
    /// The window is not full yet.
    No,
    /// Yes.
    Yes,
    /// Unless this flag is true.
    Unless(Array),
}

impl StepOutput {
    pub(super) fn new(batch: &Outputs, update: Option<&Outputs>) -> Result<Self> {
        let local_loss = batch.loss.clone().ok_or_else(Error::no_loss)?;
        let mean = update.and_then(|update| update.loss.clone());
        Ok(Self {
            loss: mean.unwrap_or_else(|| local_loss.clone()),
            local_loss,
            aux: batch.aux.clone(),
            grad_norm: update.and_then(|update| update.norm.clone()),
            skipped: batch.skipped.clone(),
            update: match update.map(|update| &update.skipped) {
                Some(Some(missed)) => Update::Unless(missed.clone()),
                Some(None) => Update::Yes,
                None => Update::No,
            },
        })
    }

    /// Return whether nothing of the batch was taken; waits for the step.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn skipped(&self) -> Result<bool> {
        Ok(self.skipped.as_ref().map_or(Ok(false), is_true)?)
    }

    /// Return whether parameters and optimizer state were updated; waits for the step, unless it is known without.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn updated(&self) -> Result<bool> {
        match &self.update {
            Update::Unless(missed) => Ok(!is_true(missed)?),
            Update::Yes => Ok(true),
            Update::No => Ok(false),
        }
    }
}

/// Counters of a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// The number of calls.
    pub steps: usize,
    /// The number of updates that were made.
    pub updates: usize,
    /// Number of batches that were skipped, because loss or gradients were not finite or the loss too large.
    pub skipped: usize,
    /// True if the step is compiled: not where it was told not to be, or MLX finds no compiler.
    pub compiled: bool,
    /// True if OpenBLAS has taken the place of MLX's own BLAS on the CPU.
    pub openblas: bool,
    /// The traces that are kept.
    pub traces: Vec<TraceRecord>,
    /// The number of all traces that were made.
    pub traced: usize,
    /// Time of all calls by stage. `trace`: calls that made a trace, all of them. `build`: replaying traces.
    /// `evaluate`: handing the work to MLX, which on a CPU does most of it then. `wait`: for steps in flight.
    pub seconds: BTreeMap<&'static str, f64>,
    /// The bytes that are held. `parameters`, `optimizer`: its state. `step`: masters, average and window. `model`: the
    /// module's other arrays.
    pub bytes: BTreeMap<&'static str, usize>,
    /// The share, from 0 to 1, of weights that a metered update rounded to no change; `None` before the first reading.
    pub unchanged: Option<f64>,
}

/// Time by stage, in seconds.
#[derive(Debug, Default)]
pub(super) struct Spent {
    trace: f64,
    engine: Seconds,
}

impl Spent {
    pub(super) fn add(&mut self, engine: Seconds, traced: Option<f64>) {
        self.trace += traced.unwrap_or_default();
        self.engine += engine;
    }

    pub(super) fn by_name(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::from([
            ("trace", self.trace),
            ("build", self.engine.build),
            ("evaluate", self.engine.evaluate),
            ("wait", self.engine.wait),
        ])
    }
}
