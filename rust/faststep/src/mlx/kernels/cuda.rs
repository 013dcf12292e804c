//! MLX's kernels for CUDA: compiled several at a time, and kept.
//!
//! MLX hands the source of each module to NVRTC when it is first needed, one after the other, and keeps the outcome below
//! the temporary directory by the module's name alone: what another device's MLX left there does not load, nor does what
//! was cut off. [`bind`] stands between the two. A program of NVRTC is then one of ours: its source is noted as MLX gives it,
//! and when it is to be compiled, the outcome is that of the store (`store.rs`), or of a thread that has begun before
//! ([`ask`], `ahead.rs`), or of NVRTC.
//!
//! # Guarantee
//! The same code as NVRTC gives MLX. Where `MLX_PTX_CACHE_DIR` is set, MLX keeps modules there and the store is not used.
use std::{
    cell::Cell,
    env,
    ffi::{c_char, c_int, c_void, CStr, CString},
    path::PathBuf,
    ptr,
    sync::{atomic::Ordering, Arc, LazyLock, OnceLock},
};

use mlx_rs::Array;

use super::{
    ahead::Ahead,
    nvrtc::{
        Compiled, Failure, Handle, Nvrtc, Outcome, Source, Status, COMPILATION, INVALID_INPUT,
        NAME_NOT_VALID, SUCCESS,
    },
    store, COMPILED,
};
use crate::mlx::{
    ffi::{check, faststep_ask_kernels, handles},
    rebind::{Function, Imports, RebindError},
};

const FOLDER: &CStr = c"MLX_PTX_CACHE_DIR";
/// No folder, and none can be made there: MLX keeps nothing then.
const NOWHERE: &CStr = c"/dev/null/mlx";

static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
static AHEAD: LazyLock<Ahead<Outcome>> = LazyLock::new(|| Ahead::new(|| {}));

