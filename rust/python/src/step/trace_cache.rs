//! The traces of a step, and the causes for new ones in the user's words.
use std::{cell::RefCell, mem::discriminant, rc::Rc};

use faststep::engine::{self, CallTraces, Causes, Task, Tensor, Trace, TraceCache, TraceEntry};
use pyo3::{exceptions::PyRuntimeWarning, prelude::*, types::PyWeakrefReference};

use super::arguments::Arguments;
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    host::{
        shown::{are_same, TakenOut},
        TraceGraph,
    },
    mlx::bridge,
    reach::{
        advance::{are_within, Adds, Advance},
        stop::DISABLED,
        suspect::Suspect,
        Looked, Seen, Written,
    },
    tree::{snapshot::Placed, Tree},
};

/// Number of traces from which on a warning names their cause.
const MANY: usize = 16;

/// Number of traces from which on the first batch of a kind runs uncompiled, where no more than twice as many are kept.
const TOO_MANY: usize = 32;

/// Number of traces that differ by the optimizer's options or by the model's attributes alone from which on others run uncompiled
/// at first: betas or a text that are set anew before each step, say.
const MANY_NUMBERS: usize = 4;

/// Number of steps that have run uncompiled for that reason from which on a warning says so.
const TELL: usize = 8;

/// The most kinds of batches that are remembered without a trace.
const MAX_RARE: usize = 256;

/// The reason why a batch runs uncompiled that may be the only one of its kind.
const RARE: &str = "many traces have been made, and this is the first batch of its kind";

/// The reason why a batch runs uncompiled before which the optimizer got other options.
pub const RARE_OPTIONS: &str = "options of the optimizer have changed again and again";

/// The reason why a batch runs uncompiled before which the model got other attributes: texts, say.
const RARE_ATTRIBUTES: &str =
    "attributes of the model have changed again and again: pass what changes as an argument";

/// The reason why a batch runs uncompiled for which what the loss reaches is not searched.
pub const RARE_STRUCTURE: &str =
    "what the loss reaches has had another structure at nearly every call";

/// The reason why a batch runs uncompiled whose loss names an iterator or a generator, of numbers that are new.
pub const PROBED: &str = "it is seen whether its loss takes from an iterator";

/// Return whether a reason is one for which a step without a trace may be wanted again soon: that a trace might be used once, say.
pub fn is_rare(why: &str) -> bool {
    let all = [
        RARE,
        RARE_OPTIONS,
        RARE_ATTRIBUTES,
        RARE_STRUCTURE,
        PROBED,
        DISABLED,
    ];
    all.contains(&why)
}

/// Number of steps that have run uncompiled since what the loss reaches is not searched from which on a warning says so.
const TELL_STRUCTURE: usize = 64;

/// A kind of batch is traced when it comes the second time, and again whenever it has come so often.
const COMES_BACK: usize = 16;

/// So many calls for which numbers or texts have been new and no trace has fit, one after the other, and from then on one out of
/// so many compares the graph of the loss with those of the traces.
const NEW_VALUES: (usize, usize) = (8, 16);

/// Part of a trace's key beside the engine's state.
#[derive(Clone)]
pub struct CallKey {
    /// Shape and dtype of each array that the loss reaches beside the model.
    pub reached: Rc<Vec<Tensor>>,
    /// The model's signature.
    pub model: usize,
    /// The optimizer's options, and the forms of the arrays among them.
    pub options: (usize, usize),
    /// What the optimizer's code reads beside them; uncompiled, the layout of the trained tensors.
    pub read: usize,
    /// The arguments.
    pub batch: Rc<Tree>,
}

/// Key of a trace: what it is valid for.
pub type Key = engine::Key<CallKey>;

/// Return whether a trace for one key serves the other, where the numbers that the loss reaches allow it.
pub fn equals(one: &Key, other: &Key, py: Python<'_>) -> bool {
    has_same_options(one, other)
        && one.front.model == other.front.model
        && equals_beside_numbers(one, other, py)
}

// the numbers of an optimizer of MLX's own are in the part
fn has_same_options(one: &Key, other: &Key) -> bool {
    one.front.options == other.front.options && one.part == other.part
}

