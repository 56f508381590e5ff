//! The only room that calls MPI. Owned buffers come in and are lent to the library until their requests are done; nothing
//! can read, write or free what the library may still touch. Everything here stays on the communication thread.
#![allow(unsafe_code)]

use crate::CommError;
use ::mpi::ffi;
use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The MPI library, initialised, with a communicator of our own over all processes.
pub(super) struct Library {
    comm: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
    /// The lowest of the ranks that share memory with this one.
    pub first_of_host: usize,
    /// How many messages were handed to MPI.
    pub sent: Arc<AtomicU64>,
    /// Whether we initialised MPI and so have to finalize it.
    ours: bool,
}

impl Library {
    /// Initialises MPI, or joins a program that did so at level `MPI_THREAD_MULTIPLE`.
    pub fn start() -> Result<Library, CommError> {
        let ours = initialise()?;
        // SAFETY: MPI is initialised and not finalized; these are its predefined handles, constant from then on.
        let (world, mut comm, on_error) =
            unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_NULL, ffi::RSMPI_ERRORS_RETURN) };
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: handles are valid and the results are written to live variables. A communicator of our own keeps our
        // messages apart from those of the program. Errors are returned: the default handler ends the process.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(world, on_error))?;
            check(ffi::MPI_Comm_dup(world, &mut comm))?;
            check(ffi::MPI_Comm_set_errhandler(comm, on_error))?;
            check(ffi::MPI_Comm_rank(comm, &mut rank))?;
            check(ffi::MPI_Comm_size(comm, &mut size))?;
        }
        let first_of_host = first_of_host(comm, rank)?;
        let sent = Arc::default();
        Ok(Library { comm, rank: rank as usize, size: size as usize, first_of_host, sent, ours })
    }

    /// The other ranks, the next one first, so that not all ranks begin with the same one.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.size);
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// Shuts MPI down if it is ours. Waits for all ranks to do the same.
    pub fn finalize(self) {
        if self.ours {
            // SAFETY: MPI is initialised, called on the thread that did so, and no request of ours is open.
            unsafe { ffi::MPI_Finalize() };
        }
    }

    /// Ends all processes of the job.
    pub fn abort(&self, status: i32) {
        // SAFETY: MPI is initialised and the communicator valid.
        unsafe { ffi::MPI_Abort(self.comm, status) };
    }
}

/// The lowest of the ranks that can share memory with this one, as MPI divides them. All ranks call this.
fn first_of_host(comm: ffi::MPI_Comm, rank: c_int) -> Result<usize, CommError> {
    let mut first = rank;
    // SAFETY: the communicator is valid, constants are those of the library, results are written to live variables, and the group of
    // the host is used between its making and its end only. Its members are in the order of their ranks, so its first has the lowest.
    unsafe {
        let mut host = ffi::RSMPI_COMM_NULL;
        let (shared, nothing) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
        check(ffi::MPI_Comm_split_type(comm, shared, rank, nothing, &mut host))?;
        check(ffi::MPI_Bcast((&raw mut first).cast(), 1, ffi::RSMPI_INT32_T, 0, host))?;
        check(ffi::MPI_Comm_free(&mut host))?;
    }
    Ok(first as usize)
}

/// True when this call initialised MPI, false when the program had done so.
fn initialise() -> Result<bool, CommError> {
    let (mut initialised, mut finalized, mut level): (c_int, c_int, c_int) = (0, 0, 0);
    // SAFETY: these two may be called at any time; the results are written to live variables.
    unsafe {
        check(ffi::MPI_Initialized(&mut initialised))?;
        check(ffi::MPI_Finalized(&mut finalized))?;
    }
    if finalized != 0 {
        return Err(failed("MPI was finalized in this process and cannot start again"));
    }
    // SAFETY: MPI is initialised exactly when told so above; argc and argv may be null; these are predefined levels.
    let needed = unsafe {
        if initialised != 0 {
            check(ffi::MPI_Query_thread(&mut level))?;
            ffi::RSMPI_THREAD_MULTIPLE
        } else {
            let needed = ffi::RSMPI_THREAD_SERIALIZED;
            check(ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), needed, &mut level))?;
            needed
        }
    };
    if level < needed {
        return Err(failed(&format!(
            "MPI has thread level {level}, the communication thread needs {needed}"
        )));
    }
    Ok(initialised == 0)
}

pub(super) fn failed(reason: &str) -> CommError {
    CommError::Engine { engine: "mpi", reason: reason.to_string() }
}

