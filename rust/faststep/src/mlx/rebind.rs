//! Other functions in place of those that libmlx imports, for libmlx alone.
//!
//! A shared library calls what it imports through a table of addresses, which the dynamic linker fills in, as it does the tables
//! of virtual functions. This finds those tables in the libmlx that is loaded, and writes other addresses into them.
//!
//! # Guarantee
//! A replaced function is the new one for every later call that libmlx makes, whether or not it has called it before.
//! Nothing but libmlx is touched: the other libraries of the process keep theirs, no file and no environment variable
//! changes.
//!
//! # Limits
//! Linux with glibc on x86-64 and AArch64; elsewhere nothing is found. It lasts as long as the process; there is no way
//! back.
//!
//! # Threads
//! An entry of the table is one aligned word and is stored in one piece: a call under way ends in the function it began
//! in. If another thread makes the very first call of a function at this moment, the dynamic linker may put the old
//! address back: as correct as before.
#![allow(unsafe_code)]

pub(crate) use imp::{loaded, Function, Imports};

use std::io;

/// Reason why a function of libmlx could not be replaced.
#[derive(Debug, thiserror::Error)]
pub enum RebindError {
    /// No libmlx is loaded in this process.
    #[error("libmlx is not loaded in this process")]
    NoMlx,
    /// The system does not let us write to libmlx's table. What was replaced before it said so stays replaced.
    #[error("cannot write to libmlx's table of imported functions: {0}")]
    Protect(#[source] io::Error),
}

#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod imp {
    use super::RebindError;
    use libc::{c_char, c_int, c_void, dl_phdr_info, size_t, Elf64_Phdr, Elf64_Sym};
    use std::{
        collections::BTreeSet,
        ffi::CStr,
        io,
        ops::Range,
        ptr::{self, NonNull},
        slice,
        sync::atomic::{AtomicPtr, Ordering},
    };

    /// The address of a function.
    pub type Function = NonNull<c_void>;

    const MLX: &[u8] = b"libmlx.so";

    // constants of <elf.h> that the libc crate lacks
    const DT_NULL: i64 = 0;
    const DT_NEEDED: i64 = 1;
    const DT_PLTRELSZ: i64 = 2;
    const DT_STRTAB: i64 = 5;
    const DT_SYMTAB: i64 = 6;
    const DT_RELA: i64 = 7;
    const DT_RELASZ: i64 = 8;
    const DT_JMPREL: i64 = 23;
    #[cfg(target_arch = "x86_64")]
    const IMPORTS: [u32; 3] = [1, 6, 7]; // R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
    #[cfg(target_arch = "aarch64")]
    const IMPORTS: [u32; 3] = [257, 1025, 1026]; // R_AARCH64_ABS64, R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT

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

    /// The functions that every loaded libmlx imports.
    pub struct Imports(Vec<Image>);

    impl Imports {
        /// Find the imports of this process's libmlx.
        pub fn of_mlx() -> Result<Self, RebindError> {
            Self::of(|_, path| is_mlx(path))
        }

        /// Find those of libmlx and of what is linked with it.
        pub fn of_mlx_and_users() -> Result<Self, RebindError> {
            Self::of(|image, path| is_mlx(path) || image.needs_mlx())
        }

