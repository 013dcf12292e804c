//! What a loss has changed itself, or drawn, as its trace was made: whether that matters, and goes on in the same way.
use std::{collections::VecDeque, rc::Rc};

use faststep::engine::{Part, Task};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::{
    arguments::Arguments,
    find::{is_of, taken, Sketch},
    run::{Given, MAX_CHECKS},
    trace_cache::{warn, Entry, Key},
    undisturbed::undisturbed,
    Inner,
};
use crate::{
    mlx::{
        classes::is_numpy_number,
        collector::{Collector, Refers, Visited},
        errors::mlx,
    },
    reach::{
        advance::{differ, progress, Adds},
        stop::Stop,
        suspect::{draws, Drawable, Effects, Suspect},
        Looked, Seen,
    },
    store::Store,
    tree::{
        static_value::{equal, is_plain},
        Tree,
    },
};

/// How many calls later a loss that counts them may decide something by that.
const LATER: [i64; 6] = [1, 9, 99, 999, 9_999, 99_999];

/// How often a loss is called with the same numbers, texts and objects beside its own before it is looked at what it gives many
/// calls later with these, and its calls are left out again.
const COMES_AGAIN: usize = 3;

/// So many times that has been done, from which on they are to come as often as it calls the loss: counts of another kind are new
/// whenever that kind has come in between.
const LOOKS_AHEAD: (usize, usize) = (4, 16);

/// The most such sets that are remembered, the last ones last.
const MAX_BESIDE: usize = 64;

/// What a loss may decide by beside the numbers that it changes itself.
pub(super) struct Beside {
    model: usize,
    batch: Rc<Tree>,
    program: usize,
    values: Rc<Vec<Py<PyAny>>>,
    own: Vec<usize>,  // the numbers of those that it changes
    counts: Vec<f64>, // how far the numbers have come to which each call adds
}

impl Refers for Beside {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.batch.visit(collector)?;
        self.values.visit(collector)
    }
}

impl Beside {
    /// What there was before a call, and behind it.
    pub(super) fn of(
        model: usize,
        batch: &Rc<Tree>,
        (before, now): (&Looked, &Looked),
        counts: Vec<f64>,
        py: Python<'_>,
    ) -> Self {
        Self {
            counts,
            model,
            batch: batch.clone(),
            program: before.program.id,
            values: before.values.clone(),
            own: Seen::new(before, Vec::new(), None).changes(py, now),
        }
    }

    fn is_same(&self, other: &Self, py: Python<'_>) -> bool {
        let same = |a: &Py<PyAny>, b: &Py<PyAny>| equal(a.bind(py), b.bind(py));
        let is_own = |at: &usize| self.own.contains(at) || other.own.contains(at);
        let mut values = (0..self.values.len()).filter(|at| !is_own(at));
        (self.model, self.program) == (other.model, other.program)
            && self.values.len() == other.values.len()
            && values.all(|at| same(&self.values[at], &other.values[at]))
            && self.counts.len() == other.counts.len()
            && self.batch.equals(&other.batch, py)
    }
}

/// With what beside its own numbers it has been looked at what a loss gives many calls later.
#[derive(Default)]
pub(super) struct LookedAhead {
    known: Vec<(Beside, usize, bool)>, // how often it has come, and whether it has been looked at
    done: usize,
}

impl Refers for LookedAhead {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        let mut known = self.known.iter();
        known.try_for_each(|(beside, ..)| beside.visit(collector))
    }
}

impl LookedAhead {
    /// Return whether that has been done with these, and from no later call on.
    pub(super) fn has(&self, beside: &Beside, py: Python<'_>) -> bool {
        let mut known = self.known.iter();
        known.any(|(known, _, looked_at)| {
            let mut counts = known.counts.iter().zip(&beside.counts);
            *looked_at && known.is_same(beside, py) && counts.all(|(from, now)| from <= now)
        })
    }

    /// Note that a loss is called with these; whether it is to be done now, as it is where it `is_due` anyway.
    pub(super) fn comes(&mut self, beside: Beside, is_due: bool, py: Python<'_>) -> bool {
        let mut known = self.known.iter();
        let at = known.rposition(|(known, ..)| known.is_same(&beside, py));
        let times = 1 + at.map_or(0, |at| self.known.remove(at).1);
        if self.known.len() == MAX_BESIDE {
            self.known.remove(0);
        }
        let (few, often) = LOOKS_AHEAD;
        let is_due = is_due || times >= if self.done < few { COMES_AGAIN } else { often };
        self.done += usize::from(is_due);
        self.known.push((beside, times, is_due));
        is_due
    }
}

