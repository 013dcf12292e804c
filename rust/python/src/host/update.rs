//! One update by the optimizer's own code, with tracers in place of the arrays.
use std::collections::HashMap;

use faststep::engine::{Role, UpdateCall, UpdateOutput};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyException, PyRuntimeError, PyValueError},
    intern,
    prelude::*,
};

use super::{expected, stop, Current};
use crate::{
    mlx::{
        bridge,
        classes::{has_own_methods, is_numpy},
    },
    optimizer::{trace_update, HostSchedules},
    reach::{
        stop::Stop,
        suspect::{Positions, Reads},
    },
    tree::{paths::dotted, rebuild::rebuild, slot::Slot, snapshot::Snapshot, walk::Scope, Tree},
};

/// The optimizer and the model's parameters before an update.
struct Before<'py> {
    state: Tree,
    slots: Vec<Slot<'py>>,
    model: Tree,
    parameters: Vec<(usize, Slot<'py>)>, // by their numbers
    others: Vec<Option<usize>>,          // the identities of the model's other arrays
}

impl Current {
    pub(super) fn update(
        &mut self,
        py: Python<'_>,
        call: UpdateCall,
    ) -> Result<UpdateOutput, Stop> {
        let optimizer = self.optimizer.bind(py).clone();
        let keys = self.key_list.bind(py).clone();
        let (state, slots) = Tree::record(&optimizer, Scope::Whole)?;
        let (model, parameters, others) = self.in_model(py)?;
        let before = Before {
            state,
            slots,
            model,
            parameters,
            others,
        };
        let snapshot = Snapshot::take(&optimizer)?;
        let model = Snapshot::take(self.model.bind(py))?;
        let key = keys.get_item(0)?;
        let reached = self
            .of_update
            .clone()
            .filter(|_| self.compiled && !self.sketch);
        let reached = reached.map(|looked| {
            let (contents, copies) = (looked.snapshot(py)?, looked.copies(py)?);
            Ok::<_, PyErr>((looked, contents, copies))
        });
        let reached = reached.transpose()?;
        let mut outcome = self.traced_update(py, &optimizer, call, &before);
        keys.set_item(0, key)?;
        if let (Some((_, contents, _)), true) = (&reached, outcome.is_ok()) {
            if let Some(key) = contents.new_array(false)? {
                let class = optimizer.get_type().fully_qualified_name()?;
                outcome = Err(Stop::Untraceable(format!(
                    "the optimizer ({class}) keeps an array in an object beside its state ({key}): keep it in its state, \
                     which alone a checkpoint has"
                )));
            }
        }
        if let (Some((looked, contents, copies)), Err(stop)) = (reached, &outcome) {
            if !matches!(stop, Stop::Raised(_)) {
                looked.restore(py, &contents, &copies)?; // the update is computed once more, without a trace
            }
        }
        if outcome.is_err() || self.compiled {
            model.restore()?;
        } else {
            for (_, slot) in &before.parameters {
                slot.place.set(&slot.object)?;
            }
        }
        if outcome.is_err() || !self.loose {
            snapshot.restore()?;
        } else {
            for slot in &before.slots {
                slot.place.set(&slot.object)?;
            }
        }
        outcome
    }

    // the model, the slots of its parameters by number, and the identities of its other arrays
    #[allow(clippy::type_complexity)]
    fn in_model<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Tree, Vec<(usize, Slot<'py>)>, Vec<Option<usize>>)> {
        let (tree, slots) = Tree::of_model(self.model.bind(py))?;
        let numbers = self.roles.iter().filter_map(|(role, path)| match role {
            Role::Parameter(number) => Some((path, *number)),
            Role::Other(_) => None,
        });
        let numbers: HashMap<_, _> = numbers.collect();
        let (mut parameters, mut others) = (Vec::new(), Vec::new());
        for (path, slot) in tree.paths(py).iter().zip(slots) {
            match numbers.get(path) {
                Some(&number) => parameters.push((number, slot)),
                None => others.push(bridge::id(&slot.object)),
            }
        }
        Ok((tree, parameters, others))
    }

