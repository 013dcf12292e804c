//! `--base`: LoRA over the linear layers of a trained model, whose weights are in few bits and stay as they are.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021, <https://arxiv.org/abs/2106.09685>), over quantized
//! weights as in Dettmers et al., "QLoRA" (2023, <https://arxiv.org/abs/2305.14314>). Beside a frozen `W` a product of two
//! thin matrices trains, of which the second one is zero at first: `y = x W + scale * (x A) B`, in mlx-lm's names and shapes.
use std::{collections::BTreeMap, fs, path::Path, rc::Rc};

use mlx_rs::{
    error::Exception,
    macros::ModuleParameters,
    module::{FlattenedModuleParam, Module, ModuleParameters, Param},
    nn::{Linear, QuantizedLinear},
    ops::matmul,
    random, Array,
};
use serde::Deserialize;

use crate::{
    failure::Failure,
    model::Decoder,
    options::{Adaptation, Run},
};

const MODEL: &str = "model.safetensors";
/// The file of the options that a run was made with, in each checkpoint.
pub const RUN: &str = "run.json";
/// The file of adapters in each checkpoint.
pub const ADAPTERS: &str = "adapters.safetensors";

/// A linear layer in few bits, and the two matrices that train beside it.
#[derive(Debug, ModuleParameters)]
pub struct AdaptedLinear {
    #[param]
    linear: QuantizedLinear, // frozen, as mlx-rs makes it
    #[param]
    lora_a: Param<Array>, // [input, rank]
    #[param]
    lora_b: Param<Array>, // [rank, output]
    scale: f32,
}

impl AdaptedLinear {
    fn over(linear: Linear, options: &Adaptation) -> Result<Self, Exception> {
        let (output, input) = linear.shape();
        #[allow(clippy::cast_precision_loss)] // a width is far below 2^24
        let bound = (input as f32).powf(-0.5);
        let a = random::uniform::<_, f32>(-bound, bound, &[input, options.rank], None)?;
        let b = Array::zeros::<f32>(&[options.rank, output])?;
        Ok(Self {
            linear: QuantizedLinear::try_from_linear(linear, options.group_size, options.bits)?,
            lora_a: Param::new(a),
            lora_b: Param::new(b),
            scale: options.lora_scale,
        })
    }
}

impl Module<&Array> for AdaptedLinear {
    type Output = Array;
    type Error = Exception;

    // float32 [..., input] -> [..., output]
    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let change = matmul(matmul(x, &self.lora_a)?, &self.lora_b)?;
        let change = change.multiply(Array::from_f32(self.scale))?;
        self.linear.forward(x)?.add(change)
    }

    fn training_mode(&mut self, _: bool) {}
}

/// The sizes of a checkpoint's model.
#[derive(Deserialize)]
struct Sizes {
    layers: i32,
    width: i32,
    heads: i32,
    seq: i32,
}

/// The options of a run over the model of a checkpoint: its sizes are the checkpoint's.
pub fn with_sizes_of(base: &Path, run: Run) -> Result<Run, Failure> {
    let path = base.join(RUN);
    let text = fs::read_to_string(&path).map_err(|error| {
        let wanted = "--base takes the directory of one checkpoint, such as step-000400";
        Failure::file(&path, format!("{error}: {wanted}"))
    })?;
    let sizes: Sizes = serde_json::from_str(&text).map_err(|error| Failure::file(&path, error))?;
    Ok(Run {
        layers: sizes.layers,
        width: sizes.width,
        heads: sizes.heads,
        seq: sizes.seq,
        ..run
    })
}

/// The model of a checkpoint in few bits, all of it frozen, with adapters that train: new ones, or those of a file.
pub fn over(
    base: &Path,
    run: &Run,
    options: &Adaptation,
) -> Result<Decoder<AdaptedLinear>, Failure> {
    let mut model = Decoder::new(run)?;
    load(&mut model, &base.join(MODEL))?;
    model.freeze_parameters(true);
    let mut model = model.map(&mut |linear| AdaptedLinear::over(linear, options))?;
    if let Some(path) = &options.adapters {
        load(&mut model, path)?;
    }
    Ok(model)
}

/// Write the adapters among the arrays of a model, if there are any.
pub fn save(parameters: FlattenedModuleParam, path: &Path) -> Result<(), Failure> {
    let is_adapter = |name: &Rc<str>| name.ends_with(".lora_a") || name.ends_with(".lora_b");
    let adapters = parameters.into_iter().filter(|(name, _)| is_adapter(name));
    let adapters: BTreeMap<Rc<str>, Array> = adapters.collect();
    if adapters.is_empty() {
        return Ok(());
    }
    Array::save_safetensors(&adapters, None, path).map_err(|error| Failure::file(path, error))
}

// all that is trainable, by the arrays of a file, which has no others
fn load(model: &mut impl ModuleParameters, path: &Path) -> Result<(), Failure> {
    let arrays = Array::load_safetensors(path).map_err(|error| Failure::file(path, error))?;
    let mut arrays: BTreeMap<String, Array> = arrays.into_iter().collect();
    let trainable = model.trainable_parameters().flatten();
    let mut shapes = BTreeMap::new();
    for (name, parameter) in trainable {
        shapes.insert(name, parameter.shape().to_vec());
    }
    let mut values = FlattenedModuleParam::new();
    for (name, shape) in shapes {
        let array = arrays.remove(&*name);
        let Some(array) = array.filter(|array| array.shape() == shape) else {
            let message = format!("is of another model: expected {name} {shape:?}");
            return Err(Failure::file(path, message));
        };
        values.insert(name, array);
    }
    if let Some(name) = arrays.keys().next() {
        let message = format!("is of another model, which has {name}");
        return Err(Failure::file(path, message));
    }
    model.update_flattened(values);
    Ok(())
}
