//! A diagnosis of a training: its parts one by one, from the batches to the native step, each with its time and memory.
use std::{
    fmt,
    panic::resume_unwind,
    sync::mpsc::{channel, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use mlx_rs::{
    error::Result as MlxResult,
    module::ModuleParameters,
    transforms::{eval, value_and_grad_with_argnums},
    Array,
};

use super::{host::Stop, step::Step};
use crate::{
    error::{unread, Error, Result},
    mlx::{graph, memory},
    trace::{Host, LossCall},
};

/// Number of updates of the rungs in plain MLX.
const UPDATES: usize = 10;
/// Number of native steps.
const STEPS: usize = 30;
/// Number of first steps whose memory does not count.
const WARM: usize = 10;
/// Growth of memory in bytes a step that is a fault.
const GROWTH: usize = 64;
/// A loss that is so many times the first one has diverged.
const DIVERGED: f32 = 20.0;
/// Size of a plain update in proportion to the gradient.
const RATE: f32 = 1e-6;

/// One part of a training, as it went.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rung {
    /// Its name.
    pub name: &'static str,
    /// True if it came to its end.
    pub done: bool,
    /// Seconds in all.
    pub seconds: f64,
    /// The number of times that it was done.
    pub times: usize,
    /// Most bytes of MLX in use behind it.
    pub bytes: usize,
    /// Largest number of operations that waited at once, where some did.
    pub operations: Option<usize>,
}

/// One fault and its remedy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// A short name, that of the same fault in Python: `not-finite`.
    pub name: &'static str,
    /// What was found, and where.
    pub text: String,
    /// What to do.
    pub remedy: &'static str,
}

/// The rungs of a diagnosis and what was found; as a text a table and a list.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Diagnosis {
    /// The rungs that were climbed, the last of which is the first that failed.
    pub rungs: Vec<Rung>,
    /// The faults.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// True if no fault was found.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.findings.is_empty()
    }

    fn find(&mut self, name: &'static str, text: String, remedy: &'static str) {
        self.findings.push(Finding { name, text, remedy });
    }

    // climb a rung under a clock; its text is that of an error
    fn climb(
        &mut self,
        (name, times, patience): (&'static str, usize, Duration),
        work: impl FnOnce(&mut Self) -> Result<Option<usize>>,
    ) -> bool {
        let (ended, end) = channel::<()>();
        let watch = thread::spawn(move || {
            if end.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                eprintln!("faststep: the rung '{name}' has not ended after {patience:?}: what hangs is in it");
            }
        });
        let started = Instant::now();
        let outcome = work(self);
        let seconds = started.elapsed().as_secs_f64();
        drop(ended);
        let _ = watch.join(); // it panics where stderr is closed
        self.rungs.push(Rung {
            name,
            done: outcome.is_ok(),
            seconds,
            times,
            bytes: memory::active(),
            operations: outcome.as_ref().ok().copied().flatten(),
        });
        if let Err(error) = outcome {
            self.find(
                "error",
                format!("{name}: {error}"),
                "the rungs before this one are done: look at what it adds to them",
            );
        }
        self.is_healthy()
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rung in &self.rungs {
            #[allow(clippy::cast_precision_loss)] // for people
            let (each, mib) = (
                1e3 * rung.seconds / rung.times as f64,
                rung.bytes as f64 / 1_048_576.0,
            );
            let status = if rung.done { "ok" } else { "fails" };
            write!(
                f,
                "{:<26} {status:<6} {each:>9.3} ms {mib:>8.1} MiB",
                rung.name
            )?;
            match rung.operations {
                Some(operations) => writeln!(f, "  {operations} operations waited"),
                None => writeln!(f),
            }?;
        }
        for (number, Finding { name, text, remedy }) in self.findings.iter().enumerate() {
            writeln!(f, "{}. {name}: {text}\n   -> {remedy}", number + 1)?;
        }
        if self.is_healthy() {
            writeln!(f, "healthy: no fault found in {} rungs", self.rungs.len())?;
        }
        Ok(())
    }
}

