//! Compiles the C++ that reaches what mlx-c leaves out.
use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=native");
    if let Ok(lib) = env::var("DEP_MLX_LIB") {
        println!("cargo:rustc-link-arg-benches=-Wl,-rpath,{lib}"); // `cargo bench` needs nothing set
    }
    if cfg!(clippy) {
        return Ok(()); // which links nothing
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        .include("native")
        .include("native/cuda/declared");
    build.file(one_unit()?);
    if env::var_os("DEBUG").is_some_and(|debug| debug == "true") {
        build.flag("-g1"); // the profile's line tables, which cargo tells as `true`: all of -g takes half as long again
    }
    let include = env::var_os("DEP_MLX_INCLUDE").unwrap_or_default();
    for dir in env::split_paths(&include) {
        build.flag("-isystem").flag(dir);
    }
    build.compile("faststep_native");
    Ok(())
}

/// One translation unit of all sources: reading MLX's headers is nearly all the work, so once is five times faster.
fn one_unit() -> io::Result<PathBuf> {
    let native = env::current_dir()?.join("native");
    let includes: Vec<String> = sources(&native)?
        .iter()
        .map(|source| format!("#include \"{}\"\n", source.display()))
        .collect();
    let unit = Path::new(&env::var_os("OUT_DIR").unwrap_or_default()).join("native.cpp");
    fs::write(&unit, includes.concat())?;
    Ok(unit)
}

/// The sources in a directory and below, in a fixed order: the same build gives the same library.
fn sources(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> = fs::read_dir(directory)?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    entries.sort();
    let mut found = Vec::new();
    for path in entries {
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "cpp") {
            found.push(path);
        }
    }
    Ok(found)
}
