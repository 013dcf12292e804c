//! The static arrays of parameters and state, and the lazy copies of them that the engine holds in their place.
use std::rc::Rc;

use mlx_rs::{error::Result as MlxResult, ops, transforms::async_eval, Array};

use crate::{
    engine::{
        evaluate::{evaluate, synchronize},
        reduce::{part, summed},
        Engine, Owner,
    },
    error::{Error, Result},
    mlx::{
        array,
        group::Group,
        replay::{self, Exchange, Gate, ScalarsApart, SharedStream, Source},
    },
};

/// The static arrays of parameters and state. Nobody but the engine and its captures has a handle to one.
#[derive(Debug)]
pub(in crate::engine) struct Resident {
    /// Unlike that of any before.
    pub number: usize,
    /// Buffers, then the state.
    pub arrays: Vec<Array>,
    /// Arrays of the same values, which the engine holds; empty: it holds others.
    pub shown: Vec<Array>,
    /// On a CPU, what those of them are made of that are copies of static arrays.
    sources: Vec<Option<Source>>,
    /// What all that is shown waits for: the last launch.
    pub gate: Rc<Gate>,
    /// On CUDA, the sums over ranks of what is in the window.
    exchange: Option<Rc<Exchange>>,
    // of what the engine held when it was shown: parameters, shared buffers, state
    ids: Vec<usize>,
    holders: Vec<usize>,
}

/// A copy (lazily), row after row.
pub(super) fn copied(array: &Array) -> MlxResult<Array> {
    ops::select(Array::from_bool(true), array, array)?.contiguous()
}

impl Resident {
    fn new(number: usize, arrays: Vec<Array>) -> MlxResult<Self> {
        Ok(Self {
            number,
            arrays,
            shown: Vec::new(),
            sources: Vec::new(),
            gate: Rc::new(Gate::new()?),
            exchange: None,
            ids: Vec::new(),
            holders: Vec::new(),
        })
    }

    /// The exchange of so many arrays.
    pub fn exchange(&mut self, count: usize) -> MlxResult<Rc<Exchange>> {
        if let Some(exchange) = &self.exchange {
            return Ok(Rc::clone(exchange));
        }
        let exchange = Rc::new(Exchange::new(count)?);
        self.exchange = Some(Rc::clone(&exchange));
        Ok(exchange)
    }

    /// Whether all that the engine holds is what was shown, and nobody but it and an owner of one handle to each parameter
    /// and to so many arrays of the state holds or has evaluated what a launch writes over.
    pub fn is_untouched(
        &self,
        engine: &Engine,
        updates: bool,
        written: &[usize],
        owned: usize,
    ) -> bool {
        let mut holders = vec![0; self.holders.len()];
        let state = engine.parameters.len() + engine.shared.len();
        if updates && state <= holders.len() {
            holders[..state].copy_from_slice(&self.holders[..state]);
            for count in &mut holders[..engine.parameters.len()] {
                *count += 1;
            }
        }
        for &index in written {
            if let Some(count) = holders.get_mut(state + index) {
                *count = self.holders[state + index] + usize::from(index < owned);
            }
        }
        !self.shown.is_empty() && replay::is_untouched(engine.held(), &self.ids, &holders)
    }

    /// Of what a launch writes over: whether somebody beside the engine holds it.
    pub fn held(&self, engine: &Engine, updates: bool, written: &[usize]) -> Vec<bool> {
        if self.shown.is_empty() {
            return Vec::new();
        }
        let arrays: Vec<&Array> = engine.held().collect();
        let is_held = |at: &usize| {
            arrays.len() == self.holders.len() && array::holders(arrays[*at]) > self.holders[*at]
        };
        let mut held = vec![false; self.shown.len()];
        let (tensors, buffers) = (engine.parameters.len(), engine.layout.len());
        let mut shared = tensors..;
        for (buffer, held) in held[..buffers].iter_mut().enumerate() {
            let alone = engine.layout.single(buffer).is_some();
            let whole = if alone { None } else { shared.next() };
            let members = engine.layout.members(buffer);
            *held = updates && members.chain(whole).any(|at| is_held(&at));
        }
        let state = tensors + engine.shared.len();
        for &index in written {
            held[buffers + index] = is_held(&(state + index));
        }
        held
    }

