//! OpenBLAS's matrix products by one thread each, large ones in chunks by several, those of few rows ([`few_rows`]) and, without
//! AVX-512, small ones (`native/cpu/small_product.cpp`) without it, half of them by a thread that waits.
//!
//! OpenBLAS's own threads wait for each other in loops that keep the processor: on a machine that is busy with anything
//! else, a product by two of them takes many times as long as by one. Here a large product is cut into chunks, each a
//! product of its own by one thread ([`share`](super::share)).
//!
//! # Guarantee
//! The bits of a product depend on its shape alone, as long as there are two threads or more: never on their number,
//! nor on who has time. Between rows it is cut at multiples of [`EDGE`], which the groups divide that OpenBLAS's
//! kernels for x86-64 go through: they are the bits of the whole product by one thread, up to some ten thousand rows.
//! What has few rows is cut between columns, where the kernel for AVX2 adds up some columns' terms in another order:
//! last bits may differ from those by one thread.
//!
//! # Rationale
//! A chunk goes to OpenBLAS by columns, transposed, as OpenBLAS itself turns what comes by rows: given by rows, a small
//! product may take another kernel, with other bits, than the whole would.
//!
//! # Threads
//! OpenBLAS as `scipy-openblas32` builds it, without OpenMP, may be called by several threads at once. Helpers start with
//! the first large product of a process, and anew in the child of a fork.
#![allow(clippy::many_single_char_names)] // those of BLAS

use libc::{c_int, c_void};
use std::{
    mem,
    ops::Range,
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
    thread,
};

use super::{
    few_rows,
    share::{Chunk, Helpers},
};
use crate::mlx::{
    cblas::{Gemm, BY_COLUMNS, BY_ROWS, PLAIN, TRANSPOSED},
    ffi::{faststep_is_small_product, faststep_small_product, MatrixProduct},
    rebind::Function,
};

/// The unit of row cuts: 48, of which 4, 6, 8, 12, 16 and 24 are factors.
const EDGE: usize = 48;
/// The least rows of a chunk, and the columns: each chunk packs the other factor again.
const LEAST_ROWS: usize = 2 * EDGE;
const LEAST_COLUMNS: usize = 256;
/// The least multiplications of a chunk, in float32; about 50 microseconds.
const LEAST_WORK: usize = 1 << 21;
/// The least of a product that is cut; below it, OpenBLAS has another kernel for AVX-512.
const LEAST_PRODUCT: usize = 28 * 512 * 512;
/// The least multiplications of a small product that is shared, about 10 microseconds, and the unit of its column cuts.
const LEAST_SMALL: usize = 1 << 19;
const SMALL_EDGE: usize = 16;
/// The most threads that share a product.
const MOST_THREADS: usize = 16;

static THREADS: AtomicUsize = AtomicUsize::new(1);
static HELPERS: AtomicPtr<Helpers> = AtomicPtr::new(ptr::null_mut());

/// Let OpenBLAS compute by one thread, and by so many that share large products: as many as it would take by itself, as
/// `OPENBLAS_NUM_THREADS` and `OMP_NUM_THREADS` say, but no more than there are processors to use. The first call counts.
pub fn take_threads(get: Function, set: Function) {
    // SAFETY: these are openblas_get_num_threads and openblas_set_num_threads.
    let (get, set) = unsafe {
        (
            mem::transmute::<Function, extern "C" fn() -> c_int>(get),
            mem::transmute::<Function, extern "C" fn(c_int)>(set),
        )
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let own = usize::try_from(get()).unwrap_or(1);
    let threads = own.min(processors).min(MOST_THREADS);
    if threads > 1 {
        THREADS.store(threads, Ordering::Relaxed);
    }
    set(1);
}

/// The division of a product into chunks: between rows or columns, at multiples of [`EDGE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    columns: bool,
    size: usize,
    count: usize,
}

impl Cut {
    /// `work`: multiplications of float32 that take as long; `None`: not at all.
    fn of(m: usize, n: usize, work: usize, threads: usize) -> Option<Self> {
        if work < LEAST_PRODUCT {
            return None;
        }
        let most = work / LEAST_WORK;
        let cut = |columns, size, count| {
            let cut = Self {
                columns,
                size,
                count,
            };
            (count > 1).then_some(cut)
        };
        // splitting rows anywhere gives the same bits; columns only at fixed boundaries
        cut(false, m, (m / LEAST_ROWS).min(most).min(2 * threads))
            .or_else(|| cut(true, n, (n / LEAST_COLUMNS).min(most)))
    }

