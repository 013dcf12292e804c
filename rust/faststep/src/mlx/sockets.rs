//! Sockets of MLX's ring, waited for instead of asked without a pause.
//!
//! A ring has a thread for each of its sockets, which asks whether it can send or receive, again and again, for as long as there is
//! something to exchange. Where ranks share few processors, they take them from the rank that all wait for: of the time of the
//! processor that four ranks on two cores take, four fifths. After [`wait`], a thread that has asked some times in vain sleeps until its
//! socket is ready.
//!
//! # Guarantee
//! Each call sends or receives what it would have, with the same result and `errno`, at most [`LONGEST`] later. Nothing but
//! libmlx's calls changes.
//!
//! # Rationale
//! A thread that only receives does not hear of what is to be sent in the meantime, so it sleeps no longer than that at a time.
//!
//! # Limits
//! Linux, where libmlx's imports can be replaced (`mlx/rebind.rs`); elsewhere nothing changes. It lasts as long as the process.
#![allow(unsafe_code)]

/// Have libmlx's threads wait for their sockets from now on.
pub use imp::wait;

#[cfg(not(target_os = "linux"))]
mod imp {
    pub fn wait() {}
}

#[cfg(target_os = "linux")]
mod imp {
    use crate::mlx::rebind::{Function, Imports};
    use libc::{c_int, c_short, c_void, pollfd, size_t, ssize_t, timespec};
    use std::{cell::Cell, io, ptr, sync::Once};

    /// So many times in a row a socket is asked in vain before its thread sleeps: a neighbour that is there answers sooner.
    const PATIENCE: u32 = 50;
    /// The longest sleep.
    const LONGEST: timespec = timespec {
        tv_sec: 0,
        tv_nsec: 200_000,
    };

    /// What this thread has asked for in vain since something came of it.
    #[derive(Clone, Copy, Default)]
    struct InVain {
        socket: c_int,
        events: c_short,
        times: u32,
    }

    thread_local! {
        static IN_VAIN: Cell<InVain> = const { Cell::new(InVain { socket: -1, events: 0, times: 0 }) };
    }

    pub fn wait() {
        static BOUND: Once = Once::new();
        BOUND.call_once(|| {
            let replacement = |name: &std::ffi::CStr| match name.to_bytes() {
                b"recv" => Function::new(recv as *mut c_void),
                b"send" => Function::new(send as *mut c_void),
                _ => None,
            };
            // where that fails, MLX stays as it is
            _ = Imports::of_mlx().and_then(|imports| imports.replace(replacement));
        });
    }

    unsafe extern "C" fn recv(
        socket: c_int,
        buffer: *mut c_void,
        length: size_t,
        flags: c_int,
    ) -> ssize_t {
        // SAFETY: recv's caller keeps to its conditions.
        patiently(socket, libc::POLLIN, || unsafe {
            libc::recv(socket, buffer, length, flags)
        })
    }

    unsafe extern "C" fn send(
        socket: c_int,
        buffer: *const c_void,
        length: size_t,
        flags: c_int,
    ) -> ssize_t {
        // SAFETY: send's caller keeps to its conditions.
        patiently(socket, libc::POLLOUT, || unsafe {
            libc::send(socket, buffer, length, flags)
        })
    }

    /// The result of a call that waits for an event of a socket.
    fn patiently(socket: c_int, event: c_short, call: impl Fn() -> ssize_t) -> ssize_t {
        let done = call();
        if !is_in_vain(done) {
            IN_VAIN.set(InVain::default());
            return done;
        }
        let mut last = IN_VAIN.get();
        if last.socket != socket {
            last = InVain {
                socket,
                ..InVain::default()
            };
        }
        last.times += 1;
        // a round ends with the event that it began with: what else the thread is to do has been asked for by then
        let sleeps = last.times > PATIENCE && last.events & event != 0;
        last.events |= event;
        if !sleeps {
            IN_VAIN.set(last);
            return done;
        }
        sleep(socket, last.events);
        IN_VAIN.set(InVain { events: 0, ..last });
        call()
    }

    fn is_in_vain(done: ssize_t) -> bool {
        done < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
    }

    fn sleep(socket: c_int, events: c_short) {
        let mut one = pollfd {
            fd: socket,
            events,
            revents: 0,
        };
        // SAFETY: one entry, and no mask of signals.
        unsafe { libc::ppoll(&raw mut one, 1, &LONGEST, ptr::null()) };
    }

    #[cfg(test)]
    mod tests {
        use super::{recv, send, PATIENCE};
        use std::{
            io::{ErrorKind, Result},
            os::{fd::AsRawFd, unix::net::UnixStream},
            thread,
            time::Duration,
        };

        #[test]
        fn a_socket_gives_what_it_would_have_given() -> Result<()> {
            let (one, other) = UnixStream::pair()?;
            for socket in [&one, &other] {
                socket.set_nonblocking(true)?;
            }
            let (one, other) = (one.as_raw_fd(), other.as_raw_fd());
            let mut got = [0u8; 4];
            // SAFETY: the buffers are as long as they say.
            let mut receive = || unsafe { recv(one, got.as_mut_ptr().cast(), 4, 0) };
            for _ in 0..3 * PATIENCE {
                assert_eq!(receive(), -1, "nothing has been sent");
                assert_eq!(
                    std::io::Error::last_os_error().kind(),
                    ErrorKind::WouldBlock
                );
            }
            let sender = thread::spawn(move || {
                thread::sleep(Duration::from_millis(5));
                // SAFETY: as above.
                unsafe { send(other, b"four".as_ptr().cast(), 4, 0) }
            });
            let received = loop {
                let received = receive();
                if received >= 0 {
                    break received;
                }
            };
            assert_eq!((received, sender.join().ok()), (4, Some(4)));
            assert_eq!(&got, b"four");
            Ok(())
        }

        #[test]
        fn a_full_socket_and_a_closed_one_say_so() -> Result<()> {
            let (one, other) = UnixStream::pair()?;
            one.set_nonblocking(true)?;
            let data = vec![1u8; 1 << 16];
            // SAFETY: the buffer is as long as it says.
            let send = || unsafe {
                send(
                    one.as_raw_fd(),
                    data.as_ptr().cast(),
                    data.len(),
                    libc::MSG_NOSIGNAL,
                )
            };
            while send() > 0 {}
            for _ in 0..3 * PATIENCE {
                assert_eq!(send(), -1);
            }
            drop(other);
            assert_eq!(send(), -1);
            assert_ne!(
                std::io::Error::last_os_error().kind(),
                ErrorKind::WouldBlock
            );
            Ok(())
        }
    }
}
