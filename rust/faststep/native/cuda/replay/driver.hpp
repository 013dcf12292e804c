// The functions of the CUDA driver that replay and the clock of operations call, looked up in the one that libmlx has loaded.
#pragma once

#include "cuda.h"

namespace faststep::replay {

// A copy of `WidthInBytes` bytes, as CUDA_MEMCPY3D describes it.
struct Copy {
  size_t srcXInBytes = 0, srcY = 0, srcZ = 0, srcLOD = 0;
  unsigned srcMemoryType = 2; // CU_MEMORYTYPE_DEVICE
  const void* srcHost = nullptr;
  CUdeviceptr srcDevice = 0;
  void* srcArray = nullptr;
  void* reserved0 = nullptr;
  size_t srcPitch = 0, srcHeight = 0;
  size_t dstXInBytes = 0, dstY = 0, dstZ = 0, dstLOD = 0;
  unsigned dstMemoryType = 2;
  void* dstHost = nullptr;
  CUdeviceptr dstDevice = 0;
  void* dstArray = nullptr;
  void* reserved1 = nullptr;
  size_t dstPitch = 0, dstHeight = 0;
  size_t WidthInBytes = 0, Height = 1, Depth = 1;
};

// A node that fills memory, as CUDA_MEMSET_NODE_PARAMS describes it.
struct Fill {
  CUdeviceptr dst = 0;
  size_t pitch = 0;
  unsigned value = 0, elementSize = 0;
  size_t width = 0, height = 0;
};

// Some values of CUgraphNodeType.
inline constexpr int fill_node = 2, child_node = 4;

struct Driver {
  CUresult (*cuCtxGetCurrent)(CUcontext*);
  CUresult (*cuCtxSetCurrent)(CUcontext);
  CUresult (*cuEventCreate)(CUevent*, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent);
  CUresult (*cuEventElapsedTime)(float* milliseconds, CUevent from, CUevent to);
  CUresult (*cuEventRecord)(CUevent, CUstream);
  CUresult (*cuEventSynchronize)(CUevent);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuGraphAddDependencies)(CUgraph, const CUgraphNode*, const CUgraphNode*, size_t);
  CUresult (*cuGraphAddEmptyNode)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t);
  CUresult (*cuGraphAddEventRecordNode)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUevent);
  CUresult (*cuGraphAddMemcpyNode)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, const Copy*, CUcontext);
  CUresult (*cuGraphAddMemsetNode)(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, const Fill*, CUcontext);
  CUresult (*cuGraphChildGraphNodeGetGraph)(CUgraphNode, CUgraph*);
  CUresult (*cuGraphCreate)(CUgraph*, unsigned);
  CUresult (*cuGraphDestroy)(CUgraph);
  CUresult (*cuGraphDestroyNode)(CUgraphNode);
  CUresult (*cuGraphExecDestroy)(CUgraphExec);
  CUresult (*cuGraphGetNodes)(CUgraph, CUgraphNode*, size_t*);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec*, CUgraph, unsigned long long);
  CUresult (*cuGraphLaunch)(CUgraphExec, CUstream);
  CUresult (*cuGraphMemsetNodeGetParams)(CUgraphNode, Fill*);
  CUresult (*cuGraphNodeGetDependencies)(CUgraphNode, CUgraphNode*, size_t*);
  CUresult (*cuGraphNodeGetType)(CUgraphNode, int*);
  CUresult (*cuGraphUpload)(CUgraphExec, CUstream);
  CUresult (*cuMemFreeHost)(void*);
  CUresult (*cuMemHostAlloc)(void**, size_t, unsigned flags);
  CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream);
  CUresult (*cuStreamSynchronize)(CUstream);
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned flags);
};

// Throws where there is no driver, or one that lacks a function.
const Driver& driver();

// Throws with the driver's words.
void check(CUresult result, const char* what);

inline CUdeviceptr device_pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

} // namespace faststep::replay
