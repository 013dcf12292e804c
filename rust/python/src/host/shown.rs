//! The arguments that a loss is shown, copies of the user's: what it writes into them would be lost.
use std::collections::{HashMap, HashSet, VecDeque};

use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};

use crate::{
    mlx::{
        bridge,
        classes::{is_module, is_numeric, is_numpy},
    },
    tree::{
        ordered,
        rebuild::{again, rebuild_where},
        slot::{Place, Slot},
        walk::{fields, walk, Kind, Visitor},
        Tree,
    },
};

/// Keys that a loss takes out of dicts among its arguments, by the dicts' numbers in walking order.
pub type TakenOut = Vec<(usize, Py<PyAny>)>;

/// Arguments with tracers in the places of their arrays, as they are before the loss is called.
pub struct Shown<'py> {
    root: Bound<'py, PyAny>,
    containers: Containers<'py>,
    slots: Vec<Slot<'py>>,
    ids: Vec<Option<usize>>, // of the values in the slots
    numpy: Vec<bool>,        // slots of the user's NumPy arrays
}

impl<'py> Shown<'py> {
    /// Note the arguments and what is in them; `own` are the user's, where there are NumPy arrays among them.
    pub fn take(root: &Bound<'py, PyAny>, own: Option<&Bound<'py, PyTuple>>) -> PyResult<Self> {
        let slots = arrays(root);
        let own = own.map_or_else(|| Ok(Vec::new()), |own| leaves(own.as_any()))?;
        let numpy = (0..slots.len()).map(|slot| own.get(slot).is_some_and(is_numpy));
        Ok(Self {
            numpy: numpy.collect(),
            ids: slots.iter().map(|slot| bridge::id(&slot.object)).collect(),
            root: root.clone(),
            containers: Containers::of(root),
            slots,
        })
    }

    // the slots whose arrays the loss has changed in place, but for those of which the plain loop forgets that
    fn changed(&self) -> Vec<usize> {
        let of_other_id = |&slot: &usize| bridge::id(&self.slots[slot].object) != self.ids[slot];
        let mut changed: Vec<usize> = (0..self.slots.len()).filter(of_other_id).collect();
        if !changed.is_empty() {
            let passing = passing(&self.root);
            let address = |slot: usize| self.slots[slot].object.as_ptr().addr();
            changed.retain(|&slot| self.numpy[slot] || !passing.contains(&address(slot)));
        }
        changed
    }

    /// What the loss has written into, if it has. That keys are taken out of a dict does not count.
    pub fn written(&self) -> Option<&'static str> {
        let now = arrays(&self.root);
        let mut pairs = self.slots.iter().zip(&now);
        let replaced = now.len() == self.slots.len()
            && pairs.any(|(before, now)| !before.object.is(&now.object));
        if replaced || self.containers.are_written_to() {
            return Some("a dict, list or dataclass");
        }
        let changed = self.changed();
        let slot = *changed.first()?;
        Some(if self.numpy[slot] {
            "a NumPy array"
        } else {
            "an array"
        })
    }

    /// The keys that the loss has taken out of dicts.
    pub fn taken_out(&self) -> TakenOut {
        let dicts = self.containers.dicts.iter().enumerate();
        let taken = dicts.flat_map(|(number, (dict, before))| {
            let gone = |key: &Bound<'_, PyAny>| !dict.contains(key).unwrap_or(true);
            let gone = before.keys().into_iter().filter(gone);
            gone.map(move |key| (number, key.unbind()))
                .collect::<Vec<_>>()
        });
        taken.collect()
    }

    /// Do to the user's own arguments what the loss has done to these.
    pub fn give_back(&self, own: &Bound<'py, PyAny>) -> PyResult<()> {
        let (shown, own_containers) = (&self.containers, Containers::of(own));
        let mut known = HashMap::new();
        let mut is_copy = |copy: &Bound<'py, PyAny>, own: &Bound<'py, PyAny>| {
            known.insert(copy.as_ptr().addr(), own.clone());
        };
        for ((copy, _), (own, _)) in shown.dicts.iter().zip(&own_containers.dicts) {
            is_copy(copy.as_any(), own.as_any());
        }
        for ((copy, _), (own, _)) in shown.lists.iter().zip(&own_containers.lists) {
            is_copy(copy.as_any(), own.as_any());
        }
        for ((copy, _), (own, _)) in shown.dataclasses.iter().zip(&own_containers.dataclasses) {
            is_copy(copy, own);
        }
        let own_leaves = leaves(own)?;
        for (copy, own) in self.slots.iter().zip(&own_leaves) {
            is_copy(&copy.object, own);
        }
        for slot in self.changed() {
            let now = bridge::get(&self.slots[slot].object);
            let old = own_leaves
                .get(slot)
                .and_then(|own| Some((own, bridge::get(own)?)));
            if let (Some(now), Some((own, old))) = (now, old) {
                let now = now.as_dtype(old.dtype());
                bridge::assign(
                    own,
                    &now.map_err(|error| PyValueError::new_err(error.what().to_owned()))?,
                );
            }
        }
        let users = |object: Bound<'py, PyAny>| {
            let own = known.get(&object.as_ptr().addr());
            own.cloned().unwrap_or(object)
        };
        take_out(own, &self.taken_out())?;
        for ((copy, before), (own, _)) in shown.dicts.iter().zip(&own_containers.dicts) {
            for (key, value) in ordered::items(copy) {
                if !before.get_item(&key)?.is_some_and(|old| old.is(&value)) {
                    ordered::set_item(own, &key, &users(value))?;
                }
            }
        }
        for ((copy, before), (own, _)) in shown.lists.iter().zip(&own_containers.lists) {
            if !has_same(copy, before) {
                let items = PyList::new(own.py(), copy.iter().map(users))?;
                own.set_slice(0, own.len(), items.as_any())?;
            }
        }
        let set = own
            .py()
            .get_type::<PyAny>()
            .getattr(pyo3::intern!(own.py(), "__setattr__"))?;
        for ((copy, before), (own, _)) in shown.dataclasses.iter().zip(&own_containers.dataclasses)
        {
            for (name, old) in before {
                if let Some(now) = copy.getattr_opt(name)?.filter(|now| !now.is(old)) {
                    set.call1((own, name, users(now)))?;
                }
            }
        }
        Ok(())
    }
}

