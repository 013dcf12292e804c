//! The arguments of one call: their arrays, and the names that the user gives them.
use std::{cell::RefCell, rc::Rc};

use mlx_rs::{transforms::eval, Array};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    intern,
    prelude::*,
    types::PyTuple,
};

use crate::{
    mlx::{bridge, classes::is_numeric, gil::unlocked},
    reach::Before,
    tree::{
        rebuild::rebuild_where,
        slot::{Place, Slot},
        RecordedArguments, Tree,
    },
};

/// Arguments of one call: in Python a tuple of these.
pub struct Arguments<'py> {
    /// The model.
    pub model: Bound<'py, PyAny>,
    /// The optimizer.
    pub optimizer: Bound<'py, PyAny>,
    /// The loss function; `None` where only a window is flushed.
    pub loss_fn: Bound<'py, PyAny>,
    /// The positional arguments and a dict of the named ones.
    pub passed: Bound<'py, PyTuple>,
    /// The same with the user's own containers and NumPy arrays.
    pub own: Bound<'py, PyTuple>,
    /// What there was before the loss is called in this call, where its batch may be skipped.
    pub before: RefCell<Option<Before<'py>>>,
    /// The same of an update by the optimizer's own code, before that is traced.
    pub before_update: RefCell<Option<Before<'py>>>,
}

impl<'py> FromPyObject<'_, 'py> for Arguments<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (model, optimizer, loss_fn, passed): (_, _, _, Bound<'py, PyTuple>) =
            object.extract()?;
        Ok(Self {
            model,
            optimizer,
            loss_fn,
            own: passed.clone(),
            passed,
            before: RefCell::default(),
            before_update: RefCell::default(),
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
    /// The addresses of the user's own containers among them.
    pub containers: Rc<Vec<usize>>,
    /// Those of the dicts and lists in which there are arrays.
    pub holders: Vec<usize>,
}

// the addresses of the dicts and lists in which arrays stand
fn holders(slots: &[Slot<'_>]) -> Vec<usize> {
    let holders = slots.iter().filter_map(|slot| match &slot.place {
        Place::Dict(dict, _) => Some(dict.as_ptr().addr()),
        Place::List(list, _) => Some(list.as_ptr().addr()),
        Place::Tuple | Place::Nth(..) => None,
    });
    let mut holders: Vec<usize> = holders.collect();
    holders.dedup();
    holders
}

fn is_one(object: &Bound<'_, PyAny>) -> bool {
    bridge::is_array(object) || is_numeric(object)
}

impl<'py> Arguments<'py> {
    /// The token of the GIL.
    pub fn py(&self) -> Python<'py> {
        self.model.py()
    }

    /// The batch; none of its arrays may wait for another thread, and files are read here, where nothing has changed yet.
    pub fn batch(&mut self) -> PyResult<Batch<'py>> {
        let py = self.py();
        let mut found = Tree::record_arguments(self.passed.as_any())?;
        let containers = found.tree.containers();
        let holders = holders(&found.slots);
        if found.numpy {
            let mlx = py.import("mlx.core")?;
            let (mut numpy, mut number) = (Vec::new(), 0);
            let converted = rebuild_where(self.passed.as_any(), is_one, &mut |array| {
                number += 1;
                if bridge::is_array(array) {
                    return Ok(array.clone());
                }
                let dtype = array.getattr(intern!(py, "dtype"))?;
                numpy.push((number, dtype.getattr(intern!(py, "num"))?.extract()?));
                mlx.call_method1("array", (array,))
            })?;
            self.passed = converted.cast_into()?;
            found = Tree::record_arguments(self.passed.as_any())?;
            found.tree.numpy = numpy;
        }
        let RecordedArguments {
            tree,
            slots,
            objects,
            ..
        } = found;
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
            objects,
            containers,
            holders,
        })
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