    /// Before static arrays are written over: have copies of those that are held, as others may have begun to make them. On a CPU
    /// the gate is closed, and who makes a copy there is not known: it is left to them, of what is kept here.
    pub fn keep(&self, held: &[bool]) -> MlxResult<()> {
        let shown = self.shown.iter().zip(held);
        if replay::is_on_cpu() {
            let mut touched = shown
                .zip(&self.sources)
                .filter(|((shown, held), _)| **held || !array::is_lazy(shown));
            return touched
                .try_for_each(|(_, source)| source.as_ref().map_or(Ok(()), Source::preserve));
        }
        let first = shown.filter(|(shown, held)| **held && array::is_lazy(shown));
        let first: Vec<&Array> = first.map(|(shown, _)| shown).collect();
        async_eval(first)?;
        // another stream reads the static arrays for those that have been evaluated
        let mut copies = self.shown.iter().filter(|shown| !array::is_lazy(shown));
        copies.try_for_each(replay::wait)
    }

    /// The static arrays are about to have these values.
    pub fn take(&mut self, values: &[Array]) {
        self.sources.resize_with(values.len(), || None);
        self.shown.resize_with(values.len(), || values[0].clone());
        for ((shown, source), value) in self.shown.iter_mut().zip(&mut self.sources).zip(values) {
            if array::id(shown) != array::id(value) {
                (*shown, *source) = (value.clone(), None);
            }
        }
    }

    // what the engine holds, and in the place of lazy copies what they are of: nothing is shown any more
    fn values_of(&mut self, mut values: Vec<Array>) -> MlxResult<Option<Vec<Array>>> {
        let _closed = self.gate.close();
        let shown = std::mem::take(&mut self.shown);
        let sources = std::mem::take(&mut self.sources);
        for ((value, shown), source) in values.iter_mut().zip(&shown).zip(&sources) {
            if let Some(source) = source
                .as_ref()
                .filter(|_| array::id(shown) == array::id(value))
            {
                *value = source.value()?;
            }
        }
        Ok((!shown.is_empty()).then_some(values))
    }

    // whether an array that is shown does not stand for what a launch has left
    fn is_old(&self, index: usize) -> bool {
        let is_copy = match &self.sources[index] {
            Some(source) => !source.is_over(),
            None => !replay::is_on_cpu(),
        };
        !is_copy || !array::is_lazy(&self.shown[index])
    }

    fn show(&mut self, index: usize) -> MlxResult<()> {
        let (shown, source) = replay::shown(&self.arrays[index], &self.gate)?;
        (self.shown[index], self.sources[index]) = (shown, source);
        Ok(())
    }

    /// The values that are not those of the static arrays, each with its static array.
    pub fn changed(&self, values: &[Array]) -> MlxResult<Vec<(Array, Array)>> {
        let mut copies = Vec::new();
        for (i, (value, place)) in values.iter().zip(&self.arrays).enumerate() {
            if self.shown.get(i).map(array::id) != Some(array::id(value)) {
                copies.push((array::rows(value)?, place.clone()));
            }
        }
        Ok(copies)
    }

    /// Whether these are values of the same arrays.
    pub fn fits<'a>(&self, mut values: impl Iterator<Item = &'a Array>) -> bool {
        let same = |(i, place): (usize, &Array)| {
            let Some(value) = values.next() else {
                return false;
            };
            let is_shown = self.shown.get(i).map(array::id) == Some(array::id(value));
            is_shown || (place.shape() == value.shape() && place.dtype() == value.dtype())
        };
        self.arrays.iter().enumerate().all(same) && values.next().is_none()
    }

    /// The bytes of the static arrays.
    pub fn bytes(&self) -> usize {
        self.arrays.iter().map(Array::nbytes).sum()
    }
}

impl Engine {
    /// Buffers, then the state.
    pub(super) fn values(&self) -> Vec<Array> {
        self.value_refs().cloned().collect()
    }

