//! Paths to the arrays of a tree.
use pyo3::prelude::*;

use super::{text::text, walk::Kind, Item};

/// Follows the items of a tree and notes the path to each array.
#[derive(Default)]
pub struct Paths {
    open: Vec<(Kind, usize, usize)>, // kind, length, items seen
    keys: Vec<String>, // names of the open containers; an empty one is left out of paths
    key: Option<String>, // the key of the next item
    /// The path to each array.
    pub arrays: Vec<Vec<String>>,
}

impl Paths {
    /// Step over the next item.
    pub(super) fn step(&mut self, item: &Item, py: Python<'_>) {
        match item {
            Item::Key(key) => {
                self.key = Some(text(key.bind(py)));
            }
            Item::Open(kind, len, _) => {
                let name = self.take_name();
                self.keys.push(name);
                self.open.push((*kind, *len, 0));
                self.close();
            }
            Item::Array => {
                let path = self.here();
                self.arrays.push(path);
                self.seen();
            }
            Item::Static(_) | Item::Fixed(_) | Item::Object => {
                self.key = None;
                self.seen();
            }
        }
    }

    /// The path to the next item.
    pub(super) fn here(&mut self) -> Vec<String> {
        let name = self.take_name();
        let path = self.keys.iter().chain([&name]);
        path.filter(|key| !key.is_empty()).cloned().collect()
    }

    // the key of the next item, or its index in a list or tuple
    fn take_name(&mut self) -> String {
        match (self.key.take(), self.open.last()) {
            (Some(key), _) => key,
            (None, Some((Kind::List | Kind::Tuple, _, seen))) => seen.to_string(),
            _ => String::new(),
        }
    }

    fn seen(&mut self) {
        if let Some((_, _, seen)) = self.open.last_mut() {
            *seen += 1;
        }
        self.close();
    }

    // close the containers that are complete; behind the items of a module or an optimizer come its attributes
    fn close(&mut self) {
        while let Some(&(kind, len, seen)) = self.open.last() {
            let attributes = usize::from(matches!(kind, Kind::Module | Kind::Optimizer));
            if seen < len + attributes {
                return;
            }
            self.open.pop();
            self.keys.pop();
            if let Some((_, _, seen)) = self.open.last_mut() {
                *seen += 1;
            }
        }
    }
}

/// Join a path, as the user writes it behind `model.`.
pub fn dotted(path: &[String]) -> String {
    path.join(".")
}
