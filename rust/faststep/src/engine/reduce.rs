//! The window of a step with a group, summed over all ranks before its update.
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    ops,
    transforms::{async_eval, eval},
    Array,
};

use super::{
    evaluate::evaluate,
    ranks::{options_hash, Ranks, Round},
    Engine, Owner, Stage,
};
use crate::{
    error::{unread, Error, Result},
    layout::aux_state::CLOSED,
    mlx::{array, group::Group, join},
    trace::Options,
};

/// Smaller arrays of one dtype are summed together until they have so many bytes: that of `nn.average_gradients`.
const JOINED_BYTES: usize = 32 << 20;

impl Engine {
    /// Forget the window that is open, as after a round that has failed.
    pub fn drop_window(&mut self) {
        self.window = None;
        if let Some(total) = self.places.total(&self.layout) {
            self.state[total] = Array::from_f32(CLOSED);
        }
    }

    /// Sum the window over all ranks; one that has none adds nothing. The update by it may follow. False: no rank has one.
    pub(super) fn reduce(
        &mut self,
        (ranks, update): Round<'_>,
        options: &Options,
        owner: &mut dyn Owner,
    ) -> Result<bool> {
        let summed = self.exchange(ranks, update, options, owner);
        if summed.is_err() {
            self.drop_window();
        }
        summed
    }

    /// Return whether the batches of the window have any weight.
    pub(super) fn has_weight(&self, owner: &mut dyn Owner) -> Result<bool> {
        let Some(total) = self.places.total(&self.layout) else {
            return Ok(false);
        };
        let mut weight = Ok(0.0);
        owner.unlocked(&mut || weight = self.state[total].try_item_exact::<f32>());
        Ok(weight.map_err(unread)? != 0.0)
    }

    // A window that a launch makes is waited for by the device alone: nothing of it can fail any more.
    fn exchange(
        &mut self,
        ranks: &mut Ranks,
        update: usize,
        options: &Options,
        owner: &mut dyn Owner,
    ) -> Result<bool> {
        let places = self.places.summed(&self.layout);
        if places.is_empty() {
            let none = "a step without a window cannot be summed";
            return Err(Error::Mlx(Exception::custom(none)));
        }
        let mut row = ranks.row(update);
        row.layout = ranks.layout_hash(&self.layout);
        row.options = options_hash(options);
        let has_window = self.window.is_some();
        let is_static = has_window && self.window_is_static();
        if has_window {
            row.has_window = 1.0;
            if !is_static {
                let window = places.iter().map(|&at| &self.state[at]);
                evaluate(window, owner).map_err(|error| self.lost(error, owner))?;
            }
        }
        self.clock.enter(Stage::Collective);
        let rows = ranks.round(row, update, owner)?;
        if rows.iter().all(|row| row.has_window <= 0.0) {
            return Ok(false);
        }
        let bytes = places.iter().map(|&at| self.state[at].nbytes()).sum();
        if is_static {
            ranks.sum((bytes, update), owner, |group| self.sum_static(group))?;
            return Ok(true);
        }
        let mut arrays = Vec::with_capacity(places.len());
        for &at in &places {
            let state = &mut self.state[at];
            let none = ops::zeros_dtype(state.shape(), state.dtype())?;
            arrays.push(if has_window {
                std::mem::replace(state, none) // MLX may sum in their memory
            } else {
                none
            });
        }
        let sums = ranks.sum((bytes, update), owner, |group| summed(group, arrays))?;
        for (at, sum) in places.into_iter().zip(sums) {
            self.state[at] = sum;
        }
        Ok(true)
    }
}

// Each list is handed over before the next one is made: the order is the same on all ranks. On CUDA each array is one, as those
// are that `sum_static` sums.
pub(super) fn summed(group: &Group, arrays: Vec<Array>) -> MlxResult<Vec<Array>> {
    let (mut joined, mut lists, mut bytes) = (Vec::new(), Vec::<Vec<Array>>::new(), 0);
    for array in arrays {
        let fits = bytes.max(array.nbytes()) < JOINED_BYTES && !join::is_cuda();
        let goes_on = lists
            .last()
            .is_some_and(|list| fits && list[0].dtype() == array.dtype());
        bytes = if goes_on { bytes } else { 0 } + array.nbytes();
        match lists.last_mut() {
            Some(list) if goes_on => list.push(array),
            _ => lists.push(vec![array]),
        }
    }
    let mut sums = Vec::new();
    for list in lists {
        let shapes: Vec<Vec<i32>> = list.iter().map(|array| array.shape().to_vec()).collect();
        let flat = match <[Array; 1]>::try_from(list) {
            Ok([only]) => only,
            Err(list) => {
                let flat = list.iter().map(|array| array.reshape(&[-1]));
                ops::concatenate(&flat.collect::<MlxResult<Vec<_>>>()?, 0)?
            }
        };
        let sum = group.sum(&flat)?;
        drop(flat);
        async_eval([&sum])?;
        joined.push((sum, shapes));
    }
    eval(joined.iter().map(|(sum, _)| sum))?;
    for (sum, shapes) in joined {
        if let [_] = shapes[..] {
            sums.push(sum);
            continue;
        }
        let mut offset = 0;
        for shape in shapes {
            let size: i32 = shape.iter().product();
            sums.push(array::view(&sum, &shape, offset)?);
            offset += usize::try_from(size).unwrap_or(0);
        }
    }
    Ok(sums)
}
