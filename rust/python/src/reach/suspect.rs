//! What a loss has changed itself while it was traced, by which a trace may depend on how often the loss is called.
use std::{cell::Cell, collections::HashSet, rc::Rc};

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet},
};

use super::{
    advance::{Adds, OwnChange},
    contents::{copy, refill},
    seen::Seen,
    Looked,
};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::mlx::{bridge, classes::is_deque, errors::raise_late};
use crate::tree::{
    ordered,
    snapshot::{holds_array, without_arrays, Placed, Snapshot},
    static_value::{equal, is_plain},
    text::text,
};

/// A value that is no array, and what stood in its place before the loss was called, or behind it.
pub enum Change {
    /// Under a key of a dict; none: the key was not there.
    Item(Py<PyDict>, Py<PyAny>, Option<Py<PyAny>>),
    /// The contents of a list.
    List(Py<PyList>, Py<PyList>),
    /// The items of a deque that is no other change.
    Deque(Py<PyAny>, Py<PyList>),
    /// The members of a set.
    Set(Py<PySet>, Py<PyFrozenSet>),
    /// The keys of a dict, where only their order is another one.
    Order(Py<PyDict>, Py<PyList>),
    /// At a node that a loss reaches: in a cell, a global or an attribute of a class.
    Node(Rc<Looked>, usize, Py<PyAny>),
    /// The contents of another object that has been found at a node, and a copy of it.
    Contents(Rc<Looked>, usize, Py<PyAny>),
}

impl Refers for Change {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Item(dict, key, other) => {
                dict.visit(collector)?;
                key.visit(collector)?;
                other.visit(collector)
            }
            Self::List(list, other) => {
                list.visit(collector)?;
                other.visit(collector)
            }
            Self::Deque(deque, other) => {
                deque.visit(collector)?;
                other.visit(collector)
            }
            Self::Set(set, other) => {
                set.visit(collector)?;
                other.visit(collector)
            }
            Self::Order(dict, other) => {
                dict.visit(collector)?;
                other.visit(collector)
            }
            Self::Node(looked, _, other) | Self::Contents(looked, _, other) => {
                looked.visit(collector)?;
                other.visit(collector)
            }
        }
    }
}

impl Change {
    /// Return whether both are changes in one place.
    pub fn is_of(&self, other: &Self, py: Python<'_>) -> bool {
        match (self, other) {
            (Self::Item(one, key, _), Self::Item(other, name, _)) => {
                one.is(other) && key.bind(py).eq(name.bind(py)).unwrap_or(false)
            }
            (Self::List(one, _), Self::List(other, _)) => one.is(other),
            (Self::Order(one, _), Self::Order(other, _)) => one.is(other),
            (Self::Deque(one, _), Self::Deque(other, _)) => one.is(other),
            (Self::Deque(one, _), Self::Contents(looked, node, _)) => {
                looked.object(*node, py).is_some_and(|other| one.is(&other))
            }
            (Self::Set(one, _), Self::Set(other, _)) => one.is(other),
            (Self::Set(one, _), Self::Contents(looked, node, _))
            | (Self::Contents(looked, node, _), Self::Set(one, _)) => {
                looked.object(*node, py).is_some_and(|other| one.is(&other))
            }
            (Self::Node(one, at, _), Self::Node(other, node, _))
            | (Self::Contents(one, at, _), Self::Contents(other, node, _)) => {
                one.is_place(*at, other, *node, py)
            }
            (Self::Item(dict, key, _), Self::Node(looked, node, _))
            | (Self::Node(looked, node, _), Self::Item(dict, key, _)) => {
                looked.is_global(*node, dict.bind(py), key.bind(py))
            }
            _ => false,
        }
    }

