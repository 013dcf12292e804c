//! Tests for MLX's, NumPy's and some of Python's classes.
use pyo3::{intern, prelude::*, sync::PyOnceLock, types::PyType};

use super::bridge;

fn class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    module: &str,
    name: &str,
) -> Option<&'py Bound<'py, PyType>> {
    cell.import(py, module, name).ok()
}

/// Return whether the object is an `nn.Module`.
pub fn is_module(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.nn", "Module");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether a class comes of a `class` statement: its objects keep what they have in instance dicts, in slots and in what bases in
/// C do.
pub fn is_made_by_python(class: &Bound<'_, PyType>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let module = self::class(class.py(), &CLASS, "mlx.nn", "Module");
    module.is_some_and(|module| bridge::ends_alike(class, module))
}

/// Return whether a module has other methods of these names than `nn.Module`.
pub fn has_own_methods(module: &Bound<'_, PyAny>, names: &[&str]) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let Some(class) = class(module.py(), &CLASS, "mlx.nn", "Module") else {
        return false;
    };
    let is_own = |name: &&str| -> PyResult<bool> {
        let method = module.getattr(*name)?;
        let function = method.getattr(intern!(module.py(), "__func__"));
        Ok(!function.unwrap_or(method).is(&class.getattr(*name)?))
    };
    is_module(module) && names.iter().any(|name| is_own(name).unwrap_or(false))
}

/// Return whether the object is a NumPy array.
pub fn is_numpy(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "numpy", "ndarray");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether the object is an array of NumPy's that MLX makes one of: no texts, objects or dates.
pub fn is_numeric(object: &Bound<'_, PyAny>) -> bool {
    let py = object.py();
    let holds = || -> PyResult<bool> {
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let kind: char = dtype.getattr(intern!(py, "kind"))?.extract()?;
        let size: usize = dtype.getattr(intern!(py, "itemsize"))?.extract()?;
        Ok(match kind {
            'b' | 'i' | 'u' => true,
            'f' => size <= 8,
            'c' => size <= 16,
            'V' => dtype.getattr(intern!(py, "name"))?.eq("bfloat16")?, // of ml_dtypes
            _ => false,
        })
    };
    is_numpy(object) && holds().unwrap_or(false)
}

/// Return whether the object is a scalar of NumPy's: a number, as Python's are.
pub fn is_numpy_number(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "numpy", "generic");
    class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
}

/// Return whether the object is a dtype of MLX's.
pub fn is_dtype(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.core", "Dtype");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether the object is an `optimizers.Optimizer`.
pub fn is_optimizer(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.optimizers", "Optimizer");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether the object is a property.
pub fn is_property(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "builtins", "property");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether the object is a scalar of NumPy's that is a float.
pub fn is_numpy_float(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "numpy", "floating");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// Return whether the object is what a class has for one of its `__slots__`.
pub fn is_member(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "types", "MemberDescriptorType");
    class.is_some_and(|class| bridge::is_of(object, class))
}

/// `collections.OrderedDict`.
pub fn ordered_dict(py: Python<'_>) -> Option<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    class(py, &CLASS, "collections", "OrderedDict")
}

/// `collections.deque`.
pub fn deque(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "collections", "deque")
}

/// `collections.defaultdict`.
pub fn default_dict(py: Python<'_>) -> Option<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    class(py, &CLASS, "collections", "defaultdict")
}

/// Return whether the object is a `collections.deque`.
pub fn is_deque(object: &Bound<'_, PyAny>) -> bool {
    deque(object.py()).is_ok_and(|class| object.is_instance(class).unwrap_or(false))
}