thread_local! {
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// A program as libmlx has it.
struct Program {
    source: Source,
    compiled: Option<Arc<Outcome>>,
}

/// Stands between libmlx and NVRTC from now on; whether it does.
pub fn bind(imports: &Imports) -> Result<bool, RebindError> {
    let functions: [(&CStr, *mut c_void); 12] = [
        (c"getenv", getenv as *mut c_void),
        (c"nvrtcCreateProgram", create as *mut c_void),
        (c"nvrtcDestroyProgram", destroy as *mut c_void),
        (c"nvrtcAddNameExpression", add_name as *mut c_void),
        (c"nvrtcCompileProgram", compile as *mut c_void),
        (c"nvrtcGetLoweredName", lowered_name as *mut c_void),
        (c"nvrtcGetCUBINSize", code_size as *mut c_void),
        (c"nvrtcGetCUBIN", code as *mut c_void),
        (c"nvrtcGetPTXSize", code_size as *mut c_void),
        (c"nvrtcGetPTX", code as *mut c_void),
        (c"nvrtcGetProgramLogSize", log_size as *mut c_void),
        (c"nvrtcGetProgramLog", log as *mut c_void),
    ];
    if !functions.iter().all(|(name, _)| imports.have(name)) {
        return Ok(false);
    }
    let Some(nvrtc) = Nvrtc::of_mlx() else {
        return Ok(false);
    };
    if NVRTC.set(nvrtc).is_err() {
        return Ok(true);
    }
    store::locate();
    super::at_exit(end);
    imports.replace(|name| {
        let found = functions.iter().find(|(known, _)| *known == name);
        found.and_then(|(_, function)| Function::new(*function))
    })?;
    Ok(true)
}

/// Has the fused kernels that arrays are computed from compiled, several at a time, as far as that has not been done. What
/// cannot be asked for is compiled by MLX when it comes to it.
pub fn ask(arrays: &[&Array]) {
    if NVRTC.get().is_none() {
        return;
    }
    let arrays = handles(arrays.iter().copied());
    ASKING.set(true);
    // SAFETY: live arrays and their number.
    let asked = check(unsafe { faststep_ask_kernels(arrays.as_ptr(), arrays.len()) });
    ASKING.set(false);
    drop(asked);
}

extern "C" fn end() {
    AHEAD.end(); // NVRTC must not be at work when it is unloaded
}

/// Directory in which modules of that source are kept; `None` where that is left to MLX, or cannot be.
fn directory(source: &Source) -> Option<PathBuf> {
    if env::var_os(FOLDER.to_str().ok()?).is_some() {
        return None;
    }
    store::of_cuda(source.architecture()?)
}

/// In place of libmlx's `getenv`.
unsafe extern "C" fn getenv(name: *const c_char) -> *mut c_char {
    // SAFETY: the caller passes a string that ends with a NUL.
    unsafe {
        let found = libc::getenv(name);
        if found.is_null() && CStr::from_ptr(name) == FOLDER {
            return NOWHERE.as_ptr().cast_mut();
        }
        found
    }
}

// SAFETY: `text` is null or a string that ends with a NUL.
unsafe fn string(text: *const c_char) -> CString {
    if text.is_null() {
        return CString::default();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_owned()
}

// SAFETY: `list` is null or has so many strings that end with a NUL.
unsafe fn strings(list: *const *const c_char, count: c_int) -> Vec<CString> {
    let count = usize::try_from(count).unwrap_or(0);
    let count = if list.is_null() { 0 } else { count };
    // SAFETY: as above.
    (0..count)
        .map(|i| unsafe { string(*list.add(i)) })
        .collect()
}

// SAFETY: `handle` is null or one that `create` gave and `destroy` has not had yet; libmlx uses it in one thread.
unsafe fn program<'a>(handle: Handle) -> Option<&'a mut Program> {
    // SAFETY: as above.
    unsafe { handle.cast::<Program>().as_mut() }
}

unsafe extern "C" fn create(
    handle: *mut Handle,
    text: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> Status {
    // SAFETY: NVRTC's contract: strings that end with a NUL, the number of each list, room for a handle.
    unsafe {
        let headers = strings(headers, count).into_iter();
        let source = Source {
            name: string(name),
            text: string(text),
            headers: headers.zip(strings(names, count)).collect(),
            ..Source::default()
        };
        let program = Program {
            source,
            compiled: None,
        };
        *handle = Box::into_raw(Box::new(program)).cast();
    }
    SUCCESS
}

unsafe extern "C" fn destroy(handle: *mut Handle) -> Status {
    // SAFETY: the address of a handle that `create` gave, which is destroyed once.
    unsafe {
        if handle.is_null() || (*handle).is_null() {
            return INVALID_INPUT;
        }
        drop(Box::from_raw((*handle).cast::<Program>()));
        *handle = ptr::null_mut();
    }
    SUCCESS
}

unsafe extern "C" fn add_name(handle: Handle, name: *const c_char) -> Status {
    // SAFETY: a handle of ours, a string that ends with a NUL.
    unsafe {
        let Some(program) = program(handle) else {
            return INVALID_INPUT;
        };
        program.source.kernels.push(string(name));
    }
    SUCCESS
}

unsafe extern "C" fn compile(
    handle: Handle,
    count: c_int,
    options: *const *const c_char,
) -> Status {
    // SAFETY: a handle of ours, and so many strings.
    let Some((program, nvrtc)) = (unsafe { program(handle) }).zip(NVRTC.get()) else {
        return INVALID_INPUT;
    };
    // SAFETY: as above.
    program.source.options = unsafe { strings(options, count) };
    let source = &program.source;
    let (key, directory) = (source.key(nvrtc), directory(source));
    let kept = directory.as_ref();
    let kept = kept.and_then(|kept| Compiled::load(kept, key, source.kernels.len()));
    let job = {
        let source = source.clone();
        move || {
            COMPILED.fetch_add(1, Ordering::Relaxed);
            let outcome = source.compile(nvrtc);
            if let (Ok(compiled), Some(directory)) = (&outcome, &directory) {
                _ = compiled.save(directory, key); // a disk that is full: it is compiled again by the next process
            }
            outcome
        }
    };
    let outcome = match kept {
        Some(kept) => Arc::new(Ok(kept)),
        None if ASKING.get() => {
            AHEAD.ask(key, job);
            return COMPILATION; // MLX goes on to the next one
        }
        None => AHEAD.take(key).unwrap_or_else(|| Arc::new(job())),
    };
    let status = outcome
        .as_ref()
        .as_ref()
        .map_or_else(|it| it.status, |_| SUCCESS);
    program.compiled = Some(outcome);
    status
}

// SAFETY: `handle` is one of ours.
unsafe fn compiled<'a>(handle: Handle) -> Option<(&'a Source, &'a Compiled)> {
    // SAFETY: as above.
    let program: &Program = unsafe { program(handle) }?;
    let outcome = program.compiled.as_ref()?.as_ref();
    Some((&program.source, outcome.as_ref().ok()?))
}

unsafe extern "C" fn lowered_name(
    handle: Handle,
    name: *const c_char,
    lowered: *mut *const c_char,
) -> Status {
    // SAFETY: a handle of ours, a string that ends with a NUL, room for an address. The name lives as long as the program.
    unsafe {
        let Some((source, compiled)) = compiled(handle) else {
            return INVALID_INPUT;
        };
        let name = CStr::from_ptr(name);
        let at = source.kernels.iter().position(|kernel| **kernel == *name);
        let Some(found) = at.and_then(|at| compiled.lowered.get(at)) else {
            return NAME_NOT_VALID;
        };
        *lowered = found.as_ptr();
    }
    SUCCESS
}

unsafe extern "C" fn code_size(handle: Handle, size: *mut usize) -> Status {
    // SAFETY: a handle of ours, room for a number.
    unsafe {
        let Some((_, compiled)) = compiled(handle) else {
            return INVALID_INPUT;
        };
        *size = compiled.code.len();
    }
    SUCCESS
}

unsafe extern "C" fn code(handle: Handle, room: *mut c_char) -> Status {
    // SAFETY: a handle of ours, room for as many bytes as `code_size` says.
    unsafe {
        let Some((_, compiled)) = compiled(handle) else {
            return INVALID_INPUT;
        };
        ptr::copy_nonoverlapping(compiled.code.as_ptr().cast(), room, compiled.code.len());
    }
    SUCCESS
}

// SAFETY: `handle` is one of ours.
unsafe fn text_of_log<'a>(handle: Handle) -> &'a CStr {
    // SAFETY: as above.
    let program = unsafe { program(handle) };
    let outcome = program.and_then(|program| program.compiled.as_deref());
    match outcome {
        Some(Err(Failure { log, .. })) => log,
        _ => c"",
    }
}

unsafe extern "C" fn log_size(handle: Handle, size: *mut usize) -> Status {
    // SAFETY: a handle of ours, room for a number.
    unsafe { *size = text_of_log(handle).to_bytes_with_nul().len() };
    SUCCESS
}

unsafe extern "C" fn log(handle: Handle, room: *mut c_char) -> Status {
    // SAFETY: a handle of ours, room for as many bytes as `log_size` says.
    unsafe {
        let text = text_of_log(handle).to_bytes_with_nul();
        ptr::copy_nonoverlapping(text.as_ptr().cast(), room, text.len());
    }
    SUCCESS
}
