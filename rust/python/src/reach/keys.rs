//! The keys of a dict in their order, which a loss may go through.
use pyo3::{prelude::*, types::PyDict};

use crate::{
    mlx::bridge,
    tree::static_value::{equal, is_plain},
};

/// Keys as they were when a loss was searched.
#[derive(Debug, Default)]
pub struct Keys {
    addresses: Vec<usize>,
    plain: Vec<Option<Py<PyAny>>>, // numbers and strings; no others, which are the user's objects
}

impl Keys {
    /// Those of a dict.
    pub fn of(dict: &Bound<'_, PyDict>) -> Self {
        let keys = dict.iter().map(|(key, _)| key);
        Self {
            addresses: bridge::keys(dict),
            plain: keys
                .map(|key| is_plain(&key).then(|| key.unbind()))
                .collect(),
        }
    }

    /// Return whether these very objects are the keys, in this order, of which there are some.
    pub fn are(&self, keys: &[Py<PyAny>]) -> bool {
        let addresses = keys.iter().map(|key| key.as_ptr().addr());
        !keys.is_empty() && self.addresses.iter().copied().eq(addresses)
    }

    /// Return whether a dict has these keys, in this order; equal numbers and strings are the same.
    pub fn are_of(&self, dict: &Bound<'_, PyDict>) -> bool {
        if bridge::has_keys(dict, self.addresses.iter().copied()) {
            return true;
        }
        let py = dict.py();
        let mut pairs = dict.iter().zip(&self.plain);
        dict.len() == self.plain.len()
            && pairs.all(|((key, _), known)| match known {
                Some(known) => equal(known.bind(py), &key),
                None => !is_plain(&key),
            })
    }
}
