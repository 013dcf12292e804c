//! MLX's linear algebra on the CPU, through OpenBLAS.
//!
//! The CPU wheel of MLX is linked with the reference BLAS and LAPACK, which take some fifty times as long as OpenBLAS
//! for a matrix product. [`bind`] loads an OpenBLAS whose functions carry the prefix `scipy_` (the wheel
//! `scipy-openblas32` of PyPI) and writes their addresses into libmlx's table of imported functions.
//!
//! # Guarantee
//! Every function that libmlx imports, and that the library has under the same name after the prefix, is that of the
//! library from then on: whichever was loaded first, and whether or not libmlx has called it before. Nothing but
//! libmlx is touched: NumPy keeps its BLAS, no file and no environment variable changes.
//!
//! # Rationale
//! Symbols are looked up by name, and an OpenBLAS that took the plain names would take them for the whole process;
//! `LD_PRELOAD` has to be there before the process starts. Nothing is listed by hand, so the next MLX may import more.
//!
//! # Limits
//! Linux with glibc on x86-64 and AArch64; elsewhere [`bind`] does nothing (on macOS MLX uses Accelerate). The integers
//! of that OpenBLAS must be 32 bits wide, as MLX passes them. It lasts as long as the process; there is no way back.
//!
//! # Threads
//! An entry of the table is one aligned word and is stored in one piece: a call under way ends in the function it began
//! in. If another thread makes the very first call of a function at this moment, the dynamic linker may put the old
//! address back: as correct and as slow as before. How many threads OpenBLAS uses is its own affair: it reads
//! `OPENBLAS_NUM_THREADS` and `OMP_NUM_THREADS` when it is loaded.
#![allow(unsafe_code)]

use std::{io, path::Path, path::PathBuf};

/// What [`bind`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// The functions that libmlx now takes from the library, sorted: `cblas_sgemm`, `ssyevd_`, …
    pub names: Vec<String>,
}

/// Why [`bind`] could not do it. MLX is then as it was, but for the functions already bound when [`Protect`] came up.
///
/// [`Protect`]: BlasError::Protect
#[derive(Debug, thiserror::Error)]
pub enum BlasError {
    /// The dynamic linker refuses the library.
    #[error("cannot load OpenBLAS from {}: {reason}", library.display())]
    Load {
        /// The file that was to be loaded.
        library: PathBuf,
        /// What the dynamic linker says.
        reason: String,
    },
    /// The library has other names than `scipy_…`.
    #[error("{} has no function scipy_cblas_sgemm: expected the library of scipy-openblas32", .0.display())]
    Foreign(PathBuf),
    /// No libmlx is loaded in this process.
    #[error("libmlx is not loaded in this process")]
    NoMlx,
    /// The system does not let us write to libmlx's table.
    #[error("cannot write to libmlx's table of imported functions: {0}")]
    Protect(#[source] io::Error),
}

/// Points the BLAS and LAPACK functions that the loaded libmlx imports at those of `library`.
///
/// A second call with the same library changes nothing and returns the same names.
///
/// # Errors
/// When the library cannot be loaded or is none of `scipy-openblas32`, and when libmlx is not loaded or its table
/// cannot be written.
pub fn bind(library: &Path) -> Result<Bound, BlasError> {
    let names = imp::bind(library)?;
    Ok(Bound { names })
}

#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod imp {
    use super::BlasError;
    use libc::{c_char, c_int, c_void, dl_phdr_info, size_t, Elf64_Phdr, Elf64_Sym};
    use std::{
        collections::BTreeSet,
        ffi::{CStr, CString},
        io,
        ops::Range,
        os::unix::ffi::OsStrExt,
        path::Path,
        ptr::{self, NonNull},
        slice,
        sync::atomic::{AtomicPtr, Ordering},
    };

    const MLX: &[u8] = b"libmlx.so";

