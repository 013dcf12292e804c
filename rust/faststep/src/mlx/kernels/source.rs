//! Changes of MLX's source of a kernel, so that GCC makes vectors of its loops.
use std::collections::HashSet;

/// Allows the iterations of a loop to run side by side.
///
/// They may in every kernel: an output either is one of the inputs, element for element, or shares nothing with them
/// (`compiled_allocate_outputs` in `mlx/backend/common/compiled.cpp`). GCC finds that out for itself, at run time, but
/// not where a loop over strides writes over its input.
const INDEPENDENT: &str = "\n#pragma GCC ivdep";
/// A bool as a number: GCC converts one by one, but chooses between two numbers by vectors.
const CHOICE: [&str; 2] = [" ? 1.0f : ", "0.0f"];

/// All that [`rewritten`] adds.
pub const ADDED: [&str; 3] = [INDEPENDENT, CHOICE[0], CHOICE[1]];

/// Beginnings of the kernel and of its loops over strides in `mlx/backend/cpu/compiled.cpp`.
const KERNEL: &str = "\nextern \"C\"";
const LOOP: &str = "\n  for (int i";

/// The source of a kernel with the same results.
pub fn rewritten(source: &str) -> String {
    independent(&with_choices(source))
}

/// The source with [`INDEPENDENT`] before the innermost loop over strides: the last one.
fn independent(source: &str) -> String {
    let kernel = source.rfind(KERNEL).unwrap_or(source.len());
    let Some(inner) = source[kernel..].rfind(LOOP) else {
        return source.to_owned();
    };
    let (outer, inner) = source.split_at(kernel + inner);
    [outer, INDEPENDENT, inner].concat()
}

/// The source with a [`CHOICE`] in place of each bool that it converts to a number.
fn with_choices(source: &str) -> String {
    let name = |line: &'_ str| {
        let (name, _) = line
            .trim_start()
            .strip_prefix("bool tmp_")?
            .split_once(" =")?;
        Some(name.to_owned())
    };
    let bools: HashSet<String> = source.lines().filter_map(name).collect();
    let choice = |line: &str| {
        let (before, cast) = line.split_once("static_cast<")?;
        let (dtype, rest) = cast.split_once(">(tmp_")?;
        let (name, behind) = rest.split_once(')')?;
        let [one, zero] = CHOICE;
        let is_number = bools.contains(name) && dtype != "bool";
        is_number.then(|| format!("{before}static_cast<{dtype}>(tmp_{name}{one}{zero}){behind}"))
    };
    let lines = source.split_inclusive('\n');
    lines
        .map(|line| choice(line).unwrap_or_else(|| line.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{independent, with_choices};

    #[test]
    fn bools_become_numbers_by_choice() {
        let source = "
  bool tmp_B = Less()(tmp_A, tmp_C);
  float tmp_D = static_cast<float>(tmp_B);
  bool tmp_E = static_cast<bool>(tmp_B);
  float tmp_F = static_cast<float>(tmp_BA);
";
        let wanted = source.replace("<float>(tmp_B)", "<float>(tmp_B ? 1.0f : 0.0f)");
        assert_eq!(with_choices(source), wanted);
    }

    #[test]
    fn the_innermost_loop_over_strides_is_independent() {
        let source = "\nextern \"C\" {\n  for (int i0 = 0;;) {\n  for (int i1 = 0;;) {";
        let wanted = source.replace("\n  for (int i1", "\n#pragma GCC ivdep\n  for (int i1");
        assert_eq!(independent(source), wanted);
    }
}
