//! What a step keeps beside the optimizer's state, by the names of the parameters: it outlives another layout.
use std::collections::{HashMap, HashSet};

use faststep::engine::{AuxState, Open, Tensor, Window};
use mlx_rs::Array;
use pyo3::prelude::*;

use crate::mlx::bridge;

type Named<'py> = Vec<(String, Bound<'py, PyAny>)>;
/// The array of each tensor that has one.
type Group = Vec<Option<Array>>;

/// `Step.state` as it crosses to Python: arrays by the dotted name of their parameter, and the window's size.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub struct State<'py> {
    /// Float32 masters.
    pub masters: Option<Named<'py>>,
    /// The average.
    pub ema: Option<Named<'py>>,
    /// The sums of the open window.
    pub window: Option<Named<'py>>,
    /// The sum of its weights.
    pub weight: Option<Bound<'py, PyAny>>,
    /// The number of batches in it.
    pub batches: usize,
    /// The loss scale, and the good steps since it last changed.
    pub loss_scale: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
}

/// What is kept, with the names of its tensors.
#[derive(Clone)]
pub struct Carried {
    names: Vec<String>,
    keep: AuxState,
}

impl Carried {
    /// What an engine keeps for parameters of these names.
    pub fn new(names: Vec<String>, keep: AuxState) -> Self {
        Self { names, keep }
    }

    /// With what an earlier one has kept for other parameters.
    pub fn with_rest_of(mut self, before: &Self) -> Self {
        let mine: HashSet<&String> = self.names.iter().collect();
        let rest: Vec<usize> = (0..before.names.len())
            .filter(|&i| !mine.contains(&before.names[i]))
            .collect();
        let known = self.names.len();
        let old = |group: Option<&Group>| -> Group {
            let array = |i: &usize| group.and_then(|group| group[*i].clone());
            rest.iter().map(array).collect()
        };
        let add = |group: &mut Option<Group>, before: &Option<Group>| {
            if let (None, Some(_)) = (&group, before) {
                *group = Some(vec![None; known]);
            }
            if let Some(group) = group {
                group.extend(old(before.as_ref()));
            }
        };
        add(&mut self.keep.masters, &before.keep.masters);
        add(&mut self.keep.average, &before.keep.average);
        if let Some(window) = &mut self.keep.window {
            let before = before.keep.window.as_ref();
            let same = before.filter(|before| before.open.is(&window.open));
            window.sums.extend(old(same.map(|same| &same.sums)));
        }
        self.names
            .extend(rest.iter().map(|&i| before.names[i].clone()));
        self
    }

    /// The number of batches in the window.
    pub fn batches(&self) -> usize {
        self.keep.window.as_ref().map_or(0, |w| w.open.batches)
    }

    /// The same for other parameters: what is missing or of another shape starts from its initial value.
    pub fn onto(&self, names: &[String], tensors: &[Tensor]) -> AuxState {
        let known: HashMap<&String, usize> = self.names.iter().zip(0..).collect();
        let places: Vec<Option<usize>> =
            names.iter().map(|name| known.get(name).copied()).collect();
        let sort = |group: &Group| -> Group {
            let sorted = places.iter().zip(tensors).map(|(at, tensor)| {
                let array = group.get((*at)?)?.as_ref()?;
                (array.shape() == tensor.shape).then(|| array.clone())
            });
            sorted.collect()
        };
        AuxState {
            masters: self.keep.masters.as_ref().map(sort),
            average: self.keep.average.as_ref().map(sort),
            window: self.keep.window.as_ref().map(|window| Window {
                sums: sort(&window.sums),
                ..window.clone()
            }),
            scale: self.keep.scale.clone(),
        }
    }

    /// As Python has it.
    pub fn show<'py>(&self, py: Python<'py>) -> PyResult<State<'py>> {
        let named = |group: Option<&Group>| -> PyResult<Option<Named<'py>>> {
            let Some(group) = group else {
                return Ok(None);
            };
            let arrays = self.names.iter().zip(group);
            let arrays = arrays.filter_map(|(name, array)| Some((name, array.as_ref()?)));
            let wrapped = arrays.map(|(name, array)| Ok((name.clone(), bridge::wrap(py, array)?)));
            wrapped.collect::<PyResult<_>>().map(Some)
        };
        let keep = &self.keep;
        let window = keep.window.as_ref();
        let weight = window.map(|window| bridge::wrap(py, &window.weight));
        Ok(State {
            masters: named(keep.masters.as_ref())?.filter(|masters| !masters.is_empty()),
            ema: named(keep.average.as_ref())?,
            window: named(window.map(|window| &window.sums))?,
            weight: weight.transpose()?,
            batches: self.batches(),
            loss_scale: match &keep.scale {
                Some([scale, streak]) => {
                    Some((bridge::wrap(py, scale)?, bridge::wrap(py, streak)?))
                }
                None => None,
            },
        })
    }

    /// From Python.
    pub fn read(state: &State<'_>) -> Self {
        let groups = [&state.masters, &state.ema, &state.window];
        let all = groups.into_iter().flatten().flatten();
        let mut seen = HashSet::new();
        let names: Vec<String> = all
            .filter(|(name, _)| seen.insert(name))
            .map(|(name, _)| name.clone())
            .collect();
        let group = |group: &Option<Named<'_>>| -> Option<Group> {
            let group: HashMap<_, _> = group.as_ref()?.iter().map(|(n, a)| (n, a)).collect();
            let arrays = names.iter().map(|name| bridge::get(group.get(name)?));
            Some(arrays.collect())
        };
        let weight = state.weight.as_ref().and_then(bridge::get);
        let window = group(&state.window).zip(weight);
        let scale = state.loss_scale.as_ref();
        let keep = AuxState {
            masters: group(&state.masters),
            average: group(&state.ema),
            window: window.map(|(sums, weight)| Window {
                open: Open::new(state.batches),
                sums,
                weight,
            }),
            scale: scale.and_then(|(s, n)| Some([bridge::get(s)?, bridge::get(n)?])),
        };
        Self { names, keep }
    }
}
