//! How the C library deals with freed memory. A training step frees what the next one allocates again, hundreds of megabytes in several threads;
//! given back to the system in between, as GNU's library does by and by, it comes back page by page, which took up to a sixth of a step.
#![allow(unsafe_code)]

/// From now on freed memory stays with the process, but for pieces that were mapped one by one and whole arenas of threads. Where the C
/// library is another one nothing happens.
pub fn keep_what_is_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// The most that the library takes: larger pieces are mapped one by one.
        const LARGEST: libc::c_int = 32 << 20;
        // SAFETY: two numbers of the allocator are set, before any thread is started. A library that does not take them leaves things as they
        // were.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST);
            libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        }
    }
}