    // <elf.h>, as far as the libc crate leaves it out
    const DT_NULL: i64 = 0;
    const DT_PLTRELSZ: i64 = 2;
    const DT_STRTAB: i64 = 5;
    const DT_SYMTAB: i64 = 6;
    const DT_RELA: i64 = 7;
    const DT_RELASZ: i64 = 8;
    const DT_JMPREL: i64 = 23;
    #[cfg(target_arch = "x86_64")]
    const IMPORTS: [u32; 2] = [6, 7]; // R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
    #[cfg(target_arch = "aarch64")]
    const IMPORTS: [u32; 2] = [1025, 1026]; // R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT

    #[repr(C)]
    struct Dyn {
        tag: i64,
        value: usize,
    }

    #[repr(C)]
    struct Rela {
        offset: usize,
        info: u64,
        addend: i64,
    }

    pub fn bind(path: &Path) -> Result<Vec<String>, BlasError> {
        let library = Library::open(path)?;
        if library.function(c"cblas_sgemm").is_none() {
            return Err(BlasError::Foreign(path.to_owned()));
        }
        let images = Image::all_of_mlx();
        if images.is_empty() {
            return Err(BlasError::NoMlx);
        }
        let mut names = BTreeSet::new();
        for image in &images {
            for (name, slot) in image.imports() {
                if let Some(function) = library.function(name) {
                    image.store(slot, function).map_err(BlasError::Protect)?;
                    names.insert(name.to_string_lossy().into_owned());
                }
            }
        }
        Ok(names.into_iter().collect())
    }

    /// A library that stays loaded: libmlx is about to hold addresses of its functions.
    struct Library(NonNull<c_void>);

    impl Library {
        fn open(path: &Path) -> Result<Self, BlasError> {
            let refuse = |reason: String| BlasError::Load {
                library: path.to_owned(),
                reason,
            };
            let name = CString::new(path.as_os_str().as_bytes())
                .map_err(|error| refuse(error.to_string()))?;
            // SAFETY: `name` ends with a NUL; the initialisers of a BLAS library have no conditions of their own.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            NonNull::new(handle)
                .map(Self)
                .ok_or_else(|| refuse(last_error()))
        }

        /// The address of `scipy_<name>`.
        fn function(&self, name: &CStr) -> Option<NonNull<c_void>> {
            let name = CString::new([b"scipy_", name.to_bytes()].concat()).ok()?;
            // SAFETY: the handle is that of an open library and `name` ends with a NUL.
            NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
        }
    }

    fn last_error() -> String {
        // SAFETY: dlerror returns null or a string of this thread that lives until the next call of its family.
        let text = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
        text.map_or_else(
            || "unknown error".to_owned(),
            |text| text.to_string_lossy().into_owned(),
        )
    }

    /// A loaded libmlx. It is never unloaded: this code is linked with it.
    struct Image {
        base: usize,
        headers: &'static [Elf64_Phdr],
    }