    /// The same once more.
    pub fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Item(dict, key, other) => {
                let other = other.as_ref().map(|other| other.clone_ref(py));
                Self::Item(dict.clone_ref(py), key.clone_ref(py), other)
            }
            Self::List(list, other) => Self::List(list.clone_ref(py), other.clone_ref(py)),
            Self::Deque(deque, other) => Self::Deque(deque.clone_ref(py), other.clone_ref(py)),
            Self::Set(set, other) => Self::Set(set.clone_ref(py), other.clone_ref(py)),
            Self::Order(dict, other) => Self::Order(dict.clone_ref(py), other.clone_ref(py)),
            Self::Node(looked, at, other) => Self::Node(looked.clone(), *at, other.clone_ref(py)),
            Self::Contents(looked, at, other) => {
                Self::Contents(looked.clone(), *at, other.clone_ref(py))
            }
        }
    }

    /// Keep what stands in the place now, in place of what was there before.
    pub fn turn(&mut self, py: Python<'_>) -> PyResult<()> {
        match self {
            Self::Item(dict, key, other) => {
                *other = dict.bind(py).get_item(&*key)?.map(Bound::unbind);
            }
            Self::List(list, other) => *other = without_arrays(list.bind(py))?.unbind(),
            Self::Deque(deque, other) => {
                let items = deque.bind(py).try_iter()?.collect::<PyResult<Vec<_>>>()?;
                *other = PyList::new(py, items)?.unbind();
            }
            Self::Set(set, other) => *other = PyFrozenSet::new(py, set.bind(py).iter())?.unbind(),
            Self::Order(dict, other) => *other = keys(dict.bind(py))?.unbind(),
            Self::Node(looked, node, other) => {
                if let Some(now) = looked.at(py, *node) {
                    *other = now.unbind();
                }
            }
            Self::Contents(looked, node, other) => {
                if let Some(object) = looked.object(*node, py) {
                    *other = copy(&object)?.unbind();
                }
            }
        }
        Ok(())
    }

    /// Put the one in the place of the other.
    pub fn swap(&mut self, py: Python<'_>) -> PyResult<()> {
        match self {
            Self::Item(dict, key, other) => {
                let dict = dict.bind(py);
                let now = dict.get_item(&*key)?.map(Bound::unbind);
                match std::mem::replace(other, now) {
                    Some(value) => ordered::set_item(dict, key.bind(py), value.bind(py)),
                    None if other.is_some() => ordered::del_item(dict, key.bind(py)),
                    None => Ok(()), // the user has removed it since
                }
            }
            Self::List(list, other) => {
                let list = list.bind(py);
                let now = without_arrays(list)?.unbind();
                let other = std::mem::replace(other, now).into_bound(py);
                let other = other.get_slice(0, other.len());
                for (at, item) in list.iter().enumerate().take(other.len()) {
                    if bridge::is_array(&item) {
                        other.set_item(at, item)?; // shown by itself
                    }
                }
                list.set_slice(0, list.len(), other.as_any())
            }
            Self::Deque(deque, other) => {
                let deque = deque.bind(py);
                let now = PyList::new(py, deque.try_iter()?.collect::<PyResult<Vec<_>>>()?)?;
                let other = std::mem::replace(other, now.unbind());
                refill(deque, other.bind(py))
            }
            Self::Set(set, other) => {
                let set = set.bind(py);
                let now = PyFrozenSet::new(py, set.iter())?.unbind();
                refill(set, std::mem::replace(other, now).bind(py))
            }
            Self::Order(dict, other) => {
                let dict = dict.bind(py);
                let now = keys(dict)?.unbind();
                let other = std::mem::replace(other, now);
                for key in other.bind(py) {
                    if let Some(value) = dict.get_item(&key)? {
                        ordered::del_item(dict, &key)?;
                        ordered::set_item(dict, &key, &value)?;
                    }
                }
                Ok(())
            }
            Self::Node(looked, node, other) => {
                let Some(now) = looked.at(py, *node) else {
                    return Ok(());
                };
                looked.put_at(*node, other.bind(py))?;
                *other = now.unbind();
                Ok(())
            }
            Self::Contents(looked, node, other) => {
                let Some(object) = looked.object(*node, py) else {
                    return Ok(());
                };
                let now = copy(&object)?.unbind();
                refill(&object, other.bind(py))?;
                *other = now;
                Ok(())
            }
        }
    }
}

