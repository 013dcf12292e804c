//! NVRTC, the compiler of MLX's kernels for CUDA, and what it makes of a source.
use std::{
    ffi::{c_char, c_int, c_void, CStr, CString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    mem::transmute,
    path::{Path, PathBuf},
    process, ptr,
    time::SystemTime,
};

use super::{mlx_version, seal};

/// NVRTC's `nvrtcResult`.
pub type Status = c_int;
pub const SUCCESS: Status = 0;
pub const INVALID_INPUT: Status = 3;
pub const COMPILATION: Status = 6;
pub const NAME_NOT_VALID: Status = 10;

/// NVRTC's `nvrtcProgram`.
pub type Handle = *mut c_void;
type Strings = *const *const c_char;
type OfProgram<T> = unsafe extern "C" fn(Handle, *mut T) -> Status;

/// NVRTC's functions, as libmlx is linked with them.
pub struct Nvrtc {
    pub version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    pub create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        Strings,
        Strings,
    ) -> Status,
    pub destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    pub add_name: unsafe extern "C" fn(Handle, *const c_char) -> Status,
    pub compile: unsafe extern "C" fn(Handle, c_int, Strings) -> Status,
    pub lowered_name: unsafe extern "C" fn(Handle, *const c_char, *mut *const c_char) -> Status,
    pub cubin_size: OfProgram<usize>,
    pub cubin: OfProgram<c_char>,
    pub ptx_size: OfProgram<usize>,
    pub ptx: OfProgram<c_char>,
    pub log_size: OfProgram<usize>,
    pub log: OfProgram<c_char>,
}

impl Nvrtc {
    /// Functions of the NVRTC that libmlx has loaded; `None` where it lacks one.
    #[allow(clippy::missing_transmute_annotations)] // each field says which type its function has
    pub fn of_mlx() -> Option<Self> {
        // SAFETY: the name ends with a NUL; what is loaded already is not loaded anew.
        let mlx =
            unsafe { libc::dlopen(c"libmlx.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if mlx.is_null() {
            return None;
        }
        let find = |name: &CStr| {
            // SAFETY: the library stays loaded, and what it depends on with it.
            let found = unsafe { libc::dlsym(mlx, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: NVRTC's function of that name has the type of its field: <nvrtc.h> of CUDA 12 and 13.
                unsafe { transmute(find($name)?) }
            };
        }
        Some(Self {
            version: function!(c"nvrtcVersion"),
            create: function!(c"nvrtcCreateProgram"),
            destroy: function!(c"nvrtcDestroyProgram"),
            add_name: function!(c"nvrtcAddNameExpression"),
            compile: function!(c"nvrtcCompileProgram"),
            lowered_name: function!(c"nvrtcGetLoweredName"),
            cubin_size: function!(c"nvrtcGetCUBINSize"),
            cubin: function!(c"nvrtcGetCUBIN"),
            ptx_size: function!(c"nvrtcGetPTXSize"),
            ptx: function!(c"nvrtcGetPTX"),
            log_size: function!(c"nvrtcGetProgramLogSize"),
            log: function!(c"nvrtcGetProgramLog"),
        })
    }

    fn known_version(&self) -> (c_int, c_int) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: room for two numbers.
        unsafe { (self.version)(&raw mut major, &raw mut minor) };
        (major, minor)
    }
}

/// All that MLX gives the compiler for one module.
#[derive(Clone, Default, Hash)]
pub struct Source {
    pub name: CString,
    pub text: CString,
    /// Contents and names.
    pub headers: Vec<(CString, CString)>,
    /// The kernels, as C++ writes them.
    pub kernels: Vec<CString>,
    pub options: Vec<CString>,
}

/// A module: the names of its kernels as the linker has them, in the order of the source's, and the code.
#[derive(Debug, PartialEq)]
pub struct Compiled {
    pub lowered: Vec<CString>,
    pub code: Vec<u8>,
}

/// Reason why there is none: NVRTC's status and its words.
#[derive(Debug, PartialEq)]
pub struct Failure {
    pub status: Status,
    pub log: CString,
}

pub type Outcome = Result<Compiled, Failure>;

impl Source {
    const INCLUDE: &str = "--include-path=";
    const ARCHITECTURE: &str = "--gpu-architecture=";

    fn option(&self, begin: &'static str) -> impl Iterator<Item = &str> {
        let options = self
            .options
            .iter()
            .filter_map(|option| option.to_str().ok());
        options.filter_map(move |option| option.strip_prefix(begin))
    }

    /// The device that it is compiled for: `sm_90a`.
    pub fn architecture(&self) -> Option<&str> {
        self.option(Self::ARCHITECTURE).next()
    }

    /// Return whether the code is the device's own, and not PTX.
    pub fn is_cubin(&self) -> bool {
        self.architecture().is_some_and(|it| it.starts_with("sm_"))
    }

