//! Arrays that are replaced between looks, by the step of another model say: held, their memory could not be used again.
use std::collections::HashMap;

use faststep::engine::HeldArrays;

/// Number of looks at which an array has to be the one before, for it to be held between looks again.
const STILL: usize = 8;

/// The arrays that are not held between looks, by number: the identity at the last look, and since how many looks.
#[derive(Default)]
pub struct Moving(HashMap<usize, (usize, usize)>);

impl Moving {
    /// Note an array that is met where `known` is held, 0 if nothing.
    pub fn meet(&mut self, at: usize, known: usize, id: usize) {
        let before = self.0.get(&at).copied();
        let looks = match before {
            Some((last, looks)) if last == id => looks + 1,
            None if known == 0 => return,
            _ => 0,
        };
        if looks < STILL {
            self.0.insert(at, (id, looks));
        } else {
            self.0.remove(&at);
        }
    }

    /// Release what is not to be held.
    pub fn let_go(&self, held: &mut HeldArrays) {
        for &at in self.0.keys() {
            if held.ids().get(at).is_some_and(|id| *id != 0) {
                held.release(at);
            }
        }
    }
}
