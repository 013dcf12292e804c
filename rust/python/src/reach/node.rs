//! One object on the way from a loss to what it reaches.
use std::cell::Cell;

use faststep::engine::Tensor;
use pyo3::{
    exceptions::{PyAttributeError, PyKeyboardInterrupt, PyTypeError},
    intern,
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple, PyType, PyWeakrefReference},
};

use super::{
    contents::{contents, size},
    keys::Keys,
};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    mlx::{
        bridge,
        classes::{is_deque, is_member, is_property as is_of_property},
    },
    tree::{
        identity::{Class, Weak},
        static_value::is_plain,
        text::{quoted, text},
        walk::Scope,
        Tree,
    },
};

/// Way from a parent to an object; `_nodes.py` has the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
    /// One of the roots.
    Root,
    /// In a dict, by its key.
    Item,
    /// In a list or tuple, by its index.
    Index,
    /// By `getattr`.
    Attribute,
    /// In the instance dict, by name.
    Instance,
    /// In a cell of a function's closure, by its index.
    Cell,
    /// Among a function's globals, by name.
    Global,
    /// Its class.
    Type,
    /// A class in the method resolution order, by its index.
    Base,
    /// In a class's own dict, by name.
    Class,
    /// An object that the parent refers to, by its number in the garbage collector's order.
    Referent,
    /// A Python module that the parent imports, by name.
    Modules,
    /// The value of a context variable.
    Context,
    /// What a weak reference, or a proxy, refers to.
    Weak,
    /// A member of the parent: the key is a weak reference to it.
    Held,
    /// The length of the parent.
    Length,
    /// How often a function with a cache has been called for new arguments.
    Misses,
    /// What a function reads of the parent, or returns that is the parent.
    Read,
    /// The names of the parent's attributes, in their order.
    Names,
}

impl How {
    /// Return whether it is a place of its own, and not in a dict or list whose contents are noted as a whole.
    pub fn stands_alone(self) -> bool {
        matches!(
            self,
            Self::Cell | Self::Global | Self::Class | Self::Attribute | Self::Context
        )
    }
}

const HOW: [How; 19] = [
    How::Root,
    How::Item,
    How::Index,
    How::Attribute,
    How::Instance,
    How::Cell,
    How::Global,
    How::Type,
    How::Base,
    How::Class,
    How::Referent,
    How::Modules,
    How::Context,
    How::Weak,
    How::Held,
    How::Length,
    How::Misses,
    How::Read,
    How::Names,
];

/// Comparison that an object has to pass.
#[derive(Debug)]
pub enum Expect {
    /// An array, of any value.
    Array,
    /// A number, a string or their kind, of any value, and its number among the values.
    Value(Py<PyType>, usize),
    /// An object of that class, of any contents: a NumPy array, a set, a long list, tuple or dict. Its number too, and a dict's
    /// version when it had the contents that are known.
    Contents(Py<PyType>, usize, Cell<Option<usize>>),
    /// A dict, list, tuple or module of that class and those lengths, of its own and of its instance dict; a dict with its
    /// keys in their order.
    Container(Class, usize, Option<usize>, Keys),
    /// An object of that class, with so many attributes.
    Object(Class, Option<usize>),
    /// A function with that code, and so many attributes.
    Function(Py<PyAny>, Option<usize>),
    /// The object of another node: its number, then that among the objects of a look.
    Same(usize, Option<usize>),
    /// That very object.
    Identity(Weak),
    /// Whatever it is.
    Anything,
    /// Nothing: the search has seen an object there that cannot be found again.
    Absent,
    /// A module that looks like this but for its numbers, the number of its first array, and that of its numbers among the values,
    /// with these.
    Module(Box<Tree>, usize, (usize, Option<Py<PyAny>>)),
}

/// An object that has been found, and its instance dict where others are found in that.
pub struct Met<'py> {
    /// The object.
    pub object: Bound<'py, PyAny>,
    /// The dict.
    pub attributes: Option<Bound<'py, PyDict>>,
}