/// What a loss does beside its result, prints or writes to files say, as far as it has been called on trial.
#[derive(Clone, Default)]
pub(super) enum Writes {
    /// It has not been called yet.
    #[default]
    Unknown,
    /// This in the first of these calls: one that does more is ended before.
    Known(Vec<String>),
    /// This in a later one.
    Later(String),
    /// This in the first, which has been ended: nobody could take it back.
    Outside(String),
}

impl Writes {
    // behind another call
    fn with(self, found: Vec<String>, outside: Option<String>) -> Self {
        match (self, outside) {
            (Self::Unknown, Some(what)) => Self::Outside(what),
            (Self::Unknown, None) => Self::Known(found),
            (Self::Known(known), _) => {
                let more = found.into_iter().find(|what| !known.contains(what));
                more.map_or(Self::Known(known), Self::Later)
            }
            (ended, _) => ended,
        }
    }

    // why that cannot be repeated
    fn why(&self) -> Option<String> {
        match self {
            Self::Unknown | Self::Known(_) => None,
            Self::Later(what) => Some(format!("it {what} at some calls, which a trace would not")),
            Self::Outside(what) => Some(format!(
                "it {what}, so that it cannot be called on trial: do that outside of the loss"
            )),
        }
    }
}

/// A trace's number, whether the numbers are those of its first call, what the loss changed there, and the key of the batch.
type Pending = (usize, bool, Suspect, Key);

/// What comes of further calls of a loss.
enum Again {
    /// The user's error.
    Raised,
    /// Another graph.
    Differs,
    /// Something has been taken from these generators and iterators.
    Takes(String),
    /// Nothing: there is a generator or an iterator that nobody could put back.
    Stays,
    /// The same graph, and a change of another kind, by its name.
    Changes(String),
    /// The same graph, and what each call adds to numbers; none where the loss cannot be called for its graph.
    Same(Option<Adds>),
}

impl Inner {
    // behind the first step by a trace of a loss that changes something itself, or before another one: the reason why that cannot be
    // repeated
    pub(super) fn suspected(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        (task, is_behind): (Task, bool),
    ) -> PyResult<Option<String>> {
        let pending = self.pending(store, given, (task, is_behind), user.py())?;
        let tried = |pending| undisturbed(user.py(), || self.tried(store, user, given, pending));
        pending.map_or(Ok(None), tried)
    }

    // the same of one trace
    fn tried(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        (at, is_now, mut suspect, mut key): Pending,
    ) -> PyResult<Option<String>> {
        let py = user.py();
        if !is_now && suspect.is_looked_at_enough() {
            self.keep(at, suspect); // until the numbers are those of its trace again
            return Ok(None);
        }
        if suspect.is_unchanged() && self.checks >= MAX_CHECKS {
            return Ok(None);
        }
        self.checks += usize::from(!suspect.again);
        if suspect.again {
            suspect.swap(py, true)?;
        }
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
        self.writes = Writes::Unknown;
        let mut raised = false;
        let drawn = !suspect.drawn.is_empty()
            && (!suspect.shared
                || draws(py, || {
                    let sketch = self.sketch_apart(store, user, given, &mut key, false);
                    raised |= matches!(sketch, Err(Stop::Raised(_)));
                })?);
        if drawn && !raised {
            suspect.swap(py, true)?;
            return Ok(Some(taken(&suspect.drawn.join(", "))));
        }
        if !raised && suspect.is_unchanged() && suspect.read.is_empty() {
            if !is_now {
                self.keep(at, suspect);
            }
            return Ok(None);
        }
        let again = if raised {
            suspect.swap(py, true)?;
            Again::Raised
        } else {
            self.call_again(store, user, given, &mut key, &mut suspect)?
        };
        let adds = match again {
            Again::Raised | Again::Differs if self.writes.why().is_some() => {
                return Ok(self.writes.why());
            }
            Again::Raised => {
                self.checks -= usize::from(!suspect.again);
                self.traces.drop_number(at); // the loss is called, and raises where it would without a trace
                return Ok(None);
            }
            Again::Differs => return Ok(Some(depends(py, &suspect))),
            Again::Takes(names) => return Ok(Some(taken(&names))),
            Again::Stays => return Ok(Some(stays(&suspect.names(py)))),
            Again::Changes(name) => return Ok(Some(changes(&name))),
            Again::Same(_) if !is_now => {
                if !suspect.again {
                    suspect.swap(py, true)?;
                }
                self.keep(at, suspect);
                return Ok(None);
            }
            Again::Same(adds) => adds,
        };
        store.note_places(suspect.set(adds.as_ref(), py)?, py);
        self.traces.keep_set(at, &store.places, &given.looked, py)?;
        if let Some(adds) = adds.filter(|_| !suspect.again) {
            // go on with what the loss adds to numbers of its own, wherever its trace stands for a call
            if !suspect.model.is_empty() {
                let add = || adds.model.iter().try_for_each(|add| add.add(py));
                store.accept_model(&user.model, add)?;
            }
            self.traces
                .settle_numbers(&given.looked, (at, &suspect), adds, py);
        }
        if !suspect.read.is_empty() {
            let message = format!(
                "the loss reads {} as it is called, which is only while it is traced: what it decides by that stays \
                 as it is. Pass as an argument what is to be seen at every step",
                suspect.read.join(", ")
            );
            warn(py, &message)?;
        }
        Ok(None)
    }

