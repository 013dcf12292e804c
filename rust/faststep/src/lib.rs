//! The training step of MLX, native: gradients, clipping, update and evaluation in one call.
//!
//! A [`Step`] has an mlx-rs module and a loss, and takes the place of `value_and_grad`, `clip_grad_norm`, the optimizer's
//! `update` and the evaluation of all that has changed:
//!
//! ```
//! use faststep::{Error, Optimizer, Optimizers, Options, Step};
//! use mlx_rs::{error::Exception, module::Module, nn::Linear, random, Array};
//!
//! let model = Linear::new(8, 1)?;
//! let loss = |model: &mut Linear, batch: &[Array]| -> Result<Array, Exception> {
//!     model.forward(&batch[0])?.subtract(&batch[1])?.square()?.mean(None)
//! };
//! let options = Options::default().max_grad_norm(1.0);
//! let mut step = Step::new(model, Optimizers::new(Optimizer::adamw(0.01), 1e-2), loss, options)?;
//!
//! let x = random::normal::<f32>(&[32, 8], None, None, None)?;
//! let y = x.sum_axis(1, true)?;
//! let mut losses = Vec::new();
//! for _ in 0..50 {
//!     let output = step.step(&[x.clone(), y.clone()])?;
//!     losses.push(output.loss.item_exact::<f32>());
//! }
//! assert!(losses[49] < 0.5 * losses[0]);
//! assert_eq!(step.stats()?.traced, 1);
//! let model = step.into_model()?; // as it is now
//! # assert_eq!(model.weight.shape(), [1, 8]);
//! # Ok::<(), Error>(())
//! ```
//!
//! Nothing has to be evaluated by hand: a step is handed to the device whole, with everything that it changes, and at most
//! [`Options::in_flight`] steps wait there.
//!
//! # Which MLX
//! The crate is linked with the libmlx of a Python environment, found at build time by `PYO3_PYTHON` (a python with
//! `mlx` and a back end installed) or by `FASTSTEP_MLX` (the `mlx` directory of such an environment or of an unpacked
//! wheel). See `docs/building.md` for that, for what a crate that depends on this one has to state, and for macOS.
//!
//! # A run that goes on in Python
//! [`Step::save`] writes a directory of three safetensors files with the names that Python uses:
//!
//! ```python
//! arrays, numbers = mx.load("run/step.safetensors", return_metadata=True)
//! numbers = {name: int(number) for name, number in numbers.items()}
//! mx.random.seed(numbers.pop("random"))
//! model.load_weights("run/model.safetensors")
//! optimizer.state = tree_unflatten(list(mx.load("run/optimizer.safetensors").items()))
//! step.load_state((tree_unflatten(list(arrays.items())) if arrays else {}) | numbers)
//! ```
//!
//! and [`Step::load`] reads what Python writes:
//!
//! ```python
//! state = dict(tree_flatten(step.state))
//! arrays = {name: value for name, value in state.items() if isinstance(value, mx.array)}
//! numbers = {name: str(value) for name, value in state.items() if name not in arrays}
//! high, low = mx.random.state[0].tolist()
//! model.save_weights("run/model.safetensors")
//! mx.save_safetensors("run/optimizer.safetensors", dict(tree_flatten(optimizer.state)))
//! mx.save_safetensors("run/step.safetensors", arrays, numbers | {"random": str(high << 32 | low)})
//! ```
//!
//! # The rooms
//! Each folder uses only those below it: [`Step`] and what belongs to it (`module`), how a step is evaluated
//! ([`mod@engine`]), what it takes of memory (`memory`), what it computes (`trace`), the order in which it is evaluated, whoever
//! does it (`evaluation`), the update rules (`optim`), where tensors lie (`layout`), and MLX below mlx-rs (`mlx`). The Python package is another front on [`mod@engine`].
#![deny(unsafe_code)]

pub mod engine;
mod error;
mod evaluation;
mod layout;
mod memory;
mod mlx;
mod module;
mod optim;
mod trace;

pub use engine::{Nonfinite, Options};
pub use error::{Error, Result};
pub use mlx::{group::Group, kernels, openblas};
pub use module::{Diagnosis, Finding, Loss, Rung, Stats, Step, StepOutput};
pub use optim::{optimizer as optimizers, schedulers, LearningRate, Optimizer, Optimizers};
pub use trace::TraceRecord;
