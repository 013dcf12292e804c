//! The window of a step with a group, summed over all ranks before its update.
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    ops,
    transforms::eval,
    Array,
};

use super::{
    evaluate::evaluate,
    ranks::{options_hash, order_hash, Ranks, Round},
    Engine, Owner, Stage,
};
use crate::{
    error::{unread, Error, Result},
    layout::aux_state::CLOSED,
    mlx::{array, group::Group, join},
    trace::{Options, Part, Recipe, Rule},
};

/// Smaller arrays of one dtype are summed together until they have so many bytes: that of `nn.average_gradients`.
const JOINED_BYTES: usize = 32 << 20;
/// They are filled up to a multiple of so many elements for each rank: MLX's ring cuts a rank's part into two packets, and takes
/// up to twice as long where that leaves an element for a third one.
const ROUND: usize = 64;
/// Of messages of so many bytes for each rank, the ring sends half in either direction: four threads poll.
const ONE_WAY: usize = 512 << 10;

impl Engine {
    /// Take each rank's part of the parameters from it, behind an update that is shared out.
    pub(super) fn gather(
        &mut self,
        (ranks, update): Round<'_>,
        recipe: &Recipe,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let Part::Update(Rule::Native(rules)) = &recipe.part else {
            return Ok(());
        };
        let Some(own) = rules.own(&self.layout) else {
            return Ok(());
        };
        self.clock.enter(Stage::Collective);
        let before = ranks.seconds();
        let gathered = self.gathered((&mut *ranks, update), &own, owner);
        self.exchanged += ranks.seconds() - before;
        gathered
    }

    fn gathered(
        &mut self,
        (ranks, update): Round<'_>,
        own: &[bool],
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let bytes = self.parameters.iter().map(Array::nbytes).sum();
        if self.parameters_are_static() {
            ranks.sum((bytes, update), owner, |group, crowded| {
                self.gather_static(own, group, crowded)
            })?;
            return self.show_gathered(owner).map_err(Error::Device);
        }
        let mine = self.buffers().into_iter().zip(own);
        let mine: Vec<Array> = mine
            .map(|(buffer, own)| part(&buffer, *own))
            .collect::<MlxResult<_>>()?;
        evaluate(&mine, owner).map_err(|error| self.lost(error, owner))?;
        let sums = ranks.sum((bytes, update), owner, |group, crowded| {
            summed(group, crowded, mine)
        })?;
        owner.release();
        self.fresh = sums;
        Ok(self.show()?)
    }

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
        let before = ranks.seconds();
        let summed = self.exchange(ranks, update, options, owner);
        self.exchanged += ranks.seconds() - before;
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
            if is_static {
                row.order = order_hash(&self.static_order());
            } else {
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
        let in_order = row.order > 0.0 && rows.iter().all(|each| each.has_order_of(&row));
        if is_static {
            ranks.sum((bytes, update), owner, |group, crowded| {
                self.sum_static(group, crowded, in_order)
            })?;
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
        let sums = ranks.sum((bytes, update), owner, |group, crowded| {
            summed(group, crowded, arrays)
        })?;
        for (at, sum) in places.into_iter().zip(sums) {
            self.state[at] = sum;
        }
        Ok(true)
    }
}

// a buffer of parameters, for the sum over ranks: zeros where another rank updates it
pub(super) fn part(buffer: &Array, own: bool) -> MlxResult<Array> {
    if own {
        return Ok(buffer.clone());
    }
    ops::zeros_dtype(buffer.shape(), buffer.dtype())
}

// One list after another: the order is the same on all ranks, and behind one that fails the next one would wait for ever. On CUDA
// each array is one, as those are that `sum_static` sums.
pub(super) fn summed(group: &Group, crowded: bool, arrays: Vec<Array>) -> MlxResult<Vec<Array>> {
    let (mut lists, mut bytes) = (Vec::<Vec<Array>>::new(), 0);
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
        let message = match <[Array; 1]>::try_from(list) {
            Ok([only]) => only,
            Err(list) => flat(&list, ROUND * group.size())?,
        };
        let short = crowded.then(|| group.size() * (ONE_WAY / message.item_size() - ROUND));
        let sum = group.sum(&message, short)?;
        drop(message);
        eval([&sum])?;
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

// arrays of one dtype joined, and zeros behind them up to a multiple of so many elements
fn flat(list: &[Array], round: usize) -> MlxResult<Array> {
    let flat = list.iter().map(|array| array.reshape(&[-1]));
    let mut parts = flat.collect::<MlxResult<Vec<_>>>()?;
    let size: usize = list.iter().map(Array::size).sum();
    let missing = i32::try_from(size.next_multiple_of(round) - size).unwrap_or(0);
    parts.push(ops::zeros_dtype(&[missing], list[0].dtype())?);
    ops::concatenate(&parts, 0)
}