        fn of(chosen: fn(&Image, &[u8]) -> bool) -> Result<Self, RebindError> {
            let mut images = Images {
                chosen,
                found: Vec::new(),
            };
            // SAFETY: `collect` has the signature asked for, gets `images` back and does not keep it.
            unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut images).cast()) };
            if images.found.is_empty() {
                return Err(RebindError::NoMlx);
            }
            Ok(Self(images.found))
        }

        /// Return whether every libmlx imports this function.
        pub fn have(&self, name: &CStr) -> bool {
            let has = |image: &Image| image.imports().iter().any(|(found, _)| *found == name);
            self.0.iter().all(has)
        }

        /// Replaces each function that `replacement` has another one for; returns their names, sorted.
        pub fn replace(
            &self,
            replacement: impl Fn(&CStr) -> Option<Function>,
        ) -> Result<Vec<String>, RebindError> {
            let mut names = BTreeSet::new();
            for image in &self.0 {
                for (name, slot) in image.imports() {
                    if let Some(function) = replacement(name) {
                        image.store(slot, function).map_err(RebindError::Protect)?;
                        names.insert(name.to_string_lossy().into_owned());
                    }
                }
            }
            Ok(names.into_iter().collect())
        }
    }

    /// A loaded libmlx. It is never unloaded: this code is linked with it.
    struct Image {
        base: usize,
        headers: &'static [Elf64_Phdr],
    }

    /// The images that are looked for.
    struct Images {
        chosen: fn(&Image, &[u8]) -> bool,
        found: Vec<Image>,
    }

    fn is_mlx(path: &[u8]) -> bool {
        path.rsplit(|byte| *byte == b'/').next() == Some(MLX)
    }

    /// The number of libraries that have been loaded so far.
    pub fn loaded() -> u64 {
        let mut loaded = 0;
        // SAFETY: `count` has the signature asked for, gets `loaded` back and does not keep it.
        unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut loaded).cast()) };
        loaded
    }

    unsafe extern "C" fn count(
        info: *mut dl_phdr_info,
        _size: size_t,
        loaded: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid `info`, and `loaded` as it was given.
        unsafe { *loaded.cast::<u64>() = (*info).dlpi_adds };
        1
    }

    impl Image {
        fn needs_mlx(&self) -> bool {
            let Some(dynamic) = self.dynamic() else {
                return false;
            };
            let needed = entries(dynamic).filter(|(tag, _)| *tag == DT_NEEDED);
            needed.into_iter().any(|(_, name)| {
                let strings: *const c_char =
                    ptr::with_exposed_provenance(entry(dynamic, DT_STRTAB));
                // SAFETY: an image that needs others has been relocated: the address of its strings is one.
                let name = unsafe { CStr::from_ptr(strings.add(name)) };
                is_mlx(name.to_bytes())
            })
        }

        fn dynamic(&self) -> Option<*const Dyn> {
            let mut headers = self.headers.iter();
            let dynamic = headers.find(|header| header.p_type == libc::PT_DYNAMIC)?;
            Some(ptr::with_exposed_provenance(self.address(dynamic.p_vaddr)))
        }

        /// The imported functions: name, and the address of the word that holds where each one is.
        fn imports(&self) -> Vec<(&'static CStr, usize)> {
            let Some(dynamic) = self.dynamic() else {
                return Vec::new();
            };
            let (symbols, strings) = (entry(dynamic, DT_SYMTAB), entry(dynamic, DT_STRTAB));
            let symbols: *const Elf64_Sym = ptr::with_exposed_provenance(symbols);
            let strings: *const c_char = ptr::with_exposed_provenance(strings);
            [(DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)]
                .into_iter()
                .flat_map(|(table, size)| relocations(entry(dynamic, table), entry(dynamic, size)))
                .filter(|relocation| IMPORTS.contains(&((relocation.info & 0xffff_ffff) as u32)))
                .filter(|relocation| relocation.addend == 0)
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
        // SAFETY: dl_iterate_phdr passes a valid `info`, and `images` as `of` gave it.
        let (info, images) = unsafe { (&*info, &mut *images.cast::<Images>()) };
        if info.dlpi_name.is_null() || info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: the name ends with a NUL.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        // SAFETY: the program headers are mapped with the image, and nothing that is linked with libmlx is unloaded.
        let headers =
            unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let image = Image {
            base: usize::try_from(info.dlpi_addr).unwrap_or(0),
            headers,
        };
        if (images.chosen)(&image, name) {
            images.found.push(image);
        }
        0
    }

    /// The value with that tag in a dynamic section, 0 when it has none.
    fn entry(dynamic: *const Dyn, tag: i64) -> usize {
        let mut entries = entries(dynamic);
        entries
            .find(|(found, _)| *found == tag)
            .map_or(0, |(_, value)| value)
    }

    /// The tags and values of a dynamic section.
    fn entries(dynamic: *const Dyn) -> impl Iterator<Item = (i64, usize)> {
        // SAFETY: the section is mapped and ends with DT_NULL.
        let entries = (0..).map(move |at| unsafe {
            let entry = dynamic.add(at);
            ((*entry).tag, (*entry).value)
        });
        entries.take_while(|(tag, _)| *tag != DT_NULL)
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
    use super::RebindError;
    use std::{
        ffi::{c_void, CStr},
        ptr::NonNull,
    };

    /// The address of a function.
    pub type Function = NonNull<c_void>;

    pub fn loaded() -> u64 {
        0
    }

    /// A table in a format unknown here, or on a platform where MLX needs nothing of the kind: it is left alone.
    pub struct Imports;

    #[allow(clippy::unnecessary_wraps, clippy::unused_self)] // the signatures of the other platform
    impl Imports {
        pub fn of_mlx() -> Result<Self, RebindError> {
            Ok(Self)
        }

        pub fn of_mlx_and_users() -> Result<Self, RebindError> {
            Ok(Self)
        }

        pub fn have(&self, _name: &CStr) -> bool {
            false
        }

        pub fn replace(
            &self,
            _replacement: impl Fn(&CStr) -> Option<Function>,
        ) -> Result<Vec<String>, RebindError> {
            Ok(Vec::new())
        }
    }
}