    /// The range of a chunk, by its number; the last one is no thinner than an edge.
    fn range(self, at: usize) -> Range<usize> {
        let edge = |at: usize| (self.size.div_ceil(EDGE) * at / self.count * EDGE).min(self.size);
        edge(at)..edge(at + 1)
    }
}

/// A product as CBLAS has it.
struct Product<E, S> {
    function: Gemm<E, S>,
    own: fn(&Self) -> bool, // computes it; false where it is left to OpenBLAS
    order: c_int,
    transposed: [c_int; 2],
    shape: [c_int; 3],
    alpha: S,
    a: *const E,
    lda: c_int,
    b: *const E,
    ldb: c_int,
    beta: S,
    c: *mut E,
    ldc: c_int,
}

impl<E, S: Copy> Clone for Product<E, S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E, S: Copy> Copy for Product<E, S> {}

// SAFETY: chunks write to parts of `c` that no two of them have in common, while the caller of the product waits for all.
unsafe impl<E, S> Send for Product<E, S> {}
// SAFETY: as above; nothing of it changes.
unsafe impl<E, S> Sync for Product<E, S> {}

impl<E: 'static, S: Copy + 'static> Product<E, S> {
    fn whole(&self) {
        if (self.own)(self) {
            return;
        }
        let [m, n, k] = self.shape;
        let [ta, tb] = self.transposed;
        (self.function)(
            self.order, ta, tb, m, n, k, self.alpha, self.a, self.lda, self.b, self.ldb, self.beta,
            self.c, self.ldc,
        );
    }

    fn run(self) {
        match self.cut() {
            None => self.whole(),
            Some(cut) => self.in_chunks(cut),
        }
    }

    fn cut(&self) -> Option<Cut> {
        if self.order != BY_ROWS {
            return None; // MLX has none such
        }
        let [m, n, k] = self.shape.map(size_of_blas);
        let work = m * n * k * (size_of::<E>() / size_of::<f32>()).pow(2);
        let threads = THREADS.load(Ordering::Relaxed);
        (threads > 1).then(|| Cut::of(m, n, work, threads))?
    }

    fn in_chunks(self, cut: Cut) {
        let chunk = |at: usize| self.chunk(cut.columns, cut.range(at));
        match rested() {
            Some(helpers) => helpers.share(cut.count, &chunk),
            None if cut.columns => (0..cut.count).for_each(chunk),
            None => self.whole(),
        }
    }

    fn chunk(&self, columns: bool, range: Range<usize>) {
        let [m, n, k] = self.shape;
        let [ta, tb] = self.transposed;
        let [ld_a, ld_b, ld_c] = [self.lda, self.ldb, self.ldc].map(size_of_blas);
        let size = c_int::try_from(range.len()).unwrap_or(0);
        let begin = range.start;
        let (m, n, a, b, c) = if columns {
            let stride = if TRANSPOSED.contains(&tb) { ld_b } else { 1 };
            (m, size, 0, begin * stride, begin)
        } else {
            let stride = if TRANSPOSED.contains(&ta) { 1 } else { ld_a };
            (size, n, begin * stride, 0, begin * ld_c)
        };
        // SAFETY: a chunk begins within the matrices that the caller of the product has given.
        let (a, b, c) = unsafe { (self.a.add(a), self.b.add(b), self.c.add(c)) };
        let shape = [m, n, k];
        if (self.own)(&Self {
            shape,
            a,
            b,
            c,
            ..*self
        }) {
            return;
        }
        (self.function)(
            BY_COLUMNS, tb, ta, n, m, k, self.alpha, b, self.ldb, a, self.lda, self.beta, c,
            self.ldc,
        );
    }
}

fn without_openblas(product: &Product<f32, f32>) -> bool {
    let Some(own) = matrices_of(product) else {
        return false;
    };
    if let Some(helpers) = sharers_of(&own) {
        let half = (own.n / 2).next_multiple_of(SMALL_EDGE);
        let halves = [0..half, half..own.n];
        helpers.share(halves.len(), &|at| product.chunk(true, halves[at].clone()));
        return true;
    }
    // SAFETY: the matrices are those that the caller of the product has given.
    unsafe { faststep_small_product(&raw const own) || few_rows::multiply(&own, product.function) }
}

