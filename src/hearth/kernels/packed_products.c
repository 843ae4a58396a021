// Products of float32 activations and weights of 4 or 8 bits, which stay packed in memory.
//
// Outputs are taken BLOCK at a time, inputs by chunks of 128, which are eight vectors: a chunk of a block is
// widened into the first-level cache, and each row of the activations is multiplied by it.

#include <stdint.h>
#include <string.h>

// OpenMP's threads, which are torch's: its library is loaded for all.
extern void GOMP_parallel(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

#ifdef __AVX512F__
#define VECTOR __attribute__((vector_size(64)))
#else
#define VECTOR __attribute__((vector_size(32)))
#endif
typedef float floats VECTOR;
typedef int32_t ints VECTOR;
typedef int32_t unaligned_ints VECTOR __attribute__((aligned(4), may_alias));

enum { CHUNK = 128, WORDS = 16, PLANES = CHUNK / WORDS, BLOCK = 8, MAX_ROWS = 32, ZERO_CODE = 8 };
enum { LANES = sizeof(floats) / sizeof(float), VECTORS = CHUNK / LANES };
enum { FOUR_BITS, EIGHT_BITS };
enum { FLOAT32, FLOAT16, BFLOAT16 };

typedef struct {
    int64_t kind, scale_dtype, minimum_dtype;
    int64_t n, k, groups; // groups: of a row of 4-bit codes
    const void *values, *scale, *minimum;
    const float *codebook; // of 16 or 256 values; null: codes are integers
} Weight;

typedef struct {
    int64_t begin, end; // outputs
    int64_t num_rows;   // of x, at most MAX_ROWS; 0: widen only
    const float *x;     // [rows, inputs of whole chunks], zero beyond k
    const float *bias;
    float *out; // [rows, n], or the widened weight [end - begin, k]
} Product;

typedef struct {
    const Weight *weight;
    const Product *product;
} Work;

// A chunk of a block in float32.
typedef float Wide[BLOCK][CHUNK] __attribute__((aligned(64)));

static float as_float(uint32_t bits) { return ((union { uint32_t bits; float value; }){bits}).value; }

// Read BLOCK scales or minimums, of which `count` exist.
static void read_numbers(const void *values, int64_t dtype, int64_t at, int count, float *restrict out) {
    char stored[BLOCK * sizeof(float)] = {0};
    int item_bytes = dtype == FLOAT32 ? 4 : 2;
    const char *from = (const char *)values + at * item_bytes;
    if (count < BLOCK) from = memcpy(stored, from, count * item_bytes);
    const uint16_t *halves = (const uint16_t *)from;
    if (dtype == FLOAT32)
        memcpy(out, from, BLOCK * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int i = 0; i < BLOCK; i++) out[i] = as_float((uint32_t)halves[i] << 16);
    else // in float32's place the exponent is 112 too small
        for (int i = 0; i < BLOCK; i++)
            out[i] = as_float((halves[i] & 0x7fffu) << 13 | (halves[i] & 0x8000u) << 16) * 0x1p112f;
}

// Products and sums are rounded one by one, as in the reference.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("fp-contract=off")))
#endif
static void widen_four_bits(const Weight *weight, int64_t first, int count, int64_t chunk, Wide wide) {
    const int32_t *codes_at = (const int32_t *)weight->values + (chunk * weight->n + first) * WORDS;
    float scale[PLANES][BLOCK] = {0}, minimum[PLANES][BLOCK] = {0};
    int64_t size = weight->k / weight->groups;
    int planes = size < CHUNK && weight->groups > 1 ? (int)size / WORDS : PLANES; // of a group
    int64_t group = chunk * CHUNK / size;
    for (int begin = 0; begin < PLANES && group < weight->groups; begin += planes, group++) {
        int64_t at = group * weight->n + first;
        read_numbers(weight->scale, weight->scale_dtype, at, count, scale[begin]);
        if (weight->minimum) read_numbers(weight->minimum, weight->minimum_dtype, at, count, minimum[begin]);
        for (int plane = begin + 1; plane < begin + planes; plane++) {
            memcpy(scale[plane], scale[begin], sizeof scale[plane]);
            memcpy(minimum[plane], minimum[begin], sizeof minimum[plane]);
        }
    }
    for (int output = 0; output < count; output++) {
        const unaligned_ints *words = (const unaligned_ints *)(codes_at + output * WORDS);
        float *values = wide[output];
        if (weight->codebook) {
            for (int i = 0; i < CHUNK; i++) {
                int code = codes_at[output * WORDS + i % WORDS] >> 4 * (i / WORDS) & 15;
                values[i] = weight->codebook[code] * scale[i / WORDS][output] + minimum[i / WORDS][output];
            }
            continue;
        }
        int zero = weight->minimum ? 0 : ZERO_CODE;
        for (int plane = 0; plane < PLANES; plane++)
            for (int half = 0; half < WORDS / LANES; half++) {
                floats codes = __builtin_convertvector((words[half] >> 4 * plane & 15) - zero, floats);
                codes *= scale[plane][output];
                codes += minimum[plane][output];
                memcpy(values + plane * WORDS + half * LANES, &codes, sizeof codes);
            }
    }
}

static void widen_eight_bits(const Weight *weight, int64_t first, int count, int64_t chunk, Wide wide) {
    int64_t left = weight->k - chunk * CHUNK;
    for (int output = 0; output < count; output++) {
        const int8_t *stored = (const int8_t *)weight->values + (first + output) * weight->k + chunk * CHUNK;
        float *restrict values = wide[output];
        int8_t part[CHUNK];
        if (left < CHUNK) {
            memset(part, 0, sizeof part);
            stored = memcpy(part, stored, left);
        }
        if (weight->codebook)
            for (int i = 0; i < CHUNK; i++) values[i] = weight->codebook[(uint8_t)stored[i]];
        else
            for (int i = 0; i < CHUNK; i++) values[i] = stored[i];
    }
}

static void widen(const Weight *weight, int64_t first, int count, int64_t chunk, Wide wide) {
    (weight->kind == FOUR_BITS ? widen_four_bits : widen_eight_bits)(weight, first, count, chunk, wide);
}

// The scale of whole outputs, by which sums are multiplied.
static float output_scale(const Weight *weight, int64_t output) {
    return weight->kind == FOUR_BITS ? 1.0f : ((const float *)weight->scale)[output];
}

static void multiply(const Weight *weight, const Product *product, int64_t first, int count) {
    floats sums[MAX_ROWS][BLOCK];
    int64_t num_chunks = (weight->k + CHUNK - 1) / CHUNK;
    memset(sums, 0, product->num_rows * sizeof sums[0]);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        Wide wide;
        widen(weight, first, count, chunk, wide);
        for (int64_t row = 0; row < product->num_rows; row++) {
            floats x[VECTORS];
            memcpy(x, product->x + (row * num_chunks + chunk) * CHUNK, sizeof x);
            for (int output = 0; output < count; output++) {
                const floats *factors = (const floats *)wide[output];
                floats even = sums[row][output], odd = {0};
                for (int i = 0; i < VECTORS; i += 2) {
                    even += factors[i] * x[i];
                    odd += factors[i + 1] * x[i + 1];
                }
                sums[row][output] = even + odd;
            }
        }
    }
    for (int64_t row = 0; row < product->num_rows; row++)
        for (int output = 0; output < count; output++) {
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++) sum += sums[row][output][lane];
            sum *= output_scale(weight, first + output);
            if (product->bias) sum += product->bias[first + output];
            product->out[row * weight->n + first + output] = sum;
        }
}

