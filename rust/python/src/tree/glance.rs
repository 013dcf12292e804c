//! A walk that writes down the objects that a [`Glance`] compares.
use pyo3::{
    prelude::*,
    types::{PySet, PyString},
};

use super::{
    identity::Class,
    ordered,
    slot::Place,
    static_value::Static,
    walk::{walk, Kind, Visitor},
    Item,
};
use crate::mlx::glance::{Container, Glance};

struct Writer<'a> {
    items: &'a [Item],
    at: usize,
    glance: Glance,
}

/// Write down the objects in `root`, which has these items. `None` if a glance cannot tell whether they change.
pub(super) fn written(items: &[Item], root: &Bound<'_, PyAny>) -> Option<Glance> {
    let mut writer = Writer {
        items,
        at: 0,
        glance: Glance::default(),
    };
    walk(root.clone(), Place::Tuple, &mut writer)?;
    (writer.at == items.len()).then_some(writer.glance)
}

impl Writer<'_> {
    fn next(&mut self) -> Option<&Item> {
        let item = self.items.get(self.at);
        self.at += 1;
        item
    }
}

impl<'py> Visitor<'py> for Writer<'_> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()> {
        self.next()?;
        if container.cast().is_ok_and(ordered::has_own_order) {
            return None; // a glance reads the items in the order of a plain dict
        }
        let kind = match kind {
            Kind::Dict => Container::Dict,
            Kind::List => Container::List,
            Kind::Tuple => Container::Tuple,
            Kind::Module => Container::Module,
            Kind::Attributes => Container::Attributes,
            Kind::Optimizer | Kind::Dataclass => return None,
        };
        let class = container.get_type();
        let weak = match Class::of(&class) {
            Class::Weak(weak) => Some(weak.into_bound(class.py())),
            Class::Strong(_) => None,
        };
        self.glance
            .container(kind, container, len, &class, weak.as_ref());
        Some(())
    }

    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        self.next()?;
        self.glance.key(key);
        Some(())
    }

    fn array(&mut self, place: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        self.next()?;
        if matches!(place, Place::Tuple) {
            return None;
        }
        self.glance.array();
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        let py = object.py();
        let at = self.at;
        self.next()?;
        let Item::Static(value) = &self.items[at] else {
            return None;
        };
        match value {
            Static::Value(value) => self.glance.value(value.bind(py)),
            Static::Weak(weak) => self.glance.weak(weak.bind(py)),
            Static::Set(_) => {
                let set = object.cast::<PySet>().ok()?;
                if !set
                    .iter()
                    .all(|each| each.is_exact_instance_of::<PyString>())
                {
                    return None; // to compare others may run Python code
                }
                self.glance.strings(set);
            }
            Static::Constant(_) => return None,
        }
        Some(())
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}
