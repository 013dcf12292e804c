//! The share of weights that an update leaves unchanged: in half precision a small update is rounded to nothing.
use mlx_rs::{
    error::Result,
    ops::{
        self,
        indexing::{IntoStrideBy, TryIndexOp},
    },
    Array, Dtype,
};

/// Number of elements of each buffer that are compared.
const SAMPLES: usize = 64;

/// The measurement of one update.
#[derive(Debug)]
pub(crate) struct Reading {
    unchanged: Counts,      // weights that did not move
    stuck: Counts,          // those that a step of the whole learning rate would not move either
    skipped: Option<Array>, // true if the update was skipped
}

/// Number of weights of some kind, among those whose first moment is not zero, or all where there is none.
#[derive(Debug)]
struct Counts {
    some: Array,
    all: Array,
}

impl Counts {
    fn none() -> Self {
        let [some, all] = [(); 2].map(|()| Array::from_int(0));
        Self { some, all }
    }

    fn add(&mut self, some: &Array, all: &Array) -> Result<()> {
        let count = |flags: &Array| flags.as_dtype(Dtype::Int32)?.sum(None);
        self.some = self.some.add(count(&ops::logical_and(some, all)?)?)?;
        self.all = self.all.add(count(all)?)?;
        Ok(())
    }

    fn share(&self) -> Option<f64> {
        let read = |count: &Array| count.try_item_exact::<i32>().ok().map(f64::from);
        let (some, all) = (read(&self.some)?, read(&self.all)?);
        (all > 0.0).then(|| some / all)
    }
}

/// A few elements of a buffer, evenly spread, as a copy (lazily).
pub(crate) fn sample(buffer: &Array) -> Result<Array> {
    let stride = i32::try_from(buffer.size() / SAMPLES).unwrap_or(i32::MAX);
    let sample = buffer.reshape(&[-1])?;
    let sample = sample.try_index((..).stride_by(stride.max(1)))?;
    sample.multiply(Array::from_int(1).as_dtype(buffer.dtype())?) // a view would keep the buffer
}

/// A few elements of each buffer.
pub(crate) fn samples(buffers: &[Array]) -> Result<Vec<Array>> {
    buffers.iter().map(sample).collect()
}

// true where adding or subtracting a step of this size leaves the weight unchanged
fn is_stuck(weights: &Array, rate: &Array) -> Result<Array> {
    let rate = rate.as_dtype(weights.dtype())?;
    let up = weights.add(&rate)?.eq(weights)?;
    ops::logical_and(up, weights.subtract(&rate)?.eq(weights)?)
}

impl Reading {
    /// Compare the weights before and after (lazily); `moments` are the first moments of their gradients, where there
    /// are any: a weight whose moment is zero has nothing to move it. `rates`: the learning rate of those that it moves
    /// by about that much, whatever the size of their gradients.
    pub(crate) fn of(
        before: &[Array],
        after: &[Array],
        moments: &[Option<Array>],
        rates: &[Option<&Array>],
        skipped: Option<Array>,
    ) -> Result<Self> {
        let (mut unchanged, mut stuck) = (Counts::none(), Counts::none());
        for (buffer, (before, after)) in before.iter().zip(after).enumerate() {
            let moved = match &moments[buffer] {
                Some(moment) => moment.ne(Array::from_int(0))?,
                None => after.eq(after)?,
            };
            let same = before.eq(after)?;
            unchanged.add(&same, &moved)?;
            if let Some(rate) = rates[buffer] {
                let is_stuck = ops::logical_and(&same, &is_stuck(before, rate)?)?;
                stuck.add(&is_stuck, &moved)?;
            }
        }
        Ok(Self {
            unchanged,
            stuck,
            skipped,
        })
    }

    /// The arrays to evaluate before the samples can be dropped.
    pub(crate) fn arrays(&self) -> [&Array; 4] {
        let (unchanged, stuck) = (&self.unchanged, &self.stuck);
        [&unchanged.some, &unchanged.all, &stuck.some, &stuck.all]
    }

    /// The share of weights that stayed, from 0 to 1; `None` where the update was not made, or moved nothing by intent.
    pub(crate) fn share(&self) -> Option<f64> {
        self.unchanged.share().filter(|_| self.is_made())
    }

    /// The share of weights that not even a step of the whole learning rate would have moved, as `share`.
    pub(crate) fn stuck(&self) -> Option<f64> {
        self.stuck.share().filter(|_| self.is_made())
    }

    fn is_made(&self) -> bool {
        let skipped = self.skipped.as_ref().map(Array::try_item_exact::<bool>);
        !matches!(skipped, Some(Ok(true) | Err(_)))
    }
}
