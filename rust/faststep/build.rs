//! Compiles the few lines of C++ that reach what mlx-c leaves out.
use std::env;

fn main() {
    println!("cargo:rerun-if-changed=native");
    if let Ok(lib) = env::var("DEP_MLX_LIB") {
        println!("cargo:rustc-link-arg-benches=-Wl,-rpath,{lib}"); // `cargo bench` needs nothing set
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .pic(true)
        .file("native/array.cpp")
        .file("native/join.cpp")
        .file("native/pack.cpp");
    let include = env::var_os("DEP_MLX_INCLUDE").unwrap_or_default();
    for dir in env::split_paths(&include) {
        build.flag("-isystem").flag(dir);
    }
    build.compile("faststep_native");
}
