// Declarations of the CUDA driver that cuda/replay and MLX's headers of its CUDA back end name (its ABI is stable). No part
// of CUDA is needed to build: the functions are looked up in the driver where there is one (cuda/replay/driver.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;
struct CUstream_st;
struct CUevent_st;
struct CUfunc_st;
struct CUctx_st;
struct CUDA_KERNEL_NODE_PARAMS_v2_st;
struct CUmemPoolHandle_st;

using CUgraph = CUgraph_st*;
using CUgraphNode = CUgraphNode_st*;
using CUgraphExec = CUgraphExec_st*;
using CUstream = CUstream_st*;
using CUevent = CUevent_st*;
using CUfunction = CUfunc_st*;
using CUcontext = CUctx_st*;
using CUdeviceptr = unsigned long long;
using CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2_st;

enum CUresult : int { CUDA_SUCCESS = 0 };
