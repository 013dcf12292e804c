//! Comparison of model and optimizer with the last step, apart from the values of their arrays.
use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
};

use faststep::engine::{array::id, Layout, Role, Rule, Rules, Tensor};
use mlx_rs::Array;
use pyo3::{intern, prelude::*};

use super::{
    known_numbers::{have_varied, MANY_VALUES},
    ModelSignature, Numbers, OptionTrees, Store,
};
use crate::{
    mlx::{bridge, classes::has_own_methods},
    optimizer::traceable_rates,
    tree::{rebuild::rebuild, slot::Slot, walk::Scope, Tree},
};

/// Methods of a model by which MLX tells at each call of a loss what is trained.
const ASKED: [&str; 3] = [
    "trainable_parameters",
    "trainable_parameter_filter",
    "filter_and_map",
];

/// Largest number of signatures of the model, and of the optimizer's options, that are kept; the oldest goes first.
const MAX_SIGNATURES: usize = 64;

impl Store {
    fn known(&self) -> Vec<usize> {
        let (Some(current), Some(engine)) = (&self.current, &self.engine) else {
            return Vec::new();
        };
        let id = |array: Option<&Array>| array.map_or(0, id);
        let roles = current.roles.iter().map(|(role, _)| match role {
            Role::Parameter(i) => id(engine.parameters().get(*i)),
            Role::Other(i) => self.others.ids().get(*i).copied().unwrap_or(0),
        });
        roles.collect()
    }