fn check(code: c_int) -> Result<(), CommError> {
    if code as u32 == ffi::MPI_SUCCESS {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the buffer is as long as MPI may write, and the length is written to a live variable.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let text = &text[..(length.max(0) as usize).min(text.len())];
    Err(failed(String::from_utf8_lossy(text).trim()))
}

/// Memory that can be lent to MPI.
///
/// # Safety
/// `base` must point to `bytes` initialised bytes that stay where they are while the value is moved, and that may be written
/// if `WRITABLE`. Any bytes must be a valid content then.
pub(super) unsafe trait Memory {
    /// Whether MPI may receive into it.
    const WRITABLE: bool;
    /// Where it begins.
    fn base(&mut self) -> *mut u8;
    /// How long it is.
    fn bytes(&self) -> usize;
}

// SAFETY: the allocation of a vector stays in place when the vector is moved, and any bytes are valid u8.
unsafe impl Memory for Vec<u8> {
    const WRITABLE: bool = true;
    fn base(&mut self) -> *mut u8 {
        self.as_mut_ptr()
    }
    fn bytes(&self) -> usize {
        self.len()
    }
}

// SAFETY: as above, and any bits are a valid f32.
unsafe impl Memory for Vec<f32> {
    const WRITABLE: bool = true;
    fn base(&mut self) -> *mut u8 {
        self.as_mut_ptr().cast()
    }
    fn bytes(&self) -> usize {
        size_of_val(self.as_slice())
    }
}

// SAFETY: as above; shared, so only for reading.
unsafe impl Memory for Arc<Vec<u8>> {
    const WRITABLE: bool = false;
    fn base(&mut self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// A buffer parts of which are lent to MPI, each under a label that comes back when that transfer is done.
///
/// Ranges are in bytes. A range that is being received is untouchable, one that is being sent can be read.
/// Dropping it with transfers open leaks the buffer, because MPI may still use it.
pub(super) struct Lent<M: Memory, L> {
    memory: ManuallyDrop<M>,
    base: *mut u8,
    requests: Vec<ffi::MPI_Request>,
    loans: Vec<Loan<L>>,
    done: Vec<c_int>,
    taken: bool,
}

struct Loan<L> {
    range: Range<usize>,
    receiving: bool,
    label: L,
}

impl<M: Memory, L> Lent<M, L> {
    pub fn new(mut memory: M) -> Lent<M, L> {
        let base = memory.base();
        let memory = ManuallyDrop::new(memory);
        Lent { memory, base, requests: Vec::new(), loans: Vec::new(), done: Vec::new(), taken: false }
    }

    /// Starts to send a range to a rank.
    pub fn send(
        &mut self,
        lib: &Library,
        range: Range<usize>,
        to: usize,
        tag: c_int,
        label: L,
    ) -> Result<(), CommError> {
        let (start, count) = self.lend(&range, true);
        let mut request = null();
        // SAFETY: `lend` checked that the range lies in the buffer and is not being received into; the buffer lives until
        // the request is done (see `drop`), and nobody gets to write to it before (see `write`).
        check(unsafe {
            ffi::MPI_Isend(start.cast_const(), count, byte(), to as c_int, tag, lib.comm, &mut request)
        })?;
        lib.sent.fetch_add(1, Ordering::Relaxed);
        self.requests.push(request);
        self.loans.push(Loan { range, receiving: false, label });
        Ok(())
    }

    /// Starts to receive from a rank into a range. A shorter message is fine.
    pub fn receive(
        &mut self,
        lib: &Library,
        range: Range<usize>,
        from: usize,
        tag: c_int,
        label: L,
    ) -> Result<(), CommError> {
        self.receive_of(lib, range, from as c_int, tag, label)
    }

    /// The same from whichever rank sends first.
    pub fn receive_any(
        &mut self,
        lib: &Library,
        range: Range<usize>,
        tag: c_int,
        label: L,
    ) -> Result<(), CommError> {
        // SAFETY: a constant of the library.
        let anybody = unsafe { ffi::RSMPI_ANY_SOURCE };
        self.receive_of(lib, range, anybody, tag, label)
    }

    fn receive_of(
        &mut self,
        lib: &Library,
        range: Range<usize>,
        source: c_int,
        tag: c_int,
        label: L,
    ) -> Result<(), CommError> {
        assert!(M::WRITABLE);
        let (start, count) = self.lend(&range, false);
        let mut request = null();
        // SAFETY: as in `send`; the range is writable and `lend` checked that no other transfer has a part in it.
        check(unsafe { ffi::MPI_Irecv(start, count, byte(), source, tag, lib.comm, &mut request) })?;
        self.requests.push(request);
        self.loans.push(Loan { range, receiving: true, label });
        Ok(())
    }

    /// Lets MPI work, and hands out the labels of the transfers that are done.
    pub fn progress(&mut self, mut each: impl FnMut(L)) -> Result<bool, CommError> {
        if self.requests.is_empty() {
            return Ok(false);
        }
        let mut count: c_int = 0;
        self.done.resize(self.requests.len(), 0);
        // SAFETY: both arrays have as many entries as said; all requests are open; statuses are not wanted.
        check(unsafe {
            let length = self.requests.len() as c_int;
            let ignore = ffi::RSMPI_STATUSES_IGNORE;
            ffi::MPI_Testsome(length, self.requests.as_mut_ptr(), &mut count, self.done.as_mut_ptr(), ignore)
        })?;
        // From the highest on, so that removing one does not move another that is still to be removed.
        let done = &mut self.done[..count.max(0) as usize];
        done.sort_unstable_by(|a, b| b.cmp(a));
        for &index in done.iter() {
            self.requests.swap_remove(index as usize);
            each(self.loans.swap_remove(index as usize).label);
        }
        Ok(count > 0)
    }

    /// Whether no transfer is open.
    pub fn idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// The labels of the open transfers.
    pub fn open(&self) -> impl Iterator<Item = &L> {
        self.loans.iter().map(|loan| &loan.label)
    }

    /// A range that is not being received into.
    pub fn read(&self, range: Range<usize>) -> &[u8] {
        self.assert_free(&range, true);
        // SAFETY: the range lies in the buffer, which is initialised, and nothing writes to it while it is borrowed:
        // new receives need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start), range.len()) }
    }

    /// A range in which no transfer has a part.
    pub fn write(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(M::WRITABLE);
        self.assert_free(&range, false);
        // SAFETY: as above, and nothing reads it either.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }

    /// The buffer, once no transfer is open.
    pub fn take(mut self) -> M {
        assert!(self.idle() && !self.taken);
        self.taken = true;
        // SAFETY: no request refers to the buffer, and `taken` keeps everybody, `drop` included, from using it again.
        unsafe { ManuallyDrop::take(&mut self.memory) }
    }

    fn lend(&self, range: &Range<usize>, readable: bool) -> (*mut c_void, c_int) {
        self.assert_free(range, readable);
        assert!(range.len() <= c_int::MAX as usize);
        // SAFETY: the range lies in the buffer.
        let start = unsafe { self.base.add(range.start) };
        (start.cast(), range.len() as c_int)
    }

    /// The guard of every access: in bounds, and no transfer in the way. Sends may share a range with readers.
    fn assert_free(&self, range: &Range<usize>, readable: bool) {
        assert!(range.start <= range.end && range.end <= self.memory.bytes());
        let clash = |loan: &&Loan<L>| loan.range.start < range.end && range.start < loan.range.end;
        assert!(!self.loans.iter().filter(clash).any(|loan| loan.receiving || !readable));
    }
}

impl Lent<Vec<u8>, ()> {
    /// What has come from a rank under a tag, if anything has: a buffer of its length, into which it is received from now on.
    /// No memory is taken for what is longer than `most`.
    pub fn come(lib: &Library, from: usize, tag: c_int, most: usize) -> Result<Option<Self>, CommError> {
        let (mut flag, mut length): (c_int, c_int) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: a constant of the library.
        let mut message = unsafe { ffi::RSMPI_MESSAGE_NULL };
        // SAFETY: the results are written to live variables.
        check(unsafe {
            ffi::MPI_Improbe(from as c_int, tag, lib.comm, &mut flag, &mut message, status.as_mut_ptr())
        })?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: a message was found, so the status was written; the length is written to a live variable.
        check(unsafe { ffi::MPI_Get_count(status.as_ptr(), byte(), &mut length) })?;
        if length < 0 || length as usize > most {
            return Err(failed(&format!("rank {from} sent {length} bytes where {most} are the most")));
        }
        let mut buffer = Lent::new(vec![0; length as usize]);
        let (start, count) = buffer.lend(&(0..length as usize), false);
        let mut request = null();
        // SAFETY: as in `receive_of`, and the message is the one found above, received nowhere else.
        check(unsafe { ffi::MPI_Imrecv(start, count, byte(), &mut message, &mut request) })?;
        buffer.requests.push(request);
        buffer.loans.push(Loan { range: 0..length as usize, receiving: true, label: () });
        Ok(Some(buffer))
    }
}

impl<M: Memory, L> Drop for Lent<M, L> {
    fn drop(&mut self) {
        if self.idle() && !self.taken {
            // SAFETY: no request refers to the buffer, and it was not taken.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

fn null() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}
