//! Nodes next to each other, which are compared as one.
use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
};

use pyo3::prelude::*;

use super::node::{number, Expect, How, Node};
use crate::tree::identity::Weak;

/// What a row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Numbers and strings.
    Values,
    /// Arrays.
    Arrays,
    /// Objects that have to be the same, from which nothing else is found, and keys under which there is nothing.
    Fixed,
}

/// Nodes that are next to each other in a dict or a list, and among the nodes.
#[derive(Debug)]
pub struct Row {
    /// The first of them.
    pub first: usize,
    /// The number of the first among the values, or among the arrays.
    pub number: usize,
    /// Where they stand.
    pub places: Places,
    /// What they are.
    pub kind: Kind,
    /// The addresses of objects that have to be the same; 0 where there is nothing.
    pub known: Vec<usize>,
    /// True if the last look has met all of it in a dict in which nothing else was: its keys have the order of the row.
    pub is_whole: Cell<bool>,
    version: Cell<Option<usize>>, // of the dict when each was the very object that is known
}

/// Places in a container.
#[derive(Debug)]
pub enum Places {
    /// Keys of a dict.
    Keys(Vec<Py<PyAny>>),
    /// So many indices of a list, from the first on.
    Indices(usize, usize),
}

/// Fewer than these are looked up one by one.
const MIN_ROW: usize = 4;

impl Row {
    /// The rows among nodes, which are told of them.
    pub fn number(nodes: &mut [Node], py: Python<'_>) -> Vec<Self> {
        let rows = Self::all(nodes, py);
        let in_rows = rows.iter().flat_map(|row| row.first..row.first + row.len());
        let in_rows: HashSet<usize> = in_rows.collect();
        number(nodes, |at, node| {
            !in_rows.contains(&at) && !matches!(node.expect, Expect::Value(..))
        });
        let mut firsts = HashMap::new();
        let compared = rows.iter().enumerate();
        for (number, row) in compared.filter(|(_, row)| row.kind != Kind::Fixed) {
            let first = &nodes[row.first];
            firsts.entry((first.parent, first.how)).or_insert(number);
        }
        for (at, node) in nodes.iter_mut().enumerate() {
            let (parent, how) = match &node.expect {
                Expect::Container(..) => (Some(at), How::Item),
                _ if node.how == How::Names => (node.parent, How::Instance),
                _ => continue,
            };
            let whole = firsts.get(&(parent, how)).copied();
            node.whole = whole.filter(|&whole| match &node.expect {
                Expect::Container(.., all) => all.are(rows[whole].keys()),
                _ => rows[whole].first < at,
            });
        }
        rows
    }

    /// Keys of a dict; none of a list.
    pub fn keys(&self) -> &[Py<PyAny>] {
        match &self.places {
            Places::Keys(keys) => keys,
            Places::Indices(..) => &[],
        }
    }

    /// The identities of its arrays, among those of all.
    pub fn known_ids<'a>(&self, ids: &'a [usize]) -> &'a [usize] {
        let known = ids.get(self.number..).unwrap_or_default();
        &known[..known.len().min(self.len())]
    }

    /// Return whether nothing in its dict has been changed since all was there: of arrays more than that may change.
    pub fn is_same(&self, version: Option<usize>) -> bool {
        version.is_some() && version == self.version.get()
    }

    /// Note how many have been met, in a dict of so many; `version`: its own, where these are the very objects known.
    pub fn note(&self, met: usize, of: usize, version: Option<usize>) {
        self.is_whole.set(met == self.len() && met == of);
        let fixed = met == self.len() && self.kind != Kind::Arrays;
        self.version.set(version.filter(|_| fixed));
    }

    fn all(nodes: &[Node], py: Python<'_>) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::new();
        let mut last: Option<(usize, &Node)> = None;
        let mut arrays = 0; // before the node
        let needed = needed(nodes);
        for (at, node) in nodes.iter().enumerate() {
            let (kind, number, known) = match &node.expect {
                Expect::Value(_, number) => (Kind::Values, *number, None),
                Expect::Array if !needed.contains(&at) => (Kind::Arrays, arrays, None),
                Expect::Identity(Weak::Strong(object)) if !needed.contains(&at) => {
                    (Kind::Fixed, 0, Some(object.as_ptr().addr()))
                }
                Expect::Absent if !needed.contains(&at) => (Kind::Fixed, 0, Some(0)),
                _ => {
                    arrays += node.arrays();
                    continue;
                }
            };
            arrays += node.arrays();
            let places = match (node.how, node.key(py)) {
                (How::Item | How::Instance, Some(key)) => Places::Keys(vec![key.clone().unbind()]),
                (How::Global, Some(key)) if kind == Kind::Fixed => {
                    Places::Keys(vec![key.clone().unbind()])
                }
                (How::Index, _) if kind == Kind::Arrays => Places::Indices(node.index(), 1),
                _ => continue,
            };
            let before = last.replace((at, node));
            let goes_on = before.is_some_and(|(before, last)| {
                before + 1 == at && last.parent == node.parent && last.how == node.how
            });
            let mut row = rows.last_mut().filter(|row| goes_on && row.kind == kind);
            match (row.as_mut().map(|row| &mut row.places), places) {
                (Some(Places::Keys(keys)), Places::Keys(key)) => keys.extend(key),
                (Some(Places::Indices(first, count)), Places::Indices(index, _))
                    if *first + *count == index =>
                {
                    *count += 1;
                }
                (_, places) => {
                    rows.push(Self {
                        first: at,
                        number,
                        places,
                        kind,
                        known: known.into_iter().collect(),
                        is_whole: Cell::new(false),
                        version: Cell::new(None),
                    });
                    continue;
                }
            }
            if let Some(row) = row {
                row.known.extend(known);
            }
        }
        rows.retain(|row| row.kind == Kind::Fixed || row.len() >= MIN_ROW);
        rows
    }

    /// The number of them.
    pub fn len(&self) -> usize {
        match &self.places {
            Places::Keys(keys) => keys.len(),
            Places::Indices(_, count) => *count,
        }
    }
}

// the nodes from which others are found, and with which others are compared
fn needed(nodes: &[Node]) -> HashSet<usize> {
    let needed = nodes.iter().flat_map(|node| {
        let same = match &node.expect {
            Expect::Same(other, _) => Some(*other),
            _ => None,
        };
        node.parent.into_iter().chain(same)
    });
    needed.collect()
}