    // the model's slots, and whether all its arrays are known
    pub(super) fn look_at_model<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
    ) -> PyResult<(Vec<Slot<'py>>, bool)> {
        let current = self.current.as_ref();
        let is_trained = |it: &Rc<ModelSignature>| {
            it.asked.is_none() || asked(model).ok() == Some(it.asked.clone())
        };
        if let Some(current) = current.filter(|it| is_trained(it)) {
            let known = self.known();
            let alone = current.tree.doubles().is_empty(); // else each step puts new objects into its slots
            let same = alone.then(|| current.tree.same_slots(model, &known));
            if let Some(slots) = same.flatten() {
                return Ok((slots, true));
            }
            if let Some(slots) = current.tree.check_whole(model, &known) {
                return Ok((slots, false));
            }
        }
        let py = model.py();
        let (tree, slots) = Tree::of_model(model)?;
        let asked = asked(model)?;
        let at = self
            .models
            .iter()
            .position(|known| known.asked == asked && known.tree.equals(&tree, py));
        let signature = if let Some(at) = at {
            // keep the newly recorded objects: the fast check compares by identity
            let known = self.models.remove(at);
            Rc::new(ModelSignature {
                id: known.id,
                form: known.form,
                tree,
                roles: known.roles.clone(),
                trainable: known.trainable.clone_ref(py),
                parameters: known.parameters.clone(),
                asked,
            })
        } else {
            Rc::new(self.sign(model, tree, asked)?)
        };
        self.models.push(signature.clone());
        if self.models.len() > MAX_SIGNATURES {
            self.models.remove(0);
        }
        self.switch(py, signature)?;
        Ok((slots, false))
    }

    fn sign(
        &mut self,
        model: &Bound<'_, PyAny>,
        tree: Tree,
        asked: Option<HashSet<Vec<String>>>,
    ) -> PyResult<ModelSignature> {
        let py = model.py();
        let (trainable, trainable_paths) = trainable_now(model)?;
        let paths = tree.paths(py);
        let last: HashMap<usize, usize> = tree.doubles().iter().copied().collect();
        let last = |slot: usize| last.get(&slot).copied().unwrap_or(slot);
        let trained = (0..paths.len()).filter(|&slot| trainable_paths.contains(&paths[slot]));
        let parameters: Vec<usize> = trained.collect();
        let own: HashMap<usize, usize> = parameters.iter().copied().zip(0..).collect();
        // a place that is trained under one of its names is that parameter under the others: a private one, a frozen one
        let same = parameters.iter().map(|&slot| last(slot)).zip(0..);
        let same: HashMap<usize, usize> = same.collect();
        let mut others = 0..;
        let mut role = |slot: usize| match own.get(&slot).or_else(|| same.get(&last(slot))) {
            Some(&parameter) => Role::Parameter(parameter),
            None => Role::Other(others.next().unwrap_or_default()),
        };
        let roles: Vec<_> = paths
            .into_iter()
            .enumerate()
            .map(|(slot, path)| (role(slot), path))
            .collect();
        self.next_id += 1;
        let form = self.form(&tree, &roles).unwrap_or(self.next_id);
        Ok(ModelSignature {
            id: self.next_id,
            form,
            tree,
            roles: Rc::new(roles),
            trainable: trainable.unbind(),
            parameters,
            asked,
        })
    }

    // the form of a known model whose arrays have the same places, roles, shapes and dtypes
    fn form(&self, tree: &Tree, roles: &[(Role, Vec<String>)]) -> Option<usize> {
        let mut models = self.models.iter().rev();
        let alike =
            models.find(|known| *known.roles == roles && known.tree.tensors() == tree.tensors());
        alike.map(|known| known.form)
    }

    // switch to another signature; the engine is kept if the trained tensors are the same
    fn switch(&mut self, py: Python<'_>, signature: Rc<ModelSignature>) -> PyResult<()> {
        if let Some(old) = &self.current {
            let same = old.paths() == signature.paths()
                && old.tensors() == signature.tensors()
                && old.doubles() == signature.doubles();
            if !same {
                self.expose(py)?;
                self.forget()?;
            }
        }
        self.others = Rc::default();
        self.current = Some(signature);
        Ok(())
    }

    // drop the engine if something in a native optimizer's state dicts has been replaced
    pub(super) fn look_at_moments(&mut self, optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
        let current = match &self.moments {
            Some(moments) => moments.is_current(optimizer)?,
            None => true,
        };
        if !current {
            self.expose(optimizer.py())?; // one of several may have been replaced: the others keep their state
            self.forget()?;
        }
        Ok(())
    }

    // the optimizer's slots; None if the engine has to be rebuilt
    pub(super) fn look_at_optimizer<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Slot<'py>>>> {
        let Some(engine) = &self.engine else {
            return Ok(None);
        };
        if let Some(Rule::Host) = self.rule {
            return self.look_at_own_state(optimizer);
        }
        let layout = engine.layout().clone();
        let scope = Scope::Options;
        let known = self.options.last();
        let slots = known.and_then(|(_, known)| known.all.check(optimizer, scope, &[]));
        if slots.is_some() {
            return self.state_slots(optimizer).map(Some);
        }
        self.sign_options(optimizer, Tree::record(optimizer, scope)?.0)?;
        if let Some(Rule::Native(old)) = &self.rule {
            let tensors = layout.tensors();
            let new = self.rules(optimizer, || self.trainable(model))?;
            let new = new.and_then(|new| old.replaced(new, tensors));
            let Some(rules) = new else {
                return Ok(None);
            };
            let rules = self.with_numbers(rules, layout.tensors());
            self.rule = Some(Rule::Native(Rc::new(rules)));
        }
        self.state_slots(optimizer).map(Some)
    }

    // the slots of an optimizer of the user's own; none where the engine's state is another
    fn look_at_own_state<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Slot<'py>>>> {
        let Some(engine) = self.engine.as_ref().filter(|_| self.takes_state) else {
            return Ok(Some(Vec::new())); // it keeps its state itself, and reads its options as it updates
        };
        if !self.watches {
            let slots = Tree::slots(optimizer)?;
            let mut pairs = slots.iter().zip(engine.state());
            let fits = slots.len() == engine.state().len()
                && pairs.all(|(slot, known)| slot.holds(known) || has_form(slot, known));
            return Ok(fits.then_some(slots));
        }
        let known: Vec<usize> = engine.state().iter().map(id).collect();
        let last = self.options.last().map(|(_, known)| &known.all);
        let slots = last.and_then(|tree| tree.check(optimizer, Scope::Whole, &known));
        if slots.is_some() {
            return Ok(slots);
        }
        let (tree, slots) = Tree::record(optimizer, Scope::Whole)?;
        let same = last.is_some_and(|last| last.tensors() == tree.tensors());
        self.sign_options(optimizer, tree)?;
        Ok(same.then_some(slots))
    }

    /// Rules whose numbers are arrays of the state, once these have been others a few times, or those of other optimizers.
    pub(super) fn with_numbers(&mut self, rules: Rules, tensors: &[Tensor]) -> Rules {
        let values = rules.numbers();
        let bits = |values: &[f64]| -> Vec<_> { values.iter().map(|it| it.to_bits()).collect() };
        if bits(&self.numbers.values) != bits(&values) {
            let varied = self.numbers.changes == 0 && have_varied(&rules, tensors);
            let changes = if varied { MANY_VALUES } else { 0 };
            self.numbers = Numbers {
                values,
                changes: self.numbers.changes + changes + 1,
                arrays: Vec::new(),
            };
        }
        if self.numbers.changes > MANY_VALUES {
            return rules.with_numbers_taken();
        }
        rules
    }

    /// Put the numbers of the optimizer's options into their places.
    pub(super) fn give_numbers(&mut self) {
        let Some(engine) = &mut self.engine else {
            return;
        };
        if let Some(first) = engine.places().numbers {
            let Numbers { values, arrays, .. } = &mut self.numbers;
            if arrays.is_empty() {
                #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
                arrays.extend(values.iter().map(|&value| Array::from_f32(value as f32)));
            }
            for (at, array) in (first..).zip(arrays) {
                engine.set_state(at, array.clone());
            }
        }
    }

    /// Put the norm to which gradients are clipped into its place, where it has one.
    pub fn give_max_norm(&mut self, max_norm: Option<f64>) {
        let place = self
            .engine
            .as_mut()
            .and_then(|engine| Some((engine.places().max_norm?, engine)));
        let Some(((at, engine), max_norm)) = place.zip(max_norm) else {
            return;
        };
        #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
        let array = match self.max_norm.take() {
            Some((known, array)) if known.to_bits() == max_norm.to_bits() => array,
            _ => Array::from_f32(max_norm as f32),
        };
        engine.set_state(at, array.clone());
        self.max_norm = Some((max_norm, array));
    }

    pub(super) fn sign_layout(&mut self, layout: Rc<Layout>) {
        sign(
            &mut self.layouts,
            &mut self.next_id,
            layout,
            |known, new| known == new,
        );
    }

    pub(super) fn sign_options(&mut self, optimizer: &Bound<'_, PyAny>, all: Tree) -> PyResult<()> {
        let py = optimizer.py();
        let rates = traceable_rates(optimizer)?;
        let rates = Tree::record(rates.as_any(), Scope::Options)?.0;
        let native = matches!(self.rule, Some(Rule::Native(_)));
        let new = OptionTrees { all, rates };
        sign(&mut self.options, &mut self.next_id, new, |known, new| {
            known.all.equals(&new.all, py) || (native && known.rates.equals(&new.rates, py))
        });
        Ok(())
    }
}

