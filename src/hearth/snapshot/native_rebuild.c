/* Rebuilds a packed graph (graph_nodes.py) by driver calls, without the interpreter.
 *
 * In Python a node costs twice as much as in the driver, and other threads wait for the interpreter. Here a
 * whole graph is one call: the driver's structures point into the packed bytes, and the driver copies them.
 *
 * The driver's functions are passed as pointers. Constants and structures are those of CUDA 13.0's cuda.h.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The driver. */

enum { KERNEL = 0, MEMCPY = 1, MEMSET = 2, EMPTY = 5 };
enum { PARAM_END = 0, PARAM_BUFFER_POINTER = 1, PARAM_BUFFER_SIZE = 2 };
enum { ATTRIBUTE_BYTES = 64 };

typedef struct {
    uint64_t function;
    uint32_t grid[3], block[3], shared_bytes;
    void **parameters, **extra;
    void *kernel, *context;
} kernel_params;

typedef struct {
    uint8_t bytes[8];
} edge_data;

/* In the order of `CALLS` in native_rebuild.py. */
enum {
    CREATE,
    ADD_KERNEL,
    ADD_MEMSET,
    ADD_MEMCPY,
    ADD_EMPTY,
    SET_ATTRIBUTE,
    COPY_ATTRIBUTES,
    ADD_DEPENDENCIES,
    INSTANTIATE,
    DESTROY,
    DESTROY_EXECUTABLE,
};

typedef struct {
    int (*create)(void **graph, unsigned flags);
    int (*add_kernel)(void **node, void *graph, void *const *before, size_t num_before, const kernel_params *);
    int (*add_memset)(void **node, void *graph, void *const *before, size_t num_before, const void *, void *context);
    int (*add_memcpy)(void **node, void *graph, void *const *before, size_t num_before, const void *, void *context);
    int (*add_empty)(void **node, void *graph, void *const *before, size_t num_before);
    int (*set_attribute)(void *node, int id, const void *value);
    int (*copy_attributes)(void *target, void *source);
    int (*add_dependencies)(void *graph, void *const *sources, void *const *targets, const edge_data *, size_t);
    int (*instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*destroy)(void *graph);
    int (*destroy_executable)(void *executable);
} driver_calls;

/* A packed graph, as graph_nodes.py has it. */

enum { KERNELS, PARAMETERS, NAMES, NODES, ATTRIBUTES, EDGES, BLOBS, NUM_SECTIONS };
enum { ALIGNMENT = 64 };

typedef struct {
    char magic[8];
    uint64_t counts[NUM_SECTIONS];
} header;

typedef struct {
    uint32_t name_bytes, binary_bytes, first_parameter, num_parameters;
    uint32_t registers, static_shared_bytes, dynamic_shared_bytes, has_large_clusters;
} kernel_row;

typedef struct {
    uint32_t offset, num_bytes;
} parameter_row;

typedef struct {
    uint32_t kind, kernel, grid[3], block[3], shared_bytes, is_one_buffer;
    uint32_t blob, blob_bytes, first_attribute, num_attributes;
} node_row;

typedef struct {
    uint32_t id;
    uint8_t value[ATTRIBUTE_BYTES];
} attribute_row;

typedef struct {
    uint32_t source, target;
    edge_data data;
} edge_row;

typedef struct {
    const kernel_row *kernels;
    const parameter_row *parameters;
    const node_row *nodes;
    const attribute_row *attributes;
    const edge_row *edges;
    const char *blobs;
    uint64_t num_kernels, num_nodes, num_edges;
    uint32_t max_parameters; /* of any kernel */
} packed_graph;

static const uint64_t ROW_BYTES[NUM_SECTIONS] = {
    sizeof(kernel_row), sizeof(parameter_row), 1, sizeof(node_row), sizeof(attribute_row), sizeof(edge_row), 1,
};

