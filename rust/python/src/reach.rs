//! Objects that a loss reaches beside its arguments: found once by `faststep._step._reach`, looked at before each call.
//!
//! A [`Program`] is a list of nodes, each of which is found from its parent: a closure cell, a global, an attribute. It
//! holds none of the user's objects but numbers, strings and code. Arrays at its nodes are inputs of a trace, numbers and
//! strings are compared, and anything else that is not as it was makes a program anew. Uses `tree` and `mlx`.
mod classes;
mod look;
mod node;
mod reached;
mod seen;
pub mod stop;
pub mod suspect;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use mlx_rs::Array;
use pyo3::{prelude::*, types::PyTuple};

use faststep::engine::Tensor;

use classes::Classes;
use look::Look;
pub use look::Looked;
use node::{Node, Row};
pub use reached::{Reached, Written};
pub use seen::Seen;

/// Largest number of programs that are kept; the one used least recently goes first.
const MAX_PROGRAMS: usize = 64;

/// Number of searches after changes by another thread.
const MAX_TRIES: usize = 3;

/// Objects that one loss reaches, for one structure of the objects that lead there.
pub struct Program {
    /// Tells programs apart.
    pub id: usize,
    classes: Classes,
    nodes: Vec<Node>,
    rows: Vec<Row>,
    tensors: Rc<Vec<Tensor>>,            // of the arrays
    values: RefCell<Rc<Vec<Py<PyAny>>>>, // at the last look
    ids: RefCell<Vec<usize>>, // of the arrays at the last look: those have the noted shapes and dtypes
    held: RefCell<Rc<Vec<Array>>>, // the arrays at the last look
    model: Cell<Option<usize>>, // the signature that the model had at the search
}

impl Program {
    /// Shape and dtype of each array.
    pub fn tensors(&self) -> &Rc<Vec<Tensor>> {
        &self.tensors
    }

    /// Return the path of a node as a user writes it: `loss_fn.self.target.weight`.
    pub fn name(&self, py: Python<'_>, node: usize) -> String {
        let node = &self.nodes[node];
        let parent = node.parent.map(|parent| self.name(py, parent));
        node.name(py, parent)
    }
}

/// The programs of a step.
#[derive(Default)]
pub struct Reach {
    programs: Vec<Rc<Program>>, // most recent last
    made: usize,
    change: Option<String>,
}

impl Reach {
    /// Look at what the loss reaches now.
    ///
    /// `roots`: the loss function, the model, then objects among the arguments. `owned`: the optimizer.
    pub fn look(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Looked> {
        match self.look_again(roots, None)? {
            Some(looked) => Ok(looked),
            None => self.search(roots, owned),
        }
    }

    /// The same where the model's signature is known: a model that is made up otherwise may lead to other objects.
    pub fn look_with(
        &mut self,
        looked: Rc<Looked>,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
        model: usize,
    ) -> PyResult<Rc<Looked>> {
        let known = &looked.program.model;
        if known.get().is_none_or(|known| known == model) {
            known.set(Some(model));
            return Ok(looked);
        }
        let looked = match self.look_again(roots, Some(model))? {
            Some(looked) => looked,
            None => self.search(roots, owned)?,
        };
        looked.program.model.set(Some(model));
        Ok(Rc::new(looked))
    }

    // what a program leads to that is known, for that signature of the model
    fn look_again(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        model: Option<usize>,
    ) -> PyResult<Option<Looked>> {
        let mut change = None;
        for at in (0..self.programs.len()).rev() {
            let program = &self.programs[at];
            if model.is_some() && program.model.get() != model {
                continue;
            }
            match program.look(roots)? {
                Look::Same(objects, values) => {
                    let program = self.programs.remove(at);
                    self.programs.push(program.clone());
                    return Ok(Some(Looked::new(program, objects, values)));
                }
                Look::Differs(node) => {
                    let name = || self.programs[at].name(roots[0].py(), node);
                    change.get_or_insert_with(name);
                }
                Look::Class(class) => {
                    change.get_or_insert_with(|| format!("a method of {class}"));
                }
            }
        }
        self.change = change;
        Ok(None)
    }

    fn search(&mut self, roots: &[Bound<'_, PyAny>], owned: &Bound<'_, PyAny>) -> PyResult<Looked> {
        let (mut program, mut tries) = (self.discover(roots, owned)?, 0);
        let (objects, values) = loop {
            match program.look(roots)? {
                Look::Same(objects, values) => break (objects, values),
                Look::Differs(node) if tries == MAX_TRIES => {
                    return Err(node::moving(&program.name(owned.py(), node)))
                }
                Look::Differs(_) | Look::Class(_) => {
                    (program, tries) = (self.discover(roots, owned)?, tries + 1);
                }
            }
        };
        let program = Rc::new(program);
        self.programs.push(program.clone());
        if self.programs.len() > MAX_PROGRAMS {
            self.programs.remove(0);
        }
        Ok(Looked::new(program, objects, values))
    }

    /// Return the change that made the last program necessary, where there was one before it.
    pub fn change(&mut self) -> Option<String> {
        self.change.take()
    }

    fn discover(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Program> {
        let py = owned.py();
        let found = py
            .import("faststep._step._reach")?
            .call_method1("discover", (PyTuple::new(py, roots)?, owned))?;
        let (nodes, classes): (Bound<'_, PyAny>, Bound<'_, PyAny>) = found.extract()?;
        let nodes = nodes.try_iter()?.map(|node| Node::read(&node?));
        let found = node::expect(nodes.collect::<PyResult<_>>()?, roots)?;
        self.made += 1;
        Ok(Program {
            id: self.made,
            classes: Classes::of(&classes)?,
            rows: Row::all(&found.nodes, py),
            nodes: found.nodes,
            tensors: Rc::new(found.tensors),
            values: RefCell::new(Rc::new(found.values)),
            ids: RefCell::default(),
            held: RefCell::default(),
            model: Cell::default(),
        })
    }
}
