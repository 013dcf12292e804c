#include "cuda/replay/driver.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace faststep::replay {

namespace {

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error("there is no CUDA driver");
  }
  Driver all{};
  auto find = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    }
  };
#define FIND(name) find(all.name, #name)
  FIND(cuCtxGetCurrent);
  FIND(cuCtxSetCurrent);
  FIND(cuEventCreate);
  find(all.cuEventDestroy, "cuEventDestroy_v2");
  FIND(cuEventElapsedTime);
  FIND(cuEventRecord);
  FIND(cuEventSynchronize);
  FIND(cuGetErrorString);
  FIND(cuGraphAddDependencies);
  FIND(cuGraphAddEmptyNode);
  FIND(cuGraphAddEventRecordNode);
  FIND(cuGraphAddMemcpyNode);
  FIND(cuGraphAddMemsetNode);
  FIND(cuGraphChildGraphNodeGetGraph);
  FIND(cuGraphCreate);
  FIND(cuGraphDestroy);
  FIND(cuGraphDestroyNode);
  FIND(cuGraphExecDestroy);
  FIND(cuGraphGetNodes);
  FIND(cuGraphInstantiateWithFlags);
  FIND(cuGraphLaunch);
  FIND(cuGraphMemsetNodeGetParams);
  FIND(cuGraphNodeGetDependencies);
  FIND(cuGraphNodeGetType);
  FIND(cuGraphUpload);
  FIND(cuMemFreeHost);
  FIND(cuMemHostAlloc);
  FIND(cuMemcpyAsync);
  FIND(cuMemsetD8Async);
  FIND(cuStreamSynchronize);
  FIND(cuStreamWaitEvent);
#undef FIND
  return all;
}

} // namespace

const Driver& driver() {
  static const Driver all = load_driver();
  return all;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) {
    return;
  }
  const char* text = nullptr;
  driver().cuGetErrorString(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text ? text : "an error of the CUDA driver"));
}

} // namespace faststep::replay
