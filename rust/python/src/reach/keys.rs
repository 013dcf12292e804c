//! The keys of a dict in their order, which a loss may go through.
use pyo3::{prelude::*, types::PyDict};

use crate::{
    mlx::{bridge, errors::answer},
    tree::{
        ordered,
        static_value::{equal, is_fixed},
    },
};

/// Keys as they were when a loss was searched.
#[derive(Debug, Default)]
pub struct Keys {
    known: Vec<(usize, Key)>, // by their addresses
    own: bool,                // the dict keeps an order of its own
}

/// What is known of a key.
#[derive(Debug)]
enum Key {
    /// A number, a string or a tuple of them, for which an equal one may stand.
    Plain(Py<PyAny>),
    /// One with an object of a user's class in it, for which none that is equal may stand.
    Object,
    /// Any other.
    Other,
}

impl Key {
    fn of(key: &Bound<'_, PyAny>) -> Self {
        if is_fixed(key) {
            return Self::Plain(key.clone().unbind());
        }
        let things = || key.py().import("faststep._step._things");
        let held = || things()?.call_method1("held", ((key,),))?.is_truthy();
        if answer(key.py(), held(), true) {
            Self::Object
        } else {
            Self::Other
        }
    }
}

impl Keys {
    /// Those of a dict.
    pub fn of(dict: &Bound<'_, PyDict>) -> Self {
        let keys = ordered::items(dict).into_iter().map(|(key, _)| key);
        Self {
            known: keys
                .map(|key| (key.as_ptr().addr(), Key::of(&key)))
                .collect(),
            own: ordered::has_own_order(dict),
        }
    }

    /// Return whether these very objects are the keys, in this order, of which there are some; not of a dict with an order of its own.
    pub fn are(&self, keys: &[Py<PyAny>]) -> bool {
        let addresses = keys.iter().map(|key| key.as_ptr().addr());
        !self.own && !keys.is_empty() && self.addresses().eq(addresses)
    }

    /// Return whether a dict has these keys, in this order; equal numbers and strings are the same.
    pub fn are_of(&self, dict: &Bound<'_, PyDict>) -> bool {
        if !self.own && bridge::has_keys(dict, self.addresses()) {
            return true;
        }
        let mut pairs = ordered::items(dict).into_iter().zip(&self.known);
        dict.len() == self.known.len()
            && pairs.all(|((key, _), (address, known))| match known {
                Key::Plain(known) => equal(known.bind(dict.py()), &key),
                Key::Object => key.as_ptr().addr() == *address,
                Key::Other => !is_fixed(&key),
            })
    }

    fn addresses(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.known.iter().map(|(address, _)| *address)
    }
}
