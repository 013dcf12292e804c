//! Labels and rows out of range: MLX does not check whole numbers that pick from an axis, and reads other memory.
//!
//! The first batch of a graph is looked at before it is computed. Those of the first steps, and a few later, are looked at on the
//! device, and what was found is read some steps later, without a wait.
use std::{collections::VecDeque, rc::Rc};

use faststep::engine::Pick;
use mlx_rs::{error::Result as MlxResult, transforms::async_eval, Array};
use pyo3::prelude::*;

use super::flags::number_of;
use crate::host::KnownGraph;

/// Number of first batches that are all looked at.
const FIRST: usize = 20;
/// Number of later batches of which one is looked at, a prime: the places in an epoch differ.
const EVERY: usize = 29;
/// Number of looks that are under way.
const PENDING: usize = 3;

/// The looks under way.
#[derive(Default)]
pub struct Indices {
    pending: VecDeque<Look>,
    noted: usize, // steps
    told: bool,
}

/// The least and the greatest number of each pick in the batch of a step.
struct Look {
    step: usize,
    graph: Rc<KnownGraph>,
    extremes: Vec<Array>,
}

impl Indices {
    /// Look at the first batch of a graph, before it is computed; return the number of the array that is out of range, and the text.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn look(
        &mut self,
        py: Python<'_>,
        graph: &KnownGraph,
        batch: &[Array],
    ) -> MlxResult<Option<(usize, String)>> {
        let picks = graph.picks();
        if self.told || picks.is_empty() {
            return Ok(None);
        }
        let found = out_of_range(py, &picks, &graph.extremes(batch)?)?;
        self.told = found.is_some();
        Ok(found)
    }

    /// Return whether it is the turn of a step.
    pub fn is_due(&self, step: usize) -> bool {
        !self.told && (self.noted < FIRST || step.is_multiple_of(EVERY))
    }

    /// Look at the batch of a step, if its turn has come; return the step of an earlier one that is out of range, the number of the
    /// array in it, and the text.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn note(
        &mut self,
        py: Python<'_>,
        step: usize,
        (graph, batch): (&Rc<KnownGraph>, &[Array]),
    ) -> MlxResult<Option<(usize, usize, String)>> {
        if !self.is_due(step) {
            return Ok(None);
        }
        self.noted += 1;
        if graph.picks().is_empty() {
            return Ok(None);
        }
        let extremes = graph.extremes(batch)?;
        async_eval(&extremes)?;
        self.pending.push_back(Look {
            step,
            graph: graph.clone(),
            extremes,
        });
        if self.pending.len() <= PENDING {
            return Ok(None);
        }
        let Some(look) = self.pending.pop_front() else {
            return Ok(None);
        };
        let found = out_of_range(py, &look.graph.picks(), &look.extremes)?;
        self.told = found.is_some();
        Ok(found.map(|(array, text)| (look.step, array, text)))
    }
}

/// The number of the first array of a batch whose numbers are out of range, and a text that says how.
///
/// # Errors
/// When the device has failed.
pub fn out_of_range(
    py: Python<'_>,
    picks: &[Pick],
    extremes: &[Array],
) -> MlxResult<Option<(usize, String)>> {
    for (pick, pair) in picks.iter().zip(extremes.chunks(2)) {
        let [low, high] = pair else { continue };
        let (low, high): (i64, i64) = (number_of(py, low)?, number_of(py, high)?);
        let least = if pick.from_end { -pick.length } else { 0 };
        if low >= least && high < pick.length {
            continue;
        }
        let length = pick.length;
        let text = if pick.from_end {
            format!(
                "asks for rows {low} to {high}, and there are {length}. MLX does not check them, and reads other memory: make the \
                 embedding as large as the vocabulary, or look for ids that are not of it"
            )
        } else {
            format!(
                "has labels from {low} to {high}, and there are {length} classes. MLX does not check them, and reads other memory: \
                 count classes from 0, and leave out what is not to be learned (an ignored -100 too) by a mask: \
                 cross_entropy(logits, mx.where(mask, labels, 0)) * mask"
            )
        };
        return Ok(Some((pick.tracer, text)));
    }
    Ok(None)
}
