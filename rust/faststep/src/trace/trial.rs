//! The part of an update that is tried out while the old state is still held.
use std::collections::HashSet;

use mlx_rs::{error::Result, Array};

use super::outputs::Outputs;
use crate::mlx::fuse;

/// Most bytes of a first evaluation's update that are computed while the old state is still held.
const TRIAL_BYTES: usize = 64 << 20;

/// The part of the update that a first evaluation tries out: the smallest of the arrays that the same kernels compute.
pub(crate) fn trial<'a>(outputs: &'a Outputs, inputs: &[Array]) -> Result<Vec<&'a Array>> {
    let update: Vec<&Array> = outputs.update().collect();
    let kinds = fuse::kinds(&update, outputs.before_update().chain(inputs))?;
    let mut update: Vec<_> = update.into_iter().zip(kinds).collect();
    update.sort_by_key(|(array, _)| array.nbytes());
    let mut seen = HashSet::new();
    update.retain(|(_, kind)| seen.insert(*kind));
    let mut bytes = 0;
    let trial = update.into_iter().map(|(array, _)| array);
    let trial = trial.take_while(|array| {
        let fits = bytes == 0 || bytes + array.nbytes() <= TRIAL_BYTES;
        bytes += array.nbytes();
        fits
    });
    Ok(trial.collect())
}
