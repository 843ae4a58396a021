/* Reads a part of a file and hashes it on the way, without the interpreter.
 *
 * A loop in Python must take the interpreter's lock after every read and every hash; beside a dozen other
 * readers that costs more than the hashing. In here a reader takes it once per chunk, so it can also afford
 * small pieces: a piece is hashed while the core's own cache holds it.
 *
 * The hash functions are those of the library that Python's xxhash brings; they come as pointers.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t low, high;
} hash128;

typedef struct {
    void *(*create)(void);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t num_bytes);
    hash128 (*digest)(const void *state);
    int (*destroy)(void *state);
} hash_functions;

typedef struct {
    uint64_t low, high; /* of the hash */
    double hash_s;      /* the part of the call's time that hashing took */
} hashed_read;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Fill `out` from `offset` on, in reads of at most `piece_bytes`. Returns how many bytes came before the file
 * ended or a read was not a multiple of `block_bytes`, or a negative errno. */
int64_t hearth_read_hashed(int fd, int64_t offset, char *out, int64_t num_bytes, int64_t piece_bytes,
                           int64_t block_bytes, const hash_functions *hash, hashed_read *result) {
    void *state = hash->create();
    int64_t done = 0;
    if (state == NULL)
        return -ENOMEM;
    hash->reset(state);
    result->hash_s = 0.0;
    while (done < num_bytes) {
        int64_t wanted = num_bytes - done < piece_bytes ? num_bytes - done : piece_bytes;
        ssize_t got = pread(fd, out + done, (size_t)wanted, (off_t)(offset + done));
        if (got < 0) {
            if (errno == EINTR)
                continue;
            done = -(int64_t)errno;
            break;
        }
        if (got == 0)
            break;
        double began_s = now_s();
        hash->update(state, out + done, (size_t)got);
        result->hash_s += now_s() - began_s;
        done += got;
        if (got % block_bytes)
            break;
    }
    if (done >= 0) {
        hash128 found = hash->digest(state);
        result->low = found.low;
        result->high = found.high;
    }
    hash->destroy(state);
    return done;
}
