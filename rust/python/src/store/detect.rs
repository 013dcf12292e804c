//! Comparison of model and optimizer with the last step, apart from the values of their arrays.
use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
};

use faststep::engine::{Layout, Role, Rule, Rules, Tensor};
use mlx_rs::Array;
use pyo3::{intern, prelude::*, types::PyDict};

use super::{known_numbers::have_varied, ModelSignature, Numbers, Store, Varying};
use crate::{
    mlx::{bridge, classes::has_own_methods},
    optimizer::native_rules,
    tree::{
        apart,
        rebuild::rebuild,
        slot::Slot,
        snapshot::{Placed, Snapshot},
        walk::Scope,
        Tree,
    },
};

/// Methods of a model by which MLX tells at each call of a loss what is trained.
const ASKED: [&str; 3] = [
    "trainable_parameters",
    "trainable_parameter_filter",
    "filter_and_map",
];

/// The most places of the model where a loss sets something that are looked at.
const MAX_PLACES: usize = 64;

/// Largest number of signatures of the model, and of the optimizer's options, that are kept; the oldest goes first.
const MAX_SIGNATURES: usize = 64;

/// A number of the model that has had so many other values belongs to what is looked at in each call.
pub(super) const MANY_VALUES: usize = 2;

impl Store {
    fn known(&self) -> Vec<usize> {
        let (Some(current), Some(engine)) = (&self.current, &self.engine) else {
            return Vec::new();
        };
        let id = |array: Option<&Array>| array.map_or(0, faststep::engine::array::id);
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
        let (_, version) = apart::of(model);
        let same = std::mem::replace(&mut self.apart, version) == version;
        if !same {
            self.models.clear(); // they have what is left out now, or not what is looked at
        }
        let current = self.current.as_ref().filter(|_| same);
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
        let at = self.models.iter().position(|known| {
            let differs_in = || known.tree.other_numbers(&tree, py);
            known.asked == asked
                && (known.tree.equals(&tree, py)
                    || (known.has_free_numbers()
                        && differs_in().is_some_and(|it| it.iter().all(|&at| known.is_free(at)))))
        });
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
                counts: known.counts.clone(),
                varying: known.varying.clone(),
            })
        } else {
            let current = self.current.as_ref().filter(|_| same);
            let changed = current.map(|it| it.tree.changed_attributes(&tree, py));
            apart::note(model, changed.unwrap_or_default())?;
            Rc::new(self.sign(model, tree, asked)?)
        };
        self.models.push(signature.clone());
        if self.models.len() > MAX_SIGNATURES {
            self.models.remove(0);
        }
        self.switch(py, signature)?;
        Ok((slots, false))
    }

    /// Note places of the model where a loss sets something.
    pub fn note_places(&mut self, places: Vec<Placed>, py: Python<'_>) {
        for place in places {
            let is_known = self.places.iter().any(|known| known.is_of(&place, py));
            if !is_known && self.places.len() < MAX_PLACES {
                self.places.push(place);
            }
        }
    }

    /// Take the model's numbers and flags as they are now for those of its signature: a loss has changed them, which does not matter
    /// to it. `add`: what it adds to some of them at each call.
    pub fn accept_model(
        &mut self,
        model: &Bound<'_, PyAny>,
        add: impl FnOnce() -> PyResult<()>,
    ) -> PyResult<()> {
        let py = model.py();
        let signature = self.signature()?;
        let (tree, _) = Tree::of_model(model)?;
        let now = Snapshot::take(model)?;
        add()?;
        let (next, _) = Tree::of_model(model)?;
        now.restore()?;
        let Some(counts) = tree.other_numbers(&next, py) else {
            return Ok(());
        };
        let paths = tree.paths(py);
        if tree.tensors() != signature.tree.tensors() || paths != signature.tree.paths(py) {
            return Ok(());
        }
        let trained = signature.parameters.iter().map(|&slot| &paths[slot]);
        if trained.collect::<HashSet<_>>() != trainable_now(model)?.1.iter().collect() {
            return Ok(()); // it has frozen a part
        }
        let at = self
            .models
            .iter()
            .position(|known| known.id == signature.id);
        let accepted = Rc::new(ModelSignature {
            id: signature.id,
            form: signature.form,
            tree,
            roles: signature.roles.clone(),
            trainable: signature.trainable.clone_ref(py),
            parameters: signature.parameters.clone(),
            asked: signature.asked.clone(),
            counts,
            varying: signature.varying.clone(),
        });
        if let Some(at) = at {
            self.models[at] = accepted.clone();
        }
        self.current = Some(accepted);
        Ok(())
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
        let form = self.form(&tree, asked.as_ref(), py).unwrap_or(self.next_id);
        let varying = self.varying_of(form, &tree, py);
        Ok(ModelSignature {
            id: self.next_id,
            form,
            varying,
            tree,
            roles: Rc::new(roles),
            trainable: trainable.unbind(),
            parameters,
            asked,
            counts: Vec::new(),
        })
    }

    // numbers that had other values in several models of a form, or did so in another form; these models are forgotten then, since
    // they are told apart by them
    fn varying_of(&mut self, form: usize, tree: &Tree, py: Python<'_>) -> Option<Rc<Varying>> {
        if self.own_numbers {
            return None;
        }
        let known = self.varying.iter().position(|known| known.form == form);
        let alike = self.models.iter().filter(|known| known.form == form);
        let mut times: HashMap<usize, usize> = HashMap::new();
        for at in alike.flat_map(|known| known.tree.changed_numbers(tree, py)) {
            *times.entry(at).or_default() += 1;
        }
        times.retain(|_, times| *times >= MANY_VALUES);
        if times.is_empty() && (known.is_some() || self.varying.is_empty()) {
            return known.map(|at| self.varying[at].clone());
        }
        let others = || self.varying.iter().flat_map(|known| &known.numbers);
        let mut numbers = tree.numbers(py);
        numbers.retain(|(at, path)| {
            times.contains_key(at) || others().any(|(_, other)| other == path)
        });
        if numbers.is_empty() {
            return None;
        }
        let varying = Rc::new(Varying {
            form,
            numbers,
            now: PyDict::new(py).unbind(),
        });
        self.models.retain(|known| known.form != form);
        if let Some(at) = known {
            self.varying.remove(at);
        }
        self.varying.push(varying.clone());
        if self.varying.len() > MAX_SIGNATURES {
            self.varying.remove(0);
        }
        Some(varying)
    }

    /// Keep all numbers of the model in its signature: the loss changes some itself.
    pub fn keep_numbers(&mut self) {
        if std::mem::replace(&mut self.own_numbers, true) {
            return;
        }
        self.varying.clear();
        self.models.retain(|known| known.varying.is_none());
    }

    /// The numbers of the model, by their paths, that have changed again and again: they are no part of its signature.
    pub fn varying_numbers<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        if self.varying.is_empty() {
            return Ok(None);
        }
        self.look_at_model(model)?;
        let py = model.py();
        let current = self.signature()?;
        let Some(varying) = &current.varying else {
            return Ok(None);
        };
        let now = varying.now.bind(py);
        for (at, path) in &varying.numbers {
            now.set_item(path, current.tree.number(*at, py))?;
        }
        Ok(Some(now.clone()))
    }

    /// All numbers of the model's signature.
    pub fn model_numbers(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        Ok(self.signature()?.tree.own_numbers(py))
    }

    /// The numbers of the model to which a loss adds at each call, as they are now.
    pub fn counted(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let current = self.signature()?;
        let numbers = current.counts.iter().map(|&at| current.tree.number(at, py));
        Ok(numbers.flatten().map(Bound::unbind).collect())
    }

    /// Their names; `None` where one is in a list or a dict, which code may read as a whole.
    pub fn counted_names(&self, py: Python<'_>) -> PyResult<Option<Vec<String>>> {
        let current = self.signature()?;
        let names = current.counts.iter();
        Ok(names.map(|&at| current.tree.attribute(at, py)).collect())
    }

    // the form of a known model from which this one differs in numbers alone
    fn form(
        &self,
        tree: &Tree,
        asked: Option<&HashSet<Vec<String>>>,
        py: Python<'_>,
    ) -> Option<usize> {
        let models = self.models.iter().rev();
        let models = models.filter(|known| known.asked.as_ref() == asked);
        let mut alike = models.filter(|known| known.tree.equals_but_numbers(tree, py));
        alike.next().map(|known| known.form)
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
        let layout = engine.layout().clone();
        let scope = self.scope();
        let known: Vec<usize> = match scope {
            Scope::Whole => engine
                .state()
                .iter()
                .map(faststep::engine::array::id)
                .collect(),
            Scope::Options | Scope::Arguments => Vec::new(),
        };
        let tree = self.options.last().map(|(_, tree)| tree);
        let doubted = std::mem::take(&mut self.doubted);
        let slots = tree.and_then(|tree| tree.check(optimizer, scope, &known));
        if let Some(slots) = slots.filter(|_| !doubted) {
            return self.state_or(slots, optimizer);
        }
        let before = tree.map(|tree| tree.tensors().to_vec());
        let (tree, slots) = Tree::record(optimizer, scope)?;
        let same = before.is_some_and(|before| before == tree.tensors());
        self.sign_options(optimizer.py(), tree);
        if let Some(Rule::Native(old)) = &self.rule {
            let paths = self.signature()?.paths();
            let new = native_rules(optimizer, &paths, || self.trainable(model))?;
            let new = new.and_then(|new| old.replaced(new, layout.tensors()));
            let Some(rules) = new else {
                return Ok(None);
            };
            let rules = self.with_numbers(rules, layout.tensors());
            self.rule = Some(Rule::Native(Rc::new(rules)));
        } else if !same {
            return Ok(None);
        }
        self.state_or(slots, optimizer)
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

    fn state_or<'py>(
        &self,
        slots: Vec<Slot<'py>>,
        optimizer: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Slot<'py>>>> {
        match &self.moments {
            Some(moments) => moments.scalars(optimizer.py()),
            None => Ok(Some(slots)),
        }
    }

    pub(super) fn scope(&self) -> Scope {
        match self.rule {
            Some(Rule::Native(_)) => Scope::Options,
            Some(Rule::Host) | None => Scope::Whole,
        }
    }

    pub(super) fn sign_layout(&mut self, layout: Rc<Layout>) {
        sign(
            &mut self.layouts,
            &mut self.next_id,
            layout,
            |known, new| known == new,
        );
    }

    pub(super) fn sign_options(&mut self, py: Python<'_>, tree: Tree) {
        let native = matches!(self.rule, Some(Rule::Native(_))); // its numbers are in the rule
        sign(&mut self.options, &mut self.next_id, tree, |known, new| {
            known.equals(new, py) || (native && known.equals_but_numbers(new, py))
        });
    }
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
