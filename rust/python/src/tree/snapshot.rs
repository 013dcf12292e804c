//! Contents of containers, to be restored.
use std::{cell::Cell, collections::HashSet};

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFrozenSet, PyFunction, PyList, PyModule, PySet, PyTuple, PyType},
};

use super::{
    ordered,
    slot::Place,
    static_value::{equal, is_fixed, is_plain},
    text::text,
    walk::{fields, walk, Kind, Visitor},
};
use crate::mlx::{
    bridge,
    classes::{
        default_dict, deque, is_deque, is_made_by_python, is_module, is_numpy, ordered_dict,
    },
    collector::{Collector, Refers, Visited},
};

/// The most objects that are looked through for an array.
const MAX_SEEN: usize = 1 << 16;

/// A dict, a key in it, and the value there before and now.
pub type Item<'py> = (
    Bound<'py, PyDict>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);
/// A place, with the object that was there before and the one that is there now.
pub type Other<'py> = (Place<'py>, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// A dict, and the order of its keys before.
pub type Order<'py> = (Bound<'py, PyDict>, Bound<'py, PyList>);
/// A list, and its contents before.
pub type List<'py> = (Bound<'py, PyList>, Bound<'py, PyList>);

/// A set, and its members before.
pub type Set<'py> = (Bound<'py, PySet>, Bound<'py, PyFrozenSet>);

/// What a loss has set in a dict of a model, and does not add to; none: the key is not there.
pub struct Placed {
    dict: Py<PyDict>,
    key: Py<PyAny>,
    value: Option<Py<PyAny>>,
}

impl Refers for Placed {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.dict.visit(collector)?;
        self.value.visit(collector)
    }
}

impl Placed {
    /// A place, of no value yet.
    pub fn new(dict: &Py<PyDict>, key: &Py<PyAny>, py: Python<'_>) -> Self {
        let (dict, key) = (dict.clone_ref(py), key.clone_ref(py));
        let value = None;
        Self { dict, key, value }
    }

    fn now<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.dict.bind(py).get_item(&self.key)
    }

    /// Return whether the value stands there now.
    pub fn stands(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(match (&self.value, self.now(py)?) {
            (Some(value), Some(now)) => equal(value.bind(py), &now),
            (value, now) => value.is_none() && now.is_none(),
        })
    }

    /// The same place, with what stands there now.
    pub fn kept(&self, py: Python<'_>) -> PyResult<Self> {
        let value = self.now(py)?.map(Bound::unbind);
        let same = Self::new(&self.dict, &self.key, py);
        Ok(Self { value, ..same })
    }

    /// Return whether both are one place.
    pub fn is_of(&self, other: &Self, py: Python<'_>) -> bool {
        let key = self.key.bind(py);
        self.dict.is(&other.dict) && key.eq(other.key.bind(py)).unwrap_or(false)
    }
}

/// The contents of every container of a tree, to be put back.
#[derive(Default)]
pub struct Snapshot<'py> {
    dicts: Vec<(Bound<'py, PyDict>, Bound<'py, PyDict>)>,
    orders: Vec<(Bound<'py, PyDict>, Bound<'py, PyList>)>, // keys of those that keep an order of their own
    lists: Vec<(Bound<'py, PyList>, Bound<'py, PyList>)>,
    deques: Vec<(Bound<'py, PyAny>, Bound<'py, PyList>)>,
    sets: Vec<Set<'py>>,
    met: HashSet<usize>,             // their addresses
    hole: Option<Bound<'py, PyAny>>, // in the copies, where arrays stood
    unchanged: Cell<bool>,           // the dicts, when it was last looked for a new array
    /// Arrays that have been met by `note_within`.
    pub arrays: Vec<Bound<'py, PyAny>>,
    /// True if an object has been met there that may keep something elsewhere.
    pub is_partial: bool,
    error: Option<PyErr>,
}

impl<'py> Snapshot<'py> {
    /// Note the contents of `root` and of everything in it.
    pub fn take(root: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut snapshot = Self::default();
        snapshot.note_all(root)?;
        Ok(snapshot)
    }

