//! Objects that cannot be referred to weakly (a function made by `mx.compile`, say), which programs keep alive.
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::{
    looked::References,
    node::{Expect, Node},
};
use crate::{mlx::bridge, tree::identity::Weak};

// how often programs of the process refer to each, by its address
static KEPT: LazyLock<Mutex<References>> = LazyLock::new(Mutex::default);

fn kept() -> MutexGuard<'static, References> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The objects that one program keeps alive, by their addresses, as often as it refers to each.
#[derive(Default)]
pub struct Kept(Vec<usize>);

impl Kept {
    /// Those of a program's nodes.
    pub fn of(nodes: &[Node]) -> Self {
        let addresses: Vec<_> = objects(nodes).map(|it| it.as_ptr().addr()).collect();
        let mut kept = kept();
        for address in &addresses {
            *kept.entry(*address).or_insert(0) += 1;
        }
        Self(addresses)
    }

    /// Return whether nobody but programs holds one of them. `nodes`: the program's; `known`: how often looks refer to each.
    pub fn is_left(&self, nodes: &[Node], known: &References, py: Python<'_>) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let kept = kept();
        let count = |counts: &References, address| counts.get(&address).copied().unwrap_or(0);
        objects(nodes).any(|object| {
            let address = object.as_ptr().addr();
            bridge::refcount(object.bind(py)) == count(&kept, address) + count(known, address)
        })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut kept = kept();
        for address in &self.0 {
            if let Some(count) = kept.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    kept.remove(address);
                }
            }
        }
    }
}

fn objects(nodes: &[Node]) -> impl Iterator<Item = &Py<PyAny>> {
    nodes.iter().filter_map(|node| match &node.expect {
        Expect::Identity(Weak::Strong(object)) => Some(object),
        _ => None,
    })
}