    /// The same, where they are.
    pub(super) fn value_refs(&self) -> impl Iterator<Item = &Array> {
        let mut shared = self.shared.iter();
        let buffers =
            (0..self.layout.len()).filter_map(move |buffer| match self.layout.single(buffer) {
                Some(tensor) => self.parameters.get(tensor),
                None => shared.next(),
            });
        buffers.chain(&self.state)
    }

    /// As long as it lives, operations on parameters and state are those that any thread may evaluate, where these are
    /// copies of static arrays.
    pub(in crate::engine) fn shared_stream(&self) -> MlxResult<Option<SharedStream>> {
        let shown = self.resident.as_ref().filter(|it| !it.shown.is_empty());
        shown.map(|_| SharedStream::enter()).transpose()
    }

    /// Return whether the window is in static arrays, as a launch has left it: then `sum_static` sums it over ranks.
    pub(in crate::engine) fn window_is_static(&self) -> bool {
        let first = self.layout.len();
        let stands = |resident: &Resident, index: &usize| {
            let shown = resident.shown.get(first + index);
            let is_shown = shown.map(array::id) == Some(array::id(&self.state[*index]));
            is_shown && !resident.is_old(first + index)
        };
        self.resident.as_ref().is_some_and(|resident| {
            let summed = self.places.summed(&self.layout);
            let sums = replay::is_on_cpu() || resident.exchange.is_some();
            sums && summed.iter().all(|index| stands(resident, index))
        })
    }

    /// The order in which a launch on CUDA makes the window's static arrays, by their numbers among those that are summed.
    pub(in crate::engine) fn static_order(&self) -> Vec<usize> {
        let exchange = self.resident.as_ref().and_then(|it| it.exchange.as_ref());
        exchange.map_or_else(Vec::new, |exchange| exchange.order())
    }

    /// Sum the window's static arrays over the ranks of a group. On CUDA what comes next waits for that, and not the caller, and
    /// the order may be that in which they are made, the same on all ranks.
    pub(in crate::engine) fn sum_static(
        &self,
        group: &Group,
        crowded: bool,
        in_order: bool,
    ) -> MlxResult<()> {
        let Some(resident) = &self.resident else {
            return Err("there are no static arrays".into());
        };
        let places = self.places.summed(&self.layout).into_iter();
        let arrays = places.map(|index| resident.arrays[self.layout.len() + index].clone());
        let arrays: Vec<Array> = arrays.collect();
        if let Some(exchange) = &resident.exchange {
            return exchange.sum(group, &arrays, in_order, &resident.gate);
        }
        let sums = summed(group, crowded, arrays.clone())?;
        let _closed = resident.gate.close();
        replay::copy(&sums.into_iter().zip(arrays).collect::<Vec<_>>())
    }

    /// Return whether the parameters are in static arrays, as a launch has left them: then `gather_static` gathers them.
    pub(in crate::engine) fn parameters_are_static(&self) -> bool {
        let stands = |resident: &Resident| {
            let values = self.value_refs().take(self.layout.len());
            let mut pairs = values.zip(&resident.shown);
            resident.shown.len() >= self.layout.len()
                && pairs.all(|(value, shown)| array::id(value) == array::id(shown))
        };
        self.resident.as_ref().is_some_and(|resident| {
            let sums = replay::is_on_cpu() || resident.exchange.is_some();
            sums && stands(resident)
        })
    }

    /// Sum the parameters' static arrays over the ranks of a group, of which each gives its own. On CUDA what comes next waits for
    /// that, and not the caller.
    pub(in crate::engine) fn gather_static(
        &self,
        own: &[bool],
        group: &Group,
        crowded: bool,
    ) -> MlxResult<()> {
        let Some(resident) = &self.resident else {
            return Err("there are no static arrays".into());
        };
        if let Some(exchange) = &resident.exchange {
            resident.keep(&[])?; // another stream may read them
            return exchange.gather(group, &resident.arrays, own, &resident.gate);
        }
        let arrays = || resident.arrays.iter().zip(own);
        let parts = arrays().map(|(array, own)| part(array, *own));
        let sums = summed(group, crowded, parts.collect::<MlxResult<_>>()?)?;
        let _closed = resident.gate.close();
        let places = arrays().map(|(array, _)| array.clone());
        replay::copy(&sums.into_iter().zip(places).collect::<Vec<_>>())
    }

