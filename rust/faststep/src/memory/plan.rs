//! The plan of the device's memory that a step will take.
//!
//! Nothing can catch the out-of-memory that ends a process, so the step is traced and its evaluation gone through as MLX
//! does it, the first time and in the steady state, without computing anything (`simulator.rs`).
use std::{fs, path::Path};

use mlx_rs::{error::Result, Array};

use super::{
    inputs::PlanInputs,
    simulator::{Device, Held},
    timeline::Timeline,
};

/// Number of simulated updates after the first one. The CPU takes its work in portions, which end somewhere else in
/// every step: 20 updates meet most of the ways in which they can.
const STEADY_UPDATES: usize = 20;

/// Memory in bytes. Parameters, state, gradients, activations and others add up to the peak, unless the gradients are
/// never there all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The trainable parameters.
    pub parameters: usize,
    /// The optimizer's state, and what the step keeps beside it.
    pub state: usize,
    /// The gradients, all of them.
    pub gradients: usize,
    /// The rest of the peak: activations, temporaries, and memory that is not free yet.
    pub activations: usize,
    /// Bytes that are held all the time beside that: the batch, the model's other arrays and what the process holds
    /// beside this step.
    pub others: usize,
    /// Freed buffers that MLX keeps for itself.
    pub cache: usize,
    /// Bytes that captures of the step hold beside all that, where it is replayed.
    pub replay: usize,
    /// The peak of the first update, which holds old and new state for a while.
    pub first: usize,
    /// The peak of the updates after it.
    pub steady: usize,
    /// Memory of the device, or the process's share of it; `None` where that is unknown.
    pub limit: Option<usize>,
    /// True if MLX gives its cache back before it runs out of memory, as it does on GPUs.
    pub gives_back: bool,
}

impl Plan {
    /// The most memory that is in use at once, in the first step and later.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.first.max(self.steady)
    }

    /// Return whether the device has so much memory; true where that is unknown.
    #[must_use]
    pub fn fits(&self) -> bool {
        let cache = if self.gives_back { 0 } else { self.cache };
        self.limit.is_none_or(|limit| self.peak() + cache <= limit)
    }
}

/// Go through a step, the first time and later.
pub(crate) fn plan(inputs: &PlanInputs) -> Result<Plan> {
    let (device, memory) = Device::current()?;
    let mut timeline = Timeline::new(inputs, &device)?;
    timeline.lay_out()?;
    timeline.update()?;
    let first = timeline.read().peak;
    for _ in 0..STEADY_UPDATES {
        timeline.update()?;
    }
    timeline.wait(0)?;
    let steady = timeline.read();
    let held = timeline.rest()?;
    let [parameters, state, gradients] =
        [inputs.tensors(), inputs.state(), inputs.gradients()].map(bytes);
    Ok(Plan {
        parameters,
        state,
        gradients,
        activations: first.max(steady.peak).saturating_sub(held + gradients),
        others: held.saturating_sub(parameters + state),
        cache: steady.cache,
        replay: 0, // whoever captures knows
        first,
        steady: steady.peak,
        limit: if device.is_gpu() {
            memory
        } else {
            memory.into_iter().chain(group_limit()).min()
        },
        gives_back: device.is_gpu(),
    })
}

/// The memory in use while each operation of an update runs, in the order of evaluation: of the calls that make one, of the
/// last; of the updates that a plan goes through, the one that takes the most.
pub(crate) fn by_operation(inputs: &PlanInputs) -> Result<Vec<Held>> {
    let (device, _) = Device::current()?;
    let mut timeline = Timeline::new(inputs, &device)?;
    timeline.mark()?;
    timeline.lay_out()?;
    timeline.update()?;
    let mut most = (0, Vec::new());
    for _ in 0..STEADY_UPDATES {
        timeline.update()?;
        let held = timeline.recorded();
        let peak = held.iter().map(|each| each.bytes.iter().sum::<usize>());
        let peak = peak.max().unwrap_or(0);
        if peak > most.0 {
            most = (peak, held);
        }
    }
    Ok(most.1)
}

fn bytes(arrays: &[Array]) -> usize {
    arrays.iter().map(Array::nbytes).sum()
}

// the memory limit of the process's control groups, if it is below the machine's memory
fn group_limit() -> Option<usize> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limits = Path::new("/sys/fs/cgroup").join(group);
    let limits = limits.ancestors().filter_map(|group| {
        let limit = fs::read_to_string(group.join("memory.max")).ok()?;
        limit.trim().parse().ok()
    });
    limits.min()
}