fn equals_beside_numbers(one: &Key, other: &Key, py: Python<'_>) -> bool {
    let (a, b) = (&one.front, &other.front);
    a.reached == b.reached
        && a.read == b.read
        && one.places == other.places
        && discriminant(&one.part) == discriminant(&other.part)
        && a.batch.equals(&b.batch, py)
}

/// One trace in `Step.stats`.
#[pyclass(frozen, get_all, module = "faststep._core")]
#[derive(Clone)]
pub struct TraceRecord {
    /// The cause of the trace.
    cause: String,
    /// Its duration in seconds, first evaluation included.
    seconds: f64,
    /// Its capture as one CUDA graph, or why it is not replayed; None where that is not asked for.
    replay: Option<String>,
}

/// Data that is kept with a trace.
#[derive(Default)]
pub struct Kept {
    /// The graph before it was compiled, where the loss reaches anything.
    pub graph: Option<Rc<TraceGraph>>,
    /// The constants of the graph that are inputs.
    pub varying: Vec<u32>,
    /// The numbers for which the trace holds, the last ones last.
    pub seen: Vec<Seen>,
    /// What the loss writes to what it reaches.
    pub written: Written,
    /// Keys that it takes out of dicts among its arguments, which are the user's to see.
    pub taken_out: Rc<TakenOut>,
    /// What the loss has changed itself as it was traced: to be looked at before the trace is used again.
    pub suspect: RefCell<Option<Suspect>>,
    /// What the loss adds to numbers of its own at each call.
    pub adds: Rc<Vec<Advance>>,
    /// What the loss sets on the model, as a call has left it for which the trace stands.
    pub set: RefCell<Vec<Placed>>,
    /// The numbers at that call.
    pub set_by: RefCell<Option<Seen>>,
    /// How often the trace has stood for a call of the loss.
    pub uses: usize,
    structures: usize, // of what the loss reaches for which it was found to hold
    /// Arrays in the trace, from places that are not watched.
    pub pins: Vec<Pin>,
    /// Arrays that the loss reaches which were one object as it was traced: one input stands for both, by their numbers.
    pub shared: Vec<(usize, usize)>,
    met: Option<(Rc<Tree>, Rc<Vec<Tensor>>)>, // arguments of the last call that was looked for, and arrays that the loss reaches
}

/// An array object in the cache of a function, and the identity of its value in a trace.
pub struct Pin(Py<PyWeakrefReference>, usize);

impl Pin {
    /// By a weak reference to the array.
    pub fn new(array: Bound<'_, PyWeakrefReference>, id: usize) -> Self {
        Self(array.unbind(), id)
    }

    // false if it has been changed in place; one that is gone has been computed once, and would be again
    fn holds(&self, py: Python<'_>) -> bool {
        let array = self.0.bind(py).upgrade();
        array.is_none_or(|array| bridge::id(&array) == Some(self.1))
    }
}

/// The number of structures for which the uses of a trace are counted anew: a loss that is asked may make another one itself.
const MAX_STRUCTURES: usize = 8;

/// Largest number of sets of numbers that a trace keeps; the one seen first goes first.
const MAX_SEEN: usize = 16;

/// The most bytes of the constants that it takes for them, beside the last ones.
const MAX_BYTES: usize = 1 << 20;

impl Refers for Kept {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.seen.visit(collector)?;
        self.suspect.visit(collector)?;
        self.adds.visit(collector)?;
        self.set.visit(collector)?;
        self.set_by.visit(collector)?;
        self.met
            .as_ref()
            .map_or(Ok(()), |(batch, _)| batch.visit(collector))
    }
}

impl Kept {
    /// Return whether the model has at these places what a call has left there for which the trace stands: else the loss is called
    /// for that.
    pub fn leaves(&self, places: &[Placed], looked: &Looked, py: Python<'_>) -> bool {
        let set = self.set.borrow();
        let stand = || set.iter().all(|set| set.stands(py).unwrap_or(false));
        let by = self.set_by.borrow();
        let fits = || by.as_ref().is_some_and(|by| by.fits(py, looked));
        self.graph.is_none()
            || places.is_empty()
            || (set.len() == places.len() && stand() && fits())
    }