    /// Show the parameters anew, where somebody has read them since they were updated, before they were gathered.
    pub(in crate::engine) fn show_gathered(&mut self, owner: &mut dyn Owner) -> MlxResult<()> {
        let Some(mut resident) = self.resident.take() else {
            return Ok(());
        };
        if (0..self.layout.len()).any(|buffer| resident.is_old(buffer)) {
            owner.release();
            self.show_resident(&mut resident, true, &[])?;
        }
        self.resident = Some(resident);
        Ok(())
    }

    // everything that it holds, as its handles stand
    fn held(&self) -> impl Iterator<Item = &Array> {
        let parameters = self.parameters.iter().chain(&self.shared);
        parameters.chain(&self.state)
    }

    /// Have static arrays with the values of parameters and state.
    pub(super) fn fill_resident(&mut self, owner: &mut dyn Owner) -> MlxResult<()> {
        let values = self.values();
        let resident = self.resident.as_ref();
        if let Some(resident) = resident.filter(|it| it.fits(values.iter())) {
            let copies = resident.changed(&values)?;
            evaluate(copies.iter().map(|(from, _)| from), owner)?;
            replay::copy(&copies)?;
            return synchronize(owner);
        }
        self.give_back();
        let arrays = values.iter().map(copied).collect::<MlxResult<Vec<_>>>()?;
        let apart = ScalarsApart::begin()?;
        evaluate(&arrays, owner)?;
        drop(apart);
        self.residents += 1;
        self.resident = Some(Resident::new(self.residents, arrays)?);
        Ok(())
    }

    /// Show lazy copies in the place of what a graph has written: of all parameters, where it updates them, and of these
    /// arrays of the state. Those that nobody has evaluated are as good as they were.
    pub(super) fn show_resident(
        &mut self,
        resident: &mut Resident,
        updates: bool,
        state: &[usize],
    ) -> MlxResult<()> {
        let _shared = SharedStream::enter()?;
        let buffers = self.layout.len();
        if updates && (0..buffers).any(|buffer| resident.is_old(buffer)) {
            (0..buffers).try_for_each(|buffer| resident.show(buffer))?;
            self.parameters.clear();
            self.shared.clear();
            self.fresh = resident.shown[..buffers].to_vec();
            self.show()?;
        }
        for &index in state {
            if resident.is_old(buffers + index) {
                resident.show(buffers + index)?;
                self.state[index] = resident.shown[buffers + index].clone();
            }
        }
        resident.ids = self.held().map(array::id).collect();
        resident.holders = self.held().map(array::holders).collect();
        Ok(())
    }

    /// Before MLX evaluates a step: whatever waits to be copied from the static arrays is, since theirs will not be the values
    /// of the state any more.
    pub(in crate::engine) fn leave_replay(&mut self, owner: &mut dyn Owner) -> Result<()> {
        if replay::is_on_cpu() {
            return self.take_values().map_err(Error::Device);
        }
        let Some(resident) = &mut self.resident else {
            return Ok(());
        };
        let shown = std::mem::take(&mut resident.shown);
        let lazy: Vec<&Array> = shown.iter().filter(|array| array::is_lazy(array)).collect();
        if !lazy.is_empty() {
            evaluate(lazy, owner).map_err(Error::Device)?;
        }
        let mut waited = Ok(());
        owner.unlocked(&mut || waited = shown.iter().try_for_each(replay::wait));
        waited.map_err(Error::Device)
    }

    // hold arrays of one's own in the place of lazy copies, which others may be about to evaluate
    fn take_values(&mut self) -> MlxResult<()> {
        let Some(mut resident) = self.resident.take() else {
            return Ok(());
        };
        let values = self.values();
        let taken = resident.values_of(values);
        self.resident = Some(resident);
        let Some(mut values) = taken? else {
            return Ok(());
        };
        self.state = values.split_off(self.layout.len());
        self.parameters.clear();
        self.shared.clear();
        self.fresh = values;
        self.show()
    }
}
