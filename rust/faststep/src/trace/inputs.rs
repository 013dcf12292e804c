//! The inputs of a step's function: what the engine gives away for the step, and lists that stay with whoever holds them.
use std::{
    ops::Deref,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use mlx_rs::Array;

use super::outputs::Outputs;
use crate::mlx::{
    array,
    ffi::{handles, Handle},
};

static VERSIONS: AtomicU64 = AtomicU64::new(1);

fn new_version() -> u64 {
    VERSIONS.fetch_add(1, Ordering::Relaxed)
}

/// Arrays that somebody holds between calls, which read them: none of them is copied for a call.
#[derive(Clone, Debug, Default)]
pub struct HeldArrays {
    arrays: Vec<Array>,
    ids: Vec<usize>,
    version: u64,
}

impl HeldArrays {
    /// Put an array at a place, or behind the last one.
    pub fn set(&mut self, index: usize, array: Array) {
        self.version = new_version();
        let id = array::id(&array);
        if index < self.arrays.len() {
            (self.arrays[index], self.ids[index]) = (array, id);
        } else {
            self.arrays.push(array);
            self.ids.push(id);
        }
    }

    /// Hold nothing at a place, until another array is put there.
    pub fn release(&mut self, index: usize) {
        self.version = new_version();
        (self.arrays[index], self.ids[index]) = (array::hollow(), 0);
    }

    /// The identities of the arrays' values; 0 where nothing is held.
    #[must_use]
    pub fn ids(&self) -> &[usize] {
        &self.ids
    }
}

impl Deref for HeldArrays {
    type Target = [Array];

    fn deref(&self) -> &[Array] {
        &self.arrays
    }
}

impl From<Vec<Array>> for HeldArrays {
    fn from(arrays: Vec<Array>) -> Self {
        Self {
            ids: arrays.iter().map(array::id).collect(),
            arrays,
            version: new_version(),
        }
    }
}

/// Arrays of a step that are not the engine's.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// The model's other arrays, and whatever else is given beside the batch: lists in this order.
    pub others: Vec<Rc<HeldArrays>>,
    /// The random key, then the arrays of the batch.
    pub rest: Vec<Array>,
}

impl Call {
    /// The arrays of all lists.
    pub fn others(&self) -> impl Iterator<Item = &Array> + Clone {
        self.others.iter().flat_map(|held| held.iter())
    }

    /// The first so many of them, some with other values, as the arguments of an update without a batch.
    #[must_use]
    pub fn of_update(&self, count: usize, set: &[(usize, Array)]) -> Self {
        if count == 0 {
            return Self::default();
        }
        let others = with(self.others().take(count), set);
        Self {
            others: vec![Rc::new(others.into())],
            rest: Vec::new(),
        }
    }

    /// The arguments of an update by the host's optimizer behind a batch: the model's other arrays, so many, and the random key.
    #[must_use]
    pub fn behind(&self, count: usize, batch: &Outputs) -> Self {
        let key = batch.key.as_ref().or(self.rest.first()).cloned();
        let mut call = self.of_update(count, &batch.others);
        call.rest.extend(key);
        call
    }

    /// The number of them.
    #[must_use]
    pub fn count_others(&self) -> usize {
        self.others.iter().map(|held| held.len()).sum()
    }
}

// a list of arrays with others in some places
pub(crate) fn with<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    set: &[(usize, Array)],
) -> Vec<Array> {
    let mut arrays: Vec<Array> = arrays.into_iter().cloned().collect();
    for (index, array) in set {
        if let Some(place) = arrays.get_mut(*index) {
            *place = array.clone();
        }
    }
    arrays
}

/// The inputs of a step's function, in order.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    /// Those of which nobody else is to have a handle: parameters, shared buffers, state.
    pub own: Vec<Array>,
    /// Those behind them.
    pub call: Call,
}

/// Lists that a function's inputs have had, by which the same are known again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Versions(Vec<u64>);

impl Inputs {
    pub fn iter(&self) -> impl Iterator<Item = &Array> {
        let call = self.call.others().chain(&self.call.rest);
        self.own.iter().chain(call)
    }

    /// A list of all of them.
    pub fn all(&self) -> Vec<Array> {
        self.iter().cloned().collect()
    }

    /// Their handles, and which of them are in lists that are held: the first, and how many.
    pub fn handles(&self) -> (Vec<Handle>, usize, usize) {
        let held = self.call.count_others();
        let mut all = Vec::with_capacity(self.own.len() + held + self.call.rest.len());
        all.extend(handles(&self.own));
        for held in &self.call.others {
            all.extend(handles(held.iter()));
        }
        all.extend(handles(&self.call.rest));
        (all, self.own.len(), held)
    }

    /// What the held lists are known by.
    pub fn versions(&self) -> Versions {
        Versions(self.call.others.iter().map(|held| held.version).collect())
    }
}

impl From<Vec<Array>> for Inputs {
    fn from(own: Vec<Array>) -> Self {
        Self {
            own,
            call: Call::default(),
        }
    }
}
