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
//! # The engine
//! Under the step, three things are kept apart: what a step computes ([`trace`]), how it is evaluated
//! ([`mod@step`]), and how the user's objects see the result, which is the caller's matter ([`step::Owner`]): a
//! [`Step`]'s, or the Python package's.
#![deny(unsafe_code)]

pub mod adafactor;
pub mod array;
pub mod blas;
mod body;
mod checkpoint;
pub mod clip;
mod course;
pub mod error;
pub mod extras;
pub mod flags;
mod fused;
pub mod graph;
pub mod guard;
mod host;
pub mod kernels;
pub mod layout;
mod loss;
pub mod memory;
mod meter;
mod module;
pub mod muon;
pub mod nonfinite;
pub mod openblas;
pub mod optimizer;
mod optimizers;
mod options;
pub mod outputs;
pub mod pack;
pub mod plan;
pub mod precision;
mod random;
pub mod rebind;
pub mod rules;
mod scene;
pub mod schedulers;
mod simulation;
pub mod step;
pub mod task;
pub mod trace;
pub mod traces;
mod training;

pub use error::{Error, Result};
pub use loss::Loss;
pub use optimizer::Optimizer;
pub use optimizers::{LearningRate, Optimizers};
pub use options::{Nonfinite, Options};
pub use traces::TraceRecord;
pub use training::{Stats, Step, StepOutput};
