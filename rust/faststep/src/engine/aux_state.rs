//! The auxiliary state of the engine, given out and loaded by tensor, and the masters in it.
use mlx_rs::{transforms::eval, Array, Dtype};

use super::Engine;
use crate::{
    error::Result,
    layout::{
        aux_state::{AuxState, Needs, Open, Window},
        precision,
    },
    optim::StateLayout,
};

impl Engine {
    /// The moments in the state, by tensor, as views of the buffers.
    ///
    /// # Errors
    /// When MLX refuses a view.
    pub fn moments(&self, layout: &StateLayout) -> Result<Vec<Array>> {
        let _shared = self.shared_stream()?;
        let views = layout.views(&self.layout, self.state())?;
        Ok(views.into_iter().flatten().collect())
    }

    /// The auxiliary state, by tensor.
    ///
    /// # Errors
    /// When MLX refuses a view.
    pub fn aux_state(&self) -> Result<AuxState> {
        let _shared = self.shared_stream()?;
        let places = self.places;
        let by_tensor = |first: usize| -> Result<Vec<Option<Array>>> {
            let buffers = &self.state[first..first + self.layout.len()];
            Ok(self.layout.views(buffers)?.into_iter().map(Some).collect())
        };
        let average = places.average.filter(|_| self.averages);
        let window = |(open, first): (Open, usize)| -> Result<Window> {
            Ok(Window {
                open,
                sums: by_tensor(first)?,
                weight: self.state[first + self.layout.len()].clone(),
            })
        };
        Ok(AuxState {
            masters: match places.masters {
                Some(_) if !self.masters_stale => Some(self.masters()?),
                _ => None,
            },
            average: average.map(by_tensor).transpose()?,
            window: self.window.zip(places.window).map(window).transpose()?,
            losses: places
                .losses
                .filter(|_| self.window.is_some())
                .map(|at| self.state[at].clone()),
            scale: places
                .scale
                .map(|at| [self.state[at].clone(), self.state[at + 1].clone()]),
        })
    }

    /// Load auxiliary state. Missing arrays start from their initial values; a master counts if it rounds to its
    /// parameter.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn load_aux_state(&mut self, aux_state: &AuxState) -> Result<()> {
        self.window = aux_state.window.as_ref().map(|window| window.open);
        self.averages = aux_state.average.is_some();
        self.need(Needs {
            masters: aux_state.masters.is_some(),
            average: aux_state.average.is_some(),
            window: aux_state.window.is_some(),
            scale: aux_state.scale.is_some(),
            losses: aux_state.losses.is_some(),
            ..Needs::default()
        })?;
        if self.dry_run {
            return Ok(()); // a plan asks for no values
        }
        if let Some(masters) = &aux_state.masters {
            self.set_masters(masters.clone())?;
        }
        if let (Some(average), Some(first)) = (&aux_state.average, self.places.average) {
            self.set_kept(average, first)?;
        }
        if let (Some(window), Some(first)) = (&aux_state.window, self.places.window) {
            self.set_kept(&window.sums, first)?;
            self.state[first + self.layout.len()] = window.weight.clone();
        }
        if let (Some(losses), Some(at)) = (&aux_state.losses, self.places.losses) {
            self.state[at] = losses.clone();
        }
        if let (Some(scale), Some(at)) = (&aux_state.scale, self.places.scale) {
            self.state.splice(at..at + 2, scale.iter().cloned());
        }
        eval(&self.state)?;
        Ok(())
    }

    // pack tensors into buffers; tensors that are None keep their values
    fn set_kept(&mut self, kept: &[Option<Array>], first: usize) -> Result<()> {
        let buffers = first..first + self.layout.len();
        let mut tensors = self.layout.views(&self.state[buffers.clone()])?;
        for (tensor, kept) in tensors.iter_mut().zip(kept) {
            if let Some(kept) = kept {
                *tensor = kept.as_dtype(tensor.dtype())?;
            }
        }
        let packed = self.layout.pack(&tensors)?;
        self.state.splice(buffers, packed);
        Ok(())
    }

    // the buffers, with masters in place of half-precision parameters
    pub(super) fn wide_buffers(&self) -> Vec<Array> {
        let mut buffers = self.buffers();
        for buffer in self.layout.halves() {
            if let Some(at) = self.places.master(&self.layout, buffer) {
                buffers[buffer] = self.state[at].clone();
            }
        }
        buffers
    }

    // masters by tensor; None for tensors in full precision
    pub(super) fn masters(&self) -> Result<Vec<Option<Array>>> {
        let buffers = self.wide_buffers();
        let tensors = self.layout.views(&buffers)?.into_iter();
        let tensors = tensors.zip(self.layout.tensors());
        Ok(tensors
            .map(|(master, tensor)| precision::is_half(tensor.dtype).then_some(master))
            .collect())
    }

    // set masters by tensor; the parameter itself where a master is missing or rounds to another value
    pub(super) fn set_masters(&mut self, masters: Vec<Option<Array>>) -> Result<()> {
        let mut tensors = Vec::with_capacity(masters.len());
        for (master, parameter) in masters.into_iter().zip(&self.parameters) {
            let kept = match master {
                Some(master) if master.as_dtype(parameter.dtype())?.eq_values(parameter)? => master,
                _ => parameter.clone(),
            };
            tensors.push(kept.as_dtype(Dtype::Float32)?);
        }
        for buffer in self.layout.halves() {
            if let Some(at) = self.places.master(&self.layout, buffer) {
                self.state[at] = self.layout.pack_one(buffer, &tensors)?;
            }
        }
        eval(&self.state)?;
        Ok(())
    }
}