impl<M: ModuleParameters + 'static> Step<M> {
    /// Find out which part of a training hangs, fails or learns nothing: batches, the loss, its gradients, updates in plain MLX
    /// without and with an evaluation behind each, native steps. The first part that fails is the last that is tried.
    ///
    /// A part that takes longer than `patience` is named on stderr while it hangs; the process has to be ended by hand then. The step
    /// trains meanwhile and is gone afterwards: make another one to train.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use faststep::{Error, Optimizer, Optimizers, Options, Step};
    /// # use mlx_rs::{error::Exception, module::Module, nn::Linear, Array};
    /// # let loss = |model: &mut Linear, batch: &[Array]| -> Result<Array, Exception> {
    /// #     model.forward(&batch[0])?.square()?.mean(None)
    /// # };
    /// # let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-2);
    /// let step = Step::new(Linear::new(8, 1)?, optimizers, loss, Options::default())?;
    /// let batches = [vec![Array::ones::<f32>(&[32, 8])?]];
    /// let found = step.diagnose(&batches, Duration::from_secs(60));
    /// println!("{found}");
    /// assert!(found.is_healthy());
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn diagnose(mut self, batches: &[Vec<Array>], patience: Duration) -> Diagnosis {
        let mut found = Diagnosis::default();
        if batches.is_empty() {
            found.find("no-data", "there is no batch".into(), "pass a few batches");
            return found;
        }
        let count = batches.len();
        let climbed = found.climb(("batches", count, patience), |found| look(batches, found))
            && found.climb(("forward", count, patience), |found| {
                self.forward(batches, found)
            })
            && found.climb(("gradients", count, patience), |found| {
                self.slopes(batches, found)
            })
            && found.climb(("update without evaluation", UPDATES, patience), |_| {
                self.plain(batches, UPDATES)
            })
            && found.climb(("joint evaluation", UPDATES, patience), |_| {
                self.plain(batches, 1)
            })
            && found.climb(("native step", STEPS, patience), |found| {
                self.native(batches, found)
            });
        debug_assert_eq!(climbed, found.is_healthy());
        found
    }

    // the loss of each batch
    fn forward(&mut self, batches: &[Vec<Array>], found: &mut Diagnosis) -> Result<Option<usize>> {
        self.take_in()?;
        for (number, batch) in batches.iter().enumerate() {
            let parameters = self.engine.parameters().to_vec();
            let loss = self.loss_of(&parameters, batch);
            let loss = number_of(&self.settled(loss)?)?;
            if !loss.is_finite() {
                let text = format!(
                    "the loss of batch {number} is {loss}, and what it is computed from is finite"
                );
                let remedy = "look for log(0), a division by zero (the sum of a mask without a one), or exp of a large number";
                found.find("not-finite", text, remedy);
                break;
            }
        }
        Ok(None)
    }

    // the gradients of each batch by parameter
    fn slopes(&mut self, batches: &[Vec<Array>], found: &mut Diagnosis) -> Result<Option<usize>> {
        let mut zero: Option<Vec<String>> = None;
        for (number, batch) in batches.iter().enumerate() {
            let (_, gradients) = self.gradients(batch)?;
            let mut now = Vec::new();
            for (name, gradient) in &gradients {
                if !is_finite(gradient)? {
                    let text = format!(
                        "the gradient of {name} in batch {number} is not finite, and the loss is"
                    );
                    let remedy = "look for a square root, a norm or a power at zero, whose slope is infinite";
                    found.find("not-finite", text, remedy);
                    return Ok(None);
                }
                if number_of(&gradient.abs()?.max(None)?)? == 0.0 {
                    now.push(name.to_string());
                }
            }
            zero = Some(match zero {
                Some(before) => before
                    .into_iter()
                    .filter(|name| now.contains(name))
                    .collect(),
                None => now,
            });
        }
        let mut zero = zero.unwrap_or_default();
        if !zero.is_empty() {
            zero.sort();
            let text = format!(
                "the gradient of {} is zero in all of {} batches",
                zero.join(", "),
                batches.len()
            );
            let remedy = "freeze what is not to be trained; look for stop_gradient, a layer that is not called, units that are always off";
            found.find("zero-gradient", text, remedy);
        }
        Ok(None)
    }

    // updates in plain MLX, evaluated behind every `every`-th; the operations that have waited
    fn plain(&mut self, batches: &[Vec<Array>], every: usize) -> Result<Option<usize>> {
        self.take_in()?;
        let begin = self.engine.parameters().to_vec();
        let mut parameters = begin.clone();
        let mut most = 0;
        for (number, batch) in batches.iter().cycle().take(UPDATES).enumerate() {
            let updated = self.updated(&parameters, batch);
            let updated = self.settled(updated)?;
            if (number + 1) % every == 0 {
                most = most.max(graph::size(&[], &updated));
                eval(&updated)?;
            }
            parameters = updated;
        }
        Ok((every > 1).then_some(most))
    }

    fn updated(&self, parameters: &[Array], batch: &[Array]) -> MlxResult<Vec<Array>> {
        let numbers = 0..i32::try_from(parameters.len()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = numbers.collect();
        let loss = |arrays: &[Array]| self.loss_of(arrays, batch).map(|loss| vec![loss]);
        let (_, gradients) = value_and_grad_with_argnums(loss, numbers.as_slice())(parameters)?;
        let pairs = parameters.iter().zip(&gradients);
        let moved = pairs.map(|(parameter, gradient)| {
            let change = gradient.multiply(Array::from_f32(RATE))?;
            parameter.subtract(change.as_dtype(parameter.dtype())?)
        });
        moved.collect()
    }

    // native steps: whether they train, and whether memory grows
    fn native(&mut self, batches: &[Vec<Array>], found: &mut Diagnosis) -> Result<Option<usize>> {
        let before = self.engine.parameters().to_vec();
        let (mut losses, mut skipped, mut warm) = (Vec::new(), 0, 0);
        for (number, batch) in batches.iter().cycle().take(STEPS).enumerate() {
            let output = self.step(batch)?;
            losses.push(number_of(&output.loss)?);
            skipped += usize::from(output.skipped()?);
            if number == WARM {
                warm = self.settled_memory()?;
            }
        }
        judge(&losses, skipped, found);
        let grown = self.settled_memory()?.saturating_sub(warm) / (STEPS - WARM);
        if grown > GROWTH {
            let text = format!("MLX's memory grows by {grown} bytes a step");
            let remedy =
                "look for arrays that the loss keeps: a history, a sum that nobody evaluates";
            found.find("grows", text, remedy);
        }
        let mut moved = skipped == STEPS || self.engine.batches() > 0;
        for (old, new) in before.iter().zip(self.engine.parameters()) {
            moved |= number_of(&old.ne(new)?.any(None)?)? != 0.0;
        }
        if !moved {
            let text = format!("no parameter has changed in {STEPS} steps");
            found.find(
                "nothing-moves",
                text,
                "look at the learning rate: 0, or too small for the parameters' dtype",
            );
        }
        Ok(None)
    }

    // the bytes in use when all is done, without those of captures
    fn settled_memory(&mut self) -> Result<usize> {
        self.synchronize()?;
        Ok(memory::active().saturating_sub(self.engine.captured_bytes()))
    }

    // the loss over these parameters; the module is left without arrays
    fn loss_of(&self, parameters: &[Array], batch: &[Array]) -> MlxResult<Array> {
        let call = LossCall {
            parameters,
            others: &self.others,
            batch,
            key: &self.key,
        };
        let output = self.host.loss(call);
        self.slots().hide(&mut *self.host.model.borrow_mut());
        output.map(|output| output.loss)
    }

    // an outcome of the loss, with its own errors and panics
    fn settled<T>(&self, outcome: MlxResult<T>) -> Result<T> {
        match (outcome, self.host.stop.take()) {
            (Ok(value), _) => Ok(value),
            (Err(_), Some(Stop::Panic(payload))) => resume_unwind(payload),
            (Err(_), Some(Stop::Reads)) => Err(Error::Untraceable),
            (Err(error), None) => Err(Error::Trace(error)),
        }
    }
}

