//! The place of every tensor: small tensors of one dtype share flat buffers, large ones stay their own.
//!
//! A few buffers instead of hundreds of tensors make the norm a few reductions, the update a few fused kernels and the
//! joint evaluation a handful of outputs. Tensors share a buffer when all their axes but the first agree: then they are
//! joined along the first one as they are, and a gradient that is the transpose of a product, as every linear layer's
//! is, is copied once and not twice. Sharing is capped, so that no big copy is made and a tensor that somebody holds
//! keeps no more than one buffer alive.
use mlx_rs::{error::Result, ops, Array, Dtype};

use super::precision;
use crate::mlx::{array, join};

/// Limits of the buffers that tensors share.
#[derive(Clone, Copy, Debug)]
struct Limits {
    own_bytes: usize, // tensors of at least this many bytes keep a buffer of their own
    shared_bytes: usize, // a shared buffer takes no more tensors once it holds this many bytes
    members: usize,   // or once it holds this many tensors
}

/// A CPU joins arrays element by element: from about this size on that costs more than a kernel more. What is shared stays in
/// its cache from the join to the update, and is made in small pieces the first time.
const CPU: Limits = Limits {
    own_bytes: 128 << 10,
    shared_bytes: 1 << 20,
    members: usize::MAX,
};

/// Kernels cost a GPU more than copies.
const CUDA: Limits = Limits {
    own_bytes: 64 << 20,
    shared_bytes: 64 << 20,
    members: join::MAX_PARTS,
};

/// Shape and dtype of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The size of each axis.
    pub shape: Vec<i32>,
    /// The type of the elements.
    pub dtype: Dtype,
}

impl Tensor {
    /// Shape and dtype of `array`.
    #[must_use]
    pub fn of(array: &Array) -> Self {
        Self {
            shape: array.shape().to_vec(),
            dtype: array.dtype(),
        }
    }

    /// The number of elements.
    #[must_use]
    pub fn size(&self) -> usize {
        size(&self.shape)
    }

    pub(super) fn bytes(&self) -> usize {
        self.size() * element_bytes(self.dtype)
    }
}

fn size(shape: &[i32]) -> usize {
    let axes = shape.iter().map(|&n| usize::try_from(n).unwrap_or(0));
    axes.product()
}

fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => 1,
        Dtype::Uint16 | Dtype::Int16 | Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Uint32 | Dtype::Int32 | Dtype::Float32 => 4,
        Dtype::Uint64 | Dtype::Int64 | Dtype::Float64 | Dtype::Complex64 => 8,
    }
}

/// One buffer: the tensors in it, joined in order along their first axis.
#[derive(Clone, Debug, PartialEq)]
struct Buffer {
    members: Vec<usize>,
    bytes: usize,
    open: bool,
}

/// The place of every tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    tensors: Vec<Tensor>,
    buffers: Vec<Buffer>,
    doubles: Vec<(usize, usize)>, // buffers, of which the second one's update counts for both
    shards: Vec<bool>, // by tensor: each rank of a group has another part of it; empty: none is
}

impl Layout {
    /// Lay tensors into shared buffers where they are small and of one key.
    ///
    /// `keys`: one for each tensor.
    #[must_use]
    pub fn flat(tensors: Vec<Tensor>, keys: &[usize]) -> Self {
        let limits = if join::is_cuda() { CUDA } else { CPU };
        let mut buffers: Vec<Buffer> = Vec::new();
        for (index, (tensor, key)) in tensors.iter().zip(keys).enumerate() {
            let bytes = tensor.bytes();
            let small = 0 < bytes && bytes < limits.own_bytes && !tensor.shape.is_empty();
            let joins = |buffer: &&mut Buffer| {
                let first = &tensors[buffer.members[0]];
                small
                    && buffer.open
                    && keys[buffer.members[0]] == *key
                    && buffer.bytes < limits.shared_bytes
                    && buffer.members.len() < limits.members
                    && first.dtype == tensor.dtype
                    && first.shape[1..] == tensor.shape[1..]
            };
            if let Some(buffer) = buffers.iter_mut().find(joins) {
                buffer.members.push(index);
                buffer.bytes += bytes;
            } else {
                buffers.push(Buffer {
                    members: vec![index],
                    bytes,
                    open: small,
                });
            }
        }
        Self {
            tensors,
            buffers,
            doubles: Vec::new(),
            shards: Vec::new(),
        }
    }

    /// Give every tensor a buffer of its own.
    #[must_use]
    pub fn separate(tensors: Vec<Tensor>) -> Self {
        let buffers = tensors.iter().enumerate().map(|(index, tensor)| Buffer {
            members: vec![index],
            bytes: tensor.bytes(),
            open: false,
        });
        Self {
            buffers: buffers.collect(),
            tensors,
            doubles: Vec::new(),
            shards: Vec::new(),
        }
    }

    /// The same where some tensors are shards: those of one buffer all are, or none is.
    #[must_use]
    pub fn with_shards(mut self, shards: &[bool]) -> Self {
        self.shards = shards.to_vec();
        self
    }

    /// Return whether what is in a buffer are shards.
    #[must_use]
    pub fn is_shard(&self, buffer: usize) -> bool {
        let first = self.buffers[buffer].members[0];
        self.shards.get(first).copied().unwrap_or(false)
    }

