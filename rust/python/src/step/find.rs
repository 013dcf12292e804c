//! Choice of the traces of a call: by its arguments, by the objects that the loss reads, and by the loss's graph.
use std::{cell::Cell, rc::Rc};

use faststep::engine::{Compiled, Part, Recipe, Rule, Task, Trace};
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::Arguments,
    check::is_due,
    known_graphs::{self, Origin},
    run::Given,
    suspected::Beside,
    trace_cache::{equals, holds, CallKey, Entry, Key},
    Inner,
};
use crate::{
    host::TraceGraph,
    mlx::errors::{mlx, to_python},
    reach::{
        advance::{are_alike, leave, progress, Advance, OwnChange},
        stop::Stop,
        suspect::{draws, Change, Drawable, Suspect},
        Before, Looked, Seen, Written,
    },
    store::Store,
    tree::Tree,
};

/// What has come of a call for the graph alone.
pub(super) struct Sketched {
    pub(super) graph: TraceGraph,
    pub(super) written: Written,             // to what the loss reaches
    pub(super) template: Option<Py<PyAny>>,  // of what the loss returned
    pub(super) model: Vec<OwnChange>,        // what the loss has changed itself of the model
    pub(super) reached: Vec<OwnChange>,      // and of what it reaches beside it
    first: (Vec<OwnChange>, Vec<OwnChange>), // the same once more, in a call of the user's
}
pub(super) type Sketch = Result<Sketched, Stop>;

impl Sketched {
    fn constants(&self, varying: &[u32]) -> PyResult<Vec<Array>> {
        let constants = varying.iter().map(|&at| self.graph.graph().constant(at));
        constants.collect::<MlxResult<Vec<_>>>().map_err(mlx)
    }
}

