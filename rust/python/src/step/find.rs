//! Choice of the traces of a call: by its arguments, by the objects that the loss reads, and by the loss's graph.
use std::{cell::Cell, rc::Rc};

use faststep::engine::{Compiled, Part, Recipe, Rule, Task, Trace};
use mlx_rs::error::Result as MlxResult;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::Arguments,
    run::Given,
    trace_cache::{equals, holds, warn, CallKey, Entry, Key},
    Inner,
};
use crate::{
    host::TraceGraph,
    mlx::errors::{mlx, to_python},
    reach::{
        stop::Stop,
        suspect::{draws, Drawable, Suspect},
        Seen,
    },
    store::Store,
    tree::Tree,
};

/// A graph, and the template of what the loss returned.
type Sketched = (TraceGraph, Option<Py<PyAny>>);
type Sketch = Result<Sketched, Stop>;

/// The most traces of which it is looked at what a loss gives many calls later.
const MAX_LATER: usize = 2;

/// How many calls later a loss that counts them may decide something by that.
const LATER: [i64; 6] = [1, 9, 99, 999, 9_999, 99_999];

impl Inner {
    // the call's traces become those used last: that of the update, then that of the batch
    pub(super) fn find(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        task: Task,
    ) -> Result<(), Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let rule = store.rule.as_ref().ok_or_else(missing)?.clone();
        for part in task.parts(&rule) {
            let has_loss = !matches!(part, Part::Update(_));
            if has_loss {
                let key = self.loss_key(store, given, &rule, part)?;
                self.find_loss(store, user, given, key)?;
                continue;
            }
            let key = self.part_key(store, &rule, part)?;
            let py = user.py();
            if self
                .traces
                .use_again(|e| equals(&e.key, &key, py))
                .is_none()
            {
                self.check_rare(given, &key, py)?;
                let recipe = self.recipe(store, &key, 0)?;
                let trace = Trace::new(recipe, self.host.clone(), self.compiling());
                let max_traces = self.options.max_traces;
                self.traces
                    .add(user, key, trace, Vec::new(), None, max_traces);
            }
        }
        Ok(())
    }

    fn part_key(&self, store: &Store, rule: &Rule, part: Part) -> PyResult<Key> {
        let updates = matches!(part, Part::Whole(_) | Part::Update(_));
        let host = matches!(rule, Rule::Host);
        // uncompiled, the optimizer's own code reads its numbers at each update
        let options = updates && (self.compiled || !host);
        let options = if options { store.options_id() } else { 0 };
        let mut key = key(store, part, options)?;
        if updates && self.compiled && host {
            key.front.read = self.read.id();
        }
        if !self.compiled {
            key.front.model = usize::MAX - store.others.len(); // the loss reads the model's numbers at each call
        }
        Ok(key)
    }

    // of a part with a loss, for this batch
    fn loss_key(&self, store: &Store, given: &Given, rule: &Rule, part: Part) -> PyResult<Key> {
        let mut key = self.part_key(store, rule, part)?;
        if self.compiled {
            key.front.reached = given.looked.tensors.clone();
            key.front.batch = given.tree.clone();
        }
        Ok(key)
    }

    // stop where there is no trace for a key, and a new one might be used once
    fn check_rare(&mut self, given: &Given, key: &Key, py: Python<'_>) -> Result<(), Stop> {
        let max_traces = self.options.max_traces;
        let may_be_rare = self.compiled && given.may_be_rare;
        let rare = may_be_rare.then(|| self.traces.rare(key, max_traces, py));
        rare.flatten().map_or(Ok(()), |why| Err(Stop::Rare(why)))
    }

    // the same where there are traces for the key, but none for the numbers and texts
    fn check_rare_values(&mut self, given: &Given, py: Python<'_>) -> Result<(), Stop> {
        let max_traces = self.options.max_traces;
        let may_be_rare = self.compiled && given.may_be_rare;
        let rare = may_be_rare.then(|| self.traces.rare_values(&given.looked, max_traces, py));
        rare.flatten().map_or(Ok(()), |why| Err(Stop::Rare(why)))
    }

    // before the first step by a trace of a loss that changes something itself: the reason why that cannot be repeated
    pub(super) fn suspected(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        task: Task,
    ) -> PyResult<Option<String>> {
        let py = user.py();
        let Some((at, is_now, mut suspect, part)) = self.pending(store, given, task, py)? else {
            return Ok(None);
        };
        if !is_now && suspect.is_looked_at_enough() {
            self.keep(at, suspect); // until the numbers are those of its trace again
            return Ok(None);
        }
        self.checks += 1;
        if let Some(name) = suspect.blocking(py, &given.looked)? {
            suspect.swap(py, true)?;
            return Ok(Some(taken(&name)));
        }
        if suspect.orders_arrays(py) {
            suspect.swap(py, true)?;
            return Ok(Some(
                "its result depends on the order of a dict, which it changes itself".into(),
            ));
        }
        let mut key = key(store, part, 0)?;
        let mut sketch = |inner: &mut Self, given: &mut Given| {
            key.front.reached = given.looked.tensors.clone();
            let drawable = Drawable::before(&user.model, &given.looked)?;
            inner.sketch(store, user, given, &key, true, &drawable)
        };
        let mut raised = false;
        let drawn = !suspect.drawn.is_empty()
            && (!suspect.shared
                || draws(py, || {
                    raised |= matches!(sketch(self, given), Err(Stop::Raised(_)));
                })?);
        if raised {
            self.traces.drop_number(at); // the loss is called, and raises where it would without a trace
            return Ok(None);
        }
        if drawn {
            suspect.swap(py, true)?;
            return Ok(Some(taken(&suspect.drawn.join(", "))));
        }
        if suspect.is_unchanged() && suspect.read.is_empty() {
            if !is_now {
                self.keep(at, suspect);
            }
            return Ok(None);
        }
        let first = sketch(self, given);
        if let Err(Stop::Raised(_)) = &first {
            self.checks -= 1;
            self.traces.drop_number(at);
            return Ok(None);
        }
        suspect.swap(py, true)?;
        suspect.swap(py, false)?;
        let looked = self.reach.look(&given.roots(py), &user.optimizer);
        let now = looked.map(|looked| std::mem::replace(&mut given.looked, Rc::new(looked)));
        let second = now.map(|now| (sketch(self, given), now));
        suspect.swap(py, false)?;
        let (second, now) = second?;
        given.looked = now;
        let mut same = is_same(&first, &second)?;
        let mut turns = LATER.to_vec();
        if same && self.checks <= MAX_LATER {
            turns.extend(suspect.turns(py, &given.looked)?);
            turns.extend(suspect.compared(py, || drop(sketch(self, given)))?);
        }
        for times in turns {
            if !same || self.checks > MAX_LATER {
                break;
            }
            // the model is as the loss has left it
            let later = suspect.later(py, times, || {
                let looked = self.reach.look(&given.roots(py), &user.optimizer)?;
                let now = std::mem::replace(&mut given.looked, Rc::new(looked));
                let later = sketch(self, given);
                given.looked = now;
                is_same(&first, &later)
            });
            match later? {
                Some(later) => same = later?,
                None => break,
            }
        }
        let read = suspect.read.join(", ");
        if same {
            suspect.swap(py, true)?;
            if !is_now {
                self.keep(at, suspect);
                return Ok(None);
            }
            if !read.is_empty() {
                let message = format!(
                    "the loss reads {read} as it is called, which is only while it is traced: what it decides by that stays \
                     as it is. Pass as an argument what is to be seen at every step"
                );
                warn(py, &message)?;
            }
            return Ok(None);
        }
        Ok(Some(depends(py, &suspect)))
    }

    // what is to be looked at before a trace is used for this batch: the trace's number, whether the numbers are those of then too
    fn pending(
        &self,
        store: &Store,
        given: &Given,
        task: Task,
        py: Python<'_>,
    ) -> PyResult<Option<(usize, bool, Suspect, Part)>> {
        let rule = store.rule.clone().filter(|_| self.compiled);
        let Some(rule) = rule.filter(|_| self.traces.are_suspect(false)) else {
            return Ok(None);
        };
        let mut parts = task.parts(&rule).into_iter();
        let Some(part) = parts.find(|part| !matches!(part, Part::Update(_))) else {
            return Ok(None);
        };
        let known = self.loss_key(store, given, &rule, part.clone())?;
        let suspects = self.traces.recent().filter(|entry| {
            entry.kept.suspect.borrow().is_some() && equals(&entry.key, &known, py)
        });
        let suspects: Vec<&Entry> = suspects.collect();
        let now = suspects.iter().find(|entry| {
            let suspect = entry.kept.suspect.borrow();
            suspect
                .as_ref()
                .is_some_and(|it| it.is_of(py, &given.looked))
        });
        let found = now.or(suspects.first());
        Ok(found.and_then(|entry| {
            let suspect = entry.kept.suspect.take()?;
            Some((entry.number, now.is_some(), suspect, part))
        }))
    }

    // look at it once more before the trace is used again
    fn keep(&self, number: usize, suspect: Suspect) {
        let mut recent = self.traces.recent();
        if let Some(entry) = recent.find(|entry| entry.number == number) {
            entry.kept.suspect.replace(Some(suspect));
        }
    }

    // find a trace that matches the arrays and the numbers that the loss reaches: one that is known to hold for these numbers,
    // or one whose graph differs from the current graph only in constants that are inputs
    fn find_loss(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: Key,
    ) -> Result<(), Stop> {
        let py = user.py();
        let looked = given.looked.clone();
        given.constants.clear();
        let fits = |entry: &Entry| equals(&entry.key, &key, py) && holds(entry, py, &looked);
        if let Some(entry) = self.traces.use_again(fits) {
            self.reach.change();
            if !self.compiled && !entry.kept.meet(&given.tree, &looked, py) {
                entry.trace.expect_others();
            }
            if let Some(seen) = entry.kept.seen(py, &looked) {
                given.constants.clone_from(&seen.constants);
                self.template = seen
                    .template
                    .as_ref()
                    .map(|template| template.clone_ref(py));
            }
            return Ok(());
        }
        let changed = self
            .traces
            .recent()
            .find(|entry| equals(&entry.key, &key, py));
        let seen = changed.and_then(|entry| entry.kept.seen.last());
        let changed = seen.map_or_else(Vec::new, |seen| seen.changes(py, &looked));
        let other = changed.is_empty().then(|| self.reach.change()).flatten();
        self.check_rare(given, &key, py)?;
        let known = self
            .traces
            .recent()
            .any(|entry| equals(&entry.key, &key, py));
        let mut unchecked = known;
        if known && self.traces.are_values_new() {
            self.check_rare_values(given, py)?;
            unchecked = false;
        }
        let varying = self.shared(store, user, given, &key)?;
        let Some(varying) = varying else {
            self.traces.holds_again();
            return Ok(());
        };
        if unchecked && varying.is_empty() {
            self.check_rare_values(given, py)?;
        }
        let names = changed.iter().map(|&value| looked.value_name(py, value));
        let mut names: Vec<String> = names.take(3).collect();
        if names.is_empty() {
            names.extend(other);
        }
        let names = names.into_iter().map(|name| named(user, &given.tree, name));
        let changed = names.collect::<Vec<_>>().join(", ");
        let changed = (!changed.is_empty()).then_some(changed);
        let others = store.others.len() + key.front.reached.len() + varying.len();
        let recipe = self.recipe(store, &key, others)?;
        let trace = Trace::new(recipe, self.host.clone(), self.compiling());
        // one that calls the loss at every call goes when this call ends
        let max_traces = self.options.max_traces + usize::from(!self.compiled);
        self.traces
            .add(user, key, trace, varying, changed.as_deref(), max_traces);
        if let Some(last) = self.traces.last_mut() {
            last.kept.meet(&given.tree, &looked, py);
        }
        Ok(())
    }

    // if a trace exists for other numbers, compare its graph with the current one: None if the trace holds, else the constants
    // that a new trace takes as inputs
    fn shared(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
    ) -> Result<Option<Vec<u32>>, Stop> {
        let py = user.py();
        let is_candidate =
            |entry: &Entry| entry.kept.graph.is_some() && equals(&entry.key, key, py);
        let candidate = self.traces.recent().find(|entry| is_candidate(entry));
        let graph = candidate.and_then(|entry| entry.kept.graph.as_ref());
        let Some(by_loss) = graph.map(TraceGraph::is_of_loss) else {
            return Ok(Some(Vec::new()));
        };
        let drawable = Drawable::before(&user.model, &given.looked)?;
        let probed = self.probed.as_ref();
        if probed.is_none_or(|seen| !seen.fits(py, &given.looked)) && drawable.stay(py)? {
            self.probed = Some(Seen::new(&given.looked, Vec::new(), None));
            self.probe = Some(false);
            return Err(Stop::Probe);
        }
        let (sketch, template) = self.sketch(store, user, given, key, by_loss, &drawable)?;
        let moved = drawable.moved(py)?;
        if !moved.is_empty() {
            drawable.put_back(py)?; // the trace that fits has not taken it
            return Err(Stop::Untraceable(taken(&moved.join(", "))));
        }
        let failed = Cell::new(None);
        let differences = |entry: &Entry| {
            let graph = entry.kept.graph.as_ref().filter(|_| is_candidate(entry))?;
            let differences = graph.differences(&sketch);
            differences.unwrap_or_else(|error| {
                failed.set(Some(error));
                None
            })
        };
        let holds = |entry: &Entry| {
            let varying = &entry.kept.varying;
            differences(entry).is_some_and(|differ| differ.iter().all(|at| varying.contains(at)))
        };
        let constants = |varying: &[u32]| {
            let constants = varying.iter().map(|&at| sketch.graph().constant(at));
            constants.collect::<MlxResult<Vec<_>>>().map_err(mlx)
        };
        if let Some(entry) = self.traces.use_again(holds) {
            given.constants = constants(&entry.kept.varying)?;
            self.template = template.as_ref().map(|template| template.clone_ref(py));
            self.see(user, given, template)?;
            return Ok(None);
        }
        let mut varying = Vec::new();
        if let Some(entry) = self.traces.use_again(|entry| differences(entry).is_some()) {
            varying.clone_from(&entry.kept.varying);
            varying.extend(differences(entry).unwrap_or_default());
            varying.sort_unstable();
            varying.dedup();
            self.traces.drop_last();
        }
        if let Some(error) = failed.take() {
            return Err(mlx(error).into());
        }
        given.constants = constants(&varying)?;
        drawable.put_back(py)?; // or it would be drawn twice in this step
        Ok(Some(varying))
    }

    // record that the last trace holds for the numbers at its creation, and for those numbers as the loss has changed them
    pub(super) fn see(
        &mut self,
        user: &Arguments<'_>,
        given: &Given,
        template: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let py = user.py();
        let now = self.reach.look(&given.roots(py), &user.optimizer)?;
        if let Some(last) = self.traces.last_mut() {
            if last.kept.seen(py, &given.looked).is_none() {
                let constants = given.constants.clone();
                last.kept.see(Seen::new(&given.looked, constants, template));
            }
        }
        self.traces.see_changes(py, &given.looked, &now);
        Ok(())
    }

    // trace without compiling; `by_loss`: the loss alone, where that determines the rest; `drawable`: as it is before
    fn sketch(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
        by_loss: bool,
        drawable: &Drawable,
    ) -> Sketch {
        let mut sketch = Ok(None);
        if by_loss {
            sketch = self.sketch_once(store, user, given, key, true);
        }
        if let Ok(None) = sketch {
            drawable.put_back(user.py())?;
            sketch = self.sketch_once(store, user, given, key, false);
        }
        if matches!(&sketch, Err(stop) if !matches!(stop, Stop::Raised(_))) {
            drawable.put_back(user.py())?;
        }
        let missing = || PyRuntimeError::new_err("a step was traced without a loss");
        sketch?.ok_or_else(|| Stop::Raised(missing()))
    }

    // none where the graph of the loss does not determine the rest
    fn sketch_once(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
        by_loss: bool,
    ) -> Result<Option<Sketched>, Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let recipe = self.recipe(store, key, store.others.len() + key.front.reached.len())?;
        let mut trace = Trace::new(recipe, self.host.clone(), Compiled::Whole);
        let call = self.enter_host(store, user, given, true, &[])?;
        let mut asked = false;
        if let Some(current) = self.host.current.borrow_mut().as_mut() {
            current.sketch = true;
            current.by_loss &= by_loss;
            asked = current.by_loss;
        }
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let outcome = engine.dry_run(&mut trace, call);
        let current = self.host.current.take();
        let insufficient = asked && current.as_ref().is_some_and(|current| !current.by_loss);
        let (stop, graph, template) = current.map_or((None, None, None), |current| {
            (current.stop, current.graph, current.template)
        });
        match (graph, stop, outcome) {
            (Some(graph), ..) => Ok(Some((graph, template))),
            (None, Some(stop), _) => Err(stop),
            (None, None, Err(_)) if insufficient => Ok(None),
            (None, None, Err(error)) => Err(Stop::Raised(to_python(&error))),
            (None, None, Ok(())) => Err(Stop::Raised(missing())),
        }
    }

    fn recipe(&self, store: &Store, key: &Key, others: usize) -> PyResult<Recipe> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        Ok(engine.recipe(key.part.clone(), *self.options, others))
    }
}

