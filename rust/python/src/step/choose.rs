//! Choice of the traces of a call, and of the way in which its loss is computed.
use std::{cell::RefCell, mem::discriminant, rc::Rc};

use faststep::engine::{Call, Compiled, Part, Rule, Task, Trace};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::{Arguments, Batch},
    traces::{equals, CallKey, Key},
    Inner,
};
use crate::{
    host::{Called, CalledUpdate, KnownGraph},
    store::Store,
    tree::snapshot::Snapshot,
};

/// From so many graphs on, the first call with a new one runs uncompiled: it may be the only one.
const MANY_GRAPHS: usize = 32;
/// New graphs of arguments of one form, one after the other, from which on that is so too.
const MANY_ALIKE: usize = 4;
/// Traces of one graph with other options each, from which on the first call with others runs uncompiled: it may be the only one.
const MANY_OPTIONS: usize = 8;
/// New graphs in a row behind which no graph is looked for any more.
const NEVER_AGAIN: usize = 96;

/// The way of a call's loss.
pub(super) enum Way<'py> {
    /// It has been called, and its graph is that of a trace.
    Called(Called<'py>),
    /// It has been called, and is evaluated by itself.
    Plain(Called<'py>),
    /// The trace of this number stands for it.
    LeftOut(usize),
    /// There is none: an update alone.
    Nothing,
    /// There is none: an update by the optimizer's own code, which has been called behind the batch.
    Updated(Behind<'py>),
}

/// An update that has been called behind a batch.
pub(super) struct Behind<'py> {
    /// Its outputs.
    pub(super) update: CalledUpdate<'py>,
    /// The arguments of its part.
    pub(super) call: Call,
    /// The optimizer as it was before, as long as that can be put back.
    pub(super) before: Rc<RefCell<Option<Snapshot<'py>>>>,
}

impl<'py> Way<'py> {
    /// The call of the loss, where it has been called.
    pub(super) fn called(&self) -> Option<&Called<'py>> {
        match self {
            Self::Called(called) | Self::Plain(called) => Some(called),
            Self::LeftOut(_) | Self::Nothing | Self::Updated(_) => None,
        }
    }
}

/// Graphs that came one after the other and were new each time.
#[derive(Default)]
pub struct NewGraphs {
    in_a_row: usize,
    alike: usize,
    last: Option<Rc<crate::tree::Tree>>,
}

impl NewGraphs {
    fn note(&mut self, is_new: bool, batch: &Batch<'_>, py: Python<'_>) {
        if !is_new {
            (self.in_a_row, self.alike) = (0, 0);
            return;
        }
        let last = self.last.replace(batch.tree.clone());
        let is_alike = last.is_some_and(|last| last.equals(&batch.tree, py));
        self.alike = if is_alike { self.alike + 1 } else { 0 };
        self.in_a_row += 1;
    }
}

// the part of a key that is the step's own
fn call_key(store: &Store, batch: &Batch<'_>, update: Option<usize>) -> PyResult<CallKey> {
    let signature = store.signature()?;
    Ok(CallKey {
        model: signature.id,
        form: signature.form,
        options: store.options_id(),
        layout: store.layout_id(),
        batch: batch.tree.clone(),
        containers: signature.containers(),
        aliases: batch.aliases.clone(),
        objects: batch.kept.clone(),
        graph: None,
        update,
    })
}

fn missing() -> PyErr {
    PyRuntimeError::new_err("the step has not been prepared")
}

fn key_of(store: &Store, part: Part, mut front: CallKey) -> PyResult<Key> {
    if !matches!(part, Part::Whole(_) | Part::Update(_)) {
        front.options = (0, 0); // the optimizer updates nothing in it, or is called
    }
    Ok(Key {
        part,
        places: store.engine.as_ref().ok_or_else(missing)?.places(),
        front,
    })
}

// the parts of a call, that of the loss last
fn parts(store: &Store, task: Task) -> PyResult<Vec<Part>> {
    Ok(task.parts(store.rule.as_ref().ok_or_else(missing)?))
}

/// The task of a call in which the update of this number is left out, if any.
pub(super) fn task_of(store: &Store, task: Task, update: Option<usize>) -> Task {
    match (task, &store.rule, update) {
        (Task::Whole, Some(Rule::Host), None) => Task::Clipped,
        _ => task,
    }
}

/// The key of the part with the loss, whatever its graph; none where there is no loss.
pub(super) fn loss_key(store: &Store, batch: &Batch<'_>, task: Task) -> PyResult<Option<Key>> {
    match parts(store, task_of(store, task, None))?.pop() {
        Some(part) if task != Task::Flush => {
            key_of(store, part, call_key(store, batch, None)?).map(Some)
        }
        _ => Ok(None),
    }
}

