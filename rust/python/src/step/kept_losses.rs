//! Losses that only a graph keeps alive: `total = total + loss`, which nobody reads.
use std::collections::VecDeque;

use faststep::engine::array::Watched;
use mlx_rs::Array;
use pyo3::{prelude::*, types::PyWeakrefReference};

/// Number of losses of which one is watched.
const EVERY: usize = 250;
/// Number of losses after which it is examined.
const LATER: usize = 1_000;
/// Number of kept losses in a row that is warned of.
const IN_A_ROW: usize = 3;

/// A few of the losses that the step has returned.
#[derive(Default)]
pub struct KeptLosses {
    watched: VecDeque<(usize, Py<PyWeakrefReference>, Watched)>,
    in_a_row: usize,
    told: bool,
}

impl KeptLosses {
    /// Register a loss that a step has returned; returns the warning that is due.
    pub fn note(
        &mut self,
        number: usize,
        loss: &Array,
        object: &Bound<'_, PyAny>,
    ) -> Option<String> {
        if self.told || !number.is_multiple_of(EVERY) {
            return None;
        }
        let py = object.py();
        if let (Ok(object), Ok(watched)) = (PyWeakrefReference::new(object), Watched::new(loss)) {
            self.watched.push_back((number, object.unbind(), watched));
        }
        while self
            .watched
            .front()
            .is_some_and(|(made, ..)| made + LATER <= number)
        {
            let Some((_, object, watched)) = self.watched.pop_front() else {
                break;
            };
            let only_by_a_graph = object.bind(py).upgrade().is_none() && watched.is_alive();
            self.in_a_row = if only_by_a_graph {
                self.in_a_row + 1
            } else {
                0
            };
        }
        self.told = self.in_a_row >= IN_A_ROW;
        self.told.then(|| {
            self.watched.clear();
            format!(
                "the losses of more than {LATER} steps are kept by a graph that nobody evaluates, and it grows with every step: \
                 a sum like `total = total + loss`. Evaluate it every so many steps (mx.eval(total)), or add loss.item()"
            )
        })
    }
}