    /// Note the contents of another root and of everything in it too.
    pub fn note_all(&mut self, root: &Bound<'py, PyAny>) -> PyResult<()> {
        walk(root.clone(), Place::Tuple, self);
        self.error.take().map_or(Ok(()), Err)
    }

    /// The key under which an array has been put where there was none, or something else; with `slots`, one in the place of
    /// another is no such.
    pub fn new_array(&self, slots: bool) -> PyResult<Option<String>> {
        let is_new = |before: Option<&Bound<'py, PyAny>>, now: &Bound<'py, PyAny>| {
            let same = before.is_some_and(|before| {
                before.is(now) || (slots && bridge::is_array(before) && bridge::is_array(now))
            });
            !same && holds_array(now, &mut HashSet::new())
        };
        self.unchanged.set(true);
        for (dict, copy) in self.changed_dicts() {
            self.unchanged.set(false);
            for (key, value) in dict.iter() {
                if is_new(copy.get_item(&key)?.as_ref(), &value) {
                    return Ok(Some(text(&key)));
                }
            }
        }
        for (list, copy) in &self.lists {
            for (at, value) in list.iter().enumerate() {
                if is_new(copy.get_item(at).ok().as_ref(), &value) {
                    return Ok(Some("a list".into()));
                }
            }
        }
        for (deque, copy) in &self.deques {
            for (at, item) in deque.try_iter()?.enumerate() {
                let (item, before) = (item?, copy.get_item(at).ok());
                // an array in the place of another one of the deque is no new one
                let in_place = before.as_ref().is_some_and(bridge::is_array);
                let known = in_place && copy.iter().any(|it| it.is(&item));
                if !known && is_new(before.as_ref(), &item) {
                    return Ok(Some("a deque".into()));
                }
            }
        }
        for (set, _) in self.changed_sets() {
            if set
                .iter()
                .any(|item| holds_array(&item, &mut HashSet::new()))
            {
                return Ok(Some("a set".into()));
            }
        }
        Ok(None)
    }

