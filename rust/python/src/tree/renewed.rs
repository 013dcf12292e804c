//! Dicts and lists of the model in whose places a loss puts others, which a trace repeats.
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
        let new = renewed(&old, &mut values.into_iter().flatten())?;
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
) -> PyResult<Bound<'py, PyAny>> {
    let py = old.py();
    let mut items = Vec::new();
    for (key, _, item) in contents(old).unwrap_or_default() {
        let item = if is_plain(&item) {
            values.next().unwrap_or(item)
        } else if contents(&item).is_some() && !is_module(&item) {
            renewed(&item, values)?
        } else {
            item
        };
        items.push((key, item));
    }
    if old.is_instance_of::<PyList>() {
        let items = items.into_iter().map(|(_, item)| item);
        return Ok(PyList::new(py, items)?.into_any());
    }
    let new = PyDict::new(py);
    for (key, item) in items {
        new.set_item(key, item)?;
    }
    Ok(new.into_any())
}
