//! What a loss does to its own numbers at each call, which is done for it where a trace stands for the call.
use std::cell::{Cell, RefCell};

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFloat, PyList, PyTuple},
};

use super::{
    node::{How, Met, Node},
    suspect::{is_number, Change},
    Looked,
};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    mlx::{
        bridge,
        classes::{deque, is_deque, is_module},
    },
    tree::{
        snapshot::without_arrays,
        static_value::{equal, is_plain},
        walk::MAX_DEPTH,
    },
};

/// What each call adds to a number, or appends to a list.
pub struct Advance {
    object: Py<PyAny>, // the number is in it, or it is the list
    of_model: bool,
    node: Cell<(usize, usize)>, // the program, and its node at which the object was found last
    name: RefCell<Option<String>>, // of the place
    kind: Kind,
    from: Option<(f64, f64)>, // of a float, what it was before a call and behind it
}

enum Kind {
    /// A number under a key of a dict, and what is added.
    Item(Py<PyAny>, Py<PyAny>),
    /// A number in a list, by index.
    Index(usize, Py<PyAny>),
    /// The number in a cell.
    Cell(Py<PyAny>),
    /// A number at another place in the object, an attribute of a class, say.
    Place(Node, Py<PyAny>),
    /// Numbers and texts at the end of a list or a deque.
    End(Vec<Py<PyAny>>),
}

impl Kind {
    fn added(&self) -> &[Py<PyAny>] {
        match self {
            Self::Item(_, by) | Self::Index(_, by) | Self::Cell(by) | Self::Place(_, by) => {
                std::slice::from_ref(by)
            }
            Self::End(items) => items,
        }
    }
}

// what is appended, where that is all that has changed, and no more than numbers and texts
fn appended(
    object: &Bound<'_, PyAny>,
    before: &Bound<'_, PyList>,
) -> PyResult<Option<Vec<Py<PyAny>>>> {
    let now = object.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let most = object.getattr_opt(intern!(object.py(), "maxlen"))?;
    let most = most.and_then(|most| most.extract::<usize>().ok());
    // of a deque that is full, the first go
    let most_dropped = if most == Some(now.len()) {
        before.len()
    } else {
        0
    };
    let dropped = (0..=most_dropped).find(|&dropped| {
        let kept = before.len() - dropped;
        let mut pairs = before.iter().skip(dropped).zip(&now);
        kept < now.len() && pairs.all(|(before, now)| before.is(now))
    });
    let new = dropped.map(|dropped| &now[before.len() - dropped..]);
    let new = new.filter(|new| new.iter().all(is_plain));
    Ok(new.map(|new| new.iter().map(|item| item.clone().unbind()).collect()))
}

/// What is added to a number, and, of a float, what it was and is.
type Added = (Py<PyAny>, Option<(f64, f64)>);

// what is added; none where these are no numbers, or where one becomes of another type
fn difference(
    before: Option<&Bound<'_, PyAny>>,
    now: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Added>> {
    let (Some(before), Some(now)) = (before, now) else {
        return Ok(None);
    };
    if !is_number(before) || !is_number(now) {
        return Ok(None);
    }
    let by = now.sub(before)?;
    if let (Ok(from), Ok(to)) = (before.cast::<PyFloat>(), now.cast::<PyFloat>()) {
        let from = (from.value(), to.value());
        let by = PyFloat::new(now.py(), short(from)).into_any();
        return Ok(Some((by.unbind(), Some(from))));
    }
    let same_type = before.add(&by)?.get_type().is(now.get_type());
    Ok(same_type.then(|| (by.unbind(), None)))
}

// what is added to a float: 0.3 less 0.2 is 0.1 but for a bit
fn short((before, now): (f64, f64)) -> f64 {
    let by = now - before;
    let short = rounded(by);
    if (before + short).to_bits() == now.to_bits() {
        short
    } else {
        by
    }
}

fn rounded(by: f64) -> f64 {
    format!("{by:.11e}").parse().unwrap_or(by)
}

impl Refers for Advance {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.object.visit(collector)?;
        match &self.kind {
            Kind::Item(key, _) => key.visit(collector),
            Kind::Place(node, _) => node.visit(collector),
            _ => Ok(()), // numbers and texts
        }
    }
}

