/* A QEMU that has been linked once and forks each VM, instead of one that is exec'ed and linked for each.
 *
 * Preloaded (LD_PRELOAD) into QEMU's own binary, this takes the place of main(): it waits on a socket for orders,
 * forks for each, and the child, fenced in first, goes on as QEMU's main() with the order's arguments. QEMU's own
 * -daemonize forks at about the same point; its libraries are prepared for it (pthread_atfork).
 *
 * The order is one packet: `struct order`, then the arguments, each ended by a NUL; with it come descriptors:
 * /dev/null, the log, the network namespace, one cgroup.procs for each hierarchy, then what QEMU inherits, which
 * it finds under the numbers FIRST_FD and up. The answer is the child's pid with a pidfd of it. See launcher.py.
 */

typedef unsigned long size_t;
typedef unsigned int u32;

struct iovec { void *base; size_t len; };
struct msghdr { void *name; u32 namelen; struct iovec *iov; size_t iovlen; void *control; size_t controllen; int flags; };
struct cmsghdr { size_t len; int level, type; };
struct rlimit { unsigned long now, most; };
struct cap_header { u32 version; int pid; };
struct cap_data { u32 effective, permitted, inheritable; };

extern void *dlsym(void *, const char *);
extern char *getenv(const char *);
extern int unsetenv(const char *), atoi(const char *);
extern int fork(void), setsid(void), dup2(int, int), close(int), setns(int, int), prctl(int, ...);
extern int close_range(u32, u32, int);
extern int setrlimit(int, const struct rlimit *), setgroups(size_t, const u32 *);
extern int setresuid(u32, u32, u32), setresgid(u32, u32, u32);
extern int capset(struct cap_header *, const struct cap_data *), pidfd_open(int, u32);
extern void *signal(int, void *);
extern long recvmsg(int, struct msghdr *, int), sendmsg(int, const struct msghdr *, int), write(int, const void *, size_t);
extern void _exit(int);
extern size_t strlen(const char *);
extern void *memcpy(void *, const void *, size_t);

enum {
    FIRST_FD = 100, MOST_FDS = 64, MOST_ARGUMENTS = 512,
    SIGCHLD_ = 17, SIG_DEFAULT = 0, SIG_IGNORE = 1,
    SOL_SOCKET_ = 1, SCM_RIGHTS_ = 1, MSG_NOSIGNAL_ = 0x4000, MSG_CMSG_CLOEXEC_ = 0x40000000,
    CLONE_NEWNET_ = 0x40000000, RLIMIT_FSIZE_ = 1, RLIMIT_CORE_ = 4, RLIMIT_NOFILE_ = 7,
    PR_SET_DUMPABLE_ = 4, PR_CAPBSET_DROP_ = 24, PR_SET_NO_NEW_PRIVS_ = 38, PR_SET_THP_DISABLE_ = 41,
    CAPABILITY_VERSION_3 = 0x20080522,
};

struct order { u32 uid, cgroups, fds, descriptors, no_huge_pages, unused; unsigned long file_size; };

