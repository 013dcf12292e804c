//! Updates by an optimizer of the user's own that are left out, in steps whose loss is left out: while a watch list holds that covers
//! all that they read. The optimizer's arrays are the engine's state then.
use std::rc::Rc;

use faststep::engine::{array::id, Needs, Rule, Task};
use pyo3::prelude::*;

use super::{arguments::Arguments, choose::Way, left_out::SEARCH, traces::warn, Inner};
use crate::{
    host::{LeftOutUpdate, Observed},
    mlx::collector::{Collector, Refers, Visited},
    store::{Prepared, Store},
    watch::{search_update, WatchList},
};

/// The most reasons against leaving updates out before the optimizer is called always.
const TRIES: usize = 6;

/// `Store::prepare` or `Store::prepare_draft`.
pub(super) type Take<'py> =
    fn(&mut Store, &Bound<'py, PyAny>, &Bound<'py, PyAny>, Needs) -> PyResult<Prepared<'py>>;

/// An update that need not be called.
struct Stands {
    update: Rc<LeftOutUpdate>,
    ids: Ids,
}

/// The ids of the optimizer's options and of the model's signature.
type Ids = (usize, usize);

fn ids(store: &Store) -> PyResult<Ids> {
    Ok((store.options_id().0, store.signature()?.id))
}

/// Progress towards leaving updates out.
#[derive(Default)]
pub struct Updates {
    listed: Option<Rc<WatchList>>,
    stands: Option<Stands>,
    fits: bool,   // what stands, at this step
    stood: usize, // so many have
    tries: usize,
    /// What the last call has shown.
    pub observed: Option<Observed>,
    reason: Option<String>,
}

impl Refers for Updates {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.listed.as_ref().map_or(Ok(()), |list| list.visit(collector))
    }
}

impl Updates {
    /// The update in place of a call.
    pub fn left_out(&self) -> Option<&Rc<LeftOutUpdate>> {
        let stands = self.stands.as_ref().filter(|_| self.fits);
        stands.map(|stands| &stands.update)
    }

    /// Its number.
    pub fn number(&self) -> Option<usize> {
        self.left_out().map(|_| self.stood)
    }

    /// What a call is to be observed for.
    pub fn observes(&self) -> Option<Observed> {
        (self.tries < TRIES).then(Observed::default)
    }

    /// The list by which the next call is watched.
    pub fn list(&self, optimizer: &Bound<'_, PyAny>) -> PyResult<Option<Rc<WatchList>>> {
        let listed = self.listed.as_ref().filter(|_| self.stands.is_none());
        let Some(list) = listed.filter(|_| self.tries < TRIES) else {
            return Ok(None);
        };
        Ok(list.look(optimizer)?.is_none().then(|| list.clone()))
    }

    /// Why the optimizer is called, where that is known.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    fn refuse(&mut self, reason: String) {
        self.tries += 1;
        (self.stands, self.listed, self.reason) = (None, None, Some(reason));
    }
}

impl Inner {
    /// Take over whatever the user has changed, with the state of an optimizer of the user's own whose updates may be left out.
    /// `take`: by which the store does it.
    pub(super) fn prepare<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        task: Task,
        take: Take<'py>,
    ) -> PyResult<Prepared<'py>> {
        store.set_takes_state(user.py(), self.own_updates.stands.is_some())?;
        let prepared = take(store, &user.model, &user.optimizer, self.needs(task))?;
        store.give_max_norm(self.options.max_grad_norm);
        let own = &mut self.own_updates;
        own.fits = false;
        if let (Some(stands), Some(list)) = (&own.stands, &own.listed) {
            let changed = list.look(&user.optimizer)?;
            own.fits = stands.ids == ids(store)? && changed.is_none();
            if !own.fits {
                let name = changed.map(|entry| list.name(entry).to_owned());
                let name = name.map_or_else(|| "what".into(), |name| format!("`{name}`, which"));
                own.reason = Some(format!("reads {name} has changed"));
            }
        }
        Ok(prepared)
    }

    /// Note what a called update has shown: whether the next one may be left out.
    pub(super) fn note_update(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        way: &Way<'_>,
    ) -> PyResult<()> {
        let py = user.py();
        let Some(observed) = self.own_updates.observed.take() else {
            return Ok(());
        };
        if let Some(reason) = observed.reason {
            self.own_updates.refuse(reason);
            return Ok(());
        }
        let (Some(update), Some(tree)) = (observed.update, observed.tree) else {
            return Ok(()); // its graph was a new one
        };
        let own = &mut self.own_updates;
        if let Some(stands) = &own.stands {
            if own.fits && !stands.update.is(&update) {
                let is_check = way.called().is_some_and(|called| called.is_check);
                own.refuse("computes something else, though nothing has changed that is watched".into());
                if is_check {
                    warn(py, &format!("the update of the optimizer {UNSTEADY}"))?;
                }
            } else if !own.fits {
                own.refuse(own.reason.clone().unwrap_or_default());
            }
            return Ok(());
        }
        if let Some(list) = own.list(&user.optimizer)? {
            if update.leaves.iter().all(|leaf| list.has(id(leaf))) {
                store.sign_options(py, tree);
                let (update, ids) = (Rc::new(update), ids(store)?);
                own.stands = Some(Stands { update, ids });
                own.stood += 1;
                own.reason = None;
            } else {
                own.refuse("makes an array at each update: make it once".into());
            }
            return Ok(());
        }
        match search_update(&user.optimizer, &user.model, SEARCH)? {
            Ok(list) => own.listed = Some(Rc::new(list)),
            Err(reason) => {
                own.refuse(reason);
                own.tries = TRIES; // its code stays as it is
            }
        }
        Ok(())
    }

    /// The number of the update that this step leaves out, by an optimizer of the user's own.
    pub(super) fn update_left_out(&self, way: &Way<'_>) -> Option<usize> {
        self.own_updates.number().filter(|_| matches!(way, Way::LeftOut(_)))
    }

    /// Return whether an optimizer of the user's own is called.
    pub(super) fn calls_update(&self, store: &Store, task: Task, way: &Way<'_>) -> bool {
        let own = task.updates() && matches!(store.rule, Some(Rule::Host));
        own && self.update_left_out(way).is_none()
    }
}

/// Text of the warning.
const UNSTEADY: &str = "computes something else, though nothing has changed that is watched: steps before this one may have been \
                        computed without that. It is called at each step from here on";
