/* The calls of cuBLASLt that Hearth makes, for bfloat16 in host memory. It proposes kernels 1 to 6 of its own:
   2 says that it wants scratch memory, 3 that it cannot, 4 refuses to run, 5 computes something else. For 10
   rows it also has 7, which can do with others, and for 2 rows 8, which cannot. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { uint64_t rows, columns; int64_t stride; int type; } layout_t;
typedef struct { int compute, scale, transposes_a; } product_t;
typedef struct { uint64_t words[8]; size_t workspace; int status; float waves; int reserved[4]; } heuristic_t;

int last_algorithm;
void *last_stream;

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **handle) { *handle = &last_algorithm; return 0; }
int cublasLtMatmulDescCreate(product_t **out, int compute, int scale) {
    product_t *made = calloc(1, sizeof *made);
    made->compute = compute, made->scale = scale;
    *out = made;
    return 0;
}
int cublasLtMatmulDescSetAttribute(product_t *product, int name, const void *value, size_t size) {
    if (name != 3 || size != 4) return 7;
    memcpy(&product->transposes_a, value, 4);
    return 0;
}
int cublasLtMatrixLayoutCreate(layout_t **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    layout_t *made = malloc(sizeof *made);
    made->rows = rows, made->columns = columns, made->stride = stride, made->type = type;
    *out = made;
    return 0;
}
int cublasLtMatmulPreferenceCreate(uint64_t **out) { *out = malloc(8); **out = ~0ull; return 0; }
int cublasLtMatmulPreferenceDestroy(uint64_t *preference) { free(preference); return 0; }
int cublasLtMatmulPreferenceSetAttribute(uint64_t *preference, int name, const void *value, size_t size) {
    if (name != 1 || size != 8) return 7;
    memcpy(preference, value, 8);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, product_t *product, layout_t *a, layout_t *b, layout_t *c,
                                   layout_t *d, uint64_t *preference, int most, heuristic_t *found, int *count) {
    if (handle != &last_algorithm || *preference != 0 || a->columns == 13) return 15;
    *count = 0;
    for (int kernel = 1; kernel <= 6 && *count < most; kernel++) {
        heuristic_t *one = &found[(*count)++];
        memset(one, 0, sizeof *one);
        one->words[0] = kernel, one->words[7] = 77;
        one->workspace = kernel == 2 ? 4096 : 0;
        one->status = kernel == 3 ? 15 : 0;
    }
    if (*count < most && (b->columns == 10 || b->columns == 2)) {
        heuristic_t *one = &found[(*count)++];
        memset(one, 0, sizeof *one);
        one->words[0] = b->columns == 10 ? 7 : 8, one->words[7] = 77;
    }
    return 0;
}
int cublasLtMatmulAlgoCheck(void *handle, product_t *product, layout_t *a, layout_t *b, layout_t *c, layout_t *d,
                            const uint64_t *words, heuristic_t *result) {
    if (handle != &last_algorithm || words[7] != 77) return 7;
    memset(result, 0, sizeof *result);
    result->workspace = words[0] == 2 ? 4096 : 0;
    result->status = words[0] == 3 ? 15 : 0;
    return words[0] == 8 && b->columns != 2 ? 15 : 0;
}

static float wide(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
/* Columns first: d[row + column * stride] = sum of a transposed and b. */
int cublasLtMatmul(void *handle, product_t *product, const float *alpha, const uint16_t *a, layout_t *a_is,
                   const uint16_t *b, layout_t *b_is, const float *beta, const uint16_t *c, layout_t *c_is,
                   uint16_t *d, layout_t *d_is, const uint64_t *words, void *workspace, size_t workspace_bytes,
                   void *stream) {
    if (handle != &last_algorithm || words[7] != 77 || workspace || workspace_bytes) return 7;
    if (product->compute != 68 || product->scale != 0 || product->transposes_a != 1) return 7;
    if (a_is->type != 14 || b_is->type != 14 || d_is->type != 14 || c != d) return 15;
    if (a_is->columns != d_is->rows || b_is->columns != d_is->columns || a_is->rows != b_is->rows) return 7;
    if (words[0] == 4) return 15;
    last_algorithm = (int)words[0], last_stream = stream;
    for (uint64_t row = 0; row < d_is->rows; row++)
        for (uint64_t column = 0; column < d_is->columns; column++) {
            float sum = 0;
            for (uint64_t i = 0; i < a_is->rows; i++)
                sum += wide(a[i + row * a_is->stride]) * wide(b[i + column * b_is->stride]);
            if (words[0] == 5) sum = -sum;
            uint64_t at = row + column * d_is->stride;
            d[at] = narrow(*alpha * sum + (*beta ? *beta * wide(c[at]) : 0));
        }
    return 0;
}