impl Change {
    // what stands in the place now
    fn now<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Item(dict, key, _) => dict.bind(py).get_item(key),
            Self::Node(looked, node, _) => Ok(looked.at(py, *node)),
            Self::List(..)
            | Self::Deque(..)
            | Self::Set(..)
            | Self::Order(..)
            | Self::Contents(..) => Ok(None),
        }
    }

    // a number before the change and behind it; none of another value
    fn numbers<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        let before = match self {
            Self::Item(.., before) => before.as_ref().map(|before| before.bind(py).clone()),
            Self::Node(.., before) => Some(before.bind(py).clone()),
            Self::List(..)
            | Self::Deque(..)
            | Self::Set(..)
            | Self::Order(..)
            | Self::Contents(..) => None,
        };
        let Some(now) = self.now(py)? else {
            return Ok(None);
        };
        let Some(before) = before else {
            return Ok(None); // made by the first call
        };
        Ok((is_number(&before) && is_number(&now)).then_some((before, now)))
    }

    // items of a list or a deque now, and before the change
    #[allow(clippy::type_complexity)] // two lists
    fn items<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyList>, Bound<'py, PyList>)>> {
        let of_deque = |deque: &Bound<'py, PyAny>, before: &Py<PyAny>| {
            let now = deque.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            let before = before.bind(py).cast::<PyList>()?.clone();
            Ok::<_, PyErr>(Some((PyList::new(py, now)?, before)))
        };
        match self {
            Self::List(list, before) => {
                let now = without_arrays(list.bind(py))?;
                Ok(Some((now, before.bind(py).clone())))
            }
            Self::Deque(deque, before) => of_deque(deque.bind(py), before.as_any()),
            Self::Contents(looked, node, before) => {
                let object = looked.object(*node, py).filter(is_deque);
                object.map_or(Ok(None), |deque| of_deque(&deque, before))
            }
            _ => Ok(None),
        }
    }

    // the length of a deque beyond which the first items go
    fn most(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        let deque = match self {
            Self::Deque(deque, _) => Some(deque.bind(py).clone()),
            Self::Contents(looked, node, _) => looked.object(*node, py),
            _ => None,
        };
        let most = deque.map(|deque| deque.getattr(intern!(py, "maxlen")));
        Ok(most.transpose()?.and_then(|most| most.extract().ok()))
    }

    // the number, the list or the items of a deque that come when its change goes on `times` more
    fn later<'py>(&self, py: Python<'py>, times: i64) -> PyResult<Option<Bound<'py, PyAny>>> {
        if let Some((list, before)) = self.items(py)? {
            let len = before.len();
            let added = list.get_slice(len, list.len());
            if list.len() == len {
                return self.each(py, |before, now| now.add(now.sub(before)?.mul(times)?));
            }
            let has_arrays = match self {
                Self::List(list, _) => list.bind(py).iter().any(|item| bridge::is_array(&item)),
                _ => false,
            };
            if added.is_empty() || has_arrays {
                return Ok(None); // a long list of arrays and numbers is not watched
            }
            let mut times = usize::try_from(times)?;
            if let Some(most) = self.most(py)? {
                let calls = most.saturating_sub(list.len()) / added.len();
                times = times.min(calls.saturating_sub(1)); // the next call fills it
            }
            if times == 0 || times * added.len() > MAX_ADDED {
                return Ok(None);
            }
            return list.add(added.mul(times)?).map(Some);
        }
        let Some((before, now)) = self.numbers(py)? else {
            return Ok(None);
        };
        now.add(now.sub(before)?.mul(times)?).map(Some)
    }

    // a list of as many items as before with others in the places of the numbers that have changed; none where none have
    fn each<'py>(
        &self,
        py: Python<'py>,
        other: impl Fn(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Self::List(list, before) = self else {
            return Ok(None);
        };
        let (list, before) = (list.bind(py), before.bind(py));
        if list.len() != before.len() {
            return Ok(None);
        }
        let made = without_arrays(list)?;
        let mut found = false;
        for (at, (before, now)) in before.iter().zip(list.iter()).enumerate() {
            if is_number(&before) && is_number(&now) && !before.eq(&now)? {
                made.set_item(at, other(&before, &now)?)?;
                found = true;
            }
        }
        Ok(found.then(|| made.into_any()))
    }

    // a number before the change and behind it, the length of a list, with true, or the numbers in one of the same length
    #[allow(clippy::type_complexity)] // pairs of numbers
    fn counts<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>, bool)>> {
        let Some((list, before)) = self.items(py)? else {
            let numbers = self.numbers(py)?;
            return Ok(numbers.into_iter().map(|(a, b)| (a, b, false)).collect());
        };
        let len = |list: &Bound<'py, PyList>| list.len().into_pyobject(py);
        if list.len() != before.len() {
            return Ok(vec![(
                len(&before)?.into_any(),
                len(&list)?.into_any(),
                true,
            )]);
        }
        let pairs = before.iter().zip(list.iter());
        let numbers = pairs.filter(|(before, now)| {
            is_number(before) && is_number(now) && !before.eq(now).unwrap_or(true)
        });
        Ok(numbers.map(|(before, now)| (before, now, false)).collect())
    }

    /// Return whether both, which keep what a loss has left, are in one place and keep the same value.
    pub fn leaves(&self, other: &Self, py: Python<'_>) -> bool {
        let same = match (self, other) {
            (Self::Item(.., Some(one)), Self::Item(.., Some(other)))
            | (Self::Node(.., one), Self::Node(.., other)) => equal(one.bind(py), other.bind(py)),
            _ => false,
        };
        same && self.is_of(other, py)
    }

    /// Return whether it keeps a number or a text that has been put in the place of another value.
    pub fn is_plain(&self, py: Python<'_>) -> bool {
        match self {
            Self::Item(.., Some(value)) | Self::Node(.., value) => is_plain(value.bind(py)),
            _ => false,
        }
    }

    /// Its name, for a message.
    pub fn shown(&self, py: Python<'_>) -> String {
        match self {
            Self::Item(_, key, _) => text(key.bind(py)),
            Self::List(..) => "a list".into(),
            Self::Deque(..) => "a deque".into(),
            Self::Set(..) => "a set".into(),
            Self::Order(..) => "the order of a dict".into(),
            Self::Node(looked, node, _) | Self::Contents(looked, node, _) => {
                looked.program.name(py, *node)
            }
        }
    }

    // the name that code has for what changes
    fn name(&self, py: Python<'_>, looked: &Looked) -> String {
        match self {
            Self::Item(_, key, _) => text(key.bind(py)),
            Self::Node(looked, node, _) | Self::Contents(looked, node, _) => {
                looked.key_name(py, *node)
            }
            Self::List(list, _) => looked.name_of(list.bind(py)),
            Self::Deque(deque, _) => looked.name_of(deque.bind(py)),
            Self::Set(set, _) => looked.name_of(set.bind(py)),
            Self::Order(..) => String::new(),
        }
    }

    // put the one in the place of the other, whose place a third takes
    fn exchange(&mut self, py: Python<'_>, third: Py<PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let other = match self {
            Self::Item(.., other) => other.replace(third),
            Self::Node(.., other) | Self::Contents(.., other) => {
                Some(std::mem::replace(other, third))
            }
            Self::List(_, other) | Self::Deque(_, other) => {
                let third = third.bind(py).cast::<PyList>()?.clone().unbind();
                Some(std::mem::replace(other, third).into_any())
            }
            Self::Set(..) | Self::Order(..) => None,
        };
        self.swap(py).map(|()| other)
    }

    // put back what was there before such an exchange
    fn put_back(&mut self, py: Python<'_>, before: Option<Py<PyAny>>) -> PyResult<()> {
        self.swap(py)?;
        match (self, before) {
            (Self::Item(.., other), before) => *other = before,
            (Self::Node(.., other) | Self::Contents(.., other), Some(before)) => *other = before,
            (Self::List(_, other) | Self::Deque(_, other), Some(before)) => {
                *other = before.bind(py).cast::<PyList>()?.clone().unbind();
            }
            _ => {}
        }
        Ok(())
    }
}

