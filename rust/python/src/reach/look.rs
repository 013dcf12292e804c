//! Comparison of the objects that a loss reads with those of the last call.
use std::rc::Rc;

use pyo3::{prelude::*, types::PyTuple};

use super::{
    contents::{contents, is_copied},
    node::{Expect, How, Met, Node},
    row::{Kind, Places, Row},
    Program,
};
use crate::{
    mlx::bridge,
    tree::{static_value::equal, walk::Scope, Tree},
};
use faststep::engine::Tensor;

/// Result of comparing a program's nodes.
pub enum Look<'py> {
    /// Everything is where it was: the object of each node that is no value, and the values.
    Same(Vec<Option<Met<'py>>>, Rc<Vec<Py<PyAny>>>),
    /// That node's object is another one.
    Differs(usize),
    /// A class has another method.
    Class(String),
    /// A class of the user's raises when it is looked at, and what.
    Fails(String),
}

// values met on a look, beside those of the last one
struct Values<'a> {
    last: &'a [Py<PyAny>],
    changed: Vec<(usize, Py<PyAny>)>,
}

impl Values<'_> {
    fn meet(&mut self, number: usize, object: Bound<'_, PyAny>) {
        let last = self.last[number].bind(object.py());
        if !last.is(&object) && !equal(last, &object) {
            self.changed.push((number, object.unbind()));
        }
    }
}