    /// A number for all that the module depends on: the source, the compiler, MLX, and the headers that lie in folders, by
    /// when these have changed.
    pub fn key(&self, nvrtc: &Nvrtc) -> u128 {
        let folders = self.option(Self::INCLUDE).map(|folder| {
            let changed = fs::metadata(folder).and_then(|folder| folder.modified());
            let changed = changed.map(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            changed.ok().flatten()
        });
        let folders: Vec<_> = folders.collect();
        let half = |first: u8| {
            let mut hasher = DefaultHasher::new(); // with a later Rust another number: modules are then compiled anew
            (first, nvrtc.known_version(), mlx_version(), &folders, self).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        half(0) << 64 | half(1)
    }

    /// Have NVRTC compile it.
    pub fn compile(&self, nvrtc: &Nvrtc) -> Outcome {
        let mut program = Program {
            nvrtc,
            handle: ptr::null_mut(),
        };
        let (texts, names): (Vec<_>, Vec<_>) = self
            .headers
            .iter()
            .map(|(text, name)| (text.as_ptr(), name.as_ptr()))
            .unzip();
        // SAFETY: strings that end with a NUL and live until the program has been destroyed, and the number of each list.
        unsafe {
            let created = (nvrtc.create)(
                &raw mut program.handle,
                self.text.as_ptr(),
                self.name.as_ptr(),
                c_int::try_from(texts.len()).unwrap_or(0),
                texts.as_ptr(),
                names.as_ptr(),
            );
            program.check(created)?;
            for kernel in &self.kernels {
                program.check((nvrtc.add_name)(program.handle, kernel.as_ptr()))?;
            }
            let options: Vec<_> = self.options.iter().map(|it| it.as_ptr()).collect();
            let count = c_int::try_from(options.len()).unwrap_or(0);
            program.check((nvrtc.compile)(program.handle, count, options.as_ptr()))?;
            let mut lowered = Vec::with_capacity(self.kernels.len());
            for kernel in &self.kernels {
                let mut name = ptr::null();
                program.check((nvrtc.lowered_name)(
                    program.handle,
                    kernel.as_ptr(),
                    &raw mut name,
                ))?;
                lowered.push(CStr::from_ptr(name).to_owned());
            }
            let (size, get) = if self.is_cubin() {
                (nvrtc.cubin_size, nvrtc.cubin)
            } else {
                (nvrtc.ptx_size, nvrtc.ptx)
            };
            let code = program.read(size, get)?;
            Ok(Compiled { lowered, code })
        }
    }
}

/// A program of NVRTC's own, as long as it lives.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl Program<'_> {
    fn check(&self, status: Status) -> Result<(), Failure> {
        if status == SUCCESS {
            return Ok(());
        }
        let log = if self.handle.is_null() {
            Vec::new()
        } else {
            // SAFETY: NVRTC's own functions on a program that is there.
            unsafe { self.read(self.nvrtc.log_size, self.nvrtc.log) }.unwrap_or_default()
        };
        let end = log.iter().position(|&byte| byte == 0);
        let log = CString::new(&log[..end.unwrap_or(log.len())]).unwrap_or_default();
        Err(Failure { status, log })
    }

    // SAFETY: `size` and `get` are two functions of NVRTC that belong together.
    unsafe fn read(
        &self,
        size: OfProgram<usize>,
        get: OfProgram<c_char>,
    ) -> Result<Vec<u8>, Failure> {
        let failure = |status| Failure {
            status,
            log: CString::default(),
        };
        let mut bytes = 0;
        // SAFETY: room for a number, then for as many bytes.
        unsafe {
            match size(self.handle, &raw mut bytes) {
                SUCCESS => {}
                status => return Err(failure(status)),
            }
            let mut contents = vec![0_u8; bytes];
            match get(self.handle, contents.as_mut_ptr().cast()) {
                SUCCESS => Ok(contents),
                status => Err(failure(status)),
            }
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by NVRTC, destroyed once.
            unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
        }
    }
}

impl Compiled {
    fn file(directory: &Path, key: u128) -> PathBuf {
        directory.join(format!("{key:032x}.cubin"))
    }

    /// Put it into a directory, in one piece.
    pub fn save(&self, directory: &Path, key: u128) -> io::Result<()> {
        let mut contents = Vec::with_capacity(self.code.len());
        for name in &self.lowered {
            contents.extend_from_slice(name.as_bytes_with_nul());
        }
        contents.extend_from_slice(&self.code);
        let passing = directory.join(format!("tmp_{key:032x}-{}", process::id()));
        let saved = fs::write(&passing, contents)
            .and_then(|()| seal::seal(&passing))
            .and_then(|()| fs::rename(&passing, Self::file(directory, key)));
        if saved.is_err() {
            _ = fs::remove_file(&passing);
        }
        saved
    }