/// So many times that a generator of the process has moved while a graph was compared, it is looked at with other threads held back
/// whether the loss has drawn, which takes 20 ms; then one out of so many times.
const SHARED_DRAWS: (usize, usize) = (4, 16);

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
                self.note_before_update(user)?;
                let host = matches!(rule, Rule::Host);
                let others = if host { store.others.len() } else { 0 };
                let recipe = self.recipe(store, &key, others)?;
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
        let options = if options { store.options_id() } else { (0, 0) };
        let mut key = key(store, part, options)?;
        if updates && self.compiled && host {
            key.front.read = self.read.id();
        }
        if !self.compiled {
            key.front.model = usize::MAX - store.others.len(); // the loss reads the model's numbers at each call
            key.front.read = store.layout_id();
        }
        Ok(key)
    }

    // of a part with a loss, for this batch
    pub(super) fn loss_key(
        &self,
        store: &Store,
        given: &Given,
        rule: &Rule,
        part: Part,
    ) -> PyResult<Key> {
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

    // find a trace that matches the arrays and the numbers that the loss reaches: one that is known to hold for these numbers,
    // or one whose graph differs from the current graph only in constants that are inputs
    fn find_loss(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        mut key: Key,
    ) -> Result<(), Stop> {
        let py = user.py();
        let looked = given.looked.clone();
        given.constants.clear();
        given.adds = Rc::default();
        given.goes_on = true;
        given.counted = Rc::new(self.counted(store, &looked, py)?);
        let counted = given.counted.clone();
        let fits = |entry: &Entry| {
            is_of(entry, &key, &looked, py)
                && holds(entry, py, &looked, &counted)
                && entry.kept.leaves(&store.places, &looked, py)
        };
        if let Some(entry) = self.traces.use_again(fits) {
            self.reach.change();
            if !self.compiled && !entry.kept.meet(&given.tree, &looked, py) {
                entry.trace.expect_others();
            }
            entry.kept.uses += usize::from(self.compiled);
            let is_eager = entry.trace.is_eager();
            let due = is_due(entry.kept.uses) && !is_eager;
            if let Some(seen) = entry.kept.seen(py, &looked) {
                given.constants.clone_from(&seen.constants);
                given.adds = seen.adds.clone();
                given.goes_on = seen.goes_on;
                self.template = seen
                    .template
                    .as_ref()
                    .map(|template| template.clone_ref(py));
            }
            if is_eager {
                self.note_before(user, given)?;
            }
            if !due || self.holds_still(store, user, given, &mut key)? {
                return Ok(());
            }
            self.traces.drop_last(); // the loss is called, and what it does then is the user's to see
            (given.constants, given.adds, given.goes_on) = (Vec::new(), Rc::default(), true);
        }
        let storing = self.traces.storing(&key, &looked, py);
        if let Some(why) = storing.filter(|_| self.compiled) {
            return Err(Stop::Stores(why.into()));
        }
        self.reshapes = self.may_reshape(&key, py);
        let changed = self
            .traces
            .recent()
            .find(|entry| is_of(entry, &key, &looked, py));
        let seen = changed.and_then(|entry| entry.kept.seen.last());
        let changed = seen.map_or_else(Vec::new, |seen| seen.changes(py, &looked));
        let other = changed.is_empty().then(|| self.reach.change()).flatten();
        self.check_rare(given, &key, py)?;
        let known = self
            .traces
            .recent()
            .any(|entry| is_of(entry, &key, &looked, py));
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
        self.note_before(user, given)?;
        self.note_before_update(user)?;
        if self.compiled {
            if let Some(why) = self.takes_numpy(store, user, given)? {
                return Err(Stop::Untraceable(why));
            }
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
            if self.compiled {
                last.kept.shared = looked.shared(py)?;
            }
        }
        Ok(())
    }

    // what there is before the loss is called, where its batch may be skipped
    fn note_before(&mut self, user: &Arguments<'_>, given: &Given) -> PyResult<()> {
        if self.options.guard().is_some() && user.before.borrow().is_none() {
            let (model, roots) = (&user.model, given.roots(user.py()));
            let before = |looked: Looked| Before::of(model, model, &Rc::new(looked));
            let mut before = if given.looked.is_known {
                Before::of(model, model, &given.looked)?
            } else {
                let loosely = self.reach.look_loosely(&roots)?.map(before).transpose()?;
                match loosely.filter(|before| !before.is_partial()) {
                    Some(known) => known,
                    None => before(self.reach.look(&roots, &user.optimizer)?)?,
                }
            };
            before.let_go(user.py())?;
            if self.compiled {
                before.note_references();
            }
            user.before.replace(Some(before));
        }
        Ok(())
    }

    // what the loss has changed as it was called for its graph
    fn note_undo<'a>(&mut self, changes: impl Iterator<Item = &'a Change>, py: Python<'_>) {
        self.undo = changes.map(|change| change.clone_ref(py)).collect();
    }

    // the same of an update by the optimizer's own code, which may be traced in vain
    fn note_before_update(&self, user: &Arguments<'_>) -> PyResult<()> {
        if let Some(looked) = self.read.looked().filter(|_| self.compiled) {
            let mut before = Before::of(&user.model, &user.optimizer, looked)?;
            before.let_go(user.py())?;
            before.note_references();
            user.before_update.replace(Some(before));
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
        let looked = given.looked.clone();
        let is_candidate =
            |entry: &Entry| entry.kept.graph.is_some() && is_of(entry, key, &looked, py);
        let candidate = self.traces.recent().find(|entry| is_candidate(entry));
        let graph = candidate.and_then(|entry| entry.kept.graph.as_ref());
        let Some(by_loss) = graph.map(|graph| graph.is_of_loss()) else {
            return self.varied(store, user, given, key).map(Some);
        };
        let drawable = Drawable::before(&user.model, &given.looked)?;
        let probed = self.probed.as_ref();
        if probed.is_none_or(|seen| !seen.fits(py, &given.looked)) && drawable.stay(py)? {
            self.probed = Some(Seen::new(&given.looked, Vec::new(), None));
            self.probe = Some(false);
            return Err(Stop::Probe);
        }
        let sketch = self.sketch(store, user, given, key, by_loss, &drawable)?;
        self.changes_model |= !sketch.model.is_empty();
        let mut moved = drawable.moved(py, true)?;
        let shared = drawable.moved_of_process(py)?;
        self.shared_draws += usize::from(!shared.is_empty());
        let (first, one_of) = SHARED_DRAWS;
        let asks = self.shared_draws <= first || self.shared_draws.is_multiple_of(one_of);
        if !shared.is_empty() && asks {
            drawable.put_back(py)?;
            let again = || drop(self.sketch(store, user, given, key, by_loss, &drawable));
            moved.extend(draws(py, again)?.then_some(shared).into_iter().flatten());
        }
        if !moved.is_empty() {
            drawable.put_back(py)?; // the trace that fits has not taken it
            return Err(Stop::Untraceable(taken(&moved.join(", "))));
        }
        let failed = Cell::new(None);
        let differences = |entry: &Entry| {
            let comparable = is_candidate(entry) && entry.kept.written == sketch.written;
            let graph = entry.kept.graph.as_ref().filter(|_| comparable)?;
            let differences = graph.differences(&sketch.graph);
            differences.unwrap_or_else(|error| {
                failed.set(Some(error));
                None
            })
        };
        let holds = |entry: &Entry| {
            let varying = &entry.kept.varying;
            differences(entry).is_some_and(|differ| differ.iter().all(|at| varying.contains(at)))
        };
        if let Some(entry) = self.traces.use_again(holds) {
            entry.kept.meet_program(&looked);
            given.constants = sketch.constants(&entry.kept.varying)?;
            let template = sketch.template;
            self.template = template.as_ref().map(|template| template.clone_ref(py));
            let (to_model, model) = leave(sketch.model, py)?;
            let (to_reached, reached) = leave(sketch.reached, py)?;
            self.note_undo(model.iter().chain(&reached), py);
            if !store.places.is_empty() {
                let number = self.traces.last().map(|last| last.number);
                let looked = &given.looked;
                let keep = |number| self.traces.keep_set(number, &store.places, looked, py);
                number.map_or(Ok(()), keep)?;
                store.accept_model(&user.model, || Ok(()))?;
            }
            if let Some((mut adds, more)) = to_model.zip(to_reached) {
                adds.extend(more);
                let now = self.reach.look(&given.roots(py), &user.optimizer)?;
                let looks = (&*given.looked, &now);
                let counts = progress(adds.iter(), py)?;
                let beside = || Beside::of(key.front.model, &given.tree, looks, counts.clone(), py);
                let known = adds.is_empty() || self.looked_ahead.has(&beside(), py);
                let due = !known && self.looked_ahead.comes(beside(), false, py);
                if known || due {
                    self.see(py, (given, &now), template, Some(adds))?;
                }
                if due {
                    self.suspect = Some(Suspect {
                        model,
                        reached,
                        first: sketch.first,
                        again: true,
                        ..Suspect::default()
                    });
                }
            }
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
        given.constants = sketch.constants(&varying)?;
        drawable.put_back(py)?; // or it would be drawn twice in this step
        Ok(Some(varying))
    }

    // the constants of a first trace that have varied in other steps of the loss
    fn varied(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
    ) -> Result<Vec<u32>, Stop> {
        let py = user.py();
        let native = matches!(store.rule, Some(Rule::Native(_))); // else code of the user's updates on trial, too
        if !self.compiled || !native || given.looked.program.may_draw {
            return Ok(Vec::new());
        }
        let origin = self.origin(store, given, py)?;
        let known = origin.map_or_else(Vec::new, |origin| known_graphs::of_others(&origin, py));
        if known.is_empty() {
            return Ok(Vec::new());
        }
        let drawable = Drawable::before(&user.model, &given.looked)?;
        let Some(sketch) = self.sketch_any(store, user, given, key, true, &drawable)? else {
            return Ok(Vec::new()); // MLX compiles nothing
        };
        if !(sketch.model.is_empty() && sketch.reached.is_empty()) {
            return Ok(Vec::new()); // a trace for each number is looked at
        }
        for (graph, mut varying) in known {
            if let Some(differ) = graph.differences(&sketch.graph).map_err(mlx)? {
                varying.extend(differ);
                varying.sort_unstable();
                varying.dedup();
                given.constants = sketch.constants(&varying)?;
                return Ok(varying);
            }
        }
        Ok(Vec::new())
    }

    /// What the graph of a call is known by to other steps.
    pub(super) fn origin(
        &self,
        store: &Store,
        given: &Given,
        py: Python<'_>,
    ) -> PyResult<Option<Origin>> {
        let numbers = store.model_numbers(py)?;
        Ok(Origin::of(
            self.owner,
            &given.tree,
            &given.looked,
            numbers,
            py,
        ))
    }

    // record that the last trace holds for the numbers before the call, and for those that the loss has left. `adds`: what it has
    // added to numbers of its own; none as a trace is made, where that is looked at behind the call
    pub(super) fn see(
        &mut self,
        py: Python<'_>,
        (given, now): (&Given, &Looked),
        template: Option<Py<PyAny>>,
        adds: Option<Vec<Advance>>,
    ) -> PyResult<()> {
        let Some(last) = self.traces.last_mut() else {
            return Ok(());
        };
        let kept = &mut last.kept;
        let adds = adds.map(Rc::new);
        let goes_on = match &adds {
            Some(adds) => are_alike(adds, &kept.adds, py)?,
            None => true,
        };
        if let (Some(adds), true) = (&adds, goes_on) {
            kept.adds = adds.clone(); // to those of an object that has taken the place of another one, from now on
        }
        let known = kept.seen(py, &given.looked);
        if known.is_none_or(|seen| !seen.holds_for(&given.counted, py)) {
            let mut seen = Seen::new(&given.looked, given.constants.clone(), template);
            seen.adds = adds.clone().unwrap_or_default();
            seen.goes_on = goes_on;
            seen.counted = given.counted.clone();
            kept.see(seen);
        }
        if goes_on && kept.seen(py, now).is_none() {
            let seen = kept.seen(py, &given.looked);
            if let Some(seen) = seen.map(|seen| seen.with(py, now)) {
                kept.see(seen);
            }
        }
        if let Some(adds) = adds.filter(|adds| goes_on && !adds.is_empty()) {
            self.traces.go_on(py, &given.looked, now, &adds)?;
        }
        Ok(())
    }

    // trace without compiling; `by_loss`: the loss alone, where that determines the rest; `drawable`: as it is before
    pub(super) fn sketch(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
        by_loss: bool,
        drawable: &Drawable,
    ) -> Sketch {
        let sketch = self.sketch_any(store, user, given, key, by_loss, drawable)?;
        let missing = || PyRuntimeError::new_err("a step was traced without a loss");
        sketch.ok_or_else(|| Stop::Raised(missing()))
    }

    // the same; none where MLX compiles nothing
    fn sketch_any(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &Key,
        by_loss: bool,
        drawable: &Drawable,
    ) -> Result<Option<Sketched>, Stop> {
        let mut sketch = Ok(None);
        if by_loss {
            sketch = self.sketch_once(store, user, given, key, true);
        }
        if let Ok(None) = sketch {
            drawable.put_back(user.py())?;
            sketch = self.sketch_once(store, user, given, key, false);
        }
        let ended = matches!(&sketch, Err(stop) if !matches!(stop, Stop::Raised(_)));
        if ended && !self.apart {
            drawable.put_back(user.py())?;
        }
        sketch
    }

    // the numbers of the model to which losses add, where the code of this one may read them
    fn counted(
        &mut self,
        store: &Store,
        looked: &Looked,
        py: Python<'_>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let counted = store.counted(py)?;
        if counted.is_empty() || !self.compiled {
            return Ok(Vec::new());
        }
        let of = (looked.program.id, store.signature()?.id, counted.len());
        if self.reads_counts.0 != of {
            let reads = match store.counted_names(py)? {
                Some(names) => looked.may_read(names, py)?,
                None => true,
            };
            self.reads_counts = (of, reads);
        }
        Ok(if self.reads_counts.1 {
            counted
        } else {
            Vec::new()
        })
    }

    // numbers that the loss changes on the model are looked at behind a step whose trace leaves the shapes
    fn may_reshape(&self, key: &Key, py: Python<'_>) -> bool {
        self.compiled && !self.changes_model && self.traces.reshapes(key, py)
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
        self.reshapes = self.may_reshape(key, user.py());
        let call = self.enter_host(store, user, given, true, &[])?;
        let mut asked = false;
        if let Some(current) = self.host.current.borrow_mut().as_mut() {
            current.sketch = true;
            current.ends = !self.apart;
            current.by_loss &= by_loss;
            asked = current.by_loss;
        }
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let outcome = engine.dry_run(&mut trace, call);
        let current = self.host.current.take();
        let insufficient = asked && current.as_ref().is_some_and(|current| !current.by_loss);
        let Some(current) = current else {
            return Err(Stop::Raised(missing()));
        };
        match (current.graph, current.stop, outcome) {
            (Some(graph), ..) => {
                let taken_out = &current.taken_out;
                if !self.traces.takes_out(&given.tree, taken_out, user.py()) {
                    return Err(Stop::Untraceable(
                        "it takes something out of a dict among its arguments, and not at each call"
                            .into(),
                    ));
                }
                let (model, reached) = current.changed;
                Ok(Some(Sketched {
                    graph,
                    written: current.written,
                    template: current.template,
                    model,
                    reached,
                    first: current.suspect.first,
                }))
            }
            (None, Some(stop), _) => Err(stop),
            (None, None, Err(_)) if insufficient => Ok(None),
            (None, None, Err(error)) => Err(Stop::Raised(to_python(&error))),
            (None, None, Ok(())) => Ok(None),
        }
    }

    fn recipe(&self, store: &Store, key: &Key, others: usize) -> PyResult<Recipe> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let engine = store.engine.as_ref().ok_or_else(missing)?;
        Ok(engine.recipe(key.part.clone(), *self.options, others))
    }
}

/// Return whether a trace is of this key, for arrays that are one where those of its own were.
pub(super) fn is_of(entry: &Entry, key: &Key, looked: &Looked, py: Python<'_>) -> bool {
    equals(&entry.key, key, py) && entry.kept.shares(looked, py)
}

// the key of a part, of any arguments
fn key(store: &Store, part: Part, options: (usize, usize)) -> PyResult<Key> {
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
        None => format!("model{rest}"), // its numbers come behind the arguments
    }
}

/// The reason for which a loss that takes from generators or iterators runs uncompiled.
pub(super) fn taken(drawn: &str) -> String {
    format!(
        "it takes from {drawn} as it is called, which a trace would do once: draw with mx.random, or pass as an argument \
         what is drawn"
    )
}
