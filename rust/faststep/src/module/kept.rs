//! The state of a step by parameter name, as Python's `Step.state` and `optimizer.state` name it.
use std::{collections::HashSet, rc::Rc};

use mlx_rs::Array;

use super::{optimizer::Arrays, slots::Slots};
use crate::layout::aux_state::{AuxState, Open, Window};

const GROUPS: [&str; 3] = ["masters", "ema", "window"];

/// The optimizer's arrays, and the step's own.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: Arrays,
    pub(super) aux_state: NamedAuxState,
}

/// What a step keeps beside the optimizer's state.
#[derive(Clone, Debug, Default)]
pub(super) struct NamedAuxState {
    pub(super) arrays: Arrays,
    pub(super) window: Option<Open>,
}

impl NamedAuxState {
    pub(super) fn of(aux_state: AuxState, names: &[Rc<str>]) -> Self {
        let mut arrays = Arrays::new();
        let open = aux_state.window.as_ref().map(|window| window.open);
        let (sums, weight) = aux_state.window.map(|w| (w.sums, w.weight)).unzip();
        for (group, tensors) in GROUPS
            .iter()
            .zip([aux_state.masters, aux_state.average, sums])
        {
            for (name, tensor) in names.iter().zip(tensors.into_iter().flatten()) {
                arrays.extend(tensor.map(|tensor| (format!("{group}.{name}"), tensor)));
            }
        }
        arrays.extend(weight.map(|weight| ("weight".to_owned(), weight)));
        if let Some([scale, streak]) = aux_state.scale {
            arrays.insert("loss_scale".to_owned(), scale);
            arrays.insert("good_steps".to_owned(), streak);
        }
        Self {
            arrays,
            window: open,
        }
    }

    /// The same by tensor: what is missing, or of another shape, begins anew.
    pub(super) fn onto(&self, slots: &Slots) -> AuxState {
        let group = |group: &str| {
            let tensors = slots.parameters.iter().zip(slots.tensors());
            let arrays: Vec<Option<Array>> = tensors
                .map(|(name, tensor)| {
                    let array = self.arrays.get(&format!("{group}.{name}"));
                    array.filter(|array| array.shape() == tensor.shape).cloned()
                })
                .collect();
            arrays.iter().any(Option::is_some).then_some(arrays)
        };
        let one = |name: &str| self.arrays.get(name).cloned();
        AuxState {
            masters: group("masters"),
            average: group("ema"),
            window: self.window.zip(one("weight")).map(|(open, weight)| Window {
                open,
                sums: group("window").unwrap_or_default(),
                weight,
            }),
            scale: one("loss_scale")
                .zip(one("good_steps"))
                .map(<[Array; 2]>::from),
        }
    }

    /// With what was kept before for other parameters.
    pub(super) fn with_rest_of(mut self, before: &Self) -> Self {
        let same = self
            .window
            .zip(before.window)
            .is_some_and(|(a, b)| a.is(&b));
        for (name, array) in &before.arrays {
            if same || !name.starts_with("window.") {
                self.arrays
                    .entry(name.clone())
                    .or_insert_with(|| array.clone());
            }
        }
        self
    }

    /// Without what belongs to these parameters, and to none.
    pub(super) fn forget(&mut self, names: &[Rc<str>]) {
        let names: HashSet<&str> = names.iter().map(|name| &**name).collect();
        self.arrays.retain(|key, _| {
            let name = key.split_once('.').map(|(_, name)| name);
            name.is_some_and(|name| !names.contains(name))
        });
    }
}