/// Return whether a value is a number of Python's, and of no other class.
pub fn is_number(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyInt>() || value.is_exact_instance_of::<PyFloat>()
}

/// Number of looks for other numbers after which there is only one for the same ones.
const MAX_OTHERS: usize = 3;

/// Reasons to look once more at whether a loss gives the same graph when it is called again.
#[derive(Default)]
pub struct Suspect {
    /// Generators and iterators that it has taken from, as a user knows them.
    pub drawn: Vec<String>,
    /// True if these are the process's, from which another thread may have drawn.
    pub shared: bool,
    /// Clocks and files that it has read, with the line that did.
    pub read: Vec<String>,
    /// Changes to the model, which have been taken back.
    pub model: Vec<Change>,
    /// Changes to what the loss reaches, which stay.
    pub reached: Vec<Change>,
    /// The same changes, with what they add to numbers: of the model, and of what the loss reaches.
    pub first: (Vec<OwnChange>, Vec<OwnChange>),
    /// The numbers of which it was seen.
    pub seen: Vec<Seen>,
    /// How often it was looked at for other numbers.
    pub others: usize,
    /// True if its trace has been looked at before, with other numbers beside those that the loss changes; its changes to the model
    /// have been left, then.
    pub again: bool,
}

impl Refers for Suspect {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.model.visit(collector)?;
        self.reached.visit(collector)?;
        self.first.visit(collector)?;
        self.seen.visit(collector)
    }
}

impl Suspect {
    /// Return whether the numbers are those of which it was seen.
    pub fn is_of(&self, py: Python<'_>, looked: &Looked) -> bool {
        self.seen.iter().any(|seen| seen.fits(py, looked))
    }

    /// Return whether it is still looked at for any numbers.
    pub fn is_due(&self) -> bool {
        self.others <= MAX_OTHERS
    }

    /// Count a look for other numbers than those of its trace; whether there have been enough of them.
    pub fn is_looked_at_enough(&mut self) -> bool {
        self.others += 1;
        self.others > MAX_OTHERS
    }

    /// Return whether there is none.
    pub fn is_empty(&self) -> bool {
        self.drawn.is_empty() && self.read.is_empty() && self.is_unchanged()
    }