    /// Module that has been put there for a source of so many kernels, where it is whole.
    pub fn load(directory: &Path, key: u128, kernels: usize) -> Option<Self> {
        let contents = seal::contents(&Self::file(directory, key))?;
        let mut rest = &contents[..];
        let mut lowered = Vec::with_capacity(kernels);
        for _ in 0..kernels {
            let name = CStr::from_bytes_until_nul(rest).ok()?;
            rest = &rest[name.to_bytes_with_nul().len()..];
            lowered.push(name.to_owned());
        }
        let code = rest.to_vec();
        Some(Self { lowered, code })
    }
}

#[cfg(test)]
mod tests {
    use super::{Compiled, Failure, Handle, Nvrtc, Source, Status, COMPILATION, SUCCESS};
    use std::{
        env,
        error::Error,
        ffi::{c_char, c_int, CString},
        fs, process,
    };

    // a compiler whose code is a copy of the source, which it refuses where there is none
    struct Text(CString);

    unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int) -> Status {
        // SAFETY: room for two numbers.
        unsafe { (*major, *minor) = (13, 0) };
        SUCCESS
    }

    unsafe extern "C" fn create(
        handle: *mut Handle,
        text: *const c_char,
        _: *const c_char,
        _: c_int,
        _: *const *const c_char,
        _: *const *const c_char,
    ) -> Status {
        // SAFETY: a string that ends with a NUL, room for a handle.
        unsafe {
            let text = Text(std::ffi::CStr::from_ptr(text).to_owned());
            *handle = Box::into_raw(Box::new(text)).cast();
        }
        SUCCESS
    }

    unsafe extern "C" fn destroy(handle: *mut Handle) -> Status {
        // SAFETY: made by `create`.
        drop(unsafe { Box::from_raw((*handle).cast::<Text>()) });
        SUCCESS
    }

    unsafe extern "C" fn add_name(_: Handle, _: *const c_char) -> Status {
        SUCCESS
    }

    unsafe extern "C" fn compile(handle: Handle, _: c_int, _: *const *const c_char) -> Status {
        // SAFETY: made by `create`.
        let text = unsafe { &(*handle.cast::<Text>()).0 };
        if text.is_empty() {
            COMPILATION
        } else {
            SUCCESS
        }
    }

    unsafe extern "C" fn lowered_name(
        _: Handle,
        name: *const c_char,
        lowered: *mut *const c_char,
    ) -> Status {
        // SAFETY: room for an address.
        unsafe { *lowered = name };
        SUCCESS
    }

    unsafe extern "C" fn size(handle: Handle, size: *mut usize) -> Status {
        // SAFETY: made by `create`; room for a number.
        unsafe { *size = (*handle.cast::<Text>()).0.count_bytes() };
        SUCCESS
    }

    unsafe extern "C" fn get(handle: Handle, room: *mut c_char) -> Status {
        // SAFETY: made by `create`; room for its bytes.
        unsafe {
            let text = &(*handle.cast::<Text>()).0;
            std::ptr::copy_nonoverlapping(text.as_ptr(), room, text.count_bytes());
        }
        SUCCESS
    }

    const COPY: Nvrtc = Nvrtc {
        version,
        create,
        destroy,
        add_name,
        compile,
        lowered_name,
        cubin_size: size,
        cubin: get,
        ptx_size: size,
        ptx: get,
        log_size: size,
        log: get,
    };

    #[test]
    fn what_is_compiled_is_kept_for_the_same_source_alone() -> Result<(), Box<dyn Error>> {
        let mut source = Source {
            text: CString::new("source")?,
            kernels: vec![CString::new("a")?, CString::new("b<1>")?],
            options: vec![CString::new("--gpu-architecture=sm_90a")?],
            ..Source::default()
        };
        assert_eq!(source.architecture(), Some("sm_90a"));
        assert!(source.is_cubin());
        let compiled = source.compile(&COPY).map_err(|it| format!("{it:?}"))?;
        assert_eq!(compiled.code, b"source");
        assert_eq!(compiled.lowered, source.kernels);

        let folder = env::temp_dir().join(format!("faststep-nvrtc-{}", process::id()));
        fs::create_dir_all(&folder)?;
        let key = source.key(&COPY);
        assert_eq!(Compiled::load(&folder, key, 2), None);
        compiled.save(&folder, key)?;
        assert_eq!(Compiled::load(&folder, key, 2), Some(compiled));
        let files = fs::read_dir(&folder)?.collect::<Result<Vec<_>, _>>()?;
        assert_eq!(files.len(), 1, "no passing file is left");
        let contents = fs::read(files[0].path())?;
        fs::write(files[0].path(), &contents[..contents.len() - 1])?;
        assert_eq!(Compiled::load(&folder, key, 2), None, "it is cut off");
        fs::remove_dir_all(&folder)?;

        source.options.clear();
        assert_ne!(source.key(&COPY), key);
        assert!(!source.is_cubin());
        source.text = CString::default();
        let (status, log) = (COMPILATION, CString::default());
        assert_eq!(source.compile(&COPY), Err(Failure { status, log }));
        Ok(())
    }
}