impl Inner {
    // why a loss that has just been called is evaluated by itself rather than by a trace, if it is
    pub(super) fn is_rare(
        &mut self,
        py: Python<'_>,
        called: &Called<'_>,
        batch: &Batch<'_>,
    ) -> bool {
        self.new_graphs.note(called.is_new, batch, py);
        let many = self.graphs.made() >= MANY_GRAPHS || self.new_graphs.alike >= MANY_ALIKE;
        called.is_new && many
    }

    // why graphs are not looked for any more
    pub(super) fn never_comes_again(&self) -> Option<String> {
        let never = self.new_graphs.in_a_row >= NEVER_AGAIN;
        never.then(|| {
            "its loss has computed something else at each of so many calls (a number within an operation that changes each time, say): \
             pass what changes as an mx.array"
                .into()
        })
    }

    // the call's traces become those used last: that of the update, then that of the loss
    pub(super) fn find(
        &mut self,
        store: &Store,
        user: &Arguments<'_>,
        batch: &Batch<'_>,
        way: &Way<'_>,
        task: Task,
    ) -> PyResult<()> {
        let graph = match way {
            Way::Called(called) => called.graph.clone(),
            Way::Updated(behind) => behind.update.graph.clone(),
            Way::LeftOut(_) | Way::Plain(_) | Way::Nothing => None,
        };
        for part in parts(store, task)? {
            let update = self.update_left_out(way);
            let mut front = call_key(store, batch, update)?;
            let has_loss = part.has_loss();
            if let (Way::LeftOut(number), true) = (way, has_loss) {
                if update.is_none() {
                    self.traces.use_again(|entry| entry.number == *number);
                    continue;
                }
                // one trace of loss and update in place of the loss's
                let entry = self.traces.recent().find(|entry| entry.number == *number);
                let entry = entry.ok_or_else(missing)?;
                let (kept, graph) = (entry.kept.again(user.py()), entry.key.front.graph);
                front.graph = graph;
                let key = key_of(store, part, front)?;
                self.find_part(store, user, key, kept.graph.as_ref())?;
                if let Some(last) = self.traces.last_mut() {
                    last.kept = kept;
                }
                continue;
            }
            let is_its = has_loss != matches!(way, Way::Updated(_));
            let graph = graph.as_ref().filter(|_| is_its);
            front.graph = graph.map(|graph| (graph.number, graph.inputs()));
            let key = key_of(store, part, front)?;
            self.find_part(store, user, key, graph)?;
        }
        Ok(())
    }

    fn find_part(
        &mut self,
        store: &Store,
        user: &Arguments<'_>,
        key: Key,
        graph: Option<&Rc<KnownGraph>>,
    ) -> PyResult<()> {
        let compiled = match self.compiling(&key, graph.is_some()) {
            Compiled::Whole if self.has_many_options(&key) => Compiled::Nothing,
            compiled => compiled,
        };
        let calls = compiled != Compiled::Whole;
        let known = self
            .traces
            .use_again(|entry| equals(&entry.key, &key) && calls == entry.trace.is_partial());
        if let Some(entry) = known {
            if calls && graph.is_none() && key.part.has_loss() {
                entry.trace.expect_others(); // a graph has one form of a batch
            }
            return Ok(());
        }
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        let others = match (&key.part, graph) {
            (Part::Update(Rule::Native(_)), _) => 0,
            (_, Some(graph)) => store.others.len() + graph.leaves(),
            (_, None) => store.others.len(),
        };
        let mut recipe = engine.recipe(key.part.clone(), *self.options, others);
        recipe.shards.clone_from(&self.shared_by);
        let trace = Trace::new(recipe, self.host.clone(), compiled);
        let max_traces = self.options.max_traces;
        self.traces
            .add(user, key, trace, graph.cloned(), max_traces);
        Ok(())
    }

    // true if many traces have this graph with other options of the optimizer, and none has these: each step may have its own
    fn has_many_options(&self, key: &Key) -> bool {
        let alike = self.traces.recent().filter(|entry| {
            let (one, other) = (&entry.key.front, &key.front);
            (one.graph, one.form, one.layout) == (other.graph, other.form, other.layout)
                && discriminant(&entry.key.part) == discriminant(&key.part)
                && entry.key.places == key.places
        });
        let (mut others, mut has_these) = (0, false);
        for entry in alike {
            has_these |= equals(&entry.key, key);
            others += usize::from(!has_these);
        }
        others >= MANY_OPTIONS && !has_these
    }

    // the share of a part that MLX compiles
    fn compiling(&self, key: &Key, has_graph: bool) -> Compiled {
        let compiles = self.options.compile && self.has_compiler;
        let plain = self.plain.is_some() || (!has_graph && key.part.has_loss());
        let calls = match &key.part {
            Part::Given => plain || !has_graph,
            Part::Update(Rule::Host) => key.front.update.is_none(),
            _ => false,
        };
        match (compiles, calls) {
            (false, _) | (true, true) => Compiled::Nothing,
            (true, false) if plain => Compiled::Update,
            (true, false) => Compiled::Whole,
        }
    }
}
