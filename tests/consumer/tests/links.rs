//! mlx-rs and faststep meet in one libmlx, found without any variable of the environment.
use faststep::{
    engine::blas::{bind, BlasError},
    Optimizer, Optimizers, Options, Step,
};
use mlx_rs::{error::Exception, module::Module, nn::Linear, ops, transforms, Array};
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

#[test]
fn a_module_trains() {
    let loss = |model: &mut Linear, batch: &[Array]| -> Result<Array, Exception> {
        model.forward(&batch[0])?.square()?.mean(None)
    };
    let optimizers = Optimizers::new(Optimizer::sgd(0.0), 0.1);
    let model = Linear::new(4, 2).unwrap();
    let options = Options::default().max_grad_norm(1.0).accumulate(1);
    let mut step = Step::new(model, optimizers, loss, options).unwrap();
    let x = [Array::ones::<f32>(&[8, 4]).unwrap()];
    let first = step.step(&x).unwrap().loss.item_exact::<f32>();
    let second = step.step(&x).unwrap().loss.item_exact::<f32>();
    assert!(second < first, "{first} {second}");
}