impl Advance {
    fn new(object: &Bound<'_, PyAny>, kind: Kind) -> Self {
        Self {
            from: None,
            object: object.clone().unbind(),
            of_model: false,
            node: Cell::default(),
            name: RefCell::default(),
            kind,
        }
    }

    /// What a change has added to numbers; none where it has done something else too, or where it cannot be told what it adds to a
    /// number that was not there. `first`: that one was 0.
    fn of(change: &Change, first: bool, py: Python<'_>) -> PyResult<Option<Vec<Self>>> {
        Ok(match change {
            Change::Item(dict, key, before) => {
                let zero = first.then(|| 0_u8.into_pyobject(py)).transpose()?;
                let before = before.as_ref().map(|before| before.bind(py).clone());
                let before = before.or(zero.map(Bound::into_any));
                let now = dict.bind(py).get_item(key)?;
                let by = difference(before.as_ref(), now.as_ref())?;
                let kind = |by| Kind::Item(key.clone_ref(py), by);
                by.map(|(by, from)| vec![Self::new(dict.bind(py), kind(by)).with(from)])
            }
            Change::Node(looked, node, before) => {
                let now = looked.at(py, *node);
                let by = difference(Some(before.bind(py)), now.as_ref())?;
                let place = looked.place(*node, py);
                by.zip(place)
                    .and_then(|((by, from), (node, parent))| {
                        Some(Self::at_place(node, &parent, by)?.with(from))
                    })
                    .map(|it| vec![it])
            }
            Change::List(list, before) => {
                let (list, before) = (list.bind(py), before.bind(py));
                let now = &without_arrays(list)?;
                if now.len() != before.len() {
                    let items = appended(now.as_any(), before)?;
                    return Ok(items.map(|items| vec![Self::new(list, Kind::End(items))]));
                }
                let mut found = Vec::new();
                for (at, (before, item)) in before.iter().zip(now).enumerate() {
                    if before.is(&item) {
                        continue;
                    }
                    match difference(Some(&before), Some(&item))? {
                        Some((by, from)) => {
                            found.push(Self::new(list, Kind::Index(at, by)).with(from));
                        }
                        None => return Ok(None),
                    }
                }
                Some(found)
            }
            Change::Deque(deque, before) => {
                let deque = deque.bind(py);
                let items = appended(deque, before.bind(py))?;
                items.map(|items| vec![Self::new(deque, Kind::End(items))])
            }
            Change::Contents(looked, node, before) => {
                let object = looked.object(*node, py).filter(is_deque);
                let Some(object) = object else {
                    return Ok(None);
                };
                let items = appended(&object, before.bind(py).cast::<PyList>()?)?;
                items.map(|items| vec![Self::new(&object, Kind::End(items))])
            }
            Change::Set(..) | Change::Order(..) => None,
        })
    }

    fn with(self, from: Option<(f64, f64)>) -> Self {
        Self { from, ..self }
    }

    // whether the other one has added what this one adds, but for what a difference of floats has lost
    fn has_made(&self, other: &Self, py: Python<'_>) -> bool {
        let by = self.kind.added().first();
        let by = by.and_then(|by| Some(by.bind(py).cast::<PyFloat>().ok()?.value()));
        // from 0 on, or where it is a number of a few digits, it is what the loss adds
        let is_exact = |by: &f64| {
            rounded(*by).to_bits() == by.to_bits()
                || self
                    .from
                    .is_some_and(|(from, _)| from.abs() < f64::MIN_POSITIVE)
        };
        by.filter(is_exact)
            .zip(other.from)
            .is_some_and(|(by, (before, now))| (before + by).to_bits() == now.to_bits())
    }

