//! Dicts and lists of the model in whose places a loss puts others, which a trace repeats.
use std::collections::HashMap;

use faststep::engine::Role;
use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::{
    slot::{Place, Slot},
    snapshot::Snapshot,
    static_value::{equal, is_plain},
    walk::Scope,
    Tree,
};
use crate::mlx::{bridge, classes::is_module};

/// A dict or list that the loss replaces: the numbers of the model's arrays in it, and how many keys of the path of the first lead from
/// it to that array.
#[derive(Debug, PartialEq)]
pub struct Renewed {
    slots: Vec<usize>,
    depth: usize,
}

/// One that the loss has replaced, which has been put back.
pub struct Taken<'py> {
    /// The one that was there.
    pub renewed: Renewed,
    /// The numbers and texts of the other one.
    pub values: Bound<'py, PyTuple>,
    /// Whether these are others than those that were there.
    pub changes: bool,
}

/// What is in a dict or list that has taken the place of one of the same form.
#[derive(Default)]
struct Items<'py> {
    arrays: Vec<(Place<'py>, Bound<'py, PyAny>)>, // where each would stand in the old one, and the new one's
    depths: Vec<usize>,
    values: Vec<Bound<'py, PyAny>>,
    changes: bool, // the values are others
}

/// A dict or list of an optimizer that its update replaces by another one: its path, and its address. A step goes on with the one that
/// is there; where somebody else holds that, a copy comes to its place first.
pub struct Remade {
    path: Vec<String>,
    address: usize,
}

impl Remade {
    /// Those of dicts and lists: the addresses of `known` ones, and others.
    pub fn of(
        optimizer: &Bound<'_, PyAny>,
        replaced: &[Bound<'_, PyAny>],
        known: &[usize],
    ) -> PyResult<(Vec<usize>, Vec<Self>)> {
        let address = |container: &Bound<'_, PyAny>| container.as_ptr().addr();
        let is_known = |container: &&Bound<'_, PyAny>| known.contains(&address(container));
        let (again, new): (Vec<_>, Vec<_>) = replaced.iter().partition(is_known);
        let again = again.into_iter().map(address).collect();
        let mut found = Vec::new();
        if new.is_empty() {
            return Ok((again, found));
        }
        let paths = Tree::record(optimizer, Scope::Whole)?
            .0
            .paths(optimizer.py());
        for container in new {
            let address = address(container);
            let is_there = |path: &&[String]| {
                let object = Place::at(optimizer, path).and_then(|place| place.get().ok()?);
                object.is_some_and(|object| object.is(container))
            };
            let ends = |path: &'_ Vec<String>| 1..path.len();
            let mut all = paths
                .iter()
                .flat_map(|path| ends(path).map(move |end| &path[..end]));
            if let Some(path) = all.find(is_there) {
                let path = path.to_vec();
                found.push(Self { path, address });
            }
        }
        Ok((again, found))
    }

    /// Its address.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Return whether somebody holds it, or a dict or list in it, of whom is not `known` how often they refer to what.
    pub fn is_shared(&self, optimizer: &Bound<'_, PyAny>, known: &HashMap<usize, isize>) -> bool {
        let place = Place::at(optimizer, &self.path);
        let there = place.and_then(|place| place.get().ok()?);
        there.is_some_and(|container| is_shared(&container, known))
    }

    /// Put a copy in its place where somebody else holds it. Adds the copies, also of what is in it, by the addresses of the old ones.
    pub fn unshare<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        known: &HashMap<usize, isize>,
        copies: &mut Copies<'py>,
    ) -> PyResult<()> {
        let Some(place) = Place::at(optimizer, &self.path) else {
            return Ok(());
        };
        let Some(old) = place.get()? else {
            return Ok(());
        };
        self.address = old.as_ptr().addr();
        if is_shared(&old, known) {
            let new = renewed(&old, &mut std::iter::empty(), copies)?;
            place.set(&new)?;
            self.address = new.as_ptr().addr();
        }
        Ok(())
    }
}

/// Copies of dicts and lists, by the addresses of those.
pub type Copies<'py> = HashMap<usize, Bound<'py, PyAny>>;

// whether more refer to a container than its place, those that are known and the one that asks
fn is_shared(container: &Bound<'_, PyAny>, known: &HashMap<usize, isize>) -> bool {
    let held = known.get(&container.as_ptr().addr()).copied();
    if bridge::refcount(container) > 2 + held.unwrap_or(0) {
        return contents(container).is_some();
    }
    let mut items = contents(container).unwrap_or_default().into_iter();
    items.any(|(.., item)| contents(&item).is_some() && is_shared(&item, known))
}