    /// What has changed of an object by which threads wait for each other, a queue say: called for its graph alone, the loss might
    /// wait for ever, or take what is lost then.
    pub fn blocking(&self, py: Python<'_>, looked: &Looked) -> PyResult<Option<String>> {
        if self.reached.is_empty() {
            return Ok(None);
        }
        let changed = self.reached.iter().filter_map(|change| match change {
            Change::Item(dict, ..) | Change::Order(dict, _) => Some(dict.as_ptr().addr()),
            Change::List(list, _) => Some(list.as_ptr().addr()),
            Change::Deque(deque, _) => Some(deque.as_ptr().addr()),
            Change::Set(set, _) => Some(set.as_ptr().addr()),
            Change::Contents(looked, node, _) => Some(looked.object(*node, py)?.as_ptr().addr()),
            Change::Node(..) => None,
        });
        let changed: Vec<usize> = changed.collect();
        let suspect = py.import("faststep._step._suspect")?;
        let found = suspect.getattr("blocking")?;
        found.call1((looked.all(py), changed))?.extract()
    }

    /// Return whether the loss has changed the order of a dict of arrays: by another order it computes the same of others.
    pub fn orders_arrays(&self, py: Python<'_>) -> bool {
        let mut changes = self.model.iter().chain(&self.reached);
        changes.any(|change| match change {
            Change::Order(dict, _) => holds_array(dict.bind(py).as_any(), &mut HashSet::new()),
            _ => false,
        })
    }

    /// Where the loss has set something on the model, but for numbers to which each call adds.
    pub fn set(&self, adds: Option<&Adds>, py: Python<'_>) -> PyResult<Vec<Placed>> {
        let mut all = Vec::new();
        for change in &self.model {
            let Change::Item(dict, key, _) = change else {
                continue;
            };
            let is_added_to = adds.map(|adds| adds.has_item(dict, key, py)).transpose()?;
            if !is_added_to.unwrap_or(false) {
                all.push(Placed::new(dict, key, py));
            }
        }
        Ok(all)
    }

    /// Return whether nothing has changed that is no generator.
    pub fn is_unchanged(&self) -> bool {
        self.model.is_empty() && self.reached.is_empty()
    }

    /// Show the model as the loss has left it, or what it reaches as it was before; a second time the other way round.
    pub fn swap(&mut self, py: Python<'_>, model: bool) -> PyResult<()> {
        let changes = if model {
            &mut self.model
        } else {
            &mut self.reached
        };
        let swapped = changes.iter_mut().try_for_each(|change| change.swap(py));
        // of two that lie in one memory, the last is the first to be taken back; keys come back in their order
        changes.sort_by_key(|change| matches!(change, Change::Contents(..)));
        let contents = changes.partition_point(|change| !matches!(change, Change::Contents(..)));
        changes[contents..].reverse();
        swapped
    }

    /// While the numbers that the loss changes are what they will be so many calls later, do something. None: there are no
    /// such numbers.
    pub fn later<T>(
        &mut self,
        py: Python<'_>,
        times: i64,
        work: impl FnOnce() -> T,
    ) -> PyResult<Option<T>> {
        self.with_others(py, |change| change.later(py, times), work)
    }

    /// While the numbers that the loss changes, as they will be so many calls later, note what they are compared with, do
    /// something. Returns how many calls later they come to that, without those that these limits have given before.
    pub fn compared(
        &mut self,
        limits: &Bound<'_, PyAny>,
        times: i64,
        work: impl FnOnce(),
    ) -> PyResult<Vec<i64>> {
        let py = limits.py();
        limits.call_method1("begin", (times,))?;
        let noting = |change: &Change| {
            let note = |numbers| limits.call_method1("noting", numbers);
            if let Some(numbers) = change.numbers(py)? {
                return note(numbers).map(Some);
            }
            let each = change.each(py, |before, now| note((before.clone(), now.clone())))?;
            if each.is_none() && times > 0 {
                return change.later(py, times);
            }
            Ok(each)
        };
        self.with_others(py, noting, work)?;
        limits.call_method0("calls")?.extract()
    }

