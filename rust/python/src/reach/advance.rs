//! What a loss does to its own numbers at each call, which is done for it where a trace stands for the call.
use std::rc::Rc;

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyList},
};

use super::{
    suspect::{is_number, Change},
    Looked,
};
use crate::{
    mlx::classes::is_deque,
    tree::static_value::{equal, is_plain},
};

/// What each call adds to a number, or appends to a list.
pub enum Advance {
    /// Under a key of a dict.
    Item(Py<PyDict>, Py<PyAny>, Py<PyAny>),
    /// In a list, by index.
    Index(Py<PyList>, usize, Py<PyAny>),
    /// At a node that a loss reaches: in a cell, a global or an attribute of a class.
    Node(Rc<Looked>, usize, Py<PyAny>),
    /// Numbers and texts at the end of a list or a deque.
    End(Py<PyAny>, Vec<Py<PyAny>>),
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

// what is added; none where these are no numbers
fn difference(
    before: Option<&Bound<'_, PyAny>>,
    now: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Py<PyAny>>> {
    match (before, now) {
        (Some(before), Some(now)) if is_number(before) && is_number(now) => {
            Ok(Some(now.sub(before)?.unbind()))
        }
        _ => Ok(None),
    }
}

impl Advance {
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
                by.map(|by| vec![Self::Item(dict.clone_ref(py), key.clone_ref(py), by)])
            }
            Change::Node(looked, node, before) => {
                let now = looked.at(py, *node);
                let by = difference(Some(before.bind(py)), now.as_ref())?;
                by.map(|by| vec![Self::Node(looked.clone(), *node, by)])
            }
            Change::List(list, before) => {
                let (now, before) = (list.bind(py), before.bind(py));
                if now.len() != before.len() {
                    let items = appended(now.as_any(), before)?;
                    let end = |items| vec![Self::End(list.clone_ref(py).into_any(), items)];
                    return Ok(items.map(end));
                }
                let mut found = Vec::new();
                for (at, (before, now)) in before.iter().zip(now).enumerate() {
                    if before.is(&now) {
                        continue;
                    }
                    match difference(Some(&before), Some(&now))? {
                        Some(by) => found.push(Self::Index(list.clone_ref(py), at, by)),
                        None => return Ok(None),
                    }
                }
                Some(found)
            }
            Change::Deque(deque, before) => {
                let items = appended(deque.bind(py), before.bind(py))?;
                items.map(|items| vec![Self::End(deque.clone_ref(py), items)])
            }
            Change::Contents(looked, node, before) => {
                let object = looked.at(py, *node).filter(is_deque);
                let Some(object) = object else {
                    return Ok(None);
                };
                let items = appended(&object, before.bind(py).cast::<PyList>()?)?;
                items.map(|items| vec![Self::End(object.unbind(), items)])
            }
            Change::Order(..) => None,
        })
    }

    fn is_same(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        let (one, two, place) = match (self, other) {
            (Self::Item(dict, key, one), Self::Item(other, name, two)) => {
                (one, two, dict.is(other) && key.bind(py).eq(name)?)
            }
            (Self::Index(list, at, one), Self::Index(other, index, two)) => {
                (one, two, list.is(other) && at == index)
            }
            (Self::Node(looked, node, one), Self::Node(other, at, two)) => {
                (one, two, looked.is_place(*node, other, *at, py))
            }
            (Self::End(list, one), Self::End(other, two)) => {
                let mut pairs = one.iter().zip(two);
                let same = pairs.all(|(one, two)| equal(one.bind(py), two.bind(py)));
                return Ok(list.is(other) && one.len() == two.len() && same);
            }
            _ => return Ok(false),
        };
        let (one, two) = (one.bind(py), two.bind(py));
        Ok(place && one.get_type().is(two.get_type()) && one.eq(two)?)
    }

    /// Add it, where there is a number.
    pub fn add(&self, py: Python<'_>) -> PyResult<()> {
        match self {
            Self::Item(dict, key, by) => {
                let dict = dict.bind(py);
                match dict.get_item(key)? {
                    Some(now) if is_number(&now) => dict.set_item(key, now.add(by)?),
                    _ => Ok(()),
                }
            }
            Self::Index(list, at, by) => {
                let list = list.bind(py);
                match list.get_item(*at) {
                    Ok(now) if is_number(&now) => list.set_item(*at, now.add(by)?),
                    _ => Ok(()),
                }
            }
            Self::Node(looked, node, by) => match looked.at(py, *node) {
                Some(now) if is_number(&now) => looked.put_at(*node, &now.add(by)?).map(drop),
                _ => Ok(()),
            },
            Self::End(list, items) => {
                let items = items.iter().map(|item| item.bind(py));
                let items = PyList::new(py, items)?;
                list.call_method1(py, intern!(py, "extend"), (items,))
                    .map(drop)
            }
        }
    }
}

/// A change that a call has made, and what it adds to numbers.
pub struct OwnChange {
    change: Change,             // with what the loss has left
    adds: Option<Vec<Advance>>, // none where it does something else than to add to numbers, as far as one call tells
}

impl OwnChange {
    /// Note changes, with what was there before, as long as they are there. `first`: a number that was not there was 0.
    pub fn note(changes: Vec<Change>, first: bool, py: Python<'_>) -> PyResult<Vec<Self>> {
        let note = |mut change: Change| {
            let adds = Advance::of(&change, first, py)?;
            change.turn(py)?;
            Ok(Self { change, adds })
        };
        changes.into_iter().map(note).collect()
    }
}

/// Leave changes that have been taken back as the loss has. Returns what each call adds to numbers; none where it does something
/// else too.
pub fn leave(changes: Vec<OwnChange>, py: Python<'_>) -> PyResult<Option<Vec<Advance>>> {
    let mut adds = Some(Vec::new());
    for mut own in changes {
        own.change.swap(py)?;
        adds = adds.zip(own.adds).map(|(mut all, more)| {
            all.extend(more);
            all
        });
    }
    Ok(adds)
}

/// Return whether both are the same.
pub fn are_same(one: &[Advance], other: &[Advance], py: Python<'_>) -> PyResult<bool> {
    let mut same = one.len() == other.len();
    for (one, other) in one.iter().zip(other) {
        same = same && one.is_same(other, py)?;
    }
    Ok(same)
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
            let mut same = None;
            for (number, other) in rest.iter().enumerate() {
                if same.is_none() && add.is_same(other, py)? {
                    same = Some(number);
                }
            }
            match same {
                Some(at) => drop(rest.remove(at)),
                None => return Ok(Some(own.change.shown(py))),
            }
        }
        if own.adds.is_none() {
            return Ok(Some(own.change.shown(py)));
        }
    }
    Ok((!rest.is_empty()).then(|| "a number".into()))
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
        let all = first.0.len() == model.len() && first.1.len() == reached.len();
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
        found.extend(two);
    }
    Ok(Ok(found))
}
