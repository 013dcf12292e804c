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
    mlx::{array, group::Group},
    trace::Options,
};

/// Buffers of one dtype are summed together until they have so many bytes: that of `nn.average_gradients`.
const JOINED_BYTES: usize = 32 << 20;

impl Engine {
    /// Forget the window that is open, as after a round that has failed.
    pub fn drop_window(&mut self) {
        self.window = None;
        if let Some(total) = self.places.total(&self.layout) {
            self.state[total] = Array::from_f32(CLOSED);
        }
    }

    /// Sum the window over all ranks; one that has none adds nothing. The update by it may follow.
    pub(super) fn reduce(
        &mut self,
        (ranks, update): Round<'_>,
        options: &Options,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let summed = self.exchange(ranks, update, options, owner);
        if summed.is_err() {
            self.drop_window();
        }
        summed
    }

    fn exchange(
        &mut self,
        ranks: &mut Ranks,
        update: usize,
        options: &Options,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let missing = || {
            Error::Mlx(Exception::custom(
                "a step without a window cannot be summed",
            ))
        };
        let first = self.places.window.ok_or_else(missing)?;
        let losses = self.places.losses.ok_or_else(missing)?;
        let total = first + self.layout.len();
        let mut row = ranks.row(update);
        row.layout = ranks.layout_hash(&self.layout);
        row.options = options_hash(options);
        if self.window.is_some() {
            let window = self.state[first..=total].iter();
            let window = window.chain([&self.state[losses]]);
            if let Err(error) = evaluate(window, owner) {
                return Err(self.lost(error, owner));
            }
            row.weight = self.state[total].try_item_exact().map_err(unread)?;
            row.losses = self.state[losses].try_item_exact().map_err(unread)?;
        }
        self.clock.enter(Stage::Collective);
        let rows = ranks.round(row, update, owner)?;
        ranks.weight = rows.iter().map(|row| row.weight).sum();
        if ranks.weight != 0.0 && !ranks.weight.is_nan() {
            let sums = &self.state[first..total];
            let none = sums
                .iter()
                .map(|sum| ops::zeros_dtype(sum.shape(), sum.dtype()));
            let none = none.collect::<MlxResult<Vec<_>>>()?;
            let arrays: Vec<Array> = if self.window.is_some() {
                self.state.splice(first..total, none).collect() // MLX may sum in their memory
            } else {
                none
            };
            let bytes = arrays.iter().map(Array::nbytes).sum();
            let sums = ranks.sum((bytes, update), owner, |group| summed(group, arrays))?;
            self.state.splice(first..total, sums);
        }
        let sum = rows.iter().map(|row| row.losses).sum();
        self.state[total] = Array::from_f32(ranks.weight);
        self.state[losses] = Array::from_f32(sum);
        Ok(())
    }
}

// each list is handed over before the next one is made: the order is the same on all ranks
fn summed(group: &Group, arrays: Vec<Array>) -> MlxResult<Vec<Array>> {
    let (mut joined, mut lists, mut bytes) = (Vec::new(), Vec::<Vec<Array>>::new(), 0);
    for array in arrays {
        let goes_on = lists
            .last()
            .is_some_and(|list| list[0].dtype() == array.dtype() && bytes < JOINED_BYTES);
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
