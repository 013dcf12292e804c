//! Objects that a loss reaches beside its arguments: found once by `faststep._step._reach`, looked at before each call.
//!
//! A [`Program`] is a list of nodes, each of which is found from its parent: a closure cell, a global, an attribute. It
//! holds none of the user's objects but numbers, strings, code and what cannot be referred to weakly. Arrays at its nodes are
//! inputs of a trace, of any shape; numbers and strings are compared, and anything else that is not as it was makes a program
//! anew. Uses `tree` and `mlx`.
pub mod advance;
pub mod before;
mod classes;
mod contents;
mod forms;
mod identities;
mod kept;
mod keys;
mod look;
mod looked;
mod loose;
mod moving;
mod node;
mod put_back;
mod reached;
mod read;
mod replaced;
mod row;
mod searches;
mod seen;
pub mod stop;
pub mod suspect;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use pyo3::{
    exceptions::PyException,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::mlx::collector::{Collector, Refers, Visited};
use crate::tree::{apart::Names, Tree};
use faststep::engine::HeldArrays;

pub use before::Before;
use classes::Classes;
use forms::Forms;
use identities::{Containers, Identities};
use kept::Kept;
use look::Look;
use looked::Alive;
pub use looked::Looked;
use moving::Moving;
use node::{Met, Node};
pub use reached::{Reached, Written};
pub use read::Read;
use row::Row;
use searches::Searches;
pub use seen::Seen;

/// Largest number of programs that are kept; the one used least recently goes first.
const MAX_PROGRAMS: usize = 64;

/// Number of objects at which it takes longer to look than to show an optimizer's state.
const MUCH: usize = 1000;

/// Number of times that a list or a dict has another length, from which on what is in it is compared as a whole.
const MANY_LENGTHS: usize = 3;

/// The most lists and dicts of which that is counted.
const MAX_GROWING: usize = 64;

/// Number of searches after changes by another thread.
const MAX_TRIES: usize = 3;

/// Objects that one loss reaches, for one structure of the objects that lead there.
pub struct Program {
    /// Tells programs apart.
    pub id: usize,
    model: Cell<usize>, // the form of the model with which it was made; 0: not known yet
    roots: usize,       // the number of them
    classes: Classes,
    apart: Names, // attributes of the model that are no part of its tree
    /// Those of them that the loss may read.
    pub read: Vec<String>,
    codes: Option<Py<PyAny>>, // of the functions that it calls
    nodes: Vec<Node>,
    rows: Vec<Row>,
    identities: Identities,
    forms: Forms,                        // of the arrays
    values: RefCell<Rc<Vec<Py<PyAny>>>>, // at the last look
    grown: Cell<Option<usize>>, // the address of a list or a dict that a look has found to have another length
    held: RefCell<Rc<HeldArrays>>, // the arrays at the last look: those have the noted shapes and dtypes
    moving: RefCell<Moving>,
    alive: Rc<Alive>, // what looks by any program of the step refer to
    kept: Kept,
    /// Why what the loss reaches cannot be looked at, if it cannot.
    pub hidden: Option<String>,
    /// Whether the optimizer, or one in it, is among what is reached.
    pub meets_optimizer: bool,
    /// Whether the loss may take from a generator or an iterator.
    pub may_draw: bool,
    /// Whether the loss may ask whether two objects are one.
    pub tells_apart: bool,
}

impl Refers for Program {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.nodes.visit(collector)?;
        self.values.visit(collector)
    }
}

impl Program {
    // how long it takes to compare the object at a node, in that of one without contents
    fn weight(&self, node: &Node, py: Python<'_>) -> usize {
        let node::Expect::Contents(_, number, _) = &node.expect else {
            return 1;
        };
        let shape = |contents: &Py<PyAny>| contents.bind(py).get_item(0)?.extract::<Vec<usize>>();
        let shape = self.values.borrow().get(*number).map(shape);
        let size = shape.and_then(Result::ok); // a NumPy array's
        1 + size.map_or(0, |size| size.iter().product::<usize>() / 512)
    }

