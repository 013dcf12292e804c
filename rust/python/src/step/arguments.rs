//! The arguments of one call: their arrays, and the names that the user gives them.
use std::{collections::HashMap, rc::Rc};

use mlx_rs::{transforms::eval, Array};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    intern,
    prelude::*,
    types::PyTuple,
};

use crate::{
    mlx::{bridge, classes::is_numeric, gil::unlocked},
    tree::{rebuild::replace, slot::Slot, RecordedArguments, Tree},
};

/// Arguments of one call: in Python a tuple of these.
pub struct Arguments<'py> {
    /// The model.
    pub model: Bound<'py, PyAny>,
    /// The optimizer.
    pub optimizer: Bound<'py, PyAny>,
    /// The loss function; `None` where only a window is flushed.
    pub loss_fn: Bound<'py, PyAny>,
    /// The positional arguments and a dict of the named ones, as the loss gets them.
    pub passed: Bound<'py, PyTuple>,
}

impl<'py> FromPyObject<'_, 'py> for Arguments<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (model, optimizer, loss_fn, passed) = object.extract()?;
        Ok(Self {
            model,
            optimizer,
            loss_fn,
            passed,
        })
    }
}

/// The arguments of one call.
pub struct Batch<'py> {
    /// Their structure.
    pub tree: Rc<Tree>,
    /// Their arrays.
    pub arrays: Vec<Array>,
    /// Modules and other objects among them, which a loss may reach into.
    pub objects: Vec<Bound<'py, PyAny>>,
    /// References to these objects, for keys.
    pub kept: Rc<Vec<Py<PyAny>>>,
    /// Arrays that are one object: the number of each, and of the first one.
    pub aliases: Rc<Vec<(usize, usize)>>,
    /// True if there are NumPy arrays among them, which the loss gets as they are.
    pub numpy: bool,
}

// arrays of which an earlier one is the same object
fn aliases(slots: &[Slot<'_>]) -> Vec<(usize, usize)> {
    let mut first = HashMap::with_capacity(slots.len());
    let slots = slots.iter().enumerate();
    let earlier = slots.filter_map(|(number, slot)| {
        let known = *first.entry(slot.object.as_ptr().addr()).or_insert(number);
        (known != number).then_some((number, known))
    });
    earlier.collect()
}

impl<'py> Arguments<'py> {
    /// The token of the GIL.
    pub fn py(&self) -> Python<'py> {
        self.model.py()
    }

    /// Pass NumPy arrays as `mx.array`s.
    pub fn convert_numpy(&mut self) -> PyResult<()> {
        let mlx = self.py().import("mlx.core")?;
        let converted = replace(self.passed.as_any(), is_numeric, &mut |array| {
            mlx.call_method1(intern!(array.py(), "array"), (array,))
        })?;
        self.passed = converted.cast_into()?;
        Ok(())
    }

    /// The batch; none of its arrays may wait for another thread, and files are read here, where nothing has changed yet.
    pub fn batch(&mut self) -> PyResult<Batch<'py>> {
        let py = self.py();
        let RecordedArguments {
            tree,
            slots,
            objects,
            numpy,
        } = Tree::record_arguments(self.passed.as_any())?;
        let aliases = Rc::new(aliases(&slots));
        let arrays: Vec<Array> = slots
            .iter()
            .filter_map(|slot| bridge::get(&slot.object))
            .collect();
        for (index, array) in arrays.iter().enumerate() {
            if faststep::engine::array::is_lazy(array) && faststep::engine::array::is_foreign(array)
            {
                return Err(PyValueError::new_err(format!(
                    "argument {}: expected an evaluated array, got one that still waits to be computed on another \
                     thread: call mx.eval() on it in the thread that makes it, before it is passed on",
                    self.name(&tree.paths(py)[index])
                )));
            }
            if faststep::engine::array::reads_file(array) {
                unlocked(py, || eval([array])).map_err(|error| {
                    let name = self.name(&tree.paths(py)[index]);
                    PyRuntimeError::new_err(format!("argument {name}: {}", error.what()))
                })?;
            }
        }
        Ok(Batch {
            tree: Rc::new(tree),
            arrays,
            kept: Rc::new(objects.iter().map(|it| it.clone().unbind()).collect()),
            objects,
            aliases,
            numpy,
        })
    }

    /// The name of an array of a batch, by its number; of a batch of another form that number.
    pub fn name_in(&self, batch: &Batch<'_>, number: usize) -> String {
        match batch.tree.paths(self.py()).get(number) {
            Some(path) => self.name(path),
            None => number.to_string(),
        }
    }

    /// A path as the loss function names it: `x`, or `batch["tokens"][0]`.
    pub fn name(&self, path: &[String]) -> String {
        let mut parts = path.iter();
        let positional = parts.next().is_some_and(|first| first == "0");
        let Some(first) = parts.next() else {
            return "(the batch)".into();
        };
        let mut name = first.clone();
        if let (true, Ok(index)) = (positional, first.parse::<usize>()) {
            name = self
                .parameter(index + 1)
                .unwrap_or_else(|_| format!("{index}"));
        }
        for part in parts {
            let part = if part.parse::<usize>().is_ok() {
                format!("[{part}]")
            } else {
                format!("[{part:?}]")
            };
            name.push_str(&part);
        }
        name
    }

    fn parameter(&self, index: usize) -> PyResult<String> {
        let inspect = self.py().import("inspect")?;
        let signature = inspect.call_method1("signature", (&self.loss_fn,))?;
        let names = signature.getattr("parameters")?.try_iter()?;
        let names = names
            .map(|name| name?.extract())
            .collect::<PyResult<Vec<String>>>()?;
        let missing = || PyValueError::new_err("more arguments than the loss function has");
        names.into_iter().nth(index).ok_or_else(missing)
    }
}
