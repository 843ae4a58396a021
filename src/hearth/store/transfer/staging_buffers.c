/* Fills slots of memory from a file by threads of their own, which never take the interpreter's lock.
 *
 * All threads are at the oldest slot that is not full, a piece each: so slots fill in the order in which they
 * were asked for, nearly one at a time, and few of them are enough. Threads stand for as long as the process.
 */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

typedef struct slot {
    struct slot *next; /* asked for after this one */
    char *out;
    int64_t offset, num_bytes;
    int64_t begun;   /* bytes that some thread has taken on */
    int64_t missing; /* bytes that are not there yet */
    int32_t fd;
    int32_t error; /* errno, the first that a thread has met */
} slot;

/* Guards all slots but what lies at `out`, and the two below: those with pieces that nobody has taken on. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, filled = PTHREAD_COND_INITIALIZER;
static slot *oldest, *newest;
static int64_t piece_bytes;

/* Read a piece; returns 0 or errno. A file that ends before it is as broken as one that cannot be read. */
static int read_piece(int fd, char *out, int64_t num_bytes, int64_t offset) {
    while (num_bytes > 0) {
        ssize_t got = pread(fd, out, (size_t)num_bytes, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno;
        if (got == 0)
            return ENODATA;
        out += got;
        offset += got;
        num_bytes -= got;
    }
    return 0;
}

static void *fill(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (oldest == NULL)
            pthread_cond_wait(&asked, &lock);
        slot *one = oldest;
        int64_t begin = one->begun, rest = one->num_bytes - begin;
        int64_t num_bytes = rest < piece_bytes ? rest : piece_bytes;
        one->begun += num_bytes;
        if (num_bytes == rest)
            oldest = one->next;
        pthread_mutex_unlock(&lock);
        int error = read_piece(one->fd, one->out + begin, num_bytes, one->offset + begin);
        pthread_mutex_lock(&lock);
        if (error && !one->error)
            one->error = error;
        one->missing -= num_bytes;
        if (one->missing == 0)
            pthread_cond_broadcast(&filled);
    }
    return NULL;
}

/* Start threads, once in a process; returns how many there are: fewer where there can be no more. */
int hearth_staging_start(int num_threads, int64_t bytes_of_a_piece) {
    int num_started = 0;
    pthread_t thread;
    piece_bytes = bytes_of_a_piece;
    while (num_started < num_threads && pthread_create(&thread, NULL, fill, NULL) == 0) {
        pthread_detach(thread);
        num_started++;
    }
    return num_started;
}

/* Have a slot filled that nobody fills, from `offset` on, with at least one byte. Takes microseconds. */
void hearth_staging_ask(slot *one, int fd, int64_t offset, char *out, int64_t num_bytes) {
    pthread_mutex_lock(&lock);
    *one = (slot){.fd = fd, .out = out, .offset = offset, .num_bytes = num_bytes, .missing = num_bytes};
    if (oldest == NULL)
        oldest = one;
    else
        newest->next = one;
    newest = one;
    pthread_cond_broadcast(&asked);
    pthread_mutex_unlock(&lock);
}

/* Returns -1 while a slot is being filled, then 0 or errno. Takes microseconds. */
int hearth_staging_state(slot *one) {
    pthread_mutex_lock(&lock);
    int state = one->missing ? -1 : one->error;
    pthread_mutex_unlock(&lock);
    return state;
}

/* Wait until a slot is full, or never will be; returns 0 or errno. */
int hearth_staging_wait(slot *one) {
    pthread_mutex_lock(&lock);
    while (one->missing)
        pthread_cond_wait(&filled, &lock);
    int error = one->error;
    pthread_mutex_unlock(&lock);
    return error;
}
