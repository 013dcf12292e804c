//! Tests for classes of MLX and NumPy, and `OrderedDict`.
use pyo3::{intern, prelude::*, sync::PyOnceLock, types::PyType};

use super::bridge;

type Class = PyOnceLock<Py<PyType>>;

fn class<'py>(
    py: Python<'py>,
    cell: &'static Class,
    module: &str,
    name: &str,
) -> Option<&'py Bound<'py, PyType>> {
    cell.import(py, module, name).ok()
}

fn is_of(object: &Bound<'_, PyAny>, cell: &'static Class, module: &str, name: &str) -> bool {
    class(object.py(), cell, module, name).is_some_and(|class| bridge::is_of(object, class))
}

static MODULE: Class = PyOnceLock::new();

/// Return whether the object is an `nn.Module`.
pub fn is_module(object: &Bound<'_, PyAny>) -> bool {
    is_of(object, &MODULE, "mlx.nn", "Module")
}

/// Return whether a module has other methods of these names than `nn.Module`.
pub fn has_own_methods(module: &Bound<'_, PyAny>, names: &[&str]) -> bool {
    let Some(class) = class(module.py(), &MODULE, "mlx.nn", "Module") else {
        return false;
    };
    let is_own = |name: &&str| -> PyResult<bool> {
        let method = module.getattr(*name)?;
        let function = method.getattr(intern!(module.py(), "__func__"));
        Ok(!function.unwrap_or(method).is(&class.getattr(*name)?))
    };
    is_module(module) && names.iter().any(|name| is_own(name).unwrap_or(false))
}

/// Return whether the object is a NumPy array of a dtype that MLX can read: no texts, objects or dates.
pub fn is_numeric(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: Class = PyOnceLock::new();
    let py = object.py();
    let has_numbers = || -> PyResult<bool> {
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let kind: char = dtype.getattr(intern!(py, "kind"))?.extract()?;
        let size: usize = dtype.getattr(intern!(py, "itemsize"))?.extract()?;
        Ok(match kind {
            'b' | 'i' | 'u' => true,
            'f' => size <= 8,
            'c' => size <= 16,
            'V' => dtype.getattr(intern!(py, "name"))?.eq("bfloat16")?, // from the package ml_dtypes
            _ => false,
        })
    };
    is_of(object, &CLASS, "numpy", "ndarray") && has_numbers().unwrap_or(false)
}

/// Return whether the object is an integer or a float of NumPy itself, not of a class derived from these.
pub fn is_numpy_number(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: Class = PyOnceLock::new();
    let of_numpy = object.get_type().module();
    of_numpy.is_ok_and(|module| module == "numpy")
        && (is_numpy_float(object) || is_of(object, &CLASS, "numpy", "integer"))
}

/// Return whether the object is a float of NumPy.
pub fn is_numpy_float(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: Class = PyOnceLock::new();
    is_of(object, &CLASS, "numpy", "floating")
}

/// Return whether the object is a dtype of MLX.
pub fn is_dtype(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: Class = PyOnceLock::new();
    is_of(object, &CLASS, "mlx.core", "Dtype")
}

/// Return whether the object is an `optimizers.Optimizer`.
pub fn is_optimizer(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: Class = PyOnceLock::new();
    is_of(object, &CLASS, "mlx.optimizers", "Optimizer")
}

/// `collections.OrderedDict`.
pub fn ordered_dict(py: Python<'_>) -> Option<&Bound<'_, PyType>> {
    static CLASS: Class = PyOnceLock::new();
    class(py, &CLASS, "collections", "OrderedDict")
}