    /// Return whether what was one array as the loss was traced is one still, what is changed in place was one where it is one, and
    /// nobody has come to hold what is changed in place and taken out of its place.
    pub fn shares(&self, looked: &Looked, py: Python<'_>) -> bool {
        let ids = looked.arrays.ids();
        let mut shared = self.shared.iter();
        let matters = || {
            let told = looked.program.tells_apart && looked.has_doubles();
            told || self.written.touches_others(ids, &self.shared)
        };
        shared.all(|&(one, other)| ids.get(one) == ids.get(other))
            && (!matters() || looked.shared(py).is_ok_and(|now| now == self.shared))
            && self.written.drops_its_own(looked, py).unwrap_or(false)
    }

    /// Count its uses anew where what the loss reaches has another structure than it has had: whether it holds is asked again soon.
    pub fn meet_program(&mut self, looked: &Looked) {
        if self.structures < MAX_STRUCTURES && !self.seen.iter().any(|seen| seen.is_of(looked)) {
            self.structures += 1;
            self.uses = 0;
        }
    }

    /// The trace holds for these numbers too.
    pub fn see(&mut self, seen: Seen) {
        self.seen.push(seen);
        let bytes = |seen: &[Seen]| seen.iter().map(Seen::bytes).sum::<usize>();
        while self.seen.len() > MAX_SEEN || (self.seen.len() > 1 && bytes(&self.seen) > MAX_BYTES) {
            self.seen.remove(0);
        }
    }

    /// Note the arguments of a call, and what the loss reaches. Returns whether they are known to be like those of the last.
    pub fn meet(&mut self, batch: &Rc<Tree>, looked: &Looked, py: Python<'_>) -> bool {
        let before = self.met.replace((batch.clone(), looked.tensors.clone()));
        before.is_some_and(|(known, reached)| {
            looked.is_known && reached == looked.tensors && known.equals(batch, py)
        })
    }

    /// Return what is kept for the current numbers.
    pub fn seen(&self, py: Python<'_>, looked: &Looked) -> Option<&Seen> {
        let mut seen = self.seen.iter().rev();
        seen.find(|seen| {
            seen.fits(py, looked) && seen.adds.iter().all(|add| add.is_current(looked, py))
        })
    }
}

#[pymethods]
impl TraceRecord {
    fn __repr__(&self) -> String {
        format!("TraceRecord({:?}, {:.3} s)", self.cause, self.seconds)
    }
}

/// A trace, what it is valid for, and what is kept with it.
pub type Entry = TraceEntry<Key, Kept>;

/// Return whether the trace is known to hold for what the loss reaches now; one that calls the loss always does.
/// `counted`: numbers of the model to which losses add.
pub fn holds(entry: &Entry, py: Python<'_>, looked: &Looked, counted: &[Py<PyAny>]) -> bool {
    let fits = |seen: &Seen| seen.holds_for(counted, py);
    entry.trace.is_eager()
        || (entry.kept.pins.iter().all(|pin| pin.holds(py))
            && entry.kept.seen(py, looked).is_some_and(fits))
}

/// A call in which the loss stores an array where there is none: the hidden state of the first batch of a sequence, say.
struct Storing {
    key: Key,
    seen: Seen,
    what: String,
    comes_again: bool,
}

/// The traces of one step.
#[derive(Default)]
pub struct Traces {
    known: TraceCache<Key, Kept>,
    compiled: usize,                 // of those that have been made
    rare: Vec<(Key, usize)>, // kinds of batches that came when there were many traces, and how often; the last one last
    rare_values: Vec<(Seen, usize)>, // the same for numbers and texts that made the form of a graph
    new_values: usize,       // calls for which these were rare, one after the other
    warning: Option<String>,
    changes: usize,        // before which a step ran uncompiled
    structures: usize,     // steps that ran uncompiled since what the loss reaches was not searched
    reshaped: Vec<Key>, // kinds of calls in which the loss assigns arrays of another shape; the last one last
    storing: Vec<Storing>, // calls in which it stores an array where there is none; the last one last
}

impl Refers for Traces {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.recent().try_for_each(|entry| {
            entry.key.front.batch.visit(collector)?;
            entry.kept.visit(collector)
        })?;
        let rare = self.rare_values.iter().map(|(seen, _)| seen);
        let storing = self.storing.iter().map(|storing| &storing.seen);
        let mut all = rare.chain(storing);
        all.try_for_each(|seen| seen.visit(collector))
    }
}