impl<'py> Met<'py> {
    /// An object of a node; none of a value, from which nothing else is found.
    pub fn new(object: Bound<'py, PyAny>, node: &Node) -> Option<Self> {
        if let Expect::Value(..) = &node.expect {
            return None;
        }
        let attributes = node.opens.then(|| attributes_of(&object)).flatten();
        Some(Self { object, attributes })
    }
}

/// One object on the way.
#[derive(Debug)]
pub struct Node {
    /// The node from which it is found; none of a root.
    pub parent: Option<usize>,
    /// Way from its parent.
    pub how: How,
    key: Option<Py<PyAny>>,
    index: usize,
    /// Its number among the objects of a look: none of a value, and of what is compared in a row.
    pub kept: Option<usize>,
    kept_parent: Option<usize>,
    /// The row of all that is in its dict, or in its parent's instance dict, if there is one.
    pub whole: Option<usize>,
    /// True if its instance dict is looked at.
    pub opens: bool,
    /// Comparison that it has to pass.
    pub expect: Expect,
}

/// Why an object cannot be watched that is another one each time that it is asked for.
pub fn moving(name: &str) -> String {
    format!("{name}, which it reaches, is another one whenever it is looked at: does another thread change it?")
}

/// Why an object cannot be watched whose class raises.
pub fn unseen(error: &PyErr, py: Python<'_>) -> String {
    format!(
        "what it reaches cannot be looked at ({}: {})",
        error
            .get_type(py)
            .name()
            .map_or_else(|_| "an exception".into(), |name| text(&name)),
        text(error.value(py))
    )
}

// the rest of the message is appended when the object is known
fn kind(number: usize, expected: &Bound<'_, PyAny>) -> PyResult<Expect> {
    Ok(match number {
        0 => Expect::Array,
        1 => Expect::Value(expected.get_type().unbind(), 0),
        2 => {
            let class = expected.clone().cast_into::<PyType>()?;
            Expect::Contents(class.unbind(), 0, Cell::default())
        }
        3 => Expect::Container(
            Weak::of_class(&expected.get_type()),
            0,
            None,
            Keys::default(),
        ),
        4 => Expect::Object(Weak::of_class(&expected.get_type()), None),
        5 => Expect::Function(expected.clone().unbind(), None),
        6 => Expect::Same(expected.extract()?, None),
        7 => Expect::Identity(match expected.cast::<PyWeakrefReference>() {
            Ok(weak) => Weak::Weak(weak.clone().unbind()),
            Err(_) => Weak::Strong(expected.clone().unbind()),
        }),
        9 => Expect::Module(Box::default(), 0, (0, None)),
        _ => Expect::Anything,
    })
}

/// Nodes, and the objects at their places.
pub struct Expected {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Shape and dtype of each array.
    pub tensors: Vec<Tensor>,
    /// The numbers, strings and contents.
    pub values: Vec<Py<PyAny>>,
}

/// Number the nodes whose objects are kept during a look.
pub fn number(nodes: &mut [Node], is_kept: impl Fn(usize, &Node) -> bool) {
    let mut next = 0;
    for at in 0..nodes.len() {
        let kept_parent = nodes[at].parent.and_then(|parent| nodes[parent].kept);
        let other = match &nodes[at].expect {
            Expect::Same(other, _) => nodes[*other].kept,
            _ => None,
        };
        let node = &mut nodes[at];
        node.kept_parent = kept_parent;
        node.kept = is_kept(at, node).then_some(next);
        next += usize::from(node.kept.is_some());
        if let Expect::Same(_, kept) = &mut node.expect {
            *kept = other;
        }
    }
}