    /// The key under which an object that may change has been put, or one with such in it, but for those that are known; behind
    /// `new_array`.
    pub fn new_object(
        &self,
        is_known: impl Fn(&Bound<'py, PyAny>) -> bool,
    ) -> PyResult<Option<String>> {
        if self.unchanged.get() {
            return Ok(None);
        }
        for (dict, copy) in self.changed_dicts() {
            for (key, value) in dict.iter() {
                let before = copy.get_item(&key)?;
                let same = before.is_some_and(|before| before.is(&value));
                if !same && keeps_state(&value) && !is_known(&value) {
                    return Ok(Some(text(&key)));
                }
            }
        }
        Ok(None)
    }

    /// The key under which a container or an object with arrays has stood that is there no more, nor anything else with arrays.
    pub fn lost_array(&self) -> PyResult<Option<String>> {
        let is_lost = |before: &Bound<'py, PyAny>, now: Option<Bound<'py, PyAny>>| {
            let stays = bridge::is_array(before) || now.as_ref().is_some_and(|now| now.is(before));
            !stays
                && holds_array(before, &mut HashSet::new())
                && !now.is_some_and(|now| holds_array(&now, &mut HashSet::new()))
        };
        for (dict, copy) in self.changed_dicts() {
            for (key, value) in copy.iter() {
                if is_lost(&value, dict.get_item(&key)?) {
                    return Ok(Some(text(&key)));
                }
            }
        }
        for (list, copy) in &self.lists {
            let mut items = copy.iter().enumerate();
            if items.any(|(at, value)| is_lost(&value, list.get_item(at).ok())) {
                return Ok(Some("an item of a list".into()));
            }
        }
        for (deque, copy) in &self.deques {
            let mut items = copy.iter().enumerate();
            if items.any(|(at, value)| is_lost(&value, deque.get_item(at).ok())) {
                return Ok(Some("an item of a deque".into()));
            }
        }
        Ok(None)
    }

    /// Take away what has come to stand in dicts where there was nothing.
    pub fn forget_new(&self) -> PyResult<()> {
        for (dict, copy) in self.changed_dicts() {
            for key in dict.keys() {
                if !copy.contains(&key)? {
                    ordered::del_item(dict, &key)?;
                }
            }
        }
        Ok(())
    }

    /// Dicts and lists in whose place in another one a new dict or list stands now.
    pub fn replaced(&self) -> PyResult<Vec<Other<'py>>> {
        let is_one = |object: &Bound<'py, PyAny>| {
            (object.is_instance_of::<PyDict>() || object.is_instance_of::<PyList>())
                && !is_module(object)
        };
        let mut found = Vec::new();
        let mut note = |place, before: Bound<'py, PyAny>, now: Bound<'py, PyAny>| {
            let is_known = self.met.contains(&now.as_ptr().addr()); // under another name
            if !before.is(&now) && is_one(&before) && is_one(&now) && !is_known {
                found.push((place, before, now));
            }
        };
        for (dict, copy) in self.changed_dicts() {
            for (key, before) in copy.iter() {
                if let Some(now) = dict.get_item(&key)? {
                    note(Place::Dict(dict.clone(), key), before, now);
                }
            }
        }
        for (list, copy) in self
            .lists
            .iter()
            .filter(|(now, copy)| now.len() == copy.len())
        {
            for (at, (before, now)) in copy.iter().zip(list.iter()).enumerate() {
                note(Place::List(list.clone(), at), before, now);
            }
        }
        Ok(found)
    }

    // those that have not the objects of their copies, in their order
    fn changed_dicts(&self) -> impl Iterator<Item = &(Bound<'py, PyDict>, Bound<'py, PyDict>)> {
        let dicts = self.dicts.iter();
        dicts.filter(|(dict, copy)| !bridge::has_same_items(dict, copy))
    }

    /// What has changed and is no array: items of dicts with their old and new values, orders of dicts, and lists with their old
    /// contents, but for arrays.
    pub fn differences(&self) -> PyResult<(Vec<Item<'py>>, Vec<Order<'py>>, Vec<List<'py>>)> {
        let same = |a: &Bound<'py, PyAny>, b: &Bound<'py, PyAny>| {
            a.is(b) || (is_fixed(a) && is_fixed(b) && equal(a, b))
        };
        let differs = |old: Option<&Bound<'py, PyAny>>, new: Option<&Bound<'py, PyAny>>| {
            let stays = matches!((old, new), (Some(old), Some(new)) if same(old, new));
            !stays && !old.into_iter().chain(new).any(has_array)
        };
        let (mut items, mut orders) = (Vec::new(), Vec::new());
        for (dict, copy) in self.changed_dicts() {
            for (key, old) in copy.iter() {
                let new = dict.get_item(&key)?;
                if differs(Some(&old), new.as_ref()) {
                    items.push((dict.clone(), key, Some(old), new));
                }
            }
            for (key, new) in dict.iter() {
                let made = copy.get_item(&key)?.is_none() && !new.is_instance_of::<PyModule>();
                if made && differs(None, Some(&new)) {
                    items.push((dict.clone(), key, None, Some(new)));
                }
            }
        }
        for (dict, copy) in &self.dicts {
            let kept = self.orders.iter().find(|(ordered, _)| ordered.is(dict));
            if kept.is_none() && bridge::has_same_items(dict, copy) {
                continue; // of one with an order of its own, the items are the same in any
            }
            let old = kept.map_or_else(|| copy.keys(), |(_, keys)| keys.clone());
            let now = ordered::keys(dict)?.unwrap_or_else(|| dict.keys());
            let stay = |keys: &Bound<'py, PyList>, other: &Bound<'py, PyDict>| {
                let keys = keys.iter();
                keys.filter(|key| other.contains(key).unwrap_or(false))
                    .collect::<Vec<_>>()
            };
            let (before, now) = (stay(&old, dict), stay(&now, copy));
            if !before.iter().zip(&now).all(|(before, now)| before.is(now)) {
                orders.push((dict.clone(), old));
            }
        }
        let mut lists = Vec::new();
        for (list, copy) in &self.lists {
            let mut pairs = list.iter().zip(copy.iter());
            let other =
                list.len() != copy.len() || pairs.any(|(new, old)| differs(Some(&old), Some(&new)));
            if other {
                lists.push((list.clone(), without_arrays(copy)?));
            }
        }
        Ok((items, orders, lists))
    }

    /// Deques that have other items now, none of which are arrays, with those that they had.
    pub fn changed_deques(&self) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyList>)>> {
        let mut changed = Vec::new();
        for (deque, copy) in &self.deques {
            let now = deque.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            let mut pairs = now.iter().zip(copy.iter());
            let other = now.len() != copy.len() || pairs.any(|(now, before)| !now.is(&before));
            let mut items = now.iter().cloned().chain(copy.iter());
            if other && !items.any(|item| has_array(&item)) {
                changed.push((deque.clone(), copy.clone()));
            }
        }
        Ok(changed)
    }

    /// Sets that have other members now, with those that they had.
    pub fn changed_sets(&self) -> impl Iterator<Item = &Set<'py>> {
        let sets = self.sets.iter();
        sets.filter(|(set, copy)| set.len() != copy.len() || !set.eq(copy).unwrap_or(false))
    }

    /// Hold the arrays no more: `restore` leaves those that stand in their places then.
    pub fn let_go(&mut self, py: Python<'py>) -> PyResult<()> {
        let hole = py.get_type::<PyAny>().call0()?;
        for (_, copy) in &self.dicts {
            for (key, value) in copy.copy()?.iter() {
                if bridge::is_array(&value) {
                    copy.set_item(key, &hole)?;
                }
            }
        }
        for (_, copy) in &self.lists {
            for (at, value) in copy.iter().enumerate() {
                if bridge::is_array(&value) {
                    copy.set_item(at, &hole)?;
                }
            }
        }
        self.hole = Some(hole);
        Ok(())
    }

    /// Each object to which it refers, as often as it does.
    pub fn objects(&self) -> Vec<Bound<'py, PyAny>> {
        let mut all = Vec::new();
        for (dict, copy) in &self.dicts {
            all.push(dict.clone().into_any());
            all.extend(copy.values());
        }
        for (list, copy) in &self.lists {
            all.push(list.clone().into_any());
            all.extend(copy.iter());
        }
        for (deque, copy) in &self.deques {
            all.push(deque.clone());
            all.extend(copy.iter());
        }
        all
    }

    /// Return whether something else stands somewhere now, but for an array in the place of one that is held no more.
    pub fn has_changed(&self) -> PyResult<bool> {
        let stays = |before: &Bound<'py, PyAny>, now: Option<&Bound<'py, PyAny>>| {
            let is_hole = self.hole.as_ref().is_some_and(|hole| before.is(hole));
            now.is_some_and(|now| before.is(now) || (is_hole && bridge::is_array(now)))
        };
        for (dict, copy) in self.changed_dicts() {
            if dict.len() != copy.len() {
                return Ok(true);
            }
            for (key, before) in copy.iter() {
                if !stays(&before, dict.get_item(&key)?.as_ref()) {
                    return Ok(true);
                }
            }
        }
        for (dict, keys) in &self.orders {
            if ordered::keys(dict)?.is_some_and(|now| !has_same(&now, keys)) {
                return Ok(true);
            }
        }
        let lists = self.lists.iter().any(|(list, copy)| {
            let mut pairs = copy.iter().zip(list.iter());
            list.len() != copy.len() || pairs.any(|(before, now)| !stays(&before, Some(&now)))
        });
        if lists || self.changed_sets().next().is_some() {
            return Ok(true);
        }
        for (deque, copy) in &self.deques {
            let now = deque.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            let mut pairs = copy.iter().zip(&now);
            if now.len() != copy.len() || pairs.any(|(before, now)| !before.is(now)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    // put what stands in the containers now into the holes
    fn fill(&self) -> PyResult<()> {
        let Some(hole) = &self.hole else {
            return Ok(());
        };
        for (dict, copy) in &self.dicts {
            for (key, value) in copy.copy()?.iter().filter(|(_, value)| value.is(hole)) {
                match dict.get_item(&key)? {
                    Some(now) => copy.set_item(key, now)?,
                    None => drop((copy.del_item(key)?, value)),
                }
            }
        }
        for (list, copy) in &self.lists {
            for (at, _) in copy.iter().enumerate().filter(|(_, value)| value.is(hole)) {
                copy.set_item(at, list.get_item(at)?)?;
            }
        }
        Ok(())
    }

    /// Put everything back.
    pub fn restore(&self) -> PyResult<()> {
        self.fill()?;
        if !self.unchanged.get() {
            for (dict, copy) in self.changed_dicts() {
                let order = self.orders.iter().find(|(ordered, _)| ordered.is(dict));
                let imported = imported(dict, copy)?;
                ordered::refill(dict, copy, order.map(|(_, keys)| keys))?;
                for (name, module) in imported {
                    dict.set_item(name, module)?;
                }
            }
        }
        for (dict, keys) in &self.orders {
            if ordered::keys(dict)?.is_some_and(|now| !has_same(&now, keys)) {
                ordered::refill(dict, &dict.copy()?, Some(keys))?;
            }
        }
        for (list, copy) in &self.lists {
            list.set_slice(0, list.len(), copy.as_any())?;
        }
        for (deque, copy) in &self.deques {
            refill(deque, copy)?;
        }
        for (set, copy) in &self.sets {
            if !has_members(set, copy) {
                refill(set, copy)?;
            }
        }
        Ok(())
    }

    /// Note the contents of an object and of what is in it, in dicts, lists, tuples, deques, sets and instance dicts, and the arrays
    /// there. `known`: the addresses of objects that are noted otherwise. Of others that may keep something elsewhere, in slots or in C,
    /// it is noted that there are any.
    pub fn note_within(
        &mut self,
        root: &Bound<'py, PyAny>,
        known: &HashSet<usize>,
    ) -> PyResult<()> {
        let mut todo = vec![(root.clone(), true)];
        while let Some((object, is_root)) = todo.pop() {
            let address = object.as_ptr().addr();
            let is_new = !self.met.contains(&address) && !known.contains(&address);
            if is_fixed(&object) || !(is_root || is_new) {
                continue;
            }
            if !is_root && bridge::is_array(&object) {
                self.met.insert(address);
                self.arrays.push(object);
                continue;
            }
            let is_other = !is_root && (is_module(&object) || keeps_elsewhere(&object)?);
            if is_other || self.met.len() > MAX_SEEN {
                self.is_partial = true;
                return Ok(());
            }
            if let Ok(set) = object.cast::<PySet>() {
                if is_new {
                    let copy = PyFrozenSet::new(object.py(), set.iter())?;
                    self.sets.push((set.clone(), copy));
                }
            }
            self.note(&object)?;
            if let Some(dict) = bridge::attributes(&object) {
                todo.extend(dict.values().iter().map(|value| (value, false)));
                self.note(dict.as_any())?;
            }
            let mut inner = contents(&object).unwrap_or_default();
            if object.is_instance_of::<PySet>() || object.is_instance_of::<PyFrozenSet>() {
                inner.extend(object.try_iter()?.collect::<PyResult<Vec<_>>>()?);
            }
            let arrays = is_module(&object); // which are known
            let inner = inner
                .into_iter()
                .filter(|it| !(arrays && bridge::is_array(it)));
            todo.extend(inner.map(|it| (it, false)));
        }
        Ok(())
    }

    /// The addresses of the containers.
    pub fn addresses(&self) -> &HashSet<usize> {
        &self.met
    }

    /// Note the contents of one dict, list or deque. What is met once more would be a second change of the same.
    pub fn note(&mut self, container: &Bound<'py, PyAny>) -> PyResult<()> {
        if !self.met.insert(container.as_ptr().addr()) {
            return Ok(());
        }
        if let Ok(dict) = container.cast::<PyDict>() {
            self.dicts.push((dict.clone(), dict.copy()?));
            let order = ordered::keys(dict)?;
            self.orders.extend(order.map(|keys| (dict.clone(), keys)));
        } else if let Ok(list) = container.cast::<PyList>() {
            self.lists
                .push((list.clone(), list.get_slice(0, list.len())));
        } else if is_deque(container) {
            let copy = container.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            let copy = PyList::new(container.py(), copy)?;
            self.deques.push((container.clone(), copy));
        }
        Ok(())
    }
}

/// A copy of a list with none in the places of arrays, which are no changes.
pub fn without_arrays<'py>(list: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
    let copy = list.get_slice(0, list.len());
    for (at, item) in list.iter().enumerate() {
        if bridge::is_array(&item) {
            copy.set_item(at, list.py().None())?;
        }
    }
    Ok(copy)
}

/// Give a deque or a set the contents of a copy. By Python's own methods: a class of the user's may count in its.
pub fn refill(object: &Bound<'_, PyAny>, copy: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    let Ok(set) = object.cast::<PySet>() else {
        let class = deque(py)?;
        class.call_method1(intern!(py, "clear"), (object,))?;
        return class
            .call_method1(intern!(py, "extend"), (object, copy))
            .map(drop);
    };
    // what is in both stays in its place: a set that is filled anew may have another order
    let members = copy.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let (now, then) = (addresses(set.iter()), addresses(members.iter().cloned()));
    let more = set.iter().filter(|it| !then.contains(&it.as_ptr().addr()));
    let missing = members
        .iter()
        .filter(|it| !now.contains(&it.as_ptr().addr()));
    let (more, missing) = (PySet::new(py, more)?, PySet::new(py, missing)?);
    let class = py.get_type::<PySet>();
    for (name, items) in [("difference_update", more), ("update", missing)] {
        if !items.is_empty() {
            class.call_method1(name, (object, items))?;
        }
    }
    Ok(())
}