    impl Image {
        fn all_of_mlx() -> Vec<Self> {
            let mut images: Vec<Self> = Vec::new();
            // SAFETY: `collect` has the signature asked for, gets `images` back and does not keep it.
            unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut images).cast()) };
            images
        }

        /// The imported functions: name, and the address of the word that holds where each one is.
        fn imports(&self) -> Vec<(&'static CStr, usize)> {
            let Some(dynamic) = self
                .headers
                .iter()
                .find(|header| header.p_type == libc::PT_DYNAMIC)
            else {
                return Vec::new();
            };
            let dynamic: *const Dyn = ptr::with_exposed_provenance(self.address(dynamic.p_vaddr));
            let (symbols, strings) = (entry(dynamic, DT_SYMTAB), entry(dynamic, DT_STRTAB));
            let symbols: *const Elf64_Sym = ptr::with_exposed_provenance(symbols);
            let strings: *const c_char = ptr::with_exposed_provenance(strings);
            [(DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)]
                .into_iter()
                .flat_map(|(table, size)| relocations(entry(dynamic, table), entry(dynamic, size)))
                .filter(|relocation| IMPORTS.contains(&((relocation.info & 0xffff_ffff) as u32)))
                .map(|relocation| {
                    let symbol = usize::try_from(relocation.info >> 32).unwrap_or(0);
                    // SAFETY: a relocation's symbol lies in the image's symbol table and its name in the string table,
                    // where it ends with a NUL; glibc has put their addresses, not offsets, into the dynamic section.
                    let name = unsafe {
                        CStr::from_ptr(strings.add((*symbols.add(symbol)).st_name as usize))
                    };
                    (name, self.base.wrapping_add(relocation.offset))
                })
                .collect()
        }

        /// Stores a function's address in a slot, which the dynamic linker may have made read-only.
        fn store(&self, slot: usize, function: NonNull<c_void>) -> io::Result<()> {
            let slot_pointer: *mut *mut c_void = ptr::with_exposed_provenance_mut(slot);
            // SAFETY: `slot` is the aligned address of a word in the loaded image, which the dynamic linker and the
            // processors of all threads read in one piece.
            let word = unsafe { AtomicPtr::from_ptr(slot_pointer) };
            if word.load(Ordering::Acquire) == function.as_ptr() {
                return Ok(());
            }
            let read_only = self.read_only().contains(&slot);
            if read_only {
                protect(slot, libc::PROT_READ | libc::PROT_WRITE)?;
            }
            word.store(function.as_ptr(), Ordering::Release);
            if read_only {
                protect(slot, libc::PROT_READ)?;
            }
            Ok(())
        }

        /// The addresses that the dynamic linker has made read-only after relocation: whole pages.
        fn read_only(&self) -> Range<usize> {
            let relro = self
                .headers
                .iter()
                .find(|header| header.p_type == libc::PT_GNU_RELRO);
            relro.map_or(0..0, |header| {
                page_of(self.address(header.p_vaddr))
                    ..page_of(self.address(header.p_vaddr + header.p_memsz))
            })
        }

        fn address(&self, offset: u64) -> usize {
            self.base.wrapping_add(usize::try_from(offset).unwrap_or(0))
        }
    }

    unsafe extern "C" fn collect(
        info: *mut dl_phdr_info,
        _size: size_t,
        images: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid `info`, and `images` as `all_of_mlx` gave it.
        let (info, images) = unsafe { (&*info, &mut *images.cast::<Vec<Image>>()) };
        if info.dlpi_name.is_null() || info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: the name ends with a NUL.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        if name.rsplit(|byte| *byte == b'/').next() == Some(MLX) {
            // SAFETY: the program headers are mapped with the image, and libmlx is never unloaded.
            let headers =
                unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
            images.push(Image {
                base: usize::try_from(info.dlpi_addr).unwrap_or(0),
                headers,
            });
        }
        0
    }

    /// The value with that tag in a dynamic section, 0 when it has none.
    fn entry(mut dynamic: *const Dyn, tag: i64) -> usize {
        // SAFETY: the section is mapped and ends with DT_NULL.
        unsafe {
            while (*dynamic).tag != DT_NULL {
                if (*dynamic).tag == tag {
                    return (*dynamic).value;
                }
                dynamic = dynamic.add(1);
            }
        }
        0
    }

    fn relocations(table: usize, bytes: usize) -> &'static [Rela] {
        if table == 0 {
            return &[];
        }
        // SAFETY: the dynamic section says that `bytes` of relocations lie there, in memory that stays mapped.
        unsafe {
            slice::from_raw_parts(
                ptr::with_exposed_provenance(table),
                bytes / size_of::<Rela>(),
            )
        }
    }

    fn protect(address: usize, protection: c_int) -> io::Result<()> {
        let page: *mut c_void = ptr::with_exposed_provenance_mut(page_of(address));
        // SAFETY: the page belongs to libmlx's table, nobody relies on it being unwritable for a moment.
        match unsafe { libc::mprotect(page, page_size(), protection) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn page_of(address: usize) -> usize {
        address & !(page_size() - 1)
    }

    fn page_size() -> usize {
        // SAFETY: sysconf has no conditions.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
    }
}

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
mod imp {
    use super::BlasError;
    use std::path::Path;

    /// MLX brings the platform's own fast BLAS, or a table in a format unknown here.
    #[allow(clippy::unnecessary_wraps)] // the signature of the other platform
    pub fn bind(_library: &Path) -> Result<Vec<String>, BlasError> {
        Ok(Vec::new())
    }
}