/// Put dicts and lists back that the loss has replaced by others of the same form, with the arrays of the new ones.
pub fn take_back<'py>(model: &Snapshot<'py>, slots: &[Slot<'py>]) -> PyResult<Vec<Taken<'py>>> {
    let mut found = Vec::new();
    for (place, before, now) in model.replaced()? {
        let mut items = Items::default();
        if !has_form(&before, &now, 1, &mut items)? || items.arrays.is_empty() {
            continue;
        }
        let numbers = items.arrays.iter().map(|(place, _)| {
            let mut at = slots.iter().enumerate();
            let first = at.find(|(_, slot)| slot.place.is(place))?.0;
            // of one that stands at two places, the other one stays
            (!at.any(|(_, slot)| slot.place.is(place))).then_some(first)
        });
        let Some(numbers) = numbers.collect::<Option<Vec<usize>>>() else {
            continue;
        };
        for (place, array) in &items.arrays {
            place.set(array)?;
        }
        place.set(&before)?;
        let renewed = Renewed {
            slots: numbers,
            depth: items.depths[0],
        };
        found.push(Taken {
            renewed,
            values: PyTuple::new(before.py(), items.values)?,
            changes: items.changes,
        });
    }
    Ok(found)
}

// true if both have the same keys and are made up alike; what is in the new one is gathered
fn has_form<'py>(
    old: &Bound<'py, PyAny>,
    now: &Bound<'py, PyAny>,
    depth: usize,
    items: &mut Items<'py>,
) -> PyResult<bool> {
    let (old_items, now_items) = (contents(old), contents(now));
    let (Some(old_items), Some(now_items)) = (old_items, now_items) else {
        return Ok(false);
    };
    if old.is(now) || !old.get_type().is(now.get_type()) || old_items.len() != now_items.len() {
        return Ok(false);
    }
    for ((key, place, old), (other, _, now)) in old_items.into_iter().zip(now_items) {
        if !equal(&key, &other) {
            return Ok(false);
        }
        if bridge::is_array(&now) {
            if !bridge::is_array(&old) {
                return Ok(false);
            }
            items.arrays.push((place, now));
            items.depths.push(depth);
        } else if is_plain(&now) {
            if !is_plain(&old) {
                return Ok(false);
            }
            items.changes |= !equal(&old, &now);
            items.values.push(now);
        } else if contents(&now).is_some() {
            if !has_form(&old, &now, depth + 1, items)? {
                return Ok(false);
            }
        } else if !old.is(&now) {
            return Ok(false);
        }
    }
    Ok(true)
}

type Contents<'py> = Vec<(Bound<'py, PyAny>, Place<'py>, Bound<'py, PyAny>)>;

// keys, places and items of a dict or list of no class of the user's
fn contents<'py>(object: &Bound<'py, PyAny>) -> Option<Contents<'py>> {
    if let Ok(dict) = object.cast_exact::<PyDict>() {
        let items = dict.iter().map(|(key, value)| {
            let place = Place::Dict(dict.clone(), key.clone());
            (key, place, value)
        });
        return Some(items.collect());
    }
    let list = object.cast_exact::<PyList>().ok()?;
    let items = list.iter().enumerate().map(|(at, value)| {
        let key = at.into_pyobject(list.py()).ok()?.into_any();
        Some((key, Place::List(list.clone(), at), value))
    });
    items.collect()
}

impl Renewed {
    /// Put another dict or list in the place of this one, with other arrays and these numbers and texts. `paths`: of the model's
    /// arrays, with their roles. Returns the numbers of its slots.
    pub fn show<'py>(
        &self,
        model: &Bound<'py, PyAny>,
        paths: &[(Role, Vec<String>)],
        values: Option<&Bound<'py, PyTuple>>,
        others: &[&(usize, Array)],
    ) -> PyResult<&[usize]> {
        let (_, path) = &paths[self.slots[0]];
        let above = path.len() - self.depth;
        let Some(place) = Place::at(model, &path[..above]) else {
            return Ok(&[]);
        };
        let Some(old) = place.get()? else {
            return Ok(&[]);
        };
        let new = renewed(&old, &mut values.into_iter().flatten(), &mut Copies::new())?;
        for &slot in &self.slots {
            let (role, path) = &paths[slot];
            let made = others
                .iter()
                .find(|(index, _)| *role == Role::Other(*index));
            let place = Place::at(&new, &path[above..]);
            if let (Some((_, array)), Some(place)) = (made, place) {
                place.set(&bridge::wrap(model.py(), array)?)?;
            }
        }
        place.set(&new)?;
        Ok(&self.slots)
    }
}

// a copy, with other numbers and texts
fn renewed<'py>(
    old: &Bound<'py, PyAny>,
    values: &mut dyn Iterator<Item = Bound<'py, PyAny>>,
    copies: &mut Copies<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = old.py();
    let mut items = Vec::new();
    for (key, _, item) in contents(old).unwrap_or_default() {
        let item = if is_plain(&item) {
            values.next().unwrap_or(item)
        } else if contents(&item).is_some() && !is_module(&item) {
            renewed(&item, values, copies)?
        } else {
            item
        };
        items.push((key, item));
    }
    let new = if old.is_instance_of::<PyList>() {
        let items = items.into_iter().map(|(_, item)| item);
        PyList::new(py, items)?.into_any()
    } else {
        let new = PyDict::new(py);
        for (key, item) in items {
            new.set_item(key, item)?;
        }
        new.into_any()
    };
    copies.insert(old.as_ptr().addr(), new.clone());
    Ok(new)
}