static uint64_t aligned(uint64_t count) { return (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Find the sections. Returns 0 if they do not have the lengths that the header says. */
static int find_sections(const char *packed, uint64_t num_bytes, packed_graph *graph) {
    const header *head = (const header *)packed;
    const char *begins[NUM_SECTIONS];
    uint64_t at = aligned(sizeof(header));
    if (num_bytes < at || memcmp(head->magic, "hgraph01", sizeof head->magic))
        return 0;
    for (int section = 0; section < NUM_SECTIONS; section++) {
        uint64_t count = head->counts[section];
        if (count > (num_bytes - at) / ROW_BYTES[section])
            return 0;
        begins[section] = packed + at;
        at = aligned(at + count * ROW_BYTES[section]);
        if (at > num_bytes)
            return 0;
    }
    *graph = (packed_graph){
        .kernels = (const kernel_row *)begins[KERNELS],
        .parameters = (const parameter_row *)begins[PARAMETERS],
        .nodes = (const node_row *)begins[NODES],
        .attributes = (const attribute_row *)begins[ATTRIBUTES],
        .edges = (const edge_row *)begins[EDGES],
        .blobs = begins[BLOBS],
        .num_kernels = head->counts[KERNELS],
        .num_nodes = head->counts[NODES],
        .num_edges = head->counts[EDGES],
    };
    for (uint64_t kernel = 0; kernel < graph->num_kernels; kernel++)
        if (graph->kernels[kernel].num_parameters > graph->max_parameters)
            graph->max_parameters = graph->kernels[kernel].num_parameters;
    return at == num_bytes;
}

/* Rebuilding. */

enum { BUILT, DAMAGED, REFUSED, OUT_OF_MEMORY };

typedef struct {
    void *executable; /* the caller's to destroy, if the graph was built */
    int32_t call, code; /* of the driver's last refusal */
} rebuilt;

typedef struct {
    const driver_calls *calls;
    void *context, *graph;
    const uint64_t *functions; /* of the kernels */
    void **nodes;              /* handles */
    void **pointers;           /* to the parameters of one kernel */
    void **sources, **targets; /* of edges */
    edge_data *data;
    uint32_t *models; /* a node of each kind that has attributes */
    rebuilt *result;
} builder;

/* Note a call that the driver has refused. Returns 0 if it has not. */
static int is_refused(builder *build, int call, int code) {
    if (code) {
        build->result->call = call;
        build->result->code = code;
    }
    return code != 0;
}

static int add_kernel(builder *build, const packed_graph *graph, const node_row *node, void **handle) {
    char *blob = (char *)graph->blobs + node->blob; /* which the driver only reads */
    size_t num_bytes = node->blob_bytes;
    void *extra[5] = {(void *)PARAM_BUFFER_POINTER, blob, (void *)PARAM_BUFFER_SIZE, &num_bytes, (void *)PARAM_END};
    kernel_params params = {.function = build->functions[node->kernel], .shared_bytes = node->shared_bytes};
    memcpy(params.grid, node->grid, sizeof params.grid);
    memcpy(params.block, node->block, sizeof params.block);
    if (node->is_one_buffer) {
        params.extra = extra;
    } else {
        const kernel_row *kernel = &graph->kernels[node->kernel];
        for (uint32_t index = 0; index < kernel->num_parameters; index++)
            build->pointers[index] = blob + graph->parameters[kernel->first_parameter + index].offset;
        params.parameters = build->pointers;
    }
    return is_refused(build, ADD_KERNEL, build->calls->add_kernel(handle, build->graph, NULL, 0, &params));
}

static int add_nodes(builder *build, const packed_graph *graph) {
    const driver_calls *calls = build->calls;
    for (uint64_t at = 0; at < graph->num_nodes; at++) {
        const node_row *node = &graph->nodes[at];
        const char *blob = graph->blobs + node->blob;
        void **handle = &build->nodes[at], *to = build->graph, *context = build->context;
        int has_failed;
        switch (node->kind) {
        case KERNEL:
            has_failed = add_kernel(build, graph, node, handle);
            break;
        case MEMSET:
            has_failed = is_refused(build, ADD_MEMSET, calls->add_memset(handle, to, NULL, 0, blob, context));
            break;
        case MEMCPY:
            has_failed = is_refused(build, ADD_MEMCPY, calls->add_memcpy(handle, to, NULL, 0, blob, context));
            break;
        default:
            has_failed = is_refused(build, ADD_EMPTY, calls->add_empty(handle, to, NULL, 0));
        }
        if (has_failed)
            return 0;
    }
    return 1;
}

/* Set the attributes of one node of each kind, and copy them to the others in one call each. */
static int set_attributes(builder *build, const packed_graph *graph) {
    uint64_t num_models = 0;
    for (uint64_t at = 0; at < graph->num_nodes; at++) {
        const node_row *node = &graph->nodes[at];
        uint64_t model = 0;
        if (!node->num_attributes)
            continue;
        for (; model < num_models; model++) {
            const node_row *other = &graph->nodes[build->models[model]];
            if (other->kernel == node->kernel && other->first_attribute == node->first_attribute &&
                other->num_attributes == node->num_attributes)
                break;
        }
        if (model < num_models) {
            void *source = build->nodes[build->models[model]];
            if (is_refused(build, COPY_ATTRIBUTES, build->calls->copy_attributes(build->nodes[at], source)))
                return 0;
            continue;
        }
        build->models[num_models++] = (uint32_t)at;
        for (uint32_t index = 0; index < node->num_attributes; index++) {
            const attribute_row *own = &graph->attributes[node->first_attribute + index];
            uint64_t value[ATTRIBUTE_BYTES / sizeof(uint64_t)]; /* aligned as the driver's */
            memcpy(value, own->value, ATTRIBUTE_BYTES);
            if (is_refused(build, SET_ATTRIBUTE, build->calls->set_attribute(build->nodes[at], (int)own->id, value)))
                return 0;
        }
    }
    return 1;
}

static int add_edges(builder *build, const packed_graph *graph) {
    for (uint64_t at = 0; at < graph->num_edges; at++) {
        build->sources[at] = build->nodes[graph->edges[at].source];
        build->targets[at] = build->nodes[graph->edges[at].target];
        build->data[at] = graph->edges[at].data;
    }
    if (!graph->num_edges)
        return 1;
    return !is_refused(build, ADD_DEPENDENCIES,
                       build->calls->add_dependencies(build->graph, build->sources, build->targets, build->data,
                                                      graph->num_edges));
}

/* Build a graph and make it executable. If the driver refuses, nothing remains. */
static int rebuild(builder *build, const packed_graph *graph) {
    rebuilt *result = build->result;
    int is_built;
    if (is_refused(build, CREATE, build->calls->create(&build->graph, 0)))
        return REFUSED;
    is_built = add_nodes(build, graph) && set_attributes(build, graph) && add_edges(build, graph) &&
               !is_refused(build, INSTANTIATE, build->calls->instantiate(&result->executable, build->graph, 0));
    if (is_refused(build, DESTROY, build->calls->destroy(build->graph)) && is_built) {
        build->calls->destroy_executable(result->executable);
        is_built = 0;
    }
    return is_built ? BUILT : REFUSED;
}

/* Rebuild a graph of packed bytes, which begin at a multiple of 64. `functions`: of its kernels. Returns BUILT and
 * fills in `result`, or why not. The context is current on this thread. */
int hearth_rebuild_graph(const driver_calls *calls, void *context, const char *packed, uint64_t num_bytes,
                         const uint64_t *functions, uint64_t num_functions, rebuilt *result) {
    packed_graph graph;
    int outcome;
    memset(result, 0, sizeof *result);
    if (!find_sections(packed, num_bytes, &graph) || num_functions != graph.num_kernels)
        return DAMAGED;
    builder build = {
        .calls = calls,
        .context = context,
        .functions = functions,
        .nodes = calloc(graph.num_nodes + 1, sizeof *build.nodes),
        .pointers = calloc(graph.max_parameters + 1, sizeof *build.pointers),
        .sources = calloc(graph.num_edges + 1, sizeof *build.sources),
        .targets = calloc(graph.num_edges + 1, sizeof *build.targets),
        .data = calloc(graph.num_edges + 1, sizeof *build.data),
        .models = calloc(graph.num_nodes + 1, sizeof *build.models),
        .result = result,
    };
    outcome = build.nodes && build.pointers && build.sources && build.targets && build.data && build.models
                  ? rebuild(&build, &graph)
                  : OUT_OF_MEMORY;
    free(build.nodes);
    free(build.pointers);
    free(build.sources);
    free(build.targets);
    free(build.data);
    free(build.models);
    return outcome;
}
