//! One update by the optimizer's own code, with tracers in place of the arrays.
use faststep::engine::{UpdateCall, UpdateOutput};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, intern, prelude::*};

use super::{expected, stop, Current};
use crate::{
    mlx::bridge,
    optimizer::HostSchedules,
    reach::stop::Stop,
    tree::{paths::dotted, rebuild::rebuild, slot::Slot, snapshot::Snapshot, walk::Scope, Tree},
};

impl Current {
    pub(super) fn update(
        &mut self,
        py: Python<'_>,
        call: UpdateCall,
    ) -> Result<UpdateOutput, Stop> {
        let optimizer = self.optimizer.bind(py).clone();
        let (_, slots) = Tree::record(&optimizer, Scope::Whole)?;
        let snapshot = Snapshot::take(&optimizer)?;
        let outcome = self.traced_update(py, &optimizer, call, &slots);
        snapshot.restore()?;
        outcome
    }

    fn traced_update<'py>(
        &self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        call: UpdateCall,
        slots: &[Slot<'py>],
    ) -> Result<UpdateOutput, Stop> {
        for (slot, tracer) in slots.iter().zip(call.state) {
            slot.place.set(&bridge::wrap(py, tracer)?)?;
        }
        HostSchedules::of(optimizer).hold()?;
        let trainable = self.trainable.bind(py);
        let fill = |arrays: &[Array]| {
            let mut arrays = arrays.iter();
            rebuild(trainable, &mut |_| {
                let array = arrays
                    .next()
                    .ok_or_else(|| expected("as many arrays as parameters"))?;
                bridge::wrap(py, array)
            })
        };
        let updated = optimizer
            .call_method1(
                intern!(py, "apply_gradients"),
                (fill(call.gradients)?, fill(call.parameters)?),
            )
            .map_err(|error| stop(py, error))?;
        let mut state = Vec::new();
        for (index, (slot, tracer)) in slots.iter().zip(call.state).enumerate() {
            let now = slot.place.get()?.and_then(|object| bridge::get(&object));
            let now = now.ok_or_else(|| {
                Stop::Untraceable("the optimizer removes an array from its state".into())
            })?;
            if faststep::engine::array::id(&now) != faststep::engine::array::id(tracer) {
                state.push((index, now));
            }
        }
        Ok(UpdateOutput {
            parameters: self.in_order(py, &updated)?,
            state,
        })
    }

    // the optimizer's tree of new parameters, in the order of the model's
    fn in_order(&self, py: Python<'_>, updated: &Bound<'_, PyAny>) -> Result<Vec<Array>, Stop> {
        let wanted = Tree::record(self.trainable.bind(py), Scope::Whole)?
            .0
            .paths(py);
        let (tree, slots) = Tree::record(updated, Scope::Whole)?;
        let found = tree.paths(py);
        let find = |path: &Vec<String>| {
            let at = found.iter().position(|other| other == path)?;
            bridge::get(&slots[at].object)
        };
        let arrays = wanted.iter().map(|path| {
            find(path).ok_or_else(|| {
                Stop::Raised(PyRuntimeError::new_err(format!(
                    "the optimizer returned no parameter for {}",
                    dotted(path)
                )))
            })
        });
        arrays.collect()
    }
}
