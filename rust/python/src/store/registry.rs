//! The store of each optimizer, so that `optimizer.state` is current when it is read.
use std::{
    cell::{BorrowMutError, Cell, RefCell, RefMut},
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
};

use faststep::engine::StageClock;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::Store;
use crate::{
    mlx::collector::{Collector, Refers, Visited},
    optimizer::{members, state},
};

/// The error of a step within a step.
pub const BUSY: &str = "a step of this model and optimizer is already running";

/// A store that several steps share.
pub struct Shared {
    store: RefCell<Store>,
    busy: Cell<bool>, // a step is under way, also while its loss is called
    /// The stage of their calls, for any thread to read.
    pub clock: Arc<StageClock>,
}

// SAFETY: a store is entered with the GIL held only, which orders all accesses; `Store::check_thread` keeps other threads
// from running a step, and making the optimizer's state current uses nothing that is bound to a thread.
#[allow(unsafe_code)]
unsafe impl Send for Shared {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Shared {}

impl Refers for Arc<Shared> {
    // of several steps none can say what the others do not
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        if Self::strong_count(self) > 1 {
            return Ok(());
        }
        self.store.visit(collector)
    }
}

impl Shared {
    /// Enter the store.
    ///
    /// # Errors
    /// Where something of a step is under way that holds it.
    pub fn enter(&self) -> PyResult<RefMut<'_, Store>> {
        self.try_borrow_mut()
            .map_err(|_| PyRuntimeError::new_err(BUSY))
    }

    /// Begin a call; another one within it is refused.
    ///
    /// # Errors
    /// Where one is under way.
    pub fn begin(&self) -> PyResult<()> {
        if self.busy.replace(true) {
            return Err(PyRuntimeError::new_err(BUSY));
        }
        Ok(())
    }

    /// End it.
    pub fn end(&self) {
        self.busy.set(false);
    }

    /// Enter the store, unless something of a step holds it.
    pub fn try_borrow_mut(&self) -> Result<RefMut<'_, Store>, BorrowMutError> {
        self.store.try_borrow_mut()
    }
}

impl Drop for Shared {
    // the last step of this pair is dropped: write the flat state back to the optimizer
    fn drop(&mut self) {
        Python::attach(|py| {
            let store = self.store.get_mut();
            if let Err(error) = store.expose(py) {
                error.write_unraisable(py, None);
            }
        });
    }
}

// keyed by the optimizer's address; a store checks that it still belongs to that optimizer
static STORES: LazyLock<Mutex<HashMap<usize, Weak<Shared>>>> = LazyLock::new(Mutex::default);

fn stores() -> MutexGuard<'static, HashMap<usize, Weak<Shared>>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(optimizer: &Bound<'_, PyAny>) -> Option<Arc<Shared>> {
    let address = optimizer.as_ptr() as usize;
    let found = stores().get(&address).and_then(Weak::upgrade);
    found
}

/// The store of a model and an optimizer in this thread, a new one where there is none.
pub fn shared(model: &Bound<'_, PyAny>, optimizer: &Bound<'_, PyAny>) -> PyResult<Arc<Shared>> {
    if let Some(found) = find(optimizer) {
        let mine = |store: &Store| store.is_of(model, optimizer) && store.check_thread().is_ok();
        if found.store.try_borrow().is_ok_and(|store| mine(&store)) {
            return Ok(found);
        }
    }
    let store = Store::new(model, optimizer)?;
    let clock = store.clock.clone();
    let store = RefCell::new(store);
    let busy = Cell::default();
    let new = Arc::new(Shared { store, busy, clock });
    let mut store = new.store.borrow_mut();
    claim(&new, &mut store, optimizer)?;
    drop(store);
    Ok(new)
}

/// What is made of each store that is not in use.
pub fn each_other<T>(make: impl Fn(&Store) -> Vec<T>) -> Vec<T> {
    let all: Vec<_> = stores().values().filter_map(Weak::upgrade).collect();
    let of = |shared: &Arc<Shared>| {
        shared
            .store
            .try_borrow()
            .map_or_else(|_| Vec::new(), |it| make(&it))
    };
    all.iter().flat_map(of).collect()
}

/// Make a store the one that keeps the state of the optimizer and of those in it; one that kept it before hands it over.
pub fn claim(
    shared: &Arc<Shared>,
    store: &mut Store,
    optimizer: &Bound<'_, PyAny>,
) -> PyResult<()> {
    store.serve(optimizer)?;
    let members = members(optimizer);
    let owners: Vec<_> = members.iter().map(find).collect();
    let is_mine =
        |owner: &Option<Arc<Shared>>| owner.as_ref().is_some_and(|it| Arc::ptr_eq(it, shared));
    if owners.iter().all(is_mine) {
        return Ok(());
    }
    for owner in owners.iter().filter(|owner| !is_mine(owner)).flatten() {
        if let Ok(mut owner) = owner.try_borrow_mut() {
            owner.hand_over(optimizer, store)?;
        }
    }
    store.wake()?;
    let mut stores = stores();
    stores.retain(|_, store| store.strong_count() > 0);
    for member in &members {
        stores.insert(member.as_ptr() as usize, Arc::downgrade(shared));
    }
    Ok(())
}

/// `Optimizer.state`: the optimizer's own dict, made current.
#[pyfunction]
pub fn current_state<'py>(optimizer: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if let Some(shared) = find(optimizer) {
        match shared.try_borrow_mut() {
            Ok(mut store) if store.is_owner(optimizer) => store.expose(optimizer.py())?,
            _ => {}
        }
    }
    Ok(state(optimizer)?.into_any())
}
