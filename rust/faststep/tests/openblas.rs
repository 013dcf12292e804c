//! A Rust program finds OpenBLAS beside libmlx, and its first step binds it. One test, because binding is the process's.
#![allow(clippy::unwrap_used)] // how a test fails
#![cfg(target_os = "linux")]

mod common;

use std::{env, process::Command};

use common::{mse, Mlp};
use faststep::{openblas, Optimizer, Optimizers, Options, Step};

#[test]
fn the_first_step_binds_what_is_found_beside_libmlx() {
    let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "python3".into());
    let code = "import scipy_openblas32 as o; print(o.get_lib_dir(), o.get_library(True), sep='/')";
    let output = Command::new(python).args(["-c", code]).output().unwrap();
    let expected = String::from_utf8(output.stdout).unwrap();
    let found = openblas::find().unwrap();
    assert_eq!(
        found.canonicalize().unwrap(),
        std::path::Path::new(expected.trim())
            .canonicalize()
            .unwrap()
    );

    let optimizers = Optimizers::new(Optimizer::sgd(0.0), 0.1);
    let mut step = Step::new(Mlp::seeded(1), optimizers, mse, Options::default()).unwrap();
    assert!(step.stats().unwrap().openblas);
    let bound = openblas::bind().unwrap().unwrap();
    assert!(
        bound.names.iter().any(|name| name == "cblas_sgemm"),
        "{bound:?}"
    );
}