impl Traces {
    /// The most recent trace that fits becomes the last one.
    pub fn use_again(&mut self, fits: impl Fn(&Entry) -> bool) -> Option<&mut Entry> {
        self.known.use_again(fits)
    }

    /// Return whether there is something to be looked at before a trace is used again: for any numbers, or for some.
    pub fn are_suspect(&self, for_any: bool) -> bool {
        self.recent().any(|entry| {
            let suspect = entry.kept.suspect.borrow();
            suspect.as_ref().is_some_and(|it| !for_any || it.is_due())
        })
    }

    /// Return whether the loss has changed something itself as the trace used last was made, and nobody has looked at that yet.
    pub fn last_has_changed(&self) -> bool {
        self.last().is_some_and(|last| {
            let suspect = last.kept.suspect.borrow();
            suspect.as_ref().is_some_and(|it| !it.is_unchanged())
        })
    }

    /// Return whether a loss takes the same keys out of dicts among its arguments as in the traces for such arguments.
    pub fn takes_out(&self, batch: &Tree, taken_out: &TakenOut, py: Python<'_>) -> bool {
        let mut compiled = self.recent().filter(|entry| entry.kept.graph.is_some());
        compiled.all(|entry| {
            !entry.key.front.batch.equals(batch, py)
                || are_same(&entry.kept.taken_out, taken_out, py)
        })
    }

    /// A step runs uncompiled because what the loss reaches has another structure: what has, last.
    pub fn note_structure(&mut self, changed: Option<&str>) {
        self.structures += 1;
        if self.structures == TELL_STRUCTURE {
            let what = changed.map_or_else(String::new, |name| format!(" ({name})"));
            self.warning = Some(format!(
                "{RARE_STRUCTURE}{what}. Such a step runs uncompiled, with the same numbers but slower: pass arrays, and keep what grows \
                 in a list of numbers, or where no code of the loss names it"
            ));
        }
    }

    /// Of traces of a loss that counts in numbers of the model, it is not known any more for which numbers they hold.
    pub fn forget_counts(&mut self) {
        for entry in self.known.iter_mut() {
            if entry.kept.adds.iter().any(Advance::is_of_model) {
                entry.kept.seen.clear();
            }
        }
    }

    /// In a call of this kind the loss assigns an array of another shape.
    pub fn note_reshaping(&mut self, key: Key) {
        self.reshaped.push(key);
        if self.reshaped.len() > MAX_RARE {
            self.reshaped.remove(0);
        }
    }

    /// Return whether it has done that in a call of this kind before.
    pub fn reshapes(&self, key: &Key, py: Python<'_>) -> bool {
        self.reshaped.iter().any(|known| equals(known, key, py))
    }

    /// In a call of this kind, with these numbers, the loss stores an array where there is none.
    pub fn note_storing(&mut self, key: Key, looked: &Looked, what: &str, py: Python<'_>) {
        if self.storing(&key, looked, py).is_some() {
            return;
        }
        self.storing.push(Storing {
            key,
            seen: Seen::new(looked, Vec::new(), None),
            what: what.into(),
            comes_again: false,
        });
        if self.storing.len() > MAX_RARE {
            self.storing.remove(0);
        }
    }

    /// Return what it has stored in such a call before.
    pub fn storing(&mut self, key: &Key, looked: &Looked, py: Python<'_>) -> Option<&str> {
        let is_such = |it: &&mut Storing| it.seen.fits(py, looked) && equals(&it.key, key, py);
        let known = self.storing.iter_mut().rev().find(is_such)?;
        known.comes_again = true;
        Some(&known.what)
    }

    /// Return whether a call has come again in which the loss stores that.
    pub fn stores_again(&self, what: &str) -> bool {
        let mut storing = self.storing.iter();
        storing.any(|it| it.comes_again && it.what == what)
    }

    /// The traces, the one used last first.
    pub fn recent(&self) -> impl Iterator<Item = &Entry> {
        self.known.recent()
    }

