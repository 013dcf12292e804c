//! A fused kernel, compiled our way: the uncompiled bits, in the store and nowhere else. One test, because binding lasts
//! as long as the process.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
use faststep::kernels::bind;
use mlx_rs::{error::Exception, ops, transforms::compile::compile, with_device, Array, Device};
use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

/// Writes over its first input, and strides over the second.
fn function(inputs: &[Array]) -> Result<Vec<Array>, Exception> {
    let [x, y] = inputs else {
        return Err(Exception::custom("expected x and y"));
    };
    Ok(vec![ops::sigmoid(&x.add(y)?)?.multiply(x)?.subtract(y)?])
}

/// The files below a directory.
fn files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.append(&mut files(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

#[test]
fn kernels_give_the_same_bits_from_a_store_of_their_own() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let [cache, temp] = ["cache", "temp"].map(|name| root.join(name));
    _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&cache)?;
    fs::create_dir_all(&temp)?;
    env::set_var("XDG_CACHE_HOME", &cache);
    env::set_var("TMPDIR", &temp);
    assert!(bind()?);
    assert!(bind()?, "the second call");

    let (got, wanted) = with_device(Device::cpu(), || {
        let y = Array::arange::<_, f32>(None, 24, None)?.divide(Array::from_f32(7.0))?;
        let inputs = || {
            Ok::<_, Exception>([
                y.reshape(&[3, 8])?.negative()?,
                y.reshape(&[3, 8])?.sum_axis(0, None)?,
            ])
        };
        let got = compile(function, false)(&inputs()?)?;
        let wanted = function(&inputs()?)?;
        mlx_rs::transforms::eval(got.iter().chain(&wanted))?;
        Ok::<_, Exception>((got, wanted))
    })?;
    assert_eq!(got[0].as_slice::<f32>(), wanted[0].as_slice::<f32>());

    let kept = files(&cache)?;
    assert_eq!(kept.len(), 2, "a source and a library: {kept:?}");
    let source = kept
        .iter()
        .find(|path| path.extension().is_some_and(|it| it == "cpp"));
    let source = fs::read_to_string(source.ok_or("no source")?)?;
    let pragma = source.find("#pragma GCC ivdep\n").ok_or("no pragma")?;
    assert_eq!(
        source.rfind("for (int i1"),
        source[pragma..].find("for (").map(|at| pragma + at)
    );
    assert_eq!(files(&temp)?, Vec::<PathBuf>::new());
    Ok(())
}
