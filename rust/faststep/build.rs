//! Compiles the C++ that reaches what mlx-c leaves out.
use std::env;

/// The sources below `native`.
const SOURCES: [&str; 22] = [
    "array",
    "cpu/copy",
    "cpu/join",
    "cpu/kernels",
    "cpu/quantized",
    "cpu/sum_of_squares",
    "cuda/pack",
    "graph/fuse",
    "graph/graph",
    "graph/merge",
    "simulator/order",
    "graph/straight",
    "simulator/device",
    "simulator/evaluate",
    "simulator/ffi",
    "simulator/memory",
    "simulator/queue",
    "simulator/rules",
    "simulator/sharing",
    "simulator/simulator",
    "simulator/views",
    "status",
];

fn main() {
    println!("cargo:rerun-if-changed=native");
    if let Ok(lib) = env::var("DEP_MLX_LIB") {
        println!("cargo:rustc-link-arg-benches=-Wl,-rpath,{lib}"); // `cargo bench` needs nothing set
    }
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").pic(true).include("native");
    for source in SOURCES {
        build.file(format!("native/{source}.cpp"));
    }
    let include = env::var_os("DEP_MLX_INCLUDE").unwrap_or_default();
    for dir in env::split_paths(&include) {
        build.flag("-isystem").flag(dir);
    }
    build.compile("faststep_native");
}
