/* Batched calls of CUDA's driver, without the interpreter.
 *
 * Each call takes microseconds, but a Python thread either holds the interpreter's lock, which the step thread
 * needs, or releases it and waits to get it back. Here a thread makes all calls for dozens of megabytes without
 * the lock.
 *
 * The driver's functions are passed as pointers, so no CUDA header is needed.
 */
#include <stddef.h>
#include <stdint.h>

/* In the order of `_CALLS` in batches.py. */
typedef struct {
    int (*map)(uint64_t address, size_t num_bytes, size_t offset, uint64_t handle, uint64_t flags);
    int (*set_access)(uint64_t address, size_t num_bytes, const void *access, size_t num_access);
    int (*unmap)(uint64_t address, size_t num_bytes);
    int (*copy)(uint64_t destination, const void *source, size_t num_bytes, void *stream);
    int (*create_event)(void **event, unsigned flags);
    int (*record_event)(void *event, void *stream);
    int (*wait_for_event)(void *event);
    int (*wait_for_stream)(void *stream);
    int (*destroy_event)(void *event);
} driver_calls;

enum { MAP, SET_ACCESS, UNMAP, COPY, CREATE_EVENT, RECORD_EVENT, WAIT_FOR_EVENT };

typedef struct {
    int call;         /* the one that failed, by its place above */
    int code;         /* of the driver; 0: none failed */
    int64_t num_done; /* runs of pages, or chunks whose copies are queued */
} outcome;

enum { BLOCKING_SYNC_WITHOUT_TIMING = 3 };

static int fails(outcome *result, int call, int code) {
    if (code) {
        result->call = call;
        result->code = code;
    }
    return code;
}

/* Map handles to consecutive addresses, and allow access to all; after a failure none is mapped. */
static int map(const driver_calls *driver, uint64_t address, size_t page_bytes, const uint64_t *handles,
               int64_t num_handles, const void *access, outcome *result) {
    int64_t num_mapped = 0;
    while (num_mapped < num_handles &&
           !fails(result, MAP,
                  driver->map(address + num_mapped * page_bytes, page_bytes, 0, handles[num_mapped], 0)))
        num_mapped++;
    if (!result->code)
        fails(result, SET_ACCESS, driver->set_access(address, num_mapped * page_bytes, access, 1));
    if (result->code && num_mapped) /* a failure of this is worse: something stays mapped */
        fails(result, UNMAP, driver->unmap(address, num_mapped * page_bytes));
    return result->code;
}

typedef struct {
    uint64_t address, num_pages, num_handles; /* as many handles as pages, or none: they are unmapped */
} page_run;

/* Unmap and map runs of pages, in their order, until one is refused. */
void hearth_remap(const driver_calls *driver, size_t page_bytes, const page_run *runs, int64_t num_runs,
                  const uint64_t *handles, const void *access, outcome *result) {
    result->code = 0;
    for (result->num_done = 0; result->num_done < num_runs; result->num_done++) {
        const page_run *run = &runs[result->num_done];
        if (run->num_handles
                ? map(driver, run->address, page_bytes, handles, run->num_handles, access, result)
                : fails(result, UNMAP, driver->unmap(run->address, run->num_pages * page_bytes)))
            return;
        handles += run->num_handles;
    }
}

typedef struct {
    uint64_t destination, source, num_bytes;
} byte_copy;

/* Queue the copies of chunks, each followed by an event, with at most `max_queued` chunks in flight. `copy_ends`
 * has the end of each chunk's copies, `events` room for all chunks of the load, of which `first` were queued
 * before. Ends early once `is_stopped`. */
void hearth_copy_chunks(const driver_calls *driver, void *stream, const byte_copy *copies,
                        const int64_t *copy_ends, void **events, int64_t first, int64_t num_chunks,
                        int64_t max_queued, const volatile int *is_stopped, outcome *result) {
    int64_t copy = 0;
    result->code = 0;
    for (result->num_done = 0; result->num_done < num_chunks; result->num_done++) {
        int64_t at = first + result->num_done;
        if (at >= max_queued &&
            fails(result, WAIT_FOR_EVENT, driver->wait_for_event(events[at - max_queued])))
            return;
        if (*is_stopped)
            return;
        for (; copy < copy_ends[result->num_done] && !result->code; copy++)
            fails(result, COPY,
                  driver->copy(copies[copy].destination, (const void *)(uintptr_t)copies[copy].source,
                               copies[copy].num_bytes, stream));
        if (!result->code)
            fails(result, CREATE_EVENT, driver->create_event(&events[at], BLOCKING_SYNC_WITHOUT_TIMING));
        if (!result->code)
            fails(result, RECORD_EVENT, driver->record_event(events[at], stream));
        if (result->code) {
            driver->wait_for_stream(stream); /* some of its copies may be queued, and its memory is returned */
            return;
        }
    }
}

/* Destroy events that have passed; those that were never made are null. */
void hearth_destroy_events(const driver_calls *driver, void **events, int64_t num_events) {
    for (int64_t at = 0; at < num_events; at++)
        if (events[at])
            driver->destroy_event(events[at]);
}
