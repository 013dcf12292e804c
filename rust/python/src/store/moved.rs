//! Places of the model's arrays that the loss has changed: it may put other modules, dicts and lists into the model.
use std::collections::{HashMap, HashSet};

use faststep::engine::Role;
use pyo3::{exceptions::PyValueError, prelude::*};

use super::ModelSignature;
use crate::tree::{paths::dotted, slot::Slot, Tree};

/// The place of each array now, for those whose place is another one.
pub type Moved<'py> = Vec<Option<Slot<'py>>>;

impl ModelSignature {
    /// The new places of the model's arrays, by their paths; none where the model is what was checked last, with arrays of these
    /// identities.
    ///
    /// # Errors
    /// Where an array that is trained has got the place of another one, or has had one with it.
    pub fn moved<'py>(
        &self,
        model: &Bound<'py, PyAny>,
        before: &[Slot<'py>],
        known: &[usize],
    ) -> PyResult<Option<Moved<'py>>> {
        if self.tree.same_slots(model, known).is_some() {
            return Ok(None);
        }
        let (tree, slots) = Tree::of_model(model)?;
        if *tree.containers() == *self.tree.containers() {
            return Ok(None);
        }
        let joined = self.joined(&tree, model.py(), |_| true);
        let trained = self.joined(&tree, model.py(), |number| {
            self.parameters.contains(&number)
        });
        let mut there: HashMap<_, _> = tree.paths(model.py()).into_iter().zip(slots).collect();
        let mut moved = Moved::with_capacity(self.roles.len());
        for (number, (role, path)) in self.roles.iter().enumerate() {
            let now = there.remove(path);
            let now = now.filter(|now| !now.place.is(&before[number].place));
            moved.push(match role {
                _ if now.is_none() => None,
                // another name of what is trained elsewhere: it has no value of its own
                Role::Parameter(at) if self.parameters[*at] != number => None,
                Role::Parameter(_) if trained.contains(&number) || self.is_double(number) => {
                    return Err(PyValueError::new_err(format!(
                        "the loss function: expected it to leave model.{0} at a place of its own, got one that is another's too: \
                         it has put a module of the model in the place of another. Do that before the step",
                        dotted(path)
                    )))
                }
                Role::Other(_) if joined.contains(&number) => None,
                Role::Parameter(_) | Role::Other(_) => now,
            });
        }
        Ok(Some(moved))
    }

    // true if another array of the model had the same place
    fn is_double(&self, number: usize) -> bool {
        let mut doubles = self.tree.doubles().iter();
        doubles.any(|&(slot, last)| slot == number || last == number)
    }

    // the numbers of arrays that have one place now, of those that count
    fn joined(&self, now: &Tree, py: Python<'_>, counts: impl Fn(usize) -> bool) -> HashSet<usize> {
        let numbers = self.roles.iter().map(|(_, path)| path).zip(0..);
        let numbers: HashMap<_, _> = numbers.filter(|(_, number)| counts(*number)).collect();
        let paths = now.paths(py);
        let number = |slot: usize| paths.get(slot).and_then(|path| numbers.get(path)).copied();
        let mut groups: HashMap<usize, HashSet<usize>> = HashMap::new();
        for &(slot, last) in now.doubles() {
            let group = groups.entry(last).or_default();
            group.extend([slot, last].into_iter().filter_map(number));
        }
        let groups = groups.into_values().filter(|group| group.len() > 1);
        groups.flatten().collect()
    }
}