    // the same with what the other one adds
    fn adding(mut self, other: &Self, py: Python<'_>) -> Self {
        if let (
            Kind::Item(_, by) | Kind::Index(_, by) | Kind::Cell(by) | Kind::Place(_, by),
            Some(added),
        ) = (&mut self.kind, other.kind.added().first())
        {
            *by = added.clone_ref(py);
        }
        self.with(other.from)
    }

    // of a function the globals and the cells stay where it is made anew
    fn at_place(node: Node, parent: &Bound<'_, PyAny>, by: Py<PyAny>) -> Option<Self> {
        let py = parent.py();
        Some(match node.how {
            How::Global => {
                let key = node.key(py)?.clone().unbind();
                Self::new(bridge::globals(parent)?.as_any(), Kind::Item(key, by))
            }
            How::Cell => {
                let cell = bridge::closure_cell(parent, node.index())?;
                Self::new(&cell, Kind::Cell(by))
            }
            _ => Self::new(parent, Kind::Place(node, by)),
        })
    }

    // whether both are at the same place, of any objects
    fn is_placed_as(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        let key = |node: &Node| node.key(py).map(ToString::to_string);
        Ok(match (&self.kind, &other.kind) {
            (Kind::Item(one, _), Kind::Item(two, _)) => {
                let (one, two) = (one.bind(py), two.bind(py));
                one.get_type().is(two.get_type()) && one.eq(two)?
            }
            (Kind::Index(one, _), Kind::Index(two, _)) => one == two,
            (Kind::Place(one, _), Kind::Place(two, _)) => {
                one.how == two.how && one.index() == two.index() && key(one) == key(two)
            }
            (Kind::Cell(_), Kind::Cell(_)) | (Kind::End(_), Kind::End(_)) => true,
            _ => false,
        })
    }

    // whether both are the same, of any objects
    fn is_alike(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        let (one, two) = (self.kind.added(), other.kind.added());
        let mut pairs = one.iter().zip(two);
        let mut same = || pairs.all(|(one, two)| equal(one.bind(py), two.bind(py)));
        let is_near = || self.has_made(other, py) || other.has_made(self, py);
        Ok(self.is_placed_as(other, py)? && one.len() == two.len() && (same() || is_near()))
    }