/// Complete the expectations of nodes by the objects at their places now.
pub fn expect<'py>(mut nodes: Vec<Node>, roots: &[Bound<'py, PyAny>]) -> PyResult<Expected> {
    let of_attributes = |node: &&Node| matches!(node.how, How::Instance | How::Names);
    let parents = nodes.iter().filter(of_attributes);
    let parents: Vec<usize> = parents.filter_map(|node| node.parent).collect();
    for parent in parents {
        nodes[parent].opens = true;
    }
    number(&mut nodes, |_, _| true);
    let mut objects: Vec<Option<Met<'py>>> = Vec::with_capacity(nodes.len());
    let (mut tensors, mut values) = (Vec::new(), Vec::new());
    for node in &mut nodes {
        let Some(object) = node.find(&objects, roots) else {
            node.expect = Expect::Absent;
            objects.push(None);
            continue;
        };
        match &mut node.expect {
            Expect::Container(class, len, attributes, keys) => {
                *class = Weak::of_class(&object.get_type());
                *len = size(&object)?;
                *keys = object.cast().map(Keys::of).unwrap_or_default();
                *attributes = attributes_of(&object).map(|dict| dict.len());
                node.opens |= attributes.is_some();
            }
            Expect::Object(class, attributes) => {
                *class = Weak::of_class(&object.get_type());
                *attributes = attributes_of(&object).map(|dict| dict.len());
                node.opens |= attributes.is_some();
            }
            Expect::Function(_, attributes) => {
                *attributes = bridge::attributes(&object).map(|dict| dict.len());
            }
            Expect::Array => tensors.extend(bridge::get(&object).as_ref().map(Tensor::of)),
            Expect::Module(tree, first, number) => {
                **tree = Tree::record(&object, Scope::Whole)?.0;
                *first = tensors.len();
                tensors.extend_from_slice(tree.tensors());
                let numbers = tree.number_values(object.py())?.into_any().unbind();
                *number = (values.len(), Some(numbers.clone_ref(object.py())));
                values.push(numbers);
            }
            Expect::Value(_, number) => {
                *number = values.len();
                values.push(object.clone().unbind());
            }
            Expect::Contents(_, number, _) => {
                *number = values.len();
                values.push(contents(&object)?.unbind());
            }
            _ => {}
        }
        objects.push(Met::new(object, node));
    }
    Ok(Expected {
        nodes,
        tensors,
        values,
    })
}

/// The instance dict of an object, also where its class allows no look at attributes.
pub fn attributes_of<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    match object.getattr_opt(intern!(object.py(), "__dict__")) {
        Ok(dict) => dict?.cast_into::<PyDict>().ok(),
        Err(_) => bridge::attributes(object),
    }
}

// what Ctrl-C has ended comes to the user as soon as this look is done
fn is_read_only(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyAttributeError>(py) || error.is_instance_of::<PyTypeError>(py)
}

fn keep_interrupt(py: Python<'_>, error: &PyErr) {
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        let again = py.import("_thread");
        drop(again.and_then(|thread| thread.call_method0("interrupt_main")));
    }
}

impl Refers for Node {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.key.visit(collector)?;
        match &self.expect {
            Expect::Value(class, _) | Expect::Contents(class, ..) => class.visit(collector),
            Expect::Function(code, _) => code.visit(collector),
            Expect::Module(tree, _, (_, numbers)) => {
                tree.visit(collector)?;
                numbers.visit(collector)
            }
            Expect::Container(it, ..) | Expect::Object(it, _) | Expect::Identity(it) => {
                it.visit(collector)
            }
            _ => Ok(()), // no object of the user's
        }
    }
}

impl Node {
    /// Read a node as `_nodes.py` has it.
    pub fn read(node: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (parent, how, key, number, expected): (
            isize,
            usize,
            Bound<'_, PyAny>,
            usize,
            Bound<'_, PyAny>,
        ) = node.extract()?;
        let how = HOW.get(how).copied().unwrap_or(How::Root);
        let index = match how {
            How::Root | How::Index | How::Cell | How::Base | How::Referent => key.extract()?,
            _ => 0,
        };
        Ok(Self {
            parent: usize::try_from(parent).ok(),
            how,
            key: (matches!(how, How::Item) || !key.is_none()).then(|| key.unbind()),
            index,
            kept: None,
            kept_parent: None,
            whole: None,
            opens: false,
            expect: kind(number, &expected)?,
        })
    }