fn addresses<'py>(objects: impl Iterator<Item = Bound<'py, PyAny>>) -> HashSet<usize> {
    objects.map(|object| object.as_ptr().addr()).collect()
}

/// Return whether the very objects of a copy are in a set.
pub fn has_members(set: &Bound<'_, PySet>, copy: &Bound<'_, PyFrozenSet>) -> bool {
    addresses(set.iter()) == addresses(copy.iter())
}

// modules that are in a dict and were not: imported once, a part of a package is looked for there
fn imported<'py>(
    dict: &Bound<'py, PyDict>,
    copy: &Bound<'py, PyDict>,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let mut found = Vec::new();
    for (name, value) in dict.iter() {
        if value.is_instance_of::<PyModule>() && !copy.contains(&name)? {
            found.push((name, value));
        }
    }
    Ok(found)
}

fn has_same(one: &Bound<'_, PyList>, other: &Bound<'_, PyList>) -> bool {
    one.len() == other.len() && one.iter().zip(other.iter()).all(|(a, b)| a.is(&b))
}

// what is in a dict, a list, a tuple or a deque, whatever a class of the user's makes of it
fn contents<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(dict) = object.cast::<PyDict>() {
        return Some(dict.values().iter().collect());
    }
    if let Ok(list) = object.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    if is_deque(object) {
        let items = deque(object.py()).ok()?;
        let items = items.call_method1(intern!(object.py(), "__iter__"), (object,));
        return items.ok()?.try_iter().ok()?.collect::<PyResult<_>>().ok();
    }
    let tuple = object.cast::<PyTuple>().ok()?;
    Some(tuple.iter().collect())
}