// true if two graphs of a loss are equal, as far as it has one
fn is_same(one: &Sketch, other: &Sketch) -> PyResult<bool> {
    match (one, other) {
        (Ok((one, _)), Ok((other, _))) => {
            let differences = one.differences(other).map_err(mlx)?;
            Ok(differences.is_some_and(|differences| differences.is_empty()))
        }
        (Err(Stop::Becomes(_) | Stop::Stores(_)), _)
        | (_, Err(Stop::Becomes(_) | Stop::Stores(_))) => Ok(true),
        _ => Ok(false),
    }
}

// the key of a part, of any arguments
fn key(store: &Store, part: Part, options: usize) -> PyResult<Key> {
    let missing = || PyRuntimeError::new_err("the step has not been prepared");
    let front = CallKey {
        model: store.signature()?.id,
        options,
        read: 0,
        reached: Rc::default(),
        batch: Rc::default(),
    };
    Ok(Key {
        part,
        places: store.engine.as_ref().ok_or_else(missing)?.places(),
        front,
    })
}

// the name of an argument, from its index among the watched objects
fn named(user: &Arguments<'_>, tree: &Tree, name: String) -> String {
    let Some(rest) = name.strip_prefix("argument ") else {
        return name;
    };
    let (number, rest) = rest.split_at(
        rest.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len()),
    );
    let paths = tree.object_paths(user.py());
    match number
        .parse()
        .ok()
        .and_then(|number: usize| paths.get(number))
    {
        Some(path) => format!("argument {}{rest}", user.name(path)),
        None => name,
    }
}

/// The reason for which a loss that takes from generators or iterators runs uncompiled.
pub(super) fn taken(drawn: &str) -> String {
    format!(
        "it takes from {drawn} as it is called, which a trace would do once: draw with mx.random, or pass as an argument \
         what is drawn"
    )
}

// the reason for which a loss runs uncompiled that gives another graph when it is called again
fn depends(py: Python<'_>, suspect: &Suspect) -> String {
    let (names, read) = (suspect.names(py), suspect.read.join(", "));
    let (mut changes, mut remedies) = (Vec::new(), Vec::new());
    if !names.is_empty() {
        changes.push(format!("what it changes itself ({names})"));
        remedies.push("keep that in an mx.array, or change it outside of the loss");
    }
    if !read.is_empty() {
        changes.push(format!("{read}, read as it is called"));
        remedies.push("pass as an argument what is read");
    }
    let (changes, remedies) = (changes.join(" or on "), remedies.join("; "));
    format!("its result depends on {changes}: {remedies}")
}
