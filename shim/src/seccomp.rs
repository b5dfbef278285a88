//! A filter of system calls over the VMM, whatever it filters itself: what no VMM needs is refused.
//!
//! A deny list, because the allow list is the VMM's own (QEMU's `-sandbox`, the filters of the others), which changes
//! with its version. Refused with an error and not with death: a VMM tries some of it and goes on without. Of another
//! architecture's calls (x32's too) no list speaks, so they end the process.

use std::io::{Error, Result};

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;
/// Bit of the calls of x32, which have the same architecture.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
#[cfg(target_arch = "x86_64")]
const IF_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
/// Where the kernel puts them: number, architecture, low half of the first argument (both machines are little-endian).
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const FIRST_ARGUMENT_AT: u32 = 16;

const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// Calls of numbers that `libc` has no names for everywhere; they are the same on every architecture.
mod newer {
    use libc::c_long;
    pub const OPEN_TREE: c_long = 428;
    pub const MOVE_MOUNT: c_long = 429;
    pub const FSOPEN: c_long = 430;
    pub const FSCONFIG: c_long = 431;
    pub const FSMOUNT: c_long = 432;
    pub const FSPICK: c_long = 433;
    pub const CLONE3: c_long = 435;
    pub const PIDFD_GETFD: c_long = 438;
    pub const PROCESS_MADVISE: c_long = 440;
    pub const MOUNT_SETATTR: c_long = 442;
    pub const QUOTACTL_FD: c_long = 443;
    pub const FCHMODAT2: c_long = 452;
    pub const STATMOUNT: c_long = 457;
    pub const LISTMOUNT: c_long = 458;
    pub const SETXATTRAT: c_long = 463;
    pub const OPEN_TREE_ATTR: c_long = 467;
    pub const IO_URING: [c_long; 3] = [425, 426, 427];
}

