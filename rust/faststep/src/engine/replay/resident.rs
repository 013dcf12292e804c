//! The static arrays of parameters and state, and the lazy copies of them that the engine holds in their place.
use mlx_rs::{error::Result as MlxResult, ops, Array};

use crate::{
    engine::{evaluate::evaluate, Engine, Owner},
    error::{Error, Result},
    mlx::{array, memory, replay},
};

/// The static arrays of parameters and state. Nobody but the engine and its captures has a handle to one.
#[derive(Debug)]
pub(in crate::engine) struct Resident {
    /// Unlike that of any before.
    pub number: usize,
    /// Buffers, then the state.
    pub arrays: Vec<Array>,
    /// Arrays of the same values, which the engine holds; empty: it holds others.
    pub shown: Vec<Array>,
    holders: Vec<usize>, // of each of those, and of each parameter, when they were shown
    views: Vec<usize>,
}

/// A copy (lazily), row after row.
pub(super) fn copied(array: &Array) -> MlxResult<Array> {
    ops::select(Array::from_bool(true), array, array)?.contiguous()
}

impl Resident {
    /// What somebody beside the engine holds, and nobody has evaluated.
    pub fn held(&self, engine: &Engine, updates: bool) -> Vec<Array> {
        let mut held = vec![false; self.shown.len()];
        for (i, (shown, &holders)) in self.shown.iter().zip(&self.holders).enumerate() {
            held[i] = array::holders(shown) > holders;
        }
        if updates && !self.shown.is_empty() {
            let is_held = |i: usize| array::holders(&engine.parameters[i]) > self.views[i];
            for (buffer, held) in held[..engine.layout.len()].iter_mut().enumerate() {
                *held |= engine.layout.members(buffer).any(is_held);
            }
        }
        let held = self.shown.iter().zip(held).filter(|(_, held)| *held);
        let held = held.map(|(shown, _)| shown);
        held.filter(|shown| array::is_lazy(shown))
            .cloned()
            .collect()
    }

    /// The values that are not those of the static arrays, each with its static array.
    pub fn changed(&self, values: &[Array]) -> MlxResult<Vec<(Array, Array)>> {
        let mut copies = Vec::new();
        for (i, (value, place)) in values.iter().zip(&self.arrays).enumerate() {
            if self.shown.get(i).map(array::id) != Some(array::id(value)) {
                copies.push((array::rows(value)?, place.clone()));
            }
        }
        Ok(copies)
    }

    /// Whether these are values of the same arrays.
    pub fn fits(&self, values: &[Array]) -> bool {
        let same = |(a, b): (&Array, &Array)| a.shape() == b.shape() && a.dtype() == b.dtype();
        self.arrays.len() == values.len() && self.arrays.iter().zip(values).all(same)
    }

    /// The bytes of the static arrays.
    pub fn bytes(&self) -> usize {
        self.arrays.iter().map(Array::nbytes).sum()
    }
}

impl Engine {
    /// Buffers, then the state.
    pub(super) fn values(&self) -> Vec<Array> {
        let buffers = self.buffers().into_iter();
        buffers.chain(self.state.iter().cloned()).collect()
    }

    /// Have static arrays with the values of parameters and state.
    pub(super) fn fill_resident(&mut self, owner: &mut dyn Owner) -> MlxResult<()> {
        let values = self.values();
        if let Some(resident) = self.resident.as_ref().filter(|it| it.fits(&values)) {
            let copies = resident.changed(&values)?;
            evaluate(copies.iter().map(|(from, _)| from), owner)?;
            replay::copy(&copies)?;
            owner.unlocked(&mut memory::synchronize);
            return Ok(());
        }
        self.give_back();
        let arrays = values.iter().map(copied).collect::<MlxResult<Vec<_>>>()?;
        evaluate(&arrays, owner)?;
        self.residents += 1;
        self.resident = Some(Resident {
            number: self.residents,
            arrays,
            shown: Vec::new(),
            holders: Vec::new(),
            views: Vec::new(),
        });
        Ok(())
    }

    /// Show lazy copies in the place of what a graph has written: of all parameters, where it updates them, and of these
    /// arrays of the state. Those that nobody has evaluated are as good as they were.
    pub(super) fn show_resident(
        &mut self,
        resident: &mut Resident,
        updates: bool,
        state: &[usize],
    ) -> MlxResult<()> {
        let buffers = self.layout.len();
        let is_old = |shown: &Array| !array::is_lazy(shown);
        if updates && resident.shown[..buffers].iter().any(is_old) {
            for (shown, place) in resident.shown[..buffers].iter_mut().zip(&resident.arrays) {
                *shown = copied(place)?;
            }
            self.parameters.clear();
            self.shared.clear();
            self.fresh = resident.shown[..buffers].to_vec();
            self.show()?;
        }
        for &index in state {
            let shown = &mut resident.shown[buffers + index];
            if is_old(shown) {
                *shown = copied(&resident.arrays[buffers + index])?;
                self.state[index] = shown.clone();
            }
        }
        resident.holders = resident.shown.iter().map(array::holders).collect();
        resident.views = self.parameters.iter().map(array::holders).collect();
        Ok(())
    }

    /// Before MLX evaluates a step: whatever waits to be copied from the static arrays is, since theirs will not be the values
    /// of the state any more.
    pub(in crate::engine) fn leave_replay(&mut self, owner: &mut dyn Owner) -> Result<()> {
        let Some(resident) = &mut self.resident else {
            return Ok(());
        };
        let shown = std::mem::take(&mut resident.shown);
        let lazy: Vec<&Array> = shown.iter().filter(|array| array::is_lazy(array)).collect();
        if !lazy.is_empty() {
            evaluate(lazy, owner).map_err(Error::Device)?;
        }
        Ok(())
    }
}
