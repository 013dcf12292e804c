//! Compiles the bridge to the arrays of `mlx.core`: nanobind of the same version and domain.
#![allow(clippy::panic)] // a build script ends the build by it
use std::{env, path::PathBuf, process::Command};

fn python(code: &str) -> PathBuf {
    let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(&python).args(["-c", code]).output();
    let output = output.unwrap_or_else(|error| panic!("{python}: {error}"));
    assert!(
        output.status.success(),
        "{python} -c '{code}':\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

fn main() {
    println!("cargo:rerun-if-changed=native");
    println!("cargo:rerun-if-env-changed=PYO3_PYTHON");
    println!("cargo:rerun-if-env-changed=PYTHONPATH");
    link();
    if cfg!(clippy) {
        return; // which links nothing
    }
    let nanobind = python("import nanobind, os; print(os.path.dirname(nanobind.__file__))");
    let headers = python("import sysconfig; print(sysconfig.get_paths()['include'])");
    println!("cargo:rerun-if-changed={}", nanobind.join("src").display());
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        .warnings(false)
        .define("NB_DOMAIN", "mlx") // the domain of mlx.core: its arrays become ours
        .define("NDEBUG", None)
        .flag("-fvisibility=hidden")
        .include(nanobind.join("include"))
        .include(nanobind.join("ext/robin_map/include"))
        .include(headers)
        .file(nanobind.join("src/nb_combined.cpp"))
        .file("native/bridge.cpp")
        .file("native/glance.cpp");
    if env::var_os("DEBUG").is_some_and(|debug| debug == "true") {
        build.flag("-g1"); // line tables, as in the engine
    }
    for dir in env::split_paths(&env::var_os("DEP_MLX_INCLUDE").unwrap_or_default()) {
        build.flag("-isystem").flag(dir);
    }
    build.compile("faststep_bridge");
}

/// Tells the linker where libmlx lies beside an installed module, and whether the module keeps its symbols.
fn link() {
    // of the system that is built for: `cfg!` is about the one that builds
    let here = match env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => "@loader_path",
        _ => "$ORIGIN",
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,{here}/../mlx/lib");
    // `make` and scripts/wheels.py ask for the symbols: 22 MB that `pip install .` need not bring
    println!("cargo:rerun-if-env-changed=FASTSTEP_SYMBOLS");
    if here == "$ORIGIN" && env::var_os("FASTSTEP_SYMBOLS").is_none() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-all");
    }
}
