// Declarations of CUDA's runtime that MLX's headers of its CUDA back end name: types that are the driver's, and
// functions that are never called from here.
#pragma once

#include "cuda.h"

using cudaGraph_t = CUgraph_st*;
using cudaGraphNode_t = CUgraphNode_st*;
using cudaGraphExec_t = CUgraphExec_st*;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
using cudaMemPool_t = CUmemPoolHandle_st*;
struct cudaKernelNodeParams;

enum cudaError_t : int { cudaSuccess = 0 };

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
