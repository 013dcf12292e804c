//! Calls that are left out: only while a watch list holds that covers all that the loss reads.
//!
//! A list is made where a call has made a trace, and counts from the next call on, which is watched too: that one has to give the
//! same graph, change nothing that is watched, and call no unknown function.
use std::rc::Rc;

use faststep::engine::array::id;
use pyo3::{prelude::*, types::PyTuple};

use super::{
    arguments::{Arguments, Batch},
    traces::{may_stand_for, warn, CallKey, Entry, Key, Watch},
    Inner, Watched,
};
use crate::{
    host::Called,
    mlx::bridge,
    store::{registry::Shared, Store},
    tree::{paths::dotted, rebuild::rebuild, Tree},
    watch::{search, Calls, WatchList},
};

/// Uses of a trace from which on its loss is called at each one out of so many.
const OFTEN: usize = 1000;
/// The most calls that are watched before a loss is called always.
const TRIES: usize = 6;
/// Seconds that a search may take in any case: those of a small net's call are fewer than a look at the clock is worth.
pub(super) const SEARCH: f64 = 0.2;

/// Progress towards leaving calls out.
#[derive(Default)]
pub struct LeavingOut {
    reason: Option<String>, // why the loss was called at the last step, where that is known
    is_final: bool,         // it is called always
    tries: usize,           // calls in a row for which that was so
    changed: Option<String>, // what is not as it was at the last call
}

impl LeavingOut {
    /// Why the loss was called at the last step.
    pub fn reason(&self) -> String {
        let first = "these are the first calls with arguments of this form: two are needed before one may be left out";
        self.reason.clone().unwrap_or_else(|| first.into())
    }

    // note a reason, for good once it has come often enough
    fn note(&mut self, reason: String) {
        self.tries += 1;
        self.is_final = self.tries > TRIES;
        self.reason = Some(reason);
    }
}

// 2, 5, 10, 20, 50, 100 ... uses
fn is_due(uses: usize) -> bool {
    if uses >= OFTEN {
        return uses.is_multiple_of(OFTEN);
    }
    let mut power = 1;
    while power * 10 <= uses {
        power *= 10;
    }
    [2 * power, 5 * power, 10 * power].contains(&uses) || (power > 1 && uses == power)
}

/// Answer to the question for a trace that stands for a call.
pub(super) enum Standing {
    /// The loss is to be called.
    No,
    /// The one of this number.
    Yes(usize),
    /// A trace stands, and a check is due: the number of its graph.
    Due(Option<usize>),
}

impl Inner {
    /// Return whether a trace stands for a call of the loss.
    pub(super) fn standing(
        &mut self,
        py: Python<'_>,
        loss_fn: &Bound<'_, PyAny>,
        key: &Key,
    ) -> Standing {
        if self.leaving_out.is_final || key.front.is_given_of_model() {
            return Standing::No;
        }
        let fits = self.traces.use_again(|entry| {
            matches!(&entry.kept.watch, Watch::Stands(list)
                if may_stand_for(&entry.key, key, py) && list.look(loss_fn).is_ok_and(|other| other.is_none()))
        });
        let Some(entry) = fits else {
            return Standing::No;
        };
        entry.kept.uses += 1;
        if is_due(entry.kept.uses) {
            return Standing::Due(entry.kept.graph.as_ref().map(|graph| graph.number));
        }
        Standing::Yes(entry.number)
    }

    /// Begin to watch a call, where what its trace reads is listed and still as it was.
    pub(super) fn begin_watching(
        &mut self,
        shared: &Shared,
        user: &Arguments<'_>,
        key: &Key,
    ) -> PyResult<Option<(Rc<WatchList>, Calls)>> {
        let (py, loss_fn) = (user.py(), &user.loss_fn);
        if self.leaving_out.is_final || key.front.is_given_of_model() {
            return Ok(None);
        }
        let listed = self
            .traces
            .recent()
            .find_map(|entry| match &entry.kept.watch {
                Watch::Listed(list) if may_stand_for(&entry.key, key, py) => Some(list.clone()),
                _ => None,
            });
        self.leaving_out.changed = self.changed_since(&*shared.enter()?, user, key);
        let Some(list) = listed else {
            return Ok(None);
        };
        if let Some(entry) = list.look(loss_fn)? {
            self.leaving_out.changed = Some(list.name(entry).to_owned());
            return Ok(None);
        }
        let calls = Calls::begin(py, &list)?;
        Ok(Some((list, calls)))
    }