/// Take keys out of the dicts among the user's arguments.
pub fn take_out(own: &Bound<'_, PyAny>, taken: &TakenOut) -> PyResult<()> {
    if taken.is_empty() {
        return Ok(());
    }
    let containers = Containers::of(own);
    for (number, key) in taken {
        let key = key.bind(own.py());
        if let Some((dict, _)) = containers.dicts.get(*number) {
            if dict.contains(key)? {
                ordered::del_item(dict, key)?;
            }
        }
    }
    Ok(())
}

/// Return whether these are the same keys of the same dicts.
pub fn are_same(one: &TakenOut, other: &TakenOut, py: Python<'_>) -> bool {
    let mut pairs = one.iter().zip(other);
    one.len() == other.len()
        && pairs.all(|((a, key), (b, other))| {
            a == b && key.bind(py).eq(other.bind(py)).unwrap_or(false)
        })
}

/// Containers among arguments, in walking order, with what is in them.
#[derive(Default)]
struct Containers<'py> {
    dicts: Vec<(Bound<'py, PyDict>, Bound<'py, PyDict>)>,
    lists: Vec<(Bound<'py, PyList>, Bound<'py, PyList>)>,
    dataclasses: Vec<(Bound<'py, PyAny>, Vec<Field<'py>>)>,
}

type Field<'py> = (Bound<'py, PyString>, Bound<'py, PyAny>);

impl<'py> Containers<'py> {
    fn of(root: &Bound<'py, PyAny>) -> Self {
        let mut found = Self::default();
        walk(root.clone(), Place::Tuple, &mut found);
        found
    }

    // keys have been added, or are in another order; a list is another; anything has been replaced
    fn are_written_to(&self) -> bool {
        let dict = |(dict, before): &(Bound<'py, PyDict>, Bound<'py, PyDict>)| {
            if bridge::has_same_items(dict, before) {
                return false;
            }
            let now = ordered::items(dict);
            let mut left = ordered::items(before);
            left.retain(|(key, _)| dict.contains(key).unwrap_or(false));
            let mut pairs = now.iter().zip(&left);
            now.len() != left.len() || !pairs.all(|(now, old)| now.0.is(&old.0) && now.1.is(&old.1))
        };
        let dataclass = |(object, fields): &(Bound<'py, PyAny>, Vec<Field<'py>>)| {
            let mut fields = fields.iter();
            fields.any(|(name, before)| !object.getattr(name).is_ok_and(|now| now.is(before)))
        };
        self.dicts.iter().any(dict)
            || self
                .lists
                .iter()
                .any(|(now, before)| !has_same(now, before))
            || self.dataclasses.iter().any(dataclass)
    }
}

impl<'py> Visitor<'py> for Containers<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Dataclass {
            let values = fields(container)?.into_iter().map(|name| {
                let value = container.getattr(&name).ok()?;
                Some((name, value))
            });
            let values = values.collect::<Option<_>>()?;
            self.dataclasses.push((container.clone(), values));
        } else if let Ok(dict) = container.cast::<PyDict>() {
            let copy = PyDict::new(dict.py());
            for (key, value) in ordered::items(dict) {
                copy.set_item(key, value).ok()?;
            }
            self.dicts.push((dict.clone(), copy));
        } else if let Ok(list) = container.cast::<PyList>() {
            self.lists
                .push((list.clone(), list.get_slice(0, list.len())));
        }
        Some(())
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn takes_arguments(&self) -> bool {
        true
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}

fn has_same(one: &Bound<'_, PyList>, other: &Bound<'_, PyList>) -> bool {
    one.len() == other.len() && one.iter().zip(other.iter()).all(|(a, b)| a.is(&b))
}

