//! The auxiliary state of a step by the names of its parameters: it outlives a layout, and goes into a checkpoint.
use std::collections::{BTreeMap, HashMap, HashSet};

use mlx_rs::Array;

use super::{
    aux_state::{AuxState, Open, Window},
    Tensor,
};

/// The array of each tensor that has one.
type Group = Vec<Option<Array>>;
/// Arrays by name.
type Arrays = BTreeMap<String, Array>;

/// The groups of arrays by tensor, as `Step.state` names them in Python.
const GROUPS: [&str; 3] = ["masters", "ema", "window"];
/// The scalars beside them: the sums of the window's weights and losses, the loss scale, and the good steps since it last changed.
const SCALARS: [&str; 4] = ["weight", "losses", "loss_scale", "good_steps"];

/// An [`AuxState`] with the names of its tensors.
#[derive(Clone, Debug, Default)]
pub struct NamedAuxState {
    names: Vec<String>,
    state: AuxState,
}

impl NamedAuxState {
    /// Name the tensors of an engine's state.
    #[must_use]
    pub fn new(names: Vec<String>, state: AuxState) -> Self {
        Self { names, state }
    }

    /// Add an earlier state's arrays of other parameters: those that are frozen now. Of a window only what was summed
    /// in the same one counts.
    #[must_use]
    pub fn with_rest_of(mut self, before: &Self) -> Self {
        let known = self.names.len();
        let Self { names, state: rest } = before.without(&self.names);
        let add = |group: &mut Option<Group>, rest: Option<Group>| {
            if let Some(rest) = rest {
                let group = group.get_or_insert_with(|| vec![None; known]);
                group.extend(rest);
            }
        };
        add(&mut self.state.masters, rest.masters);
        add(&mut self.state.average, rest.average);
        if let (Some(window), Some(rest)) = (&mut self.state.window, rest.window) {
            if window.open.is(&rest.open) {
                window.sums.extend(rest.sums);
            }
        }
        self.names.extend(names);
        self
    }

    /// Return the state without the parameters of these names.
    #[must_use]
    pub fn without<N: AsRef<str>>(&self, names: &[N]) -> Self {
        let without: HashSet<&str> = names.iter().map(AsRef::as_ref).collect();
        let rest: Vec<usize> = (0..self.names.len())
            .filter(|&at| !without.contains(&*self.names[at]))
            .collect();
        let places: Vec<Option<usize>> = rest.iter().copied().map(Some).collect();
        Self {
            names: rest.iter().map(|&at| self.names[at].clone()).collect(),
            state: self.each(|group| picked(group, &places)),
        }
    }

    /// The number of batches in the window.
    #[must_use]
    pub fn batches(&self) -> usize {
        let window = self.state.window.as_ref();
        window.map_or(0, |window| window.open.batches)
    }

    /// The same for parameters of these names: what is missing or of another shape starts from its initial value.
    pub fn onto<N: AsRef<str>>(&self, names: &[N], tensors: &[Tensor]) -> AuxState {
        let known: HashMap<&str, usize> = self.names.iter().map(String::as_str).zip(0..).collect();
        let places = names.iter().map(|name| known.get(name.as_ref()).copied());
        let places: Vec<Option<usize>> = places.collect();
        self.each(|group| {
            let arrays = picked(group, &places).into_iter().zip(tensors);
            let fits = |(array, tensor): (Option<Array>, &Tensor)| {
                array.filter(|array| array.shape() == tensor.shape)
            };
            arrays.map(fits).collect()
        })
    }

    // with other groups
    fn each(&self, other: impl Fn(&Group) -> Group) -> AuxState {
        AuxState {
            masters: self.state.masters.as_ref().map(&other),
            average: self.state.average.as_ref().map(&other),
            window: self.state.window.as_ref().map(|window| Window {
                sums: other(&window.sums),
                ..window.clone()
            }),
            losses: self.state.losses.clone(),
            scale: self.state.scale.clone(),
        }
    }

    /// The arrays by the flat names of `Step.state` in Python: `ema.layers.0.weight`, `weight`, `loss_scale`.
    #[must_use]
    pub fn arrays(&self) -> Arrays {
        let state = &self.state;
        let window = state.window.as_ref();
        let groups = [
            state.masters.as_ref(),
            state.average.as_ref(),
            window.map(|window| &window.sums),
        ];
        let mut arrays = Arrays::new();
        for (group, tensors) in GROUPS.iter().zip(groups) {
            for (name, array) in self.names.iter().zip(tensors.into_iter().flatten()) {
                arrays.extend(
                    array
                        .clone()
                        .map(|array| (format!("{group}.{name}"), array)),
                );
            }
        }
        let [scale, good] = state
            .scale
            .clone()
            .map_or([None, None], |scale| scale.map(Some));
        let weight = window.map(|window| window.weight.clone());
        let scalars = [weight, state.losses.clone(), scale, good];
        let scalars = SCALARS.iter().zip(scalars);
        arrays.extend(scalars.filter_map(|(name, array)| Some(((*name).to_owned(), array?))));
        arrays
    }

    /// Read such arrays, and the number of batches in the window.
    #[must_use]
    pub fn of_arrays(mut arrays: Arrays, batches: usize) -> Self {
        let [weight, losses, scale, good] = SCALARS.map(|name| arrays.remove(name));
        let mut groups: [HashMap<String, Array>; 3] = Default::default();
        let mut names = Vec::new();
        for (key, array) in arrays {
            let Some((group, name)) = key.split_once('.') else {
                continue;
            };
            if let Some(at) = GROUPS.iter().position(|known| *known == group) {
                groups[at].insert(name.to_owned(), array);
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        names.dedup();
        let [masters, average, sums] = groups.map(|mut group| {
            let arrays = names.iter().map(|name| group.remove(name));
            let arrays: Group = arrays.collect();
            arrays.iter().any(Option::is_some).then_some(arrays)
        });
        let state = AuxState {
            masters,
            average,
            window: weight.filter(|_| batches > 0).map(|weight| Window {
                open: Open::new(batches),
                sums: sums.unwrap_or_default(),
                weight,
            }),
            losses: losses.filter(|_| batches > 0),
            scale: scale.zip(good).map(<[Array; 2]>::from),
        };
        Self { names, state }
    }
}

fn picked(group: &Group, places: &[Option<usize>]) -> Group {
    let arrays = places.iter().map(|at| group.get((*at)?)?.clone());
    arrays.collect()
}
