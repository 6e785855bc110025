// CUDA graphs of work that is queued again and again: the same kernels, copies, fills and matmuls with the same
// arguments. The device starts the operations of a graph with shorter gaps than those of a stream, and the host queues
// all of them with one call.
//
// A graph keeps the arguments of its capture. Whatever differs from one time to the next therefore has to be in device
// memory that the arguments point to, or in the key. During a capture the host must not wait for the device or allocate
// memory, so the first use of a key queues the work as usual: at first use cuBLASLt's algorithms are timed, and CUDA
// loads kernels. The second use captures.
//
// Tests: dev/tests/test_cuda.py, dev/cuda_on_cpu.
#ifndef CUDA_GRAPHS_H
#define CUDA_GRAPHS_H

#include <cuda_runtime.h>
#include <stddef.h>

#include <vector>

#include "cuda/check.h"

// What distinguishes a micro-batch's work from another's.
struct GraphKey {
    size_t part;    // of the work; the program numbers them
    size_t B, T;
    bool masked, first, arriving, sums;
    float scale;
};

struct Graph {
    GraphKey key;
    cudaGraphExec_t exec;    // NULL before the capture
};

struct Graphs {
    bool on;    // otherwise work is queued as usual
    std::vector<Graph> all;
};

// Returns the graph for the key, or NULL if this is the key's first use, or graphs are off.
Graph *graphs_find(Graphs *graphs, const GraphKey &key);

// Destroys all graphs; call it when anything changes that is not in the key. None may be in progress.
void graphs_drop(Graphs *graphs);

// Between these two, work queued in the stream is recorded in the graph instead of being carried out.
void graph_begin(cudaStream_t stream);
void graph_end(Graph *graph, cudaStream_t stream);

// Queues work() in the stream, by itself or as a graph. The work must not involve other streams.
template <class Work>
void graphs_run(Graphs *graphs, const GraphKey &key, cudaStream_t stream, Work work) {
    Graph *graph = graphs_find(graphs, key);
    if (!graph) {
        work();
        return;
    }
    if (!graph->exec) {
        graph_begin(stream);
        work();
        graph_end(graph, stream);
    }
    CUDA_CHECK(cudaGraphLaunch(graph->exec, stream));
}

#endif