    fn is_same(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.object.is(&other.object) && self.is_alike(other, py)?)
    }

    /// Return whether its object is still one of those that the loss reaches, at the same place, or of the model.
    pub fn is_current(&self, looked: &Looked, py: Python<'_>) -> bool {
        let address = self.object.as_ptr().addr();
        if self.of_model {
            let model = looked.model(py);
            return model.is_some_and(|model| is_within(&model, address, 0));
        }
        let (program, hint) = self.node.get();
        let is_place = |node: usize| {
            if (program, hint) == (looked.program.id, node) {
                return true;
            }
            let name = looked.program.name(py, node);
            let mut known = self.name.borrow_mut();
            *known.get_or_insert_with(|| name.clone()) == name
        };
        let found = looked.holder(address, hint, is_place, py);
        if let Some(node) = found {
            self.node.set((looked.program.id, node));
        }
        found.is_some()
    }

    /// How far the number has come, in the direction in which it goes; of a list its length.
    fn progress(&self, py: Python<'_>) -> PyResult<f64> {
        let object = self.object.bind(py);
        let now = match &self.kind {
            Kind::End(_) => Some(object.len()?.into_pyobject(py)?.into_any()),
            Kind::Item(key, _) => object.cast::<PyDict>()?.get_item(key)?,
            Kind::Index(at, _) => object.cast::<PyList>()?.get_item(*at).ok(),
            Kind::Cell(_) => object.getattr_opt(intern!(py, "cell_contents"))?,
            Kind::Place(node, _) => {
                Met::new(object.clone(), node).and_then(|met| node.find_in(&met))
            }
        };
        let now = now.and_then(|now| now.extract::<f64>().ok());
        let by = self.kind.added().first();
        let falls = by.is_some_and(|by| by.bind(py).lt(0).unwrap_or(false));
        Ok(now.map_or(0.0, |now| if falls { -now } else { now }))
    }

    /// Return whether it is to the model.
    pub fn is_of_model(&self) -> bool {
        self.of_model
    }

    /// Add it, where there is a number.
    pub fn add(&self, py: Python<'_>) -> PyResult<()> {
        let object = self.object.bind(py);
        match &self.kind {
            Kind::Item(key, by) => {
                let dict = object.cast::<PyDict>()?;
                match dict.get_item(key)? {
                    Some(now) if is_number(&now) => dict.set_item(key, now.add(by)?),
                    _ => Ok(()),
                }
            }
            Kind::Index(at, by) => {
                let list = object.cast::<PyList>()?;
                match list.get_item(*at) {
                    Ok(now) if is_number(&now) => list.set_item(*at, now.add(by)?),
                    _ => Ok(()),
                }
            }
            Kind::Cell(by) => {
                let name = intern!(py, "cell_contents");
                match object.getattr_opt(name)? {
                    Some(now) if is_number(&now) => object.setattr(name, now.add(by)?),
                    _ => Ok(()),
                }
            }
            Kind::Place(node, by) => {
                let Some(met) = Met::new(object.clone(), node) else {
                    return Ok(());
                };
                match node.find_in(&met) {
                    Some(now) if is_number(&now) => node.put(Some(&met), &now.add(by)?).map(drop),
                    _ => Ok(()),
                }
            }
            Kind::End(items) => {
                // what a class of the user's does beside has been seen by itself
                let mut items = items.iter();
                if let Ok(list) = object.cast::<PyList>() {
                    return items.try_for_each(|item| list.append(item));
                }
                let (class, append) = (deque(py)?, intern!(py, "append"));
                items.try_for_each(|item| class.call_method1(append, (object, item)).map(drop))
            }
        }
    }
}

// whether a model has what is at an address
fn is_within(object: &Bound<'_, PyAny>, address: usize, depth: usize) -> bool {
    if object.as_ptr().addr() == address {
        return true;
    }
    if depth > MAX_DEPTH {
        return false;
    }
    let within = |object: &Bound<'_, PyAny>| is_within(object, address, depth + 1);
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().any(|item| within(&item));
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return tuple.iter().any(|item| within(&item));
    }
    let Ok(dict) = object.cast::<PyDict>() else {
        return false;
    };
    let attributes = bridge::attributes(object).filter(|_| is_module(object));
    dict.values().iter().any(|item| within(&item))
        || attributes.is_some_and(|attributes| within(attributes.as_any()))
}

/// A change that a call has made, and what it adds to numbers.
pub struct OwnChange {
    change: Change,             // with what the loss has left
    adds: Option<Vec<Advance>>, // none where it does something else than to add to numbers, as far as one call tells
    is_new: bool,               // under a key that was not there
}

impl Refers for OwnChange {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.change.visit(collector)?;
        self.adds.visit(collector)
    }
}

impl OwnChange {
    /// What it adds to numbers; none where it does something else too.
    pub fn adds(&self) -> Option<&[Advance]> {
        self.adds.as_deref()
    }

    /// Its name, for a message.
    pub fn shown(&self, py: Python<'_>) -> String {
        self.change.shown(py)
    }

    /// Return whether it adds to numbers or a list, or puts a number or a text in the place of another value.
    pub fn is_plain(&self, py: Python<'_>) -> bool {
        self.adds.is_some() || self.change.is_plain(py)
    }

