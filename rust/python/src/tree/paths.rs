//! Paths to the arrays and objects of a tree.
use pyo3::prelude::*;

use super::{text::text, walk::Kind, Item};

#[derive(Default)]
pub struct Paths {
    open: Vec<(Kind, usize, usize)>, // kind, length, items seen
    keys: Vec<String>,
    key: Option<String>,
    pub arrays: Vec<Vec<String>>,
    pub objects: Vec<Vec<String>>,
}

impl Paths {
    pub(super) fn next_path(&self) -> Vec<String> {
        let mut path = self.keys.clone();
        match (&self.key, self.open.last()) {
            (Some(key), _) => path.push(key.clone()),
            (None, Some((Kind::List | Kind::Tuple, _, seen))) => path.push(seen.to_string()),
            _ => {}
        }
        path.retain(|part| !part.is_empty());
        path
    }

    /// The name of the next item, where that is an attribute of a module.
    pub(super) fn attribute(&self) -> Option<String> {
        let last = self.open.last();
        let is_one = last.is_some_and(|(kind, ..)| *kind == Kind::Attributes);
        self.key.clone().filter(|_| is_one)
    }

    /// The path to the attribute or item of a module in which the next item is: to the module, and its name there.
    pub(super) fn of_module(&self) -> Option<(&[String], &String)> {
        let is_one =
            |(kind, ..): &(Kind, usize, usize)| matches!(kind, Kind::Module | Kind::Attributes);
        let at = self.open.iter().rposition(is_one)?;
        let name = self.keys.get(at + 1).or(self.key.as_ref())?;
        Some((&self.keys[..=at], name))
    }

    pub(super) fn step(&mut self, item: &Item, py: Python<'_>) {
        match item {
            Item::Key(key) => {
                self.key = Some(text(key.bind(py)));
            }
            Item::Open(kind, len, _) => {
                let part = match (self.key.take(), self.open.last()) {
                    (Some(key), _) => key,
                    (None, Some((Kind::List | Kind::Tuple, _, seen))) => seen.to_string(),
                    _ => String::new(),
                };
                self.keys.push(part);
                self.open.push((*kind, *len, 0));
                self.close();
            }
            Item::Array | Item::Static(_) | Item::Object => {
                match item {
                    Item::Array => self.arrays.push(self.next_path()),
                    Item::Object => self.objects.push(self.next_path()),
                    _ => {}
                }
                self.key = None;
                self.seen();
            }
        }
    }

    fn seen(&mut self) {
        if let Some((_, _, seen)) = self.open.last_mut() {
            *seen += 1;
        }
        self.close();
    }

    // the attributes of a module or optimizer follow its items and end the node
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

/// A path as the user writes it behind `model.`.
pub fn dotted(path: &[String]) -> String {
    path.join(".")
}