    /// The name of what takes more than half of a look, and the number of objects in it.
    pub fn largest(&self, py: Python<'_>) -> Option<String> {
        let weights = self.nodes.iter().map(|node| self.weight(node, py));
        let mut within: Vec<_> = weights.map(|weight| (weight, 1)).collect();
        for (at, node) in self.nodes.iter().enumerate().rev() {
            if let Some(parent) = node.parent {
                let (weight, count) = within[at];
                within[parent].0 += weight;
                within[parent].1 += count;
            }
        }
        let roots = self
            .nodes
            .iter()
            .zip(&within)
            .filter(|(node, _)| node.parent.is_none());
        let all: usize = roots.map(|(_, (weight, _))| weight).sum();
        let largest = (0..self.nodes.len())
            .rev()
            .find(|&at| 2 * within[at].0 > all)?;
        let name = self.name(py, largest);
        Some(match within[largest].1 {
            1 => name,
            count => format!("{name} ({count} objects)"),
        })
    }

    /// How often looks, and what else is known, refer to each object, by its address.
    pub fn references(&self) -> looked::References {
        self.alive.counts()
    }

    /// Return whether something in a root is named, by the root's place.
    fn is_named(&self, root: usize) -> bool {
        let is_root = |node: &Node| matches!(node.how, node::How::Root) && node.index() == root;
        let at = self.nodes.iter().position(is_root);
        at.is_some_and(|at| self.nodes.iter().any(|node| node.parent == Some(at)))
    }

    // one of nothing, where what is there cannot be looked at, or is not
    fn nothing(id: usize, why: Option<String>) -> Self {
        Self {
            id,
            model: Cell::new(0),
            roots: 0,
            classes: Classes::default(),
            apart: Names::default(),
            read: Vec::new(),
            codes: None,
            nodes: Vec::new(),
            rows: Vec::new(),
            identities: Identities::default(),
            forms: Forms::default(),
            values: RefCell::default(),
            grown: Cell::default(),
            held: RefCell::default(),
            moving: RefCell::default(),
            alive: Rc::default(),
            kept: Kept::default(),
            hidden: why,
            meets_optimizer: true, // perhaps
            may_draw: true,
            tells_apart: true,
        }
    }

    /// End a call: hold no array longer that somebody else replaces between the looks.
    pub fn let_go_of_moving(&self) {
        if let Some(held) = Rc::get_mut(&mut self.held.borrow_mut()) {
            self.moving.borrow_mut().let_go(held);
        }
    }

    /// Return the path of a node as a user writes it: `loss_fn.self.target.weight`.
    pub fn name(&self, py: Python<'_>, node: usize) -> String {
        let node = &self.nodes[node];
        let parent = node.parent.map(|parent| self.name(py, parent));
        node.name(py, parent)
    }
}

// a program, the objects at its nodes, and the values
type Found<'py> = (Program, Vec<Option<Met<'py>>>, Rc<Vec<Py<PyAny>>>);

// what `discover` returns
type Discovered<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Option<String>,
    bool,
    bool,
    Vec<String>,
    (bool, bool),
);

// what is not as a program has it
#[derive(Default)]
struct Other {
    change: Option<String>,
    grown: Option<usize>, // the address of a list or a dict that has another length
}

// an exception of the user's classes is no error of a look
fn seen<'py>(look: PyResult<Look<'py>>, py: Python<'py>) -> PyResult<Look<'py>> {
    match look {
        Err(error) if error.is_instance_of::<PyException>(py) => {
            Ok(Look::Fails(node::unseen(&error, py)))
        }
        look => look,
    }
}

/// The programs of a step.
#[derive(Default)]
pub struct Reach {
    of_update: bool,            // of the optimizer's code, and not of the loss's
    programs: Vec<Rc<Program>>, // most recent last
    made: usize,
    change: Option<String>,
    growing: Vec<(usize, usize)>, // addresses of lists and dicts that had another length, and how often
    model: usize,                 // the model's form, at the last call until it is known
    known: bool,
    containers: Containers, // of the model, where it is known
    /// Numbers of the model, which are the last root.
    pub numbers: Option<Py<PyDict>>,
    /// Attributes of the model that are no part of its tree.
    pub apart: Names,
    /// Dicts, lists and tuples among the arguments.
    pub passed: Containers,
    searches: Searches,
    alive: Rc<Alive>,
}

impl Refers for Reach {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.programs.visit(collector)
    }
}

