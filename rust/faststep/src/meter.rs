//! How many weights an update leaves as they were: in half precision a small update is rounded to nothing.
use mlx_rs::{
    error::Result,
    ops::{
        self,
        indexing::{IntoStrideBy, TryIndexOp},
    },
    Array, Dtype,
};

/// So many elements of each buffer are looked at.
const SAMPLES: usize = 64;

/// What was seen of one update.
#[derive(Debug)]
pub(crate) struct Reading {
    same: Array,            // how many of the weights that moved before did not move
    all: Array,             // how many there are
    skipped: Option<Array>, // whether the update was not made at all
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

impl Reading {
    /// Of the weights before and after (lazily); `moments` are the averages of their gradients, where there are any: a weight
    /// whose average is zero has nothing to move it.
    pub(crate) fn of(
        before: &[Array],
        after: &[Array],
        moments: &[Option<Array>],
        skipped: Option<Array>,
    ) -> Result<Self> {
        let (mut same, mut all) = (Array::from_int(0), Array::from_int(0));
        for (buffer, (before, after)) in before.iter().zip(after).enumerate() {
            let moved = match &moments[buffer] {
                Some(moment) => moment.ne(Array::from_int(0))?,
                None => after.eq(after)?,
            };
            let equal = ops::logical_and(before.eq(after)?, &moved)?;
            same = same.add(equal.as_dtype(Dtype::Int32)?.sum(None)?)?;
            all = all.add(moved.as_dtype(Dtype::Int32)?.sum(None)?)?;
        }
        Ok(Self { same, all, skipped })
    }

    /// What has to be evaluated, so that the samples can go.
    pub(crate) fn arrays(&self) -> [&Array; 2] {
        [&self.same, &self.all]
    }

    /// The share of weights that stayed, from 0 to 1; `None` where the update was not made, or moved nothing by intent.
    pub(crate) fn share(&self) -> Option<f64> {
        let skipped = self.skipped.as_ref().map(Array::try_item_exact::<bool>);
        let all = self.all.try_item_exact::<i32>().ok()?;
        let same = self.same.try_item_exact::<i32>().ok()?;
        let made = !matches!(skipped, Some(Ok(true) | Err(_)));
        (made && all > 0).then(|| f64::from(same) / f64::from(all))
    }
}
