#include <poll.h>
#include <stdint.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void hearth_spin_until_changed(const int64_t *word, int64_t seen, int64_t most_ns) {
    int64_t end_ns = now_ns() + most_ns;
    do {
        for (int i = 0; i < 100; i++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (now_ns() < end_ns);
}

void hearth_spin_until_readable(int descriptor, int64_t most_ns) {
    struct pollfd polled = {.fd = descriptor, .events = POLLIN};
    int64_t end_ns = now_ns() + most_ns;
    while (poll(&polled, 1, 0) == 0 && now_ns() < end_ns) {
    }
}
