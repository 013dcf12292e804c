//! What the optimizer's code and its schedules read, beside what the loss changes.
use std::collections::{HashMap, HashSet};

use faststep::engine::{Left, Role};
use pyo3::{prelude::*, types::PyTuple};

use super::Current;
use crate::{
    mlx::bridge,
    optimizer::HostSchedules,
    reach::{stop::Stop, suspect, Looked, Written},
    tree::{
        paths::dotted,
        renewed::{take_back, Taken},
        slot::Slot,
        snapshot::Snapshot,
        walk::Scope,
        Tree,
    },
};

/// The optimizer before a loss.
pub(super) struct Before<'py> {
    tree: Tree,
    ids: Vec<Option<usize>>, // of its arrays
    snapshot: Snapshot<'py>,
}

impl Current {
    // what the optimizer's schedules read, before the loss is called
    pub(super) fn look_at_schedules(&self, py: Python<'_>) -> PyResult<Option<Looked>> {
        let optimizer = self.optimizer.bind(py);
        let Some(reach) = self.of_schedules.as_ref().filter(|_| !self.sketch) else {
            return Ok(None);
        };
        let roots = HostSchedules::of(optimizer).roots();
        let look = |roots: Vec<_>| reach.borrow_mut().look(&roots, optimizer);
        roots.map(look).transpose()
    }

    // the optimizer, where the loss may change what its own code reads
    pub(super) fn before_loss<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Before<'py>>> {
        let program = &self.looked.program;
        if !self.host || !program.meets_optimizer {
            return Ok(None);
        }
        let optimizer = self.optimizer.bind(py);
        let (tree, slots) = Tree::record(optimizer, Scope::Whole)?;
        let snapshot = Snapshot::take(optimizer)?;
        self.in_state = (!self.compiled).then(|| tree.paths(py));
        Ok(Some(Before {
            ids: slots.iter().map(|slot| bridge::id(&slot.object)).collect(),
            tree,
            snapshot,
        }))
    }

    // what the loss has set of the optimizer: its arrays, uncompiled; a trace cannot repeat that
    pub(super) fn note_state<'py>(
        &self,
        py: Python<'py>,
        before: Option<&Before<'py>>,
        left: &mut Left,
    ) -> Result<(), Stop> {
        let Some(before) = before else {
            return Ok(());
        };
        let (after, slots) = Tree::record(self.optimizer.bind(py), Scope::Whole)?;
        let paths = after.paths(py);
        let known = before.tree.paths(py);
        let known: HashMap<_, _> = known.iter().zip(before.ids.iter().enumerate()).collect();
        let mut set = paths.iter().zip(&slots).filter_map(|(path, slot)| {
            let (number, id) = known.get(path)?;
            (bridge::id(&slot.object) != **id).then_some((path, *number, slot))
        });
        if !self.compiled {
            let set =
                set.filter_map(|(_, number, slot)| Some((number, bridge::get(&slot.object)?)));
            left.state = set.collect();
            return Ok(());
        }
        let other = set.next().map(|(path, ..)| path.clone());
        if let Some(path) = other.or_else(|| before.tree.difference(&after, py)) {
            before.snapshot.restore()?;
            let name = dotted(&path);
            return Err(Stop::Untraceable(format!(
                "it changes the optimizer that updates it ({})",
                name.trim_start_matches('_')
            )));
        }
        Ok(())
    }

    // whether an update that has been traced before the loss has changed what it reads
    pub(super) fn has_updated(&self, py: Python<'_>) -> PyResult<bool> {
        let looked = self.of_update.as_ref();
        let looked = looked.filter(|_| self.compiled && (!self.sketch || self.by_loss));
        looked.map_or(Ok(false), |looked| Ok(looked.other_value(py)?.is_some()))
    }

    // what the loss has changed is not what the update, which comes behind it, has read before
    pub(super) fn check_read(
        &mut self,
        py: Python<'_>,
        (slots, left, model): (&[Slot<'_>], &Left, &Snapshot<'_>),
        (of_schedules, has_updated): (Option<&Looked>, bool),
    ) -> Result<(), Stop> {
        let of_update = self.of_update.as_ref();
        let of_update = of_update.filter(|_| self.compiled && (!self.sketch || self.by_loss));
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
            if changed.is_none() && !has_updated {
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

    // dicts and lists that the loss has replaced, put back where the trace is to repeat it
    pub(super) fn taken_back<'py>(
        &self,
        model: &Snapshot<'py>,
        slots: &[Slot<'py>],
    ) -> PyResult<Vec<Taken<'py>>> {
        if self.compiled {
            take_back(model, slots)
        } else {
            Ok(Vec::new())
        }
    }

    // a trace does not repeat what the loss changes in a container that it is given too
    pub(super) fn check_given(&self, py: Python<'_>) -> Result<(), Stop> {
        let counts = !self.suspect.reached.is_empty() || !self.changed.1.is_empty();
        let changes = (&self.written.stored[..], counts);
        let why = self.looked.is_given(changes, py).filter(|_| self.compiled);
        why.map_or(Ok(()), |why| Err(Stop::Untraceable(why)))
    }

    // what the loss has written, and the numbers and texts in what it has replaced beside what it has returned
    pub(super) fn note_written<'py>(
        &mut self,
        py: Python<'py>,
        (written, mut values): (Written, Vec<Bound<'py, PyTuple>>),
        (taken, left): (Vec<Taken<'py>>, &Left),
    ) -> PyResult<()> {
        self.written = written;
        let stored = left.others.iter().map(|(number, _)| *number);
        let stored = stored.filter_map(|number| number.checked_sub(self.others));
        self.written.stored = stored.collect();
        for taken in taken {
            self.written.on_model.push(taken.renewed);
            values.push(taken.values);
        }
        if let Some(returned) = self.template.take() {
            let made = (returned, PyTuple::new(py, values)?).into_pyobject(py)?;
            self.template = Some(made.into_any().unbind());
        }
        Ok(())
    }
}
