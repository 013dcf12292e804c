//! Shapes and dtypes of the arrays that a loss reaches: those of the last look, and known ones.
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use faststep::engine::Tensor;

/// The most lists that are known again.
const MAX_KNOWN: usize = 64;

/// Lists of a tensor for each array: at every look the same one for the same shapes and dtypes.
#[derive(Default)]
pub struct Forms {
    now: RefCell<Rc<Vec<Tensor>>>,
    known: RefCell<Vec<Rc<Vec<Tensor>>>>, // most recent last
    changed: Cell<Option<usize>>, // the first array that has got another one since the last look was done
}

impl Forms {
    /// One list.
    pub fn of(tensors: Vec<Tensor>) -> Self {
        let tensors = Rc::new(tensors);
        Self {
            now: RefCell::new(tensors.clone()),
            known: RefCell::new(vec![tensors]),
            changed: Cell::default(),
        }
    }

    /// Those of the last look that is done.
    pub fn now(&self) -> Rc<Vec<Tensor>> {
        self.now.borrow().clone()
    }

    /// Note the tensor of an array, of which there is one.
    pub fn meet(&self, at: usize, tensor: Tensor) {
        let mut now = self.now.borrow_mut();
        if now.get(at).is_some_and(|known| *known != tensor) {
            Rc::make_mut(&mut now)[at] = tensor;
            self.changed.set(self.changed.get().or(Some(at)));
        }
    }

    /// End a look: the array that has another tensor than before, if there is one.
    pub fn settle(&self) -> Option<usize> {
        let changed = self.changed.take()?;
        let mut now = self.now.borrow_mut();
        let mut known = self.known.borrow_mut();
        let at = known.iter().position(|known| known == &*now);
        let again = at.map_or_else(|| now.clone(), |at| known.remove(at));
        now.clone_from(&again);
        known.push(again);
        if known.len() > MAX_KNOWN {
            known.remove(0);
        }
        Some(changed)
    }
}
