//! mlx-rs and faststep meet in one libmlx, found without any variable of the environment.
use faststep::blas::{bind, BlasError};
use mlx_rs::{ops, transforms, Array};
use std::path::Path;

#[test]
fn mlx_computes() {
    let a = Array::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2]);
    let square = ops::matmul(&a, &a).unwrap();
    assert_eq!(square.as_slice::<f32>(), [7.0, 10.0, 15.0, 22.0]);
}

#[test]
fn mlx_differentiates() {
    let mut gradient = transforms::grad(|x: &Array| x.multiply(x)?.sum(None));
    let gradient = gradient(&Array::from_slice(&[1.0_f32, -3.0], &[2])).unwrap();
    assert_eq!(gradient.as_slice::<f32>(), [2.0, -6.0]);
}

#[test]
fn faststep_links() {
    assert!(matches!(
        bind(Path::new("/nowhere")),
        Err(BlasError::Load { .. })
    ));
}