/// Refused as if it were not allowed.
const NOT_PERMITTED: &[libc::c_long] = &[
    // Another view of files.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    newer::OPEN_TREE,
    newer::MOVE_MOUNT,
    newer::FSOPEN,
    newer::FSCONFIG,
    newer::FSMOUNT,
    newer::FSPICK,
    newer::MOUNT_SETATTR,
    newer::STATMOUNT,
    newer::LISTMOUNT,
    newer::OPEN_TREE_ATTR,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_mknodat,
    // Of files it was given and, as an ordinary user's, owns: who else may use them.
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    newer::FCHMODAT2,
    newer::SETXATTRAT,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    // Memory that is no process's: no limit of ours bounds it, and it is not taken when the host runs out.
    libc::SYS_shmget,
    libc::SYS_msgget,
    libc::SYS_semget,
    // Other namespaces.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    newer::PIDFD_GETFD,
    newer::PROCESS_MADVISE,
    // The kernel itself, and its wide or seldom used interfaces.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_quotactl,
    newer::QUOTACTL_FD,
    libc::SYS_personality,
    libc::SYS_vhangup,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_lookup_dcookie,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

const fn plain(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

/// Go on with the next instruction if it holds, else pass over `otherwise` of them.
const fn unless(code: u16, k: u32, otherwise: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: otherwise, k }
}

const fn refuse(errno: libc::c_int) -> libc::sock_filter {
    plain(RETURN, libc::SECCOMP_RET_ERRNO | errno as u32)
}

/// The filter. `memfd`: for a VMM that has its guest's memory in one; else they are refused, as System V's is. Pure.
pub fn program(memfd: bool) -> Vec<libc::sock_filter> {
    let kill = plain(RETURN, libc::SECCOMP_RET_KILL_PROCESS);
    let allow = plain(RETURN, libc::SECCOMP_RET_ALLOW);
    let mut code = vec![plain(LOAD, ARCHITECTURE_AT)];
    code.push(libc::sock_filter { code: IF_EQUAL, jt: 1, jf: 0, k: ARCHITECTURE });
    code.extend([kill, plain(LOAD, NUMBER_AT)]);
    #[cfg(target_arch = "x86_64")]
    code.extend([unless(IF_LEAST, X32, 1), kill]);
    for &number in NOT_PERMITTED {
        code.extend([unless(IF_EQUAL, number as u32, 1), refuse(libc::EPERM)]);
    }
    if !memfd {
        code.extend([unless(IF_EQUAL, libc::SYS_memfd_create as u32, 1), refuse(libc::EPERM)]);
    }
    // Its flags are in memory, which a filter cannot read: without it, libc uses `clone`.
    for number in newer::IO_URING.into_iter().chain([newer::CLONE3]) {
        code.extend([unless(IF_EQUAL, number as u32, 1), refuse(libc::ENOSYS)]);
    }
    code.extend([
        unless(IF_EQUAL, libc::SYS_clone as u32, 4),
        plain(LOAD, FIRST_ARGUMENT_AT),
        unless(IF_ANY_BIT, NEW_NAMESPACES, 1),
        refuse(libc::EPERM),
        allow,
        // Sockets of the network are given, not made; vsock and some others know no namespaces. A pair is made of two
        // sockets of its family before the family is asked whether it has pairs: its module is loaded by then.
        libc::sock_filter { code: IF_EQUAL, jt: 1, jf: 0, k: libc::SYS_socket as u32 },
        unless(IF_EQUAL, libc::SYS_socketpair as u32, 3),
        plain(LOAD, FIRST_ARGUMENT_AT),
        libc::sock_filter { code: IF_EQUAL, jt: 1, jf: 0, k: libc::AF_UNIX as u32 },
        refuse(libc::EAFNOSUPPORT),
        allow,
    ]);
    code
}

/// Put it over this thread and all it will execute. Needs `no_new_privs`.
pub fn install(memfd: bool) -> Result<()> {
    let mut code = program(memfd);
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    // SAFETY: the kernel copies the program before the call returns.
    let done = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as libc::c_ulong, &program, 0, 0)
    };
    if done < 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would do with a call: a machine for the instructions used above.
    fn verdict(architecture: u32, number: i64, argument: u32) -> u32 {
        verdict_of(program(false), architecture, number, argument)
    }

    fn verdict_of(code: Vec<libc::sock_filter>, architecture: u32, number: i64, argument: u32) -> u32 {
        let (mut at, mut loaded) = (0usize, 0u32);
        loop {
            let step = code[at];
            let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
            at += 1 + match step.code {
                LOAD => {
                    loaded = match step.k {
                        NUMBER_AT => number as u32,
                        ARCHITECTURE_AT => architecture,
                        FIRST_ARGUMENT_AT => argument,
                        other => panic!("nothing at {other}"),
                    };
                    0
                }
                IF_EQUAL => jump(loaded == step.k),
                #[cfg(target_arch = "x86_64")]
                IF_LEAST => jump(loaded >= step.k),
                IF_ANY_BIT => jump(loaded & step.k != 0),
                RETURN => return step.k,
                other => panic!("no such instruction: {other}"),
            };
        }
    }

    fn here(number: i64, argument: u32) -> u32 {
        verdict(ARCHITECTURE, number, argument)
    }

    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

    #[test]
    fn what_no_vmm_needs_is_refused_and_the_rest_is_not() {
        for number in [libc::SYS_mount, libc::SYS_ptrace, libc::SYS_bpf, libc::SYS_setns, libc::SYS_fchmod, newer::OPEN_TREE_ATTR] {
            assert_eq!(here(number, 0), EPERM);
        }
        for number in [newer::CLONE3, 425, 427] {
            assert_eq!(here(number, 0), ENOSYS);
        }
        for number in [libc::SYS_read, libc::SYS_openat, libc::SYS_mmap, libc::SYS_execve, libc::SYS_seccomp, 439] {
            assert_eq!(here(number, u32::MAX), libc::SECCOMP_RET_ALLOW);
        }
    }

    #[test]
    fn memory_that_is_no_processs_is_refused() {
        for number in [libc::SYS_shmget, libc::SYS_msgget, libc::SYS_memfd_create] {
            assert_eq!(here(number, 0), EPERM);
        }
        assert_eq!(verdict_of(program(true), ARCHITECTURE, libc::SYS_memfd_create, 0), libc::SECCOMP_RET_ALLOW);
        assert_eq!(verdict_of(program(true), ARCHITECTURE, libc::SYS_shmget, 0), EPERM);
    }

    #[test]
    fn threads_are_made_but_no_namespaces() {
        let thread = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        assert_eq!(here(libc::SYS_clone, thread as u32), libc::SECCOMP_RET_ALLOW);
        for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET] {
            assert_eq!(here(libc::SYS_clone, (flag | libc::SIGCHLD) as u32), EPERM);
        }
    }

    #[test]
    fn only_local_sockets_are_made() {
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            assert_eq!(here(call, libc::AF_UNIX as u32), libc::SECCOMP_RET_ALLOW);
            for family in [libc::AF_INET, libc::AF_VSOCK, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_TIPC] {
                assert_eq!(here(call, family as u32), libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32);
            }
        }
    }

    #[test]
    fn calls_of_another_architecture_end_it() {
        assert_eq!(verdict(0x4000_0003, libc::SYS_read, 0), libc::SECCOMP_RET_KILL_PROCESS);
        #[cfg(target_arch = "x86_64")]
        assert_eq!(here(i64::from(X32) | libc::SYS_read, 0), libc::SECCOMP_RET_KILL_PROCESS);
    }
}
