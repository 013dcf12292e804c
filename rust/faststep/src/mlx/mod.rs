//! MLX below mlx-rs: the C++ of `native/`, libmlx's own imports, and the memory that MLX and the C library keep.
//!
//! All unsafe code of the crate is here and in `memory/simulator.rs`. Uses `error`.
//!
//! The way of a batch: `random` gives the key that a loss draws from; while a step is traced, `array`, `convolution`, `join`,
//! `graph` and `quantized` rewrite the lazy graph, which `tape` makes over each batch; before each evaluation `fuse` lets its kernels write
//! over their inputs; `blas`, `openblas` and `kernels` are what it is computed by, and `caller` is for small steps on a CPU. `group` has the sums over other
//! processes, `sockets` how its threads wait for them.
pub mod array;
pub mod blas;
pub mod called;
pub(crate) mod caller;
mod cblas;
pub(crate) mod convolution;
pub(crate) mod ffi;
pub(crate) mod fuse;
pub mod graph;
pub mod group;
pub mod join;
pub mod kernels;
pub(crate) mod means;
pub mod measure;
pub mod memory;
pub mod openblas;
pub(crate) mod ops;
pub(crate) mod quantized;
pub(crate) mod random;
pub mod rebind;
pub(crate) mod replay;
pub(crate) mod sockets;
pub(crate) mod tape;
