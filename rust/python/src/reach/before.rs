//! Objects as they are before a loss is called, or an update, to be put back.
use std::rc::Rc;

use mlx_rs::Array;
use pyo3::prelude::*;

use super::{
    looked::References,
    suspect::{changes, Drawable},
    Looked,
};
use crate::{mlx::bridge, tree::snapshot::Snapshot};

/// What a loss may change that is none of the model's arrays, or an update beside the optimizer's.
pub struct Before<'py> {
    looked: Rc<Looked>,
    root: Snapshot<'py>,
    reached: Snapshot<'py>,
    copies: Vec<(usize, Bound<'py, PyAny>)>,
    arrays: Vec<(Bound<'py, PyAny>, Array)>,
    drawable: Drawable,
    references: Rc<References>, // of this
}

impl<'py> Before<'py> {
    /// Before a loss, or an update. `root`: the model, or the optimizer.
    pub fn of(
        model: &Bound<'py, PyAny>,
        root: &Bound<'py, PyAny>,
        looked: &Rc<Looked>,
    ) -> PyResult<Self> {
        let py = model.py();
        let arrays = looked.spots(py)?.into_iter().map(|spot| {
            let array = bridge::get(&spot.object);
            array.map(|array| (spot.object, array))
        });
        let root = Snapshot::take(root)?;
        let mut reached = looked.snapshot(&root, py)?;
        let mut arrays: Vec<_> = arrays.flatten().collect();
        let others = std::mem::take(&mut reached.arrays).into_iter();
        arrays
            .extend(others.filter_map(|object| bridge::get(&object).map(|array| (object, array))));
        Ok(Self {
            root,
            reached,
            copies: looked.copies(py)?,
            arrays,
            drawable: Drawable::before(model, looked)?,
            looked: looked.clone(),
            references: Rc::default(),
        })
    }

    /// Return whether something may be missing that a search would find.
    pub fn is_partial(&self) -> bool {
        self.reached.is_partial
    }

    /// Make known to what this refers: of an array that a trace takes out of its place it is asked whether somebody else does.
    pub fn note_references(&mut self) {
        let mut references = References::new();
        for (object, _) in &self.arrays {
            *references.entry(object.as_ptr().addr()).or_insert(0) += 1;
        }
        for snapshot in [&self.root, &self.reached] {
            for object in snapshot.objects() {
                *references.entry(object.as_ptr().addr()).or_insert(0) += 1;
            }
        }
        self.references = Rc::new(references);
        self.looked.program.alive.note_others(&self.references);
    }

    /// Hold the arrays of the root no more: their memory is about to be used again.
    pub fn let_go(&mut self, py: Python<'py>) -> PyResult<()> {
        self.root.let_go(py)
    }

    /// Return whether the loss has changed anything, but for the values of the model's arrays.
    pub fn has_changed(&self, py: Python<'_>) -> PyResult<bool> {
        let mut arrays = self.arrays.iter();
        let in_place = arrays
            .any(|(object, array)| bridge::id(object) != Some(faststep::engine::array::id(array)));
        Ok(in_place
            || self.root.has_changed()?
            || self.reached.has_changed()?
            || self.looked.has_changed(py)?)
    }

    /// The batch has been skipped: put everything back, but for the model's arrays and what has been drawn.
    pub fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        self.root.restore()?;
        self.looked.restore(py, &self.reached, &self.copies)?;
        self.put_back_arrays();
        Ok(())
    }

    fn put_back_arrays(&self) {
        for (object, array) in &self.arrays {
            if bridge::id(object) != Some(faststep::engine::array::id(array)) {
                bridge::assign(object, array);
            }
        }
    }

    /// The loss has been called on trial: put everything back. Returns the names of generators and iterators for which that cannot
    /// be done.
    pub fn restore(self, py: Python<'_>) -> PyResult<Vec<String>> {
        for mut change in changes(&self.root, true)? {
            change.swap(py)?;
        }
        self.root.forget_new()?;
        self.looked.restore(py, &self.reached, &self.copies)?;
        self.put_back_arrays();
        self.drawable.put_back(py)?;
        self.drawable.moved(py, true)
    }
}