// the arrays among arguments that stand alone or in tuples: MLX differentiates with copies of these, so that the plain loop
// forgets what is done to them in place
fn passing(arguments: &Bound<'_, PyAny>) -> HashSet<usize> {
    fn note(object: &Bound<'_, PyAny>, found: &mut HashSet<usize>) {
        if bridge::is_array(object) {
            found.insert(object.as_ptr().addr());
        } else if let Ok(tuple) = object.cast::<PyTuple>() {
            tuple.iter().for_each(|item| note(&item, found));
        }
    }
    let mut found = HashSet::new();
    if let Ok((positional, named)) = arguments.extract::<(Bound<'_, PyTuple>, Bound<'_, PyDict>)>()
    {
        note(positional.as_any(), &mut found);
        named
            .values()
            .iter()
            .for_each(|value| note(&value, &mut found));
    }
    found
}

/// Arguments as MLX shows them to a loss that it differentiates: other array objects, which stand in the user's dicts and lists
/// meanwhile. What the loss does to one of those in place stays there, and is not done to what else holds the user's.
#[derive(Default)]
pub struct Renewed<'py> {
    made: HashMap<usize, VecDeque<Bound<'py, PyAny>>>, // by the addresses of the user's: one for each place
    put: Vec<(Place<'py>, Bound<'py, PyAny>, Bound<'py, PyAny>)>, // with what stood there, and what stands there now
    ids: HashMap<usize, Option<usize>>,                           // of those that are shown
}

impl<'py> Renewed<'py> {
    /// The arguments; `shown`: what is shown for each of their arrays, in the order of a tree.
    pub fn take(
        &mut self,
        arguments: &Bound<'py, PyAny>,
        shown: &mut dyn FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        rebuild_where(arguments, is_one, &mut |object| {
            let shown = shown(object)?; // of NumPy's too, which the loss is given itself
            if bridge::is_array(object) {
                let made = self.made.entry(object.as_ptr().addr());
                made.or_default().push_back(shown);
            }
            Ok(object.clone())
        })?;
        let made = self.made.values().flatten();
        self.ids = made
            .map(|made| (made.as_ptr().addr(), bridge::id(made)))
            .collect();
        self.renew(arguments)
    }

    fn renew(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let made = self.made.get_mut(&object.as_ptr().addr());
        if let Some(made) = made.and_then(VecDeque::pop_front) {
            return Ok(made);
        }
        if let Ok(dict) = object.cast::<PyDict>() {
            if dict.is_exact_instance_of::<PyDict>() || !is_module(object) {
                for (key, value) in ordered::items(dict) {
                    let now = self.renew(&value)?;
                    self.put(Place::Dict(dict.clone(), key), value, now)?;
                }
            }
        } else if let Ok(list) = object.cast::<PyList>() {
            for (index, value) in list.iter().enumerate() {
                let now = self.renew(&value)?;
                self.put(Place::List(list.clone(), index), value, now)?;
            }
        } else if let Ok(tuple) = object.cast::<PyTuple>() {
            let items = tuple.iter().map(|item| self.renew(&item));
            let items = items.collect::<PyResult<Vec<_>>>()?;
            if !tuple.iter().zip(&items).all(|(old, now)| old.is(now)) {
                return again(tuple, items);
            }
        }
        Ok(object.clone())
    }

    fn put(
        &mut self,
        place: Place<'py>,
        old: Bound<'py, PyAny>,
        now: Bound<'py, PyAny>,
    ) -> PyResult<()> {
        if !now.is(&old) {
            place.set(&now)?;
            self.put.push((place, old, now));
        }
        Ok(())
    }

    /// Put the user's objects back where the loss has changed nothing.
    pub fn give_back(self) -> PyResult<()> {
        for (place, old, now) in &self.put {
            let stands = place.get()?.is_some_and(|it| it.is(now));
            if stands && !self.is_changed(now) {
                place.set(old)?;
            }
        }
        Ok(())
    }

    fn is_changed(&self, now: &Bound<'py, PyAny>) -> bool {
        if let Ok(tuple) = now.cast::<PyTuple>() {
            return tuple.iter().any(|item| self.is_changed(&item));
        }
        let id = self.ids.get(&now.as_ptr().addr());
        id.is_some_and(|id| *id != bridge::id(now))
    }
}

fn is_one(object: &Bound<'_, PyAny>) -> bool {
    bridge::is_array(object) || is_numeric(object)
}

// none where the loss has put something there that can be no argument
fn arrays<'py>(arguments: &Bound<'py, PyAny>) -> Vec<Slot<'py>> {
    let recorded = Tree::record_arguments(arguments);
    recorded.map_or_else(|_| Vec::new(), |recorded| recorded.slots)
}

// arrays and NumPy arrays
fn leaves<'py>(arguments: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let is_one = |object: &Bound<'_, PyAny>| bridge::is_array(object) || is_numpy(object);
    let mut leaves = Vec::new();
    rebuild_where(arguments, is_one, &mut |object| {
        leaves.push(object.clone());
        Ok(object.clone())
    })?;
    Ok(leaves)
}