    // call the loss for its graph, with its own numbers as they are now, as they were, and as they will be; leaves the model as the
    // first call has
    fn call_again(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &mut Key,
        suspect: &mut Suspect,
    ) -> PyResult<Again> {
        let py = user.py();
        let model = store.signature()?.id;
        if Drawable::before(&user.model, &given.looked)?.stay(py)? {
            suspect.swap(py, true)?;
            return Ok(Again::Stays);
        }
        let mut sketch =
            |inner: &mut Self, given: &mut Given| inner.sketch_apart(store, user, given, key, true);
        let mut first = sketch(self, given);
        suspect.swap(py, true)?;
        if matches!(&first, Err(Stop::Raised(_))) || self.writes.why().is_some() {
            return Ok(Again::Raised);
        }
        if let Some(names) = self.takes.take() {
            return Ok(Again::Takes(names));
        }
        suspect.swap(py, false)?;
        let looked = self.reach.look(&given.roots(py), &user.optimizer);
        let now = looked.map(|looked| std::mem::replace(&mut given.looked, Rc::new(looked)));
        let second = now.map(|now| (sketch(self, given), now));
        suspect.swap(py, false)?;
        let (mut second, now) = second?;
        let before = std::mem::replace(&mut given.looked, now);
        if let Some(names) = self.takes.take() {
            return Ok(Again::Takes(names));
        }
        if self.writes.why().is_some() || !is_same(&first, &second, py)? {
            return Ok(Again::Differs);
        }
        let mut adds = None;
        if let (Ok(first), Ok(second)) = (&mut first, &mut second) {
            // to the model as it was, and to what the loss reaches as it was
            let of_model = differ(&first.model, &suspect.first.0, py)?;
            let of_reached = differ(&second.reached, &suspect.first.1, py)?;
            if let Some(name) = of_model.or(of_reached) {
                return Ok(Again::Changes(name));
            }
            let again = (&mut second.model, &mut first.reached);
            match Adds::of_two(&suspect.first, again, py)? {
                Ok(found) => adds = Some(found),
                Err(name) => return Ok(Again::Changes(name)),
            }
        }
        let counts = progress(adds.iter().flat_map(Adds::iter), py)?;
        let beside = Beside::of(model, &given.tree, (&before, &given.looked), counts, py);
        if !suspect.again {
            if self.looked_ahead.has(&beside, py) {
                return Ok(Again::Same(adds));
            }
            self.looked_ahead.comes(beside, true, py);
        }
        let counts = adds.as_ref().map(|adds| suspect.count(adds, py));
        let counts = counts.transpose()?.unwrap_or_default();
        let other = self.call_later(user, given, suspect, (&first, &adds), sketch);
        suspect.uncount(&counts);
        Ok(other?.unwrap_or(Again::Same(adds)))
    }

