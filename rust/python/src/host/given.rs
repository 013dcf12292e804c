//! The tracers that a loss is called with.
use faststep::engine::{Role, Tracers};
use mlx_rs::{error::Result as MlxResult, Array, Dtype};

/// The arrays that a loss is called with tracers of: parameters, the model's other arrays, those of the batch, and the scale of the
/// loss.
pub struct Given {
    /// Their tracers.
    pub tracers: Tracers,
    /// The number of the model's other arrays.
    pub others: usize,
    /// The parameters, in the dtype in which the loss is computed.
    pub parameters: Vec<Array>,
    /// The number of arrays of the batch.
    pub batch: usize,
    /// True if the loss has a scale.
    pub scaled: bool,
}

impl Given {
    /// Make the tracers, of `compute_dtype` where the loss is computed in another dtype than the parameters'.
    pub fn new(
        parameters: &[Array],
        others: &[Array],
        batch: &[Array],
        scale: Option<&Array>,
        compute_dtype: Option<Dtype>,
    ) -> MlxResult<Self> {
        let cast = |array: &Array, always: bool| match compute_dtype {
            Some(compute) if always || array.dtype() == Dtype::Float32 => array.as_dtype(compute),
            _ => Ok(array.clone()),
        };
        let parameters = parameters.iter().map(|array| cast(array, true));
        let parameters: Vec<Array> = parameters.collect::<MlxResult<_>>()?;
        let given = batch.iter().map(|array| cast(array, false));
        let given: Vec<Array> = given.collect::<MlxResult<_>>()?;
        let all = parameters.iter().chain(others).chain(&given).chain(scale);
        Ok(Self {
            tracers: Tracers::new(all)?,
            others: others.len(),
            batch: batch.len(),
            scaled: scale.is_some(),
            parameters,
        })
    }

    /// The arrays that stand for the tracers.
    pub fn traced(&self) -> &[Array] {
        self.tracers.arrays()
    }

    pub(super) fn of_role(&self, role: Role) -> &Array {
        let first = self.parameters.len();
        match role {
            Role::Parameter(at) => &self.tracers.arrays()[at],
            Role::Other(at) => &self.tracers.arrays()[first + at],
        }
    }

    pub(super) fn of_batch(&self) -> &[Array] {
        let first = self.parameters.len() + self.others;
        &self.tracers.arrays()[first..first + self.batch]
    }

    pub(super) fn scale(&self) -> Option<&Array> {
        self.tracers.arrays().last().filter(|_| self.scaled)
    }
}