    // a number of the model, or an argument, that is another one than at the last call, where all that this one read is listed
    fn changed_since(&self, store: &Store, user: &Arguments<'_>, key: &Key) -> Option<String> {
        let py = user.py();
        let mut recent = self.traces.recent();
        let last = recent.find(|entry| entry.key.part.has_loss())?;
        if matches!(last.kept.watch, Watch::Unknown) {
            return None;
        }
        let (old, new) = (&last.key.front, &key.front);
        if let Some(path) = store.difference(old.model, new.model, py) {
            return Some(format!("model.{}", dotted(&path)));
        }
        let changed = old.batch.difference(&new.batch, py);
        let changed = changed.filter(|_| old.batch.tensors() == new.batch.tensors())?;
        Some(user.name(&changed))
    }

    /// Note what a call has shown, whose trace is the last one: whether the next one may be left out.
    pub(super) fn note_call(
        &mut self,
        user: &Arguments<'_>,
        batch: &Batch<'_>,
        called: &Called<'_>,
        watched: Watched,
    ) -> PyResult<()> {
        if !self.leaving_out.is_final {
            let noted = self.may_be_left_out(user, batch, called, watched)?;
            if let Some(reason) = noted {
                self.leaving_out.note(reason);
            }
            if self.leaving_out.is_final {
                self.traces.call_always();
            }
        }
        Ok(())
    }

    // why the call may not be left out next time, if that is known
    fn may_be_left_out(
        &mut self,
        user: &Arguments<'_>,
        batch: &Batch<'_>,
        called: &Called<'_>,
        watched: Watched,
    ) -> PyResult<Option<String>> {
        if watched.key.front.is_given_of_model() {
            return Ok(Some(
                "has a dict or list of the model among its arguments".into(),
            ));
        }
        if let Some(reason) = cannot_be_left_out(user, batch, called)? {
            return Ok(Some(reason));
        }
        if let Some(path) = watched.signature.changed(&user.model)? {
            return Ok(Some(changes_model(&path)));
        }
        let changed = self.leaving_out.changed.take();
        let changed = changed.map(|name| format!("reads `{name}`, which changes at each call"));
        let Some(last) = self.traces.last_mut() else {
            return Ok(None);
        };
        if last.kept.graph.is_none() || !last.key.part.has_loss() {
            return Ok(None);
        }
        if let Watch::Stands(list) = &last.kept.watch {
            if list.look(&user.loss_fn)?.is_none() {
                self.leaving_out.reason = changed; // it stands for calls with another value
                return Ok(None);
            }
        }
        let mut reason = None;
        if let Some((list, unknown)) = watched.list {
            match (unknown, list.look(&user.loss_fn)?) {
                (Some(unknown), _) => return Ok(Some(unknown)),
                (None, Some(entry)) => reason = Some(format!("changes `{}`", list.name(entry))),
                (None, None) => {
                    stand_for(last, watched.key);
                    last.kept.watch = Watch::Stands(list);
                    last.kept.leaves = Rc::new(called.leaves.clone().into());
                    last.kept.template = Some(template(&called.result)?);
                    (self.leaving_out.tries, self.leaving_out.reason) = (0, None);
                    return Ok(None);
                }
            }
        }
        let is_other = matches!(last.kept.watch, Watch::Listed(_))
            && !may_stand_for(&last.key, &watched.key, user.py());
        if is_other && !std::mem::replace(&mut last.kept.missed, true) {
            return Ok(reason.or(changed)); // one of two values in turn, perhaps
        }
        self.list(user, batch, watched.key, watched.seconds.max(SEARCH))
            .map(|refused| refused.or(reason).or(changed))
    }

