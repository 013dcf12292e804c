//! Means of squares by one task of the CPU, which stores none of them.
#![allow(unsafe_code)]

use std::ptr;

use mlx_rs::{error::Result, Array};

use super::ffi::{faststep_mean_square, faststep_mean_squares, handle, is_done, made, owned};

/// The mean of the squares of an array, a scalar (lazily), or of each of its slices along the first axis, whose other axes are kept;
/// where one task gives it: of float32, on a CPU.
///
/// # Errors
/// When there is no memory.
pub(crate) fn of_squares(array: &Array, by_slice: bool) -> Result<Option<Array>> {
    // SAFETY: a live array.
    made(|mean| unsafe { faststep_mean_square(handle(array), by_slice.into(), mean) })
}

/// The means of the squares of each row and of each column of matrices (lazily), with `eps`, a float32 scalar, added to each square; where one task
/// gives both: of float32, on a CPU.
///
/// # Errors
/// When there is no memory.
pub(crate) fn of_rows_and_columns(matrices: &Array, eps: &Array) -> Result<Option<[Array; 2]>> {
    let mut made = [ptr::null_mut(); 2];
    // SAFETY: live arrays, and room for two; a function that is done has written new ones.
    unsafe {
        let done = faststep_mean_squares(handle(matrices), handle(eps), made.as_mut_ptr());
        Ok(is_done(done)?.then(|| made.map(|new| owned(new))))
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::random;

    use super::*;

    // matrices whose sizes are no multiples of anything, in rows and transposed
    fn matrices() -> Result<Vec<Array>> {
        let shapes: [&[i32]; 5] = [&[1, 1], &[19, 37], &[37, 8], &[3, 21, 5], &[2, 9, 3, 65]];
        let mut all = Vec::new();
        for shape in shapes {
            let made = random::normal::<f32>(shape, None, None, None)?;
            all.extend([made.clone(), made.swap_axes(-1, -2)?]);
        }
        Ok(all)
    }

    fn is_same(made: &Array, wanted: &Array) -> Result<bool> {
        Ok(made.shape() == wanted.shape() && made.eq_values(wanted)?)
    }

    #[test]
    fn every_bit_is_that_of_mlx_on_a_cpu() -> Result<()> {
        for x in matrices()? {
            let squares = x.square()?;
            let Some(mean) = of_squares(&x, false)? else {
                return Ok(()); // a GPU
            };
            assert!(is_same(&mean, &squares.mean(None)?)?, "{:?}", x.shape());
            let eps = Array::from_f32(1e-3);
            let squares = squares.add(&eps)?;
            let wanted = [squares.mean_axis(-1, None)?, squares.mean_axis(-2, None)?];
            let made = of_rows_and_columns(&x, &eps)?.into_iter().flatten();
            for (made, wanted) in made.zip(&wanted) {
                assert!(is_same(&made, wanted)?, "{:?}", x.shape());
            }
        }
        Ok(())
    }

    #[test]
    fn slices_of_what_is_joined_have_the_bits_of_mlx_on_a_cpu() -> Result<()> {
        for x in matrices()?.iter().step_by(2) {
            let axes: Vec<i32> = (1..).take(x.ndim() - 1).collect();
            let wanted = x.square()?.mean_axes(&axes, true)?;
            if let Some(made) = of_squares(x, true)? {
                assert!(is_same(&made, &wanted)?, "{:?}", x.shape());
            }
        }
        Ok(())
    }

    #[test]
    fn half_precision_and_what_has_no_elements_are_left_to_mlx() -> Result<()> {
        let half = Array::from_f32(1.0).as_dtype(mlx_rs::Dtype::Bfloat16)?;
        assert!(of_squares(&half, false)?.is_none());
        let none = mlx_rs::ops::zeros::<f32>(&[0, 3])?;
        assert!(of_rows_and_columns(&none, &Array::from_f32(0.0))?.is_none());
        Ok(())
    }
}
