//! What the optimizer's code and its schedules read, beside what the loss changes.
use std::collections::HashSet;

use faststep::engine::{Left, Role};
use pyo3::prelude::*;

use super::Current;
use crate::{
    mlx::bridge,
    optimizer::HostSchedules,
    reach::{stop::Stop, suspect, Looked},
    tree::{slot::Slot, snapshot::Snapshot},
};

impl Current {
    // what the optimizer's schedules read, before the loss is called
    pub(super) fn look_at_schedules(&self, py: Python<'_>) -> PyResult<Option<Looked>> {
        let optimizer = self.optimizer.bind(py);
        let Some(reach) = self.of_schedules.as_ref().filter(|_| !self.sketch) else {
            return Ok(None);
        };
        let mut roots = HostSchedules::of(optimizer).functions();
        if roots.is_empty() {
            return Ok(None);
        }
        roots.insert(1, py.None().into_bound(py)); // in the place of a model: these read one as any other object
        reach.borrow_mut().look(&roots, optimizer).map(Some)
    }

    // what the loss has changed is not what the update, which comes behind it, has read before
    pub(super) fn check_read(
        &mut self,
        py: Python<'_>,
        (slots, left, model): (&[Slot<'_>], &Left, &Snapshot<'_>),
        of_schedules: Option<&Looked>,
    ) -> Result<(), Stop> {
        let of_update = self.of_update.as_ref();
        let of_update = of_update.filter(|_| self.compiled && !self.sketch);
        if of_update.is_none() && of_schedules.is_none() {
            return Ok(());
        }
        let reached = self.looked.arrays.ids();
        let written = left.others.iter().filter_map(|(number, _)| {
            if let Some(number) = number.checked_sub(self.others) {
                return reached.get(number).copied();
            }
            let mut slots = slots.iter().zip(self.roles.iter());
            let slot = slots.find(|(_, (role, _))| *role == Role::Other(*number));
            slot.and_then(|(slot, _)| bridge::id(&slot.object))
        });
        let written: HashSet<usize> = written.collect();
        let mut changed = None;
        if let Some(looked) = of_update {
            changed = looked.array_among(&written, py);
            if changed.is_none() {
                changed = looked.other_value(py)?;
            }
            if changed.is_none() {
                changed = suspect::read_of(&suspect::changes(model, false)?, looked, py)?;
            }
        }
        if let Some(name) = changed {
            let name = name.replace("loss_fn", "optimizer");
            return Err(Stop::Untraceable(format!(
                "the optimizer's code reads {name}, which the loss changes"
            )));
        }
        let Some(looked) = of_schedules else {
            return Ok(());
        };
        let mut late = looked.array_among(&written, py);
        if late.is_none() && !self.compiled {
            let shown = slots.iter().filter_map(|slot| bridge::id(&slot.object));
            late = looked.other_array(&shown.collect(), py)?;
        }
        if late.is_none() {
            late = looked.other_value(py)?;
        }
        self.late = late.map(|name| name.replace("loss_fn", "the schedule"));
        Ok(())
    }
}
