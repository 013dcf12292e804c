//! Attributes of models that are no part of their trees: what a program collects there changes at each step, and no loss reads it.
use std::{cell::RefCell, rc::Rc};

use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple, PyWeakrefReference},
};

use crate::mlx::{bridge, classes::is_module};

/// An attribute that has had so many other contents is left apart, where no loss reads it.
const MANY_CONTENTS: usize = 2;

/// The most attributes of a model that are noted.
const MAX_NOTED: usize = 64;

/// Attributes by which MLX tells what is trained: these always count.
const ALWAYS: [&str; 2] = ["_no_grad", "_training"];

/// Names of attributes that are left apart.
pub type Names = Rc<Vec<String>>;

#[derive(Default)]
struct Known(Vec<Model>);

struct Model {
    address: usize,
    reference: Py<PyWeakrefReference>,
    names: Names,
    version: usize,
    before: (Names, usize),      // the names and the version before these
    made: usize,                 // the last version
    noted: Vec<(String, usize)>, // others, and how often they have had other contents
    read: Vec<String>,           // which a loss may read
}

impl Model {
    fn become_others(&mut self, names: Vec<String>) {
        let now = (self.names.clone(), self.version);
        if *self.before.0 == names {
            (self.names, self.version) = std::mem::replace(&mut self.before, now);
            return;
        }
        self.made += 1;
        (self.names, self.version) = (Rc::new(names), self.made);
        self.before = now;
    }
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::default(); // models and their steps belong to a thread
}

impl Known {
    fn find(&mut self, model: &Bound<'_, PyAny>) -> Option<&mut Model> {
        let address = model.as_ptr().addr();
        let mut models = self.0.iter_mut();
        models.find(|known| {
            let same = || known.reference.bind(model.py()).upgrade();
            known.address == address && same().is_some_and(|it| it.is(model))
        })
    }
}

fn with<T>(model: &Bound<'_, PyAny>, work: impl FnOnce(&mut Model) -> T) -> Option<T> {
    KNOWN.with_borrow_mut(|known| known.find(model).map(work))
}

/// The names of the attributes that are no part of a model's tree, and how often these have become others.
pub fn of(model: &Bound<'_, PyAny>) -> (Names, usize) {
    with(model, |it| (it.names.clone(), it.version)).unwrap_or_default()
}

/// Note that attributes have other contents than before.
pub fn note(model: &Bound<'_, PyAny>, mut names: Vec<String>) -> PyResult<()> {
    names.retain(|name| !ALWAYS.contains(&name.as_str()));
    if names.is_empty() {
        return Ok(());
    }
    if with(model, |_| ()).is_none() {
        let reference = PyWeakrefReference::new(model)?;
        KNOWN.with_borrow_mut(|known| {
            let is_there = |it: &Model| it.reference.bind(model.py()).upgrade().is_some();
            known.0.retain(is_there);
            known.0.push(Model {
                address: model.as_ptr().addr(),
                reference: reference.unbind(),
                names: Names::default(),
                version: 0,
                before: (Names::default(), 0),
                made: 0,
                noted: Vec::new(),
                read: Vec::new(),
            });
        });
    }
    with(model, |it| {
        names.retain(|name| !it.read.contains(name) && !it.names.contains(name));
        for name in names {
            if let Some((_, times)) = it.noted.iter_mut().find(|(known, _)| *known == name) {
                *times += 1;
            } else if it.noted.len() < MAX_NOTED {
                it.noted.push((name, 1));
            }
        }
    });
    Ok(())
}

/// Leave apart what has had other contents again and again, from the next look at the model on.
pub fn settle(model: &Bound<'_, PyAny>) {
    with(model, |it| {
        let many = it
            .noted
            .extract_if(.., |(_, times)| *times >= MANY_CONTENTS);
        let many: Vec<_> = many.map(|(name, _)| name).collect();
        if !many.is_empty() {
            it.become_others([&it.names[..], &many].concat());
        }
    });
}

/// Leave these apart no more: a loss may read them.
pub fn keep(model: &Bound<'_, PyAny>, names: &[String]) {
    with(model, |it| {
        it.read.extend_from_slice(names);
        let left = it.names.iter().filter(|name| !names.contains(name));
        it.become_others(left.cloned().collect());
    });
}

/// Return whether what is under a key of a module is of the kind that can be left apart: of its items, containers that MLX takes
/// no parameters from; of its attributes, anything but arrays and modules.
pub fn is_apart(
    names: &[String],
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    is_item: bool,
) -> bool {
    let Some(key) = key
        .cast::<PyString>()
        .ok()
        .and_then(|key| key.to_str().ok())
    else {
        return false;
    };
    if !names.iter().any(|name| name == key) {
        return false;
    }
    let is_container = value.is_instance_of::<PyDict>()
        || value.is_instance_of::<PyList>()
        || value.is_instance_of::<PyTuple>();
    if is_item {
        return key.starts_with('_') && is_container && !is_module(value);
    }
    !value.is_instance_of::<PyDict>() && !bridge::is_array(value)
}