    // call the loss for its graph with its own numbers as they will be many calls later; none where it does the same there
    fn call_later(
        &mut self,
        user: &Arguments<'_>,
        given: &mut Given,
        suspect: &mut Suspect,
        (first, adds): (&Sketch, &Option<Adds>),
        mut sketch: impl FnMut(&mut Self, &mut Given) -> Sketch,
    ) -> PyResult<Option<Again>> {
        let py = user.py();
        let mut turns = LATER.to_vec();
        turns.extend(suspect.turns(py, &given.looked)?);
        let mut turns: VecDeque<_> = turns.into_iter().map(|times| (times, false)).collect();
        let limits = py.import("faststep._step._limits")?;
        let limits = limits.getattr("Limits")?.call0()?;
        let writes = self.writes.clone();
        let found = suspect.compared(&limits, 0, || drop(sketch(self, given)))?;
        self.writes.clone_from(&writes); // with such numbers it may do anything
        turns.extend(found.into_iter().map(|times| (times, true)));
        if let Some(names) = self.takes.take() {
            return Ok(Some(Again::Takes(names)));
        }
        let changed = std::mem::take(&mut suspect.first);
        while let Some((times, goes_on)) = turns.pop_front() {
            let later = suspect.later(py, times, || {
                let looked = self.reach.look(&given.roots(py), &user.optimizer)?;
                let now = std::mem::replace(&mut given.looked, Rc::new(looked));
                let later = sketch(self, given);
                given.looked = now;
                if let Some(names) = self.takes.take() {
                    return Ok(Some(Again::Takes(names)));
                }
                if self.writes.why().is_some() || !is_same(first, &later, py)? {
                    return Ok(Some(Again::Differs));
                }
                let (Some(adds), Ok(later)) = (adds, &later) else {
                    return Ok(None);
                };
                let other = adds.is_other((&later.model, &later.reached), &changed, py)?;
                Ok::<_, PyErr>(other.map(Again::Changes))
            });
            match later?.transpose()? {
                Some(None) => {}
                Some(Some(other)) => return Ok(Some(other)),
                None => break,
            }
            if goes_on {
                let found = suspect.compared(&limits, times, || drop(sketch(self, given)))?;
                self.writes.clone_from(&writes);
                turns.extend(found.into_iter().map(|times| (times, true)));
                if let Some(names) = self.takes.take() {
                    return Ok(Some(Again::Takes(names)));
                }
            }
        }
        suspect.first = changed;
        Ok(None)
    }

    // call the loss for its graph; `returns`: what it takes from generators and iterators is put back, and noted
    pub(super) fn sketch_apart(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        given: &mut Given,
        key: &mut Key,
        returns: bool,
    ) -> Sketch {
        key.front.reached = given.looked.tensors.clone();
        let drawable = Drawable::before(&user.model, &given.looked)?;
        self.apart = true;
        let known = match &self.writes {
            Writes::Unknown => None,
            Writes::Known(known) => Some(known.clone()),
            Writes::Later(_) | Writes::Outside(_) => Some(Vec::new()),
        };
        let effects = Effects::begin(user.py(), known, false, &drawable)?;
        let sketch = self.sketch(store, user, given, key, true, &drawable);
        self.apart = false;
        let (found, outside) = effects.found()?;
        drop(effects);
        self.writes = std::mem::take(&mut self.writes).with(found, outside);
        if !returns {
            return sketch;
        }
        let py = user.py();
        let mut moved = drawable.moved(py, false)?;
        let shared = drawable.moved_of_process(py)?;
        drawable.put_back(py)?;
        if !shared.is_empty() {
            let again = || drop(self.sketch_apart(store, user, given, key, false));
            if draws(py, again)? {
                moved.extend(shared);
            }
            drawable.put_back(py)?; // of its own, it has taken once more
        }
        self.takes = (!moved.is_empty()).then(|| moved.join(", "));
        sketch
    }

