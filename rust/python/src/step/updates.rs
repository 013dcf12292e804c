//! Updates by an optimizer of the user's own: called behind the batch, or left out, in steps whose loss is left out, while a watch list
//! holds that covers all that they read. The engine has the optimizer's arrays, unless each update leaves others.
use std::rc::Rc;

use faststep::engine::{array::id, Needs, Rule, Task};
use pyo3::{exceptions::PyTypeError, intern, prelude::*};

use super::{arguments::Arguments, choose::Way, left_out::SEARCH, traces::warn, Inner};
use crate::{
    host::{LeftOutUpdate, Observed},
    mlx::collector::{Collector, Refers, Visited},
    store::{Prepared, Store},
    tree::Tree,
    watch::{search_update, WatchList},
};

/// The most reasons against leaving updates out before the optimizer is called always.
const TRIES: usize = 6;

/// Updates that leave other arrays than before, behind which the optimizer has its arrays itself.
const UNSTEADY_UPDATES: usize = 3;

/// Reason against leaving updates out.
const UNSTEADY: &str = "computes something else, though nothing has changed that is watched";

/// `Store::prepare` or `Store::prepare_draft`.
pub(super) type Take<'py> =
    fn(&mut Store, &Bound<'py, PyAny>, &Bound<'py, PyAny>, Needs) -> PyResult<Prepared<'py>>;

/// An update that need not be called.
struct Stands {
    update: Rc<LeftOutUpdate>,
    tree: Tree,             // the optimizer's
    options: Option<usize>, // its id, once the engine has the state
    model: usize,           // the id of the model's signature
}

impl Stands {
    fn fits(&mut self, py: Python<'_>, store: &Store) -> PyResult<bool> {
        let (options, _) = store.options_id();
        if self.options != Some(options) && store.has_options(py, &self.tree) {
            self.options = Some(options);
        }
        Ok(self.options == Some(options) && self.model == store.signature()?.id)
    }
}

/// Progress towards leaving updates out.
#[derive(Default)]
pub struct Updates {
    transform: Option<Rc<Py<PyAny>>>, // the function that changes the gradients
    listed: Option<Rc<WatchList>>,
    stands: Option<Stands>,
    unsteady: usize, // the number of updates that have left arrays unknown to the engine
    fits: bool,      // true if what stands is valid at this step
    stood: usize,    // so many have
    tries: usize,
    /// Observations of the last call.
    pub observed: Option<Observed>,
    reason: Option<String>,
}

impl Refers for Updates {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.transform.visit(collector)?;
        self.listed
            .as_ref()
            .map_or(Ok(()), |list| list.visit(collector))
    }
}

impl Updates {
    /// Updates by gradients that the option `transform` returns.
    ///
    /// # Errors
    /// `TypeError` where it cannot be called.
    pub fn read(options: &Bound<'_, PyAny>) -> PyResult<Self> {
        let given = options.getattr(intern!(options.py(), "transform"))?;
        if !given.is_none() && !given.is_callable() {
            let got = given.get_type().fully_qualified_name()?;
            return Err(PyTypeError::new_err(format!(
                "transform: expected a function `transform(model, gradients)` or None, got {got}"
            )));
        }
        Ok(Self {
            transform: (!given.is_none()).then(|| Rc::new(given.unbind())),
            ..Self::default()
        })
    }

    /// The function that is called with the model and the gradients before the optimizer.
    pub fn transform(&self) -> Option<&Rc<Py<PyAny>>> {
        self.transform.as_ref()
    }

    /// The update in place of a call.
    pub fn left_out(&self) -> Option<&Rc<LeftOutUpdate>> {
        let stands = self.stands.as_ref().filter(|_| self.fits);
        stands.map(|stands| &stands.update)
    }

    /// Its number.
    pub fn number(&self) -> Option<usize> {
        self.left_out().map(|_| self.stood)
    }

    /// Empty observations for a call that is to be observed.
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

    /// Note whether an update has left arrays that the engine has not.
    pub fn note_moved(&mut self, moved: bool) {
        self.unsteady += usize::from(moved);
    }

    /// Why the optimizer is called, where that is known.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    // note a call beside the update that stands; a warning, if calls have been left out that should not
    fn note_beside(&mut self, update: &LeftOutUpdate, watches: bool) -> Option<String> {
        let stands = self.stands.as_ref()?;
        if !stands.update.is_comparable(update) {
            return None;
        }
        let is_same = stands.update.is(update);
        if self.fits && !is_same {
            self.refuse(UNSTEADY.into());
            return Some(format!(
                "the update of the optimizer {UNSTEADY}: steps before this one may have been computed without that. It is called at \
                 each step from here on"
            ));
        }
        if !self.fits && (watches || !is_same) {
            let reason = self.reason.take();
            self.refuse(reason.unwrap_or_else(|| "computes something else than before".into()));
        }
        None
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
        let stands = self.own_updates.stands.is_some() && self.traces.stand();
        let compiles = self.options.compile && self.has_compiler;
        let steady = compiles && self.own_updates.unsteady < UNSTEADY_UPDATES;
        let takes_state = stands || (steady && !task.accumulates());
        let transforms = self.own_updates.transform.is_some();
        store.set_own_update(user.py(), (takes_state, stands), transforms)?;
        store.set_shared_out(user.py(), self.shared_out.as_ref())?;
        store.set_shards(user.py(), self.shards.as_ref())?;
        let prepared = take(store, &user.model, &user.optimizer, self.needs(task))?;
        store.give_max_norm(self.options.max_grad_norm);
        let own = &mut self.own_updates;
        own.fits = false;
        if let (Some(stands), Some(list), true) = (&mut own.stands, &own.listed, stands) {
            let changed = list.look(&user.optimizer)?;
            own.fits = changed.is_none() && stands.fits(user.py(), store)?;
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
            let reason = || "has computed something else at each call so far".into();
            self.own_updates.reason.get_or_insert_with(reason); // its graph was a new one
            return Ok(());
        };
        let own = &mut self.own_updates;
        if own.stands.is_some() {
            let is_check = way.called().is_some_and(|called| called.is_check);
            let message = own.note_beside(&update, store.watches());
            return message
                .filter(|_| is_check)
                .map_or(Ok(()), |message| warn(py, &message));
        }
        if let Some(list) = own.list(&user.optimizer)? {
            if update.leaves.iter().all(|leaf| list.has(id(leaf))) {
                own.stands = Some(Stands {
                    update: Rc::new(update),
                    tree,
                    options: None,
                    model: store.signature()?.id,
                });
                own.stood += 1;
                own.reason = None;
            } else {
                own.refuse(
                    "has a number that changed, or makes an array at each update: make it once"
                        .into(),
                );
            }
            return Ok(());
        }
        let transform = own.transform.as_deref();
        match search_update(&user.optimizer, &user.model, transform, SEARCH)? {
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
        self.own_updates
            .number()
            .filter(|_| matches!(way, Way::LeftOut(_)))
    }

    /// Return whether an optimizer of the user's own is called within a part.
    pub(super) fn calls_update(&self, store: &Store, task: Task, way: &Way<'_>) -> bool {
        let own = task.updates() && matches!(store.rule, Some(Rule::Host));
        own && self.update_left_out(way).is_none() && !matches!(way, Way::Updated(_))
    }
}
