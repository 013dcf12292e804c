//! NumPy arrays among the arguments, which a trace shows to a loss as arrays of MLX's: whether that matters to it.
use mlx_rs::{transforms::eval, Array};
use pyo3::{exceptions::PyException, intern, prelude::*, types::PyTuple};

use super::{arguments::Arguments, run::Given, undisturbed::undisturbed, Inner};
use crate::{
    mlx::{bridge, classes::is_numpy, errors::mlx, gil::unlocked},
    reach::{
        suspect::{Drawable, Effects, Imports},
        Reached,
    },
    store::Store,
    tree::{rebuild::rebuild_where, snapshot::Snapshot, Tree},
};

/// For so many traces it is looked at.
const MAX_LOOKS: usize = 8;

/// Relative difference of two losses up to which one differs from the other by rounding: MLX computes in half the bits.
const ROUNDING: f64 = 1e-5;

/// What has been seen of a loss with NumPy arrays among its arguments.
#[derive(Default)]
pub(super) struct SeenNumpy {
    looks: usize,
    /// True if it can be called with these themselves, as which it is shown them uncompiled; else with arrays of MLX's.
    pub(super) takes_own: bool,
}

impl Inner {
    /// Before a trace is made, or an uncompiled step is taken: the reason why the loss is to be shown NumPy's arrays themselves. It is
    /// called with both, and what it does is taken back.
    pub(super) fn takes_numpy<'py>(
        &mut self,
        store: &Store,
        user: &Arguments<'py>,
        given: &Given,
    ) -> PyResult<Option<String>> {
        let mixed = self.options.compute_dtype.is_some();
        if mixed || user.passed.is(&user.own) || self.numpy.looks == MAX_LOOKS {
            return Ok(None);
        }
        if !given.looked.is_known
            || Drawable::before(&user.model, &given.looked)?.stay(user.py())?
        {
            return Ok(None); // what it changes or takes from a generator function could not be put back
        }
        self.numpy.looks += 1;
        let value = |arguments: &Bound<'py, PyTuple>| value(store, user, given, arguments);
        let Some(own) = undisturbed(user.py(), || value(&user.own))? else {
            return Ok(None); // with which it raises
        };
        self.numpy.takes_own = true;
        let shown = undisturbed(user.py(), || value(&user.passed))?;
        let same = shown.is_some_and(|shown| {
            let rounding = ROUNDING * own.abs().max(shown.abs());
            shown.to_bits() == own.to_bits()
                || (shown.is_nan() && own.is_nan())
                || (shown - own).abs() <= rounding
        });
        Ok((!same).then(|| {
            "it computes something else with the NumPy arrays among its arguments than with arrays of MLX's: pass mx.array(...)"
                .into()
        }))
    }
}

// the loss with these arguments; none where it raises, or would write to a file or import a module of the user's
fn value<'py>(
    store: &Store,
    user: &Arguments<'py>,
    given: &Given,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Option<f64>> {
    let py = user.py();
    let is_one = |object: &Bound<'_, PyAny>| bridge::is_array(object) || is_numpy(object);
    let copies = rebuild_where(
        arguments.as_any(),
        is_one,
        &mut |object| match bridge::get(object) {
            Some(array) => bridge::wrap(py, &array),
            None => copy(object),
        },
    )?;
    let drawable = Drawable::before(&user.model, &given.looked)?;
    let keys = store.key_list.bind(py);
    let key = keys.get_item(0)?;
    let snapshot = Snapshot::take(&user.model)?;
    for slot in Tree::of_model(&user.model)?.1 {
        if let Some(array) = bridge::get(&slot.object) {
            slot.place.set(&bridge::wrap(py, &array)?)?; // what the loss does to it in place is not done to the user's
        }
    }
    let arrays = &given.looked.arrays;
    let reached = Reached::new(py, given.looked.clone(), 0, (true, false), arrays)?;
    let (effects, imports) = (
        Effects::begin(py, Some(Vec::new()), true, &drawable)?,
        Imports::begin(py)?,
    );
    let called = call(user, &copies);
    let writes = effects.found();
    drop((effects, imports));
    let outcome = called.and_then(|loss| {
        let loss = bridge::get(&loss).filter(|loss| loss.ndim() == 0);
        loss.map(|loss| read(py, &loss)).transpose()
    });
    given.looked.forget_results(py)?;
    let reached_again = reached.restore(py, false);
    let model_again = snapshot.restore();
    keys.set_item(0, key)?;
    drawable.put_back(py)?;
    reached_again.and(model_again)?;
    match outcome {
        Err(_) if !writes?.0.is_empty() => Ok(None),
        Err(error) if Imports::first(&error, py)?.is_some() => Ok(None),
        Err(error) if !error.is_instance_of::<PyException>(py) => Err(error),
        outcome => Ok(outcome.ok().flatten()),
    }
}

// of an array of a subclass with its attributes
fn copy<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let copy = array.call_method0(intern!(py, "copy"))?;
    let attributes = intern!(py, "__dict__");
    if let (Some(own), Some(new)) = (
        array.getattr_opt(attributes)?,
        copy.getattr_opt(attributes)?,
    ) {
        new.call_method1(intern!(py, "update"), (own,))?;
    }
    Ok(copy)
}

fn call<'py>(user: &Arguments<'py>, arguments: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let (positional, named): (Bound<'py, PyTuple>, _) = arguments.extract()?;
    let mut all = vec![user.model.clone()];
    all.extend(positional.iter());
    let returned = user
        .loss_fn
        .call(PyTuple::new(user.py(), all)?, Some(&named))?;
    match returned.cast::<PyTuple>() {
        Ok(values) => values.get_item(0),
        Err(_) => Ok(returned),
    }
}

fn read(py: Python<'_>, loss: &Array) -> PyResult<f64> {
    let wide = loss.as_dtype(mlx_rs::Dtype::Float32).map_err(mlx)?;
    unlocked(py, || eval([&wide])).map_err(mlx)?;
    Ok(f64::from(wide.item_exact::<f32>()))
}
