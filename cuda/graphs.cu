#include "cuda/graphs.h"

static bool same_key(const GraphKey &a, const GraphKey &b) {
    return a.part == b.part && a.B == b.B && a.T == b.T && a.masked == b.masked && a.first == b.first &&
           a.arriving == b.arriving && a.sums == b.sums && a.scale == b.scale;
}

Graph *graphs_find(Graphs *graphs, const GraphKey &key) {
    if (!graphs->on) return NULL;
    for (Graph &graph : graphs->all)
        if (same_key(graph.key, key)) return &graph;
    graphs->all.push_back({key, NULL});
    return NULL;
}

void graphs_drop(Graphs *graphs) {
    for (Graph &graph : graphs->all)
        if (graph.exec) CUDA_CHECK(cudaGraphExecDestroy(graph.exec));
    graphs->all.clear();
}

static void check(cudaError_t error, const char *what) {
    if (error)
        fail(EXIT_PEER, "rank %d: cannot %s a CUDA graph: %s.\n  Pass --graphs 0 to run without CUDA graphs.",
             process.rank, what, cudaGetErrorString(error));
}

// Only this thread's calls matter: others, such as the heartbeat's, do not use CUDA.
void graph_begin(cudaStream_t stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
}

void graph_end(Graph *graph, cudaStream_t stream) {
    cudaGraph_t captured;
    check(cudaStreamEndCapture(stream, &captured), "capture");
    check(cudaGraphInstantiate(&graph->exec, captured, 0), "instantiate");
    CUDA_CHECK(cudaGraphDestroy(captured));
}