static void write_wide(const Weight *weight, const Product *product, int64_t first, int count) {
    for (int64_t at = 0; at < weight->k; at += CHUNK) {
        Wide wide;
        int64_t num_inputs = weight->k - at < CHUNK ? weight->k - at : CHUNK;
        widen(weight, first, count, at / CHUNK, wide);
        for (int output = 0; output < count; output++) {
            float *out_at = product->out + (first + output - product->begin) * weight->k + at;
            float scale = output_scale(weight, first + output);
            for (int64_t i = 0; i < num_inputs; i++) out_at[i] = wide[output][i] * scale;
        }
    }
}

static void run_share(void *data) {
    const Work *work = data;
    const Product *product = work->product;
    int64_t num_blocks = (product->end - product->begin + BLOCK - 1) / BLOCK;
    int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    int64_t end = num_blocks * (thread + 1) / num_threads;
    for (int64_t block = num_blocks * thread / num_threads; block < end; block++) {
        int64_t first = product->begin + block * BLOCK;
        int count = product->end - first < BLOCK ? (int)(product->end - first) : BLOCK;
        (product->num_rows ? multiply : write_wide)(work->weight, product, first, count);
    }
}

void hearth_packed_product(const Weight *weight, const Product *product, unsigned num_threads) {
    Work work = {weight, product};
    GOMP_parallel(run_share, &work, num_threads, 0);
}