    /// The same place in its parent alone, whatever stands there.
    pub fn alone(&self, py: Python<'_>) -> Self {
        Self {
            parent: Some(0),
            how: self.how,
            key: self.key.as_ref().map(|key| key.clone_ref(py)),
            index: self.index,
            kept: None,
            kept_parent: Some(0),
            whole: None,
            opens: matches!(self.how, How::Instance),
            expect: Expect::Anything,
        }
    }

    // what has been found at its parent
    /// The parent among the objects of the nodes.
    pub fn parent_in<'a, 'py>(&self, objects: &'a [Option<Met<'py>>]) -> Option<&'a Met<'py>> {
        objects.get(self.kept_parent?)?.as_ref()
    }

    /// The object that is there now; `objects` are those of the nodes before it.
    pub fn find<'py>(
        &self,
        objects: &[Option<Met<'py>>],
        roots: &[Bound<'py, PyAny>],
    ) -> Option<Bound<'py, PyAny>> {
        match self.parent {
            Some(_) => self.find_in(self.parent_in(objects)?),
            None => roots.get(self.index).cloned(),
        }
    }

    /// The object that is there now, from that of its parent.
    pub fn find_in<'py>(&self, met: &Met<'py>) -> Option<Bound<'py, PyAny>> {
        let parent = &met.object;
        let py = parent.py();
        let key = || self.key.as_ref().map(|key| key.bind(py));
        match self.how {
            How::Root => None,
            How::Index => match parent.cast::<PyList>() {
                Ok(list) => list.get_item(self.index).ok(),
                Err(_) if is_deque(parent) => parent.get_item(self.index).ok(),
                Err(_) => parent.cast::<PyTuple>().ok()?.get_item(self.index).ok(),
            },
            How::Attribute => parent.getattr(key()?.cast().ok()?).ok(),
            How::Item | How::Instance => self.dict_of(met)?.get_item(key()?).ok()?,
            How::Cell => bridge::cell(parent, self.index),
            How::Global => bridge::globals(parent)?.get_item(key()?).ok()?,
            How::Context => bridge::context_value(parent),
            How::Weak if parent.is_instance_of::<PyWeakrefReference>() => parent.call0().ok(),
            How::Weak => {
                let names = [intern!(py, "__init__"), intern!(py, "mro")]; // the second of a class
                let mut own = names.into_iter().filter_map(|name| {
                    let method = parent.getattr(name).ok()?;
                    method.getattr(intern!(py, "__self__")).ok()
                });
                own.next()
            }
            How::Held => key()?.call0().ok().filter(|object| !object.is_none()),
            How::Length => Some(size(parent).ok()?.into_pyobject(py).ok()?.into_any()),
            How::Misses => {
                let info = parent.call_method0(intern!(py, "cache_info")).ok()?;
                info.get_item(1).ok()
            }
            How::Read => {
                let read = match key() {
                    Some(read) => read.call1((parent,)),
                    None => parent.call0(),
                };
                read.map_err(|error| keep_interrupt(py, &error)).ok()
            }
            How::Names => {
                let names = attributes_of(parent).or_else(|| bridge::attributes(parent));
                Some(names?.keys().to_tuple().into_any())
            }
            How::Type => Some(parent.get_type().into_any()),
            How::Base => parent
                .cast::<PyType>()
                .ok()?
                .mro()
                .get_item(self.index)
                .ok(),
            How::Class => parent
                .getattr(intern!(py, "__dict__"))
                .ok()?
                .get_item(key()?)
                .ok(),
            How::Modules => bridge::modules(py)?.get_item(key()?).ok()?,
            How::Referent => {
                let gc = py.import("gc").ok()?;
                let referents = gc.call_method1("get_referents", (parent,)).ok()?;
                referents.get_item(self.index).ok()
            }
        }
    }

    /// The number of its arrays.
    pub fn arrays(&self) -> usize {
        match &self.expect {
            Expect::Array => 1,
            Expect::Module(tree, ..) => tree.tensors().len(),
            _ => 0,
        }
    }

    /// Its key in a dict.
    pub fn key<'a, 'py>(&'a self, py: Python<'py>) -> Option<&'a Bound<'py, PyAny>> {
        self.key.as_ref().map(|key| key.bind(py))
    }

    /// Its index in a list or tuple.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The dict in which the object is looked up by its key.
    pub fn dict<'py>(&self, objects: &[Option<Met<'py>>]) -> Option<Bound<'py, PyDict>> {
        let parent = self.parent_in(objects)?;
        match self.how {
            How::Global => bridge::globals(&parent.object),
            _ => self.dict_of(parent).cloned(),
        }
    }

    /// The instance dict of its parent, where that is looked at.
    pub fn attributes<'a, 'py>(
        &self,
        objects: &'a [Option<Met<'py>>],
    ) -> Option<&'a Bound<'py, PyDict>> {
        self.parent_in(objects)?.attributes.as_ref()
    }

    fn dict_of<'a, 'py>(&self, met: &'a Met<'py>) -> Option<&'a Bound<'py, PyDict>> {
        match self.how {
            How::Item => met.object.cast::<PyDict>().ok(),
            How::Instance => met.attributes.as_ref(),
            _ => None,
        }
    }

    /// The list in which the object stands.
    pub fn list<'a, 'py>(&self, objects: &'a [Option<Met<'py>>]) -> Option<&'a Bound<'py, PyList>> {
        self.parent_in(objects)?.object.cast::<PyList>().ok()
    }

    /// Return whether a property gives it, of which what it is made of changes by itself: its setter may do more than to set it.
    pub fn is_property(&self, objects: &[Option<Met<'_>>]) -> bool {
        self.of_class(objects).is_some_and(|it| is_of_property(&it))
    }

    /// Return whether it stands in a slot, of `__slots__`, or where Python alone keeps it: at each look the same object.
    pub fn is_kept(&self, objects: &[Option<Met<'_>>]) -> bool {
        self.how != How::Attribute || self.of_class(objects).is_some_and(|it| is_member(&it))
    }

    // what the class of its parent has under its name
    fn of_class<'py>(&self, objects: &[Option<Met<'py>>]) -> Option<Bound<'py, PyAny>> {
        let met = self
            .parent_in(objects)
            .filter(|_| self.how == How::Attribute)?;
        let name = self.key(met.object.py())?.cast::<PyString>().ok()?;
        met.object.get_type().getattr_opt(name).ok()?
    }

    /// Put another object there; whether that can be.
    pub fn put<'py>(
        &self,
        parent: Option<&Met<'py>>,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<bool> {
        if let (Some(met), How::Context) = (parent, self.how) {
            let set = intern!(met.object.py(), "set");
            return met.object.call_method1(set, (object,)).map(|_| true);
        }
        let (Some(Met { object: parent, .. }), Some(key)) = (parent, &self.key) else {
            return Ok(false);
        };
        let key = key.bind(parent.py());
        match self.how {
            How::Item | How::Index if !parent.is_instance_of::<PyTuple>() => {
                parent.set_item(key, object)?;
            }
            How::Instance => match attributes_of(parent) {
                Some(dict) => dict.set_item(key, object)?,
                None => return Ok(false),
            },
            How::Attribute | How::Class => match parent.setattr(key.cast()?, object) {
                Err(error) if is_read_only(&error, parent.py()) => return Ok(false),
                set => set?,
            },
            How::Cell => bridge::set_cell(parent, self.index, object),
            How::Global => match bridge::globals(parent) {
                Some(dict) => dict.set_item(key, object)?,
                None => return Ok(false),
            },
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Return whether the object is what is expected; of an array, apart from its shape and dtype, of a dict from its keys.
    pub fn fits(&self, met: &Met<'_>, objects: &[Option<Met<'_>>]) -> bool {
        let object = &met.object;
        let attributes_len = || met.attributes.as_ref().map(PyDictMethods::len);
        match &self.expect {
            Expect::Array => bridge::is_array(object),
            Expect::Value(..) => self.fits_value(object),
            Expect::Contents(class, ..) => object.get_type().is(class),
            Expect::Container(class, len, attributes, _) => {
                class.is(&object.get_type())
                    && size(object).is_ok_and(|n| n == *len)
                    && (attributes.is_none() || attributes_len() == *attributes)
            }
            Expect::Object(class, attributes) => {
                class.is(&object.get_type()) && attributes_len() == *attributes
            }
            Expect::Function(code, attributes) => {
                let same = |now: &Bound<'_, PyAny>| now.eq(code.bind(object.py())).unwrap_or(false);
                bridge::code(object).is_some_and(|now| now.is(code) || same(&now))
                    && bridge::attributes(object).map(|dict| dict.len()) == *attributes
            }
            Expect::Same(_, other) => other
                .and_then(|other| objects.get(other)?.as_ref())
                .is_some_and(|other| other.object.is(object)),
            Expect::Identity(known) => known.is(object),
            Expect::Anything | Expect::Module(..) => true,
            Expect::Absent => false,
        }
    }

    /// Return whether the object is what is expected, beside its attributes: of a dict with its keys.
    pub fn is_made_up(&self, object: &Bound<'_, PyAny>, objects: &[Option<Met<'_>>]) -> bool {
        match &self.expect {
            Expect::Container(class, len, _, keys) => {
                let dict = object.cast();
                class.is(&object.get_type())
                    && size(object).is_ok_and(|n| n == *len)
                    && dict.map_or(true, |dict| keys.are_of(dict))
            }
            Expect::Object(class, _) => class.is(&object.get_type()),
            Expect::Function(code, _) => {
                let now = bridge::code(object);
                now.is_some_and(|now| now.eq(code.bind(object.py())).unwrap_or(false))
            }
            _ => Met::new(object.clone(), self).is_some_and(|met| self.fits(&met, objects)),
        }
    }

    /// The address of a list or a dict that has another length than expected.
    pub fn grown(&self, object: &Bound<'_, PyAny>) -> Option<usize> {
        let Expect::Container(class, len, ..) = &self.expect else {
            return None;
        };
        let grown = class.is(&object.get_type()) && size(object).is_ok_and(|n| n != *len);
        grown.then(|| object.as_ptr().addr())
    }

    /// Return whether the object may stand where a number or a string has been.
    pub fn fits_value(&self, object: &Bound<'_, PyAny>) -> bool {
        matches!(&self.expect, Expect::Value(class, _) if object.get_type().is(class))
            || is_plain(object)
    }

    /// Return its path as a user writes it, behind that of its parent.
    pub fn name(&self, py: Python<'_>, parent: Option<String>) -> String {
        let parent = parent.unwrap_or_default();
        let key = self.key.as_ref().map(|key| key.bind(py));
        let text = key.map_or_else(String::new, text);
        match self.how {
            How::Root if self.index == 0 => "loss_fn".into(),
            How::Root if self.index == 1 => "model".into(),
            How::Root => format!("argument {}", self.index - 2),
            How::Item => match key.and_then(quoted) {
                Some(key) => format!("{parent}[{key}]"),
                None => parent,
            },
            How::Index => format!("{parent}[{}]", self.index),
            How::Attribute if text.starts_with("__") && text != "__self__" => parent,
            How::Attribute if text == "__self__" => "self".into(),
            How::Attribute | How::Instance | How::Class => format!("{parent}.{text}"),
            How::Cell => format!("closure[{}] of {parent}", self.index),
            How::Global | How::Modules => text,
            How::Length => format!("the length of {parent}"),
            How::Misses => format!("the cache of {parent}"),
            How::Type
            | How::Base
            | How::Referent
            | How::Context
            | How::Weak
            | How::Held
            | How::Read
            | How::Names => parent,
        }
    }
}