    // do something while others stand in the places of what the loss changes, where there are others
    fn with_others<'py, T>(
        &mut self,
        py: Python<'py>,
        other: impl Fn(&Change) -> PyResult<Option<Bound<'py, PyAny>>>,
        work: impl FnOnce() -> T,
    ) -> PyResult<Option<T>> {
        let mut before = Vec::new();
        for change in self.model.iter_mut().chain(&mut self.reached) {
            let other = other(change)?;
            let exchanged = other.map(|other| change.exchange(py, other.unbind()));
            before.push(exchanged.transpose()?);
        }
        let done = before.iter().any(Option::is_some).then(work);
        let changes = self.model.iter_mut().chain(&mut self.reached);
        for (change, before) in changes.zip(before) {
            if let Some(before) = before {
                change.put_back(py, before)?;
            }
        }
        Ok(done)
    }

    /// Take numbers under keys that the first call has made for counts from 0, where each call adds to them; which these are.
    pub fn count(&mut self, adds: &Adds, py: Python<'_>) -> PyResult<Vec<usize>> {
        let mut counts = Vec::new();
        for (at, change) in self.model.iter_mut().chain(&mut self.reached).enumerate() {
            if let Change::Item(dict, key, before @ None) = change {
                if adds.has_item(dict, key, py)? {
                    *before = Some(0_u8.into_pyobject(py)?.into_any().unbind());
                    counts.push(at);
                }
            }
        }
        Ok(counts)
    }

    /// Forget that these were counts.
    pub fn uncount(&mut self, counts: &[usize]) {
        for (at, change) in self.model.iter_mut().chain(&mut self.reached).enumerate() {
            if let (Change::Item(.., before), true) = (change, counts.contains(&at)) {
                *before = None;
            }
        }
    }

    /// How many calls later a number that the loss changes comes to one with which its code may compare it.
    pub fn turns(&self, py: Python<'_>, looked: &Looked) -> PyResult<Vec<i64>> {
        let mut changed = Vec::new();
        for change in self.model.iter().chain(&self.reached) {
            for (before, now, is_length) in change.counts(py)? {
                changed.push((change.name(py, looked), before, now, is_length));
            }
        }
        let Some(codes) = looked
            .program
            .codes
            .as_ref()
            .filter(|_| !changed.is_empty())
        else {
            return Ok(Vec::new());
        };
        let later = py.import("faststep._step._later")?;
        let mut numbers = looked.numbers(py);
        let keys = later.call_method1("keys_in", (looked.all(py),))?;
        numbers.extend(keys.extract::<Vec<(String, Bound<'_, PyAny>)>>()?);
        let turns = later.call_method1("calls_later", (codes, changed, numbers))?;
        turns.extract()
    }

    /// The keys that have changed, for a message.
    pub fn names(&self, py: Python<'_>) -> String {
        let names = self.model.iter().chain(&self.reached);
        let mut names: Vec<String> = names.map(|change| change.shown(py)).collect();
        names.dedup();
        names.truncate(3);
        names.join(", ")
    }
}

/// Which of the changes of a model code may read; also where that cannot be told.
pub fn read_of(changes: &[Change], by: &Looked, py: Python<'_>) -> PyResult<Option<String>> {
    for change in changes {
        let name = change.name(py, by);
        if name.is_empty() || by.may_read(vec![name], py)? {
            return Ok(Some(change.shown(py)));
        }
    }
    Ok(None)
}

/// The most items that a list is tried with beyond those that it has.
const MAX_ADDED: usize = 100_000;

/// Number of calls of a loss, each of which draws where the loss does.
const CALLS: usize = 3;

/// Return whether a loss draws from the process's random generators, with other threads held back.
pub fn draws(py: Python<'_>, mut call: impl FnMut()) -> PyResult<bool> {
    let held = py
        .import("faststep._step._suspect")?
        .getattr("HeldBack")?
        .call0()?;
    let mut draws = Ok(true);
    for _ in 0..CALLS {
        call();
        draws = held.call_method0("moved")?.extract();
        if !matches!(draws, Ok(true)) {
            break;
        }
    }
    let release = || held.call_method0("release").map(drop);
    release().or_else(|error| release().and(Err(error)))?; // a Ctrl-C may end the first
    draws
}

/// A function of Python's that is called for the events of this thread, as long as this is in use.
///
/// Where a debugger or a profiler is there, it stays: there is room for one. No Python code runs as this comes and goes, so
/// that no Ctrl-C can end either half way.
struct Hook<'py> {
    get: Bound<'py, PyAny>,
    set: Bound<'py, PyAny>,
    function: Bound<'py, PyAny>,
}

impl<'py> Hook<'py> {
    // `get` and `set` are functions of `sys`
    fn begin(get: &str, set: &str, function: Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let sys = function.py().import("sys")?;
        let (get, set) = (sys.getattr(get)?, sys.getattr(set)?);
        if !get.call0()?.is_none() {
            return Ok(None);
        }
        set.call1((&function,))?;
        Ok(Some(Self { get, set, function }))
    }
}

impl Drop for Hook<'_> {
    fn drop(&mut self) {
        let ours = self.get.call0().is_ok_and(|now| now.is(&self.function));
        if ours {
            drop(self.set.call1((self.function.py().None(),)));
        }
    }
}

// end the use of an object; a Ctrl-C in between is raised as the call of the step returns
fn end(object: &Bound<'_, PyAny>) {
    if let Err(error) = object.call_method0("end") {
        raise_late(error);
        drop(object.call_method0("end"));
    }
}

/// What a loss does beside its result as it is called on trial is noticed as long as this is in use.
pub struct Effects<'py>(Bound<'py, PyAny>);