/// The helpers, where a thread of theirs can take half the columns of a small product: one that waits for work. Each column has
/// the same bits by itself.
fn sharers_of(own: &MatrixProduct) -> Option<&'static Helpers> {
    let MatrixProduct { m, n, k, .. } = *own;
    let is_worth_it = m * n * k >= LEAST_SMALL && n >= 2 * SMALL_EDGE;
    // SAFETY: no conditions.
    let fits = is_worth_it && unsafe { faststep_is_small_product(m, n, k, own.b_turned) };
    let (helpers, _) = fits.then(team)??;
    helpers.are_waiting().then_some(helpers)
}

#[allow(clippy::float_cmp)] // these numbers themselves
fn matrices_of(product: &Product<f32, f32>) -> Option<MatrixProduct> {
    let is_known = product.order == BY_ROWS
        && product.alpha == 1.0
        && (product.beta == 0.0 || product.beta == 1.0);
    if !is_known {
        return None;
    }
    let [m, n, k] = product.shape.map(size_of_blas);
    let [a_turned, b_turned] = product
        .transposed
        .map(|way| usize::from(TRANSPOSED.contains(&way)));
    Some(MatrixProduct {
        m,
        n,
        k,
        a: product.a,
        lda: size_of_blas(product.lda),
        a_turned,
        b: product.b,
        ldb: size_of_blas(product.ldb),
        b_turned,
        c: product.c,
        ldc: size_of_blas(product.ldc),
        adds: usize::from(product.beta == 1.0),
    })
}

fn size_of_blas(size: c_int) -> usize {
    usize::try_from(size).unwrap_or(0)
}

/// Do chunks of work, together with the helpers where there are some that have not to rest.
pub fn share(count: usize, chunk: &Chunk<'_>) {
    match rested() {
        Some(helpers) => helpers.share(count, chunk),
        None => (0..count).for_each(chunk),
    }
}

fn rested() -> Option<&'static Helpers> {
    team()
        .map(|(helpers, _)| helpers)
        .filter(|helpers| helpers.are_rested())
}

/// The helpers, and how many threads they are with the one that calls; none where there is no other.
pub fn team() -> Option<(&'static Helpers, usize)> {
    let threads = THREADS.load(Ordering::Relaxed);
    (threads > 1).then(|| (helpers(), threads))
}

/// Return the threads of this process; start them if they have not.
fn helpers() -> &'static Helpers {
    let old = HELPERS.load(Ordering::Acquire);
    // SAFETY: null, or helpers that are never dropped.
    match unsafe { old.as_ref() } {
        Some(helpers) if helpers.are_here() => helpers,
        _ => start(old),
    }
}

fn start(old: *mut Helpers) -> &'static Helpers {
    let new = Helpers::new();
    let pointer = ptr::from_ref(new).cast_mut();
    match HELPERS.compare_exchange(old, pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            new.start(THREADS.load(Ordering::Relaxed) - 1);
            new
        }
        // SAFETY: another thread was first, with helpers that are never dropped.
        Err(first) => unsafe { first.as_ref() }.unwrap_or(new),
    }
}

macro_rules! product {
    ($name:ident, $real:ident, $element:ty, $scalar:ty, $own:expr) => {
        static $real: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

        extern "C" fn $name(
            order: c_int,
            ta: c_int,
            tb: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: $scalar,
            a: *const $element,
            lda: c_int,
            b: *const $element,
            ldb: c_int,
            beta: $scalar,
            c: *mut $element,
            ldc: c_int,
        ) {
            // SAFETY: `replace` has put OpenBLAS's function of that name there, before libmlx had this one.
            let function = unsafe {
                mem::transmute::<*mut c_void, Gemm<$element, $scalar>>(
                    $real.load(Ordering::Acquire),
                )
            };
            let product = Product {
                function,
                own: $own,
                order,
                transposed: [ta, tb],
                shape: [m, n, k],
                alpha,
                a,
                lda,
                b,
                ldb,
                beta,
                c,
                ldc,
            };
            product.run();
        }
    };
}

product!(sgemm, SGEMM, f32, f32, without_openblas);
product!(dgemm, DGEMM, f64, f64, |_| false);
product!(cgemm, CGEMM, [f32; 2], *const [f32; 2], |_| false);