// losses of native steps
fn judge(losses: &[f32], skipped: usize, found: &mut Diagnosis) {
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    if skipped > 0 {
        let text = format!("{skipped} of {} steps were skipped, because loss or gradients are not finite or the loss is above max_loss", losses.len());
        found.find(
            "skipped",
            text,
            "a smaller learning rate, warm-up, max_grad_norm(1.0)",
        );
    } else if !last.is_finite() || last > DIVERGED * first.abs().max(1e-3) {
        let text = format!("the training diverges: the loss is {first} at the first step, and {last} at the last of {}", losses.len());
        found.find(
            "diverges",
            text,
            "a smaller learning rate, warm-up, max_grad_norm(1.0)",
        );
    }
}

// arrays that are not finite
fn look(batches: &[Vec<Array>], found: &mut Diagnosis) -> Result<Option<usize>> {
    for (number, batch) in batches.iter().enumerate() {
        eval(batch)?;
        for (place, array) in batch.iter().enumerate() {
            if array.dtype().is_float() && !is_finite(array)? {
                let text = format!("array {place} of batch {number} has NaN or infinite values");
                found.find(
                    "not-finite",
                    text,
                    "clean the data, or leave such batches to the step: it skips them",
                );
                return Ok(None);
            }
        }
    }
    Ok(None)
}

fn is_finite(array: &Array) -> Result<bool> {
    let infinite = Array::from_f32(f32::INFINITY);
    Ok(number_of(&array.abs()?.lt(infinite)?.all(None)?)? != 0.0)
}

fn number_of(scalar: &Array) -> Result<f32> {
    Ok(scalar.try_item_cast::<f32>().map_err(unread)?)
}
