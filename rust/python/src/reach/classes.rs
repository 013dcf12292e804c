//! The methods of the classes that a loss calls: another one may be put in the place of any, in a notebook say.
use std::cell::RefCell;

use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyType},
};

use crate::{
    mlx::bridge,
    tree::{identity::Weak, text::text},
};

/// Classes as they were when a loss was searched.
#[derive(Default)]
pub struct Classes(Vec<Watched>);

struct Watched {
    class: Weak,
    with_code: bool, // whether its functions may be given other code
    methods: RefCell<Methods>,
}

struct Methods {
    version: Option<u32>, // Python counts it up whenever something is put into the class
    bases: Vec<usize>,    // addresses of those from which it inherits
    members: Py<PyList>,  // the names, with those that are no methods, which may hide a base's
    all: Vec<Method>,
}

// a function, or what Python makes of one: a property, a static method
struct Method {
    name: Py<PyString>,
    address: usize, // while nothing has been put into the class, this is the object
    function: Option<(Weak, Py<PyAny>)>, // with its code
}

impl Methods {
    fn of(class: &Bound<'_, PyType>, with_code: bool) -> PyResult<Self> {
        let py = class.py();
        let version = bridge::version(class);
        let descriptors = ["property", "staticmethod", "classmethod"];
        let builtins = py.import("builtins")?;
        let descriptors = descriptors.map(|name| builtins.getattr(name));
        let mut all = Vec::new();
        let members = members(class)?;
        for (name, object) in members.iter() {
            let code = bridge::code(&object);
            let is_descriptor = descriptors
                .iter()
                .flatten()
                .any(|kind| object.get_type().is(kind));
            if let (true, Ok(name)) = (code.is_some() || is_descriptor, name.cast_into()) {
                all.push(Method {
                    name: name.unbind(),
                    address: object.as_ptr().addr(),
                    function: code
                        .filter(|_| with_code)
                        .map(|code| (Weak::of_code(&object), code.unbind())),
                });
            }
        }
        let bases = class.mro().iter().map(|base| base.as_ptr().addr());
        Ok(Self {
            version,
            bases: bases.collect(),
            members: members.keys().unbind(),
            all,
        })
    }

    // true if these are the class's methods, each with its code
    fn are_of(&self, class: &Bound<'_, PyType>, with_code: bool) -> bool {
        let py = class.py();
        let now = Self::of(class, with_code);
        now.is_ok_and(|now| {
            let mut pairs = self.all.iter().zip(&now.all);
            self.members.bind(py).len() == now.members.bind(py).len()
                && self.bases == now.bases
                && self.all.len() == now.all.len()
                && pairs.all(|(a, b)| {
                    let names = a.name.bind(py).as_any().eq(b.name.bind(py));
                    a.address == b.address && names.unwrap_or(false) && a.has_code(py)
                })
        })
    }
}

impl Method {
    // false if its code is another one than that of a function before
    fn has_code(&self, py: Python<'_>) -> bool {
        self.function.as_ref().is_none_or(|(function, code)| {
            let function = function.get(py);
            function.is_some_and(|function| bridge::code(&function).is_some_and(|it| it.is(code)))
        })
    }
}

fn members<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyDict>> {
    let members = PyDict::new(class.py());
    members.call_method1("update", (class.getattr("__dict__")?,))?;
    Ok(members)
}

impl Classes {
    /// Those of a list, each with whether its functions may be given other code.
    pub fn of(classes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut all = Vec::new();
        for class in classes.try_iter()? {
            let (class, with_code): (Bound<'_, PyType>, bool) = class?.extract()?;
            all.push(Watched {
                class: Weak::of_class(&class),
                with_code,
                methods: RefCell::new(Methods::of(&class, with_code)?),
            });
        }
        Ok(Self(all))
    }

    /// Classes of the user's with the names of attributes that they have not had when the loss was searched.
    pub fn made<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyType>, Bound<'py, PyAny>)>> {
        let mut made = Vec::new();
        for watched in self.0.iter().filter(|watched| watched.with_code) {
            let Some(class) = watched.class.get(py) else {
                continue;
            };
            let class = class.cast_into::<PyType>()?;
            let methods = watched.methods.borrow();
            let version = bridge::version(&class);
            if version.is_some() && version == methods.version {
                continue;
            }
            let before = methods.members.bind(py);
            for name in members(&class)?.keys() {
                // Python makes `__annotations__` as they are asked for, say
                if !text(&name).starts_with("__") && !before.contains(&name)? {
                    made.push((class.clone(), name));
                }
            }
        }
        Ok(made)
    }

    /// The name of a class that has another method now.
    pub fn changed(&self, py: Python<'_>) -> Option<String> {
        let mut changed = self.0.iter().filter_map(|watched| {
            let class = watched.class.get(py)?;
            let class = class.cast::<PyType>().ok()?;
            let mut methods = watched.methods.borrow_mut();
            let version = bridge::version(class);
            let same = if version.is_some() && version == methods.version {
                methods.all.iter().all(|method| method.has_code(py))
            } else {
                methods.are_of(class, watched.with_code)
            };
            if same {
                methods.version = version;
            }
            (!same).then(|| {
                class
                    .name()
                    .map_or_else(|_| "a class".into(), |name| text(&name))
            })
        });
        changed.next()
    }
}
