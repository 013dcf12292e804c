//! The arguments that a loss is shown while it is traced: what it writes into them would be lost.
use pyo3::{
    prelude::*,
    types::{PyString, PyTuple},
};

use crate::{
    mlx::{bridge, classes::is_numpy},
    tree::{
        rebuild::rebuild_where,
        slot::{Place, Slot},
        snapshot::Snapshot,
        walk::{fields, walk, Kind, Visitor},
        Tree,
    },
};

/// Arguments with tracers in the places of their arrays, as they are before the loss is called.
pub struct Shown<'py> {
    root: Bound<'py, PyAny>,
    containers: Snapshot<'py>,
    slots: Vec<Slot<'py>>,
    fields: Fields<'py>,
    numpy: Vec<(usize, Option<usize>)>, // slots of the user's NumPy arrays, and the identities of their tracers
}

impl<'py> Shown<'py> {
    /// Note the arguments and what is in them; `own` are the user's, where there are NumPy arrays among them.
    pub fn take(root: &Bound<'py, PyAny>, own: Option<&Bound<'py, PyTuple>>) -> PyResult<Self> {
        let slots = arrays(root);
        let mut kinds = Vec::new();
        if let Some(own) = own {
            let is_one = |object: &Bound<'_, PyAny>| bridge::is_array(object) || is_numpy(object);
            rebuild_where(own.as_any(), is_one, &mut |object| {
                kinds.push(is_numpy(object));
                Ok(object.clone())
            })?;
        }
        let numpy = (0..slots.len()).filter(|&slot| kinds.get(slot) == Some(&true));
        let mut containers = Snapshot::take(root)?;
        let fields = Fields::of(root);
        let values = fields.0.iter().flat_map(|(_, fields)| fields);
        for (_, value) in values {
            containers.note_all(value)?;
        }
        Ok(Self {
            numpy: numpy
                .map(|slot| (slot, bridge::id(&slots[slot].object)))
                .collect(),
            root: root.clone(),
            containers,
            fields,
            slots,
        })
    }

    /// What the loss has written into, if it has.
    pub fn written(&self) -> PyResult<Option<&'static str>> {
        let now = arrays(&self.root);
        let mut pairs = self.slots.iter().zip(&now);
        let replaced = now.len() == self.slots.len()
            && pairs.any(|(before, now)| !before.object.is(&now.object));
        if replaced || self.fields.have_changed() || self.containers.has_gathered()? {
            return Ok(Some("a dict, list or dataclass"));
        }
        let mut numpy = self.numpy.iter();
        let changed = numpy.any(|&(slot, id)| bridge::id(&self.slots[slot].object) != id);
        Ok(changed.then_some("a NumPy array"))
    }
}

/// The dataclasses among arguments, which are copies of the user's, with what is in their fields.
#[derive(Default)]
struct Fields<'py>(Vec<(Bound<'py, PyAny>, Vec<Field<'py>>)>);

type Field<'py> = (Bound<'py, PyString>, Bound<'py, PyAny>);

impl<'py> Fields<'py> {
    fn of(root: &Bound<'py, PyAny>) -> Self {
        let mut found = Self::default();
        walk(root.clone(), Place::Tuple, &mut found);
        found
    }

    fn have_changed(&self) -> bool {
        self.0.iter().any(|(object, fields)| {
            let mut fields = fields.iter();
            fields.any(|(name, before)| !object.getattr(name).is_ok_and(|now| now.is(before)))
        })
    }
}

impl<'py> Visitor<'py> for Fields<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Dataclass {
            let values = fields(container)?.into_iter().map(|name| {
                let value = container.getattr(&name).ok()?;
                Some((name, value))
            });
            let values = values.collect::<Option<_>>()?;
            self.0.push((container.clone(), values));
        }
        Some(())
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn takes_arguments(&self) -> bool {
        true
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}

// none where the loss has put something there that can be no argument
fn arrays<'py>(arguments: &Bound<'py, PyAny>) -> Vec<Slot<'py>> {
    let recorded = Tree::record_arguments(arguments);
    recorded.map_or_else(|_| Vec::new(), |recorded| recorded.slots)
}
