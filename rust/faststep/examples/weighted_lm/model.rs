//! A decoder over bytes: embeddings, pre-norm blocks with causal attention, and a head tied to the embedding.
use std::f32::consts::PI;

use mlx_rs::{
    builder::Builder,
    error::Exception,
    fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask::Causal},
    macros::ModuleParameters,
    module::Module,
    nn::{Dropout, DropoutBuilder, Embedding, Linear, LinearBuilder, RmsNorm},
    ops::{arange, indexing::IndexOp, sigmoid},
    Array,
};

use crate::options::Run;

const BYTES: i32 = 256;

/// A linear layer, or what takes its place.
pub trait Projection:
    for<'a> Module<&'a Array, Output = Array, Error = Exception> + 'static
{
}

impl<P> Projection for P where
    P: for<'a> Module<&'a Array, Output = Array, Error = Exception> + 'static
{
}

/// Causal attention of several heads.
#[derive(Debug, ModuleParameters)]
pub struct Attention<P: Projection> {
    #[param]
    qkv: P,
    #[param]
    out: P,
    heads: i32,
}

/// Attention and a network of two layers, each added to the residual stream.
#[derive(Debug, ModuleParameters)]
pub struct Block<P: Projection> {
    #[param]
    attention_norm: RmsNorm,
    #[param]
    attention: Attention<P>,
    #[param]
    network_norm: RmsNorm,
    #[param]
    up: P,
    #[param]
    down: P,
    dropout: Dropout,
}

/// The language model; its linear layers are of one kind.
#[derive(Debug, ModuleParameters)]
pub struct Decoder<P: Projection = Linear> {
    #[param]
    bytes: Embedding,
    #[param]
    positions: Embedding,
    #[param]
    blocks: Vec<Block<P>>,
    #[param]
    norm: RmsNorm,
}

/// A conversion of linear layers into another layer.
pub type To<'a, P> = dyn FnMut(Linear) -> Result<P, Exception> + 'a;

// `gelu_approximate`, whose tanh and power take several times as long on a CPU: (1 + tanh(y)) / 2 = sigmoid(2 y)
fn gelu(x: &Array) -> Result<Array, Exception> {
    let cube = x.square()?.multiply(x)?;
    let y = x.add(cube.multiply(Array::from_f32(0.044_715))?)?;
    x.multiply(sigmoid(y.multiply(Array::from_f32((8.0 / PI).sqrt()))?)?)
}

fn linear(input: i32, output: i32) -> Result<Linear, Exception> {
    LinearBuilder::new(input, output).bias(false).build()
}

impl Attention<Linear> {
    fn new(run: &Run) -> Result<Self, Exception> {
        Ok(Self {
            qkv: linear(run.width, 3 * run.width)?,
            out: linear(run.width, run.width)?,
            heads: run.heads,
        })
    }
}

impl<P: Projection> Attention<P> {
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

impl Block<Linear> {
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

    fn map<P: Projection>(self, to: &mut To<'_, P>) -> Result<Block<P>, Exception> {
        Ok(Block {
            attention_norm: self.attention_norm,
            attention: Attention {
                qkv: to(self.attention.qkv)?,
                out: to(self.attention.out)?,
                heads: self.attention.heads,
            },
            network_norm: self.network_norm,
            up: to(self.up)?,
            down: to(self.down)?,
            dropout: self.dropout,
        })
    }
}

impl<P: Projection> Block<P> {
    fn forward(&mut self, x: &Array) -> Result<Array, Exception> {
        let mixed = self.attention.forward(&self.attention_norm.forward(x)?)?;
        let x = x.add(self.dropout.forward(&mixed)?)?;
        let hidden = self.up.forward(&self.network_norm.forward(&x)?)?;
        let out = self.down.forward(&gelu(&hidden)?)?;
        x.add(self.dropout.forward(&out)?)
    }
}

impl Decoder<Linear> {
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

    /// The same model with another layer in the place of each linear one.
    pub fn map<P: Projection>(self, to: &mut To<'_, P>) -> Result<Decoder<P>, Exception> {
        let blocks = self.blocks.into_iter().map(|block| block.map(to));
        Ok(Decoder {
            bytes: self.bytes,
            positions: self.positions,
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: self.norm,
        })
    }
}

impl<P: Projection> Decoder<P> {
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
