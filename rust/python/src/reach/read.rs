//! What the code of an optimizer reads beside its own arrays and numbers: another value is another trace of its update.
use std::rc::Rc;

use faststep::engine::HeldArrays;
use mlx_rs::Array;
use pyo3::prelude::*;

use super::{Looked, Reach, Seen};
use crate::mlx::collector::{Collector, Refers, Visited};

/// The most sets of values that are told apart, where no arrays are among them.
const MAX_STATES: usize = 16;

/// Number of changes, each soon after the one before, from which on each would be a trace that is hardly used again.
const MAX_CHANGES: usize = 8;

/// Number of looks within which a change comes soon.
const SOON: usize = 16;

/// The place of the model's numbers among the roots.
const NUMBERS: usize = 2;

/// Values at one look.
struct State {
    id: usize,
    seen: Seen,
    arrays: Rc<HeldArrays>, // which are constants of a trace
}

/// What an optimizer's code reads, as a number.
pub struct Read {
    reach: Reach,
    states: Vec<State>, // the last one last
    made: usize,
    looks: usize,   // since the last change
    changes: usize, // one soon after the other
    hidden: Option<String>,
    looked: Option<Rc<Looked>>, // at the last look, while a call is under way
    moving: Option<(usize, Py<PyAny>)>, // generators and iterators among it, and the program by which they were found
    /// True once it has read numbers of the model that change again and again.
    pub of_numbers: bool,
}

impl Default for Read {
    fn default() -> Self {
        Self {
            reach: Reach::of_update(),
            states: Vec::new(),
            made: 0,
            looks: 0,
            changes: 0,
            hidden: None,
            looked: None,
            moving: None,
            of_numbers: false,
        }
    }
}

impl Refers for State {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.seen.visit(collector)
    }
}

impl Refers for Read {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.reach.visit(collector)?;
        self.states.visit(collector)?;
        self.looked.visit(collector)?;
        self.moving
            .as_ref()
            .map_or(Ok(()), |(_, moving)| moving.visit(collector))
    }
}

impl Read {
    /// The number of what is read now.
    pub fn id(&self) -> usize {
        self.states.last().map_or(0, |state| state.id)
    }

    /// Why the update cannot be compiled, if it cannot.
    pub fn hidden(&self) -> Option<String> {
        self.hidden.clone()
    }

    /// What it was at the last look.
    pub fn looked(&self) -> Option<&Rc<Looked>> {
        self.looked.as_ref()
    }

    /// Forget what has been found: objects may have come into what is no part of a look, as the optimizer's tree has it.
    pub fn search_again(&mut self) {
        self.reach.search_again();
    }

    /// Hold it no more.
    pub fn let_go(&mut self) {
        self.looked = None;
    }

    /// Generators and iterators that it takes from, as a list.
    pub fn moving(&self) -> Option<&Py<PyAny>> {
        self.moving.as_ref().map(|(_, moving)| moving)
    }

    /// What an update that has just been traced has changed itself of what it reads.
    pub fn changed(
        &mut self,
        optimizer: &Bound<'_, PyAny>,
        model: &Bound<'_, PyAny>,
    ) -> PyResult<Option<String>> {
        let py = optimizer.py();
        let looked = self.reach.look(&self.roots(optimizer, model), optimizer)?;
        let last = self.states.last();
        let changed = last.map_or_else(Vec::new, |last| last.seen.changes(py, &looked));
        let mut name = changed.first().map(|&value| looked.value_name(py, value));
        if let (None, Some(before)) = (&name, &self.looked) {
            name = before.other_value(py)?;
        }
        Ok(name.map(|name| name_of(&name)))
    }

    /// Return whether an array is one of those that are read.
    pub fn has(&self, array: &Array) -> bool {
        let id = faststep::engine::array::id(array);
        let last = self.states.last();
        last.is_some_and(|last| last.arrays.ids().contains(&id))
    }

    fn roots<'py>(
        &self,
        optimizer: &Bound<'py, PyAny>,
        model: &Bound<'py, PyAny>,
    ) -> Vec<Bound<'py, PyAny>> {
        let numbers = self.reach.numbers.as_ref();
        let numbers = numbers.map(|numbers| numbers.bind(model.py()).clone().into_any());
        let roots = [optimizer.clone(), model.clone()].into_iter();
        roots.chain(numbers).collect()
    }

    /// Look at what is read; `of_loss`: the programs of what the loss reaches; `alone`: the update has a trace
    /// of its own. Returns whether it is something else than at the last look.
    pub fn look(
        &mut self,
        optimizer: &Bound<'_, PyAny>,
        model: &Bound<'_, PyAny>,
        (of_loss, alone): (&Reach, bool),
    ) -> PyResult<bool> {
        let py = optimizer.py();
        let numbers = of_loss.numbers.as_ref();
        let numbers = numbers.filter(|_| alone || !self.of_numbers);
        self.reach.numbers = numbers.map(|numbers| numbers.clone_ref(py));
        self.reach.apart = of_loss.apart.clone();
        let mut looked = self.reach.look(&self.roots(optimizer, model), optimizer)?;
        self.of_numbers |= self.reach.numbers.is_some() && looked.program.is_named(NUMBERS);
        if self.of_numbers && !alone {
            // traced with the loss, what the update makes of numbers is compared with it
            self.reach.numbers = None;
            looked = self.reach.look(&self.roots(optimizer, model), optimizer)?;
        }
        let looked = Rc::new(looked);
        self.looked = Some(looked.clone());
        self.looks += 1;
        let program = looked.program.id;
        if self
            .moving
            .as_ref()
            .is_none_or(|(known, _)| *known != program)
        {
            let suspect = py.import("faststep._step._suspect")?;
            let moving = suspect.call_method1("moving", (looked.all(py),))?;
            self.moving = Some((program, moving.unbind()));
        }
        let is_now = |state: &State| {
            state.arrays.ids() == looked.arrays.ids() && state.seen.fits(py, &looked)
        };
        let at = self.states.iter().rposition(is_now);
        if at.is_some_and(|at| at + 1 == self.states.len()) {
            return Ok(false);
        }
        let is_first = self.states.is_empty();
        if let Some(at) = at {
            let state = self.states.remove(at);
            self.states.push(state);
            return Ok(true);
        }
        self.made += 1;
        let soon = !is_first && std::mem::take(&mut self.looks) <= SOON;
        self.changes = if soon { self.changes + 1 } else { 0 };
        self.hidden.clone_from(&looked.program.hidden);
        if self.changes >= MAX_CHANGES {
            let last = self.states.last();
            let changed = last.map_or_else(Vec::new, |last| last.seen.changes(py, &looked));
            let name = changed.first().map(|&value| looked.value_name(py, value));
            let name = name.map_or_else(|| "what it reads".into(), |name| name_of(&name));
            let why = format!(
                "the optimizer's code reads {name}, which has changed again and again: keep it in an mx.array of its state"
            );
            self.hidden.get_or_insert(why);
        }
        self.states.retain(|state| state.arrays.ids().is_empty());
        if self.states.len() == MAX_STATES {
            self.states.remove(0);
        }
        self.states.push(State {
            id: self.made,
            seen: Seen::new(&looked, Vec::new(), None),
            arrays: looked.arrays.clone(),
        });
        Ok(!is_first)
    }
}

// the path of a value, whose first root is the optimizer here
fn name_of(path: &str) -> String {
    let of_model = path.strip_prefix("argument 0['"); // its numbers that change are the root behind it
    match of_model.and_then(|name| name.strip_suffix("']")) {
        Some(name) => format!("model.{name}"),
        None => path.replace("loss_fn", "optimizer"),
    }
}
