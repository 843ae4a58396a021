/* The calls of CUDA's driver that batches make, for machines without a GPU: device memory is host memory.
 *
 * Copies are made at once; the events behind them pass one after the other, each `fake_pass_ns` after the last
 * or after it was recorded. Every call is noted, and the driver can be told to refuse one.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MAX_CALLS = 1 << 16, MAX_PAGES = 1 << 12, INVALID = 1, NOT_READY = 600 };

typedef struct {
    const char *name;
    uint64_t first, second, third;
} call;

typedef struct {
    int64_t passes_ns; /* 0: not recorded */
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t address, num_bytes, handle;
} pages[MAX_PAGES];
static int64_t last_pass_ns;

call fake_calls[MAX_CALLS];
int64_t fake_num_calls, fake_num_pages, fake_num_events, fake_max_queued;
int64_t fake_pass_ns, fake_map_ns;
char fake_refused[64];    /* the name of a call ... */
int64_t fake_num_before;  /* ... of which so many more succeed */
int fake_code;            /* ... before all others return this */
static event *queued[MAX_CALLS];
static int64_t num_queued;
static event events[MAX_CALLS];
static int64_t num_events;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_ns(int64_t ns) {
    struct timespec left = {ns / 1000000000LL, ns % 1000000000LL};
    if (ns > 0)
        nanosleep(&left, NULL);
}

static int noted(const char *name, uint64_t first, uint64_t second, uint64_t third) {
    if (fake_num_calls < MAX_CALLS)
        fake_calls[fake_num_calls++] = (call){name, first, second, third};
    if (!strcmp(fake_refused, name) && fake_num_before-- <= 0)
        return fake_code;
    return 0;
}

void fake_reset(void) {
    fake_num_calls = fake_num_pages = fake_num_events = fake_max_queued = fake_pass_ns = fake_map_ns = 0;
    fake_refused[0] = 0;
    num_queued = num_events = last_pass_ns = 0;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context ? 0 : INVALID; }
int cuGetErrorName(int code, const char **name) { return *name = code == 2 ? "OUT_OF_MEMORY" : "INVALID", 0; }
int cuPointerGetAttribute(unsigned *kind, int which, uint64_t address) { return *kind = 1, which && address ? 0 : INVALID; }

int cuMemMap(uint64_t address, size_t num_bytes, size_t offset, uint64_t handle, uint64_t flags) {
    sleep_ns(fake_map_ns);
    pthread_mutex_lock(&lock);
    int code = noted("cuMemMap", address, num_bytes, handle);
    for (int64_t at = 0; at < fake_num_pages && !code; at++)
        if (pages[at].address < address + num_bytes && address < pages[at].address + pages[at].num_bytes)
            code = INVALID;
    if (!code && (offset || flags || fake_num_pages == MAX_PAGES))
        code = INVALID;
    if (!code) {
        pages[fake_num_pages].address = address;
        pages[fake_num_pages].num_bytes = num_bytes;
        pages[fake_num_pages++].handle = handle;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemSetAccess(uint64_t address, size_t num_bytes, const int *access, size_t num_access) {
    pthread_mutex_lock(&lock);
    int code = noted("cuMemSetAccess", address, num_bytes, (uint64_t)access[2]);
    pthread_mutex_unlock(&lock);
    return num_access == 1 ? code : INVALID;
}

int cuMemUnmap(uint64_t address, size_t num_bytes) {
    pthread_mutex_lock(&lock);
    int code = noted("cuMemUnmap", address, num_bytes, 0);
    if (!code) {
        int64_t num_left = 0;
        for (int64_t at = 0; at < fake_num_pages; at++)
            if (pages[at].address < address || pages[at].address >= address + num_bytes)
                pages[num_left++] = pages[at];
        code = num_left + (int64_t)(num_bytes / (fake_num_pages ? pages[0].num_bytes : 1)) == fake_num_pages ? 0 : INVALID;
        fake_num_pages = num_left;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemcpyHtoDAsync_v2(uint64_t destination, const void *source, size_t num_bytes, void *stream) {
    pthread_mutex_lock(&lock);
    int code = noted("cuMemcpyHtoDAsync_v2", destination, num_bytes, (uint64_t)(uintptr_t)stream);
    int64_t num_under_way = 0, now = now_ns();
    for (int64_t at = num_queued > 256 ? num_queued - 256 : 0; at < num_queued; at++)
        num_under_way += queued[at]->passes_ns > now;
    if (num_under_way + 1 > fake_max_queued)
        fake_max_queued = num_under_way + 1;
    pthread_mutex_unlock(&lock);
    if (!code)
        memcpy((void *)(uintptr_t)destination, source, num_bytes);
    return code;
}

int cuEventCreate(void **made, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = noted("cuEventCreate", flags, 0, 0);
    if (!code) {
        *made = &events[num_events++];
        fake_num_events++;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int cuEventRecord(event *one, void *stream) {
    pthread_mutex_lock(&lock);
    int code = noted("cuEventRecord", (uint64_t)(one - events), (uint64_t)(uintptr_t)stream, 0);
    if (!code) {
        int64_t now = now_ns();
        last_pass_ns = (last_pass_ns > now ? last_pass_ns : now) + fake_pass_ns;
        one->passes_ns = last_pass_ns;
        queued[num_queued++] = one;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int cuEventSynchronize(event *one) {
    pthread_mutex_lock(&lock);
    int code = noted("cuEventSynchronize", (uint64_t)(one - events), 0, 0);
    pthread_mutex_unlock(&lock);
    if (!one->passes_ns)
        return INVALID;
    sleep_ns(one->passes_ns - now_ns());
    return code;
}

int cuEventQuery(event *one) { return one->passes_ns <= now_ns() ? 0 : NOT_READY; }

int cuEventDestroy_v2(event *one) {
    pthread_mutex_lock(&lock);
    fake_num_events--;
    one->passes_ns = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuStreamSynchronize(void *stream) {
    pthread_mutex_lock(&lock);
    int code = noted("cuStreamSynchronize", (uint64_t)(uintptr_t)stream, 0, 0);
    pthread_mutex_unlock(&lock);
    return code;
}

int cuStreamWaitEvent(void *stream, event *one, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = noted("cuStreamWaitEvent", (uint64_t)(uintptr_t)stream, (uint64_t)(one - events), flags);
    pthread_mutex_unlock(&lock);
    return code;
}
