//! One update by the optimizer's own code, with tracers in place of the arrays.
use std::collections::{HashMap, HashSet};

use faststep::engine::{Role, Tensor, UpdateCall, UpdateOutput};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyException, PyValueError},
    intern,
    prelude::*,
};

use super::{expected, stop, Current};
use crate::{
    mlx::{bridge, classes::is_numpy},
    optimizer::{trace_update, HostSchedules},
    reach::{
        stop::Stop,
        suspect::{put_back, Positions, Reads},
    },
    tree::{
        paths::dotted, rebuild::rebuild, renewed::Remade, slot::Slot, snapshot::Snapshot,
        walk::Scope, Tree,
    },
};

/// The optimizer and the model's parameters before an update.
struct Before<'py> {
    state: Tree,
    slots: Vec<(Option<usize>, Slot<'py>)>, // by their numbers; none: new since the loss
    model: Tree,
    arrays: Vec<(Option<Role>, Slot<'py>)>, // the model's; none: new since the loss
}

impl Current {
    pub(super) fn update(
        &mut self,
        py: Python<'_>,
        call: UpdateCall,
    ) -> Result<UpdateOutput, Stop> {
        Stop::if_known(self.known.1)?;
        let optimizer = self.optimizer.bind(py).clone();
        let keys = self.key_list.bind(py).clone();
        let (state, slots) = Tree::record(&optimizer, Scope::Whole)?;
        let paths = state.paths(py);
        let number = |at: usize| match &self.in_state {
            Some(known) => known.iter().position(|path| *path == paths[at]),
            None => Some(at),
        };
        let slots = slots.into_iter().enumerate();
        let slots = slots.map(|(at, slot)| (number(at), slot)).collect();
        let (model, arrays) = self.in_model(py)?;
        let before = Before {
            state,
            slots,
            model,
            arrays,
        };
        let snapshot = Snapshot::take(&optimizer)?;
        let model = Snapshot::take(self.model.bind(py))?;
        let key = keys.get_item(0)?;
        let reached = self
            .of_update
            .clone()
            .filter(|_| self.compiled && !self.sketch);
        let reached = reached.map(|looked| {
            let (contents, copies) = (
                looked.snapshot(&Snapshot::default(), py)?,
                looked.copies(py)?,
            );
            let places = looked.spots(py)?;
            Ok::<_, PyErr>((looked, contents, copies, places))
        });
        let reached = reached.transpose()?;
        let shared = self.show_reached(py, &call)?;
        let moving = self.moving.as_ref();
        let moving = moving.filter(|_| self.compiled && !self.sketch);
        let positions = moving.map(|it| Positions::among(self.model.bind(py), it.bind(py)));
        let positions = positions.transpose()?;
        let mut outcome = self.traced_update(py, &optimizer, call, &before, positions.as_ref());
        for (object, shown, array) in shared {
            if bridge::id(&object) == Some(faststep::engine::array::id(&shown)) {
                bridge::assign(&object, &array);
            }
        }
        keys.set_item(0, key)?;
        let replaced = outcome.as_ref().map(|_| snapshot.replaced());
        let replaced = replaced.unwrap_or_else(|_| Ok(Vec::new()))?;
        if outcome.is_err() || self.compiled {
            model.restore()?;
        } else {
            for (role, slot) in &before.arrays {
                if role.is_some() && slot.place.get()?.is_some() {
                    slot.place.set(&slot.object)?;
                }
            }
        }
        if outcome.is_err() || !self.loose {
            snapshot.restore()?;
        } else {
            for (_, slot) in &before.slots {
                slot.place.set(&slot.object)?;
            }
        }
        if outcome.is_ok() && !self.sketch {
            let there = replaced.into_iter();
            let there = there.map(|(_, before, now)| if self.loose { now } else { before });
            self.remade = Some(Remade::of(
                &optimizer,
                &there.collect::<Vec<_>>(),
                &self.were_remade,
            )?);
        }
        if let (Some((looked, contents, ..)), true) = (&reached, outcome.is_ok()) {
            let kept = match contents.new_array(false)? {
                Some(key) => Some(key),
                None => looked.other_array(&HashSet::new(), py)?,
            };
            if let Some(key) = kept {
                let key = key.replace("loss_fn", "optimizer");
                let class = optimizer.get_type().fully_qualified_name()?;
                outcome = Err(Stop::Untraceable(format!(
                    "the optimizer ({class}) keeps an array in an object beside its state ({key}): keep it in its state, \
                     which alone a checkpoint has"
                )));
            }
        }
        // the update is computed once more, without a trace
        let again = matches!(&outcome, Err(stop) if !matches!(stop, Stop::Raised(_)));
        if let Some(positions) = positions.filter(|_| again) {
            outcome = with_lost(outcome, &put_back(positions.into_object().bind(py))?);
        }
        if let Some((looked, contents, copies, places)) = reached.filter(|_| again) {
            looked.restore(py, &contents, &copies)?;
            for (spot, array) in places.iter().zip(looked.arrays.iter()) {
                bridge::assign(&spot.object, array);
                looked.put(spot, &spot.object)?;
            }
        }
        outcome
    }

    // Traced with the loss, what that reaches is an input for the code of the update too: MLX compiles no function that holds one
    // of its inputs. Returns the objects, with the arrays shown and those before.
    fn show_reached<'py>(
        &self,
        py: Python<'py>,
        call: &UpdateCall,
    ) -> PyResult<Vec<(Bound<'py, PyAny>, Array, Array)>> {
        let arrays = &self.looked.arrays;
        let inputs = call.others.get(self.others..self.others + arrays.len());
        let Some(inputs) = inputs.filter(|_| self.compiled) else {
            return Ok(Vec::new());
        };
        let spots = self.looked.spots(py)?.into_iter();
        let shown = spots.zip(inputs).zip(arrays.iter());
        let shown: Vec<_> = shown
            .map(|((spot, input), array)| (spot.object, input.clone(), array.clone()))
            .collect();
        for (object, input, _) in shown.iter().rev() {
            bridge::assign(object, input); // of an object at several places, the first one's
        }
        Ok(shown)
    }

    // the model, and its arrays with their roles
    #[allow(clippy::type_complexity)]
    fn in_model<'py>(&self, py: Python<'py>) -> PyResult<(Tree, Vec<(Option<Role>, Slot<'py>)>)> {
        let (tree, slots) = Tree::of_model(self.model.bind(py))?;
        let roles: HashMap<_, _> = self
            .roles
            .iter()
            .map(|(role, path)| (path, *role))
            .collect();
        let paths = tree.paths(py);
        let arrays = paths.iter().zip(slots);
        let arrays = arrays.map(|(path, slot)| (roles.get(path).copied(), slot));
        let arrays = arrays.collect();
        Ok((tree, arrays))
    }

    fn traced_update<'py>(
        &mut self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        call: UpdateCall,
        before: &Before<'py>,
        positions: Option<&Positions<'py>>,
    ) -> Result<UpdateOutput, Stop> {
        for (number, slot) in &before.slots {
            let shown = number.and_then(|number| call.state.get(number));
            if let Some(shown) = shown.filter(|shown| is_other(slot, shown)) {
                slot.place.set(&bridge::wrap(py, shown)?)?;
            }
        }
        for (role, slot) in &before.arrays {
            let shown = role.and_then(|role| array_of(&call, role));
            if let Some(shown) = shown.filter(|shown| is_other(slot, shown)) {
                slot.place.set(&bridge::wrap(py, shown)?)?;
            }
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
        positions.map_or(Ok(()), Positions::begin)?;
        let update = || optimizer.call_method1(intern!(py, "update"), (model, gradients));
        let (stray, updated) = if self.compiled {
            trace_update(optimizer, update)
        } else {
            (None, update())
        };
        if let Some(positions) = positions {
            positions.end();
            self.taken = Some([positions.moved()?, positions.read()?].concat());
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
        let (parameters, others, new) = self.left_in_model(py, optimizer, &call, before)?;
        Ok(UpdateOutput {
            parameters,
            state,
            others,
            kept: [kept, new].concat(),
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
        for (_, slot) in before.slots.iter().filter(|_| !self.compiled) {
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
        let numbers = known.iter().zip(&before.slots);
        let numbers = numbers.filter_map(|(path, (number, _))| Some((path, (*number)?)));
        let mut numbers: HashMap<_, _> = numbers.collect();
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

    // what the update left in the model: all parameters, new values of its other arrays, and arrays that it did not have
    #[allow(clippy::type_complexity)]
    fn left_in_model<'py>(
        &self,
        py: Python<'py>,
        optimizer: &Bound<'py, PyAny>,
        call: &UpdateCall,
        before: &Before<'py>,
    ) -> Result<(Vec<Array>, Vec<(usize, Array)>, Vec<Array>), Stop> {
        let (model, arrays) = self.in_model(py)?;
        if self.compiled && before.model.difference(&model, py).is_some() {
            return Err(Stop::Untraceable(format!(
                "the optimizer ({}) changes more of the model than the values of its arrays",
                optimizer.get_type().fully_qualified_name()?
            )));
        }
        let mut parameters = vec![None; call.parameters.len()];
        let (mut others, mut new) = (Vec::new(), Vec::new());
        for ((role, slot), path) in arrays.iter().zip(model.paths(py)) {
            let Some(now) = bridge::get(&slot.object) else {
                continue;
            };
            match role {
                Some(Role::Parameter(number)) => parameters[*number] = Some(now),
                Some(role @ Role::Other(number)) => {
                    let Some(shown) = array_of(call, *role) else {
                        continue;
                    };
                    if self.compiled && Tensor::of(shown) != Tensor::of(&now) {
                        return Err(Stop::Untraceable(format!(
                            "the optimizer ({}) gives {} another shape or dtype",
                            optimizer.get_type().fully_qualified_name()?,
                            dotted(&path)
                        )));
                    }
                    if is_other(slot, shown) {
                        others.push((*number, now));
                    }
                }
                None => new.push(now),
            }
        }
        let lost = || expected("an update that leaves the model its parameters");
        let parameters: Option<Vec<Array>> = parameters.into_iter().collect();
        let parameters = parameters.ok_or_else(|| Stop::Raised(lost()))?;
        Ok((parameters, others, new))
    }
}

fn array_of<'a>(call: &UpdateCall<'a>, role: Role) -> Option<&'a Array> {
    match role {
        Role::Parameter(number) => call.parameters.get(number),
        Role::Other(number) => call.others.get(number),
    }
}

fn is_other(slot: &Slot<'_>, array: &Array) -> bool {
    bridge::id(&slot.object) != Some(faststep::engine::array::id(array))
}

// names what an update has taken from generators that cannot be put back
fn with_lost<T>(outcome: Result<T, Stop>, names: &[String]) -> Result<T, Stop> {
    if names.is_empty() {
        return outcome;
    }
    let lost = names.join(", ");
    outcome.map_err(|stop| {
        stop.with(&format!(
            ", and what it took from {lost} before that is lost"
        ))
    })
}
