//! Memory that is held for reuse, by MLX and by the C library, and how to give it back.
#![allow(unsafe_code)]

/// Free what MLX's allocator keeps for reuse.
pub fn clear_cache() {
    // SAFETY: takes nothing; MLX's allocator has its own lock.
    unsafe {
        mlx_sys::mlx_clear_cache();
    }
}

/// Ask the C library for the memory of what has been freed: glibc keeps it otherwise.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number, and may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