    /// Return why a batch of a kind of which there is no trace is rather run uncompiled, where it might be the only one.
    pub fn rare(&mut self, key: &Key, max_traces: usize, py: Python<'_>) -> Option<&'static str> {
        if self.recent().any(|entry| equals(&entry.key, key, py)) {
            return None;
        }
        let why = if self.are_many(max_traces) {
            RARE
        } else {
            self.changing(key, py)?
        };
        let at = self
            .rare
            .iter()
            .rposition(|(rare, _)| equals(rare, key, py));
        let (key, times) = at.map_or_else(|| (key.clone(), 0), |at| self.rare.remove(at));
        self.rare.push((key, times + 1));
        if self.rare.len() > MAX_RARE {
            self.rare.remove(0);
        }
        let comes_again = times == 1 || (times + 1).is_multiple_of(COMES_BACK);
        if !comes_again && why != RARE {
            self.changes += 1;
            if self.changes == TELL {
                self.warning = Some(format!(
                    "{why}. A step before which that happens runs uncompiled, since its trace might be used once"
                ));
            }
        }
        (!comes_again).then_some(why)
    }

    fn are_many(&self, max_traces: usize) -> bool {
        self.compiled >= TOO_MANY.max(max_traces / 2)
    }

    /// Return why a call for whose numbers and texts no trace has been found to hold is rather run uncompiled.
    pub fn rare_values(
        &mut self,
        looked: &Looked,
        max_traces: usize,
        py: Python<'_>,
    ) -> Option<&'static str> {
        if !self.are_many(max_traces) {
            return None;
        }
        let mut known = self.rare_values.iter();
        let at = known.rposition(|(seen, _)| seen.fits(py, looked));
        let (seen, times) = at.map_or_else(
            || (Seen::new(looked, Vec::new(), None), 0),
            |at| self.rare_values.remove(at),
        );
        self.rare_values.push((seen, times + 1));
        if self.rare_values.len() > MAX_RARE {
            self.rare_values.remove(0);
        }
        let comes_again = times == 1 || (times + 1).is_multiple_of(COMES_BACK);
        self.new_values = if comes_again { 0 } else { self.new_values + 1 };
        (!comes_again).then_some(RARE)
    }

    /// Return whether numbers and texts have made another graph so often that this is not looked at in each call.
    pub fn are_values_new(&self) -> bool {
        let (after, one_of) = NEW_VALUES;
        self.new_values >= after && !self.new_values.is_multiple_of(one_of)
    }

    /// A trace has been found to hold for other numbers.
    pub fn holds_again(&mut self) {
        self.new_values = 0;
    }