    /// The same where some tensors are one: of each pair, the update of the second one counts. Each of them has a buffer
    /// of its own.
    #[must_use]
    pub fn with_doubles(mut self, doubles: &[(usize, usize)]) -> Self {
        let of = |tensor| (0..self.len()).find(|&buffer| self.single(buffer) == Some(tensor));
        let doubles = doubles.iter();
        self.doubles = doubles.filter_map(|&(a, b)| of(a).zip(of(b))).collect();
        self
    }

    /// Pairs of buffers that are one: the update of the second one counts.
    #[must_use]
    pub fn doubles(&self) -> &[(usize, usize)] {
        &self.doubles
    }

    /// The tensors, in the order in which they were given.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The number of buffers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Return whether there is no tensor at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// The tensors of a buffer, in order.
    pub fn members(&self, buffer: usize) -> impl Iterator<Item = usize> + '_ {
        self.buffers[buffer].members.iter().copied()
    }

    /// The tensor that has this buffer to itself, if one has.
    #[must_use]
    pub fn single(&self, buffer: usize) -> Option<usize> {
        match self.buffers[buffer].members.as_slice() {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// The dtype of a buffer.
    #[must_use]
    pub fn dtype(&self, buffer: usize) -> Dtype {
        self.tensors[self.buffers[buffer].members[0]].dtype
    }

    /// Buffers in half precision.
    pub fn halves(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).filter(|&buffer| precision::is_half(self.dtype(buffer)))
    }

    /// Buffers that hold more than one tensor.
    pub fn shared(&self) -> impl Iterator<Item = usize> + '_ {
        let buffers = self.buffers.iter().enumerate();
        buffers.filter_map(|(index, buffer)| (buffer.members.len() > 1).then_some(index))
    }

    /// Join tensors into their buffers (lazily).
    ///
    /// # Errors
    /// When the arrays are not of the layout's shapes.
    pub fn pack(&self, tensors: &[Array]) -> Result<Vec<Array>> {
        (0..self.buffers.len())
            .map(|buffer| self.pack_one(buffer, tensors))
            .collect()
    }

    /// Join the tensors of one buffer (lazily).
    ///
    /// # Errors
    /// As [`Layout::pack`].
    pub fn pack_one(&self, buffer: usize, tensors: &[Array]) -> Result<Array> {
        let members = self.members(buffer).map(|tensor| &tensors[tensor]);
        Self::join(&members.collect::<Vec<_>>())
    }

    /// Join the members of one buffer (lazily); zeros that take no memory yet stay so.
    ///
    /// # Errors
    /// As [`Layout::pack`].
    pub fn join(members: &[&Array]) -> Result<Array> {
        match members {
            [only] => Ok((*only).clone()),
            [first, ..]
                if members
                    .iter()
                    .all(|m| array::is_lazy(m) && array::is_zero(m)) =>
            {
                let mut shape = first.shape().to_vec();
                shape[0] = members.iter().map(|member| member.shape()[0]).sum();
                ops::zeros_dtype(&shape, first.dtype())
            }
            members => join::join(members),
        }
    }

    /// The tensors of buffers that are not evaluated (lazily), in the order in which they were given to the layout.
    ///
    /// # Errors
    /// When the buffers are not of the layout's shapes.
    pub fn unpack(&self, buffers: &[Array]) -> Result<Vec<Array>> {
        let mut tensors: Vec<Option<Array>> = vec![None; self.tensors.len()];
        for (buffer, flat) in self.buffers.iter().zip(buffers) {
            let mut ends = Vec::with_capacity(buffer.members.len());
            for &member in &buffer.members {
                ends.push(
                    ends.last().unwrap_or(&0) + self.tensors[member].shape.first().unwrap_or(&1),
                );
            }
            ends.pop();
            let parts = if ends.is_empty() {
                vec![flat.clone()]
            } else {
                flat.split_at_indices(&ends, 0)?
            };
            for (&member, part) in buffer.members.iter().zip(parts) {
                tensors[member] = Some(part);
            }
        }
        Ok(tensors.into_iter().flatten().collect())
    }

    /// The tensors as views into their buffers, in the order in which they were given to the layout.
    ///
    /// # Errors
    /// When MLX refuses a view of a buffer that is not evaluated.
    pub fn views(&self, buffers: &[Array]) -> Result<Vec<Array>> {
        let mut views: Vec<Option<Array>> = vec![None; self.tensors.len()];
        for (buffer, flat) in buffers.iter().enumerate() {
            if let Some(only) = self.single(buffer) {
                views[only] = Some(flat.clone());
                continue;
            }
            let parts = self.views_of(buffer, flat, |member| &self.tensors[member].shape)?;
            for (member, view) in self.members(buffer).zip(parts) {
                views[member] = Some(view);
            }
        }
        Ok(views.into_iter().flatten().collect())
    }

    /// Return the parts of the members of one buffer, as views into `flat` of the shapes that `shape` gives by tensor.
    ///
    /// # Errors
    /// As [`Layout::views`].
    pub fn views_of<'a>(
        &self,
        buffer: usize,
        flat: &Array,
        shape: impl Fn(usize) -> &'a [i32],
    ) -> Result<Vec<Array>> {
        if self.single(buffer).is_some() {
            return Ok(vec![flat.clone()]);
        }
        let mut offset = 0;
        let views = self.members(buffer).map(|member| {
            let shape = shape(member);
            let view = array::view(flat, shape, offset);
            offset += size(shape);
            view
        });
        views.collect()
    }
}