impl<'py> Effects<'py> {
    /// Notice it; `known`: or end the call before it does anything else; `silent`: but for what it prints, which appears nowhere;
    /// `drawable`: with the open files and the sets that it reaches.
    pub fn begin(
        py: Python<'py>,
        known: Option<Vec<String>>,
        silent: bool,
        drawable: &Drawable,
    ) -> PyResult<Self> {
        let kept = match &drawable.0 {
            Some(movable) => movable.bind(py).getattr("kept")?,
            None => PyList::empty(py).into_any(),
        };
        let effects = py.import("faststep._step._effects")?.getattr("Effects")?;
        let effects = Self(effects.call1((known, silent, kept))?);
        effects.0.call_method0("begin")?;
        Ok(effects)
    }

    /// What it has done, or would have; and that before which the call has been ended, because nobody could take it back.
    pub fn found(&self) -> PyResult<(Vec<String>, Option<String>)> {
        let found = self.0.call_method0("found")?.extract()?;
        Ok((found, self.0.getattr("outside")?.extract()?))
    }
}

impl Drop for Effects<'_> {
    fn drop(&mut self) {
        end(&self.0);
    }
}

/// A module of the user's that would be imported for the first time ends the call, as long as this is in use.
pub struct Imports<'py>(Bound<'py, PyAny>);

impl<'py> Imports<'py> {
    /// Look at what is imported.
    pub fn begin(py: Python<'py>) -> PyResult<Self> {
        let imports = py.import("faststep._step._imports")?.getattr("Imports")?;
        let imports = Self(imports.call0()?);
        imports.0.call_method0("begin")?;
        Ok(imports)
    }

    /// The name of the module, if an error says that.
    pub fn first(error: &PyErr, py: Python<'_>) -> PyResult<Option<String>> {
        let class = py
            .import("faststep._step._imports")?
            .getattr("FirstImport")?;
        let is_one = error.value(py).is_instance(&class)?;
        Ok(is_one.then(|| text(error.value(py))))
    }
}

impl Drop for Imports<'_> {
    fn drop(&mut self) {
        end(&self.0);
    }
}

/// The positions of random generators and iterators before a loss is called.
pub struct Positions<'py> {
    object: Bound<'py, PyAny>,
    hook: Cell<Option<Hook<'py>>>,
}

impl<'py> Positions<'py> {
    /// Of those of the process, of the model, and among what the loss reaches.
    pub fn of(model: &Bound<'py, PyAny>, looked: &Looked) -> PyResult<Self> {
        let py = model.py();
        let objects = PyList::new(py, looked.all(py))?;
        let suspect = py.import("faststep._step._suspect")?;
        let positions = suspect.getattr("Positions")?;
        Ok(Self {
            object: positions.call1((model, objects, looked.codes(py)))?,
            hook: Cell::new(None),
        })
    }

    /// Of those of the process, of the model, and of a list.
    pub fn among(model: &Bound<'py, PyAny>, objects: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = model.py();
        let suspect = py.import("faststep._step._suspect")?;
        Ok(Self {
            object: suspect
                .getattr("Positions")?
                .call1((model, objects, py.None()))?,
            hook: Cell::new(None),
        })
    }

    /// Notice calls of what can only be noticed as it is called.
    pub fn begin(&self) -> PyResult<()> {
        let profile = self.object.getattr("profile")?;
        self.hook
            .set(Hook::begin("getprofile", "setprofile", profile)?);
        Ok(())
    }

    /// Notice no more calls.
    pub fn end(&self) {
        self.hook.set(None);
    }

    /// What has been read that changes by itself, with the lines that did.
    pub fn read(&self) -> PyResult<Vec<String>> {
        self.object.call_method0("read")?.extract()
    }

    /// Return whether only the process's have moved.
    pub fn shared(&self) -> PyResult<bool> {
        self.object.call_method0("shared")?.extract()
    }

    /// Return whether something may be taken that cannot be put back.
    pub fn stay(&self) -> PyResult<bool> {
        self.object.getattr("stay")?.extract()
    }

    /// Let go of it; what has moved can be put back by [`put_back`].
    pub fn into_object(self) -> Py<PyAny> {
        self.object.clone().unbind()
    }

    /// The names of those that have moved since.
    pub fn moved(&self) -> PyResult<Vec<String>> {
        self.object.call_method0("moved")?.extract()
    }
}

/// What a loss may take from generators and iterators as it is called for its graph alone; none where its code does not tell of any.
pub struct Drawable(Option<Py<PyAny>>);

