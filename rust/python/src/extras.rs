//! What a step keeps beside the optimizer's state, by the names of the parameters: it outlives another layout.
use std::collections::{HashMap, HashSet};

use faststep::{extras::Keep, layout::Tensor};
use mlx_rs::Array;
use pyo3::prelude::*;

use crate::bridge;

type Named<'py> = Vec<(String, Bound<'py, PyAny>)>;

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
    keep: Keep,
}

impl Carried {
    /// What an engine keeps for parameters of these names.
    pub fn new(names: Vec<String>, keep: Keep) -> Self {
        Self { names, keep }
    }

    /// With what an earlier one has kept for other parameters.
    pub fn with_rest_of(mut self, before: &Self) -> Self {
        let mine: HashSet<&String> = self.names.iter().collect();
        let rest: Vec<usize> = (0..before.names.len())
            .filter(|&i| !mine.contains(&before.names[i]))
            .collect();
        let known = self.names.len();
        let add = |group: &mut Option<Vec<Option<Array>>>, old: &Option<Vec<Option<Array>>>| {
            if let (None, Some(_)) = (&group, old) {
                *group = Some(vec![None; known]);
            }
            if let Some(group) = group {
                let old = |i: &usize| old.as_ref().and_then(|old| old[*i].clone());
                group.extend(rest.iter().map(old));
            }
        };
        add(&mut self.keep.masters, &before.keep.masters);
        add(&mut self.keep.average, &before.keep.average);
        if self.keep.batches > 0 {
            add(&mut self.keep.window, &before.keep.window);
        }
        self.names
            .extend(rest.iter().map(|&i| before.names[i].clone()));
        self
    }

    /// The window has been used up.
    pub fn close_window(&mut self) {
        self.keep.window = None;
        self.keep.weight = None;
        self.keep.batches = 0;
    }

    /// The number of batches in the window.
    pub fn batches(&self) -> usize {
        self.keep.batches
    }

    /// The same for other parameters: what is missing or of another shape begins anew.
    pub fn onto(&self, names: &[String], tensors: &[Tensor]) -> Keep {
        let known: HashMap<&String, usize> = self.names.iter().zip(0..).collect();
        let places: Vec<Option<usize>> =
            names.iter().map(|name| known.get(name).copied()).collect();
        let sort = |group: &Option<Vec<Option<Array>>>| {
            let group = group.as_ref()?;
            let sorted = places.iter().zip(tensors).map(|(at, tensor)| {
                let array = group.get((*at)?)?.as_ref()?;
                (array.shape() == tensor.shape).then(|| array.clone())
            });
            Some(sorted.collect())
        };
        Keep {
            masters: sort(&self.keep.masters),
            average: sort(&self.keep.average),
            window: sort(&self.keep.window),
            ..self.keep.clone()
        }
    }

    /// As Python has it.
    pub fn show<'py>(&self, py: Python<'py>) -> PyResult<State<'py>> {
        let named = |group: &Option<Vec<Option<Array>>>| -> PyResult<Option<Named<'py>>> {
            let Some(group) = group else {
                return Ok(None);
            };
            let arrays = self.names.iter().zip(group);
            let arrays = arrays.filter_map(|(name, array)| Some((name, array.as_ref()?)));
            let wrapped = arrays.map(|(name, array)| Ok((name.clone(), bridge::wrap(py, array)?)));
            wrapped.collect::<PyResult<_>>().map(Some)
        };
        let keep = &self.keep;
        Ok(State {
            masters: named(&keep.masters)?.filter(|masters| !masters.is_empty()),
            ema: named(&keep.average)?,
            window: named(&keep.window)?,
            weight: match &keep.weight {
                Some(weight) => Some(bridge::wrap(py, weight)?),
                None => None,
            },
            batches: keep.batches,
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
        let group = |group: &Option<Named<'_>>| {
            let group: HashMap<_, _> = group.as_ref()?.iter().map(|(n, a)| (n, a)).collect();
            let arrays = names.iter().map(|name| bridge::get(group.get(name)?));
            Some(arrays.collect())
        };
        let scale = state.loss_scale.as_ref();
        let keep = Keep {
            masters: group(&state.masters),
            average: group(&state.ema),
            window: group(&state.window),
            weight: state.weight.as_ref().and_then(bridge::get),
            batches: state.batches,
            scale: scale.and_then(|(s, n)| Some([bridge::get(s)?, bridge::get(n)?])),
        };
        Self { names, keep }
    }
}
