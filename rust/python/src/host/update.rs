//! One update by an optimizer of the user's own, as the plain loop calls it.
//!
//! The optimizer keeps its arrays itself: the step evaluates them with the parameters, and nothing of it is left out.
use faststep::engine::{array, Role, UpdateCall, UpdateOutput};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    intern,
    prelude::*,
    types::PyList,
};

use crate::{
    mlx::bridge,
    tree::{paths::dotted, rebuild::rebuild, slot::Slot, walk::Scope, Tree},
};

/// Objects of an update by the optimizer's own code.
pub struct Update {
    /// The model.
    pub model: Py<PyAny>,
    /// `mx.random`'s key list.
    pub key_list: Py<PyList>,
    /// The model's trainable parameters as a tree.
    pub trainable: Py<PyAny>,
    /// The role of each array slot of the model, and the path to it.
    pub roles: std::rc::Rc<Vec<(Role, Vec<String>)>>,
}

fn expected(what: &str) -> PyErr {
    PyRuntimeError::new_err(format!("the update of the optimizer: expected {what}"))
}

impl Update {
    /// Call the optimizer with these gradients, and return what it has made of the model.
    pub fn call(
        &self,
        py: Python<'_>,
        optimizer: &Bound<'_, PyAny>,
        call: UpdateCall,
    ) -> PyResult<UpdateOutput> {
        let (model, keys) = (self.model.bind(py), self.key_list.bind(py));
        let (_, slots) = Tree::of_model(model)?;
        if slots.len() < self.roles.len() {
            return Err(expected("a model with the arrays that it had"));
        }
        let old_key = keys.get_item(0)?;
        for (slot, (role, _)) in slots.iter().zip(self.roles.iter()) {
            let array = array_of(&call, *role).filter(|array| !slot.holds(array));
            if let Some(array) = array {
                slot.place.set(&bridge::wrap(py, array)?)?;
            }
        }
        if let Some(key) = call.key {
            keys.set_item(0, bridge::wrap(py, key)?)?;
        }
        let first = bridge::id(&keys.get_item(0)?);
        let mut gradients = call.gradients.iter();
        let gradients = rebuild(self.trainable.bind(py), &mut |_| {
            let array = gradients.next();
            bridge::wrap(
                py,
                array.ok_or_else(|| expected("as many gradients as parameters"))?,
            )
        })?;
        let updated = optimizer.call_method1(intern!(py, "update"), (model, gradients));
        let left = updated.and_then(|_| self.left(optimizer, &slots, &call));
        for slot in slots.iter().take(self.roles.len()) {
            slot.place.set(&slot.object)?;
        }
        let key = keys.get_item(0)?;
        keys.set_item(0, old_key)?;
        let mut output = left?;
        if bridge::id(&key) != first {
            if call.key.is_none() {
                return Err(PyValueError::new_err(format!(
                    "the optimizer ({}) draws random numbers in its update, which a window cannot repeat: expected accumulate=1",
                    optimizer.get_type().fully_qualified_name()?
                )));
            }
            output.key = bridge::get(&key);
        }
        Ok(output)
    }

    // the parameters, other arrays of the model that are others now, and what the optimizer keeps that is yet to be computed
    fn left(
        &self,
        optimizer: &Bound<'_, PyAny>,
        slots: &[Slot<'_>],
        call: &UpdateCall,
    ) -> PyResult<UpdateOutput> {
        let mut parameters: Vec<Option<Array>> = vec![None; call.parameters.len()];
        let mut others = Vec::new();
        for (slot, (role, path)) in slots.iter().zip(self.roles.iter()) {
            let now = slot.place.get()?.as_ref().and_then(bridge::get);
            let Some(now) = now else {
                return Err(expected(&format!(
                    "it to leave {} an mx.array",
                    dotted(path)
                )));
            };
            match role {
                Role::Parameter(at) => parameters[*at] = Some(now),
                Role::Other(at) => {
                    let shown = array_of(call, *role);
                    if shown.map(array::id) != Some(array::id(&now)) {
                        others.push((*at, now));
                    }
                }
            }
        }
        let parameters: Option<Vec<Array>> = parameters.into_iter().collect();
        let (_, state) = Tree::record(optimizer, Scope::Whole)?;
        let state = state.iter().filter_map(|slot| bridge::get(&slot.object));
        Ok(UpdateOutput {
            parameters: parameters
                .ok_or_else(|| expected("it to leave the model its parameters"))?,
            others,
            kept: state.filter(array::is_lazy).collect(),
            ..UpdateOutput::default()
        })
    }
}

fn array_of<'a>(call: &UpdateCall<'a>, role: Role) -> Option<&'a Array> {
    match role {
        Role::Parameter(at) => call.parameters.get(at),
        Role::Other(at) => call.others.get(at),
    }
}
