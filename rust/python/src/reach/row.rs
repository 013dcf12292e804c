//! Nodes next to each other, which are compared as one.
use std::collections::HashSet;

use pyo3::prelude::*;

use super::node::{Expect, How, Node};
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
    /// The rows among nodes.
    pub fn all(nodes: &[Node], py: Python<'_>) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::new();
        let mut last: Option<(usize, &Node)> = None;
        let mut arrays = 0; // before the node
        let needed = needed(nodes);
        for (at, node) in nodes.iter().enumerate() {
            let (kind, number, known) = match &node.expect {
                Expect::Value(_, number) => (Kind::Values, *number, None),
                Expect::Array => (Kind::Arrays, arrays, None),
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
            Expect::Same(other) => Some(*other),
            _ => None,
        };
        node.parent.into_iter().chain(same)
    });
    needed.collect()
}