typedef int (*main_function)(int, char **, char **);
typedef int (*start_function)(main_function, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static main_function qemu_main;
static int orders;
static char packet[1 << 16];
static char *arguments[MOST_ARGUMENTS + 1];

/* In the child, before QEMU: say what failed in the VM's log and give up. */
static void must(int fine, const char *what)
{
    static const char prefix[] = "the launcher could not ";
    if (fine)
        return;
    write(2, prefix, sizeof prefix - 1);
    write(2, what, strlen(what));
    write(2, "\n", 1);
    _exit(125);
}

static void answer(int pid, int pidfd)
{
    union { char bytes[32]; struct cmsghdr head; } control;
    struct iovec part = { &pid, sizeof pid };
    struct msghdr message = { 0, 0, &part, 1, 0, 0, 0 };

    if (pidfd >= 0) {
        control.head.len = sizeof control.head + sizeof pidfd;
        control.head.level = SOL_SOCKET_;
        control.head.type = SCM_RIGHTS_;
        memcpy(control.bytes + sizeof control.head, &pidfd, sizeof pidfd);
        message.control = control.bytes;
        message.controllen = sizeof control.head + 8;
    }
    sendmsg(orders, &message, MSG_NOSIGNAL_);
}

/* The fence, in the order in which privileges are given up; the cgroup first, so that nothing runs outside it. */
static void fence(const struct order *order, const int *fds, int count)
{
    struct rlimit core = { 0, 0 }, descriptors = { order->descriptors, order->descriptors };
    struct rlimit file_size = { order->file_size, order->file_size };
    struct cap_header header = { CAPABILITY_VERSION_3, 0 };
    struct cap_data none[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
    int first = 3 + (int)order->cgroups, i;

    dup2(fds[0], 0);
    dup2(fds[1], 1);
    dup2(fds[1], 2);
    must(count == first + (int)order->fds, "make sense of its order");
    for (i = 3; i < first; i++)
        must(write(fds[i], "0\n", 2) == 2, "join the cgroup");
    must(setns(fds[2], CLONE_NEWNET_) == 0, "enter the network namespace");
    for (i = 0; i < (int)order->fds; i++)
        must(dup2(fds[first + i], FIRST_FD + i) == FIRST_FD + i, "place a descriptor");
    for (i = 0; i < count; i++)
        close(fds[i]);
    close(orders);
    setsid();
    signal(SIGCHLD_, (void *)SIG_DEFAULT);
    if (order->no_huge_pages)
        prctl(PR_SET_THP_DISABLE_, 1, 0, 0, 0);
    must(setrlimit(RLIMIT_CORE_, &core) == 0, "forbid core dumps");
    must(setrlimit(RLIMIT_NOFILE_, &descriptors) == 0, "bound its descriptors");
    must(setrlimit(RLIMIT_FSIZE_, &file_size) == 0, "bound its files");
    /* Fails (EINVAL) at the first capability that this kernel does not know. */
    for (i = 0; i < 64 && prctl(PR_CAPBSET_DROP_, i, 0, 0, 0) == 0; i++)
        ;
    must(i > 30, "empty the bounding set");
    must(setgroups(0, 0) == 0, "leave its groups");
    must(setresgid(order->uid, order->uid, order->uid) == 0, "change its group");
    must(setresuid(order->uid, order->uid, order->uid) == 0, "change its user");
    must(capset(&header, none) == 0, "drop its capabilities");
    must(prctl(PR_SET_NO_NEW_PRIVS_, 1, 0, 0, 0) == 0, "set no_new_privs");
    /* As after an exec under this uid: QEMU opens its RAM by /proc/self/fd. */
    must(prctl(PR_SET_DUMPABLE_, 1, 0, 0, 0) == 0, "become dumpable");
}

static int launcher_main(int argc, char **argv, char **environment)
{
    (void)argc, (void)argv;
    signal(SIGCHLD_, (void *)SIG_IGNORE);
    /* What this was loaded from is no VM's business. */
    if (orders > 3)
        close_range(3, (u32)orders - 1, 0);
    close_range((u32)orders + 1, ~0u, 0);
    for (;;) {
        union { char bytes[16 + 4 * MOST_FDS]; struct cmsghdr head; } control;
        struct iovec part = { packet, sizeof packet - 1 };
        struct msghdr message = { 0, 0, &part, 1, control.bytes, sizeof control.bytes, 0 };
        const struct order *order = (const struct order *)packet;
        int fds[MOST_FDS], count = 0, pid, pidfd, i;
        long length = recvmsg(orders, &message, MSG_CMSG_CLOEXEC_);

        if (length < (long)sizeof *order)
            _exit(0); /* the node is gone, or wants us gone */
        packet[length] = 0;
        if (message.controllen >= sizeof control.head) {
            count = (int)((control.head.len - sizeof control.head) / sizeof(int));
            memcpy(fds, control.bytes + sizeof control.head, (size_t)count * sizeof(int));
        }
        pid = fork();
        if (pid == 0) {
            char *at = packet + sizeof *order;
            fence(order, fds, count);
            for (i = 0; i < MOST_ARGUMENTS && at < packet + length; at += strlen(at) + 1)
                arguments[i++] = at;
            arguments[i] = 0;
            return qemu_main(i, arguments, environment);
        }
        pidfd = pid > 0 ? pidfd_open(pid, 0) : -1;
        for (i = 0; i < count; i++)
            close(fds[i]);
        answer(pid, pidfd);
        if (pidfd >= 0)
            close(pidfd);
    }
}

int __libc_start_main(main_function main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*loader_fini)(void), void *stack_end)
{
    start_function next = (start_function)dlsym((void *)-1L, "__libc_start_main");
    char *number = getenv("GREENROOM_LAUNCHER");

    qemu_main = main;
    if (number)
        orders = atoi(number);
    unsetenv("LD_PRELOAD");
    unsetenv("GREENROOM_LAUNCHER");
    return next(number ? launcher_main : main, argc, argv, init, fini, loader_fini, stack_end);
}