    /// Note changes, with what was there before, as long as they are there. `first`: a number that was not there was 0.
    pub fn note(
        changes: Vec<Change>,
        of_model: bool,
        first: bool,
        py: Python<'_>,
    ) -> PyResult<Vec<Self>> {
        let note = |mut change: Change| {
            let mut adds = Advance::of(&change, first, py)?;
            for add in adds.iter_mut().flatten() {
                add.of_model = of_model;
            }
            let is_new = matches!(change, Change::Item(.., None));
            change.turn(py)?;
            Ok(Self {
                change,
                adds,
                is_new,
            })
        };
        changes.into_iter().map(note).collect()
    }
}

/// Leave changes that have been taken back as the loss has. Returns what each call adds to numbers, none where it does something
/// else too, and the changes with what was there before.
pub fn leave(
    changes: Vec<OwnChange>,
    py: Python<'_>,
) -> PyResult<(Option<Vec<Advance>>, Vec<Change>)> {
    let (mut adds, mut left) = (Some(Vec::new()), Vec::new());
    for mut own in changes {
        own.change.swap(py)?;
        left.push(own.change);
        adds = adds.zip(own.adds).map(|(mut all, more)| {
            all.extend(more);
            all
        });
    }
    Ok((adds, left))
}

/// How far the numbers have come to which each call adds.
pub fn progress<'a>(adds: impl Iterator<Item = &'a Advance>, py: Python<'_>) -> PyResult<Vec<f64>> {
    adds.map(|add| add.progress(py)).collect()
}

/// Return whether both are the same, of any objects.
pub fn are_alike(one: &[Advance], other: &[Advance], py: Python<'_>) -> PyResult<bool> {
    let mut same = one.len() == other.len();
    for (one, other) in one.iter().zip(other) {
        same = same && one.is_alike(other, py)?;
    }
    Ok(same)
}

// take the first that is the same out of a list, if there is one
fn take(rest: &mut Vec<&Advance>, one: &Advance, py: Python<'_>) -> PyResult<bool> {
    for (at, other) in rest.iter().enumerate() {
        if other.is_same(one, py)? {
            rest.remove(at);
            return Ok(true);
        }
    }
    Ok(false)
}

/// Return whether a call has made these and no others, but for those to the end of a deque that is full, where what goes may be the
/// same as what comes.
pub fn are_made(adds: &[Advance], made: &[&Advance], py: Python<'_>) -> PyResult<bool> {
    let mut rest: Vec<&Advance> = adds.iter().collect();
    for made in made {
        if !take(&mut rest, made, py)? {
            return Ok(false);
        }
    }
    Ok(rest.iter().all(|add| matches!(add.kind, Kind::End(_))))
}

/// Return whether each is to a place to which one of the others is, too.
pub fn are_within(adds: &[Advance], others: &[Advance], py: Python<'_>) -> PyResult<bool> {
    for add in adds {
        let mut found = false;
        for other in others {
            found = found || (add.object.is(&other.object) && add.is_placed_as(other, py)?);
        }
        if !found {
            return Ok(false);
        }
    }
    Ok(true)
}

fn are_same(one: &[Advance], other: &[Advance], py: Python<'_>) -> PyResult<bool> {
    let same = one
        .iter()
        .zip(other)
        .all(|(one, two)| one.object.is(&two.object));
    Ok(same && are_alike(one, other, py)?)
}

// the name of what changes in another way than by such additions, or to what the first call has left
fn other(
    changes: &[OwnChange],
    adds: &[Advance],
    first: &[OwnChange],
    py: Python<'_>,
) -> PyResult<Option<String>> {
    let mut rest: Vec<&Advance> = adds.iter().collect();
    for own in changes {
        if first
            .iter()
            .any(|first| first.change.leaves(&own.change, py))
        {
            continue;
        }
        for add in own.adds.iter().flatten() {
            if !take(&mut rest, add, py)? {
                return Ok(Some(own.change.shown(py)));
            }
        }
        if own.adds.is_none() {
            return Ok(Some(own.change.shown(py)));
        }
    }
    Ok((!rest.is_empty()).then(|| "a number".into()))
}