impl Drawable {
    /// As it is before the call.
    pub fn before(model: &Bound<'_, PyAny>, looked: &Looked) -> PyResult<Self> {
        if !looked.program.may_draw {
            return Ok(Self(None));
        }
        let py = model.py();
        let objects = PyList::new(py, looked.all(py))?;
        let positions = py.import("faststep._step._positions")?;
        let movable = positions.getattr("Movable")?.call1((model, objects))?;
        Ok(Self(Some(movable.unbind())))
    }

    /// Return whether something may be taken that cannot be put back.
    pub fn stay(&self, py: Python<'_>) -> PyResult<bool> {
        let stay = self.0.as_ref().map(|it| it.getattr(py, "stay"));
        stay.map_or(Ok(false), |stay| stay?.extract(py))
    }

    /// The names of what has been taken from, beside the process's generators; `writes`: what the loss has written stays.
    pub fn moved(&self, py: Python<'_>, writes: bool) -> PyResult<Vec<String>> {
        let moved = self.0.as_ref();
        let moved = moved.map(|it| it.call_method1(py, "moved", (writes,)));
        moved.map_or_else(|| Ok(Vec::new()), |moved| moved?.extract(py))
    }

    /// The names of those of the process's that have moved: another thread may have drawn from them.
    pub fn moved_of_process(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let moved = self.0.as_ref();
        let moved = moved.map(|it| it.call_method0(py, "moved_of_process"));
        moved.map_or_else(|| Ok(Vec::new()), |moved| moved?.extract(py))
    }

    /// Put it back, before the loss is called again.
    pub fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        let back = self.0.as_ref().map(|it| it.call_method0(py, "put_back"));
        back.transpose().map(drop)
    }
}

/// Put back what a loss has taken from generators and iterators since; the names of those of which that cannot be.
pub fn put_back(positions: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    positions.call_method0("put_back")?.extract()
}

/// Reads of the value of a traced array, also where the user's code catches MLX's error for it.
pub struct Reads<'py>(Option<(Bound<'py, PyAny>, Option<Hook<'py>>)>);

impl<'py> Reads<'py> {
    /// Notice them, if MLX refuses them at all: where arrays are traced.
    pub fn begin(py: Python<'py>, traced: bool) -> PyResult<Self> {
        let new = || {
            let suspect = py.import("faststep._step._suspect")?;
            let reads = suspect.getattr("Reads")?.call0()?;
            let hook = Hook::begin("gettrace", "settrace", reads.getattr("trace")?)?;
            Ok((reads, hook))
        };
        traced.then(new).transpose().map(Self)
    }

    /// Notice no more; the line of the first.
    pub fn end(self) -> PyResult<Option<String>> {
        let Some((reads, hook)) = self.0 else {
            return Ok(None);
        };
        drop(hook);
        reads.getattr("place")?.extract()
    }
}

// the keys of a dict in its order
fn keys<'py>(dict: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyList>> {
    Ok(ordered::keys(dict)?.unwrap_or_else(|| dict.keys()))
}

/// What has changed in the containers of a snapshot: with what stood there before, or with what stands there now.
pub fn changes(snapshot: &Snapshot<'_>, before: bool) -> PyResult<Vec<Change>> {
    let (items, orders, lists) = snapshot.differences()?;
    let deques = snapshot.changed_deques()?.into_iter().map(|(deque, old)| {
        let py = deque.py();
        let now = || PyList::new(py, deque.try_iter()?.collect::<PyResult<Vec<_>>>()?);
        let other = if before { old } else { now()? };
        Ok(Change::Deque(deque.unbind(), other.unbind()))
    });
    let deques = deques.collect::<PyResult<Vec<_>>>()?;
    let items = items.into_iter().map(|(dict, key, old, new)| {
        let other = if before { old } else { new };
        Change::Item(dict.unbind(), key.unbind(), other.map(Bound::unbind))
    });
    let orders = orders.into_iter().map(|(dict, old)| {
        let other = if before { old } else { keys(&dict)? };
        Ok(Change::Order(dict.unbind(), other.unbind()))
    });
    let orders = orders.collect::<PyResult<Vec<_>>>()?;
    let lists = lists.into_iter().map(|(list, old)| {
        let other = if before { old } else { without_arrays(&list)? };
        Ok(Change::List(list.unbind(), other.unbind()))
    });
    let lists = lists.collect::<PyResult<Vec<_>>>()?;
    let sets = snapshot.changed_sets().map(|(set, old)| {
        let now = || PyFrozenSet::new(set.py(), set.iter());
        let other = if before { old.clone() } else { now()? };
        Ok(Change::Set(set.clone().unbind(), other.unbind()))
    });
    let sets = sets.collect::<PyResult<Vec<_>>>()?;
    let others = orders.into_iter().chain(lists).chain(deques).chain(sets);
    Ok(items.chain(others).collect())
}