    // what is to be looked at before a trace is used for this batch
    fn pending(
        &self,
        store: &Store,
        given: &Given,
        (task, is_behind): (Task, bool),
        py: Python<'_>,
    ) -> PyResult<Option<Pending>> {
        let rule = store.rule.clone().filter(|_| self.compiled);
        let Some(rule) = rule.filter(|_| self.traces.are_suspect(false)) else {
            return Ok(None);
        };
        let mut parts = task.parts(&rule).into_iter();
        let Some(part) = parts.find(|part| !matches!(part, Part::Update(_))) else {
            return Ok(None);
        };
        let known = self.loss_key(store, given, &rule, part)?;
        if let Some(last) = self.traces.last().filter(|_| is_behind) {
            // what the loss reaches has the forms that it has left there
            let suspect = last.kept.suspect.take();
            return Ok(suspect.map(|suspect| (last.number, true, suspect, known)));
        }
        let suspects = self.traces.recent().filter(|entry| {
            entry.kept.suspect.borrow().is_some() && is_of(entry, &known, &given.looked, py)
        });
        let suspects: Vec<&Entry> = suspects.collect();
        let now = suspects.iter().find(|entry| {
            let suspect = entry.kept.suspect.borrow();
            suspect
                .as_ref()
                .is_some_and(|it| it.is_of(py, &given.looked))
        });
        let found = now.or(suspects.first());
        let found = found.and_then(|entry| {
            let suspect = entry.kept.suspect.take()?;
            Some((entry.number, now.is_some(), suspect))
        });
        Ok(found.map(|(number, is_now, suspect)| (number, is_now, suspect, known)))
    }

    // look at it once more before the trace is used again
    fn keep(&self, number: usize, suspect: Suspect) {
        let mut recent = self.traces.recent();
        if let Some(entry) = recent.find(|entry| entry.number == number) {
            entry.kept.suspect.replace(Some(suspect));
        }
    }
}

// true if two graphs of a loss are equal, as far as it has one
fn is_same(one: &Sketch, other: &Sketch, py: Python<'_>) -> PyResult<bool> {
    match (one, other) {
        (Ok(one), Ok(other)) => {
            let differences = one.graph.differences(&other.graph).map_err(mlx)?;
            let returned = (one.template.as_ref(), other.template.as_ref());
            let same = match returned {
                (Some(one), Some(other)) => has_same_values(one.bind(py), other.bind(py)),
                _ => true,
            };
            let same = same && one.written == other.written;
            Ok(same && differences.is_some_and(|differences| differences.is_empty()))
        }
        (
            Err(Stop::Becomes(_) | Stop::Stores(_) | Stop::Reshapes(_)),
            Err(Stop::Becomes(_) | Stop::Stores(_) | Stop::Reshapes(_)),
        ) => Ok(true),
        _ => Ok(false), // it stores an array at some calls, say
    }
}

// true if the numbers and texts in two structures that a loss returns are the same
pub(super) fn has_same_values(one: &Bound<'_, PyAny>, other: &Bound<'_, PyAny>) -> bool {
    let alike = |ones: Vec<Bound<'_, PyAny>>, others: Vec<Bound<'_, PyAny>>| {
        let mut pairs = ones.iter().zip(&others);
        ones.len() == others.len() && pairs.all(|(one, other)| has_same_values(one, other))
    };
    if let (Ok(one), Ok(other)) = (one.cast::<PyDict>(), other.cast::<PyDict>()) {
        let keys = one.keys().eq(other.keys()).unwrap_or(false);
        return keys
            && alike(
                one.values().iter().collect(),
                other.values().iter().collect(),
            );
    }
    if let (Ok(one), Ok(other)) = (one.cast::<PyList>(), other.cast::<PyList>()) {
        return alike(one.iter().collect(), other.iter().collect());
    }
    if let (Ok(one), Ok(other)) = (one.cast::<PyTuple>(), other.cast::<PyTuple>()) {
        return alike(one.iter().collect(), other.iter().collect());
    }
    let is_value = |it: &Bound<'_, PyAny>| is_plain(it) || is_numpy_number(it);
    !(is_value(one) || is_value(other)) || equal(one, other)
}

// the reason for which a loss runs uncompiled that changes something itself in another way at each call
fn changes(name: &str) -> String {
    format!(
        "it changes {name} itself, and not by adding the same at each call: keep that in an mx.array, or change it outside of \
         the loss"
    )
}

// the reason for which a loss runs uncompiled that cannot be called on trial
fn stays(names: &str) -> String {
    let depends = match names {
        "" => String::new(),
        names => format!("its result may depend on what it changes itself ({names}), and "),
    };
    format!(
        "{depends}it reaches a generator or an iterator, from which it may take at a later call: draw with mx.random, or pass as an \
         argument what is taken"
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
