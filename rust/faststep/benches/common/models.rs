//! The models of `benches/cases.py` in mlx-rs: the same layers, so that numbers of both languages compare.
use mlx_rs::{
    builder::Builder,
    error::Exception,
    fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask},
    losses::{CrossEntropyBuilder, LossReduction},
    macros::ModuleParameters,
    module::{Module, ModuleParameters},
    nn::{relu, Embedding, LayerNorm, Linear, LinearBuilder},
    ops::arange,
    Array, Dtype,
};

/// The number of classes that an `Mlp` tells apart.
pub const CLASSES: i32 = 10;

/// A module that is trained: from a batch to logits.
pub trait Model: ModuleParameters + Clone + 'static {
    /// Map a batch to logits, float32.
    fn logits(&mut self, x: &Array) -> Result<Array, Exception>;
}

/// The mean cross entropy in nats, a float32 scalar, of `[x, y]`.
pub fn loss<M: Model>(model: &mut M, batch: &[Array]) -> Result<Array, Exception> {
    let builder = CrossEntropyBuilder::new().reduction(LossReduction::Mean);
    let entropy = builder
        .build()
        .map_err(|error| Exception::custom(error.to_string()))?;
    entropy.apply(model.logits(&batch[0])?, &batch[1])
}

/// Linear layers with `ReLU` between them.
#[derive(Clone, Debug, ModuleParameters)]
pub struct Mlp {
    #[param]
    layers: Vec<Linear>,
    #[param]
    head: Linear,
}

impl Mlp {
    /// `layers` layers, the last of which gives the logits.
    pub fn new(layers: usize, width: i32) -> Result<Self, Exception> {
        let hidden = (1..layers).map(|_| Linear::new(width, width));
        Ok(Self {
            layers: hidden.collect::<Result<_, _>>()?,
            head: Linear::new(width, CLASSES)?,
        })
    }
}

impl Model for Mlp {
    // x: [batch, width]
    fn logits(&mut self, x: &Array) -> Result<Array, Exception> {
        let mut x = x.clone();
        for layer in &mut self.layers {
            x = relu(layer.forward(&x)?)?;
        }
        self.head.forward(&x)
    }
}

/// MLX's `MultiHeadAttention`, causal.
#[derive(Clone, Debug, ModuleParameters)]
struct Attention {
    heads: i32,
    #[param]
    query_proj: Linear,
    #[param]
    key_proj: Linear,
    #[param]
    value_proj: Linear,
    #[param]
    out_proj: Linear,
}

impl Attention {
    fn new(width: i32, heads: i32) -> Result<Self, Exception> {
        Ok(Self {
            heads,
            query_proj: unbiased(width, width)?,
            key_proj: unbiased(width, width)?,
            value_proj: unbiased(width, width)?,
            out_proj: unbiased(width, width)?,
        })
    }

    // x: [batch, seq, width]
    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let (batch, seq, width) = (x.dim(0), x.dim(1), x.dim(2));
        let size = width / self.heads;
        let by_head = |x: Array| {
            let x = x.reshape(&[batch, seq, self.heads, size])?;
            x.transpose_axes(&[0, 2, 1, 3]) // [batch, heads, seq, size]
        };
        let queries = by_head(self.query_proj.forward(x)?)?;
        let keys = by_head(self.key_proj.forward(x)?)?;
        let values = by_head(self.value_proj.forward(x)?)?;
        #[allow(clippy::cast_precision_loss)] // a few dozens
        let scale = (size as f32).sqrt().recip();
        let mask = ScaledDotProductAttentionMask::Causal;
        let x = scaled_dot_product_attention(queries, keys, values, scale, mask, None)?;
        let x = x.transpose_axes(&[0, 2, 1, 3])?;
        self.out_proj.forward(&x.reshape(&[batch, seq, width])?)
    }
}

/// MLX's `TransformerEncoderLayer` with `norm_first`.
#[derive(Clone, Debug, ModuleParameters)]
struct Block {
    #[param]
    attention: Attention,
    #[param]
    ln1: LayerNorm,
    #[param]
    ln2: LayerNorm,
    #[param]
    linear1: Linear,
    #[param]
    linear2: Linear,
}

impl Block {
    fn new(width: i32, heads: i32) -> Result<Self, Exception> {
        Ok(Self {
            attention: Attention::new(width, heads)?,
            ln1: LayerNorm::new(width)?,
            ln2: LayerNorm::new(width)?,
            linear1: Linear::new(width, 4 * width)?,
            linear2: Linear::new(4 * width, width)?,
        })
    }

    // x: [batch, seq, width]
    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let x = x.add(self.attention.forward(&self.ln1.forward(x)?)?)?;
        let hidden = relu(self.linear1.forward(&self.ln2.forward(&x)?)?)?;
        x.add(self.linear2.forward(&hidden)?)
    }
}

/// A decoder; 24 layers of it make 293 tensors.
#[derive(Clone, Debug, ModuleParameters)]
pub struct Gpt {
    #[param]
    tokens: Embedding,
    #[param]
    positions: Embedding,
    #[param]
    blocks: Vec<Block>,
    #[param]
    ln: LayerNorm,
    #[param]
    head: Linear,
}

/// The sizes of a [`Gpt`] and of its batches.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: usize,
    pub width: i32,
    pub heads: i32,
    pub batch: i32,
    pub seq: i32,
    pub vocab: i32,
}

impl Gpt {
    /// A model of that shape.
    pub fn new(shape: Shape) -> Result<Self, Exception> {
        let blocks = (0..shape.layers).map(|_| Block::new(shape.width, shape.heads));
        Ok(Self {
            tokens: Embedding::new(shape.vocab, shape.width)?,
            positions: Embedding::new(shape.seq, shape.width)?,
            blocks: blocks.collect::<Result<_, _>>()?,
            ln: LayerNorm::new(shape.width)?,
            head: unbiased(shape.width, shape.vocab)?,
        })
    }
}

impl Model for Gpt {
    // x: tokens, int32 [batch, seq]
    fn logits(&mut self, x: &Array) -> Result<Array, Exception> {
        let positions = arange::<_, i32>(None, x.dim(1), None)?.as_dtype(Dtype::Int32)?;
        let mut x = self
            .tokens
            .forward(x)?
            .add(self.positions.forward(&positions)?)?;
        for block in &mut self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&self.ln.forward(&x)?)
    }
}

fn unbiased(input: i32, output: i32) -> Result<Linear, Exception> {
    LinearBuilder::new(input, output).bias(false).build()
}