fn has_form(slot: &Slot<'_>, known: &Array) -> bool {
    let array = bridge::get(&slot.object);
    array.is_some_and(|array| array.shape() == known.shape() && array.dtype() == known.dtype())
}

// the trainable parameters as a tree of holes, and their paths
#[allow(clippy::type_complexity)] // a tree and its paths
fn trainable_now<'py>(
    model: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, HashSet<Vec<String>>)> {
    let py = model.py();
    let trainable = model.call_method0(intern!(py, "trainable_parameters"))?;
    let hole = bridge::wrap(py, &faststep::engine::array::hollow())?;
    let trainable = rebuild(&trainable, &mut |_| Ok(hole.clone()))?;
    let paths = Tree::record(&trainable, Scope::Whole)?.0.paths(py);
    Ok((trainable, paths.into_iter().collect()))
}

// the paths of the trainable parameters, where the model's own code says which those are
fn asked(model: &Bound<'_, PyAny>) -> PyResult<Option<HashSet<Vec<String>>>> {
    let own = has_own_methods(model, &ASKED);
    own.then(|| Ok(trainable_now(model)?.1)).transpose()
}

// make it the most recent one of those that are known, with the id of the same or a new one
pub(super) fn sign<T>(
    known: &mut Vec<(usize, T)>,
    last_id: &mut usize,
    new: T,
    is_same: impl Fn(&T, &T) -> bool,
) {
    let at = known.iter().position(|(_, each)| is_same(each, &new));
    let id = at.map_or_else(
        || {
            *last_id += 1;
            *last_id
        },
        |at| known.remove(at).0,
    );
    known.push((id, new));
    if known.len() > MAX_SIGNATURES {
        known.remove(0);
    }
}