impl Program {
    /// Look at every node.
    pub fn look<'py>(&self, roots: &[Bound<'py, PyAny>]) -> PyResult<Look<'py>> {
        let py = roots[0].py();
        if let Some(class) = self.classes.changed(py) {
            return Ok(Look::Class(class));
        }
        let kept = self.nodes.len() - self.rows.iter().map(Row::len).sum::<usize>();
        let mut objects: Vec<Option<Met<'py>>> = Vec::with_capacity(kept);
        let mut number = 0; // of the next array
        let last = self.values.borrow().clone();
        let mut values = Values {
            last: &last,
            changed: Vec::new(),
        };
        let mut rows = self.rows.iter().peekable();
        let mut at = 0;
        while let Some(node) = self.nodes.get(at) {
            if let Some(row) = rows.next_if(|row| row.first == at) {
                let met = self.look_at_row(row, &objects, &mut values);
                at += met;
                if row.kind == Kind::Arrays {
                    number += met;
                }
                if let Some(parent) = self.is_out_of_order(row, &objects) {
                    return Ok(Look::Differs(parent));
                }
                if met > 0 {
                    continue;
                }
            }
            at += 1;
            if node.how == How::Names && self.has_names(node, &objects, &values) {
                continue;
            }
            let object = node.find(&objects, roots);
            if let (Expect::Absent, None) = (&node.expect, &object) {
                if node.kept.is_some() {
                    objects.push(None);
                }
                continue;
            }
            let Some(object) = object else {
                return Ok(Look::Differs(at - 1));
            };
            if let Expect::Value(_, number) = &node.expect {
                if !node.fits_value(&object) {
                    return Ok(Look::Differs(at - 1));
                }
                values.meet(*number, object);
                continue;
            }
            let met = Met::new(object, node).filter(|met| node.fits(met, &objects));
            let same = met
                .as_ref()
                .map(|met| self.is_same(node, met, &mut number, &mut values));
            if !same.transpose()?.unwrap_or(false) {
                if let Expect::Container(..) = &node.expect {
                    let there = node.find(&objects, roots); // the object has gone with the comparison
                    self.grown.set(there.and_then(|there| node.grown(&there)));
                }
                return Ok(Look::Differs(at - 1));
            }
            if node.kept.is_some() {
                objects.push(met);
            }
        }
        if let Some(other) = self.identities.other(&self.nodes, &objects) {
            return Ok(Look::Differs(other));
        }
        let changed = values.changed;
        if changed.is_empty() {
            return Ok(Look::Same(objects, last));
        }
        let mut values: Vec<_> = last.iter().map(|value| value.clone_ref(py)).collect();
        for (number, value) in changed {
            values[number] = value;
        }
        let values = Rc::new(values);
        self.values.replace(values.clone());
        Ok(Look::Same(objects, values))
    }

    // true if an object is made up as it was, and the arrays of a module have the shapes and dtypes that they had
    fn is_same(
        &self,
        node: &Node,
        met: &Met<'_>,
        number: &mut usize,
        values: &mut Values<'_>,
    ) -> PyResult<bool> {
        Ok(match &node.expect {
            Expect::Array => self.holds(number, &met.object),
            Expect::Module(tree, first, (at, numbers)) => {
                let py = met.object.py();
                let held = self.held.borrow().clone();
                let known = held.ids().get(*first..).unwrap_or_default();
                let known = &known[..known.len().min(tree.tensors().len())];
                let mut meet_same = || {
                    let numbers = numbers.iter();
                    numbers.for_each(|it| values.meet(*at, it.bind(py).clone()));
                };
                if tree.is_same(&met.object, known) {
                    meet_same();
                    *number += known.len();
                    return Ok(true);
                }
                let mut slots = tree.check_whole(&met.object, known);
                drop(held);
                if slots.is_some() {
                    meet_same();
                } else {
                    // the same with other numbers, to which a loss adds, say
                    let (now, found) = Tree::record(&met.object, Scope::Whole)?;
                    if tree.equals_but_numbers(&now, py) {
                        values.meet(*at, now.number_values(py)?.into_any());
                        tree.take_containers(&now);
                        slots = Some(found);
                    }
                }
                slots.is_some_and(|slots| {
                    let mut slots = slots.iter();
                    slots.all(|slot| self.holds(number, &slot.object))
                })
            }
            Expect::Contents(_, number, version) => {
                let last = values.last[*number].bind(met.object.py());
                let now = met.object.cast().ok().and_then(bridge::dict_version);
                if (now.is_none() || now != version.get()) && !is_copied(&met.object, last) {
                    values.meet(*number, contents(&met.object)?);
                } else {
                    version.set(now);
                }
                true
            }
            Expect::Container(.., keys) if node.whole.is_none() => {
                let dict = met.object.cast();
                dict.map_or(true, |dict| keys.are_of(dict))
            }
            _ => true,
        })
    }

    // the number of values of a row, from the first on, that still are numbers and strings; or of arrays that are the same
    fn look_at_row(
        &self,
        row: &Row,
        objects: &[Option<Met<'_>>],
        values: &mut Values<'_>,
    ) -> usize {
        let first = &self.nodes[row.first];
        if let Places::Indices(index, _) = &row.places {
            let held = self.held.borrow();
            let list = first.list(objects);
            return list.map_or(0, |list| {
                bridge::list_holds(list, *index, row.known_ids(held.ids()))
            });
        }
        let Some(dict) = &first.dict(objects) else {
            row.note(0, 0, None);
            return 0;
        };
        let version = bridge::dict_version(dict);
        if row.is_same(version) {
            return row.len();
        }
        let mut same = true;
        let met = match row.kind {
            Kind::Fixed => bridge::dict_has(dict, row.keys(), &row.known),
            Kind::Arrays => {
                let held = self.held.borrow();
                bridge::dict_holds(dict, row.keys(), row.known_ids(held.ids()))
            }
            Kind::Values => {
                let known = &values.last[row.number..][..row.len()];
                bridge::walk(dict, row.keys(), known, |at, object| {
                    same = false;
                    let fits = self.nodes[row.first + at].fits_value(&object);
                    if fits {
                        values.meet(row.number + at, object);
                    }
                    fits
                })
            }
        };
        row.note(met, dict.len(), version.filter(|_| same));
        met
    }

    // the node of a dict that its row has not found to have the keys that it had, in their order, and that has others
    fn is_out_of_order(&self, row: &Row, objects: &[Option<Met<'_>>]) -> Option<usize> {
        let first = &self.nodes[row.first];
        let parent = first.parent.filter(|_| !row.is_whole.get())?;
        let Node {
            expect: Expect::Container(.., keys),
            whole: Some(whole),
            ..
        } = &self.nodes[parent]
        else {
            return None;
        };
        let dict = first.dict(objects)?;
        (self.rows[*whole].first == row.first && !keys.are_of(&dict)).then_some(parent)
    }

    // true if the names of an object's attributes, and their order, are those of the last look
    fn has_names(&self, node: &Node, objects: &[Option<Met<'_>>], values: &Values<'_>) -> bool {
        let (Expect::Value(_, number), Some(dict)) = (&node.expect, node.attributes(objects))
        else {
            return false;
        };
        let Ok(names) = values.last[*number].bind(dict.py()).cast::<PyTuple>() else {
            return false;
        };
        let names = names.as_slice().iter().map(|name| name.as_ptr().addr());
        match node.whole.map(|row| &self.rows[row]) {
            Some(row) if row.is_whole.get() => {
                names.eq(row.keys().iter().map(|key| key.as_ptr().addr()))
            }
            _ => bridge::has_keys(dict, names),
        }
    }

    // true if the next object is an array; keeps a reference to it, and its shape and dtype
    fn holds(&self, number: &mut usize, object: &Bound<'_, PyAny>) -> bool {
        let at = *number;
        *number += 1;
        let mut held = self.held.borrow_mut();
        let Some(id) = bridge::id(object) else {
            return false;
        };
        let known = held.ids().get(at).copied();
        if known == Some(id) {
            return true;
        }
        let Some(array) = bridge::get(object) else {
            return false;
        };
        self.forms.meet(at, Tensor::of(&array));
        if let Some(known) = known {
            self.moving.borrow_mut().meet(at, known, id);
        }
        Rc::make_mut(&mut held).set(at, array);
        true
    }
}
