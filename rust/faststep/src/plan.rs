//! What a step will take of the device's memory, before it is taken.
//!
//! Nothing can catch the out-of-memory that ends a process, so the step is traced and its evaluation gone through as MLX
//! does it, the first time and in the steady state, without computing anything ([`crate::simulation`]).
use std::{fs, path::Path};

use mlx_rs::{error::Result, Array};

use crate::{
    course::{Course, Scene},
    simulation::{Device, Reading, Use},
};

/// So many updates after the first one are gone through. The CPU takes its work in portions, which end somewhere else in
/// every step: so many meet most of the ways in which they can.
const STEADY_UPDATES: usize = 20;

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The trainable parameters.
    pub parameters: usize,
    /// The optimizer's state.
    pub state: usize,
    /// The gradients, all of them.
    pub gradients: usize,
    /// What else the computation needs at the peak: activations, temporaries and the memory that is not free yet because
    /// the device has not come so far.
    pub activations: usize,
    /// The arrays of the batch.
    pub batch: usize,
    /// The model's other arrays: frozen parameters and buffers.
    pub others: usize,
    /// What the process holds beside this step.
    pub elsewhere: usize,
    /// Freed buffers that MLX keeps for itself.
    pub cache: usize,
    /// The peak of the first step, which holds old and new state for a while.
    pub first: usize,
    /// The peak of the steps after it.
    pub steady: usize,
    /// What the device has, or what the process may have of it; `None` where nobody says.
    pub memory: Option<usize>,
    /// Whether MLX gives its cache back before it runs out of memory, as it does on GPUs.
    pub gives_back: bool,
}

impl Plan {
    /// The most memory that is in use at once, in the first step and later.
    #[must_use]
    pub fn peak(&self) -> usize {
        self.first.max(self.steady)
    }

    /// Whether the device has so much memory; yes where nobody says how much it has.
    #[must_use]
    pub fn fits(&self) -> bool {
        let cache = if self.gives_back { 0 } else { self.cache };
        self.memory
            .is_none_or(|memory| self.peak() + cache <= memory)
    }
}

/// Go through a step, the first time and later.
pub(crate) fn plan(scene: &Scene) -> Result<Plan> {
    let (device, memory) = Device::current();
    let mut course = Course::new(scene, &device);
    course.lay_out()?;
    course.update()?;
    let first = course.read();
    for _ in 0..STEADY_UPDATES {
        course.update()?;
    }
    course.wait(0);
    let gradients = &scene.parts[0].outputs.gradients;
    let gradients = gradients.iter().map(Array::nbytes).sum();
    let mut plan = of(gradients, &first, &course.read());
    plan.gives_back = device.is_gpu();
    plan.memory = if device.is_gpu() {
        memory
    } else {
        memory.into_iter().chain(group_limit()).min()
    };
    Ok(plan)
}

fn of(gradients: usize, first: &Reading, steady: &Reading) -> Plan {
    let highest = if first.peak > steady.peak {
        first
    } else {
        steady
    };
    let now = steady.now;
    let held = [
        Use::Parameter,
        Use::State,
        Use::Batch,
        Use::Other,
        Use::Elsewhere,
    ];
    let held: usize = held.into_iter().map(|usage| now.of(usage)).sum();
    let there = highest.at_peak.of(Use::Gradient).min(gradients);
    Plan {
        parameters: now.of(Use::Parameter),
        state: now.of(Use::State),
        gradients,
        activations: highest.peak.saturating_sub(held + there),
        batch: now.of(Use::Batch),
        others: now.of(Use::Other),
        elsewhere: now.of(Use::Elsewhere),
        cache: steady.cache,
        first: first.peak,
        steady: steady.peak,
        memory: None,
        gives_back: false,
    }
}

// what the process's control groups allow it, where that is less than the machine has
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