    // what has changed before each of several traces, none of which is for this key, and nothing else
    fn changing(&self, key: &Key, py: Python<'_>) -> Option<&'static str> {
        let compiled = self.recent().filter(|entry| !entry.trace.is_eager());
        let keys = compiled.map(|entry| &entry.key);
        let alike: Vec<_> = keys
            .filter(|other| equals_beside_numbers(other, key, py))
            .collect();
        let last = alike.first().filter(|_| alike.len() >= MANY_NUMBERS)?;
        let same_numbers = last.front.model == key.front.model;
        Some(if same_numbers {
            RARE_OPTIONS
        } else {
            RARE_ATTRIBUTES
        })
    }

    /// A loss has added to numbers of its own: a trace that adds to them too holds for the others. One that does not may read them.
    pub fn go_on(
        &mut self,
        py: Python<'_>,
        before: &Looked,
        after: &Looked,
        adds: &[Advance],
    ) -> PyResult<()> {
        let changed = before.changes(py, after);
        for entry in self.known.iter_mut() {
            let kept = &mut entry.kept;
            let is_seen = kept.seen(py, after).is_some();
            if (is_seen && kept.seen.len() == 1) || !are_within(adds, &kept.adds, py)? {
                continue;
            }
            let mut by = kept.set_by.borrow_mut();
            if by.as_ref().is_some_and(|by| by.fits(py, before)) {
                *by = Some(Seen::new(after, Vec::new(), None)); // what it sets does not depend on those numbers
            }
            drop(by);
            let seen = kept.seen(py, before).filter(|seen| seen.goes_on);
            if let (Some(seen), false) = (seen.map(|seen| seen.with(py, after)), is_seen) {
                kept.see(seen);
            }
            for seen in kept.seen.iter_mut().filter(|seen| seen.goes_on) {
                seen.advance(&changed, (before, after), py); // with other texts beside those numbers, say
            }
        }
        Ok(())
    }

    /// Note what a loss adds to numbers of its own at each call for which the trace with a number stands. `looked`: the numbers
    /// that it has left.
    pub fn settle_numbers(
        &mut self,
        looked: &Looked,
        (number, suspect): (usize, &Suspect),
        adds: Adds,
        py: Python<'_>,
    ) {
        let mut entries = self.known.iter_mut();
        let Some(entry) = entries.find(|entry| entry.number == number) else {
            return;
        };
        let all = adds.all;
        let adds = Rc::new(adds.into_vec());
        let is_its = |seen: &Seen| suspect.seen.iter().any(|other| other.equals(seen, py));
        // from what was there before its first call it does more
        let seen = &mut entry.kept.seen;
        seen.retain(|seen| all || !is_its(seen) || seen.fits(py, looked));
        for seen in seen.iter_mut().filter(|seen| is_its(seen)) {
            seen.adds = adds.clone();
        }
        entry.kept.adds = adds;
    }

    /// Note what stands on the model where a loss sets something, behind a call for which the trace with a number stands.
    pub fn keep_set(
        &self,
        number: usize,
        places: &[Placed],
        looked: &Looked,
        py: Python<'_>,
    ) -> PyResult<()> {
        let mut recent = self.recent();
        if let Some(entry) = recent.find(|entry| entry.number == number) {
            let set = places.iter().map(|place| place.kept(py));
            entry.kept.set.replace(set.collect::<PyResult<_>>()?);
            let by = Seen::new(looked, Vec::new(), None);
            entry.kept.set_by.replace(Some(by));
        }
        Ok(())
    }

    /// A new trace becomes the last one. `changed`: what the loss reaches and is another one now.
    pub fn add(
        &mut self,
        user: &Arguments<'_>,
        key: Key,
        trace: Trace,
        varying: Vec<u32>,
        changed: Option<&str>,
        max_traces: usize,
    ) {
        let compiled = self.recent().filter(|entry| !entry.trace.is_eager());
        let known: Vec<_> = compiled.map(|entry| &entry.key).collect();
        let cause = key.cause(&known, &ByName { user, changed });
        let kept = Kept {
            varying,
            ..Kept::default()
        };
        self.known.add(key, trace, kept, cause, max_traces);
    }

    /// Drop the trace with a number.
    pub fn drop_number(&mut self, number: usize) {
        self.known.retain(|entry| entry.number != number);
    }

    /// Drop the traces of a loss that has changed something itself, of which nobody has seen yet whether that matters.
    pub fn drop_suspects(&mut self) {
        self.known
            .retain(|entry| entry.kept.suspect.borrow().is_none());
    }

    /// Drop the trace used last.
    pub fn drop_last(&mut self) {
        let last = self.known.last().map(std::ptr::from_ref);
        self.known
            .retain(|entry| Some(std::ptr::from_ref(entry)) != last);
    }

    /// Return whether the traces of a call, which were found last, have been called before, and call no Python code: that of the loss
    /// (of both, where they are one), and that of the update.
    pub fn are_known(&self, task: Task) -> (bool, bool) {
        let mut recent = self.recent();
        let mut next = || {
            let entry = recent.next();
            entry.is_some_and(|entry| !entry.is_new() && !entry.trace.is_eager())
        };
        let first = next();
        match task {
            Task::Batch { fills: true } => (first, next()),
            _ => (first, first),
        }
    }

    /// Drop the traces of a call, which were found last.
    pub fn drop_found(&mut self, task: Task) {
        self.drop_last();
        if matches!(task, Task::Batch { fills: true }) {
            self.drop_last();
        }
    }

    /// The traces of a call, which were found last.
    pub fn of(&mut self, task: Task) -> Option<CallTraces<'_>> {
        self.known.of(task)
    }

    /// The trace used last, to change what is kept with it.
    pub fn last_mut(&mut self) -> Option<&mut Entry> {
        self.known.last_mut()
    }