    // list what the loss of the last trace reads, in a call of this key; why that cannot be
    fn list(
        &mut self,
        user: &Arguments<'_>,
        batch: &Batch<'_>,
        key: Key,
        seconds: f64,
    ) -> PyResult<Option<String>> {
        let objects = PyTuple::new(user.py(), &batch.objects)?;
        match search(&user.loss_fn, &user.model, &objects, seconds)? {
            Err(reason) => {
                self.leaving_out.tries = TRIES; // its code stays as it is
                Ok(Some(reason))
            }
            Ok(list) => {
                if let Some(last) = self.traces.last_mut() {
                    stand_for(last, key);
                    last.kept.watch = Watch::Listed(Rc::new(list));
                    last.kept.missed = false;
                }
                Ok(None)
            }
        }
    }

    /// A call that could have been left out had another graph than its trace: none is left out any more.
    pub(super) fn is_unsteady(&mut self, py: Python<'_>) -> PyResult<()> {
        self.leaving_out.tries = TRIES;
        let reason = "computes something else, though nothing has changed that is watched";
        self.leaving_out.note(reason.into());
        self.traces.call_always();
        warn(
            py,
            "the loss, called again, computes something else, though nothing has changed that is watched: steps before this one \
             may have been computed without that. It is called at each step from here on. Pass as an argument what it depends on",
        )
    }
}

// the list of a trace is that of a call of this key, which has the same graph
fn stand_for(entry: &mut Entry, key: Key) {
    let graph = entry.key.front.graph;
    entry.key.front = CallKey { graph, ..key.front };
}

fn changes_model(path: &[String]) -> String {
    match path {
        [] => "puts attributes on the model, or takes them away".into(),
        path => format!("changes `model.{}`", dotted(path)),
    }
}

// why a call of this loss cannot be left out, from what this one did
fn cannot_be_left_out(
    user: &Arguments<'_>,
    batch: &Batch<'_>,
    called: &Called<'_>,
) -> PyResult<Option<String>> {
    let reason = if called.graph.as_ref().is_some_and(|graph| graph.is_custom()) {
        "has gradients of its own (mx.custom_function, mx.checkpoint), which are Python functions"
    } else if called.reads {
        "reads the value of an array"
    } else if called.holds() {
        "keeps an array that it computes"
    } else if !called.reshaped.is_empty() {
        "gives an array of the model another shape or dtype"
    } else if batch.numpy {
        "takes NumPy arrays: pass mx.array(...)"
    } else if changes_arguments(user, batch)? {
        "changes its arguments"
    } else if !is_plain(&called.result)? {
        "returns objects that are no arrays, numbers, or tuples, lists and dicts of them"
    } else {
        return Ok(None);
    };
    Ok(Some(reason.into()))
}

// true if the arguments are not what they were before the call
fn changes_arguments(user: &Arguments<'_>, batch: &Batch<'_>) -> PyResult<bool> {
    let now = Tree::record_arguments(user.passed.as_any())?;
    let ids = now.slots.iter().map(|slot| bridge::id(&slot.object));
    let known = batch.arrays.iter().map(|array| Some(id(array)));
    Ok(!now.tree.equals(&batch.tree, user.py()) || !ids.eq(known))
}

// the structure that a loss returned, with holes for its arrays
fn template(returned: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let hole = bridge::wrap(returned.py(), &faststep::engine::array::hollow())?;
    Ok(rebuild(returned, &mut |_| Ok(hole.clone()))?.unbind())
}

// true if what a loss returned can be made again: arrays, numbers and texts, in tuples, lists and dicts
fn is_plain(returned: &Bound<'_, PyAny>) -> PyResult<bool> {
    use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};
    if bridge::is_array(returned)
        || returned.is_none()
        || returned.is_exact_instance_of::<PyBool>()
        || returned.is_exact_instance_of::<PyInt>()
        || returned.is_exact_instance_of::<PyFloat>()
        || returned.is_exact_instance_of::<PyString>()
    {
        return Ok(true);
    }
    let items: Vec<Bound<'_, PyAny>> = if let Ok(tuple) = returned.cast_exact::<PyTuple>() {
        tuple.iter().collect()
    } else if let Ok(list) = returned.cast_exact::<PyList>() {
        list.iter().collect()
    } else if let Ok(dict) = returned.cast_exact::<PyDict>() {
        dict.iter().flat_map(|(key, value)| [key, value]).collect()
    } else {
        return Ok(false);
    };
    for item in items {
        if !is_plain(&item)? {
            return Ok(false);
        }
    }
    Ok(true)
}