    fn traced_update<'py>(
        &mut self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        call: UpdateCall,
        before: &Before<'py>,
    ) -> Result<UpdateOutput, Stop> {
        for (slot, tracer) in before.slots.iter().zip(call.state) {
            slot.place.set(&bridge::wrap(py, tracer)?)?;
        }
        for (number, slot) in &before.parameters {
            slot.place
                .set(&bridge::wrap(py, &call.parameters[*number])?)?;
        }
        let keys = self.key_list.bind(py).clone();
        if let Some(key) = call.key {
            keys.set_item(0, bridge::wrap(py, key)?)?;
        }
        let first = bridge::id(&keys.get_item(0)?);
        let mut gradients = call.gradients.iter();
        let gradients = rebuild(self.trainable.bind(py), &mut |_| {
            let array = gradients
                .next()
                .ok_or_else(|| expected("as many arrays as parameters"))?;
            bridge::wrap(py, array)
        })?;
        let schedules = HostSchedules::of(optimizer);
        let reads = Reads::begin(py, self.compiled)?;
        schedules.hold()?;
        let model = self.model.bind(py);
        let positions = match &self.moving {
            Some(moving) if self.compiled && !self.sketch => {
                let positions = Positions::among(model, moving.bind(py))?;
                positions.begin()?;
                Some(positions)
            }
            _ => None,
        };
        let update = || optimizer.call_method1(intern!(py, "update"), (model, gradients));
        let (stray, updated) = if self.compiled {
            trace_update(optimizer, update)
        } else {
            (None, update())
        };
        if let Some(positions) = positions {
            positions.end();
            self.taken = Some(positions.moved()?);
        }
        let read = reads.end()?;
        schedules.let_go()?;
        match (read, updated) {
            (_, Err(error)) if !error.is_instance_of::<PyException>(py) => return Err(error.into()),
            (Some(place), _) => return Err(Stop::reads(&place)),
            (None, _) if stray.is_some() => {
                return Err(Stop::Untraceable(format!(
                    "the optimizer's code reaches another one ({}) that is none of its attributes: make it one, so that its state \
                     is seen",
                    stray.unwrap_or_default()
                )))
            }
            (None, updated) => updated.map_err(|error| stop(py, error))?,
        };

        let key = keys.get_item(0)?;
        let drawn = bridge::id(&key) != first;
        if drawn && call.key.is_none() {
            return Err(Stop::Raised(PyValueError::new_err(format!(
                "the optimizer ({}) draws random numbers in its update, which a window cannot repeat: expected accumulate=1",
                optimizer.get_type().fully_qualified_name()?
            ))));
        }
        let (state, kept) = self.left_in_state(py, optimizer, call.state, before)?;
        Ok(UpdateOutput {
            parameters: self.updated(py, optimizer, call.parameters.len(), before)?,
            state,
            kept,
            key: bridge::get(&key).filter(|_| drawn),
        })
    }

    // what the update left in the optimizer: new values of its arrays, and arrays that it did not have
    #[allow(clippy::type_complexity)]
    fn left_in_state<'py>(
        &mut self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        state: &[Array],
        before: &Before<'py>,
    ) -> Result<(Vec<(usize, Array)>, Vec<Array>), Stop> {
        for slot in before.slots.iter().filter(|_| !self.compiled) {
            // NumPy makes arrays of its own of an array and one of its numbers
            if let Some(now) = slot.place.get()?.filter(is_numpy) {
                let array = py.import("mlx.core")?.getattr("array")?.call1((now,))?;
                slot.place.set(&array)?;
            }
        }
        let (after, slots) = Tree::record(optimizer, Scope::Whole)?;
        if let Some(path) = before.state.difference(&after, py) {
            if self.compiled {
                return Err(Stop::Becomes(format!(
                    "the optimizer ({}) changes more than arrays when it updates: {}. What changes with each update \
                     has to be an mx.array that its init_single makes",
                    optimizer.get_type().fully_qualified_name()?,
                    dotted(&path).trim_start_matches('_')
                )));
            }
            self.loose = true;
        }
        let (known, places) = (before.state.paths(py), after.paths(py));
        let mut numbers: HashMap<_, _> = known.iter().zip(0..state.len()).collect();
        let (mut new, mut kept) = (Vec::new(), Vec::new());
        for (path, slot) in places.iter().zip(&slots) {
            let Some(now) = bridge::get(&slot.object) else {
                continue;
            };
            match numbers.remove(path) {
                Some(number) => {
                    let old = faststep::engine::array::id(&state[number]);
                    if faststep::engine::array::id(&now) != old {
                        new.push((number, now));
                    }
                }
                None => kept.push(now),
            }
        }
        new.sort_by_key(|(number, _)| *number);
        Ok((new, kept))
    }

    // the model's parameters as the update left them
    fn updated<'py>(
        &self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        count: usize,
        before: &Before<'py>,
    ) -> Result<Vec<Array>, Stop> {
        let (model, parameters, others) = self.in_model(py)?;
        if others != before.others && has_own_methods(self.model.bind(py), &["update"]) {
            return Err(Stop::Raised(PyRuntimeError::new_err(
                "the model's own update(): expected that it sets parameters alone, and it sets other arrays of the model, which \
                 MLX's loop does twice in a step: for the loss and for the optimizer. Set these after the step",
            )));
        }
        if self.compiled
            && (others != before.others || before.model.difference(&model, py).is_some())
        {
            return Err(Stop::Untraceable(format!(
                "the optimizer ({}) changes more of the model than its parameters",
                optimizer.get_type().fully_qualified_name()?
            )));
        }
        let mut arrays = vec![None; count];
        for (number, slot) in parameters {
            arrays[number] = bridge::get(&slot.object);
        }
        let lost = || expected("an update that leaves the model its parameters");
        let arrays: Option<Vec<Array>> = arrays.into_iter().collect();
        arrays.ok_or_else(|| Stop::Raised(lost()))
    }
}
