//! MLX on the wheel's own BLAS and LAPACK, then on OpenBLAS: the same numbers. One test, because binding lasts as long
//! as the process.
#![cfg(target_os = "linux")]
use faststep::engine::blas::{bind, BlasError};
use mlx_rs::{error::Exception, linalg, ops, random, with_device, Array, Device};
use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

/// The library of the environment's `scipy-openblas32`.
fn openblas() -> Result<PathBuf, Box<dyn Error>> {
    let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "python3".into());
    let code = "import scipy_openblas32 as o; print(o.get_lib_dir(), o.get_library(True), sep='/')";
    let output = Command::new(&python).args(["-c", code]).output()?;
    if !output.status.success() {
        return Err(format!("{python}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().into())
}

/// Results that no sign or order of eigenvectors can change: a product, and each factorisation put together again.
fn results(a: &Array) -> Result<Vec<Array>, Exception> {
    let spd = ops::matmul(a.transpose()?, a)?.add(Array::eye::<f32>(a.dim(0), None, None)?)?;
    let (u, singular, vt) = linalg::svd(a)?;
    let (values, vectors) = linalg::eigh(&spd, None)?;
    let lower = linalg::cholesky(&spd, None)?;
    let inverse = linalg::inv(&spd)?;
    let (q, r) = linalg::qr(a)?;
    let results = vec![
        ops::matmul(a, a)?,
        ops::matmul(u.multiply(&singular)?, vt)?,
        singular,
        ops::matmul(vectors.multiply(&values)?, vectors.transpose()?)?,
        values,
        lower,
        inverse,
        ops::matmul(q, r)?,
    ];
    mlx_rs::transforms::eval(&results)?;
    Ok(results)
}

/// max|a - b| / max|a|
fn difference(a: &Array, b: &Array) -> Result<f32, Box<dyn Error>> {
    let largest = |x: &Array| x.abs()?.max(None);
    let ratio = largest(&a.subtract(b)?)?.divide(largest(a)?)?;
    Ok(ratio.try_item_exact()?)
}

#[test]
#[cfg(target_os = "linux")]
fn openblas_gives_the_same_numbers() -> Result<(), Box<dyn Error>> {
    let a = random::normal::<f32>(&[96, 96], None, None, Some(&random::key(7)?))?;
    let before = with_device(Device::cpu(), || results(&a))?;

    let missing = bind(Path::new("/nowhere/libscipy_openblas.so"));
    assert!(
        matches!(missing, Err(BlasError::Load { .. })),
        "{missing:?}"
    );
    let foreign = bind(Path::new("libm.so.6"));
    assert!(matches!(foreign, Err(BlasError::Foreign(_))), "{foreign:?}");

    let bound = bind(&openblas()?)?;
    for name in [
        "cblas_sgemm",
        "cblas_dgemm",
        "sgesdd_",
        "spotrf_",
        "ssyevd_",
    ] {
        assert!(
            bound.names.iter().any(|bound| bound == name),
            "{name} is not in {:?}",
            bound.names
        );
    }
    assert_eq!(bind(&openblas()?)?, bound, "the second call");

    let after = with_device(Device::cpu(), || results(&a))?;
    for (index, (before, after)) in before.iter().zip(&after).enumerate() {
        let difference = difference(before, after)?;
        assert!(difference < 1e-4, "result {index}: {difference}");
    }
    Ok(())
}