/// Return the replacement of OpenBLAS's function of that name, where it is a product, or the function itself.
pub fn replace(name: &[u8], function: Function) -> Function {
    let (place, shared) = match name {
        b"cblas_sgemm" => (&SGEMM, sgemm as *mut c_void),
        b"cblas_dgemm" => (&DGEMM, dgemm as *mut c_void),
        b"cblas_cgemm" => (&CGEMM, cgemm as *mut c_void),
        _ => return function,
    };
    place.store(function.as_ptr(), Ordering::Release);
    Function::new(shared).unwrap_or(function)
}

/// `cblas_sgemm` as libmlx calls it, where libmlx is bound to OpenBLAS.
pub fn of_mlx() -> Option<Gemm<f32, f32>> {
    bound().map(|_| sgemm as Gemm<f32, f32>)
}

/// OpenBLAS's product of float32 by one thread, or, where that is said, what libmlx has in its place.
#[derive(Clone, Copy)]
pub struct Sgemm {
    function: Gemm<f32, f32>,
    own: fn(&Product<f32, f32>) -> bool,
}

/// It, where libmlx is bound to OpenBLAS.
pub fn bound() -> Option<Sgemm> {
    let function = Function::new(SGEMM.load(Ordering::Acquire))?;
    // SAFETY: `replace` has put that function there.
    let function = unsafe { mem::transmute::<Function, Gemm<f32, f32>>(function) };
    Some(Sgemm {
        function,
        own: |_| false,
    })
}

impl Sgemm {
    /// For chunks of rows of a product, m x n by k terms: with the bits that libmlx gets for the whole of it.
    pub fn for_chunks_of(self, [m, n, k]: [usize; 3], b_turned: bool) -> Self {
        // SAFETY: no conditions.
        let is_small = unsafe { faststep_is_small_product(m, n, k, usize::from(b_turned)) };
        let own = if is_small { without_openblas } else { self.own };
        Self { own, ..self }
    }

    /// c = a b + beta c, or of a^T or b^T where `transposed`, of matrices that lie row after row: m x k, k x n, m x n, each
    /// with how many numbers a row is from the next.
    ///
    /// # Safety
    /// `a`, `b` and `c` have that many rows, and nobody else writes to `c` meanwhile.
    pub unsafe fn call(
        self,
        transposed: [bool; 2],
        shape: [usize; 3],
        a: (*const f32, usize),
        b: (*const f32, usize),
        beta: f32,
        c: (*mut f32, usize),
    ) {
        let int = |size| c_int::try_from(size).unwrap_or(0);
        let product = Product {
            function: self.function,
            own: self.own,
            order: BY_ROWS,
            transposed: transposed.map(|is| if is { TRANSPOSED[0] } else { PLAIN }),
            shape: shape.map(int),
            alpha: 1.0,
            a: a.0,
            lda: int(a.1),
            b: b.0,
            ldb: int(b.1),
            beta,
            c: c.0,
            ldc: int(c.1),
        };
        product.whole();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_products_stay_whole() {
        assert_eq!(Cut::of(128, 128, 128 * 128 * 128, 2), None);
        assert_eq!(Cut::of(100, 100, 100 * 100 * 100_000, 2), None);
    }

    #[test]
    fn rows_are_cut_by_the_number_of_threads_and_columns_without_regard_to_it() {
        let count = |m, n, threads| Cut::of(m, n, m * n * 1024, threads).map(|it| it.count);
        assert_eq!(count(1024, 1024, 2), Some(4));
        assert_eq!(count(1024, 1024, 4), Some(8));
        for threads in 2..9 {
            assert_eq!(count(32, 3072, threads), Some(12));
        }
    }

    #[test]
    fn chunks_cover_all_rows_and_none_is_thin() {
        let is_good = |m: usize, cut: Cut| {
            let ranges: Vec<_> = (0..cut.count).map(|at| cut.range(at)).collect();
            (ranges[0].start, ranges[cut.count - 1].end) == (0, m)
                && ranges.windows(2).all(|pair| pair[0].end == pair[1].start)
                && ranges
                    .iter()
                    .all(|range| range.start % EDGE == 0 && range.len() > EDGE)
        };
        for m in 192..3000 {
            let cut = Cut::of(m, 700, m * 700 * 300, 3);
            assert!(cut.is_some_and(|cut| is_good(m, cut)), "{m} rows: {cut:?}");
        }
    }
}