    /// The trace used last.
    pub fn last(&self) -> Option<&Entry> {
        self.known.last()
    }

    /// Keep the new traces of a call that succeeded, with their seconds. Returns whether there were any.
    pub fn settle(&mut self, seconds: f64) -> bool {
        let (before, all) = (self.compiled, self.known.made());
        let new = self.known.commit(seconds);
        if self.last().is_some_and(|last| !last.trace.is_eager()) {
            self.compiled += self.known.made() - all;
        }
        let made = self.compiled;
        if before <= MANY && made > MANY {
            let cause = self.known.records().pop().map(|record| record.cause);
            self.warning = Some(format!(
                "{made} traces have been made for this step, the last because of {}. Each takes seconds to make and memory to \
                 keep: pad batches to a few lengths, and pass numbers that change as mx.array. step.stats.traces has the causes",
                cause.unwrap_or_default()
            ));
        }
        new
    }

    /// Take the warning for the user, once.
    pub fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Drop the new traces of a call that failed. Returns whether there were any.
    pub fn discard(&mut self) -> bool {
        self.known.discard()
    }

    /// Drop those that call the loss at every step, but for the one used last if that is kept.
    pub fn drop_eager(&mut self, keep_last: bool) {
        let last = self.known.last().map(std::ptr::from_ref);
        let last = last.filter(|_| keep_last);
        self.known
            .retain(|entry| !entry.trace.is_eager() || Some(std::ptr::from_ref(entry)) == last);
    }

    /// Drop all.
    pub fn clear(&mut self) {
        self.known.retain(|_| false);
    }

    /// The number of traces made so far.
    pub fn made(&self) -> usize {
        self.known.made()
    }

    /// The traces that are kept, in the order in which they were made.
    pub fn records(&self) -> Vec<TraceRecord> {
        let records = self.known.records().into_iter();
        records.map(TraceRecord::from).collect()
    }
}

impl From<engine::TraceRecord> for TraceRecord {
    fn from(record: engine::TraceRecord) -> Self {
        Self {
            cause: record.cause,
            seconds: record.seconds,
            replay: record.replay,
        }
    }
}

/// The names that the user has for what a trace depends on.
struct ByName<'a, 'py> {
    user: &'a Arguments<'py>,
    changed: Option<&'a str>, // the path of an object that the loss reaches and that was replaced
}

impl ByName<'_, '_> {
    fn reached(&self) -> Option<String> {
        let name = self.changed?;
        Some(if name.starts_with("argument ") {
            format!("{name} has changed")
        } else {
            format!("what the loss reaches: {name}")
        })
    }
}

impl Causes<CallKey> for ByName<'_, '_> {
    fn first(&self) -> Option<String> {
        self.reached()
    }

    fn changed(&self, last: &Key, new: &Key) -> Option<String> {
        let another_loss = || "another loss function".to_owned();
        let (old, now) = (&last.front, &new.front);
        if self.changed == Some("loss_fn") {
            Some(another_loss())
        } else if old.reached != now.reached {
            let same_batch = old.batch.equals(&now.batch, self.user.py());
            self.reached().or_else(|| same_batch.then(another_loss))
        } else if old.model != now.model {
            Some("model: a mode, a number, or an array's shape has changed".into())
        } else if old.options != now.options || last.part != new.part {
            Some("optimizer: an option has changed".into())
        } else if old.read != now.read {
            Some("what the optimizer's code reads has changed".into())
        } else {
            None
        }
    }

    fn batch<'a>(&self, front: &'a CallKey) -> &'a [Tensor] {
        front.batch.tensors()
    }

    fn name(&self, front: &CallKey, index: usize) -> String {
        let paths = front.batch.paths(self.user.py());
        format!("argument {}", self.user.name(&paths[index]))
    }

    fn rest(&self, _: &CallKey, _: &CallKey) -> String {
        let reached = self.reached();
        reached.unwrap_or_else(|| "arguments: a static value or the structure has changed".into())
    }
}

/// Warn at the user's line.
pub fn warn(py: Python<'_>, message: &str) -> PyResult<()> {
    let message = std::ffi::CString::new(format!("faststep: {message}"))?;
    // stack level 2: the caller of Step.__call__ or fast_step
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 2)
}
