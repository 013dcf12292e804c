//! Declarations added to MLX's source of a kernel.

/// Allows the iterations of a loop to run side by side.
///
/// They may in every kernel: an output either is one of the inputs, element for element, or shares nothing with them
/// (`compiled_allocate_outputs` in `mlx/backend/common/compiled.cpp`). GCC finds that out for itself, at run time, but
/// not where a loop over strides writes over its input.
pub const INDEPENDENT: &str = "\n#pragma GCC ivdep";

/// Beginnings of the kernel and of its loops over strides in `mlx/backend/cpu/compiled.cpp`.
const KERNEL: &str = "\nextern \"C\"";
const LOOP: &str = "\n  for (int i";

/// The source with [`INDEPENDENT`] before the innermost loop over strides: the last one.
pub fn independent(source: &str) -> String {
    let kernel = source.rfind(KERNEL).unwrap_or(source.len());
    let Some(inner) = source[kernel..].rfind(LOOP) else {
        return source.to_owned();
    };
    let (outer, inner) = source.split_at(kernel + inner);
    [outer, INDEPENDENT, inner].concat()
}