/// The name of what a call has changed in another way than the first one, to the same objects with the same in them.
pub fn differ(
    again: &[OwnChange],
    first: &[OwnChange],
    py: Python<'_>,
) -> PyResult<Option<String>> {
    for own in again {
        let mut before = first.iter();
        let before = before.find(|other| other.change.is_of(&own.change, py));
        let same = match before {
            None => false,
            Some(before) if before.change.leaves(&own.change, py) => true,
            Some(before) => match (&before.adds, &own.adds) {
                (Some(one), Some(two)) => are_same(one, two, py)?,
                (None, None) => !own.change.is_plain(py),
                _ => false,
            },
        };
        if !same {
            return Ok(Some(own.change.shown(py)));
        }
    }
    Ok(None)
}

/// What a loss adds to numbers of its own at each call.
pub struct Adds {
    /// To those of the model.
    pub model: Vec<Advance>,
    reached: Vec<Advance>, // and to those that it reaches beside it
    /// True if its first call has changed no more than that.
    pub all: bool,
}

impl Adds {
    /// By the first call and another one, of the model and of what the loss reaches: what only the first has changed stays as it is.
    /// As an error, the name of what changes in another way.
    pub fn of_two(
        first: &(Vec<OwnChange>, Vec<OwnChange>),
        (model, reached): (&mut Vec<OwnChange>, &mut Vec<OwnChange>),
        py: Python<'_>,
    ) -> PyResult<Result<Self, String>> {
        let mut changes = first.0.iter().chain(&first.1);
        let all = first.0.len() == model.len()
            && first.1.len() == reached.len()
            && !changes.any(|own| own.is_new);
        let model = of_two(&first.0, std::mem::take(model), py)?;
        let reached = of_two(&first.1, std::mem::take(reached), py)?;
        Ok(match (model, reached) {
            (Ok(model), Ok(reached)) => Ok(Self {
                model,
                reached,
                all,
            }),
            (Err(name), _) | (_, Err(name)) => Err(name),
        })
    }

    /// The name of what a call changes in another way.
    pub fn is_other(
        &self,
        (model, reached): (&[OwnChange], &[OwnChange]),
        first: &(Vec<OwnChange>, Vec<OwnChange>),
        py: Python<'_>,
    ) -> PyResult<Option<String>> {
        match other(model, &self.model, &first.0, py)? {
            Some(name) => Ok(Some(name)),
            None => other(reached, &self.reached, &first.1, py),
        }
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Advance> {
        self.model.iter().chain(&self.reached)
    }

    /// Return whether a number under a key is one of those.
    pub fn has_item(&self, dict: &Py<PyDict>, key: &Py<PyAny>, py: Python<'_>) -> PyResult<bool> {
        for add in self.iter() {
            if let Kind::Item(name, _) = &add.kind {
                if add.object.is(dict) && name.bind(py).eq(key)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// All of them.
    pub fn into_vec(mut self) -> Vec<Advance> {
        self.model.extend(self.reached);
        self.model
    }
}

fn of_two(
    first: &[OwnChange],
    again: Vec<OwnChange>,
    py: Python<'_>,
) -> PyResult<Result<Vec<Advance>, String>> {
    let mut found = Vec::new();
    for own in again {
        let mut before = first.iter();
        let before = before.find(|other| other.change.is_of(&own.change, py));
        let before = before.and_then(|before| before.adds.as_ref());
        let (Some(one), Some(two)) = (before, own.adds) else {
            return Ok(Err(own.change.shown(py)));
        };
        if !are_same(one, &two, py)? {
            return Ok(Err(own.change.shown(py)));
        }
        // of two floats the one that gives both
        found.extend(two.into_iter().zip(one).map(|(two, one)| {
            if one.has_made(&two, py) {
                two.adding(one, py)
            } else {
                two
            }
        }));
    }
    Ok(Ok(found))
}
