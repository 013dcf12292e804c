//! Gives this crate's programs a run path to the libmlx they were linked with, so that they start without more ado.
use std::env;

fn main() {
    if let Ok(lib) = env::var("DEP_MLX_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