// whether an object, or what is in it, is such a one; where that is not said, it is looked into
fn leads_to<'py>(
    object: &Bound<'py, PyAny>,
    is_one: &impl Fn(&Bound<'py, PyAny>) -> Option<bool>,
    seen: &mut HashSet<usize>,
) -> bool {
    if let Some(is_one) = is_one(object) {
        return is_one;
    }
    let Some(items) = contents(object) else {
        return false;
    };
    seen.insert(object.as_ptr().addr())
        && seen.len() <= MAX_SEEN
        && items.iter().any(|item| leads_to(item, is_one, seen))
}

fn has_array(object: &Bound<'_, PyAny>) -> bool {
    let is_one = |object: &Bound<'_, PyAny>| bridge::is_array(object).then_some(true);
    leads_to(object, &is_one, &mut HashSet::new())
}

// whether an object that may change, no module of MLX's, is in another one
fn keeps_state(object: &Bound<'_, PyAny>) -> bool {
    let is_one = |object: &Bound<'_, PyAny>| {
        let is_other = is_fixed(object)
            || bridge::is_array(object)
            || is_module(object)
            || object.is_instance_of::<PyModule>()
            || object.is_instance_of::<PyType>()
            || object.is_instance_of::<PyFunction>();
        match contents(object) {
            _ if is_other => Some(false),
            Some(_) if !is_deque(object) => None,
            _ => Some(may_change(object)),
        }
    };
    leads_to(object, &is_one, &mut HashSet::new())
}