impl Reach {
    /// The programs of what the code of an optimizer reaches: the roots of a look are the optimizer and the model.
    pub fn of_update() -> Self {
        Self {
            of_update: true,
            ..Self::default()
        }
    }

    /// Begin a call, at which the model may be another than at the last one.
    pub fn begin(&mut self) {
        self.known = false;
    }

    /// Note the form of the call's model, and its containers. Returns whether what has been looked at is for another one.
    pub fn settle(&mut self, model: usize, containers: Containers, looked: &Looked) -> bool {
        (self.model, self.known, self.containers) = (model, true, containers);
        let made = &looked.program.model;
        if made.get() == 0 {
            made.set(model);
        }
        made.get() != model || self.has_moved(&looked.program).is_some()
    }

    // a node whose object has another place in the model than when its program was made, or has one
    fn has_moved(&self, program: &Program) -> Option<usize> {
        let containers = self.known.then_some(&self.containers)?;
        program.identities.moved(containers)
    }

    /// Look at what the loss reaches now.
    ///
    /// `roots`: the loss function, the model, then objects among the arguments. `owned`: the optimizer.
    pub fn look(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Looked> {
        let other = match self.look_again(roots, owned)? {
            Ok(looked) => return Ok(looked),
            Err(other) => other,
        };
        self.change = other.change;
        self.count(other.grown);
        self.searches.note();
        let (program, objects, values) = self.search(roots, owned)?;
        let program = Rc::new(program);
        self.let_go();
        self.forget_gone(owned.py());
        self.programs.push(program.clone());
        if self.programs.len() > MAX_PROGRAMS {
            self.programs.remove(0);
        }
        Ok(Looked::new(program, objects, values, self.passed.clone()))
    }

    /// Return whether it takes longer to look at what there is than to show an optimizer's state: most looks end with a search,
    /// or it is much.
    pub fn is_costly(&self) -> bool {
        let last = self.programs.last();
        self.searches.are_many() || last.is_some_and(|last| last.nodes.len() > MUCH)
    }

    /// The same for a call that may run without: nothing, where it takes a search and most calls before it have taken one.
    pub fn look_unless_searching(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Looked> {
        self.searches.look();
        if self.searches.are_many() {
            match self.look_again(roots, owned)? {
                Ok(looked) => return Ok(looked),
                Err(other) => self.change = other.change,
            }
            if self.searches.leave_out() {
                return Ok(Looked::nothing());
            }
        }
        self.look(roots, owned)
    }

    // by the programs that there are, or what is other than all of these have it
    fn look_again(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Result<Looked, Other>> {
        let mut other = Other::default();
        // the modules of a model lead elsewhere when they are others; not known yet, it is guessed to be the last one
        let all = (0..self.programs.len()).rev();
        let guesses = all.clone().map(|at| (at, true));
        for (at, guessed) in guesses.chain(all.map(|at| (at, false))) {
            let program = &self.programs[at];
            let is_guessed = program.model.get() == self.model;
            let is_other = program.roots != roots.len() || program.apart != self.apart;
            if is_guessed != guessed || (!guessed && self.known) || is_other {
                continue;
            }
            let look = seen(self.programs[at].look(roots), owned.py())?;
            let moved = || self.has_moved(&self.programs[at]);
            let moved = matches!(look, Look::Same(..)).then(moved).flatten();
            match moved.map_or(look, Look::Differs) {
                Look::Same(objects, values) => {
                    let program = self.programs.remove(at);
                    if at < self.programs.len() {
                        self.let_go();
                    }
                    self.programs.push(program.clone());
                    let passed = self.passed.clone();
                    let looked = Looked::new(program, objects, values, passed);
                    if let Some(array) = looked.reshaped {
                        self.change = Some(looked.name(owned.py(), array));
                    }
                    return Ok(Ok(looked));
                }
                Look::Differs(node) => {
                    if other.change.is_none() {
                        other.change = Some(self.programs[at].name(owned.py(), node));
                        other.grown = self.programs[at].grown.take();
                    }
                }
                Look::Class(class) => {
                    let name = || format!("a method of {class}");
                    other.change.get_or_insert_with(name);
                }
                Look::Fails(_) => {}
            }
        }
        Ok(Err(other))
    }

    // note a list or a dict that has another length than it had
    fn count(&mut self, grown: Option<usize>) {
        let Some(grown) = grown else {
            return;
        };
        let known = self.growing.iter().position(|(at, _)| *at == grown);
        let (_, times) = known.map_or((grown, 0), |at| self.growing.remove(at));
        self.growing.push((grown, times + 1));
        if self.growing.len() > MAX_GROWING {
            self.growing.remove(0);
        }
    }

    // a new program, and what is at its nodes
    fn search<'py>(
        &mut self,
        roots: &[Bound<'py, PyAny>],
        owned: &Bound<'py, PyAny>,
    ) -> PyResult<Found<'py>> {
        let py = owned.py();
        let mut why = String::new();
        for _ in 0..=MAX_TRIES {
            let program = match self.discover(roots, owned) {
                Err(error) if error.is_instance_of::<PyException>(py) => {
                    why = node::unseen(&error, py);
                    break;
                }
                program => program?,
            };
            match seen(program.look(roots), py)? {
                Look::Same(objects, values) => return Ok((program, objects, values)),
                Look::Differs(node) => why = node::moving(&program.name(py, node)),
                Look::Class(class) => why = node::moving(&format!("a method of {class}")),
                Look::Fails(error) => why = error,
            }
        }
        self.made += 1;
        let program = Program::nothing(self.made, Some(why));
        Ok((program, Vec::new(), Rc::default()))
    }

    /// Forget all programs.
    pub fn search_again(&mut self) {
        self.programs.clear();
    }

    // programs by which an object is found that nobody else holds any more will never fit again
    fn forget_gone(&mut self, py: Python<'_>) {
        let known = self.alive.counts();
        self.programs
            .retain(|program| !program.kept.is_left(&program.nodes, &known, py));
    }

    // hold no arrays for programs that are not looked through
    fn let_go(&self) {
        for program in &self.programs {
            program.held.replace(Rc::default());
        }
    }

    /// Return the change that made the last program necessary, where there was one before it, or an array's other form.
    pub fn change(&mut self) -> Option<String> {
        self.change.take()
    }

    fn discover(
        &mut self,
        roots: &[Bound<'_, PyAny>],
        owned: &Bound<'_, PyAny>,
    ) -> PyResult<Program> {
        let py = owned.py();
        let reach = py.import("faststep._step._reach")?;
        let found = if self.of_update {
            let given = (PyTuple::new(py, roots)?, &self.numbers, &*self.apart);
            reach.call_method1("discover_update", given)?
        } else {
            let growing = self.growing.iter().filter(|each| each.1 >= MANY_LENGTHS);
            let growing: Vec<usize> = growing.map(|(at, _)| *at).collect();
            reach.call_method1(
                "discover",
                (
                    PyTuple::new(py, roots)?,
                    owned,
                    growing,
                    &self.numbers,
                    &*self.apart,
                ),
            )?
        };
        let (
            nodes,
            classes,
            codes,
            hidden,
            meets_optimizer,
            may_draw,
            read,
            (by_address, tells_apart),
        ): Discovered<'_> = found.extract()?;
        let model =
            Tree::of_model(&roots[1]).map_or_else(|_| Rc::default(), |it| it.0.containers());
        let nodes = nodes.try_iter()?.map(|node| Node::read(&node?));
        let mut found = node::expect(nodes.collect::<PyResult<_>>()?, roots)?;
        self.made += 1;
        Ok(Program {
            id: self.made,
            model: Cell::new(if self.known { self.model } else { 0 }),
            roots: roots.len(),
            classes: Classes::of(&classes)?,
            apart: self.apart.clone(),
            read,
            codes: Some(codes.unbind()),
            rows: Row::number(&mut found.nodes, py),
            identities: Identities::new(model, by_address),
            forms: Forms::of(found.tensors),
            values: RefCell::new(Rc::new(found.values)),
            grown: Cell::default(),
            held: RefCell::default(),
            moving: RefCell::default(),
            alive: self.alive.clone(),
            kept: Kept::of(&found.nodes),
            nodes: found.nodes,
            hidden,
            meets_optimizer,
            may_draw,
            tells_apart,
        })
    }
}
