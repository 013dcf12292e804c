//! The state of a step by name: given out, and written to checkpoints that Python reads.
use std::path::Path;

use mlx_rs::{module::ModuleParameters, transforms::eval};

use super::{
    checkpoint::{Checkpoint, Numbers},
    optimizer::{named, Arrays},
    slots::ModuleArrays,
    step::{Kept, Shown, Step},
};
use crate::{
    engine::{nonfinite::is_true, Flags},
    error::{Error, Result},
    layout::NamedAuxState,
    mlx::random,
};

impl<M: ModuleParameters + 'static> Step<M> {
    /// The optimizer's arrays as `tree_flatten(optimizer.state)` names them in Python: `step`, `learning_rate`,
    /// `layers.0.weight.m`, …; of several rules behind `states.0.`, `states.1.`, …
    ///
    /// # Errors
    /// When MLX refuses a view.
    pub fn optimizer_state(&self) -> Result<Arrays> {
        let mut arrays = self.kept.optimizer.clone();
        arrays.extend(named(&self.rules, &self.engine, &self.slots().parameters)?);
        Ok(arrays)
    }

    /// The moving average of the parameters, by name, where [`Options::ema_decay`](crate::Options::ema_decay) asks for
    /// one: to be put into a module by `update_flattened`.
    ///
    /// # Errors
    /// When MLX refuses a view.
    pub fn average(&self) -> Result<mlx_rs::module::FlattenedModuleParam> {
        let average = self.engine.aux_state()?.average.into_iter().flatten();
        let names = self.slots().parameters.clone();
        let pairs = names.into_iter().zip(average);
        Ok(pairs
            .filter_map(|(name, array)| Some((name, array?)))
            .collect())
    }

    pub(super) fn aux_state(&self) -> Result<NamedAuxState> {
        let names = self
            .slots()
            .parameters
            .iter()
            .map(ToString::to_string)
            .collect();
        let state = NamedAuxState::new(names, self.engine.aux_state()?);
        Ok(state.with_rest_of(&self.kept.aux_state))
    }

    /// Write all that the run needs to go on, here or in Python, into a directory, which takes the place of what was there:
    /// `model.safetensors`, `optimizer.safetensors`, and `step.safetensors` with the numbers in its metadata.
    ///
    /// ```
    /// # use faststep::{Error, Optimizer, Optimizers, Options, Step};
    /// # use mlx_rs::{error::Exception, module::Module, nn::Linear, Array};
    /// # let folder = std::env::temp_dir().join(format!("faststep-doc-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # let loss = |model: &mut Linear, batch: &[Array]| -> Result<Array, Exception> {
    /// #     model.forward(&batch[0])?.square()?.mean(None)
    /// # };
    /// # let x = Array::ones::<f32>(&[8, 4])?;
    /// let new = || -> Result<Step<Linear>, Error> {
    ///     let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-2);
    ///     Step::new(Linear::new(4, 2)?, optimizers, loss, Options::default())
    /// };
    /// let mut step = new()?;
    /// step.step(&[x.clone()])?;
    /// step.save(folder.join("run"))?;
    ///
    /// let mut again = new()?;
    /// again.load(folder.join("run"))?;
    /// let losses = [&mut step, &mut again].map(|step| step.step(&[x.clone()]).unwrap().loss);
    /// assert_eq!(losses[0].item_exact::<f32>(), losses[1].item_exact::<f32>());
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Checkpoint`]; what was there before is there still. [`Error::Device`], when a step in flight fails.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.take_in()?;
        self.synchronize()?;
        self.skips.read(0, &is_true)?;
        self.misses.read(0, &is_true)?;
        let slots = self.slots();
        let values = self.engine.parameters().iter().chain(&self.others);
        let names = slots.parameters.iter().chain(&slots.others);
        let aux_state = self.aux_state()?;
        Checkpoint {
            model: names
                .map(ToString::to_string)
                .zip(values.cloned())
                .collect(),
            optimizer: self.optimizer_state()?,
            step: aux_state.arrays(),
            numbers: Numbers {
                steps: self.steps,
                updates: self.updates - self.misses.count(),
                skipped: self.skips.count(),
                batches: aux_state.batches(),
                random: Some(random::seed_of(&self.key)?),
            },
        }
        .write(path.as_ref())
    }

    /// Go on where [`Step::save`], or Python, has left off. The module has to have the same parameters, and the step the
    /// same optimizers and options.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]; everything is then as it was.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let Checkpoint {
            model,
            optimizer,
            step,
            numbers,
        } = Checkpoint::read(path)?;
        self.engine
            .synchronize(&mut ())
            .or_else(|error| match error {
                Error::Device(_) | Error::Memory(_) => Ok(()), // the lost arrays are replaced now
                other => Err(other),
            })?;
        eval(
            model
                .values()
                .chain(optimizer.values())
                .chain(step.values()),
        )?;
        self.show();
        let mut arrays = ModuleArrays::of(&*self.host.model.borrow());
        let refused = |reason: String| Error::Checkpoint {
            path: path.to_owned(),
            reason,
        };
        arrays.replace(model).map_err(refused)?;
        let key = numbers.random.map(random::seeded).transpose()?;
        let kept = Kept {
            optimizer,
            aux_state: NamedAuxState::of_arrays(step, numbers.batches),
        };
        let begun = self.begin(arrays, kept);
        begun.map_err(|error| match error {
            Error::Invalid(reason) => refused(reason),
            other => other,
        })?;
        self.version += 1;
        self.slots().hide(&mut *self.host.model.borrow_mut());
        self.shown.set(Shown::Nothing);
        self.key = key.unwrap_or_else(|| self.key.clone());
        (self.steps, self.updates) = (numbers.steps, numbers.updates);
        (self.skips, self.misses) = (Flags::of(numbers.skipped), Flags::default());
        Ok(())
    }
}