// whether an object may keep something that is neither in its instance dict nor an item: in slots, in a closure, in C
fn keeps_elsewhere(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    if object.is_instance_of::<PyType>() || object.is_instance_of::<PyFunction>() {
        return Ok(true);
    }
    for base in object.get_type().mro().iter() {
        let base = base.cast_into::<PyType>()?;
        let is_known = base.is(py.get_type::<PyAny>())
            || base.is(py.get_type::<PyDict>())
            || base.is(py.get_type::<PyList>())
            || base.is(py.get_type::<PyTuple>())
            || base.is(py.get_type::<PySet>())
            || base.is(py.get_type::<PyFrozenSet>())
            || base.is(deque(py)?)
            || ordered_dict(py).is_some_and(|class| base.is(class))
            || default_dict(py).is_some_and(|class| base.is(class));
        if is_known {
            continue;
        }
        let own = base.getattr(intern!(py, "__dict__"))?;
        let slots = own.call_method1(intern!(py, "get"), (intern!(py, "__slots__"), ()))?;
        if !is_made_by_python(&base) || slots.is_truthy()? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn may_change(object: &Bound<'_, PyAny>) -> bool {
    let of_class = |name| object.get_type().hasattr(name).unwrap_or(false);
    let of_enum = of_class(intern!(object.py(), "_member_map_"));
    let has_slots = || of_class(intern!(object.py(), "__slots__"));
    let is_iterator = || of_class(intern!(object.py(), "__next__"));
    let is_generator = || of_class(intern!(object.py(), "standard_normal")); // of NumPy's
    let is_of_library = || is_deque(object) || is_numpy(object) || is_iterator() || is_generator();
    !of_enum && (bridge::attributes(object).is_some() || is_of_library() || has_slots())
}

/// Return whether an object is an array, or leads to one: by what it contains, and by its attributes.
pub fn holds_array(object: &Bound<'_, PyAny>, seen: &mut HashSet<usize>) -> bool {
    if bridge::is_array(object) {
        return true;
    }
    if is_plain(object) || !seen.insert(object.as_ptr().addr()) || seen.len() > MAX_SEEN {
        return false;
    }
    let mut any = |items: Vec<Bound<'_, PyAny>>| items.iter().any(|item| holds_array(item, seen));
    if let Some(items) = contents(object) {
        return any(items);
    }
    if object.is_instance_of::<PyType>() || object.is_callable() {
        return false;
    }
    if let Some(fields) = fields(object) {
        let fields = fields.iter().filter_map(|name| object.getattr(name).ok());
        return any(fields.collect());
    }
    let attributes = bridge::attributes(object);
    attributes.is_some_and(|attributes| any(attributes.values().iter().collect()))
}

impl<'py> Visitor<'py> for Snapshot<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Optimizer {
            return Some(());
        }
        self.note(container).map_err(|e| self.error = Some(e)).ok()
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        if let Ok(set) = object.cast::<PySet>() {
            if self.met.insert(set.as_ptr().addr()) {
                let copy = PyFrozenSet::new(set.py(), set.iter());
                let copy = copy.map_err(|error| self.error = Some(error)).ok()?;
                self.sets.push((set.clone(), copy));
            }
        }
        Some(())
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}
