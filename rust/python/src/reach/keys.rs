//! The keys of a dict in their order, which a loss may go through.
use pyo3::{prelude::*, types::PyDict};

use crate::{
    mlx::{bridge, errors::answer},
    tree::{
        ordered,
        static_value::{equal, is_plain},
    },
};

/// Keys as they were when a loss was searched.
#[derive(Debug, Default)]
pub struct Keys {
    addresses: Vec<usize>,
    plain: Vec<Option<Py<PyAny>>>, // numbers and strings; no others, which are the user's objects
    held: Vec<bool>, // whether an object of a user's class is in the key, which may be equal to another one
    own: bool,       // the dict keeps an order of its own
}

impl Keys {
    /// Those of a dict.
    pub fn of(dict: &Bound<'_, PyDict>) -> Self {
        let keys = || ordered::items(dict).into_iter().map(|(key, _)| key);
        Self {
            addresses: keys().map(|key| key.as_ptr().addr()).collect(),
            plain: keys()
                .map(|key| is_plain(&key).then(|| key.unbind()))
                .collect(),
            held: keys().map(|key| holds_object(&key)).collect(),
            own: ordered::has_own_order(dict),
        }
    }

    /// Return whether these very objects are the keys, in this order, of which there are some; not of a dict with an order of its own.
    pub fn are(&self, keys: &[Py<PyAny>]) -> bool {
        let addresses = keys.iter().map(|key| key.as_ptr().addr());
        !self.own && !keys.is_empty() && self.addresses.iter().copied().eq(addresses)
    }

    /// Return whether a dict has these keys, in this order; equal numbers and strings are the same.
    pub fn are_of(&self, dict: &Bound<'_, PyDict>) -> bool {
        if !self.own && bridge::has_keys(dict, self.addresses.iter().copied()) {
            return true;
        }
        let py = dict.py();
        let items = ordered::items(dict).into_iter();
        let mut pairs = items
            .zip(&self.plain)
            .zip(self.held.iter().zip(&self.addresses));
        dict.len() == self.plain.len()
            && pairs.all(|(((key, _), known), (held, address))| match known {
                Some(known) => equal(known.bind(py), &key),
                None if *held => key.as_ptr().addr() == *address,
                None => !is_plain(&key),
            })
    }
}

fn holds_object(key: &Bound<'_, PyAny>) -> bool {
    let things = || key.py().import("faststep._step._things");
    let held = || things()?.call_method1("held", ((key,),))?.is_truthy();
    !is_plain(key) && answer(key.py(), held(), true)
}
