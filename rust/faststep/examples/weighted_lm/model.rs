//! A decoder over bytes: embeddings, pre-norm blocks with causal attention, and a head tied to the embedding.
use mlx_rs::{
    builder::Builder,
    error::Exception,
    fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask::Causal},
    macros::ModuleParameters,
    module::Module,
    nn::{gelu_approximate, Dropout, DropoutBuilder, Embedding, Linear, LinearBuilder, RmsNorm},
    ops::{arange, indexing::IndexOp},
    Array,
};

use crate::options::Run;

const BYTES: i32 = 256;

/// Causal attention of several heads.
#[derive(Debug, ModuleParameters)]
pub struct Attention {
    #[param]
    qkv: Linear,
    #[param]
    out: Linear,
    heads: i32,
}

/// Attention and a network of two layers, each added to the residual stream.
#[derive(Debug, ModuleParameters)]
pub struct Block {
    #[param]
    attention_norm: RmsNorm,
    #[param]
    attention: Attention,
    #[param]
    network_norm: RmsNorm,
    #[param]
    up: Linear,
    #[param]
    down: Linear,
    dropout: Dropout,
}

/// The language model.
#[derive(Debug, ModuleParameters)]
pub struct Decoder {
    #[param]
    bytes: Embedding,
    #[param]
    positions: Embedding,
    #[param]
    blocks: Vec<Block>,
    #[param]
    norm: RmsNorm,
}

fn linear(input: i32, output: i32) -> Result<Linear, Exception> {
    LinearBuilder::new(input, output).bias(false).build()
}

impl Attention {
    fn new(run: &Run) -> Result<Self, Exception> {
        Ok(Self {
            qkv: linear(run.width, 3 * run.width)?,
            out: linear(run.width, run.width)?,
            heads: run.heads,
        })
    }

    // float32 [batch, seq, width] -> the same shape
    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let [batch, seq, width] = [x.dim(0), x.dim(1), x.dim(2)];
        let size = width / self.heads;
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.reshape(&[batch, seq, 3, self.heads, size])?;
        let qkv = qkv.transpose_axes(&[2, 0, 3, 1, 4])?; // [3, batch, heads, seq, size]
        let [q, k, v] = [0, 1, 2].map(|i| qkv.index(i));
        #[allow(clippy::cast_precision_loss)] // a head has far fewer than 2^24 elements
        let scale = (size as f32).powf(-0.5);
        let mixed = scaled_dot_product_attention(q, k, v, scale, Causal, None)?;
        let mixed = mixed.transpose_axes(&[0, 2, 1, 3])?;
        self.out.forward(&mixed.reshape(&[batch, seq, width])?)
    }
}

impl Block {
    fn new(run: &Run) -> Result<Self, Exception> {
        let dropout = DropoutBuilder::new().p(run.dropout).build();
        Ok(Self {
            attention_norm: RmsNorm::new(run.width)?,
            attention: Attention::new(run)?,
            network_norm: RmsNorm::new(run.width)?,
            up: linear(run.width, 4 * run.width)?,
            down: linear(4 * run.width, run.width)?,
            dropout: dropout.map_err(|error| Exception::custom(error.to_string()))?,
        })
    }

    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let mixed = self.attention.forward(&self.attention_norm.forward(x)?)?;
        let x = x.add(self.dropout.forward(&mixed)?)?;
        let hidden = self.up.forward(&self.network_norm.forward(&x)?)?;
        let out = self.down.forward(&gelu_approximate(hidden)?)?;
        x.add(self.dropout.forward(&out)?)
    }
}

impl Decoder {
    /// A model with new weights, drawn from this thread's random state.
    pub fn new(run: &Run) -> Result<Self, Exception> {
        Ok(Self {
            bytes: Embedding::new(BYTES, run.width)?,
            positions: Embedding::new(run.seq, run.width)?,
            blocks: (0..run.layers)
                .map(|_| Block::new(run))
                .collect::<Result<_, _>>()?,
            norm: RmsNorm::new(run.width)?,
        })
    }

    /// Map bytes, int32 `[batch, seq]`, to the logits of the next byte, float32 `[batch, seq, 256]`.
    pub fn forward(&mut self, bytes: &Array) -> Result<Array, Exception> {
        let positions = arange::<_, i32>(0, bytes.dim(1), None)?;
        let x = self.bytes.forward(bytes)?;
        let mut x = x.add(self.positions.forward(&positions)?)?;
        for block in &mut self.blocks {
            x = block.forward(&x)?;
        }
        self.bytes.as_linear(&self.norm.forward(&x)?)
    }
}
