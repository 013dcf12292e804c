//! What a step keeps, by the names that Python's `Step.state` and `optimizer.state` have: checkpoints, and other layouts.
use std::{collections::HashSet, path::Path, rc::Rc};

use mlx_rs::{module::ModuleParameters, transforms::eval, Array};

use super::{
    optimizer::{named, Arrays},
    show::Shown,
    Step,
};
use crate::{
    checkpoint::{Checkpoint, Numbers},
    error::{Error, Result},
    extras::{Keep, Open, Window},
    flags::Flags,
    module::{look, Slots},
    nonfinite::is_true,
    random,
};

const GROUPS: [&str; 3] = ["masters", "ema", "window"];

/// The optimizer's arrays, and the step's own.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: Arrays,
    pub(super) extras: Extras,
}

/// What a step keeps beside the optimizer's state.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras {
    pub(super) arrays: Arrays,
    pub(super) window: Option<Open>,
}

impl Extras {
    fn of(keep: Keep, names: &[Rc<str>]) -> Self {
        let mut arrays = Arrays::new();
        let open = keep.window.as_ref().map(|window| window.open);
        let (sums, weight) = keep.window.map(|w| (w.sums, w.weight)).unzip();
        for (group, tensors) in GROUPS.iter().zip([keep.masters, keep.average, sums]) {
            for (name, tensor) in names.iter().zip(tensors.into_iter().flatten()) {
                arrays.extend(tensor.map(|tensor| (format!("{group}.{name}"), tensor)));
            }
        }
        arrays.extend(weight.map(|weight| ("weight".to_owned(), weight)));
        if let Some([scale, streak]) = keep.scale {
            arrays.insert("loss_scale".to_owned(), scale);
            arrays.insert("good_steps".to_owned(), streak);
        }
        Self {
            arrays,
            window: open,
        }
    }

    /// The same by tensor: what is missing, or of another shape, begins anew.
    pub(super) fn onto(&self, slots: &Slots) -> Keep {
        let group = |group: &str| {
            let tensors = slots.parameters.iter().zip(slots.tensors());
            let arrays: Vec<Option<Array>> = tensors
                .map(|(name, tensor)| {
                    let array = self.arrays.get(&format!("{group}.{name}"));
                    array.filter(|array| array.shape() == tensor.shape).cloned()
                })
                .collect();
            arrays.iter().any(Option::is_some).then_some(arrays)
        };
        let one = |name: &str| self.arrays.get(name).cloned();
        Keep {
            masters: group("masters"),
            average: group("ema"),
            window: self.window.zip(one("weight")).map(|(open, weight)| Window {
                open,
                sums: group("window").unwrap_or_default(),
                weight,
            }),
            scale: one("loss_scale")
                .zip(one("good_steps"))
                .map(<[Array; 2]>::from),
        }
    }

    /// With what was kept before for other parameters.
    pub(super) fn with_rest_of(mut self, before: &Self) -> Self {
        let same = self
            .window
            .zip(before.window)
            .is_some_and(|(a, b)| a.is(&b));
        for (name, array) in &before.arrays {
            if same || !name.starts_with("window.") {
                self.arrays
                    .entry(name.clone())
                    .or_insert_with(|| array.clone());
            }
        }
        self
    }

    /// Without what belongs to these parameters, and to none.
    pub(super) fn forget(&mut self, names: &[Rc<str>]) {
        let names: HashSet<&str> = names.iter().map(|name| &**name).collect();
        self.arrays.retain(|key, _| {
            let name = key.split_once('.').map(|(_, name)| name);
            name.is_some_and(|name| !names.contains(name))
        });
    }
}

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
        let average = self.engine.keep()?.average.into_iter().flatten();
        let names = self.slots().parameters.clone();
        let pairs = names.into_iter().zip(average);
        Ok(pairs
            .filter_map(|(name, array)| Some((name, array?)))
            .collect())
    }

    pub(super) fn extras(&self) -> Result<Extras> {
        Ok(Extras::of(self.engine.keep()?, &self.slots().parameters))
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
        let extras = self.extras()?;
        Checkpoint {
            model: names
                .map(ToString::to_string)
                .zip(values.cloned())
                .collect(),
            optimizer: self.optimizer_state()?,
            step: extras.arrays,
            numbers: Numbers {
                steps: self.steps,
                updates: self.updates - self.misses.count(),
                skipped: self.skips.count(),
                batches: extras.window.map_or(0, |window| window.batches),
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
                Error::Device(_) => Ok(()), // what is lost is replaced now
                other => Err(other),
            })?;
        eval(
            model
                .values()
                .chain(optimizer.values())
                .chain(step.values()),
        )?;
        self.show();
        let mut looked = look(&*self.host.model.borrow());
        let refused = |reason: String| Error::Checkpoint {
            path: path.to_owned(),
            reason,
        };
        looked.replace(model).map_err(refused)?;
        let key = numbers.random.map(random::seeded).transpose()?;
        let extras = Extras {
            arrays: step,
            window: Some(numbers.batches).filter(|n| *n > 0).map(Open::new),
        };
        let begun = self.begin(looked, Kept { optimizer, extras });
        begun.map_err(|error| match error {
            Error::Option(reason) => refused(reason),
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
